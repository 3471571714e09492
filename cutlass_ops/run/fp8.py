"""Scales for quantisation to FP8: computed from greatest absolute values, and kept from call to call.

All of it stays on the device. Nothing waits for a value, so a CUDA graph may capture any of it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from cutlass_ops.base import arch
from cutlass_ops.base.dtypes import FP8
from cutlass_ops.base.frozen import plain
from cutlass_ops.operand import reference, watching
from cutlass_ops.operand.results import operand_strides
from cutlass_ops.operand.tensors import require_same_device
from cutlass_ops.run.values import Scaled

DTYPES: tuple[torch.dtype, ...] = tuple(getattr(torch, t.torch_name) for t in FP8)
# Names of torch.nn.functional.ScalingType.
RECIPES = ("TensorWise", "RowWise")
Scaling = Literal["delayed", "current", "static"]
Algorithm = Literal["max", "most_recent"]
# Its reciprocal is a finite FP32 number, and not a denormal one, which some instructions read as 0.
_LEAST = torch.finfo(torch.float32).tiny
_MOST_MARGIN = 64


def require_dtype(name: str, dtype: object) -> None:
    """Raise TypeError if a dtype is not an FP8 type."""
    if dtype not in DTYPES:
        raise TypeError(f"{name} is {dtype}: use {' or '.join(map(str, DTYPES))}")


def scale_of(amax: Tensor, dtype: torch.dtype, margin: float = 0.0) -> Tensor:
    """Return the FP32 scale that maps the greatest absolute value to an FP8 type's largest.

    It is amax / largest * 2**margin, with amax's shape: 1 if amax is 0, infinite or NaN. Otherwise neither it nor its
    reciprocal is infinite or denormal. `margin` is powers of two of room above `amax`.
    """
    amax = amax.float()
    scale = (amax * (2.0**margin / torch.finfo(dtype).max)).clamp(_LEAST, 1 / _LEAST)
    return torch.where((amax > 0) & amax.isfinite(), scale, torch.ones_like(scale))


def divided(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x / scale in FP8, rounded as kernels do: by the scale's reciprocal, in FP32, saturating.

    Lines begin at multiples of 16 bytes, so that a GEMM takes the result.
    """
    found = reference.rounded(x.float() * scale.reciprocal(), dtype)
    if not x.ndim or x.shape[-1] % arch.TMA_ALIGNMENT_BYTES == 0:
        return found
    return x.new_empty_strided(x.shape, operand_strides(x.shape), dtype=dtype).copy_(found)


