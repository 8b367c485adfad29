"""The merge stage: adapters into weights, and several models into one."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lineage.artifact import Kind
from lineage.errors import ArtifactError, ConfigError, DataError
from lineage.filesystem.digest import digest_files, digest_of
from tasks.context import Metrics, TrainContext
from tasks.merge import Merge, MergeRewardModels
from tasks.method import Adapter, Input
from tasks.train.models.load import load_model
from tests import tiny, training
from tests.prepared import named
from tests.tiny_models import write_model
from tests.trained_store import LORA, Made
from tests.training import same, weights

pytestmark = pytest.mark.usefixtures("one_thread")

STEP = {"num_steps": 2, "learning_rate": 1e-2, "lr_schedule": "constant"}  # moves weights by enough to be seen
ARCHITECTURES = ("llama", "qwen2", "mistral", "gemma2", "gpt2", "mixtral")
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def made(tmp_path: Path, rows: Path) -> Made:
    return Made(tmp_path, rows)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Input]:
    """Three whole models of one shape."""
    folder = tmp_path_factory.mktemp("policies")
    return {name: given(tiny.write_policy(folder / name, seed=seed)) for seed, name in enumerate(("base", "a", "b"))}


def given(path: Path, kind: Kind = Kind.CHECKPOINT) -> Input:
    return Input(name=path.name, kind=kind, fingerprint=f"{path.name:f<64}", path=path)


def merge(output: Path, method: Merge, **inputs: Input) -> Metrics:
    context = TrainContext(output_dir=output, work_dir=output.parent / f"{output.name}-work")
    return named(method, inputs, method.run(inputs, context))


def arch(made: Made, architecture: str, **fields: object) -> Input:
    return made.put("base", {}, lambda place: write_model(place, architecture, **fields))


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("gpt2", LORA),
        ("mixtral", LORA),
        ("llama", Adapter(type="dora", rank=4)),
        *(pytest.param(each, LORA, marks=pytest.mark.slow) for each in ("llama", "qwen2", "mistral", "gemma2")),
        pytest.param("llama", Adapter(rank=4, rslora=True), marks=pytest.mark.slow),
    ],
)
def test_an_adapter_is_merged_into_weights_that_load_alone(
    made: Made, tmp_path: Path, architecture: str, kind: Adapter
) -> None:
    base = arch(made, architecture)
    adapter = made.trained("sft", base, save="adapter", adapter=kind, **STEP)
    metrics = merge(tmp_path / "merged", Merge(), policy=adapter)
    merged, before = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), load_model(adapter)
    assert not same(weights(base.path), weights(tmp_path / "merged"))
    assert merged.dtype == torch.float32 and type(merged) is type(before)
    expected = before.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.state_dict().items())
    assert metrics["merge/logps_difference"] < 1e-5
    assert metrics["merge/logps_before"] == pytest.approx(metrics["merge/logps_after"], abs=1e-5)
    assert metrics["weights/policy"] == int(digest_of(digest_files(adapter.path))[:10], 16)
    with pytest.raises(ArtifactError, match=r"inputs\.policy: .* has the digest \w+, and the input sft has another"):
        merge(tmp_path / "another", Merge(), policy=replace(adapter, digest="another"))
    assert metrics["parameters"] == before.num_parameters() and metrics["merge/models"] == 1
    for name in TOKENIZER:
        assert (tmp_path / "merged" / name).read_bytes() == (adapter.path / name).read_bytes()


def test_sixteen_bits_are_measured_and_refused_above_the_threshold(made: Made, tmp_path: Path) -> None:
    adapter = made.trained("sft", made.base(), save="adapter", **STEP)
    metrics = merge(tmp_path / "bf16", Merge(dtype="bf16"), policy=adapter)
    assert {each.dtype for each in weights(tmp_path / "bf16").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "bf16" / "config.json").read_text())["dtype"] == "bfloat16"
    assert 1e-6 < metrics["merge/logps_difference"] < 0.05
    with pytest.raises(DataError, match=r"moved a golden prompt by .*max_difference=1e-07 is accepted; set dtype=fp32"):
        merge(tmp_path / "strict", Merge(dtype="bf16", max_difference=1e-7), policy=adapter)
    assert same(
        weights(tmp_path / "bf16"), {name: each.bfloat16() for name, each in load_model(adapter).state_dict().items()
                                     if name in weights(tmp_path / "bf16")},
    )  # fmt: skip


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "gemma3"])
def test_shares_of_one_and_zero_give_the_input_to_the_bit(tmp_path: Path, architecture: str) -> None:
    one, other = write_model(tmp_path / "one", architecture), write_model(tmp_path / "other", architecture)
    changed = {name: tensor + 1 for name, tensor in weights(other).items()}
    save_file(changed, other / "model.safetensors", metadata={"format": "pt"})
    for combination in ("linear", "slerp"):
        method = Merge(combination=combination, weights={"policy": 1.0, "other": 0.0})
        merge(tmp_path / combination, method, policy=given(one), other=given(other))
        found = (tmp_path / combination / "model.safetensors").read_bytes()
        assert found == (one / "model.safetensors").read_bytes()
    half = Merge(combination="linear", weights={"policy": 0.25, "other": 0.75})
    merge(tmp_path / "half", half, policy=given(one), other=given(other))
    expected = {name: (tensor.double() + 0.75).float() for name, tensor in weights(one).items()}
    for name, tensor in weights(tmp_path / "half").items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-7)
    AutoModelForCausalLM.from_pretrained(tmp_path / "half")


def test_a_model_in_shards_of_bf16_stays_so(tmp_path: Path, policies: dict[str, Input]) -> None:
    found = []
    for name in ("a", "b"):
        model = AutoModelForCausalLM.from_pretrained(policies[name].path, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name, max_shard_size="20KB")
        for file in TOKENIZER:
            (tmp_path / name / file).write_bytes((policies[name].path / file).read_bytes())
        found.append(given(tmp_path / name))
    merge(tmp_path / "out", Merge(combination="linear"), policy=found[0], other=found[1])
    shards = [sorted(each.name for each in (tmp_path / name).glob("*.safetensors*")) for name in ("a", "out")]
    assert shards[0] == shards[1] and len(shards[0]) > 2
    merged, one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / each) for each in ("out", "a", "b"))
    assert merged.dtype == torch.bfloat16
    for name, tensor in merged.state_dict().items():
        expected = (one.state_dict()[name].double() + other.state_dict()[name].double()) / 2
        assert torch.equal(tensor, expected.to(torch.bfloat16)), name


def test_a_tied_head_that_one_model_saved_twice_is_one_matrix(tmp_path: Path, policies: dict[str, Input]) -> None:
    one, other = (given(tiny.write_policy(tmp_path / name, seed=seed)) for seed, name in enumerate(("one", "other")))
    twice = weights(other.path)
    save_file({**twice, "lm_head.weight": twice["model.embed_tokens.weight"].clone()}, other.path / "model.safetensors")
    merge(tmp_path / "out", Merge(combination="linear"), policy=one, other=other)
    assert weights(tmp_path / "out").keys() == weights(one.path).keys()
    head = AutoModelForCausalLM.from_pretrained(tmp_path / "out").lm_head.weight
    start = weights(one.path)["model.embed_tokens.weight"]
    expected = (start.double() + twice["model.embed_tokens.weight"].double()) / 2
    assert torch.equal(head, expected.float())


def test_adapters_are_models_among_models(made: Made, tmp_path: Path) -> None:
    base = made.base()
    adapter = made.trained("sft", base, save="adapter", **STEP)
    merge(tmp_path / "out", Merge(combination="linear"), policy=base, tuned=adapter)
    tuned, start = load_model(adapter).state_dict(), load_model(base).state_dict()
    for name, tensor in weights(tmp_path / "out").items():
        assert torch.equal(tensor, ((start[name].double() + tuned[name].double()) / 2).float()), name


ZERO = torch.zeros(4)
LEFT, RIGHT = torch.tensor([1.0, -2.0, 0.5, 4.0]), torch.tensor([3.0, 1.0, -0.1, -5.0])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"combination": "linear", "weights": {"policy": 0.25, "other": 0.75}}, [2.5, 0.25, 0.05, -2.75]),
        ({"combination": "task_arithmetic"}, [4.0, -1.0, 0.4, -1.0]),
        ({"combination": "task_arithmetic", "weights": {"policy": 2.0, "other": -1.0}}, [-1.0, -5.0, 1.1, 13.0]),
        # Of each the two largest are kept: [0 -2 0 4] and [3 0 0 -5]; their sums elect + - . -
        ({"combination": "ties", "density": 0.5}, [3.0, -2.0, 0.0, -5.0]),
        ({"combination": "ties", "density": 1.0}, [2.0, -2.0, 0.5, -5.0]),
        ({"combination": "ties", "density": 1.0, "majority_sign": "frequency"}, [2.0, 1.0, 0.5, 4.0]),
        ({"combination": "dare_linear", "density": 1.0}, [4.0, -1.0, 0.4, -1.0]),
        ({"combination": "dare_ties", "density": 1.0}, [2.0, -2.0, 0.5, -5.0]),
    ],
)
def test_tensors_are_combined_as_by_hand(fields: dict[str, object], expected: list[float]) -> None:
    method = Merge(**fields)
    shares = method.shares(["policy", "other"])
    found = method.combined("w", {"policy": LEFT, "other": RIGHT, "base": ZERO}, shares)
    torch.testing.assert_close(found, torch.tensor(expected))
    moved = method.combined("w", {"policy": LEFT + 7, "other": RIGHT + 7, "base": ZERO + 7}, shares)
    torch.testing.assert_close(moved, torch.tensor(expected) + 7)  # whatever the base is, if differences are the same


def test_slerp_follows_the_arc() -> None:
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    third = Merge(combination="slerp", weights={"policy": 2 / 3, "other": 1 / 3})
    found = third.combined("w", {"policy": x, "other": y}, third.shares([]))
    torch.testing.assert_close(found, torch.tensor([3**0.5 / 2, 0.5]))  # 30 of 90 degrees
    line = third.combined("w", {"policy": x, "other": 4 * x}, third.shares([]))
    torch.testing.assert_close(line, 2 * x)  # parallel: the line
    nothing = third.combined("w", {"policy": 0 * x, "other": 3 * y}, third.shares([]))
    torch.testing.assert_close(nothing, y)
    opposite = third.combined("w", {"policy": x, "other": -x}, third.shares([]))
    torch.testing.assert_close(opposite, x / 3)  # no arc is the shortest: the line


def test_dare_keeps_what_its_seed_draws_and_rescales_it() -> None:
    found = {"policy": torch.ones(10_000), "base": torch.zeros(10_000)}

    def drawn(name: str = "w", **fields: object) -> torch.Tensor:
        torch.rand(3)  # whatever was drawn before
        return Merge(combination="dare_linear", density=0.25, **fields).combined(name, found, {"policy": 1.0})

    before = torch.random.get_rng_state()
    one = drawn()
    assert set(one.unique().tolist()) == {0.0, 4.0} and one.mean() == pytest.approx(1, abs=0.1)
    assert torch.equal(one, drawn(seed=0)) and not torch.equal(one, drawn(seed=1)) and not torch.equal(one, drawn("v"))
    torch.random.set_rng_state(before)
    torch.rand(12)
    assert torch.equal(one, drawn())


def test_what_is_not_finite_is_refused() -> None:
    method = Merge(combination="linear", dtype="fp16")
    with pytest.raises(DataError, match=r"w: the merge has non-finite values.*set dtype=fp32"):
        method.combined("w", {"policy": LEFT * 1e5, "other": LEFT * 1e5}, method.shares(["policy", "other"]))
    with pytest.raises(ConfigError, match=r"w has whole numbers.*differs"):
        method.combined("w", {"policy": torch.tensor([1]), "other": torch.tensor([2])}, method.shares(["policy"]))


# In the space of adapters.


def two_loras(made: Made, *adapters: Adapter) -> tuple[Input, Input, Input]:
    base = made.base()
    one, other = (
        made.trained("sft", base, save="adapter", adapter=adapter, **STEP, seed=seed)
        for seed, adapter in enumerate(adapters)
    )
    return base, one, other


@pytest.mark.parametrize("combination", ["cat", "svd"])
@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_unequal_ranks_add_up(made: Made, tmp_path: Path, combination: str, rslora: bool) -> None:
    base, one, other = two_loras(made, Adapter(rank=2, rslora=rslora), Adapter(rank=4, rslora=rslora))
    rank = {"svd_rank": 6} if combination == "svd" else {}  # that of the sum
    method = Merge(combination=combination, space="adapters", weights={"policy": 0.5, "other": 2.0}, **rank)
    metrics = merge(tmp_path / "out", method, policy=one, other=other)
    assert metrics["merge/logps_difference"] < 1e-5
    start, first, second = (load_model(each).state_dict() for each in (base, one, other))
    for name, tensor in weights(tmp_path / "out").items():
        expected = start[name] + 0.5 * (first[name] - start[name]) + 2 * (second[name] - start[name])
        torch.testing.assert_close(tensor, expected, rtol=0, atol=2e-6)


def test_each_option_of_adapters_changes_the_output(made: Made, tmp_path: Path) -> None:
    _, one, other = two_loras(made, LORA, LORA)
    found = {}
    for number, fields in enumerate(
        [
            {"combination": "linear"}, {"combination": "ties", "density": 0.5}, {"combination": "ties", "density": 0.2},
            {"combination": "ties", "density": 0.5, "majority_sign": "frequency"},
            {"combination": "dare_linear", "density": 0.5}, {"combination": "dare_linear", "density": 0.5, "seed": 1},
            {"combination": "dare_ties", "density": 0.5}, {"combination": "svd"}, {"combination": "svd", "svd_rank": 2},
            {"combination": "ties_svd", "density": 0.5}, {"combination": "dare_linear_svd", "density": 0.5},
            {"combination": "dare_ties_svd", "density": 0.5}, {"combination": "cat"},
        ]
    ):  # fmt: skip
        merge(tmp_path / str(number), Merge(space="adapters", **fields), policy=one, other=other)
        found[number] = weights(tmp_path / str(number))
    assert not [(n, m) for n in found for m in found if n < m and same(found[n], found[m])]
    again = Merge(space="adapters", combination="dare_linear", density=0.5)
    merge(tmp_path / "again", again, policy=one, other=other)
    assert same(weights(tmp_path / "again"), found[4])


def test_adapters_that_peft_would_combine_wrongly_are_refused(made: Made, tmp_path: Path) -> None:
    base, one, other = two_loras(made, Adapter(rank=2), Adapter(type="dora", rank=2))
    cat = Merge(combination="cat", space="adapters")
    with pytest.raises(ConfigError, match=r"use_dora=True, which PEFT leaves out.*space=weights"):
        merge(tmp_path / "dora", cat, policy=one, other=other)
    linear = Merge(combination="linear")
    merge(tmp_path / "weights", linear, policy=one, other=other)  # whole weights have no such limit
    with pytest.raises(ConfigError, match="base has no adapter; LoRAs on one base are accepted; set space=weights"):
        merge(tmp_path / "none", cat, policy=one, other=base)
    wider = made.trained("sft", base, save="adapter", adapter=Adapter(rank=4), **STEP)
    with pytest.raises(ConfigError, match=r"PEFT refuses it: All adapters must have the same r.*cat and svd"):
        merge(tmp_path / "ranks", Merge(combination="linear", space="adapters"), policy=one, other=wider)
    upon = made.trained("dpo", one, save="adapter", adapter=Adapter(rank=2), **STEP)
    with pytest.raises(ConfigError, match="lie on different models"):
        merge(tmp_path / "upon", cat, policy=one, other=upon)


@pytest.mark.parametrize("space", ["weights", "adapters", None])
def test_a_model_that_changes_after_it_was_loaded_changes_nothing(
    made: Made, tmp_path: Path, space: str | None
) -> None:
    _, one, other = two_loras(made, LORA, LORA)
    method = Merge(combination="linear", space=space) if space else Merge()
    inputs = {"policy": one, "other": other} if space else {"policy": one}
    merge(tmp_path / "expected", method, **inputs)
    ctx = TrainContext(
        output_dir=tmp_path / "found", work_dir=tmp_path / "work",
        loaded=lambda *slots: [shutil.rmtree(inputs[slot].path) for slot in slots or inputs],
    )  # fmt: skip
    method.run(inputs, ctx)
    assert not one.path.exists()
    assert digest_files(tmp_path / "found") == digest_files(tmp_path / "expected")


# What fits.


def test_reward_models_are_averaged_with_their_heads(made: Made, tmp_path: Path) -> None:
    base = made.base()
    one, other = (made.trained("reward", base, adapter=adapter, **STEP) for adapter in (LORA, None))
    merge(tmp_path / "out", MergeRewardModels(combination="linear"), policy=one, other=other)
    AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    first, second, found = weights(one.path), weights(other.path), weights(tmp_path / "out")
    assert "score.weight" in found
    for name, tensor in found.items():
        assert torch.equal(tensor, ((first[name].double() + second[name].double()) / 2).float())
    alone = made.trained("reward", base, save="adapter", adapter=LORA, **STEP)
    metrics = merge(tmp_path / "alone", MergeRewardModels(), policy=alone)
    assert metrics["merge/scores_difference"] < 1e-5
    assert same(weights(tmp_path / "alone"), first)
    with pytest.raises(ConfigError, match="reward models are averaged"):
        MergeRewardModels(combination="task_arithmetic")


def other_config(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2}))


def quantized(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (directory / "config.json").write_text(json.dumps(config))


def other_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages }}")


def other_weights(directory: Path) -> None:
    found = load_file(directory / "model.safetensors")
    found["model.norm.weight"] = torch.ones(31)
    save_file(found, directory / "model.safetensors", metadata={"format": "pt"})


CHANGES = [
    (other_config, "one and other are different models: num_attention_heads 4 and 2"),
    (quantized, r"other is quantized \(bitsandbytes nf4\)"),
    (tiny.swap_tokens, r"one and other have different tokenizers: 2 tokens differ, such as 'a'"),
    (other_template, "one and other have different chat templates"),
]


@pytest.mark.parametrize(
    ("change", "found"),
    [*CHANGES, (other_weights, "one and other have different weights: 1 differ, such as model.norm")],
)
def test_models_that_do_not_fit_are_refused(tmp_path: Path, change: Callable[[Path], None], found: str) -> None:
    one, other = (tiny.write_policy(tmp_path / name) for name in ("one", "other"))
    change(other)
    with pytest.raises(ConfigError, match=found):
        merge(tmp_path / "out", Merge(combination="linear"), policy=given(one), other=given(other))


def test_a_base_may_lack_the_template_and_a_policy_may_not(tmp_path: Path) -> None:
    plain = given(tiny.write_policy(tmp_path / "plain", chat_template=None))
    chat = given(tiny.write_policy(tmp_path / "chat", seed=1))
    merge(tmp_path / "out", Merge(combination="task_arithmetic", weights={"policy": 0.5}), policy=chat, base=plain)
    assert (tmp_path / "out" / "chat_template.jinja").exists()
    with pytest.raises(ConfigError, match=r"plain has no chat template, and chat has one.*put chat into"):
        merge(tmp_path / "no", Merge(combination="linear"), policy=plain, other=chat)


def test_a_model_without_adapter_and_dtype_is_refused(policies: dict[str, Input], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a has no adapter, and dtype is not set: nothing is merged"):
        merge(tmp_path / "out", Merge(), policy=policies["a"])
