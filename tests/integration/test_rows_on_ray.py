"""Rows on Ray Data: the same bytes as in processes of this machine, also after a kill; errors; bounded memory."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flows.stages import resources as ray_rows
from flows.stages.job import Job
from flows.stages.process_settings import set_environment
from flows.stages.resources import rows_mapped
from lineage.errors import DataError, PipelineError
from lineage.filesystem.digest import digest_files
from tasks.base_model import train_tokenizer
from tasks.context import Resources
from tasks.data import kinds
from tasks.data.kinds import ordered_map
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import load_or_make
from tasks.method import Input
from tasks.prepare_data import PrepareConversations
from tests.command import PATIENCE
from tests.integration.test_ordered_pool import die, refuse_three
from tests.prepared import prepare
from tests.toy_methods import ToyModel

# test_ordered_pool.py and test_launch.py have a quick test of each decision.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Callable[[Callable[[Job], None]], None]]:
    """Runs a function in a new process: Ray reads its environment when it is imported."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=begin) as pool:
        yield lambda function: pool.submit(function, job_in(tmp_path)).result(timeout=300 * PATIENCE)


def begin() -> None:
    set_environment()
    kinds.INLINE_SECONDS = 0.0
    ray_rows._AHEAD_BYTES = 2**20  # several batches of Ray Data


def job_in(folder: Path) -> Job:
    """A job whose rows are mapped by Ray Data from the first on."""
    resources = Resources(rows="ray", cpus_per_worker=2, wait_minutes=2.0)
    return Job(stage="rows", method=ToyModel(), inputs={}, resources=resources, directory=folder)


def mapped(job, function, items):
    with rows_mapped(job):
        yield from ordered_map(function, items, 1)


def slowly(item: int) -> tuple[int, int]:
    time.sleep(0.2 if item % 2 else 0.05)
    return item, os.getpid()


def rows_and_tokens_have_the_bytes_that_they_have_without(on_ray: Job) -> None:
    tmp_path = on_ray.directory
    texts = [f"{place} " + " ".join(f"word{place * step % 997}" for step in range(150)) for place in range(3000)]
    roles = ("user", "assistant")
    rows = [{"messages": [{"role": role, "content": text} for role in roles]} for text in texts]
    method, found = PrepareConversations(held_out=0.1), {}
    tokenizer, corpus = tmp_path / "tokenizer", tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": texts[:200]}), corpus)
    train_tokenizer(corpus, 500).save_pretrained(tokenizer)
    tokenization = Tokenization(kind=method.produces, max_length=256)
    for out, rows_on in (("local", "local"), ("ray", "ray")):
        with rows_mapped(replace(on_ray, resources=replace(on_ray.resources, rows=rows_on))):
            metrics = prepare(tmp_path, method, rows, out)
            made = Input(name="rows", kind=method.produces, fingerprint="0" * 64, path=tmp_path / out)
            load_or_make(tokenization, made, tokenizer, tmp_path / f"{out}-cache", 1)
        found[out] = metrics, digest_files(tmp_path / out), digest_files(tmp_path / f"{out}-cache" / "tokens")
        found[out][2].pop("digests.json", None)
    assert found["ray"] == found["local"]
    assert len(found["ray"][1]) > 2 and any(name.endswith("tokens.arrow") for name in found["ray"][2])


def a_killed_process_neither_loses_nor_doubles_rows(on_ray: Job) -> None:
    results, killed = [], 0
    for result, pid in mapped(on_ray, slowly, iter(range(60))):
        results.append(result)
        if result in (5, 30):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    assert results == list(range(60)) and killed == 2


def an_error_comes_out_as_itself_after_the_results_before_it(on_ray: Job) -> None:
    results = mapped(on_ray, refuse_three, iter(range(9)))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="row 3 is wrong"):
        next(results)


def processes_that_die_again_and_again_end_the_stage(on_ray: Job) -> None:
    with pytest.raises(PipelineError, match=r"processes of Ray that work on rows died.*out of memory"):
        list(mapped(on_ray, die, iter(range(1, 3))))


def few_rows_are_ahead_of_their_results(on_ray: Job) -> None:
    taken = [0]

    def items() -> Iterator[bytes]:
        for place in range(40):
            taken[0] += 1
            yield bytes([place]) * 2**18

    ahead = [taken[0] - place for place, _ in enumerate(mapped(on_ray, len, items()))]
    assert len(ahead) == 40 and max(ahead) <= 8  # two processes, 1 MB of each


def a_cluster_without_a_free_cpu_is_waited_for_no_longer_than_is_set(on_ray: Job) -> None:
    import ray

    ray.init(num_cpus=1, include_dashboard=False)
    try:
        holder = ray.remote(num_cpus=1)(Counter).remote()  # type: ignore[attr-defined]
        ray.get(holder.elements.remote(), timeout=60)
        full = replace(on_ray, resources=replace(on_ray.resources, wait_minutes=0.1))
        with pytest.raises(PipelineError, match=r"no rows for 0\.1 minutes \(resources.wait_minutes\): no CPU"):
            list(mapped(full, refuse_three, iter(range(2))))
    finally:
        ray.shutdown()


@pytest.mark.parametrize(
    "function",
    [
        rows_and_tokens_have_the_bytes_that_they_have_without,
        a_killed_process_neither_loses_nor_doubles_rows,
        an_error_comes_out_as_itself_after_the_results_before_it,
        processes_that_die_again_and_again_end_the_stage,
        few_rows_are_ahead_of_their_results,
        a_cluster_without_a_free_cpu_is_waited_for_no_longer_than_is_set,
    ],
    ids=lambda function: function.__name__,
)
def test_on_ray_data(fresh, function: Callable[[Job], None]) -> None:
    fresh(function)
