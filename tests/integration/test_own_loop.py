"""A loop that is not transformers': resumed to the bit, stopped on request, failed when it diverges."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file

from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError, PipelineError
from tasks.context import Metrics, Resources, TrainContext
from tasks.cpt import ContinuedPretraining
from tasks.data.kinds import TEXT
from tasks.method import LOOP_FIELDS, Adapter, Optimizer, Schedule, Training, Validation
from tasks.train.best import Best
from tasks.train.compatibility import check_compatible
from tasks.train.run import TrainingRun
from tests import training
from tests.integration.test_resume import stop_and_go_on

STEPS = 5


@dataclass(frozen=True, kw_only=True)
class PlainLoop(Training):
    """The next-token loss in plain torch, with random noise on its gradients."""

    reads: ClassVar = TEXT
    applies: ClassVar = frozenset({"max_grad_norm"})

    fails_at: int | None = None
    diverges_at: int | None = None

    def loop(self, run: TrainingRun) -> Metrics:
        from tasks.train.loop.own_loop import OwnLoop

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

    def loop(self, run: TrainingRun) -> Metrics:
        from tasks.train.loop.own_loop import Optimization, OwnLoop

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
            num_tokens = sum(batch["input_ids"].numel() for batch in batches)
            loop.report(loss=total, num_tokens=num_tokens, grad_norm=optimization.step())
        return loop.metrics()


def method(**fields: object) -> PlainLoop:
    return PlainLoop(**{**training.FIELDS, "max_length": 16, "num_steps": STEPS, **fields})  # type: ignore[arg-type]


def context(folder: Path, reports: dict[int, Metrics] | None = None, **fields: object) -> TrainContext:
    return TrainContext(
        output_dir=folder / "output", work_dir=folder / "work", checkpoint_dir=folder / "checkpoints",
        resources=Resources(micro_batch_size=8, save_steps=2, save_minutes=None),
        report=lambda step, metrics: (reports if reports is not None else {}).update({step: dict(metrics)}),
        **fields,
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (PlainLoop, {}),
        (PlainLoop, {"adapter": Adapter(rank=2, alpha=4), "save": "adapter"}),
        *((OptimizedLoop, {"optimizer": Optimizer(name=name)}) for name in ("adamw_torch_fused", "adamw_8bit", "muon")),
    ],
)
def test_stopped_and_resumed_it_ends_with_the_same_model_to_the_bit(
    root: Path, tmp_path: Path, cls: type[Training], fields: dict[str, object]
) -> None:
    stage = cls(**{**training.FIELDS, "max_length": 16, "num_steps": 6, **fields})  # type: ignore[arg-type]
    torch.manual_seed(1)  # a process may have drawn random numbers before
    reports = stop_and_go_on(stage, root, tmp_path, context(tmp_path).resources)
    output = tmp_path / "whole" / "output"
    if stage.adapter:
        assert (output / "base.json").exists() and not (output / "model.safetensors").exists()
        adapter = load_file(output / "adapter_model.safetensors")
        assert any(bool(tensor.any()) for name, tensor in adapter.items() if "lora_B" in name), "it was trained"
    else:
        assert not training.same(training.weights(output), training.weights(root / "policy"))
    assert [step for step, _ in reports] == [*range(1, 7)]
    assert {"loss", "grad_norm", "num_tokens", "tokens_per_second", "mfu", "memory_gib"} <= reports[0][1].keys()
    assert reports[-1][1]["num_tokens"] == 6 * 8 * 16


def test_killed_it_resumes_from_its_last_checkpoint(root: Path, tmp_path: Path) -> None:
    given = training.inputs(root, method())
    method().run(given, context(tmp_path / "whole"))
    killed = context(tmp_path / "parts")
    with pytest.raises(InterruptedError):
        method(fails_at=4).run(given, killed)
    newest = Checkpoints(tmp_path / "parts" / "checkpoints").newest()
    assert newest and newest.step == 2
    method().run(given, replace(killed, resume_from=tmp_path / "parts" / "checkpoints" / "step-2"))
    assert training.same(*(training.weights(tmp_path / name / "output") for name in ("whole", "parts")))


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
    configured = {**training.FIELDS, "max_length": 16, "num_steps": STEPS, **fields}
    ours, theirs = OptimizedLoop(**configured), ContinuedPretraining(**configured)  # type: ignore[arg-type]
    found = {}
    for name, each in (("ours", ours), ("theirs", theirs)):
        reports: dict[int, Metrics] = {}
        each.run(training.inputs(root, each), context(tmp_path / name, reports))
        found[name] = reports
    for step in range(1, STEPS + 1):
        for metric in ("loss", "grad_norm", "num_tokens"):
            rel = 2e-2 if "precision" in fields else 1e-5
            assert found["ours"][step][metric] == pytest.approx(found["theirs"][step][metric], rel=rel), (step, metric)


def test_gradients_are_averaged_over_the_workers(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tasks.train.loop.own_loop import Optimization

    configured = OptimizedLoop(**training.FIELDS)  # type: ignore[arg-type]
    given, found = training.inputs(root, configured), []
    for world_size in (1, 2):
        run = TrainingRun(configured, given, context(tmp_path))
        optimization = Optimization(run, run.policy.model)
        optimization.world_size = world_size
        with monkeypatch.context() as patch:
            patch.setattr(torch.distributed, "get_world_size", lambda: 2)
            patch.setattr(torch.distributed, "all_reduce", lambda each, *_: each.mul_(2))  # the other has the same
            run.policy.model(**next(run.micro_batches(0))).loss.backward()
            found.append(optimization.step())
    assert found[0] == found[1] > 0


def test_a_loss_that_is_non_finite_ends_it(root: Path, tmp_path: Path) -> None:
    message = r"training diverged: at step 3 loss=nan.*last good checkpoint is that of step 2.*lower learning_rate"
    with pytest.raises(PipelineError, match=message):
        method(diverges_at=3).run(training.inputs(root, method()), context(tmp_path))


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
        ConfigError, match=r"sharding=zero2, method=PlainLoop: ZeRO needs.*set stages.plain.resources.sharding=fsdp"
    ):
        check_compatible("stages.plain", method(), resources)
