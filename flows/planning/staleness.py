"""Why a stage is reused or runs: what its place in the store says, and the fields that set it apart."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from flows.declare.pipeline import CodeDrift, Pipeline
from flows.planning.hyperparameters import former_defaults
from lineage.attempts import attempts, earlier_codes
from lineage.errors import ConfigError
from lineage.fingerprint import differences, short, without_nones
from lineage.lock import owner
from lineage.manifest import InputRecord, Manifest
from lineage.metrics_file import last_step
from lineage.store import Entry, Store
from tasks.recipe import Method, TrainingRecipe

if TYPE_CHECKING:
    from flows.planning.plan import PlannedInput

State = Literal["run", "reuse", "resume"]


def judge(
    name: str, entry: Entry, method: Method, inputs: Mapping[str, "PlannedInput"], store: Store
) -> tuple[State, str]:
    """What is to be done about a stage whose code did not change, and why."""
    manifest = entry.manifest()
    if manifest:
        missing = manifest.missing(entry.output)
        if missing:
            return "run", f"its output is damaged: {missing[0]} is missing"
        when = datetime.fromtimestamp(manifest.provenance.end).strftime("%Y-%m-%d %H:%M")
        return "reuse", f"finished {when}"
    busy = owner(entry.path)
    if busy:
        return "run", f"process {busy.pid} on {busy.host} is making it now: a run waits for it and reuses it"
    checkpoint = entry.checkpoints.newest()
    if checkpoint:
        when = datetime.fromtimestamp(checkpoint.time).strftime("%Y-%m-%d %H:%M")
        return "resume", f"goes on from step {checkpoint.step}, saved {when}; {_reached(entry)}"
    if entry.checkpoints.steps():
        return "resume", f"none of its checkpoints is whole; {_reached(entry)}"
    if entry.metrics.exists():
        return "run", f"{_reached(entry)}, before its first checkpoint; starts again"
    return "run", _why_stale(method, inputs, store.finished(name))


def reused(name: str, entry: Entry, reason: str, code: str, pipeline: Pipeline) -> tuple[State, str]:
    """What is to be done about a finished stage.

    Raises:
        ConfigError: ``code_drift=refuse``, and other code made it, or a part of its steps.
    """
    manifest = entry.manifest()
    assert manifest is not None
    if manifest.provenance.code_digests != [code]:
        return _drifted(name, pipeline.code_drift, reason)
    if name in pipeline.restart:
        reason += f"; restart=[{name}] is for what is unfinished: change a field, or delete {entry.path}"
    return "reuse", reason


def _drifted(name: str, drift: CodeDrift, reason: str) -> tuple[State, str]:
    if drift == "refuse":
        raise ConfigError(
            f"stage {name}: its code changed since its output was made, and code_drift=refuse; "
            "run with code_drift=rerun to make it again, or code_drift=warn to reuse it"
        )
    if drift == "rerun":
        return "run", "its code changed since (code_drift=rerun)"
    return "reuse", f"{reason}; its code changed since (code_drift=warn)"


def resumed(name: str, entry: Entry, reason: str, code: str, pipeline: Pipeline) -> tuple[State, str]:
    """What is to be done about a stage that has checkpoints.

    Raises:
        ConfigError: ``code_drift=refuse``, and other code trained some of its steps.
    """
    if name in pipeline.restart:
        return "run", f"restart=[{name}]: starts again from step 0; {_reached(entry)}"
    if not _other_code(entry, code):
        return "resume", reason
    if pipeline.code_drift == "refuse":
        raise ConfigError(
            f"stage {name}: its code changed since it began ({reason}), and code_drift=refuse; "
            f"run with restart=[{name}] to begin again, or code_drift=warn to go on"
        )
    if pipeline.code_drift == "rerun":
        return "run", f"its code changed since an attempt before (code_drift=rerun): starts again; {_reached(entry)}"
    return "resume", f"{reason}; its code changed since (code_drift=warn)"


def restarts(name: str, entry: Entry, code: str, pipeline: Pipeline) -> bool:
    """Whether it was said that a stage begins at step 0, whatever checkpoints it has when its turn comes."""
    return name in pipeline.restart or (pipeline.code_drift == "rerun" and _other_code(entry, code))


def _other_code(entry: Entry, code: str) -> bool:
    steps = entry.checkpoints.steps()
    return bool(earlier_codes(attempts(entry.path), steps[-1] if steps else None, code))


def _reached(entry: Entry) -> str:
    return f"the attempt before ended at step {last_step(entry.metrics)}"


def _why_stale(method: Method, inputs: Mapping[str, "PlannedInput"], earlier: Iterator[Manifest]) -> str:
    """The fields that set this stage apart from the finished one that is most like it."""
    recipe = method.recipe()
    candidates = [(list(_changes(recipe, inputs, manifest)), manifest) for manifest in earlier]
    if not candidates:
        return "never run"
    # `min` keeps the first of equals, and the newest comes first.
    fewest, manifest = min(candidates, key=lambda each: len(each[0]))
    former = former_defaults(method, manifest.recipe) if isinstance(method, TrainingRecipe) else []
    return "; ".join([*fewest, *former])


def _changes(recipe: Mapping[str, object], inputs: Mapping[str, "PlannedInput"], manifest: Manifest) -> Iterator[str]:
    plain = without_nones(recipe)
    assert isinstance(plain, dict)
    yield from differences(manifest.recipe, plain)
    for slot in sorted(inputs.keys() | manifest.inputs.keys()):
        old, new = manifest.inputs.get(slot), inputs.get(slot)
        before = f"{old.artifact}@{short(old.fingerprint)}" if old else "(none)"
        after = f"{new.name}@{short(new.fingerprint)}" if new else "(none)"
        if before != after:
            yield f"input {slot}: {before} -> {after}{_other_reading(old, new)}"


def _other_reading(old: InputRecord | None, new: "PlannedInput | None") -> str:
    """What is stated otherwise of a source than it was; empty where only its bytes changed, or it is another one."""
    if not (old and old.source and new and new.pinned and old.artifact == new.name):
        return ""
    changes = "; ".join(differences(old.source.stated(), new.pinned.record.stated()))
    return f" ({changes})" if changes else ""
