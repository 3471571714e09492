"""The problems that benchmarks measure and that the shipped tables are tuned on.

``GRID`` is for reported results: four weights of an 8B model with 1 to 8192 rows, and squares. ``TUNING`` also has the
weights of other models, so that dispatch has measurements nearly everywhere.
"""

from __future__ import annotations

import random

Shape = tuple[int, int, int]

ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
SQUARES = (1024, 2048, 4096, 8192)

# (N, K) of linear layers, small to large: encoders, 1B to 70B decoders, vocabularies.
OTHER_WEIGHTS = (
    *((768, 768), (3072, 768), (768, 3072), (1024, 1024), (4096, 1024), (1024, 4096)),
    *((2048, 2048), (8192, 2048), (2048, 8192), (3072, 3072), (16384, 3072), (3072, 8192)),
    *((5120, 5120), (13824, 5120), (5120, 13824), (10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672)),
    *((32000, 4096), (128256, 4096), (1536, 8960), (11008, 4096), (4096, 11008)),
)
OTHER_ROWS = (1, 8, 32, 64, 96, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 6144)
# Weights and numbers of rows that are less divisible by powers of two.
IRREGULAR_WEIGHTS = (
    *((3584, 3584), (18944, 3584), (4608, 3584), (2560, 9728)),
    *((9728, 2560), (6144, 2048), (4096, 12288), (5120, 17408)),
)
# Lines in memory that are not aligned to those of the L2 cache.
ODD_WEIGHTS = ((4096, 1000), (1000, 4096), (2728, 1032), (1064, 2728), (5000, 11000))
ODD_ROWS = (16, 48, 128, 256, 512, 1024, 2048, 4096)
# Rows of a column-major A with lines that are not aligned to the cache's, or are shorter.
ODD_LINES = (
    *(40, 72, 104, 136, 168, 216, 248, 280, 328, 392, 440, 488, 552, 632),
    *(712, 808, 904, 1048, 1208, 1416, 1656, 1912, 2232, 2712, 3304, 4104, 5208),
)
SHORT_LINES = (8, 16, 32, 48, 56)
IRREGULAR_ROWS = (
    *(4, 20, 40, 56, 80, 112, 144, 160, 224, 288, 320, 448),
    *(576, 640, 704, 896, 1152, 1280, 1408, 1664, 1920, 2304, 2816, 4608),
)
# Mixtures of experts and small models, with numbers of rows as for tokens.
EXPERT_WEIGHTS = (
    *((7168, 2048), (4096, 7168), (2112, 7168), (24576, 1536), (32768, 512), (1408, 2048), (2048, 1408)),
    *((10944, 2048), (2048, 10944), (2880, 2880), (5120, 2880), (6912, 2560), (2560, 6912)),
)
TOKENS = (
    *(30, 75, 90, 135, 150, 170, 260, 300, 350, 400, 470, 550),
    *(680, 800, 950, 1100, 1200, 1500, 1800, 2200, 2700, 3300, 4000, 5500),
)


def _grid() -> tuple[Shape, ...]:
    weights = [(m, n, k) for n, k in WEIGHTS for m in ROWS]
    return tuple(dict.fromkeys([*weights, *((s, s, s) for s in SQUARES)]))


def drawn(seed: int, count: int) -> tuple[Shape, ...]:
    """Draw problems of all sizes: weights in multiples of 64 to 512 and any number of rows, log-uniform."""
    rng = random.Random(seed)

    def extent(largest: float) -> int:
        unit = rng.choice((64, 128, 256, 512))
        return max(1, round(2 ** rng.uniform(9, largest) / unit)) * unit

    return tuple((round(2 ** rng.uniform(0, 13)), extent(14.9), extent(14.6)) for _ in range(count))


