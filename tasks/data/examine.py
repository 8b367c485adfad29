"""Looks at a user's rows as a data stage would prepare them, without a pipeline."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, DataError, PipelineError
from lineage.model_files import TOKENIZER_FILES, require_own_files, require_sound
from lineage.model_source import has_tokenizer
from lineage.peft_adapter import base_source, is_peft
from tasks.context import Resources, TrainContext
from tasks.data.kinds import HELD_OUT, TRAIN
from tasks.data.ordered_pool import row_batches
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

_AGAINST = "against"  # the slot of other sets in the report
_ROWS_PER_GROUP = 10_000  # of Parquet
_METHODS = (PrepareText, PrepareConversations, PreparePreferences, PrepareUnpaired, PreparePrompts)


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


def method_of(kind: Kind) -> type[Prepare]:
    """The data stage that makes rows of a kind."""
    return next(method for method in _METHODS if method.produces == kind)


def examine(method: Prepare, rows: Sequence["Opened"], directory: Path, tokenizer: Path | None = None) -> Examined:
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
        prepare(method, inputs, context, slots)
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
    write_reports(found.report, directory)
    for name in (REJECTS, NEAR_DUPLICATES, LEAKAGE):
        (directory / name).unlink(missing_ok=True)
        if (found.output / name).exists():
            shutil.copyfile(found.output / name, directory / name)


def _input(source: Source) -> Input:
    return Input(name=source.path, kind=Kind.ROWS, fingerprint="", path=Path(source.path), source=source)


def fetch_tokenizer(model: str) -> Path:
    """The directory of a model's tokenizer; of a hub id it is fetched, without the weights.

    Raises:
        ConfigError: there is none.
    """
    if os.path.isdir(model):
        directory = Path(model)
        require_own_files(directory)
        require_sound(directory)
        if is_peft(directory) and not has_tokenizer(directory):
            return fetch_tokenizer(base_source("base", Source(path=model, kind=Kind.CHECKPOINT), directory).path)
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["config.json", *TOKENIZER_FILES]))
    except Exception as error:  # the hub's errors and its HTTP library's have no common base
        raise ConfigError(
            f"model={model}: no such directory, and the hub gave none ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}); give a directory or a hub id"
        ) from error


def with_labels(
    found: Examined,
    tokenizer: Path,
    max_length: int | None,
    chat_template: str | None,
    thinking: Thinking | None = None,
) -> Examined:
    """The same with what of the training rows would be trained, refused where nothing would be or it is unknown.

    Args:
        max_length: in tokens, of prompt and answer, or of a prompt alone; None: the suggested one.
    """
    from tasks.data.tokens.cache import load_or_make, show
    from tasks.data.tokens.tokenization import Tokenization

    lengths = found.report.lengths
    length = max_length or (lengths.suggested_max_length if lengths else None)
    if not found.num_trained or length is None:
        return found
    rows = Input(name=found.name, kind=found.kind, fingerprint="", path=found.output)
    tokenization = Tokenization(kind=found.kind, max_length=length, chat_template=chat_template, thinking=thinking)
    try:
        tokens = load_or_make(tokenization, rows, tokenizer, None, os.cpu_count() or 1)
        stats = tokens.stats
        labels = Labels(
            max_length=length, trained_tokens_percent=stats.trained_percent if stats.gets_loss else None,
            num_tokens=stats.num_tokens, rows_cut=stats.cut.count, prompts_cut=stats.prompts_cut.count,
            rows_dropped=sum(named.count for named in stats.dropped.values()), labels=stats.labels,
            samples=stats.samples,
        )  # fmt: skip
        found = replace(found, report=replace(found.report, labels=labels))
        show(tokens, rows, length)
    except (ConfigError, DataError) as error:
        return found.refused(error)
    return found


def examine_all(source: Source, directory: Path) -> Examined:
    """Prepares all rows of a set that can be read: its bad ones are counted, and cannot be compared.

    Raises:
        DataError: there are none, or their format is not known.
    """
    from tasks.data.preparing.convert_rows import detect_source

    rows = detect_source(source)
    found = examine(method_of(rows.kind or Kind.TEXT)(max_bad_rows=sys.maxsize), [rows], directory)
    if not found.report.counts["rows"]:
        raise DataError(f"not one of its rows can be used, such as {found.bad_rows[0]}")
    return found


def add_overlaps(found: Examined, against: Sequence[Examined], directory: Path) -> None:
    """Adds to the report how other sets were read, and which of their rows the examined ones repeat.

    Args:
        directory: for what is made on the way.
    """
    import duckdb

    from tasks.data.preparing.decide import open_database
    from tasks.data.preparing.leakage import NamedSet, find

    sets = [
        NamedSet(name=each.name, file=_all_rows(each, directory / f"all-{number}.parquet"))
        for number, each in enumerate((found, *against))
    ]
    with open_database(directory, os.cpu_count() or 1) as connection:
        count, overlaps = find(sets[:1], sets[1:], connection, directory)
    own = (found.output / LEAKAGE).rename(directory / "own.parquet")
    duckdb.read_parquet([str(directory / LEAKAGE), str(own)]).write_parquet(str(found.output / LEAKAGE))
    report = found.report
    report.counts["leaked_rows"] += count
    report.leakage = [*overlaps, *report.leakage][:NUM_LISTED]
    for number, each in enumerate(against, start=1):
        (source,) = each.report.sources.values()
        report.sources[_AGAINST if number == 1 else f"{_AGAINST}_{number}"] = source


def _all_rows(found: Examined, file: Path) -> Path:
    """The rows of both sides in one Parquet file."""
    import pyarrow.parquet as pq

    sides = [found.output / side for side in (TRAIN, HELD_OUT)]
    with pq.ParquetWriter(file, pq.read_schema(sides[0])) as all_rows:
        for side in sides:
            for batch in row_batches(side, _ROWS_PER_GROUP):
                all_rows.write_batch(batch)
    return file
