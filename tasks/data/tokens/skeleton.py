"""What a chat template writes around contents, learned once for each sequence of roles.

Proving the borders of n messages from the template takes 2n renderings. Here one row of a sequence of roles is proven,
and then made-up contents under the same roles, whose rendering shows what stands between contents. Another row is of
that form if its own rendering is the same pieces around its own contents, to the character. Where it is not, such as
where the template strips or rewrites contents, the row is proven by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Skeleton:
    """Conversations of one sequence of roles.

    Args:
        written: what the template writes before, between and after the contents: one more than there are messages.
        pieces: the same of the text that is trained on, which may end elsewhere.
        borders: of each assistant turn, where it begins and ends in the latter: (piece, place in that piece).
    """

    written: Sequence[str]
    pieces: Sequence[str]
    borders: Sequence[tuple[tuple[int, int], tuple[int, int]]]

    @staticmethod
    def slots(count: int) -> list[str]:
        """Contents that no template writes by itself or takes apart, of characters that are for private use."""
        return [f"\ue000{index}\ue001" for index in range(count)]

    @staticmethod
    def of(written: str, text: str, spans: Sequence[Span], slots: Sequence[str]) -> "Skeleton | None":
        """From a proven rendering of slots; None where they do not stand in it once each, in order.

        Args:
            written: by the template.
            text: as it is trained on.
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
        return Skeleton(written=found, pieces=pieces, borders=borders) if len(borders) == len(spans) else None

    @property
    def rewrites(self) -> bool:
        """Whether more is trained than the template writes, before the last content."""
        return self.written[:-1] != self.pieces[:-1]

    def filled(self, written: str, contents: Sequence[str]) -> tuple[str, list[Span]] | None:
        """The text to train on and its assistant turns; None where the template wrote something not of this form."""
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
