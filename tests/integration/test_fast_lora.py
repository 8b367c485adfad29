"""LoRA layers of our own compute what PEFT's do, and leave to PEFT what they do not know."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn.functional import dropout
from torch.nn.init import xavier_normal_, xavier_uniform_
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from trl.trainer.utils import use_adapter

from tasks.method import Adapter
from tasks.train.kernels.fast_lora import speed_up
from tasks.train.models.adapted import add_reference, finish_adapter, peft_config
from tests import tiny


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    tiny.write_policy(folder)
    return folder


def adapted(policy: Path, **fields: object) -> PeftModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **fields})
    found = get_peft_model(model, config)
    for name, each in found.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.1)
    return found


def losses_and_gradients(model: PeftModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    ids = torch.arange(24).view(2, 12) + 5
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {name: each.grad.clone() for name, each in model.named_parameters() if each.requires_grad}


ALIKE: tuple[dict[str, object], ...] = (
    {}, {"target_modules": ["q_proj", "v_proj", "down_proj"]}, {"rank_pattern": {"q_proj": 2, "up_proj": 8}},
    {"alpha_pattern": {"k_proj": 3, "gate_proj": 5}},
)  # fmt: skip


@pytest.mark.parametrize("fields", ALIKE)
def test_losses_and_gradients_are_those_of_peft(policy: Path, fields: dict[str, object]) -> None:
    model = adapted(policy, **fields)
    expected, theirs = losses_and_gradients(model)
    assert speed_up(model, on_cpu=True) == 2 * (3 if "target_modules" in fields else 7)
    calls: list[int] = []
    for each in model.modules():
        if hasattr(each, "lora_A"):
            slow = each.forward.slow
            each.forward.slow = lambda *args, _slow=slow: calls.append(1) or _slow(*args)
    found, ours = losses_and_gradients(model)
    assert not calls
    assert float(found) == pytest.approx(float(expected), rel=5e-3)
    for name, each in theirs.items():
        assert ours[name].dtype == torch.float32
        assert (ours[name] - each).norm() / each.norm() < 5e-2, name
    with model.disable_adapter(), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.arange(5, 17).view(1, -1))
    assert calls, "without its adapter a layer is PEFT's"


class Count(TorchDispatchMode):
    """Counts the operations that would start a kernel on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        self.count += not (is_view or func.name().startswith(("aten::empty", "aten::_unsafe_view")))
        return func(*args, **(kwargs or {}))


def test_layers_of_one_input_are_one_function_and_start_few_kernels(policy: Path) -> None:
    """Those that an adapter on the seven matrices of a layer adds, forward and backward."""

    def count(model: PeftModel) -> int:
        layers, found = model.get_base_model().model.layers, []
        for number in (1, 2):
            model.get_base_model().model.layers = layers[:number]
            with Count() as counted:
                losses_and_gradients(model)
            found.append(counted.count)
        model.get_base_model().model.layers = layers
        return found[1] - found[0]

    model, alone = adapted(policy), adapted(policy, target_modules=["embed_tokens"])
    slow = count(model) - count(alone)
    speed_up(model, on_cpu=True)
    fast = count(model) - count(alone)
    assert fast <= 57 and slow > 2 * fast


def test_a_layer_reads_its_own_input(policy: Path) -> None:
    """Where another one is called with something else, with the same changed in place, or not at all."""
    model = adapted(policy)
    speed_up(model, on_cpu=True)
    attention = model.get_base_model().model.layers[0].self_attn
    layers = attention.q_proj, attention.k_proj

    def outputs(x: torch.Tensor) -> list[torch.Tensor]:
        return [each.forward.products(x, [each.forward])[0] for each in layers]

    x, y = torch.randn(2, 1, 6, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layers[0](x), outputs(x)[0])
        assert torch.equal(layers[1](y), outputs(y)[1])
        assert torch.equal(layers[0](x), outputs(x)[0])
        x += 1
        assert torch.equal(layers[1](x), outputs(x)[1])
        assert torch.equal(layers[1](x), outputs(x)[1])


@pytest.mark.parametrize("fields", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_other_adapters_keep_the_layers_of_peft(policy: Path, fields: dict[str, object]) -> None:
    assert speed_up(adapted(policy, **fields), on_cpu=True) == 0


@pytest.mark.parametrize("position", ["pre", "post"])
def test_dropout_is_of_the_input_or_of_what_is_added(policy: Path, position: str) -> None:
    """Against a LoRA written down by hand, with the same draws; merged and without training it drops nothing."""
    model = adapted(policy, lora_dropout=0.5)
    if position == "post":
        finish_adapter(model, Adapter(dropout=0.5, dropout_position="post"), seed=0)
        assert speed_up(model, on_cpu=True) == 0, "the layers stay PEFT's"
    layer = model.get_base_model().model.layers[0].mlp.up_proj
    base, a, b = layer.get_base_layer(), layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(2, 6, 32)
    for training in (True, False):
        model.train(training)
        torch.manual_seed(7)
        found = layer(x)
        torch.manual_seed(7)
        low = dropout(x, 0.5, training and position == "pre") @ a.T @ b.T
        expected = base(x) + 2 * dropout(low, 0.5, training and position == "post")
        torch.testing.assert_close(found, expected)
    merged = copy.deepcopy(model).merge_and_unload().model.layers[0].mlp.up_proj
    torch.testing.assert_close(merged(x), found)


@pytest.mark.parametrize(("init", "draw"), [("xavier", xavier_normal_), ("xavier_uniform", xavier_uniform_)])
def test_xavier_draws_a_and_leaves_b_zero(policy: Path, init: str, draw: Callable[..., torch.Tensor]) -> None:
    model, adapter = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32), Adapter(rank=4, init=init)
    found = get_peft_model(model, peft_config(adapter, model, 1))
    state = torch.get_rng_state()
    finish_adapter(found, adapter, seed=3)
    assert torch.equal(torch.get_rng_state(), state), "rows, dropout and sampling draw as before"
    torch.manual_seed(3)
    of_a = [each for name, each in found.named_parameters() if ".lora_A." in name]
    assert len(of_a) == 2 * 7 and all(torch.equal(each, draw(torch.empty_like(each))) for each in of_a)
    assert not any(each.any() for name, each in found.named_parameters() if ".lora_B." in name)


def test_the_reference_that_is_a_copy_of_the_adapter_drops_nothing(policy: Path) -> None:
    model = adapted(policy, lora_dropout=0.5).train()
    add_reference(model)
    ids = torch.arange(5, 17).view(1, -1)
    with torch.no_grad(), use_adapter(model, "ref"):
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    with torch.no_grad():
        assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits), "the policy does"


def test_without_bf16_layers_compute_as_peft_does_to_the_bit(policy: Path) -> None:
    model, ids = adapted(policy), torch.arange(5, 17).view(1, -1)
    expected = model(input_ids=ids).logits
    speed_up(model, on_cpu=True)
    assert torch.equal(model(input_ids=ids).logits, expected)
