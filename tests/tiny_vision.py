"""Tiny random models that read images, as families publish them, and rows with pictures for them."""

import io
import json
from collections.abc import Mapping
from pathlib import Path

from lineage.artifact import Kind
from tests.tiny import Message, sentence, write_tokenizer

_TEXT = {
    "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "bos_token_id": None,
}  # fmt: skip
_TOWER = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_QWEN = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
         "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_PATCHES = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
            "size": {"shortest_edge": 64, "longest_edge": 1024}}  # fmt: skip
_SQUARE, _GRID = {"height": 28, "width": 28}, [[28, 56], [56, 28], [56, 56]]
# text and vision config, other fields of the config (tokens by name), special tokens, files of the processor
Family = tuple[dict[str, object], dict[str, object], dict[str, object], dict[str, str], dict[str, object]]


def _splitting(name: str) -> Family:
    """Of a processor that cuts a large picture into parts and shows the whole beside them."""
    return (
        {"model_type": "llama"}, {**_TOWER, "image_size": 32, "patch_size": 8},
        {"image_token_id": "<image>", "scale_factor": 2},
        {"image_token": "<image>", "fake_image_token": "<fake_token_around_image>",
         "global_image_token": "<global-img>", "end_of_utterance_token": "<end_of_utterance>"},
        {"processor_class": f"{name}Processor", "image_seq_len": 4,
         "image_processor": {"image_processor_type": f"{name}ImageProcessor", "size": {"longest_edge": 64},
                             "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}},
    )  # fmt: skip


FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": (
        _MROPE, {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
                 "spatial_merge_size": 2, "temporal_patch_size": 2},
        dict(_QWEN), {"image_token": "<|image_pad|>"},
        {"processor_class": "Qwen2VLProcessor", "image_processor": _PATCHES},
    ),
    "qwen2_5_vl": (
        _MROPE, {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
                 "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "fullatt_block_indexes": [0],
                 "window_size": 16},
        dict(_QWEN), {"image_token": "<|image_pad|>"},
        {"processor_class": "Qwen2_5_VLProcessor", "image_processor": _PATCHES},
    ),
    "llava": (
        {"model_type": "llama"}, {"model_type": "clip_vision_model", "projection_dim": 32, **_TOWER},
        {"image_token_index": "<image>", "vision_feature_layer": -1}, {"image_token": "<image>"},
        {"processor_class": "LlavaProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1,
         "image_processor": {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 28},
                             "crop_size": _SQUARE}},
    ),
    "idefics3": _splitting("Idefics3"), "smolvlm": _splitting("SmolVLM"),
    "qwen3_vl": (
        _MROPE, {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32,
                 "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
                 "deepstack_visual_indexes": [0]},
        dict(_QWEN), {"image_token": "<|image_pad|>"},
        {"processor_class": "Qwen3VLProcessor", "image_processor": _PATCHES},
    ),
    "llava_next": (
        {"model_type": "llama"}, {"model_type": "clip_vision_model", "projection_dim": 32, **_TOWER},
        {"image_token_index": "<image>", "vision_feature_layer": -1, "image_grid_pinpoints": _GRID},
        {"image_token": "<image>"},
        {"processor_class": "LlavaNextProcessor", "patch_size": 14, "vision_feature_select_strategy": "default",
         "num_additional_image_tokens": 1,
         "image_processor": {"image_processor_type": "LlavaNextImageProcessor", "size": {"shortest_edge": 28},
                             "crop_size": _SQUARE, "image_grid_pinpoints": _GRID}},
    ),
    "internvl": (
        {"model_type": "qwen2"}, {**_TOWER, "image_size": [56, 56], "patch_size": [14, 14]},
        {"image_token_id": "<IMG_CONTEXT>", "image_seq_length": 4, "downsample_ratio": 0.5},
        {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
         "video_token": "<video>"},
        {"processor_class": "InternVLProcessor", "image_seq_length": 4,
         "image_processor": {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 56, "width": 56},
                             "crop_to_patches": True, "max_patches": 3}},
    ),
    "gemma3": (
        {}, _TOWER, {"mm_tokens_per_image": 4, "image_token_index": "<image_soft_token>",
                     "boi_token_index": "<start_of_image>", "eoi_token_index": "<end_of_image>"},
        {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        {"processor_class": "Gemma3Processor", "image_seq_length": 4,
         "image_processor": {"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE}},
    ),
    "mllama": (  # its head has no place for the token of an image, which is the last of the vocabulary
        {"vocab_size": "<|image|>", "num_hidden_layers": 3, "cross_attention_layers": [1], "bos_token_id": 1},
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_global_layers": 1,
         "attention_heads": 2, "image_size": 28, "patch_size": 14, "intermediate_layers_indices": [0],
         "vision_output_dim": 64},
        {"image_token_index": "<|image|>"}, {"image_token": "<|image|>"},
        {"processor_class": "MllamaProcessor",
         "image_processor": {"image_processor_type": "MllamaImageProcessor", "size": _SQUARE, "max_image_tiles": 4}},
    ),
}  # fmt: skip
_WRITTEN = dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl"), "<|vision_start|><|image_pad|><|vision_end|>")
_WRITTEN |= {"gemma3": "<start_of_image>", "internvl": "<IMG_CONTEXT>", "mllama": "<|image|>"}
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'MARK' }}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_vision_model(directory: Path, family: str, seed: int = 0) -> Path:
    """A random model with its tokenizer, chat template and processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    text, vision, whole, named, processor = FAMILIES[family]
    write_tokenizer(directory, chat_template=_TEMPLATE.replace("MARK", _WRITTEN.get(family, "<image>")))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokens = {*named.values(), *(str(value) for value in whole.values() if str(value).startswith("<"))}
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    tokenizer.add_tokens(sorted({*tokens, *(rows if family in ("idefics3", "smolvlm") else [])}), special_tokens=True)
    tokenizer.save_pretrained(directory)
    file = directory / "tokenizer_config.json"
    bos = {"bos_token": "<|im_start|>"} if family == "mllama" else {}  # its processor puts one where there is none
    file.write_text(json.dumps({**json.loads(file.read_text()), **bos, "extra_special_tokens": named}))
    (directory / "processor_config.json").write_text(json.dumps(processor))
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    known = tokenizer.get_vocab()
    text, fields = (
        {name: known.get(value, value) if isinstance(value, str) else value for name, value in each.items()}
        for each in (text, whole)
    )
    config = AutoConfig.for_model(family, text_config={**_TEXT, **ids, **text}, vision_config=vision, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config)
        for name, each in model.named_parameters():  # so that images count beside text
            if each.dim() > 1 and "embed_tokens" not in name:
                each.data = torch.randn_like(each) * 0.1
            elif "cross_attn" in name and name.endswith("_gate"):
                each.data.fill_(1.0)
        model.save_pretrained(directory)
    return directory


def picture(index: int) -> bytes:
    """A picture of its own size and colours as PNG, the same in every run."""
    from PIL import Image, ImageDraw

    width, height = 24 + 8 * (index % 3), 16 + 12 * (index % 4)
    image = Image.new("RGB", (width, height), (index * 37 % 256, index * 91 % 256, 128))
    ImageDraw.Draw(image).rectangle((4, 4, width // 2, height // 2), fill=(255, index * 53 % 256, 0))
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def write_image_rows(directory: Path, count: int, held_out: int = 0, kind: str = "conversations") -> Path:
    """Prepared rows: with no, one or two images, in one turn or two; several rows have one image in common."""
    import hashlib

    import pyarrow as pa
    import pyarrow.parquet as pq

    from tasks.data.images import IMAGES, write_images
    from tasks.data.kinds import HELD_OUT, ROW_KINDS, TRAIN

    store = directory / "store"
    store.mkdir(parents=True)

    def mark(index: int) -> str:
        data = picture(index % 11)
        digest = hashlib.sha256(data).hexdigest()
        (store / digest).write_bytes(data)
        return f"<image:{digest}>"

    rows = list[dict[str, object]]()
    for index in range(count + held_out):
        asked = [f"{mark(index)}{sentence(index, 3)}", f"{sentence(index, 2)}{mark(index + 1)}", sentence(index, 4)]
        second = f"{mark(index)} or {mark(index + 2)}?"
        messages: list[Message] = [
            {"role": "user", "content": asked[index % 3]}, {"role": "assistant", "content": sentence(index + 1, 2)},
            {"role": "user", "content": second}, {"role": "assistant", "content": sentence(index + 2, 3)},
        ]  # fmt: skip
        messages = messages[: 2 if index % 2 else 4]
        rejected = [{"role": "assistant", "content": sentence(index + 5, 1 + index % 3)}]
        rows.append({
            "row_id": f"r{index}", "messages": messages, "prompt": messages[:-1], "chosen": messages[-1:],
            "rejected": rejected, "completion": rejected if index % 4 else messages[-1:], "label": not index % 4,
        })  # fmt: skip
    schema = pa.schema([field for field in ROW_KINDS[Kind(kind)].schema if field.name != "tools"])
    for name, part in ((TRAIN, rows[:count]), (HELD_OUT, rows[count:])):
        if part:
            pq.write_table(pa.Table.from_pylist(part, schema), directory / name)
    write_images([path.name for path in store.iterdir()], [store], [], directory / IMAGES)
    return directory
