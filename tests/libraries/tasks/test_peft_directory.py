"""A plain PEFT directory as a model: the merged base is what a stage starts from."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaLoraConfig,
    BOFTConfig,
    FourierFTConfig,
    HRAConfig,
    IA3Config,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    MissConfig,
    OFTConfig,
    PeftModel,
    RandLoraConfig,
    VeraConfig,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.digest import DigestCache
from lineage.source.peft_adapter import MERGED_TYPES
from lineage.source.sources import Pinned, pin
from tasks.model.adapter_files import base_and_adapters
from tasks.model.fetch_model import PARTS_FILE, fetch_model, fetch_tokenizer
from tasks.model.tokenizers import tokenizer_of
from tasks.train.models.load import whole_model
from tests.model_directories import edit, move_tokenizer, write_adapter
from tests.tiny_models import ARCHITECTURES, write_model

IDS = torch.tensor([[5, 9, 40, 41, 42, 77, 3, 200]])
ALL = "all-linear"
CONFIGS = {
    "LORA": LoraConfig(r=4, target_modules=ALL, use_dora=True, use_rslora=True, bias="all"),
    "ADALORA": AdaLoraConfig(target_modules=["q_proj", "v_proj"], total_step=10, tinit=1, tfinal=1),
    "OFT": OFTConfig(r=0, oft_block_size=8, target_modules=ALL),
    "BOFT": BOFTConfig(boft_block_size=4, target_modules=["q_proj", "v_proj"]),
    "VERA": VeraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "IA3": IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LOHA": LoHaConfig(r=4, target_modules=ALL),
    "LOKR": LoKrConfig(r=4, target_modules=ALL),
    "HRA": HRAConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "MISS": MissConfig(r=4, target_modules=["q_proj", "v_proj"]),
    "FOURIERFT": FourierFTConfig(n_frequency=20, target_modules=["q_proj", "v_proj"]),
    "RANDLORA": RandLoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
}


def checkpoint(path: Path | str, **fields: object) -> Source:
    return replace(Source(path=str(path), kind=Kind.CHECKPOINT), **fields)  # type: ignore[arg-type]


def pinned(path: Path | str, **fields: object) -> Pinned:
    return pin("base", checkpoint(path, **fields), DigestCache(None))


def loaded(directory: Path) -> PreTrainedModel:
    return whole_model(Kind.CHECKPOINT, directory)


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base", "llama")


@pytest.fixture(scope="module")
def shipped(base: Path) -> Path:
    return write_adapter(base.parent / "lora", base)


@pytest.fixture
def lora(shipped: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shipped, tmp_path / "lora"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_stage_starts_from_the_merged_base(tmp_path: Path, architecture: str) -> None:
    base = write_model(tmp_path / "base", architecture)
    adapter = write_adapter(tmp_path / "lora", base)
    directory = fetch_model(checkpoint(adapter), tmp_path / "cache")
    assert base_and_adapters(directory) == (base, [adapter])
    merged = logits(loaded(directory))
    adapted = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    assert torch.allclose(merged, adapted, atol=1e-5)
    assert (merged - logits(loaded(base))).abs().max() > 1e-2


@pytest.mark.parametrize("peft_type", MERGED_TYPES)
def test_every_accepted_type_merges(base: Path, tmp_path: Path, peft_type: str) -> None:
    adapter = write_adapter(tmp_path / "adapter", base, config=CONFIGS[peft_type])
    pinned(adapter)
    merged = logits(loaded(fetch_model(checkpoint(adapter), tmp_path / "cache")))
    adapted = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    assert torch.allclose(merged, adapted, atol=1e-4)
    assert (merged - logits(loaded(base))).abs().max() > 1e-4


ON_TIED: dict[str, dict[str, Any]] = {
    "head": {"target_modules": ["lm_head"]},
    "embedding": {"target_modules": ["EMBEDDING"]},
    "both": {"target_modules": ["EMBEDDING", "lm_head"]},
    "both_as_one": {"target_modules": ["EMBEDDING"], "ensure_weight_tying": True},
    "head_in_full": {"target_modules": ["lm_head"], "modules_to_save": ["EMBEDDING"]},
    "embedding_in_full": {"modules_to_save": ["EMBEDDING"]},
    "rows": {"trainable_token_indices": [5, 77]},
}


# Quickly: each case on two architectures.
TIED = [
    pytest.param(case, name, marks=[] if column < 3 and (row + column) % 3 else [pytest.mark.slow])
    for row, case in enumerate(ON_TIED)
    for column, name in enumerate(("llama", "gpt2", "gemma2", "gemma3"))
]


@pytest.mark.parametrize(("case", "architecture"), TIED)
@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True")
def test_an_adapter_on_one_end_of_a_tied_model_changes_that_end_alone(
    tmp_path: Path, architecture: str, case: str
) -> None:
    """Saved and loaded again by transformers, the merged model is what PEFT computes: head and embedding may differ."""
    base = write_model(tmp_path / "base", architecture, tie_word_embeddings=True)
    embedding = "wte" if architecture == "gpt2" else "embed_tokens"
    fields = {
        name: [embedding if each == "EMBEDDING" else each for each in value] if isinstance(value, list) else value
        for name, value in ON_TIED[case].items()
    }  # fmt: skip
    targets = ["c_attn" if architecture == "gpt2" else "q_proj", *fields.pop("target_modules", [])]
    config = LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **fields)
    adapter = write_adapter(tmp_path / "adapter", base, config=config)
    merged = loaded(fetch_model(checkpoint(adapter), tmp_path / "cache"))
    merged.save_pretrained(tmp_path / "merged")
    adapted = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.allclose(logits(merged), adapted, atol=1e-4)
    assert torch.allclose(logits(again), adapted, atol=1e-4)
    is_tied = again.get_input_embeddings().weight is again.get_output_embeddings().weight
    # PEFT does not know the name of GPT-2's embedding, and leaves its head as it is.
    assert is_tied == (case == "rows" or (case == "both_as_one" and architecture != "gpt2"))


def test_a_merge_that_gives_another_model_is_stopped(
    base: Path, lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every adapter goes through one function, which compares golden prompts before and after."""
    monkeypatch.setattr(PeftModel, "merge_and_unload", lambda self: self.unload(), raising=False)
    with pytest.raises(
        PipelineError, match=r"merging the adapter .*lora moved a golden prompt by .*; 0\.001 is accepted"
    ):
        loaded(fetch_model(checkpoint(lora), tmp_path / "cache"))


