"""Batches of rows, and an order-preserving process pool."""

import multiprocessing
import os
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from lineage.errors import PipelineError

if TYPE_CHECKING:
    import pyarrow as pa

Item = TypeVar("Item")
Result = TypeVar("Result")

INLINE_SECONDS = 2.0  # about the time that a process takes to start
_AHEAD = 3  # items per worker that are read ahead, so that no worker waits for the reader
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false"} | dict.fromkeys(
    ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "ARROW_NUM_THREADS"), "1"
)


def ordered_map(function: Callable[[Item], Result], items: Iterable[Item], workers: int) -> Iterator[Result]:
    """Maps ``function`` over items, in order: for ``INLINE_SECONDS`` in this process, then in a process pool.

    Args:
        function: sent to each process once, so that it may cache state between items.
        workers: number of single-threaded processes, at most the number of CPUs; 1: only this process.

    Raises:
        PipelineError: a process died. Exceptions of ``function`` and ``items`` are raised unchanged.
    """
    workers = min(workers, os.cpu_count() or 1)
    remaining, start = iter(items), time.monotonic()
    while workers == 1 or time.monotonic() - start < INLINE_SECONDS:
        try:
            item = next(remaining)
        except StopIteration:
            return
        yield function(item)
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),  # a fork would copy locks that threads hold
        initializer=_begin,
        initargs=(pickle.dumps(function),),
    )
    try:
        yield from _in_order(pool, remaining, workers * _AHEAD)
    except BrokenProcessPool as error:
        raise PipelineError(
            "a process that works on rows died without a message; out of memory? Free some, or set fewer "
            "cpus_per_worker: each CPU is one process"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, items: Iterable[Item], window: int) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    work = cast("Callable[[Item], Result]", _work)
    for item in items:
        pending.append(pool.submit(work, item))
        if len(pending) == window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


def _begin(function: bytes) -> None:
    """Initializes a worker: limits threads before the function's imports, and exits with the parent."""
    global _work_on
    os.environ.update(_ONE_THREAD)
    threading.Thread(target=_die_with_parent, daemon=True, name="die-with-parent").start()
    _work_on = pickle.loads(function)


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_work_on: Callable[..., object]


def _work(item: object) -> object:
    return _work_on(item)


MAX_BYTES = 2**22  # processing a text takes more than ten times its memory


def row_batches(file: Path, max_rows: int, columns: Sequence[str] | None = None) -> Iterator["pa.RecordBatch"]:
    """Batches of a Parquet file in order, each of at most ``max_rows`` rows and ``MAX_BYTES`` (or one row).

    Args:
        columns: columns to read, if the file has them; None: all.
    """
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as rows:
        names = [name for name in rows.schema_arrow.names if columns is None or name in columns]
        for number in range(rows.num_row_groups):
            group = rows.metadata.row_group(number)
            fitting = group.num_rows * MAX_BYTES // max(group.total_byte_size, 1)
            count = min(max(fitting, 1), max_rows)
            for batch in rows.iter_batches(count, row_groups=[number], columns=names):
                yield from _small(batch)


def _small(rows: "pa.RecordBatch") -> Iterator["pa.RecordBatch"]:
    """Splits a large batch into copies of parts; a slice would keep, and pickle, all rows."""
    import pyarrow as pa

    if rows.nbytes <= MAX_BYTES or len(rows) == 1:
        yield rows
        return
    half = len(rows) // 2
    for part in (rows.slice(0, half), rows.slice(half)):
        yield from _small(pa.concat_batches([part]))
