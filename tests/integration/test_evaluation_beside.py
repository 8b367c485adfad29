"""Checkpoints that are scored beside a training: what is recorded, what is picked, and what changes nothing."""

import json
import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import ray
import torch
import yaml
from ray.exceptions import GetTimeoutError, RayActorError
from transformers import TrainerState

from flows.stages.launch import ScoringTask
from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError, PipelineError, StoppedError
from tasks.context import TrainContext
from tasks.evaluate import beside, evaluate
from tasks.evaluate.row_scores import RowScores
from tasks.gate import Gate
from tasks.method import Adapter
from tasks.model.fetch_model import PARTS_FILE
from tasks.recipe import Input
from tasks.reward_functions.metric import Metric
from tasks.train.best import Best, Validation
from tasks.train.evaluation import Bound, Evaluation, failed_scores
from tasks.train.loop import evaluation
from tasks.train.loop.evaluation import Job, Request, Scores, Scoring, ScoringProcess
from tasks.train.models import load
from tests import training
from tests.command import Command
from tests.miniature import MODEL, STEPS, write_own_rows
from tests.stage_folder import StageFolder
from tests.training import same, weights

STEADY = {"num_steps": 5, "lr_schedule": "constant", "warmup_ratio": 0.0}
EVERY = Evaluation(every_steps=2, rows=4, max_new_tokens=4)


@pytest.fixture(autouse=True)
def _in_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores in a thread: a process takes seconds to import its libraries."""
    if "slow" in request.keywords:
        return

    def scored(self: Scoring, step: int) -> Scores:
        request = self.request(step)
        try:
            with torch.random.fork_rng():
                return beside.score(self.job(), request)
        except ConfigError as error:
            return Scores(step=step, digest=request.digest, error=str(error), is_fatal=True)

    def wait(self: Scoring, args: object, state: TrainerState, *others: object, **kwargs: object) -> None:
        """Two threads would change each other's models and products: the training goes on when all is scored."""
        step, end = state.global_step, time.monotonic() + 60
        due = {0, step} if step and self._is_due(step) else {0}
        while self._thread and time.monotonic() < end and (self._waiting or not due <= self.known.keys()):
            time.sleep(0.005)

    monkeypatch.setattr(Scoring, "on_step_begin", wait)
    monkeypatch.setattr(Scoring, "_scored", scored)


def own(path: Path, body: str) -> Metric:
    path.write_text(f"import os\ndef score(completions): {body}\n")
    return Metric(function=f"python:{path}:score", allow_code=True)


def job_of(setting: Evaluation) -> Job:
    base = Input(name="base", kind=Kind.CHECKPOINT, fingerprint="", path=Path("base"))
    return Job(setting=setting, options={}, base=base, base_files={}, rows={}, place=Path("scores"), cache=None)


def test_a_task_that_scores_on_a_cluster_is_replaced_when_it_dies_and_waited_for_with_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = list[dict[str, int]]()
    answers = iter([None, RayActorError(), None, "scores", GetTimeoutError()])

    def get(ref: object, timeout: float = 0.0) -> object:
        if isinstance(found := next(answers), Exception):
            raise found
        return found

    def options(**asked: int) -> SimpleNamespace:
        started.append(asked)
        return SimpleNamespace(remote=lambda: SimpleNamespace(__ray_ready__=MagicMock(), answer=MagicMock()))

    monkeypatch.setattr(ray, "remote", lambda cls: SimpleNamespace(options=options))
    monkeypatch.setattr(ray, "get", get)
    task = ScoringTask(0.0, job_of(Evaluation(every_steps=1, cpus=3, gpus=1)))
    request = Request(step=4, model=Path("step-4"), digest="d")
    assert task.score(request).error.startswith("its process ended: ")
    assert task.score(request) == "scores"  # type: ignore[comparison-overlap]
    assert started == [{"num_cpus": 3, "num_gpus": 1}] * 2
    assert task.score(request).error.startswith("the cluster had no 3 CPUs and 1 GPU for it within 0 minutes")


