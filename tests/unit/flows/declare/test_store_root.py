import pytest

from flows.declare.config import load_pipeline
from flows.declare.store_root import store_root
from lineage.errors import ConfigError


@pytest.mark.parametrize("overrides", [[], ["store=elsewhere"], ["store=a", "store='b c'"], ["store=${name}"]])
def test_the_store_is_the_one_that_a_run_would_write(overrides, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert store_root(overrides) == load_pipeline(overrides).store


def test_a_wrong_key_is_refused_as_everywhere():
    with pytest.raises(ConfigError, match="stor: "):
        store_root(["stor=elsewhere"])
