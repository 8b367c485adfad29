"""A project of a user's own: what ``init`` writes plans and runs where it is."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from flows.commands.init import RECIPES
from flows.declare.config import load_pipeline
from flows.declare.project import project_overrides
from tests import tiny
from tests.command import Command
from tests.tiny_models import write_model


def write_rows(folder, **files):
    for name, rows in files.items():
        kept = [{key: value for key, value in row.items() if key != "row_id"} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


@pytest.fixture
def command(tmp_path, prefect_url):
    (tmp_path / "mine/.dvc").mkdir(parents=True)  # DVC is there already, whose set-up takes seconds
    write_model(tmp_path / "model", "llama")
    write_rows(tmp_path, chats=tiny.conversation_rows(60), pairs=tiny.preference_rows(60),
               problems=[{"prompt": f"Say {n}.", "answer": str(n)} for n in range(60)])  # fmt: skip
    return Command(tmp_path, environment={"PREFECT_API_URL": prefect_url})


def project(command):
    return yaml.safe_load((command.folder / "mine/posttrain.yaml").read_text())


def inside(command):
    """The command in the project's folder, which tracks nothing."""
    found = Command(command.folder / "mine", environment=command.environment)
    return lambda verb, *overrides: found(verb, *overrides)


def planned(command, *overrides):
    done = inside(command)("plan", "--json", *overrides)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_data_choose_the_pipeline_and_are_looked_at(command):
    (command.folder / "mine/.gitignore").write_text("mine.txt\nmlruns/")  # of a folder that is in use
    done = command("init", "mine", "--model", "model", "--data", "chats.jsonl")
    assert done.returncode == 0, done.stderr
    assert "60 read" in done.stdout and "next: cd " in done.stdout
    text = (command.folder / "mine/posttrain.yaml").read_text()
    assert "# chats.jsonl: messages (messages), 60 rows" in text
    found = project(command)
    assert (found["pipeline"], found["model"], found["data"]) == ("sft", "../model", "../chats.jsonl")
    assert "\nstages.sft.method.max_length: 512 # by the positions of the model\n" in text
    rate = found["stages"]["sft"]["method.learning_rate"]
    assert f"method.learning_rate: {rate} # default 0.0002; " in text
    assert [row["stage"] for row in planned(command)["stages"]] == ["instructions", "sft", "evaluate"]
    ignored = (command.folder / "mine/.gitignore").read_text().splitlines()
    assert ignored[:2] == ["mine.txt", "mlruns/"] and {"artifacts/", "mlflow.db*"} <= set(ignored[2:])
    assert len({*ignored}) == len(ignored)
    assert len((command.folder / "mine/README.md").read_text().splitlines()) <= 10


def test_columns_with_other_names_are_set_in_the_project(command):
    write_rows(command.folder, squad=[
        {"context": f"c {n}", "question": f"q {n}", "answers": {"text": [str(n)]}} for n in range(60)
    ])  # fmt: skip
    done = command("init", "mine", "--model", "model", "--data", "squad.jsonl")
    assert done.returncode == 0, done.stderr
    assert project(command)["sources.instructions.columns.completion"] == "answers.text.0"
    assert "is read with columns.completion=answers.text.0" in " ".join(done.stdout.split())
    written = (command.folder / "mine/posttrain.yaml").read_text()
    assert written.count("# a guess by the names of the columns") == 2, written  # the answer, and the template
    found = planned(command)
    assert [row["stage"] for row in found["stages"]] == ["instructions", "sft", "evaluate"]
    text = inside(command)("plan").stderr + str(project(command))
    assert "{context} {question}" in text and "Traceback" not in text


