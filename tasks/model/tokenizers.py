"""Tokenizers of models: loaded, compared, and copied byte for byte."""

import inspect
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import ConfigError
from lineage.secrets import first_line
from lineage.source.model_files import PROCESSOR_FILES, TOKENIZER_FILES, read_json
from lineage.source.model_source import embeddings_of, no_embedding
from tasks.model.remote_code import local_options, trusts
from tasks.recipe import Input

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILE = "tokenizer.json"
_VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


# Texts on which tokenizers of one vocabulary split apart: digits, blanks, contractions, code, scripts, combining marks.
# fmt: off
PROBE = (
    "It's 3,141 or 1234567890; WE'LL see\n\n  x = [i for i in range(2024)]\n\treturn x != 0x1F  # done!!\r\n"
    "<|a b|> camelCase HTTPServer foo_bar 12ab34 \u0661\u0662\u0663 "
    "\u00dcber e\u0301t\u00e9 \ufb01n \u4f60\u597d\uff0c\u4e16\u754c 2024\u5e74 \u0928\u092e\u0938\u094d\u0924\u0947 "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \U0001f642\U0001f469\u200d\U0001f680   end "
)
# fmt: on
_MOST_ADDED, _MOST_PIECES = 64, 2000  # in a probe: added tokens, and pieces of sentencepiece
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def tokenizer_of(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model.

    A pad token that is missing, or without an embedding, is replaced only in memory, since padding is never trained.

    Its tokens are those of ``tokenizer.json``, as it is: transformers builds other splits for some classes and model
    types. Without that file it is what the class of the tokenizer makes of its vocabulary.

    Raises:
        ConfigError: it cannot be loaded; or there is no ``tokenizer.json``, and its class is in doubt.
    """
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # for loading and saving weights: it only fills logs
    try:
        tokenizer = _of_file(directory) if _reads_file(directory) else _of_class(directory)
    except ConfigError:
        raise
    except Exception as error:  # the libraries raise various errors for JSON that is not a tokenizer
        cause = first_line(error)
        raise ConfigError(
            f"{directory}: its tokenizer cannot be loaded ({cause}); files as save_pretrained writes them are accepted"
        ) from error
    size = embeddings_of(_config(directory, "config.json")) or len(tokenizer)
    if tokenizer.pad_token is None or tokenizer.pad_token_id >= size:
        known = {token for token, index in tokenizer.get_vocab().items() if index < size}
        named = [token for token in (tokenizer.eos_token, tokenizer.unk_token) if token in known]
        tokenizer.pad_token = named[0] if named else max(known, key=tokenizer.convert_tokens_to_ids)
    return tokenizer


def require_ends(tokenizer: "PreTrainedTokenizerBase", name: str, size: int) -> None:
    """Requires that a model has an embedding for the tokens that begin and end its texts.

    Args:
        name: of the model.
        size: number of its embeddings.
    """
    for field in ("bos_token", "eos_token"):
        index = getattr(tokenizer, f"{field}_id")
        if index is not None and index >= size:
            raise ConfigError(no_embedding(name, field, str(getattr(tokenizer, field))))


def _reads_file(directory: Path) -> bool:
    """Whether ``tokenizer.json`` is the tokenizer: there is one, and no class of the model's own code reads it."""
    return (directory / _FILE).exists() and not (trusts(directory) and "auto_map" in _config(directory))


def _config(directory: Path, name: str = "tokenizer_config.json") -> Mapping[str, object]:
    found = read_json(directory, name)
    return found if isinstance(found, Mapping) else {}


def _of_file(directory: Path) -> "PreTrainedTokenizerBase":
    from transformers import TokenizersBackend

    configured = {**_config(directory, "special_tokens_map.json"), **_config(directory)}
    tokenizer: PreTrainedTokenizerBase = TokenizersBackend.from_pretrained(directory, **local_options(directory))
    if rate := getattr(tokenizer.backend_tokenizer.model, "dropout", None):
        raise ConfigError(
            f"{directory / _FILE}: its BPE has dropout={rate:g}, which draws other tokens of one text each time; one "
            'without is accepted; set "dropout" in its "model" to null'
        )
    known = tokenizer.get_vocab()
    tokenizer.add_special_tokens({
        name: token for name, token in _tokens_of_class(directory).items() if name not in configured and token in known
    })  # fmt: skip
    return tokenizer


def _tokens_of_class(directory: Path) -> dict[str, str]:
    """The special tokens that the class of a tokenizer has where no file names them."""
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    config = _config(directory, "config.json")
    name = _config(directory).get("tokenizer_class") or config.get("tokenizer_class")
    name = name or TOKENIZER_MAPPING_NAMES.get(str(config.get("model_type")))
    found = tokenizer_class_from_name(str(name).removesuffix("Fast")) if name else None
    if not isinstance(found, type):
        return {}
    parameters = inspect.signature(found).parameters
    return {each: str(parameters[each].default) for each in _NAMED if each in parameters and parameters[each].default}


def _of_class(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a directory without ``tokenizer.json``.

    Raises:
        ConfigError: the class that transformers takes for the model reads none of its files, or it splits text in
            another way than the class that ``tokenizer_config.json`` names.
    """
    from transformers import AutoTokenizer
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    ours, options = f"{directory} has no {_FILE}", local_options(directory)
    remedy = f"a directory with {_FILE} is accepted; load it with the class it was trained with, and save_pretrained"
    pieces = [name for name in _VOCABULARIES if name.endswith(".model") and (directory / name).exists()]
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory, **options)
    except (ValueError, ImportError) as error:
        if pieces and find_spec("sentencepiece") is None:
            raise ConfigError(
                f"{ours}, and {pieces[0]} may need the package sentencepiece ({str(error).partition(chr(10))[0]}); "
                f"{remedy}; or install it: pip install sentencepiece"
            ) from error
        raise
    taken = type(tokenizer)
    if taken.__module__.startswith("transformers."):
        files = set(taken.vocab_files_names.values())
        others = [name for name in _VOCABULARIES if (directory / name).exists()]
        if others and not files & set(others):
            raise ConfigError(
                f"{ours}, and transformers takes {taken.__name__} for it, which reads {', '.join(sorted(files))} and "
                f"not {', '.join(others)}; {remedy}"
            )
    named = str(_config(directory).get("tokenizer_class", "")).removesuffix("Fast")
    other: type[PreTrainedTokenizerBase] | None
    other = tokenizer_class_from_name(named) if named and named != taken.__name__ else None
    if isinstance(other, type) and other is not taken and not trusts(directory):
        configured: PreTrainedTokenizerBase = other.from_pretrained(directory, **options)
        if not _read_alike(tokenizer, configured):
            raise ConfigError(
                f"{ours}: its tokenizer_config.json names {named}, transformers takes {taken.__name__} for the model's "
                f"type, and the two make other tokens of one text; {remedy}"
            )
    for name in pieces:
        _require_pieces(directory / name, tokenizer, remedy)
    return tokenizer


def _require_pieces(file: Path, tokenizer: "PreTrainedTokenizerBase", remedy: str) -> None:
    """Requires of a class the tokens that sentencepiece makes of a text by the model's own file.

    Some classes of transformers leave out what the file says of blanks, of characters, or of its kind.

    Raises:
        ConfigError: it makes others.
    """
    if find_spec("sentencepiece") is None:
        return
    from sentencepiece import SentencePieceProcessor

    try:
        pieces = SentencePieceProcessor(model_file=str(file))
    except (RuntimeError, OSError):  # a file of tiktoken may have this name too
        return
    marked = [pieces.is_control, pieces.is_unknown, pieces.is_byte, pieces.is_unused]
    known = (each for each in range(len(pieces)) if not any(is_so(each) for is_so in marked))
    own = "".join(map(pieces.id_to_piece, islice(known, _MOST_PIECES))).replace("\u2581", " ")
    text = f"{PROBE}{own}"  # a small vocabulary has no piece of the probe
    found = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
    if found != [pieces.id_to_piece(each) for each in pieces.encode(text)]:
        raise ConfigError(
            f"{file.parent} has no {_FILE}: transformers takes {type(tokenizer).__name__} for it, which makes other "
            f"tokens of one text than sentencepiece by {file.name}; {remedy}"
        )


def _read_alike(one: "PreTrainedTokenizerBase", other: "PreTrainedTokenizerBase") -> bool:
    """Whether two tokenizers make the same tokens of a text, and of text behind their added tokens."""
    added = sorted(token.content for token in one.added_tokens_decoder.values())[:_MOST_ADDED]
    texts = [PROBE, *(f"{token}a b\n{token} c" for token in added)]
    return bool(one(texts)["input_ids"] == other(texts)["input_ids"])


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether a tokenizer puts its BOS before a text, as those of Gemma, Llama and Mistral do."""
    return tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id


def read_otherwise(directory: Path) -> str | None:
    """The class with which ``AutoTokenizer`` reads other tokens than ``tokenizer.json`` has; None: it reads the same.

    Programs that load an output by ``AutoTokenizer``, such as vLLM or verl, then read other tokens too.
    """
    from transformers import AutoTokenizer

    if not _reads_file(directory):
        return None
    name = str(_config(directory).get("tokenizer_class", AutoTokenizer.__name__))
    try:
        plain = AutoTokenizer.from_pretrained(directory, **local_options(directory))
        name = type(plain).__name__
        same = _read_alike(_of_file(directory), plain)
    except Exception:  # there is no such class, or it cannot read or encode with this vocabulary
        same = False
    return None if same else name


def require_same_tokens(policy: Input, other: Input) -> None:
    """Requires that another model has the policy's tokens under the same ids."""
    ours, theirs = (tokenizer_of(each.path).get_vocab() for each in (policy, other))
    apart = differing_tokens(theirs, ours)
    if apart:
        raise ConfigError(
            f"{policy.name} and {other.name} have different tokenizers: {len(apart)} tokens differ, such as "
            f"{apart[0]!r} ({ours.get(apart[0])} and {theirs.get(apart[0])}); use a model that was trained from the "
            f"same base as {policy.name}"
        )


def differing_tokens(vocabulary: Mapping[str, int], known: Mapping[str, int]) -> list[str]:
    """The tokens of ``known`` that are missing in a vocabulary or have another id there, sorted.

    Further tokens of the vocabulary are no difference: rows of ``known`` tokens mean the same to both models.
    """
    return sorted(token for token, index in known.items() if vocabulary.get(token) != index)


def copy_tokenizer_files(source: Path, target: Path) -> None:
    """Copies all files of the tokenizer, its chat template, and those by which a model reads images or sound."""
    for name in (*TOKENIZER_FILES, *PROCESSOR_FILES):
        path = source / name
        if path.is_dir():
            shutil.copytree(path, target / name, dirs_exist_ok=True)
        elif path.exists():
            shutil.copyfile(path, target / name)
