from pathlib import Path

import pytest

from flows.declared import split_words
from lineage.errors import ConfigError


@pytest.mark.parametrize("stated", [["--config-dir", "ours"], ["--config-dir=ours"]])
def test_the_directory_is_found_among_the_overrides_in_either_form(stated):
    words = ["pipeline=toy", *stated, "~stages.dpo", "+sources.x.path='a b'"]
    assert split_words(words) == (["pipeline=toy", "~stages.dpo", "+sources.x.path='a b'"], Path("ours"))
    assert split_words(["pipeline=toy"]) == (["pipeline=toy"], None)


def test_a_directory_that_is_not_there_is_told():
    with pytest.raises(ConfigError, match="pipeline=toy --config-dir: argument --config-dir: expected one argument"):
        split_words(["pipeline=toy", "--config-dir"])
