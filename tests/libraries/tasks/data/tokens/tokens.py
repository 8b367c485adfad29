"""What the tests of tokens share: rows as tokens, in memory or through files."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from lineage.artifact import Kind
from tasks.data.kinds import TokenRow, kind_of_columns
from tasks.data.tokens.tokenization import Packing, Tokenization, TooLong
from tasks.data.tokens.tokenize_rows import RowTokenizer, TokenizedRows, load_or_make
from tasks.method import Input
from tests import tiny


def tokenization(
    rows: Sequence[dict[str, object]],
    max_length: int,
    too_long: TooLong | None = None,
    max_prompt_length: int | None = None,
    packing: Packing | None = None,
) -> Tokenization:
    return Tokenization(
        kind=kind_of_columns(list(rows[0])).kind,
        max_length=max_length,
        too_long=too_long,
        max_prompt_length=max_prompt_length,
        packing=packing,
    )


def token_rows(
    rows: Sequence[dict[str, object]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int = 10**6,
    too_long: TooLong | None = None,
    max_prompt_length: int | None = None,
) -> list[TokenRow]:
    """Rows, each for itself."""
    options = tokenization(rows, max_length, too_long, max_prompt_length)
    return list(RowTokenizer.of(options, tokenizer)(rows))


def rows_input(path: Path) -> Input:
    return Input(name="corpus", kind=Kind.TEXT, fingerprint="f" * 64, path=path)


def tokenized(
    rows: Sequence[dict[str, object]],
    tokenizer_dir: Path,
    directory: Path,
    max_length: int,
    *,
    too_long: TooLong | None = None,
    max_prompt_length: int | None = None,
    packing: Packing | None = None,
    cache_dir: Path | None = None,
) -> TokenizedRows:
    """Rows through a file."""
    given = rows_input(tiny.write_rows(directory, rows))
    options = tokenization(rows, max_length, too_long, max_prompt_length, packing)
    return load_or_make(options, given, tokenizer_dir, cache_dir, workers=1)
