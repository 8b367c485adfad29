"""Alpaca: ``{"instruction": ..., "input": ..., "output": ..., "system": ..., "history": [[question, answer], ...]}``.

Taori et al. 2023, github.com/tatsu-lab/stanford_alpaca; ``system`` and ``history`` as LLaMA-Factory added them.
"""

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import answer, system_turn
from tasks.data.formats.format import CanonicalRow, Fields, Format, having
from tasks.data.formats.tool_schemas import add_tools
from tasks.data.formats.turns import Message
from tasks.data.formats.values import is_nothing, named, required, text

_ACCEPTED = '{"instruction": "...", "input": "...", "output": "..."}'
_HISTORY = '[["question", "answer"], ...]'
_MAPPING = {
    "instruction": "the user's turn", "input": "the user's turn, below the instruction",
    "output": "the assistant's turn", "system": "the system's turn", "history": "earlier turns", "tools": "tools",
}  # fmt: skip


def _convert(fields: Fields) -> CanonicalRow:
    messages = system_turn(fields, _ACCEPTED)
    messages += _history(fields.get("history"))
    messages += [{"role": "user", "content": _request(fields)}]
    messages += answer(
        text(required(fields, "output", _ACCEPTED, missing="no answer"), "output", _ACCEPTED, empty="no answer"),
        "output", _ACCEPTED,
    )  # fmt: skip
    return add_tools({"messages": messages}, fields)


def _request(fields: Fields) -> str:
    """The instruction and the input below it, where there is one."""
    instruction, more = required(fields, "instruction", _ACCEPTED, missing="empty prompt"), fields.get("input")
    if is_nothing(more) or (isinstance(more, str) and more.isspace()):
        return text(instruction, "instruction", _ACCEPTED, empty="empty prompt")
    more = text(more, "input", _ACCEPTED, empty="empty prompt")
    # Some sets have all they ask in `input`.
    return more if instruction == "" else f"{text(instruction, 'instruction', _ACCEPTED, empty='empty prompt')}\n{more}"


def _history(value: object) -> list[Message]:
    if is_nothing(value):
        return []
    if not isinstance(value, list):
        raise BadRowError(f"history is {named(value)}", _HISTORY, "write a list of pairs")
    messages: list[Message] = []
    for index, pair in enumerate(value):
        if not isinstance(pair, list) or len(pair) != 2:
            found = f"a list of {len(pair)}" if isinstance(pair, list) else named(pair)
            raise BadRowError(f"history[{index}] is {found}", _HISTORY, "write a question and its answer")
        asked, answered = pair
        where = f"history[{index}]"
        messages.append({"role": "user", "content": text(asked, f"{where}[0]", _HISTORY, empty="empty prompt")})
        messages += answer(text(answered, f"{where}[1]", _HISTORY, empty="no answer"), f"{where}[1]", _HISTORY)
    return messages


ALPACA = Format(
    name="alpaca",
    kind=Kind.CONVERSATIONS,
    mapping=_MAPPING,
    recognize=having("instruction", "output"),
    convert=_convert,
)
