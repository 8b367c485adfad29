"""The shell of every HTML page that is written: one file that loads nothing, and pure ASCII."""

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
    # Character references for the rest: a lone surrogate, from a file name that is not UTF-8, can then be written.
    return page.encode("ascii", "xmlcharrefreplace").decode()
