"""``posttrain export``: what is written is loaded again by public programs and is the same model; its record stays."""

import json
import math
import re
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from flows.serving.ollama import _go, _texts, modelfile
from lineage.errors import ConfigError
from lineage.source.model_source import template_families
from lineage.store import Store
from tasks.model.adapter_files import Base
from tasks.model.chat_template import CHATML
from tasks.model.fetch_model import named_splits
from tasks.model.gguf_file import BOUNDS, _splits
from tests import tiny
from tests.command import call
from tests.model_directories import edit, write_adapter
from tests.tiny_models import write_model
from tests.written_store import WrittenStore

pytest.importorskip("gguf")
TEXT = "the list returns a new sorted copy of items in order"
WIDE = {"initializer_range": 0.3}  # so that a wrong weight moves a text by more than rounding does
# Families with settings of their own that GGUF carries, or that transformers assumes where it reads one.
FAMILIES: dict[str, dict[str, object]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 128},
    "gemma2": {"query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 16},
    "gemma3_text": {"query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 16},
}
# Of these transformers reads not all settings that llama.cpp does: that many are named.
MIXTURES: dict[str, dict[str, object]] = {
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
    },
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
        "head_dim": 128, "decoder_sparse_step": 1,
    },
    "mixtral": {"intermediate_size": 32},
}  # fmt: skip
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 10000.0,
}  # fmt: skip

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def export(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return call(["export", *overrides], folder, {})


def exported(folder: Path, *overrides: str) -> dict:
    ran = export(folder, *overrides, "--json")
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def logits(model) -> torch.Tensor:
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        return model(ids).logits.float()


def loaded(directory: Path, **options: object):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)


