"""The decoding of a GPU, without its graph, samples what ``generate`` samples from the same noise."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.train.generation import rollouts
from tasks.train.generation.generating import Sampling
from tasks.train.generation.one_policy import Sampled
from tasks.train.generation.rollouts import sample
from tests import tiny


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7, top_k=20), Sampling(top_p=0.8, min_p=0.01)], ids=str
)
@pytest.mark.parametrize("grouped", [True, False])
def test_completions_are_those_of_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampling: Sampling, grouped: bool
) -> None:
    tiny.write_policy(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompts = [[7, 8, 9, 10, 11], [7, 8, 9, 10, 11], [20, 21], [20, 21]] if grouped else [[7, 8, 9, 10, 11], [20, 21]]
    seeds = [11, 12, 13, 14][: len(prompts)]

    def completions() -> tuple[list[list[int]], list[list[float]]]:
        sampled = Sampled(sampling.temperature)
        found = sample(
            model, prompts, sampling, seeds, max_new_tokens=21, pad_token_id=0, stop_tokens=[3, *range(40, 60)],
            sampled=sampled,
        )  # fmt: skip
        return found, sampled.logps

    expected, logps = completions()
    monkeypatch.setattr(rollouts, "decodes", lambda model: True)
    attention = model.config._attn_implementation
    found, ours = completions()
    assert found == expected
    for mine, theirs in zip(ours, logps, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)
    assert model.config._attn_implementation == attention
    assert len({len(each) for each in expected}) > 1  # some end early
