from pathlib import Path

import pytest
import yaml

from flows.dvc_yaml import main, render
from lineage.errors import ConfigError
from tests.command import REPOSITORY

TOY = """# @package _global_
name: mini
sources:
  rows: {path: "???"}
defaults:
  - /recipe@stages.left.method: slow
stages:
  data: {method: {_target_: tests.toy_methods.ToyRows}, inputs: {rows: "source:rows"}}
  model: {method: {_target_: tests.toy_methods.ToyModel}, inputs: {rows: data}}
  left:
    method: {_target_: tests.toy_methods.ToyTraining}
    inputs: {policy: model, rows: data}
    resources: {cpus_per_worker: 1}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A repository of the user's own, with their own groups."""
    for name, text in {
        "groups/pipeline/mini.yaml": TOY,
        "groups/recipe/slow.yaml": "learning_rate: 0.01\n",
        "groups/model/none.yaml": "# @package _global_\n{}\n",
        "data/rows.txt": "rows",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


WORDS = ["--config-dir", "groups", "pipeline=mini", "model=none"]


def stages(folder: Path, *more: str) -> dict:
    overrides = [*WORDS, *(more or ["sources.rows.path=data/rows.txt"])]
    return yaml.safe_load(render(overrides, folder))["stages"]


def test_the_committed_file_is_the_default_pipeline_by_its_recipes_and_no_resources(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    text = render([], REPOSITORY)
    assert (REPOSITORY / "dvc.yaml").read_text() == text, "write it again: make dvc-yaml"
    dpo = yaml.safe_load(text)["stages"]["dpo"]
    assert {"conf/recipe/tiny/dpo.yaml": None} in dpo["params"]
    assert {"conf/pipeline/cpt-sft-dpo.yaml": ["stages.dpo.inputs"]} in dpo["params"]
    assert "resources" not in text and "tracking" not in text
    for group, name in {"optimizer": "adamw_torch_fused", "schedule": "linear", "adapter": "qlora"}.items():
        sft = yaml.safe_load(render([f"{group}={name}"], REPOSITORY))["stages"]["sft"]
        assert f"conf/{group}/{name}.yaml" in {file for parameter in sft["params"] for file in parameter}


def test_a_stage_states_what_its_identity_rests_on(folder):
    left = stages(folder)["left"]
    view = "artifacts/pipelines/mini"
    assert left == {
        "cmd": "posttrain stage left --config-dir groups pipeline=mini model=none sources.rows.path=data/rows.txt",
        "deps": [f"{view}/{stage}/{file}" for stage in ("model", "data") for file in ("output", "manifest.json")],
        "params": [
            {"groups/recipe/slow.yaml": None},
            {"groups/pipeline/mini.yaml": ["stages.left.method", "stages.left.inputs"]},
        ],
        "outs": [f"{view}/left/output", f"{view}/left/manifest.json"],
        "metrics": [f"{view}/left/metrics.json"],
        "plots": [{f"{view}/left/plots.json": {"x": "step", "y": "loss"}}],
    }


@pytest.mark.parametrize(
    ("path", "deps"),
    [
        ("data/rows.txt", ["data/rows.txt"]),
        ("data", ["data"]),
        ("data/*.txt", ["data"]),  # so that a new file is seen
        ("*.toml", ["a.toml"]),  # all of the repository would be too much
        ("/etc/hostname", None),  # elsewhere
    ],
)
def test_data_in_the_repository_is_a_dependency(folder, path, deps):
    (folder / "a.toml").write_text("")
    assert stages(folder, f"sources.rows.path={path}")["data"].get("deps") == deps


def test_stages_of_the_users_own_stay_under_names_of_their_own(folder):
    (folder / "dvc.yaml").write_text(
        "stages:\n  fetch: {cmd: wget x, outs: [data/rows.txt]}\n  old: {cmd: posttrain stage old}\n"
    )
    assert list(stages(folder)) == ["data", "model", "left", "fetch"]
    (folder / "dvc.yaml").write_text("stages:\n  left: {cmd: make left}\n")
    with pytest.raises(ConfigError, match="has a stage left of its own"):
        stages(folder)


def test_what_dvc_cannot_keep_is_refused(folder):
    with pytest.raises(ConfigError, match="store=/elsewhere: is outside"):
        stages(folder, "store=/elsewhere", "sources.rows.path=data")
    path = folder / "groups/pipeline/mini.yaml"
    text = path.read_text().replace("  left:", "  left.a:")
    path.write_text(text.replace("defaults:\n  - /recipe@stages.left.method: slow\n", ""))
    with pytest.raises(ConfigError, match="DVC takes letters"):
        stages(folder)


def test_the_command_writes_the_file(folder, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dvc_yaml", *WORDS, "sources.rows.path=data/rows.txt"])
    assert main() == 0
    assert yaml.safe_load((folder / "dvc.yaml").read_text())["stages"] == stages(folder)
    monkeypatch.setattr("sys.argv", ["dvc_yaml", "pipeline=typo"])
    assert main() == 2
    assert "no such pipeline" in capsys.readouterr().err


def test_a_stage_depends_on_all_parts_of_a_model(folder):
    for name in ("model", "tokenizer"):
        (folder / name).mkdir()
    (folder / "own.jinja").write_text("{{ messages }}")
    overrides = ["model=pretrained", *(f"sources.base.{field}={place}" for field, place in (
        ("path", "model"), ("tokenizer", "tokenizer"), ("chat_template", "own.jinja")))]  # fmt: skip
    deps = yaml.safe_load(render(overrides, folder))["stages"]["cpt"]["deps"]
    assert {"model", "tokenizer", "own.jinja"} <= set(deps)
