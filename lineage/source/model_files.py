"""Checks of a model's directory: its files must be valid, and its own, since they are copied into each output."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from pathlib import Path

from lineage.errors import ConfigError

# Copied byte for byte from a stage's input: a tokenizer saves other bytes than those it was loaded from.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
# Of models that also read images or sound: copied too, so that an output reads what its input read.
PROCESSOR_FILES = (
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    "audio_tokenizer_config.json", "tekken.json",
)  # fmt: skip
_WEIGHTS, _INDEX = ".safetensors", ".index.json"
_READ = (
    "config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "adapter_config.json", f"*{_INDEX}", f"*{_WEIGHTS}",
)  # fmt: skip


def require_own_files(directory: Path) -> None:
    """Requires that all files of a model, targets of links included, are in its directory.

    The links of a hub cache's snapshot into the ``blobs/`` of the same model are accepted.

    Raises:
        ConfigError: a link leads out of the directory or to a directory, or an entry is not a file, such as a pipe.
    """
    root = directory.resolve()
    own = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]
    for folder, folders, files in os.walk(root):
        for path in (Path(folder, name) for name in sorted([*folders, *files])):
            target = Path(os.path.realpath(path)) if path.is_symlink() else path
            is_wrong = target.is_dir() if target != path else path.name in files and not path.is_file()
            if is_wrong or not any(target.is_relative_to(each) for each in own):
                raise ConfigError(
                    f"{path} is {f'a link to {target}' if target != path else 'no file'}; a model's directory of "
                    "files, and of links to files in it, is accepted; replace it by a copy (cp -rL copies what links "
                    "lead to)"
                )


def require_sound(directory: Path, passed: Callable[[Path], bool] | None = None) -> None:
    """Refuses a model with unreadable settings, tokenizer or weight headers, or with weights outside its directory.

    Args:
        passed: whether a file was checked before and can be skipped.
    """
    from safetensors import SafetensorError, safe_open

    for path in sorted({path for name in _READ for path in directory.glob(name)}):
        if passed and path.is_file() and passed(path):
            continue
        try:
            if path.suffix == _WEIGHTS:
                with safe_open(path, framework="numpy"):  # reads the header, and compares it with the file size
                    continue
            if not isinstance(found := json.loads(path.read_bytes()), dict):
                raise ValueError("not a JSON object")
            names = {os.fspath(name) for name in found["weight_map"].values()} if path.name.endswith(_INDEX) else ()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            raise ConfigError(
                f"{path}: cannot be read as a part of a model ({type(error).__name__}: {error}); a file as "
                "save_pretrained writes it is accepted; it was cut or damaged: write or download it again"
            ) from error
        for name in sorted(names):
            if os.path.normpath(name).startswith(("/", "..")):
                raise ConfigError(f"{path} names {name}, which is not in its directory; files in it are accepted")
    weight_places(directory)


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def weight_places(directory: Path) -> dict[str, Path]:
    """Name of each tensor of a model -> its file, as every reader of weights finds them; empty: there are none.

    Raises:
        ConfigError: the weights are there in two forms, of which transformers reads the one file, or the index names
            other tensors than its files hold.
    """
    from safetensors import safe_open

    def names(path: Path) -> set[str]:
        with safe_open(path, framework="numpy") as file:
            return set(file.keys())

    whole, index = directory / WHOLE, directory / INDEX
    if not index.is_file():
        return dict.fromkeys(sorted(names(whole)), whole) if whole.is_file() else {}
    configured = read_json(directory, INDEX)
    found = configured.get("weight_map") if isinstance(configured, dict) else None
    if not isinstance(found, dict):
        raise ConfigError(f"{index}: has no weight_map; an index as save_pretrained writes it is accepted")
    files = sorted(set(map(str, found.values())))
    if whole.is_file() and WHOLE not in files:
        raise ConfigError(
            f"{directory}: holds its weights twice, as {WHOLE} ({_written(whole)}) and by {INDEX} ({_written(index)}, "
            f"{len(files)} files), which may be two models; one form is accepted; remove {WHOLE}, or the index with "
            "its files"
        )
    missing = [name for name in files if not (directory / name).is_file()]
    if missing == files and not whole.is_file():  # of a model whose weights are not downloaded yet
        return {}
    held = {name: directory / file for file in files if file not in missing for name in names(directory / file)}
    apart = sorted(
        {name for name, file in found.items() if held.get(name) != directory / str(file)} | held.keys() - found
    )
    if missing or apart:
        what = f"{missing[0]} is missing" if missing else f"{apart[0]} is not where it says"
        raise ConfigError(
            f"{index} ({_written(index)}) does not fit the files beside it: {what}; an index that names every tensor "
            "of its files is accepted; save the model again with save_pretrained into an empty directory"
        )
    return dict(sorted(held.items()))


def awaits_weights(directory: Path) -> bool:
    """Whether a model has its configuration and no weights of any form, as before they are downloaded."""
    forms = (_WEIGHTS, ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
    return (directory / "config.json").is_file() and not any(each.suffix in forms for each in directory.iterdir())


def _written(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")


def read_json(directory: Path | None, name: str) -> object:
    """The content of a JSON file of a model; None: it is missing, or not valid JSON."""
    try:
        return json.loads((directory / name).read_text(encoding="utf-8")) if directory else None
    except (OSError, ValueError, RecursionError):
        return None


HEAD = "score.weight"  # of a sequence classifier on a decoder


def processor_file(directory: Path) -> object:
    """What the file of a model's processor of images says; None: there is none."""
    return next((each for name in PROCESSOR_FILES[:2] if (each := read_json(directory, name)) is not None), None)


