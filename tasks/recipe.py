"""The recipe of a method: its hyperparameters, which are its identity, and the rows and models that it reads.

``tasks.method`` adds how a training runs; a method that trains nothing needs only what is here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Lt

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from lineage.fingerprint import without_nones
from tasks.best import HELD_OUT_LOSS, Best
from tasks.context import Metrics, Precision, TrainContext
from tasks.data.kinds import RowKind
from tasks.data.tokens.tokenization import Tokenization


@dataclass(frozen=True, kw_only=True)
class Input:
    """A stage's input in one slot: the output of another stage, or a source.

    Args:
        name: the stage or source that it comes from, for messages.
        kind, fingerprint: of the artifact.
        path: the ``output/`` directory of a stage, or the directory of a model source (a hub id is
            fetched before the stage starts). Rows of a source are read through ``source``.
        source: the pinned source; None: it is a stage's output.
        digest: of its bytes; None: unknown.
    """

    name: str
    kind: Kind
    fingerprint: str
    path: Path
    source: Source | None = None
    digest: str | None = None


Inputs = Mapping[str, Input]

ALL_LINEAR = "all-linear"  # every linear layer except the head
# Modules that load, train and evaluate models; a method that imports fewer sets its own ``preload``.
_HEAVY = (
    "torch", "tasks.peft_import", "transformers.trainer", "trl.trainer.dpo_trainer",
    "trl.trainer.reward_trainer", "trl.trainer.sft_trainer",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Hyperparameters and what they do. Its fields, class name and ``version`` are its identity.

    Class attributes:
        version: raise it when the same fields now give other numbers.
        consumes: slot -> kind. The slot ``*`` stands for any further slots of that kind.
        optional: the slots that may stay empty; with ``*`` among them, further slots are optional.
        produces: kind of the output.
        trains: whether it takes optimizer steps, and so runs under Ray Train.
        uses_gpu: whether it runs a model, and so requests the GPUs of its resources.
        preload: the heavy modules that ``run`` imports: loaded once, for all stages of a run. Empty: the stage starts
            in a fresh interpreter, unless it trains.
        chat_slot: the slot whose model must have a chat template; None: none must.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    version: ClassVar[int] = 1
    consumes: ClassVar[Mapping[str, Kind]]
    optional: ClassVar[frozenset[str]] = frozenset()
    produces: ClassVar[Kind]
    trains: ClassVar[bool] = False
    uses_gpu: ClassVar[bool] = False
    preload: ClassVar[tuple[str, ...]] = _HEAVY
    chat_slot: ClassVar[str | None] = None

    @abstractmethod
    def run(self, inputs: Inputs, ctx: TrainContext) -> Metrics:
        """Reads ``inputs``, writes ``ctx.output_dir``, returns final metrics (flat name -> number)."""

    def recipe(self) -> dict[str, object]:
        """The method's part of the fingerprint: class, version and every field that is not None."""
        values = without_nones(asdict(self))
        assert isinstance(values, dict)
        return {"method": self.name(), "version": self.version, **values}

    @classmethod
    def name(cls) -> str:
        """The class's name; outside ``tasks`` with its module, so that a user's ``DPO`` is not ours."""
        ours = cls.__module__.partition(".")[0] == "tasks"
        return cls.__qualname__ if ours else f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adaptation: Hu et al. 2021, arXiv:2106.09685. The output is the merged model.

    Args:
        target_modules: names of linear layers, separated by commas; ``all-linear``: all except the head.
        quantization: of the base during training: ``nf4`` is QLoRA, Dettmers et al. 2023, arXiv:2305.14314; None: full
            precision.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    rank: Annotated[int, Gt(0)] = 16
    alpha: Annotated[int, Gt(0)] = 32
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    target_modules: str = ALL_LINEAR
    quantization: Literal["nf4"] | None = None

    def __post_init__(self) -> None:
        if not all(self.target_names):
            raise ConfigError(
                f"adapter.target_modules={self.target_modules!r}: a name is empty; names of linear layers separated by "
                f"commas are accepted; set for example q_proj,v_proj, or {ALL_LINEAR}"
            )

    @property
    def target_names(self) -> list[str]:
        return [name.strip() for name in self.target_modules.split(",")]


class Role(StrEnum):
    """The use of a model in a training, and its slot."""

    POLICY = "policy"  # trained; from the slot of its name
    REWARD_HEAD = "reward_head"  # trained: the policy's backbone under a new head with one output
    FROZEN_POLICY = "frozen_policy"  # the input policy; with an adapter, the policy without it
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

