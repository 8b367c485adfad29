"""Every rule of the loss-curve doctor, on a curve that fires it and on curves that must not."""

import json
import math
import random
from dataclasses import replace

import pytest

from lineage.diagnosis.curves import VALIDATION, Curve, Curves, read_curves
from lineage.diagnosis.finding import Finding, Rule
from lineage.diagnosis.rules import RULES, diagnose, live_findings
from lineage.fingerprint import short
from tests.written_store import WrittenStore

RECIPE = {
    "method": "SFT", "learning_rate": 2e-5, "global_batch_size": 16, "max_length": 128, "max_grad_norm": 1.0,
    "warmup_ratio": 0.05, "weight_decay": 0.01, "precision": "fp32",
}  # fmt: skip
DPO = {**RECIPE, "method": "DPO", "beta": 0.1, "loss_type": "sigmoid"}
ADAPTED = {**RECIPE, "learning_rate": 2e-4, "adapter": {"rank": 16, "alpha": 32, "dropout": 0.05}}
ROWS = {"rows": 1600.0, "rows_cut": 3.0, "rows_dropped": 0.0, "trained_tokens_percent": 17.0}


def line(*values: float, steps: int = 200, noise: float = 0.0, every: int = 1, seed: int = 0) -> Curve:
    """Through these values at equal distances, with white noise."""
    rng = random.Random(seed)
    places = [step / (steps - 1) * (len(values) - 1) for step in range(steps)]
    after = [*values[1:], values[-1]]
    exact = [values[int(at)] + (after[int(at)] - values[int(at)]) * (at % 1) for at in places]
    noisy = [value + rng.gauss(0.0, noise) for value in exact]
    return Curve(steps=range(every, (steps + 1) * every, every), values=noisy)


def curves(recipe: dict = RECIPE, *, report: dict = ROWS, failure: str = "", gpus: int = 0, **series: Curve) -> Curves:
    named = {name.replace("__", "/"): curve for name, curve in series.items()}
    return Curves(
        stage="sft", series=named, recipe=recipe, report=report, failure=failure, gpus=gpus, micro_batch_size=8
    )


def spiked(curve: Curve, *places: int) -> Curve:
    """With jumps that take five steps each."""
    hit = {step for place in places for step in range(place, place + 5)}
    return replace(curve, values=[value + 2.0 * (index in hit) for index, value in enumerate(curve.values)])


SANE = line(3.0, 1.6, 1.2, 1.0, 0.95, 0.92, noise=0.05)
COSINE = line(2e-5, 1.9e-5, 1.4e-5, 0.6e-5, 0.1e-5)
SLOW = line(3.0, 2.9, 2.8, 2.7, 2.6, noise=0.02)
FLAT = line(3.0, noise=0.05)
HELD_OUT = line(2.6, 1.5, 1.3, 1.25, 1.24, steps=10, every=20)
PAIRS = {"rewards__accuracies": line(0.4, 0.8, 0.9, noise=0.05), "logps__chosen": line(-20.0, -19.0, noise=0.5)}
MARGINS = {"rewards__margins": line(0.0, 0.5, 0.8, noise=0.02), "rewards__chosen": line(0.0, 0.05, 0.1)}
EXPLODING = {"rewards__margins": line(0.0, 3.0, 4.5, noise=0.1), "rewards__chosen": line(0.0, -0.3, -0.5)}
LN2 = line(0.69, 0.45, 0.35, 0.33, 0.32, noise=0.03)
SCORES = {"accuracy": line(0.5, 0.85, 0.9, noise=0.03), "margin": line(0.0, 1.5, 2.5, noise=0.1)}
RL = {
    "loss": line(0.0, noise=1e-3), "reward": line(0.1, 0.4, 0.6, noise=0.05), "kl": line(0.0, 0.05, 0.1, noise=0.005),
    "entropy": line(1.2, 0.9, 0.7, noise=0.02), "frac_reward_zero_std": line(0.1, 0.2, noise=0.02),
    "completions__mean_length": line(40.0, 45.0, noise=1.0), "completions__clipped_ratio": line(0.02, noise=0.01),
}  # fmt: skip
GRPO = {"method": "GRPO", "learning_rate": 1e-6, "beta": 0.0, "num_generations": 8, "global_batch_size": 64}
TAID = {**RECIPE, "method": "TAID"}
LOW_PLATEAU = line(3.0, 2.0, 1.9, 1.9, 1.9, noise=0.02)
OVER = line(2.6, 1.5, 1.3, 1.6, 2.0, steps=10, every=20)
FALLING = {"loss": line(3.0, 2.5, 1.9, 1.5, noise=0.05), "val__loss": line(3.0, 2.5, 2.0, 1.5, steps=8, every=25)}
SCORED = {"base/text_perplexity": 40.0, "cpt/text_perplexity": 20.0, "sft/text_perplexity": 24.0}
ENDED = {"base/unfinished_share": 1.0, "sft/unfinished_share": 0.02}

