import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from flows.progress.declared import show_declared
from lineage.dvc import DvcProject
from tests.command import CONF
from tests.unit.flows.planning.test_plan import finish

DECLARED = ["--config-dir", str(CONF), "pipeline=toy", "model=none", "sources.rows.path=rows.txt"]
VIEW = "artifacts/pipelines/toy"


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """What a run shows at its end; nothing is run."""
    (tmp_path / "rows.txt").write_text("rows")
    (tmp_path / "other.txt").write_text("rows")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DvcProject, "commit", lambda *_: pytest.fail("DVC was called"))

    def show(*overrides: str, stages: list[str] | None = None):
        plan = make_plan(load_pipeline([*DECLARED[2:], *overrides], CONF))
        finish(plan)
        show_declared(plan, [*DECLARED, *overrides], stages)
        shown = tmp_path / VIEW
        return {path.name for path in shown.iterdir() if path.is_dir()} if shown.exists() else set()

    return show


def declare(folder, cli_args=DECLARED):
    command = " ".join(cli_args)
    lines = [
        f"  {name}: {{cmd: posttrain stage {name} {command}, outs: [{VIEW}/{name}/output]}}\n"
        for name in ("data", "model", "left", "right")
    ]
    (folder / "dvc.yaml").write_text("stages:\n" + "".join(lines))


ALL = {"data", "model", "left", "right"}


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (None, ALL),
        *((word, ALL) for word in (
            "resources.micro_batch_size=4", "stages.left.resources.micro_batch_size=4", "tracking=none",
            "code_drift=rerun", "stages.left.method.seed=0", "sources.rows.path=other.txt",
        )),
        ("stages.left.method.learning_rate=0.3", set()),  # these change a fingerprint
        ("stages.more={method: ${stages.model.method}, inputs: {rows: data}}", set()),
    ],
)  # fmt: skip
def test_what_dvc_yaml_states_is_the_declaration_and_an_override_that_makes_the_same(ran, tmp_path, word, shown):
    declare(tmp_path)
    assert ran(*([word] if word else [])) == shown


def test_without_dvc_yaml_pipeline_model_and_rows_are_the_declaration(ran):
    assert ran("stages.left.method.learning_rate=0.3") == set()
    assert ran() == ALL


def test_a_project_file_is_the_declaration_and_another_model_an_experiment(ran, tmp_path):
    (tmp_path / "posttrain.yaml").write_text("pipeline: toy\nmodel: none\nsources.rows.path: rows.txt\n")
    (tmp_path / "other.txt").write_text("other rows")
    assert ran("sources.rows.path=other.txt") == set()
    assert ran() == ALL


def test_one_stage_moves_its_own_view(ran, tmp_path):
    declare(tmp_path)
    assert ran("stages.left.method.learning_rate=0.3", stages=["right"]) == {"right"}


def test_inside_dvc_the_command_is_the_declaration(ran, monkeypatch):
    monkeypatch.setenv("DVC_STAGE", "left")
    assert ran("stages.left.method.learning_rate=0.3", stages=["left"]) == {"left"}


def default_pipeline(capsys, *overrides: str) -> str:
    plan = make_plan(load_pipeline(list(overrides)))
    if plan.stage("corpus").state != "reuse":
        finish(plan, "corpus")
    show_declared(plan, overrides, ["corpus"])
    return capsys.readouterr().err


@pytest.fixture
def repository(ran, tmp_path, monkeypatch):
    (tmp_path / "repository/.dvc").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "repository")
    return tmp_path / "repository"


def test_a_run_of_the_default_pipeline_says_that_its_store_lies_outside(repository, tmp_path, capsys):
    message = default_pipeline(capsys, f"store={tmp_path}/store")
    assert message == f"dvc: off: the store {tmp_path}/store lies outside the repository {repository}\n"
    assert (tmp_path / "store/pipelines/cpt-sft-dpo/corpus/manifest.json").exists()  # DVC or not


def test_a_run_of_the_default_pipeline_says_that_dvc_yaml_does_not_keep_it(repository, capsys):
    message = default_pipeline(capsys)
    assert message.startswith("dvc: off: ") and "python -m flows.dvc_yaml" in message


def test_a_stage_that_is_new_since_dvc_yaml_was_written_is_named(ran, tmp_path, capsys):
    (tmp_path / ".dvc").mkdir()
    declare(tmp_path)
    text = (tmp_path / "dvc.yaml").read_text()
    (tmp_path / "dvc.yaml").write_text("".join(line for line in text.splitlines(True) if "right" not in line))
    assert ran() == ALL
    assert "does not keep" in capsys.readouterr().err


@pytest.mark.parametrize(
    "word",
    ["tracking.dvc=false", "stages.corpus.method.held_out=0.2", "pipeline=cpt-sft-dpo-gated"],  # never in dvc.yaml
)
def test_of_what_dvc_is_not_to_keep_nothing_is_reported(repository, capsys, word):
    assert default_pipeline(capsys, word) == ""


def test_without_a_dvc_repository_nothing_is_reported(ran, tmp_path, capsys):
    declare(tmp_path)
    assert ran() == ALL
    assert capsys.readouterr().err == ""
