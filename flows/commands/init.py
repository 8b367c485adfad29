"""``posttrain init``: a project of a user's own: settings that are likely to change, data looked at, a recipe."""

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from flows.commands.advise import LENGTHS, MACHINE, PIPELINE, Advised, Recipe, advised_recipes, text_of
from flows.commands.arguments import write_output
from flows.commands.data import OF_SOURCES, OF_STAGES, as_text, examined
from flows.declare.config import Composer
from flows.declare.pipeline import listed
from flows.declare.project import PROJECT, data_sources
from flows.declare.store_root import CONFIG
from flows.reports.wording import on_screen, relative
from lineage.artifact import SOURCE, Kind
from lineage.errors import ConfigError, DataError, PipelineError
from lineage.filesystem.files import local_path
from lineage.source.source_checks import is_hub_id
from lineage.source.sources import local_paths
from tasks.data.formats.proposals import JOBS
from tasks.data.preparing.report import REJECTS, few_alike, sections

_PIPELINES = sorted(path.stem for path in (CONFIG.parent / "pipeline").glob("*.yaml"))
_QLORA, _MICRO = "one-gpu-qlora", "resources.micro_batch_size"
_CARDS = {
    "num_workers": "8",
    "gpus_per_worker": "1",
    "cpus_per_worker": "4",
    "launcher": "cluster",
    "micro_batch_size": "auto",
}
# Name -> what it sets, beside the pipelines: pipeline, model, and how it is trained.
RECIPES: Mapping[str, Mapping[str, str]] = {
    "qlora": {"pipeline": "sft", "preset": _QLORA},
    "smollm2-sft": {"pipeline": "sft", "model": "HuggingFaceTB/SmolLM2-135M-Instruct", "preset": "medium"},
    "llama-8b": {
        "pipeline": "sft", "model": "meta-llama/Llama-3.1-8B-Instruct", "preset": "large", "precision": "bf16",
        **{f"resources.{name}": value for name, value in _CARDS.items()}, "resources.sharding": "zero2",
        "resources.gradient_checkpointing": '"on"',
    },
    "llama-70b-lora": {
        "pipeline": "sft", "model": "meta-llama/Llama-3.1-70B-Instruct", "preset": "one-gpu-qlora", "save": "adapter",
        **{f"resources.{name}": value for name, value in _CARDS.items()},
    },
    "grpo-summaries": {
        "pipeline": "grpo", "model": "HuggingFaceTB/SmolLM-135M-Instruct", "data": "mlabonne/smoltldr",
        "adapter": "lora",
        "stages.grpo.method.rewards.answer": "{function: length, target_tokens: 50}",
        "stages.grpo.method.max_completion_length": "96", "stages.grpo.method.learning_rate": "2.0e-5",
        "stages.grpo.method.global_batch_size": "16",
    },
}  # fmt: skip
_TOY = (
    "model tiny: a toy made from scratch on Python's documentation, which knows nothing else; for real answers "
    "--model smollm2 (SmolLM2-135M-Instruct, a download of 98 MB)"
)
_IGNORED = "artifacts/\nexports/\nmlflow.db*\nmlruns/\n__pycache__/\n"


@dataclass(frozen=True, kw_only=True)
class _Looked:
    """A data file of the user's.

    Args:
        path: as the project names it.
        name: of the source that it shall be; empty: by its kind.
        kind: None: unknown, as of a hub data set.
        lines: what was found.
        overrides: of ``posttrain data``, by which it is read: those given, and ``guessed``.
        guessed: those of columns with other names than a format has.
    """

    path: str
    name: str
    kind: Kind | None
    lines: Sequence[str] = ()
    overrides: Sequence[str] = ()
    guessed: Sequence[str] = ()

    def guesses(self, key: str) -> bool:
        """Whether a key of the project is a guess."""
        return any(key.endswith(f".{word.partition('=')[0]}") for word in self.guessed)


def add_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=local_path, metavar="DIR", help="of the project; it is made if it does not exist")
    names = ", ".join([*RECIPES, *_PIPELINES])
    parser.add_argument("--from", dest="start", metavar="NAME", help=f"default: by the data; one of {names}")
    parser.add_argument(
        "--adapter",
        choices=["lora", "qlora"],
        help="train an adapter, with the values for it; default: lora for few rows, or none",
    )
    parser.add_argument(
        "--model", metavar="M", help="a directory, a hub id, smollm2, qwen2.5-0.5b, or tiny (the default, a toy)"
    )
    parser.add_argument(
        "--data",
        action="extend",
        nargs="+",
        default=[],
        metavar="FILE",
        help="rows; of a pipeline with several sources also NAME=FILE; and how they are read, such as max_bad_rows=1",
    )


