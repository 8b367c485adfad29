"""How rows are named and told apart, and the files of the sides that they are split into."""

import hashlib
import json

TRAIN, HELD_OUT = "train.parquet", "held_out.parquet"
RESTING = "resting.parquet"  # rows that models were trained on before, and that wait for another turn

_CANONICAL = json.JSONEncoder(sort_keys=True, ensure_ascii=False)


def canonical(value: object) -> str:
    """One text for equal rows."""
    return _CANONICAL.encode(value)


def content_hash(text: str) -> int:
    """64 bits of a row's canonical text; in hexadecimal digits they are the row's id."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8])


def key_share(key: str, seed: int) -> int:
    """Where in [0, 2^64) the rows of one key lie, whatever other rows there are: the lowest are held out."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{key}".encode()).digest()[:8])
