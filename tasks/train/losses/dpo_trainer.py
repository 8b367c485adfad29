"""TRL's trainer of DPO with our own losses, and with a moving reference that is saved in checkpoints.

Shapes: B pairs of a micro batch, R = 2B rows (the chosen answers, then the rejected ones), T tokens of the longest row,
S pairs of a step, of all workers.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from trl import DPOTrainer

from tasks.train.losses.dpo_losses import LOSSES, LossType, Pairs, aot_loss, aot_unpaired_loss, kto_pair_loss
from tasks.train.sharding import autocast

if TYPE_CHECKING:
    from torch import Tensor

    Batch = dict[str, Tensor]


class OwnLossesTrainer(DPOTrainer):
    """Adds our own losses to those of TRL.

    A loss of the step (``LossRow.of_step``) needs the log-probabilities of all its pairs before the first backward
    pass: where the step has several micro batches, another forward pass without gradients and dropout finds them.

    Args:
        own_losses: loss -> weight.
    """

    def __init__(self, *args: object, own_losses: Mapping[LossType, float], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.own_losses = own_losses
        self._sees_step = any(LOSSES[name].of_step for name in own_losses)
        self._step: Pairs | None = None  # of all workers; None: the micro batch is all of this worker's step
        self._place = 0  # in the step, of this worker's next pair

    def get_batch_samples(
        self, epoch_iterator: "Iterator[Batch]", num_batches: int, device: torch.device
    ) -> "tuple[list[Batch], object]":
        samples, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if self._sees_step:
            self._step = self._gathered(self._before_the_step(samples)) if len(samples) > 1 else None
            self._place = self.accelerator.process_index * sum(len(each["input_ids"]) // 2 for each in samples)
        return samples, num_items

    def _compute_loss(self, model: torch.nn.Module, inputs: "Batch", return_outputs: bool) -> "Tensor":
        with self._recorded() as logps:
            loss = super()._compute_loss(model, inputs, False)
        answers_RT = inputs["completion_mask"][:, 1:]
        chosen_BT, chosen_answers_BT = logps[0].chunk(2)[0], answers_RT.chunk(2)[0]
        pairs = self._pairs(inputs, logps)
        for name, weight in self.own_losses.items():
            if name == "sft":
                each_B = -chosen_BT.sum(1) / chosen_answers_BT.sum(1).clamp(min=1)
            else:
                each_B = self._of_step(name, pairs)
            loss = loss + weight * each_B.mean()
        self._place += len(pairs.policy[0])
        return loss

    def _of_step(self, name: LossType, pairs: Pairs) -> "Tensor":
        """A loss of the step, per pair of the micro batch."""
        step = self._step or self._gathered([pairs])
        if name == "kto_pair":
            return kto_pair_loss(self.beta, pairs, step)
        places_B = torch.arange(len(pairs.policy[0]), device=pairs.policy[0].device) + self._place
        loss = aot_loss if name == "aot" else aot_unpaired_loss
        return loss(self.beta, self.label_smoothing, pairs, step, places_B)

    def _before_the_step(self, samples: "Sequence[Batch]") -> list[Pairs]:
        """The log-probabilities of this worker's micro batches."""
        self.model.eval()
        found = []
        try:
            with torch.no_grad(), self.compute_loss_context_manager(), autocast(self.args):
                for sample in samples:
                    batch = self._prepare_inputs(sample)
                    with self._recorded() as logps:
                        super()._compute_loss(self.model, batch, False)
                    found.append(self._pairs(batch, logps))
        finally:
            self.model.train()
            self._metrics["eval"].clear()
        return found

    def _gathered(self, pairs: Sequence[Pairs]) -> Pairs:
        """All pairs of the step, those of the first worker first, without gradients."""
        local = [torch.stack([*each.policy, *each.reference], dim=1).detach() for each in pairs]
        chosen, rejected, *reference = self.accelerator.gather(torch.cat(local)).unbind(1)
        return Pairs(policy=(chosen, rejected), reference=(reference[0], reference[1]))

    def _pairs(self, inputs: "Batch", logps: "Sequence[Tensor]") -> Pairs:
        answers_RT = inputs["completion_mask"][:, 1:]
        policy, *reference = (self._sums(each[:, -answers_RT.shape[1] :], answers_RT).chunk(2) for each in logps)
        if not reference:  # precomputed
            reference = [(inputs["ref_chosen_logps"], inputs["ref_rejected_logps"])]
        return Pairs(policy=policy, reference=reference[0])

    def _sums(self, logps_RT: "Tensor", answers_RT: "Tensor") -> "Tensor":
        """As TRL sums them: with ``ld_alpha``, tokens beyond the shorter answer of a pair count less."""
        if self.ld_alpha is None:
            return logps_RT.sum(1)
        lengths_R = answers_RT.sum(1)
        shared_R = torch.minimum(*lengths_R.chunk(2)).repeat(2)
        weights_RT = torch.where(answers_RT.cumsum(1) <= shared_R.unsqueeze(1), 1.0, self.ld_alpha)
        return (logps_RT * weights_RT).sum(1)

    @contextmanager
    def _recorded(self) -> "Iterator[list[Tensor]]":
        """Collects the log-probabilities (R, T) that the policy, and then the reference, compute in the block."""
        found: list[Tensor] = []
        models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
        hooks = [each.register_forward_hook(lambda _model, _args, out: found.append(out.log_probs)) for each in models]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()


class MovingReferenceTrainer(OwnLossesTrainer):
    """Saves the reference with each checkpoint, for TR-DPO, whose reference is no longer the stage's input."""

    def saved_state(self) -> "Mapping[str, object]":
        return dict(self.ref_model.named_parameters())

    def load_saved_state(self, state: "Mapping[str, Tensor]") -> None:
        with torch.no_grad():
            for name, each in self.ref_model.named_parameters():
                each.copy_(state[name])
