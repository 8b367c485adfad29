"""``posttrain advise``, the presets and the sweeps of the reference documents."""

import json
import shlex
from operator import attrgetter
from pathlib import Path

import pytest
import yaml

from flows.__main__ import main
from flows.declare.config import CONF, load_pipeline
from flows.planning.plan import Plan, make_plan
from flows.sweep.plan import read_sweep
from tasks.judgement.advice import TABLE, case_of, findings
from tasks.method import Adapter
from tasks.sft import SFT
from tests.finished import finish

PRESETS = sorted(path.stem for path in (CONF / "preset").glob("*.yaml"))
ROWS = {
    "corpus": {"text": "a"},
    "instructions": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    "preferences": {"prompt": "a", "chosen": "b", "rejected": "c"},
}
SMALL = tuple(f"sources.{name}.path={name}.jsonl" for name in ROWS)
PRETRAINED = ("model=smollm2", "tracking=none", "sources.instructions.path=instructions.jsonl")


@pytest.fixture(autouse=True)
def _rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, row in ROWS.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(row).replace('"a"', f'"a {n}"') + "\n" for n in range(2_000))
        )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def plan(*overrides: str) -> Plan:
    return make_plan(load_pipeline([*PRETRAINED, *overrides]))


def advised(capsys: pytest.CaptureFixture[str], *cli_args: str) -> tuple[dict[str, object], list[str]]:
    """Field -> value for the stage ``sft``, and all overrides."""
    assert main(["advise", "sft", "--json", *PRETRAINED, *cli_args]) == 0
    found = json.loads(capsys.readouterr().out)
    return {each["field"]: each["value"] for each in found["stages"][0]["values"]}, found["overrides"]


@pytest.mark.parametrize("tuned", ["adapter=full", "adapter=lora", "adapter=qlora"])
@pytest.mark.parametrize("num_rows", [None, 60.0, 900.0, 20_000.0, 2_000_000.0])
def test_what_is_advised_plans_and_is_inside_every_range(tuned: str, num_rows: float | None, capsys) -> None:
    if num_rows:
        finish(plan(tuned), "corpus", "instructions", metrics={"train_rows": num_rows})
    values, overrides = advised(capsys, tuned, "stages.sft.method.learning_rate=1", "resources.keep_last=9")
    planned = plan(tuned, *overrides).stage("sft")
    length = planned.hyperparameters
    assert length
    case = case_of(planned.stage.method, planned.stage.resources, int(num_rows or 1_800), length.num_steps)
    assert not [str(each) for each in findings(case)]
    assert "method.adapter.rank" in values or tuned == "adapter=full"


def test_the_rows_of_a_source_are_counted_and_decide(capsys) -> None:
    values, _ = advised(capsys)
    assert [values[f"method.{name}"] for name in ("learning_rate", "num_epochs", "global_batch_size")] == [2e-6, 1, 16]
    assert values["method.optimizer.weight_decay"] == 0.01 and values["resources.micro_batch_size"] == 4
    main(["advise", "sft", *PRETRAINED])
    out = capsys.readouterr().out
    assert "sft: 1,820 rows for training (2,000 of " in out  # those that the data stage's split leaves, as `plan` says
    assert "1e-6..5e-6 for < 5K rows" in out and "reference documents, by data size" in out


def test_a_rate_grows_with_the_batch_that_is_kept_and_a_value_inside_stays(capsys) -> None:
    values, _ = advised(
        capsys, "stages.sft.method.global_batch_size=32", "stages.sft.method.optimizer.weight_decay=0.05"
    )
    assert values["method.global_batch_size"] == 32 and values["method.optimizer.weight_decay"] == 0.05
    assert values["method.learning_rate"] == 2.8e-6
    finish(plan("adapter=lora"), "corpus", "instructions", metrics={"train_rows": 20_000.0})
    values, _ = advised(capsys, "adapter=lora", "stages.sft.method.learning_rate=1")
    assert values["method.global_batch_size"] == 64 and values["method.learning_rate"] == 1e-4  # and not 1.4e-4


