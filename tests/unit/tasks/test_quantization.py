"""The formats of quantized bases: what each reads, what it needs, and what is part of a recipe."""

import importlib.util
from dataclasses import fields

import pytest

from flows.declare.config import CONF, load_pipeline
from flows.planning.checks import compile_notes
from flows.planning.model_checks import check_models
from lineage.errors import ConfigError
from lineage.source.model_files import quantization_format
from tasks.method import Adapter, Quantization
from tasks.sft import SFT
from tasks.train.models import quantization
from tasks.train.models.quantization import FORMATS, missing, why_not_on_quantized

SFT_FIELDS = {"learning_rate": 1e-3, "num_steps": 3, "global_batch_size": 8, "max_length": 64}
VALUES = {"double": False, "compute_dtype": "bf16", "storage_dtype": "bf16", "group_size": 32}
ON_LOAD = [name for name, row in FORMATS.items() if row.rounds]


def recipe(**values):
    return SFT(**SFT_FIELDS, adapter=Adapter(), quantization=Quantization(**values)).recipe()


@pytest.mark.parametrize("name", ON_LOAD)
def test_a_format_takes_the_options_that_it_reads_and_refuses_the_others(name):
    assert set(VALUES) | {"format", "skip_modules", "merge"} == {each.name for each in fields(Quantization)}
    for option, value in VALUES.items():
        if option in FORMATS[name].reads:
            Quantization(format=name, **{option: value})
            continue
        with pytest.raises(ConfigError, match=rf"quantization.{option}=.*{name} has no such field; .* to one of \w+"):
            Quantization(format=name, **{option: value})


@pytest.mark.parametrize("name", sorted(FORMATS.keys() - set(ON_LOAD) - {"hqq", "torchao_int8_dynamic"}))
def test_a_format_that_only_models_come_in_is_refused_with_what_is_accepted(name):
    with pytest.raises(ConfigError, match=rf"quantization.format={name}: .*model=\.\.\. .*accepted"):
        Quantization(format=name)


@pytest.mark.parametrize("name", [name for name in ON_LOAD if not FORMATS[name].dequantizes])
def test_a_merge_into_weights_that_cannot_be_dequantized_is_refused(name):
    Quantization(format=name)
    with pytest.raises(ConfigError, match=r"merge=dequantized: .*set quantization.merge=original"):
        Quantization(format=name, merge="dequantized")


def test_defaults_are_the_recipe_of_nf4_as_before_it_had_options():
    plain = recipe(format="nf4")
    assert plain["adapter"]["quantization"] == "nf4" and "quantization" not in plain
    assert recipe(format="nf4", double=True, merge="original", storage_dtype="bf16") == plain


@pytest.mark.parametrize(
    "values",
    [{"double": False}, {"compute_dtype": "bf16"}, {"skip_modules": "q_proj"}, {"merge": "dequantized"}],
    ids=lambda values: next(iter(values)),
)
def test_what_changes_the_model_is_part_of_the_recipe(values):
    assert recipe(format="nf4", **values)["quantization"] == values


def test_each_format_that_is_made_on_load_is_a_group():
    assert {path.stem for path in (CONF / "quantization").glob("*.yaml")} == {*ON_LOAD, "none"}


@pytest.mark.parametrize("name", [name for name in ON_LOAD if FORMATS[name].gpu])
def test_the_plan_refuses_a_format_that_needs_a_gpu_without_one(name):
    with pytest.raises(ConfigError, match=rf"quantization.format={name}.*set stages.cpt.*format=nf4"):
        load_pipeline(["adapter=lora", f"quantization={name}", "tracking=none"])
    assert f"{name} needs a GPU; set resources.gpus_per_worker=1, or a format that needs none: nf4" in missing(
        name, on_gpu=False
    )


def test_the_plan_refuses_a_format_that_transformers_cannot_load():
    for gpus in (0, 1):
        words = ["adapter=lora", "quantization.format=hqq", "tracking=none", f"resources.gpus_per_worker={gpus}"]
        with pytest.raises(ConfigError, match=r"format=hqq: transformers 5\.24 cannot load weights in it; set .* nf4"):
            load_pipeline(words)


def test_int4_of_quanto_needs_a_compiler(monkeypatch):
    assert missing("quanto_int8", on_gpu=False) == missing("quanto_int8", on_gpu=True)
    monkeypatch.setattr(quantization, "_is_installed", lambda _module: True)
    for found in ({"c++", "ninja"}, {"g++", "ninja"}, {"c++"}, {"ninja"}, set()):
        monkeypatch.setattr(quantization.shutil, "which", lambda name, found=found: name if name in found else None)
        lacking = missing("quanto_int4", on_gpu=False)
        assert lacking is None if len(found) == 2 else "compiles C++ at its first training" in lacking
        assert missing("quanto_int8", on_gpu=False) is None


