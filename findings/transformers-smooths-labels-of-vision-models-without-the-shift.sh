#!/usr/bin/env bash
# transformers 5.24.0: with label_smoothing_factor, Trainer compares the logits of a vision language model with the token
# that it has just read, not with the next one. LlavaForConditionalGeneration learns to repeat its input.
#
# Trainer shifts the labels where the class is one of AutoModelForCausalLM. The classes of AutoModelForImageTextToText
# that are not (Llava, Qwen2.5-VL, Qwen3-VL, Qwen3.5, Mistral 3, Llama 4, Mllama ...) predict the next token as well, and
# without label smoothing their own loss shifts. Nothing is said; the loss falls faster than it should.
#
# Fails if the loss of a tiny Llava is compared with the right token, or that of a Llama is not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
cd "$work"
cat > train.py <<'P'
import torch
from torch.nn.functional import cross_entropy
from transformers import (
    CLIPVisionConfig, LlamaConfig, LlamaForCausalLM, LlavaConfig, LlavaForConditionalGeneration, Trainer,
    TrainingArguments,
)

tiny = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
text = LlamaConfig(vocab_size=64, **tiny, num_key_value_heads=2, pad_token_id=0)
vision = CLIPVisionConfig(**tiny, image_size=16, patch_size=8, projection_dim=32)
torch.manual_seed(0)
rows = torch.randint(1, 60, (4, 12))
llava = LlavaConfig(vision_config=vision, text_config=text, image_token_index=63)
for model in (LlamaForCausalLM(text), LlavaForConditionalGeneration(llava)):
    losses = {}
    for factor in (0.0, 1e-6):
        arguments = TrainingArguments("out", label_smoothing_factor=factor, use_cpu=True, report_to="none")
        trainer = Trainer(model, arguments)
        batch = {"input_ids": rows, "attention_mask": torch.ones_like(rows), "labels": rows.clone()}
        losses[factor] = trainer.compute_loss(model.eval(), batch).item()
    logits = model(input_ids=rows).logits
    following = cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
    same = cross_entropy(logits.flatten(0, 1), rows.flatten()).item()
    name = type(model).__name__
    print(f"{name}: loss {losses[0.0]:.4f}, smoothed by 1e-6 {losses[1e-6]:.4f}; next token {following:.4f}, same {same:.4f}")
    assert abs(following - same) > 1e-3 and abs(losses[0.0] - following) < 1e-4
    expected = following if name == "LlamaForCausalLM" else same
    assert abs(losses[1e-6] - expected) < 1e-4, (name, losses, following, same)
P
env/bin/python train.py
