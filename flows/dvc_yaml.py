"""Renders ``dvc.yaml`` from a pipeline: ``python -m flows.dvc_yaml [OVERRIDES]`` writes it into this folder."""

import argparse
import glob
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path

import yaml

from flows.commands.arguments import add_overrides, recorded_cli_args, write_rendered
from flows.declare.config import composed_files, load_pipeline
from flows.declare.pipeline import Pipeline
from flows.declare.project import PROJECT, with_project
from flows.progress.declared import split_cli_args
from lineage.dvc import FILE, View, read_stages
from lineage.errors import ConfigError
from lineage.source.sources import local_parts, local_paths
from lineage.store import MANIFEST, METRICS, PLOTS
from tasks.method import Training

_CALL = "posttrain stage "
_STAGE_NAME = re.compile(r"[A-Za-z0-9_-]+")  # DVC's

# Key that sets a field in every stage -> the field.
_SHARED = {
    "adapter": "adapter", "quantization": "quantization", "optimizer": "optimizer", "lr_schedule": "schedule",
    "save": "save",
}  # fmt: skip

Rendered = dict[str, object]
Composed = Sequence[tuple[Path, str]]  # YAML files and the keys that they fill


def render(cli_args: Sequence[str], folder: Path) -> str:
    """The text of ``dvc.yaml`` in a folder, for the pipeline that these options and overrides declare.

    The user's own stages in an existing file are kept.

    Raises:
        ConfigError: the arguments are wrong, or DVC cannot track such a pipeline.
    """
    overrides, config_dir = split_cli_args(cli_args)
    overrides = with_project(overrides)
    pipeline = load_pipeline(overrides, config_dir)
    if _inside(pipeline.store, folder) is None:
        raise ConfigError(
            f"store={pipeline.store}: is outside {folder}, and DVC tracks only what is inside; move one of them"
        )
    files = composed_files(overrides, config_dir)
    projects = [*(word for word in cli_args if word.endswith((".yaml", ".yml"))), PROJECT]
    project: list[Rendered] = next(([{each: None}] for each in projects if (folder / each).is_file()), [])
    stages = {name: _stage(pipeline, name, cli_args, files, folder, project) for name in pipeline.order()}
    own = {name: stage for name, stage in read_stages(folder).items() if not str(stage.get("cmd")).startswith(_CALL)}
    clash = sorted(own.keys() & stages.keys())
    if clash:
        raise ConfigError(
            f"{folder / FILE}: has a stage {clash[0]} of its own; rename it, or move it to another folder"
        )
    call = shlex.join(["python", "-m", "flows.dvc_yaml", *cli_args])
    head = f"# Rendered from the configuration by `{call}`: change that, not this.\n"
    return head + str(yaml.safe_dump({"stages": {**stages, **own}}, sort_keys=False, width=1000))


def _stage(
    pipeline: Pipeline, name: str, cli_args: Sequence[str], files: Composed, folder: Path, project: Sequence[Rendered]
) -> Rendered:
    if not _STAGE_NAME.fullmatch(name):
        raise ConfigError(f"stages.{name}: DVC takes letters, digits, '-' and '_' in the name of a stage; rename it")
    view = View(pipeline.store, pipeline.name)

    def shown(stage: str, file: str) -> str:
        return os.path.relpath(view.place(stage) / file, folder)

    upstream = dict.fromkeys(pipeline.upstream(name))
    # With the manifest: other settings may give the same bytes, but another identity.
    deps = [shown(stage, file) for stage in upstream for file in ("output", MANIFEST)]
    stage: Rendered = {"cmd": _CALL + shlex.join([name, *cli_args])}
    stage["deps"] = [*_source_files(pipeline, name, folder), *deps]
    stage["params"] = [*project, *_parameters(_identity_keys(pipeline, name), files, folder)]
    stage["outs"] = [shown(name, "output"), shown(name, MANIFEST)]
    stage["metrics"] = [shown(name, METRICS)]
    method = pipeline.stages[name].method
    if isinstance(method, Training):
        stage["plots"] = [{shown(name, PLOTS): {"x": "step", "y": method.progress or "loss"}}]
    return {key: value for key, value in stage.items() if value}


def _sources(pipeline: Pipeline, name: str) -> list[str]:
    references = pipeline.stages[name].inputs.values()
    return [pipeline.key(each).partition(":")[2] for each in references if pipeline.is_source(each)]


def _source_files(pipeline: Pipeline, name: str, folder: Path) -> list[str]:
    """The user's data files in this folder that a stage reads; for a glob, the directory before it."""
    found = []
    for source in _sources(pipeline, name):
        configured = pipeline.sources[source]
        path = configured.path
        matches = local_paths(path)
        found += [_inside(place, folder) for place in local_parts(configured) if place not in matches]
        before = _inside(Path(*takewhile(lambda part: not glob.has_magic(part), Path(path).parts)), folder)
        is_wide = matches and glob.has_magic(path) and before not in (None, ".")
        found += [before] if is_wide else [_inside(place, folder) for place in matches]
    return [path for path in dict.fromkeys(found) if path]


def _inside(path: Path, folder: Path) -> str | None:
    """The path relative to a folder; None: it is outside."""
    absolute = Path(os.path.abspath(path))
    return absolute.relative_to(folder).as_posix() if absolute.is_relative_to(folder) else None


def _identity_keys(pipeline: Pipeline, name: str) -> list[str]:
    """Configuration keys that enter a stage's identity; resources do not."""
    method = pipeline.stages[name].method
    keys = [f"stages.{name}.method", f"stages.{name}.inputs"]
    keys += [f"sources.{source}" for source in _sources(pipeline, name)]
    taken = {field.name for field in fields(method)}
    return keys + [key for key, field in _SHARED.items() if field in taken]


def _parameters(keys: Sequence[str], files: Composed, folder: Path) -> Iterator[Rendered]:
    """DVC parameters: whole files that belong to one of the keys; for other files, the keys that they set."""
    for path, package in files:
        place = _inside(path, folder)
        if place is None or "site-packages" in path.parts:  # files of an installed posttrain change with its version
            continue
        if any(f"{package}.".startswith(f"{key}.") for key in keys):
            yield {place: None}
            continue
        within = f"{package}." if package else ""
        inner = [key.removeprefix(within) for key in keys if key.startswith(within)]
        configured = [key for key in inner if _value(path, key) is not None]
        if configured:
            yield {place: configured}


def _value(path: Path, key: str) -> object:
    node: object = yaml.safe_load(path.read_text())
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _ignore_in_git(store: Path, folder: Path) -> None:
    """Adds the store to ``.gitignore``, unless it is ignored, outside the folder, or there is no git."""
    place = _inside(store, folder)
    probe = ["git", "check-ignore", "--quiet", str(store / "x")]
    if place and subprocess.run(probe, cwd=folder, capture_output=True, check=False).returncode == 1:
        with (folder / ".gitignore").open("a") as file:
            file.write(f"/{place}/\n")
        print(f"{folder / '.gitignore'}: /{place}/ is added")


def main() -> int:
    """Writes the file, and keeps the store out of git."""
    parser = argparse.ArgumentParser(prog="python -m flows.dvc_yaml", description=__doc__)
    add_overrides(parser)
    folder = Path.cwd()

    def rendered(options: argparse.Namespace) -> str:
        text = render(recorded_cli_args(options), folder)
        _ignore_in_git(load_pipeline(with_project(options.overrides), options.config_dir).store, folder)
        return text

    return write_rendered(parser, folder / FILE, rendered)


if __name__ == "__main__":
    sys.exit(main())
