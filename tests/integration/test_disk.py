"""A disk that is full, or will be: one line says so, nothing that was saved is lost, and the next run goes on."""

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lineage.checkpoints import Checkpoints
from lineage.errors import PipelineError
from lineage.filesystem.disk import explain_full_disk
from tasks.context import Metrics, Resources, TrainContext
from tasks.judgement.disk_need import disk_need, model_shapes
from tests import tiny, training
from tests.chaos.record import digests
from tests.command import Command, wait_until
from tests.toy_interrupted import unbroken
from tests.toy_methods import ToyTraining
from tests.training import same, weights

TOY = (
    "stages.left.method.num_steps=24", "stages.left.method.step_seconds=0.2", "resources.save_steps=4",
    "resources.keep_last=1", "resources.keep_best={metric: loss, mode: max}",
)  # fmt: skip


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB of its own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def fill(disk: Path, left: int = 0) -> Path:
    """Leaves so many bytes free."""
    filler = disk / "filler"
    filler.unlink(missing_ok=True)
    room = os.statvfs(disk)
    filler.write_bytes(b"\1" * (room.f_bavail * room.f_frsize - left))
    return filler


@pytest.mark.slow  # test_a_save_that_fails_at_any_place_leaves_the_last_good_checkpoint is the quick one
def test_a_full_disk_ends_the_stage_with_one_line_and_the_next_run_resumes(toy: Command, small_disk: Path) -> None:
    store = f"store={small_disk}/artifacts"
    process = toy.start("run", *TOY, store)
    stage = small_disk / "artifacts" / "left"
    wait_until(lambda: list(stage.glob("*/checkpoints/step-8")), "left saves")
    filler = fill(small_disk)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if line.startswith("posttrain: ")]
    assert f"the disk of {stage.relative_to(small_disk.parent)}/" in line
    assert "is full (OSError: [Errno 28] No space left on device" in line
    assert "resumes from its checkpoint" not in errors  # it is not tried again
    saved = sorted(int(path.name.removeprefix("step-")) for path in stage.glob("*/checkpoints/step-*"))
    assert saved[0] == 4  # the best one
    assert f"its checkpoint of step {saved[-1]} is kept" in line

    filler.unlink()
    assert toy.states(*TOY, store)["left"] == "resume"
    again = toy.run(*TOY, store)
    assert {name for name, row in again.items() if row["seconds"]} == {"left"}
    assert digests(small_disk / "artifacts")["left"] == unbroken(ToyTraining(num_steps=24))
    [directory] = stage.iterdir()
    assert Checkpoints(directory / "checkpoints").steps() == [4]  # beside the output


def test_what_does_not_fit_is_refused_before_anything_starts(tmp_path: Path, small_disk: Path) -> None:
    tiny.write_policy(tmp_path / "policy", hidden_size=256)
    command = Command(tmp_path, f"model={tmp_path}/policy", f"store={small_disk}/artifacts")
    refused = command("run", "resources.save_steps=10", "resources.save_minutes=null")
    assert refused.returncode == 2, refused.stderr
    [line] = refused.stderr.splitlines()
    assert "store disk/artifacts has " in line
    assert "MB free; cpt needs about " in line
    assert "at one time 3 checkpoints of " in line
    assert " MB more (posttrain gc shows what may be deleted)" in line


SAVING = Resources(micro_batch_size=8, cpus_per_worker=1, save_steps=2, save_minutes=None)


def test_a_save_that_fails_at_any_place_leaves_the_last_good_checkpoint(
    tmp_path: Path, small_disk: Path, one_thread: None
) -> None:
    root = training.write_inputs(tmp_path / "inputs")
    stage = training.method("sft", num_steps=5)
    reports: list[tuple[int, Metrics]] = []

    def train(disk: Path, step: int | None = None, should_stop: Callable[[], bool] = lambda: False) -> Checkpoints:
        store = Checkpoints(disk / "checkpoints")
        ctx = TrainContext(
            output_dir=disk / "output", work_dir=disk / "work", checkpoint_dir=store.directory, resources=SAVING,
            report=lambda step, metrics: reports.append((step, metrics)), should_stop=should_stop,
            resume_from=store.path(step) if step else None,
        )  # fmt: skip
        with explain_full_disk(disk):
            stage.run(training.inputs(root, stage), ctx)
        return store

    whole = train(tmp_path / "whole")
    need = disk_need(stage, SAVING, model_shapes(root / "policy"))
    files = {path.name: path.stat().st_size for path in whole.path(4).iterdir()}
    assert need.checkpoint == pytest.approx(files["model.safetensors"] + files["state.safetensors"], rel=0.15)
    assert need.fewest == need.most - 1 == len(whole.steps()) == 2  # or one more, of a stop
    assert need.output == pytest.approx((tmp_path / "whole" / "output" / "model.safetensors").stat().st_size, rel=0.1)

    def fills(left: int) -> Callable[[], bool]:
        def at_step_4() -> bool:
            if reports[-1][0] == 3:
                steps = Checkpoints(small_disk / "checkpoints").steps
                wait_until(lambda: 2 in steps(), "the checkpoint of step 2, which a thread writes")
                fill(small_disk, left)
            return False

        return at_step_4

    model, optimizer = files["model.safetensors"], files["state.safetensors"]
    step = None
    for left in (0, model // 2, model + optimizer // 2, model + optimizer + 60_000):
        with pytest.raises(PipelineError, match=r"disk of .* is full .* its checkpoint of step 2 is kept"):
            train(small_disk, step, fills(left))
        (small_disk / "filler").unlink()
        step = 2
        assert Checkpoints(small_disk / "checkpoints").damage(2) == []
        assert not list((small_disk / "work").glob("checkpoint-*"))
    train(small_disk, 2)
    assert same(weights(small_disk / "output"), weights(tmp_path / "whole" / "output"))
