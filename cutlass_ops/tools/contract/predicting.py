"""The public function: from sizes or tensors to a contract."""

from __future__ import annotations

from typing import Any

import torch

from cutlass_ops.base.errors import ConfigError
from cutlass_ops.declare import gpus
from cutlass_ops.declare.chips import CHIPS, Chip
from cutlass_ops.declare.problem import Problem
from cutlass_ops.declare.roofline import roofline
from cutlass_ops.tools.contract import library, tensor_cores, triton
from cutlass_ops.tools.contract.given import (
    PRECISIONS,
    Asked,
    from_tensor,
    from_text,
    precision_of,
    require_effect,
    require_fp32,
)
from cutlass_ops.tools.contract.result import CUDA_CORES, NOTHING, Contract, Ruling
from cutlass_ops.tools.contract.tensor_cores import MMA_SYNC, Architecture, Instruction, instructions

PROGRAMS = ("library", "triton", "wmma")


def contract(
    a: Any,
    b: Any,
    *,
    m: int | None = None,
    n: int | None = None,
    k: int | None = None,
    arch: str | None = None,
    program: str | None = None,
    precision: str | None = None,
    block_m: int | None = None,
    block_n: int | None = None,
    block_k: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
) -> Contract:
    """Predict which instruction multiplies two matrices, and what to change for a faster one.

    Nothing is compiled, and no GPU is needed.

    Parameters
    ----------
    a, b : torch.Tensor or str
        A (M, K) and B (K, N): tensors, or element type and major such as ``"bf16.row"``. Types are f16, bf16, f32, f64,
        i8, e4m3 and e5m2. If a string has no major, it is row for A and col for B, as for a linear layer. ``".align4"``
        says that lines begin only at multiples of four elements.
    m, n, k : int
        Extents, if A and B are strings.
    arch : str, optional
        ``"sm_70"`` to ``"sm_120"``, or a known GPU such as ``"H200"``. Default: this machine's GPU, else sm_90.
    program : str, optional
        The kind of program: ``"library"`` for kernels like those of this library, CUTLASS and cuBLAS, ``"triton"`` for
        ``tl.dot`` or ``"wmma"`` for ``nvcuda::wmma``. Default: triton if `block_m` and the others are given, else
        library.
    precision : str, optional
        How FP32 is multiplied: ``"ieee"``, ``"tf32"``, or ``"tf32x3"`` for three products of TF32. Default: for
        tensors, the setting of ``torch.get_float32_matmul_precision()``; otherwise ieee.
    block_m, block_n, block_k, num_warps, num_stages : int, optional
        The constants of a Triton kernel: its tile, and by default 4 warps and 3 stages.

    Returns
    -------
    Contract
        Print it, or read its fields.

    Raises
    ------
    ValueError
        If an argument is missing or unknown, contradicts another one, or has no effect. The message says what to give.

    Examples
    --------
    >>> found = co.contract("bf16.row", "bf16.col", m=4096, n=4096, k=4096, arch="sm_90")
    >>> found.instruction, found.kept
    ('wgmma m64nNk16', True)
    >>> kernel = dict(m=4096, n=4096, k=4096, arch="sm_90", block_n=128, block_k=64)
    >>> trap = co.contract("f16", "f16", **kernel, block_m=32, num_warps=2)
    >>> trap.instruction, [each.remedy for each in trap.violated]
    ('mma.sync m16n8k16', ['num_warps=4', 'BLOCK_M=64'])
    >>> a, b = torch.ones(64, 72), torch.ones(72, 128)
    >>> print(co.contract(a, b, arch="sm_80"))
    f32.row by f32.row, M=64 N=128 K=72, on sm_80, by the rules of library
      runs      FMA on the CUDA cores, at most 12% of the Tensor Cores' peak
      could     mma.sync m16n8k8
      broken    operand_dtypes: a is f32 and b is f32, ...
                -> allow TF32: torch.set_float32_matmul_precision('high'), or input_precision='tf32' in tl.dot
      limit     bound by launch on NVIDIA A100-SXM4-80GB: ...
    """
    asked = _asked(a, b, m, n, k, precision)
    architecture, chip = where(arch)
    tile = _tile(block_m, block_n, block_k, num_warps, num_stages)
    if program is not None:
        require_program(program)
    given = {"num_warps": num_warps, "num_stages": num_stages}
    triton.require_effect("block_m, block_n and block_k", tile is not None, program, given)
    program = program or ("library" if tile is None else "triton")
    if program == "triton":
        if tile is None:
            raise ValueError("block_m, block_n and block_k are missing: Triton's choice depends on them")
        ruling = triton.ruling(asked, tile, architecture)
    else:
        ruling = (library.wmma_ruling if program == "wmma" else library.ruling)(asked, architecture)
    return _contract(program, asked, architecture, chip, ruling)


def require_program(name: str) -> None:
    """Raise ValueError, with the known names, for a program whose rules are unknown."""
    if name not in PROGRAMS:
        raise ValueError(f"program is {name!r}: use one of {', '.join(PROGRAMS)}")


