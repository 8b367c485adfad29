"""The name of tokens: everything that decides them, and nothing else."""

import hashlib
import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from lineage.digest import digest_file, digest_files, digest_of
from lineage.fingerprint import canonical_json
from lineage.model_files import TOKENIZER_FILES
from tasks.chat_template import template_text
from tasks.data.kinds import ROW_KINDS
from tasks.data.tokens.tokenization import Tokenization
from tasks.train.models import CHAT_TEMPLATE_FILE

TOKENS_VERSION = 3  # raise it when the same rows, tokenizer and options now give other tokens
_LIBRARIES = ("fastokens", "jinja2", "tokenizers", "transformers")  # that render and encode
_VOCABULARIES = ("*.model", "*.tiktoken", "*vocab*", "*merges*", "tekken.json")  # beside the files of ours


def tokens_key(tokenization: Tokenization, rows_digest: str, tokenizer_dir: Path) -> str:
    """Digest of all that decides the tokens; the same before and after a stage has written its chat template into a
    model."""
    path = tokenizer_dir / CHAT_TEMPLATE_FILE
    if not ROW_KINDS[tokenization.kind].chat:
        template = ""
    elif tokenization.chat_template:
        template = template_text(tokenization.chat_template)
    else:
        template = path.read_text() if path.exists() else ""  # else it is in a file of the tokenizer
    decides = {
        "rows": rows_digest,
        "tokenizer": _tokenizer_digest(tokenizer_dir),
        "model_type": _model_type(tokenizer_dir),
        "template": template,
        "options": {**asdict(tokenization), "chat_template": None},
        "version": TOKENS_VERSION,
        "libraries": {name: version(name) for name in (*_LIBRARIES, *(("trl",) if tokenization.packing else ()))},
    }
    return hashlib.sha256(canonical_json(decides).encode()).hexdigest()


def _tokenizer_digest(directory: Path) -> str:
    """Of the files that make a tokenizer: a stage's output has the same, beside weights and settings of its own."""
    others = (path.name for pattern in _VOCABULARIES for path in directory.glob(pattern))
    digests = {}
    for name in sorted({*TOKENIZER_FILES, *others} - {CHAT_TEMPLATE_FILE}):
        path = directory / name
        if path.is_dir():
            digests[name] = digest_of(digest_files(path))
        elif path.exists():
            digests[name] = digest_file(path)
    return digest_of(digests)


def _model_type(directory: Path) -> str | None:
    """What the class of a tokenizer is chosen by, where its own files leave that open."""
    path = directory / "config.json"
    return json.loads(path.read_text()).get("model_type") if path.exists() else None
