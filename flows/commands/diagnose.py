"""``posttrain diagnose``."""

import argparse
import json
from pathlib import Path

from flows.commands.arguments import add_json, add_overrides, name_among
from flows.declare.store_root import asked_store


def add_diagnose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a stage that runs, failed or is finished: dpo, cpt-sft-dpo/dpo ...")
    add_overrides(parser)
    add_json(parser)
    parser.add_argument("--rule", metavar="RULE", help="the rule whose change --out writes; default: the most certain")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the change, for posttrain run --overrides-from FILE"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page that draws the curves")


def run_diagnose(options: argparse.Namespace) -> int:
    from flows.reports.diagnosis import diagnosis_dict, diagnosis_page, diagnosis_text, patch_of, read_diagnosis
    from lineage.errors import ConfigError

    ref, overrides = name_among(options.ref, options.overrides)
    found = read_diagnosis(ref, asked_store(overrides, options.config_dir))
    files = [(options.out, patch_of), (options.html, diagnosis_page)]
    for path, write in files:
        if path:
            text = write(found, options.rule)
            try:
                path.write_text(text, encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"{path}: cannot be written ({error.strerror}); name a file in a folder") from error
    if options.json:
        print(json.dumps(diagnosis_dict(found), indent=2))
    else:
        print("\n".join([diagnosis_text(found), *(f"wrote {path}" for path, _ in files if path)]))
    return 0
