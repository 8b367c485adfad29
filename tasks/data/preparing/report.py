"""What a data stage did with a user's rows: nothing is lost without being counted, named and explained."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

REPORT = "report.json"


@dataclass(kw_only=True)
class Remark:
    """Something odd in rows that are used all the same.

    Args:
        places: of the first of them.
    """

    count: int = 0
    places: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class SourceReport:
    """What became of the rows of one source.

    Args:
        format, evidence, mapping: how its rows were read, and why.
        rows_read: lines or rows, good and bad; ``rows_used`` of them are in the output.
        dropped: reason -> rows that are not in the output: bad ones, those outside a slice or a sample, those that a
            mixture left out.
        ignored_columns: column -> rows that had it, of those that nothing reads.
    """

    path: str
    format: str
    evidence: str
    mapping: Mapping[str, str]
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
        edges, counts: the histogram: ``counts[i]`` rows are at least ``edges[i]`` and below ``edges[i + 1]`` long.
        suggested_max_length: the smallest multiple of 64 that holds 95 % of the rows; tokens alone.
    """

    unit: str
    tokenizer: str | None
    p50: int
    p95: int
    p99: int
    max: int
    edges: Sequence[int]
    counts: Sequence[int]
    suggested_max_length: int | None = None
    suggests_packing: bool | None = None


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
        kind: ``exact``, the same text; or ``n-gram``, at least ``shared`` of its word 13-grams.
    """

    kind: str
    train_row_id: str
    held_out_row_id: str
    shared: float
    train_set: str
    held_out_set: str


@dataclass(kw_only=True)
class DataReport:
    """Of one data stage.

    Args:
        counts: rows, train_rows, held_out_rows, duplicates (exact), near_duplicates ...: also the stage's metrics.
        near_duplicates, leakage: the first of them; the files beside the report hold all.
        rejects: the file that holds every bad row with its reason.
    """

    counts: dict[str, int]
    sources: dict[str, SourceReport]
    lengths: Lengths | None = None
    near_duplicates: list[Likeness] = field(default_factory=list)
    leakage: list[Overlap] = field(default_factory=list)
    rejects: str | None = None

    def write(self, directory: Path) -> None:
        (directory / REPORT).write_text(self.to_json() + "\n")

    def to_json(self) -> str:
        fields = asdict(self)
        return json.dumps({**fields.pop("counts"), **fields}, indent=2, ensure_ascii=False)
