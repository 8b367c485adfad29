"""The report of a data stage as one HTML page that loads nothing; all that comes from the rows is escaped."""

import html
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template

from tasks.data.preparing.leakage import LEAKAGE
from tasks.data.preparing.near_duplicates import NEAR_DUPLICATES
from tasks.data.preparing.report import DataReport, Labels, Lengths, SourceReport

PAGE = "report.html"
_WIDTH, _HEIGHT, _BOTTOM = 900, 220, 24  # of the histogram; its bottom holds the lengths
_NUM_LABELS = 10

Cell = str | int | float


def write_reports(report: DataReport, directory: Path) -> None:
    """``report.json`` and ``report.html``."""
    report.write(directory)
    (directory / PAGE).write_text(render(report), encoding="ascii")


def render(report: DataReport, *, is_kept: bool = True) -> str:
    """The page, in pure ASCII.

    Args:
        is_kept: whether the files that hold all of what is listed lie beside it.
    """
    page = Template(Path(__file__).with_name(PAGE).read_text(encoding="utf-8")).substitute(
        counts="".join(f"<div><b>{count}</b>{_text(_words(name))}</div>" for name, count in report.counts.items()),
        sections="".join(_sections(report, is_kept)),
    )
    # Character references for the rest: a lone surrogate, from a file name that is not UTF-8, can then be written.
    return page.encode("ascii", "xmlcharrefreplace").decode()


def _sections(report: DataReport, is_kept: bool) -> Iterator[str]:
    if report.rejects:
        yield _section(
            "bad rows", f"<p>All of them, with what is wrong, are in <code>{_text(report.rejects)}</code>.</p>"
        )
    for slot, source in report.sources.items():
        yield _source(slot, source)
    if report.lengths:
        yield _lengths(report.lengths)
    if report.labels:
        yield _labels(report.labels)
    if report.near_duplicates:
        yield _near_duplicates(report, is_kept)
    if report.leakage:
        yield _leakage(report, is_kept)


def _source(slot: str, source: SourceReport) -> str:
    body = f"<p>Read as <b>{_text(source.format)}</b>: {_text(source.evidence)}.</p>"
    if source.split_by:
        body += f"<p>Each {_text(source.split_by)} is a row.</p>"
    body += f"<p>{source.rows_used} of {source.rows_read} rows are used.</p>"
    body += _counted("column", "becomes", source.mapping)
    body += _counted("not used because", "rows", source.dropped)
    remarks = [(what, remark.count, ", ".join(remark.places)) for what, remark in source.remarks.items()]
    body += _table(("used all the same", "rows", "such as"), remarks)
    body += _counted("column that nothing reads", "rows", source.ignored_columns)
    return _section(f"{slot}: {source.path}", body)


def _near_duplicates(report: DataReport, is_kept: bool) -> str:
    rows = [(pair.row_id, pair.other_row_id, pair.similarity) for pair in report.near_duplicates]
    note = "<p class=muted>Rows that say nearly the same as an earlier one. All of them are used.</p>"
    note += _more(len(rows), report.counts.get("near_duplicate_rows", 0), NEAR_DUPLICATES, is_kept)
    return _section("near-duplicates", note + _table(("row", "is like", "similarity"), rows))


def _leakage(report: DataReport, is_kept: bool) -> str:
    rows = [
        (each.held_out_row_id, each.held_out_set, each.kind, each.shared, each.train_row_id, each.train_set)
        for each in report.leakage
    ]
    names = ("held-out row", "of", "shares", "part", "with training row", "of")
    note = "<p class=muted>What is measured on these rows is memory. All of them are used.</p>"
    note += _more(len(rows), report.counts.get("leaked_rows", 0), LEAKAGE, is_kept)
    return _section("leakage", note + _table(names, rows))


def _more(num_listed: int, count: int, file: str, is_kept: bool) -> str:
    """Where the rows are that are not listed; nothing where all are."""
    place = f"<code>{file}</code> has" if is_kept else "<code>posttrain data --out DIR</code> keeps"
    return f"<p>The first {num_listed} of {count}; {place} all of them.</p>" if count > num_listed else ""


def _labels(labels: Labels) -> str:
    body = _table(("", ""), labels.described())
    body += "".join(f"<pre>{_text(sample)}</pre>" for sample in labels.samples)
    return _section("labels: what stands in \u27e6 \u27e7 is trained", body)


def _lengths(lengths: Lengths) -> str:
    unit = f"tokens of {lengths.tokenizer}" if lengths.tokenizer else lengths.unit
    body = f"<p>{_text(lengths.described())}</p>{_histogram(lengths)}"
    return _section(f"lengths in {unit}", body)


def _histogram(lengths: Lengths) -> str:
    wide, high = _WIDTH / len(lengths.counts), _HEIGHT - _BOTTOM
    bar = max(wide - 2, 1)
    parts = [f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="histogram of lengths">']
    for place, count in enumerate(lengths.counts):
        tall = high * count / max(lengths.counts)
        first, last = lengths.edges[place], lengths.edges[place + 1] - 1
        parts.append(
            f'<rect x="{place * wide + 1:.1f}" y="{high - tall:.1f}" width="{bar:.1f}" height="{tall:.1f}">'
            f"<title>{first} to {last}: {count} rows</title></rect>"
        )
    parts.append(f'<line x1="0" y1="{high}" x2="{_WIDTH}" y2="{high}"/>')
    step = max(1, -(-len(lengths.counts) // _NUM_LABELS))
    for place in range(0, len(lengths.counts), step):
        parts.append(f'<text x="{place * wide:.1f}" y="{_HEIGHT - 6}">{lengths.edges[place]}</text>')
    return "".join([*parts, "</svg>"])


def _section(title: str, body: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{body}</section>\n"


def _counted(name: str, value: str, rows: Mapping[str, Cell]) -> str:
    return _table((name, value), rows.items())


def _table(names: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table; nothing where there are no rows."""
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    head = "".join(f"<th>{_text(name)}</th>" for name in names)
    return f"<table><tr>{head}</tr>{body}</table>" if body else ""


def _cell(value: Cell) -> str:
    return f"<td>{_text(value)}</td>" if isinstance(value, str) else f'<td class="number">{value}</td>'


def _words(name: str) -> str:
    return name.replace("_", " ")


def _text(value: str) -> str:
    return html.escape(value)
