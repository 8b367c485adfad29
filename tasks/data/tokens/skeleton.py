"""What a chat template writes around contents, learned once for each sequence of roles.

Proving the borders of n messages from the template takes n renderings. Here one row of a sequence of roles is proven,
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
        pieces: what stands before, between and after the contents: one more than there are messages.
        borders: of each assistant turn, where it begins and ends: (piece, place in that piece).
    """

    pieces: Sequence[str]
    borders: Sequence[tuple[tuple[int, int], tuple[int, int]]]

    @staticmethod
    def slots(count: int) -> list[str]:
        """Contents that no template writes by itself or takes apart, of characters that are for private use."""
        return [f"\ue000{index}\ue001" for index in range(count)]

    @staticmethod
    def of(text: str, spans: Sequence[Span], slots: Sequence[str]) -> "Skeleton | None":
        """From a proven rendering of slots; None where they do not stand in it once each, in order."""
        pieces, starts, place = [], [], 0
        for slot in slots:
            found = text.find(slot, place)
            if found < 0 or text.count(slot) != 1:
                return None
            pieces.append(text[place:found])
            starts.append(place)
            place = found + len(slot)
        pieces.append(text[place:])
        starts.append(place)

        def border(at: int) -> tuple[int, int] | None:
            for piece, start in enumerate(starts):
                if start <= at <= start + len(pieces[piece]):
                    return piece, at - start
            return None  # within a content

        borders = [(begin, end) for span in spans if (begin := border(span[0])) and (end := border(span[1]))]
        return Skeleton(pieces=pieces, borders=borders) if len(borders) == len(spans) else None

    def spans(self, text: str, contents: Sequence[str]) -> list[Span] | None:
        """The assistant turns of a rendering; None where it is not of this form."""
        starts, place = [], 0
        for piece, content in zip(self.pieces, contents, strict=False):
            starts.append(place)
            place += len(piece)
            if not text.startswith(piece, starts[-1]) or not text.startswith(content, place):
                return None
            place += len(content)
        starts.append(place)
        if text[place:] != self.pieces[-1]:
            return None
        return [(starts[begin[0]] + begin[1], starts[end[0]] + end[1]) for begin, end in self.borders]