SMALL: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": ALL},
    "dora": {"target_modules": ["q_proj"], "use_dora": True},
    "embedding": {"target_modules": ["embed_tokens"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 77]},
    "norm": {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "experts": {"target_modules": ["q_proj"], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
}


def lost(adapted: PeftModel) -> PreTrainedModel:
    model: PreTrainedModel = adapted.unload()
    return model


def added_twice(adapted: PeftModel) -> PreTrainedModel:
    for name, parameter in adapted.named_parameters():
        parameter.data.mul_(2 if "lora_B" in name or "embedding_B" in name else 1)
    model: PreTrainedModel = adapted.base_model.merge_and_unload()
    return model


@pytest.mark.parametrize("fault", [lost, added_twice])
@pytest.mark.parametrize("case", SMALL)
def test_a_merge_that_loses_an_adapter_too_small_for_golden_prompts_is_stopped(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, fault: Any
) -> None:
    base = write_model(tmp_path / "moe", "qwen3_moe") if case == "experts" else base
    adapter = write_adapter(tmp_path / "adapter", base, config=LoraConfig(r=4, **SMALL[case]))
    weights, plain = load_file(adapter / "adapter_model.safetensors"), AutoModelForCausalLM.from_pretrained(base)
    for name, weight in weights.items():
        if "lora_B" in name or "embedding_B" in name:
            weight.mul_(1e-4)
    state = plain.state_dict()
    whole = {name: each for name, each in weights.items() if "lora" not in name}
    for name, weight in whole.items():  # rows and copies: near those of the base
        start = state.get(name.removeprefix("base_model.model."), state["model.embed_tokens.weight"][[5, 77]])
        weight.copy_(start + 1e-4 * (weight - start)) if weight.shape == start.shape else None
    save_file(weights, adapter / "adapter_model.safetensors")
    source = fetch_model(checkpoint(adapter), tmp_path / "cache")
    loaded(source)  # a right merge passes
    if fault is lost or case not in ("rows", "norm", "dora"):
        monkeypatch.setattr(PeftModel, "merge_and_unload", fault, raising=False)
        with pytest.raises(PipelineError, match="layers lack its change or have another"):
            loaded(source)


def test_an_adapter_that_peft_does_not_merge_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], lora_bias=True)  # on layers without a bias
    adapter = write_adapter(tmp_path / "adapter", base, config=config)
    with pytest.raises(ConfigError, match=r"adapter: PEFT cannot merge this adapter \(Impossible to merge LoRA"):
        loaded(fetch_model(checkpoint(adapter), tmp_path / "cache"))


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_initialisation_that_changes_the_base_is_repeated(base: Path, tmp_path: Path, init: str) -> None:
    config = LoraConfig(r=4, target_modules=ALL, init_lora_weights=init)
    adapter = write_adapter(tmp_path / "adapter", base, config=config)
    merged = logits(loaded(fetch_model(checkpoint(adapter), tmp_path / "cache")))
    adapted = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter))
    assert torch.allclose(merged, adapted, atol=1e-4)


