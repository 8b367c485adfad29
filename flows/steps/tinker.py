"""The protocol of the tinker client (0.38), over the same engine: routes under ``/api/v1``.

A training run of that client is a session; its numbers of calls are ours. Messages in protobuf are described here by
their field numbers, since their ``.proto`` is not published.
"""

import array
import base64
import json
import logging
import math
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from flows.steps.engine import CREATE, Engine, Outcome, RefusedError
from flows.steps.server import finished, json_of, key_of
from lineage.source.model_files import read_json

if TYPE_CHECKING:
    from sqlalchemy import RowMapping

logger = logging.getLogger(__name__)
_PREFIX, _SCHEME, _OWN = "/api/v1", "tinker://", "posttrain."
_POLL_SECONDS = 30.0
_LONGEST = 32_768  # tokens of a row, where the model's positions allow it
_LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")
# Of the client -> ours.
_COLUMNS = {
    **{name: name for name in ("target_tokens", "weights", "logprobs", "advantages")}, "sequence_ratio_mask": "weights"
}  # fmt: skip
_PARTS = {"attn": "attention", "mlp": "mlp", "unembed": "head"}  # flag of its LoRA -> our name of these layers
_PROTO = "application/x-protobuf"
_FLOAT32, _INT64, _INT32 = 1, 2, 3
_CODES = {_FLOAT32: "f", _INT64: "q", _INT32: "i"}

# Message -> fields: number, name, type; ``*``: repeated; ``map:``: from a text.
SCHEMA: Mapping[str, str] = {
    "EncodedText": "1 tokens bytes",
    "Chunk": "1 encoded_text EncodedText; 2 image Opaque; 3 dmel Opaque",
    "Opaque": "",
    "SparseCsr": "1 values bytes; 2 crow_indices bytes; 3 col_indices bytes",
    "Tensor": "1 dense bytes; 2 sparse_csr SparseCsr; 3 dtype int32; 4 shape int64*",
    "Datum": "1 model_input Chunk*; 2 loss_fn_inputs map:Tensor",
    "LossConfigValue": "1 number double; 2 text string",
    "ForwardBackwardRequest": "1 model_id string; 2 seq_id int32; 3 data Datum*; 4 loss_fn string; "
    "5 loss_fn_config map:double; 6 forward_only bool; 7 loss_fn_config_v2 map:LossConfigValue",
    "BatchedTensor": "1 data bytes; 2 offsets bytes; 3 dtype int32; 4 trailing_shape int64*",
    "ArrayRecord": "1 type_tag string; 2 fields map:BatchedTensor; 3 num_datums int64",
    "ForwardBackwardOutput": "1 loss_fn_output_type string; 2 loss_fn_outputs ArrayRecord*; 3 metrics map:double",
    "SampledSequence": "1 stop_reason int32; 2 tokens bytes; 3 logprobs bytes",
    "SampleResponse": "1 sequences SampledSequence*; 2 prompt_logprobs bytes",
}


