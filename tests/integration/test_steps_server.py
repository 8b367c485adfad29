"""``posttrain steps serve``: one meaning over REST, SDK and MCP; order, refusals, leases, quotas, audit."""

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy.exc import OperationalError

from flows.steps import engine, server
from flows.steps.calls import CALLS
from flows.steps.engine import Engine, Limits
from lineage.errors import ConfigError
from posttrain.steps import AsyncClient, CallError, Client, Row
from tests import training
from tests.steps_server import Served, find

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = {"learning_rate": 1e-2, "max_length": 64, "adapter": {"rank": 2, "alpha": 4}}
ROW = {"tokens": [5, 6, 7], "target_tokens": [6, 7, 8], "weights": [1.0, 0.5, 1.0]}
BODIES: dict[str, dict[str, object]] = {
    "forward": {"data": [ROW], "logits": True, "hidden_states": True},
    "backward": {"data": [ROW, {"tokens": [9, 10], "labels": [9, 10]}]},
    "step": {"learning_rate": 3e-3, "betas": [0.8, 0.9], "eps": 1e-7, "weight_decay": 0.1, "max_grad_norm": 0.7},
    "generate": {"prompts": [[5, 6], [7]], "max_tokens": 3, "num_samples": 2, "seed": 4, "temperature": 0.8},
    "logprobs": {"sequences": [[5, 6, 7], [8, 9]]},
    "save": {"to": "first"},
    "load": {"saved": "first"},
    "zero_grad": {},
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with training.one_thread(), Served(tmp_path_factory.mktemp("served")).running() as found:
        yield found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("model")
    training.write_models(root)
    return str(root / "policy")


def http(served: Served, key: str | None = None) -> httpx.Client:
    return httpx.Client(base_url=served.url, headers={"Authorization": f"Bearer {key or served.key}"}, timeout=60)


def by_rest(served: Served, model: str) -> list[object]:
    with http(served) as client:
        name = client.post("/v1/sessions", json={"model": model, **SETTINGS}).json()["session"]
        return [client.post(f"/v1/sessions/{name}/{each}", json=body).json()["result"] for each, body in BODIES.items()]


def by_sdk(served: Served, model: str) -> list[object]:
    session = Client(served.url, served.key).session(model, **SETTINGS)
    return [getattr(session, each)(**body) for each, body in BODIES.items()]


def by_async_sdk(served: Served, model: str) -> list[object]:
    async def run() -> list[object]:
        client = AsyncClient(served.url, served.key)
        session = await client.session(model, **SETTINGS)
        found = await asyncio.gather(*(getattr(session, each)(**body) for each, body in BODIES.items()))
        await client.close()
        return list(found)

    return asyncio.run(run())


@contextmanager
def tools(served: Served) -> Iterator[Callable[[str, dict[str, object]], Any]]:
    """Calls a tool of MCP; its error is an ``AssertionError``."""
    import httpx2
    from mcp import Client as McpClient
    from mcp.client.streamable_http import streamable_http_client

    headers = {"Authorization": f"Bearer {served.key}"}

    async def run(name: str, arguments: dict[str, object]) -> Any:
        http_client = httpx2.AsyncClient(headers=headers, timeout=60)
        async with McpClient(streamable_http_client(f"{served.url}/mcp", http_client=http_client)) as client:
            if name == "list":
                return {each.name: each for each in (await client.list_tools()).tools}
            return await client.call_tool(name, arguments)

    def call(name: str, arguments: dict[str, object]) -> Any:
        reported = runner.run(run(name, arguments))
        if name == "list":
            return reported
        assert not reported.is_error, reported.content[0].text
        return reported.structured_content

    with asyncio.Runner() as runner:
        yield call


def by_mcp(served: Served, model: str) -> list[object]:
    with tools(served) as call:
        known = call("list", {})
        assert set(CALLS) < set(known) and "data" in known["backward"].input_schema["required"]
        name = call("create_session", {"model": model, "settings": SETTINGS})["session"]
        found = [call(each, {"session": name, **body})["result"] for each, body in BODIES.items()]
        with pytest.raises(AssertionError, match="data has no rows"):
            call("backward", {"session": name, "data": []})
        return found


def test_every_primitive_has_one_meaning_by_rest_sdk_and_mcp_to_the_bit(served: Served, model: str) -> None:
    assert set(BODIES) == set(CALLS)
    found = [by(served, model) for by in (by_rest, by_sdk, by_async_sdk, by_mcp)]
    for name, first, *others in zip(BODIES, *found, strict=True):
        assert all(json.dumps(each, sort_keys=True) == json.dumps(first, sort_keys=True) for each in others), name
    rows = served.engine.records.audited()
    assert {each["client"] for each in rows} == {"rest", "mcp"}
    [row] = [each for each in rows if each["call"] == "backward" and each["client"] == "mcp" and each["tokens"]]
    assert row["tokens"] == 5 and row["seconds"] > 0 and row["status"] == 200 and row["key"]


def test_calls_are_run_in_the_order_of_their_numbers_and_a_repeated_one_once(served: Served, model: str) -> None:
    with http(served) as client:
        name = client.post("/v1/sessions", json={"model": model, **SETTINGS}).json()["session"]
        place = f"/v1/sessions/{name}"
        late = client.post(f"{place}/step?wait=0", json={"seq": 2})
        assert late.status_code == 202
        assert client.get(place).json()["next"] == 1 and client.get(place).json()["held"] == [2]
        first = client.post(f"{place}/backward", json={"seq": 1, "data": [ROW]})
        again = client.post(f"{place}/backward", json={"seq": 1, "data": [ROW]})
        assert first.status_code == 200 and again.json() == first.json()
        found = client.get(f"/v1/requests/{late.json()['request_id']}?wait=30").json()
        assert found["result"]["step"] == 1
        other = client.post(f"{place}/backward", json={"seq": 1, "data": [ROW, ROW]})
        assert other.status_code == 400 and "was another call before" in other.json()["error"]
        assert client.post(f"{place}/zero_grad", json={}).json()["seq"] == 3
        opening = {"id": "again", "model": model, **SETTINGS}
        made = [client.post("/v1/sessions", json=opening).json() for _ in range(2)]
        assert made[0] == made[1] and made[0]["session"] == "again"
        changed = client.post("/v1/sessions", json={**opening, "seed": 1})
        assert changed.status_code == 400 and "was another call before" in changed.json()["error"]
        own = {"id": "mine", "data": [ROW]}
        assert client.post(f"{place}/forward", json=own).json() == client.post(f"{place}/forward", json=own).json()


REFUSED: list[tuple[str, dict[str, object], int, str]] = [
    ("backward", {"data": []}, 400, "data has no rows"),
    ("backward", {"data": [ROW], "loss": "nll"}, 400, "loss=nll"),
    ("backward", {"data": [{**ROW, "weights": [1.0]}]}, 400, "weights has 1 values"),
    ("backward", {"data": [{**ROW, "tokens": [5, 6, 999999]}]}, 400, "999999 is no token"),
    ("backward", {"data": [{**ROW, "tokens": [[5], [6], [7]]}]}, 422, "valid integer"),
    ("backward", {"data": [{**ROW, "weight": [1.0]}]}, 422, "weight: unknown key"),
    ("backward", {"data": ["a"]}, 422, "data.0"),
    ("backward", {}, 422, "data: is not set"),
    ("backward", {"data": [{**ROW, "weights": [1.0, float("inf"), 1.0]}]}, 422, "finite"),
    ("backward", {"data": [ROW], "seq": 0}, 422, "numbers of calls are 1 to"),
    ("backward", {"data": [ROW], "seq": "1"}, 422, "an integer from 1"),
    ("backward", {"data": [ROW], "id": "../x"}, 422, "letters, digits and dashes"),
    ("step", {}, 400, "there are no gradients"),
    ("step", {"learning_rate": -1.0}, 400, "there are no gradients"),
    ("generate", {"max_tokens": 2}, 400, "send one of them"),
    ("load", {"saved": "nothing"}, 400, "nothing is; save it first"),
    ("save", {"to": "../up"}, 400, "1 to 64 letters"),
    ("load", {"saved": "a", "session": "other"}, 400, "is no session of this key"),
    ("train", {}, 404, "there is no such address"),
    ("backward", {"data": [{**ROW, "tokens": [5, 6, 10**30]}]}, 422, "integers of 64 bits"),
    ("backward", {"data": [{**ROW, "weights": [1.0, 1e39, 1.0]}]}, 400, "beyond fp32"),
    ("backward", {"data": [{**ROW, "advantages": [1.0]}]}, 400, "advantages has 1 values"),
    ("backward", {"data": [{**ROW, "labels": [5, 6, 7]}]}, 400, "labels stand in place of"),
    ("backward", {"data": [{"tokens": [5, 6, 7], "labels": [5, -5, 7]}]}, 400, "-5 is no token"),
    ("backward", {"data": [ROW], "seq": 2**31}, 422, "numbers of calls are 1 to"),
    ("backward", {"data": [ROW], "id": ""}, 422, "letters, digits and dashes"),
    ("backward?wait=abc", {"data": [ROW]}, 422, "wait=abc"),
    ("generate", {"prompts": [[5]], "seed": -1}, 400, "seed=-1"),
    ("save", {"to": 5}, 422, "valid string"),
    ("generate", {"texts": [5]}, 422, "valid string"),
    ("generate", {"prompts": [[5]], "stop": [1.0]}, 422, "stop.0"),
    ("generate", {"prompts": [[5]], "stop": [10**9]}, 400, "stop: 1000000000 is no token"),
]
SESSIONS: list[tuple[dict[str, object], str]] = [
    ({"rank": 2}, "rank: unknown key"),
    ({"adapter": {"type": "adalora"}}, "it prunes ranks by the steps that remain; set adapter.type=lora"),
    ({"diloco": {"num_islands": 2}}, "set diloco=null"),
    ({"resources": {"num_workers": 2, "sharding": "fsdp"}}, "set sharding=zero2"),
    ({"resources": {"num_workers": 2, "sharding": "zero3"}}, "set sharding=zero2"),
    ({"resources": {"num_workers": 9}}, "up to 8 are accepted"),
    ({"start": {"saved": "x"}}, "an object with session and saved"),
]


def test_bad_input_is_refused_with_a_sentence_and_the_session_stays_usable(served: Served, model: str) -> None:
    with http(served) as client:
        name = client.post("/v1/sessions", json={"model": model, **SETTINGS}).json()["session"]
        for call, body, status, message in REFUSED:
            text = json.dumps(body)  # with Infinity, which is not JSON, and which clients send all the same
            answer = client.post(f"/v1/sessions/{name}/{call}", content=text)
            assert answer.status_code == status and message in answer.text, (call, body, answer.text)
        assert client.post(f"/v1/sessions/{name}/backward", content="{").status_code == 422
        assert client.post(f"/v1/sessions/{name}/backward", content="[1]").status_code == 422
        assert client.post("/v1/sessions", json={}).status_code == 422
        for settings, message in SESSIONS:
            answer = client.post("/v1/sessions", json={"model": model, **settings})
            assert answer.status_code == 422 and message in answer.json()["error"], (settings, answer.text)
        missing = client.post("/v1/sessions", json={"model": "/nowhere", **SETTINGS})
        assert missing.status_code in (400, 500) and missing.json()["error"]
        assert client.post(f"/v1/sessions/{name}/backward", json={"data": [ROW]}).status_code == 200
        for betas in ([0.9], [1.5, 0.9], [-0.1, 0.9]):
            assert "are accepted" in client.post(f"/v1/sessions/{name}/step", json={"betas": betas}).json()["error"]
        assert client.post(f"/v1/sessions/{name}/step", json={}).json()["result"]["step"] == 1
        other = served.engine.records.add_key("foreign")
        with http(served, other) as foreign:
            assert foreign.get(f"/v1/sessions/{name}").status_code == 403
            answer = foreign.post(f"/v1/sessions/{name}/zero_grad", json={})
            assert answer.status_code == 403 and "of another key" in answer.json()["error"]
        assert httpx.post(f"{served.url}/v1/sessions/{name}/zero_grad", json={}).status_code == 401
        for _ in range(2):  # also when it is sent again
            assert client.delete(f"/v1/sessions/{name}").status_code == 200
        assert client.post(f"/v1/sessions/{name}/zero_grad", json={}).status_code == 410
    rows = served.engine.records.audited()
    assert [each["status"] for each in rows if (each["call"], each["session"]) == ("close", name)] == [200, 200]
    statuses = {each["status"] for each in rows}
    assert {200, 400, 401, 403, 410, 422} <= statuses
    page = httpx.get(f"{served.url}/openapi.json").json()
    assert {f"/v1/sessions/{{session}}/{each}" for each in CALLS} <= set(page["paths"])
    shown = httpx.get(f"{served.url}/docs").text
    assert all(f"POST /v1/sessions/{{session}}/{each}" in shown for each in CALLS) and "gradients of the loss" in shown
    assert "<script" not in shown and "http://" not in shown and "https://" not in shown  # it needs no network
    assert httpx.get(f"{served.url}/redoc").status_code == 404


def test_an_oversized_body_is_refused_before_it_is_read(tmp_path: Path, model: str) -> None:
    with Served(tmp_path, max_body_bytes=2000).running() as served, http(served) as client:
        answer = client.post("/v1/sessions", content=b" " * 3000)
        assert answer.status_code == 413 and "2000 bytes" in answer.json()["error"]
        answer = client.post("/v1/sessions", content=iter([b" " * 1500, b" " * 1500]))
        assert answer.status_code == 413
        assert client.get("/v1/sessions").json() == {"sessions": []}
        assert httpx.post(f"{served.url}/mcp", content=b" " * 3000, headers=client.headers).status_code == 413
        assert httpx.post(f"{served.url}/v1/sessions", content=b" " * 3000).status_code == 401
        assert [each["status"] for each in served.engine.records.audited()] == [413, 413, 401]


def test_quotas_hold_for_sessions_and_tokens(served: Served, model: str) -> None:
    key = served.engine.records.add_key("limited", max_sessions=1, max_tokens=4)
    session = Client(served.url, key).session(model, **SETTINGS)
    with pytest.raises(CallError, match="1 open sessions, as many as it may") as error:
        Client(served.url, key).session(model, **SETTINGS)
    assert error.value.status == 429
    session.call("logprobs", sequences=[[5, 6, 7, 8]])
    with pytest.raises(CallError, match="has used 4 tokens of 4"):
        session.call("logprobs", sequences=[[5, 6, 7, 8]])
    session.call("save", to="kept")
    # Of calls that wait in the queue as many are run as the quota has tokens for.
    key = served.engine.records.add_key("queued", max_tokens=4)
    name = Client(served.url, key).session(model, **SETTINGS).name
    with http(served, key) as client:
        body = {"sequences": [[5, 6, 7]], "id": ""}
        sent = [
            client.post(f"/v1/sessions/{name}/logprobs?wait=0", json={**body, "seq": seq, "id": f"quota-{seq}"})
            for seq in (4, 3, 2, 1)
        ]
        assert {each.status_code for each in sent} == {202}
        found = [client.get(f"/v1/requests/quota-{seq}?wait=20").status_code for seq in (1, 2, 3, 4)]
    assert found == [200, 200, 429, 429]


def test_a_custom_loss_trains_as_in_one_process(served: Served, model: str) -> None:
    session = Client(served.url, served.key).session(model, **SETTINGS)
    rows = [Row(tokens=[5, 6, 7], target_tokens=[6, 7, 8])]

    def loss(data: list[Row], logps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return sum((each.sum() ** 2 for each in logps), torch.tensor(0.0)), {"rows": float(len(data))}

    found = session.forward_backward_custom(rows, loss)  # type: ignore[arg-type]
    assert found["metrics"] == {"rows": 1.0} and found["grad_norm"] and found["loss"]
    plain = session.call("forward", data=[{**ROW, "weights": [1.0] * 3}])
    assert found["loss"] == pytest.approx(float(str(plain["loss"])) ** 2, rel=1e-5)


def test_a_custom_loss_has_one_meaning_by_rest_sdk_and_mcp(served: Served, model: str) -> None:
    """The square of the sum of all log-probabilities: by its derivative, which needs no torch."""

    def loss(data: list[Row], logps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return logps[0].double().sum() ** 2, {}

    def by_hand(call: Callable[[str, dict[str, object]], Any]) -> object:
        read = call("forward", {"data": [{**ROW, "weights": [1.0] * 3}]})["logprobs"][0]
        return call("backward", {"data": [{**ROW, "weights": [-2 * sum(read)] * 3}]})["grad_norm"]

    session = Client(served.url, served.key).session(model, **SETTINGS)
    norms = [session.forward_backward_custom([Row(**ROW)], loss)["grad_norm"]]  # type: ignore[arg-type]
    with http(served) as client:
        place = f"/v1/sessions/{client.post('/v1/sessions', json={'model': model, **SETTINGS}).json()['session']}"
        norms.append(by_hand(lambda name, body: client.post(f"{place}/{name}", json=body).json()["result"]))
    with tools(served) as call:
        own = call("create_session", {"model": model, "settings": SETTINGS})["session"]
        norms.append(by_hand(lambda name, body: call(name, {"session": own, **body})["result"]))
    assert norms[0] and norms == pytest.approx([norms[0]] * 3, rel=1e-6)


def test_the_async_client_resumes_a_session_and_keeps_a_custom_loss_before_what_follows(
    served: Served, model: str
) -> None:
    def loss(data: list[Row], logps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        return logps[0].sum() ** 2, {"rows": float(isinstance(data[0], Row))}

    async def run(name: str) -> list[Any]:
        client = AsyncClient(served.url, served.key)
        session = await client.resume(name)
        found = await asyncio.gather(session.forward_backward_custom([ROW], loss), session.step())  # type: ignore[attr-defined]
        await client.close()
        return list(found)

    custom, step = asyncio.run(run(Client(served.url, served.key).session(model, **SETTINGS).name))
    assert custom["metrics"] == {"rows": 1.0} and step["step"] == 1 and step["grad_norm"] == custom["grad_norm"]


def test_a_tool_of_mcp_loads_from_another_session_and_has_a_result_later(
    served: Served, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tools(served) as call:
        first, second = (call("create_session", {"model": model, "settings": SETTINGS})["session"] for _ in "ab")
        call("backward", {"session": first, "data": [ROW]})
        call("step", {"session": first})
        kept = call("save", {"session": first, "to": "kept"})["result"]
        with monkeypatch.context() as patched:
            patched.setattr(server, "LONGEST_WAIT", 0.0)
            late = call("load", {"session": second, "saved": "kept", "saved_by": first, "seq": 2})
        assert late["state"] == "waiting" and "result" not in late
        call("zero_grad", {"session": second, "seq": 1})
        found = call("result", {"request_id": late["request_id"]})
        assert found["state"] == "done" and {"saved": "kept", **found["result"]} == kept
        with pytest.raises(AssertionError, match="request none: there is none"):
            call("result", {"request_id": "none"})


def train(engine: Engine, name: str, first: int, last: int) -> None:
    """A backward and a step for each of these numbers, without waiting."""
    key = engine.authenticate(KEY[0])
    for number in range(first, last):
        call, body = ("step", {}) if number % 2 == 0 else ("backward", {"data": [{**ROW, "tokens": [5, 6, number]}]})
        engine.accept(key, name, call, body, seq=number)


KEY: list[str] = []


def last_digest(engine: Engine, name: str) -> str:
    key, done = engine.authenticate(KEY[0]), threading.Event()
    found = engine.accept(key, name, "save", {"to": f"end-{id(done)}"})
    engine.when_done(found.request_id, done.set)
    assert done.wait(60)
    return str(json.loads(engine.outcome(found.request_id).body)["weights"])


@pytest.mark.parametrize("limits", [Limits(snapshot_seconds=0.0), Limits()], ids=["snapshots", "log alone"])
def test_a_restarted_engine_continues_from_its_log_with_the_same_bits(
    tmp_path: Path, model: str, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left without any warning, as by kill -9, with calls that wait."""
    digests = []
    for number, cuts in enumerate(([], [4, 7])):
        root = tmp_path / str(number)
        engine = Engine(root, find, limits=limits)
        KEY[:] = [engine.records.add_key("owner")]
        engine.start()
        engine.create(engine.authenticate(KEY[0]), {"model": model, **SETTINGS}, "one")
        start = 1
        for cut in [*cuts, 9]:
            train(engine, "one", start, cut)
            start = cut
            if cut != 9:
                engine._ends = True  # no further call runs, and nothing is written
                with engine._condition:
                    engine._condition.notify_all()
                engine._thread.join(120)
                engine = Engine(root, find, limits=limits)
                engine.start()
        digests.append(last_digest(engine, "one"))
        calls = engine.records.calls("one")
        assert [each["state"] for each in calls] == ["done"] * 10
        assert len({each["id"] for each in calls}) == 10
        engine.close()
    assert digests[0] == digests[1]


def test_calls_behind_a_gap_fail_when_the_lease_ends_and_the_session_resumes(tmp_path: Path, model: str) -> None:
    with Served(tmp_path, lease_minutes=1 / 600).running() as served, http(served) as client:
        place = f"/v1/sessions/{client.post('/v1/sessions', json={'model': model, **SETTINGS}).json()['session']}"
        late = client.post(f"{place}/backward?wait=20", json={"seq": 3, "data": [ROW]})
        assert late.status_code == 408 and "call 1 did not come within the lease" in late.json()["error"]
        assert client.get(place).json() | {"held": [], "waiting": 0, "next": 4} == client.get(place).json()
        assert client.post(f"{place}/backward", json={"seq": 1, "data": [ROW]}).status_code == 400
        assert client.post(f"{place}/backward", json={"seq": 4, "data": [ROW]}).status_code == 200
        assert client.post(f"{place}/step", json={}).json()["seq"] == 5


def test_a_result_that_cannot_be_written_yet_is_written_later(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full, and the database away, for a while."""
    failures = [OSError(28, "no space left"), None, OperationalError("update", {}, Exception("it is away"))]
    monkeypatch.setattr("flows.steps.engine._RETRY_SECONDS", 0.01)
    with Served(tmp_path).running() as served:
        session, records = Client(served.url, served.key).session(model, **SETTINGS), served.engine.records

        def failing(function: Callable[..., None], *args: Any) -> None:
            is_tried = function.__name__ == "finish" or args[0].parent.name == "results"
            if is_tried and failures and (error := failures.pop(0)):
                raise error
            function(*args)

        for place, name in ((engine, "_replace"), (records, "finish")):
            monkeypatch.setattr(place, name, partial(failing, getattr(place, name)))
        first = session.call("backward", data=[ROW])
        assert not failures and session.call("backward", data=[ROW])["num_accumulated"] == 2
        assert first["num_accumulated"] == 1


def test_a_database_that_is_away_for_a_while_loses_no_call(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each method fails once for what runs the calls, and the first one for a request."""
    monkeypatch.setattr("flows.steps.engine._RETRY_SECONDS", 0.01)
    failed = set[str]()

    def failing(function: Callable[..., Any], *args: Any, **values: Any) -> Any:
        is_tried = function.__name__ == "key_of" or threading.current_thread().name == "steps"
        if is_tried and function.__name__ not in failed:
            failed.add(function.__name__)
            raise OperationalError("any", {}, Exception("it is away"))
        return function(*args, **values)

    with Served(tmp_path, lease_minutes=1 / 600).running() as served:
        records, client = served.engine.records, Client(served.url, served.key)
        names = {"call", "call_at", "calls", "finish", "key_of", "owner", "session", "set_session"}
        for name in names:
            monkeypatch.setattr(records, name, partial(failing, getattr(records, name)))
        with pytest.raises(CallError, match="no-model"):
            client.session("no-model")
        assert "failed" in {each["state"] for each in records.sessions()}
        session = client.session(model, **SETTINGS)
        assert session.call("backward", data=[ROW])["num_accumulated"] == 1
        served.engine._live[session.name].used = -math.inf  # its next call reads the log
        while served.engine._live:
            time.sleep(0.01)
        assert session.call("backward", data=[ROW])["num_accumulated"] == 2
        assert failed == names
        failed.clear()
        with pytest.raises(CallError, match="did not come within the lease"):
            session.call("backward", data=[ROW], seq=9)
        assert "finish" in failed and session.call("backward", data=[ROW])["num_accumulated"] == 3


def test_a_session_leaves_the_memory_when_its_lease_ends_or_it_is_closed(tmp_path: Path, model: str) -> None:
    """Also while another one keeps the server busy."""
    with Served(tmp_path, lease_minutes=1 / 300).running() as served, http(served) as client:
        names = [client.post("/v1/sessions", json={"model": model, **SETTINGS}).json()["session"] for _ in range(3)]
        assert client.delete(f"/v1/sessions/{names[1]}").status_code == 200
        deadline, left = time.monotonic() + 60, set[str]()
        while left != {names[2]} and time.monotonic() < deadline:
            client.post(f"/v1/sessions/{names[2]}/logprobs", json={"sequences": [[5, 6]]})
            left = set(served.engine._live)
        assert left == {names[2]}


def test_an_idle_session_leaves_the_memory_and_its_next_call_finds_it_as_it_was(tmp_path: Path, model: str) -> None:
    with Served(tmp_path, max_live=1).running() as served:
        KEY[:] = [served.key]
        client = Client(served.url, served.key)
        one, two = client.session(model, **SETTINGS), client.session(model, **SETTINGS)
        one.call("backward", data=[ROW])
        two.call("backward", data=[ROW])
        assert list(served.engine._live) == [two.name]
        one.call("step")
        two.call("step")
        assert last_digest(served.engine, one.name) == last_digest(served.engine, two.name)
        assert served.engine.info(one.name)["in_memory"] is False


def test_a_database_is_of_one_folder(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'calls.db'}"
    for _ in range(2):
        Engine(tmp_path / "one", find, database=url).records.close()
    with pytest.raises(ConfigError, match=r"--database sqlite.*calls of another folder than --root .*two; name that"):
        Engine(tmp_path / "two", find, database=url)
    (tmp_path / "one").rename(tmp_path / "moved")
    Engine(tmp_path / "moved", find, database=url).records.close()


def test_a_server_that_ends_answers_requests_that_wait(tmp_path: Path, model: str) -> None:
    with Served(tmp_path).running() as served, http(served) as client, ThreadPoolExecutor(1) as pool:
        place = f"/v1/sessions/{client.post('/v1/sessions', json={'model': model, **SETTINGS}).json()['session']}"
        held = pool.submit(client.post, f"{place}/step?wait=60", json={"seq": 2})
        while client.get(place).json()["held"] != [2]:
            assert not held.done()
        served.engine.end()
        assert held.result(timeout=50).status_code == 202
