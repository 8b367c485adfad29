from flows.wording import clock, counted


def test_times_are_read_as_clocks():
    assert [clock(seconds) for seconds in (5, 65, 3605)] == ["0:05", "1:05", "1:00:05"]


def test_one_is_no_plural():
    assert [counted(number, "CPU") for number in (0, 1, 2)] == ["0 CPUs", "1 CPU", "2 CPUs"]
