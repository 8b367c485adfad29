"""Sessions of several workers: the losses, gradients and weights of one, whatever they divide; saved whole."""

from dataclasses import replace
from operator import methodcaller
from pathlib import Path

import pytest

from flows.__main__ import main
from flows.steps.group import Group, WorkerError, session_of
from lineage.artifact import Kind
from lineage.errors import ConfigError
from posttrain.steps import CallError, Client
from tasks.context import Resources, Sharding, TrainContext
from tasks.method import Adapter, Optimizer
from tasks.recipe import Input
from tasks.steps import REFUSED, Steps, require_workers
from tasks.train.steps.session import Session
from tests import training
from tests.command import warm_up
from tests.integration.test_steps import rows
from tests.steps_server import Served

pytestmark = pytest.mark.usefixtures("one_thread", "imported")
PLAIN = Resources(cpus_per_worker=1)
SETTINGS: dict[str, object] = {"learning_rate": 1e-2, "max_length": 64, "micro_batch_size": 2, "max_grad_norm": 0.1}


@pytest.fixture(scope="module")
def imported() -> None:
    """The fork server that workers start from has imported all."""
    warm_up()


def opened(root: Path, folder: Path, resources: Resources, **fields: object) -> Group:
    policy = Input(name="policy", kind=Kind.CHECKPOINT, fingerprint="0" * 64, path=root / "policy")
    ctx = TrainContext(output_dir=folder / "output", work_dir=folder / "work", resources=resources)
    return session_of(Steps(**{**SETTINGS, **fields}), policy, ctx)  # type: ignore[arg-type,return-value]


def calls(session: Group, folder: Path) -> list[dict[str, object]]:
    """Two backward calls and a step, twice; then what reads the weights, and a save between two backward calls."""
    found = []
    for seed in (0, 2):
        found.append(session.apply(methodcaller("backward", rows(5, seed=seed))))
        found.append(session.apply(methodcaller("backward", rows(4, seed=seed + 1), "aot" if seed else "dpo")))
        found.append(session.apply(methodcaller("step")))
    found.append(session.apply(methodcaller("forward", rows(3), "ppo")))
    found.append(session.apply(methodcaller("logprobs", [[4, 5, 6]])))
    session.apply(methodcaller("backward", rows(1)))
    session.apply(methodcaller("save", folder / "saved"))
    return found + rest(session)


def rest(session: Group) -> list[dict[str, object]]:
    return [
        session.apply(methodcaller("backward", rows(seed=5))),
        session.apply(methodcaller("step")),
        session.apply(methodcaller("forward", rows(seed=6))),
        session.apply(methodcaller("generate", [[5, 6]], num_samples=3, max_tokens=4, temperature=0)),
    ]


def require_equal(one: list[dict[str, object]], other: list[dict[str, object]]) -> None:
    """Within 1e-5; completions are the same tokens."""

    def numbers(value: object) -> list[float]:
        if isinstance(value, dict):
            return [each for name, own in value.items() if name != "weights" for each in numbers(own)]
        if isinstance(value, list):
            return [each for own in value for each in numbers(own)]
        return [value] if isinstance(value, int | float) else []

    for mine, theirs in zip(one, other, strict=True):
        assert numbers(mine) == pytest.approx(numbers(theirs), rel=1e-5, abs=1e-5)


def require_same(root: Path, folder: Path, resources: Resources, **fields: object) -> Group:
    one, several = (opened(root, folder / name, each, **fields) for name, each in (("1", PLAIN), ("n", resources)))
    expected, found = calls(one, folder / "1"), calls(several, folder / "n")
    require_equal(found, expected)
    # Its state is resumed to the bit, and that of one worker is read too.
    several.apply(methodcaller("load", folder / "n" / "saved"))
    assert rest(several) == found[-4:]
    several.apply(methodcaller("load", folder / "1" / "saved"))
    require_equal(rest(several), expected[-4:])
    one.apply(methodcaller("load", folder / "n" / "saved"))
    require_equal(rest(one), expected[-4:])
    for each in (one, several):
        each.apply(methodcaller("write_model"))
    ours, theirs = (training.weights(folder / name / "output") for name in ("n", "1"))
    assert ours.keys() == theirs.keys()
    assert all(float((each - theirs[name]).abs().max()) < 1e-5 for name, each in ours.items())
    return several


