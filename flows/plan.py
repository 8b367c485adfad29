"""The one decider: which stages run, which are reused, and why. Running nothing, importing nothing heavy."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from flows.pipeline import SOURCE, CodeDrift, Pipeline, Stage
from flows.preflight import check_models
from lineage.artifact import Source
from lineage.code import code_digest
from lineage.digest import DigestCache
from lineage.errors import ConfigError
from lineage.fingerprint import differences, fingerprint, short, without_nones
from lineage.lease import living_holder
from lineage.manifest import Manifest
from lineage.sources import Pinned, pin
from lineage.store import Entry, Store

State = Literal["run", "reuse", "resume"]


@dataclass(frozen=True, kw_only=True)
class PlannedInput:
    """What fills a slot: a stage's output to be, or a pinned source."""

    name: str
    fingerprint: str
    pinned: Pinned | None = None  # None where it is a stage

    @property
    def source(self) -> Source | None:
        return self.pinned.source if self.pinned else None


@dataclass(frozen=True, kw_only=True)
class PlannedStage:
    """One stage with its identity and what is to be done about it."""

    name: str
    stage: Stage
    fingerprint: str
    inputs: Mapping[str, PlannedInput]
    state: State
    reason: str
    code_digest: str
    rerun_drifted: bool  # a finished output of other code does not count as finished

    @property
    def upstream(self) -> list[str]:
        return [entry.name for entry in self.inputs.values() if entry.source is None]

    def is_finished(self, entry: Entry) -> bool:
        """Whether the store holds an output that this plan accepts."""
        if not entry.is_finished():
            return False
        manifest = entry.manifest()
        return manifest is not None and not (self.rerun_drifted and manifest.provenance.code_digest != self.code_digest)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every stage of a pipeline in execution order."""

    pipeline: Pipeline
    stages: list[PlannedStage]

    @property
    def stale(self) -> list[PlannedStage]:
        """The stages that have something to do."""
        return [planned for planned in self.stages if planned.state != "reuse"]

    def stage(self, name: str) -> PlannedStage:
        return next(planned for planned in self.stages if planned.name == name)

    def path_of(self, given: PlannedInput) -> Path:
        """Where an input lies: a stage's output, or the path of a source (of a hub id: its id)."""
        if given.source is None:
            return self.entry(self.stage(given.name)).output
        return Path(given.source.path).expanduser()

    def entry(self, planned: PlannedStage) -> Entry:
        return Store(self.pipeline.store).entry(planned.name, planned.fingerprint)

    def to_dict(self) -> dict[str, object]:
        """The object that ``plan --json`` prints."""
        return {
            "pipeline": self.pipeline.name,
            "store": str(self.pipeline.store),
            "stages": [self._row(planned) for planned in self.stages],
        }

    def _row(self, planned: PlannedStage) -> dict[str, object]:
        return {
            "stage": planned.name,
            "method": planned.stage.method.name(),
            "fingerprint": planned.fingerprint,
            "state": planned.state,
            "reason": planned.reason,
            "inputs": {slot: entry.fingerprint for slot, entry in planned.inputs.items()},
            "output": str(self.entry(planned).output),
        }


def make_plan(pipeline: Pipeline) -> Plan:
    """Fingerprints every stage and looks each one up in the store.

    Raises:
        ConfigError: a source does not exist or is no model, a chat template is lacking, or
            ``code_drift=refuse`` and a reused stage's code changed.
    """
    check_models(pipeline)
    store = Store(pipeline.store)
    digests = DigestCache(pipeline.store / "digests.json")
    known = {SOURCE + name: _pinned(name, pipeline.sources[name], digests) for name in pipeline.used_sources()}
    stages = []
    for name in pipeline.order():
        stage = pipeline.stages[name]
        inputs = {slot: known[pipeline.key(ref)] for slot, ref in stage.inputs.items()}
        planned = _plan_stage(name, stage, inputs, store, pipeline.code_drift)
        known[name] = PlannedInput(name=name, fingerprint=planned.fingerprint)
        stages.append(planned)
    return Plan(pipeline=pipeline, stages=stages)


