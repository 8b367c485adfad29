"""Overrides, groups and defaults become a pipeline; a mistake says what is accepted."""

import os
import re
import shlex
import shutil
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flows.__main__ import main
from flows.declare.config import CONF as SHIPPED
from flows.declare.config import Composer, compose_tree, load_pipeline
from flows.declare.store_root import store_root
from flows.progress.declared import split_cli_args
from lineage.artifact import Kind
from lineage.errors import ConfigError
from tasks.data.images import Images

CONF = Path(__file__).parents[3] / "conf"
TOY = ["pipeline=toy", "model=none", "sources.rows.path=rows.txt"]


def toy(*overrides: str):
    return load_pipeline([*TOY, *overrides], CONF)


def test_a_model_is_a_directory_a_hub_id_or_the_name_of_a_shipped_one(tmp_path):
    own, tiny = load_pipeline([f"model={tmp_path}"]), load_pipeline([])
    assert "base" not in own.stages
    assert (own.sources["base"].path, own.sources["base"].kind) == (str(tmp_path), Kind.CHECKPOINT)
    assert tiny.stages["dpo"].method != own.stages["dpo"].method  # the tiny recipe goes with the tiny model
    for model, path in (("owner/some-model.v2", "owner/some-model.v2"), ("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B")):
        assert load_pipeline([f"model={model}"]).sources["base"].path == path


# A commit, a version, a year, a file: none of them is meant as a number.
TYPED = ["6e53", "1.10", "2024", "1_000", "+5", "1e999", "-0", "12e4567"]


def test_a_batch_smaller_than_the_micro_batch_makes_the_micro_batch_smaller():
    stages = toy("stages.left.method.global_batch_size=4", "stages.right.method.global_batch_size=16").stages
    assert [stages[name].resources.micro_batch_size for name in ("left", "right")] == [4, 8]
    shared = toy("stages.left.method.global_batch_size=4", "resources.num_workers=2", "~stages.right")
    assert shared.stages["left"].resources.micro_batch_size == 2


ODD = [
    ";",
    "|",
    "<|im_end|>",
    "Be brief; and kind (always)!",
    "it's",
    "50% & more",
    " x; y",
    'a "b" c',
    "#1",
    "a\\;b",
    "q?",
]


@pytest.mark.parametrize("text", ODD)
@pytest.mark.parametrize("more", [(), ("resources=local",)])  # the later choice of a group hands it to Hydra
def test_a_text_that_a_shell_has_unquoted_is_taken_as_it_was_typed(text, more):
    assert toy(f"sources.rows.split={text}", *more).sources["rows"].split == text
    assert toy(f"+sources.rows.loader.sep={text}", *more).sources["rows"].loader == {"sep": text}


@pytest.mark.parametrize("text", TYPED)
def test_a_text_field_takes_a_number_as_it_was_typed(tmp_path, text):
    rows = toy(f"sources.rows.revision={text}", f"tags=[{text}, x]", f"+sources.rows.columns={{prompt: {text}}}")
    assert rows.sources["rows"].revision == text
    assert rows.operation.tags == (text, "x")
    assert rows.sources["rows"].columns == {"prompt": text}
    linked = toy(f"sources.rows.revision={text}", "sources.rows.split=v${sources.rows.revision}", "store=2024.10")
    assert (linked.sources["rows"].split, linked.store.name) == (f"v{text}", "2024.10")
    whole = toy(f"sources.rows.revision={text}", "sources.rows.split=${sources.rows.revision}")
    assert whole.sources["rows"].split == text
    group = tmp_path / "source"
    group.mkdir()
    (group / "own.yaml").write_text(f"path: rows.txt\nrevision: {text}\ncolumns: {{{text}: prompt}}\n")
    shutil.copytree(CONF, tmp_path, dirs_exist_ok=True)
    own = load_pipeline([*TOY[:2], "+source@sources.rows=own"], tmp_path).sources["rows"]
    assert (own.revision, own.columns) == (text, {text: "prompt"})


def test_a_key_is_a_text_and_a_truth_value_for_a_text_is_refused_with_its_quotes():
    columns = "+sources.rows.columns={1.10: prompt, true: chosen, null: rejected}"
    assert set(toy(columns).sources["rows"].columns) == {"1.10", "true", "null"}
    with pytest.raises(ConfigError, match=r"""where the text is meant, write 'sources.rows.revision="true"'"""):
        toy("sources.rows.revision=true")
    assert toy('sources.rows.revision="true"').sources["rows"].revision == "true"


def test_a_group_may_be_named_like_a_number(tmp_path):
    shutil.copytree(CONF, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "pipeline/toy.yaml", tmp_path / "pipeline/1.10.yaml")
    assert load_pipeline(["pipeline=1.10", *TOY[1:]], tmp_path).stages.keys() == toy().stages.keys()


def test_a_base_that_a_stage_of_the_quickstart_hides_is_refused(tmp_path):
    for cli_args in ([f"sources.base.path={tmp_path}"], [f"+sources.base={{kind: checkpoint, path: {tmp_path}}}"]):
        with pytest.raises(
            ConfigError, match=f"sources.base.*no stage reads this.*set model={tmp_path}; .*source:base"
        ):
            load_pipeline(cli_args)
    both = load_pipeline(["model=owner/name", f"sources.base.path={tmp_path}"])  # the last one counts
    assert (both.sources["base"].path, "base" in both.stages) == (str(tmp_path), False)


