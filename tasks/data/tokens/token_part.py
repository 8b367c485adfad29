"""The tokens of some consecutive rows: what goes from process to process and into files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tasks.data.tokens.fate import Fate

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """The examples of the rows that are trained on, and the fates that are known by now."""

    fates: Sequence[Fate]
    columns: "pa.RecordBatch"
