"""A named job is one line: rows of one file, a model, held-out evaluation beside the model that it started from."""

import json

import pytest

from tests import tiny
from tests.command import Command
from tests.tiny_models import write_model


def problems(count: int) -> list[dict[str, object]]:
    return [{"prompt": f"Say {index}.", "answer": str(index)} for index in range(count)]


ROWS = {
    "sft": tiny.conversation_rows, "cpt": tiny.text_rows, "dpo": tiny.preference_rows, "reward": tiny.preference_rows,
    "kto": tiny.unpaired_rows, "grpo": problems,
}  # fmt: skip
SMALL = ("resources.cpus_per_worker=1", "stages.evaluate.method.num_rows=4", "stages.evaluate.method.num_prompts=2",
         "stages.evaluate.method.max_new_tokens=4")  # fmt: skip


@pytest.mark.slow  # tests/unit/flows/declare/test_project.py composes them
@pytest.mark.parametrize("job", ROWS)
def test_one_line_trains_on_one_file_and_measures_beside_the_base(tmp_path, prefect_url, job):
    write_model(tmp_path / "model", "llama")
    rows = [{key: value for key, value in row.items() if key != "row_id"} for row in ROWS[job](40)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = Command(tmp_path, environment={"PREFECT_API_URL": prefect_url})
    done = command(
        "run",
        f"pipeline={job}",
        "model=model",
        "data=mine.jsonl",
        f"stages.{job}.method.num_steps=2",
        f"stages.{job}.method.max_length=64",
        *SMALL,
        *(
            ["stages.grpo.method.max_completion_length=8", "stages.grpo.method.equal_rewards_patience=null"]
            if job == "grpo"
            else []
        ),
        "--json",
    )
    assert done.returncode == 0, done.stderr
    stages = {row["stage"]: row for row in json.loads(done.stdout)["stages"]}
    assert len(stages) == 3 and {job, "evaluate"} < stages.keys()
    assert any(name.startswith("base/") for name in stages["evaluate"]["metrics"])
