"""The faults of bench/diagnose.py: sane recipes, what is wrong with them, and the rules that name it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

Settings = Mapping[str, object]


@dataclass(frozen=True)
class Method:
    """A sane recipe.

    Args:
        target: its class below ``tasks``.
        policy: the stage that it starts from; slot and kind of the rows that it reads follow.
        metrics: of the evaluation, on held-out rows; of a perplexity and a loss less is better.
    """

    target: str
    policy: str
    slot: str
    kind: str
    metrics: tuple[str, ...]
    settings: Settings

    @property
    def measured(self) -> dict[str, str]:
        """Slot of the evaluation -> the rows that its metrics need; empty: the training measures its own."""
        return dict(MEASURED[metric] for metric in self.metrics if metric in MEASURED)


MEASURED = {
    "text_perplexity": ("text", "text"), "answer_perplexity": ("conversations", "chat"),
    "logp_accuracy": ("pairs", "pair"), "reward/right": ("prompts", "prompt"),
}  # fmt: skip
COMMON = {
    "num_steps": 120, "global_batch_size": 16, "max_length": 64, "schedule": {"warmup": 0.1},
    "validation": {"every_steps": 10, "max_rows": 32},
}  # fmt: skip
RIGHT = {"function": "regex"}  # the right word is in the answer
TUNED = ("logp_accuracy", "reward/right")
METHODS = {
    "cpt": Method(
        "cpt.ContinuedPretraining", "base", "rows", "text", ("text_perplexity",),
        {**COMMON, "max_length": 32, "learning_rate": 4e-3},
    ),
    "sft": Method(
        "sft.SFT", "language", "rows", "chat", ("answer_perplexity",),
        {**COMMON, "num_steps": 150, "learning_rate": 3e-3},
    ),
    "reward": Method(
        "reward_model.RewardModel", "chatty", "pairs", "pair", ("held_out_loss",),
        {**COMMON, "num_steps": 100, "learning_rate": 1.5e-3},
    ),
    "dpo": Method(
        "dpo.DPO", "chatty", "pairs", "pair", TUNED,
        {**COMMON, "num_steps": 90, "learning_rate": 3e-4, "beta": 0.3, "sft_weight": 1.0},
    ),
    "kto": Method(
        "kto.KTO", "chatty", "rows", "single", TUNED,
        {**COMMON, "num_steps": 100, "learning_rate": 5e-4, "beta": 0.3},
    ),
    "orpo": Method(
        "orpo.ORPO", "language", "pairs", "pair", ("logp_accuracy",),
        {**COMMON, "num_steps": 150, "learning_rate": 5e-3, "beta": 1.0},
    ),
    "grpo": Method(
        "grpo.GRPO", "half", "prompts", "prompt", ("reward/right",),
        {
            "num_steps": 40, "global_batch_size": 64, "num_generations": 8, "max_length": 64, "beta": 0.1,
            "max_completion_length": 14, "learning_rate": 1.5e-4, "schedule": {"name": "constant"},
            "rewards": {"right": RIGHT},
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    """A fault, and the rules that name it.

    Args:
        change: settings that are wrong; null leaves a setting of the sane recipe out.
        rows: what breaks its rows, of fault_rows.BREAKS.
    """

    name: str
    method: str
    right: tuple[str, ...]
    change: Settings = field(default_factory=dict)
    rows: str = ""


LOW = ("flat", "slow", "still-falling", "smooth-but-slow")  # too little was learned
HIGH = ("unstable", "never-decreases", "not-finite")
HEART = ("overfit", "validation-flat")  # rows are learned by heart
COPIES = (*HEART, "duplicated-rows")
RANK_1 = {"type": "lora", "rank": 1, "alpha": 2, "target_modules": "attention"}
LONG = {"length": {"target_tokens": 40}}
WILD = {"optimizer": {"name": "sgd"}, "learning_rate": 1e30, "max_grad_norm": 1e9}
FAULTS = (
    Fault("cpt-rate-low", "cpt", LOW, {"learning_rate": 4e-6}),
    Fault("cpt-rate-high", "cpt", HIGH, {"learning_rate": 1.0}),
    Fault("cpt-few-rows", "cpt", HEART, {"num_steps": 250}, "few"),
    Fault("cpt-repeated", "cpt", COPIES, {"num_steps": 250}, "repeated"),
    Fault("cpt-batch-large", "cpt", LOW, {"num_steps": 60, "global_batch_size": 64, "learning_rate": 2e-4}),
    Fault("cpt-short", "cpt", LOW, {"num_steps": 50}),
    Fault("sft-rate-low", "sft", LOW, {"learning_rate": 2e-6}),
    Fault("sft-rate-lower", "sft", LOW, {"learning_rate": 1e-4}),
    Fault("sft-rate-high", "sft", HIGH, {"learning_rate": 1.0}),
    Fault("sft-rate-higher", "sft", HIGH, {"learning_rate": 0.05}),
    Fault("sft-nan", "sft", ("not-finite",), WILD),
    Fault("sft-batch-small", "sft", ("noisy",), {"global_batch_size": 1}),
    Fault("sft-short", "sft", LOW, {"num_steps": 50}),
    Fault("sft-epochs", "sft", HEART, {"num_steps": 500}, "some"),
    Fault("sft-few-rows", "sft", HEART, {"num_steps": 200}, "few"),
    Fault("sft-repeated", "sft", COPIES, {"num_steps": 200}, "repeated"),
    Fault("sft-shuffled", "sft", (*HEART, "early-plateau", "plateau"), {}, "shuffled"),
    Fault("sft-garbage", "sft", ("unstable", "noisy", "labels"), {}, "garbage"),
    Fault("sft-cut", "sft", ("labels",), {"max_length": 40}),
    Fault("sft-mask-lost", "sft", ("labels",), {}, "untemplated"),
    Fault("sft-dropped", "sft", ("labels",), {}, "long_questions"),
    Fault("sft-easy", "sft", ("early-plateau", "plateau"), {"schedule": {"name": "constant"}}, "easy"),
    Fault("sft-rank-low", "sft", ("underfit", *LOW), {"adapter": RANK_1}),
    Fault("sft-decay-high", "sft", ("underfit", "plateau"), {"optimizer": {"weight_decay": 30.0}}),
    Fault("sft-rate-constant", "sft", ("plateau",), {"learning_rate": 5e-2, "schedule": {"name": "constant"}}),
    Fault("reward-rate-low", "reward", ("accuracy-stuck", *LOW), {"learning_rate": 1e-7}),
    Fault("reward-rate-high", "reward", (*HIGH, "accuracy-stuck"), {"learning_rate": 0.3}),
    Fault("reward-coin", "reward", ("accuracy-stuck", *HEART), {}, "coin"),
    Fault("reward-few-rows", "reward", ("overconfident", *HEART), {"num_steps": 200}, "few"),
    Fault("reward-sure", "reward", ("overconfident", *HEART), {"num_steps": 400, "learning_rate": 5e-3}),
    Fault("dpo-rate-low", "dpo", ("accuracy-stuck", *LOW), {"learning_rate": 1e-8}),
    Fault("dpo-explodes", "dpo", ("exploding-margins",), {"learning_rate": 5e-3, "beta": 0.03, "sft_weight": None}),
    Fault("dpo-coin", "dpo", ("accuracy-stuck", *HEART), {}, "coin"),
    Fault("dpo-few-rows", "dpo", ("exploding-margins", *HEART), {"num_steps": 200}, "few"),
    Fault("dpo-repeated", "dpo", COPIES, {"num_steps": 200}, "repeated"),
    Fault("kto-rate-high", "kto", (*HIGH, "exploding-margins"), {"learning_rate": 0.1}),
    Fault("kto-coin", "kto", ("accuracy-stuck", "never-decreases", *HEART), {}, "coin"),
    Fault("orpo-rate-low", "orpo", (*LOW, "accuracy-stuck"), {"learning_rate": 3e-6}),
    Fault("orpo-batch-small", "orpo", ("noisy",), {"global_batch_size": 1}),
    Fault("grpo-equal", "grpo", ("equal-rewards",), {"rewards": {"right": {**RIGHT, "answer_tag": "answer"}}}),
    Fault("grpo-cold", "grpo", ("equal-rewards", "entropy-collapse"), {"sampling": {"temperature": 0.05}}),
    Fault(
        "grpo-rate-high", "grpo", ("kl-explodes", "entropy-collapse", "length-explodes", "repetitive"),
        {"learning_rate": 2e-2, "beta": 0.0},
    ),
    Fault(
        "grpo-long", "grpo", ("length-explodes",),
        {"rewards": LONG, "max_completion_length": 40, "max_length": 96, "beta": 0.0},
    ),
    Fault("grpo-cut", "grpo", ("repetitive",), {"max_completion_length": 3}),
)  # fmt: skip
