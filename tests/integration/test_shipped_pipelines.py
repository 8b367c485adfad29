"""Every shipped pipeline runs in miniature from its own sources, is finished then, and is deployed."""

import json
import re
import signal
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import Memo, make_plan
from lineage.artifact import Source
from lineage.errors import PipelineError
from tests.command import Command
from tests.drawn_graphs import Page
from tests.miniature import SHIPPED, overrides_of
from tests.prefect_api import PrefectApi
from tests.tiny import write_policy

# Every field of a source but its labels, which are recorded and no identity -> values that none of these sources has.
OTHERWISE = {
    "path": ("rows.jsonl", "other"), "kind": ("text", "reward_model"), "revision": ("main",),
    "split": ("test", "train[:20]"),
    "format": ("text", "messages"), "columns": ("{prompt: other}",), "split_by": ("line", "file"),
    "sample_count": ("10",), "shuffle_seed": ("3",), "shuffle_buffer": ("10",), "streaming": ("true",),
    "allow_code": ("true",), "credentials": ("{secret: MINE}",), "fallback": ("corpus",), "images": ("other",),
    "subset": ("a",), "loader": ("{sep: ';'}", "{data_files: a}"), "tokenizer": ("other",),
    "added_tokens": ("['<x>']",),
    "special_tokens": ("['<x>']",), "pad_token": ("'<|im_end|>'",), "eos_token": ("'<|endoftext|>'",),
    "bos_token": ("'<|endoftext|>'",), "add_bos": ("true",), "chat_template": ("hermes",),
    "model_kwargs": ("{rope_theta: 500}",), "base_model": ("other",), "trust_remote_code": ("true",),
}  # fmt: skip
GATED = 3  # exit code: in four steps no model passes an honest gate


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_pipeline_runs_and_then_there_is_nothing_to_do(tmp_path, prefect_url, name):
    command = Command(tmp_path, *overrides_of(name), environment={"PREFECT_API_URL": prefect_url})
    done = command("run", "--json")
    assert done.returncode in (0, GATED), done.stderr
    for row in json.loads(command("plan", "--json").stdout)["stages"]:
        assert row["state"] == "reuse" or (row["method"] == "Gate" and done.returncode == GATED), row
    metrics = {row["stage"]: row["metrics"] for row in json.loads(done.stdout)["stages"] if row.get("metrics")}
    assert any("steps" in found for found in metrics.values())
    page = Page(Path(json.loads(done.stdout)["page"]).read_text())
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    every = {"facts", "use", "scores", "curves", "lineage", "data", "recipe", "costs", "versions"}
    asked = set() if name in ("cpt", "reward") else {"answers"}  # its stages ask no policy anything
    judged = {"verdicts"} if any(row["method"] == "Gate" for row in json.loads(done.stdout)["stages"]) else set()
    assert every | asked | judged <= {*sections} and ("mark" in page.tags() or name == "grpo")  # whose rows are prompts


@pytest.mark.parametrize("model", ["tiny", "own"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[] if each == "sft" else pytest.mark.slow)
        for each in [*SHIPPED, "cpt-sft-dpo-retrain", "smollm2-one-sentence"]
    ],
)
def test_whatever_a_source_sets_changes_the_plan_or_is_refused(tmp_path, monkeypatch, name, model):
    if model == "own" and name.startswith("vlm"):
        pytest.skip("the model reads no images")
    assert OTHERWISE.keys() == {each.name for each in fields(Source)} - {"labels"}
    monkeypatch.chdir(tmp_path)
    write_policy(tmp_path / "own")
    write_policy(tmp_path / "other", seed=1)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {index}"}) + "\n" for index in range(40)))
    chosen, memo = [f"pipeline={name}", f"model={model}"], Memo()

    def planned(*overrides: str) -> dict[str, str]:
        return {each.name: each.fingerprint for each in make_plan(load_pipeline([*chosen, *overrides]), memo).stages}

    declared, unread = planned(), []
    sources = load_pipeline(chosen).sources
    for source in {*sources, "base", "another"}:
        for field, values in OTHERWISE.items():
            for value in values:
                if source in sources and str(getattr(sources[source], field)) == value:
                    continue
                try:
                    found = planned(f"sources.{source}.{field}={value}")
                except PipelineError:
                    continue
                unread += [f"sources.{source}.{field}={value}"] if found == declared else []
    assert unread == []


@pytest.mark.slow
def test_the_default_pipeline_runs_as_a_deployment_by_the_command_of_prefect(tmp_path, prefect_url):
    environment = {"PREFECT_API_URL": prefect_url, "PREFECT_HOME": str(tmp_path / "home")}
    command = Command(tmp_path, environment=environment)
    called = [sys.executable, "-m", "prefect", "deployment", "run", "cpt-sft-dpo/local", "--watch"]

    def run(*overrides: str) -> str:
        parameters = ["-p", f"overrides={json.dumps(overrides)}"]
        done = subprocess.run(
            [*called, *parameters], cwd=tmp_path, env=command.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and "Completed" in done.stdout, done.stdout + done.stderr + log.read_text()
        return re.search("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", done.stdout)[0]

    log, api = tmp_path / "serve.log", PrefectApi(prefect_url)
    serve = command.start("serve", *overrides_of("cpt-sft-dpo"), "tracking=none", stderr=log)
    try:
        while not (line := serve.stdout.readline()).startswith("run one: "):
            assert line, log.read_text()
        assert "prefect deployment run cpt-sft-dpo/local" in line
        first = run("stages.dpo.method.beta=0.2")
        stages = api.stages(first)
        assert set(stages.values()) == {"COMPLETED"} and {"cpt", "sft", "reward", "dpo", "evaluate"} <= stages.keys()
        [manifest] = tmp_path.glob("artifacts/dpo/*/manifest.json")
        assert json.loads(manifest.read_text())["recipe"]["beta"] == 0.2
        assert {"cpt-sft-dpo-plan", "cpt-sft-dpo-evaluate", "cpt-sft-dpo-dpo-progress"} <= api.artifacts(first).keys()
        again = api.run(run("stages.dpo.method.beta=0.2"))
        assert again["state"]["message"] == f"nothing to do: all {len(stages)} stages are finished"
    finally:
        serve.send_signal(signal.SIGTERM)
        serve.communicate(timeout=60)
    assert serve.returncode == 0, log.read_text()
