"""Conversations: what a function or method does, answered in one sentence, for a model that knows English already."""

import re
from collections.abc import Iterator

from tasks.quickstart.documentation import Document, documents
from tasks.quickstart.questions import draw

_QUESTIONS = ("What does `{name}` do in Python?", "What is `{name}` for in Python?", "Explain `{name}` in Python.")
_WORDS = range(4, 21)  # of a summary; a longer one is seldom one clear sentence
_PLAIN = re.compile(r"([A-Z][a-z]+) ([A-Za-z0-9 ,'()/-]+)\.")  # a verb, and what needs no quotes or code
_VERBS = frozenset({
    "Acquire", "Add", "Append", "Call", "Change", "Check", "Clear", "Close", "Compare", "Compile", "Compress",
    "Compute", "Connect", "Construct", "Convert", "Copy", "Create", "Decode", "Decompress", "Delete", "Determine",
    "Display", "Encode", "Execute", "Extract", "Find", "Flush", "Format", "Generate", "Get", "Guess", "Handle",
    "Insert", "Invoke", "Load", "Mark", "Move", "Open", "Parse", "Perform", "Print", "Push", "Put", "Raise", "Read",
    "Receive", "Register", "Release", "Remove", "Rename", "Reset", "Retrieve", "Return", "Reverse", "Run", "Send",
    "Set", "Split", "Start", "Stop", "Store", "Strip", "Truncate", "Update", "Wait", "Write",
})  # fmt: skip


def sentences() -> Iterator[dict[str, object]]:
    """Rows {messages, group}: one question on each function and method whose summary is one plain sentence."""
    seen = set()
    for document in documents():
        rest = _predicate(document)
        if rest and rest not in seen:
            seen.add(rest)  # of equal summaries one is enough
            question = _QUESTIONS[draw("sentence", document.name) % len(_QUESTIONS)].format(name=document.name)
            answer = f"`{document.name}` {rest}."
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            yield {"messages": messages, "group": document.group}


def _predicate(document: Document) -> str | None:
    """Its first sentence in the third person, ``returns the sum`` for ``Return the sum.``; None: it is no plain one."""
    summary = " ".join(document.text.split("\n\n")[0].split())
    found = _PLAIN.fullmatch(re.split(r"(?<=[.!?])\s+", summary)[0])
    if document.kind not in ("function", "method") or found is None or len(found[0].split()) not in _WORDS:
        return None
    verb, rest = found.groups()
    base = next((each for each in _VERBS if verb in (each, _third_person(each))), None)
    if base is None:
        return None
    return f"{_third_person(base).lower()} {re.sub('and return(?= )', 'and returns', rest)}"


def _third_person(verb: str) -> str:
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x")) else "s")
