"""What a model's source sets goes through plan, training and output: adapters, settings, templates, its own code."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from flows.declare.config import load_pipeline
from flows.planning.estimates import require_plan_disk
from flows.planning.model_checks import check_models
from flows.planning.plan import make_plan
from flows.stages.run import job_inputs
from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from lineage.filesystem.digest import DigestCache
from lineage.source.model_source import template_families, text_digest
from lineage.source.sources import pin
from tasks.method import Adapter
from tasks.model import remote_code
from tasks.model.fetch_model import fetch_model
from tasks.model.tokenizers import tokenizer_of
from tasks.recipe import Input
from tasks.train.models.freeze import Freeze
from tasks.train.models.load import require_trainable, whole_model
from tests import miniature, tiny, training
from tests.command import Command
from tests.integration.test_resume import stop_and_go_on
from tests.model_directories import edit, write_adapter
from tests.tiny_models import write_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ONLY_SFT = ("~stages.preferences", "~stages.reward", "~stages.dpo", "~stages.evaluate", "~stages.cpt", "~stages.corpus")
ROPE = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def checkpoint(path: Path | str, **fields: object) -> Source:
    return replace(Source(path=str(path), kind=Kind.CHECKPOINT), **fields)  # type: ignore[arg-type]


def test_it_resumes_to_the_bit_on_a_merged_base(root, tmp_path):
    source = checkpoint(write_adapter(tmp_path / "lora", write_model(tmp_path / "base", "llama")), model_kwargs=ROPE)
    directory = fetch_model(source, tmp_path / "cache")
    stop_and_go_on(training.method("sft", num_steps=6, adapter=Adapter(rank=2)), root, tmp_path, policy=directory)


def test_a_stage_installs_the_template_of_a_family(root, tmp_path):
    """Where no source brings the model, as behind a stage that makes one: by name, with its text as identity."""
    stages = [training.method("sft", num_steps=2, chat_template=name) for name in (None, "chatml", "qwen3")]
    found = [training.train(stage, root, tmp_path / str(index) / "output") for index, stage in enumerate(stages)]
    assert found[0].losses == found[1].losses != found[2].losses, "the policy's own is chatml"
    text = template_families()["qwen3"].read_text()
    assert (found[2].output / "chat_template.jinja").read_text() == text
    assert stages[2].recipe()["chat_template_text"] == text_digest(text)
    assert "chat_template_text" not in stages[1].recipe()


def test_a_family_whose_tokens_the_model_lacks_is_refused(root, tmp_path):
    with pytest.raises(ConfigError, match=r"chat_template=llama3 needs the tokens .*<\|eot_id\|>.* vocabulary lacks"):
        training.train(training.method("sft", chat_template="llama3"), root, tmp_path / "output")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, prefect_url: str) -> Command:
    """The default pipeline's sft, from a LoRA in a directory."""
    folder = tmp_path_factory.mktemp("own")
    rows = miniature.write_own_rows(folder)[1]
    write_adapter(folder / "lora", write_model(folder / "base", "llama"), named="../base")
    cli_args = (
        *ONLY_SFT, "model=lora", "stages.sft.inputs.policy=base", "stages.sft.method.num_steps=2", rows,
        "stages.sft.method.global_batch_size=8", "stages.sft.method.max_length=64", "resources.cpus_per_worker=1",
        "~stages.base",
    )  # fmt: skip
    return Command(folder, *cli_args[:-1], environment={"PREFECT_API_URL": prefect_url})


@pytest.mark.slow
def test_a_peft_directory_is_a_model_from_the_plan_to_the_record(own):
    rows = own.run("save=null")
    manifest = json.loads((Path(rows["sft"]["output"]).parent / "manifest.json").read_text())
    record = manifest["inputs"]["policy"]
    assert record["artifact"] == "source:base" and record["source"]["reading"]["base_model"] == str(own.folder / "base")
    assert {Path(file).parent.name for file in record["source"]["files"]} == {"lora", "base"}
    AutoModelForCausalLM.from_pretrained(rows["sft"]["output"])
    assert own.states()["sft"] == "reuse"
    assert own("verify").returncode == 0
    alone = own.run("adapter=lora", "adapter.rank=2", "save=adapter", "store=alone")
    output = Path(alone["sft"]["output"])
    assert not (output / "model.safetensors").exists()
    whole_model(Kind.CHECKPOINT, output)  # finds adapter and base under it
    (own.folder / "base").rename(own.folder / "moved")
    refused = own("plan")
    assert refused.returncode == 2 and "its base ../base is missing" in refused.stderr
    moved = own.states("sources.base.base_model=moved")
    assert moved["sft"] == "reuse", "the place of the base is not identity"
    (own.folder / "moved").rename(own.folder / "base")


