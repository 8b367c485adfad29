"""What a data stage does, from a user's rows to files, numbers and a report."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from duckdb import DuckDBPyConnection

from lineage.artifact import Source
from lineage.errors import DataError
from tasks.context import Metrics, TrainContext
from tasks.data.kinds import LABEL_NAMES
from tasks.data.preparing import leakage, lengths, near_duplicates
from tasks.data.preparing.convert_rows import ConvertRows, Opened
from tasks.data.preparing.database import open_database
from tasks.data.preparing.decide import Arranged, Decided, arrange, decide
from tasks.data.preparing.leakage import NamedSet
from tasks.data.preparing.near_duplicates import BANDS
from tasks.data.preparing.options import REPLAY, TOKENIZER, Prepare
from tasks.data.preparing.replay import draw_old, old_rows, read_old
from tasks.data.preparing.report import DataReport, Lengths, SourceReport, write_reports
from tasks.data.preparing.row_split import HELD_OUT, RESTING, TRAIN
from tasks.data.preparing.staging import Rejects, StagedSource, Staging, settle_rejects, stage
from tasks.data.preparing.write import SideFiles, placed_rows
from tasks.recipe import Input, Inputs


def prepare(options: Prepare, inputs: Inputs, ctx: TrainContext, opened: Mapping[str, Opened] | None = None) -> Metrics:
    """Checks, names, splits and writes every row, replays old ones, and reports what became of them.

    Args:
        opened: slot -> its source, of those that somebody looked into before.
    Raises:
        ConfigError: a mixture does not fit the slots.
        DataError: rows cannot be used, or one side has none; the report is written all the same.
    """
    sources = {slot: inputs[slot].source or Source(path=str(inputs[slot].path)) for slot in options.row_slots(inputs)}
    workers = ctx.resources.cpus_per_worker
    convert = ConvertRows(
        kind=options.produces, seed=options.seed, system_prompt=options.system_prompt,
        prompt_template=options.prompt_template,
    )  # fmt: skip
    ctx.output_dir.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=ctx.work_dir) as scratch:
        staging = stage(sources, convert, workers, Path(scratch), opened)
        report = _account_of_bad_rows(staging, options, ctx.output_dir)
        with open_database(Path(scratch), workers) as connection:
            read_old(connection, inputs.get(REPLAY))
            decided = decide(connection, staging, options)
            arranged = arrange(connection, staging, options)
            report.counts |= _write(connection, staging, options, inputs, ctx.output_dir, decided, arranged)
            count_dropped(report, decided, arranged)
            check_rows(connection, report, inputs.get(TOKENIZER), ctx.output_dir)
    write_reports(report, ctx.output_dir)
    log_account(report)
    _require_both(options, report, decided.lowest)
    return {name: float(count) for name, count in report.counts.items()}


def _account_of_bad_rows(staging: Staging, options: Prepare, directory: Path) -> DataReport:
    """The report of what was read.

    Raises:
        DataError: more of it is bad than may be.
    """
    rejects = settle_rejects(staging, directory)
    report = DataReport(counts={}, sources=reports_of(staging, rejects), rejects=rejects.name)
    if rejects.count > options.max_bad_rows:
        num_rows = sum(staged.stop - staged.start for staged in staging.sources.values())
        report.counts |= {"rows": num_rows - rejects.count, "dropped": rejects.count}
        write_reports(report, directory)
        log_account(report)
        raise rejects.refusal(num_rows)
    return report


def _write(
    connection: DuckDBPyConnection,
    staging: Staging,
    options: Prepare,
    inputs: Inputs,
    directory: Path,
    decided: Decided,
    arranged: Arranged,
) -> dict[str, int]:
    """Writes new rows and old ones; returns how many there are."""
    replay, share = inputs.get(REPLAY), options.replay_share
    files = SideFiles(directory, options.produces, (TRAIN, HELD_OUT, RESTING) if replay else (TRAIN, HELD_OUT))
    for side, rows in placed_rows(connection, staging, as_read=arranged.as_read):
        files.write(side, rows)
    new = files.counts[TRAIN] + files.counts[HELD_OUT] - arranged.repeated
    counts = {"rows": new + decided.known}
    if share:
        counts |= {"new_rows": new, "replayed_rows": 0}
    if replay and share:
        counts["replayed_rows"] = draw_old(connection, replay, share, options.seed, files.counts[TRAIN])
        for side, rows in old_rows(connection, replay):
            files.write(side, rows)
    files.close()
    counts |= {"train_rows": files.counts[TRAIN], "held_out_rows": files.counts[HELD_OUT]}
    if arranged.repeated:
        counts["repeated_rows"] = arranged.repeated
    return {**counts, "duplicates": decided.duplicates}


def _require_both(options: Prepare, report: DataReport, lowest: float) -> None:
    stated = f"held_out={options.held_out} of {report.counts['rows']} rows leaves none"
    if not report.counts["held_out_rows"]:
        raise DataError(f"{stated} to measure on; give more rows or groups, or a held_out above {lowest:.3f}")
    if not report.counts["train_rows"]:
        raise DataError(f"{stated} to train on; give more rows or groups, or a smaller held_out")


logger = logging.getLogger(__name__)

_UNMIXED = "left out by the mixture"
_PARTED = "away from its group, beside the row that it is a copy of"


def reports_of(staging: Staging, rejects: Rejects) -> dict[str, SourceReport]:
    """What was read of each slot, and what of it is bad."""
    reports = {slot: _report_of(staged) for slot, staged in staging.sources.items()}
    for slot, report in reports.items():
        report.dropped |= dict(sorted(rejects.reasons[slot].items()))
    return reports


def _report_of(staged: StagedSource) -> SourceReport:
    detected = staged.detected
    return SourceReport(
        path=staged.source.path,
        format=detected.name if detected else "unknown",
        evidence=detected.evidence if detected else "not one of the first rows can be read",
        mapping=detected.mapping if detected else {},
        split_by=" or ".join(sorted(staged.splits)) or None,
        rows_read=staged.rows_read,
        remarks=staged.remarks,
        ignored_columns=dict(sorted(staged.ignored.items())),
    )


def count_dropped(report: DataReport, decided: Decided, arranged: Arranged) -> None:
    """Adds what became of the rows that are not bad."""
    for slot, source in report.sources.items():
        source.dropped |= decided.dropped[slot]
        if slot in arranged.left_out:
            source.dropped[_UNMIXED] = arranged.left_out[slot]
        if slot in decided.parted:
            source.remarks[_PARTED] = decided.parted[slot]
        source.rows_used = source.rows_read - sum(source.dropped.values())
    report.counts["dropped"] = sum(sum(source.dropped.values()) for source in report.sources.values())


def log_account(report: DataReport) -> None:
    """One line for each source, and for each thing about it that a user may want to know."""
    for slot, source in report.sources.items():
        read = ", ".join(f"{column} -> {meaning}" for column, meaning in source.mapping.items())
        logger.info("slot=%s path=%s format=%s (%s): %s", slot, source.path, source.format, source.evidence, read)
        for reason, count in source.dropped.items():
            logger.warning("slot=%s rows=%d dropped=%s", slot, count, reason)
        for words, remark in source.remarks.items():
            logger.warning("slot=%s rows=%d remark=%s such as %s", slot, remark.count, words, ", ".join(remark.places))
        for column, count in source.ignored_columns.items():
            logger.info("slot=%s rows=%d ignored_column=%s", slot, count, column)
    logger.info(" ".join(f"{name}={count}" for name, count in report.counts.items()))


def check_rows(connection: DuckDBPyConnection, report: DataReport, tokenizer: Input | None, directory: Path) -> None:
    """Adds to the report what is found; nothing is dropped for it.

    Args:
        tokenizer: a model in whose tokens rows are measured; None: they are measured in bytes.
        directory: where the rows were written. The files of what is found get there too.
    """
    bands = ", ".join(BANDS)
    connection.execute(
        f"CREATE VIEW near_keys AS SELECT row AS ordinal, content, row_id, {bands} FROM keys JOIN placed USING (row)"
    )
    report.counts["near_duplicate_rows"], report.near_duplicates = near_duplicates.find(
        connection, "near_keys", directory
    )
    files = [directory / side for side in (TRAIN, HELD_OUT)]
    report.lengths = _lengths(files, tokenizer)
    train, held_out = (NamedSet(name=file.stem, file=file) for file in files)
    report.counts["leaked_rows"], report.leakage = leakage.find([train], [held_out], connection, directory)
    report.counts |= _labels(connection, train.file)


def _labels(connection: DuckDBPyConnection, train: Path) -> dict[str, int]:
    """Training rows with a desirable and with an undesirable answer; nothing of rows that have no label."""
    rows = connection.read_parquet(str(train))
    if "label" not in rows.columns:
        return {}
    found = dict(rows.aggregate("label, count(*)", "label").fetchall())
    return {f"{name}_rows": found.get(label, 0) for label, name in LABEL_NAMES.items()}


def _lengths(files: Sequence[Path], tokenizer: Input | None) -> Lengths | None:
    """Of the rows of all files; None: there are none."""
    if tokenizer is None:
        counted = lengths.byte_lengths(files)
    else:
        from tasks.tokenizers import load_tokenizer

        counted = lengths.token_lengths(files, load_tokenizer(tokenizer))
    return lengths.measure(counted, tokenizer=tokenizer.name if tokenizer else None) if len(counted) else None
