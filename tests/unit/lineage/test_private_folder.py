"""The directory in the shared temporary directory that holds the slots, caches of libraries and Ray's sessions."""

import os
import stat

import pytest

from flows.stages.admission import admitted
from flows.stages.process_settings import stage_environment
from lineage.dvc import DvcProject
from lineage.remote_files import private_folder


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
    seen = {}
    monkeypatch.setattr("subprocess.run", lambda *_, env, **__: seen.update(env))
    DvcProject(folder=tmp_path, root=tmp_path, stages={})._dvc("status")
    assert seen["DVC_SITE_CACHE_DIR"] == f"{place}/dvc"
