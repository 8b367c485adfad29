"""Rules on preference tuning, reward models, reinforcement learning, evaluations and GPU utilisation."""

import math
from functools import partial

from lineage.diagnosis.curves import Curve, Curves
from lineage.diagnosis.finding import Change, Finding, Rule, is_wild, length, rate, rounded, rule, stronger_kl
from lineage.diagnosis.loss_rules import lowest

_MIN_STEPS = 20
_LOW_TEMPERATURE = 0.7  # completions of one prompt resemble each other below it
# Options of DPO that ``sft_weight`` does not go with.
_NOT_WITH_SFT_WEIGHT = ("losses", "label_smoothing", "f_divergence", "ld_alpha", "weighting", "reference_sync")

METHOD_RULES: list[Rule] = []
_rule = partial(rule, METHOD_RULES)


@_rule(
    "exploding-margins", "margins", "margins above 10 nats, and chosen answers less likely than at the start",
    "beta x3 holds the policy nearer to its start, `sft_weight=1` keeps chosen answers likely (arXiv:2402.13228)",
    steps=_MIN_STEPS,
)  # fmt: skip
def _exploding_margins(curves: Curves) -> Finding | None:
    margins, chosen, likely = curves["rewards/margins"], curves["rewards/chosen"], curves["logps/chosen"]
    beta = curves.number("beta")
    if not beta or min(len(margins), len(chosen)) < _MIN_STEPS or abs(chosen.values[0]) > 0.05:
        return None  # rewards start at 0 where there is a reference
    margin, drop = margins.last / beta, -chosen.last / beta
    if margin < 10 or drop < max(1.0, 0.1 * abs(likely.first) if len(likely) else 0.0):
        return None
    change: Change = {"method.beta": rounded(min(beta * 3, 1.0))}
    recipe = curves.recipe
    is_plain = recipe.get("method", "DPO") == "DPO" and recipe.get("loss_type", "sigmoid") == "sigmoid"
    if is_plain and not recipe.get("sft_weight") and not any(recipe.get(name) for name in _NOT_WITH_SFT_WEIGHT):
        change["method.sft_weight"] = 1.0
    logps = f" (log-probability {likely.first:.4g} -> {likely.last:.4g})" if len(likely) else ""
    return Finding(
        confidence="high" if margin > 20 else "medium", metric="rewards/chosen", change=change,
        evidence=f"at step {curves.num_steps} the margin is {margin:.3g} nats (rewards/margins {margins.last:.3g} at "
        f"beta {beta:g}), and chosen answers are less likely by {drop:.3g} nats{logps}",
    )  # fmt: skip


@_rule(
    "accuracy-stuck", "accuracy", "accuracy of preferences stays at 0.5",
    "learning rate x10 (/ 10 at 0.01 or more) where margins hardly move; else read pairs: are chosen and rejected "
    "mixed up?",
    steps=30,
)  # fmt: skip
def _accuracy_stuck(curves: Curves) -> Finding | None:
    name, other = ("rewards/accuracies", "rewards/margins") if curves.is_preference else ("accuracy", "margin")
    accuracies, margins = curves[name], curves[other]
    if len(accuracies) < 30 or not len(margins):
        return None
    late, spread = accuracies.part(0.5, 1.0), margins.part(0.5, 1.0).noise
    if abs(late.mean() - 0.5) > max(0.05, 2 * late.noise / math.sqrt(len(late))):
        return None
    moves = spread > 0.1
    seen = f"{name} is {late.mean():.3g} over the last {len(late)} steps, margins {margins.last:.2g} +- {spread:.2g}"
    return Finding(
        confidence="high", metric=name, change={} if moves else rate(curves, 0.1 if is_wild(curves) else 10),
        evidence=f"{seen}: the model {'moves, and learns no order' if moves else 'hardly moves'}",
    )  # fmt: skip


