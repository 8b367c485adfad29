import re
import shlex
from dataclasses import replace

import pytest

from flows.__main__ import main
from flows.deploy.pipelines import Declared, declared, declared_pipelines, deployable
from flows.deploy.preset import VARIABLE, Preset
from lineage.errors import ConfigError
from tests.command import CONF

TOY = ["--config-dir", str(CONF), "pipeline=toy", "model=none", "sources.rows.path=rows.txt", "tracking=none"]


def test_words_reach_the_process_of_a_run_as_they_were_given():
    preset = Preset.of([*TOY, "store=a folder"])
    assert Preset.of(shlex.split(preset.environment[VARIABLE])) == preset
    assert Preset().environment == {}


def test_what_a_run_states_itself_wins():
    words = Preset.of(TOY).words("toy", ["model=tiny", "stages.left.method.num_steps=2"])
    assert words == [
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
        Preset.of(TOY).words("toy", ["stages.left.method.num_steps=2", word])
    allowed = replace(Preset.of(TOY), allow_code=True)
    assert word in allowed.words("toy", [word])
    assert Preset.of(shlex.split(allowed.environment[VARIABLE])) == allowed
    assert word in Preset(overrides=(word,)).words("toy")  # the words of `serve` are the user's own


def test_a_pipeline_that_is_named_is_the_only_one():
    assert list(Preset.of(TOY).files()) == ["toy"]
    assert {"cpt-sft-dpo", "toy"} <= Preset(config_dir=CONF).files().keys()


def test_a_pipeline_has_its_tags_and_its_name(tmp_path):
    found = declared("toy", Preset.of([*TOY, "tags=[nightly]"]))
    assert (found.name, found.tags, found.problem) == ("toy", ["nightly", "pipeline:toy"], "")


def test_one_that_lacks_a_value_is_known_by_name_and_says_what_it_lacks():
    found = declared("toy", Preset(config_dir=CONF, overrides=("model=none",)))
    assert (found.name, found.pipeline) == ("toy", None)
    assert found.problem == "sources.rows.path: has no value; state sources.rows.path=..."


def test_those_of_which_nothing_can_be_told_do_not_keep_the_others_away(tmp_path):
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
    names = [each.name for each in deployable(Preset(config_dir=tmp_path))]
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


@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_a_limit_below_one_is_refused(limit, capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--limit", limit])
    assert "is no number of runs" in capsys.readouterr().err
