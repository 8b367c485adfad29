"""The losses of GRPO: the paper and bounds of each, which options it reads, and their names in TRL."""

from dataclasses import dataclass
from typing import Literal

from lineage.errors import ConfigError
from tasks.train.generation.generating import Generating

Loss = Literal["grpo", "dapo", "dr_grpo", "bnpo", "gspo", "cispo", "sapo", "luspo", "vespo"]
Scale = Literal["group", "batch", "none"]
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
    scale_rewards: Scale = "group"
    like: Loss | None = None


VARIANTS: dict[Loss, Variant] = {
    "grpo": Variant(loss_type="grpo"),  # arXiv:2402.03300, eq. 3
    # A mean over all tokens: arXiv:2503.14476.
    "dapo": Variant(loss_type="dapo", epsilon_high=0.28),
    # A sum over tokens, divided by a constant length: arXiv:2503.20783.
    "dr_grpo": Variant(loss_type="dr_grpo", scale_rewards="none"),
    # As dapo, with equal bounds. TRL's divides by the tokens of a micro batch, which is no part of a recipe.
    "bnpo": Variant(loss_type="dapo", like="dapo"),
    # A ratio per completion: arXiv:2507.18071.
    "gspo": Variant(loss_type="grpo", sequence=True, epsilon=3e-4, epsilon_high=4e-4, like="grpo"),
    # A capped ratio without a gradient: arXiv:2506.13585.
    "cispo": Variant(loss_type="cispo", epsilon=None, epsilon_high=5.0, like="dapo"),
    # arXiv:2511.20347, arXiv:2602.05261 and arXiv:2602.10693.
    "sapo": Variant(loss_type="sapo", epsilon=None, epsilon_high=None, like="grpo"),
    "luspo": Variant(loss_type="luspo", sequence=True, epsilon=2e-3, epsilon_high=2.5e-3),
    "vespo": Variant(loss_type="vespo", epsilon=None, epsilon_high=None, like="dapo"),
}


class VariantOptions(Generating):
    """How the fields of ``tasks/grpo.py`` are used: which can be combined, and their names in TRL."""

    loss: Loss
    beta: float
    num_iterations: int
    epsilon: float | None
    epsilon_high: float | None
    scale_rewards: Scale | None
    mask_truncated: bool
    kl_ratio: bool

    def check_variant(self) -> None:
        """Refuses options that the loss does not read, or that do nothing where every ratio is 1."""
        variant, loss = VARIANTS[self.loss], self.loss
        bounds = {name: getattr(self, name) for name in _CLIP if getattr(self, name) is not None}
        for name, value in bounds.items():
            if getattr(variant, name) is None:
                raise ConfigError(f"{name}={value:g}: loss={loss} has no such bound; set {name}=null")
        if loss == "cispo" and self.epsilon_high is not None and self.epsilon_high < 1:
            raise ConfigError(
                f"epsilon_high={self.epsilon_high:g}: of loss=cispo it is the largest ratio, not a distance from 1, so "
                f"every token would weigh {self.epsilon_high:g}; set 1 or more, such as 5, or epsilon_high=null"
            )
        if self.kl_ratio and (self.beta == 0 or self.num_iterations == 1):
            raise ConfigError(
                f"kl_ratio=true with beta={self.beta:g} and num_iterations={self.num_iterations}: it weights the KL by "
                "ratios other than 1; set beta above 0 and num_iterations=2 or more, or kl_ratio=false"
            )
        if self.num_iterations > 1:
            return
        once = (
            "with num_iterations=1: completions are trained once, by the policy that sampled them, so every ratio is 1"
        )
        for name, value in bounds.items():
            raise ConfigError(
                f"{name}={value:g} {once} and none is bounded; set num_iterations=2 or more, or {name}=null"
            )
        if variant.like:
            raise ConfigError(
                f"loss={loss} {once} and the gradient is that of {variant.like}; set num_iterations=2 or more, or "
                f"loss={variant.like}"
            )

    @property
    def scale(self) -> Scale:
        """What advantages are divided by."""
        return self.scale_rewards or VARIANTS[self.loss].scale_rewards

    def trl_options(self) -> dict[str, object]:
        """Arguments of TRL's ``GRPOConfig`` that the loss and its options become."""
        variant = VARIANTS[self.loss]
        return {
            "loss_type": variant.loss_type,
            "importance_sampling_level": "sequence" if variant.sequence else "token",
            "epsilon": self.epsilon or variant.epsilon or 0.2,
            "epsilon_high": self.epsilon_high or variant.epsilon_high,
            "mask_truncated_completions": self.mask_truncated,
            "use_bias_correction_kl": self.kl_ratio,
        }
