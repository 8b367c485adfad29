"""What each field of an optimizer does to a model of three layers; the package of an optimizer may be missing."""

import copy
import math
from io import BytesIO
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import TrainingArguments, get_scheduler

from lineage.errors import ConfigError
from tasks.method import Optimizer, Schedule
from tasks.train.optim import own_optimizers
from tasks.train.optim.optimizers import OPTIMIZERS, build
from tasks.train.optim.own_optimizers import averaged
from tasks.train.optim.schedules import PLATEAU, SCHEDULES, schedule_args

RATE = 1e-2
VALUES = {
    "betas": (0.5, 0.6), "eps": 1e-2, "weight_decay": 0.5, "momentum": 0.3, "nesterov": True, "alpha": 0.2,
    "clip_threshold": 0.01, "rank": 2, "update_proj_gap": 1, "scale": 0.5, "ns_steps": 2, "d_coef": 5.0,
}  # fmt: skip
SLOW_STARTS = {"prodigy": 8}  # steps until what they gather shows
RUN_HERE = [name for name, entry in OPTIMIZERS.items() if not entry.needs_gpu]
FIELDS = [
    (name, field)
    for name in RUN_HERE
    for field in ("weight_decay", *OPTIMIZERS[name].reads)
    if field not in ("lora_plus_ratio", "weights")
]


