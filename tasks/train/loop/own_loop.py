"""Resume, report, stop and save for a loop that is not transformers', and the optimizer that its method sets.

optimization = Optimization(run, model)
loop = OwnLoop(run, {"model": model, "optimization": optimization})
for step in loop.steps():
    with optimization.autocast():
        loss = ...
    loss.backward()
    loop.report(loss=float(loss), num_tokens=num_tokens, grad_norm=optimization.step())
return loop.metrics()
"""

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from typing import TYPE_CHECKING, cast

import torch
from transformers import Trainer, TrainingArguments

from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError, PipelineError, StoppedError
from tasks.train.generation.one_policy import unmoved, weights_of
from tasks.train.kernels.machine import collecting_between_steps, deterministic_kernels, fast_products
from tasks.train.loop.callbacks import WINDOW_STEPS, Recorder, seed_worker, step_metrics, summary
from tasks.train.loop.checkpointing import Saver, divergence, seconds_before
from tasks.train.loop.heartbeat import Phase
from tasks.train.loop.saved_state import (
    RandomState,
    Stateful,
    TrainingState,
    random_state,
    read_own,
    read_state,
    set_random_state,
)
from tasks.train.optim.optimizers import install_optimizer
from tasks.train.optim.schedules import schedule_args
from tasks.train.run import trainer_args
from tasks.train.sharding import exchange, in_parts, optimizer_in_parts

if TYPE_CHECKING:
    from tasks.train.run import TrainingRun


