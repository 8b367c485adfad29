"""Fills the report of a data stage, and logs what matters of it."""

import logging

from tasks.data.preparing.arrange import Arranged
from tasks.data.preparing.decide import Decided
from tasks.data.preparing.rejects import Rejects
from tasks.data.preparing.report import DataReport, SourceReport
from tasks.data.preparing.staging import StagedSource, Staging

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
