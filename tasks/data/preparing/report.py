"""The report of a data stage: every dropped row is counted and explained.

Written as JSON and as a self-contained HTML page, in which content of rows is escaped.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.markup import html_page
from lineage.store import DATA_REPORT, OUTSIDE

if TYPE_CHECKING:
    from jinja2 import Template

REPORT, REJECTS = DATA_REPORT, "rejects.jsonl"
LEAKAGE, NEAR_DUPLICATES = "leakage.parquet", "near_duplicates.parquet"
UNSAMPLED, UNMIXED = "not in the sample", "left out by the mixture"  # reasons why rows are not used
_ASKED_FOR = frozenset({OUTSIDE, UNSAMPLED, UNMIXED})  # by settings of the source or the stage
MAX_PLACES = 5  # rows that a remark names
_MAX_COLUMNS = 10  # unread columns in one line
NUM_LISTED = 20  # near-duplicates and overlaps in a report; separate files list all


@dataclass(kw_only=True)
class Remark:
    """A warning on rows that are used all the same.

    Args:
        places: of the first rows.
    """

    count: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, count: int, places: Sequence[str]) -> None:
        self.count += count
        self.places += places[: MAX_PLACES - len(self.places)]


@dataclass(kw_only=True)
class SourceReport:
    """The report on one source.

    Args:
        format, evidence, mapping: how its rows were read, and why.
        split_by: unit of a row in plain text; None: not plain text.
        rows_read: number of rows, good and bad; ``rows_used`` of them are in the output.
        dropped: reason -> number of rows: bad ones, those outside a slice or sample, those left out by a mixture.
        ignored_columns: column that is not read -> number of rows with it.
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

    def add(self, count: int, split_by: str | None, ignored: Mapping[str, int], remarks: Mapping[str, Remark]) -> None:
        """Counts some rows, their unread columns and their remarks."""
        self.rows_read += count
        if split_by:
            self.split_by = " or ".join(sorted({split_by, *(self.split_by or split_by).split(" or ")}))
        self.ignored_columns = dict(sorted((Counter(self.ignored_columns) + Counter(ignored)).items()))
        for text, remark in remarks.items():
            self.remarks.setdefault(text, Remark()).add(remark.count, remark.places)

    @property
    def num_dropped(self) -> int:
        """Number of rows that are not used."""
        return sum(self.dropped.values())

    @property
    def unread(self) -> str:
        """The columns that are not read, with their rows: ``id (30 rows), source (12 rows)``; empty: all are read."""
        listed = [f"{name} ({count:,} row{'s' * (count != 1)})" for name, count in self.ignored_columns.items()]
        more = f" and {len(listed) - _MAX_COLUMNS} more" if len(listed) > _MAX_COLUMNS else ""
        return ", ".join(listed[:_MAX_COLUMNS]) + more

    @property
    def left_out(self) -> str:
        """The rows that are not used although no setting excludes them, by reason; empty: there are none."""
        found = {reason: count for reason, count in self.dropped.items() if reason not in _ASKED_FOR}
        listed = ", ".join(f"{reason} {count:,}" for reason, count in found.items())
        return f"{sum(found.values()):,} of {self.rows_read:,} rows: {listed}" if found else ""

    def drop(self, counts: Mapping[str, int]) -> None:
        """Counts rows that are not used, by reason."""
        self.dropped = dict(sorted((Counter(self.dropped) + Counter(counts)).items()))


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Lengths of rows.

    Args:
        unit: ``tokens`` of ``tokenizer``, or ``bytes`` of UTF-8.
        rows: number of measured rows of both splits: all, or a sample.
        edges, counts: the histogram: ``counts[i]`` rows have lengths in [``edges[i]``, ``edges[i + 1]``).
        suggested_max_length: smallest multiple of 64 that holds 95 % of the rows; only for tokens.
        suggests_packing: whether the mean row fills less than half of it.
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
        """The statistics and suggestions as text."""
        text = f"of {self.rows} rows, {self.unit} at most:  50 %: {self.p50}  95 %: {self.p95}  99 %: {self.p99}  "
        text += f"100 %: {self.max}"
        if self.suggested_max_length is None:
            return text
        packing = "; packing would fill them, since the mean row fills less than half" if self.suggests_packing else ""
        return f"{text}; max_length={self.suggested_max_length} holds 95 %{packing}"


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Two similar rows; ``similarity`` is the estimated Jaccard index of their word 5-grams."""

    row_id: str
    other_row_id: str
    similarity: float


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A held-out row that training rows repeat.

    Args:
        kind: ``exact``: the same words; ``n-gram``: the share ``shared`` of its word 13-grams, at least half;
            ``prompt``: the same prompt with another answer.
    """

    kind: str
    train_row_id: str
    held_out_row_id: str
    shared: float
    train_set: str
    held_out_set: str


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Statistics of the trained tokens.

    Args:
        max_length: in tokens; longer rows are cut, or dropped if nothing is left to train.
        trained_tokens_percent: None: prompts, whose answers are generated.
        num_tokens: tokens that a trainer reads.
        rows_cut, prompts_cut: rows that lose their end, or the beginning of their prompt.
        labels: for single answers: desirable and undesirable -> number of rows.
        samples: the first rows, with the trained part in ⟦ ⟧.
        boundaries: rows with an answer over whose start tokens would merge.
        control: rows whose texts spell control tokens; ``spelled`` are these, ``control_done`` what was done with them.
        unknown: rows of which some text has no token.
    """

    max_length: int
    trained_tokens_percent: float | None
    rows_cut: int
    rows_dropped: int
    samples: Sequence[str]
    num_tokens: int = 0
    prompts_cut: int = 0
    labels: Mapping[str, int] = field(default_factory=dict)
    boundaries: int = 0
    control: int = 0
    spelled: Sequence[str] = field(default_factory=list)
    control_done: str = ""
    unknown: int = 0

    def described(self) -> list[tuple[str, str]]:
        """Names and values of the statistics."""
        percent, cut = self.trained_tokens_percent, f"at max_length={self.max_length}"
        trained = f"{percent:.1f} %" if percent is not None else f"none of {self.num_tokens}: answers are generated"
        found = [("trained tokens", trained)]
        if percent is not None:
            found.append(("rows cut", f"{self.rows_cut} {cut}"))
        if percent is None or self.prompts_cut:
            found.append(("prompts cut", f"{self.prompts_cut} {cut}"))
        found += [(f"{name} answers", str(count)) for name, count in sorted(self.labels.items())]
        if self.boundaries:
            found.append(("tokens kept apart", f"in {self.boundaries} rows, where an answer begins"))
        if self.control:
            found.append(
                ("control tokens", f"{self.control} rows spell {', '.join(self.spelled)}: {self.control_done}")
            )
        if self.unknown:
            found.append(("unknown tokens", f"in {self.unknown} rows: the tokenizer has none for a part of their text"))
        return [*found, ("rows with nothing to train", str(self.rows_dropped))]


@dataclass(kw_only=True)
class DataReport:
    """The report of a data stage.

    Args:
        counts: rows, train_rows, held_out_rows, duplicates (exact), near_duplicates ...: also the stage's metrics.
        near_duplicates, leakage: the first findings; separate files list all.
        rejects: the file with every bad row and its reason.
        labels: None: no model was given.
    """

    counts: dict[str, int]
    sources: dict[str, SourceReport]
    lengths: Lengths | None = None
    near_duplicates: list[Likeness] = field(default_factory=list)
    leakage: list[Overlap] = field(default_factory=list)
    rejects: str | None = None
    labels: Labels | None = None

    @property
    def num_dropped(self) -> int:
        """Number of rows of all sources that are not used."""
        return sum(source.num_dropped for source in self.sources.values())

    def write(self, directory: Path) -> None:
        text = json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        # Lone surrogates, from file names that are not UTF-8, are escaped.
        (directory / REPORT).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")

    def to_dict(self) -> dict[str, object]:
        """The report as JSON object, with counts at the top level."""
        fields = asdict(self)
        for source in fields["sources"].values():
            if source["split_by"] is None:
                del source["split_by"]
        return {**fields.pop("counts"), **fields}

    @staticmethod
    def read(directory: Path) -> "DataReport":
        """Reads the report of a data stage."""
        document = json.loads((directory / REPORT).read_text(encoding="utf-8"))
        sources = document.pop("sources")
        for source in sources.values():
            source["remarks"] = {what: Remark(**remark) for what, remark in source["remarks"].items()}
        return DataReport(
            sources={slot: SourceReport(**source) for slot, source in sources.items()},
            near_duplicates=[Likeness(**pair) for pair in document.pop("near_duplicates")],
            leakage=[Overlap(**overlap) for overlap in document.pop("leakage")],
            lengths=Lengths(**lengths) if (lengths := document.pop("lengths")) else None,
            labels=Labels(**labels) if (labels := document.pop("labels")) else None,
            rejects=document.pop("rejects"),
            counts=document,
        )


PAGE = "report.html"

Section = tuple[str, Sequence[str | tuple[str, str]]]
"""A title, and lines or name-value pairs."""


_ALIKE = 3  # lines that differ by numbers alone


def few_alike(lines: Iterable[str], seen: Counter[str] | None = None) -> list[str]:
    """The first lines of each kind: lines that differ by numbers alone are of one.

    Args:
        seen: how many there were before, which is updated.
    """
    seen = Counter() if seen is None else seen
    found = []
    for line in lines:
        seen[kind := re.sub(r"\d+", "", line)] += 1
        found += [line] if seen[kind] <= _ALIKE else []
    return found


def sections(
    report: DataReport, kept: Path | None, bad_rows: Sequence[str] = (), num_bad_rows: int = 0
) -> Iterator[Section]:
    """The sections of a report, for the terminal and the page.

    Args:
        kept: folder of the files with all findings; None: they were not kept.
        bad_rows: the first bad rows, ``place: problem``.
    """
    for slot, source in report.sources.items():
        yield f"{slot}: {source.path}" if len(report.sources) > 1 else source.path, list(_source(source))
    lengths = [("lengths", report.lengths.described())] if report.lengths else []
    yield "all rows", [*((name.replace("_", " "), str(count)) for name, count in report.counts.items()), *lengths]
    near = [f"{pair.row_id} is like {pair.other_row_id}: {pair.similarity:.2f}" for pair in report.near_duplicates]
    overlaps = [
        f"{each.held_out_row_id} of {each.held_out_set}: {each.kind} {each.shared:.2f}, {each.train_row_id} of "
        f"{each.train_set}"
        for each in report.leakage
    ]
    for title, lines, count, file in (
        ("bad rows", bad_rows, num_bad_rows, report.rejects),
        ("near-duplicates", near, report.counts.get("near_duplicate_rows", 0), NEAR_DUPLICATES),
        ("leakage", overlaps, report.counts.get("leaked_rows", 0), LEAKAGE),
    ):
        where = "--out DIR keeps" if kept is None else f"{kept / str(file)} has"
        if lines:
            yield (
                title,
                [*lines, *([f"and {count - len(lines)} more; {where} all of them"] if count > len(lines) else [])],
            )
        elif title == "bad rows" and file:
            yield title, [f"{where} all of them"]
    if report.labels:
        yield "labels", report.labels.described()
        for number, sample in enumerate(report.labels.samples, start=1):
            yield f"sample {number}: what is trained stands in ⟦ ⟧", sample.splitlines()


def _source(source: SourceReport) -> Iterator[tuple[str, str]]:
    def counts(numbers: Mapping[str, int]) -> str:
        return ", ".join(f"{what}: {count}" for what, count in numbers.items())

    yield "format", f"{source.format} ({source.evidence})"
    for column, becomes in source.mapping.items():
        yield f"  {column}", becomes
    if source.split_by:
        yield "split by", f"{source.split_by} (split_by=line|paragraph|document sets it)"
    yield "rows", f"{source.rows_read} read, {source.rows_used} used"
    if source.dropped:
        yield "left out", counts(source.dropped)
    for what, remark in source.remarks.items():
        such = f" row{'s' * (remark.count != 1)}, such as {', '.join(remark.places)}" if remark.places else ""
        yield what, f"{remark.count}{such}"
    if source.ignored_columns:
        yield "columns not read", counts(source.ignored_columns)


def write_reports(report: DataReport, directory: Path) -> None:
    """Writes ``report.json`` and ``report.html``."""
    report.write(directory)
    (directory / PAGE).write_text(render(report, sections(report, Path())), encoding="ascii")


def render(report: DataReport, shown: Iterable[Section]) -> str:
    """The page, in pure ASCII; what rows bring is escaped."""
    style = Path(__file__).with_suffix(".css").read_text(encoding="utf-8")
    return html_page(
        title="data report", style=f"\n{style}", policy="default-src 'none'; style-src 'unsafe-inline'",
        body=_body().render(sections=shown, lengths=report.lengths),
    )  # fmt: skip


@cache
def _body() -> "Template":
    from jinja2 import Environment

    page = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(page)
