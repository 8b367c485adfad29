"""Group relative policy optimization and its variants: Shao et al. 2024, arXiv:2402.03300."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from tasks.data.images import Images
from tasks.train.best import CLIPPED, REWARDED
from tasks.train.losses.grpo_variants import Loss, Scale, VariantOptions

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class GRPO(VariantOptions):
    """Makes completions likelier that got a higher reward than others of the same prompt.

    Args:
        images: prompts may have images, as of ``sft``.
    """

    version: ClassVar[int] = 2  # 1 took the rounding of equal rewards for a signal, and steps without one
    measures: ClassVar = (*REWARDED, *CLIPPED)

    num_generations: Annotated[int, Ge(2)] = 8  # completions per prompt: a group
    loss: Loss = "grpo"  # eq. 3 of the paper; tasks/train/losses/grpo_variants.py has all papers
    beta: Annotated[float, Ge(0)] = 0.0  # of the KL to the policy that it starts from, eq. 4; 0: no reference
    num_iterations: Annotated[int, Gt(0)] = 1  # steps on the completions of a generation; in the first, ratios are 1
    epsilon: Annotated[float, Gt(0)] | None = None  # bound of the ratio below 1; None: that of the loss's paper
    epsilon_high: Annotated[float, Gt(0)] | None = None  # bound of the ratio above 1; None: that of the loss's paper
    scale_rewards: Scale | None = None  # the standard deviation that divides advantages; None: as the loss's paper
    mask_truncated: bool = False  # completions without an end get no loss
    images: Images | None = None
    kl_ratio: bool = False  # multiply the KL by the ratio: an unbiased gradient off policy; false: as in the paper

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_variant()

    @property
    def steps_per_generation(self) -> int:
        return self.num_iterations

    @property
    def has_reference(self) -> bool:
        return self.beta > 0

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import GRPOConfig, GRPOTrainer

        from tasks.train.generation.generating_trainer import generating_trainer

        return generating_trainer(
            run, GRPOTrainer, GRPOConfig, scale=self.scale, kl_beta=self.beta, **self.trl_options()
        )
