"""Which pipelines are deployed, with what overrides, schedule, automations and code; and `prefect.yaml`."""

import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flows.__main__ import main
from flows.commands.serve import only_server_of
from flows.prefect import deployed
from flows.prefect.deployed import deployed_code
from flows.prefect.deployments import VARIABLE, Declared, Preset, declared, declared_pipelines, deployable, render
from flows.prefect.deployments import main as write_prefect_yaml
from lineage.errors import ConfigError
from tests.command import CONF, REPOSITORY

TOY = ["--config-dir", str(CONF), "pipeline=toy", "model=none", "sources.rows.path=rows.txt", "tracking=none"]


def test_words_reach_the_process_of_a_run_as_they_were_passed():
    preset = Preset.of([*TOY, "store=a folder"])
    assert Preset.of(shlex.split(preset.environment[VARIABLE])) == preset
    assert Preset().environment == {}


def test_what_a_run_states_itself_wins():
    cli_args = Preset.of(TOY).cli_args("toy", ["model=tiny", "stages.left.method.num_steps=2"])
    assert cli_args == [
        "--config-dir", str(CONF), "pipeline=toy", "sources.rows.path=rows.txt", "tracking=none",
        "model=tiny", "stages.left.method.num_steps=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("stages.left.method._target_=os.system", "_target_"),
        ("stages.left.method={_target_: os.system}", "_target_"),
        ("sources.rows.allow_code=true", "allow_code"),
        ("sources.rows={path: rows.txt, allow_code: true}", "allow_code"),
        ("sources.rows.path=python:rows.py:f", "python:"),
        (r"sources.rows.path=python\\:rows.py:f", "python:"),
        ("sources.rows.path='python:rows.py:f'", "python:"),
        ("stages.left.method.rewards.mine.function=python:my.rewards.score", "python:"),
        ("+stages.left.method.rewards={mine: {function: 'python:a.py:f'}}", "python:"),
        ("stages.left.method.rewards.mine.allow_code=true", "allow_code"),
        ("sources.rows.path=${oc.env:PLACE}", "${"),
        ("sources.rows=${oc.decode:'{path: x}'}", "${"),
        ("--config-dir=/elsewhere", "-"),
    ],
)
def test_a_run_may_not_name_code_unless_whoever_serves_allows_it(word, found):
    with pytest.raises(ConfigError, match=f"may not have {re.escape(found)}, .*serve --allow-code"):
        Preset.of(TOY).cli_args("toy", ["stages.left.method.num_steps=2", word])
    allowed = replace(Preset.of(TOY), allow_code=True)
    assert word in allowed.cli_args("toy", [word])
    assert Preset.of(shlex.split(allowed.environment[VARIABLE])) == allowed
    assert word in Preset(overrides=(word,)).cli_args("toy")  # the words of `serve` are the user's own


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stages.left.method.num_steps=many", 'stages.left.method.num_steps="many": input should be a valid integer'),
        ("stages.left.method.learning_rat=1", "did you mean learning_rate"),
    ],
)
def test_a_wrong_override_fails_a_run_before_any_stage(monkeypatch, override, message):
    monkeypatch.setattr(deployed, "flow_run_here", lambda: None)
    monkeypatch.setattr(deployed, "_exit_with_parent", lambda: None)
    state = deployed._run_deployed("toy", Preset.of(TOY), [override], any_code=False)
    assert state.type.value == "FAILED" and message in state.message


def test_a_pipeline_that_is_named_is_the_only_one():
    assert list(Preset.of(TOY).files()) == ["toy"]
    assert {"cpt-sft-dpo", "toy"} <= Preset(config_dir=CONF).files().keys()


def test_a_pipeline_has_its_tags_and_its_name(tmp_path):
    found = declared("toy", Preset.of([*TOY, "tags=[nightly]"]))
    assert (found.name, found.tags, found.problem) == ("toy", ["nightly", "pipeline:toy"], "")


def test_one_that_lacks_a_value_is_known_by_name_and_says_what_it_lacks():
    found = declared("toy", Preset(config_dir=CONF, overrides=("model=none",)))
    assert (found.name, found.pipeline) == ("toy", None)
    assert found.problem == "sources.rows.path: has no value; set sources.rows.path=..."


