"""The outcome of a row's tokenization, its tokens, and those of consecutive rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(kw_only=True)
class RowOutcome:
    """What happened to a row.

    Args:
        length: its tokens before anything was cut; of a pair, those of the longer answer with the prompt.
        tokens, trained: tokens that a trainer reads, and those of them that get loss.
        cut, prompt_cut: it lost its end; it lost the beginning of its prompt.
        dropped: the reason why it is not trained on, such as ``nothing_to_train``; None: it is.
        label: of a single answer: whether it is desirable; None: rows of its kind have none.
        stops: the tokens that end the assistant's turns.
        num_examples: examples that it is trained as: several where its turns cannot be rendered in one text.
    """

    row_id: str
    length: int
    tokens: int = 0
    trained: int = 0
    cut: bool = False
    prompt_cut: bool = False
    dropped: str | None = None
    label: bool | None = None
    stops: set[int] = field(default_factory=set)
    num_examples: int = 1


@dataclass(frozen=True, kw_only=True)
class TokenRow:
    """A tokenized row.

    Args:
        columns: its tokens.
        rest: further columns of a file of tokens of its kind, such as a label.
        more: the tokens of further examples: of a conversation whose chat template renders earlier turns otherwise
            than the last one.
    """

    outcome: RowOutcome
    columns: dict[str, list[int]]
    rest: Mapping[str, object] = field(default_factory=dict)
    more: Sequence[dict[str, list[int]]] = ()


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """The examples of some consecutive rows, and the outcomes that are known so far."""

    outcomes: Sequence[RowOutcome]
    columns: "pa.RecordBatch"
