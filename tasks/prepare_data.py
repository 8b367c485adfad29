"""Checks a user's rows and splits off the held-out ones: what training stages read."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt, Lt

from lineage.artifact import Kind, Source
from lineage.errors import DataError
from tasks.context import Metrics, TrainContext
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.row_checks import Fields, check_conversation, check_group, check_preference, check_text
from tasks.data.preparing.replay import OldRows
from tasks.data.preparing.row_split import HELD_OUT, TRAIN, RowSplit, canonical
from tasks.data.reading.read import read_rows
from tasks.method import Inputs, Method

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_SHOWN = 20  # bad rows in one message


@dataclass(frozen=True, kw_only=True)
class PrepareText(Method):
    """Rows {text} for continued pretraining."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.ROWS, "replay": Kind.TEXT}
    optional: ClassVar[frozenset[str]] = frozenset({"replay"})
    produces: ClassVar[Kind] = Kind.TEXT

    held_out: Annotated[float, Gt(0), Lt(1)] = 0.05  # share of the groups, or of the rows where they name none
    seed: Annotated[int, Ge(0)] = 0  # of the split
    replay_share: Annotated[float, Gt(0), Lt(1)] | None = None  # of the training rows, drawn from the old ones

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        import pyarrow as pa

        return _prepare(self, inputs, ctx, check_text, [("text", pa.string())])


@dataclass(frozen=True, kw_only=True)
class PrepareConversations(Method):
    """Rows {messages} for supervised fine-tuning."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.ROWS, "replay": Kind.CONVERSATIONS}
    optional: ClassVar[frozenset[str]] = frozenset({"replay"})
    produces: ClassVar[Kind] = Kind.CONVERSATIONS

    held_out: Annotated[float, Gt(0), Lt(1)] = 0.05  # share of the groups, or of the rows where they name none
    seed: Annotated[int, Ge(0)] = 0  # of the split
    replay_share: Annotated[float, Gt(0), Lt(1)] | None = None  # of the training rows, drawn from the old ones

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        return _prepare(self, inputs, ctx, check_conversation, [("messages", _messages())])


@dataclass(frozen=True, kw_only=True)
class PreparePreferences(Method):
    """Rows {prompt, chosen, rejected} for a reward model and for preference optimization."""

    consumes: ClassVar[Mapping[str, Kind]] = {"rows": Kind.ROWS, "replay": Kind.PREFERENCES}
    optional: ClassVar[frozenset[str]] = frozenset({"replay"})
    produces: ClassVar[Kind] = Kind.PREFERENCES

    held_out: Annotated[float, Gt(0), Lt(1)] = 0.05  # share of the groups, or of the prompts where they name none
    seed: Annotated[int, Ge(0)] = 0  # of the split
    replay_share: Annotated[float, Gt(0), Lt(1)] | None = None  # of the training rows, drawn from the old ones

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        import pyarrow as pa

        columns = [*((name, _messages()) for name in ("prompt", "chosen", "rejected")), ("kind", pa.string())]
        # All pairs of one prompt are held out together: an answer seen in training measures nothing.
        return _prepare(self, inputs, ctx, check_preference, columns, key_column="prompt")


def _messages() -> "pa.DataType":
    import pyarrow as pa

    return pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


def _prepare(
    method: PrepareText | PrepareConversations | PreparePreferences,
    inputs: Inputs,
    ctx: TrainContext,
    check: Callable[[Fields], dict[str, object]],
    columns: "Sequence[tuple[str, pa.DataType]]",
    key_column: str | None = None,
) -> Metrics:
    """Checks, names, splits and writes every row, replays old ones, and reports what became of them."""
    import pyarrow as pa

    rows, share = inputs["rows"], method.replay_share
    old = OldRows.read(inputs["replay"]) if "replay" in inputs else None
    split = RowSplit(
        directory=ctx.output_dir, schema=pa.schema([("row_id", pa.string()), *columns]), held_out=method.held_out,
        seed=method.seed, old=old.sides if old else {},
    )  # fmt: skip
    ignored: Counter[str] = Counter()
    for fields, row in _checked(rows.source or Source(path=str(rows.path)), check):
        read = {*split.schema.names, "group"}
        ignored.update(name for name in fields if name not in read)
        group = check_group(fields)
        split.add(row, canonical(row[key_column] if key_column else row) if group is None else group)
    new = split.counts[TRAIN] + split.counts[HELD_OUT]
    replayed = old.replay(split, share, method.seed) if old and share else 0
    split.close()
    counts = {
        "rows": new + split.known,
        **({"new_rows": new, "replayed_rows": replayed} if share else {}),
        "train_rows": split.counts[TRAIN],
        "held_out_rows": split.counts[HELD_OUT],
        "duplicates": split.duplicates,
    }
    _require_both(split, counts)
    report = {**counts, "ignored_columns": dict(sorted(ignored.items()))}
    (split.directory / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    return {name: float(count) for name, count in counts.items()}


def _checked(
    source: Source, check: Callable[[Fields], dict[str, object]]
) -> Iterator[tuple[Fields, dict[str, object]]]:
    """Each row as given and as checked.

    Raises:
        DataError: at the end, naming every bad row (at most 20) by file and line.
    """
    bad: list[str] = []
    good = 0
    for row in read_rows(source):
        try:
            checked = check(row.fields)
            check_group(row.fields)
        except BadRowError as error:
            bad.append(f"{row.where}: {error}")
        else:
            good += 1
            yield row.fields, checked
    if bad:
        more = [f"and {len(bad) - _MAX_SHOWN} more"] if len(bad) > _MAX_SHOWN else []
        shown = "\n  ".join(bad[:_MAX_SHOWN] + more)
        raise DataError(f"{len(bad)} of {len(bad) + good} rows cannot be used:\n  {shown}")


def _require_both(split: RowSplit, counts: Mapping[str, int]) -> None:
    if not counts["held_out_rows"]:
        raise DataError(
            f"held_out={split.held_out} of {counts['rows']} rows leaves none to measure on; "
            f"give more rows or groups, or a held_out above {split.lowest:.3f}"
        )
    if not counts["train_rows"]:
        raise DataError(
            f"held_out={split.held_out} of {counts['rows']} rows leaves none to train on; "
            "give more rows or groups, or a smaller held_out"
        )
