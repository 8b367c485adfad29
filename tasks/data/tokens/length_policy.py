"""Which tokens of a row that is too long remain."""

from collections.abc import Sequence
from dataclasses import dataclass

from tasks.data.tokens.fate import Fate
from tasks.data.tokens.tokenization import Tokenization

REFUSED = "refused"  # the reason for which no row is left out: the whole is an error
ANSWER_TOO_LONG = "answer_too_long"  # nothing of the prompt would be left


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What remains of a row.

    Args:
        head: first tokens that stay whatever is cut: the one that begins every text of the model, where it has one.
        removed: tokens that are cut after those, from the beginning of the prompt.
        max_length: of what remains.
    """

    head: int
    removed: int
    max_length: int

    def of(self, ids: Sequence[int]) -> list[int]:
        return [*ids[: self.head], *ids[self.head + self.removed : self.removed + self.max_length]]


def keep(tokenization: Tokenization, fate: Fate, prompt: int, head: int) -> Kept:
    """What remains of a row of ``fate.length`` tokens, ``prompt`` of them before the first answer; tells its fate."""
    longest = tokenization.max_prompt_length
    removed = max(0, prompt - longest) if longest else 0
    over = fate.length - removed - tokenization.max_length
    if over > 0:
        match tokenization.too_long:
            case None | "cut_answer":
                fate.cut = True
            case "cut_prompt":
                removed += over
                if removed >= prompt - head:  # an answer to nothing teaches to answer nothing
                    fate.dropped = ANSWER_TOO_LONG
            case "drop":
                fate.dropped = "too_long"
            case "refuse":
                fate.dropped = REFUSED
    fate.prompt_cut = removed > 0 and not fate.dropped
    return Kept(head=head, removed=removed, max_length=tokenization.max_length)


def keep_end(tokenization: Tokenization, fate: Fate, head: int) -> Kept:
    """What remains of a prompt of ``fate.length`` tokens that something is generated after; tells its fate."""
    longest = tokenization.max_prompt_length or tokenization.max_length
    removed = max(0, fate.length - longest)
    if removed and tokenization.too_long in ("drop", "refuse"):
        fate.dropped = "too_long" if tokenization.too_long == "drop" else REFUSED
    fate.prompt_cut = removed > 0 and not fate.dropped
    return Kept(head=head, removed=removed, max_length=longest)
