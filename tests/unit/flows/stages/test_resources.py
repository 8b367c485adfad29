"""No more is admitted than the machine has; the private folder that holds its slots."""

import os
import stat
import threading
import time

import pytest

from flows.stages import resources
from flows.stages.launch import keep_compiled
from flows.stages.process_settings import stage_environment
from flows.stages.resources import Cluster, Node, admitted, require_beside, require_cluster
from lineage.dvc import DvcProject
from lineage.errors import ConfigError, StoppedError
from lineage.filesystem.remote_files import private_folder
from tasks.context import Launcher, Resources


def go_on() -> None:
    """The run is not being stopped."""


def test_no_more_is_admitted_than_the_machine_has(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(resources, "count_cpus", lambda: 2)
    running, most, lock = [0], [0], threading.Lock()

    def work(cpus: int) -> None:
        with resources.admitted(cpus, 0, go_on, "sft"):
            with lock:
                running[0] += cpus
                most[0] = max(most[0], running[0])
            time.sleep(0.05)
            with lock:
                running[0] -= cpus

    threads = [threading.Thread(target=work, args=(cpus,)) for cpus in (1, 2, 1, 2, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert running == [0]
    assert most == [2]


def test_gpus_are_given_by_index(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(resources, "list_gpus", lambda name: ["A", "A"])
    monkeypatch.setattr(resources, "count_cpus", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with resources.admitted(1, 1, go_on, "sft") as first, resources.admitted(1, 1, go_on, "sft") as second:
        assert sorted((*first, *second)) == ["0", "1"]


def test_gpus_are_those_that_a_scheduler_has_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert resources.visible_gpus() == ["3", "5"]


def test_who_waits_for_room_can_be_stopped(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(resources, "count_cpus", lambda: 1)

    def stop() -> None:
        raise StoppedError("stopped")

    with resources.admitted(1, 0, go_on, "sft"), pytest.raises(StoppedError), resources.admitted(1, 0, stop, "sft"):
        pass


def test_a_run_that_waits_names_the_stage_of_another_run_that_has_the_cpus(place, monkeypatch):
    monkeypatch.setattr(resources, "count_cpus", lambda: 2)
    with resources.admitted(2, 0, go_on, "sft of run 1"):
        assert resources.used_by_others() == ""  # its own
        mine = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: mine + 1)
        named = f"; sft of run 1 (process {mine}) has them; it then starts by itself"
        assert resources.used_by_others() == named
        monkeypatch.setattr(resources.Owner, "is_gone", lambda self: True)  # killed: its file is still there
        assert resources.used_by_others() == ""
        monkeypatch.undo()
    assert not list(place.glob("slots/*.user"))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Where it will be."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"posttrain-{os.getuid()}"


def never() -> None:
    raise AssertionError("it waits")


def test_it_is_made_for_this_account_alone_and_found_again(place):
    assert private_folder() == private_folder() == place
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    with admitted(1, 0, never, "sft"):
        assert [path.name for path in (place / "slots").glob("cpu-*")]


def _open(path):
    path.mkdir()
    path.chmod(0o755)


def _of_another(path):
    path.mkdir(mode=0o700)
    os.chown(path, os.getuid() + 1, -1)


@pytest.mark.parametrize(
    "taken",
    [
        _open,
        pytest.param(_of_another, marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives a file away")),
        lambda path: path.touch(),
        lambda path: path.symlink_to(path.with_name("mine")),
        lambda path: path.symlink_to("nowhere"),
    ],
)
def test_where_its_name_is_taken_another_is_made_and_found_again(place, tmp_path, taken):
    (tmp_path / "mine").mkdir(mode=0o700)
    taken(place)
    found = private_folder()
    assert found == private_folder() and found.name.startswith(f"{place.name}-")
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    with admitted(1, 0, never, "sft"):
        assert (found / "slots").is_dir() and not (tmp_path / "mine" / "slots").exists()


def test_caches_that_libraries_unpickle_lie_in_it(place, tmp_path, monkeypatch):
    """Theirs would be ``/var/tmp/dvc``, which all may write, and ``torchinductor_USER``, which another may create."""
    for variable in ("DVC_SITE_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    assert stage_environment()["TORCHINDUCTOR_CACHE_DIR"] == f"{place}/torchinductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{place}/torchinductor")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # restored at the end
    monkeypatch.delenv("TRITON_CACHE_DIR")
    (tmp_path / "store" / "inductor").mkdir(parents=True)
    os.utime(tmp_path / "store" / "inductor", (0, 0))
    keep_compiled(tmp_path / "store")  # a stage's process
    assert (tmp_path / "store" / "inductor").stat().st_mtime > 0  # what `gc` reads as its last use
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    assert [os.environ[name] for name in names] == [f"{tmp_path}/store/inductor", f"{tmp_path}/store/triton"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "of the user")
    keep_compiled(tmp_path / "other")
    assert [os.environ[name] for name in names] == ["of the user", f"{tmp_path}/store/triton"]
    seen = {}
    monkeypatch.setattr("subprocess.run", lambda *_, env, **__: seen.update(env))
    DvcProject(folder=tmp_path, root=tmp_path, stages={})._dvc("status")
    assert seen["DVC_SITE_CACHE_DIR"] == f"{place}/dvc"


def test_a_request_for_more_than_there_is_gets_all(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(resources, "count_cpus", lambda: 2)
    with resources.admitted(64, 0, go_on, "sft") as gpus:
        assert gpus == ()


ONE = Cluster(nodes=(Node(host="a", node="10.0.0.1, node 1", cpus=4.0, gpus=2.0, gpu_types=("A100",)),))
TWO = Cluster(nodes=(*ONE.nodes, Node(host="b", node="10.0.0.2, node 2", cpus=2.0)))
HAS_ONE = "the cluster has 1 node: a (10.0.0.1, node 1) with 4 CPUs, 2 GPUs A100"


def on_cluster(**fields) -> Resources:
    return Resources(**{"cpus_per_worker": 1, "micro_batch_size": 1, "launcher": Launcher.CLUSTER, **fields})


@pytest.mark.parametrize(
    ("cluster", "fields", "refusal"),
    [
        (ONE, {"num_workers": 4}, ""),
        (ONE, {"num_workers": 2, "num_nodes": 2},
         f"resources.num_nodes=2: {HAS_ONE}; call `ray start --address=...` on more machines, or set num_nodes=1"),
        (TWO, {"num_workers": 4, "num_nodes": 2}, ""),
        (TWO, {"num_workers": 6, "num_nodes": 2},
         "asks for 6 workers with 1 CPU each, on 2 nodes, in equal shares, and they do not fit: the cluster has 2 "
         "nodes: a (10.0.0.1, node 1) with 4 CPUs, 2 GPUs A100; b (10.0.0.2, node 2) with 2 CPUs"),
        (TWO, {"num_workers": 6}, "6 workers with 1 CPU each, on 1 node, in equal shares, and they do not fit"),
        (TWO, {"num_workers": 6, "min_workers": 4}, ""),
        (ONE, {"num_workers": 4, "num_nodes": 2, "min_workers": 4}, ""),
        (ONE, {"gpus_per_worker": 1, "gpu": "A100", "num_workers": 2}, ""),
        (ONE, {"gpus_per_worker": 1, "gpu": "H100"},
         f"resources.gpu=H100: no node has one; {HAS_ONE}; set gpu to a type that it has, or null"),
        (ONE, {"gpus_per_worker": 1, "num_workers": 3}, "asks for 3 workers with 1 CPU and 1 GPU each, on 1 node"),
        (Cluster(nodes=ONE.nodes, grows=True), {"num_workers": 2, "num_nodes": 2}, ""),
    ],
)  # fmt: skip
def test_what_a_cluster_cannot_hold_is_refused_with_what_it_has(cluster, fields, refusal):
    if not refusal:
        require_cluster("sft", on_cluster(**fields), 12, cluster)
        return
    with pytest.raises(ConfigError) as caught:
        require_cluster("sft", on_cluster(**fields), 12, cluster)
    assert str(caught.value).startswith("stages.sft.resources") and refusal in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "beside", "fits"),
    [({"num_workers": 3}, (1, 0), True), ({"num_workers": 4}, (1, 0), False), ({"num_workers": 4}, (0, 0), True),
     ({"num_workers": 4, "min_workers": 2}, (1, 0), True), ({"gpus_per_worker": 1, "num_workers": 1}, (1, 1), True),
     ({"gpus_per_worker": 1, "num_workers": 2}, (1, 1), False)],
)  # fmt: skip
def test_what_scores_checkpoints_needs_a_place_beside_the_workers(fields, beside, fits):
    if fits:
        require_beside("sft", on_cluster(**fields), beside, ONE)
        return
    with pytest.raises(ConfigError, match=r"stages.sft.method.evaluation asks for 1 CPU and .* beside the workers"):
        require_beside("sft", on_cluster(**fields), beside, ONE)


@pytest.mark.parametrize(
    ("fields", "batch", "found"),
    [
        ({"num_workers": 8, "num_nodes": 2, "min_workers": 2}, 8, (4, 2)),  # two nodes hold two each, one holds four
        ({"num_workers": 8, "num_nodes": 2, "min_workers": 2}, 9, (3, 1)),  # four do not divide nine
        ({"num_workers": 8, "num_nodes": 2, "min_workers": 2, "micro_batch_size": 4}, 8, (2, 2)),
        ({"num_workers": 8, "num_nodes": 2, "min_workers": 4}, 9, None),
        ({"num_workers": 8, "num_nodes": 2}, 8, None),
        ({"num_workers": 4, "num_nodes": 2, "min_workers": 1}, 8, (4, 2)),
        ({"num_workers": 7, "min_workers": 1}, 7, (1, 1)),
        ({"num_workers": 7, "min_workers": 1, "sharding": "fsdp"}, 7, None),
    ],
)
def test_the_most_workers_that_fit_and_divide_the_batch_go_on(fields, batch, found):
    reduced = TWO.reduced(on_cluster(**fields), batch)
    assert (reduced and (reduced.num_workers, reduced.num_nodes)) == found
    assert (
        reduced is None or reduced.accumulation_steps(batch) * reduced.num_workers * reduced.micro_batch_size == batch
    )


@pytest.mark.parametrize(("islands", "found"), [(1, 4), (3, 3), (5, None)])
def test_as_many_go_on_as_divide_over_the_islands(islands, found):
    reduced = ONE.reduced(on_cluster(num_workers=6, min_workers=1), 60, islands)
    assert (reduced and reduced.num_workers) == found


@pytest.mark.parametrize(
    ("name", "found"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("Tesla V100-SXM2-16GB", "V100"), ("NVIDIA A100-SXM4-40GB", "A100"),
     ("NVIDIA RTX PRO 6000 Blackwell", "RTX-PRO-6000"), ("NVIDIA GeForce RTX 4090", "GeForce-RTX-4090")],
)  # fmt: skip
def test_a_gpu_has_the_type_that_ray_gives_it(name, found):
    assert resources.accelerator_type(name) == found
