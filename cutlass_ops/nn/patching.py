"""Fused GEMMs for a model that exists: its modules get another ``forward``, and keep their parameters and names.

A module's class becomes a subclass of its own class. So state_dicts, optimizers, hooks of the module itself, copies and
``isinstance`` work as before. Classes of transformers are recognised by their names: nothing here imports it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cutlass_ops.nn import epilogues
from cutlass_ops.nn.linear import apply, is_watched
from cutlass_ops.nn.mlp import gated_layers, two_layers
from cutlass_ops.nn.projections import Handing, Projections
from cutlass_ops.run.gated import gated_op


class Patched(NamedTuple):
    """What :func:`patch` did to a model.

    Attributes
    ----------
    replaced : dict of str to str
        For the name of each module that is fused now, what its forward is.
    kept : dict of str to str
        For each module that has parameters and is as it was, the reason.

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

    def __str__(self) -> str:
        lines: list[str] = []
        for title, found in (("fused:", self.replaced), ("left as it was:", self.kept)):
            groups: dict[tuple[str, str], list[str]] = {}
            for name, what in found.items():
                groups.setdefault((self.classes[name], what), []).append(name)
            lines += [title] if groups else []
            for (kind, what), names in groups.items():
                named = ", ".join(names[:2]) + (", …" if len(names) > 2 else "")
                lines.append(f"  {len(names)} x {kind}: {what} ({named or 'the model itself'})")
        return "\n".join(lines) or "the model has no parameters"


def patch(model: nn.Module, *, fold_norms: bool = False) -> Patched:
    """Give a model's linear layers and MLPs fused forwards, and print what was replaced and what not.

    It knows ``torch.nn.Linear``, and the MLPs and decoder layers of Hugging Face's Llama, Mistral, Qwen2, Qwen3 and
    GPT-2. Weights must be FP16 or BF16; inside ``torch.autocast`` they may be FP32. :func:`unpatch` undoes it.

    The layers inside a fused MLP are not called any more. A module whose layers have hooks, or are not plain linear
    layers, is left as it was: patch before hooks and adapters are added.

    Parameters
    ----------
    model : Module
        The model. It is changed in place.
    fold_norms : bool
        Whether decoder layers also compute their input norm, queries, keys and values in one GEMM where no gradients
        are recorded. Each layer then keeps a copy of these weights, with the norm's folded in, which takes as much
        memory as they do. In eager mode, parameters that changed are copied again at the next call; a compiled program
        takes the copy as it is. Qwen3's ``q_norm`` and ``k_norm`` stay PyTorch's.

    Returns
    -------
    Patched
        What was printed.

    Raises
    ------
    TypeError
        If `model` is no module.

    Examples
    --------
    >>> model = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.ReLU()).bfloat16()
    >>> found = co.patch(model)
    fused:
      1 x Linear: a GEMM with its bias (0)
    >>> model(torch.ones(2, 16).bfloat16()).shape, co.unpatch(model)
    (torch.Size([2, 8]), 1)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    replaced, kept, classes = {}, {}, {}
    # Children come first: a decoder layer asks whether its MLP is fused.
    for name, module in reversed(list(model.named_modules())):
        if isinstance(module, _Fused):
            continue
        rule = _rule_of(module)
        reason = _unknown(module) if rule is None else rule.refuses(module)
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
    inside = {f"{name}." for name, what in replaced.items() if what in _WHOLE}
    kept = {n: why for n, why in kept.items() if not any(n.startswith(prefix) for prefix in inside)}
    found = Patched(
        {name: replaced[name] for name in order if name in replaced},
        {name: kept[name] for name in order if name in kept},
        classes,
    )
    print(found)
    return found


def unpatch(model: nn.Module) -> int:
    """Give a model's modules their own forwards again.

    Parameters
    ----------
    model : Module
        The model, which may be patched in parts or not at all.

    Returns
    -------
    int
        The number of modules that were changed.

    Examples
    --------
    >>> co.unpatch(torch.nn.Linear(16, 8))
    0
    """
    count = 0
    for module in model.modules():
        if isinstance(module, _Fused):
            module.__class__ = type(module)._original  # type: ignore[assignment]
            del module._fused_ops
            count += 1
    return count


# ---- Modules with another forward ------------------------------------------------------------------------------------


class _Fused:
    """A module whose class was exchanged."""

    _original: type[nn.Module]
    _rule: _Rule
    _fused_ops: tuple[Any, ...]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made again, since no module has it by a name.
        return _made_again, (self._original, self._rule.name), self.__dict__


class _Linear(_Fused):
    def forward(self: Any, x: Tensor) -> Tensor:
        op, with_residual = self._fused_ops
        return apply(op, with_residual, x, self.weight, self.bias, None)


class _Conv1D(_Fused):
    """transformers' linear layer of GPT-2, whose weight is (K, N)."""

    def forward(self: Any, x: Tensor) -> Tensor:
        found: Tensor = self._fused_ops[0](x, self.weight, self.bias)
        return found


class _GatedMLP(_Fused):
    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor:
        first, second, with_residual = self._fused_ops
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        return gated_layers(
            (first, second if residual is None else with_residual),
            x,
            (gate.weight, up.weight, down.weight),
            (gate.bias, up.bias, down.bias),
            residual,
        )


class _Gpt2MLP(_Fused):
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        first, second = self.c_fc, self.c_proj
        d = two_layers(self._fused_ops, hidden_states, (first.weight, second.weight), (first.bias, second.bias), None)
        dropped: Tensor = self.dropout(d)
        return dropped


