"""One policy: the model that samples is the one in training, and the reference is the one that it started from.

A sampler says of each generation which weights it had, and the log-probability that it gave to each of its tokens
(``Sampled``). The trainer compares both with its own before its next update (``OnePolicy``), whatever generated. What
goes wrong elsewhere: an engine that gets no adapter (huggingface/trl issue 2698), that keeps old weights after a sleep
(issue 5312: differences of 0.2 nats instead of 0.015), a reference that is trained too (issue 1500). Models that
measure, score, answer or are merged are the inputs that the run verified (``digests_of_weights``).

Shapes: B completions of a micro batch, C tokens of the longest completion.
"""

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from peft import PeftModel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import TrainerCallback
from trl.trainer.utils import use_adapter

from lineage.errors import ArtifactError, PipelineError
from lineage.filesystem.digest import DigestCache, digest_files
from lineage.filesystem.digest import digest_of as digest_of_files
from lineage.fingerprint import digest_json, short
from tasks.train.kernels.machine import plain
from tasks.train.models.adapted import DEFAULT, REFERENCE
from tasks.train.sharding import gather_again, local

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    from tasks.context import TrainContext
    from tasks.recipe import Inputs

logger = logging.getLogger(__name__)

MEAN, MAX = "sampler/logp_difference_mean", "sampler/logp_difference_max"
WEIGHTS_STEP = "sampler/weights_step"
COMPARED_ROWS = 4  # of a micro batch, where the comparison takes a forward of its own
_KNOWN = 64  # versions whose steps are remembered
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The version of a model's weights.

    Args:
        digest: of the trained weights and of the adapters that act; None: unknown, as of an engine's.
        step: number of the updates that made them; None: unknown.
    """

    digest: str | None
    step: int | None = None

    def __str__(self) -> str:
        step = "an unknown step" if self.step is None else f"step {self.step}"
        return f"{step} ({self.digest})" if self.digest else step


def weights_of(model: "PreTrainedModel | PeftModel") -> Weights:
    """The version of the weights that act in a model now, without its step.

    It reads the trained weights once. Sums of whole numbers are exact, so that every device and thread gives the same.
    """
    gather_again(model)
    trained = {name: each for name, each in plain(model).named_parameters() if each.requires_grad}
    return Weights(digest=digest_of(trained, active_adapters(model)))


def unmoved(model: "PreTrainedModel | PeftModel", first: Weights) -> dict[str, float]:
    """The metric of a training whose weights are those of its start, ``first``; of others none."""
    moved = torch.tensor(weights_of(model) != first, device=model.device).int()
    if torch.distributed.is_initialized():  # a worker's part of them may stay
        torch.distributed.all_reduce(moved, torch.distributed.ReduceOp.MAX)
    if moved:
        return {}
    logger.warning("weights=%s unchanged: no step moved a trained weight", first.digest)
    return {"weights_unchanged": 1.0}


def digest_of(tensors: "Mapping[str, Tensor]", also: Iterable[str] = ()) -> str:
    """A short digest of tensors on any device, and of further words."""
    sums = [torch.stack([*map(_bits, _parts(each))]).sum() for each in tensors.values()]
    found = torch.stack(sums).tolist() if sums else []
    text = "\n".join([*(f"{name}:{total}" for name, total in zip(tensors, found, strict=True)), *sorted(also)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bits(tensor: "Tensor") -> "Tensor":
    """The sum of a tensor's bits, read as whole numbers."""
    return tensor.contiguous().flatten().view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)


def _parts(tensor: "Tensor") -> "Iterator[Tensor]":
    """The plain tensors of this worker's part: of a weight in few bits (torchao, quanto) its values and scales."""
    tensor = local(tensor)
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def digests_of_weights(models: "Inputs") -> dict[str, str]:
    """Slot -> digest of the files that are loaded, or what pins a source.

    Raises:
        ArtifactError: a stage's output is not the input that the stage was started with.
    """
    found = {}
    for slot, model in models.items():
        if model.source is not None:  # the run compares sources with their pins
            found[slot] = model.digest or model.fingerprint
            continue
        # The run has read each file before this stage; large ones are not read again.
        is_stored = model.path.name == "output"
        cache = DigestCache(model.path.parents[2] / "digests.json" if is_stored else None)
        found[slot] = digest_of_files(digest_files(model.path, cache))
        if model.digest not in (None, found[slot]):
            raise ArtifactError(
                f"inputs.{slot}: {model.path} has the digest {short(found[slot])}, and the input {model.name} has "
                f"{short(model.digest)}: another checkpoint would be read, and nothing is; the files that the run "
                "verified are accepted; restore them, or run the pipeline again"
            )
    return found