def _tuning() -> tuple[Shape, ...]:
    # Three of five row counts for each weight, in turn, so that similar weights complete each other.
    others = [
        (m, n, k)
        for at, (n, k) in enumerate(OTHER_WEIGHTS)
        for number, m in enumerate(OTHER_ROWS)
        if (number + at) % 5 in (0, 2, 3)
    ]
    others += [
        (m, n, k)
        for at, (n, k) in enumerate(IRREGULAR_WEIGHTS)
        for number, m in enumerate(IRREGULAR_ROWS)
        if (number + at) % 8 in (0, 3, 5)
    ]
    others += [
        (m, n, k)
        for at, (n, k) in enumerate(ODD_WEIGHTS)
        for number, m in enumerate(ODD_ROWS)
        if (number + at) % 2 == 0
    ]
    between = [(m, n, k) for n, k in WEIGHTS for m in (32, 96, 192, 384, 768, 1536, 3072)]
    others += [
        (m, n, k)
        for at, (n, k) in enumerate(EXPERT_WEIGHTS)
        for number, m in enumerate(TOKENS)
        if (number + at) % 3 == 0
    ]
    others += [shape for shape in drawn(seed=6, count=130) if shape[0] >= 20]
    return tuple(dict.fromkeys([*GRID, *between, *others, *drawn(seed=1, count=120)]))


def _majors() -> tuple[Shape, ...]:
    # A leading dimension that is not a multiple of 16 bytes belongs to another signature.
    odd = [(m, n, k) for n, k in ODD_WEIGHTS for m in ODD_ROWS]
    between = [(m, n, k) for n, k in ((2048, 2048), (8192, 2048), (11008, 4096), (5120, 5120)) for m in (32, 192, 768)]
    # Three numbers of rows for the other weights, which gradients of a layer need too.
    others = [
        (m, n, k)
        for at, (n, k) in enumerate((*OTHER_WEIGHTS, *IRREGULAR_WEIGHTS))
        for number, m in enumerate(OTHER_ROWS)
        if (number + at) % 5 == 1
    ]
    return tuple(dict.fromkeys(shape for shape in (*GRID, *odd, *between, *others) if shape[0] % 8 == 0))


def _lines() -> tuple[Shape, ...]:
    weights = (*WEIGHTS, *OTHER_WEIGHTS, *IRREGULAR_WEIGHTS, *EXPERT_WEIGHTS)
    found = [
        (m, n, k)
        for at, (n, k) in enumerate(weights)
        for number, m in enumerate(ODD_LINES)
        if (number + at) % 9 in (0, 4)
    ]
    found += [
        (m, n, k) for at, (n, k) in enumerate(weights) for number, m in enumerate(SHORT_LINES) if (number + at) % 5 == 0
    ]
    return tuple(dict.fromkeys(found))


def _unseen() -> tuple[Shape, ...]:
    weights = ((5632, 2048), (2560, 2560), (8192, 3072), (12288, 4096), (3584, 18944), (7168, 7168))
    rows = (1, 7, 24, 50, 100, 200, 333, 600, 1000, 1300, 2500, 5000)
    return (*((m, n, k) for n, k in weights for m in rows), *drawn(seed=2, count=48))


