"""When the loss on held-out rows is measured."""

import pytest

from lineage.errors import ConfigError
from tasks.best import Best
from tasks.cpt import ContinuedPretraining
from tasks.sft import SFT
from tasks.train.validation import Patience, Validation, completes_epochs, steps_of_epochs


@pytest.mark.parametrize(
    ("epochs", "num_rows", "steps"),
    [(1, 40, 5), (1, 41, 6), (0.5, 40, 3), (1.1, 100, 14), (3, 1, 1), (0.001, 40, 1)],
)
def test_passes_over_the_rows_in_steps(epochs: float, num_rows: int, steps: int) -> None:
    assert steps_of_epochs(epochs, num_rows, 8) == steps


def test_no_rounding_adds_a_step() -> None:
    assert steps_of_epochs(1.1, 100, 10) == 11  # 1.1 * 100 / 10 = 11.000000000000002 in floats


@pytest.mark.parametrize(
    ("epochs", "num_rows", "steps"),
    [(1, 40, [5, 10]), (1, 30, [4, 8, 12]), (0.5, 40, [3, 5, 8, 10]), (0.1, 40, [*range(1, 13)]), (1.5, 40, [8])],
)
def test_the_first_steps_that_complete_passes(epochs: float, num_rows: int, steps: list[int]) -> None:
    assert [step for step in range(1, 13) if completes_epochs(epochs, step, num_rows, 8)] == steps
    assert [step for step in range(1, 13) if Validation(every_epochs=epochs).is_due(step, num_rows, 8)] == steps


def test_steps_do_not_ask_for_rows() -> None:
    assert [step for step in range(1, 10) if Validation(every_steps=3).is_due(step, 0, 8)] == [3, 6, 9]


def test_patience_counts_measurements_that_are_not_smaller() -> None:
    patience = Patience()
    waited = []
    for loss in (3.0, 2.0, 2.0, float("nan"), 1.5, 1.6):
        patience.add(loss)
        waited.append(patience.waited)
    assert waited == [0, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("fields", [{}, {"every_steps": 2, "every_epochs": 1.0}])
def test_steps_or_epochs_are_set(fields: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"validation.every_steps=N or validation.every_epochs=1"):
        Validation(**fields)  # type: ignore[arg-type]


def test_off_it_leaves_no_trace_in_the_recipe() -> None:
    assert "validation" not in SFT().recipe()
    recipe = SFT(validation=Validation(every_steps=20, patience=3)).recipe()
    assert recipe["validation"] == {"every_steps": 20, "patience": 3}


def test_the_models_that_it_measures_compete_to_be_the_best() -> None:
    assert SFT(validation=Validation(every_epochs=1.0), output="best").best == Best()
    with pytest.raises(ConfigError, match=r"best.every_steps is not set, .*set best.every_steps=N"):
        SFT(best=Best(), output="best")
    with pytest.raises(ConfigError, match=r"best.every_steps is not set, and best.metric=loss"):
        ContinuedPretraining(best=Best(metric="loss"), validation=Validation(every_steps=2))
