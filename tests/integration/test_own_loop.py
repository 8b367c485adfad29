"""A loop that is not transformers': resumed to the bit, stopped on request, failed when it diverges."""

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError, PipelineError, StoppedError
from tasks.best import Best
from tasks.context import Metrics, Resources, TrainContext
from tasks.cpt import ContinuedPretraining
from tasks.data.kinds import TEXT
from tasks.method import LOOP_FIELDS, Adapter, Optimizer, Schedule, Training, Validation
from tasks.train.compatibility import check_compatible
from tasks.train.run import TrainingRun
from tests import training

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class PlainLoop(Training):
    """The next-token loss in plain torch, with random noise on its gradients."""

    reads: ClassVar = TEXT
    applies: ClassVar = frozenset({"max_grad_norm"})

    fails_at: int | None = None
    diverges_at: int | None = None

    def loop(self, run: TrainingRun) -> Metrics:
        from tasks.train.own_loop import OwnLoop

        model = run.policy.model
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.learning_rate)
        loop = OwnLoop(run, {"model": model, "optimizer": optimizer})
        for step in loop.steps():
            batches = list(run.micro_batches(step))
            loss = sum(model(**batch).loss / len(batches) for batch in batches)
            loss.backward()
            for parameter in (each for each in model.parameters() if each.requires_grad):
                parameter.grad += 1e-2 * torch.randn_like(parameter)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == self.fails_at:
                raise InterruptedError
            num_tokens = sum(batch["input_ids"].numel() for batch in batches)
            value = math.nan if step + 1 == self.diverges_at else float(loss)
            loop.report(loss=value, num_tokens=num_tokens, grad_norm=float(grad_norm))
        return loop.metrics()


@dataclass(frozen=True, kw_only=True)
class OptimizedLoop(Training):
    """Continued pretraining in a loop of its own, with the optimizer and schedule of the core."""

    reads: ClassVar = TEXT
    applies: ClassVar = LOOP_FIELDS

    fails_at: int | None = None

    def loop(self, run: TrainingRun) -> Metrics:
        from tasks.train.own_loop import Optimization, OwnLoop

        model = run.policy.model
        optimization = Optimization(run, model)
        loop = OwnLoop(run, {"model": model, "optimization": optimization})
        for step in loop.steps():
            assert model.training
            batches = list(run.micro_batches(step))
            total = 0.0
            for batch in batches:
                with optimization.autocast():
                    assert torch.is_autocast_enabled("cpu") == (self.precision == "bf16")
                    loss = model(**batch).loss / len(batches)
                loss.backward()
                total += float(loss)
            if step + 1 == self.fails_at:
                raise InterruptedError
            num_tokens = sum(batch["input_ids"].numel() for batch in batches)
            loop.report(loss=total, num_tokens=num_tokens, grad_norm=optimization.step())
        return loop.metrics()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"))


def method(**fields: object) -> PlainLoop:
    return PlainLoop(**{**training.FIELDS, "max_length": 16, "num_steps": STEPS, **fields})  # type: ignore[arg-type]


def context(folder: Path, reports: dict[int, Metrics] | None = None, **fields: object) -> TrainContext:
    return TrainContext(
        output_dir=folder / "output", work_dir=folder / "work", checkpoint_dir=folder / "checkpoints",
        resources=Resources(micro_batch_size=4, save_steps=2),
        report=lambda step, metrics: (reports if reports is not None else {}).update({step: dict(metrics)}),
        **fields,
    )  # type: ignore[arg-type]  # fmt: skip


