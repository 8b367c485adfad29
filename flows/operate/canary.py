"""``posttrain canary``: runs the recipes of ``tasks.judgement.canary``, compares them with a record, names the package.

The noise of a figure is measured when it is recorded: the largest difference that the recipe shows where only rounding
differs, which is with two threads, with the smallest instruction set of the CPU, and from weights moved by their last
bit; at least the resolution of fp32. Beyond noise is a difference of more than ``MARGIN`` times as much.

``isolate`` needs an environment for each package that moved: with the packages of the record, and that one as it is
now. uv installs each package of the record into a folder of its own, and an environment is the present one with the
folders of all but one package in front of its path. So each package is installed once, whatever did not move is shared,
and torch needs no index that uv knows: where uv does not find a package, pip tries, whose settings may name the builds
of this machine.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from math import inf, isfinite, isnan
from pathlib import Path
from typing import ClassVar, Final, Literal

from packaging.utils import canonicalize_name
from packaging.version import Version
from pydantic import TypeAdapter, ValidationError

from flows.operate.doctor import requirements_here
from flows.stages.process_settings import LIBRARIES, worker_environment
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.files import atomic_write, read_jsonl
from lineage.record.environment import hardware, provenance_here
from tasks.judgement.canary import RECIPES, VARIANTS, Outcome

MARGIN = 10.0
_RESOLUTION = 2.0**-23  # of fp32: the relative difference of a number and the next one
EQUAL: Final = "equal to the bit"
WITHIN: Final = "within noise"
BEYOND: Final = "beyond noise"
Verdict = Literal["equal to the bit", "within noise", "beyond noise"]
_MODULE = "tasks.judgement.canary"
# Of Python with and without a traceback, of C++, of the dynamic linker, and of the checks of libraries in C.
_ERROR = re.compile(
    r"([\w.]+(Error|Exception|Interrupt)\b|Fatal Python error|terminate called|what\(\):)|.*(lookup error|[Aa]ssert)"
)
_PLAIN = ""  # the variant that is compared
# Of a record: whether other variants run too, and variables. The last one has the CPU's smallest instruction set.
_RUNS: tuple[tuple[bool, Mapping[str, str]], ...] = (
    (True, {}),
    (False, {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}),
)
# Packages that the recipes import; with all that these require, they are those that can change a result.
_PACKAGES = (
    "torch", "transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "safetensors", "bitsandbytes",
    "liger-kernel", "flash-attn", "triton", "numpy", "pyarrow", "duckdb", "orjson", "xxhash", "rensa", "jinja2",
    "fastokens", "pydantic",
)  # fmt: skip
_START_SECONDS, _RECIPE_SECONDS, _POLL_SECONDS, _INSTALL_SECONDS = 300, 120, 0.2, 1800
_LIST = re.compile(r"\[[^\[\]{}]*\]")
_MACHINE_FLAGS = re.compile(r"avx\w*|amx\w*|fma\w*|sve\w*|asimd\w*|neon")


# --- the record


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A recipe's results.

    Args:
        noise: by figure.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    figures: Mapping[str, Sequence[float]]
    noise: Mapping[str, float]
    digests: Mapping[str, str]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Canary:
    """What ``record`` writes.

    Args:
        names: of the recorded recipes.
        left_out: recipe -> why that machine could not run it.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    form: Literal["posttrain canary 1"]
    commit: str | None
    dirty: bool | None
    python: str
    machine: Mapping[str, str]
    packages: Mapping[str, str]
    margin: float = MARGIN
    names: Sequence[str]
    left_out: Mapping[str, str]
    recipes: Mapping[str, Recorded]