@pytest.mark.parametrize("named", ["../base", "base"])
def test_a_relative_base_is_found_beside_the_adapter_or_from_here(
    lora: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    shutil.copytree(base, tmp_path / "base")
    edit(lora / "adapter_config.json", base_model_name_or_path=named)
    monkeypatch.chdir(tmp_path)
    found = pinned(lora)
    assert found.source.base_model == str(tmp_path / "base")
    assert found.fingerprint == pinned(lora, base_model=str(base)).fingerprint, "the place of the base is not identity"
    assert base_and_adapters(fetch_model(found.source, tmp_path / "cache"))[0] == tmp_path / "base"


def test_a_base_of_the_hub_is_pinned_to_a_commit(lora: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    edit(lora / "adapter_config.json", base_model_name_or_path="owner/name", revision=commit)
    assert pinned(lora).source.base_model == f"owner/name@{commit}"
    asked = []

    def download(path: str, *, revision: str, **_: object) -> str:
        asked.append((path, revision))
        return str(base)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert base_and_adapters(fetch_model(pinned(lora).source, lora.parent / "cache"))[0] == base
    assert asked == [("owner/name", commit)]


def test_an_adapter_of_the_hub_needs_its_base_in_the_plan(
    lora: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda path, **_: str(lora if path == "o/lora" else base))
    with pytest.raises(ConfigError, match=rf"o/lora: is an adapter on the hub.*set sources.base.base_model={base}"):
        fetch_model(checkpoint("o/lora", revision=commit), lora.parent / "cache")
    source = checkpoint("o/lora", revision=commit, base_model=f"o/base@{commit}")
    found = pin("base", source, DigestCache(None))
    assert base_and_adapters(fetch_model(found.source, lora.parent / "cache")) == (base, [lora])
    other = replace(source, base_model=f"o/base@{commit[::-1]}")
    assert pin("base", other, DigestCache(None)).fingerprint != found.fingerprint


def test_adapter_and_base_are_identity_and_recorded(lora: Path, base: Path, tmp_path: Path) -> None:
    first = pinned(lora)
    assert {Path(path).name for path in first.record.files} >= {"adapter_model.safetensors", "model.safetensors"}
    assert pin("base", first.source, DigestCache(None)).fingerprint == first.fingerprint
    other = write_model(tmp_path / "other", "llama", tie_word_embeddings=True)
    second = pinned(lora, base_model=str(other))
    assert second.fingerprint != first.fingerprint and second.digest != first.digest
    edit(lora / "adapter_config.json", lora_alpha=16)
    assert pinned(lora).fingerprint != first.fingerprint


def test_a_base_that_moved_is_found_by_the_override(lora: Path, base: Path, tmp_path: Path) -> None:
    edit(lora / "adapter_config.json", base_model_name_or_path="/gone/base")
    with pytest.raises(ConfigError, match=r"its base /gone/base is missing.*set sources\.base\.base_model="):
        pinned(lora)
    moved = shutil.copytree(base, tmp_path / "moved")
    source = pinned(lora, base_model=str(moved)).source
    assert base_and_adapters(fetch_model(source, tmp_path / "cache")) == (Path(moved), [lora])


def test_the_tokenizer_is_the_adapters_own_else_the_bases(lora: Path, base: Path, tmp_path: Path) -> None:
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    directory = fetch_model(checkpoint(lora), tmp_path / "cache")
    assert all((directory / name).read_bytes() == (base / name).read_bytes() for name in names)
    other = shutil.copytree(base, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ 'other' }}")
    move_tokenizer(Path(other), lora)
    directory = fetch_model(checkpoint(lora), tmp_path / "cache")
    assert all((directory / name).read_bytes() == (lora / name).read_bytes() for name in names)
    assert tokenizer_of(directory).chat_template == "{{ 'other' }}"


def test_an_adapter_on_an_adapter_is_merged_in_order(lora: Path, base: Path, tmp_path: Path) -> None:
    middle = loaded(fetch_model(checkpoint(lora), tmp_path / "cache"))
    middle.save_pretrained(tmp_path / "merged")
    second = write_adapter(tmp_path / "second", tmp_path / "merged", named=str(lora))
    directory = fetch_model(pinned(second).source, tmp_path / "cache")
    assert base_and_adapters(directory) == (base, [lora, second])
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), second)
    assert torch.allclose(logits(loaded(directory)), logits(adapted), atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"peft_type": "PROMPT_TUNING"}, r"is an adapter of type PROMPT_TUNING, which has no merged form"),
        ({"task_type": "SEQ_CLS"}, r"is an adapter for SEQ_CLS, with a head that"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens is set: .*cannot be merged"),
        ({"layer_replication": [[0, 2], [0, 2]]}, r"layer_replication is set: it adds layers"),
        ({"init_lora_weights": "lora_ga"}, r"init_lora_weights=lora_ga changed the base before training"),
        ({"base_model_name_or_path": None}, r"names no base; set sources\.base\.base_model="),
        ({"base_model_name_or_path": "."}, r"names itself as its base"),
    ],
)
def test_the_plan_refuses_an_adapter_that_cannot_be_merged(
    lora: Path, changed: dict[str, object], message: str
) -> None:
    edit(lora / "adapter_config.json", **changed)
    with pytest.raises(ConfigError, match=message):
        pinned(lora)


