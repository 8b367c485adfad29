"""The two fronts, ``posttrain`` and ``dvc``, on one repository: they never disagree. Toy stages, real git, real DVC."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from lineage.dvc import DvcProject, View, tracked_hash
from lineage.errors import ArtifactError
from lineage.filesystem.digest import DigestCache
from lineage.store import Entry
from tests.command import CONF
from tests.dvc_repository import RECIPE, WORDS, DvcRepository, disk_bytes

NOTHING = "nothing to do: all 4 stages are finished"
STAGES = ("data", "model", "left", "right")


@pytest.fixture(scope="module")
def environment(prefect_url):
    return {"PREFECT_API_URL": prefect_url}


@pytest.fixture(scope="module")
def created(tmp_path_factory, environment):
    return DvcRepository(tmp_path_factory.mktemp("created") / "repository", *WORDS, environment=environment).create()


@pytest.fixture(scope="module")
def ran_once(tmp_path_factory, created):
    repository = created.copy(tmp_path_factory.mktemp("ran") / "repository")
    repository.posttrain("run")
    repository.commit("ran")
    return repository


@pytest.fixture
def repository(tmp_path, created):
    return created.copy(tmp_path / "repository")


@pytest.fixture
def ran(tmp_path, ran_once):
    """After the first run, all of it committed."""
    return ran_once.copy(tmp_path / "repository")


def edit(repository: DvcRepository, value: float) -> None:
    (repository.folder / "conf/recipe/left.yaml").write_text(RECIPE.replace("0.1", str(value)))


def executed(output: str) -> list[str]:
    return [name for name in STAGES if f"Running stage '{name}'" in output]


def test_after_a_run_dvc_is_clean_and_has_nothing_to_do(repository):
    assert repository.is_clean() is False
    assert "dvc:" not in repository.posttrain("run")
    assert repository.is_clean()
    assert executed(repository("dvc", "repro")) == []
    lock = (repository.folder / "dvc.lock").read_text()
    assert "dvc.lock" in repository("git", "status", "--porcelain")
    assert "artifacts" not in repository("git", "status", "--porcelain")

    (repository.folder / ".dvc/config").write_text("no config at all")
    assert NOTHING in repository.posttrain("run")  # and DVC is not even asked
    assert (repository.folder / "dvc.lock").read_text() == lock


def test_repro_runs_what_changed_and_run_then_has_nothing_to_do(ran):
    edit(ran, 0.2)
    assert "learning_rate  0.1" in ran("dvc", "params", "diff")
    assert "left" in ran("dvc", "status") and ran.is_clean() is False
    assert executed(ran("dvc", "repro")) == ["left"]
    assert NOTHING in ran.posttrain("run")
    assert ran.is_clean()
    assert (ran.view("left") / "output/model.txt").read_text().endswith("-> 0.2")

    edit(ran, 0.1)
    assert executed(ran("dvc", "repro")) == []  # restored
    assert NOTHING in ran.posttrain("run")
    assert ran.is_clean()
    assert ran("git", "status", "--porcelain") == ""


def test_run_records_what_changed_and_repro_then_has_nothing_to_do(ran):
    edit(ran, 0.2)
    assert "1 of 4 stages run" in ran.posttrain("run")
    assert ran.is_clean()
    assert executed(ran("dvc", "repro")) == []
    edit(ran, 0.1)
    assert NOTHING in ran.posttrain("run")  # the store has both; the view and DVC move back
    assert ran.is_clean()
    assert ran("git", "status", "--porcelain") == ""


@pytest.mark.slow
def test_other_settings_that_give_the_same_bytes_are_seen_downstream(repository):
    """Of the output alone DVC would say that nothing changed, and the plan that all that reads it is stale."""
    pipeline = repository.folder / "conf/pipeline/mini.yaml"
    head, right = pipeline.read_text().split("  right:")
    pipeline.write_text(f"{head}  right:{right.replace('policy: model', 'policy: left')}")
    repository(sys.executable, "-m", "flows.dvc_yaml", *repository.overrides)
    repository.posttrain("run")
    before = (repository.view("left") / "output/model.txt").read_bytes()
    (repository.folder / "conf/recipe/left.yaml").write_text(RECIPE + "seed: 1\n")
    assert executed(repository("dvc", "repro")) == ["left", "right"]
    assert (repository.view("left") / "output/model.txt").read_bytes() == before
    assert NOTHING in repository.posttrain("run")
    assert repository.is_clean()


@pytest.mark.slow
def test_the_commands_that_a_user_of_dvc_knows(ran):
    assert "left" in ran("dvc", "dag")
    assert "0.33333" in ran("dvc", "metrics", "show")
    pipeline = ran.folder / "conf/pipeline/mini.yaml"
    pipeline.write_text(pipeline.read_text().replace("ToyTraining}", "ToyTraining, num_steps: 4}"))
    ran.posttrain("run")
    changed = ran("dvc", "metrics", "diff")
    assert "0.33333" in changed and "0.25" in changed
    plots = json.loads(ran("dvc", "plots", "show", "--json"))["data"]
    [curve] = [each for name, each in plots.items() if "left" in name]
    points = curve[0]["content"]["data"]["values"]
    assert [(point["step"], round(point["loss"], 2)) for point in points] == [(1, 1.0), (2, 0.5), (3, 0.33), (4, 0.25)]


def test_a_fresh_clone_pulls_and_trains_nothing(ran, tmp_path):
    (tmp_path / "remote").mkdir()
    ran("dvc", "remote", "add", "--default", "here", str(tmp_path / "remote"))
    ran.commit("remote")
    ran("dvc", "push")
    clone = ran.clone(tmp_path / "elsewhere/clone")
    clone("dvc", "pull")
    assert NOTHING.partition(":")[0] in clone.posttrain("plan")
    assert NOTHING in clone.posttrain("run")
    assert clone.is_clean()
    assert clone("git", "status", "--porcelain") == ""
    assert os.path.samefile(clone.entry("model") / "output/model.txt", clone.view("model") / "output/model.txt")

    shutil.rmtree(clone.entry("model"))
    damaged = clone.view("model") / "output/model.txt"
    damaged.chmod(0o644)
    damaged.write_text("x")
    assert f"{damaged.parent}: is not adopted" in clone.posttrain("plan")
    assert "1 of 4 stages run" in clone.posttrain("run")
    assert clone.is_clean()


@pytest.mark.slow
def test_store_view_and_cache_are_one_file_and_take_no_more_disk(tmp_path, environment):
    sizes = {}
    for name, dvc in {"with": "true", "without": "false"}.items():
        (tmp_path / name).mkdir()
        overrides = [*WORDS, "stages.model.method.size=8000000", f"tracking.dvc={dvc}"]
        each = DvcRepository(tmp_path / name / "repository", *overrides, environment=environment).create()
        each.posttrain("run")
        sizes[name] = disk_bytes(each.folder / "artifacts", *([each.folder / ".dvc/cache"] if dvc == "true" else []))
        model = each.entry("model") / "output/model.txt"
        assert model.stat().st_nlink == (3 if dvc == "true" else 2)
        assert os.path.samefile(model, each.view("model") / "output/model.txt")
    assert sizes["with"] <= sizes["without"] * 1.05


@pytest.mark.slow
def test_many_runs_at_once_end_with_no_lock_error(repository):
    declared = [repository.start("posttrain", "run", *repository.overrides) for _ in range(2)]
    trials = [
        repository.start("posttrain", "run", *repository.overrides, f"stages.left.method.learning_rate={rate}")
        for rate in (0.3, 0.4)
    ]
    running, looks = [*declared, *trials], []
    while any(each.poll() is None for each in running):
        looks.append(repository("dvc", "status"))
    outputs = [each.communicate(timeout=300)[0] for each in running]
    assert [each.returncode for each in running] == [0] * 4, "\n".join(outputs)
    assert not [text for text in [*outputs, *looks] if "dvc:" in text or "lock" in text.replace("dvc.lock", "")]
    assert looks
    assert repository.is_clean()


def test_a_run_killed_before_its_commit_is_mended_by_the_next(ran):
    edit(ran, 0.2)
    ran.posttrain("run")
    ran("git", "checkout", "--quiet", "dvc.lock")  # as if the last commit had not come to pass
    assert ran.is_clean() is False
    assert NOTHING in ran.posttrain("run")
    assert ran.is_clean()


def test_a_failure_of_dvc_fails_no_run_and_names_the_repair(repository):
    (repository.folder / ".dvc/config").write_text("no config at all")
    output = repository.posttrain("run")
    assert "4 of 4 stages run" in output
    assert output.count("dvc: nothing is committed: ") == 1
    assert "dvc commit --force data model left right" in output


def project_of(repository: DvcRepository) -> tuple[DvcProject, View, dict[str, Entry]]:
    entries = {stage: Entry(repository.entry(stage)) for stage in STAGES}
    return DvcProject.at(repository.folder), View(repository.folder / "artifacts", "mini"), entries


@pytest.fixture
def in_process(ran, monkeypatch):
    for name, value in ran.environment.items():
        monkeypatch.setenv(name, value)
    return ran


def test_a_dvc_that_holds_the_lock_is_waited_for_only_so_long(in_process):
    from dvc.lock import Lock

    project, view, entries = project_of(in_process)
    (in_process.folder / "dvc.lock").unlink()
    with Lock(str(in_process.folder / ".dvc/tmp/lock")), pytest.raises(ArtifactError) as error:
        project.commit(view, entries, patience=0)
    assert "another dvc was at work" in str(error.value)
    assert "repair with: dvc commit --force data model left right" in str(error.value)
    project.commit(view, entries)
    assert in_process.is_clean()


@pytest.mark.slow
def test_a_damaged_output_is_not_committed(in_process):
    """A hard link that was written through has damaged the store, the view and DVC's cache at once."""
    lock = (in_process.folder / "dvc.lock").read_text()
    model = in_process.entry("model") / "output/model.txt"
    model.chmod(0o644)
    model.write_text("x")
    assert f"dvc: nothing is committed: {model.parent}: is not what was committed" in in_process.posttrain("run")
    assert (in_process.folder / "dvc.lock").read_text() == lock
    model.chmod(0o444)  # DVC trusts what looks like its own
    shutil.rmtree(in_process.entry("model"))
    assert "1 of 4 stages run" in in_process.posttrain("run")
    assert in_process.is_clean()
    assert (in_process.view("model") / "output/model.txt").read_text() == "0"
    in_process("dvc", "checkout", "--force")
    assert (in_process.view("model") / "output/model.txt").read_text() == "0"


