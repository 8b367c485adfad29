"""Precomputed log-probabilities of the reference: the training of the live reference, and computed once."""

from pathlib import Path

import pytest

from lineage.artifact import Kind
from lineage.errors import PipelineError
from tasks.context import Resources, TrainContext
from tasks.method import Adapter, Input, Quantization, Training, Validation
from tasks.train.compatibility import refusals
from tasks.train.loop.heartbeat import Phase
from tasks.train.losses import reference_logps
from tasks.train.models import load as models
from tasks.train.rule import Case
from tests import tiny, training
from tests.tiny_models import FEW, write_model
from tests.trained_store import Made
from tests.training import same, weights

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = Adapter(rank=4, alpha=8)
LIVE = Resources(micro_batch_size=8)
BEFORE = Resources(micro_batch_size=8, precompute_reference=True)
FAST = {"learning_rate": 1e-2}
CLOSE = {"abs": 1e-5, "rel": 1e-5}
METRICS = ("loss", "rewards/chosen", "rewards/margins", "logps/chosen")


def stage(**fields: object) -> Training:
    return training.method("dpo", **{**FAST, **fields})


def both(root: Path, tmp_path: Path, method: Training, policy: Path | None = None) -> None:
    """Trains with the live reference and with the precomputed one, and compares."""
    live, before = (
        training.train(method, root, tmp_path / name / "output", policy=policy, resources=resources)
        for name, resources in (("live", LIVE), ("before", BEFORE))
    )
    for (_, expected), (_, found) in zip(live.reports, before.reports, strict=True):
        for name in METRICS:
            assert found[name] == pytest.approx(expected[name], **CLOSE), name
    assert live.losses[2] != pytest.approx(live.losses[0], abs=1e-3)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"adapter": LORA},
        {"sft_weight": 1.0},
        {"losses": {"sigmoid": 1.0, "kto_pair": 1.0, "aot": 1.0}},
        pytest.param({"adapter": Adapter(rank=4, alpha=8, init="pissa")}, marks=pytest.mark.slow),
        pytest.param({"adapter": LORA, "quantization": "nf4"}, marks=pytest.mark.slow),
        {"weighting": "wpo", "f_divergence": "js_divergence"},
    ],
    ids=["full", "lora", "pair_loss", "losses of ours", "pissa", "nf4", "options"],
)
def test_the_trajectory_is_that_of_the_live_reference(root: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    if fields.get("quantization"):
        fields = {**fields, "quantization": Quantization(format="nf4")}
    both(root, tmp_path, stage(**fields))


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_held_out_rows_are_measured_against_the_same_reference(
    root: Path, tmp_path: Path, adapter: Adapter | None
) -> None:
    rows = tiny.preference_rows(11)
    tiny.write_rows(tmp_path / "in" / "preferences", rows, held_out=tiny.preference_rows(50)[40:])
    (tmp_path / "in" / "policy").symlink_to(root / "policy")
    method = stage(adapter=adapter, validation=Validation(every_steps=1))
    live, before = (
        training.train(method, tmp_path / "in", tmp_path / name / "output", resources=resources)
        for name, resources in (("live", LIVE), ("before", BEFORE))
    )
    losses = [[metrics["val/loss"] for _, metrics in run.reports] for run in (live, before)]
    assert losses[1] == pytest.approx(losses[0], **CLOSE) and losses[0][2] != pytest.approx(losses[0][0], abs=1e-4)


@pytest.mark.parametrize("name", [each for each in FEW if each.values[0] != "gemma3"])
def test_so_it_is_on_every_architecture(root: Path, tmp_path: Path, name: str) -> None:
    both(root, tmp_path, stage(), policy=write_model(tmp_path / name, name))


@pytest.mark.parametrize("adapter_in", ["continue", "stack"])
def test_the_reference_of_a_carried_adapter_has_it(root: Path, tmp_path: Path, adapter_in: str) -> None:
    made = Made(tmp_path, root)
    policy = made.trained("sft", made.base(), save="adapter", learning_rate=1e-2)
    losses = []
    for resources in (LIVE, BEFORE):
        options = {"losses": {"sigmoid": 1.0, "kto_pair": 1.0}, "adapter_in": adapter_in, "save": "adapter"}
        method = stage(adapter=LORA, **options)
        given = {**training.inputs(root, method), "policy": policy}
        output = tmp_path / f"{resources.precompute_reference}"
        losses.append(training.fitted(method, given, output, resources=resources)[2])
    assert losses[1] == pytest.approx(losses[0], **CLOSE)


def cached_run(root: Path, folder: Path, method: Training, cache: Path, **policy: object) -> list[Phase]:
    """Trains with a cache; returns what the worker showed to do."""
    shown: list[Phase] = []
    ctx = TrainContext(
        output_dir=folder / "output", work_dir=folder / "work", cache_dir=cache, resources=BEFORE,
        mark=lambda _step, doing: shown.append(doing),
    )  # fmt: skip
    inputs = training.inputs(root, method)
    method.run({**inputs, **policy}, ctx)  # type: ignore[arg-type]
    return shown


def test_who_computes_shows_that_it_resumes_and_who_waits_is_not_watched(root: Path, tmp_path: Path) -> None:
    first, second = (
        cached_run(root, tmp_path / name, stage(num_steps=1), tmp_path / "cache") for name in ("first", "second")
    )
    assert first[:3] == [Phase.FETCHING, Phase.LOADING, Phase.LOADING]
    assert second[:2] == [Phase.FETCHING, Phase.LOADING] and len(second) == len(first) - 1


def test_a_sweep_computes_the_reference_once(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed, loaded = [], []
    original, load = reference_logps._compute, models.load_policy

    def counted(*given: object) -> object:
        computed.append(given)
        return original(*given)  # type: ignore[arg-type]

    def counted_load(*given: object, **options: object) -> object:
        loaded.append(given)
        return load(*given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(reference_logps, "_compute", counted)
    monkeypatch.setattr(models, "load_policy", counted_load)
    cache = tmp_path / "cache"
    for number, fields in enumerate(({}, {"beta": 0.3}, {"loss_type": "ipo", "seed": 1}, {"adapter": LORA})):
        cached_run(root, tmp_path / str(number), stage(num_steps=1, **fields), cache)
    assert len(computed) == 1
    assert len(loaded) == 4, "no training has a second model in memory"
    # What decides the numbers is in the key.
    cached_run(root, tmp_path / "bf16", stage(num_steps=1, precision="bf16"), cache)
    cached_run(root, tmp_path / "shorter", stage(num_steps=1, max_length=44), cache)
    other = Input(name="other", kind=Kind.CHECKPOINT, fingerprint="f" * 64, path=root / "policy")
    cached_run(root, tmp_path / "other", stage(num_steps=1), cache, policy=other)
    assert len(computed) == 4


def test_damaged_log_probabilities_are_computed_again(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cached_run(root, tmp_path / "first", stage(), cache)
    (file,) = cache.glob("reference_logps/*/logps.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-8] + bytes(8))
    cached_run(root, tmp_path / "second", stage(), cache)
    assert file.read_bytes() == whole
    assert same(*(weights(tmp_path / name / "output") for name in ("first", "second")))


def test_the_start_is_proven_against_them(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = reference_logps.logps
    monkeypatch.setattr(reference_logps, "logps", lambda *given: [each - 1 for each in original(*given)])
    with pytest.raises(PipelineError, match="policy and reference differ at step 0"):
        training.train(stage(), root, tmp_path / "output", resources=BEFORE)


def test_the_plan_refuses_it_where_there_is_nothing_to_compute() -> None:
    for method in (training.method("sft"), training.method("reward"), training.method("cpt")):
        (refusal,) = refusals(Case(method=method, resources=Resources(precompute_reference=True)))
        assert refusal.rule == "precompute-no-reference"
        assert refusal.nearest == {"resources.precompute_reference": False}
    assert not [*refusals(Case(method=stage(), resources=BEFORE))]
