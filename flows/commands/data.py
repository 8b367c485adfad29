"""``posttrain data``."""

import argparse
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from flows.commands.arguments import add_json
from flows.wording import counted, printable
from lineage.errors import ConfigError, DataError, PipelineError
from tasks.data.preparing.report import (
    LEAKAGE,
    NEAR_DUPLICATES,
    REJECTS,
    REPORT,
    DataReport,
    Labels,
    SourceReport,
    render,
)

if TYPE_CHECKING:
    from flows.stated_rows import StatedRows
    from tasks.data.examine import Examined

_EPILOG = """
SOURCE is a file, a glob, a directory, a URL, a hub id, quickstart:NAME, or source:NAME of the configuration.
Several are prepared together, as the slots rows, rows_2 ... of one data stage. Alone it may also be a data stage that
is finished, such as cpt-sft-dpo/instructions: its report is shown.

OVERRIDE is a field of a source, such as format=alpaca, columns.completion=answer or split=train[:1000]; a field of a
data stage, such as held_out=0.1, max_bad_rows=5 or system_prompt="Be brief."; or one of
  kind=conversations    what the rows shall become
  model=DIR|HUB_ID      in whose tokens they are measured, and what of them is trained with its chat template
  max_length=512        of what is trained
  chat_template=chatml  for a model that has none; or hermes, which has tools, or a family such as qwen3
  thinking=keep|drop    of a model whose template leaves out what the assistant thinks
A file with the name of an override is called ./format=x.jsonl.
"""


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = _EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("overrides", nargs="+", metavar="SOURCE|OVERRIDE", help="rows, and how they are read")
    parser.add_argument(
        "--against", action="append", default=[], metavar="SOURCE",
        help="rows that something is measured on, in a format that is detected: list those that the others repeat; "
        "may be given several times",
    )  # fmt: skip
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with the histogram of lengths")
    parser.add_argument(
        "--out", type=Path, metavar="DIR",
        help="keep the report, its page, and all that it names: bad rows, near-duplicates, leakage",
    )  # fmt: skip
    parser.add_argument("--config-dir", type=Path, help="a directory of your own groups, for source:NAME")
    add_json(parser)


def run_data(options: argparse.Namespace) -> int:
    from flows.stated_rows import stated_rows
    from tasks.data.examine import keep

    _check_places(options.html, options.out)
    _log_only_reading()
    found = _finished_data(options.overrides, options.config_dir) if not options.against else None
    if found:
        if options.out:
            keep(found, options.out)
        _tell(found, options, options.out or found.output)
        return 0
    stated = stated_rows(options.overrides, options.against, options.config_dir)
    with TemporaryDirectory(prefix="posttrain-data-") as directory:
        found = _examined(stated, Path(directory))
        if options.out:
            keep(found, options.out)
    _tell(found, options, options.out)
    if found.refusals:
        raise DataError(_refusal(found, options.out))
    return 0


def _log_only_reading() -> None:
    """What a stage logs is in the report, but for the files of a directory that are not read."""
    assert logging.lastResort  # writes warnings to standard error
    logging.getLogger("tasks").addHandler(logging.NullHandler())
    logging.getLogger("tasks.data.reading").addHandler(logging.lastResort)


def _unwritable(html: Path) -> ConfigError:
    return ConfigError(f"--html {html}: cannot be written; name a file in a folder that exists")


def _check_places(html: Path | None, out: Path | None) -> None:
    """Before anything is read, because that may take long."""
    if html and (html.is_dir() or not html.parent.is_dir()):
        raise _unwritable(html)
    try:
        if out:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: is no folder ({error.strerror}); name one, which need not exist") from error


def _examined(stated: "StatedRows", directory: Path) -> "Examined":
    from tasks.data.examine import examine, fetch_tokenizer, with_labels

    asked = stated.asked
    model = fetch_tokenizer(asked.model) if asked.model else None
    _say(f"reading {', '.join(each.source.path for each in stated.rows)}")
    found = examine(stated.method, stated.rows, directory / "rows", model).refused(*stated.refusals)
    if found.num_trained is None:
        left = [*(["labels are not told"] if model else []), *(f"not compared with {s.path}" for s in stated.against)]
        for what in left:
            _say(f"{what}: the rows are refused")
        return found
    if model:
        _say(f"tokenizing as {asked.model} does")
        found = with_labels(found, model, asked.max_length, asked.chat_template, asked.thinking)
    return _compared(found, stated, directory) if stated.against else found


def _compared(found: "Examined", stated: "StatedRows", directory: Path) -> "Examined":
    from tasks.data.examine import add_overlaps, examine_all

    against: list[Examined] = []
    refusals: list[PipelineError] = []
    for number, source in enumerate(stated.against):
        _say(f"reading {source.path}")
        try:
            against.append(examine_all(source, directory / f"against-{number}"))
        except DataError as error:
            refusals.append(DataError(f"not compared with {source.path}: {error}"))
    if against:
        add_overlaps(found, against, directory)
    return found.refused(*refusals)


