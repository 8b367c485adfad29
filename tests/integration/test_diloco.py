"""DiLoCo: islands train apart, follow the algorithm of the paper, and resume to the bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from lineage.checkpoints import Checkpoints
from tasks.context import Resources, TrainContext
from tasks.judgement.disk_need import model_shapes
from tasks.judgement.estimate import trained_weights
from tasks.method import Adapter, Training, Validation
from tasks.train.best import Best
from tasks.train.loop.saved_state import read_own
from tasks.train.optim.diloco import DiLoCo
from tests import training
from tests.training import same, weights
from tests.worker_group import Asked, WorkerGroup, rows_of_steps, train

RESOURCES = Resources(micro_batch_size=2, cpus_per_worker=1, save_steps=2, save_minutes=None)
ONE = DiLoCo(num_islands=1, inner_steps=1, outer_learning_rate=1.0, outer_momentum=0.0)
TWO = DiLoCo(num_islands=2, inner_steps=2)
CONSTANT: dict[str, object] = {"lr_schedule": "constant", "warmup_ratio": 0.0}


def asked(root: Path, folder: Path, diloco: DiLoCo | None, name: str = "sft", **fields: object) -> Asked:
    stage = training.method(name, diloco=diloco, **{"num_steps": 5, **CONSTANT, **fields})
    return Asked(stage=stage, root=root, folder=folder, resources=RESOURCES)


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


def test_one_island_that_takes_over_each_step_is_plain_training(root: Path, tmp_path: Path) -> None:
    plain, island = (train(asked(root, tmp_path / str(setting is None), setting)) for setting in (None, ONE))
    assert island.metric("loss") == pytest.approx(plain.metric("loss"), abs=1e-6)
    assert distance(weights(tmp_path / "True" / "output"), weights(tmp_path / "False" / "output")) < 1e-6
    assert all(norm > 0 for norm in island.metric("diloco/outer_norm"))


def reference(stage: Training, root: Path, folder: Path) -> dict[str, Tensor]:
    """Algorithm 1 of the paper, in plain torch on whole batches."""
    from tasks.train.run import TrainingRun

    setting = stage.diloco
    assert setting and stage.num_steps
    whole = replace(stage, diloco=None)
    ctx = TrainContext(output_dir=folder / "output", work_dir=folder / "work", resources=RESOURCES)
    rows = TrainingRun(whole, training.inputs(root, whole), ctx).ordered_rows
    islands = [AutoModelForCausalLM.from_pretrained(root / "policy") for _ in range(setting.num_islands)]
    inner = [torch.optim.AdamW(each.parameters(), lr=stage.learning_rate, weight_decay=0.0) for each in islands]
    outer = [each.detach().clone().requires_grad_() for each in islands[0].parameters()]
    slow = torch.optim.SGD(outer, lr=setting.outer_learning_rate, momentum=setting.outer_momentum, nesterov=True)
    share = stage.global_batch_size // setting.num_islands
    for step in range(1, stage.num_steps + 1):
        for index, (model, optimizer) in enumerate(zip(islands, inner, strict=True)):
            first = (step - 1) * stage.global_batch_size + index * share
            own = [rows[row] for row in range(first, first + share)]
            losses = [summed_loss(model, row) for row in own]
            (sum(loss for loss, _ in losses) / sum(count for _, count in losses)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), stage.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
        if step % setting.inner_steps == 0 or step == stage.num_steps:
            inners = list(zip(*(each.parameters() for each in islands), strict=True))
            with torch.no_grad():
                for weight, moved in zip(outer, inners, strict=True):
                    weight.grad = sum(weight - each for each in moved) / setting.num_islands
                slow.step()
                for weight, moved in zip(outer, inners, strict=True):
                    for each in moved:
                        each.copy_(weight)
    return {name: each.detach() for name, each in islands[0].state_dict().items()}


def summed_loss(model: Any, row: dict[str, Any]) -> tuple[Tensor, int]:
    tokens, labels = torch.tensor(row["input_ids"])[None], torch.tensor(row["labels"])[1:]
    logits = model(input_ids=tokens).logits[0, :-1]
    return cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), int((labels != -100).sum())


def test_two_islands_follow_the_algorithm_of_the_paper(root: Path, tmp_path: Path, two_workers: WorkerGroup) -> None:
    given = asked(root, tmp_path / "islands", TWO)
    ranks = two_workers.train(given)
    found = weights(given.folder / "output")
    expected = reference(given.stage, root, tmp_path / "reference")
    assert distance(found, {name: expected[name] for name in found}) < 2e-6
    assert [step for step, report in ranks[0].reports if "diloco/outer_norm" in report] == [2, 4, 5]
    assert all(reports == ranks[0].metric("loss") for reports in (each.metric("loss") for each in ranks))


@pytest.mark.slow
def test_the_islands_read_the_rows_of_plain_training(root: Path, tmp_path: Path, two_workers: WorkerGroup) -> None:
    ranks, plain = (two_workers.train(asked(root, tmp_path / str(setting is None), setting)) for setting in (TWO, None))
    assert rows_of_steps(ranks) == rows_of_steps(plain)
    assert ranks[0].metric("num_tokens") == ranks[1].metric("num_tokens") == plain[0].metric("num_tokens")


@pytest.mark.slow
def test_islands_end_near_plain_training_on_the_same_tokens(
    root: Path, tmp_path: Path, two_workers: WorkerGroup
) -> None:
    measured: dict[str, object] = {"num_steps": 12, "validation": Validation(every_steps=4)}
    found = []
    mean = replace(TWO, inner_steps=4, outer_learning_rate=1.0, outer_momentum=0.0)  # of the islands' weights
    for setting in (None, mean):
        ranks = two_workers.train(asked(root, tmp_path / str(setting is None), setting, **measured))
        losses = [[report["val/loss"] for _, report in each.reports if "val/loss" in report] for each in ranks]
        assert losses[0] == losses[1]
        found.append(losses[0])
    plain, islands = found
    assert abs(islands[-1] - plain[-1]) < 0.15 * (plain[0] - plain[-1])


@pytest.mark.parametrize(
    "adapter", [None, pytest.param(Adapter(rank=4, alpha=8, dropout=0.1), marks=pytest.mark.slow)], ids=["full", "lora"]
)
def test_islands_that_are_stopped_within_a_round_resume_to_the_bit(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, adapter: Adapter | None
) -> None:
    whole = asked(root, tmp_path / "whole", TWO, adapter=adapter)
    broken = replace(whole, folder=tmp_path / "broken")
    unbroken = two_workers.train(whole)
    first = two_workers.train(replace(broken, stop_after=3))
    rest = two_workers.train(replace(broken, resume_step=3))
    losses = [report for attempt in (first, rest) for report in attempt[0].metric("loss")]
    assert losses == unbroken[0].metric("loss")
    assert same(weights(broken.folder / "output"), weights(whole.folder / "output"))
    # Step 3 is within a round: the islands have weights of their own.
    path = Checkpoints(broken.folder / "checkpoints").path(3)
    outer, inner = (read_own(path, rank)["Rounds"] for rank in (0, 1))
    names = outer["outer"].keys()
    assert names == outer["momentum"].keys() == inner["weights"].keys()
    assert not any(bool((outer["outer"][name] == inner["weights"][name]).all()) for name in names)


def test_the_best_model_is_an_outer_one(root: Path, tmp_path: Path, two_workers: WorkerGroup) -> None:
    best = Best(metric="loss", mode="max", every_steps=2)  # the loss falls: the first that competes
    given = asked(root, tmp_path / "best", TWO, best=best, output="best")
    two_workers.train(given)
    shorter = asked(root, tmp_path / "two", TWO, num_steps=2)
    two_workers.train(shorter)
    assert same(weights(given.folder / "output"), weights(shorter.folder / "output"))


@pytest.fixture(scope="module")
def unchanged(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("unchanged")
    train(asked(root, folder, DiLoCo(num_islands=1, inner_steps=2)))
    return weights(folder / "output")


@pytest.mark.parametrize(
    "changed",
    [
        {"inner_steps": 1}, {"outer_learning_rate": 0.5}, {"outer_momentum": 0.0},
        {"pseudo_gradient_dtype": "bf16"}, {"pseudo_gradient_dtype": "fp16"},
    ],
    ids=str,
)  # fmt: skip
def test_every_field_changes_the_run(
    root: Path, tmp_path: Path, unchanged: dict[str, Tensor], changed: dict[str, Any]
) -> None:
    setting = replace(DiLoCo(num_islands=1, inner_steps=2), **changed)
    train(asked(root, tmp_path, setting))
    assert not same(weights(tmp_path / "output"), unchanged)


@pytest.mark.parametrize("dtype", ["fp16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("fp32", "bf16"))])
def test_the_bytes_that_are_sent_are_those_of_the_plan(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, dtype: Any
) -> None:
    setting = replace(TWO, pseudo_gradient_dtype=dtype)
    given = asked(root, tmp_path, setting)
    ranks = two_workers.train(given)
    num_trained = trained_weights(given.stage, model_shapes(root / "policy")).trained
    planned = setting.traffic(num_trained, 5, 2)
    # Of two islands, each sends as much as it exchanges.
    assert all(done.bytes_exchanged == pytest.approx(planned.in_all[dtype], rel=1e-3) for done in ranks)
    assert planned.data_parallel == 5 * 4 * num_trained
    sent = [report["diloco/sent_mib"] for _, report in ranks[0].reports if "diloco/sent_mib" in report]
    assert sum(sent) * 2**20 == pytest.approx(planned.in_all[dtype])


METHODS = [name for name, cls in training.METHODS.items() if not cls.has_own_loop and name != "sft"]


@pytest.mark.parametrize(
    "name", ["grpo", *(pytest.param(each, marks=pytest.mark.slow) for each in METHODS if each != "grpo")]
)
def test_one_island_of_any_method_that_takes_over_each_step_is_plain_training(
    root: Path, tmp_path: Path, name: str
) -> None:
    plain, island = (train(asked(root, tmp_path / str(each is None), each, name, num_steps=3)) for each in (None, ONE))
    of = [[training.trajectory(report) for _, report in each.reports] for each in (plain, island)]
    assert of[1] == pytest.approx(of[0], abs=1e-6)
    assert distance(weights(tmp_path / "True" / "output"), weights(tmp_path / "False" / "output")) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_two_islands_of_any_method_read_the_same_rows_and_resume_to_the_bit(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str
) -> None:
    whole = asked(root, tmp_path / "whole", TWO, name)
    broken = replace(whole, folder=tmp_path / "broken")
    unbroken = two_workers.train(whole)
    first = two_workers.train(replace(broken, stop_after=3))
    rest = two_workers.train(replace(broken, resume_step=3))
    assert first[0].metric("loss") + rest[0].metric("loss") == unbroken[0].metric("loss")
    assert same(weights(broken.folder / "output"), weights(whole.folder / "output"))
    plain = two_workers.train(asked(root, tmp_path / "plain", None, name))
    if name != "kto":  # whose rows have the answer of the row before, in an island's own order
        assert rows_of_steps(unbroken) == rows_of_steps(plain)
    start = [each[0].reports[0][1] for each in (unbroken, plain)]
    if "reward" in start[0]:  # of the same completions
        assert start[0]["reward"] == pytest.approx(start[1]["reward"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, Adapter(rank=4, alpha=8)], ids=["full", "lora"])
def test_an_island_over_two_machines_divides_within_each(root: Path, tmp_path: Path, adapter: Adapter | None) -> None:
    group = WorkerGroup(4)
    try:
        given = asked(root, tmp_path / "island", ONE, adapter=adapter)
        hybrid = replace(RESOURCES, sharding="fsdp_hybrid", num_nodes=2)
        ranks = group.train(replace(given, resources=hybrid))
    finally:
        group.close()
    plain = train(asked(root, tmp_path / "plain", None, adapter=adapter))
    assert ranks[0].metric("loss") == pytest.approx(plain.metric("loss"), rel=1e-4)
    assert distance(weights(given.folder / "output"), weights(tmp_path / "plain" / "output")) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "zero1", "zero2", "fsdp_hybrid"])
def test_two_islands_of_two_workers_follow_it_too_and_resume_to_the_bit(
    root: Path, tmp_path: Path, sharding: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nonexistent")  # DeepSpeed has no compiler
    group = WorkerGroup(4)
    try:
        given = asked(root, tmp_path / "islands", TWO)
        nodes = 2 if sharding == "fsdp_hybrid" else 1  # an island on each
        given = replace(given, resources=replace(RESOURCES, sharding=sharding, num_nodes=nodes))
        ranks = group.train(given)
        broken = replace(given, folder=tmp_path / "broken")
        first = group.train(replace(broken, stop_after=3))
        rest = group.train(replace(broken, resume_step=3))
    finally:
        group.close()
    assert Checkpoints(broken.folder / "checkpoints").read(3).can_move == (sharding != "fsdp_hybrid")
    found = weights(given.folder / "output")
    expected = reference(given.stage, root, tmp_path / "reference")
    assert distance(found, {name: expected[name] for name in found}) < 1e-5
    assert first[0].metric("loss") + rest[0].metric("loss") == ranks[0].metric("loss")
    assert same(found, weights(broken.folder / "output"))
