"""Checks of data, evaluations, gates and required packages, and notes on batches and precision."""

import os
import shutil
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import orjson

from flows.declare.pipeline import Pipeline, Stage, listed
from flows.planning.model_checks import POLICY, root_config, root_directory, root_json, root_of
from lineage.artifact import ALIAS, MODELS, QUICKSTART, SOURCE, Kind, Source
from lineage.errors import ConfigError, PipelineError
from lineage.record.environment import list_gpus
from lineage.record.verdict import CHAMPION
from lineage.source.model_files import PROCESSOR_FILES, weight_places
from lineage.source.model_source import vocabulary_of
from lineage.source.source_checks import PYTHON, is_loaded
from lineage.source.sources import local_paths
from tasks.base_model import BaseModel
from tasks.context import Resources
from tasks.data.formats.detect import Detected, check_direction, detect
from tasks.data.formats.proposals import with_prompt
from tasks.data.formats.trees import is_tree
from tasks.data.formats.turns import BadRowError, Fields
from tasks.data.images import WITH_IMAGES, Images, names_images, require_pixels
from tasks.data.kinds import CONVERSATIONS, TEXT
from tasks.data.preparing.options import Prepare
from tasks.evaluate.benchmarks import require_reached
from tasks.evaluate.evaluate import Evaluate, agreed_thinking, other_tokens
from tasks.gate import Gate
from tasks.gate.rule import CANDIDATE, PARENT, Rule
from tasks.method import REWARD_HEAD, REWARD_MODEL, TEACHER, Method, Training
from tasks.model.positions import (
    SCORED,
    learned_positions,
    reads_padding,
    too_few_positions,
    why_not_causal,
    why_not_sampled,
)
from tasks.model.tokenizers import differing_tokens
from tasks.recipe import VERDICT, without_verdict
from tasks.train.best import HELD_OUT_LOSS, VAL_LOSS
from tasks.train.evaluation import SLOTS
from tasks.train.generation.generating import Completing
from tasks.train.models.quantization import compiles
from tasks.train.optim.optimizers import OPTIMIZERS


def check_data(pipeline: Pipeline) -> None:
    """Checks the names of stages, slots and columns in settings."""
    for name, source in pipeline.sources.items():
        check_direction(f"sources.{name}.columns", source.columns, source.format)
    training = [name for name, stage in pipeline.stages.items() if isinstance(stage.method, Training)]
    named = {"accept_label_drop": pipeline.accept_label_drop, "restart": pipeline.restart, "because": pipeline.because}
    for field, names in named.items():
        for name in names:
            if name not in training:
                raise ConfigError(f"{field}: no stage that trains is named {name}; there are: {listed(name, training)}")
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Prepare):
            try:
                stage.method.row_slots(stage.inputs)
            except ConfigError as error:
                raise ConfigError(f"stages.{name}.method: {error}") from error


_FIRST_ROWS = 20
_FIRST_BYTES = 1 << 20


def check_row_kinds(pipeline: Pipeline) -> None:
    """Checks that JSON Lines files on this machine have rows of the kind that their data stage takes.

    The stage makes the same check of all its sources, and of more rows; here it takes the first ones. With
    ``max_bad_rows`` these may be the bad ones, so that nothing is known.

    Raises:
        ConfigError: the rows are of another kind, such as single answers where pairs are read.
    """
    for name, stage in pipeline.stages.items():
        method = stage.method
        if not isinstance(method, Prepare) or (method.max_bad_rows or 0) > 0:
            continue
        refs = [stage.inputs.get(slot, "") for slot in method.row_slots(stage.inputs)]
        for ref in filter(pipeline.is_source, refs):
            source = pipeline.sources[ref.removeprefix(SOURCE)]
            try:
                rows = _first_rows(source, method.prompt_template)
                if not rows or is_tree(rows, source.columns, method.produces):  # the stage makes of trees what it takes
                    continue
                found = _detected(rows, source, method)
            except (OSError, ValueError, PipelineError, BadRowError):
                continue  # the stage says what is wrong with the file
            refusal = found.refusal_by_stage(source.path, method.produces)
            if refusal:
                raise ConfigError(f"stages.{name}.inputs: {refusal}")


def _detected(rows: Sequence[Fields], source: Source, method: Prepare) -> Detected:
    return detect(
        rows, source.path, columns=source.columns, configured=source.format, kind=method.produces,
        templated=method.prompt_template is not None,
    )  # fmt: skip


def _row_sources(pipeline: Pipeline, stages: Collection[str]) -> Iterator[tuple[str, str, Prepare]]:
    """Each data stage of these with each of its sources of rows, by name, and its method."""
    for name in stages:
        method, inputs = pipeline.stages[name].method, pipeline.stages[name].inputs
        if isinstance(method, Prepare):
            for ref in filter(pipeline.is_source, (inputs[slot] for slot in method.row_slots(inputs))):
                yield name, ref.removeprefix(SOURCE), method


