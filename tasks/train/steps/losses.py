"""The losses of a session by name: sums over the tokens of rows, so that the caller normalises by its weights.

Shapes: B rows of a forward pass, of pairs P = B / 2; T tokens. Log-probabilities (B, T) are of the target tokens, in
nats; padding has weights and advantages of 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from tasks.train.losses.dpo_losses import Pairs, aot_loss, aot_unpaired_loss, kto_pair_loss
from tasks.train.losses.grpo_variants import VARIANTS
from tasks.train.losses.pair_loss import Logps

if TYPE_CHECKING:
    from torch import Tensor

Columns = Mapping[str, "Tensor"]  # (B, T) each
Options = Mapping[str, float]
WEIGHTS, LOGPROBS, ADVANTAGES = "weights", "logprobs", "advantages"
_LARGEST = 20.0  # of log-ratios, as in TRL: the exponential of a larger one overflows soon


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss.

    Args:
        about: its formula; lp is the log-probability now, q that of the sampler or the reference, r = exp(lp - q), A
            the advantage, w the weight; of pairs, d is the sum of w (lp - q) of the chosen row less that of the
            rejected one.
        paper: where it comes from.
        reads: columns that each row must have beside its target tokens.
        options: name -> default; None: it must be set.
        pairs: whether rows are pairs: the chosen one, then the rejected one.
        of_call: whether it compares each pair with all others of the call.
        compute: log-probabilities, columns, options -> the losses, whose sum is the loss.
    """

    about: str
    paper: str
    reads: tuple[str, ...]
    options: Mapping[str, float | None] = field(default_factory=dict)
    pairs: bool = False
    of_call: bool = False
    compute: "Callable[[Tensor, Columns, Options], Tensor]"


def cross_entropy(logps_BT: "Tensor", columns: Columns, _options: Options) -> "Tensor":
    """The weighted negative log-likelihood."""
    return -columns[WEIGHTS] * logps_BT


def _ratios(logps_BT: "Tensor", columns: Columns) -> "Tensor":
    return (logps_BT - columns[LOGPROBS]).clamp(-_LARGEST, _LARGEST).exp()


def importance_sampling(logps_BT: "Tensor", columns: Columns, _options: Options) -> "Tensor":
    """The policy gradient with the ratio to the sampler, not clipped."""
    return -_ratios(logps_BT, columns) * columns[ADVANTAGES]


def ppo(logps_BT: "Tensor", columns: Columns, options: Options) -> "Tensor":
    """The clipped surrogate loss, arXiv:1707.06347, eq. 7."""
    return _clipped(_ratios(logps_BT, columns), columns[ADVANTAGES], options)


def _clipped(ratios_BT: "Tensor", advantages_BT: "Tensor", options: Options) -> "Tensor":
    import torch

    clipped_BT = ratios_BT.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratios_BT * advantages_BT, clipped_BT * advantages_BT)


def cispo(logps_BT: "Tensor", columns: Columns, options: Options) -> "Tensor":
    """The policy gradient, weighted by the clipped ratio as a constant: arXiv:2506.13585, eq. 4."""
    ratios_BT = _ratios(logps_BT, columns).detach()
    clipped_BT = ratios_BT.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -clipped_BT * logps_BT * columns[ADVANTAGES]


def gspo(logps_BT: "Tensor", columns: Columns, options: Options) -> "Tensor":
    """The clipped loss with one ratio a row, of its mean log-ratio over the tokens with a weight: arXiv:2507.18071.

    Each of these tokens gets the row's loss, with the gradient of its own log-probability (eq. 14).
    """
    mask_BT = (columns[WEIGHTS] != 0).float()
    ratios_BT = (logps_BT - columns[LOGPROBS]).detach() * mask_BT
    means_B1 = ratios_BT.sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1)
    rows_BT = (means_B1.clamp(-_LARGEST, _LARGEST) + logps_BT - logps_BT.detach()).exp()
    return _clipped(rows_BT, columns[ADVANTAGES] * mask_BT, options)


def sapo(logps_BT: "Tensor", columns: Columns, options: Options) -> "Tensor":
    """A soft gate in place of the clipping: arXiv:2511.20347."""
    import torch

    advantages_BT = columns[ADVANTAGES]
    heats_BT = torch.where(advantages_BT > 0, options["temperature_pos"], options["temperature_neg"])
    gates_BT = torch.sigmoid(heats_BT * (_ratios(logps_BT, columns) - 1)) * 4 / heats_BT
    return -gates_BT * advantages_BT


