"""The diagnosis rules: of a kind of method, then of the failure and the losses of any training; what they find."""

import math
from bisect import bisect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

from lineage.diagnosis.curves import Curve, Curves, read_curves
from lineage.diagnosis.finding import (
    Change,
    Check,
    Confidence,
    Finding,
    Rule,
    is_wild,
    length,
    rate,
    regularized,
    rounded,
    stabilised,
    stopped,
    stronger_kl,
)
from lineage.store import MANIFEST, Entry

MIN_STEPS = 50  # shortest curve that is judged flat or slow
_SHORTEST = 20  # of a curve of rewards
_SIGMAS = 6.0  # standard errors that count as significant
_HIGH_RATE, _HIGH_ADAPTER_RATE = 1e-4, 1e-3  # a flat curve above these is not due to a low learning rate
_LOW_TEMPERATURE = 0.7  # completions of one prompt resemble each other below it
# Options of DPO that ``sft_weight`` does not go with.
_NOT_WITH_SFT_WEIGHT = ("losses", "label_smoothing", "f_divergence", "ld_alpha", "weighting", "reference_sync")
_ORDER = ("high", "medium", "low")
# Rule -> the rules whose change its own would undo.
_UNDOES = {"still-falling": {"overfit", "validation-flat", "overconfident"}, "noisy": {"smooth-but-slow"}}

RULES: list[Rule] = []  # the more specific first


def _rule(
    name: str, group: str, sign: str, remedy: str, steps: int = 0, validations: int = 0
) -> Callable[[Check], Check]:
    """Decorator that registers a check."""

    def add(check: Check) -> Check:
        made = Rule(name=name, group=group, sign=sign, remedy=remedy, steps=steps, validations=validations, check=check)
        RULES.append(made)
        return check

    return add


@_rule(
    "exploding-margins", "margins", "margins above 10 nats, and chosen answers less likely than at the start",
    "beta x3 holds the policy nearer to its start, `sft_weight=1` keeps chosen answers likely (arXiv:2402.13228)",
    steps=_SHORTEST,
)  # fmt: skip
def _exploding_margins(curves: Curves) -> Finding | None:
    margins, chosen, likely = curves["rewards/margins"], curves["rewards/chosen"], curves["logps/chosen"]
    beta = curves.number("beta")
    if not beta or min(len(margins), len(chosen)) < _SHORTEST or abs(chosen.values[0]) > 0.05:
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
    steps=_SHORTEST,
)  # fmt: skip
def _overconfident(curves: Curves) -> Finding | None:
    if not curves.is_reward_model or len(curves["margin"]) < _SHORTEST:
        return None
    margin, found = curves["margin"].last, curves.validation
    rises = len(found) >= 3 and found.values[-1] > max(1.1 * min(found.values), 0.5)
    if margin <= 8 and not (margin > 2 and rises):
        return None
    step = found.steps[_lowest(found)] if rises else curves.num_steps // 2
    held_out = f"; held-out loss {min(found.values):.3g} -> {found.values[-1]:.3g}" if len(found) else ""
    return Finding(
        confidence="high" if rises else "medium", metric="margin", at=step,
        change={**length(curves, step), **rate(curves, 0.5)},
        evidence=f"mean margin {margin:.3g}, at an accuracy of {curves['accuracy'].last:.3g}{held_out}",
    )  # fmt: skip


def _rises(curve: Curve) -> bool:
    return len(curve) >= _SHORTEST and curve.last - curve.first > 2 * curve.error()


def _reward(curves: Curves) -> str:
    return f"reward {curves['reward'].first:.3g} -> {curves['reward'].last:.3g}"


@_rule(
    "length-explodes", "length", "reward and length of completions rise together",
    "KL x4, half the rate; a reward that does not grow with length",
    steps=_SHORTEST,
)  # fmt: skip
def _length_explodes(curves: Curves) -> Finding | None:
    name = "completions/mean_length"
    lengths = curves[name]
    if not _rises(curves["reward"]) or len(lengths) < _SHORTEST:
        return None
    if lengths.last < max(1.5 * lengths.first, lengths.first + 8):
        return None
    evidence = f"{_reward(curves)}, completions {lengths.first:.3g} -> {lengths.last:.3g} tokens"
    return Finding(confidence="high", metric=name, evidence=evidence, change=stronger_kl(curves))


