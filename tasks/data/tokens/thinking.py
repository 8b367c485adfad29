"""What the assistant thinks before it answers: ``<think>...</think>`` at the beginning of its content."""

import re
from collections.abc import Sequence
from typing import Literal

from tasks.data.schema import Message

Thinking = Literal["keep", "drop"]
OPEN, CLOSE = "<think>", "</think>"
FIELD = "reasoning_content"  # transformers gives it to templates under the other names that they ask for, too
_THOUGHT = re.compile(rf"\s*(?:{OPEN})?(.*?){CLOSE}\s*", re.DOTALL)


def split(message: Message) -> tuple[str, Message]:
    """The thinking of a message, in its content or in a field, and the message without it; empty: there is none."""
    if FIELD in message:
        return str(message[FIELD]), {name: value for name, value in message.items() if name != FIELD}
    content = str(message.get("content") or "")
    found = _THOUGHT.match(content) if message["role"] == "assistant" and CLOSE in content else None
    if found is None:
        return "", message
    return found[1].strip(), {**message, "content": content[found.end() :]}


def without(messages: Sequence[Message]) -> list[Message]:
    """Messages without what the assistant thinks."""
    return [split(message)[1] for message in messages]


def in_field(messages: Sequence[Message]) -> list[Message]:
    """Thinking in a field of its own, as some templates take it."""
    parts = [split(message) for message in messages]
    return [{**rest, FIELD: thought} if thought else rest for thought, rest in parts]


def answer_after(prompt: str, answer: str, thought: str) -> str:
    """A prompt and its answer, with the thinking that belongs between them.

    The prompt may have opened the thinking. Where the answer neither has a thought nor closes that, an empty thought
    is closed before it: so the answer follows the very prompt that generation starts from.

    Args:
        answer: what the template writes behind the place up to which it and the prompt agree.
    """
    is_open = prompt.rstrip().endswith(OPEN)
    closing = re.match(rf"\s*{CLOSE}\s*", answer)
    if not thought:
        return prompt + (f"\n{CLOSE}\n\n" if is_open and not closing else "") + answer
    rest = answer[closing.end() :] if closing else answer
    opening = "" if is_open else f"{OPEN}\n"
    return f"{prompt}{opening}{thought}\n{CLOSE}\n\n{rest}"
