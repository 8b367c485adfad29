"""What becomes of one row when it is made into tokens."""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Fate:
    """Of a row that came in.

    Args:
        length: its tokens before anything was cut; of a pair, those of the longer answer with the prompt.
        tokens, trained: tokens that a trainer reads, and those of them that get loss.
        cut, prompt_cut: it lost its end; it lost the beginning of its prompt.
        dropped: why it is not trained on, such as ``nothing_to_train``.
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
    stops: set[int] = field(default_factory=set)
    num_examples: int = 1
