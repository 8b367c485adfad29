"""Writes a model as one file in GGUF, as llama.cpp and what is built on it load it, and reads it back.

Names of tensors are those of the package ``gguf``. Where llama.cpp keeps a tensor in another form than transformers, it
is converted: the rows of llama's queries and keys are permuted, and the norms of Gemma hold 1 + weight.
"""

import json
import math
import re
import tempfile
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from lineage.errors import ConfigError, PipelineError
from tasks.data.tokens.encoding import common_prefix
from tasks.data.tokens.rendering import turn_ends
from tasks.model.fetch_model import load_gguf, named_splits
from tasks.model.merging import Golden, golden_summary, golden_values, require_same_values
from tasks.model.tokenizers import PROBE, adds_bos

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, GGUFWriter
    from numpy import ndarray
    from torch import Tensor
    from torch.nn import Module
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# By how much the mean log-probability of a golden text may move, in nats per token: weights of 11 bits, and of 8.
BOUNDS: Mapping[str, float] = {"f16": 0.005, "q8_0": 0.05}
# model_type -> its architecture in GGUF.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2",
    "gemma3_text": "gemma3", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe",
}  # fmt: skip
# How rotary positions may be scaled. By tensors of factors: llama.cpp reads those of llama alone.
_ROPE_OF_ALL, _ROPE_OF_LLAMA = ("linear", "yarn"), ("llama3", "longrope")
_ASSUMED_OF_YARN = {"beta_fast": 32, "beta_slow": 1}  # which llama.cpp reads of no file of these architectures
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj")
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # by which llama.cpp knows the models with a scale of their own
_SPACE = "\u2581"  # of SentencePiece
_BLOCK = 32  # values that share a scale in q8_0
# Fields of a config that do not change what the weights compute, or that GGUF has elsewhere.
_APART = {
    "architectures", "dtype", "transformers_version", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id",
    "tie_word_embeddings", "initializer_range", "attention_dropout", "pretraining_tp", "model_type", "id2label",
    "label2id", "max_window_layers", "_name_or_path", "output_attentions", "output_hidden_states", "return_dict",
    "output_router_logits", "router_aux_loss_coef", "router_jitter_noise",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GgufModel:
    """A model that can be written in GGUF.

    Args:
        pre: the name of its tokenizer's splits (``tokenizer.ggml.pre``).
        names: name of a weight -> its name in GGUF; of the joined weights of experts, those of both halves.
        lost: fields of the config that llama.cpp reads, and transformers does not.
    """

    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"
    architecture: str
    pre: str
    names: Mapping[str, tuple[str, ...]]
    lost: tuple[str, ...] = ()

    @property
    def notes(self) -> list[str]:
        """What else than transformers llama.cpp does with the file."""
        notes = []
        if self.lost:
            notes.append(f"transformers does not read {', '.join(self.lost)} from a GGUF file; llama.cpp does")
        if _rope_type(self.model.config) == "longrope":
            most = self.model.config.rope_parameters["original_max_position_embeddings"]
            notes.append(
                f"llama.cpp takes the factors of long texts for all texts where its context (-c) is above {most} "
                "tokens, and transformers only for longer texts"
            )
        return notes

    @staticmethod
    def of(label: str, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> "GgufModel":
        """Checks all that can be checked before the file is written.

        Args:
            label: for messages.
            model: in fp32.

        Raises:
            ConfigError: llama.cpp or transformers would read another model or other tokens.
        """
        config = model.config
        if config.model_type not in ARCHITECTURES:
            raise ConfigError(
                f"{label}: a model of type {config.model_type} is not exported to GGUF; accepted: "
                f"{', '.join(ARCHITECTURES)}; export merged, and convert it with llama.cpp"
            )
        architecture = ARCHITECTURES[config.model_type]
        if len(tokenizer) > config.vocab_size:
            raise ConfigError(
                f"{label}: its tokenizer has {len(tokenizer)} tokens, and the model {config.vocab_size} embeddings; in "
                "GGUF each token has one; resize the embeddings (model.resize_token_embeddings), or export merged"
            )
        _require_attention_scale(label, config, architecture)
        pre = _splits(label, tokenizer)
        found = GgufModel(
            model=model, tokenizer=tokenizer, architecture=architecture, pre=pre,
            names=_names(label, model, architecture),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            header = Path(folder) / "header.gguf"
            found._write_header(header, label, "f16", {}).close()
            lost = _require_same_config(label, config, header)
        return replace(found, lost=lost)

    def write(self, path: Path, name: str, kind: str, prompts: Golden) -> dict[str, float]:
        """Writes the file, reads it back with transformers, and compares it.

        Args:
            name: of the model, for the file's metadata.
            prompts: golden ones.

        Returns:
            Means of the golden texts before and after, and the largest difference of one.

        Raises:
            PipelineError: another model, or another tokenizer, is read back.
        """
        infos = {its: tensor.shape for its, _, tensor in self._weights()}
        writer = self._write_header(path, name, kind, infos)
        for its, weight, tensor in self._weights():
            writer.write_tensor_data(self._stored(its, weight, tensor, kind))
        writer.close()
        return self._require_same(path, kind, prompts)

    def _weights(self) -> "Iterator[tuple[str, str, Tensor]]":
        """Name in GGUF, own name and values of each tensor."""
        state = self.model.state_dict()
        for name, its in self.names.items():
            tensor = state[name].squeeze(0) if name.endswith("shared_expert_gate.weight") else state[name]
            for one, part in zip(its, tensor.chunk(len(its), dim=1) if len(its) > 1 else (tensor,), strict=True):
                yield one, name, part.contiguous()
        for name, factors in self._rope_factors().items():
            yield name, name, factors

    def _rope_factors(self) -> "dict[str, Tensor]":
        """By which llama.cpp divides the frequencies of rotary positions."""
        import torch

        config = self.model.config
        if _rope_type(config) == "longrope":
            kinds = ("long", "short")
            return {
                f"rope_factors_{kind}.weight": torch.tensor(config.rope_parameters[f"{kind}_factor"]) for kind in kinds
            }
        if _rope_type(config) != "llama3":
            return {}
        head, base = _head_size(config), _rope_theta(config)
        plain = 1.0 / base ** (torch.arange(0, head, 2, dtype=torch.int64).float() / head)
        return {"rope_freqs.weight": plain / self._rotary().inv_freq.float().cpu()}

    def _rotary(self) -> "Module":
        """What computes rotary positions; it has ``inv_freq`` and ``attention_scaling``."""
        return next(module for module in self.model.modules() if hasattr(module, "inv_freq"))

    def _add_rope_scaling(self, writer: "GGUFWriter") -> None:
        from gguf import RopeScalingType

        config = self.model.config
        kind, found = _rope_type(config), config.rope_parameters
        if kind not in ("linear", "yarn", "longrope"):
            return
        writer.add_rope_scaling_type(RopeScalingType(kind))
        by_itself = 1.0  # what llama.cpp scales attention by
        if kind in ("linear", "yarn"):
            writer.add_rope_scaling_factor(found["factor"])
        if kind == "yarn":
            by_itself = 0.1 * math.log(max(1.0, found["factor"])) + 1.0
        if kind in ("yarn", "longrope"):
            writer.add_rope_scaling_orig_ctx_len(found["original_max_position_embeddings"])
            scaling = self._rotary().attention_scaling
            if not math.isclose(scaling, by_itself, rel_tol=1e-6):
                writer.add_rope_scaling_attn_factors(scaling / by_itself)

    def _stored(self, its: str, weight: str, tensor: "Tensor", kind: str) -> "ndarray":
        """A weight as llama.cpp keeps it (ConfigError: a value is too large for 16 bits)."""
        import numpy as np
        from gguf import quantize

        config, values = self.model.config, tensor.detach().float().cpu()
        if self.architecture == "llama" and ".self_attn." in weight and (".q_proj." in weight or ".k_proj." in weight):
            heads = config.num_attention_heads if ".q_proj." in weight else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        if self.architecture.startswith("gemma") and weight.endswith("norm.weight"):
            values = values + 1
        kept: ndarray = quantize(values.numpy(), _type_of(its, values.shape, kind))
        if kept.dtype == np.float16 and not np.isfinite(kept).all():
            raise ConfigError(
                f"{weight} has values above 65,504, the largest of f16; weights within it are accepted; use --type q8_0"
            )
        return kept

    def _write_header(self, path: Path, name: str, kind: str, shapes: "Mapping[str, tuple[int, ...]]") -> "GGUFWriter":
        """Writes everything but the weights."""
        import numpy as np
        from gguf import GGML_QUANT_VERSION, GGUFWriter, LlamaFileType
        from gguf.quants import quant_shape_to_byte_shape

        config = self.model.config
        head = _head_size(config)
        writer = GGUFWriter(path, self.architecture)
        writer.add_name(name)
        writer.add_file_type(LlamaFileType.MOSTLY_F16 if kind == "f16" else LlamaFileType.MOSTLY_Q8_0)
        writer.add_quantization_version(GGML_QUANT_VERSION)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_hidden_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(head)
        writer.add_value_length(head)
        writer.add_rope_dimension_count(head)
        writer.add_rope_freq_base(_rope_theta(config))
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        optional = {
            "sliding_window": writer.add_sliding_window,
            "attn_logit_softcapping": writer.add_attn_logit_softcapping,
            "final_logit_softcapping": writer.add_final_logit_softcapping,
        }
        for field, add in optional.items():
            if self.architecture.startswith("gemma") and getattr(config, field, None) is not None:
                add(getattr(config, field))
        if (experts := getattr(config, "num_experts", None)) is not None:
            writer.add_expert_count(experts)
            writer.add_expert_used_count(config.num_experts_per_tok)
            if own := getattr(config, "moe_intermediate_size", None):
                writer.add_expert_feed_forward_length(own)
            if shared := getattr(config, "shared_expert_intermediate_size", None):
                writer.add_expert_shared_feed_forward_length(shared)
        self._add_rope_scaling(writer)
        self._add_tokenizer(writer)
        for tensor, shape in shapes.items():
            form = _type_of(tensor, shape, kind)
            stored = quant_shape_to_byte_shape(shape, form)
            dtype = {"F32": np.float32, "F16": np.float16}.get(form.name, np.uint8)
            size = math.prod(stored) if dtype is np.uint8 else math.prod(shape) * np.dtype(dtype).itemsize
            writer.add_tensor_info(tensor, stored if dtype is np.uint8 else shape, np.dtype(dtype), size, form)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return writer

    def _add_tokenizer(self, writer: "GGUFWriter") -> None:
        from gguf import TokenType

        tokenizer = self.tokenizer
        vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
        added = tokenizer.added_tokens_decoder
        tokens, types = list[str](), list[int]()
        for index in range(self.model.config.vocab_size):
            tokens.append(vocabulary.get(index, f"[PAD{index}]"))
            if index in added:
                types.append(TokenType.CONTROL if added[index].special else TokenType.USER_DEFINED)
            else:
                types.append(TokenType.NORMAL if index in vocabulary else TokenType.UNUSED)
        document = json.loads(tokenizer.backend_tokenizer.to_str())
        merges = [tuple(each.split(" ") if isinstance(each, str) else each) for each in document["model"]["merges"]]
        if self.pre == SENTENCEPIECE:
            best = dict[str, int]()
            for rank, pair in enumerate(merges):
                best.setdefault("".join(pair), rank)
            types = [
                TokenType.BYTE if re.fullmatch("<0x[0-9A-F]{2}>", token) else TokenType.UNKNOWN
                if token == tokenizer.unk_token else form
                for token, form in zip(tokens, types, strict=True)
            ]  # fmt: skip
            writer.add_tokenizer_model("llama")
            writer.add_token_scores([-float(best.get(token, len(merges))) for token in tokens])
            writer.add_add_space_prefix(_adds_space(tokenizer))
        else:
            writer.add_tokenizer_model("gpt2")
            writer.add_token_merges([" ".join(pair) for pair in merges])
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        stops = [token for token in turn_ends(tokenizer) if token != tokenizer.eos_token_id]
        ids = {
            writer.add_bos_token_id: tokenizer.bos_token_id, writer.add_eos_token_id: tokenizer.eos_token_id,
            writer.add_unk_token_id: tokenizer.unk_token_id, writer.add_pad_token_id: tokenizer.pad_token_id,
            writer.add_eot_token_id: stops[0] if stops else None,
        }  # fmt: skip
        for add, index in ids.items():
            if index is not None:
                add(index)
        writer.add_add_bos_token(adds_bos(tokenizer))
        if isinstance(tokenizer.chat_template, str):
            writer.add_chat_template(tokenizer.chat_template)

    def _require_same(self, path: Path, kind: str, prompts: Golden) -> dict[str, float]:
        loaded, tokenizer = load_gguf(
            path, deepcopy(self.model.config) if self.lost else None,
            self.names if self.model.config.model_type == "mixtral" else None,
        )  # fmt: skip
        remedy = "nothing is exported; report the config.json and tokenizer.json of the model"
        texts = [
            unicodedata.normalize("NFC", PROBE),
            *(each.content for each in self.tokenizer.added_tokens_decoder.values()),
        ]
        if self.tokenizer.chat_template:
            asked = [{"role": "user", "content": unicodedata.normalize("NFC", PROBE)}]
            texts.append(self.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True))
        for text in texts:
            ours, theirs = (each(text)["input_ids"] for each in (self.tokenizer, tokenizer))
            if ours != theirs:
                at = common_prefix(ours, theirs)
                raise PipelineError(
                    f"{path}: its tokenizer reads {text[:40]!r} as other tokens than the model's, from token {at} "
                    f"({ours[at : at + 3]} and {theirs[at : at + 3]}); {remedy}"
                )
        if (tokenizer.chat_template or None) != (self.tokenizer.chat_template or None):
            raise PipelineError(f"{path}: its chat template is not the model's; {remedy}")
        before, after = golden_values(self.model, prompts), golden_values(loaded, prompts)
        require_same_values(before, after, BOUNDS[kind], f"writing {path.name} as {kind}", remedy)
        return golden_summary(before, after)


def _type_of(name: str, shape: "Sequence[int]", kind: str) -> "GGMLQuantizationType":
    """How a tensor is kept: routers and those of one dimension in fp32; rows that have no whole blocks in f16."""
    from gguf import GGMLQuantizationType

    if len(shape) < 2 or ".ffn_gate_inp" in name:
        return GGMLQuantizationType.F32
    return GGMLQuantizationType.Q8_0 if kind == "q8_0" and shape[-1] % _BLOCK == 0 else GGMLQuantizationType.F16


def _require_attention_scale(label: str, config: "PreTrainedConfig", architecture: str) -> None:
    """Requires the scale of attention that llama.cpp assumes of Gemma, and that no file says."""
    scalar = getattr(config, "query_pre_attn_scalar", None)
    is_27b = config.num_hidden_layers == _LAYERS_OF_27B.get(architecture)
    assumed = config.hidden_size // config.num_attention_heads if is_27b else _head_size(config)
    if architecture in _LAYERS_OF_27B and scalar != assumed:
        raise ConfigError(
            f"{label}: query_pre_attn_scalar={scalar} is lost in GGUF, where llama.cpp takes {assumed}; a model of "
            "that scale is accepted; export merged"
        )


def _rope_theta(config: "PreTrainedConfig") -> float:
    """The base of the rotary embedding; of layers with full attention where kinds of layers differ."""
    found = config.rope_parameters
    return float(found.get("full_attention", found)["rope_theta"])


def _rope_type(config: "PreTrainedConfig") -> str:
    """How rotary positions are scaled; empty: in several ways, by kind of layer."""
    return str(config.rope_parameters.get("rope_type", ""))


def _head_size(config: "PreTrainedConfig") -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _names(label: str, model: "PreTrainedModel", architecture: str) -> dict[str, tuple[str, ...]]:
    """Name of each weight -> its name in GGUF, or those of its halves."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    key = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    known, found = get_tensor_name_map(key, model.config.num_hidden_layers), dict[str, tuple[str, ...]]()
    for name in model.state_dict():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue  # the embedding stands for it
        if experts := _EXPERTS.fullmatch(name):
            parts = ("gate", "up") if experts[2] == "gate_up" else ("down",)
            found[name] = tuple(f"blk.{experts[1]}.ffn_{part}_exps.weight" for part in parts)
            continue
        its = known.get_name(name, try_suffixes=(".weight", ".bias"))
        if its is None:
            raise ConfigError(
                f"{label}: its weight {name} has no place in a GGUF file of {architecture}; a plain model of type "
                f"{model.config.model_type} is accepted; export merged"
            )
        found[name] = (its,)
    return found


def _splits(label: str, tokenizer: "PreTrainedTokenizerBase") -> str:
    """The name of a tokenizer's splits.

    Raises:
        ConfigError: it is no byte-level BPE, or llama.cpp has no name for its splits.
    """
    document = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {}
    if document and _is_sentencepiece(tokenizer.backend_tokenizer.to_str()):
        return SENTENCEPIECE
    model, normalizer = document.get("model", {}), document.get("normalizer") or {"type": "NFC"}
    first = document.get("pre_tokenizer") or {}
    *splits, last = first.get("pretokenizers") or [first]
    what = ""
    if model.get("type") != "BPE" or model.get("byte_fallback") or last.get("type") != "ByteLevel":
        what = f"is {model.get('type', type(tokenizer).__name__)} without byte-level splits"
    elif normalizer["type"] != "NFC":
        what = f"changes text first ({normalizer['type']})"
    elif last.get("add_prefix_space"):
        what = "puts a space before a text"
    if not what:
        patterns = tuple(each.get("pattern", {}).get("Regex") for each in splits)
        if last.get("use_regex", True):
            digits = [{"type": "Digits", "individual_digits": True}]
            name = {0: "gpt-2", 1: "smollm" if splits == digits else None}.get(len(splits))
        else:
            name = next((name for name, known in named_splits().items() if known == patterns), None)
        if name:
            return name
        what = "splits text in a way that llama.cpp has no name for"
    raise ConfigError(
        f"{label}: its tokenizer {what}; a byte-level BPE as of GPT-2, SmolLM, Qwen or Llama 3, or a SentencePiece "
        "BPE as of Llama 2, Mistral or Gemma is accepted; export merged, and convert it with llama.cpp"
    )


SENTENCEPIECE = "default"  # what ``tokenizer.ggml.pre`` says of one


def _is_sentencepiece(tokenizer: str) -> bool:
    """Whether it is a BPE of SentencePiece whose merges follow from scores of its tokens, as llama.cpp makes them.

    Then the merges that make a token follow each other, and each division of a token into two tokens is one of them.

    Args:
        tokenizer: text of a tokenizer.json.
    """
    document = json.loads(tokenizer)
    model, steps = document["model"], json.dumps([document["normalizer"], document["pre_tokenizer"]])
    if model["type"] != "BPE" or not model.get("byte_fallback") or json.dumps(_SPACE)[1:-1] not in steps:
        return False
    if {*re.findall(r'"type": "(\w+)"', steps)} - {"Sequence", "Prepend", "Replace", "Metaspace", "Split"}:
        return False
    made = ["".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    vocabulary, added = model["vocab"], {each["content"] for each in document["added_tokens"]}
    divisions = sum(
        token[:at] in vocabulary and token[at:] in vocabulary
        for token in vocabulary.keys() - added
        for at in range(1, len(token))
    )
    return len([*groupby(made)]) == len({*made}) and divisions == len(made)


def _adds_space(tokenizer: "PreTrainedTokenizerBase") -> bool:
    return str(tokenizer.tokenize("a")[0]).startswith(_SPACE)


def _require_same_config(label: str, config: "PreTrainedConfig", header: Path) -> tuple[str, ...]:
    """Requires that transformers reads the config that the model has; returns the fields that llama.cpp alone reads.

    Raises:
        ConfigError: a setting differs that GGUF, or transformers' reader, does not know.
    """
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(header.parent, gguf_file=header.name, local_files_only=True).to_dict()
    ours, lost = config.to_dict(), list[str]()
    carried = {"moe_intermediate_size", "shared_expert_intermediate_size", "num_local_experts"}
    carried |= {"num_experts_per_tok"} if config.model_type == "mixtral" else set()
    carried |= {"rope_parameters"} if _has_rope(label, config) else set()
    for field in type(config)().to_dict():
        if field in carried and not _same(ours.get(field), found.get(field)):
            lost.append(field)
        elif field not in _APART and not _same(ours.get(field), found.get(field)):
            raise ConfigError(
                f"{label}: {field}={json.dumps(ours.get(field))} is lost in GGUF, where transformers reads "
                f"{json.dumps(found.get(field))}; a model whose settings GGUF carries is accepted; export merged, and "
                "convert it with llama.cpp"
            )
    return tuple(lost)


def _has_rope(label: str, config: "PreTrainedConfig") -> bool:
    """Whether a file says how the model scales rotary positions (ConfigError: llama.cpp does not scale them so)."""
    kind, architecture = _rope_type(config), ARCHITECTURES[config.model_type]
    if kind in ("", "default"):
        return False
    accepted = (*_ROPE_OF_ALL, *(_ROPE_OF_LLAMA if architecture == "llama" else ()))
    other = [
        name for name, assumed in _ASSUMED_OF_YARN.items() if (config.rope_parameters.get(name) or assumed) != assumed
    ]
    if config.rope_parameters.get("truncate") is False:
        other.append("truncate")
    if kind not in accepted or other:
        own = ", ".join(f"{name}={json.dumps(config.rope_parameters[name])}" for name in other)
        found = f"rope_type={kind}" if kind not in accepted else f"rope_type={kind} with {own}"
        raise ConfigError(
            f"{label}: llama.cpp does not scale rotary positions by {found} in a file of {architecture}; accepted: "
            f"{', '.join(accepted)}; export merged"
        )
    return True


def _same(ours: object, theirs: object) -> bool:
    """Equal, but for the last bits of numbers, which GGUF keeps in 32."""
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return all(_same(ours.get(key), theirs.get(key)) for key in {*ours, *theirs})
    if isinstance(ours, float | int) and isinstance(theirs, float | int):
        return math.isclose(ours, theirs, rel_tol=1e-6)
    return ours == theirs or (not ours and not theirs)
