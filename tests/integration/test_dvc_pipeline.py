"""The default pipeline in miniature, for a user who knows only DVC: a field changes, what depends on it runs."""

import shutil

import pytest

from tests.command import REPOSITORY
from tests.dvc_repository import DvcRepository
from tests.miniature import MODEL, STEPS


@pytest.mark.slow  # test_dvc.py does the same with toys
def test_a_changed_beta_runs_dpo_and_what_reads_it(tmp_path):
    folder = tmp_path / "repository"
    for name in ("conf", "flows", "lineage", "tasks"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(REPOSITORY / ".gitignore", folder / ".gitignore")
    words = (*MODEL, *STEPS, "tracking.mlflow=false")
    repository = DvcRepository(folder, *words, environment={"PYTHONPATH": str(folder)})
    repository.start_tracking()

    repository("posttrain", "run", *words)
    assert repository.is_clean()
    repository.commit("ran")

    recipe = folder / "conf/recipe/tiny/dpo.yaml"
    recipe.write_text(recipe.read_text().replace("beta: 0.3", "beta: 0.2"))
    status = repository("dvc", "status")
    assert "conf/recipe/tiny/dpo.yaml" in status and "sft" not in status.replace("cpt-sft-dpo", "")
    [changed] = [line for line in repository("dvc", "params", "diff").splitlines() if "beta" in line]
    assert changed.split() == ["conf/recipe/tiny/dpo.yaml", "beta", "0.3", "0.2"]
    output = repository("dvc", "repro")
    running = [line.split("'")[1] for line in output.splitlines() if line.startswith("Running stage")]
    assert running == ["dpo", "evaluate"]
    assert "nothing to do: all 9 stages are finished" in repository("posttrain", "run", *words)
    assert repository.is_clean()