@pytest.mark.parametrize(
    ("cli_args", "message"),
    [
        (["model=owner/name", *(f"stages.{name}.inputs.policy=source:mine" for name in ("cpt", "sft")),
          "sources.mine={path: owner/mine, kind: checkpoint}", "~stages.evaluate", "~stages.reward", "~stages.dpo"],
         "model=owner/name: no stage reads this source; read are: corpus, instructions, mine"),
        (["~stages.reward", "~stages.dpo", "~stages.evaluate", "~stages.preferences", "sources.preferences.path=x"],
         "sources.preferences.path=x: no stage reads this source"),
        (["pipeline=cpt-sft-dpo-retrain", "sources.base.path=x"], r"sources.base.path=x: no stage reads this source"),
        (["+source@sources.other=rows", "sources.other.path=x"], "source@sources.other=rows: no stage reads this"),
    ],
)  # fmt: skip
def test_a_source_that_is_set_and_that_no_stage_reads_is_refused(cli_args, message):
    with pytest.raises(ConfigError, match=message):
        load_pipeline(cli_args)


def test_what_the_project_ships_may_go_unread_and_a_fallback_is_read():
    deleted = ["~stages.reward", "~stages.dpo", "~stages.evaluate", "~stages.preferences"]
    assert "preferences" in load_pipeline(deleted).sources
    assert load_pipeline(["pipeline=cpt-sft-dpo-retrain", "model=owner/name"]).sources["base"].path == "owner/name"


OWN = """# @package _global_
defaults:
  [/source@sources.rows: rows, /stage@stages.data.method: conversations, /stage@stages.sft.method: sft, _self_]
name: own
sources: {{{sources}}}
stages:
  data: {{inputs: {{rows: "source:rows"}}}}
  sft: {{inputs: {{policy: {policy}, rows: data}}}}
"""


def own(folder, *cli_args, sources="", policy="base"):
    (folder / "pipeline").mkdir(exist_ok=True)
    (folder / "pipeline/own.yaml").write_text(OWN.format(sources=sources, policy=policy))
    return load_pipeline(["pipeline=own", "sources.rows.path=rows.jsonl", *cli_args], folder)


BASED = {"policy": "source:base", "sources": "base: {path: owner/name, kind: checkpoint}"}
SETS = [
    "stages.sft.method.adapter={type: lora, rank: 16}", "stages.sft.method.optimizer.name=adamw_torch",
    "stages.sft.method.schedule.name=cosine", "stages.sft.method.learning_rate=1e-4",
    "stages.sft.resources={num_workers: 2, sharding: zero2, launcher: cluster}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("adapter=full", "stages.sft.method.adapter.type=lora is set; .* set stages.sft.method.adapter=null"),
        ("adapter.rank=8", "stages.sft.method.adapter.rank=16 is set; .* stages.sft.method.adapter.rank=8"),
        ("adapter.alpha=8", ".*adapter.type=lora is set; .* stages.sft.method.adapter.alpha=8"),
        ("optimizer=lion", ".*optimizer.name=adamw_torch is set; .* stages.sft.method.optimizer.name=lion"),
        ("schedule=constant", ".*schedule.name=cosine is set; .* stages.sft.method.schedule.name=constant"),
        ("resources.num_workers=1", ".*num_workers=2 is set; for that stage set stages.sft.resources.num_workers=1"),
        ("training.sft.learning_rate=1e-5", ".*learning_rate=1e-4 is set; .* stages.sft.method.learning_rate=1e-5"),
    ],
)  # fmt: skip
def test_a_default_of_all_stages_that_each_of_them_sets_itself_is_refused(tmp_path, word, remedy):
    with pytest.raises(ConfigError, match=f"{re.escape(word)}: changes nothing, since {remedy}$"):
        own(tmp_path, *SETS, word, **BASED)


def test_a_default_that_a_stage_takes_or_sets_itself_is_accepted_and_a_part_of_a_group_is_noted(tmp_path):
    same = ("adapter=lora", "adapter.rank=16", "optimizer=default", "resources.num_workers=2")
    for word in (*same, "training.every.num_epochs=2", "training.adapter.dropout=0.1", "resources.cpus_per_worker=1"):
        assert own(tmp_path, *SETS, word, **BASED).stages["sft"].notes == ()
    noted = own(tmp_path, *SETS, "resources=fsdp", **BASED).stages["sft"].notes
    assert noted == ("stages.sft.resources.sharding=zero2 is set, and not as resources=fsdp does",)
    assert load_pipeline(["pipeline=qlora-sft-dpo", "adapter=dora"]).stages["sft"].method.adapter.type == "dora"


@pytest.mark.parametrize("path", ["sft.method.learning_rate", "sft.nonsense", "adapter.rank", "every.beta"])
def test_a_default_of_trainings_that_no_stage_has_is_refused(tmp_path, path):
    with pytest.raises(ConfigError, match=f"training.{path}=3: no stage reads training.{path}"):
        own(tmp_path, f"training.{path}=3")


def test_a_stage_without_its_place_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"sft: unknown key; here it is stages\.sft$"):
        own(tmp_path, "sft.method.learning_rate=1e-4")


