"""The rows of all that will train are checked before the first of it trains."""

from collections.abc import Iterator

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.stages.run import Run, check_job
from lineage.errors import ArtifactError, LostError, StageError, StoppedError
from lineage.record.tracker import Tracker
from tests.finished import finish

DATA = ("corpus", "instructions", "preferences")


class Processes:
    """Answers instead of processes."""

    def __init__(self, **answers):
        self.answers = answers
        self.asked = []

    def raise_if_ended(self, directory):
        pass

    def run(self, job):
        self.asked.append(job.stage)
        answer = self.answers.get(job.stage, {"leaked_rows": 0})
        if isinstance(answer, Iterator):
            answer = next(answer)
        if isinstance(answer, Exception):
            raise answer
        return answer


class Checked:
    """A run, and what it announces."""

    def __init__(self, plan, processes):
        self.reported = []
        self.run = Run(plan=plan, processes=processes, emit=self.hear, tracker=Tracker())

    def hear(self, event):
        if event.state == "message":
            self.reported.append(event.text)

    def __call__(self, stage):
        self.run.checks.require(self.run, self.run.plan.stage(stage))
        return self.reported


@pytest.fixture
def quickstart(tmp_path):
    def plan(*overrides):
        return make_plan(load_pipeline([f"store={tmp_path}/store", *overrides]))

    return plan


def test_the_first_stage_that_trains_waits_for_the_checks_of_all(quickstart):
    plan = quickstart()
    finish(plan, *DATA, "base")
    processes = Processes()
    require = Checked(plan, processes)
    require("cpt")
    assert processes.asked[0] == "cpt"
    assert sorted(processes.asked) == ["cpt", "dpo", "evaluate", "reward", "sft"]
    require("dpo")
    assert len(processes.asked) == 5  # no row is checked twice in a run


def test_a_stage_that_does_not_train_asks_for_nothing(quickstart):
    plan = quickstart()
    finish(plan, *DATA, "base")
    processes = Processes()
    Checked(plan, processes)("evaluate")
    assert processes.asked == []


@pytest.mark.parametrize("last", ["dpo", "evaluate"])
def test_rows_that_the_last_stage_cannot_read_keep_the_first_from_training(quickstart, last):
    plan = quickstart()
    finish(plan, *DATA, "base")
    processes = Processes(**{last: StageError(last, "no answer is left", "log", 2)})
    require = Checked(plan, processes)
    for stage in ("cpt", "dpo"):
        with pytest.raises(StageError, match="no answer is left"):
            require(stage)
    assert processes.asked.count(last) == 1


def test_the_rows_of_an_evaluation_are_checked_as_it_will_read_them(quickstart, tmp_path):
    plan = quickstart("stages.dpo.method.max_length=96", "stages.dpo.method.control_tokens=keep")
    finish(plan, *DATA, "base")
    job = check_job(plan, plan.stage("evaluate"), tmp_path)
    longest = max(plan.stage(name).stage.method.max_length for name in ("cpt", "sft", "dpo"))
    assert (job.method.method.max_length, job.method.method.control_tokens) == (longest, "keep")
    assert {slot: each.planned.name for slot, each in job.inputs.items()} == {
        "text": "corpus", "conversations": "instructions", "pairs": "preferences", "reference": "base",
    }  # fmt: skip


@pytest.mark.parametrize(
    "error", [StoppedError("stopped"), ArtifactError("the lock was lost"), LostError("cpt", "was killed", "log")]
)
def test_the_end_of_a_check_is_no_refusal(quickstart, error):
    plan = quickstart("resources.max_failures=0")
    finish(plan, *DATA, "base")
    processes = Processes(cpt=iter([error, {"leaked_rows": 0}]))
    require = Checked(plan, processes)
    with pytest.raises(type(error)):
        require("cpt")
    require("cpt")


def test_a_check_that_was_killed_is_made_again(quickstart):
    plan = quickstart("resources.max_failures=2")
    finish(plan, *DATA, "base")
    lost = LostError("sft", "was killed", "log")
    reported = Checked(plan, Processes(sft=iter([lost, lost, {"leaked_rows": 0}])))("cpt")
    assert reported == ["stage sft failed: was killed (log: log); its rows are checked again"] * 2
    with pytest.raises(LostError):
        Checked(plan, Processes(sft=iter([lost, lost, lost, {"leaked_rows": 0}])))("cpt")


def test_rows_that_are_measured_on_and_trained_on_are_reported_with_their_file(quickstart):
    plan = quickstart()
    finish(plan, *DATA, "base")
    (line,) = Checked(plan, Processes(sft={"leaked_rows": 3}))("cpt")
    assert line.startswith("sft: 3 held-out rows among what it trains on: ")
    assert line.endswith("/logs/leakage-sft.parquet")


