"""The folder of a sweep, ``<store>/sweeps/<name>/``; its files are rewritten after every trial.

- ``trials.csv``: a line per trial: number, state, seconds, parameters, objectives, metrics, cause.
- ``best.yaml``: the overrides that reproduce the best trial; with several objectives ``best-N.yaml`` for each trial N
  of the Pareto front.
- ``plots.html``: Optuna's plots, one page that needs no network.
- ``by-step.md``, ``by-step.csv``: with ``sweep.by_step``, one metric of the last stage, trials side by side.
- ``trials.jsonl``: the results of the trials, from which these files are written; ``sweep.json``: what is tried.
"""

import csv
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Literal

import yaml
from filelock import FileLock

from flows.declare.sweep import Sweep
from lineage.errors import ConfigError
from lineage.files import append_jsonl, atomic_write, read_jsonl
from lineage.markup import markdown_table
from lineage.metrics_file import read_reports
from lineage.secrets import redacted
from lineage.store import Store

FOLDER = "sweeps"  # in the store

TrialState = Literal["complete", "pruned", "failed"]
_MAX_STEPS = 20  # rows of the table by step in a terminal


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """The end of a trial: a line of ``trials.jsonl``.

    Args:
        params: field -> value as an override writes it.
        seconds: of its own finished stages, whichever run produced them; waiting excluded.
        cause: why it failed or was pruned.
        values: objective -> value; empty unless complete.
        metrics: ``STAGE/METRIC`` -> number, of every finished stage.
        fingerprints: of every finished stage.
    """

    number: int
    params: Mapping[str, str]
    state: TrialState
    seconds: float = 0.0
    cause: str = ""
    values: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)


def trial_results(folder: Path) -> list[TrialResult]:
    """Results of all ended trials by number; of repeated numbers the last."""
    found = {result.number: result for result in read_jsonl(folder / "trials.jsonl", TrialResult)}
    return [found[number] for number in sorted(found)]


def sweep_folder(
    store: Path, pipeline: str, sweep: Sweep, params: Mapping[str, str], stages: Iterable[tuple[str, str]]
) -> Path:
    """Creates the folder, or finds that of the same sweep.

    Args:
        params: field -> values, of all fields that vary.
        stages: names and fingerprints of the trials' stages (for a sampler, of some): other data or settings are
            another sweep, other resources are not.

    Raises:
        ConfigError: a sweep of that name tries something else.
    """
    settings = asdict(sweep)
    tried = {
        "pipeline": pipeline, "params": dict(params),
        **{key: value for key, value in settings.items() if key in ("objectives", "sampler", "pruning")},
        "stages": sorted(f"{name}/{fingerprint}" for name, fingerprint in set(stages)),
    }  # fmt: skip
    digest = sha256(json.dumps(tried, sort_keys=True).encode()).hexdigest()
    folder = store / FOLDER / (sweep.name or f"{pipeline}-{digest[:8]}")
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder):
        path = folder / "sweep.json"
        if not path.exists():
            atomic_write(path, json.dumps(tried, indent=2) + "\n")
        before = json.loads(path.read_text())
    differing = next((key for key in tried if before.get(key) != tried[key]), None)
    if differing:
        values = f"{differing}={json.dumps(before.get(differing))}, this one has {json.dumps(tried[differing])}"
        what = "on other data or with other settings of its stages" if differing == "stages" else f"with {values}"
        raise ConfigError(
            f"sweep.name={sweep.name}: {folder} holds a sweep {what}; choose another sweep.name, or remove that folder"
        )
    return folder


