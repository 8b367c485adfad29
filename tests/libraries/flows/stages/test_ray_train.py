import stat
from pathlib import Path
from types import SimpleNamespace

from flows.stages import ray_train
from flows.stages.job import Job
from tasks.context import Resources
from tests.toy_methods import ToyTraining


def test_torch_waits_for_a_worker_longer_than_whoever_looks_whether_one_hangs(tmp_path, monkeypatch):
    given = {}

    def trainer(loop, **options):
        given.update(options)
        return SimpleNamespace(fit=lambda: SimpleNamespace(return_value={"loss": 1.0}))

    monkeypatch.setattr(ray_train, "TorchTrainer", trainer)
    monkeypatch.setattr(ray_train, "_connect", lambda job: None)
    day = Resources(num_workers=2, hang_minutes=1440.0)
    job = Job(stage="sft", method=ToyTraining(), inputs={}, resources=day, directory=tmp_path)
    assert ray_train.train(job) == {"loss": 1.0}
    assert given["torch_config"].timeout_s > 60 * 1440


def test_the_session_of_our_own_cluster_lies_where_no_other_account_can_enter(tmp_path, monkeypatch):
    options = {}
    monkeypatch.setattr(ray_train.ray, "init", lambda **given: options.update(given))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    job = Job(stage="sft", method=ToyTraining(), inputs={}, resources=Resources(num_workers=2), directory=tmp_path)
    # Ray gives its own folder mode 0777. A socket's path has room for 107 characters.
    for parent in (None, str(tmp_path / ("long" * 20))):
        if parent:
            Path(parent).mkdir()
            monkeypatch.setenv("RAY_TMPDIR", parent)
        ray_train._connect(job)
        folder = Path(options["_temp_dir"])
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
        assert len(f"{folder}/session_2026-11-22_16-51-55_123456_1234567/sockets/plasma_store") <= 107