@pytest.mark.parametrize(
    ("cli_args", "message"),
    [
        (("adapter_in=continue", "save=adapter"), "continue with save=adapter: .* an adapter of PEFT, and its"),
        (("adapter_in=stack",), "adapter_in=stack: the adapter of sources.base.path=.* on the head"),
        (("adapter_in=continue",), ""),
    ],
)
def test_the_plan_refuses_an_adapter_that_a_stage_cannot_keep(tmp_path, cli_args, message):
    base = write_model(tmp_path / "base", "llama")
    config = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    lora = write_adapter(tmp_path / "lora", base, config=config)
    own = [f"stages.sft.method.{word}" for word in cli_args]
    given = (*ONLY_SFT, f"model={lora}", "stages.sft.inputs.policy=base", "adapter=lora", *own)
    pipeline = load_pipeline([f"store={tmp_path / 'store'}", *given])
    if not message:
        check_models(pipeline)
        return
    with pytest.raises(ConfigError, match=message):
        check_models(pipeline)
    with pytest.raises(ConfigError, match="has no adapter that could be kept"):
        check_models(load_pipeline([f"store={tmp_path / 'store'}", *given, f"model={base}"]))


NEW = ("sources.base.special_tokens=['<a>','<b>']",)
ROWS = r"stages\.sft: the rows of its new tokens \(300, 301\) .*"


@pytest.mark.parametrize(
    ("tied", "cli_args", "message"),
    [
        (True, (), None),
        (True, ("adapter=lora",), ROWS + r"set stages\.sft\.method\.adapter\.trainable_token_indices=\[300,301\]"),
        (True, ("adapter=lora", "stages.sft.method.adapter.trainable_token_indices=[300]"), ROWS),
        (True, ("adapter=lora", "stages.sft.method.adapter.trainable_token_indices=[300,301]"), None),
        (
            False,
            ("adapter=lora", "stages.sft.method.adapter.trainable_token_indices=[300,301]"),
            ROWS + "embed_tokens,",
        ),
        (False, ("adapter=lora", "stages.sft.method.adapter.modules_to_save='embed_tokens,lm_head'"), None),
        (
            True,
            ("+stages.sft.method.freeze.modules='embed_tokens'",),
            ROWS + r"keeps model\.embed_tokens\.weight; set stages",
        ),
        (False, ("+stages.sft.method.freeze.modules='*.mlp.*,lm_head'",), ROWS + r"freeze keeps lm_head\.weight"),
        (False, ("+stages.sft.method.freeze.except_last_layers=1",), ROWS + r"keeps model\.embed_tokens\.weight"),
        (False, ("+stages.sft.method.freeze.modules='*.mlp.*'",), None),
    ],
)
def test_the_plan_refuses_new_tokens_whose_rows_nothing_trains(tmp_path, tied, cli_args, message):
    base = write_model(tmp_path / "base", "llama", tie_word_embeddings=tied)
    given = (
        f"store={tmp_path / 'store'}",
        *ONLY_SFT,
        f"model={base}",
        "stages.sft.inputs.policy=base",
        *NEW,
        *cli_args,
    )
    if message is None:
        make_plan(load_pipeline([*given]))
        return
    with pytest.raises(ConfigError, match=message):
        make_plan(load_pipeline([*given]))
    directory = fetch_model(checkpoint(base, special_tokens=("<a>", "<b>")), tmp_path / "cache")
    policy = Input(
        name="base", kind=Kind.CHECKPOINT, fingerprint="f" * 64, path=directory,
        source=checkpoint(base, special_tokens=("<a>", "<b>")),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="the rows of its new tokens"):  # where the plan does not know the tokenizer
        require_trainable(training.method("sft", adapter=Adapter(rank=2)), policy, SimpleNamespace())
    with pytest.raises(ConfigError, match="the rows of its new tokens"):
        require_trainable(training.method("sft", freeze=Freeze(modules="embed_tokens")), policy, SimpleNamespace())


@pytest.mark.parametrize(
    ("cli_args", "message"),
    [
        ((), r"sources\.base\.path=.*: the eos_token of its tokenizer is '<end>'.*base\.special_tokens=\['<end>'\]"),
        (("sources.base.special_tokens=['<end>']",), ""), (("sources.base.eos_token='<|im_end|>'",), ""),
    ],
)  # fmt: skip
def test_the_plan_refuses_an_end_of_texts_that_the_model_has_no_embedding_for(tmp_path, cli_args, message):
    base = write_model(tmp_path / "base", "llama")
    edit(base / "tokenizer_config.json", eos_token="<end>")
    given = (f"store={tmp_path / 'store'}", *ONLY_SFT, f"model={base}", "stages.sft.inputs.policy=base", *cli_args)
    with pytest.raises(ConfigError, match=message) if message else nullcontext():
        check_models(load_pipeline([*given]))


