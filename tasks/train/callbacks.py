"""What a training says of its steps: reported one by one, and as means of the last; marks, and the proof of step 0."""

import logging
import math
import random
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

import psutil
import torch
from transformers import TrainerCallback, set_seed

from lineage.checkpoints import Checkpoints
from lineage.errors import PipelineError
from tasks.best import HELD_OUT_LOSS
from tasks.heartbeat import Doing

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

    from tasks.context import TrainContext
    from tasks.recipe import Input

logger = logging.getLogger(__name__)

# Not computed by the padding-free forward (they need the whole distribution of every token), or not about the step.
UNREPORTED = frozenset({"entropy", "logits/chosen", "logits/rejected", "epoch"})
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins")
# Largest implicit reward (beta x log-ratio) at step 0. Policy and reference run the same kernels, in fp32
# they differ by the order of additions; bf16 has 8 bits of it.
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
PROOF_BETA = 0.1  # of the implicit reward, where it is proven on log-ratios
WINDOW_STEPS = 10  # tokens per second are those of the last steps; the final loss is their mean


class StepCounts(TrainerCallback):
    """Counts the tokens of each step and keeps its gradient norm, whether or not the trainer logs them.

    It is the first to see a log, and adds to it what is lacking. The count goes on where a checkpoint's ended.
    """

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer = trainer
        self.num_tokens = 0
        self.new_tokens: list[Tensor] = []  # of the micro batches since the last log, on this worker
        self.grad_norm = math.nan
        self._step, self._norm = trainer.training_step, trainer._get_grad_norm
        trainer.training_step, trainer._get_grad_norm = self._counted_step, self._kept_norm

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        counts = [entry["num_tokens"] for entry in state.log_history if "num_tokens" in entry]
        self.num_tokens = int(counts[-1]) if counts else 0
        self.trainer._total_train_tokens = self.num_tokens  # TRL keeps none in a checkpoint

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        if "loss" not in logs:
            return
        if self.new_tokens:
            counted = torch.stack(self.new_tokens).sum()
            self.num_tokens += int(self.trainer.accelerator.reduce(counted, "sum").item())
            self.new_tokens.clear()
        else:  # it trains on what it generates: it alone can count it
            self.num_tokens = int(logs.get("num_tokens", self.num_tokens))
        logs["num_tokens"] = self.num_tokens
        logs.setdefault("grad_norm", self.grad_norm)
        state.log_history[-1] |= {name: logs[name] for name in ("num_tokens", "grad_norm")}

    def _counted_step(self, model: object, inputs: object, *args: object, **kwargs: object) -> "Tensor":
        """A micro batch; as a trainer's ``training_step``."""
        batch = inputs if isinstance(inputs, Mapping) else {}
        if "attention_mask" in batch:
            self.new_tokens.append(batch["attention_mask"].sum())
        elif "input_ids" in batch:
            self.new_tokens.append(batch["input_ids"].new_tensor(batch["input_ids"].numel()))
        return self._step(model, inputs, *args, **kwargs)

    def _kept_norm(self, *args: object, **kwargs: object) -> object:
        found = self._norm(*args, **kwargs)
        self.grad_norm = float(found)
        return found


