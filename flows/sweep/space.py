"""The search space of a sweep: fields that vary, with values in Hydra's grammar."""

import random
from collections.abc import Mapping, Sequence
from itertools import product

from hydra.core.override_parser.types import ChoiceSweep, Glob, IntervalSweep, Override, RangeSweep, Sweep
from hydra.errors import HydraException

from flows.declare.config import TypedFloat, TypedInt, field_of, parsed
from lineage.errors import ConfigError

# Root keys that do not affect the outputs of stages, so that trials cannot differ in them.
_NOT_VARIABLE = (
    "name", "pipeline", "store", "tracking", "code_drift", "advice", "resources", "sweep", "aliases",
    "non_commercial_labels", "accept_label_drop", "restart", "because", "tags", "schedule", "trigger", "retrain",
    "notify",
)  # fmt: skip


def read_values(field: str, text: str) -> Override:
    """Parses the values of a field (ConfigError: they do not parse, or a sweep does not accept them)."""
    word = f"{field}={text}"
    override = parsed(word)
    value = override.value()
    if isinstance(value, Glob):
        raise ConfigError(f"{word}: a sweep takes no glob; list the values: choice(a,b)")
    unknown = sorted(value.tags - {"log"}) if isinstance(value, Sweep) else ()
    if unknown:
        raise ConfigError(f"{word}: unknown tag {unknown[0]}; accepted: log")
    if isinstance(value, ChoiceSweep) and value.tags:
        raise ConfigError(f"{word}: log is for numbers between two; tag an interval or a range with it")
    try:
        if isinstance(value, RangeSweep) and not numbers(value):
            raise ValueError("the range is empty; it excludes its end")
    except (ValueError, HydraException) as error:
        raise ConfigError(
            f"{word}: not a valid range ({error}); write range(start,stop,step) with a step that leads to stop"
        ) from error
    return override


def numbers(value: RangeSweep) -> list[float]:
    """All numbers of a range."""
    return [exact(number) for number in value.range()]


def exact(number: float) -> float:
    """Removes the rounding errors of summed steps: 0.30000000000000004."""
    return number if isinstance(number, int) else float(f"{number:.12g}")


def choices(values: Override) -> tuple[str, ...]:
    """Every value once, as an override writes it; none of an interval.

    A shuffle is deterministic, because trials are identified by number.
    """
    value = values.value()
    if isinstance(value, IntervalSweep):
        return ()
    if not isinstance(value, ChoiceSweep | RangeSweep):
        return (values.get_value_element_as_str(),)
    if isinstance(value, RangeSweep):
        found = list(map(repr, numbers(value)))
    else:
        found = list(dict.fromkeys(map(Override._get_value_element_as_str, value.list)))
    if value.shuffle:
        random.Random(values.input_line).shuffle(found)
    return tuple(found)


def categories(texts: Sequence[str]) -> tuple[str, ...]:
    """The names of choices in a study: numbers as Python writes them, which studies had before their texts were kept.

    The texts themselves, if two would have one name: ``1.1`` and ``1.10``.
    """
    names = tuple(Override._get_value_element_as_str(_plain(parsed(f"x={text}")._value)) for text in texts)
    return names if len(set(names)) == len(names) else tuple(texts)


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return int(value) if isinstance(value, TypedInt) else float(value) if isinstance(value, TypedFloat) else value


def combinations(space: Mapping[str, Override]) -> list[dict[str, str]]:
    """Every combination of the values; the last field varies fastest.

    Raises:
        ConfigError: a field has values that only a sampler can draw.
    """
    for field, values in space.items():
        if not choices(values) or getattr(values.value(), "tags", None):
            raise ConfigError(
                f"{field}: without a sampler every combination is tried, which needs values without interval or log; "
                "list the values (0.1,0.2 or range(1,5)), or choose a sampler: sweep=optuna"
            )
    return [dict(zip(space, combination, strict=True)) for combination in product(*map(choices, space.values()))]


def fixed_and_swept(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Splits overrides into those that all trials share, and field -> values of those that vary.

    Raises:
        ConfigError: an override does not parse, or a field is swept twice.
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
            swept[field] = word.partition("=")[2]
    return fixed, swept


def require_variable(params: Mapping[str, str], fixed: Sequence[str]) -> None:
    """Checks the fields that vary.

    Args:
        params: field -> values.
        fixed: the overrides that all trials share.

    Raises:
        ConfigError: nothing varies, a field cannot vary, or a field that varies is fixed too.
    """
    if not params:
        raise ConfigError(
            "a sweep needs a field that varies; give one several values, such as stages.dpo.method.beta=0.05,0.1, "
            "or set sweep.params"
        )
    for field in params:
        parts = field.split(".")
        if parts[0] in _NOT_VARIABLE or (parts[0] == "stages" and parts[2:3] == ["resources"]):
            raise ConfigError(
                f"{field}: cannot vary: trials differ in what the stages of one pipeline produce; vary "
                "stages.STAGE.method.*, sources.* or a group such as model or adapter, and give this field one value"
            )
    for word in fixed:
        if field_of(word) in params:
            field = field_of(word)
            raise ConfigError(f"{word}: the sweep varies this field ({field}={params[field]}); remove one of the two")
