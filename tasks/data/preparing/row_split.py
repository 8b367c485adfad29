"""The identity of rows, and the files of the splits."""

import hashlib
import json

from tasks.data.formats.values import CanonicalRow

TRAIN, HELD_OUT = "train.parquet", "held_out.parquet"
RESTING = "resting.parquet"  # rows that models were trained on before, and that wait for another turn

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


def canonical(value: object) -> str:
    """One text for equal rows."""
    return _CANONICAL.encode(value)


def content_hash(text: str) -> int:
    """64 bits of a row's canonical text; in hexadecimal digits they are the row's id."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def key_of(row: CanonicalRow) -> str:
    """What a row is held out together with, if it does not say: all answers to one prompt, else what is equal to it.

    An answer to a prompt that was seen in training measures little.
    """
    if "prompt" in row:
        return canonical(row["prompt"])
    turns = row.get("messages")
    if isinstance(turns, list):
        last_answer = max((place for place, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
        if any(turn["role"] == "user" for turn in turns[:last_answer]):
            return canonical(turns[:last_answer])
    return canonical(row)


def key_share(key: str, seed: int) -> int:
    """Where in [0, 2^64) the rows of one key lie, whatever other rows there are: the lowest are held out."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8])
