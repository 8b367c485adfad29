"""The trainer of a ``PairLoss``: transformers' loop, TRL's collator and fused head, and a loss that is a function.

Shapes: B pairs, R = 2B rows (the chosen answers, then the rejected ones), T tokens of the longest row.
"""

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from transformers import Trainer, TrainingArguments
from trl.models.utils import disable_gradient_checkpointing, prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head, use_adapter

from tasks.train.adapted import REFERENCE
from tasks.train.reference_logps import COLUMNS
from tasks.train.sharding import autocast

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    Batch = dict[str, Tensor]
    # Of rows (R): log-probabilities, numbers of tokens, the reference's log-probabilities -> loss, metrics
    RowsLoss = Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, dict[str, Tensor]]]


@dataclass
class PairConfig(TrainingArguments):
    """transformers' arguments, and ``disable_dropout`` as in TRL's preference trainers."""

    disable_dropout: bool = True


class PairTrainer(Trainer):
    """Trains by a function of the log-probabilities of chosen and rejected answers.

    Args:
        pair_loss: takes the answers' log-probabilities, their numbers of tokens, and the reference's log-probabilities.
        ref_model: the frozen policy; None: there is no reference, or it is the policy without its adapter, or with the
            frozen copy of it.
        proof: checks that policy and reference agree; called with the log-ratios (R) of the batches before the first
            step. None: there is no reference.
    """

    loss_is_scaled_for_ga = False  # a mean over the pairs of a micro batch: divided by the accumulation steps

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        args: PairConfig,
        *,
        pair_loss: "RowsLoss",
        ref_model: "PreTrainedModel | None" = None,
        proof: "Callable[[Tensor], None] | None" = None,
        **kwargs: object,
    ) -> None:
        super().__init__(model=model, args=args, **kwargs)
        self.pair_loss, self.ref_model, self.proof = pair_loss, ref_model, proof
        self._metrics: dict[str, defaultdict[str, list[float]]] = {
            "train": defaultdict(list),
            "eval": defaultdict(list),
        }
        text = model.config.get_text_config()
        has_routers = hasattr(text, "output_router_logits")
        self.router_aux_loss_coef = getattr(text, "router_aux_loss_coef", 0.0) if has_routers else 0.0
        add_fused_lm_head(model.get_base_model() if isinstance(model, PeftModel) else model)
        if ref_model is not None:
            add_fused_lm_head(ref_model)
            if self.is_deepspeed_enabled:
                self.ref_model = prepare_deepspeed(ref_model, self.accelerator)
            else:
                self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

    def compute_loss(
        self, model: "PreTrainedModel", inputs: "Batch", return_outputs: bool = False, num_items_in_batch: object = None
    ) -> "Tensor":
        answers_RT = inputs["completion_mask"]
        labels_RT = inputs["input_ids"].masked_fill(answers_RT == 0, -100)
        batch = {name: each for name, each in inputs.items() if name not in ("completion_mask", *COLUMNS)}
        more = {"output_router_logits": True} if self.router_aux_loss_coef else {}
        outputs = model(**batch, **more, labels=labels_RT, fused_lm_head=True, use_cache=False)
        sums_R, reference_R = outputs.log_probs.sum(1), self._reference_sums(inputs, batch, labels_RT)
        if reference_R is not None and self.proof and self.state.global_step == 0:
            self.proof(sums_R.detach() - reference_R)
        counts_R = answers_RT[:, 1:].sum(1).clamp(min=1)
        loss, metrics = self.pair_loss(sums_R, counts_R, reference_R)
        if self.router_aux_loss_coef:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
            metrics = {**metrics, "aux_loss": outputs.aux_loss}
        chosen_B, rejected_B = sums_R.chunk(2)
        self._record({**metrics, "logps/chosen": chosen_B, "logps/rejected": rejected_B})
        return loss

    def _reference_sums(self, inputs: "Batch", batch: "Batch", labels_RT: "Tensor") -> "Tensor | None":
        if self.proof is None:
            return None
        if COLUMNS[0] in inputs:  # precomputed
            return torch.cat([inputs[name] for name in COLUMNS])
        model = self.model if self.ref_model is None else self.ref_model
        plain: AbstractContextManager[object] = torch.no_grad()
        with plain, disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self.ref_model is not None:
                outputs = model(**batch, labels=labels_RT, fused_lm_head=True, use_cache=False)
            else:
                # The policy without its adapter is not called through DeepSpeed.
                policy = self.accelerator.unwrap_model(self.model)
                copied = REFERENCE if REFERENCE in policy.peft_config else None
                with use_adapter(policy, adapter_name=copied), autocast(self.args):
                    outputs = model(**batch, labels=labels_RT, fused_lm_head=True, use_cache=False)
        return outputs.log_probs.sum(1)

    def _record(self, metrics: "dict[str, Tensor]") -> None:
        mode = self._metrics["train" if self.model.training else "eval"]
        for name, each in metrics.items():
            mode[name].append(self.accelerator.gather(each.detach().float().reshape(-1)).mean().item())

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means of the metrics over the micro batches of the step."""
        recorded = self._metrics["train" if self.model.training else "eval"]
        super().log({**logs, **{name: sum(each) / len(each) for name, each in recorded.items()}}, start_time)
        recorded.clear()
