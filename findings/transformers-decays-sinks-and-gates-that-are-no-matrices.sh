#!/usr/bin/env bash
# transformers 5.24.0: weight_decay of TrainingArguments pulls the attention sinks of gpt-oss, the A_log of Qwen3-Next
# and Qwen3.5, the A_log and D of Granite 4 and two norms of HyperCLOVA X towards 0.
#
# Trainer leaves a parameter out by its name (bias, layernorm, rmsnorm, norm) and by the class nn.LayerNorm, not by its
# shape. The usual rule leaves out every parameter that is no matrix. A_log at 0 is a decay of exp(-1) per step for all
# heads; a sink at 0 takes a share of attention that was trained away. The norms of HyperCLOVA X end in a digit.
#
# Fails if other parameters without two dimensions are decayed.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cd "$work"
cat > decayed.py <<'P'
import tempfile

import torch
from transformers import AutoModelForCausalLM, CONFIG_MAPPING, Trainer, TrainingArguments

EXPECTED = {
    "llama": set(),
    "gpt_oss": {"self_attn.sinks"},
    "qwen3_next": {"linear_attn.A_log"},
    "qwen3_5_text": {"linear_attn.A_log"},
    "granitemoehybrid": {"mamba.A_log", "mamba.D"},
    "hyperclovax": {"post_norm1.weight", "post_norm2.weight"},
}
arguments = TrainingArguments(tempfile.mkdtemp(), report_to="none", use_cpu=True)
trainer = Trainer(torch.nn.Linear(1, 1), arguments)
for family, expected in EXPECTED.items():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family]())
    names = trainer.get_decay_parameter_names(model)
    shapes = {name: parameter.ndim for name, parameter in model.named_parameters()}
    found = {".".join(name.split(".")[-2:]) for name in names if shapes[name] < 2}
    print(f"{family:16}", ", ".join(sorted(found)) or "matrices alone")
    assert found == expected, (family, found)
P
env/bin/python decayed.py
