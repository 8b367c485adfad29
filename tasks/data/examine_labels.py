"""What of a user's rows would be trained on."""

import os
from dataclasses import replace
from pathlib import Path

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, DataError
from lineage.model_files import TOKENIZER_FILES, require_own_files, require_sound
from lineage.model_source import has_tokenizer
from lineage.peft_adapter import base_source, is_peft
from tasks.data.examine import Examined
from tasks.data.preparing.report import Labels
from tasks.data.tokens.thinking import Thinking
from tasks.recipe import Input


def fetch_tokenizer(model: str) -> Path:
    """The directory of a model's tokenizer; of a hub id it is fetched, without the weights.

    Raises:
        ConfigError: there is none.
    """
    if os.path.isdir(model):
        directory = Path(model)
        require_own_files(directory)
        require_sound(directory)
        if is_peft(directory) and not has_tokenizer(directory):
            return fetch_tokenizer(base_source("base", Source(path=model, kind=Kind.CHECKPOINT), directory).path)
        return directory
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=["config.json", *TOKENIZER_FILES]))
    except Exception as error:  # the hub's errors and its HTTP library's have no common base
        raise ConfigError(
            f"model={model}: no such directory, and the hub gave none ({type(error).__name__}: "
            f"{str(error).strip().partition(chr(10))[0]}); give a directory or a hub id"
        ) from error


def with_labels(
    found: Examined,
    tokenizer: Path,
    max_length: int | None,
    chat_template: str | None,
    thinking: Thinking | None = None,
) -> Examined:
    """The same with what of the training rows would be trained, refused where nothing would or it cannot be told.

    Args:
        max_length: in tokens, of prompt and answer, or of a prompt alone; None: the suggested one.
    """
    from tasks.data.tokens.load_or_make import load_or_make
    from tasks.data.tokens.tokenization import Tokenization
    from tasks.data.tokens.tokenized_rows import show

    lengths = found.report.lengths
    length = max_length or (lengths.suggested_max_length if lengths else None)
    if not found.num_trained or length is None:
        return found
    rows = Input(name=found.name, kind=found.kind, fingerprint="", path=found.output)
    tokenization = Tokenization(kind=found.kind, max_length=length, chat_template=chat_template, thinking=thinking)
    try:
        tokens = load_or_make(tokenization, rows, tokenizer, None, os.cpu_count() or 1)
        account = tokens.account
        labels = Labels(
            max_length=length, trained_tokens_percent=account.trained_percent if account.gets_loss else None,
            num_tokens=account.num_tokens, rows_cut=account.cut.count, prompts_cut=account.prompts_cut.count,
            rows_dropped=sum(named.count for named in account.dropped.values()), labels=account.labels,
            samples=account.samples,
        )  # fmt: skip
        found = replace(found, report=replace(found.report, labels=labels))
        show(tokens, rows, length)
    except (ConfigError, DataError) as error:
        return found.refused(error)
    return found
