"""Metrics and heartbeats of each step, final metrics as means of the last steps, and the check at step 0."""

import logging
import math
import random
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, cast

import psutil
import torch
from transformers import TrainerCallback, set_seed

from lineage.checkpoints import Checkpoints
from lineage.errors import PipelineError
from tasks.train.best import HELD_OUT_LOSS
from tasks.train.loop.heartbeat import Phase
from tasks.train.loop.saved_state import load_named_state, named_state, read_own
from tasks.train.sharding import as_part, gather_again

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, Trainer
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    from tasks.context import TrainContext
    from tasks.recipe import Input
    from tasks.train.loop.speed import Speed
    from tasks.train.optim.diloco import Islands

    _Saved = Mapping[str, Mapping[str, Tensor]]

    Logs = dict[str, float]

logger = logging.getLogger(__name__)

# Not computed by the padding-free forward (they need every token's whole distribution), or not metrics of the step.
UNREPORTED = frozenset({"entropy", "logits/chosen", "logits/rejected", "epoch"})
_COMPUTED_WITH_REWARDS = frozenset({"entropy"})  # by trainers that generate
_MASKS = ("prompt_mask", "completion_mask")  # of TRL's trainers that generate: they have no attention mask
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
# Largest implicit reward (beta x log-ratio) at step 0. Policy and reference run the same kernels: in fp32 they differ
# by the order of additions, in bf16 by its 8 bits, in fp16 by its 11. A reference whose weights
# are in bf16 differs from a policy in fp32 by their rounding too.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2, "fp8": 5e-2, "bf16 reference": 0.1}
PROOF_BETA = 0.1  # turns the tolerance of a reward into that of a log-ratio
_MOST_JUMPS = 5  # whose rows are logged
_OF_LAST = (HELD_OUT_LOSS, "sampler/weights_step")  # of the last step alone: a mean of versions is none
WINDOW_STEPS = 10  # last steps over which tokens per second are measured, and the final loss is averaged


class StepCounts(TrainerCallback):
    """Adds the number of tokens and the gradient norm to each log, whether or not the trainer logs them.

    It runs before the callbacks that read them. After a resume it continues the count of the checkpoint.
    """

    def __init__(self, trainer: "Trainer", ctx: "TrainContext") -> None:
        self.trainer, self.islands = trainer, ctx.islands
        self.num_tokens = 0
        # Of the micro batches since the last log, on this worker; the trainer removes those of a step that it repeats.
        trainer.new_tokens = self.new_tokens = list["Tensor"]()
        self.grad_norm: object = math.nan  # a tensor until it is logged: to read it would wait for the backward pass
        self._loss, self._norm = trainer.compute_loss, trainer._get_grad_norm
        trainer.compute_loss, trainer._get_grad_norm = self._counted_loss, self._kept_norm

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        counts = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
        self.num_tokens = int(counts[-1]) if counts else 0
        self.trainer._total_train_tokens = self.num_tokens  # TRL does not save it in checkpoints

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if "loss" not in logs:
            return
        if self.new_tokens:
            counted = torch.stack(self.new_tokens).sum()
            counted = self.trainer.accelerator.reduce(counted, "sum")
            self.num_tokens += int((self.islands.sum(counted) if self.islands else counted).item())
            self.new_tokens.clear()
        else:  # a trainer whose steps call no ``compute_loss``
            self.num_tokens = int(logs.get("num_tokens", self.num_tokens))
        logs["num_tokens"] = self.num_tokens
        logs.setdefault("grad_norm", float(self.grad_norm))  # type: ignore[arg-type]
        state.log_history[-1] |= {name: logs[name] for name in ("num_tokens", "grad_norm")}

    def _counted_loss(self, model: "PreTrainedModel", inputs: object, *args: object, **kwargs: object) -> object:
        """Replaces the trainer's ``compute_loss``, and counts the tokens of the micro batch, generated ones too."""
        batch = inputs if isinstance(inputs, Mapping) and model.training else {}
        masks = [batch[name] for name in _MASKS if name in batch]
        if "attention_mask" in batch:
            self.new_tokens.append(batch["attention_mask"].sum())
        elif masks:
            self.new_tokens.append(torch.stack([mask.sum() for mask in masks]).sum())
        elif "input_ids" in batch:
            self.new_tokens.append(batch["input_ids"].new_tensor(batch["input_ids"].numel()))
        return self._loss(model, inputs, *args, **kwargs)

    def _kept_norm(self, *args: object, **kwargs: object) -> object:
        self.grad_norm = self._norm(*args, **kwargs)
        return self.grad_norm


