"""Benchmarks of lm-eval: its tasks, with scores per row, over the workers of the stage."""

import json
import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from lineage.errors import ConfigError, DataError, PipelineError
from lineage.record.metrics_file import BENCHMARKS_FILE
from tasks.evaluate.row_scores import RowScores
from tasks.evaluate.scoring import Batches, generating
from tasks.reward_functions.metric import Metric, data_files

if TYPE_CHECKING:
    from lm_eval.api.model import LM
    from lm_eval.api.task import Task
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Part = TypeVar("Part")
SMALL = "small_is_good"
_BATCH, _SEED = 8, 1234
_ANSWER_SECONDS = 5.0
_NAMED = re.compile(
    r"^(?:task|group|tag):[ ]*[\"']?([^\s\"'#\[]+)[\"']?[ ]*(?:#.*)?$|^(?:tag|group):[ ]*\n((?:[ ]*-[^\n]*\n?)+)", re.M
)
_DATASET = re.compile(r"^dataset_path:\s*[\"']?([\w./-]+)", re.M)
_NO_ROWS = ("README.md", ".gitattributes")  # files of a data set's repository
_BOUNDED = ("acc", "exact_match")  # beginnings of names of metrics that are shares

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark with its tasks, whose rows are loaded.

    Args:
        tasks: name -> task; a group of lm-eval has several.
    """

    metric: Metric
    tasks: "Mapping[str, Task]"

    def settings(self) -> dict[str, dict[str, object]]:
        """What decides its scores, for the report."""
        from importlib.metadata import version

        return {
            _prefix(self.metric, name): {
                "version": task.VERSION, "num_fewshot": task.config.num_fewshot, "lm_eval": version("lm-eval"),
                "chat_template": bool(self.metric.chat_template), "limit": self.metric.limit,
            }
            for name, task in self.tasks.items()
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What a benchmark gives to one model.

    Args:
        scores: by metric, for the policy ``name``.
        values: metrics whose value is no mean over rows: value and standard error, where lm-eval has one.
        failed: ``policy/metric`` -> why it has no value.
        small_is_good: the metrics of ``values``, without a policy, of which small values are better.
    """

    scores: Sequence[RowScores] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    small_is_good: Sequence[str] = ()

    def named(self, name: str) -> "Measurement":
        """The same of a policy of that name; it was measured without one."""
        return Measurement(
            scores=[replace(each, scores={name: each.scores[""]}) for each in self.scores],
            values={f"{name}{key}": value for key, value in self.values.items()},
            failed={f"{name}{key}": reason for key, reason in self.failed.items()}, small_is_good=self.small_is_good,
        )  # fmt: skip

    def to_json(self) -> dict[str, object]:
        """As a value of JSON."""
        return asdict(self)

    @staticmethod
    def from_json(value: object) -> "Measurement":
        """Of ``to_json``."""
        assert isinstance(value, dict)
        scores = [RowScores(**each) for each in value["scores"]]
        return Measurement(**{**value, "scores": scores})


def joined(found: Sequence[Measurement]) -> Measurement:
    """The measurements of several policies as one."""
    scores: dict[str, RowScores] = {}
    for each in (one for measurement in found for one in measurement.scores):
        known = scores.get(each.metric)
        scores[each.metric] = replace(each, scores={**known.scores, **each.scores}) if known else each
    values = {name: value for each in found for name, value in each.values.items()}
    failed = {name: reason for each in found for name, reason in each.failed.items()}
    small = dict.fromkeys(name for each in found for name in each.small_is_good)
    return Measurement(scores=[*scores.values()], values=values, failed=failed, small_is_good=[*small])


def require_reached(metrics: Sequence[Metric]) -> None:
    """Checks that the bundled tasks exist, and that this machine has their rows or reaches the Hub.

    Raises:
        ConfigError: there is no such task, or its rows are not reached.
    """
    asked = [each for each in metrics if each.is_benchmark and not each.local_task]
    if not asked:
        return
    from huggingface_hub import constants

    found = _bundled({each.task for each in asked})
    for metric in asked:
        where, path = f"metrics.{metric.label}", found[metric.task]
        if path is None:
            raise ConfigError(
                f"{where}: lm-eval has no task {metric.task}; a name of `lm-eval ls tasks` or lm_eval:FILE.yaml is "
                "accepted; correct it"
            )
        missing = [each for each in sorted(_data_of(path)) if not _is_kept(each)]
        if not missing:
            continue
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _why_unreached(constants.ENDPOINT)
        if reason:
            raise ConfigError(
                f"{where}: its rows are {missing[0]} of the Hub, which is not reached ({reason}), and no cache here "
                f"has them; run `hf download --repo-type dataset {missing[0]}` where the Hub is reached and set "
                "HF_HOME to that cache, or use lm_eval:FILE.yaml with local files of rows"
            )


