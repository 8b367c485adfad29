"""Which words of a sweep vary and which are fixed, of the command line and of ``sweep:`` together."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from flows.declare.compose import field_of
from flows.declare.sweep import Sweep
from flows.sweep.dimension import parse
from lineage.errors import ConfigError

_UNTIL = "{until}"  # in the name of a field: the stage that trials end with
# Keys of the root that say which pipeline runs, where, when and how, and not what its stages make.
_THE_SAME = (
    "name", "pipeline", "store", "tracking", "code_drift", "resources", "sweep", "aliases", "non_commercial_labels",
    "accept_label_drop", "restart", "tags", "schedule", "trigger", "retrain", "notify",
)  # fmt: skip


def fixed_and_swept(overrides: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """What is the same in every trial, and field -> values of what varies.

    Raises:
        ConfigError: an override does not parse, or a field is swept that cannot be, or twice.
    """
    fixed: list[str] = []
    swept: dict[str, str] = {}
    for word in overrides:
        if not parse(word).is_sweep_override():
            fixed.append(word)
            continue
        field = field_of(word)
        if field in swept:
            raise ConfigError(f"{word}: {field}={swept[field]} is there too; state all values of a field in one word")
        _require_variable(field)
        swept[field] = word.partition("=")[2]
    return fixed, swept


def fixed_words(sweep: Sweep) -> list[str]:
    """The overrides of ``sweep.fixed``."""
    return [f"{_field(sweep, field)}={_text(value)}" for field, value in sweep.fixed.items()]


def merged_params(sweep: Sweep, fixed: Sequence[str], swept: Mapping[str, str]) -> dict[str, str]:
    """Field -> values of all that varies; those of the command line replace those of ``sweep.params``.

    Args:
        fixed: the words that are the same in every trial, those of ``sweep.fixed`` among them.

    Raises:
        ConfigError: nothing varies, or what cannot, or what varies is fixed as well.
    """
    params = {_field(sweep, field): values for field, values in sweep.params.items()} | dict(swept)
    if not params:
        raise ConfigError(
            "a sweep varies a field, and none is stated; give one several values, such as "
            "stages.dpo.method.beta=0.05,0.1, or state sweep.params"
        )
    for field in params:
        _require_variable(field)
    for word in fixed:
        field = field_of(word)
        if field in params:
            raise ConfigError(
                f"{word}: the sweep varies this field ({field}={params[field]}), and it is fixed as well; "
                "leave one of the two out"
            )
    return params


def short_names(fields: Iterable[str]) -> dict[str, str]:
    """Field -> its last parts, as few as set it apart from the others; for headings."""
    names = list(fields)
    taken = Counter(ending for field in names for ending in _endings(field))
    return {field: next((ending for ending in _endings(field) if taken[ending] == 1), field) for field in names}


def _endings(field: str) -> list[str]:
    """``c``, ``b.c`` and ``a.b.c`` of ``a.b.c``."""
    parts = field.split(".")
    return [".".join(parts[start:]) for start in reversed(range(len(parts)))]


def _require_variable(field: str) -> None:
    parts = field.split(".")
    if parts[0] in _THE_SAME or (parts[0] == "stages" and parts[2:3] == ["resources"]):
        raise ConfigError(
            f"{field}: cannot vary: trials differ in what the stages of one pipeline make; vary stages.STAGE.method.*, "
            "sources.* or a group such as model or adapter, and give this field one value"
        )


def _field(sweep: Sweep, field: str) -> str:
    if _UNTIL in field and sweep.until is None:
        raise ConfigError(f"sweep: {field} names the stage that trials end with, and none is stated; state sweep.until")
    return field.replace(_UNTIL, sweep.until or "")


def _text(value: str | float | bool | None) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