@pytest.fixture
def store(tmp_path: Path) -> WrittenStore:
    """A base, and an adapter on it (save=adapter)."""
    store = WrittenStore(tmp_path / "artifacts")
    rows = {"rows": store.source("chats", labels=["cc-by-4.0"])}
    recipe = {"recipe": {"learning_rate": 0.1}, "metrics": {"loss": 1.5}}
    target = Store(store.root).entry("base", store.stage("base", rows).fingerprint).output
    tiny.write_policy(target, initializer_range=0.3)
    made = store.stage("base", rows)
    place = Store(store.root).entry("sft", store.stage("sft", {"policy": made}, **recipe).fingerprint).output
    write_adapter(place, target)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(target / name, place / name)
    Base(name="base", fingerprint=made.fingerprint, digest=made.output_digest).write(place)
    store.stage("sft", {"policy": made}, **recipe)
    store.base, store.sft = target, place
    return store


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_merged_export_holds_every_adapter_in_16_bits_and_loads_alone(store, tmp_path, dtype):
    from peft import PeftModel

    found = exported(tmp_path, "merged", "p/sft", "--dtype", dtype, "--out", "out")
    out = tmp_path / "out"
    assert (found["form"], found["place"], found["recorded"]) == ("merged", str(out), True)
    assert {each.dtype for each in AutoModelForCausalLM.from_pretrained(out).parameters()} == {
        {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    }
    adapted = PeftModel.from_pretrained(loaded(store.base), store.sft).merge_and_unload()
    for parameter in adapted.parameters():
        parameter.data = parameter.data.to(torch.bfloat16 if dtype == "bf16" else torch.float16).float()
    assert torch.allclose(logits(loaded(out)), logits(adapted), atol=1e-4)
    assert 0 < found["golden"]["difference"] < 0.05
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (out / name).read_bytes() == (store.base / name).read_bytes()
    again = export(tmp_path, "merged", "p/sft", "--out", "out")
    assert again.returncode == 2 and "is there already" in again.stderr


def test_an_export_is_in_the_lineage_and_verified_as_long_as_it_is_there(store, tmp_path):
    overrides = ("store=artifacts", "tracking=none")
    exported(tmp_path, "merged", "p/base", "--out", "out")
    exported(tmp_path, "gguf", "p/base", "--out", "base.gguf")
    shown = call(["lineage", "p/sft"], tmp_path, {}).stdout
    assert "exported merged bf16 to out" in shown and "exported gguf f16" in shown
    nodes = json.loads(call(["lineage", "p/sft", "--json"], tmp_path, {}).stdout)["nodes"]
    assert [len(each.get("exports", ())) for each in nodes if each["name"] in ("sft", "base")] == [0, 2]

    def findings() -> dict[str, str]:
        ran = call(["verify", "--json", *overrides], tmp_path, {})
        found = json.loads(ran.stdout)["findings"]
        return {each["what"].partition("@")[0]: each["fault"] for each in found if " of base@" in each["what"]}

    assert findings() == {}
    (tmp_path / "base.gguf").unlink()
    (tmp_path / "out" / "config.json").write_text("{}")
    assert findings() == {"merged of base": "changed", "gguf of base": "note"}


@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_a_gguf_file_back_as_the_same_model(tmp_path, family, kind):
    settings = {**WIDE, **FAMILIES[family]}
    write_model(tmp_path / "model", family, **settings)
    found = exported(tmp_path, "gguf", "model", "--type", kind, "--out", "m.gguf")
    assert found["golden"]["difference"] <= BOUNDS[kind] and not found["recorded"]
    options = {"gguf_file": "m.gguf", "quantization_config": GgufConfig(dequantize=True)}
    model, back = loaded(tmp_path / "model"), loaded(tmp_path, **options)
    if kind == "f16":  # rounded to 16 bits, and nothing else
        for parameter in model.parameters():
            parameter.data = parameter.data.half().float() if parameter.ndim > 1 else parameter.data
        assert torch.allclose(logits(back), logits(model), atol=1e-4)
    assert not torch.equal(logits(back), logits(loaded(tmp_path / "model")))
    ours, theirs = (
        AutoTokenizer.from_pretrained(tmp_path / "model"),
        AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf"),
    )
    chat = [{"role": "user", "content": TEXT}]
    assert ours.apply_chat_template(chat, add_generation_prompt=True) == theirs.apply_chat_template(
        chat, add_generation_prompt=True
    )
    assert (ours.eos_token, ours.pad_token) == (theirs.eos_token, theirs.pad_token)


def tensors(path: Path) -> dict[str, object]:
    from gguf import GGUFReader

    return {each.name: each for each in GGUFReader(path).tensors}


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_of_experts_is_written_with_each_expert(tmp_path, family):
    from gguf import GGUFReader

    write_model(tmp_path / "model", family, **WIDE, **MIXTURES[family])
    ran = export(tmp_path, "gguf", "model", "--out", "m.gguf")
    assert ran.returncode == 0, ran.stderr
    of_experts, name = ("feed_forward_length", "llama"), family.replace("_", "")
    lost = "num_experts_per_tok, num_local_experts"
    if family != "mixtral":
        of_experts, lost = ("expert_feed_forward_length", name), "moe_intermediate_size"
    assert f"note: transformers does not read {lost}" in ran.stderr  # and llama.cpp does
    fields, name = GGUFReader(tmp_path / "m.gguf").fields, of_experts[1]
    assert fields[f"{name}.expert_count"].contents() == 4 and fields[f"{name}.expert_used_count"].contents() == 2
    assert fields[f"{name}.{of_experts[0]}"].contents() == 32
    found, state = tensors(tmp_path / "m.gguf"), loaded(tmp_path / "model").state_dict()
    joined = state["model.layers.1.mlp.experts.gate_up_proj"].half().numpy()
    assert (found["blk.1.ffn_gate_exps.weight"].data == joined[:, :32]).all()
    assert (found["blk.1.ffn_up_exps.weight"].data == joined[:, 32:]).all()
    assert found["blk.1.ffn_gate_inp.weight"].tensor_type.name == "F32"


def test_scaled_rotary_positions_are_written_as_llama_cpp_reads_them(tmp_path):
    from gguf import GGUFReader

    write_model(tmp_path / "model", "llama", **WIDE)
    edit(tmp_path / "model" / CONFIG, rope_parameters=LLAMA_3)
    ran = export(tmp_path, "gguf", "model", "--out", "m.gguf")
    assert ran.returncode == 0 and "note: transformers does not read rope_parameters" in ran.stderr, ran.stderr
    factors = tensors(tmp_path / "m.gguf")["rope_freqs.weight"].data
    head = loaded(tmp_path / "model").config.head_dim
    # By llama.cpp's own conversion: 1 for short waves, the factor for long ones, and a line between.
    wished = []
    for at in range(0, head, 2):
        wave = 2 * math.pi * 10000.0 ** (at / head)
        smooth = (32 / wave - 1.0) / 3.0
        wished.append(1.0 if wave < 8 else 8.0 if wave > 32 else 1 / ((1 - smooth) / 8.0 + smooth))
    assert factors.tolist() == pytest.approx(wished, rel=1e-5) and 1.0 < max(wished) != min(wished)
    edit(tmp_path / "model" / CONFIG, rope_parameters=LINEAR)
    assert export(tmp_path, "gguf", "model", "--out", "linear.gguf").returncode == 0
    fields = GGUFReader(tmp_path / "linear.gguf").fields
    assert fields["llama.rope.scaling.type"].contents() == "linear"
    assert fields["llama.rope.scaling.factor"].contents() == 2.0


@pytest.mark.parametrize("own", [{}, {"beta_fast": 32.0, "beta_slow": 1, "attention_factor": 1.4}])
def test_yarn_is_written_as_llama_cpp_reads_it(tmp_path, own):
    """The rotations that llama.cpp computes from the file are those of the model."""
    from gguf import GGUFReader

    write_model(tmp_path / "model", "llama", **WIDE, head_dim=32)
    edit(tmp_path / "model" / CONFIG, rope_parameters={**YARN, **own})
    exported(tmp_path, "gguf", "model", "--out", "m.gguf")
    fields = GGUFReader(tmp_path / "m.gguf").fields
    reported = {key.partition("scaling.")[2]: each.contents() for key, each in fields.items() if "scaling." in key}
    assert reported["type"] == "yarn" and reported["original_context_length"] == 64
    rotary, head = loaded(tmp_path / "model").model.rotary_emb, 32

    assert not {"yarn_beta_fast", "yarn_beta_slow"} & reported.keys(), "llama.cpp reads them of no file of a llama"

    def turns(beta: float) -> float:
        return head * math.log(64 / (beta * 2 * math.pi)) / (2 * math.log(10000.0))

    low = max(0, math.floor(turns(32.0)))
    high = min(head - 1, math.ceil(turns(1.0)))
    for at, frequency in enumerate(rotary.inv_freq.tolist()):
        kept = 1 - min(1.0, max(0.0, (at - low) / max(0.001, high - low)))
        plain = 10000.0 ** (-2 * at / head)
        assert frequency == pytest.approx(plain / reported["factor"] * (1 - kept) + plain * kept, rel=1e-5)
    scaled = (1 + 0.1 * math.log(reported["factor"])) * reported.get("attn_factor", 1.0)
    assert rotary.attention_scaling == pytest.approx(scaled, rel=1e-6)


def test_longrope_is_written_with_the_factors_of_short_and_long_texts(tmp_path):
    from gguf import GGUFReader

    write_model(tmp_path / "model", "llama", **WIDE)
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0]}
    edit(tmp_path / "model" / CONFIG, rope_parameters={**YARN, "rope_type": "longrope", **factors})
    ran = export(tmp_path, "gguf", "model", "--out", "m.gguf")
    assert ran.returncode == 0 and "for all texts where its context (-c) is above 64 tokens" in ran.stderr, ran.stderr
    fields, found = GGUFReader(tmp_path / "m.gguf").fields, tensors(tmp_path / "m.gguf")
    for name, values in factors.items():
        assert found[f"rope_factors_{name.partition('_')[0]}.weight"].data.tolist() == pytest.approx(values)
    scaling = loaded(tmp_path / "model").model.rotary_emb.attention_scaling
    assert fields["llama.rope.scaling.attn_factor"].contents() == pytest.approx(scaling, rel=1e-6) != 1.0
    assert fields["llama.rope.scaling.original_context_length"].contents() == 64


