import yaml

from flows.deploy.prefect_yaml import main, render
from flows.deploy.preset import Preset
from tests.command import CONF, REPOSITORY

WORDS = ["--config-dir", str(CONF), "pipeline=toy", "model=none", "sources.rows.path=a b.txt"]


def test_the_committed_file_deploys_every_shipped_pipeline():
    text = (REPOSITORY / "prefect.yaml").read_text()
    assert text == render(Preset()), "write it again: make prefect-yaml"
    entries = [each["entrypoint"] for each in yaml.safe_load(text)["deployments"]]
    assert entries == [f"flows.deploy.entry.{path.stem}" for path in sorted((REPOSITORY / "conf/pipeline").glob("*"))]


def test_a_deployment_states_how_its_pipeline_operates():
    words = [*WORDS, "tags=[nightly]", "schedule.cron='0 3 * * *'", "schedule.timezone=Europe/Berlin"]
    (deployment,) = yaml.safe_load(render(Preset.of(words)))["deployments"]
    assert deployment["tags"] == ["nightly", "pipeline:toy"]
    (schedule,) = deployment["schedules"]
    assert (schedule["cron"], schedule["timezone"]) == ("0 3 * * *", "Europe/Berlin")
    environment = deployment["work_pool"]["job_variables"]["env"]
    assert "'sources.rows.path=a b.txt'" in environment["POSTTRAIN_WORDS"]


def test_the_command_writes_the_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["prefect_yaml", *WORDS])
    assert main() == 0
    assert (tmp_path / "prefect.yaml").read_text() == render(Preset.of(WORDS))
    monkeypatch.setattr("sys.argv", ["prefect_yaml", "--config-dir", "nowhere"])
    assert main() == 2
    assert "nowhere" in capsys.readouterr().err