# Curves -> the rules that may fire: these and no other.
CASES: dict[str, tuple[Curves, set[str]]] = {
    "a sane training": (curves(loss=SANE, learning_rate=COSINE, val__loss=HELD_OUT), set()),
    "a sane one of a short log": (curves(loss=line(3.0, 2.0, 1.5, steps=12)), set()),
    "nothing reported": (curves(), set()),
    "sane preferences": (curves(DPO, loss=LN2, **PAIRS, **MARGINS), set()),
    "a sane reward model": (curves(loss=LN2, **SCORES), set()),
    "a sane reinforcement": (curves(GRPO, **RL), set()),
    "a sane evaluation": (curves({"method": "Evaluate"}, report={**SCORED, **ENDED}), set()),
    "no memory on a GPU": (curves(loss=SANE, failure="OutOfMemoryError: CUDA out of memory."), {"out-of-memory"}),
    "killed by the kernel": (curves(loss=SANE, failure="killed by SIGKILL; out of memory?"), {"out-of-memory"}),
    "another failure": (curves(loss=SANE, failure="the disk is full"), set()),
    "nan": (curves(loss=line(3.0, steps=4), failure="training diverged: at step 5 loss=nan"), {"not-finite"}),
    "nan, gone back": (curves(loss=SANE, report={"diverged_at_step": 40.0}), {"not-finite"}),
    "loss on all tokens": (curves(loss=SANE, report={**ROWS, "trained_tokens_percent": 100.0}), {"labels"}),
    "loss on hardly any": (curves(loss=SANE, report={**ROWS, "trained_tokens_percent": 0.2}), {"labels"}),
    "text trains all tokens": (curves({"method": "CPT"}, loss=SANE, report={"trained_tokens_percent": 100.0}), set()),
    "rows cut": (curves(loss=SANE, report={**ROWS, "rows_cut": 700.0}), {"labels"}),
    "transcripts": (curves(loss=SANE, report={"data/rows": 1600.0, "data/rows_with_role_marks": 1500.0}), {"labels"}),
    "few transcripts": (curves(loss=SANE, report={"data/rows": 1600.0, "data/rows_with_role_marks": 90.0}), set()),
    "copies": (curves(loss=SANE, report={"data/rows": 1600.0, "data/duplicates": 800.0}), {"duplicated-rows"}),
    "few copies": (curves(loss=SANE, report={"data/rows": 1600.0, "data/duplicates": 80.0}), set()),
    "copies, and nothing trained": (curves(report={"data/rows": 1600.0, "data/duplicates": 800.0}), set()),
    "flat": (curves(loss=FLAT), {"flat"}),
    "flat towards a target that moves": (curves(TAID, loss=FLAT, taid__t=line(0.4, 1.0)), set()),
    "rising towards a target that moves": (curves(TAID, loss=line(1.0, 1.5, 2.0), taid__t=line(0.4, 1.0)), set()),
    "overfit to a target that moves": (
        curves(TAID, loss=line(1.0, 1.5, 2.0), taid__t=line(0.4, 1.0), val__loss=OVER), {"overfit"},
    ),
    "flat for 40 steps": (curves(loss=line(3.0, noise=0.05, steps=40)), set()),
    "flat at a high rate": (curves({**RECIPE, "learning_rate": 1e-3}, loss=FLAT), {"never-decreases"}),
    "flat at an adapter's rate": (curves(ADAPTED, loss=FLAT), {"flat"}),
    "jumps": (curves(loss=spiked(SANE, 80, 140)), {"unstable"}),
    "one bad batch": (curves(loss=replace(SANE, values=[*SANE.values[:150], 1.3, *SANE.values[151:]])), set()),
    "above the start": (curves(loss=line(3.0, 4.0, 3.4, 3.3, noise=0.05)), {"unstable"}),
    "risen": (curves(loss=line(3.0, 1.0, 1.5, 2.0, noise=0.05)), {"unstable"}),
    "slow": (curves(loss=SLOW), {"slow"}),
    "slow and smooth": (curves({**RECIPE, "global_batch_size": 128}, loss=SLOW), {"smooth-but-slow"}),
    "slow at a rate that falls": (
        curves(loss=line(3.0, 2.9, 2.82, 2.78, 2.77, 2.77, noise=0.02), learning_rate=line(2e-5, 1e-5, 4e-6, 0.0)),
        {"slow"},
    ),
    "fallen at a rate that falls": (
        curves(loss=line(3.0, 2.5, 2.35, 2.3, 2.28, 2.28, noise=0.02), learning_rate=COSINE), set(),
    ),
    "noisy": (curves(loss=line(3.0, 2.6, 2.4, 2.3, noise=0.7)), {"noisy"}),
    "noisy at batch 64": (curves({**RECIPE, "global_batch_size": 64}, loss=line(3.0, 2.6, 2.4, 2.3, noise=0.7)), set()),
    "noisy after a deep fall": (curves(loss=line(7.0, 2.0, 1.4, 1.2, 1.1, noise=0.45)), {"noisy"}),
    "as noisy as a sane batch": (curves(loss=line(7.0, 2.0, 1.4, 1.2, 1.1, noise=0.2)), set()),
    "at a batch of one": (curves({**RECIPE, "global_batch_size": 1}, loss=line(7.0, 2.0, 1.4, 1.2, 1.1, noise=0.2)),
                          {"noisy"}),
    "pairs as noisy": (curves(loss=line(7.0, 2.0, 1.4, 1.2, 1.1, noise=0.45), rewards__margins=line(0.0, 1.0)), set()),
    "a held-out loss that only wanders": (
        curves(loss=line(6.0, 1.65, 1.65, 1.65, 1.65, 1.65, noise=0.05), learning_rate=line(5e-2, 4.9e-2, 4e-2),
               val__loss=Curve(steps=[25, 50, 75, 100, 125, 150, 175, 200],
                               values=[2.2, 1.87, 1.64, 1.57, 1.83, 1.84, 1.6, 1.55])),
        {"plateau"},
    ),
    "learned at once, with a rest that still falls": (
        curves(report={**ROWS, "rows": 3000.0}, loss=line(5.0, 0.02, 0.015, 0.01, 0.006, 0.004, 0.002, 0.001, 0.001),
               val__loss=Curve(steps=[20, 40, 60, 80, 100, 120, 140, 160, 180, 200],
                               values=[2.8, 0.01, 0.004, 0.003, 0.002, 0.001, 0.001, 0.001, 0.001, 0.001])),
        {"early-plateau"},
    ),
    "learned at once": (
        curves(report={**ROWS, "rows": 3000.0}, loss=line(5.0, *[0.001] * 9),
               val__loss=Curve(steps=[20, 40, 60, 80, 100, 120, 140, 160, 180, 200],
                               values=[2.8, 0.01, 0.004, 0.003, 0.002, 0.001, 0.001, 0.001, 0.001, 0.001])),
        {"early-plateau"},
    ),
    "plateau": (curves(loss=line(3.0, 1.5, 1.5, 1.5, 1.5, 1.5, noise=0.03), learning_rate=line(2e-5)), {"plateau"}),
    "plateau as the rate falls": (
        curves(loss=line(3.0, 1.5, 1.5, 1.5, 1.5, 1.5, noise=0.03), learning_rate=COSINE), set(),
    ),
    "rank 2": (
        curves({**ADAPTED, "adapter": {"rank": 2, "dropout": 0.05}}, loss=line(3.0, 2.0, 1.9, 1.9, 1.9, noise=0.02)),
        {"underfit"},
    ),
    "rank 16": (curves(ADAPTED, loss=line(3.0, 2.0, 1.9, 1.9, 1.9, noise=0.02)), set()),
    "few layers": (
        curves({**ADAPTED, "adapter": {"rank": 16, "dropout": 0.05, "target_modules": "attention"}},
               loss=line(3.0, 2.0, 1.9, 1.9, 1.9, noise=0.02)), {"underfit"},
    ),
    "weight decay": (curves({**RECIPE, "weight_decay": 1.0}, loss=LOW_PLATEAU), {"underfit"}),
    "overfit": (curves(loss=SANE, val__loss=OVER), {"overfit"}),
    "a rise that is little of the fall": (
        curves(DPO, loss=line(0.69, 0.33, 0.32, 0.32, 0.32, noise=0.03), **PAIRS, **MARGINS,
               val__loss=line(0.6, 0.31, 0.314, 0.318, 0.32, steps=10, every=20)), set(),
    ),
    "overfit, by the other name": (
        curves(loss=SANE, held_out_loss=line(2.6, 1.5, 1.3, 1.6, 2.0, steps=10, every=20)), {"overfit"},
    ),
    "one worse measurement": (
        curves(loss=SANE, val__loss=replace(HELD_OUT, values=[*HELD_OUT.values[:-1], 1.3])), set(),
    ),
    "by heart": (
        curves(loss=line(3.0, 1.4, 1.2, 0.8, 0.5, noise=0.03),
               val__loss=line(2.6, 1.3, 1.3, 1.3, 1.3, steps=9, every=22)),
        {"validation-flat"},
    ),
    "too easy": (
        curves(loss=line(3.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, noise=0.01), learning_rate=COSINE,
               val__loss=line(0.5, steps=8, every=25)), {"early-plateau"},
    ),
    "still falling": (
        curves(**FALLING), {"still-falling"},
    ),
    "still falling while it runs": (
        replace(curves(**FALLING), is_over=False), set(),
    ),
    "still falling at a rate that falls": (
        curves(loss=line(3.0, 2.0, 1.6, 1.5, noise=0.03), learning_rate=COSINE,
               val__loss=line(2.6, 2.0, 1.7, 1.5, 1.44, 1.43, steps=8, every=25)), {"still-falling"},
    ),
    "exploding margins": (curves(DPO, loss=LN2, **PAIRS, **EXPLODING), {"exploding-margins"}),
    "the same margins at beta 1": (curves({**DPO, "beta": 1.0}, loss=LN2, **PAIRS, **EXPLODING), set()),
    "margins of likely answers": (
        curves(DPO, loss=LN2, **PAIRS, **{**EXPLODING, "rewards__chosen": line(0.0, 0.5)}), set(),
    ),
    "no reference": (curves(DPO, loss=LN2, **PAIRS, **{**EXPLODING, "rewards__chosen": line(-2.0, -2.5)}), set()),
    "pairs in no order": (
        curves(DPO, loss=LN2, **{**PAIRS, "rewards__accuracies": line(0.5, noise=0.1),
                                 "rewards__margins": line(0.0, noise=0.4), "rewards__chosen": line(0.0)}),
        {"accuracy-stuck"},
    ),
    "a reward model that stands still": (
        curves(loss=line(0.69, 0.58, 0.56, 0.555, 0.55, noise=0.004),
               accuracy=line(0.5, noise=0.1), margin=line(0.0, noise=0.01)), {"accuracy-stuck"},
    ),
    "a margin of 9": (curves(loss=LN2, **{**SCORES, "margin": line(0.0, 6.0, 9.5, noise=0.1)}), {"overconfident"}),
    "sure and worse on held-out rows": (
        curves(loss=LN2, **{**SCORES, "margin": line(0.0, 3.0, 4.0, noise=0.1)},
               val__loss=line(0.69, 0.45, 0.6, 0.8, steps=8, every=25)), {"overconfident", "overfit"},
    ),
    "longer for reward": (curves(GRPO, **{**RL, "completions__mean_length": line(40.0, 120.0)}), {"length-explodes"}),
    "longer without reward": (
        curves(GRPO, **{**RL, "completions__mean_length": line(40.0, 120.0), "reward": line(0.3, noise=0.05)}), set(),
    ),
    "far from the start": (curves(GRPO, **{**RL, "kl": line(0.01, 0.1, 0.8, 3.0, noise=0.01)}), {"kl-explodes"}),
    "PPO's KL of a completion": (
        curves(GRPO, **{**RL, "kl": line(0.01, 0.1, 0.8, 3.0, noise=0.01), "kl_coef": line(0.05)}), set(),
    ),
    "equal rewards": (curves(GRPO, **{**RL, "frac_reward_zero_std": line(0.9, 0.95, noise=0.01)}), {"equal-rewards"}),
    "one completion": (curves(GRPO, **{**RL, "entropy": line(1.2, 0.2, 0.01, 0.01)}), {"entropy-collapse"}),
    "forgotten text": (
        curves({"method": "Evaluate"}, report={**SCORED, "sft/text_perplexity": 300.0, **ENDED}), {"forgetting"},
    ),
    "answers without end": (
        curves({"method": "Evaluate"}, report={**SCORED, **ENDED, "sft/unfinished_share": 0.6}), {"repetitive"},
    ),
    "a start without end": (
        curves(loss=SANE, report={**ROWS, "evaluation/unfinished_share": 0.1, "evaluation/base/unfinished_share": 1.0}),
        set(),
    ),
    "tuned answers without end": (
        curves(loss=SANE, report={**ROWS, "evaluation/unfinished_share": 0.6, "evaluation/base/unfinished_share": 0.1}),
        {"repetitive"},
    ),
    "completions without end": (curves(GRPO, **{**RL, "completions__clipped_ratio": line(0.1, 0.9)}), {"repetitive"}),
    "an idle GPU": (curves(loss=SANE, gpus=1, report={**ROWS, "mfu": 0.05}), {"low-device-use"}),
    "a busy GPU": (curves(loss=SANE, gpus=1, report={**ROWS, "mfu": 0.4}), set()),
}  # fmt: skip


