"""Which checkpoint is the best, and which stay."""

import math

import pytest

from lineage.checkpoints import Checkpoint
from lineage.errors import ConfigError
from tasks.best import Best, KeepBest, Ranking, kept_steps
from tasks.sft import SFT


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


@pytest.mark.parametrize("metric", ["rewards/margins", "rewards/accuracies", "mean_token_accuracy"])
def test_large_is_good_where_the_name_says_so(metric) -> None:
    assert Ranking(metric=metric).is_better(2.0, 1.0)
    assert not Ranking(metric=metric, mode="min").is_better(2.0, 1.0)


def test_a_name_that_says_nothing_needs_a_mode() -> None:
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


def test_the_best_of_an_older_one_that_is_kept_stays_too() -> None:
    found = saved(s2=2.0, s5=6.0, s6=1.0)
    assert kept_steps(found, 2, None, Best(metric="loss", every_steps=2)) == {2, 5, 6}


def test_what_competes_is_identity_and_off_it_leaves_no_trace() -> None:
    assert not {"best", "output", "on_divergence"} & SFT().recipe().keys()
    recipe = SFT(best=Best(every_steps=5), output="best").recipe()
    assert recipe["best"] == {"metric": "held_out_loss", "every_steps": 5}
    assert recipe["output"] == "best"


def test_to_state_what_a_training_does_anyway_makes_no_other_model() -> None:
    assert SFT(output="last", on_divergence="fail").recipe() == SFT().recipe()


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
