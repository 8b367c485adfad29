"""A training that ended early and went on gives the weights of one that did not, to the bit."""

import json
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lineage.checkpoints import Checkpoints
from lineage.errors import PipelineError, StoppedError
from lineage.filesystem.digest import digest_files
from tasks.context import Metrics, Resources, TrainContext
from tasks.method import Adapter, Training
from tasks.train.best import KeepBest
from tasks.train.loop import saved_state
from tasks.train.losses.dpo_losses import ReferenceSync
from tests import tiny_models, training
from tests.training import same, weights

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = Adapter(rank=4, alpha=8, dropout=0.1)
SAVING = Resources(micro_batch_size=8, cpus_per_worker=1, save_steps=2, save_minutes=None)


def context(
    folder: Path, reports: list[tuple[int, Metrics]], *, resume_from: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False, resources: Resources = SAVING,
) -> TrainContext:  # fmt: skip
    return TrainContext(
        output_dir=folder / "output", work_dir=folder / "work", checkpoint_dir=folder / "checkpoints",
        resources=resources, report=lambda step, metrics: reports.append((step, {**metrics, **drawn()})),
        resume_from=resume_from, should_stop=should_stop,
    )  # fmt: skip


def drawn() -> dict[str, float]:
    """What the generators give at each step that no tiny training draws from: they are gone on with too."""
    return {"random": random.random(), "numpy": float(np.random.random())}


def run(stage: Training, root: Path, ctx: TrainContext, policy: Path | None = None) -> Metrics:
    return stage.run(training.inputs(root, stage, policy=policy), ctx)


OF_TIME = ("tokens_per_second", "tokens_per_second_per_worker", "mfu", "memory_gib")


def timeless(reports: list[tuple[int, Metrics]]) -> list[tuple[int, dict[str, float]]]:
    return [
        (step, {name: value for name, value in metrics.items() if name not in OF_TIME}) for step, metrics in reports
    ]


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        *(pytest.param(*each.values, None, id=f"{each.values[0]}-full", marks=each.marks) for each in training.NAMES),
        *(
            pytest.param(name, LORA, id=f"{name}-lora", marks=[] if name in ("dpo", "ppo") else pytest.mark.slow)
            for name in training.METHODS
        ),
    ],
)
def test_stopped_and_resumed_is_unbroken_to_the_bit(root: Path, tmp_path: Path, name: str, adapter) -> None:
    stage = training.method(name, num_steps=6, adapter=adapter, lr_schedule="cosine")
    stop_and_go_on(stage, root, tmp_path)


def test_so_it_is_with_a_mixture_whose_files_name_each_expert_and_whose_model_has_them_in_one(
    root: Path, tmp_path: Path
) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", "qwen3_moe")
    stop_and_go_on(training.method("sft", num_steps=6), root, tmp_path, policy=policy)
    saved = load_file(tmp_path / "broken" / "checkpoints" / "step-3" / "model.safetensors")
    assert "model.layers.0.mlp.experts.gate_up_proj" in saved


NF4 = replace(LORA, quantization="nf4")
SLOW = pytest.mark.slow
OPTIONS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("sft", {"adapter": LORA, "save": "adapter"}, {}),
    ("dpo", {"adapter": LORA, "precision": "bf16"}, {"weights": "bf16"}),
    ("dpo", {"reference_sync": ReferenceSync(every_steps=1, mixup_alpha=0.3)}, {}),
    ("dpo", {"adapter": LORA, "losses": {"kto_pair": 1.0, "aot_unpaired": 1.0, "sft": 0.1}}, {}),
    ("dpo", {}, {"precompute_reference": True}),
]
ADAPTERS: list[tuple[str, dict[str, object]]] = [
    ("sft", {"adapter": Adapter(type="adalora", rank=4, target_rank=1), "num_steps": 8}),  # scores, then prunes ranks
    ("sft", {"adapter": Adapter(rank=4, init="pissa_niter_4")}),
    ("dpo", {"adapter": Adapter(rank=4, init="lora_ga")}),
    ("dpo", {"adapter": Adapter(type="vera", rank=4)}),
    ("sft", {"adapter": Adapter(type="osf", rank=4)}),
    *((name, {"adapter": NF4}) for name, cls in training.METHODS.items() if not cls.has_own_loop),
]


