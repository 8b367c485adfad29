"""The trainer of losses on log-probabilities: transformers' loop, TRL's collators and fused head, and a function.

Shapes: R rows (of B pairs R = 2B: the chosen answers, then the rejected ones), T tokens of the longest row.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import Trainer, TrainingArguments
from trl.models.utils import disable_gradient_checkpointing, prepare_deepspeed
from trl.trainer.utils import add_fused_lm_head, use_adapter

from tasks.data.kinds import MISMATCHED
from tasks.train.kernels.machine import plain
from tasks.train.losses.reference_logps import COLUMNS
from tasks.train.models.adapted import REFERENCE
from tasks.train.sharding import autocast

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    Batch = dict[str, Tensor]
    RowsLoss = Callable[["Rows"], tuple[Tensor, dict[str, Tensor]]]  # loss, and metrics

_LABELS = frozenset({"completion_mask", "label", *COLUMNS})  # columns of a batch that no model reads


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The answers of a micro batch, which a loss is computed from.

    Args:
        sums_R: log-probability of each answer, given its prompt, in nats.
        counts_R: number of its tokens; at least 1 as a divisor.
        reference_R: ``sums_R`` under the frozen policy; None: there is none.
        desirable_R: of single answers, which of them are.
        divergence: of single answers: KL(policy, reference), a number >= 0 for all rows of the step; None: the loss
            does not read it.
    """

    sums_R: "Tensor"
    counts_R: "Tensor"
    reference_R: "Tensor | None" = None
    desirable_R: "Tensor | None" = None
    divergence: "Tensor | None" = None


@dataclass
class PairConfig(TrainingArguments):
    """transformers' arguments, and ``disable_dropout`` as in TRL's preference trainers."""

    disable_dropout: bool = True


