"""Files of adapters: how an adapter is saved without its base, and how the base is found.

An output that is an adapter names its base by fingerprint. The base is looked up in the store, or at its source.
"""

import copy
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import ALIAS, SOURCE, WHEEL, Kind, Source
from lineage.dvc import VIEWS
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.filesystem.digest import DigestCache
from lineage.fingerprint import short
from lineage.source.model_files import read_json
from lineage.source.model_source import MODEL_OPTIONS, model_options
from lineage.source.sources import pin
from lineage.store import CACHE, MANIFEST, Entry, InputRecord, SourceRecord
from tasks.judgement.check_rows import POLICY
from tasks.model.fetch_model import PARTS_FILE, fetch_model
from tasks.recipe import Input, TrainingRecipe

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

BASE_FILE = "base.json"
ADAPTER_DIR, ADAPTER_CONFIG = "adapter", "adapter_config.json"


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model that an adapter was trained on.

    Args:
        name: the stage, or ``source:NAME``, in its pipeline.
        digest: digest of its bytes; None: the revision is the identity.
        hub_id, wheel, revision: of a model of the hub, or of a wheel (``wheel:NAME==VERSION``). The path of a directory
            is in the manifest beside ``output/``, because it is not part of an artifact's identity.
        options: what the source of the base sets beside its path.
        rounding: ``Quantization.rounding`` of the base into which the adapter is merged; None: full precision.
    """

    name: str
    fingerprint: str
    digest: str | None = None
    hub_id: str | None = None
    wheel: str | None = None
    revision: str | None = None
    options: Mapping[str, object] | None = None
    rounding: Mapping[str, object] | None = None

    @staticmethod
    def of(policy: Input) -> "Base":
        """The base of the adapter that a stage trains: its input policy."""
        options = model_options(policy.source) if policy.source else {}
        return Base._at(policy.name, policy.fingerprint, policy.digest, policy.source, options)

    @staticmethod
    def recorded(record: InputRecord) -> "Base":
        """The base of the adapter that was merged into a stage's output: the policy that the stage started from."""
        reading = record.source.reading if record.source else {}
        options = {name: value for name, value in reading.items() if name in MODEL_OPTIONS}
        return Base._at(record.artifact, record.fingerprint, record.digest, record.source, options)

    @staticmethod
    def _at(
        name: str, fingerprint: str, digest: str | None, source: Source | SourceRecord | None,
        options: Mapping[str, object],
    ) -> "Base":  # fmt: skip
        if source is None or source.revision is None or _is_alias(source):
            return Base(name=name, fingerprint=fingerprint, digest=digest)
        is_wheel = source.path.startswith(WHEEL)
        return Base(
            name=name, fingerprint=fingerprint, digest=digest, hub_id=None if is_wheel else source.path,
            wheel=source.path if is_wheel else None, revision=source.revision, options=options or None,
        )  # fmt: skip

    def write(self, directory: Path) -> None:
        later = ("options", "rounding")
        values = {name: value for name, value in asdict(self).items() if name not in later or value}
        (directory / BASE_FILE).write_text(json.dumps(values, indent=2) + "\n")


def is_adapter(directory: Path) -> bool:
    """Whether a model's directory holds only an adapter, as a stage with ``save=adapter`` writes it."""
    return (directory / BASE_FILE).exists()


def base_and_adapters(directory: Path) -> tuple[Path, list[Path]]:
    """The full model of a model's directory, and the adapters on it in the order of their training.

    Args:
        directory: a full model; an output that is an adapter; or what ``fetch_model`` gives for a source: of an adapter
            of PEFT, its own directory is in the list.

    Raises:
        ArtifactError: a base is missing, or differs from the one that its adapter was trained on.
    """
    adapters: list[Path] = []
    while True:
        parts = read_json(directory, PARTS_FILE)
        if isinstance(parts, dict):
            adapters[:0] = [Path(parts["adapter"])] if parts["adapter"] else []
            directory = Path(parts["weights"])
        elif is_adapter(directory):
            adapters.insert(0, directory)
            directory = _base_directory(directory, _base_of(directory))
        else:
            return directory, adapters


def rounding_of_base(adapter: Path) -> Mapping[str, object] | None:
    """``Base.rounding`` of a saved adapter; None where another program saved it."""
    return _base_of(adapter).rounding if is_adapter(adapter) else None