def test_killed_and_resumed_it_ends_with_the_same_model_to_the_bit(root: Path, tmp_path: Path) -> None:
    whole: dict[int, Metrics] = {}
    given = training.inputs(root, method())
    torch.manual_seed(0)  # a process may have drawn random numbers before
    expected = method().run(given, context(tmp_path / "whole", whole))

    parts: dict[int, Metrics] = {}
    killed = context(tmp_path / "parts", parts)
    torch.manual_seed(1)
    with pytest.raises(InterruptedError):
        method(fails_at=4).run(given, killed)
    newest = Checkpoints(tmp_path / "parts" / "checkpoints").newest()
    assert newest and newest.step == 2
    torch.manual_seed(2)
    resumed = replace(killed, resume_from=tmp_path / "parts" / "checkpoints" / "step-2")
    found = method().run(given, resumed)

    assert training.same(*(training.weights(tmp_path / name / "output") for name in ("whole", "parts")))
    assert not training.same(training.weights(tmp_path / "whole" / "output"), training.weights(root / "policy"))
    timed = {"tokens_per_second", "memory_gib", "train_seconds"}
    assert whole.keys() == parts.keys() == set(range(1, STEPS + 1))
    for step, metrics in whole.items():
        assert {**metrics, **dict.fromkeys(timed, 0)} == {**parts[step], **dict.fromkeys(timed, 0)}, step
    assert {n: v for n, v in found.items() if n not in timed} == {n: v for n, v in expected.items() if n not in timed}
    assert found["steps"] == STEPS and found["num_tokens"] == STEPS * 8 * 16
    assert {"loss", "grad_norm", "num_tokens", "tokens_per_second", "memory_gib"} <= whole[1].keys()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {
            "lr_schedule": "linear", "warmup_ratio": 0.5, "weight_decay": 0.5, "max_grad_norm": 0.1,
            "precision": "bf16",
        },
        {"optimizer": Optimizer(name="muon"), "schedule": Schedule(name="warmup_stable_decay", decay=2)},
    ],
)  # fmt: skip
def test_with_the_optimizer_of_the_core_it_is_transformers_training(
    root: Path, tmp_path: Path, fields: dict[str, object]
) -> None:
    stated = {**training.FIELDS, "max_length": 16, "num_steps": STEPS, **fields}
    ours, theirs = OptimizedLoop(**stated), ContinuedPretraining(**stated)  # type: ignore[arg-type]
    found = {}
    for name, each in (("ours", ours), ("theirs", theirs)):
        reports: dict[int, Metrics] = {}
        each.run(training.inputs(root, each), context(tmp_path / name, reports))
        found[name] = reports
    for step in range(1, STEPS + 1):
        for metric in ("loss", "grad_norm", "num_tokens"):
            rel = 2e-2 if "precision" in fields else 1e-5
            assert found["ours"][step][metric] == pytest.approx(found["theirs"][step][metric], rel=rel), (step, metric)


@pytest.mark.parametrize("name", ["adamw_torch_fused", "adamw_8bit", "muon"])
def test_the_optimizer_of_the_core_is_resumed_to_the_bit(root: Path, tmp_path: Path, name: str) -> None:
    stated = {**training.FIELDS, "max_length": 16, "num_steps": STEPS, "optimizer": Optimizer(name=name)}
    whole, killed = OptimizedLoop(**stated), OptimizedLoop(**stated, fails_at=4)  # type: ignore[arg-type]
    given = training.inputs(root, whole)
    whole.run(given, context(tmp_path / "whole"))
    with pytest.raises(InterruptedError):
        killed.run(given, context(tmp_path / "parts"))
    resumed = replace(context(tmp_path / "parts"), resume_from=tmp_path / "parts" / "checkpoints" / "step-2")
    whole.run(given, resumed)
    assert training.same(*(training.weights(tmp_path / name / "output") for name in ("whole", "parts")))


