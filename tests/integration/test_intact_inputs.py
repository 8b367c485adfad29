"""What a stage is given is what was committed, or the stage does not start."""

import json
import os
from pathlib import Path

import pytest

from tests.command import TOY, Command, wait_until


@pytest.fixture(scope="module")
def labelled(tmp_path_factory, prefect_url):
    folder = tmp_path_factory.mktemp("intact")
    (folder / "rows.txt").write_text("rows")
    labels = "sources.rows.labels=[cc-by-4.0,consent:2026]"
    return Command(folder, *TOY, labels, environment={"PREFECT_API_URL": prefect_url})


@pytest.fixture(scope="module")
def stages(labelled):
    return labelled.run()


def manifest(row: dict) -> dict:
    return json.loads((Path(row["output"]).parent / "manifest.json").read_text())


def test_a_source_is_recorded_with_its_files_and_labels(labelled, stages):
    [given] = manifest(stages["data"])["inputs"].values()
    file = str(labelled.folder / "rows.txt")
    assert given["artifact"] == "source:rows"
    assert given["source"]["path"] == file
    assert list(given["source"]["files"]) == [file]
    assert given["source"]["labels"] == ["cc-by-4.0", "consent:2026"]


def test_labels_are_no_identity(labelled, stages):
    assert set(labelled.states("sources.rows.labels=[]").values()) == {"reuse"}


def test_an_input_is_recorded_with_the_digest_of_what_was_read(stages):
    assert manifest(stages["left"])["inputs"]["policy"]["digest"] == manifest(stages["model"])["output_digest"]
    assert manifest(stages["left"])["produces"] == "checkpoint"


def test_one_flipped_byte_stops_the_next_stage(labelled, stages):
    file = Path(stages["model"]["output"]) / "model.txt"
    status = file.stat()
    file.write_bytes(b"1")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a failing disk would: no clock tells
    result = labelled("run", "stages.left.method.num_steps=4")
    assert result.returncode == 1
    assert "stage left failed" in result.stderr
    assert "is not what was committed: model.txt has SHA-256" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_source_that_changes_while_it_is_read_is_not_committed_under_its_old_name(toy, tmp_path):
    process = toy.start("run", "stages.data.method.seconds=3", "resources.launcher=foreground")
    wait_until(lambda: list(tmp_path.glob("artifacts/data/*/output/rows.txt")), "the rows are read")
    (tmp_path / "rows.txt").write_text("other rows")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "rows.txt has changed since the plan was made" in err
    assert not list(tmp_path.glob("artifacts/data/*/manifest.json"))


def test_code_that_changes_between_plan_and_stage_is_not_recorded_as_the_old_one(toy, tmp_path):
    own = tmp_path / "own.py"
    text = "from tests.toy_methods import ToyModel\n\nclass Own(ToyModel):\n    pass\n"
    own.write_text(text)
    words = ("stages.model.method._target_=own.Own", "stages.data.method.seconds=4")
    running = toy.start("run", *words)
    wait_until(lambda: list(tmp_path.glob("artifacts/data/*/output/rows.txt")), "data is being made")
    own.write_text(text.replace("pass", "size: int = 1"))
    _, err = running.communicate(timeout=120)
    assert running.returncode == 1
    assert "the code of own has changed since the plan was made" in err
    again = toy.run(*words)
    assert [name for name, row in again.items() if row["state"] == "run"] == ["model", "left", "right"]
