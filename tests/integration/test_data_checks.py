"""What rows would cost hours later is told before anything trains."""

import json

import pyarrow.parquet as pq
import pytest

from tests import miniature
from tests.command import Command

ONLY_SFT = ("~stages.preferences", "~stages.reward", "~stages.dpo", "~stages.evaluate")


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, prefect_url: str) -> Command:
    """In a folder where cpt and sft have been trained once."""
    folder = tmp_path_factory.mktemp("own")
    own = miniature.write_own_rows(folder)[:2]  # corpus and instructions
    left = [word for word in miniature.STEPS if not word.startswith(("stages.reward", "stages.dpo", "stages.evaluate"))]
    overrides = (*ONLY_SFT, *miniature.MODEL, *left, "stages.sft.method.max_length=256", *own)
    trained = Command(folder, *overrides, environment={"PREFECT_API_URL": prefect_url})
    trained.run()
    return trained


@pytest.mark.slow  # libraries/tasks/data/test_kinds.py finds it, unit/flows/stages/test_data_checks.py tells of it
def test_a_held_out_text_among_the_rows_of_another_stage_is_listed_with_both_ids(command: Command) -> None:
    (corpus,) = (command.folder / "artifacts" / "corpus").iterdir()
    held_out = pq.read_table(corpus / "output" / "held_out.parquet").to_pylist()
    leak = max(held_out, key=lambda row: len(row["text"]))
    answer = {"role": "assistant", "content": leak["text"]}
    with (command.folder / "instructions.jsonl").open("a") as file:
        for number in range(5):  # one of them at least is trained on
            file.write(json.dumps({"messages": [{"role": "user", "content": f"{number}?"}, answer]}) + "\n")
    result = command("run")
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stderr.splitlines() if "among what it trains on" in line]
    found = pq.read_table(command.folder / line.rpartition(": ")[2]).to_pylist()
    assert (leak["row_id"], "corpus", "instructions") in [
        (row["held_out_row_id"], row["held_out_set"], row["train_set"]) for row in found
    ]
