"""Tables as plain text."""

import io

from rich.console import Console
from rich.table import Table

_WIDTH = 160  # of a table that goes to a file or a pipe


def empty_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without rows; the columns of ``numbers`` are aligned at their right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left", overflow="fold")
    return table


def plain_text(table: Table) -> str:
    """As wide as it needs."""
    stream = io.StringIO()
    Console(file=stream, width=_WIDTH, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())
