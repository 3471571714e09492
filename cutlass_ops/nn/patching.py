"""Fused GEMMs for a model that exists: its modules get another ``forward``, and keep their parameters and names.

A module's class becomes a subclass of its own class. So state_dicts, optimizers, hooks of the module itself, copies and
``isinstance`` work as before. Classes of transformers are recognised by their names: nothing here imports it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutlass_ops.nn import epilogues
from cutlass_ops.nn.linear import apply
from cutlass_ops.nn.mlp import gated_layers, gated_ops, two_layers
from cutlass_ops.nn.norms import NormLinear
from cutlass_ops.nn.projections import Handing, Projections
from cutlass_ops.nn.reading import are_of, is_dense, is_own, is_spread, is_watched, readable


class Patched(NamedTuple):
    """What :func:`patch` did to a model.

    Attributes
    ----------
    replaced : dict of str to str
        By name of each fused module: what its forward computes.
    kept : dict of str to str
        By name of each module with parameters that was not fused: the reason.
    classes : dict of str to str
        By name of each of these modules: its class.
    already : dict of str to str
        As `replaced`, for modules that an earlier call fused.

    Examples
    --------
    >>> found = co.patch(torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16(), torch.nn.LayerNorm(8)))
    fused:
      1 x Linear: a GEMM with its bias (0)
    left as it was:
      1 x LayerNorm: no GEMM (1)
    >>> found.replaced
    {'0': 'a GEMM with its bias'}
    """

    replaced: dict[str, str]
    kept: dict[str, str]
    classes: dict[str, str]
    already: dict[str, str]

    def __str__(self) -> str:
        lines: list[str] = []
        parts = ("fused:", self.replaced), ("fused already:", self.already), ("left as it was:", self.kept)
        for title, found in parts:
            groups: dict[tuple[str, str], list[str]] = {}
            for name, what in found.items():
                groups.setdefault((self.classes[name], what), []).append(name)
            lines += [title] if groups else []
            for (kind, what), names in groups.items():
                named = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
                lines.append(f"  {len(names)} x {kind}: {what} ({named or 'the model itself'})")
        return "\n".join(lines) or "the model has no parameters"


def patch(model: nn.Module, *, fold_norms: bool = False) -> Patched:
    """Replace the forwards of a model's linear layers and MLPs by fused ones, and print what was replaced.

    It supports ``torch.nn.Linear``, the MLPs and decoder layers of Hugging Face's Llama, Mistral, Qwen2 and Qwen3, and
    GPT-2's MLP and ``Conv1D``. Weights must be FP16 or BF16; inside ``torch.autocast`` they may be FP32.
    :func:`unpatch` undoes it.

    A fused MLP does not call the layers inside it. If they get hooks, adapters or another forward later, the MLP runs
    its original forward, which calls them. A module whose layers already have some is not patched.

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

    Returns
    -------
    Patched
        The same information that is printed.

    Raises
    ------
    TypeError
        If `model` is not a module.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU()).bfloat16()
    >>> found = co.patch(model)
    fused:
      1 x Linear: a GEMM with its bias (0)
    >>> model(torch.ones(2, 16).bfloat16()).shape, co.unpatch(model)
    (torch.Size([2, 8]), 1)
    """
    _require_module(model)
    replaced, kept, classes, already = {}, {}, {}, {}
    # Children come first: a decoder layer asks whether its MLP is fused.
    for name, module in reversed(list(model.named_modules())):
        if isinstance(module, _Fused):
            classes[name], already[name] = type(module).__name__, _what(module)
            continue
        rule = _rule_of(module)
        reason = _unknown(module) if rule is None else _forward_refuses(module) or rule.refuses(module)
        if rule is not None and not reason:
            classes[name] = type(module).__name__
            _exchange(module, rule)
            replaced[name] = rule.what
        elif any(True for _ in module.parameters(recurse=False)) or rule is not None:
            kept[name] = reason
            classes[name] = type(module).__name__
    if fold_norms:
        _fold_norms(model, replaced, kept, classes)
    order = [name for name, _ in model.named_modules()]
    inside = {f"{name}." for name, what in {**replaced, **already}.items() if what in _WHOLE}
    kept = {n: why for n, why in kept.items() if not any(n.startswith(prefix) for prefix in inside)}
    found = Patched(
        {name: replaced[name] for name in order if name in replaced},
        {name: kept[name] for name in order if name in kept},
        classes,
        {name: already[name] for name in order if name in already},
    )
    print(found)
    return found


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
        If a patched module has been given another class since, as by a parametrization or FSDP.

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
    for module in fused.values():
        module.__class__ = module._original
        del module._fused_ops
    return len(fused)


def fold_norms(model: nn.Module) -> int:
    """Fold a model's norms again, after a change that calls do not detect, such as a write by ``parameter.data``.

    These are the norms of ``co.patch(model, fold_norms=True)``, and of each :class:`RMSNormLinear` and
    :class:`LayerNormLinear` that was folded. A compiled program keeps the copies from when it was compiled.

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
        if isinstance(module, NormLinear) and module.folds:
            module.fold()
            count += 1
        elif isinstance(module, _DecoderLayer) and module._fused_ops != (None,):
            module._fused_ops[0].fold(module, _READ["Linear"])
            count += 1
    return count


