"""The tokens of prepared rows: made once, and used by every stage and trial that would make the same ones."""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lineage.cached import cached
from lineage.digest import DigestCache
from lineage.fingerprint import short
from tasks.chat_template import install_chat_template
from tasks.data.kinds import ROW_KINDS
from tasks.data.preparing.row_split import TRAIN
from tasks.data.tokens.account import Account
from tasks.data.tokens.packing import pack
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import RowTokenizer
from tasks.data.tokens.tokenized_rows import TokenizedRows
from tasks.data.tokens.tokens_key import tokens_key
from tasks.data.tokens.write_tokens import TOKENS, write_tokens
from tasks.train.models import tokenizer_of

if TYPE_CHECKING:
    from tasks.recipe import Input

logger = logging.getLogger(__name__)

_ACCOUNT = "account.json"
_NUM_SAMPLES = 3


def load_or_make(
    tokenization: Tokenization,
    rows: "Input",
    tokenizer_dir: Path,
    cache_dir: Path | None,
    workers: int,
    *,
    side: str = TRAIN,
) -> TokenizedRows:
    """The tokens of one side of prepared rows, from the cache where they are there.

    Args:
        tokenizer_dir: a model's directory, or one with its tokenizer alone.
        cache_dir: may be shared by processes and machines; None: the tokens are in an unnamed file until they are no
            longer used.
        workers: processes, for many rows.
    Raises:
        DataError: a row cannot be rendered, or is too long and shall be refused.
        ConfigError: the chat template cannot be used.
    """
    file = rows.path / side
    if cache_dir is None:
        with TemporaryDirectory() as scratch:
            _make(tokenization, file, tokenizer_dir, workers, Path(scratch))
            return _read(Path(scratch), tokenization)  # the file stays while it is mapped
    cache = cache_dir / "tokens"
    digest = DigestCache(cache / "digests.json").digest(file)
    entry = cache / short(tokens_key(tokenization, digest, tokenizer_dir))
    with cached(entry, lambda draft: _make(tokenization, file, tokenizer_dir, workers, draft)) as is_new:
        logger.info("rows_of=%s tokens=%s state=%s", rows.name, entry, "made" if is_new else "reused")
        return _read(entry, tokenization)


def _make(tokenization: Tokenization, rows: Path, tokenizer_dir: Path, workers: int, directory: Path) -> None:
    """Fills a directory with tokens, the outcomes of rows, and last the account."""
    from datasets import Dataset

    tokenizer = tokenizer_of(tokenizer_dir)
    kind = ROW_KINDS[tokenization.kind]
    if tokenization.chat_template and kind.chat:
        install_chat_template(tokenizer, tokenization.chat_template)
    account = write_tokens(rows, RowTokenizer.of(tokenization, tokenizer), workers, directory)
    examples = Dataset.from_file(str(directory / TOKENS))
    account.samples = [kind.sample(tokenizer, row) for row in examples.select(range(min(_NUM_SAMPLES, len(examples))))]
    if tokenization.packing and account.num_examples:
        account.packed, account.num_examples = True, pack(directory / TOKENS, tokenization.max_length)
    (directory / _ACCOUNT).write_text(account.to_json())


def _read(entry: Path, tokenization: Tokenization) -> TokenizedRows:
    from datasets import Dataset

    account = Account.from_json((entry / _ACCOUNT).read_text())
    kind = ROW_KINDS[tokenization.kind]
    return TokenizedRows(kind=kind, account=account, examples=Dataset.from_file(str(entry / TOKENS)))
