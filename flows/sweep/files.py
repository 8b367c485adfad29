"""The folder of a sweep, ``<store>/sweeps/<name>/``: what it found so far, written anew after every trial.

- ``trials.csv``: a line per trial: number, state, seconds, parameters, objectives, metrics, cause.
- ``best.yaml``: the overrides that reproduce the best trial; with several objectives ``best-N.yaml`` for each trial N
  of the Pareto front.
- ``plots.html``: Optuna's plots, one page that needs no network.
- ``by-step.md``, ``by-step.csv``: with ``sweep.by_step``, one metric of the last stage, trials side by side.
- ``trials.jsonl``: the memory of these files, from which a continued sweep goes on.
"""

import csv
import io
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flows.declared import split_words
from flows.sweep.best import best_yaml
from flows.sweep.by_step import as_csv, as_markdown, by_step, thinned
from flows.sweep.ledger import Ledger, Row, row_of
from flows.sweep.settings import Sweep
from flows.sweep.space import dimensions, fixed_words
from flows.sweep.trial import Outcome, Trial


class SweepFiles:
    """What a sweep leaves for people; may be told of trials from any thread.

    Args:
        folder: of the sweep.
        params: field -> values, of all that varies.
        words: the options and overrides that all trials share, without those of ``sweep.fixed``.
    """

    def __init__(self, folder: Path, sweep: Sweep, params: Mapping[str, str], words: Sequence[str]) -> None:
        self._folder, self._sweep, self._space = folder, sweep, dimensions(params)
        overrides, self._config_dir = split_words(words)
        self._shared = [*(word for word in overrides if not _is_of_sweep(word)), *fixed_words(sweep)]
        self._ledger = Ledger(folder)
        self._lock = threading.Lock()
        self._written: list[Row] = []

    def add(self, trial: Trial, outcome: Outcome) -> None:
        """Notes the end of a trial, before the proposer hears of it, and writes every file anew, each atomically.

        Args:
            outcome: with its objectives, as ``objective.judged`` gives it.
        """
        with self._lock:
            self._ledger.add(row_of(trial, outcome))
            rows = self._ledger.rows()
            if rows == self._written:  # one more trial of which nothing is new
                return
            self._written = rows
            self._write("trials.csv", _csv(rows, list(self._space), list(self._sweep.objectives)))
            if self._sweep.by_step:
                table = self._by_step(rows)
                self._write("by-step.md", as_markdown(table))
                self._write("by-step.csv", as_csv(table))
            if self._sweep.objectives:
                self._write_best(rows)

    def lines(self) -> list[str]:
        """What the report of the command says: the table by step, the best trials, where all this lies."""
        rows = self._ledger.rows()
        lines = as_markdown(thinned(self._by_step(rows))).splitlines() if self._sweep.by_step else []
        if not self._sweep.objectives:
            return [*lines, f"{self._folder}: trials.csv (no best.yaml: state sweep.objectives to say what is best)"]
        best = sorted(self._folder.glob("best*.yaml"))
        if not best:
            return [*lines, f"{self._folder}: trials.csv (no best.yaml: no trial was complete)"]
        numbers = self._best(rows)
        for row in rows:
            if row.number in numbers:
                values = " ".join(f"{name}={value:.6g}" for name, value in row.values.items())
                params = " ".join(f"{field}={value}" for field, value in row.params.items())
                lines.append(
                    f"{'best' if len(self._sweep.objectives) == 1 else 'front'}: trial {row.number}: {values}  {params}"
                )
        return [*lines, f"{self._folder}: trials.csv, plots.html, {', '.join(path.name for path in best)}"]

    def _by_step(self, rows: Sequence[Row]) -> list[list[str]]:
        assert self._sweep.until and self._sweep.by_step
        return by_step(self._folder.parent.parent, self._sweep.until, self._sweep.by_step, rows)

    def _best(self, rows: Sequence[Row]) -> list[int]:
        from flows.sweep.plots import best_numbers, study_of  # the import of optuna

        return best_numbers(study_of(self._sweep, self._space, rows, self._folder))

    def _write_best(self, rows: Sequence[Row]) -> None:
        from flows.sweep.plots import best_numbers, page, study_of  # the import of optuna

        study = study_of(self._sweep, self._space, rows, self._folder)
        self._write("plots.html", page(study, self._sweep, self._folder.name))
        numbers = best_numbers(study)
        one = len(self._sweep.objectives) == 1
        files = {("best.yaml" if one else f"best-{row.number}.yaml"): row for row in rows if row.number in numbers}
        for name, row in files.items():
            self._write(name, best_yaml(row, self._shared, self._config_dir))
        for path in self._folder.glob("best*.yaml"):
            if path.name not in files:  # off the front since
                path.unlink()

    def _write(self, name: str, text: str) -> None:
        draft = self._folder / f"{name}.tmp"
        draft.write_text(text)
        draft.replace(self._folder / name)


def _is_of_sweep(word: str) -> bool:
    return word.lstrip("+~").partition("=")[0].split(".")[0] == "sweep"


def _csv(rows: Sequence[Row], fields: Sequence[str], objectives: Sequence[str]) -> str:
    metrics = _union(row.metrics for row in rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["number", "state", "seconds", *fields, *objectives, *metrics, "cause"])
    for row in rows:
        numbers = [*(row.values.get(name, "") for name in objectives), *(row.metrics.get(name, "") for name in metrics)]
        params = (row.params[field] for field in fields)
        writer.writerow([row.number, row.state, f"{row.seconds:.1f}", *params, *numbers, row.cause])
    return text.getvalue()


def _union(each: Iterable[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for names in each for name in names))
