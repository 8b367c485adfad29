import pytest

from lineage.errors import ConfigError
from tasks.tokenizers import tokenizer_of


def test_json_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match=rf"{tmp_path}: its tokenizer cannot be loaded \(\w+: .*; files as save_"):
        tokenizer_of(tmp_path)
