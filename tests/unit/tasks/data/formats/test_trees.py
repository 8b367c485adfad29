"""Trees of messages become conversations and pairs."""

import json
from pathlib import Path

import pytest

from lineage.artifact import Kind, Source
from lineage.errors import DataError
from tasks.data.formats.trees import is_tree
from tasks.data.formats.turns import BadRowError
from tasks.data.preparing.convert_rows import Opened, detect_source
from tasks.data.reading.chunk import Broken, Row

Fields = dict[str, object]


def message(name: str, parent: str | None, role: str, rank: object = None, **fields: object) -> Fields:
    """A message whose text is its name, as OpenAssistant has it."""
    return {"message_id": name, "parent_id": parent, "role": role, "text": name, "rank": rank, "lang": "en", **fields}


# Q has the answers B (best), A and C (not ranked); B is asked E and F, E is answered by G; another tree has no answer.
TREE = [
    message("A", "Q", "assistant", 1), message("Q", None, "prompter"), message("B", "Q", "assistant", 0.0),
    message("C", "Q", "assistant"), message("D", "Q", "assistant", 2, deleted=True), message("D2", "D", "prompter"),
    message("E", "B", "prompter", 0), message("F", "B", "prompter", 1), message("G", "E", "assistant", 0),
    message("H", "F", "assistant", 0), message("I", "F", "assistant", 0), message("J", "F", "assistant", 3),
    message("P", None, "prompter"), message("lost", "elsewhere", "assistant", 0),
    message("X", "Q", "assistant", 0, review_result=False),
]  # fmt: skip


def turns(*names: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": name} for place, name in enumerate(names)]


CONVERSATIONS = [{"messages": turns("Q", "B", "E", "G")}, {"messages": turns("Q", "B", "F", "H"), "untrained": "[0]"}]
PAIRS = [("Q", "B", "A"), ("Q B F", "H", "J"), ("Q B F", "I", "J")]


SIDES = ("prompt", "chosen", "rejected")


def whole(rows: list[Fields]) -> list[Fields]:
    """The first tree, as one row."""

    def grown(name: object) -> Fields:
        (own,) = (row for row in rows if row["message_id"] == name)
        return {**own, "replies": [grown(row["message_id"]) for row in rows if row["parent_id"] == name]}

    return [{"message_tree_id": "Q", "tree_state": "ready", "prompt": grown("Q")}]


def opened(directory: Path, rows: list[Fields], kind: Kind | None = None, **fields: object) -> Opened:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return detect_source(Source(path=str(file), **fields), kind=kind)  # type: ignore[arg-type]


def made(found: Opened) -> list[Fields]:
    assert found.detected
    entries = [entry for chunk in found.chunks for entry in chunk.rows()]
    return [found.detected.convert(entry.fields) for entry in entries if isinstance(entry, Row)]


@pytest.mark.parametrize("rows", [TREE, whole(TREE)], ids=["messages", "trees"])
@pytest.mark.parametrize("fields", [{}, {"format": "messages"}])
def test_conversations_follow_the_best_answers_and_train_each_once(tmp_path: Path, rows, fields) -> None:
    found = opened(tmp_path, rows, None if fields else Kind.CONVERSATIONS, **fields)
    assert made(found) == CONVERSATIONS
    assert found.unused == (len(TREE) if len(rows) > 1 else len(TREE) - 2) - len("QBEGFH")
    report = found.report()
    assert report.remarks["messages of trees in no row"].count == found.unused
    assert report.evidence.startswith("trees of 1")


def test_messages_of_trees_may_have_other_names(tmp_path: Path) -> None:
    columns = {"message_id": "messageId", "parent_id": "meta.parent", "text": "content"}
    rows = [
        {"messageId": row["message_id"], "meta": {"parent": row["parent_id"]}, "content": row["text"], **{
            name: row[name] for name in row if name not in columns
        }} for row in TREE
    ]  # fmt: skip
    assert made(opened(tmp_path, rows, Kind.CONVERSATIONS, columns=columns)) == CONVERSATIONS
    with pytest.raises(DataError, match=r"columns.group=tree: 'tree' is not a column"):
        opened(tmp_path, TREE, Kind.CONVERSATIONS, columns={"group": "tree"})


@pytest.mark.parametrize("rows", [TREE, whole(TREE)], ids=["messages", "trees"])
def test_pairs_are_of_answers_to_one_message_of_different_rank(tmp_path: Path, rows) -> None:
    for found in (opened(tmp_path, rows, Kind.PREFERENCES), opened(tmp_path, rows, format="preference")):
        output = [{name: " ".join(turn["content"] for turn in row[name]) for name in SIDES} for row in made(found)]
        pairs = [tuple(row.values()) for row in output]
        assert pairs == PAIRS


TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}


