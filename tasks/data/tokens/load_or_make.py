"""The tokens of prepared rows: made once, and used by every stage and trial that would make the same ones."""

import hashlib
import json
import logging
import shutil
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from filelock import FileLock

from lineage.artifact import Kind
from lineage.digest import DigestCache, digest_file, digest_files, digest_of
from lineage.fingerprint import canonical_json, short
from tasks.chat_template import CHAT_TEMPLATES, install_chat_template
from tasks.data.preparing.row_split import TRAIN
from tasks.data.tokens.account import Account
from tasks.data.tokens.packing import pack
from tasks.data.tokens.samples import sample
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import RowTokenizer
from tasks.data.tokens.tokenized_rows import TokenizedRows
from tasks.data.tokens.write_tokens import FATES, TOKENS, write_tokens
from tasks.models import CHAT_TEMPLATE_FILE, TOKENIZER_FILES, tokenizer_of

if TYPE_CHECKING:
    from tasks.method import Input

logger = logging.getLogger(__name__)

TOKENS_VERSION = 1  # raise it when the same rows, tokenizer and options now give other tokens
_ACCOUNT, _SIZES = "account.json", "sizes.json"
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
            return _read(Path(scratch))  # the file stays while it is mapped
    cache = cache_dir / "tokens"
    cache.mkdir(parents=True, exist_ok=True)
    rows_digest = DigestCache(cache / "digests.json").digest(file)
    entry = cache / short(_key(tokenization, rows_digest, tokenizer_dir))
    with FileLock(f"{entry}.lock"):
        if not _is_whole(entry):
            draft = entry.with_suffix(".draft")
            for old in (entry, draft):
                shutil.rmtree(old, ignore_errors=True)
            draft.mkdir()
            _make(tokenization, file, tokenizer_dir, workers, draft)
            draft.rename(entry)
            logger.info("rows_of=%s tokens=%s state=made", rows.name, entry)
        else:
            logger.info("rows_of=%s tokens=%s state=reused", rows.name, entry)
        return _read(entry)


def _key(tokenization: Tokenization, rows_digest: str, tokenizer_dir: Path) -> str:
    """Of all that decides the tokens; the same before and after a stage has written its chat template into a model."""
    path = tokenizer_dir / CHAT_TEMPLATE_FILE
    if tokenization.kind == Kind.TEXT:
        template = ""
    elif tokenization.chat_template:
        template = CHAT_TEMPLATES[tokenization.chat_template]
    else:
        template = path.read_text() if path.exists() else ""  # else it is in a file of the tokenizer
    decides = {
        "rows": rows_digest,
        "tokenizer": _tokenizer_digest(tokenizer_dir),
        "template": template,
        "options": {**asdict(tokenization), "chat_template": None},
        "version": TOKENS_VERSION,
        "tokenizers": version("tokenizers"),
    }
    return hashlib.sha256(canonical_json(decides).encode()).hexdigest()


def _tokenizer_digest(directory: Path) -> str:
    digests = {}
    for name in TOKENIZER_FILES:
        path = directory / name
        if path.is_dir():
            digests[name] = digest_of(digest_files(path))
        elif path.exists() and name != CHAT_TEMPLATE_FILE:
            digests[name] = digest_file(path)
    return digest_of(digests)


def _make(tokenization: Tokenization, rows: Path, tokenizer_dir: Path, workers: int, directory: Path) -> None:
    """Fills a directory with tokens, the fates of rows, and last the account."""
    from datasets import Dataset

    tokenizer = tokenizer_of(tokenizer_dir)
    if tokenization.chat_template and tokenization.kind != Kind.TEXT:
        install_chat_template(tokenizer, tokenization.chat_template)
    account = write_tokens(rows, RowTokenizer.of(tokenization, tokenizer), workers, directory)
    examples = Dataset.from_file(str(directory / TOKENS))
    account.samples = [sample(tokenizer, row) for row in examples.select(range(min(_NUM_SAMPLES, len(examples))))]
    if tokenization.packing and account.num_examples:
        account.packed, account.num_examples = True, pack(directory / TOKENS, tokenization.max_length)
    (directory / _ACCOUNT).write_text(account.to_json())
    sizes = {name: (directory / name).stat().st_size for name in (TOKENS, FATES, _ACCOUNT)}
    (directory / _SIZES).write_text(json.dumps(sizes))


def _is_whole(entry: Path) -> bool:
    """Whether an entry is there and every file of it as long as it was."""
    try:
        sizes: dict[str, int] = json.loads((entry / _SIZES).read_text())
        return all((entry / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _read(entry: Path) -> TokenizedRows:
    from datasets import Dataset

    account = Account.from_json((entry / _ACCOUNT).read_text())
    return TokenizedRows(account=account, examples=Dataset.from_file(str(entry / TOKENS)))
