"""The order of rows is one list, the one that a plain Trainer would draw."""

from tasks.train.run import row_order


def test_every_epoch_is_a_permutation_and_epochs_differ() -> None:
    order = row_order(7, 17, seed=3)
    first, second, rest = order[:7], order[7:14], order[14:]
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second
    assert len(rest) == 3


def test_more_samples_extend_the_same_order() -> None:
    assert row_order(7, 17, seed=3)[:9] == row_order(7, 9, seed=3)


def test_the_seed_changes_the_order() -> None:
    assert row_order(20, 20, seed=0) != row_order(20, 20, seed=1)


def test_the_first_epoch_is_what_a_plain_trainer_draws(tmp_path: object) -> None:
    import torch
    from accelerate.data_loader import SeedableRandomSampler
    from transformers import set_seed

    set_seed(5)
    sampler = SeedableRandomSampler(list(range(30)))  # as accelerate makes it of the Trainer's RandomSampler
    assert list(sampler) == row_order(30, 30, seed=5)
    assert torch.initial_seed() == 5