class Optimization:
    """The optimizer, schedule, precision and clipping that a method sets: those of transformers' trainer.

    A method that uses it sets ``applies: ClassVar = LOOP_FIELDS``.

    Args:
        updates_per_step: calls of ``step`` in each step of the loop, such as the minibatches of PPO.
    """

    def __init__(self, run: "TrainingRun", model: torch.nn.Module, updates_per_step: int = 1) -> None:
        known = {each.name for each in fields(TrainingArguments) if each.init}
        method = run.method
        shared = {
            **trainer_args(method, run.ctx, run.num_steps),
            **schedule_args(method.schedule, method.learning_rate, run.num_steps, updates_per_step),
        }
        args = TrainingArguments(**{name: value for name, value in shared.items() if name in known})
        self._trainer = Trainer(model=model, args=args)
        install_optimizer(self._trainer, method.optimizer, method.learning_rate)
        self._trainer.create_optimizer_and_scheduler(run.num_steps * updates_per_step)
        self.world_size, self._name = run.ctx.world_size, method.optimizer.name

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._trainer.lr_scheduler.get_last_lr()[0])

    def autocast(self) -> AbstractContextManager[None]:
        """Autocast for the forward pass, in the method's ``precision``."""
        context: AbstractContextManager[None] = self._trainer.accelerator.autocast()
        return context

    def step(self, norm: float | None = None, **changed: object) -> float:
        """Updates the weights with the mean of the workers' gradients, and clears them; non-finite ones update nothing.

        Args:
            norm: of gradients that the workers have exchanged already; None: not yet.
            changed: settings of this update alone: ``max_grad_norm`` (0: no clipping), and of the optimizer's groups.

        Returns:
            The norm of the gradients before clipping.
        """
        trainer = self._trainer
        limit = cast(float, changed.pop("max_grad_norm", trainer.args.max_grad_norm)) or math.inf
        groups = trainer.optimizer.param_groups
        if unknown := sorted(changed.keys() - groups[0].keys()):
            raise ConfigError(f"{unknown[0]}: the optimizer {self._name} has no such setting; leave it out")
        if norm is None:
            if self.world_size > 1:
                exchange(each for each in trainer.model.parameters() if each.requires_grad)
            grad_norm = float(trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), limit))
        elif (grad_norm := norm) > limit:  # as torch's clip_grad_norm_
            for each in (each for group in groups for each in group["params"] if each.grad is not None):
                each.grad.mul_(limit / (norm + 1e-6))
        if math.isfinite(grad_norm):
            own = [{name: group[name] for name in changed} for group in groups]
            for group in groups:
                group.update(changed)
            trainer.optimizer.step()
            for group, values in zip(groups, own, strict=True):
                group.update(values)
            trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()
        return grad_norm

    def state_dict(self) -> Mapping[str, object]:
        return {"optimizer": self._trainer.optimizer.state_dict(), "schedule": self._trainer.lr_scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        optimizer = self._trainer.optimizer
        optimizer.load_state_dict(
            optimizer_in_parts(cast("dict[str, dict[int, dict[str, torch.Tensor]]]", state["optimizer"]), optimizer)
        )
        self._trainer.lr_scheduler.load_state_dict(state["schedule"])


class OwnLoop:
    """The steps of one training.

    Args:
        state: everything that changes between steps, except the random state, by name; equal on all workers.

    Attributes:
        step: number of completed optimizer steps.
        num_tokens: tokens reported so far, over all workers.
    """

    def __init__(self, run: "TrainingRun", state: Mapping[str, Stateful]) -> None:
        self.run, self.ctx, self.state = run, run.ctx, state
        self.step, self.num_tokens = 0, 0
        self._speed = run.speed
        self._recorder = Recorder(run.ctx, self._speed)
        self._log: deque[dict[str, float]] = deque(maxlen=WINDOW_STEPS)
        self._seconds_before = seconds_before(run.ctx)
        self._saver = run.saver = Saver(run.ctx, run.method, self._seconds_before, len(run.rows))
        self._first, self._start = weights_of(run.policy.model), time.perf_counter()

    def steps(self) -> Iterator[int]:
        """The remaining steps, counted from 0; ``report`` must be called in each.

        Raises:
            StoppedError: the stage was asked to end; a checkpoint is committed.
            PipelineError: an operation has no deterministic kernel, which ``deterministic`` forbids.
        """
        num_steps = self.run.num_steps
        self._resume()
        self._saver.begin(self.step)
        fast = fast_products(self.run.method.precision, on_gpu=self.ctx.resources.gpus_per_worker > 0)
        collecting = collecting_between_steps(enabled=self.ctx.resources.gpus_per_worker > 0)
        with deterministic_kernels(self.ctx.resources.is_deterministic), fast, collecting as collect:
            self._recorder.begin(float(self.num_tokens))
            self._start = time.perf_counter()
            while self.step < num_steps:
                self.ctx.mark(self.step, Phase.STEPPING)
                yield self.step
                empty = self.ctx.resources.empty_cache_steps
                if empty and (self.step + 1) % empty == 0:
                    torch.cuda.empty_cache()
                if not self._log or self._log[-1]["step"] != self.step + 1:
                    raise PipelineError(f"step {self.step + 1} was not reported; call report(...) in each step")
                self.step += 1
                collect()
                self.ctx.mark(self.step, Phase.BETWEEN)
                if self.step < num_steps:  # the last one is saved as the output
                    self._save_or_stop()
                elif self._saver.saves_last(self.run.device):
                    self._save(waits=True)
            self._saver.finish()
        self.ctx.mark(self.step, Phase.DONE)

    def report(self, *, loss: float, num_tokens: int, grad_norm: float, **metrics: float) -> None:
        """Reports the current step.

        Args:
            num_tokens: of this step, over all workers.
            grad_norm: before clipping.

        Raises:
            PipelineError: the loss or the norm is non-finite.
        """
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            method = self.run.method
            found, remedy = divergence(self.step + 1, loss, grad_norm, method.learning_rate, method.max_grad_norm)
            raise PipelineError(f"{found}; {self._saver.last_good()}; {remedy}")
        self.num_tokens += num_tokens
        logs = {**metrics, "loss": loss, "grad_norm": grad_norm, "num_tokens": float(self.num_tokens)}
        self._log.append({**logs, "step": self.step + 1})
        self._recorder.record(self.step + 1, logs, self.run.device)

    def metrics(self) -> dict[str, float]:
        """Final metrics: means of the last steps, ``steps``, ``num_tokens``, ``train_seconds`` of all attempts."""
        seconds = self._seconds_before + time.perf_counter() - self._start
        found = summary(self._log, seconds, self._speed, num_steps=self.step, output_step=self.step)
        return found | unmoved(self.run.policy.model, self._first)

    def _save_or_stop(self) -> None:
        save, stop = self._saver.agreed(self.step, self.run.device)
        if save:
            self._save(waits=stop)
        if stop:
            raise StoppedError(f"stopped at step {self.step} of {self.run.num_steps}")

    def _save(self, *, waits: bool) -> None:
        self.ctx.mark(self.step, Phase.SAVING)
        states = {name: each.state_dict() for name, each in self.state.items()}
        done = {"step": self.step, "num_tokens": self.num_tokens, "log": list(self._log), "states": states}
        state = TrainingState(shared=done, own={"random": random_state()})
        self._saver.save(self.step, state, step_metrics(self._log, self.step), waits=waits)
        self.ctx.mark(self.step, Phase.BETWEEN)
        self._saver.saved()

    def _resume(self) -> None:
        folder = self.ctx.resume_from
        if folder is None:
            seed_worker(self.run.method.seed, self.step, self.ctx.rank)
            return
        done = read_state(folder, self.ctx.rank)
        states = cast("Mapping[str, Mapping[str, object]]", done["states"])
        for name, each in self.state.items():
            state = states[name]
            each.load_state_dict(in_parts(state, each) if isinstance(each, torch.nn.Module) else state)
        self.step, self.num_tokens = cast(int, done["step"]), cast(int, done["num_tokens"])
        self._log.extend(cast("list[dict[str, float]]", done["log"]))
        if Checkpoints.at(folder).num_workers == self.ctx.world_size:
            set_random_state(cast(RandomState, read_own(folder, self.ctx.rank)["random"]))
        else:  # a saved state is valid only for its rank and number of workers
            seed_worker(self.run.method.seed, self.step, self.ctx.rank)
