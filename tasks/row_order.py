"""The one order in which a stage sees its rows, whatever runs it."""


def row_order(num_rows: int, num_samples: int, seed: int) -> list[int]:
    """Indices of the rows in the order of training: a fresh permutation per epoch, cut to ``num_samples``.

    It depends on nothing but its arguments, so that micro batch, accumulation and workers all split the
    same list. For the first epoch it is what transformers' Trainer draws by default
    (``SeedableRandomSampler``: epoch e is seeded with ``seed + e``), so a plain script with the same seed
    sees the same rows at the same steps.
    """
    import torch

    order: list[int] = []
    epoch = 0
    while len(order) < num_samples:
        generator = torch.Generator().manual_seed(seed + epoch)
        order += torch.randperm(num_rows, generator=generator).tolist()
        epoch += 1
    return order[:num_samples]
