"""What a plan reads of the store, and that a run refuses to begin where some of it is gone."""

import os
import shutil

import pytest

from flows.declare.config import load_pipeline
from flows.operate.rehearsal import scratch_plan
from flows.planning.plan import make_plan
from flows.planning.reads import claim, reads
from lineage.errors import ArtifactError
from lineage.filesystem.lock import Lock
from lineage.graph.places import node_key
from lineage.store import Store
from tests.command import CONF
from tests.finished import finish, save
from tests.written_store import WrittenStore, node


@pytest.fixture
def plan(tmp_path):
    """Its rows are an output of the store, named by its path; its data are finished."""

    def make(rows="output/content.txt"):
        place = tmp_path / "store" / "corpus" / made.fingerprint[:16]
        overrides = [f"sources.rows.path={place}/{rows}", f"store={tmp_path}/store", "tracking=none"]
        return make_plan(load_pipeline(["pipeline=toy", "model=none", *overrides], CONF))

    written = WrittenStore(tmp_path / "store")
    made = written.stage("corpus", {"rows": written.source("rows")})
    make.made = made
    finish(make(), "data")
    return make


@pytest.mark.parametrize("rows", ["output/content.txt", "output", "output/*.txt", "../*/output/content.txt"])
def test_a_source_that_names_an_output_by_its_path_keeps_it(plan, rows):
    found = reads(plan(rows))
    assert node(plan.made) in found
    assert {name.partition("@")[0] for name in found} == {"corpus", "data", "model", "left", "right"}


def test_a_run_says_that_something_is_gone_before_it_begins(plan):
    made = plan()
    claim([made])
    shutil.rmtree(made.entry(made.stage("data")).path)
    with pytest.raises(ArtifactError, match=r"data/\w+: was there when the plan was made, .*; run again"):
        claim([made])


@pytest.fixture
def begun(plan):
    """The plan of a run that reuses its data, and goes on with another stage."""
    made = plan()
    left = made.entry(made.stage("left"))
    left.begin()
    save(left, 3)
    return make_plan(made.pipeline)


def test_what_a_run_reuses_or_resumes_from_was_used_now(plan, begun):
    found = reads(begun)
    used = [node(plan.made), *(node_key(name, begun.stage(name).fingerprint) for name in ("data", "left"))]
    for each in used:
        os.utime(found[each].output, (0, 0))
    claim([begun])
    assert all(found[each].output.stat().st_mtime > 0 for each in used)
    assert not found[node_key("right", begun.stage("right").fingerprint)].path.exists()


def test_a_run_that_would_go_on_does_not_begin_again_where_its_checkpoints_are_gone(begun):
    left = begun.entry(begun.stage("left"))
    left.checkpoints.clear()
    with pytest.raises(ArtifactError, match=r"left/\w+: was there when the plan was made, .*; run again"):
        claim([begun])
    finish(begun, "left")  # another run has
    claim([begun])


def test_it_says_so_too_of_an_output_that_a_source_names(plan):
    made = plan()
    shutil.rmtree(Store(made.pipeline.store).entry("corpus", plan.made.fingerprint).output)
    with pytest.raises(ArtifactError, match=r"corpus/.*content.txt: was there"):
        claim([made])


def test_a_run_that_would_go_on_waits_for_one_that_began_it_again(begun):
    left = begun.entry(begun.stage("left"))
    lock = Lock(left.path)
    assert lock.try_acquire()
    left.begin()
    with lock.holding():
        claim([begun])  # raises where it takes it for gone


def test_a_run_that_would_go_on_does_not_wait_for_gc_which_deletes_its_checkpoints(begun):
    left = begun.entry(begun.stage("left"))
    lock = Lock(left.path)
    assert lock.try_acquire()
    left.checkpoints.clear()
    shutil.rmtree(left.work, ignore_errors=True)
    with lock.holding(), pytest.raises(ArtifactError, match="run again"):
        claim([begun])


def test_a_rehearsal_reads_the_real_store(plan, tmp_path):
    short = scratch_plan(plan().pipeline, tmp_path / "scratch", num_steps=2, save_steps=1)
    assert node(plan.made) in reads(short)


def test_an_unfinished_output_may_be_named_too(plan):
    made = plan()
    (Store(made.pipeline.store).entry("corpus", plan.made.fingerprint).path / "manifest.json").unlink()
    claim([made])  # raises where it takes it for gone
    assert node(plan.made) in reads(made)
