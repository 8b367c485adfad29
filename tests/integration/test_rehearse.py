"""A rehearsal makes every stage for real, in short, and leaves nothing that anybody could take for a result."""

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest

from lineage.errors import ArtifactError
from lineage.mlflow.entities import Tag
from lineage.mlflow.registry import unregister_gone
from tasks.evaluate.row_scores import read_scores
from tests.command import Command, wait_until_warm
from tests.miniature import MODEL, STEPS, write_own_rows

SURVIVOR = "stages.left.method._target_=tests.toy_survivor.Survivor"
GATED = ("pipeline=toy-gated", "model=none", "sources.rows.path=rows.txt", SURVIVOR)


@pytest.fixture
def gated(tmp_path: Path, uri: str) -> Command:
    wait_until_warm()
    (tmp_path / "rows.txt").write_text("rows")
    return Command(tmp_path, *GATED, f"tracking.uri={uri}", tracked=True)


def rows_of(text: str) -> dict[str, dict]:
    return {row["stage"]: row for row in json.loads(text)["stages"]}


def in_store(folder: Path) -> set[str]:
    """The directories of the store that hold anything."""
    return {path.name for path in (folder / "artifacts").iterdir() if path.is_dir() and any(path.iterdir())}


def refuse(uri: str, what: str) -> None:
    """Has the registry refuse to do something to versions."""
    with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
        raised = "SELECT RAISE(ABORT, 'told to refuse')"
        database.execute(f"CREATE TRIGGER refuse BEFORE {what} ON model_versions BEGIN {raised}; END")
        database.commit()


def test_every_stage_is_made_at_two_steps_and_nothing_is_left(gated: Command, uri: str) -> None:
    result = gated("rehearse", "--json", "stages.evaluate.method.wins.left=0", "~stages.right")
    assert result.returncode == 0, result.stderr  # although the gate refuses a model of two steps
    rows = rows_of(result.stdout)
    assert list(rows) == ["data", "model", "left", "evaluate", "gate"]
    assert rows["gate"]["verdict"] == "works: refuse, of models of two steps"
    assert {name: row["exercised"] for name, row in rows.items()} == {
        "data": ["prepare"], "model": ["make", "register"], "left": ["2 steps", "save", "resume", "register"],
        "evaluate": ["evaluate"], "gate": ["judge"],
    }  # fmt: skip
    left = rows["left"]
    assert left["memory_gib"] == 2.0  # as it reports at step 2
    assert left["checkpoint_bytes"] > 100
    assert left["real_seconds"] == pytest.approx(40 * 0.05)  # the steps of the recipe, at the pace that it reports
    assert "left      saved at step 1 and stopped; resumes from there" in result.stderr
    assert in_store(gated.folder) == {"rehearsals", "runs"}  # with the note of this one
    assert [path.name for path in (gated.folder / "artifacts/rehearsals").iterdir()] == ["guard"]
    assert set(gated.states().values()) == {"run"}

    from mlflow import MlflowClient

    client = MlflowClient(uri)
    assert client.search_registered_models() == []
    assert "toy-gated" not in {experiment.name for experiment in client.search_experiments()}