class _DecoderLayer(_Fused):
    """A layer whose MLP is fused, and adds the residual. It may have its projections as one GEMM."""

    def forward(self: Any, hidden_states: Tensor, attention_mask: Any = None, **named: Any) -> Tensor:
        (projections,) = self._fused_ops
        if projections is not None and projections.serves(hidden_states):
            x, named = hidden_states, {**named, "projected": projections(self, hidden_states)}
        else:
            x = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=x, attention_mask=attention_mask, **named)
        y = hidden_states + attended
        found: Tensor = self.mlp(self.post_attention_layernorm(y), residual=y)
        return found


class _Attention(_Fused):
    """An attention that may be given its queries, keys and values. All else is its own class's."""

    def forward(self: Any, *arguments: Any, projected: tuple[Tensor, ...] | None = None, **named: Any) -> Any:
        attention = self if projected is None else Handing(self, projected)
        return self._original.forward(attention, *arguments, **named)


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
    return type(module).__name__ == kind or (isinstance(module, _Fused) and module._rule.name == kind)


def _dtype_refuses(module: Any) -> str:
    weight = module.weight
    if not isinstance(weight, Tensor):
        return "its weight is no tensor"
    if weight.dtype in (torch.float16, torch.bfloat16):
        return ""
    if weight.dtype is torch.float32 and torch.is_autocast_enabled(weight.device.type):
        return ""
    return f"its weight is {weight.dtype}: convert the model to torch.bfloat16, or patch it inside torch.autocast"


def _linear_refuses(module: Any) -> str:
    # A subclass has a forward of its own, and a method that was replaced too.
    if "forward" in vars(module):
        return "its forward was replaced"
    return _dtype_refuses(module)


def _layers_refuse(kind: str, layers: tuple[Any, ...]) -> str:
    if not all(_is_plain(layer, kind) for layer in layers):
        return f"its layers are not all {kind}"
    if is_watched(*layers) or any("forward" in vars(layer) for layer in layers):
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
    if "forward" in vars(attention) or "forward" in vars(norm) or is_watched(norm):
        return "it or the norm before it has hooks or another forward"
    if type(norm).__name__ not in _NORMS or norm.weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return "the norm before it is not one that patch knows"
    layers = (attention.q_proj, attention.k_proj, attention.v_proj)
    if any(isinstance(each.weight, Tensor) and each.weight.dtype is torch.float32 for each in layers):
        return "its weights are torch.float32, which are folded in 16 bits only"
    return _layers_refuse("Linear", layers)


def _fold_norms(model: nn.Module, replaced: dict[str, str], kept: dict[str, str], classes: dict[str, str]) -> None:
    """Give fused decoder layers their projections as one GEMM, and note it."""
    for name, layer in model.named_modules():
        if not isinstance(layer, _DecoderLayer) or layer._fused_ops != (None,):
            continue
        module: Any = layer
        attention = module.self_attn
        inside = f"{name}." if name else ""
        classes[f"{inside}self_attn"] = type(attention).__name__
        reason = _projections_refuse(module)
        if reason:
            kept[f"{inside}self_attn"] = reason
            continue
        layer._fused_ops = (Projections(module),)
        own = "; q_norm and k_norm stay PyTorch's" if hasattr(attention, "q_norm") else ""
        replaced[f"{inside}self_attn"] = f"norm, q, k and v in one GEMM without gradients{own}"
        kept.pop(f"{inside}input_layernorm", None)
        _exchange(attention, _BY_NAME["Attention"])


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


def _ops_of_linear(module: Any) -> tuple[Any, ...]:
    has_bias = module.bias is not None
    return tuple(epilogues.linear_op(None, bias=has_bias, residual=residual) for residual in (False, True))


def _ops_of_gated(module: Any) -> tuple[Any, ...]:
    has_bias = module.down_proj.bias is not None
    first = gated_op(epilogues.operation(_activation(module.act_fn)), biased=has_bias)
    return first, *_ops_of_linear(module.down_proj)


def _ops_of_gpt2(module: Any) -> tuple[Any, ...]:
    return epilogues.linear_op(_activation(module.act), bias=True), epilogues.linear_op(None, bias=True)


_HUGGING_FACE = ("Llama", "Mistral", "Qwen2", "Qwen3")
_ATTENTIONS = tuple(f"{name}Attention" for name in _HUGGING_FACE)
_NORMS = tuple(f"{name}RMSNorm" for name in _HUGGING_FACE)

_RULES = (
    _Rule("Linear", ("Linear",), "a GEMM with its bias", _Linear, _linear_refuses, _ops_of_linear),
    _Rule(
        "Conv1D",
        ("Conv1D",),
        "a GEMM with its bias",
        _Conv1D,
        _linear_refuses,
        lambda module: (epilogues.linear_op(None, bias=True),),
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
    _Rule("Attention", (), "", _Attention, lambda module: "", lambda module: ()),
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


@functools.cache
def _class_of(original: Any, rule: str) -> Any:
    return type(
        f"Fused{original.__name__}",
        (_BY_NAME[rule].forward, original),
        {"_original": original, "_rule": _BY_NAME[rule], "__module__": __name__, "__doc__": original.__doc__},
    )


def _made_again(original: Any, rule: str) -> nn.Module:
    kind = _class_of(original, rule)
    made: nn.Module = kind.__new__(kind)
    return made
