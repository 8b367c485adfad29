"""Estimates of memory, time, cost and disk space of trainings: by formula, corrected by similar past runs."""

import contextlib
import gc
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TypedDict

from flows.declare.project import project_files
from flows.planning.adapter_choice import (
    NO_GPU,
    PLAN_FOR,
    PROCESS,
    Model,
    awaited_model,
    capacity,
    local_model,
    planned_model,
    read_model,
)
from flows.planning.advice import set_fields
from flows.planning.checks import (
    bf16_notes,
    cluster_notes,
    column_notes,
    compile_notes,
    guess_notes,
    position_notes,
    toy_notes,
)
from flows.planning.plan import Plan, PlannedStage
from flows.planning.staleness import hyperparameters
from flows.reports.wording import counted, gib
from lineage.artifact import MODELS, QUICKSTART, SOURCE, Kind, Source
from lineage.errors import ConfigError, DataError
from lineage.filesystem.disk import free_bytes, gigabytes
from lineage.filesystem.files import append_jsonl, read_jsonl
from lineage.fingerprint import short
from lineage.record.environment import hardware
from lineage.record.metrics_file import read_reports, step_seconds
from lineage.source.model_files import read_json
from lineage.source.source_checks import PYTHON, is_loaded
from lineage.source.sources import files_of, local_paths
from lineage.store import CACHE, Manifest, Store
from tasks.base_model import BaseModel
from tasks.context import Resources
from tasks.data.preparing.options import REPLAY, Prepare
from tasks.evaluate.evaluate import Evaluate
from tasks.judgement.check_rows import POLICY, rows_slot
from tasks.judgement.disk_need import (
    DiskNeed,
    Shapes,
    disk_need,
    model_shapes,
    parts_trained,
    percent_trained,
    require_disk,
)
from tasks.judgement.estimate import (
    Architecture,
    Memory,
    Work,
    frozen_slots,
    memory,
    num_weights,
    scored_memory,
    scoring_memory,
    traffic,
    trained_weights,
    work,
)
from tasks.method import Training
from tasks.train.evaluation import BATCH_TOKENS, asked_beside
from tasks.train.loop.speed import known_peak, peak_key
from tasks.train.optim.diloco import Traffic

