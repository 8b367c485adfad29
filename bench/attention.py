"""SDPA with products of oneDNN beside those of MKL, on this CPU: python -m bench.attention.

Forward and backward of one layer, as in a training; the best of half a second.
"""

import time
from itertools import product

import torch

from tasks.train.kernels.machine import F, fast_products, sdpa_by_mkl

TOKENS = 4096  # in all rows
HEADS, HEAD_DIM = 4, 32
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)
SDPA = F.scaled_dot_product_attention


def milliseconds(length: int, dtype: torch.dtype, *, by_mkl: bool) -> float:
    """Time of rows of so many tokens."""
    shape = (TOKENS // length, HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    sdpa = sdpa_by_mkl if by_mkl else SDPA
    best, start = float("inf"), time.perf_counter()
    while time.perf_counter() < start + 0.5:
        before = time.perf_counter()
        sdpa(query, key, value, is_causal=True).sum().backward()
        best = min(best, time.perf_counter() - before)
    return best * 1000


def main() -> None:
    """Prints a line per dtype and length."""
    print(f"| dtype | tokens of a row | oneDNN, ms | MKL, ms | times |\n{'|---' * 5}|")
    with fast_products(on_gpu=False):
        for dtype, length in product((torch.float32, torch.bfloat16), LENGTHS):
            onednn, mkl = (milliseconds(length, dtype, by_mkl=each) for each in (False, True))
            print(f"| {str(dtype)[6:]} | {length} | {onednn:.1f} | {mkl:.1f} | {onednn / mkl:.1f} |")


if __name__ == "__main__":
    main()
