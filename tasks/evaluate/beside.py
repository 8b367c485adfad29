"""The process that scores checkpoints beside a training: it reads requests from its standard input, one after another.

``tasks.train.loop.evaluation.ScoringProcess`` starts it. It ends with its parent, and what becomes of it changes no
training. On a cluster ``flows.stages.launch.ScoringTask`` calls ``answer``.
"""

import json
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from lineage.artifact import Kind, Source
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.filesystem.digest import digest_file
from lineage.record.metrics_file import RECIPE_FILE
from lineage.record.verdict import interval_text
from tasks.context import Resources, TrainContext
from tasks.evaluate.benchmarks import small_without_rows
from tasks.evaluate.evaluate import Evaluate
from tasks.evaluate.row_scores import RowScores, read_failed, read_scores
from tasks.evaluate.stubs import Stubs
from tasks.gate import Gate
from tasks.gate.bootstrap import Bootstrap
from tasks.gate.rule import Evidence, Rule
from tasks.model.fetch_model import PARTS_FILE
from tasks.recipe import Input
from tasks.train.evaluation import Evaluation
from tasks.train.loop.evaluation import BASE, MODEL, Job, Request, Scores, size_and_time
from tasks.train.loop.saved_state import divided_weights, read_tensors

_EVALUATE: Callable[..., Evaluate] = Evaluate
_NICENESS, _POLL_SECONDS = 10, 1.0


def score(job: Job, request: Request) -> Scores:
    """Scores one model, and judges it by the bounds."""
    start, place = time.monotonic(), job.place / f"step-{request.step}"
    draft = place.with_name(f"{place.name}.partial")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    resources = Resources(cpus_per_worker=job.setting.cpus, gpus_per_worker=job.setting.gpus, micro_batch_size="auto")
    _require_committed(request)
    _require_loaded(job)
    context = TrainContext(output_dir=draft, work_dir=draft, resources=resources, cache_dir=job.cache)
    with _whole(request.model) as path:
        model = Input(
            name=f"step-{request.step}", kind=Kind.CHECKPOINT, fingerprint=request.digest, path=path,
            source=Source(path=str(path), kind=Kind.CHECKPOINT), digest=request.digest,
        )  # fmt: skip
        policies = {BASE: job.base, MODEL: model if request.step else job.base}
        evaluate = _EVALUATE(**job.options)
        metrics = evaluate.run({**job.rows, "reference": job.base, **policies}, context)
    (draft / RECIPE_FILE).write_text(json.dumps(evaluate.recipe()), encoding="utf-8")
    found = read_scores(draft)
    failed = {key.partition("/")[2]: why for key, why in read_failed(draft).items() if key.startswith(f"{MODEL}/")}
    rules = _judged(job.setting, found, failed, None if request.step else Stubs.read(draft))
    small = (*(name for name, each in found.items() if each.lower_is_better), *small_without_rows(draft))
    shutil.rmtree(place, ignore_errors=True)
    draft.rename(place)
    of = {
        name: {key.removeprefix(f"{name}/"): value for key, value in metrics.items() if key.startswith(f"{name}/")}
        for name in policies
    }
    return Scores(
        step=request.step, digest=request.digest, seconds=time.monotonic() - start, scores=of[MODEL], base=of[BASE],
        small_is_good=small, failed=failed, rules=rules,
    )  # fmt: skip


def _require_committed(request: Request) -> None:
    """Requires that the weights of a checkpoint are those that were committed with its step.

    Raises:
        ArtifactError: others would be scored.
    """
    parts = json.loads((request.model / PARTS_FILE).read_text()) if request.files else {}
    for name, digest in request.files.items():
        file = Path(parts["adapter"] or parts["weights"], name)
        if not file.is_file() or digest_file(file) != digest:
            raise ArtifactError(
                f"step {request.step}: {file} is not what was committed with its checkpoint, and another model is not "
                "scored in its place; restore the file"
            )


