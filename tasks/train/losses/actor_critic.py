"""The terms of proximal policy optimization, and the outputs of its models for completions, gathered from all workers.

Shapes: B completions of a step, C tokens of the longest completion, T of the longest row (prompt and completion), K
last positions of rows, V vocabulary, G prompts. A mask (B, C) is 1 on the tokens of a completion, its end token
included; padding after them has no reward, advantage or loss. Values are of the state before each token, log-ratios of
its log-probability under the policy that sampled it less that under the reference.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tasks.train.generation.one_policy import OnePolicy
from tasks.train.generation.rollouts import Rollouts
from tasks.train.losses.rewards import token_values

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from tasks.train.loop.own_loop import Optimization
    from tasks.train.run import TrainingRun

Row = tuple[Sequence[int], Sequence[int]]  # the tokens of a prompt and its completion

_STEP = 0.2  # largest relative error that the adaptive coefficient reacts to
_EPSILON = 1e-8  # of a variance
_ROUNDING = 1e-6  # error of a mean in fp32, relative to its largest value


def masked_mean(values_BC: Tensor, mask_BC: Tensor) -> Tensor:
    """The mean (a scalar) over the tokens of all completions."""
    return (values_BC * mask_BC).sum() / mask_BC.sum()


def whiten(values_BC: Tensor, mask_BC: Tensor, *, shift: bool) -> Tensor:
    """Scales the values to variance 1 over the tokens of all completions; 0 on padding.

    Equal values are equally far from their mean: 0, whatever rounding makes of it.

    Args:
        shift: whether their mean becomes 0; else it stays.
    """
    mean = masked_mean(values_BC, mask_BC)
    differences_BC = _without_rounding((values_BC - mean) * mask_BC, values_BC * mask_BC)
    variance = masked_mean(differences_BC**2, mask_BC)
    whitened_BC = differences_BC * torch.rsqrt(variance + _EPSILON)
    return (whitened_BC if shift else whitened_BC + mean) * mask_BC


def _without_rounding(differences_BC: Tensor, values_BC: Tensor) -> Tensor:
    """Differences of values from their mean; 0 where all are no more than rounding makes them."""
    is_rounding = differences_BC.abs().max() <= _ROUNDING * values_BC.abs().max()
    return differences_BC.masked_fill(is_rounding, 0.0)


def token_rewards(scores_B: Tensor, log_ratios_BC: Tensor, mask_BC: Tensor, kl_coef: float) -> Tensor:
    """The reward of each token: Ziegler et al. 2019, arXiv:1909.08593, eq. 2; the score is that of the last one."""
    rewards_BC = -kl_coef * log_ratios_BC * mask_BC
    last_B = mask_BC.sum(1).long() - 1
    rewards_BC[torch.arange(len(last_B), device=last_B.device), last_B] += scores_B
    return rewards_BC


def advantages(rewards_BC: Tensor, values_BC: Tensor, mask_BC: Tensor, gamma: float, lam: float) -> Tensor:
    """Generalized advantage estimates (B, C): Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    The value after the last token is 0. Returns are advantages + values.
    """
    rewards_BC, values_BC = rewards_BC * mask_BC, values_BC * mask_BC
    following_BC = torch.nn.functional.pad(values_BC[:, 1:], (0, 1))
    deltas_BC = rewards_BC + gamma * following_BC - values_BC
    found, columns = torch.zeros_like(deltas_BC[:, 0]), list[Tensor]()
    for delta_B in reversed(deltas_BC.unbind(1)):
        found = delta_B + gamma * lam * found
        columns.append(found)
    return torch.stack(columns[::-1], dim=1) * mask_BC


def center_by_prompt(values_BC: Tensor, mask_BC: Tensor, num_generations: int) -> Tensor:
    """Subtracts the mean over the tokens of all completions of a prompt, which follow each other; 0 on padding."""
    sums_B, counts_B = (values_BC * mask_BC).sum(1), mask_BC.sum(1)
    means_G = sums_B.view(-1, num_generations).sum(1) / counts_B.view(-1, num_generations).sum(1)
    centered_BC = (values_BC - means_G.repeat_interleave(num_generations).unsqueeze(1)) * mask_BC
    of_prompts = zip(centered_BC.split(num_generations), (values_BC * mask_BC).split(num_generations), strict=True)
    return torch.cat([_without_rounding(*each) for each in of_prompts])


def policy_loss(logps_BC: Tensor, old_BC: Tensor, advantages_BC: Tensor, clip_range: float) -> tuple[Tensor, Tensor]:
    """The clipped surrogate loss of each token, arXiv:1707.06347, eq. 7; and where it is clipped: 1, else 0."""
    ratios_BC = torch.exp(logps_BC - old_BC)
    losses_BC = -advantages_BC * ratios_BC
    clipped_BC = -advantages_BC * ratios_BC.clamp(1 - clip_range, 1 + clip_range)
    return torch.maximum(losses_BC, clipped_BC), (clipped_BC > losses_BC).float()


def value_loss(
    values_BC: Tensor, old_BC: Tensor, returns_BC: Tensor, clip_range: float | None
) -> tuple[Tensor, Tensor]:
    """Half the squared error of each value, clipped as the ratio is; and where it is clipped: 1, else 0."""
    losses_BC = 0.5 * (values_BC - returns_BC) ** 2
    if clip_range is None:
        return losses_BC, torch.zeros_like(losses_BC)
    near_BC = old_BC + (values_BC - old_BC).clamp(-clip_range, clip_range)
    clipped_BC = 0.5 * (near_BC - returns_BC) ** 2
    return torch.maximum(losses_BC, clipped_BC), (clipped_BC > losses_BC).float()


def explained_variance(values_BC: Tensor, returns_BC: Tensor, mask_BC: Tensor) -> float:
    """1 - Var[returns - values] / Var[returns] over the tokens: 1 where the values are the returns."""
    errors, returns = ((each_BC[mask_BC.bool()]).var(correction=0) for each_BC in (returns_BC - values_BC, returns_BC))
    return float(1 - errors / (returns + _EPSILON))


def extremes(advantages_BC: Tensor, mask_BC: Tensor) -> dict[str, float]:
    """The largest and the smallest advantage of a token, as metrics."""
    found = advantages_BC[mask_BC.bool()]
    return {"advantages/max": float(found.max()), "advantages/min": float(found.min())}


@dataclass(kw_only=True)
class KLCoefficient:
    """Strength of the KL penalty, adapted after each batch: Ziegler et al. 2019, arXiv:1909.08593, section 2.2.

    Args:
        target: KL per completion in nats; None: the coefficient is fixed.
        horizon: completions in which a KL that is off by a fifth or more changes it by a factor of about e ** 0.2.
    """

    value: float
    target: float | None
    horizon: int

    def update(self, kl: float, num_completions: int) -> None:
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_STEP), _STEP)
            self.value *= 1 + error * num_completions / self.horizon

    def state_dict(self) -> Mapping[str, object]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self.value = float(str(state["value"]))


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Rows, padded on the right: causal attention needs no mask there.

    Args:
        starts_B: where completions begin in their rows; ``first``: the least of them.
    """

    input_ids_BT: Tensor
    starts_B: Tensor
    first: int
    mask_BC: Tensor

    @staticmethod
    def of(rows: Sequence[Row], num_columns: int, device: torch.device) -> "Tokens":
        """Pads completions to so many columns."""
        ids_BT = pad_sequence([torch.tensor([*chain(*row)]) for row in rows], batch_first=True).to(device)
        starts_B, lengths_B = torch.tensor([[*map(len, row)] for row in rows], device=device).unbind(1)
        mask_BC = torch.arange(num_columns, device=device) < lengths_B.unsqueeze(1)
        first = min(len(prompt) for prompt, _ in rows)
        return Tokens(input_ids_BT=ids_BT, starts_B=starts_B, first=first, mask_BC=mask_BC.float())

    def gather(self, values_BK: Tensor, first: int) -> Tensor:
        """Of values at positions from ``first`` on, those before the tokens of completions: (B, C)."""
        places_BC = self.starts_B.unsqueeze(1) + torch.arange(self.mask_BC.shape[1], device=values_BK.device)
        return values_BK.gather(1, (places_BC - 1 - first).clamp(max=values_BK.shape[1] - 1)) * self.mask_BC


