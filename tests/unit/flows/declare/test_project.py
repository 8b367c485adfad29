"""The commonest jobs by name, and ``data=`` for the rows that they read."""

from dataclasses import replace

import pytest

from flows.__main__ import main
from flows.declare.config import load_pipeline
from flows.declare.project import with_project
from lineage.errors import ConfigError
from tasks.data.formats.proposals import JOB_HELD_OUT, JOB_SOURCES, JOBS

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
    if name in JOBS.values():
        assert source == JOB_SOURCES[found.stages[source].method.produces]
        assert found.stages[source].method.recipe()["held_out"] == JOB_HELD_OUT
    by_path = load_pipeline([f"pipeline={name}", f"model={model}", f"sources.{source}.path=mine.parquet"])
    assert found == replace(by_path, overrides=found.overrides)  # which say what was typed


def test_data_of_several_sources_has_the_name_of_one():
    cli_args = ["pipeline=sft-dpo", "model=owner/name"]
    found = load_pipeline([*cli_args, "data.instructions=chats.jsonl", "+data.preferences=pairs.jsonl"])
    assert [found.sources[name].path for name in ("instructions", "preferences")] == ["chats.jsonl", "pairs.jsonl"]
    later = load_pipeline([*cli_args, "data.instructions=a", "sources.instructions.path=b"])
    assert later.sources["instructions"].path == "b"
    accepted = "accepted: data.instructions, data.preferences"
    for word, message in (
        ("data=x.jsonl", f"^data: sft-dpo reads 2 sources of rows; {accepted}; one source is read by pipeline=sft"),
        ("data.instruction=x", f"^data.instruction: no such source; {accepted}; did you mean data.instructions"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_pipeline([*cli_args, word])


def test_both_read_the_rewards_of_grpo_from_one_place():
    found = load_pipeline(["pipeline=grpo", "model=owner/name", "stages.grpo.method.rewards.answer.function=numeric"])
    assert found.stages["evaluate"].method.rewards == found.stages["grpo"].method.rewards
    assert found.stages["grpo"].method.rewards["answer"].function == "numeric"


PROJECT = r"""
pipeline: sft
model: owner/name # chosen here
data: my chats.jsonl
tags: [a, "b c", '\d+ of it''s \']
stages:
  sft:
    method.learning_rate: 1e-5
    method: {num_steps: 3, optimizer: {weight_decay: 0.05}}
    resources: {micro_batch_size: auto}
sources.instructions.revision: "6e53"
because: {}
"""


def test_a_project_file_is_read_as_overrides_which_those_of_the_command_line_follow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(PROJECT)
    found = load_pipeline(with_project(["my.yaml", "stages.sft.method.num_steps=7"]))
    method = found.stages["sft"].method.recipe()
    assert (found.name, found.sources["base"].path, found.operation.tags) == (
        "sft", "owner/name", ("a", "b c", "\\d+ of it's \\"),
    )  # fmt: skip
    assert (method["learning_rate"], method["num_steps"]) == (1e-5, 7)
    assert found.stages["sft"].method.optimizer.weight_decay == 0.05
    assert found.stages["sft"].resources.micro_batch_size == "auto"
    rows = found.sources["instructions"]
    assert (rows.path, rows.revision) == ("my chats.jsonl", "6e53")


def test_the_project_of_this_folder_is_read_unless_another_pipeline_is_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert with_project(["a=1"]) == ["a=1"]
    (tmp_path / "posttrain.yaml").write_text("pipeline: sft\nmodel: owner/name\n")
    assert with_project([]) == ["pipeline=sft", "model=owner/name"]
    assert with_project(["pipeline=sft", "x=1"])[-1] == "x=1"
    assert with_project(["pipeline=dpo"]) == ["pipeline=dpo"]
    assert "posttrain.yaml is left out, since pipeline=dpo is another" in capsys.readouterr().err
    assert main(["plan", "model=tiny"]) == 0
    assert "pipeline sft" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no.yaml: cannot be read as a project .No such file"),
        ("model: tiny\nmodel: smollm2\n", "model is there twice; one value of a key is accepted"),
        ("- a\n", "holds no settings; YAML lines KEY: VALUE are accepted"),
        ("a: [", "cannot be read as a project"),
        (
            "defaults: [sft]\n",
            "is a pipeline; put it into a folder of the name pipeline: posttrain plan conf/pipeline/no.yaml",
        ),
        ("stage: sft\ncutoff_len: 64\n", "a configuration of llamafactory, .*: posttrain import llamafactory no.yaml"),
        ("base_model: m\nadapter: lora\n", "posttrain import axolotl no.yaml"),
        ("model: {model_name: m}\ntraining: {trainer_type: TRL_SFT}\n", "posttrain import oumi no.yaml"),
        ("model_name_or_path: m\ndataset_name: d\n", "posttrain import trl no.yaml"),
    ],
)
def test_a_file_that_is_no_project_is_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    if text:
        (tmp_path / "no.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        with_project(["no.yaml"])


def test_a_pipeline_without_its_first_line_is_reported_which(tmp_path):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline/mine.yaml").write_text("name: mine\nstages: {}\n")
    with pytest.raises(
        ConfigError, match=r"mine.yaml: its keys would be pipeline.name.*first line: # @package _global_"
    ):
        load_pipeline(["pipeline=mine"], tmp_path)