# A process of its own, whose server llama.cpp ends with it: the likeliest token after each beginning of a text.
LLAMA_CPP = """
import json, sys
import xllamacpp
settings = xllamacpp.CommonParams()
settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = sys.argv[1], 256, 1, False
settings.cpuparams.n_threads = 1
settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
server, ids, found = xllamacpp.Server(settings), json.loads(sys.argv[2]), []
for end in range(20, len(ids)):
    asked = {"prompt": ids[:end], "max_tokens": 1, "temperature": 0, "cache_prompt": False, "logprobs": 1}
    tops = (server.handle_completions(asked)["choices"][0].get("logprobs") or {}).get("content")  # not of half a letter
    found.append((tops[0]["id"], tops[0]["logprob"]) if tops else None)
print("\\nfound", json.dumps(found))
"""
AS_IN_LLAMA_CPP = {
    **{name: (name, fields, {}) for name, fields in (FAMILIES | MIXTURES).items()},
    "llama-3": ("llama", {}, LLAMA_3), "linear": ("llama", {}, LINEAR), "yarn": ("llama", {"head_dim": 32}, YARN),
    "yarn-attention": ("llama", {"head_dim": 32}, {**YARN, "attention_factor": 1.4}),
    "longrope": ("llama", {}, {  # of a context that is not longer than the original one
        **YARN, "rope_type": "longrope", "original_max_position_embeddings": 256,
        "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 3.0, 4.0],
    }),
    "sentencepiece": ("llama", {"vocab_size": 400}, {}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", BOUNDS)
@pytest.mark.parametrize("name", AS_IN_LLAMA_CPP)
def test_llama_cpp_itself_computes_the_log_probabilities_of_the_model(tmp_path, name, kind):
    pytest.importorskip("xllamacpp")
    family, fields, rope = AS_IN_LLAMA_CPP[name]
    write_model(tmp_path / "model", family, **WIDE, **fields)
    if rope:
        edit(tmp_path / "model" / CONFIG, rope_parameters=rope)
    if name == "sentencepiece":
        sentencepiece(tmp_path / "model", "llama")
    exported(tmp_path, "gguf", "model", "--type", kind, "--out", "m.gguf")
    ids = torch.randint(3, 250, (1, 44), generator=torch.Generator().manual_seed(0))
    model = loaded(tmp_path / "model").eval()
    for weight in model.parameters():
        weight.data = weight.data.half().float() if weight.ndim > 1 else weight.data
    with torch.inference_mode():
        expected = model(ids).logits[0, 19:-1].float().log_softmax(-1)
    overrides = [sys.executable, "-c", LLAMA_CPP, str(tmp_path / "m.gguf"), json.dumps(ids[0].tolist())]
    ran = subprocess.run(overrides, capture_output=True, text=True, timeout=120, check=False)
    (line,) = re.findall("^found (.*)$", ran.stdout, re.MULTILINE) or [ran.stderr]
    found = [(at, *each) for at, each in enumerate(json.loads(line)) if each]
    assert len(found) > 8
    bound = 0.05 if kind == "f16" else 0.5
    for at, token, logprob in found:
        assert logprob == pytest.approx(expected[at, token].item(), abs=bound)
        assert expected[at].max() - expected[at, token] < bound, "the likeliest one, but for rounding"


def sentencepiece(folder: Path, kind: str) -> None:
    """Gives a model the tokenizer of Llama 2 or Gemma: merges by the scores of tokens, bytes for the others."""
    from transformers import GemmaTokenizer, LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    overrides = ["▁the", "▁list", "▁sorted", "▁order", "▁returns", "▁copy", "▁items"]
    pieces = [word[:end] for word in overrides for end in range(2, len(word) + 1)]
    letters = sorted(set("".join(overrides)) | set("abcdefghijklmnopqrstuvwxyz0123456789.,!?"))
    special = ["<pad>", "<eos>", "<bos>", "<unk>"] if kind == "gemma2" else ["<unk>", "<s>", "</s>"]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(pieces), *letters]
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    scores = {token: -float(index) for token, index in vocabulary.items()}
    merges = generate_merges({token: at for token, at in vocabulary.items() if at >= 256 + len(special)}, scores)
    tokenizer = (GemmaTokenizer if kind == "gemma2" else LlamaTokenizer)(vocab=vocabulary, merges=merges)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)


