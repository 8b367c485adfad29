"""``posttrain gc``."""

import argparse
import json
import re
import sys

from flows.commands.arguments import add_json, add_overrides

_UNITS = {"d": 86400.0, "h": 3600.0, "": 86400.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_overrides(parser)
    add_json(parser)
    parser.add_argument("--yes", action="store_true", help="free it without asking")
    parser.add_argument("--dry-run", action="store_true", help="only show it")
    parser.add_argument(
        "--older-than", type=_seconds, metavar="AGE",
        help="only what was not used for so long, such as 30d or 12h, also of pipelines that are not declared here; "
        "unless stated 7d for what a run could go on from, tokens and rehearsals, 0 for all else",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """0, also where nothing is to be freed, nobody is there to agree, or all of it came into use meanwhile.

    Raises:
        PipelineError: what is needed cannot be told, so that nothing is freed.
    """
    from flows.declare.config import load_pipeline
    from flows.declare.store_root import asked_store
    from flows.needed.look import last_look, needed
    from flows.needed.registries import Registries
    from flows.reports.gc import gc_dict, gc_text
    from lineage.freeing import free
    from lineage.garbage import Garbage, find

    store = asked_store(options.overrides, options.config_dir)
    pipeline = load_pipeline(options.overrides, options.config_dir)
    registries = Registries(pipeline.tracking, store)

    def look() -> tuple[list[Garbage], list[Garbage], dict[str, str], list[str]]:
        kept, notes = needed(pipeline, store, options.config_dir, registries, unseen=options.older_than is None)
        garbage, young = find(store, kept, options.older_than)
        return garbage, young, kept, notes

    garbage, young, kept, notes = look()
    if not options.json:
        print(gc_text(store, garbage, young, notes))
    agreed = bool(garbage) and not options.dry_run and (options.yes or _asked(options.json))
    done: list[Garbage] = []
    if agreed:
        again, _, kept, _ = (garbage, young, kept, notes) if options.yes else look()  # the answer took its time
        still = {(each.paths, each.fingerprint) for each in again}
        shown = [each for each in garbage if (each.paths, each.fingerprint) in still]  # `free` knows their use then
        done = [each for each in shown if free(store, each, last_look(store, kept, registries))]
    if options.json:
        freed = [each.what for each in done]
        print(json.dumps({**gc_dict(store, garbage, young, kept), "freed": freed}, indent=2))
    elif agreed:
        rest = len(garbage) - len(done)
        print(f"freed {len(done)} of {len(garbage)}" + (f"; {rest} came into use, or went, meanwhile" if rest else ""))
    return 0


def _asked(as_json: bool) -> bool:
    if as_json or not sys.stdin.isatty():
        if not as_json:
            print("nothing is freed: there is no terminal to ask at; --yes frees it")
        return False
    return input("free it? [y/N] ").strip().lower() in ("y", "yes")


def _seconds(word: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([dh]?)", word)
    if not match:
        raise argparse.ArgumentTypeError(f"{word}: is no age; give days or hours, such as 30d, 12h, 0")
    return float(match[1]) * _UNITS[match[2]]
