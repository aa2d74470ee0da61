"""Tables on the console."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any


def print_table(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    formats: Mapping[str, str],
    n_left: int,
    headings: Mapping[str, str] | None = None,
) -> None:
    """One line per row, framed on a terminal and plain elsewhere; None or no value is an empty cell.

    formats: how a column's values are written, as for str.format. The first `n_left` columns are aligned at the left.
    headings: what stands above a column, where it is not the column's name; it may have several lines.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD if sys.stdout.isatty() else None)
    for place, column in enumerate(columns):
        heading = (headings or {}).get(column, column)
        table.add_column(heading, justify="left" if place < n_left else "right", no_wrap=True)
    for row in rows:
        cells = {column: row.get(column) for column in columns}
        table.add_row(*("" if cell is None else formats.get(name, "{}").format(cell) for name, cell in cells.items()))
    # As wide as it needs to be: a cut name or number is of no use.
    Console(width=1000, highlight=False, file=sys.stdout, markup=False).print(table)