def rules(found: list[Finding]) -> set[str]:
    return {each.rule for each in found}


@pytest.mark.parametrize("name", CASES)
def test_curves_fire_their_rules_and_no_other(name):
    given, expected = CASES[name]
    assert rules(diagnose(given)) == expected


def test_every_rule_fires_in_one_case():
    assert {rule.name for rule in RULES} == set().union(*(expected for _, expected in CASES.values()))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("flat", {"method.learning_rate": 2e-4}),
        ("slow", {"method.learning_rate": 6e-5}),
        ("slow and smooth", {"method.global_batch_size": 64}),
        ("noisy", {"method.global_batch_size": 32}),
        ("jumps", {"method.learning_rate": 6.7e-6, "method.schedule.warmup": 0.1}),
        ("risen", {"method.learning_rate": 4e-6, "method.schedule.warmup": 0.1}),
        ("nan", {"method.learning_rate": 2e-6, "method.schedule.warmup": 0.1}),
        ("no memory on a GPU", {"resources.gradient_checkpointing": "on", "resources.micro_batch_size": 4}),
        ("rank 2", {"method.adapter.rank": 8}),
        ("rows cut", {"method.max_length": 256}),
        ("overfit", {"method.num_steps": 100, "method.num_epochs": None}),
        ("still falling", {"method.num_steps": 400, "method.num_epochs": None}),
        ("exploding margins", {"method.beta": 0.3, "method.sft_weight": 1.0}),
        ("equal rewards", {"method.num_generations": 16, "method.global_batch_size": 128}),
        ("far from the start", {"method.beta": 0.04, "method.learning_rate": 5e-7}),
        ("PPO is far", {"method.kl_coef": 0.2, "method.learning_rate": 5e-7}),
        ("pairs in no order", {}),
        ("an idle GPU", {"resources.micro_batch_size": 16}),
    ],
)
def test_a_finding_proposes_the_change_of_its_rule(name, change):
    ppo = curves(GRPO, **{**RL, "kl": line(0.1, 1.0, 9.0, noise=0.01), "kl_coef": line(0.05)})
    [found] = diagnose(ppo if name == "PPO is far" else CASES[name][0])
    assert dict(found.change) == pytest.approx(change)


