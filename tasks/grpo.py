"""Group relative policy optimization and its variants: Shao et al. 2024, arXiv:2402.03300."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge, Gt

from lineage.errors import ConfigError
from tasks.train.generating import Generating

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun

Loss = Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo", "luspo", "vespo"]
_CLIP = ("epsilon", "epsilon_high")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A loss, with the companions that its paper has.

    Args:
        loss_type, sequence: of TRL; ``sequence``: one ratio per completion, not per token.
        epsilon, epsilon_high: how far a ratio may fall below 1 and rise above it; of cispo, the largest ratio. None: it
            has no such bound.
        scale_rewards: what a reward's distance from the mean of its group is divided by.
        like: the loss with the same gradient where every ratio is 1; None: there is none.
    """

    loss_type: str
    sequence: bool = False
    epsilon: float | None = 0.2
    epsilon_high: float | None = 0.2
    scale_rewards: Literal["group", "batch", "none"] = "group"
    like: Loss | None = None


# TRL's bnpo divides by the tokens of a micro batch, which is no part of a recipe: ours by those of the step, as dapo.
VARIANTS: dict[Loss, Variant] = {
    "grpo": Variant(loss_type="grpo"),
    "dapo": Variant(loss_type="dapo", epsilon_high=0.28),
    "dr_grpo": Variant(loss_type="dr_grpo", scale_rewards="none"),
    "bnpo": Variant(loss_type="dapo"),
    "gspo": Variant(loss_type="grpo", sequence=True, epsilon=3e-4, epsilon_high=4e-4, like="grpo"),
    "cispo": Variant(loss_type="cispo", epsilon=None, epsilon_high=5.0, like="dapo"),
    "sapo": Variant(loss_type="sapo", epsilon=None, epsilon_high=None, like="grpo"),
    "luspo": Variant(loss_type="luspo", sequence=True, epsilon=2e-3, epsilon_high=2.5e-3),
    "vespo": Variant(loss_type="vespo", epsilon=None, epsilon_high=None, like="dapo"),
}


@dataclass(frozen=True, kw_only=True)
class GRPO(Generating):
    """Makes completions likelier that got a higher reward than others of the same prompt.

    Args:
        loss: ``grpo`` is eq. 3 of the paper; ``dapo`` arXiv:2503.14476, a mean over all tokens; ``dr_grpo``
            arXiv:2503.20783, over a constant length; ``bnpo`` as dapo, with equal bounds; ``gspo`` arXiv:2507.18071, a
            ratio per completion; ``cispo`` arXiv:2506.13585, a capped ratio without a gradient; ``sapo``
            arXiv:2511.20347; ``luspo`` arXiv:2602.05261; ``vespo`` arXiv:2602.10693.
        beta: weight of the KL to the policy that the stage starts from, estimated per token (eq. 4); 0: no reference.
        num_iterations: optimizer steps on the completions of one generation; in the first, every ratio is 1.
        epsilon, epsilon_high: bounds of the ratio below and above 1; None: those of the loss's paper.
        scale_rewards: the standard deviation that advantages are divided by; None: as the loss's paper.
        mask_truncated: completions without an end get no loss.
        kl_ratio: multiplies the KL by the ratio, which makes its gradient unbiased off policy; false: as in the paper.
    """

    num_generations: Annotated[int, Ge(2)] = 8  # completions per prompt: a group
    loss: Loss = "grpo"
    beta: Annotated[float, Ge(0)] = 0.0
    num_iterations: Annotated[int, Gt(0)] = 1
    epsilon: Annotated[float, Gt(0)] | None = None
    epsilon_high: Annotated[float, Gt(0)] | None = None
    scale_rewards: Literal["group", "batch", "none"] | None = None
    mask_truncated: bool = False
    kl_ratio: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        variant, set_bounds = VARIANTS[self.loss], [name for name in _CLIP if getattr(self, name) is not None]
        for name in set_bounds:
            if getattr(variant, name) is None:
                raise ConfigError(
                    f"{name}={getattr(self, name):g}: loss={self.loss} has no such bound; set {name}=null"
                )
        if self.num_iterations == 1 and set_bounds:
            raise ConfigError(
                f"{set_bounds[0]}={getattr(self, set_bounds[0]):g} with num_iterations=1: completions are trained "
                "once, by the policy that sampled them, so every ratio is 1 and none is bounded; set num_iterations=2 "
                f"or more, or {set_bounds[0]}=null"
            )
        if self.num_iterations == 1 and variant.like:
            raise ConfigError(
                f"loss={self.loss} with num_iterations=1: completions are trained once, by the policy that sampled "
                f"them, so every ratio is 1 and the gradient is that of {variant.like}; set num_iterations=2 or more, "
                f"or loss={variant.like}"
            )
        if self.kl_ratio and (self.beta == 0 or self.num_iterations == 1):
            raise ConfigError(
                f"kl_ratio=true with beta={self.beta:g} and num_iterations={self.num_iterations}: it weights the KL by "
                "ratios other than 1; set beta above 0 and num_iterations=2 or more, or kl_ratio=false"
            )

    @property
    def steps_per_generation(self) -> int:
        return self.num_iterations

    @property
    def has_reference(self) -> bool:
        return self.beta > 0

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import GRPOConfig, GRPOTrainer

        from tasks.train.generating_trainer import generating_trainer

        variant = VARIANTS[self.loss]
        return generating_trainer(
            run, GRPOTrainer, GRPOConfig, kl_beta=self.beta, loss_type=variant.loss_type,
            importance_sampling_level="sequence" if variant.sequence else "token",
            epsilon=self.epsilon or variant.epsilon or 0.2, epsilon_high=self.epsilon_high or variant.epsilon_high,
            scale_rewards=self.scale_rewards or variant.scale_rewards,
            mask_truncated_completions=self.mask_truncated, use_bias_correction_kl=self.kl_ratio,
        )  # fmt: skip
