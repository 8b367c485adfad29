"""The verifiable task of the quickstart."""

from tasks.quickstart import sorting


def test_problems_are_different_and_no_prompt_was_demonstrated() -> None:
    shown = {str(row["messages"][0]["content"]): row["messages"][1]["content"] for row in sorting.demonstrations()}  # type: ignore[index]
    asked = {str(row["prompt"]): row["answer"] for row in sorting.prompts()}
    assert len(shown) == len(asked) == 6000 and not shown.keys() & asked.keys()
    for problem, answer in {**shown, **asked}.items():
        assert len(problem) == 5 and list(answer) == sorted(problem)
    assert list(sorting.prompts()) == list(sorting.prompts())
    assert sorting.answer("90210") == "00129"
