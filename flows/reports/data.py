"""What ``posttrain data`` prints of rows: how they are read, what is left out, and what of them would be trained on."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rich.text import Text

from flows.reports.tables import empty_table, plain_text
from flows.wording import counted, printable
from tasks.data.preparing.report import LEAKAGE, NEAR_DUPLICATES, REJECTS, DataReport, Labels, SourceReport

Row = tuple[str, str]


def data_text(report: DataReport, bad_rows: Sequence[str], num_bad_rows: int, kept: Path | None) -> str:
    """The report for people.

    Args:
        bad_rows: the first of them, ``place: problem``.
        kept: the folder that holds all of what is found; None: it was not kept.
    """
    named = len(report.sources) > 1
    near = [f"{pair.row_id} is like {pair.other_row_id}: {pair.similarity:.2f}" for pair in report.near_duplicates]
    overlaps = [
        f"{each.held_out_row_id} of {each.held_out_set}: {each.kind} {each.shared:.2f}, {each.train_row_id} of "
        f"{each.train_set}"
        for each in report.leakage
    ]
    blocks = [
        *(
            _table(_source_rows(source), printable(f"{slot}: {source.path}" if named else source.path))
            for slot, source in report.sources.items()
        ),
        _table(_rows_of(report), "all rows"),
        _listed("bad rows", bad_rows, num_bad_rows, kept and kept / REJECTS),
        _listed("near-duplicates", near, report.counts.get("near_duplicate_rows", 0), kept and kept / NEAR_DUPLICATES),
        _listed("leakage", overlaps, report.counts.get("leaked_rows", 0), kept and kept / LEAKAGE),
        _labels(report.labels) if report.labels else "",
    ]
    return "\n\n".join(filter(None, blocks))


def _listed(title: str, lines: Sequence[str], count: int, file: Path | None) -> str:
    """The first of so many lines, and the file that has them all; nothing where there are none."""
    if not lines:
        return ""
    more = f"and {count - len(lines)} more; {f'{file} has' if file else '--out DIR keeps'} all of them"
    shown = [*map(printable, lines), *([more] if count > len(lines) else [])]
    return "\n".join([title, *(f"  {line}" for line in shown)])


def _source_rows(source: SourceReport) -> Iterator[Row]:
    yield "format", f"{source.format} ({source.evidence})"
    for column, becomes in source.mapping.items():
        yield f"  {column}", f"-> {becomes}"
    if source.split_by:
        yield "split by", f"{source.split_by} (split_by=line|paragraph|document sets it)"
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
    parts = [_table(labels.described(), "labels")]
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
