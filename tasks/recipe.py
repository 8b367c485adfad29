"""The recipe of a method: its hyperparameters, which are its identity, and the rows and models that it reads.

``tasks.method`` adds how a training runs; a method that trains nothing needs only what is here.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from fractions import Fraction
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar, cast

from annotated_types import Ge, Gt, Lt

from lineage.artifact import Kind, Source
from lineage.code import code_digest, code_digest_now
from lineage.errors import ConfigError
from lineage.filesystem.digest import digest_of
from lineage.fingerprint import Setting, set_fields
from tasks.context import Metrics, Precision, TrainContext
from tasks.data.kinds import RowKind
from tasks.data.tokens.tokenization import Tokenization
from tasks.reward_functions import Rewards, code_of_rewards, identity_of
from tasks.train.best import (
    BY_OPTION,
    HELD_OUT_LOSS,
    ONLY_REPORTED,
    OUTPUT,
    STEPS,
    VAL_LOSS,
    Best,
    Validation,
    steps_of_epochs,
)
from tasks.train.evaluation import Evaluation
from tasks.train.models.adapters import EMBEDDINGS, HEADS, STACKED, Adapter, reference_of, why_rows_stay
from tasks.train.models.freeze import Freeze
from tasks.train.models.quantization import Quantization
from tasks.train.optim.diloco import DiLoCo
from tasks.train.optim.optimizers import Optimizer
from tasks.train.optim.schedules import Name as ScheduleName
from tasks.train.optim.schedules import Schedule


@dataclass(frozen=True, kw_only=True)
class Input:
    """A stage's input in one slot: the output of another stage, or a source.

    Args:
        name: the stage or source that it comes from, for messages.
        kind, fingerprint: those of the artifact.
        path: the ``output/`` directory of a stage, or the directory of a model source (a hub id is
            fetched before the stage starts). Rows of a source are read through ``source``.
        source: the pinned source; None: it is a stage's output.
        digest: digest of its bytes; None: unknown.
    """

    name: str
    kind: Kind
    fingerprint: str
    path: Path
    source: Source | None = None
    digest: str | None = None


Inputs = Mapping[str, Input]

VERDICT = "verdict"  # slot of every stage: it waits for that of a gate, and begins only if it passes
Filled = TypeVar("Filled")


def without_verdict(inputs: Mapping[str, Filled]) -> dict[str, Filled]:
    """What a stage reads of its inputs."""
    return {slot: each for slot, each in inputs.items() if slot != VERDICT}


# Modules that load, train and evaluate models; a method that imports fewer sets its own ``preload``.
_HEAVY = (
    "torch", "tasks.train.light_imports", "transformers.trainer", "trl.trainer.dpo_trainer",
    "trl.trainer.reward_trainer", "trl.trainer.sft_trainer", "torch.nn.attention.varlen",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Method(Setting, ABC):
    """Hyperparameters, and the computation that they define. Fields, class name and ``version`` are the identity.

    Class attributes:
        version: raise it when the same fields give other results than before.
        consumes: slot -> kind. The slot ``*`` stands for any further slots of that kind. Each class gets the slot
            ``verdict`` too: its stage waits for that gate, and begins only if it passes. ``run`` gets none.
        optional: the slots that may stay empty; with ``*`` among them, further slots are optional.
        produces: kind of the output.
        trains: whether it takes optimizer steps, and so runs under Ray Train.
        cluster_workers: the workers of a cluster that it runs on: all of its resources, which divide its work; one, on
            a cluster that is joined; none, but this machine.
        uses_gpu: whether it runs a model, and so requests the GPUs of its resources.
        preload: the heavy modules that ``run`` imports: loaded once, for all stages of a run. Empty: the stage starts
            in a fresh interpreter, unless it trains.
        measures: the metrics that it returns, so that the plan can check names of metrics; of a training those of its
            steps, besides those of all trainings. None, as for a class outside ``tasks`` that sets none: unknown.
        chat_slot: the slot whose model must have a chat template; None: none must.
    """

    version: ClassVar[int] = 1
    consumes: ClassVar[Mapping[str, Kind]]
    optional: ClassVar[frozenset[str]] = frozenset()
    produces: ClassVar[Kind]
    trains: ClassVar[bool] = False
    cluster_workers: ClassVar[Literal["all", "one", "none"]] = "none"
    uses_gpu: ClassVar[bool] = False
    preload: ClassVar[tuple[str, ...]] = _HEAVY
    measures: ClassVar[tuple[str, ...] | None] = None
    chat_slot: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if "measures" not in cls.__dict__ and not _is_ours(cls):
            cls.measures = None  # it may return others than the class that it extends
        cls.optional |= {VERDICT}
        if "consumes" in cls.__dict__:
            cls.consumes = {**cls.consumes, VERDICT: Kind.VERDICT}

    def check_slots(self, filled: frozenset[str]) -> None:
        """Refuses optional slots that are filled, or empty, against the fields.

        Args:
            filled: the slots that have an input.
        """

    def num_reports(self, slots: Collection[str]) -> int | None:
        """How many reports it makes until its end, for its progress; None: not known.

        Args:
            slots: those with an input.
        """
        return None

    def identity_of(self, inputs: Mapping[str, str]) -> Mapping[str, str]:
        """The fingerprints of its inputs that are part of its own: slot -> fingerprint.

        Without the verdict, which says when a stage begins.
        """
        return without_verdict(inputs)

    def measured_metrics(self, slots: Collection[str], *, of_steps: bool = False) -> tuple[str, ...] | None:
        """The metrics of its output, or those that it reports while it runs; None: unknown.

        A name that ends in ``*`` stands for all that begin like it.

        Args:
            slots: those with an input.
        """
        return () if of_steps and self.measures is not None else self.measures

    def needs_template(self, filled: Collection[str]) -> str | None:
        """The slot whose model must have a chat template, where these slots are filled; None: none must."""
        return self.chat_slot

    @abstractmethod
    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        """Reads ``inputs``, writes ``ctx.output_dir``, returns final metrics (flat name -> number)."""

    def recipe(self) -> dict[str, object]:
        """The method's part of the fingerprint: class, version and every field that is not None."""
        values = set_fields(self)
        if rewards := _rewards_of(self):
            values["rewards"] = identity_of(rewards)
        return {"method": self.name(), "version": self.version, **values}

    def code_digest(self, *, now: bool = False) -> str:
        """Digest of the code that it runs: of its class, and of the Python functions among its rewards.

        Args:
            now: read the files again, instead of using the digests from when this process first read them.

        Raises:
            ConfigError: there is no such function.
        """
        digest = (code_digest_now if now else code_digest)(type(self).__module__)
        functions = code_of_rewards(_rewards_of(self))
        return digest_of({"method": digest, **functions}) if functions else digest

    @classmethod
    def name(cls) -> str:
        """The class's name; outside ``tasks`` with its module, so that a user's ``DPO`` is not ours."""
        return cls.__qualname__ if _is_ours(cls) else f"{cls.__module__}.{cls.__qualname__}"


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "tasks"


