"""Renders ``prefect.yaml``: the pipelines as deployments of a work pool, for a team whose runs go to workers.

``python -m flows.deploy.prefect_yaml [--config-dir DIR] [OVERRIDE ...]`` writes it where it is called.
"""

import argparse
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from flows.commands.arguments import add_allow_code, add_overrides, words_of
from flows.deploy.pipelines import Declared, deployable
from flows.deploy.preset import VARIABLE, Preset
from flows.watch.schedule import schedule_entries
from lineage.errors import PipelineError

FILE = "prefect.yaml"
POOL = "posttrain"
ENTRY = "flows.deploy.entry"  # the module whose attributes are the flows

_HEAD = """\
# Written by `python -m flows.deploy.prefect_yaml{words}`. To use it:
#   prefect work-pool create {pool} --type process
#   {setting}prefect deploy --all
#   prefect worker start --pool {pool}
# On a worker that has not this folder, replace the pull step, by git_clone for example.
"""


def render(preset: Preset) -> str:
    """The file's text.

    Raises:
        ConfigError: there is nothing to deploy, or what all are given is wrong.
    """
    document = {
        "name": POOL,
        "pull": [{"prefect.deployments.steps.set_working_directory": {"directory": "{{ $PWD }}"}}],
        "deployments": [_deployment(each, preset) for each in deployable(preset)],
    }
    words = preset.environment.get(VARIABLE, "")
    setting = f"{VARIABLE}={shlex.quote(words)} " if words else ""
    head = _HEAD.format(words=f" {words}" if words else "", setting=setting, pool=POOL)
    return head + str(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


def _deployment(pipeline: Declared, preset: Preset) -> dict[str, object]:
    environment = {"job_variables": {"env": preset.environment}} if preset.environment else {}
    return {
        "name": "team",
        "entrypoint": f"{ENTRY}.{pipeline.option}",
        "version_type": "prefect:simple",  # the flow's own: the digest of the code
        "tags": pipeline.tags,
        "schedules": schedule_entries(pipeline.schedule),
        "work_pool": {"name": POOL, **environment},
    }


def main() -> int:
    """Writes the file."""
    parser = argparse.ArgumentParser(prog="python -m flows.deploy.prefect_yaml", description=__doc__)
    add_overrides(parser)
    add_allow_code(parser)
    options = parser.parse_intermixed_args()
    try:
        preset = replace(Preset.of(words_of(options)), allow_code=options.allow_code)
        Path(FILE).write_text(render(preset))
    except PipelineError as error:
        print(f"posttrain: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{Path(FILE).absolute()} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
