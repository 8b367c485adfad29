"""The prompt that both answers of a pair begin with is TRL's."""

from hypothesis import given
from hypothesis import strategies as st
from trl.data_utils import extract_prompt

from tasks.data.formats.pairs import common_beginning


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@given(
    begin=st.text("ab ", max_size=4), chosen=st.text("ab ", min_size=1, max_size=4),
    rejected=st.text("ab ", min_size=1, max_size=4),
)  # fmt: skip
def test_the_beginning_is_that_of_trl(begin: str, chosen: str, rejected: str) -> None:
    pair = {"chosen": begin + chosen, "rejected": begin + rejected}
    end = common_beginning(pair["chosen"], pair["rejected"])
    if end == 0 or chosen == rejected:
        return  # refused by us; TRL counts from the end where nothing is common
    assert extract_prompt(pair) == {
        "prompt": pair["chosen"][:end], "chosen": pair["chosen"][end:], "rejected": pair["rejected"][end:]
    }  # fmt: skip


def test_the_beginning_of_conversations_is_that_of_trl() -> None:
    asked = [turn("user", "q"), turn("assistant", "a"), turn("user", " ")]
    pair = {"chosen": [*asked, turn("assistant", "x")], "rejected": [*asked, turn("assistant", "y")]}
    end = common_beginning(pair["chosen"], pair["rejected"])
    assert extract_prompt(pair)["prompt"] == pair["chosen"][:end] == asked