class Fp8State(torch.nn.Module):
    """The FP8 scale of one tensor of a network, and the largest absolute values from which it is computed.

    It is a module without parameters: a network that has it as an attribute moves, saves and loads it. Scale and
    history stay FP32 if the network is converted to another dtype. It is for inference and forward passes: gradients in
    FP8 are refused.

    Scalings are those of Transformer Engine:

    - ``"delayed"``: a pass uses a scale from earlier passes. :meth:`record` notes largest absolute values, such as
      those of `co.e.amax` in an epilogue. :meth:`step`, called once after each pass, computes the next scale from them.
    - ``"static"``: the scale does not change. Calibrate with ``"delayed"``, then set ``state.scaling = "static"``.
    - ``"current"``: :meth:`quantize` computes the scale from the tensor itself, which is read twice.

    Parameters
    ----------
    recipe : str or torch.nn.functional.ScalingType
        What a scale applies to, as `torch.nn.functional.scaled_mm` names it: ``"TensorWise"``, or with current scaling
        ``"RowWise"``.
    dtype : torch.dtype
        ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
    scaling : {"delayed", "current", "static"}
        See above. It may be set later.
    history : int
        Number of passes whose largest absolute values are kept.
    margin : float
        Headroom for larger values in later passes: the scale is multiplied by 2 to the power of this.
    algorithm : {"max", "most_recent"}
        Whether the scale follows from the maximum of the history, or from its most recent value.
    device : torch.device, optional
        The device of scale and history.

    Attributes
    ----------
    scale : Tensor
        The factor of the quantised tensor: FP32, without dimensions, 1 at first. Kernels read it on the device: pass it
        as `scale_out` to the call that quantises, and in a :class:`cutlass_ops.Scaled` to the call that reads the
        result. :meth:`step` changes it in place.
    history : Tensor
        (history,), FP32: largest absolute values of the passes, the current pass first.

    Raises
    ------
    TypeError, ValueError
        If an argument does not fit. The message says what to do.

    Examples
    --------
    >>> @co.epilogue
    ... def quantised(acc, scale: co.Scalar):
    ...     return {"d": acc * co.e.reciprocal(scale), "amax": co.e.amax(acc, dim=1)}
    >>> state = co.nn.Fp8State(margin=1)
    >>> x, w = torch.tensor([[14.0, -896.0]]).bfloat16(), torch.eye(2).bfloat16()
    >>> for step in range(2):
    ...     d, amax = co.gemm(x, w, epilogue=quantised, scale=state.scale, out_dtype=torch.float8_e4m3fn)
    ...     print(d.float().tolist(), state.scale.item())
    ...     state.record(amax)
    ...     state.step()
    [[14.0, -448.0]] 1.0
    [[3.5, -224.0]] 4.0

    Current scaling, with a scale for each row:

    >>> values, scale = co.nn.Fp8State("RowWise", scaling="current").quantize(x)
    >>> scale.tolist(), (values.float() * scale[:, None]).tolist()
    ([2.0], [[14.0, -896.0]])
    """

    scale: Tensor
    history: Tensor

    def __init__(
        self,
        recipe: Any = "TensorWise",
        *,
        dtype: torch.dtype = torch.float8_e4m3fn,
        scaling: Scaling = "delayed",
        history: int = 16,
        margin: float = 0.0,
        algorithm: Algorithm = "max",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        require_dtype("dtype", dtype)
        name = str(getattr(recipe, "name", recipe))
        if name not in RECIPES:
            blocks = ": scales of blocks follow from each block and keep nothing" if name.startswith("Block") else ""
            raise ValueError(f"recipe is {name!r}{blocks}: use {' or '.join(map(repr, RECIPES))}")
        if algorithm not in get_args(Algorithm):
            raise ValueError(f"algorithm is {algorithm!r}: use {' or '.join(map(repr, get_args(Algorithm)))}")
        history = plain(history)
        if type(history) is not int or history < 1:
            raise ValueError(f"history is {history!r}: pass the number of passes to keep, 1 or more")
        if isinstance(margin, bool) or not isinstance(margin, (int, float)):
            raise TypeError(f"margin must be a number, not {type(margin).__name__}: pass powers of two")
        if not -_MOST_MARGIN <= margin <= _MOST_MARGIN:
            raise ValueError(f"margin is {margin}: pass powers of two, from {-_MOST_MARGIN} to {_MOST_MARGIN}")
        self.recipe, self.dtype, self.margin, self.algorithm = name, dtype, float(margin), algorithm
        self.scaling = scaling
        if name == "TensorWise":
            # Both change in place, which inference tensors do only in inference mode.
            with torch.inference_mode(False):
                self.register_buffer("scale", torch.ones((), dtype=torch.float32, device=device))
                self.register_buffer("history", torch.zeros(history, dtype=torch.float32, device=device))

    @property
    def scaling(self) -> Scaling:
        """``"delayed"``, ``"current"`` or ``"static"``."""
        return self._scaling

    @scaling.setter
    def scaling(self, value: Scaling) -> None:
        if value not in get_args(Scaling):
            raise ValueError(f"scaling is {value!r}: use {', '.join(map(repr, get_args(Scaling)))}")
        if self.recipe == "RowWise" and value != "current":
            raise ValueError(
                f"scaling is {value!r} with the recipe 'RowWise', but the scales of one pass do not fit the rows of "
                "another: use scaling='current', or the recipe 'TensorWise'"
            )
        self._scaling: Scaling = value

    @torch.no_grad()
    def record(self, amax: Tensor) -> None:
        """Note the largest absolute values of this pass. Of several calls in a pass, the maximum counts.

        With static scaling, nothing happens. Signs are ignored. Infinities and NaN are ignored too, so that they cannot
        spoil the scale.

        Parameters
        ----------
        amax : Tensor
            Any shape and float dtype, on the state's device, such as the result of ``co.e.amax(y, dim=1)``.

        Raises
        ------
        TypeError, ValueError
            If `amax` is not such a tensor, the scaling is current, or the state was copied under
            ``torch.inference_mode()`` and this is outside.
        NotImplementedError
            If `amax` is one of the values over which ``torch.vmap`` maps.

        Examples
        --------
        >>> state = co.nn.Fp8State()
        >>> state.record(torch.tensor([3.0, 448.0]))
        >>> state.history[0].item(), state.scale.item()
        (448.0, 1.0)
        """
        _require_floats("amax", amax)
        self._require_kept("record")
        if self.scaling == "static" or not amax.numel():
            return
        require_same_device("amax", amax, self.history, "the state")
        self._require_to_change("amax", amax)
        self.history[0].copy_(torch.maximum(self.history[0], _greatest(amax.detach())))

    @torch.no_grad()
    def step(self) -> None:
        """Compute the next pass's scale from the history, in place, and start a new pass.

        The scale stays as it is with static scaling, or if the history has only zeros.

        Raises
        ------
        ValueError
            If the scaling is current, or the state was copied under ``torch.inference_mode()`` and this is outside.

        Examples
        --------
        >>> state = co.nn.Fp8State(history=2)
        >>> for amax in (448.0, 224.0, 224.0):
        ...     state.record(torch.tensor(amax))
        ...     state.step()
        ...     print(state.scale.item())
        1.0
        1.0
        0.5
        """
        self._require_kept("step")
        if self.scaling == "static":
            return
        self._require_to_change()
        known = self.history.amax() if self.algorithm == "max" else self.history[0]
        self.scale.copy_(torch.where(known > 0, scale_of(known, self.dtype, self.margin), self.scale))
        self.history.copy_(self.history.roll(1))
        self.history[0].zero_()

    def quantize(self, x: Tensor, amax: Tensor | None = None) -> Scaled:
        """Quantise a tensor that no GEMM's epilogue can quantise, such as attention's output.

        Parameters
        ----------
        x : Tensor
            (..., K), any float dtype.
        amax : Tensor, optional
            Largest absolute values of x, if they are known: of each row with ``"RowWise"``, of all of x with
            ``"TensorWise"``. Without it, they are computed from x, unless the scaling is static.

        Returns
        -------
        Scaled
            Values (..., K) in FP8, and a scale without dimensions, or (...) with ``"RowWise"``. With delayed and static
            scaling, the scale is the state's own tensor, which the next :meth:`step` changes.

        Raises
        ------
        TypeError, ValueError
            If an argument does not fit, or x requires grad; with delayed scaling also as :meth:`record`.
        NotImplementedError
            With delayed scaling, if ``torch.vmap`` goes over x or `amax`.

        Examples
        --------
        >>> x = torch.tensor([[1.0, -448.0], [2.0, 896.0]])
        >>> co.nn.Fp8State(scaling="current").quantize(x).scale.item()
        2.0
        """
        _require_floats("x", x)
        if watching.is_differentiated(x):
            raise ValueError(
                "x requires grad, and no gradient passes through FP8: call under torch.no_grad(), or pass x.detach()"
            )
        if amax is not None:
            _require_floats("amax", amax)
            require_same_device("amax", amax, x, "x")
        with torch.no_grad():
            return self._of_rows(x, amax) if self.recipe == "RowWise" else self._of_tensor(x, amax)

    def _of_rows(self, x: Tensor, amax: Tensor | None) -> Scaled:
        if not x.ndim:
            raise ValueError("x has no dimensions, and so no rows: use the recipe 'TensorWise'")
        rows = tuple(x.shape[:-1])
        if amax is not None and tuple(amax.shape) not in (rows, (*rows, 1), (prod(rows),)):
            raise ValueError(
                f"amax has shape {tuple(amax.shape)}: with the recipe 'RowWise' it must have shape {rows}, a value for "
                "each row of x"
            )
        greatest = _greatest(x, -1) if amax is None else amax.reshape(rows).abs()
        scale = scale_of(greatest, self.dtype, self.margin)
        return Scaled(divided(x, scale.unsqueeze(-1), self.dtype), scale)

    def _of_tensor(self, x: Tensor, amax: Tensor | None) -> Scaled:
        name = "x" if amax is None else "amax"
        if amax is None and self.scaling != "static":
            amax = _greatest(x)
        if amax is not None and self.scaling == "current":
            scale = scale_of(_greatest(amax), self.dtype, self.margin)
            return Scaled(divided(x, scale, self.dtype), scale)
        require_same_device("x", x, self.scale, "the state")
        if amax is not None:
            self._require_to_change(name, amax)
        found = Scaled(divided(x, self.scale, self.dtype), self.scale)
        if amax is not None:
            self.record(amax)
        return found

    def extra_repr(self) -> str:
        """Return the settings, for the module's ``repr``."""
        return f"{self.recipe}, dtype={self.dtype}, scaling={self.scaling}, margin={self.margin:g}"

    def _require_kept(self, what: str) -> None:
        if self.scaling == "current":
            instead = ", or set scaling = 'delayed'" if self.recipe == "TensorWise" else ""
            raise ValueError(
                f"{what} is for delayed scaling, and scaling is 'current', which keeps nothing between passes: leave "
                f"out this call{instead}"
            )

    def _require_to_change(self, name: str = "", value: Tensor | None = None) -> None:
        """Require that scale and history may change in place, also by a value of that name."""
        if torch.compiler.is_compiling():
            return  # neither check can be compiled, and PyTorch refuses what it cannot do
        if self.history.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                "the state's scale and history come from torch.inference_mode(), and PyTorch changes them in that mode "
                "alone: call record, step and quantize there, or copy the state outside, by copy.deepcopy(state)"
            )
        if value is not None and watching.is_batched(value) and not watching.is_batched(self.history):
            raise NotImplementedError(
                f"torch.vmap goes over {name}, and a state with delayed scaling keeps one history of all: return "
                "greatest absolute values from the function and record them outside, or use scaling='current', which "
                "has a scale for each"
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the scale to 1 and forget the history, as in a new state.

        A state that leaves the meta device, as by ``to_empty``, does so by itself.

        Examples
        --------
        >>> state = co.nn.Fp8State(device="meta").to_empty(device="cpu")
        >>> state.scale.item(), state.history.sum().item()
        (1.0, 0.0)
        """
        if self.recipe == "TensorWise":
            self._require_to_change()
            self.scale.fill_(1.0)
            self.history.zero_()

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        for name, buffer in self._buffers.items():
            self._buffers[name] = None if buffer is None else buffer.float()  # as load_state_dict(assign=True) may not

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Fp8State:
        def moved(x: Tensor) -> Tensor:
            with torch.inference_mode(False):
                found = fn(x)
            # A scale in 16 bits would have another value.
            return found if found.dtype == x.dtype else x.to(found.device)

        on_meta = {name for name, x in self._buffers.items() if x is not None and x.is_meta}
        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        if any(not self.get_buffer(name).is_meta for name in on_meta):
            self.reset_parameters()  # to_empty leaves memory uninitialised
        return self


def _greatest(x: Tensor, dim: int | None = None) -> Tensor:
    """Return the greatest absolute value, or that of each row: 0 if none is finite."""
    if not x.numel():
        return x.new_zeros(x.shape[:-1] if dim is not None else (), dtype=torch.float32)
    known = x.abs().nan_to_num_(nan=0.0, posinf=0.0)
    return (known.amax() if dim is None else known.amax(dim)).float()


def _require_floats(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, not {type(value).__name__}")
    if not value.is_floating_point() or value.dtype in DTYPES:
        raise TypeError(f"{name} is {value.dtype}: use torch.float32, torch.float16 or torch.bfloat16")
    watching.refuse_tangent(name, value)
