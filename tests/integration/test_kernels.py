"""What a training takes from its machine reaches the trainer, and keeps its trajectory."""

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer, modeling_utils
from transformers import trainer as transformers_trainer

from lineage.artifact import Kind
from lineage.errors import ConfigError, PipelineError
from tasks.context import Dtype, Resources
from tasks.method import Adapter, Optimizer
from tasks.train import run as module
from tasks.train.kernels import machine as kernels
from tasks.train.models import load as models
from tasks.train.models.load import load_config, whole_model
from tasks.train.models.quantized_base import step_in_fp32
from tests import tiny_models, training
from tests.integration.test_dpo_start import scale_the_reference
from tests.integration.test_own_loop import OptimizedLoop
from tests.integration.test_padding_free import plain_flash
from tests.integration.test_resume import SAVING, stop_and_go_on
from tests.training import same, weights

LORA = Adapter(rank=4, alpha=8)
RESOURCES = Resources(micro_batch_size=4)


def test_a_precision_that_the_environment_sets_changes_no_training(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = training.train(training.method("sft"), root, tmp_path / "expected" / "output")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    found = training.train(training.method("sft"), root, tmp_path / "found" / "output")
    assert found.losses == expected.losses


def scale_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU train in fp16 with a loss scale, as accelerate does on a GPU alone."""
    original = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        if self.state.mixed_precision == "fp16":
            self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu")

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    monkeypatch.setattr(kernels, "require_precision", lambda precision, on_gpu: None)


def test_fp16_scales_its_loss_and_resumes_to_the_bit(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scale_on_the_cpu(monkeypatch)
    expected = training.train(training.method("sft"), root, tmp_path / "fp32" / "output")
    found = training.train(training.method("sft", precision="fp16"), root, tmp_path / "fp16" / "output")
    assert found.losses != expected.losses
    assert found.losses == pytest.approx(expected.losses, rel=5e-3)
    assert [metrics["loss_scale"] for _, metrics in found.reports] == [1024.0] * 3

    monkeypatch.setattr(kernels, "FIRST_SCALE", 2.0**22)  # overflows: steps are skipped, and the scale falls
    two = replace(SAVING, micro_batch_size=4)
    reports = stop_and_go_on(training.method("sft", num_steps=6, precision="fp16"), root, tmp_path, two)
    scales = [2.0**21, 2.0**20, 2.0**19, 2.0**19, 2.0**18, 2.0**18]  # it falls at each skipped step
    assert [metrics["loss_scale"] for _, metrics in reports] == scales


METHODS = ("cpt", "sft", "reward", "dpo")
FEW = [pytest.param(name, marks=[] if name in ("sft", "dpo") else pytest.mark.slow) for name in METHODS]
QUICK = (("sft", "full"),)


def recomputed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the layers whose activations are recomputed, in each forward pass that takes gradients."""
    calls: list[int] = []

    def counted(function: Callable[..., object], *args: object, **kwargs: object) -> object:
        calls.append(1)
        return checkpoint(function, *args, **kwargs)

    monkeypatch.setattr(modeling_utils, "checkpoint", counted)
    return calls


def flash(monkeypatch: pytest.MonkeyPatch, attention: str) -> list[int]:
    """Takes the place of a package of FlashAttention, and counts the rows of each call."""
    calls: list[int] = []

    def attend(*states: torch.Tensor, **options: object) -> torch.Tensor:
        calls.append(len(options["cu_seqlens_q"]) - 1)  # type: ignore[arg-type]
        return plain_flash(*states, **{**options, "deterministic": False})  # type: ignore[arg-type]

    package = SimpleNamespace(flash_attn_varlen_func=attend)
    monkeypatch.setitem(sys.modules, kernels.FLASH_PACKAGES[attention], package)
    return calls


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        pytest.param(name, adapter, id=f"{name}-{kind}", marks=[] if (name, kind) in QUICK else pytest.mark.slow)
        for name in METHODS
        for kind, adapter in (("full", None), ("lora", LORA))
    ],
)
@pytest.mark.parametrize("what", ["recomputed", "attended", pytest.param("compiled", marks=pytest.mark.slow)])
def test_what_is_computed_otherwise_is_called_and_keeps_the_trajectory(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, adapter: Adapter | None, what: str
) -> None:
    stage, layers = training.method(name, adapter=adapter), recomputed(monkeypatch)

    def losses(**fields: object) -> list[float]:
        layers.clear()
        output = tmp_path / "-".join(map(str, fields.values())) / "output"
        return training.train(stage, root, output, resources=replace(RESOURCES, **fields)).losses

    plain, passes, rows = losses(), 3 * 2, 4 * (2 if name in ("reward", "dpo") else 1)  # steps x micro batches
    if what == "recomputed":
        for value, count in (("on", 2 * passes), (2, passes)):  # of two layers; off where it is not set
            assert losses(gradient_checkpointing=value) == pytest.approx(plain, rel=1e-6) and len(layers) == count
    if what == "attended":
        for attention in ("flash_attention_2", "flash_attention_3"):
            calls = flash(monkeypatch, attention)
            assert losses(attention=attention) == pytest.approx(plain, rel=1e-5)
            assert calls == [rows] * (passes * 2 * (2 if name == "dpo" else 1))  # layers, models
    if what == "compiled":
        graphs = compiled(monkeypatch)
        assert losses(compile=True) == pytest.approx(plain, rel=1e-5) and graphs


