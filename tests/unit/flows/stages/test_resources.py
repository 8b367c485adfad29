"""No more is admitted than the machine has; the private folder that holds its slots."""

import os
import stat
import threading
import time

import pytest

from flows.stages import resources
from flows.stages.launch import keep_compiled
from flows.stages.process_settings import stage_environment
from flows.stages.resources import admitted
from lineage.dvc import DvcProject
from lineage.errors import StoppedError
from lineage.filesystem.remote_files import private_folder


def go_on() -> None:
    """The run is not being stopped."""


def test_no_more_is_admitted_than_the_machine_has(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(resources, "count_cpus", lambda: 2)
    running, most, lock = [0], [0], threading.Lock()

    def work(cpus: int) -> None:
        with resources.admitted(cpus, 0, go_on):
            with lock:
                running[0] += cpus
                most[0] = max(most[0], running[0])
            time.sleep(0.05)
            with lock:
                running[0] -= cpus

    threads = [threading.Thread(target=work, args=(cpus,)) for cpus in (1, 2, 1, 2, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert running == [0]
    assert most == [2]


def test_gpus_are_given_by_index(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(resources, "list_gpus", lambda name: ["A", "A"])
    monkeypatch.setattr(resources, "count_cpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with resources.admitted(1, 1, go_on) as first, resources.admitted(1, 1, go_on) as second:
        assert sorted((*first, *second)) == ["0", "1"]


def test_gpus_are_those_that_a_scheduler_has_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert resources.visible_gpus() == ["3", "5"]


def test_who_waits_for_room_can_be_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(resources, "count_cpus", lambda: 1)

    def stop() -> None:
        raise StoppedError("stopped")

    with resources.admitted(1, 0, go_on), pytest.raises(StoppedError), resources.admitted(1, 0, stop):
        pass


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where it will be."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"posttrain-{os.getuid()}"


def never() -> None:
    raise AssertionError("it waits")


def test_it_is_made_for_this_account_alone_and_found_again(place):
    assert private_folder() == private_folder() == place
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    with admitted(1, 0, never):
        assert [path.name for path in (place / "slots").glob("cpu-*")]


def _open(path):
    path.mkdir()
    path.chmod(0o755)


def _of_another(path):
    path.mkdir(mode=0o700)
    os.chown(path, os.getuid() + 1, -1)


@pytest.mark.parametrize(
    "taken",
    [
        _open,
        pytest.param(_of_another, marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file away")),
        lambda path: path.touch(),
        lambda path: path.symlink_to(path.with_name("mine")),
        lambda path: path.symlink_to("nowhere"),
    ],
)
def test_where_its_name_is_taken_another_is_made_and_found_again(place, tmp_path, taken):
    (tmp_path / "mine").mkdir(mode=0o700)
    taken(place)
    found = private_folder()
    assert found == private_folder() and found.name.startswith(f"{place.name}-")
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    with admitted(1, 0, never):
        assert (found / "slots").is_dir() and not (tmp_path / "mine" / "slots").exists()


def test_caches_that_libraries_unpickle_lie_in_it(place, tmp_path, monkeypatch):
    """Theirs would be ``/var/tmp/dvc``, which all may write, and ``torchinductor_USER``, which another may create."""
    for variable in ("DVC_SITE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    assert stage_environment()["TORCHINDUCTOR_CACHE_DIR"] == f"{place}/torchinductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{place}/torchinductor")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # restored at the end
    monkeypatch.delenv("TRITON_CACHE_DIR")
    (tmp_path / "store" / "inductor").mkdir(parents=True)
    os.utime(tmp_path / "store" / "inductor", (0, 0))
    keep_compiled(tmp_path / "store")  # a stage's process
    assert (tmp_path / "store" / "inductor").stat().st_mtime > 0  # what `gc` reads as its last use
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    assert [os.environ[name] for name in names] == [f"{tmp_path}/store/inductor", f"{tmp_path}/store/triton"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of the user")
    keep_compiled(tmp_path / "other")
    assert [os.environ[name] for name in names] == ["of the user", f"{tmp_path}/store/triton"]
    seen = {}
    monkeypatch.setattr("subprocess.run", lambda *_, env, **__: seen.update(env))
    DvcProject(folder=tmp_path, root=tmp_path, stages={})._dvc("status")
    assert seen["DVC_SITE_CACHE_DIR"] == f"{place}/dvc"


def test_a_request_for_more_than_there_is_gets_all(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(resources, "count_cpus", lambda: 2)
    with resources.admitted(64, 0, go_on) as gpus:
        assert gpus == ()
