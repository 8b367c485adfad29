"""What a plan says of the learning rate and the length of a training."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.planning.estimates import refused_rows
from flows.planning.plan import Plan, make_plan
from flows.planning.staleness import former_defaults, hyperparameters, write_examples
from flows.reports.run import plan_table
from flows.stages.launch import StageProcesses
from flows.stages.run import DataChecks, Run
from lineage.artifact import Source
from lineage.record.tracker import Tracker
from tasks.data.preparing import prepare
from tasks.data.preparing.options import Prepare
from tasks.data.preparing.prepare import check_rows
from tasks.dpo import DPO
from tasks.method import Adapter, Schedule
from tasks.prepare_data import PrepareText
from tasks.sft import SFT
from tests.finished import finish

LORA = Adapter(rank=4, alpha=8)
EPOCHS = ("stages.dpo.method.num_steps=null", "stages.dpo.method.num_epochs=2")


@pytest.mark.parametrize(
    ("method", "shown"),
    [
        (SFT(), "learning_rate 2e-05 (default of SFT); 1 epoch (num_epochs, the default)"),
        (DPO(adapter=LORA), "learning_rate 1e-05 (default of DPO, x10 under an adapter); 1 epoch"),
        (
            SFT(adapter=LORA, learning_rate=1e-3, num_steps=30, global_batch_size=8),
            "learning_rate 0.001 (as set; default of SFT, x10 under an adapter: 0.0002); "
            "30 steps of 8 rows (num_steps)",
        ),
        (
            SFT(num_steps=30, global_batch_size=8, schedule=Schedule(warmup=30.0)),
            "learning_rate 2e-05 (default of SFT); 30 steps of 8 rows (num_steps); "
            "its warm-up of 30 steps does not end",
        ),
    ],
)
def test_the_values_that_apply_and_why(method: SFT, shown: str) -> None:
    assert str(hyperparameters(method, None, None)).startswith(shown)


def test_a_value_that_is_set_to_the_default_is_shown_as_set() -> None:
    words = ["stages.sft.method.learning_rate=2e-5", "stages.sft.method.num_epochs=1"]
    stage = load_pipeline(["pipeline=sft", "model=owner/name", *words]).stages["sft"]
    assert isinstance(stage.method, SFT)
    shown = str(hyperparameters(stage.method, None, None, given=stage.given))
    assert shown == "learning_rate 2e-05 (as set, the default of SFT); 1 epoch (num_epochs), steps once tokenized"


@pytest.mark.parametrize(
    ("fields", "shown", "length"),
    [
        ({"num_steps": 30}, "30 steps of 8 rows (num_steps), 2.4 epochs of 100 examples", (30, 2.4)),
        ({"num_epochs": 1}, "1 epoch of 100 examples (num_epochs, the default), 13 steps of 8 rows", (13, 1)),
        ({"num_epochs": 2.5}, "2.5 epochs of 100 examples (num_epochs), 32 steps of 8 rows", (32, 2.5)),
    ],
)
def test_steps_and_epochs_of_rows_that_were_counted(tmp_path: Path, fields, shown: str, length) -> None:
    write_examples(tmp_path / "count", 100, "")
    found = hyperparameters(SFT(global_batch_size=8, **fields), None, tmp_path / "count")
    assert str(found).endswith(f"; {shown}")
    assert (found.num_steps, found.num_epochs) == length and found.is_exact


class Checked(StageProcesses):
    """Answers of processes that check rows."""

    def run(self, job: object) -> dict[str, float]:
        return {"leaked_rows": 0.0, "examples": 40.0}


def plan(store: Path, *overrides: str) -> Plan:
    return make_plan(load_pipeline([f"store={store}", *overrides]))


def length(found: Plan, stage: str) -> dict[str, object]:
    (row,) = [each for each in found.to_dict()["stages"] if each["stage"] == stage]  # type: ignore[attr-defined]
    return dict(row["length"])


def test_the_plan_knows_more_with_each_thing_that_is_done(tmp_path: Path) -> None:
    first = plan(tmp_path, *EPOCHS)
    assert length(first, "dpo")["num_steps"] is None
    finish(first, "corpus", "instructions", "preferences", "base", metrics={"train_rows": 50.0})
    prepared = plan(tmp_path, *EPOCHS)
    assert length(prepared, "dpo") == {
        "num_steps": 7, "num_epochs": 2, "num_examples": 50, "exact": False, "reason": "num_epochs",
    }  # fmt: skip
    assert length(prepared, "cpt")["num_examples"] is None  # of text, a row is no example
    table = r"^stage +learning rate +origin +length\n(.*\n)*dpo +\S+ +(as set; )?default"
    assert re.search(table, plan_table(prepared), re.MULTILINE)
    assert "2 epochs of 50 rows (num_epochs), about 7 steps of 16 rows" in plan_table(prepared)

    checks = DataChecks()
    run = Run(plan=prepared, processes=Checked(), emit=lambda event: None, tracker=Tracker(), checks=checks)
    checks.require(run, prepared.stage("cpt"))
    dpo = prepared.stage("dpo")
    assert checks.num_steps(dpo, dpo.stage.method) == 5  # 80 rows, 16 a step
    checked = plan(tmp_path, *EPOCHS, "stages.sft.method.learning_rate=1e-4")
    assert checked.stage("dpo").fingerprint != dpo.fingerprint  # its policy is another one, of the same tokenizer
    assert length(checked, "dpo") == {
        "num_steps": 5, "num_epochs": 2, "num_examples": 40, "exact": True, "reason": "num_epochs",
    }  # fmt: skip
    assert length(plan(tmp_path, *EPOCHS, "stages.sft.method.chat_template=chatml"), "dpo")["num_examples"] == 50


def test_rows_are_read_again_only_where_the_file_or_the_settings_changed(tmp_path: Path, monkeypatch) -> None:
    read = list[str]()

    def counting(options: Prepare, *arguments: object, **options_of_call: object) -> object:
        read.append(str(options))
        return check_rows(options, *arguments, **options_of_call)

    monkeypatch.setattr(prepare, "check_rows", counting)
    file, counts = tmp_path / "rows.jsonl", list[int | None]()
    method, read_from = PrepareText(held_out=0.2), {"rows": Source(path=str(file))}
    for count in (60, 100):
        file.write_text("".join(f'{{"text": "row {row}"}}\n' for row in range(count)))
        for changed in (method, replace(method, held_out=0.4), replace(method, proportions={"rows": 1.0})):
            first, again = (refused_rows(changed, read_from) for _ in range(2))
            assert first == again
            counts.append(first[1])
    assert len(read) == 6 and len(set(counts)) == 4 and all(counts)


def test_what_a_former_default_made_is_run_again_and_the_plan_says_why(tmp_path: Path) -> None:
    keys = ("stages.sft.method.num_steps", "stages.sft.method.learning_rate")
    former = ("adapter=lora", f"{keys[0]}=1000", f"{keys[1]}=2e-5")
    finish(plan(tmp_path, *former))
    assert plan(tmp_path, *former).stage("sft").state == "reuse"  # it states what was the default
    now = plan(tmp_path, "adapter=lora", f"~{keys[0]}", f"~{keys[1]}").stage("sft")
    assert now.state == "run"
    assert now.reason == (
        "learning_rate: 2e-05 -> 0.0002; num_epochs: (none) -> 1.0; num_steps: 1000 -> (none); the default length was "
        "1000 steps and is one epoch now: num_steps=1000 keeps it; the default under an adapter is 10 times as high "
        "now: learning_rate=2e-05 keeps it"
    )


def test_other_differences_are_no_former_defaults() -> None:
    assert former_defaults(SFT(num_epochs=2), {"num_steps": 1000}) == []
    assert former_defaults(SFT(), {"num_steps": 900, "learning_rate": 2e-5}) == []
    assert former_defaults(SFT(adapter=LORA, learning_rate=1e-3), {"adapter": {}, "learning_rate": 2e-5}) == []


def test_steps_that_are_set_need_no_rows():
    checks, found = DataChecks(), plan(Path("store"))
    assert checks.num_steps(found.stage("sft"), found.stage("sft").stage.method) == 400
    assert checks.num_steps(found.stage("base"), found.stage("base").stage.method) is None