def _messages() -> "dict[str, type]":
    """A class for each message of ``SCHEMA``."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="posttrain_steps.proto", package="posttrain", syntax="proto3")
    for name, text in SCHEMA.items():
        message = file.message_type.add(name=name)
        for number, own, kind in (part.split() for part in text.split("; ") if part):
            is_map, repeated = kind.startswith("map:"), kind.endswith("*")
            kind = kind.removeprefix("map:").removesuffix("*")
            if is_map:
                entry = message.nested_type.add(name="".join(each.title() for each in own.split("_")) + "Entry")
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, label=field.LABEL_OPTIONAL, type=field.TYPE_STRING)
                entry.field.add(name="value", number=2, label=field.LABEL_OPTIONAL, **_type(kind))
                kind, repeated = f"{name}.{entry.name}", True
            label = field.LABEL_REPEATED if repeated else field.LABEL_OPTIONAL
            message.field.add(name=own, number=int(number), label=label, **_type(kind))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {name: pool.FindMessageTypeByName(f"posttrain.{name}") for name in SCHEMA}
    return {name: message_factory.GetMessageClass(each) for name, each in found.items()}


def _type(kind: str) -> dict[str, object]:
    known = getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{kind.upper()}", None)
    if known is not None:
        return {"type": known}
    return {"type": descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE, "type_name": f".posttrain.{kind}"}


MESSAGES = _messages()


# --- requests


def rows_of(request: object) -> list[dict[str, object]]:
    """The rows of a request for gradients (RefusedError: it has images, or columns of more than one dimension)."""
    found = []
    for number, datum in enumerate(request.data):  # type: ignore[attr-defined]
        tokens: list[int] = []
        for chunk in datum.model_input:
            if not chunk.HasField("encoded_text"):
                raise RefusedError(422, f"data[{number}]: images and sound are not accepted; send tokens alone")
            tokens += map(int, _numbers(chunk.encoded_text.tokens, _INT32))
        row: dict[str, object] = {"tokens": tokens}
        for name, tensor in datum.loss_fn_inputs.items():
            if name not in _COLUMNS:
                raise RefusedError(422, f"data[{number}].{name}: {', '.join(_COLUMNS)} are accepted")
            if tensor.HasField("sparse_csr") or len(tensor.shape) > 1:
                raise RefusedError(422, f"data[{number}].{name}: one value for each token is accepted, not a matrix")
            row[_COLUMNS[name]] = _numbers(tensor.dense, tensor.dtype)
        found.append(row)
    return found


def _numbers(data: bytes, dtype: int) -> list[int] | list[float]:
    if dtype not in _CODES:
        raise RefusedError(422, f"dtype={dtype}: float32, int64 and int32 are accepted")
    found = array.array(_CODES[dtype])
    found.frombytes(data)
    return found.tolist()


def settings_of(body: Mapping[str, object], path: Path) -> dict[str, object]:
    """The settings of a session for a training run of the client (RefusedError: there is no such setting here)."""
    _require_adam(body)
    config = read_json(path, "config.json")
    positions = config.get("max_position_embeddings") if isinstance(config, dict) else None
    longest = min(_LONGEST, positions) if isinstance(positions, int) and positions > 0 else _LONGEST
    found: dict[str, object] = {"max_length": longest, **_workers(body)}
    lora = cast("Mapping[str, object]", body.get("lora_config") or {})
    if lora.get("seed") is not None:
        found["seed"] = lora["seed"]
    if not lora.get("rank"):
        return found
    flags = {name: lora.get(f"train_{flag}", True) for flag, name in _PARTS.items()}
    if not any(flags.values()):
        raise RefusedError(422, "lora_config: train_attn, train_mlp and train_unembed are false; set one of them")
    targets = [name for name, is_trained in flags.items() if is_trained]
    if flags["attention"] and flags["mlp"]:
        targets = ["all-linear", *targets[2:]]
    return {**found, "adapter": {"rank": lora["rank"], "target_modules": ",".join(targets)}}


def _require_adam(body: Mapping[str, object]) -> None:
    optimizer = cast("Mapping[str, object]", body.get("optimizer_config") or {})
    if optimizer.get("type", "adamw") != "adamw":
        raise RefusedError(422, f"optimizer_config.type={optimizer['type']}: adamw is accepted")


def _workers(body: Mapping[str, object]) -> dict[str, object]:
    """The workers that ``user_metadata`` names, as ``posttrain.num_workers``: the protocol has no word for them."""
    metadata = cast("Mapping[str, object]", body.get("user_metadata") or {})
    own = {name.removeprefix(_OWN): value for name, value in metadata.items() if name.startswith(_OWN)}
    numbers = {name: int(value) if str(value).isdigit() else value for name, value in own.items()}  # type: ignore[call-overload]
    return {"resources": numbers} if numbers else {}


def place_of(path: object) -> tuple[str, str]:
    """The session and the saved state of ``tinker://RUN/KIND/NAME`` (RefusedError: it is no such path)."""
    parts = str(path).removeprefix(_SCHEME).split("/")
    if not str(path).startswith(_SCHEME) or len(parts) != 3 or parts[1] not in ("weights", "sampler_weights"):
        raise RefusedError(404, f"{path}: tinker://RUN/weights/NAME and tinker://RUN/sampler_weights/NAME are accepted")
    return parts[0], f"{parts[1]}.{parts[2]}"


