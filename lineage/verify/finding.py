"""What a check of the record finds."""

from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """How the record and what it records disagree."""

    MISSING = "missing"
    CHANGED = "changed"
    ORPHANED = "orphaned"  # a mirror names what the store does not hold
    NOTE = "note"  # worth knowing, and no fault: an unfinished stage, data that moved on


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One of them.

    Args:
        what: the artifact, link or file.
        why: what was found, and what was expected.
        mend: what to do.
    """

    fault: Fault
    what: str
    why: str
    mend: str
