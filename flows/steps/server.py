"""The server: the engine over REST, and over MCP as tools. The routes and tools are made from ``flows.steps.calls``."""

import asyncio
import contextlib
import html
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from typing import TYPE_CHECKING, Annotated, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import AnyHttpUrl, TypeAdapter, WithJsonSchema
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException

from flows.steps.calls import CALLS, Call
from flows.steps.engine import CREATE, Engine, Outcome, RefusedError
from lineage.errors import PipelineError
from lineage.fingerprint import without_nones
from lineage.markup import html_page
from tasks.steps import Steps

if TYPE_CHECKING:
    from mcp.server import MCPServer
    from sqlalchemy import RowMapping
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LONGEST_WAIT = 60.0  # seconds that a request may wait for a result
MAX_BODY_BYTES = 64 * 2**20
_SETTINGS = "Starts a session; settings: the fields of tasks.steps.Steps, resources of its workers, and a start."
_SAVED_BY = "saved_by"  # in MCP the ``session`` of load, where session is the one that is called
OWN = ("seq", "id")  # of a body: the number of the call, and the id of the request
_CODES = {400: "the call was refused", 401: "no key", 403: "of another key", 404: "there is none", 422: "not valid"}


async def finished(engine: Engine, outcome: Outcome, seconds: float) -> Outcome:
    """The outcome once the call has its result, or after so many seconds."""
    if outcome.status != 202 or seconds <= 0:
        return outcome
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def notify() -> None:
        loop.call_soon_threadsafe(done.set)

    engine.when_done(outcome.request_id, notify)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), min(seconds, LONGEST_WAIT))
    return await run_in_threadpool(engine.outcome, outcome.request_id)


def key_of(request: Request) -> str | None:
    """The key that a request sends."""
    sent = request.headers.get("authorization", "")
    return request.headers.get("x-api-key") or sent.removeprefix("Bearer ").strip() or None


async def json_of(request: Request) -> dict[str, object]:
    """The JSON object of a request's body (RefusedError: it is none)."""
    body = await request.body()
    try:
        found = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise RefusedError(422, f"the body is not JSON ({error}); send one object") from error
    if not isinstance(found, dict):
        raise RefusedError(422, f"the body is a JSON {type(found).__name__}; send one object")
    return found


def answer(outcome: Outcome) -> Response:
    """An outcome as a response of REST."""
    head = {"request_id": outcome.request_id, "session": outcome.session, "seq": outcome.seq, "call": outcome.call}
    text = json.dumps(head).encode()
    if outcome.status == 202:
        body = text[:-1] + b', "state": "waiting"}'
    elif outcome.status == 200:
        body = text[:-1] + b', "state": "done", "result": ' + outcome.body + b"}"
    else:
        body = text[:-1] + b', "state": "failed", ' + outcome.body[1:]
    return Response(body, outcome.status, media_type="application/json")


class BodyLimit:
    """Refuses a body of more bytes than are accepted, before it is read."""

    def __init__(self, app: "ASGIApp", limit: int = MAX_BODY_BYTES) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length" and value.isdigit()]
        read = lengths[0] if lengths and lengths[0] > self.limit else 0

        async def counted() -> "Message":
            nonlocal read
            message: Message = {} if read > self.limit else await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                raise RefusedError(
                    413, f"the body has more than {self.limit} bytes; send fewer rows in a call: gradients add up"
                )
            return message

        await self.app(scope, counted, send)