def test_an_evaluation_on_a_local_benchmark_checks_what_its_models_were_trained_on(quickstart, tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.reward_functions.metric.find_spec", lambda name: True)
    (tmp_path / "rows.jsonl").write_text('{"question": "What is a list?"}\n')
    task = "task: asked\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ndoc_to_text: '{{question}}'\n"
    (tmp_path / "asked.yaml").write_text(task)
    cli_args = [f"+stages.evaluate.method.metrics=['lm_eval:{tmp_path}/asked.yaml']"]
    finish(quickstart(*cli_args), *(each.name for each in quickstart().stages if each.name != "evaluate"))
    plan = quickstart(*cli_args)
    assert [each.name for each in plan.stale] == ["evaluate"]
    (line,) = Checked(plan, Processes(sft={"leaked_rows": 2}))("evaluate")
    assert line.startswith("sft: 2 held-out rows among what it trains on: ")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (
            {"rows": 2078, "rows_dropped": 1131, "rows_cut": 1618, "length_p95": 1600},
            "1,131 of 2,078 rows dropped, 1,618 cut at max_length=512; 95 % need 1,600",
        ),
        (
            {"rows": 10, "rows_dropped": 0, "rows_cut": 0, "prompts_cut": 2, "length_p95": 300},
            "2 of 10 rows with a cut prompt at max_length=512; 95 % need 300",
        ),
        ({"rows": 10, "rows_dropped": 3, "rows_cut": 1}, "3 of 10 rows dropped: they fill no chunk of 512 tokens"),
        ({"rows": 10, "rows_dropped": 0, "rows_cut": 1}, ""),
        ({"rows": 10, "rows_dropped": 0, "rows_cut": 0, "length_p95": 300}, ""),
    ],
)
def test_what_is_dropped_and_cut_is_announced_before_the_first_step_and_known_to_later_plans(
    quickstart, counts, message
):
    setting = "stages.sft.method.max_length=512"
    plan = quickstart(setting)
    finish(plan, *DATA, "base")
    reported = Checked(plan, Processes(sft={"leaked_rows": 0, "examples": 9, **counts}))("cpt")
    assert reported == ([f"sft: {message}"] if message else [])
    shown = quickstart(setting).stage("sft").hyperparameters
    assert shown.lost == message and message in str(shown)
    assert shown.to_dict().get("rows", "") == message


@pytest.mark.parametrize(
    ("dropped", "most", "refused"), [(90, None, False), (91, None, True), (91, 1, False), (20, 0.1, True)]
)
def test_a_training_that_loses_most_of_its_rows_is_refused_before_any_trains(quickstart, dropped, most, refused):
    setting = "stages.sft.method.max_length=64"
    plan = quickstart(setting, *([] if most is None else [f"stages.sft.resources.max_dropped={most}"]))
    assert plan.stage("sft").fingerprint == quickstart(setting).stage("sft").fingerprint
    finish(plan, *DATA, "base")
    counts = {"leaked_rows": 0, "examples": 9, "rows": 100, "rows_dropped": dropped, "length_p95": 300}
    require = Checked(plan, Processes(sft=counts))
    if not refused:
        assert require("cpt") == [f"sft: {dropped} of 100 rows dropped at max_length=64; 95 % need 300"]
        return
    with pytest.raises(StageError, match=rf"{dropped} of 100 rows dropped .*\.resources\.max_dropped=1 if") as error:
        require("cpt")
    assert error.value.exit_code == 2


def test_the_tokenizer_is_that_of_the_root_with_the_template_that_a_stage_installs(quickstart):
    plan = quickstart("stages.sft.method.chat_template=chatml")
    finish(plan, *DATA, "base")
    for stage in DATA:
        (plan.entry(plan.stage(stage)).output / "held_out.parquet").touch()
    jobs = {name: check_job(plan, plan.stage(name), plan.pipeline.store) for name in ("cpt", "sft", "dpo")}
    assert {name: job.inputs["policy"].planned.name for name, job in jobs.items()} == dict.fromkeys(jobs, "base")
    assert {name: job.method.chat_template for name, job in jobs.items()} == {
        "cpt": None,
        "sft": "chatml",
        "dpo": "chatml",
    }
    assert sorted(jobs["sft"].method.held_out) == sorted(DATA)


def test_what_was_trained_the_last_time_is_compared_unless_a_drop_is_accepted(quickstart):
    before = quickstart()
    finish(before, "sft", metrics={"trained_tokens_percent": 40.0})
    changed = ("stages.sft.method.num_steps=9",)
    plan = quickstart(*changed)
    finish(plan, *DATA, "base")
    assert check_job(plan, plan.stage("sft"), plan.pipeline.store).method.previous_percent == 40.0
    assert check_job(plan, plan.stage("dpo"), plan.pipeline.store).method.previous_percent is None
    accepting = quickstart(*changed, "accept_label_drop=[sft]")
    assert check_job(accepting, accepting.stage("sft"), plan.pipeline.store).method.previous_percent is None


def test_rows_that_are_not_prepared_yet_are_checked_later(quickstart):
    plan = quickstart()
    finish(plan, "corpus", "base")
    assert check_job(plan, plan.stage("cpt"), plan.pipeline.store) is not None
    assert check_job(plan, plan.stage("dpo"), plan.pipeline.store) is None
