"""Training steps on rows of different lengths, packed and one by one: wall time, peak memory, slots per token.

    make bench    # or: python bench/packing.py [--rows 160] [--rounds 3] [--device cuda]

The same rows, once as packs of ``max_length`` tokens (packing=best_fit) and once in micro batches of as many tokens on
average, collated and run as an SFT stage does: forward and backward, no optimizer. Each measurement is a process of
its own; the sides take turns, and the best of the rounds counts. ``llama`` trains without padding either way;
``gemma3_text`` (sliding windows) and ``qwen2_moe`` pad rows that are not packed. Row lengths are log-normal with a
median of 150 tokens. On a machine with other work look at ``cpu_seconds``. Peak memory is what comes on top of
libraries and weights.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from tasks.train.kernels.padding_free import Example

MAX_LENGTH, VOCABULARY, MEDIAN, SPREAD = 1024, 4096, 150, 0.9
MODELS = ("llama", "gemma3_text", "qwen2_moe")


def arguments() -> argparse.Namespace:
    """Arguments of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)  # of the process that measures
    return parser.parse_args()


def rows(count: int) -> "list[Example]":
    """Random tokens; the first half of each is a prompt."""
    import torch

    generator = torch.Generator().manual_seed(0)
    lengths = (MEDIAN * (SPREAD * torch.randn(count, generator=generator)).exp()).long().clamp(16, MAX_LENGTH)
    found = []
    for length in lengths.tolist():
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        found.append({"input_ids": ids, "labels": [-100] * (length // 2) + ids[length // 2 :]})
    return found


def packs(examples: "list[Example]") -> "list[Example]":
    """As an SFT stage stores them."""
    from datasets import Dataset
    from datasets.arrow_writer import ArrowWriter

    from tasks.data.tokens.tokenization import pack

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.arrow"
        with ArrowWriter(path=str(path)) as writer:
            for example in examples:
                writer.write(example)
            writer.finalize()
        pack(path, MAX_LENGTH)
        found: list[Example] = Dataset.from_file(str(path)).to_list()
    return found


def measure(architecture: str, is_packed: bool, count: int, device: str) -> dict[str, float]:
    """One pass over the rows, after a step that is not timed."""
    import psutil
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
    from trl.trainer.utils import add_fused_lm_head

    from tasks.train.kernels.padding_free import collator_for, install

    config = AutoConfig.for_model(
        architecture, vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=6, head_dim=32,
        num_attention_heads=8, num_key_value_heads=4, sliding_window=128 if architecture == "gemma3_text" else None,
        moe_intermediate_size=352, shared_expert_intermediate_size=352, num_experts=4, num_experts_per_tok=2,
        max_position_embeddings=MAX_LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(device).train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))  # as TRL's trainer does
    install(model, packs=is_packed)
    collate = collator_for(model, DataCollatorForLanguageModeling(0), packs=is_packed)
    examples = rows(count)
    num_tokens = sum(len(example["input_ids"]) for example in examples)
    size = 1 if is_packed else max(1, round(MAX_LENGTH / (num_tokens / count)))
    if is_packed:
        examples = packs(examples)
    batches = [collate(examples[start : start + size]) for start in range(0, len(examples), size)]

    def step(batch: dict[str, object]) -> None:
        sent = {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()}
        (-model(**sent, fused_lm_head=True, use_cache=False).log_probs.sum()).backward()

    loaded = torch.cuda.memory_allocated() if device == "cuda" else psutil.Process().memory_info().rss
    step(batches[0])
    start, start_cpu = time.perf_counter(), time.process_time()
    for batch in batches:
        step(batch)
    if device == "cuda":
        torch.cuda.synchronize()
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
    on_gpu = device == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    slots = sum(batch["token_index" if "token_index" in batch else "input_ids"].numel() for batch in batches)
    peak -= loaded
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_mib": peak / 2**20,
        "slots_per_token": slots / num_tokens,
    }


def main() -> None:
    """Prints a line per model."""
    args = arguments()
    if args.case:
        architecture, side = args.case
        print(json.dumps(measure(architecture, side == "packed", args.rows, args.device)))
        return
    print(f"{args.rows} rows, packs of {MAX_LENGTH} tokens, {args.device}; ratios are packed / one by one")
    for architecture in MODELS:
        found: dict[str, list[dict[str, float]]] = {"packed": [], "rows": []}
        for _ in range(args.rounds):
            for side, results in found.items():
                words = ["--rows", str(args.rows), "--device", args.device, "--case", architecture, side]
                command = [sys.executable, __file__, *words]
                output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                results.append(json.loads(output.stdout.splitlines()[-1]))
        line = [f"{architecture:12}"]
        for name in found["rows"][0]:
            packed, alone = (min(each[name] for each in found[side]) for side in ("packed", "rows"))
            line.append(f"{name} {packed:.4g} / {alone:.4g} = {packed / alone:.2f}")
        print("   ".join(line), flush=True)


if __name__ == "__main__":
    main()
