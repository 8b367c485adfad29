#!/usr/bin/env bash
# peft 0.21.2: target_modules=["proj"] matches a whole part of a layer's name, so that "proj" finds no "q_proj". modules_to_save matches
# the end of the name's text: ["norm"], meant as a Llama's last norm (model.norm), also trains and saves every input_layernorm and
# post_attention_layernorm. One word, two rules in one config, and no warning.
#
# Fails if modules_to_save=["norm"] trains the last norm alone, or target_modules=["proj"] finds a layer.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" -W ignore - <<'P'
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM


def adapted(**options):
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    ))
    return get_peft_model(base, LoraConfig(**options))


model = adapted(target_modules=["q_proj"], modules_to_save=["norm"])
whole = sorted(name.split(".modules_to_save")[0].removeprefix("base_model.model.model.")
               for name, each in model.named_parameters() if each.requires_grad and "lora" not in name)
print("modules_to_save=['norm'] ->", whole)
assert whole == ["layers.0.input_layernorm", "layers.0.post_attention_layernorm",
                 "layers.1.input_layernorm", "layers.1.post_attention_layernorm", "norm"], "it matches whole names now"
try:
    adapted(target_modules=["proj"])
except ValueError as error:
    print("target_modules=['proj'] ->", type(error).__name__, str(error)[:60])
else:
    raise SystemExit("target_modules matches the end of a name now")
P
# Seen: five norms of two layers; target_modules=['proj'] is refused as not found.
echo "seen as described"
