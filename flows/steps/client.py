"""The Python SDK: ``posttrain.steps``. One method for each primitive of ``flows.steps.calls``, in two clients.

Each call has an id of its own, so that one that is sent again after a lost connection is not run twice.
"""

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, cast

import httpx

from flows.steps.calls import CALLS, Call
from lineage.errors import ConfigError, PipelineError
from lineage.fingerprint import without_nones
from tasks.steps import Row

if TYPE_CHECKING:
    from torch import Tensor

Result = dict[str, object]
CustomLoss = Callable[[Sequence[Row], "list[Tensor]"], "tuple[Tensor, Mapping[str, float]]"]
URL, KEY = "POSTTRAIN_STEPS_URL", "POSTTRAIN_STEPS_KEY"  # environment variables
_WAIT_SECONDS, _TRIES = 30, 16


class CallError(PipelineError):
    """A call that the server refused, or that failed there.

    Args:
        status: of HTTP.
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(status, sentence)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[1])


def _settings(url: str | None, key: str | None) -> dict[str, object]:
    url, key = url or os.environ.get(URL), key or os.environ.get(KEY)
    if not url or not key:
        raise ConfigError(f"the server's address and a key are needed; pass url and key, or set {URL} and {KEY}")
    return {
        "base_url": url, "headers": {"Authorization": f"Bearer {key}"}, "timeout": httpx.Timeout(_WAIT_SECONDS + 30.0)
    }  # fmt: skip


def _body(values: Mapping[str, object]) -> dict[str, object]:
    """Arguments as JSON: rows may be ``Row`` or objects."""
    return cast("dict[str, object]", without_nones(dict(values)))


def _opening(model: str, settings: Mapping[str, object]) -> dict[str, object]:
    """The body that starts a session; it names it, so that one that is sent again starts no other."""
    return {"id": uuid.uuid4().hex[:16], **_body({"model": model, **settings})}


def _read(response: httpx.Response) -> Result | str:
    """The result, or the id of a request that has none yet."""
    try:
        found = response.json()
    except ValueError as error:
        raise CallError(response.status_code, response.text[:200]) from error
    if response.status_code == 202:
        return str(found["request_id"])
    if response.status_code == 503:  # its database is away: the request is sent again
        raise httpx.NetworkError(str(found.get("error", response.text[:200])))
    if response.status_code != 200:
        raise CallError(response.status_code, str(found.get("error", response.text[:200])))
    return cast(Result, found.get("result", found))


class Client:
    """A connection to ``posttrain steps serve``.

    Args:
        url, key: None: those of the environment.
    """

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        self._http = httpx.Client(**_settings(url, key))  # type: ignore[arg-type]

    def session(self, model: str, **settings: object) -> "Session":
        """Starts a session.

        Args:
            model: a REF of the server's store, or a directory there.
            settings: fields of ``tasks.steps.Steps``; ``resources``, as ``{"num_workers": 2, "sharding": "zero2"}``;
                ``start``, the saved state that it starts from, as the arguments of ``load``.
        """
        about = self.request("POST", "/v1/sessions", _opening(model, settings))
        return Session(self, str(about["session"]), about)

    def resume(self, session: str) -> "Session":
        """An open session of this key."""
        return Session(self, session, self.request("GET", f"/v1/sessions/{session}"))

    def request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Result:
        """Sends a request until it is answered, and waits for its result."""
        found = self._sent(method, path, body)
        while isinstance(found, str):
            found = self._sent("GET", f"/v1/requests/{found}", None)
        return found

    def _sent(self, method: str, path: str, body: Mapping[str, object] | None) -> Result | str:
        for attempt in range(_TRIES):
            try:
                return _read(self._http.request(method, path, json=body, params={"wait": _WAIT_SECONDS}))
            except httpx.TransportError:
                if attempt == _TRIES - 1:
                    raise
                time.sleep(min(0.1 * 2**attempt, 5.0))
        raise AssertionError

    def close(self) -> None:
        self._http.close()


class AsyncClient:
    """As ``Client``, with methods that are awaited."""

    def __init__(self, url: str | None = None, key: str | None = None) -> None:
        self._http = httpx.AsyncClient(**_settings(url, key))  # type: ignore[arg-type]

    async def session(self, model: str, **settings: object) -> "AsyncSession":
        """As ``Client.session``."""
        about = await self.request("POST", "/v1/sessions", _opening(model, settings))
        return AsyncSession(self, str(about["session"]), about)

    async def resume(self, session: str) -> "AsyncSession":
        """As ``Client.resume``."""
        return AsyncSession(self, session, await self.request("GET", f"/v1/sessions/{session}"))

    async def request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> Result:
        """As ``Client.request``."""
        return await self.result(await self.sent(method, path, body))

    async def result(self, found: Result | str) -> Result:
        """Waits for the result of a request by its id."""
        while isinstance(found, str):
            found = await self.sent("GET", f"/v1/requests/{found}", None)
        return found

    async def sent(
        self, method: str, path: str, body: Mapping[str, object] | None, wait: float = _WAIT_SECONDS
    ) -> Result | str:
        """Sends a request until it is answered: its result, or its id."""
        for attempt in range(_TRIES):
            try:
                return _read(await self._http.request(method, path, json=body, params={"wait": wait}))
            except httpx.TransportError:
                if attempt == _TRIES - 1:
                    raise
                await asyncio.sleep(min(0.1 * 2**attempt, 5.0))
        raise AssertionError

    async def close(self) -> None:
        await self._http.aclose()


class Session:
    """A session. It has a method for each primitive, such as ``backward(data=..., loss="ppo")``.

    Attributes:
        about: the server's answer about it.
    """

    def __init__(self, client: Client, name: str, about: Result) -> None:
        self.client, self.name, self.about = client, name, about

    def call(self, name: str, **arguments: object) -> Result:
        """One primitive by its name."""
        body = {"id": uuid.uuid4().hex, **_body(arguments)}
        return self.client.request("POST", f"/v1/sessions/{self.name}/{name}", body)

    def forward_backward_custom(self, data: Sequence[Row | Mapping[str, object]], loss: CustomLoss) -> Result:
        """The gradients of a loss of your own: ``loss(data, logprobs)`` returns a scalar of torch, and metrics."""
        from tasks.train.steps.session import custom_weights

        rows = _rows(data)
        read = self.call("forward", data=_unweighted(rows))
        weighted, value, metrics = custom_weights(loss, rows, cast("list[list[float]]", read["logprobs"]))
        return {**self.call("backward", data=weighted), "loss": value, "metrics": dict(metrics)}

    def close(self) -> None:
        """Closes it on the server: its log and saved states stay."""
        self.client.request("DELETE", f"/v1/sessions/{self.name}")


class AsyncSession:
    """As ``Session``; calls that were begun in an order run in that order, also without waiting in between."""

    def __init__(self, client: AsyncClient, name: str, about: Result) -> None:
        self.client, self.name, self.about = client, name, about
        self._order = asyncio.Lock()

    async def call(self, name: str, **arguments: object) -> Result:
        """One primitive by its name."""
        async with self._order:
            found = await self._sent(name, arguments)
        return await self.client.result(found)

    async def _sent(self, name: str, arguments: Mapping[str, object]) -> Result | str:
        body = {"id": uuid.uuid4().hex, **_body(arguments)}
        return await self.client.sent("POST", f"/v1/sessions/{self.name}/{name}", body, wait=0)

    async def forward_backward_custom(self, data: Sequence[Row | Mapping[str, object]], loss: CustomLoss) -> Result:
        """As ``Session.forward_backward_custom``."""
        from tasks.train.steps.session import custom_weights

        rows = _rows(data)
        async with self._order:
            read = await self.client.result(await self._sent("forward", {"data": _unweighted(rows)}))
            weighted, value, metrics = custom_weights(loss, rows, cast("list[list[float]]", read["logprobs"]))
            found = await self._sent("backward", {"data": weighted})
        return {**await self.client.result(found), "loss": value, "metrics": dict(metrics)}

    async def close(self) -> None:
        """As ``Session.close``."""
        await self.client.request("DELETE", f"/v1/sessions/{self.name}")


def _rows(data: Sequence[Row | Mapping[str, object]]) -> list[Row]:
    return [each if isinstance(each, Row) else Row(**each) for each in data]  # type: ignore[arg-type]


def _unweighted(data: Sequence[Row]) -> list[Row]:
    """Rows with the columns that ``forward`` reads."""
    rows = [each.shifted for each in data]
    return [
        Row(tokens=each.tokens, target_tokens=each.target_tokens, weights=[1.0] * len(each.tokens)) for each in rows
    ]


def _add_methods(cls: type, *, is_async: bool) -> None:
    for name, call in CALLS.items():
        setattr(cls, name, _method(name, call, is_async=is_async))


def _method(name: str, call: type[Call], *, is_async: bool) -> Callable[..., object]:
    def method(self: Session, **arguments: object) -> object:
        return self.call(name, **arguments)

    async def awaited(self: AsyncSession, **arguments: object) -> object:
        return await self.call(name, **arguments)

    made: Callable[..., object] = awaited if is_async else method
    parameters = [
        Parameter(
            each.name, Parameter.KEYWORD_ONLY, annotation=each.type,
            default=Parameter.empty if each.default is MISSING and each.default_factory is MISSING else each.default,
        )
        for each in fields(call)
    ]  # fmt: skip
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    made.__signature__ = Signature([own, *parameters])  # type: ignore[attr-defined]
    made.__name__, made.__doc__ = name, call.__doc__
    return made


_add_methods(Session, is_async=False)
_add_methods(AsyncSession, is_async=True)