def _bundled(names: Collection[str]) -> dict[str, Path | None]:
    """Name -> the YAML file of a task, group or tag that comes with lm-eval; None: there is none.

    Most names are found in the text of the files; lm-eval's own index takes half a minute.
    """
    spec, found = find_spec("lm_eval"), dict[str, Path | None]()
    assert spec and spec.origin  # else the metric was refused
    for path in (Path(spec.origin).parent / "tasks").rglob("*.yaml"):
        for one, many in _NAMED.findall(path.read_text(encoding="utf-8")):
            for name in [one] if one else [each.strip(" -\"'") for each in many.splitlines()]:
                found.setdefault(name, path)
    if not found.keys() >= {*names}:
        from lm_eval.tasks import TaskManager

        found |= {name: each.yaml_path for name, each in TaskManager().task_index.items()}
    return {name: found.get(name) for name in names}


def _data_of(path: Path) -> set[str]:
    """The data sets of the Hub that a bundled task names; of a group all in its folder."""
    text = path.read_text(encoding="utf-8")
    included = [path.parent / name for name in re.findall(r"^include:\s*([\w./-]+)", text, re.M)]
    found = {*_DATASET.findall(text)}.union(*(_data_of(each) for each in included if each.is_file()))
    others = [] if found else [each.read_text(encoding="utf-8") for each in path.parent.rglob("*.yaml")]
    return found.union(*(_DATASET.findall(each) for each in others))


def _is_kept(dataset: str) -> bool:
    """Whether a cache of the Hub or of ``datasets`` has rows of a data set, and not what a cut download left."""
    from huggingface_hub import constants

    made = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
    name = dataset.replace("/", "").replace("_", "").lower()
    built = [each for each in made.glob("*") if each.name.replace("_", "").lower() == name]
    if any(not file.parent.name.endswith(".incomplete") for each in built for file in each.rglob("*.arrow")):
        return True
    hub = Path(constants.HF_HUB_CACHE, f"datasets--{dataset.replace('/', '--')}")
    for each in hub.glob("blobs/*.incomplete"):
        if not each.with_name(each.name.partition(".")[0]).exists():
            return False
    main = hub / "refs/main"
    files = hub.glob(f"snapshots/{main.read_text().strip() if main.is_file() else '*'}/**/*")
    return any(each.is_file() and each.name not in _NO_ROWS for each in files)


def _why_unreached(address: str) -> str:
    """Empty: it answers."""
    try:
        urlopen(Request(address, method="HEAD"), timeout=_ANSWER_SECONDS).close()
    except HTTPError:  # an answer
        return ""
    except OSError as error:
        return str(getattr(error, "reason", error))
    return ""


def load_benchmarks(metrics: Sequence[Metric]) -> list[Benchmark]:
    """Loads the rows of the benchmarks among metrics, before any model.

    Raises:
        DataError: there is no such task, or its rows cannot be reached.
    """
    asked = [each for each in metrics if each.is_benchmark]
    if not asked:
        return []
    from lm_eval.tasks import TaskManager

    bundled = TaskManager() if any(each.local_task is None for each in asked) else None
    found = []
    for metric in asked:
        where = f"metrics.{metric.label}"
        try:
            if metric.local_task:
                task = _local(metric)
                tasks = {task.config.task: task}
            else:
                assert bundled
                tasks = dict(bundled.load([metric.task])["tasks"])
        except Exception as error:  # datasets, the Hub and lm-eval raise anything
            raise DataError(
                f"{where}: lm-eval could not load the task {metric.task}: {type(error).__name__}: {error}; a task of "
                "`lm-eval ls tasks` whose rows this machine can reach, or lm_eval:FILE.yaml with local files of rows, "
                "is accepted; correct the name, or run the stage where the Hub is reached"
            ) from error
        found.append(Benchmark(metric=metric, tasks=tasks))
    return found


