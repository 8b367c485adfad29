"""What a data stage did with a user's rows: nothing is lost without being counted, named and explained.

As JSON, and as one HTML page that loads nothing; all that comes from the rows is escaped in it.
"""

import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from lineage.html import html_page

REPORT, REJECTS = "report.json", "rejects.jsonl"
LEAKAGE, NEAR_DUPLICATES = "leakage.parquet", "near_duplicates.parquet"
MAX_PLACES = 5  # of rows that a remark names
NUM_LISTED = 20  # of near-duplicates and overlaps in a report; files beside it hold all


@dataclass(kw_only=True)
class Remark:
    """Something odd in rows that are used all the same.

    Args:
        places: of the first of them.
    """

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, count: int, places: Sequence[str]) -> None:
        self.count += count
        self.places += places[: MAX_PLACES - len(self.places)]


@dataclass(kw_only=True)
class SourceReport:
    """What became of the rows of one source.

    Args:
        format, evidence, mapping: how its rows were read, and why.
        split_by: what of plain text is a row; None: it is none.
        rows_read: lines or rows, good and bad; ``rows_used`` of them are in the output.
        dropped: reason -> rows that are not in the output: bad ones, those outside a slice or a sample, those that a
            mixture left out.
        ignored_columns: column -> rows that had it, of those that nothing reads.
    """

    path: str
    format: str
    evidence: str
    mapping: Mapping[str, str]
    split_by: str | None = None
    rows_read: int = 0
    rows_used: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    remarks: dict[str, Remark] = field(default_factory=dict)
    ignored_columns: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of rows.

    Args:
        unit: ``tokens``, counted by ``tokenizer``; or ``bytes`` of UTF-8 where none was given.
        rows: how many of both sides were measured: all of them, or a sample.
        edges, counts: the histogram: ``counts[i]`` rows are at least ``edges[i]`` and below ``edges[i + 1]`` long.
        suggested_max_length: the smallest multiple of 64 that holds 95 % of the rows; tokens alone.
        suggests_packing: whether the mean row fills less than half of that.
    """

    unit: str
    tokenizer: str | None
    rows: int
    p50: int
    p95: int
    p99: int
    max: int
    edges: Sequence[int]
    counts: Sequence[int]
    suggested_max_length: int | None = None
    suggests_packing: bool | None = None

    def described(self) -> str:
        """The numbers in words, with what they suggest."""
        words = f"of {self.rows} rows half have at most {self.p50} {self.unit}, 95 % {self.p95}, 99 % {self.p99}, "
        words += f"all {self.max}"
        if self.suggested_max_length is None:
            return words
        packing = "; packing would fill them, since the mean row fills less than half" if self.suggests_packing else ""
        return f"{words}; max_length={self.suggested_max_length} holds 95 %{packing}"


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Two rows that say nearly the same: ``similarity`` is the estimated Jaccard index of their word 5-grams."""

    row_id: str
    other_row_id: str
    similarity: float


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A held-out row that training rows repeat.

    Args:
        kind: ``exact``, the same words; ``n-gram``, ``shared`` of its word 13-grams, which is half of them or more; or
            ``prompt``, the same question with another answer.
    """

    kind: str
    train_row_id: str
    held_out_row_id: str
    shared: float
    train_set: str
    held_out_set: str


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What of the training rows is learnt from.

    Args:
        max_length: in tokens; a longer row is cut, and dropped where nothing is left to train.
        trained_tokens_percent: None: nothing is trained before it is generated, as of prompts.
        num_tokens: that a trainer reads.
        rows_cut, prompts_cut: rows that lose their end, and the beginning of their prompt.
        labels: of single answers: desirable and undesirable -> rows.
        samples: the first rows as they are trained, the trained part in ⟦ ⟧.
    """

    max_length: int
    trained_tokens_percent: float | None
    rows_cut: int
    rows_dropped: int
    samples: Sequence[str]
    num_tokens: int = 0
    prompts_cut: int = 0
    labels: Mapping[str, int] = field(default_factory=dict)

    def described(self) -> list[tuple[str, str]]:
        """The numbers, each with its name."""
        percent, cut = self.trained_tokens_percent, f"at max_length={self.max_length}"
        trained = f"{percent:.1f} %" if percent is not None else f"none of {self.num_tokens}: answers are generated"
        found = [("trained tokens", trained)]
        if percent is not None:
            found.append(("rows cut", f"{self.rows_cut} {cut}"))
        if percent is None or self.prompts_cut:
            found.append(("prompts cut", f"{self.prompts_cut} {cut}"))
        found += [(f"{name} answers", str(count)) for name, count in sorted(self.labels.items())]
        return [*found, ("rows with nothing to train", str(self.rows_dropped))]


@dataclass(kw_only=True)
class DataReport:
    """Of one data stage.

    Args:
        counts: rows, train_rows, held_out_rows, duplicates (exact), near_duplicates ...: also the stage's metrics.
        near_duplicates, leakage: the first of them; the files beside the report hold all.
        rejects: the file that holds every bad row with its reason.
        labels: where a model was named, and so its tokens.
    """

    counts: dict[str, int]
    sources: dict[str, SourceReport]
    lengths: Lengths | None = None
    near_duplicates: list[Likeness] = field(default_factory=list)
    leakage: list[Overlap] = field(default_factory=list)
    rejects: str | None = None
    labels: Labels | None = None

    def write(self, directory: Path) -> None:
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        # Half a surrogate pair, of a file name that is not UTF-8, then stands there as JSON writes it.
        (directory / REPORT).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")

    def to_dict(self) -> dict[str, object]:
        """The counts beside the rest; how a text is split, where there is one."""
        fields = asdict(self)
        for source in fields["sources"].values():
            if source["split_by"] is None:
                del source["split_by"]
        return {**fields.pop("counts"), **fields}

    @staticmethod
    def read(directory: Path) -> "DataReport":
        """The report that a data stage wrote there."""
        told = json.loads((directory / REPORT).read_text(encoding="utf-8"))
        sources = told.pop("sources")
        for source in sources.values():
            source["remarks"] = {what: Remark(**remark) for what, remark in source["remarks"].items()}
        return DataReport(
            sources={slot: SourceReport(**source) for slot, source in sources.items()},
            near_duplicates=[Likeness(**pair) for pair in told.pop("near_duplicates")],
            leakage=[Overlap(**overlap) for overlap in told.pop("leakage")],
            lengths=Lengths(**lengths) if (lengths := told.pop("lengths")) else None,
            labels=Labels(**labels) if (labels := told.pop("labels")) else None,
            rejects=told.pop("rejects"),
            counts=told,
        )


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
    counts = "".join(f"<div><b>{count}</b>{_text(_words(name))}</div>" for name, count in report.counts.items())
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return html_page(
        title="data report", style=f"\n{style}", policy="default-src 'none'; style-src 'unsafe-inline'",
        body=f'<h1>data report</h1>\n<div id="counts">{counts}</div>\n{"".join(_sections(report, is_kept))}',
    )  # fmt: skip


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
