"""What the plan refuses before anything starts."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from flows.__main__ import main
from flows.declare.config import load_pipeline
from flows.planning import estimates
from flows.planning.checks import check_row_kinds, cluster_notes, column_notes
from flows.planning.model_checks import check_models
from flows.planning.plan import make_plan, used_resources
from flows.run import check_machine, open_run
from flows.stages.resources import Cluster, Node, require_gpus
from lineage.errors import ConfigError
from tasks.context import Launcher, Resources
from tasks.merge import Merge


def test_a_store_whose_locks_other_hosts_do_not_see_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("flows.planning.model_checks.unreliable_locks", lambda path: "/mnt is fuse.sshfs")
    with pytest.raises(ConfigError, match=r"do not see each other's locks \(/mnt is fuse.sshfs\); put it on NFSv4"):
        make_plan(load_pipeline([f"store={tmp_path}"]))


def write_model(folder: Path, *, weights: bool = True, template: str | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    (folder / "tokenizer.json").write_text("{}")
    if weights:
        (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return folder


def is_refused(pipeline) -> bool:
    try:
        check_models(pipeline)
    except ConfigError:
        return True
    return False


def test_a_directory_that_is_no_model_is_refused_by_the_plan(tmp_path):
    with pytest.raises(ConfigError, match=r"sources.base.path=.*: no config.json in it"):
        make_plan(load_pipeline([f"model={tmp_path}"]))
    model = write_model(tmp_path / "model", weights=False)
    (model / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match="no weights in safetensors"):
        make_plan(load_pipeline([f"model={model}"]))


def refuse_all(*arguments):
    raise ConfigError("sft needs more")


def test_a_model_without_weights_is_planned_by_its_configuration_and_not_run(tmp_path, capsys, monkeypatch):
    model = write_model(tmp_path / "model", weights=False, template="{{ messages }}")
    sizes = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9}
    (model / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1-of-2.safetensors"}}')
    words = [
        f"store={tmp_path / 'store'}",
        "pipeline=sft",
        f"model={model}",
        "tracking=none",
        "stages.sft.method.num_epochs=null",
    ]
    words += ["stages.sft.method.num_steps=50"]
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert f"sources.base.path={model}: no weights yet in model" in shown
    assert re.search(r"^sft +\d+\.\d\d.* +0\.\d\d +\d+:\d\d.* max_length=2048$", shown, re.MULTILINE), shown
    assert re.search(r"^disk: at most \d.* GB with checkpoints, .* stay; .* free$", shown, re.MULTILINE), shown
    monkeypatch.setattr(estimates, "free_bytes", lambda path: 10**6)
    assert main(["plan", *words]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^disk: \d.* > 1.0 MB free, .*keep_last=1 .* store=", shown, re.MULTILINE), shown
    monkeypatch.setattr(estimates, "require_plan_disk", refuse_all)
    assert main(["plan", *words]) == 0
    assert "> 1.0 MB free: a run here is refused: sft needs more" in capsys.readouterr().out
    assert main(["run", *words]) == 2
    assert "a run needs them (*.safetensors); download them into it" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_is_refused_as_such(tmp_path):
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer in it, such as tokenizer.json; .*set sources.base.tokenizer="):
        check_models(load_pipeline([f"model={model}"]))


def test_a_missing_chat_template_is_refused_by_the_plan(tmp_path):
    model = write_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"stages.sft.inputs.policy=cpt: .*stages.sft.method.chat_template=chatml"):
        check_models(load_pipeline([f"model={model}"]))
    check_models(load_pipeline([f"model={model}", "stages.sft.method.chat_template=chatml"]))


def test_the_field_that_gives_a_chat_template_is_named(tmp_path):
    orpo = ["pipeline=orpo", f"model={write_model(tmp_path / 'model')}"]
    fields = r"set sources.base.chat_template=chatml or stages.orpo.method.chat_template=chatml, or start"
    with pytest.raises(ConfigError, match=rf"stages.orpo.inputs.policy=cpt: .*{fields}"):
        check_models(load_pipeline(orpo))
    # Of the base, which is measured too, no stage sets one.
    with pytest.raises(
        ConfigError, match=r"evaluate.inputs.reference=cpt: .*set sources.base.chat_template=chatml, or"
    ):
        check_models(load_pipeline([*orpo, "stages.orpo.method.chat_template=chatml"]))
    check_models(load_pipeline([*orpo, "sources.base.chat_template=chatml"]))


def test_a_template_in_the_tokenizer_config_or_beside_it_is_one(tmp_path):
    assert not is_refused(load_pipeline([f"model={write_model(tmp_path / 'a', template='{{ messages }}')}"]))
    beside = write_model(tmp_path / "b")
    assert is_refused(load_pipeline([f"model={beside}"]))
    (beside / "chat_template.jinja").write_text("{{ messages }}")
    assert not is_refused(load_pipeline([f"model={beside}"]))


def test_gpus_that_are_not_there_are_refused_before_anything_starts(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    require_gpus("dpo", 1)
    with pytest.raises(ConfigError, match=r"asks for 2 GPUs \(1 of them by method.evaluation.gpus\), this machine"):
        require_gpus("dpo", 2, beside=1)
    with pytest.raises(ConfigError, match="asks for 2 GPUs, this machine shows 1"):
        require_gpus("dpo", 2)
    monkeypatch.setattr("flows.stages.resources.list_gpus", lambda name: ["NVIDIA A100-SXM4-40GB"])
    require_gpus("dpo", 1, "A100")
    with pytest.raises(ConfigError, match=r"stages.dpo.resources.gpu=H100: this machine has A100; set gpu=null"):
        require_gpus("dpo", 1, "H100")


def test_a_cluster_elsewhere_takes_nothing_of_this_machine(monkeypatch):
    beside = "+stages.dpo.evaluation={every_steps: 1, cpus: 3, gpus: 1}"
    plan = make_plan(load_pipeline(["resources=cluster", "resources.gpus_per_worker=1", beside]))
    assert plan.stage("sft").needs == (2, 2) and plan.stage("dpo").needs == (5, 3)
    assert "sft: on a Ray cluster that the run starts on this machine" in cluster_notes(["sft"])[0]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert plan.stage("sft").needs == (0, 0)
    assert "sft: on the Ray cluster at RAY_ADDRESS=auto" in cluster_notes(["sft"])[0] and cluster_notes([]) == []


def test_models_are_evaluated_by_all_workers_and_merged_by_one_where_a_cluster_is_joined(monkeypatch):
    plan = make_plan(load_pipeline(["resources=cluster"]))
    stages = {name: plan.stage(name) for name in ("corpus", "base", "sft", "evaluate")}
    workers = {name: (each.resources.num_workers, each.resources.on_cluster) for name, each in stages.items()}
    assert workers == {"corpus": (1, False), "base": (1, False), "sft": (2, True), "evaluate": (2, True)}
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    elsewhere = {name for name, each in stages.items() if each.runs_elsewhere}
    assert elsewhere == {"base", "sft", "evaluate"}
    assert used_resources(Merge(), Resources(num_workers=4, num_nodes=2, min_workers=2)) == Resources(
        num_workers=1, launcher=Launcher.CLUSTER
    )
    assert used_resources(Merge(), Resources(launcher=Launcher.FOREGROUND)).launcher == Launcher.FOREGROUND


def test_quickstart_rows_that_do_not_exist_are_refused_by_the_plan():
    with pytest.raises(ConfigError, match=r"no such rows; accepted: quickstart:corpus.*did you mean quickstart:corpus"):
        make_plan(load_pipeline(["sources.corpus.path=quickstart:corpsu"]))


PAIR = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"}
SINGLE = {"prompt": "Hi", "completion": "Hello", "label": True}


@pytest.mark.parametrize(
    ("pipeline", "overrides", "rows", "message"),
    [
        (
            "cpt-sft-dpo",
            [],
            [SINGLE],
            r"which gives unpaired; preferences is accepted.*use pipeline=kto, or conf/stage/unpaired.yaml",
        ),
        ("sft-kto", [], [PAIR], None),
        ("cpt-sft-dpo", [], [PAIR], None),
        ("cpt-sft-dpo", ["sources.preferences.format=preference"], [SINGLE], None),  # the stage says what it lacks
        ("cpt-sft-dpo", ["stages.preferences.method.max_bad_rows=9"], [SINGLE], None),  # the first may be the bad ones
        ("cpt-sft-dpo", ["sources.preferences.split='train[1:]'"], [SINGLE, PAIR], None),
        ("cpt-sft-dpo", [], [["no row"]], None),
    ],
)
def test_a_file_of_single_answers_is_refused_by_the_plan_where_pairs_are_read(
    tmp_path, pipeline, overrides, rows, message
):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    check = partial(
        check_row_kinds, load_pipeline([f"pipeline={pipeline}", f"sources.preferences.path={path}", *overrides])
    )
    if message is None:
        check()
        return
    with pytest.raises(ConfigError, match=rf"stages.preferences.inputs: {path}: detected .*{message}"):
        check()


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv"])
def test_the_plan_names_the_columns_that_are_not_read(tmp_path, suffix):
    path, columns = tmp_path / f"rows.{suffix}", ["id", "group", *PAIR]
    rows = [{"id": "1", "group": "g", **PAIR}] * 3
    path.write_text("\n".join(map(json.dumps, rows)) if suffix == "jsonl" else json.dumps(rows))
    if suffix == "csv":
        path.write_text("\n".join([",".join(columns), *(",".join(row.values()) for row in rows)]))
    pipeline = load_pipeline([f"sources.preferences.path={path}"])
    notes = column_notes(pipeline, ["base", "preferences", "dpo"])
    assert notes == [f"preferences: columns of {path} that are not read: id"]
    assert column_notes(pipeline, ["corpus", "dpo"]) == []
    path.write_text("no row")
    assert column_notes(pipeline, ["preferences"]) == []


def test_several_nodes_need_a_cluster_elsewhere(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    plan = make_plan(load_pipeline(["resources=cluster", "resources.num_nodes=2"]))
    with pytest.raises(ConfigError, match="num_nodes=2: a cluster started here has one node; set RAY_ADDRESS"):
        check_machine(plan.stale)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    one = Node(host="a", node="10.0.0.1, node 1", cpus=8.0)
    monkeypatch.setattr("flows.run.ask_cluster", lambda: Cluster(nodes=(one,)))
    with pytest.raises(ConfigError, match=r"cpt.resources.num_nodes=2: the cluster has 1 node: a \(10.0.0.1, node 1\)"):
        check_machine(plan.stale)
    monkeypatch.setattr("flows.run.ask_cluster", lambda: Cluster(nodes=(one, one)))
    assert check_machine(plan.stale) == Cluster(nodes=(one, one))


@pytest.mark.parametrize(("model_type", "is_refused"), [("llama", False), ("gemma2", False), ("bloom", True)])
def test_packing_on_a_model_that_would_mix_rows_is_refused_by_the_plan(tmp_path, model_type, is_refused):
    model = write_model(tmp_path / "model", template="{{ messages }}")
    (model / "config.json").write_text(json.dumps({"model_type": model_type}))
    check_models(load_pipeline([f"model={model}"]))
    packed = load_pipeline([f"model={model}", "stages.sft.method.packing=best_fit"])
    if not is_refused:
        check_models(packed)
        return
    with pytest.raises(
        ConfigError, match=r"stages\.sft: method\.packing=best_fit.*bloom, .*set stages\.sft\.method\.packing=null"
    ):
        make_plan(packed)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("stages.dpo.method.adapter_in=stack",), "stages.sft trains every weight"),
        (("stages.dpo.method.adapter_in=continue",), "stages.sft trains every weight"),
        (
            ("stages.dpo.method.adapter_in=stack", "stages.sft.method.adapter.type=vera"),
            "stages.sft trains an adapter of type vera, and only a LoRA",
        ),
        (
            ("stages.dpo.method.adapter_in=stack", "stages.sft.method.adapter.trainable_token_indices=[5]"),
            "stages.sft trains rows of the embedding",
        ),
    ],
)
def test_a_stage_before_without_the_adapter_that_is_kept_is_refused_by_the_plan(overrides, message):
    with pytest.raises(ConfigError, match=rf"stages.dpo.method.adapter_in=\w+: {message}"):
        check_models(load_pipeline(["stages.dpo.method.adapter.type=lora", *overrides]))
    check_models(load_pipeline(["adapter=lora", overrides[0]]))


def test_a_drop_is_accepted_of_a_stage_that_trains(tmp_path):
    with pytest.raises(ConfigError, match=r"accept_label_drop: no stage that trains is named stf; .*mean sft\?"):
        make_plan(load_pipeline([f"store={tmp_path}", "accept_label_drop=[stf]"]))


def test_columns_the_other_way_round_are_refused_with_the_line_to_type(tmp_path):
    cli_args = [f"store={tmp_path}", "sources.instructions.columns.The_Question=prompt"]
    with pytest.raises(
        ConfigError, match=r"columns maps our name to the rows' column: set sources.instructions.columns.prompt=The_Q"
    ):
        make_plan(load_pipeline(cli_args))
    make_plan(load_pipeline([cli_args[0], "sources.instructions.columns.prompt=The_Question"]))
    make_plan(load_pipeline([*cli_args, "sources.instructions.format=prompts"]))  # a reward function calls it so


def test_a_mixture_is_checked_with_the_plan(tmp_path):
    cli_args = [f"store={tmp_path}", "stages.corpus.inputs.more=source:instructions"]
    with pytest.raises(
        ConfigError, match=r"stages.corpus.method: proportions name rows; the slots of rows are rows, more"
    ):
        make_plan(load_pipeline([*cli_args, "stages.corpus.method.proportions={rows: 1.0}"]))
    with pytest.raises(ConfigError, match=r"stages.corpus.method: temperature=2: there is one slot of rows"):
        make_plan(load_pipeline([cli_args[0], "stages.corpus.method.temperature=2.0"]))


def test_nothing_trains_before_all_data_is_prepared_also_that_which_needs_a_tokenizer(tmp_path):
    cli_args = [
        f"store={tmp_path}",
        "stages.preferences.inputs.tokenizer=base",
        "stages.instructions.inputs.tokenizer=cpt",
    ]
    plan = make_plan(load_pipeline(cli_args))
    assert plan.waits(plan.stage("cpt")) == {"base", "corpus", "preferences"}  # instructions are made with cpt itself
    assert plan.waits(plan.stage("sft")) >= {"cpt", "instructions", "preferences"}
    assert plan.waits(plan.stage("base")) == {"corpus"}
    names = [planned.name for planned in plan.stages]
    assert all(names.index(other) < names.index(name) for name in names for other in plan.waits(plan.stage(name)))


def test_data_stages_take_no_gpu():
    plan = make_plan(load_pipeline(["resources=gpu"]))
    assert plan.stage("corpus").needs[1] == 0
    assert plan.stage("evaluate").needs[1] == 1


def test_packing_on_the_quickstarts_own_model_is_planned():
    assert not is_refused(load_pipeline(["stages.sft.method.packing=best_fit"]))


@pytest.mark.parametrize("where", ["stages.sft.resources", "resources"])  # of stages that save none too
def test_a_mirror_that_cannot_be_written_is_refused_before_any_stage_starts(tmp_path, where):
    (tmp_path / "file").touch()
    plan = make_plan(load_pipeline([f"{where}.checkpoint_mirror=file://{tmp_path}/file/x"]))
    with (
        pytest.raises(ConfigError, match=r"checkpoint_mirror=file://.*: cannot be written \("),
        open_run(plan, [], lambda event: None, plan.stale),
    ):
        pass