class Rounds(TrainerCallback):
    """Synchronises the islands of ``method.diloco`` at the end of each round; reports the mean of their metrics.

    It runs before the callbacks that read the metrics or the weights of a step.
    """

    def __init__(self, trainer: "Trainer", ctx: "TrainContext", islands: "Islands") -> None:
        self.trainer, self.ctx, self.islands = trainer, ctx, islands
        self.metrics: Logs = {}

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        folder, islands = self.ctx.resume_from, self.islands
        gather_again(self.trainer.model)
        islands.begin(self.trainer, is_resumed=folder is not None)
        if folder is None:
            return
        workers = Checkpoints.at(folder).num_workers // islands.setting.num_islands  # of an island, which wrote it
        first, own = (
            cast("_Saved", read_own(folder, index * workers + islands.part)[type(self).__name__])
            for index in (0, islands.index)
        )
        islands.load(first, own)
        if islands.index and not self.trainer.is_deepspeed_enabled:
            state = cast("Mapping[str, _Saved]", own["optimizer"])
            parts = {
                name: {key: as_part(each, islands.trained[name]) for key, each in values.items()}
                for name, values in state["state"].items()
            }
            load_named_state(self.trainer.optimizer, self._names, {**state, "state": parts})

    def own_state(self) -> "Mapping[str, object]":
        """As of every trainer or callback with state of its own; of DeepSpeed's, which has files of its own, no more
        than the outer optimizer."""
        gather_again(self.trainer.model)
        islands, is_deepspeed = self.islands, self.trainer.is_deepspeed_enabled
        if islands.index == 0 or not islands.exchanges:
            return islands.state()
        if is_deepspeed:
            return {}
        return {**islands.state(), "optimizer": named_state(self.trainer.optimizer, self._names)}

    def load_own_state(self, state: "Mapping[str, object]", *, same: bool) -> None:
        """``on_train_begin`` reads it, from the files of the workers that wrote the same part of the model."""

    @property
    def _names(self) -> dict[int, str]:
        return {id(each): name for name, each in self.islands.trained.items()}

    def on_step_end(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.metrics = {}
        if self.islands.is_due(state.global_step, state.max_steps):
            gather_again(self.trainer.model)
            self.metrics = self.islands.synchronise()

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if "loss" in logs:
            logs |= self.islands.mean_log(logs) | self.metrics
            state.log_history[-1] |= logs


class Recorder(TrainerCallback):
    """Passes the metrics of every step to ``ctx.report``, unless its loss or gradient norm is non-finite."""

    def __init__(self, ctx: "TrainContext", speed: "Speed") -> None:
        self.report, self.speed = ctx.report, speed
        self.process = psutil.Process()
        self.window: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS + 1)  # (seconds, tokens so far)

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        counts = [float(entry["num_tokens"]) for entry in state.log_history if "num_tokens" in entry]
        self.begin(counts[-1] if counts else 0.0)

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if "loss" in logs and not has_diverged(logs):  # the summary after the last step has no loss
            self.record(state.global_step, logs, args.device)

    def begin(self, num_tokens: float) -> None:
        """Starts the clock, after the tokens of earlier attempts; the device's peak is known by then."""
        if self.speed.found:
            assert self.speed.peak
        self.window.append((time.perf_counter(), num_tokens))

    def record(self, step: int, logs: Mapping[str, float], device: torch.device) -> None:
        """Reports a step, with its speed and memory."""
        self.window.append((time.perf_counter(), float(logs["num_tokens"])))
        (start, tokens_before), (now, tokens) = self.window[0], self.window[-1]
        metrics = {name: float(value) for name, value in logs.items() if name not in _unreported(logs)}
        speed = self.speed.metrics((tokens - tokens_before) / (now - start), num_tokens=tokens, num_steps=step)
        self.report(step, {**metrics, **speed, "memory_gib": self.memory_gib(device)})

    def memory_gib(self, device: torch.device) -> float:
        """Peak memory allocated on this worker's GPU; without a GPU, the resident memory of its process now."""
        if device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(device)) / 2**30
        return float(self.process.memory_info().rss) / 2**30


