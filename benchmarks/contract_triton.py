"""Compares what `cutlass_ops.contract` predicts for Triton with what Triton compiles. No GPU is needed.

    pip install triton==3.6.0
    python benchmarks/contract_triton.py --out benchmarks/results/contract_triton.json    # and others, with --seed 1

Each configuration is compiled ahead of time to machine code. The instruction is read from the PTX, and again from the
machine code by the cuobjdump that Triton brings. Each row: {"arch", "dtype", "precision", "block", "warps", "stages",
"b", "aligned", "predicted", "agrees", "compiled", "opcodes", "stack", "why", "fits_predicted", "fits",
"spills_predicted"}. B is column-major in "col". The stack has what a thread spills.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import subprocess
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from cutlass_ops.tools.contract.predicting import contract
from cutlass_ops.tools.contract.tensor_cores import ARCHITECTURES

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# What `contract` calls types and what Triton does; how a kernel of each adds up and stores.
DTYPES = {"f16": "fp16", "bf16": "bf16", "f32": "fp32", "f64": "fp64", "i8": "i8", "e4m3": "fp8e4nv", "e5m2": "fp8e5"}
SUMS = {"f64": (tl.float64, "fp64"), "i8": (tl.int32, "i32")}
# Of an architecture: drawn at random, with more of the types that most kernels have.
DRAWN = {"f16": 16, "bf16": 8, "f32": 12, "f64": 4, "i8": 6, "e4m3": 6, "e5m2": 4}
# What people run, and the traps: (dtype, precision, M, N, K of a block, warps, stages, B's major).
CHOSEN = (
    ("f16", "ieee", 128, 128, 64, 4, 3, "col"),
    ("f16", "ieee", 128, 256, 64, 8, 3, "col"),
    ("f16", "ieee", 128, 256, 64, 4, 3, "row"),
    ("f16", "ieee", 128, 256, 128, 8, 4, "col"),
    ("f16", "ieee", 256, 128, 64, 8, 3, "row"),
    ("f16", "ieee", 64, 64, 32, 2, 4, "col"),
    ("f16", "ieee", 32, 128, 64, 4, 3, "col"),
    ("f16", "ieee", 64, 8, 64, 4, 3, "col"),
    ("f16", "ieee", 128, 128, 8, 4, 3, "col"),
    ("bf16", "ieee", 64, 128, 64, 16, 3, "col"),
    ("bf16", "ieee", 128, 128, 64, 1, 2, "col"),
    ("f32", "ieee", 128, 64, 32, 8, 2, "col"),
    ("f32", "tf32", 128, 64, 32, 8, 2, "row"),
    ("f32", "tf32x3", 128, 64, 32, 8, 2, "row"),
    ("e4m3", "ieee", 128, 128, 64, 4, 3, "row"),
    ("i8", "ieee", 128, 128, 64, 4, 3, "col"),
)
OPCODES = re.compile(r"\b(HMMA|IMMA|DMMA|QMMA|HGMMA|IGMMA|QGMMA|UTC[A-Z]*MMA)\b")
PTX = re.compile(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b")
FAMILIES = {"wgmma.mma_async": "wgmma", "mma.sync": "mma.sync", "tcgen05.mma": "tcgen05"}


@triton.jit
def gemm(  # noqa: ANN201
    A, B, C, M, N, K, sam, sak, sbk, sbn, scm, scn,  # noqa: ANN001, N803
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr, SUM: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """C = A @ B, a block of C for each program: Triton's tutorial, with masks at every edge."""
    pid = tl.program_id(0)
    columns = tl.cdiv(N, BN)
    rm = pid // columns * BM + tl.arange(0, BM)
    rn = pid % columns * BN + tl.arange(0, BN)
    rk = tl.arange(0, BK)
    a = A + rm[:, None] * sam + rk[None, :] * sak
    b = B + rk[:, None] * sbk + rn[None, :] * sbn
    acc = tl.zeros((BM, BN), SUM)
    for k in range(0, K, BK):
        x = tl.load(a, mask=(rm[:, None] < M) & (rk[None, :] + k < K), other=0.0)
        y = tl.load(b, mask=(rk[:, None] + k < K) & (rn[None, :] < N), other=0.0)
        acc = tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=SUM)
        a += BK * sak
        b += BK * sbk
    c = C + rm[:, None] * scm + rn[None, :] * scn
    tl.store(c, acc.to(C.dtype.element_ty), mask=(rm[:, None] < M) & (rn[None, :] < N))


@dataclass(frozen=True)
class Case:
    """One kernel."""

    arch: str
    dtype: str
    precision: str
    block: tuple[int, int, int]
    warps: int
    stages: int
    b: str
    aligned: bool


# Sums of a thread in FP64: on the CUDA cores, ptxas takes minutes for more.
MOST_SUMS = 256


def cases(arch: str, seed: int = 0) -> list[Case]:
    """Return an architecture's kernels: the chosen ones, and others drawn at random, the same for all architectures.

    With another seed than 0, there are other random ones, and none that was chosen.
    """
    chosen = CHOSEN if seed == 0 else ()
    found = [Case(arch, t, p, (m, n, k), w, s, b, True) for t, p, m, n, k, w, s, b in chosen]
    rng = random.Random(seed)
    for dtype, count in DRAWN.items():
        for _ in range(count):
            precision = rng.choice(("ieee", "tf32", "tf32x3")) if dtype == "f32" else "ieee"
            wide = (16, 32, 64) if dtype in ("f32", "f64") else (16, 32, 64, 128)
            block = rng.choice((16, 32, 64, 128)), rng.choice((8, 16, 32, 64, 128)), rng.choice(wide)
            rest = rng.choice((1, 2, 4, 8)), rng.choice((2, 3)), rng.choice(("row", "col")), rng.choice((True, False))
            if dtype != "f64" or block[0] * block[1] <= MOST_SUMS * 32 * rest[0]:
                found.append(Case(arch, dtype, precision, block, *rest))
    return list(dict.fromkeys(found))


