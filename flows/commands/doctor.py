"""``posttrain doctor``."""

import argparse
import json
from dataclasses import asdict

from flows.commands.arguments import add_json, add_overrides
from flows.wording import counted, printable_text
from lineage.errors import ConfigError
from lineage.secrets import redacted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    """0: fit to run, with or without warnings; 1: an error was found; 2: one in the configuration."""
    from flows.doctor import diagnose

    findings = list(diagnose(options.overrides, options.config_dir))
    errors, warnings = ([each for each in findings if each.level == level] for level in ("error", "warn"))
    if options.json:
        print(redacted(json.dumps({"ok": not errors, "findings": [asdict(each) for each in findings]}, indent=2)))
    else:
        width = max(len(each.check) for each in findings)
        for each in findings:
            print(printable_text(f"{each.level:<5}  {each.check:<{width}}  {each.found}"))
            if each.remedy:
                print(printable_text(f"{'':<{7 + width}}  -> {each.remedy}"))
        print(f"{counted(len(errors), 'error')}, {counted(len(warnings), 'warning')}")
    if any(each.check == "configuration" for each in errors):
        return ConfigError.exit_code
    return 1 if errors else 0
