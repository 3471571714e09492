"""Fused GEMMs for a model that exists: its modules get another ``forward``, and keep their parameters and names.

A module's class becomes a subclass of its own class. So state_dicts, optimizers, hooks of the module itself, copies and
``isinstance`` work as before. Classes of transformers are recognised by their names: nothing here imports it.
"""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, Literal, NamedTuple, TypeVar, overload

import torch
from torch import Tensor, nn

from cutlass_ops.nn import epilogues, quantized
from cutlass_ops.nn.block import DecoderBlock
from cutlass_ops.nn.folded import Folded
from cutlass_ops.nn.launching import Prepares
from cutlass_ops.nn.linear import Linear, apply
from cutlass_ops.nn.mlp import MLP, GatedMLP, gated_layers, gated_ops, two_layers
from cutlass_ops.nn.norms import NormLinear
from cutlass_ops.nn.packed import PackedLinear, gate_and_up, multiplied
from cutlass_ops.nn.parallel import plus
from cutlass_ops.nn.projections import Handing, Projections
from cutlass_ops.nn.reading import (
    are_read,
    has_class_forward,
    is_foreign,
    is_spread,
    is_watched,
    needs_pytorch,
    readable,
)
from cutlass_ops.nn.sparse import SparseLinear
from cutlass_ops.operand import sparsity
from cutlass_ops.run import casting
from cutlass_ops.run.packed import Packed
from cutlass_ops.run.sparse import Sparse
from cutlass_ops.run.values import OwnWeight


class Patched(NamedTuple):
    """Which modules of a model are fused: the result of :func:`patch` with `dry_run`.

    Attributes
    ----------
    fused : dict of str to str
        By name of each fused module: what its forward computes.
    kept : dict of str to str
        By name of each module with parameters, and each MLP, that is not fused: the reason.
    classes : dict of str to str
        By name of each of these modules: its class.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16(), torch.nn.LayerNorm(8))
    >>> found = co.patch(co.patch(model, verbose=False), dry_run=True)
    >>> found.fused, found.kept
    ({'0': 'a GEMM with its bias'}, {'1': 'no GEMM'})
    """

    fused: dict[str, str]
    kept: dict[str, str]
    classes: dict[str, str]

    def __str__(self) -> str:
        lines: list[str] = []
        for title, found in (("fused:", self.fused), ("left as it was:", self.kept)):
            groups: dict[tuple[str, str], list[str]] = {}
            for name, what in found.items():
                groups.setdefault((self.classes[name], what), []).append(name)
            lines += [title] if groups else []
            for (kind, what), names in groups.items():
                named = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
                lines.append(f"  {len(names)} x {kind}: {what} ({named or 'the model itself'})")
        return "\n".join(lines) or "the model has no parameters"


_Model = TypeVar("_Model", bound=nn.Module)


@overload
def patch(
    model: _Model,
    *,
    fold_norms: bool = False,
    sparse: bool = False,
    verbose: bool = True,
    dry_run: Literal[False] = False,
) -> _Model: ...


@overload
def patch(
    model: nn.Module, *, fold_norms: bool = False, sparse: bool = False, verbose: bool = True, dry_run: Literal[True]
) -> Patched: ...


