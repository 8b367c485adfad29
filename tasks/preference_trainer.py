"""TRL's DPO trainer on rows that are tokenized already, and the proof that it starts where it must."""

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from datasets import Dataset
from transformers import TrainerCallback
from trl import DPOTrainer

from lineage.errors import PipelineError
from tasks.zero import autocast

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from tasks.method import Input

# Largest implicit reward (beta x log-ratio) at step 0. Policy and reference run the same kernels, in fp32
# they differ by the order of additions; bf16 has 8 bits of it.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}


class TokenizedDPOTrainer(DPOTrainer):
    """``DPOTrainer`` that takes ``prompt_ids``, ``chosen_ids`` and ``rejected_ids``: TRL would tokenize, and drop."""

    def _prepare_dataset(self, dataset: Dataset, *args: object) -> Dataset:
        return dataset

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[None]:
        """The policy without its adapter, which is the reference of a LoRA, is not called through DeepSpeed."""
        return autocast(self.args)


class StepZeroProof(TrainerCallback):
    """Fails a preference stage whose policy and reference did not agree before the first optimizer step."""

    def __init__(self, policy: "Input", precision: str, loss_type: str) -> None:
        self.policy = policy
        self.tolerance = TOLERANCE[precision]
        self.loss_type = loss_type

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        if state.global_step != 1 or "loss" not in logs:
            return
        rewards = [logs["rewards/chosen"], logs["rewards/rejected"], logs["rewards/margins"]]
        wrong_loss = self.loss_type == "sigmoid" and abs(logs["loss"] - math.log(2)) > self.tolerance
        # Written so that nan fails: it is neither above nor below the tolerance.
        if not all(abs(reward) <= self.tolerance for reward in rewards) or wrong_loss:
            name = f"{self.policy.name} ({self.policy.fingerprint[:16]})"
            raise PipelineError(
                f"policy and reference differ at step 0: both must be {name}, and rewards/chosen={rewards[0]:.4g} "
                f"rewards/rejected={rewards[1]:.4g} loss={logs['loss']:.6f} (0, 0 and ln 2 = {math.log(2):.6f} for "
                "loss_type=sigmoid); the reference is not the policy that the stage was given"
            )
