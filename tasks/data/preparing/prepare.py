"""What a data stage does, from a user's rows to files, numbers and a report."""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from duckdb import DuckDBPyConnection

from lineage.artifact import Source
from lineage.errors import DataError
from tasks.context import Metrics, TrainContext
from tasks.data.preparing.account import count_dropped, log_account, reports_of
from tasks.data.preparing.arrange import Arranged, arrange
from tasks.data.preparing.checks import check_rows
from tasks.data.preparing.convert_rows import ConvertRows
from tasks.data.preparing.database import open_database
from tasks.data.preparing.decide import Decided, decide
from tasks.data.preparing.detect_source import Opened
from tasks.data.preparing.options import REPLAY, TOKENIZER, Prepare
from tasks.data.preparing.rejects import settle_rejects
from tasks.data.preparing.replay import draw_old, old_rows, read_old
from tasks.data.preparing.report import DataReport
from tasks.data.preparing.report_page import write_reports
from tasks.data.preparing.row_split import HELD_OUT, RESTING, TRAIN
from tasks.data.preparing.staging import Staging, stage
from tasks.data.preparing.write import SideFiles, placed_rows
from tasks.recipe import Inputs


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
