"""Rules that join references, rows, optimizers, schedules, batches and workers with each other."""

from importlib.util import find_spec

from tasks.best import HELD_OUT_LOSS
from tasks.context import Launcher
from tasks.data.kinds import PREFERENCES
from tasks.data.tokens.tokenization import why_not_packable
from tasks.dpo import DPO
from tasks.train.dpo_losses import LOSSES, weights_of
from tasks.train.generating import Generating
from tasks.train.optimizers import OPTIMIZERS
from tasks.train.rule import Case, Fields, Rule
from tasks.train.schedules import PLATEAU

_HAVE_B = ("lora", "dora")  # adapters with two matrices of which one starts at 0
_PRODIGY_RATE = 0.1
_UNSET_NORM = 1.0  # the default of max_grad_norm


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
        "micro_batch_size": _divisor(batch // workers, resources.micro_batch_size),
    }
    return {f"resources.{name}": value for name, value in fitting.items() if value != getattr(resources, name)}


def _batch_does_not_divide(case: Case) -> bool:
    return case.method.global_batch_size % (case.resources.num_workers * case.resources.micro_batch_size) != 0


def _leaves_a_worker_idle(case: Case) -> bool:
    num_minibatches = case.get("method.num_minibatches")
    if not isinstance(num_minibatches, int):
        return False
    return case.method.global_batch_size < num_minibatches * case.resources.num_workers


def _keep_best_unmeasured(case: Case) -> bool:
    kept = case.resources.keep_best
    return kept is not None and kept.metric == HELD_OUT_LOSS and not case.method.measures_held_out


def _ends_before_its_patience(case: Case) -> bool:
    """Whether no measurement can end the training: that after the last step, which it also takes, ends nothing."""
    patience, every = case.get("method.validation.patience"), case.get("method.validation.every_steps")
    steps = case.method.num_steps
    if not (isinstance(patience, int) and isinstance(every, int) and steps):
        return False
    return patience > (steps - 1) // every


def _compares_in_steps(case: Case) -> bool:
    return isinstance(case.method, DPO) and any(LOSSES[name].of_step for name in weights_of(case.method))


def _compares_pairs(case: Case) -> bool:
    """Whether it trains on pairs of answers against a frozen reference."""
    return case.method.has_reference and type(case.method).reads == PREFERENCES and not case.method.has_own_loop


def _unpackable(case: Case) -> str | None:
    return why_not_packable(case.config) if case.config and case.get("method.packing") else None


def _unpaged(name: str) -> str:
    """The optimizer with its state in one memory."""
    rest = name.removeprefix("paged_")
    return rest if rest in OPTIMIZERS else "adamw_torch_fused"


def _too_much_decay(case: Case) -> bool:
    num_steps = case.method.num_steps
    return num_steps is not None and case.method.schedule.is_longer_than(num_steps)