def test_a_pipeline_of_the_users_has_the_model_that_it_names_and_the_quickstarts_if_it_asks(tmp_path):
    base = "base: {kind: checkpoint, path: /models/mine}"
    found = own(tmp_path, sources=base)
    assert (list(found.stages), found.sources["base"].path) == (["data", "sft"], "/models/mine")
    assert own(tmp_path, "model=owner/name", sources=base).sources["base"].path == "owner/name"
    assert list(own(tmp_path, sources=f"mine: {base[6:]}", policy="mine").stages) == ["data", "sft"]
    with pytest.raises(ConfigError, match=r"policy=base: no such stage or source; .*model=DIRECTORY, .*or model=tiny"):
        own(tmp_path)
    (tmp_path / "pipeline/own.yaml").write_text("# @package _global_\ndefaults: [cpt-sft-dpo, _self_]\nname: own\n")
    assert "base" in load_pipeline(["pipeline=own", "model=tiny"], tmp_path).stages
    with pytest.raises(ConfigError, match="policy=base: no such stage or source"):
        load_pipeline(["pipeline=own"], tmp_path)
    (tmp_path / "pipeline/own.yaml").write_text(f"# @package _global_\nname: own\nsources: {{{base}}}\n")
    with pytest.raises(
        ConfigError, match=r"rows=corpus: no such stage .* this pipeline has none: .* sources\.base\.path="
    ):
        load_pipeline(["pipeline=own", "model=tiny"], tmp_path)


def test_a_source_in_a_file_of_the_users_is_read_or_refused_but_where_stages_are_deleted(tmp_path):
    file = tmp_path / "pipeline/own.yaml"
    dead = "base: {kind: checkpoint, path: /models/mine}, other: {path: x.jsonl}"
    with pytest.raises(ConfigError, match=f"{file}: sources.other: no stage reads this source; read are: base, rows"):
        own(tmp_path, sources=dead)
    kept = own(tmp_path, "~stages.sft", sources="base: {kind: checkpoint, path: /models/mine}")
    assert list(kept.stages) == ["data"]


@pytest.mark.parametrize("adapter", ["lora", "full"])
def test_the_adapter_goes_to_every_training_stage(adapter):
    pipeline = load_pipeline([f"adapter={adapter}"])
    adapters = [pipeline.stages[name].method.adapter for name in ("cpt", "sft", "reward", "dpo")]
    assert all((each is not None) == (adapter == "lora") for each in adapters)


def test_what_is_written_is_reported_for_all_stages_or_for_one():
    stages = load_pipeline(["adapter=lora", "save=adapter", "stages.dpo.method.save=null"]).stages
    assert [stages[name].method.save for name in ("cpt", "sft", "reward", "dpo")] == ["adapter"] * 3 + [None]
    stages = load_pipeline(["adapter=qlora", "stages.sft.method.save=adapter"]).stages
    assert [stages[name].method.save for name in ("cpt", "sft")] == [None, "adapter"]


def test_fields_of_qlora_may_be_set_one_by_one():
    short = load_pipeline(["adapter=qlora", "stages.sft.method.quantization.double=false"]).stages["sft"].method
    long = ["adapter=lora", "quantization=nf4", "stages.sft.method.quantization.double=false"]
    assert short == load_pipeline(long).stages["sft"].method and not short.quantization.double


