"""How long rows are: what ``max_length`` is chosen by."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tasks.data.batches import row_batches
from tasks.data.kinds import kind_of_columns
from tasks.data.preparing.report import Lengths
from tasks.data.schema import messages_of, texts_of, tools_of
from tasks.data.tokens.template import Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_COUNTED = 20_000  # rows whose tokens are counted: the 99th percentile is then known to a tenth of a percent

_NUM_BINS = 40
_WIDTHS = [digit * 10**zeros for zeros in range(19) for digit in (1, 2, 5)]  # of a bin: borders that are easy to read
_LONG_TAIL = 20  # times the median: a longer row makes equal bins useless
_STEP = 64  # of a suggested length
_ROWS_PER_READ = 1000
_ROWS_AT_ONCE = 32  # twice as fast as a thousand


def measure(lengths: npt.NDArray[np.int64], *, tokenizer: str | None = None) -> Lengths:
    """What is worth knowing of the lengths of rows, in bytes of UTF-8 or in a tokenizer's tokens.

    Packing is suggested where the mean row fills less than half of the suggested length.

    Args:
        lengths: of one row at least.
    """
    p50, p95, p99 = (int(value) for value in np.quantile(lengths, [0.5, 0.95, 0.99], method="inverted_cdf"))
    edges = _edges(int(lengths.min()), p50, int(lengths.max()))
    suggested = max(_STEP, -(-p95 // _STEP) * _STEP)
    return Lengths(
        unit="tokens" if tokenizer else "bytes",
        tokenizer=tokenizer,
        rows=len(lengths),
        p50=p50,
        p95=p95,
        p99=p99,
        max=int(lengths.max()),
        edges=edges,
        counts=np.histogram(lengths, edges)[0].tolist(),
        suggested_max_length=suggested if tokenizer else None,
        suggests_packing=bool(lengths.mean() < suggested / 2) if tokenizer else None,
    )


def _edges(shortest: int, median: int, longest: int) -> list[int]:
    """Borders of bins of one width; of one ratio, where a few rows are far longer than the others."""
    if longest > _LONG_TAIL * max(median, 1):
        edges = np.geomspace(max(shortest, 1), longest + 1, _NUM_BINS + 1).astype(np.int64)
        return sorted({min(shortest, 1), *edges.tolist()[1:-1], longest + 1})
    width = next(width for width in _WIDTHS if width * (_NUM_BINS - 1) > longest - shortest)
    return list(range(shortest // width * width, longest + width + 1, width))


def byte_lengths(files: Sequence[Path]) -> npt.NDArray[np.int64]:
    """Bytes of what is said in prepared rows."""
    found = [pc.binary_length(texts_of(rows)) for file in files for rows in row_batches(file, _ROWS_PER_READ)]
    return np.concatenate([np.empty(0, dtype=np.int64), *map(np.asarray, found)])


def token_lengths(files: Sequence[Path], tokenizer: "PreTrainedTokenizerBase") -> npt.NDArray[np.int64]:
    """Tokens of prepared rows as they are trained on; of a pair with its longer answer.

    Of many rows only about ``MAX_COUNTED`` are counted, chosen by their ids.

    Raises:
        DataError: the chat template refuses a row.
    """
    template = Template.of(tokenizer) if tokenizer.chat_template else None
    lengths: list[int] = []
    for rows in _sampled(files):
        if template:
            rendered = [_rendered(row, template) for row in rows.to_pylist()]
        else:
            rendered = [[text] for text in texts_of(rows).to_pylist()]
        counted = tokenizer([text for texts in rendered for text in texts], add_special_tokens=False)
        counts = map(len, counted["input_ids"])
        lengths += [max(next(counts) for _ in texts) for texts in rendered]
    return np.array(lengths, dtype=np.int64)


def _sampled(files: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    share = MAX_COUNTED / max(sum(pq.read_metadata(file).num_rows for file in files), 1)
    for batch in (batch for file in files for batch in row_batches(file, _ROWS_PER_READ)):
        if share < 1:
            # Ids begin with a hash of the row in hexadecimal.
            batch = batch.filter(pc.less(batch.column("row_id"), f"{int(share * 16**8):08x}"))
        yield from (batch.slice(start, _ROWS_AT_ONCE) for start in range(0, len(batch), _ROWS_AT_ONCE))


def _rendered(row: Mapping[str, object], template: Template) -> list[str]:
    """The texts that are tokenized for a row: two of a pair, else one."""
    kind = kind_of_columns(list(row))
    if not kind.chat:
        return [str(row[kind.asked])]
    tools, row_id, asked = tools_of(row), str(row["row_id"]), messages_of(row[kind.asked])
    if not kind.trained:
        return template.render([asked], tools, row_id, prompt=True)
    answers = [messages_of(row[name]) for name in kind.answers]
    return template.render([[*asked, *answer] for answer in answers or [[]]], tools, row_id)