@pytest.mark.parametrize("form", ["messages", "trees", "rated"])
def test_what_stands_beside_role_and_text_is_read_or_refused(tmp_path: Path, form: str) -> None:
    rows: list[Fields] = [
        message("Q", None, "prompter", tools=[TOOL]), message("B", "Q", "assistant", 0, reasoning_content="why"),
        message("E", "B", "prompter"), message("G", "E", "assistant", 0, weight=0),
    ]  # fmt: skip
    if form == "rated":
        rows = [{"instruction": "Q", "completions": rated("response", "score", 2, 1), "tools": [TOOL]}]
    elif form == "trees":
        rows = [{**whole(rows)[0], "tools": [TOOL]}]
    (row,) = made(opened(tmp_path, rows))
    assert json.loads(str(row["tools"])) == [TOOL]
    if form != "rated":
        assert row["untrained"] == "[1]" and row["messages"][1]["content"].startswith("<think>\nwhy\n</think>")
    for column in ("image_url", "video"):  # of the row, or of its first message
        with pytest.raises(BadRowError, match=f"the row has {column}"):
            made(opened(tmp_path, [{**rows[0], column: "x"}, *rows[1:]]))
    if form == "messages":
        with pytest.raises(BadRowError, match=r"messages\[2\] has image"):
            made(opened(tmp_path, [*rows[:2], {**rows[2], "image": "x.jpg"}, rows[3]]))


def test_texts_of_trees_are_read_only_where_that_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"conf/stage/conversations.yaml and .*set format=text to read each message"):
        opened(tmp_path, TREE, Kind.TEXT)
    assert made(opened(tmp_path, TREE, Kind.TEXT, format="text"))[0] == {"text": "A"}


def test_trees_without_an_answer_are_refused(tmp_path: Path) -> None:
    rows = [message(str(place), None, "prompter") for place in range(3)]
    with pytest.raises(
        DataError, match=r"3 messages of trees give no row of messages; .*correct parent_id, role and rank"
    ):
        opened(tmp_path, rows, Kind.CONVERSATIONS)


def test_a_bad_line_among_messages_is_a_bad_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TREE) + "{\n")
    found = detect_source(Source(path=str(tmp_path / "rows.jsonl")))
    entries = [entry for chunk in found.chunks for entry in chunk.rows()]
    assert [entry.where for entry in entries if isinstance(entry, Broken)] == [f"{tmp_path}/rows.jsonl:16"]
    assert len(entries) == 3


def test_other_rows_are_no_trees() -> None:
    assert is_tree(TREE[:3]) and not is_tree([])
    assert not is_tree([{"text": "a", "role": "user", "id": 1}, {"text": "b", "parent_id": 1, "id": 2}])


def rated(key: str, score: str, *values: object) -> list[Fields]:
    return [{key: text, score: value, "model": "m"} for text, value in zip("BAC", values, strict=False)]


@pytest.mark.parametrize(
    "row",
    [
        # UltraFeedback, Nectar, Stack Exchange, SHP, PKU-SafeRLHF, Arena, HelpSteer.
        {"instruction": "Q", "models": ["m"], "completions": rated("response", "fine-grained_score", 4.5, 2, None)},
        {"prompt": "\n\nHuman: Q\n\nAssistant: ", "answers": rated("answer", "rank", 1, 2.0)},
        {"question": "Q", "answers": rated("text", "pm_score", 3, -1), "date": "d"},
        {"history": "Q", "human_ref_A": "A", "human_ref_B": "B", "labels": 0, "domain": "d"},
        {"prompt": "Q", "response_0": "A", "response_1": "B", "better_response_id": 1},
        {"prompt": "Q", "response_a": "B", "response_b": "A", "winner": "model_a"},
        {"conversation_a": turns("Q", "A"), "conversation_b": turns("Q", "B"), "winner": "model_b", "model_a": "m"},
        {"prompt": "Q", "response_1": "B", "response_2": "A", "preference_strength": -2},
    ],
)
def test_rated_answers_are_pairs_of_the_better_and_the_worse_one(tmp_path: Path, row: Fields) -> None:
    tie = {**row, **{name: "tie" for name in ("labels", "better_response_id", "winner", "preference_strength")}}
    rows = [row, tie] if "A" in row.values() or "conversation_a" in row else [row]
    for kind in (None, Kind.PREFERENCES):
        found = opened(tmp_path, rows, kind)
        (pair,) = made(found)
        assert [pair[name] for name in SIDES] == [turns("Q"), [{"role": "assistant", "content": "B"}],
                                                  [{"role": "assistant", "content": "A"}]]  # fmt: skip
        assert found.unused == 3 * (len(rows) - 1), "of a tie no pair is made"
    best = made(opened(tmp_path, [row], Kind.CONVERSATIONS))
    assert [each["messages"] for each in best] == [turns("Q", "B")]


def test_rated_answers_stay_arguments_of_rewards_and_columns_of_the_user(tmp_path: Path) -> None:
    row = {"prompt": "Q", "answers": rated("text", "score", 2, 1)}
    assert made(opened(tmp_path, [row], Kind.PROMPTS))[0]["columns"] == json.dumps({"answers": row["answers"]})
    columns = {"completion": "answers.1.text"}
    assert made(opened(tmp_path, [row], columns=columns)) == [{"messages": turns("Q", "A")}]
    with pytest.raises(DataError, match="messages of trees, or rated answers"):
        opened(tmp_path, [row], Kind.TEXT)
