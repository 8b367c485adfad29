"""``posttrain doctor``."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict

from flows.commands.arguments import add_json, add_overrides
from flows.doctor.facts import Facts, Finding
from flows.doctor.machine import check_gpus, check_open_files, check_shared_memory, check_store, check_tmp
from flows.doctor.packages import check_floors, check_known_bad, check_lock, check_python, check_requirements
from flows.doctor.services import (
    check_configuration,
    check_credentials,
    check_exposed,
    check_mlflow,
    check_prefect,
    check_ray,
)
from flows.wording import counted, printable_text
from lineage.errors import ConfigError
from lineage.secrets import redacted

CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_python,
    check_requirements,
    check_lock,
    check_known_bad,
    check_floors,
    check_store,
    check_tmp,
    check_shared_memory,
    check_open_files,
    check_gpus,
    check_exposed,
    check_prefect,
    check_mlflow,
    check_ray,
    check_configuration,
    check_credentials,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """0: fit to run, with or without warnings; 1: an error was found; 2: one in the configuration."""
    from flows.doctor.gather import gather

    facts = gather(options.overrides, options.config_dir)
    findings = [finding for check in CHECKS for finding in check(facts)]
    fit = all(finding.level != "error" for finding in findings)
    if options.json:
        print(redacted(json.dumps({"ok": fit, "findings": [asdict(each) for each in findings]}, indent=2)))
    else:
        print(printable_text(_text(findings)))
    if facts.configuration.refusal:
        return ConfigError.exit_code
    return 0 if fit else 1


def _text(findings: Sequence[Finding]) -> str:
    width = max(len(each.check) for each in findings)
    lines = []
    for each in findings:
        lines.append(f"{each.level:<5}  {each.check:<{width}}  {each.found}")
        if each.remedy:
            lines.append(f"{'':<{7 + width}}  -> {each.remedy}")
    errors, warnings = (sum(each.level == level for each in findings) for level in ("error", "warn"))
    return "\n".join([*lines, f"{counted(errors, 'error')}, {counted(warnings, 'warning')}"])