def test_repro_does_not_take_a_damaged_output_for_a_new_one(ran):
    [model] = (ran.folder / "artifacts" / "model").glob("*/output/model.txt")
    model.chmod(0o644)
    model.write_text("9")  # store, view and cache are one file
    lock = (ran.folder / "dvc.lock").read_text()
    assert "is not what was committed" in ran("dvc", "repro", fails=True)
    assert (ran.folder / "dvc.lock").read_text() == lock


@pytest.mark.slow
def test_one_stage_without_prefect(repository):
    output = repository.called("stage", "model", *WORDS, fails=True)
    assert "stage model reads data, which is not finished (never run)" in output
    assert "no such stage" in repository.called("stage", "modl", *WORDS, fails=True)
    for name in STAGES:
        repository.called("stage", name, *WORDS, PREFECT_API_URL="http://127.0.0.1:9/api")
    assert repository.is_clean()
    assert NOTHING in repository.posttrain("run")
    assert "nothing to do: left is finished" in repository.called("stage", "left", *WORDS)


@pytest.mark.slow
def test_a_gate_that_refuses_fails_its_stage_too(repository):
    overrides = ["--config-dir", str(CONF), "pipeline=toy-gated", *WORDS[3:]]
    overrides.append("stages.gate.method.rules.beats_parent.min_gain=0.9")
    assert "refuses left" in repository.called("run", *overrides, fails=True)
    output = repository.called("stage", "gate", *overrides, fails=True)
    assert "nothing to do: gate is finished" in output and "refuses left" in output
    repository.called("stage", "evaluate", *overrides)


