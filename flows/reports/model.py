"""All that the record of a store says of a model: as one object, and as a page.

The record alone is read: manifests, reports of steps, run records, estimates, and the files of evaluations and gates.
"""

import base64
import html
import io
import json
import math
import pydoc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass
from datetime import datetime
from functools import cache, partial
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict, cast

from markupsafe import Markup

from flows.planning.advice import COMMAND_LINE
from flows.planning.estimates import History
from flows.progress.run_record import runs_of
from flows.reports.diagnosis import finding_dict
from flows.reports.page import ascii_tree, draw, script_json, source_hash
from flows.reports.wording import clock, gib, spelled
from lineage.artifact import DATA, MODELS, SOURCE, Kind
from lineage.diagnosis.curves import VALIDATION, read_curves
from lineage.diagnosis.rules import diagnose
from lineage.errors import ArtifactError, ConfigError
from lineage.filesystem.files import read_jsonl
from lineage.fingerprint import digest_json, short
from lineage.graph.ancestry import Edge, Graph, Node, ancestry
from lineage.graph.index import Index
from lineage.graph.places import node_key
from lineage.graph.refs import resolve
from lineage.markup import html_page
from lineage.record.attempts import attempts
from lineage.record.metrics_file import (
    BENCHMARKS_FILE,
    CHECKPOINT_SCORES_FILE,
    RECIPE_FILE,
    is_of_machine,
    read_reports,
)
from lineage.record.run_file import RunFile
from lineage.record.verdict import interval_text, read_verdict
from lineage.source.model_files import read_json
from lineage.store import Entry, Manifest
from tasks.context import Resources
from tasks.data.images import MARK, StoredImages, marked
from tasks.evaluate.report import ANSWERS_FILE, title_of
from tasks.evaluate.row_scores import (
    POLICIES_FILE,
    SCORES_FILE,
    RowScores,
    lower_is_better,
    read_failed,
    read_policies,
    read_scores,
)
from tasks.gate.bootstrap import Bootstrap

if TYPE_CHECKING:
    from jinja2 import Template

Facts = dict[str, object]
Pairs = list[tuple[str, str]]


class Chart(TypedDict):
    """A title, and curves: name, values, and of each axis the places."""

    title: str
    traces: list[Facts]


class Curves(TypedDict):
    """The charts of one training."""

    stage: str
    charts: list[Chart]


class ScoreRow(TypedDict):
    """A metric: the values of the policies in their order, each with its interval, and the gain of the last one.

    ``rows``: digest of the ids of the rows that it was measured on; empty: unknown.
    """

    metric: str
    rows: str
    better: str
    values: list[Facts | None]
    gain: Facts | None


class Scores(TypedDict):
    """One evaluation."""

    stage: str
    policies: list[str]
    rows: list[ScoreRow]
    protocol: Pairs
    failed: NotRequired[Pairs]  # what has no score, and why
    num_rows: int


class Answers(TypedDict):
    """Answers to the same prompts; a row has ``prompt``, ``right`` and an answer of each policy.

    ``images``: mark of an image in a prompt -> a data URL of it, made small.
    """

    stage: str
    policies: list[str]
    rows: list[dict[str, str | None]]
    images: NotRequired[dict[str, str]]


class Use(TypedDict):
    """A program that loads the model, and what it has to know: class, template, whether it runs the model's code."""

    snippet: str
    facts: Pairs
    auto: str
    is_chat: bool
    runs_code: bool


class Report(TypedDict, total=False):
    """What is known of a model. A section without content is missing."""

    ref: str
    id: str
    name: str
    pipeline: str
    kind: str
    about: str
    gains: str
    facts: Pairs
    use: Use
    lineage: Facts
    data: list[Facts]
    samples: list[Facts]
    recipe: list[tuple[str, str, str]]
    curves: list[Curves]
    scores: list[Scores]
    answers: Answers
    verdicts: list[Facts]
    costs: list[Facts]
    findings: list[Facts]
    versions: Pairs


_POINTS, _SAMPLES = 600, 5  # of a curve; rows, and answers
_HEADLINES = 4  # measures at the head of the page
_PICTURE = 256  # pixels of the longer side of an image on the page
_LOG_BYTES = 200_000  # the beginning of a log, where the samples are
_DRAWS, _DRAWS_OF_GAIN = 200_000, 4_000_000  # of a bootstrap: rows times resamples; of a gain as many as a gate has
# Of a process of ours: Ray repeats what its workers print line by line, without the lines that another has printed.
_SAMPLE = re.compile(
    r"^\d{4}-[^\n]* (?:rows_of=(\S+)[^\n]*|sample \(trained tokens in ⟦ ⟧\): (.*?)"
    r"(?=^\d{4}-\d\d-\d\d \d\d:|^--- |^\x1b\[|\Z))", re.M | re.S
)  # fmt: skip
# Title of a chart -> the metrics that it draws, the first that fits; others have a chart by what is before their /.
_CHARTS = {
    "loss": "|".join(("loss", *VALIDATION)), "validation": "val/.*", "gradient norm": "grad_norm",
    "accuracy on the tokens of training rows": "mean_token_accuracy", "accuracy": ".*accurac(y|ies).*",
    "rewards": "rewards?(/.*)?", "KL and entropy": r"(.*/)?(kl|entropy)\b.*",
    "learning rate": "learning_rate",
}  # fmt: skip
_UNDRAWN = ("num_tokens", "epoch", "epochs", "frac_reward_zero_std")
# Field of a recipe -> the group whose choice on the command line sets it.
_GROUPS = ("adapter", "quantization", "optimizer", "schedule", "precision")


