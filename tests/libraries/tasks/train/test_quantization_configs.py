"""Formats that need a GPU or a package are written through transformers' own configurations."""

import pytest
import torch
from transformers import BitsAndBytesConfig, EetqConfig, FineGrainedFP8Config, Mxfp4Config

from tasks.method import Quantization
from tasks.train.models.quantization import options_quantized_before
from tasks.train.models.quantized_base import Quantizer


def config_of(skip=None, device="cpu", **fields):
    quantizer = Quantizer(setting=Quantization(**fields), compute_dtype=torch.bfloat16, device=device)
    options = quantizer.options(skip)
    assert options["device_map"] == {"": device}
    return options["quantization_config"]


def test_eetq_and_fp8_are_written_as_transformers_names_them():
    eetq = config_of(format="eetq", skip=["lm_head", "q_proj"], device="cuda:0")
    assert isinstance(eetq, EetqConfig)
    assert (eetq.weights, eetq.modules_to_not_convert) == ("int8", ["lm_head", "q_proj"])
    fp8 = config_of(format="fp8", skip=["lm_head", "q_proj"], device="cuda:0")
    assert isinstance(fp8, FineGrainedFP8Config)
    assert (fp8.modules_to_not_convert, fp8.dequantize) == (["lm_head", "q_proj"], False)


def test_fields_of_bitsandbytes_reach_its_configuration():
    four = config_of(format="fp4", double=False, storage_dtype="fp16", skip=["lm_head"])
    assert isinstance(four, BitsAndBytesConfig)
    assert (four.load_in_4bit, four.bnb_4bit_quant_type, four.bnb_4bit_use_double_quant) == (True, "fp4", False)
    assert (four.bnb_4bit_compute_dtype, four.bnb_4bit_quant_storage) == (torch.bfloat16, torch.float16)
    assert four.llm_int8_skip_modules == ["lm_head"]
    eight = config_of(format="int8")
    assert (eight.load_in_8bit, eight.llm_int8_skip_modules) == (True, None)


@pytest.mark.parametrize(("found", "config"), [("fp8", FineGrainedFP8Config), ("mxfp4", Mxfp4Config)])
def test_a_model_in_fp8_or_mxfp4_is_dequantized_as_it_is_loaded(found, config):
    given = options_quantized_before(found)["quantization_config"]
    assert isinstance(given, config) and given.dequantize
    assert options_quantized_before("bitsandbytes nf4") == {}