def guess_notes(pipeline: Pipeline, stages: Collection[str]) -> list[str]:
    """Notes on files on this machine whose columns are guessed by their names."""
    found = []
    for name, source_name, method in _row_sources(pipeline, stages):
        source = pipeline.sources[source_name]
        with suppress(OSError, ValueError, PipelineError, BadRowError):  # the stage says what is wrong with it
            rows = _read_rows(source, method.prompt_template)
            guess = None if is_tree(rows, source.columns) else _detected(rows, source, method).guess
            if guess:
                found.append(
                    f"{name}: the columns of {source.path} are a guess by their names: "
                    f"{guess.settings(source_name, name)} says the same, or names others"
                )
    return found


def column_notes(pipeline: Pipeline, stages: Collection[str]) -> list[str]:
    """Notes on columns of files on this machine that their data stage would not read, from their first rows."""
    found = []
    for name, source_name, method in _row_sources(pipeline, stages):
        source = pipeline.sources[source_name]
        with suppress(OSError, ValueError, PipelineError, BadRowError):  # the stage says what is wrong with it
            unread = _unread_columns(source, method)
            if unread:
                found.append(f"{name}: columns of {source.path} that are not read: {', '.join(unread)}")
    return found


def _unread_columns(source: Source, method: Prepare) -> list[str]:
    """Columns of the first rows that are not read; empty for a source that is not a file on this machine."""
    rows = _read_rows(source, method.prompt_template)
    if not rows or is_tree(rows, source.columns):
        return []
    detected = _detected(rows, source, method)
    rows = [detected.filled(row) for row in rows]
    return sorted({name for row in rows for name in row.keys() - detected.read_columns(row)})


def _read_rows(source: Source, template: str | None) -> list[Fields]:
    """The first rows of any file or folder on this machine; none of one that ``datasets`` reads, which is heavy."""
    paths = [] if source.path.startswith((PYTHON, QUICKSTART)) else local_paths(source.path)
    from tasks.data.reading.tables import is_saved

    if not paths or is_loaded(source) or is_saved(paths[0]):
        return []
    states = [(str(path), (state := path.stat()).st_mtime_ns, state.st_size) for path in paths]
    # A folder's own state says nothing of its files.
    rows = _rows_of(source, tuple(states) if all(path.is_file() for path in paths) else object())
    return [with_prompt(row, template) if template else row for row in rows]


@lru_cache(maxsize=16)  # several stages read a source, and an archive is unpacked for its rows
def _rows_of(source: Source, _state: Hashable) -> list[Fields]:
    from tasks.data.reading.chunk import Row
    from tasks.data.reading.read import read_chunks

    chunk = next(read_chunks(source))
    return [row.fields for row in islice(chunk.rows(), _FIRST_ROWS) if isinstance(row, Row)]


def check_images(pipeline: Pipeline) -> None:
    """Checks that a training whose rows have images reads them, and that its processor can be loaded as it is set.

    The rows are the first ones of files on this machine.
    """
    for name, stage in pipeline.stages.items():
        kind, images = (getattr(stage.method, field, None) for field in ("reads", "images"))
        if not isinstance(stage.method, Training) or kind is None:
            continue
        if images is not None:
            _check_processor(pipeline, name, images)
            continue
        ref = stage.inputs.get(kind.slot)
        for source, template in _prepared(pipeline, ref) if ref and kind.kind in WITH_IMAGES else ():
            rows: list[Fields] = []
            # The stage says what is wrong with the file.
            with suppress(OSError, ValueError, PipelineError, BadRowError, StopIteration):
                rows = _read_rows(source, template)
            if any(map(names_images, rows)):
                raise ConfigError(
                    f"stages.{name}.inputs.{kind.slot}={ref}: rows of {source.path} have images, and images is null; "
                    "set model.kind=vlm, for a model and a method that read images (docs/vlm.md), or give it rows of "
                    "text"
                )


def _check_processor(pipeline: Pipeline, name: str, images: Images) -> None:
    if root_config(pipeline, name).get("model_type") == "smolvlm" and not find_spec(_NUM2WORDS.module):
        raise ConfigError(
            f"stages.{name}: the processor of SmolVLM needs the package {_NUM2WORDS.module}, which is not installed; "
            f"install it ({_NUM2WORDS.install}), or set images=null and train on rows of text"
        )
    files = [each for of in PROCESSOR_FILES[:2] if isinstance(each := root_json(pipeline, name, of), Mapping)]
    file = files[0].get("image_processor", files[-1]) if files else None
    if images.size and isinstance(file, Mapping):
        require_pixels(images.size, file, f"stages.{name}.method.")


def _prepared(pipeline: Pipeline, ref: str) -> Iterator[tuple[Source, str | None]]:
    """The sources that rows are prepared of, with the template of their prompts."""
    if pipeline.is_source(ref):
        return
    stage = pipeline.stages[ref]
    if isinstance(stage.method, Prepare):
        slots = [stage.inputs[slot] for slot in stage.method.row_slots(stage.inputs)]
        for each in filter(pipeline.is_source, slots if not stage.method.max_bad_rows else ()):
            yield pipeline.sources[each.removeprefix(SOURCE)], stage.method.prompt_template
    elif not isinstance(stage.method, Training):
        for each in stage.inputs.values():
            yield from _prepared(pipeline, each)