FILE = "estimates.jsonl"  # in the store: predicted and measured, a line per finished training
FEW_STEPS = 8  # a run as short as a rehearsal, whose memory has not reached its peak
_START_SECONDS = 6.0  # default time of a stage besides its steps: imports, loading, saving
_FLOPS = {"cpu": 2.5e10, "gpu": 4e14}  # FLOP/s of a core and of a GPU, if no peak was measured
_SHARE = 0.4  # share of the measured peak that a training reaches; measured with the quickstart on two cores
_GPU_SHARE = 0.55  # the same of a GPU, with compiled or fused layers and full micro batches (bench/gpu.py)
_ADAPTER = 1.25  # more time than the arithmetic of a frozen base: the adapter's small products
_DEQUANTIZED_SECONDS = 6e-11  # of a weight in few bits in a pass, forward and backward
_TOKEN_SECONDS = 2.5e-4  # of a token that is generated, and a layer: reading weights, keys and values
_SCORED_LENGTH = 1024  # tokens of a row that is scored, where no training of the plan has a max_length
_TOKEN_BYTES, _TEMPLATE_TOKENS = 3.0, 32  # of text in a token, and what a template adds: before rows are tokenized
_LAYER_SECONDS = 0.002  # constant time of a pass through a layer: starting some hundred operations


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Features:
    """The inputs of a stage's estimate.

    Args:
        hardware: identifies the hardware of its workers.
        model_bytes, row_bytes: memory by formula: independent of the rows, and for the rows.
        layers, moved: of the model, and the numbers that all passes write (``Work.moved``); 0: an older run's, unknown.
        row_tokens: mean tokens per row, over all its sequences; 0: unknown.
        is_cut: whether rows may have been longer than ``max_length``.
    """

    method: str
    family: str
    hardware: str
    rows: str
    max_length: int
    model_bytes: int
    row_bytes: int
    flops: float
    passes: int
    num_steps: int
    row_tokens: float = 0.0
    is_cut: bool = True
    layers: int = 0
    moved: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A line of the file: a finished or rehearsed training.

    Args:
        memory: peak of a worker in bytes; seconds: of the steps; other_seconds: of the rest of the stage.
        predicted_memory, predicted_seconds: by the plan; None: no prediction.
    """

    time: float
    stage: str
    features: Features
    memory: int
    seconds: float
    other_seconds: float
    tokens: int
    predicted_memory: int | None = None
    predicted_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated needs of a training stage.

    Args:
        memory: peak of a worker in bytes; ``terms``: its parts by formula.
        least: the part that is certain: all of it if past runs on the same data or joined rows tell the length of rows.
        seconds: of the stage; None: its number of steps is unknown, and so are GPU-hours, price and energy.
        runs: number of past runs that correct it; 0: formula only.
        error: median relative error of memory and time of the predictions of these runs; None: no predictions.
        price: of its GPUs; None: no price is set. kwh: None: no power is set.
        unseen: nothing says how large its GPU is, so the memory is the least, of one row at once.
        at_most: the length of rows is unknown, so all rows are assumed to have ``max_length``.
        by_bytes: but their bytes are known, by which their tokens are guessed.
        traffic: bytes that a worker sends to others in a step.
        scoring: bytes of the process that scores its checkpoints; shared: those of them that a worker has less, because
            they are of the same memory.
        islands: what those of ``method.diloco`` send each other; None: there are none, or the steps are unknown.
        disk: what its checkpoints and its output take.
    """

    memory: int
    least: int
    terms: Memory
    seconds: float | None
    runs: int
    features: Features
    gpu_hours: float | None = None
    price: float | None = None
    currency: str = ""
    kwh: float | None = None
    error: tuple[float, float] | None = None
    unseen: bool = False
    at_most: bool = False
    by_bytes: bool = False
    traffic: int = 0
    scoring: int = 0
    shared: int = 0
    islands: Traffic | None = None
    disk: DiskNeed

    @property
    def basis(self) -> str:
        """``measured on 2 runs, estimates off by 5 % in memory, 12 % in time``, or ``by formula``."""
        most = "of other rows: time as of theirs, memory of" if self.runs else ""
        longest = (
            f", {most} rows at most max_length={self.features.max_length}".replace("  ", " ") if self.at_most else ""
        )
        if self.by_bytes:
            longest = f", roughly {self.features.row_tokens:.0f} tokens a row"
        if self.unseen:
            longest += ", at least: one row at once"
        if not self.runs:
            return f"by formula{longest}"
        off = f", estimates off by {self.error[0]:.0%} in memory, {self.error[1]:.0%} in time" if self.error else ""
        return f"measured on {counted(self.runs, 'run')}{off}{longest}"

    def to_dict(self) -> dict[str, object]:
        """The value of ``estimate`` in ``plan --json``."""
        error = {"memory": self.error[0], "seconds": self.error[1]} if self.error else None
        return {
            **in_all([self]), "terms_gib": self.terms.to_dict(), "basis": "measured" if self.runs else "formula",
            "runs": self.runs, "error": error, "at_most": self.at_most, "traffic_gib": self.traffic / 2**30,
            **({"evaluation_gib": self.scoring / 2**30} if self.scoring else {}),
            **({"islands": self.islands.to_dict()} if self.islands else {}),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The estimated needs of a stage of ``evaluate``.

    Args:
        memory: peak of a worker in bytes, by formula, if rows are as long as they may be.
        least: the part that is certain: the weights of its largest model; 0: they may be in few bits.
        seconds: as its last output of this store took; None: it has none.
    """

    memory: int
    least: int
    seconds: float | None

    @property
    def basis(self) -> str:
        return "by formula; its last time" if self.seconds is not None else "by formula; time unknown yet"

    def to_dict(self) -> dict[str, object]:
        """The value of ``estimate`` in ``plan --json``."""
        return {"memory_gib": self.memory / 2**30, "seconds": self.seconds, "basis": self.basis}


class Totals(TypedDict):
    """The needs of trainings together, as ``estimate`` in ``plan --json`` beside the stages."""

    memory_gib: float
    output_gib: float
    seconds: float | None
    gpu_hours: float | None
    cost: float | None
    currency: str
    kwh: float | None


def in_all(estimates: Sequence[Estimate]) -> Totals:
    """The largest memory and the sums of the rest.

    Time and GPU-hours are None if those of a stage are unknown, cost and energy also if no stage has them.
    """
    costs = [each.price for each in estimates if each.price is not None]
    energies = [each.kwh for each in estimates if each.kwh is not None]
    is_known = all(each.seconds is not None for each in estimates)
    return {
        "memory_gib": max(each.memory for each in estimates) / 2**30,
        "output_gib": sum(each.disk.output for each in estimates) / 2**30,
        "seconds": _sum(each.seconds for each in estimates), "gpu_hours": _sum(each.gpu_hours for each in estimates),
        "cost": sum(costs) if costs and is_known else None, "currency": estimates[0].currency,
        "kwh": sum(energies) if energies and is_known else None,
    }  # fmt: skip


def _sum(values: Iterable[float | None]) -> float | None:
    known = list(values)
    return None if None in known else sum(each for each in known if each is not None)


@dataclass(frozen=True, kw_only=True)
class History:
    """The past runs recorded in a store, oldest first."""

    runs: Sequence[Run] = field(default_factory=list)

    @staticmethod
    def of(store: Path) -> "History":
        return History(runs=read_jsonl(store / FILE, _run))

    def near(self, features: Features) -> list[Run]:
        """Runs with the same hardware, family and method."""
        own = (features.hardware, features.family, features.method)
        return [run for run in self.runs if (run.features.hardware, run.features.family, run.features.method) == own]

    def lengths(self, method: Training, features: Features) -> tuple[float, int, bool]:
        """Mean tokens per row, tokens of the longest sequence, and whether these are known.

        As past runs on the same data counted them; of other data the mean of the last run, and the maximum.
        """
        reads = getattr(method, "reads", None)
        most = float(method.max_length * max(1, len(reads.answers) if reads else 1))
        own = (features.rows, features.method)
        runs = [run.features for run in self.runs if (run.features.rows, run.features.method) == own]
        is_joined = reads is not None and reads.joined
        if is_joined:
            return most, method.max_length, True
        if not runs:  # other rows: the time is that of rows as long as the last ones, memory that of the longest
            near = self.near(features)
            return min(most, near[-1].features.row_tokens or most) if near else most, method.max_length, False
        mean = max(runs, key=lambda each: each.num_steps).row_tokens or most
        whole = (each.max_length for each in runs if not each.is_cut)  # which bounds the length of a row
        return min(mean, most), min([method.max_length, *whole]), True

    def memory(self, features: Features) -> int | None:
        """Peak memory in bytes: the formula plus the excess of the most similar run, such as allocator gaps.

        The excess is constant: measured on CPUs, it is the same with a model twice as wide.
        """
        runs = self.near(features)
        runs = [run for run in runs if run.features.num_steps > FEW_STEPS] or runs
        if not runs:
            return None
        nearest = min(runs, key=lambda run: abs(run.features.row_bytes - features.row_bytes))
        beside = nearest.memory - nearest.features.model_bytes - nearest.features.row_bytes
        return max(features.model_bytes, features.model_bytes + features.row_bytes + beside)

    def seconds(self, features: Features, peak: float | None) -> float | None:
        """Seconds of all steps: those of the most similar run, each part scaled by what it grows with.

        The parts are starting operations, matrix products at the peak, and the rest, which moves numbers.

        Args:
            peak: measured FLOP/s of all workers; None: unknown, and the rest grows with the arithmetic, too.
        """
        near = self.near(features)
        if not near:
            return None
        size = features.flops / features.passes
        whole = [run for run in near if run.features.num_steps > FEW_STEPS] or near  # the first steps are slower
        nearest = min(whole, key=lambda run: abs(run.features.flops / run.features.passes - size))
        past, left, found = nearest.features, nearest.seconds, 0.0
        arithmetic = features.flops / past.flops
        moved = features.moved / past.moved if past.moved and peak else arithmetic
        starts = past.passes * past.layers * _LAYER_SECONDS
        for most, ratio in (
            (starts, features.passes * features.layers / (past.passes * max(past.layers, 1))),
            (past.flops / peak if peak else 0.0, arithmetic),
            (left, moved),
        ):
            part = min(most, left)
            left, found = left - part, found + part * ratio
        return found


def formula_seconds(
    method: Training, resources: Resources, found: Architecture, total: Work, peak: float | None, num_steps: int
) -> float:
    """Seconds of all steps, before anything similar was measured.

    Args:
        peak: measured FLOP/s of a worker's device; None: unknown.
    """
    starts = total.passes * found.layers * _LAYER_SECONDS
    if not resources.gpus_per_worker:
        speed = peak * _SHARE if peak else _FLOPS["cpu"] * resources.cpus_per_worker
        return total.flops / (speed * resources.num_workers) + starts
    seconds = total.flops / ((peak * _GPU_SHARE if peak else _FLOPS["gpu"]) * resources.num_workers) + starts
    if method.adapter:
        seconds *= _ADAPTER
    if method.quantization:
        keys = found.heads * found.head + found.kv_heads * found.head
        layer = 2 * found.hidden * keys + 3 * found.hidden * found.intermediate
        seconds += total.passes * found.layers * layer * _DEQUANTIZED_SECONDS
    length = getattr(method, "max_completion_length", 0)
    return seconds + num_steps * length * found.layers * _TOKEN_SECONDS


def _run(features: Mapping[str, object], **rest: object) -> Run:
    return Run(features=Features(**features), **rest)  # type: ignore[arg-type]


def _process(features: Features) -> int:
    return 0 if ":gpu" in features.hardware else PROCESS


class Estimator:
    """Estimates the trainings of a plan; each model is read once."""

    def __init__(self, plan: Plan, history: History) -> None:
        self._plan, self._history = plan, history
        self._stages = {planned.name: planned for planned in plan.stages}
        self._models: dict[str, Model | None] = {}
        self._awaited: list[Model] = []
        self._peaks: dict[str, float | None] = {}

    def estimates(self, stages: Sequence[PlannedStage]) -> dict[str, Estimate]:
        """Name -> estimate of each training whose model is known."""
        found = {planned.name: self.estimate(planned) for planned in stages}
        return {name: each for name, each in found.items() if each}

    def estimate(self, planned: PlannedStage) -> Estimate | None:
        """The estimate of a stage; None: it does not train, or its model is unknown."""
        method, resources = planned.stage.method, planned.stage.resources
        known = self.model(planned) if isinstance(method, Training) else None
        num_steps = planned.hyperparameters.num_steps if planned.hyperparameters else None
        if not isinstance(method, Training) or known is None:
            return None
        with contextlib.suppress(ConfigError):  # reported by the plan and the stage
            found = self._estimate(planned, method, resources, *known, num_steps)
            # Of a model whose weights are not on this machine, memory that does not fit is a warning.
            return replace(found, least=0) if any(known is each for each in self._awaited) else found
        return None

    def _estimate(
        self, planned: PlannedStage, method: Training, resources: Resources, found: Architecture, shapes: Shapes,
        steps: int | None,
    ) -> Estimate:  # fmt: skip
        num_steps = steps or 1  # memory is that of one step
        key = _key(planned, found)
        tokens, longest, is_known = self._history.lengths(method, key)
        row_bytes = planned.hyperparameters.row_bytes if planned.hyperparameters else None
        is_text = getattr(method, "images", None) is None  # tokens of an image are no bytes of the row
        by_bytes = is_text and not is_known and row_bytes is not None and not self._history.near(key)
        if by_bytes and row_bytes:
            more = _TEMPLATE_TOKENS + getattr(method, "max_completion_length", 0)
            tokens = min(tokens, row_bytes[0] / _TOKEN_BYTES + more)
            longest = min(longest, row_bytes[1] + more)  # a byte is at most a token
        unseen = bool(resources.gpus_per_worker) and not _held(planned) and resources.micro_batch_size == "auto"
        terms = self._terms(planned, method, (found, shapes), longest, tokens if is_known or by_bytes else None)
        total = work(
            method, resources, found, shapes, num_steps=num_steps, tokens=tokens, slots=planned.stage.inputs,
            capacity=_held(planned),
        )  # fmt: skip
        features = replace(
            key, model_bytes=terms.model, row_bytes=max(terms.total - terms.model, 1), flops=total.flops,
            passes=total.passes, num_steps=num_steps, row_tokens=tokens, layers=found.layers, moved=total.moved,
        )  # fmt: skip
        near = self._history.near(features)
        others = [run.other_seconds for run in near if run.features.num_steps > FEW_STEPS]
        peak = self._peak(planned, method.precision)
        by_formula = formula_seconds(method, resources, found, total, peak, num_steps)
        past = self._history.seconds(features, peak * resources.num_workers if peak else None)
        whole = (past or by_formula) + (median(others) if others else _START_SECONDS) if steps else None
        gpu_hours = planned.asks[1] * whole / 3600 if whole is not None else None
        price, watts = resources.price_per_gpu_hour, resources.watts_per_worker
        judged = method.evaluation is not None and method.evaluation.is_judged
        judge = self._in_slot(planned, method.judge) if judged and method.judge in planned.inputs else None
        scoring, beside = scoring_memory(method, found, shapes, judge), asked_beside(method)
        if scoring and not beside[1]:
            scoring += PROCESS
        on_this = -(-resources.num_workers // resources.num_nodes)
        most = self._history.memory(features) or _process(features) + terms.total
        return Estimate(
            memory=most, least=most if is_known else _process(features) + terms.model, terms=terms, seconds=whole,
            runs=len(near), features=features, unseen=unseen, at_most=not is_known, by_bytes=by_bytes,
            error=_error(near), gpu_hours=gpu_hours,
            traffic=traffic(method, resources, shapes, total.passes // num_steps),
            price=None if price is None or gpu_hours is None else price * gpu_hours, currency=resources.currency,
            kwh=None if watts is None or whole is None else watts * resources.num_workers * whole / 3.6e6,
            scoring=scoring, shared=0 if resources.gpus_per_worker or beside[1] else -(-scoring // on_this),
            disk=disk_need(method, resources, shapes),
            islands=method.diloco.traffic(trained_weights(method, shapes).trained, steps, resources.num_workers)
            if method.diloco and steps
            else None,
        )  # fmt: skip

    def _terms(self, planned: PlannedStage, method: Training, model: Model, longest: int, mean: float | None) -> Memory:
        """The memory of a worker by formula; the least, of one row at once, where nothing says how large its GPU is."""
        resources, held = planned.stage.resources, _held(planned)
        if resources.gpus_per_worker and not held and resources.micro_batch_size == "auto":
            resources = replace(resources, micro_batch_size=1)
        return memory(method, resources, *model, longest, self._frozen(planned, method), mean=mean, capacity=held)

    def _peak(self, planned: PlannedStage, precision: str) -> float | None:
        """Measured FLOP/s of a worker; None: none was measured, or it runs on another machine."""
        if planned.runs_elsewhere:
            return None
        key = peak_key(planned.stage.resources, precision)
        if key not in self._peaks:
            self._peaks[key] = known_peak(planned.stage.resources, precision)
        return self._peaks[key]

    def model(self, planned: PlannedStage) -> Model | None:
        """Architecture and shapes of the model that a stage starts from, by its files or the stage that creates it."""
        passed: list[str] = []
        while planned.name not in self._models:
            passed.append(planned.name)
            input_ = planned.inputs.get(POLICY)
            above = self._stages.get(input_.name) if input_ and not (input_.pinned or input_.entry) else None
            if above is not None and isinstance(above.stage.method, Training):
                planned = above  # training keeps the shapes
                continue
            self._models[planned.name] = self._made(above) if above else self._read(planned, POLICY)
        for name in passed:
            self._models[name] = self._models[planned.name]
        return self._models[planned.name]

    def _frozen(self, planned: PlannedStage, method: Training) -> dict[str, int]:
        """Weights of the teacher and the reward model that a stage has; of the policy's size where one is unknown."""
        found: dict[str, int] = {}
        for slot in frozen_slots(method):
            model = self._in_slot(planned, slot) or self.model(planned)
            if slot in planned.inputs and model:
                found[slot] = num_weights(model[1])
        return found

    def _in_slot(self, planned: PlannedStage, slot: str) -> Model | None:
        input_ = planned.inputs.get(slot)
        above = self._stages.get(input_.name) if input_ and not (input_.pinned or input_.entry) else None
        if above is None:
            return self._read(planned, slot)
        return self.model(above) or self._made(above)

    def _read(self, planned: PlannedStage, slot: str) -> Model | None:
        """The model of an artifact or a source."""
        input_ = planned.inputs.get(slot)
        source = input_.source if input_ and input_.pinned and not input_.entry else None
        found = read_model(model_of(self._plan, planned, slot))
        awaited = awaited_model(source, self._plan.pipeline.store / CACHE) if source and not found else None
        self._awaited += [awaited] if awaited else []
        return found or awaited

    def scorings(self, stages: Sequence[PlannedStage]) -> dict[str, Scoring]:
        """Name -> estimate of each evaluation one of whose models is known."""
        found = {planned.name: self._scoring(planned) for planned in stages}
        return {name: each for name, each in found.items() if each}

    def _scoring(self, planned: PlannedStage) -> Scoring | None:
        """Models are scored one after another, and the largest needs most."""
        method, resources = planned.stage.method, planned.stage.resources
        if not isinstance(method, Evaluate):
            return None
        slots = [slot for slot in planned.inputs if method.consumes.get(slot, Kind.CHECKPOINT) in MODELS]
        models = [model for slot in slots if (model := self._in_slot(planned, slot))]
        if not models:
            return None
        above = [self._stages.get(planned.inputs[slot].name) for slot in slots]
        lengths = [each.stage.method.max_length for each in above if each and isinstance(each.stage.method, Training)]
        length = method.max_length or max(lengths, default=_SCORED_LENGTH)
        rows, in_bf16 = resources.micro_batch_size, resources.frozen_dtype(None) == "bf16"
        tokens = BATCH_TOKENS if rows == "auto" else rows * length
        process = 0 if resources.gpus_per_worker else PROCESS
        most, least = (
            max(scored_memory(num_weights(shapes), found, each, length, in_bf16=in_bf16) for found, shapes in models)
            for each in (tokens, 0)
        )
        certain = 0 if self._in_few_bits(planned, slots) else least + process
        return Scoring(memory=most + process, least=certain, seconds=_last_seconds(self._plan, planned))

    def _in_few_bits(self, planned: PlannedStage, slots: Sequence[str]) -> bool:
        """Whether a model in these slots may be held in few bits."""
        trained = [each.stage.method for each in self._plan.stages]
        configs = [
            read_json(folder, "config.json") for slot in slots if (folder := model_of(self._plan, planned, slot))
        ]
        return any(isinstance(each, Training) and each.quantization for each in trained) or any(
            isinstance(config, dict) and "quantization_config" in config for config in configs
        )

    def _made(self, maker: PlannedStage) -> Model | None:
        """The model of a stage that does not train."""
        entry, made = self._plan.entry(maker), maker.stage.method
        if (entry.output / "config.json").exists():
            return read_model(entry.output)
        return planned_model(made) if isinstance(made, BaseModel) else None

    def record(self, planned: PlannedStage, manifest: Manifest, predicted: Estimate | None) -> None:
        """Records the predicted and measured needs of a finished training."""
        found = self.measured(planned, manifest)
        if found is None:
            return
        if predicted:
            found = replace(found, predicted_memory=predicted.memory, predicted_seconds=predicted.seconds)
        try:
            append_jsonl(self._plan.home / FILE, asdict(found))
        except OSError as error:  # must not fail a finished training
            logger.warning("file=%s state=not_written error=%s", self._plan.home / FILE, error)

    def measured(self, planned: PlannedStage, manifest: Manifest) -> Run | None:
        """The measured needs of a finished training; None: it is not a training, or reported too little."""
        guess, method, metrics = self.estimate(planned), planned.stage.method, manifest.metrics
        known = self.model(planned)
        reports = [report.metrics for report in read_reports(self._plan.entry(planned).metrics)]
        peaks = [each["memory_gib"] for each in reports if "memory_gib" in each]
        seconds, tokens, steps = (metrics.get(name) for name in ("train_seconds", "num_tokens", "steps"))
        if guess is None or known is None or not isinstance(method, Training):
            return None
        if not (peaks and seconds and tokens and steps):
            return None
        pace = step_seconds(reports) if steps <= FEW_STEPS else None  # the first steps are slow
        row_tokens = tokens / (steps * method.global_batch_size)
        total = work(
            method, planned.stage.resources, *known, num_steps=int(steps), tokens=row_tokens,
            slots=planned.stage.inputs, capacity=_held(planned),
        )  # fmt: skip
        whole = manifest.provenance.end - manifest.provenance.start
        is_cut = any(metrics.get(name, 1.0) for name in ("rows_cut", "rows_dropped"))
        features = replace(
            guess.features, flops=total.flops, passes=total.passes, num_steps=int(steps), row_tokens=row_tokens,
            is_cut=is_cut, moved=total.moved,
        )  # fmt: skip
        run = Run(
            time=time.time(), stage=planned.name, features=features, memory=round(max(peaks) * 2**30),
            seconds=pace * steps if pace else seconds, other_seconds=max(whole - seconds, 0.0), tokens=int(tokens),
        )  # fmt: skip
        # Memory by formula for rows as the next plan counts them, which adds what this run needed beside it.
        mean, longest, _ = History(runs=[run]).lengths(method, features)
        terms = self._terms(planned, method, known, longest, mean)
        return replace(run, features=replace(features, row_bytes=max(terms.total - terms.model, 1)))


def _last_seconds(plan: Plan, planned: PlannedStage) -> float | None:
    """How long the last output of a stage in the store took."""
    last = next(Store(plan.home).finished(planned.name), None)
    return last.provenance.end - last.provenance.start if last else None


def _held(planned: PlannedStage) -> int:
    """Bytes of a worker, which decide how many tokens ``micro_batch_size=auto`` takes at once; 0: unknown."""
    return 0 if planned.runs_elsewhere else capacity(planned.stage.resources)


def _error(runs: Sequence[Run]) -> tuple[float, float] | None:
    of_memory = [abs(run.predicted_memory / run.memory - 1) for run in runs if run.predicted_memory]
    seconds = [(run.predicted_seconds, run.seconds + run.other_seconds) for run in runs]
    of_time = [abs(predicted / measured - 1) for predicted, measured in seconds if predicted]
    return (median(of_memory), median(of_time)) if of_memory and of_time else None


def _key(planned: PlannedStage, found: Architecture) -> Features:
    method, resources = planned.stage.method, planned.stage.resources
    assert isinstance(method, Training)
    kind = "gpu" if resources.gpus_per_worker else "cpu"
    elsewhere = planned.runs_elsewhere
    name = "cluster" if elsewhere else hardware().get(kind, "none")
    rows = planned.inputs.get(rows_slot(method))
    adapter = f"+{method.adapter.type}" if method.adapter else ""
    quantized = f"+{method.quantization.format}" if method.quantization else ""
    return Features(
        method=f"{method.name()}{adapter}{quantized}", family=found.family,
        rows=short(rows.fingerprint) if rows else "",
        hardware=f"{name}:{kind}:{resources.num_workers}x{resources.cpus_per_worker}:{method.precision}",
        max_length=method.max_length, model_bytes=0, row_bytes=1, flops=0.0, passes=1, num_steps=1,
    )  # fmt: skip


# --- disk space, and the model that a stage starts from


def require_plan_disk(plan: Plan, stages: Sequence[PlannedStage]) -> None:
    """Refuses trainings that do not fit on the disk; a stage with an unknown model is checked when it starts.

    Args:
        stages: in order of execution: outputs of earlier stages stay, their checkpoints do not.
    """
    before = 0
    for planned in stages:
        method, resources = planned.stage.method, planned.stage.resources
        if isinstance(method, Training):
            before += require_disk(
                planned.name, method, resources, model_of(plan, planned), plan.entry(planned), before=before
            )  # fmt: skip


def share_notes(plan: Plan, stages: Sequence[PlannedStage]) -> list[str]:
    """Notes on the share of parameters that each stage with an adapter, ``freeze`` or ``images`` trains.

    Raises:
        ConfigError: a name in ``adapter`` or ``freeze`` matches nothing in the model.
    """
    notes = []
    for planned in stages:
        method = planned.stage.method
        if not isinstance(method, Training):
            continue
        what = [f"adapter.type={method.adapter.type}"] if method.adapter else ["freeze"] if method.freeze else []
        parts = ("vision", "projector", "language") if getattr(method, "images", None) else ()
        if frozen := [part for part in parts if part not in parts_trained(method)]:
            what.append(f"frozen: {', '.join(frozen)}")
        if not what:
            continue
        model = model_of(plan, planned)
        try:
            percent = percent_trained(method, model_shapes(model)) if model else None
        except ConfigError as error:
            raise ConfigError(f"stages.{planned.name}: {error}") from error
        if percent is not None:
            notes.append(f"stages.{planned.name} trains {percent:.3g} % of the parameters ({'; '.join(what)})")
    return notes


def disk_notes(plan: Plan, estimates: Mapping[str, Estimate]) -> list[str]:
    """A note on what trainings write: the most at one time, with checkpoints, and what stays."""
    most = stays = 0
    for each in estimates.values():  # in order of execution: outputs of earlier stages stay
        most = max(most, stays + each.disk.total.bytes)
        stays += each.disk.output + each.disk.staying * each.disk.checkpoint
    free = free_bytes(plan.pipeline.store)
    if most <= free:
        shown = f"disk: at most {gigabytes(most)} with checkpoints, {gigabytes(stays)} stay; {gigabytes(free)} free"
        return [shown] if most else []
    lacking = f"disk: {gigabytes(most)} > {gigabytes(free)} free"
    try:
        require_plan_disk(plan, plan.stale)
    except ConfigError as error:
        return [f"{lacking}: a run here is refused: {error}"]
    return [
        f"{lacking}, if checkpoints are that many ({gigabytes(stays)} stay): stages.NAME.resources.keep_last=1 "
        "keeps fewer, store=DIRECTORY is on another disk"
    ]


def island_notes(estimates: Mapping[str, Estimate]) -> list[str]:
    """Notes on what the islands of ``method.diloco`` send each other."""
    return [f"stages.{name}: {each.islands}" for name, each in estimates.items() if each.islands]


def unseen_notes(plan: Plan, estimates: Mapping[str, Estimate]) -> list[str]:
    """Notes that memory is not checked, since no GPU is seen, and on the GPU that times assume if none was measured."""
    timed = [
        name for name, each in estimates.items()
        if not each.runs and each.seconds and (own := plan.stage(name).stage).resources.gpus_per_worker
        and isinstance(own.method, Training) and not known_peak(own.resources, own.method.precision)
    ]  # fmt: skip
    reached = _FLOPS["gpu"] / 1e12
    speed = (
        f"{', '.join(timed)}: no training measured a GPU here: times are of one that reaches {reached:g} TFLOP/s, "
        f"whatever gpu_memory_gib is; a card that reaches {reached / 4:g} takes about four times as long"
    )
    here = [
        name for name in estimates
        if not (planned := plan.stage(name)).runs_elsewhere and not capacity(planned.stage.resources)
    ]  # fmt: skip
    memory_note = f"{', '.join(here)}: {NO_GPU}, so run refuses it here, and memory is not checked; {PLAN_FOR}"
    return [*([memory_note] if here else []), *([speed] if timed else [])]


def scoring_notes(plan: Plan, estimates: Mapping[str, Estimate]) -> list[str]:
    """Notes on what the processes that score checkpoints take beside the trainings."""
    asked = {name: (asked_beside(plan.stage(name).stage.method), each) for name, each in estimates.items()}
    return [
        f"stages.{name}.method.evaluation takes {counted(cpus, 'CPU')} ({counted(cpus, 'thread')}), "
        f"{'a GPU of its own' if gpus else 'no GPU'} and {gib(each.scoring)} of {'it' if gpus else 'memory'} "
        "beside the training, by formula"
        for name, ((cpus, gpus), each) in asked.items() if each.scoring
    ]  # fmt: skip


def model_of(plan: Plan, planned: PlannedStage, slot: str = POLICY) -> Path | None:
    """Directory of a model with the shapes of the one in a slot; training keeps the shapes. None: not known yet."""
    input_ = planned.inputs.get(slot)
    if input_ is None:
        return None
    if input_.entry:
        return input_.entry.output
    if input_.pinned:
        return local_model(input_.source)
    parent = next((each for each in plan.stages if each.fingerprint == input_.fingerprint), None)
    if parent and isinstance(parent.stage.method, Training) and parent.stage.method.produces == Kind.CHECKPOINT:
        return model_of(plan, parent)
    entry = Store(plan.pipeline.store).entry(input_.name, input_.fingerprint)
    return entry.output if entry.is_finished() else None


_SMALL_BYTES = 100 * 10**6  # of files whose rows are all read when the plan is made


def with_notes(plan: Plan) -> Plan:
    """The plan of ``read_rows``, with notes on the rows, on what of the weights is trained, and on what is faster.

    Raises:
        ConfigError: as ``share_notes``.
        DataError: as ``read_rows``.
    """
    pipeline, stages = plan.pipeline, {planned.name: planned.stage for planned in plan.stale}
    is_set, shares = set_fields(pipeline), share_notes(plan, plan.stale)
    plan, left_out = read_rows(plan)
    notes = [
        *position_notes(pipeline, stages), *guess_notes(pipeline, stages), *column_notes(pipeline, stages), *left_out,
        *toy_notes(stages), *_idle_notes(plan),
        *shares,
        *cluster_notes([planned.name for planned in plan.stale if planned.resources.on_cluster]),
        *bf16_notes(stages, [name for name in stages if is_set(name, "method.precision")]), *compile_notes(stages),
    ]  # fmt: skip
    return replace(plan, notes=[*plan.notes, *notes])


def _idle_notes(plan: Plan) -> list[str]:
    """The trainings that change no weight."""
    return [
        f"{planned.name}: learns nothing, since its only step is at the learning rate 0 of the warm-up: posttrain init "
        f"writes a recipe for few rows; or stages.{planned.name}.method.schedule.warmup=0"
        for planned in plan.stale
        if (found := planned.hyperparameters) and found.num_steps == 1 and found.warmup
    ]


def estimate_notes(plan: Plan, found: Mapping[str, Estimate]) -> list[str]:
    """Notes on disks, islands, scores beside a training, and memory that is not checked."""
    return [*disk_notes(plan, found), *island_notes(found), *scoring_notes(plan, found), *unseen_notes(plan, found)]


def read_rows(plan: Plan) -> tuple[Plan, list[str]]:
    """Reads the rows of data stages that are to run, from small files on this machine.

    Returns:
        The plan, with about how many steps the trainings on these rows take; and notes on rows that are left out.

    Raises:
        DataError: what the stages would refuse, all of it.
    """
    notes, refusals = list[str](), list[str]()
    counts = dict[str, tuple[int, tuple[float, int] | None]]()
    for planned in plan.stale:
        method = planned.stage.method
        if not isinstance(method, Prepare):
            continue
        read = {slot: planned.inputs[slot].source for slot in method.row_slots(planned.stage.inputs)}
        try:
            left_out, num_rows, row_bytes = refused_rows(method, read, replays=REPLAY in planned.stage.inputs)
        except DataError as error:
            refusals.append(f"{planned.name}: {_addressed(str(error), planned, read)}")
            continue
        if num_rows:
            counts[planned.name] = num_rows, row_bytes
        if left_out:
            reasons = ", ".join(f"{reason}: {count:,}" for reason, count in left_out.items())
            paths = ", ".join(each.path for each in read.values() if each)
            notes.append(f"{planned.name}: rows left out of {paths}: {reasons}")
    if refusals:
        raise DataError("\n".join(refusals))
    return replace(plan, stages=[_counted(planned, counts) for planned in plan.stages]), notes


def _addressed(text: str, planned: PlannedStage, read: Mapping[str, Source | None]) -> str:
    """A refusal with the whole addresses of settings, where it has their short forms or placeholders."""
    slot = next((slot for slot, source in read.items() if source and source.path in text), next(iter(read)))
    source = f"sources.{planned.stage.inputs[slot].removeprefix(SOURCE)}"
    text = re.sub(r"(?<![\w.])(?=format=NAME|columns\.\w+=|loader\.sep=)", f"{source}.", text)
    text = re.sub(r"(?<![\w.])(?=max_bad_rows=)", f"stages.{planned.name}.method.", text)
    own = sorted({file for word, file in project_files.items() if word.startswith(f"{source}.columns")})
    if own and " is not a column; " in text:
        text += f"; {own[0]} sets {source}.columns, for other rows; '~{source}.columns' leaves it out"
    if " rows cannot be used:" in text and any(each and Path(each.path).is_dir() for each in read.values()):
        text += "; files in several formats are a source each (docs/data.md, Sources)"
    return text.replace("sources.NAME", source).replace("stages.STAGE", f"stages.{planned.name}")


def _counted(
    planned: PlannedStage, counts: Mapping[str, tuple[int, tuple[float, int] | None]]
) -> PlannedStage:  # fmt: skip
    """A training with the number of rows of its data stage, where that is not finished."""
    method = planned.stage.method
    if planned.state == "reuse" or not isinstance(method, Training) or not planned.hyperparameters:
        return planned
    rows = planned.inputs.get(rows_slot(method))
    num_rows, row_bytes = counts.get(rows.name, (None, None)) if rows else (None, None)
    if num_rows is None or planned.hyperparameters.num_examples is not None:
        return planned
    tokenization, packs = method.tokenization(), None
    is_text = tokenization is not None and tokenization.kind == Kind.TEXT
    if row_bytes and tokenization and (is_text or tokenization.packing):
        tokens = num_rows * (row_bytes[0] / _TOKEN_BYTES + (0 if is_text else _TEMPLATE_TOKENS))
        packs = max(1, round(tokens / method.max_length))
        row_bytes = tokens / packs * _TOKEN_BYTES, method.max_length
    found = hyperparameters(method, None, None, num_rows, packs=packs, given=planned.stage.given)
    return replace(planned, hyperparameters=replace(found, row_bytes=row_bytes))


# Advice asks for the rows of each training, and again for each recipe that it tries.
_checked = dict[str, tuple[Mapping[str, int], int | None, tuple[float, int] | None]]()


def refused_rows(
    method: Prepare, read: Mapping[str, Source | None], *, replays: bool = False
) -> tuple[Mapping[str, int], int | None, tuple[float, int] | None]:
    """How many rows a data stage would leave out, by reason, and keep for training; the bytes of a row: mean and most.

    None where that is not known.

    Args:
        replays: whether rows of earlier models join them, so that their number is not known.

    Raises:
        DataError: what the stage would refuse.
    """
    sources = {slot: source for slot, source in read.items() if source and _is_small_file(source)}
    if not sources or len(sources) < len(read):
        return {}, None, None
    files = [file for source in sources.values() for path in local_paths(source.path) for file in files_of([path])]
    states = tuple((str(file), (state := file.stat()).st_mtime_ns, state.st_size) for file in files)
    question = repr((method, sources, replays, states))
    if question not in _checked:
        gc.enable()  # DuckDB's binding prints what it takes for leaks when a process ends without it
        from tasks.data.preparing.prepare import check_rows

        _checked[question] = check_rows(method, sources, os.cpu_count() or 1, replays=replays)
    return _checked[question]


def _is_small_file(source: Source) -> bool:
    paths = [] if source.path.startswith((PYTHON, QUICKSTART)) else local_paths(source.path)
    if not paths or is_loaded(source):
        return False
    from tasks.data.reading.tables import is_saved

    return not is_saved(paths[0]) and sum(each.stat().st_size for each in files_of(paths)) < _SMALL_BYTES
