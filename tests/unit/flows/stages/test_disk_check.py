"""What is looked at before a stage trains: room for it, also where its model is an adapter; a disk that is full."""

import errno
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from flows.stages.job import Job, JobInput
from flows.stages.launch import answer, run_worker
from lineage.artifact import Kind
from lineage.errors import ConfigError
from lineage.store import Store
from tasks.context import Resources
from tasks.judgement.check_rows import POLICY, RowCheck
from tasks.method import Input
from tasks.model.adapter_files import Base
from tests.toy_methods import ToyTraining
from tests.written_store import WrittenStore


def test_of_an_adapter_the_base_says_what_the_stage_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = WrittenStore(tmp_path / "store")
    output = Store(store.root).entry("base", store.stage("base", {}).fingerprint).output
    save_file({"up_proj.weight": np.zeros((100, 10), np.float32)}, output / "model.safetensors")
    base = store.stage("base", {})  # of what lies there now
    adapter = Store(store.root).entry("sft", store.stage("sft", {POLICY: base}).fingerprint).output
    Base(name="base", fingerprint=base.fingerprint, digest=base.output_digest).write(adapter)
    policy = JobInput(planned=Input(name="sft", kind=Kind.CHECKPOINT, fingerprint="f" * 64, path=adapter))
    directory = tmp_path / "store" / "left" / "f00d"
    (directory / "work").mkdir(parents=True)
    job = Job(
        stage="left", method=ToyTraining(), inputs={POLICY: policy}, resources=Resources(hang_minutes=None),
        directory=directory,
    )  # fmt: skip
    monkeypatch.setattr("tasks.judgement.disk_need.free_bytes", lambda path: 0)
    monkeypatch.setattr("flows.stages.launch.pin_threads", lambda count: None)
    with pytest.raises(ConfigError, match=r"left needs about .* checkpoints of 12.0 kB"):
        run_worker(job)


def test_a_disk_that_is_full_while_rows_are_looked_at_is_reported_as_in_training(tmp_path: Path, monkeypatch) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "Error writing bytes to file. Detail: [errno 28] No space left on device")

    check = RowCheck(
        method=ToyTraining(), stage="sft", chat_template=None, held_out={}, previous_percent=None,
        leakage=tmp_path / "leakage",
    )  # fmt: skip
    job = Job(stage="sft", method=check, inputs={}, resources=Resources(), directory=tmp_path / "cpt")
    job.directory.mkdir()
    monkeypatch.setattr("flows.stages.launch.pin_threads", lambda count: None)
    monkeypatch.setattr(RowCheck, "run", full)
    message = str(answer(job))
    assert message.startswith("stage sft failed: its rows, looked at before any stage trains: the disk of ")
    assert f"{tmp_path / 'cpt'} is full (OSError: [Errno {errno.ENOSPC}] Error writing bytes" in message
    assert "; free space (posttrain gc shows what may be deleted) and run again" in message
