"""The verbs that ask the record, after real runs."""

import json
import subprocess
import sys

import pytest

from tests.command import TOY, Command

HEAVY = ("hydra", "omegaconf", "pydantic", "prefect", "mlflow", "dvc", "torch", "ray", "pyarrow", "rich", "datasets")


@pytest.fixture(scope="module")
def toy(tmp_path_factory, prefect_url):
    """Two runs of the toy pipeline that differ in one field."""
    folder = tmp_path_factory.mktemp("toy")
    (folder / "rows.txt").write_text("one row")
    command = Command(folder, *TOY, environment={"PREFECT_API_URL": prefect_url})
    first = command.run("sources.rows.labels=[cc-by-nc-4.0]")
    second = command.run("stages.right.method.learning_rate=0.2")
    return command, first, second


def test_lineage_shows_the_whole_ancestry(toy, tmp_path):
    command, _, second = toy
    shown = command("lineage", "toy/right")
    assert shown.returncode == 0, shown.stderr
    for told in (
        second["right"]["fingerprint"][:16],
        "learning_rate=0.2",
        "source:rows",
        "rows.txt",
        "labels: cc-by-nc",
    ):
        assert told in shown.stdout
    graph = json.loads(command("lineage", "toy/right", "--json").stdout)
    assert {node["name"] for node in graph["nodes"]} == {"right", "model", "data", "source:rows"}
    assert graph["nodes"][0]["fingerprint"] == second["right"]["fingerprint"]
    page = tmp_path / "page.html"
    assert command("lineage", "toy/right", "--html", str(page)).returncode == 0
    assert "<html" in page.read_text() and second["right"]["fingerprint"] in page.read_text()


def test_impact_reaches_both_runs(toy):
    command, first, second = toy
    for ref in ("source:rows", "rows.txt", "label:cc-by-nc-4.0"):
        found = json.loads(command("impact", ref, "--json").stdout)
        models = {row["fingerprint"] for row in found["artifacts"] if row["stage"] == "right"}
        assert models == {first["right"]["fingerprint"], second["right"]["fingerprint"]}, ref
        assert [row["stage"] for row in found["retraining"][0]["run_again"]][:2] == ["data", "model"]


def test_diff_names_the_field_that_was_changed(toy):
    command, first, second = toy
    # By its stage as well: the first run's `left` is the same work, and has the same fingerprint.
    before = f"right@{first['right']['fingerprint'][:16]}"
    found = json.loads(command("diff", before, second["right"]["fingerprint"], "--json").stdout)
    assert found["differences"][0]["text"] == "right: learning_rate: 0.1 -> 0.2"
    assert found["same_output"] is False


def test_an_unknown_ref_is_the_users_error(toy):
    result = toy[0]("lineage", "toy/rihgt")
    assert result.returncode == 2
    assert "did you mean toy/right?" in result.stderr


def test_an_empty_store_says_what_to_run(tmp_path):
    result = Command(tmp_path)("impact", "source:rows")
    assert result.returncode == 2 and "posttrain run" in result.stderr


def test_they_answer_without_a_heavy_import(toy):
    verbs = [["lineage", "toy/right"], ["impact", "source:rows"], ["diff", "toy/left", "toy/right"]]
    script = f"import sys; from flows.__main__ import main; codes = [main(each) for each in {verbs!r}]; "
    command = toy[0]
    result = subprocess.run(
        [sys.executable, "-c", f"{script}print(codes, *sys.modules, sep=chr(10))"],
        cwd=command.folder, env=command.environment, capture_output=True, text=True,
    )  # fmt: skip
    assert "[0, 0, 0]" in result.stdout, result.stderr
    assert not {line.partition(".")[0] for line in result.stdout.splitlines()} & set(HEAVY)
