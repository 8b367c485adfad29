"""Looks at a user's rows as a data stage would prepare them, without a pipeline and leaving nothing behind."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, DataError
from tasks.context import Resources, TrainContext
from tasks.data.preparing.options import ROWS, TOKENIZER, Prepare
from tasks.data.preparing.rejects import REJECTS
from tasks.data.preparing.report import NUM_LISTED, REPORT, DataReport, Labels
from tasks.data.preparing.row_split import HELD_OUT, TRAIN
from tasks.method import Input
from tasks.prepare_data import (
    PrepareConversations,
    PreparePreferences,
    PreparePrompts,
    PrepareText,
    PrepareUnpaired,
)

_METHODS = (PrepareText, PrepareConversations, PreparePreferences, PrepareUnpaired, PreparePrompts)
_LABELLED = (Kind.TEXT, Kind.CONVERSATIONS, Kind.PREFERENCES)
_MAX_SHOWN = 20  # bad rows


@dataclass(frozen=True, kw_only=True)
class Examined:
    """What was found.

    Args:
        name: of the rows.
        kind: what they become.
        output: what a data stage leaves behind.
        bad_rows: the first of them, ``place: problem``.
        refusal: why a data stage would not take these rows; None: it would.
    """

    name: str
    kind: Kind
    output: Path
    report: DataReport
    bad_rows: Sequence[str]
    refusal: DataError | None

    def write_all(self, file: Path) -> None:
        """Writes the rows of both sides to one Parquet file.

        Raises:
            DataError: the rows were refused before they were written.
        """
        import duckdb

        sides = [str(self.output / side) for side in (TRAIN, HELD_OUT)]
        if self.refusal and not all(map(os.path.exists, sides)):
            raise self.refusal
        duckdb.read_parquet(sides).write_parquet(str(file))


def kind_of(source: Source, prompt_template: str | None = None) -> Kind:
    """What rows become, by their format; text where not one of the first can be read.

    Raises:
        DataError: there are none, no format fits them, or several do.
    """
    from tasks.data.preparing.detect_source import detect_source

    detected, _ = detect_source(source, prompt_template)
    return detected.format.kind if detected else Kind.TEXT


def method_of(kind: Kind) -> type[Prepare]:
    """The data stage that makes rows of a kind."""
    return next(method for method in _METHODS if method.produces == kind)


def examine(method: Prepare, sources: Sequence[Source], directory: Path, tokenizer: Path | None = None) -> Examined:
    """Prepares rows in a directory, as a stage does, and says what came of it.

    Args:
        sources: of one kind; several are prepared together.
        tokenizer: the directory of a model, in whose tokens rows are measured.
    Raises:
        DataError: nothing can be said of them, such as of rows in no known format.
    """
    slots = [ROWS, *(f"{ROWS}_{number}" for number in range(2, len(sources) + 1))]
    inputs = {slot: _rows(source) for slot, source in zip(slots, sources, strict=True)}
    if tokenizer:
        inputs[TOKENIZER] = Input(name=str(tokenizer), kind=Kind.CHECKPOINT, fingerprint="", path=tokenizer)
    output, work = directory / "output", directory / "work"
    for each in (output, work):
        each.mkdir(parents=True)
    resources = Resources(cpus_per_worker=os.cpu_count() or 1)
    refusal: DataError | None = None
    try:
        method.run(inputs, TrainContext(output_dir=output, work_dir=work, resources=resources))
    except DataError as error:
        if not (output / REPORT).exists():
            raise
        refusal = error
    return Examined(
        name=", ".join(source.path for source in sources), kind=method.produces, output=output,
        report=DataReport.read(output), bad_rows=_bad_rows(output), refusal=refusal,
    )  # fmt: skip


def fetch_tokenizer(model: str) -> Path:
    """The directory of a model's tokenizer; of a hub id it is fetched, without the weights.

    Raises:
        ConfigError: there is none.
    """
    if os.path.isdir(model):
        return Path(model)
    from huggingface_hub import snapshot_download

    from tasks.models import TOKENIZER_FILES

    try:
        return Path(snapshot_download(model, allow_patterns=["config.json", *TOKENIZER_FILES]))
    except Exception as error:  # the hub's errors and its HTTP library's have no common base
        raise ConfigError(
            f"model={model}: no such directory, and the hub gave none ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}); give a directory or a hub id"
        ) from error


def with_labels(found: Examined, tokenizer: Path, max_length: int | None, chat_template: str | None) -> Examined:
    """The same with what of the training rows would be trained, which refuses them where nothing would.

    Args:
        max_length: in tokens; None: the suggested one.
    Raises:
        ConfigError: the model has no chat template, or one that cannot be used.
        DataError: it refuses a row.
    """
    from tasks.data.tokens.load_or_make import load_or_make
    from tasks.data.tokens.tokenization import Tokenization
    from tasks.data.tokens.tokenized_rows import show

    lengths = found.report.lengths
    length = max_length or (lengths.suggested_max_length if lengths else None)
    if found.kind not in _LABELLED or length is None:
        return found
    rows = Input(name=found.name, kind=found.kind, fingerprint="", path=found.output)
    tokenization = Tokenization(kind=found.kind, max_length=length, chat_template=chat_template)
    tokens = load_or_make(tokenization, rows, tokenizer, None, os.cpu_count() or 1)
    account = tokens.account
    labels = Labels(
        max_length=length, trained_tokens_percent=account.trained_percent, rows_cut=account.cut.count,
        rows_dropped=sum(named.count for named in account.dropped.values()), samples=account.samples,
    )  # fmt: skip
    found = replace(found, report=replace(found.report, labels=labels))
    try:
        show(tokens, rows, length)
    except DataError as error:
        return replace(found, refusal=error)
    return found


def add_overlaps(found: Examined, against: Sequence[Examined], directory: Path) -> None:
    """Adds to the report which rows of other sets the examined ones repeat.

    Args:
        directory: for the file of all overlaps.
    Raises:
        DataError: another set was refused.
    """
    from tasks.data.preparing.database import connect
    from tasks.data.preparing.leakage import NamedSet, find

    sets = []
    for number, each in enumerate((found, *against)):
        sets.append(NamedSet(name=each.name, file=directory / f"all-{number}.parquet"))
        each.write_all(sets[-1].file)
    with connect(directory, os.cpu_count() or 1) as connection:
        count, overlaps = find(sets[:1], sets[1:], connection, directory)
    found.report.counts["leaked_rows"] += count
    found.report.leakage = [*overlaps, *found.report.leakage][:NUM_LISTED]


def _rows(source: Source) -> Input:
    return Input(name=source.path, kind=Kind.ROWS, fingerprint="", path=Path(source.path), source=source)


def _bad_rows(output: Path) -> list[str]:
    if not (output / REJECTS).exists():
        return []
    with (output / REJECTS).open(encoding="utf-8") as rejects:
        told = (json.loads(line) for line in islice(rejects, _MAX_SHOWN))
        return [f"{reject['where']}: {reject['problem']}" for reject in told]
