"""Tokenizers of models: loaded, compared, and copied byte for byte."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import ConfigError
from lineage.model_files import TOKENIZER_FILES
from tasks.recipe import Input
from tasks.remote_code import local_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_of(directory: Path) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model; a missing pad token is set only in memory, since padding is never trained."""
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # for loading and saving weights: it only fills logs
    tokenizer: PreTrainedTokenizerBase
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, **local_options(directory))
    except Exception as error:  # the libraries raise various errors for JSON that is not a tokenizer
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(
            f"{directory}: its tokenizer cannot be loaded ({said}); files as save_pretrained writes them are accepted"
        ) from error
    if tokenizer.pad_token is None:
        rarest = tokenizer.convert_ids_to_tokens(max(tokenizer.get_vocab().values()))
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token or rarest
    return tokenizer


def require_same_tokens(policy: Input, other: Input) -> None:
    """Requires that another model has the policy's tokens under the same ids.

    Raises:
        ConfigError: their tokenizers differ, naming a token.
    """
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
    """Copies all files of the tokenizer and its chat template."""
    for name in TOKENIZER_FILES:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, target / name, dirs_exist_ok=True)
        elif path.exists():
            shutil.copyfile(path, target / name)