def why_no_reward_model(config: object, directories: Iterable[Path]) -> str | None:
    """Why a model scores no answers; None: it does.

    transformers gives a model without a head a random one, and says so in a warning alone.

    Args:
        config: of the model, as ``config.json`` has it; one that names no labels has those of its head.
        directories: of its weights: the model's own, those of its adapters and of their base.
    """
    labels = config.get("id2label") if isinstance(config, Mapping) else None
    configured = config.get("num_labels") if isinstance(config, Mapping) else None
    num_labels = len(labels) if isinstance(labels, Mapping) else configured if isinstance(configured, int) else 1
    heads = [shape for path in directories for shape in _shapes_of(path, HEAD)]
    if not heads:
        return f"no file of it has a head ({HEAD}), so that its scores would be random"
    if num_labels != 1 or any(shape[0] != 1 for shape in heads):
        return f"its head has {max(num_labels, *(shape[0] for shape in heads))} labels, and a reward is one number"
    return None


def _shapes_of(directory: Path, ending: str) -> Iterator[tuple[int, ...]]:
    """Shapes of the weights of a model or an adapter whose name ends so."""
    from safetensors import safe_open

    for path in sorted(directory.glob(f"*{_WEIGHTS}")):
        with safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if f".{name}".endswith(f".{ending}")]  # noqa: SIM118 - no mapping
            yield from (tuple(file.get_slice(name).get_shape()) for name in names)


REWARD_MODEL_ADVICE = (
    f"a sequence classifier with one label and its trained head ({HEAD}, of one row) is accepted; train one on pairs "
    "(conf/stage/reward.yaml), or score by functions (rewards.NAME.function=...)"
)


def quantization_format(config: object) -> str | None:
    """The format of a quantized model, from its ``config.json``: ``bitsandbytes nf4``, ``gptq`` ...

    Returns:
        None: the model is in full precision, or ``config`` is not a mapping.
    """
    text = config.get("text_config") if isinstance(config, Mapping) else None
    nested = text.get("quantization_config") if isinstance(text, Mapping) else None
    found = (config.get("quantization_config") if isinstance(config, Mapping) else None) or nested
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method", "bitsandbytes"))
    if method != "bitsandbytes":
        return method
    return f"{method} {found.get('bnb_4bit_quant_type', 'fp4') if found.get('load_in_4bit') else 'int8'}"
