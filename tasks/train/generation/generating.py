"""The parts shared by methods that learn from their own completions: GRPO, RLOO, online DPO and PPO.

``tasks.train.generation.rollouts`` generates, scores and keeps samples, both in a trainer of TRL
(``tasks.train.generation.generating_trainer``) and in a method's own loop.
"""

import json
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le

from lineage.errors import ConfigError
from lineage.fingerprint import Setting
from tasks.data.kinds import PROMPTS
from tasks.data.tokens.tokenization import ControlText, Tokenization
from tasks.method import FROZEN_POLICY, POLICY, REWARD_MODEL, Training
from tasks.reward_functions import Rewards, check_rewards

REWARD_MODEL_NAME = "reward_model"  # its slot, and its name among the rewards
MISSING_EOS = "missing_eos"  # the penalty's name among the rewards


@dataclass(frozen=True, kw_only=True)
class Sampling(Setting):
    """How completions are sampled. A loss on them uses the same temperature, except online DPO, whose loss has 1; the
    other fields affect only the samples.

    Args:
        temperature: of the softmax.
        top_p: samples from the most probable tokens, up to this sum of their probabilities; 1: from all.
        top_k: samples from this number of the most probable tokens; None: from all.
        min_p: samples from tokens with at least this share of the most probable token's probability.
        repetition_penalty: divides the logits of tokens that are in the prompt or completion; 1: none.
    """

    temperature: Annotated[float, Gt(0)] = 1.0
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    top_k: Annotated[int, Gt(0)] | None = None
    min_p: Annotated[float, Gt(0), Le(1)] | None = None
    repetition_penalty: Annotated[float, Gt(0)] = 1.0

    @property
    def cuts(self) -> list[str]:
        """The fields that make it sample from another distribution than the softmax at its temperature."""
        plain = {each.name: each.default for each in fields(self) if each.name != "temperature"}
        return [name for name, value in plain.items() if getattr(self, name) != value]