def test_a_bad_row_is_named_and_left_out_as_the_user_sets(command):
    rows = [{"question": "What is A?", "answer": "A letter."}, {"question": "What is B?", "answer": ""}]
    write_rows(command.folder, qa=[*rows, {"question": "What is C?", "answer": "Another."}])
    refused = command("init", "new", "--model", "model", "--data", "qa.jsonl")
    assert refused.returncode == 2 and "qa.jsonl:2: " in refused.stderr, refused.stderr
    assert "--out DIR keeps all of them" in refused.stderr and "--data FILE max_bad_rows=1" in refused.stderr
    assert "posttrain-init-" not in refused.stderr and not (command.folder / "new").exists()
    done = command("init", "mine", "--model", "model", "--data", "qa.jsonl", "max_bad_rows=1")
    assert done.returncode == 0 or "leaves none to" in done.stderr, done.stderr


def test_what_a_beginner_would_not_know_is_said(command):
    done = command("init", "mine", "--data", "chats.jsonl")
    assert "note: model tiny: a toy made from scratch" in done.stdout, done.stdout + done.stderr
    text = (command.folder / "mine/posttrain.yaml").read_text()
    assert "method.num_steps: 400 # passes over your rows: 112" in text, text
    assert "as set (the pipeline)" not in text and "; made from scratch" not in text
    short = command("init", "other", "--model", "model", "--data", "chats.jsonl").stdout
    assert "too few" not in short, short
    few = (command.folder / "other/posttrain.yaml").read_text()
    assert "adapter: lora # " in few and "method.num_epochs: 6 # default 1; 3..40 for < 1K rows" in few, few
    assert "method.learning_rate: 0.0005 # default 0.0002; 3e-4..5e-4 for < 1K rows (measured: docs/smollm2.md)" in few
    plan = Command(command.folder / "other", environment=command.environment)("plan", "advice=strict")
    assert plan.returncode == 0, plan.stderr


def test_two_kinds_of_rows_become_two_stages_and_names_say_which(command):
    assert command("init", "mine", "--data", "pairs.jsonl", "chats.jsonl").returncode == 0
    found = project(command)
    assert found["pipeline"] == "sft-dpo"
    assert (found["data.instructions"], found["data.preferences"]) == ("../chats.jsonl", "../pairs.jsonl")
    refused = command(
        "init", "other", "--from", "rlhf-ppo", "--data", "instructions=chats.jsonl", "--data", "problems.jsonl"
    )
    assert refused.returncode == 0, refused.stderr
    again = command("init", "mine", "--data", "chats.jsonl")
    assert again.returncode == 2 and "posttrain.yaml: is there already" in again.stderr


