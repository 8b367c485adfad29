"""Bad rows: refused or left out, and never lost."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lineage.errors import DataError
from tasks.prepare_data import PrepareConversations, PrepareText
from tests.prepared import Fields, numbered, prepare, report, side

NO_TEXT: Fields = {"text": ""}


def rejects(directory: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (directory / "out" / "rejects.jsonl").read_text().splitlines()]


def test_a_bad_row_is_named_with_its_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        prepare(tmp_path, PrepareText(), [*numbered(49), NO_TEXT])
    listed = rejects(tmp_path)
    where = f"{tmp_path}/rows.jsonl:50"
    assert str(refusal.value) == (
        f"1 of 50 rows cannot be used:\n  {where}: {listed[0]['problem']}\n"
        f"all of them are in {tmp_path}/out/rejects.jsonl; mend them, or leave them out with max_bad_rows=1"
    )
    assert listed == [{"where": where, "reason": "no text", "problem": listed[0]["problem"], "raw": '{"text": ""}'}]
    assert report(tmp_path)["sources"]["rows"]["dropped"] == {"no text": 1}  # type: ignore[index]
    assert not (tmp_path / "out" / "train.parquet").exists()


def test_at_most_twenty_bad_rows_are_shown_and_all_are_written(tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        prepare(tmp_path, PrepareText(), [NO_TEXT] * 25)
    lines = str(refusal.value).splitlines()
    assert (lines[0], lines[21], len(lines)) == ("25 of 25 rows cannot be used:", "  and 5 more", 23)
    assert len(rejects(tmp_path)) == 25


def test_as_many_bad_rows_as_are_allowed_are_left_out_and_counted(tmp_path: Path) -> None:
    rows: list[Fields] = [*numbered(40), NO_TEXT, {"text": 1}, NO_TEXT]
    metrics = prepare(tmp_path, PrepareText(held_out=0.2, max_bad_rows=3), rows)
    assert (metrics["rows"], metrics["dropped"]) == (40, 3)
    source = report(tmp_path)["sources"]["rows"]  # type: ignore[index]
    assert source["dropped"] == {"no text": 2, "not text": 1}
    assert (source["rows_read"], source["rows_used"]) == (43, 40)
    assert report(tmp_path)["rejects"] == "rejects.jsonl"
    with pytest.raises(DataError, match=r"^3 of 43 rows cannot be used:"):
        prepare(tmp_path, PrepareText(held_out=0.2, max_bad_rows=2), rows)


def test_a_group_that_is_no_text_makes_a_bad_row(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl:2: group is .*; accepted: a string or null; write a string"):
        prepare(tmp_path, PrepareText(), [{"text": "a"}, {"text": "b", "group": 1}])


def test_rows_not_one_of_which_can_be_read_are_listed_too(tmp_path: Path) -> None:
    file = tmp_path / "broken.jsonl"
    file.write_text('{"text": "a\n' * 3)
    with pytest.raises(DataError, match=r"^3 of 3 rows cannot be used:\n  .*broken.jsonl:1: "):
        prepare_file(tmp_path, file)
    assert len(rejects(tmp_path)) == 3
    assert report(tmp_path)["sources"]["rows"]["format"] == "unknown"  # type: ignore[index]


def prepare_file(directory: Path, file: Path) -> None:
    from lineage.artifact import Kind, Source
    from tasks.context import TrainContext
    from tasks.method import Input

    rows = Input(name="rows", kind=Kind.ROWS, fingerprint="", path=file, source=Source(path=str(file)))
    PrepareText().run({"rows": rows}, TrainContext(output_dir=directory / "out", work_dir=directory))


WORDS = st.text(alphabet="abcdé \n", max_size=12)
GOOD = st.builds(
    lambda asked, said: {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]},
    WORDS.map("q{}".format), WORDS.map("a{}".format),
)  # fmt: skip
BAD = st.sampled_from(
    [
        {"messages": []},
        {"messages": [{"role": "user", "content": "q"}]},
        {"messages": [{"role": "assistant", "content": 7}]},
        {"messages": None},
        {"other": "x"},
    ]
)


@given(
    rows=st.lists(st.one_of(GOOD, GOOD, GOOD, BAD), min_size=1, max_size=40), held_out=st.sampled_from([0.3, 0.6, 3])
)
@settings(max_examples=5)
def test_every_row_is_used_or_counted_and_on_one_side(
    tmp_path_factory: pytest.TempPathFactory, rows: Sequence[Fields], held_out: float
) -> None:
    directory = tmp_path_factory.mktemp("any")
    good = [row for row in rows if len(row.get("messages") or []) == 2]  # type: ignore[arg-type]
    try:
        metrics = prepare(directory, PrepareConversations(held_out=held_out, max_bad_rows=len(rows)), rows)
    except DataError as error:
        message = str(error)
        assert "leaves none to" in message or "no format fits" in message or "formats fit" in message
        return
    sides = {name: side(directory, name) for name in ("train", "held_out")}
    assert metrics["rows"] + metrics["dropped"] == len(rows)
    assert metrics["rows"] == sum(map(len, sides.values())) <= len(good)
    contents = {name: {str(row["row_id"]).split("-")[0] for row in found} for name, found in sides.items()}
    assert not contents["train"] & contents["held_out"]
    kept = [str([message["content"] for message in row["messages"]]) for found in sides.values() for row in found]  # type: ignore[attr-defined]
    known = [str([message["content"] for message in row["messages"]]) for row in good]  # type: ignore[attr-defined]
    assert all(kept.count(text) <= known.count(text) for text in kept)
