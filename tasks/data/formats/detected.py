"""How the rows of one source are read, once its format is known."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.format import REST, CanonicalRow, Fields, Format
from tasks.data.formats.known import BY_NAME
from tasks.data.formats.renames import rename
from tasks.data.formats.turns import images_are_not_read
from tasks.data.formats.values import is_nothing

_MEDIA = frozenset({"images", "image", "videos", "video", "audios", "audio"})


@dataclass(frozen=True, kw_only=True)
class Detected:
    """How the rows of one source are read. Can be pickled: the format is looked up by name where it is used.

    Args:
        evidence: why, and how many of the rows that were looked at say so, for the report.
        columns: the format's names -> the user's.
        seen: the format's columns that the source has.
        stated: the user says the format, and with it that what it does not read may be lost.
    """

    name: str
    evidence: str
    columns: Mapping[str, str]
    seen: frozenset[str]
    stated: bool

    @cached_property
    def format(self) -> Format:
        return BY_NAME[self.name]

    @property
    def mapping(self) -> dict[str, str]:
        """The user's columns -> what they become, for the report."""
        used = [name for name in self.format.mapping if name in self.seen or name == REST]
        return {self.columns.get(name, name): self.format.mapping[name] for name in used}

    def read_columns(self, fields: Fields) -> set[str]:
        """The columns of a row that are read: what else it has is ignored."""
        return set(fields) if REST in self.format.mapping else fields.keys() & self._read

    @cached_property
    def _read(self) -> frozenset[str]:
        kept = self.format.mapping.keys() - set(self.columns.values())
        return frozenset(kept | {theirs for ours, theirs in self.columns.items() if ours in self.format.mapping})

    def convert(self, fields: Fields) -> CanonicalRow:
        """A row in the form of its kind.

        Raises:
            BadRowError: what is wrong with it.
        """
        if self.columns:
            fields = rename(fields, self.columns)
        if not _MEDIA.isdisjoint(fields) and self.name != "text":
            for name in sorted(_MEDIA & fields.keys()):
                if not is_nothing(fields[name]):
                    raise images_are_not_read(f"the row has {name}")
        lost = () if self.stated else self.format.lost(fields)
        for name in lost:
            if fields[name] is not None:
                raise BadRowError(
                    f"the row has {name}, which {self.name} does not read", f"rows of {self.name}",
                    f"remove the row, or leave {name} unread with format={self.name}", reason="unread answer or label",
                )  # fmt: skip
        return self.format.convert(fields)
