"""SDPA's flash kernel beside products of all heads at once, on this CPU: python -m bench.attention.

Forward and backward of one layer, with products by oneDNN as in a training; the best of half a second.
"""

import time
from itertools import product

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS = 4096  # in all rows
HEADS, HEAD_DIM = 4, 32
LENGTHS = (16, 32, 64, 128, 256, 512, 1024)


def milliseconds(length: int, dtype: torch.dtype, kernel: SDPBackend) -> float:
    """Time of rows of so many tokens."""
    shape = (TOKENS // length, HEADS, length, HEAD_DIM)
    query, key, value = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3))
    best, start = float("inf"), time.perf_counter()
    with sdpa_kernel(kernel):
        while time.perf_counter() < start + 0.5:
            before = time.perf_counter()
            F.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
            best = min(best, time.perf_counter() - before)
    return best * 1000


def main() -> None:
    """Prints a line per dtype and length."""
    torch.set_float32_matmul_precision("medium")
    print(f"| dtype | tokens of a row | flash, ms | all at once, ms | times |\n{'|---' * 5}|")
    for dtype, length in product((torch.float32, torch.bfloat16), LENGTHS):
        flash, whole = (milliseconds(length, dtype, each) for each in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH))
        print(f"| {str(dtype)[6:]} | {length} | {flash:.1f} | {whole:.1f} | {flash / whole:.1f} |")


if __name__ == "__main__":
    main()
