"""The rows of the quickstart."""

import base64
import io
from itertools import islice
from typing import Any

from PIL import Image

from tasks.evaluate.measured import is_one_sentence
from tasks.quickstart import quickstart_rows, shapes, sorting


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


def test_pictures_show_what_their_answers_say() -> None:
    for row in islice(shapes.rows(), 60):
        (turn, answered), (image,) = row["messages"], row["images"]  # type: ignore[misc]
        with Image.open(io.BytesIO(base64.b64decode(image.partition(",")[2]))) as picture:
            colours = {colour for _, colour in picture.getcolors()}
            assert picture.size == (shapes.SIZE, shapes.SIZE)
            columns = {picture.crop((left, 0, left + 1, shapes.SIZE)).tobytes() for left in range(shapes.SIZE)}
        answer, question = answered["content"], turn["content"].removeprefix("<image>")
        assert answer in shapes.ANSWERS[question] and len(colours) == (4 if question == shapes.QUESTIONS[3] else 2)
        if question == shapes.QUESTIONS[0]:
            assert shapes.COLOURS[answer] in colours
        if question == shapes.QUESTIONS[3]:
            assert bytes(shapes.COLOURS[answer]) in min(columns, key=lambda column: column.count(b"\xff\xff\xff"))
    assert list(islice(shapes.rows(), 3)) == list(islice(shapes.rows(), 3))


def test_pairs_are_about_pictures_on_which_nothing_else_is_trained() -> None:
    trained = {image for row in shapes.rows() for image in row["images"]}  # type: ignore[attr-defined]
    asked = [image for row in shapes.pairs() for image in row["images"]]  # type: ignore[attr-defined]
    assert len(asked) == 1500 and not trained & {*asked}


def test_the_rejected_answer_to_a_picture_is_a_wrong_one() -> None:
    for row in islice(shapes.pairs(), 60):
        assert row["chosen"] != row["rejected"]
        question = str(row["prompt"]).removeprefix("<image>")
        assert {row["chosen"], row["rejected"]} <= {*shapes.ANSWERS[question]}
