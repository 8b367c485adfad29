"""What the words of ``posttrain data`` state: rows, how they are read and prepared, and what is asked of them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Gt

from flows.declare.pipeline import nearest
from flows.declare.typed import typed
from lineage.artifact import SOURCE, Kind, Source
from lineage.digest import DigestCache
from lineage.errors import ConfigError
from lineage.source_checks import check_options
from lineage.sources import local_paths, pin
from tasks.data.examine import kind_of, method_of
from tasks.data.preparing.options import Prepare

_OVERRIDE = re.compile(r"[a-z_]+(\.\w+)*=")
_OF_SOURCES = {field.name for field in fields(Source)} - {"path", "kind", "labels", "fallback"}
_OF_STAGES = {field.name for field in fields(Prepare)} - {"replay_share", "proportions"}  # these need further slots


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked beside the fields of sources and data stages.

    Args:
        kind: what rows become; None: what their format gives.
        model: a directory or a hub id, in whose tokens rows are measured and by whose chat template it is told what of
            them is trained.
        max_length: of the rows that are trained on; None: what holds 95 % of them.
        chat_template: instead of the model's, or where it has none.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    kind: Kind | None = None
    model: str | None = None
    max_length: Annotated[int, Gt(0)] | None = None
    chat_template: Literal["chatml", "hermes"] | None = None


@dataclass(frozen=True, kw_only=True)
class StatedRows:
    """Rows to look at.

    Args:
        method: the data stage that would prepare them.
    """

    sources: Sequence[Source]
    method: Prepare
    asked: Asked


def stated_rows(words: Sequence[str], config_dir: Path | None) -> StatedRows:
    """Reads sources and overrides, in any order.

    Raises:
        ConfigError: no source, an unknown key, a value of the wrong type.
        DataError: no format fits the rows, or several do.
    """
    paths = [word for word in words if not _OVERRIDE.match(word)]
    if not paths:
        raise ConfigError("no rows are named; give a file, a directory, a URL, a hub id, or quickstart:instructions")
    tree = _tree([word for word in words if _OVERRIDE.match(word)])
    of_asked = {field.name for field in fields(Asked)}
    accepted = sorted(_OF_SOURCES | _OF_STAGES | of_asked)
    for key in tree.keys() - set(accepted):
        raise ConfigError(f"{key}: unknown key; accepted: {', '.join(accepted)}{nearest(key, accepted)}")
    asked = typed(Asked, _part(tree, of_asked), "")
    sources = [stated_source(path, _part(tree, _OF_SOURCES), config_dir) for path in paths]
    of_stage = _part(tree, _OF_STAGES)
    kind = asked.kind or kind_of(
        sources[0], str(of_stage["prompt_template"]) if of_stage.get("prompt_template") else None
    )
    return StatedRows(sources=sources, method=typed(method_of(kind), of_stage, ""), asked=asked)


def stated_source(path: str, stated: Mapping[str, object], config_dir: Path | None) -> Source:
    """The source that a word names, with what is stated of it."""
    if not path.startswith(SOURCE):
        return _present(typed(Source, {"path": path, **stated}, ""))
    from flows.declare.config import load_pipeline

    name, declared = path.removeprefix(SOURCE), load_pipeline([], config_dir).sources
    if name not in declared:
        raise ConfigError(
            f"{path}: the configuration has no such source; there are: {', '.join(declared)}{nearest(name, declared)}"
        )
    return _present(typed(Source, {**asdict(declared[name]), **stated}, ""))


def _present(source: Source) -> Source:
    """A source that is there, as ``pin`` would have it; the bytes of local files are not read for that."""
    if local_paths(source.path):
        check_options("rows", source, is_hub=False, is_url=False)
        return source
    return pin("rows", source, DigestCache(None)).source


def _tree(overrides: Sequence[str]) -> dict[str, object]:
    """What they say, as YAML: ``columns.question=prompt``, ``held_out=0.1``, ``split=train[:1000]``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist(list(overrides)))
    except (OmegaConfBaseException, YAMLError) as error:
        stated, cause = " ".join(overrides), str(error).partition("\n")[0]
        raise ConfigError(f"{stated}: {cause}; key=value is accepted, the value as YAML has it") from error
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _part(tree: Mapping[str, object], names: set[str]) -> dict[str, object]:
    return {name: value for name, value in tree.items() if name in names}
