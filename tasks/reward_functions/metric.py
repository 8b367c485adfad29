"""Metrics that an evaluation is asked for: by name, by dotted path, or a benchmark of lm-eval."""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

import yaml
from annotated_types import Ge, Gt

from lineage.artifact import Source
from lineage.errors import ConfigError
from lineage.filesystem.digest import digest_file, digest_of
from tasks.reward_functions.built_in import BUILT_IN
from tasks.reward_functions.function import RewardFunction, Rewards, code_of_rewards, identity_of
from tasks.reward_functions.scorer import INSTALL, check_rewards

LM_EVAL, PASS_AT_K, WIN_RATE = "lm_eval:", "pass_at_k", "win_rate"
REWARD_MODEL = "reward_model"
_OWN = ("name", "mode", "k", "samples", "temperature", "checker", "judge", "length_control",
        "num_fewshot", "limit", "chat_template", "batch_size")  # fmt: skip
_PASS, _WIN = ("k", "samples", "temperature", "checker"), ("judge", "length_control")
_BENCHMARK = ("num_fewshot", "limit", "chat_template", "batch_size", "allow_code")

_REWARD: Callable[..., RewardFunction] = RewardFunction


@dataclass(frozen=True, kw_only=True)
class Metric(RewardFunction):
    """One metric of every policy. An option that it does not read is refused.

    Args:
        function: a reward function, which scores each greedy answer: a built-in name,
            ``python:PACKAGE.MODULE.FUNCTION`` or ``python:FILE.py:FUNCTION``; ``pass_at_k``; ``win_rate``;
            ``lm_eval:TASK`` or ``lm_eval:FILE.yaml``.
        name: in reports; None: that of the function.
        mode: whether large or small values are better; None: as the function has it, else max.
        k, samples, temperature, checker: of ``pass_at_k``: at least one of ``k`` answers of ``samples`` passes the
            ``checker``, a reward function that gives 1 to a right answer (``code``).
        judge: of ``win_rate``: ``reward_model``, or a Python function as ``judge(prompts, completions, references,
            **columns)`` that gives 1 where the completion is better than the reference's answer, and 0 where worse.
        length_control: of ``win_rate``: the value at equal lengths of both answers.
        num_fewshot, limit: of ``lm_eval``: examples in the prompt, and rows at most; None: as the task has it, and all.
        chat_template: of ``lm_eval``: whether prompts are rendered as a conversation.
        batch_size: of ``lm_eval``: None: ``micro_batch_size``, or 8 where it is auto. It is no identity.
    """

    name: str | None = None
    mode: Literal["min", "max"] | None = None
    k: Annotated[int, Gt(0)] | None = None
    samples: Annotated[int, Gt(0)] | None = None
    temperature: Annotated[float, Gt(0)] | None = None
    checker: str | None = None
    judge: str | None = None
    length_control: bool | None = None
    num_fewshot: Annotated[int, Ge(0)] | None = None
    limit: Annotated[int, Gt(0)] | None = None
    chat_template: bool | None = None
    batch_size: Annotated[int, Gt(0)] | None = None

    def __post_init__(self) -> None:
        if self.is_benchmark:
            if self.task.endswith((".yaml", ".yml")):  # absolute, for a worker that was started elsewhere
                object.__setattr__(self, "function", LM_EVAL + str(Path(self.task).absolute()))
            return
        super().__post_init__()
        for field, value in (("checker", self.checker), ("judge", self.judge)):
            code = RewardFunction(function=value).code() if value else None
            if code:
                object.__setattr__(self, field, code.absolute())

    @property
    def is_benchmark(self) -> bool:
        return bool(self.function and self.function.startswith(LM_EVAL))

    @property
    def task(self) -> str:
        """Of lm-eval: a name, or a path of a YAML file."""
        return str(self.function).removeprefix(LM_EVAL)

    @property
    def label(self) -> str:
        """Its name in reports; of a benchmark the prefix of the names of its metrics."""
        if self.name:
            return self.name
        if self.is_benchmark:
            return f"lm_eval/{Path(self.task).stem if '/' in self.task else self.task}"
        if self.function == PASS_AT_K:
            return f"pass@{self.k or 1}"
        if self.function == WIN_RATE:
            return "length_controlled_win_rate" if self.length_control else "judged_win_rate"
        code = self.code()
        return code.name if code else str(self.function)

    @property
    def small_is_good(self) -> bool:
        known = BUILT_IN.get(str(self.function))
        return self.mode == "min" if self.mode else bool(known and known.small_is_good)

    @property
    def is_bounded(self) -> bool:
        known = BUILT_IN.get(str(self.function))
        return self.function == PASS_AT_K or bool(known and known.bounded)

    @property
    def samples_of(self) -> int:
        """Sampled answers that it reads of each prompt."""
        return (self.samples or self.k or 1) if self.function == PASS_AT_K else 0

    def reward(self) -> RewardFunction | None:
        """The reward function behind it; None: lm-eval or a reward model is."""
        function = self.checker or "code" if self.function == PASS_AT_K else self.function
        if self.function == WIN_RATE:
            function = self.judge if self.judge != REWARD_MODEL else None
        if function is None or self.is_benchmark:
            return None
        return _REWARD(function=function, allow_code=self.allow_code, **self.options())

    def identity(self) -> dict[str, object]:
        """What it is, for a fingerprint: of files their content, not their place."""
        own = {name: value for name in _OWN if (value := getattr(self, name)) is not None and name != "batch_size"}
        if self.is_benchmark:
            if not self.local_task:
                return {**own, "function": self.function}
            files = {str(index): digest_file(path) for index, path in enumerate(self.files())}
            return {**own, "function": LM_EVAL + Path(self.task).name, "files": digest_of(files)}
        reward = self.reward()
        named = identity_of({self.label: reward}).get(self.label) if reward else {}
        assert isinstance(named, dict)
        named.pop("weight", None)
        own = {name: value for name, value in own.items() if name not in ("checker", "judge")}
        if self.function in (PASS_AT_K, WIN_RATE):
            return {**named, **own, "by": named.get("function", REWARD_MODEL), "function": self.function}
        return {**named, **own}

    @property
    def local_task(self) -> Path | None:
        """The YAML file of a benchmark; None: it is one of those that come with lm-eval."""
        return Path(self.task) if self.is_benchmark and self.task.endswith((".yaml", ".yml")) else None

    def files(self) -> list[Path]:
        """The YAML file of a local benchmark, and its local files of rows.

        Raises:
            ConfigError: there is no such file, or it is no task.
        """
        found = local_task(self)
        return [Path(self.task), *(path for paths in data_files(found, Path(self.task)).values() for path in paths)]


