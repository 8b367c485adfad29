"""Files of adapters: how one is saved alone, and how its base is found.

An output that is an adapter names its base by fingerprint. The base is looked up in the store, or at its source.
"""

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.artifact import ALIAS, SOURCE, WHEEL, Kind, Source
from lineage.digest import DigestCache
from lineage.errors import ArtifactError, PipelineError
from lineage.fingerprint import short
from lineage.manifest import SourceRecord
from lineage.model_files import read_json
from lineage.model_source import MODEL_OPTIONS, model_options
from lineage.sources import pin
from lineage.store import CACHE, MANIFEST, Entry
from lineage.view import VIEWS
from tasks.fetch_model import PARTS_FILE, fetch_model
from tasks.recipe import Input

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedConfig, PreTrainedModel

BASE_FILE = "base.json"


@dataclass(frozen=True, kw_only=True)
class Base:
    """The model that an adapter was trained on.

    Args:
        name: the stage, or ``source:NAME``, in its pipeline.
        digest: of its bytes; None where the revision is the identity.
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
        source = policy.source if policy.source and policy.source.revision and not _is_alias(policy.source) else None
        is_wheel = source is not None and source.path.startswith(WHEEL)
        return Base(
            name=policy.name, fingerprint=policy.fingerprint, digest=policy.digest,
            hub_id=source.path if source and not is_wheel else None, wheel=source.path if source and is_wheel else None,
            revision=source.revision if source else None, options=(model_options(source) or None) if source else None,
        )  # fmt: skip

    def write(self, directory: Path) -> None:
        later = ("options", "rounding")
        values = {name: value for name, value in asdict(self).items() if name not in later or value}
        (directory / BASE_FILE).write_text(json.dumps(values, indent=2) + "\n")


def is_adapter(directory: Path) -> bool:
    """Whether a model's directory holds an adapter alone, as a stage with ``save=adapter`` writes it."""
    return (directory / BASE_FILE).exists()


def base_and_adapters(directory: Path) -> tuple[Path, list[Path]]:
    """The full model under a model, and the adapters upon it in the order of their training.

    Args:
        directory: a full model; an output that is an adapter; or what ``fetch_model`` gives for a source: of an adapter
            of PEFT, its own directory is in the list.

    Raises:
        ArtifactError: a base is missing, or is no longer what its adapter was trained on.
    """
    adapters: list[Path] = []
    while True:
        parts = read_json(directory, PARTS_FILE)
        if isinstance(parts, dict):
            adapters[:0] = [Path(parts["adapter"])] if parts["adapter"] else []
            directory = Path(parts["weights"])
        elif is_adapter(directory):
            adapters.insert(0, directory)
            directory = _base_directory(directory)
        else:
            return directory, adapters


def rounding_of_base(adapter: Path) -> Mapping[str, object] | None:
    """``Base.rounding`` of a saved adapter; None where another program saved it."""
    if not is_adapter(adapter):
        return None
    rounding: Mapping[str, object] | None = json.loads((adapter / BASE_FILE).read_text()).get("rounding")
    return rounding


def _base_directory(adapter: Path) -> Path:
    """The directory of an adapter's base, verified by its digests."""
    base = Base(**json.loads((adapter / BASE_FILE).read_text()))
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
    for source in _recorded(adapter, base):
        if not _is_alias(source):
            kind = Kind(source.kind)
            plain = Source(path=source.path, kind=kind, revision=source.revision, split=source.split)
            yield _with_options(plain, source.reading)
    for path in filter(None, (base.hub_id, base.wheel)):
        plain = Source(path=path, kind=Kind.CHECKPOINT, revision=base.revision)
        yield _with_options(plain, base.options or {})


def _with_options(source: Source, recorded: Mapping[str, object]) -> Source:
    """A source with what was set beside its path."""
    options = {name: value for name, value in recorded.items() if name in MODEL_OPTIONS}
    return replace(source, **json.loads(json.dumps(options)))


def _recorded(adapter: Path, base: Base) -> Iterator[SourceRecord]:
    """The base's source in the manifest beside the adapter; none where the base is a stage's output."""
    manifest = Entry(adapter.parent).manifest()
    for record in manifest.inputs.values() if manifest else ():
        if record.source and record.fingerprint == base.fingerprint:
            yield record.source


def _is_alias(source: SourceRecord | Source) -> bool:
    return (source.revision or "").startswith(ALIAS)


def _lost(adapter: Path, base: Base, cause: str) -> ArtifactError:
    return ArtifactError(
        f"{adapter} is an adapter on {base.name} ({short(base.fingerprint)}) and needs it: {cause}; "
        "restore that model, run the pipeline that produced it, or train the adapter's stage with save=null"
    )


def save_adapter(model: "PeftModel", directory: Path, policy: Input) -> None:
    """Saves the adapter with bytes that depend on the training only: without paths, module names sorted."""
    model.save_pretrained(directory, safe_serialization=True)
    (directory / "README.md").unlink(missing_ok=True)  # PEFT's model card, which names a local path
    path = directory / "adapter_config.json"
    config = json.loads(path.read_text())
    base = Base.of(policy)
    # PEFT can resolve hub ids only, and not what a source sets beside one.
    is_plain = base.hub_id and not base.options
    config["base_model_name_or_path"] = base.hub_id if is_plain else base.fingerprint
    config["revision"] = base.revision if is_plain else None
    for key in ("target_modules", "modules_to_save"):
        if isinstance(config.get(key), list):
            config[key] = sorted(config[key])
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def plain_config(model: "PreTrainedModel") -> "PreTrainedConfig":
    """A model's config as in full precision."""
    config: PreTrainedConfig = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if "quantization_config" in config:
        del config.quantization_config
    return config