def sampler_id(session: str, saved: str | None) -> str:
    """The id of a sampler: what it reads, so that no table is needed."""
    return base64.urlsafe_b64encode(json.dumps([session, saved]).encode()).decode().rstrip("=")


def sampler_of(name: object) -> tuple[str, str | None]:
    """The session and saved state of a sampler's id."""
    try:
        session, saved = json.loads(base64.urlsafe_b64decode(str(name) + "=="))
    except ValueError as error:
        raise RefusedError(404, f"sampler {name}: there is none; create a sampling session") from error
    return str(session), saved


def generate_of(body: Mapping[str, object], saved: str | None, longest: int) -> dict[str, object]:
    """The arguments of ``generate`` for a request to sample."""
    prompt = cast("Mapping[str, Sequence[Mapping[str, object]]]", body.get("prompt") or {})
    chunks = prompt.get("chunks", ())
    if any(each.get("type") != "encoded_text" for each in chunks):
        raise RefusedError(422, "prompt: images and sound are not accepted; send tokens alone")
    if body.get("topk_prompt_logprobs"):
        raise RefusedError(422, "topk_prompt_logprobs: is not accepted; leave it out")
    tokens = [token for each in chunks for token in cast("list[int]", each["tokens"])]
    params = cast("Mapping[str, object]", body.get("sampling_params") or {})
    stop, top_k = params.get("stop"), params.get("top_k", -1)
    limit = cast("int | None", params.get("max_tokens")) or longest - len(tokens)
    found = {
        "prompts": [tokens], "num_samples": body.get("num_samples", 1), "max_tokens": limit,
        "seed": params.get("seed"), "temperature": params.get("temperature", 1.0), "top_p": params.get("top_p", 1.0),
        "top_k": None if top_k == -1 else top_k, "stop": [stop] if isinstance(stop, str) else stop, "saved": saved,
        "prompt_logprobs": bool(body.get("prompt_logprobs")),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


# --- answers


def output_of(result: Mapping[str, object]) -> bytes:
    """The result of ``forward`` or ``backward`` as the client reads it."""
    logprobs = cast("list[list[float]]", result["logprobs"])
    output = MESSAGES["ForwardBackwardOutput"](loss_fn_output_type="ArrayRecord")
    loss = result["loss"]
    output.metrics["loss:sum"] = math.nan if loss is None else loss
    record = output.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    offsets = [0]
    for each in logprobs:
        offsets.append(offsets[-1] + 4 * len(each))
    values = array.array("f", [value for each in logprobs for value in each])
    tensor = record.fields["logprobs"]
    tensor.data, tensor.offsets, tensor.dtype = values.tobytes(), array.array("q", offsets).tobytes(), _FLOAT32
    return bytes(output.SerializeToString())


def sample_of(result: Mapping[str, object]) -> bytes:
    """The result of ``generate`` as the client reads it."""
    response = MESSAGES["SampleResponse"]()
    [group] = cast("list[list[Mapping[str, object]]]", result["completions"])
    for each in group:
        response.sequences.add(
            stop_reason=0 if each["stop_reason"] == "stop" else 1,
            tokens=array.array("i", cast("list[int]", each["tokens"])).tobytes(),
            logprobs=array.array("f", cast("list[float]", each["logprobs"])).tobytes(),
        )
    if "prompt_logprobs" in result:
        [logps] = cast("list[list[float | None]]", result["prompt_logprobs"])
        values = [math.nan if value is None else value for value in logps]
        response.prompt_logprobs = array.array("f", values).tobytes()
    return bytes(response.SerializeToString())


def answer(outcome: Outcome) -> Response:
    """The outcome of a promise."""
    if outcome.status == 202:
        return _json({"type": "try_again", "request_id": outcome.request_id, "queue_state": "active"})
    result = json.loads(outcome.body)
    if outcome.status != 200:
        return _json({"error": result["error"], "category": "user" if outcome.status < 500 else "server"})
    name = outcome.call
    if name in ("forward", "backward"):
        return Response(output_of(result), media_type=_PROTO)
    if name == "generate":
        return Response(sample_of(result), media_type=_PROTO)
    if name == "step":
        norm = result["grad_norm"]
        return _json({"metrics": {"grad_norm": norm, "step": result["step"]} if norm is not None else {"overflow": 1}})
    if name == "save":
        kind, _, own = result["saved"].partition(".")
        if own.startswith(_EPHEMERAL):
            made = sampler_id(outcome.session, result["saved"])
            return _json({"type": "save_weights_for_sampler", "sampling_session_id": made})
        kinds = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}
        return _json({"type": kinds[kind], "path": f"{_SCHEME}{outcome.session}/{kind}/{own}"})
    kind = "create_model" if name == CREATE and not result["started_from"] else "load_weights"
    return _json({"type": kind, "model_id": outcome.session})


