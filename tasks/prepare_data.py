"""The data stages, one for each kind of rows: they check a user's rows and split off the held-out ones."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from lineage.artifact import Kind
from tasks.context import Metrics, TrainContext
from tasks.data.preparing.options import Prepare, slots
from tasks.method import Inputs


@dataclass(frozen=True, kw_only=True)
class PrepareText(Prepare):
    """Rows {text} for continued pretraining."""

    consumes: ClassVar[Mapping[str, Kind]] = slots(Kind.TEXT)
    produces: ClassVar[Kind] = Kind.TEXT

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.data.preparing.prepare import prepare

        return prepare(self, inputs, ctx)


@dataclass(frozen=True, kw_only=True)
class PrepareConversations(Prepare):
    """Rows {messages} for supervised fine-tuning."""

    consumes: ClassVar[Mapping[str, Kind]] = slots(Kind.CONVERSATIONS)
    produces: ClassVar[Kind] = Kind.CONVERSATIONS

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.data.preparing.prepare import prepare

        return prepare(self, inputs, ctx)


@dataclass(frozen=True, kw_only=True)
class PreparePreferences(Prepare):
    """Rows {prompt, chosen, rejected} for a reward model and for preference optimization."""

    consumes: ClassVar[Mapping[str, Kind]] = slots(Kind.PREFERENCES)
    produces: ClassVar[Kind] = Kind.PREFERENCES

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.data.preparing.prepare import prepare

        return prepare(self, inputs, ctx)


@dataclass(frozen=True, kw_only=True)
class PrepareUnpaired(Prepare):
    """Rows {prompt, completion, label}: answers that are wanted, and others that are not."""

    consumes: ClassVar[Mapping[str, Kind]] = slots(Kind.UNPAIRED)
    produces: ClassVar[Kind] = Kind.UNPAIRED

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.data.preparing.prepare import prepare

        return prepare(self, inputs, ctx)


@dataclass(frozen=True, kw_only=True)
class PreparePrompts(Prepare):
    """Rows {prompt, columns}: what a policy answers in training, and what its reward is computed from."""

    consumes: ClassVar[Mapping[str, Kind]] = slots(Kind.PROMPTS)
    produces: ClassVar[Kind] = Kind.PROMPTS

    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        from tasks.data.preparing.prepare import prepare

        return prepare(self, inputs, ctx)