def compiled(case: Case) -> dict[str, Any]:
    """Compile one kernel; return its family of instructions, opcodes, shared memory and stack, or the error."""
    total, stored = SUMS.get(case.dtype, (tl.float32, "fp16"))
    element = DTYPES[case.dtype]
    strides = {"sak": 1, "scn": 1, "sbk" if case.b == "col" else "sbn": 1}
    constants = {
        "BM": case.block[0],
        "BN": case.block[1],
        "BK": case.block[2],
        "PRECISION": case.precision,
        "SUM": total,
    }
    names = gemm.arg_names
    signature = dict.fromkeys(names, "i32") | dict.fromkeys((*strides, *constants), "constexpr")
    signature |= {"A": f"*{element}", "B": f"*{element}", "C": f"*{stored}"}
    free = [name for name in names if signature[name] != "constexpr"]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in free} if case.aligned else {}
    source = ASTSource(gemm, signature, constexprs=strides | constants, attrs=attributes)
    target = GPUTarget("cuda", int(case.arch[3:]), 32)
    try:
        kernel = triton.compile(source, target=target, options={"num_warps": case.warps, "num_stages": case.stages})
    except Exception as exc:
        return {"compiled": "nothing", "why": str(exc).strip().splitlines()[-1][:120]}
    families = sorted({FAMILIES[name] for name in PTX.findall(kernel.asm["ptx"])})
    return {
        "compiled": "+".join(families) or "none",
        "opcodes": _opcodes(kernel.asm["cubin"]),
        "stack": _stack(kernel.asm["cubin"]),
        "shared": kernel.metadata.shared,
    }


def _cuobjdump(cubin: bytes, option: str) -> str:
    program = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([program, option, file.name], capture_output=True, text=True, check=True).stdout


def _opcodes(cubin: bytes) -> dict[str, int]:
    found = OPCODES.findall(_cuobjdump(cubin, "-sass"))
    return {name: found.count(name) for name in sorted(set(found))}


def _stack(cubin: bytes) -> int:
    return max(map(int, re.findall(r"STACK:(\d+)", _cuobjdump(cubin, "-res-usage"))), default=0)


def compare(case: Case) -> dict[str, Any]:
    """Return a row: what was predicted, what was compiled, and whether they agree."""
    tight = "" if case.aligned else ".align1"
    m, n, k = case.block
    said = contract(
        f"{case.dtype}.row{tight}", f"{case.dtype}.{case.b}{tight}", m=4096, n=4096, k=4096, arch=case.arch,
        precision=case.precision if case.dtype == "f32" else None, block_m=m, block_n=n, block_k=k,
        num_warps=case.warps, num_stages=case.stages,
    )  # fmt: skip
    found = {"opcodes": {}, "stack": 0, "shared": 0, "why": ""} | compiled(case)
    conditions = {each.name: each.met for each in said.conditions}
    launches = said.instruction != "does not launch"
    shared, limit = found.pop("shared"), ARCHITECTURES[case.arch].shared_memory
    # A kernel that does not launch was compiled all the same, and its opcode tells the family.
    agrees = set(found["opcodes"]) == {said.opcode} - {""} and (not launches or said.family == found["compiled"])
    return {
        **asdict(case), "predicted": said.instruction, "agrees": agrees, **found,
        "fits_predicted": launches, "fits": found["compiled"] == "nothing" or shared <= limit,
        "spills_predicted": not conditions.get("accumulators", True),
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Count agreement for each architecture."""
    found: dict[str, Any] = {}
    for arch, members in itertools.groupby(rows, key=lambda row: row["arch"]):
        mine = list(members)
        found[arch] = {
            "configurations": len(mine),
            "agree": sum(row["agrees"] for row in mine),
            "fits_agree": sum(row["fits"] == row["fits_predicted"] for row in mine),
            "compiled": dict(sorted(Counter(row["compiled"] for row in mine).items())),
        }
    return found


def main() -> None:
    """Compile all kernels and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archs", nargs="+", default=list(ARCHS), choices=ARCHS)
    parser.add_argument("--seed", type=int, default=0, help="another than 0 draws kernels that the rules never saw")
    parser.add_argument("--jobs", type=int, default=2, help="compilations at the same time")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for arch in args.archs:
        # Processes of its own: Triton keeps conversions of FP8 of the first architecture that a process compiles for.
        with ProcessPoolExecutor(args.jobs) as pool:
            rows += pool.map(compare, cases(arch, args.seed), chunksize=4)
    head = {"triton": triton.__version__, **({"seed": args.seed} if args.seed else {}), "summary": summary(rows)}
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')
    for arch, found in head["summary"].items():
        print(arch, found)
    for row in rows:
        if not row["agrees"] or row["fits"] != row["fits_predicted"]:
            print("differs:", row)


if __name__ == "__main__":
    main()
