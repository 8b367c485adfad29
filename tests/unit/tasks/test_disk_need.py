"""What a stage will write, from its recipe and the headers of its model."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lineage.errors import ConfigError
from lineage.filesystem.disk import gigabytes
from lineage.store import Entry
from tasks.context import Resources
from tasks.judgement.disk_need import adapter_weights, disk_need, model_shapes, require_disk
from tasks.method import Adapter, Optimizer
from tasks.ppo import PPO
from tasks.sft import SFT
from tasks.train.best import Best, KeepBest

SHAPES = {
    "model.embed_tokens.weight": (100, 10), "model.layers.0.q_proj.weight": (10, 10),
    "model.layers.0.up_proj.weight": (20, 10), "model.norm.weight": (10,), "lm_head.weight": (100, 10),
}  # fmt: skip
WEIGHTS = 1000 + 100 + 200 + 10 + 1000


def need(num_steps: int = 100, adapter: Adapter | None = None, *, best: Best | None = None, save=None, **resources):
    method = SFT(num_steps=num_steps, adapter=adapter, best=best, save=save)
    return disk_need(method, Resources(**{"save_minutes": None, **resources}), SHAPES)


def test_a_checkpoint_is_weights_and_two_moments_and_the_output_weights() -> None:
    found = need(save_steps=10)
    assert (found.checkpoint, found.output) == (12 * WEIGHTS, 4 * WEIGHTS)
    assert found.least.bytes == found.total.bytes == 3 * found.checkpoint  # one is gone when the output is written


@pytest.mark.parametrize(("sharding", "copies"), [("zero2", 1), ("zero3", 2), ("fsdp", 2), ("fsdp_hybrid", 2)])
def test_divided_weights_are_collected_on_the_disk_before_the_output_is_written(sharding, copies) -> None:
    assert need(save_steps=10, sharding=sharding, num_workers=2).output == copies * 4 * WEIGHTS


def test_weights_in_two_halves_are_saved_whole_in_checkpoints_and_rounded_in_the_output() -> None:
    found = disk_need(SFT(num_steps=100, optimizer=Optimizer(weights="bf16")), Resources(save_steps=10), SHAPES)
    assert (found.checkpoint, found.output) == (12 * WEIGHTS, 2 * WEIGHTS)


def test_a_merged_output_is_in_the_dtype_of_the_frozen_base() -> None:
    whole, half = (need(adapter=Adapter(rank=1), weights=weights).output for weights in ("fp32", "bf16"))
    assert whole - half == 2 * WEIGHTS  # the adapter beside it stays in fp32


def test_the_output_counts_beside_the_checkpoints_that_are_left_when_it_is_written() -> None:
    found = need(adapter=Adapter(rank=1), save_steps=10)
    assert found.output > found.checkpoint
    assert found.least.bytes == 2 * found.checkpoint + found.output
    assert str(found.least) == f"at one time 2 checkpoints of {gigabytes(found.checkpoint)} and its output of 9.4 kB"


def test_ppo_saves_its_value_model_too_and_the_base_under_an_adapter() -> None:
    resources = Resources(save_minutes=None, save_steps=10)
    full, adapted = (
        disk_need(PPO(num_steps=100, adapter=adapter), resources, SHAPES) for adapter in (None, Adapter(rank=1))
    )
    assert (full.checkpoint, full.output) == (24 * WEIGHTS, 4 * WEIGHTS)
    assert adapted.checkpoint == 4 * WEIGHTS + 12 * WEIGHTS + 12 * (20 + 30)


@pytest.mark.parametrize(
    ("target_modules", "save", "adapter", "output"),
    [("all-linear", None, 4 * (20 + 30), WEIGHTS), ("q_proj", None, 4 * 20, WEIGHTS), ("q_proj", "adapter", 4 * 20, 0)],
)
def test_of_an_adapter_only_it_is_trained(target_modules, save, adapter, output) -> None:
    found = need(adapter=Adapter(rank=4, target_modules=target_modules), save=save, save_steps=10)
    assert (found.checkpoint, found.output) == (12 * adapter, 4 * (adapter + output))


@pytest.mark.parametrize(
    ("num_steps", "fields", "fewest", "most"),
    [
        (100, {}, 0, 1),  # a stop saves
        (10, {"save_steps": 10}, 0, 1),  # none is made of the last step
        (11, {"save_steps": 10}, 1, 2),
        (100, {"save_steps": 10}, 3, 3),  # two are kept while a third is written
        (100, {"save_steps": 10, "keep_last": 1}, 2, 2),
        (100, {"save_steps": 10, "keep_best": KeepBest(metric="loss", n=3)}, 3, 6),  # may be the newest
        (100, {"best": Best(every_steps=10)}, 0, 4),
        (100, {"best": Best(every_steps=60)}, 0, 2),
        (100, {"save_minutes": 10.0}, 2, 3),
        (100, {"save_minutes": 10.0, "save_steps": 10}, 3, 3),
        (3, {"save_minutes": 10.0}, 2, 2),
        (2, {"save_minutes": 10.0}, 1, 1),
        (1, {"save_minutes": 10.0}, 0, 0),
    ],
)
def test_so_many_checkpoints_there_are_at_one_time(num_steps, fields, fewest, most) -> None:
    found = need(num_steps, **fields)
    assert (found.fewest, found.most) == (fewest, most)


@pytest.fixture
def entry(tmp_path: Path) -> Entry:
    return Entry(tmp_path / "artifacts" / "sft" / "1")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets how many bytes are free."""
    return lambda count: monkeypatch.setattr("tasks.judgement.disk_need.free_bytes", lambda path: count)