# Fields that were added later with a default other than None: the default stays out of the fingerprint.
_ADDED_LATER = {"output": "last", "on_divergence": "fail"}


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe(Method):
    """The fields that every gradient-descent method has; all of them are identity.

    Class attributes:
        reads: the kind of rows that it trains on: an entry of ``tasks.data.kinds``.
        models: name -> role of every model that it uses; ``policy`` is trained, and becomes its output.
        has_own_loop: whether it trains without a trainer of transformers (``tasks.method.Training.loop``).
        option_versions: option -> (entry of the recipe, how much higher it is where the option is set), for options
            whose numbers changed while those of other recipes did not.

    ``consumes``, ``produces`` and ``chat_slot`` are derived from ``reads`` and ``models``, unless a class sets them.
    """

    reads: ClassVar[RowKind]
    models: ClassVar[Mapping[str, Role]] = {"policy": POLICY}
    has_own_loop: ClassVar[bool] = False
    # The first version of quantization left the experts of a mixture in fp32.
    option_versions: ClassVar[Mapping[str, tuple[str, int]]] = {"adapter.quantization": ("quantization_version", 1)}
    trains: ClassVar[bool] = True
    uses_gpu: ClassVar[bool] = True

    learning_rate: Annotated[float, Gt(0)]
    num_steps: Annotated[int, Gt(0)]  # optimizer steps
    global_batch_size: Annotated[int, Gt(0)]  # rows per optimizer step, over all workers
    max_length: Annotated[int, Gt(0)]  # tokens per row, prompt + completion
    seed: Annotated[int, Ge(0), Lt(2**32)] = 0
    warmup_ratio: Annotated[float, Ge(0), Lt(1)] = 0.05  # of num_steps
    lr_schedule: Literal["constant", "linear", "cosine"] = "cosine"
    weight_decay: Annotated[float, Ge(0)] = 0.0
    max_grad_norm: Annotated[float, Gt(0)] = 1.0
    precision: Precision = "fp32"
    adapter: LoRA | None = None
    save: Literal["adapter"] | None = None  # the output: only the adapter; None: the whole model
    best: Best | None = None  # which models compete to be the best
    output: Literal["best", "last"] = "last"
    on_divergence: Literal["fail", "best"] = "fail"  # when the loss is non-finite

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        reads = getattr(cls, "reads", None)
        if reads is None or not {"reads", "models"} & cls.__dict__.keys():
            return
        slots = {name: role.kind for name, role in cls.models.items() if role.kind}
        if cls.models.get("policy") not in (POLICY, REWARD_HEAD):
            raise TypeError(
                f"{cls.__qualname__}.models={dict(cls.models)}: the model that is trained, and becomes the output, "
                'is named policy; set models = {"policy": POLICY, ...} or {"policy": REWARD_HEAD, ...}'
            )
        derived = {
            "consumes": {**slots, reads.slot: reads.kind},
            "produces": Kind.REWARD_MODEL if cls.models["policy"] == REWARD_HEAD else Kind.CHECKPOINT,
            "chat_slot": "policy" if reads.chat else None,
        }
        for name, value in derived.items():
            if name not in cls.__dict__:
                setattr(cls, name, value)

    def __post_init__(self) -> None:
        self.tokenization()  # refuses options that cannot work together
        if self.save == "adapter" and self.adapter is None:
            raise ConfigError(
                "save=adapter: every weight is trained, and there is no adapter to save; set adapter=lora or "
                "adapter=qlora, or save=null for this stage"
            )
        self._check_best()

    def recipe(self) -> dict[str, object]:
        """As of every method; fields that were added later stay out at their defaults."""
        recipe = {name: value for name, value in super().recipe().items() if _ADDED_LATER.get(name) != value}
        for option, (entry, raised) in self.option_versions.items():
            if _is_set(recipe, option):
                version = recipe.get(entry, 1)
                assert isinstance(version, int)
                recipe[entry] = version + raised
        return recipe

    def _check_best(self) -> None:
        needs_best = [name for name in ("output", "on_divergence") if asdict(self)[name] == "best"]
        if needs_best and self.best is None:
            raise ConfigError(
                f"{needs_best[0]}=best: best is not set, so no models compete; set best.every_steps=N, the steps from "
                f"one competing model to the next (best.metric is {HELD_OUT_LOSS})"
            )
        reads = getattr(type(self), "reads", None)
        if self.best and self.best.metric == HELD_OUT_LOSS and reads is not None and not reads.trained:
            raise ConfigError(
                f"best.metric={HELD_OUT_LOSS}: {type(self).__name__} reads {reads.kind.value}, which have no loss "
                "before answers are generated; set best.metric to one that it reports, such as reward, with best.mode"
            )
        if self.on_divergence == "best" and self.best and self.best.metric != HELD_OUT_LOSS:
            raise ConfigError(
                f"on_divergence=best, best.metric={self.best.metric}: a step reports it before its own update, which "
                f"may be the one that diverges; set best.metric={HELD_OUT_LOSS}, or on_divergence=fail"
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


def _is_set(recipe: object, option: str) -> bool:
    """Whether a recipe, which has no field that is None, has a field; fields of its fields are named with dots."""
    for name in option.split("."):
        if not isinstance(recipe, Mapping) or name not in recipe:
            return False
        recipe = recipe[name]
    return True
