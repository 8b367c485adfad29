"""Held-out losses: when they are measured, which checkpoint is the best, what is done about a loss."""

import json
import math
import random
from dataclasses import fields

import pytest

from lineage.checkpoints import Checkpoint
from lineage.errors import ConfigError
from tasks.cpt import ContinuedPretraining
from tasks.sft import SFT
from tasks.train.best import (
    Best,
    KeepBest,
    Patience,
    Ranking,
    Validation,
    completes_epochs,
    kept_steps,
    steps_of_epochs,
)
from tasks.train.optim.schedules import Adaptive, Event, LossWatch, Schedule


@pytest.mark.parametrize(
    ("epochs", "num_rows", "batch", "steps"),
    [(1, 40, 8, 5), (1, 41, 8, 6), (0.5, 40, 8, 3), (1.1, 100, 8, 14), (3, 1, 8, 1), (0.001, 40, 8, 1),
     (1.1, 100, 10, 11)],  # 1.1 * 100 / 10 = 11.000000000000002 in floats
)  # fmt: skip
def test_passes_over_the_rows_in_steps(epochs, num_rows, batch, steps):
    assert steps_of_epochs(epochs, num_rows, batch) == steps


@pytest.mark.parametrize(
    ("epochs", "num_rows", "steps"),
    [(1, 40, [5, 10]), (1, 30, [4, 8, 12]), (0.5, 40, [3, 5, 8, 10]), (0.1, 40, [*range(1, 13)]), (1.5, 40, [8])],
)
def test_the_first_steps_that_complete_passes(epochs, num_rows, steps):
    assert [step for step in range(1, 13) if completes_epochs(epochs, step, num_rows, 8)] == steps
    assert [step for step in range(1, 13) if Validation(every_epochs=epochs).is_due(step, num_rows, 8)] == steps
    assert [step for step in range(1, 10) if Validation(every_steps=3).is_due(step, 0, 8)] == [3, 6, 9]


def test_patience_counts_measurements_that_are_not_smaller() -> None:
    patience = Patience()
    waited = []
    for loss in (3.0, 2.0, 2.0, float("nan"), 1.5, 1.6):
        patience.add(loss)
        waited.append(patience.waited)
    assert waited == [0, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("fields", [{}, {"every_steps": 2, "every_epochs": 1.0}])
def test_steps_or_epochs_are_set(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"validation.every_steps=N or validation.every_epochs=1"):
        Validation(**fields)  # type: ignore[arg-type]


def test_validation_best_and_adaptive_are_identity_and_off_they_leave_no_trace():
    assert not {"validation", "best", "output", "on_divergence", "schedule"} & SFT().recipe().keys()
    assert SFT(output="last", on_divergence="fail").recipe() == SFT().recipe()  # as a training does anyway
    recipe = SFT(validation=Validation(every_steps=20, patience=3)).recipe()
    assert recipe["validation"] == {"every_steps": 20, "patience": 3}
    recipe = SFT(best=Best(every_steps=5), output="best").recipe()
    assert (recipe["best"], recipe["output"]) == ({"metric": "held_out_loss", "every_steps": 5}, "best")
    recipe = SFT(schedule=Schedule(adaptive=Adaptive(spike_z=5.0))).recipe()
    assert recipe["schedule"]["adaptive"]["spike_z"] == 5.0


def test_the_models_that_it_measures_compete_to_be_the_best() -> None:
    assert SFT(validation=Validation(every_epochs=1.0), output="best").best == Best()
    with pytest.raises(ConfigError, match=r"best.every_steps is not set, .*set best.every_steps=N"):
        SFT(best=Best(), output="best")
    with pytest.raises(ConfigError, match=r"best.every_steps is not set, and best.metric=loss"):
        ContinuedPretraining(best=Best(metric="loss"), validation=Validation(every_steps=2))


def saved(**losses: float) -> list[Checkpoint]:
    """Checkpoints of ``s1``, ``s2``, ... with a loss each."""
    return [
        Checkpoint(step=int(name[1:]), time=0.0, train_seconds=0.0, num_workers=1, zero_stage=0, metrics={"loss": loss})
        for name, loss in losses.items()
    ]


@pytest.mark.parametrize(
    ("metric", "mode", "steps"),
    [
        ("loss", None, [3, 1]),
        ("loss", "max", [2, 1]),
        ("accuracy", None, []),  # that none of them has
    ],
)
def test_the_best_first_and_of_equals_the_earlier(metric, mode, steps) -> None:
    found = saved(s1=2.0, s2=3.0, s3=1.0, s4=2.0, s5=math.nan)
    assert [each.step for each in Ranking(metric=metric, mode=mode).best(found, 2)] == steps


def test_large_is_good_where_the_name_says_so_and_one_that_says_nothing_needs_a_mode():
    for metric in ("rewards/margins", "rewards/accuracies", "mean_token_accuracy"):
        assert Ranking(metric=metric).is_better(2.0, 1.0)
        assert not Ranking(metric=metric, mode="min").is_better(2.0, 1.0)
    with pytest.raises(ConfigError, match=r"resources.keep_best.metric=logps/chosen: .*keep_best.mode=min or max"):
        KeepBest(metric="logps/chosen")
    assert KeepBest(metric="logps/chosen", mode="max").is_better(-1.0, -2.0)


@pytest.mark.parametrize(
    ("keep_best", "best", "kept"),
    [
        (None, None, {5, 6}),
        (KeepBest(metric="loss", n=2), None, {2, 3, 5, 6}),
        (None, Best(metric="loss", every_steps=2), {2, 5, 6}),
        (None, Best(metric="loss", mode="max", every_steps=2), {4, 5, 6}),
        # 6 is the best now; had it to go on from 5, it would be 2.
        (None, Best(metric="grad_norm", every_steps=2), {5, 6}),
        # Of an older one that stays for another reason nothing is kept: 2 was the best at 3.
        (KeepBest(metric="loss", n=1), Best(metric="loss", mode="max", every_steps=2), {3, 4, 5, 6}),
    ],
)
def test_what_is_kept_beside_the_newest(keep_best, best, kept) -> None:
    found = saved(s1=4.0, s2=2.0, s3=1.0, s4=5.0, s5=6.0, s6=3.0)
    assert kept_steps(found, 2, keep_best, best) == kept


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"output": "best"}, r"output=best: best is not set, so no models compete; set best.every_steps=N"),
        ({"on_divergence": "best"}, r"on_divergence=best: best is not set"),
        (
            {"on_divergence": "best", "best": Best(metric="loss", every_steps=2)},
            r"on_divergence=best, best.metric=loss: .* set best.metric=held_out_loss",
        ),
    ],
)
def test_what_cannot_work_together_is_refused(fields, message) -> None:
    with pytest.raises(ConfigError, match=message):
        SFT(**fields)


