"""Answers of models, greedy and sampled, in batches of prompts of similar length.

Shapes: B rows in a batch, T tokens of the longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.data.tokens.rendering import turn_ends
from tasks.evaluate.scoring import Batches, generating, in_batches, padded

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from tasks.model.vision import Vision
    from tasks.train.generation.generating import Sampling


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A generated answer.

    Args:
        finished: whether it ends in a stop token; if not, the limit of new tokens cut it off.
        num_tokens: without the stop token.
    """

    text: str
    finished: bool
    num_tokens: int


def greedy_answers(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | Batches,
    num_beams: int = 1,
    vision: "Vision | None" = None,
    images: Sequence[Sequence[int]] = (),
) -> list[Answer]:
    """Greedy answers, in order of the prompts: the most likely next token until a stop token.

    Stop tokens are those of the model's generation config, the tokenizer's end of sequence, and what ends a turn of
    the chat template. Nothing else of the
    generation config is used: a repetition penalty, for example, would choose a less likely token.

    Args:
        num_beams: of a beam search, which looks for the most likely answer.
        images: the places of each prompt's images among those of ``vision``.
    """
    from tasks.train.generation import rollouts
    from tasks.train.kernels.machine import plain

    stops = stop_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id or 0  # masked

    def generate(batch: Sequence[int]) -> list[list[int]]:
        ids_BT, attention_BT = padded([prompts[index] for index in batch], model.device, left=True, pad=pad)
        seen = vision.inputs([images[index] for index in batch], ids_BT) if vision and images else {}
        whole = plain(model)
        by_graphs = rollouts.decodes(whole) and ids_BT.shape[1] > 1 and num_beams == 1 and not seen
        rollouts.log_sampler(model.config.model_type, by_graphs=by_graphs)
        if by_graphs:
            new_BN, _ = rollouts.decode(
                whole, ids_BT, attention_BT, None, max_new_tokens=max_new_tokens, pad_token_id=pad,
                stop_tokens=sorted(stops),
            )  # fmt: skip
            return [[*map(int, each)] for each in new_BN.tolist()]
        new_BT = model.generate(ids_BT, attention_mask=attention_BT, **seen)[:, ids_BT.shape[1] :]
        found: list[list[int]] = new_BT.tolist()
        return found

    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    with generating(
        model, longest=max(lengths, default=None), do_sample=False, num_beams=num_beams, max_new_tokens=max_new_tokens,
        eos_token_id=sorted(stops) or None, pad_token_id=pad,
    ):  # fmt: skip
        return answers_of(model, tokenizer, in_batches(generate, lengths, batch_size, model=model))


def sampled_tokens(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    batch_size: int | Batches,
    sampling: "Sampling",
    seeds: Sequence[int],
) -> list[list[int]]:
    """The tokens of sampled answers, in order of the prompts, with the stop token that ends them.

    Args:
        seeds: of each answer's noise, which the other rows of its batch do not change.
    """
    from tasks.train.generation.rollouts import sample

    stops, pad = sorted(stop_tokens(model, tokenizer)), tokenizer.pad_token_id or 0

    def generate(batch: Sequence[int]) -> list[list[int]]:
        return sample(
            model, [[*prompts[index]] for index in batch], sampling, [seeds[index] for index in batch],
            max_new_tokens=max_new_tokens, pad_token_id=pad, stop_tokens=stops,
        )  # fmt: skip

    lengths = [len(prompt) + max_new_tokens for prompt in prompts]
    with generating(model, longest=max(lengths, default=None)):
        return in_batches(generate, lengths, batch_size, model=model)


def answers_of(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", tokens: Sequence[Sequence[int]]
) -> list[Answer]:
    """The answers that generated tokens are."""
    stops, found = stop_tokens(model, tokenizer), list[Answer]()
    texts = tokenizer.batch_decode([*tokens], skip_special_tokens=True) if tokens else []  # else one, of nothing
    for text, ids in zip(texts, tokens, strict=True):
        length = next((at for at, token in enumerate(ids) if token in stops), None)
        found.append(Answer(text=text, finished=length is not None, num_tokens=len(ids) if length is None else length))
    return found


def stop_tokens(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """The tokens that end an answer: of the generation config, of the tokenizer, and of the chat template's turns."""
    ends = model.generation_config.eos_token_id
    found = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends]), *turn_ends(tokenizer)}
    return {token for token in found if token is not None}
