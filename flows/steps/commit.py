"""A session as a stage of the store: its command log is the recipe, and can be executed again."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flows.declare.config import typed
from flows.serving.model import find_model
from flows.steps.calls import CALLS, Load, Place
from flows.steps.engine import Engine, threads_of
from lineage.artifact import SOURCE, Kind, Source
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.digest import DigestCache, digest_files, digest_of
from lineage.filesystem.files import append_jsonl
from lineage.filesystem.lock import Lock
from lineage.fingerprint import fingerprint, short
from lineage.graph.index import Index
from lineage.graph.refs import resolve
from lineage.record.environment import hardware, provenance_here
from lineage.source.sources import pin
from lineage.store import ENTRY_NAME, RESERVED, InputRecord, Manifest, Store, create_store
from tasks.context import Resources, TrainContext
from tasks.recipe import Input
from tasks.steps import Steps

if TYPE_CHECKING:
    from flows.serving.model import Found
    from tasks.train.steps.session import Session

LOG = "commands.jsonl"  # in the output: settings of the session in the first line, then a call a line


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A command log that was executed again.

    Args:
        files: of weights.
        differ: those of them that are others than those committed.
    """

    ref: str
    calls: int
    files: int
    seconds: float
    differ: list[str]


def commit(
    engine: Engine, store: Path, session: str, stage: str, find: "Callable[[str], Found]", pipeline: str
) -> Path:
    """Writes the model of a session as an artifact of the store; returns its output.

    Raises:
        ConfigError: there is no such session, it took no step, or it depends on another session.
    """
    if stage in RESERVED or "/" in stage or ENTRY_NAME.fullmatch(stage) or not stage.strip("."):
        raise ConfigError(f"--stage {stage}: a name of letters, digits and dashes is accepted; choose another")
    found = engine.records.session(session)
    if found is None:
        known = ", ".join(each["id"] for each in engine.records.sessions()) or "none"
        raise ConfigError(f"session {session}: there is none below {engine.root}; {known} is there")
    start, log = time.time(), _log(engine, session, found["start"])
    settings = json.loads(found["settings"])
    head = {"settings": settings, "resources": asdict(engine.resources), "threads": threads_of(engine.resources)}
    text = "".join(json.dumps(each, sort_keys=True) + "\n" for each in (head, *log))
    method = replace(typed(Steps, settings, "session"), commands=_sha256(text))
    record, policy = _input(find(found["model"]))
    identity = fingerprint(method.recipe(), {"policy": policy})
    create_store(store)
    entry = Store(store).entry(stage, identity)
    if entry.is_finished():
        return entry.output
    lock = Lock(entry.path)
    if not lock.try_acquire():
        raise ConfigError(f"{entry.path}: another process writes it; wait for its end")
    with lock.holding():
        entry.begin()
        with _alone(engine.resources):
            live = engine.loaded(session)
            live.run.ctx = replace(live.run.ctx, output_dir=entry.output, work_dir=entry.work)
            metrics = {**live.write_model(), "steps": float(live.step_number)}
        (entry.output / LOG).write_text(text)
        for number, metric in enumerate(_reports(engine, session), start=1):
            append_jsonl(entry.metrics, {"step": number, "time": start, "metrics": metric})
            metrics |= metric
        files = digest_files(entry.output)
        made_by = replace(
            provenance_here(start), end=time.time(), code_digest=method.code_digest(), seed=method.seed,
            resources=json.loads(json.dumps(asdict(engine.resources))), hardware=hardware(),
        )  # fmt: skip
        manifest = Manifest(
            pipeline=pipeline, stage=stage, method=f"{Steps.__module__}.{Steps.__qualname__}", recipe=method.recipe(),
            fingerprint=identity, inputs={"policy": record}, files=files, output_digest=digest_of(files),
            metrics=metrics, provenance=made_by, produces=Kind.CHECKPOINT,
        )  # fmt: skip
        entry.commit(manifest, lock)
    return entry.output


def _log(engine: Engine, session: str, start: object) -> list[dict[str, object]]:
    """The calls that changed a session, with their arguments."""
    other = "the state of another session is no artifact; commit that session, and start this one from its stage"
    if start:
        raise ConfigError(f"session {session}: it started from {start}: {other}")
    found = []
    for each in engine.log(session):
        body = engine.body(session, each["id"])
        if each["name"] == Load.name and body.get("session") not in (None, session):
            raise ConfigError(f"session {session}: call {each['seq']} loads of session {body['session']}: {other}")
        found.append({"seq": each["seq"], "name": each["name"], "body": body})
    if not any(each["name"] == "step" for each in found):
        raise ConfigError(f"session {session}: it took no step, so that its model is its base; call step first")
    return found


