"""Every format of a quantized base trains, resumes to the bit, and is merged into what its option says."""

import importlib.util
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

from lineage.artifact import Kind
from lineage.checkpoints import Checkpoints
from lineage.errors import ConfigError, StoppedError
from lineage.source.model_files import quantization_format
from tasks.context import Resources, TrainContext
from tasks.judgement.disk_need import adapter_weights, model_shapes
from tasks.method import Adapter, Quantization, Training
from tasks.model import adapter_files
from tasks.train.models.adapters import ON_QUANTIZED
from tasks.train.models.load import whole_model
from tasks.train.models.quantization import torch_dtype
from tasks.train.models.quantized_base import Quantizer, fill_dequantized, require_gradient, rounded_weights
from tests import tiny, training
from tests.model_directories import edit
from tests.tiny_models import write_model
from tests.training import same, weights

pytestmark = pytest.mark.usefixtures("one_thread")

LORA = Adapter(rank=4, alpha=8)
# bitsandbytes' kernel for CPUs needs rows of whole blocks of 64.
SIZES: Mapping[str, Mapping[str, int]] = {
    "llama": {"hidden_size": 64}, "gpt2": {"n_embd": 64, "n_inner": 128}, "mixtral": {"hidden_size": 64},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 64}, "gemma2": {"hidden_size": 64},
}  # fmt: skip
OF_PACKAGES = {
    "torchao": ("torchao_int8", "torchao_float8"), "optimum": ("quanto_int8", "quanto_float8"),
}  # fmt: skip
# Largest difference of logits between a model in few bits and its dequantized weights, as a share of their own size:
# the formats that also round activations are no product with such weights.
SAME_WEIGHTS = {"int8": 0.05}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"), num_rows=16)


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return {name: write_model(folder / name, name, **fields) for name, fields in SIZES.items()}


def installed(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} is not installed")


def quantizer(**fields: object) -> Quantizer:
    return Quantizer(setting=Quantization(**fields), compute_dtype=torch.float32)  # type: ignore[arg-type]


def sft(**fields: object) -> Training:
    return training.method("sft", **{"num_steps": 2, "learning_rate": 1e-2, "adapter": LORA, **fields})


def train(stage: Training, root: Path, folder: Path, policy: Path, **fields: object) -> list[float]:
    """The losses; checkpoints at every step, and the output, in a folder."""
    losses: list[float] = []
    ctx = TrainContext(
        output_dir=folder / "output", work_dir=folder / "work", checkpoint_dir=folder / "checkpoints",
        resources=Resources(micro_batch_size=8, cpus_per_worker=1, save_steps=1, save_minutes=None),
        report=lambda step, metrics: losses.append(metrics["loss"]),
    )  # fmt: skip
    stage.run(training.inputs(root, stage, policy=policy), replace(ctx, **fields))
    return losses


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(torch.arange(3, 40)[None]).logits