def patch(
    model: Any, *, fold_norms: bool = False, sparse: bool = False, verbose: bool = True, dry_run: bool = False
) -> Any:
    """Replace the forwards of a model's linear layers and MLPs by fused ones, and print what is fused.

    It supports ``torch.nn.Linear``, the MLPs and decoder layers of Hugging Face's Llama, Mistral, Qwen2 and Qwen3, and
    GPT-2's MLP and ``Conv1D``. Weights must be FP16 or BF16; inside ``torch.autocast`` they may be FP32. Layers in 4
    bits of GPTQModel, AutoGPTQ, AutoAWQ and compressed-tensors keep a packed copy of their weight
    (:class:`cutlass_ops.Packed`), which takes as much memory again: docs/packed.md names their classes.
    :func:`unpatch` undoes it.

    A fused MLP does not call the layers inside it. If they get hooks, adapters or another forward later, the MLP runs
    its original forward, which calls them. A module whose layers already have some is not patched. What no kernel can
    multiply, such as FP32 after ``model.float()``, runs the original forward as well.

    Parameters
    ----------
    model : Module
        The model. It is changed in place.
    fold_norms : bool
        Whether decoder layers also compute their input norm, queries, keys and values in one GEMM, in calls without
        gradients. Each layer then keeps a copy of the three weights, with the norm's weight folded in, which takes as
        much memory as they do. In eager mode, the copy is renewed if a parameter has changed or gradients were
        recorded; a compiled program keeps its copy. See :func:`cutlass_ops.nn.fold_norms`. PyTorch still computes
        Qwen3's ``q_norm`` and ``k_norm``.
    sparse : bool
        Whether linear layers whose weights are 2:4 sparse compute with a sparse copy (:class:`cutlass_ops.Sparse`), in
        calls without gradients of the weight. The copy takes 0.56 of the weight's memory, which the layer keeps. It is
        made again if the weight has changed; a weight that is 2:4 sparse no longer is then an error. An MLP is fused if
        all of its layers have such copies, or none. Layers that are fused already stay so: call :func:`unpatch` first.
    verbose : bool
        Whether to print what is fused.
    dry_run : bool
        Whether to change nothing, and return which modules are fused now and why the others are not. With `fold_norms`,
        it also says why attentions have no folded norm. Modules of ``cutlass_ops.nn`` are fused without a patch. A
        patched module that runs its original forward now, since it or its layers have hooks, adapters or another dtype,
        is not fused.

    Returns
    -------
    Module or Patched
        The model itself; with `dry_run` a :class:`cutlass_ops.nn.Patched`, whose ``str`` is what would be printed.

    Raises
    ------
    TypeError
        If `model` is not a module.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU()).bfloat16()
    >>> model = co.patch(model)
    fused:
      1 x Linear: a GEMM with its bias (0)
    >>> model(torch.ones(2, 16).bfloat16()).shape, co.unpatch(model)
    (torch.Size([2, 8]), 1)
    >>> print(co.patch(torch.nn.Sequential(co.nn.Linear(8, 8), torch.nn.LayerNorm(8)).bfloat16(), dry_run=True))
    fused:
      1 x Linear: a module of cutlass_ops.nn (0)
    left as it was:
      1 x LayerNorm: no GEMM (1)
    """
    _require_module(model)
    if dry_run:
        return _report(model, fold_norms)
    # Children come first: a decoder layer asks whether its MLP is fused.
    for module in reversed(list(model.modules())):
        is_fused = isinstance(module, _Fused)
        rule = None if is_fused else _rule_of(module)
        if is_fused or rule is not None:
            _drop_class_forward(module)
        if rule is not None and not _forward_refuses(module) and not rule._refuses(module):
            _exchange(module, _Sparse if sparse and rule is _Linear and _is_pruned(module.weight) else rule)
    if fold_norms:
        for layer in model.modules():
            if isinstance(layer, _DecoderLayer) and layer._fused_ops == (None,) and not _projections_refuse(layer):
                layer._fused_ops = (Projections(layer, _READ["Linear"]),)
                _exchange(layer.self_attn, _Attention)  # type: ignore[attr-defined]
    if verbose:
        print(_report(model, fold_norms))
    return model


