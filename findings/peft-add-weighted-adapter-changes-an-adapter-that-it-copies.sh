#!/usr/bin/env bash
# peft 0.21.2: add_weighted_adapter(["a"], [1.0], "copy", combination_type="linear") of a plain LoRA gives the same model. It combines the
# matrices A and B alone, and takes the config of the first adapter: with use_rslora=True their scale is in the matrices and is applied
# again, by sqrt(rank); the magnitudes of DoRA, the bias of lora_bias=True and the copies of modules_to_save start anew. No warning.
# bias="all" is refused with a sentence, so a mix that is accepted looks like one that is right.
#
# Fails if the copy of a plain LoRA is another model, or the copy of one of the four is the same.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 peft==0.21.2
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - <<'P'
import warnings

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

ids = torch.arange(5, 17)[None]
apart = {}
for name, options in {
    "plain": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}, "lora_bias": {"lora_bias": True},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
}.items():
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False, attention_bias=True,
    ))
    config = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False, **options)
    model = get_peft_model(base, config, adapter_name="a").eval()
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in model.parameters():
            if each.requires_grad:  # as a training would
                each.add_(torch.randn_like(each) * 0.1)
        one = model(input_ids=ids).logits
        model.add_weighted_adapter(["a"], [1.0], "copy", combination_type="linear")
        model.set_adapter("copy")
        apart[name] = float((model(input_ids=ids).logits - one).abs().max())
    print(name, "largest difference of a logit:", apart[name], [str(each.message)[:60] for each in caught])
assert apart.pop("plain") < 1e-5
assert min(apart.values()) > 0.01, "a copy is the same model now"
P
# Seen: plain 0.0, rslora 0.06, dora 0.13, lora_bias 0.32, modules_to_save 1.9; no warnings.
echo "seen as described"
