"""The chat templates of model families that TRL ships, each with a byte-level tokenizer that has its special tokens."""

import re
from functools import cache
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FAMILIES = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
_SPECIAL = re.compile(
    r"<\|[^|<>{}\s']+\|?>|<[^|<>{}\s']+\|>|<\uff5c[^\uff5c<>]+\uff5c>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>|\[/?INST\]"
)
# Tokens that no template means to be the end of anything.
_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# What the tokenizers of the families begin a text with, and end it with.
_BOS_AND_EOS = {
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
    "diffusion": ("<bos>", "<eos>"),
    "gemma": ("<bos>", "<eos>"),
    "glm": (None, "<|endoftext|>"),
    "gptoss": ("<|startoftext|>", "<|return|>"),
    "idefics3": ("<|begin_of_text|>", "<end_of_utterance>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "llava": ("<s>", "</s>"),
    "muse": ("<|begin_of_text|>", "<|eot|>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "smolvlm": ("<|im_start|>", "<end_of_utterance>"),
}


def template_of(family: str, *, training: bool = False) -> str | None:
    """A family's template for inference, or TRL's for training, where there is one."""
    path = TEMPLATES / f"{family}{'_training' if training else ''}.jinja"
    return path.read_text(encoding="utf-8") if path.exists() else None


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Bytes and special tokens, with the family's template."""
    template = template_of(family)
    assert template
    bos, eos = next((pair for name, pair in _BOS_AND_EOS.items() if family.startswith(name)), (None, "<|im_end|>"))
    special = sorted({*_SPECIAL.findall(template), *filter(None, (bos, eos))})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in _MARKS if mark not in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos)
    tokenizer.chat_template = template
    return tokenizer
