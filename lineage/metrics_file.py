"""``metrics.jsonl`` of a stage after its attempts: cut to the step that is gone on from, and read for plots."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path


def cut_reports(path: Path, step: int) -> None:
    """Takes away the reports of steps that are trained again; a new file, so that who follows it sees that."""
    if not path.exists():
        return
    draft = path.with_suffix(".tmp")
    with draft.open("w") as file:
        for line in path.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill may have cut a line
                if json.loads(line)["step"] <= step:
                    file.write(line + "\n")
    draft.replace(path)


def last_step(path: Path) -> int:
    """Of the last report; 0: there is none."""
    if path.exists():
        for line in reversed(path.read_text().splitlines()):
            with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill may have cut a line
                return int(json.loads(line)["step"])
    return 0


def flat_reports(path: Path) -> Iterator[dict[str, object]]:
    """Every report, its metrics beside its step and time."""
    if not path.exists():
        return
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):  # a kill may have cut a line
            report = json.loads(line)
            yield {"step": report["step"], "time": report["time"], **report["metrics"]}
