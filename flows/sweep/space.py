"""The search space of a sweep: fields that vary, with values in Hydra's grammar."""

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.errors import HydraException

from flows.declare.compose import field_of, parsed
from flows.declare.sweep import Sweep
from lineage.errors import ConfigError

_UNTIL = "{until}"  # in the name of a field: the stage that trials end with
# Root keys that do not affect the outputs of stages, so that trials cannot differ in them.
_NOT_VARIABLE = (
    "name", "pipeline", "store", "tracking", "code_drift", "advice", "resources", "sweep", "aliases",
    "non_commercial_labels", "accept_label_drop", "restart", "because", "tags", "schedule", "trigger", "retrain",
    "notify",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Values:
    """The values of a field that varies.

    Args:
        choices: values as overrides write them; empty: all numbers from ``low`` to ``high``.
        low: with ``high``, bounds of numbers, ``int`` for whole numbers; None: categories.
        step: distance of neighbours; None: real numbers.
        log: a sampler draws on a logarithmic scale.
    """

    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float = 0
    step: float | None = None
    log: bool = False

    @property
    def is_whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def first(self) -> str:
        return self.choices[0] if self.choices else str(self.low)

    def count(self) -> float:
        """Number of values; may be infinite."""
        if self.choices:
            return len(self.choices)
        return self.high - (self.low or 0) + 1 if self.is_whole else math.inf


def read_values(field: str, text: str) -> Values:
    """Parses the values of a field.

    Raises:
        ConfigError: they do not parse, or a sweep does not accept them.
    """
    word = f"{field}={text}"
    override = parsed(word)
    value = override.value()
    if not override.is_sweep_override():
        return Values(choices=(override.get_value_element_as_str(),))
    if not isinstance(value, ChoiceSweep | RangeSweep | IntervalSweep):
        raise ConfigError(f"{word}: a sweep takes no glob; list the values: choice(a,b)")
    unknown = sorted(value.tags - {"log"})
    if unknown:
        raise ConfigError(f"{word}: unknown tag {unknown[0]}; accepted: log")
    log = "log" in value.tags
    if isinstance(value, RangeSweep):
        return _range(word, value, log)
    if isinstance(value, ChoiceSweep):
        if log:
            raise ConfigError(f"{word}: log is for numbers between two; tag an interval or a range with it")
        return Values(choices=_ordered(word, map(Override._get_value_element_as_str, value.list), value.shuffle))
    assert value.start is not None and value.end is not None
    _require_between(word, value.start, value.end, log)
    found = Values(low=value.start, high=value.end, log=log)
    return replace(found, step=1) if found.is_whole else found


def _range(word: str, value: RangeSweep, log: bool) -> Values:
    def exact(number: float) -> float:  # rounds errors of summed steps: 0.30000000000000004
        return number if isinstance(number, int) else float(f"{number:.12g}")

    try:
        numbers = [exact(number) for number in value.range()]
    except (ValueError, HydraException) as error:
        raise ConfigError(
            f"{word}: not a valid range ({error}); write range(start,stop,step) with a step that is not 0"
        ) from error
    if not numbers:
        raise ConfigError(f"{word}: the range is empty; it excludes its end, and its step leads from start to stop")
    low, high, step = min(numbers), max(numbers), abs(exact(value.step))
    if log:
        _require_between(word, low, high + step, log)
        if step != 1 or not isinstance(low, int):
            raise ConfigError(f"{word}: log takes whole numbers at steps of 1, or an interval; leave the step out")
    choices = _ordered(word, map(repr, numbers), value.shuffle)
    return Values(choices=choices, low=low, high=high, step=step, log=log)


def _require_between(word: str, low: float, high: float, log: bool) -> None:
    if not low < high:
        raise ConfigError(f"{word}: no number is between {low} and {high}; give the smaller number first")
    if log and low <= 0:
        raise ConfigError(f"{word}: a logarithmic scale starts above 0; give a start above 0")


def _ordered(word: str, values: Iterable[str], shuffle: bool) -> tuple[str, ...]:
    """Unique values; the shuffle is deterministic, because trials are identified by number."""
    each = list(dict.fromkeys(values))
    if shuffle:
        random.Random(word).shuffle(each)
    return tuple(each)


def combinations(space: Mapping[str, Values]) -> list[dict[str, str]]:
    """Every combination of the values; the last field varies fastest.

    Raises:
        ConfigError: a field has values that only a sampler can draw.
    """
    for field, values in space.items():
        if not values.choices or values.log:
            raise ConfigError(
                f"{field}: without a sampler every combination is tried, which needs values without interval or log; "
                "list the values (0.1,0.2 or range(1,5)), or choose a sampler: sweep=optuna"
            )
    products = itertools.product(*(values.choices for values in space.values()))
    return [dict(zip(space, combination, strict=True)) for combination in products]


def fixed_and_swept(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Splits overrides into those that all trials share, and field -> values of those that vary.

    Raises:
        ConfigError: an override does not parse, or a field cannot vary, or is swept twice.
    """
    fixed: list[str] = []
    swept: dict[str, str] = {}
    for word in overrides:
        field = field_of(word)
        if not parsed(word).is_sweep_override():
            fixed.append(word)
        elif field in swept:
            raise ConfigError(
                f"{word}: {field}={swept[field]} is given too; give all values of a field in one override"
            )
        else:
            _require_variable(field)
            swept[field] = word.partition("=")[2]
    return fixed, swept


def merged_params(sweep: Sweep, fixed: Sequence[str], swept: Mapping[str, str]) -> dict[str, str]:
    """Field -> values of all fields that vary; the command line overrides ``sweep.params``.

    Args:
        fixed: the overrides that all trials share, those of ``sweep.fixed`` included.

    Raises:
        ConfigError: nothing varies, a field cannot vary, or a field that varies is fixed too.
    """
    params = {field_name(sweep, field): values for field, values in sweep.params.items()} | dict(swept)
    if not params:
        raise ConfigError(
            "a sweep needs a field that varies; give one several values, such as stages.dpo.method.beta=0.05,0.1, "
            "or set sweep.params"
        )
    for field in params:
        _require_variable(field)
    for word in fixed:
        field = field_of(word)
        if field in params:
            raise ConfigError(f"{word}: the sweep varies this field ({field}={params[field]}); remove one of the two")
    return params


def fixed_overrides(sweep: Sweep) -> list[str]:
    """``sweep.fixed`` as overrides."""
    names = {None: "null", True: "true", False: "false"}
    return [
        f"{field_name(sweep, field)}={names[value] if value is None or isinstance(value, bool) else value}"
        for field, value in sweep.fixed.items()
    ]


def field_name(sweep: Sweep, field: str) -> str:
    """The name of a field of ``sweep.params`` or ``sweep.fixed``, with the last stage filled in."""
    if _UNTIL in field and sweep.until is None:
        raise ConfigError(f"sweep: {field} names the last stage of a trial, which is not set; set sweep.until")
    return field.replace(_UNTIL, sweep.until or "")


def _require_variable(field: str) -> None:
    parts = field.split(".")
    if parts[0] in _NOT_VARIABLE or (parts[0] == "stages" and parts[2:3] == ["resources"]):
        raise ConfigError(
            f"{field}: cannot vary: trials differ in what the stages of one pipeline produce; vary "
            "stages.STAGE.method.*, sources.* or a group such as model or adapter, and give this field one value"
        )