def vespo(logps_BT: "Tensor", columns: Columns, options: Options) -> "Tensor":
    """The policy gradient, weighted by a function of the row's whole ratio W, as a constant: arXiv:2602.10693."""
    import torch

    mask_BT, advantages_BT = (columns[WEIGHTS] != 0).float(), columns[ADVANTAGES]
    ratios_BT = (logps_BT - columns[LOGPROBS]).detach().clamp(-_LARGEST, _LARGEST) * mask_BT
    whole_B1 = ratios_BT.sum(1, keepdim=True).clamp(-18.420680743952367, _LARGEST)  # 1e-8 at least, as in TRL
    is_good_BT = advantages_BT >= 0
    k_BT, lambda_BT = (
        torch.where(is_good_BT, options[f"{name}_pos"], options[f"{name}_neg"]) for name in ("k", "lambda")
    )
    phi_BT = (lambda_BT + k_BT * whole_B1 - lambda_BT * whole_B1.exp()).exp()
    return -phi_BT * advantages_BT * logps_BT * mask_BT


def dro(logps_BT: "Tensor", columns: Columns, options: Options) -> "Tensor":
    """Direct reward optimization: the policy gradient, and the squared log-ratio: arXiv:2405.19107, eq. 5."""
    ratios_BT = (logps_BT - columns[LOGPROBS]) * (columns[ADVANTAGES] != 0)
    return -(logps_BT * columns[ADVANTAGES] - 0.5 * options["beta"] * ratios_BT**2)


def kto(logps_BT: "Tensor", columns: Columns, options: Options) -> "Tensor":
    """The value lost by each answer, times its weight: arXiv:2402.01306, eq. 7; ``kl`` is its reference point."""
    import torch

    weights_BT = columns[WEIGHTS]
    counts_B = weights_BT.sum(1).clamp(min=1)
    labels_B = (columns[ADVANTAGES] * weights_BT).sum(1) / counts_B
    ratios_B = ((logps_BT - columns[LOGPROBS]) * weights_BT).sum(1)
    return labels_B.abs() * (1 - torch.sigmoid(labels_B.sign() * options["beta"] * (ratios_B - options["kl"])))


def _of_pairs(
    loss: "Callable[[Logps, Logps, Options], Tensor]", logps_BT: "Tensor", columns: Columns, options: Options
) -> "Tensor":
    """The losses (P) of pairs."""
    weights_BT = columns[WEIGHTS]
    sums_B, counts_B = (logps_BT * weights_BT).sum(1), weights_BT.sum(1).clamp(min=1)
    reference_B = (columns[LOGPROBS] * weights_BT).sum(1) if LOGPROBS in columns else None
    chosen, rejected = (
        Logps(
            sum_B=sums_B[at::2], num_tokens_B=counts_B[at::2],
            reference=None if reference_B is None else reference_B[at::2],
        )
        for at in (0, 1)
    )  # fmt: skip
    return loss(chosen, rejected, options)


def _preference(chosen: Logps, rejected: Logps, options: Options, *, name: str) -> "Tensor":
    """The losses of DPO, as in TRL's trainer; ``tasks/train/losses/dpo_losses.py`` names their papers."""
    import torch
    from torch.nn.functional import logsigmoid

    beta, smoothing = options["beta"], options.get("label_smoothing", 0.0)
    up_P, down_P = (beta * (each.sum_B - each.reference_sum_B) for each in (chosen, rejected))
    margin_P = up_P - down_P
    of_tokens_P = (up_P / chosen.num_tokens_B - down_P / rejected.num_tokens_B) / beta
    if name == "rpo":
        return -logsigmoid(margin_P) - options["sft_weight"] * up_P / beta / chosen.num_tokens_B
    if name == "exo_pair":
        losses = [
            torch.sigmoid(each) * (logsigmoid(each) - torch.log(torch.tensor(share)))
            for each, share in ((margin_P, 1 - smoothing), (-margin_P, smoothing))
        ]
        return losses[0] + losses[1]
    if name == "discopop":
        mix_P = torch.sigmoid(margin_P / options["tau"])
        return -logsigmoid(margin_P) * (1 - mix_P) + (-margin_P).clamp(max=_LARGEST).exp() * mix_P
    flipped_P = smoothing * logsigmoid(-margin_P)
    found: Tensor = {
        "dpo": lambda: -logsigmoid(margin_P),
        "hinge": lambda: torch.relu(1 - margin_P),
        "ipo": lambda: (of_tokens_P - 1 / (2 * beta)) ** 2,
        "sigmoid_norm": lambda: -logsigmoid(beta * of_tokens_P),
        "robust": lambda: (flipped_P - (1 - smoothing) * logsigmoid(margin_P)) / (1 - 2 * smoothing),
        "nca_pair": lambda: -logsigmoid(up_P) - (logsigmoid(-up_P) + logsigmoid(-down_P)) / 2,
        "bco_pair": lambda: -logsigmoid(up_P) - logsigmoid(-down_P),
        "sppo_hard": lambda: ((up_P - 0.5) / beta) ** 2 + ((down_P + 0.5) / beta) ** 2,
        "apo_zero": lambda: 1 - torch.sigmoid(up_P) + torch.sigmoid(down_P),
        "apo_down": lambda: torch.sigmoid(up_P) + 1 - torch.sigmoid(margin_P),
    }[name]()
    return found


