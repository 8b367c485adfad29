"""The quickstart's rows: the same everywhere, in equal parts, and with nothing held out that is in training."""

import inspect
import pydoc
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from lineage.artifact import Source
from lineage.errors import ConfigError
from tasks.data.reading.chunk import Row
from tasks.data.reading.read import read_chunks
from tasks.quickstart import ROWS, QuickstartRow, quickstart_rows
from tasks.quickstart.documentation import documents
from tasks.quickstart.instructions import prompts
from tasks.quickstart.preferences import FAULTS
from tasks.quickstart.questions import TOPICS, Question, asked, questions, usages


@cache
def rows_of(name: str) -> list[QuickstartRow]:
    return list(quickstart_rows(name))


def test_rows_name_no_address_and_no_path_of_this_machine() -> None:
    for name in ROWS:
        text = "".join(str(row) for row in rows_of(name))
        assert " at 0x" not in text
        for place in (sys.base_prefix, sys.prefix, sys.executable):
            assert place not in text
        assert str(Path.home()) not in text


def test_there_are_thousands_of_rows_and_no_text_twice() -> None:
    rows = {name: [str({**row, "group": None}) for row in rows_of(name)] for name in ROWS}
    least = {"sentences": 1500, "few_instructions": 100}
    assert all(len(found) >= least.get(name, 3000) for name, found in rows.items())
    assert all(len(set(found)) == len(found) for found in rows.values())
    assert len({document.text for document in documents()}) == len(documents())


def test_a_function_is_owned_by_one_module_whatever_it_is_imported_from() -> None:
    found = {document.name: document.group for document in documents()}
    assert found["os.path.join"] == found["os.listdir"] == "os"
    assert found["str.join"] == found["len"] == "builtins"
    assert not any(name.startswith(("posixpath.", "posix.", "ntpath.", "_")) for name in found)


def test_no_function_is_asked_about_in_the_rows_of_another_module() -> None:
    owner = {usage.name: usage.group for usage in usages()}
    for name, column in (("instructions", "messages"), ("preferences", "prompt")):
        for row in rows_of(name):
            assert owner[asked_about(str(row[column]))] == row["group"]


def asked_about(question: str) -> str:
    """The name before the only bracket that follows one."""
    (name,) = re.findall(r"`([\w.]+)\(", question)
    return str(name)


def test_no_question_of_the_instructions_is_asked_in_the_preferences() -> None:
    instructions = [row["messages"][0]["content"] for row in rows_of("instructions")]  # type: ignore[index]
    preferences = [row["prompt"] for row in rows_of("preferences")]
    assert len({*instructions, *preferences}) == len(instructions) + len(preferences)


def test_prompts_are_the_questions_that_the_instructions_do_not_answer() -> None:
    instructions = {row["messages"][0]["content"] for row in rows_of("instructions")}  # type: ignore[index]
    groups = {str(row["prompt"]): row["group"] for row in prompts()}
    assert not instructions & groups.keys()
    assert all(groups[str(row["prompt"])] == row["group"] for row in rows_of("preferences"))


def test_no_topic_is_most_of_the_rows_and_no_answer_most_of_a_topic_but_yes_and_no() -> None:
    for half in (0, 1):
        rows = [question for _, question in asked(half)]
        topics = Counter(question.topic for question in rows)
        assert set(topics) == set(TOPICS)
        assert max(topics.values()) <= 0.2 * len(rows)
        for topic, count in topics.items():
            answers = Counter(question.answer for question in rows if question.topic == topic)
            assert answers.most_common(1)[0][1] <= 0.65 * count, topic


# The standard library's own words for the objects of some modules: nothing of what makes the questions is asked.
# Without os: this process may have patched it.
LIVE = (
    "argparse",
    "bisect",
    "csv",
    "fractions",
    "heapq",
    "json",
    "logging",
    "random",
    "shutil",
    "textwrap",
    "zipfile",
)


def test_the_answers_are_those_that_the_interpreter_gives() -> None:
    checked: Counter[str] = Counter()
    for usage in (usage for usage in usages() if usage.group in LIVE):
        value = pydoc.locate(usage.name)
        parameters = list(inspect.signature(value).parameters.values())  # type: ignore[arg-type]
        if not inspect.isclass(value) and parameters and parameters[0].name in ("self", "cls"):
            parameters = parameters[1:]
        for question in questions(usage):
            assert question.answer == recomputed(question, value, parameters), question.text
            assert question.answer not in question.wrong
            assert question.wrong
            checked[question.topic] += 1
    assert set(checked) == set(TOPICS)
    assert min(checked.values()) >= 30


