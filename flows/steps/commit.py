"""A session as a stage of the store: its command log is the recipe, and can be executed again."""

import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from operator import attrgetter, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, cast

from flows.declare.config import typed
from flows.serving.model import find_model
from flows.steps.calls import CALLS, Load, Place, Save
from flows.steps.engine import CREATE, Engine, found_by
from flows.steps.group import Here, session_of, threads_of
from lineage.artifact import SOURCE, Kind, Source
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.digest import DigestCache, digest_files, digest_of
from lineage.filesystem.files import append_jsonl
from lineage.filesystem.lock import Lock
from lineage.fingerprint import fingerprint, short
from lineage.graph.diff import COMMAND_LOG as LOG
from lineage.graph.diff import digest_of_call
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
    from flows.steps.group import Group

# The log in the output: the session's settings in the first line, then a call a line; those of sessions whose saved
# states it loaded come before, with a number, after a line of that session's settings.
_ADAPTER_CONFIG = "adapter_config.json"
_Line = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A command log that was executed again.

    Args:
        files: of weights, and of adapters' settings.
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
        ConfigError: there is no such session, it took no step, or it loaded the state of another model.
    """
    if stage in RESERVED or "/" in stage or ENTRY_NAME.fullmatch(stage) or not stage.strip("."):
        raise ConfigError(f"--stage {stage}: a name of letters, digits and dashes is accepted; choose another")
    found = engine.records.session(session)
    if found is None:
        known = ", ".join(each["id"] for each in engine.records.sessions()) or "none"
        raise ConfigError(f"session {session}: there is none below {engine.root}; {known} is there")
    start, lines = time.time(), _Log(engine, session).lines
    text = "".join(json.dumps(each, sort_keys=True) + "\n" for each in lines)
    method, resources = engine.settings_of(json.loads(found["settings"]))
    method = replace(method, commands=_sha256(text))
    record, policy = _input(found_by(find, found))
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
        with _alone(resources):
            live = engine.loaded(session)
            steps = live.apply(attrgetter("step_number"))
            metrics = {
                **live.apply(methodcaller("write_model", entry.output, entry.work, policy)),
                "steps": float(steps),
            }
            live.close()
        (entry.output / LOG).write_text(text)
        metrics["calls"] = float(sum("name" in each for each in lines))
        for number, metric in enumerate(_reports(engine, session), start=1):
            append_jsonl(entry.metrics, {"step": number, "time": start, "metrics": metric})
            metrics |= metric
        files = digest_files(entry.output)
        made_by = replace(
            provenance_here(start), end=time.time(), code_digest=method.code_digest(), seed=method.seed,
            resources=json.loads(json.dumps(asdict(resources))), hardware=hardware(),
        )  # fmt: skip
        manifest = Manifest(
            pipeline=pipeline, stage=stage, method=f"{Steps.__module__}.{Steps.__qualname__}", recipe=method.recipe(),
            fingerprint=identity, inputs={"policy": record}, files=files, output_digest=digest_of(files),
            metrics=metrics, provenance=made_by, produces=Kind.CHECKPOINT,
        )  # fmt: skip
        entry.commit(manifest, lock)
    return entry.output


class _Log:
    """The calls that a session's weights depend on, in an order in which they can be executed.

    Attributes:
        lines: of the file.
    """

    def __init__(self, engine: Engine, session: str) -> None:
        self.engine, self.session, self.lines = engine, session, list[_Line]()
        self._numbers = {session: 0}  # sessions have no names in the log: these are random
        self._done: dict[str, int] = {}  # session -> its last call that is in the log
        log = engine.log(session)
        if not any(each["name"] == "step" for each in log):
            raise ConfigError(f"session {session}: it took no step, so that its model is its base; call step first")
        head = self._head(session)
        self._add(session, int(log[-1]["seq"]))
        self.lines.insert(0, head)

    def _head(self, session: str) -> _Line:
        found = self.engine.records.session(session)
        assert found is not None
        settings = json.loads(found["settings"])
        _, resources = self.engine.settings_of(settings)
        start = {"start": self._load(session, json.loads(found["start"]), CREATE)} if found["start"] else {}
        return {"settings": settings, "resources": asdict(resources), "threads": threads_of(resources), **start}

    def _add(self, session: str, last: int) -> None:
        """Adds the calls of a session up to one of them, each after what it loads."""
        number = self._numbers[session]
        own = {"session": number} if number else {}
        for each in self.engine.log(session):
            if not self._done.get(session, 0) < each["seq"] <= last:
                continue
            body = self.engine.body(session, each["id"])
            if each["name"] == Load.name:
                body = self._load(session, body, f"call {each['seq']}")
            call = {"seq": each["seq"], "name": each["name"], "body": body}
            self.lines.append({**call, "digest": digest_of_call(call), **own})
            self._done[session] = each["seq"]

    def _load(self, session: str, body: _Line, what: str) -> _Line:
        """The arguments of ``load``, once the calls that lead to the saved state are in the log."""
        other = str(body.get("session") or session)
        if other == session:
            return {**body, "session": None} if "session" in body else body
        records = self.engine.records
        mine, theirs = records.session(session), records.session(other)
        if mine is None or theirs is None or mine["model"] != theirs["model"]:
            raise ConfigError(
                f"session {session}: {what} loads of session {other}, which has another model: a stage has one; "
                "commit that session, and start this one from its stage"
            )
        saves = [
            each for each in self.engine.log(other)
            if each["name"] == Save.name and self.engine.body(other, each["id"])["to"] == body["saved"]
        ]  # fmt: skip
        if other not in self._numbers:
            number = self._numbers[other] = len(self._numbers)
            self.lines.append({"session": number, **self._head(other)})
        self._add(other, int(saves[0]["seq"]))
        return {**body, "session": self._numbers[other]}


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
    head, *lines = map(json.loads, text.splitlines())
    settings = {name: value for name, value in head["settings"].items() if name != "resources"}
    method = replace(typed(Steps, settings, "session"), commands=_sha256(text))
    if json.loads(json.dumps(method.recipe())) != manifest.recipe:
        raise ArtifactError(
            f"{entry.output / LOG}: is not the log of the recipe; restore it: posttrain verify says more"
        )
    policy, start = _policy(manifest, store, config_dir), time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch, _alone(Resources(**head["resources"])):
        output = Path(scratch, "output")
        session = _executed(head, lines, policy, Path(scratch))
        session.apply(methodcaller("write_model", output))
        session.close()
        files = _compared(output, digest_files(output))
    committed = _compared(entry.output, manifest.files)
    differ = sorted(name for name in files.keys() | committed.keys() if files.get(name) != committed.get(name))
    calls = sum("name" in each for each in lines)
    return Replayed(ref=ref, calls=calls, files=len(files), seconds=time.perf_counter() - start, differ=differ)


def _compared(output: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Digests of weights, and of adapters' settings, whose sets of layers are in another order each time."""
    found = {name: digest for name, digest in files.items() if name.endswith(".safetensors")}
    for name in files:
        if Path(name).name == _ADAPTER_CONFIG:
            config = json.loads((output / name).read_text())
            config.pop("base_model_name_or_path", None)  # the manifest has it; logs of earlier versions name none here
            ordered = {key: sorted(each, key=str) if isinstance(each, list) else each for key, each in config.items()}
            found[name] = _sha256(json.dumps(ordered, sort_keys=True))
    return found


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


