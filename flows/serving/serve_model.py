"""``posttrain serve-model``: an OpenAI-compatible endpoint of one model, by transformers' server or vLLM."""

import argparse
import contextlib
import hmac
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flows.serving.model import Found, find_model
from lineage.errors import ConfigError, PipelineError

if TYPE_CHECKING:
    from types import FrameType

    from fastapi import FastAPI
    from starlette.types import ASGIApp
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KEY = "POSTTRAIN_API_KEY"  # environment variable
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_PORT = 8000


def add_serve_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a model, such as sft or alias:champion")
    parser.add_argument("--engine", choices=["transformers", "vllm"], help="default: vllm if it is installed")
    parser.add_argument("--host", default="127.0.0.1", help=f"default 127.0.0.1; others need {KEY}")
    parser.add_argument("--port", type=int, default=_PORT, help=f"default {_PORT}; 0: a free one")


def run_serve_model(options: argparse.Namespace) -> int:
    key = os.environ.get(KEY)
    if options.host not in _LOOPBACK and not key:
        raise ConfigError(
            f"--host {options.host}: others could use the model; a key is accepted, which clients send as their API "
            f"key; set {KEY}, or leave --host out"
        )
    has_vllm = importlib.util.find_spec("vllm") is not None
    engine = options.engine or ("vllm" if has_vllm else "transformers")
    needed = {"vllm": ("vllm",), "transformers": ("openai", "fastapi", "uvicorn")}[engine]
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"--engine {engine}: {', '.join(missing)} is not installed; run: pip install {' '.join(missing)}"
        )
    found = find_model(options.ref, options.overrides, options.config_dir)
    with bound_socket(options.host, options.port) as bound:
        address = f"http://{options.host}:{bound.getsockname()[1]}/v1"
        if engine == "transformers":
            model, tokenizer = found.load()
            serve_app(app_of(found.ref, model, tokenizer, key), bound, _ready(found, address))
            return 0
    return _serve_by_vllm(found, address, options.host, key)


