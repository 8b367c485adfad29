import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from lineage.errors import ConfigError, PipelineError
from tasks.context import Resources
from tasks.sft import SFT
from tasks.train.kernels import machine as kernels
from tasks.train.kernels.machine import (
    FIRST_SCALE,
    LossScale,
    attention_of,
    fast_products,
    kernel_args,
    replace_kernels,
    require_precision,
    sdpa_of_cpu,
    start_scaler,
)

ON_GPU = Resources(gpus_per_worker=1)


def fake_gpu(monkeypatch, *, capability=(8, 0), bf16=True):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")


@pytest.mark.parametrize(
    ("precision", "capability", "expected"),
    [
        ("fp32", (9, 0), {"bf16": False, "fp16": False}),
        ("bf16", (9, 0), {"bf16": True, "fp16": False}),
        ("auto", (8, 0), {"bf16": True, "fp16": False}),
        ("fp16", (7, 5), {"bf16": False, "fp16": True}),
    ],
)
def test_precision_on_a_gpu_is_the_trainers(monkeypatch, precision, capability, expected):
    fake_gpu(monkeypatch, capability=capability)
    found = kernel_args(SFT(precision=precision), ON_GPU)
    assert found == {**found, **expected, "use_cpu": False}


@pytest.mark.parametrize(("precision", "bf16"), [("fp32", False), ("bf16", True), ("auto", False)])
def test_precision_on_a_cpu_is_the_trainers(precision, bf16):
    found = kernel_args(SFT(precision=precision), Resources())
    assert found == {**found, "bf16": bf16, "fp16": False, "use_cpu": True}


def test_hardware_that_lacks_a_precision_is_refused(monkeypatch):
    fake_gpu(monkeypatch, bf16=False)
    with pytest.raises(ConfigError, match=r"precision=bf16: Tesla T4 computes no bf16; .* set precision=fp16 or fp32"):
        require_precision("bf16", on_gpu=True)
    with pytest.raises(ConfigError, match="precision=fp16: this training has no GPU, and would compute in fp32"):
        kernel_args(SFT(precision="fp16"), Resources())


def test_fp8_needs_a_gpu_of_ada_or_hopper(monkeypatch):
    fake_gpu(monkeypatch, capability=(8, 6))
    with pytest.raises(ConfigError, match=r"precision=fp8: a GPU of compute capability 8\.9 .* this is Tesla T4; set"):
        require_precision("fp8", on_gpu=True)
    with pytest.raises(ConfigError, match=r"this is a CPU; set precision=bf16"):
        require_precision("fp8", on_gpu=False)
    fake_gpu(monkeypatch, capability=(8, 9))
    assert kernel_args(SFT(precision="fp8"), ON_GPU)["bf16"]