def test_those_of_which_nothing_can_be_reported_do_not_keep_the_others_away(tmp_path):
    (tmp_path / "pipeline").mkdir()
    unknown = {"a.b": "name: x", "broken": "name: [", "nameless": "stages: {a: 1}"}
    for name, text in unknown.items():
        (tmp_path / "pipeline" / f"{name}.yaml").write_text("# @package _global_\n" + text)
    found = list(declared_pipelines(Preset(config_dir=tmp_path)))
    problems = sorted(each.partition(".yaml")[0] for each in found if isinstance(each, str))
    assert problems == [str(tmp_path / "pipeline" / name) for name in unknown]
    assert "cpt-sft-dpo" in [each.name for each in found if isinstance(each, Declared)]


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        declared("cpt-sft-dpo", Preset(config_dir=tmp_path / "nowhere"))


def test_of_two_pipelines_of_one_name_the_second_is_left_out_and_named(tmp_path, capsys):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "copy.yaml").write_text("# @package _global_\ndefaults: [cpt-sft-dpo, _self_]\n")
    names = [each.name for each in deployable(Preset(config_dir=tmp_path, overrides=("model=tiny",)))]
    assert names.count("cpt-sft-dpo") == 1
    err = capsys.readouterr().err
    assert "copy.yaml: cpt-sft-dpo is also the name of" in err and "give it a name of its own" in err


@pytest.mark.parametrize("word", ["model=typo", "stages.dpo.methd.beta=1"])
def test_words_that_no_pipeline_takes_are_refused_before_anything_is_served(word):
    with pytest.raises(ConfigError, match=word.partition("=")[0].partition(".")[0]):
        deployable(Preset(overrides=(word,)))


def test_a_pipeline_that_only_lacks_a_value_is_served():
    [toy] = deployable(Preset(config_dir=CONF, overrides=("model=none",), pipeline="toy"))
    assert (toy.name, toy.lacks_value) == ("toy", True)


def test_a_pipeline_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean cpt-sft-dpo-gated"):
        deployable(Preset(pipeline="cpt-sft-dpo-gatd"))


@pytest.mark.parametrize("word", ["pipeline=sfft", "--config-dir=nowhere"])
def test_what_cannot_be_served_is_refused_before_a_server_starts(word, monkeypatch):
    monkeypatch.setattr("flows.prefect.server.EmbeddedServer.start", lambda _: pytest.fail("a server starts"))
    assert main(["serve", word]) == 2
    assert not Path("artifacts").exists()