def _report(model: nn.Module, fold_norms: bool) -> Patched:
    fused: dict[str, str] = {}
    kept: dict[str, str] = {}
    classes: dict[str, str] = {}
    whole: list[str] = []  # an entry also holds for the modules inside
    for name, module in model.named_modules():
        inside = f"{name}." if name else ""
        if isinstance(module, _DecoderLayer):
            if _is_fused(module.self_attn, _Attention):  # type: ignore[attr-defined]
                whole.append(f"{inside}input_layernorm")
            elif fold_norms:
                kept[f"{inside}self_attn"] = _projections_refuse(module)
                classes[f"{inside}self_attn"] = type(module.self_attn).__name__  # type: ignore[attr-defined]
        what, reason = _state(module)
        if what and not reason:
            fused[name] = what
            whole += [inside] if isinstance(module, _MLPS) else []
        elif reason and not name.startswith(tuple(whole)):
            kept[name] = reason
        classes[name] = type(module).__name__
    return Patched(fused, kept, {name: classes[name] for name in (*fused, *kept)})


def _state(module: Any) -> tuple[str, str]:
    """Return a module's fused forward in words, and why it is not fused; two empty strings if it has no GEMM."""
    if isinstance(module, _Fused):
        reason = "" if has_class_forward(module) else "its forward was replaced"
        return _what(module), reason or module._refuses(module)
    if isinstance(module, _OURS):
        return "a module of cutlass_ops.nn", _own_refuses(module)
    rule = _rule_of(module)
    if rule is not None:
        return "", _forward_refuses(module) or rule._refuses(module) or "not patched yet"
    if any(True for _ in module.parameters(recurse=False)):
        name = type(module).__name__
        return "", "no GEMM" if "Norm" in name or "Embedding" in name else "a class that patch does not know"
    return "", "an MLP that patch does not know: its activation is a kernel of its own" if _is_mlp(module) else ""


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module with a forward of its own has linear layers and an activation."""
    if isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict):
        return False
    children = list(module.children())
    activations = ("torch.nn.modules.activation", "transformers.activations")
    return any(isinstance(c, nn.Linear) or type(c).__name__ == "Conv1D" for c in children) and any(
        type(c).__module__ in activations and not any(True for _ in c.parameters()) for c in children
    )


def _own_refuses(module: Any) -> str:
    """Say why a module of ours calls its layers or PyTorch; a block only has some that do."""
    layers = [] if isinstance(module, DecoderBlock) else [module] if isinstance(module, Linear) else module.children()
    for layer in layers:
        if layer is not module and not are_read((Linear, nn.RMSNorm, nn.LayerNorm), layer):
            return "its layers have hooks, adapters or other forwards, and are called"
        if isinstance(layer, Linear) and not is_spread(layer.weight):
            reason = _dtype_refuses(layer)
            if reason:
                return reason
    return ""


def unpatch(model: nn.Module) -> int:
    """Restore the original forwards of a patched model's modules.

    Parameters
    ----------
    model : Module
        The model. It may be patched only in part, or not at all.

    Returns
    -------
    int
        The number of modules that were restored.

    Raises
    ------
    TypeError
        If `model` is not a module.
    ValueError
        If a patched module has been given another class since, as by a parametrization or FSDP, or another forward, as
        by hooks of accelerate.

    Examples
    --------
    >>> co.unpatch(torch.nn.Linear(16, 8))
    0
    """
    _require_module(model)
    fused: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, _Fused)}
    for name, module in fused.items():
        if type(module) is not module._exact:
            raise ValueError(
                f"{name or 'the model'} has had another class since it was patched, such as that of a parametrization "
                "or of FSDP: remove that first"
            )
        _drop_class_forward(module)
        if not has_class_forward(module):
            raise ValueError(
                f"{name or 'the model'} has had another forward since it was patched, such as that of accelerate's "
                "hooks, which calls the one to be removed: remove that first"
            )
    for module in fused.values():
        module.__class__ = module._original
        del module._fused_ops
    return len(fused)


def fold_norms(model: nn.Module) -> int:
    """Fold a model's norms again, after a change that calls do not detect, such as a write by ``parameter.data``.

    These are the norms of ``co.patch(model, fold_norms=True)``, and of each :class:`RMSNormLinear` and
    :class:`LayerNormLinear` that was folded; the next call of others renews what they keep. A compiled program keeps
    the copies from when it was compiled.

    Parameters
    ----------
    model : Module
        The model.

    Returns
    -------
    int
        The number of folded weights.

    Raises
    ------
    TypeError, ValueError
        If `model` is not a module, or something in it cannot be folded.

    Examples
    --------
    >>> model = torch.nn.Sequential(co.nn.RMSNormLinear(16, 8, dtype=torch.bfloat16).fold())
    >>> model[0].linear.weight.data.zero_()[0, 0].item(), co.nn.fold_norms(model)
    (0.0, 1)
    """
    _require_module(model)
    count = 0
    for module in model.modules():
        if isinstance(module, NormLinear):
            module._drop()
            count += module.fold().folds if module.folds else 0
        elif isinstance(module, _DecoderLayer) and module._fused_ops != (None,):
            module._fused_ops[0].fold(module, _READ["Linear"])
            count += 1
    return count


def _require_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module")


def _drop_class_forward(module: nn.Module) -> None:
    """Drop an attribute `forward` that is the class's own: libraries that wrapped it put it back so."""
    forward = vars(module).get("forward")
    own = [type(module).forward]
    if isinstance(module, _Fused):
        own.append(module._original.forward)
    if getattr(forward, "__self__", None) is module and getattr(forward, "__func__", None) in own:
        del module.forward


