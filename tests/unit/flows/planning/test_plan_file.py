"""``plan --out`` and ``run --plan``: what was approved is what runs; ``plan --exit-code``."""

import json
import shutil

import pytest

from flows.planning.plan_file import read_plan, require_approved, write_plan
from lineage.code import code_files
from lineage.errors import ConfigError
from tests.command import Command
from tests.finished import finish


@pytest.fixture
def approved(toy, tmp_path):
    write_plan(toy(), tmp_path / "plan.json", ["pipeline=toy"], None)
    return read_plan(tmp_path / "plan.json")


def test_the_same_plan_is_accepted_and_so_is_one_with_less_to_do(toy, approved):
    require_approved(toy(), approved)  # raises where it is another
    finish(toy())
    require_approved(toy(), approved)
    assert not toy().stale


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("stages.left.method.learning_rate=0.2", "stages.left.method.learning_rate: 0.1 -> 0.2"),
        ("stages.left.resources.micro_batch_size=4", "stages.left.resources.micro_batch_size: 8 -> 4"),
        ("code_drift=rerun", 'settings.code_drift: "warn" -> "rerun"'),
        ("sources.rows.labels=[internal]", "sources.rows.labels: [] -> "),
        ("aliases.production={commercial: true}", "settings.aliases.production"),
    ],
)
def test_a_change_of_the_configuration_is_named(toy, approved, override, named):
    with pytest.raises(ConfigError, match=r"plan\.json is not what would run now") as refused:
        require_approved(toy(override), approved)
    assert f"\n  {named}" in str(refused.value)


def test_a_changed_row_is_named_with_its_file(toy, approved, tmp_path):
    (tmp_path / "rows.txt").write_text("other")
    with pytest.raises(ConfigError) as refused:
        require_approved(toy(), approved)
    assert f"sources.rows.files.{tmp_path}/rows.txt: " in str(refused.value)
    assert "sources.rows.fingerprint: " in str(refused.value)


def test_changed_code_is_named_with_its_module(toy, approved, tmp_path, monkeypatch):
    other = {"tests.toy_loop": "0" * 64}
    monkeypatch.setattr("flows.planning.plan_file.code_files", lambda module: code_files(module) | other)
    with pytest.raises(ConfigError, match=r"code\.tests\.toy_loop: \"\w{16}\" -> \"0{16}\""):
        require_approved(toy(), approved)


def test_a_finished_output_that_is_gone_is_named(toy, tmp_path):
    finish(toy())
    write_plan(toy(), tmp_path / "plan.json", [], None)
    plan = toy()
    shutil.rmtree(plan.entry(plan.stage("left")).output)
    with pytest.raises(ConfigError, match=r"stages\.left was finished and is to run now \(its output is damaged"):
        require_approved(toy(), read_plan(tmp_path / "plan.json"))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"posttrain_plan": 99, "overrides": [], "approved": {}}'])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(ConfigError, match="is not a plan of this version"):
        read_plan(tmp_path / "plan.json")


def test_secrets_of_addresses_are_not_written(toy, tmp_path):
    write_plan(toy(), tmp_path / "plan.json", ["tracking.uri=http://me:hunter2@host/"], None)
    assert "hunter2" not in (tmp_path / "plan.json").read_text()


def test_the_command_says_by_its_exit_code_whether_there_is_something_to_do(tmp_path, toy):
    command = Command(tmp_path, "pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", "store=store")
    assert command("plan").returncode == 0
    assert command("plan", "--exit-code").returncode == 4
    finish(toy(f"store={tmp_path}/store"))
    assert command("plan", "--exit-code", "--json").returncode == 0


def test_the_command_writes_a_plan_and_refuses_to_run_another(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    command = Command(tmp_path, "pipeline=toy", "model=none", "sources.rows.path=rows.txt")
    assert command("plan", "--out", "plan.json").returncode == 0
    assert json.loads((tmp_path / "plan.json").read_text())["overrides"][-1] == "sources.rows.path=rows.txt"
    refused = command("run", "--plan", "plan.json", "stages.left.method.seed=5")
    assert (refused.returncode, "stages.left.method.seed: 0 -> 5" in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / "artifacts").exists()
    swept = command("plan", "--multirun", "--out", "plan.json", "stages.left.method.seed=1,2")
    assert (swept.returncode, "--out with --multirun" in swept.stderr) == (2, True)