def test_liger_takes_the_place_of_modules_and_not_of_losses(monkeypatch):
    calls = []
    package = SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": None})
    monkeypatch.setitem(sys.modules, "liger_kernel", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.monkey_patch", package)
    monkeypatch.setattr(kernels, "apply_liger_kernel", lambda model, config: calls.append((model, config)))
    llama, gpt2 = (SimpleNamespace(config=SimpleNamespace(model_type=each), modules=list) for each in ("llama", "gpt2"))
    replace_kernels(llama, "bf16", replace(ON_GPU, liger=False))
    monkeypatch.setattr(kernels, "find_spec", lambda name: None)
    replace_kernels(llama, "bf16", ON_GPU)
    monkeypatch.setattr(kernels, "find_spec", lambda name: package)
    for precision, where in (("bf16", Resources()), ("fp32", ON_GPU), ("bf16", replace(ON_GPU, deterministic=True))):
        replace_kernels(llama, precision, where)
    replace_kernels(gpt2, "bf16", ON_GPU)
    assert calls == []
    replace_kernels(llama, "bf16", ON_GPU)
    assert len(calls) == 1
    calls.clear()
    replace_kernels(llama, "bf16", replace(ON_GPU, liger=True))
    assert calls == [(llama, {"cross_entropy": False, "fused_linear_cross_entropy": False})]
    with pytest.raises(ConfigError, match=r"liger-kernel has no kernels for the model \(gpt2\); set liger=false"):
        replace_kernels(gpt2, "bf16", replace(ON_GPU, liger=True))


def scaled(scale=None):
    """A trainer whose accelerator scales losses, as for fp16 on a GPU."""
    callbacks = []
    scaler = torch.amp.GradScaler("cpu") if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
    accelerator = SimpleNamespace(scaler=scaler)
    return SimpleNamespace(accelerator=accelerator, add_callback=callbacks.append, callbacks=callbacks)


def test_the_loss_scale_starts_at_1024_and_a_checkpoint_has_its_own():
    trainer = scaled()
    start_scaler(trainer)
    assert trainer.accelerator.scaler.get_scale() == FIRST_SCALE == 1024
    assert isinstance(trainer.callbacks[0], LossScale)
    trainer.accelerator.scaler.load_state_dict({**trainer.accelerator.scaler.state_dict(), "scale": 32.0})
    assert trainer.accelerator.scaler.get_scale() == 32
    trainer.accelerator.scaler = None
    start_scaler(trainer)
    assert len(trainer.callbacks) == 1


def logged(callback, loss, grad_norm):
    logs = {"loss": loss, "grad_norm": grad_norm}
    state = SimpleNamespace(global_step=3, log_history=[dict(logs)])
    callback.on_log(None, state, None, logs)
    assert state.log_history == [logs] or math.isnan(loss)
    return logs


def test_a_step_that_the_scaler_skipped_is_no_divergence_and_says_so(caplog):
    callback = LossScale(scaled(512.0).accelerator.scaler)
    assert logged(callback, 2.0, 0.5) == {"loss": 2.0, "grad_norm": 0.5, "loss_scale": 512.0}
    assert logged(callback, 2.0, math.inf) == {"loss": 2.0, "grad_norm": 0.0, "loss_scale": 512.0}
    assert "step=3 state=skipped grad_norm=inf loss_scale=512" in caplog.text
    assert math.isnan(logged(callback, math.nan, math.nan)["grad_norm"])
    with pytest.raises(
        PipelineError, match=r"at step 3 gradients overflow fp16 at a loss scale of 0\.5; lower learning"
    ):
        logged(LossScale(scaled(0.5).accelerator.scaler), 2.0, math.nan)


def test_products_of_a_cpu_keep_the_precision_of_fp32():
    left, right = torch.randn(200, 300, generator=torch.manual_seed(0)), torch.randn(300, 100)
    exact = left.double() @ right.double()
    with fast_products("fp32", on_gpu=False):
        found = left @ right
    assert float((found - exact).abs().max() / exact.abs().max()) < 1e-6  # of bf16 it is 1e-3


def test_products_of_a_gpu_or_that_would_be_rounded_keep_the_default_which_comes_back_after_a_failure(monkeypatch):
    with pytest.raises(InterruptedError), fast_products("fp32", on_gpu=False):
        raise InterruptedError
    assert torch.get_float32_matmul_precision() == "highest"
    with fast_products("fp32", on_gpu=True):
        assert torch.get_float32_matmul_precision() == "highest"
    with fast_products("bf16", on_gpu=True):
        assert torch.get_float32_matmul_precision() == "high"  # TF32
    monkeypatch.setattr(kernels, "is_exact", lambda: False)
    with fast_products("fp32", on_gpu=False):
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize(
    ("fields", "precision", "capability", "installed", "expected"),
    [
        ({}, "bf16", (9, 0), ("flash_attn", "flash_attn_interface"), "flash_attention_3"),
        ({}, "fp16", (9, 0), ("flash_attn",), "flash_attention_2"),
        ({}, "bf16", (8, 0), ("flash_attn", "flash_attn_interface"), "flash_attention_2"),
        ({}, "bf16", (10, 0), ("flash_attn", "flash_attn_interface"), "flash_attention_2"),
        ({}, "bf16", (9, 0), (), None),
        ({}, "fp32", (9, 0), ("flash_attn",), None),
        ({}, "bf16", (7, 5), ("flash_attn",), None),
        ({"deterministic": True}, "bf16", (9, 0), ("flash_attn",), None),
        ({"gpus_per_worker": 0}, "bf16", (9, 0), ("flash_attn",), None),
        ({"attention": "eager"}, "bf16", (9, 0), ("flash_attn",), "eager"),
    ],
)
def test_auto_is_the_fastest_attention_that_is_installed(
    monkeypatch, fields, precision, capability, installed, expected
):
    fake_gpu(monkeypatch, capability=capability)
    monkeypatch.setattr(kernels, "find_spec", lambda name: name if name in installed else None)
    assert attention_of(replace(ON_GPU, **fields), precision) == expected


def test_attention_is_multiplied_by_mkl_forward_and_backward_and_the_rest_by_onednn(monkeypatch):
    during = []

    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):
            during.append(torch.get_float32_matmul_precision())
            return query + key + value

        @staticmethod
        def backward(ctx, grads):
            during.append(torch.get_float32_matmul_precision())
            return grads, grads, grads

    def sdpa(*states, **settings):
        return Spy.apply(*states)

    states = [torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3)]
    before = torch.get_float32_matmul_precision()
    with fast_products("fp32", on_gpu=False):
        sdpa_of_cpu(*states, is_causal=True, _sdpa=sdpa).sum().backward()
        assert torch.get_float32_matmul_precision() == "medium"
        sdpa_of_cpu(*(each.detach() for each in states), is_causal=True, _sdpa=sdpa)  # as in generation
        assert torch.get_float32_matmul_precision() == "medium"
    assert during == ["highest"] * 3
    assert torch.get_float32_matmul_precision() == before


