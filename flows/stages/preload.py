"""What the fork server imports once, so that each stage's process starts with it in milliseconds."""

import peft  # noqa: F401
import ray.train.torch  # noqa: F401
import torch  # noqa: F401
import transformers.trainer  # noqa: F401
import trl.trainer.dpo_trainer
import trl.trainer.reward_trainer
import trl.trainer.sft_trainer  # noqa: F401

import flows.stages.ray_train  # noqa: F401
