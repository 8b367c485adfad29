"""Rows that cannot be used: counted, shown, and all of them written to a file that a refusal leaves behind."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lineage.errors import DataError
from tasks.data.preparing.staging import Staging

REJECTS = "rejects.jsonl"
_MAX_SHOWN = 20  # in one message


@dataclass(frozen=True, kw_only=True)
class Rejects:
    """The bad rows of the slices that were asked for.

    Args:
        reasons: slot -> reason -> rows.
        shown: the first of them, ``where: problem``.
        file: ``rejects.jsonl``, with where, reason, problem and the beginning of each; None: there are none.
    """

    reasons: Mapping[str, Counter[str]]
    shown: list[str]
    file: Path | None

    @property
    def name(self) -> str | None:
        """Of the file."""
        return self.file.name if self.file else None

    @property
    def count(self) -> int:
        return sum(reasons.total() for reasons in self.reasons.values())

    def refusal(self, num_rows: int) -> DataError:
        """What is said where they are too many, of so many rows in all."""
        more = [f"and {self.count - _MAX_SHOWN} more"] if self.count > _MAX_SHOWN else []
        listed = "\n  ".join([f"{self.count} of {num_rows} rows cannot be used:", *self.shown, *more])
        return DataError(
            f"{listed}\nall of them are in {self.file}; mend them, or leave them out with max_bad_rows={self.count}"
        )


def settle_rejects(staging: Staging, directory: Path) -> Rejects:
    """Writes those of the slices that were asked for beside the rows.

    The stage's ``output/`` stays when a stage refuses: until the same stage runs again, which writes them anew.
    """
    slots = list(staging.sources)
    reasons: dict[str, Counter[str]] = {slot: Counter() for slot in slots}
    shown: list[str] = []
    file = directory / REJECTS
    with staging.bad.open() as bad, file.open("w") as rejects:
        for line in bad:
            fields = json.loads(line)
            slot = slots[fields.pop("slot")]
            if not staging.sources[slot].start <= fields.pop("place") < staging.sources[slot].stop:
                continue
            rejects.write(json.dumps(fields) + "\n")
            reasons[slot][fields["reason"]] += 1
            if len(shown) < _MAX_SHOWN:
                shown.append(f"{fields['where']}: {fields['problem']}")
    if not shown:
        file.unlink()
    return Rejects(reasons=reasons, shown=shown, file=file if shown else None)
