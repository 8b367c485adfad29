"""A data-parallel training that goes on with other workers reads the same rows, and follows the same losses."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lineage.checkpoints import Checkpoints
from lineage.errors import ArtifactError
from tasks.context import Resources
from tasks.method import Adapter, Adaptive, Schedule, Validation
from tasks.train.best import Best
from tests import training
from tests.training import same, weights
from tests.worker_group import Asked, Done, WorkerGroup, rows_of_steps, train

RESOURCES = Resources(micro_batch_size=2, cpus_per_worker=1, save_steps=2, save_minutes=None)
# fp32 without dropout: other micro batches are other orders of additions, and each step hands its error on.
TOLERANCE = 1e-5
DROPOUT = Adapter(rank=4, alpha=8, dropout=0.1)


def losses(*attempts: list[Done]) -> list[float]:
    """Of all steps, as rank 0 reported them."""
    return [loss for ranks in attempts for loss in ranks[0].metric("loss")]


@pytest.mark.slow  # test_two_workers_measure_and_adapt_as_one_and_resume_to_the_bit is the quick one
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_two_workers_stopped_and_resumed_are_unbroken_to_the_bit(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str
) -> None:
    stage = training.method(name, num_steps=6, adapter=DROPOUT, lr_schedule="cosine")
    whole = Asked(stage=stage, root=root, folder=tmp_path / "whole", resources=RESOURCES)
    broken = replace(whole, folder=tmp_path / "broken")
    unbroken = two_workers.train(whole)
    first = two_workers.train(replace(broken, stop_after=3))
    rest = two_workers.train(replace(broken, resume_step=3))
    assert losses(first, rest) == losses(unbroken)
    assert rows_of_steps(first) + rows_of_steps(rest) == rows_of_steps(unbroken)
    assert same(weights(broken.folder / "output"), weights(whole.folder / "output"))


@pytest.mark.parametrize("name", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_two_workers_then_one_then_two_lose_no_row_and_repeat_none(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str
) -> None:
    stage = training.method(name, num_steps=6, lr_schedule="cosine")
    whole = Asked(stage=stage, root=root, folder=tmp_path / "whole", resources=RESOURCES)
    elastic = replace(whole, folder=tmp_path / "elastic")
    unbroken = two_workers.train(whole)
    first = two_workers.train(replace(elastic, stop_after=2))
    # Another micro batch too: four batches of two become two of four.
    alone = replace(elastic, resources=replace(RESOURCES, micro_batch_size=4), resume_step=2, stop_after=4)
    second = [train(alone)]
    third = two_workers.train(replace(elastic, resume_step=4))

    assert Checkpoints(elastic.folder / "checkpoints").read(4).num_workers == 1
    found = rows_of_steps(first) + rows_of_steps(second) + rows_of_steps(third)
    assert found == rows_of_steps(unbroken)
    assert len({row for rows in found[:5] for row in rows}) == 40  # one epoch is five steps: every row, once
    assert losses(first, second, third) == pytest.approx(losses(unbroken), rel=TOLERANCE)
    assert third[0].metric("num_tokens")[-1] == unbroken[0].metric("num_tokens")[-1]
    ends = [weights(asked.folder / "output") for asked in (elastic, whole)]
    assert all(torch.allclose(ends[0][key], ends[1][key], atol=1e-5) for key in ends[1])


def test_workers_that_were_not_there_before_draw_numbers_of_their_own(
    root: Path, tmp_path: Path, two_workers: WorkerGroup
) -> None:
    stage = training.method("sft", num_steps=4, adapter=DROPOUT)
    asked = Asked(stage=stage, root=root, folder=tmp_path, resources=RESOURCES)
    train(replace(asked, stop_after=2))
    again = [two_workers.train(replace(asked, resume_step=2)) for _ in range(2)]
    assert losses(again[0]) == losses(again[1])  # what they draw follows from seed, step and rank
    seeds = [[done.torch_seed for done in ranks] for ranks in again]
    assert seeds[0] == seeds[1]
    assert len({stage.seed, *seeds[0]}) == 3  # not those of step 0, and not those of each other


def test_two_workers_measure_and_adapt_as_one_and_resume_to_the_bit(
    root: Path, tmp_path: Path, two_workers: WorkerGroup
) -> None:
    adaptive = Adaptive(spike_z=1e-6, start_steps=1, plateau_steps=1, min_improvement=0.5, recovery_steps=3)
    stage = training.method(
        "sft", num_steps=6, schedule=Schedule(name="constant", warmup=0.0, adaptive=adaptive),
        validation=Validation(every_steps=2, patience=9),
    )  # fmt: skip
    whole = Asked(stage=stage, root=root, folder=tmp_path / "whole", resources=RESOURCES)
    broken = replace(whole, folder=tmp_path / "broken")
    ranks = two_workers.train(whole)
    first = two_workers.train(replace(broken, stop_after=3))
    rest = two_workers.train(replace(broken, resume_step=3))
    alone = train(replace(whole, folder=tmp_path / "alone", resources=replace(RESOURCES, micro_batch_size=4)))
    for name in ("learning_rate", "adaptive/factor", "val/loss"):
        values = [[report[name] for _, report in each.reports if name in report] for each in (*ranks, alone)]
        assert values[0] == values[1] == pytest.approx(values[2], abs=TOLERANCE)
    assert len({report["adaptive/factor"] for _, report in ranks[0].reports}) > 1
    assert [step for step, report in ranks[0].reports if "val/loss" in report] == [2, 4, 6]
    assert all(each.num_gradient_storages < each.num_gradients for each in ranks)  # they are views of the buckets
    assert losses(first, rest) == losses(ranks)
    assert same(weights(broken.folder / "output"), weights(whole.folder / "output"))


def test_the_workers_agree_on_the_best_model_also_where_one_does_not_see_it(
    root: Path, tmp_path: Path, two_workers: WorkerGroup
) -> None:
    # The loss falls: the first model that competes is the one with the largest.
    best = Best(metric="loss", mode="max", every_steps=2)
    stage = training.method("sft", num_steps=6, best=best, output="best")
    asked = Asked(
        stage=stage, root=root, folder=tmp_path / "sft" / "f00d", resources=replace(RESOURCES, save_steps=None),
        only_first_sees=True,
    )  # fmt: skip
    two_workers.train(replace(asked, stop_after=3))
    checkpoints = Checkpoints(asked.folder / "checkpoints")
    ended = two_workers.train(replace(asked, resume_step=3))
    assert [[step for step, _ in done.reports] for done in ended] == [[4, 5, 6]] * 2
    saved = load_file(checkpoints.path(2) / "model.safetensors")
    assert same(weights(asked.folder / "output"), saved)

    (checkpoints.path(2) / "model.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"best model is that of step 2, .* is missing; .*restart=\[sft\]"):
        two_workers.train(replace(asked, resume_step=3))
