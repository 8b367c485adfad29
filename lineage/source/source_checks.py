"""Checks of a source's options and of its Python function; permissions of output files."""

import contextlib
import os
import re
import symtable
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from platform import python_version

from lineage.artifact import QUICKSTART, WHEEL, Kind, Source
from lineage.code import code_digest_now, source_file
from lineage.errors import ConfigError
from lineage.filesystem.digest import digest_file
from lineage.source.model_source import check_model_options
from lineage.source.text_split import check_split, data_suffix

_READ = 0o444


def readable_as(directory: Path, like: Path) -> None:
    """Gives every file below a directory the read permissions of ``like``.

    Files of another user, or on a file system without permissions, are left unchanged.
    """
    wanted = like.stat().st_mode & _READ
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink() and wanted & ~path.stat().st_mode:
                path.chmod(path.stat().st_mode | wanted)


PYTHON = "python:"  # before the name of a function
_ACCEPTED = "accepted: python:PACKAGE.MODULE.FUNCTION, and python:FILE.py:FUNCTION with allow_code: true"


@dataclass(frozen=True, kw_only=True)
class PythonFunction:
    """A function that yields rows, or scores answers.

    Args:
        module: its dotted name; None if ``file`` is set.
        file: the file that defines it, which is imported as a standalone module.
    """

    name: str
    module: str | None = None
    file: Path | None = None

    def absolute(self) -> str:
        """The path of a source with the file made absolute, for processes with another working directory."""
        if self.file:
            return f"{PYTHON}{os.path.abspath(self.file)}:{self.name}"
        return f"{PYTHON}{self.module}.{self.name}"


def python_function(path: str) -> PythonFunction:
    """The function that a path names (ConfigError: the form is not accepted)."""
    configured = path.removeprefix(PYTHON)
    file, _, name = configured.rpartition(":")
    if file:
        found = PythonFunction(name=name, file=Path(os.path.expanduser(os.path.expandvars(file))))
        is_well_formed = file.endswith(".py")
    else:
        module, _, name = configured.rpartition(".")
        found = PythonFunction(name=name, module=module)
        is_well_formed = all(part.isidentifier() for part in module.split("."))
    if not (is_well_formed and name.isidentifier()):
        raise ConfigError(f"path={path} names no function; {_ACCEPTED}")
    return found


def code_of(function: PythonFunction, takes: str = "takes no argument and yields mappings") -> str:
    """Digest of a function's code: of its file, or of its module and that module's imports from its own package.

    Args:
        takes: the required signature, for the error message.

    Raises:
        ConfigError: the module or file is missing, is not Python, or defines no such function.
    """
    source_file.cache_clear()  # the module may have been created since an earlier plan
    file = function.file or source_file(str(function.module))
    if file is None or file.suffix != ".py":
        raise ConfigError(
            f"there is no Python source of a module {function.module}; accepted: a module that is written in Python, "
            "of a package that is installed, in this folder, or on PYTHONPATH; check the name"
        )
    if not file.is_file():
        raise ConfigError(f"{file}: no such file; {_ACCEPTED}")
    try:
        _require_defined(function.name, file, takes)
        return digest_file(file) if function.module is None else code_digest_now(function.module)
    except SyntaxError as error:
        raise ConfigError(
            f"{error.filename or file}:{error.lineno}: not Python: {error.msg}; Python {python_version()} is accepted; "
            "correct the line"
        ) from error


def _require_defined(name: str, file: Path, takes: str) -> None:
    code = symtable.symtable(file.read_bytes(), str(file), "exec")  # type: ignore[arg-type]  # it takes bytes
    defined = {each.get_name() for each in code.get_symbols() if each.is_assigned() or each.is_imported()}
    if name not in defined:
        functions = sorted(each.get_name() for each in code.get_children() if each.get_type() == "function")
        raise ConfigError(
            f"{file} defines no {name}; functions in it: {', '.join(functions) or 'none'}; name one that {takes}"
        )