class Recorder(TrainerCallback):
    """Hands every step's metrics to ``ctx.report``; a step without a loss that is a number is not reported."""

    def __init__(self, ctx: "TrainContext") -> None:
        self.report = ctx.report
        self.process = psutil.Process()
        self.window: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS + 1)  # (seconds, tokens so far)

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        counts = [float(entry["num_tokens"]) for entry in state.log_history if "num_tokens" in entry]
        self.window.append((time.perf_counter(), counts[-1] if counts else 0.0))

    def on_log(
        self,
        args: "TrainingArguments",
        state: "TrainerState",
        control: "TrainerControl",
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        if "loss" in logs and not has_diverged(logs):  # the summary after the last step has no loss
            self.record(state.global_step, logs, args.device)

    def record(self, step: int, logs: Mapping[str, float], device: torch.device) -> None:
        """Reports a step, with its speed and memory."""
        self.window.append((time.perf_counter(), float(logs["num_tokens"])))
        (start, tokens_before), (now, tokens) = self.window[0], self.window[-1]
        metrics = {name: float(value) for name, value in logs.items() if name not in UNREPORTED}
        speed = (tokens - tokens_before) / (now - start)
        self.report(step, {**metrics, "tokens_per_second": speed, "memory_gib": self.memory_gib(device)})

    def memory_gib(self, device: torch.device) -> float:
        """The most that was allocated on this worker's GPU so far; without one, what its process holds now."""
        if device.type == "cuda":
            return float(torch.cuda.max_memory_allocated(device)) / 2**30
        return float(self.process.memory_info().rss) / 2**30


class StepMarks(TrainerCallback):
    """Says on every worker that a step begins, goes on, or is done; ``Checkpointing`` says that it saves."""

    def __init__(self, ctx: "TrainContext") -> None:
        self.mark = ctx.mark

    def on_train_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.BETWEEN)

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.STEPPING)

    def on_substep_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.STEPPING)

    def on_step_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.BETWEEN)

    def on_train_end(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        self.mark(state.global_step, Doing.DONE)


class NewRandomState(TrainerCallback):
    """Seeds every worker at the first step after a checkpoint that another number of workers wrote.

    A saved state belongs to one rank of so many. Transformers would give it to the rank of that number, whatever
    rows it has now, and let a rank without one draw again what was drawn from step 0 on. The new state follows
    from the recipe's seed, the step and the rank alone.
    """

    def __init__(self, ctx: "TrainContext") -> None:
        found = Checkpoints.at(ctx.resume_from) if ctx.resume_from else None
        self.step = found.step if found and found.num_workers != ctx.world_size else None
        self.rank = ctx.rank

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        if state.global_step == self.step:
            set_seed(random.Random(f"{args.seed} {self.step} {self.rank}").getrandbits(32))


def require_agreement(policy: "Input", precision: str, log_ratios_R: "Tensor") -> None:
    """That the reference is the policy: at step 0 the two give every answer the same log-probability.

    Args:
        log_ratios_R: of policy and reference, summed over an answer, in nats.

    Raises:
        PipelineError: they differ, or are non-finite.
    """
    worst = float(log_ratios_R.abs().max())
    tolerance = TOLERANCE[precision] / PROOF_BETA
    if not worst <= tolerance:  # nan fails
        raise PipelineError(
            f"policy and reference differ at step 0: both must be {policy.name} ({policy.fingerprint[:16]}), and the "
            f"log-probability of an answer differs by {worst:.4g} nats, {tolerance:g} are accepted; the reference is "
            "not the policy that the stage was given"
        )


class StepZeroProof(TrainerCallback):
    """Fails a preference stage whose policy and reference did not agree before the first optimizer step.

    Of the loss only the preference loss is proven: that of a mixture of experts holds its routers' loss too.

    It reads the rewards that the trainer logs, which are 0, and the sigmoid loss, which is ln 2. A trainer that has
    neither cannot be proven: that is logged as a warning.
    """

    def __init__(self, trainer: "Trainer", policy: "Input", precision: str) -> None:
        self.trainer, self.policy = trainer, policy
        self.tolerance = TOLERANCE[precision]
        is_scaled = any(getattr(trainer.args, name, None) for name in ("loss_weights", "use_weighting"))
        self.is_sigmoid = getattr(trainer.args, "loss_type", None) in ("sigmoid", ["sigmoid"]) and not is_scaled

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
        rewards = {name: logs[name] for name in REWARDS if name in logs}
        if not rewards and not self.is_sigmoid:
            logger.warning(
                "policy=%s step=0 reference=unproven: the trainer logs none of %s, and its loss_type is not sigmoid; "
                "log one of them, or give run.trl(...) a trainer with a parameter proof, and proof=run.start_proof()",
                self.policy.name, ", ".join(REWARDS),
            )  # fmt: skip
            return
        loss = logs["loss"] - getattr(self.trainer, "router_aux_loss_coef", 0.0) * logs.get("aux_loss", 0.0)
        # Written so that nan fails: it is neither above nor below the tolerance.
        is_off = self.is_sigmoid and not abs(loss - math.log(2)) <= self.tolerance
        if is_off or not all(abs(reward) <= self.tolerance for reward in rewards.values()):
            name = f"{self.policy.name} ({self.policy.fingerprint[:16]})"
            found = " ".join(f"{each}={reward:.4g}" for each, reward in rewards.items())
            raise PipelineError(
                f"policy and reference differ at step 0: both must be {name}, and {found} loss={loss:.6f} (0, 0 and "
                f"ln 2 = {math.log(2):.6f} for loss_type=sigmoid); the reference is not the policy that the stage was "
                "given"
            )


def has_diverged(logs: dict[str, float]) -> bool:
    """Whether a step's loss or gradient is no number: its weights are not to be used."""
    return not (math.isfinite(logs["loss"]) and math.isfinite(logs["grad_norm"]))


def step_metrics(state: "TrainerState", step: int) -> dict[str, float]:
    """Metrics of a step: the means of the last ones up to it, and its loss on held-out rows where it was measured."""
    log = state.log_history  # may be long, and is asked of many steps
    end = bisect_right(log, step, key=itemgetter("step"))
    steps = (log[index] for index in reversed(range(end)) if "loss" in log[index])
    last = list(islice(steps, WINDOW_STEPS))[::-1]
    names = last[-1].keys() - UNREPORTED - {"step", "learning_rate", "num_tokens", HELD_OUT_LOSS}
    means = {name: sum(float(entry[name]) for entry in last) / len(last) for name in sorted(names)}
    held_out = {HELD_OUT_LOSS: float(last[-1][HELD_OUT_LOSS])} if HELD_OUT_LOSS in last[-1] else {}
    return {**means, **held_out}


def summary(state: "TrainerState", seconds: float, step: int) -> dict[str, float]:
    """Final metrics of a training from the log of its steps.

    Args:
        step: whose model is the output.
    """
    num_tokens = float([entry for entry in state.log_history if "loss" in entry][-1]["num_tokens"])
    return {
        **step_metrics(state, step),
        "steps": float(state.global_step),
        "num_tokens": num_tokens,
        "train_seconds": seconds,
        "tokens_per_second": num_tokens / seconds if seconds else 0.0,
    }