def test_the_overrides_can_be_pasted_and_a_file_holds_them_with_reasons(capsys) -> None:
    assert main(["advise", "sft", *PRETRAINED]) == 0
    pasted = shlex.split(capsys.readouterr().out.partition("paste:\n")[2].replace("\\\n", " "))
    assert pasted[:2] == ["posttrain", "plan"] and main(pasted[1:]) == 0
    one = capsys.readouterr().out
    assert main(["advise", "--out", "advice.yaml", "sft", *PRETRAINED]) == 0
    assert "# 1e-6..5e-6 for < 5K rows (reference documents, by data size)" in Path("advice.yaml").read_text()
    assert yaml.safe_load(Path("advice.yaml").read_text())["overrides"] == pasted[2:]
    capsys.readouterr()
    assert main(["plan", "--overrides-from", "advice.yaml"]) == 0
    assert capsys.readouterr().out == one


def test_the_steps_of_a_warm_up_are_of_the_methods_own_batch(capsys) -> None:
    assert main(["advise", "dpo", "--json", *PRETRAINED, *SMALL]) == 0
    (found,) = json.loads(capsys.readouterr().out)["stages"]
    of_dpo = {each["field"]: each for each in found["values"]}
    assert of_dpo["method.schedule.warmup"]["value"] == 5
    assert "29 steps in all" in of_dpo["method.schedule.warmup"]["reason"]  # 1,800 rows, 64 of them a step
    assert of_dpo["method.validation.every_steps"]["value"] == 7
    assert "at least 4 in 29 steps" in of_dpo["method.validation.every_steps"]["reason"]


def test_texts_whose_held_out_part_fills_no_chunk_are_not_validated(capsys, tmp_path) -> None:
    for num_rows, validates in ((144, False), (40_000, True)):
        (tmp_path / "notes.txt").write_text("A line of some words.\n" * num_rows)
        assert main(["advise", "cpt", "--json", *PRETRAINED[:2], "pipeline=cpt", "data=notes.txt"]) == 0
        found = {each["field"] for each in json.loads(capsys.readouterr().out)["stages"][0]["values"]}
        assert ("method.validation.every_steps" in found) == validates


def test_what_only_the_job_form_names_is_kept_inside_its_range_and_moved_from_outside(capsys) -> None:
    wrong = [f"stages.dpo.{field}" for field in ("method.learning_rate=1", "resources.micro_batch_size=32")]
    assert main(["advise", "dpo", "--json", *PRETRAINED, *SMALL, *wrong]) == 0
    found = json.loads(capsys.readouterr().out)
    of_dpo = {each["field"]: each for each in found["stages"][0]["values"]}
    assert of_dpo["method.learning_rate"]["value"] == 2e-5 and of_dpo["resources.micro_batch_size"]["value"] == 8
    assert of_dpo["method.num_epochs"]["reason"] == "kept, inside < 50"
    stage = plan(*SMALL, *found["overrides"]).stage("dpo").stage
    assert not [str(each) for each in findings(case_of(stage.method, stage.resources, 1_800, 29))]


