"""What a stage will write, from its recipe and the headers of its model."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lineage.errors import ConfigError
from lineage.store import Entry
from tasks.checkpoints.best import Best, KeepBest
from tasks.checkpoints.disk_need import disk_need, model_shapes, require_room
from tasks.context import Resources
from tasks.method import LoRA
from tasks.sft import SFT

SHAPES = {
    "model.embed_tokens.weight": (100, 10), "model.layers.0.q_proj.weight": (10, 10),
    "model.layers.0.up_proj.weight": (20, 10), "model.norm.weight": (10,), "lm_head.weight": (100, 10),
}  # fmt: skip
WEIGHTS = 1000 + 100 + 200 + 10 + 1000


def need(num_steps: int = 100, adapter: LoRA | None = None, *, best: Best | None = None, save=None, **resources):
    method = SFT(num_steps=num_steps, adapter=adapter, best=best, save=save)
    return disk_need(method, Resources(**{"save_minutes": None, **resources}), SHAPES)


def test_a_checkpoint_is_weights_and_two_moments_and_the_output_weights() -> None:
    found = need(save_steps=10)
    assert (found.checkpoint, found.output) == (12 * WEIGHTS, 4 * WEIGHTS)
    assert found.total == 3 * found.checkpoint + found.output
    assert found.least == 3 * found.checkpoint  # one of them is gone when the output is written


def test_under_zero_a_checkpoint_holds_the_weights_three_times() -> None:
    assert need(save_steps=10, zero_stage=2, num_workers=2).checkpoint == 20 * WEIGHTS


@pytest.mark.parametrize(
    ("target_modules", "save", "adapter", "output"),
    [
        ("all-linear", None, 4 * (20 + 30), WEIGHTS),
        ("q_proj", None, 4 * 20, WEIGHTS),
        ("q_proj", "adapter", 4 * 20, 0),
    ],
)
def test_of_an_adapter_only_it_is_trained(target_modules, save, adapter, output) -> None:
    found = need(adapter=LoRA(rank=4, target_modules=target_modules), save=save, save_steps=10)
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
    (model / "model-2.safetensors").rename(model / "model.safetensors")
    assert model_shapes(model) == {}  # a part is missing
    (model / "model.safetensors.index.json").unlink()
    assert model_shapes(model) == dict(list(SHAPES.items())[2:])


def test_a_stage_without_room_is_refused_with_what_to_do(model: Path, tmp_path: Path, monkeypatch) -> None:
    entry, resources = Entry(tmp_path / "artifacts" / "sft" / "1"), Resources(save_steps=10, save_minutes=None)
    method = SFT(num_steps=100)
    least = 3 * 12 * WEIGHTS
    monkeypatch.setattr("tasks.checkpoints.disk_need.free_bytes", lambda path: least)
    assert require_room("sft", method, resources, model, entry) == 4 * WEIGHTS
    with pytest.raises(ConfigError) as caught:
        require_room("sft", method, resources, model, entry, before=1)
    assert str(caught.value) == (
        f"store {tmp_path / 'artifacts'} has 83.2 kB free; sft needs about 83.2 kB: 3 checkpoints at one time, of "
        "27.7 kB, and its output of 9.2 kB, beside 0.0 kB of the stages before it; set "
        "stages.sft.resources.keep_last=1, a larger store (store=...), or free space (posttrain gc shows what may go)"
    )
    assert require_room("sft", method, resources, tmp_path, entry, before=least) == 0  # nothing is known


def test_what_may_not_fit_is_only_warned_of(model: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    entry, method = Entry(tmp_path / "artifacts" / "sft" / "1"), SFT(num_steps=100)
    monkeypatch.setattr("tasks.checkpoints.disk_need.free_bytes", lambda path: 2 * 12 * WEIGHTS)
    with caplog.at_level(logging.WARNING):
        require_room("sft", method, Resources(), model, entry)
    [record] = caplog.records
    assert "sft may need 92.4 kB: 3 checkpoints at one time, of 27.7 kB, and its output" in record.getMessage()
    assert "set stages.sft.resources.keep_last=1, stages.sft.resources.save_minutes=null, a l" in record.getMessage()
    with pytest.raises(ConfigError, match=r"needs about 55.4 kB: 2 checkpoints .*; set stages.sft.resources.save_min"):
        require_room("sft", method, Resources(), model, entry, before=1)
    require_room("sft", method, Resources(save_minutes=None), model, entry, before=12 * WEIGHTS)


def test_the_best_that_stay_take_room_from_the_stages_after(model: Path, tmp_path: Path) -> None:
    entry, method = Entry(tmp_path / "artifacts" / "sft" / "1"), SFT(num_steps=100)
    keeping = Resources(save_steps=10, keep_best=KeepBest(metric="loss", n=2))
    assert require_room("sft", method, keeping, model, entry) == (4 + 2 * 12) * WEIGHTS


def test_what_an_attempt_before_left_is_room(model: Path, tmp_path: Path, monkeypatch) -> None:
    entry = Entry(tmp_path / "artifacts" / "sft" / "1")
    (entry.checkpoints.directory / "step-10").mkdir(parents=True)
    (entry.checkpoints.directory / "step-10" / "optimizer.pt").write_bytes(b"0" * 12 * WEIGHTS)
    monkeypatch.setattr("tasks.checkpoints.disk_need.free_bytes", lambda path: 2 * 12 * WEIGHTS + 4 * WEIGHTS)
    require_room("sft", SFT(num_steps=100), Resources(save_steps=10, save_minutes=None), model, entry)
