"""The pipeline as declared: only its runs move the view and commit to DVC; a clone adopts the view."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flows.declare.config import field_of, load_pipeline
from flows.declare.pipeline import Pipeline
from flows.declare.project import with_project
from flows.planning.plan import Plan, make_plan
from lineage.dvc import FILE, DvcProject, View
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.filesystem.files import local_path

# Overrides that change where and how a pipeline runs, but not its outputs.
_EXECUTION = ("resources", "tracking", "store", "code_drift", "advice")
# Overrides that say which pipeline this is, where no dvc.yaml and no project file does.
_DECLARES = ("pipeline", "model", "data", "sources")


def adopt_view(pipeline: Pipeline) -> None:
    """Links artifacts that DVC has restored to the view into the store; reports on stderr."""
    view = View(pipeline.store, pipeline.name)
    for stage in pipeline.stages:
        message = view.adopt(stage)
        if message:
            print(message, file=sys.stderr)


def show_declared(plan: Plan, cli_args: Sequence[str], stages: Sequence[str] | None = None) -> None:
    """After a run of the pipeline as declared: moves the view, and commits it to DVC.

    Failures are only reported: the artifacts are in the store.

    Args:
        cli_args: arguments of the command.
        stages: the stages that the command has completed; None: all.
    """
    names = [planned.name for planned in plan.stages] if stages is None else list(stages)
    view, project = View(plan.pipeline.store, plan.pipeline.name), DvcProject.at(Path.cwd())
    if not (_in_dvc() or _is_declared(plan, cli_args, names, project)):
        return
    entries = {name: plan.entry(plan.stage(name)) for name in names}
    try:
        view.show(entries)
        why_off = _why_off(plan, names, project)
        if why_off is None and not project.is_committed(view, names):
            project.commit(view, entries)
    except (OSError, ArtifactError) as error:
        print(f"dvc: nothing is committed: {error}", file=sys.stderr)
        return
    is_default = not any(field_of(word) == "pipeline" for word in cli_args)
    if why_off and (is_default or any(project.keeps(view, name) for name in names)):
        print(f"dvc: off: {why_off}", file=sys.stderr)


def split_cli_args(cli_args: Sequence[str]) -> tuple[list[str], Path | None]:
    """Splits the arguments of a command into overrides and ``--config-dir``.

    Raises:
        ConfigError: ``--config-dir`` has no value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", type=local_path)
    try:
        options, overrides = parser.parse_known_args(list(cli_args))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{shlex.join(cli_args)}: {error}") from error
    return overrides, options.config_dir


def _in_dvc() -> bool:
    """Whether ``dvc repro`` called us: its command is the declaration, and DVC commits."""
    return "DVC_STAGE" in os.environ


def _why_off(plan: Plan, names: Sequence[str], project: DvcProject) -> str | None:
    """Why DVC does not record this; None: it does; empty: for a reason that needs no message."""
    store = plan.pipeline.store
    if not plan.pipeline.tracking.dvc or _in_dvc() or project.root is None:
        return ""
    if not store.resolve().is_relative_to(project.root.resolve()):
        return f"the store {store} lies outside the repository {project.root}"
    view = View(store, plan.pipeline.name)
    unkept = [name for name in names if not project.keeps(view, name)]
    if unkept:
        return (
            f"{project.folder / FILE} does not keep {view.place(unkept[0]) / 'output'} as the stage {unkept[0]}; "
            "write it again: python -m flows.dvc_yaml"
        )
    return None


def _is_declared(plan: Plan, cli_args: Sequence[str], names: Sequence[str], project: DvcProject) -> bool:
    declaration = _declaration(plan, cli_args, project)
    if _identity(cli_args) == _identity(declaration):
        return True
    try:
        declared = load_pipeline(*split_cli_args(declaration))
        stages = make_plan(replace(declared, store=plan.pipeline.store, code_drift="warn", advice="off")).stages
    except PipelineError:  # there is no such pipeline without the overrides
        return False
    known = {planned.name: planned.fingerprint for planned in stages}
    is_whole = len(names) < len(plan.stages) or known.keys() == set(names)
    return is_whole and all(known.get(name) == plan.stage(name).fingerprint for name in names)


def _declaration(plan: Plan, cli_args: Sequence[str], project: DvcProject) -> list[str]:
    """The arguments in ``dvc.yaml`` for this pipeline; else its name and ``--config-dir``."""
    view = View(plan.pipeline.store, plan.pipeline.name)
    kept = [planned.name for planned in plan.stages if project.keeps(view, planned.name)]
    if kept:
        return with_project(project.overrides(kept[0]))
    overrides, config_dir = split_cli_args(cli_args)
    named = [word for word in overrides if field_of(word) == "pipeline"]
    chosen = with_project(named)
    if len(chosen) == len(named):  # no project file says more
        chosen = [word for word in overrides if field_of(word).partition(".")[0] in _DECLARES]
    return [*(["--config-dir", str(config_dir)] if config_dir else []), *chosen]


def _identity(cli_args: Sequence[str]) -> list[str]:
    return [word for word in cli_args if field_of(word).partition(".")[0] not in _EXECUTION]