_NOT_COMPUTED = {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}


def digest_of_loaded(model: "PreTrainedModel") -> str:
    """Digest of what a loaded model computes with: its weights, to the bit, and its config.

    Files do not decide it: a checkpoint, an adapter on its base, and the output that they become have one digest if
    they load as the same model.
    """
    state = {name: each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashlib releases the GIL
        weights = dict(zip(state, pool.map(_sha256, state.values()), strict=True))
    generation = model.generation_config.to_diff_dict() if model.can_generate() else {}
    config = {"config": model.config.to_dict(), "generation": generation}
    return digest_json({"class": type(model).__name__, "weights": weights, **_computed(config)})


def _sha256(tensor: "Tensor") -> str:
    found = hashlib.sha256()
    for part in _parts(tensor):
        found.update(f"{part.dtype} {[*part.shape]} ".encode())
        found.update(part.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return found.hexdigest()


def _computed(config: Mapping[str, object]) -> dict[str, object]:
    """A config, as JSON, without what changes no result."""
    kept = {name: each for name, each in config.items() if name not in _NOT_COMPUTED}
    as_json = {name: _computed(each) if isinstance(each, Mapping) else each for name, each in kept.items()}
    return dict(json.loads(json.dumps(as_json, default=str)))


def version_metrics(digests: Mapping[str, str]) -> dict[str, float]:
    """Metrics ``weights/SLOT``, by which others name their weights: 40 bits of a digest, which a float holds."""
    return {f"weights/{slot}": float(int(digest[:10], 16)) for slot, digest in digests.items()}


def active_adapters(model: "PreTrainedModel | PeftModel") -> frozenset[str]:
    """The names of the adapters that act, and ``off`` where layers have adapters that do not."""
    found: set[str] = set()
    for module in plain(model).modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):  # a layer of PEFT
            found |= {"off"} if module.disable_adapters else {str(each) for each in module.active_adapters}
    return frozenset(found)


def shares_weights(one: "PreTrainedModel | PeftModel", other: "PreTrainedModel | PeftModel") -> bool:
    """Whether the trained weights of one model are those of another, in one place of memory."""
    return _trained_places(one) == _trained_places(other)


def _trained_places(model: "PreTrainedModel | PeftModel") -> set[int]:
    return _places(each for each in plain(model).parameters() if each.requires_grad)


def _places(tensors: "Iterable[Tensor]") -> set[int]:
    return {part.data_ptr() for each in tensors for part in _parts(each) if part.numel()}


class Sampled:
    """What a sampler leaves of a generation.

    Attributes:
        model: that sampled; None: an engine outside of torch.
        adapters: of the model, that acted.
        weights: of the model; an engine's have a step alone.
        logps: of each token of each completion, under the softmax over all tokens at ``temperature``: as the trainer
            computes them, without top_p and its kin and without a repetition penalty.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = temperature
        self.model: PreTrainedModel | PeftModel | None = None
        self.adapters: frozenset[str] = frozenset()
        self.weights = Weights(digest=None)
        self.logps: list[list[float]] = []

    def by(self, model: "PreTrainedModel | PeftModel") -> None:
        """States the model that samples now, as it is now."""
        self.model, self.adapters, self.weights = model, active_adapters(model), weights_of(model)

    def padded(self, num_columns: int, device: "torch.device") -> "Tensor":
        """The log-probabilities (B, C); nan where there is no token."""
        found = torch.full((len(self.logps), num_columns), torch.nan)
        for row, values in zip(found, self.logps, strict=True):
            row[: len(values)] = torch.tensor(values[:num_columns])
        return found.to(device)


class OnePolicy:
    """Requires at each step that the sampler's policy is the one in training.

    Attributes:
        weights: of the last generation's sampler.
    """

    def __init__(self, ctx: "TrainContext") -> None:
        self.ctx, self.most = ctx, ctx.resources.max_logp_difference
        self.weights = Weights(digest=None)
        self._trainer = Weights(digest=None)
        self._known: dict[str, int] = {}  # digest -> step
        self._apart: list[Tensor] = []  # of each micro batch: sum, number and maximum
        self._is_warned = False

    def sampled(self, step: int, sampled: Sampled, model: "PreTrainedModel | PeftModel") -> None:
        """Requires that the weights that sampled are those that are trained.

        Args:
            step: counted from 0: the number of updates that made the weights.
            model: in training.

        Raises:
            PipelineError: they are others; names step, cause and both versions.
        """
        acting = active_adapters(model)
        same = sampled.model is not None and sampled.adapters == acting and shares_weights(sampled.model, model)
        # Weights of an earlier step in the same memory: a step without a signal, or they were there only to sample.
        same &= self._known.get(sampled.weights.digest or "", step) == step
        found = replace(sampled.weights if same else weights_of(model), step=step)
        assert found.digest
        self._known[found.digest] = step
        for digest in list(self._known)[:-_KNOWN]:
            del self._known[digest]
        ours = sampled.weights
        if ours.digest:
            ours = replace(ours, step=self._known.get(ours.digest))
        self.weights, self._trainer = ours, found
        if sampled.model is not None and sampled.adapters != acting:
            names = [", ".join(sorted(each)) or "none" for each in (sampled.adapters, acting)]
            self.refuse(step, f"the adapters that act in the sampler are {names[0]}, and in the trainer {names[1]}")
        if ours.digest != found.digest and ours.digest is not None and ours.step is None:
            self.refuse(step, "the sampler has weights that the trainer never had")
        if ours.step is not None and ours.step != step:
            self.refuse(step, f"the sampler's weights lag by {step - ours.step} updates, and 0 are accepted")

    def compare(self, sampler_BC: "Tensor", trainer_BC: "Tensor", mask_BC: "Tensor") -> None:
        """Adds a micro batch to the comparison of the step.

        Args:
            sampler_BC: of ``Sampled``.
            trainer_BC: log-probabilities of the same tokens in the trainer, at the same temperature, without dropout.
            mask_BC: 1 on the tokens to compare.
        """
        with torch.no_grad():
            apart_BC = (sampler_BC.double() - trainer_BC.detach().double()).abs()
            known_BC = mask_BC.bool() & apart_BC.isfinite()  # without indexing, which would wait for the GPU
            apart_BC = apart_BC.where(known_BC, 0.0)
            self._apart.append(torch.stack([apart_BC.sum(), known_BC.sum().double(), apart_BC.max()]))

    def require(self, step: int) -> dict[str, float]:
        """Ends the comparison of a step; called before its update.

        Returns:
            Metrics, over the compared tokens of all workers, or those of an island.

        Raises:
            PipelineError: the log-probabilities differ by more than ``max_logp_difference`` on average.
        """
        parts, self._apart = torch.stack(self._apart), []
        own = torch.stack([parts[:, 0].sum(), parts[:, 1].sum(), parts[:, 2].max()]).to(self.ctx.resources.device)
        found = [own] * self.ctx.together
        if len(found) > 1:
            found = [torch.empty_like(own) for _ in found]
            torch.distributed.all_gather(found, own)
        total, count, largest = (column.tolist() for column in torch.stack(found).unbind(1))
        mean = sum(total) / sum(count) if sum(count) else 0.0
        if not sum(count) and not self._is_warned:
            logger.warning("step=%d sampler=unproven: no token has a log-probability of the sampler", step + 1)
            self._is_warned = True
        if self.most is not None and mean > self.most:
            self.refuse(
                step,
                f"they give its tokens log-probabilities that differ by {mean:.4g} nats on average (at most "
                f"{max(largest):.4g}), and max_logp_difference={self.most:g} is accepted",
            )
        of_weights = {} if self.weights.step is None else {WEIGHTS_STEP: float(self.weights.step)}
        return {MEAN: mean, MAX: max(largest), **of_weights}

    @property
    def is_begun(self) -> bool:
        """Whether a micro batch of the step was compared."""
        return bool(self._apart)

    def refuse(self, step: int, cause: str) -> None:
        """Raises the error of a step, which is counted from 0."""
        raise PipelineError(
            f"step {step + 1}, which is not taken: the policy that samples is not the one in training: {cause}; the "
            f"sampler has the weights of {self.weights}, the trainer those of {self._trainer}; one policy is accepted: "
            "see what changes the sampler's weights, its adapter or its precision between two steps; "
            "resources.max_logp_difference sets the accepted rounding (null: measure only)"
        )


class FixedReference(TrainerCallback):
    """Requires that the reference is not trained: no weight of it is the policy's own, and none moves.

    Its weights are read at the start, and before each update until one has moved the policy, which a warmup may delay:
    by then a reference that follows it has moved too.

    Args:
        policy: in training.
        reference: None: it is the policy without its adapter, or with a frozen copy of it.
        every_steps: of ``reference_sync``, which alone may move it; None: nothing may.
    """

    def __init__(
        self, policy: "PreTrainedModel | PeftModel", reference: torch.nn.Module | None, every_steps: int | None = None
    ) -> None:
        self._policy, self._reference, self._every = policy, reference, every_steps
        self._last: tuple[int, str] | None = None  # step, and the digest of the reference
        self._policy_start, self._is_proven = Weights(digest=None), False

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.require(state.global_step)

    on_pre_optimizer_step = on_train_begin

    def require(self, step: int) -> None:
        """Reads the reference before an update.

        Args:
            step: counted from 0: the number of updates taken.

        Raises:
            PipelineError: the reference is trained; names cause and step.
        """
        if self._is_proven:
            return
        if self._reference is None and DEFAULT in self._acting():
            self._refuse(step, "the adapter in training acts in it")
        weights, trained = self._weights(), _trained_places(self._policy)
        shared = [name for name, each in weights.items() if _places([each]) & trained]
        if shared:
            self._refuse(
                step, f"{len(shared)} of its {len(weights)} weights are the policy's, in one place of memory, such as "
                f"{shared[0]}"
            )  # fmt: skip
        digest, policy = digest_of(weights), weights_of(self._policy)
        if self._last is None:
            self._last, self._policy_start = (step, digest), policy
        before, known = self._last
        is_synced = self._every is not None and step // self._every > before // self._every
        if digest != known and not is_synced:
            self._refuse(step, f"its weights were {known} at step {before}, and are {digest} now")
        self._last, self._is_proven = (step, digest), policy != self._policy_start

    def _acting(self) -> frozenset[str]:
        """The adapters that act where a trainer computes the reference from the policy."""
        policy = self._policy
        assert isinstance(policy, PeftModel)
        flags = [(each, each.requires_grad) for each in policy.parameters()]
        with use_adapter(policy, adapter_name=REFERENCE if REFERENCE in policy.peft_config else None):
            acting = active_adapters(policy)
        for parameter, is_trained in flags:
            if parameter.requires_grad != is_trained:  # PEFT lets all active adapters be trained, frozen ones too
                parameter.requires_grad_(is_trained)
        return acting

    def _weights(self) -> "dict[str, Tensor]":
        gather_again(self._policy)
        if self._reference is not None:
            gather_again(self._reference)
            return dict(self._reference.named_parameters())
        named = plain(self._policy).named_parameters()
        return {name: each for name, each in named if DEFAULT not in name.split(".")}

    def _refuse(self, step: int, cause: str) -> None:
        raise PipelineError(
            f"step {step + 1}, which is not taken: the reference follows the policy: {cause}; a reference with weights "
            "of its own, which method.reference_sync alone moves, is accepted; load it with run.model(...), and see "
            "what else writes into it"
        )


def token_logps(logits_BV: "Tensor", tokens_B: "Tensor", temperature: float) -> "Tensor":
    """Log-probability (B) of one token of each row under the softmax over all tokens."""
    logits_BV = logits_BV.float()
    logits_BV = logits_BV if temperature == 1 else logits_BV / temperature
    return logits_BV.gather(1, tokens_B[:, None]).squeeze(1) - logits_BV.logsumexp(1)


def is_noisy(model: "PreTrainedModel | PeftModel") -> bool:
    """Whether two forwards in training mode differ: by dropout, or the noise of NEFTune."""
    return any(_has_noise(module) for module in model.modules())


def _has_noise(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.nn.Dropout):
        return bool(module.p > 0)
    values = vars(module)
    return bool(values.get("neftune_noise_alpha")) or any(
        "drop" in name and isinstance(value, float) and 0 < value <= 1 for name, value in values.items()
    )
