"""The union of the trials under way: what is made once, in which order, and who ends with what."""

import pytest

from flows.sweep.graph import Graph
from flows.sweep.planner import Planner
from flows.sweep.trial import Trial
from lineage.errors import PipelineError
from tests.command import CONF

RATE, SIZE = "stages.left.method.learning_rate", "stages.model.method.size"


@pytest.fixture
def words(tmp_path):
    (tmp_path / "rows.txt").write_text("rows")
    return ["pipeline=toy", "model=none", f"sources.rows.path={tmp_path}/rows.txt", f"store={tmp_path}/store"]


@pytest.fixture
def planner(words):
    return Planner(words, config_dir=CONF)


@pytest.fixture
def chain(words):
    """data -> model -> left"""
    return Planner(words, until="left", config_dir=CONF)


def graph_of(planner, *params):
    graph = Graph()
    for number, each in enumerate(params):
        assert graph.add(planner.plan(Trial(number=number, params=each))) == []
    return graph


def run_next(graph):
    """Begins and finishes the first that is ready."""
    node = graph.ready()[0]
    graph.begin(node)
    return node.title, [opened.number for opened in graph.finish(node.title)]


def run_all(graph):
    while graph.ready():
        yield run_next(graph)


def test_what_trials_share_is_made_once_and_the_earliest_trial_ends_first(chain):
    graph = graph_of(chain, *({RATE: rate} for rate in ("0.2", "0.3", "0.4")))
    assert list(run_all(graph)) == [("data", []), ("model", []), ("left#0", [0]), ("left#1", [1]), ("left#2", [2])]
    assert not graph.open and not graph.nodes


def test_a_stage_that_some_trials_share_is_called_after_the_first_of_them(chain):
    both = [{SIZE: size, RATE: rate} for size in ("1", "2") for rate in ("0.2", "0.3")]
    titles = [title for title, _ in run_all(graph_of(chain, *both))]
    assert titles == ["data", "model#0", "left#0", "left#1", "model#2", "left#2", "left#3"]


def test_a_stage_waits_for_what_it_reads(planner):
    graph = graph_of(planner, {RATE: "0.2"})
    assert [node.title for node in graph.ready()] == ["data"]
    run_next(graph)
    assert [node.title for node in graph.ready()] == ["model"]
    run_next(graph)
    assert {node.title for node in graph.ready()} == {"right", "left#0"}


def test_a_failure_ends_those_trials_that_need_the_stage_and_no_other(planner):
    graph = graph_of(planner, *({SIZE: size} for size in ("1", "2", "1")))
    run_next(graph)
    node = graph.ready()[0]
    graph.begin(node)
    assert [opened.number for opened in graph.fail(node.title, PipelineError("no"))] == [0, 2]
    assert {title for title, _ in run_all(graph)} == {"model#1", "left#1", "right#1"}
    [again] = graph.add(planner.plan(Trial(number=3, params={SIZE: "1"})))
    assert str(again.error) == "no" and not graph.open and again.number == 3


def test_what_needs_no_failed_stage_is_made_before_its_trial_ends(planner):
    graph = graph_of(planner, {RATE: "0.2"}, {RATE: "0.3"})
    run_next(graph), run_next(graph)
    for node in graph.ready()[:2]:
        graph.begin(node)
    assert graph.fail("right", PipelineError("no")) == []
    assert [opened.number for opened in graph.finish("left#0")] == [0]
    assert run_next(graph) == ("left#1", [1])


def test_what_all_need_takes_all_with_it(planner):
    graph = graph_of(planner, {RATE: "0.2"}, {RATE: "0.3"})
    graph.begin(graph.ready()[0])
    assert [opened.number for opened in graph.fail("data", PipelineError("no"))] == [0, 1]
    assert not graph.open and not graph.nodes


def test_a_trial_whose_stages_all_fail_ends_once_with_the_first_error(planner):
    graph = graph_of(planner, {RATE: "0.2"})
    run_next(graph), run_next(graph)
    for node in graph.ready():
        graph.begin(node)
    assert graph.fail("left#0", PipelineError("first")) == []
    [opened] = graph.fail("right", PipelineError("second"))
    assert str(opened.error) == "first" and not graph.open


def test_a_pruned_trial_ends_its_own_stages_and_leaves_shared_ones(planner):
    graph = graph_of(planner, {RATE: "0.2"}, {RATE: "0.3"})
    run_next(graph), run_next(graph)
    for node in graph.ready():
        graph.begin(node)
    unwanted = graph.drop(0)
    assert [node.title for node in unwanted] == ["left#0"]
    graph.end(unwanted[0])
    graph.add(planner.plan(Trial(number=2, params={RATE: "0.2"})))
    assert graph.fail("left#0", PipelineError("pruned")) == []
    assert [node.title for node in graph.ready()] == ["left#2"]
    graph.finish("right")
    assert [opened.number for opened in graph.finish("left#1")] == [1]
    assert run_next(graph) == ("left#2", [2])


def test_a_trial_that_comes_later_takes_what_is_finished(chain):
    graph = graph_of(chain, {RATE: "0.2"})
    list(run_all(graph))
    graph.add(chain.plan(Trial(number=1, params={RATE: "0.3"})))
    assert [title for title, _ in run_all(graph)] == ["left#1"]
    [opened] = graph.add(chain.plan(Trial(number=2, params={RATE: "0.2"})))
    assert not opened.left and opened.error is None
