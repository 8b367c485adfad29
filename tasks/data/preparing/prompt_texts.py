"""What prepared rows ask."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.data.kinds import kind_of_columns


def prompts_of(rows: pa.RecordBatch) -> pa.Array:
    """The prompt of each row: its turns up to the user's last, a line each, without the system's; of raw text all."""
    kind = kind_of_columns(rows.schema.names)
    turns = rows.column(kind.asked)
    if not kind.chat:
        return turns
    offsets = np.asarray(turns.offsets) - turns.offsets[0].as_py()  # a part of a longer array begins within it
    messages = turns.flatten()
    role, place = messages.field("role"), np.arange(len(messages))
    last_user = np.concatenate([[-1], np.maximum.accumulate(np.where(_is(role, "user"), place, -1))])
    is_asked = place <= np.repeat(last_user[offsets[1:]], np.diff(offsets))
    is_asked &= ~_is(role, "system")
    asked = np.concatenate([[0], np.cumsum(is_asked)])[offsets]
    lines = messages.field("content").filter(pa.array(is_asked))
    return pc.binary_join(pa.ListArray.from_arrays(pa.array(asked, pa.int32()), lines), "\n")


def _is(roles: pa.Array, role: str) -> np.ndarray:
    return np.asarray(pc.equal(roles, role))
