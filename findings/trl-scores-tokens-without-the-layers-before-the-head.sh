#!/usr/bin/env bash
# trl 1.16.0, transformers 5.24.0: the log-probabilities of SFTTrainer, DPOTrainer and GRPOTrainer leave out what a model's forward does
# between its last hidden states and the weights of its head.
#
# add_fused_lm_head multiplies the backbone's last hidden states with get_output_embeddings().weight, and reads some names of a factor or
# a cap from the config. ModernBertDecoderForCausalLM (the decoders of ettin) has a dense layer and a norm before these weights, and
# RecurrentGemmaForCausalLM caps its logits by logits_soft_cap, which is not among the names. The loss is that of another model, the
# layers get no gradient, and nothing says so.
#
# Fails if the fused log-probabilities of either are those of the model's own forward, or if those of a Llama are not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 trl==1.16.0
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - <<'P'
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

small = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3,
}
ids = torch.arange(5, 17)[None]
apart = {}
for name in ("llama", "modernbert-decoder", "recurrent_gemma"):
    known = AutoConfig.for_model(name).to_dict()
    config = AutoConfig.for_model(name, **{key: value for key, value in small.items() if key in known})
    if name == "recurrent_gemma":
        config.logits_soft_cap = 0.05  # so small that random weights reach it
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    rows = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    with torch.no_grad():
        own = model(**rows).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
        add_fused_lm_head(model)
        fused = model(**rows, labels=ids, fused_lm_head=True).log_probs
    apart[name] = float((own - fused).abs().max())
    print(name, "largest difference of a log-probability:", apart[name])
assert apart["llama"] < 1e-4
assert min(apart["modernbert-decoder"], apart["recurrent_gemma"]) > 0.05, "they agree now"
P
# Seen: llama 0.0000005, modernbert-decoder 4.4, recurrent_gemma 0.34.
echo "seen as described"
