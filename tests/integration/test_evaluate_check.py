"""Evaluations that could not compare their models are refused with the plan."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.planning.checks import check_evaluations, check_frozen_models
from lineage.errors import ConfigError
from tasks.evaluate import Evaluate
from tests.tiny import write_tokenizer

METHOD = "stages.evaluate.method"


def check(*overrides: str) -> None:
    check_evaluations(load_pipeline([*overrides]))


@pytest.mark.parametrize("pipeline", ["cpt-sft-dpo", "cpt-sft-dpo-gated", "cpt-sft-dpo-retrain"])
def test_the_shipped_evaluations_are_sound(pipeline: str) -> None:
    shipped = load_pipeline([f"pipeline={pipeline}"])
    assert any(isinstance(stage.method, Evaluate) for stage in shipped.stages.values())
    check_evaluations(shipped)


@pytest.fixture
def bases(tmp_path: Path) -> tuple[str, str]:
    """Two directories with tokenizers that differ in two tokens; and the overrides that start from the first."""
    known, other = (write_tokenizer(tmp_path / name) for name in ("known", "other"))
    document = json.loads((other / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(document))
    return str(known), str(other)


def start_from(directory: str) -> tuple[str, ...]:
    return "model=pretrained", f"sources.base.path={directory}"


def source(name: str, kind: str, path: str) -> tuple[str, ...]:
    return f"+source@sources.{name}=rows", f"sources.{name}.kind={kind}", f"sources.{name}.path={path}"


@pytest.mark.parametrize(
    ("slot", "kind", "remedy"),
    [
        ("reward_model", "reward_model", "train the reward model from a model of the same base"),
        ("dpo", "checkpoint", "leave dpo out, or train both from the same base"),
    ],
)
def test_a_model_with_other_tokens_is_refused(bases: tuple[str, str], slot: str, kind: str, remedy: str) -> None:
    known, other = bases
    given = (*start_from(known), f"stages.evaluate.inputs.{slot}=source:own")
    check(*given, *source("own", kind, known))
    with pytest.raises(ConfigError, match=rf"stages\.evaluate\.inputs: {slot} .* different tokenizers.*{remedy}"):
        check(*given, *source("own", kind, other))


def write_vocabulary(directory: Path, change: Callable[[dict[str, int]], dict[str, int]]) -> str:
    document = json.loads((write_tokenizer(directory) / "tokenizer.json").read_text())
    document["model"]["vocab"] = change(document["model"]["vocab"])
    (directory / "tokenizer.json").write_text(json.dumps(document))
    return str(directory)


def test_a_model_that_lacks_tokens_of_the_reference_is_refused(bases: tuple[str, str], tmp_path: Path) -> None:
    """Two vocabularies without a token in common were accepted."""
    known, _ = bases
    given = (*start_from(known), "stages.evaluate.inputs.dpo=source:own")
    lacking = {
        "disjoint": lambda tokens: {f"{token}~": index for token, index in tokens.items()},
        "smaller": lambda tokens: {token: index for token, index in tokens.items() if token != "a"},
    }
    for name, change in lacking.items():
        other = write_vocabulary(tmp_path / name, change)
        with pytest.raises(ConfigError, match=r"dpo .*: [0-9]+ tokens of .* are missing in dpo or have"):
            check(*given, *source("own", "checkpoint", other))
    larger = write_vocabulary(tmp_path / "larger", lambda tokens: {**tokens, "a~": 10**5})
    check(*given, *source("own", "checkpoint", larger))


def test_the_length_of_the_longest_stage_leaves_capacity_for_a_prompt() -> None:
    with pytest.raises(
        ConfigError, match="max_new_tokens=4096 of evaluate leaves no capacity for a prompt in max_length="
    ):
        check(f"{METHOD}.max_new_tokens=4096")
    check(f"{METHOD}.max_new_tokens=4096", f"{METHOD}.max_length=5000")


def test_what_a_stage_leaves_out_of_the_thinking_is_left_out_of_the_measure() -> None:
    trained = [f"stages.{stage}.method.thinking" for stage in ("sft", "reward", "dpo")]
    check(f"{trained[0]}=keep")  # without it a stage trains all that the assistant thinks, or refuses the row
    check(*(f"{field}=drop" for field in trained))
    check(f"{trained[0]}=drop", f"{METHOD}.thinking=drop")
    for others in ((), (f"{trained[1]}=drop", f"{trained[2]}=keep")):
        with pytest.raises(ConfigError, match=r"stages\.evaluate\.method: thinking of evaluate .* sft.* thinking=drop"):
            check(f"{trained[0]}=drop", *others)


def test_models_that_no_stage_trains_need_a_length(bases: tuple[str, str]) -> None:
    known, _ = bases
    slots = ("reference", "cpt", "sft", "dpo")
    given = (
        *start_from(known),
        *(f"stages.evaluate.inputs.{slot}=source:base" for slot in slots),
        "stages.evaluate.inputs.reward_model=source:own",
        *source("own", "reward_model", known),
    )
    with pytest.raises(ConfigError, match=r"stages\.evaluate\.method\.max_length is not set, and none of the models"):
        check(*given)
    check(*given, f"{METHOD}.max_length=512")


@pytest.mark.parametrize("method", ["distill", "taid"])
def test_a_teacher_with_other_tokens_is_refused_where_both_are_known(bases: tuple[str, str], method: str) -> None:
    known, other = bases
    given = (
        *start_from(known), f"+stage@stages.student.method={method}", "+stages.student.inputs.policy=cpt",
        "+stages.student.inputs.rows=instructions", "+stages.student.inputs.teacher=source:own",
    )  # fmt: skip
    check_frozen_models(load_pipeline([*given, *source("own", "checkpoint", known)]))
    with pytest.raises(
        ConfigError,
        match=r"stages\.student\.inputs: teacher \(source:own\) and policy \(cpt\) have different.*2 tokens",
    ):
        check_frozen_models(load_pipeline([*given, *source("own", "checkpoint", other)]))
