"""Where words end in scripts beyond ASCII."""

import unicodedata
from functools import cache

import numpy as np
import numpy.typing as npt

_PART, _BORDER, _WORD = 0, 1, 2  # of a word, between words, a word of its own
_UNSPACED = (  # scripts that set no spaces between words: of these each character is one
    (0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF),  # Thai and Lao, Burmese, Khmer
    (0x2E80, 0x2FDF), (0x3005, 0x3007), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF),  # Chinese
    (0x3040, 0x30FF), (0x31F0, 0x31FF), (0xFF66, 0xFF9F),  # Japanese syllables
)  # fmt: skip
_IDEOGRAPHS = 0x20000  # and all beyond


def spaced(text: bytes) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Marks the words of a text in UTF-8.

    Returns:
        The text with spaces for its punctuation, symbols and white space beyond ASCII, of as many bytes; and the places
        where characters that are words begin and end.
    """
    characters = np.frombuffer(text.decode().encode("utf-32-le"), dtype="<u4")
    characters = characters[characters >= 0x80]
    found = np.frombuffer(text, dtype=np.uint8).copy()
    starts = np.flatnonzero(found >= 0xC0)
    sizes = 2 + (characters >= 0x800) + (characters >= 0x10000)
    roles = _roles()[np.minimum(characters, _IDEOGRAPHS)]
    for place in range(4):
        found[starts[(roles == _BORDER) & (sizes > place)] + place] = ord(" ")
    words = roles == _WORD
    return found.tobytes(), np.concatenate([starts[words], starts[words] + sizes[words]])


@cache
def _roles() -> npt.NDArray[np.uint8]:
    """Of each character up to the ideographs beyond the basic plane."""
    roles = np.full(_IDEOGRAPHS + 1, _PART, dtype=np.uint8)
    for first, last in _UNSPACED:
        roles[first : last + 1] = _WORD
    is_border = [unicodedata.category(chr(code))[0] in "PSZ" for code in range(_IDEOGRAPHS)]
    roles[:-1][is_border] = _BORDER
    roles[-1] = _WORD
    return roles