def test_resources_of_the_root_reach_every_stage_that_states_none():
    pipeline = toy("resources.micro_batch_size=2", "stages.left.resources.micro_batch_size=4")
    assert pipeline.stages["right"].resources.micro_batch_size == 2
    assert pipeline.stages["left"].resources.micro_batch_size == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "stages.left.method.learning_rat=1",
            "stages.left.method.learning_rat: unknown key.*did you mean learning_rate",
        ),
        ("+stages.left.method.nope=1", "stages.left.method.nope: unknown key; accepted: .*learning_rate"),
        ("stages.lef.method.learning_rate=1", "stages.lef: no such stage.*did you mean left"),
        ("stages.left.input.policy=model", "stages.left.input: unknown key.*did you mean inputs"),
        ("sources.row.path=x", "sources.row.path=x: no stage reads this source.*did you mean rows"),
        ("stor=x", "stor: unknown key.*did you mean store"),
        ("modle=tiny", "modle: unknown key; accepted: model, .*, and [0-9]+ more; did you mean model"),
        ("pipeline=SFT", "pipeline=SFT: no such pipeline; accepted: .*did you mean sft?"),
        ("pipeline=lora", "no such pipeline; did you mean adapter=lora. accepted"),
        ("stage=dpo", r"a piece of a pipeline; did you mean pipeline=dpo\? stage@stages.NAME.method=dpo puts it"),
        ("part=base", "part=base: a part is a piece of a pipeline; choose one with pipeline=NAME"),
        ("stages.left.method.optimizer=adam", "write stages.left.method.optimizer.name=adamw_torch_fused"),
        ("stages.left.method.learning_rate=", "write stages.left.method.learning_rate=NUMBER"),
        ("sources.rows.path=[a,b]", r"several files are a glob such as 'data=rows-\*.jsonl'"),
        ("data=a.csv,b.json", "data=a.csv sources.more.path=b.json stages.instructions.inputs.rows_2=source:more"),
        ("data=[a.csv,b.json]", "data=a.csv sources.more.path=b.json stages.instructions.inputs.rows_2=source:more"),
        ("restart=left", r'restart="left": input should be a valid array; write restart=\[left\]'),
        (
            "resources.keep_best=loss",
            r'resources.keep_best="loss": input should be an object; write resources.keep_best={metric: ..., .*n: ',
        ),
        ("hydra.job.name=x", "hydra.job.name=x: unknown key"),
        ("hydra/launcher=basic", "hydra/launcher=basic: unknown key"),
        ("adapter.rank=0", "adapter.rank=0: input should be greater than 0"),
        ("resources.wrap=-3", "wrap=-3: no class of layers is named so"),
        ("resources.wrap=A,", "wrap=A,: no class of layers is named so"),
        ("stages.left.method.adapter.rnk=1", "stages.left.method.adapter.rnk: unknown key.*did you mean rank"),
        ("save=adapter", r"stages.\w+.method: save=adapter: every weight is trained, .* set adapter=lora"),
        ("stages.left.method.learning_rate=nan", "stages.left.method.learning_rate=NaN: .*finite number"),
        ("stages.left.method.learning_rate=true", "stages.left.method.learning_rate=true: .*valid number"),
        ("stages.left.method.num_steps=2.5", "valid integer"),
        ("resources.save_steps=none", r"save_steps=null turns it off"),
        ("stages.left.method.num_steps=many", 'num_steps="many": .*valid integer'),
        ("stages.left.method.warmup_ratio=-1", "greater than or equal to 0"),
        ("stages.left.method.lr_schedule=sine", "'constant', .*'linear', 'cosine', .* or 'reduce_lr_on_plateau'"),
        ("stages.left.method.learning_rate=1,2", "several values for one field"),
        (
            "stages.left.inputs.policy=data",
            "data gives text, this slot takes checkpoint; that is what model, left, right",
        ),
        ("stages.left.inputs.policy=left", "cycle: left -> left"),
        ("stages.model.inputs.rows=left", "gives checkpoint, this slot takes text"),
        ("stages.left.inputs.policy=modle", "no such stage or source; .*did you mean model"),
        ("stages.left.inputs.polcy=model", "stages.left.inputs.polcy: unknown slot; accepted: policy, rows.*policy"),
        ("~stages.left.inputs.policy", "stages.left.inputs: nothing fills policy"),
        ("stages.left.method.global_batch_size=10", "global_batch_size=10 is not a multiple of 8"),
        ("resources.num_workers=3", "global_batch_size=8 is not a multiple of 24"),
        ("stages.left.method._target_=tasks.nope.X", "cannot be imported.*give package.module.Class"),
        ("stages.left.method._target_=pathlib.Path", "is no tasks.method.Method"),
        ("code_drift=ignore", "'warn', 'rerun' or 'refuse'"),
        ("resources=nope", "resources=nope: no such resources; accepted: .*local"),
        ("pipeline=cpt-sft-dop", "did you mean cpt-sft-dpo"),
        ("stages.left.method=null", "stages.left: no such stage"),
        ("resources.gpus_per_worker=2", "less than or equal to 1"),
        ("name=a/b", "not a name for a pipeline or a stage"),
        ("stages.left.method._target_=tasks.method.Method", "lacks consumes, produces"),
        ("a b c", "is no override .*write key=value"),
        ("stages.left.method.learning_rate=[", "is no override"),
        ("stages.left.method.learning_rate=choice(1", "is no override"),
        ("stages.left.method.learning_rate=1;2", 'learning_rate="1;2": input should be a valid number'),
        ("stages.left.resources.launcher=rocket", "'auto', 'process', 'cluster' or 'foreground'"),
        ("stages.left.resources.launcher=process", None),
    ],
)
def test_a_mistake_says_what_is_accepted(override, message):
    if message is None:
        toy(override)
        return
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        toy(override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stages.left.inputs.policy=right", "stages.right.inputs.policy=left"], "the stages form a cycle: .*left.*right"),  # noqa: E501
        (["resources.num_workers=2", "resources.micro_batch_size=4", "resources.launcher=process"], "runs one worker"),
        (["adapter=lora", "save=lora"], 'save="lora": input should be \'adapter\''),
        (["adapter=qlora", "adapter.quantization=nf5"], 'adapter.quantization="nf5": input should be \'nf4\''),
        (["adapter=lora", "adapter.target_modules='q_proj,'"], "target_modules='q_proj,': a name is empty; names"),
        (["resources.keep_best={metric: held_out_loss}"], "left: resources.keep_best.metric=held_out_loss, "
         "method.best=null, method.validation=null: held_out_loss "
         "is measured only .* set stages.left.resources.keep_best.metric=loss"),
        (["resources=zero2", "resources.num_workers=1"], "num_workers=1: it divides the .* set stages.*sharding=none"),
        (["resources.num_workers=3", "resources.num_nodes=2", "resources.micro_batch_size=1",
          "stages.left.method.global_batch_size=9", "stages.right.method.global_batch_size=9"], "does not divide over"),
    ],
)  # fmt: skip
def test_mistakes_of_two_fields(overrides, message):
    with pytest.raises(ConfigError, match=message):
        toy(*overrides)


def test_mistakes_of_a_methods_fields_together_name_the_stage():
    with pytest.raises(ConfigError, match=r"^stages.sft.method: max_prompt_length=2048 leaves no room"):
        load_pipeline(["stages.sft.method.max_prompt_length=2048", "stages.sft.method.max_length=2048"])


def test_a_mandatory_value_that_nobody_gave():
    with pytest.raises(ConfigError, match=r"sources.rows.path: has no value; set sources.rows.path="):
        load_pipeline(["pipeline=toy", "model=none"], CONF)


def test_yaml_that_does_not_parse_is_a_message(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "broken.yaml").write_text("a: {b")
    with pytest.raises(ConfigError, match=r"broken\.yaml"):
        load_pipeline(["model=broken"], tmp_path)


def test_a_group_file_that_ours_would_hide_is_refused(tmp_path):
    (tmp_path / "stage").mkdir()
    (tmp_path / "stage" / "dpo.yaml").write_text("_target_: tasks.dpo.DPO\nbeta: 0.9\n")
    with pytest.raises(ConfigError, match=r"ships a stage/dpo\.yaml too.*give yours another name"):
        load_pipeline([], tmp_path)


