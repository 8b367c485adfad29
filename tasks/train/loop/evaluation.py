"""What is measured beside the steps: the held-out loss, the best model, and a learning rate that follows the loss."""

import json
import logging
import math
import os
import pickle
import queue
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, cast

import torch
from accelerate.utils import broadcast
from datasets import Dataset
from peft import PeftModel
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from lineage.artifact import Kind, Source
from lineage.checkpoints import Checkpoints
from lineage.errors import ArtifactError, ConfigError, DataError, PipelineError
from lineage.filesystem.digest import digest_of
from lineage.filesystem.files import append_jsonl, read_jsonl, replace_jsonl
from lineage.record.metrics_file import CHECKPOINT_SCORES_FILE
from tasks.context import TrainContext
from tasks.data.kinds import HELD_OUT
from tasks.data.tokens.tokenize_rows import load_or_make
from tasks.judgement.check_rows import POLICY, rows_slot
from tasks.model.adapter_files import base_and_adapters, plain_config
from tasks.model.chat_template import CHAT_TEMPLATE_FILE
from tasks.model.fetch_model import PARTS_FILE
from tasks.model.tokenizers import copy_tokenizer_files
from tasks.reward_functions.metric import REWARD_MODEL
from tasks.train.best import HELD_OUT_LOSS, VAL_LOSS, Best, Patience
from tasks.train.evaluation import SLOTS, Evaluation
from tasks.train.loop.callbacks import has_diverged, step_metrics
from tasks.train.loop.checkpointing import Checkpointing, Saver, divergence
from tasks.train.loop.heartbeat import Phase
from tasks.train.optim.own_optimizers import averaged, count_measured
from tasks.train.optim.schedules import Event, LossWatch
from tasks.train.sharding import autocast

if TYPE_CHECKING:
    from transformers import TrainerControl as Control
    from transformers import TrainerState as State
    from transformers import TrainingArguments as Args

    from tasks.recipe import Input, Inputs, TrainingRecipe

    Logs = dict[str, float]


logger = logging.getLogger(__name__)


def held_out_rows(method: "TrainingRecipe", inputs: "Inputs", ctx: TrainContext) -> "Dataset":
    """The tokens of the held-out rows, produced like those of the training rows (DataError: there are none)."""
    rows, tokenization = inputs[rows_slot(method)], method.tokenization()
    assert tokenization
    found = 0
    if (rows.path / HELD_OUT).exists():
        if tokenization.too_long == "refuse":  # a long row is an error in training; in a measurement it is dropped
            tokenization = replace(tokenization, too_long="drop")
        policy, workers = inputs[POLICY].path, ctx.resources.cpus_per_worker
        tokens = load_or_make(tokenization, rows, policy, ctx.cache_dir, workers, side=HELD_OUT)
        found = len(tokens)
    if not found:
        wanted, remedy = (
            ("validation", "validation=null")
            if method.validation
            else (f"best.metric={HELD_OUT_LOSS}", "best.metric=loss")
        )
        raise DataError(
            f"{wanted}: {rows.name!r} has no held-out row with a trained token; hold out rows "
            f"(stages.{rows.name}.method.held_out=0.05), or set {remedy}"
        )
    return tokens.dataset(range(found))