@_rule(
    "overconfident", "margins", "a reward model's mean margin is above 8, or above 2 while its held-out loss rises",
    "fewer steps, half the rate: policies exploit a reward model that is too sure",
    steps=_MIN_STEPS,
)  # fmt: skip
def _overconfident(curves: Curves) -> Finding | None:
    if not curves.is_reward_model or len(curves["margin"]) < _MIN_STEPS:
        return None
    margin, found = curves["margin"].last, curves.validation
    rises = len(found) >= 3 and found.values[-1] > max(1.1 * min(found.values), 0.5)
    if margin <= 8 and not (margin > 2 and rises):
        return None
    step = found.steps[lowest(found)] if rises else curves.num_steps // 2
    held_out = f"; held-out loss {min(found.values):.3g} -> {found.values[-1]:.3g}" if len(found) else ""
    return Finding(
        confidence="high" if rises else "medium", metric="margin", at=step,
        change={**length(curves, step), **rate(curves, 0.5)},
        evidence=f"mean margin {margin:.3g}, at an accuracy of {curves['accuracy'].last:.3g}{held_out}",
    )  # fmt: skip


def _rises(curve: Curve) -> bool:
    return len(curve) >= _MIN_STEPS and curve.last - curve.first > 2 * curve.error()


def _reward(curves: Curves) -> str:
    return f"reward {curves['reward'].first:.3g} -> {curves['reward'].last:.3g}"


@_rule(
    "length-explodes", "length", "reward and length of completions rise together",
    "KL x4, half the rate; a reward that does not grow with length",
    steps=_MIN_STEPS,
)  # fmt: skip
def _length_explodes(curves: Curves) -> Finding | None:
    name = "completions/mean_length"
    lengths = curves[name]
    if not _rises(curves["reward"]) or len(lengths) < _MIN_STEPS:
        return None
    if lengths.last < max(1.5 * lengths.first, lengths.first + 8):
        return None
    evidence = f"{_reward(curves)}, completions {lengths.first:.3g} -> {lengths.last:.3g} tokens"
    return Finding(confidence="high", metric=name, evidence=evidence, change=stronger_kl(curves))


@_rule(
    "kl-explodes", "kl", "KL above 5 nats per completion (0.5 per token), and three times the early one",
    "KL x4, half the rate; read completions: what does the reward pay for?",
    steps=_MIN_STEPS,
)  # fmt: skip
def _kl_explodes(curves: Curves) -> Finding | None:
    kl, per_token = curves["kl"], "kl_coef" not in curves.series  # PPO's is of a whole completion
    if len(kl) < _MIN_STEPS or not curves.is_reinforcement:
        return None
    early = max(kl.mean(0.1, 0.3), 1e-3)
    if kl.last < max(0.5 if per_token else 5.0, 3 * early):
        return None
    evidence = f"KL to the start {early:.3g} -> {kl.last:.3g} nats, {_reward(curves)}"
    return Finding(confidence="high", metric="kl", evidence=evidence, change=stronger_kl(curves))


def _models(curves: Curves, metric: str) -> dict[str, float]:
    """Model -> value of a metric of an evaluation, in the order of the pipeline: the start of a training is first."""
    found = {
        name.removesuffix(f"/{metric}"): value for name, value in curves.report.items() if name.endswith(f"/{metric}")
    }
    return dict(sorted(found.items(), key=lambda each: each[0] != "evaluation/base"))


@_rule(
    "repetitive", "answers", "an evaluation: 30 % of a tuned model's answers never end; reinforcement: half of them",
    "an earlier checkpoint; do rows end in the token at which generation stops? Reinforcement: twice "
    "`max_completion_length` if they never did end, else KL x4, half the rate",
)  # fmt: skip
def _repetitive(curves: Curves) -> Finding | None:
    tuned = {name: value for name, value in list(_models(curves, "unfinished_share").items())[1:] if value > 0.3}
    clipped, change = curves["completions/clipped_ratio"], Change()
    if len(clipped) >= _MIN_STEPS and clipped.last > 0.5:
        tuned[curves.stage] = clipped.last
        most = int(curves.number("max_completion_length"))
        if clipped.first < 0.5:
            change = stronger_kl(curves)
        elif most:  # and as many tokens for the prompt as before
            change["method.max_completion_length"] = 2 * most
            change["method.max_length"] = int(curves.number("max_length")) + most
    evidence = ", ".join(f"{name}: {value:.0%}" for name, value in tuned.items()) + " of the answers never end"
    metric = "completions/clipped_ratio" if len(clipped) else ""
    if not tuned:
        return None
    return Finding(confidence="high" if metric else "medium", metric=metric, evidence=evidence, change=change)