# ---- Modules with another forward ------------------------------------------------------------------------------------


_HUGGING_FACE = ("Llama", "Mistral", "Qwen2", "Qwen3")


class _Fused(Prepares):
    """A module whose class was exchanged.

    A fused forward reads the modules inside only while they are what :func:`patch` found: plain, and without hooks.
    Otherwise it runs the forward that the module had.
    """

    _rule: str  # the name of how these modules are fused
    _fits: tuple[str, ...] = ()  # names of the classes that it fits; subclasses do not fit
    _what: str  # what the forward is, for users

    _original: type[nn.Module]
    _exact: type  # the class that was made, and not one that something else derived from it
    _fused_ops: tuple[Any, ...]

    @staticmethod
    def _refuses(module: Any) -> str:
        """Return the reason why a module does not fit, or an empty string."""
        return ""

    @staticmethod
    def _ops_of(module: Any) -> tuple[Any, ...]:
        """Return what a module's forward calls."""
        return ()

    def extra_repr(self) -> str:
        own = super().extra_repr()  # type: ignore[misc]
        return f"{own}, fused" if own else "fused"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made again, since no module has it by a name.
        if type(self) is self._exact:
            return _made_again, (self._original, self._rule), self.__dict__
        return super().__reduce_ex__(protocol)


class _Linear(_Fused):
    _rule, _fits, _what = "Linear", ("Linear",), "a GEMM"

    @staticmethod
    def _refuses(module: Any) -> str:
        return _dtype_refuses(module)

    @staticmethod
    def _ops_of(module: Any) -> tuple[Any, ...]:
        return epilogues.linear_ops(None)

    def forward(self: Any, input: Tensor) -> Tensor:
        weight = self.weight
        if needs_pytorch(input, weight):
            return _as_before(self, input)
        return apply(self._fused_ops, input, weight, self.bias, None)


class _Sparse(_Linear):
    """A linear layer whose weight is 2:4 sparse. It keeps its own weight beside the stored elements."""

    _rule, _what = "Sparse", "a GEMM of its 2:4 sparse weight"

    @staticmethod
    def _ops_of(module: Any) -> tuple[Any, ...]:
        return epilogues.linear_ops(None), Folded()

    def forward(self: Any, input: Tensor) -> Tensor:
        ops, weight = self._fused_ops[0], self.weight
        if needs_pytorch(input, weight):
            return _as_before(self, input)
        sparse = self._own_weight(input)
        if sparse is None:
            return apply(ops, input, weight, self.bias, None)
        return multiplied(ops, input, sparse, self.bias)

    def _own_weight(self: Any, x: Tensor) -> OwnWeight | None:
        weight: Tensor = self.weight
        if needs_pytorch(x, weight) or casting.any_autocast() or x.dtype is not weight.dtype:
            return None
        if weight.requires_grad and torch.is_grad_enabled():
            return None
        copy: Folded = self._fused_ops[1]
        found: Sparse | None = copy.current(lambda: Sparse.from_dense(weight.t()), lambda: (weight,))
        return found


