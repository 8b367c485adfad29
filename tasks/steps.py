"""A training whose steps a program calls one by one: forward, backward, step (``posttrain steps``, docs/steps.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Gt

from lineage.artifact import Kind
from lineage.errors import ConfigError
from lineage.fingerprint import Setting
from tasks.context import Metrics, Precision, Resources, Sharding
from tasks.data.kinds import PROMPTS
from tasks.data.tokens.tokenization import Tokenization
from tasks.method import LOOP_FIELDS, Schedule, Training
from tasks.train.models.adapters import FROM_DATA

if TYPE_CHECKING:
    from tasks.train.run import TrainingRun

# Of ``resources.sharding``, with what does the same.
_GATHERS = "it divides the weights over all workers, which would gather them for each token that generate samples"
REFUSED: "Mapping[Sharding, str]" = {
    "fsdp": f"{_GATHERS}; set sharding=zero2, or over several machines fsdp_hybrid",
    "fsdp_grad": f"{_GATHERS}; set sharding=zero2",
    "zero3": f"{_GATHERS}; set sharding=zero2",
    "zero3_offload": f"{_GATHERS}; set sharding=zero2",
    "zero2_offload": "a session's optimizer stays where its weights are; set sharding=zero2",
}
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Row(Setting):
    """One row of a call.

    Args:
        tokens: that the model reads.
        target_tokens: that it should give after each of them, as many.
        labels: in place of ``target_tokens`` and ``weights``, as transformers has them: those of ``tokens`` itself,
            -100 where a token has no loss.
        weights: of the target tokens; for ``cross_entropy`` and ``dpo``.
        logprobs: of the target tokens, under the sampler or the reference.
        advantages: of the target tokens.
    """

    tokens: list[int]
    target_tokens: list[int] | None = None
    labels: list[int] | None = None
    weights: list[float] | None = None
    logprobs: list[float] | None = None
    advantages: list[float] | None = None

    @property
    def shifted(self) -> "Row":
        """The row with target tokens in place of labels."""
        if self.labels is None:
            return self
        targets = [*self.labels[1:], IGNORED]
        weights = [0.0 if each == IGNORED else 1.0 for each in targets]
        tokens = [0 if each == IGNORED else each for each in targets]
        return replace(self, labels=None, target_tokens=tokens, weights=weights)


@dataclass(frozen=True, kw_only=True)
class Steps(Training):
    """The settings of a session. Its rows come with each call, and its loss is named by the call.

    Args:
        num_steps: length of the schedule; a session may take more steps.
        max_length: tokens of a row.
        micro_batch_size: rows of a forward pass; it changes the last bits of sums, so it is identity here.
        commands: SHA-256 of the command log, once the session is committed.
    """

    reads: ClassVar = PROMPTS  # it trains no rows of a data stage
    consumes: ClassVar[Mapping[str, Kind]] = {"policy": Kind.CHECKPOINT}
    chat_slot: ClassVar[str | None] = None
    applies: ClassVar = LOOP_FIELDS
    default_learning_rate: ClassVar = 1e-5
    progress: ClassVar = None
    adapts_head: ClassVar = True

    global_batch_size: Annotated[int, Gt(0)] = 1
    max_length: Annotated[int, Gt(0)] = 2048
    num_steps: Annotated[int, Gt(0)] | None = 1000
    schedule: Schedule = Schedule(name="constant", warmup=0.0)
    micro_batch_size: Annotated[int, Gt(0)] = 8
    commands: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        refused = {
            "num_steps=null: the schedule of a session needs a length; set num_steps": self.num_steps is None,
            "adapter.type=adalora: it prunes ranks by the steps that remain; set adapter.type=lora": (
                self.adapter is not None and self.adapter.type == "adalora"
            ),
            "diloco: its islands exchange weights after steps of a loop, which a session has not; set diloco=null": (
                self.diloco is not None
            ),
            "adapter.init: it reads rows before the first step, which a session has not; set adapter.init=null": (
                self.adapter is not None and self.adapter.init in FROM_DATA
            ),
        }
        if found := [message for message, is_refused in refused.items() if is_refused]:
            raise ConfigError(found[0])

    def loop(self, run: "TrainingRun") -> Metrics:
        raise ConfigError(
            "Steps: its steps are calls of a program, so that a pipeline cannot run it; start a session with posttrain "
            "steps serve, and commit it with posttrain steps commit"
        )

    def tokenization(self) -> Tokenization | None:
        """None: the caller sends tokens."""
        return None


def precision_of(method: Steps) -> Precision:
    """What the pieces of a training are built with: under fp16 a session itself casts, and scales its losses."""
    return "fp32" if method.precision == "fp16" else method.precision


def require_workers(method: Steps, resources: Resources) -> None:
    """Requires that a session can have these workers."""
    from tasks.train.compatibility import refusals
    from tasks.train.rule import Case

    sharding, workers = resources.sharding, resources.num_workers
    if sharding in REFUSED:
        raise ConfigError(f"resources.sharding={sharding}: {REFUSED[sharding]}")
    method = replace(method, global_batch_size=workers, precision=precision_of(method))
    resources = replace(resources, micro_batch_size=1)
    for refusal in refusals(Case(method=method, resources=resources)):
        if refusal.rule == "hybrid-nodes":
            raise ConfigError(f"resources.sharding={sharding}: {refusal.reason}; set sharding=zero2")
        if refusal.rule != "zero-own-loop":  # a session divides its optimizer by itself
            raise ConfigError(refusal.text("session"))
