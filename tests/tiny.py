"""Tiny models, tokenizers and rows for tests: built in well under a second, nothing downloaded."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.data.kinds import kind_of_columns
from tasks.judgement.canary import (
    SPECIAL_TOKENS,
    WORDS,
    conversation_rows,
    preference_rows,
    prompt_rows,
    sentence,
    text_rows,
    unpaired_rows,
    write_policy,
    write_tokenizer,
)
from tasks.model.chat_template import CHATML

__all__ = [
    "CHATML", "SPECIAL_TOKENS", "WORDS", "conversation_rows", "preference_rows", "prompt_rows", "sentence", "text_rows",
    "unpaired_rows", "write_policy", "write_tokenizer",
]  # fmt: skip

Message = dict[str, str]
_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
TEXT_SCHEMA = pa.schema([("row_id", pa.string()), ("text", pa.string())])
CONVERSATIONS_SCHEMA = pa.schema([("row_id", pa.string()), ("messages", _MESSAGES)])
PREFERENCES_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("prompt", _MESSAGES),
        ("chosen", _MESSAGES),
        ("rejected", _MESSAGES),
        ("kind", pa.string()),
    ]
)
_SCHEMAS = (TEXT_SCHEMA, CONVERSATIONS_SCHEMA, PREFERENCES_SCHEMA)  # as an earlier version wrote them, without tools


def swap_tokens(directory: Path) -> None:
    """Two tokens of a tokenizer change places, as in a base that was made from scratch on an earlier corpus."""
    document = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (directory / "tokenizer.json").write_text(json.dumps(document))


def write_rows(directory: Path, train: Sequence[dict[str, object]], held_out: Sequence[dict[str, object]] = ()) -> Path:
    """Writes an artifact's ``train.parquet`` and ``held_out.parquet``; the schema follows from the first row."""
    schema = next((schema for schema in _SCHEMAS if set(schema.names) == set(train[0])), None)
    schema = schema or kind_of_columns(list(train[0])).schema
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(train), schema=schema), directory / "train.parquet")
    pq.write_table(pa.Table.from_pylist(list(held_out), schema=schema), directory / "held_out.parquet")
    return directory
