"""torch's SDPA with products of oneDNN beside the attention of a training, on this CPU: python -m bench.attention.

Forward and backward of one layer; CPU milliseconds, the best of half a second. In fp32 the two differ by MKL, in bf16
by all heads at once.
"""

import time
from itertools import product

import torch

from tasks.train.kernels.machine import F, fast_products, sdpa_of_cpu

TOKENS = 4096  # in all rows
HEADS, HEAD_DIM = 4, 64
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
SDPA = F.scaled_dot_product_attention


def milliseconds(length: int, dtype: torch.dtype, *, as_trained: bool) -> float:
    """Time of rows of so many tokens."""
    shape = (TOKENS // length, HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    sdpa = sdpa_of_cpu if as_trained else SDPA
    best, start = float("inf"), time.process_time()
    while time.process_time() < start + 0.5:
        before = time.process_time()
        sdpa(query, key, value, is_causal=True).sum().backward()
        best = min(best, time.process_time() - before)
    return best * 1000


def main() -> None:
    """Prints a line per dtype and length."""
    print(f"| dtype | tokens of a row | oneDNN, ms | as trained, ms | times |\n{'|---' * 5}|")
    with fast_products("bf16", on_gpu=False):
        for dtype, length in product((torch.float32, torch.bfloat16), LENGTHS):
            onednn, own = (milliseconds(length, dtype, as_trained=each) for each in (False, True))
            print(f"| {str(dtype)[6:]} | {length} | {onednn:.1f} | {own:.1f} | {onednn / own:.1f} |")


if __name__ == "__main__":
    main()
