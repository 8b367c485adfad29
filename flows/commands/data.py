"""``posttrain data``."""

import argparse
import json
import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json

if TYPE_CHECKING:
    from flows.stated_rows import StatedRows
    from tasks.data.examine import Examined
    from tasks.data.preparing.report import DataReport

_EPILOG = """
SOURCE is a file, a glob, a directory, a URL, a hub id, quickstart:NAME, or source:NAME of the configuration.
Several are prepared together.

OVERRIDE is a field of a source, such as format=alpaca, columns.answer=completion or split=train[:1000]; a field of a
data stage, such as held_out=0.1, max_bad_rows=5 or system_prompt="Be brief."; or one of
  kind=conversations    what the rows shall become
  model=DIR|HUB_ID      in whose tokens they are measured, and what of them is trained with its chat template
  max_length=512        of what is trained
  chat_template=chatml  for a model that has none; or hermes, which has tools
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("overrides", nargs="+", metavar="SOURCE|OVERRIDE", help="rows, and how they are read")
    parser.add_argument(
        "--against", action="append", default=[], metavar="SOURCE",
        help="rows that something is measured on, in a format that is detected: list those that the others repeat; "
        "may be given several times",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the histogram of lengths")
    parser.add_argument("--config-dir", type=Path, help="a directory of your own groups, for source:NAME")
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    from flows.reports.data import data_text
    from flows.stated_rows import stated_rows

    logging.getLogger("tasks").addHandler(logging.NullHandler())  # what a stage logs is in the report
    stated = stated_rows(options.overrides, options.config_dir)
    with _scratch() as directory:
        found = _found(stated, options, directory)
    if options.html:
        _write_page(found.report, options.html)
    if options.json:
        labels = found.report.labels
        document = {**found.report.to_dict(), "bad_rows": found.bad_rows, "samples": labels.samples if labels else []}
        print(json.dumps(document, indent=2))
    else:
        print(data_text(found.report, [row for row in found.bad_rows if row not in str(found.refusal)]))
    if found.refusal:
        raise found.refusal
    return 0


def _found(stated: "StatedRows", options: argparse.Namespace, directory: Path) -> "Examined":
    from tasks.data.examine import examine, fetch_tokenizer, with_labels

    asked = stated.asked
    model = fetch_tokenizer(asked.model) if asked.model else None
    _say(f"reading {', '.join(source.path for source in stated.sources)}")
    found = examine(stated.method, stated.sources, directory / "rows", model)
    if model and found.refusal is None:
        _say(f"tokenizing as {asked.model} does")
        found = with_labels(found, model, asked.max_length, asked.chat_template)
    if options.against and found.refusal is None:
        _add_leakage(found, options, directory)
    return found


def _add_leakage(found: "Examined", options: argparse.Namespace, directory: Path) -> None:
    from flows.stated_rows import stated_source
    from tasks.data.examine import add_overlaps, examine, kind_of, method_of

    against = []
    for number, path in enumerate(options.against):
        _say(f"reading {path}")
        source = stated_source(path, {}, options.config_dir)
        against.append(examine(method_of(kind_of(source))(), [source], directory / f"against-{number}"))
    add_overlaps(found, against, directory)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory of which only the files of bad rows stay: a refusal names them."""
    directory = Path(mkdtemp(prefix="posttrain-data-"))
    try:
        yield directory
    finally:
        from tasks.data.preparing.rejects import REJECTS

        kept = list(directory.rglob(REJECTS))
        for file in directory.rglob("*"):
            if file.is_file() and file not in kept:
                file.unlink()
        if not kept:
            shutil.rmtree(directory)


def _write_page(report: "DataReport", file: Path) -> None:
    from lineage.errors import ConfigError
    from tasks.data.preparing.report_page import render

    try:
        file.write_text(render(report), encoding="ascii")
    except OSError as error:
        raise ConfigError(
            f"--html {file}: cannot be written ({error.strerror}); name a file in a folder that exists"
        ) from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
