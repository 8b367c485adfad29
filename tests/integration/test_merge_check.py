"""Merges that could not be made are refused with the plan; one that can is run, and its inputs are in its lineage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.planning.model_checks import check_merges
from lineage.errors import ConfigError
from tests import tiny
from tests.command import Command
from tests.integration.test_merge import CHANGES

PIPELINE = """\
# @package _global_
defaults: [{/stage@stages.merge.method: merge}, _self_]
name: merging
sources:
  other: {kind: checkpoint, path: other}
stages:
  merge:
    inputs: {policy: base, other: "source:other"}
    method: {combination: linear, weights: {policy: 0.25, other: 0.75}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models, a pipeline that merges them, and the folder of both."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("one", "other")):
        tiny.write_policy(tmp_path / name, seed=seed)
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    (tmp_path / "conf" / "pipeline" / "merging.yaml").write_text(PIPELINE)
    return tmp_path


WORDS = ("pipeline=merging", "model=one")


def check(folder: Path, *overrides: str) -> None:
    check_merges(load_pipeline([*WORDS, *overrides], folder / "conf"))


def test_a_merge_runs_and_each_input_is_in_its_lineage(folder: Path, prefect_url: str) -> None:
    command = Command(folder, environment={"PREFECT_API_URL": prefect_url})
    arguments = ("--config-dir", str(folder / "conf"), *WORDS, "resources=foreground")
    result = command("run", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    stage = {row["stage"]: row for row in json.loads(result.stdout)["stages"]}["merge"]
    assert stage["metrics"]["merge/models"] == 2
    manifest = json.loads((Path(stage["output"]).parent / "manifest.json").read_text())
    sources = {slot: given["artifact"] for slot, given in manifest["inputs"].items()}
    assert sources == {"policy": "source:base", "other": "source:other"}
    assert all(given["digest"] for given in manifest["inputs"].values())
    tree = command("lineage", stage["fingerprint"], "--json").stdout
    assert "source:base" in tree and "source:other" in tree
    again = command("plan", *arguments, "--json")
    assert [row["state"] for row in json.loads(again.stdout)["stages"]] == ["reuse"]
    other = command("plan", *arguments, "stages.merge.method.weights={policy:0.5,other:0.5}", "--json")
    assert [row["state"] for row in json.loads(other.stdout)["stages"]] == ["run"]


@pytest.mark.parametrize(("change", "found"), CHANGES)
def test_models_that_do_not_fit_are_refused_with_the_plan(
    folder: Path, change: Callable[[Path], None], found: str
) -> None:
    check(folder)
    change(folder / "other")
    found = found.replace("one", "base").replace("other ", "source:other ")
    with pytest.raises(ConfigError, match=f"stages.merge: .*{found}"):
        check(folder)


METHOD, INPUTS = "stages.merge.method", "stages.merge.inputs"


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        ([f"{METHOD}.combination=null", f"{METHOD}.weights=null"], "combination is not set, and there are 2 models"),
        ([f"~{INPUTS}.other"], "combination=linear: policy is the only model; fill a further slot"),
        ([f"{METHOD}.combination=slerp", f"{INPUTS}.third=base"], r"slerp: .* there are 3 \(policy, other, third\)"),
        ([f"{METHOD}.combination=task_arithmetic"], "adds up differences to a base; fill inputs.base"),
        ([f"{INPUTS}.base=base"], "combination=linear: it reads no base; remove inputs.base"),
        ([f"{INPUTS}.third=base"], "weights has policy, other, and the models are policy, other, third"),
        ([f"{METHOD}.weights={{policy:0.5,other:0.4}}"], "weights sum to 0.9: linear averages models"),
        ([f"{METHOD}.weights={{policy:1.0,other:.nan}}"], r"weights\.other"),
        ([f"{METHOD}.density=0.5"], "density=0.5: combination=linear has none"),
        ([f"{METHOD}.seed=1"], "seed=1: combination=linear has none"),
        ([f"{METHOD}.max_difference=0.1"], "max_difference=0.1: combination=linear has none"),
        ([f"{METHOD}.combination=ties"], "density is not set, the share of differences that is kept; set density=0.2"),
        ([f"{METHOD}.combination=ties", f"{METHOD}.density=1.5"], "density"),
        ([f"{METHOD}.combination=cat"], "cat with space=weights: accepted there: linear, slerp, .*space=adapters"),
        ([f"{METHOD}.combination=slerp", f"{METHOD}.space=adapters"], "slerp with space=adapters: .*space=weights"),
        (["stage@stages.merge.method=merge_reward_models"], "gives checkpoint, this slot takes reward_model"),
        (["sources.other.kind=reward_model"], "gives reward_model, this slot takes checkpoint"),
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_plan(folder: Path, overrides: list[str], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        check(folder, *overrides)


TUNED = """\
# @package _global_
defaults: [{/part: sft}, {/stage@stages.again.method: sft}, {/stage@stages.merge.method: merge}, _self_]
name: tuned
stages:
  again: {inputs: {policy: cpt, rows: instructions}}
  merge: {inputs: {policy: sft}}
"""


def test_a_merge_of_adapters_is_refused_with_the_plan_where_a_stage_gives_a_whole_model(tmp_path: Path) -> None:
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "tuned.yaml").write_text(TUNED)
    lora = [f"stages.{stage}.method.{field}" for stage in ("sft", "again") for field in ("save=adapter", "adapter={}")]

    def checked(*overrides: str) -> None:
        check_merges(load_pipeline(["pipeline=tuned", "model=tiny", *overrides], tmp_path))

    for overrides in (
        ["+stages.merge.inputs.other=again", f"{METHOD}.combination=cat", f"{METHOD}.space=adapters"],
        [],
    ):
        with pytest.raises(ConfigError, match=r"inputs.policy=sft: .* sft gives a whole model; set .*save=adapter"):
            checked(*overrides)
        checked(*overrides, *lora)
    with pytest.raises(ConfigError, match=r"inputs.other=again: space=adapters, and again gives a whole model"):
        checked("+stages.merge.inputs.other=again", f"{METHOD}.combination=cat", f"{METHOD}.space=adapters", *lora[:2])
    checked(f"{METHOD}.dtype=bf16")
    checked("+stages.merge.inputs.other=again", f"{METHOD}.combination=linear")