def test_a_change_sets_only_what_the_method_and_its_adapter_read():
    def change(case: str, **recipe: object) -> dict[str, object]:
        given = CASES[case][0]
        [found] = diagnose(replace(given, recipe={**given.recipe, **recipe}))
        return dict(found.change)

    for others in ({"losses": {"sigmoid": 1.0, "sft": 0.5}}, {"f_divergence": "forward_kl"}, {"method": "OnlineDPO"}):
        assert change("exploding margins", **others) == {"method.beta": 0.3}
    ia3 = {"type": "ia3"}
    assert change("flat at a high rate", adapter=ia3) == {"method.learning_rate": pytest.approx(5e-3)}
    assert change("overfit", adapter=ia3) == {"method.num_steps": 100, "method.num_epochs": None}
    assert change("far from the start", kl_coef=0.0)["method.kl_coef"] == 0.05


def test_a_flat_loss_at_a_rate_that_moves_whole_weights_lowers_it():
    def change(rate: float, **recipe: object) -> dict[str, object]:
        [found] = diagnose(curves({**RECIPE, "learning_rate": rate, **recipe}, loss=FLAT))
        assert found.rule == "never-decreases"
        return dict(found.change)

    assert change(1e-3)["method.learning_rate"] == pytest.approx(5e-3)
    assert change(5e-3)["method.learning_rate"] == 0.01  # no more
    lower = {"method.learning_rate": 0.01, "method.schedule.warmup": 0.1}  # and 0.001 after the next diagnosis
    assert change(0.5) == change(0.5, optimizer={"name": "adamw_torch"}) == lower
    assert change(0.02)["method.learning_rate"] == pytest.approx(2e-3)
    assert change(0.5, optimizer={"name": "sgd"})["method.learning_rate"] == pytest.approx(2.5)