def test_models_of_a_training_on_a_cpu_use_that_attention_and_get_the_same_numbers():
    states = [torch.randn(2, 3, 5, 4) for _ in range(3)]
    plain_sdpa = F.scaled_dot_product_attention
    expected = plain_sdpa(*states, is_causal=True)
    with fast_products("fp32", on_gpu=False):
        assert F.scaled_dot_product_attention is sdpa_of_cpu
        torch.testing.assert_close(F.scaled_dot_product_attention(*states, is_causal=True), expected)
    with fast_products("fp32", on_gpu=True):
        assert F.scaled_dot_product_attention is plain_sdpa
    assert F.scaled_dot_product_attention is plain_sdpa


def attended(states, grads, sdpa, **settings):
    """Output of attention and gradients of its inputs."""
    states = [each.detach().requires_grad_() for each in states]
    output = sdpa(*states, is_causal=True, **settings)
    return [output, *torch.autograd.grad(output, states, grads.to(output.dtype))]


@pytest.mark.parametrize("is_autocast", [False, True])
@pytest.mark.parametrize(("length", "kv_heads", "scale"), [(5, 4, None), (128, 4, 0.3), (300, 2, None), (512, 4, None)])
def test_attention_in_bf16_on_a_cpu_is_as_exact_as_torchs_and_the_same_to_the_bit_with_any_threads(
    monkeypatch, length, kv_heads, scale, is_autocast
):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    draw, settings = torch.manual_seed(0), {"scale": scale, "enable_gqa": True}
    # As in a model: dimensions of heads end a layout by tokens.
    drawn = [torch.randn(2, length, heads, 32, generator=draw).transpose(1, 2) for heads in (4, kv_heads, kv_heads, 4)]
    *states, grads = (each.bfloat16() for each in drawn)
    exact = attended([each.double() for each in states], grads, F.scaled_dot_product_attention, **settings)
    torchs = attended(states, grads, F.scaled_dot_product_attention, **settings)
    calls = []
    with fast_products("bf16", on_gpu=False), torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
        given = [each.float() for each in states] if is_autocast else states
        own = partial(sdpa_of_cpu, _sdpa=lambda *states, **settings: calls.append(states))
        found = attended(given, grads, own, **settings)
        threads = torch.get_num_threads()
        torch.set_num_threads(3 - min(threads, 2))
        again = attended(given, grads, own, **settings)
        torch.set_num_threads(threads)
    assert not calls and all(torch.equal(*each) for each in zip(found, again, strict=True))
    for each, of_torch, expected in zip(found, torchs, exact, strict=True):
        assert (each - expected).norm() < 1.5 * (of_torch - expected).norm()


@pytest.mark.parametrize(
    ("length", "dtype", "settings"),
    [
        (513, torch.bfloat16, {}), (8, torch.float32, {}), (8, torch.bfloat16, {"dropout_p": 0.5}),
        (8, torch.bfloat16, {"is_causal": False}),
        (8, torch.bfloat16, {"is_causal": False, "attn_mask": torch.ones(8, 8, dtype=torch.bool)}),
    ],
)  # fmt: skip
def test_attention_of_other_rows_on_a_cpu_is_torchs(monkeypatch, length, dtype, settings):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    states, calls = [torch.randn(1, 2, length, 8, dtype=dtype) for _ in range(3)], []
    with fast_products("bf16", on_gpu=False):
        sdpa = F.scaled_dot_product_attention.__kwdefaults__["_sdpa"]
        found = sdpa_of_cpu(
            *states, **{"is_causal": True, **settings},
            _sdpa=lambda *states, **settings: calls.append(1) or sdpa(*states, **settings),
        )  # fmt: skip
    assert calls and found.shape == states[0].shape


@pytest.mark.slow  # a process that imports everything
def test_grpos_trainer_is_imported_without_bitsandbytes_and_mlflow():
    script = (
        "import sys\nimport tasks.train.light_imports, trl.trainer.grpo_trainer\n"
        "print([each for each in ('bitsandbytes', 'mlflow') if each in sys.modules])\nimport bitsandbytes\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
