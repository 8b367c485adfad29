"""The model that a command names: an artifact of the store, a source of it, or a directory."""

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flows.declare.store_root import asked_store
from lineage.artifact import Kind, Source
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.files import user_cache
from lineage.store import CACHE, MANIFEST, Manifest, SourceRecord

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lineage.graph.index import Index
    from tasks.recipe import Input
    from tasks.train.kernels.machine import Held


@dataclass(frozen=True, kw_only=True)
class Found:
    """A model that a REF names.

    Args:
        name: of the stage, the source or the directory.
        path: its directory, for the loaders of ``tasks.train.models.load``.
        store: the store that it is an artifact of; None: it is a source or a directory.
    """

    ref: str
    name: str
    path: Path
    store: Path | None = None
    manifest: Manifest | None = None

    @property
    def input(self) -> "Input":
        """As a stage gets it."""
        from tasks.recipe import Input

        fingerprint = self.manifest.fingerprint if self.manifest else ""
        return Input(name=self.name, kind=Kind.CHECKPOINT, fingerprint=fingerprint, path=self.path)

    def load(self, held: "Held | None" = None) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
        """The model with its adapters merged in memory, on a GPU where there is one, and its tokenizer.

        Args:
            held: dtype of its weights; None: bf16 if its files hold bf16, else fp32.
        """
        import torch
        from transformers.utils.logging import disable_progress_bar

        from tasks.model.tokenizers import tokenizer_of
        from tasks.train.models.load import load_config, load_model
        from tasks.train.sharding import leave_out_deepspeed

        leave_out_deepspeed()
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of kernels that no chat needs
        if not sys.stderr.isatty():
            disable_progress_bar()
        is_bf16 = load_config(self.path).dtype == torch.bfloat16
        loaded = load_model(self.input, held or ("bf16" if is_bf16 else "fp32"))
        loaded.requires_grad_(False)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return loaded.eval().to(device), tokenizer_of(self.path)


def refs_among(word: str, overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the REFs that a command takes, at any position, from the overrides."""
    cli_args = [word, *overrides]
    return [each for each in cli_args if "=" not in each], [each for each in cli_args if "=" in each]


def find_model(ref: str, overrides: Sequence[str], config_dir: Path | None) -> Found:
    """The model that a REF or the path of a directory names.

    Raises:
        ConfigError: there is no such model, or it is no causal language model.
        ArtifactError: files of it are missing.
    """
    from lineage.graph.index import Index
    from lineage.graph.refs import resolve

    directory = Path(ref).expanduser()
    is_directory = os.path.isdir(directory)  # also of a name that is too long for a file
    try:
        store = asked_store(overrides, config_dir)
    except ConfigError as error:
        if is_directory:
            return _of_directory(ref, directory)
        raise ConfigError(f"{ref}: is no directory, and {error}") from error
    with Index(store) as index:
        try:
            node = resolve(ref, index).node
        except ConfigError:
            if is_directory:
                return _of_directory(ref, directory)
            raise
        return _of_node(ref, node, index)


def _of_node(ref: str, node: str, index: "Index") -> Found:
    from lineage.graph.ancestry import ancestry

    graph = ancestry(index, node)
    found = graph.nodes[node]
    if found.entry is None:
        return _of_source(ref, found.record.source if found.record else None, found.name, index.store)
    manifest = found.entry.manifest()
    if manifest is None or manifest.produces != Kind.CHECKPOINT:
        kind = manifest.produces if manifest else "unfinished"
        raise ConfigError(f"{ref}: {node} is {kind}; a model that generates text (checkpoint) is accepted; name one")
    if missing := manifest.missing(found.entry.output):
        raise ArtifactError(f"{found.entry.output}: {missing[0]} is missing; restore it, or run its pipeline again")
    sources = [each.record.source for each in graph.nodes.values() if each.record and each.record.source]
    if any(source.reading.get("trust_remote_code") for source in sources):
        from tasks.model.remote_code import trust

        trust(found.entry.output)
    return Found(ref=ref, name=found.name, path=found.entry.output, store=index.store, manifest=manifest)


def _of_source(ref: str, record: SourceRecord | None, name: str, store: Path) -> Found:
    from tasks.model.adapter_files import recorded_source

    if record is None or record.kind != Kind.CHECKPOINT:
        kind = record.kind if record else "of an earlier version, without a path"
        raise ConfigError(f"{ref}: {name} is {kind}; a model that generates text (checkpoint) is accepted; name one")
    return Found(ref=ref, name=name, path=_fetched(recorded_source(record), store / CACHE))


def _of_directory(ref: str, directory: Path) -> Found:
    """The model of a directory that is in no store, or in another one."""
    from lineage.source.model_files import read_json

    if (directory / MANIFEST).is_file() and (directory / "output").is_dir():
        directory = directory / "output"
    if not any((directory / each).exists() for each in ("config.json", "adapter_config.json")):  # before it is walked
        raise ConfigError(f"model {ref}: no config.json in {directory}; save it with model.save_pretrained")
    config = read_json(directory, "config.json")
    names = config.get("architectures") if isinstance(config, dict) else None
    if names and not any(str(each).endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration")) for each in names):
        raise ConfigError(f"{ref}: is a {names[0]}; a model that generates text (...ForCausalLM) is accepted; name one")
    source = Source(path=str(directory.absolute()), kind=Kind.CHECKPOINT)
    return Found(ref=ref, name=directory.name, path=_fetched(source, user_cache(CACHE)))


def _fetched(source: Source, cache: Path) -> Path:
    from tasks.model.adapter_files import is_adapter
    from tasks.model.fetch_model import fetch_model

    directory = Path(source.path)
    return directory if is_adapter(directory) else fetch_model(source, cache)
