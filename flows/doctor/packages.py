"""Checks of what is installed."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from flows.doctor.facts import Facts, Finding

_SHOWN = 8

FLOORS = {"prefect": "3.6.22", "mlflow": "3.10", "ray": "2.54", "transformers": "5.3"}


@dataclass(frozen=True, kw_only=True)
class KnownBad:
    """Packages that break each other, although pip installs them together.

    Args:
        together: requirements that all hold.
        without: a package that, when it is there, makes them harmless.
    """

    together: tuple[str, ...]
    why: str
    remedy: str
    without: str | None = None


KNOWN_BAD = (
    KnownBad(
        together=("prefect<=3.8.8", "fastapi>=0.151"),
        why="Prefect states no upper bound on fastapi, and its server does not start with a newer one",
        remedy='pip install "fastapi<0.151"',
    ),
    KnownBad(
        together=("prefect>=3.8,<=3.8.8", "sqlalchemy>=2.1"),
        why="Prefect states no upper bound on SQLAlchemy, and no schedule of its server makes a run with a newer one",
        remedy='pip install "sqlalchemy<2.1"',
    ),
    KnownBad(
        together=("hqq",), without="termcolor",
        why="hqq imports termcolor without requiring it, and transformers imports hqq",
        remedy="pip install termcolor, or pip uninstall hqq",
    ),
    KnownBad(
        together=("optuna>=3", "hydra-optuna-sweeper<1.4"),
        why="the plugin works with optuna 2 alone",
        remedy="pip uninstall hydra-optuna-sweeper: posttrain run --multirun needs no plugin",
    ),
    KnownBad(
        together=("gptqmodel", "torch<2.14"),
        why="gptqmodel is built for torch 2.14 and later, and transformers imports it",
        remedy="pip uninstall gptqmodel",
    ),
)  # fmt: skip


def check_python(facts: Facts) -> Iterator[Finding]:
    """The interpreter is one that the pins were resolved for."""
    found, wanted = facts.packages.python, facts.packages.python_wanted
    if Requirement(f"python{wanted}").specifier.contains(found, prereleases=True):
        yield Finding(check="python", level="ok", found=found)
    else:
        yield Finding(
            check="python", level="error", found=f"{found}, and posttrain takes {wanted}",
            remedy="make a virtual environment with such a Python: make PYTHON=/path/to/python3.11",
        )  # fmt: skip


def check_requirements(facts: Facts) -> Iterator[Finding]:
    """What posttrain requires is there; and what others require of the same packages."""
    own = [*_unmet("posttrain", facts.packages.wanted, facts)]
    ours = {canonicalize_name(Requirement(each).name) for each in facts.packages.wanted}
    others = [
        text
        for name, required in sorted(facts.packages.required.items())
        if name != "posttrain"
        for text in _unmet(name, [each for each in required if _name(each) in ours], facts)
    ]
    if own:
        yield Finding(
            check="packages", level="error", found=_some(own), remedy="pip install --requirement requirements.lock"
        )
    if others:
        yield Finding(
            check="packages", level="warn", found=_some(others),
            remedy="uninstall what you do not need of them, or give it an environment of its own",
        )  # fmt: skip
    if not (own or others):
        yield Finding(check="packages", level="ok", found=f"all {len(ours)} requirements are met")


def check_lock(facts: Facts) -> Iterator[Finding]:
    """What is installed is what was tested."""
    installed, locked = facts.packages.installed, facts.packages.locked
    if not locked:
        yield Finding(check="lock", level="ok", found="no requirements.lock beside the code to compare with")
        return
    other = [
        f"{name} {installed.get(name, 'is absent')} (lock: {version})"
        for name, version in sorted(locked.items())
        if name not in installed or Version(installed[name]).public != Version(version).public
    ]
    if other:
        yield Finding(
            check="lock", level="warn", found=_some(other), remedy="pip install --requirement requirements.lock"
        )
    else:
        yield Finding(check="lock", level="ok", found="what is installed is what the lock says")


def check_known_bad(facts: Facts) -> Iterator[Finding]:
    """No two packages that pip lets pass break each other."""
    bad = [pair for pair in KNOWN_BAD if _holds(pair, facts)]
    for pair in bad:
        names = " and ".join(_with_version(each, facts) for each in pair.together)
        lacking = f" without {pair.without}" if pair.without else ""
        yield Finding(check="known-bad", level="error", found=f"{names}{lacking}: {pair.why}", remedy=pair.remedy)
    if not bad:
        yield Finding(check="known-bad", level="ok", found="no packages that are known to break each other")


def check_floors(facts: Facts) -> Iterator[Finding]:
    """Nothing is older than what closed its known holes."""
    found = {name: facts.packages.installed[name] for name in FLOORS if name in facts.packages.installed}
    low = [
        f"{name} {version} (>={FLOORS[name]})"
        for name, version in found.items()
        if Version(version) < Version(FLOORS[name])
    ]
    if low:
        yield Finding(
            check="security", level="error", found=f"older than what mends its published holes: {', '.join(low)}",
            remedy="pip install --requirement requirements.lock",
        )  # fmt: skip
    else:
        versions = ", ".join(f"{name} {version}" for name, version in found.items())
        yield Finding(check="security", level="ok", found=versions or f"none of {', '.join(FLOORS)} is installed")


def _holds(pair: KnownBad, facts: Facts) -> bool:
    if pair.without and pair.without in facts.packages.installed:
        return False
    return all(_is_met(Requirement(each), facts) for each in pair.together)


def _unmet(name: str, required: Sequence[str], facts: Facts) -> Iterator[str]:
    for text in required:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = facts.packages.installed.get(canonicalize_name(requirement.name))
        if not _is_met(requirement, facts) and (found or name == "posttrain"):
            wants = f"{requirement.name}{requirement.specifier}"
            yield f"{name} requires {wants}, {found or 'none'} is installed"


def _is_met(requirement: Requirement, facts: Facts) -> bool:
    found = facts.packages.installed.get(canonicalize_name(requirement.name))
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _name(text: str) -> str:
    try:
        return canonicalize_name(Requirement(text).name)
    except InvalidRequirement:
        return ""


def _with_version(text: str, facts: Facts) -> str:
    name = Requirement(text).name
    return f"{name} {facts.packages.installed[canonicalize_name(name)]}"


def _some(texts: list[str]) -> str:
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more