def _first_rows(source: Source, template: str | None) -> list[Fields]:
    """The first rows of a file of JSON Lines; none: it is another file, or its first rows may not be read."""
    path, is_whole = Path(source.path), source.split == "train" and source.shuffle_seed is None
    if path.suffix != ".jsonl" or not path.is_file() or not is_whole or source.sample_count is not None:
        return []
    with path.open("rb") as file:
        lines = file.read(_FIRST_BYTES).splitlines(keepends=True)
    rows = [orjson.loads(line) for line in lines[:_FIRST_ROWS] if line.endswith(b"\n") and line.strip()]
    if not all(isinstance(row, dict) for row in rows):
        return []
    return [with_prompt(row, template) if template else row for row in rows]


# Suffixes of dropout rates in a config.json.
_DROPOUT = ("dropout", "pdrop", "dropout_p", "dropout_prob", "dropout_rate")
_OF_HEADS = ("classifier", "summary")  # prefixes of rates of heads that a language model does not have


def check_positions(pipeline: Pipeline) -> None:
    """Checks ``max_length`` against models with a table of positions, and what models read of later and earlier places.

    Raises:
        ConfigError: names the field and the largest accepted value; or the model, a teacher, or another that is run
            sees later tokens, or would generate and reads the padding before a prompt.
    """
    for name in pipeline.order():
        stage = pipeline.stages[name]
        consumes = stage.method.consumes
        models = [ref for slot, ref in stage.inputs.items() if consumes.get(slot, consumes.get("*")) in MODELS]
        for reference in models if stage.method.uses_gpu else ():
            if why := why_not_causal(root_config(pipeline, reference)):
                raise ConfigError(f"stages.{name}: {why}")
    for name, method, config in _trainings(pipeline):
        if isinstance(method, Completing) and reads_padding(config):
            raise ConfigError(f"stages.{name}: {why_not_sampled(config['model_type'])}")
        positions = learned_positions(config)
        if positions is not None and method.max_length > positions:
            wrong = too_few_positions(method.max_length, positions, str(config["model_type"]))
            raise ConfigError(f"stages.{name}.method.{wrong}")


def longer_rows(pipeline: Pipeline) -> dict[str, tuple[int, int]]:
    """Training -> its ``max_length``, where that exceeds the positions of its model, and their number."""
    found = {}
    for name, method, config in _trainings(pipeline):
        known, rope = config.get("max_position_embeddings"), config.get("rope_scaling") or config.get("rope_parameters")
        is_scaled = isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) != "default"
        most = learned_positions(config) or (None if is_scaled else known)
        if isinstance(most, int) and method.max_length > most:
            found[name] = (method.max_length, most)
    return found


def position_notes(pipeline: Pipeline, stages: Collection[str]) -> list[str]:
    """Notes on rows longer than a model with computed positions was trained for, which is not refused."""
    found: dict[int, list[str]] = {}
    for name, (length, known) in longer_rows(pipeline).items():
        if name in stages:
            found.setdefault(known, []).append(f"{name} ({length})")
    return [
        f"max_length of {', '.join(names)} exceeds the model's max_position_embeddings={known}: longer rows would "
        f"use positions that it was not trained on; set max_length={known} or less, or scale them (docs/models.md)"
        for known, names in found.items()
    ]


def text_part_notes(pipeline: Pipeline, stages: Collection[str]) -> list[str]:
    """Notes on models that also read images or sound, whose text part alone is trained."""
    found: dict[tuple[str, ...], list[str]] = {}
    for name, method, config in _trainings(pipeline):
        if getattr(method, "images", None) is not None:
            continue
        parts = tuple(part for part in ("vision_config", "audio_config") if config.get(part) is not None)
        if name in stages and parts:
            found.setdefault(parts, []).append(name)
    return [
        f"{', '.join(names)}: rows of text train the text part of the model; what its {' and '.join(parts)} describes "
        "is frozen and copied into the output, as are weights that no class of transformers loads (mtp.*)"
        for parts, names in found.items()
    ]


_NO_PLACE = {"lm_head", "embed_out", "mtp"}  # parts of names


def left_out_notes(pipeline: Pipeline, stages: Collection[str]) -> list[str]:
    """Notes on what a reward model has no place for: the head over the vocabulary, and those for several tokens.

    And on those that transformers has no class for.
    """
    notes = []
    for name, method, _ in _trainings(pipeline):
        whole = root_config(pipeline, name) if name in stages and REWARD_HEAD in method.models.values() else {}
        if whole.get("vision_config") is not None and whole["model_type"] not in SCORED:
            notes.append(_class_of_scores(name, whole["model_type"]))
        directory = root_directory(pipeline, name)
        if name in stages and directory and REWARD_HEAD in method.models.values():
            found = [each for each in weight_places(directory) if _NO_PLACE & set(each.split("."))]
            if found and getattr(method, "save", None) != "adapter":
                shown = ", ".join(found[:4]) + f" and {len(found) - 4} more" * (len(found) > 4)
                notes.append(f"{name}: a reward model has no place for {shown}: its output leaves them out")
    return notes


