"""``posttrain doctor``."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json, add_overrides

if TYPE_CHECKING:
    from flows.doctor.facts import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """0: fit to run, with or without warnings; 1: an error was found."""
    from flows.doctor.checks import CHECKS
    from flows.doctor.gather import gather

    facts = gather(options.overrides, options.config_dir)
    findings = [finding for check in CHECKS for finding in check(facts)]
    fit = all(finding.level != "error" for finding in findings)
    if options.json:
        print(json.dumps({"ok": fit, "findings": [asdict(each) for each in findings]}, indent=2))
    else:
        print(_text(findings))
    return 0 if fit else 1


def _text(findings: Sequence["Finding"]) -> str:
    width = max(len(each.check) for each in findings)
    lines = []
    for each in findings:
        lines.append(f"{each.level:<5}  {each.check:<{width}}  {each.found}")
        if each.remedy:
            lines.append(f"{'':<{7 + width}}  -> {each.remedy}")
    errors, warnings = (sum(each.level == level for each in findings) for level in ("error", "warn"))
    return "\n".join([*lines, f"{errors} errors, {warnings} warnings"])
