"""The rows of the quickstart."""

from typing import Any

from tasks.evaluate.measured import is_one_sentence
from tasks.quickstart import quickstart_rows, sorting


def test_every_answer_is_one_sentence_about_the_function_that_is_asked_about() -> None:
    rows: list[Any] = list(quickstart_rows("sentences"))
    for row in rows:
        question, answer = (message["content"] for message in row["messages"])
        name = question.split("`")[1]
        assert answer.startswith(f"`{name}` ") and is_one_sentence(answer), answer
    assert len({row["messages"][0]["content"] for row in rows}) == len(rows)


def test_a_summary_is_put_into_the_third_person() -> None:
    rows: Any = quickstart_rows("sentences")
    answers = {row["messages"][0]["content"].split("`")[1]: row["messages"][1]["content"] for row in rows}
    assert answers["abs"] == "`abs` returns the absolute value of the argument."
    assert answers["list.pop"] == "`list.pop` removes and returns item at index (default last)."
    assert answers["exec"] == "`exec` executes the given source in the context of globals and locals."


def test_problems_are_different_and_no_prompt_was_demonstrated() -> None:
    shown = {str(row["messages"][0]["content"]): row["messages"][1]["content"] for row in sorting.demonstrations()}  # type: ignore[index]
    asked = {str(row["prompt"]): row["answer"] for row in sorting.prompts()}
    assert len(shown) == len(asked) == 6000 and not shown.keys() & asked.keys()
    for problem, answer in {**shown, **asked}.items():
        assert len(problem) == 5 and list(answer) == sorted(problem)
    assert list(sorting.prompts()) == list(sorting.prompts())
    assert sorting.answer("90210") == "00129"