def trains_and_resumes(name: str, root: Path, folder: Path, policy: Path, adapter: Adapter = LORA) -> None:
    """Trains on a format: to the bit after a stop, with the adapter alone in checkpoints, and merged both ways."""
    setting = Quantization(format=name, merge="dequantized")  # type: ignore[arg-type]
    stage = sft(num_steps=3, quantization=setting, adapter=adapter)
    whole = train(stage, root, folder / "whole", policy)
    assert whole[-1] < whole[0]
    first: list[float] = []
    with pytest.raises(StoppedError):
        train(
            stage, root, folder / "broken", policy, should_stop=lambda: len(first) == 1,
            report=lambda step, metrics: first.append(metrics["loss"]),
        )  # fmt: skip
    saved = Checkpoints(folder / "broken" / "checkpoints")
    files = saved.read(2).files.keys()
    assert "adapter_model.safetensors" in files and "model.safetensors" not in files
    saved_adapter = load_file(saved.path(2) / "adapter_model.safetensors")
    assert {weight.dtype for weight in saved_adapter.values()} == {torch.float32}  # TRL casts it to bf16
    rest = train(stage, root, folder / "broken", policy, resume_from=saved.path(2))
    assert [*first, *rest] == whole
    output = folder / "broken" / "output"
    assert same(weights(output), weights(folder / "whole" / "output"))

    base = whole_model(Kind.CHECKPOINT, policy)
    rounded = whole_model(Kind.CHECKPOINT, policy, quantizer=quantizer(format=name))
    trained = logits(PeftModel.from_pretrained(rounded, output / "adapter"))
    merged = logits(AutoModelForCausalLM.from_pretrained(output))
    off = (merged - trained).abs().max() / trained.abs().max()
    assert off < SAME_WEIGHTS.get(name, 1e-5), f"{name}: {off:g}"

    train(replace(stage, quantization=replace(setting, merge="original")), root, folder / "original", policy)
    original = logits(AutoModelForCausalLM.from_pretrained(folder / "original" / "output"))
    torch.testing.assert_close(original, logits(PeftModel.from_pretrained(base, output / "adapter")))
    assert not torch.equal(original, merged)


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpt2", "mixtral"))]
)
@pytest.mark.parametrize("name", ["nf4", pytest.param("fp4", marks=pytest.mark.slow), "int8"])
def test_a_format_of_bitsandbytes_trains_resumes_to_the_bit_and_merges_as_set(
    root: Path, tmp_path: Path, policies: dict[str, Path], name: str, architecture: str
) -> None:
    trains_and_resumes(name, root, tmp_path, policies[architecture])


FORMATS_HERE = [
    "nf4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fp4", "int8")),
    *(
        pytest.param(name, marks=[installed(package), pytest.mark.slow])
        for package, names in (*OF_PACKAGES.items(), ("optimum", ("quanto_int4",))) for name in names
    ),
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS_HERE)
def test_the_policy_without_its_adapter_is_a_reference_in_every_format(
    root: Path, tmp_path: Path, policies: dict[str, Path], name: str
) -> None:
    setting = Quantization(format=name)  # type: ignore[arg-type]
    stage = training.method("dpo", num_steps=2, learning_rate=1e-2, adapter=LORA, quantization=setting)
    assert len(training.train(stage, root, tmp_path / "output", policy=policies["llama"]).losses) == 2


def lora_gradients(model: torch.nn.Module) -> torch.Tensor:
    """Of all LoRA weights, the same random ones on each model, as one vector."""
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    ids = torch.arange(3, 40)[None]
    adapted.train()(input_ids=ids, labels=ids).loss.backward()
    found = {name: each.grad for name, each in adapted.named_parameters() if each.requires_grad}
    return torch.cat([found[name].flatten() for name in sorted(found)])


@pytest.mark.parametrize("name", FORMATS_HERE)
def test_a_lora_gets_the_gradient_of_the_dequantized_base(policies: dict[str, Path], name: str) -> None:
    """Through layers in few bits, down to the lowest adapter."""
    rounded = whole_model(Kind.CHECKPOINT, policies["llama"], quantizer=quantizer(format=name))
    plain = fill_dequantized(whole_model(Kind.CHECKPOINT, policies["llama"]), rounded)
    cosine = torch.nn.functional.cosine_similarity(lora_gradients(rounded), lora_gradients(plain), dim=0)
    assert cosine > (0.99 if name in SAME_WEIGHTS else 0.99999)


class _ForInference(torch.nn.Linear):
    """Rounds what it reads, so that its gradient is 0, or passes a part of the gradient alone."""

    def __init__(self, passes: float) -> None:
        super().__init__(64, 64, bias=False)
        self.packed, self.passes = self.weight.data.clone(), passes
        del self.weight  # as formats that hold their weights under other names
        self.register_buffer("qweight", self.packed)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        mask = (torch.arange(64) < 64 * self.passes).float()
        return torch.nn.functional.linear(given * mask + (given * (1 - mask)).detach(), self.packed)


@pytest.mark.parametrize("passes", [0.0, 0.25, 0.5])
def test_a_base_whose_layers_pass_another_gradient_is_refused(policies: dict[str, Path], passes: float) -> None:
    model = whole_model(Kind.CHECKPOINT, policies["llama"])
    require_gradient(model)
    model.model.layers[1].self_attn.o_proj = _ForInference(1.0)
    require_gradient(model)
    model.model.layers[1].self_attn.o_proj = _ForInference(passes)
    with pytest.raises(ConfigError, match=r"layers of .*_ForInference pass a gradient .* has a cosine of .*format=nf4"):
        require_gradient(model)