def test_a_sentencepiece_tokenizer_in_its_older_form_is_written_too(tmp_path):
    """Spaces are replaced before the splits, and one is put before each text."""
    write_model(tmp_path / "model", "llama", vocab_size=400, **WIDE, **FAMILIES["llama"])
    sentencepiece(tmp_path / "model", "llama")
    steps = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
    edit(tmp_path / "model" / TOKENIZER, normalizer={"type": "Sequence", "normalizers": steps}, pre_tokenizer=None)
    exported(tmp_path, "gguf", "model", "--out", "m.gguf")
    merges = json.loads((tmp_path / "model" / TOKENIZER).read_text())["model"]["merges"]
    fewer = json.loads((tmp_path / "model" / TOKENIZER).read_text())["model"] | {"merges": merges[:-1]}
    edit(tmp_path / "model" / TOKENIZER, model=fewer)
    ran = export(tmp_path, "gguf", "model", "--out", "other.gguf")
    assert ran.returncode == 2 and "SentencePiece BPE as of Llama 2" in ran.stderr


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2"])
def test_a_sentencepiece_tokenizer_is_written_with_the_scores_of_its_tokens(tmp_path, family):
    from gguf import GGUFReader, TokenType

    write_model(tmp_path / "model", family, vocab_size=400, **WIDE, **FAMILIES[family])
    sentencepiece(tmp_path / "model", family)
    exported(tmp_path, "gguf", "model", "--out", "m.gguf")
    fields = GGUFReader(tmp_path / "m.gguf").fields
    reported = {
        name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "tokens", "scores", "token_type")
    }
    begins = family != "gemma2"  # a text, with a space
    assert reported["model"] == "llama" and fields["tokenizer.ggml.add_space_prefix"].contents() is begins
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in (TEXT, "the list of 7 lists, ordered!", "ünknown"):
        ours = tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])
        assert as_llama_cpp_does("▁" * begins + text, reported["tokens"], reported["scores"]) == ours
    kinds = dict(zip(reported["tokens"], reported["token_type"], strict=True))
    assert kinds["<0x41>"] == TokenType.BYTE and kinds["<unk>"] == TokenType.UNKNOWN
    assert kinds[tokenizer.bos_token] == TokenType.CONTROL and kinds["▁the"] == TokenType.NORMAL