@dataclass(frozen=True, kw_only=True)
class Intake:
    """How a stage loads its input model.

    Args:
        base: the directory of the full model.
        merged: adapters that are merged into it, in order.
        carried: adapters that are kept as adapters.
        beneath: what the adapter in training is on top of, which a saved adapter names as its base. None: the stage's
            input.
    """

    base: Path
    merged: Sequence[Path] = ()
    carried: Sequence[Path] = ()
    beneath: Base | None = None


def intake(method: TrainingRecipe, policy: Input) -> Intake:
    """How a stage loads a model that is an adapter, or that has one beside it in ``adapter/``.

    Raises:
        ConfigError: an adapter is to be kept, but there is none, or its base has no name.
        ArtifactError: its base is missing.
    """
    if method.adapter_in not in ("continue", "stack"):
        base, merged = base_and_adapters(policy.path)
        return Intake(base=base, merged=merged)
    base, adapters, beneath = base_and_kept_adapters(policy.path)
    if not adapters:
        raise ConfigError(
            f"adapter_in={method.adapter_in}: {policy.name} has no adapter that could be kept; an output of a stage "
            "with adapter=lora, or an adapter of PEFT, is accepted; set adapter_in=merge for this stage"
        )
    if any(map(rounding_of_base, adapters)):
        raise ConfigError(
            f"adapter_in={method.adapter_in}: an adapter of {policy.name} belongs to a dequantized base "
            "(quantization.merge=dequantized); set adapter_in=merge for this stage"
        )
    if method.adapter_in == "stack":
        return Intake(base=base, carried=adapters)
    if beneath is None and method.save == "adapter":
        raise ConfigError(
            f"adapter_in=continue with save=adapter: {policy.name} is an adapter of PEFT, and its base is no artifact "
            "that the output could name; set save=null, or adapter_in=merge"
        )
    return Intake(base=base, merged=adapters[:-1], carried=adapters[-1:], beneath=beneath)


def base_and_kept_adapters(directory: Path) -> tuple[Path, list[Path], Base | None]:
    """The full model of a model's directory, its adapters, and the base of the last one; None: it has no name."""
    base, adapters = base_and_adapters(directory)
    if adapters:
        return base, adapters, _base_of(adapters[-1]) if is_adapter(adapters[-1]) else None
    own = directory / ADAPTER_DIR
    manifest = Entry(directory.parent).manifest() if (own / ADAPTER_CONFIG).exists() else None
    record = manifest.inputs.get(POLICY) if manifest else None
    if manifest is None or record is None:
        return base, [], None
    named = Base.recorded(record)
    policy = _base_directory(directory, named)
    if manifest.recipe.get("adapter_in") == "continue":  # on the same base as the adapter that it continues
        base, adapters, beneath = base_and_kept_adapters(policy)
        return base, [*adapters[:-1], own], beneath
    base, adapters = base_and_adapters(policy)
    return base, [*adapters, own], named


def _base_of(adapter: Path) -> Base:
    return Base(**json.loads((adapter / BASE_FILE).read_text()))


def _base_directory(adapter: Path, base: Base) -> Path:
    """The directory of an adapter's base, verified by its digests."""
    stores = adapter.absolute().parents[2:4]  # of <store>/<stage>/<fingerprint>/output, and of DVC's view of one
    for entry in _artifacts(adapter, base, stores):
        manifest = entry.require_intact(DigestCache(entry.path.parents[1] / "digests.json"))
        if manifest.fingerprint != base.fingerprint:
            continue
        if base.digest not in (None, manifest.output_digest):
            raise _lost(adapter, base, f"{entry.path} was produced again since, with other bytes")
        return entry.output
    for source in _sources(adapter, base):
        try:
            found = pin(base.name.removeprefix(SOURCE), source, DigestCache(stores[0] / "digests.json")).fingerprint
        except PipelineError as error:
            raise _lost(adapter, base, str(error)) from error
        if found != base.fingerprint:
            raise _lost(adapter, base, f"{source.path} is another model now ({short(found)})")
        store = stores[1] if stores[0].name == VIEWS else stores[0]
        return fetch_model(source, store / CACHE)
    raise _lost(adapter, base, f"{' and '.join(str(store) for store in stores[:1])} has no such artifact")


def _artifacts(adapter: Path, base: Base, stores: Sequence[Path]) -> Iterator[Entry]:
    """Candidates for the base: in the adapter's store, or in the store of the alias that named it."""
    for store in stores:
        for record in store.glob(f"*/{short(base.fingerprint)}/{MANIFEST}"):
            yield Entry(record.parent)
    for source in _recorded(adapter, base):
        entry = Entry(Path(source.path).absolute().parent)
        if _is_alias(source) and entry.is_finished():
            yield entry


