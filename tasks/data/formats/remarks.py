"""What is odd in a row that is used all the same."""

from tasks.data.formats.format import CanonicalRow

# Sought one by one: a search for a single character is so fast that all of them take a third of a regex.
_CONTROL = "".join(map(chr, (*range(1, 9), 11, 12, *range(14, 32), 127)))
_REPLACED = "\ufffd"  # what a decoder writes where it could not read: the text was broken before it came here


def remarks(row: CanonicalRow) -> tuple[str, ...]:
    """What is odd in a row's texts, in words to count by: mostly nothing."""
    said = "\n".join(_texts(row))
    found = []
    if "\0" in said:
        found.append("NUL characters")
    if any(map(said.__contains__, _CONTROL)):
        found.append("control characters")
    if _REPLACED in said:
        found.append("replacement characters U+FFFD")
    messages = row.get("messages")
    if isinstance(messages, list) and messages[-1]["role"] != "assistant":
        found.append("no answer to the last turn")
    return tuple(found)


def _texts(row: CanonicalRow) -> list[str]:
    texts: list[str] = []
    for value in row.values():
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            texts += [message["content"] for message in value]
    return texts