def _rewards_of(method: Method) -> Rewards:
    found: Rewards | None = getattr(method, "rewards", None)
    return found or {}


class Role(StrEnum):
    """The use of a model in a training, and its slot."""

    POLICY = "policy"  # trained; from the slot of its name
    REWARD_HEAD = "reward_head"  # trained: the policy's backbone under a new head with one output
    FROZEN_POLICY = "frozen_policy"  # the input policy; with a new adapter, the policy without it
    REWARD_MODEL = "reward_model"  # frozen, finished; from the slot of its name
    VALUE_MODEL = "value_model"  # trained: a value per token; starts as the reward model, or as the policy's backbone
    TEACHER = "teacher"  # frozen causal language model; from the slot of its name

    @property
    def kind(self) -> Kind | None:
        """Kind of its slot; None: it has no slot of its own."""
        return _SLOT_KINDS.get(self)


_SLOT_KINDS = {
    Role.POLICY: Kind.CHECKPOINT,
    Role.REWARD_HEAD: Kind.CHECKPOINT,
    Role.REWARD_MODEL: Kind.REWARD_MODEL,
    Role.TEACHER: Kind.CHECKPOINT,
}
POLICY, REWARD_HEAD, FROZEN_POLICY = Role.POLICY, Role.REWARD_HEAD, Role.FROZEN_POLICY
REWARD_MODEL, VALUE_MODEL, TEACHER = Role.REWARD_MODEL, Role.VALUE_MODEL, Role.TEACHER