def _sources(adapter: Path, base: Base) -> Iterator[Source]:
    """The source of the base, from the manifest beside the adapter, or from the adapter itself."""
    yield from (recorded_source(source) for source in _recorded(adapter, base) if not _is_alias(source))
    for path in filter(None, (base.hub_id, base.wheel)):
        plain = Source(path=path, kind=Kind.CHECKPOINT, revision=base.revision)
        yield _with_options(plain, base.options or {})


def recorded_source(record: SourceRecord) -> Source:
    """The source of a model as a manifest records it."""
    kind = Kind(record.kind)
    return _with_options(
        Source(path=record.path, kind=kind, revision=record.revision, split=record.split), record.reading
    )


def _with_options(source: Source, recorded: Mapping[str, object]) -> Source:
    """A source with the options that were set beside its path."""
    options = json.loads(json.dumps({name: value for name, value in recorded.items() if name in MODEL_OPTIONS}))
    lists = {name: tuple(value) for name, value in options.items() if isinstance(value, list)}
    options.update(lists)
    return replace(source, **options)


def _recorded(adapter: Path, base: Base) -> Iterator[SourceRecord]:
    """The base's source in the manifest beside the adapter; none where the base is a stage's output."""
    manifest = Entry(adapter.parent).manifest()
    for record in manifest.inputs.values() if manifest else ():
        if record.source and record.fingerprint == base.fingerprint:
            yield record.source
    start = manifest.inputs.get(POLICY) if manifest and manifest.recipe.get("adapter_in") == "continue" else None
    if start and start.fingerprint != base.fingerprint:  # the base belongs to the adapter that was trained further
        for entry in _artifacts(adapter, Base.recorded(start), adapter.absolute().parents[2:4]):
            yield from _recorded(entry.output, base)


def _is_alias(source: SourceRecord | Source) -> bool:
    return (source.revision or "").startswith(ALIAS)


def _lost(adapter: Path, base: Base, cause: str) -> ArtifactError:
    return ArtifactError(
        f"{adapter} is an adapter on {base.name} ({short(base.fingerprint)}) and needs it: {cause}; "
        "restore that model, run the pipeline that produced it, or train the adapter's stage with save=null"
    )


def save_adapter(
    model: "PeftModel", directory: Path, base: Base, start: "Mapping[str, Tensor] | None" = None
) -> None:  # fmt: skip
    """Saves the adapter with bytes that depend on the training only: without paths, module names sorted.

    Args:
        base: the model that it is on top of.
        start: its weights before the first step, where its initialization changed the base: see ``_on_original``.
    """
    model.save_pretrained(directory, safe_serialization=True)
    if start:
        _on_original(directory, start)
    (directory / "README.md").unlink(missing_ok=True)  # PEFT's model card, which names a local path
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    if "init_lora_weights" in config:
        config["init_lora_weights"] = True  # another one would be computed at each load, and replaced by the weights
    # PEFT can resolve hub ids only, and not what a source sets beside one.
    is_plain = base.hub_id and not base.options
    config["base_model_name_or_path"] = base.hub_id if is_plain else base.fingerprint
    config["revision"] = base.revision if is_plain else None
    for key in ("target_modules", "modules_to_save"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _on_original(directory: Path, start: "Mapping[str, Tensor]") -> None:
    """Converts a saved LoRA, whose initialization subtracted its product from the base, to one on the original base.

    Base - start + adapter is a LoRA of twice the rank: B A - B0 A0 = [B, -B0] [A; A0]. PEFT would initialize it again
    whenever the adapter is loaded.
    """
    import torch
    from safetensors.torch import load_file, save_file

    weights, path = directory / "adapter_model.safetensors", directory / "adapter_config.json"
    state = load_file(weights)
    for name in list(state):
        if ".lora_A." in name:
            state[name] = torch.cat([state[name], start[name]], dim=0)
        elif ".lora_B." in name:
            state[name] = torch.cat([state[name], -start[name]], dim=1)
    save_file(state, weights, metadata={"format": "pt"})
    config = json.loads(path.read_text())
    config["lora_alpha"] *= math.sqrt(2) if config["use_rslora"] else 2
    config["r"] *= 2
    config |= {"init_lora_weights": True, "lora_ga_config": None}
    path.write_text(json.dumps(config))


def plain_config(model: "PreTrainedModel") -> "PreTrainedConfig":
    """A model's config without its quantization."""
    config: PreTrainedConfig = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if "quantization_config" in config:
        del config.quantization_config
    return config
