"""TRL's trainer of on-policy distillation, on prompts that are tokens already, with noise that depends on no worker.

TRL leaves autocast out of the loss, so that bf16 would train in fp32, and numbers the positions of a prompt's padding.
"""

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trl import DistillationConfig, DistillationTrainer

from lineage.errors import ConfigError
from tasks.train.rollouts import number_real_tokens, sample
from tasks.train.sharding import autocast

if TYPE_CHECKING:
    from transformers import Trainer

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
                self.model, [[*ids] for ids in prompt_ids], self.method.sampling, seeds,
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
        number_real_tokens(model)
    return run.trl(
        OnPolicyTrainer, DistillationConfig, method=method, teacher_model=teacher, shuffle_dataset=False,
        max_completion_length=method.max_completion_length, temperature=sampling.temperature, **own,
    )  # fmt: skip