class PairTrainer(Trainer):
    """Trains by a function of the log-probabilities of chosen and rejected answers, or of single answers.

    Args:
        pair_loss: of the rows of a micro batch, as a mean over them. A metric has one value per row or one in all;
            where it says nothing of a row, that value is nan.
        estimates_divergence: whether the loss reads ``Rows.divergence``: one estimate for all micro batches and workers
            of a step, from the mismatched answers of all of its rows.
        ref_model: the frozen policy; None: there is no reference, or it is the policy without its adapter, or with the
            frozen copy of it.
        proof: checks that policy and reference agree; called with the log-ratios (R) of the batches before the first
            step. None: there is no reference.
    """

    is_padding_free = True  # it takes a line of all rows: ``padding_free.reads_lines``
    loss_is_scaled_for_ga = False  # a mean over the pairs of a micro batch: divided by the accumulation steps

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        args: PairConfig,
        *,
        pair_loss: "RowsLoss",
        estimates_divergence: bool = False,
        ref_model: "PreTrainedModel | None" = None,
        proof: "Callable[[Tensor], None] | None" = None,
        **kwargs: object,
    ) -> None:
        super().__init__(model=model, args=args, **kwargs)
        self.pair_loss, self.ref_model, self.proof = pair_loss, ref_model, proof
        self.estimates_divergence = estimates_divergence
        self._step: list[Batch] = []  # the micro batches of the step, until the divergence is estimated
        self._divergence: Tensor | None = None
        # Sums over the rows of a step, and their number.
        self._metrics: dict[str, dict[str, Tensor]] = {"train": {}, "eval": {}}
        text = model.config.get_text_config()
        has_routers = hasattr(text, "output_router_logits")
        self.router_aux_loss_coef = getattr(text, "router_aux_loss_coef", 0.0) if has_routers else 0.0
        add_fused_lm_head(plain(model))
        if ref_model is not None:
            add_fused_lm_head(ref_model)
            if self.is_deepspeed_enabled:
                self.ref_model = prepare_deepspeed(ref_model, self.accelerator)
            else:
                self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

    def get_batch_samples(
        self, epoch_iterator: "Iterator[Batch]", num_batches: int, device: torch.device
    ) -> "tuple[list[Batch], Tensor | int | None]":
        """Keeps the micro batches of the step: the divergence is estimated on all of them, before the first."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step = batches if self.estimates_divergence else []
        return batches, num_items

    def compute_loss(
        self, model: "PreTrainedModel", inputs: "Batch", return_outputs: bool = False, num_items_in_batch: object = None
    ) -> "Tensor":
        if self._step:
            self.estimate_divergence(model, ((self._prepare_inputs(each), True) for each in self._step))
            self._step = []
        batch, labels_RT = _read(inputs)
        more = {"output_router_logits": True} if self.router_aux_loss_coef else {}
        outputs = model(**batch, **more, labels=labels_RT, fused_lm_head=True, use_cache=False)
        sums_R = outputs.log_probs.sum(1)
        if COLUMNS[0] in inputs:  # precomputed
            reference_R = torch.cat([inputs[name] for name in COLUMNS])
        else:
            reference_R = self._reference_sums(batch, labels_RT)
        if reference_R is not None and self.proof and self.state.global_step == 0:
            self.proof(sums_R.detach() - reference_R)
        rows = Rows(
            sums_R=sums_R,
            counts_R=inputs["completion_mask"][:, 1:].sum(1).clamp(min=1),
            reference_R=reference_R,
            desirable_R=inputs.get("label"),
            divergence=self._divergence,
        )
        loss, metrics = self.pair_loss(rows)
        if self.router_aux_loss_coef:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss
            metrics = {**metrics, "aux_loss": outputs.aux_loss}
        self._record({**metrics, **_logps(rows)})
        return loss

    def estimate_divergence(self, model: "PreTrainedModel", batches: "Iterable[tuple[Batch, bool]]") -> None:
        """Estimates KL(policy, reference) on mismatched answers, for the losses that follow.

        It is the mean log-ratio over the rows of all batches and workers, not below 0, and has no gradient. Dropout is
        off, so that it draws no random numbers: Ethayarajh et al. 2024, arXiv:2402.01306, section 4.1.

        Args:
            batches: this worker's, and whether each counts.
        """
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)  # log-ratios, rows
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for inputs, counts in batches:
                batch, labels_RT = _read(_mismatched(inputs))
                outputs = model(**batch, labels=labels_RT, fused_lm_head=True, use_cache=False)
                reference_R = self._reference_sums(batch, labels_RT)
                assert reference_R is not None, "only a loss with a reference has a divergence from it"
                ratios_R = (outputs.log_probs.sum(1) - reference_R).double()
                if counts:
                    total += torch.stack([ratios_R.sum(), ratios_R.new_tensor(len(ratios_R))])
        model.train(was_training)
        log_ratios, num_rows = self.accelerator.reduce(total, "sum")
        self._divergence = (log_ratios / num_rows).clamp(min=0).float()
        self._record({"kl": self._divergence})

    def _reference_sums(self, batch: "Batch", labels_RT: "Tensor") -> "Tensor | None":
        if self.proof is None:
            return None
        model = self.model if self.ref_model is None else self.ref_model
        no_grad: AbstractContextManager[object] = torch.no_grad()
        with no_grad, disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            if self.ref_model is not None:
                outputs = model(**batch, labels=labels_RT, fused_lm_head=True, use_cache=False)
            else:
                # The policy without its adapter is not called through DeepSpeed.
                policy = self.accelerator.unwrap_model(self.model)
                copied = REFERENCE if REFERENCE in policy.peft_config else None
                with use_adapter(policy, adapter_name=copied), autocast(self.args):
                    outputs = model(**batch, labels=labels_RT, fused_lm_head=True, use_cache=False)
        return outputs.log_probs.sum(1)

    def _record(self, metrics: "Mapping[str, Tensor]") -> None:
        mode = self._metrics["train" if self.model.training else "eval"]
        for name, each in metrics.items():
            values = self.accelerator.gather(each.detach().float().reshape(-1))
            # On the GPU until they are logged: to read them would wait for the micro batch.
            sums = torch.stack([values.double().nansum(), (~values.isnan()).sum().double()])
            mode[name] = mode[name] + sums if name in mode else sums

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means of the metrics over the rows of the step."""
        recorded = self._metrics["train" if self.model.training else "eval"]
        sums = torch.stack([*recorded.values()]).tolist() if recorded else []
        means = {name: total / count for name, (total, count) in zip(recorded, sums, strict=True) if count}
        if "rewards/margins" not in means and {"rewards/chosen", "rewards/rejected"} <= means.keys():
            means["rewards/margins"] = means["rewards/chosen"] - means["rewards/rejected"]
        super().log({**logs, **means}, start_time)
        recorded.clear()


def _read(inputs: "Batch") -> "tuple[Batch, Tensor]":
    """The part of a batch that a model reads, and the labels of the answers."""
    labels_RT = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, -100)
    own = {name: each for name, each in inputs.items() if name not in _LABELS and not name.startswith(MISMATCHED)}
    return own, labels_RT


def _mismatched(inputs: "Batch") -> "Batch":
    """The same prompts with the answers of other rows."""
    return {name.removeprefix(MISMATCHED): each for name, each in inputs.items() if name.startswith(MISMATCHED)}


def _logps(rows: Rows) -> "dict[str, Tensor]":
    if rows.desirable_R is None:
        chosen_R, rejected_R = rows.sums_R.chunk(2)
        return {"logps/chosen": chosen_R, "logps/rejected": rejected_R}
    return of_labels("logps", rows.sums_R, rows.desirable_R)


def of_labels(name: str, values_R: "Tensor", desirable_R: "Tensor") -> "dict[str, Tensor]":
    """A metric for desirable answers, and for the others."""
    desirable_R = desirable_R.bool()
    return {
        f"{name}/chosen": values_R.detach().where(desirable_R, math.nan),
        f"{name}/rejected": values_R.detach().where(~desirable_R, math.nan),
    }