def as_llama_cpp_does(text: str, tokens: list[str], scores: list[float]) -> list[str]:
    """Its merges of SentencePiece: the neighbours that make the token of the highest score, the first of equals."""
    known, pieces = dict(zip(tokens, scores, strict=True)), list(text.replace(" ", "▁"))
    while True:
        made = [(-known[a + b], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in known]
        if not made:
            break
        at = min(made)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]
    return [part for piece in pieces for part in ([piece] if piece in known else bytes_of(piece))]


def bytes_of(piece: str) -> list[str]:
    return [f"<0x{byte:02X}>" for byte in piece.encode()]


def test_a_gguf_file_keeps_bos_unused_rows_and_a_second_stop_token(tmp_path):
    from gguf import GGUFReader
    from tokenizers import Tokenizer, normalizers
    from tokenizers.processors import TemplateProcessing

    tiny.write_policy(tmp_path / "model", initializer_range=0.3)
    document = tmp_path / "model" / "tokenizer.json"
    backend = Tokenizer.from_file(str(document))
    backend.normalizer = normalizers.NFC()
    backend.post_processor = TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    backend.save(str(document))
    edit(tmp_path / "model" / "tokenizer_config.json", bos_token="<|im_start|>", eos_token="<|endoftext|>")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.resize_token_embeddings(304)
    model.save_pretrained(tmp_path / "model")
    exported(tmp_path, "gguf", "model", "--out", "m.gguf")
    fields = GGUFReader(tmp_path / "m.gguf").fields
    contents = {
        name: fields[f"tokenizer.ggml.{name}"].contents()
        for name in ("add_bos_token", "eos_token_id", "eot_token_id", "tokens")
    }
    assert contents.pop("tokens")[-1] == "[PAD303]"
    assert contents == {"add_bos_token": True, "eos_token_id": 0, "eot_token_id": 2}


