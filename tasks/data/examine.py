"""Prepares and reports on a user's rows as a data stage would, without a pipeline."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, DataError, PipelineError
from tasks.context import Resources, TrainContext
from tasks.data.images import Images
from tasks.data.kinds import HELD_OUT, TRAIN
from tasks.data.preparing.options import ROWS, TOKENIZER, Prepare
from tasks.data.preparing.report import (
    LEAKAGE,
    NEAR_DUPLICATES,
    NUM_LISTED,
    REJECTS,
    REPORT,
    DataReport,
    Labels,
    write_reports,
)
from tasks.data.tokens.template import Thinking
from tasks.data.tokens.tokenization import ControlText, Tokenization
from tasks.prepare_data import PrepareConversations, PreparePreferences, PreparePrompts, PrepareText, PrepareUnpaired
from tasks.recipe import Input

if TYPE_CHECKING:
    from tasks.data.preparing.convert_rows import Opened

_AGAINST = "against"  # slot of the compared data sets in the report
_METHODS = (PrepareText, PrepareConversations, PreparePreferences, PrepareUnpaired, PreparePrompts)


@dataclass(kw_only=True)
class Examined:
    """The result of a data stage on rows.

    Args:
        name: name of the rows.
        kind: kind of the prepared rows.
        output: output directory of the stage.
        refusals: why a data stage or a training would refuse these rows; empty: they are accepted.
    """

    name: str
    kind: Kind
    output: Path
    report: DataReport
    refusals: list[PipelineError] = field(default_factory=list)

    @staticmethod
    def of(name: str, kind: Kind, output: Path) -> "Examined":
        """The result in the output of a data stage."""
        return Examined(name=name, kind=kind, output=output, report=DataReport.read(output))

    @property
    def num_trained(self) -> int | None:
        """Number of training rows; None: the rows were refused before any was written."""
        return self.report.counts.get("train_rows")

    def bad_rows(self) -> tuple[list[str], int]:
        """The first bad rows as ``place: problem``, and their total number."""
        if not (self.output / REJECTS).exists():
            return [], 0
        with (self.output / REJECTS).open(encoding="utf-8") as rejects:
            first = [json.loads(line) for line in islice(rejects, NUM_LISTED)]
            return [f"{each['where']}: {each['problem']}" for each in first], len(first) + sum(1 for _ in rejects)


def method_of(kind: Kind) -> type[Prepare]:
    """The data stage that produces rows of a kind."""
    return next(method for method in _METHODS if method.produces == kind)


def examine(method: Prepare, rows: Sequence["Opened"], directory: Path, tokenizer: Path | None = None) -> Examined:
    """Prepares rows in a directory, as a data stage does.

    Args:
        rows: sources of one kind, prepared together.
        tokenizer: directory of the model whose tokenizer measures lengths.

    Raises:
        ConfigError: a mixture does not fit the rows.
        DataError: the rows are refused without a report.
    """
    from tasks.data.preparing.prepare import prepare

    slots = dict(zip([ROWS, *(f"{ROWS}_{number}" for number in range(2, len(rows) + 1))], rows, strict=True))
    inputs = {
        slot: Input(
            name=each.source.path, kind=Kind.ROWS, fingerprint="", path=Path(each.source.path), source=each.source
        )
        for slot, each in slots.items()
    }
    if tokenizer:
        inputs[TOKENIZER] = Input(name=str(tokenizer), kind=Kind.CHECKPOINT, fingerprint="", path=tokenizer)
    output, work = directory / "output", directory / "work"
    for each in (output, work):
        each.mkdir(parents=True)
    context = TrainContext(output_dir=output, work_dir=work, resources=Resources(cpus_per_worker=os.cpu_count() or 1))
    refusals: list[PipelineError] = []
    try:
        prepare(method, inputs, context, slots)
    except DataError as error:
        if not (output / REPORT).exists():
            raise
        refusals.append(error)
    found = Examined.of(", ".join(each.source.path for each in rows), method.produces, output)
    found.refusals += refusals
    return found


def keep(found: Examined, directory: Path) -> None:
    """Writes the reports and their files to a directory, and removes files of earlier calls."""
    write_reports(found.report, directory)
    for name in (REJECTS, NEAR_DUPLICATES, LEAKAGE):
        (directory / name).unlink(missing_ok=True)
        if (found.output / name).exists():
            shutil.copyfile(found.output / name, directory / name)


def add_labels(
    found: Examined,
    tokenizer: Path,
    max_length: int | None,
    chat_template: str | None,
    thinking: Thinking | None = None,
    control_tokens: ControlText | None = None,
) -> None:
    """Adds statistics of the trained tokens; adds a refusal if nothing would be trained.

    Args:
        max_length: in tokens, of prompt and answer, or of prompts only; None: the suggested length.
    """
    from tasks.data.tokens.tokenize_rows import load_or_make, show
    from tasks.model.vision import reads_images

    length = max_length or (found.report.lengths.suggested_max_length if found.report.lengths else None)
    if not found.num_trained or length is None:
        return
    rows = Input(name=found.name, kind=found.kind, fingerprint="", path=found.output)
    try:
        tokenization = Tokenization(
            kind=found.kind, max_length=length, chat_template=chat_template, thinking=thinking,
            control_tokens=control_tokens, images=Images() if reads_images(tokenizer) else None,
        )  # fmt: skip
        tokens = load_or_make(tokenization, rows, tokenizer, None, os.cpu_count() or 1)
        stats = tokens.stats
        found.report.labels = Labels(
            max_length=length, trained_tokens_percent=stats.trained_percent if stats.gets_loss else None,
            num_tokens=stats.num_tokens, rows_cut=stats.cut.count, prompts_cut=stats.prompts_cut.count,
            rows_dropped=sum(named.count for named in stats.dropped.values()), labels=stats.labels,
            samples=stats.samples, boundaries=stats.merged.count, control=stats.control.count,
            spelled=stats.spelled, control_done=stats.control_done if stats.control.count else "",
            unknown=stats.unknown.count,
        )  # fmt: skip
        show(tokens, rows, length)
    except (ConfigError, DataError) as error:
        found.refusals.append(error)


def add_overlaps(found: Examined, sources: Sequence[Source], directory: Path) -> None:
    """Adds to the report how other data sets were read, and which of their rows the examined rows repeat.

    Bad rows of these sets are counted, but not compared; a set without readable rows is a refusal.

    Args:
        directory: scratch space.
    """
    import duckdb

    from tasks.data.preparing.convert_rows import detect_source
    from tasks.data.preparing.decide import open_database
    from tasks.data.preparing.repeats import NamedSet, find_leakage

    def of_both_sides(each: Examined, file: Path) -> NamedSet:
        duckdb.read_parquet([str(each.output / side) for side in (TRAIN, HELD_OUT)]).write_parquet(str(file))
        return NamedSet(name=each.name, file=file)

    sets = [of_both_sides(found, directory / "all.parquet")]
    for number, source in enumerate(sources, start=1):
        try:
            rows = detect_source(source)
            method = method_of(rows.kind or Kind.TEXT)(max_bad_rows=sys.maxsize)
            against = examine(method, [rows], directory / f"against-{number}")
            if not against.report.counts["rows"]:
                raise DataError(f"not one of its rows can be used, such as {against.bad_rows()[0][0]}")
        except DataError as error:
            found.refusals.append(DataError(f"not compared with {source.path}: {error}"))
            continue
        slot = _AGAINST if len(sets) == 1 else f"{_AGAINST}_{len(sets)}"
        (found.report.sources[slot],) = against.report.sources.values()
        sets.append(of_both_sides(against, directory / f"all-{number}.parquet"))
    if len(sets) == 1:
        return
    with open_database(directory, os.cpu_count() or 1) as connection:
        count, overlaps = find_leakage(sets[:1], sets[1:], connection, directory)
    own = (found.output / LEAKAGE).rename(directory / "own.parquet")
    duckdb.read_parquet([str(directory / LEAKAGE), str(own)]).write_parquet(str(found.output / LEAKAGE))
    found.report.counts["leaked_rows"] += count
    found.report.leakage = [*overlaps, *found.report.leakage][:NUM_LISTED]
