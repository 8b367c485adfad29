"""TRL's trainer of on-policy distillation, on prompts that are tokens already, with noise that depends on no worker.

TRL leaves autocast out of the loss, so that bf16 would train in fp32, and numbers the positions of a prompt's padding.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from trl import DistillationConfig, DistillationTrainer

from lineage.errors import ConfigError
from tasks.train.models import LEARNED_POSITIONS
from tasks.train.rollouts import sample
from tasks.train.sharding import autocast

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, Trainer

    from tasks.train.generating import Completing
    from tasks.train.run import TrainingRun


class OnPolicyTrainer(DistillationTrainer):
    """TRL's ``DistillationTrainer``.

    Args:
        method: whose sampling it uses.
    """

    def __init__(self, *args: object, method: "Completing", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.method = method

    def _generate_single_turn(self, prompt_ids: Sequence[Sequence[int]], *args: object) -> list[list[int]]:
        first = self.args.process_index * len(prompt_ids)
        seeds = [
            random.Random(f"{self.method.seed} {self.state.global_step} {first + index}").getrandbits(63)
            for index in range(len(prompt_ids))
        ]
        with self.accelerator.autocast(), autocast(self.args):
            return sample(
                _plain(self.model), [[*ids] for ids in prompt_ids], self.method.sampling, seeds,
                max_new_tokens=self.method.max_completion_length, pad_token_id=self._tokenizer.pad_token_id,
                stop_tokens=self.eos_token_ids,
            )  # fmt: skip

    def _compute_loss(self, *args: object) -> object:
        with self.accelerator.autocast():
            return super()._compute_loss(*args)

    def log(self, logs: dict[str, float], *args: object) -> None:
        """Leaves out a time, which no resume could repeat."""
        self._metrics["train"].pop("step_time", None)
        super().log(logs, *args)


def on_policy_trainer(run: "TrainingRun", method: "Completing", **own: object) -> "Trainer":
    """Builds the trainer, with the model in the slot ``teacher``.

    Raises:
        ConfigError: the teacher has logits for fewer tokens than the student, or for others.
    """
    teacher, sampling = run.model("teacher"), method.sampling
    assert teacher is not None
    ours, theirs = (each.config.get_text_config().vocab_size for each in (run.policy.model, teacher))
    if theirs < ours:
        raise ConfigError(
            f"the teacher, {run.inputs['teacher'].name}, has logits for {theirs} tokens and the policy for {ours}: as "
            "many or more are accepted; take another teacher, or distil on rows (conf/stage/distill.yaml), which "
            "leaves out the tokens that one model lacks"
        )
    if theirs > ours:  # tokens that the tokenizer does not have
        teacher.resize_token_embeddings(ours)
    for model in (run.policy.model, teacher):
        _number_real_tokens(model)
    return run.trl(
        OnPolicyTrainer, DistillationConfig, method=method, teacher_model=teacher, shuffle_dataset=False,
        max_completion_length=method.max_completion_length, temperature=sampling.temperature, **own,
    )  # fmt: skip


def _number_real_tokens(model: "PreTrainedModel") -> None:
    """Numbers positions from the first token behind the padding, in a model with a table of them."""
    if model.config.get_text_config().model_type not in LEARNED_POSITIONS:
        return

    def numbered(
        backbone: torch.nn.Module, args: tuple[object, ...], kwargs: "dict[str, Tensor | None]"
    ) -> "tuple[tuple[object, ...], dict[str, Tensor | None]]":
        mask = kwargs.get("attention_mask")
        if mask is None or mask.dim() != 2 or kwargs.get("position_ids") is not None:
            return args, kwargs
        return args, {**kwargs, "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}

    model.base_model.register_forward_pre_hook(numbered, with_kwargs=True)


def _plain(model: "PreTrainedModel | PeftModel") -> "PreTrainedModel":
    return model.get_base_model() if isinstance(model, PeftModel) else model
