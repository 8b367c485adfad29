"""Checkpoints are written beside the training, one at a time, whole or not at all, and divided as the state is."""

import errno
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lineage.checkpoints import Checkpoints, Mirror, not_sent
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.filesystem.digest import digest_files
from lineage.filesystem.disk import explain_full_disk
from tasks.context import Resources, TrainContext
from tasks.sft import SFT
from tasks.train.loop import saved_state
from tasks.train.loop.checkpointing import Saver
from tasks.train.loop.saved_state import (
    Draft,
    TrainingState,
    load_named_state,
    named_state,
    read_own,
    read_state,
    read_tensors,
    schedule_of,
)
from tasks.train.sharding import in_file, whole_on_first
from tests.worker_group import free_at_once, own_memory

CPU = torch.device("cpu")


def saver(folder: Path, rank: int = 0, world_size: int = 1, **resources: object) -> Saver:
    ctx = TrainContext(
        output_dir=folder / "output", work_dir=folder / "work", checkpoint_dir=folder / "checkpoints", rank=rank,
        world_size=world_size, resources=Resources(save_steps=2, save_minutes=None, **resources),
    )  # fmt: skip
    return Saver(ctx, SFT(), 0.0, 40)


def state(value: float) -> TrainingState:
    return TrainingState(shared={"weight": torch.full((64,), value)}, own={"seed": int(value)})


