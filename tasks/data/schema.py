"""Messages, tools and texts in the columns of prepared rows."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tasks.data.kinds import kind_of_columns

if TYPE_CHECKING:
    import pyarrow as pa

Message = dict[str, object]
"""``role`` (system, user, assistant, tool) and ``content``; where they have one: ``name``, ``tool_call_id``, and
``tool_calls``, a list as OpenAI's chat has it, stored as JSON text since the arguments of each tool differ."""


def texts_of(rows: "pa.RecordBatch") -> "pa.Array":
    """The text of each prepared row: all that is said in it, a line for each message; what it is called is left out."""
    import pyarrow.compute as pc

    said = [rows.column(name) for name in kind_of_columns(rows.schema.names).said]
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


def columns_of(row: Mapping[str, object]) -> dict[str, object]:
    """The columns of a row of prompts that reward functions get: its further ones, and its ``tools``."""
    columns: dict[str, object] = json.loads(str(row.get("columns") or "{}"))
    tools = tools_of(row)
    return {**columns, "tools": tools} if tools else columns