def run_init(options: argparse.Namespace) -> int:
    folder: Path = options.dir
    if (folder / PROJECT).exists():
        raise ConfigError(f"{folder / PROJECT}: is there already; edit it, or give init another folder")
    if options.start and options.start not in (*RECIPES, *_PIPELINES):
        raise ConfigError(
            f"--from {options.start}: no such start; there are: {listed(options.start, [*RECIPES, *_PIPELINES])}"
        )
    overrides = [word for word in options.data if _is_override(word)]
    files = [word for word in options.data if word not in overrides]
    looked = [_look(name, path, overrides, folder, options.start) for name, path in map(_named, files)]
    settings = _settings(options.start, options.model and _from(options.model, folder), looked)
    settings |= {"adapter": options.adapter} if options.adapter else {}
    settings |= {"resources": "gpu"} if _gpus() and not _has_place(settings) else {}
    with _inside(folder):
        settings |= _data(settings, looked)
        lengths = _lengths(settings)
        settings |= lengths
        _require_model(settings)
        recipes, why = _recipes(settings)
        if any(each.short for each in recipes) and "adapter" not in settings and "preset" not in settings:
            settings["adapter"] = "lora"  # with few rows
            recipes, why = _recipes(settings)
        _write(folder.name or "project", settings, lengths, looked, recipes, why)
        tracked = _track()
    guesses = [
        f"{each.path} is read with {' '.join(each.guessed)}, a guess by the names of its columns, which {PROJECT} has; "
        "check the columns above, and change it there"
        for each in looked if each.guessed
    ]  # fmt: skip
    toy = [_TOY] if settings["model"] == "tiny" else []
    wants_gpu = settings.get("preset") == _QLORA and "resources.launcher" not in settings and not _gpus()
    toy += [f"{_QLORA} needs a GPU, and this machine shows none: here posttrain run refuses it"] if wants_gpu else []
    for line in [*guesses, *toy, *filter(None, (each.short for each in recipes)), *([why] if why else [])]:
        print(on_screen(f"note: {line}"))
    made = f"{relative(folder / PROJECT)}: pipeline {settings['pipeline']}, model {settings['model']}{tracked}"
    print(on_screen(made))
    there = "" if folder.samefile(".") else f"cd {shlex.quote(str(folder))} && "
    print(f"next: {there}posttrain plan, then posttrain run")
    return 0


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Works in the folder, which is made; where the input is refused, an empty one does not stay."""
    is_new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be made ({error.strerror}); name another folder") from error
    try:
        with contextlib.chdir(folder):
            yield
    except PipelineError:
        if is_new:
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
        raise


def _is_override(word: str) -> bool:
    """Whether a word says how rows are read: ``max_bad_rows=1``, ``columns.prompt=question``."""
    key, is_set, _ = word.partition("=")
    return bool(is_set) and key.partition(".")[0] in {*OF_SOURCES, *OF_STAGES} and not local_paths(word)


def _named(word: str) -> tuple[str, str]:
    """The name and the path of ``NAME=FILE``; of a file an empty name."""
    name, is_named, path = word.partition("=")
    return (name, path) if is_named and name.isidentifier() and not local_paths(word) else ("", word)


def _from(path: str, folder: Path) -> str:
    """A path of this machine as the project's folder sees it."""
    is_relative = local_paths(path) and not os.path.isabs(os.path.expanduser(path))
    return os.path.relpath(path, folder) if is_relative else path


def _look(name: str, path: str, overrides: Sequence[str], folder: Path, start: str | None) -> _Looked:
    """Reads rows as a data stage would, and prints what is found; rows of the hub are read by the run alone."""
    if not local_paths(path):
        if "/" not in path and ":" not in path:
            raise ConfigError(f"--data {path}: no such file; a file, a folder, a glob, a URL or a hub id is accepted")
        return _Looked(path=path, name=name, kind=None, overrides=overrides)
    with TemporaryDirectory(prefix="posttrain-init-") as directory:
        found, guesses = examined([path, *overrides, *_wanted(name, start)], Path(directory))
        added = [word for guess in guesses.values() for word in guess.overrides]
        overrides = [*overrides, *added]
        rows, total = found.bad_rows()
        found.report.rejects = None  # they are not kept
        refused = "\n".join(map(str, found.refusals))  # which follows
        others = [row for row in few_alike(rows) if row not in refused]
        print("\n\n".join(map(as_text, sections(found.report, None, others, total))))
        kept = f"all of them are in {found.output / REJECTS}"
        refusals = [
            str(each).replace(kept, f"posttrain data {shlex.join([path, *overrides])} --out DIR keeps all of them")
            for each in found.refusals
        ]
        if refusals:
            settings = [
                each for each in ("max_bad_rows=1", "held_out=0.2") if each.partition("=")[0] in " ".join(refusals)
            ]
            more = f"\nsuch a setting is written after the file: --data FILE {' '.join(settings)}" if settings else ""
            raise DataError("\n".join(refusals) + more)
    counts = ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in found.report.counts.items() if value)
    (source,) = found.report.sources.values()
    columns = ", ".join(source.mapping)
    return _Looked(
        path=_from(path, folder), name=name, kind=found.kind,
        lines=[f"{path}: {source.format} ({columns}), {counts}"],
        overrides=overrides, guessed=added,
    )  # fmt: skip


