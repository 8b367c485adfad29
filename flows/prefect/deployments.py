"""Pipelines as Prefect deployments: which there are, how each is registered, and ``prefect.yaml`` for a team.

``python -m flows.prefect.deployments [--config-dir DIR] [OVERRIDE ...]`` writes that file where it is called.
"""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import yaml

from flows.commands.arguments import add_allow_code, add_overrides, recorded_cli_args, write_rendered
from flows.declare.config import CONF, field_of, load_pipeline
from flows.declare.pipeline import Pipeline, listed
from flows.progress.declared import split_cli_args
from lineage.errors import ConfigError, MissingValueError

FILE = "prefect.yaml"
POOL = "posttrain"
ENTRY = "posttrain.entry"  # the module whose attributes are the flows
VARIABLE = "POSTTRAIN_WORDS"  # passes the arguments of `serve` to a process that Prefect starts
_ALLOW_CODE = "--allow-code"
# Parts of an override that can run code or hide it: an interpolation joins words, a dash begins an option.
_CODE = ("_target_", "allow_code", "python:", "${")
ANCHOR = datetime(2020, 1, 1, tzinfo=UTC)  # intervals are counted from here

_HEAD = """\
# Written by `python -m flows.prefect.deployments{cli_args}`. To use it:
#   prefect work-pool create {pool} --type process
#   {setting}prefect deploy --all
#   prefect worker start --pool {pool}
# On a worker that has not this folder, replace the pull step, by git_clone for example.
"""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The arguments of ``posttrain serve``, which every run of a deployment has before its own overrides.

    Args:
        config_dir: the directory of the user's groups.
        pipeline: the only one that is deployed; None: all.
        allow_code: whether the overrides of a run may name code to run.
    """

    config_dir: Path | None = None
    overrides: tuple[str, ...] = ()
    pipeline: str | None = None
    allow_code: bool = False

    @staticmethod
    def of(cli_args: Sequence[str]) -> "Preset":
        """From the arguments of a command; ``pipeline=NAME`` among them chooses."""
        overrides, config_dir = split_cli_args(cli_args)
        chosen = [word.partition("=")[2] for word in overrides if field_of(word) == "pipeline"]
        rest = tuple(word for word in overrides if field_of(word) != "pipeline" and word != _ALLOW_CODE)
        return Preset(
            config_dir=config_dir, overrides=rest, pipeline=chosen[-1] if chosen else None,
            allow_code=_ALLOW_CODE in overrides,
        )  # fmt: skip

    @staticmethod
    def of_environment() -> "Preset":
        return Preset.of(shlex.split(os.environ.get(VARIABLE, "")))

    @property
    def environment(self) -> dict[str, str]:
        """The variable for the processes of runs; empty where nothing is set."""
        chosen = [f"pipeline={self.pipeline}"] if self.pipeline else []
        cli_args = [*self._groups(), *([_ALLOW_CODE] if self.allow_code else []), *chosen, *self.overrides]
        return {VARIABLE: shlex.join(cli_args)} if cli_args else {}

    def cli_args(self, option: str, overrides: Sequence[str] = ()) -> list[str]:
        """The arguments of one run of a pipeline; the run's own overrides win.

        Raises:
            ConfigError: the run's overrides name code, and may not.
        """
        for word in () if self.allow_code else overrides:
            plain = word.replace("\\", "")  # a backslash is Hydra's escape, and could hide a part
            found = "-" if word.startswith("-") else next((name for name in _CODE if name in plain), None)
            if found:
                raise ConfigError(
                    f"{word}: an override of a deployed run may not have {found}, since a user who starts runs could "
                    "run any code with it; write it into the pipeline's YAML, or start `posttrain serve --allow-code`"
                )
        own = {field_of(word) for word in overrides}
        kept = [word for word in self.overrides if field_of(word) not in own]
        return [*self._groups(), f"pipeline={option}", *kept, *overrides]

    def files(self) -> dict[str, Path]:
        """Name -> file of each pipeline to deploy, shipped and the user's.

        Raises:
            ConfigError: there is no such folder of groups.
        """
        if self.config_dir and not self.config_dir.is_dir():
            raise ConfigError(f"--config-dir {self.config_dir}: no such directory")
        folders = [CONF, *([self.config_dir] if self.config_dir else [])]
        found = {path.stem: path for folder in folders for path in sorted((folder / "pipeline").glob("*.yaml"))}
        return {name: path for name, path in found.items() if self.pipeline in (None, name)}

    def _groups(self) -> list[str]:
        return ["--config-dir", str(self.config_dir)] if self.config_dir else []


@dataclass(frozen=True, kw_only=True)
class Declared:
    """A pipeline that can be deployed.

    Args:
        option: of the group ``pipeline/``: the name of its file.
        name: of the flow.
        pipeline: None where it needs further overrides; then ``problem`` says why.
        lacks_value: whether the problem is only a value that is not set.
    """

    option: str
    name: str
    pipeline: Pipeline | None
    problem: str = ""
    lacks_value: bool = False

    @property
    def tags(self) -> list[str]:
        return [*(self.pipeline.operation.tags if self.pipeline else ()), f"pipeline:{self.name}"]

    @property
    def schedules(self) -> list[dict[str, object]]:
        """As ``schedules:`` in ``prefect.yaml``; an empty list removes the schedule of an earlier registration."""
        schedule = self.pipeline.operation.schedule if self.pipeline else None
        if schedule is None:
            return []
        when: dict[str, object] = {"interval": schedule.interval, "anchor_date": ANCHOR.isoformat()}
        if schedule.cron is not None:
            when = {"cron": schedule.cron}
        return [{**when, "timezone": schedule.timezone or "UTC", "active": not schedule.paused}]

    @property
    def triggers(self) -> list[dict[str, object]]:
        """As ``triggers:`` there: an automation of Prefect for the events; those within ``settle`` start one run."""
        trigger = self.pipeline.operation.trigger if self.pipeline else None
        if trigger is None or not trigger.events:
            return []
        event = {"type": "event", "posture": "Reactive", "expect": list(trigger.events), "threshold": 1}
        settle = trigger.settle
        return [{**event, "name": f"trigger of {self.name}", "within": settle, "schedule_after": settle}]


def declared_pipelines(preset: Preset) -> Iterator[Declared | str]:
    """Every pipeline, by its file; for one that cannot be deployed, a line with the reason."""
    names: dict[str, Path] = {}
    for option, path in preset.files().items():
        try:
            found = declared(option, preset)
        except ConfigError as error:
            yield f"{path}: {error}"
            continue
        first = names.setdefault(found.name, path)
        clash = f"{path}: {found.name} is also the name of {first}; give it a name of its own"
        yield found if first == path else clash


def deployable(preset: Preset) -> list[Declared]:
    """The pipelines that can be deployed; reports the others on stderr.

    Raises:
        ConfigError: there is none, or the preset is wrong for all.
    """
    pipelines = []
    for found in declared_pipelines(preset):
        if isinstance(found, Declared):
            pipelines.append(found)
        else:
            print(f"posttrain: left out: {found}", file=sys.stderr)
    if not pipelines:
        there = listed(preset.pipeline or "", replace(preset, pipeline=None).files())
        raise ConfigError(f"there is no pipeline {preset.pipeline or 'to deploy'}; there are: {there}")
    if not any(each.lacks_value or each.pipeline for each in pipelines):
        raise ConfigError("; ".join(dict.fromkeys(str(each.problem) for each in pipelines)))
    return pipelines


def declared(option: str, preset: Preset) -> Declared:
    """One pipeline (ConfigError: not even its name is known)."""
    if "." in option:  # Prefect finds its flow by an attribute of this name
        raise ConfigError("the name of a pipeline that is deployed has no dot; rename the file")
    try:
        pipeline = load_pipeline(*split_cli_args(preset.cli_args(option)))
    except ConfigError as error:
        name = _name_in(preset.files()[option], error)
        lacks_value = isinstance(error, MissingValueError)
        return Declared(option=option, name=name, pipeline=None, problem=str(error), lacks_value=lacks_value)
    return Declared(option=option, name=pipeline.name, pipeline=pipeline)


def _name_in(path: Path, problem: ConfigError) -> str:
    """The name in the file of a pipeline that cannot be composed."""
    try:
        node = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        raise problem from None
    name = node.get("name") if isinstance(node, dict) else None
    if not isinstance(name, str) or "${" in name:
        raise problem
    return name


def render(preset: Preset) -> str:
    """The text of ``prefect.yaml`` (ConfigError: there is nothing to deploy, or the preset is wrong for all)."""
    deployments = [
        {
            "name": "team",
            "entrypoint": f"{ENTRY}.{each.option}",
            "version_type": "prefect:simple",  # the flow's own: the digest of the code
            "tags": each.tags,
            "schedules": each.schedules,
            **({"triggers": each.triggers} if each.triggers else {}),
            # A new object for each: YAML would write a shared one as an alias.
            "work_pool": {
                "name": POOL,
                **({"job_variables": {"env": preset.environment}} if preset.environment else {}),
            },
        }
        for each in deployable(preset)
    ]
    pull = [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $PWD }}"}}]
    cli_args = preset.environment.get(VARIABLE, "")
    setting = f"{VARIABLE}={shlex.quote(cli_args)} " if cli_args else ""
    head = _HEAD.format(cli_args=f" {cli_args}" if cli_args else "", setting=setting, pool=POOL)
    document = {"name": POOL, "pull": pull, "deployments": deployments}
    return head + str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def main() -> int:
    """Writes ``prefect.yaml``."""
    parser = argparse.ArgumentParser(prog="python -m flows.prefect.deployments", description=__doc__)
    add_overrides(parser)
    add_allow_code(parser)

    def rendered(options: argparse.Namespace) -> str:
        return render(replace(Preset.of(recorded_cli_args(options)), allow_code=options.allow_code))

    return write_rendered(parser, Path.cwd() / FILE, rendered)


if __name__ == "__main__":
    sys.exit(main())