def held_out_loss(trainer: "Trainer", rows: "Dataset", ctx: TrainContext) -> float:
    """The trainer's own loss, in nats per trained token, or per pair where rows are pairs; the same on all workers.

    It changes nothing that the training depends on: no weight, no random state, no metric.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=trainer.args.device)  # loss x weight, weight

    def collated(indices: range) -> "Mapping[str, torch.Tensor]":
        ctx.mark(trainer.state.global_step, Phase.BETWEEN)
        batch: Mapping[str, torch.Tensor] = trainer._prepare_inputs(
            trainer.data_collator([rows[index] for index in indices])
        )
        return batch

    with _evaluating(trainer), torch.no_grad(), trainer.compute_loss_context_manager():
        if getattr(trainer, "estimates_divergence", False):
            with autocast(trainer.args):
                batches = ((collated(indices), counts) for indices, counts in _batches(len(rows), ctx))
                trainer.estimate_divergence(trainer.model, batches)
        for indices, counts in _batches(len(rows), ctx):
            batch = collated(indices)
            with autocast(trainer.args):
                loss = trainer.compute_loss(trainer.model, batch)
            weight = (batch["labels"][:, 1:] != -100).sum() if "labels" in batch else len(indices)
            if counts:
                sums += torch.stack([loss.double() * weight, torch.as_tensor(weight, device=loss.device).double()])
    sums = trainer.accelerator.reduce(sums, "sum")
    total, weight = (ctx.islands.sum(sums) if ctx.islands else sums).tolist()
    return float(total / weight)


def _batches(num_rows: int, ctx: TrainContext) -> Iterator[tuple[range, bool]]:
    """A worker's micro batches, each with whether the worker counts it.

    TRL's losses gather over the workers, so all workers take the same number of batches: each computes the rows that
    remain after the division, and rank 0 counts them.
    """
    size = ctx.resources.rows_at_once
    per_round = ctx.world_size * size
    divided = num_rows - num_rows % per_round
    for start in range(ctx.rank * size, divided, per_round):
        yield range(start, start + size), True
    for start in range(divided, num_rows, size):
        yield range(start, min(start + size, num_rows)), ctx.rank == 0


@contextmanager
def _evaluating(trainer: "Trainer") -> Iterator[None]:
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    with torch.random.fork_rng(devices), averaged(trainer.optimizer):
        trainer.model.eval()
        try:
            yield
        finally:
            trainer.model.train()
            if hasattr(trainer, "_metrics"):  # TRL's, and ours
                trainer._metrics["eval"].clear()


class Validating(TrainerCallback):
    """Adds the held-out loss to the log of the steps that ``validation`` or ``best`` name, and of the last one.

    It runs before the callbacks that read the loss. A resume finds the measurements in the log of the checkpoint.

    Args:
        rows: the held-out rows, of which the first ``max_rows`` are measured.
        num_rows: number of training rows in an epoch.

    Attributes:
        ended_at: the step after which ``patience`` ended the training; None: it did not.
    """

    def __init__(
        self, trainer: Trainer, method: "TrainingRecipe", ctx: "TrainContext", rows: Dataset, num_rows: int
    ) -> None:
        self.trainer, self.method, self.ctx, self.num_rows = trainer, method, ctx, num_rows
        max_rows = method.validation.max_rows if method.validation else None
        self.rows = rows.select(range(min(len(rows), max_rows or len(rows))))
        self.patience = Patience()
        self.ended_at: int | None = None

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        for entry in state.log_history:
            if HELD_OUT_LOSS in entry and self._validates(entry["step"]):
                self.patience.add(entry[HELD_OUT_LOSS])

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        step, is_last = state.global_step, state.global_step == state.max_steps
        if "loss" not in logs or has_diverged(logs) or not (is_last or self._validates(step) or self._competes(step)):
            return
        # Both the report of this step and the log that a resume loads get the loss.
        logs[HELD_OUT_LOSS] = loss = held_out_loss(self.trainer, self.rows, self.ctx)
        state.log_history[-1][HELD_OUT_LOSS] = loss
        if self.method.validation is None or not (is_last or self._validates(step)):
            return
        logs[VAL_LOSS] = loss
        if self.ctx.rank == 0:
            epoch = (step * self.method.global_batch_size - 1) // self.num_rows
            logger.info("[val] step %d | epoch %d | loss %.4f", step, epoch, loss)
        if is_last:
            return
        count_measured(self.trainer, loss)
        self.patience.add(loss)
        if self.method.validation.patience and self.patience.waited >= self.method.validation.patience:
            self._end(state, control)

    def _end(self, state: "State", control: "Control") -> None:
        logger.info(
            "step=%d state=ended early: no val/loss below %g in %d measurements (validation.patience)",
            state.global_step, self.patience.least, self.patience.waited,
        )  # fmt: skip
        self.ended_at = state.max_steps = state.global_step  # this is the last step: other callbacks read max_steps
        control.should_training_stop = True
        control.should_save = False  # as after any last step, the weights become the output

    def _validates(self, step: int) -> bool:
        validation = self.method.validation
        return validation is not None and validation.is_due(step, self.num_rows, self.method.rows_per_step)

    def _competes(self, step: int) -> bool:
        best = self.method.best
        return (
            best is not None and best.metric == HELD_OUT_LOSS and best.every_steps is not None and best.competes(step)
        )


class BestModel(TrainerCallback):
    """Saves each model that is better than all earlier candidates.

    Args:
        checkpointing: of the trainer.

    Attributes:
        step: step of the best model so far; None: there was no candidate.
    """

    def __init__(self, trainer: "Trainer", best: Best, ctx: TrainContext, checkpointing: Checkpointing) -> None:
        assert ctx.checkpoint_dir, "the best model is kept as a checkpoint"
        self.trainer, self.best, self.ctx, self.checkpointing = trainer, best, ctx, checkpointing
        self.store = Checkpoints(ctx.checkpoint_dir)
        self.step: int | None = None
        self.value: float | None = None

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        """After a resume, finds the best model so far in the log, which every worker has from the checkpoint.

        Raises:
            ArtifactError: the checkpoint of the best model is damaged, so that no further step is worth its cost.
        """
        for step in (entry["step"] for entry in state.log_history if "loss" in entry):
            if not self.best.competes(step):
                continue
            value = step_metrics(state.log_history, step).get(self.best.metric, math.nan)
            if self.best.is_better(value, self.value):
                self.step, self.value = step, value
        if self.step is not None:
            logger.info("best_step=%d %s=%g state=resumed", self.step, self.best.metric, self.value)
            self._require_intact(self.step)

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        step = state.global_step
        if "loss" not in logs or has_diverged(logs) or not (self.best.competes(step) or step == state.max_steps):
            return
        value = agreed(step_metrics(state.log_history, step).get(self.best.metric, math.nan), args)
        if not self.best.is_better(value, self.value):
            return
        logger.info("best_step=%d %s=%g before=%s", step, self.best.metric, value, self.value)
        self.step, self.value = step, value
        self.checkpointing.best_step = step
        if step < state.max_steps:  # the last model is still in memory at the end
            control.should_save = True

    def end_at_best(self) -> int:
        """Loads the best model if it is not the last one; returns its step.

        Raises:
            PipelineError: the metric was non-finite at every step that competed.
            ArtifactError: its checkpoint is damaged.
        """
        if self.step is None:
            raise PipelineError(
                f"output=best: {self.best.metric} was non-finite at every step that competed, so there is no best "
                "model; lower learning_rate, or set another best.metric"
            )
        if self.step != self.trainer.state.global_step:
            self._require_intact(self.step)
            self.checkpointing.load_model(self.store.path(self.step))
        logger.info("output=best best_step=%d %s=%g", self.step, self.best.metric, self.value)
        return self.step

    def restore(self) -> None:
        """Loads the weights and the optimizer of the best checkpoint, from which the training resumes.

        Raises:
            ArtifactError: it is damaged.
        """
        assert self.step is not None
        if self.checkpointing.has_in_memory(self.step):
            self.checkpointing.restore_from_memory()
        else:
            self._require_intact(self.step)
            self.checkpointing.restore(self.store.path(self.step))
        self.trainer.model.train()

    def _require_intact(self, step: int) -> None:
        """Requires an intact checkpoint; rank 0 reads every byte, and all workers fail together."""
        self.checkpointing.saver.wait()  # it may be the one that is being written
        damage = [self.store.damage(step) if self.ctx.rank == 0 else []]
        if self.ctx.world_size > 1:
            torch.distributed.broadcast_object_list(damage, src=0, group=self.ctx.all_workers)
        for found in filter(None, damage):
            stage = self.store.directory.parents[1].name
            raise ArtifactError(
                f"the best model is that of step {step}, and its checkpoint is not what was committed: "
                f"{'; '.join(found[:3])}; restore the files, or restart the stage with restart=[{stage}]"
            )


class Divergence(TrainerCallback):
    """Stops a training whose loss or gradient norm is non-finite: it fails, or its best model becomes the output.

    Args:
        saver: knows the last good checkpoint.
        go_back_to: the best model, which becomes the output; None: the training fails.

    Attributes:
        step: the step that diverged; None: none did.
    """

    def __init__(self, saver: Saver, go_back_to: BestModel | None) -> None:
        self.saver, self.go_back_to = saver, go_back_to
        self.step: int | None = None

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if "loss" not in logs or not has_diverged(logs):
            return
        found, remedy = divergence(
            state.global_step, logs["loss"], logs["grad_norm"], args.learning_rate, args.max_grad_norm
        )
        if self.go_back_to is None or self.go_back_to.step is None:
            competed = "" if self.go_back_to is None else "; on_divergence=best: no model has competed yet"
            raise PipelineError(f"{found}; {self.saver.last_good()}{competed}; {remedy}")
        logger.error("%s; on_divergence=best: the output is the model of step %d", found, self.go_back_to.step)
        logger.error("to train past it: %s", remedy)
        self.step = state.global_step
        control.should_training_stop = True
        control.should_save = False  # these weights are non-finite


class AdaptiveRate(TrainerCallback, ExportableState):
    """Multiplies the schedule's learning rate by the factor of a ``LossWatch``; its state is in every checkpoint.

    It watches the loss, or minus the reward where that is the method's ``progress``. It runs before the callbacks that
    measure and report, and after those that complete the log of a step.

    Args:
        best: the model to go back to; None: ``divergence_z`` is not set.
    """

    def __init__(
        self, trainer: "Trainer", method: "TrainingRecipe", ctx: "TrainContext", best: "BestModel | None"
    ) -> None:
        setting = method.schedule.adaptive
        assert setting and method.progress
        self.trainer, self.ctx, self.best, self.measure = trainer, ctx, best, method.progress
        self.watch = LossWatch(setting=setting)

    def state(self) -> dict[str, object]:
        """What transformers writes into a checkpoint."""
        return {"args": {}, "attributes": self.watch.state()}

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        saved = state.stateful_callbacks.get(type(self).__name__)
        if saved and state.global_step:
            self.watch.load(saved["attributes"])

    def on_step_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        scheduled = self.trainer.lr_scheduler.get_last_lr()
        for group, rate in zip(self.trainer.optimizer.param_groups, scheduled, strict=True):
            group["lr"] = rate * self.watch.factor

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        if "loss" not in logs:
            return
        step, entry = state.global_step, state.log_history[-1]
        if "learning_rate" in logs:  # transformers logs that of the schedule
            logs["learning_rate"] = entry["learning_rate"] = logs["learning_rate"] * self.watch.factor
        measured = -logs["reward"] if self.measure == "reward" else logs["loss"]
        is_finite = not has_diverged(logs)
        loss = agreed(measured if is_finite else math.nan, args)
        z = self.watch.z(loss)
        can_return = self.best is not None and self.best.step is not None and step < state.max_steps
        event = self.watch.observe(step, loss, can_return=can_return)
        logs["adaptive/factor"] = self.watch.factor
        if event is None:
            return
        logs[f"adaptive/{event}"] = 1.0
        logger.warning(
            "[adaptive] step %d | %s | %s %.4f | z %.2f | learning rate x %.4g",
            step, event, self.measure, logs[self.measure], z, self.watch.factor,
        )  # fmt: skip
        if event is not Event.DIVERGENCE:
            return
        assert self.best is not None
        self.best.restore()
        self.trainer._tr_loss.zero_()  # transformers subtracts it from itself, which leaves nan as it is
        logger.warning("[adaptive] step %d | back to the model of step %d", step, self.best.step)
        if not is_finite:  # so that later callbacks ignore this step
            self.ctx.report(step, {name: value for name, value in logs.items() if name.startswith("adaptive/")})
            for each in (logs, entry):
                del each["loss"]

    @property
    def metrics(self) -> dict[str, float]:
        """For the manifest: how many interventions there were, and the factor after each."""
        each = {f"adaptive/{event}/step_{step}": factor for step, event, factor in self.watch.events}
        return {"adaptive/interventions": float(len(self.watch.events)), **each}


def agreed(value: float, args: "Args") -> float:
    """The value of rank 0, so that all workers do the same."""
    return float(broadcast(torch.tensor(value, dtype=torch.float64, device=args.device)))


SCORES_FOLDER = "evaluation"  # in the stage's directory
_MODEL_FILES = re.compile(r"(model|adapter_model)[\w.-]*\.safetensors|(adapter_|generation_)?config\.json")
_NOT_OF_MODEL = (PARTS_FILE, "base.json", "adapter_config.json")
_CONFIGS = ("config.json", "generation_config.json")
_BESIDE_MODEL = ("*.json", "*.jinja", "*.model", "*.txt")  # files that a model's directory has beside its weights
_JOIN_SECONDS = 1.0
BASE, MODEL = "base", "model"  # names of policies


def size_and_time(file: Path) -> tuple[int, int]:
    """What a change of a file's bytes changes, and a new link to it does not."""
    status = file.stat()
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for all checkpoints of a training.

    Args:
        options: fields of ``Evaluate``.
        base: the model that the training starts from.
        base_files: of its weights and adapters -> their sizes and times when the training had loaded them.
        rows: slot of ``Evaluate`` -> the stage's own rows, and the reward model that judges answers.
        place: folder of the scores per row, one below it for each step.
        cache: of the store.
    """

    setting: Evaluation
    options: Mapping[str, object]
    base: "Input"
    base_files: Mapping[Path, tuple[int, int]]
    rows: "Inputs"
    place: Path
    cache: Path | None


@dataclass(frozen=True, kw_only=True)
class Request:
    """One model to score: that of a checkpoint, or with step 0 the one that the training starts from.

    Args:
        files: of its weights, with the digests with which the checkpoint was committed.
    """

    step: int
    model: Path
    digest: str
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Scores:
    """What is recorded of a checkpoint, a line of ``evaluation.jsonl``.

    Args:
        digest: of the files of its model.
        time: when it was recorded, in seconds since the epoch.
        scores, base: metric -> value, of it and of the model that the training started from.
        small_is_good: the metrics of which small values are better.
        failed: metric -> why it has no value.
        rules: rule -> its outcome.
        error: why the model could not be scored; empty: it was.
        is_fatal: whether the error is of the settings, so that no model can be scored.
    """

    step: int
    digest: str
    time: float = 0.0
    seconds: float = 0.0
    scores: Mapping[str, float] = field(default_factory=dict)
    base: Mapping[str, float] = field(default_factory=dict)
    small_is_good: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    rules: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    is_fatal: bool = False

    @property
    def passes(self) -> bool:
        """Whether it keeps every bound."""
        return not self.error and all(each == "better" for each in self.rules.values())


def _unmet(scores: Scores) -> str:
    return ", ".join(f"{name} is {found}" for name, found in scores.rules.items() if found != "better")


class Scorer(Protocol):
    """Scores checkpoints beside a training, one at a time; what it raises or ends by is in the answer."""

    def score(self, request: Request) -> Scores: ...

    def end(self) -> None: ...


class ScoringProcess:
    """Scores checkpoints in a process beside the training (``tasks.evaluate.beside``), in another where it has died.

    Args:
        gpus: of it alone, as CUDA_VISIBLE_DEVICES names them; None: those that the training sees.
    """

    def __init__(self, job: Job, gpus: Sequence[str] | None = None) -> None:
        self.job, self.gpus = job, gpus
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: BinaryIO | None = None

    def score(self, request: Request) -> Scores:
        if self._process is None or self._process.poll() is not None:
            self._process, self._answers = self._start()
        assert self._process.stdin and self._answers
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            line = self._answers.readline() if self._answered() else b""
        except OSError:
            line = b""
        if not line:
            code = self._process.wait()
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            return Scores(step=request.step, digest=request.digest, error=f"its process ended {how}")
        return Scores(**json.loads(line))

    def _answered(self) -> bool:
        """Waits for an answer; False: the process has ended, though one that it forked may keep its pipe open."""
        while True:
            assert self._process and self._answers
            has_ended = self._process.poll() is not None
            if select.select([self._answers], [], [], 0 if has_ended else _JOIN_SECONDS)[0]:
                return True
            if has_ended:
                return False

    def end(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None
            assert self._answers
            self._answers.close()

    def environment(self) -> dict[str, str]:
        """That of the training, with threads and GPUs of its own, and without its place among workers."""
        alone = dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
        found = {name: value for name, value in os.environ.items() if name not in alone}
        found |= dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(self.job.setting.cpus))
        if self.gpus is not None or not self.job.setting.gpus:
            found["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus or ())
        return found | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def _start(self) -> "tuple[subprocess.Popen[bytes], BinaryIO]":
        """The process, and the pipe of its answers: its stdout has what libraries print, also as they are imported."""
        reads, writes = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tasks.evaluate.beside", str(writes)],
                stdin=subprocess.PIPE, stdout=2, env=self.environment(), pass_fds=(writes,),
            )  # fmt: skip
        finally:
            os.close(writes)
        assert process.stdin
        pickle.dump(self.job, process.stdin)
        process.stdin.flush()
        return process, os.fdopen(reads, "rb")


class Scoring(TrainerCallback):
    """Has checkpoints scored by a process beside the training, or a task of the cluster, and picks the output.

    Checkpoints that wait for it are kept. Rank 0 starts it; the training waits for it after its last step alone.

    Attributes:
        ended_at: the step whose score ended the training by ``patience``; None: none did.
    """

    def __init__(
        self, trainer: Trainer, method: "TrainingRecipe", inputs: "Inputs", ctx: TrainContext,
        checkpointing: Checkpointing, num_rows: int,
    ) -> None:  # fmt: skip
        assert ctx.checkpoint_dir and method.evaluation, "checkpoints are scored"
        self.trainer, self.method, self.inputs, self.ctx = trainer, method, inputs, ctx
        self.setting, self.checkpointing, self.num_rows = method.evaluation, checkpointing, num_rows
        self.store, self.place = Checkpoints(ctx.checkpoint_dir), ctx.checkpoint_dir.parent
        self.known: dict[int, Scores] = {}
        self._queue: queue.Queue[int | None] = queue.Queue()
        self._waiting: set[int] = set()
        self._thread: threading.Thread | None = None
        self._scorer: Scorer | None = None
        self._described = Path()  # on rank 0
        self._is_over = False
        self.ended_at: int | None = None
        model, adapters = base_and_adapters(inputs[POLICY].path)
        self.base_files = {
            file: size_and_time(file) for place in (model, *adapters) for file in sorted(place.glob("*.safetensors"))
        }
        checkpointing.saver.scoring = self

    def on_train_begin(self, args: "Args", state: "State", control: "Control", **kwargs: object) -> None:
        self._begin(state.global_step)

    def _begin(self, step: int) -> None:
        """Reads what is scored, and has scored what is not, of the steps so far.

        Raises:
            DataError: there are no held-out rows.
        """
        if self.ctx.rank or self._thread:
            return
        rows = self.inputs[rows_slot(self.method)]
        if not (rows.path / HELD_OUT).exists():
            raise DataError(
                f"evaluation: {rows.name!r} has no held-out row; hold out rows (stages.{rows.name}.method.held_out="
                "0.05), or set evaluation=null"
            )
        found = read_jsonl(self.place / CHECKPOINT_SCORES_FILE, Scores)
        self.known = {each.step: each for each in found if each.step <= step and not each.error}
        replace_jsonl(self.place / CHECKPOINT_SCORES_FILE, [each.__dict__ for each in self.known.values()])
        self._described = self._describe()  # not in the thread: a generation changes the model's config for a while
        self._thread = threading.Thread(target=self._run, name="evaluation", daemon=True)
        self._thread.start()
        for each in (0, *(each for each in self.store.steps() if self._is_due(each))):
            if each not in self.known:
                self.committed(each)

    def on_log(self, args: "Args", state: "State", control: "Control", logs: "Logs", **kwargs: object) -> None:
        fatal = next((each.error for each in self._in_order() if each.is_fatal), "")
        if fatal:
            raise ConfigError(f"evaluation: {fatal}")
        if "loss" not in logs or has_diverged(logs):
            return
        if state.global_step < state.max_steps and self._has_ended():
            state.max_steps = state.global_step  # as in ``Validating``
            control.should_training_stop, control.should_save = True, False
        elif self._is_due(state.global_step):
            control.should_save = True

    def _has_ended(self) -> bool:
        """Whether ``patience`` ends the training, by the scores so far; on all workers."""
        if self.setting.patience:
            self.ended_at = int(agreed(float(self._ends_at() or 0), self.trainer.args)) or None
        return self.ended_at is not None

    def _ends_at(self) -> int | None:
        """The step whose score exhausts the patience, which does not depend on when it is known."""
        patience = Patience()
        for each in self._in_order():
            if each.step and self._value(each) is not None and each.step != self.trainer.args.max_steps:
                patience.add(-self._worth(each))
                if self.setting.patience and patience.waited >= self.setting.patience:
                    return each.step
        return None

    def _in_order(self) -> "list[Scores]":
        """What is known now, by step; the thread adds to it."""
        return sorted(list(self.known.values()), key=lambda each: each.step)

    def _is_due(self, step: int) -> bool:
        is_last = step in (self.trainer.args.max_steps, self.trainer.state.max_steps)  # the second where it ends early
        return is_last or self.setting.is_due(step, self.num_rows, self.method.rows_per_step)

    def committed(self, step: int) -> None:
        """Has a checkpoint scored that is due."""
        if self._thread and (not step or self._is_due(step)):
            self._waiting.add(step)
            self._queue.put(step)

    @property
    def reads(self) -> set[int]:
        """Steps whose checkpoints must stay: those that wait, and the one that would be the output now."""
        kept = self._ends_at() if self.setting.pick == "last" else self._best()
        return self._waiting | ({kept} if kept else set())

    def finish(self) -> dict[str, float]:
        """Waits for the last score, and loads the model that is picked; on all workers.

        Returns:
            ``evaluation/METRIC`` of the output and ``evaluation/base/METRIC``, and ``best_step`` where one is picked;
            ``ended_early_at_step`` where ``patience`` ended it.

        Raises:
            PipelineError: no model was scored, or none passes the gate.
        """
        step = self.trainer.state.global_step
        self._begin(step)
        self._queue.put(None)
        while agreed(float(self._thread is not None and self._thread.is_alive()), self.trainer.args):
            self.ctx.mark(step, Phase.BETWEEN)
            if self._thread:
                self._thread.join(_JOIN_SECONDS)
        self.end()
        if self._has_ended():
            logger.info("state=ended early step=%s of=%d (evaluation.patience)", self.ended_at, step)
        picked = self.ended_at or step
        if self.setting.pick != "last":
            picked = int(agreed(float(self._best() or 0), self.trainer.args))
        if not picked:
            raise PipelineError(f"evaluation.pick={self.setting.pick}: {self._why_none()}")
        if picked != step:
            self.checkpointing.load_model(self.store.path(picked))
        notes = {"best_step": float(picked)} if self.setting.pick != "last" else {}
        notes |= {"ended_early_at_step": float(self.ended_at)} if self.ended_at else {}
        if self.ctx.rank:
            return notes
        logger.info("evaluation pick=%s step=%d of=%s", self.setting.pick, picked, sorted(self.known))
        own = self.known[picked].scores if picked in self.known else {}
        base = next((each.base for each in self._in_order() if each.base), {})  # each has it, unless it failed
        notes |= {f"evaluation/{name}": value for name, value in own.items()}
        return notes | {f"evaluation/base/{name}": value for name, value in base.items()}

    def end(self) -> None:
        """Ends the process; what it has not scored, a resumed training scores."""
        self._is_over = True
        self._queue.put(None)
        if self._scorer:
            self._scorer.end()

    def _best(self) -> int | None:
        """The step that ranks first, of equal ones the earlier; None: none was scored, or passes the gate."""
        return next((each.step for each in self._ranked() if each.passes), None)

    def _ranked(self) -> "list[Scores]":
        """What was scored up to the end, the best first."""
        end = self._ends_at() or math.inf
        scored = [each for each in self._in_order() if 0 < each.step <= end and self._value(each) is not None]
        return sorted(scored, key=lambda each: (-self._worth(each), each.step))

    def _worth(self, scores: "Scores") -> float:
        value = self._value(scores)
        assert value is not None
        return -value if self._metric(scores) in scores.small_is_good else value

    def _value(self, scores: "Scores") -> float | None:
        return scores.scores.get(self._metric(scores) or "")

    def _metric(self, scores: "Scores") -> str | None:
        """The metric that ranks; of a benchmark the first of its own."""
        own = self.setting.own_metrics
        wanted = self.setting.metric or (own[0].label if own else SLOTS[type(self.method).reads.kind][1])
        return next((name for name in scores.scores if name == wanted or name.startswith(f"{wanted}/")), None)

    def _why_none(self) -> str:
        errors = [f"step {each.step}: {each.error}" for each in self.known.values() if each.step and each.error]
        refused = [each for each in (self._ranked() or self._in_order()) if each.step and each.rules]
        best = [f"the best is step {each.step}: {_unmet(each)}" for each in refused[:1]]
        reasons = "; ".join([*best, *errors]) or "no score has its metric"
        what = f"none of {len(refused)} checkpoints passes the gate" if refused else "no checkpoint has a score"
        return f"{what} ({reasons}); the checkpoints are kept; change evaluation, or set evaluation.pick=last"

    def _run(self) -> None:
        """Runs in the thread: scores one checkpoint after another."""
        has_failed = False
        while (step := self._queue.get()) is not None:
            if step > (self._ends_at() or math.inf) and step:  # nothing after it can be the output
                self._waiting.discard(step)
                continue
            found = self._scored_or_why(step)
            if found.error and not (found.is_fatal or self._is_over or has_failed):  # as by a kill without memory
                logger.warning("evaluation step=%d state=tried again: %s", step, found.error)
                found = self._scored_or_why(step)
            if self._is_over:
                return
            has_failed = bool(found.error)  # then the next is tried once: it may be the metric
            if has_failed:
                logger.warning("evaluation step=%d state=failed: %s", step, found.error)
            else:
                logger.info("evaluation step=%d seconds=%.1f %s", step, found.seconds, json.dumps(dict(found.scores)))
            self.known[step] = found = replace(found, time=time.time())
            self._waiting.discard(step)
            append_jsonl(self.place / CHECKPOINT_SCORES_FILE, found.__dict__)

    def _scored_or_why(self, step: int) -> "Scores":
        try:
            return self._scored(step)
        except Exception as error:  # a failed score does not stop the training
            return Scores(step=step, digest="", error=f"{type(error).__name__}: {error}")

    def _scored(self, step: int) -> "Scores":
        if self._scorer is None:
            self._scorer = cast("Scorer", (self.ctx.scorer or ScoringProcess)(self.job()))
        return self._scorer.score(self.request(step))

    def request(self, step: int) -> Request:
        """What the scorer is asked for a step."""
        return Request(step=step, model=self._folder(step), digest=self._digest(step), files=self._files(step))

    def job(self) -> Job:
        """What is the same for all checkpoints."""
        method, policy = self.method, self.inputs[POLICY]
        slot = SLOTS[type(method).reads.kind][0]
        kept = "keep" if getattr(method, "control_tokens", None) == "keep" else None
        options: dict[str, object] = {
            "num_rows": self.setting.rows, "num_prompts": self.setting.rows, "metrics": self.setting.metrics,
            "max_new_tokens": min(self.setting.max_new_tokens, method.max_length // 2), "control_tokens": kept,
            "max_length": method.max_length, "max_cut": 1.0, "max_dropped": 1.0,
            "thinking": getattr(method, "thinking", None), "rewards": getattr(method, "rewards", None),
        }  # fmt: skip
        base = replace(
            policy, path=self._folder(0), digest=self._digest(0),
            source=Source(path=str(policy.path), kind=Kind.CHECKPOINT),
        )  # fmt: skip
        rows = {slot: self.inputs[rows_slot(method)]}
        rows |= {REWARD_MODEL: self.inputs[method.judge]} if self.setting.is_judged else {}
        return Job(
            setting=self.setting, options=options, base=base, base_files=self.base_files, rows=rows,
            place=self.place / SCORES_FOLDER, cache=self.ctx.cache_dir,
        )  # fmt: skip

    def _folder(self, step: int) -> Path:
        """A directory that loads as the model of a step: its small files, and where its weights are."""
        folder = self.ctx.work_dir / "scored" / f"step-{step}"
        if folder.exists():
            return folder
        policy = self.inputs[POLICY].path
        whole = policy if step == 0 else self.store.path(step)
        is_adapter = bool(step) and self.method.adapter is not None
        parts = {"weights": str(policy if is_adapter else whole), "adapter": str(whole) if is_adapter else None}
        draft = folder.with_suffix(".partial")
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(self._described, draft)
        for name in _CONFIGS if not step else ():
            (draft / name).unlink(missing_ok=True)
            if (policy / name).exists():
                shutil.copyfile(policy / name, draft / name)
        (draft / PARTS_FILE).write_text(json.dumps(parts))
        draft.rename(folder)
        return folder

    def _describe(self) -> Path:
        """What the output will have beside its weights: files of its input, and the training's template and config."""
        folder, described = self.ctx.work_dir / "scored" / "described", self.checkpointing.describe()
        policy, model = self.inputs[POLICY].path, self.trainer.model
        shutil.rmtree(folder.parent, ignore_errors=True)
        folder.mkdir(parents=True)
        for path in (path for pattern in _BESIDE_MODEL for path in policy.glob(pattern)):
            if path.name not in (*_NOT_OF_MODEL, *_CONFIGS):
                shutil.copyfile(path, folder / path.name)
        copy_tokenizer_files(policy, folder)
        for path in (described / name for name in (CHAT_TEMPLATE_FILE, *_CONFIGS)):
            if path.exists():
                shutil.copyfile(path, folder / path.name)
        if isinstance(model, PeftModel):
            base = model.get_base_model()
            plain_config(base).save_pretrained(folder)
            if base.can_generate():
                base.generation_config.save_pretrained(folder)
        return folder

    def _digest(self, step: int) -> str:
        """Digest of the files of a model, an adapter's with those of its base."""
        policy = self.inputs[POLICY]
        base = policy.digest or digest_of({"fingerprint": policy.fingerprint})
        if not step:
            return base
        return digest_of({**self._files(step), **({"base": base} if self.method.adapter else {})})

    def _files(self, step: int) -> dict[str, str]:
        """The files of a checkpoint's model, with their digests; none of step 0."""
        files = self.store.read(step).files if step else {}
        return {name: digest for name, digest in files.items() if _MODEL_FILES.fullmatch(name)}