class Tiny(nn.Module):
    """Embedding, two matrices large enough for a state in few bits, a norm, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 64)
        self.up, self.down, self.norm = nn.Linear(64, 128), nn.Linear(128, 64, bias=False), nn.LayerNorm(64)
        self.lm_head = nn.Linear(64, 20, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.norm(self.down(torch.relu(self.up(self.embed(tokens))))))


def decayed(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if "bias" not in name and "norm" not in name]


def setting(name: str, **fields: object) -> Optimizer:
    package = OPTIMIZERS[name].package
    if package:
        pytest.importorskip(package.module)
    momentum = {"momentum": 0.9} if fields.get("nesterov") and name == "sgd" else {}
    return Optimizer(name=name, **{**momentum, **fields})


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        if hasattr(optimizer, "train"):
            optimizer.train()
        tokens = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        if hasattr(optimizer, "fused_backward"):
            optimizer.fused_backward(loss, optimizer.param_groups[0]["lr"])
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


def trained(own: Optimizer) -> dict[str, torch.Tensor]:
    model, last = Tiny(), SLOW_STARTS.get(own.name, 3)
    steps(model, build(own, 1.0 if own.name == "prodigy" else RATE, decayed, model), 0, last)
    return model.state_dict()


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_every_field_changes_the_steps(name: str, field: str) -> None:
    value: object = VALUES[field]
    if field == "betas" and OPTIMIZERS[name].num_betas == 3:
        value = (0.5, 0.6, 0.7)
    if name == "muon" and field == "nesterov":
        value = False
    few = {"rank": 8} if OPTIMIZERS[name].projects and field != "rank" else {}
    with_nesterov = {"momentum": 0.9} if (name, field) == ("sgd", "nesterov") else {}
    before = trained(setting(name, **few, **with_nesterov))
    assert not same(trained(setting(name, **few, **with_nesterov, **{field: value})), before)


@pytest.mark.parametrize("name", [name for name in RUN_HERE if "weights" in OPTIMIZERS[name].reads])
def test_weights_in_bf16_lose_no_bit_of_their_updates(name: str) -> None:
    """Equal gradients make the weights that fp32 has, also after their state was saved and loaded."""
    expected, model = Tiny(), Tiny()
    for each in (expected, model):
        for weight in (each.up.weight, each.down.weight, each.lm_head.weight):
            weight.data = weight.data.bfloat16().to(torch.float32 if each is expected else torch.bfloat16)
    of_fp32 = build(Optimizer(name=name), RATE, decayed, expected)
    of_bf16 = build(Optimizer(name=name, weights="bf16"), RATE, decayed, model)
    assert isinstance(of_bf16, own_optimizers.Split)
    for step in range(6):
        if step == 3:
            saved, of_bf16 = of_bf16.state_dict(), build(Optimizer(name=name, weights="bf16"), RATE, decayed, model)
            assert isinstance(of_bf16, own_optimizers.Split)
            of_bf16.load_state_dict(saved)
        torch.manual_seed(step)
        for one, two in zip(expected.parameters(), model.parameters(), strict=True):
            one.grad = torch.randn_like(one).bfloat16().float()
            two.grad = one.grad.to(two.dtype)
        of_fp32.step()
        of_bf16.step()
    for one, two in zip(expected.parameters(), model.parameters(), strict=True):
        half = of_bf16.lower.get(two)
        assert torch.equal(one, two if half is None else own_optimizers.join(two.data, half))
        assert half is None or torch.allclose(one, two.float(), rtol=2**-8, atol=0)
    assert model.up.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("name", [name for name in RUN_HERE if "lora_plus_ratio" in OPTIMIZERS[name].reads])
def test_lora_plus_changes_the_steps(name: str) -> None:
    def adapted(ratio: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = get_peft_model(Tiny(), LoraConfig(r=2, target_modules=["up", "down"]))
        optimizer = build(setting(name, lora_plus_ratio=ratio), RATE, decayed, model)
        steps(model, optimizer, 0, SLOW_STARTS.get(name, 2))
        return {key: value for key, value in model.state_dict().items() if "lora_B" in key}

    assert not any(torch.equal(weight, adapted(1.0)[key]) for key, weight in adapted(4.0).items())


def test_no_two_optimizers_take_the_same_steps() -> None:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name in RUN_HERE:
        package = OPTIMIZERS[name].package
        if not (package and package.is_missing):
            found[name] = trained(Optimizer(name=name, **({"rank": 8} if OPTIMIZERS[name].projects else {})))
    names = sorted(found)
    equal = [(one, two) for one in names for two in names if one < two and same(found[one], found[two])]
    # These differ in memory and speed alone: one kernel, and updates inside the backward pass.
    alike = {("adamw_torch", "adamw_torch_fused"), ("galore_adamw", "galore_adamw_layerwise"), ("lomo", "sgd")}
    assert set(equal) <= alike


@pytest.mark.parametrize("name", RUN_HERE)
def test_a_state_that_was_saved_and_loaded_gives_the_same_steps(name: str) -> None:
    own = setting(name, **({"rank": 8} if OPTIMIZERS[name].projects else {}))
    rate = 1.0 if name == "prodigy" else RATE
    whole = Tiny()
    optimizer = build(own, rate, decayed, whole)
    half = SLOW_STARTS.get(name, 4) // 2
    steps(whole, optimizer, 0, half)
    file = BytesIO()
    with averaged(optimizer):
        torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    steps(whole, optimizer, half, 2 * half)

    resumed = Tiny()
    after = build(own, rate, decayed, resumed)
    file.seek(0)
    state = torch.load(file, weights_only=True)  # as transformers' trainer does: no code is unpickled
    resumed.load_state_dict(state["model"])
    after.load_state_dict(state["optimizer"])
    steps(resumed, after, half, 2 * half)
    assert same(resumed.state_dict(), whole.state_dict())


@pytest.mark.parametrize(("name", "momentum"), [*((name, None) for name in RUN_HERE), ("sgd", 0.9), ("rmsprop", 0.9)])
def test_a_checkpoint_has_at_least_the_state_that_the_disk_check_counts(name: str, momentum: float | None) -> None:
    own = setting(name, **({"momentum": momentum} if momentum else {}))
    model = Tiny()
    optimizer = build(own, RATE, decayed, model)
    steps(model, optimizer, 0, 2)
    file = BytesIO()
    with averaged(optimizer):
        torch.save(optimizer.state_dict(), file)
    found = file.tell() / sum(each.numel() for each in model.parameters())
    assert found > own.state_bytes
    in_full = own.state_bytes % 4 == 0 and name != "muon" and not OPTIMIZERS[name].projects
    assert not in_full or found < own.state_bytes + 1.1  # names, and means of rows and columns


@pytest.mark.parametrize("name", [name for name in RUN_HERE if not OPTIMIZERS[name].in_backward])
def test_a_step_without_gradients_changes_no_weight(name: str) -> None:
    """As where all rewards of a generation are equal: neither momentum nor weight decay act."""
    own = setting(name, weight_decay=0.1, **({"rank": 8} if OPTIMIZERS[name].projects else {}))
    model = Tiny()
    optimizer = build(own, 1.0 if name == "prodigy" else RATE, decayed, model)
    steps(model, optimizer, 0, 3)
    before = copy.deepcopy(model.state_dict())
    optimizer.zero_grad(set_to_none=True)
    optimizer.step()
    assert same(model.state_dict(), before)


@pytest.mark.parametrize("bits", [4, 8])
def test_torchaos_adamw_takes_a_group_without_parameters(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Where only norms are trained (ln_tuning, freeze.modules), none is decayed, and the first group is empty."""

    class Plain(torch.optim.AdamW):
        pass

    monkeypatch.setattr(own_optimizers, "_class", lambda _module, _name: Plain)
    weight = nn.Parameter(torch.ones(4))
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [weight], "weight_decay": 0.0}]
    optimizer = own_optimizers.torchao_adamw(groups, RATE, bits=bits)
    weight.sum().backward()
    optimizer.step()
    assert (weight < 1).all()


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    model = Tiny()
    optimizer = build(Optimizer(name="muon"), RATE, decayed, model)
    muon, adamw = optimizer.parts
    names = {id(each): name for name, each in model.named_parameters()}
    found = [{names[id(each)] for group in part.param_groups for each in group["params"]} for part in (muon, adamw)]
    assert found[0] == {"up.weight", "down.weight"}
    assert found[1] == {"embed.weight", "up.bias", "norm.weight", "norm.bias", "lm_head.weight"}
    rest = copy.deepcopy(model)
    steps(model, optimizer, 0, 1)
    steps(rest, torch.optim.AdamW(rest.parameters(), lr=RATE, weight_decay=0.0), 0, 1)
    after, plain = model.state_dict(), rest.state_dict()
    assert all(torch.equal(after[name], plain[name]) for name in found[1])
    assert not any(torch.equal(after[name], plain[name]) for name in found[0])
    matrices = Tiny()
    alone = torch.optim.Muon(
        [matrices.up.weight, matrices.down.weight], lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    steps(matrices, alone, 0, 1)
    assert all(torch.equal(after[name], matrices.state_dict()[name]) for name in found[0])


def test_galore_projects_matrices_but_neither_head_nor_embedding() -> None:
    own = setting("galore_adamw", rank=2)
    model = Tiny()
    optimizer = build(own, RATE, decayed, model)
    steps(model, optimizer, 0, 1)
    names = {id(each): name for name, each in model.named_parameters()}
    projected = {
        names[id(each)]: state["exp_avg"].shape for each, state in optimizer.state.items() if "projector" in state
    }
    assert projected == {"up.weight": (128, 2), "down.weight": (2, 128)}


def test_an_optimizer_of_matrices_is_refused_where_none_is_trained() -> None:
    model = Tiny()
    for name, each in model.named_parameters():
        each.requires_grad = "norm" in name
    with pytest.raises(ConfigError, match=r"optimizer\.name=muon: .* set optimizer=adamw_torch_fused"):
        build(Optimizer(name="muon"), RATE, decayed, model)


def test_eight_bits_are_eight_but_those_of_embeddings() -> None:
    model = Tiny()
    model.embed = nn.Embedding(200, 64)
    optimizer = build(Optimizer(name="adamw_8bit"), RATE, decayed, model)
    steps(model, optimizer, 0, 1)
    assert optimizer.state[model.up.weight]["state1"].dtype == torch.uint8
    assert optimizer.state[model.embed.weight]["state1"].dtype == torch.float32


def test_a_schedule_free_model_is_its_average_and_returns_to_the_bit() -> None:
    model = Tiny()
    optimizer = build(setting("schedule_free_adamw"), RATE, decayed, model)
    steps(model, optimizer, 0, 3)
    training = copy.deepcopy(model.state_dict())
    beta = optimizer.param_groups[0]["betas"][0]
    with averaged(optimizer):
        average = copy.deepcopy(model.state_dict())
    assert same(model.state_dict(), training)
    last = optimizer.state[model.up.weight]["z"]  # the last step; training weights are beta of the way to the average
    torch.testing.assert_close(training["up.weight"], last + beta * (average["up.weight"] - last))
    assert not torch.equal(average["up.weight"], training["up.weight"])


def test_the_plateau_falls_after_its_patience_and_stops_at_the_minimum(tmp_path: Path) -> None:
    from tasks.train.optim.own_optimizers import Plateau, PlateauShare

    def schedule() -> Plateau:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return Plateau(optimizer, PlateauShare(num_warmup_steps=2, factor=0.1, patience=1, floor=0.05))

    found = schedule()
    rates = [found.get_last_lr()[0]]
    for _ in range(3):
        found.optimizer.step()
        found.step()
        rates.append(found.get_last_lr()[0])
    assert rates == [0.0, 0.5, 1.0, 1.0]
    measured = [found.measured(loss) for loss in (3.0, 2.0, 2.0, 2.0)]
    assert measured == [False, False, False, True]
    assert found.optimizer.param_groups[0]["lr"] == found.get_last_lr()[0] == 0.1

    torch.save(found.state_dict(), tmp_path / "scheduler.pt")
    resumed = schedule()
    resumed.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
    for each in (found, resumed):
        assert [each.measured(2.0) for _ in range(4)] == [False, True, False, False]
        assert each.get_last_lr() == [0.05]


PEAK, STEPS, WARMUP = 1e-2, 12, 2
REST = STEPS - WARMUP


def rates(setting: Schedule, folder: Path, updates: int = 1) -> list[float]:
    """Shares of the learning rate, by step, as the trainer sets them."""
    args = TrainingArguments(str(folder), use_cpu=True, **schedule_args(setting, PEAK, STEPS, updates))
    total = STEPS * updates
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = get_scheduler(
        args.lr_scheduler_type, optimizer, args.get_warmup_steps(total), total, args.lr_scheduler_kwargs
    )
    found = []
    for _ in range(total):
        found.append(schedule.get_last_lr()[0] / PEAK)
        optimizer.step()
        schedule.step()
    return found


def cosine(step: int, minimum: float = 0.0) -> float:
    return minimum + (1 - minimum) * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / REST))