def _require_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module")


# ---- Modules with another forward ------------------------------------------------------------------------------------


class _Fused:
    """A module whose class was exchanged.

    A fused forward reads the modules inside only while they are what :func:`patch` found: plain, and without hooks.
    Else it is the forward that the module had.
    """

    _original: type[nn.Module]
    _rule: _Rule
    _exact: type  # the class that was made, and not one that something else derived from it
    _fused_ops: tuple[Any, ...]

    def extra_repr(self) -> str:
        own = super().extra_repr()  # type: ignore[misc]
        return f"{own}, fused" if own else "fused"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is made again, since no module has it by a name.
        if type(self) is self._exact:
            return _made_again, (self._original, self._rule.name), self.__dict__
        return super().__reduce_ex__(protocol)


class _Linear(_Fused):
    def forward(self: Any, input: Tensor) -> Tensor:
        weight = self.weight
        if _needs_pytorch(input, weight):
            return _as_before(self, input)
        return apply(self._fused_ops, input, weight, self.bias, None)


class _Conv1D(_Fused):
    """transformers' linear layer of GPT-2, whose weight is (K, N)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        if _needs_pytorch(x, weight):
            return _as_before(self, x)
        return apply(self._fused_ops, x, weight, self.bias, None, readable)


class _GatedMLP(_Fused):
    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
        kind, ops = self._fused_ops
        gate, up, down, activation = self.gate_proj, self.up_proj, self.down_proj, self.act_fn
        known = type(activation) is kind and are_of(_READ["Linear"], gate, up, down)
        if known and is_dense(x) and not is_watched(activation, gate, up, down):
            biases = gate.bias, up.bias, down.bias
            if (biases[0] is None) == (biases[1] is None):
                return gated_layers(ops, x, (gate.weight, up.weight, down.weight), biases, residual)
        d = _as_before(self, x)
        return d if residual is None else residual + d


class _Gpt2MLP(_Fused):
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        kind, ops = self._fused_ops
        first, second, activation = self.c_fc, self.c_proj, self.act
        known = type(activation) is kind and are_of(_READ["Conv1D"], first, second)
        if not known or not is_dense(hidden_states) or is_watched(activation, first, second):
            return _as_before(self, hidden_states)
        parameters = (first.weight, second.weight), (first.bias, second.bias)
        d = two_layers(ops, hidden_states, *parameters, None, readable)
        dropped: Tensor = self.dropout(d)
        return dropped


class _DecoderLayer(_Fused):
    """A layer whose MLP is fused, and adds the residual. It may have its projections as one GEMM."""

    _positional: tuple[str, ...]  # of the forward that it had, behind hidden_states

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
    """An attention that may be given its queries, keys and values. All else is its own class's."""

    def forward(self: Any, *arguments: Any, projected: tuple[Tensor, ...] | None = None, **named: Any) -> Any:
        attention = self if projected is None else Handing(self, projected)
        return self._original.forward(attention, *arguments, **named)