STEADY = [2.0, 2.1, 1.9, 2.05, 1.95]  # mean 2, standard deviation 0.0707


def watched(setting: Adaptive, losses: list[float], *, can_return: bool = False) -> LossWatch:
    watch = LossWatch(setting=setting)
    for step, loss in enumerate(losses, start=1):
        watch.observe(step, loss, can_return=can_return)
    return watch


def test_the_first_losses_count_alike_and_later_ones_by_smoothing() -> None:
    watch = watched(Adaptive(smoothing=0.8, start_steps=5), STEADY)
    assert watch.mean == pytest.approx(2.0)
    assert watch.variance == pytest.approx(0.005)
    assert watch.z(2.2) == pytest.approx(0.2 / math.sqrt(0.005))
    watch.observe(6, 2.1, can_return=False)
    assert watch.mean == pytest.approx(2.02)  # 0.8 x 2 + 0.2 x 2.1
    assert watch.variance == pytest.approx(0.8 * (0.005 + 0.2 * 0.1**2))


def test_a_spike_halves_the_rate_which_rises_back() -> None:
    setting = Adaptive(start_steps=5, spike_z=4.0, recovery_steps=4)
    watch = watched(setting, [*STEADY, 3.0])
    assert watch.events == [(6, "spike", 0.5)]
    factors = []
    for step in range(7, 12):
        watch.observe(step, 2.0, can_return=False)
        factors.append(watch.factor)
    assert factors == [0.625, 0.75, 0.875, 1.0, 1.0]


def test_a_plateau_cuts_the_rate_for_good_until_the_least() -> None:
    setting = Adaptive(start_steps=1, plateau_steps=3, plateau_factor=0.1, min_factor=0.05, spike_z=None)
    watch = watched(setting, [2.0] * 12)
    assert watch.events == [(4, "plateau", 0.1), (7, "plateau", 0.05)]
    assert watched(setting, [2.0 - step / 10 for step in range(12)]).events == []
    little = Adaptive(start_steps=1, plateau_steps=3, spike_z=None, min_improvement=0.5)
    assert [step for step, _, _ in watched(little, [2.0 - step / 10 for step in range(8)]).events] == [4, 7]


