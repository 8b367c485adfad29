"""Preferences written as transcripts: ``{"chosen": "\\n\\nHuman: ...\\n\\nAssistant: ...", "rejected": ...}``.

Bai et al. 2022, arXiv:2204.05862, github.com/anthropics/hh-rlhf. Both transcripts are whole and differ in their last
answer; or the transcript is in ``prompt``, up to ``Assistant:``, and the answers stand alone.
"""

import re

from lineage.artifact import Kind
from tasks.data.formats.bad_row import BadRowError
from tasks.data.formats.conversations import answer, prompt_turns
from tasks.data.formats.format import CanonicalRow, Fields, Format
from tasks.data.formats.preferences import preference
from tasks.data.formats.turns import Message
from tasks.data.formats.values import named, required

_ACCEPTED = (
    r'{"chosen": "\n\nHuman: ...\n\nAssistant: ...", "rejected": "\n\nHuman: ...\n\nAssistant: ..."} with one '
    "beginning and two last answers"
)
_MAPPING = {
    "prompt": "the turns before the answers", "chosen": "prompt and chosen", "rejected": "prompt and rejected",
    "kind": "kind", "tools": "tools",
}  # fmt: skip
_TURNS = "turns of Human and Assistant"  # what makes texts transcripts, beside the names of their columns
_ROLES = {"Human": "user", "Assistant": "assistant", "System": "system"}
_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant|System):")
_TRANSCRIPT = re.compile(r"\s*(?:Human:.*?\n\nAssistant:|System:.*?\n\nHuman:.*?\n\nAssistant:)", re.DOTALL)


def _recognize(fields: Fields) -> tuple[str, ...]:
    names = [name for name in ("prompt", "chosen", "rejected") if _is_transcript(fields.get(name))]
    if not {"chosen", "rejected"} <= fields.keys() or names not in (
        ["chosen", "rejected"], ["prompt", "chosen", "rejected"], ["prompt"],
    ):  # fmt: skip
        return ()
    return (*(name for name in ("prompt", "chosen", "rejected") if name in fields), _TURNS)


def _is_transcript(value: object) -> bool:
    return isinstance(value, str) and bool(_TRANSCRIPT.match(value))


def _convert(fields: Fields) -> CanonicalRow:
    chosen, rejected = (_text(fields, name) for name in ("chosen", "rejected"))
    if _is_transcript(fields.get("prompt")) and not (_is_transcript(chosen) or _is_transcript(rejected)):
        asked = _asked(str(fields["prompt"]))
        sides = [_single(chosen, "chosen"), _single(rejected, "rejected")]
    else:
        (asked, good), (others, bad) = (_whole(chosen, "chosen"), _whole(rejected, "rejected"))
        _require_same_beginning(asked, others)
        _require_prompt(fields, asked)
        sides = [good, bad]
    left, right = (answer([turn], name, _ACCEPTED) for turn, name in zip(sides, ("chosen", "rejected"), strict=True))
    return preference(prompt_turns(asked, "the transcript", _ACCEPTED), left, right, fields, _ACCEPTED)


def _text(fields: Fields, name: str) -> str:
    value = required(fields, name, _ACCEPTED, missing="no answer")
    if not isinstance(value, str):
        raise BadRowError(
            f"{name} is {named(value)}", _ACCEPTED, "write a transcript",
            reason="no answer" if value is None else "not text",
        )  # fmt: skip
    return value


def turns_of(transcript: str, what: str) -> list[Message]:
    """The turns of a transcript, without the white space around each.

    Raises:
        BadRowError: something stands before the first.
    """
    parts = _TURN.split(transcript)
    if parts[0].strip() or len(parts) == 1:
        raise BadRowError(
            f"{what} does not begin with 'Human:'", _ACCEPTED, "write the whole transcript, or remove the row",
            reason="no transcript",
        )  # fmt: skip
    return [
        {"role": _ROLES[role], "content": said.strip()} for role, said in zip(parts[1::2], parts[2::2], strict=True)
    ]


def _whole(transcript: str, what: str) -> tuple[list[Message], Message]:
    """The turns before the last answer, and that one."""
    *before, last = turns_of(transcript, what)
    if last["role"] != "assistant":
        raise BadRowError(
            f"{what} ends with a turn of the {last['role']}", _ACCEPTED, "end it with the answer, or remove the row",
            reason="wrong role order",
        )  # fmt: skip
    return before, last


def _asked(transcript: str) -> list[Message]:
    """The turns of a prompt; its ``Assistant:`` at the end says where the answer begins."""
    turns = turns_of(transcript, "prompt")
    return turns[:-1] if turns[-1] == {"role": "assistant", "content": ""} else turns


def _single(said: str, what: str) -> Message:
    """An answer that stands alone, with or without ``Assistant:`` before it."""
    turns = turns_of(said if re.match(r"\s*Assistant:", said) else f"\n\nAssistant:{said}", what)
    if len(turns) > 1:
        raise BadRowError(
            f"{what} is followed by a turn of the {turns[1]['role']}", "one answer", "cut it there, or remove the row",
            reason="wrong role order",
        )  # fmt: skip
    return turns[0]


def _require_same_beginning(chosen: list[Message], rejected: list[Message]) -> None:
    if chosen == rejected:
        return
    pairs = zip(chosen, rejected, strict=False)
    place = next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(chosen), len(rejected)))
    raise BadRowError(
        f"chosen and rejected differ from turn {place + 1} on, before their last answers (chosen has {len(chosen) + 1} "
        f"turns, rejected {len(rejected) + 1})",
        _ACCEPTED, "cut both after the first answer in which they differ, or remove the row",
        reason="another beginning",
    )  # fmt: skip


def _require_prompt(fields: Fields, asked: list[Message]) -> None:
    """That a prompt beside whole transcripts says what they begin with."""
    prompt = fields.get("prompt")
    if prompt is None:
        return
    users = [turn["content"] for turn in asked if turn["role"] == "user"]
    same = isinstance(prompt, str) and (prompt.strip() in users or (_is_begun(prompt) and _asked(prompt) == asked))
    if not same:
        raise BadRowError(
            "prompt is not what chosen and rejected begin with", _ACCEPTED, "remove the column or mend it",
            reason="another beginning",
        )  # fmt: skip


def _is_begun(text: str) -> bool:
    return bool(re.match(r"\s*(?:Human|System):", text))


TRANSCRIPT_PREFERENCE = Format(
    name="transcript_preference",
    kind=Kind.PREFERENCES,
    mapping=_MAPPING,
    recognize=_recognize,
    convert=_convert,
)
