"""The learning rate and the length of a training that apply, and why: for ``posttrain plan``."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lineage.artifact import Kind
from lineage.files import atomic_write
from lineage.fingerprint import canonical_json, short
from lineage.manifest import Manifest
from lineage.store import CACHE
from tasks.data.tokens.tokenization import Tokenization
from tasks.recipe import ADAPTER_FACTOR, TrainingRecipe

_FORMER_STEPS = 1000  # of a training that set no length, before one epoch was the default


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """What applies to one training stage.

    Args:
        learning_rate_reason, length_reason: where the values come from.
        num_steps, num_epochs: the length in both; None: not known before the rows are tokenized.
        num_examples: that are trained on in a pass; None: not known yet.
        is_exact: whether ``num_examples`` was counted on tokens; else it is the number of prepared rows.
        warmup: steps; below 1: a share of all steps.
    """

    learning_rate: float
    learning_rate_reason: str
    num_steps: int | None
    num_epochs: float | None
    num_examples: int | None
    is_exact: bool
    global_batch_size: int
    length_reason: str
    warmup: float

    def to_dict(self) -> dict[str, object]:
        """What ``plan --json`` adds to the stage's row."""
        return {
            "learning_rate": {"value": self.learning_rate, "reason": self.learning_rate_reason},
            "length": {
                "num_steps": self.num_steps, "num_epochs": self.num_epochs, "num_examples": self.num_examples,
                "exact": self.is_exact, "reason": self.length_reason,
            },
        }  # fmt: skip

    def __str__(self) -> str:
        """``learning_rate 1e-05 (default of DPO, x10 under an adapter); 79 steps of 32 (num_steps), 1.01 epochs``"""
        about = "" if self.is_exact else "about "
        rows = f" of {self.num_examples:,} {'examples' if self.is_exact else 'rows'}" if self.num_examples else ""
        epochs = None if self.num_epochs is None else f"{self.num_epochs:.4g} epoch{'s' * (self.num_epochs != 1)}{rows}"
        if self.length_reason.startswith("num_steps"):
            steps = f"{self.num_steps} steps of {self.global_batch_size} ({self.length_reason})"
            length = f"{steps}, {about}{epochs}" if epochs else steps
        elif self.num_steps is None:
            length = f"{epochs} ({self.length_reason}): its steps are known once its rows are tokenized"
        else:
            length = f"{epochs} ({self.length_reason}), {about}{self.num_steps} steps of {self.global_batch_size}"
        is_cut = self.num_steps is not None and self.warmup >= self.num_steps
        cut = f"; its warm-up of {self.warmup:g} steps does not end, so that the learning rate stays below" * is_cut
        return f"learning_rate {self.learning_rate:g} ({self.learning_rate_reason}); {length}{cut}"


def hyperparameters(method: TrainingRecipe, rows: Manifest | None, counted: Path | None) -> Hyperparameters:
    """What applies to a training.

    Args:
        rows: of the data stage that it reads; None: unfinished, or a source.
        counted: the file of ``examples_file``; None: nothing counts its rows.
    """
    exact = _read(counted) if counted else None
    examples = exact or _prepared(method, rows)
    num_steps = method.num_steps
    if num_steps is None and examples:
        num_steps = method.steps(lambda: examples)
    num_epochs = method.num_epochs
    if num_epochs is None and examples and num_steps:
        num_epochs = num_steps * float(method.rows_per_step) / examples
    return Hyperparameters(
        learning_rate=method.learning_rate, learning_rate_reason=_learning_rate_reason(method), num_steps=num_steps,
        num_epochs=num_epochs, num_examples=examples, is_exact=exact is not None or examples is None,
        global_batch_size=method.global_batch_size, length_reason=_length_reason(method),
        warmup=method.schedule.warmup,
    )  # fmt: skip


def _learning_rate_reason(method: TrainingRecipe) -> str:
    default = type(method).default_learning_rate
    if default is None:
        return "as set"
    name = type(method).__name__
    factor = ADAPTER_FACTOR if method.adapter else 1
    under = f", x{ADAPTER_FACTOR} under an adapter" if method.adapter else ""
    applied = float(f"{default * factor:g}")
    if method.learning_rate == applied:
        return f"default of {name}{under}"
    return f"as set; default of {name}{under}: {applied:g}"


def _length_reason(method: TrainingRecipe) -> str:
    if method.num_steps is not None:
        return "num_steps"
    return "num_epochs, the default" if method.num_epochs == 1 else "num_epochs"


def _prepared(method: TrainingRecipe, rows: Manifest | None) -> int | None:
    """The prepared rows, where each is about an example: neither chunks of text nor packs of rows."""
    tokenization = method.tokenization()
    if rows is None or tokenization is None or tokenization.kind == Kind.TEXT or tokenization.packing:
        return None
    return int(rows.metrics.get("train_rows", 0)) or None


def examples_file(store: Path, tokenization: Tokenization, rows: str, tokenizer: str) -> Path:
    """Where it is written how many examples rows make, for plans.

    Args:
        rows, tokenizer: fingerprints.
    """
    options = {**asdict(tokenization), "chat_template": None}  # which is a part of ``tokenizer``
    key = hashlib.sha256(canonical_json([options, rows, tokenizer]).encode()).hexdigest()
    return store / CACHE / "examples" / short(key)


def write_examples(path: Path, count: int) -> None:
    """Keeps a count for plans to come."""
    atomic_write(path, str(count))


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text()) or None
    except (OSError, ValueError):  # not counted yet, or damaged: it can be counted again
        return None


def former_defaults(method: TrainingRecipe, before: Mapping[str, object]) -> list[str]:
    """What to say of a finished output that differs because a default does.

    Args:
        before: its recipe.
    """
    notes = []
    if before.get("num_steps") == _FORMER_STEPS and method.num_steps is None and method.num_epochs == 1:
        notes.append(
            f"the default length was {_FORMER_STEPS} steps and is one epoch now: num_steps={_FORMER_STEPS} keeps it"
        )
    default = type(method).default_learning_rate
    if (
        default is not None and method.adapter and before.get("adapter") and before.get("learning_rate") == default
        and method.learning_rate == float(f"{default * ADAPTER_FACTOR:g}")
    ):  # fmt: skip
        notes.append(
            f"the default under an adapter is {ADAPTER_FACTOR} times as high now: learning_rate={default:g} keeps it"
        )
    return notes
