"""The quickstart's rows: right, in equal parts, and through the data stages with nothing held out that is trained."""

import inspect
import pydoc
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from tasks.context import TrainContext
from tasks.data.reading.chunk import Row
from tasks.data.reading.read import read_chunks
from tasks.method import Input, Method
from tasks.prepare_data import PrepareConversations, PreparePreferences, PrepareText
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


def test_no_function_is_asked_about_in_the_rows_of_another_module() -> None:
    owner = {usage.name: usage.group for usage in usages()}
    for name, column in (("instructions", "messages"), ("preferences", "prompt")):
        for row in rows_of(name):
            assert owner[asked_about(str(row[column]))] == row["group"]


def asked_about(question: str) -> str:
    """The name before the only bracket that follows one."""
    (name,) = re.findall(r"`([\w.]+)\(", question)
    return str(name)


def test_prompts_are_the_questions_that_the_instructions_do_not_answer() -> None:
    instructions = [row["messages"][0]["content"] for row in rows_of("instructions")]  # type: ignore[index]
    preferences = [row["prompt"] for row in rows_of("preferences")]
    assert len({*instructions, *preferences}) == len(instructions) + len(preferences)
    groups = {str(row["prompt"]): row["group"] for row in prompts()}
    assert not {*instructions} & groups.keys()
    assert all(groups[str(row["prompt"])] == row["group"] for row in rows_of("preferences"))


# The standard library's own words for the objects of some modules: nothing of what makes the questions is asked.
# Without os: this process may have patched it.
LIVE = (
    "argparse", "bisect", "csv", "fractions", "heapq", "json", "logging", "random", "shutil", "textwrap", "zipfile",
)  # fmt: skip


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
        configured = texts[usage.call].split("\n")[1]
        for question in questions(usage):
            about = question.text.split("`")[1]
            if question.topic == "default":
                assert f"`{about}` is {question.answer.removeprefix('It is ')[:-1]} by default." in configured
            elif question.topic == "type":
                assert f"The type of `{about}` is {question.answer.removeprefix('Its type is ')}" in configured
            elif question.topic != "takes":
                assert question.answer in configured


def test_a_rejected_answer_has_the_fault_that_it_is_named_after() -> None:
    known = {question.text: question for half in (0, 1) for _, question in asked(half)}
    rights: dict[str, set[str]] = {topic: set() for topic in TOPICS}
    for usage in usages():
        for question in questions(usage):
            rights[question.topic].add(question.answer)
    counts = Counter(str(row["kind"]) for row in rows_of("preferences"))
    assert set(counts) == set(FAULTS) and max(counts.values()) - min(counts.values()) <= 1
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


STAGES: dict[str, Method] = {
    "corpus": PrepareText(held_out=0.1),
    "instructions": PrepareConversations(held_out=0.1),
    "preferences": PreparePreferences(held_out=0.1),
}
Rows = list[dict[str, object]]


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Rows, Rows]]:
    root = tmp_path_factory.mktemp("quickstart")
    found = {}
    for name, method in STAGES.items():
        source = Source(path=f"quickstart:{name}")
        rows = Input(name=name, kind=Kind.ROWS, fingerprint="", path=root, source=source)
        method.run({"rows": rows}, TrainContext(output_dir=root / name, work_dir=root))
        found[name] = tuple(
            pq.read_table(root / name / f"{side}.parquet").to_pylist() for side in ("train", "held_out")
        )
    return found  # type: ignore[return-value]


def functions(name: str, rows: Rows) -> set[str]:
    """The functions that rows are about: a document's title, or the name before the bracket of a question."""
    known = {usage.name for usage in usages()}
    if name == "corpus":
        return {str(row["text"]).split("(")[0] for row in rows} & known
    column = {"instructions": "messages", "preferences": "prompt"}[name]
    return {re.findall(r"`([\w.]+)\(", str(row[column]))[0] for row in rows} & known


def test_no_held_out_function_is_in_the_training_rows_of_any_stage(sides: dict[str, tuple[Rows, Rows]]) -> None:
    trained = set().union(*(functions(name, train) for name, (train, _) in sides.items()))
    for name, (train, held_out) in sides.items():
        assert len(train) >= 3000 and 0.04 <= len(held_out) / (len(train) + len(held_out)) <= 0.2
        assert functions(name, held_out)
        assert not functions(name, held_out) & trained
    counts = Counter(str(row["kind"]) for row in sides["preferences"][1])
    assert len(counts) == 2 and max(counts.values()) <= 1.2 * min(counts.values())


def test_no_held_out_question_is_answered_in_training_by_instructions_or_preferences(
    sides: dict[str, tuple[Rows, Rows]],
) -> None:
    prompts = {
        "instructions": [{str(row["messages"][0]["content"]) for row in side} for side in sides["instructions"]],  # type: ignore[index]
        "preferences": [{str(row["prompt"][0]["content"]) for row in side} for side in sides["preferences"]],  # type: ignore[index]
    }
    trained = prompts["instructions"][0] | prompts["preferences"][0]
    assert not trained & (prompts["instructions"][1] | prompts["preferences"][1])