@pytest.mark.parametrize("loss", [9.0, math.nan, math.inf])
def test_a_divergence_goes_back_as_often_as_allowed(loss: float) -> None:
    setting = Adaptive(start_steps=5, divergence_z=20.0, max_returns=2)
    watch = watched(setting, STEADY)
    assert watch.observe(6, loss, can_return=True) is Event.DIVERGENCE
    assert (watch.factor, watch.count) == (0.5, 0)  # the average starts again
    for step, steady in enumerate(STEADY, start=7):
        watch.observe(step, steady, can_return=True)
    assert watch.observe(12, loss, can_return=True) is Event.DIVERGENCE
    for step, steady in enumerate(STEADY, start=13):
        watch.observe(step, steady, can_return=True)
    assert watch.observe(18, loss, can_return=True) is (Event.SPIKE if math.isfinite(loss) else None)
    assert watch.factor == pytest.approx(0.125 if math.isfinite(loss) else 0.25)


def test_its_state_survives_json_to_the_bit() -> None:
    setting = Adaptive(start_steps=3, plateau_steps=2, recovery_steps=3, spike_z=3.0)
    losses = [2.0 + math.sin(step * step) / 7 for step in range(40)] + [9.0] + [2.0] * 9
    whole = watched(setting, losses)
    first = watched(setting, losses[:41])
    resumed = LossWatch(setting=setting)
    resumed.load(json.loads(json.dumps(first.state())))
    for step, loss in enumerate(losses[41:], start=42):
        resumed.observe(step, loss, can_return=False)
    assert resumed == whole and whole.events


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Adaptive(spike_z=None, plateau_steps=None), "so it never acts; set one of them"),
        (lambda: Adaptive(spike_z=5.0, divergence_z=5.0), "further off than a spike; set divergence_z=10"),
        (lambda: Schedule(name="reduce_lr_on_plateau", adaptive=Adaptive()),
         r"schedule.adaptive=.*reduce_lr_on_plateau has no such field"),
    ],
)  # fmt: skip
def test_what_cannot_act_or_would_cut_by_the_same_loss_is_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_way_back_needs_a_best_model_by_the_held_out_loss() -> None:
    schedule = Schedule(adaptive=Adaptive(divergence_z=9.0))
    with pytest.raises(ConfigError, match=r"divergence_z=9: best is not set.*set best.every_steps=N or validation"):
        SFT(schedule=schedule)
    with pytest.raises(ConfigError, match=r"schedule.adaptive.divergence_z, best.metric=loss: .* or divergence_z=null"):
        SFT(schedule=schedule, best=Best(metric="loss", every_steps=2))
    assert SFT(schedule=schedule, validation=Validation(every_steps=5)).best == Best()


ACTING: dict[str, float | int] = {
    "start_steps": 3, "plateau_steps": 4, "recovery_steps": 5, "spike_z": 3.0, "divergence_z": 30.0, "min_factor": 0.3,
    "plateau_factor": 0.6,
}  # fmt: skip
OTHER: dict[str, float | int] = {
    "spike_z": 8.0, "spike_factor": 0.1, "recovery_steps": 9, "plateau_steps": 9, "plateau_factor": 0.9,
    "min_improvement": 0.1, "divergence_z": 5e5, "divergence_factor": 0.9, "max_returns": 1, "smoothing": 0.5,
    "start_steps": 8, "min_factor": 0.05,
}  # fmt: skip


def factors(**changed: float | int) -> list[float]:
    """Of the learning rate after each step of a loss that falls, spikes and diverges."""
    watch = LossWatch(setting=Adaptive(**{**ACTING, **changed}))  # type: ignore[arg-type]
    found, noise = [], random.Random(0)
    for step in range(1, 120):
        loss = 2 + noise.gauss(0, 0.01) + 0.2 * (step % 17 == 0) + 50 * (step % 29 == 0) - 0.002 * min(step, 40)
        watch.observe(step, loss, can_return=True)
        found.append(watch.factor)
    return found


def test_every_field_changes_the_learning_rate() -> None:
    assert OTHER.keys() == {each.name for each in fields(Adaptive)}
    unchanged = [name for name, value in OTHER.items() if factors(**{name: value}) == factors()]
    assert unchanged == []


@pytest.mark.parametrize(
    ("setting", "losses", "events"),
    [
        ({"start_steps": 5}, [50.0, 50.0], ["spike", "spike"]),  # one does not hide the next
        ({"start_steps": 7}, [50.0], []),  # before enough losses
        ({"start_steps": 5, "divergence_z": 20.0}, [9.0], ["spike"]),  # without a checkpoint to go back to
    ],
)
def test_what_is_a_spike(setting, losses, events):
    assert [event for _, event, _ in watched(Adaptive(**setting), [*STEADY, *losses]).events] == events


def test_the_best_of_an_older_one_that_is_kept_stays_too() -> None:
    found = saved(s2=2.0, s5=6.0, s6=1.0)
    assert kept_steps(found, 2, None, Best(metric="loss", every_steps=2)) == {2, 5, 6}