def _needs_pytorch(x: Any, weight: Any) -> bool:
    """Whether no kernel can multiply these, but the forward that a layer had can."""
    return is_spread(weight) or is_own(weight) or not is_dense(x)


def _as_before(module: Any, x: Tensor) -> Tensor:
    """Compute what a module computed before it was patched."""
    found: Tensor = module._original.forward(module, x)
    return found


def _is_fused(module: Any, forward: type[_Fused]) -> bool:
    """Whether calling a module is calling this very forward, so that it takes arguments of ours."""
    return isinstance(module, forward) and type(module) is module._exact and not is_watched(module)


def _named(names: tuple[str, ...], arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name.

    Raises
    ------
    TypeError
        If there are too many, or two of a name.
    """
    if len(arguments) > len(names):
        raise TypeError(f"forward takes {1 + len(names)} arguments by position: {1 + len(arguments)} were given")
    given = dict(zip(names, arguments, strict=False))
    twice = [name for name in given if name in named]
    if twice:
        raise TypeError(f"forward got {twice[0]} by position and by name: pass it once")
    return {**given, **named}


# ---- Which modules ---------------------------------------------------------------------------------------------------


class _Rule(NamedTuple):
    """How the modules of a class are fused.

    Attributes
    ----------
    name : str
        Of the rule.
    classes : tuple of str
        Names of the classes that it fits, none of them a subclass.
    what : str
        What the forward is, for users.
    forward : type
        The class with the forward.
    refuses : callable
        Takes a module; returns the reason why it does not fit, or an empty string.
    ops : callable
        Takes a module; returns what its forward calls.
    """

    name: str
    classes: tuple[str, ...]
    what: str
    forward: type[_Fused]
    refuses: Callable[[Any], str]
    ops: Callable[[Any], tuple[Any, ...]]


def _is_plain(module: Any, kind: str) -> bool:
    if isinstance(module, _Fused):
        return type(module) is module._exact and module._rule.name == kind
    rule = _rule_of(module)
    return rule is not None and rule.name == kind


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
    if "forward" in vars(module):
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


def _gated_refuses(module: Any) -> str:
    if _activation(module.act_fn) is None:
        return f"its activation is {type(module.act_fn).__name__}"
    return _layers_refuse("Linear", (module.gate_proj, module.up_proj, module.down_proj))


def _gpt2_refuses(module: Any) -> str:
    if _activation(module.act) is None:
        return f"its activation is {type(module.act).__name__}"
    return _layers_refuse("Conv1D", (module.c_fc, module.c_proj))


def _decoder_refuses(module: Any) -> str:
    # Before transformers 5, some of these returned a tuple.
    if type(module).forward.__annotations__.get("return") not in (Tensor, "torch.Tensor"):
        return "its forward does not say that it returns a tensor, as those of transformers 5 do"
    return "" if isinstance(module.mlp, _GatedMLP) else "its MLP is not fused"


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


def _fold_norms(model: nn.Module, replaced: dict[str, str], kept: dict[str, str], classes: dict[str, str]) -> None:
    """Give fused decoder layers their projections as one GEMM, and note it."""
    for name, layer in model.named_modules():
        if not isinstance(layer, _DecoderLayer):
            continue
        module: Any = layer
        attention = module.self_attn
        inside = f"{name}." if name else ""
        if layer._fused_ops != (None,):
            kept.pop(f"{inside}input_layernorm", None)
            continue
        classes[f"{inside}self_attn"] = type(attention).__name__
        reason = _projections_refuse(module)
        if reason:
            kept[f"{inside}self_attn"] = reason
            continue
        layer._fused_ops = (Projections(module, _READ["Linear"]),)
        kept.pop(f"{inside}input_layernorm", None)
        _exchange(attention, _BY_NAME["Attention"])
        replaced[f"{inside}self_attn"] = _what(attention)


def _what(module: Any) -> str:
    """Return what a fused module's forward is, for users."""
    own = isinstance(module, _Attention) and hasattr(module, "q_norm")
    found: str = module._rule.what
    return f"{found}; q_norm and k_norm stay PyTorch's" if own else found


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
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
}