@pytest.mark.parametrize(
    ("family", "file", "change", "reported"),
    [
        ("gpt2", CONFIG, {}, "of type gpt2 is not exported"),
        ("mistral", CONFIG, {"sliding_window": 8}, "sliding_window=8 is lost"),
        ("llama", CONFIG, {"rope_parameters": {**LINEAR, "rope_type": "dynamic"}}, "by rope_type=dynamic in a file"),
        ("llama", CONFIG, {"rope_parameters": {**YARN, "truncate": False}}, "rope_type=yarn with truncate=false"),
        ("llama", CONFIG, {"rope_parameters": {**YARN, "beta_fast": 16.0}}, "rope_type=yarn with beta_fast=16.0"),
        ("qwen2", CONFIG, {"rope_parameters": LLAMA_3}, "in a file of qwen2; accepted: linear, yarn"),
        ("qwen3", CONFIG, {}, "head_dim=8 is lost"),
        ("gemma2", CONFIG, {}, "query_pre_attn_scalar=256 is lost in GGUF, where llama.cpp takes 8"),
        ("llama", TOKENIZER, {"normalizer": {"type": "Lowercase"}}, "changes text first (Lowercase)"),
        ("llama", TOKENIZER, {"pre_tokenizer": {"type": "Whitespace"}}, "without byte-level splits"),
    ],
)
def test_what_cannot_be_exported_to_gguf_is_refused_before_anything_is_written(
    tmp_path, family, file, change, reported
):
    write_model(tmp_path / "model", family)
    edit(tmp_path / "model" / file, **change)
    before = sorted(tmp_path.iterdir())
    ran = export(tmp_path, "gguf", "model", "--out", "deep/m.gguf")
    assert ran.returncode == 2 and reported in ran.stderr, ran.stderr
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("name", ["llama3", "qwen2", "tekken", "gpt-4o", "falcon", "smollm", "gpt-2"])
def test_the_splits_of_a_tokenizer_have_the_name_that_llama_cpp_knows(tmp_path, name):
    tiny.write_tokenizer(tmp_path)
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False}
        for each in named_splits().get(name, ())
    ]
    digits = [{"type": "Digits", "individual_digits": True}] if name == "smollm" else []
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": not splits}
    edit(tmp_path / "tokenizer.json", pre_tokenizer={"type": "Sequence", "pretokenizers": [*splits, *digits, bytes_]})
    assert _splits("model", AutoTokenizer.from_pretrained(tmp_path)) == name


