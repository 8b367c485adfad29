"""Attention of rows of different lengths on a GPU: the numbers of a CPU, and never the quadratic math kernel."""

from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from tasks.train.kernels import padding_free
from tasks.train.kernels.padding_free import collator_for, install, pack
from tests import tiny

QUICK = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
LENGTHS = [70, 130, 9]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def models(tmp_path: Path, *, packs: bool) -> list[torch.nn.Module]:
    """The same, on a CPU and on a GPU: grouped queries, heads of 8."""
    tiny.write_policy(tmp_path)
    found = [AutoModelForCausalLM.from_pretrained(tmp_path).train() for _ in range(2)]
    for model in found:
        install(model, packs=packs)
    return [found[0], found[1].cuda()]


def on(device: str, batch: dict[str, object]) -> dict[str, object]:
    return {name: each.to(device) if isinstance(each, torch.Tensor) else each for name, each in batch.items()}


@pytest.mark.parametrize("precision", DTYPES)
@pytest.mark.parametrize("layout", ["rows", "packs", "chunks"])
def test_losses_and_gradients_are_those_of_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, layout: str
) -> None:
    used, varlen = [], padding_free.varlen_attn
    monkeypatch.setattr(padding_free, "varlen_attn", lambda *args, **kwargs: used.append(1) or varlen(*args, **kwargs))
    cpu, gpu = models(tmp_path, packs=layout == "packs")
    rows = [torch.randint(3, 300, (length,), generator=torch.Generator().manual_seed(length)) for length in LENGTHS]
    if layout == "packs":
        ids = torch.cat(rows).tolist()
        batch = collator_for(cpu, lambda _: {}, packs=True)([{"input_ids": ids, "labels": ids, "seq_lengths": LENGTHS}])
    elif layout == "chunks":
        ids = rows[1].view(2, -1)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    else:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = (torch.arange(ids.shape[1]) < torch.tensor(LENGTHS).unsqueeze(1)).long()
        labels = ids.masked_fill(mask == 0, -100)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, **pack(mask)}
    losses = []
    for device, model in (("cpu", cpu), ("cuda", gpu)):
        # Nothing but these kernels is allowed: the math kernel would be an error.
        with sdpa_kernel(QUICK), torch.autocast(device, DTYPES[precision], enabled=precision == "bf16"):
            outputs = model(**on(device, batch), use_cache=False)
        outputs.log_probs.sum().backward()
        losses.append(outputs.log_probs.float().cpu())
    tolerance = {"fp32": 1e-3, "bf16": 5e-2}[precision]
    torch.testing.assert_close(losses[1], losses[0], atol=tolerance, rtol=tolerance)
    assert bool(used) == (precision == "bf16" and layout != "chunks")
    assert all(torch.isfinite(each.grad).all() for each in gpu.parameters())
