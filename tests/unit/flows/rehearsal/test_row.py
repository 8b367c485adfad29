"""What a rehearsal tells of a stage is read from what the stage left behind."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from flows.planning.plan import Plan
from flows.rehearsal.row import row_of, step_seconds
from tests.finished import finish

ADAPTER = "adapter/adapter_model.safetensors"


@pytest.mark.parametrize(
    ("files", "merged"),
    [
        (("model.safetensors", ADAPTER), True),
        (("model-00001-of-00002.safetensors", "config.json", ADAPTER), True),
        (("model.safetensors",), False),  # although the stage states an adapter
        (("config.json", ADAPTER), False),
        (("adapter_model.safetensors", "adapter_config.json"), False),
    ],
    ids=["merged", "in parts", "no adapter beside", "no model", "an adapter alone"],
)
def test_a_merge_is_seen_by_what_it_wrote(toy: Callable[..., Plan], files: tuple[str, ...], merged: bool) -> None:
    plan = toy("stages.left.method.adapter={rank: 4}")
    finish(plan)
    left = plan.stage("left")
    entry = plan.entry(left)
    manifest = entry.manifest()
    assert manifest
    written = replace(manifest, files=dict.fromkeys(files, "d"))
    (entry.path / "manifest.json").write_text(written.to_json())
    row = row_of(plan, left, seconds=1.0, num_steps=40, checkpoint_bytes=None)
    assert ("merge" in row.exercised) is merged


def test_the_pace_is_that_of_the_fastest_step_by_its_own_tokens() -> None:
    slow, fast = {"num_tokens": 100.0, "tokens_per_second": 1.0}, {"num_tokens": 150.0, "tokens_per_second": 25.0}
    assert step_seconds([slow, fast]) == 2.0
    assert step_seconds([{**slow, "tokens_per_second": 100.0}, {**fast, "tokens_per_second": 10.0}]) == 1.0
    assert step_seconds([{"loss": 1.0}, fast]) == 6.0
    assert step_seconds([{"loss": 1.0}]) is None
    assert step_seconds([]) is None