def saved(folder: Path) -> Checkpoints:
    return Checkpoints(folder / "checkpoints")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Writes wait until it is set."""
    event, write = threading.Event(), Draft.write
    monkeypatch.setattr(Draft, "write", lambda self: (event.wait(60), write(self))[1])
    return event


def test_a_state_comes_back_as_it_was_with_tied_tensors_tied(tmp_path: Path) -> None:
    tied = torch.arange(6.0).view(2, 3).t()  # not contiguous
    shared = {
        "a": {"step": torch.tensor(3.0), 7: tied, "again": tied, "none": None, "betas": (0.9, 0.999)},
        "b": [torch.tensor([1, 255], dtype=torch.uint8), torch.ones(2, dtype=torch.bfloat16), torch.ones(0)],
        "c": {"complex": torch.ones(2, dtype=torch.complex64), "flags": torch.tensor([True, False])},
    }
    given = TrainingState(shared=shared, own={"random": torch.get_rng_state()}, model={"weight": torch.ones(3)})
    saver(tmp_path).save(2, given, {}, waits=True)
    folder = saved(tmp_path).path(2)
    found = read_state(folder, 0)
    assert str(found) == str(shared)
    assert found["a"][7] is found["a"]["again"]
    assert torch.equal(read_own(folder, 0)["random"], torch.get_rng_state())
    assert load_file(folder / "model.safetensors").keys() == {"weight"}
    assert saved(tmp_path).damage(2) == []


def test_the_training_resumes_while_a_copy_is_written(tmp_path: Path, held: threading.Event) -> None:
    weight = torch.full((64,), 1.0)
    writer = saver(tmp_path)
    writer.save(2, replace(state(1.0), shared={"weight": weight}), {})
    weight.fill_(2.0)
    assert writer.agreed(3, CPU) == (False, False)
    assert saved(tmp_path).steps() == []
    held.set()
    writer.wait()
    assert torch.equal(read_state(saved(tmp_path).path(2), 0)["weight"], torch.full((64,), 1.0))


def test_what_is_idle_is_copied_beside_the_training_before_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, copy_left = threading.Event(), saved_state.Staging.copy_left
    monkeypatch.setattr(saved_state.Staging, "copy_left", lambda self: (goes_on.wait(60), copy_left(self))[1])
    moment, weight = torch.arange(6.0).view(2, 3).t(), torch.full((64,), 1.0)  # the first is not contiguous
    writer, expected = saver(tmp_path), moment.clone()
    given = TrainingState(shared={"optimizer": {"moment": moment}, "weight": weight}, own={}, idle="optimizer")
    with caplog.at_level("INFO"):
        writer.save(2, given, {})
        weight.fill_(2.0)
        assert "state=staged" not in caplog.text
        threading.Timer(0.2, goes_on.set).start()
        writer.copied()
        assert "step=2 state=staged bytes=280 " in caplog.text
    moment.fill_(0.0)
    writer.wait()
    found = read_state(saved(tmp_path).path(2), 0)
    assert torch.equal(found["optimizer"]["moment"], expected)
    assert torch.equal(found["weight"], torch.full((64,), 1.0))


def test_one_is_written_at_a_time_and_one_that_is_waited_for_is_there(tmp_path: Path, held: threading.Event) -> None:
    writer = saver(tmp_path, keep_last=9)
    writer.save(2, state(2.0), {})
    threading.Timer(0.2, held.set).start()
    writer.save(4, state(4.0), {})  # waits for the one before
    assert saved(tmp_path).steps()[0] == 2
    writer.save(5, state(5.0), {}, waits=True)
    assert saved(tmp_path).steps() == [2, 4, 5]
    assert [float(read_state(saved(tmp_path).path(step), 0)["weight"][0]) for step in (2, 4, 5)] == [2.0, 4.0, 5.0]


def test_without_memory_for_a_copy_the_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tasks.train.loop.saved_state._free_memory", lambda: 100)
    writer = saver(tmp_path)
    writer.save(2, state(2.0), {})
    assert saved(tmp_path).steps() == [2] and not writer._staging.memory
    assert "save_async=auto: no memory for a copy of 256 bytes" in caplog.text
    saver(tmp_path, save_async=False).save(3, state(3.0), {})
    assert saved(tmp_path).steps() == [2, 3]


def test_a_container_has_the_memory_of_its_limit_without_what_files_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_state, "_CONTAINER", tmp_path)
    assert saved_state._free_memory() > 700
    for name, text in {"max": "1000", "current": "900", "stat": "anon 300\ninactive_file 600\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert saved_state._free_memory() == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert saved_state._free_memory() > 700


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), r"the disk of .* is full .*checkpoint of step 2 is kept"),
        (OSError(errno.EIO, "Input/output error"), r"step 4 could not be written .*its checkpoint of step 2 is kept"),
    ],
)
def test_what_the_writer_could_not_do_is_raised_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    def fails(self: Draft) -> None:
        raise error

    writer = saver(tmp_path)
    writer.save(2, state(2.0), {}, waits=True)
    monkeypatch.setattr(Draft, "write", fails)
    writer.save(4, state(4.0), {})
    writer._writer.join()
    with pytest.raises(PipelineError, match=message), explain_full_disk(tmp_path):
        writer.agreed(5, CPU)
    assert saved(tmp_path).steps() == [2]


def test_a_checkpoint_is_published_when_all_workers_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "barrier", lambda **options: None)
    first, second = (saver(tmp_path, rank, 2) for rank in (0, 1))
    first.save(2, state(2.0), {})
    first._writer.join(0.3)
    assert first._writer.is_alive() and saved(tmp_path).steps() == []
    second.save(2, replace(state(2.0), own={"seed": 1}), {}, waits=True)
    first.wait()
    assert saved(tmp_path).damage(2) == []
    assert [read_own(saved(tmp_path).path(2), rank)["seed"] for rank in (0, 1)] == [2, 1]
    assert {"rank-0.pt", "rank-1.pt", "state.pt", "state.safetensors"} == saved(tmp_path).read(2).files.keys()

    monkeypatch.setattr("tasks.train.loop.checkpointing._GRACE_SECONDS", 0.1)
    first.save(4, state(4.0), {})  # the other worker dies
    first.settle()
    assert saved(tmp_path).steps() == [2]


def test_the_mirror_gets_each_checkpoint_and_keeps_what_the_store_keeps(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    writer = saver(tmp_path, keep_last=2, checkpoint_mirror=url)
    for step in (2, 4, 6):
        writer.save(step, state(step), {}, waits=True)
    mirror = Mirror(url, tmp_path)
    assert mirror.steps() == saved(tmp_path).steps() == [4, 6]
    [copy] = (tmp_path / "mirror").glob("*/*/step-6")
    assert digest_files(copy) == digest_files(saved(tmp_path).path(6))


def test_a_mirror_that_refuses_a_checkpoint_is_a_warning_with_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer = saver(tmp_path, checkpoint_mirror=f"file://{tmp_path}/mirror")
    writer.save(2, state(2.0), {}, waits=True)
    (tmp_path / "mirror").rename(tmp_path / "gone")
    (tmp_path / "mirror").write_text("no directory")
    writer.save(4, state(4.0), {}, waits=True)
    assert "state=not sent (" in caplog.text and "its last good one is of step 2" in caplog.text
    lacks = f"; its checkpoint of step 4 was not sent to file://{tmp_path}/mirror/"
    assert not_sent(writer.ctx.work_dir).startswith(lacks)
    assert writer.agreed(5, CPU) == (False, False)
    with pytest.raises(ConfigError, match=r"resources.checkpoint_mirror=file://.*: cannot be written \("):
        Mirror(f"file://{tmp_path}/mirror", tmp_path).require_writable()
    (tmp_path / "mirror").unlink()
    writer.save(6, state(6.0), {}, waits=True)
    assert not_sent(writer.ctx.work_dir) == ""


def test_a_slow_mirror_holds_up_no_save_and_loses_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, push = threading.Event(), Mirror.push
    monkeypatch.setattr(Mirror, "push", lambda *args: (slow.wait(60), push(*args))[1])
    writer = saver(tmp_path, keep_last=1, checkpoint_mirror=f"file://{tmp_path}/mirror")
    for step in (2, 4, 6):
        writer.save(step, state(step), {})
    writer.wait()
    assert saved(tmp_path).steps() == [2, 6], "what is being sent stays, and what waits was replaced"
    slow.set()
    writer._uploads.wait()
    assert Mirror(f"file://{tmp_path}/mirror", tmp_path).steps() == [6]


def test_a_checkpoint_of_an_earlier_version_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"an earlier version of posttrain.*restart=\[STAGE\]"):
        read_state(tmp_path, 0)


# --- divided over workers


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 3)  # 7 rows over two workers: 4 and 3


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * (1 + parameter.detach())
    optimizer.step()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def resumed(folder: Path, *, divided: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer that begin anew, and load the checkpoint."""
    model = Tiny()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    if divided:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    parameters = dict(model.named_parameters())
    read_tensors(folder, dict(model.state_dict()))
    found = read_state(folder, torch.distributed.get_rank() if divided else 0, parameters)
    load_named_state(optimizer, {id(each): name for name, each in parameters.items()}, found["optimizer"])
    return model, optimizer