def jinja(go: str, messages: list[dict[str, str]]) -> str:
    """Renders what we use of Go's template language, as Ollama does, after a translation to Jinja."""
    open_, out = [], []
    for part in re.split(r"(\{\{.*?\}\})", go):
        word = part.strip("{} ")
        if not part.startswith("{{"):
            out.append("{% raw %}" + part + "{% endraw %}" if part else "")
        elif word == '$before := ""':
            out.append('{% set at = namespace(before="") %}')
        elif word == "range .Messages":
            open_.append("endfor")
            out.append("{% for m in messages %}")
        elif word == "end":
            out.append("{% " + open_.pop() + " %}")
        elif word == ".Content":
            out.append("{{ m.content }}")
        elif word == "$before = .Role":
            out.append("{% set at.before = m.role %}")
        elif both := re.fullmatch(r'(else if|if) and \(eq \$before "(\w*)"\) \(eq \.Role "(\w+)"\)', word):
            open_ += ["endif"] if both[1] == "if" else []
            out.append(
                f'{{% {"if" if both[1] == "if" else "elif"} at.before == "{both[2]}" and m.role == "{both[3]}" %}}'
            )
        else:
            assert word == 'if eq $before "user"', word
            open_.append("endif")
            out.append('{% if at.before == "user" %}')
    assert not open_
    return jinja2.Environment(keep_trailing_newline=True).from_string("".join(out)).render(messages=messages)


BY_DEFAULT = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, BY_DEFAULT])
def test_a_modelfile_has_the_chat_template_in_ollamas_language_and_its_stop_tokens(tmp_path, template):
    tiny.write_policy(tmp_path / "model", chat_template=template)
    edit(
        tmp_path / "model" / "generation_config.json", do_sample=True, temperature=0.6, top_k=20, repetition_penalty=1.1
    )
    exported(tmp_path, "ollama", "model", "--type", "q8_0", "--out", "out")
    text = (tmp_path / "out" / "Modelfile").read_text()
    go = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)[1]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    for roles in ("user", "system user", "user assistant user", "system user assistant user assistant user"):
        messages = [{"role": role, "content": f" {at} {{% x"} for at, role in enumerate(roles.split())]
        assert jinja(go, messages) == tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    settings = dict(line.split(maxsplit=2)[1:] for line in text.splitlines() if line.startswith("PARAMETER"))
    assert settings == {
        "stop": '"<|im_end|>"',
        "temperature": "0.6",
        "top_p": "1.0",
        "top_k": "20",
        "min_p": "0.0",
        "repeat_penalty": "1.1",
    }
    assert text.startswith("FROM ./model.gguf\n") and (tmp_path / "out" / "model.gguf").exists()


WITHOUT_SYSTEM = "{% for m in messages if m['role'] != 'system' %}{{ m['role'] + m['content'] }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "reported"),
    [
        (CHATML.replace("message['content'] +", "(message['content'] | upper) +"), "leaves out a message"),
        (CHATML.replace("message['content'] +", "message['content'].replace(' ', '_') +"), "changes contents"),
        (CHATML.replace("message['role'] +", "message['role'] + (loop.index | string) +"), "depends on more than"),
        (CHATML + "{{ strftime_now('%Y') }}", "the date of the day"),
        (CHATML.replace("'\\n'", "'{{'", 1), "reads as its own"),
        (WITHOUT_SYSTEM, "leaves out a message of system"),
        (None, "there is none"),
    ],
)
def test_a_chat_template_that_ollama_cannot_render_exactly_is_refused(tmp_path, template, reported):
    tiny.write_tokenizer(tmp_path, chat_template=template)
    with pytest.raises(ConfigError, match=re.escape(reported)):
        _go("model", _texts("model", AutoTokenizer.from_pretrained(tmp_path))[0])