def test_a_config_dir_may_have_any_name(tmp_path):
    folder = tmp_path / "our conf, [1] 'a=b'"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "ours.yaml").write_text("# @package _global_\nsources: {base: {kind: checkpoint, path: /m}}\n")
    assert load_pipeline(["model=ours"], folder).sources["base"].path == "/m"


def test_an_evaluation_of_nothing_is_refused():
    with pytest.raises(ConfigError, match=r"stages.evaluate.inputs: no checkpoint is compared"):
        load_pipeline([f"~stages.evaluate.inputs.{policy}" for policy in ("base", "cpt", "sft", "dpo")])


def test_a_store_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; name a directory"):
        load_pipeline([f"store={tmp_path}/file"])


GROUPS = ("pipeline=toy", "model=none", "sources.rows.path=rows.txt")
RATE = "stages.left.method.learning_rate"


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        (f"{RATE}=0.2", "adapter=lora"),
        (f"{RATE}=0.2", f"++{RATE}=0.3"),
        (f"++{RATE}=0.3", f"{RATE}=0.2"),
        (f"{RATE}=0.2", "~stages.right", f"{RATE}=0.3"),
        ("stages.right.method.num_steps=7", "~stages.right"),
        ("stages.left.resources={max_failures: 1}", "stages.left.resources.max_failures=2"),
        ("stages.left.resources.max_failures=2", "stages.left.resources={max_failures: 1}"),
        ("sources.rows.path=other.txt", "sources={rows: {path: third.txt}}"),
        ("store='a b'", "stages.left.method.new={deep: [1, null]}"),
        ("store=elsewhere", "store=here", "name=other", "code_drift=warn"),
    ],
)
def test_it_is_what_hydra_composes(overrides):
    expected = of_hydra([*GROUPS, *overrides])
    assert compose_tree([*GROUPS, *overrides], CONF) == Composer([*GROUPS, *overrides], CONF).tree() == expected


def of_hydra(cli_args):
    """Hydra takes a value that no file has with ++ only."""
    forced = [
        word if word.startswith(("~", "pipeline=", "model=", "adapter=")) else f"++{word.lstrip('+')}"
        for word in cli_args
    ]
    with initialize_config_dir(config_dir=str(SHIPPED), version_base="1.3"):
        composed = compose("config", overrides=[f"hydra.searchpath=[file://{CONF}]", *forced])
    return OmegaConf.to_container(composed, resolve=True)


def test_files_and_anchors_that_are_used_twice_are_set_apart(tmp_path):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "own.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /stage@stages.one.method: sft\n  - /stage@stages.two.method: sft\n"
        "stages: {one: {inputs: &both {policy: a}}, two: {inputs: *both}}\n"
    )
    cli_args = ["pipeline=own", "model=tiny", "stages.one.method.seed=3", "stages.one.inputs.policy=b"]
    stages = compose_tree(cli_args, tmp_path)["stages"]
    one, two = stages["one"], stages["two"]
    assert (one["method"]["seed"], one["inputs"]) == (3, {"policy": "b"})
    assert ("seed" in two["method"], two["inputs"]) == (False, {"policy": "a"})


def test_what_an_override_cannot_reach_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tags.0: 0 is not an index of a list of 0; set the whole list"):
        compose_tree(["tags.0=x"])
    with pytest.raises(ConfigError, match=r"method.x: method refers to another value, \$\{stages.sft\}; set that one"):
        compose_tree(["stages.dpo.method='${stages.sft}'", "stages.dpo.method.x=1"])
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "own.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match=r"own.yaml: holds no mapping; write KEY: VALUE lines"):
        compose_tree(["pipeline=own"], tmp_path)


def test_a_mapping_is_merged_into_a_copy_of_what_an_interpolation_refers_to(tmp_path):
    """As OmegaConf merges."""
    (tmp_path / "pipeline").mkdir()
    own = tmp_path / "pipeline" / "own.yaml"
    text = "# @package _global_\ndefaults: [/sub, _self_]\nb: {y: 2}\n"
    own.write_text(text)
    (tmp_path / "sub.yaml").write_text("# @package _global_\na: {x: 1, deep: {z: 3}}\nb: ${a}\nc: ${later}\n")
    assert compose_tree(["pipeline=own", "c=1"], tmp_path)["b"] == {"x": 1, "deep": {"z": 3}, "y": 2}
    tree = compose_tree(["pipeline=own", "++b={deep: {w: 4}}", "b.x=5", "c={y: 6}"], tmp_path)
    assert tree["a"] == {"x": 1, "deep": {"z": 3}}
    assert tree["b"] == {"x": 5, "deep": {"z": 3, "w": 4}, "y": 2}
    assert tree["c"] == {"y": 6}


def test_files_may_be_linked(tmp_path):
    (tmp_path / "own.yaml").write_text("# @package _global_\nname: own\n")
    (tmp_path / "groups/pipeline").mkdir(parents=True)
    (tmp_path / "groups/pipeline/own.yaml").symlink_to(tmp_path / "own.yaml")
    (tmp_path / "linked").symlink_to(tmp_path / "groups")
    assert compose_tree(["pipeline=own", "model=tiny"], tmp_path / "linked")["name"] == "own"