@dataclass(frozen=True, kw_only=True)
class Completing(Training):
    """A training on completions of prompts that its policy samples.

    The noise of a completion follows from the seed, the step and its place in the batch alone, so that micro batch,
    workers and resumes draw the same; they change only the last bits of logits.

    Args:
        max_length: tokens of prompt and completion; the prompt may have those that ``max_completion_length`` leaves.
        max_prompt_length: a lower limit for prompts; a longer prompt keeps its last tokens.
        too_long: what is done with a prompt of more tokens: cut its beginning (None), drop it, or fail.
    """

    reads: ClassVar = PROMPTS

    global_batch_size: Annotated[int, Gt(0)] = 64  # completions per step
    max_length: Annotated[int, Gt(0)] = 1024
    max_completion_length: Annotated[int, Gt(0)] = 256  # tokens
    max_prompt_length: Annotated[int, Gt(0)] | None = None  # tokens
    too_long: Literal["cut_prompt", "drop", "refuse"] | None = None
    sampling: Sampling = field(default_factory=Sampling)
    control_tokens: ControlText | None = None  # prompts that spell one: encode it as text (None), keep, drop, refuse

    def tokenization(self) -> Tokenization | None:
        """The tokenization of prompts, cut so that a completion of ``max_completion_length`` tokens fits."""
        room = self.max_length - self.max_completion_length
        limit = room if self.max_prompt_length is None else self.max_prompt_length
        if not 0 < limit <= room:
            raise ConfigError(
                f"max_length={self.max_length} with max_completion_length={self.max_completion_length} leaves {room} "
                f"tokens for a prompt, and max_prompt_length={self.max_prompt_length}; set max_length="
                f"{max(limit, 1) + self.max_completion_length} or more"
            )
        return Tokenization(
            kind=PROMPTS.kind, max_length=limit, too_long=self.too_long, control_tokens=self.control_tokens,
            images=getattr(self, "images", None),
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Generating(Completing):
    """A training on completions that its policy samples, with rewards from functions, a reward model, or both.

    A step reads ``global_batch_size / num_generations`` prompts, in the one order of all trainings, and samples
    ``num_generations`` completions of each.

    Args:
        global_batch_size: completions per step, over all workers; a multiple of ``num_generations``.
        rewards: name -> reward function; their weighted sum is the reward.
        reward_model_weight: of the reward model's score in the sum, where the slot ``reward_model`` is filled.
        missing_eos_penalty: subtracted from the reward of a completion without an end.
        equal_rewards_patience: steps in a row in which no group has two different rewards, or ``mask_truncated`` leaves
            out all completions, after which it fails.
        vllm: generates by vLLM: on a ``server``, or in the training's process.
    """

    models: ClassVar = {"policy": POLICY, "reference": FROZEN_POLICY, REWARD_MODEL_NAME: REWARD_MODEL}
    optional: ClassVar[frozenset[str]] = frozenset({REWARD_MODEL_NAME})
    whole_groups: ClassVar[bool] = False  # all completions of a prompt must be in one micro batch
    default_learning_rate: ClassVar = 1e-6
    progress: ClassVar = "reward"

    num_generations: Annotated[int, Ge(1)] = 8  # completions per prompt
    rewards: Rewards | None = None
    reward_model_weight: Annotated[float, Gt(0)] | None = None  # None: 1
    missing_eos_penalty: Annotated[float, Gt(0)] | None = None
    equal_rewards_patience: Annotated[int, Gt(0)] | None = 20
    vllm: Literal["server", "colocate"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.global_batch_size % self.num_generations:
            raise ConfigError(
                f"global_batch_size={self.global_batch_size} completions are not groups of num_generations="
                f"{self.num_generations}; a multiple of it is accepted; set global_batch_size="
                f"{max(1, self.global_batch_size // self.num_generations) * self.num_generations}"
            )
        if self.sampling.top_k == 1 and self.num_generations > 1:
            raise ConfigError(
                f"sampling.top_k=1 with num_generations={self.num_generations}: all completions of a prompt would be "
                "equal, and nothing is learned; set sampling.top_k=2 or more, or null"
            )
        if self.vllm and self.has_own_loop:
            raise ConfigError(f"vllm={self.vllm}: {type(self).__name__} has a loop of its own; set vllm=null")
        cut = self.sampling.cuts
        if self.vllm and cut:
            raise ConfigError(
                f"vllm={self.vllm} with sampling.{cut[0]}={getattr(self.sampling, cut[0]):g}: vLLM gives the "
                "log-probabilities of the tokens that this leaves, and the policy those of all, so that their ratio "
                f"weighs each token wrong (github.com/huggingface/trl/issues/6789); set sampling.{cut[0]}="
                f"{json.dumps(getattr(Sampling(), cut[0]))}, or vllm=null"
            )
        check_rewards(self.rewards or {})
        for name in (REWARD_MODEL_NAME, MISSING_EOS):
            if name in (self.rewards or {}):
                raise ConfigError(f"rewards.{name}: this name is taken; rename the reward function")

    def check_slots(self, filled: frozenset[str]) -> None:
        """Refuses a stage without any reward, and options of a slot that is empty.

        Args:
            filled: the slots that have an input.
        """
        if REWARD_MODEL_NAME not in filled and not self.rewards:
            raise ConfigError(
                "rewards and the slot reward_model are empty, so nothing scores the completions; set "
                "rewards.NAME.function=..., or inputs.reward_model=<stage>"
            )
        if REWARD_MODEL_NAME not in filled and not any(each.weight for each in (self.rewards or {}).values()):
            raise ConfigError(
                f"rewards {', '.join(self.rewards or {})} have weight=0 and the slot reward_model is empty, so all "
                "completions are worth the same; set the weight of one, such as 1"
            )
        if REWARD_MODEL_NAME not in filled and self.reward_model_weight is not None:
            raise ConfigError(
                f"reward_model_weight={self.reward_model_weight:g}: the slot reward_model is empty; fill it, or set "
                "reward_model_weight=null"
            )

    @property
    def keeps_state(self) -> bool:
        """As of every training: its completions are used in several steps."""
        return True

    @property
    def steps_per_generation(self) -> int:
        """Optimizer steps on the completions of one generation."""
        return 1

    @property
    def rows_per_step(self) -> Fraction:
        """Prompts that an optimizer step reads."""
        return Fraction(self.global_batch_size, self.num_generations * self.steps_per_generation)

    def rows_of(self, num_steps: int) -> int:
        """Prompts of all generations; the last generation may have fewer steps."""
        return -(-num_steps // self.steps_per_generation) * self.global_batch_size // self.num_generations
