"""``posttrain doctor`` and ``compat``."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flows.reports.wording import counted, on_screen
from lineage.errors import ConfigError
from lineage.secrets import redacted

if TYPE_CHECKING:
    from tasks.train.rule import Refusal


def run_doctor(options: argparse.Namespace) -> int:
    """0: fit to run, with or without warnings; 1: an error was found; 2: one in the configuration."""
    from flows.operate.doctor import diagnose

    findings = list(diagnose(options.overrides, options.config_dir))
    errors, warnings = ([each for each in findings if each.level == level] for level in ("error", "warn"))
    if options.json:
        print(redacted(json.dumps({"ok": not errors, "findings": [asdict(each) for each in findings]}, indent=2)))
    else:
        width = max(len(each.check) for each in findings)
        for each in findings:
            print(on_screen(f"{each.level:<5}  {each.check:<{width}}  {each.found}"))
            if each.remedy:
                print(on_screen(f"{'':<{7 + width}}  -> {each.remedy}"))
        print(f"{counted(len(errors), 'error')}, {counted(len(warnings), 'warning')}")
    if any(each.check == "configuration" for each in errors):
        return ConfigError.exit_code
    return 1 if errors else 0


def run_compat(options: argparse.Namespace) -> int:
    """0: printed, and every stage that the overrides declare works; 2: one of them does not."""
    from flows.reports.compat import compat_dict, compat_text, stages_dict, stages_text

    asked = bool(options.overrides or options.config_dir)
    found = _stage_refusals(options.overrides, options.config_dir) if asked else {}
    if options.json:
        print(json.dumps({**compat_dict(), **({"stages": stages_dict(found)} if asked else {})}, indent=2))
    else:
        print(stages_text(found) if asked else compat_text())
    return ConfigError.exit_code if any(found.values()) else 0


def _stage_refusals(overrides: Sequence[str], config_dir: Path | None) -> dict[str, "list[Refusal]"]:
    """Every training of the declared pipeline, with what refuses it.

    Raises:
        ConfigError: a package is missing, or something else is wrong with the pipeline.
    """
    from flows.declare.config import compose_tree, pipeline_of, stages_of
    from flows.planning.checks import check_kernels
    from flows.planning.model_checks import check_quantization, root_config
    from tasks.method import Training
    from tasks.train.compatibility import refusals
    from tasks.train.rule import Case

    tree = compose_tree(overrides, config_dir)
    stages = {name: each for name, each in stages_of(tree).items() if isinstance(each.method, Training)}
    cases = {}
    for name, stage in stages.items():
        assert isinstance(stage.method, Training)
        cases[name] = Case(method=stage.method, resources=stage.resources)
    found = {name: list(refusals(case)) for name, case in cases.items()}
    if any(found.values()):
        return found
    pipeline = pipeline_of(tree, overrides, config_dir)
    check_kernels(pipeline)  # packages
    found = {
        name: list(refusals(Case(method=case.method, resources=case.resources, config=root_config(pipeline, name))))
        for name, case in cases.items()
    }
    for name in cases if not any(found.values()) else ():
        check_quantization(name, pipeline, root_config(pipeline, name))
    return found
