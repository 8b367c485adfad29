"""Tokenizes a file of prepared rows of any size: part by part, in processes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import DataError
from tasks.data.batches import row_batches
from tasks.data.kinds import ROW_KINDS, arrow_schema
from tasks.data.ordered_pool import ordered_map
from tasks.data.tokens.account import MAX_NAMED, Account
from tasks.data.tokens.chunks import chunked
from tasks.data.tokens.length_policy import REFUSED
from tasks.data.tokens.row_outcome import RowOutcome, TokenPart
from tasks.data.tokens.tokenize_rows import RowTokenizer

if TYPE_CHECKING:
    import pyarrow as pa

TOKENS, OUTCOMES = "tokens.arrow", "rows.arrow"  # streams of Arrow, as `datasets.Dataset.from_file` reads them
_ROWS_PER_PART = 256
_PARTS_INLINE = 16  # fewer are done before a process has started
_OUTCOME = {
    "row_id": "string", "length": "int32", "tokens": "int32", "trained": "int32", "cut": "bool_",
    "prompt_cut": "bool_", "dropped": "string", "label": "bool_",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PartTokenizer:
    """Tokenizes a part of a file. Can be pickled."""

    tokenizer: RowTokenizer

    def __call__(self, rows: "pa.RecordBatch") -> TokenPart:
        import pyarrow as pa

        found = list(self.tokenizer(rows.to_pylist()))
        kept = [row for row in found if not row.outcome.dropped]
        examples = [{**columns, **row.rest} for row in kept for columns in (row.columns, *row.more)]
        tokens = ROW_KINDS[self.tokenizer.tokenization.kind].tokens
        schema = arrow_schema({name: tokens[name] for name in (*found[0].columns, *found[0].rest)})
        columns = [pa.array([row[name] for row in examples], schema.field(name).type) for name in schema.names]
        batch = pa.RecordBatch.from_arrays(columns, schema=schema)
        return TokenPart(outcomes=[row.outcome for row in found], columns=batch)


def write_tokens(rows: Path, tokenizer: RowTokenizer, workers: int, directory: Path) -> Account:
    """Writes the tokens of a Parquet file of rows, and the outcome of each row.

    Raises:
        DataError: a row is too long with ``too_long=refuse``, or cannot be rendered.
    """
    import pyarrow as pa

    kind = ROW_KINDS[tokenizer.tokenization.kind]
    account, too_long = Account(gets_loss=kind.trained), list[RowOutcome]()
    columns = arrow_schema(kind.tokens)
    outcomes = pa.schema([(name, getattr(pa, of)()) for name, of in _OUTCOME.items()])
    with (
        pa.ipc.new_stream(str(directory / TOKENS), columns) as token_file,
        pa.ipc.new_stream(str(directory / OUTCOMES), outcomes) as outcome_file,
    ):
        for part in _parts(rows, tokenizer, workers):
            token_file.write_batch(part.columns)
            outcome_file.write_batch(
                pa.RecordBatch.from_pylist(
                    [{name: getattr(outcome, name) for name in _OUTCOME} for outcome in part.outcomes], outcomes
                )
            )
            account.num_examples += len(part.columns)
            for outcome in part.outcomes:
                account.add(outcome)
                if outcome.dropped == REFUSED and len(too_long) < MAX_NAMED:
                    too_long.append(outcome)
    if too_long:
        raise _refusal(account, too_long, tokenizer.tokenization.max_length)
    return account


def _parts(rows: Path, tokenizer: RowTokenizer, workers: int) -> Iterator[TokenPart]:
    kind = ROW_KINDS[tokenizer.tokenization.kind]
    batches = row_batches(rows, _ROWS_PER_PART, kind.schema.names)
    parts = ordered_map(PartTokenizer(tokenizer=tokenizer), batches, workers, inline_below=_PARTS_INLINE)
    return chunked(parts, tokenizer.tokenization.max_length) if kind.joined else parts


def _refusal(account: Account, too_long: Sequence[RowOutcome], max_length: int) -> DataError:
    count = account.dropped[REFUSED].count
    more = f" and {count - len(too_long)} more" if count > len(too_long) else ""
    named = ", ".join(f"{outcome.row_id} ({outcome.length} tokens)" for outcome in too_long)
    return DataError(
        f"{count} of {account.num_rows} rows are longer than max_length={max_length}: {named}{more}; raise max_length, "
        "shorten the rows, or set too_long to cut_answer, cut_prompt or drop"
    )