def _settings(start: str | None, model: str | None, looked: Sequence[_Looked]) -> dict[str, str]:
    kinds = {each.kind for each in looked if each.kind}
    if start is None:
        is_both = kinds == {Kind.CONVERSATIONS, Kind.PREFERENCES}
        start = "sft-dpo" if is_both else JOBS[next(iter(kinds))] if len(kinds) == 1 else "sft"
    found = dict(RECIPES.get(start, {"pipeline": start}))
    return {"pipeline": found["pipeline"], "model": model or found.get("model", "tiny"), **{
        name: value for name, value in found.items() if name not in ("pipeline", "model")
    }}  # fmt: skip


def _tree(pipeline: str) -> Mapping[str, object]:
    return Composer([f"pipeline={pipeline}", "model=unset"]).declared()


def _wanted(name: str, start: str | None) -> list[str]:
    """``kind=prompts`` where prompts are made of the rows: their answers are columns for reward functions."""
    tree = _tree(RECIPES.get(start, {"pipeline": start})["pipeline"]) if start else {}
    kinds = _kinds(tree, data_sources(tree)) if tree else {}
    found = {kinds.get(name)} if name else {*kinds.values()}
    return [f"kind={Kind.PROMPTS}"] if found == {Kind.PROMPTS} else []


def _data(settings: Mapping[str, str], looked: Sequence[_Looked]) -> dict[str, str]:
    """The keys of the data: by their names, by the kind that a source is prepared as, or the only one.

    Several files of one source are a source each, and slots of the stages that read it.

    Raises:
        ConfigError: the pipeline reads no such source, or several.
    """
    if not looked:
        return {}
    tree = _tree(settings["pipeline"])
    names = data_sources(tree)
    places, chosen = _kinds(tree, names), dict[str, list[_Looked]]()
    for each in looked:
        fitting = [place for place in names if (place == each.name if each.name else places.get(place) == each.kind)]
        if len(names) == 1 and not each.name and (each.kind is None or names[0] not in places):
            fitting = names
        if len(fitting) != 1 or (each.kind and places.get(fitting[0], each.kind) != each.kind):
            raise _no_place(each, settings["pipeline"], places, names)
        chosen.setdefault(fitting[0], []).append(each)
    found = dict[str, str]()
    for name, (first, *others) in chosen.items():
        is_only = len(names) == 1 and not others
        found |= {"data" if is_only else f"data.{name}": first.path, **_columns(tree, name, first, len(others) + 1)}
        for number, each in enumerate(others, 2):
            added = f"{name}_{number}"
            found |= {f"sources.{added}.path": each.path, **_columns(tree, name, each, len(others) + 1, added)}
            found |= {f"stages.{stage}.inputs.rows_{number}": f"{SOURCE}{added}" for stage in _reading(tree, name)}
    return found


def _no_place(each: _Looked, pipeline: str, places: Mapping[str, Kind], names: Sequence[str]) -> ConfigError:
    """The error for a file that no source of the pipeline takes, or several."""
    kinds = {name: f"{name} ({places[name]})" if places.get(name, name) != name else name for name in names}
    accepted = ", ".join(kinds.values()) or "no rows"
    fitting = [name for name in names if each.kind is None or places.get(name, each.kind) == each.kind]
    if each.name and each.name not in names:
        found = f"--data {each.name}={each.path}: pipeline {pipeline} has no such source; it reads {accepted}"
    else:
        these = f"these are {each.kind}; " if each.kind else ""
        found = f"--data {each.path}: {these}pipeline {pipeline} reads {accepted}"
    if fitting:
        return ConfigError(f"{found}; say which, as --data {fitting[0]}={each.path}, or choose another with --from")
    job = f"leave --from out (pipeline {JOBS[each.kind]} reads them)" if each.kind else "choose another --from"
    return ConfigError(f"{found}; {job}, or give rows that it reads")


