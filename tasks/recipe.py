"""What a stage's method states: its hyperparameters, which are its identity, and what it reads and loads.

``tasks.method`` adds how a training runs; a method that trains nothing needs no more than is here.
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
from tasks.context import Metrics, TrainContext
from tasks.data.kinds import RowKind
from tasks.data.tokens.tokenization import Tokenization


@dataclass(frozen=True, kw_only=True)
class Input:
    """What a stage was given in one slot: the output of another stage, or a source.

    Args:
        name: the stage or source that it comes from, for messages.
        kind, fingerprint: what it is.
        path: the ``output/`` directory of a stage, or of a model source its directory (a hub id is
            fetched before the stage starts). Rows of a source are read through ``source``.
        source: the pinned source, where it is one.
        digest: of its bytes, where it is known.
    """

    name: str
    kind: Kind
    fingerprint: str
    path: Path
    source: Source | None = None
    digest: str | None = None


Inputs = Mapping[str, Input]

ALL_LINEAR = "all-linear"  # every linear layer but the head
# What loads models, trains them and evaluates them; a method that needs less of it states less.
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
        optional: the slots that may stay empty; ``*`` among them: there need be no further slot.
        produces: kind of the output.
        trains: whether it takes optimizer steps, and so runs under Ray Train.
        uses_gpu: whether it runs a model, and so asks for the GPUs of its resources.
        preload: the heavy modules that ``run`` imports: loaded once, for all stages of a run. Empty: it starts in a
            fresh interpreter, unless it trains.
        chat_slot: the slot whose model must have a chat template, where one is needed.
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
        """What makes this method's result: class, version and every field that is not None."""
        stated = without_nones(asdict(self))
        assert isinstance(stated, dict)
        return {"method": self.name(), "version": self.version, **stated}

    @classmethod
    def name(cls) -> str:
        """The class's name; of a method that is not ours, with its module, so that two ``DPO`` stay two."""
        ours = cls.__module__.partition(".")[0] == "tasks"
        return cls.__qualname__ if ours else f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Low-rank adaptation: Hu et al. 2021, arXiv:2106.09685. The output is the merged model.

    Args:
        target_modules: names of linear layers, with commas between them; ``all-linear``: all but the head.
        quantization: what the base is rounded to while it is trained upon: ``nf4`` is QLoRA, Dettmers et al. 2023,
            arXiv:2305.14314; None: nothing.
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
                f"adapter.target_modules={self.target_modules!r}: a name is empty; give names of linear layers with "
                f"commas between them, such as q_proj,v_proj, or {ALL_LINEAR}"
            )

    @property
    def target_names(self) -> list[str]:
        return [name.strip() for name in self.target_modules.split(",")]


_QUANTIZATION_VERSION = 2  # 1 left the experts of a mixture in fp32


class Role(StrEnum):
    """What a training does with a model, and where that model comes from."""

    POLICY = "policy"  # trained; from the slot of its name
    REWARD_HEAD = "reward_head"  # trained: the policy's backbone under a new head with one output
    FROZEN_POLICY = "frozen_policy"  # the policy as the stage got it; with an adapter, the policy without it
    REWARD_MODEL = "reward_model"  # frozen, finished; from the slot of its name
    VALUE_MODEL = "value_model"  # trained: a value per token, begun as the reward model, or as the policy's backbone
    TEACHER = "teacher"  # frozen causal language model; from the slot of its name

    @property
    def kind(self) -> Kind | None:
        """Of the slot that holds it; None: it has none of its own."""
        return _SLOT_KINDS.get(self)


_SLOT_KINDS = {
    Role.POLICY: Kind.CHECKPOINT,
    Role.REWARD_HEAD: Kind.CHECKPOINT,
    Role.REWARD_MODEL: Kind.REWARD_MODEL,
    Role.TEACHER: Kind.CHECKPOINT,
}
POLICY, REWARD_HEAD, FROZEN_POLICY = Role.POLICY, Role.REWARD_HEAD, Role.FROZEN_POLICY
REWARD_MODEL, VALUE_MODEL, TEACHER = Role.REWARD_MODEL, Role.VALUE_MODEL, Role.TEACHER

# A field that is newer than outputs are, and stated as it always was, makes no other model.
_DOES_NOTHING = {"output": "last", "on_divergence": "fail"}


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe(Method):
    """The fields that every gradient-descent method has; all of them are identity.

    Class attributes:
        reads: the rows that it trains on: an entry of ``tasks.data.kinds``.
        models: name -> role of every model that it uses; ``policy`` is the one that becomes its output.
        has_own_loop: whether it trains without a trainer of transformers (``tasks.method.Training.loop``).

    ``consumes``, ``produces`` and ``chat_slot`` follow from these two, where a class does not state them itself.
    """

    reads: ClassVar[RowKind]
    models: ClassVar[Mapping[str, Role]] = {"policy": POLICY}
    has_own_loop: ClassVar[bool] = False
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
    precision: Literal["fp32", "bf16"] = "fp32"
    adapter: LoRA | None = None
    save: Literal["adapter"] | None = None  # what is written: the adapter alone; None: the whole model
    best: Best | None = None  # which models compete to be the best
    output: Literal["best", "last"] = "last"
    on_divergence: Literal["fail", "best"] = "fail"  # of a loss that is no number

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        reads = getattr(cls, "reads", None)
        if reads is None or not {"reads", "models"} & cls.__dict__.keys():
            return
        slots = {name: role.kind for name, role in cls.models.items() if role.kind}
        if cls.models.get("policy") not in (POLICY, REWARD_HEAD):
            raise TypeError(
                f"{cls.__qualname__}.models={dict(cls.models)}: the model that is trained, and becomes the output, "
                'is named policy; state models = {"policy": POLICY, ...} or {"policy": REWARD_HEAD, ...}'
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
                "save=adapter: every weight is trained, and there is no adapter to save; state adapter=lora or "
                "adapter=qlora, or save=null for this stage"
            )
        self._check_best()

    def recipe(self) -> dict[str, object]:
        """As of every method; what a best model does appears only where it does something."""
        stated = {name: value for name, value in super().recipe().items() if _DOES_NOTHING.get(name) != value}
        quantized = (
            {"quantization_version": _QUANTIZATION_VERSION} if self.adapter and self.adapter.quantization else {}
        )
        return {**stated, **quantized}

    def _check_best(self) -> None:
        wanted = [name for name in ("output", "on_divergence") if asdict(self)[name] == "best"]
        if wanted and self.best is None:
            raise ConfigError(
                f"{wanted[0]}=best: nothing says which models compete; state best.every_steps=N, the steps from one "
                f"to the next (best.metric is {HELD_OUT_LOSS})"
            )
        if self.on_divergence == "best" and self.best and self.best.metric != HELD_OUT_LOSS:
            raise ConfigError(
                f"on_divergence=best, best.metric={self.best.metric}: a step reports it before its own update, which "
                f"may be the one that diverges; state best.metric={HELD_OUT_LOSS}, or on_divergence=fail"
            )

    def tokenization(self) -> Tokenization | None:
        """How its rows become tokens, so that they can be checked before it runs; None: in a way of its own.

        It follows from ``reads`` and from the fields that have the names of ``Tokenization``'s.
        """
        reads = getattr(type(self), "reads", None)
        if reads is None:
            return None
        names = {each.name for each in fields(Tokenization)} & {each.name for each in fields(self)} - {"kind"}
        return Tokenization(kind=reads.kind, **{name: getattr(self, name) for name in names})
