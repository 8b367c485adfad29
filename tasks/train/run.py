"""One training, from its method and inputs to the saved output; ``train`` begins it. In order of time:

1. Models: the policy with its adapter, and the models that the method names beside it (``models/``).
2. Rows: their tokens, the order of training, and the collator.
3. The trainer and its optimizer, with what all trainings share: ``trl``, ``trainer_args`` (``optim/``, ``losses/``).
   ``trl`` is what a method calls; it reads 1 and 2.
4. The loop: ``fit`` takes the steps, with callbacks that measure, report, save and end it. A step itself is that of
   transformers' ``Trainer``, its loss that of TRL's.
5. The output: ``save``.

What happens inside a step is in three more files: ``kernels/padding_free.py`` (the batch and its forward),
``loop/token_batches.py`` (its micro batches with ``micro_batch_size=auto``) and ``loop/callbacks.py`` (metrics).
Between steps are ``loop/checkpointing.py`` (saves, stops) and ``loop/evaluation.py``. The division over workers is
``sharding.py``, a loop of a method's own ``loop/own_loop.py``.
"""

import difflib
import inspect
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from transformers import PreTrainedModel, PrinterCallback, Trainer, TrainerCallback, set_seed

from lineage.artifact import Kind
from lineage.errors import ConfigError, StoppedError
from lineage.source.model_files import processor_file
from tasks.context import AUTO_ROWS
from tasks.data.images import Images
from tasks.data.tokens.rendering import stop_at, turn_ends
from tasks.data.tokens.tokenize_rows import load_or_make, require_chat_template, show
from tasks.judgement.disk_need import parts_trained
from tasks.judgement.estimate import MOST_TOKENS, architecture, sequences, tokens_at_once
from tasks.model.adapter_files import intake
from tasks.model.chat_template import CHAT_TEMPLATE_FILE, install_chat_template, template_text
from tasks.model.merging import golden_prompts
from tasks.model.positions import fix_length, require_positions
from tasks.model.tokenizers import read_otherwise, require_same_tokens, tokenizer_of
from tasks.model.vision import Vision, write_size
from tasks.recipe import Role
from tasks.train.best import HELD_OUT_LOSS, VAL_LOSS
from tasks.train.generation.one_policy import FixedReference, unmoved, weights_of
from tasks.train.kernels.fast_lora import speed_up
from tasks.train.kernels.machine import (
    attention_of,
    collecting_between_steps,
    deterministic_kernels,
    fast_products,
    forget_liger,
    hold_in,
    kernel_args,
    plain,
    prepare_layers,
    replace_kernels,
    start_scaler,
)
from tasks.train.kernels.padding_free import (
    Collator,
    collator_for,
    install,
    is_padding_free,
    keep_own_head,
    on_tokens,
    reads_lines,
)
from tasks.train.loop.callbacks import (
    Jumps,
    NewRandomState,
    Recorder,
    Rounds,
    StepCounts,
    StepMarks,
    StepZeroProof,
    require_agreement,
    summary,
)
from tasks.train.loop.checkpointing import Checkpointing, Saver, discard_drafts, seconds_before
from tasks.train.loop.evaluation import AdaptiveRate, BestModel, Divergence, Scoring, Validating, held_out_rows
from tasks.train.loop.speed import Speed
from tasks.train.loop.token_batches import Budget, by_tokens, resuming_with_fewer
from tasks.train.loop.token_batches import start as start_by_tokens
from tasks.train.losses.reference_logps import with_reference
from tasks.train.losses.rewards import install_scores, unset_pad
from tasks.train.models import load as models
from tasks.train.models.adapted import (
    adapter_weights_of,
    add_noise,
    add_reference,
    complete_head,
    continued,
    finish_adapter,
    follow_ranks,
    new_adapter,
    peft_config,
    save_only_the_trained,
    share_trained,
    stacked,
    upon,
)
from tasks.train.models.freeze import freeze, freeze_unread
from tasks.train.models.quantized_base import step_in_fp32
from tasks.train.optim.diloco import divided
from tasks.train.optim.optimizers import install_optimizer, optimizer_args
from tasks.train.optim.schedules import install_schedule, schedule_args
from tasks.train.sharding import (
    Shards,
    divide_late,
    is_divided,
    keep_whole,
    name_accumulation,
    take_part,
    to_zero,
    whole_on_first,
    zero_args,
    zero_stage,
)
from tasks.train.sharding import install as install_shards

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from tasks.context import Dtype, Metrics, Resources, TrainContext
    from tasks.data.tokens.tokenize_rows import TokenizedRows
    from tasks.model.adapter_files import Intake
    from tasks.recipe import Inputs, TrainingRecipe
    from tasks.train.kernels.machine import Held
    from tasks.train.models.load import Policy


logger = logging.getLogger(__name__)

_POLICY = "policy"
_LONGEST_WAIT = 7 * 24 * 60  # minutes; the driver finds a worker that hangs
_SHARED = {"train_dataset", "processing_class", "ref_model", "peft_config"}  # parameters that run.trl(...) sets


