"""Ranges of settings: default, recommended and permissible values of two reference documents, in one table.

It refuses nothing. ``flows.planning.advice`` compares a plan with it, ``posttrain advise`` derives a recipe from it,
and ``docs/advice.md`` prints it, with the contradictions of the documents and the choices made.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from tasks.context import Resources
from tasks.method import LOOP_FIELDS, Method, Training
from tasks.recipe import TrainingRecipe

Value = float | str
Band = Literal["few", "small", "medium", "large"]  # of data, in rows; few rows are a small size too
Length = Literal["short", "middle", "long"]  # of a training, in steps
Size = Band | Length
Tuned = Literal["full", "lora", "qlora", "other"]  # what is trained
Bound = Literal["recommended", "permissible"]

JOB_FORM = "reference documents, job form"
BY_SIZE = "reference documents, by data size"
MEASURED = "measured: docs/smollm2.md"
WARM_UP = "reference documents, warm-up"
BATCH_FACTOR = 1.4  # factor of the learning rate for a doubled global batch
SIZES: Mapping[Size, str] = {
    "few": "< 1K rows", "small": "< 5K rows", "medium": "5-50K rows", "large": "> 50K rows",
    "short": "< 500 steps", "middle": "500-5000 steps", "long": "> 5000 steps",
}  # fmt: skip
BANDS: tuple[Band, ...] = ("small", "medium", "large")
# The learning rates of the documents are for AdamW; other optimizers have another scale.
ADAMW = frozenset({
    "adamw_torch_fused", "adamw_torch", "adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "adamw_torch_4bit",
    "adamw_torch_8bit", "stable_adamw",
})  # fmt: skip
RATIO = "method.adapter.alpha / rank"
WARMUP = "method.schedule.warmup"
VALIDATION = "method.validation.every_steps"
LEAST_VALIDATIONS = 4  # of a training, so that its curve on held-out rows has a shape
TRAIN_SHARE = "train share (1 - method.held_out)"
LOGGING = "steps between reports"
FORMAT, DOUBLE, COMPUTE = (f"method.quantization.{name}" for name in ("format", "double", "compute_dtype"))
FEW_ROWS, FEWEST_STEPS = 1_000, 40  # fewer rows; fewer steps than these change no answers
VALIDATION_BATCH = "resources.micro_batch_size, of validation"


@dataclass(frozen=True, kw_only=True)
class Range:
    """The values between two bounds, or one name.

    Args:
        text: ``1e-5..2e-5``, ``< 16``, ``<= 100``, ``> 0.8``, ``32``, or prefixes of names: ``bf16 or fp16``.
    """

    text: str

    def __contains__(self, value: Value) -> bool:
        sign, _, bound = self.text.rpartition(" ")
        if isinstance(value, str):
            return value.startswith(tuple(self.text.split(" or ")))
        if sign:
            number = float(bound)
            return {"<": value < number, "<=": value <= number, ">": value > number}[sign]
        return self.nearest(value) == value

    def nearest(self, value: float) -> float:
        """The number within the bounds that is nearest to a value."""
        low, _, high = self.text.partition("..")
        return min(max(value, float(low)), float(high or low))


@dataclass(frozen=True, kw_only=True)
class Row:
    """An entry of a document on a field.

    Args:
        field: name as in overrides of a stage, or of a value computed from such fields.
        methods: class names; empty: every training.
        tuned: kinds of tuning; empty: all.
        size: of the data or of the training; None: any.
        default, recommended, permissible: of the document; None: not given.
        share: ``recommended`` for a warm-up as a fraction of all steps.
        advised: the value that ``posttrain advise`` chooses.
        silent: why ``recommended`` causes no warning; empty: it does.
    """

    field: str
    source: str
    methods: tuple[str, ...] = ()
    tuned: tuple[Tuned, ...] = ()
    size: Size | None = None
    default: Value | None = None
    recommended: Range | None = None
    permissible: Range | None = None
    share: Range | None = None
    advised: Value | None = None
    silent: str = ""

    @property
    def breaks_itself(self) -> bool:
        """Whether the document's default is outside its own ranges."""
        ranges = [each for each in (self.recommended, self.permissible) if each]
        return self.default is not None and any(self.default not in each for each in ranges)


