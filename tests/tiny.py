"""Tiny models, tokenizers and rows for tests: built in well under a second, nothing downloaded."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.data.kinds import kind_of_columns
from tasks.model.chat_template import CHATML

Message = dict[str, str]
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEXT = "the list returns a new sorted copy of items in order while map applies function to every value and sum adds"
WORDS = _TEXT.split()

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
TEXT_SCHEMA = pa.schema([("row_id", pa.string()), ("text", pa.string())])
CONVERSATIONS_SCHEMA = pa.schema([("row_id", pa.string()), ("messages", _MESSAGES)])
PREFERENCES_SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("prompt", _MESSAGES),
        ("chosen", _MESSAGES),
        ("rejected", _MESSAGES),
        ("kind", pa.string()),
    ]
)
_SCHEMAS = (TEXT_SCHEMA, CONVERSATIONS_SCHEMA, PREFERENCES_SCHEMA)  # as an earlier version wrote them, without tools


def write_tokenizer(directory: Path, *, vocab_size: int = 300, chat_template: str | None = CHATML) -> Path:
    """Trains a byte-level BPE on a few words and saves it; pad is <|endoftext|>, eos is <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


def swap_tokens(directory: Path) -> None:
    """Two tokens of a tokenizer change places, as in a base that was made from scratch on an earlier corpus."""
    document = json.loads((directory / "tokenizer.json").read_text())
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (directory / "tokenizer.json").write_text(json.dumps(document))


def write_policy(
    directory: Path,
    *,
    hidden_size: int = 32,
    num_layers: int = 2,
    vocab_size: int = 300,
    chat_template: str | None = CHATML,
    seed: int = 0,
    initializer_range: float = 0.02,
) -> Path:
    """Saves a random Llama with its tokenizer: a directory that the auto classes load."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    write_tokenizer(directory, vocab_size=vocab_size, chat_template=chat_template)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=initializer_range,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def sentence(index: int, length: int) -> str:
    """``length`` words, different for every index, the same in every run."""
    return " ".join(WORDS[(index * 7 + place * (index % 5 + 1)) % len(WORDS)] for place in range(length))


def text_rows(count: int) -> list[dict[str, object]]:
    return [{"row_id": f"t{i}", "text": sentence(i, 10 + i % 9)} for i in range(count)]


def conversation_rows(count: int) -> list[dict[str, object]]:
    """One question and one answer each, of different lengths."""
    return [
        {
            "row_id": f"c{i}",
            "messages": [
                {"role": "user", "content": sentence(i, 3 + i % 4)},
                {"role": "assistant", "content": sentence(i + 1, 2 + i % 7)},
            ],
        }
        for i in range(count)
    ]


def preference_rows(count: int) -> list[dict[str, object]]:
    """Chosen and rejected differ in length and words; two kinds."""
    return [
        {
            "row_id": f"p{i}",
            "prompt": [{"role": "user", "content": sentence(i, 3 + i % 4)}],
            "chosen": [{"role": "assistant", "content": sentence(i + 1, 4 + i % 5)}],
            "rejected": [{"role": "assistant", "content": sentence(i + 2, 1 + i % 6)}],
            "kind": ("cut", "wrong")[i % 2],
        }
        for i in range(count)
    ]


def unpaired_rows(count: int) -> list[dict[str, object]]:
    """One answer each; every third is undesirable."""
    return [
        {
            "row_id": f"u{i}",
            "prompt": [{"role": "user", "content": sentence(i, 3 + i % 4)}],
            "completion": [{"role": "assistant", "content": sentence(i + 1, 2 + i % 5)}],
            "label": i % 3 != 0,
        }
        for i in range(count)
    ]


def prompt_rows(count: int) -> list[dict[str, object]]:
    """Every second one has an answer for a reward function."""
    return [
        {
            "row_id": f"q{i}",
            "prompt": [{"role": "user", "content": sentence(i, 3 + i % 4)}],
            "columns": None if i % 2 else f'{{"answer": {i}}}',
        }
        for i in range(count)
    ]


def write_rows(directory: Path, train: Sequence[dict[str, object]], held_out: Sequence[dict[str, object]] = ()) -> Path:
    """Writes an artifact's ``train.parquet`` and ``held_out.parquet``; the schema follows from the first row."""
    schema = next((schema for schema in _SCHEMAS if set(schema.names) == set(train[0])), None)
    schema = schema or kind_of_columns(list(train[0])).schema
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(train), schema=schema), directory / "train.parquet")
    pq.write_table(pa.Table.from_pylist(list(held_out), schema=schema), directory / "held_out.parquet")
    return directory
