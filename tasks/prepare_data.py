"""The data stages, one for each kind of rows: they check a user's rows and split off the held-out ones."""

from dataclasses import dataclass
from typing import ClassVar

from lineage.artifact import Kind
from tasks.context import Metrics, TrainContext
from tasks.data.preparing.options import Prepare
from tasks.recipe import Inputs


class PrepareRows(Prepare):
    """What all of them do; the kind of rows is theirs."""

    measures: ClassVar[tuple[str, ...] | None] = (
        "rows", "train_rows", "held_out_rows", "new_rows", "replayed_rows", "repeated_rows", "duplicates", "dropped",
        "rows_with_role_marks", "near_duplicate_rows", "leaked_rows",
        "images", "held_out_rows_with_trained_images",
    )  # fmt: skip

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.data.preparing.prepare import prepare

        return prepare(self, inputs, ctx)


@dataclass(frozen=True, kw_only=True)
class PrepareText(PrepareRows):
    """Rows {text} for continued pretraining."""

    produces: ClassVar[Kind] = Kind.TEXT


@dataclass(frozen=True, kw_only=True)
class PrepareConversations(PrepareRows):
    """Rows {messages} for supervised fine-tuning."""

    produces: ClassVar[Kind] = Kind.CONVERSATIONS


@dataclass(frozen=True, kw_only=True)
class PreparePreferences(PrepareRows):
    """Rows {prompt, chosen, rejected} for a reward model and for preference optimization."""

    produces: ClassVar[Kind] = Kind.PREFERENCES


@dataclass(frozen=True, kw_only=True)
class PrepareUnpaired(PrepareRows):
    """Rows {prompt, completion, label}: answers that are wanted, and others that are not."""

    measures: ClassVar[tuple[str, ...]] = (*(PrepareRows.measures or ()), "desirable_rows", "undesirable_rows")
    produces: ClassVar[Kind] = Kind.UNPAIRED


@dataclass(frozen=True, kw_only=True)
class PreparePrompts(PrepareRows):
    """Rows {prompt, columns}: what a policy answers in training, and what its reward is computed from."""

    produces: ClassVar[Kind] = Kind.PROMPTS