def _columns(
    tree: Mapping[str, object], name: str, looked: _Looked, num_files: int, added: str | None = None
) -> dict[str, str]:
    """The keys by which a source is read, and those of the data stages that read it.

    Args:
        num_files: of the stage, which has one template of prompts for all; where one is a guess, the run guesses it.
        added: name of the source, where ``name`` has another file already.
    """
    is_template = num_files > 1 and any(word.startswith("prompt_template=") for word in looked.guessed)
    found, left_out = dict[str, str](), looked.guessed if is_template else ()
    for key, value in (word.split("=", 1) for word in looked.overrides if word not in left_out):
        quoted = value if re.fullmatch(r"[\w./-]+", value) else "'" + value.replace("'", "''") + "'"
        if key.partition(".")[0] in OF_SOURCES:
            found[f"sources.{added or name}.{key}"] = quoted
        else:
            found |= {f"stages.{stage}.method.{key}": quoted for stage in _reading(tree, name)}
    return found


def _reading(tree: Mapping[str, object], name: str) -> list[str]:
    """The stages that read a source."""
    stages = tree["stages"]
    assert isinstance(stages, dict)
    return [stage for stage, node in stages.items() if f"source:{name}" in node["inputs"].values()]


def _kinds(tree: Mapping[str, object], names: Sequence[str]) -> dict[str, Kind]:
    """Source -> what the stage that reads it prepares."""
    targets, stages = {f"Prepare{kind.capitalize()}": kind for kind in JOBS}, tree["stages"]
    assert isinstance(stages, dict)
    found: dict[str, Kind] = {}
    for name in names:
        for stage in _reading(tree, name):
            if kind := targets.get(str(stages[stage]["method"]["_target_"]).rpartition(".")[2]):
                found[name] = kind
    return found


