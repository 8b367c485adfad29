"""The losses of step sessions: each against plain torch, and finite where ratios overflow."""

import math

import pytest
import torch
import torch.nn.functional as F

from lineage.errors import ConfigError
from tasks.train.steps.losses import LOSSES
from tasks.train.steps.session import loss_of

OPTIONS: dict[str, dict[str, float]] = {
    "dro": {"beta": 0.05}, "robust": {"label_smoothing": 0.1}, "exo_pair": {"label_smoothing": 0.1},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}, "kto": {"kl": 0.3}, "simpo": {"gamma": 0.5},
}  # fmt: skip


def columns(log_ratio: float | None = None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probabilities (4, 6) and what the losses read; the last tokens of a row are padding."""
    generator = torch.Generator().manual_seed(0)
    logps = -3 * torch.rand(4, 6, generator=generator, dtype=torch.float64) - 0.1
    mask = torch.ones(4, 6)
    mask[0, 4:], mask[2, 2:], mask[3, 0] = 0, 0, 0
    old = logps + 0.4 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    if log_ratio is not None:
        signs = torch.tensor([1.0, -1.0]).repeat(2)[:, None]
        old = logps - signs * log_ratio
    advantages = torch.randn(4, 1, generator=generator).expand(4, 6) * mask
    found = {"weights": mask, "logprobs": old * mask, "advantages": advantages}
    return logps.float().requires_grad_(), {name: each.float() for name, each in found.items()}


def plain(name: str, lp: torch.Tensor, found: dict[str, torch.Tensor]) -> torch.Tensor:
    """The formulas of the papers, for rows 0 and 2 that are chosen, and 1 and 3 that are rejected."""
    w, q, a = found["weights"], found["logprobs"], found["advantages"]
    r = torch.exp(lp - q)
    low, high = {
        "ppo": (0.9, 1.1), "dapo": (0.8, 1.28), "gspo": (1 - 3e-4, 1 + 4e-4), "luspo": (1 - 2e-3, 1 + 2.5e-3)
    }.get(name, (0.8, 1.2))  # fmt: skip
    of_row = (w * (lp - q)).sum(1)
    length = w.sum(1)
    c, d = of_row[[0, 2]], of_row[[1, 3]]
    mean_c, mean_d = (of_row / length)[[0, 2]], (of_row / length)[[1, 3]]
    lp_sum, q_sum = (w * lp).sum(1), (w * q).sum(1)
    q_c, q_d = q_sum[[0, 2]], q_sum[[1, 3]]
    lp_c, lp_d = lp_sum[[0, 2]], lp_sum[[1, 3]]
    up, down = (lp_sum / length)[[0, 2]], (lp_sum / length)[[1, 3]]
    s = torch.sigmoid
    if name in ("ppo", "grpo", "dapo", "dr_grpo", "bnpo"):
        return -torch.minimum(r * a, r.clamp(low, high) * a).sum()
    if name in ("gspo", "luspo"):  # eq. 14: as many times the row's loss as it has tokens
        whole = torch.exp(of_row / length)
        one = a.abs().max(1).values * a.sum(1).sign()
        return -(length * torch.minimum(whole * one, whole.clamp(low, high) * one)).sum()
    if name == "sapo":
        heat = torch.where(a > 0, 1.0, 1.05)
        return -(4 / heat * s(heat * (r - 1)) * a).sum()
    if name == "vespo":
        row_a = a.sum(1, keepdim=True)
        k, lam = torch.where(row_a >= 0, 2.0, 3.0), torch.where(row_a >= 0, 3.0, 2.0)
        whole = torch.exp(of_row)[:, None].detach()
        return -(torch.exp(lam) * whole**k * torch.exp(-lam * whole) * a * lp * w).sum()
    if name == "kto":
        label = a.sum(1) / length
        return (label.abs() * (1 - s(label.sign() * 0.1 * (of_row - 0.3)))).sum()
    odds = torch.log(up.exp() / (1 - up.exp())) - torch.log(down.exp() / (1 - down.exp()))
    z = 0.1 * (c - d)
    p = torch.stack([s(z), s(-z)])
    kl_c, kl_d = (each.detach().mean().clamp(min=0) for each in (c, d))
    return {
        "cross_entropy": -(w * lp), "importance_sampling": -(r * a), "cispo": -(r.clamp(0, 4).detach() * lp * a),
        "dro": -(lp * a - 0.025 * (w * (lp - q)) ** 2),
        "dpo": -torch.log(s(z)), "hinge": F.relu(1 - z), "ipo": (mean_c - mean_d - 5) ** 2,
        "rpo": -torch.log(s(z)) - mean_c, "sigmoid_norm": -torch.log(s(0.1 * (mean_c - mean_d))),
        "robust": (-0.9 * torch.log(s(z)) + 0.1 * torch.log(s(-z))) / 0.8,
        "exo_pair": (p * (p.log() - torch.tensor([[0.9], [0.1]]).log())),
        "nca_pair": -torch.log(s(0.1 * c)) - 0.5 * torch.log(s(-0.1 * c)) - 0.5 * torch.log(s(-0.1 * d)),
        "bco_pair": -torch.log(s(0.1 * c)) - torch.log(s(-0.1 * d)), "sppo_hard": (c - 5) ** 2 + (d + 5) ** 2,
        "apo_zero": 1 - s(0.1 * c) + s(0.1 * d), "apo_down": s(0.1 * c) + 1 - s(z),
        "discopop": -torch.log(s(z)) * (1 - s(z / 0.05)) + torch.exp(-z) * s(z / 0.05),
        "simpo": -torch.log(s(2 * (up - down) - 0.5)), "orpo": -up - 0.1 * torch.log(s(odds)),
        "cpo": -torch.log(s(0.1 * (lp_c - lp_d))) - up,
        "kto_pair": 1 - (s(0.1 * (c - kl_d)) + s(0.1 * (kl_c - d))) / 2,
        "aot": -torch.log(s(0.1 * ((lp_c - lp_d).sort().values - (q_c - q_d).sort().values))),
        "aot_unpaired": -torch.log(s(0.1 * (c.sort().values - d.sort().values))),
    }[name].sum()  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_its_paper_with_the_gradients_of_autograd(name: str) -> None:
    loss, options = loss_of(name, OPTIONS.get(name))
    lp, found = columns()
    value = loss.compute(lp, found, options).sum()
    value.backward()
    own, _ = columns()
    expected = plain(name, own, found)
    expected.backward()
    assert float(value) == pytest.approx(float(expected), rel=1e-6, abs=1e-6)
    assert lp.grad is not None and bool(lp.grad.any())
    torch.testing.assert_close(lp.grad, own.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("log_ratio", [30.0, 1000.0, 1e6])
def test_a_loss_is_finite_where_the_ratio_would_overflow(name: str, log_ratio: float) -> None:
    loss, options = loss_of(name, OPTIONS.get(name))
    lp, found = columns(log_ratio)
    value = loss.compute(lp, found, options).sum()
    value.backward()
    assert math.isfinite(float(value)) and lp.grad is not None and bool(lp.grad.isfinite().all())


def test_options_that_a_loss_cannot_have_are_refused() -> None:
    for name, options, message in (
        ("dro", {}, "dro needs beta"), ("dpo", {"beta": 0.0}, "beta=0.0: a number above 0 is accepted"),
        ("robust", {"label_smoothing": 0.5}, "above 0 and below 0.5"),
        ("ppo", {"clip_low_threshold": 2.0}, "clip_low_threshold is above clip_high_threshold"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            loss_of(name, options)
