"""The token that ends what the assistant says: trained in every turn, and what generation stops at."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, PipelineError
from tasks.data.schema import Message
from tasks.data.tokens.template import Template, Tools
from tasks.data.tokens.thinking import split

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

_PROBE = "\ue002"  # a content that no template writes by itself


def stop_at(generation: "GenerationConfig", tokens: Iterable[int]) -> None:
    """Lets generation stop at these tokens too."""
    ends = generation.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    more = [token for token in tokens if token not in ends]
    if more:
        generation.eos_token_id = [*more, *ends]


@dataclass(kw_only=True)
class StopTokens:
    """Finds the end of assistant turns in the text of a template. Can be pickled.

    Args:
        special: special tokens of the tokenizer, as text.
        added: all tokens that it never takes apart: the special ones, and marks such as ``</tool_call>``.
        ids: of the latter.
    """

    special: Sequence[str]
    added: Sequence[str]
    ids: frozenset[int]
    _known: dict[tuple[bool, tuple[str, ...]], str] = field(default_factory=dict)

    @staticmethod
    def of(tokenizer: "PreTrainedTokenizerBase") -> "StopTokens":
        added = tokenizer.added_tokens_decoder.values()
        special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        texts = special | {token.content for token in added}
        ids = frozenset(tokenizer.convert_tokens_to_ids(sorted(texts)))
        return StopTokens(special=_longest_first(special), added=_longest_first(texts), ids=ids)

    def ended(
        self, template: Template, text: str, start: int, messages: Sequence[Message], tools: Tools | None, row_id: str
    ) -> str:
        """A rendered conversation up to the stop token of its last turn, which is appended where the template writes
        it as the beginning of the next turn.

        Args:
            start: where the last turn begins in the text.
            messages: what the text says, the last one of the assistant.
        Raises:
            ConfigError: the turn ends in no token of its own.
        """
        body, ends = _tail(text[start:], self.special)
        key = (bool(messages[-1].get("tool_calls")), tuple(ends))
        if key not in self._known:
            plain = [*messages[:-1], split(messages[-1])[1]]
            self._known[key] = self._stop(template, ends, plain, tools, row_id)
        stop = self._known[key]
        if not stop:
            body, ends = _tail(text[start:], self.added)
            stop = "".join(ends).rstrip()
        if not stop:
            raise ConfigError(
                f"the model's chat template ends the assistant's turn on row {row_id} in no token of its own "
                f"(...{text[-40:]!r}), so the model would never learn to stop; a template that writes a special token "
                "of the tokenizer, such as its eos_token, after each answer is accepted; add it to the template, or "
                "set chat_template=chatml on the sft stage"
            )
        return text[:start] + body + stop

    def _stop(
        self, template: Template, ends: Sequence[str], messages: Sequence[Message], tools: Tools | None, row_id: str
    ) -> str:
        """What a turn ends with behind its last word, up to the stop token; empty: no special token is told."""
        calls = bool(messages[-1].get("tool_calls"))
        within = calls and len(ends) == 1 and self._ends_each_call(template, ends[0].strip(), messages, tools, row_id)
        if len(ends) == 1 and not within:
            return ends[0].rstrip()
        follows: Message = {"role": "tool" if calls else "user", "content": _PROBE}
        try:
            whole, history = template.render([messages, [*messages, follows]], tools, row_id)
        except PipelineError:  # it refuses what follows: nothing more is told
            return "".join(ends[:1]).rstrip()
        if ends and not within:
            # Some templates write an end of the whole behind that of the turn, which history lacks.
            past = history.rpartition(_PROBE)[0]
            counts = (n for n in range(len(ends), 1, -1) if "".join(ends[:n]).rstrip() in past)
            return "".join(ends[: next(counts, 1)]).rstrip()
        found = re.match(rf"\s*(?:{_any(self.special)})", history[len(whole) :]) if history.startswith(whole) else None
        return "".join(ends) + found[0] if found else ""

    def _ends_each_call(
        self, template: Template, end: str, messages: Sequence[Message], tools: Tools | None, row_id: str
    ) -> bool:
        """Whether a token ends each call of a turn, and not the turn."""
        *before, last = messages
        calls = last["tool_calls"]
        assert isinstance(calls, list)
        try:
            once, twice = template.render(
                [[*before, {**last, "tool_calls": calls[:1] * number}] for number in (1, 2)], tools, row_id
            )
        except PipelineError:  # it takes one call alone
            return False
        return twice.count(end) > once.count(end)


def _longest_first(tokens: Iterable[str]) -> list[str]:
    return sorted(filter(None, tokens), key=lambda token: (-len(token), token))


def _any(tokens: Sequence[str]) -> str:
    return "|".join(map(re.escape, tokens)) or "(?!)"


def _tail(text: str, tokens: Sequence[str]) -> tuple[str, list[str]]:
    """A text without the tokens that end it; and those, each with the blanks behind it."""
    ends: list[str] = []
    while True:
        bare = text.rstrip()
        token = next((token for token in tokens if bare.endswith(token)), None)
        if not token:
            return text, ends
        ends.insert(0, text[len(bare) - len(token) :])
        text = bare[: -len(token)]