def model_report(ref: str, index: Index) -> Report:
    """What the record says of the model that a REF names (ConfigError: the REF names nothing, or no model)."""
    graph = ancestry(index, resolve(ref, index).node)
    node = graph.nodes[graph.root]
    manifest = node.manifest
    if manifest is None or node.entry is None or manifest.produces not in MODELS:
        kind = manifest.produces if manifest else "a source or deleted"
        raise ConfigError(f"{ref}: {node.id} is {kind}; a model ({' or '.join(MODELS)}) is accepted; name one")
    chain = [each for each in _chain(graph) if each.manifest and each.entry]
    slots: dict[str, str] = {}
    for other, slot in sorted(index.children(node.id), key=lambda each: each[1] in ("champion", "parent", "reference")):
        slots.setdefault(other, slot)  # an evaluation that has it as policy and as reference is one
    consumers = [(index.entry(other), slot) for other, slot in slots.items() if index.artifact(other)]
    readers = [(entry, slot, each) for entry, slot in consumers if (each := entry.readable_manifest())]
    scores = [
        found for entry, slot, each in readers if each.produces == Kind.REPORT
        for found in [_scores(entry, slot, each, graph)] if found
    ]  # fmt: skip
    beside = _scores_beside(node)
    scores += [beside] if beside else []
    sections: Report = {
        "ref": ref, "id": node.id, "name": node.name, "pipeline": manifest.pipeline, "kind": manifest.produces,
        "about": _about(graph, chain), "gains": _gains(scores), "facts": _facts(node, manifest),
        "lineage": graph.to_dict(node.id),
        "data": _data(graph),
        "samples": _trained_samples(graph, chain),
        "recipe": _recipe(index.store, node, manifest),
        "curves": [found for each in reversed(chain) if (found := _curves(each))],
        "scores": scores,
        "verdicts": [
            asdict(found) | {"intervals": [interval_text(rule) for rule in found.rules]}
            for entry, slot, each in readers if each.produces == Kind.VERDICT and slot == "candidate"
            for found in [read_verdict(entry.output)]
        ],
        "costs": _costs(index.store, chain),
        "findings": [found for each in reversed(chain) for found in _findings(each)],
        "versions": _versions(manifest),
    }  # fmt: skip
    if use := _use(graph, node, manifest):
        sections["use"] = use
    for entry, slot, _ in reversed(readers):
        if answers := _answers(entry, slot, graph, index):
            sections["answers"] = answers
    return cast("Report", {name: found for name, found in sections.items() if found})


def _chain(graph: Graph) -> list[Node]:
    """The model and those that it was trained from, the first one first."""
    found, name = [graph.nodes[graph.root]], graph.root
    while above := next((each.parent for each in graph.parents(name) if each.slot in ("policy", "output")), None):
        name = above
        found.insert(0, graph.nodes[name])
    return found


def _about(graph: Graph, chain: Sequence[Node]) -> str:
    """What the method does, and what the model was made from."""
    manifest = chain[-1].manifest
    assert manifest
    does = _first_line(manifest.method)
    first = next((each.parent for each in graph.parents(chain[0].id) if each.slot == "policy"), None)
    start = graph.nodes[first].name.removeprefix(SOURCE) if first else chain[0].name
    trained = [each for each in chain if each.name != start]
    read = {edge.parent for each in trained for edge in graph.parents(each.id)}
    rows = sum(_count(each.manifest, "train_rows", "rows") for each in _data_of(graph) if each.id in read)
    steps = [each.name for each in trained]
    on = f", on {rows:,} rows" if rows else ""
    return f"{does} Made from {start} by {', then '.join(steps)}{on}." if steps else does


def _first_line(method: str) -> str:
    """The first line of the documentation of a method of ours: the code of others is not imported."""
    found = pydoc.locate(method) if method.startswith("tasks.") else None
    return f"{(found.__doc__ or '').partition(chr(10))[0]}" if found else f"By {method}."


def _data_of(graph: Graph) -> list[Node]:
    return [each for each in graph.nodes.values() if each.manifest and each.manifest.produces in DATA]


def _count(manifest: Manifest | None, *names: str) -> int:
    return next((int(manifest.metrics[name]) for name in names if manifest and name in manifest.metrics), 0)


def _facts(node: Node, manifest: Manifest) -> Pairs:
    ran = manifest.provenance
    measured = [(name, f"{manifest.metrics[name]:.4g}") for name in ("loss", "reward") if name in manifest.metrics]
    found = [
        ("pipeline", manifest.pipeline), ("stage", manifest.stage), ("method", str(manifest.recipe.get("method", ""))),
        ("aliases", ", ".join(node.aliases)), ("licences and consent", ", ".join(sorted(node.labels))),
        *measured, ("made", f"{datetime.fromtimestamp(ran.end):%Y-%m-%d %H:%M}"),
        ("fingerprint", manifest.fingerprint), ("digest of its files", manifest.output_digest),
        *(("export", each.summary()) for each in node.exports),
    ]  # fmt: skip
    return [(name, value) for name, value in found if value]