def grouped(model: nn.Module, *groups: tuple[float, list[str]]) -> torch.optim.Optimizer:
    of = dict(model.named_parameters())
    given = [{"params": [of[name] for name in names], "weight_decay": decay} for decay, names in groups]
    return torch.optim.AdamW(given, lr=0.1)


def test_groups_of_an_optimizer_are_found_by_their_weights_with_their_schedule() -> None:
    """Where some weights are divided, transformers makes more groups than where all are whole."""
    model = Tiny()
    one, two, *others = (name for name, _ in model.named_parameters())
    names = {id(each): name for name, each in model.named_parameters()}
    saves = grouped(model, (0.5, [one]), (0.0, [two]), (0.0, others))
    step(model, saves)
    state = named_state(saves, names)
    loads = grouped(model, (0.3, [two, *others]), (0.4, [one]), (0.2, []))
    assert load_named_state(loads, names, state) == [1, 0, 0]
    assert [group["weight_decay"] for group in loads.param_groups] == [0.0, 0.5, 0.5]
    assert all(torch.equal(loads.state[each]["exp_avg"], saves.state[each]["exp_avg"]) for each in saves.state)
    assert schedule_of([1, 0], {"base_lrs": [1, 2, 3], "last_epoch": 4}) == {"base_lrs": [2, 1], "last_epoch": 4}

    unnamed = [{**group, "params": [0]} for group in saves.state_dict()["param_groups"]]  # as they were saved before
    with pytest.raises(ArtifactError, match="its checkpoint has 3 groups of weights and the optimizer 2"):
        load_named_state(grouped(model, (0.5, [one]), (0.0, [two, *others])), names, {**state, "param_groups": unnamed})


