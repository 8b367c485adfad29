"""What a worker looks at before it trains: room for the stage, also where its model is an adapter on another."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.stages.job import Job, JobInput
from flows.stages.worker import run_worker
from lineage.artifact import Kind
from lineage.errors import ConfigError
from lineage.store import Store
from tasks.adapters.base import Base
from tasks.check_rows import POLICY
from tasks.context import Resources
from tests.toy_methods import ToyTraining
from tests.written_store import WrittenStore


def test_of_an_adapter_the_base_says_what_the_stage_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WrittenStore(tmp_path / "store")
    output = Store(store.root).entry("base", store.stage("base", {}).fingerprint).output
    save_file({"up_proj.weight": np.zeros((100, 10), np.float32)}, output / "model.safetensors")
    base = store.stage("base", {})  # of what lies there now
    adapter = Store(store.root).entry("sft", store.stage("sft", {POLICY: base}).fingerprint).output
    Base(name="base", fingerprint=base.fingerprint, digest=base.output_digest).write(adapter)
    policy = JobInput(
        name="sft", kind=Kind.CHECKPOINT, fingerprint="f" * 64, path=adapter, source=None, digest=None
    )  # fmt: skip
    directory = tmp_path / "store" / "left" / "f00d"
    (directory / "work").mkdir(parents=True)
    job = Job(
        stage="left", method=ToyTraining(), inputs={POLICY: policy}, resources=Resources(hang_minutes=None),
        directory=directory,
    )  # fmt: skip
    monkeypatch.setattr("tasks.checkpoints.disk_need.free_bytes", lambda path: 0)
    monkeypatch.setattr("flows.stages.worker.pin_threads", lambda count: None)
    with pytest.raises(ConfigError, match=r"left needs about .* checkpoints at one time, of 12.0 kB"):
        run_worker(job)