@pytest.mark.parametrize(
    ("name", "fields", "resources"),
    [*OPTIONS, *(pytest.param(name, fields, {}, marks=SLOW) for name, fields in ADAPTERS)],
)
def test_so_it_is_with_every_option_that_has_a_state(
    root: Path, tmp_path: Path, name: str, fields: dict[str, object], resources: dict[str, object]
) -> None:
    stage = training.method(name, **{"num_steps": 6, **fields})
    stop_and_go_on(stage, root, tmp_path, replace(SAVING, **resources))


def stop_and_go_on(
    stage: Training, root: Path, tmp_path: Path, resources: Resources = SAVING, policy: Path | None = None
) -> list[tuple[int, Metrics]]:
    """Trains twice, once stopped at the third step, and asserts that no bit differs; what was reported."""
    whole: list[tuple[int, Metrics]] = []
    unbroken = run(stage, root, context(tmp_path / "whole", whole, resources=resources), policy)

    parts: list[tuple[int, Metrics]] = []
    broken = tmp_path / "broken"
    asked_after = 3 if stage.has_own_loop else 2  # transformers' loop logs a step after it asked
    stopping = context(broken, parts, should_stop=lambda: len(parts) == asked_after, resources=resources)
    with pytest.raises(StoppedError, match=f"stopped at step 3 of {stage.num_steps}"):
        run(stage, root, stopping, policy)
    assert not (broken / "output").exists()
    store = Checkpoints(broken / "checkpoints")
    assert store.steps() == [2, 3]
    seconds_before = store.read(3).train_seconds
    shutil.rmtree(broken / "work")
    resumed = run(stage, root, context(broken, parts, resume_from=store.path(3), resources=resources), policy)

    assert timeless(parts) == timeless(whole)
    assert digest_files(broken / "output") == digest_files(tmp_path / "whole" / "output")
    assert resumed["num_tokens"] == unbroken["num_tokens"]
    assert resumed["steps"] == stage.num_steps
    assert resumed["train_seconds"] > seconds_before
    return whole