def test_a_deployment_that_another_process_serves_is_refused_with_its_store(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("flows.prefect.server.EmbeddedServer.start", lambda _: pytest.fail("a server starts"))
    for before, now in [("", ""), ("http://10.0.0.1:4200/api", "http://10.0.0.1:4200/api/")]:
        monkeypatch.setenv("PREFECT_API_URL", before)
        with only_server_of({"sft/local": tmp_path / "first", "dpo/local": tmp_path / "first"}):
            monkeypatch.setenv("PREFECT_API_URL", now)
            assert main(["serve", "pipeline=sft", "model=tiny", "store=second"]) == 2
            where = f"(in {os.getcwd()}, store={tmp_path}/first)"
            assert f"sft/local: is already served by process {os.getpid()} {where}" in (err := capsys.readouterr().err)
            assert "--name NAME" in err
            with only_server_of({"sft/other": tmp_path}):
                monkeypatch.setenv("PREFECT_API_URL", "http://10.0.0.2:4200/api")
                with only_server_of({"sft/local": tmp_path}):
                    pass
        with only_server_of({"sft/local": tmp_path}):
            pass


@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_a_limit_below_one_is_refused(limit, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--limit", limit])
    assert "not a valid number of runs" in capsys.readouterr().err


def test_the_committed_file_deploys_every_shipped_pipeline():
    text = (REPOSITORY / "prefect.yaml").read_text()
    assert text == render(Preset()), "write it again: make prefect-yaml"
    entries = [each["entrypoint"] for each in yaml.safe_load(text)["deployments"]]
    assert entries == [f"posttrain.entry.{path.stem}" for path in sorted((REPOSITORY / "conf/pipeline").glob("*"))]


def test_a_deployment_states_how_its_pipeline_operates():
    trigger = "trigger={events: [data.ready], settle: 5}"
    cli_args = [
        *TOY,
        trigger,
        "store=a folder",
        "tags=[nightly]",
        "schedule.cron='0 3 * * *'",
        "schedule.timezone=Europe/Berlin",
    ]
    (deployment,) = yaml.safe_load(render(Preset.of(cli_args)))["deployments"]
    assert deployment["tags"] == ["nightly", "pipeline:toy"]
    (schedule,) = deployment["schedules"]
    assert (schedule["cron"], schedule["timezone"]) == ("0 3 * * *", "Europe/Berlin")
    environment = deployment["work_pool"]["job_variables"]["env"]
    assert "'store=a folder'" in environment["POSTTRAIN_WORDS"]
    (automation,) = deployment["triggers"]
    assert (automation["expect"], automation["within"], automation["schedule_after"]) == (["data.ready"], 5.0, 5.0)
    hourly = yaml.safe_load(render(Preset.of([*TOY, "schedule.interval=3600"])))["deployments"][0]["schedules"]
    when = {"interval": 3600, "anchor_date": "2020-01-01T00:00:00+00:00", "timezone": "UTC", "active": True}
    assert hourly == [when]


def test_the_command_writes_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["prefect_yaml", *TOY])
    assert write_prefect_yaml() == 0
    assert (tmp_path / "prefect.yaml").read_text() == render(Preset.of(TOY))
    monkeypatch.setattr("sys.argv", ["prefect_yaml", "--config-dir", "nowhere"])
    assert write_prefect_yaml() == 2
    assert "nowhere" in capsys.readouterr().err


OWN = """# @package _global_
name: own
stages:
  data: {method: {_target_: MODULE.Own}}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A pipeline of the user's with a method of the user's."""
    (tmp_path / "groups/pipeline").mkdir(parents=True)
    module = f"own_{tmp_path.name}"  # where a module lies is looked up once per process
    (tmp_path / "groups/pipeline/own.yaml").write_text(OWN.replace("MODULE", module))
    (tmp_path / f"{module}.py").write_text("class Own: ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def digest(folder):
    return deployed_code("own", Preset(config_dir=folder / "groups"))


def test_the_same_files_have_the_same_digest(own):
    assert digest(own) == digest(own) != deployed_code("cpt-sft-dpo", Preset())


@pytest.mark.parametrize("pattern", ["groups/pipeline/own.yaml", "own_*.py"])
def test_a_change_of_the_users_groups_or_methods_is_other_code(own, pattern):
    before = digest(own)
    (path,) = own.glob(pattern)
    path.write_text(path.read_text() + "# changed\n")
    assert digest(own) != before


def test_a_change_of_a_reward_function_is_other_code(own):
    (own / "mine.py").write_text("def score(completions): return [1]\n")
    file = own / "groups/pipeline/own.yaml"
    text = file.read_text().replace(
        "}}", f", rewards: {{a: {{function: 'python:{own}/mine.py:score'}}, exact: {{}}}}}}}}"
    )
    file.write_text(text)
    before = digest(own)
    (own / "mine.py").write_text("def score(completions): return [2]\n")
    assert digest(own) != before


def test_a_change_of_our_packages_is_other_code(monkeypatch, tmp_path):
    before = deployed_code("cpt-sft-dpo", Preset())
    changed = []

    def digest_file(path):
        changed.append(path.name)
        return "other" if path.name == "dpo.py" else "same"

    monkeypatch.setattr("flows.prefect.deployed.digest_file", lambda path: "same")
    same = deployed_code("cpt-sft-dpo", Preset())
    monkeypatch.setattr("flows.prefect.deployed.digest_file", digest_file)
    assert deployed_code("cpt-sft-dpo", Preset()) not in (same, before)
    assert {"dpo.py", "execute.py", "store.py", "cpt-sft-dpo.yaml"} <= set(changed)