def require(resources: Resources, model: Path | None, entry: Entry, **before: int) -> int:
    return require_disk("sft", SFT(num_steps=100), resources, model, entry, **before)


def written(entry: Entry, count: int) -> None:
    """A checkpoint of so many bytes."""
    (entry.checkpoints.directory / "step-10").mkdir(parents=True)
    (entry.checkpoints.directory / "step-10" / "optimizer.pt").write_bytes(b"0" * count)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    weights = {name: np.zeros(shape, np.float16) for name, shape in SHAPES.items()}
    parts = list(weights)
    files = {name: f"model-{1 + (name in parts[2:])}.safetensors" for name in parts}
    for file in set(files.values()):
        save_file({name: weights[name] for name in parts if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"lora_A.weight": np.zeros((4, 10), np.float32)}, directory / "adapter_model.safetensors")
    save_file({"layers.0.wq": np.zeros((10, 10), np.float16)}, directory / "consolidated.safetensors")
    return directory


def test_shapes_are_those_of_all_parts_of_the_whole_model(model: Path) -> None:
    assert model_shapes(model) == SHAPES
    assert model_shapes(model.parent) == {}
    (model / "model-2.safetensors").rename(model / "moved")
    with pytest.raises(ConfigError, match=r"does not fit the files beside it: model-2.safetensors is missing"):
        model_shapes(model)
    (model / "model.safetensors.index.json").unlink()
    (model / "moved").rename(model / "model.safetensors")
    assert model_shapes(model) == dict(list(SHAPES.items())[2:])


def test_a_stage_without_room_is_refused_with_what_to_do(model: Path, entry: Entry, free) -> None:
    resources = Resources(save_steps=10, save_minutes=None)
    least = 3 * 12 * WEIGHTS
    free(least)
    assert require(resources, model, entry) == 4 * WEIGHTS
    with pytest.raises(ConfigError) as caught:
        require(resources, model, entry, before=1000)
    assert str(caught.value) == (
        f"store {entry.path.parents[1]} has 83.2 kB free (less 1.0 kB for the stages before it); sft needs about "
        "83.2 kB: at one time 3 checkpoints of 27.7 kB; set stages.sft.resources.keep_last=1, free 1.0 kB more "
        "(posttrain gc shows what may be deleted), or set a larger store (store=...)"
    )
    assert require(resources, None, entry, before=least) == 0  # nothing is known


def test_only_what_suffices_is_named_as_a_remedy(model: Path, entry: Entry, free) -> None:
    resources = Resources(save_steps=10)  # and every 10 minutes
    free(2 * 12 * WEIGHTS)
    with pytest.raises(ConfigError, match=r"; set stages.sft.resources.keep_last=1, free 27.7 kB more"):
        require(resources, model, entry)
    free(12 * WEIGHTS)
    with pytest.raises(ConfigError, match=r"27.7 kB; free 55.4 kB more"):
        require(resources, model, entry)
    with pytest.raises(ConfigError, match=r"; set stages.sft.resources.save_minutes=null, free"):
        require(Resources(keep_last=1), model, entry)