def test_a_checkpoint_holds_all_that_a_resume_needs(root: Path, tmp_path: Path) -> None:
    reports: list[tuple[int, Metrics]] = []
    run(training.method("sft", num_steps=3), root, context(tmp_path, reports))
    found = Checkpoints(tmp_path / "checkpoints").read(2)
    needed = {"model.safetensors", "state.safetensors", "state.pt", "rank-0.pt", "trainer_state.json", "config.json"}
    assert needed <= found.files.keys()
    assert not any(name.endswith(".bin") for name in found.files)
    state = json.loads((tmp_path / "checkpoints" / "step-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "step-2")
    assert same(dict(loaded.named_parameters()), weights(tmp_path / "checkpoints" / "step-2"))
    assert found.metrics["loss"] == pytest.approx(sum(metrics["loss"] for _, metrics in reports[:2]) / 2)


def _killed_in_a_write(stage: Training, root: Path, folder: Path) -> None:
    """Trains, and is killed while the checkpoint of step 4 is written."""
    write = saved_state.write_tensors

    def half(path: Path, *args: object, **kwargs: object) -> str:
        if path.parent.name == "checkpoint-4" and path.name == "state.safetensors":
            path.write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, *args, **kwargs)

    saved_state.write_tensors = half
    with training.one_thread():
        run(stage, root, context(folder, []))


def test_killed_while_a_checkpoint_is_written_it_resumes_from_the_one_before(root: Path, tmp_path: Path) -> None:
    stage, broken = training.method("sft", num_steps=6), tmp_path / "broken"
    run(stage, root, context(tmp_path / "whole", []))
    process = multiprocessing.get_context("fork").Process(target=_killed_in_a_write, args=(stage, root, broken))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    newest, damaged = Checkpoints(broken / "checkpoints").newest_intact()
    assert newest and newest.step == 2 and not damaged
    run(stage, root, context(broken, [], resume_from=broken / "checkpoints" / "step-2"))
    assert digest_files(broken / "output") == digest_files(tmp_path / "whole" / "output")


def test_saving_changes_no_bit_and_none_falls_on_the_last_step(root: Path, tmp_path: Path) -> None:
    stage = training.method("sft", num_steps=4, adapter=LORA)
    run(stage, root, context(tmp_path / "saving", []))
    without = replace(context(tmp_path / "without", []), checkpoint_dir=None)
    run(stage, root, without)
    assert Checkpoints(tmp_path / "saving" / "checkpoints").steps() == [2]
    assert same(weights(tmp_path / "saving" / "output"), weights(tmp_path / "without" / "output"))


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({"save_steps": 1, "keep_last": 2}, [3, 4]),
        ({"save_steps": 2, "keep_last": 5}, [2, 4]),
        ({"save_steps": None, "save_minutes": 1e-9, "keep_last": 9}, [1, 2, 3, 4]),
        ({"save_steps": None, "save_minutes": 60.0}, []),
        ({"save_steps": None, "save_epochs": 0.5}, [3]),  # of 40 rows, 8 a step
        ({"save_steps": 1, "keep_last": 1, "keep_best": KeepBest(metric="loss", mode="max", n=2)}, [1, 2, 4]),
    ],
)
def test_when_it_saves_and_what_it_keeps(root: Path, tmp_path: Path, fields: dict, steps: list[int]) -> None:
    ctx = context(tmp_path, [])
    run(training.method("sft", num_steps=5), root, replace(ctx, resources=replace(SAVING, **fields)))
    assert Checkpoints(tmp_path / "checkpoints").steps() == steps


@pytest.mark.parametrize(("name", "needs_base"), [("sft", False), ("sft", True), ("ppo", False)])
def test_a_base_that_changes_during_its_training_loses_nothing(
    root: Path, tmp_path: Path, name: str, needs_base: bool
) -> None:
    """What the end needs was copied; where it needs weights again, the last step is a checkpoint to resume from."""
    stage = training.method(name, num_steps=4, adapter=NF4 if needs_base else None)
    base = shutil.copytree(root / "policy", tmp_path / "base")
    run(stage, root, context(tmp_path / "whole", []), base)
    kept, changed = (base / "tokenizer.json").read_text(), dict[str, str]()

    def report(step: int, metrics: Metrics) -> None:
        if step == 1:
            (base / "tokenizer.json").write_text("{}")
            changed["policy"] = "sources.base: base"

    resources = replace(SAVING, save_steps=None)
    ctx = replace(context(tmp_path, [], resources=resources), report=report, changed_models=lambda: changed)
    if needs_base:
        with pytest.raises(
            PipelineError, match=r"base has changed .* the last step of a training is kept as a checkpoint"
        ):
            run(stage, root, ctx, base)
    else:
        run(stage, root, ctx, base)
        assert same(weights(tmp_path / "output"), weights(tmp_path / "whole" / "output"))
        assert (tmp_path / "output" / "tokenizer.json").read_text() == kept
    (base / "tokenizer.json").write_text(kept)
    shutil.rmtree(ctx.output_dir)
    store = Checkpoints(tmp_path / "checkpoints")
    assert store.steps() == [4]
    run(stage, root, context(tmp_path, [], resume_from=store.path(4)), base)
    assert same(weights(tmp_path / "output"), weights(tmp_path / "whole" / "output"))
