#!/bin/sh
# xllamacpp 2026.10.11549 (llama.cpp), gguf 0.19.0. A GGUF file may say beta_fast and beta_slow of YaRN
# (llama.rope.scaling.yarn_beta_fast, for which gguf has a writer), and llama.cpp has a name for the key; but its loader of
# the architecture llama does not read it. A model whose config.json sets them is another one in llama.cpp, without a
# message. Here two files differ in these keys alone, and give the same log-probabilities; set by the program
# (--yarn-beta-fast), the same values change them. Fails if the file's keys change anything.
# Seen: -9.99279, -9.99279, -9.78971.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet xllamacpp==2026.10.11549 gguf==0.19.0 numpy
cat > "$folder/write.py" <<'PY'
import sys

import gguf
import numpy as np

path, betas = sys.argv[1], [float(each) for each in sys.argv[2:]]
size, heads, layers, inner, words = 64, 2, 2, 128, 300
writer = gguf.GGUFWriter(path, "llama")
writer.add_context_length(512)
writer.add_embedding_length(size)
writer.add_block_count(layers)
writer.add_feed_forward_length(inner)
writer.add_head_count(heads)
writer.add_head_count_kv(heads)
writer.add_rope_dimension_count(size // heads)
writer.add_layer_norm_rms_eps(1e-5)
writer.add_vocab_size(words)
writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
writer.add_rope_scaling_factor(8.0)
writer.add_rope_scaling_orig_ctx_len(64)
if betas:
    writer.add_rope_scaling_yarn_beta_fast(betas[0])
    writer.add_rope_scaling_yarn_beta_slow(betas[1])
tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
tokens += [f"w{number}" for number in range(words - len(tokens))]
writer.add_tokenizer_model("llama")
writer.add_tokenizer_pre("default")
writer.add_token_list(tokens)
writer.add_token_scores([-float(number) for number in range(words)])
writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * (words - 259)])
writer.add_bos_token_id(1)
writer.add_eos_token_id(2)
random = np.random.default_rng(0)
matrices = {"attn_q": (size, size), "attn_k": (size, size), "attn_v": (size, size), "attn_output": (size, size),
            "ffn_gate": (inner, size), "ffn_up": (inner, size), "ffn_down": (size, inner)}
for name in ("token_embd", "output"):
    writer.add_tensor(f"{name}.weight", random.normal(0, 0.3, (words, size)).astype(np.float32))
writer.add_tensor("output_norm.weight", np.ones(size, np.float32))
for layer in range(layers):
    for name, shape in matrices.items():
        writer.add_tensor(f"blk.{layer}.{name}.weight", random.normal(0, 0.3, shape).astype(np.float32))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(size, np.float32))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
PY
cat > "$folder/read.py" <<'PY'
import sys

import xllamacpp

settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = sys.argv[1], 256, 1, False
if sys.argv[2:]:
    settings.yarn_beta_fast, settings.yarn_beta_slow = float(sys.argv[2]), float(sys.argv[3])
server = xllamacpp.Server(settings)
asked = {"prompt": list(range(260, 299)), "max_tokens": 1, "temperature": 0, "logprobs": 1, "logit_bias": [[270, 60]]}
told = server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["logprob"]
print(f"\nlogprob {told:.5f}")
PY
logprob() { "$folder/env/bin/python" "$folder/read.py" "$@" 2> "$folder/err" | sed -n 's/^logprob //p'; }
"$folder/env/bin/python" "$folder/write.py" "$folder/plain.gguf"
"$folder/env/bin/python" "$folder/write.py" "$folder/betas.gguf" 16 2
plain=$(logprob "$folder/plain.gguf")
betas=$(logprob "$folder/betas.gguf")
set_here=$(logprob "$folder/plain.gguf" 16 2)
echo "without the keys $plain, with beta_fast 16 and beta_slow 2 in the file $betas, set by the program $set_here"
test -n "$plain" && test "$plain" = "$betas" && test "$plain" != "$set_here"