def held(session: Session) -> list[float]:
    """The share of a worker in gradients and in the optimizer's state."""
    trained = session.trained.values()
    state = session.optimization._trainer.optimizer.state.values()
    counts = (
        sum(each.numel() for each in trained if each.grad is not None),
        sum(each["exp_avg"].numel() for each in state),
    )
    total = sum(each.numel() for each in trained)
    return [count / total for count in counts]


def test_two_workers_with_divided_gradients_train_as_one(root: Path, tmp_path: Path) -> None:
    several = require_same(root, tmp_path, replace(PLAIN, num_workers=2, sharding="zero2"))
    several.apply(methodcaller("backward", rows()))
    assert several.apply(held) == pytest.approx([0.5, 0.5], abs=0.2)
    with pytest.raises(ConfigError, match="data has no rows"):
        several.apply(methodcaller("backward", []))
    several.apply(methodcaller("step"))
    several._processes[1].kill()
    with pytest.raises(WorkerError, match="worker"):
        several.apply(methodcaller("backward", rows()))
    assert not any(each.is_alive() for each in several._processes)


@pytest.mark.parametrize(
    ("sharding", "fields", "message"),
    [
        *((each, {}, rf"resources\.sharding={each}: .*; set sharding=zero2") for each in REFUSED),
        ("fsdp_hybrid", {}, "there is one machine.*; set sharding=zero2"),
        ("zero1", {"optimizer": Optimizer(name="muon")}, "ZeRO was tried with AdamW alone; set"),
    ],
)
def test_what_workers_cannot_divide_is_refused_with_the_reason(
    sharding: Sharding, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        require_workers(Steps(**fields), replace(PLAIN, num_workers=2, sharding=sharding))  # type: ignore[arg-type]


def test_one_worker_divides_nothing() -> None:
    with pytest.raises(ConfigError, match=r"there is one; set session\.resources\.sharding=none"):
        require_workers(Steps(), replace(PLAIN, sharding="zero2"))


def group_of(served: Served, session: str) -> Group:
    found = served.engine._live[session].session
    assert isinstance(found, Group)
    return found


@pytest.mark.slow
def test_a_session_of_the_server_has_the_workers_that_it_names(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By REST; its worker is killed, and its next call continues from its log; committed, it is replayed to the bit."""
    model, settings = str(root / "policy"), {"learning_rate": 1e-2, "max_length": 64}
    row = {"tokens": [5, 6, 7], "labels": [5, 6, 7]}
    with Served(tmp_path).running() as served:
        client = Client(served.url, served.key)
        with pytest.raises(CallError, match=r"resources\.sharding=fsdp: it divides the weights") as refused:
            client.session(model, **settings, resources={"num_workers": 2, "sharding": "fsdp"})
        assert refused.value.status == 422
        with pytest.raises(CallError, match=r"session\.resources: keep_last; an object of num_workers"):
            client.session(model, **settings, resources={"keep_last": 2})
        one = client.session(model, **settings)
        two = client.session(model, **settings, resources={"num_workers": 2, "sharding": "zero1"})
        assert two.about["workers"] == 2
        for each in (one, two):
            each.call("backward", data=[row, {**row, "tokens": [8, 9, 4]}])
            each.call("step")
        processes = group_of(served, two.name)._processes
        processes[1].kill()
        with pytest.raises(CallError, match="worker"):
            two.call("backward", data=[row])
        found = [each.call("forward", data=[row])["loss"] for each in (one, two)]
        assert found[0] == pytest.approx(found[1], rel=1e-5)
        processes = group_of(served, two.name)._processes
    assert not any(each.is_alive() for each in processes)
    store = f"store={tmp_path / 'store'}"
    assert main(["steps", "commit", two.name, "--stage", "rl", "--root", str(tmp_path), store]) == 0
    capsys.readouterr()
    assert main(["replay", "rl", "--json", store]) == 0
    assert '"equal": true' in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [None, Adapter(rank=2, alpha=4)], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("sharding", "workers"), [("none", 2), ("none", 3), ("zero1", 2), ("zero2", 3), ("fsdp_hybrid", 4)]
)
def test_workers_train_as_one(
    root: Path, tmp_path: Path, sharding: Sharding, workers: int, adapter: Adapter | None
) -> None:
    nodes = 2 if sharding == "fsdp_hybrid" else 1
    resources = replace(PLAIN, num_workers=workers, num_nodes=nodes, sharding=sharding)
    require_same(root, tmp_path, resources, adapter=adapter).close()