def test_a_later_stage_may_leave_new_rows_that_an_earlier_one_trained(tmp_path):
    given = (f"store={tmp_path / 'store'}", f"model={write_model(tmp_path / 'base', 'llama')}", *NEW)
    make_plan(load_pipeline([*given, "stages.dpo.method.adapter.type=lora"]))
    with pytest.raises(ConfigError, match=r"stages\.cpt: the rows"):
        make_plan(load_pipeline([*given, "adapter=lora"]))


@pytest.mark.parametrize("name", ["sft", "dpo", "reward"])
def test_new_tokens_are_trained_and_travel_with_the_output(root, tmp_path, name):
    base = write_model(tmp_path / "base", "llama", tie_word_embeddings=True)
    directory = fetch_model(checkpoint(base, added_tokens=("<a>",), special_tokens=("<b>",)), tmp_path / "cache")
    adapter = Adapter(rank=2, trainable_token_indices=(300, 301))
    for each in (None, adapter):
        output = tmp_path / str(bool(each)) / "output"
        run = training.train(training.method(name, adapter=each, learning_rate=1e-2), root, output, policy=directory)
        assert run.losses and (output / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
        rows = training.weights(output)["model.embed_tokens.weight"]
        assert rows.shape[0] == 302
        if name != "reward":  # no row has the tokens: the softmax of the head moves them
            before = training.weights(directory)["model.embed_tokens.weight"]
            moved = (rows != before).any(1).nonzero().flatten().tolist()
            assert {300, 301} <= set(moved) and (each is None or set(moved) == {300, 301})


@pytest.mark.parametrize("name", ["sft", "dpo", "reward", "grpo"])
def test_the_side_that_a_tokenizer_pads_changes_no_loss(root, tmp_path, name):
    """Rows are laid in one line or padded by the collators, with a mask; prompts are padded on the left."""
    losses = []
    for side in ("left", "right"):
        policy = Path(shutil.copytree(root / "policy", tmp_path / side))
        edit(policy / "tokenizer_config.json", padding_side=side)
        run = training.train(training.method(name), root, tmp_path / f"of-{side}" / "output", policy=policy)
        losses.append(run.losses)
    assert losses[0] == losses[1]


def test_the_disk_needs_room_for_the_merged_base(tmp_path, monkeypatch):
    base = write_model(tmp_path / "base", "llama")
    middle = write_adapter(tmp_path / "middle", base)
    lora = write_adapter(tmp_path / "lora", base)
    edit(lora / "adapter_config.json", base_model_name_or_path="../middle")
    monkeypatch.setattr("tasks.judgement.disk_need.free_bytes", lambda path: 0)
    needs = []
    for model in (base, middle, lora):
        plan = make_plan(load_pipeline([f"store={tmp_path / 'store'}", f"model={model}"]))
        with pytest.raises(ConfigError) as refused:
            require_plan_disk(plan, plan.stages)
        needs.append(str(refused.value))
    assert len(set(needs)) == 1 and "cpt needs about" in needs[0]


def test_an_adapter_is_no_reward_model(tmp_path):
    lora = write_adapter(tmp_path / "lora", write_model(tmp_path / "base", "llama"))
    with pytest.raises(ConfigError, match="is an adapter, and this source is of kind reward_model; a whole model"):
        pin("reward", Source(path=str(lora), kind=Kind.REWARD_MODEL), DigestCache(None))


NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("config", "adapter", "refusal"),
    [
        (NF4, "full", r"stages\.cpt: config\..*quant_method=bitsandbytes, .* set stages.cpt.method.adapter.type=lora"),
        (NF4, "lora", None),
        (NF4, "qlora", "would be rounded again; set stages.cpt.method.quantization=null"),
        ({"quant_method": "gptq", "bits": 4}, "lora", "never run here; set stages.cpt.resources.gpus_per_worker=1"),
        ({"quant_method": "spqr"}, "lora", "stages.cpt: its model is quantized .spqr.: no adapter was trained on"),
    ],
    ids=["full", "lora", "qlora", "gptq", "unknown"],
)
def test_a_model_that_was_quantized_before_is_recognised_by_the_plan(tmp_path, config, adapter, refusal):
    model = write_model(tmp_path / "model", "llama")
    edit(model / "config.json", quantization_config=config)
    pipeline = load_pipeline([f"model={model}", f"adapter={adapter}", "stages.sft.method.chat_template=chatml"])
    if refusal is None:
        make_plan(pipeline)
        return
    with pytest.raises(ConfigError, match=refusal):
        make_plan(pipeline)


