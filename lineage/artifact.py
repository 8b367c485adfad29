"""What flows between stages: kinds of artifact, and the sources that a pipeline starts from."""

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

SOURCE = "source:"  # before the name of a source, where a stage could be meant
ALIAS = "alias:"  # before the name of an alias of the model registry


class Kind(StrEnum):
    """What an artifact is; a slot accepts exactly one kind."""

    ROWS = "rows"  # raw rows as a user has them, not yet checked
    TEXT = "text"  # checked rows {row_id, text}
    CONVERSATIONS = "conversations"  # checked rows {row_id, messages}
    PREFERENCES = "preferences"  # checked rows {row_id, prompt, chosen, rejected}
    CHECKPOINT = "checkpoint"  # a causal language model with its tokenizer
    REWARD_MODEL = "reward_model"  # a sequence classifier with one label, with its tokenizer
    REPORT = "report"  # measurements
    VERDICT = "verdict"  # what a gate said of a checkpoint


MODELS = (Kind.CHECKPOINT, Kind.REWARD_MODEL)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A root of the graph: rows or a model that no stage of ours made.

    Args:
        path: a file, a directory, a hub id (``owner/name``), ``quickstart:NAME``; or ``alias:NAME``, the model that an
            alias names, and ``alias:NAME/STAGE``, what that stage gave to the making of that model.
        kind: ``rows`` or ``checkpoint``; of ``alias:NAME/STAGE`` whatever the stage produces.
        revision: of a hub id: branch, tag or commit; resolved to a commit when the plan is made.
        split: of a hub data set.
        labels: licence and consent, such as ``cc-by-nc-4.0`` or ``consent:2026-03``: every artifact that the source
            goes into carries them. Not identity.
        fallback: of an alias: a stage, or ``source:NAME``, that fills its slots while the alias names no such thing;
            None: optional slots stay empty.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    path: str
    kind: Kind = Kind.ROWS
    revision: str | None = None
    split: str = "train"
    labels: tuple[str, ...] = ()
    fallback: str | None = None