def app_of(
    engine: Engine, *, url: str = "http://127.0.0.1", max_body_bytes: int = MAX_BODY_BYTES,
    more: Sequence[APIRouter] = (),
) -> FastAPI:  # fmt: skip
    """The application: REST under ``/v1``, MCP under ``/mcp``, the OpenAPI page under ``/docs``.

    Args:
        url: where it is served, for the metadata of MCP.
        more: routes of other protocols.
    """
    tools = _tools(engine, url)
    sub = (
        tools.streamable_http_app(stateless_http=True, json_response=True, max_request_body_size=max_body_bytes)
        if tools
        else None
    )

    @contextlib.asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        engine.start()
        async with tools.session_manager.run() if tools else contextlib.nullcontext():
            yield
        await run_in_threadpool(engine.close)

    # The pages of FastAPI load their scripts from other servers.
    app = FastAPI(
        title="posttrain steps", summary="Drive a training step by step", lifespan=life, docs_url=None, redoc_url=None
    )
    app.add_middleware(BodyLimit, limit=max_body_bytes)

    @app.get("/docs", include_in_schema=False)
    def docs() -> Response:
        return HTMLResponse(_page(app.openapi()))

    _add_refusals(app, engine)
    _add_sessions(app, engine)
    for name in CALLS:
        _add_call(app, engine, name)
    for each in more:
        app.include_router(each)
    if sub is not None:
        app.mount("/", _Tools(sub))  # last: it takes every other address
    return app


def _add_refusals(app: FastAPI, engine: Engine) -> None:
    """Errors as JSON with a sentence, each refusal in the audit."""

    @app.exception_handler(PipelineError)
    async def refused(request: Request, error: PipelineError) -> Response:
        status = error.status if isinstance(error, RefusedError) else 422
        key = engine.records.key_of(key_of(request) or "")
        parts = request.url.path.strip("/").split("/")
        engine.records.audit(
            key=key and key["name"], client="tinker" if parts[0] == "api" else "rest",
            session=parts[2] if len(parts) > 3 else None, call=parts[-1][:64],
            status=status,
        )  # fmt: skip
        return JSONResponse({"error": str(error)}, status)

    @app.exception_handler(SQLAlchemyError)
    async def away(_request: Request, error: SQLAlchemyError) -> Response:
        why = str(error).partition("\n")[0]
        return JSONResponse({"error": f"the server's database does not answer ({why}); send the request again"}, 503)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return (
            _nowhere(request.method, request.url.path)
            if error.status_code in (404, 405)
            else JSONResponse({"error": error.detail}, error.status_code)
        )

    @app.exception_handler(RequestValidationError)
    async def not_valid(request: Request, error: RequestValidationError) -> Response:
        found = error.errors()[0]
        return JSONResponse({"error": f"{found['loc'][-1]}={found['input']}: {found['msg'].lower()}"}, 422)


def _page(schema: Mapping[str, object]) -> str:
    """The routes of an OpenAPI schema, on a page that loads nothing."""
    parts = ["<h1>posttrain steps</h1><p>The schema for programs: <a href='openapi.json'>openapi.json</a></p>"]
    paths = cast("Mapping[str, Mapping[str, Mapping[str, object]]]", schema["paths"])
    for method, path, route in [(method, path, each) for path, of in paths.items() for method, each in of.items()]:
        parts.append(
            f"<h2><code>{method.upper()} {path}</code></h2><p>{html.escape(str(route.get('description')))}</p>"
        )
        for name in ("parameters", "requestBody"):
            if found := route.get(name):
                text = html.escape(json.dumps(found, indent=1))
                parts.append(f"<details><summary>{name}</summary><pre>{text}</pre></details>")
    style, policy = "body { font-family: sans-serif; margin: 2em }", "default-src 'none'; style-src 'unsafe-inline'"
    return html_page(title="posttrain steps", style=style, body="".join(parts), policy=policy)


class _Tools:
    """MCP, and a sentence for each address that nothing serves."""

    def __init__(self, app: "ASGIApp") -> None:
        self.app = app

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        is_ours = scope["path"].startswith(("/mcp", "/.well-known/"))
        response = self.app if is_ours or scope["type"] != "http" else _nowhere(scope["method"], scope["path"])
        await response(scope, receive, send)


def _nowhere(method: str, path: str) -> JSONResponse:
    return JSONResponse({"error": f"{method} {path}: there is no such address; GET /docs lists all"}, 404)


