"""Distillation on rows: transformers' loop around a divergence from a teacher's distribution at the trained tokens.

Shapes: R rows of a micro batch, L tokens of the longest, N trained tokens, H hidden size, V tokens of both models.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.trainer_callback import ExportableState
from trl.models.utils import _ForwardRedirection, prepare_deepspeed

from lineage.errors import ConfigError
from tasks.data.kinds import IGNORED
from tasks.data.tokens.tokenization import why_not_packable
from tasks.train.kernels.machine import plain
from tasks.train.kernels.padding_free import MAX_LOGITS, backbone, before_trained, is_padding_free, logits
from tasks.train.sharding import is_by_zero, is_divided, through

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State

    from tasks.train.run import TrainingRun

    Batch = Mapping[str, Tensor]
    Divergence = Callable[[Tensor, Tensor], Tensor]  # of the student's and the teacher's logits (N, V): N values

logger = logging.getLogger(__name__)

_LAYOUT = ("token_index", "row_index", "cu_seq_lens_q")  # of the padding-free forward, beside the padded rows
DIVERGENCE = "divergence"


def divergence(student_NV: "Tensor", teacher_NV: "Tensor", beta: float, temperature: float) -> "Tensor":
    """The generalized Jensen-Shannon divergence of the student's distribution from the teacher's: nats per token.

    With p of the teacher, q of the student and m = beta p + (1 - beta) q it is beta KL(p || m) + (1 - beta) KL(q || m):
    Agarwal et al. 2024, arXiv:2306.13649, eq. 1. At its ends it is the forward KL(p || q) (beta 0) and the reverse
    KL(q || p) (beta 1), as there. Both distributions are softened by the temperature, and the divergence is multiplied
    by its square, so that its gradients keep their size: Hinton et al. 2015, arXiv:1503.02531, section 2.
    """
    log_q, log_p = (F.log_softmax(each / temperature, dim=-1) for each in (student_NV, teacher_NV))
    if beta == 0:
        found = _kl(log_p, log_q)
    elif beta == 1:
        found = _kl(log_q, log_p)
    else:
        log_m = torch.logaddexp(log_p + math.log(beta), log_q + math.log1p(-beta))
        found = beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    return found * temperature**2


def _kl(log_p: "Tensor", log_q: "Tensor") -> "Tensor":
    """KL(p || q) of distributions along the last dimension."""
    return F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


class Interpolation(TrainerCallback, ExportableState):
    """The interpolated distribution of TAID, and its t (the formulas are in ``tasks/taid.py``).

    Shing et al. 2025, arXiv:2501.16937, section 3 and Algorithm 1; t, m and J are in every checkpoint.

    Args:
        t_start, t_end: of the teacher's share t in the intermediate logits.
        alpha: largest share of 1 - t that a step adds to t.
        momentum: decay of the mean relative change of the objective.
    """

    def __init__(self, *, t_start: float, t_end: float, alpha: float, momentum: float) -> None:
        self.t_start, self.t_end, self.alpha, self.momentum = t_start, t_end, alpha, momentum
        self.t = t_start
        self.mean_change = 0.0
        self.previous: float | None = None  # objective of the step before

    def target(self, student_NV: "Tensor", teacher_NV: "Tensor") -> "Tensor":
        """The logits of p_t: (1 - t) logit_q' + t logit_p, with the student's held fixed."""
        return (1 - self.t) * student_NV.detach() + self.t * teacher_NV

    def update(self, objective: float, progress: float) -> None:
        """Moves t after a step (Algorithm 1): from t_(n-1) to t_n.

        Args:
            objective: J_n: the mean divergence over the tokens of the step.
            progress: the share of the training's steps that are done.
        """
        previous, self.previous = self.previous, objective
        if previous is None:
            return
        change = (previous - objective) / (previous + 1e-15)  # delta_n
        self.mean_change = self.momentum * self.mean_change + (1 - self.momentum) * change  # m_n
        step = self.alpha / (1 + math.exp(-self.mean_change)) * (1 - self.t)
        line = self.t_start + (self.t_end - self.t_start) * progress
        self.t = min(self.t_end, max(line, self.t + step))

    def state(self) -> dict[str, object]:
        """What transformers writes into a checkpoint."""
        return {"args": {}, "attributes": {"t": self.t, "mean_change": self.mean_change, "previous": self.previous}}

    def on_train_begin(self, args: TrainingArguments, state: "State", control: "Control", **kwargs: object) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved and state.global_step:
            for name, value in saved["attributes"].items():
                setattr(self, name, value)

    def on_log(
        self, args: TrainingArguments, state: "State", control: "Control", logs: dict[str, float], **kwargs: object
    ) -> None:
        if DIVERGENCE not in logs:
            return
        logs["taid/t"] = state.log_history[-1]["taid/t"] = self.t
        self.update(logs[DIVERGENCE], state.global_step / state.max_steps)


class DistillTrainer(Trainer):
    """Trains towards a teacher's distribution at the trained tokens; the loss is a mean over those of the step.

    Only their hidden states go through the heads, in chunks whose logits are computed again in the backward pass.

    Args:
        teacher_model: frozen; of any architecture with the same tokens. Where one model has more logits, for ids that
            no tokenizer gives, they are left out.
        divergence: of the logits of N tokens.
        cross_entropy_weight: of the rows' own tokens in the loss; the divergence has the rest.
        interpolation: replaces the teacher by an intermediate one in training; None: does not. Held-out rows are
            measured against the teacher.
    """

    is_padding_free = True  # it takes a line of all rows: ``padding_free.reads_lines``

    def __init__(
        self,
        model: "PreTrainedModel | PeftModel",
        args: TrainingArguments,
        *,
        teacher_model: "PreTrainedModel",
        divergence: "Divergence",
        cross_entropy_weight: float = 0.0,
        interpolation: Interpolation | None = None,
        **kwargs: object,
    ) -> None:
        super().__init__(model=model, args=args, **kwargs)
        self.model_accepts_loss_kwargs = True  # the loss is a mean over the tokens of the step, not of a micro batch
        self.divergence, self.cross_entropy_weight = divergence, cross_entropy_weight
        self.interpolation = interpolation
        if interpolation:
            self.add_callback(interpolation)
        self.teacher_model = teacher_model
        if is_by_zero(teacher_model):
            self._teacher: torch.nn.Module = prepare_deepspeed(teacher_model, self.accelerator)
        else:
            self._teacher = self.teacher_model = self.accelerator.prepare_model(teacher_model, evaluation_mode=True)
        text = model.config.get_text_config()
        has_routers = hasattr(text, "output_router_logits")
        self.router_aux_loss_coef = getattr(text, "router_aux_loss_coef", 0.0) if has_routers else 0.0
        self._redirect = _ForwardRedirection()
        # Of the step so far: divergence, cross-entropy, auxiliary loss, tokens, micro batches.
        self._sums = torch.zeros(5, dtype=torch.float64, device=self.args.device)

    def compute_loss(
        self,
        model: "PreTrainedModel",
        inputs: "Batch",
        return_outputs: bool = False,
        num_items_in_batch: "Tensor | None" = None,
    ) -> "Tensor":
        student = self.accelerator.unwrap_model(model)
        if is_divided(student):
            sums, aux_loss, count = through(plain(student), lambda: self._measured(student, inputs))
        else:
            sums, aux_loss, count = self._redirect(model, student, self._measured, student, inputs)
        (apart, entropy), one = sums, torch.ones_like(count)
        loss = (1 - self.cross_entropy_weight) * apart + self.cross_entropy_weight * entropy
        if num_items_in_batch is None:
            loss = loss / count.clamp(min=1)
        else:  # of all workers, whose gradients are averaged
            loss = loss * self.accelerator.num_processes / num_items_in_batch
        if self.router_aux_loss_coef:  # a mean over a micro batch, as in SFT
            steps = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * aux_loss / steps
        if self.model.training:
            self._sums += torch.stack([each.double() for each in (apart, entropy, aux_loss, count, one)]).detach()
        return loss

    def _measured(self, student: "PreTrainedModel", inputs: "Batch") -> "tuple[Tensor, Tensor, Tensor]":
        """Sums of divergence and cross-entropy over trained tokens, the auxiliary loss, and the number of tokens."""
        labels_RL = inputs["labels"]
        trained_RL = labels_RL[:, 1:] != IGNORED
        batch = {name: each for name, each in inputs.items() if name != "labels"}
        with self.accelerator.autocast():
            student_NH, aux_loss = self._states(student, batch, trained_RL, self.router_aux_loss_coef > 0)
            with torch.no_grad():
                teacher = plain(self.teacher_model)  # its head stays gathered
                asked = (teacher, batch, trained_RL, False)
                if is_by_zero(teacher):
                    teacher_NH, _ = self._redirect(self._teacher, teacher, self._states, *asked)
                else:
                    teacher_NH, _ = through(teacher, lambda: self._states(*asked))
            measure = _Heads(student, self.teacher_model, self._apart, self.cross_entropy_weight > 0)
            found = measure(student_NH, teacher_NH, labels_RL[:, 1:][trained_RL])
        return found, aux_loss, trained_RL.sum()

    def _apart(self, student_NV: "Tensor", teacher_NV: "Tensor") -> "Tensor":
        if self.interpolation and self.model.training:
            teacher_NV = self.interpolation.target(student_NV, teacher_NV)
        return self.divergence(student_NV, teacher_NV)

    def _states(
        self, model: "PreTrainedModel | PeftModel", batch: "Batch", trained_RL: "Tensor", routed: bool
    ) -> "tuple[Tensor, Tensor]":
        """The hidden states before the trained tokens, and the routers' auxiliary loss: 0 unless ``routed``."""
        base = plain(model)
        if not is_padding_free(base) and "token_index" in batch:
            batch = {name: each for name, each in batch.items() if name not in _LAYOUT}
        more = {"output_router_logits": True} if routed else {}
        outputs = backbone(base, {**batch, **more, "use_cache": False})
        states_NH = before_trained(outputs.last_hidden_state, trained_RL, batch.get("row_index"))
        if not routed:
            return states_NH, states_NH.new_zeros(())
        config = base.config.get_text_config()
        mask = batch.get("attention_mask")
        of_tokens = load_balancing_loss_func(
            outputs.router_logits, config.num_experts, config.num_experts_per_tok, mask
        )
        return states_NH, of_tokens

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means over the tokens of the step, of all workers."""
        if "loss" in logs:
            totals = self.accelerator.reduce(self._sums, "sum").tolist()
            self._sums = torch.zeros_like(self._sums)
            of_tokens = {DIVERGENCE: totals[0] / max(totals[3], 1)}
            if self.cross_entropy_weight:
                of_tokens["cross_entropy"] = totals[1] / max(totals[3], 1)
            if self.router_aux_loss_coef:
                of_tokens["aux_loss"] = totals[2] / totals[4]
            logs = {**logs, **of_tokens}
        super().log(logs, start_time)


class _Heads:
    """Projects hidden states to logits and measures them, in chunks."""

    def __init__(
        self, student: "PreTrainedModel", teacher: "PreTrainedModel", apart: "Divergence", enters: bool
    ) -> None:
        self.student, self.teacher, self.apart, self.enters = plain(student), plain(teacher), apart, enters
        self.num_tokens = min(each.config.get_text_config().vocab_size for each in (self.student, self.teacher))

    def __call__(self, student_NH: "Tensor", teacher_NH: "Tensor", targets_N: "Tensor") -> "Tensor":
        """Sums of the divergence and, where it enters the loss, the cross-entropy."""
        size = max(1, MAX_LOGITS // (2 * self.num_tokens))
        chunks = list(zip(*(each.split(size) for each in (student_NH, teacher_NH, targets_N)), strict=True))
        if len(chunks) == 1:
            return self._measure(*chunks[0])
        return torch.stack([checkpoint(self._measure, *each, use_reentrant=False) for each in chunks]).sum(0)

    def _measure(self, student_NH: "Tensor", teacher_NH: "Tensor", targets_N: "Tensor") -> "Tensor":
        student_NV = logits(self.student, student_NH)
        with torch.no_grad():
            teacher_NV = logits(self.teacher, teacher_NH)[:, : self.num_tokens]
        apart = self.apart(student_NV[:, : self.num_tokens], teacher_NV).sum()
        entropy = F.cross_entropy(student_NV, targets_N, reduction="sum") if self.enters else torch.zeros_like(apart)
        return torch.stack([apart, entropy])


def distill_trainer(run: "TrainingRun", **own: object) -> Trainer:
    """A trainer that distils the model in the slot ``teacher``.

    Raises:
        ConfigError: the teacher has other tokens, fewer positions, or cannot keep the rows of a pack apart.
    """
    teacher = run.model("teacher")
    assert teacher is not None
    reason = why_not_packable(teacher.config.to_dict()) if getattr(run.method, "packing", None) else None
    if reason:
        raise ConfigError(
            f"packing=best_fit: the teacher, {run.inputs['teacher'].name}, cannot keep the rows of a pack apart: "
            f"{reason}; set packing=null: each row is then one of a batch"
        )
    return run.trl(DistillTrainer, TrainingArguments, teacher_model=teacher, **own)
