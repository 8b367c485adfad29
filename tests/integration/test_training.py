"""The training methods on a tiny model: what they start from, what changes them, and what must not."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from flows.stages.execute import notes_on
from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.method import Adapter
from tests import tiny, training
from tests.tiny_models import FEW, write_model
from tests.training import same, weights
from tests.worker_group import Asked, WorkerGroup

LORA = Adapter(rank=4, alpha=8)
SUPERVISED = ("cpt", "sft", "reward", "dpo", "kto", "orpo", "simpo", "cpo")


@pytest.mark.parametrize("name", training.FEW)
def test_micro_batches_and_workers_keep_the_trajectory(
    root: Path, tmp_path: Path, two_workers: WorkerGroup, name: str
) -> None:
    stage = training.method(name)
    runs = [
        training.train(stage, root, tmp_path / f"micro{size}", resources=Resources(micro_batch_size=size)).losses
        for size in ((2, 4, 8) if name == "online_dpo" else (1, 2, 4))  # a pair is in one micro batch
    ]
    asked = Asked(stage=stage, root=root, folder=tmp_path / "two", resources=Resources(micro_batch_size=2))
    ranks = [[training.trajectory(each) for _, each in done.reports] for done in two_workers.train(asked)]
    assert ranks[0] == ranks[1]
    for losses in (*runs[1:], ranks[0]):
        assert losses == pytest.approx(runs[0], abs=1e-4)


@pytest.mark.parametrize("name", training.FEW)
@pytest.mark.parametrize("adapter", [None, pytest.param(LORA, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_outputs_load_alone_and_repeat_to_the_bit(
    root: Path, tmp_path: Path, name: str, adapter: Adapter | None
) -> None:
    stage = training.method(name, adapter=adapter)
    first, second = (training.train(stage, root, tmp_path / run).output for run in ("first", "second"))
    assert same(weights(first), weights(second))
    files = sorted(path.relative_to(first) for path in first.rglob("*") if path.is_file())
    assert [path for path in files if (first / path).read_bytes() != (second / path).read_bytes()] == []
    for tokenizer_file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (first / tokenizer_file).read_bytes() == (root / "policy" / tokenizer_file).read_bytes()
    auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
    model = auto.from_pretrained(first)
    ids = AutoTokenizer.from_pretrained(first)("sum adds", return_tensors="pt")
    assert torch.isfinite(model(**ids).logits).all()
    assert "packed" not in (first / "config.json").read_text()
    assert (first / "adapter" / "adapter_model.safetensors").exists() == (adapter is not None)


@pytest.mark.parametrize("name", training.NAMES)
def test_rows_in_equal_rows_trained_and_rows_reported_and_every_metric_is_named(
    root: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tasks.train import run as trainer_module

    kept: list[int] = []
    original = trainer_module.row_order
    monkeypatch.setattr(
        trainer_module, "row_order", lambda num_rows, *others: kept.append(num_rows) or original(num_rows, *others)
    )
    question = [{"role": "user", "content": tiny.sentence(3, 60)}]
    answer = [{"role": "assistant", "content": "sum"}]
    pair = {**tiny.preference_rows(1)[0], "row_id": "long", "prompt": question}
    single = {**tiny.unpaired_rows(1)[0], "row_id": "long", "prompt": question}
    rows = {
        "text": [*tiny.text_rows(9), {"row_id": "long", "text": tiny.sentence(3, 60)}],
        "conversations": [*tiny.conversation_rows(9), {"row_id": "long", "messages": question + answer}],
        "preferences": [*tiny.preference_rows(9), pair],
        "prompts": [*tiny.prompt_rows(9), {"row_id": "long", "prompt": question, "columns": None}],
        "unpaired": [*tiny.unpaired_rows(9), single],
    }
    for kind, table in rows.items():
        tiny.write_rows(tmp_path / kind, table)
    (tmp_path / "teacher").symlink_to(root / "teacher")
    drops = {"too_long": "drop"} if name in training.GENERATING else {}  # else a prompt keeps its end
    length = {} if name == "cpt" else {"max_length": 60}
    stage = training.method(name, num_steps=1, adapter=LORA, **length, **drops)
    with caplog.at_level("WARNING"):
        run = training.train(stage, tmp_path, tmp_path / "output", policy=root / "policy")
    assert run.metrics["rows"] == 10
    assert "row_ids=long" in caplog.text
    if name != "cpt":  # there, rows become chunks
        assert run.metrics["rows"] == kept[0] + run.metrics["rows_dropped"] == 10
        assert run.metrics["rows_dropped"] == 1

    reported = {metric for _, metrics in run.reports for metric in metrics}
    for found, known in (
        (reported, stage.measured_metrics((), of_steps=True)),
        (set(run.metrics), stage.measured_metrics(())),
    ):
        assert sorted(found - set(known or ())) == []
    own = {metric for metric in type(stage).measures or () if "NAME" not in metric}
    assert own - set(run.metrics) <= {"cispo_clip_ratio", "mean_token_accuracy", "kl", "nll_loss"}  # by option


@pytest.mark.parametrize("name", ["sft", "ppo"])
def test_a_training_that_moves_no_weight_says_so(root: Path, tmp_path: Path, name: str) -> None:
    """The only step of a training is of its warm-up, at the learning rate 0, as in transformers."""
    moved = training.train(training.method(name, num_steps=1, warmup_ratio=0.0), root, tmp_path / "moved")
    assert "weights_unchanged" not in moved.metrics and not same(weights(moved.output), weights(root / "policy"))
    below = {"learning_rate": 1e-60} if name == "ppo" else {}  # whose step has several updates
    still = training.train(training.method(name, num_steps=1, **below), root, tmp_path / "still")
    assert still.metrics["weights_unchanged"] == 1 and same(weights(still.output), weights(root / "policy"))
    note, *_ = notes_on(None, still.metrics)
    assert note.startswith("UNCHANGED: no step moved a weight")


def test_a_training_whose_completions_never_end_says_so() -> None:
    (note,) = notes_on(None, {"completions/clipped_ratio": 1.0})
    assert note.startswith("CUT: no completion of the last steps ended within max_completion_length")
    assert [*notes_on(None, {"completions/clipped_ratio": 0.9})] == []


def test_workers_that_are_not_those_of_resources_are_refused(root: Path, tmp_path: Path) -> None:
    resources = Resources(num_workers=2, micro_batch_size=2)
    with pytest.raises(ConfigError, match=r"1 workers were started and resources.num_workers=2"):
        training.train(training.method("sft"), root, tmp_path / "output", resources=resources)


def test_reports_carry_trls_names(root: Path, tmp_path: Path) -> None:
    run = training.train(training.method("dpo"), root, tmp_path / "output")
    assert [step for step, _ in run.reports] == [1, 2, 3]
    assert all(0.05 < metrics["memory_gib"] < 100 for _, metrics in run.reports)  # torch alone takes hundreds of MiB
    metrics = run.reports[-1][1]
    assert {"loss", "learning_rate", "grad_norm", "num_tokens", "tokens_per_second"} < metrics.keys()
    assert metrics["tokens_per_second_per_worker"] == metrics["tokens_per_second"]
    assert all(0 < found["mfu"] < 1 for found in (metrics, run.metrics))
    assert {"rewards/chosen", "rewards/margins", "rewards/accuracies", "logps/chosen"} < metrics.keys()
    assert not {"entropy", "logits/chosen"} & metrics.keys()
    assert run.metrics["steps"] == 3
    assert run.metrics["num_tokens"] == metrics["num_tokens"] > 0
    assert run.metrics["train_seconds"] > 0


PAIRS = {"sigmoid": 1.0, "kto_pair": 1.0, "aot": 1.0}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("architecture", FEW)
@pytest.mark.parametrize("name", [each for each in training.FEW if each.values[0] in SUPERVISED])
def test_every_architecture_trains(root: Path, tmp_path: Path, name: str, architecture: str, precision: str) -> None:
    policy = write_model(tmp_path / architecture, architecture, router_aux_loss_coef=0.0)
    fields = {"losses": PAIRS} if name == "dpo" else {"adapter": LORA if precision == "bf16" else None}
    stage = training.method(name, num_steps=4, learning_rate=1e-2, precision=precision, **fields)
    found = training.train(stage, root, tmp_path / "output", policy=policy).losses
    assert found[0] != found[3] and math.isfinite(found[3])
    if name == "dpo":  # it starts at its reference and learns
        assert found[0] == pytest.approx(2 * math.log(2) + 0.5, abs=1e-3 if precision == "fp32" else 2e-2)
        assert found[3] < found[0] - 0.01


MIXTURES: dict[str, dict[str, object]] = {  # whose configs name experts or backbone otherwise; two are dense
    "phimoe": {"num_local_experts": 4, "router_jitter_noise": 0.0},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoehybrid": {
        "num_local_experts": 0, "shared_intermediate_size": 32, "layer_types": ["attention"] * 2, "mamba_n_heads": 8,
        "mamba_d_head": 8, "mamba_n_groups": 1,
    },
    "doge": {"is_moe": False},
    "llama4_text": {
        "num_local_experts": 2, "intermediate_size_mlp": 32, "layer_types": ["chunked_attention", "full_attention"],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        pytest.param(each, name, marks=[] if name == "sft" and each.startswith("granite") else pytest.mark.slow)
        for each in MIXTURES
        for name in ("sft", "dpo", "orpo", "distill", "grpo")
    ],
)
def test_a_mixture_that_names_its_experts_otherwise_trains_and_keeps_its_settings(
    root: Path, tmp_path: Path, architecture: str, name: str
) -> None:
    """TRL reads ``num_experts``, expects routers where there is a coefficient, and sets both in the config."""
    policy = write_model(tmp_path / "policy", architecture, **MIXTURES[architecture])
    run = training.train(training.method(name, num_steps=1), root, tmp_path / "output", policy=policy)
    assert math.isfinite(run.losses[0])
    before, after = (json.loads((each / "config.json").read_text()) for each in (policy, run.output))
    settings = ("use_cache", "output_router_logits", "router_aux_loss_coef")
    assert {each: after.get(each) for each in settings} == {each: before.get(each) for each in settings}
    assert AutoModelForCausalLM.from_pretrained(run.output).config.use_cache
