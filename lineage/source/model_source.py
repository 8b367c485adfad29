"""Options of a model source besides its path: tokenizer, chat template, config settings, its own code."""

import hashlib
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from lineage.artifact import ALIAS, WHEEL, Kind, Source
from lineage.errors import ConfigError
from lineage.source.model_files import TOKENIZER_FILES, read_json

NAMED_TOKENS = ("pad_token", "eos_token", "bos_token")
# Options whose value is the identity.
BY_VALUE = ("added_tokens", "special_tokens", *NAMED_TOKENS, "add_bos", "model_kwargs", "trust_remote_code")
MODEL_OPTIONS = ("tokenizer", "chat_template", "base_model", *BY_VALUE)
OWN_TEMPLATES = ("chatml", "hermes")  # those of tasks.model.chat_template
TEMPLATE_TOKENS = "<|im_start|> <|im_end|>"  # written by each of them
_TEMPLATE_SUFFIX = ".jinja"
_TRAINING = "_training"  # suffix of TRL's templates that only mark the trained spans
# Special tokens of templates; none of these is text that a user writes.
_BAR = "[|\uff5c]"  # DeepSeek's tokens have the full-width one
SPECIAL_TOKEN = re.compile(rf"<{_BAR}[^<>|\s{{}}']+{_BAR}>|<(?:start|end)_of_turn>|<(?:\||/)?turn\|?>")
_COMMIT = re.compile("[0-9a-f]{40}")
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_SHARE = "a number from 0 to less than 1"
_COUNT = "a whole number above 0"
_NUMBER = "a number above 0"
# Settings of config.json that need no other weights -> accepted values.
KWARGS: Mapping[str, str] = MappingProxyType(
    {
        "rope_scaling": "a mapping with rope_type", "rope_theta": _NUMBER, "max_position_embeddings": _COUNT,
        "sliding_window": _COUNT, "num_experts_per_tok": _COUNT, "router_aux_loss_coef": "a number from 0",
        "attn_logit_softcapping": _NUMBER, "final_logit_softcapping": _NUMBER,
        **dict.fromkeys(
            ("attention_dropout", "hidden_dropout", "activation_dropout", "dropout", "attn_pdrop", "resid_pdrop",
             "embd_pdrop", "attention_probs_dropout_prob", "hidden_dropout_prob"), _SHARE,
        ),
    }
)  # fmt: skip
_INSTEAD = {  # argument of from_pretrained -> what to set in its place
    "attn_implementation": "the resources of a stage", "dtype": "stages.STAGE.method.precision",
    "torch_dtype": "stages.STAGE.method.precision", "quantization_config": "stages.STAGE.method.adapter.quantization",
    "trust_remote_code": "sources.NAME.trust_remote_code", "revision": "sources.NAME.revision",
    "token": "the environment variable HF_TOKEN", "cache_dir": "the environment variable HF_HUB_CACHE",
    "rope_parameters": "sources.NAME.model_kwargs.rope_scaling", "device_map": "the resources of a stage",
}  # fmt: skip
# rope_type -> its required and its optional arguments. transformers ignores any other with a warning.
ROPE: Mapping[str, tuple[frozenset[str], frozenset[str]]] = MappingProxyType(
    {
        "linear": (frozenset({"factor"}), frozenset()),
        "dynamic": (frozenset({"factor"}), frozenset()),
        "yarn": (
            frozenset({"factor"}),
            frozenset({"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
                       "mscale_all_dim", "truncate"}),
        ),
        "longrope": (
            frozenset({"short_factor", "long_factor"}),
            frozenset({"original_max_position_embeddings", "attention_factor", "factor"}),
        ),
        "llama3": (
            frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
            frozenset(),
        ),
    }
)  # fmt: skip
_LISTS = ("short_factor", "long_factor")
_KEEPS_ORIGINAL = ("yarn", "longrope", "llama3")


def model_options(source: Source) -> dict[str, object]:
    """The options that a model source sets."""
    options: dict[str, object] = {name: getattr(source, name) for name in MODEL_OPTIONS}
    options["trust_remote_code"] = source.trust_remote_code or None
    return {name: value for name, value in options.items() if value not in (None, {}, ())}


