"""What becomes of one row when it is made into tokens."""

from dataclasses import dataclass


@dataclass(kw_only=True)
class Fate:
    """Of a row that came in.

    Args:
        length: its tokens before anything was cut; of a pair, those of the longer answer with the prompt.
        tokens, trained: tokens that a trainer reads, and those of them that get loss.
        cut, prompt_cut: it lost its end; it lost the beginning of its prompt.
        dropped: why it is not trained on, such as ``nothing_to_train``.
    """

    row_id: str
    length: int
    tokens: int = 0
    trained: int = 0
    cut: bool = False
    prompt_cut: bool = False
    dropped: str | None = None
