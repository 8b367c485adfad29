"""A built wheel, in an environment of its own, runs in a folder whose modules have the names of our packages."""

import csv
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.__main__ import COMMANDS
from tests import tiny
from tests.command import REPOSITORY
from tests.miniature import overrides_of
from tests.tiny_models import write_model

pytestmark = pytest.mark.slow
STOPS = "raise SystemExit('a module of the user replaced ours')\n"
SFT = (*overrides_of("sft"), "stages.sft.method.num_steps=2")


class Wheel:
    """The programs of an environment that has the wheel, and the other packages of this one."""

    def __init__(self, place: Path) -> None:
        built = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", place]
        subprocess.run([*built, REPOSITORY], check=True)
        venv.create(place / "env", with_pip=False)
        self.python = place / "env/bin/python"
        pip = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, *place.glob("*.whl")], check=True)
        (self.site,) = (place / "env/lib").glob("*/site-packages")
        (self.site / "zz-others.pth").write_text(sysconfig.get_path("purelib"))
        self.folder = place / "work"
        for name in ("flows", "lineage", "conf"):
            (self.folder / name).mkdir(parents=True)
            (self.folder / name / "__init__.py").write_text(STOPS)
        (self.folder / "tasks.py").write_text(STOPS)
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{self.python.parent}{os.pathsep}{os.environ['PATH']}"
        self.environment = {**kept, "PATH": path, "DVC_NO_ANALYTICS": "1", "DVC_SITE_CACHE_DIR": str(place / "dvc")}

    def __call__(self, *arguments: str | Path, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            list(map(str, arguments)), cwd=self.folder, env={**self.environment, **variables}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    pytest.importorskip("hatchling")
    return Wheel(tmp_path_factory.mktemp("wheel"))


def test_it_brings_one_folder_and_leaves_the_names_to_others(wheel: Wheel) -> None:
    found = wheel(wheel.python, "-P", "-c", "import tasks, flows.declare; print(tasks.__file__)").stdout
    assert f"{os.sep}posttrain{os.sep}tasks{os.sep}" in found
    done = wheel(wheel.python, "-c", "import tasks", code=1)
    assert "a module of the user" in done.stderr, "in the user's own processes the user's win"


def test_doctor_names_a_package_of_our_names_in_site_packages_and_a_plan_uses_ours(wheel: Wheel) -> None:
    theirs = [wheel.site / "tasks" / "__init__.py", wheel.site / "flows.py"]
    theirs[0].parent.mkdir()
    for each in theirs:
        each.write_text(STOPS)
    try:
        done = subprocess.run(
            ["posttrain", "doctor", "--json"], cwd=wheel.site.parent, env=wheel.environment, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        (found,) = (each for each in json.loads(done.stdout)["findings"] if each["check"] == "names")
        assert found["level"] == "warn" and all(
            str(each) in found["found"] for each in (wheel.site / "tasks", theirs[1])
        )
        assert "9 of 9 stages to run" in wheel("posttrain", "plan").stdout
        assert "a module of the user" in wheel(wheel.python, "-P", "-c", "import tasks", code=1).stderr
    finally:
        theirs[1].unlink()
        shutil.rmtree(theirs[0].parent)  # with the byte code that Python may have written


def test_each_command_starts(wheel: Wheel) -> None:
    started = {
        name: subprocess.Popen(
            ["posttrain", name, "--help"], cwd=wheel.folder, env=wheel.environment, stdout=subprocess.PIPE, text=True
        )
        for name in COMMANDS
    }
    for name, process in started.items():
        assert f"posttrain {name}" in process.communicate(timeout=120)[0] and process.returncode == 0, name


@pytest.mark.parametrize("launcher", ["local", "cluster"])
def test_a_run_trains_there_by_its_stages_and_by_rays_workers(wheel: Wheel, launcher: str) -> None:
    """Also with the user's folder first on PYTHONPATH."""
    overrides = [*SFT, f"store={launcher}", "tracking.dvc=false"]
    if launcher == "cluster":
        overrides += ["+stages.sft.resources={launcher: cluster, num_workers: 2, micro_batch_size: 4}"]
    done = wheel("posttrain", "run", *overrides, "--json", PYTHONPATH=str(wheel.folder))
    assert {row["state"] for row in json.loads(done.stdout)["stages"]} == {"run"}
    assert "sft" in wheel("posttrain", "lineage", "sft/sft", f"store={launcher}").stdout


def test_the_users_own_code_finds_its_own_modules(wheel: Wheel, tmp_path: Path) -> None:
    wheel.folder, before = tmp_path, wheel.folder
    try:
        (tmp_path / "tasks.py").write_text("def chats():\n    yield from ({'text': f'row {n}'} for n in range(40))\n")
        (tmp_path / "mine.py").write_text("from tasks import chats\n\n\ndef rows():\n    return chats()\n")
        done = wheel("posttrain", "data", "python:mine.rows", "--json")
        assert json.loads(done.stdout)["rows"] == 40
    finally:
        wheel.folder = before


def test_dvc_calls_it(wheel: Wheel) -> None:
    wheel("git", "init", "--quiet")
    wheel(sys.executable, "-P", "-m", "dvc", "init", "--quiet")
    wheel(wheel.python, "-P", "-m", "flows.dvc_yaml", *SFT, "tracking.mlflow=false")
    wheel(sys.executable, "-P", "-m", "dvc", "repro", "instructions")
    assert list((wheel.folder / "artifacts/instructions").glob("*/manifest.json"))


def test_prefect_runs_its_deployments(wheel: Wheel, prefect_url: str) -> None:
    api = {"PREFECT_API_URL": prefect_url, "PREFECT_API_AUTH_STRING": os.environ["PREFECT_API_AUTH_STRING"]}
    serving = subprocess.Popen(
        ["posttrain", "serve", *SFT, "store=served", "tracking=none"], cwd=wheel.folder,
        env={**wheel.environment, **api}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert serving.stdout
        message = ""
        while "run one: " not in message:
            line = serving.stdout.readline()
            assert line, message
            message += line
        wheel(wheel.python, "-P", "-m", "prefect", "deployment", "run", "sft/local", "--watch", **api)
    finally:
        serving.send_signal(signal.SIGTERM)
        serving.communicate(timeout=60)
    assert list((wheel.folder / "served/evaluate").glob("*/manifest.json"))


# A newcomer's first hour: files of each common format, a project, a model, and mistakes.

ROWS: dict[str, list[dict[str, object]]] = {
    "chats": tiny.conversation_rows(60), "pairs": tiny.preference_rows(60), "labels": tiny.unpaired_rows(60),
    "texts": tiny.text_rows(60),
    "alpaca": [{"instruction": f"sort {n}", "input": "", "output": str(n)} for n in range(60)],
    "sharegpt": [
        {"conversations": [{"from": "human", "value": f"say {n}"}, {"from": "gpt", "value": str(n)}]} for n in range(60)
    ],
    "problems": [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(60)],
    "squad": [{"context": f"c {n}", "question": f"q {n}", "answers": {"text": [str(n)], "answer_start": [0]}}
              for n in range(60)],
    "odd": [{"foo": f"x {n}", "bar": f"y {n}"} for n in range(60)],
}  # fmt: skip
FORMATS = {
    "chats.jsonl": "sft", "alpaca.json": "sft", "sharegpt.jsonl": "sft", "qa.csv": "sft", "squad.jsonl": "sft",
    "pairs.parquet": "dpo", "labels.jsonl": "kto", "texts.jsonl": "cpt", "notes.txt": "cpt", "problems.jsonl": "grpo",
}  # fmt: skip
PEER = "stage: sft\nmodel_name_or_path: model\ndataset: chats\ndataset_dir: .\ntemplate: default\ncutoff_len: 64\n"
PLAN = "plan pipeline=sft model=model data=chats.jsonl"
MISTAKES = {
    "run pipeline=stf": "did you mean sft?",
    "train --model model": "here it is: posttrain run pipeline=sft",
    "run --config mine.yaml": "here it is posttrain run mine.yaml",
    "plan mine.yaml": "mine.yaml: cannot be read as a project (No such file or directory)",
    f"{PLAN} stages.sft.method.learning_rat=1": "unknown key; accepted: learning_rate",
    f"{PLAN} stages.sft.method.learning_rate=fast": "should be a valid number",
    f"{PLAN} stages.sft.method.num_steps=-1": "should be greater than 0",
    f"{PLAN} adapter=lora2": "did you mean lora?",
    f"{PLAN} hydra.run.dir=x": "takes none of its hydra.* settings",
    "plan pipeline=sft model=model data=missing.jsonl": "give a path that exists, a hub id, or a URL",
    "plan pipeline=sft model=nowhere data=chats.jsonl": "a model is also a directory that exists, or a hub id",
    "plan pipeline=dpo model=model data=chats.jsonl": "use pipeline=sft, or conf/stage/conversations.yaml",
    "data broken.jsonl": "broken.jsonl:4: not JSON",
    "data odd.jsonl": "name columns, such as columns.prompt=foo columns.completion=bar",
    "init made --data chats.jsonl": "posttrain.yaml: is there already; edit it, or give init another folder",
    "init other --from stf": "no such start; there are:",
    "chat sft": "sft: is no directory, and there is no store here (store=artifacts does not exist): posttrain run",
    "chat store=nowhere": "chat: no REF is given; there is no store here (store=nowhere does not exist): posttrain run",
    "export gguf model --out model.bin": "a file whose name ends in .gguf is accepted",
    "import axolotl missing.yml": "name a file that exists",
    "import llamafactory peer.yaml": "use_badam=true: it is unknown",
    "run --multirun pipeline=sft model=model data=chats.jsonl": "give one several values",
    "plan pipeline=SFT model=model": "did you mean sft?",
    "plan pipeline=lora model=model": "did you mean adapter=lora?",
    f"{PLAN} learning_rate=1e-5": "here it is stages.sft.method.learning_rate=1e-5\n",
    f"{PLAN} max_bad_rows=0.1": "here it is stages.instructions.method.max_bad_rows=0.1\n",
    f"{PLAN} stages.sft.method.optimizer=adam": "write stages.sft.method.optimizer.name=adamw_torch_fused",
    f"{PLAN} stages.sft.method.learning_rate = 1e-5": "write key=value without spaces",
    f"{PLAN} stages.instructions.method.held_out=60": "held_out=60 of 60 rows leaves none to train on",
    f"{PLAN} precision=float16": "here it is precision=fp16",
    "plan pipeline=sft model=model data=[a,b]": "several formats are a source each: data=a sources.more.path=b",
    f"{PLAN} sources.base.tokenizer=~/none": "no such directory from",
    "import axolotl made/posttrain.yaml": "but of posttrain: posttrain plan made/posttrain.yaml",
    "promote sft": "the following arguments are required: --alias",
    "data semicolons.csv": "set loader.sep=';' on the source",
    "data commas.csv": "put a cell with commas in it in quotes",
    "data latin.csv": "is not UTF-8; accepted: UTF-8; convert the file",
    "data object.json": "the file is one JSON object, with rows",
    "data sheet.xlsx": "rows are not read from .xlsx",
    "plan pipeline=sft model=model data=empty.jsonl": "there is no row in this file",
    "plan pipeline=sft model=made data=chats.jsonl": "no config.json in it",
    "init another --model gpt2 --data chats.jsonl": "model=gpt2: no such model",
    "run --model model --data chats.jsonl": "here it is model=model data=chats.jsonl",
    "--config mine.yaml": "here it is posttrain run mine.yaml; the command comes first",
    "help": "here it is: posttrain plan --help",
}
MISTAKEN_FILES = {
    "broken.jsonl": '{"text": "whole"}\n' * 3 + '{"text": "cut\n', "semicolons.csv": "question;answer\na;b\n",
    "commas.csv": "question,answer\n" + "what?,this, and that\n" * 9, "latin.csv": "question,answer\n" + "wär,ä\n" * 9,
    "object.json": json.dumps({"rows": [{"text": "a"}]}, indent=1), "sheet.xlsx": "PK", "empty.jsonl": "",
    "peer.yaml": f"{PEER}use_badam: true\n", "made/posttrain.yaml": "pipeline: sft\n",
}  # fmt: skip  # fmt: skip


@pytest.fixture(scope="module")
def newcomer(wheel: Wheel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Wheel]:
    """Someone with a model, files, and nothing of posttrain's but the wheel."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, before = tmp_path_factory.mktemp("newcomer"), wheel.folder
    write_model(folder / "model", "llama")
    for name, rows in ROWS.items():
        own = [{key: value for key, value in row.items() if key not in ("row_id", "kind")} for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own))
        if name == "alpaca":
            (folder / "alpaca.json").write_text(json.dumps(own))
        if name == "pairs":
            pq.write_table(pa.Table.from_pylist(own), folder / "pairs.parquet")
    with (folder / "qa.csv").open("w") as file:
        csv.writer(file).writerows([("question", "answer"), *((f"q {n}", f"a {n}") for n in range(60))])
    (folder / "notes.txt").write_text("".join(f"a line of text {n}\n" for n in range(60)))
    (folder / "dataset_info.json").write_text(json.dumps({"chats": {"file_name": "chats.jsonl"}}))
    (folder / "fine.yaml").write_text(PEER)
    (folder / "made").mkdir()
    for name, text in MISTAKEN_FILES.items():
        (folder / name).write_text(text, encoding="latin-1")
    wheel.folder = folder
    yield wheel
    wheel.folder = before


def test_a_file_of_each_common_format_becomes_a_project_that_plans(newcomer: Wheel) -> None:
    for file, pipeline in FORMATS.items():
        place = f"p-{file.partition('.')[0]}"
        newcomer("posttrain", "init", place, "--model", "model", "--data", file)
        home, newcomer.folder = newcomer.folder, newcomer.folder / place
        try:
            found = json.loads(newcomer("posttrain", "plan", "--json").stdout)
        finally:
            newcomer.folder = home
        assert found["pipeline"] == pipeline and {row["state"] for row in found["stages"]} == {"run"}, file


def test_a_project_runs_and_its_model_talks_and_leaves(newcomer: Wheel) -> None:
    home = newcomer.folder
    newcomer("posttrain", "init", "mine", "--model", "model", "--data", "chats.jsonl")
    newcomer.folder = home / "mine"
    try:
        small = [
            "stages.sft.method.num_epochs=null",
            "stages.sft.method.num_steps=2",
            "stages.evaluate.method.max_new_tokens=8",
        ]
        done = newcomer("posttrain", "run", *small)
        assert "3 of 3 stages run" in done.stdout and "\n  posttrain chat sft\n" in done.stdout
        assert "nothing to do" in newcomer("posttrain", "run", *small).stdout
        newcomer("posttrain", "chat", "sft", "--once", "Hello?", "--max-new-tokens", "4")
        newcomer("posttrain", "export", "gguf", "sft", "--out", "sft.gguf")
        assert "exported" in newcomer("posttrain", "lineage", "sft").stdout
        newcomer("posttrain", "report", "sft", "--html", "sft.html")
        assert "learning_rate" in (newcomer.folder / "sft.html").read_text()
        newcomer("posttrain", "verify")
    finally:
        newcomer.folder = home
    newcomer("posttrain", "import", "llamafactory", "fine.yaml")
    assert "2 of 2 stages to run" in newcomer("posttrain", "plan", "conf/pipeline/fine.yaml").stdout


def test_each_mistake_ends_with_2_and_says_what_to_do(newcomer: Wheel) -> None:
    assert len(MISTAKES) >= 30
    for command, reported in MISTAKES.items():
        done = newcomer("posttrain", *shlex.split(command), code=2)
        assert reported in done.stderr, (command, done.stderr)
        assert "Traceback" not in done.stderr and len(done.stderr.splitlines()) <= 12, command