def _class_of_scores(name: str, model_type: object) -> str:
    return (
        f"{name}: transformers has no class of type {model_type} with a head for scores: posttrain reads the output "
        "with one of its own; in other programs load it with AutoModel, and multiply the state of a row's last token "
        "with score.weight of its files (docs/vlm.md)"
    )


# What transformers' classes split text by, whatever tokenizer.json says; and the bodies whose class is always taken.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_ENDS = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, str] = {
    "Qwen2Tokenizer": _WORDS + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + _ENDS,
    "Qwen3_5Tokenizer": _WORDS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + _ENDS,
}
CLASSES: Mapping[str, str] = {
    "qwen2": "Qwen2Tokenizer", **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen4_exp"), "Qwen3_5Tokenizer")
}  # fmt: skip


def token_notes(pipeline: Pipeline, stages: Collection[str]) -> list[str]:
    """Notes on bases whose ``tokenizer.json`` splits text in another way than the class that AutoTokenizer takes."""
    found: dict[str, str] = {}
    for name in stages:
        root = root_of(pipeline, name)
        if isinstance(pipeline.stages[name].method, Training) and root not in found and pipeline.is_source(root):
            read = [root_json(pipeline, name, f"{each}.json") for each in ("config", "tokenizer", "tokenizer_config")]
            config, file, tokenizer_config = (each if isinstance(each, dict) else {} for each in read)
            by_name = str(tokenizer_config.get("tokenizer_class")).removesuffix("Fast")
            taken = CLASSES.get(str(config.get("model_type")), by_name)
            split = file.get("pre_tokenizer")
            parts = split.get("pretokenizers", [split]) if isinstance(split, dict) else []
            patterns = [each["pattern"] for each in parts if isinstance(each, dict) and "pattern" in each]
            if file and taken in SPLITS and patterns != [{"Regex": SPLITS[taken]}]:
                found[root] = taken
    return [
        f"{root}: trains on the tokens of its tokenizer.json; transformers' AutoTokenizer loads it as {taken}, which "
        "splits text in another way: load it outside with PreTrainedTokenizerFast.from_pretrained, or tokenizers"
        for root, taken in found.items()
    ]


def batch_notes(pipeline: Pipeline) -> dict[str, str]:
    """Stage -> why its ``micro_batch_size`` and ``num_workers`` change the model.

    In all other stages they only change the order of sums.
    """
    found = {}
    for name, method, config in _trainings(pipeline):
        root = root_of(pipeline, name)
        reasons = list(_reasons(method, config))
        if reasons:
            found[name] = (
                f"stages.{name}: micro_batch_size and num_workers change the model: {' and '.join(reasons)}; keep them "
                "as they are to repeat it"
            )
        elif pipeline.is_source(root) and root_directory(pipeline, root) is None:
            path = pipeline.sources[root.removeprefix(SOURCE)].path
            found[name] = (
                f"{path} is not on this machine yet: whether micro_batch_size and num_workers change what is trained "
                "from it is unknown, and max_length is not checked against its positions; plan again once a run has "
                "fetched it"
            )
    return found


def _reasons(method: Training, config: Mapping[str, object]) -> Iterator[str]:
    if method.adapter and method.adapter.dropout:
        yield f"dropout is drawn per micro batch (adapter.dropout={method.adapter.dropout:g})"
    if method.neftune_alpha:
        yield f"noise is drawn per micro batch (neftune_alpha={method.neftune_alpha:g})"
    if not _disables_dropout(method):
        rates = {
            key: value for key, value in config.items() if key.endswith(_DROPOUT) and not key.startswith(_OF_HEADS)
        }
        drawn = [f"{key}={rate:g}" for key, rate in rates.items() if isinstance(rate, float) and rate > 0]
        if drawn:
            yield f"dropout is drawn per micro batch ({', '.join(drawn)})"
    weight = config.get("router_aux_loss_coef")
    has_experts = all(config.get(name, True) for name in ("num_experts", "num_local_experts", "is_moe"))
    if isinstance(weight, float) and weight and has_experts and method.models[POLICY] != REWARD_HEAD:
        yield f"the routers' loss is one of each micro batch (router_aux_loss_coef={weight:g})"
    jitter = [
        f"{key}={rate:g}"
        for key, rate in config.items()
        if key.endswith("jitter_noise") and isinstance(rate, float) and rate
    ]
    if config.get("model_type") == "phimoe":
        jitter.append("phimoe")
    if jitter:
        yield f"experts are drawn at random in training ({', '.join(jitter)})"


