"""Callbacks that change a training while it runs: pruning of ranks (arXiv:2303.10512), adaptive learning rates."""

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate.utils import broadcast
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from tasks.context import TrainContext
from tasks.train.adaptive import Adaptive, Event, LossWatch
from tasks.train.callbacks import has_diverged

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import Trainer
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    from tasks.context import TrainContext
    from tasks.train.checkpointing import BestModel

    Logs = dict[str, float]

_FILE = "rank_budget.safetensors"
_KEPT = ("exp_avg_ipt", "exp_avg_unc")  # of PEFT's allocator: means over the steps


class RankBudget(TrainerCallback):
    """Scores the ranks after each step, and sets the weakest to zero.

    The adapter keeps its shape, so that checkpoints load: PEFT would save it without the pruned ranks, and not the
    scores. A pruned rank adds nothing to the output.
    """

    def __init__(self, model: "PeftModel", ctx: TrainContext) -> None:
        self.model, self.ctx = model, ctx
        self.allocator = model.base_model.rankallocator
        self.pattern: dict[str, list[bool]] | None = None

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        if self.ctx.resume_from is None:
            return
        saved = load_file(self.ctx.resume_from / _FILE)
        for kept in _KEPT:
            found = {name.removeprefix(f"{kept}:"): each for name, each in saved.items() if name.startswith(f"{kept}:")}
            device = self.model.device
            setattr(self.allocator, kept, {name: each.to(device) for name, each in found.items()})
        self.allocator.ipt = dict.fromkeys(self.allocator.exp_avg_ipt)
        pattern = {name: each.tolist() for name, each in saved.items() if ":" not in name}
        self.pattern = pattern or None

    def on_optimizer_step(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        """Gradients are still there."""
        config = self.model.peft_config["default"]
        config.rank_pattern = self.pattern
        self.model.base_model.update_and_allocate(state.global_step + 1)
        self.pattern, config.rank_pattern = config.rank_pattern, None

    def on_save(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        if self.ctx.rank != 0:
            return
        import torch

        draft = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        scores = {f"{kept}:{name}": each for kept in _KEPT for name, each in getattr(self.allocator, kept).items()}
        pattern = {name: torch.tensor(each) for name, each in (self.pattern or {}).items()}
        save_file({name: each.contiguous() for name, each in {**scores, **pattern}.items()}, draft / _FILE)


logger = logging.getLogger(__name__)


class AdaptiveRate(TrainerCallback, ExportableState):
    """Multiplies the schedule's learning rate by the factor of a ``LossWatch``; its state is in every checkpoint.

    It runs before the callbacks that measure and report, and after those that complete the log of a step.

    Args:
        best: what to go back to; None: ``divergence_z`` is not set.
    """

    def __init__(self, trainer: "Trainer", setting: Adaptive, ctx: "TrainContext", best: "BestModel | None") -> None:
        self.trainer, self.ctx, self.best = trainer, ctx, best
        self.watch = LossWatch(setting=setting)

    def state(self) -> dict[str, object]:
        """What transformers writes into a checkpoint."""
        return {"args": {}, "attributes": self.watch.state()}

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved and state.global_step:
            self.watch.load(saved["attributes"])

    def on_step_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        scheduled = self.trainer.lr_scheduler.get_last_lr()
        for group, rate in zip(self.trainer.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate * self.watch.factor

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if "loss" not in logs:
            return
        step, entry = state.global_step, state.log_history[-1]
        if "learning_rate" in logs:  # transformers logs that of the schedule
            logs["learning_rate"] = entry["learning_rate"] = logs["learning_rate"] * self.watch.factor
        is_finite = not has_diverged(logs)
        loss = self._agreed(logs["loss"] if is_finite else math.nan)
        z = self.watch.z(loss)
        can_return = self.best is not None and self.best.step is not None and step < state.max_steps
        event = self.watch.observe(step, loss, can_return=can_return)
        logs["adaptive/factor"] = self.watch.factor
        if event is None:
            return
        logs[f"adaptive/{event}"] = 1.0
        logger.warning(
            "[adaptive] step %d | %s | loss %.4f | z %.2f | learning rate x %.4g",
            step, event, logs["loss"], z, self.watch.factor,
        )  # fmt: skip
        if event is not Event.DIVERGENCE:
            return
        assert self.best is not None
        self.best.restore()
        self.trainer._tr_loss.zero_()  # transformers subtracts it from itself, which leaves nan as it is
        logger.warning("[adaptive] step %d | back to the model of step %d", step, self.best.step)
        if not is_finite:  # no later callback takes it for a step that trained
            self.ctx.report(step, {name: value for name, value in logs.items() if name.startswith("adaptive/")})
            for each in (logs, entry):
                del each["loss"]

    def _agreed(self, loss: float) -> float:
        """That of rank 0, so that all workers do the same."""
        if self.ctx.world_size == 1:
            return loss
        return float(broadcast(torch.tensor(loss, dtype=torch.float64, device=self.trainer.args.device)))

    @property
    def metrics(self) -> dict[str, float]:
        """For the manifest: how many interventions there were, and the factor after each."""
        each = {f"adaptive/{event}/step_{step}": factor for step, event, factor in self.watch.events}
        return {"adaptive/interventions": float(len(self.watch.events)), **each}
