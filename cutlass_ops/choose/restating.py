"""Tables of one signature restated for another one with other traits."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from cutlass_ops.base.hashed import Itself
from cutlass_ops.choose.points import Recorded
from cutlass_ops.choose.pool import Pool
from cutlass_ops.choose.tables import Table
from cutlass_ops.declare.config import Config
from cutlass_ops.declare.device import Device
from cutlass_ops.kinds.arrays import Extents, Floats, Places
from cutlass_ops.kinds.traits import Traits

# A table takes megabytes, and one who tunes makes new ones again and again.
_KEPT = 32


@lru_cache(maxsize=_KEPT)
def restated(
    known: Itself[Table], mine: Traits, forms: tuple[tuple[Config, Config | None], ...], device: Device
) -> Table:
    """Convert a table to a signature's traits, with the form that takes each kernel's place, if any.

    Two weights of N columns count as one of 2N, and elements of half the size as a K twice as long. The model adds the
    time for what these traits have besides the GEMM.
    """
    table, of = known.value, dict(forms)
    before, theirs = table.columns, Traits.of(table.signature)
    weights = mine.weights // theirs.weights
    _, n, k, _ = before.problems.T
    line = k * theirs.element_bytes
    whole = np.asarray((n % weights == 0) & (line % mine.element_bytes == 0))
    problems = before.problems.copy()
    problems[:, 1], problems[:, 2] = n // weights, line // mine.element_bytes

    taken = [of.get(config) for config in before.configs]
    configs = tuple(dict.fromkeys(config for config in taken if config is not None))
    place = {config: at for at, config in enumerate(configs)}
    form = np.array([-1 if config is None else place[config] for config in taken], np.int64)
    which = whole[before.points] & (form[before.kernels] >= 0)
    points, kernels = before.points[which], form[before.kernels[which]]
    pools = Pool(configs, theirs), Pool(configs, mine)
    times = before.raced[which] + _later(pools, kernels, (before.problems[points], problems[points]), device)

    part = replace(before, configs=configs, problems=problems).part(which)
    order = np.lexsort((times, points))  # within each point
    times = times[order]
    behind = times / times[part.starts[:-1]][part.points] - 1
    columns = replace(part, kernels=kernels[order], places=part.places[order], microseconds=times, behind=behind)
    kept = tuple(found for config in table.kernels if (found := of[config]) is not None)
    return replace(table, points=Recorded(columns, [()] * len(columns.problems)), kernels=kept)


def _later(pools: tuple[Pool, Pool], kernels: Places, problems: tuple[Places, Places], device: Device) -> Floats:
    """Return the extra microseconds of kernels, besides the GEMM, at the second pool's problems over the first's."""
    before, after = (
        pool.besides_of(kernels, Extents.of_array(each), device) for pool, each in zip(pools, problems, strict=True)
    )
    return np.asarray(after - before)
