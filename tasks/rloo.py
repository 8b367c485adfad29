"""REINFORCE leave-one-out: Ahmadian et al. 2024, arXiv:2402.14740."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge, Gt

from tasks.data.images import Images
from tasks.train.best import CLIPPED, REWARDED
from tasks.train.generation.generating import Generating

if TYPE_CHECKING:
    from transformers import Trainer

    from tasks.train.run import TrainingRun


@dataclass(frozen=True, kw_only=True)
class RLOO(Generating):
    """Makes a completion likelier by its reward less the mean of the other completions of its prompt (eq. 7).

    Args:
        beta: weight of the KL to the policy that the stage starts from, in the reward of a whole completion (eq. 2); 0:
            no reference.
        normalize_advantages: to mean 0 and variance 1 over all completions of a step, as REINFORCE++ does with a
            baseline per prompt: Hu et al. 2025, arXiv:2501.03262.
        reward_clip: rewards are clipped to so much above and below 0.
        mask_truncated: completions without an end get no loss.
        images: prompts may have images, as of ``sft``.
    """

    version: ClassVar[int] = 2  # 1 took the rounding of equal rewards for a signal, and steps without one
    measures: ClassVar = (*REWARDED, *CLIPPED)

    num_generations: Annotated[int, Ge(2)] = 4
    beta: Annotated[float, Ge(0)] = 0.05
    normalize_advantages: bool = False
    reward_clip: Annotated[float, Gt(0)] | None = None
    mask_truncated: bool = False
    images: Images | None = None

    @property
    def has_reference(self) -> bool:
        return self.beta > 0

    def trainer(self, run: "TrainingRun") -> "Trainer":
        from trl import RLOOConfig, RLOOTrainer

        from tasks.train.generation.generating_trainer import generating_trainer

        clip = None if self.reward_clip is None else (-self.reward_clip, self.reward_clip)
        return generating_trainer(
            run, RLOOTrainer, RLOOConfig, kl_beta=self.beta,
            scale="normalize" if self.normalize_advantages else "none",
            reward_clip_range=clip, mask_truncated_completions=self.mask_truncated,
        )  # fmt: skip