def _executed(head: _Line, lines: list[_Line], policy: Input, scratch: Path) -> "Here | Group":
    """The session of a log, after its last call."""
    heads: dict[object, _Line] = {0: head}
    sessions: dict[object, Here | Group] = {}
    saves = {str(number): scratch / f"saves-{number}" for number in (each.get("session", 0) for each in lines)}

    def run(number: object, name: str, body: _Line, request: str) -> None:
        if "session" in body:  # a number; a name, in logs of earlier versions, is the session's own
            body = {**body, "session": str(body["session"]) if isinstance(body["session"], int) else None}
        call = typed(CALLS[name], body, name)
        place = Place(session=str(number), request_id=request, saves=saves)
        sessions[number].apply(partial(call.run, place=place))

    for line in lines:
        number = line.get("session", 0)
        if "name" not in line:
            heads[number] = line
            continue
        if number not in sessions:
            sessions[number] = _opened(heads[number], policy, scratch / f"work-{number}")
            if start := heads[number].get("start"):
                run(number, Load.name, cast(_Line, start), CREATE)
        if line["name"] not in CALLS or not isinstance(line["body"], dict):
            raise ArtifactError(
                f"{LOG}: call {line['seq']} is {line['name']}, and {', '.join(CALLS)} with arguments are accepted; "
                "replay it with the version of posttrain that wrote it"
            )
        run(number, str(line["name"]), line["body"], f"{line['seq']}")
    for number, each in sessions.items():
        if number:
            each.close()
    return sessions[0]


def _opened(head: _Line, policy: Input, folder: Path) -> "Here | Group":
    settings = {name: value for name, value in cast(_Line, head["settings"]).items() if name != "resources"}
    resources = Resources(**cast("dict[str, object]", head["resources"]))  # type: ignore[arg-type]
    ctx = TrainContext(output_dir=folder / "output", work_dir=folder / "work", resources=resources)
    return session_of(typed(Steps, settings, "session"), policy, ctx)


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
