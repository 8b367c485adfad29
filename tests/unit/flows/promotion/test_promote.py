"""A promotion that something happens beside."""

import shutil

import pytest

from flows.planning.plan import make_plan
from flows.promotion.promote import promote
from lineage.errors import ArtifactError
from lineage.promotions import read_events
from lineage.store import Entry
from tests.finished import finish


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
        with pytest.raises(ArtifactError, match=r"was freed or damaged meanwhile; run its pipeline again"):
            promote(plan.pipeline, ref, "champion", why="", force=True)
    assert read_events(plan.pipeline.store) == []
    finish(make_plan(plan.pipeline), "left")
    promote(plan.pipeline, ref, "champion", why="", force=True)
    assert [event.alias for event in read_events(plan.pipeline.store)] == ["champion"]
