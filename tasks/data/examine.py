"""Looks at a user's rows as a data stage would prepare them, without a pipeline."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import Kind, Source
from lineage.errors import DataError, PipelineError
from tasks.context import Resources, TrainContext
from tasks.data.preparing.options import ROWS, TOKENIZER, Prepare
from tasks.data.preparing.report import NUM_LISTED, REJECTS, REPORT, DataReport
from tasks.prepare_data import (
    PrepareConversations,
    PreparePreferences,
    PreparePrompts,
    PrepareText,
    PrepareUnpaired,
)
from tasks.recipe import Input

if TYPE_CHECKING:
    from tasks.data.preparing.convert_rows import Opened

_METHODS = (PrepareText, PrepareConversations, PreparePreferences, PrepareUnpaired, PreparePrompts)


@dataclass(frozen=True, kw_only=True)
class OpenedRows:
    """Rows whose format was looked for. They are read from where that ended, once."""

    source: Source
    opened: "Opened"

    @property
    def kind(self) -> Kind | None:
        """What they become; None: not one of the first can be read."""
        detected, _ = self.opened
        return detected.format.kind if detected else None

    def refusal(self, accepted: Kind, stated: str) -> DataError:
        """That they are of another kind.

        Args:
            stated: where it is said which is accepted, and how to have it otherwise.
        """
        detected, _ = self.opened
        assert detected
        return DataError(
            f"{self.source.path}: detected {detected.name} ({detected.evidence}), which gives {self.kind}; "
            f"{accepted} is accepted {stated}, or say with format=NAME how else it is read"
        )


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found.

    Args:
        name: of the rows.
        kind: what they become.
        output: what a data stage leaves behind.
        num_bad_rows: those that cannot be used.
        bad_rows: the first of them, ``place: problem``.
        refusals: why a data stage or what trains on it would not take these rows; none: they would.
    """

    name: str
    kind: Kind
    output: Path
    report: DataReport
    num_bad_rows: int
    bad_rows: Sequence[str]
    refusals: Sequence[PipelineError] = ()

    @property
    def num_trained(self) -> int | None:
        """Training rows; None: the rows were refused before any were written."""
        return self.report.counts.get("train_rows")

    def refused(self, *errors: PipelineError) -> "Examined":
        """The same with further refusals."""
        return replace(self, refusals=[*self.refusals, *errors])


def open_rows(source: Source, prompt_template: str | None = None) -> OpenedRows:
    """Looks for the format of rows.

    Raises:
        DataError: there are none, no format fits them, or several do.
    """
    from tasks.data.preparing.convert_rows import detect_source

    return OpenedRows(source=source, opened=detect_source(source, prompt_template))


def method_of(kind: Kind) -> type[Prepare]:
    """The data stage that makes rows of a kind."""
    return next(method for method in _METHODS if method.produces == kind)


def examine(method: Prepare, rows: Sequence[OpenedRows], directory: Path, tokenizer: Path | None = None) -> Examined:
    """Prepares rows in a directory, as a stage does, and says what came of it.

    Args:
        rows: of one kind; several are prepared together.
        tokenizer: the directory of a model, in whose tokens rows are measured.
    Raises:
        ConfigError: a mixture does not fit the rows.
        DataError: nothing can be said of them.
    """
    from tasks.data.preparing.prepare import prepare

    slots = dict(zip([ROWS, *(f"{ROWS}_{number}" for number in range(2, len(rows) + 1))], rows, strict=True))
    inputs = {slot: _input(each.source) for slot, each in slots.items()}
    if tokenizer:
        inputs[TOKENIZER] = Input(name=str(tokenizer), kind=Kind.CHECKPOINT, fingerprint="", path=tokenizer)
    output, work = directory / "output", directory / "work"
    for each in (output, work):
        each.mkdir(parents=True)
    context = TrainContext(output_dir=output, work_dir=work, resources=Resources(cpus_per_worker=os.cpu_count() or 1))
    refusals = []
    try:
        prepare(method, inputs, context, {slot: each.opened for slot, each in slots.items()})
    except DataError as error:
        if not (output / REPORT).exists():
            raise
        refusals.append(error)
    return finished(", ".join(each.source.path for each in rows), method.produces, output).refused(*refusals)


def finished(name: str, kind: Kind, output: Path) -> Examined:
    """What a data stage left behind."""
    bad_rows: list[str] = []
    num_bad_rows = 0
    if (output / REJECTS).exists():
        with (output / REJECTS).open(encoding="utf-8") as rejects:
            for num_bad_rows, line in enumerate(rejects, start=1):
                if num_bad_rows <= NUM_LISTED:
                    reject = json.loads(line)
                    bad_rows.append(f"{reject['where']}: {reject['problem']}")
    report = DataReport.read(output)
    return Examined(
        name=name, kind=kind, output=output, report=report, num_bad_rows=num_bad_rows, bad_rows=bad_rows
    )  # fmt: skip


def keep(found: Examined, directory: Path) -> None:
    """Writes the reports and all that they name to a directory; what an earlier call left there goes."""
    from tasks.data.preparing.report import LEAKAGE, NEAR_DUPLICATES, write_reports

    write_reports(found.report, directory)
    for name in (REJECTS, NEAR_DUPLICATES, LEAKAGE):
        (directory / name).unlink(missing_ok=True)
        if (found.output / name).exists():
            shutil.copyfile(found.output / name, directory / name)


def _input(source: Source) -> Input:
    return Input(name=source.path, kind=Kind.ROWS, fingerprint="", path=Path(source.path), source=source)
