"""The directory in the shared temporary directory that holds the slots and Ray's sessions."""

import os
import stat

import pytest

from flows.open_run import check_machine
from flows.stages.admission import admitted
from flows.stages.private_folder import private_folder
from lineage.errors import ConfigError


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


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755])
def test_one_that_lets_others_in_is_refused_before_anything_starts(place, mode):
    place.mkdir()
    place.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode 0{mode:o}; .* mode 0700 is accepted.*set TMPDIR"):
        check_machine([])
    with pytest.raises(ConfigError), admitted(1, 0, never):
        pass


def test_one_of_another_account_is_refused(place, monkeypatch):
    other = os.getuid() + 1
    place.with_name(f"posttrain-{other}").mkdir(mode=0o700)
    monkeypatch.setattr("os.getuid", lambda: other)
    with pytest.raises(ConfigError, match=rf"of user {other - 1} with mode 0700; a directory of user {other} "):
        private_folder()


def test_a_link_is_refused_wherever_it_leads(place, tmp_path):
    (tmp_path / "mine").mkdir(mode=0o700)
    for target in ("mine", "nowhere"):
        place.unlink(missing_ok=True)
        place.symlink_to(tmp_path / target)
        with pytest.raises(ConfigError, match="is a symbolic link or file of user"):
            private_folder()