def _disables_dropout(method: Training) -> bool:
    """Whether the base's dropout is off: ``TrainingRun.trl`` sets the option of TRL's configs for pairs, single answers
    and prompts; methods with their own loop get the model unchanged."""
    reads = getattr(method, "reads", None)  # methods with their own ``run`` have none
    return type(method).loop is Training.loop and reads not in (TEXT, CONVERSATIONS, None)


def _trainings(pipeline: Pipeline) -> Iterator[tuple[str, Training, Mapping[str, object]]]:
    """Each training with the ``config.json`` of its first model; empty: unknown."""
    for name in pipeline.order():
        method = pipeline.stages[name].method
        if isinstance(method, Training) and POLICY in getattr(method, "models", {}):
            config = root_config(pipeline, name)
            text = config.get("text_config")
            yield name, method, {**config, **text} if isinstance(text, dict) else config


_THINKING = "thinking"  # field of methods that train on conversations


def check_evaluations(pipeline: Pipeline) -> None:
    """Checks that the models of an evaluation are comparable and that its row length is known.

    Raises:
        ConfigError: tokenizers differ, ``max_length`` is unknown or too small, or ``thinking`` is not set and the
            models were trained with different values.
    """
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Evaluate):
            _check_tokenizers(pipeline, name)
            _check_length(pipeline, name, stage.method)
            _check_thinking(pipeline, name, stage.method)


def check_frozen_models(pipeline: Pipeline) -> None:
    """Checks that a teacher or reward model has the tokens of the policy, if both vocabularies are known."""
    for name, stage in pipeline.stages.items():
        if not isinstance(stage.method, Training):
            continue
        for slot, role in stage.method.models.items():
            if role not in (TEACHER, REWARD_MODEL) or slot not in stage.inputs:
                continue
            root, other = (root_of(pipeline, stage.inputs[each]) for each in (POLICY, slot))
            own, known = (_vocabulary(pipeline, each) for each in (other, root))
            apart = differing_tokens(own, known) if other != root and own and known else []
            if apart:
                raise ConfigError(
                    f"stages.{name}.inputs: {slot} ({stage.inputs[slot]}) and policy ({stage.inputs[POLICY]}) have "
                    f"different tokenizers: {len(apart)} tokens of the policy are missing in {slot} or have other ids "
                    f"there, such as {apart[0]!r}; a model that has all of them with the same ids is accepted, as one "
                    f"of the same family; set inputs.{slot} to one"
                )


def _check_tokenizers(pipeline: Pipeline, name: str) -> None:
    inputs = pipeline.stages[name].inputs
    reference = root_of(pipeline, inputs["reference"])
    known = _vocabulary(pipeline, reference)
    for slot, ref in _models(pipeline, name).items():
        root = root_of(pipeline, ref)
        own = None if root == reference else _vocabulary(pipeline, root)
        apart = differing_tokens(own, known) if own and known else []
        if apart:
            raise ConfigError(f"stages.{name}.inputs: {other_tokens(slot, ref, inputs['reference'], apart)}")


def _check_length(pipeline: Pipeline, name: str, method: Evaluate) -> None:
    if method.max_length is not None:
        _limits(name, pipeline, method, method.max_length)
        return
    refs = list(_models(pipeline, name).values())
    sources = [pipeline.sources[ref.removeprefix(SOURCE)] for ref in refs if pipeline.is_source(ref)]
    recipes = [pipeline.stages[ref].method.recipe() for ref in refs if not pipeline.is_source(ref)]
    lengths = [length for recipe in recipes if isinstance(length := recipe.get("max_length"), int)]
    if lengths:
        _limits(name, pipeline, method, max(lengths))
    # An output with a manifest may record the length of its rows.
    elif not any(source.path.startswith(ALIAS) or Path(source.path).name == "output" for source in sources):
        raise ConfigError(
            f"stages.{name}.method.max_length is not set, and none of the models is trained by a stage whose length it "
            f"could follow; a number of tokens is accepted; set stages.{name}.method.max_length=1024"
        )


def _limits(name: str, pipeline: Pipeline, method: Evaluate, max_length: int) -> None:
    """Checks the lengths of an evaluation, also against tables of positions, before anything trains."""
    try:
        method.lengths(max_length)
    except ConfigError as error:
        raise ConfigError(f"stages.{name}.method: {error}") from error
    for ref in _models(pipeline, name).values():
        config = root_config(pipeline, ref)
        positions = learned_positions(config)
        if positions is not None and max_length > positions:
            wrong = too_few_positions(max_length, positions, str(config["model_type"]))
            raise ConfigError(f"stages.{name}.method.{wrong}")


def _check_thinking(pipeline: Pipeline, name: str, method: Evaluate) -> None:
    if method.thinking is not None:
        return
    refs = [ref for ref in _models(pipeline, name).values() if not pipeline.is_source(ref)]
    methods = {ref: pipeline.stages[ref].method for ref in refs}
    try:
        agreed_thinking({ref: getattr(each, _THINKING) for ref, each in methods.items() if hasattr(each, _THINKING)})
    except ConfigError as error:
        raise ConfigError(f"stages.{name}.method: {error}") from error