def _lengths(settings: Mapping[str, str]) -> dict[str, str]:
    """The keys of each training whose rows could be longer than its model has positions."""
    from flows.declare.config import load_pipeline
    from flows.planning.checks import longer_rows

    try:
        pipeline = load_pipeline([f"{name}={value}" for name, value in settings.items()])
        longer = longer_rows(pipeline)
    except PipelineError:  # which ``_recipes`` says
        return {}
    found = {f"stages.{name}.method.max_length": str(most) for name, (_, most) in longer.items()}
    for name, (_, most) in longer.items():
        if (getattr(pipeline.stages[name].method, "max_completion_length", None) or 0) >= most:
            found[f"stages.{name}.method.max_completion_length"] = str(most // 2)
    return found


def _require_model(settings: Mapping[str, str]) -> None:
    """Refuses what is no model of this machine; one of the hub is read by the plan."""
    from flows.declare.config import load_pipeline
    from flows.planning.model_checks import require_model_files

    if is_hub_id(settings["model"]) and not local_paths(settings["model"]):
        return
    pipeline = load_pipeline([f"pipeline={settings['pipeline']}", f"model={settings['model']}"])
    for name, source in pipeline.sources.items():
        if source.kind == Kind.CHECKPOINT and (paths := local_paths(source.path)):
            require_model_files(name, source, paths[0])


def _recipes(settings: Mapping[str, str]) -> tuple[list[Recipe], str]:
    """What ``posttrain advise`` says for this data, model and machine; or why it says nothing."""
    try:
        return advised_recipes(None, [f"{name}={value}" for name, value in settings.items()], None)[0], ""
    except PipelineError as error:
        return [], str(error).partition("\n")[0]


def _write(
    name: str, settings: Mapping[str, str], lengths: Collection[str], looked: Sequence[_Looked],
    recipes: Sequence[Recipe], why: str,
) -> None:  # fmt: skip
    lines = [
        "# Settings of posttrain in this folder; a command line overrides them. posttrain plan shows what would run.",
        f"pipeline: {settings['pipeline']} # others: posttrain --help",
        f"model: {settings['model']} # a directory, a hub id, smollm2, qwen2.5-0.5b, or tiny, a toy",
        *(f"# {each.short}" for each in recipes if each.short),
        *(f"# {line}" for each in looked for text in each.lines for line in text.splitlines()),
        *(
            f"{key}: {value}{_comment(key, lengths, looked)}"
            for key, value in settings.items()
            if key not in ("pipeline", "model")
        ),
        *(
            []
            if looked or "data" in settings
            else ["# data: chats.jsonl # default: questions on Python's documentation"]
        ),
        *([] if _has_place(settings) else ["# resources: gpu # or cluster; default: the CPUs of this machine"]),
        *(
            []
            if "adapter" in settings or settings.get("preset") == _QLORA
            else ["# All weights are trained; init --adapter lora (or qlora) writes this with an adapter's values"]
        ),
    ]
    if recipes:
        lines += [
            "# By posttrain advise: value # default; range and why (source). The reference documents: docs/advice.md.",
            "# Lines that begin with # are the defaults, which follow the adapter and the machine.",
        ]
        lines += ["stages:"] if any(map(_changed, recipes)) else []
    for each in recipes:
        changed = _changed(each)
        lines.append(f"{'  ' if changed else '  # '}{each.stage}: # {each.rows}")
        for value in each.values:
            why_this, text = f"{value.reason} ({value.source})", f"{value.field}: {text_of(value.value)}"
            if value.field == "method.num_steps" and each.passes:
                why_this = each.passes
            if value in changed:
                now = "none" if value.now is None else text_of(value.now)
                lines.append(f"    {text} # default {now}; {why_this}")
            elif value.field in LENGTHS or (value.source not in (MACHINE, PIPELINE) and value.field != _MICRO):
                lines.append(f"    # {text} # {why_this}")
    if why:
        lines.append(f"# posttrain advise gives no recipe yet: {why}")
    write_output(Path(PROJECT), "\n".join(lines) + "\n")
    own = Path(".gitignore").read_text(encoding="utf-8") if Path(".gitignore").exists() else ""
    if missing := "".join(line for line in _IGNORED.splitlines(keepends=True) if line.strip() not in own.split()):
        write_output(Path(".gitignore"), f"{own}{'' if own[-1:] in ('', chr(10)) else chr(10)}{missing}")
    if not Path("README.md").exists():
        base = "base" if settings["model"] == "tiny" else f"{SOURCE}base"
        text = _README.format(name=name, model=recipes[-1].stage if recipes else "REF", base=base)
        write_output(Path("README.md"), text)


def _comment(key: str, lengths: Collection[str], looked: Iterable[_Looked]) -> str:
    if key == "adapter":
        return " # its values are below; with fewer than 1,000 rows all weights at a small rate change no answers"
    if key in lengths:
        return " # by the positions of the model"
    return " # a guess by the names of the columns" if any(each.guesses(key) for each in looked) else ""


def _changed(recipe: Recipe) -> list[Advised]:
    """What differs from the defaults, without what another machine decides otherwise."""
    left = [value for value in recipe.values if value.field != _MICRO and (value.source != MACHINE or _gpus())]
    return [value for value in left if value.now != value.value]


def _gpus() -> list[str]:
    from flows.stages.resources import visible_gpus

    return visible_gpus()


def _has_place(settings: Mapping[str, str]) -> bool:
    return settings.get("preset") == _QLORA or any(key.partition(".")[0] == "resources" for key in settings)


_README = f"""# {{name}}

`{PROJECT}` has the settings; its comments say where each value is from.

    posttrain plan          # what would run, and why
    posttrain run           # runs it; the same command resumes
    posttrain ui            # models, curves, logs and lineage in a browser
    posttrain chat {{model}}      # talk with the result; with the base beside it: posttrain chat {{base}} {{model}}
    posttrain report {{model}} --html {{model}}.html    # all about it on one page, to send to a friend
    posttrain lineage {{model}}   # what it was made from
"""


def _track() -> str:
    """Sets DVC up in this folder: its own files, and ``dvc.yaml``; returns what was done, for the message."""
    from flows.dvc_yaml import render
    from lineage.dvc import FILE

    if Path(".dvc").exists():
        return ""
    in_git = subprocess.run(["git", "rev-parse", "--git-dir"], capture_output=True, check=False).returncode == 0
    base = [sys.executable, "-P", "-m", "dvc"]
    calls = [
        [
            *base,
            "init",
            "--quiet",
            "--subdir" if in_git and not Path(".git").exists() else "--no-scm" if not in_git else "--force",
        ],
        [*base, "config", "cache.type", "reflink,hardlink,symlink,copy"],
        [*base, "config", "core.analytics", "false"],
    ]
    for call in calls:
        done = subprocess.run(
            call, capture_output=True, text=True, check=False, env={**os.environ, "DVC_NO_ANALYTICS": "1"}
        )
        if done.returncode:
            return f"; DVC is not set up: {done.stderr.strip().splitlines()[-1:]}"
    try:
        write_output(Path(FILE), render([], Path.cwd()), keeps=True)
    except PipelineError as error:
        return f"; no {FILE}: {str(error).partition(chr(10))[0]}"
    return f"; DVC tracks it by {FILE}, MLflow by mlflow.db"