def _ops_of_gated(module: Any) -> tuple[Any, ...]:
    return type(module.act_fn), (gated_ops(_activation(module.act_fn)), epilogues.linear_ops(None))


def _ops_of_gpt2(module: Any) -> tuple[Any, ...]:
    return type(module.act), (epilogues.linear_ops(_activation(module.act)), epilogues.linear_ops(None))


_HUGGING_FACE = ("Llama", "Mistral", "Qwen2", "Qwen3")
_ATTENTIONS = tuple(f"{name}Attention" for name in _HUGGING_FACE)
_NORMS = tuple(f"{name}RMSNorm" for name in _HUGGING_FACE)

_RULES = (
    _Rule(
        "Linear",
        ("Linear",),
        "a GEMM with its bias",
        _Linear,
        _dtype_refuses,
        lambda module: epilogues.linear_ops(None),
    ),
    _Rule(
        "Conv1D",
        ("Conv1D",),
        "a GEMM with its bias",
        _Conv1D,
        _dtype_refuses,
        lambda module: epilogues.linear_ops(None),
    ),
    _Rule(
        "GatedMLP",
        tuple(f"{name}MLP" for name in _HUGGING_FACE),
        "gate and up with the activation between them, then down",
        _GatedMLP,
        _gated_refuses,
        _ops_of_gated,
    ),
    _Rule(
        "GPT2MLP",
        ("GPT2MLP",),
        "two GEMMs, the activation in the first one's epilogue",
        _Gpt2MLP,
        _gpt2_refuses,
        _ops_of_gpt2,
    ),
    _Rule(
        "DecoderLayer",
        tuple(f"{name}DecoderLayer" for name in _HUGGING_FACE),
        "the residual in the epilogue of the MLP's last GEMM",
        _DecoderLayer,
        _decoder_refuses,
        lambda module: (None,),  # its projections, which fold_norms makes
    ),
    # Of no class by itself: a decoder layer decides.
    _Rule(
        "Attention",
        (),
        "norm, q, k and v in one GEMM without gradients",
        _Attention,
        lambda module: "",
        lambda module: (),
    ),
)
_BY_NAME = {rule.name: rule for rule in _RULES}
# What is said of an MLP holds for its layers.
_WHOLE = frozenset(rule.what for rule in _RULES if rule.name in ("GatedMLP", "GPT2MLP"))


def _rule_of(module: nn.Module) -> _Rule | None:
    kind = type(module)
    name, home = kind.__name__, kind.__module__
    for rule in _RULES:
        if name in rule.classes and (kind is nn.Linear if name == "Linear" else home.startswith("transformers.")):
            return rule
    return None


def _unknown(module: nn.Module) -> str:
    name = type(module).__name__
    return "no GEMM" if "Norm" in name or "Embedding" in name else "a class that patch does not know"


def _exchange(module: Any, rule: _Rule) -> None:
    ops = rule.ops(module)
    original: Any = type(module)
    module.__class__ = _class_of(original, rule.name)
    module._fused_ops = ops


# For the name of a rule, the classes whose modules may be read: the original ones, and what is made of them.
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
        (rule.forward, original),
        {
            "_original": original,
            "_rule": rule,
            "_positional": positional,
            "forward": _with_signature(rule.forward.forward, signature),  # type: ignore[attr-defined]
            "__module__": __name__,
            "__doc__": original.__doc__,
        },
    )
    made._exact = made
    _READ[name] = (*_READ.get(name, ()), original, made)
    return made


def _with_signature(function: Any, signature: inspect.Signature) -> Any:
    """Return a function as what looks at its arguments, and not only calls it, should see it."""
    found: Any = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    found.__kwdefaults__, found.__doc__, found.__signature__ = function.__kwdefaults__, function.__doc__, signature
    return found


def _made_again(original: Any, rule: str) -> nn.Module:
    kind = _class_of(original, rule)
    made: nn.Module = kind.__new__(kind)
    return made


_class_of(nn.Linear, "Linear")  # MLPs of plain layers are read before any layer was patched
