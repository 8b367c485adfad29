"""``posttrain export``: a model in a form in which it leaves the store, and its card; or a stage for verl."""

import argparse
import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from flows.reports.wording import counted, relative
from flows.serving.model import Found, find_model
from lineage.artifact import MODELS, Kind
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.files import local_path
from lineage.fingerprint import short
from lineage.markup import markdown_table
from lineage.record.exports import Export, record_export
from lineage.record.metrics_file import is_of_machine
from lineage.secrets import first_line
from lineage.source.model_files import quantization_format, read_json
from lineage.source.source_checks import is_hub_id

if TYPE_CHECKING:
    from huggingface_hub import EvalResult
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from flows.reports.model import Facts, Report
    from tasks.model.merging import Golden

TARGETS = {
    "verl": "a stage of GRPO, RLOO or PPO, for verl: rows, settings, rewards",
    "merged": "a directory with whole weights in 16 bits, every adapter merged",
    "gguf": "one file for llama.cpp",
    "ollama": "a folder for ollama create: a GGUF file and its Modelfile",
    "hub": "a merged directory with a card, pushed to the Hugging Face Hub",
}
# Option -> the targets that read it.
_READ_BY = {
    "set": ("verl",), "ability": ("verl",), "dtype": ("merged", "hub"), "type": ("gguf", "ollama"),
    "repo": ("hub",), "private": ("hub",), "dry_run": ("hub",),
}  # fmt: skip
CARD = "README.md"
GGUF_TYPES = ("f16", "q8_0")
_OF_STORE = ("weights", "exactly")  # facts of an output, which an exported model may not share


def add_export(parser: argparse.ArgumentParser) -> None:
    what = "; ".join(f"{name}: {text}" for name, text in TARGETS.items())
    parser.add_argument("target", choices=list(TARGETS), help=what)
    parser.add_argument("ref", metavar="REF", help="a model, such as sft or alias:champion; of verl a stage")
    parser.add_argument("--out", type=local_path, metavar="PATH", help="where to write; default: exports/, verl/STAGE")
    parser.add_argument("--dtype", choices=["bf16", "fp16"], help="merged, hub: of the weights; default bf16")
    parser.add_argument("--type", metavar="TYPE", help="gguf, ollama: of the weights: f16 (default) or q8_0")
    parser.add_argument("--repo", metavar="OWNER/NAME", help="hub: the repository, which is created if need be")
    parser.add_argument("--private", action="store_true", help="hub: a new repository is private")
    parser.add_argument("--dry-run", action="store_true", help="hub: write the folder and its card, and push nothing")
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="verl: a setting of verl, which wins; repeat it"
    )
    parser.add_argument("--ability", help="verl: the column ability of the rows, such as math; default general")


def run_export(options: argparse.Namespace) -> int:
    for option, targets in _READ_BY.items():
        if getattr(options, option) and options.target not in targets:
            raise ConfigError(
                f"export {options.target}: --{option.replace('_', '-')} is for {' and '.join(targets)}; leave it out"
            )
    if options.type and options.type not in GGUF_TYPES:
        smaller = str(options.type).upper()
        raise ConfigError(
            f"export {options.target}: --type {options.type}: {' and '.join(GGUF_TYPES)} are written here; for "
            f"another, export gguf --type f16, then with llama.cpp: llama-quantize MODEL-f16.gguf MODEL.gguf {smaller}"
        )
    ref = options.ref
    if options.target == "verl":
        return _export_verl(ref, options)
    if options.target == "hub":
        _require_repository(options)
    is_file = options.target == "gguf"
    if is_file and options.out and options.out.suffix != ".gguf":
        raise ConfigError(f"--out {options.out}: a file whose name ends in .gguf is accepted; correct it")
    found = find_model(ref, options.overrides, options.config_dir)
    kind = options.type or "f16"
    default = f"{found.name}-{kind}.gguf" if is_file else f"{found.name}-{options.target}"
    out = (options.out or Path("exports") / default).absolute()
    if out.exists() and (is_file or not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out}: is there already; a new path is accepted; name another, or remove it")
    export = _export(found, out, options)
    if options.target == "hub" and not options.dry_run:
        export = _pushed(export, options.repo, private=options.private)
    if found.store and found.manifest:
        record_export(found.store, export)
    _show(export, found, options)
    return 0


