"""Renderers by family of models: conversations as tokens, so that each prompt is a prefix of the next.

That is the extension property: a cache of keys and values serves all turns of a rollout, and its turns are one row of a
training. It holds because the tokens that were sampled stay as they are: nothing is rendered or tokenized again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from lineage.errors import ConfigError
from tasks.data.tokens.encoding import Rendered, Span, encode_rendered, encoder_of
from tasks.data.tokens.rendering import ControlTokens, StopTokens
from tasks.steps import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Renderer:
    """How the models of a family write a conversation.

    Args:
        about: the models.
        marks: texts that are one token each in their vocabulary; empty: any model.
        begin: before the first turn.
        turn: a turn before its content; ``{role}`` is the role.
        end: after the content of a turn.
        stop: what ends a sampled turn; it is the beginning of ``end``.
        roles: role -> its name in the text.
    """

    about: str
    marks: tuple[str, ...] = ()
    begin: str = ""
    turn: str
    end: str
    stop: str
    roles: Mapping[str, str]

    def head(self, role: str) -> str:
        """The text before the content of a turn (ConfigError: the family has no such role)."""
        if role not in self.roles:
            raise ConfigError(f"role={role}: {', '.join(self.roles)} are accepted")
        return self.turn.format(role=self.roles[role])


_ROLES = {each: each for each in ("system", "user", "assistant", "tool")}
# The first whose marks a vocabulary has is that of a model.
RENDERERS: Mapping[str, Renderer] = {
    "phi4": Renderer(
        about="Phi-4", marks=("<|im_start|>", "<|im_sep|>", "<|im_end|>"), turn="<|im_start|>{role}<|im_sep|>",
        end="<|im_end|>", stop="<|im_end|>", roles=_ROLES,
    ),
    "chatml": Renderer(
        about="Qwen, SmolLM2, Hermes and others with ChatML", marks=("<|im_start|>", "<|im_end|>"),
        turn="<|im_start|>{role}\n", end="<|im_end|>\n", stop="<|im_end|>", roles=_ROLES,
    ),
    "llama3": Renderer(
        about="Llama 3", marks=("<|start_header_id|>", "<|eot_id|>"), begin="<|begin_of_text|>",
        turn="<|start_header_id|>{role}<|end_header_id|>\n\n", end="<|eot_id|>", stop="<|eot_id|>", roles=_ROLES,
    ),
    "gemma": Renderer(
        about="Gemma 2 and 3", marks=("<start_of_turn>", "<end_of_turn>"), begin="<bos>",
        turn="<start_of_turn>{role}\n", end="<end_of_turn>\n", stop="<end_of_turn>",
        roles={"user": "user", "assistant": "model"},
    ),
    "granite": Renderer(
        about="Granite 3", marks=("<|start_of_role|>", "<|end_of_role|>"),
        turn="<|start_of_role|>{role}<|end_of_role|>", end="<|end_of_text|>\n", stop="<|end_of_text|>", roles=_ROLES,
    ),
    "role_colon": Renderer(
        about="base models without marks of turns", turn="{role}: ", end="\n\n", stop="\n\n",
        roles={"system": "System", "user": "User", "assistant": "Assistant"},
    ),
}  # fmt: skip


def renderer_of(tokenizer: "PreTrainedTokenizerBase") -> Renderer:
    """The renderer of a model's family, by the marks in its vocabulary."""
    vocabulary = tokenizer.get_vocab()
    return next(each for each in RENDERERS.values() if all(mark in vocabulary for mark in each.marks))


