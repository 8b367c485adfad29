"""What is odd in a row that is used."""

import pytest

from tasks.data.preparing.convert_rows import remarks

CONTROL, NUL, REPLACED = "control characters", "NUL characters", "replacement characters U+FFFD"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("plain\ttext\r\n, Grüße 世界 \u00a0\u200d", ()),
        ("a\x07", (CONTROL,)),
        ("a\x7f", (CONTROL,)),
        ("a\0", (NUL,)),
        ("a\0\x1b\ufffd", (NUL, CONTROL, REPLACED)),
        ("na\ufffdve", (REPLACED,)),
        ("a\x07\x85", (CONTROL,)),
        ("a\ufeffb", ("byte order marks U+FEFF",)),
        ("\u202eab", ("bidirectional controls",)),
        ("\u2066ab\u2069", ("bidirectional controls",)),
    ],
)
def test_odd_characters_are_remarked_wherever_they_are(text: str, found: tuple[str, ...]) -> None:
    asked, answered = {"role": "user", "content": "q"}, {"role": "assistant", "content": text}
    assert remarks({"text": text}) == found
    assert remarks({"messages": [asked, answered], "tools": "[]"}) == found
    assert remarks({"prompt": [asked], "chosen": [asked], "rejected": [answered], "kind": None}) == found
    assert remarks({"prompt": [asked], "completion": [answered], "label": True}) == found


@pytest.mark.parametrize("code", [*range(1, 9), 11, 12, *range(14, 32), *range(127, 160)])
def test_every_control_character_is_remarked(code: int) -> None:
    assert remarks({"text": f"a{chr(code)}b"}) == (CONTROL,)


def test_a_conversation_whose_last_turn_nobody_answers_is_remarked() -> None:
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    assert remarks({"messages": turns}) == ("no answer to the last turn",)
    assert remarks({"messages": turns[:2]}) == ()
