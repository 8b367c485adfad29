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
import random
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypedDict

import numpy as np
import torch
from transformers import Trainer, TrainingArguments

from lineage.checkpoints import Checkpoints
from lineage.errors import PipelineError, StoppedError
from tasks.train.kernels.machine import collecting_between_steps, deterministic_kernels, fast_products
from tasks.train.loop.callbacks import WINDOW_STEPS, Recorder, seed_worker, step_metrics, summary
from tasks.train.loop.checkpointing import Saver, divergence, last_saved, seconds_before
from tasks.train.loop.heartbeat import Phase
from tasks.train.optim.optimizers import install_optimizer
from tasks.train.optim.schedules import schedule_args
from tasks.train.run import trainer_args

if TYPE_CHECKING:
    from tasks.train.run import TrainingRun

_STATE, _RANDOM = "state.pt", "random-{rank}.pt"


class _RandomState(TypedDict):
    """State of all random generators, in types that ``torch.load`` reads without unpickling others."""

    python: tuple[int, tuple[int, ...], float | None]
    keys: list[int]  # of numpy's MT19937
    position: int
    has_gauss: int
    gauss: float
    torch: "torch.Tensor"
    cuda: "list[torch.Tensor]"


class Stateful(Protocol):
    """What is saved and loaded: a model, an optimizer, a schedule."""

    def state_dict(self) -> Mapping[str, object]: ...
    def load_state_dict(self, state: Mapping[str, object]) -> object: ...


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
        self.world_size = run.ctx.world_size

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""
        return float(self._trainer.lr_scheduler.get_last_lr()[0])

    def autocast(self) -> AbstractContextManager[None]:
        """Autocast for the forward pass, in the method's ``precision``."""
        context: AbstractContextManager[None] = self._trainer.accelerator.autocast()
        return context

    def step(self) -> float:
        """Updates the weights with the mean of the workers' gradients, and clears them.

        Returns:
            The norm of the gradients before clipping.
        """
        trainer = self._trainer
        parameters = [each for each in trainer.model.parameters() if each.grad is not None]
        if self.world_size > 1:
            for parameter in parameters:
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= self.world_size
        grad_norm = torch.nn.utils.clip_grad_norm_(parameters, trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()
        return float(grad_norm)

    def state_dict(self) -> Mapping[str, object]:
        return {"optimizer": self._trainer.optimizer.state_dict(), "schedule": self._trainer.lr_scheduler.state_dict()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        self._trainer.optimizer.load_state_dict(state["optimizer"])
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
        self._saver = Saver(run.ctx, run.method, self._seconds_before, len(run.rows))
        self._start = time.perf_counter()

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
                    self._save()
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
            raise PipelineError(f"{found}; {last_saved(self.ctx.checkpoints)}; {remedy}")
        self.num_tokens += num_tokens
        logs = {**metrics, "loss": loss, "grad_norm": grad_norm, "num_tokens": float(self.num_tokens)}
        self._log.append({**logs, "step": self.step + 1})
        self._recorder.record(self.step + 1, logs, self.run.device)

    def metrics(self) -> dict[str, float]:
        """Final metrics: means of the last steps, ``steps``, ``num_tokens``, ``train_seconds`` of all attempts."""
        seconds = self._seconds_before + time.perf_counter() - self._start
        return summary(self._log, seconds, self._speed, num_steps=self.step, output_step=self.step)

    def _save_or_stop(self) -> None:
        save, stop = self._saver.agreed(self.step, self.run.device)
        if save:
            self.ctx.mark(self.step, Phase.SAVING)
            self._save()
            self.ctx.mark(self.step, Phase.BETWEEN)
            self._saver.saved()
        if stop:
            raise StoppedError(f"stopped at step {self.step} of {self.run.num_steps}")

    def _save(self) -> None:
        draft = self.ctx.work_dir / f"own-loop-{self.step}"
        if self.ctx.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)  # of an attempt that was killed while it saved
            draft.mkdir(parents=True)
            states = {name: each.state_dict() for name, each in self.state.items()}
            done = {"step": self.step, "num_tokens": self.num_tokens, "log": list(self._log), "states": states}
            torch.save(done, draft / _STATE)
        self._wait()
        torch.save(_random_state(), draft / _RANDOM.format(rank=self.ctx.rank))
        self._wait()
        if self.ctx.rank == 0:
            self._saver.commit(draft, self.step, step_metrics(self._log, self.step))
        self._wait()

    def _resume(self) -> None:
        if self.ctx.resume_from is None:
            seed_worker(self.run.method.seed, self.step, self.ctx.rank)
            return
        done = torch.load(self.ctx.resume_from / _STATE, map_location=self.run.device, weights_only=True)
        for name, each in self.state.items():
            each.load_state_dict(done["states"][name])
        self.step, self.num_tokens = done["step"], done["num_tokens"]
        self._log.extend(done["log"])
        own = Path(self.ctx.resume_from, _RANDOM.format(rank=self.ctx.rank))
        if Checkpoints.at(self.ctx.resume_from).num_workers == self.ctx.world_size:
            _set_random_state(torch.load(own, weights_only=True))
        else:  # a saved state is valid only for its rank and number of workers
            seed_worker(self.run.method.seed, self.step, self.ctx.rank)

    def _wait(self) -> None:
        if self.ctx.world_size > 1:
            torch.distributed.barrier()


def _random_state() -> _RandomState:
    version, numbers, following = random.getstate()
    numpy = np.random.get_state(legacy=False)
    return {
        "python": (version, numbers, following),
        "keys": numpy["state"]["key"].tolist(),
        "position": int(numpy["state"]["pos"]),
        "has_gauss": int(numpy["has_gauss"]),
        "gauss": float(numpy["gauss"]),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _set_random_state(state: _RandomState) -> None:
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
    keys = np.array(state["keys"], dtype=np.uint32)
    np.random.set_state(("MT19937", keys, state["position"], state["has_gauss"], state["gauss"]))
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