def _local(metric: Metric) -> "Task":
    """A task of a YAML file; its files of rows are relative to it."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    path = metric.local_task
    assert path
    config = load_yaml(path, resolve_func=metric.allow_code)
    files = {split: [str(each) for each in paths] for split, paths in data_files(config, path).items()}
    if files:
        config["dataset_kwargs"] = {**config["dataset_kwargs"], "data_files": files}
    return ConfigurableTask(config=config)


def measure(
    benchmark: Benchmark, name: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", batches: Batches
) -> Measurement:
    """Measures a model, which may be a base with an adapter.

    Every worker takes a part of the rows, and the first has the result.

    Args:
        name: of the policy.
    """
    from lm_eval.models.huggingface import HFLM

    class Shared(HFLM):
        """lm-eval's model, divided over the workers of the stage."""

        @property
        def rank(self) -> int:
            return batches.rank

        @property
        def world_size(self) -> int:
            return batches.world_size

        def all_gather(self, tensor: "Tensor") -> "Tensor":
            import torch

            return torch.stack(self.gather_object(tensor.cpu()))

        def gather_object(self, obj: Part, dst: int = 0) -> list[Part]:
            import torch

            parts = [obj] * batches.world_size
            torch.distributed.all_gather_object(parts, obj)
            return parts

        def barrier(self) -> None:
            self.gather_object(None)

    size = _rows_at_once(benchmark, batches)
    with generating(model), _quiet():
        wrapped = Shared(pretrained=model, tokenizer=tokenizer, batch_size=size)
        return _measured(benchmark, name, wrapped)


def _rows_at_once(benchmark: Benchmark, batches: Batches) -> int:
    return benchmark.metric.batch_size or batches.rows or _BATCH


def stub_scores(benchmark: Benchmark) -> list[RowScores]:
    """The scores of stubs that answer right, that answer what is right of another row or choice, and not at all."""
    from lm_eval.api.model import LM

    tasks = benchmark.tasks

    class Stub(LM):
        """Answers from the rows."""

        def __init__(self, stub: str) -> None:
            super().__init__()
            self.stub = stub

        def loglikelihood(self, requests: Sequence[object]) -> list[tuple[float, bool]]:
            return [_likely(tasks[each.task_name], each, self.stub) for each in requests]  # type: ignore[attr-defined]

        def loglikelihood_rolling(self, requests: Sequence[object]) -> list[float]:
            return [0.0 if self.stub == "right" else -1e2 for _ in requests]

        def generate_until(self, requests: Sequence[object]) -> list[str]:
            return [_text(tasks[each.task_name], each, self.stub) for each in requests]  # type: ignore[attr-defined]

        def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], **kwargs: object) -> str:
            return "\n".join(turn["content"] for turn in chat_history)

        @property
        def tokenizer_name(self) -> str:
            return "stub"

        def chat_template(self, chat_template: object = False) -> str:
            return ""

    with _quiet():
        found = [_measured(benchmark, stub, Stub(stub)).scores for stub in ("right", "wrong")]
    return [replace(one, scores={**one.scores, **other.scores}) for one, other in zip(*found, strict=True)]


def _likely(task: "Task", request: "object", stub: str) -> tuple[float, bool]:
    """The log-likelihood of a text, and whether it is the likeliest; of choices 0 for the one that a stub takes."""
    doc, index = request.doc, request.idx  # type: ignore[attr-defined]
    if task.OUTPUT_TYPE != "multiple_choice":
        return (0.0, True) if stub == "right" else (-1e3, False)
    choices = task.doc_to_choice(doc)
    if index >= len(choices):  # the choice alone, for `acc_mutual_info`
        return -1.0, False
    gold = task.doc_to_text(doc) if task.multiple_input else task.doc_to_target(doc)
    golds = [choices.index(each) if isinstance(each, str) else each for each in _listed(gold)]
    # The last of the others: an own `process_results`, as of TruthfulQA, may take further ones for right.
    wrong = next((each for each in reversed(range(len(choices))) if each not in golds), None)
    taken = golds[0] if stub == "right" else wrong
    return (0.0, True) if index == taken else (-1e3, False)


def _text(task: "Task", request: "object", stub: str) -> str:
    gold = _listed(task.doc_to_target(request.doc))[0]  # type: ignore[attr-defined]
    if task.config.doc_to_choice is not None and isinstance(gold, int):
        gold = task.doc_to_choice(request.doc)[gold]  # type: ignore[attr-defined]
    return str(gold) if stub == "right" else ""


def _listed(gold: object) -> list[object]:
    return gold if isinstance(gold, list) else [gold]