def _is_pruned(weight: Tensor) -> bool:
    """Whether a weight (N, K) is 2:4 sparse along K, in a type that kernels have."""
    n, k = weight.shape
    if weight.dtype not in (torch.float16, torch.bfloat16) or weight.is_meta or not n or not k or k % sparsity.STEP:
        return False
    return sparsity.too_many(weight.detach() != 0) is None


class _Conv1D(_Linear):
    """transformers' linear layer of GPT-2, whose weight is (K, N)."""

    _rule, _fits = "Conv1D", ("Conv1D",)

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        if needs_pytorch(x, weight):
            return _as_before(self, x)
        return apply(self._fused_ops, x, weight, self.bias, None, readable)


class _Copy:
    """The packed form of a quantised layer's weight, made again if its tensors change."""

    def __init__(self, layer: Any, of: quantized.Format) -> None:
        self._format, self._folded = of, Folded()
        self._dtype: torch.dtype | None = None  # of x, once a call has said it
        self._folded.fold(lambda: quantized.pack(layer, of), lambda: quantized.sources(layer, of))

    def of(self, layer: Any, dtype: torch.dtype) -> Packed | None:
        """Return it for a type of x; None if its tensors were made in inference mode, which counts no changes."""
        found = self._folded.current(lambda: self._made(layer), lambda: quantized.sources(layer, self._format))
        if found is not None and found.dtype is not dtype and not torch.compiler.is_compiling():
            self._dtype = dtype
            found = self._folded.fold(lambda: self._made(layer), lambda: quantized.sources(layer, self._format))
        return found if found is None or found.dtype is dtype else None

    def _made(self, layer: Any) -> Packed:
        return quantized.pack(layer, self._format, self._dtype)


class _Quantized(_Fused):
    """A linear layer of GPTQ, AWQ or compressed-tensors. It keeps its own tensors beside the packed weight."""

    _rule, _fits, _what = "Quantized", tuple(quantized.KNOWN), "a GEMM of its packed weight"

    @staticmethod
    def _refuses(module: Any) -> str:
        of = quantized.format_of(module._original if isinstance(module, _Fused) else type(module))
        assert of is not None
        return "" if isinstance(module, _Fused) else quantized.refuses(module, of)

    @staticmethod
    def _ops_of(module: Any) -> tuple[Any, ...]:
        of = quantized.format_of(type(module))
        assert of is not None
        return epilogues.linear_ops(None), _Copy(module, of)

    def forward(self: Any, x: Tensor) -> Tensor:
        packed = self._own_weight(x)
        return _as_before(self, x) if packed is None else multiplied(self._fused_ops[0], x, packed, self.bias)

    def _own_weight(self: Any, x: Tensor) -> OwnWeight | None:
        """Return the packed weight for x; None if the layer must compute as before."""
        if not isinstance(x, Tensor) or x.dtype not in (torch.float16, torch.bfloat16) or is_foreign(x):
            return None
        if casting.any_autocast() or not quantized.serves(x.device) or getattr(self, "adapter", None):
            return None
        copy: _Copy = self._fused_ops[1]
        return copy.of(self, x.dtype)


