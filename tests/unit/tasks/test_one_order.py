import pytest
import torch

from lineage.errors import PipelineError
from tasks.train.run import adding_in_one_order


def without_an_order() -> torch.Tensor:
    return torch.nn.functional.max_unpool2d(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1, dtype=torch.int64), 2)


def test_an_operation_without_a_fixed_order_is_refused_with_the_way_out():
    with (
        pytest.raises(PipelineError, match=r"max_unpooling2d.*resources.deterministic=false"),
        adding_in_one_order(True),
    ):
        without_an_order()
    assert not torch.are_deterministic_algorithms_enabled()
    without_an_order()


def test_it_is_allowed_where_that_is_stated():
    with adding_in_one_order(False):
        assert without_an_order().tolist() == [[[[1.0, 0.0], [0.0, 0.0]]]]


def test_other_errors_are_raised_as_they_are():
    with pytest.raises(RuntimeError, match="out of memory"), adding_in_one_order(True):
        raise RuntimeError("out of memory")
