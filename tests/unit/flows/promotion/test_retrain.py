"""Promotion and retraining: whom a run tells how it ended, and when nothing is renewed."""

import json
import shutil

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.promotion import retrain
from flows.promotion.promote import promote
from flows.stages.run import require_new_rows
from lineage.errors import ArtifactError, DataError, StageError
from lineage.promotions import read_events
from lineage.store import Entry
from tests.finished import finish
from tests.unit.flows.declare.test_config import CONF


@pytest.fixture
def reported(monkeypatch) -> list[tuple[str, str, str]]:
    heard: list[tuple[str, str, str]] = []
    monkeypatch.setattr(retrain, "_notify", lambda *message: heard.append(message))
    return heard


NOTIFY = "notify=custom-webhook/ops"


def test_without_retraining_too_the_end_of_a_run_is_reported(toy, reported):
    plan = toy(NOTIFY)
    finish(plan)
    body = retrain.follow_up(plan, [])
    assert body == "toy: New models: model, left, right."
    assert reported == [("custom-webhook/ops", "toy: done", body)]


def test_a_failure_is_reported_with_its_cause_and_what_to_type(toy, reported):
    plan = toy(NOTIFY)
    finish(plan, "data", "model")
    body = retrain.follow_up(plan, ["pipeline=toy", "a=[1, 2]"], StageError("left", "told\nto fail", "stage.log"))
    assert body == (
        "toy: New models: model. The run failed: stage left failed: told to fail (log: stage.log) "
        "To resume from what is finished: posttrain run pipeline=toy 'a=[1, 2]'"
    )
    assert reported == [("custom-webhook/ops", "toy: failed", body)]


def test_nobody_is_reported_where_nobody_is_named_and_of_a_run_that_had_nothing_to_do(toy, reported):
    plan = toy()
    finish(plan)
    assert retrain.follow_up(plan, []) is None
    assert retrain.follow_up(toy(NOTIFY), []) is None
    assert reported == []


@pytest.fixture
def renewed(tmp_path):
    """A plan that renews a model from two kinds of rows, and how many each of its data stages found new."""
    (tmp_path / "rows.txt").write_text("rows")
    more = "{method: {_target_: tasks.prepare_data.PrepareText}, inputs: {rows: rows}, resources: {}}"
    base = ["pipeline=toy-retrain", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]

    def plan(*overrides: str, **found: float | None):
        made = make_plan(load_pipeline([*base, f"+stages.more={more}", *overrides], CONF))
        finish(made, *found)
        for name, count in found.items():
            path = made.entry(made.stage(name)).path / "manifest.json"
            metrics = {} if count is None else {"new_rows": count}
            path.write_text(json.dumps(json.loads(path.read_text()) | {"metrics": metrics}))
        return made

    return plan


def test_a_model_is_not_renewed_where_no_data_stage_found_a_new_row(renewed):
    plan = renewed(data=0.0, more=0.0)
    with pytest.raises(DataError, match=r"nothing is new: data, more found no row .*so learner would learn the old"):
        require_new_rows(plan, plan.stage("learner"))
    require_new_rows(plan, plan.stage("exam"))  # a model that is there already may be judged again


def is_refused(plan) -> bool:
    try:
        require_new_rows(plan, plan.stage("learner"))
    except DataError:
        return True
    return False


@pytest.mark.parametrize("found", [{"data": 0.0, "more": 2.0}, {"data": 0.0, "more": None}, {"data": 0.0}])
def test_one_data_stage_that_has_new_rows_or_may_have_them_is_enough(renewed, found):
    assert not is_refused(renewed(**found))


def test_who_promotes_nothing_may_learn_the_old_rows_once_more(renewed):
    assert is_refused(renewed(data=0.0, more=0.0))
    assert not is_refused(renewed("retrain=null", data=0.0, more=0.0))


def test_without_a_prefect_api_one_line_says_that_nobody_was_reported(toy, monkeypatch, capsys):
    monkeypatch.setattr(retrain, "configured_api_url", lambda: None)
    plan = toy(NOTIFY)
    finish(plan)
    assert retrain.follow_up(plan, [])
    assert capsys.readouterr().err == ("posttrain: notify=custom-webhook/ops: not sent: no Prefect API is running\n")


def test_a_model_that_is_freed_while_its_bytes_are_read_gets_no_alias(toy, monkeypatch):
    plan = toy("tracking=none")
    finish(plan)
    left, read = plan.entry(plan.stage("left")), Entry.require_intact

    def slow(entry, *cache):
        manifest = read(entry, *cache)
        shutil.rmtree(entry.path)
        return manifest

    ref = f"left@{left.path.name}"
    with monkeypatch.context() as patch:
        patch.setattr(Entry, "require_intact", slow)
        with pytest.raises(ArtifactError, match=r"was deleted or damaged meanwhile; run its pipeline again"):
            promote(plan.pipeline, ref, "champion", why="", force=True)
    assert read_events(plan.pipeline.store) == []
    finish(make_plan(plan.pipeline), "left")
    promote(plan.pipeline, ref, "champion", why="", force=True)
    assert [event.alias for event in read_events(plan.pipeline.store)] == ["champion"]