def in_two_workers(work: Callable[[int, Path], None], folder: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")  # with all imports; a forked process may use one thread
    workers = [context.Process(target=_joined, args=(work, rank, port, folder)) for rank in (0, 1)]
    for each in workers:
        each.start()
    for each in workers:
        each.join(60)
    assert [each.exitcode for each in workers] == [0, 0]


def _joined(work: Callable[[int, Path], None], rank: int, port: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    work(rank, folder)
    torch.distributed.destroy_process_group()


def _work(rank: int, folder: Path) -> None:
    model = fully_shard(Tiny())
    optimizer = trained(model)
    parameters = dict(model.named_parameters())
    names = {id(each): name for name, each in parameters.items()}
    given = TrainingState(
        shared={"optimizer": named_state(optimizer, names)}, own={}, model=model.state_dict(), parameters=parameters
    )
    saver(folder, rank, 2).save(2, given, {}, waits=True)
    torch.distributed.barrier()
    for path in (saved(folder).path(2), folder / "alone" / "checkpoints" / "step-2"):
        again, its = resumed(path, divided=True)
        step(again, its)
        found = {name: whole(each) for name, each in again.state_dict().items()}
        if rank == 0:
            torch.save(found, folder / f"{path.parents[1].name}.pt")


def test_a_divided_state_is_written_in_parts_and_read_by_any_division(tmp_path: Path) -> None:
    model = Tiny()
    optimizer = trained(model)
    names = {id(each): name for name, each in model.named_parameters()}
    alone = TrainingState(shared={"optimizer": named_state(optimizer, names)}, own={}, model=model.state_dict())
    saver(tmp_path / "alone").save(2, alone, {}, waits=True)

    in_two_workers(_work, tmp_path)
    folder = saved(tmp_path).path(2)
    assert saved(tmp_path).damage(2) == []
    parts = [load_file(folder / f"model-0000{rank}-of-00002.safetensors")["first.weight"] for rank in (1, 2)]
    assert [each.shape[0] for each in parts] == [4, 3], "each worker wrote its part"
    assert torch.equal(torch.cat(parts), model.first.weight)
    again, its = resumed(folder, divided=False)
    step(model, optimizer)
    step(again, its)
    expected = model.state_dict()
    for found in (again.state_dict(), torch.load(tmp_path / f"{tmp_path.name}.pt"), torch.load(tmp_path / "alone.pt")):
        assert all(torch.equal(found[name], each) for name, each in expected.items())


def _made_whole(rank: int, folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16) for _ in range(64)))
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    free_at_once()
    before = own_memory()
    whole_on_first(model, folder, first=rank == 0)
    grown = own_memory() - before
    if rank:
        assert all(isinstance(each, DTensor) for each in model.parameters())
        return
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())
    assert grown < sum(each.nbytes for each in expected.values()) / 4
    assert not [*folder.iterdir()]


def test_a_divided_model_is_made_whole_in_files_that_have_no_name(tmp_path: Path) -> None:
    in_two_workers(_made_whole, tmp_path)


def test_a_full_disk_is_an_error_where_a_model_is_made_whole(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3).T  # not contiguous
    for each in (weight, weight.to(torch.bfloat16), torch.tensor(1.0), torch.empty(0, 4)):
        assert torch.equal(in_file(each, tmp_path), each)
    with pytest.raises(OSError, match="No such file or directory"):
        in_file(weight, tmp_path / "none")