def _form(
    field: str, default: Value | None, recommended: str = "", permissible: str = "", advised: Value | None = None, *,
    methods: tuple[str, ...] = (), tuned: tuple[Tuned, ...] = (), silent: str = "",
) -> Row:  # fmt: skip
    ranges = [Range(text=text) if text else None for text in (recommended, permissible)]
    return Row(
        field=field, source=JOB_FORM, methods=methods, tuned=tuned, default=default, recommended=ranges[0],
        permissible=ranges[1], advised=advised, silent=silent,
    )  # fmt: skip


def _by_size(
    field: str, ranges: str, *advised: Value, methods: tuple[str, ...] = (), tuned: tuple[Tuned, ...] = (),
    silent: str = "",
) -> list[Row]:  # fmt: skip
    """Rows for each size of data (``SMALL / MEDIUM / LARGE``), or one for all (``ANY``)."""
    texts = ranges.split(" / ")
    found = zip(BANDS if len(texts) > 1 else [None], texts, advised, strict=True)
    return [
        Row(
            field=field, source=BY_SIZE, methods=methods, tuned=tuned, size=size, recommended=Range(text=text),
            advised=value, silent=silent,
        )
        for size, text, value in found
    ]  # fmt: skip


def _of_few(field: str, recommended: str, advised: Value, *tuned: Tuned) -> Row:
    return Row(
        field=field, source=MEASURED, methods=("SFT",), tuned=tuned, size="few", recommended=Range(text=recommended),
        advised=advised,
    )  # fmt: skip


_SFT = ("SFT",)
_LORA: tuple[Tuned, ...] = ("lora",)
_QLORA: tuple[Tuned, ...] = ("qlora",)
_ADAPTED = _LORA + _QLORA
_DATA = ("PrepareText", "PrepareConversations", "PreparePreferences", "PrepareUnpaired", "PreparePrompts")
_SIZE_DECIDES = "the rows by data size decide"
_ADAMW_RATE, _DECAY = "method.learning_rate", "method.optimizer.weight_decay"

