"""The files of a sweep, in its folder; they are rewritten after every trial.

- ``trials.csv``: a line per trial: number, state, seconds, parameters, objectives, metrics, cause.
- ``best.yaml``: the overrides that reproduce the best trial; with several objectives ``best-N.yaml`` for each trial N
  of the Pareto front.
- ``plots.html``: Optuna's plots, one page that needs no network.
- ``by-step.md``, ``by-step.csv``: with ``sweep.by_step``, one metric of the last stage, trials side by side.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from flows.declare.sweep import Sweep
from flows.sweep.folder import TrialResult, folder_lock, overrides, short_names, trial_results
from lineage.filesystem.files import append_jsonl, atomic_write
from lineage.markup import markdown_table
from lineage.record.metrics_file import file_with, read_reports
from lineage.secrets import redacted
from lineage.store import Store


class SweepFiles:
    """Writes the files of a sweep; safe with several processes.

    Args:
        shared: the overrides that all trials share.
        config_dir: of the command.
    """

    def __init__(self, folder: Path, sweep: Sweep, shared: Sequence[str], config_dir: Path | None) -> None:
        self.folder, self._sweep, self._shared = folder, sweep, list(map(redacted, shared))
        self._head = {"config_dir": str(config_dir.absolute())} if config_dir else {}

    def add(self, result: TrialResult) -> None:
        """Appends a result, and rewrites all other files atomically."""
        with folder_lock(self.folder):
            if result in trial_results(self.folder) and (self.folder / "trials.csv").exists():  # ended before
                return
            append_jsonl(self.folder / "trials.jsonl", asdict(result))
            results = trial_results(self.folder)
            atomic_write(self.folder / "trials.csv", _csv(self._table(results)))
            if self._sweep.by_step:
                table = self.by_step(results)
                atomic_write(self.folder / "by-step.md", f"{markdown_table(table[0], table[1:], align='right')}\n")
                atomic_write(self.folder / "by-step.csv", _csv(table))
            if self._sweep.objectives:
                self._write_best(results)

    def best(self) -> dict[Path, Mapping[str, object]]:
        """Files of the best trials (with several objectives, of the Pareto front) with their content, by number."""
        with folder_lock(self.folder):
            found = {path: yaml.safe_load(path.read_text()) for path in self.folder.glob("best*.yaml")}
        return dict(sorted(found.items(), key=lambda item: int(item[1]["trial"])))

    def by_step(self, results: Sequence[TrialResult]) -> list[list[str]]:
        """A header, then a line per step: the step, and the metric of every trial that finished the last stage."""
        stage, metric, store = str(self._sweep.until), str(self._sweep.by_step), Store(self.folder.parent.parent)
        series: dict[str, dict[int, float]] = {}
        for each in results:
            if stage in each.fingerprints:
                names = short_names(each.params)
                title = " ".join(f"{names[field]}={value}" for field, value in each.params.items())
                reports = read_reports(file_with(store.entry(stage, each.fingerprints[stage]).metrics, metric))
                series[title] = {each.step: each.metrics[metric] for each in reports if metric in each.metrics}
        steps = sorted({step for each in series.values() for step in each})
        numbers = [[f"{each[step]:.4g}" if step in each else "" for each in series.values()] for step in steps]
        return [["step", *series], *([str(step), *line] for step, line in zip(steps, numbers, strict=True))]

    def _table(self, results: Sequence[TrialResult]) -> list[list[object]]:
        objectives = list(self._sweep.objectives)
        fields = list({name: None for each in results for name in each.params})
        metrics = list({name: None for each in results for name in each.metrics})
        table: list[list[object]] = [["number", "state", "seconds", *fields, *objectives, *metrics, "cause"]]
        for each in results:
            parts = ((fields, each.params), (objectives, each.values), (metrics, each.metrics))
            cells = (found.get(name, "") for names, found in parts for name in names)
            table.append([each.number, each.state, f"{each.seconds:.1f}", *cells, each.cause])
        return table

    def _write_best(self, results: Sequence[TrialResult]) -> None:
        from flows.sweep.plots import best_and_plots  # imports optuna

        best, page = best_and_plots(self._sweep, results, self.folder)
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


def _csv(table: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()
