"""The quickstart through the data stages: hundreds of rows held out, none of their functions in training."""

import re
from collections import Counter

import pyarrow.parquet as pq
import pytest

from lineage.artifact import Kind, Source
from tasks.context import TrainContext
from tasks.method import Input, Method
from tasks.prepare_data import PrepareConversations, PreparePreferences, PrepareText
from tasks.quickstart.questions import usages

STAGES: dict[str, Method] = {
    "corpus": PrepareText(held_out=0.1),
    "instructions": PrepareConversations(held_out=0.1),
    "preferences": PreparePreferences(held_out=0.1),
}
FUNCTIONS = {usage.name for usage in usages()}
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
    if name == "corpus":
        return {str(row["text"]).split("(")[0] for row in rows} & FUNCTIONS
    column = {"instructions": "messages", "preferences": "prompt"}[name]
    return {re.findall(r"`([\w.]+)\(", str(row[column]))[0] for row in rows} & FUNCTIONS


def test_hundreds_of_rows_are_held_out_and_thousands_trained(sides: dict[str, tuple[Rows, Rows]]) -> None:
    for train, held_out in sides.values():
        assert len(train) >= 3000
        assert 0.04 <= len(held_out) / (len(train) + len(held_out)) <= 0.2


def test_no_held_out_function_is_in_the_training_rows_of_any_stage(sides: dict[str, tuple[Rows, Rows]]) -> None:
    trained = set().union(*(functions(name, train) for name, (train, _) in sides.items()))
    for name, (_, held_out) in sides.items():
        assert functions(name, held_out)
        assert not functions(name, held_out) & trained


def test_every_kind_of_fault_is_held_out_in_like_parts(sides: dict[str, tuple[Rows, Rows]]) -> None:
    held_out = sides["preferences"][1]
    counts = Counter(str(row["kind"]) for row in held_out)
    assert len(counts) == 2
    assert max(counts.values()) <= 1.2 * min(counts.values())


def test_no_held_out_question_is_answered_in_training_by_instructions_or_preferences(
    sides: dict[str, tuple[Rows, Rows]],
) -> None:
    prompts = {
        "instructions": [{str(row["messages"][0]["content"]) for row in side} for side in sides["instructions"]],  # type: ignore[index]
        "preferences": [{str(row["prompt"][0]["content"]) for row in side} for side in sides["preferences"]],  # type: ignore[index]
    }
    trained = prompts["instructions"][0] | prompts["preferences"][0]
    assert not trained & (prompts["instructions"][1] | prompts["preferences"][1])
