"""Compatibility rules: which settings of a training work together, with its model and with its resources.

A rule about a single setting is in its dataclass; a rule about several is an entry of ``RULES``: for adapters,
quantized bases, precision and kernels in ``model_rules.py``; for references, rows, optimizers, schedules, batches and
workers here. The plan applies every rule, ``posttrain compat`` prints the table, and ``docs/settings.md`` is rendered
from it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec

from lineage.errors import ConfigError
from tasks.context import Launcher, Resources
from tasks.data.kinds import PREFERENCES
from tasks.data.tokens.tokenization import why_not_packable
from tasks.dpo import DPO
from tasks.method import Method, Training
from tasks.train.best import HELD_OUT_LOSS
from tasks.train.generation.generating import Generating
from tasks.train.losses.dpo_losses import LOSSES
from tasks.train.model_rules import MODEL_RULES
from tasks.train.models.quantization import FORMATS
from tasks.train.optim.optimizers import OPTIMIZERS
from tasks.train.optim.schedules import PLATEAU, SCHEDULES
from tasks.train.rule import (
    FSDP,
    GPU,
    HAVE_B,
    SET,
    UNSHARDED,
    ZERO,
    Case,
    Fields,
    Refusal,
    Rule,
    by_deepspeed,
    by_fsdp,
    divides_weights,
    own_loop,
    sharded,
    shown,
)
from tasks.train.sharding import divided_over

_NONE: Fields = {}
_PRODIGY_RATE = 0.1
_UNSET_NORM = 1.0  # the default of max_grad_norm
_MOVING: Fields = {"method.reference_sync.every_steps": 1, "method.sft_weight": None}
_PRECOMPUTE: Fields = {"resources.precompute_reference": True}
_AVERAGING = tuple(name for name, row in OPTIMIZERS.items() if row.averages)
_IN_PARTS = ("sgd", "adagrad", "rmsprop")  # beside AdamW: each weight by itself, in operations of torch
_IN_BACKWARD = tuple(name for name, row in OPTIMIZERS.items() if row.in_backward)


def _divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(each for each in range(min(number, most), 0, -1) if number % each == 0)


def _fitting_batches(case: Case) -> Fields:
    """Fewer rows per worker, and fewer workers where theirs do not divide the global batch."""
    batch, resources = case.method.global_batch_size, case.resources
    workers = _divisor(batch, resources.num_workers)
    fitting = {
        "num_workers": workers,
        "num_nodes": _divisor(workers, resources.num_nodes),
        "micro_batch_size": (
            "auto" if resources.micro_batch_size == "auto" else _divisor(batch // workers, resources.micro_batch_size)
        ),
    }
    return {f"resources.{name}": value for name, value in fitting.items() if value != getattr(resources, name)}


def _one_micro_batch(case: Case) -> Fields:
    return {"resources.micro_batch_size": case.method.global_batch_size}


def _state_unpaged(case: Case) -> Fields:
    """The same optimizer without paged state."""
    rest = case.method.optimizer.name.removeprefix("paged_")
    return {"method.optimizer.name": rest if rest in OPTIMIZERS else "adamw_torch_fused"}


def _measured_or_linear(case: Case) -> Fields:
    if case.method.has_own_loop or not type(case.method).reads.trained:
        return {"method.schedule.name": "linear"}
    return {"method.validation.every_steps": 10}


def _best_kept(case: Case) -> Fields:
    """The best checkpoints by what the method reports of its progress."""
    if case.method.progress == "reward":
        return {"resources.keep_best.metric": "reward", "resources.keep_best.mode": "max"}
    return {"resources.keep_best.metric": "loss"} if case.method.progress else {"resources.keep_best": None}


def _rows_at_once(case: Case) -> int:
    micro = case.resources.micro_batch_size
    return case.resources.num_workers * (1 if micro == "auto" else micro)


def _several_workers(case: Case) -> bool:
    return case.resources.num_workers > 1


def _compares_in_steps(case: Case) -> bool:
    return isinstance(case.method, DPO) and any(LOSSES[name].of_step for name in case.method.weights)


def _compares_no_pairs(case: Case) -> bool:
    """Whether it does not train on pairs of answers against a frozen reference."""
    return not case.method.has_reference or type(case.method).reads != PREFERENCES or case.method.has_own_loop


def _holds_reference_in_bf16(case: Case) -> bool:
    return case.resources.frozen_dtype(case.resources.resolved_precision(case.method.precision)) == "bf16"


def _unpackable(case: Case) -> str | None:
    return why_not_packable(case.config) if case.config and case.get("method.packing") else None


def _leaves_a_worker_idle(case: Case) -> bool:
    num_minibatches = case.get("method.num_minibatches")
    if not isinstance(num_minibatches, int):
        return False
    return case.method.global_batch_size < num_minibatches * case.resources.num_workers


def _ends_before_its_patience(setting: str) -> Callable[[Case], bool]:
    """Whether no measurement can end the training early; the one after the last step does not count."""

    def ends(case: Case) -> bool:
        patience, every = (case.get(f"method.{setting}.{name}") for name in ("patience", "every_steps"))
        steps = case.method.num_steps
        if not (isinstance(patience, int) and isinstance(every, int) and steps):
            return False
        return patience > (steps - 1) // every

    return ends


def _too_much_decay(case: Case) -> bool:
    num_steps = case.method.num_steps
    return num_steps is not None and case.method.schedule.is_longer_than(num_steps)


def _divides_unevenly(case: Case) -> bool:
    num_minibatches, rows = case.get("method.num_minibatches"), case.method.global_batch_size
    if not isinstance(num_minibatches, int) or rows % num_minibatches:
        return False
    return (rows // num_minibatches) % case.resources.num_workers > 0


def _offloaded(case: Case) -> Fields:
    """DeepSpeed's own name of it; none where no worker divides anything."""
    found = case.resources.sharding
    wanted = f"{found}_offload" if found in ("zero2", "zero3") else None
    return {"resources.offload": False, **({"resources.sharding": wanted} if wanted else {})}