def recomputed(question: Question, value: object, parameters: list[inspect.Parameter]) -> str:
    """The answer to a question on an object, from the object."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    by_name = {stars.get(each.kind, "") + each.name: each for each in parameters}  # type: ignore[call-overload]
    names, about = list(by_name), question.text.split("`")[1]
    match question.topic:
        case "count":
            return f"It takes {len(names) or 'no'} parameter{'s' * (len(names) != 1)}."
        case "kind":
            owner = pydoc.locate(about.partition("(")[0].rpartition(".")[0])
            return (
                f"It is a {'class' if inspect.isclass(value) else 'method' if inspect.isclass(owner) else 'function'}."
            )
        case "optional":
            number = sum(each.default is not inspect.Parameter.empty for each in parameters)
            return f"{number or 'No'} parameter{' has' if number < 2 else 's have'} a default."
        case "alone":
            try:
                inspect.Signature(parameters).bind()
            except TypeError:
                return "No, an argument is needed."
            return "Yes, no argument is needed."
        case "takes":
            name = question.text.split("`")[3]
            found = name in (each.name for each in parameters)
            return "Yes, it does." if found else "No, it does not."
        case "last":
            return f"The last parameter is `{names[-1]}`."
        case "required":
            required = [
                f"`{each}`" for each in names if by_name[each].default is inspect.Parameter.empty and each[0] != "*"
            ]
            return f"It needs {' and '.join(required) or 'nothing'}."
        case "default":
            default = by_name[about].default
            return f"It is `{default.__name__ if callable(default) else repr(default)}`."
        case _:
            return f"Its type is `{type(by_name[about].default).__name__}`."


def test_the_corpus_states_what_the_questions_ask() -> None:
    texts = {str(row["text"]).partition("\n")[0]: str(row["text"]) for row in rows_of("corpus")}
    for usage in usages()[::20]:
        stated = texts[usage.call].split("\n")[1]
        for question in questions(usage):
            about = question.text.split("`")[1]
            if question.topic == "default":
                assert f"`{about}` is {question.answer.removeprefix('It is ')[:-1]} by default." in stated
            elif question.topic == "type":
                assert f"The type of `{about}` is {question.answer.removeprefix('Its type is ')}" in stated
            elif question.topic != "takes":
                assert question.answer in stated


def test_the_kinds_of_preference_are_in_equal_parts() -> None:
    counts = Counter(str(row["kind"]) for row in rows_of("preferences"))
    assert set(counts) == set(FAULTS)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_preferences_are_of_topics_with_few_answers() -> None:
    topics = {question.text: question.topic for usage in usages() for question in questions(usage)}
    found = {topics[str(row["prompt"])] for row in quickstart_rows("preferences")}
    assert found == set(TOPICS) - {"last", "required"}


def test_near_misses_prefer_no_over_one_as_often_as_one_over_no_where_both_are_as_often_right() -> None:
    no_or_one = re.compile("It takes (no parameters|1 parameter)\\.|(No|1) parameter has a default\\.")
    for question in (question for usage in usages() for question in questions(usage)):
        if no_or_one.fullmatch(question.answer):
            others = list(filter(no_or_one.fullmatch, question.wrong))
            assert (len(others), len(question.wrong)) == (1, 2), question.text


def test_a_rejected_answer_has_the_fault_that_it_is_named_after() -> None:
    known = {question.text: question for half in (0, 1) for _, question in asked(half)}
    rights: dict[str, set[str]] = {topic: set() for topic in TOPICS}
    for usage in usages():
        for question in questions(usage):
            rights[question.topic].add(question.answer)
    for row in rows_of("preferences"):
        chosen, rejected = str(row["chosen"]), str(row["rejected"])
        question = known[str(row["prompt"])]
        assert chosen == question.answer
        assert {
            "near_miss": rejected in question.wrong,
            "guess": rejected in rights[question.topic] and rejected != chosen,
        }[str(row["kind"])]


def test_an_unknown_quickstart_source_is_refused() -> None:
    with pytest.raises(ConfigError, match="quickstart:poems is no quickstart source; give quickstart: and one of"):
        quickstart_rows("poems")


def test_rows_that_ship_with_python_are_named_by_their_number() -> None:
    first = next(iter(next(read_chunks(Source(path="quickstart:corpus"))).rows()))
    assert isinstance(first, Row) and first.where == "quickstart:corpus[0]" and first.fields["text"]