def sets_tokens(source: Source) -> bool:
    """Whether a source adds tokens, or names any."""
    named = (getattr(source, name) for name in NAMED_TOKENS)
    return source.has_new_tokens or any(each is not None for each in named)


def check_model_options(name: str, source: Source, *, is_hub: bool) -> None:
    """Checks the options of a model source."""
    options = model_options(source)
    if options and (source.kind != Kind.CHECKPOINT or source.path.startswith(ALIAS)):
        what = f"of kind {source.kind}" if source.kind != Kind.CHECKPOINT else "a model that this project trained"
        raise ConfigError(
            f"sources.{name}.{next(iter(options))}: is for a model that is read from a directory, the hub or a wheel, "
            f"and {source.path} is {what}; remove {', '.join(options)}"
        )
    if source.trust_remote_code and not (is_hub and _COMMIT.fullmatch(source.revision or "")):
        found = f"revision={source.revision}" if is_hub else f"path={source.path}, which is not a hub id"
        raise ConfigError(
            f"sources.{name}.trust_remote_code=true with {found}: it runs Python files of the model, so these must be "
            "ones that cannot change; a hub id at a commit of 40 hexadecimal digits is accepted; read its files, and "
            f"set sources.{name}.revision=<commit>, or remove trust_remote_code"
        )
    if source.trust_remote_code and source.base_model is not None:
        raise ConfigError(
            f"sources.{name}.trust_remote_code=true with base_model: the code would be the base's, which this revision "
            "does not pin; a model with its own code is accepted; merge the adapter first, or remove trust_remote_code"
        )
    if source.base_model is not None and source.path.startswith(WHEEL):
        raise ConfigError(f"sources.{name}.base_model: {source.path} is no adapter; remove base_model")
    for key, value in source.model_kwargs.items():
        _check_kwarg(name, key, value)


def _check_kwarg(name: str, key: str, value: object) -> None:
    where = f"sources.{name}.model_kwargs.{key}"
    if key not in KWARGS:
        hint = f"; use {_INSTEAD[key].replace('NAME', name)}" if key in _INSTEAD else "; remove it"
        raise ConfigError(
            f"{where}: not accepted; settings that the weights fit as before are: {', '.join(KWARGS)}{hint}"
        )
    if key == "rope_scaling":
        _check_rope(where, value)
        return
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
    fits = {
        _COUNT: isinstance(number, int) and number > 0, _NUMBER: number > 0, _SHARE: 0 <= number < 1,
    }.get(KWARGS[key], number >= 0)  # fmt: skip
    if not fits:
        raise ConfigError(f"{where}={value}: {KWARGS[key]} is accepted; correct it")


def _check_rope(where: str, value: object) -> None:
    rope_type = value.get("rope_type", value.get("type")) if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(rope_type, str) or rope_type not in ROPE:
        raise ConfigError(
            f"{where}={value}: a mapping with rope_type {', '.join(ROPE)} is accepted; "
            f"set for example {where}={{rope_type: linear, factor: 2.0}}"
        )
    needs, may = ROPE[rope_type]
    configured = {*value} - {"rope_type", "type"}
    if missing := sorted(needs - configured):
        raise ConfigError(f"{where}: {rope_type} needs {', '.join(missing)}; set {where}.{missing[0]}=...")
    if unknown := sorted(configured - needs - may):
        raise ConfigError(
            f"{where}.{unknown[0]}: {rope_type} does not read it; accepted: {', '.join(sorted(needs | may))}; remove it"
        )
    for key in configured:
        least, found = (1 if key == "factor" else 0), value[key]
        numbers = found if key in _LISTS and isinstance(found, list) and found else [found]
        fits = all(isinstance(each, int | float) and not isinstance(each, bool) and each >= least for each in numbers)
        if not (isinstance(found, bool) if key == "truncate" else fits and isinstance(found, list) == (key in _LISTS)):
            accepted = "true or false" if key == "truncate" else f"a number from {least}"
            accepted = f"a list, each {accepted}" if key in _LISTS else accepted
            raise ConfigError(f"{where}.{key}={found}: {accepted} is accepted; correct it")


