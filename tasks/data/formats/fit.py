"""How well a format explains the first rows of a source."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.format import Fields, Format


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The first rows of a source.

    Args:
        columns: those that some row has a value of: tables have columns that are null throughout.
        said: the rows with these columns alone.
    """

    rows: Sequence[Fields]
    columns: frozenset[str]
    said: Sequence[Fields]

    @staticmethod
    def of(rows: Sequence[Fields]) -> "Sample":
        columns = frozenset(name for fields in rows for name, value in fields.items() if value is not None)
        said = [{name: value for name, value in fields.items() if name in columns} for fields in rows]
        return Sample(rows=rows, columns=columns, said=said)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The rows of a sample that are of a format, by their index, and the columns that make them so."""

    format: Format
    rows: frozenset[int]
    columns: frozenset[str]
    words: str

    @staticmethod
    def of(format: Format, sample: Sample, *, stated: bool) -> "Fit":
        """How a format fits; one that the user states may lose columns."""
        found = {
            index: names
            for index, (fields, said) in enumerate(zip(sample.rows, sample.said, strict=True))
            if (stated or not format.lost(fields)) and (names := format.recognize(said))
        }
        most = Counter(found.values()).most_common(1)
        return Fit(
            format=format, rows=frozenset(found), columns=frozenset().union(*found.values()),
            words=f"has {' and '.join(most[0][0])}" if most else "",
        )  # fmt: skip

    def problem(self, sample: Sample) -> str:
        """What is wrong with the first row that is not of the format."""
        other = next(fields for index, fields in enumerate(sample.rows) if index not in self.rows)
        if lost := self.format.lost(other):
            return f"it does not read {', '.join(lost)}"
        try:
            self.format.convert(other)
        except BadRowError as error:
            return error.found
        return "it is null in all rows looked at"
