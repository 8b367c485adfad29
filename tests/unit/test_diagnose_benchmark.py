"""How bench/diagnose.py counts diagnoses and patches, and bench/gpu.py what is slower; they train nothing here."""

import json
import math

import pytest

from bench import gpu
from bench.diagnose import Outcome, is_better, totals, verdict, within_noise
from bench.fault_rows import BREAKS, write_rows
from bench.faults import FAULTS, METHODS
from lineage.diagnosis.rules import RULES

SANE = [{"reward/right": 0.80, "text_perplexity": value} for value in (10.0, 10.5, 11.0)]
SANE[0]["reward/right"], SANE[2]["reward/right"] = 0.78, 0.82


def test_at_least_forty_faults_of_known_methods_rules_and_rows():
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 40
    assert {fault.method for fault in FAULTS} == set(METHODS)
    assert {rule for fault in FAULTS for rule in fault.right} <= {rule.name for rule in RULES}
    assert {fault.rows for fault in FAULTS} - {""} == set(BREAKS)
    assert all(fault.name.startswith(f"{fault.method}-") and fault.right for fault in FAULTS)
    assert all(fault.change or fault.rows for fault in FAULTS)


@pytest.mark.parametrize(
    ("right", "found", "expected"),
    [
        (("flat", "slow"), ["slow", "noisy"], "right"),
        (("flat", "slow"), ["noisy", "slow"], "wrong"),  # the first counts
        (("flat",), [], "missed"),
        ((), [], "sane"),
        ((), ["noisy"], "wrong"),
    ],
)
def test_the_first_finding_decides(right, found, expected):
    assert verdict(right, found) == expected


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        ({"reward/right": 0.75, "text_perplexity": 11.5}, True),  # three deviations are 0.06 and a factor of 1.15
        ({"reward/right": 0.73, "text_perplexity": 11.5}, False),
        ({"reward/right": 0.75, "text_perplexity": 12.5}, False),
        ({"reward/right": 1.0, "text_perplexity": 2.0}, True),  # better is no fault
        ({"reward/right": math.nan, "text_perplexity": 10.0}, False),
    ],
)
def test_within_noise_is_no_worse_than_the_sane_ones_by_three_deviations(metrics, expected):
    assert within_noise(SANE, metrics) is expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"reward/right": 0.5}, {"reward/right": 0.6}, True),
        ({"text_perplexity": 9.0}, {"text_perplexity": 9.5}, False),
        (None, {"reward/right": 0.1}, True),
        ({"reward/right": 0.5}, None, False),
        (None, None, False),
    ],
)
def test_a_patch_is_better_by_every_metric_or_where_the_training_failed_before(before, after, expected):
    assert is_better(before, after) is expected


def test_a_finding_on_a_sane_training_counts_apart_and_patches_only_where_a_fault_hurts():
    found = [
        Outcome(name="sft-sane-0", verdict="sane", rules=[], before={}),
        Outcome(name="sft-sane-1", verdict="wrong", rules=["noisy"], before={}),
        Outcome(
            name="sft-a",
            verdict="right",
            rules=["flat"],
            before={},
            hurts=True,
            is_patched=True,
            after=[{}],
            better=True,
            restored=True,
        ),
        Outcome(
            name="sft-b", verdict="wrong", rules=["slow"], before={}, hurts=True, is_patched=True, after=[None] * 4
        ),
        Outcome(
            name="sft-e",
            verdict="right",
            rules=["flat"],
            before={},
            hurts=True,
            is_patched=True,
            after=[{}, {}],
            better=True,
            restored=True,
        ),
        Outcome(name="sft-c", verdict="missed", rules=[], before={}, hurts=True),
        Outcome(name="sft-d", verdict="right", rules=["noisy"], before={}, is_patched=True, restored=True),
    ]
    assert totals(found) == {
        "faults": 5, "right": 3, "wrong": 1, "missed": 1, "sane": 2, "wrong on sane": 1, "harmful and patched": 3,
        "better with the first patch": 2, "restored by it": 1, "restored by at most 4": 2,
    }  # fmt: skip


def test_the_rows_of_a_seed_are_the_same_and_every_break_changes_them(tmp_path):
    wanted = {(METHODS[fault.method].kind, fault.rows) for fault in FAULTS if fault.rows}
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder, seed, wanted)
    texts = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.glob("*/*.jsonl")}
    assert texts["a/chat.jsonl"] == texts["b/chat.jsonl"] != texts["c/chat.jsonl"]
    for kind, name in wanted:
        assert texts[f"a/{kind}-{name}.jsonl"] not in ("", texts[f"a/{kind}.jsonl"])
    pairs = [json.loads(line) for line in texts["a/pair.jsonl"].splitlines()]
    assert all(row["chosen"] != row["rejected"] for row in pairs)


def test_what_is_slower_than_its_baseline_or_has_no_result_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "BASELINES", tmp_path)
    step = {
        name: {"step_s_median": seconds} for name, seconds in (("sft-full/hand", 1.04), ("sft-lora/posttrain", 1.06))
    }
    results = {
        "ceilings": {"gpu": "NVIDIA H200"}, **step, "grpo/trl": {"step_s_median": 1.0},
        "grpo/posttrain": {"partial": True},
        "sft-8b/posttrain": {"error": ["Traceback", "OutOfMemoryError: CUDA out of memory"]},
    }  # fmt: skip
    for name in step:
        path = gpu.baseline(results, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"step_s_median": 1.0, "commit": "0123abcd"}))
    assert gpu.worse(results, dict(gpu.rows_of(results))) == [
        "sft-8b/posttrain: OutOfMemoryError: CUDA out of memory",
        "sft-lora/posttrain: 1.060 s a step, 1.000 at 0123abcd",
        f"grpo/trl: no baseline, which --save writes: {tmp_path / 'nvidia-h200/llama-0.4b/grpo.trl.json'}",
        "grpo/posttrain: ended at its limit, without a result",
    ]
    del results["ceilings"]
    assert gpu.worse(results, {})[-1] == "nothing is compared: ceilings, which names the GPU, has no result"
