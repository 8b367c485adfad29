"""What a store and MLflow say of the runs that were interrupted."""

import json
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from lineage.filesystem.lock import owner
from lineage.record.attempts import attempts
from lineage.store import RESERVED, Store


def digests(store: Path) -> dict[str, str]:
    """Stage -> digest of its finished output."""
    manifests = {name: entry.manifest() for name, entry in Store(store).entries()}
    return {name: manifest.output_digest for name, manifest in manifests.items() if manifest}


def made_again(before: dict[str, float], store: Path) -> list[str]:
    """Stages that were finished and are so no longer, or were made anew."""
    now = starts(store)
    return [f"{name}: was finished, and was made again" for name in before if now.get(name) != before[name]]


def starts(store: Path) -> dict[str, float]:
    """Finished stage -> when the making of it began."""
    manifests = {name: entry.manifest() for name, entry in Store(store).entries()}
    return {name: manifest.provenance.start for name, manifest in manifests.items() if manifest}


@dataclass(frozen=True, kw_only=True)
class Reached:
    """How far an unfinished stage was when it was interrupted: in which attempt, at which step."""

    directory: Path
    attempt: int
    step: int

    def went_on_from(self) -> int:
        """The step of the checkpoint that the next attempt began at; 0: none, or there was no next one."""
        return next((after.step for after in attempts(self.directory)[self.attempt :]), 0)

    def lost(self) -> int:
        """Steps that the next attempt trained again; none where there was no next one."""
        has_next = len(attempts(self.directory)) > self.attempt
        return max(0, self.step - self.went_on_from()) if has_next else 0


def reached(store: Path, stages: Collection[str]) -> list[Reached]:
    """Of every stage that is under way, of those that save: others begin again."""
    return [
        Reached(directory=entry.path, attempt=len(attempts(entry.path)), step=max(_steps(entry.metrics), default=0))
        for name, entry in Store(store).entries()
        if name in stages and entry.manifest() is None
    ]


def doubled(store: Path) -> list[str]:
    """Stages whose reports do not count each step once, in order."""
    return [
        f"{entry.path.parent.name}: steps {steps}"
        for _, entry in Store(store).entries()
        if (steps := _steps(entry.metrics)) != sorted(set(steps))
    ]


def untidy(store: Path) -> list[str]:
    """What a finished store should not hold: scratch, checkpoints, a lock that is held; a dead owner's lock is free."""
    folders = [folder for folder in store.iterdir() if folder.is_dir() and folder.name not in RESERVED]
    entries = [entry for folder in folders for entry in folder.iterdir() if entry.is_dir()]
    found = [entry / name for entry in entries for name in ("work", "checkpoints") if (entry / name).exists()]
    return [str(path) for path in found] + [f"{entry}/lock is held" for entry in entries if owner(entry)]


def misrecorded(folder: Path) -> list[str]:
    """What MLflow has wrong: a run left open, two runs of one stage, a step told twice."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()], max_results=1000)
    found = [f"{run.info.run_name} is left RUNNING" for run in runs if run.info.status == "RUNNING"]
    stages = [run.data.tags["posttrain.stage"] for run in runs if "posttrain.stage" in run.data.tags]
    found += [f"{stages.count(name)} runs of {name}" for name in sorted(set(stages)) if stages.count(name) > 1]
    for run in runs:
        for metric in run.data.metrics:
            steps = [each.step for each in client.get_metric_history(run.info.run_id, metric)]
            if len(steps) != len(set(steps)):
                found.append(f"{run.info.run_name}: a step of {metric} is told twice")
    return found


def _steps(metrics: Path) -> list[int]:
    if not metrics.exists():
        return []
    steps = []
    for line in metrics.read_text().splitlines():
        try:
            steps.append(int(json.loads(line)["step"]))
        except ValueError:  # cut by a kill
            continue
    return steps
