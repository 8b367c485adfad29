"""Optimizers and schedules as settings: one file of ``conf`` each, nothing ignored, nothing needed without a word."""

import importlib.util
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from flows.declare.config import load_pipeline
from flows.planning.checks import check_kernels
from lineage.errors import ConfigError
from tasks.method import Optimizer, Schedule
from tasks.train.optim import optimizers, schedules
from tasks.train.optim.optimizers import OPTIMIZERS
from tasks.train.optim.schedules import SCHEDULES

ROOT = Path(__file__).parents[3]
ASKED = """adamw_torch adamw_torch_fused sgd adafactor adagrad rmsprop adamw_8bit paged_adamw_8bit paged_adamw_32bit
    lion lion_8bit ademamix adamw_torch_4bit schedule_free_adamw muon galore_adamw stable_adamw prodigy came grokadamw
    lomo"""
PACKAGES = {entry.package.name: entry.package for entry in OPTIMIZERS.values() if entry.package}


@pytest.mark.parametrize(("folder", "table", "names"), [
    ("optimizer", OPTIMIZERS, get_args(optimizers.Name)), ("schedule", SCHEDULES, get_args(schedules.Name)),
])  # fmt: skip
def test_every_name_has_a_row_and_a_group_that_sets_it(folder: str, table: dict, names: tuple[str, ...]) -> None:
    files = {path.stem: path.read_text() for path in (ROOT / "conf" / folder).glob("*.yaml")}
    assert set(table) == set(names) == files.keys() - {"default"}
    assert all(re.search(rf"^name: {name}$", files[name], re.MULTILINE) for name in names)


def test_the_names_that_a_team_expects_are_there() -> None:
    assert set(ASKED.split()) <= OPTIMIZERS.keys()
    assert len(SCHEDULES) == 10


OPTIMIZER_FIELDS = {
    "eps": 1e-6, "momentum": 0.5, "nesterov": True, "alpha": 0.5, "clip_threshold": 0.5, "rank": 4,
    "update_proj_gap": 3, "scale": 0.5, "ns_steps": 3, "d_coef": 2.0, "lora_plus_ratio": 4.0,
}  # fmt: skip
SCHEDULE_FIELDS = {
    "min_learning_rate": 1e-6, "num_cycles": 3, "power": 2.0, "decay": 0.5, "decay_type": "linear", "timescale": 5,
    "factor": 0.5, "patience": 1,
}  # fmt: skip


@pytest.mark.parametrize("name", [*OPTIMIZERS, *SCHEDULES])
def test_a_field_that_an_optimizer_or_a_schedule_does_not_have_is_refused(name):
    if name in OPTIMIZERS:
        values = {**OPTIMIZER_FIELDS, "betas": (0.8,) * OPTIMIZERS[name].num_betas}
        setting, reads, cls = "optimizer", OPTIMIZERS[name].reads, Optimizer
    else:
        setting, reads, cls, values = "schedule", SCHEDULES[name].reads, Schedule, SCHEDULE_FIELDS
    cls(name=name, **{field: value for field, value in values.items() if field in reads})
    for field in values.keys() - set(reads):
        with pytest.raises(ConfigError, match=rf"{setting}\.{field}=.*: {name} has no such field; it has: "):
            cls(name=name, **{field: values[field]})


@pytest.mark.parametrize(("setting", "message"), [
    (lambda: Optimizer(name="came", betas=(0.9, 0.99)), "came has 3"),
    (lambda: Optimizer(betas=(0.9, 0.99, 0.999)), "adamw_torch_fused has 2"),
    (lambda: Optimizer(name="sgd", nesterov=True), r"set optimizer\.momentum=0\.9"),
    (lambda: Optimizer(name="rmsprop", alpha=1.5), "a decay, below 1"),
    (lambda: Schedule(warmup=1.5), r"set schedule\.warmup=1,"),
    (lambda: Schedule(name="warmup_stable_decay", decay=2.5), r"set schedule\.decay=2,"),
    (lambda: Schedule(name="warmup_stable_decay", warmup=0.5, decay=0.6), r"set schedule\.decay=0\.5"),
])  # fmt: skip
def test_a_value_that_cannot_work_is_refused(setting, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        setting()


def test_a_field_that_is_not_set_is_not_in_the_recipe() -> None:
    assert all(Optimizer(name=name).identity()["weight_decay"] == 0.0 for name in OPTIMIZERS)
    assert Optimizer().identity() == {"weight_decay": 0.0}
    assert Schedule().identity() == {"lr_schedule": "cosine", "warmup_ratio": 0.05}
    assert Optimizer(name="muon", momentum=0.9).identity()["optimizer"] == {"name": "muon", "momentum": 0.9}
    assert Schedule(min_learning_rate=1e-6).identity()["schedule"] == {"min_learning_rate": 1e-6}


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.package])
def test_the_plan_names_the_command_that_installs_a_missing_package(name: str, monkeypatch) -> None:
    method = "stages.sft.method"
    own = [f"{method}.optimizer.name={name}", f"{method}.schedule.name=constant", f"{method}.learning_rate=1.0"]
    pipeline = load_pipeline([*own, "stages.sft.resources.micro_batch_size=16", "tracking=none"])
    package = OPTIMIZERS[name].package
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=rf"{method}\.optimizer\.name={name}: .*pip install .*{package.name}"):
        check_kernels(pipeline)
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: object())
    check_kernels(pipeline)


def test_the_extra_holds_every_package_but_those_that_forbid_commercial_use() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    free = {name for name, package in PACKAGES.items() if package.licence is None}
    assert set(project["optional-dependencies"][optimizers.EXTRA]) == free
    assert PACKAGES.keys() - free == {"apollo-torch==1.0.3"}
    assert "CC-BY-NC: non-commercial use only" in PACKAGES["apollo-torch==1.0.3"].install
    assert not [each for each in project["dependencies"] if "apollo" in each]


def test_the_default_recipe_reads_as_before_the_fields_were_added() -> None:
    setting = Optimizer(betas=(0.9, 0.95), eps=1e-6, weight_decay=0.1)
    assert setting.identity() == {"weight_decay": 0.1, "optimizer": {"betas": [0.9, 0.95], "eps": 1e-6}}
    assert replace(setting, name="adamw_torch").identity()["optimizer"]["name"] == "adamw_torch"