@pytest.mark.parametrize("value", ["!!set {x, y}", "!!binary aGk=", "!!timestamp 2026-11-23", "!!omap [x: 1]"])
def test_what_json_does_not_have_is_refused(tmp_path, value):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "own.yaml").write_text(f"# @package _global_\ntags: {value}\n")
    with pytest.raises(ConfigError, match=r"could not determine a constructor for the tag .*own.yaml., line 2"):
        compose_tree(["pipeline=own"], tmp_path)


def test_a_file_that_changed_is_read_again(tmp_path):
    shutil.copytree(CONF, tmp_path / "groups")
    before = compose_tree(GROUPS, tmp_path / "groups")
    file = tmp_path / "groups/pipeline/toy.yaml"
    file.write_text(file.read_text().replace("name: toy", "name: other"))
    os.utime(file, ns=(1, 1))
    assert (before["name"], compose_tree(GROUPS, tmp_path / "groups")["name"]) == ("toy", "other")


@pytest.mark.parametrize("overrides", [[], ["store=elsewhere"], ["store=a", "store='b c'"], ["store=${name}"]])
def test_the_store_is_the_one_that_a_run_would_write(overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store_root(overrides) == load_pipeline(overrides).store


def test_a_wrong_key_is_refused_as_everywhere():
    with pytest.raises(ConfigError, match="stor: "):
        store_root(["stor=elsewhere"])


@pytest.mark.parametrize("configured", [["--config-dir", "ours"], ["--config-dir=ours"]])
def test_the_directory_is_found_among_the_overrides_in_either_form(configured):
    cli_args = ["pipeline=toy", *configured, "~stages.dpo", "+sources.x.path='a b'"]
    assert split_cli_args(cli_args) == (["pipeline=toy", "~stages.dpo", "+sources.x.path='a b'"], Path("ours"))
    assert split_cli_args(["pipeline=toy"]) == (["pipeline=toy"], None)


def test_a_directory_that_is_not_there_is_reported():
    with pytest.raises(ConfigError, match="pipeline=toy --config-dir: argument --config-dir: expected one argument"):
        split_cli_args(["pipeline=toy", "--config-dir"])


def test_yaml_is_read_in_c_by_the_rules_of_omegaconf(tmp_path, monkeypatch):
    (tmp_path / "pipeline").mkdir()
    own = tmp_path / "pipeline" / "own.yaml"
    own.write_text("# @package _global_\nname: own\ntags: [1e-5, 2026-11-23, on, '1', 0x10, .5]\n")

    def fail(*_: object) -> None:
        raise AssertionError("the scanner in Python was called")

    with monkeypatch.context() as patched:
        patched.setattr("yaml.scanner.Scanner.fetch_more_tokens", fail)
        tree = Composer(["pipeline=own", "model=tiny"], tmp_path).tree()
    assert tree["tags"] == [1e-05, "2026-11-23", True, "1", 16, 0.5]  # neither 1e-5 a string nor a date a date
    own.write_text("# @package _global_\nname: own\nname: twice\n")
    with pytest.raises(ConfigError, match="found duplicate key name"):
        Composer(["pipeline=own", "model=tiny"], tmp_path)


def test_a_missing_value_is_refused_and_an_interpolation_is_resolved(tmp_path):
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "own.yaml").write_text("# @package _global_\nname: '???'\nstore: ${code_drift}\n")
    with pytest.raises(ConfigError, match=r"^name: has no value"):
        Composer(["pipeline=own", "model=tiny"], tmp_path).tree()
    assert Composer(["pipeline=own", "model=tiny", "name=given"], tmp_path).tree()["store"] == "warn"


