"""The columns of prepared rows, per kind: what every data stage writes and every training stage reads."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lineage.artifact import Kind

if TYPE_CHECKING:
    import pyarrow as pa

Message = dict[str, object]
"""``role`` (system, user, assistant, tool) and ``content``; where they have one: ``name``, ``tool_call_id``, and
``tool_calls``, a list as OpenAI's chat has it, stored as JSON text since the arguments of each tool differ."""


def schema(kind: Kind) -> "pa.Schema":
    """Columns of a kind of prepared rows, ``row_id`` first."""
    import pyarrow as pa

    messages, text = pa.list_(pa.struct([(name, pa.string()) for name in _MESSAGE])), pa.string()
    columns = {
        Kind.TEXT: {"text": text},
        Kind.CONVERSATIONS: {"messages": messages, "tools": text},
        Kind.PREFERENCES: {
            "prompt": messages, "chosen": messages, "rejected": messages, "kind": text, "tools": text,
        },
        Kind.UNPAIRED: {"prompt": messages, "completion": messages, "label": pa.bool_(), "tools": text},
        Kind.PROMPTS: {"prompt": messages, "columns": text, "tools": text},
    }[kind]  # fmt: skip
    return pa.schema([("row_id", pa.string()), *columns.items()])


def texts_of(rows: "pa.RecordBatch") -> "pa.Array":
    """The text of each prepared row: all that is said in it, a line for each message; what it is called is left out."""
    import pyarrow.compute as pc

    said = [rows.column(name) for name in rows.schema.names if name not in _NAMES]
    texts = [_said(column) for column in said]
    return texts[0] if len(texts) == 1 else pc.binary_join_element_wise(*texts, "\n", null_handling="skip")


def _said(column: "pa.Array") -> "pa.Array":
    import pyarrow as pa
    import pyarrow.compute as pc

    if not pa.types.is_list(column.type):
        return column
    messages = column.flatten()
    lines = messages.field("content")
    calls = messages.field("tool_calls")
    if calls.null_count < len(calls):
        lines = pc.binary_join_element_wise(lines, calls, "\n", null_handling="skip")
    offsets = pc.subtract(column.offsets, column.offsets[0])  # a part of a longer array begins within it
    return pc.binary_join(pa.ListArray.from_arrays(offsets, lines), "\n")


_NAMES = ("row_id", "kind", "label", "tools", "columns")
_MESSAGE = ("role", "content", "name", "tool_calls", "tool_call_id")


def messages_of(stored: object) -> list[Message]:
    """Messages as a chat template takes them, from a column of messages."""
    assert isinstance(stored, list)
    return [_message(message) for message in stored]


def _message(stored: Mapping[str, str | None]) -> Message:
    message: Message = {name: value for name, value in stored.items() if value is not None}
    if "tool_calls" in message:
        message["tool_calls"] = json.loads(str(message["tool_calls"]))
    return message


def tools_of(row: Mapping[str, object]) -> list[dict[str, object]] | None:
    """The tools that a row's assistant may call, as a chat template takes them: JSON schemas of functions."""
    stored = row.get("tools")
    return json.loads(str(stored)) if stored is not None else None
