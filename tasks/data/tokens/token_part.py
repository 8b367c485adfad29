"""The tokens of some consecutive rows: what goes from process to process and into files."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.data.tokens.fate import Fate

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """Tokens of the rows that are trained on, a list for each row and column, and the fates that are known by now."""

    fates: Sequence[Fate]
    columns: "pa.RecordBatch"


def token_schema(names: Iterable[str]) -> "pa.Schema":
    """Columns of lists of tokens."""
    import pyarrow as pa

    return pa.schema([(name, pa.list_(pa.int32())) for name in names])
