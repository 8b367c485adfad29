"""What ``posttrain data`` prints of rows: how they are read, what is left out, and what of them would be trained on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.text import Text

from flows.reports.printable import printable
from flows.reports.tables import empty_table, plain_text
from flows.wording import counted
from tasks.data.preparing.report import DataReport, Labels, SourceReport

Row = tuple[str, str]


def data_text(report: DataReport, bad_rows: Sequence[str]) -> str:
    """The report for people.

    Args:
        bad_rows: the first of them, ``place: problem``.
    """
    blocks = [_table(_source_rows(source), printable(source.path)) for source in report.sources.values()]
    blocks.append(_table(_rows_of(report), "all rows"))
    if bad_rows:
        blocks.append("\n".join(["bad rows", *(f"  {printable(line)}" for line in bad_rows)]))
    if report.near_duplicates:
        pairs = (f"{pair.row_id} is like {pair.other_row_id}: {pair.similarity:.2f}" for pair in report.near_duplicates)
        blocks.append("\n".join(["near-duplicates", *(f"  {pair}" for pair in pairs)]))
    if report.leakage:
        overlaps = (
            f"{each.held_out_row_id} of {each.held_out_set}: {each.kind} {each.shared:.2f}, {each.train_row_id} of "
            f"{each.train_set}"
            for each in report.leakage
        )
        blocks.append("\n".join(["leakage", *(f"  {printable(overlap)}" for overlap in overlaps)]))
    if report.labels:
        blocks.append(_labels(report.labels))
    return "\n\n".join(blocks)


def _source_rows(source: SourceReport) -> Iterator[Row]:
    yield "format", f"{source.format} ({source.evidence})"
    for column, becomes in source.mapping.items():
        yield f"  {column}", f"-> {becomes}"
    yield "rows", f"{source.rows_read} read, {source.rows_used} used"
    yield from _counts("left out", source.dropped)
    for what, remark in source.remarks.items():
        yield what, f"{counted(remark.count, 'row')}, such as {', '.join(remark.places)}"
    yield from _counts("columns not read", source.ignored_columns)


def _rows_of(report: DataReport) -> Iterator[Row]:
    for name, count in report.counts.items():
        yield name.replace("_", " "), str(count)
    if report.lengths:
        yield "lengths", report.lengths.described()


def _labels(labels: Labels) -> str:
    rows = [
        ("trained tokens", f"{labels.trained_tokens_percent:.1f} %"),
        ("rows cut", f"{labels.rows_cut} at max_length={labels.max_length}"),
        ("rows with nothing to train", str(labels.rows_dropped)),
    ]
    parts = [_table(rows, "labels")]
    for number, sample in enumerate(labels.samples, start=1):
        lines = (f"  {printable(line)}" for line in sample.splitlines())
        parts.append("\n".join([f"sample {number}: what is trained stands in ⟦ ⟧", *lines]))
    return "\n\n".join(parts)


def _counts(name: str, counts: Mapping[str, int]) -> Iterator[Row]:
    if counts:
        yield name, ", ".join(f"{what}: {count}" for what, count in counts.items())


def _table(rows: Iterable[Row], title: str) -> str:
    table = empty_table("name", "value")
    table.show_header = False
    for name, value in rows:
        table.add_row(Text(f"  {printable(name)}"), Text(printable(value)))
    return f"{title}\n{plain_text(table)}"
