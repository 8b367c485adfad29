"""The flows as Prefect looks them up: ``posttrain.entry.<pipeline>``. This module has no other public name."""

from typing import TYPE_CHECKING

from posttrain import first as _first

_first()
from flows.prefect.deployed import flow_of as _flow_of  # noqa: E402

if TYPE_CHECKING:
    from prefect import Flow as _Flow


def __getattr__(option: str) -> "_Flow[..., None]":
    _first()  # `prefect deploy` has the current folder on its path only while it imports this module
    found = None if option.startswith("_") else _flow_of(option)
    if found is None:
        raise AttributeError(
            f"module {__name__} has no attribute {option}: there is no pipeline/{option}.yaml here, "
            f"nor where POSTTRAIN_WORDS='--config-dir DIR' says"
        )
    return found