def test_the_plan_says_that_int4_of_quanto_compiles_first(monkeypatch, tmp_path):
    monkeypatch.setattr(quantization, "_is_installed", lambda _module: True)
    monkeypatch.setattr(quantization, "_build", lambda: tmp_path / "pytorch_version.txt")
    words = ["adapter=lora", "quantization=quanto_int4", "tracking=none", "stages.reward.method.precision=fp32"]
    stages = load_pipeline(words).stages
    [note] = compile_notes(stages)
    assert note.startswith("cpt: quantization.format=quanto_int4 compiles C++ before its first step")
    (tmp_path / "pytorch_version.txt").touch()
    assert compile_notes(stages) == []
    assert compile_notes(load_pipeline(["adapter=lora", "quantization=quanto_int8", "tracking=none"]).stages) == []


@pytest.mark.parametrize(
    ("name", "module", "command"),
    [
        ("torchao_int8", "torchao", 'pip install "posttrain[torchao]"'),
        ("torchao_float8", "torchao", 'pip install "posttrain[torchao]"'),
        ("quanto_int4", "optimum", 'pip install "posttrain[quanto]"'),
        ("eetq", "kernels", "pip install kernels"),
        ("fp8", "kernels", "pip install kernels"),
    ],
)
def test_the_plan_refuses_a_format_without_its_package_and_says_how_to_install_it(monkeypatch, name, module, command):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        quantization.importlib.util, "find_spec",
        lambda each: None if each.partition(".")[0] == module else found(each),
    )  # fmt: skip
    gpu = ["resources.gpus_per_worker=1"] if FORMATS[name].gpu else []
    pipeline = load_pipeline(["adapter=lora", f"quantization={name}", "tracking=none", *gpu])
    with pytest.raises(ConfigError, match="is not installed; run: ") as refused:
        check_models(pipeline)
    assert str(refused.value).endswith(command)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "bitsandbytes nf4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes int8"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_the_format_of_a_model_is_read_from_its_config(config, found):
    assert quantization_format({"quantization_config": config}) == found
    assert quantization_format({"text_config": {"quantization_config": config}}) == found


@pytest.mark.parametrize(
    ("found", "fields", "reason"),
    [
        ("bitsandbytes nf4", {}, None),
        ("bitsandbytes int8", {}, None),
        ("mxfp4", {}, None),
        ("fp8", {}, None),
        ("bitsandbytes nf4", {"adapter": False}, "its weights cannot be trained; set adapter=lora"),
        ("mxfp4", {"adapter": False}, "its weights cannot be trained; set adapter=lora"),
        ("bitsandbytes nf4", {"quantization": Quantization(format="nf4")}, "would round it again"),
        ("gptq", {}, "gptq needs a GPU; set resources.gpus_per_worker=1"),
        ("gptq", {"on_gpu": True}, "pip install gptqmodel optimum, which needs torch>=2.14"),
        ("awq", {"on_gpu": True}, "pip install gptqmodel"),
        ("aqlm", {"on_gpu": True}, 'pip install "aqlm'),
        ("spqr", {}, "no adapter was trained on this format yet; accepted: bitsandbytes nf4"),
    ],
)
def test_what_can_be_trained_on_a_model_that_was_quantized_before(found, fields, reason):
    options = {"adapter": True, "quantization": None, "saves_adapter": False, "on_gpu": False, **fields}
    message = why_not_on_quantized(found, **options)
    assert message is None if reason is None else reason in message


def test_a_model_that_cannot_be_dequantized_keeps_its_adapter_apart(monkeypatch):
    monkeypatch.setattr(quantization, "_is_installed", lambda module: True)
    options = {"adapter": True, "quantization": None, "on_gpu": True}
    assert "set save=adapter" in why_not_on_quantized("gptq", saves_adapter=False, **options)
    assert why_not_on_quantized("gptq", saves_adapter=True, **options) is None


@pytest.mark.parametrize("name", ["nf4", "fp4", "int8"])
def test_formats_of_bitsandbytes_need_nothing_more(name):
    pipeline = load_pipeline(["adapter=lora", f"quantization={name}", "tracking=none"])
    check_models(pipeline)
    assert {getattr(each.method, "quantization", None) for each in pipeline.stages.values()} == {
        None,
        Quantization(format=name),
    }