FORMULAS = {
    "constant": (Schedule(name="constant", warmup=2), lambda step: 1.0),
    "constant_with_warmup": (Schedule(name="constant_with_warmup", warmup=2), lambda step: 1.0),
    "linear": (Schedule(name="linear", warmup=2), lambda step: (STEPS - step) / REST),
    "linear, minimum": (
        Schedule(name="linear", warmup=2, min_learning_rate=1e-3), lambda step: 0.1 + 0.9 * (STEPS - step) / REST
    ),
    "cosine": (Schedule(warmup=2), cosine),
    "cosine, share": (Schedule(warmup=2 / 12), cosine),
    "cosine, minimum": (Schedule(warmup=2, min_learning_rate=2e-3), lambda step: cosine(step, 0.2)),
    "cosine_with_min_lr": (Schedule(name="cosine_with_min_lr", warmup=2), lambda step: cosine(step, 0.1)),
    "cosine_with_restarts": (
        Schedule(name="cosine_with_restarts", warmup=2), lambda step: cosine(WARMUP + 2 * (step - WARMUP) % REST)
    ),
    "cosine_with_restarts, cycles": (
        Schedule(name="cosine_with_restarts", warmup=2, num_cycles=5),
        lambda step: cosine(WARMUP + 5 * (step - WARMUP) % REST),
    ),
    "polynomial": (
        Schedule(name="polynomial", warmup=2, power=2.0), lambda step: ((STEPS - step) / REST) ** 2
    ),
    "polynomial, minimum": (
        Schedule(name="polynomial", warmup=2, power=3.0, min_learning_rate=1e-3),
        lambda step: 0.1 + 0.9 * ((STEPS - step) / REST) ** 3,
    ),
    "inverse_sqrt": (Schedule(name="inverse_sqrt", warmup=2), lambda step: (2 / step) ** 0.5),
    "inverse_sqrt, timescale": (
        Schedule(name="inverse_sqrt", warmup=2, timescale=6), lambda step: (6 / (step + 4)) ** 0.5
    ),
    "warmup_stable_decay": (
        Schedule(name="warmup_stable_decay", warmup=2, decay=0.5),
        lambda step: 1.0 if step < 6 else 0.5 * (1 + math.cos(math.pi * (step - 6) / 6)),
    ),
    "warmup_stable_decay, linear": (
        Schedule(name="warmup_stable_decay", warmup=2, decay=4, decay_type="linear", min_learning_rate=1e-3),
        lambda step: 1.0 if step < 8 else 0.1 + 0.9 * (1 - (step - 8) / 4),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMULAS)
def test_the_learning_rate_is_that_of_the_formula(name: str, tmp_path: Path) -> None:
    setting, share = FORMULAS[name]
    found = rates(setting, tmp_path)
    # From its minimum, where transformers' stable schedule has one; else from 0.
    start = found[0]
    assert found[:WARMUP] == pytest.approx([start, (1 + start) / 2])
    assert start == (0.1 if name == "warmup_stable_decay, linear" else 0.0)
    assert found[WARMUP:] == pytest.approx([share(step) for step in range(WARMUP, STEPS)])


def test_every_schedule_has_a_formula_and_no_two_are_one() -> None:
    named = {setting.name for setting, _ in FORMULAS.values()}
    assert named == SCHEDULES.keys() - {PLATEAU}  # test_optimizers.py has that


def test_a_rate_below_1e_7_can_end_in_a_polynomial(tmp_path: Path) -> None:
    args = schedule_args(Schedule(name="polynomial"), 1e-8, STEPS)
    assert args["lr_scheduler_kwargs"] == {"lr_end": 0.0, "power": 1.0}


@pytest.mark.parametrize("setting", [
    Schedule(name="warmup_stable_decay", warmup=2, decay=4),
    Schedule(name="warmup_stable_decay", warmup=0.25, decay=0.5),
    Schedule(name="inverse_sqrt", warmup=2, timescale=6),
])  # fmt: skip
def test_a_loop_of_its_own_counts_in_steps_of_several_updates(tmp_path: Path, setting: Schedule) -> None:
    once, thrice = rates(setting, tmp_path), rates(setting, tmp_path, updates=3)
    assert thrice[::3] == pytest.approx(once)


@pytest.mark.parametrize("sizes", [{"warmup": 4.0, "decay": 4.0}, {"warmup": 0.5, "decay": 6.0}])
def test_warm_up_and_decay_that_the_rows_have_too_few_steps_for_are_refused(sizes: dict[str, float]) -> None:
    setting = Schedule(name="warmup_stable_decay", **sizes)
    schedule_args(setting, PEAK, 12)
    with pytest.raises(ConfigError, match="more than the 7 steps of this training"):
        schedule_args(setting, PEAK, 7)
