"""Numbers, intervals and tables as text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from tapernorm.analysis.intervals import Estimate


def number(value: Any, form: str = "") -> str:
    """A number as text, '' for none; what rounds to zero has no sign. Text stays as it is."""
    if value is None:
        return ""
    text = f"{value:{form}}"
    return text if isinstance(value, str) or any(digit in text for digit in "123456789") else text.lstrip("+-")


def interval(found: Estimate | None, form: str, unit: str = "", n: int | None = None) -> str:
    """`+0.50 % (-1.55 to +2.56)`, the mean alone of one value, '' for none; it says so if they are not n."""
    if found is None:
        return ""
    ends = [] if found.low is None else [f"{number(found.low, form)} to {number(found.high, form)}"]
    fewer = [] if n in (None, found.n) else [f"n = {found.n}"]
    beside = "; ".join([*ends, *fewer])
    return number(found.mean, form) + unit + (f" ({beside})" if beside else "")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], n_left: int) -> None:
    """On the console, one line a row, framed on a terminal and plain elsewhere; a heading may have several lines.

    The first `n_left` columns are aligned at the left.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < n_left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # As wide as it needs to be: a cut name or number is of no use.
    Console(width=1000, highlight=False, file=sys.stdout, markup=False).print(table)
