"""Formats of preferences: a prompt, and two answers of which one is better.

transcript_preference is Bai et al. 2022, arXiv:2204.05862, github.com/anthropics/hh-rlhf; implicit_preference is TRL's
``extract_prompt``.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import takewhile

from tasks.data.formats.turns import Message, answer, listed, prompt, prompt_turns, sharegpt_turns, spelling_of
from tasks.data.formats.values import (
    BadRowError,
    CanonicalRow,
    Fields,
    add_tools,
    named,
    optional_name,
    require_nothing_else,
    required,
    whole_characters,
)

_ROLES = {"Human": "user", "Assistant": "assistant", "System": "system"}  # of a transcript
_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant|System):")
_TRANSCRIPT = re.compile(r"\s*(?:Human:.*?\n\nAssistant:|System:.*?\n\nHuman:.*?\n\nAssistant:)", re.DOTALL)


def _paired(prompt: list[Message], chosen: list[Message], rejected: list[Message], fields: Fields) -> CanonicalRow:
    """A row of preferences; ``kind`` names what is wrong with the rejected answer, ``tools`` what it may call."""
    if chosen == rejected:
        raise BadRowError("chosen and rejected are the same", "nothing to prefer")
    kind = optional_name(fields.get("kind"), "kind")
    row: CanonicalRow = {"prompt": prompt, "chosen": chosen, "rejected": rejected, "kind": kind}
    if kind:
        whole_characters(kind, "kind")
    return add_tools(row, fields)


def _answers(fields: Fields) -> tuple[object, object]:
    return required(fields, "chosen", "no answer"), required(fields, "rejected", "no answer")


def preference(fields: Fields) -> CanonicalRow:
    """The answers may be whole conversations that begin with the prompt."""
    asked = required(fields, "prompt", "empty prompt")
    chosen, rejected = _answers(fields)
    if isinstance(chosen, list) and isinstance(rejected, list) and len(chosen) > 1:
        end = common_beginning(chosen, rejected)
        if end and _says(chosen[:end], asked):
            asked, chosen, rejected = chosen[:end], chosen[end:], rejected[end:]
    return _paired(prompt(asked, "prompt"), answer(chosen, "chosen"), answer(rejected, "rejected"), fields)


def _says(common: Sequence[object], asked: object) -> bool:
    """Whether a prompt says the same as the beginning of the answers."""
    if isinstance(asked, str):
        last = common[-1]
        return isinstance(last, dict) and last.get("role") == "user" and last.get("content") == asked
    return common == asked


def implicit_preference(fields: Fields) -> CanonicalRow:
    """What both answers begin with is the prompt."""
    chosen, rejected = _answers(fields)
    for name, value, other in (("chosen", chosen, rejected), ("rejected", rejected, chosen)):
        if not isinstance(value, str | list) or (isinstance(other, list) and not isinstance(value, list)):
            reason = "no answer" if value is None else "not of the format"
            raise BadRowError(f"{name} is {named(value)}", reason, remedy="write both alike")
    assert isinstance(chosen, str | list) and isinstance(rejected, str | list)
    end = common_beginning(chosen, rejected)
    if not end:
        found = "chosen and rejected have no common beginning, and there is no prompt"
        raise BadRowError(found, "empty prompt", remedy="add the prompt, or correct what both answer")
    asked = prompt(chosen[:end], "the common beginning")
    return _paired(asked, answer(chosen[end:], "chosen"), answer(rejected[end:], "rejected"), fields)


def common_beginning(chosen: Sequence[object], rejected: Sequence[object]) -> int:
    """How many turns, or characters, two answers begin with alike.

    Of an answer something is left, and a space before it is part of it.
    """
    shortest = max(min(len(chosen), len(rejected)) - 1, 0)
    end = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen[:shortest], rejected, strict=False)))
    return end - 1 if end and chosen[end] != rejected[end] and chosen[end - 1] == " " else end


def transcript_preference(fields: Fields) -> CanonicalRow:
    """Both transcripts are whole and differ in their last answer; or the prompt is one, and the answers are not."""
    chosen, rejected = (_transcript(fields, name) for name in ("chosen", "rejected"))
    if _is_transcript(fields.get("prompt")) and not (_is_transcript(chosen) or _is_transcript(rejected)):
        asked, pair = _prompt_of(str(fields["prompt"])), [_single(chosen, "chosen"), _single(rejected, "rejected")]
    else:
        (asked, good), (others, bad) = (_whole(chosen, "chosen"), _whole(rejected, "rejected"))
        _require_same_beginning(asked, others)
        _require_prompt(fields, asked)
        pair = [good, bad]
    left, right = (answer([turn], name) for turn, name in zip(pair, ("chosen", "rejected"), strict=True))
    return _paired(prompt_turns(asked, "the transcript"), left, right, fields)


def recognize_transcripts(fields: Fields) -> tuple[str, ...]:
    """The columns that make a row a transcript: what they say decides, since other formats have their names too."""
    names = [name for name in ("prompt", "chosen", "rejected") if _is_transcript(fields.get(name))]
    if not {"chosen", "rejected"} <= fields.keys() or names not in (
        ["chosen", "rejected"], ["prompt", "chosen", "rejected"], ["prompt"],
    ):  # fmt: skip
        return ()
    return (*(name for name in ("prompt", "chosen", "rejected") if name in fields), "turns of Human and Assistant")


def _is_transcript(value: object) -> bool:
    return isinstance(value, str) and bool(_TRANSCRIPT.match(value))


def _transcript(fields: Fields, name: str) -> str:
    value = required(fields, name, "no answer")
    if not isinstance(value, str):
        raise BadRowError(f"{name} is {named(value)}", "no answer" if value is None else "not text")
    return value


def _turns_of(transcript: str, what: str) -> list[Message]:
    """The turns of a transcript, without the white space around each."""
    parts = _TURN.split(transcript)
    if parts[0].strip() or len(parts) == 1:
        raise BadRowError(f"{what} does not begin with 'Human:'", "no transcript")
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    return [{"role": _ROLES[role], "content": said.strip()} for role, said in pairs]


def _whole(transcript: str, what: str) -> tuple[list[Message], Message]:
    """The turns before the last answer, and that one."""
    *before, last = _turns_of(transcript, what)
    if last["role"] != "assistant":
        raise BadRowError(f"{what} ends with a turn of the {last['role']}", "wrong role order")
    return before, last


def _prompt_of(transcript: str) -> list[Message]:
    """The turns of a prompt; its ``Assistant:`` at the end says where the answer begins."""
    turns = _turns_of(transcript, "prompt")
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _single(said: str, what: str) -> Message:
    """An answer that stands alone, with or without ``Assistant:`` before it."""
    turns = _turns_of(said if re.match(r"\s*Assistant:", said) else f"\n\nAssistant:{said}", what)
    if len(turns) > 1:
        raise BadRowError(f"{what} is followed by a turn of the {turns[1]['role']}", "wrong role order", "one answer")
    return turns[0]


def _require_same_beginning(chosen: list[Message], rejected: list[Message]) -> None:
    if chosen != rejected:
        pairs = zip(chosen, rejected, strict=False)
        place = next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(chosen), len(rejected)))
        raise BadRowError(
            f"chosen and rejected differ from turn {place + 1} on, before their last answers (chosen has "
            f"{len(chosen) + 1} turns, rejected {len(rejected) + 1})",
            "another beginning",
        )


def _require_prompt(fields: Fields, asked: list[Message]) -> None:
    """That a prompt beside whole transcripts says what they begin with."""
    given = fields.get("prompt")
    if given is None:
        return
    users = [turn["content"] for turn in asked if turn["role"] == "user"]
    is_begun = isinstance(given, str) and bool(re.match(r"\s*(?:Human|System):", given))
    if not (isinstance(given, str) and (given.strip() in users or (is_begun and _prompt_of(given) == asked))):
        found = "prompt is not what chosen and rejected begin with"
        raise BadRowError(found, "another beginning", remedy="remove the column or correct it")


def sharegpt_ranking(fields: Fields) -> CanonicalRow:
    """ShareGPT with two answers: ``conversations`` up to them, ``chosen`` and ``rejected`` as a turn each."""
    turns = sharegpt_turns(fields)
    asked = prompt_turns(turns, "conversations", spelling_of(turns))
    chosen, rejected = _answers(fields)
    left, right = answer(chosen, "chosen", spelling_of(chosen)), answer(rejected, "rejected", spelling_of(rejected))
    return _paired(asked, left, right, fields)


def openai_preference(fields: Fields) -> CanonicalRow:
    """As OpenAI's fine-tuning has them: ``input.messages``, ``preferred_output``, ``non_preferred_output``."""
    given = required(fields, "input", "empty prompt")
    if not isinstance(given, Mapping):
        raise BadRowError(f"input is {named(given)}")
    require_nothing_else(given, ("messages", "tools", "parallel_tool_calls"), "input")  # the last says nothing here
    asked = prompt_turns(required(given, "messages", "empty prompt"), "input.messages")
    chosen, rejected = (
        answer(required(fields, name, "no answer"), name) for name in ("preferred_output", "non_preferred_output")
    )
    return _paired(asked, chosen, rejected, {**fields, "tools": given.get("tools")})


def oumi_preference(fields: Fields) -> CanonicalRow:
    """As Oumi has them: ``messages`` up to the answers, ``chosen.messages``, ``rejected.messages``."""
    asked = prompt_turns(listed(required(fields, "messages", "empty prompt"), "messages"), "messages")
    return _paired(asked, _oumi_answer(fields, "chosen"), _oumi_answer(fields, "rejected"), fields)


def _oumi_answer(fields: Fields, name: str) -> list[Message]:
    """An answer as Oumi has it, or bare: a string, a turn, or a list of this one turn."""
    given = required(fields, name, "no answer")
    if not isinstance(given, Mapping) or "role" in given:
        return answer(given, name)
    require_nothing_else(given, ("messages", "conversation_id", "metadata"), name)  # the last two name an answer
    return answer(required(given, "messages", "no answer"), f"{name}.messages")
