"""What the plan decides and refuses about precision and kernels."""

import json

import pytest

from flows.declare.config import load_pipeline
from flows.operate import certify
from flows.planning import checks
from flows.planning.plan import make_plan
from flows.reports.run import plan_table
from lineage.errors import ConfigError
from lineage.record.environment import current_signature
from tests.command import Command

TRAINED = ("cpt", "sft", "reward", "dpo")


def precisions(*overrides: str) -> list[str]:
    stages = load_pipeline(list(overrides)).stages
    return [stages[name].method.precision for name in TRAINED]


def test_precision_of_the_root_is_that_of_every_stage_that_sets_none():
    assert precisions() == ["fp32"] * 4
    assert precisions("precision=bf16", "stages.dpo.method.precision=fp32") == ["bf16"] * 3 + ["fp32"]
    assert load_pipeline([]).stages == load_pipeline(["precision=fp32"]).stages


def test_on_a_gpu_trainings_are_in_bf16_unless_the_root_or_the_stage_says_otherwise():
    assert precisions("resources=gpu") == ["bf16"] * 4
    assert precisions("resources=gpu", "precision=fp32") == ["fp32"] * 4
    assert precisions("resources=gpu", "stages.sft.method.precision=fp16") == ["bf16", "fp16", "bf16", "bf16"]


def test_auto_becomes_what_the_resources_have_and_the_plan_says_so():
    overrides = ["precision=auto", "stages.dpo.resources.gpus_per_worker=1"]
    assert precisions(*overrides) == ["fp32"] * 3 + ["bf16"]
    plan = make_plan(load_pipeline(overrides))
    assert "stages.cpt.method.precision=auto: fp32, because gpus_per_worker=0" in plan.notes
    assert "stages.dpo.method.precision=auto: bf16, because gpus_per_worker=1" in plan.notes
    configured = make_plan(
        load_pipeline(["stages.dpo.resources.gpus_per_worker=1", "stages.dpo.method.precision=bf16"])
    )
    assert [each.fingerprint for each in plan.stages] == [each.fingerprint for each in configured.stages]
    assert plan.stage("dpo").stage.method.recipe()["precision"] == "bf16"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["precision=fp16"],
            r"stages.cpt: method.precision=fp16, resources.gpus_per_worker=0: .* set stages.cpt.method.precision=bf16",
        ),
        (
            ["precision=fp16", "resources.gpus_per_worker=1", "resources=zero2"],
            r"precision=fp16, resources.sharding=zero2: .* set stages.cpt.method.precision=bf16",
        ),
        (["resources.gradient_checkpointing=0"], r"gradient_checkpointing.*greater than 0"),
        (["resources.gradient_checkpointing=some"], r"gradient_checkpointing"),
        (["precision=ms_amp"], r"precision=ms_amp: MS-AMP is abandoned.*set precision=fp8"),
        (["stages.sft.method.precision=MS-AMP"], r"precision=MS-AMP: MS-AMP is abandoned.*set precision=fp8"),
        (["precision=half"], r'precision="half": input should be .*fp16'),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        make_plan(load_pipeline(overrides))


def test_compilation_on_a_cpu_needs_a_compiler(monkeypatch):
    pipeline = load_pipeline(["resources.compile=true"])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"there is no no-such-compiler on this machine; install it .*compile=false"):
        make_plan(pipeline)
    monkeypatch.setenv("RAY_ADDRESS", "auto")  # the machine that compiles is another one
    make_plan(pipeline)


