import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.progress.run_record import (
    Links,
    RunRecord,
    StageRecord,
    SweepRecord,
    dashboard_file,
    new_id,
    run_record_path,
)
from flows.progress.stage_progress import Progress
from flows.reports.run import _without_digests, summary, views
from flows.reports.status import status_dict, status_text
from lineage.filesystem.owner import Owner, host
from lineage.record.attempts import record_attempt
from tests.finished import finish
from tests.sweeps import complete, ended


@pytest.fixture
def store(tmp_path):
    directory = tmp_path / "dpo" / "0123456789abcdef"
    (directory / "work").mkdir(parents=True)
    now = time.time()
    lines = [
        {"step": step, "time": now - 10 + step, "metrics": {"loss": 3.41, "tokens_per_second": 9800.0, "mfu": 0.312}}
        for step in (1, 2, 3)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.fixture
def live(store):
    """Of this process."""
    now = time.time()
    directory = str(store / "dpo" / "0123456789abcdef")
    room = {"directory": directory, "since": now - 60, "workers": 2, "cpus": 4, "gpus": 1}
    stages = {
        "corpus": StageRecord(state="done", since=now, directory="", seconds=1.25),
        "sft": StageRecord(state="reused", since=now, directory=""),
        "dpo": StageRecord(state="running", total=13, **room),
        "reward": StageRecord(state="waiting", since=now, directory="", reason="2 CPUs"),
        "evaluate": StageRecord(state="pending", since=now, directory="", after=["sft", "dpo"]),
        "extra": StageRecord(state="failed", since=now, directory="", reason="no memory\nat all"),
    }
    note = RunRecord(
        id=new_id(), pipeline="cpt-sft-dpo", cli_args=["stages.dpo.method.beta=0.2", "x='a b'"], driver=Owner.here(),
        started=now - 65, stages=stages,
    )  # fmt: skip
    note.write(store)
    return note


def text(store):
    return status_text(store, *views(store))


def died(note, **fields):
    return replace(note, driver=replace(note.driver, started=0.0), **fields)


@pytest.mark.parametrize(
    ("metrics", "expected"), [({"loss": 3.41}, "loss 3.410"), ({"loss": 0.0, "reward": 0.7}, "reward 0.700"), ({}, "")]
)
def test_where_there_are_rewards_they_are_shown_in_place_of_a_loss_that_says_nothing(metrics, expected):
    assert Progress(path=Path("none"), total=4, metrics=metrics).describe().endswith(expected)


def test_a_store_without_a_run_says_how_to_start_one(tmp_path):
    assert text(tmp_path).endswith("start one with: posttrain run")


def test_a_stage_shows_how_far_it_is_and_what_it_takes_as_text_and_as_json(store, live):
    lines = {line.split()[0]: line for line in text(store).splitlines()[1:] if line.strip()}
    assert "3/13  loss 3.410  9,800 tok/s  MFU 31%  ETA 0:10  2 workers  4 CPUs  1 GPU" in lines["dpo"]
    assert "attempt" not in lines["dpo"]
    assert lines["corpus"].endswith("done in 1.2 s")
    assert lines["sft"].endswith("reused: another run made it")
    assert lines["reward"].endswith("waits for 2 CPUs")
    assert lines["evaluate"].endswith("waits for dpo")
    assert lines["extra"].endswith("FAILED: no memory")
    assert f"{live.id}  cpt-sft-dpo  runs since " in text(store)
    assert f"(1:05)  on {live.driver.host}:{os.getpid()}" in text(store)
    directory = store / "dpo" / "0123456789abcdef"
    record_attempt(directory, 0, "code")
    record_attempt(directory, 2, "code", "its process was killed by SIGKILL")
    assert "1 GPU  attempt 2, from step 2: its process was killed by SIGKILL" in text(store)
    document = json.loads(json.dumps(status_dict(store, *views(store))))
    [run] = document["running"]
    assert (run["id"], run["state"], document["last"]) == (live.id, "running", [])
    assert run["command"] == """posttrain run stages.dpo.method.beta=0.2 'x='"'"'a b'"'"''"""
    stages = {stage["stage"]: stage for stage in run["stages"]}
    expected = {
        "step": 3, "total": 13, "loss": 3.41, "tokens_per_second": 9800.0, "mfu": 0.312, "workers": 2, "gpus": 1,
        "attempts": 2, "resumed_from": 2, "restart_cause": "its process was killed by SIGKILL",
    }  # fmt: skip
    assert {key: stages["dpo"][key] for key in expected} == expected
    assert stages["dpo"]["eta_seconds"] == pytest.approx(10.0)
    assert (stages["reward"]["waits_for"], stages["extra"]["cause"]) == ("2 CPUs", "no memory\nat all")


def test_links_lead_to_prefect_mlflow_and_ray(store, live):
    links = Links(flow_run="f1", flow_page="http://p/runs/flow-run/f1", mlflow="http://m/", mlflow_run="r1")
    replace(live, links=links, message="approve at ...").write(store)
    dashboard_file(store / "dpo" / "0123456789abcdef").write_text("127.0.0.1:8265\n")
    shown = text(store)
    assert "prefect   http://p/runs/flow-run/f1" in shown
    assert "mlflow    http://m/#/runs/r1" in shown
    assert "ray       http://127.0.0.1:8265" in shown
    assert "  | approve at ..." in shown
    replace(live, links=Links(flow_run="f1", mlflow="sqlite:///mlflow.db", mlflow_run="r1")).write(store)
    assert "prefect   flow run f1" in text(store)
    assert "mlflow    run r1 in sqlite:///mlflow.db" in text(store)


def test_a_run_that_waits_as_a_whole_says_for_what(store, live):
    waiting = replace(live, id=new_id(), waits_for="another run of toy: daily", stages={})
    waiting.write(store)
    shown = text(store)
    assert f"{waiting.id}  cpt-sft-dpo  waits since " in shown
    assert "\n  waits for  another run of toy: daily\n" in f"{shown}\n"
    states = {run["id"]: (run["state"], run["waits_for"]) for run in status_dict(store, *views(store))["running"]}
    assert states == {live.id: ("running", ""), waiting.id: ("waiting", "another run of toy: daily")}
    died(waiting).write(store)
    assert f"its driver on {host()} was killed while it waited for another run of toy: daily; run the same" in text(
        store
    )
    [run] = status_dict(store, *views(store))["last"]
    assert (run["state"], run["waits_for"]) == ("died", "")


def test_a_run_whose_driver_is_gone_has_died_and_says_how_to_go_on(store, live):
    died(live).write(store)
    shown = text(store)
    assert shown.startswith("nothing runs in ")
    assert "died after 1:05" in shown
    assert f"its driver on {host()} was killed at step 3 of dpo; run the same command again to resume:" in shown
    assert "posttrain run stages.dpo.method.beta=0.2" in shown
    [run] = status_dict(store, *views(store))["last"]
    assert {stage["stage"]: stage["waits_for"] for stage in run["stages"]}["evaluate"] == ""
    os.utime(run_record_path(store, live.id), (0, time.time() - 1000))  # the steps are of a later run
    assert f"its driver on {host()} was killed in dpo; run" in text(store)


def stopped(live):
    """A run that began before."""
    ended = time.time()
    return replace(live, id="20260101-000000-0000", started=live.started - 9, outcome="stopped", ended=ended)


def test_the_step_of_a_run_is_still_known_when_a_later_one_went_on(store, live):
    stopped(live).write(store)
    record_attempt(store / "dpo" / "0123456789abcdef", 2, "code", reached=3)
    (store / "dpo" / "0123456789abcdef" / "metrics.jsonl").write_text("")
    run_record_path(store, live.id).unlink()
    assert "      at step 3 of dpo; resume with: posttrain run" in text(store)


@pytest.mark.parametrize("arguments", [["stages.dpo.method.beta=0.2", "x='a b'"], ["resources.save_steps=4"]])
def test_what_a_later_run_has_taken_up_is_not_offered(store, live, arguments):
    stopped(live).write(store)
    replace(live, cli_args=arguments).write(store)
    assert f"      at step 3 of dpo; {live.id} resumed it" in text(store)
    assert "resume with" not in text(store)
    replace(live, cli_args=arguments, stages={"sft": live.stages["sft"]}).write(store)  # which left dpo as it was
    assert "      at step 3 of dpo; resume with: posttrain run" in text(store)


def test_a_rehearsal_that_died_is_taken_up_by_the_same_command_alone(store, live):
    replace(died(stopped(live)), outcome=None, command="rehearse").write(store)
    assert "run the same command again to start again" in text(store)
    replace(live, command="rehearse").write(store)
    assert f"was killed at step 3 of dpo; {live.id} restarted it" in text(store)


def test_the_last_runs_say_how_they_ended(store, live):
    run_record_path(store, live.id).unlink()
    ends = {
        "done": "", "failed": "stage dpo failed: no memory (log: x)", "refused": "gate g refuses dpo:\n  too bad",
        "stopped": "",
    }  # fmt: skip
    for number, (outcome, cause) in enumerate([("done", ""), ("done", ""), *ends.items()]):
        ended = replace(live, id=f"2026010{number}-000000-0000", outcome=outcome, cause=cause, ended=time.time())
        replace(ended, started=ended.ended - 3.2).write(store)
    lines = text(store).splitlines()
    assert lines[0].startswith("nothing runs in ")
    heads = [line.split() for line in lines if line.startswith("  2026")]
    assert [(head[0][:8], head[-3]) for head in heads] == [
        ("20260105", "stopped"), ("20260104", "refused"), ("20260103", "failed"), ("20260102", "done"),
        ("20260101", "done"),
    ]  # fmt: skip
    assert heads[0][-2:] == ["after", "0:03"]
    assert "      stage dpo failed: no memory (log: x)" in lines
    assert "        too bad" in lines
    assert any(line.startswith("      at step 3 of dpo; resume with: posttrain run") for line in lines)


def test_a_pruned_stage_is_no_failure(store, live):
    pruned = StageRecord(state="pruned", since=live.started, directory="", reason="pruned at step 3 of dpo#1")
    replace(live, stages={"dpo#1": pruned}).write(store)
    assert "  dpo#1  pruned at step 3 of dpo#1" in text(store)
    [run] = status_dict(store, *views(store))["running"]
    assert run["stages"][0]["cause"] == "pruned at step 3 of dpo#1"


def test_a_sweep_says_how_many_trials_ended(store, live):
    folder = store / "sweeps" / "toy-1234"
    folder.mkdir(parents=True)
    sweep = SweepRecord(folder=str(folder), own=["dpo", "evaluate"], trials=8)
    replace(live, sweep=sweep).write(store)
    assert "cpt-sft-dpo  sweep toy-1234  runs since" in text(store)
    assert "  trials    0 of 8 ended; each runs dpo, evaluate" in text(store)
    results = (complete(0), complete(1), ended(2, "failed"))
    (folder / "trials.jsonl").write_text("".join(json.dumps(asdict(each)) + "\n" for each in results))
    assert "  trials    3 of 8 ended (2 complete, 1 failed); each runs dpo, evaluate" in text(store)
    [run] = json.loads(json.dumps(status_dict(store, *views(store))))["running"]
    assert run["sweep"] == {
        "folder": str(folder), "stages": ["dpo", "evaluate"], "trials": 8, "ended": {"complete": 2, "failed": 1},
    }  # fmt: skip
    replace(live, sweep=replace(sweep, trials=None)).write(store)
    assert "  trials    3 ended (2 complete, 1 failed); each" in text(store)


def test_a_stop_between_two_stages_says_how_to_go_on(store, live):
    replace(live, outcome="stopped", ended=time.time(), stages={"corpus": live.stages["corpus"]}).write(store)
    assert f"      resume with: posttrain run {live.cli_args[0]}" in text(store)


def test_of_a_sweep_the_stages_that_rest_are_counted(store, live):
    resting = {f"sft#{number}": live.stages["sft"] for number in range(30)}
    replace(live, stages={**live.stages, **resting}).write(store)
    assert "others  1 done, 31 reused, 1 pending" in text(store)
    assert "dpo     3/13" in text(store)


def test_what_the_curves_of_a_running_stage_show_is_a_line_below_it(store, live):
    lines = [{"step": step, "time": time.time(), "metrics": {"loss": 3.0}} for step in range(1, 101)]
    path = store / "dpo" / "0123456789abcdef" / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    evidence = "loss 3 at the start, 3 at step 100, noise 0"
    assert f"! flat: {evidence}; see posttrain diagnose dpo" in text(store)
    [running] = status_dict(store, *views(store))["running"]
    assert [each["findings"] for each in running["stages"] if each["stage"] == "dpo"] == [
        [{"rule": "flat", "evidence": evidence}]
    ]


def test_a_run_that_waited_for_another_says_what_it_ran_itself(toy):
    plan = toy()
    finish(plan)
    names = [planned.name for planned in plan.stages]
    waited = summary(plan, dict.fromkeys(names, 0.0), 1.0, [])
    assert f"toy: 0 of {len(names)} stages run in 1.0 s, {len(names)} made by another run meanwhile" in waited
    both = summary(plan, {**dict.fromkeys(names, 0.0), names[0]: 2.0}, 1.0, [])
    assert f"toy: 1 of {len(names)} stages run in 1.0 s, {len(names) - 1} made by another" in both
    assert len([line for line in both.splitlines() if " reused " in line]) == len(names) - 1
    assert f"toy: {len(names)} of {len(names)} stages run in 1.0 s\n" in summary(
        plan, dict.fromkeys(names, 2.0), 1.0, []
    )


def test_a_run_ends_with_what_matters_first_answers_the_lineage_page_and_commands(toy_plan_of_sft, tmp_path):
    plan, output = toy_plan_of_sft
    metrics = {
        f"{name}/{metric}": value
        for name, values in {"base": (90.0, 0.0, 1.0, 0.1), "sft": (120.0, 0.5, 0.0, 0.9)}.items()
        for metric, value in zip(
            ("text_perplexity", "exact_match", "unfinished_share", "reward/form"), values, strict=True
        )
    }
    (output / "metrics.json").write_text(json.dumps(metrics))
    scored = [("exact_match", n, {"base": 0.0, "sft": float(n % 2)}) for n in range(40)]
    scored += [("unfinished_share", n, {"base": 1.0, "sft": 1.0}) for n in range(4)]
    (output / "scores.jsonl").write_text("".join(
        json.dumps({"metric": metric, "row": str(n), "group": str(n), "weight": 1, "scores": scores}) + "\n"
        for metric, n, scores in scored
    ))  # fmt: skip
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {n}?"}], "right answer": f"It is {n}.", "base": "no " * 90,
         "sft": f"It is {n * (n < 2)}."}
        for n in range(5)
    ]  # fmt: skip
    (output / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = summary(plan, {"sft": 61.0}, 70.0, ["pipeline=sft"])
    lines = text.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("model "))
    assert lines[at].split("  ")[1].strip() == "form ↑" and "text ppl" in lines[at]
    assert lines[at + 2].split() == ["sft", "0.900", "0.50", "0.00", "120.0"]
    verdict = "sft beside base: better: exact match (40 rows); too few rows to tell: answers cut off (4 rows)"
    assert verdict in " ".join(text.split())
    assert text.count("What is ") == 3 and "  sft   It is 0.  (right)" in lines
    assert "  right answer  It is 2." in lines and "  base          " + ("no " * 90)[:99] + "…" in lines
    assert any(line.split()[:2] == ["sft", "1:01"] for line in lines)
    assert "lineage  artifacts/pipelines/sft/lineage.html" in lines
    assert "<svg" in (tmp_path / "artifacts/pipelines/sft/lineage.html").read_text()
    assert lines[-4:] == [
        "next:", "  posttrain chat sft", "  posttrain plan pipeline=sft stages.sft.method.learning_rate=1e-05",
        "  posttrain ui",
    ]  # fmt: skip