def _measured(benchmark: Benchmark, name: str, model: "LM") -> Measurement:
    """Runs lm-eval, and reads its scores per row (PipelineError: lm-eval fails)."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    metric = benchmark.metric
    try:
        found = simple_evaluate(
            model=model, tasks=[*benchmark.tasks.values()], num_fewshot=metric.num_fewshot, limit=metric.limit,
            log_samples=True, apply_chat_template=bool(metric.chat_template), bootstrap_iters=1000,
            task_manager=TaskManager(include_defaults=False), random_seed=_SEED, numpy_random_seed=_SEED,
            torch_random_seed=_SEED, fewshot_random_seed=_SEED, confirm_run_unsafe_code=metric.allow_code,
        )  # fmt: skip
    except Exception as error:  # metrics and filters of tasks are any code
        raise PipelineError(
            f"metrics.{metric.label}: lm-eval failed for {name}: {type(error).__name__}: {error}; correct the task or "
            "its options"
        ) from error
    if found is None:  # another worker has the result
        return Measurement()
    scores, values, failed, small = list[RowScores](), dict[str, float](), dict[str, str](), list[str]()
    for task, results in found["results"].items():
        for key, value in results.items():
            which, comma, variant = key.partition(",")
            if not comma or which.endswith("_stderr") or not isinstance(value, int | float):
                continue
            label = "/".join([_prefix(metric, task), which, *([variant] if variant != "none" else [])])
            if not math.isfinite(value):
                failed[f"{name}/{label}"] = f"metrics.{metric.label}: lm-eval gives {value} for {label}; correct it"
                continue
            rows = _per_row(label, name, found["samples"].get(task, []), which, variant, float(value))
            higher = found["higher_is_better"].get(task, {}).get(which)
            if rows is None:
                values[f"{name}/{label}"] = float(value)
                error_of = results.get(f"{which}_stderr,{variant}")
                if isinstance(error_of, int | float) and math.isfinite(error_of):
                    values[f"{name}/{label}/stderr"] = float(error_of)
                small += [label] if higher is False else []
                continue
            scores.append(replace(rows, small_is_good=higher is False, bounded=which.startswith(_BOUNDED)))
    return Measurement(scores=scores, values=values, failed=failed, small_is_good=small)


def _prefix(metric: Metric, task: str) -> str:
    return metric.label if metric.local_task or metric.name or task == metric.task else f"{metric.label}/{task}"


def _per_row(
    label: str, name: str, samples: Sequence[Mapping[str, object]], which: str, variant: str, value: float
) -> RowScores | None:
    """Scores whose mean is the value, or whose perplexity it is; None: it is another function of the rows."""
    rows = [each for each in samples if each["filter"] == variant and which in each]
    rows = sorted(rows, key=lambda each: int(str(each["doc_id"])))
    ids = [f"{label.rpartition('/')[0]}/{each['doc_id']}" for each in rows]
    found = [each[which] for each in rows]
    if not found:
        return None
    if all(isinstance(each, int | float) for each in found):
        scores = [float(each) for each in found if isinstance(each, int | float)]
        if not math.isclose(fmean(scores), value, rel_tol=1e-6, abs_tol=1e-9):
            return None
        return RowScores(metric=label, row_ids=ids, groups=ids, weights=[1] * len(ids), scores={name: scores})
    if which.endswith("perplexity") and all(isinstance(each, list | tuple) and len(each) == 2 for each in found):
        sums, weights = zip(*[(float(each[0]), float(each[1])) for each in found], strict=True)  # type: ignore[index]
        return RowScores(metric=label, row_ids=ids, groups=ids, weights=weights, scores={name: sums})
    return None


def write_settings(
    directory: Path, benchmarks: Sequence[Benchmark], batches: Batches, dtype: str, small: Sequence[str] = ()
) -> None:
    """Writes ``benchmarks.json``: few-shot examples, chat template, limit and versions of each task, and how it ran.

    Args:
        small: as in ``Measurement``.
    """
    settings = {
        name: {**of, "batch_size": _rows_at_once(each, batches), "dtype": dtype, "workers": batches.world_size}
        | ({SMALL: own} if (own := [one for one in small if one.startswith(f"{name}/")]) else {})
        for each in benchmarks for name, of in each.settings().items()
    }  # fmt: skip
    for name, of in settings.items():
        logger.info("benchmark=%s %s", name, json.dumps(of))
    (directory / BENCHMARKS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def small_without_rows(directory: Path) -> list[str]:
    """The metrics of benchmarks without scores per row of which small values are better, of an evaluation's output."""
    path = directory / BENCHMARKS_FILE
    settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return [name for of in settings.values() for name in of.get(SMALL, ())]


@contextmanager
def _quiet() -> "Iterator[None]":
    """Without the information of lm-eval, which logs a line per request, and asks pip and git for seconds."""
    from lm_eval import evaluator

    found = logging.getLogger("lm_eval")
    before, asked = found.level, (evaluator.add_env_info, evaluator.get_git_commit_hash)
    found.setLevel(logging.ERROR)
    evaluator.add_env_info = evaluator.get_git_commit_hash = lambda *_results: None
    try:
        yield
    finally:
        found.setLevel(before)
        evaluator.add_env_info, evaluator.get_git_commit_hash = asked