STEP_RULES: tuple[Rule, ...] = (
    # References.
    Rule(
        id="precompute-no-reference",
        fields=("resources.precompute_reference", "method"),
        refuses=lambda case: case.resources.precompute_reference and not _compares_pairs(case),
        reason="it trains on no pairs against a frozen reference by transformers' trainer, so there is nothing to "
        "compute before",
        nearest={"resources.precompute_reference": False},
        example={"resources.precompute_reference": True},
    ),
    Rule(
        id="precompute-moving-reference",
        fields=("resources.precompute_reference", "method.reference_sync.every_steps"),
        refuses=lambda case: (
            case.resources.precompute_reference and case.get("method.reference_sync.every_steps") is not None
        ),
        reason="a reference that follows the policy has other log-probabilities after each update",
        nearest={"resources.precompute_reference": False},
        example={
            "resources.precompute_reference": True,
            "method.reference_sync.every_steps": 1,
            "method.sft_weight": None,
        },
        stage="dpo",
    ),
    Rule(
        id="precompute-ld-alpha",
        fields=("resources.precompute_reference", "method.ld_alpha"),
        refuses=lambda case: case.resources.precompute_reference and case.get("method.ld_alpha") is not None,
        reason="LD-DPO weights the tokens of an answer, and the cache holds their sums",
        nearest={"resources.precompute_reference": False},
        example={"resources.precompute_reference": True, "method.ld_alpha": 0.5, "method.sft_weight": None},
        stage="dpo",
    ),
    Rule(
        id="precompute-quantized-input",
        fields=("resources.precompute_reference", "method.adapter_in", "method.quantization.format"),
        refuses=lambda case: (
            case.resources.precompute_reference
            and case.method.quantization
            and case.method.adapter_in in ("continue", "stack")
        ),
        reason="the input's adapter would be merged into a base in few bits, and rounded with it",
        nearest={"resources.precompute_reference": False},
        example={
            "resources.precompute_reference": True,
            "method.adapter.type": "lora",
            "method.adapter_in": "continue",
            "method.quantization.format": "nf4",
        },
        stage="dpo",
    ),
    Rule(
        id="step-losses-zero",
        fields=("method.loss_type", "method.losses", "resources.zero_stage"),
        refuses=lambda case: case.resources.zero_stage and _compares_in_steps(case),
        reason="a loss that compares the pairs of a step reads them before the step, which was not tried under "
        "DeepSpeed's engine",
        nearest={"resources.zero_stage": 0},
        example={
            "method.loss_type": "kto_pair",
            "method.sft_weight": None,
            "resources.num_workers": 2,
            "resources.zero_stage": 2,
        },
        stage="dpo",
    ),
    Rule(
        id="moving-reference-weights",
        fields=("method.reference_sync.every_steps", "resources.weights", "method.precision"),
        refuses=lambda case: (
            case.get("method.reference_sync.every_steps") is not None
            and case.resources.frozen_dtype(case.resources.resolved_precision(case.method.precision)) == "bf16"
        ),
        reason="a reference in bf16 would round away what it takes over of the policy",
        nearest={"resources.weights": "fp32"},
        example={
            "method.reference_sync.every_steps": 1,
            "method.sft_weight": None,
            "method.precision": "bf16",
            "resources.weights": "bf16",
        },
        stage="dpo",
    ),
    Rule(
        id="moving-reference-zero",
        fields=("method.reference_sync.every_steps", "resources.zero_stage"),
        refuses=lambda case: case.get("method.reference_sync.every_steps") is not None and case.resources.zero_stage,
        reason="DeepSpeed's engine holds the reference, which was not tried to follow the policy under it",
        nearest={"resources.zero_stage": 0},
        example={
            "method.reference_sync.every_steps": 1,
            "method.sft_weight": None,
            "resources.num_workers": 2,
            "resources.zero_stage": 2,
        },
        stage="dpo",
    ),
    # Rows.
    Rule(
        id="packing-position-ids",
        fields=("method.packing", "config.model_type"),
        refuses=lambda case: _unpackable(case) is not None,
        reason="position ids alone keep the rows of a pack apart, and not every part of this model reads them",
        detail=lambda case: _unpackable(case) or "",
        nearest={"method.packing": None},
        example={"method.packing": "best_fit"},
        config={"model_type": "bloom"},
    ),
    # Optimizers and schedules.
    Rule(
        id="schedule-free-schedule",
        fields=("method.optimizer.name", "method.schedule.name"),
        refuses=lambda case: (
            case.optimizer.averages and not str(case.get("method.schedule.name")).startswith("constant")
        ),
        reason="a schedule-free optimizer averages its steps in place of a schedule, and after a warm-up wants a "
        "constant learning rate",
        nearest={"method.schedule.name": "constant"},
        example={"method.optimizer.name": "schedule_free_adamw"},
    ),
    Rule(
        id="optimizer-own-loop",
        fields=("method.optimizer.name", "method"),
        refuses=lambda case: case.method.has_own_loop and (case.optimizer.averages or case.optimizer.in_backward),
        reason="it takes part in the trainer's backward pass, measurements and checkpoints, and this method has a loop "
        "of its own",
        nearest={"method.optimizer.name": "adamw_torch_fused"},
        example={"method.optimizer.name": "schedule_free_adamw", "method.schedule.name": "constant"},
        stage="own_loop",
    ),
    Rule(
        id="galore-adapter",
        fields=("method.optimizer.name", "method.adapter.type"),
        refuses=lambda case: case.optimizer.projects and case.method.adapter,
        reason="it projects the gradients of whole matrices onto few dimensions, and an adapter's have few already",
        nearest={"method.adapter": None, "method.quantization": None},
        example={"method.optimizer.name": "galore_adamw", "method.adapter.type": "lora"},
    ),
    Rule(
        id="lora-plus-adapter",
        fields=("method.optimizer.lora_plus_ratio", "method.adapter.type"),
        refuses=lambda case: (
            case.get("method.optimizer.lora_plus_ratio") and case.get("method.adapter.type") not in _HAVE_B
        ),
        reason="LoRA+ gives the matrices B of a LoRA another learning rate, and there is none",
        nearest={"method.optimizer.lora_plus_ratio": None},
        example={"method.optimizer.lora_plus_ratio": 16.0},
    ),
    Rule(
        id="paged-cpu",
        fields=("method.optimizer.name", "resources.gpus_per_worker"),
        refuses=lambda case: case.optimizer.needs_gpu and not case.on_gpu,
        reason="its state pages between a GPU and the CPU, and there is no GPU",
        nearest=lambda case: {"method.optimizer.name": _unpaged(case.method.optimizer.name)},
        example={"method.optimizer.name": "paged_adamw_8bit"},
    ),
    Rule(
        id="backward-accumulation",
        fields=(
            "method.optimizer.name",
            "method.global_batch_size",
            "resources.num_workers",
            "resources.micro_batch_size",
        ),
        refuses=lambda case: case.optimizer.in_backward and case.resources.num_workers == 1 and case.accumulates,
        reason="LOMO and layer-wise optimizers update inside each backward pass, so each micro batch would be a step",
        nearest=lambda case: {"resources.micro_batch_size": case.method.global_batch_size},
        example={"method.optimizer.name": "lomo"},
    ),
    Rule(
        id="backward-workers",
        fields=("method.optimizer.name", "resources.num_workers"),
        refuses=lambda case: case.optimizer.in_backward and case.resources.num_workers > 1,
        reason="LOMO and layer-wise optimizers update before workers exchange gradients, so models would drift apart",
        nearest=lambda case: {
            "resources.num_workers": 1,
            "resources.num_nodes": 1,
            "resources.micro_batch_size": case.method.global_batch_size,
        },
        example={
            "method.optimizer.name": "galore_adamw_layerwise",
            "resources.num_workers": 2,
            "resources.micro_batch_size": 8,
        },
    ),
    Rule(
        id="backward-clipping",
        fields=("method.optimizer.name", "method.max_grad_norm"),
        refuses=lambda case: case.optimizer.in_backward and case.get("method.max_grad_norm") != _UNSET_NORM,
        reason="LOMO and layer-wise optimizers free each gradient before the norm of all is known, so none is clipped",
        nearest={"method.max_grad_norm": 1.0},
        example={
            "method.optimizer.name": "lomo",
            "method.max_grad_norm": 0.5,
            "resources.micro_batch_size": 16,
        },
    ),
    Rule(
        id="backward-fp16",
        fields=("method.optimizer.name", "method.precision"),
        refuses=lambda case: case.optimizer.in_backward and case.method.precision == "fp16",
        reason="LOMO and layer-wise optimizers update before the gradients of a scaled loss are scaled back",
        nearest={"method.precision": "bf16"},
        example={
            "method.optimizer.name": "galore_adamw_layerwise",
            "method.precision": "fp16",
            "resources.micro_batch_size": 16,
            "resources.gpus_per_worker": 1,
        },
    ),
    Rule(
        id="prodigy-learning-rate",
        fields=("method.optimizer.name", "method.learning_rate"),
        refuses=lambda case: (
            case.get("method.optimizer.name") == "prodigy" and case.method.learning_rate < _PRODIGY_RATE
        ),
        reason="it finds the step size itself, and the learning rate multiplies that",
        nearest={"method.learning_rate": 1.0},
        example={"method.optimizer.name": "prodigy"},
    ),
    Rule(
        id="minimum-learning-rate",
        fields=("method.schedule.min_learning_rate", "method.learning_rate"),
        refuses=lambda case: (case.method.schedule.min_learning_rate or 0) >= case.method.learning_rate,
        reason="the learning rate would rise",
        nearest=lambda case: {"method.schedule.min_learning_rate": float(f"{case.method.learning_rate / 10:g}")},
        example={"method.schedule.min_learning_rate": 0.01},
    ),
    Rule(
        id="decay-steps",
        fields=("method.schedule.decay", "method.schedule.warmup", "method.num_steps"),
        refuses=lambda case: _too_much_decay(case),
        reason="warm-up and decay are more than all steps",
        nearest={"method.schedule.decay": None},
        example={"method.schedule.name": "warmup_stable_decay", "method.schedule.decay": 3},
    ),
    Rule(
        id="adaptive-zero",
        fields=("method.schedule.adaptive.smoothing", "resources.zero_stage"),
        refuses=lambda case: case.method.schedule.adaptive and case.resources.zero_stage,
        reason="with ZeRO, DeepSpeed's engine holds the learning rate and the optimizer's state that it would change",
        nearest={"resources.zero_stage": 0},
        example={
            "method.schedule.adaptive.smoothing": 0.9,
            "resources.num_workers": 2,
            "resources.zero_stage": 2,
        },
    ),
    Rule(
        id="adaptive-optimizer",
        fields=("method.schedule.adaptive.smoothing", "method.optimizer.name"),
        refuses=lambda case: case.method.schedule.adaptive and (case.optimizer.averages or case.optimizer.in_backward),
        reason="an adaptive learning rate changes that of the next step and may go back to a checkpoint, which "
        "schedule-free optimizers and those that update inside the backward pass do not follow",
        nearest={"method.schedule.adaptive": None},
        example={
            "method.schedule.adaptive.smoothing": 0.9,
            "method.schedule.name": "constant",
            "method.optimizer.name": "schedule_free_adamw",
        },
    ),
    Rule(
        id="validation-patience",
        fields=("method.validation.patience", "method.validation.every_steps", "method.num_steps"),
        refuses=_ends_before_its_patience,
        reason="the training takes its last step before it has measured so often, so the patience never ends it",
        nearest={"method.validation.patience": None},
        example={"method.validation.patience": 2, "method.validation.every_steps": 2, "method.num_steps": 4},
    ),
    Rule(
        id="plateau-validation",
        fields=("method.schedule.name", "method.validation"),
        refuses=lambda case: case.get("method.schedule.name") == PLATEAU and case.method.validation is None,
        reason="it lowers the learning rate where the loss on held-out rows no longer falls, and none is measured",
        nearest=lambda case: (
            {"method.schedule.name": "linear"}
            if case.method.has_own_loop or not type(case.method).reads.trained
            else {"method.validation.every_steps": 10}
        ),
        example={"method.schedule.name": PLATEAU},
    ),
    # Batches, workers, sharding.
    Rule(
        id="batch-workers",
        fields=("method.global_batch_size", "resources.num_workers", "resources.micro_batch_size"),
        refuses=_batch_does_not_divide,
        reason="the global batch is not a multiple of num_workers x micro_batch_size, which change no model",
        detail=lambda case: (
            f"global_batch_size={case.method.global_batch_size} is not a multiple of "
            f"{case.resources.num_workers * case.resources.micro_batch_size} (num_workers x micro_batch_size), which "
            "change no model"
        ),
        nearest=_fitting_batches,
        example={"method.global_batch_size": 10, "resources.micro_batch_size": 4},
    ),
    Rule(
        id="minibatches-workers",
        fields=("method.num_minibatches", "method.global_batch_size", "resources.num_workers"),
        refuses=_leaves_a_worker_idle,
        reason="a minibatch has fewer completions than there are workers, so one of them would have none",
        nearest={"method.num_minibatches": 1},
        example={"method.num_minibatches": 16, "resources.num_workers": 2},
        stage="ppo",
    ),
    Rule(
        id="workers-nodes",
        fields=("resources.num_workers", "resources.num_nodes"),
        refuses=lambda case: case.resources.num_workers % case.resources.num_nodes,
        reason="num_workers counts the workers of all nodes, and does not divide over num_nodes",
        nearest=lambda case: {"resources.num_nodes": _divisor(case.resources.num_workers, case.resources.num_nodes)},
        example={"resources.num_workers": 2, "resources.num_nodes": 4, "resources.launcher": "cluster"},
    ),
    Rule(
        id="workers-launcher",
        fields=("resources.num_workers", "resources.launcher"),
        refuses=lambda case: case.resources.num_workers > 1 and not case.resources.on_cluster,
        reason="this launcher runs one worker",
        nearest={"resources.launcher": Launcher.AUTO},
        example={"resources.num_workers": 2, "resources.launcher": "process"},
    ),
    Rule(
        id="zero-one-worker",
        fields=("resources.zero_stage", "resources.num_workers"),
        refuses=lambda case: case.resources.zero_stage and case.resources.num_workers == 1,
        reason="ZeRO divides gradients and optimizer state over the workers, and there is one",
        nearest={"resources.zero_stage": 0},
        example={"resources.zero_stage": 2},
    ),
    Rule(
        id="zero-own-loop",
        fields=("resources.zero_stage", "method"),
        refuses=lambda case: case.resources.zero_stage and case.method.has_own_loop,
        reason="ZeRO needs transformers' trainer, and this method has a loop of its own",
        nearest={"resources.zero_stage": 0},
        example={"resources.zero_stage": 2, "resources.num_workers": 2},
        stage="own_loop",
    ),
    Rule(
        id="zero-optimizer",
        fields=("resources.zero_stage", "method.optimizer.name"),
        refuses=lambda case: case.resources.zero_stage and not case.optimizer.optim,
        reason="ZeRO divides the state of AdamW, over weights laid out as vectors",
        nearest={"method.optimizer.name": "adamw_torch_fused"},
        example={"resources.zero_stage": 2, "resources.num_workers": 2, "method.optimizer.name": "muon"},
    ),
    Rule(
        id="keep-best-unmeasured",
        fields=("resources.keep_best.metric", "method.best", "method.validation"),
        refuses=_keep_best_unmeasured,
        reason=f"{HELD_OUT_LOSS} is measured only where validation does, or where models compete by it (method.best)",
        nearest={"resources.keep_best.metric": "loss"},
        example={"resources.keep_best.metric": HELD_OUT_LOSS},
    ),
    Rule(
        id="vllm",
        fields=("method.vllm", "resources.gpus_per_worker"),
        refuses=lambda case: case.get("method.vllm") and (not case.on_gpu or find_spec("vllm") is None),
        reason="vLLM generates on a GPU, and must be installed",
        detail=lambda case: (
            "vLLM is not installed here (pip install vllm)"
            if case.on_gpu
            else "vLLM generates on a GPU, and there is none"
        ),
        nearest={"method.vllm": None},
        example={"method.vllm": "colocate"},
        stage="grpo",
    ),
    Rule(
        id="pairs-micro-batch",
        fields=("method.num_generations", "resources.micro_batch_size"),
        refuses=lambda case: (
            isinstance(case.method, Generating)
            and case.method.whole_groups
            and case.resources.micro_batch_size % case.method.num_generations
        ),
        reason="the chosen and the rejected completion of a prompt must be in one micro batch",
        nearest=lambda case: {"resources.micro_batch_size": case.get("method.num_generations")},
        example={"resources.micro_batch_size": 1},
        stage="online_dpo",
    ),
    Rule(
        id="adapter-init-prompts",
        fields=("method.adapter.init", "method"),
        refuses=lambda case: case.get("method.adapter.init") == "lora_ga" and not type(case.method).reads.trained,
        reason="lora_ga starts from gradients of the likelihood of rows, and prompts have none that is trained",
        nearest={"method.adapter.init": "eva"},
        example={"method.adapter.init": "lora_ga"},
        stage="grpo",
    ),
)
