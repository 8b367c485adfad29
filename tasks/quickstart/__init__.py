"""The quickstart's rows: text, questions and preferences on the documentation of the running interpreter."""

from collections.abc import Callable, Iterator, Mapping

from lineage.errors import ConfigError
from tasks.quickstart.documentation import documents
from tasks.quickstart.instructions import instructions
from tasks.quickstart.preferences import preferences, unpaired
from tasks.quickstart.questions import asked, draw, facts, usages
from tasks.quickstart.sentences import sentences

QuickstartRow = Mapping[str, object]
_MAX_TEXT = 250  # characters of a document: a small model learns more from the beginnings of many


def corpus() -> Iterator[QuickstartRow]:
    """Rows {text, group}: each document under its name and signature, with the facts of a signature."""
    known = {usage.name: usage for usage in usages()}
    for document in documents():
        usage = known.get(document.name)
        title = f"{usage.call}\n{facts(usage)}" if usage else document.name + document.signature
        yield {"text": f"{title}\n\n{_beginning(document.text)}", "group": document.group}


def few_instructions() -> Iterator[QuickstartRow]:
    """Two in a hundred of the rows of ``instructions``."""
    for row, (_, question) in zip(instructions(), asked(0), strict=True):
        if draw("few", question.text) % 50 == 0:
            yield row


def _beginning(text: str) -> str:
    """As many whole paragraphs as fit, or of a first one that is too long its first words."""
    first, *others = text.split("\n\n")
    if len(first) > _MAX_TEXT:
        return first[:_MAX_TEXT].rpartition(" ")[0]
    kept = first
    for paragraph in others:
        if len(kept) + len(paragraph) > _MAX_TEXT:
            break
        kept += f"\n\n{paragraph}"
    return kept


ROWS: Mapping[str, Callable[[], Iterator[QuickstartRow]]] = {
    "corpus": corpus,
    "instructions": instructions,
    "few_instructions": few_instructions,
    "preferences": preferences,
    "sentences": sentences,
    "unpaired": unpaired,
}


def quickstart_rows(name: str) -> Iterator[QuickstartRow]:
    """Rows of one quickstart source; ``group`` is the module that owns what the row is about.

    Raises:
        ConfigError: there is no source of that name.
    """
    if name not in ROWS:
        raise ConfigError(f"quickstart:{name} is no quickstart source; give quickstart: and one of {', '.join(ROWS)}")
    return ROWS[name]()