def _show(export: Export, found: Found, options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps({**asdict(export), "recorded": found.store is not None}, indent=2))
        return
    golden = export.golden
    print(f"wrote {relative(export.place)} ({counted(len(export.files), 'file')})")
    print(
        f"golden texts: mean log-probability {golden['before']:.4f} before, {golden['after']:.4f} after; none moved by "
        f"more than {golden['difference']:.2g} nats"
    )
    if options.target == "ollama":
        text = Path(export.place, "Modelfile").read_text(encoding="utf-8")
        print("".join(f"note: {line[2:]}\n" for line in text.splitlines() if line.startswith("# ")), end="")
        print(f"next: ollama create {found.name} -f {relative(Path(export.place, 'Modelfile'))}")
    if options.target == "hub":
        print(f"pushed to {export.address}" if export.address else "nothing is pushed (--dry-run)")
    if not found.store:
        print(f"not recorded: {found.ref} is no artifact of a store")


def _export(found: Found, out: Path, options: argparse.Namespace) -> Export:
    """Writes one form into a draft, which takes its place when it is proven; a failure leaves nothing."""
    from lineage.filesystem.digest import DigestCache, digest_files, digest_of
    from lineage.store import Entry

    manifest = None
    if found.store:
        manifest = Entry(found.path.parent).require_intact(DigestCache(found.store / "digests.json"))
    loaded = Loaded.of(found)
    is_gguf = options.target in ("gguf", "ollama")
    kind, dtype = options.type or "f16", options.dtype or "bf16"
    write = loaded.gguf_writer(kind, with_modelfile=options.target == "ollama") if is_gguf else None
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.parent / f".{out.name}.draft"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        if write:
            golden = write(draft, out.name if options.target == "gguf" else "model.gguf")
        else:
            golden = loaded.write_merged(draft, dtype)
            if options.target == "hub":
                moved = f"{golden['difference']:.2g}"
                note = f"Rounding to 16 bits moved the mean log-probability of fixed texts by at most {moved} nats."
                card = model_card(_report(found), options.repo, note)
                (draft / CARD).write_text(card, encoding="utf-8")
        files = digest_files(draft)
        if options.target == "gguf":
            (draft / out.name).replace(out)
        else:
            if out.is_dir():
                out.rmdir()  # it is empty
            draft.replace(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return Export(
        form=options.target, stage=manifest.stage if manifest else found.name,
        fingerprint=manifest.fingerprint if manifest else "",
        digest=manifest.output_digest if manifest else digest_of(files), place=str(out), files=files,
        settings={"type": kind} if is_gguf else {"dtype": dtype}, golden=golden,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model in fp32 with its adapters merged, and golden texts."""

    found: Found
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    prompts: "Golden"

    @staticmethod
    def of(found: Found) -> "Loaded":
        """Loads a model (ConfigError: it was quantized before, and has no weights in 16 bits)."""
        from tasks.model.adapter_files import base_and_adapters
        from tasks.model.merging import golden_texts_for

        base, adapters = base_and_adapters(found.path)
        quantized = quantization_format(read_json(base, "config.json"))
        if quantized and not adapters:
            raise ConfigError(
                f"{found.ref}: is quantized ({quantized}), and rounding it again would make another model; a model in "
                "16 or 32 bits is accepted; export the model that it was quantized from"
            )
        model, tokenizer = found.load("fp32")
        return Loaded(found=found, model=model, tokenizer=tokenizer, prompts=golden_texts_for(model, [found.path]))

    def write_merged(self, directory: Path, dtype: str) -> dict[str, float]:
        """Writes whole weights, loads them again as a user would, and compares.

        Raises:
            PipelineError: another model is loaded, or the dtype moved a golden text by too much.
        """
        import torch

        from tasks.model.adapter_files import base_and_adapters
        from tasks.model.merging import ROUNDED, cast_weights, golden_summary, golden_values, require_same_values
        from tasks.model.remote_code import trusts
        from tasks.train.models.load import copy_tokenizer, repair_generation, require_output_loads, save_whole
        from tasks.train.models.quantization import torch_dtype

        path, model = self.found.path, self.model
        before = golden_values(model, self.prompts)
        repair_generation(model, self.found.input)
        cast_weights(model, torch_dtype(dtype))
        save_whole(model, base_and_adapters(path)[0], directory, own=True)
        copy_tokenizer(path, directory)
        require_output_loads(Kind.CHECKPOINT, model, directory, self.prompts, may_run=trusts(path))
        cast_weights(model, torch.float32)
        after = golden_values(model, self.prompts)
        other = "--dtype fp16 or export gguf" if dtype == "bf16" else "--dtype bf16"
        require_same_values(before, after, ROUNDED, f"rounding the weights to {dtype}", f"try {other}")
        return golden_summary(before, after)

    def gguf_writer(self, kind: str, *, with_modelfile: bool) -> Callable[[Path, str], dict[str, float]]:
        """Checks that the model can be written, and returns what writes it: into a folder, under a name.

        Raises:
            ConfigError: GGUF, or the template language of a Modelfile, has no place for something of it.
        """
        if importlib.util.find_spec("gguf") is None:
            raise ConfigError("export: the package gguf is not installed; run: pip install gguf==0.19.0")
        from flows.serving.ollama import modelfile
        from tasks.evaluate.answers import stop_tokens
        from tasks.model.gguf_file import GgufModel

        prepared = GgufModel.of(self.found.ref, self.model, self.tokenizer)
        for note in prepared.notes:
            print(f"note: {note}", file=sys.stderr)
        stops = self.tokenizer.convert_ids_to_tokens(sorted(stop_tokens(self.model, self.tokenizer)))
        text = modelfile(self.found.ref, self.tokenizer, self.model.generation_config, stops) if with_modelfile else ""

        def write(folder: Path, name: str) -> dict[str, float]:
            if text:
                (folder / "Modelfile").write_text(text, encoding="utf-8")
            return prepared.write(folder / name, self.found.name, kind, self.prompts)

        return write


def _report(found: Found) -> "Report | None":
    """What the store says of a model; None: it is no artifact of one."""
    from flows.reports.model import model_report
    from lineage.graph.index import Index
    from lineage.graph.places import node_key

    if not found.store or not found.manifest:
        return None
    with Index(found.store) as index:
        return model_report(node_key(found.manifest.stage, found.manifest.fingerprint), index)


def _require_repository(options: argparse.Namespace) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not options.repo:
        raise ConfigError("export hub: no repository is named; give one: --repo OWNER/NAME")
    try:
        validate_repo_id(options.repo)
        if "/" not in options.repo:
            raise HFValidationError("the owner is missing")
    except HFValidationError as error:
        raise ConfigError(f"--repo {options.repo}: {error}; OWNER/NAME is accepted; correct it") from error


def _pushed(export: Export, repository: str, *, private: bool) -> Export:
    """Pushes a folder as one commit (PipelineError: the hub refused it, or was not reached; the folder stays)."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=export.place, commit_message=f"Export {export.stage} by posttrain"
        )
    except Exception as error:  # the hub's errors and its HTTP library's have no common base
        cause = first_line(error)
        raise PipelineError(
            f"{repository}: the push failed ({cause}); the folder is written; log in with `hf auth login`, and push "
            f"it: hf upload {repository} {export.place}"
        ) from error
    return replace(export, address=f"https://huggingface.co/{repository}@{commit.oid}")


def _export_verl(name: str, options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.declare.pipeline import require_stage
    from flows.planning.plan import make_plan
    from flows.verl.export import COMMAND, NOTES, export_verl

    pipeline = load_pipeline(options.overrides, options.config_dir)
    require_stage(pipeline, name)
    out = options.out or Path("verl") / name
    found = export_verl(make_plan(pipeline), name, out, options.set or [], options.ability or "general")
    if options.json:
        values = {
            "folder": str(found.folder), "rows": found.num_rows, "config": found.config, "overrides": found.overrides,
            "not_exported": found.notes,
        }  # fmt: skip
        print(json.dumps(values, indent=2))
        return 0
    print(f"{relative(found.folder / COMMAND)} trains {name} by verl on {found.num_rows['train']} prompts")
    print(f"not carried over ({relative(found.folder / NOTES)}):")
    for note in found.notes:
        print(f"  {note}")
    return 0


# --- the card


def model_card(report: "Report | None", repository: str, note: str = "") -> str:
    """The README of a model's repository on the hub, with metadata that huggingface_hub reads back.

    Paths of this machine are left out.

    Args:
        report: None: the store does not know the model.
        note: a sentence after the program that loads it.

    Raises:
        PipelineError: the metadata cannot be read back.
    """
    from huggingface_hub import ModelCard, ModelCardData

    from flows.reports.model import snippet

    kind = report["kind"] if report else Kind.CHECKPOINT
    use = report.get("use") if report else None
    task = "text-generation" if kind == Kind.CHECKPOINT else "text-classification"
    if use and use["auto"] == "AutoModelForImageTextToText":
        task = "image-text-to-text"
    graph = report["lineage"] if report else {}
    nodes = cast("list[Facts]", graph.get("nodes", []))
    sources = [cast("Facts", node["source"]) for node in nodes if node.get("source")]
    of_hub = [each for each in sources if each["revision"] and is_hub_id(str(each["path"]))]
    results = _eval_results(report) if report else []
    data = ModelCardData(
        library_name="transformers", tags=["posttrain"],
        pipeline_tag=task,
        base_model=[str(each["path"]) for each in of_hub if each["kind"] in MODELS] or None,
        datasets=[str(each["path"]) for each in of_hub if each["kind"] not in MODELS] or None,
        model_name=repository.rpartition("/")[2] if results else None, eval_results=results or None,
    )  # fmt: skip
    lines = [f"# {repository.rpartition('/')[2]}", ""]
    lines += [report["about"], ""] if report else []
    if use or kind == Kind.CHECKPOINT:
        lines += ["## Use", "", "```python", snippet(repository, use), "```", ""]
        known = [pair for pair in (use["facts"] if use else []) if pair[0] not in _OF_STORE]
        lines += [*(f"- {name}: {text}" for name, text in known), ""] if known else []
    lines += [note, ""] if note else []
    lines += list(_card_sections(report, nodes)) if report else []
    text = f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(lines).rstrip() + "\n"
    if ModelCard(text).data.to_dict() != data.to_dict():
        raise PipelineError(f"{repository}: the card's metadata is not read back as it was written; report it")
    return text


def _card_sections(report: "Report", nodes: "Sequence[Facts]") -> Iterator[str]:
    for each in (found for found in report.get("scores", []) if found["rows"]):
        yield from (f"## Scores: {each['stage']}", "", "In brackets: 95 % intervals by the bootstrap over rows.", "")
        rows = [[row["metric"], *map(_card_cell, row["values"])] for row in each["rows"]]
        yield from (markdown_table(("metric", *each["policies"]), rows), "")
    for verdict in report.get("verdicts", []):
        yield from (f"Verdict of its gate: {verdict['result']}.", "")
    yield from ("## Made from", "")
    made = ("artifact", "method", "revision or fingerprint", "rows", "labels")
    yield from (markdown_table(made, list(map(_card_row, nodes))), "")
    yield from ("## Recipe", "", markdown_table(("field", "value"), [row[:2] for row in report.get("recipe", [])]), "")
    root = next(node for node in nodes if node["id"] == report["id"])
    metrics = cast("Mapping[str, float]", root["metrics"])
    measured = [(name, f"{value:.6g}") for name, value in metrics.items() if not is_of_machine(name)]
    yield from (("## Measured in training", "", markdown_table(("metric", "value"), measured), "") if measured else ())
    yield f"Fingerprint `{short(str(root['fingerprint']))}`, digest of its files `{short(str(root['output_digest']))}`."


def _card_cell(cell: "Facts | None") -> str:
    from flows.reports.model import short_number

    if cell is None:
        return ""
    value, *bounds = (short_number(cast("float", cell[name])) for name in ("value", "low", "high") if name in cell)
    return f"{value} [{', '.join(bounds)}]" if bounds else value


def _card_row(node: "Facts") -> tuple[str, ...]:
    """A line of an ancestor; of a file its name alone."""
    source = cast("Facts", node.get("source") or {})
    path, revision = str(source.get("path", "")), source.get("revision")
    recipe = cast("Facts", node.get("recipe") or {})
    rows, metrics = node.get("rows"), cast("Mapping[str, float]", node.get("metrics") or {})
    count = rows if isinstance(rows, int) else metrics.get("rows")
    return (
        f"{node['name']} {path if revision else Path(path).name}".strip(), str(recipe.get("method", "")),
        str(revision or short(str(node["fingerprint"]))), f"{count:,.0f}" if count is not None else "",
        ", ".join(cast("list[str]", node["labels"])),
    )  # fmt: skip


def _eval_results(report: "Report") -> "list[EvalResult]":
    """The scores of the model as the hub's metadata has them."""
    from huggingface_hub import EvalResult

    task = "text-generation" if report["kind"] == Kind.CHECKPOINT else "text-classification"

    def rows_of(metric: str, stage: str) -> str:
        return metric.split("/")[1] if metric.startswith("lm_eval/") else f"held-out rows ({stage})"

    return [
        EvalResult(  # huggingface_hub merges results with the same config, whatever their names are
            task_type=task, dataset_type="posttrain", dataset_name=rows, dataset_config=rows,
            metric_type=row["metric"], metric_name=row["metric"], metric_value=cell["value"],
        )
        for each in report.get("scores", []) for row in each["rows"] if (cell := row["values"][-1])
        for rows in [rows_of(row["metric"], each["stage"])]
    ]  # fmt: skip
