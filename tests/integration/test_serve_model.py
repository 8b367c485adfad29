"""``posttrain serve-model``: an endpoint that OpenAI's client talks to, with the answers of ``posttrain chat``."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from flows.serving.model import find_model
from flows.serving.serve_model import KEY, app_of
from lineage.errors import ConfigError
from tests import tiny
from tests.command import REPOSITORY, call
from tests.model_directories import write_adapter

CHAT = [{"role": "user", "content": "the list"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and an adapter on it."""
    folder = tmp_path_factory.mktemp("models")
    tiny.write_policy(folder / "model", initializer_range=0.5)
    write_adapter(folder / "adapter", folder / "model")
    return folder


def reported(folder: Path, name: str) -> str:
    ran = call(["chat", name, "--once", "the list", "--max-new-tokens", "8"], folder, {})
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.removesuffix("\n")


@pytest.mark.parametrize("name", ["model", "adapter"])
def test_a_chat_is_answered_as_by_chat_and_only_with_the_key(folder, name, monkeypatch):
    pytest.importorskip("openai")
    from starlette.testclient import TestClient

    monkeypatch.chdir(folder)
    client = TestClient(app_of(name, *find_model(name, [], None).load(), key="secret"))
    asked = {"messages": CHAT, "max_completion_tokens": 8, "max_tokens": 8}
    assert client.post("/v1/chat/completions", json=asked).status_code == 401
    client.headers["authorization"] = "Bearer secret"
    answer = client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert answer == reported(folder, name)
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == [name]
    other = client.post("/v1/chat/completions", json={**asked, "model": "us/other"})
    assert other.status_code == 404 and f"model={name} is accepted" in other.text
    assert client.get(f"/v1/models/{name}").json()["id"] == name and client.get("/v1/models/other").status_code == 404
    long = [{"role": "user", "content": "the list " * 10_000}]
    for odd in (
        {"messages": []},
        {"n": 2},
        {"max_tokens": 0},
        {"logprobs": True},
        {"messages": long},
        {"messages": ["a"]},
    ):
        assert client.post("/v1/chat/completions", json={**asked, **odd}).status_code == 400
    assert client.post("/load_model", json={"model": "us/other"}).status_code == 404


def test_vllm_is_given_a_whole_model_the_name_and_the_key(folder, tmp_path, monkeypatch):
    """A stand-in for vLLM writes what it was called with."""
    server = tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    for place in (server.parent, *list(server.parents)[1:3]):
        (place / "__init__.py").touch()
    server.write_text(
        "import json, os, pathlib, sys\nmodel = pathlib.Path(sys.argv[2])\n"
        f"pathlib.Path({str(tmp_path / 'seen')!r}).write_text(json.dumps([sys.argv[1:], sorted(os.listdir(model)), "
        "os.environ.get('VLLM_API_KEY')]))\nsys.exit(7 if '7' in sys.argv else 0)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    environment = {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", KEY: "secret"}
    ran = call(["serve-model", "adapter", "--port", "0"], folder, environment)
    assert ran.returncode == 0, ran.stderr
    cli_args, files, key = json.loads((tmp_path / "seen").read_text())
    assert cli_args[2:6] == ["--served-model-name", "adapter", "--host", "127.0.0.1"] and cli_args[7] != "0"
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja"} <= {*files} and key == "secret"
    assert not Path(cli_args[1]).exists()
    whole = call(["serve-model", "model", "--port", "0"], folder, environment)
    assert whole.returncode == 0 and json.loads((tmp_path / "seen").read_text())[0][1] == str(folder / "model")


@pytest.mark.parametrize(
    ("cli_args", "reported"),
    [
        (("model", "--host", "0.0.0.0"), KEY),
        (("nowhere",), "nowhere"),
        (("model", "--engine", "vllm"), "vllm is not installed"),
        (("model", "--port", "BUSY"), "a free port is accepted"),
    ],
)
def test_wrong_words_end_with_2(folder, cli_args, reported):
    pytest.importorskip("openai")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        cli_args = [str(busy.getsockname()[1]) if word == "BUSY" else word for word in cli_args]
        ran = call(["serve-model", *cli_args], folder, {})
    assert ran.returncode == 2 and reported in ran.stderr, ran.stderr


@pytest.mark.slow
def test_openais_client_talks_with_a_served_model(folder):
    openai = pytest.importorskip("openai")
    process = subprocess.Popen(
        [sys.executable, "-m", "flows", "serve-model", "model", "--port", "0", "--engine", "transformers"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(REPOSITORY), KEY: "secret"}, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        address = process.stdout.readline().split(" at ")[1].split()[0]
        client = openai.OpenAI(base_url=address, api_key="secret", max_retries=5)
        assert [each.id for each in client.models.list()] == ["model"]
        settings = {"model": "model", "messages": CHAT, "max_tokens": 8}
        answer = client.chat.completions.create(**settings).choices[0]
        assert answer.message.content == reported(folder, "model")
        pieces = client.chat.completions.create(**settings, stream=True)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert streamed == answer.message.content
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=address, api_key="wrong").models.list()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) in (0, 130)


def test_what_is_no_model_is_refused_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="there is no store here"):
        find_model("x" * 5000, [], None)
    with pytest.raises(ConfigError, match=r"no config\.json in"):  # before it looks at all that is below
        find_model(str(tmp_path), [], None)