@pytest.mark.parametrize(
    ("family", "notes"),
    [
        ("llama3", ["blanks"]), ("llama3_1", ["blanks"]), ("llama3_2", ["blanks", "the date is always"]),
        ("qwen2_5", []), ("qwen3", ["what earlier answers thought"]),
    ],
)  # fmt: skip
def test_a_template_of_a_family_is_written_and_what_is_lost_is_named(tmp_path, family, notes):
    tokenizer = AutoTokenizer.from_pretrained(tiny.write_tokenizer(tmp_path))
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = template_families()[family].read_text()
    text = modelfile("model", tokenizer, GenerationConfig(), ["<|im_end|>"])
    reported = [line for line in text.splitlines() if line.startswith("# ")]
    assert len(reported) == len(notes) and all(note in line for note, line in zip(notes, reported, strict=True))
    go = re.search(r'TEMPLATE """(.*?)"""', text, re.DOTALL)[1]
    for roles in ("user", "system user", "user assistant user", "system user assistant user assistant user"):
        messages = [{"role": role, "content": f"{at} {{% x"} for at, role in enumerate(roles.split())]
        wished = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, date_string="26 Jul 2024"
        )
        assert jinja(go, messages) == wished


def test_a_push_to_the_hub_has_a_card_and_is_recorded_with_its_commit(store, tmp_path, monkeypatch):
    calls: list[tuple[str, dict]] = []

    class Api:
        def create_repo(self, repository: str, **overrides: object) -> None:
            calls.append((repository, overrides))

        def upload_folder(self, **overrides: object) -> SimpleNamespace:
            calls.append((overrides["repo_id"], overrides))
            if not (Path(overrides["folder_path"]) / "model.safetensors").exists() or overrides["repo_id"] == "us/none":
                raise OSError("no such host")
            return SimpleNamespace(oid="c" * 40)

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    dry = exported(tmp_path, "hub", "p/sft", "--repo", "us/chat", "--dry-run", "--out", "dry")
    assert not calls and dry["address"] is None
    from huggingface_hub import ModelCard

    card = ModelCard.load(tmp_path / "dry" / "README.md")
    assert card.data.pipeline_tag == "text-generation"
    for reported in ("# chat", "learning_rate", "1.5", "chats", "cc-by-4.0", 'from_pretrained("us/chat")'):
        assert reported in card.text, reported
    assert str(tmp_path) not in card.text
    pushed = exported(tmp_path, "hub", "p/sft", "--repo", "us/chat", "--private", "--out", "out")
    assert pushed["address"] == f"https://huggingface.co/us/chat@{'c' * 40}"
    assert [name for name, _ in calls] == ["us/chat"] * 2 and calls[0][1]["private"] is True
    assert "pushed to https://huggingface.co/us/chat@" in call(["lineage", "p/sft"], tmp_path, {}).stdout
    failed = export(tmp_path, "hub", "p/sft", "--repo", "us/none", "--out", "kept")
    assert failed.returncode == 1 and "no such host" in failed.stderr and (tmp_path / "kept" / "README.md").exists()


@pytest.mark.parametrize(
    ("overrides", "reported"),
    [
        (("merged", "model", "--type", "q8_0"), "--type is for gguf and ollama"),
        (("gguf", "model", "--type", "q4_k_m"), "llama-quantize MODEL-f16.gguf MODEL.gguf Q4_K_M"),
        (("gguf", "model", "--out", "m.bin"), "ends in .gguf"),
        (("hub", "model"), "--repo OWNER/NAME"),
        (("hub", "model", "--repo", "a b/c"), "--repo a b/c"),
        (("merged", "nowhere"), "nowhere"),
        (("verl", "model", "--dtype", "bf16"), "--dtype is for merged and hub"),
    ],
)
def test_wrong_words_end_with_2(tmp_path, overrides, reported):
    ran = export(tmp_path, *overrides)
    assert ran.returncode == 2 and reported in ran.stderr, ran.stderr