GRID = _grid()
TUNING = _tuning()
# Tuning problems for other majors than a linear layer's.
MAJORS = _majors()
# Other tuning problems for a column-major A.
LINES = _lines()
# Weights and numbers of rows that were not tuned.
UNSEEN = _unseen()
# Drawn after tables and model were finished: unlike for UNSEEN, no result was known before.
LAST = drawn(seed=2026, count=60)
# N or K that is not a multiple of 16 bytes, and N = 1000 and K = 1000, which are.
MISALIGNED: tuple[Shape, ...] = tuple(
    (m, n, k)
    for n, k in ((4097, 4096), (4096, 4097), (4097, 4097), (1000, 4096), (4096, 1000), (50257, 768), (50257, 4096))
    for m in (16, 128, 1024, 4096)
)
# Weights of 200 MB and more, which each token reads completely.
DECODE: tuple[Shape, ...] = tuple(
    (m, n, k) for n, k in ((28672, 4096), (32000, 4096), (128256, 4096), (57344, 8192)) for m in (1, 8, 16, 32, 64)
)
# A decoder's GEMMs after a norm: queries, keys and values together, and gate and up side by side, or as two weights.
NORMS: tuple[Shape, ...] = tuple(
    (m, n, k) for n, k in ((6144, 4096), (28672, 4096)) for m in (1, 16, 64, 256, 1024, 2048, 4096, 8192)
)
GATES: tuple[Shape, ...] = tuple((m, 14336, 4096) for m in (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192))
# Problems for comparing the ways to compute means of A's rows, and for tuning norms: other weights, each with half of
# these numbers of rows.
_NORM_WEIGHTS = ((2048, 2048), (2560, 2560), (9216, 3072), (5120, 3584), (7168, 5120), (8192, 8192), (16384, 2048))
_NORM_ROWS = (32, 64, 96, 192, 384, 768, 1536, 3072)
MEANS: tuple[Shape, ...] = tuple(
    (m, n, k)
    for at, (n, k) in enumerate(_NORM_WEIGHTS)
    for number, m in enumerate(_NORM_ROWS)
    if (number + at) % 2 == 0
)
# The same for models from 1B to 70B, with numbers of rows that were not tuned either.
UNSEEN_ROWS = (1, 7, 100, 333, 1000, 2500)
UNSEEN_NORMS: tuple[Shape, ...] = tuple(
    (m, n, k) for n, k in ((3072, 2048), (4608, 3584), (13824, 5120), (10240, 8192)) for m in UNSEEN_ROWS
)
UNSEEN_GATES: tuple[Shape, ...] = tuple(
    (m, n, k) for n, k in ((5632, 2048), (8960, 1536), (18944, 3584), (13824, 5120)) for m in UNSEEN_ROWS
)
# The GEMMs after attention and gates in an 8B model's layer, which add to the residual stream.
RESIDUALS: tuple[Shape, ...] = tuple(
    (m, 4096, k) for k in (4096, 14336) for m in (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
)
# Numbers of rows that GEMV kernels serve, with weights of all sizes, and with those of the grid.
FEW_ROWS = (1, 2, 4, 8, 16)
FEW: tuple[Shape, ...] = tuple(
    (m, n, k)
    for n, k in (
        *WEIGHTS,
        (14336, 4096),
        (4096, 11008),
        (128256, 4096),
        *OTHER_WEIGHTS[1:17:2],
        *IRREGULAR_WEIGHTS[::2],
    )
    for m in FEW_ROWS
)
FEW_GRID: tuple[Shape, ...] = tuple((m, n, k) for n, k in WEIGHTS for m in FEW_ROWS)
FEW_GATES: tuple[Shape, ...] = tuple((m, 14336, 4096) for m in FEW_ROWS)
# Rows from a single token to a long prefill, on the weights of an 8B model, and squares.
FP8: tuple[Shape, ...] = tuple(
    dict.fromkeys(
        [
            *((m, n, k) for n, k in WEIGHTS for m in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)),
            *((x, x, x) for x in (512, *SQUARES)),
        ]
    )
)
# What tables of FP8 are tuned on: two numbers of rows for each of the other weights besides.
FP8_TUNING: tuple[Shape, ...] = tuple(
    dict.fromkeys(
        [
            *FP8,
            *(
                (m, n, k)
                for at, (n, k) in enumerate((*OTHER_WEIGHTS, *IRREGULAR_WEIGHTS, *EXPERT_WEIGHTS))
                for number, m in enumerate(TOKENS)
                if (number + 5 * at) % 12 == 0
            ),
            *drawn(seed=8, count=60),
        ]
    )
)
# Gates of FP8 models: columns of each of the two weights.
FP8_GATES: tuple[Shape, ...] = tuple(
    (m, n, k)
    for n, k in ((14336, 4096), (28672, 8192), (6144, 2048))
    for m in (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
)
# GEMMs of an FP8 layer of Llama-3.1-8B's size, with epilogues of their own: those of queries, keys and values, of gate
# and up, and those that add to the residual stream.
_LAYER_ROWS = (1, 16, 64, 256, 1024, 4096)
FP8_QKV: tuple[Shape, ...] = tuple((m, 6144, 4096) for m in _LAYER_ROWS)
FP8_UP: tuple[Shape, ...] = tuple((m, 14336, 4096) for m in _LAYER_ROWS)
FP8_ADDED: tuple[Shape, ...] = tuple((m, 4096, k) for k in (4096, 14336) for m in _LAYER_ROWS)
SETS: dict[str, tuple[Shape, ...]] = {
    "grid": GRID,
    "unseen": UNSEEN,
    "last": LAST,
    "misaligned": MISALIGNED,
    "decode": DECODE,
}
