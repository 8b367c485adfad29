"""What begins and ends the texts of a model: outputs stop at what their answers end in, documents begin with BOS."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from lineage.artifact import Kind
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import load_or_make
from tasks.evaluate.answers import answers_of, greedy_answers, sampled_tokens
from tasks.method import Adapter
from tasks.train.generation.generating import Sampling
from tests import tiny, training
from tests.libraries.tasks.data.tokens.tokens import rows_input

# As Qwen 2.5 has it: a template of the model's own, and a newline behind the token that ends a turn.
OWN = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STEPS = {"num_steps": 1, "global_batch_size": 4}


def write_base(directory: Path) -> Path:
    """A base model: its generation stops at the end of a document, as that of Qwen2.5-0.5B does."""
    tiny.write_policy(directory, chat_template=OWN)
    GenerationConfig(eos_token_id=0).save_pretrained(directory)
    return directory


def with_bos(directory: Path) -> Path:
    """The tiny tokenizer, putting <|im_start|> before each text as Gemma's puts <bos>."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = AutoTokenizer.from_pretrained(directory)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        chat_template=tokenizer.chat_template,
    ).save_pretrained(directory)  # fmt: skip
    assert AutoTokenizer.from_pretrained(directory)("sum")["input_ids"][0] == 1
    return directory


LORA = {"adapter": Adapter(rank=2, alpha=4)}


@pytest.mark.parametrize(
    ("name", "fields"),
    [("sft", {}), ("dpo", {}), ("sft", LORA), *((name, {}) for name in training.GENERATING), ("grpo", LORA)],
)
def test_generation_of_the_output_stops_where_the_answers_end(
    tmp_path: Path, name: str, fields: dict[str, object]
) -> None:
    root = training.write_inputs(tmp_path / "inputs", num_rows=4)
    base = write_base(tmp_path / "base")
    done = training.train(training.method(name, **STEPS, **fields), root, tmp_path / "output", policy=base)
    end = AutoTokenizer.from_pretrained(done.output).convert_tokens_to_ids("<|im_end|>")
    assert end in GenerationConfig.from_pretrained(done.output).eos_token_id
    assert 0 in GenerationConfig.from_pretrained(done.output).eos_token_id  # it still stops where the base did
    assert (done.output / "chat_template.jinja").read_bytes() == (base / "chat_template.jinja").read_bytes()


@pytest.mark.parametrize("name", training.GENERATING)
def test_completions_end_with_the_turn_of_the_template(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The base has ChatML, and its files name <|endoftext|> alone; it says <|im_end|> at once."""
    root = training.write_inputs(tmp_path / "inputs", num_rows=4)
    base = write_base(tmp_path / "base")
    end = bent_towards(base, "<|im_end|>")
    longest = training.method(name).max_completion_length
    done = training.train(training.method(name, **STEPS), root, tmp_path / "output", policy=base)
    metrics = done.reports[0][1]
    assert metrics["completions/clipped_ratio"] == 0 and metrics["completions/mean_length"] < longest
    assert "clipped_ratio=1" not in caplog.text
    assert end in GenerationConfig.from_pretrained(done.output).eos_token_id


def test_answers_of_an_evaluation_end_with_the_turn_of_the_template(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    bent_towards(base, "<|im_end|>")
    tokenizer, model = AutoTokenizer.from_pretrained(base), AutoModelForCausalLM.from_pretrained(base)
    (greedy,) = greedy_answers(model, tokenizer, [[5, 6, 7]], 8, 1)
    (sampled,) = answers_of(model, tokenizer, sampled_tokens(model, tokenizer, [[5, 6, 7]], 8, 1, Sampling(), [1]))
    assert greedy.finished and sampled.finished and greedy.num_tokens == sampled.num_tokens == 0


@pytest.mark.parametrize("name", ["grpo", "ppo", "on_policy_distill"])
def test_a_first_batch_without_an_end_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    root = training.write_inputs(tmp_path / "inputs", num_rows=4)
    base = write_base(tmp_path / "base")
    bent_towards(base, "a")
    training.train(training.method(name, **{**STEPS, "num_steps": 2}), root, tmp_path / "output", policy=base)
    assert caplog.text.count("none of 4 completions ended within max_completion_length=6") == 1


def bent_towards(base: Path, token: str) -> int:
    """Makes a token nearly certain wherever the model answers, and <|endoftext|> the tokenizer's end of sequence.

    Returns:
        The token's id.
    """
    plain = AutoTokenizer.from_pretrained(base)
    PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer, pad_token="<|endoftext|>", eos_token="<|endoftext|>",
        chat_template=OWN,
    ).save_pretrained(base)  # fmt: skip
    found: int = plain.convert_tokens_to_ids(token)
    model = AutoModelForCausalLM.from_pretrained(
        base, config=AutoConfig.from_pretrained(base, tie_word_embeddings=False)
    )
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = 5.0
        model.lm_head.weight.zero_()
        model.lm_head.weight[found, 0] = 2.0
    model.save_pretrained(base)
    return found


def test_documents_begin_with_bos_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    rows = rows_input(tiny.write_rows(tmp_path / "rows", tiny.text_rows(6)))
    plain, adding = (tiny.write_tokenizer(tmp_path / name) for name in ("plain", "adding"))
    with_bos(adding)
    tokenization = Tokenization(kind=Kind.TEXT, max_length=8)
    without, found = (
        [token for ids in load_or_make(tokenization, rows, directory, None, 1).columns["input_ids"] for token in ids]
        for directory in (plain, adding)
    )
    tokenizer = AutoTokenizer.from_pretrained(adding)
    expected = [
        token
        for row in tiny.text_rows(6)
        for token in (*tokenizer(row["text"])["input_ids"], 0)  # <|endoftext|>
    ]
    assert found == expected[: len(found)]
    assert found.count(1) in (5, 6) and 1 not in without


def write_endless(directory: Path) -> Path:
    """A tokenizer of bytes and of the word None, without special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {byte: index for index, byte in enumerate(alphabet)} | {"None": len(alphabet)}
    backend = Tokenizer(models.BPE(vocab=words, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    return directory


def test_a_tokenizer_without_an_end_appends_nothing_to_documents(tmp_path: Path) -> None:
    """It once appended the token of the word None."""
    rows = rows_input(tiny.write_rows(tmp_path / "rows", tiny.text_rows(4)))
    directory = write_endless(tmp_path / "tokenizer")
    tokens = load_or_make(Tokenization(kind=Kind.TEXT, max_length=8), rows, directory, None, 1)
    text = AutoTokenizer.from_pretrained(directory).decode(
        [token for ids in tokens.columns["input_ids"] for token in ids]
    )
    joined = "".join(str(row["text"]) for row in tiny.text_rows(4))
    assert text == joined[: len(joined) // 8 * 8]