def with_kwargs(config: Mapping[str, object], kwargs: Mapping[str, object]) -> dict[str, object]:
    """A ``config.json`` with the settings of a source.

    Raises:
        ConfigError: the rotary embedding differs by layer, so that one setting for all layers does not apply.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping) and kwargs:
        return {**config, "text_config": with_kwargs(text, kwargs)}
    merged = {**config, **kwargs}
    rope, theta = kwargs.get("rope_scaling"), kwargs.get("rope_theta")
    present = config.get("rope_parameters")
    if rope is None and (theta is None or not isinstance(present, Mapping)):
        return merged
    if isinstance(present, Mapping) and any(isinstance(each, Mapping) for each in present.values()):
        raise ConfigError(
            "model_kwargs.rope_scaling: this model has a rotary embedding for each kind of layer; one for all layers "
            "is accepted; edit rope_parameters in a copy of its config.json"
        )
    kept = dict(present) if isinstance(present, Mapping) else {}
    if isinstance(rope, Mapping):
        kept = {key: kept[key] for key in ("rope_theta", "partial_rotary_factor") if key in kept}
        kept |= {"rope_type" if key == "type" else key: value for key, value in rope.items()}
        positions = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        if kept["rope_type"] in _KEEPS_ORIGINAL and positions is not None:
            kept.setdefault("original_max_position_embeddings", positions)
    if theta is not None:
        kept["rope_theta"] = theta
    for old in ("rope_scaling", "rope_theta"):
        if isinstance(present, Mapping) or old == "rope_scaling":
            merged.pop(old, None)
    return {**merged, "rope_parameters" if isinstance(present, Mapping) else "rope_scaling": kept}


def split_reference(reference: str) -> tuple[str, str | None]:
    """Path or hub id, and the revision after ``@``, if any."""
    path, at, revision = reference.rpartition("@")
    return (path, revision) if at and path and "/" not in revision else (reference, None)


def template_file(name: str, value: str) -> Path | None:
    """The file of a chat template, the user's or TRL's for a model family; None: it is one of ``OWN_TEMPLATES``.

    Raises:
        ConfigError: there is no such template.
    """
    if value in OWN_TEMPLATES:
        return None
    if value.endswith(_TEMPLATE_SUFFIX) or "/" in value:
        path = Path(value).expanduser()
        if path.is_file():
            return path.absolute()
        raise ConfigError(f"sources.{name}.chat_template={value}: no such file from {Path.cwd()}; give one that exists")
    families = template_families()
    if value not in families:
        raise ConfigError(
            f"sources.{name}.chat_template={value}: no such template; accepted: a file whose name ends in "
            f"{_TEMPLATE_SUFFIX}, {', '.join([*OWN_TEMPLATES, *families])}; name one of these"
        )
    return families[value]


def template_families() -> dict[str, Path]:
    """Family -> the chat template that TRL ships for it."""
    found = importlib.util.find_spec("trl")  # without importing it
    folder = Path(found.origin).parent / "chat_templates" if found and found.origin else None
    paths = sorted(folder.glob(f"*{_TEMPLATE_SUFFIX}")) if folder else []
    return {path.stem: path for path in paths if not path.stem.endswith(_TRAINING)}


def text_digest(text: str) -> str:
    """SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def check_template(name: str, value: str, text: str, vocabulary: Mapping[str, int] | None) -> None:
    """That the special tokens which a template writes are tokens of the model.

    Raises:
        ConfigError: none of them is, so that each would be split into pieces.
    """
    missing = [token for token in dict.fromkeys(SPECIAL_TOKEN.findall(text)) if token not in (vocabulary or {token})]
    # Templates also name tokens for images and tools, which a text model lacks, so that only a template of which the
    # tokenizer has no token at all is refused.
    present = len(set(SPECIAL_TOKEN.findall(text))) - len(missing)
    if missing and not present:
        raise ConfigError(
            f"sources.{name}.chat_template={value}: it writes {', '.join(missing[:4])}, and the tokenizer has no such "
            f"tokens; a template whose tokens it has is accepted; set sources.{name}.tokenizer too, or another template"
        )