def test_a_page_beside_outputs_of_another_run_says_whose_it_is(toy_plan_of_sft, tmp_path):
    plan, _ = toy_plan_of_sft
    page = tmp_path / "artifacts/pipelines/sft/report.html"
    assert "page     artifacts/pipelines/sft/report.html" in summary(plan, {}, 1.0, [], page).splitlines()
    viewed = json.loads((plan.entry(plan.stage("sft")).path / "manifest.json").read_text())
    (page.parent / "sft").mkdir(parents=True)
    (page.parent / "sft" / "manifest.json").write_text(json.dumps({**viewed, "fingerprint": "0" * 64}))
    whose = "(of this run; sft beside it is the declared pipeline's)"
    assert f"report.html {whose}" in summary(plan, {}, 1.0, [], page)


def test_findings_of_a_training_that_ran_are_named_at_its_end(toy_plan_of_sft):
    plan, _ = toy_plan_of_sft
    reports = [{"step": step, "time": float(step), "metrics": {"loss": 2.0 + step}} for step in range(1, 120)]
    plan.entry(plan.stage("sft")).metrics.write_text("".join(json.dumps(each) + "\n" for each in reports))
    assert "\ndiagnose sft: " in summary(plan, {"sft": 61.0}, 70.0, [])
    assert "diagnose sft" not in summary(plan, {}, 70.0, [])  # it was reused


@pytest.fixture
def toy_plan_of_sft(tmp_path, monkeypatch):
    """A finished plan of ``pipeline=sft``, and the output of its evaluation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": []}) + "\n")
    overrides = ["pipeline=sft", "model=owner/name", f"sources.base.revision={'a' * 40}", "data=chats.jsonl"]
    finish(make_plan(load_pipeline(overrides)))
    plan = make_plan(load_pipeline(overrides))
    return plan, plan.entry(plan.stage("evaluate")).output


def test_a_stage_that_only_follows_names_what_changes_once():
    moved = "input reference: sft@aaaa -> sft@bbbb; input sft: sft@aaaa -> sft@bbbb"
    assert _without_digests(moved, ["sft"]) == "because sft changes"
    assert _without_digests(f"max_length: 1 -> 2; {moved}", ["sft"]) == "max_length: 1 -> 2; because sft changes"
    assert _without_digests(moved, []) == moved
