"""What a stage is given is what was committed, or the stage does not start."""

import json
import os
from pathlib import Path

import pytest

from tests.command import Command, wait_until


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    (folder / "rows.txt").write_text("rows")
    labels = "sources.rows.labels=[cc-by-4.0,consent:2026]"
    return Command(folder, "pipeline=toy", "model=none", "sources.rows.path=rows.txt", labels)


@pytest.fixture(scope="module")
def stages(toy):
    return toy.run()


def manifest(row: dict) -> dict:
    return json.loads((Path(row["output"]).parent / "manifest.json").read_text())


def test_a_source_is_recorded_with_its_files_and_labels(toy, stages):
    [given] = manifest(stages["data"])["inputs"].values()
    file = str(toy.folder / "rows.txt")
    assert given["artifact"] == "source:rows"
    assert given["source"]["path"] == file
    assert list(given["source"]["files"]) == [file]
    assert given["source"]["labels"] == ["cc-by-4.0", "consent:2026"]


def test_labels_are_no_identity(toy, stages):
    assert set(toy.states("sources.rows.labels=[]").values()) == {"reuse"}


def test_an_input_is_recorded_with_the_digest_of_what_was_read(stages):
    assert manifest(stages["left"])["inputs"]["policy"]["digest"] == manifest(stages["model"])["output_digest"]
    assert manifest(stages["left"])["produces"] == "checkpoint"


def test_one_flipped_byte_stops_the_next_stage(toy, stages):
    file = Path(stages["model"]["output"]) / "model.txt"
    status = file.stat()
    file.write_bytes(b"1")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # as a failing disk would: no clock tells
    result = toy("run", "stages.left.method.num_steps=4")
    assert result.returncode == 1
    assert "stage left failed" in result.stderr
    assert "is not what was committed: model.txt has SHA-256" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_source_that_changes_while_it_is_read_is_not_committed_under_its_old_name(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    slow = Command(tmp_path, "pipeline=toy", "model=none", "sources.rows.path=rows.txt")
    process = slow.start("run", "stages.data.method.seconds=3", "resources.launcher=foreground")
    wait_until(lambda: list(tmp_path.glob("artifacts/data/*/output/rows.txt")), "the rows are read")
    (tmp_path / "rows.txt").write_text("other rows")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "rows.txt has changed since the plan was made" in err
    assert not list(tmp_path.glob("artifacts/data/*/manifest.json"))


def test_code_that_changes_between_plan_and_stage_is_not_recorded_as_the_old_one(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    own = tmp_path / "own.py"
    text = "from tests.toy_methods import ToyModel\n\nclass Own(ToyModel):\n    pass\n"
    own.write_text(text)
    toy = Command(
        tmp_path, "pipeline=toy", "model=none", "sources.rows.path=rows.txt", "stages.model.method._target_=own.Own"
    )
    running = toy.start("run", "stages.data.method.seconds=4")
    wait_until(lambda: list(tmp_path.glob("artifacts/data/*/output/rows.txt")), "data is being made")
    own.write_text(text.replace("pass", "size: int = 1"))
    _, err = running.communicate(timeout=120)
    assert running.returncode == 1
    assert "the code of own has changed since the plan was made" in err
    again = toy.run("stages.data.method.seconds=4")
    assert [name for name, row in again.items() if row["state"] == "run"] == ["model", "left", "right"]
