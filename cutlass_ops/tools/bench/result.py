"""What ``co.bench`` returns: a comparison that shows itself as text, JSON and HTML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cutlass_ops.base import tabular
from cutlass_ops.base.units import counted
from cutlass_ops.declare.chips import CHIPS
from cutlass_ops.tools.bench import page
from cutlass_ops.tools.bench.numbers import METHODS, OURS, Numbers


@dataclass(frozen=True, repr=False)
class Benchmark(Numbers):
    """A comparison of one op, returned by :func:`cutlass_ops.bench`. A notebook displays it as tables and a plot.

    Attributes
    ----------
    op, dtype, a, b : str
        The op, the dtype of A and B, and their majors.
    environment : mapping
        Chip, date, versions of driver, PyTorch and library.
    rows : tuple of Row
        The problems.

    Examples
    --------
    >>> found = co.bench("gemm_bias_relu", (4096, 4096, 4096))  # doctest: +SKIP
    >>> found.rows[0].times["graph"]["cublaslt"].ratio  # doctest: +SKIP
    1.04
    """

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as plain values."""
        means = {
            method: {n: round(m, 4) for n in self.ways if n != OURS and (m := self.geomean(n, method)) is not None}
            for method in METHODS
        }
        return {
            "op": self.op,
            "dtype": self.dtype,
            "a": self.a,
            "b": self.b,
            **self.environment,
            "geomean": means,
            "rows": [row.to_json() for row in self.rows],
        }

    def lines(self, styled: bool | None = None) -> list[str]:
        """Return the tables as text."""
        chip = self.environment.get("chip", "")
        lines = [
            f"{self.op}, {self.dtype}, A {self.a}, B {self.b}, on {chip}. Columns of others are their time over ours."
        ]
        for method, says in METHODS.items():
            lines += ["", f"{says}:", *tabular.table(*self.table(method), styled=styled)]
        missing = {f"{name}: {why}" for row in self.rows for name, why in row.missing.items()}
        return [*lines, *([""] if missing else []), *(f"not timed: {each}" for each in sorted(missing))]

    def html(self) -> str:
        """Return a page that needs no other file: tables, ratios and the roofline."""
        return page.whole(self, CHIPS.get(str(self.environment.get("chip"))))

    def _repr_html_(self) -> str:
        return page.body(self, CHIPS.get(str(self.environment.get("chip"))))

    def __repr__(self) -> str:
        means = ", ".join(f"{n} {m:.3f}" for n in self.ways if n != OURS and (m := self.geomean(n)) is not None)
        return f"<benchmark of {self.op} at {counted(len(self.rows), 'problem')}; others over ours: {means or 'none'}>"

    def __str__(self) -> str:
        return "\n".join(self.lines(styled=False))