class _GatedMLP(_Fused):
    _rule, _fits = "GatedMLP", tuple(f"{name}MLP" for name in _HUGGING_FACE)
    _what = "gate and up with the activation between them, then down"

    @staticmethod
    def _refuses(module: Any) -> str:
        if _activation(module.act_fn) is None:
            return f"its activation is {type(module.act_fn).__name__}"
        layers = module.gate_proj, module.up_proj, module.down_proj
        if all(isinstance(layer, _Quantized | _Sparse) for layer in layers):
            return "its layers have hooks or other forwards" if is_watched(*layers) else ""
        return _layers_refuse("Linear", layers)

    @staticmethod
    def _ops_of(module: Any) -> tuple[Any, ...]:
        activation = _activation(module.act_fn)
        return type(module.act_fn), (gated_ops(activation), epilogues.linear_ops(None)), gate_and_up(activation)

    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
        kind, ops, own_ops = self._fused_ops
        gate, up, down, activation = layers = self.gate_proj, self.up_proj, self.down_proj, self.act_fn
        if all(type(x) is getattr(x, "_exact", None) and x._rule in ("Quantized", "Sparse") for x in layers[:3]):
            known = type(activation) is kind and not is_watched(*layers)
            forms: Any = [layer._own_weight(x) for layer in layers[:3]] if known else [None]
            if None not in forms:
                of_gate = multiplied(own_ops[0], x, forms[0], gate.bias)
                of_up = multiplied(own_ops[1], x, forms[1], up.bias, inputs=[of_gate])
                return multiplied(ops[1], of_up, forms[2], down.bias, residual)
        known = type(activation) is kind and are_read(_READ["Linear"], gate, up, down)
        if known and not is_watched(activation):
            weights, biases = (gate.weight, up.weight, down.weight), (gate.bias, up.bias, down.bias)
            if (biases[0] is None) == (biases[1] is None) and not is_foreign(x, *weights):
                return gated_layers(ops, x, weights, biases, residual)
        return plus(_as_before(self, x), residual)


class _Gpt2MLP(_Fused):
    _rule, _fits = "GPT2MLP", ("GPT2MLP",)
    _what = "two GEMMs, the activation in the first one's epilogue"

    @staticmethod
    def _refuses(module: Any) -> str:
        if _activation(module.act) is None:
            return f"its activation is {type(module.act).__name__}"
        return _layers_refuse("Conv1D", (module.c_fc, module.c_proj))

    @staticmethod
    def _ops_of(module: Any) -> tuple[Any, ...]:
        return type(module.act), (epilogues.linear_ops(_activation(module.act)), epilogues.linear_ops(None))

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        kind, ops = self._fused_ops
        first, second, activation = self.c_fc, self.c_proj, self.act
        known = type(activation) is kind and are_read(_READ["Conv1D"], first, second)
        if not known or is_watched(activation) or is_foreign(hidden_states, first.weight, second.weight):
            return _as_before(self, hidden_states)
        parameters = (first.weight, second.weight), (first.bias, second.bias)
        d = two_layers(ops, hidden_states, *parameters, None, readable)
        dropped: Tensor = self.dropout(d)
        return dropped


