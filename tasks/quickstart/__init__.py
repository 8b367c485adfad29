"""The quickstart's rows: text, questions and preferences on the documentation of the running interpreter."""

from collections.abc import Callable, Iterator, Mapping

from lineage.errors import ConfigError
from tasks.quickstart.documentation import documents
from tasks.quickstart.instructions import instructions
from tasks.quickstart.preferences import preferences

QuickstartRow = Mapping[str, object]


def corpus() -> Iterator[QuickstartRow]:
    """Rows {text, group}: every document, under the name and signature that it documents."""
    for document in documents():
        title = document.name + document.signature
        yield {"text": f"{title}\n\n{document.text}", "group": document.group}


ROWS: Mapping[str, Callable[[], Iterator[QuickstartRow]]] = {
    "corpus": corpus,
    "instructions": instructions,
    "preferences": preferences,
}


def quickstart_rows(name: str) -> Iterator[QuickstartRow]:
    """Rows of one quickstart source; ``group`` is the module that owns what the row is about.

    Raises:
        ConfigError: there is no source of that name.
    """
    if name not in ROWS:
        raise ConfigError(f"quickstart:{name} is no quickstart source; give quickstart: and one of {', '.join(ROWS)}")
    return ROWS[name]()