def test_a_smaller_batch_reads_as_many_rows():
    slow = CASES["slow and smooth"][0]
    [found] = diagnose(replace(slow, recipe={**slow.recipe, "num_steps": 200}))
    assert found.change == {"method.global_batch_size": 64, "method.num_steps": 400}


def test_equal_rewards_are_varied_by_the_temperature_first_and_never_where_no_reward_differs():
    given = CASES["equal rewards"][0]
    [found] = diagnose(replace(given, recipe={**given.recipe, "sampling": {"temperature": 0.1}}))
    assert found.change == {"method.sampling.temperature": 1.0}
    [found] = diagnose(replace(given, series={**given.series, "reward": line(0.0)}))
    assert (found.rule, found.change) == ("equal-rewards", {})


def test_completions_that_never_ended_get_more_tokens_and_those_that_do_no_more_a_stronger_kl():
    recipe = {**GRPO, "max_completion_length": 16, "max_length": 64}
    [found] = diagnose(curves(recipe, **{**RL, "completions__clipped_ratio": line(0.9, 1.0)}))
    assert found.change == {"method.max_completion_length": 32, "method.max_length": 80}
    [found] = diagnose(curves(recipe, **{**RL, "completions__clipped_ratio": line(0.1, 0.9)}))
    assert found.change == {"method.beta": 0.04, "method.learning_rate": 5e-7}