JUDGE = "reward_model"  # slot of each training of a policy on more than text: its evaluation judges answers by it

# Short form -> the setting and its field.
SHORT_FORMS = {
    "lr_schedule": ("schedule", "name"),
    "warmup_ratio": ("schedule", "warmup"),
    "weight_decay": ("optimizer", "weight_decay"),
}
ADAPTER_FACTOR = 10  # of the default learning rate: few weights that start at zero take larger steps


def unfreeze(where: str, recipe: dict[str, object]) -> None:
    """Replaces a list of frozen parts in the fields of a method, ``freeze: [vision, projector]``, by those of images.

    Raises:
        ConfigError: it names another part, or a part is to be trained and rows have no images.
    """
    listed, parts = recipe.get("freeze"), ("vision", "projector", "language")
    frozen = [listed] if isinstance(listed, str) and listed in parts else listed
    if not isinstance(frozen, list):
        return
    if unknown := [each for each in frozen if each not in parts]:
        raise ConfigError(
            f"{where}.freeze={frozen}: {unknown[0]} is no part of a model; {', '.join(parts)} are accepted; other "
            f"modules are named by {where}.freeze.modules=NAME"
        )
    images, recipe["freeze"] = recipe.get("images"), None
    trains = [part for part in parts[:2] if part not in frozen]
    if isinstance(images, Mapping):
        language = "frozen" if "language" in frozen else None
        recipe["images"] = {**images, "trains": trains or None, "language": language}
    elif trains or "language" in frozen:
        raise ConfigError(
            f"{where}.freeze={frozen}: rows of text train the language part alone, so that it says nothing else; to "
            f"train on rows with images set model.kind=vlm; for rows of text set {where}.freeze=[vision,projector]"
        )


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe(Method):
    """The fields that every gradient-descent method has; all of them are identity.

    Class attributes:
        reads: the kind of rows that it trains on: an entry of ``tasks.data.kinds``.
        models: name -> role of every model that it uses; ``policy`` is trained and becomes the output.
        progress: the metric that says how well a training does: its loss; its reward, where the loss is 0 by
            construction; None: none does, as where the loss is to a target that moves.
        has_own_loop: whether it trains without a trainer of transformers (``tasks.method.Training.loop``).
        adapts_head: whether an adapter may be on the head: its losses read logits, and not the head's weights.
        default_learning_rate: used where ``learning_rate`` is not set, for a training of all weights.
        option_versions: option -> (entry of the recipe, amount by which it is higher where the option is set), for
            options whose results changed while those of other recipes did not; ``one+other``: where both are set.

    ``consumes``, ``produces`` and ``chat_slot`` are derived from ``reads`` and ``models``, unless a class sets them.
    """

    reads: ClassVar[RowKind]
    models: ClassVar[Mapping[str, Role]] = {"policy": POLICY}
    progress: ClassVar[Literal["loss", "reward"] | None] = "loss"
    has_own_loop: ClassVar[bool] = False
    adapts_head: ClassVar[bool] = False
    # The first version of quantization left the experts of a mixture in fp32.
    option_versions: ClassVar[Mapping[str, tuple[str, int]]] = {"adapter.quantization": ("quantization_version", 1)}
    trains: ClassVar[bool] = True
    cluster_workers: ClassVar[Literal["all", "one", "none"]] = "all"
    uses_gpu: ClassVar[bool] = True

    default_learning_rate: ClassVar[float | None] = None

    learning_rate: Annotated[float, Gt(0)] = cast("float", None)  # default_learning_rate, ten times that of an adapter
    num_steps: Annotated[int, Gt(0)] | None = None  # optimizer steps
    num_epochs: Annotated[float, Gt(0)] | None = None  # passes over the rows; without num_steps, one
    global_batch_size: Annotated[int, Gt(0)]  # rows per optimizer step, over all workers
    max_length: Annotated[int, Gt(0)]  # tokens per row, prompt + completion
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0  # of the order of rows, new weights, dropout and sampling
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    max_grad_norm: Annotated[float, Gt(0)] = 1.0  # gradients of a larger norm are scaled down to it
    precision: Precision = "fp32"  # of the arithmetic; auto: bf16 on a GPU, else fp32
    adapter: Adapter | None = None
    quantization: Quantization | None = None  # of the base under an adapter
    adapter_in: Literal["merge", "continue", "stack"] | None = None  # continue: train the input's on; null: merge it
    freeze: Freeze | None = None  # what a full training leaves as it is; a list: parts that read images (docs/vlm.md)
    neftune_alpha: Annotated[float, Gt(0)] | None = None  # noise on embeddings: Jain et al. 2023, arXiv:2310.05914
    lr_schedule: ScheduleName | None = None  # short for schedule.name
    warmup_ratio: Annotated[float, Ge(0), Lt(1)] | None = None  # short for schedule.warmup
    weight_decay: Annotated[float, Ge(0)] | None = None  # short for optimizer.weight_decay
    save: Literal["adapter"] | None = None  # the output: only the adapter; None: the whole model
    validation: Validation | None = None  # the loss on held-out rows, while it trains
    best: Best | None = None  # which models compete to be the best; None with output=best: those of validation
    output: Literal["best", "last"] = "last"  # which model it is: of the last step, or the best of those that compete
    on_divergence: Literal["fail", "best"] = "fail"  # when the loss is non-finite
    evaluation: Evaluation | None = None  # scores checkpoints in a process of its own, while it trains
    diloco: DiLoCo | None = None  # islands of workers that rarely synchronise

    def __init_subclass__(cls, **kwargs: object) -> None:
        reads = getattr(cls, "reads", None)
        if reads is not None and {"reads", "models"} & cls.__dict__.keys():
            cls._derive(reads)
        super().__init_subclass__(**kwargs)

    @classmethod
    def _derive(cls, reads: RowKind) -> None:
        """Sets slots and output by its rows and models."""
        slots = {name: role.kind for name, role in cls.models.items() if role.kind}
        if cls.models.get("policy") not in (POLICY, REWARD_HEAD):
            raise TypeError(
                f"{cls.__qualname__}.models={dict(cls.models)}: the model that is trained, and becomes the output, "
                'is named policy; set models = {"policy": POLICY, ...} or {"policy": REWARD_HEAD, ...}'
            )
        answers = cls.models["policy"] == POLICY and reads.kind != Kind.TEXT
        judge = {JUDGE: Kind.REWARD_MODEL} if answers and REWARD_MODEL not in cls.models.values() else {}
        cls.optional |= judge.keys()
        derived = {
            "consumes": {**slots, reads.slot: reads.kind, **judge},
            "produces": Kind.REWARD_MODEL if cls.models["policy"] == REWARD_HEAD else Kind.CHECKPOINT,
            "chat_slot": "policy" if reads.chat else None,
        }
        for name, value in derived.items():
            if name not in cls.__dict__:
                setattr(cls, name, value)

    def __post_init__(self) -> None:
        self._apply_short_forms()
        self._apply_defaults()
        self.tokenization()  # refuses options that cannot work together
        if self.save == "adapter" and self.adapter is None:
            raise ConfigError(
                "save=adapter: every weight is trained, and there is no adapter to save; set adapter=lora or "
                "adapter=qlora, or save=null for this stage"
            )
        self._check_adapter()
        if self.adapter and not self.adapts_head:
            self.adapter.require_no_head()
        self._check_best()
        self._check_evaluation()

    def identity_of(self, inputs: Mapping[str, str]) -> Mapping[str, str]:
        """As of every method, without a judge that chooses no model."""
        chooses = self.judge in self.models or (self.evaluation is not None and self.evaluation.decides)
        found = super().identity_of(inputs)
        return found if chooses else {slot: fingerprint for slot, fingerprint in found.items() if slot != JUDGE}

    @property
    def judge(self) -> str:
        """The slot of the reward model that its evaluation may judge answers by."""
        return next((slot for slot, role in self.models.items() if role == REWARD_MODEL), JUDGE)

    def steps(self, num_rows: Callable[[], int]) -> int:
        """Optimizer steps: as set, or those of ``num_epochs`` passes over the rows, the last one filled from the next.

        Args:
            num_rows: counts the examples; called only where ``num_epochs`` is set.
        """
        if self.num_steps is not None:
            return self.num_steps
        assert self.num_epochs
        return steps_of_epochs(self.num_epochs, num_rows(), self.rows_per_step)

    @property
    def rows_per_step(self) -> int | Fraction:
        """Rows that an optimizer step reads; a fraction where several steps read the same."""
        return self.global_batch_size

    def rows_of(self, num_steps: int) -> int:
        """Number of rows that ``num_steps`` steps read."""
        return num_steps * self.global_batch_size

    @property
    def rows_of_island(self) -> int:
        """Rows per step of the workers that exchange gradients: all of them, or an island."""
        return self.global_batch_size // self.num_islands

    @property
    def num_islands(self) -> int:
        """Groups of workers that rarely synchronise; 1: all exchange gradients."""
        return self.diloco.num_islands if self.diloco else 1

    @property
    def loss_says_nothing(self) -> str:
        """Why its loss is no measure of progress, for messages."""
        of_own = "is of its own completions, near 0 or of their pairs, and not of their rewards"
        why = of_own if self.progress else "is to a target that moves, so that it may rise"
        return f"the loss of {type(self).__name__} {why}"

    def measured_metrics(self, slots: Collection[str], *, of_steps: bool = False) -> tuple[str, ...] | None:
        """As of every method; of options those that are set."""
        if self.measures is None:
            return None
        rewards = [*(getattr(self, "rewards", None) or ()), "reward_model", "missing_eos"]
        named = [each.replace("NAME", name) for each in self.measures for name in (rewards if "NAME" in each else [""])]
        held_out = [HELD_OUT_LOSS] * self.measures_held_out + [VAL_LOSS] * (self.validation is not None)
        steps = [each for each in STEPS if of_steps or each not in ONLY_REPORTED]
        scored = ["evaluation/*"] * (self.evaluation is not None and not of_steps)
        ends_early = any(each and each.patience for each in (self.validation, self.evaluation))
        picks = self.evaluation is not None and self.evaluation.pick != "last"
        by_option = {
            "adaptive/*": self.schedule.adaptive, "diloco/*": self.diloco, "ended_early_at_step": ends_early,
            "best_step": picks or "best" in (self.output, self.on_divergence),
            "diverged_at_step": self.on_divergence == "best",
        }  # fmt: skip
        found = (*named, *held_out, *steps, *BY_OPTION, *scored, *([] if of_steps else OUTPUT))
        return tuple(each for each in found if by_option.get(each, True))

    @property
    def measures_held_out(self) -> bool:
        """Whether the training measures its loss on held-out rows."""
        return self.validation is not None or (self.best is not None and self.best.metric == HELD_OUT_LOSS)

    def why_rows_stay(self, ids: Sequence[int], weights: Iterable[str], *, tied: bool) -> str | None:
        """Why it leaves the rows of new tokens as they were made; None: it trains them.

        Args:
            ids: of the tokens that the source of the model adds.
            weights: names of the model's weights; empty: unknown.
            tied: whether the head has the weights of the embedding.
        """
        scores = self.models["policy"] == REWARD_HEAD
        if self.adapter:
            return why_rows_stay(self.adapter, ids, tied=tied, scores=scores)
        if self.freeze and (names := list(weights)):
            return self.freeze.why_rows_stay(ids, names, EMBEDDINGS if scores else (*EMBEDDINGS, *HEADS))
        return None

    @property
    def keeps_state(self) -> bool:
        """Whether its checkpoints hold more than transformers saves, which earlier versions wrote otherwise."""
        return self.has_own_loop or bool(self.adapter and self.adapter.type == "adalora")

    @property
    def has_reference(self) -> bool:
        """Whether the training compares the policy with its frozen start."""
        return FROZEN_POLICY in self.models.values()

    @property
    def reference_kind(self) -> Literal["off", "copy", "model"]:
        """``reference_of`` its adapter."""
        return reference_of(self.adapter, self.adapter_in)

    def _apply_short_forms(self) -> None:
        """Moves the value of each short form to its setting, so that one place holds it.

        Raises:
            ConfigError: both are set, and differ.
        """
        for short, (setting, field) in SHORT_FORMS.items():
            value, before = getattr(self, short), getattr(self, setting)
            if value is None:
                continue
            found, default = getattr(before, field), getattr(type(before)(), field)
            if found not in (value, default):
                raise ConfigError(
                    f"{short}={value} and {setting}.{field}={found}: the first is short for the second; set one of them"
                )
            object.__setattr__(self, setting, replace(before, **{field: value}))
            object.__setattr__(self, short, None)
        if self.adapter and self.adapter.quantization:
            found = Quantization(format=self.adapter.quantization)
            if self.quantization and self.quantization.format != found.format:
                raise ConfigError(
                    f"adapter.quantization={found.format} and quantization.format={self.quantization.format}: the "
                    "first is short for the second; set one of them"
                )
            object.__setattr__(self, "quantization", self.quantization or found)
            object.__setattr__(self, "adapter", replace(self.adapter, quantization=None))

    def _apply_defaults(self) -> None:
        """Sets the learning rate and the length of the training where the configuration does not."""
        if self.num_steps is not None and self.num_epochs is not None:
            raise ConfigError(
                f"num_steps={self.num_steps} and num_epochs={self.num_epochs:g}: one of them is the length of the "
                "training; set the other to null: stages.STAGE.method.num_epochs=null, or num_steps=null there"
            )
        if self.num_steps is None and self.num_epochs is None:
            object.__setattr__(self, "num_epochs", 1.0)
        if self.learning_rate is None:
            if self.default_learning_rate is None:
                raise ConfigError(f"learning_rate: {type(self).__name__} has no default; set learning_rate=...")
            factor = ADAPTER_FACTOR if self.adapter else 1
            object.__setattr__(self, "learning_rate", float(f"{self.default_learning_rate * factor:g}"))

    def _check_adapter(self) -> None:
        """Refuses settings of the trained weights that cannot be combined."""
        if self.adapter is None:
            if self.adapter_in is not None:
                raise ConfigError(
                    f"adapter_in={self.adapter_in}: this stage has no adapter; set adapter=lora, or adapter_in=null"
                )
            return
        if self.freeze is not None:
            raise ConfigError(
                f"freeze.modules={self.freeze.modules} with adapter.type={self.adapter.type}: under an adapter every "
                "weight of the base is frozen; set freeze=null, or adapter=null for this stage"
            )
        if self.adapter.init == "lora_ga" and self.models["policy"] == REWARD_HEAD:
            raise ConfigError(
                f"adapter.init=lora_ga: it starts from gradients of the likelihood of rows, which "
                f"{type(self).__name__} does not train; set adapter.init=eva, or null"
            )
        if self.adapter_in in (None, "merge"):
            return
        if self.quantization is not None and self.quantization.merge == "dequantized":
            raise ConfigError(
                f"adapter_in={self.adapter_in} with quantization.merge=dequantized: only an adapter that is merged "
                "knows what its base was rounded to; set adapter_in=merge, or quantization.merge=original"
            )
        if self.models["policy"] == REWARD_HEAD:
            raise ConfigError(
                f"adapter_in={self.adapter_in}: {type(self).__name__} puts a new head on its input, so its adapter is "
                "merged; set adapter_in=merge"
            )
        if self.adapter_in == "continue" and (self.adapter.init or self.adapter.type in ("adalora", "osf")):
            found = f"init={self.adapter.init}" if self.adapter.init else f"type={self.adapter.type}"
            raise ConfigError(
                f"adapter_in=continue with adapter.{found}: this starts a new adapter from the base's weights; set "
                "adapter_in=merge, or adapter.type=lora with adapter.init=null"
            )
        if self.adapter_in == "stack" and (self.adapter.type not in STACKED or self.adapter.init):
            found = f"init={self.adapter.init}" if self.adapter.init else f"type={self.adapter.type}"
            raise ConfigError(
                f"adapter_in=stack with adapter.{found}: only a LoRA that starts at zero can lie upon another, and "
                "DoRA scales what is below it; set adapter_in=merge, or adapter.type=lora with adapter.init=null"
            )

    def _check_best(self) -> None:
        adaptive = self.schedule.adaptive
        if adaptive and adaptive.divergence_z and self.best is None:
            if self.validation is None:
                raise ConfigError(
                    f"schedule.adaptive.divergence_z={adaptive.divergence_z:g}: best is not set, so there is no best "
                    "checkpoint to go back to; set best.every_steps=N or validation.every_steps=N, or divergence_z=null"
                )
            object.__setattr__(self, "best", Best())
        needs_best = [name for name in ("output", "on_divergence") if getattr(self, name) == "best"]
        if needs_best and self.best is None:
            if self.validation is None:
                raise ConfigError(
                    f"{needs_best[0]}=best: best is not set, so no models compete; set best.every_steps=N, the steps "
                    f"from one competing model to the next (best.metric is {HELD_OUT_LOSS}), or "
                    "validation.every_steps=N"
                )
            object.__setattr__(self, "best", Best())
        compared = self.validation is not None and self.best is not None and self.best.metric == HELD_OUT_LOSS
        if self.best and self.best.every_steps is None and not compared:
            raise ConfigError(
                f"best.every_steps is not set, and best.metric={self.best.metric}: models then compete where "
                f"validation measures {HELD_OUT_LOSS}; set best.every_steps=N, the steps from one competing model to "
                "the next"
            )
        reads = getattr(type(self), "reads", None)
        if self.best and self.best.metric == "loss" and self.progress != "loss":
            instead = "reward with best.mode=max" if self.progress else f"{HELD_OUT_LOSS}, which is to the teacher"
            raise ConfigError(
                f"best.metric=loss: {self.loss_says_nothing}, so it ranks no models; set best.metric={instead}"
            )
        measured = self.validation or (self.best and self.best.metric == HELD_OUT_LOSS)
        if measured and reads is not None and not reads.trained:
            if self.validation:
                raise ConfigError(
                    f"validation: {type(self).__name__} reads {reads.kind.value}, which have no loss before answers "
                    "are generated; set validation=null, and best.metric to one that it reports, such as reward"
                )
            raise ConfigError(
                f"best.metric={HELD_OUT_LOSS}: {type(self).__name__} reads {reads.kind.value}, which have no loss "
                "before answers are generated; set best.metric to one that it reports, such as reward, with best.mode"
            )
        returns = adaptive is not None and adaptive.divergence_z is not None
        if (self.on_divergence == "best" or returns) and self.best and self.best.metric != HELD_OUT_LOSS:
            option = "schedule.adaptive.divergence_z" if returns else "on_divergence=best"
            raise ConfigError(
                f"{option}, best.metric={self.best.metric}: a step reports it before its own update, which "
                f"may be the one that diverges; set best.metric={HELD_OUT_LOSS}, or "
                f"{'divergence_z=null' if returns else 'on_divergence=fail'}"
            )

    def _check_evaluation(self) -> None:
        if self.evaluation is None:
            return
        if self.models["policy"] == REWARD_HEAD:
            raise ConfigError(
                f"evaluation: {type(self).__name__} trains a reward model, which answers nothing; set evaluation=null, "
                "and measure it with the stage evaluate"
            )
        if self.evaluation.decides and (self.output == "best" or self.best is not None):
            raise ConfigError(
                f"evaluation.pick={self.evaluation.pick}, evaluation.patience={self.evaluation.patience} with "
                f"output={self.output}: both choose the model that is the output; set evaluation.pick=last and "
                "evaluation.patience=null, or output=last and best=null"
            )
        if self.adapter and self.adapter.changes_the_base:
            raise ConfigError(
                f"evaluation with adapter.init={self.adapter.init}: the adapter of a checkpoint is upon another base "
                "than the stage's input; set evaluation=null, or adapter.init=null"
            )
        if self.adapter_in == "continue":
            raise ConfigError(
                "evaluation with adapter_in=continue: the base of a checkpoint is in two parts; set evaluation=null, "
                "or adapter_in=merge"
            )

    def tokenization(self) -> Tokenization | None:
        """How its rows are tokenized, so that they can be checked before it runs; None: it does that itself.

        It is derived from ``reads`` and from the fields that are also fields of ``Tokenization``.
        """
        reads = getattr(type(self), "reads", None)
        if reads is None:
            return None
        names = {each.name for each in fields(Tokenization)} & {each.name for each in fields(self)} - {"kind"}
        return Tokenization(kind=reads.kind, **{name: getattr(self, name) for name in names})