def _reports(engine: Engine, session: str) -> Iterator[dict[str, float]]:
    """The metrics of each step: the losses of its backward calls, and its own."""
    loss, tokens = 0.0, 0
    for each in engine.log(session):
        if each["name"] not in ("backward", "step"):
            continue
        result = json.loads(engine.outcome(each["id"]).body)
        if each["name"] == "backward":
            loss, tokens = loss + (result["loss"] or 0.0), tokens + result["num_tokens"]
            continue
        own = {"loss": loss, "num_tokens": float(tokens), "learning_rate": result["learning_rate"]}
        yield own if result["grad_norm"] is None else {**own, "grad_norm": result["grad_norm"]}
        loss = 0.0


def _input(found: "Found") -> tuple[InputRecord, str]:
    """The model that a session started from, for the manifest; and its fingerprint."""
    if found.manifest is not None:
        made = found.manifest
        record = InputRecord(artifact=made.stage, fingerprint=made.fingerprint, digest=made.output_digest)
        return record, made.fingerprint
    source = Source(path=str(found.path.absolute()), kind=Kind.CHECKPOINT)
    pinned = pin(found.name, source, DigestCache(None))
    record = InputRecord(
        artifact=f"{SOURCE}{found.name}", fingerprint=pinned.fingerprint, digest=pinned.digest, source=pinned.record
    )
    return record, pinned.fingerprint


def replay(ref: str, store: Path, config_dir: Path | None = None) -> Replayed:
    """Executes the command log of a committed session again, and compares the files that it writes.

    Raises:
        ConfigError: the artifact has no command log.
        ArtifactError: the log or the model that it starts from is not what was committed.
    """
    with Index(store) as index:
        entry = resolve(ref, index).entry
    manifest = entry.manifest() if entry else None
    if entry is None or manifest is None or LOG not in manifest.files:
        raise ConfigError(f"{ref}: has no command log; a stage that posttrain steps commit wrote is accepted")
    text = (entry.output / LOG).read_text()
    head, *calls = map(json.loads, text.splitlines())
    method = replace(typed(Steps, head["settings"], "session"), commands=_sha256(text))
    if json.loads(json.dumps(method.recipe())) != manifest.recipe:
        raise ArtifactError(
            f"{entry.output / LOG}: is not the log of the recipe; restore it: posttrain verify says more"
        )
    policy, start = _policy(manifest, store, config_dir), time.perf_counter()
    resources = Resources(**head["resources"])
    with tempfile.TemporaryDirectory() as scratch, _alone(resources):
        from tasks.train.steps.session import Session

        ctx = TrainContext(output_dir=Path(scratch, "output"), work_dir=Path(scratch, "work"), resources=resources)
        session = Session(replace(method, commands=None), policy, ctx)
        _execute(session, calls, Path(scratch, "saves"))
        session.write_model()
        files = _weights(digest_files(ctx.output_dir))
    committed = _weights(manifest.files)
    differ = sorted(name for name in files.keys() | committed.keys() if files.get(name) != committed.get(name))
    return Replayed(ref=ref, calls=len(calls), files=len(files), seconds=time.perf_counter() - start, differ=differ)


def _weights(files: Mapping[str, str]) -> dict[str, str]:
    """The files of weights; an adapter's config has its layers in another order each time."""
    return {name: digest for name, digest in files.items() if name.endswith(".safetensors")}


def _policy(manifest: Manifest, store: Path, config_dir: Path | None) -> Input:
    """The model that a session started from, if it is still the same."""
    record = manifest.inputs["policy"]
    if record.source is None:
        name = f"{record.artifact}@{short(record.fingerprint)}"
        return find_model(name, [f"store={store}"], config_dir).input
    path = Path(record.source.path)
    pinned = pin(path.name, Source(path=str(path), kind=Kind.CHECKPOINT), DigestCache(None))
    if pinned.fingerprint != record.fingerprint:
        raise ArtifactError(f"{path}: is not the model that the session started from; restore it")
    name = record.artifact.removeprefix(SOURCE)
    return Input(name=name, kind=Kind.CHECKPOINT, fingerprint=record.fingerprint, path=path)


def _execute(session: "Session", calls: list[dict[str, object]], saves: Path) -> None:
    for each in calls:
        name, body = str(each["name"]), each["body"]
        assert isinstance(body, dict)
        if name == Load.name:
            body = {**body, "session": None}
        place = Place(session="", request_id=f"{each['seq']}", saves={"": saves})
        call = typed(CALLS[name], body, name)
        call.run(session, place)


@contextmanager
def _alone(resources: Resources) -> Iterator[None]:
    """The number of threads that the server has: another one gives other last bits."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads_of(resources))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def as_dict(found: Replayed) -> Mapping[str, object]:
    """For ``--json``."""
    return {**asdict(found), "equal": not found.differ}