def _models(pipeline: Pipeline, name: str) -> dict[str, str]:
    """Slot -> reference, of all measured models."""
    stage = pipeline.stages[name]
    kinds = stage.method.consumes
    return {slot: ref for slot, ref in stage.inputs.items() if kinds.get(slot, kinds["*"]) in MODELS}


def _vocabulary(pipeline: Pipeline, ref: str) -> dict[str, int] | None:
    """Token -> index; None: unknown until the model is fetched or trained."""
    return vocabulary_of(root_json(pipeline, ref, "tokenizer.json"))


_NAMED_BY_SLOT = (CANDIDATE, PARENT, CHAMPION)  # slots of a gate


def check_metrics(pipeline: Pipeline) -> None:
    """Checks that checkpoints are of a training, and judged by a metric that its steps report or its evaluation scores.

    Raises:
        ConfigError: there is none of that name.
    """
    of_trainings = [stage.resources.keep_best for stage in pipeline.stages.values() if stage.method.trains]
    for name, stage in pipeline.stages.items():
        best, keep_best = getattr(stage.method, "best", None), stage.resources.keep_best
        for where, ranking in (("method.best", best), ("resources.keep_best", keep_best)):
            path = f"stages.{name}.{where}.metric={ranking.metric}" if ranking else ""
            if ranking and stage.method.trains:
                require_metric(path, name, stage, ranking.metric, of_steps=True)
            elif ranking and ranking not in of_trainings:  # else it is the pipeline's default, meant for these
                raise ConfigError(f"{path}: {name} trains nothing, so it has no checkpoints; set {where}=null")
        setting = stage.method.evaluation if isinstance(stage.method, Training) else None
        _check_judge(name, stage)
        asked = {"metric": setting.metric} if setting and setting.metric else {}
        asked |= {f"gate.{of}.metric": bound.metric for of, bound in (setting.gate or {}).items()} if setting else {}
        for field, metric in asked.items():
            known = _scored(stage.method)
            if not any(_is_of(metric, each) or each.startswith(f"{metric}/") for each in known):
                raise ConfigError(
                    f"stages.{name}.method.evaluation.{field}={metric}: no checkpoint is scored by it; it may be in "
                    f"evaluation.metrics; they are scored by {listed(metric, known)}"
                )


def _check_judge(name: str, stage: Stage) -> None:
    """Requires that the rows of a training have what its evaluation scores, and that its reward model is read."""
    method = stage.method
    if not isinstance(method, Training):
        return
    setting, where = method.evaluation, f"stages.{name}.inputs.{method.judge}"
    if method.judge in stage.inputs and method.judge not in method.models and not (setting and setting.is_judged):
        raise ConfigError(
            f"{where}={stage.inputs[method.judge]}: nothing reads it; a metric of {name}'s evaluation may be judged by "
            "it ({function: win_rate, judge: reward_model}); add one to evaluation.metrics, or remove the input"
        )
    if setting is None:
        return
    if setting.is_judged and method.judge not in stage.inputs:
        raise ConfigError(f"stages.{name}.method.evaluation.metrics: a reward model judges answers; set {where}=STAGE")
    answered = [each.label for each in setting.own_metrics if not each.is_benchmark]
    if answered and type(method).reads.kind == Kind.TEXT:
        raise ConfigError(
            f"stages.{name}.method.evaluation.metrics: {answered[0]} scores answers, and {name} trains on text, which "
            "asks nothing; text_perplexity, which is scored anyway, and lm_eval:TASK are accepted; remove it"
        )


def _beside(method: Training) -> tuple[Evaluate, list[str]]:
    """What scores the checkpoints of a training, and its slots."""
    assert method.evaluation
    slots = [SLOTS[type(method).reads.kind][0], *["reward_model"] * method.evaluation.is_judged]
    return Evaluate(metrics=method.evaluation.metrics, rewards=getattr(method, "rewards", None)), slots


def _scored(method: Method) -> list[str]:
    """The metrics by which ``evaluation`` scores the checkpoints of a training; ``NAME/*``: all that begin so."""
    if not isinstance(method, Training) or method.evaluation is None:
        return []
    measured, slots = _beside(method)
    return sorted(measured.policy_metrics(slots))


