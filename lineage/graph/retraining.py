"""The cheapest retraining without something: what must run again, what can be reused, what is there already."""

from dataclasses import dataclass

from lineage.errors import ArtifactError
from lineage.graph.below import MODELS, Below
from lineage.graph.index import Index
from lineage.graph.index_queries import Indexed
from lineage.graph.places import node_key
from lineage.store import Entry


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """Of one pipeline as it stands: its view, or else its newest artifacts.

    Args:
        again: the stages to run again, in order.
        reused: the stages that it did not touch.
        replaced: the artifact of this pipeline that is itself what must go.
        restart: models that it did not touch and that the training starts from again.
        instead: stage to run again -> a finished model of that stage that it did not touch.
    """

    pipeline: str
    again: list[Indexed]
    reused: list[Indexed]
    replaced: list[Indexed]
    restart: list[Indexed]
    instead: dict[str, Indexed]

    @property
    def seconds(self) -> float:
        """What the stages took when they last ran, one after the other: an estimate."""
        return sum(each.end - each.start for each in self.again)


def retrainings(index: Index, below: Below, roots: list[str]) -> list[Retraining]:
    """One per pipeline that has something to run again."""
    made = [artifact for artifact in map(index.artifact, roots) if artifact]
    pipelines = dict.fromkeys([*(pipeline for pipeline, *_ in below.counts), *(each.pipeline for each in made)])
    found = [_retraining(index, below, roots, pipeline) for pipeline in pipelines]
    return [each for each in found if each.again]


def _retraining(index: Index, below: Below, roots: list[str], pipeline: str) -> Retraining:
    now = current(index, pipeline)
    again = [each for each in now if below.holds(each.id)]
    replaced = [each for each in now if each.id in roots and each not in again]
    reused = [each for each in now if each not in again and each not in replaced]
    read = {parent for each in again for parent, _ in index.parents(each.id)}
    restart = [each for each in reused if each.id in read and each.kind in MODELS]
    inner = {parent for each in again if each.kind in MODELS for parent, _ in index.parents(each.id)}
    instead = {}
    for each in again:
        other = below.newest_outside(pipeline, each.stage)
        if each.kind in MODELS and each.id not in inner and other and other.id not in roots:
            instead[each.stage] = other
    return Retraining(
        pipeline=pipeline, again=again, reused=reused, replaced=replaced, restart=restart, instead=instead
    )


def current(index: Index, pipeline: str) -> list[Indexed]:
    """The artifacts that a pipeline stands on now, one per stage, in the order in which they were finished.

    The view where the pipeline has one; else the newest artifact with all that it was made from, and so on for the
    stages that this left out.
    """
    found: dict[str, Indexed] = {}
    for start in _viewed(index, pipeline) or index.newest_of_each_stage(pipeline):
        if start.stage not in found:
            for each in [start, *reversed(index.ancestors([start.id]))]:
                found.setdefault(each.stage, each)
    return sorted(found.values(), key=lambda each: (each.end, each.id))


def _viewed(index: Index, pipeline: str) -> list[Indexed]:
    viewed = []
    for path in (index.store / "pipelines" / pipeline).glob("*/manifest.json"):
        try:
            manifest = Entry(path.parent).manifest()
        except ArtifactError:
            continue
        artifact = index.artifact(node_key(manifest.stage, manifest.fingerprint)) if manifest else None
        viewed += [artifact] if artifact else []
    return sorted(viewed, key=lambda each: -each.end)
