"""What `posttrain verify` says when MLflow and the store part ways."""

import shutil

import pytest

from tests.command import TOY, Command


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, prefect_url):
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "rows.txt").write_text("rows")
    toy = Command(folder, *TOY, environment={"PREFECT_API_URL": prefect_url}, tracked=True)
    toy.run()
    assert toy("promote", "toy/left", "--alias", "champion", "--force", "--why", "test").returncode == 0
    assert toy("verify").returncode == 0, toy("verify").stdout
    return folder


@pytest.fixture
def toy(recorded, tmp_path):
    shutil.copytree(recorded, tmp_path / "copy", symlinks=True)
    return Command(tmp_path / "copy", tracked=True)


def faults(toy: Command, *arguments: str) -> str:
    result = toy("verify", *arguments)
    assert result.returncode == 1, result.stdout
    return result.stdout


@pytest.fixture
def client(toy):
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{toy.folder / 'mlflow.db'}")


def test_a_lost_database_is_named_and_not_made_by_the_look(toy):
    (toy.folder / "mlflow.db").unlink()
    assert "mlflow.db is gone, which 4 manifests were recorded in" in faults(toy)
    assert not (toy.folder / "mlflow.db").exists()


def test_a_deleted_run_is_named_and_rebuild_mends_it(toy, client):
    version = client.get_model_version_by_alias("toy", "champion")
    client.delete_run(version.run_id)
    assert "no finished run of it" in faults(toy)
    assert "no finished run of it" in faults(toy, "toy/left")
    assert toy("verify", "toy/right").returncode == 0
    assert toy("rebuild").returncode == 0
    assert toy("verify").returncode == 0


def test_a_deleted_version_is_named_and_rebuild_mends_it(toy, client):
    version = client.get_model_version_by_alias("toy", "champion")
    client.delete_model_version("toy", version.version)
    text = faults(toy)
    assert "no registered version of it" in text
    assert "alias champion" in text
    assert toy("rebuild").returncode == 0
    assert toy("verify").returncode == 0


def test_an_alias_that_was_moved_by_hand_is_named_and_rebuild_mends_it(toy, client):
    [other] = client.search_model_versions("name='toy' and tags.`posttrain.stage`='right'")
    client.set_registered_model_alias("toy", "champion", other.version)
    assert "alias champion: registered model toy has it at right@" in faults(toy)
    assert toy("rebuild").returncode == 0
    assert toy("verify").returncode == 0


def test_a_run_of_what_the_store_lost_is_an_orphan(recorded):
    toy = Command(recorded, tracked=True)
    shutil.move(recorded / "artifacts" / "right", recorded / "right")
    try:
        assert "orphaned" in faults(toy)
    finally:
        shutil.move(recorded / "right", recorded / "artifacts" / "right")