def vocabulary(directory: Path | None) -> dict[str, int] | None:
    """Token -> index, from a ``tokenizer.json``; None: unknown until the tokenizer is fetched or loaded."""
    return vocabulary_of(read_json(directory, "tokenizer.json"))


def vocabulary_of(document: object) -> dict[str, int] | None:
    """``vocabulary`` for the parsed content of a ``tokenizer.json``."""
    try:
        assert isinstance(document, dict)
        model = document["model"]["vocab"]
        tokens = model if isinstance(model, dict) else {token: index for index, (token, _) in enumerate(model)}
        return {**tokens, **{token["content"]: token["id"] for token in document.get("added_tokens", [])}}
    except (AssertionError, ValueError, KeyError, TypeError):  # the stage that loads it reports the error
        return None


def with_new_tokens(known: Mapping[str, int] | None, source: Source) -> dict[str, int] | None:
    """A vocabulary with a source's new tokens, under the ids that ``tokenizers`` gives them: those behind the last."""
    if known is None:
        return None
    new = [token for token in (*source.added_tokens, *source.special_tokens) if token not in known]
    return {**known, **{token: index for index, token in enumerate(new, start=max(known.values(), default=-1) + 1)}}


def resized(config: Mapping[str, object], known: Mapping[str, int] | None) -> dict[str, object]:
    """A ``config.json`` whose model has a row of the embedding for each token."""
    text, size = config.get("text_config"), embeddings_of(config)
    if not known or size is None or max(known.values()) < size:
        return dict(config)
    if isinstance(text, Mapping):
        return {**config, "text_config": resized(text, known)}
    return {**config, "vocab_size": max(known.values()) + 1}


def embeddings_of(config: object) -> int | None:
    """How many tokens a model has embeddings for, from its ``config.json``; None: unknown."""
    text = config.get("text_config", config) if isinstance(config, Mapping) else {}
    size = text.get("vocab_size") if isinstance(text, Mapping) else None
    more = 8 if isinstance(text, Mapping) and text.get("model_type") == "mllama_text_model" else 0  # for images
    return size + more if isinstance(size, int) else None


def tokenizer_files(directory: Path) -> list[Path]:
    """The files of the tokenizer in a directory."""
    found = (directory / name for name in TOKENIZER_FILES)
    return [file for each in found if each.exists() for file in ([each] if each.is_file() else sorted(each.rglob("*")))]


def has_tokenizer(directory: Path) -> bool:
    """Whether a directory contains a vocabulary."""
    return any((directory / name).exists() for name in _VOCABULARIES)


def tokens_in_rows(tokenizer: Path | None, template: str | None) -> frozenset[str]:
    """The special tokens that a tokenizer or a chat template adds to rows.

    Args:
        tokenizer: its directory; None: unknown.
        template: replaces the tokenizer's template; None: the tokenizer's own.
    """
    found = read_json(tokenizer, "tokenizer_config.json")
    config = found if isinstance(found, dict) else {}
    named = (config.get(name) for name in ("bos_token", "eos_token"))
    if template is None:
        file = tokenizer / "chat_template.jinja" if tokenizer else None
        template = file.read_text(encoding="utf-8") if file and file.exists() else str(config.get("chat_template", ""))
    texts = (each.get("content") if isinstance(each, dict) else each for each in named)
    return frozenset([*(each for each in texts if isinstance(each, str)), *SPECIAL_TOKEN.findall(template)])


def ends_beyond(source: Source, known: Mapping[str, int] | None, named: object, config: object) -> dict[str, str]:
    """Field -> token, of those that begin and end texts and that the vocabulary lacks where the model has no row left.

    transformers adds such tokens behind the last.

    Args:
        known: token -> index; None: unknown.
        named: content of ``tokenizer_config.json``.
    """
    size, found = embeddings_of(config), dict[str, str]()
    if not known or size is None or max(known.values()) + 1 < size or not isinstance(named, dict):
        return found
    for field in ("bos_token", "eos_token"):
        token = getattr(source, field) or named.get(field)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str) and text not in known:
            found[field] = text
    return found