@contextlib.contextmanager
def bound_socket(host: str, port: int) -> Iterator[socket.socket]:
    """A socket on that port (ConfigError: another process has it)."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot be used ({error}); a free port is accepted: --port 0"
            ) from error
        yield bound


def _ready(found: Found, address: str) -> str:
    return f"serving {found.ref} at {address} (model={found.ref}); Ctrl-C ends"


def serve_app(app: "ASGIApp", bound: socket.socket, shown: str, on_exit: Callable[[], None] | None = None) -> None:
    """Prints ``shown``, and answers requests until a signal ends it.

    Args:
        on_exit: called at the signal, before requests that wait are cancelled.
    """
    import uvicorn

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: "FrameType | None") -> None:
            super().handle_exit(sig, frame)
            if on_exit:
                on_exit()

    server = Server(uvicorn.Config(app, log_level="warning"))
    bound.listen()  # a client that reads the address may connect at once
    print(shown, flush=True)
    server.run(sockets=[bound])


def app_of(
    name: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", key: str | None = None
) -> "FastAPI":  # fmt: skip
    """The endpoint: transformers' handlers of chats and completions, for one model that is already loaded.

    Args:
        key: what clients must send as their API key; None: nothing.
    """
    from fastapi import FastAPI, Request, Response
    from fastapi.responses import JSONResponse
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.model_manager import ModelManager
    from transformers.cli.serving.utils import GenerationState

    from tasks.evaluate.answers import stop_tokens

    model.generation_config.eos_token_id = sorted(stop_tokens(model, tokenizer)) or None
    model.generation_config.pad_token_id = tokenizer.pad_token_id

    class One(ModelManager):
        def load_model_and_processor(
            self, model_id_and_revision: str, *args: object, **kwargs: object
        ) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
            _require_name(model_id_and_revision.removesuffix("@main"), name)
            return model, tokenizer

    manager, state = One(), GenerationState()
    chat, text = ChatCompletionHandler(manager, state, {}), CompletionHandler(manager, state)
    app = FastAPI()

    @app.middleware("http")
    async def allowed(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if key and not hmac.compare_digest(sent.encode(), key.encode()):
            return JSONResponse({"error": {"message": f"the API key is not that of {KEY}"}}, status_code=401)
        return await call_next(request)

    @app.post("/v1/chat/completions")
    async def chats(body: dict[str, object]) -> Response:
        _require_answerable(body, model, tokenizer)
        return await chat.handle_request({"model": name, **body}, str(uuid.uuid4()))  # type: ignore[no-any-return]

    @app.post("/v1/completions")
    async def completions(body: dict[str, object]) -> Response:
        _require_answerable(body, model, tokenizer)
        return await text.handle_request({"model": name, **body}, str(uuid.uuid4()))  # type: ignore[no-any-return]

    served = {"id": name, "object": "model", "created": 0, "owned_by": "posttrain"}

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [served]}

    @app.get("/v1/models/{asked:path}")
    async def retrieved(asked: str) -> dict[str, object]:
        _require_name(asked, name)
        return served

    return app


def _require_name(asked: str, name: str) -> None:
    from fastapi import HTTPException

    if asked != name:
        raise HTTPException(404, f"{asked}: is not served here; model={name} is accepted")


def _require_answerable(
    body: Mapping[str, object], model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase"
) -> None:
    """Refuses what transformers' server fails at, or leaves out without a word."""
    from fastapi import HTTPException
    from transformers.cli.serving.utils import BaseHandler, Modality

    messages, prompt = body.get("messages"), body.get("prompt")
    if not messages and not prompt:
        raise HTTPException(400, "messages: there is none; give at least one (of /v1/completions: a prompt)")
    for field in ("n", "best_of"):
        if body.get(field) not in (None, 1):
            raise HTTPException(400, f"{field}={body[field]}: one answer is accepted; leave {field} out, and ask again")
    if any(body.get(field) for field in ("logprobs", "top_logprobs")):
        raise HTTPException(400, "logprobs: there are none; leave it out")
    for field in ("max_tokens", "max_completion_tokens"):
        most = body.get(field)
        if most is not None and (not isinstance(most, int) or most < 1):
            raise HTTPException(400, f"{field}={most}: 1 or more is accepted")
    read = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    try:
        converted = BaseHandler.get_processor_inputs_from_messages(messages, Modality.LLM) if messages else []
        tools = body.get("tools") or None
        asked = (
            tokenizer.apply_chat_template(converted, tools=tools, add_generation_prompt=True, tokenize=False)
            if converted
            else prompt
        )
    except Exception as error:  # a template raises errors of its own
        found = f"{type(error).__name__}: {error}"
        raise HTTPException(400, f"messages: they cannot be read ({found}); role and content are accepted") from error
    length = len(tokenizer(asked, add_special_tokens=not converted)["input_ids"]) if isinstance(asked, str) else 0
    if read is not None and length >= read:
        raise HTTPException(400, f"the prompt has {length} tokens, and the model reads {read}; ask with less")


def _serve_by_vllm(found: Found, address: str, host: str, key: str | None) -> int:
    """Runs vLLM's own server until it ends; a model with adapters is merged into a temporary folder for it.

    Raises:
        PipelineError: it failed.
    """
    from flows.serving.export import Loaded
    from tasks.model.adapter_files import base_and_adapters
    from tasks.model.tokenizers import read_otherwise

    if other := read_otherwise(found.path):
        raise ConfigError(
            f"{found.ref}: vLLM reads its tokenizer by {other}, which makes other tokens than its tokenizer.json; "
            "--engine transformers is accepted"
        )
    base, adapters = base_and_adapters(found.path)
    with tempfile.TemporaryDirectory() as scratch:
        path = base if not adapters and base == found.path else Path(scratch)
        if path != base:
            Loaded.of(found).write_merged(path, "bf16")
        port = address.rpartition(":")[2].removesuffix("/v1")
        print(_ready(found, address), flush=True)
        ran = subprocess.run(
            [
                sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(path),
                "--served-model-name", found.ref, "--host", host, "--port", port,
            ],
            env={**os.environ, **({"VLLM_API_KEY": key} if key else {})}, check=False,
        )  # fmt: skip
    if ran.returncode:
        raise PipelineError(f"vLLM ended with exit code {ran.returncode}; see its messages above")
    return 0