def _require_loaded(job: Job) -> None:
    """Requires that the files of the base are those that the training loaded.

    Raises:
        ArtifactError: another base, and adapters on another base, would be scored.
    """
    for file, loaded in job.base_files.items():
        if not file.is_file() or size_and_time(file) != loaded:
            raise ArtifactError(
                f"{file} has changed since the training loaded it, and no model is scored against, or on, another "
                "base; put the file back, and run again"
            )


def answer(job: Job, request: Request) -> Scores:
    """Scores one model in this process; an error here does not stop the training."""
    import torch

    torch.set_num_threads(job.setting.cpus)
    try:
        return score(job, request)
    except Exception as error:
        what = str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}"
        fatal = isinstance(error, ConfigError)
        return Scores(step=request.step, digest=request.digest, error=what, is_fatal=fatal)


@contextmanager
def _whole(model: Path) -> Iterator[Path]:
    """The directory of a model; where each of FSDP2's workers wrote a part of its weights, for a while one with all."""
    from safetensors.torch import save_file

    source = Path(json.loads((model / PARTS_FILE).read_text())["weights"])
    weights = divided_weights(source)
    if not weights:
        yield model
        return
    with TemporaryDirectory(dir=model.parent) as folder:
        read_tensors(source, weights)
        save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        weights.clear()
        for path in (each for each in model.iterdir() if each.name != PARTS_FILE):
            shutil.copyfile(path, Path(folder, path.name))
        yield Path(folder)


def _judged(
    setting: Evaluation, found: Mapping[str, RowScores], failed: Mapping[str, str], stubs: Stubs | None
) -> dict[str, str]:
    """The outcome of each bound on a checkpoint, of an unmet one with its values.

    Raises:
        ConfigError: a bound passes a known-wrong stub or refuses the right one.
    """
    asked = _rules(setting)
    reasons = {name: [why for metric, why in failed.items() if rule.is_on(metric)] for name, rule in asked.items()}
    rules = {name: f"not measured: {why[0]}" for name, why in reasons.items() if why}
    if not (measured := {name: rule for name, rule in asked.items() if name not in rules}):
        return rules
    gate = Gate(rules=measured)
    if stubs:
        gate.require_tested(stubs)
    bootstrap = Bootstrap(confidence=gate.confidence, num_resamples=gate.num_resamples, seed=gate.seed)
    evidence = Evidence(reports=[found], names={}, has_champion=False, bootstrap=bootstrap, min_rows=gate.min_rows)
    for name, rule in gate.each_rule(found).items():
        each = rule.judge(name, evidence)
        values = " against ".join(f"{value:.4g}" for value in (each.candidate, each.baseline) if value is not None)
        unmet = f"{each.outcome}: {each.demand}: {values}; {interval_text(each)}"
        rules[name] = each.outcome if each.outcome == "better" else unmet
    return rules


def _rules(setting: Evaluation) -> dict[str, Rule]:
    """The bounds on checkpoints as rules of a gate."""
    found = {}
    for name, bound in (setting.gate or {}).items():
        relative = bound.min_gain is not None or bound.max_regression is not None
        found[name] = Rule(
            metric=bound.metric, policy=MODEL, against=BASE if relative else None, at_least=bound.at_least,
            at_most=bound.at_most, min_gain=bound.min_gain, max_regression=bound.max_regression,
        )  # fmt: skip
    return found


def main() -> None:
    """Reads the job, then requests until its input ends; answers each with a line of JSON in its own pipe.

    A metric, and a program that it starts, may read stdin or keep what it inherits: both pipes are kept from them.
    """
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    os.set_inheritable(answers.fileno(), False)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.nice(_NICENESS)  # the training comes first
    with suppress(OSError):  # not Linux
        Path("/proc/self/oom_score_adj").write_text("1000")  # and is not what ends where memory runs out
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    job: Job = pickle.load(requests)  # of the parent, through a pipe
    while True:
        try:
            request: Request = pickle.load(requests)
        except EOFError:
            return
        answers.write(json.dumps(answer(job, request).__dict__) + "\n")
        answers.flush()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)


if __name__ == "__main__":
    main()
