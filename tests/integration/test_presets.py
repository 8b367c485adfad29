"""Presets, and resources that choose a precision, compose and plan with every shipped pipeline."""

from functools import partial

import pytest
from hydra.core.override_parser.types import IntervalSweep

from flows.declare.config import CONF, load_pipeline
from flows.planning.plan import make_plan
from flows.sweep.plan import read_sweep
from flows.sweep.space import choices

SLOW = partial(pytest.param, marks=pytest.mark.slow)  # tests/unit/flows/test_advise.py plans with every preset
PIPELINES = sorted(path.stem for path in (CONF / "pipeline").glob("*.yaml"))


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("choice", [SLOW("preset=conservative"), SLOW("preset=one-gpu-qlora"), "preset=medium"])
def test_every_pipeline_plans_with_presets(pipeline: str, choice: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_plan(load_pipeline([f"pipeline={pipeline}", choice, "tracking=none"])).stale


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_pipeline_composes_for_a_gpu(pipeline: str) -> None:
    found = load_pipeline([f"pipeline={pipeline}", "resources=gpu", "tracking=none"])
    precisions = {stage.method.recipe().get("precision") for stage in found.stages.values() if stage.method.trains}
    assert "bf16" in precisions


def test_the_guides_sweep_has_the_guides_space(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read_sweep(["sweep=guide", "model=smollm2", "tracking=none"])
    space = {field.removeprefix("stages.sft.method."): values for field, values in found.space.items()}
    intervals = {name: each.value() for name, each in space.items() if isinstance(each.value(), IntervalSweep)}
    assert {name: (each.start, each.end, each.tags) for name, each in intervals.items()} == {
        "learning_rate": (1e-5, 1e-2, {"log"}), "schedule.warmup": (0, 0.3, set()),
        "optimizer.weight_decay": (0, 0.1, set()), "adapter.rank": (4, 32, set()), "adapter.alpha": (8, 64, set()),
        "adapter.dropout": (0, 0.1, set()),
    }  # fmt: skip
    assert choices(space["num_epochs"]) == tuple("12345")
    batches = sorted({batch * steps for batch in (2, 4, 8) for steps in range(1, 9)})
    assert list(map(int, choices(space["global_batch_size"]))) == batches
    assert len(choices(space["optimizer.name"])) == 3 and found.num_trials == 10
