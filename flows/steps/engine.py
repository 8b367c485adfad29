"""The engine behind all clients: it accepts calls, runs them in the order of their numbers, and keeps every result.

A call is on the disk and in the database before its number is returned. The command log of a session is its calls
that change it; its state is the last snapshot and the calls after that, so that a session that was killed, or unloaded
because no client used it, continues to the bit.
"""

import gc
import heapq
import json
import logging
import math
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import orjson
from sqlalchemy.exc import SQLAlchemyError

from flows.declare.config import typed
from flows.steps.calls import CALLS, Call, Generate, Load, Place
from flows.steps.group import Group, Here, session_of, threads_of
from flows.steps.records import DONE, FAILED, QUEUED, Records
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.filesystem.digest import DigestCache, digest_all
from lineage.fingerprint import digest_json
from tasks.context import Resources, TrainContext
from tasks.steps import Steps, require_workers

if TYPE_CHECKING:
    from sqlalchemy import RowMapping

    from tasks.recipe import Input
    from tasks.train.steps.session import Bases, Session

logger = logging.getLogger(__name__)
Value = TypeVar("Value")
CREATE = "create"
_ID, _SESSION = re.compile(r"[A-Za-z0-9-]{1,64}"), re.compile(r"[A-Za-z0-9:-]{1,64}")
_SNAPSHOT = "snapshot"
_RETRY_SECONDS = 5.0
_MODEL_FILES = ("*.safetensors", "*.bin", "*config.json")
_FREE = ("step", "zero_grad", "save", "load")  # without tokens: a key whose quota is used up keeps what it trained
_RESOURCES = ("num_workers", "num_nodes", "sharding", "cpus_per_worker")  # that a session sets; the server has the rest


