"""What is odd in a row that is used all the same."""

from tasks.data.formats.values import CanonicalRow

_CONTROL = "control characters"
# Sought one by one: a search for a single character is so fast that all of them take a third of a regex.
_OF_ASCII = "".join(map(chr, (*range(1, 9), 11, 12, *range(14, 32), 127)))
_BEYOND = {
    _CONTROL: "".join(map(chr, range(0x80, 0xA0))),  # mostly text of Windows that was read as Latin-1
    "bidirectional controls": "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069",
    "byte order marks U+FEFF": "\ufeff",
    "replacement characters U+FFFD": "\ufffd",  # a decoder could not read: the text was broken before it came here
}


def remarks(row: CanonicalRow) -> tuple[str, ...]:
    """What is odd in a row's texts, in words to count by: mostly nothing."""
    said = "\n".join(_texts(row))
    found = ["NUL characters"] if "\0" in said else []
    if any(map(said.__contains__, _OF_ASCII)):
        found.append(_CONTROL)
    if not said.isascii():
        found += [words for words, odd in _BEYOND.items() if any(map(said.__contains__, odd))]
    messages = row.get("messages")
    if isinstance(messages, list) and messages[-1]["role"] != "assistant":
        found.append("no answer to the last turn")
    return tuple(dict.fromkeys(found))


def _texts(row: CanonicalRow) -> list[str]:
    texts: list[str] = []
    for value in row.values():
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, list):
            texts += [message["content"] for message in value]
    return texts