@_rule(
    "kl-explodes", "kl", "KL above 5 nats per completion (0.5 per token), and three times the early one",
    "KL x4, half the rate; read completions: what does the reward pay for?",
    steps=_SHORTEST,
)  # fmt: skip
def _kl_explodes(curves: Curves) -> Finding | None:
    kl, per_token = curves["kl"], "kl_coef" not in curves.series  # PPO's is of a whole completion
    if len(kl) < _SHORTEST or not curves.is_reinforcement:
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
    if len(clipped) >= _SHORTEST and clipped.last > 0.5:
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
    steps=_SHORTEST,
)  # fmt: skip
def _entropy_collapse(curves: Curves) -> Finding | None:
    entropy = curves["entropy"]
    if not curves.is_reinforcement or len(entropy) < _SHORTEST or entropy.last > min(0.1 * entropy.first, 0.1):
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


@_rule(
    "out-of-memory", "failure", "the stage ran out of memory",
    "micro batch / 2 at the same global batch, gradient checkpointing; then shorter rows, packing, LoRA, QLoRA",
)  # fmt: skip
def _out_of_memory(curves: Curves) -> Finding | None:
    text = curves.failure.lower()
    if not any(sign in text for sign in ("out of memory", "outofmemory", "can't allocate memory")):
        return None
    change: Change = {} if curves.is_checkpointed else {"resources.gradient_checkpointing": "on"}
    micro = curves.micro_batch_size or 8
    if micro > 1:  # a divisor of it divides the global batch too
        smaller = next(size for size in range(micro // 2, 0, -1) if micro % size == 0)
        change["resources.micro_batch_size"] = smaller
    return Finding(confidence="high", evidence=curves.failure, change=change, metric="")


@_rule(
    "not-finite", "failure", "loss or gradient norm is nan or inf",
    "learning rate / 10, more warm-up, clipping at 1, bf16 for fp16; then read the rows of that step",
)  # fmt: skip
def _not_finite(curves: Curves) -> Finding | None:
    if "diverged" not in curves.failure and "diverged_at_step" not in curves.report:
        return None
    step = int(curves.report.get("diverged_at_step", curves.num_steps + 1))
    text = curves.failure.partition(";")[0] or f"the loss became non-finite at step {step}"
    evidence = f"{text} (learning rate {curves.learning_rate:g}){_rows_of_jumps(curves)}"
    return Finding(confidence="high", at=step, change=stabilised(curves, 10), evidence=evidence)


def _fitted(curves: Curves, least: int = MIN_STEPS) -> Curve | None:
    """The loss, if it is long enough and meaningful."""
    return curves.loss if len(curves.loss) >= least and curves.loss_is_progress else None


@_rule(
    "labels", "loss",
    "SFT: loss on under 0.5 % or over 97 % of the tokens; or a fifth of the rows cut or dropped, or with role marks "
    "in an answer",
    "read the samples in the stage's log, check `chat_template` and roles; longer `max_length`",
)  # fmt: skip
def _labels(curves: Curves) -> Finding | None:
    rows, percent = curves.report.get("rows", 0.0), curves.report.get("trained_tokens_percent")
    cut, dropped = (curves.report.get(name, 0.0) / rows if rows else 0.0 for name in ("rows_cut", "rows_dropped"))
    if cut > 0.2 or dropped > 0.2:
        most = int(curves.number("max_length"))
        evidence = f"of {rows:.0f} rows {cut:.0%} are cut and {dropped:.0%} are dropped at max_length={most}"
        change: Change = {"method.max_length": most * 2} if most else {}
        return Finding(confidence="high", evidence=evidence, change=change)
    all_rows, marked = curves.report.get("data/rows", 0.0), curves.report.get("data/rows_with_role_marks", 0.0)
    if marked > 0.2 * all_rows:
        evidence = f"of {all_rows:.0f} rows {marked:.0f} have marks of roles in an answer, as of a whole transcript"
        return Finding(confidence="high", evidence=evidence)
    if percent is None or curves.recipe.get("method") != "SFT" or 0.5 <= percent <= 97:
        return None
    return Finding(confidence="high", evidence=f"{percent:.3g} % of the tokens get loss")


@_rule(
    "duplicated-rows", "data", "a fifth of the rows say what an earlier one says",
    "keep one of each (`posttrain data` counts them); then fewer steps, for as many passes over the rows",
)  # fmt: skip
def _duplicated_rows(curves: Curves) -> Finding | None:
    rows, copies = curves.report.get("data/rows", 0.0), curves.report.get("data/duplicates", 0.0)
    if not rows or copies < 0.2 * rows or not curves.loss:
        return None
    return Finding(confidence="high", metric="", evidence=f"of {rows:.0f} rows {copies:.0f} repeat an earlier one")


def _is_warming_up(curves: Curves) -> bool:
    """Whether a running stage has had fewer than ``MIN_STEPS`` steps at half of its rate or more."""
    rates, half = curves["learning_rate"].values, 0.5 * curves.learning_rate
    return not curves.is_over and len(rates) > 0 and sum(rate >= half for rate in rates) < MIN_STEPS


def _is_flat(loss: Curve) -> bool:
    """Whether the loss neither falls nor rises beyond noise."""
    falls = loss.first - loss.lowest > max(3 * loss.error(), 0.01 * abs(loss.first))
    return not falls and max(loss.blocks()) <= loss.first + max(_SIGMAS * loss.error(), 0.05 * abs(loss.first))


def _ends(loss: Curve) -> str:
    return f"loss {loss.first:.4g} at the start, {loss.last:.4g} at step {loss.steps[-1]}, noise {loss.noise:.2g}"


@_rule(
    "never-decreases", "loss", "no fall beyond noise in 100 steps or more, at a learning rate that is high",
    "are the right tokens trained, is the template the model's? Then rate x5, rank x2, a larger base; rate / 10 at "
    "0.01 or more, where a step of Adam moves weights by half of what they are",
    steps=2 * MIN_STEPS,
)  # fmt: skip
def _never_decreases(curves: Curves) -> Finding | None:
    loss, has_adapter = _fitted(curves, 2 * MIN_STEPS), "adapter" in curves.recipe
    rank = int(curves.number("adapter", "rank"))  # some types of adapters have none
    high = _HIGH_ADAPTER_RATE if has_adapter else _HIGH_RATE
    if loss is None or curves.learning_rate < high or _is_warming_up(curves) or not _is_flat(loss):
        return None
    evidence = f"{_ends(loss)}, at learning rate {curves.learning_rate:g}"
    if is_wild(curves):
        return Finding(confidence="medium", change=stabilised(curves, 10), evidence=evidence)
    more: Change = {"method.adapter.rank": rank * 2} if rank else {}
    return Finding(confidence="medium", change={**rate(curves, 5), **more}, evidence=evidence)


@_rule(
    "flat",
    "loss",
    "no fall beyond noise in 50 steps or more",
    "learning rate x10; x5 where it falls a little",
    steps=MIN_STEPS,
)
def _flat(curves: Curves) -> Finding | None:
    loss = _fitted(curves)
    if loss is None or _is_warming_up(curves) or not _is_flat(loss):
        return None
    factor = 10 if loss.first - loss.last <= loss.error() else 5
    is_clear = 3 * loss.error() <= 0.03 * abs(loss.first)  # else noise may hide the fall of a sane training
    confidence: Confidence = "high" if is_clear else "medium"
    return Finding(confidence=confidence, evidence=_ends(loss), change=rate(curves, factor))


@_rule(
    "unstable", "loss", "the loss jumps, rises above its start, or rises from its lowest point",
    "learning rate / 5, / 3 for jumps alone; more warm-up, clipping at 1; look for broken or very long rows there",
    steps=30,
)  # fmt: skip
def _unstable(curves: Curves) -> Finding | None:
    loss = _fitted(curves, 30)
    if loss is None:
        return None
    fall = max(loss.first - loss.lowest, 0.02 * abs(loss.first))
    count = max(10, len(loss) // 5)  # windows of about five steps
    windows, error = loss.blocks(count), _SIGMAS * loss.error(1 / count)
    jumps = [index for index, (one, two) in enumerate(pairwise(windows), 1) if two - one > max(0.3 * fall, error)]
    above = max(loss.blocks()) - loss.first > max(0.05 * abs(loss.first), _SIGMAS * loss.error())
    risen = loss.last - loss.lowest > max(0.15 * fall, _SIGMAS * loss.error())
    if not (jumps or above or risen):
        return None
    worst = jumps or [max(range(count), key=lambda index: windows[index])]
    steps = [loss.part(index / count, (index + 1) / count).steps[0] for index in worst[:5]]
    return Finding(
        confidence="high" if above or len(jumps) > 1 else "medium", at=steps[0],
        change=stabilised(curves, 5 if above or risen else 3),
        evidence=f"loss {'jumps at' if jumps else 'is largest around'} steps {', '.join(map(str, steps))}: at most "
        f"{max(windows):.4g}; {loss.first:.4g} at the start, lowest {loss.lowest:.4g}, {loss.last:.4g} at the end"
        f"{_rows_of_jumps(curves)}",
    )  # fmt: skip


def _rows_of_jumps(curves: Curves) -> str:
    """The rows of the steps at which the loss jumped; empty: none, or the stage named none."""
    return "".join(f"; rows of step {step}, the longest first: {rows}" for step, rows in curves.jumps.items())


def _at_rate(curves: Curves, share: float) -> float:
    """The fraction of the steps after which ``share`` of the summed learning rate is spent."""
    spent = list(accumulate(curves["learning_rate"].values or [1.0]))
    return bisect(spent, share * spent[-1]) / len(spent) if len(spent) > 1 else share


def _is_slow(curves: Curves, loss: Curve) -> bool:
    """Whether the loss falls steadily and little: as fast late as early, by thirds of the summed learning rate."""
    third, two_thirds = _at_rate(curves, 1 / 3), _at_rate(curves, 2 / 3)
    one, two, three = loss.mean(0, third), loss.mean(third, two_thirds), loss.mean(two_thirds, 1)
    falls = loss.first - loss.last > max(3 * loss.error(), 0.01 * abs(loss.first))
    return falls and two - three > max(0.5 * (one - two), 2 * loss.error(1 / 3)) and loss.last > 0.65 * loss.first


@_rule(
    "smooth-but-slow", "loss", "a slow, steady fall with little noise, at a global batch of 64 or more",
    "global batch / 2 takes more steps through the same rows; or a higher rate",
    steps=MIN_STEPS,
)  # fmt: skip
def _smooth(curves: Curves) -> Finding | None:
    loss, batch = _fitted(curves), int(curves.number("global_batch_size"))
    if loss is None or batch < 64 or loss.noise > 0.01 * loss.last or not _is_slow(curves, loss):
        return None
    if curves.because == "noisy":  # the batch was too small
        return Finding(confidence="medium", evidence=f"{_ends(loss)}, at global batch {batch}", change=rate(curves, 3))
    change: Change = {"method.global_batch_size": batch // 2}
    if num_steps := int(curves.number("num_steps")):
        change["method.num_steps"] = 2 * num_steps
    if curves.micro_batch_size and batch // 2 % curves.micro_batch_size:
        change["resources.micro_batch_size"] = math.gcd(batch // 2, curves.micro_batch_size)
    return Finding(confidence="medium", evidence=f"{_ends(loss)}, at global batch {batch}", change=change)


@_rule(
    "slow",
    "loss",
    "a steady fall, as fast late as early for the summed learning rate, by a third at most",
    "learning rate x3",
    steps=MIN_STEPS,
)
def _slow(curves: Curves) -> Finding | None:
    loss = _fitted(curves)
    if loss is None or not _is_slow(curves, loss):
        return None
    return Finding(confidence="medium", evidence=f"{_ends(loss)}: a steady fall", change=rate(curves, 3))


@_rule(
    "noisy", "loss",
    "one step varies by 30 % of the last loss, on pairs by half of all that it fell; at a global batch of 4 or less by "
    "15 % of the last loss",
    "global batch x2, up to 64; broken rows are noise, too",
    steps=MIN_STEPS,
)  # fmt: skip
def _noisy(curves: Curves) -> Finding | None:
    loss, batch = _fitted(curves), int(curves.number("global_batch_size"))
    if loss is None or not 0 < batch < 64:
        return None
    of_pairs = curves.is_preference or curves.is_reward_model
    of_last, of_fall = (0.15, 0.02) if batch <= 4 else (0.2, 0.5) if of_pairs else (0.3, 0.05)
    if loss.noise < max(of_last * loss.last, of_fall * (loss.first - loss.last)):
        return None
    evidence = f"{_ends(loss)}, at global batch {batch}"
    change: Change = {"method.global_batch_size": batch * 2}
    return Finding(confidence="high" if batch <= 4 else "medium", change=change, evidence=evidence)


@_rule(
    "plateau", "loss", "a fast fall, then none, at an unchanged learning rate",
    "keep the rate; let it fall: cosine to a tenth, with a warm-up",
    steps=MIN_STEPS,
)  # fmt: skip
def _plateau(curves: Curves) -> Finding | None:
    loss, rates = _fitted(curves), curves["learning_rate"]
    if loss is None or not len(rates) or rates.last < 0.5 * max(rates.values) or loss.last < 0.1 * loss.first:
        return None
    fall, early = loss.first - loss.last, loss.mean(0.2, 0.3)
    if fall < 6 * loss.error() or loss.first - early < 0.8 * fall or loss.mean(0.4, 0.6) - loss.last > 2 * loss.error():
        return None
    step = loss.part(0.25, 1).steps[0]
    return Finding(
        confidence="medium", at=step,
        evidence=f"{_ends(loss)}; {early:.4g} at step {step} already, the learning rate stays at {rates.last:.3g}",
        change={
            "method.schedule.name": "cosine", "method.schedule.warmup": 0.1,
            "method.schedule.min_learning_rate": rounded(curves.learning_rate / 10),
        },
    )  # fmt: skip


@_rule(
    "underfit", "loss", "the loss stays high under a strong limit: rank 4 or less, few layers, weight decay above 0.1",
    "rank x4, all linear layers, weight decay 0.01",
    steps=MIN_STEPS,
)  # fmt: skip
def _underfit(curves: Curves) -> Finding | None:
    loss, adapter = _fitted(curves), curves.recipe.get("adapter")
    rank, decay = curves.number("adapter", "rank"), curves.number("weight_decay")
    few = isinstance(adapter, Mapping) and adapter.get("target_modules", "all-linear") != "all-linear"
    if loss is None or loss.last < 0.3 * loss.first or loss.mean(0.6, 0.75) - loss.last > 0.05 * loss.last:
        return None
    change: Change = {"method.optimizer.weight_decay": 0.01} if decay > 0.1 else {}
    if 0 < rank <= 4:
        change["method.adapter.rank"] = int(rank * 4)
    if few:
        change["method.adapter.target_modules"] = "all-linear"
    named = ", ".join(name.rpartition(".")[2] for name in change)
    return Finding(confidence="medium", change=change, evidence=f"{_ends(loss)}, under {named}") if change else None


def _measured(curves: Curves) -> Curve | None:
    """The held-out loss, if it was measured often enough."""
    found = curves.validation
    return found if len(found) >= 4 and not curves.is_reinforcement else None


def _lowest(found: Curve) -> int:
    """Index of the smallest value."""
    return min(range(len(found)), key=lambda index: found.values[index])


@_rule(
    "overfit", "held-out", "held-out loss rises from its lowest point",
    "stop at that step; then, of the run of that patch, weight decay 0.01, 0.05, 0.1, dropout 0.05, 0.1, rank 16, 8, "
    "4, rate / 3, more data",
    validations=4,
)  # fmt: skip
def _overfit(curves: Curves) -> Finding | None:
    found = _measured(curves)
    if found is None:
        return None
    low = _lowest(found)
    least, rise, step = found.values[low], found.values[-1] - found.values[low], found.steps[low]
    loss = _fitted(curves, 1) or Curve()
    both_rise = len(loss) > 3 and loss.last > loss.first  # the training is unstable
    fall = max([found.values[0], *([loss.first] if loss else [])]) - least
    if low >= len(found) - 2 or rise < max(0.02 * least, 0.05 * fall) or both_rise:
        return None
    was_stopped, change = curves.because == "overfit", stopped(curves, step)
    if step < 0.15 * curves.num_steps:
        change = {**length(curves, 2 * step), **rate(curves, 1 / 3)}
    elif was_stopped:
        change = regularized(curves)
    if not was_stopped and curves.number("adapter", "dropout", default=1.0) < 0.05:  # some types of adapters have none
        change["method.adapter.dropout"] = 0.05
    elif not was_stopped and "adapter" not in curves.recipe and curves.number("weight_decay") < 0.01:
        change["method.optimizer.weight_decay"] = 0.01
    evidence = f"held-out loss {least:.4g} at step {step}, its lowest, and {found.values[-1]:.4g} at {found.steps[-1]}"
    evidence += "" if change else "; it is regularized already: more data"
    return Finding(
        confidence="high" if rise > max(0.05 * least, 0.1 * fall) else "medium", at=step, change=change,
        evidence=evidence,
        metric=curves.validation_name,
    )  # fmt: skip


def _flat_from(found: Curve) -> int:
    """The first step whose value is near the lowest: within 1 % of it, or 0.5 % of all that the curve fell."""
    least = min(found.values)
    near = least + max(0.01 * least, 0.005 * (found.values[0] - least))
    return next(step for step, value in zip(found.steps, found.values, strict=True) if value <= near)


@_rule(
    "validation-flat",
    "held-out",
    "held-out loss is flat while the training loss falls",
    "stop at the flat point",
    steps=MIN_STEPS,
    validations=4,
)
def _validation_flat(curves: Curves) -> Finding | None:
    found, loss = _measured(curves), _fitted(curves)
    if found is None or loss is None:
        return None
    step = _flat_from(found)
    share = step / curves.num_steps
    fall = loss.mean(share, share + 0.1) - loss.last
    if share > 0.6 or fall < max(_SIGMAS * loss.error(), 0.1 * loss.last, 0.005 * loss.first):
        return None
    evidence = f"held-out loss is flat from step {step} ({min(found.values):.4g}); training loss falls by {fall:.3g}"
    change = stopped(curves, step)
    return Finding(confidence="medium", at=step, change=change, metric=curves.validation_name, evidence=evidence)


@_rule(
    "early-plateau", "held-out", "both losses are flat from the first half of the first epoch on",
    "learning rate x2; if that changes nothing, the data is too small or too easy",
    steps=30, validations=4,
)  # fmt: skip
def _early_plateau(curves: Curves) -> Finding | None:
    found, loss, epoch = _measured(curves), _fitted(curves, 30), curves.steps_per_epoch
    if found is None or loss is None or not epoch or epoch > curves.num_steps:
        return None
    step, share = _flat_from(found), epoch / curves.num_steps
    rest = loss.mean(max(0.0, share - 0.1), share) - loss.last
    if step > 0.5 * epoch or rest > max(3 * loss.error(), 0.03 * loss.last):
        return None
    evidence = f"held-out and training loss are flat from step {step} on; an epoch has {epoch:.0f} steps"
    change = rate(curves, 2)
    return Finding(confidence="low", at=step, metric=curves.validation_name, change=change, evidence=evidence)


@_rule(
    "still-falling",
    "held-out",
    "held-out loss falls as long as the learning rate lets it",
    "1-2 epochs more: twice the steps",
    validations=4,
)
def _still_falling(curves: Curves) -> Finding | None:
    found = _measured(curves)
    if found is None or not curves.is_over or _lowest(found) != len(found) - 1:
        return None
    quarter = min(found.values[: int(_at_rate(curves, 0.75) * (len(found) - 1)) + 1]) - found.values[-1]
    if quarter < max(0.1 * (found.values[0] - found.values[-1]), 0.02 * found.values[-1]):
        return None
    evidence = (
        f"held-out loss is {found.values[-1]:.4g} at step {found.steps[-1]}; "
        f"{quarter:.3g} in the last quarter of the summed learning rate"
    )
    change = length(curves, curves.num_steps * 2)
    return Finding(confidence="medium", metric=curves.validation_name, change=change, evidence=evidence)


def diagnose(curves: Curves) -> list[Finding]:
    """All findings, most certain first; at most one per group, and only the failure if there is one."""
    found: dict[str, Finding] = {}
    for rule in RULES:
        if rule.group not in found and (finding := rule.find(curves)):
            if curves.because in _UNDOES.get(rule.name, ()):
                evidence = f"{finding.evidence}; no change: the recipe follows {curves.because}, and this would undo it"
                finding = replace(finding, change={}, evidence=evidence)
            found[rule.group] = finding
    if "failure" in found:
        return [found["failure"]]
    return sorted(found.values(), key=lambda finding: _ORDER.index(finding.confidence))


def live_findings(directory: Path) -> tuple[Finding, ...]:
    """Findings of a running stage, recomputed when its reports have grown by about a tenth."""
    try:
        size = Entry(directory).metrics.stat().st_size
    except OSError:
        return ()
    return _findings(directory, int(8 * math.log2(size + 1)), (directory / MANIFEST).exists())


@lru_cache(maxsize=64)
def _findings(directory: Path, size: int, is_over: bool) -> tuple[Finding, ...]:
    return tuple(diagnose(read_curves(directory)))


def as_line(finding: Finding) -> str:
    """A finding in one line."""
    return f"{finding.rule}: {finding.evidence}"
