"""Tokenizer, pad token, chat template and settings that a source sets beside a model's path."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoConfig, AutoTokenizer

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from lineage.filesystem.digest import DigestCache
from lineage.source.model_source import OWN_TEMPLATES, TEMPLATE_TOKENS, template_families, with_kwargs
from lineage.source.sources import Pinned, pin
from tasks.model.adapter_files import _with_options
from tasks.model.chat_template import CHAT_TEMPLATES, CHATML, TOKENS
from tasks.model.fetch_model import checked_config, fetch_model, model_json
from tasks.model.tokenizers import tokenizer_of
from tasks.train.models.load import copy_tokenizer, whole_model
from tests.model_directories import edit
from tests.tiny import write_tokenizer
from tests.tiny_models import ARCHITECTURES, write_model

IDS = torch.arange(3, 100).unsqueeze(0)
CHAT = [{"role": "user", "content": "Hi"}]
PAD = "\u0100"  # the byte 0, which no row has
ROPE = {"rope_type": "linear", "factor": 4.0}


def checkpoint(path: Path, **fields: object) -> Source:
    return replace(Source(path=str(path), kind=Kind.CHECKPOINT), **fields)  # type: ignore[arg-type]


def pinned(path: Path, **fields: object) -> Pinned:
    return pin("base", checkpoint(path, **fields), DigestCache(None))


def logits(directory: Path) -> torch.Tensor:
    with torch.no_grad():
        return whole_model(Kind.CHECKPOINT, directory).eval()(IDS).logits


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base", "llama")


@pytest.fixture
def model(shipped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shipped, tmp_path / "model"))


@pytest.fixture
def fetched(model: Path, tmp_path: Path):
    """The directory that a stage is given."""
    return lambda **fields: fetch_model(checkpoint(model, **fields), tmp_path / "cache")


def test_with_nothing_set_fingerprint_and_directory_are_as_before(model, tmp_path):
    found = pinned(model)
    source = replace(found.source, path="", revision=None)
    assert source == replace(Source(path="", kind=Kind.CHECKPOINT))
    assert found.record.reading == {}
    assert fetch_model(checkpoint(model), tmp_path / "cache") == model


def test_each_option_is_identity(model, tmp_path):
    other = write_tokenizer(tmp_path / "other", vocab_size=290)
    (tmp_path / "a.jinja").write_text(CHATML + " ")
    options = [
        {}, {"tokenizer": str(other)}, {"pad_token": PAD}, {"chat_template": "chatml"},
        {"chat_template": str(tmp_path / "a.jinja")}, {"chat_template": "qwen2_5"},
        {"model_kwargs": {"rope_theta": 5e5}}, {"model_kwargs": {"rope_scaling": ROPE}},
        {"added_tokens": ("<a>",)}, {"special_tokens": ("<a>",)}, {"eos_token": PAD}, {"bos_token": PAD},
        {"bos_token": PAD, "add_bos": True}, {"bos_token": PAD, "add_bos": False},
    ]  # fmt: skip
    found = [pinned(model, **each) for each in options]
    assert len({each.fingerprint for each in found}) == len(options)
    for each in found:
        assert pin("base", each.source, DigestCache(None)).fingerprint == each.fingerprint
    assert str(tmp_path / "a.jinja") in found[4].record.files
    assert found[7].record.configured()["model_kwargs"] == {"rope_scaling": ROPE}


def test_the_content_of_tokenizer_and_template_is_identity_their_place_is_not(model, tmp_path):
    other = write_tokenizer(tmp_path / "other", vocab_size=290)
    moved = shutil.copytree(other, tmp_path / "moved")
    assert pinned(model, tokenizer=str(other)).fingerprint == pinned(model, tokenizer=str(moved)).fingerprint
    template = tmp_path / "a.jinja"
    template.write_text(CHATML)
    first = pinned(model, chat_template=str(template)).fingerprint
    template.write_text(CHATML + " ")
    assert pinned(model, chat_template=str(template)).fingerprint != first
    edit(Path(moved) / "tokenizer_config.json", model_max_length=9)
    assert pinned(model, tokenizer=str(other)).fingerprint != pinned(model, tokenizer=str(moved)).fingerprint


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_another_tokenizer_travels_byte_for_byte(tmp_path, architecture):
    model = write_model(tmp_path / "model", architecture)
    other = write_tokenizer(tmp_path / "other", vocab_size=290, chat_template="{{ 'own' }}")
    directory = fetch_model(checkpoint(model, tokenizer=str(other)), tmp_path / "cache")
    (tmp_path / "output").mkdir()
    copy_tokenizer(directory, tmp_path / "output")
    files = {path.name for path in other.iterdir()}
    assert files == {path.name for path in (tmp_path / "output").iterdir()} >= {"tokenizer.json", "chat_template.jinja"}
    assert all((tmp_path / "output" / name).read_bytes() == (other / name).read_bytes() for name in files)
    assert torch.equal(logits(directory), logits(model))


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_by_the_plan(model, tmp_path):
    small = write_model(tmp_path / "small", "llama", vocab_size=200)
    with pytest.raises(ConfigError, match=r"sources\.base\.tokenizer: its token .* and the model has 200 embeddings"):
        pinned(small, tokenizer=str(model))


@pytest.mark.parametrize("given", ["nowhere", "./nowhere", "a/b/c"])
def test_a_tokenizer_that_is_not_there_is_refused(model, given):
    with pytest.raises(ConfigError, match=r"sources\.base\.tokenizer=.*no such directory"):
        pinned(model, tokenizer=given)


def test_a_tokenizer_of_the_hub_is_pinned(model, tmp_path, monkeypatch):
    commit = "0123456789abcdef0123456789abcdef01234567"
    other, asked = write_tokenizer(tmp_path / "other", vocab_size=290), []

    def download(path, *, revision, allow_patterns, **_):
        asked.append((path, revision))
        assert not any("safetensors" in pattern for pattern in allow_patterns)
        return str(other)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    source = pinned(model, tokenizer=f"owner/name@{commit}").source
    directory = fetch_model(source, tmp_path / "cache")
    assert (directory / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
    assert asked == [("owner/name", commit)]


def test_a_pad_token_is_that_of_tokenizer_and_configs(model, fetched):
    assert tokenizer_of(model).pad_token == "<|endoftext|>"
    directory = fetched(pad_token=PAD)
    tokenizer, index = tokenizer_of(directory), tokenizer_of(model).convert_tokens_to_ids(PAD)
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == (PAD, index)
    assert AutoConfig.from_pretrained(directory).pad_token_id == index
    assert json.loads((directory / "generation_config.json").read_text())["pad_token_id"] == index
    padded = tokenizer(["sum", "sum adds every value"], padding=True)["input_ids"][0]
    assert index in padded


def test_a_pad_token_outside_the_vocabulary_is_refused_by_the_plan(model):
    with pytest.raises(ConfigError, match=r"pad_token='<pad>': the tokenizer has no such token.*embedding"):
        pinned(model, pad_token="<pad>")


@pytest.mark.parametrize(
    ("token", "fields"),
    [
        ("<|im_end|>", {}),  # the tokenizer's end token
        ("<|im_start|>", {}),  # in its template
        ("<|endoftext|>", {"chat_template": "<|endoftext|>{{ messages }}"}),
    ],
)
def test_a_pad_token_that_rows_have_is_refused_because_its_embedding_is_never_trained(model, token, fields):
    loaded = whole_model(Kind.CHECKPOINT, model)
    loaded(torch.tensor([[0, 5]])).logits[:, 1].sum().backward()
    assert loaded.get_input_embeddings().padding_idx == 0, "transformers gives the pad token's embedding no gradient"
    if fields:
        (model / "own.jinja").write_text(fields["chat_template"])
        fields = {"chat_template": str(model / "own.jinja")}
    with pytest.raises(ConfigError, match=r"pad_token=.*never trains the embedding of the pad token"):
        pinned(model, pad_token=token, **fields)


@pytest.mark.parametrize(
    ("architecture", "fields"),
    [
        ("llama", {"tie_word_embeddings": False}), ("llama", {"tie_word_embeddings": True}), ("gpt2", {}),
        ("gemma3", {}), ("qwen3_moe", {}), ("llama", {"vocab_size": 400}),
    ],
)  # fmt: skip
def test_new_tokens_have_rows_that_are_the_mean_of_the_old_ones(tmp_path, architecture, fields):
    model = write_model(tmp_path / "model", architecture, **fields)
    before, size = whole_model(Kind.CHECKPOINT, model), len(tokenizer_of(model))
    source = checkpoint(model, added_tokens=("<think>", "zzz"), special_tokens=("<|tool|>",))
    directory = fetch_model(source, tmp_path / "cache")
    after, tokenizer = whole_model(Kind.CHECKPOINT, directory), tokenizer_of(directory)
    plain = tokenizer_of(model)
    plain.add_tokens(["<think>", "zzz"])
    plain.add_special_tokens({"additional_special_tokens": ["<|tool|>"]})
    assert tokenizer.get_vocab() == plain.get_vocab() == AutoTokenizer.from_pretrained(directory).get_vocab()
    text = "a<think>sum</think>zzz<|tool|>"
    ids = tokenizer(text)["input_ids"]
    assert ids == plain(text)["input_ids"] and {size, size + 1, size + 2} <= set(ids)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>sum</think>zzz"
    for of in ("get_input_embeddings", "get_output_embeddings"):
        old, new = (getattr(each, of)().weight for each in (before, after))
        assert torch.equal(new[:size], old[:size]) and len(new) == max(len(old), size + 3)
        assert torch.equal(new[size : size + 3], old[:size].mean(0).expand(3, -1))
    assert torch.allclose(logits(directory)[..., :size], logits(model)[..., :size], atol=1e-5)
    judge = whole_model(Kind.REWARD_MODEL, directory, AutoConfig.from_pretrained(directory, num_labels=1))
    assert torch.equal(judge.get_input_embeddings().weight, after.get_input_embeddings().weight)
    known = model_json(source, tmp_path / "cache", "config.json")
    assert known == json.loads((directory / "config.json").read_text())


def test_an_adapter_finds_its_base_with_new_tokens_by_what_the_manifest_records(model):
    found = pinned(model, added_tokens=("<a>",), special_tokens=("<b>",), eos_token="<b>", bos_token=PAD, add_bos=False)
    plain = replace(found.source, added_tokens=(), special_tokens=(), eos_token=None, bos_token=None, add_bos=None)
    again = _with_options(plain, json.loads(json.dumps(found.record.reading)))
    assert again == found.source and hash(again) == hash(found.source)
    assert pin("base", again, DigestCache(None)).fingerprint == found.fingerprint


def test_files_without_rows_of_tokens_are_not_copied(model, fetched):
    whole_model(Kind.CHECKPOINT, model).save_pretrained(model, max_shard_size="20KB")
    (model / "model.safetensors").unlink(missing_ok=True)
    directory = fetched(added_tokens=("<a>",))
    shared = [path.name for path in model.glob("*.safetensors") if path.samefile(directory / path.name)]
    assert 0 < len(shared) < len(list(model.glob("*.safetensors")))
    assert torch.equal(logits(directory)[..., :300], logits(model))
    assert fetched(added_tokens=("<a>",)) == directory
    whole_model(Kind.CHECKPOINT, model).save_pretrained(model, max_shard_size="20KB")  # may be another model
    assert fetched(added_tokens=("<a>",)) != directory


def test_a_token_without_a_row_gets_one(tmp_path, model):
    small = write_model(tmp_path / "small", "llama", vocab_size=299)
    last = tokenizer_of(small).convert_ids_to_tokens(299)
    with pytest.raises(ConfigError, match=rf"has the id 299.*299 embeddings.*added_tokens=\['{last}'\]"):
        pinned(small, pad_token=PAD)
    pinned(small, added_tokens=(last,))
    directory = fetch_model(checkpoint(small, added_tokens=(last,)), tmp_path / "cache")
    assert (directory / "tokenizer.json").read_bytes() != b"" and logits(directory).shape[-1] == 300


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"added_tokens": ("<|im_end|>",)}, r"added_tokens: the tokenizer has '<\|im_end\|>' already \(id 2\)"),
        ({"special_tokens": ("<a>", "<a>")}, r"special_tokens: '<a>' is listed twice"),
        ({"added_tokens": (" ",)}, r"added_tokens: ' ' is blank"),
        ({"eos_token": "<end>"}, r"eos_token='<end>': the tokenizer has no such token.*special_tokens=\['<end>'\]"),
        ({"eos_token": PAD, "pad_token": PAD}, r"pad_token=.*rows have it"),
        ({"add_bos": True}, r"add_bos=true: the tokenizer has no bos_token; set sources\.base\.bos_token"),
    ],
)
def test_tokens_that_cannot_be_are_refused_by_the_plan(model, fields, message):
    with pytest.raises(ConfigError, match=message):
        pinned(model, **fields)


def test_an_end_token_is_that_of_tokenizer_and_configs_and_old_ends_still_stop(model, fetched):
    edit(model / "generation_config.json", eos_token_id=[2, 5])
    directory = fetched(special_tokens=("<end>",), eos_token="<end>")
    assert (tokenizer_of(directory).eos_token, tokenizer_of(directory).eos_token_id) == ("<end>", 300)
    assert AutoConfig.from_pretrained(directory).eos_token_id == 300
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == [300, 2, 5]


def test_a_begin_token_is_put_before_a_text_or_not(model, fetched):
    plain = tokenizer_of(model)("sum")["input_ids"]
    begin = tokenizer_of(model).convert_tokens_to_ids(PAD)
    for directory, expected in (
        (fetched(bos_token=PAD), plain), (fetched(bos_token=PAD, add_bos=True), [begin, *plain]),
    ):  # fmt: skip
        assert AutoConfig.from_pretrained(directory).bos_token_id == begin
        for load in (tokenizer_of, AutoTokenizer.from_pretrained):
            assert load(directory)("sum")["input_ids"] == expected
    adds = fetched(bos_token=PAD, add_bos=True)
    again = checkpoint(adds, bos_token="<|endoftext|>")
    (adds / "model_parts.json").unlink()
    shutil.copyfile(model / "model.safetensors", adds / "model.safetensors")
    assert tokenizer_of(fetch_model(again, model.parent / "cache"))("sum")["input_ids"] == [0, *plain]
    assert (
        tokenizer_of(fetch_model(checkpoint(adds, add_bos=False), model.parent / "cache"))("sum")["input_ids"] == plain
    )


def test_our_templates_are_those_of_the_tasks():
    assert set(OWN_TEMPLATES) == CHAT_TEMPLATES.keys()
    assert TEMPLATE_TOKENS.split() == list(TOKENS)


@pytest.mark.parametrize("value", ["chatml", "hermes", "qwen2_5", "file.jinja"])
def test_a_template_of_a_family_or_a_file_replaces_the_models(model, fetched, tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    edit(model / "tokenizer_config.json", chat_template="{{ 'old' }}")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 'tools' }}")
    text = "<|im_start|>{{ messages[0]['content'] }}<|im_end|>"
    Path("file.jinja").write_text(text)
    expected = CHAT_TEMPLATES.get(value) or (text if value == "file.jinja" else template_families()[value].read_text())
    directory = fetched(chat_template=value)
    assert (directory / "chat_template.jinja").read_text() == expected
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.get_chat_template() == tokenizer.get_chat_template(tools=[{}]) == expected
    assert "<|im_start|>" in tokenizer.apply_chat_template(CHAT, tokenize=False)


@pytest.mark.parametrize("family", ["llama3", "gemma", "phi3", "deepseekv3"])
def test_a_template_whose_tokens_the_model_lacks_is_refused_by_the_plan(model, family):
    with pytest.raises(ConfigError, match=rf"chat_template={family}: it writes .*the tokenizer has no such tokens"):
        pinned(model, chat_template=family)


@pytest.mark.parametrize("value", ["chatm", "nowhere.jinja", "llama3_training"])
def test_an_unknown_template_is_refused(model, value):
    with pytest.raises(ConfigError, match=rf"chat_template={value}: no such (template; accepted: .*llama3|file)"):
        pinned(model, chat_template=value)


KWARGS = [
    ("llama", {"rope_scaling": ROPE}), ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), ("qwen2", {"rope_theta": 500000.0}),
    ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 64}}),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 32}),
    ("mistral", {"sliding_window": 4}), ("gemma2", {"attn_logit_softcapping": 0.01}),
    ("gemma2", {"final_logit_softcapping": 0.1}),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "kwargs"), KWARGS)
def test_settings_change_what_the_model_computes_and_travel_in_its_config(tmp_path, architecture, kwargs):
    model = write_model(tmp_path / "model", architecture)
    directory = fetch_model(checkpoint(model, model_kwargs=kwargs), tmp_path / "cache")
    assert (logits(directory) - logits(model)).abs().max() > 1e-5
    whole_model(Kind.CHECKPOINT, directory).save_pretrained(tmp_path / "output")
    assert torch.equal(logits(tmp_path / "output"), logits(directory))
    assert model_json(checkpoint(model, model_kwargs=kwargs), tmp_path / "cache", "config.json") == json.loads(
        (directory / "config.json").read_text()
    )


@pytest.mark.parametrize(("architecture", "name"), [("llama", "attention_dropout"), ("gpt2", "resid_pdrop")])
def test_a_dropout_reaches_the_model(tmp_path, architecture, name):
    model = write_model(tmp_path / "model", architecture)
    directory = fetch_model(checkpoint(model, model_kwargs={name: 0.5}), tmp_path / "cache")
    trained = whole_model(Kind.CHECKPOINT, directory).train()
    assert (trained(IDS).logits - trained(IDS).logits).abs().max() > 1e-5


def test_an_old_config_keeps_its_theta_under_another_scaling():
    old = {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": None, "max_position_embeddings": 64}
    assert with_kwargs(old, {"rope_scaling": ROPE}) == {**old, "rope_scaling": ROPE}
    new = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    assert with_kwargs(new, {"rope_scaling": ROPE})["rope_parameters"] == {**ROPE, "rope_theta": 500000.0}
    yarn = with_kwargs(old, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "max_position_embeddings": 128})
    assert yarn["rope_scaling"]["original_max_position_embeddings"] == 64
    assert with_kwargs({"text_config": old}, {"rope_scaling": ROPE})["text_config"]["rope_scaling"] == ROPE


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"hidden_size": 64}, r"hidden_size: not accepted; settings that the weights fit as before are: rope_scaling"),
        ({"torch_dtype": "bfloat16"}, r"torch_dtype: not accepted; .*use stages\.STAGE\.method\.precision"),
        ({"trust_remote_code": True}, r"trust_remote_code: not accepted; .*use sources\.base\.trust_remote_code"),
        ({"rope_scaling": {"rope_type": "su", "factor": 2}}, r"a mapping with rope_type linear, dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, r"rope_scaling: linear needs factor; set .*rope_scaling\.factor="),
        ({"rope_scaling": {**ROPE, "fator": 2}}, r"rope_scaling\.fator: linear does not read it; accepted: factor"),
        ({"rope_scaling": {**ROPE, "factor": float("nan")}}, r"factor=nan: a number from 1 is accepted"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": 1, "long_factor": [1]}},
            r"short_factor=1: a list, each a number from 0 is accepted",
        ),
        ({"attention_dropout": 1.5}, r"attention_dropout=1\.5: a number from 0 to less than 1 is accepted"),
        ({"max_position_embeddings": 2.5}, r"max_position_embeddings=2\.5: a whole number above 0"),
    ],
)
def test_the_plan_refuses_settings_that_cannot_be(model, kwargs, message):
    with pytest.raises(ConfigError, match=rf"sources\.base\.model_kwargs\.{message}|{message}"):
        pinned(model, model_kwargs=kwargs)


@pytest.mark.parametrize(
    ("config", "kwargs", "message"),
    [
        ({"model_type": "gpt2"}, {"rope_scaling": ROPE}, r"rope_scaling: a model of type gpt2 has no such setting"),
        ({"model_type": "gpt2"}, {"max_position_embeddings": 9}, r"type gpt2 has a table of positions, whose size"),
        ({"model_type": "llama"}, {"resid_pdrop": 0.1}, r"resid_pdrop: a model of type llama has no such setting"),
        ({"model_type": "qwen2"}, {"sliding_window": 8}, r"sliding_window=8: this model of type qwen2 ignores it"),
    ],
)
def test_a_setting_that_the_model_would_ignore_is_refused(config, kwargs, message):
    with pytest.raises(ConfigError, match=message):
        checked_config("base", config, kwargs)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": Kind.ROWS, "tokenizer": "x"}, r"sources\.base\.tokenizer: is for a model .*of kind rows"),
        ({"path": "alias:champion", "pad_token": "x"}, r"pad_token: is for a model .*alias:champion is a model that"),
    ],
)
def test_options_of_models_are_for_models_that_were_not_trained_here(model, fields, message):
    with pytest.raises(ConfigError, match=message):
        pin("base", replace(checkpoint(model), **fields), DigestCache(None))


def test_json_that_is_no_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match=rf"{tmp_path}: its tokenizer cannot be loaded \(\w+: .*; files as save_"):
        tokenizer_of(tmp_path)


def test_a_changed_file_is_put_together_again(model, fetched, tmp_path):
    other = write_tokenizer(tmp_path / "other", vocab_size=290)
    first = fetched(tokenizer=str(other))
    assert fetched(tokenizer=str(other)) == first
    edit(other / "tokenizer_config.json", model_max_length=9)
    second = fetched(tokenizer=str(other))
    assert second != first and tokenizer_of(second).model_max_length == 9


def test_a_family_whose_tokens_are_there_is_accepted(model, fetched):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in ("<|start_header_id|>", "<|end_header_id|>",
                                                                        "<|eot_id|>")])  # fmt: skip
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.save_pretrained(model.parent / "llama")
    edit(model / "config.json", vocab_size=400)
    directory = fetched(tokenizer=str(model.parent / "llama"), chat_template="llama3")
    assert "<|eot_id|>" in tokenizer_of(directory).apply_chat_template(CHAT, tokenize=False)


def test_a_pad_token_of_a_model_with_images_is_that_of_its_text(tmp_path):
    model = write_model(tmp_path / "model", "gemma3")
    directory = fetch_model(checkpoint(model, pad_token=PAD), tmp_path / "cache")
    assert AutoConfig.from_pretrained(directory).get_text_config().pad_token_id == tokenizer_of(directory).pad_token_id


def test_a_tokenizer_without_a_tokenizer_json_is_judged_when_it_is_loaded(model, fetched, tmp_path):
    tokens = json.loads((model / "tokenizer.json").read_text())["model"]
    (model / "tokenizer.json").unlink()
    edit(model / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer")
    (model / "vocab.json").write_text(json.dumps(tokens["vocab"]))
    (model / "merges.txt").write_text("\n".join(" ".join(pair) for pair in tokens["merges"]))
    pinned(model, pad_token="<pad>")  # the plan cannot know
    with pytest.raises(ConfigError, match=r"pad_token='<pad>': the tokenizer has no such token"):
        fetched(pad_token="<pad>")
    directory = fetched(pad_token=PAD)
    assert AutoConfig.from_pretrained(directory).pad_token_id == tokens["vocab"][PAD]
