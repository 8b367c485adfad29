"""The commonest jobs by name, and ``data=`` for the rows that they read."""

import pytest

from flows.declare.config import load_pipeline
from lineage.errors import ConfigError

SOURCES = {
    "sft": "instructions", "cpt": "corpus", "dpo": "preferences", "reward": "preferences", "kto": "unpaired",
    "grpo": "prompts",
}  # fmt: skip


@pytest.mark.parametrize(("name", "source"), SOURCES.items())
@pytest.mark.parametrize("model", ["owner/name", "tiny"])
def test_a_job_has_a_name_and_data_is_its_one_source(name, source, model):
    found = load_pipeline([f"pipeline={name}", f"model={model}", "data=mine.parquet"])
    assert found.sources[source].path == "mine.parquet"
    assert found.stages[source].inputs["rows"] == f"source:{source}"
    assert found.stages[name].method.trains and found.stages["evaluate"].inputs["base"] == "base"
    assert ("corpus" in found.stages) == (model == "tiny" or name == "cpt")
    assert found == load_pipeline([f"pipeline={name}", f"model={model}", f"sources.{source}.path=mine.parquet"])


def test_data_of_several_sources_has_the_name_of_one():
    words = ["pipeline=sft-dpo", "model=owner/name"]
    found = load_pipeline([*words, "data.instructions=chats.jsonl", "+data.preferences=pairs.jsonl"])
    assert [found.sources[name].path for name in ("instructions", "preferences")] == ["chats.jsonl", "pairs.jsonl"]
    later = load_pipeline([*words, "data.instructions=a", "sources.instructions.path=b"])
    assert later.sources["instructions"].path == "b"
    accepted = "accepted: data.instructions, data.preferences"
    for word, message in (
        ("data=x.jsonl", f"^data: sft-dpo reads 2 sources of rows; {accepted}; one source is read by pipeline=sft"),
        ("data.instruction=x", f"^data.instruction: no such source; {accepted}; did you mean data.instructions"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_pipeline([*words, word])


def test_both_read_the_rewards_of_grpo_from_one_place():
    found = load_pipeline(["pipeline=grpo", "model=owner/name", "stages.grpo.method.rewards.answer.function=numeric"])
    assert found.stages["evaluate"].method.rewards == found.stages["grpo"].method.rewards
    assert found.stages["grpo"].method.rewards["answer"].function == "numeric"
