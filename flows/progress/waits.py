"""Which stages of a run have not begun, and for what they wait."""

from flows.progress.run_notes import RunNote


def is_to_begin(title: str, note: RunNote) -> bool:
    """Whether a run has yet to begin a stage, of a sweep also one of a trial that is yet to come."""
    if title in note.stages:
        return note.stages[title].state == "pending"
    name, _, number = title.partition("#")
    sweep = note.sweep
    if sweep is None or name not in sweep.own or not number.isdecimal():
        return False
    return sweep.trials is None or int(number) < sweep.trials


def waits_for(title: str, note: RunNote) -> str:
    """For what a stage of a run under way waits; empty: for nothing, or that is not known yet."""
    stage = note.stages.get(title)
    if stage is None or stage.state not in ("pending", "waiting"):
        return ""
    if stage.state == "waiting":
        return stage.reason
    before = [name for name in stage.after if not _is_made(name, note)]
    if before:
        return ", ".join(before)
    if note.in_flow and note.links.flow_run is None:
        return "Prefect"
    return "a slot" if note.sweep else "its turn"


def _is_made(name: str, note: RunNote) -> bool:
    states = (stage.state for title, stage in note.stages.items() if title.partition("#")[0] == name)
    return any(state in ("done", "reused") for state in states)