def test_a_format_without_a_right_gradient_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torchao_int8_dynamic: its layers pass no right gradient.*torchao_int8"):
        Quantization(format="torchao_int8_dynamic")


@pytest.mark.parametrize("found", ["bitsandbytes nf4", "bitsandbytes int8", "gptq", "awq"])
def test_the_plan_reads_the_shapes_of_a_model_that_was_quantized_before(
    tmp_path: Path, policies: dict[str, Path], found: str
) -> None:
    """As they are in full precision: an adapter has the same size on both."""
    whole = model_shapes(policies["llama"])
    if found.startswith("bitsandbytes"):
        setting = (
            BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
            if found.endswith("nf4") else BitsAndBytesConfig(load_in_8bit=True)
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(policies["llama"], quantization_config=setting)
        model.save_pretrained(tmp_path)
    else:
        shutil.copyfile(policies["llama"] / "config.json", tmp_path / "config.json")
        edit(tmp_path / "config.json", quantization_config={"quant_method": found, "bits": 4})
        packed = {}
        for name, each in weights(policies["llama"]).items():
            if not name.endswith("_proj.weight"):
                packed[name] = each
                continue
            outputs, inputs = each.shape
            layer = name.removesuffix(".weight")
            shape = (inputs // 8, outputs) if found == "gptq" else (inputs, outputs // 8)
            packed[f"{layer}.qweight"] = torch.zeros(shape, dtype=torch.int32)
            packed[f"{layer}.scales"] = torch.zeros((1, outputs), dtype=torch.float16)
            packed[f"{layer}.qzeros"] = torch.zeros((1, outputs // 8), dtype=torch.int32)
        save_file(packed, tmp_path / "model.safetensors")
    assert model_shapes(tmp_path) == whole
    assert adapter_weights(LORA, model_shapes(tmp_path)) == adapter_weights(LORA, whole)


@pytest.mark.parametrize("kind", [kind for kind in ON_QUANTIZED if kind != LORA.type])
def test_every_type_of_adapter_that_a_base_in_few_bits_takes_does_so(
    root: Path, tmp_path: Path, policies: dict[str, Path], kind: str
) -> None:
    adapter = Adapter(type="dora", rank=4, alpha=8) if kind == "dora" else Adapter(type=kind)  # type: ignore[arg-type]
    trains_and_resumes("nf4", root, tmp_path, policies["llama"], adapter)


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        pytest.param(name, architecture, marks=[installed(module), *slow])
        for module, names in OF_PACKAGES.items()
        for name in names
        for architecture, slow in (("llama", []), ("mixtral", [pytest.mark.slow]))
    ],
)
def test_a_format_of_another_package_does_too(
    root: Path, tmp_path: Path, policies: dict[str, Path], name: str, architecture: str
) -> None:
    trains_and_resumes(name, root, tmp_path, policies[architecture])


@pytest.mark.slow  # the first use compiles its kernel for a minute
@installed("optimum")
def test_int4_of_quanto_does_too(root: Path, tmp_path: Path, policies: dict[str, Path]) -> None:
    trains_and_resumes("quanto_int4", root, tmp_path, policies["llama"])


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=pytest.mark.slow if each in ("mixtral", "gemma2") else []) for each in SIZES],
)
@pytest.mark.parametrize("name", ["nf4", "fp4", "int8"])
def test_dequantized_weights_are_those_of_the_layers_as_the_saved_model_loads_them(
    policies: dict[str, Path], name: str, architecture: str, tmp_path: Path
) -> None:
    base = whole_model(Kind.CHECKPOINT, policies[architecture])
    before = {key: value.clone() for key, value in base.state_dict().items()}
    of_format = quantizer(format=name)
    rounded = of_format.finish(of_format.applied(base))
    fill_dequantized(base, rounded).save_pretrained(tmp_path / "saved")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")  # the layers of GPT-2 are transposed
    off = (logits(found) - logits(rounded)).abs().max() / logits(rounded).abs().max()
    assert off < SAME_WEIGHTS.get(name, 1e-5)
    after = found.state_dict()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert changed and not [key for key in changed if "embed" in key or "wte" in key or "norm" in key]


