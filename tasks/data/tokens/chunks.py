"""Documents, concatenated and cut into chunks of one length."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tasks.data.kinds import TEXT, arrow_schema
from tasks.data.tokens.row_outcome import RowOutcome, TokenPart

if TYPE_CHECKING:
    import pyarrow as pa

FILLS_NO_CHUNK = "fills_no_chunk"  # the reason why a document is dropped


def chunked(parts: Iterable[TokenPart], max_length: int) -> Iterator[TokenPart]:
    """Chunks of all tokens, except a rest at the end that fills no chunk.

    The document in which the rest starts counts as cut, documents wholly inside it as dropped. The outcome of a
    document comes with the part that decides it.
    """
    import pyarrow as pa

    rest = pa.array([], pa.int32())
    ended = deque[tuple[RowOutcome, int]]()  # documents, and where they end in the stream
    total = 0  # tokens of the stream so far
    for part in parts:
        for outcome in part.outcomes:
            total += outcome.length
            ended.append((outcome, total))
        tokens = pa.concat_arrays([rest, part.columns.column("input_ids").flatten()])
        kept = len(tokens) // max_length * max_length
        rest, done = tokens[kept:], list[RowOutcome]()
        while ended and ended[0][1] <= total - len(rest):
            outcome, _ = ended.popleft()
            done.append(_trained(outcome, outcome.length))
        yield TokenPart(outcomes=done, columns=_chunks(tokens[:kept], max_length))
    # A document is trained up to the start of the rest.
    start = total - len(rest)
    left = [_trained(outcome, outcome.length - min(outcome.length, end - start)) for outcome, end in ended]
    yield TokenPart(outcomes=left, columns=_chunks(rest[:0], max_length))


def _trained(outcome: RowOutcome, tokens: int) -> RowOutcome:
    outcome.tokens = outcome.trained = tokens
    outcome.cut = 0 < tokens < outcome.length
    outcome.dropped = None if tokens else FILLS_NO_CHUNK
    return outcome


def _chunks(tokens: "pa.Array", max_length: int) -> "pa.RecordBatch":
    import pyarrow as pa

    places = pa.array(range(0, len(tokens) + 1, max_length), pa.int32())
    chunks = pa.ListArray.from_arrays(places, tokens)
    return pa.RecordBatch.from_arrays([chunks, chunks], schema=arrow_schema(TEXT.tokens))