Metrics = Sequence[Metric]


def metrics_of(configured: Sequence[str | Metric] | None) -> tuple[Metric, ...]:
    """Metrics, of which one may be written as its name alone."""
    return tuple(Metric(function=each) if isinstance(each, str) else each for each in configured or ())


def check_metrics(metrics: Metrics, taken: Sequence[str]) -> None:
    """Checks metrics without running any of them.

    Args:
        taken: names of metrics that are measured anyway.

    Raises:
        ConfigError: a metric that does not exist or is there twice, an option that it does not read, or a package that
            is not installed.
    """
    labels = [each.label for each in metrics]
    for metric in metrics:
        where = f"metrics.{metric.label}"
        if labels.count(metric.label) > 1 or metric.label in taken:
            raise ConfigError(f"{where}: two metrics have this name; set another name of this one: name=...")
        _check_options(where, metric)
        first = next((each.temperature for each in metrics if each.samples_of), None)
        if metric.temperature and metric.temperature != first:
            raise ConfigError(
                f"{where}.temperature={metric.temperature}: all metrics score the same samples; set it in the first of "
                "them"
            )
        if metric.is_benchmark:
            if not find_spec("lm_eval"):
                raise ConfigError(
                    f"{where}: the package lm-eval is not installed; install it ({INSTALL}), or remove the metric"
                )
            if metric.local_task:
                metric.files()
            continue
        reward = metric.reward()
        if reward is not None:
            check_rewards({metric.label: reward}, "metrics")


def _check_options(where: str, metric: Metric) -> None:
    if not metric.function:
        raise ConfigError(f"{where}.function: is not set; a name such as exact, pass_at_k or lm_eval:TASK is accepted")
    if metric.weight != 1.0 or metric.partial_credit is not None:
        found = "weight" if metric.weight != 1.0 else "partial_credit"
        raise ConfigError(f"{where}.{found}: it is of a reward, and no option of a metric; remove it")
    reads = {PASS_AT_K: _PASS, WIN_RATE: _WIN}.get(metric.function, _BENCHMARK if metric.is_benchmark else ())
    for name in (*_PASS, *_WIN, *_BENCHMARK[:-1]):
        if getattr(metric, name) is not None and name not in reads:
            raise ConfigError(f"{where}.{name}={getattr(metric, name)}: {metric.function} does not read it; remove it")
    if metric.is_benchmark and metric.options():
        raise ConfigError(f"{where}.{next(iter(metric.options()))}: a benchmark does not read it; remove it")
    if metric.is_benchmark and metric.mode:
        raise ConfigError(f"{where}.mode={metric.mode}: a benchmark says itself which values are good; remove it")
    if metric.function == PASS_AT_K and (metric.samples or metric.k or 1) < (metric.k or 1):
        raise ConfigError(
            f"{where}: k={metric.k} of samples={metric.samples}; at least k samples are accepted; raise samples"
        )
    if metric.function == WIN_RATE and metric.judge is None:
        raise ConfigError(f"{where}.judge: is not set; reward_model or python:FILE.py:FUNCTION is accepted; set it")
    if metric.function == WIN_RATE and metric.judge in BUILT_IN:
        raise ConfigError(f"{where}.judge={metric.judge}: it compares no two answers; name a Python function")


def rewards_of(metrics: Metrics) -> Rewards:
    """The reward functions behind metrics, by the names of the metrics."""
    return {each.label: reward for each in metrics if (reward := each.reward())}


