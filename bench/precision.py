"""Training steps of a small Llama on CPUs in fp32 and in bf16: seconds, CPU seconds, and the loss of the last step.

    python bench/precision.py [--threads 1] [--steps 10] [--rounds 3]

Both sides start from the same weights and take the same batches, 4 rows of 256 tokens, as a stage does: fp32 by
oneDNN, bf16 by autocast over weights in fp32, AdamW. They take turns, and the best of the rounds counts. On a machine
with other work look at ``cpu_seconds``.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

ROWS, LENGTH, VOCABULARY = 4, 256, 4096
PRECISIONS = ("fp32", "bf16")


def arguments() -> argparse.Namespace:
    """The command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[192, 576], help="hidden sizes")
    return parser.parse_args()


def measure(hidden_size: int, precision: str, steps: int) -> tuple[float, float, float]:
    """Seconds and CPU seconds of the steps after a first one, and the last loss."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tasks.train.kernels.machine import fast_products

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=VOCABULARY, hidden_size=hidden_size, intermediate_size=hidden_size * 8 // 3,
        num_hidden_layers=6, num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 64,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = torch.randint(0, VOCABULARY, (steps + 1, ROWS, LENGTH))
    start = start_cpu = 0.0
    with fast_products("fp32", on_gpu=False):
        for index, ids in enumerate(batches):
            if index == 1:
                start, start_cpu = time.perf_counter(), time.process_time()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return time.perf_counter() - start, time.process_time() - start_cpu, loss.item()


def main() -> None:
    """Prints a line per size."""
    args = arguments()
    import torch

    torch.set_num_threads(args.threads)
    print(f"{args.steps} steps of {ROWS} x {LENGTH} tokens, {args.threads} threads; ratios are fp32 / bf16")
    for size in args.sizes:
        found: dict[str, list[tuple[float, float, float]]] = {each: [] for each in PRECISIONS}
        for _ in range(args.rounds):
            for each, rows in found.items():
                rows.append(measure(size, each, args.steps))
        best = {each: [min(column) for column in zip(*rows, strict=True)] for each, rows in found.items()}
        line = [f"hidden {size:4}"]
        for index, name in enumerate(("seconds", "cpu_seconds")):
            left, right = (best[each][index] for each in PRECISIONS)
            line.append(f"{name} {left:.2f} / {right:.2f} = {left / right:.2f}")
        line.append("loss " + " ".join(f"{best[each][2]:.4f}" for each in PRECISIONS))
        print("   ".join(line), flush=True)


if __name__ == "__main__":
    main()