def test_what_may_not_fit_is_only_warned_of(model: Path, entry: Entry, free, caplog) -> None:
    free(2 * 12 * WEIGHTS)
    with caplog.at_level(logging.WARNING):
        require(Resources(), model, entry)
    [record] = caplog.records
    assert "sft may need about 83.2 kB: at one time 3 checkpoints of 27.7 kB; set stages.sft" in record.getMessage()
    with pytest.raises(
        ConfigError, match=r"needs about 55.4 kB: at one time 2 checkpoints .*; set stages.sft.*save_min"
    ):
        require(Resources(), model, entry, before=1)
    require(Resources(save_minutes=None), model, entry, before=12 * WEIGHTS)


def test_what_the_stages_before_give_back_is_room(model: Path, entry: Entry, free) -> None:
    free(2 * 12 * WEIGHTS)
    resources = Resources(save_steps=10, save_minutes=None)
    require(resources, model, entry, before=-12 * WEIGHTS)
    with pytest.raises(ConfigError, match=r"free \(and 9.2 kB once the stages before it are finished\); sft needs"):
        require(resources, model, entry, before=-4 * WEIGHTS)
    written(entry, 10 * 12 * WEIGHTS)
    assert require(resources, model, entry) == (4 - 10 * 12) * WEIGHTS
    assert require(resources, None, entry) == -10 * 12 * WEIGHTS  # whatever its model is


def test_what_an_attempt_before_left_is_room(model: Path, entry: Entry, free) -> None:
    written(entry, 12 * WEIGHTS)
    free(2 * 12 * WEIGHTS)
    require(Resources(save_steps=10, save_minutes=None), model, entry)
    free(12 * WEIGHTS)
    with pytest.raises(ConfigError, match=r"27.7 kB free \(and 27.7 kB that sft has written already\); sft needs"):
        require(Resources(save_steps=10, save_minutes=None), model, entry)


def test_biases_of_a_model_that_has_none_are_refused():
    with pytest.raises(ConfigError, match=r"adapter\.bias=all: this model has no biases"):
        adapter_weights(Adapter(bias="all"), SHAPES)


@pytest.mark.parametrize(
    ("adapter", "message", "fitting"),
    [
        ({"type": "oft", "block_size": 4}, r"block_size=4: model\.layers\.0\.q_proj has 10 inputs.*block_size=2", 2),
        ({"type": "boft"}, r"block_size=4: model\.layers\.0\.q_proj has 10 inputs", 5),
        ({"type": "fourierft", "num_frequencies": 101}, r"q_proj has at most 100 .*num_frequencies=100 or less", 100),
        ({"type": "fourierft"}, "num_frequencies=1000", 9),
    ],
)
def test_sizes_of_an_adapter_that_do_not_fit_a_layer_are_refused(adapter, message, fitting):
    shapes = {"model.layers.0.down_proj.weight": (10, 20), **SHAPES}
    with pytest.raises(ConfigError, match=message):
        adapter_weights(Adapter(**adapter), shapes)
    name = "num_frequencies" if adapter["type"] == "fourierft" else "block_size"
    adapter_weights(Adapter(**{**adapter, name: fitting}), shapes)


def test_modules_that_a_model_lacks_are_refused():
    with pytest.raises(
        ConfigError, match=r"adapter\.modules_to_save=norm,wte: the model has no module wte; it has emb"
    ):
        adapter_weights(Adapter(modules_to_save="norm,wte"), SHAPES)
    tied = {name: shape for name, shape in SHAPES.items() if not name.startswith("lm_head")}
    for shapes in (SHAPES, tied):  # whose head is in no file
        adapter_weights(Adapter(modules_to_save="norm,lm_head,model.embed_tokens,layers"), shapes)


def test_the_best_that_stay_take_room_from_the_stages_after(model: Path, entry: Entry) -> None:
    keeping = Resources(save_steps=10, keep_best=KeepBest(metric="loss", n=2))
    assert require(keeping, model, entry) == (4 + 2 * 12) * WEIGHTS


def test_under_zero_a_checkpoint_holds_the_weights_three_times() -> None:
    assert need(save_steps=10, zero_stage=2, num_workers=2).checkpoint == 20 * WEIGHTS
