"""All checks, in the order in which they are shown."""

from collections.abc import Callable, Iterator

from flows.doctor.facts import Facts, Finding
from flows.doctor.machine import check_gpus, check_open_files, check_shared_memory, check_store, check_tmp
from flows.doctor.packages import check_floors, check_known_bad, check_lock, check_python, check_requirements
from flows.doctor.services import check_credentials, check_exposed, check_mlflow, check_prefect, check_ray

CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = (
    check_python,
    check_requirements,
    check_lock,
    check_known_bad,
    check_floors,
    check_store,
    check_tmp,
    check_shared_memory,
    check_open_files,
    check_gpus,
    check_exposed,
    check_prefect,
    check_mlflow,
    check_ray,
    check_credentials,
)
