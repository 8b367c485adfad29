#!/usr/bin/env bash
# peft 0.21.2: OFTConfig takes module_dropout ("the multiplicative dropout probability, by setting OFT blocks to identity during
# training"), and its layers build a module for it, which no forward calls. A training with module_dropout=1.0 has all blocks all the
# time, and nothing says so. BOFT's boft_dropout and LoRA's lora_dropout change each forward of a training, as they should.
#
# Fails if two forwards in training mode differ with OFT, or do not differ with LoRA.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" -W ignore - <<'P'
import torch
from peft import LoraConfig, OFTConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

ids = torch.arange(5, 17)[None]
changes = {}
for config in (
    OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj", "v_proj"], module_dropout=1.0, init_weights=False),
    LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.9, init_lora_weights=False),
):
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    ))
    model = get_peft_model(base, config)
    with torch.no_grad():
        evaluated = model.eval()(input_ids=ids).logits
        first, second = (model.train()(input_ids=ids).logits for _ in range(2))
        with model.disable_adapter():
            plain = model.eval()(input_ids=ids).logits
    changes[type(config).__name__] = [float((one - other).abs().max()) for one, other in (
        (evaluated, plain), (first, second), (first, evaluated),
    )]
    print(type(config).__name__, "adapter on and off, two training forwards, training and evaluation:", changes[type(config).__name__])
assert changes["OFTConfig"][0] > 1e-3 and changes["OFTConfig"][1:] == [0.0, 0.0], "OFT's dropout drops something now"
assert min(changes["LoraConfig"]) > 1e-3
P
# Seen: OFT 0.11 with and without the adapter, and 0.0 between training forwards; LoRA differs in all three.
echo "seen as described"