OPTIONS: Mapping[str, Mapping[str, object]] = {
    "format": {"format": "fp4"}, "double": {"format": "nf4", "double": False},
    "compute_dtype": {"format": "nf4", "compute_dtype": "bf16"},
    "skip_modules": {"format": "nf4", "skip_modules": "q_proj, model.layers.1.mlp"},
    "merge": {"format": "nf4", "merge": "dequantized"},
}  # fmt: skip


@pytest.fixture(scope="module")
def baseline(root: Path, policies: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("baseline")
    train(sft(quantization=Quantization(format="nf4")), root, folder, policies["llama"])
    return folder / "output"


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_changes_the_run(
    root: Path, tmp_path: Path, policies: dict[str, Path], baseline: Path, option: str
) -> None:
    train(sft(quantization=Quantization(**OPTIONS[option])), root, tmp_path, policies["llama"])  # type: ignore[arg-type]
    assert not same(weights(tmp_path / "output"), weights(baseline))


@pytest.mark.parametrize("storage", ["fp32", "bf16", "fp16", "uint8"])
def test_the_dtype_of_storage_reaches_the_base_and_changes_no_number(
    root: Path, tmp_path: Path, policies: dict[str, Path], baseline: Path, storage: str
) -> None:
    setting = Quantization(format="nf4", storage_dtype=storage)  # type: ignore[arg-type]
    of_storage = Quantizer(setting=setting, compute_dtype=torch.float32)
    model = whole_model(Kind.CHECKPOINT, policies["llama"], quantizer=of_storage)
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch_dtype(storage)
    train(sft(quantization=setting), root, tmp_path, policies["llama"])
    assert same(weights(tmp_path / "output"), weights(baseline))
    assert sft(quantization=setting).recipe() == sft(quantization=Quantization(format="nf4")).recipe()


def test_packed_bits_that_fp32_stores_are_not_cast_with_the_frozen_weights(
    root: Path, tmp_path: Path, policies: dict[str, Path]
) -> None:
    held = Resources(micro_batch_size=8, save_minutes=None, weights="bf16")
    for storage in ("fp32", "uint8"):
        setting = Quantization(format="nf4", storage_dtype=storage)  # type: ignore[arg-type]
        train(sft(quantization=setting, precision="bf16"), root, tmp_path / storage, policies["llama"], resources=held)
    assert same(*(weights(tmp_path / storage / "output") for storage in ("fp32", "uint8")))


@installed("torchao")
def test_the_size_of_groups_changes_the_run(root: Path, tmp_path: Path, policies: dict[str, Path]) -> None:
    for size in (None, 16):
        setting = Quantization(format="torchao_int8", group_size=size, merge="dequantized")
        train(sft(quantization=setting), root, tmp_path / str(size), policies["llama"])
    assert not same(*(weights(tmp_path / str(size) / "output") for size in (None, 16)))


@pytest.mark.parametrize("name", ["nf4", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_skipped_modules_and_the_head_stay_as_they_are(policies: dict[str, Path], name: str, architecture: str) -> None:
    skipped = "c_proj" if architecture == "gpt2" else "down_proj"
    of_format = quantizer(format=name, skip_modules=skipped)
    model = whole_model(Kind.CHECKPOINT, policies[architecture], quantizer=of_format)
    given = whole_model(Kind.CHECKPOINT, policies[architecture])
    rounded = {path for path, module in model.named_modules() if dict(rounded_weights(module))}
    assert rounded and not [path for path in rounded if path.endswith((skipped, "lm_head"))]
    for path, module in given.named_modules():
        if path.endswith((skipped, "lm_head")):
            assert torch.equal(module.weight, model.get_submodule(path).weight)


def test_a_skipped_module_that_the_model_has_not_is_refused_before_a_step(
    root: Path, tmp_path: Path, policies: dict[str, Path]
) -> None:
    stage = sft(quantization=Quantization(format="nf4", skip_modules="q_proj, w_pack"))
    with pytest.raises(ConfigError, match=r"no linear layer w_pack; it has .*q_proj.*; name some of these"):
        train(stage, root, tmp_path, policies["llama"])


@pytest.mark.parametrize(
    "name",
    [pytest.param("torchao_int8", marks=installed("torchao")), pytest.param("quanto_int8", marks=installed("optimum"))],
)
def test_a_format_that_rounds_no_layer_of_gpt2_is_refused_before_a_step(
    root: Path, tmp_path: Path, policies: dict[str, Path], name: str
) -> None:
    with pytest.raises(ConfigError, match=r"\(gpt2\) has no layer that it rounds.* to one of nf4"):
        train(sft(quantization=Quantization(format=name)), root, tmp_path, policies["gpt2"])  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft", "reward"])
def test_golden_prompts_before_and_after_the_merge_are_recorded(
    root: Path, tmp_path: Path, policies: dict[str, Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    found = {}
    values = "scores" if name == "reward" else "logps"
    for merge in ("original", "dequantized"):
        stage = training.method(name, adapter=LORA, quantization=Quantization(format="nf4", merge=merge))
        run = training.train(stage, root, tmp_path / merge / "output", policy=policies["llama"])
        found[merge] = {key: run.metrics[f"merge/{values}_{key}"] for key in ("before", "after", "difference")}
    assert found["dequantized"]["difference"] < 1e-5 < 1e-4 < found["original"]["difference"]
    assert found["original"]["before"] == pytest.approx(found["dequantized"]["before"])
    assert f"merge golden_prompts=4 {values}_before=" in caplog.text
    if name == "sft":
        tokenizer = AutoTokenizer.from_pretrained(policies["llama"])
        rows = tiny.conversation_rows(4)
        ids = [tokenizer.apply_chat_template(row["messages"], return_dict=False) for row in rows]
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "original" / "output")
        expected = []
        for each in ids:
            with torch.no_grad():
                expected.append(-float(model(torch.tensor([each]), labels=torch.tensor([each])).loss))
        assert found["original"]["after"] == pytest.approx(sum(expected) / 4, abs=1e-4)


def test_golden_prompts_meet_a_head_in_fp32_on_a_base_in_bf16(
    root: Path, tmp_path: Path, policies: dict[str, Path]
) -> None:
    dora, fp4 = Adapter(type="dora", rank=4, alpha=8), Quantization(format="fp4")
    stage = training.method("reward", adapter=dora, quantization=fp4, precision="bf16")
    resources = Resources(weights="bf16", micro_batch_size=4)
    run = training.train(stage, root, tmp_path / "output", policy=policies["llama"], resources=resources)
    assert run.metrics["merge/scores_difference"] < 1


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_an_adapter_alone_is_merged_by_its_reader_as_it_says(
    root: Path, tmp_path: Path, policies: dict[str, Path], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policies[architecture]
    monkeypatch.setattr(adapter_files, "_base_directory", lambda *_: policy)
    for merge in ("original", "dequantized"):
        for save in (None, "adapter"):
            stage = sft(quantization=Quantization(format="nf4", merge=merge), save=save)  # type: ignore[arg-type]
            train(stage, root, tmp_path / merge / str(save), policy)
        whole, alone = (tmp_path / merge / save / "output" for save in ("None", "adapter"))
        loaded, expected = whole_model(Kind.CHECKPOINT, alone), AutoModelForCausalLM.from_pretrained(whole)
        assert all(torch.equal(loaded.state_dict()[key], value) for key, value in expected.state_dict().items())
        recorded = json.loads((alone / "base.json").read_text())
        assert recorded.get("rounding") == ({"format": "nf4"} if merge == "dequantized" else None)


def quantized_before(directory: Path, policy: Path, config: BitsAndBytesConfig | TorchAoConfig) -> Path:
    """The policy as another program rounded and saved it."""
    model = AutoModelForCausalLM.from_pretrained(policy, quantization_config=config)
    shutil.copytree(policy, directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory)
    return directory


BEFORE: Mapping[str, Mapping[str, object]] = {
    "bitsandbytes nf4": {
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": torch.float32,
    },
    "bitsandbytes int8": {"load_in_8bit": True},
}  # fmt: skip


@pytest.mark.parametrize(
    ("found", "architecture"),
    [
        *((found, "llama") for found in BEFORE),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in product(BEFORE, ("gpt2", "mixtral"))),
    ],
)
def test_a_model_that_was_quantized_before_is_trained_upon_and_merged_dequantized(
    root: Path,
    tmp_path: Path,
    policies: dict[str, Path],
    found: str,
    architecture: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = quantized_before(tmp_path / "policy", policies[architecture], BitsAndBytesConfig(**BEFORE[found]))
    assert quantization_format(json.loads((policy / "config.json").read_text())) == found
    losses = train(sft(num_steps=3), root, tmp_path / "whole", policy)
    assert losses[-1] < losses[0]
    output = tmp_path / "whole" / "output"
    model = AutoModelForCausalLM.from_pretrained(output)
    assert "quantization_config" not in model.config and model.dtype == torch.float32
    trained = logits(PeftModel.from_pretrained(whole_model(Kind.CHECKPOINT, policy), output / "adapter"))
    off = (logits(model) - trained).abs().max() / trained.abs().max()
    assert off < (0.05 if "int8" in found else 1e-5)

    monkeypatch.setattr(adapter_files, "_base_directory", lambda *_: policy)
    train(sft(num_steps=3, save="adapter"), root, tmp_path / "alone", policy)
    alone = whole_model(Kind.CHECKPOINT, tmp_path / "alone" / "output")
    assert all(torch.equal(alone.state_dict()[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": None}, r"is quantized \(bitsandbytes nf4\): its weights cannot be trained; set adapter=lora"),
        ({"quantization": Quantization(format="nf4")}, "would round it again; set quantization=none and adapter=lora"),
    ],
    ids=["full", "again"],
)
def test_a_model_that_was_quantized_before_is_refused_where_it_cannot_train(
    root: Path, tmp_path: Path, policies: dict[str, Path], fields: Mapping[str, object], message: str
) -> None:
    policy = quantized_before(tmp_path / "policy", policies["llama"], BitsAndBytesConfig(**BEFORE["bitsandbytes nf4"]))
    with pytest.raises(ConfigError, match=message):
        train(sft(**fields), root, tmp_path, policy)


@installed("torchao")
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_torchao_quantized_before_is_trained_upon_too(
    root: Path, tmp_path: Path, policies: dict[str, Path]
) -> None:
    from torchao.quantization import Int8WeightOnlyConfig

    config = TorchAoConfig(Int8WeightOnlyConfig())
    policy = quantized_before(tmp_path / "policy", policies["llama"], config)
    losses = train(sft(num_steps=3), root, tmp_path, policy)
    assert losses[-1] < losses[0]
    trained = logits(PeftModel.from_pretrained(whole_model(Kind.CHECKPOINT, policy), tmp_path / "output/adapter"))
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "output")), trained)


def test_a_model_in_fp8_is_dequantized_as_it_is_loaded_and_trained_upon(
    root: Path, tmp_path: Path, policies: dict[str, Path]
) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(policies["llama"], policy)
    full = weights(policy)
    held: dict[str, torch.Tensor] = {}
    expected: dict[str, torch.Tensor] = {}
    for name, weight in full.items():
        if not name.endswith("proj.weight"):
            held[name] = expected[name] = weight
            continue
        scale = weight.abs().max() / 448  # the largest number of e4m3; one block of 128 x 128 holds the weight
        held[name] = (weight / scale).to(torch.float8_e4m3fn)
        held[f"{name}_scale_inv"] = scale.reshape(1, 1)
        expected[name] = held[name].float() * scale
    save_file(held, policy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((policy / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (policy / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    assert quantization_format(json.loads((policy / "config.json").read_text())) == "fp8"
    model = whole_model(Kind.CHECKPOINT, policy)
    for name, parameter in model.state_dict().items():
        torch.testing.assert_close(parameter, expected[name])
    train(sft(), root, tmp_path, policy)
    output = AutoModelForCausalLM.from_pretrained(tmp_path / "output")
    assert "quantization_config" not in output.config
    trained = logits(PeftModel.from_pretrained(model, tmp_path / "output/adapter"))
    torch.testing.assert_close(logits(output), trained)
