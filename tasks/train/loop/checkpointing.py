"""When a training saves and stops, at the same step on all workers, and who writes its checkpoints.

A save copies the weights to host memory; the training continues, and a thread copies the state of the optimizer before
that steps again, writes the copies, digests them, waits for the disk and publishes them.
"""

import copy
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from errno import EDQUOT, ENOSPC
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import peft
import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from lineage.checkpoints import NOT_SENT, Checkpoint, Checkpoints, Mirror
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.files import atomic_write
from lineage.secrets import first_line
from tasks.context import Metrics, TrainContext
from tasks.train.best import HELD_OUT_LOSS, completes_epochs, kept_steps
from tasks.train.loop.callbacks import step_metrics
from tasks.train.loop.heartbeat import Phase
from tasks.train.loop.saved_state import (
    Chunk,
    Divided,
    Draft,
    HasOwnState,
    HasState,
    InMemory,
    RandomState,
    Staging,
    TrainingState,
    held_here,
    is_ours,
    load_named_state,
    named_state,
    own_file,
    random_state,
    read_own,
    read_state,
    read_tensors,
    schedule_of,
    set_random_state,
)
from tasks.train.optim.optimizers import OPTIMIZERS
from tasks.train.optim.own_optimizers import averaged
from tasks.train.sharding import OWN, STATE, gather_again, zero_stage, zero_weights

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    from tasks.recipe import TrainingRecipe

    Logs = dict[str, float]


class Scoring(Protocol):
    """Has committed checkpoints scored."""

    @property
    def reads(self) -> set[int]:
        """Steps whose files must stay."""

    def committed(self, step: int) -> None:
        """Has it scored where it is due."""

    def end(self) -> None:
        """Scores no more."""


logger = logging.getLogger(__name__)
# Files of DeepSpeed's saves that nothing reads: their content is in the recipe and the manifest.
_UNREAD = ("training_args.bin", "zero_to_fp32.py", "zero_to_torch.py")
_WRITTEN = ".written-{rank}"  # in a draft: what a worker has written, with digests
_POLL_SECONDS, _GRACE_SECONDS = 0.05, 5.0
_NICENESS = 10  # of the thread that writes: the training comes first


class Uploads:
    """Copies checkpoints to their mirror beside the training, one at a time; of those that wait, only the newest.

    Args:
        note: a file that says what the mirror lacks, for who reports how the training ended; there is none if nothing.
    """

    def __init__(self, mirror: Mirror, store: Checkpoints, note: Path) -> None:
        self.mirror, self.store, self.note = mirror, store, note
        note.unlink(missing_ok=True)
        self._lock = threading.Lock()
        self._waiting: tuple[Checkpoint, Sequence[int]] | None = None
        self._sending: int | None = None
        self._thread: threading.Thread | None = None
        self._cancelled = threading.Event()
        self._last: int | None = None

    def add(self, record: Checkpoint, kept: Sequence[int]) -> None:
        """Has a committed checkpoint sent; the mirror then keeps the same steps as the store."""
        with self._lock:
            self._waiting = (record, kept)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._send, name="checkpoint mirror", daemon=True)
                self._thread.start()

    @property
    def reads(self) -> list[int]:
        """Steps whose files must stay."""
        with self._lock:
            waiting = [self._waiting[0].step] if self._waiting else []
            return [*waiting, *([] if self._sending is None else [self._sending])]

    def wait(self, *, cancel: bool = False) -> None:
        """Waits until all are sent; ``cancel`` sends no further byte."""
        if cancel:
            self._cancelled.set()
        if self._thread:
            self._thread.join()

    def _send(self) -> None:
        yield_to_training()
        while True:
            with self._lock:
                self._sending = None
                if self._waiting is None or self._cancelled.is_set():
                    self._thread = None
                    return
                (record, kept), self._waiting = self._waiting, None
                self._sending = record.step
            start = time.monotonic()
            try:
                if self.mirror.push(self.store.path(record.step), record, self._cancelled.is_set):
                    self._last = record.step
                    self.note.unlink(missing_ok=True)
                    self.mirror.keep(kept)
                    seconds = time.monotonic() - start
                    logger.info("step=%d mirror=%s state=sent seconds=%.1f", record.step, self.mirror.url, seconds)
            except Exception as error:  # of a file system's own library: no common base
                last = "it has none of this run" if self._last is None else f"its last good one is of step {self._last}"
                cause = f"({first_line(error)}): {last}"
                logger.warning(
                    "step=%d mirror=%s state=not sent %s; the store has it, and the next one is tried again: see that "
                    "the mirror can be written", record.step, self.mirror.url, cause,
                )  # fmt: skip
                with suppress(OSError):
                    atomic_write(
                        self.note, f"its checkpoint of step {record.step} was not sent to {self.mirror.url} {cause}"
                    )