def test_pickled_weights_are_refused(lora: Path, base: Path) -> None:
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    shutil.copyfile(base / "model.safetensors", lora / "adapter_model_of_another.safetensors")
    with pytest.raises(ConfigError, match=r"no adapter_model\.safetensors; .*a pickled adapter_model\.bin is not"):
        pinned(lora)


def test_a_directory_with_a_model_and_an_adapter_is_refused(lora: Path, base: Path) -> None:
    for name in ("model.safetensors", "config.json"):
        shutil.copyfile(base / name, lora / name)
    with pytest.raises(ConfigError, match=r"holds both a model and an adapter"):
        pinned(lora)


def test_a_quantized_base_is_refused(lora: Path, base: Path, tmp_path: Path) -> None:
    quantized = Path(shutil.copytree(base, tmp_path / "nf4"))
    edit(quantized / "config.json", quantization_config={"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"})
    with pytest.raises(ConfigError, match=r"base .*nf4 is quantized \(bitsandbytes nf4\).*set sources.base.base_model"):
        pinned(lora, base_model=str(quantized))


@pytest.mark.parametrize("changed", [{"hidden_size": 64}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}])
def test_another_base_is_refused_before_the_first_step(base: Path, tmp_path: Path, changed: dict[str, object]) -> None:
    """PEFT says nothing of weights that find no place, and only warns of those that stay at their random start."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapter = write_adapter(tmp_path / "lora", base, config=config)
    other = write_model(tmp_path / "other", "llama", **changed)
    directory = fetch_model(checkpoint(adapter, base_model=str(other)), tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"lora does not fit the model .*set sources\.base\.base_model="):
        loaded(directory)


def test_a_base_is_for_adapters_alone(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no adapter_config\.json, so it is not an adapter; remove base_model"):
        pinned(base, base_model=str(base))


def test_a_directory_that_points_elsewhere_is_not_a_model(base: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(base, tmp_path / "evil"))
    edit(directory / PARTS_FILE, weights="/etc", adapter=None)
    with pytest.raises(ConfigError, match=rf"holds {PARTS_FILE}, which posttrain writes into its cache alone"):
        fetch_model(checkpoint(directory), tmp_path / "cache")


def test_its_tokens_are_counted_by_the_tokenizer_of_its_base(lora: Path, base: Path) -> None:
    assert fetch_tokenizer(str(lora)) == base
    move_tokenizer(Path(shutil.copytree(base, lora.parent / "copy")), lora)
    assert fetch_tokenizer(str(lora)) == lora
