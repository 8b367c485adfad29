"""Kernels that add in one order: others give another last bit each time, and a resumed training another model."""

import contextlib
from collections.abc import Iterator

import torch

from lineage.errors import PipelineError

_REFUSED = "does not have a deterministic implementation"  # what torch says of an operation that has none


@contextlib.contextmanager
def adding_in_one_order(wanted: bool) -> Iterator[None]:
    """Has torch take its deterministic kernels meanwhile, as the backward pass of attention on a GPU has.

    cuBLAS needs ``CUBLAS_WORKSPACE_CONFIG`` for it, which a stage's process is started with.

    Raises:
        PipelineError: an operation has no such kernel.
    """
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted)
    # It takes time, for memory that is written before it is read.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        if _REFUSED not in str(error):
            raise
        operation = str(error).partition(_REFUSED)[0].strip()
        raise PipelineError(
            f"{operation} adds in no fixed order, so that a run that was interrupted would end with other weights than "
            "one that was not; resources.deterministic=false trains with it all the same"
        ) from error
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)
        torch.utils.deterministic.fill_uninitialized_memory = fills