def require_metric(where: str, name: str, stage: Stage, metric: str, *, of_steps: bool = False) -> None:
    """Raises ConfigError where a stage does not measure a metric, or does not report it while it runs."""
    method, known = stage.method, stage.method.measured_metrics(without_verdict(stage.inputs), of_steps=of_steps)
    by_reward = isinstance(method, Training) and method.progress == "reward"
    if metric == "loss" and isinstance(method, Training) and by_reward:
        raise ConfigError(f"{where}: {method.loss_says_nothing}, so it ranks no models; name reward, to be maximized")
    if known and "evaluation/*" in known:
        names = [name for each in _scored(method) for name in (each, *([f"{each}/stderr"] * (each[-1] != "*")))]
        scored = [f"evaluation/{of}{each}" for of in ("", "base/") for each in names]
        known = (*(each for each in known if each != "evaluation/*"), *scored)
    if known is None or any(metric == each or (each[-1] == "*" and metric.startswith(each[:-1])) for each in known):
        return
    if not known:
        raise ConfigError(f"{where}: {name} reports nothing while it runs; name a stage that trains")
    validated = metric in (HELD_OUT_LOSS, VAL_LOSS) and isinstance(method, Training) and not by_reward
    lacks = "; set validation.every_steps" if validated else ""
    if isinstance(method, Training) and metric.startswith("evaluation/") and not method.evaluation:
        lacks = "; set evaluation.every_steps"
    raise ConfigError(f"{where}: {name} does not measure it{lacks}; it measures {listed(metric, sorted(known))}")


def check_gates(pipeline: Pipeline) -> None:
    """Checks that the reports of each gate will have the metrics and policies of its rules."""
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Gate):
            for rule_name, rule in stage.method.rules.items():
                _check_rule(pipeline, name, f"stages.{name}.method.rules.{rule_name}", rule)


def _check_rule(pipeline: Pipeline, gate: str, where: str, rule: Rule) -> None:
    inputs = pipeline.stages[gate].inputs
    if rule.against in (PARENT, CHAMPION) and rule.against not in inputs:
        slot = f"stages.{gate}.inputs.{rule.against}"
        raise ConfigError(f"{where}.against={rule.against}: nothing fills {slot}; set it, or compare with a policy")
    others = (*_NAMED_BY_SLOT, VERDICT)
    for name in (ref for slot, ref in inputs.items() if slot not in others and ref in pipeline.stages):
        report = pipeline.stages[name]
        if not isinstance(report.method, Evaluate) or report.method.measures is None:
            continue  # the metrics of a user's method are unknown
        metrics = [
            *report.method.policy_metrics(report.inputs),
            *["accuracy"] * ({"reward_model", "pairs"} <= report.inputs.keys()),
        ]
        if not any(_is_of(rule.metric, each) for each in metrics):
            raise ConfigError(
                f"{where}.metric={rule.metric}: {name} does not measure it; it measures {listed(rule.metric, metrics)}"
            )
        policies = [slot for slot in report.inputs if slot not in Evaluate.consumes]
        for field, policy in (("policy", rule.policy), ("against", rule.against)):
            if policy is not None and policy not in (*_NAMED_BY_SLOT, *policies, "reward_model"):
                raise ConfigError(
                    f"{where}.{field}={policy}: {name} measures no such policy; there are: {listed(policy, policies)}"
                )


def _is_of(metric: str, known: str) -> bool:
    """Whether a metric is a known one; either may stand for all that begin like it."""
    begins = metric.endswith("*") and known.startswith(metric[:-1])
    return metric == known or begins or (known.endswith("*") and metric.startswith(known[:-1]))


@dataclass(frozen=True, kw_only=True)
class _Package:
    """A package that a setting needs: its module, and how to install it."""

    module: str
    install: str


_FLASH = {
    "flash_attention_2": _Package(module="flash_attn", install="pip install flash-attn --no-build-isolation"),
    "flash_attention_3": _Package(
        module="flash_attn_interface", install="from github.com/Dao-AILab/flash-attention, folder hopper: pip install ."
    ),
}
_LIGER = _Package(module="liger_kernel", install="pip install 'posttrain[gpu]'")
_NUM2WORDS = _Package(module="num2words", install="pip install 'posttrain[vlm]'")
_TORCHAO = _Package(module="torchao", install="pip install torchao==0.18.0")
_FP8_CAPABILITY = (8, 9)
_CPU_FLAGS = Path("/proc/cpuinfo")
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")  # instructions that multiply in bf16


def check_benchmarks(stages: Mapping[str, Stage]) -> None:
    """Checks that the benchmarks of stages that will run exist, and that their rows are reached from this machine."""
    for name, stage in stages.items() if not os.environ.get("RAY_ADDRESS") else ():  # else they run elsewhere
        measuring = stage.method if isinstance(stage.method, Evaluate) else getattr(stage.method, "evaluation", None)
        try:
            require_reached(measuring.own_metrics if measuring else ())
        except ConfigError as error:
            raise ConfigError(f"stages.{name}: {error}") from error


def check_kernels(pipeline: Pipeline) -> None:
    """Checks that this machine has the compilers, packages and GPUs that trainings need."""
    if os.environ.get("RAY_ADDRESS"):
        return  # they run on other machines
    for name, stage in pipeline.stages.items():
        if isinstance(stage.method, Training):
            _check_compiler(f"stages.{name}.resources", stage.resources)
            _check_packages(f"stages.{name}", stage.method, stage.resources)
            if stage.method.precision == "fp8":
                _check_fp8(f"stages.{name}.method.precision=fp8")
            _check_optimizer(f"stages.{name}", stage.method)


