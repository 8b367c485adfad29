#!/usr/bin/env bash
# shtab 1.13.0: a positional argument whose choices are a mapping cannot be completed.
#
# argparse accepts any container as choices, and a dict is the usual one where each name has a value. shtab takes a
# positional argument with a dict for subcommands, and asks it for their parsers: AttributeError. An option with the same
# dict, and a positional argument with a list, are completed.
#
# Fails if any of the three changes.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q shtab==1.13.0
"$work/env/bin/python" - <<'P'
import argparse

import shtab

KINDS = {"small": 1, "large": 2}


def complete(name, choices):
    parser = argparse.ArgumentParser("tool")
    parser.add_argument(name, choices=choices)
    assert parser.parse_args(["small"] if name == "kind" else [name, "small"]).kind == "small"
    try:
        return "completed" if "large" in shtab.complete(parser, "bash") else "left out"
    except AttributeError as error:
        return str(error)


found = [complete("kind", KINDS), complete("--kind", KINDS), complete("kind", list(KINDS))]
print(*found, sep="\n")
assert found == ["'_StoreAction' object has no attribute '_get_subactions'", "completed", "completed"]
P
# Seen:
# '_StoreAction' object has no attribute '_get_subactions'
# completed
# completed
echo "seen as described"