@pytest.mark.parametrize(
    "cli_args",
    [
        ["plan", "store=s3://bucket/store"], ["plan", "store=s3:/bucket/store"],
        ["status", "store=S3://bucket/store"], ["gc", "store=https://host/store"],
        ["stage", "sft", "store=gs://bucket/store"], ["doctor", "store=az://box/store", "pipeline=cpt-sft-dpo"],
        ["plan", "--out", "s3://bucket/plan.json"], ["plan", "--suggest", "s3://bucket/fits.yaml"],
        ["run", "--plan", "s3://bucket/plan.json"], ["run", "--overrides-from", "s3://bucket/best.yaml"],
        ["data", "rows.jsonl", "--html", "s3://bucket/page.html"], ["data", "rows.jsonl", "--out", "s3://bucket/rows"],
        ["lineage", "cpt-sft-dpo/dpo", "--html", "s3://bucket/page.html"], ["serve", "--config-dir", "s3://bucket/conf"],
        ["advise", "--out", "s3://bucket/recipe.yaml"], ["export", "verl", "grpo", "--out", "s3://bucket/verl"],
        ["diagnose", "dpo", "--out", "s3://bucket/patch.yaml"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_url_is_no_path_of_this_machine_in_any_command(cli_args, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(cli_args) == 2
    shown = capsys.readouterr()
    assert "is a URL, and this is a path of this machine; name a file or directory" in shown.err + shown.out
    assert not list(tmp_path.iterdir())


def test_the_url_of_a_local_file_says_its_path_and_shows_no_secret():
    with pytest.raises(ConfigError, match="the path without file:// is accepted: /data/store"):
        store_root(["store=file:///data/store"])
    with pytest.raises(ConfigError, match=r"dvc remote add -d team s3://bucket/path") as found:
        toy("store=s3://me:hidden@bucket/store")
    assert "hidden" not in str(found.value)


SFT = "stages.sft.method"


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        (f"{SFT}.eval_steps=5", "method.validation.every_steps"),
        (f"{SFT}.num_train_epochs=1", f"{SFT}.num_epochs$"),
        (f"{SFT}.per_device_train_batch_size=4", "method.global_batch_size .*micro_batch_size"),
        (f"{SFT}.gradient_accumulation_steps=4", "method.global_batch_size: the micro batches"),
        (f"{SFT}.adapter={{type: lora, lora_r: 8}}", "method.adapter.rank"),
        (f"{SFT}.lora_alpha=8", "method.adapter.alpha"), (f"{SFT}.cutoff_len=8", "method.max_length"),
        (f"{SFT}.sequence_len=8", "method.max_length"),
        (f"{SFT}.lr_scheduler_type=cosine", "method.schedule.name"),
        (f"{SFT}.optimizer.name=adam", f"{SFT}.optimizer.name=adamw_torch_fused"),
        (f"{SFT}.optimizer.name=adamw", f"{SFT}.optimizer.name=adamw_torch_fused"),
        (f"{SFT}.optimizer.name=paged_adamw", f"{SFT}.optimizer.name=paged_adamw_32bit"),
        (f"{SFT}.schedule.name=wsd", f"{SFT}.schedule.name=warmup_stable_decay"),
        ("num_train_epochs=3", "stages.sft.method.num_epochs=3"), ("resources.save_total_limit=2", "keep_last"),
        ("model_name_or_path=x", "model=DIRECTORY or model=owner/name"),
        (f"{SFT}.dropout_position=post", "method.adapter.dropout_position"),
        (f"{SFT}.adapter={{type: lora, lora_A_init_method: xavier}}", "method.adapter.init"),
        ("resources.dataloader_prefetch_factor=4", "resources.prefetch_factor"),
        (f"{SFT}.save_steps=5", "stages.sft.resources.save_steps"), (f"{SFT}.rank=5", f"{SFT}.optimizer.rank"),
        ("stages.sft.resources.learning_rate=1", f"{SFT}.learning_rate"), (f"{SFT}.patience=3", f"{SFT}.schedule"),
        (f"{SFT}.add_eos_token=true", "sources.NAME.tokenizer=DIRECTORY"),
        (f"{SFT}.rope_scaling=linear", "sources.NAME.model_kwargs={rope_scaling: "),
        (f"{SFT}.dataset_text_field=body", "sources.NAME.columns={text: COLUMN}"),
        (f"{SFT}.push_to_hub=true", "posttrain export hub REF"),
        ("stages.dpo.method.ref_model=x", "stages.dpo.inputs.policy"),
        (f"{SFT}.add_bos_token=true", "sources.NAME.add_bos"), (f"{SFT}.use_fast=false", "library tokenizers reads"),
        (f"{SFT}.eos_token=x", "sources.NAME.eos_token"), (f"{SFT}.padding_side=left", "nothing: rows are not padded"),
        (f"{SFT}.new_special_tokens=[x]", "sources.NAME.special_tokens"),
        (f"{SFT}.add_tokens=[x]", "sources.NAME.added_tokens"),
        (f"{SFT}.remove_unused_columns=false", "nothing: the columns"),
        (f"{SFT}.adapter={{type: lora, quantization: bitsandbytes}}", "nf4"),
        (f"{SFT}.schedule.name=cosine_warmup_with_min_lr", f"{SFT}.schedule.name=cosine_with_min_lr"),
        ("stages.dpo.method.loss_type=cdpo", "stages.dpo.method.loss_type=robust"),
        ("stages.dpo.method.precompute_ref_log_probs=true", "resources.precompute_reference"),
        ("optimizer=adamw", "optimizer=adamw_torch_fused"), ("schedule=wsd", "schedule=warmup_stable_decay"),
        ("quantization=4bit", "quantization=nf4"), ("learning_rate=1e-4", "stages.sft.method.learning_rate=1e-4 or "),
        ("temperature=0.5", "STAGE.method.sampling.temperature, which no stage of this pipeline has$"),
        ("ref_model_mixup_alpha=0.5", "stages.dpo.method.reference_sync.mixup_alpha=0.5$"),
        ("beta=0.2", "stages.dpo.method.beta=0.2$"), ("num_workers=2", "resources.num_workers=2$"),
        ("max_bad_rows=0.02", "stages.preferences.method.max_bad_rows=0.02"), ("lora_r=8", "sft.method.adapter.rank=8"),
        ("val_size=0.1", "stages.instructions.method.held_out=0.1"), ("seq_len=99", "stages.dpo.method.max_length=99"),
        ("columns.prompt=a b", "'sources.instructions.columns={prompt: a b}' or 'sources.pref"),
        ("pad_token=x", "sources.base.pad_token=x"), ("shuffle_seed=1", "sources.corpus.shuffle_seed=1 or "),
        ("every_steps=9", "stages.sft.method.validation.every_steps=9"),
        (f"{SFT}.packing=true", f"{SFT}.packing=best_fit"), (f"{SFT}.disable_dropout=true", "not a setting: methods"),
        (f"{SFT}.auto_find_batch_size=true", "resources.micro_batch_size=auto"),
        ("stages.dpo.method.importance_sampling_level=sequence", "method.loss=gspo"),
        (f"{SFT}.adapter={{peft_type: lora}}", "method.adapter.type"),
        ("stages.dpo.method.steps_per_generation=2", "method.global_batch_size: a generation"),
        ("stages.dpo.method.vllm_server_host=h", "not a setting: vllm=server"),
        (f"{SFT}.adapter={{type: lora, rank_pattern: {{}}}}", "not a setting: all layers"),
        (f"{SFT}.adapter={{type: lora, task_type: CAUSAL_LM}}", "nothing: it follows"),
    ],
)  # fmt: skip
def test_a_peers_name_is_answered_with_ours(override, ours):
    with pytest.raises(ConfigError, match=f"here it is .*{ours}"):
        load_pipeline([override])


def test_the_loss_type_of_a_peer_is_the_loss_where_a_method_has_one():
    with pytest.raises(ConfigError, match=r"loss_type: unknown key; here it is stages\.grpo\.method\.loss$"):
        load_pipeline(["pipeline=grpo", "model=tiny", "stages.grpo.method.loss_type=dapo"])


@pytest.mark.parametrize(
    ("override", "ours"),
    [
        ("freeze_trainable_layers=2", f"{SFT}.freeze.except_last_layers=2"),
        ("packing=true", f"{SFT}.packing=best_fit"), ("sample_packing=false", None), ("padding_free=true", None),
        ("model_init_kwargs={attn_implementation: sdpa, dtype: bfloat16}", "resources.attention=sdpa precision=bf16"),
        ("model_init_kwargs={rope_theta: 5}", "model=owner/name sources.base.model_kwargs.rope_theta=5"),
        ("model_init_kwargs={attn_implementation: flash_attention_2}", None), ("deepspeed=ds_z3.json", None),
        ("revision=main", "model=owner/name sources.base.revision=main"), ("rl=sft", None),
        ("rl=grpo", "pipeline=grpo"),
        ("dpo_loss_type=ipo", "pipeline=dpo stages.dpo.method.loss_type=ipo stages.dpo.method.sft_weight=null"),
        ("pref_loss=sigmoid", "pipeline=dpo stages.dpo.method.loss_type=sigmoid"), ("use_peft=true", "adapter=lora"),
        ("lora_target=all", f"{SFT}.adapter.target_modules=all-linear"), ("finetuning_type=full", None),
        ("lora_target=[q_proj,v_proj]", f"'{SFT}.adapter.target_modules=\"q_proj,v_proj\"'"),
        ("quantization_bit=8", "adapter=lora quantization=int8"), ("load_in_4bit=true", "adapter=qlora"),
        ("per_device_train_batch_size=2", f"{SFT}.global_batch_size=2 resources.micro_batch_size=2"),
        ("optim=adamw_bnb_8bit", f"{SFT}.optimizer.name=adamw_8bit"), ("torch_dtype=bfloat16", "precision=bf16"),
        ("adam_beta2=0.95", f"'{SFT}.optimizer.betas=[0.9,0.95]'"), ("save_strategy=epoch", "resources.save_epochs=1"),
        ("evals_per_epoch=4", f"{SFT}.validation.every_epochs=0.25"), ("bf16=false", None),
        ("use_dora=1", "adapter=dora"),
        ("reward_funcs=[accuracy]", "pipeline=grpo"), ("lr_scheduler=wsd", f"{SFT}.schedule.name=warmup_stable_decay"),
    ],
)  # fmt: skip
def test_what_stands_for_a_peers_key_works_when_it_is_pasted(override, ours):
    base = {"pipeline": "pipeline=sft", "model": "model=tiny"}
    with pytest.raises(ConfigError) as found:
        load_pipeline([*base.values(), override])
    answer = str(found.value).partition("here it is ")[2]
    if ours is None:
        assert answer.startswith("nothing")
    else:
        assert answer == ours
        pasted = {word.partition("=")[0]: word for word in shlex.split(answer)}
        assert load_pipeline([*(base | pasted).values()])


def test_the_kind_of_a_model_lets_the_trainings_that_can_read_images() -> None:
    stages = load_pipeline(["model.kind=vlm"]).stages
    assert stages["sft"].method.images == Images()
    assert load_pipeline(["model.kind=llm"]).stages["sft"].method.images is None
    trained = load_pipeline(["model.kind=vlm", "stages.sft.method.images.trains=[projector]"]).stages["sft"].method
    assert trained.images == Images(trains=("projector",))
    with pytest.raises(ConfigError, match=r"model.kind"):
        load_pipeline(["model.kind=vllm"])


@pytest.mark.parametrize(
    ("frozen", "trains", "language"),
    [
        ("[vision,projector]", None, None),
        ("[vision]", ("projector",), None),
        ("vision", ("projector",), None),
        ("[]", ("vision", "projector"), None),
        ("[language,vision]", ("projector",), "frozen"),
    ],
)
def test_frozen_parts_of_a_model_that_reads_images_are_listed(frozen, trains, language) -> None:
    found = load_pipeline(["model.kind=vlm", f"stages.sft.method.freeze={frozen}"]).stages["sft"].method
    assert (set(found.images.trains or ()), found.images.language) == (set(trains or ()), language)
    assert found.freeze is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["model.kind=vlm", "stages.sft.method.freeze=[tower]"],
            "tower is no part of a model; vision, projector, lang",
        ),
        (["stages.sft.method.freeze=[vision]"], "stages.sft.method.freeze=.*on rows with images set model.kind=vlm"),
        (["model.kind=vlm", "stages.sft.method.freeze=[vision,projector,language]"], "nothing would be trained"),
    ],
)
def test_parts_that_cannot_be_frozen_are_refused(overrides, message) -> None:
    assert load_pipeline(["stages.sft.method.freeze=[vision,projector]"]).stages["sft"].method.freeze is None
    with pytest.raises(ConfigError, match=message):
        load_pipeline(overrides)
