"""Conversations: a question on a function, method or class, and its right answer."""

from collections.abc import Iterator

from tasks.quickstart.questions import asked


def instructions() -> Iterator[dict[str, object]]:
    """Rows {messages, group}: one half of the questions; the other is that of the preferences."""
    for usage, question in asked(0):
        messages = [{"role": "user", "content": question.text}, {"role": "assistant", "content": question.answer}]
        yield {"messages": messages, "group": usage.group}


def prompts() -> Iterator[dict[str, object]]:
    """Rows {prompt, group}: the questions of the preferences, for answers that a policy samples."""
    for usage, question in asked(1):
        yield {"prompt": question.text, "group": usage.group}
