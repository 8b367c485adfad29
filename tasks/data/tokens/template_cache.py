"""Cache of the text that a chat template writes around contents, per sequence of roles.

Finding where n messages start and end in the template's text takes 2n renderings. Here that is done for one row of a
sequence of roles, and for placeholder contents under the same roles, whose rendering shows the text between contents.
The cache holds for another row if the row's rendering is the same text around its own contents, to the character. Where
it is not, because the template strips or rewrites contents, that row is rendered message by message.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CachedTemplate:
    """The template's text for conversations of one sequence of roles.

    Args:
        written: the template's text before, between and after the contents: one more than there are messages.
        pieces: the same for the trained text, which may end elsewhere.
        borders: start and end of each assistant turn in the trained text, as (piece, position in that piece).
    """

    written: Sequence[str]
    pieces: Sequence[str]
    borders: Sequence[tuple[tuple[int, int], tuple[int, int]]]

    @staticmethod
    def slots(count: int) -> list[str]:
        """Placeholder contents that no template writes or splits: characters for private use."""
        return [f"\ue000{index}\ue001" for index in range(count)]

    @staticmethod
    def of(written: str, text: str, spans: Sequence[Span], slots: Sequence[str]) -> "CachedTemplate | None":
        """From a rendering of slots; None unless each appears in it once, in order.

        Args:
            written: by the template.
            text: the trained text.
        """
        found, pieces = _pieces(written, slots), _pieces(text, slots)
        if found is None or pieces is None:
            return None
        starts, place = [], 0
        for piece, slot in zip(pieces, [*slots, ""], strict=True):
            starts.append(place)
            place += len(piece) + len(slot)

        def border(at: int) -> tuple[int, int] | None:
            for piece, start in enumerate(starts):
                if start <= at <= start + len(pieces[piece]):
                    return piece, at - start
            return None  # within a content

        borders = [(begin, end) for span in spans if (begin := border(span[0])) and (end := border(span[1]))]
        return CachedTemplate(written=found, pieces=pieces, borders=borders) if len(borders) == len(spans) else None

    @property
    def rewrites(self) -> bool:
        """Whether the trained text has more than the template's before the last content."""
        return self.written[:-1] != self.pieces[:-1]

    def filled(self, written: str, contents: Sequence[str]) -> tuple[str, list[Span]] | None:
        """The trained text and its assistant turns; None where the template's text is not of this form."""
        if _joined(self.written, contents) != written:
            return None
        starts, place = [], 0
        for piece, content in zip(self.pieces, [*contents, ""], strict=True):
            starts.append(place)
            place += len(piece) + len(content)
        spans = [(starts[begin[0]] + begin[1], starts[end[0]] + end[1]) for begin, end in self.borders]
        return (written if self.written == self.pieces else _joined(self.pieces, contents)), spans


def _joined(pieces: Sequence[str], contents: Sequence[str]) -> str:
    return "".join(part for pair in zip(pieces, [*contents, ""], strict=True) for part in pair)


def _pieces(text: str, slots: Sequence[str]) -> list[str] | None:
    pieces, place = [], 0
    for slot in slots:
        found = text.find(slot, place)
        if found < 0 or text.count(slot) != 1:
            return None
        pieces.append(text[place:found])
        place = found + len(slot)
    return [*pieces, text[place:]]