def token_logps(
    model: "PreTrainedModel | PeftModel", tokens: Tokens, temperature: float, entropies: list[Tensor] | None = None
) -> Tensor:
    """Log-probability (B, C) of each token of the completions.

    Args:
        temperature: that the completions were sampled at.
        entropies: gets the entropies (B, C) of the distributions, which take longer than the log-probabilities.
    """
    first = tokens.first - 1
    targets_BK = tokens.input_ids_BT[:, first + 1 :]
    outputs = model(input_ids=tokens.input_ids_BT, use_cache=False, logits_to_keep=targets_BK.shape[1] + 1)
    all_BKV = (outputs.logits[:, :-1].float() / temperature).log_softmax(-1)
    if entropies is not None:
        entropies.append(tokens.gather(-(all_BKV.exp() * all_BKV).sum(-1), first))
    return tokens.gather(all_BKV.gather(2, targets_BK.unsqueeze(2)).squeeze(2), first)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The completions of a step, of all workers in one order, and the models' outputs for them before its updates.

    Args:
        scores_B: rewards of the completions.
        logps_BC, reference_BC: log-probabilities of tokens under the policy and its frozen start.
    """

    rows: Sequence[Row]
    scores_B: Tensor
    mask_BC: Tensor
    logps_BC: Tensor
    reference_BC: Tensor
    values_BC: Tensor
    metrics: dict[str, float]


class ActorCritic:
    """Samples and measures the completions of a step: each worker handles its share; the batch holds all."""

    def __init__(self, run: "TrainingRun", value: "PreTrainedModel", optimization: "Optimization") -> None:
        self.run, self.ctx, self.value, self.autocast = run, run.ctx, value, optimization.autocast
        self.policy, self.reference, self.rollouts = run.policy.model, run.model("reference"), Rollouts(run)
        self.one_policy, self.fixed = OnePolicy(run.ctx), run.fixed_reference(self.policy, self.reference)

    def sample(self, step: int, temperature: float) -> Batch:
        """Completions of the step's prompts.

        Raises:
            PipelineError: a reward function failed, policy and reference differ before the first step, or the
                reference follows the policy.
        """
        self.fixed.require(step)
        rollouts = self.rollouts
        examples = rollouts.examples(step)
        with self.autocast():
            completions = rollouts.generate(self.policy, examples, step)
        self.one_policy.sampled(step, rollouts.sampled, self.policy)
        rollouts.sampled_by = self.one_policy.weights
        rewards_BK = rollouts.score(step, examples, completions)
        metrics = rollouts.record(step, examples, completions, rewards_BK)
        prompts = [cast("Sequence[int]", each["prompt_ids"]) for each in examples]
        own = self._measured([*zip(prompts, completions, strict=True)], temperature)
        own_BC5 = pad_sequence([row_C5 for _, row_C5 in own], batch_first=True)
        sampler_BC = rollouts.sampled.padded(own_BC5.shape[1], own_BC5.device)
        self.one_policy.compare(sampler_BC, trainer_BC=own_BC5[..., 1], mask_BC=own_BC5[..., 0])
        metrics |= self.one_policy.require(step)
        parts = [own] * self.ctx.world_size  # by rank, which is the order of the batch
        if self.ctx.world_size > 1:
            torch.distributed.all_gather_object(parts, own)
        rows, measured = zip(*chain(*parts), strict=True)
        measured_BC5 = pad_sequence([*measured], batch_first=True).to(self.run.device)
        mask_BC, logps_BC, reference_BC, values_BC, entropies_BC = measured_BC5.unbind(2)
        log_ratios_B = (logps_BC - reference_BC).sum(1)
        if step == 0:
            self.run.start_proof()(log_ratios_B)
        metrics |= {"kl": float(log_ratios_B.mean()), "entropy": float(masked_mean(entropies_BC, mask_BC))}
        return Batch(
            rows=rows, scores_B=rollouts.gathered(rollouts.total(rewards_BK)), mask_BC=mask_BC, logps_BC=logps_BC,
            reference_BC=reference_BC, values_BC=values_BC, metrics=metrics,
        )  # fmt: skip

    def shares(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """This worker's rows of an update, in micro batches."""
        own, size = rows[self.ctx.rank :: self.ctx.world_size], self.run.rows_at_once
        return (own[start : start + size] for start in range(0, len(own), size))

    def _measured(self, rows: Sequence[Row], temperature: float) -> list[tuple[Row, Tensor]]:
        """For each token 1, log-probability, that of the reference, value, entropy: (tokens of a completion, 5)."""
        found, size = list[tuple[Row, Tensor]](), self.run.rows_at_once
        self.policy.eval()  # without the dropout of an adapter
        with torch.no_grad(), self.autocast():
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                tokens, entropies = Tokens.of(part, max(len(ids) for _, ids in part), self.run.device), list[Tensor]()
                logps_BC = token_logps(self.policy, tokens, temperature, entropies)
                with nullcontext() if self.reference else self.policy.disable_adapter():
                    reference_BC = token_logps(self.reference or self.policy, tokens, temperature)
                values_BC = tokens.gather(token_values(self.value, tokens.input_ids_BT), first=0)
                each = torch.stack([tokens.mask_BC, logps_BC, reference_BC, values_BC, *entropies], dim=2)
                found += [(row, row_C5[: len(row[1])]) for row, row_C5 in zip(part, each.cpu(), strict=True)]
        self.policy.train()
        return found