def _add_sessions(app: FastAPI, engine: Engine) -> None:
    responses: dict[int | str, dict[str, object]] = {code: {"description": text} for code, text in _CODES.items()}
    more = {"model": "string", "id": "string", "resources": "object", "start": "object"}
    schema = _schema(Steps, {name: {"type": kind} for name, kind in more.items()}, ["model"])

    @app.post("/v1/sessions", responses=responses, openapi_extra=schema, description="Starts a session.")
    async def create(request: Request, wait: float = LONGEST_WAIT) -> Response:
        key, body = engine.authenticate(key_of(request)), await json_of(request)
        name = body.pop("id", None)
        if not (name is None or isinstance(name, str)):
            raise RefusedError(422, f"id={json.dumps(name)}: a text is accepted")
        return answer(await finished(engine, await run_in_threadpool(engine.create, key, body, name), wait))

    @app.get("/v1/sessions", description="The sessions of the key.")
    def sessions(request: Request) -> dict[str, object]:
        key = engine.authenticate(key_of(request))
        return {"sessions": [engine.info(each["id"]) for each in engine.records.sessions(key["name"])]}

    @app.get("/v1/sessions/{session}", description="One session, and the number of its next call.")
    def info(request: Request, session: str) -> dict[str, object]:
        engine.require_session(engine.authenticate(key_of(request)), session)
        return engine.info(session)

    @app.delete("/v1/sessions/{session}", description="Closes a session; its log and saved states stay.")
    def end(request: Request, session: str) -> dict[str, object]:
        key = engine.authenticate(key_of(request))
        engine.end_session(key, session)
        engine.records.audit(key=key["name"], client="rest", session=session, call="close", status=200)
        return {"session": session, "state": "closed"}

    @app.get("/v1/requests/{request_id}", description="The result of a call; waits for it so many seconds.")
    async def result(request: Request, request_id: str, wait: float = 0.0) -> Response:
        key = engine.authenticate(key_of(request))
        outcome = await run_in_threadpool(engine.outcome, request_id, key)
        return answer(await finished(engine, outcome, wait))


def _add_call(app: FastAPI, engine: Engine, name: str) -> None:
    own = {"seq": {"type": "integer", "minimum": 1}, "id": {"type": "string"}}

    @app.post(
        f"/v1/sessions/{{session}}/{name}", name=name, description=CALLS[name].__doc__,
        openapi_extra=_schema(CALLS[name], own, []),
    )  # fmt: skip
    async def call(request: Request, session: str, wait: float = LONGEST_WAIT) -> Response:
        key, body = engine.authenticate(key_of(request)), await json_of(request)
        outcome = await run_in_threadpool(submit, engine, key, session, name, body, "rest")
        return answer(await finished(engine, outcome, wait))


def submit(
    engine: Engine, key: "RowMapping", session: str, name: str, body: Mapping[str, object], client: str
) -> Outcome:  # fmt: skip
    """Accepts a call whose body may have a number and an id."""
    seq, request_id = (body.get(each) for each in OWN)
    if not (seq is None or (isinstance(seq, int) and not isinstance(seq, bool))):
        raise RefusedError(422, f"seq={json.dumps(seq)}: an integer from 1 is accepted")
    if not (request_id is None or isinstance(request_id, str)):
        raise RefusedError(422, f"id={json.dumps(request_id)}: a text is accepted")
    rest = {each: value for each, value in body.items() if each not in OWN}
    return engine.accept(key, session, name, rest, seq=seq, request_id=request_id, client=client)


def _schema(cls: type, more: Mapping[str, object], required: list[str]) -> dict[str, object]:
    """What FastAPI's page shows of a body: the schema of a dataclass, and further keys."""
    schema = _properties(cls)
    schema["properties"] = {**cast("dict[str, object]", schema.get("properties", {})), **more}
    schema["required"] = [*cast("list[str]", schema.get("required", [])), *required]
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _properties(cls: type) -> dict[str, object]:
    schema = TypeAdapter(cls).json_schema(mode="validation")
    return _inlined(schema, schema.pop("$defs", {}))


def _inlined(node: object, defs: Mapping[str, object]) -> "dict[str, object]":
    """A schema without references."""
    if isinstance(node, dict) and "$ref" in node:
        return _inlined(defs[str(node["$ref"]).rpartition("/")[2]], defs)
    if isinstance(node, dict):
        return {name: _inlined(each, defs) for name, each in node.items()}
    if isinstance(node, list):
        return [_inlined(each, defs) for each in node]  # type: ignore[return-value]
    return node  # type: ignore[return-value]