TABLE: tuple[Row, ...] = (
    _form("method.num_epochs", 1, "2..5", "< 50", silent=_SIZE_DECIDES),
    _form("resources.micro_batch_size", 8, "8", "< 16", silent=_SIZE_DECIDES),
    _form(VALIDATION_BATCH, 1, "8", "< 16", silent="it changes no model"),
    _form(_ADAMW_RATE, 1e-4, "1e-5..2e-5", "< 5e-5", tuned=("full",), silent=_SIZE_DECIDES),
    _form("resources.dataloader_workers", 1, "4", "< 10", silent="it changes no model"),
    _form("resources.save_steps", 100, "100", "<= 100", 100, silent="more often costs time alone"),
    _form("resources.keep_last", 2, "2..5", "< 10", 2),
    _form(VALIDATION, 100, "100..200", "", 100),
    _form(LOGGING, 5, "5", "< 20", silent="every step is reported"),
    _form("method.adapter.rank", 16, "16", "<= 64", tuned=_ADAPTED, silent=_SIZE_DECIDES),
    _form("method.adapter.alpha", 16, "32", "<= 64", tuned=_LORA, silent="alpha / rank decides"),
    _form("method.adapter.alpha", 16, "", "<= 64", tuned=_QLORA),
    _form("method.adapter.dropout", 0.1, "0.1", "<= 1", tuned=_ADAPTED, silent=_SIZE_DECIDES),
    _form("method.beta", 0.3, "", "", 0.3, methods=("DPO",)),
    _form("method.beta", 0.0001, "", "", 0.0001, methods=("GRPO",)),
    _form("method.sampling.temperature", 0.9, "", "", 0.9, methods=("GRPO",)),
    _form(TRAIN_SHARE, None, "> 0.8", methods=_DATA, silent="few rows need a larger share for their scores"),
    *_by_size(_ADAMW_RATE, "1e-6..5e-6 / 5e-6..2e-5 / 1e-5..3e-5", 2e-6, 1e-5, 2e-5, methods=_SFT, tuned=("full",)),
    *_by_size(_DECAY, "0.01..0.1 / 0.01 / 0..0.01", 0.01, 0.01, 0.01, methods=_SFT, tuned=("full", "lora")),
    *_by_size("method.num_epochs", "1..3 / 2..5 / 1..3", 2, 3, 2, methods=_SFT, tuned=("full",)),
    *_by_size("method.schedule.min_learning_rate", "1e-7 / 1e-6 / 1e-6", 1e-7, 1e-6, 1e-6, methods=_SFT),
    *_by_size("method.global_batch_size", "16..32 / 32..64 / 64..128", 16, 32, 64, methods=_SFT),
    *_by_size("resources.micro_batch_size", "2..4 / 4..8 / 8..16", 4, 8, 8, methods=_SFT),
    *_by_size("method.max_grad_norm", "1.0", 1.0),
    *_by_size("method.schedule.name", "cosine", "cosine"),
    *_by_size(_ADAMW_RATE, "1e-5..5e-5 / 1e-5..1e-4 / 5e-5..2e-4", 2e-5, 1e-4, 2e-4, methods=_SFT, tuned=_LORA),
    *_by_size("method.adapter.rank", "4..8 / 8..16 / 16..64", 8, 16, 32, tuned=_LORA),
    *_by_size(RATIO, "2..4 / 2..4 / 2", 2, 2, 2, tuned=_LORA, silent="1 is safe, and above 4 is a warning"),
    *_by_size("method.adapter.dropout", "0.05..0.1 / 0.05 / 0..0.05", 0.05, 0.05, 0.05, tuned=_LORA),
    *_by_size("method.num_epochs", "3..5 / 2..4 / 1..3", 4, 3, 2, methods=_SFT, tuned=_ADAPTED),
    *_by_size(_ADAMW_RATE, "1e-5..2e-4", 1e-4, methods=_SFT, tuned=_QLORA),
    *_by_size(_DECAY, "0.01", 0.01, methods=_SFT, tuned=_QLORA),
    *_by_size("method.adapter.rank", "16..64", 16, tuned=_QLORA),
    *_by_size("method.adapter.alpha", "32", 32, tuned=_QLORA),
    *_by_size("method.adapter.dropout", "0.05..0.1", 0.05, tuned=_QLORA),
    *_by_size(FORMAT, "nf4", "nf4", tuned=_QLORA),
    *_by_size(DOUBLE, "true", "true", tuned=_QLORA),
    *_by_size(COMPUTE, "bf16 or fp16", "bf16", tuned=_QLORA),
    *_by_size(RATIO, "1..4", 2, tuned=_LORA),  # 1 safe, 2 aggressive, above 4 a warning
    Row(field=WARMUP, source=WARM_UP, size="short", recommended=Range(text="5..10"), advised=10),
    Row(
        field=WARMUP, source=WARM_UP, size="middle", recommended=Range(text="50..200"), share=Range(text="0.05..0.1"),
        advised=0.1,
    ),
    Row(field=WARMUP, source=WARM_UP, size="long", default=0.1, permissible=Range(text="<= 1000"), advised=0.1),
    # The documents' values for < 5K rows are a few steps at a small rate, after which no answer differs.
    _of_few("method.num_epochs", "3..40", 3, *_ADAPTED),
    _of_few("method.global_batch_size", "8..16", 8, *_ADAPTED),
    _of_few(_ADAMW_RATE, "3e-4..5e-4", 5e-4, *_LORA),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """The settings of a stage, to be compared with the table.

    Args:
        trains: whether rows for every training apply.
        num_rows, num_steps: of the training; None: unknown. With unknown rows, rows of every size of data apply.
        values: field -> value, of all set fields.
    """

    method: str
    tuned: Tuned
    values: Mapping[str, Value]
    trains: bool = True
    num_rows: int | None = None
    num_steps: int | None = None

    def rows(self, field: str) -> list[Row]:
        """The rows that apply to a field."""
        return [row for row in _rows(self.method, self.tuned, self.trains).get(field, ()) if self._has(row.size)]

    def _has(self, size: Size | None) -> bool:
        if size == "few":
            return self.num_rows is None or self.num_rows < FEW_ROWS
        if size in BANDS:
            return self.num_rows is None or size == band_of(self.num_rows)
        return size is None or (self.num_steps is not None and size == _length_of(self.num_steps))

    def is_inside(self, row: Row, bound: Range) -> bool:
        """Whether the value of the row's field is inside a range of the row."""
        value = self.values[row.field]
        if value == "auto":  # which the training decides
            return True
        if isinstance(value, str):
            return value in bound
        if row.field == VALIDATION:  # a training may be short for the bound, also while its length is unknown
            least = bound.nearest(0)
            most = least if self.num_steps is None else most_steps_between(self.num_steps)
            return value in bound or (value <= most and (self.num_steps is None or most < least))
        if row.field != WARMUP or self.num_steps is None:
            return value in bound
        steps = round(value * self.num_steps, 6) if value < 1 else value
        if row.size == "short" and self.num_steps < 2 * bound.nearest(0):  # half of a very short training
            return steps == most_warmup_of(self.num_steps)
        return steps in bound or (row.share is not None and steps / self.num_steps in row.share)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A value outside a range.

    Args:
        accepted: the range.
        source: source of the range, with the size that it applies to.
    """

    field: str
    value: Value
    bound: Bound
    accepted: str
    source: str

    def __str__(self) -> str:
        """``method.num_epochs=9 is outside the recommended 1..3 (reference documents, by data size: < 5K rows)``"""
        value = self.value if isinstance(self.value, str) else f"{self.value:g}"
        return f"{self.field}={value} is outside the {self.bound} {self.accepted} ({self.source})"


def findings_of(
    method: Method, resources: Resources, num_rows: int | None, num_steps: int | None, num_epochs: float | None
) -> Iterator[Finding]:
    """``findings`` of the settings of a stage."""
    return findings(case_of(method, resources, num_rows, num_steps, num_epochs))


def findings(case: Case) -> Iterator[Finding]:
    """Values outside their ranges, one finding per field; a value that some row recommends is fine."""
    for field in case.values:
        rows = case.rows(field)
        recommended = [(row, row.recommended) for row in rows if row.recommended and not row.silent]
        if any(case.is_inside(*each) for each in recommended):
            continue
        permissible = [(row, row.permissible) for row in rows if row.permissible]
        broken = [each for each in permissible if not case.is_inside(*each)]
        if broken or recommended:
            yield _finding(case, "permissible" if broken else "recommended", broken or recommended)


def _finding(case: Case, bound: Bound, found: Sequence[tuple[Row, Range]]) -> Finding:
    row = found[0][0]
    shares = [f"{row.share.text} of all steps" for row, _ in found if row.share]
    texts = dict.fromkeys([*(each.text for _, each in found), *shares])
    known = row.size and len(found) == 1  # else the number of rows is unknown, and the ranges of all sizes apply
    sources = "; ".join(dict.fromkeys(each.source for each, _ in found))
    source = f"{sources}: {SIZES[row.size]}" if known and row.size else sources
    return Finding(
        field=row.field, value=case.values[row.field], bound=bound, accepted=" or ".join(texts), source=source
    )


@cache
def _rows(method: str, tuned: Tuned, trains: bool) -> Mapping[str, Sequence[Row]]:
    found: dict[str, list[Row]] = {}
    for row in TABLE:
        if (method in row.methods if row.methods else trains) and (not row.tuned or tuned in row.tuned):
            found.setdefault(row.field, []).append(row)
    return found


def band_of(num_rows: int) -> Band:
    """The size class of a number of rows."""
    return "small" if num_rows < 5_000 else "medium" if num_rows <= 50_000 else "large"


def most_warmup_of(num_steps: int) -> int:
    """The warm-up of a training that is too short for the documents' least: half of it."""
    return max(1, num_steps // 2)


def most_steps_between(num_steps: int) -> int:
    """The most steps between two validations of a training that is short for the document's range."""
    return max(1, num_steps // LEAST_VALIDATIONS)


def _length_of(num_steps: int) -> Length:
    return "short" if num_steps < 500 else "middle" if num_steps <= 5_000 else "long"


def case_of(
    method: Method, resources: Resources, num_rows: int | None = None, num_steps: int | None = None,
    num_epochs: float | None = None,
) -> Case:  # fmt: skip
    """The settings of a stage, as the table names them.

    Args:
        num_epochs: epochs of the training, also if the method sets steps instead.
    """
    training = method if isinstance(method, Training) else None
    tuned = _tuned(training) if training else "other"
    values = {field: _value(field, method, resources) for field in _rows(method.name(), tuned, training is not None)}
    if num_epochs is not None and "method.num_epochs" in values:
        values["method.num_epochs"] = num_epochs
    for field in _unread(training, values) if training else ():
        del values[field]
    known = {field: value for field, value in values.items() if value is not None}
    return Case(
        method=method.name(), tuned=tuned, values=known, trains=training is not None, num_rows=num_rows,
        num_steps=num_steps,
    )  # fmt: skip


def _tuned(method: TrainingRecipe) -> Tuned:
    if method.adapter is None:
        return "full"
    if method.adapter.type not in ("lora", "dora") or method.adapter.rslora:  # their scale is not alpha / rank
        return "other"
    return "qlora" if method.quantization else "lora"


def _unread(method: Training, fields: Iterable[str]) -> list[str]:
    """Fields that a method's own loop ignores, or whose ranges do not apply to its optimizer."""
    ignored = LOOP_FIELDS - method.applies if method.has_own_loop else frozenset()
    found = [field for field in fields if field.removeprefix("method.").partition(".")[0] in ignored]
    if method.optimizer.name not in ADAMW:
        found += [_ADAMW_RATE, _DECAY, "method.schedule.name"]
    return [field for field in dict.fromkeys(found) if field in fields]


def _value(field: str, method: Method, resources: Resources) -> Value | None:
    if field == LOGGING:
        return 1  # every step is reported
    if field == "resources.dataloader_workers":
        return resources.num_loaders
    if field == VALIDATION_BATCH:
        return resources.rows_at_once if getattr(method, "validation", None) else None
    if field == RATIO:
        alpha, rank = (_value(f"method.adapter.{name}", method, resources) for name in ("alpha", "rank"))
        return alpha / rank if isinstance(alpha, int) and isinstance(rank, int) else None
    if field in (FORMAT, DOUBLE, COMPUTE):
        return _of_quantization(field, method, resources)
    if field == TRAIN_SHARE:
        held_out = getattr(method, "held_out", None)
        return 1 - held_out if isinstance(held_out, float) else None
    first, *names = field.split(".")
    found: object = {"method": method, "resources": resources}[first]
    for name in names:
        found = getattr(found, name, None)
    return found if isinstance(found, int | float | str) else None


def _of_quantization(field: str, method: Method, resources: Resources) -> Value | None:
    """A value of a base in 4 bits; None: it has another format, or computes in fp32 because there is no GPU."""
    found = method.quantization if isinstance(method, Training) else None
    if found is None or found.format not in ("nf4", "fp4"):
        return None
    if field == FORMAT:
        return found.format
    if field == DOUBLE:
        return "false" if found.double is False else "true"
    assert isinstance(method, Training)
    precision = resources.resolved_precision(method.precision) if resources.gpus_per_worker else None
    return found.compute_dtype or ("bf16" if precision == "fp8" else precision)