_READING = (
    "format", "columns", "split_by", "sample_count", "shuffle_seed", "shuffle_buffer", "streaming", "subset", "loader",
)  # fmt: skip
# Arguments of `datasets.load_dataset` and its builders that change which rows are read.
LOADER = (
    "data_dir", "data_files", "columns", "field", "sep", "delimiter", "header", "names", "usecols", "skiprows", "nrows",
    "quotechar", "escapechar", "decimal", "thousands", "na_values", "encoding", "encoding_errors", "sample_by",
    "keep_linebreaks", "newlines_in_values", "verification_mode",
)  # fmt: skip
_SEPARATOR = ("sep", "delimiter")
_INSTEAD = {  # argument -> what to set in its place
    "path": "sources.{0}.path", "name": "sources.{0}.subset", "split": "sources.{0}.split",
    "revision": "sources.{0}.revision", "streaming": "sources.{0}.streaming",
    "token": "the environment variable HF_TOKEN", "cache_dir": "the environment variable HF_DATASETS_CACHE",
    "trust_remote_code": "nothing: `datasets` runs no code of a data set", "num_proc": "nothing: it changes no row",
}  # fmt: skip

_BOUNDED = re.compile(r"[^\[\]]+\[\d*:\d+\]")  # a number of rows, not a percentage


def is_hub_id(path: str) -> bool:
    """Whether a path that does not exist on this machine has the form of a hub id."""
    owner, _, name = path.partition("/")
    return (
        bool(owner and name)
        and "/" not in name
        and not path.startswith((".", "~", "/", PYTHON))
        and not path.endswith(".jsonl")
    )


def reading_options(source: Source) -> dict[str, object]:
    """The reading options that a source sets.

    Streaming is one of them: a sample of a stream differs from a sample of the whole data set.
    """
    configured: dict[str, object] = {name: getattr(source, name) for name in _READING}
    return {
        name: value for name, value in configured.items() if value is not None and value is not False and value != {}
    }


def reading_identity(source: Source) -> dict[str, object]:
    """The reading options as they enter the fingerprint: columns are inverted, as in all existing stores."""
    options = reading_options(source)
    return (
        {**options, "columns": {theirs: ours for ours, theirs in source.columns.items()}} if source.columns else options
    )


def is_loaded(source: Source) -> bool:
    """Whether ``datasets.load_dataset`` reads the source, instead of our own readers."""
    return source.subset is not None or (bool(source.loader) and separator_of(source) is None)


def separator_of(source: Source) -> str | None:
    """What separates the cells of a CSV or TSV file, or of those of a glob, if ``loader`` sets that alone."""
    values = [value for key, value in source.loader.items() if key in _SEPARATOR]
    is_file = data_suffix(Path(source.path)) in (".csv", ".tsv") and not os.path.isdir(source.path)
    is_set = is_file and len(values) == len(source.loader) == 1 and source.subset is None
    return str(values[0]).replace(r"\t", "\t") if is_set else None  # a shell hands on a tab as it is typed


def check_options(name: str, source: Source, *, is_hub: bool, is_url: bool, is_directory: bool = False) -> None:
    """Checks that every option of a source applies to it.

    Args:
        is_hub, is_url, is_directory: what its path is.
    """
    twice = [theirs for theirs, count in Counter(source.columns.values()).items() if count > 1]
    if twice:
        raise ConfigError(
            f"sources.{name}.columns: the rows' column {twice[0]!r} has two names of ours; one is accepted; remove the "
            "other"
        )
    if source.kind != Kind.ROWS:
        _refuse_reading(name, source)
    check_model_options(name, source, is_hub=is_hub)
    _check_loader(name, source, can_load=is_hub or is_directory)
    if source.shuffle_buffer is not None and source.shuffle_seed is None:
        raise ConfigError(
            f"sources.{name}.shuffle_buffer={source.shuffle_buffer}: nothing is shuffled without shuffle_seed; set "
            f"sources.{name}.shuffle_seed=0, or remove shuffle_buffer"
        )
    if source.images is not None and (source.kind != Kind.ROWS or is_hub or is_url or ":" in source.path):
        raise ConfigError(
            f"sources.{name}.images={source.images}: it is for rows of a local file, and this source is {source.path}; "
            "remove images"
        )
    if source.split_by is not None and (is_hub or source.path.startswith((PYTHON, QUICKSTART))):
        check_split(name, source.path, source.split_by, [])
    if source.streaming:
        _check_streaming(name, source, is_hub)
    if source.credentials and not is_url:
        raise ConfigError(
            f"sources.{name}.credentials: {source.path} is read without any; they are for a URL, such as "
            "s3://bucket/rows.jsonl; remove them"
        )
    # For all but hub ids, pinning sets the revision, and it is checked again before a stage starts.
    has_revision = is_hub or is_url or source.path.startswith((PYTHON, QUICKSTART, WHEEL))
    if source.revision is not None and not has_revision:
        raise ConfigError(
            f"sources.{name}.revision={source.revision}: {source.path} has no revisions; a hub data set or model has; "
            "remove revision"
        )
    if source.allow_code and not source.path.startswith(PYTHON):
        raise ConfigError(
            f"sources.{name}.allow_code=true: {source.path} runs no code; it is for python:FILE.py:FUNCTION; "
            "remove allow_code"
        )


