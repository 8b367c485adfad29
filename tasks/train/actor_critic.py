"""What a policy and its value model say of sampled completions, gathered from all workers.

Shapes: B completions of a step, C tokens of the longest completion, T of the longest row (prompt and completion), K
last positions of rows, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, cast

import torch
from torch.nn.utils.rnn import pad_sequence

from tasks.train.policy_gradient import masked_mean
from tasks.train.rewards import token_values
from tasks.train.rollouts import Rollouts

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from tasks.train.run import TrainingRun

Row = tuple[Sequence[int], Sequence[int]]  # the tokens of a prompt and its completion


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Rows, padded on the right: causal attention needs no mask there.

    Args:
        starts_B: where completions begin in their rows.
        mask_BC: 1 on the tokens of completions.
    """

    input_ids_BT: "Tensor"
    starts_B: "Tensor"
    mask_BC: "Tensor"

    @staticmethod
    def of(rows: Sequence[Row], num_columns: int, device: torch.device) -> "Tokens":
        """Pads completions to so many columns."""
        ids_BT = pad_sequence([torch.tensor([*chain(*row)]) for row in rows], batch_first=True).to(device)
        starts_B, lengths_B = torch.tensor([[*map(len, row)] for row in rows], device=device).unbind(1)
        mask_BC = torch.arange(num_columns, device=device) < lengths_B.unsqueeze(1)
        return Tokens(input_ids_BT=ids_BT, starts_B=starts_B, mask_BC=mask_BC.float())

    def gather(self, values_BK: "Tensor", first: int) -> "Tensor":
        """Of a value at each place from ``first`` on, those before the tokens of completions: (B, C)."""
        places_BC = self.starts_B.unsqueeze(1) + torch.arange(self.mask_BC.shape[1], device=values_BK.device)
        return values_BK.gather(1, (places_BC - 1 - first).clamp(max=values_BK.shape[1] - 1)) * self.mask_BC


def token_logps(
    model: "PreTrainedModel | PeftModel", tokens: Tokens, temperature: float, entropies: "list[Tensor] | None" = None
) -> "Tensor":
    """Log-probability (B, C) of each token of the completions.

    Args:
        temperature: that the completions were sampled at.
        entropies: gets the entropies (B, C) of the distributions, which take longer than the log-probabilities.
    """
    first = int(tokens.starts_B.min()) - 1
    targets_BK = tokens.input_ids_BT[:, first + 1 :]
    outputs = model(input_ids=tokens.input_ids_BT, use_cache=False, logits_to_keep=targets_BK.shape[1] + 1)
    all_BKV = (outputs.logits[:, :-1].float() / temperature).log_softmax(-1)
    if entropies is not None:
        entropies.append(tokens.gather(-(all_BKV.exp() * all_BKV).sum(-1), first))
    return tokens.gather(all_BKV.gather(2, targets_BK.unsqueeze(2)).squeeze(2), first)


def state_values(model: "PreTrainedModel", tokens: Tokens) -> "Tensor":
    """The value (B, C) of the state before each token of the completions."""
    return tokens.gather(token_values(model, tokens.input_ids_BT, None), first=0)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The completions of a step, of all workers in one order, and what the models say of them before its updates.

    Args:
        scores_B: rewards of the completions.
        logps_BC, reference_BC: log-probabilities of tokens under the policy and its frozen start.
        values_BC: of the state before each token.
    """

    rows: Sequence[Row]
    scores_B: "Tensor"
    mask_BC: "Tensor"
    logps_BC: "Tensor"
    reference_BC: "Tensor"
    values_BC: "Tensor"
    metrics: dict[str, float]

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for row in self.rows for ids in row)

    def tokens(self, rows: Sequence[int]) -> Tokens:
        """Of some rows; columns are those of the batch."""
        return Tokens.of([self.rows[row] for row in rows], self.mask_BC.shape[1], self.mask_BC.device)


class ActorCritic:
    """Samples the completions of a step and measures them: each worker its share, and the batch is that of all.

    Args:
        autocast: of the training's precision.
    """

    def __init__(
        self, run: "TrainingRun", value: "PreTrainedModel", autocast: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self.run, self.ctx, self.value, self.autocast = run, run.ctx, value, autocast
        self.policy, self.reference = run.policy.model, run.model("reference")
        self.proof, self.rollouts = run.start_proof(), Rollouts(run)

    def sample(self, step: int, temperature: float) -> Batch:
        """Completions of the step's prompts.

        Raises:
            PipelineError: a reward function failed, or policy and reference differ before the first step.
        """
        rollouts = self.rollouts
        examples = rollouts.examples(step)
        with self.autocast():
            completions = rollouts.generate(self.policy, examples, step)
        rewards_BK = rollouts.score(examples, completions)
        metrics = rollouts.record(step, examples, completions, rewards_BK)
        prompts = [cast("Sequence[int]", each["prompt_ids"]) for each in examples]
        own = self._measured([*zip(prompts, completions, strict=True)], temperature)
        parts = [own] * self.ctx.world_size  # by rank, which is the order of the batch
        if self.ctx.world_size > 1:
            torch.distributed.all_gather_object(parts, own)
        rows, measured = zip(*chain(*parts), strict=True)
        logps_BC, reference_BC, values_BC, entropies_BC = (
            pad_sequence([*measured], batch_first=True).to(self.run.device).unbind(2)
        )
        mask_BC = pad_sequence([torch.ones(len(each)) for each in measured], batch_first=True).to(self.run.device)
        log_ratios_B = (logps_BC - reference_BC).sum(1)
        if step == 0:
            self.proof(log_ratios_B)
        kl, entropy = float(log_ratios_B.mean()), float(masked_mean(entropies_BC, mask_BC))
        return Batch(
            rows=rows, scores_B=rollouts.gathered(rollouts.total(rewards_BK)), mask_BC=mask_BC, logps_BC=logps_BC,
            reference_BC=reference_BC, values_BC=values_BC, metrics={**metrics, "kl": kl, "entropy": entropy},
        )  # fmt: skip

    def shares(self, rows: Sequence[int]) -> Iterator[Sequence[int]]:
        """This worker's rows of an update, in micro batches."""
        own, size = rows[self.ctx.rank :: self.ctx.world_size], self.ctx.resources.micro_batch_size
        return (own[start : start + size] for start in range(0, len(own), size))

    def _measured(self, rows: Sequence[Row], temperature: float) -> "list[tuple[Row, Tensor]]":
        """For each token log-probability, that of the reference, value and entropy: (tokens of a completion, 4)."""
        found, size = list[tuple[Row, torch.Tensor]](), self.ctx.resources.micro_batch_size
        self.policy.eval()  # without the dropout of an adapter
        with torch.no_grad(), self.autocast():
            for start in range(0, len(rows), size):
                part = rows[start : start + size]
                tokens = Tokens.of(part, max(len(ids) for _, ids in part), self.run.device)
                entropies = list[torch.Tensor]()
                logps_BC = token_logps(self.policy, tokens, temperature, entropies)
                with nullcontext() if self.reference else self.policy.disable_adapter():
                    reference_BC = token_logps(self.reference or self.policy, tokens, temperature)
                each = torch.stack([logps_BC, reference_BC, state_values(self.value, tokens), *entropies], dim=2)
                found += [(row, row_C4[: len(row[1])]) for row, row_C4 in zip(part, each.cpu(), strict=True)]
        self.policy.train()
        return found