def test_a_micro_batch_that_is_proposed_divides_the_global_batch():
    given = replace(CASES["no memory on a GPU"][0], micro_batch_size=9)
    [found] = diagnose(given)
    assert found.change["resources.micro_batch_size"] == 3
    given = CASES["an idle GPU"][0]
    [found] = diagnose(replace(given, recipe={**given.recipe, "global_batch_size": 8}))
    assert found.change == {}


def test_a_micro_batch_divides_a_smaller_batch_too():
    found = diagnose(replace(CASES["slow and smooth"][0], micro_batch_size=128))[0]
    assert found.change == {"method.global_batch_size": 64, "resources.micro_batch_size": 64}


def test_memory_that_no_setting_of_the_resources_saves_gets_no_change():
    given = replace(CASES["no memory on a GPU"][0], is_checkpointed=True)
    assert diagnose(given)[0].change == {"resources.micro_batch_size": 4}
    assert diagnose(replace(given, micro_batch_size=1))[0].change == {}


def test_a_minimum_stays_below_a_rate_that_is_lowered():
    def change(minimum: float) -> dict[str, object]:
        given = CASES["nan"][0]
        [found] = diagnose(replace(given, recipe={**given.recipe, "schedule": {"min_learning_rate": minimum}}))
        return dict(found.change)

    assert change(2e-6)["method.schedule.min_learning_rate"] == pytest.approx(2e-7)
    assert "method.schedule.min_learning_rate" not in change(1e-6)


def test_a_patience_that_a_shorter_training_could_not_use_is_left_out():
    def change(patience: int) -> dict[str, object]:
        given = CASES["overfit"][0]
        validation = {"every_steps": 20, "patience": patience}
        [found] = diagnose(replace(given, recipe={**given.recipe, "validation": validation}))
        return dict(found.change)

    shorter = {"method.num_steps": 100, "method.num_epochs": None}
    assert change(5) == {**shorter, "method.validation.patience": None}
    assert change(4) == shorter


def test_a_running_stage_is_not_called_flat_while_its_rate_warms_up():
    def found(rates: Curve, *, is_over: bool) -> list[Finding]:
        return diagnose(replace(curves(loss=line(3.0, steps=60, noise=0.05), learning_rate=rates), is_over=is_over))

    rising, full = line(0.0, 1e-5, steps=60), line(2e-5, steps=60)
    assert found(rising, is_over=False) == []
    assert rules(found(rising, is_over=True)) == rules(found(full, is_over=False)) == {"flat"}


def test_a_fall_that_noise_may_hide_is_called_flat_with_less_confidence():
    fine_tuned = line(1.3, 1.24, 1.21, 1.2, 1.2, noise=0.15)
    [found] = diagnose(curves(loss=fine_tuned))
    assert (found.rule, found.confidence) == ("flat", "medium")
    assert diagnose(curves(loss=FLAT))[0].confidence == "high"