class _DecoderLayer(_Fused):
    """A layer whose MLP is fused, and adds the residual. It may have its projections as one GEMM."""

    _rule, _fits = "DecoderLayer", tuple(f"{name}DecoderLayer" for name in _HUGGING_FACE)
    _what = "the residual in the epilogue of the MLP's last GEMM"

    _positional: tuple[str, ...]  # of the forward that it had, behind hidden_states

    @staticmethod
    def _refuses(module: Any) -> str:
        # Before transformers 5, some of these returned a tuple.
        kind = module._original if isinstance(module, _Fused) else type(module)
        if kind.forward.__annotations__.get("return") not in (Tensor, "torch.Tensor"):
            return "its forward does not say that it returns a tensor, as those of transformers 5 do"
        return "" if isinstance(module.mlp, _GatedMLP) and not _state(module.mlp)[1] else "its MLP is not fused"

    @staticmethod
    def _ops_of(module: Any) -> tuple[Any, ...]:
        return (None,)  # its projections, which fold_norms makes

    def forward(self: Any, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if arguments:
            named = _named(self._positional, arguments, named)
        named.setdefault("attention_mask", None)
        (projections,) = self._fused_ops
        attention, mlp = self.self_attn, self.mlp
        projected = None
        if projections is not None and _is_fused(attention, _Attention):
            projected = projections.run(self, hidden_states, _READ["Linear"])
        if projected is None:
            attended, _ = attention(hidden_states=self.input_layernorm(hidden_states), **named)
        else:
            attended, _ = attention(hidden_states=hidden_states, projected=projected, **named)
        y = hidden_states + attended
        z = self.post_attention_layernorm(y)
        # Hooks must see what the MLP gives, and change that alone.
        found: Tensor = mlp(z, residual=y) if _is_fused(mlp, _GatedMLP) else y + mlp(z)
        return found


class _Attention(_Fused):
    """An attention that may be given its queries, keys and values. All else is its own class's.

    It fits no class by itself: a decoder layer decides.
    """

    _rule, _what = "Attention", "norm, q, k and v in one GEMM without gradients"

    def forward(self: Any, *arguments: Any, projected: tuple[Tensor, ...] | None = None, **named: Any) -> Any:
        attention = self if projected is None else Handing(self, projected)
        return self._original.forward(attention, *arguments, **named)


def _as_before(module: Any, x: Tensor) -> Tensor:
    """Compute what a module computed before it was patched."""
    found: Tensor = module._original.forward(module, x)
    return found


def _is_fused(module: Any, forward: type[_Fused]) -> bool:
    """Whether a call of a module calls this very forward, so that it takes our arguments."""
    return isinstance(module, forward) and type(module) is module._exact and not is_watched(module)


def _named(names: tuple[str, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name. Raises TypeError if there are too many, or two of a name."""
    if len(arguments) > len(names):
        raise TypeError(f"forward takes {1 + len(names)} arguments by position: {1 + len(arguments)} were given")
    given = dict(zip(names, arguments, strict=False))
    twice = [name for name in given if name in named]
    if twice:
        raise TypeError(f"forward got {twice[0]} by position and by name: pass it once")
    return {**given, **named}


# ---- Which modules ---------------------------------------------------------------------------------------------------


def _is_plain(module: Any, kind: str) -> bool:
    if isinstance(module, _Fused):
        return type(module) is module._exact and module._rule == kind
    rule = _rule_of(module)
    return rule is not None and rule._rule == kind


def _dtype_refuses(module: Any) -> str:
    weight = module.weight
    if not isinstance(weight, Tensor):
        return "its weight is no tensor"
    if type(weight) not in (Tensor, nn.Parameter):
        return f"its weight is a {type(weight).__name__}"
    if weight.dtype in (torch.float16, torch.bfloat16):
        return ""
    if weight.dtype is torch.float32 and torch.is_autocast_enabled(weight.device.type):
        return ""
    return f"its weight is {weight.dtype}: convert the model to torch.bfloat16, or patch it inside torch.autocast"


def _forward_refuses(module: Any) -> str:
    """Say why a module's forward is not that of its class as it was written."""
    if not has_class_forward(module):
        return "its forward was replaced"
    kind = type(module)
    home = (kind.__module__, f"{kind.__qualname__}.forward")
    # Decorators keep these names.
    return "" if (kind.forward.__module__, kind.forward.__qualname__) == home else "its class's forward was replaced"


def _layers_refuse(kind: str, layers: tuple[Any, ...]) -> str:
    if not all(_is_plain(layer, kind) for layer in layers):
        return f"its layers are not all {kind}"
    if is_watched(*layers):
        return "its layers have hooks or other forwards"
    if len({layer.bias is None for layer in layers}) > 1:
        return "some of its layers have biases and some have none"
    return next((reason for reason in map(_dtype_refuses, layers) if reason), "")


def _projections_refuse(layer: Any) -> str:
    norm, attention = layer.input_layernorm, layer.self_attn
    if type(attention).__name__ not in _ATTENTIONS:
        return "a class that patch does not know"
    if is_watched(attention, norm):
        return "it or the norm before it has hooks or another forward"
    known = type(norm).__name__ in _NORMS and type(norm.weight) is nn.Parameter
    if not known or norm.weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "the norm before it is not one that patch knows"
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    reason = _layers_refuse("Linear", layers)
    if reason:
        return reason
    if any(each.weight.dtype is torch.float32 for each in layers):
        return "its weights are torch.float32, which are folded in 16 bits only"
    if any(p.is_inference() for each in (norm, *layers) for p in each.parameters()):
        return "its parameters were made in torch.inference_mode(), which does not count their changes"
    return ""


def _what(module: Any) -> str:
    """Return what a fused module's forward is, for users."""
    found: str = module._what
    if module._rule in ("Linear", "Conv1D") and module.bias is not None:
        return f"{found} with its bias"
    if isinstance(module, _Attention) and hasattr(module, "q_norm"):
        return f"{found}; q_norm and k_norm stay PyTorch's"
    return found


def _activation(module: Any) -> str | None:
    """Return the name in :data:`epilogues.ACTIVATIONS` of an activation's module; None if it has none."""
    if isinstance(module, nn.GELU):
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    return _ACTIVATIONS.get(type(module).__name__)


_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "ReLU": "relu",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "AccurateGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "ReLUSquaredActivation": "relu2",
    "Mish": "mish",
    "MishActivation": "mish",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
}


_ATTENTIONS = tuple(f"{name}Attention" for name in _HUGGING_FACE)
_NORMS = tuple(f"{name}RMSNorm" for name in _HUGGING_FACE)

_RULES: tuple[type[_Fused], ...] = (
    _Linear,
    _Sparse,
    _Conv1D,
    _Quantized,
    _GatedMLP,
    _Gpt2MLP,
    _DecoderLayer,
    _Attention,
)
_BY_NAME = {rule._rule: rule for rule in _RULES}
# An entry also holds for the modules inside.
_MLPS = (_GatedMLP, _Gpt2MLP, MLP, GatedMLP, NormLinear)
_OURS = (Linear, MLP, GatedMLP, NormLinear, DecoderBlock, PackedLinear, SparseLinear)


def _rule_of(module: nn.Module) -> type[_Fused] | None:
    kind = type(module)
    name, home = kind.__name__, kind.__module__
    if quantized.format_of(kind) is not None:
        return _Quantized
    for rule in _RULES:
        if name in rule._fits and (kind is nn.Linear if name == "Linear" else home.startswith("transformers.")):
            return rule
    return None


def _exchange(module: Any, rule: type[_Fused]) -> None:
    ops = rule._ops_of(module)
    original: Any = type(module)
    module.__class__ = _class_of(original, rule._rule)
    module._fused_ops = ops


# By a rule's name: the classes whose modules may be read, the original ones and those derived from them.
_READ: dict[str, tuple[type, ...]] = {}


@functools.cache
def _class_of(original: Any, name: str) -> Any:
    rule = _BY_NAME[name]
    signature = inspect.signature(original.forward)
    _, _, *others = signature.parameters.values()
    positional = tuple(p.name for p in others if p.kind is p.POSITIONAL_OR_KEYWORD)
    made: Any = type(
        # Others, such as FSDP's policies, look classes up by their names.
        original.__name__,
        (rule, original),
        {
            "_original": original,
            "_positional": positional,
            "forward": _with_signature(rule.forward, signature),  # type: ignore[attr-defined]
            "__module__": __name__,
            "__doc__": original.__doc__,
        },
    )
    made._exact = made
    _READ[name] = (*_READ.get(name, ()), original, made)
    return made


def _with_signature(function: Any, signature: inspect.Signature) -> Any:
    """Return a function with another signature, for code that inspects its arguments."""
    found: Any = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    found.__kwdefaults__, found.__doc__, found.__signature__ = function.__kwdefaults__, function.__doc__, signature
    return found


def _made_again(original: Any, rule: str) -> nn.Module:
    kind = _class_of(original, rule)
    made: nn.Module = kind.__new__(kind)
    return made


_class_of(nn.Linear, "Linear")  # MLPs of plain layers are read before any layer was patched
