import os

import pytest
import torch

from lineage.errors import PipelineError
from tasks.train.fit import deterministic_kernels


def not_deterministic() -> torch.Tensor:
    return torch.nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2)


def test_an_operation_that_is_not_deterministic_is_refused_with_the_remedy():
    with (
        pytest.raises(PipelineError, match=r"max_unpooling2d.* is not deterministic.*resources.deterministic=false"),
        deterministic_kernels(True),
    ):
        not_deterministic()
    assert not torch.are_deterministic_algorithms_enabled()
    not_deterministic()


def test_it_is_allowed_where_that_is_stated():
    with deterministic_kernels(False):
        assert not_deterministic().tolist() == [[[[1.0, 0.0], [0.0, 0.0]]]]


def test_other_errors_are_raised_as_they_are():
    with pytest.raises(RuntimeError, match="out of memory"), deterministic_kernels(True):
        raise RuntimeError("out of memory")


def test_flash_attention_is_deterministic_too(monkeypatch):
    monkeypatch.setenv("FLASH_ATTENTION_DETERMINISTIC", "0")
    with deterministic_kernels(True):
        assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "0"