def code_of_metrics(metrics: Metrics) -> dict[str, str]:
    """Metric -> digest of the code of its Python function."""
    return {f"metrics.{name}": digest for name, digest in code_of_rewards(rewards_of(metrics)).items()}


class _Loader(yaml.SafeLoader):
    """Reads the YAML of lm-eval's tasks without running the functions that it names."""


_Loader.add_constructor("!function", lambda loader, node: f"!function {node.value}")


def local_task(metric: Metric) -> dict[str, object]:
    """The content of a local benchmark's YAML.

    Raises:
        ConfigError: there is no such file, or it is no task; or it names functions, and ``allow_code`` is not set.
    """
    path, where = Path(metric.task), f"metrics.{metric.label}"
    try:
        text = path.read_text(encoding="utf-8")
        found = yaml.load(text, Loader=_Loader)
    except FileNotFoundError as error:
        raise ConfigError(f"{where}: {path}: there is no such file; name a YAML file of lm-eval") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {path}: is not YAML: {error}; correct it") from error
    if not isinstance(found, dict) or not isinstance(found.get("task"), str) or "include" in found:
        raise ConfigError(
            f"{where}: {path}: a task of lm-eval in one file is accepted: task, dataset_path, doc_to_text ..., without "
            "include; correct it"
        )
    if "!function" in text and not metric.allow_code:
        raise ConfigError(f"{where}: {path} would run functions of a file; set allow_code=true to let it run them")
    return found


def data_files(task: Mapping[str, object], path: Path) -> dict[str, list[Path]]:
    """Split -> local files of rows of a benchmark; paths are relative to its YAML file."""
    options = task.get("dataset_kwargs")
    files = options.get("data_files") if isinstance(options, dict) else None
    files = files if isinstance(files, dict) else {"train": files} if files else {}
    found: dict[str, list[Path]] = {}
    for split, names in files.items():
        paths = [path.parent / str(name) for name in (names if isinstance(names, list) else [names])]
        for each in paths:
            if "://" not in str(each) and not each.is_file():
                raise ConfigError(f"{path}: dataset_kwargs.data_files.{split}: there is no file {each}; correct it")
        found[str(split)] = paths
    return found


def asked_texts(metric: Metric) -> list[str]:
    """What a local benchmark asks: of each row the columns that ``doc_to_text`` names, or all its texts.

    Raises:
        DataError: a file is none that sources are read from.
    """
    task, found = local_task(metric), list[str]()
    options = task.get("dataset_kwargs")
    named = re.findall(r"{{\s*(\w+)", str(task.get("doc_to_text"))) or [str(task.get("doc_to_text"))]
    for path in (each for paths in data_files(task, Path(metric.task)).values() for each in paths):
        if "://" in str(path):
            continue
        for row in _rows(path, options.get("field") if isinstance(options, dict) else None):
            texts = [row[name] for name in named if name in row] or [*row.values()]
            found.append("\n".join(each for each in texts if isinstance(each, str)))
    return found


def _rows(path: Path, field: str | None) -> Iterator[Mapping[str, object]]:
    """The rows of a local file."""
    if path.suffix in (".json", ".jsonl"):  # its rows may be below a field
        yield from (each for each in _json_rows(path, field) if isinstance(each, dict))
        return
    from tasks.data.reading.chunk import Row
    from tasks.data.reading.read import read_chunks

    for chunk in read_chunks(Source(path=str(path))):
        yield from (each.fields for each in chunk.rows() if isinstance(each, Row))


def _json_rows(path: Path, field: str | None) -> list[object]:
    """The rows of a file of JSON, below ``field`` where they are not at its top, or of JSON Lines; else none."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        with suppress(ValueError):
            return [json.loads(line) for line in text.split("\n") if line.strip()]  # other line ends may be in a text
        return []
    found = found[field] if isinstance(found, dict) and field in found else found
    return found if isinstance(found, list) else [found]


def pass_at_k(num_right: int, samples: int, k: int) -> float:
    """The chance that one of ``k`` is right, where ``num_right`` of ``samples`` are: Chen et al. 2021, eq. 1."""
    return 1.0 - math.comb(samples - num_right, k) / math.comb(samples, k)


def at_equal_length(wins: Sequence[float], lengths: Sequence[int], others: Sequence[int]) -> list[float]:
    """Wins without the part that the difference of lengths explains, so that their mean is the win rate at equal ones.

    A linear regression on tanh of the standardized difference, the form in which Dubois et al. 2024 (arXiv:2404.04475)
    have it. A value per row may lie outside [0, 1].
    """
    apart = [float(own - other) for own, other in zip(lengths, others, strict=True)]
    spread = math.sqrt(fmean(each * each for each in apart)) if apart else 0.0
    if not spread:
        return [*wins]
    terms = [math.tanh(each / spread) for each in apart]
    mean_term, mean_win = fmean(terms), fmean(wins)
    variance = fmean((term - mean_term) ** 2 for term in terms)
    if not variance:  # the same difference in each row: nothing tells its effect
        return [*wins]
    slope = fmean((term - mean_term) * (win - mean_win) for term, win in zip(terms, wins, strict=True)) / variance
    return [win - slope * term for win, term in zip(wins, terms, strict=True)]
