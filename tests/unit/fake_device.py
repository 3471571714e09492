"""A device that is made up: kernels check what they are given as real ones do, and compute in PyTorch on the CPU."""

import contextlib
import functools
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from signatures import H100

from cutlass_ops.artifacts import loader
from cutlass_ops.artifacts.loader import Reason
from cutlass_ops.base import mma
from cutlass_ops.base.dtypes import i32, i64
from cutlass_ops.base.session import Session
from cutlass_ops.compilation.background import Background, Wanted
from cutlass_ops.declare.form import DENSE
from cutlass_ops.declare.spec import Operand
from cutlass_ops.epilogue.nodes import BLOCKS, Kind
from cutlass_ops.operand import call, groups
from cutlass_ops.run import cold, kernels, plan
from cutlass_ops.run.registry import Registry
from cutlass_ops.tools import explaining

# The name of a kernel's run in PyTorch's profiler.
KERNEL = "a kernel of the made-up device"


class Everything(set):
    """A set that has all kernels."""

    def __contains__(self, _):
        return True


@dataclass
class FakeDevice:
    """What ran on it, and what was compiled for it; compiling is an error once it is closed."""

    device: object = H100
    loaded: dict = field(default_factory=dict)
    launches: list = field(default_factory=list)
    needed: list = field(default_factory=list)  # kernels that calls asked for, while PyTorch served
    guessed: list = field(default_factory=list)  # kernels that other calls may need
    closed: bool = False
    repeats: bool = True  # whether kernels can prepare launches
    workspace: int = 0  # bytes that kernels need
    absent: set = field(default_factory=set)  # kernels that only a compiler has
    wanted: dict = field(default_factory=dict)
    failed: dict = field(default_factory=dict)  # kernels that cannot be compiled, and why
    decides: bool = True  # whether what is left to another thread is done at once
    undecided: list = field(default_factory=list)
    on_device: set = field(default_factory=set)  # kernels that the driver has loaded, each with the device
    session: Session | None = None

    def kernel(self, spec):
        return self.kernels([spec])[0]

    def has(self, spec):
        return spec in self.loaded

    def take(self, spec, artifact, device):
        assert artifact == spec
        self.ready([spec], device)

    def ready(self, specs, device):
        specs = list(specs)
        self.kernels(specs)
        self.on_device |= {(spec, device) for spec in specs}
        return len(specs)

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
        """Finds what is not absent, and builds nothing until a test calls :meth:`built`."""
        return SimpleNamespace(
            need=self._need,
            needed=self.wanted.get,
            guess=self._guess,
            soon=lambda do: do() if self.decides else self.undecided.append(do),
        )

    def _need(self, spec, load):
        self.needed.append(spec)
        return self._want(spec, load)

    def _guess(self, specs, load):
        for spec in specs:
            self.guessed.append(spec)
            if spec in self.absent:
                self._want(spec, lambda found, spec=spec: load(spec, found))

    def _want(self, spec, load):
        wanted = self.wanted.get(spec)
        if wanted is None:
            wanted = self.wanted[spec] = Wanted(load, True)
        if wanted.done():
            return wanted
        wanted.looked.set()
        if spec in self.failed:
            wanted.set_exception(self.failed[spec])
        elif spec not in self.absent:
            self.built(spec)
        return wanted

    def built(self, spec):
        """Have a kernel arrive from the background."""
        self.absent.discard(spec)
        wanted = self.wanted.get(spec)
        if wanted is not None and not wanted.done():
            wanted.load(spec)
            wanted.set_result(spec)

    def _kernel(self, spec):
        graph = spec.epilogue
        count, names = len(graph.inputs) + len(spec.form.operands), [o.name for o in graph.outputs]
        of_form = [Operand(i32, "row", 1) for _ in spec.form.operands]
        types = (spec.a, spec.b, spec.d, *of_form, *spec.inputs, *spec.outputs)
        of_inputs = (*(Kind.ROW for _ in of_form), *(i.kind for i in graph.inputs))
        kinds = (*(Kind.TILE,) * 3, *of_inputs, *(o.kind for o in graph.outputs[1:]))

        def refused(arguments):
            for position, (tensor, operand, kind) in enumerate(zip(arguments, types, kinds, strict=True)):
                reason = _refusal(tensor, operand, kind, spec.form != DENSE)
                if reason is not None:
                    return 16 * position + reason.value
            return 0

        def launch(a, b, d, *rest):
            *rest, raster, swizzle, workspace = rest
            written = (d, *rest[count:])
            a, b, d, *rest = map(_in_memory, (a, b, d, *rest))
            inputs, others = rest[:count], rest[count:]
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
                SimpleNamespace(spec=spec, raster=raster, swizzle=swizzle, workspace=workspace, outputs=written)
            )
            return 0

        def prepare(*arguments):
            *arguments, streams = arguments
            assert streams == loader.stream_api()
            status = refused(arguments[:-3])
            return status or ((lambda: launch(*arguments) and None) if self.repeats else None)

        return SimpleNamespace(launch=launch, prepare=prepare, workspace_size=lambda *_: self.workspace)


def _in_memory(value):
    """Return an argument as a kernel has it: a tensor's memory, whatever else PyTorch knows of it.

    PyTorch's own exchange raises for those without any, in the words that a real kernel's caller sees.
    """
    if not isinstance(value, torch.Tensor):
        return value
    _exchange()(value)
    lies = value.storage_offset(), value.shape, value.stride()
    return torch.empty(0, dtype=value.dtype).set_(value.untyped_storage(), *lies)


@functools.cache
def _exchange():
    return loader.as_exported(lambda _: None)


def _refusal(tensor, operand, kind, batched):
    if isinstance(tensor, float):
        return None
    if isinstance(tensor, int):
        return None if operand.dtype is i64 else Reason.KIND
    if tensor.numel() and tensor.data_ptr() == 0:
        return Reason.NULL
    if str(tensor.dtype) != f"torch.{operand.dtype.torch_name}":
        return Reason.DTYPE
    if kind in (*BLOCKS, Kind.BLOCKS_D):  # scales of blocks have any strides
        return None
    if kind is Kind.ROW and not batched and tensor.ndim != 1:
        return Reason.SHAPE
    inner = -1 if operand.major == "row" else -2
    if tensor.ndim > 1 and min(tensor.shape[-2:]) > 1 and tensor.stride(inner) != 1:
        return Reason.MAJOR
    if tensor.ndim > 1:
        lines = tensor.stride(-3 - inner) if tensor.shape[-3 - inner] > 1 else 0
        if tensor.data_ptr() % (operand.alignment * tensor.element_size()) or lines % operand.alignment:
            return Reason.ALIGNMENT
    return None


@contextlib.contextmanager
def fake_device(monkeypatch, device=H100, again=None):
    """Have ops take CPU tensors for those of a device, and queue what they would compile in the background.

    With `again`, it is that device once more, with the kernels and the choices that it has.
    """
    fake = again or FakeDevice(device)
    monkeypatch.setattr(call.Call, "is_reference", False)
    monkeypatch.setattr(kernels.Kernel, "_require_device", lambda kernel, tensor: None)
    for module in (cold, explaining):
        monkeypatch.setattr(module, "device_of", lambda _: fake.device)
    monkeypatch.setattr(plan.torch.cuda, "device", lambda _: contextlib.nullcontext())
    fake.session = fake.session or Session({Registry: fake, Background: fake.background})
    with fake.session.active():
        yield fake