def test_evidence_names_steps_and_values():
    [found] = diagnose(CASES["overfit"][0])
    assert found.evidence == "held-out loss 1.344 at step 100, its lowest, and 2 at 200"
    assert (found.at, found.metric, found.confidence) == (100, "val/loss", "high")


def test_fp16_and_no_clipping_are_changed_where_a_loss_jumps():
    recipe = {**RECIPE, "precision": "fp16", "max_grad_norm": 5.0, "warmup_ratio": 0.2}
    [found] = diagnose(curves(recipe, loss=spiked(SANE, 80, 140)))
    assert {"method.precision": "bf16", "method.max_grad_norm": 1.0}.items() <= found.change.items()
    assert "method.schedule.warmup" not in found.change


def test_the_rows_of_a_jump_are_named_as_the_stage_logged_them(directory):
    log = directory / "logs" / "stage.log"
    log.write_text("WARNING x step=80 loss=2.9 state=jumped rows=7 (900 tokens), 3 (40 tokens)\n")
    found = read_curves(directory)
    assert found.jumps == {80: "7 (900 tokens), 3 (40 tokens)"}
    for given in (CASES["jumps"][0], CASES["nan"][0]):
        [finding] = diagnose(replace(given, jumps=found.jumps))
        assert finding.evidence.endswith("; rows of step 80, the longest first: 7 (900 tokens), 3 (40 tokens)")


@pytest.fixture
def directory(tmp_path):
    """Of a stage that runs, whose loss does not fall; one report is not finite."""
    path = tmp_path / "sft" / "0123456789abcdef"
    (path / "logs").mkdir(parents=True)
    (path / "logs" / "stage.log").write_text(
        "INFO x rows=1600 rows_cut=800 rows_dropped=0 trained_tokens_percent=16.8\n"
    )
    losses = [3.0 if step != 7 else math.nan for step in range(100)]
    lines = [
        {"step": step + 1, "time": 0.0, "metrics": {"loss": loss, "learning_rate": 1e-5}}
        for step, loss in enumerate(losses)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_curves_of_a_running_stage_come_from_its_reports_and_its_log(directory):
    found = read_curves(directory)
    assert (found.stage, found.num_steps, len(found.loss), found.is_over) == ("sft", 100, 99, False)
    assert found.report["rows_cut"] == 800.0
    assert found.learning_rate == 1e-5  # without a recipe the largest that was reported
    assert rules(diagnose(found)) == {"labels"}
    assert rules(diagnose(replace(found, report={}))) == {"flat"}


def test_the_counts_of_the_data_stage_belong_to_the_curves_of_what_reads_its_rows(tmp_path):
    store = WrittenStore(tmp_path)
    counts = {"rows": 100.0, "duplicates": 90.0}
    rows = store.stage("corpus", {"rows": store.source("corpus")}, metrics=counts)
    trained = store.stage("cpt", {"policy": store.stage("base", {"rows": rows}), "rows": rows}, metrics={"rows": 7.0})
    directory = tmp_path / "cpt" / short(trained.fingerprint)
    assert read_curves(directory).report == {"rows": 7.0, "data/rows": 100.0, "data/duplicates": 90.0}
    store.delete(rows)
    assert read_curves(directory).report == {"rows": 7.0}


def test_a_running_stage_is_diagnosed_anew_as_it_reports(directory):
    assert [each.rule for each in live_findings(directory)] == ["labels"]
    (directory / "logs" / "stage.log").unlink()
    assert [each.rule for each in live_findings(directory)] == ["labels"]
    text = (directory / "metrics.jsonl").read_text()
    (directory / "metrics.jsonl").write_text(text * 2)
    assert [each.rule for each in live_findings(directory)] == ["flat"]
    assert live_findings(directory / "none") == ()


def cut(given: Curves, count: int, validations: int | None = None) -> Curves:
    """The first points of the curves; of the held-out loss another number."""

    def part(name: str, curve: Curve) -> Curve:
        most = count if name not in VALIDATION or validations is None else validations
        return replace(curve, steps=curve.steps[:most], values=curve.values[:most])

    return replace(given, series={name: part(name, curve) for name, curve in given.series.items()})


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.steps or rule.validations], ids=lambda rule: rule.name)
def test_a_rule_judges_no_curve_that_is_shorter_than_its_page_says(rule: Rule) -> None:
    fired = [given for given, expected in CASES.values() if rule.name in expected and rule.find(given)]
    for given in fired:
        assert not rule.steps or not rule.find(cut(given, rule.steps - 1))
        assert not rule.validations or not rule.find(cut(given, 10**6, rule.validations - 1))
    assert fired or rule.name == "repetitive"


