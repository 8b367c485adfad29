"""Questions on a function or class, answered from its documentation."""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tasks.quickstart.documentation import Document, documents

_MAX_SUMMARY = 300  # characters: an answer with its question stays below 256 tokens
_PURPOSE = ("What does `{name}` do?", "What is `{name}` for?", "Explain `{name}` briefly.")
_PARAMETERS = ("Which parameters does `{name}` take?", "List the parameters of `{name}`.")
_REVERSE = ("What in `{module}` does this? {summary}", "I need something from `{module}`: {summary} What do I use?")
_USAGE = ("How do I call `{name}`?", "Show how `{name}` is called and say what it does.", "How is `{name}` used?")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What an answer says about one function or class.

    Args:
        summary: the first sentences of its documentation, in one line.
    """

    group: str
    name: str
    parameters: tuple[str, ...]
    summary: str

    @property
    def question(self) -> str:
        return pick(_USAGE, "usage", self.name).format(name=self.name)

    @property
    def answer(self) -> str:
        return answer(self.name, self.parameters, self.summary)


def answer(name: str, parameters: Sequence[str], summary: str) -> str:
    """How the right answer to a question of usage looks: the call, then what it does."""
    return f"`{name}({', '.join(parameters)})`\n\n{summary}"


def draw(*parts: str) -> int:
    """A number that depends on nothing but its arguments: the same on every machine and in every process."""
    return int.from_bytes(hashlib.sha256("\n".join(parts).encode()).digest()[:8])


def pick(choices: Sequence[str], *parts: str) -> str:
    """One of the choices, decided by ``draw``."""
    return choices[draw(*parts) % len(choices)]


def usages() -> list[Usage]:
    """Every function and class with a signature and a summary that stands by itself."""
    return [
        Usage(group=document.group, name=document.name, parameters=document.parameters, summary=summary)
        for document in documents()
        if document.kind in ("function", "class") and document.parameters is not None
        if len((summary := _summary(document)).split()) >= 3 and summary.endswith(".")
    ]


def _summary(document: Document) -> str:
    """The first paragraph in one line, cut after a sentence; empty when its first sentence is too long."""
    sentences = re.split(r"(?<=[.!?])\s+(?=[A-Z])", " ".join(document.text.split("\n\n")[0].split()))
    if not sentences[-1].endswith((".", "!", "?", ":")):
        sentences[-1] += "."
    kept = ""
    for sentence in sentences:
        if len(kept) + len(sentence) > _MAX_SUMMARY:
            break
        kept = f"{kept} {sentence}".lstrip()
    return kept


def instructions() -> Iterator[dict[str, object]]:
    """Rows {messages, group}: three questions on each function or class, every one with its answer."""
    for usage in usages():
        for question, reply in _questions(usage):
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
            yield {"messages": messages, "group": usage.group}


def _questions(usage: Usage) -> Iterator[tuple[str, str]]:
    name, module = usage.name, usage.name.rpartition(".")[0] or "builtins"
    yield usage.question, usage.answer
    yield pick(_PURPOSE, "purpose", name).format(name=name), usage.summary
    if draw("third", name) % 2:
        yield pick(_PARAMETERS, "parameters", name).format(name=name), _parameters_answer(usage)
    else:
        question = pick(_REVERSE, "reverse", name).format(module=module, summary=usage.summary)
        yield question, f"`{name}({', '.join(usage.parameters)})`"


def _parameters_answer(usage: Usage) -> str:
    if not usage.parameters:
        return f"`{usage.name}` takes no parameters."
    count = f"{len(usage.parameters)} parameter{'s' if len(usage.parameters) > 1 else ''}"
    return f"`{usage.name}` takes {count}: {', '.join(f'`{parameter}`' for parameter in usage.parameters)}."
