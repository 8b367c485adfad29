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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import yaml

from flows.declare.compose import field_of
from flows.declare.sweep import Sweep
from flows.declared import split_words
from flows.sweep.by_step import as_markdown, by_step, thinned
from flows.sweep.dimension import Dimension
from flows.sweep.folder import Ledger, Row, folder_lock, row_of
from flows.sweep.space import fixed_words
from flows.sweep.trial import Outcome, Trial
from lineage.errors import ConfigError
from lineage.files import atomic_write
from lineage.secrets import redacted


class SweepFiles:
    """What a sweep leaves for people.

    Args:
        folder: of the sweep; other processes may be at it too.
        words: the options and overrides that all trials share, without those of ``sweep.fixed``.
    """

    def __init__(self, folder: Path, sweep: Sweep, space: Mapping[str, Dimension], words: Sequence[str]) -> None:
        self._folder, self._sweep, self._space = folder, sweep, space
        overrides, self._config_dir = split_words(words)
        own = [word for word in overrides if field_of(word).split(".")[0] != "sweep"]
        self._shared = list(map(redacted, [*own, *fixed_words(sweep)]))
        self._ledger = Ledger(folder)
        self._written: list[Row] = []

    def add(self, trial: Trial, outcome: Outcome) -> None:
        """Notes the end of a trial, before the proposer hears of it, and writes every file anew, each atomically.

        Args:
            outcome: with its objectives, as ``objective.judged`` gives it.
        """
        with folder_lock(self._folder):
            self._ledger.add(row_of(trial, outcome))
            rows = self._ledger.rows()
            if rows == self._written:  # one more trial of which nothing is new
                return
            self._written = rows
            self._write("trials.csv", _csv(_table(rows, list(self._space), list(self._sweep.objectives))))
            if self._sweep.by_step:
                table = self._by_step(rows)
                self._write("by-step.md", as_markdown(table))
                self._write("by-step.csv", _csv(table))
            if self._sweep.objectives:
                self._write_best(rows)

    def rows(self) -> list[Row]:
        """Every trial that ended, of this and of earlier runs of the sweep."""
        with folder_lock(self._folder):
            return self._ledger.rows()

    def best(self) -> dict[Path, Mapping[str, object]]:
        """The files of the best trials, in the order of these, and what they hold; of several objectives, the front."""
        with folder_lock(self._folder):
            found = {path: yaml.safe_load(path.read_text()) for path in self._folder.glob("best*.yaml")}
        return dict(sorted(found.items(), key=lambda item: int(item[1]["trial"])))

    def lines(self) -> list[str]:
        """What the report of the command says: the table by step, the best trials, where all this lies."""
        lines = as_markdown(thinned(self._by_step(self.rows()))).splitlines() if self._sweep.by_step else []
        if not self._sweep.objectives:
            return [*lines, f"{self._folder}: trials.csv (no best.yaml: state sweep.objectives to say what is best)"]
        best = self.best()
        if not best:
            return [*lines, f"{self._folder}: trials.csv (no best.yaml: no trial was complete)"]
        numbers = [told["trial"] for told in best.values()]
        for row in self.rows():
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

    def _write_best(self, rows: Sequence[Row]) -> None:
        from flows.sweep.plots import best_numbers, page, study_of  # the import of optuna

        study = study_of(self._sweep, self._space, rows, self._folder)
        self._write("plots.html", page(study, self._sweep, self._folder.name))
        numbers = best_numbers(study)
        one = len(self._sweep.objectives) == 1
        files = {("best.yaml" if one else f"best-{row.number}.yaml"): row for row in rows if row.number in numbers}
        for name, row in files.items():
            self._write(name, _best_yaml(row, self._shared, self._config_dir))
        for path in self._folder.glob("best*.yaml"):
            if path.name not in files:  # off the front since
                path.unlink()

    def _write(self, name: str, text: str) -> None:
        atomic_write(self._folder / name, text)


def read_best(path: Path) -> tuple[list[str], Path | None]:
    """The overrides of a ``best.yaml``, and the folder of the groups that they were composed with.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    try:
        told = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--overrides-from {path}: cannot be read ({error}); give the best.yaml of a sweep"
        ) from error
    overrides = told.get("overrides") if isinstance(told, Mapping) else None
    if not isinstance(overrides, list) or not all(isinstance(word, str) for word in overrides):
        raise ConfigError(
            f"--overrides-from {path}: holds no list of overrides; give the best.yaml of a sweep, "
            "or YAML of the form: overrides: [key=value, ...]"
        )
    config_dir = told.get("config_dir")
    return overrides, Path(str(config_dir)) if config_dir else None


def _best_yaml(row: Row, shared: Sequence[str], config_dir: Path | None) -> str:
    told = {
        "trial": row.number,
        "values": dict(row.values),
        **({"config_dir": str(config_dir.absolute())} if config_dir else {}),
        "overrides": [*shared, *(f"{field}={value}" for field, value in row.params.items())],
    }
    text: str = yaml.safe_dump(told, sort_keys=False, width=10_000)
    return "# posttrain run --overrides-from THIS_FILE\n" + text


def _table(rows: Sequence[Row], fields: Sequence[str], objectives: Sequence[str]) -> Iterable[Sequence[object]]:
    metrics = list(dict.fromkeys(name for row in rows for name in row.metrics))
    yield ["number", "state", "seconds", *fields, *objectives, *metrics, "cause"]
    for row in rows:
        numbers = [*(row.values.get(name, "") for name in objectives), *(row.metrics.get(name, "") for name in metrics)]
        params = (row.params[field] for field in fields)
        yield [row.number, row.state, f"{row.seconds:.1f}", *params, *numbers, row.cause]


def _csv(table: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    return text.getvalue()
