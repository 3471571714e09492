"""The table of rungs: what each is, how it is built, and what its machine code must show."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from cutlass_ops.compilation.builder import build_many
from cutlass_ops.compilation.toolchain import find_toolchain

from . import cuda, proof, rung09_triton, rung10_cutlass, rung11_cublas
from .problem import SHAPES, Product, Shape, padded

REFUSED = "refused"  # instead of a class: the compiler must not accept it

ANY = Shape(1, 1, 1)
EIGHT_K = Shape(1, 1, 8)  # rows begin at multiples of 16 bytes


class Missing(Exception):
    """Something that a rung needs is not installed here. The message says what, and how to get it."""


@dataclass(frozen=True)
class Built:
    """A rung that was built.

    Attributes
    ----------
    product : callable or None
        Computes D; None for a rung that its compiler refuses.
    counts : dict
        Instructions in its machine code; empty where that cannot be read.
    says : str
        What else the build tells: the compiler's refusal, the kernel's name.
    library : Path or None
        The shared library of a rung in CUDA C++.
    """

    product: Product | None
    counts: dict[str, int] = field(default_factory=dict)
    says: str = ""
    library: Path | None = None


class Literature(NamedTuple):
    """What others reported for such a kernel on an H100 at 4096 x 4096 x 4096, in TFLOP/s."""

    what: str
    tflops: tuple[int, ...]


@dataclass(frozen=True)
class Rung:
    """One rung.

    Attributes
    ----------
    name : str
        Its number, with a letter where several share one.
    title : str
        What it is, in a few words.
    source : str
        The file to read.
    build : callable
        Takes the folder for libraries and the shapes to be run, and returns the rung, built.
    expected : str
        What its machine code must compute with: one of :data:`proof.CLASSES`, :data:`REFUSED`, or ``""`` where the
        machine code is in another's library.
    literature : Literature or None
        What to compare with.
    edges : bool
        Whether it is checked at :data:`problem.EDGES` as well. Where the library chooses, each would be another kernel
        to compile, and the library's own tests check them.
    """

    name: str
    title: str
    source: str
    build: Callable[[Path, tuple[Shape, ...]], Built]
    expected: str
    literature: Literature | None = None
    edges: bool = True

    def proven(self, built: Built) -> str | None:
        """Return why a build is not what the rung promises; None if it is."""
        if self.expected == REFUSED:
            return None if built.product is None else "it was expected not to compile, and does"
        found = proof.class_of(built.counts)
        if self.expected and found != self.expected:
            return f"its machine code computes with {found}, not {self.expected}: {built.counts}"
        return None


def _cuda(source: str, multiple: Shape = EIGHT_K) -> Callable[[Path, tuple[Shape, ...]], Built]:
    def build(folder: Path, shapes: tuple[Shape, ...]) -> Built:
        library = cuda.compile_rung(source, find_toolchain(), folder)
        counts = proof.count(library.read_bytes())
        return Built(padded(cuda.product_of(library), multiple), counts, library=library)

    return build


def _triton(blocks: rung09_triton.Blocks) -> Callable[[Path, tuple[Shape, ...]], Built]:
    def build(folder: Path, shapes: tuple[Shape, ...]) -> Built:
        if rung09_triton.triton is None:
            raise Missing("Triton, which comes with PyTorch for GPUs: pip install triton")
        try:
            code = rung09_triton.compile_ahead(blocks)
        except rung09_triton.triton.CompilationError as exc:
            return Built(None, says=str(exc.__cause__ or exc).strip().splitlines()[-1])
        return Built(partial(rung09_triton.run, blocks), proof.count(code))

    return build


def _untuned(folder: Path, shapes: tuple[Shape, ...]) -> Built:
    counts = proof.count(rung10_cutlass.machine_code(rung10_cutlass.UNTUNED))
    product = padded(rung10_cutlass.run_untuned, Shape(1, 8, 8), pads_d=True)
    return Built(product, counts, rung10_cutlass.UNTUNED.slug)


def _tuned(folder: Path, shapes: tuple[Shape, ...]) -> Built:
    specs = [rung10_cutlass.chosen(shape) for shape in shapes]
    if torch.cuda.is_available():
        build_many(specs)  # in parallel
    spec = specs[0]
    return Built(rung10_cutlass.run_tuned, proof.count(rung10_cutlass.machine_code(spec)), spec.slug)


def _cublas(folder: Path, shapes: tuple[Shape, ...]) -> Built:
    return Built(rung11_cublas.run, says="cuBLAS has its machine code in its own library")


_WMMA = Literature("WMMA by hand", (71,))

RUNGS: tuple[Rung, ...] = (
    Rung("1", "naive, FP32 on the CUDA cores", "rung01_naive.cu", _cuda("rung01_naive.cu", ANY), "FFMA"),
    Rung("2", "tiles in shared memory, FP32", "rung02_tiled.cu", _cuda("rung02_tiled.cu"), "FFMA"),
    Rung("3", "WMMA, a warp a tile", "rung03_wmma.cu", _cuda("rung03_wmma.cu", Shape(16, 16, 16)), "HMMA", _WMMA),
    Rung("4", "WMMA, shared memory, 8 warps", "rung04_wmma_shared.cu", _cuda("rung04_wmma_shared.cu"), "HMMA", _WMMA),
    Rung("5", "mma.sync, ldmatrix, cp.async", "rung05_mma_sync.cu", _cuda("rung05_mma_sync.cu"), "HMMA"),
    Rung(
        "6",
        "WGMMA 64x64, cp.async",
        "rung06_wgmma.cu",
        _cuda("rung06_wgmma.cu"),
        "HGMMA",
        Literature("WGMMA 64x64", (318,)),
    ),
    Rung(
        "7",
        "WGMMA 128x128, TMA and barriers",
        "rung07_tma.cu",
        _cuda("rung07_tma.cu"),
        "HGMMA",
        Literature("WGMMA 128x128", (433,)),
    ),
    Rung(
        "8",
        "WGMMA 128x256, producer and two consumers",
        "rung08_producer.cu",
        _cuda("rung08_producer.cu"),
        "HGMMA",
        Literature("WGMMA with a producer, and its last step", (504, 618)),
    ),
    Rung("9a", "Triton, 128x256x64, 8 warps", "rung09_triton.py", _triton(rung09_triton.WELL), "HGMMA"),
    Rung("9b", "Triton, BLOCK_M 32, 2 warps", "rung09_triton.py", _triton(rung09_triton.FEW_ROWS), "HMMA"),
    Rung("9c", "Triton, BLOCK_K 8", "rung09_triton.py", _triton(rung09_triton.SHORT_K), REFUSED),
    Rung("10a", "CUTLASS, as declared", "rung10_cutlass.py", _untuned, "HGMMA"),
    Rung("10b", "CUTLASS, as chosen", "rung10_cutlass.py", _tuned, "HGMMA", edges=False),
    Rung("11", "cuBLAS", "rung11_cublas.py", _cublas, "", Literature("cuBLAS", (713,))),
)

BY_NAME = {rung.name: rung for rung in RUNGS}


def select(names: list[str] | None) -> tuple[Rung, ...]:
    """Return the rungs of these names; a number alone means all of its letters. None means all.

    Raises
    ------
    ValueError
        If a name is none. The message lists them.
    """
    found: dict[str, Rung] = {}
    for name in [rung.name for rung in RUNGS] if names is None else names:
        meant = {rung.name: rung for rung in RUNGS if name in (rung.name, rung.name.rstrip("abc"))}
        if not meant:
            raise ValueError(f"{name!r} is no rung: there are {', '.join(BY_NAME)}")
        found |= meant
    return tuple(rung for rung in RUNGS if rung.name in found)


def build(rung: Rung, folder: Path | None = None, shapes: tuple[Shape, ...] = SHAPES) -> Built:
    """Build a rung, and prove what it computes with.

    Parameters
    ----------
    rung : Rung
        The rung.
    folder : Path, optional
        Where libraries go. A temporary folder of the process if not given.
    shapes : tuple of Shape
        What it will run.

    Raises
    ------
    Missing
        If what it needs is not installed.
    cuda.BuildError
        If it does not compile, or its machine code is not what the rung promises.
    """
    built = rung.build(folder or _temporary(), shapes)
    why = rung.proven(built)
    if why is not None:
        raise cuda.BuildError(f"rung {rung.name}: {why}")
    if rung.name == "11" and torch.cuda.is_available():
        shape = shapes[0]
        a, b = (torch.ones(side, shape.k, dtype=torch.float16, device="cuda") for side in (shape.m, shape.n))
        return replace(built, says=rung11_cublas.kernel_name(a, b, a.new_empty(shape.m, shape.n)))
    return built


_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def _temporary() -> Path:
    if not _FOLDERS:
        _FOLDERS.append(tempfile.TemporaryDirectory(prefix="ladder."))
    return Path(_FOLDERS[0].name)