class RefusedError(PipelineError):
    """A request that is refused with a status of HTTP."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(status, sentence)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[1])


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server allows.

    Args:
        lease_minutes: a session that was not used for so long leaves the memory; its next call loads it again.
        max_live: sessions in memory.
        snapshot_seconds: of computation, after which a session's state is written, so that a restart has less to redo;
            and 20 times as long as that took the last time.
        max_queued: calls of a session that wait.
        max_workers: of a session.
    """

    lease_minutes: float = 30.0
    max_live: int = 8
    snapshot_seconds: float = 60.0
    max_queued: int = 20_000
    max_workers: int = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A call, and its result if it has one."""

    request_id: str
    session: str
    seq: int | None
    call: str
    status: int  # of HTTP: 202 while it waits
    body: bytes  # JSON: the result, or {"error": ...}


@dataclass
class _Order:
    """The calls of one session that wait.

    Attributes:
        next: the number that runs next.
        top: the largest number so far.
        held: number -> request.
        arrived: when the last call came.
    """

    next: int = 0
    top: int = -1
    waiting: int = 0
    held: dict[int, str] = field(default_factory=dict)
    arrived: float = field(default_factory=time.monotonic)


@dataclass
class _Live:
    """A session in memory.

    Attributes:
        applied: number of the last call that changed it.
        since: seconds of computation since the last snapshot.
        writing: seconds that the last snapshot took.
    """

    session: Here | Group
    applied: int
    used: float
    since: float = 0.0
    writing: float = 0.0


class Engine:
    """Sessions and their calls below one folder.

    Args:
        find: the model that a name stands for.
    """

    def __init__(
        self, root: Path, find: "Callable[[str], Input]", *, database: str | None = None,
        resources: Resources | None = None, limits: Limits | None = None,
    ) -> None:  # fmt: skip
        self.root, self._find = root, find
        self.records = Records(root, database)
        if database:
            self.records.require_root(root, database)
        self.resources, self.limits = resources or Resources(), limits or Limits()
        self._condition = threading.Condition()
        self._orders: dict[str, _Order] = {}
        self._ready: list[tuple[int, str]] = []
        self._number = 0
        self._live: dict[str, _Live] = {}
        self._bases: Bases = {}
        self._digests = DigestCache(None)
        self._callbacks: dict[str, list[Callable[[], None]]] = {}  # of each call without a result
        self._ends = False
        self._thread = threading.Thread(target=self._work, name="steps", daemon=True)

    def start(self) -> None:
        """Takes over what an earlier process left, and begins to run calls."""
        self._adopt()
        self._thread.start()

    def end(self) -> None:
        """Begins no other call, and answers requests that wait for one, which is there after the next start."""
        with self._condition:
            self._ends = True
            self._condition.notify_all()
            for notify in chain.from_iterable(self._callbacks.values()):
                notify()

    def close(self) -> None:
        """Ends after the call that runs now; live sessions are written, so that the next start redoes nothing."""
        self.end()
        if self._thread.is_alive():
            self._thread.join()
        for name in list(self._live):
            self._unload(name)
        self.records.close()

    # --- accepting

    def authenticate(self, key: str | None) -> "RowMapping":
        """The row of a key (RefusedError: there is no such key)."""
        found = self.records.key_of(key) if key else None
        if found is None:
            what = "is not one of this server" if key else "is missing"
            raise RefusedError(
                401, f"the key {what}; send one as Authorization: Bearer KEY; posttrain steps key NAME makes one"
            )
        return found

    def create(
        self, key: "RowMapping", body: Mapping[str, object], session: str | None = None, client: str = "rest"
    ) -> Outcome:
        """Accepts a new session.

        Args:
            body: ``model``, the fields of ``tasks.steps.Steps``, ``resources``: its workers and their ``sharding``, and
                ``start``: the saved state that it starts from, as the arguments of ``load``.
            session: its name, with which a client may send the request again; None: a new one.
        """
        settings = dict(body)
        model, name = settings.pop("model", None), session or uuid.uuid4().hex[:16]
        if not _SESSION.fullmatch(name):
            raise RefusedError(422, f"session {name}: letters, digits, dashes and colons are accepted")
        if not isinstance(model, str) or not model:
            raise RefusedError(422, "model is missing; a REF of the store or a directory is accepted")
        if "commands" in settings:
            raise RefusedError(422, "commands is set when a session is committed; leave it out")
        if (start := settings.pop("start", None)) is not None:
            loading = typed(Load, start, "start") if isinstance(start, dict) else None
            if loading is None or loading.session is None:
                raise RefusedError(422, "start: an object with session and saved is accepted")
            self.require_session(key, loading.session)
        method, resources = self.settings_of(settings)
        require_workers(method, resources)
        if resources.num_workers > self.limits.max_workers:
            raise RefusedError(
                422, f"resources.num_workers={resources.num_workers}: up to {self.limits.max_workers} are accepted, as "
                "posttrain steps serve --max-workers sets it"
            )  # fmt: skip
        content = _json_of(body)
        body_digest = digest_json(body)
        request_id, row = uuid.uuid4().hex, {"model": model, "settings": json.dumps(settings)}
        with self._condition:
            known = self.records.call_at(name, 0)
            if known is not None:
                return self._same(known, body_digest, key)
            self._require_quota(key, sessions=True)
            _replace(self._body(name, request_id), content)
            self._orders[name] = _Order()
            self._add(
                key["name"], client, name, request_id, 0, CREATE, body_digest, changes=True,
                opens={**row, "start": start and json.dumps(start)},
            )  # fmt: skip
        return _accepted(request_id, name, 0, CREATE)

    def settings_of(self, settings: Mapping[str, object]) -> tuple[Steps, Resources]:
        """The training of a session's settings, and its workers (ConfigError: they are no settings of a session)."""
        own, requested = dict(settings), settings.get("resources") or {}
        own.pop("resources", None)
        if not isinstance(requested, dict) or (unknown := sorted(requested.keys() - set(_RESOURCES))):
            found = unknown[0] if isinstance(requested, dict) else json.dumps(requested)
            raise ConfigError(f"session.resources: {found}; an object of {', '.join(_RESOURCES)} is accepted")
        values = {**asdict(self.resources), **requested}
        return typed(Steps, own, "session"), typed(Resources, values, "session.resources")

    def accept(
        self, key: "RowMapping", session: str, name: str, body: Mapping[str, object], *, seq: int | None = None,
        request_id: str | None = None, client: str = "rest",
    ) -> Outcome:  # fmt: skip
        """Accepts a call: from here on it is run, once.

        Args:
            seq: its number among the session's; a gap before it is waited for. None: a call that changes the session
                comes after all others, and one that only reads runs as soon as it can.
            request_id: chosen by a client that may send the call again; None: a new one.

        Raises:
            RefusedError, ConfigError: the call is refused, and leaves no trace in the session.
        """
        if name not in CALLS:
            raise RefusedError(404, f"{name}: {', '.join(CALLS)} are accepted")
        self.require_session(key, session)
        call, digest = typed(CALLS[name], body, name, is_exact=True), digest_json({"call": name, **body})
        request_id, content = uuid.uuid4().hex if request_id is None else request_id, _json_of(body)
        if not _ID.fullmatch(request_id):
            raise RefusedError(422, f"id={request_id!r}: 1 to 64 letters, digits and dashes are accepted")
        if seq is not None and not 1 <= seq < 2**31:
            raise RefusedError(422, f"seq={seq}: numbers of calls are 1 to {2**31 - 1}; send the next one")
        with self._condition:
            known = self.records.call(request_id)
            if known is None and seq is not None:
                known = self.records.call_at(session, seq)
            if known is not None:
                return self._same(known, digest, key, seq)
            order = self._orders[session]
            if seq is None and call.changes:
                seq = order.top + 1
            elif seq is not None and seq < order.next:
                raise RefusedError(400, f"seq={seq}: {order.next} is the next number of this session; send that")
            if order.waiting >= self.limits.max_queued:
                raise RefusedError(429, f"{order.waiting} calls of this session wait; send more when some are done")
            if name not in _FREE:
                self._require_quota(key, sessions=False)
            _replace(self._body(session, request_id), content)
            self._add(key["name"], client, session, request_id, seq, name, digest, changes=call.changes)
        return _accepted(request_id, session, seq, name)

    def require_session(self, key: "RowMapping", session: str) -> "RowMapping":
        """A session of a key that is not closed."""
        found = self.records.session(session)
        if found is None:
            raise RefusedError(404, f"session {session}: there is none; create one first")
        if found["key"] != key["name"]:
            raise RefusedError(403, f"session {session} is of another key; use one of yours")
        if found["state"] != "open":
            raise RefusedError(410, f"session {session} is {found['state']}; create another")
        return found

    def end_session(self, key: "RowMapping", session: str) -> None:
        """Closes a session: its log and its saved states stay."""
        try:
            self.require_session(key, session)
        except RefusedError as error:
            if error.status == 410:  # it is closed already
                return
            raise
        self.records.set_session(session, state="closed")
        if live := self._live.get(session):
            live.used = -math.inf  # it leaves the memory next

    def outcome(self, request_id: str, key: "RowMapping | None" = None) -> Outcome:
        """A call, and its result (RefusedError: there is no such call of this key)."""
        found = self.records.call(request_id)
        if found is None:
            raise RefusedError(404, f"request {request_id}: there is none")
        if key is not None:
            owner = self.records.session(found["session"])
            if owner is None or owner["key"] != key["name"]:
                raise RefusedError(403, f"request {request_id} is of another key; ask for one of yours")
        ended = found["state"] != QUEUED
        return Outcome(
            request_id=request_id, session=found["session"], seq=found["seq"], call=found["name"],
            status=found["status"] if ended else 202,
            body=self._result(found["session"], request_id).read_bytes() if ended else b"{}",
        )  # fmt: skip

    def when_done(self, request_id: str, notify: Callable[[], None]) -> None:
        """Calls ``notify`` once the call has its result, or now."""
        with self._condition:
            if request_id in self._callbacks and not self._ends:
                self._callbacks[request_id].append(notify)
                return
        notify()

    def info(self, session: str) -> dict[str, object]:
        """What a session is, and which call it waits for."""
        found = self.records.session(session)
        assert found is not None
        order = self._orders.get(session, _Order())
        return {
            "session": session, "model": found["model"], "settings": json.loads(found["settings"]),
            "state": found["state"], "next": order.next, "held": sorted(order.held)[:16], "waiting": order.waiting,
            "in_memory": session in self._live,
        }  # fmt: skip

    def _same(self, known: "RowMapping", digest: str, key: "RowMapping", seq: int | None = None) -> Outcome:
        """The outcome of a call that is sent again."""
        if known["digest"] != digest:
            which = f"seq={seq}" if seq is not None else f"request {known['id']}"
            raise RefusedError(400, f"{which}: was another call before; a call that is sent again must be the same")
        return self.outcome(known["id"], key)

    def _require_quota(self, key: "RowMapping", *, sessions: bool) -> None:
        if key["max_sessions"] is None and key["max_tokens"] is None:
            return
        num_sessions, num_tokens = self.records.used(key["name"])
        if sessions and key["max_sessions"] is not None and num_sessions >= key["max_sessions"]:
            raise RefusedError(429, f"key {key['name']} has {num_sessions} open sessions, as many as it may; close one")
        if key["max_tokens"] is not None and num_tokens >= key["max_tokens"]:
            raise RefusedError(
                429, f"key {key['name']} has used {num_tokens} tokens of {key['max_tokens']}; ask for a larger quota"
            )

    # --- the queue

    def _add(
        self, key: str, client: str, session: str, request_id: str, seq: int | None, name: str, digest: str, *,
        changes: bool, opens: Mapping[str, object] | None = None,
    ) -> None:  # fmt: skip
        self._number += 1
        self.records.add_call(
            key, client, opens, id=request_id, session=session, seq=seq, number=self._number, name=name,
            changes=int(changes), digest=digest,
        )  # fmt: skip
        self._enqueue(session, request_id, seq, self._number)

    def _enqueue(self, session: str, request_id: str, seq: int | None, number: int) -> None:
        order = self._orders[session]
        self._callbacks[request_id] = []
        order.waiting, order.arrived = order.waiting + 1, time.monotonic()
        if seq is not None:
            order.top = max(order.top, seq)
            order.held[seq] = request_id
            if seq != order.next:
                return
        heapq.heappush(self._ready, (number, request_id))
        self._condition.notify_all()

    def _adopt(self) -> None:
        """Numbers, and calls without a result, of an earlier process."""
        waiting = []
        for found in self.records.calls():
            order = self._orders.setdefault(found["session"], _Order())
            self._number = max(self._number, found["number"])
            state = found["state"]
            if state == QUEUED and (file := self._result(found["session"], found["id"])).exists():
                result = json.loads(file.read_bytes())
                state = FAILED if "error" in result else DONE
                status, tokens = 400 if state == FAILED else 200, int(result.get("num_tokens", 0))
                self.records.finish(found["id"], state, status, tokens, None)
            if state == QUEUED:
                waiting.append(found)
            elif found["seq"] is not None:
                order.next, order.top = max(order.next, found["seq"] + 1), max(order.top, found["seq"])
        with self._condition:
            for found in waiting:
                self._enqueue(found["session"], found["id"], found["seq"], found["number"])
        if waiting:
            logger.info("calls=%d state=resumed", len(waiting))

    def _work(self) -> None:
        import torch

        # In each thread that computes: another number of threads gives other last bits.
        torch.set_num_threads(threads_of(self.resources))
        pause, checked = min(30.0, max(0.05, 60 * self.limits.lease_minutes)), time.monotonic()
        while True:
            with self._condition:
                if not self._ready and not self._ends:
                    self._condition.wait(timeout=pause)
                if self._ends:
                    return
                request_id = heapq.heappop(self._ready)[1] if self._ready else None
            if time.monotonic() - checked >= pause:  # also while other sessions keep it busy
                self._end_leases()
                checked = time.monotonic()
            if request_id is None:
                continue
            found = self._lasting(partial(self.records.call, request_id))
            assert found is not None
            self._run(found)
            with self._condition:
                order = self._orders[found["session"]]
                order.waiting -= 1
                if found["seq"] is not None:
                    order.held.pop(found["seq"])
                    order.next = found["seq"] + 1
                    if (following := order.held.get(order.next)) is not None:
                        heapq.heappush(self._ready, (found["number"], following))
                for notify in self._callbacks.pop(request_id):
                    notify()

    def _run(self, found: "RowMapping") -> None:
        """Runs a call, writes its result, and records its end; a failure is its result."""
        session, request_id, start = found["session"], found["id"], time.perf_counter()
        status, state = 200, DONE
        try:
            result = self._created(session) if found["name"] == CREATE else self._called(found)
        except SQLAlchemyError:  # the server ends while the database is away: the next start runs the call
            raise
        except RefusedError as error:
            result, status, state = {"error": str(error)}, error.status, FAILED
        except (ConfigError, ArtifactError) as error:
            result, status, state = {"error": str(error)}, 400, FAILED
        except Exception as error:
            logger.exception("session=%s request=%s state=failed", session, request_id)
            if live := self._live.pop(session, None):  # its next call starts from the log, without a part of this one
                live.session.close()
            result, status, state = {"error": f"{type(error).__name__}: {error}"}, 500, FAILED
        if state == FAILED and found["name"] == CREATE:
            self._lasting(partial(self.records.set_session, session, state="failed"))
        seconds, tokens = time.perf_counter() - start, int(str(result.get("num_tokens", 0)))
        self._lasting(partial(_replace, self._result(session, request_id), orjson.dumps(result)))
        self._lasting(partial(self.records.finish, request_id, state, status, tokens, seconds))
        if live := self._live.get(session):
            live.used = time.monotonic()
            if found["changes"]:
                live.applied, live.since = found["seq"], live.since + seconds
                if live.since > max(self.limits.snapshot_seconds, 20 * live.writing):
                    self._snapshot(session, live)

    def _lasting(
        self, function: "Callable[[], Value]", errors: tuple[type[Exception], ...] = (OSError, SQLAlchemyError)
    ) -> "Value":
        """What a function gives once disk and database let it: a call that was executed keeps its result."""
        while True:
            try:
                return function()
            except errors as error:
                logger.error("state=waiting error=%s: make room, or start the database again", error)
                with self._condition:
                    self._condition.wait_for(lambda: self._ends, _RETRY_SECONDS)
                    if self._ends:  # the next start runs the call
                        raise

    def _created(self, session: str) -> dict[str, object]:
        def prepared() -> "tuple[RowMapping, str, _Live]":
            found = self.records.session(session)
            assert found is not None
            path = self._find(found["model"]).path
            self.records.set_session(session, path=str(path.absolute()))
            return found, self._model_digest(path), self._loaded(session, done=False)

        found, digest, live = self._lasting(prepared, (SQLAlchemyError,))
        return {
            "session": session, "model_digest": digest, **live.session.apply(_about),
            "started_from": (found["start"] and json.loads(found["start"])) or None,
        }  # fmt: skip

    def _called(self, found: "RowMapping") -> dict[str, object]:
        def prepared() -> tuple[_Live, Call, Place]:
            if found["name"] not in _FREE:  # calls before it in the queue may have used the quota up
                self._require_quota(self.records.owner(found["session"]), sessions=False)
            call = self._call(found)
            return self._loaded(found["session"]), call, self._place(found["session"], found["id"], call)

        live, call, place = self._lasting(prepared, (SQLAlchemyError,))
        return dict(live.session.apply(partial(call.run, place=place)))

    def _call(self, found: "RowMapping") -> Call:
        call = typed(CALLS[found["name"]], self.body(found["session"], found["id"]), found["name"])
        if isinstance(call, Generate) and call.seed is None:
            return replace(call, seed=found["number"])
        return call

    def _place(self, session: str, request_id: str, call: Call) -> Place:
        other = call.session if isinstance(call, Load) and call.session else session
        rows = [self.records.session(each) for each in (session, other)] if other != session else []
        names = {session, other} if len({each and each["key"] for each in rows}) < 2 else {session}
        saves = {each: self._folder(each) / "saves" for each in names}
        return Place(session=session, request_id=request_id, saves=saves)

    def model_path(self, model: str) -> Path:
        """The directory of a model."""
        return self._find(model).path

    # --- sessions in memory

    def loaded(self, name: str) -> Here | Group:
        """A session as its log leaves it, in memory."""
        return self._loaded(name).session

    def _loaded(self, name: str, *, done: bool = True) -> _Live:
        """A session in memory, with every call applied that has a result.

        Args:
            done: it was created before, so that its state is that of its log.
        """
        if live := self._live.get(name):
            return live
        while len(self._live) >= self.limits.max_live:
            self._unload(min(self._live, key=lambda each: self._live[each].used))
        if done:
            self._require_model(name)
        live = self._live[name] = _Live(session=self._new(name), applied=0, used=time.monotonic())
        if done:
            try:
                self._redo(name, live)
            except BaseException:
                self._live.pop(name).session.close()
                raise
        return live

    def _require_model(self, session: str) -> None:
        """Requires that the files of a session's model are those that it started from."""
        found, created = self.records.session(session), self.records.call_at(session, 0)
        assert found is not None and created is not None
        before = json.loads(self._result(session, created["id"]).read_bytes()).get("model_digest")
        path = found_by(self._find, found).path
        if before not in (None, self._model_digest(path)):
            raise ArtifactError(
                f"session {session}: {path} is not the model that it started from; restore its files, or create "
                "another session"
            )

    def _model_digest(self, path: Path) -> str:
        files = sorted({each for pattern in _MODEL_FILES for each in path.glob(pattern)})
        return digest_json(dict(zip([each.name for each in files], digest_all(files, self._digests), strict=True)))

    def _new(self, name: str) -> Here | Group:
        found = self.records.session(name)
        assert found is not None
        policy, folder = found_by(self._find, found), self._folder(name)
        method, resources = self.settings_of(json.loads(found["settings"]))
        ctx = TrainContext(output_dir=folder / "output", work_dir=folder / "work", resources=resources)
        made = session_of(method, policy, ctx, self._bases)
        if found["start"]:
            load = typed(Load, json.loads(found["start"]), "start")
            made.apply(partial(load.run, place=self._place(name, CREATE, load)))
        return made

    def _redo(self, name: str, live: _Live) -> None:
        """Brings a fresh session to the state of its log; every result must be that of the first time, to the bit."""
        snapshot = self._folder(name) / _SNAPSHOT
        if (snapshot / "applied").exists():
            live.applied = int((snapshot / "applied").read_text())
            live.session.apply(methodcaller("load", snapshot / str(live.applied)))
        start, count = time.perf_counter(), 0
        for found in self.log(name):
            if found["seq"] <= live.applied:
                continue
            call = self._call(found)
            made = live.session.apply(partial(call.run, place=self._place(name, found["id"], call)))
            result = orjson.dumps(made)
            if result != self._result(name, found["id"]).read_bytes():
                raise PipelineError(
                    f"session {name}: call {found['seq']} ({found['name']}) gave another result when it was executed "
                    "again; the same machine, libraries and number of threads are needed; load a saved state"
                )
            live.applied, count = found["seq"], count + 1
        if count:
            logger.info("session=%s calls=%d state=redone", name, count)
        live.since = time.perf_counter() - start

    def log(self, session: str) -> "list[RowMapping]":
        """The calls that changed a session, in their order."""
        found = [
            each for each in self.records.calls(session)
            if each["changes"] and each["state"] == DONE and each["name"] != CREATE
        ]  # fmt: skip
        return sorted(found, key=lambda each: int(each["seq"]))

    def _snapshot(self, name: str, live: _Live) -> None:
        folder, start = self._folder(name) / _SNAPSHOT, time.perf_counter()
        try:
            live.session.apply(methodcaller("save", folder / str(live.applied)))
            _replace(folder / "applied", str(live.applied).encode())
        except Exception:  # its log has all that is needed
            logger.exception("session=%s state=no-snapshot", name)
            return
        for each in folder.iterdir():
            if each.is_dir() and each.name != str(live.applied):
                shutil.rmtree(each, ignore_errors=True)
        live.since, live.writing = 0.0, time.perf_counter() - start

    def _unload(self, name: str) -> None:
        live = self._live.pop(name)
        if live.since and live.applied:
            self._snapshot(name, live)
        live.session.close()
        if not self._live:
            self._bases.clear()
        gc.collect()
        logger.info("session=%s state=unloaded", name)

    def _end_leases(self) -> None:
        """Unloads idle sessions, and fails calls whose earlier sequence number did not arrive within the lease."""
        limit = time.monotonic() - 60 * self.limits.lease_minutes
        for name in [each for each, live in self._live.items() if live.used < limit]:
            self._unload(name)
        with self._condition:
            for name, order in self._orders.items():
                if order.held and order.next not in order.held and order.arrived < limit:
                    try:
                        self._close_gap(name, order)
                    except (OSError, SQLAlchemyError) as error:  # the next check closes it
                        logger.error("session=%s state=waiting error=%s", name, error)

    def _close_gap(self, session: str, order: _Order) -> None:
        sentence = (
            f"call {order.next} did not come within the lease of {self.limits.lease_minutes:g} minutes, so that this "
            f"call is not run; {order.top + 1} is the next number"
        )
        for seq, request_id in sorted(order.held.items()):
            _replace(self._result(session, request_id), orjson.dumps({"error": sentence}))
            self.records.finish(request_id, FAILED, 408, 0, None)
            order.held.pop(seq)
            order.waiting -= 1
            for notify in self._callbacks.pop(request_id):
                notify()
        order.next = order.top + 1

    # --- files

    def _folder(self, session: str) -> Path:
        return self.root / "sessions" / session.replace(":", "_")

    def body(self, session: str, request_id: str) -> dict[str, object]:
        """The arguments of a call."""
        found: dict[str, object] = json.loads(self._body(session, request_id).read_bytes())
        return found

    def _body(self, session: str, request_id: str) -> Path:
        return self._folder(session) / "calls" / f"{request_id}.json"

    def _result(self, session: str, request_id: str) -> Path:
        return self._folder(session) / "results" / f"{request_id}.json"


def _accepted(request_id: str, session: str, seq: int | None, call: str) -> Outcome:
    return Outcome(request_id=request_id, session=session, seq=seq, call=call, status=202, body=b"{}")


def found_by(find: "Callable[[str], Value]", session: "RowMapping") -> "Value":
    """What a function finds of a session's model, whose path may be relative to the working directory of then."""
    try:
        return find(session["model"])
    except ConfigError:
        path = session["path"]
        if path is None or Path(path).name != Path(session["model"]).name:  # that of a stage is output
            raise
        return find(path)


def _about(session: "Session") -> dict[str, object]:
    return {
        "vocabulary": session.vocabulary, "trained_weights": sum(each.numel() for each in session.trained.values()),
        "max_length": session.method.max_length, "weights": session.digest(), "workers": session.workers.size,
    }  # fmt: skip


def _json_of(body: Mapping[str, object]) -> bytes:
    """A body as it is kept (RefusedError: it has what JSON of other programs has not)."""
    try:
        return orjson.dumps(dict(body))
    except TypeError as error:
        raise RefusedError(422, f"the body: {error}; integers of 64 bits and valid Unicode are accepted") from error


def _replace(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    draft.write_bytes(content)
    draft.replace(path)
