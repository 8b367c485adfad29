"""Documents, joined and cut in chunks of one length."""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from tasks.data.kinds import TEXT, arrow_schema
from tasks.data.tokens.fate import Fate
from tasks.data.tokens.token_part import TokenPart

if TYPE_CHECKING:
    import pyarrow as pa

FILLS_NO_CHUNK = "fills_no_chunk"  # the reason for which a document is left out


def chunked(parts: Iterable[TokenPart], max_length: int) -> Iterator[TokenPart]:
    """Every token is trained, but for the end of the stream that fills no chunk.

    The document that this end begins in is counted as cut, the documents wholly inside it as dropped. The fates of
    documents come once it is known which they are.
    """
    import pyarrow as pa

    rest = pa.array([], pa.int32())
    ended, total = deque[tuple[Fate, int]](), 0  # documents, and where they end in the stream, which is so long by now
    for part in parts:
        for fate in part.fates:
            total += fate.length
            ended.append((fate, total))
        tokens = pa.concat_arrays([rest, part.columns.column("input_ids").flatten()])
        kept = len(tokens) // max_length * max_length
        rest, done = tokens[kept:], list[Fate]()
        while ended and ended[0][1] <= total - len(rest):
            fate, _ = ended.popleft()
            done.append(_trained(fate, fate.length))
        yield TokenPart(fates=done, columns=_chunks(tokens[:kept], max_length))
    # What is trained of a document ends where the rest begins.
    left = [_trained(fate, fate.length - min(fate.length, end - (total - len(rest)))) for fate, end in ended]
    yield TokenPart(fates=left, columns=_chunks(rest[:0], max_length))


def _trained(fate: Fate, tokens: int) -> Fate:
    fate.tokens = fate.trained = tokens
    fate.cut = 0 < tokens < fate.length
    fate.dropped = None if tokens else FILLS_NO_CHUNK
    return fate


def _chunks(tokens: "pa.Array", max_length: int) -> "pa.RecordBatch":
    import pyarrow as pa

    places = pa.array(range(0, len(tokens) + 1, max_length), pa.int32())
    chunks = pa.ListArray.from_arrays(places, tokens)
    return pa.RecordBatch.from_arrays([chunks, chunks], schema=arrow_schema(TEXT.tokens))