def train(
    method: "TrainingRecipe", inputs: "Inputs", ctx: "TrainContext", loop: "Callable[[TrainingRun], Metrics]"
) -> dict[str, float]:
    """Trains and writes the output; returns the metrics of the rows, the training and the output.

    Args:
        loop: of the method: ``run.fit(run.trl(...))``, or steps of its own on ``run.policy.model``.
    """
    changed = method.adapter is not None and method.adapter.changes_the_base
    wait = timedelta(minutes=ctx.resources.timeout_minutes or _LONGEST_WAIT)
    with divided(method.diloco, ctx.rank, ctx.world_size, base_changed=changed, timeout=wait) as islands:
        run = TrainingRun(method, inputs, replace(ctx, islands=islands))
        try:
            with resuming_with_fewer(run.ctx.resources, lambda: run.rows_at_once, run.of_rows):
                metrics = loop(run)
        except Exception:
            if run.saver:
                run.saver.settle()
            raise
        saved = run.save()
    epochs = metrics["steps"] * float(method.rows_per_step) / len(run.rows) if "steps" in metrics else None
    length = {} if epochs is None else {"epochs": epochs}
    return {**run.rows.metrics, **run.share, **metrics, **length, **saved}


class TrainingRun:
    """One training: a method, its inputs, and where it runs. Models and rows are loaded at their first use.

    Attributes:
        method, inputs, ctx: of the stage.
        trained: the model to save; None: that of ``policy``.
        share: metrics of the number of trained parameters, where not all are trained.
        saver: of a loop of the method's own.
        writers: functions that write further files into the output directory, beside the model.
        device: where a method's own loop trains; trainers of transformers place models and batches themselves.
    """

    def __init__(self, method: "TrainingRecipe", inputs: "Inputs", ctx: "TrainContext") -> None:
        if method.precision == "auto":  # a plan resolves it before
            method = replace(method, precision=ctx.resources.resolved_precision("auto"))
        self.method, self.inputs, self.ctx = method, inputs, ctx
        self._trained_parts = parts_trained(method)
        self._images: Images | None = getattr(method, "images", None)  # how the rows' images are read
        self.trained: PreTrainedModel | PeftModel | None = None
        self.share: dict[str, float] = {}
        self.writers: list[Callable[[Path], None]] = []
        self._adapter_start: dict[str, Tensor] | None = None
        self._held_out: Dataset | None = None  # where they have precomputed log-probabilities
        self.device = torch.device(ctx.resources.device)
        self.saver: Saver | None = None

    # --- 1. models

    @cached_property
    def _start(self) -> "Policy":
        """The input policy, without the stage's adapter."""
        of = (self.method, self.inputs[_POLICY], self.ctx)
        assert self.ctx.rank or self._kept
        if self._is_reward_model:
            policy = models.load_reward_model(*of, self._base_dtype, late=True)
        else:
            policy = models.load_policy(*of, self._intake, self._base_dtype, late=True)
        freeze_unread(policy.model, self._trained_parts)
        if self.method.freeze:
            freeze(policy.model, self.method.freeze)
        require_positions(policy.model.config, self.method.max_length)
        models.repair_generation(policy.model, self.inputs[_POLICY])
        if self._chat_template:
            install_chat_template(policy.tokenizer, self._chat_template)
        if type(self.method).reads.chat and policy.model.can_generate():
            stop_at(policy.model.generation_config, turn_ends(policy.tokenizer))
        hold_in(policy.model, self._base_dtype)
        replace_kernels(policy.model, self.method.precision, self.ctx.resources)
        keep_whole(policy.model, self.method, self.ctx.resources)
        return policy

    @cached_property
    def _kept(self) -> models.Kept:
        return models.Kept.of(self.inputs[_POLICY].path, self.ctx.work_dir)

    @cached_property
    def _intake(self) -> "Intake":
        return intake(self.method, self.inputs[_POLICY])

    @cached_property
    def policy(self) -> "Policy":
        """The model to train, and its tokenizer.

        A method with a loop of its own gets the model as ``trl`` would train it: on its device, in training mode, with
        its adapter, and a reward model with scores of the last token.
        """
        start = self._start
        if not self.method.has_own_loop:
            return start
        model = self._adapted(start.model) if self.method.adapter else start.model
        divide_late(plain(model), self.ctx.resources)
        complete_head(model)
        freeze_unread(plain(model), self._trained_parts)
        if self.method.adapter:
            finish_adapter(model, self.method.adapter, self.method.seed)
            step_in_fp32(model)
        self._count(model)
        if self._is_reward_model:
            install_scores(model)
        if self._attention:
            start.model.set_attn_implementation(self._attention)
        prepare_layers(model, self.ctx.resources, own_loop=True)
        self._speed_up(model)
        return replace(start, model=(model if is_divided(model) else model.to(self.device)).train())

    def _adapted(self, model: "PreTrainedModel") -> "PeftModel":
        """The model with its adapter: the input's, a new one on top of the input's, or only a new one."""
        adapter, config = self.method.adapter, self._peft_config(model)
        assert adapter
        below = stacked(model, self._intake.carried) if self.method.adapter_in == "stack" else None
        set_seed(self.method.seed)  # for the adapter's initial weights, as TRL's trainers do
        if self.method.adapter_in == "continue":
            adapted = continued(model, adapter, config, self._intake.carried[0])
        elif below is not None:
            adapted = upon(below, config)
        else:
            pad = self._start.tokenizer.pad_token_id
            adapted = new_adapter(model, adapter, config, lambda: self.ordered_rows, pad)
        save_only_the_trained(adapted)
        if adapter.changes_the_base:
            self._adapter_start = adapter_weights_of(adapted)
        return adapted

    def _peft_config(self, model: "PreTrainedModel") -> "PeftConfig":
        assert self.method.adapter
        return peft_config(self.method.adapter, model, self.num_steps)

    def _count(self, model: torch.nn.Module) -> None:
        if self.method.adapter or self.method.freeze:
            self.share = share_trained(model)

    def _speed_up(self, model: "PreTrainedModel | PeftModel") -> None:
        if self.method.adapter and self.method.precision == "bf16" and self.ctx.resources.gpus_per_worker:
            logger.info("adapter=%s fused_layers=%d", self.method.adapter.type, speed_up(model))

    def model(self, name: str) -> "PreTrainedModel | None":
        """Loads a model that the method names beside its policy, by its role.

        Returns:
            A new model at each call, on ``device`` for a loop of its own; None for a FROZEN_POLICY where the policy has
            an adapter: the reference is the policy without it.
        """
        model = self._load(name)
        if model is None or not self.method.has_own_loop:
            return model
        if self._attention:
            model.set_attn_implementation(self._attention)
        return model if is_divided(model) else model.to(self.device)

    def _load(self, name: str) -> "PreTrainedModel | None":
        role = self.method.models[name]
        if role == Role.FROZEN_POLICY:
            return self._frozen_policy()
        if role == Role.VALUE_MODEL:
            scores = (each for each, other in self.method.models.items() if other == Role.REWARD_MODEL)
            start = next((each for each in scores if each in self.inputs), _POLICY)
            model = models.load_value_model(self.method, self.inputs[start], self.ctx)
            fix_length(model, self.method.max_length)  # as the policy: a value does not depend on what follows
            if self.method.optimizer.weights:
                hold_in(model, "as trained")
            prepare_layers(model, self.ctx.resources, own_loop=True)
            return model
        assert role in (Role.REWARD_MODEL, Role.TEACHER), f"{name} is the trained model: use run.policy"
        require_same_tokens(self.inputs[_POLICY], self.inputs[name])
        model = models.load_model(self.inputs[name], self._frozen_dtype, Shards.of(self.ctx.resources))
        require_positions(model.config, self.method.max_length)
        if role == Role.TEACHER and not self.method.reads.trained:  # it scores what the policy generates
            fix_length(model, self.method.max_length)
        if role == Role.REWARD_MODEL:
            install_scores(model)
        elif tokenizer_of(self.inputs[name].path).chat_template != self._start.tokenizer.chat_template:
            logger.warning(
                "%s=%s chat_template=differs: it reads conversations in the form of %s, and was trained on another",
                name, self.inputs[name].name, self.inputs[_POLICY].name,
            )  # fmt: skip
        return models.frozen(model)

    def _frozen_policy(self) -> "PreTrainedModel | None":
        """The input policy; None: it is the policy in training, without its adapter or with a copy of it."""
        found = self.method.reference_kind
        if found == "off" or (found == "copy" and not self.method.has_own_loop):
            return None
        policy_input, carried = self.inputs[_POLICY], self._intake.carried
        if self.method.adapter_in == "stack":  # on a quantized base, merged adapters would be rounded with it
            base = models.load_policy(self.method, policy_input, self.ctx, self._intake, self._frozen_dtype).model
            replace_kernels(base, self.method.precision, self.ctx.resources)
            return models.frozen(stacked(hold_in(base, self._frozen_dtype), carried).get_base_model())
        held: Held = "as trained" if self._rounds_as_policy or self.method.optimizer.weights else self._frozen_dtype
        reference = models.load_policy(self.method, policy_input, self.ctx, held=held).model
        replace_kernels(reference, self.method.precision, self.ctx.resources)
        return models.frozen(hold_in(reference, held))

    def _reference(self) -> "PreTrainedModel | None":
        if not self.method.has_reference:
            return None
        return self.model(next(name for name, role in self.method.models.items() if role == Role.FROZEN_POLICY))

    @property
    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The policy's."""
        return self._start.tokenizer

    def disable_dropout(self) -> None:
        """Switches off the policy's dropout, except that of an adapter; before ``policy`` is first read."""
        assert "policy" not in self.__dict__
        models.disable_dropout(self._start.model)

    @cached_property
    def _attention(self) -> str | None:
        found = attention_of(self.ctx.resources, self.method.precision)
        logger.info(
            "precision=%s attention=%s weights=%s", self.method.precision, found or "default", self._frozen_dtype
        )
        return found

    @property
    def _frozen_dtype(self) -> "Dtype":
        return self.ctx.resources.frozen_dtype(self.method.precision)

    @property
    def _base_dtype(self) -> "Held":
        """The dtype of the initial weights: fp32 if they are trained, or an initialization changes them."""
        adapter = self.method.adapter
        if self.method.optimizer.weights:
            return "as trained"
        return self._frozen_dtype if adapter and not adapter.changes_the_base else "fp32"

    @property
    def _rounds_as_policy(self) -> bool:
        """Whether the reference of a full training rounds to bf16 where autocast rounds its policy."""
        return self.method.adapter is None and self.method.precision == "bf16" and self._frozen_dtype == "bf16"

    @property
    def _is_reward_model(self) -> bool:
        return self.method.models[_POLICY] == Role.REWARD_HEAD

    @property
    def _chat_template(self) -> str | None:
        tokenization = self.method.tokenization()
        return tokenization.chat_template if tokenization else None

    # --- 2. rows

    @cached_property
    def rows(self) -> "TokenizedRows":
        """The tokens of the rows; cut and dropped rows are logged.

        The tokens that end their turns are added to the policy's stop tokens, beside those of the chat template.
        """
        reads, tokenization = type(self.method).reads, self.method.tokenization()
        assert tokenization
        if reads.chat:
            require_chat_template(self._start.tokenizer, self.inputs[_POLICY])
        data, workers = self.inputs[reads.slot], self.ctx.resources.cpus_per_worker
        rows = load_or_make(tokenization, data, self.inputs[_POLICY].path, self.ctx.cache_dir, workers)
        show(rows, data, self.method.max_length)
        spelled = rows.stats.spelled if tokenization.control_tokens is None else ()
        models.require_embeddings(rows, self._start.model, self._start.tokenizer, spelled)
        if self.ctx.rank == 0 and (other := read_otherwise(self.inputs[_POLICY].path)):
            logger.warning(
                "tokenizer=tokenizer.json auto_tokenizer=%s: transformers' AutoTokenizer, and programs that load the "
                "output by it, read other tokens; load it with PreTrainedTokenizerFast", other,
            )  # fmt: skip
        if self._start.model.can_generate():
            stop_at(self._start.model.generation_config, rows.stats.stop_tokens)
        return rows

    @cached_property
    def num_steps(self) -> int:
        """Optimizer steps; with ``num_epochs``, derived from the number of rows."""
        steps = self.method.steps(lambda: len(self.rows))
        if self.method.num_steps is None:
            logger.info("num_epochs=%g rows=%d num_steps=%d", self.method.num_epochs, len(self.rows), steps)
        return steps

    @cached_property
    def ordered_rows(self) -> Dataset:
        """Exactly the rows that the training consumes, in its order; of those of an island its own."""
        rows = self.rows
        if self._precomputes:
            rows = replace(rows, examples=self._with_reference(rows.examples))
        order = row_order(len(rows), self.method.rows_of(self.num_steps), self.method.seed)
        islands = self.ctx.islands
        return rows.dataset(islands.own_rows(order, self.method.rows_of(1)) if islands else order)

    @property
    def _precomputes(self) -> bool:
        return self.method.has_reference and self.ctx.resources.precompute_reference

    def _with_reference(self, examples: Dataset) -> Dataset:
        """Pairs with the reference's log-probabilities: those of the policy before it gets an adapter."""
        carries = self.method.adapter_in in ("continue", "stack")
        model = models.load_policy(self.method, self.inputs[_POLICY], self.ctx).model if carries else self._start.model
        return with_reference(examples, self.method, self.inputs, self.ctx, model)

    @property
    def _packs(self) -> bool:
        """Whether examples are packs of rows, which must not attend to each other."""
        tokenization = self.method.tokenization()
        return tokenization is not None and tokenization.packing is not None

    def _collator(self, own: object, is_line: bool) -> Collator:
        """The method's own collator or that of the rows' kind; adds the layout of tokens for a padding-free forward."""
        reads, tokenization = type(self.method).reads, self.method.tokenization()
        collate = cast(Collator, own or reads.collator(self._start.tokenizer.pad_token_id))
        if self._packs or (is_line and tokenization and reads.kind != Kind.TEXT):  # chunks have no padding
            pairs = reads.kind == Kind.PREFERENCES
            collate = collator_for(self._start.model, collate, pairs=pairs, packs=self._packs)
        if self.vision and reads.trained:  # prompts are padded when they are answered
            own = cast("Callable[[list[dict[str, object]]], object]", collate)
            collate = cast(Collator, self.vision.collator(own, packs=self._packs))
        return collate

    @cached_property
    def vision(self) -> Vision | None:
        """How the images of the rows are read; None: they have none."""
        return Vision.of(self.inputs[_POLICY].path, self.inputs[type(self.method).reads.slot].path, self._images)

    @property
    def stop_tokens(self) -> list[int]:
        """Tokens at which the policy's generation ends, with those that end the assistant's turns."""
        assert self.rows
        found = self._start.model.generation_config.eos_token_id
        return [] if found is None else [found] if isinstance(found, int) else list(found)

    def micro_batches(self, step: int) -> Iterator[object]:
        """This worker's collated rows of an optimizer step on ``device``, for a loop that is not transformers'.

        Args:
            step: counted from 0.
        """
        rows, size = self.ordered_rows, self.rows_at_once
        collate = self._collator(None, is_line=False)
        first = step * self.method.global_batch_size
        for number in range(self.method.global_batch_size // self.ctx.world_size // size):
            start = first + (number * self.ctx.world_size + self.ctx.rank) * size
            yield send_to_device(collate([rows[index] for index in range(start, start + size)]), self.device)

    @cached_property
    def rows_at_once(self) -> int:
        """Rows of a forward pass, where a trainer or a loop counts them; ``auto``: as many as the budget holds."""
        rows = self._resources_of_rows.micro_batch_size
        assert rows != "auto"
        return rows

    @cached_property
    def _resources_of_rows(self) -> "Resources":
        most = max(1, self._tokens_at_once // (self.method.max_length * sequences(self.method)))
        return self.of_rows(min(most, self.ctx.most_rows or most))

    def of_rows(self, most: int) -> "Resources":
        """The resources with as many rows in a forward pass, at most ``most``."""
        method = self.method
        whole_groups = getattr(method, "whole_groups", False)  # of a method that generates
        multiple = int(getattr(method, "num_generations", 1)) if whole_groups else 1
        return self.ctx.resources.of_rows(method.global_batch_size // self.ctx.world_size, most, multiple)

    @cached_property
    def _tokens_at_once(self) -> int:
        """Tokens of a forward pass under ``micro_batch_size=auto``, by the estimate."""
        config, resources = self._start.model.config, self.ctx.resources
        found = architecture(config.to_dict(), processor_file(self.inputs[_POLICY].path))
        held = int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()) if resources.gpus_per_worker else 0
        if found is None:
            return AUTO_ROWS * self.method.max_length
        tokens = tokens_at_once(self.method, resources, found, found.shapes(), held)
        logger.info("micro_batch_size=auto tokens_at_once=%d", tokens)
        return tokens

    # --- 3. the trainer and its optimizer

    def trl(self, trainer_class: type[Trainer], config_class: type, **own: object) -> Trainer:
        """Builds a trainer of TRL, of transformers or of a user's own, with everything that trainings share.

        Args:
            own: further fields of the config, and parameters of the trainer. A ``data_collator`` gets examples of the
                rows' kind.

        Raises:
            ConfigError: neither the config nor the trainer has such an argument, or it is one that is shared.
        """
        known = {each.name for each in fields(config_class) if each.init}
        parameters = parameters_of(trainer_class)
        require_known(own, known, parameters, f"{config_class.__name__} and {trainer_class.__name__}")
        if self.method.has_own_loop and "policy" in self.__dict__ and self.method.adapter:
            raise ConfigError(
                f"{type(self.method).__name__}.loop reads run.policy, whose model already has its adapter, before it "
                "calls run.trl(...), which adds one; call run.trl(...) alone, and train its trainer.model"
            )
        policy = self._start
        # Precomputed log-probabilities are computed here, before an adapter changes the model.
        rows, reference = self.ordered_rows, None if self._precomputes else self._reference()
        if self._precomputes and self.method.measures_held_out:
            self._held_out = self._with_reference(held_out_rows(self.method, self.inputs, self.ctx))
        # TRL's disable_dropout would switch off an adapter's dropout too, which the recipe sets.
        off = {"disable_dropout": False} if "disable_dropout" in known else {}
        if off and own.get("disable_dropout", True):
            for each in filter(None, (policy.model, reference)):
                models.disable_dropout(each)
        divides = self._divides_by_tokens
        counted = self.ctx if divides else replace(self.ctx, resources=self._resources_of_rows)
        arguments = {**trainer_args(self.method, counted, self.num_steps), **own, **off}
        arguments["precompute_ref_log_probs"] = self._precomputes
        is_line = reads_lines(trainer_class, self.method, policy.model, packs=self._packs)
        shared = {
            "train_dataset": rows,
            "data_collator": self._collator(own.get("data_collator"), is_line),
            "processing_class": policy.tokenizer,
            "ref_model": reference,
        }
        frozen = [each for each in own.values() if isinstance(each, PreTrainedModel)]
        model: PreTrainedModel | PeftModel = policy.model
        if self.method.adapter and "peft_config" in parameters and self.method.reference_kind == "off":
            shared["peft_config"] = self._peft_config(policy.model)
        elif self.method.adapter:
            model = self._adapted(policy.model)
        arguments_of_trainer = {name: value for name, value in {**own, **shared}.items() if name in parameters - known}
        final_class = on_tokens(trainer_class)
        args = config_class(**{name: value for name, value in arguments.items() if name in known})
        to_zero(args, reference, *frozen)
        trainer = (by_tokens(cast(Hashable, final_class)) if divides else final_class)(
            model=model, args=args, **arguments_of_trainer
        )
        if divides:
            self._start_by_tokens(trainer, is_line)
        freeze_unread(plain(trainer.model), self._trained_parts)  # an adapter on it too
        install_optimizer(trainer, self.method.optimizer, self.method.learning_rate)
        install_schedule(trainer, self.method.schedule, self.method.learning_rate)
        self._prepare(trainer, reference, frozen, is_line)
        follow_ranks(trainer, self.method.adapter)
        if self.method.has_reference:
            self._watch_reference(trainer, reference, proves="proof" not in own)
        self._count(trainer.model)
        install_shards(trainer)
        return trainer

    @property
    def _divides_by_tokens(self) -> bool:
        """Whether micro batches have about equal tokens: those of rows, outside of DeepSpeed, which counts them, and
        unless an attempt whose step could not be repeated had no memory."""
        resources, by_rows = self.ctx.resources, self.ctx.most_rows is not None or not type(self.method).reads.trained
        return resources.micro_batch_size == "auto" and not by_rows and not zero_stage(resources)

    def _start_by_tokens(self, trainer: Trainer, is_line: bool) -> None:
        reads = type(self.method).reads
        padded = not (reads.kind == Kind.TEXT or self._packs or (is_line and is_padding_free(self._start.model)))
        on_gpu, is_exact = self.ctx.resources.gpus_per_worker > 0, self.ctx.resources.is_deterministic
        # Bit for bit the same after a resume: not where measured memory would decide.
        budget = Budget(tokens=self._tokens_at_once, most=MOST_TOKENS, measured=on_gpu and not is_exact)
        start_by_tokens(trainer, budget, self.method.rows_of_island, padded=padded)

    def _prepare(
        self, trainer: Trainer, reference: "PreTrainedModel | None", frozen: "Sequence[PreTrainedModel]", is_line: bool
    ) -> None:
        """Installs the padding-free forward and scores; after the trainer is built, which replaces the forward too.

        Args:
            frozen: further models that the trainer reads rows with, such as a teacher.
        """
        finish_adapter(trainer.model, self.method.adapter, self.method.seed)
        if self._is_reward_model:
            install_scores(trainer.model)
        if self.method.has_reference and not self._precomputes and self.method.reference_kind == "copy":
            add_reference(trainer.model)
        divide_late(plain(trainer.model), self.ctx.resources)
        complete_head(trainer.model)
        if self.method.neftune_alpha:
            add_noise(trainer.model, self.method.neftune_alpha)
        squares = getattr(trainer, "use_weighting", False)
        for model in filter(None, (trainer.model, reference, *frozen)):
            keep_own_head(model)
            trains = not {"vision", "projector"}.isdisjoint(self._trained_parts) and zero_stage(self.ctx.resources)
            take_part(plain(model), self.vision, trains=bool(trains))
            if is_line:
                install(model, self._attention, packs=self._packs, squares=squares)
            elif self._attention:
                model.set_attn_implementation(self._attention)
        prepare_layers(trainer.model, self.ctx.resources, own_loop=False)
        self._speed_up(trainer.model)
        if reference is not None and not zero_stage(self.ctx.resources):  # DeepSpeed's engine calls the forward it has
            # Again, because the trainer's own preparation (autocast, device) wrapped the forward replaced above; the
            # policy computes under autocast, so the reference must.
            reference._is_accelerate_prepared = False
            trainer.ref_model = trainer.accelerator.prepare_model(reference, evaluation_mode=True)

    def _watch_reference(self, trainer: Trainer, reference: "PreTrainedModel | None", *, proves: bool) -> None:
        """Compares policy and reference before the first step, unless NEFTune's noise makes them differ, and requires
        that the reference stays.

        Args:
            proves: the first, where the trainer does not itself.
        """
        if proves and self.method.neftune_alpha:
            self._log_unproven()
        elif proves:
            trainer.add_callback(StepZeroProof(trainer, self.inputs[_POLICY], self._proof_tolerance))
        if not self._precomputes:
            held = getattr(trainer, "ref_model", None)
            trainer.add_callback(self.fixed_reference(trainer.model, reference if held is None else held))

    def _log_unproven(self) -> None:
        logger.warning(
            "step=0 reference=unproven: neftune_alpha=%g adds noise, other for each forward", self.method.neftune_alpha
        )

    def fixed_reference(
        self, policy: "PreTrainedModel | PeftModel", reference: "PreTrainedModel | None"
    ) -> FixedReference:  # fmt: skip
        """A check before the first updates that the reference does not follow the policy.

        Args:
            reference: None: as of ``model``.
        """
        sync = getattr(self.method, "reference_sync", None)
        return FixedReference(policy, reference, sync and sync.every_steps)

    def start_proof(self) -> Callable[["Tensor"], None]:
        """A check of the log-ratios before the first step: that policy and reference agree (``require_agreement``)."""
        if self.method.neftune_alpha:
            self._log_unproven()
            return lambda _log_ratios: None
        return partial(require_agreement, self.inputs[_POLICY], self._proof_tolerance)

    @property
    def _proof_tolerance(self) -> str:
        """The entry of ``TOLERANCE``: a policy in fp32 and a reference in bf16 differ by more than the kernels do."""
        rounded = self.method.adapter is None and self._frozen_dtype == "bf16" and not self._rounds_as_policy
        return "bf16 reference" if rounded else self.method.precision

    # --- 4. the loop

    def fit(self, trainer: Trainer) -> dict[str, float]:
        """Trains to the last step, and reports each step; the trainer then holds the weights of the stage's output.

        Returns:
            Final metrics: ``loss`` and TRL's metrics as means of the last steps, ``steps``, ``num_tokens``,
            ``train_seconds`` (of all attempts), ``tokens_per_second``, the same ``_per_worker``, ``mfu``. Of the best
            model ``best_step``, and means up to it; where it ended early, ``diverged_at_step`` or
            ``ended_early_at_step``.

        Raises:
            StoppedError: a stop was requested before the last step; a checkpoint of the step before is committed.
            PipelineError: the loss is non-finite, or an operation is not deterministic, which ``deterministic``
                forbids.
            DataError: models are measured on held-out rows, and there are none.
        """
        method, inputs, ctx = self.method, self.inputs, self.ctx
        self.trained = trainer.model
        if ctx.rank == 0 and type(method).reads.trained:  # else a loss says nothing about rows
            trainer.add_callback(Jumps(self._rows_of_step))
        if method.adapter:
            step_in_fp32(trainer.model)
        to_zero(trainer.args, trainer.model)
        before, start, first = seconds_before(ctx), time.perf_counter(), weights_of(trainer.model)
        speed = self.speed
        validation = None
        if method.measures_held_out:
            held_out = self._held_out or held_out_rows(method, inputs, ctx)
            validation = Validating(trainer, method, ctx, held_out, len(self.rows))
        saver = Saver(ctx, method, before, len(self.rows))
        checkpointing = Checkpointing(trainer, ctx, method, saver)
        best = BestModel(trainer, method.best, ctx, checkpointing) if method.best else None
        scoring = Scoring(trainer, method, inputs, ctx, checkpointing, len(self.rows)) if method.evaluation else None
        adaptive = method.schedule.adaptive
        rate = AdaptiveRate(trainer, method, ctx, best if adaptive.divergence_z else None) if adaptive else None
        divergence = Divergence(saver, best if method.on_divergence == "best" else None)
        if trainer.state.global_step < trainer.args.max_steps:
            try:
                watching = [*filter(None, (rate, validation, best, scoring)), divergence, Recorder(ctx, speed)]
                on_gpu = ctx.resources.gpus_per_worker > 0
                with (
                    deterministic_kernels(ctx.resources.is_deterministic),
                    fast_products(method.precision, on_gpu=on_gpu),
                    collecting_between_steps(enabled=on_gpu) as collect,
                ):
                    self._take_steps(trainer, watching, checkpointing, collect)
                saver.finish()
                ended_early = any(each.ended_at for each in (validation, scoring) if each)
                if checkpointing.stopped_at is not None and not ended_early:
                    raise StoppedError(f"stopped at step {checkpointing.stopped_at} of {trainer.args.max_steps}")
            except Exception:
                saver.settle()
                if ctx.rank == 0:  # rank 0 publishes checkpoints; another rank's failure must not delete its draft
                    discard_drafts(ctx.work_dir)
                raise
        else:
            logger.info("steps=%d state=finished", trainer.state.global_step)
        num_steps, notes = trainer.state.global_step, dict[str, float]()
        seconds = before + time.perf_counter() - start
        notes |= scoring.finish() if scoring else {}
        num_steps = (scoring and scoring.ended_at) or num_steps
        if best and (method.output == "best" or divergence.step is not None):
            notes["best_step"] = float(best.end_at_best())
        notes |= (rate.metrics if rate else {}) | unmoved(trainer.model, first)
        ended = {"ended_early_at_step": validation and validation.ended_at, "diverged_at_step": divergence.step}
        notes |= {name: float(at) for name, at in ended.items() if at is not None}
        log = [each for each in trainer.state.log_history if each["step"] <= num_steps]
        metrics = summary(log, seconds, speed, num_steps=num_steps, output_step=int(notes.get("best_step", num_steps)))
        held_out_loss = {VAL_LOSS: metrics[HELD_OUT_LOSS]} if method.validation and HELD_OUT_LOSS in metrics else {}
        return {**metrics, **notes, **held_out_loss}

    def _take_steps(
        self, trainer: Trainer, watching: Sequence[TrainerCallback], checkpointing: Checkpointing,
        collect: Callable[[], None],
    ) -> None:  # fmt: skip
        ctx = self.ctx
        name_accumulation(trainer)
        # It walks through all modules for each micro batch, and nothing reads it.
        trainer.floating_point_ops = lambda inputs: 0
        if trainer.accelerator.ddp_handler is not None:  # without it, each worker holds all gradients twice
            trainer.accelerator.ddp_handler.gradient_as_bucket_view = True
            # They are constants. A worker without memory does not come to the exchange before a forward pass.
            trainer.accelerator.ddp_handler.broadcast_buffers = False
        trainer.remove_callback(PrinterCallback)
        # In this order: measure, report, save.
        rounds = [Rounds(trainer, ctx, ctx.islands)] if ctx.islands else []
        # The trainer's own callbacks read the mean of the islands too.
        trainer.callback_handler.callbacks[:0] = [NewRandomState(ctx), StepCounts(trainer, ctx), *rounds]
        start_scaler(trainer)
        for callback in (*watching, StepMarks(ctx, collect), checkpointing):
            trainer.add_callback(callback)
        checkpointing.install()
        if (checkpoint := ctx.resume_from) and ctx.islands and trainer.is_deepspeed_enabled:
            checkpoint = ctx.islands.folder(checkpoint)
        if checkpoint:
            logger.info("checkpoint=%s state=resumed", checkpoint)
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        if callable(getattr(trainer.optimizer, "eval", None)):
            trainer.optimizer.eval()  # switches an averaging optimizer to the average, which is the output

    def _rows_of_step(self, step: int) -> str:
        order = row_order(len(self.rows), self.method.rows_of(step), self.method.seed)
        return self.rows.named(order[self.method.rows_of(step - 1) :])

    @property
    def speed(self) -> Speed:
        """Measures the training's speed."""
        return Speed(self.method, self.ctx.resources, self._start.model.config.to_dict(), self.inputs)

    # --- 5. the output

    def save(self) -> dict[str, float]:
        """Writes the trained model on rank 0, to which others give their part; returns metrics of a merged adapter."""
        model = self.policy.model if self.trained is None else self.trained
        whole_on_first(model, self.ctx.work_dir, first=self.ctx.rank == 0)
        if self.ctx.rank:  # it has no files to write, and must not touch those that rank 0 copies
            return {}
        prompts = golden_prompts(self.rows)
        if self._is_reward_model:
            unset_pad(plain(model), self._start.tokenizer, self.rows.stats.stop_tokens)
        forget_liger()  # a quantized base is merged on the CPU
        metrics = models.save_output(
            self.method, model, self.inputs[_POLICY], self.ctx, self._kept, self._adapter_start, prompts
        )
        if self._chat_template:
            (self.ctx.output_dir / CHAT_TEMPLATE_FILE).write_text(template_text(self._chat_template))
        if self._images and self._images.size:
            write_size(self.ctx.output_dir, self._images.size)
        for write in self.writers:
            write(self.ctx.output_dir)
        return dict(metrics)


# What the steps above call, in their order: rows, trainer.


def row_order(num_rows: int, num_samples: int, seed: int) -> list[int]:
    """Indices of the rows in the order of training: a fresh permutation per epoch, cut to ``num_samples``.

    It depends on its arguments only, so that micro batch, accumulation and workers all split the same list. The first
    epoch is what transformers' Trainer draws by default (``SeedableRandomSampler``: epoch e is seeded with
    ``seed + e``), so a plain script with the same seed sees the same rows at the same steps.
    """
    order: list[int] = []
    epoch = 0
    while len(order) < num_samples:
        generator = torch.Generator().manual_seed(seed + epoch)
        order += torch.randperm(num_rows, generator=generator).tolist()
        epoch += 1
    return order[:num_samples]


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
        "output_dir": str(ctx.islands.folder(ctx.work_dir) if ctx.islands else ctx.work_dir),
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
    """Refuses an own argument that neither the config (``known``) nor the trainer has, or that ``run.trl`` sets."""
    if shared := sorted(own.keys() & _SHARED):
        raise ConfigError(
            f"{shared[0]}: run.trl(...) sets it itself, from the method's reads, models and adapter; remove it from "
            "run.trl(...)"
        )
    for name in sorted(own.keys() - known - parameters):
        nearest = difflib.get_close_matches(name, sorted(known | parameters), 1)
        hint = f"; the nearest is {nearest[0]}" if nearest else ""
        raise ConfigError(
            f"{name} is not an argument of {where}{hint}; remove it from run.trl(...), or use one of these"
        )