def no_embedding(what: str, field: str, token: str, where: str = "sources.base") -> str:
    """The refusal of a model whose texts begin or end in a token without a row of the embedding."""
    return (
        f"{what}: the {field} of its tokenizer is {token!r}, and the model has no embedding for it; a token with one "
        f"is accepted; name it ({where}.{field}=...), or give this one a row ({where}.special_tokens=[{token!r}])"
    )


def tokens_beyond(known: Mapping[str, int] | None, config: object) -> list[str]:
    """The tokens that the model has no embedding for, by id: a few models have such, and no row uses them."""
    size = embeddings_of(config)
    if not known or size is None:
        return []
    return sorted((token for token, index in known.items() if index >= size), key=lambda token: known[token])


def check_tokens(
    where: str, source: Source, before: Mapping[str, int] | None, in_rows: frozenset[str], config: object
) -> dict[str, int] | None:  # fmt: skip
    """Checks the tokens that a source adds or names, and that the model has an embedding for each token.

    Args:
        where: the source, as ``sources.NAME``.
        before: token -> index, of the tokenizer's files; None: unknown yet.
        in_rows: ``tokens_in_rows``.
        config: of the model; not a mapping: unknown yet.

    Returns:
        Token -> index, with the new ones; None: unknown yet.

    Raises:
        ConfigError: training would fail at the first row with such a token.
    """
    known = with_new_tokens(before, source)
    if known is None or before is None:
        return None
    _check_new_tokens(where, source, before, embeddings_of(config))
    for name in NAMED_TOKENS:
        token = getattr(source, name)
        if token is not None and token not in known:
            raise ConfigError(
                f"{where}.{name}={token!r}: the tokenizer has no such token; a token of its vocabulary is accepted, or "
                f"a new one with a new row of the embedding: set {where}.special_tokens=[{token!r}] too"
            )
    pad = source.pad_token
    if pad is not None and pad in {*in_rows, source.eos_token, source.bos_token}:
        raise ConfigError(
            f"{where}.pad_token={pad!r}: rows have it, as the token that ends or begins a text or a turn, and "
            "transformers never trains the embedding of the pad token; a token that no row has is accepted; name a "
            "reserved one, or remove pad_token: padding is masked in any case"
        )
    size, token = embeddings_of(config), max(known, key=known.__getitem__, default="")
    if size is not None and known and known[token] >= size and not source.has_new_tokens:
        raise ConfigError(
            f"{where}.tokenizer: its token {token!r} has the id {known[token]}, and the model has {size} embeddings; a "
            "tokenizer with the model's ids is accepted; give the one that the model was trained with, or set "
            f"{where}.added_tokens=[{token!r}], which gives each of its tokens a row"
        )
    return known


def _check_new_tokens(where: str, source: Source, known: Mapping[str, int], size: int | None) -> None:
    new = [*source.added_tokens, *source.special_tokens]
    for index, token in enumerate(new):
        field = "added_tokens" if index < len(source.added_tokens) else "special_tokens"
        if not token.strip() or token in new[:index]:
            why = "is listed twice" if token in new[:index] else "is blank"
            raise ConfigError(f"{where}.{field}: {token!r} {why}; texts that differ are accepted; remove it")
        if token in known and (size is None or known[token] < size):
            raise ConfigError(
                f"{where}.{field}: the tokenizer has {token!r} already (id {known[token]}), with a row of the "
                "embedding; new tokens are accepted; remove it from the list"
            )


def check_code(name: str, path: str, config: object) -> None:
    """Checks that a model's custom code comes from its own repository.

    Raises:
        ConfigError: ``auto_map`` names another, which no revision of the source pins.
    """
    found = config.get("auto_map") if isinstance(config, Mapping) else None
    values = found.values() if isinstance(found, Mapping) else ()
    for entry in (each for value in values for each in (value if isinstance(value, list) else [value])):
        repository, separator, _ = str(entry).partition("--")
        if separator and repository != path:
            raise ConfigError(
                f"sources.{name}.trust_remote_code=true: {path} runs code of {repository}, which is not pinned to a "
                "commit; code of the source's own repository is accepted; copy the files into a repository of yours"
            )