def chosen(only: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The recipes to run, all or those named, and those that this machine cannot run, with the reason.

    Raises:
        ConfigError: there is no recipe of that name, or none that can run.
    """
    if unknown := [name for name in only if name not in RECIPES]:
        raise ConfigError(f"--only {unknown[0]}: no such recipe; there are: {', '.join(RECIPES)}")
    reasons = {name: RECIPES[name].why_not() for name in only or RECIPES}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    if not (found := [name for name, reason in reasons.items() if not reason]):
        raise ConfigError(f"none of these recipes can run here ({'; '.join(map(': '.join, left_out.items()))})")
    return found, left_out


def record(only: Sequence[str]) -> Canary:
    """Runs recipes, and runs them again to measure their noise (PipelineError: a recipe failed)."""
    names, left_out = chosen(only)
    runs = [run_recipes(names, noise=noise, environment=settings, must=True) for noise, settings in _RUNS]
    recipes = {}
    for name in names:
        plain, *others = (outcome for run in runs for outcome in run[name].values())
        noise = {
            figure: _noise(values, [each.figures.get(figure, ()) for each in others])
            for figure, values in plain.figures.items()
        }
        recipes[name] = Recorded(figures=plain.figures, noise=noise, digests=plain.digests, seconds=plain.seconds)
    here = provenance_here(time.time())
    return Canary(
        form="posttrain canary 1", commit=here.git_commit, dirty=here.git_dirty, python=here.python or "",
        machine=machine(), packages=package_versions(), names=names, left_out=left_out, recipes=recipes,
    )  # fmt: skip


def _noise(values: Sequence[float], others: Iterable[Sequence[float]]) -> float:
    """The largest difference by rounding, and at least the resolution of fp32, of 1 or of the largest value.

    A value near 0 is a difference of larger numbers, whose rounding it has.
    """
    largest = max([1.0, *(abs(value) for value in values if isfinite(value))])
    return float(f"{max([_RESOLUTION * largest, *(_difference(values, each) for each in others)]):.2e}")


def require_writable(path: Path) -> None:
    """Refuses a file that cannot be written, before minutes of work.

    Raises:
        ConfigError: it is a folder, or in one that this account may not write.
    """
    there = next(each for each in path.absolute().parents if each.exists())
    if path.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"--out {path}: cannot be written; name a file in a folder that this account may write")


def write(canary: Canary, path: Path) -> None:
    """Writes a record as sorted JSON, the values of a figure on one line."""
    text = json.dumps(asdict(canary), indent=2, sort_keys=True)
    atomic_write(path, _LIST.sub(lambda found: " ".join(found[0].split()), text) + "\n")


def read(path: Path) -> Canary:
    """Reads a record (ConfigError: it is missing, or of another form, or lacks a recipe)."""
    remedy = f"write one by: posttrain canary record --out {path}"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"{path}: cannot be read ({reason}); {remedy}") from error
    try:
        found = TypeAdapter(Canary).validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path}: not a record of posttrain canary ({f'{where}: ' if where else ''}{first['msg']}); {remedy}"
        ) from error
    if missing := [name for name in found.names if name not in found.recipes]:
        raise ConfigError(f"{path}: recipe {missing[0]} is missing, though the file lists it; {remedy}")
    if unknown := [name for name in found.recipes if name not in RECIPES]:
        raise ConfigError(f"{path}: recipe {unknown[0]} is none of this version of posttrain; {remedy}")
    return found


@cache
def machine() -> dict[str, str]:
    """What decides the last bits beside the packages: CPU, its instruction sets, and GPU."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
        found = sorted(set(_MACHINE_FLAGS.findall(flags[1]))) if flags else []
        return {**hardware(), "instructions": " ".join(found)}
    return dict(hardware())


def package_versions() -> dict[str, str]:
    """Versions of all installed packages that the recipes run on: those that they import, and what these require."""
    versions, waiting = dict[str, str](), list(_PACKAGES)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in versions:
            continue
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
            waiting += [each.name for each in requirements_here(metadata.requires(name) or ())]
    return dict(sorted(versions.items()))


# --- a run


def run_recipes(
    names: Sequence[str], *, noise: bool = False, environment: Mapping[str, str] | None = None, must: bool = False
) -> dict[str, dict[str, Outcome]]:
    """Runs recipes in a process of their own: recipe -> variant -> outcome.

    A recipe that ends its process is an outcome too, and the others run in another one.

    Raises:
        PipelineError: with ``must``, a recipe failed.
    """
    found: dict[str, dict[str, Outcome]] = {name: {} for name in names}
    waiting = list(names)
    with tempfile.TemporaryDirectory(prefix="posttrain-canary-") as place:
        while waiting:
            file = Path(place, f"{len(waiting)}.jsonl")
            status, reason = _process(file, waiting, noise=noise, environment=environment or {})
            for name, variant, outcome in read_jsonl(file, _outcome):
                found[name][variant] = outcome
            if not status:
                break
            count = 1 + (len(VARIANTS) if noise else 0)
            lost = next((name for name in waiting if len(found[name]) < count), waiting[-1])
            at_start = status > 0 and not file.exists()  # such as an import that fails: it is that of all
            rest = waiting[waiting.index(lost) + 1 :]
            for name in waiting if at_start else [lost]:
                found[name][_PLAIN] = Outcome(error=reason)
            waiting = [] if at_start else rest
    for name, variants in found.items() if must else ():
        if errors := [each.error for each in variants.values() if each.error]:
            raise PipelineError(f"recipe {name} failed: {errors[0]}; nothing is recorded; name others by --only")
    return found


def _outcome(name: str, variant: str, **fields: object) -> tuple[str, str, Outcome]:
    return name, variant, Outcome(**fields)  # type: ignore[arg-type]


def _process(
    file: Path, names: Sequence[str], *, noise: bool, environment: Mapping[str, str]
) -> tuple[int, str]:  # fmt: skip
    """Runs the module of the recipes; returns its exit code, and why it is not 0."""
    command = [
        sys.executable,
        "-P",
        "-X",
        "faulthandler",
        "-m",
        _MODULE,
        str(file),
        *names,
        *(["--noise"] if noise else []),
    ]
    settings = {**worker_environment(), **LIBRARIES, **os.environ, "HF_HUB_OFFLINE": "1", **environment}
    limit = _START_SECONDS + _RECIPE_SECONDS * len(names)
    log, shown, end = file.with_suffix(".log"), 0, time.monotonic() + limit
    with log.open("wb") as out, subprocess.Popen(
        command, cwd=file.parent, env=settings, stdin=subprocess.DEVNULL, stdout=out, stderr=out
    ) as process:  # fmt: skip
        try:
            while process.poll() is None and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
                outcomes = read_jsonl(file, _outcome)
                for name, variant, outcome in outcomes[shown:]:
                    label = f"{name} ({variant})" if variant else name
                    print(f"{label}: {outcome.error or f'{outcome.seconds:.1f} s'}", file=sys.stderr, flush=True)
                shown = len(outcomes)
            if process.poll() is None:
                return -9, f"it had not ended after {limit} s"
        finally:
            process.kill()
    why = error_line(log.read_text(encoding="utf-8", errors="replace"))
    how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    return process.returncode, f"its process ended by {how}{f': {why}' if why else ''}"


def error_line(log: str) -> str:
    """The line of a log that says why its process ended: the last that names an error, else the last; or nothing."""
    lines = [each for line in log.splitlines() if (each := line.strip())]
    return next(filter(_ERROR.match, reversed(lines)), lines[-1] if lines else "")


# --- a comparison


@dataclass(frozen=True, kw_only=True)
class Moved:
    """A figure or digest that is not the recorded one.

    Args:
        place: of the largest difference among the values, from 1; None: it is one value.
        recorded, found: there; None: there is none.
        difference: None: of a digest, of lists of other lengths, and where a value is non-finite.
    """

    figure: str
    place: int | None = None
    recorded: float | str | None
    found: float | str | None
    difference: float | None = None
    noise: float | None = None
    verdict: Verdict

    @property
    def times_noise(self) -> float:
        """The difference as a multiple of its noise; of a digest 0."""
        if self.noise is None:
            return 0.0
        return inf if self.difference is None or not self.noise else self.difference / self.noise


@dataclass(frozen=True, kw_only=True)
class Compared:
    """A recipe beside its record; seconds are those of the record, and now."""

    name: str
    verdict: Verdict
    moved: list[Moved]
    seconds: tuple[float, float]

    @property
    def worst(self) -> Moved | None:
        """The figure that moved by most of its noise."""
        return max(self.moved, key=lambda each: (each.verdict == BEYOND, each.times_noise), default=None)


def compare(name: str, recorded: Recorded, found: Outcome, *, margin: float, same_machine: bool) -> Compared:
    """Compares a recipe with its record.

    Weights follow from what the figures measure: a digest that differs counts as the figures do. Where all figures are
    equal to the bit, on the same machine, it says by itself that something else changed.
    """
    if found.error:
        failed = Moved(figure="error", recorded=None, found=found.error, verdict=BEYOND)
        return Compared(name=name, verdict=BEYOND, moved=[failed], seconds=(recorded.seconds, 0.0))
    moved = []
    for (
        figure,
        before,
    ) in recorded.figures.items():  # one that is new, such as a metric of a later version, is no change
        now = found.figures.get(figure, ())
        difference = _difference(before, now)
        if difference:
            place = _place(before, now)
            noise = recorded.noise.get(figure, 0.0)
            moved.append(Moved(
                figure=figure, place=place + 1 if max(len(before), len(now)) > 1 else None,
                recorded=_at(before, place), found=_at(now, place),
                difference=difference if isfinite(difference) else None, noise=noise,
                verdict=BEYOND if difference > margin * noise else WITHIN,
            ))  # fmt: skip
    is_exact = same_machine and not moved
    for digest, before_hex in recorded.digests.items():
        if before_hex != (now_hex := found.digests.get(digest)):
            judged: Verdict = BEYOND if is_exact or now_hex is None else WITHIN
            moved.append(Moved(figure=f"digest of {digest}", recorded=before_hex, found=now_hex, verdict=judged))
    verdicts = {each.verdict for each in moved}
    verdict: Verdict = BEYOND if BEYOND in verdicts else WITHIN if moved else EQUAL
    return Compared(name=name, verdict=verdict, moved=moved, seconds=(recorded.seconds, found.seconds))


def _difference(before: Sequence[float], now: Sequence[float]) -> float:
    """The largest difference of two lists of values; infinite if they are not as many, or one is non-finite."""
    if len(before) != len(now):
        return inf
    return max(map(_apart, before, now), default=0.0)


def _apart(before: float, now: float) -> float:
    if before == now or (isnan(before) and isnan(now)):
        return 0.0
    return abs(before - now) if isfinite(before) and isfinite(now) else inf


def _place(before: Sequence[float], now: Sequence[float]) -> int:
    shared = min(len(before), len(now))
    if len(before) != len(now):
        return shared
    return max(range(shared), key=lambda place: _apart(before[place], now[place]))


def _at(values: Sequence[float], place: int) -> float | None:
    return values[place] if place < len(values) else None


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Packages that moved, of which each alone, or all together where one alone is impossible, changes recipes.

    Args:
        reason: why they are tried together; empty: it is one.
    """

    packages: Sequence[str]
    recipes: Sequence[str]
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Isolated:
    """What was found by environments that differ in one package.

    Args:
        not_by_packages: recipes that differ with the packages of the record too.
        only_together: recipes that no tried package changes alone.
        unavailable: package -> why its recorded version could not be installed: it stays as it is in every environment.
    """

    causes: list[Cause]
    not_by_packages: list[str]
    only_together: list[str]
    unavailable: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What ``check`` found.

    Args:
        machines: of the record, and here.
        packages: those that moved: name -> recorded and present version; None: it was or is not installed.
        python, commits: recorded and present.
        not_run: recipe -> why this machine cannot run it.
        not_recorded: recipes that a record of all has, and this one lacks.
    """

    machines: tuple[Mapping[str, str], Mapping[str, str]]
    packages: Mapping[str, tuple[str | None, str | None]]
    python: tuple[str, str]
    commits: tuple[str | None, str | None]
    recipes: list[Compared]
    not_run: Mapping[str, str] = field(default_factory=dict)
    not_recorded: list[str] = field(default_factory=list)
    isolated: Isolated | None = None

    @property
    def same_machine(self) -> bool:
        """Whether results must be equal to the bit if nothing changed."""
        return self.machines[0] == self.machines[1]

    @property
    def beyond(self) -> list[str]:
        """The recipes whose results changed."""
        return [each.name for each in self.recipes if each.verdict == BEYOND]


def check(canary: Canary, only: Sequence[str], *, where: Path, isolates: bool) -> Checked:
    """Runs the recipes of a record again, and compares them with it.

    Args:
        where: the record is, for messages.
        isolates: name the packages that changed results.

    Raises:
        ConfigError: a recipe is not in the record, or cannot run here; ``isolates`` without uv.
    """
    if unknown := [name for name in only if name not in canary.names]:
        raise ConfigError(f"--only {unknown[0]}: {where} has no such recipe; it has: {', '.join(canary.names)}")
    if isolates and find_spec("uv") is None:
        raise ConfigError("--isolate: uv is not installed, which makes the environments; run: pip install uv")
    names, not_run = chosen(only or canary.names)
    here = provenance_here(time.time())
    found = Checked(
        machines=(canary.machine, machine()), packages=moved_packages(canary),
        python=(canary.python, here.python or ""), commits=(canary.commit, here.git_commit), recipes=[],
        not_run=not_run,
        not_recorded=[] if only else sorted(RECIPES.keys() - canary.recipes.keys() - canary.left_out.keys()),
    )  # fmt: skip
    outcomes = run_recipes(names)
    found = replace(found, recipes=_compared(canary, outcomes, found))
    if isolates and found.beyond:
        found = replace(found, isolated=isolate(canary, found))
    return found


def _compared(canary: Canary, outcomes: Mapping[str, Mapping[str, Outcome]], found: Checked) -> list[Compared]:
    same = found.same_machine
    return [
        compare(name, canary.recipes[name], variants[_PLAIN], margin=canary.margin, same_machine=same)
        for name, variants in outcomes.items()
    ]


def moved_packages(canary: Canary) -> dict[str, tuple[str | None, str | None]]:
    """The packages with another version than recorded."""
    now = package_versions()
    names = sorted(canary.packages.keys() | now.keys())
    versions = {name: (canary.packages.get(name), now.get(name)) for name in names}
    return {name: pair for name, pair in versions.items() if pair[0] != pair[1]}


# --- the package


def isolate(canary: Canary, found: Checked) -> Isolated:
    """Runs the changed recipes with the packages of the record, then with one package after another as it is now."""
    with tempfile.TemporaryDirectory(prefix="posttrain-canary-") as place:
        folders, unavailable = dict[str, Path](), dict[str, str]()
        for name, (version, _) in found.packages.items():
            if version is None:
                continue
            folder = Path(place, name)
            if reason := install(name, version, folder):
                unavailable[name] = reason
            else:
                folders[name] = folder

        def changed(names: Sequence[str], new: Collection[str]) -> list[str]:
            """The recipes that differ with some packages as they are now, and the others as recorded."""
            path = [str(folder) for name, folder in folders.items() if name not in new]
            label = ", ".join(f"{each} {found.packages[each][1]}" for each in new) or "no package"
            print(
                f"environment with the packages of the record, and as it is now: {label}", file=sys.stderr, flush=True
            )
            inherited = os.environ.get("PYTHONPATH")
            environment = {"PYTHONPATH": os.pathsep.join([*path, *([inherited] if inherited else [])])}
            compared = _compared(canary, run_recipes(names, environment=environment), found)
            return [each.name for each in compared if each.verdict == BEYOND]

        otherwise = changed(found.beyond, ())
        waiting = [name for name in found.beyond if name not in otherwise]
        causes, tried = list[Cause](), list[set[str]]()
        present = {name: folder for name, folder in folders.items() if found.packages[name][1]}
        for name in present if waiting else ():
            group, reason = resolvable(name, present)
            if group in tried:
                continue
            tried.append(group)
            # All of them together are the present environment, whose results are known.
            recipes = waiting if group == present.keys() else changed(waiting, sorted(group))
            if recipes:
                causes.append(Cause(packages=sorted(group), recipes=recipes, reason=reason))
    named = {recipe for cause in causes for recipe in cause.recipes}
    return Isolated(
        causes=list(_smallest(causes)), not_by_packages=otherwise,
        only_together=[name for name in waiting if name not in named], unavailable=unavailable,
    )  # fmt: skip


def _smallest(causes: Sequence[Cause]) -> Iterator[Cause]:
    """The causes without recipes that some of their packages change without the others."""
    for cause in causes:
        parts = [each for each in causes if set(each.packages) < set(cause.packages)]
        if recipes := [name for name in cause.recipes if not any(name in each.recipes for each in parts)]:
            yield replace(cause, recipes=recipes)


def install(name: str, version: str, folder: Path) -> str:
    """Installs one package without what it requires into a folder; returns why that failed, or nothing.

    pip is first where the version names a build, such as torch 2.13.0+cpu: uv would take another one.
    """
    target = ["--no-deps", "--quiet", "--target", str(folder), f"{name}=={Version(version).public}"]
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, *target]
    pip = [sys.executable, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", *target]
    reasons = []
    for command in (pip, uv) if Version(version).local else (uv, pip):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            reasons.append(f"{command[2]}: not done after {_INSTALL_SECONDS} s")
            continue
        if not done.returncode:
            installed = [each.version for each in metadata.distributions(path=[str(folder)])]
            return "" if installed == [version] else f"{' '.join(installed)} is what {command[2]} found"
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reasons.append(f"{command[2]}: {re.sub(r' [(]from versions: [^)]*[)]', '', lines[-1] if lines else 'failed')}")
    return "; ".join(reasons)


def resolvable(name: str, folders: Mapping[str, Path]) -> tuple[set[str], str]:
    """The packages that must be as they are now if one is; and the requirement that says so, for the first of them.

    Requirements among packages that moved decide: with those that did not, both versions of a package are in use.

    Args:
        folders: those of the recorded versions.
    """
    group, reason = {name}, ""
    while True:
        recorded = {each: next(iter(metadata.distributions(path=[str(folder)]))) for each, folder in folders.items()}
        installed = {each: metadata.distribution(each) if each in group else old for each, old in recorded.items()}
        missing = [
            (package, required, other)
            for package, each in installed.items() for required in requirements_here(each.requires or ())
            if (other := canonicalize_name(required.name)) in installed and (package in group) != (other in group)
            and not required.specifier.contains(installed[other].version, prereleases=True)
        ]  # fmt: skip
        if not missing:
            return group, reason
        package, required, other = missing[0]
        reason = reason or f"{package} {installed[package].version} requires {other}{required.specifier}"
        group |= {package, other}