def _check_compiler(where: str, resources: Resources) -> None:
    compiler = os.environ.get("CXX", "g++")
    if resources.compile and not resources.gpus_per_worker and not shutil.which(compiler):
        raise ConfigError(
            f"{where}.compile=true: without a GPU it compiles C++, and there is no {compiler} on this machine; install "
            "it (apt-get install g++), or set compile=false"
        )


def _check_packages(where: str, method: Training, resources: Resources) -> None:
    chosen = {
        f"resources.attention={resources.attention}": ("auto", _FLASH.get(resources.attention)),
        "resources.liger=true": ("false", _LIGER if resources.liger is True else None),
        "method.precision=fp8": ("bf16", _TORCHAO if method.precision == "fp8" else None),
    }
    for setting, (instead, package) in chosen.items():
        if package and not find_spec(package.module):
            raise ConfigError(
                f"{where}.{setting}: the package {package.module} is not installed; install it ({package.install}), or "
                f"set {setting.partition('=')[0].partition('.')[2]}={instead}"
            )


def _check_fp8(asked: str) -> None:
    """Checks the compute capability by the driver; without a driver, the training itself checks it."""
    for line in list_gpus("name", "compute_cap"):
        name, _, capability = line.rpartition(", ")
        if tuple(map(int, capability.split("."))) < _FP8_CAPABILITY:
            raise ConfigError(
                f"{asked}: {name} has compute capability {capability}, and 8.9 (Ada, Hopper) or higher is needed; set "
                "precision=bf16"
            )


def _check_optimizer(where: str, method: Training) -> None:
    """Checks that the optional package of an optimizer is installed."""
    package = OPTIMIZERS[method.optimizer.name].package
    if package and package.is_missing:
        raise ConfigError(
            f"{where}.method.optimizer.name={method.optimizer.name}: it needs the package {package.name}, which is not "
            f"installed: {package.install}; or set optimizer=adamw_torch_fused"
        )


def toy_notes(stages: Mapping[str, Stage]) -> list[str]:
    """The stages that make a model from scratch, which a user may take for a real one."""
    return [
        f"{name}: a toy, made from scratch on {stage.inputs['rows']}; a real model is model=smollm2"
        for name, stage in stages.items()
        if isinstance(stage.method, BaseModel)
    ]


def bf16_notes(stages: Mapping[str, Stage], chosen: Collection[str] = ()) -> list[str]:
    """Where trainings on this CPU use bf16 without its instructions, or fp32 beside them.

    Args:
        chosen: stages whose precision the user has set: of these fp32 is not questioned.
    """
    found = {"fp32": list[str](), "bf16": list[str]()}
    for name, stage in stages.items():
        method = stage.method
        if not isinstance(method, Training) or (method.has_own_loop and "precision" not in method.applies):
            continue
        is_meant = name in chosen and method.precision == "fp32"
        if method.precision in found and not stage.resources.gpus_per_worker and not is_meant:
            found[method.precision].append(name)
    if os.environ.get("RAY_ADDRESS") or not _CPU_FLAGS.is_file():
        return []
    instructions, fp32, bf16 = bf16_instructions(), ", ".join(found["fp32"]), ", ".join(found["bf16"])
    if instructions and fp32:
        return [
            f"precision=bf16 would train {fp32} faster, into another model: this CPU has {instructions} "
            "(docs/performance.md)"
        ]
    if not instructions and bf16:
        return [
            f"precision=bf16 of {bf16}: this CPU has no instructions for it ({', '.join(_BF16_FLAGS)}), and "
            "emulates it many times slower than fp32; set precision=fp32, which is another model (docs/performance.md)"
        ]
    return []


def cluster_notes(names: Collection[str]) -> list[str]:
    """Where the stages on a Ray cluster run.

    Args:
        names: of these stages.
    """
    address = os.environ.get("RAY_ADDRESS")
    place = (
        f"on the Ray cluster at RAY_ADDRESS={address}, which posttrain doctor asks"
        if address
        else "on a Ray cluster that the run starts on this machine and ends; to join yours, set RAY_ADDRESS"
    )
    return [f"{', '.join(names)}: {place} (docs/cluster.md)"] if names else []


def compile_notes(stages: Mapping[str, Stage]) -> list[str]:
    """The stages whose quantized base compiles a kernel first, which takes minutes once."""
    found = []
    for name, stage in stages.items():
        setting = stage.method.quantization if isinstance(stage.method, Training) else None
        if setting and compiles(setting.format, on_gpu=stage.resources.gpus_per_worker > 0):
            found.append(
                f"{name}: quantization.format={setting.format} compiles C++ before its first step, for minutes"
            )
    return found[:1]  # the first one does it for all


def bf16_instructions() -> str | None:
    """The CPU's bf16 instructions; None: none or unknown."""
    try:
        flags = set(_CPU_FLAGS.read_text().split())
    except OSError:
        return None
    return next((flag for flag in _BF16_FLAGS if flag in flags), None)
