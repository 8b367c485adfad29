"""What the words of ``posttrain data`` state: rows, how they are read and prepared, and what is asked of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, ClassVar, Union, get_args, get_origin

from annotated_types import Gt

from flows.declare.config import typed
from flows.declare.pipeline import nearest
from lineage.artifact import DATA, SOURCE, Kind, Source
from lineage.digest import DigestCache
from lineage.errors import ConfigError, DataError
from lineage.model_source import MODEL_OPTIONS
from lineage.source_checks import check_options
from lineage.sources import files_of, local_paths, pin
from lineage.text_split import check_split
from tasks.chat_template import check_name
from tasks.data.examine import method_of
from tasks.data.kinds import ROW_KINDS
from tasks.data.preparing.options import Prepare
from tasks.data.tokens.template import Thinking

if TYPE_CHECKING:
    from tasks.data.preparing.convert_rows import Opened


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked beside the fields of sources and data stages.

    Args:
        kind: what rows shall become; None: what their format gives.
        model: a directory or a hub id, in whose tokens rows are measured and by whose chat template it is told what of
            them is trained.
        max_length: of the rows that are trained on; None: what holds 95 % of them.
        chat_template: instead of the model's, or where it has none.
        thinking: as a training stage has it.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    kind: Kind | None = None
    model: str | None = None
    max_length: Annotated[int, Gt(0)] | None = None
    chat_template: str | None = None
    thinking: Thinking | None = None

    def __post_init__(self) -> None:
        check_name(self.chat_template)
        if self.kind and self.kind not in DATA:
            raise ConfigError(f"kind={self.kind}: no data stage makes it; accepted: {', '.join(DATA)}")
        if not self.model:
            why = "it is of tokens, which nothing but a model makes; state model=DIR|HUB_ID too, or remove it"
            _refuse(max_length=self.max_length, chat_template=self.chat_template, thinking=self.thinking, why=why)

    def check(self, kind: Kind) -> None:
        """That nothing is stated that is not read of rows of a kind.

        Raises:
            ConfigError: names it.
        """
        if not ROW_KINDS[kind].chat:
            chats = ", ".join(each.kind for each in ROW_KINDS.values() if each.chat)
            why = f"{kind} goes through no chat template, as {chats} do; remove it"
            _refuse(chat_template=self.chat_template, thinking=self.thinking, why=why)


def _refuse(*, why: str, **stated: object) -> None:
    for name, value in stated.items():
        if value is not None:
            raise ConfigError(f"{name}={value}: {why}")


_OF_SOURCES, _OF_STAGES, _OF_ASKED = (
    {field.name: field.type for field in fields(cls) if field.name not in without}
    for cls, without in (
        (Source, ("path", "kind", "labels", "fallback", *MODEL_OPTIONS)), (Prepare, ("replay_share",)), (Asked, ())
    )
)  # fmt: skip # what is left out needs a pipeline
_TYPES = {**_OF_SOURCES, **_OF_STAGES, **_OF_ASKED}


@dataclass(frozen=True, kw_only=True)
class StatedRows:
    """Rows to look at.

    Args:
        rows: of one kind.
        method: the data stage that would prepare them.
        against: sets that something is measured on.
        refusals: why rows are not as they should be: those that were named and are of another kind than the first,
            and are left out here; or of another than was asked for.
    """

    rows: Sequence["Opened"]
    method: Prepare
    asked: Asked
    against: Sequence[Source]
    refusals: Sequence[DataError]


def stated_rows(words: Sequence[str], against: Sequence[str], config_dir: Path | None) -> StatedRows:
    """Reads sources and overrides, in any order.

    Args:
        against: further sources.
    Raises:
        ConfigError: no source, an unknown key, a value of the wrong type, a key that nothing would read.
        DataError: no format fits the rows, or several do.
    """
    from tasks.data.preparing.convert_rows import detect_source

    paths, tree = _told_apart(words)
    if not paths:
        raise ConfigError("no rows are named; give a file, a directory, a URL, a hub id, or quickstart:instructions")
    asked, of_stage = typed(Asked, _part(tree, _OF_ASKED), ""), _part(tree, _OF_STAGES)
    sources = [stated_source(path, _part(tree, _OF_SOURCES), config_dir) for path in paths]
    measured = [stated_source(path, {}, config_dir) for path in against]
    template = of_stage.get("prompt_template")
    rows = [detect_source(source, str(template) if template else None) for source in sources]
    told = next((each for each in rows if each.kind), rows[0])
    kind = told.kind or asked.kind or (Kind.CONVERSATIONS if template or of_stage.get("system_prompt") else Kind.TEXT)
    asked.check(kind)
    others = [each for each in rows if each.kind not in (kind, None)]
    refusals = [each.refusal(kind, f"beside {told.source.path}; look at it by itself") for each in others]
    if asked.kind and asked.kind != kind:
        refusals.append(told.refusal(asked.kind, f"by kind={asked.kind}; leave it out"))
    method = typed(method_of(kind), of_stage, "")
    alike = [each for each in rows if each.kind in (kind, None)]
    return StatedRows(rows=alike, method=method, asked=asked, against=measured, refusals=refusals)


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
    if paths := local_paths(source.path):
        is_directory = len(paths) == 1 and paths[0].is_dir()
        check_options("rows", source, is_hub=False, is_url=False, is_directory=is_directory)
        check_split("rows", source.path, source.split_by, files_of(paths))
        return source
    return pin("rows", source, DigestCache(None)).source


def _told_apart(words: Sequence[str]) -> tuple[list[str], dict[str, object]]:
    """Sources, and what the overrides say: ``columns.prompt=The Question``, ``held_out=0.1``, ``split=train[:1000]``.

    Files may be called ``year=2024/rows.jsonl``.
    """
    paths: list[str] = []
    tree: dict[str, object] = {}
    for word in words:
        key, is_override, value = word.partition("=")
        name, is_part, part = key.partition(".")
        if name in _TYPES and is_override:
            known = tree.get(name)
            if known is not None and not (is_part and isinstance(known, dict) and part not in known):
                raise ConfigError(f"{key}: is given twice, at last as {word}; one value is accepted; remove the other")
            before = known if isinstance(known, dict) else {}
            tree[name] = {**before, part: _value(word, value, name, is_part)} if is_part else _value(word, value, name)
        elif is_override and name.replace("-", "_").isidentifier() and not local_paths(word):
            raise ConfigError(
                f"{name}: unknown key, and no file is called {word}; accepted: {', '.join(sorted(_TYPES))}"
                f"{nearest(name, _TYPES)}"
            )
        else:
            paths.append(word)
    return paths, tree


def _value(word: str, value: str, name: str, is_part: str = "") -> object:
    """Text as it stands, so that a shell's quotes are all that it needs; the rest as YAML."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    if _TYPES[name] == Mapping[str, str] if is_part else _is_text(_TYPES[name]):
        return value
    try:
        tree = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]))
    except (OmegaConfBaseException, YAMLError) as error:
        cause = str(error).partition("\n")[0]
        raise ConfigError(f"{word}: {cause}; key=value is accepted, the value as YAML has it") from error
    assert isinstance(tree, dict)
    return tree["value"]


def _is_text(hint: object) -> bool:
    """Whether a type is ``str``, maybe with a bound, maybe with None."""
    return hint is str or (get_origin(hint) in (Annotated, Union, UnionType) and any(map(_is_text, get_args(hint))))


def _part(tree: Mapping[str, object], types: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in tree.items() if name in types}
