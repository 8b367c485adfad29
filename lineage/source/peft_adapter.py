"""PEFT adapters as sources: whether an adapter can be merged, and where its base is."""

from collections.abc import Mapping
from pathlib import Path

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from lineage.source.model_files import quantization_format, read_json
from lineage.source.model_source import split_reference
from lineage.source.source_checks import is_hub_id

ADAPTER_CONFIG = "adapter_config.json"
# Adapter types that peft.PeftModel.merge_and_unload merges (peft 0.21), as measured.
MERGED_TYPES = ("LORA", "ADALORA", "OFT", "BOFT", "VERA", "IA3", "LOHA", "LOKR", "HRA", "MISS", "FOURIERFT", "RANDLORA")
_UNMERGED = {  # setting of a LoRA -> why the merged model would differ
    "alora_invocation_tokens": "it is active after certain tokens alone",
    "layer_replication": "it adds layers to the base",
    "megatron_config": "it is of Megatron's layers",
    "arrow_config": "it routes between several adapters",
}
# Initialisations that change the base too, which loading does not repeat.
_CHANGED_BASES = ("loftq", "lora_ga", "corda")


def is_peft(directory: Path) -> bool:
    """Whether a directory holds an adapter saved by PEFT, which names its base by path or hub id.

    An adapter that this project saved names its base by fingerprint, in ``base.json``.
    """
    return (directory / ADAPTER_CONFIG).exists() and not (directory / "base.json").exists()


def not_an_adapter(name: str, source: Source) -> ConfigError:
    """The error for a ``base_model`` on a source that is not an adapter."""
    return ConfigError(
        f"sources.{name}.base_model={source.base_model}: {source.path} has no {ADAPTER_CONFIG}, so it is not an "
        "adapter; remove base_model"
    )


def base_source(name: str, source: Source, directory: Path | None) -> Source:
    """The base of a source that is an adapter.

    Args:
        directory: of the adapter; None: not on this machine, and the source names the base.

    Raises:
        ConfigError: the adapter cannot be merged, or its base is not found.
    """
    reference = base_reference(name, source, directory) if directory else str(source.base_model)
    path, revision = (reference, None) if Path(reference).expanduser().exists() else split_reference(reference)
    return Source(path=path, kind=Kind.CHECKPOINT, revision=revision)


def base_reference(name: str, source: Source, directory: Path) -> str:
    """The base of the PEFT adapter in a directory: a path that exists, or a hub id with ``@REVISION``.

    Raises:
        ConfigError: the adapter cannot be merged, or its base is not found.
    """
    config = read_json(directory, ADAPTER_CONFIG)
    if not isinstance(config, dict):
        raise ConfigError(f"{directory / ADAPTER_CONFIG}: is not a JSON object; save the adapter again")
    _check_adapter(name, source.path, directory, config)
    named, revision = source.base_model or config.get("base_model_name_or_path"), config.get("revision")
    hint = f"set sources.{name}.base_model=<directory or hub id>"
    if not isinstance(named, str) or not named:
        raise ConfigError(f"sources.{name}.path={source.path}: its {ADAPTER_CONFIG} names no base; {hint}")
    expanded = Path(named).expanduser()
    places = [expanded] if source.base_model or expanded.is_absolute() else [directory / expanded, expanded]
    for place in places:
        if place.is_dir():
            if place.resolve() == directory.resolve():
                raise ConfigError(f"sources.{name}.path={source.path}: the adapter names itself as its base; {hint}")
            return str(place.resolve())
    path, at = split_reference(named)
    if is_hub_id(path):
        return f"{path}@{at or revision}" if at or revision else path
    looked = " and ".join(str(place.absolute()) for place in places)
    raise ConfigError(
        f"sources.{name}.path={source.path}: is an adapter, and its base {named} is missing (looked for {looked}); "
        f"a directory with the base, or its hub id, is accepted; {hint}"
    )


def _check_adapter(name: str, path: str, directory: Path, config: Mapping[str, object]) -> None:
    where = f"sources.{name}.path={path}"
    if any(directory.glob("model*.safetensors")):
        raise ConfigError(
            f"{where}: holds both a model and an adapter ({ADAPTER_CONFIG}), and transformers would load the adapter's "
            f"base; one of the two is accepted; remove {ADAPTER_CONFIG}, or the model*.safetensors"
        )
    if not (directory / "adapter_model.safetensors").exists():  # else PEFT unpickles adapter_model.bin
        raise ConfigError(
            f"{where}: has {ADAPTER_CONFIG}, and no adapter_model.safetensors; weights in safetensors are accepted, a "
            "pickled adapter_model.bin is not; load it with PEFT and save it with save_pretrained"
        )
    peft_type, task = config.get("peft_type"), config.get("task_type")
    if peft_type not in MERGED_TYPES:
        raise ConfigError(
            f"{where}: is an adapter of type {peft_type}, which has no merged form; accepted: "
            f"{', '.join(MERGED_TYPES)}; merge it yourself, or train one of these"
        )
    if task not in (None, "CAUSAL_LM"):
        raise ConfigError(
            f"{where}: is an adapter for {task}, with a head that a language model does not have; one for CAUSAL_LM is "
            "accepted; give such an adapter"
        )
    start = str(config.get("init_lora_weights")).lower()
    wrong = next(
        (f"{key} is set: {why}" for key, why in _UNMERGED.items() if config.get(key)),
        f"init_lora_weights={start} changed the base before training" if start.startswith(_CHANGED_BASES) else None,
    )
    if wrong:
        raise ConfigError(
            f"{where}: {wrong}, so that it cannot be merged into its base; a plain LoRA is accepted; convert it with "
            "PEFT, or give the merged model"
        )


def check_base(name: str, path: str, base: str, config: object) -> None:
    """Checks that an adapter's base is in full precision."""
    found = quantization_format(config)
    if found:
        raise ConfigError(
            f"sources.{name}.path={path}: the adapter's base {base} is quantized ({found}), and merging would round it "
            f"again; a base in full precision is accepted; set sources.{name}.base_model=<the model before it was "
            "quantized>"
        )
