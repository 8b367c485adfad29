"""The planted faults keep up with the code and its tests."""

from tests.mutations import __main__ as mutations
from tests.mutations.faults import FAULTS


def test_every_fault_can_be_planted_in_one_place_and_names_tests_that_exist() -> None:
    files = mutations.read_code(mutations.REPOSITORY)
    assert len(FAULTS) >= 40
    for fault in FAULTS:
        assert len(mutations.places(files, fault)) == 1, f"{fault.what}: its text is not once in the code"
        assert fault.text != fault.wrong
        assert len({named.partition("::")[0] for named in fault.tests}) == len(
            [*mutations.test_files(mutations.REPOSITORY, fault)]
        ), f"{fault.what}: {fault.tests} are not files of tests, one each"
