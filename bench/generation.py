"""Completions per second by the size of a batch, on this machine: python -m bench.generation.

A worker samples its whole share of a step at once. This splits the share into batches, as a probe of batch sizes would,
and takes the best of a few repetitions. The models are Llamas with random weights: one of the size that the pipeline
sft-grpo trains, and a larger one.
"""

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.train.generation.generating import Sampling
from tasks.train.generation.rollouts import sample

SHARE, GROUP, PROMPT_TOKENS = 256, 8, 13
BATCHES = (16, 32, 64, 128, 256)
REPETITIONS = 5
MODELS = {  # hidden size, layers, vocabulary, tokens of a completion
    "0.9M, 7 tokens": (128, 4, 32, 7),
    "6.9M, 64 tokens": (256, 6, 4096, 64),
}


def seconds(model: LlamaForCausalLM, batch: int, num_tokens: int) -> float:
    """Time of sampling the share in batches of this size."""
    prompts = [[1 + row // GROUP % 30] * PROMPT_TOKENS for row in range(SHARE)]
    best = float("inf")
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        for first in range(0, SHARE, batch):
            rows = range(first, first + batch)
            sample(
                model, prompts[first : first + batch], Sampling(), [*rows], max_new_tokens=num_tokens, pad_token_id=0,
                stop_tokens=[],
            )  # fmt: skip
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Prints a line per model."""
    torch.manual_seed(0)
    print(f"{torch.get_num_threads()} threads; milliseconds for {SHARE} completions, by the rows of a batch\n")
    print(f"| model | {' | '.join(map(str, BATCHES))} |\n{'|---' * (len(BATCHES) + 1)}|")
    for name, (hidden, layers, vocabulary, num_tokens) in MODELS.items():
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=4,
            vocab_size=vocabulary, max_position_embeddings=128,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        found = [f"{1000 * seconds(model, batch, num_tokens):.0f}" for batch in BATCHES]
        print(f"| {name} | {' | '.join(found)} |", flush=True)


if __name__ == "__main__":
    main()