@pytest.mark.parametrize(("gpus", "seen", "expected"), [(1, ["5"], "5"), (1, None, "3,5"), (0, None, ""), (0, [], "")])
def test_the_process_that_scores_has_threads_and_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, gpus: int, seen: list[str] | None, expected: str
) -> None:
    for name, value in {"CUDA_VISIBLE_DEVICES": "3,5", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    found = ScoringProcess(job_of(replace(EVERY, cpus=3, gpus=gpus)), seen).environment()
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == (expected, "3")
    assert not {"RANK", "WORLD_SIZE"} & found.keys()


def recorded(ran: StageFolder) -> dict[int, dict[str, object]]:
    lines = (ran.store.directory.parent / "evaluation.jsonl").read_text().splitlines()
    return {each["step"]: each for each in map(json.loads, lines)}


@pytest.mark.parametrize("how", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_checkpoints_and_the_start_are_scored_and_the_training_is_as_without(
    how: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('[a library that prints as it is imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    stage = training.method("sft", **STEADY)
    plain, ran = StageFolder(tmp_path / "plain", root), StageFolder(tmp_path / "ran", root)
    plain(stage)
    alone = own(
        tmp_path / "alone.py",
        "import torch; own = (torch.get_num_threads(), os.environ['CUDA_VISIBLE_DEVICES'], os.environ.get('RANK')); "
        "own += (os.read(0, 1), open('/proc/self/oom_score_adj').read().strip()); "
        "return [float(own == (2, '', None, b'', '1000'))] * len(completions)",
    )
    scored = ("f1", alone) if how == "process" else ("f1",)
    metrics = ran(replace(stage, evaluation=replace(EVERY, metrics=scored, cpus=2)))
    found = recorded(ran)
    assert list(found) == [0, 2, 4, 5] and not any(each["error"] for each in found.values())
    assert how == "thread" or metrics["evaluation/score"] == 1.0
    digests = [str(each["digest"]) for each in found.values()]
    assert len(set(digests)) == 4 and all(len(each) == 64 for each in digests)
    perplexities = [each["scores"]["answer_perplexity"] for each in found.values()]  # type: ignore[index]
    assert perplexities == sorted(perplexities, reverse=True) and len(set(perplexities)) == 4
    bases = [each["base"] for each in found.values()]
    assert all(each == bases[0] for each in bases) and found[0]["scores"] == bases[0]
    assert metrics["evaluation/answer_perplexity"] == perplexities[-1] and [
        each["step"] for each in found.values()
    ] == [*found]
    assert metrics["evaluation/base/answer_perplexity"] == perplexities[0]
    assert {"evaluation/f1", "evaluation/exact_match"} <= metrics.keys() and "best_step" not in metrics
    folder = ran.store.directory.parent / "evaluation" / "step-4"
    rows = (folder / "scores.jsonl").read_text()
    assert json.loads((folder / "recipe.json").read_text())["max_new_tokens"] == EVERY.max_new_tokens
    assert '"metric": "f1"' in rows
    assert same(weights(ran.output), weights(plain.output))


def test_another_model_than_that_of_the_checkpoint_is_not_scored(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the checkpoint of another step, nor other weights in its place."""
    plain = Scoring.request

    def planted(self: Scoring, step: int) -> Request:
        found = plain(self, step)
        if step == 2:
            parts = {"weights": str(self.inputs["policy"].path), "adapter": None}
            (found.model / PARTS_FILE).write_text(json.dumps(parts))
        if step == 4:
            shutil.copy(self.store.path(2) / "model.safetensors", self.store.path(4))
        return found

    monkeypatch.setattr(Scoring, "request", planted)
    ran = StageFolder(tmp_path / "ran", root)
    ran(training.method("sft", **STEADY, evaluation=EVERY))
    found = recorded(ran)
    for step in (2, 4):
        assert (
            "is not what was committed with its checkpoint" in str(found[step]["error"]) and not found[step]["scores"]
        )
    assert not found[0]["error"] and not found[5]["error"]


def test_no_score_is_of_another_base_than_the_training_loaded(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(root, tmp_path / "root")
    base = tmp_path / "root" / "policy" / "model.safetensors"
    plain = Scoring.request

    def planted(self: Scoring, step: int) -> Request:
        if step == 4:
            shutil.copy(root / "policy" / "model.safetensors", base)  # equal bytes in a new file
        return plain(self, step)

    monkeypatch.setattr(Scoring, "request", planted)
    ran = StageFolder(tmp_path / "ran", tmp_path / "root")
    ran(training.method("sft", **STEADY, evaluation=EVERY, adapter=Adapter(rank=2, alpha=4)))
    found = recorded(ran)
    assert not found[0]["error"] and not found[2]["error"]
    assert all(f"{base} has changed since" in str(found[step]["error"]) for step in (4, 5))


@pytest.mark.parametrize(
    "name", ["cpt", pytest.param("dpo", marks=pytest.mark.slow), pytest.param("grpo", marks=pytest.mark.slow)]
)
def test_an_adapter_is_scored_on_its_base(root: Path, tmp_path: Path, name: str) -> None:
    stage = training.method(name, **STEADY, adapter=Adapter(rank=2, alpha=4))
    ran = StageFolder(tmp_path / "ran", root)
    metrics = ran(replace(stage, evaluation=EVERY))
    found = recorded(ran)
    assert not any(each["error"] for each in found.values()) and list(found) == [0, 2, 4, 5]
    if name == "cpt":
        assert metrics["evaluation/text_perplexity"] < metrics["evaluation/base/text_perplexity"]


def test_the_best_or_the_one_that_the_gate_picks_is_the_output(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "Gate", partial(Gate, min_rows=2))
    stage = training.method("sft", **STEADY)
    two = StageFolder(tmp_path / "two", root)
    two(replace(stage, num_steps=2))
    equal = own(tmp_path / "equal.py", "return [1.0] * len(completions)")
    best = StageFolder(tmp_path / "best", root)
    metrics = best(replace(stage, evaluation=replace(EVERY, metrics=(equal,), pick="best")))
    assert metrics["best_step"] == 2 and metrics["steps"] == 5  # of equal ones the earliest
    assert same(weights(best.output), weights(two.output))
    gated = StageFolder(tmp_path / "gated", root)
    bound = Bound(metric="answer_perplexity", max_regression=0.5)
    wide = replace(EVERY, rows=40, pick="gate", metric="answer_perplexity", gate={"keeps": bound})
    assert gated(replace(stage, evaluation=wide))["best_step"] == 5
    assert all(each["rules"] == {"keeps": "better"} for each in recorded(gated).values())
    none = replace(wide, gate={"gains": Bound(metric="answer_perplexity", min_gain=0.99)})
    unmet = (
        r"none of 3 checkpoints passes the gate \(the best is step 5: gains is worse: model's answer_perplexity gains"
    )
    with pytest.raises(
        PipelineError, match=unmet + r" more than 99 % over base: \d.* against \d.*; [+-]\d.*\); the ch"
    ):
        StageFolder(tmp_path / "none", root)(replace(stage, evaluation=none))


def test_a_bound_on_what_failed_is_not_met_and_one_on_several_metrics_is_of_each() -> None:
    rows = [str(index) for index in range(40)]
    scores = {"base": [0.0] * 40, "model": [float(index % 2) for index in range(40)]}
    found = {
        name: RowScores(metric=name, row_ids=rows, groups=rows, weights=[1.0] * 40, scores=scores)
        for name in ("lm_eval/a/acc", "lm_eval/b/acc")
    }
    gate = {"own": Bound(metric="score", at_least=1), "all": Bound(metric="lm_eval/*", at_least=0.9)}
    judged = beside._judged(replace(EVERY, pick="gate", gate=gate), found, {"score": "row 3: nan"}, None)
    assert judged["own"] == "not measured: row 3: nan" and len(judged) == 3
    assert judged["all/lm_eval/b/acc"].startswith(
        "worse: model's lm_eval/b/acc at least 0.9: 0.5; 0.5 [0.35, 0.65], n="
    )


@pytest.mark.slow
def test_an_evaluation_that_dies_leaves_the_training_untouched(root: Path, tmp_path: Path) -> None:
    stage = training.method("sft", **STEADY)
    plain, ran = StageFolder(tmp_path / "plain", root), StageFolder(tmp_path / "ran", root)
    plain(stage)
    dies = own(
        tmp_path / "dies.py", "os.fork() or __import__('time').sleep(60); os.kill(os.getpid(), 9)"
    )  # leaves a fork behind
    metrics = ran(replace(stage, evaluation=replace(EVERY, metrics=(dies,))))
    assert {each["error"] for each in recorded(ran).values()} == {"its process ended by SIGKILL"}
    assert same(weights(ran.output), weights(plain.output)) and not any("evaluation/" in name for name in metrics)
    bad = own(tmp_path / "bad.py", "return [float('nan')] * len(completions)")
    again = StageFolder(tmp_path / "again", root)
    again(replace(stage, evaluation=replace(EVERY, metrics=(bad,))))
    assert all("returned nan for row 0" in each["failed"]["score"] for each in recorded(again).values())  # type: ignore[index]
    with pytest.raises(PipelineError, match=r"no checkpoint has a score .*by SIGKILL"):
        StageFolder(tmp_path / "none", root)(replace(stage, evaluation=replace(EVERY, metrics=(dies,), pick="best")))


def test_a_score_that_fails_is_tried_again_and_one_that_fails_twice_takes_no_other_with_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored, failures = Scoring._scored, {0: 1, 5: 2}

    def killed(self: Scoring, step: int) -> Scores:
        failures[step] = failures.get(step, 0) - 1
        if failures[step] >= 0:
            return Scores(step=step, digest="", error="its process ended by SIGKILL")
        return scored(self, step)

    monkeypatch.setattr(Scoring, "_scored", killed)
    ran = StageFolder(tmp_path / "ran", root)
    metrics = ran(training.method("sft", **STEADY, evaluation=EVERY))
    assert failed_scores(tmp_path / "ran") == {"step 5": "its process ended by SIGKILL"}
    base = recorded(ran)[0]["scores"]
    assert {f"evaluation/base/{name}": value for name, value in base.items()} == {  # type: ignore[attr-defined]
        name: value for name, value in metrics.items() if name.startswith("evaluation/")
    }


def test_patience_ends_a_training_at_a_score_whatever_was_trained_until_it_was_known(
    root: Path, tmp_path: Path
) -> None:
    equal = own(tmp_path / "equal.py", "return [1.0] * len(completions)")
    stage = training.method("sft", **{**STEADY, "num_steps": 9})
    scored = replace(stage, evaluation=replace(EVERY, metrics=(equal,), patience=1))
    four, late = StageFolder(tmp_path / "four", root), StageFolder(tmp_path / "late", root)
    plain = four(replace(stage, num_steps=4))
    broken = StageFolder(tmp_path / "broken", root)
    with pytest.raises(StoppedError):
        broken(scored, should_stop=lambda: len(broken.reports) == 2)
    ended = {"broken": broken(scored, resume=3), "late": late(replace(scored, num_steps=5))}
    assert set(recorded(broken)) == {0, 2, 4}  # nothing is scored that can change nothing
    assert [step for step, _ in broken.reports] == [1, 2, 3, 4, 5]  # the score of step 4 is known in step 5
    for folder, metrics in ((broken, ended["broken"]), (late, ended["late"])):
        assert metrics["ended_early_at_step"] == metrics["steps"] == 4.0 and "best_step" not in metrics
        assert all(metrics[name] == plain[name] for name in ("loss", "num_tokens", "epochs"))
        assert metrics["evaluation/score"] == 1.0 and same(weights(folder.output), weights(four.output))


def test_the_last_model_is_scored_where_the_held_out_loss_ends_the_training(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "held_out_loss", lambda trainer, *given: trainer.state.global_step)
    validation = Validation(every_steps=1, patience=2)
    ran = StageFolder(tmp_path / "ran", root)
    metrics = ran(training.method("sft", **STEADY, validation=validation, evaluation=EVERY))
    assert metrics["ended_early_at_step"] == 3.0 and set(recorded(ran)) == {0, 2, 3}
    assert metrics["evaluation/answer_perplexity"] == recorded(ran)[3]["scores"]["answer_perplexity"]  # type: ignore[index]


def test_nothing_is_scored_twice_by_trainings_of_one_start(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = list[str]()
    inner = load.load_on_device
    monkeypatch.setattr(load, "load_on_device", lambda model, ctx: (loaded.append(model.name), inner(model, ctx))[1])
    monkeypatch.setattr(beside, "Gate", partial(Gate, min_rows=2))
    every = replace(EVERY, rows=40)
    stage = training.method("sft", **STEADY, evaluation=every)
    bound = {"keeps": Bound(metric="answer_perplexity", max_regression=0.5)}
    gated = replace(every, pick="gate", gate=bound, metric="answer_perplexity")
    of_trainings = []
    for name, method in {
        "one": stage,
        "seed": replace(stage, seed=1),
        "gate": replace(stage, evaluation=gated),
    }.items():
        StageFolder(tmp_path / name, root, cache=tmp_path / "cache")(method)
        of_trainings.append([*loaded])
        loaded.clear()
    checkpoints = ["step-2", "step-4", "step-5"]
    assert of_trainings == [["policy", *checkpoints], checkpoints, []]


@pytest.mark.parametrize("adapter", [None, Adapter(rank=2, alpha=4)], ids=["full", "lora"])
def test_an_evaluation_of_the_output_measures_nothing_that_was_measured_beside_the_training(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: Adapter | None
) -> None:
    measured = list[str]()
    for name in ("logps", "greedy_answers"):
        inner = getattr(evaluate, name)
        counted = lambda *given, name=name, inner=inner, **more: (measured.append(name), inner(*given, **more))[1]  # noqa: E731
        monkeypatch.setattr(evaluate, name, counted)
    stage = training.method("sft", **STEADY, adapter=adapter)
    ran = StageFolder(tmp_path / "ran", root, cache=tmp_path / "cache")
    beside_it = ran(replace(stage, evaluation=replace(EVERY, metrics=("f1",), pick="best")))
    assert measured
    measured.clear()
    given = training.inputs(root, stage)
    output = replace(given["policy"], name="sft", fingerprint="e" * 64, path=ran.output)
    resources = replace(ran.resources, micro_batch_size="auto")
    context = TrainContext(
        output_dir=tmp_path / "report", work_dir=tmp_path, resources=resources, cache_dir=ran.cache
    )  # fmt: skip
    context.output_dir.mkdir()
    found = evaluate.Evaluate(
        num_rows=4, num_prompts=4, max_new_tokens=4, max_length=stage.max_length, metrics=("f1",)
    ).run({"conversations": given["rows"], "reference": given["policy"], "sft": output}, context)  # fmt: skip
    assert not measured
    for metric in ("answer_perplexity", "exact_match", "f1"):
        assert found[f"sft/{metric}"] == beside_it[f"evaluation/{metric}"]


@pytest.mark.slow
def test_a_sweep_ranks_and_prunes_trials_by_a_metric_of_ones_own_which_is_called_once(
    tmp_path: Path, prefect_url: str
) -> None:
    calls, environment = tmp_path / "calls.jsonl", {"PREFECT_API_URL": prefect_url}
    (tmp_path / "own.py").write_text(
        "import json\n"
        "def tone(completions):\n"
        f"    open({str(calls)!r}, 'a').write(json.dumps(completions) + '\\n')\n"
        "    return [float(len(each)) for each in completions]\n"
    )
    command = Command(tmp_path, *MODEL, *STEPS, *write_own_rows(tmp_path), environment=environment)
    metric = "metrics: [{function: 'python:own.py:tone', allow_code: true}], rows: 4, max_new_tokens: 4"
    trials = (
        "sweep=optuna", "sweep.sampler._target_=optuna.samplers.BruteForceSampler", "sweep.until=sft",
        "stages.sft.method.learning_rate=1e-9,0.1",
        "sweep.objectives.best.metric=sft/evaluation/tone",
    )  # fmt: skip

    def trials_of(*overrides: str) -> list[dict[str, object]]:
        result = command("run", "--multirun", "--json", *trials, *overrides)
        assert result.returncode == 0, result.stderr
        found: list[dict[str, object]] = json.loads(result.stdout)["trials"]
        return found

    one, two = trials_of(
        f"+stages.sft.evaluation={{every_steps: 2, {metric}}}", "sweep.num_trials=2", "sweep.parallel=2"
    )
    scored = [json.loads(line) for file in tmp_path.glob("artifacts/sft/*/evaluation.jsonl") for line in file.open()]
    assert len(scored) == 6 and not any(each["error"] or each["failed"] for each in scored)
    lengths = {each["scores"]["tone"] for each in scored if each["step"] == 4}
    assert lengths == {one["values"]["best"], two["values"]["best"]} and len(lengths) == 2  # type: ignore[index]
    for file in tmp_path.glob("artifacts/sft/*/evaluation.jsonl"):  # no step waited for the score of the start
        first = json.loads(file.read_text().splitlines()[0])
        last = json.loads(file.with_name("metrics.jsonl").read_text().splitlines()[-1])
        assert first["step"] == 0 and last["step"] == 4 and last["time"] < first["time"]
    (best,) = tmp_path.glob("artifacts/sweeps/*/best.yaml")
    assert yaml.safe_load(best.read_text())["values"] == {"best": max(lengths)}
    lines = calls.read_text().splitlines()
    assert lines and len(lines) == len({*lines})
    pruned = trials_of(
        f"+stages.sft.evaluation={{every_steps: 50, {metric}}}", "stages.sft.method.num_steps=100000",
        "sweep.num_trials=1",
        "sweep.pruning={pruner: {_target_: optuna.pruners.ThresholdPruner, lower: 1e6}, stage: sft,"
        " metric: evaluation/tone, direction: maximize}",
    )  # fmt: skip
    ((state, cause),) = ((each["state"], each["cause"]) for each in pruned)
    assert (state, cause) == ("pruned", "pruned at step 50 of sft#0")


@pytest.mark.parametrize("name", ["sft", pytest.param("dpo", marks=pytest.mark.slow)])
def test_a_reward_model_judges_checkpoints_and_picks_one(root: Path, tmp_path: Path, name: str) -> None:
    judged = shutil.copytree(root, tmp_path / "judged")
    reward = training.train(training.method("reward", num_steps=1), root, tmp_path / "reward")
    shutil.copytree(reward.output, judged / "reward_model")
    wins = Metric(function="win_rate", judge="reward_model")
    ran = StageFolder(tmp_path / "ran", judged)
    metrics = ran(training.method(name, **STEADY, evaluation=replace(EVERY, metrics=(wins,), pick="best")))
    values = {step: each["scores"]["judged_win_rate"] for step, each in recorded(ran).items()}  # type: ignore[index]
    assert list(values) == [0, 2, 4, 5] and values.pop(0) == metrics["evaluation/base/judged_win_rate"] == 0.5
    assert metrics["best_step"] == max(values, key=lambda step: (values[step], -step))


def test_a_resumed_training_scores_what_is_not_scored_and_picks_the_same(root: Path, tmp_path: Path) -> None:
    equal = own(tmp_path / "equal.py", "return [1.0] * len(completions)")
    stage = training.method("sft", **STEADY, evaluation=replace(EVERY, metrics=(equal,), pick="best"))
    broken = StageFolder(tmp_path / "broken", root)
    with pytest.raises(StoppedError):
        broken(stage, should_stop=lambda: len(broken.reports) == 2)
    metrics = broken(stage, resume=3)
    assert metrics["best_step"] == 2 and set(recorded(broken)) == {0, 2, 4, 5}


def test_without_held_out_rows_it_says_so(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = StageFolder(tmp_path / "ran", root)
    (tmp_path / "rows").mkdir()
    stage, make = training.method("sft", **STEADY, evaluation=EVERY), training.inputs
    rows = make(root, stage)["rows"]
    (tmp_path / "rows" / "train.parquet").write_bytes((rows.path / "train.parquet").read_bytes())
    alone = replace(rows, path=tmp_path / "rows")
    monkeypatch.setattr(training, "inputs", lambda *given: {**make(*given), "rows": alone})
    with pytest.raises(DataError, match=r"evaluation: .* has no held-out row; hold out rows"):
        ran(stage)


def test_what_is_scored_is_no_identity_and_what_is_picked_is() -> None:
    stage = training.method("sft")
    scored = [replace(EVERY, **change) for change in ({}, {"rows": 9}, {"metrics": ("f1",)}, {"cpus": 2})]
    assert all(replace(stage, evaluation=each).recipe() == stage.recipe() for each in scored)
    best = replace(EVERY, metrics=("f1",), pick="best")
    changes: list[dict[str, object]] = [
        {}, {"rows": 9}, {"metrics": ("f1", "exact")}, {"metric": "exact_match"}, {"every_steps": 3},
        {"max_new_tokens": 9}, {"pick": "last", "patience": 2},
        {"pick": "gate", "gate": {"a": Bound(metric="f1", at_least=0.5)}},
    ]  # fmt: skip
    recipes = [json.dumps(replace(stage, evaluation=replace(best, **change)).recipe()) for change in changes]
    assert len({*recipes, json.dumps(stage.recipe())}) == len(changes) + 1
    same_recipe = replace(stage, evaluation=replace(best, cpus=2)).recipe()
    assert same_recipe == replace(stage, evaluation=best).recipe()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "sft",
            {"evaluation": Evaluation(every_steps=1, pick="best"), "best": Best(every_steps=1)},
            "both choose the model",
        ),
        (
            "sft",
            {"evaluation": Evaluation(every_steps=1, patience=2), "best": Best(every_steps=1)},
            "both choose the model",
        ),
        ("reward", {"evaluation": EVERY}, "trains a reward model"),
        ("ppo", {"evaluation": EVERY}, "has a loop of its own"),
        ("sft", {"evaluation": EVERY, "adapter": Adapter(rank=2, alpha=4, init="pissa")}, "upon another base"),
        ("sft", {"evaluation": EVERY, "adapter": Adapter(rank=2, alpha=4), "adapter_in": "continue"}, "in two parts"),
    ],
)
def test_what_cannot_be_scored_is_refused(name: str, fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        training.method(name, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "neither is set"), ({"every_steps": 1, "every_epochs": 1.0}, "both are set"),
        ({"every_steps": 1, "pick": "gate"}, "needs its bounds"), ({"every_steps": 1, "metric": "f1"}, "ranks nothing"),
        ({"every_steps": 1, "metrics": ("nothing",)}, "no reward function nothing"),
        ({"every_steps": 1, "pick": "gate", "gate": {"a": Bound(metric="f1")}}, "exactly one of at_least"),
    ],
)  # fmt: skip
def test_settings_that_say_nothing_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Evaluation(**fields)  # type: ignore[arg-type]
