"""Proximal policy optimization: Schulman et al. 2017, arXiv:1707.06347; on language models Ziegler et al. 2019,
arXiv:1909.08593, and Stiennon et al. 2020, arXiv:2009.01325; in its details Huang et al. 2024, arXiv:2403.17031.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from lineage.errors import ConfigError
from tasks.context import Metrics
from tasks.method import LOOP_FIELDS, VALUE_MODEL
from tasks.train.best import REWARDED
from tasks.train.generation.generating import Generating

if TYPE_CHECKING:
    from torch import Tensor

    from tasks.train.losses.actor_critic import Batch
    from tasks.train.run import TrainingRun

LOSSES = ("loss/policy", "clipfrac", "loss/value", "value_clipfrac")  # means over tokens


@dataclass(frozen=True, kw_only=True)
class PPO(Generating):
    """Tunes a policy on the rewards of its own completions, with a value model that starts as the reward model.

    Each step samples ``global_batch_size`` completions, ``num_generations`` of each prompt, and updates both models
    ``num_ppo_epochs`` x ``num_minibatches`` times on them.
    """

    version: ClassVar[int] = 2  # 1 did not stop at the end of turn that the chat template alone names
    models: ClassVar = {**Generating.models, "value": VALUE_MODEL}
    measures: ClassVar = (
        *(each for each in REWARDED if not each.endswith(("min_length", "terminated_length", "/std"))), *LOSSES,
        "kl_coef", "explained_variance",
    )  # fmt: skip
    applies: ClassVar = LOOP_FIELDS

    num_generations: Annotated[int, Gt(0)] = 1  # completions per prompt
    kl_coef: Annotated[float, Ge(0)] = 0.05  # of the penalty in every token's reward: its log-ratio to the reference
    kl_target: Annotated[float, Gt(0)] | None = None  # KL per completion, in nats, to adapt kl_coef to; None: it stays
    kl_horizon: Annotated[int, Gt(0)] | None = None  # completions within which kl_coef follows; None: 10,000
    gamma: Annotated[float, Ge(0), Le(1)] = 1.0  # of generalized advantage estimation
    gae_lambda: Annotated[float, Ge(0), Le(1)] = 0.95  # of generalized advantage estimation
    clip_range: Annotated[float, Gt(0)] = 0.2  # how far from 1 the ratio to the policy that sampled is followed
    value_clip_range: Annotated[float, Gt(0)] | None = 0.2  # how far from its old value a value is; None: any way
    value_coef: Annotated[float, Gt(0)] = 0.1  # of the value loss
    whiten_rewards: Literal["scale", "shift"] | None = None  # of tokens, to variance 1; shift: and mean 0
    whiten_advantages: bool = True  # to mean 0 and variance 1
    center_advantages: bool = False  # subtract the mean over all completions of a prompt before
    num_ppo_epochs: Annotated[int, Gt(0)] = 4  # passes over the completions of a step
    num_minibatches: Annotated[int, Gt(0)] = 1  # updates in each pass

    def __post_init__(self) -> None:
        super().__post_init__()
        batch = self.global_batch_size
        refused = {
            f"kl_target={self.kl_target or 0:g} with kl_coef=0: the coefficient adapts by factors, so it would stay 0; "
            "set kl_coef, such as 0.05, or kl_target=null": self.kl_target is not None and not self.kl_coef,
            f"kl_horizon={self.kl_horizon} without kl_target: the coefficient is fixed; set kl_target, such as 6, or "
            "kl_horizon=null": self.kl_horizon is not None and self.kl_target is None,
            f"kl_horizon={self.kl_horizon} with global_batch_size={batch}: a step could make kl_coef negative; set "
            f"kl_horizon above {batch / 5:g}": self.kl_target and 5 * (self.kl_horizon or 10_000) <= batch,
            "center_advantages=true with num_generations=1: it compares the completions of one prompt; set "
            "num_generations=4, or center_advantages=false": self.center_advantages and self.num_generations == 1,
            f"num_minibatches={self.num_minibatches} does not divide global_batch_size={batch}; set one that "
            "does": batch % self.num_minibatches,
            f"clip_range={self.clip_range:g}, value_clip_range={self.value_clip_range} with one update per step: its "
            "ratios are 1, so nothing is clipped; remove them, or set num_ppo_epochs or num_minibatches above 1": (
                self.num_ppo_epochs * self.num_minibatches == 1
                and (self.clip_range, self.value_clip_range) != (0.2, 0.2)
            ),
        }
        if found := [message for message, is_refused in refused.items() if is_refused]:
            raise ConfigError(found[0])

    def loop(self, run: "TrainingRun") -> Metrics:
        import torch

        from tasks.train.loop.own_loop import Optimization, OwnLoop
        from tasks.train.losses import actor_critic as terms
        from tasks.train.losses.rewards import token_values
        from tasks.train.models.load import disable_dropout

        run.disable_dropout()
        policy, value = run.policy.model, run.model("value")
        assert value is not None
        disable_dropout(value.train())
        num_updates = self.num_ppo_epochs * self.num_minibatches
        optimization = Optimization(run, torch.nn.ModuleDict({"policy": policy, "value": value}), num_updates)
        kl = terms.KLCoefficient(value=self.kl_coef, target=self.kl_target, horizon=self.kl_horizon or 10_000)
        actor_critic = terms.ActorCritic(run, value, optimization)
        state = {"policy": policy, "value": value, "optimization": optimization, "kl": kl}
        state["rollouts"] = actor_critic.rollouts
        loop = OwnLoop(run, state)
        for step in loop.steps():
            batch = actor_critic.sample(step, self.sampling.temperature)
            advantages_BC, returns_BC = self._targets(batch, kl.value)
            sums, grad_norms = torch.zeros(len(LOSSES), dtype=torch.double, device=run.device), 0.0
            for rows in self._minibatches(step):
                for share in actor_critic.shares(rows):
                    with optimization.autocast():
                        tokens = terms.Tokens.of([batch.rows[row] for row in share], batch.mask_BC.shape[1], run.device)
                        logps_BC = terms.token_logps(policy, tokens, self.sampling.temperature)
                        values_BC = tokens.gather(token_values(value, tokens.input_ids_BT), first=0)
                    losses = (
                        *terms.policy_loss(logps_BC, batch.logps_BC[share], advantages_BC[share], self.clip_range),
                        *terms.value_loss(values_BC, batch.values_BC[share], returns_BC[share], self.value_clip_range),
                    )
                    num_tokens = batch.mask_BC[rows].sum()
                    means = torch.stack([(each_BC * tokens.mask_BC).sum() / num_tokens for each_BC in losses])
                    (run.ctx.world_size * (means[0] + self.value_coef * means[2])).backward()
                    sums += means.detach()
                grad_norms += optimization.step()
            if run.ctx.world_size > 1:
                torch.distributed.all_reduce(sums)
            found = dict(zip(LOSSES, (sums / num_updates).tolist(), strict=True))
            loop.report(
                loss=found["loss/policy"] + self.value_coef * found["loss/value"], kl_coef=kl.value, **found,
                num_tokens=sum(len(ids) for row in batch.rows for ids in row), grad_norm=grad_norms / num_updates,
                explained_variance=terms.explained_variance(batch.values_BC, returns_BC, batch.mask_BC),
                **terms.extremes(advantages_BC, batch.mask_BC),
                **batch.metrics,
            )  # fmt: skip
            kl.update(batch.metrics["kl"], self.global_batch_size)
        return loop.metrics()

    def _targets(self, batch: "Batch", kl_coef: float) -> "tuple[Tensor, Tensor]":
        """Advantages and returns of all workers' completions."""
        from tasks.train.losses.actor_critic import advantages, center_by_prompt, token_rewards, whiten

        mask_BC = batch.mask_BC
        rewards_BC = token_rewards(batch.scores_B, batch.logps_BC - batch.reference_BC, mask_BC, kl_coef)
        if self.whiten_rewards:
            rewards_BC = whiten(rewards_BC, mask_BC, shift=self.whiten_rewards == "shift")
        advantages_BC = advantages(rewards_BC, batch.values_BC, mask_BC, self.gamma, self.gae_lambda)
        returns_BC = advantages_BC + batch.values_BC
        if self.center_advantages:
            advantages_BC = center_by_prompt(advantages_BC, mask_BC, self.num_generations)
        if self.whiten_advantages:
            advantages_BC = whiten(advantages_BC, mask_BC, shift=True)
        return advantages_BC, returns_BC

    def _minibatches(self, step: int) -> Iterator[list[int]]:
        """Rows of each update of a step, in an order that the seed and the step fix."""
        import torch

        for epoch in range(self.num_ppo_epochs):
            generator = torch.Generator().manual_seed(random.Random(f"{self.seed} {step} {epoch}").getrandbits(63))
            order = torch.randperm(self.global_batch_size, generator=generator)
            yield from (rows.tolist() for rows in order.split(self.global_batch_size // self.num_minibatches))
