"""The peak of this machine, by torch."""

import torch

from tasks.train.speed import measured_peak


def test_a_cpu_has_a_peak_and_the_random_numbers_of_the_training_stay():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert 1e8 < measured_peak(False, "fp32") < 1e14
    assert torch.equal(torch.get_rng_state(), before)