def _by_fsdp(case: Case) -> Fields:
    """FSDP2 in place of ZeRO-3."""
    offloads = {"resources.offload": True} if "offload" in case.resources.sharding else {}
    return {"resources.sharding": "fsdp", **offloads}


def _whole_islands(case: Case) -> Fields:
    """Workers that divide over the islands; where the batch does not, fewer islands."""
    batch, resources = case.method.global_batch_size, case.resources
    islands = _divisor(batch, case.method.num_islands)
    per_island = _divisor(batch // islands, max(1, resources.num_workers // islands))
    workers = islands * per_island
    micro = resources.micro_batch_size
    fitting = {
        "method.diloco.num_islands": (islands, case.method.num_islands),
        "resources.num_workers": (workers, resources.num_workers),
        "resources.num_nodes": (_divisor(workers, resources.num_nodes), resources.num_nodes),
        "resources.micro_batch_size": ("auto" if micro == "auto" else _divisor(batch // workers, micro), micro),
    }
    return {path: value for path, (value, found) in fitting.items() if value != found}


def _measures_within_rounds(case: Case) -> bool:
    """Whether a model is measured, or competes, that is an island's own: all after the last step are the outer one."""
    diloco, validation, best = case.method.diloco, case.method.validation, case.method.best
    if diloco is None:
        return False
    steps = [each.every_steps for each in (validation, best) if each and each.every_steps]
    by_epoch = validation is not None and validation.every_epochs is not None and diloco.inner_steps > 1
    return by_epoch or any(each % diloco.inner_steps for each in steps)


def _measured_with_rounds(case: Case) -> Fields:
    """The measurements at the end of rounds."""
    diloco, validation, best = case.method.diloco, case.method.validation, case.method.best
    assert diloco
    inner, found = diloco.inner_steps, dict[str, object]()
    if validation:
        every = -(-(validation.every_steps or inner) // inner) * inner
        found |= {"method.validation.every_steps": every, "method.validation.every_epochs": None}
    if best and best.every_steps:
        found["method.best.every_steps"] = -(-best.every_steps // inner) * inner
    return {path: value for path, value in found.items() if value != case.get(path)}


def _divides_nothing(case: Case) -> bool:
    """Whether an island has one worker, or none of its machines has several of its workers."""
    per_island = case.resources.num_workers // case.method.num_islands
    of_machine = divided_over(case.resources) if case.resources.sharding == "fsdp_hybrid" else per_island
    return case.method.num_islands > 1 and math.gcd(per_island, of_machine) == 1


def _splits_groups(case: Case) -> object:
    """Whether an island would have a part of a prompt's completions."""
    return isinstance(case.method, Generating) and case.method.rows_of(1) % case.method.num_islands


def _whole_groups(case: Case) -> Fields:
    """Fewer islands, of whole groups."""
    assert isinstance(case.method, Generating)
    return {"method.diloco.num_islands": _divisor(int(case.method.rows_of(1)), case.method.num_islands)}


def _over_machines(case: Case) -> Fields:
    """FSDP2 within each machine where there are several, else DeepSpeed's ZeRO-2."""
    resources = case.resources
    if divided_over(resources.sharded("fsdp_hybrid")) not in (1, resources.num_workers):
        return {"resources.sharding": "fsdp_hybrid"}
    return {"resources.sharding": "zero2", "resources.offload": False}


def _splits_pairs(case: Case) -> object:
    if not isinstance(case.method, Generating) or not case.method.whole_groups:
        return False
    micro = case.resources.micro_batch_size
    return micro != "auto" and micro % case.method.num_generations


RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    # References.
    Rule(
        id="precompute-no-reference", when={**_PRECOMPUTE, "method": _compares_no_pairs},
        reason="it trains on no pairs against a frozen reference by transformers' trainer, so there is nothing to "
        "compute before",
        nearest={"resources.precompute_reference": False},
    ),
    Rule(
        id="precompute-moving-reference", when={**_PRECOMPUTE, "method.reference_sync.every_steps": SET},
        reason="a reference that follows the policy has other log-probabilities after each update",
        nearest={"resources.precompute_reference": False}, also=_MOVING, stage="dpo",
    ),
    Rule(
        id="precompute-ld-alpha",
        when={**_PRECOMPUTE, "method.ld_alpha": lambda case: case.get("method.ld_alpha") is not None},
        reason="LD-DPO weights the tokens of an answer, and the cache holds their sums",
        nearest={"resources.precompute_reference": False},
        also={"method.ld_alpha": 0.5, "method.sft_weight": None}, stage="dpo",
    ),
    Rule(
        id="precompute-quantized-input",
        when={**_PRECOMPUTE, "method.adapter_in": ("continue", "stack"), "method.quantization.format": SET},
        reason="the input's adapter would be merged into a base in few bits, and rounded with it",
        nearest={"resources.precompute_reference": False},
        also={"method.adapter.type": "lora", "method.quantization.format": "nf4"}, stage="dpo",
    ),
    Rule(
        id="step-losses-zero",
        when={"method.loss_type": _compares_in_steps, "method.losses": shown, "resources.sharding": by_deepspeed},
        reason="a loss that compares the pairs of a step reads them before the step, which was not tried under "
        "DeepSpeed's engine",
        nearest=UNSHARDED,
        also={"method.loss_type": "kto_pair", "method.sft_weight": None, **ZERO}, stage="dpo",
    ),
    Rule(
        id="moving-reference-weights",
        when={
            "method.reference_sync.every_steps": SET, "resources.weights": _holds_reference_in_bf16,
            "method.precision": shown,
        },
        reason="a reference in bf16 would round away what it takes over of the policy",
        nearest={"resources.weights": "fp32"},
        also={**_MOVING, "method.precision": "bf16", "resources.weights": "bf16"}, stage="dpo",
    ),
    Rule(
        id="moving-reference-zero", when={"method.reference_sync.every_steps": SET, "resources.sharding": sharded},
        reason="the reference is divided or in DeepSpeed's engine, and was not tried to follow the policy there",
        nearest=UNSHARDED, also={**_MOVING, **ZERO}, stage="dpo",
    ),
    # Rows.
    Rule(
        id="packing-position-ids", when={"method.packing": _unpackable, "config.model_type": shown},
        reason="position ids alone keep the rows of a pack apart, and not every part of this model reads them",
        detail=lambda case: _unpackable(case) or "",
        nearest={"method.packing": None}, also={"method.packing": "best_fit", "config.model_type": "bloom"},
    ),
    # Optimizers and schedules.
    Rule(
        id="schedule-free-schedule",
        when={
            "method.optimizer.name": _AVERAGING,
            "method.schedule.name": tuple(name for name in SCHEDULES if not name.startswith("constant")),
        },
        reason="a schedule-free optimizer averages its steps in place of a schedule, and after a warm-up wants a "
        "constant learning rate",
        nearest={"method.schedule.name": "constant"},
    ),
    Rule(
        id="optimizer-own-loop", when={"method.optimizer.name": (*_AVERAGING, *_IN_BACKWARD), "method": own_loop},
        reason="it takes part in the trainer's backward pass, measurements and checkpoints, and this method has a loop "
        "of its own",
        nearest={"method.optimizer.name": "adamw_torch_fused"},
        also={"method.schedule.name": "constant"}, stage="own_loop",
    ),
    Rule(
        id="galore-adapter",
        when={
            "method.optimizer.name": tuple(name for name, row in OPTIMIZERS.items() if row.projects),
            "method.adapter.type": SET,
        },
        reason="it projects the gradients of whole matrices onto few dimensions, and an adapter's have few already",
        nearest={"method.adapter": None, "method.quantization": None}, also={"method.adapter.type": "lora"},
    ),
    Rule(
        id="lora-plus-adapter",
        when={
            "method.optimizer.lora_plus_ratio": SET,
            "method.adapter.type": lambda case: case.get("method.adapter.type") not in HAVE_B,
        },
        reason="LoRA+ gives the matrices B of a LoRA another learning rate, and there is none",
        nearest={"method.optimizer.lora_plus_ratio": None}, also={"method.optimizer.lora_plus_ratio": 16.0},
    ),
    Rule(
        id="bf16-weights-adapter", when={"method.optimizer.weights": SET, "method.adapter.type": SET},
        reason="it holds the weights of a full training in bf16; those of an adapter are few, and stay in fp32, and "
        "resources.weights sets the dtype of what is frozen",
        nearest={"method.optimizer.weights": None},
        also={"method.adapter.type": "lora", "method.precision": "bf16", "method.optimizer.weights": "bf16"},
    ),
    Rule(
        id="bf16-weights-precision",
        when={
            "method.optimizer.weights": SET,
            "method.precision": lambda case: case.resources.resolved_precision(case.method.precision) != "bf16",
        },
        reason="layers whose weights are in bf16 compute in bf16",
        nearest={"method.precision": "bf16"}, also={"method.optimizer.weights": "bf16"},
    ),
    Rule(
        id="bf16-weights-zero", when={"method.optimizer.weights": SET, "resources.sharding": sharded},
        reason="DeepSpeed and FSDP2 lay out weights and optimizer state themselves, in one dtype",
        nearest={"method.optimizer.weights": None},
        also={"method.precision": "bf16", "method.optimizer.weights": "bf16", **ZERO},
    ),
    Rule(
        id="paged-cpu",
        when={
            "method.optimizer.name": tuple(name for name, row in OPTIMIZERS.items() if row.needs_gpu),
            "resources.gpus_per_worker": 0,
        },
        reason="its state pages between a GPU and the CPU, and there is no GPU",
        nearest=_state_unpaged,
    ),
    Rule(
        id="backward-accumulation",
        when={
            "method.optimizer.name": _IN_BACKWARD,
            "method.global_batch_size": lambda case: case.method.global_batch_size > _rows_at_once(case),
            "resources.num_workers": 1, "resources.micro_batch_size": shown,
        },
        reason="LOMO and layer-wise optimizers update inside each backward pass, so each micro batch would be a step",
        nearest=_one_micro_batch,
    ),
    Rule(
        id="backward-workers", when={"method.optimizer.name": _IN_BACKWARD, "resources.num_workers": _several_workers},
        reason="LOMO and layer-wise optimizers update before workers exchange gradients, so models would drift apart",
        nearest=lambda case: {"resources.num_workers": 1, "resources.num_nodes": 1, **_one_micro_batch(case)},
        also={"resources.num_workers": 2, "resources.micro_batch_size": 8},
    ),
    Rule(
        id="backward-clipping",
        when={
            "method.optimizer.name": _IN_BACKWARD,
            "method.max_grad_norm": lambda case: case.method.max_grad_norm != _UNSET_NORM,
        },
        reason="LOMO and layer-wise optimizers free each gradient before the norm of all is known, so none is clipped",
        nearest={"method.max_grad_norm": 1.0}, also={"method.max_grad_norm": 0.5, "resources.micro_batch_size": 16},
    ),
    Rule(
        id="backward-fp16", when={"method.optimizer.name": _IN_BACKWARD, "method.precision": "fp16"},
        reason="LOMO and layer-wise optimizers update before the gradients of a scaled loss are scaled back",
        nearest={"method.precision": "bf16"}, also={"resources.micro_batch_size": 16, **GPU},
    ),
    Rule(
        id="prodigy-learning-rate",
        when={
            "method.optimizer.name": "prodigy",
            "method.learning_rate": lambda case: case.method.learning_rate < _PRODIGY_RATE,
        },
        reason="it finds the step size itself, and the learning rate multiplies that",
        nearest={"method.learning_rate": 1.0},
    ),
    Rule(
        id="minimum-learning-rate",
        when={
            "method.schedule.min_learning_rate": lambda case: (
                (case.method.schedule.min_learning_rate or 0) >= case.method.learning_rate
            ),
            "method.learning_rate": shown,
        },
        reason="the learning rate would rise",
        nearest=lambda case: {"method.schedule.min_learning_rate": float(f"{case.method.learning_rate / 10:g}")},
        also={"method.schedule.min_learning_rate": 0.01},
    ),
    Rule(
        id="decay-steps",
        when={
            "method.schedule.decay": _too_much_decay,
            "method.schedule.warmup": shown, "method.num_steps": shown,
        },
        reason="warm-up and decay are more than all steps",
        nearest={"method.schedule.decay": None},
        also={"method.schedule.name": "warmup_stable_decay", "method.schedule.decay": 3},
    ),
    Rule(
        id="adaptive-zero", when={"method.schedule.adaptive.smoothing": SET, "resources.sharding": by_deepspeed},
        reason="DeepSpeed's engine holds the learning rate and the optimizer's state that it would change",
        nearest=UNSHARDED, also={"method.schedule.adaptive.smoothing": 0.9, **ZERO},
    ),
    Rule(
        id="rollback-unread",
        when={"resources.rollback": ("host", "device"), "method.schedule.adaptive.divergence_z": None},
        reason="it keeps the best model in memory for schedule.adaptive.divergence_z to go back to, which is not set",
        nearest={"resources.rollback": "disk"}, also={"resources.rollback": "host"},
    ),
    Rule(
        id="adaptive-moving-target",
        when={"method.schedule.adaptive.smoothing": SET, "method": lambda case: case.method.progress is None},
        reason="its loss is to a target that moves towards the teacher, and may rise while the student learns",
        nearest={"method.schedule.adaptive": None}, also={"method.schedule.adaptive.smoothing": 0.9}, stage="taid",
    ),
    Rule(
        id="adaptive-optimizer",
        when={"method.schedule.adaptive.smoothing": SET, "method.optimizer.name": (*_AVERAGING, *_IN_BACKWARD)},
        reason="an adaptive learning rate changes that of the next step and may go back to a checkpoint, which "
        "schedule-free optimizers and those that update inside the backward pass do not follow",
        nearest={"method.schedule.adaptive": None},
        also={"method.schedule.adaptive.smoothing": 0.9, "method.schedule.name": "constant"},
    ),
    *(
        Rule(
            id=f"{each}-patience",
            when={
                f"method.{each}.patience": _ends_before_its_patience(each), f"method.{each}.every_steps": shown,
                "method.num_steps": shown,
            },
            reason="the training takes its last step before it has measured so often, so the patience never ends it",
            nearest={f"method.{each}.patience": None},
            also={f"method.{each}.patience": 2, f"method.{each}.every_steps": 2, "method.num_steps": 4},
        )
        for each in ("validation", "evaluation")
    ),
    Rule(
        id="plateau-validation", when={"method.schedule.name": PLATEAU, "method.validation": None},
        reason="it lowers the learning rate where the loss on held-out rows no longer falls, and none is measured",
        nearest=_measured_or_linear,
    ),
    # Batches, workers, sharding.
    Rule(
        id="batch-workers",
        when={
            "method.global_batch_size": lambda case: case.method.global_batch_size % _rows_at_once(case),
            "resources.num_workers": shown, "resources.micro_batch_size": shown,
        },
        reason="the global batch is not a multiple of num_workers x micro_batch_size, which change no model",
        detail=lambda case: (
            f"global_batch_size={case.method.global_batch_size} is not a multiple of {_rows_at_once(case)} "
            "(num_workers x micro_batch_size), which change no model"
        ),
        nearest=_fitting_batches, also={"method.global_batch_size": 10, "resources.micro_batch_size": 4},
    ),
    Rule(
        id="minibatches-workers",
        when={
            "method.num_minibatches": _leaves_a_worker_idle, "method.global_batch_size": shown,
            "resources.num_workers": shown,
        },
        reason="a minibatch has fewer completions than there are workers, so one of them would have none",
        nearest={"method.num_minibatches": 1},
        also={"method.num_minibatches": 16, "resources.num_workers": 2}, stage="ppo",
    ),
    Rule(
        id="workers-nodes",
        when={
            "resources.num_workers": lambda case: case.resources.num_workers % case.resources.num_nodes,
            "resources.num_nodes": shown,
        },
        reason="num_workers counts the workers of all nodes, and does not divide over num_nodes",
        nearest=lambda case: {"resources.num_nodes": _divisor(case.resources.num_workers, case.resources.num_nodes)},
        also={"resources.num_workers": 2, "resources.num_nodes": 4, "resources.launcher": "cluster"},
    ),
    Rule(
        id="workers-launcher",
        when={
            "resources.num_workers": _several_workers,
            "resources.launcher": lambda case: not case.resources.on_cluster,
        },
        reason="this launcher runs one worker",
        nearest={"resources.launcher": Launcher.AUTO},
        also={"resources.num_workers": 2, "resources.launcher": "process"},
    ),
    Rule(
        id="min-workers",
        when={
            "resources.min_workers": lambda case: (case.resources.min_workers or 0) > case.resources.num_workers,
            "resources.num_workers": shown,
        },
        reason="a training resumes with at least this many of num_workers after a lost node",
        nearest=lambda case: {"resources.min_workers": case.resources.num_workers},
        also={"resources.min_workers": 3, "resources.num_workers": 2},
    ),
    Rule(
        id="min-workers-zero", when={"resources.min_workers": SET, "resources.sharding": by_deepspeed},
        reason="ZeRO's optimizer state is read by as many workers as wrote it, so that fewer cannot resume",
        nearest={"resources.min_workers": None}, also={**ZERO, "resources.min_workers": 2},
    ),
    Rule(
        id="gpu-type", when={"resources.gpu": SET, "resources.gpus_per_worker": 0},
        reason="it is the type of a worker's GPU, and there is none",
        nearest={"resources.gpus_per_worker": 1}, also={"resources.gpu": "H100"},
    ),
    Rule(
        id="sharding-one-worker", when={"resources.sharding": sharded, "resources.num_workers": 1},
        reason="it divides the training over the workers, and there is one",
        nearest=UNSHARDED, also={"resources.sharding": "zero2"},
    ),
    Rule(
        id="zero-own-loop", when={"resources.sharding": by_deepspeed, "method": own_loop},
        reason="ZeRO needs transformers' trainer, and this method has a loop of its own",
        nearest={"resources.sharding": "fsdp"}, also=ZERO, stage="own_loop",
    ),
    Rule(
        id="zero-optimizer",
        when={
            "resources.sharding": by_deepspeed,
            "method.optimizer.name": tuple(name for name, row in OPTIMIZERS.items() if not row.optim),
        },
        reason="ZeRO was tried with AdamW alone",
        nearest={"method.optimizer.name": "adamw_torch_fused"}, also=ZERO,
    ),
    Rule(
        id="sharding-optimizer",
        when={
            "resources.sharding": by_fsdp, "method.adapter": None,
            "method.optimizer.name": tuple(
                name for name, row in OPTIMIZERS.items() if not (row.optim or name in _IN_PARTS)
            ),
        },
        reason=f"of divided weights AdamW, {', '.join(_IN_PARTS)} take the steps of one process: Muon rounds to "
        "bf16 in another order, Adafactor and bitsandbytes fail on DTensors, others were not tried; an adapter's are "
        "whole, and any of them trains it",
        nearest={"method.optimizer.name": "adamw_torch_fused"}, also=FSDP,
    ),
    # Islands of workers.
    Rule(
        id="diloco-workers",
        when={
            "method.diloco.num_islands": lambda case: case.resources.num_workers % case.method.num_islands,
            "resources.num_workers": shown, "method.global_batch_size": shown,
        },
        reason="the workers do not divide over the islands",
        nearest=_whole_islands, also={"method.diloco.num_islands": 2, "resources.num_workers": 1},
    ),
    Rule(
        id="diloco-method", when={"method.diloco.num_islands": SET, "method": own_loop},
        reason="islands synchronise in transformers' trainer, and this method has a loop of its own",
        nearest={"method.diloco": None}, also={"method.diloco.num_islands": 1}, stage="own_loop",
    ),
    Rule(
        id="diloco-groups",
        when={
            "method.diloco.num_islands": SET, "method.num_generations": _splits_groups,
            "method.global_batch_size": shown,
        },
        reason="an island has all completions of a prompt, and they do not divide over the islands",
        nearest=_whole_groups, stage="grpo",
        also={
            "method.diloco.num_islands": 2, "method.num_generations": 8, "method.global_batch_size": 8,
            "resources.num_workers": 2, "resources.micro_batch_size": 4,
        },
    ),
    Rule(
        id="diloco-min-workers",
        when={
            "method.diloco.num_islands": SET,
            "resources.min_workers": lambda case: 0 < (case.resources.min_workers or 0) < case.method.num_islands,
        },
        reason="with fewer workers than islands, one of them would have none",
        nearest=lambda case: {"resources.min_workers": case.method.num_islands},
        also={"method.diloco.num_islands": 2, "resources.num_workers": 2, "resources.min_workers": 1,
              "resources.micro_batch_size": 4},
    ),
    Rule(
        id="diloco-hybrid-min-workers",
        when={
            "method.diloco.num_islands": SET, "resources.min_workers": SET, "resources.sharding": "fsdp_hybrid",
            "method.adapter": None,
        },
        reason="each worker keeps its part of its island's weights, so that fewer cannot resume",
        nearest={"resources.min_workers": None},
        also={
            "method.diloco.num_islands": 2, "resources.min_workers": 2, "resources.num_workers": 4,
            "resources.num_nodes": 2, "resources.micro_batch_size": 4,
        },
    ),
    Rule(
        id="diloco-optimizer", when={"method.diloco.num_islands": SET, "method.optimizer.name": _AVERAGING},
        reason="its state holds the weights of its own average, which would not follow an outer step",
        nearest={"method.optimizer.name": "adamw_torch_fused"},
        also={"method.diloco.num_islands": 1, "method.schedule.name": "constant"},
    ),
    Rule(
        id="diloco-bf16-weights", when={"method.diloco.num_islands": SET, "method.optimizer.weights": SET},
        reason="the optimizer keeps the lower 16 bits of each weight, which an outer step would not move",
        nearest={"method.optimizer.weights": None},
        also={"method.diloco.num_islands": 1, "method.precision": "bf16", "method.optimizer.weights": "bf16"},
    ),
    Rule(
        id="diloco-adapter", when={"method.diloco.num_islands": SET, "method.adapter.type": "adalora"},
        reason="each island would prune other ranks, and their mean has none of these ranks",
        nearest={"method.adapter.type": "lora", "method.adapter.target_rank": None},
        also={"method.diloco.num_islands": 1, "method.num_steps": 300},
    ),
    Rule(
        id="diloco-reference", when={"method.diloco.num_islands": SET, "method.reference_sync.every_steps": SET},
        reason="each island's reference would follow another policy",
        nearest={"method.reference_sync": None},
        also={**_MOVING, "method.diloco.num_islands": 1}, stage="dpo",
    ),
    Rule(
        id="diloco-divergence",
        when={"method.diloco.num_islands": SET, "method.schedule.adaptive.divergence_z": SET},
        reason="going back to the best checkpoint restores the first island alone, and no outer momentum",
        nearest={"method.schedule.adaptive.divergence_z": None},
        also={
            "method.diloco.num_islands": 1, "method.diloco.inner_steps": 1, "method.validation.every_steps": 1,
            "method.schedule.adaptive.divergence_z": 8.0,
        },
    ),
    Rule(
        id="diloco-measured",
        when={
            "method.diloco.inner_steps": _measures_within_rounds, "method.validation.every_steps": shown,
            "method.validation.every_epochs": shown, "method.best.every_steps": shown,
        },
        reason="between synchronisations each island has a model of its own; what is measured or competes is the outer "
        "model, at multiples of inner_steps",
        nearest=_measured_with_rounds,
        also={
            "method.diloco.num_islands": 1, "method.diloco.inner_steps": 2, "method.validation.every_steps": 3,
        },
    ),
    Rule(
        id="diloco-one-worker",
        when={
            "method.diloco.num_islands": _divides_nothing, "resources.sharding": sharded,
            "resources.num_workers": shown,
        },
        reason="it divides the training over the workers of an island on a machine, and there is one",
        nearest=UNSHARDED, also={"method.diloco.num_islands": 2, **ZERO},
    ),
    Rule(
        id="diloco-sharding",
        when={
            "method.diloco.num_islands": SET,
            "resources.sharding": ("fsdp", "fsdp_grad", "zero3", "zero3_offload"), "resources.num_nodes": shown,
        },
        reason="it divides weights over all workers, so that islands would exchange each layer in each step; "
        "fsdp_hybrid divides them within a machine",
        nearest=_over_machines,
        also={"method.diloco.num_islands": 2, "resources.num_workers": 4, "resources.micro_batch_size": 4},
    ),
    Rule(
        id="zero3-completions",
        when={
            "resources.sharding": ("zero3", "zero3_offload"), "resources.num_workers": _several_workers,
            "method": lambda case: not type(case.method).reads.trained,
        },
        reason="it samples completions outside of DeepSpeed's engine, where each token would gather all weights, and "
        "those that are gathered without gradients are trained no more; FSDP2 divides the same",
        nearest=_by_fsdp, also={"resources.num_workers": 2}, stage="grpo",
    ),
    *(
        Rule(
            id=f"zero3-{name}",
            when={
                "resources.sharding": ("zero3", "zero3_offload"), "resources.num_workers": _several_workers,
                setting: SET,
            },
            reason=f"{what} not tried with ZeRO-3; FSDP2 divides the same", nearest=_by_fsdp,
            also={"resources.num_workers": 2, **also},
        )
        for name, setting, what, also in (
            ("quantization", "method.quantization.format", "a base in few bits was",
             {"method.adapter.type": "lora", "method.quantization.format": "nf4"}),
            ("images", "method.images", "rows with images were", {"method.images.max_pixels": 4096}),
        )
    ),
    Rule(
        id="hybrid-nodes",
        when={
            "resources.sharding": "fsdp_hybrid",
            "resources.num_nodes": lambda case: divided_over(case.resources) in (1, case.resources.num_workers),
            "resources.num_workers": shown,
        },
        reason="it divides over the workers of a machine and repeats across machines, and there is one machine, or one "
        "worker on each",
        nearest={"resources.sharding": "fsdp"}, also={**ZERO, "resources.sharding": "fsdp_hybrid"},
    ),
    *(
        Rule(
            id=f"{name.replace('_', '-')}-sharding",
            when={f"resources.{name}": SET, "resources.sharding": lambda case, reads=reads: not reads(case)},
            reason=reason, nearest=nearest, also={f"resources.{name}": value},
        )
        for name, value, reads, reason, nearest in (
            ("offload", True, by_fsdp, "it is of FSDP2; DeepSpeed's are sharding=zero2_offload and zero3_offload",
             _offloaded),
            ("wrap", 1_000_000, by_fsdp, "it says what FSDP2 gathers at once", {"resources.wrap": None}),
            ("prefetch", 2, divides_weights, "no weights are divided that could be gathered ahead",
             {"resources.prefetch": 0}),
        )
    ),
    Rule(
        id="reduce-dtype-sharding", when={"resources.reduce_dtype": "bf16", "resources.sharding": "none"},
        reason="it is of DeepSpeed and FSDP2: plain data parallelism adds gradients in their own dtype",
        nearest={"resources.reduce_dtype": "fp32"},
    ),
    Rule(
        id="sharding-precompute", when={**_PRECOMPUTE, "resources.sharding": divides_weights},
        reason="one worker would compute the reference for the cache, and none has a whole one",
        nearest={"resources.precompute_reference": False}, also=FSDP, stage="dpo",
    ),
    Rule(
        id="sharding-minibatches",
        when={
            "method.num_minibatches": _divides_unevenly, "resources.sharding": divides_weights,
            "resources.num_workers": shown,
        },
        reason="workers would take unequal numbers of forward passes, in which they gather each other's weights",
        nearest={"method.num_minibatches": 1},
        also={"method.num_minibatches": 8, "method.global_batch_size": 24, **FSDP, "resources.micro_batch_size": 1},
        stage="ppo",
    ),
    Rule(
        id="sharding-bias",
        when={"method.adapter.bias": SET, "method.quantization.format": SET, "resources.sharding": divides_weights},
        reason="a divided base in few bits computes in bf16 and trains its biases in fp32, which torch does not add",
        nearest={"method.adapter.bias": None},
        also={
            "method.adapter.type": "lora", "method.adapter.bias": "all", "method.quantization.format": "nf4", **FSDP,
        },
    ),
    Rule(
        id="sharding-stack",
        when={"method.adapter_in": "stack", "resources.sharding": divides_weights},
        reason="a reference below stacked adapters was not tried in parts",
        nearest={"method.adapter_in": None}, also={"method.adapter.type": "lora", **FSDP},
    ),
    Rule(
        id="sharding-quantization",
        when={
            "method.quantization.format": tuple(name for name in FORMATS if name not in ("nf4", "fp4")),
            "resources.sharding": divides_weights,
        },
        reason="of formats with few bits, bitsandbytes' 4 bits alone are plain bytes with their scales on the layer; "
        "of a part of another's weights no layer finds the scales",
        nearest={"method.quantization.format": "nf4"}, also={"method.adapter.type": "lora", **FSDP},
    ),
    Rule(
        id="sharding-quantized-model", when={"config.quantization_config": SET, "resources.sharding": divides_weights},
        reason="PEFT and bitsandbytes read scales from a weight in few bits, and a part of it as a DTensor has none",
        nearest=UNSHARDED,
        also={
            "method.adapter.type": "lora", **FSDP,
            "config.quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True},
        },
    ),
    Rule(
        id="keep-best-unmeasured",
        when={
            "resources.keep_best.metric": HELD_OUT_LOSS,
            "method.best": lambda case: not case.method.measures_held_out, "method.validation": shown,
        },
        reason=f"{HELD_OUT_LOSS} is measured only where validation does, or where models compete by it (method.best)",
        nearest=_best_kept,
    ),
    Rule(
        id="keep-best-loss",
        when={"resources.keep_best.metric": "loss", "method": lambda case: case.method.progress != "loss"},
        reason="its loss is 0 by construction, or to a target that moves, so that it ranks no checkpoints",
        nearest=_best_kept, stage="grpo",
    ),
    Rule(
        id="vllm",
        when={
            "method.vllm": SET,
            "resources.gpus_per_worker": lambda case: (
                not case.on_gpu or find_spec("vllm") is None or divides_weights(case) or case.method.diloco
                or case.get("method.images") is not None
            ),
            "resources.sharding": shown, "method.diloco.num_islands": shown,
        },
        reason="vLLM generates on a GPU, must be installed, and is sent the whole weights of one policy",
        detail=lambda case: (
            "vLLM is sent tokens alone, and rows may have images"
            if case.get("method.images") is not None
            else "vLLM is sent whole weights, and no worker has them"
            if divides_weights(case)
            else "vLLM has one policy, and islands have policies of their own"
            if case.method.diloco
            else "vLLM is not installed here (pip install vllm)"
            if case.on_gpu
            else "vLLM generates on a GPU, and there is none"
        ),
        nearest={"method.vllm": None}, also={"method.vllm": "colocate"}, stage="grpo",
    ),
    *(
        Rule(
            id=field.replace("_", "-"),
            when={f"resources.{field}": SET, "method.vllm": lambda case: case.get("method.vllm") != "colocate"},
            reason="it is of the vLLM in the training's process; a server has its own (trl vllm-serve --help)",
            nearest={f"resources.{field}": off}, also={f"resources.{field}": value}, stage="grpo",
        )
        for field, off, value in (("vllm_gpu_memory_utilization", None, 0.5), ("vllm_enforce_eager", False, True))
    ),
    Rule(
        id="pairs-micro-batch",
        when={"method.num_generations": _splits_pairs, "resources.micro_batch_size": shown},
        reason="the chosen and the rejected completion of a prompt must be in one micro batch",
        nearest=lambda case: {"resources.micro_batch_size": case.get("method.num_generations")},
        also={"resources.micro_batch_size": 1}, stage="online_dpo",
    ),
    Rule(
        id="adapter-init-prompts",
        when={"method.adapter.init": "lora_ga", "method": lambda case: not type(case.method).reads.trained},
        reason="lora_ga starts from gradients of the likelihood of rows, and prompts have none that is trained",
        nearest={"method.adapter.init": "eva"}, stage="grpo",
    ),
)  # fmt: skip


def _needed(rule: Rule) -> str:
    """A field without which the rule refuses nothing; empty: there is none."""
    for path, wanted in rule.when.items():
        values = wanted if isinstance(wanted, tuple) else (wanted,)
        if wanted is SET or not (callable(wanted) or None in values):
            return path
    return ""


_NEEDED = [(_needed(rule), rule) for rule in RULES]  # most rules are about what most trainings do not set


def refusals(case: Case) -> Iterator[Refusal]:
    """A refusal from each rule that refuses a training."""
    for needed, rule in _NEEDED:
        if (not needed or case.get(needed) is not None) and rule.refuses(case):
            yield Refusal(
                rule=rule.id,
                found=dict(case.found(path) for path in rule.when),
                reason=rule.detail(case) if rule.detail else rule.reason,
                nearest=rule.remedy(case),
            )


def check_compatible(where: str, method: Method, resources: Resources, config: Mapping[str, object] = _NONE) -> None:
    """Requires that the settings of a stage work together, where it is a training.

    Args:
        where: ``stages.NAME``.
        config: of its model, where that is known.
    """
    if isinstance(method, Training):
        for refusal in refusals(Case(method=method, resources=resources, config=config)):
            raise ConfigError(refusal.text(where))
