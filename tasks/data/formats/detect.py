"""Tells the format of a source from its first rows, says why, and refuses where two would do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lineage.errors import DataError
from tasks.data.formats.format import CanonicalRow, Fields, Format
from tasks.data.formats.known import FORMATS


@dataclass(frozen=True, kw_only=True)
class Detected:
    """How the rows of one source are read. Can be pickled: it is looked up by name where it is used.

    Args:
        evidence: why, for the report.
        columns: the user's names -> the format's.
    """

    name: str
    evidence: str
    columns: Mapping[str, str]

    @property
    def format(self) -> Format:
        return next(each for each in FORMATS if each.name == self.name)

    def convert(self, fields: Fields) -> CanonicalRow:
        """A row in the form of its kind.

        Raises:
            BadRowError: what is wrong with it.
        """
        return self.format.convert({self.columns.get(name, name): value for name, value in fields.items()})


def detect(
    sample: Sequence[Fields], place: str, *, columns: Mapping[str, str] | None = None, stated: str | None = None
) -> Detected:
    """The format of a source.

    Args:
        sample: its first rows.
        place: its path, for messages.
        columns: renames of the user.
        stated: the name of the format, where the user says it.

    Raises:
        DataError: no format fits, or several do that explain the columns as well; both name the candidates.
    """
    renamed = [{(columns or {}).get(name, name): value for name, value in fields.items()} for fields in sample]
    for each in FORMATS:
        found = [each.recognize(fields) for fields in renamed]
        if each.name == stated or any(found):
            words = next((evidence.words for evidence in found if evidence), "stated as format=")
            return Detected(name=each.name, evidence=words, columns=columns or {})
    raise DataError(f"{place}: no known format")