def _refuse_reading(name: str, source: Source) -> None:
    configured = [*(["split"] if source.split != "train" else []), *reading_options(source)]
    if configured:
        raise ConfigError(
            f"sources.{name}.{configured[0]}: it says how rows are read, and this source is of kind {source.kind}; "
            f"remove {', '.join(configured)}, or set kind: rows"
        )


def _check_loader(name: str, source: Source, *, can_load: bool) -> None:
    """Checks that the arguments of `datasets.load_dataset` are known and read nothing outside the pinned source."""
    separator = separator_of(source)
    if separator is not None and (len(separator) != 1 or separator in '"\r\n'):
        raise ConfigError(
            f"sources.{name}.loader: {separator!r} separates no cells; one character is accepted, but no quote and no "
            "line break; set loader.sep=';'"
        )
    if not is_loaded(source):
        return
    field = f"sources.{name}.{'loader' if source.subset is None else 'subset'}"
    if not can_load:
        raise ConfigError(
            f"{field}: {source.path} is not read by `datasets.load_dataset`; a hub data set, or a directory laid out "
            "like one, is accepted, and of a CSV file loader.sep alone; remove subset and loader"
        )
    if source.split_by is not None:
        raise ConfigError(
            f"sources.{name}.split_by={source.split_by}: `datasets.load_dataset` does not read it; remove it, or set "
            f"sources.{name}.loader.sample_by"
        )
    for key, value in source.loader.items():
        if key not in LOADER:
            instead = _INSTEAD.get(key)
            hint = f"; use {instead.format(name)}" if instead else "; remove it"
            raise ConfigError(f"sources.{name}.loader.{key}: not accepted; accepted: {', '.join(LOADER)}{hint}")
        if key in ("data_dir", "data_files"):
            for path in _texts(value):
                if "://" in path or path.startswith(("/", "~")) or ".." in path.split("/"):
                    raise ConfigError(
                        f"sources.{name}.loader.{key}={path}: is outside {source.path}, which alone is pinned; a path "
                        f"below it is accepted; set sources.{name}.path to what holds the rows"
                    )


def _texts(value: object) -> Iterator[str]:
    """All strings in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for each in value.values() for text in _texts(each))
    elif isinstance(value, list | tuple):
        yield from (text for each in value for text in _texts(each))


def _check_streaming(name: str, source: Source, is_hub: bool) -> None:
    if not is_hub:
        raise ConfigError(
            f"sources.{name}.streaming=true: {source.path} is not a hub data set; files are never loaded whole: remove "
            "streaming"
        )
    if source.sample_count is None and not _BOUNDED.fullmatch(source.split):
        raise ConfigError(
            f"sources.{name}.streaming=true: split={source.split} does not say how many rows to take, and a stream may "
            f'have no end; set a slice up to a row, such as "sources.{name}.split=train[:10000]", or '
            f"sources.{name}.sample_count=10000"
        )
