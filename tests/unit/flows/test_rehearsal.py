"""A rehearsal and a certification run every stage in short, in a store of their own."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.operate import rehearsal
from flows.operate.certify import certify, other_workers
from flows.operate.rehearsal import announce, delete_others, micro_batches, rehearse, row_of, scratch, scratch_plan
from flows.planning.plan import Plan
from lineage.errors import ArtifactError, ConfigError, StageError
from lineage.filesystem.lock import Lock
from lineage.record.metrics_file import step_seconds
from tasks.context import Launcher, Resources
from tasks.cpt import ContinuedPretraining
from tasks.method import Validation
from tasks.train.optim.diloco import DiLoCo
from tests.finished import finish

Toy = Callable[..., Plan]


def short(plan: Plan, store: Path) -> Plan:
    return scratch_plan(plan.pipeline, store, num_steps=6, save_steps=2)


def test_all_is_made_in_short_in_another_store(toy: Toy, tmp_path: Path) -> None:
    configured = ("stages.left.method.num_steps=900", "stages.left.method.max_length=77", "resources.max_failures=9")
    real = toy(*configured, "stages.left.resources.launcher=foreground", "restart=[left]")
    finish(real)
    plan = short(real, tmp_path / "scratch")
    left = plan.stage("left")
    assert left.stage.method == replace(real.stage("left").stage.method, num_steps=6)
    assert left.stage.resources.save_steps == 2 and left.stage.resources.save_minutes is None
    assert (left.stage.resources.launcher, left.stage.resources.max_failures) == (Launcher.AUTO, 1)
    assert left.stage.resources.micro_batch_size == real.stage("left").stage.resources.micro_batch_size
    assert {planned.state for planned in plan.stages} == {"run"}  # also data, of which nothing is shorter
    assert plan.entry(plan.stage("data")).path.is_relative_to(tmp_path / "scratch")
    assert not left.restart


def test_epochs_and_validation_are_in_short_too(toy: Toy, tmp_path: Path) -> None:
    plan = toy()
    method = ContinuedPretraining(num_epochs=3, validation=Validation(every_epochs=0.5, patience=1))
    stages = {**plan.pipeline.stages, "left": replace(plan.pipeline.stages["left"], method=method)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "flows.operate.rehearsal.make_plan", lambda pipeline: Plan(pipeline=pipeline, stages=[], home=tmp_path)
        )
        short_of = scratch_plan(replace(plan.pipeline, stages=stages), tmp_path, num_steps=6, save_steps=2).pipeline
    assert short_of.stages["left"].method == replace(
        method, num_steps=6, num_epochs=None, validation=Validation(every_steps=2)
    )


def test_its_place_is_gone_afterwards_and_so_is_that_of_a_dead_command(tmp_path: Path) -> None:
    folder = tmp_path / "rehearsals"
    (folder / "dead").mkdir(parents=True)
    living = Lock(folder / "living")
    assert living.try_acquire()
    with living.holding():
        with scratch(tmp_path, keep=False) as place:
            assert (folder / "dead").is_dir()
            delete_others(place)
            assert {path.name for path in folder.iterdir() if path.is_dir()} == {"living", place.name}
        assert not place.exists()
        with pytest.raises(KeyboardInterrupt), scratch(tmp_path, keep=False) as place:
            raise KeyboardInterrupt
        assert not place.exists()


def test_it_stays_for_who_asks_and_for_the_log_of_a_failure_until_the_next(tmp_path: Path) -> None:
    with scratch(tmp_path, keep=True) as asked:
        pass
    assert asked.is_dir()
    for error in (StageError("sft", "it failed", "log"), ArtifactError("no record")):
        with pytest.raises(type(error)), scratch(tmp_path, keep=False) as failed:
            raise error
        assert failed.is_dir() and asked.is_dir()
    with pytest.raises(ConfigError), scratch(tmp_path, keep=False) as wrong:
        raise ConfigError("wrong")
    assert not wrong.exists() and failed.is_dir()
    with scratch(tmp_path, keep=False) as last:
        delete_others(last)
        assert not asked.exists() and not failed.exists()


@pytest.mark.parametrize("command", ["rehearse", "certify"])
def test_one_that_is_refused_touches_nothing(toy: Toy, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pipeline = toy("stages.left.resources.gpus_per_worker=1").pipeline
    kept = pipeline.store / "rehearsals" / "kept"
    kept.mkdir(parents=True)
    monkeypatch.setattr(rehearsal, "_unregister", lambda _: pytest.fail("it was not refused before"))
    with pytest.raises(ConfigError, match="asks for 1 GPU"):
        certify(pipeline, []) if command == "certify" else rehearse(pipeline, [], keep=False)
    assert [path.name for path in kept.parent.iterdir() if path.is_dir()] == ["kept"]


@pytest.mark.parametrize(
    ("configured", "workers", "rows", "sharding", "asked"),
    [
        ({}, 2, 4, "none", None),
        ({"num_workers": 2, "micro_batch_size": 4, "sharding": "fsdp"}, 4, 2, "fsdp", 4),
        ({"num_workers": 2, "micro_batch_size": 4}, 1, 4, "none", None),
        ({"num_workers": 4, "micro_batch_size": 2}, 2, 2, "none", None),
        ({"num_workers": 4, "micro_batch_size": 2, "sharding": "fsdp"}, 2, 2, "fsdp", None),
        ({"num_workers": 2, "micro_batch_size": 4, "sharding": "fsdp", "prefetch": 1}, 1, 4, "none", None),
    ],
)
def test_other_workers_share_the_same_batch(
    toy: Toy, configured: dict[str, object], workers: int, rows: int, sharding: str, asked: int | None
) -> None:
    left = toy().stage("left")
    other = other_workers(replace(left, stage=replace(left.stage, resources=Resources(**configured))), asked)
    assert isinstance(other, Resources)
    assert (other.num_workers, other.micro_batch_size, other.sharding) == (workers, rows, sharding)


@pytest.mark.parametrize(
    ("resources", "overrides", "why"),
    [
        (Resources(num_workers=2, micro_batch_size=4, zero_stage=2), (), "sharding=zero2: resumes with 2 workers only"),
        (Resources(num_workers=4, sharding="zero3"), (), "sharding=zero3: resumes with 4 workers only"),
        (Resources(micro_batch_size=1), ("global_batch_size=1",), "global_batch_size=1 is not a multiple of 2"),
        (Resources(), ("adapter={rank: 4, dropout: 0.1}",), "adapter.dropout=0.1"),
        (Resources(gpus_per_worker=1), (), "asks for 2 GPUs, this machine shows 1"),
    ],
)
def test_where_other_workers_say_nothing_it_says_why(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, resources: Resources, overrides: tuple[str, ...], why: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    micro = ["stages.left.resources.micro_batch_size=1"]
    left = toy(*micro, *(f"stages.left.method.{field}" for field in overrides)).stage("left")
    other = other_workers(replace(left, stage=replace(left.stage, resources=resources)))
    assert isinstance(other, str) and why in other


@pytest.mark.parametrize(
    ("resources", "why"),
    [
        (Resources(num_workers=2), "num_workers=1 is no multiple of num_islands=2"),
        (Resources(num_workers=4, num_nodes=2, sharding="fsdp_hybrid"), "in islands: resumes with 4 workers only"),
    ],
)
def test_islands_are_certified_with_workers_that_divide_over_them(toy: Toy, resources: Resources, why: str) -> None:
    left = toy().stage("left")
    method = replace(left.stage.method, diloco=DiLoCo(num_islands=2))  # type: ignore[call-arg]
    other = other_workers(replace(left, stage=replace(left.stage, resources=resources, method=method)))
    assert isinstance(other, str) and why in other


def test_the_pace_is_that_of_the_fastest_step_by_its_own_tokens() -> None:
    slow, fast = {"num_tokens": 100.0, "tokens_per_second": 1.0}, {"num_tokens": 150.0, "tokens_per_second": 25.0}
    assert step_seconds([slow, fast]) == 2.0
    assert step_seconds([{**slow, "tokens_per_second": 100.0}, {**fast, "tokens_per_second": 10.0}]) == 1.0
    assert step_seconds([{"loss": 1.0}, fast]) == 6.0
    assert step_seconds([{"loss": 1.0}]) is None
    assert step_seconds([]) is None


ADAPTER = "adapter/adapter_model.safetensors"


def test_the_best_model_is_looked_for_in_short_too(toy: Toy, tmp_path: Path) -> None:
    best = ("stages.left.method.best.every_steps=100", "stages.left.method.best.metric=loss")
    method = short(toy(*best), tmp_path).stage("left").stage.method
    assert method.best.every_steps == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("files", "merged"),
    [
        (("model.safetensors", ADAPTER), True),
        (("model-00001-of-00002.safetensors", "config.json", ADAPTER), True),
        (("model.safetensors",), False),  # although the stage states an adapter
        (("config.json", ADAPTER), False),
        (("adapter_model.safetensors", "adapter_config.json"), False),
    ],
    ids=["merged", "in parts", "no adapter beside", "no model", "an adapter alone"],
)
def test_a_merge_is_seen_by_what_it_wrote(toy: Callable[..., Plan], files: tuple[str, ...], merged: bool) -> None:
    plan = toy("stages.left.method.adapter={rank: 4}")
    finish(plan)
    left = plan.stage("left")
    entry = plan.entry(left)
    manifest = entry.manifest()
    assert manifest
    written = replace(manifest, files=dict.fromkeys(files, "d"))
    (entry.path / "manifest.json").write_text(written.to_json())
    row = row_of(plan, left, seconds=1.0, num_steps=40, checkpoint_bytes=None)
    assert ("merge" in row.exercised) is merged and row.real_seconds is None  # no step reports tokens


def test_a_rehearsal_takes_one_micro_batch_per_worker_a_step_and_counts_the_others(tmp_path, capsys):
    cli_args = ["tracking=none", f"store={tmp_path}/store", "resources.micro_batch_size=4"]
    pipeline = load_pipeline([*cli_args, "stages.sft.resources.num_workers=2"])
    plan = scratch_plan(pipeline, tmp_path / "other", num_steps=2, save_steps=1, one_micro_batch=True)
    short = {name: plan.stage(name).stage for name in ("cpt", "sft", "dpo")}
    assert [each.method.global_batch_size for each in short.values()] == [4, 8, 4]
    assert [micro_batches(pipeline.stages[name], each) for name, each in short.items()] == [2, 2, 4]
    certified = scratch_plan(pipeline, tmp_path / "other", num_steps=2, save_steps=1)
    assert certified.stage("dpo").stage.method.global_batch_size == 16
    announce(plan)
    assert re.search(r"4 trainings of 2 steps, one micro batch per worker each: about 0:\d\d ", capsys.readouterr().err)


def test_a_rehearsal_of_generated_completions_keeps_its_groups(tmp_path):
    cli_args = [
        "pipeline=sft-grpo",
        "tracking=none",
        f"store={tmp_path}/store",
        "stages.grpo.resources.micro_batch_size=8",
    ]
    pipeline = load_pipeline(cli_args)
    plan = scratch_plan(pipeline, tmp_path / "other", num_steps=2, save_steps=1, one_micro_batch=True)
    real = pipeline.stages["grpo"].method.global_batch_size
    assert plan.stage("grpo").stage.method.global_batch_size == real
