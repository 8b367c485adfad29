"""The two fronts, ``posttrain`` and ``dvc``, on one repository: they never disagree. Toy stages, real git, real DVC."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from lineage.dvc import DvcProject, View, tracked_hash
from lineage.errors import ArtifactError
from lineage.filesystem.digest import DigestCache
from lineage.store import Entry
from tests.command import CONF, REPOSITORY, call, call_dvc

WORDS = ("--config-dir", "conf", "pipeline=mini", "model=none", "sources.rows.path=data/rows.txt",
         "tracking.mlflow=false")  # fmt: skip
RECIPE = "# what a user edits\nlearning_rate: 0.1\n"


class DvcRepository:
    """Data under ``data/``, groups under ``conf/``, ``dvc.yaml`` rendered and committed.

    Args:
        overrides: what declares the pipeline.
        environment: further variables of every command.
    """

    def __init__(self, folder: Path, *overrides: str, environment: dict[str, str]) -> None:
        self.folder, self.overrides = folder, list(overrides)
        programs = folder.parent / "bin"
        programs.mkdir(exist_ok=True)
        for name, arguments in {"posttrain": "-m flows", "dvc": "-m dvc"}.items():
            (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -P {arguments} "$@"\n')
            (programs / name).chmod(0o755)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "DVC_SITE_CACHE_DIR": str(folder.parent / "site"),
            "DVC_NO_ANALYTICS": "1",
            "GIT_CONFIG_GLOBAL": os.devnull,
            **{f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
            **environment,
        }

    def create(self) -> "DvcRepository":
        """Makes the repository with the toy pipeline, whose ``left`` has a recipe of its own."""
        (self.folder / "data").mkdir(parents=True)
        (self.folder / "data/rows.txt").write_text("rows")
        toy = (CONF / "pipeline/toy.yaml").read_text().replace("name: toy", "name: mini")
        for name, text in {
            "pipeline/mini.yaml": f"# @package _global_\ndefaults:\n  - /recipe@stages.left.method: left\n{toy}",
            "recipe/left.yaml": RECIPE,
            "model/none.yaml": "# @package _global_\n{}\n",
        }.items():
            (self.folder / "conf" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / "conf" / name).write_text(text)
        self.start_tracking()
        return self

    def start_tracking(self) -> None:
        """git, DVC with the settings of this project, ``dvc.yaml``; all committed."""
        self("git", "init", "--quiet")
        self("dvc", "init", "--quiet")
        shutil.copyfile(REPOSITORY / ".dvc/config", self.folder / ".dvc/config")
        self(sys.executable, "-m", "flows.dvc_yaml", *self.overrides)
        self.commit("declared")

    def __call__(self, *overrides: str, fails: bool = False, **variables: str) -> str:
        """Runs a command and returns what it printed, both streams."""
        if overrides[0] == "dvc":
            called = call_dvc(list(overrides[1:]), self.folder, {**self.environment, **variables})
            return _output(overrides, called, fails)
        done = subprocess.run(
            overrides, cwd=self.folder, env={**self.environment, **variables}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
        )  # fmt: skip
        return _output(overrides, done, fails)

    def start(self, *overrides: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            overrides, cwd=self.folder, env=self.environment, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def posttrain(self, verb: str, *overrides: str, fails: bool = False, **variables: str) -> str:
        """Runs ``posttrain`` on the declared pipeline, in this process."""
        return self.called(verb, *self.overrides, *overrides, fails=fails, **variables)

    def called(self, *overrides: str, fails: bool = False, **variables: str) -> str:
        """Runs ``posttrain`` in this process."""
        done = call(list(overrides), self.folder, {**self.environment, **variables})
        return _output(["posttrain", *overrides], done, fails)

    def copy(self, folder: Path) -> "DvcRepository":
        """All of it elsewhere, with every file that has several names still one file."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run(["cp", "--archive", self.folder, folder], check=True)
        other = DvcRepository(folder, *self.overrides, environment={})
        kept = {name: value for name, value in self.environment.items() if name not in ("PATH", "DVC_SITE_CACHE_DIR")}
        other.environment |= kept
        return other

    def commit(self, message: str) -> None:
        self("git", "add", "--all")
        self("git", "commit", "--quiet", "--message", message)

    def is_clean(self) -> bool:
        return "Data and pipelines are up to date." in self("dvc", "status")

    def clone(self, folder: Path) -> "DvcRepository":
        folder.parent.mkdir()
        self("git", "clone", "--quiet", ".", str(folder))
        other = DvcRepository(folder, *self.overrides, environment={})
        other.environment = {**self.environment, "DVC_SITE_CACHE_DIR": str(folder.parent / "site")}
        return other

    def view(self, stage: str) -> Path:
        return self.folder / "artifacts/pipelines/mini" / stage

    def entry(self, stage: str) -> Path:
        """The only directory that the store has of a stage."""
        [path] = (self.folder / "artifacts" / stage).iterdir()
        return path


def _output(overrides: Sequence[str], done: subprocess.CompletedProcess[str], fails: bool) -> str:
    output = done.stdout + (done.stderr or "")
    assert (done.returncode != 0) == fails, f"{shlex.join(overrides)} ended with {done.returncode}:\n{output}"
    return output


def disk_bytes(*folders: Path) -> int:
    """What folders take on the disk, a file with several names once."""
    found = (path.lstat() for folder in folders for path in [folder, *folder.rglob("*")])
    return sum({status.st_ino: status.st_blocks * 512 for status in found}.values())


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
