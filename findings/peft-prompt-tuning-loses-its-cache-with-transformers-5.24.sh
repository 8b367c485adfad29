#!/usr/bin/env bash
# peft 0.21.2, transformers 5.24.0, torch 2.13.0: a model with prompt tuning or prefix tuning generates other text than
# its own forward gives, without an error.
#
# transformers 5.24 calls the argument `cache` that was `past_key_values`. PEFT 0.21.2 looks for `past_key_values` among
# the inputs of a generation step, never finds it, takes each step for the first one and puts the virtual tokens in
# again. pip installs the pair; transformers asks for peft>=0.22 only in methods such as `add_adapter`. LoRA is right.
#
# Fails if greedy generation agrees with one forward a token for prompt tuning, or if it no longer does for LoRA.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 numpy transformers==5.24.0 peft==0.21.2
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - <<'P'
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
PROMPT = torch.tensor([[5, 9, 12, 3]])
agrees = {}
for config in (LoraConfig(task_type="CAUSAL_LM"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)):
    torch.manual_seed(0)
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), config).eval()
    for each in model.parameters():
        if each.requires_grad:
            torch.nn.init.normal_(each)
    found = model.generate(
        input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, do_sample=False, pad_token_id=0,
        eos_token_id=63,
    )[0, 4:].tolist()  # fmt: skip
    ids = PROMPT
    with torch.no_grad():
        for _ in found:
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    agrees[type(config).__name__] = found == ids[0, 4:].tolist()
    print(type(config).__name__, "generate:", found, "one forward a token:", ids[0, 4:].tolist())
assert agrees == {"LoraConfig": True, "PromptTuningConfig": False}, agrees
P
# Seen: the eight tokens of LoRA are equal; of those of prompt tuning all but the first differ.
echo "seen as described"
