"""The peak of a device is the largest measured, and the share of it that a training takes is its arithmetic by hand."""

import json
from dataclasses import replace

import pytest

from lineage.record.metrics_file import is_of_machine
from tasks.context import Resources
from tasks.dpo import DPO
from tasks.judgement.estimate import architecture, flops_per_token
from tasks.sft import SFT
from tasks.train.loop import speed
from tasks.train.loop.speed import Speed, known_peak, peak, peaks_file

CONFIG = {
    "model_type": "llama", "vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip
STAGE = {"num_steps": 10, "global_batch_size": 8, "max_length": 64}
CPU = Resources(micro_batch_size=2)


@pytest.fixture
def measured(monkeypatch):
    """What the next products of matrices reach, in GFLOP/s."""
    found = [3, 2, 5, 7]
    monkeypatch.setattr(speed, "measured_peak", lambda on_gpu, precision: 1e9 * found.pop(0))
    return found


def test_the_largest_peak_of_a_device_and_precision_counts(measured):
    assert known_peak(CPU, "fp32") is None
    assert [peak(CPU, "fp32"), peak(CPU, "fp32"), peak(CPU, "fp32"), known_peak(CPU, "fp32")] == [3e9, 3e9, 5e9, 5e9]
    assert known_peak(CPU, "bf16") is None
    assert known_peak(replace(CPU, cpus_per_worker=1), "fp32") is None
    peaks_file().write_text("{")
    assert peak(CPU, "bf16") == 7e9
    assert list(json.loads(peaks_file().read_text()).values()) == [7e9]


def test_a_home_that_cannot_be_written_costs_a_measurement_and_no_training(measured, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [peak(CPU, "fp32"), peak(CPU, "fp32")] == [3e9, 2e9]


@pytest.mark.parametrize(("method", "sequences"), [(SFT(**STAGE), 1), (DPO(**STAGE), 2)])
def test_the_share_of_the_peak_by_hand(method, sequences, measured):
    found = architecture(CONFIG)
    two = Resources(num_workers=2, micro_batch_size=2, gradient_checkpointing="on")
    metrics = Speed(method, two, CONFIG).metrics(1000.0, num_tokens=5 * 8 * 20 * sequences, num_steps=5)
    flops = flops_per_token(found, method, CPU, 20)  # rows of 20 tokens, without what is computed again
    assert metrics == {
        "tokens_per_second": 1000.0, "tokens_per_second_per_worker": 500.0,
        "mfu": pytest.approx(1000 * flops / 6e9),
    }  # fmt: skip
    assert all(map(is_of_machine, metrics))  # equal runs differ in them, which certify must not report


def test_a_model_of_unknown_numbers_has_no_share():
    assert "mfu" not in Speed(SFT(**STAGE), CPU, {}).metrics(1000.0, num_tokens=100, num_steps=1)
