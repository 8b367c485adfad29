"""Tables as plain text."""

from dataclasses import dataclass, field
from itertools import zip_longest


@dataclass
class Table:
    """A table of text cells."""

    columns: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Adds a row; cells may have several lines."""
        lines = zip_longest(*(cell.splitlines() for cell in cells), fillvalue="")
        self.rows += list(lines) or [("",) * len(cells)]


def empty_table(*columns: str, numbers: tuple[str, ...] = ()) -> Table:
    """A table without rows; the columns of ``numbers`` are right-aligned."""
    return Table(columns=columns, numbers=numbers)


def plain_text(table: Table) -> str:
    """The table with columns two spaces apart."""
    rows = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [str.rjust if name in table.numbers else str.ljust for name in table.columns]
    return "\n".join(
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)).rstrip()
        for row in rows
    )
