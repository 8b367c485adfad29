#!/usr/bin/env bash
# peft 0.21.2: target_modules="all-linear" is all linear layers but the head. Who also wants the head writes
# target_modules=["all-linear", "lm_head"]: in a list the word is the name of a layer, no layer has it, and "lm_head" is found. The
# adapter is on the head alone, without a warning: a name of a list that matches nothing is only an error where no other matches.
#
# Fails if the list reaches another layer than the head, warns, or is refused.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - <<'P'
import warnings

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

reached, said = {}, {}
for targets in ("all-linear", ("all-linear", "lm_head")):
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False,
    ))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = get_peft_model(base, LoraConfig(target_modules=targets if isinstance(targets, str) else list(targets)))
    reached[targets] = sorted({name.split(".lora_A")[0].split(".")[-1] for name, _ in model.named_parameters() if ".lora_A" in name})
    said[targets] = [str(each.message) for each in caught if "target" in str(each.message) or "all-linear" in str(each.message)]
    print(targets, "->", reached[targets], said[targets])
assert len(reached["all-linear"]) == 7 and "lm_head" not in reached["all-linear"]
assert reached[("all-linear", "lm_head")] == ["lm_head"] and not said[("all-linear", "lm_head")], "the list is read in another way now"
P
# Seen: all-linear -> seven layers; the list -> ['lm_head'], no warning.
echo "seen as described"
