"""A wheel with a tiny Llama in GGUF, as packages ship them; for tests of sources ``wheel:NAME==VERSION``."""

import base64
import hashlib
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

HIDDEN, LAYERS, HEADS, FEED_FORWARD = 32, 2, 4, 64
NAME, VERSION = "tiny-gguf", "0.1"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_gguf(path: Path, pre: str | None = None, tokens: Sequence[str] = ()) -> None:
    """A Llama with random weights, a byte-level tokenizer and a chat template.

    Args:
        tokens: further ones, which no merge makes.
    """
    from gguf import GGUFWriter, TokenType
    from tokenizers import pre_tokenizers

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", *tokens]
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL] * len(specials) + [TokenType.NORMAL] * (len(tokens) - len(specials)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {f"{block}attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")}
        shapes |= {f"{block}{name}_norm": (HIDDEN,) for name in ("attn", "ffn")}
        shapes |= {f"{block}ffn_{name}": (FEED_FORWARD, HIDDEN) for name in ("gate", "up")}
        shapes[f"{block}ffn_down"] = (HIDDEN, FEED_FORWARD)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.normal(0, 0.1, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, files: dict[str, bytes]) -> str:
    """A wheel with these files, which pip finds with PIP_FIND_LINKS=folder; its SHA-256."""
    info = f"tiny_gguf-{VERSION}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = [f"{name},sha256={_digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,"]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tiny_gguf-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
