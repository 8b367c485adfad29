"""The labels of a conversation in the plainest way: every prefix rendered and tokenized by transformers itself."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

IGNORED = -100


def plain_labels(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[dict[str, object]],
    tools: list[dict[str, object]] | None = None,
) -> tuple[list[int], list[int]]:
    """Tokens and labels; a token belongs to a turn if it is not among those of the text before the turn.

    The blanks that some templates write behind the token that ends a turn are not of the turn.
    """

    def text(count: int, *, prompt: bool = False) -> str:
        part = list(messages[:count])
        return str(tokenizer.apply_chat_template(part, tools=tools, tokenize=False, add_generation_prompt=prompt))

    def tokens(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def shared(first: list[int], second: list[int]) -> int:
        pairs = zip(first, second, strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))

    whole = text(len(messages)).rstrip()
    ids = tokens(whole)
    labels = [IGNORED] * len(ids)
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before, upto = text(place, prompt=True), text(place + 1).rstrip()
            assert whole.startswith(upto) and upto.startswith(before)
            start, end = (shared(tokens(part), ids) for part in (before, upto))
            labels[start:end] = ids[start:end]
    return ids, labels
