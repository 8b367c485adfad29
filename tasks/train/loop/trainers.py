"""Trainers of TRL and of users: the arguments that each takes, and how it reads rows that are already tokens."""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from lineage.errors import ConfigError
from tasks.train.kernels.machine import kernel_args
from tasks.train.optim.optimizers import optimizer_args
from tasks.train.optim.schedules import schedule_args
from tasks.train.sharding import autocast, zero_args

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer

    from tasks.context import TrainContext
    from tasks.recipe import TrainingRecipe

_SHARED = {"train_dataset", "processing_class", "ref_model", "peft_config"}  # parameters that run.trl(...) sets
# Modules whose trainers tokenize prompts as they generate.
_GENERATE = {f"trl.trainer.{each}_trainer" for each in ("grpo", "rloo", "distillation")}


def parameters_of(trainer_class: type) -> set[str]:
    """The named parameters of the constructor, and of the constructors that it passes its keywords to."""
    found: set[str] = set()
    for base in trainer_class.__mro__:
        if "__init__" in base.__dict__:
            each = inspect.signature(base.__dict__["__init__"]).parameters
            found |= each.keys()
            if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in each.values()):
                break
    return found - {"self", "model", "args", "kwargs"}


def require_known(own: Mapping[str, object], known: set[str], parameters: set[str], where: str) -> None:
    """Requires that own arguments are known, and not set by ``run.trl`` itself.

    Args:
        known: fields of the config.
        parameters: of the trainer.

    Raises:
        ConfigError: names the first that is not, and the nearest.
    """
    shared = sorted(own.keys() & _SHARED)
    if shared:
        raise ConfigError(
            f"{shared[0]}: run.trl(...) sets it itself, from the method's reads, models and adapter; remove it from "
            "run.trl(...)"
        )
    for name in sorted(own.keys() - known - parameters):
        nearest = difflib.get_close_matches(name, sorted(known | parameters), 1)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        raise ConfigError(
            f"{name} is not an argument of {where}{hint}; remove it from run.trl(...), or use one of their arguments"
        )


def reads_lines(trainer_class: type) -> bool:
    """Whether a trainer can use the padding-free forward: it needs only log-probabilities, or only scores."""
    from trl import DPOTrainer, RewardTrainer, SFTTrainer

    ours = getattr(trainer_class, "is_padding_free", False)
    return ours or issubclass(trainer_class, (SFTTrainer, DPOTrainer, RewardTrainer))


def on_tokens(trainer_class: "type[Trainer]") -> "type[Trainer]":
    """The trainer without TRL's preparation of data: the rows are already tokens."""
    if _GENERATE & {base.__module__ for base in trainer_class.__mro__}:
        return _on_prompt_tokens(trainer_class)
    if not hasattr(trainer_class, "_prepare_dataset"):
        return trainer_class

    class OnTokens(trainer_class):
        def _prepare_dataset(self, dataset: "Dataset", *args: object, **kwargs: object) -> "Dataset":
            return dataset

        def _precompute_ref_logps(self, dataset: "Dataset", *args: object, **kwargs: object) -> "Dataset":
            return dataset  # its rows have them (``tasks.train.losses.reference_logps``)

        def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[None]:
            """Also for a LoRA's reference, the policy without its adapter, which is not called through DeepSpeed."""
            if hasattr(self, "ref_model"):
                return autocast(self.args)
            plain: AbstractContextManager[None] = super().autocast_smart_context_manager(cache_enabled)
            return plain

    OnTokens.__name__, OnTokens.__qualname__ = trainer_class.__name__, trainer_class.__qualname__
    return OnTokens


def _on_prompt_tokens(trainer_class: "type[Trainer]") -> "type[Trainer]":
    """The trainer, generating from the tokens of prompts: TRL would render them again, uncut and without tools."""

    class OnPromptTokens(trainer_class):
        def _generate_and_score_completions(self, inputs: list[dict[str, object]]) -> object:
            self._prompt_tokens = [example["prompt_ids"] for example in inputs if "prompt_ids" in example]
            return super()._generate_and_score_completions(inputs)

        def _tokenize_prompts(self, prompts: Sequence[object]) -> tuple[object, object, dict[str, object]]:
            if len(self._prompt_tokens) == len(prompts) and not getattr(self, "tools", None):
                return self._prompt_tokens, None, {}
            rendered: tuple[object, object, dict[str, object]] = super()._tokenize_prompts(prompts)
            return rendered

    OnPromptTokens.__name__, OnPromptTokens.__qualname__ = trainer_class.__name__, trainer_class.__qualname__
    return OnPromptTokens


def trainer_args(method: "TrainingRecipe", ctx: "TrainContext", num_steps: int) -> dict[str, object]:
    """Arguments that trainings share: identity from ``method``, execution from ``ctx``.

    Raises:
        ConfigError: the global batch does not divide, or the number of workers is not that of ``resources``.
    """
    resources = ctx.resources
    if ctx.world_size != resources.num_workers:
        raise ConfigError(
            f"{ctx.world_size} workers were started and resources.num_workers={resources.num_workers}; "
            "the global batch is derived from the latter, so the two must agree"
        )
    return {
        "output_dir": str(ctx.work_dir),
        "per_device_train_batch_size": (
            method.global_batch_size // resources.num_workers
            if resources.micro_batch_size == "auto"
            else resources.micro_batch_size
        ),
        "gradient_accumulation_steps": resources.accumulation_steps(method.global_batch_size),
        "max_steps": num_steps,
        **optimizer_args(method.optimizer),
        **schedule_args(method.schedule, method.learning_rate, num_steps),
        "max_grad_norm": method.max_grad_norm,
        "seed": method.seed,
        **kernel_args(method, resources),
        "train_sampling_strategy": "sequential",  # the dataset is in the order of training
        "max_length": None,  # rows are already cut, and counted
        "dataset_kwargs": {"skip_prepare_dataset": True},  # rows are already tokens
        "remove_unused_columns": False,  # the collator reads what it needs
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        **zero_args(method, ctx),
    }
