"""The values of one field that varies, read in Hydra's grammar."""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from hydra.core.override_parser.types import Sweep as Several
from hydra.errors import HydraException

from lineage.errors import ConfigError

_LOG = "log"


@dataclass(frozen=True, kw_only=True)
class Choices:
    """Values to choose from, each as an override states it."""

    values: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Steps(Choices):
    """Numbers at equal distances, whole ones where all are ``int``; ``log``: drawn evenly on a logarithmic scale."""

    low: float
    high: float
    step: float
    log: bool


@dataclass(frozen=True, kw_only=True)
class Interval:
    """All numbers between two, whole ones where both are ``int``; ``log``: drawn evenly on a logarithmic scale."""

    low: float
    high: float
    log: bool


Dimension = Choices | Steps | Interval


def parse(word: str) -> Override:
    """One override.

    Raises:
        ConfigError: it is none.
    """
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException as error:
        cause = str(error).splitlines()[0].strip()
        raise ConfigError(
            f"{word}: is no override ({cause}); write key=value, or several values: a,b  choice(a,b)  range(1,5)  "
            "interval(0.1,0.5)  int(interval(1,9))  tag(log,interval(1e-6,1e-4)); quote odd ones"
        ) from error


def dimensions(params: Mapping[str, str]) -> dict[str, Dimension]:
    """Field -> what its values are."""
    return {field: dimension(field, values) for field, values in params.items()}


def dimension(field: str, values: str) -> Dimension:
    """What the values of a field are.

    Raises:
        ConfigError: they do not parse, or are not what a sweep takes.
    """
    word = f"{field}={values}"
    override = parse(word)
    value = override.value()
    if isinstance(value, Several):
        log = _is_log(word, value)
        if isinstance(value, IntervalSweep):
            return _interval(word, value, log)
        if isinstance(value, RangeSweep):
            return _steps(word, value, log)
        assert isinstance(value, ChoiceSweep)
        if log:
            raise ConfigError(f"{word}: log says how a number between two is drawn; tag an interval or a range with it")
        texts = [Override._get_value_element_as_str(each) for each in value.list]
        return Choices(values=_in_order(word, texts, value.shuffle))
    if override.is_sweep_override():
        raise ConfigError(f"{word}: a sweep takes no glob; list the values: choice(a,b)")
    return Choices(values=(override.get_value_element_as_str(),))


def _is_log(word: str, value: Several) -> bool:
    unknown = sorted(value.tags - {_LOG})
    if unknown:
        raise ConfigError(f"{word}: unknown tag {unknown[0]}; accepted: {_LOG}")
    return _LOG in value.tags


def _interval(word: str, value: IntervalSweep, log: bool) -> Interval:
    assert value.start is not None and value.end is not None
    _require_between(word, value.start, value.end, log)
    return Interval(low=value.start, high=value.end, log=log)


def _steps(word: str, value: RangeSweep, log: bool) -> Steps:
    try:
        numbers = [_tidy(number) for number in value.range()]
    except (ValueError, HydraException) as error:
        raise ConfigError(
            f"{word}: is no range ({error}); write range(start,stop,step) with a step that is not 0"
        ) from error
    if not numbers:
        raise ConfigError(
            f"{word}: the range is empty; its end is not part of it, and its step leads from start to stop"
        )
    low, high, step = min(numbers), max(numbers), abs(_tidy(value.step))
    if log:
        _require_between(word, low, high + step, log)
        if step != 1 or not isinstance(low, int):
            raise ConfigError(f"{word}: log takes whole numbers at steps of 1, or an interval; leave the step out")
    texts = _in_order(word, map(repr, numbers), value.shuffle)
    return Steps(values=texts, low=low, high=high, step=step, log=log)


def _tidy(number: float) -> float:
    """Without what adding up steps leaves in the last digits: 0.30000000000000004 is 0.3."""
    return number if isinstance(number, int) else float(f"{number:.12g}")


def _require_between(word: str, low: float, high: float, log: bool) -> None:
    if not low < high:
        raise ConfigError(f"{word}: nothing lies between {low} and {high}; state the smaller number first")
    if log and low <= 0:
        raise ConfigError(f"{word}: starts at {low}, and a logarithmic scale starts above 0; state a start above 0")


def _in_order(word: str, values: Iterable[str], shuffle: bool) -> tuple[str, ...]:
    """Each value once; shuffled the same way every time, since a trial is known by its number."""
    each = list(dict.fromkeys(values))
    if shuffle:
        random.Random(word).shuffle(each)
    return tuple(each)
