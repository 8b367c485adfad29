"""What ended the attempts of a run before, which cannot say so in its own."""

from pathlib import Path

from flows.progress.run_notes import RunNote, StageNote, latest
from flows.progress.stage_progress import Progress
from lineage.attempts import attempts
from lineage.store import Entry


def ended_before(store: Path, entry: Entry) -> str:
    """What ended the last attempt at an artifact; empty: there was none, or no note tells of it.

    Args:
        store: where runs leave their notes.
        entry: with the reports of that attempt.
    """
    for note in latest(store) if attempts(entry.path) else ():
        for stage in note.stages.values():
            if _is_of(stage, entry) and not note.is_live(store):
                return _cause(note, stage, entry)
    return ""


def _is_of(stage: StageNote, entry: Entry) -> bool:
    """Another host may have the store elsewhere."""
    return stage.state in ("running", "failed") and Path(stage.directory).parts[-2:] == entry.path.parts[-2:]


def _cause(note: RunNote, stage: StageNote, entry: Entry) -> str:
    if stage.state == "failed":
        return stage.reason.partition("\n")[0]
    reached = Progress(path=entry.metrics, total=None)
    reached.refresh()
    how = (
        f"driver on {note.driver.host} was killed" if note.outcome is None else f"run on {note.driver.host} was stopped"
    )
    return f"its {how}{f' at step {reached.step}' if reached.step else ''}"
