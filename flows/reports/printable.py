"""Text of users on a terminal: a control character in it would move the cursor, or hide what follows."""

import unicodedata


def printable(line: str) -> str:
    """A line with everything escaped that is neither a visible character nor a space."""
    if line.isprintable():
        return line
    shown = (char.isprintable() or unicodedata.category(char) == "Zs" for char in line)
    return "".join(char if visible else ascii(char)[1:-1] for char, visible in zip(line, shown, strict=True))