class SweepFiles:
    """Writes the files of a sweep; safe with several processes.

    Args:
        shared: the overrides that all trials share.
        config_dir: of the command.
        judge: returns the numbers of the best trials and the page of plots.
    """

    def __init__(
        self, folder: Path, sweep: Sweep, shared: Sequence[str], config_dir: Path | None,
        judge: Callable[[Sequence[TrialResult], Path], tuple[list[int], str]],
    ) -> None:  # fmt: skip
        self.folder, self._sweep, self._judge = folder, sweep, judge
        own = {"config_dir": str(config_dir.absolute())} if config_dir else {}
        self._head, self._shared = own, list(map(redacted, shared))

    def add(self, result: TrialResult) -> None:
        """Appends a result, and rewrites all other files atomically."""
        with _lock(self.folder):
            results = trial_results(self.folder)
            if result in results and (self.folder / "trials.csv").exists():  # a finished trial, read again
                return
            append_jsonl(self.folder / "trials.jsonl", asdict(result))
            results = trial_results(self.folder)
            atomic_write(self.folder / "trials.csv", _csv(self._table(results)))
            if self._sweep.by_step:
                table = self._by_step(results)
                atomic_write(self.folder / "by-step.md", _markdown(table))
                atomic_write(self.folder / "by-step.csv", _csv(table))
            if self._sweep.objectives:
                self._write_best(results)

    def best(self) -> dict[Path, Mapping[str, object]]:
        """Files of the best trials (with several objectives, of the Pareto front) with their content, by number."""
        with _lock(self.folder):
            found = {path: yaml.safe_load(path.read_text()) for path in self.folder.glob("best*.yaml")}
        return dict(sorted(found.items(), key=lambda item: int(item[1]["trial"])))

    def lines(self) -> list[str]:
        """Lines for the report: the table by step, the best trials, the files."""
        results, best = trial_results(self.folder), self.best()
        lines = []
        if self._sweep.by_step:
            header, *steps = self._by_step(results)
            every = -(-len(steps) // _MAX_STEPS) or 1
            lines = _markdown([header, *reversed(steps[::-1][::every])]).splitlines()
        if not best:
            why = "no trial was complete" if self._sweep.objectives else "set sweep.objectives to define the best trial"
            return [*lines, f"{self.folder}: trials.csv (no best.yaml: {why})"]
        word = "best" if len(self._sweep.objectives) == 1 else "front"
        for each in results:
            if each.number in [held["trial"] for held in best.values()]:
                values = " ".join(f"{name}={value:.6g}" for name, value in each.values.items())
                lines.append(f"{word}: trial {each.number}: {values}  {' '.join(overrides(each.params))}")
        return [*lines, f"{self.folder}: trials.csv, plots.html, {', '.join(path.name for path in best)}"]

    def _table(self, results: Sequence[TrialResult]) -> list[list[object]]:
        objectives = list(self._sweep.objectives)
        metrics = list(dict.fromkeys(name for each in results for name in each.metrics))
        fields = list(dict.fromkeys(name for each in results for name in each.params))
        table: list[list[object]] = [["number", "state", "seconds", *fields, *objectives, *metrics, "cause"]]
        for each in results:
            numbers = [*(each.values.get(name, "") for name in objectives), *(each.metrics.get(m, "") for m in metrics)]
            params = [each.params.get(name, "") for name in fields]
            table.append([each.number, each.state, f"{each.seconds:.1f}", *params, *numbers, each.cause])
        return table

    def _by_step(self, results: Sequence[TrialResult]) -> list[list[str]]:
        """A header, then a line per step: the step, and the metric of every trial that finished the stage."""
        stage, metric, store = str(self._sweep.until), str(self._sweep.by_step), Store(self.folder.parent.parent)
        series: dict[str, dict[int, float]] = {}
        for each in results:
            if stage in each.fingerprints:
                names = short_names(each.params)
                title = " ".join(f"{names[field]}={value}" for field, value in each.params.items())
                reports = read_reports(store.entry(stage, each.fingerprints[stage]).metrics)
                series[title] = {each.step: each.metrics[metric] for each in reports if metric in each.metrics}
        steps = sorted({step for each in series.values() for step in each})
        lines = [
            [str(step), *(f"{each[step]:.4g}" if step in each else "" for each in series.values())] for step in steps
        ]
        return [["step", *series], *lines]

    def _write_best(self, results: Sequence[TrialResult]) -> None:
        best, page = self._judge(results, self.folder)
        atomic_write(self.folder / "plots.html", page)
        is_one = len(self._sweep.objectives) == 1
        files = {"best.yaml" if is_one else f"best-{each.number}.yaml": each for each in results if each.number in best}
        for name, each in files.items():
            held = {
                "trial": each.number, "values": dict(each.values), **self._head,
                "overrides": [*self._shared, *overrides(each.params)],
            }  # fmt: skip
            text = yaml.safe_dump(held, sort_keys=False, width=10_000)
            atomic_write(self.folder / name, f"# posttrain run --overrides-from THIS_FILE\n{text}")
        for path in self.folder.glob("best*.yaml"):
            if path.name not in files:  # no longer on the front
                path.unlink()


def read_best(path: Path) -> tuple[list[str], Path | None]:
    """The overrides and ``--config-dir`` in a ``best.yaml``.

    Raises:
        ConfigError: it cannot be read, or has another content.
    """
    try:
        held = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--overrides-from {path}: cannot be read ({error}); give the best.yaml of a sweep"
        ) from error
    found = held.get("overrides") if isinstance(held, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise ConfigError(
            f"--overrides-from {path}: holds no list of overrides; give the best.yaml of a sweep, "
            "or YAML of the form: overrides: [key=value, ...]"
        )
    config_dir = held.get("config_dir")
    return found, Path(str(config_dir)) if config_dir else None


def overrides(params: Mapping[str, str]) -> list[str]:
    """Parameters as overrides."""
    return [f"{field}={value}" for field, value in params.items()]


def short_names(fields: Iterable[str]) -> dict[str, str]:
    """Field -> its shortest unique suffix, for headings."""
    endings = {
        field: [field.split(".", start)[-1] for start in reversed(range(field.count(".") + 1))] for field in fields
    }
    counts = Counter(ending for each in endings.values() for ending in each)
    return {field: next((each for each in found if counts[each] == 1), field) for field, found in endings.items()}


def _lock(folder: Path) -> FileLock:
    return FileLock(folder / "lock")


def _csv(table: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()


def _markdown(table: Sequence[Sequence[str]]) -> str:
    return markdown_table(table[0], table[1:], align="right") + "\n"
