"""Options of DPO that change nothing, or that cannot go together, are refused; ``loss_type`` keeps its fingerprint."""

import pytest

from lineage.errors import ConfigError
from lineage.fingerprint import fingerprint
from tasks.dpo import DPO
from tasks.method import Adapter, Validation
from tasks.train.best import Best
from tasks.train.losses.dpo_losses import LOSSES, ReferenceSync


def test_a_dpo_without_the_new_options_keeps_its_fingerprint() -> None:
    """Recorded before they were added."""
    assert fingerprint(DPO(num_steps=3).recipe(), {}).startswith("ddca5c303003765e")
    fields = {"too_long": "drop", "max_prompt_length": 9, "thinking": "drop", "global_batch_size": 8, "max_length": 77}
    assert fingerprint(DPO(num_steps=3, **fields).recipe(), {}).startswith("7932fc1856bef900")


def test_every_option_is_identity() -> None:
    options = [
        {"loss_type": "aot"}, {"losses": {"sigmoid": 1.0, "sft": 1.0}}, {"losses": {"sigmoid": 1.0, "sft": 0.5}},
        {"loss_type": "robust", "label_smoothing": 0.1}, {"loss_type": "robust", "label_smoothing": 0.2},
        {"loss_type": "discopop"}, {"loss_type": "discopop", "discopop_tau": 0.1}, {"f_divergence": "forward_kl"},
        {"f_divergence": "alpha_divergence"}, {"f_divergence": "alpha_divergence", "f_alpha": 0.3}, {"ld_alpha": 0.0},
        {"ld_alpha": 0.5}, {"weighting": "wpo"}, {"reference_sync": ReferenceSync()},
        {"reference_sync": ReferenceSync(every_steps=7)}, {"reference_sync": ReferenceSync(mixup_alpha=1.0)}, {},
    ]  # fmt: skip
    assert len({fingerprint(DPO(**each).recipe(), {}) for each in options}) == len(options)
    one, other = ({"sft": 0.5, "sigmoid": 1.0}, {"sigmoid": 1.0, "sft": 0.5})  # the order of keys is no option
    assert fingerprint(DPO(losses=one).recipe(), {}) == fingerprint(DPO(losses=other).recipe(), {})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"losses": {"sigmoid": 1.0, "sft": 1.0}, "loss_type": "ipo"}, "losses holds all of them; set loss_type=sig"),
        ({"losses": {"sigmoid": 2.0}}, "it adds up two losses or more"),
        ({"losses": {}}, "it adds up two losses or more"),
        ({"label_smoothing": 0.1}, "label_smoothing=0.1 with loss sigmoid: robust, exo_pair, aot, aot_unpaired read"),
        ({"discopop_tau": 0.1}, "discopop_tau=0.1 with loss sigmoid: discopop read it"),
        ({"loss_type": "robust"}, "loss_type=robust without label_smoothing: it is a part of this loss; set label_sm"),
        ({"loss_type": "exo_pair"}, "loss_type=exo_pair without label_smoothing"),
        ({"f_alpha": 0.3}, "f_alpha=0.3 with f_divergence=None: alpha_divergence reads it; set f_alpha=null"),
        ({"f_alpha": 0.3, "f_divergence": "forward_kl"}, "alpha_divergence reads it"),
        ({"f_alpha": 1.0, "f_divergence": "alpha_divergence"}, "alpha 1 is the reverse KL"),
        ({"f_divergence": "forward_kl", "loss_type": "bco_pair"}, "defined for functions of the difference of rewards"),
        ({"f_divergence": "forward_kl", "loss_type": "sft"}, "defined for functions of the difference of rewards"),
        ({"weighting": "wpo", "loss_type": "aot"}, "weighting=wpo with loss aot: TRL weights losses of single pairs"),
        ({"weighting": "wpo", "loss_type": "hinge"}, "weighting=wpo with loss hinge"),
        ({"weighting": "wpo", "losses": {"sigmoid": 1.0, "sft": 1.0}}, "weighting=wpo with loss sft"),
        ({"loss_type": "sft", "beta": 0.3}, "beta=0.3 with loss sft alone: it reads none"),
        ({"loss_type": "sft", "ld_alpha": 0.3}, "ld_alpha with loss sft alone: it reads none"),
        ({"loss_type": "sft", "reference_sync": ReferenceSync()}, "reference_sync with loss sft alone: it reads none"),
        ({"reference_sync": ReferenceSync(), "adapter": Adapter()}, "reference_sync with adapter.type=lora: the refer"),
        ({"reference_sync": ReferenceSync(), "num_steps": 9}, "the reference would never move; set reference_sync.ev"),
        ({"sft_weight": 0.5, "label_smoothing": 0.1}, "set label_smoothing=null, or sft_weight=null with losses={sig"),
        ({"sft_weight": 0.5, "losses": {"sigmoid": 1.0, "aot": 1.0}}, "set losses=null, or sft_weight=null$"),
        ({"sft_weight": 0.5, "loss_type": "ipo"}, "set loss_type=sigmoid, or sft_weight=null"),
        ({"loss_type": "aot", "validation": Validation(every_steps=1)}, "it compares the pairs of a step"),
        ({"loss_type": "kto_pair", "output": "best", "best": Best(every_steps=1)}, "best.metric=.*held-out rows have"),
    ],
)  # fmt: skip
def test_options_that_do_nothing_or_cannot_go_together_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DPO(**fields)  # type: ignore[arg-type]


def test_a_reference_that_would_never_move_is_refused_when_the_rows_are_counted() -> None:
    method = DPO(reference_sync=ReferenceSync(every_steps=9), num_epochs=3.0)
    assert method.trl_options(10)["ref_model_sync_steps"] == 9
    with pytest.raises(ConfigError, match="every_steps=9 with num_steps=9: the reference would never move"):
        method.trl_options(9)


def test_every_loss_names_its_paper() -> None:
    assert all("arXiv:" in row.paper for row in LOSSES.values())
