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