def test_gradients_are_averaged_over_the_workers(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.train.own_loop import Optimization

    stated = OptimizedLoop(**training.FIELDS)  # type: ignore[arg-type]
    given, found = training.inputs(root, stated), []
    for world_size in (1, 2):
        run = TrainingRun(stated, given, context(tmp_path))
        optimization = Optimization(run, run.policy.model)
        optimization.world_size = world_size
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", lambda gradient: gradient.mul_(2))  # the other has the same
            run.policy.model(**next(run.micro_batches(0))).loss.backward()
            found.append(optimization.step())
    assert found[0] == found[1] > 0


def test_asked_to_stop_it_saves_and_ends(root: Path, tmp_path: Path) -> None:
    ctx = context(tmp_path, should_stop=lambda: True)
    with pytest.raises(StoppedError, match="stopped at step 1 of 5"):
        method().run(training.inputs(root, method()), ctx)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [1]
    assert not (tmp_path / "output").exists()


def test_a_loss_that_is_non_finite_ends_it(root: Path, tmp_path: Path) -> None:
    message = r"training diverged: at step 3 loss=nan.*last good checkpoint is that of step 2.*lower learning_rate"
    with pytest.raises(PipelineError, match=message):
        method(diverges_at=3).run(training.inputs(root, method()), context(tmp_path))


def test_an_adapter_is_trained_alone_and_resumed_to_the_bit(root: Path, tmp_path: Path) -> None:
    adapted = partial(method, adapter=Adapter(rank=2, alpha=4), save="adapter")
    given = training.inputs(root, adapted())
    torch.manual_seed(0)
    adapted().run(given, context(tmp_path / "whole"))
    torch.manual_seed(0)
    killed = context(tmp_path / "parts")
    with pytest.raises(InterruptedError):
        adapted(fails_at=4).run(given, killed)
    adapted().run(given, replace(killed, resume_from=tmp_path / "parts" / "checkpoints" / "step-2"))

    output = tmp_path / "whole" / "output"
    assert (output / "base.json").exists() and not (output / "model.safetensors").exists()
    whole, parts = (load_file(tmp_path / each / "output" / "adapter_model.safetensors") for each in ("whole", "parts"))
    assert training.same(whole, parts)
    assert any(bool(tensor.any()) for name, tensor in whole.items() if "lora_B" in name), "it was trained"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"precision": "bf16"}, r"precision=bf16: PlainLoop has a loop of its own.*set precision=fp32"),
        (
            {"weight_decay": 0.1},
            r"optimizer.weight_decay=0.1: .*set optimizer.weight_decay=0.0, or .*PlainLoop.applies",
        ),
        ({"lr_schedule": "linear"}, r"schedule.name=linear: .*set schedule.name=cosine"),
        (
            {"validation": Validation(every_steps=2)},
            r"PlainLoop has a loop of its own, which measures no held-out rows",
        ),
        ({"best": Best(every_steps=2)}, r"PlainLoop has a loop of its own, which measures no competing models"),
    ],
)
def test_a_field_that_the_loop_ignores_is_refused_with_the_plan(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method(**fields)
    assert method(max_grad_norm=0.5).max_grad_norm == 0.5, "the loop applies it"


def test_a_recipe_states_no_field_that_the_loop_ignores() -> None:
    recipe = method().recipe()
    assert recipe["max_grad_norm"] == 1.0 and recipe["seed"] == 0
    assert recipe.keys().isdisjoint(LOOP_FIELDS - {"max_grad_norm"})
    applied = {"precision", "weight_decay", "lr_schedule", "warmup_ratio", "max_grad_norm"}
    assert recipe.keys().isdisjoint(applied - {"max_grad_norm"})
    assert OptimizedLoop(**training.FIELDS).recipe().keys() >= applied  # type: ignore[arg-type]
    assert ContinuedPretraining(**training.FIELDS).recipe().keys() >= applied  # type: ignore[arg-type]


def test_a_loop_finds_its_models_and_rows_on_its_device(root: Path, tmp_path: Path) -> None:
    run = TrainingRun(method(), training.inputs(root, method()), context(tmp_path))
    run.device = torch.device("meta")  # as a GPU would be
    assert run.policy.model.device.type == "meta"
    assert all(tensor.device.type == "meta" for batch in run.micro_batches(0) for tensor in batch.values())


def test_zero_is_refused_with_the_plan() -> None:
    resources = Resources(num_workers=2, zero_stage=2, micro_batch_size=4)
    with pytest.raises(
        ConfigError, match=r"zero_stage=2, method=PlainLoop: ZeRO needs.*set stages.plain.resources.zero_stage=0"
    ):
        check_compatible("stages.plain", method(), resources)