@pytest.mark.parametrize("name", ["", "instructions="])
def test_several_files_of_one_kind_are_the_sources_of_one_stage(command, name):
    write_rows(command.folder, squad=[{"context": f"c {n}", "question": f"q {n}", "answer": "a"} for n in range(60)])
    done = command("init", "mine", "--model", "model", "--data", f"{name}squad.jsonl", f"{name}chats.jsonl")
    assert done.returncode == 0 and "is ignored" not in done.stderr, done.stderr
    found = project(command)
    assert found["data.instructions"] == "../squad.jsonl" and found["sources.instructions_2.path"] == "../chats.jsonl"
    assert found["stages.instructions.inputs.rows_2"] == "source:instructions_2"
    assert not [key for key in found if "prompt_template" in key]  # of one file, and a stage has one template
    assert planned(command)["stages"][0]["inputs"].keys() == {"rows", "rows_2"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--from", "stf"], "--from stf: no such start; there are: sft, "),
        (["--data", "nothing.jsonl"], "--data nothing.jsonl: no such file"),
        (["--model", "gpt2", "--data", "chats.jsonl"], "model=gpt2: no such model"),
        (["--model", "mine", "--data", "chats.jsonl"], "no config.json in it"),
        (
            ["--from", "dpo", "--data", "chats.jsonl", "pairs.jsonl"],
            "these are conversations; pipeline dpo reads preferences; leave",
        ),
        (["--from", "dpo", "--data", "chats.jsonl"], "leave --from out (pipeline sft reads them)"),
        (["--from", "sft", "--data", "chat=chats.jsonl"], "say which, as --data instructions=../chats.jsonl"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(command, overrides, message):
    done = command("init", "mine", *overrides)
    assert done.returncode == 2 and message in done.stderr
    assert not (command.folder / "mine/posttrain.yaml").exists()


@pytest.mark.parametrize("gpus", [[], ["0"]])
def test_what_the_machine_decides_is_left_to_the_machine_and_the_defaults_to_the_adapter(command, monkeypatch, gpus):
    monkeypatch.setattr("flows.stages.resources.visible_gpus", lambda: gpus)
    done = command("init", "mine", "--model", "model", "--data", "chats.jsonl", "pairs.jsonl")
    assert done.returncode == 0, done.stderr
    found, text = project(command), (command.folder / "mine/posttrain.yaml").read_text()
    assert found.get("resources") == ("gpu" if gpus else None)
    assert not {"resources.gpus_per_worker", "method.precision"} & found["stages"]["sft"].keys()
    assert "method.learning_rate" not in found["stages"]["dpo"] and "    # method.schedule.name: cosine # kept" in text
    assert "; at least 4 in " in text  # why a value is outside the range beside it
    stages = load_pipeline(project_overrides(command.folder / "mine/posttrain.yaml")).stages
    assert stages["dpo"].resources.gpus_per_worker == len(gpus)


@pytest.mark.parametrize("words", [["--adapter", "lora"], ["--adapter", "qlora"], ["--from", "qlora"]])
def test_with_an_adapter_the_values_are_those_of_the_adapter(command, words):
    done = command("init", "mine", *words, "--model", "model", "--data", "chats.jsonl")
    assert done.returncode == 0, done.stderr
    text, found = (command.folder / "mine/posttrain.yaml").read_text(), project(command)
    rate = 0.0005 if "lora" in words else None  # QLoRA's default is inside its range
    assert found["stages"]["sft"].get("method.learning_rate") == rate
    assert "All weights are trained" not in text and "gpus_per_worker: 0" not in text
    assert ("one-gpu-qlora needs a GPU, and this machine shows none" in " ".join(done.stdout.split())) == (
        "--from" in words
    )


@pytest.mark.parametrize("name", RECIPES)
def test_a_named_recipe_plans(command, name):
    rows = "problems.jsonl" if RECIPES[name]["pipeline"] == "grpo" else "chats.jsonl"
    done = command("init", "mine", "--from", name, "--model", "model", "--data", rows)
    assert done.returncode == 0, done.stderr
    stage = RECIPES[name]["pipeline"]
    assert stage in [row["stage"] for row in planned(command)["stages"]]


@pytest.mark.slow
def test_a_run_in_the_project_is_the_declared_one_for_dvc_and_mlflow(command):
    (command.folder / "mine/.dvc").rmdir()
    (command.folder / "mine").rmdir()
    git = {"GIT_CONFIG_GLOBAL": os.devnull, "DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": str(command.folder / "site")}
    command.environment |= git
    done = command("init", "mine", "--model", "model", "--data", "chats.jsonl")
    assert done.returncode == 0 and "DVC tracks it by dvc.yaml" in done.stdout, done.stdout + done.stderr
    own = Command(command.folder / "mine", environment=command.environment, tracked=True)
    with (own.folder / "posttrain.yaml").open("a") as file:
        file.write("stages.sft.method.num_epochs: null\nstages.sft.method.num_steps: 2\n")
        file.write("stages.evaluate.method: {num_rows: 4, num_prompts: 2, max_new_tokens: 4}\n")
    ran = own("run")
    assert ran.returncode == 0, ran.stderr
    assert (own.folder / "artifacts/pipelines/sft/sft/output/config.json").exists()
    assert (own.folder / "mlflow.db").exists()
    status = subprocess.run(
        [sys.executable, "-P", "-m", "dvc", "status"], cwd=own.folder, env=own.environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert "up to date" in status.stdout, status.stdout + status.stderr + ran.stderr
