"""AdaLoRA's pruning of ranks, which no trainer calls: Zhang et al. 2023, arXiv:2303.10512."""

from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import load_file, save_file
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from tasks.context import TrainContext

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

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