@pytest.mark.slow
def test_data_that_dvc_tracks_is_a_source_with_its_hash(repository):
    repository("git", "rm", "--quiet", "--cached", "data/rows.txt")
    repository("dvc", "add", "data/rows.txt")
    repository.posttrain("run")
    configured = yaml.safe_load((repository.folder / "data/rows.txt.dvc").read_text())["outs"][0]["md5"]
    manifest = json.loads((repository.entry("data") / "manifest.json").read_text())
    assert manifest["inputs"]["rows"]["source"]["dvc"] == configured
    assert repository.is_clean()

    (repository.folder / "data/rows.txt").unlink()
    (repository.folder / "data/rows.txt").write_text("other rows")
    assert "data/rows.txt" in repository("dvc", "status")
    repository.posttrain("run")
    assert "data/rows.txt.dvc" in repository("dvc", "status")  # the user's to add; ours is committed
    assert executed(repository("dvc", "repro", "--single-item", *STAGES)) == []


@pytest.mark.parametrize("name", ["rows.jsonl", "folder"])
def test_the_hash_is_that_of_dvc_until_the_data_changes(repository, name):
    path: Path = repository.folder / "data" / name
    if name == "folder":
        (path / "deep").mkdir(parents=True)
        (path / "deep/b.jsonl").write_text("b\n")
    changed = path / "é a.jsonl" if name == "folder" else path
    changed.write_text("a\n")
    repository("dvc", "add", f"data/{name}")
    digests = DigestCache(repository.folder / "digests.json")
    configured = yaml.safe_load(path.with_name(name + ".dvc").read_text())["outs"][0]["md5"]
    assert tracked_hash(path, digests) == configured
    changed.unlink()
    changed.write_text("b\n")
    assert tracked_hash(path, digests) is None
