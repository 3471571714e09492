"""A device that is made up: kernels check what they are given as real ones do, and compute in PyTorch on the CPU."""

import contextlib
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from signatures import H100

from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.loader import Reason
from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import i32
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue.nodes import BLOCKS, Kind
from cutlass_ops.run import call, groups, kernels, plan, serving
from cutlass_ops.run.registry import Registry
from cutlass_ops.tools import explaining

# The name of a kernel's run in PyTorch's profiler.
KERNEL = "a kernel of the made-up device"


@dataclass
class FakeDevice:
    """What ran on it, and what was compiled for it; compiling is an error once it is closed."""

    device: object = H100
    loaded: dict = field(default_factory=dict)
    launches: list = field(default_factory=list)
    queued: list = field(default_factory=list)
    closed: bool = False
    repeats: bool = True  # whether kernels can prepare launches
    workspace: int = 0  # bytes that kernels need
    absent: set = field(default_factory=set)  # kernels that only a compiler has
    noted: set = field(default_factory=set)  # kernels whose keys are known
    remote: set = field(default_factory=set)  # absent ones that the remote store has
    waiting: dict = field(default_factory=dict)
    then: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)
    on_device: set = field(default_factory=set)  # kernels that the driver has loaded, each with the device
    left: list = field(default_factory=list)  # what is left to a thread

    def kernel(self, spec):
        return self.kernels([spec])[0]

    def has(self, spec):
        return spec in self.loaded

    def those(self, specs):
        return self.loaded.keys() & specs

    def found(self, spec):
        return None if spec in self.absent else spec

    def at_hand(self, spec, quickly=False):
        unseen = spec in self.absent or (quickly and spec not in self.noted and spec not in self.loaded)
        return None if unseen else self.kernel(spec)

    def take(self, spec, artifact, device):
        assert artifact is spec
        self.ready([spec], device)

    def ready(self, specs, device):
        specs = list(specs)
        self.kernels(specs)
        self.on_device |= {(spec, device) for spec in specs}
        return len(specs)

    def fetched(self, spec):
        return self.kernel(spec) if spec in self.remote else None

    def origin(self, spec):
        return None if spec in self.absent else "compiled here"

    def kernels(self, specs):
        specs = list(specs)
        for spec in specs:
            if spec not in self.loaded:
                assert not self.closed, f"{spec.slug} would have to be compiled"
                self.absent.discard(spec)
                self.loaded[spec] = self._kernel(spec)
        return [self.loaded[spec] for spec in specs]

    @property
    def background(self):
        """Queues what is added, and builds nothing until a test calls :meth:`built`."""
        return SimpleNamespace(
            add=self._add,
            later=self.left.append,
            when_built=lambda spec, do: self.waiting.setdefault(spec, []).append(do),
            failure=self.failed.get,
            pending=self.waiting.__contains__,
        )

    def _add(self, specs, first=False, then=None):
        self.queued += (specs := list(specs))
        if then is not None:
            for spec in specs:
                self.then.setdefault(spec, then)

    def built(self, spec):
        """Have a kernel arrive from the background."""
        self.absent.discard(spec)
        if spec in self.then:
            self.then.pop(spec)(spec, spec)
        for do in self.waiting.pop(spec, ()):
            do(spec)

    def _kernel(self, spec):
        graph = spec.epilogue
        count, names = len(graph.inputs) + len(spec.form.operands), [o.name for o in graph.outputs]
        of_form = [Operand(i32, "row", 1) for _ in spec.form.operands]
        types = (spec.a, spec.b, spec.d, *of_form, *spec.inputs, *spec.outputs)
        of_inputs = (*(Kind.ROW for _ in of_form), *(i.kind for i in graph.inputs))
        kinds = (*(Kind.TILE,) * 3, *of_inputs, *(o.kind for o in graph.outputs[1:]))

        def refused(arguments):
            for position, (tensor, operand, kind) in enumerate(zip(arguments, types, kinds, strict=True)):
                reason = _refusal(tensor, operand, kind)
                if reason is not None:
                    return 16 * position + reason.value
            return 0

        def launch(a, b, d, *rest):
            if any(isinstance(x, torch.Tensor) and x.layout is not torch.strided for x in (a, b, d, *rest)):
                raise RuntimeError("Cannot access data pointer of Tensor that doesn't have storage")
            inputs, others, (raster, swizzle, workspace) = rest[:count], rest[count:-3], rest[-3:]
            if status := refused((a, b, d, *inputs, *others)):
                return status
            offsets, inputs = inputs[: len(of_form)], inputs[len(of_form) :]
            named = dict(zip((i.name for i in graph.inputs), inputs, strict=True))
            out = dict(zip(names, (d, *others), strict=True))
            # A kernel sees memory, and refuses no gradient. Its own memory here is none of a GPU's: see accounting.py.
            with torch.no_grad(), torch.profiler.record_function(KERNEL):
                (given,) = offsets or [None]
                math, form = mma.math_of(spec.a.dtype), groups.form_of_call(spec.form, a)
                call.check_call(graph, a, b, named, out, None, offsets=given, math=math, form=form).run_reference()
            self.launches.append(
                SimpleNamespace(spec=spec, raster=raster, swizzle=swizzle, workspace=workspace, outputs=(d, *others))
            )
            return 0

        def prepare(*arguments):
            *arguments, streams = arguments
            assert streams == loader.stream_api()
            status = refused(arguments[:-3])
            return status or ((lambda: launch(*arguments) and None) if self.repeats else None)

        return SimpleNamespace(launch=launch, prepare=prepare, workspace_size=lambda *_: self.workspace)


def _refusal(tensor, operand, kind):
    if isinstance(tensor, float):
        return None
    if str(tensor.dtype) != f"torch.{operand.dtype.torch_name}":
        return Reason.DTYPE
    if kind in (*BLOCKS, Kind.BLOCKS_D):  # scales of blocks have any strides
        return None
    inner = -1 if operand.major == "row" else -2
    if tensor.ndim > 1 and min(tensor.shape[-2:]) > 1 and tensor.stride(inner) != 1:
        return Reason.MAJOR
    if tensor.ndim > 1:
        lines = tensor.stride(-3 - inner) if tensor.shape[-3 - inner] > 1 else 0
        if tensor.data_ptr() % (operand.alignment * tensor.element_size()) or lines % operand.alignment:
            return Reason.ALIGNMENT
    return None


@contextlib.contextmanager
def fake_device(monkeypatch, device=H100):
    """Have ops take CPU tensors for those of a device, and queue what they would compile in the background."""
    fake = FakeDevice(device)
    monkeypatch.setattr(call.Call, "is_reference", False)
    monkeypatch.setattr(kernels.Kernel, "_require_device", lambda kernel, tensor: None)
    for module in (serving, explaining):
        monkeypatch.setattr(module, "device_of", lambda _: fake.device)
    monkeypatch.setattr(plan.torch.cuda, "device", lambda _: contextlib.nullcontext())
    with Session({Registry: fake, Background: fake.background}).active():
        yield fake
