"""``posttrain blame``: the first stage whose model is worse; only evaluation runs. Toy stages, each as good as told."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows.operate.blame import _evaluated
from lineage.errors import ConfigError
from lineage.promotions import Event, append
from tasks.evaluate.evaluate import Evaluate
from tests.command import TOY, Command, call
from tests.miniature import MODEL, STEPS, write_own_rows

STAGES = ("data", "blank", "first", "second", "third", "exam")
WORSE = "stages.second.method.points=-60"


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    overrides = ["pipeline=toy-taught", *(word for word in TOY if not word.startswith("pipeline="))]
    return Command(tmp_path, *overrides)


def make(toy: Command, *overrides: str) -> dict[str, str]:
    """Runs every stage without Prefect; stage -> fingerprint."""
    for name in STAGES:
        made = call(
            ["stage", name, *toy.cli_args("run"), "resources=foreground", *overrides], toy.folder, toy.environment
        )
        assert made.returncode == 0, made.stderr
    rows = json.loads(toy("plan", "--json", *overrides).stdout)["stages"]
    return {row["stage"]: row["fingerprint"][:16] for row in rows}


def blame(toy: Command, *overrides: str) -> dict:
    found = call(["blame", *overrides, "--metric", "accuracy", "--json"], toy.folder, toy.environment)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def outcomes(found: dict) -> dict[str, str]:
    return {row["stage"]: row.get("outcome") for row in found["stages"]}


def made(toy: Command) -> dict[str, int]:
    """Stage -> how often one was begun."""
    store = toy.folder / "artifacts"
    return {each.name: len(list(each.glob("*/logs"))) for each in store.iterdir() if list(each.glob("*/logs"))}


def test_the_first_stage_whose_model_is_worse_is_named_and_nothing_is_trained(toy):
    before = make(toy, "stages.first.method.points=190")
    after = make(toy, WORSE)
    begun = made(toy)
    found = blame(toy, f"third@{after['third']}")
    assert (found["a"], found["b"]) == (f"third@{before['third']}", f"third@{after['third']}")
    assert outcomes(found) == {"first": "better", "second": "worse", "third": "worse"}
    assert found["first"] == "second"
    second = found["stages"][1]
    assert (second["baseline"], second["candidate"]) == (240 / 400, 140 / 400)
    assert second["estimate"] == pytest.approx(-0.25)
    assert second["low"] < second["estimate"] < second["high"] < 0
    texts = [each["text"] for each in found["differences"]]
    assert "second: points: 50 -> -60" in texts
    assert "first: points: 190 -> 200" not in texts  # of first, whose model is no worse
    assert made(toy) == {**begun, "exam-blame": 1}

    report = Path(found["report"])
    digest = (report / "scores.jsonl").stat().st_mtime_ns
    assert blame(toy, "toy-taught/third") == found
    assert (report / "scores.jsonl").stat().st_mtime_ns == digest
    assert made(toy) == {**begun, "exam-blame": 1}
    text = call(["blame", "toy-taught/third", "--metric", "accuracy"], toy.folder, toy.environment).stdout
    assert "second is the first stage whose model is worse in accuracy; what differs there:" in text
    assert "its own recipe:\n  second: points: 50 -> -60" in text


@pytest.mark.slow
def test_no_stage_is_named_where_none_is_worse_beyond_the_noise(toy):
    make(toy)
    make(toy, "stages.first.method.points=199")
    found = blame(toy, "toy-taught/third")
    assert (found["first"], found["differences"]) == (None, [])
    assert set(outcomes(found).values()) == {"inconclusive"}


@pytest.mark.slow
def test_an_alias_says_which_model_is_the_predecessor(toy):
    first, second, third = (make(toy, f"stages.second.method.points={points}") for points in (50, 40, 30))
    for each in (first, third):
        append(
            toy.folder / "artifacts",
            Event(action="promote", fingerprint=each["third"], who="w", why="y", alias="champion", stage="third"),
        )
    assert blame(toy, "alias:champion")["a"] == f"third@{first['third']}"
    assert blame(toy, f"third@{third['third']}")["a"] == f"third@{first['third']}"
    assert blame(toy, f"third@{second['third']}")["a"] == f"third@{first['third']}"
    assert blame(toy, "alias:champion", "--against", f"third@{second['third']}")["a"] == f"third@{second['third']}"


def test_a_metric_that_the_evaluation_does_not_measure_is_refused_before_it_runs():
    planned = SimpleNamespace(stage=SimpleNamespace(method=Evaluate(), inputs={}), upstream=[], state="run")
    with pytest.raises(ConfigError, match=r"--metric answer_perplexty: exam does not measure it"):
        _evaluated(SimpleNamespace(stage=lambda name: planned), "exam", "answer_perplexty", [])


@pytest.mark.slow
def test_a_model_that_is_gone_is_left_out_and_said_so(toy):
    before = make(toy)
    make(toy, WORSE)
    shutil.rmtree(toy.folder / "artifacts" / "second" / before["second"] / "output")
    found = blame(toy, "toy-taught/third")
    assert outcomes(found) == {"second": None, "third": "worse"}
    assert found["first"] == "third"
    text = call(["blame", "toy-taught/third", "--metric", "accuracy"], toy.folder, toy.environment).stdout
    assert f"second@{before['second']} is no longer in the store" in text


def test_what_cannot_be_blamed_is_refused(toy):
    make(toy)
    for overrides, message in (
        (("toy-taught/third", "--metric", "accuracy"), "and third made none; name it with --against"),
        (("toy-taught/exam", "--metric", "accuracy"), "is report, and blame compares models"),
        (("toy-taught/third", "--against", "toy-taught/third", "--metric", "accuracy"), "are one artifact"),
        (("toy-taught/third", "--against", "toy-taught/first", "--metric", "nope"), "no scores of it; it has accuracy"),
    ):
        refused = call(["blame", *overrides], toy.folder, toy.environment)
        assert refused.returncode == 2 and message in refused.stderr


@pytest.mark.slow
def test_of_the_real_pipeline_the_stage_with_the_harmful_rate_is_named(tmp_path, prefect_url):
    overrides = (*MODEL, *STEPS, *write_own_rows(tmp_path, 600), "stages.evaluate.method.num_rows=100")
    mini = Command(tmp_path, *overrides, environment={"PREFECT_API_URL": prefect_url})
    mini.run("stages.sft.method.num_steps=60")
    after = mini.run("stages.sft.method.num_steps=60", "stages.sft.method.learning_rate=1e-7")
    asked = ["blame", "cpt-sft-dpo/dpo", "--metric", "answer_perplexity", "--json"]
    found = call(asked, tmp_path, mini.environment)
    assert found.returncode == 0, found.stderr
    blamed = json.loads(found.stdout)
    assert (blamed["first"], outcomes(blamed)) == ("sft", {"sft": "worse", "dpo": "worse"})
    assert blamed["b"] == f"dpo@{after['dpo']['fingerprint'][:16]}"
    assert [row["text"] for row in blamed["differences"] if row["what"] == "recipe"] == [
        "sft: learning_rate: 0.002 -> 1e-07"
    ]
    stages = {path.name: len(list(path.glob("*/manifest.json"))) for path in (tmp_path / "artifacts").iterdir()}
    assert (stages["base"], stages["cpt"], stages["sft"], stages["dpo"]) == (1, 1, 2, 2)
    assert stages["evaluate-blame"] == 1
    assert json.loads(call(asked, tmp_path, mini.environment).stdout) == blamed
