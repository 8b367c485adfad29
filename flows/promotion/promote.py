"""Moves aliases of models: behind a passing verdict, or back to the holder before."""

import getpass
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from flows.declare.pipeline import Pipeline
from flows.promotion.standing import require_verdict
from lineage.artifact import MODELS
from lineage.errors import ArtifactError, ConfigError
from lineage.fingerprint import short
from lineage.graph.ancestry import ancestry
from lineage.graph.index import Index
from lineage.graph.places import node_key
from lineage.graph.refs import resolve
from lineage.labels import all_labels, require_commercial
from lineage.manifest import Manifest
from lineage.promotions import Event, append, locked, read_events, stacks
from lineage.store import Entry, Store

_ALIAS = re.compile(r"(?!latest$|v\d+$)[A-Za-z0-9_-]+")  # what MLflow accepts too


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What became of an alias.

    Args:
        event: None: the alias names that model already.
        before: the promotion of the holder until now.
    """

    alias: str
    entry: Entry
    manifest: Manifest
    event: Event | None
    before: Event | None


def promote(pipeline: Pipeline, ref: str, alias: str, *, why: str, force: bool) -> Moved:
    """Gives an alias to a model whose newest verdict passes.

    Args:
        force: promotes without such a verdict, and is recorded; no damage and no licence is passed over.

    Raises:
        ConfigError: ``ref`` names no model, or ``alias`` is no name for an alias.
        ArtifactError: the model, or its verdict, is not what was committed.
        GateError: no verdict lets it pass, or a licence forbids it.
    """
    if not _ALIAS.fullmatch(alias):
        raise ConfigError(
            f"--alias {alias}: is no name for an alias; letters, digits, '_' and '-' are accepted, and neither "
            "'latest' nor 'v1'"
        )
    with Index(pipeline.store) as index:
        found = resolve(ref, index)
        if found.entry is None:
            raise ConfigError(f"{ref} is the source {found.node}; an alias names a model that a stage made")
        manifest = found.entry.require_intact()
        if manifest.produces not in (*MODELS, None):  # None: recorded before manifests said what they are of
            raise ConfigError(f"{ref} is {found.node}, which is {manifest.produces}; an alias names a model")
        with locked(pipeline.store):
            if not found.entry.is_finished():  # reading every byte took its time; under this lock nothing is freed
                raise ArtifactError(f"{found.entry.path}: was freed or damaged meanwhile; run its pipeline again")
            events = read_events(pipeline.store)
            commercial = _is_commercial(pipeline, alias, events)
            labels = _permitted(pipeline, index, found.node, alias, commercial=commercial)
            before = next(reversed(stacks(events).get(alias, [])), None)
            if before and _is_of(before, manifest):
                return Moved(alias=alias, entry=found.entry, manifest=manifest, event=None, before=before)
            verdict = require_verdict(index, manifest, alias, events, force=force)
            event = Event(
                action="promote", alias=alias, fingerprint=manifest.fingerprint, digest=manifest.output_digest,
                stage=manifest.stage, who=_who(), why=why, verdict=verdict, forced=force and verdict is None,
                labels=labels, commercial=commercial,
            )  # fmt: skip
            append(pipeline.store, event)
    return Moved(alias=alias, entry=found.entry, manifest=manifest, event=event, before=before)


def roll_back(pipeline: Pipeline, alias: str, *, why: str) -> Moved:
    """Gives an alias back to its holder before.

    Raises:
        ConfigError: there is none.
        ArtifactError: that model is not what was committed.
        GateError: its licence forbids it by now.
    """
    with Index(pipeline.store) as index, locked(pipeline.store):
        events = read_events(pipeline.store)
        stack = stacks(events).get(alias, [])
        if len(stack) < 2:
            found = f"{stack[0].stage}@{short(stack[0].fingerprint)} is its first" if stack else "no model holds it"
            raise ConfigError(f"--alias {alias}: there is no holder to go back to: {found}; see posttrain promote")
        before, back = stack[-1], stack[-2]
        assert back.stage is not None  # a promotion says whose output it is
        entry = Store(pipeline.store).entry(back.stage, back.fingerprint)
        manifest = entry.require_intact()
        commercial = _is_commercial(pipeline, alias, events)
        labels = _permitted(pipeline, index, node_key(back.stage, back.fingerprint), alias, commercial=commercial)
        event = Event(
            action="rollback", alias=alias, fingerprint=manifest.fingerprint, digest=manifest.output_digest,
            stage=manifest.stage, who=_who(), why=why, verdict=back.verdict, forced=back.forced, labels=labels,
            commercial=commercial,
        )  # fmt: skip
        append(pipeline.store, event)
    return Moved(alias=alias, entry=entry, manifest=manifest, event=event, before=before)


def _is_commercial(pipeline: Pipeline, alias: str, events: Sequence[Event]) -> bool:
    """As the configuration states; where it is silent, as at the last move: a mark on one command line stays."""
    if alias in pipeline.aliases:
        return pipeline.aliases[alias].commercial
    moves = [event for event in events if event.alias == alias]
    return bool(moves) and moves[-1].commercial


def _permitted(pipeline: Pipeline, index: Index, node: str, alias: str, *, commercial: bool) -> list[str]:
    """The labels of all that a model was made from, once its licence permits the alias."""
    graph = ancestry(index, node)
    stated = {name: source.labels for name, source in pipeline.sources.items()}
    labels = all_labels(graph, stated)
    if commercial:
        require_commercial(graph, labels, pipeline.non_commercial_labels, alias)
    return sorted(set().union(*labels.values()))


def _is_of(event: Event, manifest: Manifest) -> bool:
    wanted = (manifest.stage, manifest.fingerprint, manifest.output_digest)
    return (event.stage, event.fingerprint, event.digest) == wanted


def _who() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"