class Jumps(TrainerCallback):
    """Logs the rows of the first steps whose loss jumps: by six standard deviations, or to a non-finite value."""

    def __init__(self, rows_of_step: Callable[[int], str]) -> None:
        self.rows_of_step, self.left = rows_of_step, _MOST_JUMPS
        self.before: deque[float] = deque(maxlen=2 * WINDOW_STEPS)

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if "loss" not in logs:
            return
        loss = logs["loss"]
        most = fmean(self.before) + 6 * pstdev(self.before) if len(self.before) == self.before.maxlen else math.inf
        if self.left and not (math.isfinite(loss) and loss <= most) and (rows := self.rows_of_step(state.global_step)):
            self.left -= 1
            logger.warning("step=%d loss=%.4g state=jumped rows=%s", state.global_step, loss, rows)
        if math.isfinite(loss):
            self.before.append(loss)


class StepMarks(TrainerCallback):
    """Sends the heartbeat of every worker at the start and end of steps; ``Checkpointing`` sends it for saves.

    Args:
        collect: what is called between steps.
    """

    def __init__(self, ctx: "TrainContext", collect: Callable[[], None]) -> None:
        self.mark, self.collect = ctx.mark, collect

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.mark(state.global_step, Phase.BETWEEN)

    def on_step_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.mark(state.global_step, Phase.STEPPING)

    on_substep_end = on_step_begin

    def on_step_end(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.collect()
        self.mark(state.global_step, Phase.BETWEEN)

    def on_train_end(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.mark(state.global_step, Phase.DONE)


class NewRandomState(TrainerCallback):
    """Seeds every worker at the first step after a checkpoint that another number of workers wrote.

    A saved random state is valid only for its rank and number of workers. Transformers would load it on the same rank,
    which now has other rows, and a rank without a saved state would repeat the random numbers of step 0.
    """

    def __init__(self, ctx: "TrainContext") -> None:
        found = Checkpoints.at(ctx.resume_from) if ctx.resume_from else None
        self.step = found.step if found and found.num_workers != ctx.world_size else None
        self.rank = ctx.rank

    def on_step_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        if state.global_step == self.step:
            seed_worker(args.seed, state.global_step, self.rank)


def seed_worker(seed: int, step: int, rank: int) -> None:
    """Seeds all random generators of a worker from the recipe's seed, the step and the rank."""
    set_seed(random.Random(f"{seed} {step} {rank}").getrandbits(32))


def require_agreement(policy: "Input", precision: str, log_ratios_R: "Tensor") -> None:
    """Requires that policy and reference give every answer the same log-probability at step 0.

    Args:
        log_ratios_R: log-probability of each answer under the policy minus that under the reference, in nats.
    """
    worst = float(log_ratios_R.abs().max())
    tolerance = TOLERANCE[precision] / PROOF_BETA
    if not worst <= tolerance:  # nan fails
        raise PipelineError(
            f"policy and reference differ at step 0: both must be {policy.name} ({policy.fingerprint[:16]}), but the "
            f"log-probability of an answer differs by {worst:.4g} nats; at most {tolerance:g} is accepted; the "
            "reference is not the stage's input policy: load it with run.model(...)"
        )


class StepZeroProof(TrainerCallback):
    """Fails a preference stage whose policy and reference did not agree before the first optimizer step.

    The rewards that the trainer logs must be 0, and a sigmoid loss ln 2. The auxiliary loss of a mixture of experts is
    subtracted from the loss first. A trainer that logs neither is not checked; a warning says so.
    """

    def __init__(self, trainer: "Trainer", policy: "Input", precision: str) -> None:
        self.trainer, self.policy = trainer, policy
        self.tolerance = TOLERANCE[precision]
        is_scaled = any(getattr(trainer.args, name, None) for name in ("loss_weights", "use_weighting"))
        self.is_sigmoid = getattr(trainer.args, "loss_type", None) in ("sigmoid", ["sigmoid"]) and not is_scaled

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if state.global_step != 1 or "loss" not in logs:
            return
        rewards = {name: logs[name] for name in REWARDS if name in logs}
        if not rewards and not self.is_sigmoid:
            logger.warning(
                "policy=%s step=0 reference=unproven: the trainer logs none of %s, and its loss_type is not sigmoid; "
                "log one of them, or give run.trl(...) a trainer with a parameter proof, and proof=run.start_proof()",
                self.policy.name, ", ".join(REWARDS),
            )  # fmt: skip
            return
        loss = logs["loss"] - getattr(self.trainer, "router_aux_loss_coef", 0.0) * logs.get("aux_loss", 0.0)
        # Written so that nan fails.
        is_off = self.is_sigmoid and not abs(loss - math.log(2)) <= self.tolerance
        if is_off or not all(abs(reward) <= self.tolerance for reward in rewards.values()):
            name = f"{self.policy.name} ({self.policy.fingerprint[:16]})"
            found = " ".join(f"{each}={reward:.4g}" for each, reward in rewards.items())
            raise PipelineError(
                f"policy and reference differ at step 0: both must be {name}, but {found} loss={loss:.6f}; rewards of "
                f"0 are accepted, and loss=ln 2={math.log(2):.6f} for loss_type=sigmoid; the reference is not the "
                "stage's input policy: load it with run.model(...)"
            )


def has_diverged(logs: dict[str, float]) -> bool:
    """Whether the loss or gradient norm of a step is non-finite, so that its weights must not be used."""
    return not (math.isfinite(logs["loss"]) and math.isfinite(logs["grad_norm"]))


def _unreported(logs: "Mapping[str, float]") -> frozenset[str]:
    return UNREPORTED - _COMPUTED_WITH_REWARDS if "reward" in logs else UNREPORTED


def step_metrics(log: "Sequence[Logs]", step: int) -> dict[str, float]:
    """Metrics of a step: means of the last steps up to it, and those that are its own, if they were measured.

    Args:
        log: entries by step, ascending.
    """
    end = bisect_right(log, step, key=itemgetter("step"))  # the log may be long, and callers ask for many steps
    steps = (log[index] for index in reversed(range(end)) if "loss" in log[index])
    last = list(islice(steps, WINDOW_STEPS))[::-1]
    left_out = {"step", "learning_rate", "num_tokens", *_OF_LAST}
    names = {name for entry in last for name in entry.keys() - _unreported(entry)} - left_out
    # A step whose answers are all desirable has no metric of the others.
    means = {name: fmean(float(entry[name]) for entry in last if name in entry) for name in sorted(names)}
    return {**means, **{name: float(last[-1][name]) for name in _OF_LAST if name in last[-1]}}


def summary(
    log: "Sequence[Logs]", seconds: float, speed: "Speed", *, num_steps: int, output_step: int
) -> dict[str, float]:
    """Final metrics of a training.

    Args:
        log: as for ``step_metrics``.
        num_steps: optimizer steps taken.
        output_step: the step whose model is the output.
    """
    num_tokens = float([entry for entry in log if "loss" in entry][-1]["num_tokens"])
    return {
        **step_metrics(log, output_step),
        "steps": float(num_steps),
        "num_tokens": num_tokens,
        "train_seconds": seconds,
        **speed.metrics(num_tokens / seconds if seconds else 0.0, num_tokens=num_tokens, num_steps=num_steps),
    }
