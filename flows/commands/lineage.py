"""``posttrain lineage``, ``report``, ``impact``, ``diff``, ``blame`` and ``diagnose``."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json, add_overrides, known_refs, recorded_cli_args, write_output
from flows.declare.store_root import asked_store
from flows.reports.wording import relative
from lineage.filesystem.files import local_path

if TYPE_CHECKING:
    from flows.reports.model import ScoreRow
    from lineage.graph.diff import Diff
    from lineage.graph.index import Index


def add_lineage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ref", metavar="REF", help="such as cpt-sft-dpo/dpo, alias:champion, or digits of a fingerprint"
    )
    parser.add_argument("--html", type=local_path, metavar="FILE", help="write a page that draws the graph")


def run_lineage(options: argparse.Namespace) -> int:
    from flows.reports.lineage import ancestry_tree, moves_text
    from lineage.artifact import ALIAS
    from lineage.graph.ancestry import ancestry
    from lineage.graph.index import Index
    from lineage.graph.refs import resolve
    from lineage.promotions import read_events

    with Index(asked_store(options.overrides, options.config_dir)) as index:
        graph = ancestry(index, resolve(options.ref, index).node)
        moves = [each for each in read_events(index.store) if each.alias and ALIAS + each.alias == options.ref]
    if options.html:
        from flows.reports.page import render

        write_output(options.html, render(graph.to_dict(options.ref)))
    if options.json:
        print(json.dumps({**graph.to_dict(options.ref), "moves": [asdict(each) for each in moves]}, indent=2))
    else:
        print(f"wrote {relative(options.html)}" if options.html else ancestry_tree(graph) + moves_text(moves))
    return 0


def add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", nargs="?", metavar="REF", help="a model, such as cpt-sft-dpo/dpo or alias:champion")
    add_overrides(parser)
    parser.add_argument("--compare", action="extend", nargs=2, metavar=("A", "B"), help="two models beside each other")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--html", type=local_path, metavar="FILE", help="where the page goes; default: report-MODEL.html")
    form.add_argument("--json", action="store_true", help="print one JSON object")
    form.add_argument("--card", action="store_true", help="print a README for the hub, with metadata")
    parser.add_argument("--repo", metavar="OWNER/NAME", help="of the card: the model's name on the hub")


def run_report(options: argparse.Namespace) -> int:
    from flows.reports.diff import diff_text
    from flows.reports.model import model_page, model_report
    from flows.reports.sweep import trial_model
    from flows.serving.export import model_card
    from lineage.errors import ConfigError
    from lineage.graph.diff import diff
    from lineage.graph.index import Index

    cli_args = [*([options.ref] if options.ref else []), *options.overrides]
    refs = [*(options.compare or []), *(arg for arg in cli_args if "=" not in arg)]
    if len(refs) != (2 if options.compare else 1):
        problem = f"{len(refs)} REFs are given ({', '.join(refs)})" if refs else "no REF is given"
        there = "" if refs else f"; {known_refs(['report', *cli_args])}"
        raise ConfigError(f"report: {problem}{there}; give one, or two as: posttrain report --compare A B")
    if options.card and options.compare:
        raise ConfigError("--card with --compare: a card is of one model; leave one of them out")
    if options.repo and not options.card:
        raise ConfigError(f"--repo {options.repo}: names the model in its card alone; add --card, or leave it out")
    store = asked_store([arg for arg in cli_args if "=" in arg], options.config_dir)
    with Index(store) as index:
        reports = [model_report(trial_model(ref, store) or ref, index) for ref in refs]
        found = diff(index, *(each["id"] for each in reports)) if options.compare else None
    if options.json:
        both = {"models": reports, "differences": found.to_dict()} if found else reports[0]
        print(json.dumps(both, indent=2))
    elif options.card:
        print(model_card(reports[0], options.repo or reports[0]["name"]), end="")
    else:
        place = options.html or Path(f"report-{'-'.join(each['id'].replace('@', '-') for each in reports)}.html")
        write_output(place, model_page(reports, diff_text(found).splitlines() if found else ()))
        print(f"wrote {relative(place)}")
    return 0


def add_impact(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "ref", metavar="REF",
        help="an artifact or a source as in lineage; label:NAME; source:NAME#ROW-ID; source:NAME#TEXT; a data file",
    )  # fmt: skip


def run_impact(options: argparse.Namespace) -> int:
    from flows.reports.impact import impact_text
    from lineage.graph.impact import impact
    from lineage.graph.index import Index

    with Index(asked_store(options.overrides, options.config_dir)) as index:
        found = impact(options.ref, index)
        # Not indented: with tens of thousands of artifacts that would take seconds.
        print(json.dumps(found.to_dict()) if options.json else impact_text(found))
    return 0


def add_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", help="such as cpt-sft-dpo/dpo, or digits of a fingerprint")
    parser.add_argument("second", metavar="B", help="such as alias:champion")


def run_diff(options: argparse.Namespace) -> int:
    from flows.reports.diff import diff_text
    from lineage.errors import ConfigError
    from lineage.graph.diff import diff
    from lineage.graph.index import Index
    from lineage.graph.refs import resolve

    cli_args = [options.first, options.second, *options.overrides]
    refs = [arg for arg in cli_args if "=" not in arg]
    if len(refs) != 2:
        raise ConfigError(f"diff: {len(refs)} REFs are given ({', '.join(refs)}); give two, as: posttrain diff A B")
    with Index(asked_store([arg for arg in cli_args if "=" in arg], options.config_dir)) as index:
        found = diff(index, *(resolve(ref, index).node for ref in refs))
        scores = _scores_of_both(found, index)
    both = {"scores": {row["metric"]: [each and each["value"] for each in row["values"]] for row in scores}}
    print(json.dumps(found.to_dict() | both, indent=2) if options.json else diff_text(found, scores))
    return 0


def _scores_of_both(found: "Diff", index: "Index") -> "Sequence[ScoreRow]":
    """The scores of two models in evaluations; empty: one of them has none, or is no model."""
    from flows.reports.model import compared, model_report
    from lineage.artifact import MODELS

    nodes = found.first, found.second
    if found.first.id == found.second.id or not all(
        each.manifest and each.manifest.produces in MODELS for each in nodes
    ):
        return ()
    scores, _ = compared([model_report(each.id, index) for each in nodes])
    return scores[0]["rows"] if scores else ()


def add_blame(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a model, such as alias:champion or cpt-sft-dpo/dpo")
    parser.add_argument("--metric", required=True, help="a metric of the evaluation, such as preference_accuracy")
    parser.add_argument(
        "--against",
        metavar="REF",
        help="default: the previous model of its alias, else the previous model of its stage",
    )


def run_blame(options: argparse.Namespace) -> int:
    from flows.operate.blame import blame

    ref = options.ref
    against = ["--against", options.against] if options.against else []
    cli_args = [ref, "--metric", options.metric, *against, *recorded_cli_args(options)]
    found = blame(ref, options.against, options.metric, options.overrides, options.config_dir, cli_args)
    print(json.dumps(found.to_dict(), indent=2) if options.json else found.text())
    return 0


def add_diagnose(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ref", metavar="REF", help="a stage that runs, failed or is finished: dpo, cpt-sft-dpo/dpo ...")
    add_overrides(parser)
    add_json(parser)
    parser.add_argument("--rule", metavar="RULE", help="the rule whose change --out writes; default: the most certain")
    parser.add_argument(
        "--out", type=local_path, metavar="FILE", help="write the change, for posttrain run --overrides-from FILE"
    )
    parser.add_argument("--html", type=local_path, metavar="FILE", help="write a page that draws the curves")


def run_diagnose(options: argparse.Namespace) -> int:
    from flows.reports.diagnosis import diagnosis_dict, diagnosis_page, diagnosis_text, patch_of, read_diagnosis
    from lineage.diagnosis.rules import RULES
    from lineage.errors import ConfigError

    names = [rule.name for rule in RULES]
    if options.rule is not None and options.rule not in names:
        raise ConfigError(f"--rule {options.rule}: no such rule; there are: {', '.join(names)}")
    found = read_diagnosis(options.ref, asked_store(options.overrides, options.config_dir))
    if options.out:
        write_output(options.out, patch_of(found, options.rule), keeps=True)
    if options.html:
        write_output(options.html, diagnosis_page(found), keeps=False)
    written = [f"wrote {relative(path)}" for path in (options.out, options.html) if path]
    print(json.dumps(diagnosis_dict(found), indent=2) if options.json else "\n".join([diagnosis_text(found), *written]))
    return 0