@pytest.mark.slow
def test_its_models_are_registered_each_time_and_no_longer_than_they_are_kept(gated: Command, uri: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    alone = ("~stages.right", "~stages.evaluate", "~stages.gate", "~sources.champion")
    kept = gated("rehearse", "--keep", *alone)
    assert kept.returncode == 0, kept.stderr
    assert {model.name for model in client.search_registered_models()} == {"toy-gated-rehearsal"}
    assert len(client.search_model_versions("name = 'toy-gated-rehearsal'")) == 2

    refuse(uri, "INSERT")
    refused = gated("rehearse", *alone)
    assert refused.returncode == 1, refused.stdout
    assert "has no registered version of it" in refused.stderr
    [place] = [path for path in (gated.folder / "artifacts/rehearsals").iterdir() if path.is_dir()]
    assert refused.stdout.splitlines()[-1] == f"kept until the next rehearsal: {place}"
    assert client.search_model_versions("name = 'toy-gated-rehearsal'") == []  # those that were kept went with theirs


def test_only_what_lay_there_and_is_gone_leaves_the_registry(tmp_path: Path, uri: str) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    folder = tmp_path / "a store" / "rehearsals"
    gone, there, elsewhere = folder / "1" / "output", folder / "2" / "output", tmp_path / "real" / "output"
    there.mkdir(parents=True)
    client.create_registered_model("toy")
    for place in (gone, there, elsewhere):
        client.create_model_version("toy", str(place), tags={Tag.OUTPUT: place.as_uri()})
    unregister_gone(uri, "toy", folder)
    assert {version.source for version in client.search_model_versions("name = 'toy'")} == {str(there), str(elsewhere)}
    unregister_gone(uri, "never registered", folder)
    there.rmdir()
    refuse(uri, "UPDATE")
    with pytest.raises(ArtifactError, match="does not delete the versions of registered model toy whose weights are"):
        unregister_gone(uri, "toy", folder)


@pytest.mark.slow  # tests/unit/flows/test_rehearsal.py says what is kept
def test_a_stage_that_fails_ends_it_and_its_log_stays_until_the_next(tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("rows")
    toy = Command(tmp_path, "pipeline=toy", "model=none", "sources.rows.path=rows.txt", SURVIVOR)
    failed = toy("rehearse", "stages.left.method.fail_at=2")
    assert failed.returncode == 1
    [left] = [line for line in failed.stdout.splitlines() if line.startswith("left")]
    assert left.split() == ["left", "FAILED"]
    assert "not reached" in failed.stdout
    assert "posttrain: stage left failed: " in failed.stderr and "ValueError: set to fail" in failed.stderr
    log = Path(failed.stderr.split("(log: ")[-1].split(")")[0])
    assert 'raise ValueError("set to fail")' in log.read_text()

    kept = toy("rehearse", "--keep")
    assert kept.returncode == 0, kept.stderr
    assert not log.exists()
    place = Path(kept.stdout.splitlines()[-1].removeprefix("kept until the next rehearsal: "))
    [output] = place.glob("left/*/output/model.safetensors")
    again = toy("rehearse")
    assert again.returncode == 0, again.stderr
    assert "done in" in again.stderr  # and not reused
    assert not output.exists()


@pytest.mark.slow
def test_the_real_stages_are_trained_merged_evaluated_judged_and_registered(tmp_path: Path, uri: str) -> None:
    from mlflow import MlflowClient

    overrides = [
        *MODEL,
        *STEPS,
        *write_own_rows(tmp_path),
        f"tracking.uri={uri}",
        "stages.sft.method.adapter={rank: 4}",
    ]
    real = Command(tmp_path, "pipeline=cpt-sft-dpo-gated", *overrides, tracked=True)
    result = real("rehearse", "--json", "--keep")
    assert result.returncode == 0, result.stderr
    rows = rows_of(result.stdout)
    prepared, trained = ["prepare"], ["2 steps", "save", "resume", "register"]
    assert {name: row["exercised"] for name, row in rows.items()} == {
        "corpus": prepared, "instructions": prepared, "preferences": prepared, "base": ["make", "register"],
        "cpt": trained, "sft": [*trained[:3], "merge", "register"], "reward": trained, "dpo": trained,
        "evaluate": ["evaluate"], "gate": ["judge"],
    }  # fmt: skip
    assert rows["gate"]["verdict"].startswith("works: ")
    assert rows["sft"]["memory_gib"] > 0.1
    assert rows["sft"]["real_seconds"] > 0

    place = Path(json.loads(result.stdout)["store"])
    [sft], [report] = place.glob("sft/*/output"), place.glob("evaluate/*/output")
    for written in ("model.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"):
        assert (sft / written).stat().st_size > 0
    assert {policy for scores in read_scores(report).values() for policy in scores.scores} >= {
        "base",
        "cpt",
        "sft",
        "dpo",
    }
    versions = MlflowClient(uri).search_model_versions("name = 'cpt-sft-dpo-gated-rehearsal'")
    models = [path for name in ("base", "cpt", "sft", "reward", "dpo") for path in place.glob(f"{name}/*/output")]
    assert sorted(version.tags[Tag.OUTPUT] for version in versions) == sorted(path.as_uri() for path in models)
    assert in_store(real.folder) == {"cache", "rehearsals", "runs"}  # counts of the rows' examples, for the next plan