_EPHEMERAL = "ephemeral-"


def _json(found: Mapping[str, object]) -> Response:
    return Response(json.dumps(found), media_type="application/json")


def promise(outcome: Outcome, **more: object) -> Response:
    """The id of a call that was accepted."""
    return _json({"request_id": outcome.request_id, "model_id": outcome.session, **more})


# --- routes


class _Route(APIRoute):
    """Refuses a body whose parts have other types than the client sends."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[None, None, Response]]:
        own = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await own(request)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                logger.info("path=%s state=refused", self.path, exc_info=True)
                found = f"{type(error).__name__}: {error}"
                raise RefusedError(422, f"{self.path}: the body is not as the client sends it ({found})") from error

        return handle


def routes(engine: Engine) -> APIRouter:
    """All routes of the client."""
    router = APIRouter(prefix=_PREFIX, include_in_schema=False, route_class=_Route)
    _add_about(router, engine)
    _add_training(router, engine)
    _add_updates(router, engine)
    _add_sampling(router, engine)

    @router.post("/retrieve_future")
    async def retrieve_future(request: Request) -> Response:
        key, body = engine.authenticate(key_of(request)), await json_of(request)
        outcome = await run_in_threadpool(engine.outcome, str(body.get("request_id")), key)
        return answer(await finished(engine, outcome, _POLL_SECONDS))

    return router


def _add_about(router: APIRouter, engine: Engine) -> None:
    @router.post("/client/config")
    @router.post("/client/dynamic_config")
    def config(request: Request) -> Response:
        engine.authenticate(key_of(request))
        found = {"sample_max_concurrent_requests": 64, "custom_loss_server_side": False}
        return _json(found if request.url.path.endswith("/config") else {})

    @router.post("/create_session")
    def create_session(request: Request) -> Response:
        engine.authenticate(key_of(request))
        return _json({"type": "create_session", "session_id": uuid.uuid4().hex[:16]})

    @router.post("/session_heartbeat")
    def heartbeat(request: Request) -> Response:
        engine.authenticate(key_of(request))
        return _json({"type": "session_heartbeat"})

    @router.post("/telemetry")
    def telemetry(request: Request) -> Response:
        engine.authenticate(key_of(request))
        return _json({"status": "accepted"})

    @router.post("/sessions/{session}/finish")
    def finish(request: Request, session: str) -> Response:
        engine.authenticate(key_of(request))
        return Response(status_code=204)

    @router.post("/get_info")
    async def get_info(request: Request) -> Response:
        key, body = engine.authenticate(key_of(request)), await json_of(request)
        found = engine.require_session(key, str(body.get("model_id")))
        about = _about(found)
        data = {"model_name": about["base_model"], "tokenizer_id": about["base_model"]}
        rest = {name: about.get(name) for name in ("is_lora", "lora_rank")}
        named = {"type": "get_info", "model_id": found["id"], "model_name": found["model"]}
        return _json({**named, "model_data": data, **rest})

    @router.get("/training_runs/{run}")
    def training_run(request: Request, run: str) -> Response:
        found = engine.require_session(engine.authenticate(key_of(request)), run)
        last = datetime.fromtimestamp(found["created"], UTC).isoformat()
        return _json({"training_run_id": run, "model_owner": found["key"], "last_request_time": last, **_about(found)})

    @router.get("/get_server_capabilities")
    def capabilities(request: Request) -> Response:
        key = engine.authenticate(key_of(request))
        names = sorted({each["model"] for each in engine.records.sessions(key["name"])})
        return _json({"supported_models": [{"model_name": name} for name in names]})

    @router.post("/weights_info")
    async def weights_info(request: Request) -> Response:
        key, body = engine.authenticate(key_of(request)), await json_of(request)
        session, _ = place_of(body.get("tinker_path"))
        return _json(_about(engine.require_session(key, session)))


def _about(found: "RowMapping") -> dict[str, object]:
    about = {"base_model": found["model"], "is_lora": False}
    if (adapter := json.loads(found["settings"]).get("adapter")) is None:
        return about
    targets = adapter.get("target_modules", "all-linear").split(",")
    flags = {
        f"train_{flag}": name in targets or (name != "head" and "all-linear" in targets)
        for flag, name in _PARTS.items()
    }
    return {**about, "is_lora": True, "lora_rank": adapter.get("rank"), **flags}


async def _accept(
    engine: Engine, request: Request, name: str, body: Mapping[str, object], arguments: Mapping[str, object]
) -> Outcome:  # fmt: skip
    key, seq = engine.authenticate(key_of(request)), body.get("seq_id")
    if not isinstance(seq, int):
        raise RefusedError(422, f"seq_id={seq}: an integer from 1 is accepted")
    return await run_in_threadpool(
        lambda: engine.accept(key, str(body.get("model_id")), name, arguments, seq=seq, client="tinker")
    )


def _add_training(router: APIRouter, engine: Engine) -> None:
    @router.post("/create_model")
    async def create_model(request: Request) -> Response:
        key, body = engine.authenticate(key_of(request)), await json_of(request)
        return promise(await run_in_threadpool(_create, engine, key, body, None))

    @router.post("/load_weights")
    async def load_weights(request: Request) -> Response:
        key, body = engine.authenticate(key_of(request)), await json_of(request)
        session, saved = place_of(body.get("path"))
        if body.get("model_id") is not None:
            arguments = {"saved": saved, "session": session, "optimizer": bool(body.get("optimizer"))}
            return promise(await _accept(engine, request, "load", body, arguments))
        start = {"session": session, "saved": saved, "optimizer": bool(body.get("optimizer"))}
        return promise(await run_in_threadpool(_create, engine, key, body, start))

    @router.post("/forward_backward")
    async def forward_backward(request: Request) -> Response:
        message = MESSAGES["ForwardBackwardRequest"]()
        try:
            message.ParseFromString(await request.body())
        except Exception as error:  # protobuf's own, which has no base in its stubs
            raise RefusedError(422, f"the body is no ForwardBackwardRequest ({error})") from error
        if message.loss_fn not in _LOSSES:
            raise RefusedError(422, f"loss_fn={message.loss_fn}: {', '.join(_LOSSES)} are accepted; set one of them")
        options = {**message.loss_fn_config, **{name: each.number for name, each in message.loss_fn_config_v2.items()}}
        name = "forward" if message.forward_only else "backward"
        arguments = {"data": rows_of(message), "loss": message.loss_fn, "options": options}
        return promise(
            await _accept(engine, request, name, {"model_id": message.model_id, "seq_id": message.seq_id}, arguments)
        )


def _add_updates(router: APIRouter, engine: Engine) -> None:
    @router.post("/optim_step")
    async def optim_step(request: Request) -> Response:
        body = await json_of(request)
        params = body.get("adam_params")
        if not isinstance(params, dict):
            raise RefusedError(422, "adam_params is missing; other optimizers are not accepted")
        arguments = {
            "learning_rate": params.get("learning_rate", 1e-4), "eps": params.get("eps", 1e-12),
            "betas": [params.get("beta1", 0.9), params.get("beta2", 0.95)],
            "weight_decay": params.get("weight_decay", 0.0), "max_grad_norm": params.get("grad_clip_norm", 0.0),
        }  # fmt: skip
        return promise(await _accept(engine, request, "step", body, arguments))

    @router.post("/save_weights")
    async def save_weights(request: Request) -> Response:
        body = await json_of(request)
        return promise(await _accept(engine, request, "save", body, {"to": f"weights.{body.get('path')}"}))

    @router.post("/save_weights_for_sampler")
    async def save_weights_for_sampler(request: Request) -> Response:
        body = await json_of(request)
        name = body.get("path") or f"{_EPHEMERAL}{body.get('seq_id')}"
        return promise(await _accept(engine, request, "save", body, {"to": f"sampler_weights.{name}"}))


def _create(
    engine: Engine, key: "RowMapping", body: Mapping[str, object], start: Mapping[str, object] | None
) -> Outcome:  # fmt: skip
    """Starts a session under the name that the client computes."""
    name = f"{body.get('session_id')}:train:{body.get('model_seq_id')}"
    if start is not None:
        source = engine.require_session(key, str(start["session"]))
        if body.get("base_model") not in (None, source["model"]):
            raise RefusedError(
                422, f"base_model={body['base_model']}: the saved state is of {source['model']}; leave base_model out"
            )
        _require_adam(body)
        made = {"model": source["model"], **json.loads(source["settings"])}
        return engine.create(key, {**made, "start": dict(start)}, name, "tinker")
    model = str(body.get("base_model"))
    settings = settings_of(body, engine.model_path(model))
    return engine.create(key, {"model": model, **settings}, name, "tinker")


def _add_sampling(router: APIRouter, engine: Engine) -> None:
    @router.post("/create_sampling_session")
    async def create_sampling_session(request: Request) -> Response:
        key, body = engine.authenticate(key_of(request)), await json_of(request)
        if body.get("model_path") is not None:
            session, saved = place_of(body["model_path"])
            engine.require_session(key, session)
            return _json({"type": "create_sampling_session", "sampling_session_id": sampler_id(session, saved)})
        name, model = f"{body.get('session_id')}:sample:{body.get('sampling_session_seq_id')}", str(body["base_model"])
        # An adapter that was not trained changes nothing, and shares the weights of its base with other sessions.
        settings = settings_of({"lora_config": {"rank": 1}}, await run_in_threadpool(engine.model_path, model))
        await run_in_threadpool(engine.create, key, {"model": model, **settings}, name, "tinker")
        return _json({"type": "create_sampling_session", "sampling_session_id": sampler_id(name, None)})

    @router.get("/samplers/{name}")
    def sampler(request: Request, name: str) -> Response:
        session, saved = sampler_of(name)
        found = engine.require_session(engine.authenticate(key_of(request)), session)
        kind, _, own = (saved or "").partition(".")
        path = {"model_path": f"{_SCHEME}{session}/{kind}/{own}"} if saved else {}
        return _json({"sampler_id": name, "base_model": found["model"], **path})

    @router.post("/asample")
    async def asample(request: Request) -> Response:
        key, body = engine.authenticate(key_of(request)), await json_of(request)
        session, saved = sampler_of(body.get("sampling_session_id"))
        found = engine.require_session(key, session)
        arguments = generate_of(body, saved, json.loads(found["settings"])["max_length"])
        outcome = await run_in_threadpool(lambda: engine.accept(key, session, "generate", arguments, client="tinker"))
        ids = [f"{outcome.request_id}:{number}" for number in range(cast(int, arguments["num_samples"]))]
        return promise(outcome, sample_sequence_ids=ids)