def require_precision(name: str) -> None:
    """Raise ValueError, with the known names, for an unknown precision."""
    if name not in PRECISIONS:
        raise ValueError(f"precision is {name!r}: use one of {', '.join(PRECISIONS)}")


def _asked(a: Any, b: Any, m: int | None, n: int | None, k: int | None, precision: str | None) -> Asked:
    if isinstance(a, torch.Tensor) != isinstance(b, torch.Tensor):
        raise ValueError("a and b must both be tensors, or both texts such as 'bf16.row'")
    if precision is not None:
        require_precision(precision)
    if isinstance(a, torch.Tensor):
        if (m, n, k) != (None, None, None):
            raise ValueError("m, n and k are the tensors' own: leave them out, or pass texts such as 'bf16.row'")
        first, second = from_tensor("a", a), from_tensor("b", b)
        if a.shape[1] != b.shape[0]:
            raise ValueError(f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}: a's columns must be b's rows")
        if precision is not None:
            require_fp32(
                precision, {f"{name} of {x.dtype}": g.dtype for name, x, g in (("a", a, first), ("b", b, second))}
            )
        allowed = "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"
        return Asked(first, second, a.shape[0], b.shape[1], a.shape[1], precision or allowed)
    if m is None or n is None or k is None:
        raise ValueError("m, n and k are missing: give the extents, such as m=4096, n=4096, k=4096, or pass tensors")
    problem = Problem.of((m, n, k))
    first = from_text(a, "row", *problem.extents, first=True)
    second = from_text(b, "col", *problem.extents, first=False)
    if precision is not None:
        require_effect(precision, a, b)
    return Asked(first, second, *problem.extents, precision or precision_of(a))


def where(name: str | None) -> tuple[Architecture, Chip | None]:
    """Return the architecture, and the chip whose peaks represent it, if one is known."""
    chip = None
    if name is None and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        name, chip = f"sm_{properties.major}{properties.minor}", CHIPS.get(properties.name)
    name = name or "sm_90"
    try:
        architecture = tensor_cores.architecture(name)
    except ValueError as unknown:
        try:
            device = gpus.gpu_named(name)
        except ConfigError:
            raise ValueError(f"{unknown}, or the name of a GPU: {', '.join(gpus.GPUS)}") from None
        architecture, chip = tensor_cores.architecture("{}{}".format(*device.capability)), CHIPS[device.name]
    if chip is None:
        usual = gpus.BY_TARGET.get(architecture.name) or gpus.BY_TARGET.get(f"{architecture.name}a")
        chip = None if usual is None else CHIPS[usual.name]
    return architecture, chip


def _tile(m: int | None, n: int | None, k: int | None, warps: int | None, stages: int | None) -> triton.Tile | None:
    if (m, n, k) == (None, None, None):
        return None
    if m is None or n is None or k is None:
        raise ValueError("give block_m, block_n and block_k together: Triton's choice depends on all three")
    return triton.Tile.of((m, n, k), warps, stages)


def _contract(program: str, asked: Asked, architecture: Architecture, chip: Chip | None, ruling: Ruling) -> Contract:
    peak = next(iter(instructions(*library.reachable(asked.types, architecture), architecture).values()))
    instruction = ruling.instruction
    fraction: float | None
    if ruling.nothing:
        family, runs, fraction = NOTHING, ruling.nothing, 0.0
    elif instruction is None and program != "triton" and asked.types[0] in ("e4m3", "e5m2"):
        family, runs, fraction = NOTHING, "no kernel multiplies these as they are", 0.0
    elif instruction is None:
        family, runs = CUDA_CORES, "FMA on the CUDA cores"
        fraction = ruling.useful * _lanes(asked, architecture) / (architecture.tensor_fmas * peak.rate)
    else:
        family, runs = instruction.family, instruction.name
        fraction = _reach(instruction, peak, architecture, ruling.useful / asked.products)
    problem = Problem(asked.m, asked.n, asked.k)
    of_a, of_b = asked.a.element.bits / 8, asked.b.element.bits / 8
    moved = problem.bytes(of_a, of_b, max(of_a, 2))
    return Contract(
        program, architecture.name, str(asked.a), str(asked.b), problem.extents, family, runs,
        "" if instruction is None else instruction.opcode, peak.name, fraction, ruling.conditions,
        None if chip is None else roofline(problem, moved, chip, peak.rate), "" if chip is None else chip.name,
    )  # fmt: skip


def _lanes(asked: Asked, architecture: Architecture) -> int:
    return architecture.fp64_lanes if asked.a.element.bits == 64 else architecture.fp32_lanes


def _reach(instruction: Instruction, peak: Instruction, architecture: Architecture, useful: float) -> float | None:
    """Return the part of the peak that an instruction can reach for the caller's types; None if nobody measured it."""
    # Where types have no faster family, the peak is that of mma.sync.
    slower = instruction.family == MMA_SYNC and peak.family != MMA_SYNC
    family = architecture.mma_sync_reach if slower else 1.0
    return None if family is None else useful * family * instruction.rate / peak.rate