@pytest.mark.parametrize(
    ("override", "package"),
    [
        ("resources.attention=flash_attention_2", "flash_attn"),
        ("resources.attention=flash_attention_3", "flash_attn_interface"),
        ("resources.liger=true", "liger_kernel"),
        ("precision=fp8", "torchao"),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_install_command(monkeypatch, override, package):
    pipeline = load_pipeline(["resources=gpu", override])
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    asked = override.replace("precision", "method.precision")
    with pytest.raises(ConfigError, match=rf"{asked}: the package {package} is not installed; install it .*, or set "):
        make_plan(pipeline)
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    make_plan(pipeline)


@pytest.mark.parametrize(("capability", "is_refused"), [("9.0", False), ("8.9", False), ("8.6", True), ("12.0", False)])
def test_fp8_needs_a_gpu_that_multiplies_in_it(monkeypatch, capability, is_refused):
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    monkeypatch.setattr(checks, "list_gpus", lambda *_: [f"NVIDIA A40, {capability}"])
    pipeline = load_pipeline(["resources=gpu", "precision=fp8"])
    if not is_refused:
        checks.check_kernels(pipeline)
        return
    with pytest.raises(ConfigError, match=r"precision=fp8: NVIDIA A40 has compute capability 8\.6, and 8\.9 "):
        checks.check_kernels(pipeline)


@pytest.mark.parametrize(
    ("value", "every"), [("off", None), ("on", 1), ("true", 1), ("false", None), ("3", 3), ("1", 1)]
)
def test_activations_of_every_nth_layer_are_recomputed(value, every):
    pipeline = load_pipeline([f"resources.gradient_checkpointing={value}"])
    assert pipeline.stages["sft"].resources.checkpointed_layers == every


@pytest.mark.parametrize(
    ("value", "on_cpu", "on_gpu"), [("auto", True, False), ("true", True, True), ("false", False, False)]
)
def test_kernels_are_deterministic_on_cpus_and_on_gpus_when_asked(value, on_cpu, on_gpu):
    overrides = [f"resources.deterministic={value}", "stages.dpo.resources.gpus_per_worker=1"]
    stages = load_pipeline(overrides).stages
    assert stages["sft"].resources.is_deterministic == on_cpu
    assert stages["dpo"].resources.is_deterministic == on_gpu


def test_what_is_frozen_is_in_bf16_on_a_gpu():
    overrides = ["resources=gpu", "stages.sft.method.precision=fp32", "stages.reward.resources.gpus_per_worker=0"]
    stages = load_pipeline([*overrides, "stages.evaluate.resources.weights=fp32"]).stages
    found = {
        name: stage.resources.frozen_dtype(getattr(stage.method, "precision", None)) for name, stage in stages.items()
    }
    assert [found[name] for name in ("cpt", "sft", "reward", "dpo", "evaluate")] == [
        "bf16",
        "fp32",
        "fp32",
        "bf16",
        "fp32",
    ]
    assert load_pipeline(["resources=gpu"]).stages["evaluate"].resources.frozen_dtype(None) == "bf16"
    assert load_pipeline([]).stages["evaluate"].resources.frozen_dtype(None) == "fp32"


def test_a_certificate_is_made_with_deterministic_kernels_unless_the_stage_says_otherwise():
    stages = load_pipeline(["resources=gpu", "stages.dpo.resources.deterministic=false"]).stages
    assert [certify._deterministic(stages[name]).resources.is_deterministic for name in ("sft", "dpo")] == [True, False]


def test_a_certificate_from_before_is_of_the_same_environment():
    before = {"gpus_per_worker": 0, "deterministic": True}
    now = {**before, "deterministic": "auto", "gradient_checkpointing": "off", "compile": False}
    assert current_signature(before, {}) == current_signature(now, {})
    assert (
        current_signature({**now, "compile": True}, {})
        != current_signature(now, {})
        != current_signature({**now, "gpus_per_worker": 1}, {})
    )


@pytest.mark.parametrize(
    ("flags", "found"),
    [("fpu avx512_bf16 sse", "avx512_bf16"), ("avx512_bf16 amx_bf16", "amx_bf16"), ("fpu avx512f", None)],
)
def test_bf16_is_suggested_where_the_cpu_has_instructions_for_it(tmp_path, monkeypatch, flags, found):
    (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags : {flags}\n")
    monkeypatch.setattr(checks, "_CPU_FLAGS", tmp_path / "cpuinfo")
    stages = load_pipeline(["stages.sft.method.precision=bf16", "stages.dpo.resources.gpus_per_worker=1"]).stages
    expected = [
        f"precision=bf16 would train cpt, reward faster, into another model: this CPU has {found} (docs/performance.md)"
    ]
    sft = {"sft": stages["sft"], "evaluate": stages["evaluate"]}
    if found:
        assert checks.bf16_notes(stages) == expected
        assert checks.bf16_notes(sft) == []
        assert checks.bf16_notes(stages, [*stages]) == []
    else:
        (note,) = checks.bf16_notes(sft)
        assert "precision=bf16 of sft: this CPU has no instructions for it (amx_bf16, avx512_bf16)" in note
        assert checks.bf16_notes({"cpt": stages["cpt"]}) == []
    monkeypatch.setattr(checks, "_CPU_FLAGS", tmp_path / "nothing")
    assert checks.bf16_notes(stages) == []


def test_the_command_prints_the_suggestion(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text("flags : amx_bf16\n")
    monkeypatch.setattr(checks, "_CPU_FLAGS", tmp_path / "cpuinfo")
    document = json.loads(Command(tmp_path, "tracking=none")("plan", "--json").stdout)
    assert any("this CPU has amx_bf16" in note for note in document["notes"])


def test_what_a_gpu_computes_with_is_in_the_plan_with_its_reason():
    plan = make_plan(load_pipeline(["resources=gpu", "stages.sft.resources.liger=false"]))
    text = plan_table(plan)
    assert "sft: layers by transformers (resources.liger=false)" in text
    assert "dpo: layers by " in text and "evaluate: answers by a CUDA graph a token where the architecture" in text
    rows = {row["stage"]: row for row in plan.to_dict()["stages"]}
    assert rows["sft"]["kernels"] == {"layers": "transformers (resources.liger=false)"}
    assert not any("kernels" in row for row in make_plan(load_pipeline([])).to_dict()["stages"])


def test_fp16_on_a_gpu_is_planned():
    plan = make_plan(load_pipeline(["resources=gpu", "precision=fp16"]))
    assert plan.stage("dpo").stage.method.recipe()["precision"] == "fp16"
