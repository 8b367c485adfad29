"""Which tokens are kept of a row that is too long."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.data.tokens.row_outcome import RowOutcome
from tasks.data.tokens.tokenization import Tokenization

REFUSED = "refused"  # a row with this reason is an error
ANSWER_TOO_LONG = "answer_too_long"  # nothing of the prompt would be left


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The kept tokens of a row.

    Args:
        head: first tokens that are never cut: the model's BOS, where it has one.
        removed: tokens that are cut after those, from the beginning of the prompt.
        max_length: of the kept tokens.
    """

    head: int
    removed: int
    max_length: int

    def of(self, ids: Sequence[int]) -> list[int]:
        return [*ids[: self.head], *ids[self.head + self.removed : self.removed + self.max_length]]


def keep(tokenization: Tokenization, outcome: RowOutcome, prompt: int, head: int) -> Kept:
    """Cuts a row of ``outcome.length`` tokens, ``prompt`` of them before the first answer; updates its outcome."""
    longest = tokenization.max_prompt_length
    removed = max(0, prompt - longest) if longest else 0
    over = outcome.length - removed - tokenization.max_length
    if over > 0:
        match tokenization.too_long:
            case None | "cut_answer":
                outcome.cut = True
            case "cut_prompt":
                removed += over
                if removed >= prompt - head:  # nothing of the prompt would be left
                    outcome.dropped = ANSWER_TOO_LONG
            case "drop":
                outcome.dropped = "too_long"
            case "refuse":
                outcome.dropped = REFUSED
    outcome.prompt_cut = removed > 0 and not outcome.dropped
    return Kept(head=head, removed=removed, max_length=tokenization.max_length)


def keep_end(tokenization: Tokenization, outcome: RowOutcome, head: int) -> Kept:
    """Cuts a prompt of ``outcome.length`` tokens, which generation continues; updates its outcome."""
    longest = tokenization.max_prompt_length or tokenization.max_length
    removed = max(0, outcome.length - longest)
    if removed and tokenization.too_long in ("drop", "refuse"):
        outcome.dropped = "too_long" if tokenization.too_long == "drop" else REFUSED
    outcome.prompt_cut = removed > 0 and not outcome.dropped
    return Kept(head=head, removed=removed, max_length=longest)