# --- MCP


def _tools(engine: Engine, url: str) -> "MCPServer | None":
    """The tools of MCP; None: the package is not installed."""
    try:
        from mcp.server import MCPServer
        from mcp.server.auth.provider import AccessToken, TokenVerifier
        from mcp.server.auth.settings import AuthSettings
    except ImportError:
        return None

    class Keys(TokenVerifier):
        async def verify_token(self, token: str) -> AccessToken | None:
            found = await run_in_threadpool(engine.records.key_of, token)
            return AccessToken(token=token, client_id=found["name"], scopes=["train"]) if found else None

    settings = AuthSettings(
        issuer_url=AnyHttpUrl(url), resource_server_url=AnyHttpUrl(f"{url}/mcp"), required_scopes=["train"],
        validate_token_resource=False,
    )  # fmt: skip
    server = MCPServer("posttrain steps", token_verifier=Keys(), auth=settings, log_level="WARNING")

    async def create_session(model: str, settings: dict[str, object] | None = None) -> dict[str, object]:
        body = {"model": model, **(settings or {})}
        return await _tool_result(engine, CREATE, None, lambda key: engine.create(key, body, client="mcp"))

    async def result(request_id: str) -> dict[str, object]:
        return await _tool_result(engine, "result", None, lambda key: engine.outcome(request_id, key))

    server.add_tool(create_session, description=_SETTINGS)
    server.add_tool(result, description="The result of a call that was waiting; waits for it a minute.")
    for name, cls in CALLS.items():
        server.add_tool(_tool(engine, name, cls), name=name, description=cls.__doc__)
    return server


def _tool(engine: Engine, name: str, cls: type[Call]) -> Callable[..., Awaitable[dict[str, object]]]:
    """A function whose parameters are the session and the fields of the call."""

    async def tool(**arguments: object) -> dict[str, object]:
        session, arguments["session"] = str(arguments.pop("session")), arguments.pop(_SAVED_BY, None)
        body = cast("dict[str, object]", without_nones(arguments))
        return await _tool_result(engine, name, session, lambda key: submit(engine, key, session, name, body, "mcp"))

    shown = cast("dict[str, dict[str, object]]", _properties(cls)["properties"])
    parameters = [Parameter("session", Parameter.KEYWORD_ONLY, annotation=str)]
    for each in fields(cls):
        default = {} if each.default_factory is not MISSING else each.default
        default = Parameter.empty if default is MISSING else default
        kind = Annotated[object, WithJsonSchema(shown[each.name])]  # ``typed`` checks it, as of every client
        own = _SAVED_BY if each.name == "session" else each.name
        parameters.append(Parameter(own, Parameter.KEYWORD_ONLY, annotation=kind, default=default))
    parameters.append(Parameter("seq", Parameter.KEYWORD_ONLY, annotation=int | None, default=None))
    tool.__signature__ = Signature(parameters, return_annotation=dict[str, object])  # type: ignore[attr-defined]
    tool.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": dict[str, object]}
    return tool


async def _tool_result(
    engine: Engine, name: str, session: str | None, accept: "Callable[[RowMapping], Outcome]"
) -> dict[str, object]:
    """The result of a call as a tool returns it (ToolError: it failed, or was refused)."""
    from mcp.server.auth.middleware.auth_context import get_access_token
    from mcp.server.mcpserver.exceptions import ToolError

    token = get_access_token()
    try:
        key = engine.authenticate(token.token if token else None)
        outcome = await finished(engine, await run_in_threadpool(accept, key), LONGEST_WAIT)
    except PipelineError as error:
        status = error.status if isinstance(error, RefusedError) else 422
        who = token and token.client_id
        engine.records.audit(key=who, client="mcp", session=session, call=name, status=status)
        raise ToolError(str(error)) from error
    found = json.loads(outcome.body)
    if outcome.status not in (200, 202):
        raise ToolError(found["error"])
    head = {"request_id": outcome.request_id, "session": outcome.session, "seq": outcome.seq}
    return {**head, "state": "waiting"} if outcome.status == 202 else {**head, "state": "done", "result": found}