def _pinned(name: str, source: Source, digests: DigestCache) -> PlannedInput:
    pinned = pin(name, source, digests)
    return PlannedInput(name=SOURCE + name, fingerprint=pinned.fingerprint, pinned=pinned)


def _plan_stage(
    name: str, stage: Stage, inputs: Mapping[str, PlannedInput], store: Store, drift: CodeDrift
) -> PlannedStage:
    recipe = stage.method.recipe()
    identity = fingerprint(recipe, {slot: entry.fingerprint for slot, entry in inputs.items()})
    code = code_digest(type(stage.method).__module__)
    entry = store.entry(name, identity)
    state, reason = _judge(name, entry, recipe, inputs, store)
    manifest = entry.manifest()
    if state == "reuse" and manifest and manifest.provenance.code_digest != code:
        state, reason = _drifted(name, drift, reason)
    return PlannedStage(
        name=name, stage=stage, fingerprint=identity, inputs=inputs, state=state, reason=reason,
        code_digest=code, rerun_drifted=drift == "rerun",
    )  # fmt: skip


def _judge(
    name: str, entry: Entry, recipe: Mapping[str, object], inputs: Mapping[str, PlannedInput], store: Store
) -> tuple[State, str]:
    manifest = entry.manifest()
    if manifest:
        missing = manifest.missing(entry.output)
        if missing:
            return "run", f"its output is damaged: {missing[0]} is missing"
        when = datetime.fromtimestamp(manifest.provenance.end).strftime("%Y-%m-%d %H:%M")
        return "reuse", f"finished {when}"
    holder = living_holder(entry.path)
    if holder:
        return "run", f"process {holder.pid} on {holder.host} is making it now: a run waits for it and reuses it"
    if entry.metrics.exists():
        return "run", f"an earlier attempt stopped at step {_last_step(entry)}; starts again"
    return "run", _why_stale(recipe, inputs, store.finished(name))


def _last_step(entry: Entry) -> int:
    for line in reversed(entry.metrics.read_text().splitlines()):
        with contextlib.suppress(ValueError):  # the last line may have been cut by the kill
            return int(json.loads(line)["step"])
    return 0


def _why_stale(recipe: Mapping[str, object], inputs: Mapping[str, PlannedInput], earlier: Iterator[Manifest]) -> str:
    """The fields that set this stage apart from the finished one that is most like it."""
    candidates = [list(_changes(recipe, inputs, manifest)) for manifest in earlier]
    # `min` keeps the first of equals, and the newest comes first.
    fewest = min(candidates, key=len, default=["never run"])
    return "; ".join(fewest)


def _changes(recipe: Mapping[str, object], inputs: Mapping[str, PlannedInput], manifest: Manifest) -> Iterator[str]:
    plain = without_nones(recipe)
    assert isinstance(plain, dict)
    yield from differences(manifest.recipe, plain)
    for slot in sorted(inputs.keys() | manifest.inputs.keys()):
        old, new = manifest.inputs.get(slot), inputs.get(slot)
        before = f"{old.artifact}@{short(old.fingerprint)}" if old else "(none)"
        after = f"{new.name}@{short(new.fingerprint)}" if new else "(none)"
        if before != after:
            yield f"input {slot}: {before} -> {after}"


def _drifted(name: str, drift: CodeDrift, reason: str) -> tuple[State, str]:
    if drift == "refuse":
        raise ConfigError(
            f"stage {name}: its code changed since its output was made, and code_drift=refuse; "
            "run with code_drift=rerun to make it again, or code_drift=warn to reuse it"
        )
    if drift == "rerun":
        return "run", "its code changed since (code_drift=rerun)"
    return "reuse", f"{reason}; its code changed since (code_drift=warn)"
