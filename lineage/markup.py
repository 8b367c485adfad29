"""The frame of every HTML page (one self-contained ASCII file), and Markdown tables."""

import re
from collections.abc import Sequence
from typing import Literal

_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def html_page(*, title: str, style: str, body: str, policy: str) -> str:
    """A page of text, style and markup; the caller has escaped ``title`` and ``body``.

    Args:
        policy: what the page may run, as in ``default-src 'none'; style-src 'unsafe-inline'``.
    """
    page = _SHELL.format(title=title, style=style, body=body, policy=policy)
    # Character references can also represent a lone surrogate, from a file name that is not UTF-8.
    return page.encode("ascii", "xmlcharrefreplace").decode()


def markdown_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, align: Literal["left", "right"] | None = None
) -> str:
    """A Markdown table, without a line break at its end.

    Args:
        align: pads the cells to equal widths, for terminals; None: no padding.
    """
    cells = [[re.sub(r"(?<!\\)\|", r"\\|", cell).replace("\n", " ") for cell in row] for row in (columns, *rows)]
    widths = [max(map(len, column)) if align else 0 for column in zip(*cells, strict=True)]
    pad = str.rjust if align == "right" else str.ljust
    rule = ["-" * max(width - 1, 1) + ":" if align == "right" else "-" * (width or 3) for width in widths]
    lines = [cells[0], rule, *cells[1:]]
    return "\n".join(f"| {' | '.join(map(pad, row, widths))} |" for row in lines)