@_rule(
    "equal-rewards", "groups", "all rewards are equal in 70 % of the groups, which then have no gradient",
    "a temperature of 1 if it is below 0.7, else twice the completions per prompt; if no completion ever got another "
    "reward: another reward, or prompts that are neither solved nor hopeless",
    steps=10,
)  # fmt: skip
def _equal_rewards(curves: Curves) -> Finding | None:
    equal = curves["frac_reward_zero_std"]
    if len(equal) < 10 or equal.mean(0.5, 1.0) < 0.7:
        return None
    rewards, change = curves["reward"].values or [0.0], Change()
    if curves.number("sampling", "temperature", default=1.0) < _LOW_TEMPERATURE:
        change["method.sampling.temperature"] = 1.0
    elif max(rewards) > min(rewards):
        for name, default in (("num_generations", 8), ("global_batch_size", 64)):
            change[f"method.{name}"] = int(curves.number(name, default=default) * 2)
    evidence = f"in {equal.mean(0.5, 1.0):.0%} of the groups all rewards are equal; {_reward(curves)}"
    return Finding(confidence="high", metric="frac_reward_zero_std", evidence=evidence, change=change)


@_rule(
    "entropy-collapse", "entropy", "entropy under 0.1 nats per token and a tenth of its start",
    "KL x4, half the rate; `epsilon_high=0.28` lets rare tokens grow",
    steps=_MIN_STEPS,
)  # fmt: skip
def _entropy_collapse(curves: Curves) -> Finding | None:
    entropy = curves["entropy"]
    if not curves.is_reinforcement or len(entropy) < _MIN_STEPS or entropy.last > min(0.1 * entropy.first, 0.1):
        return None
    evidence = f"entropy {entropy.first:.3g} -> {entropy.last:.3g} nats per token, {_reward(curves)}"
    return Finding(confidence="medium", metric="entropy", evidence=evidence, change=stronger_kl(curves))


@_rule(
    "forgetting", "text", "an evaluation: text perplexity is twice that of an earlier model",
    "an adapter for that stage (`adapter.rank=16`), a lower rate, or text among its rows; check the prompt format",
)  # fmt: skip
def _forgetting(curves: Curves) -> Finding | None:
    found = _models(curves, "text_perplexity")
    best = min(found, key=lambda name: found[name], default="")
    worse = [name for name in list(found)[list(found).index(best) :] if found[name] > 2 * found[best]] if best else []
    evidence = ", ".join(f"{name} {found[name]:.4g}" for name in (best, *worse) if name)
    return Finding(confidence="medium", metric="", evidence=f"text perplexity: {evidence}") if worse else None


@_rule("low-device-use", "device", "under 15 % of the GPU's peak", "micro batch x2: global batch and model stay")
def _low_device_use(curves: Curves) -> Finding | None:
    mfu, micro = curves.report.get("mfu"), curves.micro_batch_size
    if not curves.gpus or mfu is None or mfu >= 0.15 or not micro:
        return None
    fits = int(curves.number("global_batch_size")) % (2 * micro) == 0
    change: Change = {"resources.micro_batch_size": micro * 2} if fits else {}
    evidence = f"{mfu:.0%} of the GPU's peak at micro_batch_size={micro}"
    return Finding(confidence="medium", metric="tokens_per_second", evidence=evidence, change=change)
