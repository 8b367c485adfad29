"""The work of a data stage: from a user's rows to files, counts, lengths and a report."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from duckdb import DuckDBPyConnection

from lineage.artifact import Source
from lineage.errors import DataError
from tasks.context import Metrics, TrainContext
from tasks.data.images import IMAGES, StoredImages, marked, write_images
from tasks.data.kinds import (
    HELD_OUT,
    LABEL_NAMES,
    RESTING,
    TRAIN,
    kind_of_columns,
    messages_of,
    row_batches,
    texts_of,
    tools_of,
)
from tasks.data.preparing.convert_rows import (
    ROLE_MARKS,
    ConvertRows,
    Opened,
    SplitFiles,
    Staging,
    settle_bad_rows,
    stage,
    write_placed,
)
from tasks.data.preparing.decide import Decided, decide, draw_old, old_columns, old_rows, open_database, read_old
from tasks.data.preparing.options import REPLAY, TOKENIZER, Prepare
from tasks.data.preparing.repeats import BANDS, NamedSet, find_leakage, find_near_duplicates
from tasks.data.preparing.report import REJECTS, DataReport, Lengths, write_reports
from tasks.data.tokens.encoding import Rendered
from tasks.data.tokens.rendering import Template
from tasks.recipe import Input, Inputs

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tasks.model.vision import Vision

logger = logging.getLogger(__name__)


def prepare(options: Prepare, inputs: Inputs, ctx: TrainContext, opened: Mapping[str, Opened] | None = None) -> Metrics:
    """Checks, identifies, splits and writes all rows, replays old ones, and writes a report.

    Args:
        opened: slot -> its source, if it was opened before.

    Raises:
        ConfigError: a mixture does not fit the slots.
        DataError: too many bad rows, or a split is empty; the report is written all the same.
    """
    sources = {slot: inputs[slot].source or Source(path=str(inputs[slot].path)) for slot in options.row_slots(inputs)}
    workers = ctx.resources.cpus_per_worker
    convert = ConvertRows.of(options)
    ctx.output_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=ctx.work_dir) as scratch:
        staging = stage(sources, convert, workers, Path(scratch), opened)
        report = DataReport(counts={}, sources={slot: staged.report for slot, staged in staging.sources.items()})
        refusal = settle_bad_rows(staging, report, options, ctx.output_dir)
        if not refusal:
            with open_database(Path(scratch), workers) as connection:
                read_old(connection, inputs.get(REPLAY))
                decided = decide(connection, staging, options)
                report.counts |= _write(connection, staging, options, inputs, ctx.output_dir, decided)
                for source in report.sources.values():
                    source.rows_used = source.rows_read - source.num_dropped
                marked = [
                    source.remarks[ROLE_MARKS].count
                    for source in report.sources.values()
                    if ROLE_MARKS in source.remarks
                ]
                report.counts |= {
                    "dropped": report.num_dropped,
                    **({"rows_with_role_marks": sum(marked)} if marked else {}),
                }
                _check_rows(connection, report, inputs.get(TOKENIZER), ctx.output_dir)
                if TOKENIZER in inputs:
                    ctx.loaded(TOKENIZER)
            refusal = _empty_side(report.counts, options, decided)
    write_reports(report, ctx.output_dir)
    _log_report(report)
    if refusal:
        raise refusal
    return {name: float(count) for name, count in report.counts.items()}


def check_rows(
    options: Prepare, sources: Mapping[str, Source], workers: int, *, replays: bool = False
) -> tuple[Mapping[str, int], int | None, tuple[float, int]]:
    """Reads, converts and splits all rows as the stage would, and keeps nothing.

    Args:
        replays: whether earlier rows are replayed, which decide with these in which split a row is.

    Returns:
        How many rows would be left out, by reason; the number of training rows, None with earlier rows; and the bytes
        of a row, the mean and the most.

    Raises:
        DataError: no format fits the rows, too many are bad, or a split would be empty.
    """
    with TemporaryDirectory(prefix="posttrain-rows-") as directory:
        scratch = Path(directory)
        staging = stage(sources, ConvertRows.of(options), workers, scratch)
        report = DataReport(counts={}, sources={slot: staged.report for slot, staged in staging.sources.items()})
        if refusal := settle_bad_rows(staging, report, options, scratch):
            kept = f"all of them are in {scratch / REJECTS}"
            raise DataError(str(refusal).replace(kept, "posttrain data lists them"))
        left_out = sum((Counter(source.dropped) for source in report.sources.values()), Counter[str]())
        train = None
        if not replays:
            with open_database(scratch, workers) as connection:
                read_old(connection, None)
                decided = decide(connection, staging, options)
                query = "SELECT count(*) FILTER (held_out), count(*) FILTER (NOT held_out) FROM placed"
                ((held_out, train),) = connection.execute(query).fetchall()
            counts = {"rows": held_out + train - decided.repeated, "held_out_rows": held_out, "train_rows": train}
            if refusal := _empty_side(counts, options, decided):
                raise refusal
        lengths = pq.read_table(staging.keys, columns=["bytes"]).column("bytes")
        mean, most = pc.mean(lengths).as_py() or 0.0, pc.max(lengths).as_py() or 0
    return left_out, train, (mean, most)


def _empty_side(counts: Mapping[str, int], options: Prepare, decided: Decided) -> DataError | None:
    """The error if a split has no row."""
    found = f"held_out={options.held_out} of {counts['rows']} rows leaves none"
    if counts["rows"] == 1:
        return DataError("the one row leaves none to measure on beside it; give two or more, better a hundred")
    if not counts["held_out_rows"]:
        return DataError(f"{found} to measure on; give more rows or groups, or a held_out above {decided.lowest:.3f}")
    if not counts["train_rows"] and decided.one_group:
        return DataError(
            f"{found} to train on: all share one prompt, or one value of the column group, so they are one group, "
            "which is on one side whole; give rows of other prompts, or another group to each"
        )
    if not counts["train_rows"]:
        return DataError(f"{found} to train on; give more rows or groups, or a smaller held_out")
    return None


def _write(
    connection: DuckDBPyConnection,
    staging: Staging,
    options: Prepare,
    inputs: Inputs,
    directory: Path,
    decided: Decided,
) -> dict[str, int]:
    """Writes new and replayed rows; returns their counts."""
    replay, share = inputs.get(REPLAY), options.replay_share
    sides = (TRAIN, HELD_OUT, RESTING) if replay else (TRAIN, HELD_OUT)
    rare = staging.rare | (old_columns(replay) if replay and share else set())
    files = SplitFiles(directory, options.produces, sides, rare)
    write_placed(connection, staging, files, as_read=decided.as_read)
    new = files.counts[TRAIN] + files.counts[HELD_OUT] - decided.repeated
    counts = {"rows": new + decided.known}
    if share:
        counts |= {"new_rows": new, "replayed_rows": 0}
    if replay and share:
        counts["replayed_rows"] = draw_old(connection, replay, share, options.seed, files.counts[TRAIN])
        for side, rows in old_rows(connection, replay):
            files.write(side, rows)
    files.close()
    counts |= _write_images(staging, replay, directory, sides)
    counts |= {"train_rows": files.counts[TRAIN], "held_out_rows": files.counts[HELD_OUT]}
    repeated = {"repeated_rows": decided.repeated} if decided.repeated else {}
    return {**counts, **repeated, "duplicates": decided.duplicates}


def _write_images(staging: Staging, replay: Input | None, directory: Path, sides: Sequence[str]) -> dict[str, int]:
    """Writes the images of the written rows beside them; returns their counts, if there are any."""
    old = [found] if replay and (found := StoredImages.beside(replay.path)) else []
    if not (staging.images.exists() or old):
        return {}
    rows = {
        side: [
            set(marked([text])) for batch in row_batches(directory / side, 1000) for text in texts_of(batch).to_pylist()
        ]
        for side in sides
    }
    every = {digest for found in rows.values() for images in found for digest in images}
    if not every:
        return {}
    trained = set().union(*rows[TRAIN])
    leaked = sum(not images.isdisjoint(trained) for images in rows[HELD_OUT])
    count = write_images(every, [staging.images], old, directory / IMAGES)
    return {"images": count, "held_out_rows_with_trained_images": leaked}


def _log_report(report: DataReport) -> None:
    """Logs the report: a line per source, dropped reason, remark and ignored column."""
    for slot, source in report.sources.items():
        read = ", ".join(f"{column} -> {meaning}" for column, meaning in source.mapping.items())
        logger.info("slot=%s path=%s format=%s (%s): %s", slot, source.path, source.format, source.evidence, read)
        for reason, count in source.dropped.items():
            logger.info("slot=%s rows=%d dropped=%s", slot, count, reason)
        for what, remark in source.remarks.items():
            logger.warning("slot=%s rows=%d remark=%s such as %s", slot, remark.count, what, ", ".join(remark.places))
        for column, count in source.ignored_columns.items():
            logger.info("slot=%s rows=%d ignored_column=%s", slot, count, column)
    logger.info(" ".join(f"{name}={count}" for name, count in report.counts.items()))


def _check_rows(connection: DuckDBPyConnection, report: DataReport, tokenizer: Input | None, directory: Path) -> None:
    """Adds near-duplicates, lengths, leakage and labels to the report; drops nothing.

    Args:
        tokenizer: a model whose tokenizer measures lengths; None: bytes.
        directory: where the rows were written, and the files of findings are.
    """
    bands = ", ".join(BANDS)
    keys = f"(SELECT row AS ordinal, content, row_id, {bands} FROM keys JOIN placed USING (row))"
    counts = report.counts
    counts["near_duplicate_rows"], report.near_duplicates = find_near_duplicates(connection, keys, directory)
    train, held_out = (NamedSet(name=Path(side).stem, file=directory / side) for side in (TRAIN, HELD_OUT))
    report.lengths = _lengths([train.file, held_out.file], tokenizer)
    counts["leaked_rows"], report.leakage = find_leakage([train], [held_out], connection, directory)
    rows = connection.read_parquet(str(train.file))
    if "label" in rows.columns:
        found = dict(rows.aggregate("label, count(*)", "label").fetchall())
        counts |= {f"{name}_rows": found.get(label, 0) for label, name in LABEL_NAMES.items()}


MAX_COUNTED = 20_000  # rows to tokenize: gives the 99th percentile within a tenth of a percent

_NUM_BINS = 40
_WIDTHS = [digit * 10**zeros for zeros in range(19) for digit in (1, 2, 5)]  # widths of bins with round edges
_LONG_TAIL = 20  # longest row relative to the median from which bins grow geometrically
_STEP = 64  # suggested lengths are multiples of it
_ROWS_PER_READ = 1000
_ROWS_AT_ONCE = 32  # twice as fast as a thousand


def _lengths(files: Sequence[Path], tokenizer: Input | None) -> Lengths | None:
    """Statistics of the lengths of all rows; None: there are none."""
    if tokenizer is None:
        counted = byte_lengths(files)
    else:
        from tasks.model.tokenizers import tokenizer_of
        from tasks.model.vision import Vision, reads_images

        vision = Vision.of(tokenizer.path, files[0].parent) if reads_images(tokenizer.path) else None
        counted = token_lengths(files, tokenizer_of(tokenizer.path), vision)
    return measure(counted, tokenizer=tokenizer.name if tokenizer else None) if len(counted) else None


def measure(lengths: npt.NDArray[np.int64], *, tokenizer: str | None = None) -> Lengths:
    """Statistics of the lengths of rows, in bytes of UTF-8 or in tokens.

    Packing is suggested if the mean row fills less than half of the suggested length.

    Args:
        lengths: of at least one row.
    """
    p50, p95, p99 = (int(value) for value in np.quantile(lengths, [0.5, 0.95, 0.99], method="inverted_cdf"))
    edges = _edges(int(lengths.min()), p50, int(lengths.max()))
    suggested = max(_STEP, -(-p95 // _STEP) * _STEP) if tokenizer else None
    return Lengths(
        unit="tokens" if tokenizer else "bytes", tokenizer=tokenizer, rows=len(lengths), p50=p50, p95=p95, p99=p99,
        max=int(lengths.max()), edges=edges, counts=np.histogram(lengths, edges)[0].tolist(),
        suggested_max_length=suggested, suggests_packing=bool(lengths.mean() < suggested / 2) if suggested else None,
    )  # fmt: skip


def _edges(shortest: int, median: int, longest: int) -> list[int]:
    """Edges of bins of equal width, or of equal ratio if a few rows are far longer than the others."""
    if longest > _LONG_TAIL * max(median, 1):
        edges = np.geomspace(max(shortest, 1), longest + 1, _NUM_BINS + 1).astype(np.int64)
        return sorted({min(shortest, 1), *edges.tolist()[1:-1], longest + 1})
    width = next(width for width in _WIDTHS if width * (_NUM_BINS - 1) > longest - shortest)
    return list(range(shortest // width * width, longest + width + 1, width))


def byte_lengths(files: Sequence[Path]) -> npt.NDArray[np.int64]:
    """Lengths of the texts of prepared rows in bytes."""
    found = [pc.binary_length(texts_of(rows)) for file in files for rows in row_batches(file, _ROWS_PER_READ)]
    return np.concatenate([np.empty(0, dtype=np.int64), *map(np.asarray, found)])


def token_lengths(
    files: Sequence[Path], tokenizer: "PreTrainedTokenizerBase", vision: "Vision | None" = None
) -> npt.NDArray[np.int64]:
    """Lengths of prepared rows in tokens, rendered as for training; for a pair with the longer answer.

    If there are many rows, about ``MAX_COUNTED`` are sampled by id.

    Args:
        vision: how the images of the rows become tokens; None: they have none.

    Raises:
        DataError: the chat template refuses a row.
    """
    template = replace(Template.of(tokenizer), images=vision is not None) if tokenizer.chat_template else None
    lengths: list[int] = []
    for rows in _sampled(files):
        if template:
            rendered = [_rendered(row, template, vision) for row in rows.to_pylist()]
        else:
            rendered = [[text] for text in texts_of(rows).to_pylist()]
        counted = tokenizer([text for texts in rendered for text in texts], add_special_tokens=False)
        counts = map(len, counted["input_ids"])
        lengths += [max(next(counts) for _ in texts) for texts in rendered]
    return np.array(lengths, dtype=np.int64)


def _sampled(files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    share = MAX_COUNTED / max(sum(pq.read_metadata(file).num_rows for file in files), 1)
    for batch in (batch for file in files for batch in row_batches(file, _ROWS_PER_READ)):
        if share < 1:
            # Ids start with a hash of the row in hexadecimal.
            batch = batch.filter(pc.less(batch.column("row_id"), f"{int(share * 16**8):08x}"))
        yield from (batch.slice(start, _ROWS_AT_ONCE) for start in range(0, len(batch), _ROWS_AT_ONCE))


def _rendered(row: Mapping[str, object], template: Template, vision: "Vision | None") -> list[str]:
    """The texts to tokenize for a row: two for a pair, else one."""
    kind = kind_of_columns(list(row))
    if not kind.chat:
        return [str(row[kind.asked])]
    tools, row_id, asked = tools_of(row), str(row["row_id"]), messages_of(row[kind.asked])
    answers = [messages_of(row[name]) for name in kind.answers]
    texts = template.render([[*asked, *answer] for answer in answers or [[]]], tools, row_id, prompt=not kind.trained)
    return [vision.expanded(Rendered(text=text), asked, row_id).text for text in texts] if vision else texts
