"""The plan reads the rows of small files on this machine, and refuses at once what their stages would refuse."""

import json
import re

from tests import tiny
from tests.command import Command

WORDS = ("pipeline=sft-dpo", "data.instructions=chats.jsonl", "data.preferences=pairs.jsonl")


def write(folder, **files):
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def chats(count, empty):
    rows = [{"messages": row["messages"]} for row in tiny.conversation_rows(count)]
    return rows + [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": ""}]}
                   for n in range(empty)]  # fmt: skip


def test_all_refusals_come_at_once_with_what_to_paste(tmp_path):
    write(tmp_path, chats=chats(40, 3), pairs=[{"asked": "a", "said": "b"}] * 40)
    done = Command(tmp_path)("plan", *WORDS)
    assert done.returncode == 2
    assert "instructions: 3 of 43 rows cannot be used:\n" in done.stderr
    assert "chats.jsonl:41: messages[1] content is empty" in done.stderr
    assert (
        "posttrain data lists them; correct them, or leave them out with stages.instructions.method.max_bad_rows=3"
        in done.stderr
    )
    assert "preferences: pairs.jsonl: no format fits the columns asked, said" in done.stderr
    pasted = "sources.preferences.columns.chosen=asked sources.preferences.columns.rejected=said"
    assert pasted in done.stderr and "sources.preferences.format=NAME" in done.stderr
    assert Command(tmp_path)("run", *WORDS).stderr.endswith(done.stderr), "as the run, before any stage"


def test_few_empty_rows_are_counted_and_named(tmp_path):
    write(tmp_path, chats=chats(198, 2))
    overrides = ("pipeline=sft", "data=chats.jsonl")
    note = "instructions: rows left out of chats.jsonl: no answer: 2"
    assert note in Command(tmp_path)("plan", *overrides).stdout
    assert (
        "2 of 200 rows cannot be used"
        in Command(tmp_path)("plan", *overrides, "stages.instructions.method.max_bad_rows=0").stderr
    )


def test_a_plan_says_what_it_does_not_ask_prefect(tmp_path):
    note = "notify=custom-webhook/ops: a run asks Prefect whether it has this block"
    assert note in Command(tmp_path)("plan", "model=tiny", "notify=custom-webhook/ops").stdout


def test_columns_with_other_names_are_guessed_and_named_as_init_does(tmp_path):
    rows = [{"question": f"What is {place}?", "answer": f"It is {place}."} for place in range(60)]
    write(tmp_path, qa=rows, squad=[{"context": "c", **row} for row in rows])
    done = Command(tmp_path)("plan", "pipeline=sft", "data=qa.jsonl")
    assert "instructions: the columns of qa.jsonl are a guess by their names: '" in done.stdout
    pasted = "sources.instructions.columns={prompt: question, completion: answer}"
    assert f"'{pasted}'" in done.stdout, done.stdout
    assert re.search("^sft .* by formula, roughly 39 tokens a row$", done.stdout, re.M)
    assert "a guess" not in Command(tmp_path)("plan", "pipeline=sft", "data=qa.jsonl", pasted).stdout
    done = Command(tmp_path)("plan", "pipeline=sft", "data=squad.jsonl")
    assert "method.prompt_template='{context} {question}'" in done.stdout, done.stdout


def test_a_split_without_rows_is_found_by_the_plan(tmp_path):
    write(tmp_path, chats=chats(60, 0), few=chats(1, 0))
    done = Command(tmp_path)("plan", "pipeline=sft", "data=chats.jsonl", "stages.instructions.method.held_out=1e-9")
    assert done.returncode == 2 and "of 60 rows leaves none to measure on; give more rows or groups" in done.stderr
    known = Command(tmp_path)("plan", "pipeline=sft", "data=chats.jsonl").stdout
    assert re.search(r"base: a toy, made from scratch on corpus; a real model is model=smollm2", known), known
    epochs = ("stages.sft.method.num_steps=null", "stages.sft.method.num_epochs=1")
    known = Command(tmp_path)("plan", "pipeline=sft", "data=chats.jsonl", *epochs).stdout
    assert re.search(r"1 epoch of 5\d rows \(num_epochs\), about 4 steps of 16 rows", known), known
    packed = Command(tmp_path)(
        "plan", "pipeline=sft", "data=chats.jsonl", *epochs, "stages.sft.method.packing=best_fit"
    )
    assert re.search(r"1 epoch of about 2\d examples \(num_epochs\), about 2 steps of 16 rows", packed.stdout)
    assert re.search("^sft .* by formula, roughly \\d+ tokens a row$", packed.stdout, re.M), packed.stdout
    one = Command(tmp_path)("plan", "pipeline=sft", "data=few.jsonl")
    assert one.returncode == 2 and "the one row leaves none to measure on beside it; give two" in one.stderr


def test_a_file_that_is_one_json_object_is_named_as_such_with_what_makes_rows_of_it(tmp_path):
    (tmp_path / "all.json").write_text(json.dumps({"version": 1, "data": chats(40, 0)}, indent=2))
    done = Command(tmp_path)("plan", "pipeline=sft", "data=all.json")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert "all.json: the file is one JSON object, with version, data; accepted: an array of rows" in done.stderr
    assert "`jq -c '.data[]' FILE > NEW.jsonl`" in done.stderr


def test_columns_of_the_project_that_other_rows_lack_are_named(tmp_path):
    write(tmp_path, chats=chats(40, 0))
    (tmp_path / "posttrain.yaml").write_text("pipeline: sft\nsources.instructions.columns.prompt: question\n")
    done = Command(tmp_path)("plan", "data=chats.jsonl")
    remedy = "~sources.instructions.columns"
    assert f"posttrain.yaml sets sources.instructions.columns, for other rows; '{remedy}' leaves it" in done.stderr
    assert Command(tmp_path)("plan", "data=chats.jsonl", remedy).returncode == 0


def test_a_training_that_learns_nothing_has_a_line_of_its_own(tmp_path):
    write(tmp_path, chats=chats(60, 0))
    steps = ("stages.sft.method.num_steps=1", "stages.sft.method.schedule.warmup=1")
    lines = Command(tmp_path)("plan", "pipeline=sft", "data=chats.jsonl", *steps).stdout.splitlines()
    assert any(line.startswith("sft: learns nothing, ") and line.endswith("schedule.warmup=0") for line in lines), lines