def test_gpus_of_the_machine_become_workers_that_divide_the_batch(capsys, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    values, _ = advised(capsys)
    resources = [values[f"resources.{name}"] for name in ("gpus_per_worker", "num_workers", "micro_batch_size")]
    assert resources == [1, 2, 4] and values["method.precision"] == "bf16"


def test_a_model_made_from_scratch_keeps_its_values_and_all_stages_are_advised(capsys) -> None:
    assert main(["advise", "--json", "tracking=none", *SMALL]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [each["stage"] for each in stages] == ["cpt", "sft", "reward", "dpo"]
    of_sft = {each["field"]: each for each in stages[1]["values"]}
    assert of_sft["method.learning_rate"]["value"] == 2e-3 and of_sft["method.num_steps"]["value"] == 400
    assert "made from scratch" in of_sft["method.learning_rate"]["reason"]


def test_a_stage_that_does_not_train_is_refused(capsys) -> None:
    assert main(["advise", "sftt", *PRETRAINED]) == 2
    assert "sftt: no stage that trains; there are: cpt, sft, reward, dpo; did you mean sft?" in capsys.readouterr().err


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_composes_and_plans(preset: str) -> None:
    assert plan(f"preset={preset}").stale


@pytest.mark.parametrize(("preset", "band"), [("tiny-data", "small"), ("medium", "medium"), ("large", "large")])
def test_a_preset_of_a_size_has_the_values_that_are_advised_for_it(preset: str, band: str) -> None:
    for tuned, overrides in (("full", ()), ("lora", ("adapter=lora",))):
        planned = plan(f"preset={preset}", *overrides).stage("sft")
        case = case_of(planned.stage.method, planned.stage.resources)
        rows = [
            row for row in TABLE if row.size == band and "SFT" in row.methods and (not row.tuned or tuned in row.tuned)
        ]
        assert len(rows) == 6 and {row.field: case.values[row.field] for row in rows} == {
            row.field: row.advised for row in rows
        }


# preset -> of SFT, all weights: rate, epochs, batch, decay, least rate, micro batch; of its LoRA: rate, epochs, rank,
# alpha, dropout.
SCENARIOS = {
    "conservative": ([1e-6, 1, 32, 0.0, 1e-7, 4], [1e-5, 1, 8, 8, 0.05]),
    "tiny-data": ([2e-6, 2, 16, 0.01, 1e-7, 4], [2e-5, 4, 8, 16, 0.05]),
    "medium": ([1e-5, 3, 32, 0.01, 1e-6, 8], [1e-4, 3, 16, 32, 0.05]),
    "large": ([2e-5, 2, 64, 0.01, 1e-6, 8], [2e-4, 2, 32, 64, 0.05]),
    "one-gpu-qlora": ([], [1e-4, 3, 16, 32, 0.05]),
}


@pytest.mark.parametrize("preset", SCENARIOS)
def test_a_preset_sets_every_figure_of_its_scenario_of_all_weights_and_of_an_adapter(preset: str) -> None:
    full, lora = SCENARIOS[preset]
    shared = [
        "learning_rate", "num_epochs", "global_batch_size", "optimizer.weight_decay", "schedule.min_learning_rate",
    ]  # fmt: skip
    adapted = ["learning_rate", "num_epochs", "adapter.rank", "adapter.alpha", "adapter.dropout"]
    if full:
        stage = plan(f"preset={preset}", *SMALL).stage("sft").stage
        assert [*map(attrgetter(*shared), [stage.method])] == [tuple(full[:-1])]
        assert stage.resources.micro_batch_size == full[-1]
    cli_args = [] if preset == "one-gpu-qlora" else ["adapter=lora"]
    found = plan(f"preset={preset}", *cli_args, *SMALL)
    assert [*map(attrgetter(*adapted), [found.stage("sft").stage.method])] == [tuple(lora)]
    assert attrgetter(*adapted[2:])(found.stage("dpo").stage.method) == tuple(lora[2:])
    band = {"tiny-data": 1_000, "medium": 20_000, "large": 90_000}.get(preset)
    if band or preset == "one-gpu-qlora":
        stage = found.stage("sft").stage
        assert not list(findings(case_of(stage.method, stage.resources, band)))


def test_the_adapter_of_a_preset_gives_way_to_an_override_to_other_types_and_to_four_bits() -> None:
    def adapter(*cli_args: str) -> Adapter:
        method = plan("preset=large", *cli_args).stage("sft").stage.method
        assert isinstance(method, SFT) and method.adapter
        return method.adapter

    assert (adapter("adapter=lora", "adapter.rank=4").rank, adapter("adapter=dora").rank) == (4, 32)
    assert adapter("adapter=adalora").rank == 12 and adapter("adapter=ia3").type == "ia3"
    of_qlora = adapter("adapter=qlora")
    assert (of_qlora.rank, of_qlora.alpha, of_qlora.dropout) == (16, 32, 0.05)


def test_what_is_wrong_of_a_base_in_four_bits_is_advised_and_what_is_right_is_not_set(capsys) -> None:
    values, _ = advised(capsys, "adapter=qlora")
    assert not [field for field in values if "quantization" in field]
    fields = {"double": "false", "compute_dtype": "fp32"}
    all_wrong = [f"stages.sft.method.quantization.{name}={value}" for name, value in fields.items()]
    for cli_args in (["adapter=lora", "quantization=fp4", *all_wrong], ["adapter=qlora", "adapter.quantization=fp4"]):
        values, overrides = advised(capsys, *cli_args)
        method = plan(*cli_args, *overrides).stage("sft").stage.method
        assert isinstance(method, SFT) and method.quantization and method.quantization.format == "nf4"
        if all_wrong[0] in cli_args:
            assert (method.quantization.double, method.quantization.compute_dtype) == (True, "bf16")


def test_the_conservative_preset_has_the_documents_values() -> None:
    planned = plan("preset=conservative").stage("dpo")
    method, resources = planned.stage.method, planned.stage.resources
    assert isinstance(plan("preset=conservative").stage("sft").stage.method, SFT)
    found = {**method.recipe(), "micro": resources.micro_batch_size, "save_steps": resources.save_steps}
    expected = {
        "learning_rate": 1e-6, "num_epochs": 1.0, "global_batch_size": 32, "micro": 4, "save_steps": 50,
        "validation": {"every_steps": 10},
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    assert (method.optimizer.weight_decay, method.schedule.min_learning_rate) == (0, 1e-7)  # type: ignore[attr-defined]


def test_qlora_on_one_gpu_has_values_inside_every_range() -> None:
    planned = plan("preset=one-gpu-qlora").stage("sft")
    case = case_of(planned.stage.method, planned.stage.resources)
    assert case.tuned == "qlora" and planned.stage.resources.gpus_per_worker == 1
    assert not list(findings(case))


def test_a_preset_gives_way_to_a_stage_and_to_overrides_and_says_so() -> None:
    found = make_plan(load_pipeline(["preset=medium", "tracking=none", "stages.sft.method.validation=null"]))
    assert found.stage("sft").stage.method.recipe()["learning_rate"] == 2e-3
    assert (
        "stages.sft.method: sets learning_rate, num_steps, global_batch_size itself, and not as the preset does"
        in found.notes
    )
    cli_args = ("preset=conservative", "stages.sft.method.weight_decay=0.1", "stages.sft.method.validation=null")
    method = plan(*cli_args).stage("sft").stage.method
    assert method.optimizer.weight_decay == 0.1 and method.validation is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("sweep", "rates"), [("lr-sft", [1e-6, 1e-5, 5e-5]), ("lr-peft", [5e-5, 1e-4, 2e-4])]
)  # fmt: skip
def test_a_sweep_of_learning_rates(sweep: str, rates: list[float]) -> None:
    trials = read_sweep([f"sweep={sweep}", *PRETRAINED]).known or []
    methods = [trial.plan.stage("sft").stage.method for trial in trials]
    assert [method.learning_rate for method in methods] == rates  # type: ignore[attr-defined]
    assert [method.adapter is not None for method in methods] == [sweep == "lr-peft"] * 3  # type: ignore[attr-defined]


def test_what_does_not_fit_into_memory_is_advised_smaller(capsys, monkeypatch) -> None:
    from flows.planning import adapter_choice

    def sft(memory: int) -> dict[str, object]:
        monkeypatch.setattr(adapter_choice, "_of_machine", lambda: memory)
        cli_args = ("tracking=none", *SMALL, "stages.base.method.hidden_size=1536", "stages.base.method.num_layers=8")
        assert main(["advise", "--json", *cli_args]) == 0
        found = json.loads(capsys.readouterr().out)
        assert main(["plan", *cli_args, *found["overrides"]]) == 0
        capsys.readouterr()
        return {each["field"]: each["value"] for each in found["stages"][1]["values"]}

    assert "method.adapter" not in sft(2**40)
    assert sft(7 * 2**28)["method.adapter"] == "{type: lora}"


@pytest.mark.parametrize("steps", [60, 120])
def test_a_stage_with_steps_is_advised_one_length(capsys, steps: int) -> None:
    finish(plan(), "corpus", "instructions", metrics={"train_rows": 900.0})
    values, overrides = advised(capsys, f"stages.sft.method.num_steps={steps}")
    lengths = [name for name in ("num_steps", "num_epochs") if values.get(f"method.{name}") is not None]
    assert len(lengths) == 1
    assert plan(*overrides).stage("sft").stage.method.num_steps in (steps, None)


def test_a_length_in_steps_inside_its_range_is_kept_as_steps(capsys) -> None:
    finish(plan(), "corpus", "instructions", metrics={"train_rows": 900.0})
    steps = 28  # of 64 rows: 2 epochs
    values, overrides = advised(capsys, f"stages.sft.method.num_steps={steps}")
    assert (values["method.num_steps"], "method.num_epochs" in values) == (steps, False)
    assert plan(*overrides).stage("sft").stage.method.num_steps == steps