# --- use


def _use(graph: Graph, node: Node, manifest: Manifest) -> Use | None:
    """How the model is loaded and asked; None: its files, or those of its base, are gone."""
    from tasks.model.adapter_files import base_and_adapters, is_adapter, rounding_of_base

    assert node.entry
    output = node.entry.output.absolute()
    config = read_json(output, "config.json")
    if not isinstance(config, Mapping):
        return None
    try:
        base, adapters = base_and_adapters(output) if is_adapter(output) else (output, [])
    except (ArtifactError, ConfigError):
        return None
    names = [str(each) for each in config.get("architectures") or [config.get("model_type")]]
    is_policy, is_chat = manifest.produces == Kind.CHECKPOINT, has_template(output)
    reads_images = "vision_config" in config and names[0].endswith("ForConditionalGeneration")
    auto = "AutoModelForImageTextToText" if reads_images else "AutoModelForCausalLM"
    size = sum(path.stat().st_size for path in output.iterdir() if path.suffix == ".safetensors")
    context = config.get("max_position_embeddings")
    found = [
        ("architecture", ", ".join(names)),
        ("weights", gib(size) if size >= 2**27 else f"{size / 2**20:.1f} MiB"),
        ("context", f"{context:,} tokens" if isinstance(context, int) else ""),
        ("chat template", "its own; it renders messages" if is_chat else "none: give it text"),
    ]
    if is_policy:
        found += [("stop tokens", ", ".join(_stop_tokens(output))), ("sampling", _sampling(output))]
    if any(map(rounding_of_base, adapters)):
        exact = "rounds its base as the training did: `posttrain export merged` writes that model"
        found.append(("exactly", f"this program loads the base in full; `posttrain chat` {exact}"))
    sources = [each.record.source for each in graph.nodes.values() if each.record and each.record.source]
    use: Use = {
        "snippet": "", "facts": [(name, value) for name, value in found if value], "is_chat": is_chat,
        "auto": auto if is_policy else "AutoModelForSequenceClassification",
        "runs_code": any(bool(each.reading.get("trust_remote_code")) for each in sources),
    }  # fmt: skip
    return {
        **use,
        "snippet": snippet(str(output), use, str(base.absolute()), [str(each.absolute()) for each in adapters]),
    }


def has_template(output: Path) -> bool:
    """Whether a model's directory has a chat template."""
    config = read_json(output, "tokenizer_config.json")
    return (output / "chat_template.jinja").is_file() or (isinstance(config, Mapping) and "chat_template" in config)