def _among_all(chosen: Logps, rejected: Logps, options: Options, *, name: str) -> "Tensor":
    """The losses of DPO that compare each pair with all others of a call."""
    import torch

    policy, reference = (chosen.sum_B, rejected.sum_B), (chosen.reference_sum_B, rejected.reference_sum_B)
    pairs, beta = Pairs(policy=policy, reference=reference), options["beta"]
    call = Pairs(policy=(policy[0].detach(), policy[1].detach()), reference=reference)
    if name == "kto_pair":
        return kto_pair_loss(beta, pairs, call)
    places_P = torch.arange(len(chosen.sum_B), device=chosen.sum_B.device)
    loss = aot_loss if name == "aot" else aot_unpaired_loss
    return loss(beta, options["label_smoothing"], pairs, call, places_P)


def _without_reference(chosen: Logps, rejected: Logps, options: Options, *, name: str) -> "Tensor":
    """The loss of a method for pairs, whose own is a mean."""
    from tasks.cpo import CPO
    from tasks.orpo import ORPO
    from tasks.simpo import SimPO

    method = {"simpo": SimPO, "orpo": ORPO, "cpo": CPO}[name](**options)
    return method.loss(chosen, rejected)[0] * len(chosen.sum_B)


_RL = (LOGPROBS, ADVANTAGES)
_ROWS = (WEIGHTS, *_RL)
_TOKENS = "-min(r A, clip(r) A)"
_SEQUENCE = "-min(R A, clip(R) A), R = exp(mean(lp - q)) of the row's tokens with w"


def _bounds(name: str) -> dict[str, float | None]:
    """The clipping of a loss of GRPO."""
    variant = VARIANTS[name]  # type: ignore[index]
    return {
        "clip_low_threshold": 1 - (variant.epsilon or 0.0), "clip_high_threshold": 1 + (variant.epsilon_high or 0.0)
    }  # fmt: skip


def _pair(name: str, about: str, paper: str, *, of_call: bool = False, **options: float | None) -> Loss:
    compute = partial(_among_all if of_call else _preference, name=name)
    return Loss(
        about=about, paper=paper, reads=(WEIGHTS, LOGPROBS), pairs=True, options={"beta": 0.1, **options},
        compute=partial(_of_pairs, compute), of_call=of_call,
    )  # fmt: skip


def _plain_pair(name: str, about: str, paper: str, **options: float) -> Loss:
    compute = partial(_of_pairs, partial(_without_reference, name=name))
    return Loss(about=about, paper=paper, reads=(WEIGHTS,), pairs=True, options=options, compute=compute)


LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss(about="-w lp", paper="maximum likelihood", reads=(WEIGHTS,), compute=cross_entropy),
    "importance_sampling": Loss(
        about="-r A", paper="REINFORCE, off policy", reads=_RL, compute=importance_sampling
    ),
    "ppo": Loss(
        about=_TOKENS, paper="Schulman et al. 2017, arXiv:1707.06347", reads=_RL, compute=ppo,
        options={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    ),
    "cispo": Loss(
        about="-stop_gradient(clip(r)) lp A", paper="MiniMax 2025, arXiv:2506.13585", reads=_RL, compute=cispo,
        options={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    ),
    "dro": Loss(
        about="-(lp A - beta / 2 (lp - q)^2), where A is not 0", paper="Richemond et al. 2024, arXiv:2405.19107",
        reads=_RL, compute=dro, options={"beta": None},
    ),
    **{
        name: Loss(about=_TOKENS, paper=paper, reads=_RL, compute=ppo, options=_bounds(name))
        for name, paper in (
            ("grpo", "Shao et al. 2024, arXiv:2402.03300"), ("dapo", "Yu et al. 2025, arXiv:2503.14476"),
            ("dr_grpo", "Liu et al. 2025, arXiv:2503.20783"), ("bnpo", "as dapo, with equal bounds"),
        )
    },
    **{
        name: Loss(about=_SEQUENCE, paper=paper, reads=_ROWS, compute=gspo, options=_bounds(name))
        for name, paper in (("gspo", "Zheng et al. 2025, arXiv:2507.18071"), ("luspo", "arXiv:2602.05261"))
    },
    "sapo": Loss(
        about="-4 / t sigmoid(t (r - 1)) A", paper="arXiv:2511.20347", reads=_RL, compute=sapo,
        options={"temperature_pos": 1.0, "temperature_neg": 1.05},
    ),
    "vespo": Loss(
        about="-stop_gradient(exp(lambda) W^k exp(-lambda W)) A lp, W = product of the row's r",
        paper="arXiv:2602.10693", reads=_ROWS, compute=vespo,
        options={"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    ),
    "kto": Loss(
        about="abs(A) (1 - sigmoid(sign(A) beta (sum(w (lp - q)) - kl))), A < 0: not desirable",
        paper="Ethayarajh et al. 2024, arXiv:2402.01306", reads=_ROWS, compute=kto,
        options={"beta": 0.1, "kl": 0.0},
    ),
    "dpo": _pair("dpo", "-log sigmoid(beta d)", "Rafailov et al. 2023, arXiv:2305.18290"),
    "rpo": _pair(
        "rpo", "of dpo, and -sft_weight times the chosen row's mean lp - q", "Pang et al. 2024, arXiv:2404.19733",
        sft_weight=1.0,
    ),
    "ipo": _pair("ipo", "(d of means - 1 / (2 beta))^2", "Azar et al. 2023, arXiv:2310.12036"),
    "hinge": _pair("hinge", "max(0, 1 - beta d)", "Zhao et al. 2023, arXiv:2305.10425"),
    "robust": _pair("robust", "of dpo, for wrong labels", "arXiv:2403.00409", label_smoothing=None),
    "exo_pair": _pair("exo_pair", "KL to the labels", "arXiv:2402.00856, eq. 16", label_smoothing=None),
    "nca_pair": _pair("nca_pair", "each answer's own reward", "arXiv:2402.05369"),
    "bco_pair": _pair("bco_pair", "a classifier of both answers", "arXiv:2404.04656, without its shift"),
    "sppo_hard": _pair("sppo_hard", "squares of rewards to 1/2 and -1/2", "arXiv:2405.00675, eq. 4.7"),
    "apo_zero": _pair("apo_zero", "chosen up, rejected down", "arXiv:2408.06266, eq. 7"),
    "apo_down": _pair("apo_down", "both down, rejected more", "arXiv:2408.06266, eq. 8"),
    "discopop": _pair("discopop", "logistic and exponential, mixed", "arXiv:2406.08414, eq. 5", tau=0.05),
    "sigmoid_norm": _pair("sigmoid_norm", "-log sigmoid(beta d of means)", "Lambert et al. 2024, arXiv:2411.15124"),
    "aot": _pair(
        "aot", "-log sigmoid(beta (m - n)), of the sorted margins m of lp and n of q", "arXiv:2406.05882, section 3",
        of_call=True, label_smoothing=0.0,
    ),
    "aot_unpaired": _pair(
        "aot_unpaired", "-log sigmoid(beta (c - r)), of the sorted log-ratios of chosen and rejected rows",
        "arXiv:2406.05882, section 3", of_call=True, label_smoothing=0.0,
    ),
    "kto_pair": _pair(
        "kto_pair", "KTO of both answers, each against the mean log-ratio of the call's other ones",
        "arXiv:2402.01306, eq. 7", of_call=True,
    ),
    "simpo": _plain_pair(
        "simpo", "-log sigmoid(beta (mean lp of both rows) - gamma)", "Meng et al. 2024, arXiv:2405.14734",
        beta=2.0, gamma=1.0,
    ),
    "orpo": _plain_pair("orpo", "likelihood, and odds", "Hong et al. 2024, arXiv:2403.07691", beta=0.1),
    "cpo": _plain_pair(
        "cpo", "contrast, and likelihood", "Xu et al. 2024, arXiv:2401.08417", beta=0.1, sft_weight=1.0
    ),
}  # fmt: skip
# Of options: between these, without them.
RANGES = {
    **dict.fromkeys(("beta", "tau", "temperature_pos", "temperature_neg"), (0.0, float("inf"))),
    "label_smoothing": (0.0, 0.5),
}
