#!/usr/bin/env bash
# transformers 5.23.0, tokenizers 0.23.3: AutoTokenizer does not always split text as tokenizer.json says.
#
# A directory holds a tokenizer.json whose pre-tokenizer keeps the digits of a number together, and a tokenizer_config.json that names
# the generic class PreTrainedTokenizerFast. Beside a config.json of model_type llama, AutoTokenizer encodes as the file
# does. Beside one of model_type qwen2, the same two files load as Qwen2Tokenizer, whose own pre-tokenizer replaces the
# file's: other tokens, without a warning. Whoever trains another body under that model_type trains on tokens that no
# other reader of tokenizer.json (vLLM's Rust path, text-generation-inference, tokenizers itself) will make.
#
# Fails if the two model types give equal tokens, or if the llama one no longer follows the file.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q transformers==5.23.0 tokenizers==0.23.3
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - <<'P'
import json, pathlib
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {each: index for index, each in enumerate([*alphabet, "12", "<end>"])}
plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[("1", "2")]))
plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # keeps the digits of a number together
plain.add_special_tokens(["<end>"])
found = {}
for kind in ("llama", "qwen2"):
    folder = pathlib.Path(kind)
    folder.mkdir()
    plain.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<end>"})
    )
    loaded = AutoTokenizer.from_pretrained(folder)
    found[kind] = loaded("12", add_special_tokens=False)["input_ids"]
    print(kind, type(loaded).__name__, found[kind], "file:", plain.encode("12", add_special_tokens=False).ids)
assert found["llama"] == plain.encode("12", add_special_tokens=False).ids
assert found["qwen2"] != found["llama"], "the two agree now"
P
# Seen: llama gives the one token of "12" that the file gives; qwen2 gives two, one for each digit.
echo "seen as described"
