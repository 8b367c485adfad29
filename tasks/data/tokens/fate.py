"""What becomes of one row when it is made into tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Fate:
    """Of a row that came in.

    Args:
        length: its tokens before anything was cut; of a pair, those of the longer answer with the prompt.
        tokens, trained: tokens that a trainer reads, and those of them that get loss.
        cut, prompt_cut: it lost its end; it lost the beginning of its prompt.
        dropped: why it is not trained on, such as ``nothing_to_train``.
        label: of a single answer: whether it is desirable; None: rows of its kind have none.
        stops: the tokens that end the turns of its assistant.
        num_examples: examples that it is trained as: several where its turns cannot stand in one text.
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
    """A row as a trainer reads it, unless its fate is to be left out.

    Args:
        columns: its tokens.
        rest: what a file of tokens of its kind holds beside them, such as a label.
        more: the tokens of further examples: of a conversation whose chat template renders earlier turns otherwise
            than the last one.
    """

    fate: Fate
    columns: dict[str, list[int]]
    rest: Mapping[str, object] = field(default_factory=dict)
    more: Sequence[dict[str, list[int]]] = ()
