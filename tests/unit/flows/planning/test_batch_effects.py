import json
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.planning.batch_effects import batch_notes
from flows.planning.plan import make_plan
from lineage.errors import ConfigError


def write_model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_more_tokens_than_a_table_of_positions_holds_are_refused_by_the_plan(tmp_path):
    model = write_model(tmp_path / "gpt2", model_type="gpt2", n_positions=128)
    with pytest.raises(ConfigError, match=r"stages.cpt.method.max_length=.*\(gpt2\) has a table of 128 positions"):
        make_plan(load_pipeline([f"model={model}"]))
    model = write_model(tmp_path / "opt", model_type="opt", max_position_embeddings=4096)
    make_plan(load_pipeline([f"model={model}"]))
    model = write_model(tmp_path / "llama", model_type="llama", max_position_embeddings=128)
    make_plan(load_pipeline([f"model={model}"]))  # computed


def test_the_plan_says_where_micro_batches_change_the_model(tmp_path):
    assert batch_notes(load_pipeline([])) == {}
    dropping = write_model(tmp_path / "gpt2", model_type="gpt2", n_positions=4096, attn_pdrop=0.1, resid_pdrop=0.0)
    plan = make_plan(load_pipeline([f"model={dropping}"]))
    assert [note.partition(":")[0] for note in plan.notes] == ["stages.cpt", "stages.sft"]  # not where pairs are read
    assert (
        "micro_batch_size and num_workers change the model: dropout is drawn per micro batch (attn_pdrop=0.1)"
        in (plan.notes[0])
    )
    mixture = write_model(tmp_path / "moe", model_type="mixtral", router_aux_loss_coef=0.02)
    assert set(batch_notes(load_pipeline([f"model={mixture}"]))) == {"cpt", "sft", "dpo"}
    notes = batch_notes(load_pipeline(["adapter=lora", "stages.dpo.method.adapter.dropout=0.1"]))
    assert list(notes) == ["dpo"] and "adapter.dropout=0.1" in notes["dpo"]