def _tell(found: "Examined", options: argparse.Namespace, kept: Path | None) -> None:
    """Prints what was found, and writes the page.

    Args:
        kept: where all of it is.
    """
    report, refused = found.report, "\n".join(map(str, found.refusals))
    if kept is None:
        report.rejects = None
    if options.json:
        samples = report.labels.samples if report.labels else []
        more = {"bad_rows": found.bad_rows, "num_bad_rows": found.num_bad_rows, "samples": samples}
        print(json.dumps({**report.to_dict(), **more}, indent=2))
    else:
        bad_rows = [row for row in found.bad_rows if row not in refused]  # stderr has the others
        print(_data_text(report, bad_rows, found.num_bad_rows, kept))
    if options.html:
        try:
            options.html.write_text(render(report, is_kept=kept is not None), encoding="ascii")
        except FileNotFoundError as error:  # a link that leads nowhere
            raise _unwritable(options.html) from error


def _refusal(found: "Examined", kept: Path | None) -> str:
    """Why the rows are refused, with the file of the bad ones where it is now, not where it was made."""
    place = str(kept / REJECTS) if kept else f"{REJECTS}, which --out DIR keeps"
    return "\n".join(map(str, found.refusals)).replace(str(found.output / REJECTS), place)


def _say(line: str) -> None:
    print(printable(line), file=sys.stderr, flush=True)


def _finished_data(words: Sequence[str], config_dir: Path | None) -> "Examined | None":
    """What a data stage of the store left behind, where the one word names it; None: it names rows, or nothing."""
    from contextlib import suppress

    from flows.declare.store_root import store_root
    from lineage.artifact import DATA, Kind
    from lineage.graph.index import Index
    from lineage.graph.refs import resolve
    from lineage.sources import local_paths
    from lineage.store import is_store
    from tasks.data.examine import finished

    word, *others = words
    if others or ":" in word or local_paths(word) or not is_store(store := store_root([], config_dir)):
        return None
    with Index(store) as index, suppress(ConfigError):
        entry = resolve(word, index).entry
        manifest = entry.manifest() if entry else None
        if entry and manifest and manifest.produces in DATA and (entry.output / REPORT).exists():
            return finished(word, Kind(manifest.produces), entry.output)
    return None


def _data_text(report: DataReport, bad_rows: Sequence[str], num_bad_rows: int, kept: Path | None) -> str:
    """The report for people.

    Args:
        bad_rows: the first of them, ``place: problem``.
        kept: the folder that holds all of what is found; None: it was not kept.
    """
    named = len(report.sources) > 1
    near = [f"{pair.row_id} is like {pair.other_row_id}: {pair.similarity:.2f}" for pair in report.near_duplicates]
    overlaps = [
        f"{each.held_out_row_id} of {each.held_out_set}: {each.kind} {each.shared:.2f}, {each.train_row_id} of "
        f"{each.train_set}"
        for each in report.leakage
    ]
    blocks = [
        *(
            _table(_source_rows(source), printable(f"{slot}: {source.path}" if named else source.path))
            for slot, source in report.sources.items()
        ),
        _table(_rows_of(report), "all rows"),
        _listed("bad rows", bad_rows, num_bad_rows, kept and kept / REJECTS),
        _listed("near-duplicates", near, report.counts.get("near_duplicate_rows", 0), kept and kept / NEAR_DUPLICATES),
        _listed("leakage", overlaps, report.counts.get("leaked_rows", 0), kept and kept / LEAKAGE),
        _labels(report.labels) if report.labels else "",
    ]
    return "\n\n".join(filter(None, blocks))


def _listed(title: str, lines: Sequence[str], count: int, file: Path | None) -> str:
    """The first of so many lines, and the file that has them all; nothing where there are none."""
    if not lines:
        return ""
    more = f"and {count - len(lines)} more; {f'{file} has' if file else '--out DIR keeps'} all of them"
    shown = [*map(printable, lines), *([more] if count > len(lines) else [])]
    return "\n".join([title, *(f"  {line}" for line in shown)])


def _source_rows(source: SourceReport) -> Iterator[tuple[str, str]]:
    yield "format", f"{source.format} ({source.evidence})"
    for column, becomes in source.mapping.items():
        yield f"  {column}", f"-> {becomes}"
    if source.split_by:
        yield "split by", f"{source.split_by} (split_by=line|paragraph|document sets it)"
    yield "rows", f"{source.rows_read} read, {source.rows_used} used"
    yield from _counts("left out", source.dropped)
    for what, remark in source.remarks.items():
        yield what, f"{counted(remark.count, 'row')}, such as {', '.join(remark.places)}"
    yield from _counts("columns not read", source.ignored_columns)


def _rows_of(report: DataReport) -> Iterator[tuple[str, str]]:
    for name, count in report.counts.items():
        yield name.replace("_", " "), str(count)
    if report.lengths:
        yield "lengths", report.lengths.described()


def _labels(labels: Labels) -> str:
    parts = [_table(labels.described(), "labels")]
    for number, sample in enumerate(labels.samples, start=1):
        lines = (f"  {printable(line)}" for line in sample.splitlines())
        parts.append("\n".join([f"sample {number}: what is trained stands in ⟦ ⟧", *lines]))
    return "\n\n".join(parts)


def _counts(name: str, counts: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    if counts:
        yield name, ", ".join(f"{what}: {count}" for what, count in counts.items())


def _table(rows: Iterable[tuple[str, str]], title: str) -> str:
    from rich.text import Text

    from flows.reports.tables import empty_table, plain_text

    table = empty_table("name", "value")
    table.show_header = False
    for name, value in rows:
        table.add_row(Text(f"  {printable(name)}"), Text(printable(value)))
    return f"{title}\n{plain_text(table)}"