def test_the_plan_judges_rows_and_templates_by_what_the_source_sets(tmp_path):
    model = write_model(tmp_path / "model", "llama")
    (model / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="comes from one without a chat template"):
        make_plan(load_pipeline([f"model={model}"]))
    make_plan(load_pipeline([f"model={model}", "sources.base.chat_template=chatml"]))
    make_plan(load_pipeline([f"model={model}", f"sources.base.tokenizer={tiny.write_tokenizer(tmp_path / 'other')}"]))


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub repository with code of its own, in the hub's cache at a commit."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    directory = tmp_path / "hub" / "models--own--llama" / "snapshots" / COMMIT
    directory.parent.mkdir(parents=True)
    write_model(directory, "llama")
    auto = {"AutoConfig": "own--own_model.OwnConfig", "AutoModelForCausalLM": "own--own_model.OwnModel"}
    auto = {name: f"own/llama--{value.rpartition('--')[2]}" for name, value in auto.items()}
    edit(directory / "config.json", model_type="own_llama", architectures=["OwnModel"], auto_map=auto)
    (directory / "own_model.py").write_text(CODE)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(directory))
    return directory


def test_code_of_a_model_runs_only_where_its_source_pins_a_commit_and_asks(root, snapshot, tmp_path):
    stage = training.method("sft", num_steps=2)
    plain = fetch_model(checkpoint("own/llama", revision=COMMIT), tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"its config\.json cannot be loaded.*with trust_remote_code=true"):
        whole_model(Kind.CHECKPOINT, plain)
    source = pin("base", checkpoint("own/llama", revision=COMMIT, trust_remote_code=True), DigestCache(None))
    assert source.record.reading == {"trust_remote_code": True}
    assert source.fingerprint != pin("base", checkpoint("own/llama", revision=COMMIT), DigestCache(None)).fingerprint
    directory = fetch_model(source.source, tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"its config\.json cannot be loaded"):
        whole_model(Kind.CHECKPOINT, plain)  # beside one that asks, one of the same commit that does not
    trained = training.train(stage, root, tmp_path / "a" / "output", policy=directory)
    assert type(whole_model(Kind.CHECKPOINT, directory)).__name__ == "OwnModel"
    assert "own_model.py" in {path.name for path in trained.output.iterdir()}, (
        "the output brings the code that it needs"
    )
    with pytest.raises(ConfigError, match=r"its config\.json cannot be loaded"):
        whole_model(Kind.CHECKPOINT, trained.output)  # of a run that was not told that it is this source's
    remote_code.trust(trained.output)
    assert type(whole_model(Kind.CHECKPOINT, trained.output)).__name__ == "OwnModel"
    copied = shutil.copytree(directory, tmp_path / "copied")
    with pytest.raises(ConfigError, match=r"its config\.json cannot be loaded"):
        tokenizer_of(Path(copied)) and whole_model(Kind.CHECKPOINT, Path(copied))


@pytest.mark.parametrize("asks", [True, False])
def test_the_stages_behind_such_a_source_run_the_code_that_their_inputs_bring(tmp_path, asks):
    cli_args = ["model=pretrained", "sources.base.path=own/llama", f"sources.base.revision={COMMIT}"]
    plan = make_plan(load_pipeline([*cli_args, *(["sources.base.trust_remote_code=true"] if asks else [])]))
    parents = {name: SimpleNamespace(output_digest="d") for name in ("cpt", "sft", "instructions", "preferences")}
    given = job_inputs(plan, plan.stage("dpo"), parents)
    assert given["policy"].trusts_code == asks and not given["pairs"].trusts_code
    moved = replace(given["policy"], planned=replace(given["policy"].planned, path=tmp_path))
    output = moved.resolve(tmp_path / "cache").path
    assert remote_code.trusts(output) == asks


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sources.base.path=own/llama"], r"trust_remote_code=true with revision=None: .*commit of 40 hexadecimal"),
        (["sources.base.path=own/llama", "sources.base.revision=main"], r"trust_remote_code=true with revision=main"),
        (["sources.base.path=MODEL"], r"trust_remote_code=true with path=.*, which is not a hub id"),
    ],
)
def test_the_plan_refuses_code_that_can_change(tmp_path, overrides, message):
    model = write_model(tmp_path / "model", "llama")
    cli_args = [word.replace("MODEL", str(model)) for word in overrides]
    with pytest.raises(ConfigError, match=message):
        make_plan(load_pipeline(["model=pretrained", *cli_args, "sources.base.trust_remote_code=true"]))


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_another_repository_is_refused(snapshot, tmp_path, file):
    edit(snapshot / file, auto_map={"AutoConfig": "evil/code--own_model.OwnConfig"})
    with pytest.raises(ConfigError, match=r"own/llama runs code of evil/code, which is not pinned"):
        fetch_model(checkpoint("own/llama", revision=COMMIT, trust_remote_code=True), tmp_path / "cache")
