#!/usr/bin/env bash
# trl 1.16.0: SFTTrainer logs num_tokens, the tokens of all steps so far. A training that resumes from a checkpoint counts from zero: it is
# in no file of the checkpoint. Curves over tokens fall back at each resume, while transformers' own num_input_tokens_seen, logged beside
# it, goes on.
#
# Fails if num_tokens of a resumed training is that of one without a stop.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0 trl==1.16.0
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" -W ignore - 2>/dev/null <<'P'
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

words = ["<pad>", "</s>", "what", "is", "it", "a", "cat", "dog"]
raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="</s>")
rows = Dataset.from_list([{"text": "what is it a cat"}] * 16)


def counted(resume_from):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        pad_token_id=0, eos_token_id=1,
    ))
    config = SFTConfig(
        output_dir="out", report_to="none", use_cpu=True, bf16=False, per_device_train_batch_size=2, max_steps=4, logging_steps=1,
        save_steps=2, include_num_input_tokens_seen=True, disable_tqdm=True,
    )
    trainer = SFTTrainer(model=model, args=config, train_dataset=rows, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=resume_from)
    return [(each["step"], each["num_tokens"], each["num_input_tokens_seen"]) for each in trainer.state.log_history if "loss" in each]


whole = counted(None)
resumed = counted("out/checkpoint-2")
print("step, num_tokens, num_input_tokens_seen")
print("without a stop:", whole)
print("resumed at 2:  ", resumed)
assert whole[2:] == [(3, 36.0, 36), (4, 48.0, 48)]
assert resumed[2:] == [(3, 12.0, 36), (4, 24.0, 48)], "num_tokens goes on now"
P
# Seen: (3, 36.0, 36), (4, 48.0, 48) without a stop; (3, 12.0, 36), (4, 24.0, 48) resumed.
echo "seen as described"
