#!/usr/bin/env bash
# trl 1.16.0, peft 0.21.2: DPOTrainer and RewardTrainer have disable_dropout=True by default, documented for the dropout of the model and
# of the reference. It runs after the adapter is put on, over every torch.nn.Dropout: lora_dropout=0.1 of the peft_config becomes 0, in
# silence, and adapter_config.json of the output still says 0.1. SFTTrainer has no such option and keeps the rate.
#
# Fails if DPOTrainer or RewardTrainer keeps the dropout of the adapter, or SFTTrainer does not.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 trl==1.16.0 peft==0.21.2
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" -W ignore - <<'P'
import json

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

words = ["<pad>", "</s>", "what", "is", "it", "a", "cat", "dog"]
raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>")
small = LlamaConfig(
    vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    pad_token_id=0, eos_token_id=1, num_labels=1,
)
pairs = Dataset.from_list([{"prompt": "what is it ", "chosen": "a cat", "rejected": "a dog"}] * 4)
texts = Dataset.from_list([{"text": "what is it a cat"}] * 4)
rates = {}
for name, trainer, config, model, rows in (
    ("SFT", SFTTrainer, SFTConfig, LlamaForCausalLM, texts),
    ("DPO", DPOTrainer, DPOConfig, LlamaForCausalLM, pairs),
    ("reward", RewardTrainer, RewardConfig, LlamaForSequenceClassification, pairs),
):
    task = "SEQ_CLS" if name == "reward" else "CAUSAL_LM"
    made = trainer(
        model=model(small), args=config(output_dir=name, report_to="none", use_cpu=True, bf16=False), train_dataset=rows,
        processing_class=tokenizer, peft_config=LoraConfig(lora_dropout=0.1, target_modules=["q_proj"], task_type=task),
    )
    made.save_model(name)
    saved = json.load(open(f"{name}/adapter_config.json"))["lora_dropout"]
    rates[name] = sorted({each.p for path, each in made.model.named_modules() if "lora_dropout" in path and isinstance(each, torch.nn.Dropout)})
    print(name, "dropout of the adapter:", rates[name], "as saved:", saved)
    assert saved == 0.1
assert rates == {"SFT": [0.1], "DPO": [0], "reward": [0]}, "the adapter's dropout is kept now"
P
# Seen: SFT [0.1], DPO [0], reward [0]; all three saved as 0.1.
echo "seen as described"