def test_each_layer_is_handed_to_the_compiler(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[tuple[str, dict[str, object]]] = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda layer, **options: handed.append((type(layer).__name__, options))
    )
    resources = replace(RESOURCES, compile=True)
    training.train(training.method("sft", num_steps=1), root, tmp_path / "output", resources=resources)
    assert handed == [("LlamaDecoderLayer", {"backend": "inductor", "dynamic": True})] * 2


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_every_architecture_recomputes_layers_attends_eagerly_and_has_a_base_in_bf16(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", architecture)
    calls, sdpa = [], kernels.sdpa_of_cpu
    monkeypatch.setattr(kernels, "sdpa_of_cpu", lambda *args, **kwargs: calls.append(1) or sdpa(*args, **kwargs))

    def losses(name: str, **fields: object) -> list[float]:
        calls.clear()
        adapted = {"adapter": LORA, "precision": "bf16"} if name == "bf16" else {}
        stage = training.method("dpo", num_steps=2, **adapted)
        output = tmp_path / name / str(len(fields)) / "output"
        return training.train(stage, root, output, policy=policy, resources=replace(RESOURCES, **fields)).losses

    plain = losses("plain")
    assert bool(calls) == (architecture != "gemma2")  # its capped scores are products
    assert losses("eager", attention="eager") == pytest.approx(plain, rel=1e-5) and not calls
    recomputations = recomputed(monkeypatch)
    assert losses("recomputed", gradient_checkpointing=2) == pytest.approx(plain, rel=1e-6)
    assert len(recomputations) == 2 * 2  # steps x micro batches, of one layer in two
    assert losses("bf16", weights="bf16") == pytest.approx(losses("bf16"), rel=2e-2)


def test_batches_that_other_processes_collate_are_the_same_to_the_bit(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = training.train(training.method("dpo"), root, tmp_path / "expected" / "output", resources=RESOURCES)
    workers: list[tuple[int, int | None]] = []

    def iterate(self: DataLoader, plain: object = DataLoader.__iter__) -> object:
        workers.append((self.num_workers, self.prefetch_factor))
        return plain(self)  # type: ignore[operator]

    monkeypatch.setattr(DataLoader, "__iter__", iterate)
    resources = replace(RESOURCES, dataloader_workers="auto", prefetch_factor=3)  # of two CPUs, one
    run = training.train(training.method("dpo"), root, tmp_path / "output", resources=resources)
    assert same(weights(run.output), weights(expected.output))
    assert workers == [(1, 3)]


def test_gpu_memory_is_returned_every_n_steps(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    returned: list[int] = []
    monkeypatch.setattr(transformers_trainer, "clear_device_cache", lambda: returned.append(1))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: returned.append(1))
    resources = replace(RESOURCES, micro_batch_size=8, empty_cache_steps=2)
    for index, stage in enumerate((training.method("sft", num_steps=4), own_loop(num_steps=4))):
        returned.clear()
        training.train(stage, root, tmp_path / str(index) / "output", resources=resources)
        assert len(returned) == 2


def own_loop(**fields: object) -> OptimizedLoop:
    return OptimizedLoop(**{**training.FIELDS, "max_length": 16, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "adapter", [pytest.param(each, id=name, marks=pytest.mark.slow) for name, each in (("full", None), ("lora", LORA))]
)
def test_a_loop_of_its_own_attends_recomputes_and_compiles_too(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: Adapter | None
) -> None:
    calls, graphs = recomputed(monkeypatch), compiled(monkeypatch)

    def losses(name: str, **fields: object) -> list[float]:
        stage, output = own_loop(adapter=adapter), tmp_path / name / "output"
        return training.train(stage, root, output, resources=replace(RESOURCES, **fields)).losses

    plain = losses("plain")
    with monkeypatch.context() as without_kernel:
        without_kernel.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
        assert losses("eager", attention="eager") == pytest.approx(plain, rel=1e-5)
    assert not calls
    assert losses("layers", gradient_checkpointing=2) == pytest.approx(plain, rel=1e-6)
    assert len(calls) == 3 * 2 and not graphs
    assert losses("compiled", compile=True) == pytest.approx(plain, rel=1e-5)
    assert len(calls) == 3 * 2 and graphs


def compiled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Takes the place of the compiler, which takes a minute, and counts the graphs that it is given."""
    graphs: list[int] = []

    def compiler(graph: torch.fx.GraphModule, example: list[object]) -> Callable[..., object]:
        graphs.append(1)
        return graph.forward

    monkeypatch.setattr(kernels, "COMPILER", compiler)
    torch.compiler.reset()
    return graphs


def test_packed_rows_do_not_see_each_other_in_eager_attention(root: Path, tmp_path: Path) -> None:
    stage = training.method("sft", packing="best_fit", global_batch_size=4)
    packed = [
        training.train(
            stage, root, tmp_path / attention / "output", resources=replace(RESOURCES, attention=attention)
        ).losses
        for attention in ("auto", "eager")
    ]
    assert packed[1] == pytest.approx(packed[0], rel=1e-5)


@pytest.mark.parametrize("optimizer", [Optimizer(), Optimizer(weights="bf16")], ids=["fp32", "split"])
@pytest.mark.parametrize("held", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_a_reference_computes_what_its_policy_computes_in_bf16(
    root: Path, tmp_path: Path, name: str, held: Dtype, optimizer: Optimizer
) -> None:
    stage = training.method(name, precision="bf16", num_steps=1, optimizer=optimizer)
    run = training.train(stage, root, tmp_path / "output", resources=replace(RESOURCES, weights=held))
    for each in ("rewards/chosen", "rewards/rejected"):
        assert run.reports[0][1][each] == 0.0
    if name == "dpo":
        assert run.losses[0] == pytest.approx(math.log(2), abs=1e-6)


BF16 = replace(RESOURCES, weights="bf16")


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[set[torch.dtype], set[torch.dtype]]]:
    """The dtypes of frozen and of trained parameters of each model that a trainer of transformers was given."""
    found: list[tuple[set[torch.dtype], set[torch.dtype]]] = []
    original = module.TrainingRun.fit

    def fit(run: module.TrainingRun, trainer: Trainer) -> dict[str, float]:
        step_in_fp32(trainer.model)
        for model in filter(None, (trainer.model, getattr(trainer, "ref_model", None))):
            parameters = [(each.requires_grad, each.dtype) for each in model.parameters()]
            frozen, trained = ({dtype for grad, dtype in parameters if grad == takes} for takes in (False, True))
            found.append((frozen, trained))
        return original(run, trainer)

    monkeypatch.setattr(module.TrainingRun, "fit", fit)
    return found


@pytest.mark.parametrize("name", FEW)
def test_the_base_under_an_adapter_is_held_in_bf16(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    stage, dtypes = training.method(name, adapter=LORA, precision="bf16"), spied(monkeypatch)
    expected = training.train(stage, root, tmp_path / "fp32" / "output")
    found = training.train(stage, root, tmp_path / "bf16" / "output", resources=BF16)
    head = {torch.float32} if name == "reward" else set()  # the one that the trained copy started from
    assert dtypes == [({torch.float32}, {torch.float32}), ({torch.bfloat16} | head, {torch.float32})]
    assert found.losses == pytest.approx(expected.losses, rel=2e-2)
    assert found.losses != expected.losses
    merged, adapter = weights(found.output), load_file(found.output / "adapter" / "adapter_model.safetensors")
    assert {each.dtype for key, each in merged.items() if "score" not in key} == {torch.bfloat16}
    assert {each.dtype for each in adapter.values()} == {torch.float32}
    for key, each in weights(expected.output).items():
        torch.testing.assert_close(merged[key].float(), each, atol=2e-3, rtol=1e-2, msg=key)


def test_a_reference_is_held_in_bf16_and_step_0_proves_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, dtypes = training.method("dpo", precision="bf16"), spied(monkeypatch)
    expected = training.train(stage, root, tmp_path / "fp32" / "output", resources=RESOURCES)
    found = training.train(stage, root, tmp_path / "bf16" / "output", resources=BF16)
    assert dtypes[2:] == [(set(), {torch.float32}), ({torch.bfloat16, torch.float32}, set())]  # embeddings and norms
    assert found.losses == expected.losses  # autocast rounds the same matrices in each forward
    assert {each.dtype for each in weights(found.output).values()} == {torch.float32}  # all of it was trained
    scale_the_reference(monkeypatch, 4)
    with pytest.raises(PipelineError, match="policy and reference differ at step 0"):
        training.train(stage, root, tmp_path / "other" / "output", resources=BF16)


@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
def test_what_is_held_in_bf16_is_never_in_memory_in_fp32(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapter: Adapter | None
) -> None:
    loaded: list[set[torch.dtype]] = []
    load = models.whole_model

    def spied(*args: object, **kwargs: object) -> PreTrainedModel:
        model = load(*args, **kwargs)
        loaded.append({each.dtype for each in model.parameters() if each.ndim > 1})
        return model

    monkeypatch.setattr(models, "whole_model", spied)
    stage = training.method("dpo", adapter=adapter, precision="bf16")
    found = training.train(stage, root, tmp_path / "read" / "output", resources=BF16)
    embeddings = {torch.float32}  # which autocast leaves
    assert loaded == ([{torch.bfloat16}] if adapter else [{torch.float32}, {torch.bfloat16, *embeddings}])
    monkeypatch.setattr(models, "whole_model", lambda *args, held, **kwargs: load(*args, **kwargs))
    cast = training.train(stage, root, tmp_path / "cast" / "output", resources=BF16)
    assert found.losses == cast.losses and same(weights(found.output), weights(cast.output))


@pytest.mark.parametrize("architecture", tiny_models.FEW)
@pytest.mark.parametrize("held", ["bf16", "as trained"])
def test_weights_that_are_read_into_bf16_are_those_that_are_cast(tmp_path: Path, held: str, architecture: str) -> None:
    policy = tiny_models.write_model(tmp_path, architecture)
    cast = kernels.hold_in(whole_model(Kind.CHECKPOINT, policy), held)
    read = whole_model(Kind.CHECKPOINT, policy, held=held)
    expected = dict([*cast.named_parameters(), *cast.named_buffers()])
    found = dict([*read.named_parameters(), *read.named_buffers()])
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype and torch.equal(found[name], each), name
    in_fp32 = {name for name, each in read.named_parameters() if each.dtype == torch.float32}
    products = {name for name in found if name.endswith(("up_proj.weight", "c_fc.weight", "gate_up_proj"))}
    assert products and products.isdisjoint(in_fp32)
    assert bool(in_fp32) == (held == "as trained")  # embeddings and norms


def test_a_reward_model_is_read_into_bf16_with_its_head_in_fp32(root: Path) -> None:
    config = load_config(root / "policy", num_labels=1)
    models_of_both = []
    for options in ({}, {"held": "bf16"}):
        torch.manual_seed(0)
        models_of_both.append(whole_model(Kind.REWARD_MODEL, root / "policy", config, **options))
    cast, read = models_of_both
    assert read.score.weight.dtype == read.model.rotary_emb.inv_freq.dtype == torch.float32
    assert read.model.embed_tokens.weight.dtype == torch.bfloat16
    assert same(read.state_dict(), kernels.hold_in(cast, "bf16").state_dict())


@pytest.fixture
def fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Computes in bf16 what a GPU would in fp8."""
    pytest.importorskip("torchao")
    monkeypatch.setattr(kernels, "EMULATE_FP8", True)


@pytest.mark.parametrize("name", FEW)
def test_fp8_trains_linear_layers_and_follows_bf16(root: Path, tmp_path: Path, fp8: None, name: str) -> None:
    bf16 = training.train(training.method(name, precision="bf16"), root, tmp_path / "bf16" / "output")
    found = training.train(training.method(name, precision="fp8"), root, tmp_path / "fp8" / "output")
    assert found.losses != bf16.losses
    assert found.losses == pytest.approx(bf16.losses, rel=3e-2)
    assert weights(found.output).keys() == weights(bf16.output).keys()
    assert {each.dtype for each in weights(found.output).values()} == {torch.float32}


def test_fp8_resumes_to_the_bit(root: Path, tmp_path: Path, fp8: None) -> None:
    stop_and_go_on(training.method("dpo", num_steps=6, precision="fp8"), root, tmp_path)


def test_a_model_without_linear_layers_is_refused_in_fp8(root: Path, tmp_path: Path, fp8: None) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", "gpt2")
    with pytest.raises(ConfigError, match=r"the model \(gpt2\) has no linear layer .* set precision=bf16"):
        training.train(training.method("sft", precision="fp8"), root, tmp_path / "output", policy=policy)


@pytest.mark.slow
def test_the_compilers_own_kernels_train_and_resume_to_the_bit(root: Path, tmp_path: Path) -> None:
    plain = training.train(training.method("dpo"), root, tmp_path / "plain" / "output")
    torch.compiler.reset()
    resources = replace(RESOURCES, compile=True)
    run = training.train(training.method("dpo"), root, tmp_path / "output", resources=resources)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    stop_and_go_on(training.method("sft", num_steps=6), root, tmp_path, replace(SAVING, compile=True))
