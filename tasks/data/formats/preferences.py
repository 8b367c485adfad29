"""What all formats of preferences come to: a prompt, and two answers of which one is better."""

from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.format import CanonicalRow, Fields
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.turns import Message
from tasks.data.formats.values import named, whole_characters


def preference(
    prompt: list[Message], chosen: list[Message], rejected: list[Message], fields: Fields, accepted: str
) -> CanonicalRow:
    """A row {prompt, chosen, rejected, kind, tools}.

    Args:
        fields: of the user: ``kind`` names what is wrong with the rejected answer, ``tools`` what it may call.
    """
    if chosen == rejected:
        raise BadRowError(
            "chosen and rejected are the same", accepted, "there is nothing to prefer: remove the row",
            reason="nothing to prefer",
        )  # fmt: skip
    kind = fields.get("kind")
    if not (kind is None or isinstance(kind, str)):
        raise BadRowError(
            f"kind is {named(kind)}", "a string or null", "it names what is wrong with the rejected answer",
            reason="not text",
        )  # fmt: skip
    return add_tools(
        {
            "prompt": prompt,
            "chosen": chosen,
            "rejected": rejected,
            "kind": whole_characters(kind, "kind") if kind else None,
        },
        fields,
    )
