"""What ``posttrain rehearse`` prints."""

from dataclasses import asdict

from flows.rehearsal.rehearse import Rehearsal
from flows.reports.tables import empty_table, plain_text
from flows.wording import clock

_SLOW = ", since the first steps of a process are slow"
_NUMBERS = ("seconds", "memory GiB", "checkpoint MB", "real run")


def rehearsal_table(rehearsal: Rehearsal) -> str:
    """A line per stage, and what the real run will take."""
    table = empty_table("stage", "exercised", *_NUMBERS, "verdict", numbers=_NUMBERS)
    for row in rehearsal.rows:
        size = None if row.checkpoint_bytes is None else row.checkpoint_bytes / 1e6
        table.add_row(
            row.stage, ", ".join(row.exercised), _number(row.seconds, 1), _number(row.memory_gib, 2), _number(size, 1),
            "" if row.real_seconds is None else f"about {clock(row.real_seconds)}", row.verdict,
        )  # fmt: skip
    return "\n".join([plain_text(table), "", *_end(rehearsal)])


def rehearsal_dict(rehearsal: Rehearsal) -> dict[str, object]:
    """The object that ``rehearse --json`` prints."""
    error = str(rehearsal.error) if rehearsal.error else None
    return {"store": str(rehearsal.place), "stages": [asdict(row) for row in rehearsal.rows], "error": error}


def _end(rehearsal: Rehearsal) -> list[str]:
    known = [row.real_seconds for row in rehearsal.rows if row.real_seconds is not None]
    lines = [f"the real run, one stage after another: about {clock(sum(known))} or less{_SLOW}"] if known else []
    if rehearsal.place.is_dir():
        lines.append(f"kept until the next rehearsal: {rehearsal.place}")
    return lines


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
