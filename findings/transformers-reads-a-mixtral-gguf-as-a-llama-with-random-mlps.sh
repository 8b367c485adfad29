#!/usr/bin/env bash
# transformers 5.24.0, gguf 0.19.0: a Mixtral in GGUF loads as a dense Llama whose MLPs are random.
#
# llama.cpp writes a Mixtral with the architecture "llama", a count of experts and stacked tensors (ffn_gate_inp, ffn_gate_exps ...).
# from_pretrained(gguf_file=...) reads the architecture, drops the count and the experts' tensors, and builds a LlamaForCausalLM: no
# error, attention and embeddings of the file, MLPs from the random generator. Two loads of one file give two models. The load report
# says that MLPs are missing; it does not name the tensors of the file that were left.
#
# Fails if the model has experts, if loading raises an error, or if two loads agree.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate==1.15.0
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - <<'P'
import numpy as np
import torch
from gguf import GGUFWriter
from transformers import AutoModelForCausalLM

hidden, ffn, heads, kv, experts, vocab = 32, 48, 4, 2, 4, 8
random = np.random.default_rng(0)
writer = GGUFWriter("mixtral.gguf", "llama")
writer.add_context_length(64)
writer.add_embedding_length(hidden)
writer.add_block_count(1)
writer.add_feed_forward_length(ffn)
writer.add_head_count(heads)
writer.add_head_count_kv(kv)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_rope_dimension_count(hidden // heads)
writer.add_vocab_size(vocab)
writer.add_expert_count(experts)
writer.add_expert_used_count(2)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("default")
writer.add_token_list(["a", "b", "c", "d", "e", "f", "g", "</s>"])
writer.add_token_types([1] * 7 + [3])
writer.add_token_merges(["a b"])
writer.add_bos_token_id(7)
writer.add_eos_token_id(7)
layer = {
    "attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (hidden, hidden), "attn_k": (kv * hidden // heads, hidden),
    "attn_v": (kv * hidden // heads, hidden), "attn_output": (hidden, hidden), "ffn_gate_inp": (experts, hidden),
    "ffn_gate_exps": (experts, ffn, hidden), "ffn_up_exps": (experts, ffn, hidden),
    "ffn_down_exps": (experts, hidden, ffn),
}
shapes = {"token_embd": (vocab, hidden), "output": (vocab, hidden), "output_norm": (hidden,)}
for name, shape in (shapes | {f"blk.0.{name}": shape for name, shape in layer.items()}).items():
    writer.add_tensor(f"{name}.weight", random.normal(size=shape).astype(np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
logits = []
for seed in (1, 2):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(".", gguf_file="mixtral.gguf")
    with torch.no_grad():
        logits.append(model(torch.tensor([[0, 1, 2]])).logits)
apart = float((logits[0] - logits[1]).abs().max())
print(type(model).__name__, "MLPs:", [name for name, _ in model.named_parameters() if "mlp" in name])
print("largest difference of the logits of two loads of one file:", apart)
assert type(model).__name__ == "LlamaForCausalLM" and not any("expert" in name for name, _ in model.named_parameters())
assert apart > 0, "two loads agree now"
P
# Seen: LlamaForCausalLM with gate_proj, up_proj and down_proj; 0.0005.
echo "seen as described"