def snippet(path: str, use: Use | None, base: str = "", adapters: Sequence[str] = ()) -> str:
    """A program that loads a model with transformers and asks it; it prints an answer, or a score.

    Args:
        path: of its directory, or its name on the hub.
        use: None: a causal language model with a chat template.
        base: directory of the whole model below its adapters; empty: ``path``.
    """
    auto, is_chat = (use["auto"], use["is_chat"]) if use else ("AutoModelForCausalLM", True)
    is_judge = auto == "AutoModelForSequenceClassification"
    options = ", trust_remote_code=True" if use and use["runs_code"] else ""
    messages = [{"role": "user", "content": "Hello"}]
    messages += [{"role": "assistant", "content": "Good morning."}] if is_judge else []
    asked = "" if is_judge else "add_generation_prompt=True, "
    lines = [
        *(["from peft import PeftModel"] if adapters else []), f"from transformers import {auto}, AutoTokenizer", "",
        f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(path)}{options})",
        f"model = {auto}.from_pretrained({json.dumps(base or path)}{options})",
    ]  # fmt: skip
    for each in adapters:
        lines.append(f"model = PeftModel.from_pretrained(model, {json.dumps(each)}).merge_and_unload()")
    if is_chat:
        lines += [
            f"messages = {json.dumps(messages)}",
            f'inputs = tokenizer.apply_chat_template(messages, {asked}return_dict=True, return_tensors="pt")',
        ]
    else:
        lines.append('inputs = tokenizer("Hello", return_tensors="pt")')
    if is_judge:
        return "\n".join([*lines, "print(model(**inputs).logits.item())  # the higher, the better the answer"])
    return "\n".join([
        *lines, "output = model.generate(**inputs, max_new_tokens=64)  # its files have its stop tokens and sampling",
        'print(tokenizer.decode(output[0][inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ])  # fmt: skip


def _stop_tokens(output: Path) -> Iterator[str]:
    generation, tokenizer = read_json(output, "generation_config.json"), read_json(output, "tokenizer.json")
    ends = generation.get("eos_token_id") if isinstance(generation, Mapping) else None
    added = tokenizer.get("added_tokens", []) if isinstance(tokenizer, Mapping) else []
    names = {each["id"]: each["content"] for each in added}
    for token in ends if isinstance(ends, list) else [ends]:
        if token is not None:
            yield f"{names.get(token, '')} ({token})".strip()


def _sampling(output: Path) -> str:
    generation = read_json(output, "generation_config.json")
    if not isinstance(generation, Mapping) or not generation.get("do_sample"):
        return "greedy"
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return ", ".join(f"{name} {generation[name]}" for name in names if generation.get(name) is not None) or "sampled"


# --- data and recipe


def _data(graph: Graph) -> list[Facts]:
    """The sets of rows in the ancestry, and where they came from."""
    found = []
    for node in _data_of(graph):
        manifest = node.manifest
        assert manifest
        sources = [graph.nodes[edge.parent] for edge in graph.parents(node.id)]
        found.append({
            "name": node.name, "kind": str(manifest.produces), "train_rows": _count(manifest, "train_rows", "rows"),
            "held_out_rows": _count(manifest, "held_out_rows"), "labels": sorted(node.labels),
            "sources": [_place(each) for each in sources if each.record],
        })  # fmt: skip
    return found


def _place(node: Node) -> str:
    source = node.record.source if node.record else None
    name = node.name.removeprefix(SOURCE)
    return f"{name}: {source.path}" if source else name


def _trained_samples(graph: Graph, chain: Sequence[Node]) -> list[Facts]:
    """The first rows of each training as text with the trained tokens in ⟦ ⟧, as its log has them."""
    found = list[Facts]()
    for node in chain:
        assert node.entry
        try:
            with node.entry.log.open("rb") as file:
                log = file.read(_LOG_BYTES).decode("utf-8", "replace")
        except OSError:
            continue
        inputs, rows_of, texts = (
            {edge.parent.partition("@")[0] for edge in graph.parents(node.id)},
            "",
            dict[str, None](),
        )
        for name, text in _SAMPLE.findall(log):  # the first stage's log has the rows of all: one process prepares them
            rows_of = name or rows_of
            if text and (rows_of in inputs or not rows_of):
                texts[text.strip().replace("⟧⟦", "⟧\n⟦")] = None  # a pair: the chosen answer, and the rejected one
        parts = [re.split("(⟦.*?⟧)", text, flags=re.S) for text in islice(texts, _SAMPLES)]
        rows = [[(part.strip("⟦⟧"), part.startswith("⟦")) for part in each if part] for each in parts]
        of_pairs = any(edge.slot == "pairs" for edge in graph.parents(node.id))
        what = "of each pair the chosen answer, then the rejected one; " if of_pairs else ""
        if rows:
            found.append({"stage": node.name, "what": f"{what}what was trained is marked", "rows": rows})
    return found


def _recipe(store: Path, node: Node, manifest: Manifest) -> list[tuple[str, str, str]]:
    """Field, value, and what set it: a file, the command line, the pipeline, or the method's default."""
    assert node.entry
    made = (run for run, stage in runs_of(store, node.entry.path) if stage.state in ("done", "running"))
    run, noted = next(made, None), RunFile.read(node.entry.path)
    cli_args, origins = (run.cli_args, run.origins) if run else (noted.cli_args if noted else [], {})
    overrides = {key.lstrip("+"): word for word in cli_args for key in [word.partition("=")[0]] if "=" in word}
    origin = partial(
        _origin, manifest=manifest, overrides=overrides, defaults=_defaults(manifest.method), origins=origins
    )
    return [
        (name, spelled(value), origin(name, value))
        for name, value in _flat(manifest.recipe)
        if name not in ("method", "version")
    ]


def _origin(
    name: str, value: object, manifest: Manifest, overrides: Mapping[str, str], defaults: Mapping[str, object],
    origins: Mapping[str, str],
) -> str:  # fmt: skip
    place, parts = f"stages.{manifest.stage}.method.", name.split(".")
    names = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]  # a list is set as a whole
    keys = [f"{base}{each}" for base in (place, f"stages.{manifest.stage}.", "") for each in names]
    shared = name.replace("schedule.", "lr_schedule.", 1)
    found = next((origins[key] for key in (*keys, shared) if key in origins), "default" if origins else "")
    for key, word in overrides.items():
        field, group = key.removeprefix(place), name.partition(".")[0]
        if found in (COMMAND_LINE, "") and key.startswith(place) and (name == field or name.startswith(f"{field}.")):
            because = manifest.provenance.because
            return f"{COMMAND_LINE}, by {because}" if because else COMMAND_LINE
        if key == group and group in _GROUPS:
            return f"{COMMAND_LINE}: {word}"
    return found or ("default" if name in defaults and defaults[name] == value else f"pipeline {manifest.pipeline}")


def _defaults(method: str) -> dict[str, object]:
    found = pydoc.locate(method) if method.startswith("tasks.") else None
    if not (isinstance(found, type) and is_dataclass(found)):
        return {}
    values = {}
    for each in fields(found):
        value = each.default_factory() if each.default_factory is not MISSING else each.default
        if value is not MISSING:
            values[each.name] = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    return dict(_flat(json.loads(json.dumps(values, default=str))))


def _flat(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value


# --- curves, costs, findings


def _curves(node: Node) -> Curves | None:
    """The charts of a training: each value with its step, the tokens and the minutes up to it."""
    assert node.entry
    reports = read_reports(node.entry.metrics)
    starts = [each.time for each in attempts(node.entry.path)]
    minutes, tokens, before = 0.0, 0.0, 0.0
    series: dict[str, list[tuple[int, float, float, float]]] = {}
    for place, report in enumerate(reports):
        since = [start for start in starts if start <= report.time] + ([before] if place else [])
        minutes += (report.time - max(since, default=report.time)) / 60
        before, tokens = report.time, report.metrics.get("num_tokens", tokens)
        for name, value in report.metrics.items():
            if math.isfinite(value):
                series.setdefault(name, []).append((report.step, tokens, round(minutes, 4), value))
    places = {step: (tokens, minutes) for points in series.values() for step, tokens, minutes, _ in points}
    lines: list[Facts] = read_jsonl(node.entry.path / CHECKPOINT_SCORES_FILE, dict)
    for line in sorted(lines, key=lambda each: cast("int", each["step"])):
        step = cast("int", line["step"])
        for name, value in cast("Mapping[str, float]", line.get("scores") or {}).items():
            if math.isfinite(value) and not name.endswith("/stderr"):
                series.setdefault(f"score: {name}", []).append((step, *places.get(step, (0.0, 0.0)), value))
    drawn: dict[str, list[str]] = {title: [] for title in _CHARTS}
    for name in series:
        if not is_of_machine(name) and name not in _UNDRAWN:
            fits = (title for title, form in _CHARTS.items() if re.fullmatch(form, name))
            is_alone = name.startswith("score: ") and "perplexity/" not in name  # those of all labels are one chart
            title = name if is_alone else next(fits, name.partition("/")[0])
            drawn.setdefault(title, []).append(name)
    charts: list[Chart] = [
        {"title": title, "traces": [_trace(name, series[name]) for name in names]}
        for title, names in drawn.items() if names
    ]  # fmt: skip
    return {"stage": node.name, "charts": charts} if charts else None


def _trace(name: str, points: Sequence[tuple[int, float, float, float]]) -> Facts:
    every = -(-len(points) // _POINTS)
    columns = zip(*[*points[:-1:every], points[-1]], strict=True)
    steps, tokens, minutes, values = map(list, columns)
    axes = {"step": steps, "tokens": tokens if any(tokens) else [], "minutes": minutes if any(minutes) else []}
    shown = name.rpartition("/")[2].removeprefix("score: ") if name.startswith("score: ") else name
    return {"name": shown, "values": values, **{axis: each for axis, each in axes.items() if each}}


def _costs(store: Path, chain: Sequence[Node]) -> list[Facts]:
    """Predicted and measured needs of each training, by the line that its end left in the store's estimates."""
    runs, found = History.of(store).runs, []
    for node in chain:
        manifest = node.manifest
        assert manifest
        tokens, ran = manifest.metrics.get("num_tokens"), manifest.provenance
        if tokens is None:  # no training
            continue
        near = [run for run in runs if run.stage == node.name and run.tokens == tokens]
        run = min(near, key=lambda each: abs(each.time - ran.end), default=None)
        # Of a resumed training, ``ran`` is the last attempt.
        seconds = max(ran.end - ran.start, manifest.metrics.get("train_seconds", 0.0))
        row: Facts = {"stage": node.name, "seconds": seconds, "predicted_seconds": run and run.predicted_seconds}
        if run:
            row |= {"memory": run.memory, "predicted_memory": run.predicted_memory}
        workers, gpus = (_number(ran.resources.get(name), 1) for name in ("num_workers", "gpus_per_worker"))
        price, watts = (_number(ran.resources.get(name), 0) for name in ("price_per_gpu_hour", "watts_per_worker"))
        hours = workers * gpus * seconds / 3600
        row["gpu_hours"] = hours if "gpus_per_worker" in ran.resources else 0.0
        if price and hours:
            row |= {"cost": price * hours, "currency": str(ran.resources.get("currency", ""))}
            if run and run.predicted_seconds:
                row["predicted_cost"] = price * workers * gpus * run.predicted_seconds / 3600
        if watts:
            row["kwh"] = watts * workers * seconds / 3.6e6
        if "tokens_per_second" in manifest.metrics:
            row["tokens_per_second"] = manifest.metrics["tokens_per_second"]
        found.append(row)
    return found


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default


def _findings(node: Node) -> list[Facts]:
    assert node.entry
    return [{"stage": node.name, **finding_dict(node.name, each)} for each in diagnose(read_curves(node.entry.path))]


def _versions(manifest: Manifest) -> Pairs:
    ran = manifest.provenance
    dirty = " with changes that are not committed" if ran.git_dirty else ""
    usual = {**dict.fromkeys(ran.resources), **{each.name: each.default for each in fields(Resources)}}
    found = [
        ("commit", f"{ran.git_commit}{dirty}" if ran.git_commit else ""), ("code digest", ran.code_digest),
        ("python", ran.python), *sorted(ran.libraries.items()), ("hosts", ", ".join(ran.hosts)),
        *ran.hardware.items(), ("seed", "" if ran.seed is None else str(ran.seed)),
        ("resumed at steps", ", ".join(map(str, ran.resumed_at))), ("time", clock(ran.end - ran.start)),
        *((f"kernels: {name}", value) for name, value in ran.kernels.items()),
        *((f"resources: {name}", json.dumps(value)) for name, value in ran.resources.items() if usual[name] != value),
    ]  # fmt: skip
    return [(name, value) for name, value in found if value]


# --- scores and answers


def _columns(entry: Entry, slot: str, graph: Graph) -> list[str]:
    """The policies of an evaluation that a model is beside: its ancestors, the first one first, and itself last."""
    if slot == "reward_model":
        return [slot]
    if not (entry.output / POLICIES_FILE).exists():
        return []
    known = {each.fingerprint: distance for distance, each in enumerate(graph.nodes.values())}
    policies = {name: known[digits] for name, digits in read_policies(entry.output).items() if digits in known}
    own = [name for name, distance in policies.items() if distance == 0]
    last = slot if slot in own else next(iter(own), "")
    others = sorted((name for name in policies if name not in own), key=lambda name: -policies[name])
    return [*others, last] if last else []


_JUDGED = {  # slot of an evaluation -> beginnings of the metrics that compare with its model
    "reference": ("preference_accuracy", "unpaired_", "win_rate", "kl"),
    "reward_model": ("reward_score", "win_rate"),
}


def _scores(entry: Entry, slot: str, manifest: Manifest, graph: Graph) -> Scores | None:
    """One evaluation: each metric of the model and its ancestors with 95 % intervals, and its gain over the nearest."""
    columns = _columns(entry, slot, graph)
    if not columns:
        return None
    by_row = read_scores(entry.output)
    prefix = f"{columns[-1]}/"
    names = [key.removeprefix(prefix) for key in manifest.metrics if key.startswith(prefix)]
    rows = [
        _score_row(name, columns, manifest.metrics, by_row.get(name)) for name in names if not name.endswith("/stderr")
    ]
    protocol = _protocol(manifest.recipe, entry.output)
    judges = {name: manifest.inputs[name] for name in _JUDGED if name in manifest.inputs}
    protocol += [(name, node_key(each.artifact, each.fingerprint)) for name, each in judges.items()]
    return {
        "stage": manifest.stage, "policies": columns, "rows": rows, "protocol": protocol,
        "failed": [*read_failed(entry.output).items()],
        "num_rows": max((len(each.row_ids) for each in by_row.values()), default=0),
    }  # fmt: skip


def _protocol(recipe: Mapping[str, object], folder: Path) -> Pairs:
    settings = _flat({**recipe, **cast("Facts", read_json(folder, BENCHMARKS_FILE) or {})})
    return [(name, str(value)) for name, value in settings if name not in ("method", "version")]


def _scores_beside(node: Node) -> Scores | None:
    """What was measured of a training's output, and of the model that it started from, while it trained."""
    assert node.manifest and node.entry
    every = {key.removeprefix("evaluation/"): value for key, value in node.manifest.metrics.items()
             if key.startswith("evaluation/")}  # fmt: skip
    names = dict.fromkeys(key.removeprefix("base/") for key in every if not key.endswith("/stderr"))
    metrics = {key if key.startswith("base/") else f"model/{key}": value for key, value in every.items()}
    step = node.manifest.metrics.get("best_step", node.manifest.metrics.get("steps", 0.0))
    folder = node.entry.path / "evaluation" / f"step-{step:.0f}"
    by_row = read_scores(folder) if (folder / SCORES_FILE).exists() else {}
    rows = [_score_row(name, ["base", "model"], metrics, by_row.get(name)) for name in names]
    start = next((record.artifact for slot, record in node.manifest.inputs.items() if slot == "policy"), "base")
    columns, protocol = [start.removeprefix(SOURCE), node.name], [("step", f"{step:.0f}")] if by_row else []
    protocol += _protocol(cast("Facts", read_json(folder, RECIPE_FILE) or {}), folder)
    count = max((len(each.row_ids) for each in by_row.values()), default=0)
    failed = [*node.manifest.failed_scores.items()]
    found = Scores(
        stage="beside the training", policies=columns, rows=rows, protocol=protocol, failed=failed, num_rows=count
    )  # fmt: skip
    return found if rows or failed else None


def _gains(scores: Sequence[Scores]) -> str:
    """By how much a model is better than the one before it, by the first evaluation that compares them."""
    found = next((each for each in scores if any(row["gain"] for row in each["rows"])), None)
    if found is None:
        return ""
    parts: dict[str, list[str]] = {"better": [], "worse": [], "no clear difference": []}
    for row in found["rows"]:
        gain, (before, after) = row["gain"], row["values"][-2:]
        if gain and before and after:
            low, high = cast("float", gain["low"]), cast("float", gain["high"])
            values = " to ".join(short_number(cast("float", each["value"]), 3) for each in (before, after))
            outcome = "better" if low > 0 else "worse" if high < 0 else "no clear difference"
            parts[outcome].append(f"{title_of(row['metric'])} {values}")
    texts = [
        f"{outcome} in {', '.join(each[:_HEADLINES])}"
        + (f" and {len(each) - _HEADLINES} more" if len(each) > _HEADLINES else "")
        for outcome, each in parts.items() if each
    ]  # fmt: skip
    return f"Beside {found['policies'][-2]}: {'; '.join(texts)}." if texts else ""


def _score_row(name: str, columns: Sequence[str], metrics: Mapping[str, float], scores: RowScores | None) -> ScoreRow:
    """A metric of policies, and the gain of the last one over that before it."""
    small = scores.lower_is_better if scores else lower_is_better(name)
    gain = _interval(scores, columns[-1], columns[-2]) if scores and len(columns) > 1 else None
    cells = [_cell(metrics, policy, name, scores) for policy in columns]
    rows = short(digest_json([*scores.row_ids])) if scores else ""
    return ScoreRow(metric=name, rows=rows, better="↓" if small else "↑", values=cells, gain=gain)


def _cell(metrics: Mapping[str, float], policy: str, name: str, scores: RowScores | None) -> Facts | None:
    """A value with its interval; by its standard error where the evaluation gives one."""
    if scores and policy in scores.scores:
        return _interval(scores, policy, None)
    value, error = metrics.get(f"{policy}/{name}"), metrics.get(f"{policy}/{name}/stderr")
    if value is None or not math.isfinite(value):
        return None
    cell: Facts = {"value": value}
    return cell | ({"low": value - 1.96 * error, "high": value + 1.96 * error} if error else {})


def _interval(scores: RowScores, policy: str, baseline: str | None) -> Facts | None:
    if policy not in scores.scores or (baseline and baseline not in scores.scores):
        return None
    most, draws = (10_000, _DRAWS_OF_GAIN) if baseline else (400, _DRAWS)
    count = min(most, max(50, draws // max(1, len(set(scores.groups)))))
    found = Bootstrap(confidence=0.95, num_resamples=count, seed=0).estimate([scores], policy, baseline)
    if not all(map(math.isfinite, (found.value, found.low, found.high))):
        return None
    interval: Facts = {"value": found.value, "low": found.low, "high": found.high}
    return interval


def _answers(entry: Entry, slot: str, graph: Graph, index: Index) -> Answers | None:
    """Answers of the model and of its nearest ancestor to the same prompts."""
    columns = _columns(entry, slot, graph)[-2:]
    if not columns or not (entry.output / ANSWERS_FILE).exists():
        return None
    rows = list[dict[str, str | None]]()
    lines: list[Facts] = read_jsonl(entry.output / ANSWERS_FILE, dict)
    for line in lines:
        if all(name in line for name in columns):
            asked, right = cast("list[dict[str, str]]", line["prompt"]), line.get("right answer")
            texts = {name: str(line[name]) for name in columns}
            earlier = "".join(f"<image:{each}>" for each in marked(turn["content"] for turn in asked[:-1]))
            prompt = earlier + asked[-1]["content"] if asked else ""
            rows.append({"prompt": prompt, "right": None if right is None else str(right), **texts})
    rows.sort(key=lambda row: row["right"] is not None)  # of a question that is also a prompt, with its right answer
    found = list({row["prompt"]: row for row in rows}.values())
    found.sort(key=lambda row: row["right"] is None)
    if not found:
        return None
    answers = Answers(stage=entry.path.parent.name, policies=columns, rows=found[:_SAMPLES])
    if images := _images_of([str(row["prompt"]) for row in answers["rows"]], entry, index):
        answers["images"] = images
    return answers


def _images_of(prompts: Iterable[str], entry: Entry, index: Index) -> dict[str, str]:
    """The images that prompts of an evaluation have: of those rows that it read which are still there."""
    manifest, found = entry.manifest(), dict[str, str]()
    nodes = [node_key(each.artifact, each.fingerprint) for each in (manifest.inputs.values() if manifest else ())]
    outputs = (index.entry(node).output for node in nodes if index.artifact(node))
    for stored in filter(None, map(StoredImages.beside, outputs)):
        for digest in (each for each in marked(prompts) if each in stored.places):
            file, image = io.BytesIO(), stored.image(stored.places[digest])
            image.thumbnail((_PICTURE, _PICTURE))
            image.save(file, "PNG")
            found[f"<image:{digest}>"] = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    return found


def _pictured(text: str, images: Mapping[str, str]) -> Markup:
    """A text with its images in place of their marks; of one that is gone it says so."""
    parts = [Markup.escape(each) for each in MARK.split(text)]
    for place in range(1, len(parts), 2):
        url = images.get(f"<image:{parts[place]}>")
        parts[place] = Markup('<img alt="image" src="{}">').format(url) if url else Markup.escape("[image]")
    return Markup("").join(parts)


# --- the page


_HERE = Path(__file__)
_SIDES = "AB"


def compared(reports: Sequence[Report]) -> tuple[list[Scores], list[Answers]]:
    """Scores and answers of two models beside each other, where both were evaluated and were asked the same."""
    names = [f"{side} {each['name']}" for side, each in zip(_SIDES, reports, strict=True)]
    first, second = (
        {row["metric"]: (row, each["protocol"]) for each in reversed(report.get("scores", [])) for row in each["rows"]}
        for report in reports
    )
    rows = [
        ScoreRow(
            metric=name + ("" if _measured_alike(name, found, second[name]) else ", on other rows or other settings"),
            rows="", better=found[0]["better"], values=[each[0]["values"][-1] for each in (found, second[name])],
            gain=None,
        )
        for name, found in first.items() if name in second
    ]  # fmt: skip
    lines = [
        {(row["prompt"], row["right"]): row[found["policies"][-1]] for row in found["rows"]}
        for found in (report.get("answers", Answers(stage="", policies=[""], rows=[])) for report in reports)
    ]
    images = {mark: url for report in reports for mark, url in report.get("answers", {}).get("images", {}).items()}
    asked = [key for key in lines[0] if key in lines[1]]
    both = [{"prompt": key[0], "right": key[1], names[0]: lines[0][key], names[1]: lines[1][key]} for key in asked]
    return (
        [Scores(stage="", policies=names, rows=rows, protocol=[], num_rows=0)] if rows else [],
        [Answers(stage="", policies=names, rows=both, images=images)] if both else [],
    )


def _measured_alike(metric: str, *found: tuple[ScoreRow, Pairs]) -> bool:
    """Whether two values of a metric are of the same rows, as far as these are known, and by the same settings."""
    of_others = ("metrics.", "lm_eval/")  # but those of the metric itself
    settings = [
        {
            key: value for key, value in protocol if key != "step"
            and metric.startswith(_JUDGED.get(key, ""))
            and (not key.startswith(of_others) or metric.startswith(key.removeprefix("metrics.").rpartition(".")[0]))
        }
        for _, protocol in found
    ]  # fmt: skip
    digests = {row["rows"] for row, _ in found if row["rows"]}
    return len(digests) < 2 and settings[0] == settings[1]


def model_page(reports: Sequence[Report], differences: Sequence[str] = ()) -> str:
    """One self-contained page of one model, or of two beside each other.

    Args:
        differences: lines on what differs in the ancestries of two.
    """
    is_pair = len(reports) == 2
    css, own, script = (
        _HERE.with_name(name).read_text(encoding="utf-8") for name in ("page.css", "model.css", "model.js")
    )
    groups = _merged(reports) if is_pair else reports[0].get("curves", [])
    charts = [chart for group in groups for chart in group["charts"]]
    scripts, answers = [_plotly(), script] if charts else [], reports[0].get("answers")
    beside = compared(reports) if is_pair else (reports[0].get("scores", []), [answers] if answers else [])
    body = _template().render(
        models=reports, sides=_SIDES if is_pair else "", differences=differences, groups=groups, scores=beside[0],
        answers=beside[1], graphs=[_drawing(each["lineage"], place) for place, each in enumerate(reports)],
        data=script_json({"charts": charts}) if charts else "", scripts=scripts,
        **{name: _joined(reports, name) for name in ("facts", "recipe", "versions")},
    )  # fmt: skip
    allowed = " ".join(map(source_hash, scripts)) or "'none'"
    return html_page(
        title=html.escape(" and ".join(each["id"] for each in reports)), style=f"{css}\n{own}", body=body,
        policy=f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {allowed}",
    )  # fmt: skip


@cache
def _plotly() -> str:
    text = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return text.encode("ascii", "backslashreplace").decode()


@cache
def _template() -> "Template":
    from jinja2 import Environment

    found = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    found.filters |= {"clock": clock, "measure": title_of, "gib": gib, "number": short_number, "pictured": _pictured}
    found.filters["brief"] = partial(short_number, digits=3)
    return found.from_string(_HERE.with_name("model.html").read_text(encoding="utf-8"))


def short_number(value: float, digits: int = 4) -> str:
    """A number in a few digits, without an exponent if it is large."""
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _joined(reports: Sequence[Report], section: str) -> list[tuple[str, list[tuple[str, ...]], bool]]:
    """Name, cells of each model, and whether they differ, of a section whose rows are names and values."""
    rows = [cast("list[tuple[str, ...]]", report.get(section, [])) for report in reports]
    columns = [{name: tuple(cells) for name, *cells in each} for each in rows]
    found = {name: [column.get(name, ("",)) for column in columns] for column in columns for name in column}
    return [(name, cells, len({cell[0] for cell in cells}) > 1) for name, cells in found.items()]


def _merged(reports: Sequence[Report]) -> list[Curves]:
    """The charts of two models, each with the curves of both."""
    own = [report["curves"][0]["charts"] if "curves" in report else [] for report in reports]
    charts = [
        Chart(title=title, traces=[
            {**trace, "name": f"{side} {trace['name']}"}
            for side, each in zip(_SIDES, own, strict=True)
            for chart in each if chart["title"] == title for trace in chart["traces"]
        ])
        for title in dict.fromkeys(chart["title"] for each in own for chart in each)
    ]  # fmt: skip
    return [Curves(stage="", charts=charts)] if charts else []


def _drawing(graph: Mapping[str, object], place: int) -> str:
    """A lineage as an SVG drawing; markup."""
    edges = [
        Edge(parent=edge["from"], child=edge["to"], slot=edge["slot"])
        for edge in cast("list[dict[str, str]]", graph["edges"])
    ]
    nodes = {str(node["id"]): node for node in cast("list[Facts]", graph["nodes"])}
    svg = draw(nodes, edges, str(graph["root"]))
    width = float(svg.attrib["viewBox"].split()[2])
    svg.attrib |= {"id": f"lineage-{place}", "class": "lineage", "style": f"min-width: {0.55 * width:.0f}px"}
    for each in svg.iter("g"):
        each.attrib.pop("id", None)
        if each.attrib.pop("tabindex", None):
            each.set("role", "img")
    return ascii_tree(svg)
