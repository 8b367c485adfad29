"""What ``posttrain gc`` says: what goes, why, and how much room that gives."""

from collections.abc import Sequence
from pathlib import Path

from rich.filesize import decimal
from rich.text import Text

from flows.reports.tables import empty_table, plain_text
from flows.wording import counted, printable_text
from lineage.garbage import Garbage, size


def gc_dict(
    store: Path, garbage: Sequence[Garbage], young: Sequence[Garbage], kept: dict[str, str]
) -> dict[str, object]:
    """The object that ``gc --json`` prints, but for what became of it."""
    whole = size(garbage)
    return {
        "store": str(store), "garbage": [_row(each) for each in garbage], "bytes": whole.num_bytes,
        "freed_bytes": whole.freed, "too_young": [_row(each) for each in young], "needed": kept,
    }  # fmt: skip


def gc_text(store: Path, garbage: Sequence[Garbage], young: Sequence[Garbage], notes: Sequence[str]) -> str:
    """The same for people."""
    lines = list(notes)
    if garbage:
        table = empty_table("what", "size", "why", numbers=("size",))
        for each in garbage:
            table.add_row(Text(each.what), decimal(size([each]).num_bytes), Text(each.why))
        lines.append(plain_text(table))
    whole = size(garbage)
    if whole.freed < whole.num_bytes:
        lines.append(f"{decimal(whole.num_bytes - whole.freed)} stay on the disk: hard links from elsewhere share them")
    if young:
        spared = f"{counted(len(young), 'thing')} ({decimal(size(young).num_bytes)}) used lately"
        lines.append(f"{spared} stay: {', '.join(each.what for each in young[:5])}; --older-than 0 takes them too")
    lines.append(
        f"{counted(len(garbage), 'thing')} to free in {store}: {decimal(whole.freed)}"
        if garbage
        else f"nothing to free in {store}"
    )
    return printable_text("\n".join(lines))


def _row(garbage: Garbage) -> dict[str, object]:
    room = size([garbage])
    return {
        "what": garbage.what, "why": garbage.why, "paths": [str(path) for path in garbage.paths],
        "fingerprint": garbage.fingerprint, "bytes": room.num_bytes, "freed_bytes": room.freed,
        "last_used": garbage.last_used,
    }  # fmt: skip