class Conversation:
    """A rollout of several turns, as tokens.

    Attributes:
        tokens: all so far.
        sampled: for each token its log-probability under the sampler; None: it was not sampled.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", renderer: Renderer | None = None) -> None:
        self.tokenizer, self.renderer = tokenizer, renderer or renderer_of(tokenizer)
        self.tokens: list[int] = []
        self.sampled: list[float | None] = []

    @cached_property
    def _control(self) -> ControlTokens:
        """The tokens that only the renderer may write, as in trainings only a chat template may."""
        stops, own = StopTokens.of(self.tokenizer), self.renderer
        return ControlTokens(texts=frozenset({*stops.special, *({*own.marks, own.begin, own.stop} & {*stops.added})}))

    def prompt(self, *messages: Message) -> list[int]:
        """Adds messages, and begins the assistant's turn; returns all tokens, from which to sample.

        A content that spells a control token is text, as in trainings.
        """
        text, literal = "" if self.tokens else self.renderer.begin, list[Span]()
        for each in messages:
            text += self.renderer.head(each["role"])
            spans = self._control.places(each["content"], each["role"])
            literal += [(len(text) + start, len(text) + end) for start, end in spans]
            text += f"{each['content']}{self.renderer.end}"
        self._add(text + self.renderer.head("assistant").rstrip(" "), literal)
        return list(self.tokens)

    def answer(self, tokens: Sequence[int], logprobs: Sequence[float]) -> str:
        """Adds a sampled turn with the token that stopped it; returns its text without that."""
        if len(tokens) != len(logprobs):
            raise ConfigError(f"{len(tokens)} tokens and {len(logprobs)} log-probabilities: as many are accepted")
        self.tokens += tokens
        self.sampled += logprobs
        text = str(self.tokenizer.decode(list(tokens)))
        is_whole = text.endswith(self.renderer.stop)
        if not is_whole and tokens and tokens[-1] in self.tokenizer.all_special_ids:  # another one that stops the model
            text = str(self.tokenizer.decode(list(tokens[:-1])))
        self._add(self.renderer.end.removeprefix(self.renderer.stop) if is_whole else self.renderer.end)
        return text.removesuffix(self.renderer.stop)

    def _add(self, text: str, literal: Sequence[Span] = ()) -> None:
        found = self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        if literal:
            [encoded] = encode_rendered(encoder_of(self.tokenizer), [Rendered(text=text, literal=literal)])
            found = encoded.ids
        self.tokens += found
        self.sampled += [None] * len(found)

    def row(self, advantage: float) -> Row:
        """One row for the losses of reinforcement: only sampled tokens have the advantage, and a weight."""
        return _row(self.tokens, self.sampled, [advantage] * len(self.tokens))


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A prompt and what was sampled after it."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    advantage: float


def merged(rollouts: Sequence[Rollout]) -> tuple[list[Row], int]:
    """Rows of rollouts, in any order; one whose prompt extends another one joins its row.

    Each token keeps the advantage of its rollout.

    Returns:
        The rows, and how many rollouts joined another.

    Raises:
        ConfigError: a rollout has no prompt, no tokens, or not as many log-probabilities as tokens.
    """
    for place, each in enumerate(rollouts):
        if not each.prompt or not each.tokens or len(each.logprobs) != len(each.tokens):
            raise ConfigError(
                f"rollout {place}: {len(each.prompt)} tokens of the prompt, {len(each.tokens)} sampled and "
                f"{len(each.logprobs)} log-probabilities; at least one of each, and as many log-probabilities as "
                "sampled tokens are accepted; leave it out"
            )
    found: list[tuple[list[int], list[float | None], list[float]]] = []
    count = 0
    for each in sorted(rollouts, key=lambda rollout: len(rollout.prompt)):
        prompt = list(each.prompt)
        before = max(
            (own for own in found if prompt[: len(own[0])] == own[0]),
            key=lambda own: (len(own[0]), own[2][-1] == each.advantage), default=None,
        )  # fmt: skip
        if before is None:
            found.append(before := ([], [], []))
        else:
            count += 1
        rest = prompt[len(before[0]) :]
        before[0].extend([*rest, *each.tokens])
        before[1].extend([*[None] * len(rest), *each.logprobs])
        before[2].extend([each.advantage] * (len(rest) + len(each.tokens)))
    return [_row(*each) for each in found], count


def _row(tokens: Sequence[int], sampled: Sequence[float | None], advantages: Sequence[float]) -> Row:
    follow = sampled[1:]
    return Row(
        tokens=list(tokens[:-1]), target_tokens=list(tokens[1:]),
        logprobs=[0.0 if each is None else each for each in follow],
        advantages=[0.0 if each is None else own for each, own in zip(follow, advantages[1:], strict=True)],
        weights=[float(each is not None) for each in follow],
    )  # fmt: skip