def yield_to_training() -> None:
    """Gives this thread less of the CPUs than the training has."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class Saver:
    """Decides when a training saves and stops, writes its checkpoints, and decides which are kept; for any loop.

    One checkpoint is written at a time: the next save waits for it.

    Args:
        method: its ``best`` says which models compete for the output; the best of them is kept.
        seconds_before: training time of earlier attempts.
        num_rows: number of rows in an epoch.
    """

    def __init__(self, ctx: TrainContext, method: "TrainingRecipe", seconds_before: float, num_rows: int) -> None:
        self.ctx, self.method, self.seconds_before, self.num_rows = ctx, method, seconds_before, num_rows
        self.store = ctx.checkpoints
        self.start = self.last_save = time.monotonic()
        self._staging = Staging()
        self._writer: threading.Thread | None = None
        self._copied = threading.Event()
        self._staged: tuple[int, int, float] | None = None  # step, bytes and seconds of a copy that is not logged yet
        self._failed: tuple[int, BaseException] | None = None  # step and cause
        self._gives_up = threading.Event()
        mirror = ctx.resources.checkpoint_mirror
        self.scoring: Scoring | None = None
        self._uploads: Uploads | None = None
        if mirror and self.store and ctx.rank == 0:
            copies = Mirror(mirror, self.store.directory.parent)
            self._uploads = Uploads(copies, self.store, ctx.work_dir / NOT_SENT)

    def begin(self, step: int) -> None:
        """Starts the clock, and deletes checkpoints after the step: a resume from an earlier one means damage."""
        self.start = self.last_save = time.monotonic()
        if self.store and self.ctx.rank == 0:
            self.store.keep(each for each in self.store.steps() if each <= step)

    def agreed(self, step: int, device: torch.device) -> tuple[bool, bool]:
        """Whether to save and to stop after this step; rank 0 decides, so that all workers do it at the same step.

        Raises:
            PipelineError, OSError: the checkpoint before could not be written.
        """
        self._require_written()
        stop = self.ctx.rank == 0 and self.ctx.should_stop()
        flags = torch.tensor([self._is_due(step), stop], dtype=torch.int32, device=device)
        if self.ctx.world_size > 1:
            torch.distributed.broadcast(flags, src=0, group=self.ctx.all_workers)
        save, stop = (bool(flag) for flag in flags.tolist())
        return (save or stop) and self.store is not None, stop

    def saves_last(self, device: torch.device) -> bool:
        """Whether to save after the last step, which is the output, too: the output may need a model that changed."""
        changed = torch.tensor(self.ctx.rank == 0 and bool(self.ctx.changed_models()), dtype=torch.int32, device=device)
        if self.ctx.world_size > 1:
            torch.distributed.broadcast(changed, src=0, group=self.ctx.all_workers)
        return bool(changed) and self.store is not None

    def save(self, step: int, state: TrainingState, metrics: Metrics, *, waits: bool = False) -> None:
        """Copies the state, and has it written while the training continues.

        Args:
            waits: returns when the checkpoint is published; nothing is copied then.

        Raises:
            PipelineError, OSError: this checkpoint or the one before could not be written.
        """
        start = time.monotonic()
        self.wait()
        folder = self.new_draft(step)
        divided = Divided(state.parameters)
        trees: dict[str, object] = {} if self.ctx.rank else {STATE: divided.divide(state.shared)}
        if self.ctx.rank:
            divided.divide(state.shared)
        own = Divided({}, in_one=True).divide({**state.own, **({"divided": divided.own} if divided.own else {})})
        tensors = {state.model_file: state.model, "state": divided.tensors}
        is_divided = any(isinstance(each, DTensor) for group in tensors.values() for each in group.values())
        held = {name: self._held_here(each) for name, each in tensors.items()}
        num_bytes = sum(each.tensor.nbytes for group in held.values() for each in group.values())
        copies = not waits and self._copies(num_bytes)
        draft = Draft(
            folder=folder,
            record=self.record(step, metrics, can_move=not divided.own and not (self.ctx.islands and is_divided)),
            tensors={
                self._file_of(name, is_divided): self._staging.copies(name, group, state.idle) if copies else group
                for name, group in held.items() if group
            },
            trees={**trees, OWN.format(rank=self.ctx.rank): own},
            texts={} if self.ctx.rank else state.texts, described=None if self.ctx.rank else state.described,
            is_divided=is_divided,
        )  # fmt: skip
        if not copies:
            self._publish(draft)
            if waits and self._uploads:
                self._uploads.wait()
            return
        if any(each.tensor.is_cuda for group in held.values() for each in group.values()):
            torch.cuda.synchronize()
        self._copied.clear()
        self._staged, is_whole = (step, num_bytes, time.monotonic() - start), not self._staging.left
        self._writer = threading.Thread(target=self._write, args=(draft,), name="checkpoint", daemon=True)
        self._writer.start()
        if is_whole:
            self.copied()

    def copied(self) -> None:
        """Waits until the state that was idle since the save is copied: it may change then."""
        if self._staged:
            (step, num_bytes, seconds), start, self._staged = self._staged, time.monotonic(), None
            self._copied.wait()
            seconds += time.monotonic() - start
            logger.info("step=%d state=staged bytes=%d seconds=%.2f", step, num_bytes, seconds)

    def wait(self) -> None:
        """Waits until the checkpoint that is being written is published.

        Raises:
            PipelineError, OSError: it could not be written.
        """
        self.copied()
        if self._writer:
            start = time.monotonic()
            self._writer.join()
            if time.monotonic() - start > 1:
                logger.info("waited_seconds=%.1f for the checkpoint before", time.monotonic() - start)
            self._writer = None
        self._require_written()

    def finish(self) -> None:
        """After the last step: waits for the checkpoint that is being written, and sends no more to the mirror.

        Raises:
            PipelineError, OSError: it could not be written.
        """
        self.wait()
        if self._uploads:
            self._uploads.wait(cancel=True)

    def settle(self) -> None:
        """After a failure of the training: publishes what is being written, unless another worker does not write."""
        self._gives_up.set()
        if self.scoring:
            self.scoring.end()
        if self._writer:
            self._writer.join()
        if self._uploads:
            self._uploads.wait(cancel=True)

    def last_good(self) -> str:
        """The checkpoint that a diverged training would resume from, for messages."""
        with suppress(PipelineError, OSError):
            self.wait()
        last = self.store.newest() if self.store else None
        if last is None:
            return "nothing was saved"
        loss = f" (loss={last.metrics['loss']:.4g})" if "loss" in last.metrics else ""
        return (
            f"its last good checkpoint is that of step {last.step}{loss}, and the same recipe would diverge from there"
        )

    def new_draft(self, step: int) -> Path:
        """An empty directory in which all workers write."""
        folder = self.ctx.work_dir / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        if self.ctx.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed while it saved
            folder.mkdir(parents=True)
        self.meet()
        return folder

    def meet(self) -> None:
        """Waits for all workers."""
        if self.ctx.world_size > 1:
            torch.distributed.barrier(group=self.ctx.all_workers)

    def record(self, step: int, metrics: Metrics, *, can_move: bool = True) -> Checkpoint:
        """What is recorded of a checkpoint at this moment."""
        resources = self.ctx.resources
        return Checkpoint(
            step=step, time=time.time(), train_seconds=self.seconds_before + time.monotonic() - self.start,
            num_workers=self.ctx.world_size, zero_stage=zero_stage(resources), sharding=resources.sharding,
            can_move=can_move,
            micro_batch_size=None if resources.micro_batch_size == "auto" else resources.micro_batch_size,
            cpus_per_worker=resources.cpus_per_worker, metrics=metrics,
        )  # fmt: skip

    def commit(self, draft: Path, record: Checkpoint, digests: Mapping[str, str] | None = None) -> None:
        """Publishes a draft that all workers have written; rank 0 calls it."""
        assert self.store is not None
        resources = self.ctx.resources
        path = self.store.commit(draft, replace(record, time=time.time()), digests)
        kept = kept_steps(self.store.records(), resources.keep_last, resources.keep_best, self.method.best)
        if self._uploads:
            self._uploads.add(self.store.read(record.step), sorted(kept))
        if self.scoring:
            self.scoring.committed(record.step)
            kept |= self.scoring.reads
        self.store.keep([*kept, *(self._uploads.reads if self._uploads else ())])
        logger.info("checkpoint=%s state=committed", path)

    def saved(self) -> None:
        """Restarts the clock for the next checkpoint."""
        self.last_save = time.monotonic()

    def _held_here(self, tensors: "Mapping[str, Tensor]") -> dict[str, Chunk]:
        if self.ctx.islands and self.ctx.islands.index:  # an island's own are in the files of its workers
            return {}
        found = {key: held_here(each, self.ctx.rank) for key, each in tensors.items()}
        return {key: each for key, each in found.items() if each}

    def _file_of(self, name: str, is_divided: bool) -> str:
        part = f"-{self.ctx.rank + 1:05}-of-{self.ctx.world_size:05}" if is_divided else ""
        return f"{name}{part}.safetensors"

    def _copies(self, num_bytes: int) -> bool:
        wanted = self.ctx.resources.save_async
        if wanted != "auto":
            return wanted
        fits = self._staging.fits(num_bytes)
        if not fits:
            logger.warning("save_async=auto: no memory for a copy of %d bytes; the training waits for it", num_bytes)
        return fits

    def _write(self, draft: Draft) -> None:
        """Runs in the thread."""
        yield_to_training()
        try:
            try:
                self._staging.copy_left()
            finally:
                self._copied.set()
            self._publish(draft)
        except BaseException as error:
            self._failed = (draft.record.step, error)
            logger.error("step=%d state=not written: %s: %s", draft.record.step, type(error).__name__, error)

    def _publish(self, draft: Draft) -> None:
        start = time.monotonic()
        marker = draft.folder / _WRITTEN.format(rank=self.ctx.rank)
        try:
            digests = draft.write()
        except OSError as error:
            if self.ctx.world_size > 1:
                with suppress(OSError):
                    atomic_write(marker, json.dumps({"error": f"{type(error).__name__}: {error}"}))
            raise
        if self.ctx.world_size > 1:
            atomic_write(marker, json.dumps(digests))
        if self.ctx.rank == 0:
            self.commit(draft.folder, draft.record, digests | self._of_others(draft))
            logger.info("step=%d state=written seconds=%.1f", draft.record.step, time.monotonic() - start)

    def _of_others(self, draft: Draft) -> dict[str, str]:
        """What the workers have written, once all have."""
        digests: dict[str, str] = {}
        for rank in range(self.ctx.world_size if self.ctx.world_size > 1 else 0):
            marker = draft.folder / _WRITTEN.format(rank=rank)
            waited = 0.0
            while not marker.exists():
                waited += _POLL_SECONDS if self._gives_up.wait(_POLL_SECONDS) else 0.0
                if waited:
                    time.sleep(_POLL_SECONDS)
                if waited > _GRACE_SECONDS:
                    raise PipelineError(f"worker {rank} did not write its part of step {draft.record.step}")
            digests |= json.loads(marker.read_text())
            marker.unlink()
        if "error" in digests:
            raise PipelineError(
                f"a worker could not write its part of step {draft.record.step} ({digests['error']}); {self._kept()}"
            )
        return digests

    def _kept(self) -> str:
        last = self.store.newest() if self.store else None
        return f"its checkpoint of step {last.step} is kept" if last else "it has no checkpoint"

    def _require_written(self) -> None:
        if self._failed is None:
            return
        step, error = self._failed
        if isinstance(error, OSError) and error.errno not in (ENOSPC, EDQUOT):  # those are explained further up
            raise PipelineError(
                f"the checkpoint of step {step} could not be written ({type(error).__name__}: {error}); "
                f"{self._kept()}; see that {self.ctx.work_dir} can be written, and run again, which resumes from there"
            ) from error
        raise error

    def _is_due(self, step: int) -> bool:
        resources = self.ctx.resources
        by_step = resources.save_steps is not None and step % resources.save_steps == 0
        by_epoch = resources.save_epochs is not None and completes_epochs(
            resources.save_epochs, step, self.num_rows, self.method.rows_per_step
        )
        waited = time.monotonic() - self.last_save
        return by_step or by_epoch or (resources.save_minutes is not None and waited >= 60 * resources.save_minutes)


# What a checkpoint of a trainer replaces of transformers' methods.
_REPLACED = (
    "_save_checkpoint", "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_scaler", "_load_rng_state",
)  # fmt: skip


class Checkpointing(TrainerCallback):
    """Saves and loads the state of a trainer of transformers; under DeepSpeed in DeepSpeed's own files.

    Attributes:
        stopped_at: the step after which a stop request ended the training; None: there was none.
        best_step: the step of the best model; None: there is none.
    """

    def __init__(self, trainer: "Trainer", ctx: TrainContext, method: "TrainingRecipe", saver: Saver) -> None:
        self.trainer, self.ctx, self.method, self.saver = trainer, ctx, method, saver
        self.stopped_at: int | None = None
        self.best_step: int | None = None
        self._in_memory: InMemory | None = None  # of the best step
        self.metrics_known = False
        self._of_transformers: dict[str, Callable[..., None]] = {}
        self._described: Path | None = None

    def install(self) -> None:
        """Replaces the trainer's own saves and loads."""
        for name in _REPLACED:
            self._of_transformers[name] = getattr(self.trainer, name)
            setattr(self.trainer, name, getattr(self, name))

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.saver.begin(state.global_step)

    def on_step_end(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        if state.global_step >= state.max_steps:
            control.should_save = self.saver.saves_last(self.trainer.args.device)
            return
        control.should_save, stop = self.saver.agreed(state.global_step, self.trainer.args.device)
        if stop:
            self.stopped_at = state.global_step
            control.should_training_stop = True

    def on_pre_optimizer_step(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.saver.copied()

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        """Refuses a ``best`` metric that the first step does not report; only warns for ``keep_best``."""
        if control.should_save:  # already decided; the save is next
            self.ctx.mark(state.global_step, Phase.SAVING)
        if "loss" not in logs or self.metrics_known:
            return
        found = set(step_metrics(state.log_history, state.global_step))
        best = self.method.best
        if self.method.validation or (best and best.metric == HELD_OUT_LOSS):
            found.add(HELD_OUT_LOSS)
        known = f"is not measured; measured are: {', '.join(sorted(found))}"
        if best and best.metric not in found:
            raise ConfigError(f"{best.key}.metric={best.metric}: {known}; set one of them")
        keep_best = self.ctx.resources.keep_best
        if keep_best and keep_best.metric not in found:
            logger.warning("%s.metric=%s: %s; no checkpoint is kept for it", keep_best.key, keep_best.metric, known)
        self.metrics_known = True

    def on_save(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self.ctx.mark(state.global_step, Phase.BETWEEN)
        self.saver.saved()

    def _save_checkpoint(self, *args: object, **kwargs: object) -> None:
        """Saves the model that would be the output now."""
        state = self.trainer.state
        step, metrics = state.global_step, step_metrics(state.log_history, state.global_step)
        with averaged(self.trainer.optimizer):
            if self.trainer.is_deepspeed_enabled:
                self._save_of_deepspeed(step, metrics, *args, **kwargs)
                return
            waits, found = self.stopped_at is not None or step >= state.max_steps, self._state()
            if self.ctx.resources.rollback != "disk" and step == self.best_step:
                self._in_memory = InMemory.of(step, found, on_device=self.ctx.resources.rollback == "device")
            self.saver.save(step, found, metrics, waits=waits)

    def _save_of_deepspeed(self, step: int, metrics: Metrics, *args: object, **kwargs: object) -> None:
        """As transformers does; the training waits for it."""
        draft = self.saver.new_draft(step)
        if zero_stage(self.ctx.resources) == 3:
            engine = self.trainer.deepspeed
            engine._zero3_consolidated_16bit_state_dict = partial(zero_weights, self.trainer, self.ctx.work_dir)
        self._of_transformers["_save_checkpoint"](*args, **kwargs)
        if own := self._own_states():
            torch.save(own, own_file(draft, self.ctx.rank))
        self.saver.meet()
        if self.ctx.rank == 0:
            if self.ctx.islands:
                self.ctx.islands.collect(draft)
            for path in (path for name in _UNREAD for path in draft.rglob(name)):
                path.unlink()
            self.saver.commit(draft, self.saver.record(step, metrics))
        self.saver.meet()

    def _state(self) -> TrainingState:
        gather_again(self.trainer.model)
        trainer, parameters = self.trainer, dict(self.trainer.model.named_parameters())
        scaler = trainer.accelerator.scaler
        shared: dict[str, object] = {
            "optimizer": named_state(trainer.optimizer, {id(each): name for name, each in parameters.items()}),
            "schedule": trainer.lr_scheduler.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            **{name: cast(HasState, each).saved_state() for name, each in self._holders(HasState)},
        }
        is_adapter = isinstance(trainer.model, peft.PeftModel)
        return TrainingState(
            shared=shared, own={"random": random_state(), **self._own_states()}, parameters=parameters,
            model=self._model_tensors(), model_file="adapter_model" if is_adapter else "model",
            idle="" if OPTIMIZERS[self.method.optimizer.name].in_backward else "optimizer",
            texts={TRAINER_STATE_NAME: self._trainer_state()}, described=None if self.ctx.rank else self.describe(),
        )  # fmt: skip

    def _holders(self, protocol: type) -> Iterator[tuple[str, object]]:
        for each in (self.trainer, *self.trainer.callback_handler.callbacks):
            if isinstance(each, protocol):
                yield type(each).__name__, each

    def _own_states(self) -> dict[str, object]:
        return {name: cast(HasOwnState, each).own_state() for name, each in self._holders(HasOwnState)}

    def _model_tensors(self) -> "dict[str, Tensor]":
        """The weights of the model, of an adapter only its own, as in their file; the memory is the model's."""
        model = self.trainer.model
        if isinstance(model, peft.PeftModel):
            return dict(peft.get_peft_model_state_dict(model, adapter_name="default"))
        found: dict[str, torch.Tensor] = {}
        paths: dict[tuple[object, ...], str] = {}
        for name, each in model.state_dict().items():
            local = each.to_local() if isinstance(each, DTensor) else each
            place = (local.data_ptr(), each.shape, local.stride(), each.dtype) if local.numel() else (name,)
            if paths.setdefault(place, name) == name:  # tied weights are one tensor
                found[name] = each
        return found

    def _trainer_state(self) -> Callable[[], str]:
        """Renders the state of the trainer as it is now, which transformers reads when it resumes."""
        state = self.trainer.state
        for each in (*self.trainer.callback_handler.callbacks, self.trainer.control):
            if isinstance(each, ExportableState):
                name, own = type(each).__name__, each.state()
                kept = state.stateful_callbacks[name]
                if isinstance(kept, list):
                    kept.append(own)
                else:
                    state.stateful_callbacks[name] = own
        now = {each.name: getattr(state, each.name) for each in fields(state)}
        # Of the log, entries before the last one do not change.
        now["log_history"] = [dict(each) for each in state.log_history]
        callbacks = json.dumps(now.pop("stateful_callbacks"))
        return lambda: json.dumps({**now, "stateful_callbacks": json.loads(callbacks)}) + "\n"

    def describe(self) -> Path:
        """Config and tokenizer, so that a checkpoint loads as a model; they stay the same."""
        if self._described:
            return self._described
        folder, model = self.ctx.work_dir / "described", self.trainer.model
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if isinstance(model, peft.PeftModel):
            config = copy.copy(model.peft_config["default"])
            config.inference_mode = True
            config.save_pretrained(str(folder))
        else:
            model.config.save_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        if self.trainer.processing_class is not None:
            self.trainer.processing_class.save_pretrained(folder)
        self._described = folder
        return folder

    # --- loads, which take the place of transformers'

    def load_model(self, folder: Path) -> None:
        """Loads the weights of a checkpoint."""
        if not is_ours(folder):
            self.trainer.state.best_model_checkpoint = str(folder)
            self.trainer._load_best_model()
            return
        gather_again(self.trainer.model)
        tensors = self._model_tensors()
        read_tensors(folder, tensors)
        self._set_adapter(tensors)

    def restore(self, folder: Path) -> None:
        """Loads weights and optimizer of a checkpoint into a running training, and of a reference that moves."""
        if not is_ours(folder):
            self._of_transformers["_load_from_checkpoint"](str(folder))
            state = torch.load(folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True)
            self.trainer.optimizer.load_state_dict(state)
            return
        self.load_model(folder)
        self._load_shared(read_state(folder, self.ctx.rank, self._parameters()), self.trainer)

    def has_in_memory(self, step: int) -> bool:
        """Whether ``restore_from_memory`` has the state of a step."""
        return self._in_memory is not None and self._in_memory.step == step

    def restore_from_memory(self) -> None:
        """As ``restore``, of the best model that ``resources.rollback`` keeps."""
        assert self._in_memory
        gather_again(self.trainer.model)
        tensors = self._model_tensors()
        self._in_memory.fill(tensors)
        self._set_adapter(tensors)
        self._load_shared(self._in_memory.state(self._parameters()), self.trainer)

    def _parameters(self) -> "dict[str, Tensor]":
        return dict(self.trainer.model.named_parameters())

    def _set_adapter(self, tensors: "dict[str, Tensor]") -> None:
        if isinstance(self.trainer.model, peft.PeftModel):  # some adapters are saved in another form
            peft.set_peft_model_state_dict(self.trainer.model, tensors, adapter_name="default")

    def _load_shared(self, state: Mapping[str, object], *holders: object) -> list[int]:
        self.saver.copied()
        parameters = self._parameters()
        names = {id(each): name for name, each in parameters.items()}
        groups = load_named_state(self.trainer.optimizer, names, cast("Mapping[str, object]", state["optimizer"]))
        for name, each in self._holders(HasState):
            if each in holders:
                cast(HasState, each).load_saved_state(cast("Mapping[str, object]", state[name]))
        return groups

    def _load_from_checkpoint(self, checkpoint: str, model: torch.nn.Module | None = None) -> None:
        if is_ours(Path(checkpoint)):
            self.load_model(Path(checkpoint))
        else:
            self._of_transformers["_load_from_checkpoint"](checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint)
        if is_ours(folder):
            state = read_state(folder, self.ctx.rank, self._parameters())
            groups = self._load_shared(state, *(each for _, each in self._holders(HasState)))
            schedule = schedule_of(groups, cast("Mapping[str, object]", state["schedule"]))
            self.trainer.lr_scheduler.load_state_dict(schedule)
            if state["scaler"] is not None and self.trainer.accelerator.scaler is not None:
                self.trainer.accelerator.scaler.load_state_dict(state["scaler"])
        else:
            self._of_transformers["_load_optimizer_and_scheduler"](checkpoint)
            for _ in self._holders(HasState):  # which an earlier version kept in a file of its own
                read_state(folder, self.ctx.rank)
        whole = self.ctx.resume_from or folder  # with the parts of all islands
        same = Checkpoints.at(whole).num_workers == self.ctx.world_size
        for name, each in self._holders(HasOwnState):
            own = read_own(whole, self.ctx.rank if same else 0)
            cast(HasOwnState, each).load_own_state(cast("Mapping[str, object]", own[name]), same=same)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint and not is_ours(Path(checkpoint)):
            self._of_transformers["_load_scaler"](checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        if not is_ours(Path(checkpoint)):
            self._of_transformers["_load_rng_state"](checkpoint)
        elif Checkpoints.at(Path(checkpoint)).num_workers == self.ctx.world_size:  # else `NewRandomState` seeds
            set_random_state(cast(RandomState, read_own(Path(checkpoint), self.ctx.rank)["random"]))


def discard_drafts(work_dir: Path) -> None:
    """Deletes drafts of an attempt that was killed while it saved."""
    drafts = f"{PREFIX_CHECKPOINT_DIR}-*"
    for draft in (*work_dir.glob(drafts), *work_dir.glob(f"islands/*/{drafts}")):
        shutil.rmtree(draft, ignore_errors=True)


def divergence(step: int, loss: float, grad_norm: float, learning_rate: float, max_grad_norm: float) -> tuple[str, str]:
    """The finding and the remedy, for messages."""
    return (
        f"training diverged: at step {step} loss={loss} grad_norm={grad_norm}",
        f"lower learning_rate (now {learning_rate:g}) or max_grad_norm (now {max_grad_norm:g}), raise warmup_ratio, or "
        "train in precision=fp32",
    )


def seconds_before(ctx: "TrainContext") -> float:
    """Training time of earlier attempts."""
    return Checkpoints.at(ctx.resume_from).train_seconds if ctx.resume_from else 0.0