def test_most_rules_need_50_steps_and_those_of_held_out_losses_four_validations() -> None:
    least = {rule.name: rule.needs for rule in RULES if rule.group in ("loss", "held-out")}
    assert least == {
        "labels": "-", "never-decreases": "100 steps", "unstable": "30 steps",
        **dict.fromkeys(["flat", "smooth-but-slow", "slow", "noisy", "plateau", "underfit"], "50 steps"),
        **dict.fromkeys(["overfit", "still-falling"], "4 validations"),
        "validation-flat": "50 steps, 4 validations", "early-plateau": "30 steps, 4 validations",
    }  # fmt: skip
    few = curves(loss=line(3.0, 2.0, 1.0, steps=8), val__loss=replace(OVER, steps=range(1, 11)))
    assert rules(diagnose(few)) == {"overfit"}


def test_the_steps_of_the_remedy_for_overfitting_are_patches_in_order() -> None:
    adapter = {"rank": 32, "alpha": 64, "dropout": 0.0}
    given = curves({**RECIPE, "weight_decay": 0.0, "adapter": adapter}, loss=SANE, val__loss=OVER)
    [first] = diagnose(given)
    assert first.change == {"method.num_steps": 100, "method.num_epochs": None, "method.adapter.dropout": 0.05}
    patches = []
    for _ in range(12):
        adapter["dropout"] = adapter["dropout"] or 0.05
        [found] = diagnose(replace(given, because="overfit"))
        assert found.rule == "overfit"
        if not found.change:
            assert found.evidence.endswith("regularized already: more data")
            break
        patches.append(dict(found.change))
        for field, value in found.change.items():
            *parents, name = field.removeprefix("method.").removeprefix("optimizer.").split(".")
            node = adapter if parents else given.recipe
            node[name] = value  # type: ignore[index]
    assert patches == [
        {"method.optimizer.weight_decay": 0.01}, {"method.optimizer.weight_decay": 0.05},
        {"method.optimizer.weight_decay": 0.1}, {"method.adapter.dropout": 0.1},
        {"method.adapter.rank": 16, "method.adapter.alpha": 32},
        {"method.adapter.rank": 8, "method.adapter.alpha": 16}, {"method.adapter.rank": 4, "method.adapter.alpha": 8},
    ]  # fmt: skip


def test_the_learning_rate_of_all_weights_falls_to_the_least_that_the_documents_name() -> None:
    given = replace(curves({**RECIPE, "weight_decay": 0.1}, loss=SANE, val__loss=OVER), because="overfit")
    rates = [2e-5]
    while change := diagnose(replace(given, recipe={**given.recipe, "learning_rate": rates[-1]}))[0].change:
        rates.append(change["method.learning_rate"])  # type: ignore[arg-type]
    assert rates == pytest.approx([2e-5, 6.7e-6, 2.2e-6])


@pytest.mark.parametrize(
    ("name", "because", "change"),
    [
        ("still falling", "overfit", {}),
        ("still falling", "validation-flat", {}),
        ("still falling", "flat", {"method.num_steps": 400, "method.num_epochs": None}),
        ("overfit", "still-falling", {"method.num_steps": 150, "method.num_epochs": None}),
        ("by heart", "still-falling", {"method.num_steps": 150, "method.num_epochs": None}),
        ("noisy", "smooth-but-slow", {}),
        ("slow and smooth", "noisy", {"method.learning_rate": 6e-5}),
    ],
)
def test_no_patch_undoes_the_one_that_the_run_follows(name: str, because: str, change: dict[str, object]) -> None:
    [found] = diagnose(replace(CASES[name][0], because=because))
    assert found.change == pytest.approx(change) and found.rule
    assert ("would undo it" in found.evidence) == (not change)


def test_a_run_knows_the_rule_that_it_follows(tmp_path) -> None:
    for name, because in {"sft": "overfit:sft@0123456789abcdef", "dpo": ""}.items():
        made = WrittenStore(tmp_path).stage(name, {}, provenance={"because": because})
        assert read_curves(tmp_path / name / short(made.fingerprint)).because == because[:7]
