"""What a training says of a step, from the log of all of them."""

from tasks.train.callbacks import WINDOW_STEPS, step_metrics


class Log(list):
    """Counts the entries that are looked at."""

    looks = 0

    def __getitem__(self, index):
        self.looks += 1
        return super().__getitem__(index)


def entry(step, **more):
    return {"step": step, "loss": float(step), "num_tokens": 1.0, "learning_rate": 0.1, **more}


def test_the_last_steps_count_and_of_held_out_rows_the_step_itself():
    log = [entry(1), entry(2, held_out_loss=5.0), {"step": 2, "train_runtime": 9.0}, entry(3)]
    assert step_metrics(log, 2) == {"loss": 1.5, "held_out_loss": 5.0}
    assert step_metrics(log, 3) == {"loss": 2.0}
    assert step_metrics([entry(step) for step in range(1, 31)], 30) == {"loss": 25.5}


def test_a_metric_that_some_steps_lack_is_the_mean_of_the_others():
    log = [entry(1, kl=1.0), entry(2), entry(3, kl=2.0), entry(4)]
    assert step_metrics(log, 4) == {"loss": 2.5, "kl": 1.5}


def test_a_long_log_is_not_read_again_for_each_step():
    log = Log(entry(step) for step in range(1, 10_001))
    for step in range(1, 10_001, 1000):
        step_metrics(log, step)
    assert log.looks < 10 * 5 * WINDOW_STEPS
