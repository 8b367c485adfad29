"""What becomes of a training whose loss is no number."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import TrainerCallback

from lineage.checkpoints import Checkpoints
from lineage.errors import PipelineError
from tasks.steps.reports import has_diverged

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from tasks.checkpoints.best_model import BestModel

logger = logging.getLogger(__name__)


class Divergence(TrainerCallback):
    """Fails the training, or ends it where a best model is there to go back to.

    Args:
        checkpoint_dir: of the stage; None: it has none.
        go_back_to: None: it fails.

    Attributes:
        step: at which the training was ended; None: it was not.
    """

    def __init__(self, checkpoint_dir: Path | None, go_back_to: "BestModel | None") -> None:
        self.checkpoints = Checkpoints(checkpoint_dir) if checkpoint_dir else None
        self.go_back_to = go_back_to
        self.step: int | None = None

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        if "loss" not in logs or not has_diverged(logs):
            return
        found = f"training diverged: at step {state.global_step} loss={logs['loss']} grad_norm={logs['grad_norm']}"
        remedy = (
            f"lower learning_rate (now {args.learning_rate:g}) or max_grad_norm (now {args.max_grad_norm:g}), raise "
            "warmup_ratio, or train in precision=fp32"
        )
        if self.go_back_to is None or self.go_back_to.step is None:
            competed = "" if self.go_back_to is None else "; no model had competed yet to go back to"
            raise PipelineError(f"{found}; {self._saved()}{competed}; {remedy}")
        logger.error("%s; on_divergence=best: it ends with its model of step %d", found, self.go_back_to.step)
        logger.error("what would let it go on: %s", remedy)
        self.step = state.global_step
        control.should_training_stop = True
        control.should_save = False  # these weights are no numbers

    def _saved(self) -> str:
        last = self.checkpoints.newest() if self.checkpoints else None
        if last is None:
            return "nothing was saved"
        loss = f" (loss={last.metrics['loss']:.4g})" if "loss" in last.metrics else ""
        return f"its last good checkpoint is that of step {last.step}{loss}, from where this recipe diverges again"
