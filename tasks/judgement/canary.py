"""The recipes of ``posttrain canary``: each method, kernel path and other computation once, on tiny random models.

``python -m tasks.judgement.canary FILE NAME ...`` runs them in this process, on one thread, and appends a JSON line of
each to the file: what it computed, or the error that ended it. Models, tokenizers and rows are made here, so that
nothing is downloaded. With ``--noise`` each recipe runs again where only rounding differs: with two threads, and from
models whose weights moved by their last bit.
"""

import argparse
import hashlib
import io
import json
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from math import fsum, inf, sqrt
from operator import mul
from pathlib import Path
from typing import TYPE_CHECKING, cast
from unittest import mock

from lineage.artifact import DATA, Kind, Source
from lineage.record.environment import hardware
from lineage.record.metrics_file import is_of_machine
from tasks.base_model import BaseModel
from tasks.context import Metrics, Resources, TrainContext
from tasks.cpo import CPO
from tasks.cpt import ContinuedPretraining
from tasks.data.images import IMAGES, Images, write_images
from tasks.data.kinds import CONVERSATIONS, HELD_OUT, PREFERENCES, PROMPTS, TEXT, TRAIN, UNPAIRED, RowKind
from tasks.distill import Distillation
from tasks.dpo import DPO
from tasks.evaluate import Evaluate
from tasks.grpo import GRPO
from tasks.kto import KTO
from tasks.merge import Merge
from tasks.method import Adapter, Input, Inputs, Method, Quantization, Training
from tasks.model.chat_template import CHATML
from tasks.on_policy_distill import OnPolicyDistillation
from tasks.online_dpo import OnlineDPO
from tasks.orpo import ORPO
from tasks.ppo import PPO
from tasks.prepare_data import PrepareConversations
from tasks.reward_functions import RewardFunction
from tasks.reward_model import RewardModel
from tasks.rloo import RLOO
from tasks.sft import SFT
from tasks.simpo import SimPO
from tasks.steps import Row, Steps
from tasks.taid import TAID
from tasks.teacher_answers import TeacherAnswers
from tasks.train.generation.generating import Sampling
from tasks.unpair import Unpair

if TYPE_CHECKING:
    from torch import Tensor

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_TEXT = "the list returns a new sorted copy of items in order while map applies function to every value and sum adds"
WORDS = _TEXT.split()
Rows = list[dict[str, object]]

# --- models and rows


def write_tokenizer(directory: Path, *, vocab_size: int = 300, chat_template: str | None = CHATML) -> Path:
    """Trains a byte-level BPE on a few words and saves it; pad is <|endoftext|>, eos is <|im_end|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([" ".join(WORDS)] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)
    return directory


def write_policy(
    directory: Path,
    *,
    hidden_size: int = 32,
    num_layers: int = 2,
    chat_template: str | None = CHATML,
    seed: int = 0,
    initializer_range: float = 0.02,
) -> Path:
    """Saves a random Llama with its tokenizer: a directory that the auto classes load."""
    write_tokenizer(directory, chat_template=chat_template)
    fields = {
        "hidden_size": hidden_size, "intermediate_size": 2 * hidden_size, "num_hidden_layers": num_layers,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "tie_word_embeddings": True, "initializer_range": initializer_range,
    }  # fmt: skip
    return _write_model(directory, "llama", fields, seed=seed)


def _write_model(
    directory: Path, architecture: str, fields: Mapping[str, object], *, seed: int = 0, scores: bool = False
) -> Path:
    """Saves a random model of an architecture beside its tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = AutoConfig.for_model(architecture, vocab_size=len(tokenizer), **ids, **fields)
    if scores:
        config.num_labels = 1
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        auto.from_config(config).save_pretrained(directory)
    return directory


def sentence(index: int, length: int) -> str:
    """``length`` words, different for every index, the same in every run."""
    return " ".join(WORDS[(index * 7 + place * (index % 5 + 1)) % len(WORDS)] for place in range(length))


def text_rows(count: int) -> Rows:
    """Documents of 10 to 18 words."""
    return [{"row_id": f"t{i}", "text": sentence(i, 10 + i % 9)} for i in range(count)]


def _question(index: int) -> Rows:
    return [{"role": "user", "content": sentence(index, 3 + index % 4)}]


def _answer(index: int, length: int) -> Rows:
    return [{"role": "assistant", "content": sentence(index, length)}]


def conversation_rows(count: int) -> Rows:
    """One question and one answer each, of different lengths."""
    return [{"row_id": f"c{i}", "messages": _question(i) + _answer(i + 1, 2 + i % 7)} for i in range(count)]


def preference_rows(count: int) -> Rows:
    """Chosen and rejected differ in length and words; two kinds."""
    return [
        {
            "row_id": f"p{i}",
            "prompt": _question(i),
            "chosen": _answer(i + 1, 4 + i % 5),
            "rejected": _answer(i + 2, 1 + i % 6),
            "kind": ("cut", "wrong")[i % 2],
        }
        for i in range(count)
    ]


def unpaired_rows(count: int) -> Rows:
    """One answer each; every third is undesirable."""
    return [
        {"row_id": f"u{i}", "prompt": _question(i), "completion": _answer(i + 1, 2 + i % 5), "label": i % 3 != 0}
        for i in range(count)
    ]


def prompt_rows(count: int) -> Rows:
    """Every second one has an answer for a reward function."""
    return [
        {"row_id": f"q{i}", "prompt": _question(i), "columns": None if i % 2 else f'{{"answer": {i}}}'}
        for i in range(count)
    ]


def _write_reader_of_images(directory: Path) -> Path:
    """A random Qwen2-VL with its tokenizer, chat template and processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    tokens = {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
              "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}  # fmt: skip
    parts = (
        "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
        "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    )
    either = f"{{% if message['content'] is string %}}{{{{ message['content'] }}}}{{% else %}}{parts}{{% endif %}}"
    template = (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}" + either
        + "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )  # fmt: skip
    write_tokenizer(directory, chat_template=template)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(sorted(tokens.values()), special_tokens=True)
    tokenizer.save_pretrained(directory)
    file, known = directory / "tokenizer_config.json", tokenizer.get_vocab()
    own = {"extra_special_tokens": {"image_token": "<|image_pad|>"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **own}))
    pixels = {
        "image_processor_type": "Qwen2VLImageProcessor", "patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 1024},
    }  # fmt: skip
    processor = {"processor_class": "Qwen2VLProcessor", "image_processor": pixels}
    (directory / "processor_config.json").write_text(json.dumps(processor))
    text = {
        "vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4,
              "spatial_merge_size": 2, "temporal_patch_size": 2}  # fmt: skip
    ids = {name: known[token] for name, token in tokens.items()}
    config = AutoConfig.for_model("qwen2_vl", text_config=text, vision_config=vision, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(config).save_pretrained(directory)
    return directory


def _write_image_rows(directory: Path, kind: RowKind) -> None:
    """Rows whose questions have one picture or two, each of its own size and colours."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    store, rows = directory / "store", _ROWS[kind](_NUM_ROWS)
    store.mkdir(parents=True)
    for index, row in enumerate(rows):
        width, height, marks = 24 + 8 * (index % 3), 16 + 12 * (index % 4), ""
        for shade in range(64, 64 + 128 * (1 + index % 2), 128):
            file = io.BytesIO()
            image = Image.linear_gradient("L").resize((width, height))
            Image.merge("RGB", (image, image.point(lambda value: 255 - value), Image.new("L", image.size, shade))).save(
                file, "PNG"
            )
            digest = hashlib.sha256(file.getvalue()).hexdigest()
            (store / digest).write_bytes(file.getvalue())
            marks += f"<image:{digest}>"
        cast("list[dict[str, str]]", row[kind.asked])[0]["content"] += marks
    schema = pa.schema([field for field in kind.schema if field.name != "tools"])
    pq.write_table(pa.Table.from_pylist(rows, schema), directory / TRAIN)
    write_images(sorted(path.name for path in store.iterdir()), [store], [], directory / IMAGES)


_ROWS = {
    TEXT: text_rows, CONVERSATIONS: conversation_rows, PREFERENCES: preference_rows, UNPAIRED: unpaired_rows,
    PROMPTS: prompt_rows,
}  # fmt: skip
_RAW = "raw.jsonl"
_NUM_ROWS, _NUM_HELD_OUT = 40, 12


def write_inputs(root: Path) -> Path:
    """Writes the models and rows of all recipes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_policy(root / "policy")
    write_policy(root / "teacher", hidden_size=48, seed=1, initializer_range=0.2)
    write_policy(root / "other", seed=2)
    write_policy(root / "third", seed=3)
    small = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512,
    }  # fmt: skip
    _write_model(write_tokenizer(root / "judge"), "llama", small, scores=True)
    _write_model(
        write_tokenizer(root / "gpt2"), "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512, "n_inner": 64},
    )  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}
    _write_model(write_tokenizer(root / "experts"), "qwen3_moe", {**small, **experts})
    _write_reader_of_images(root / "sees")
    for kind in (CONVERSATIONS, PREFERENCES, PROMPTS):
        _write_image_rows(root / "pictures" / kind.kind.value, kind)
    for kind, rows in _ROWS.items():
        folder, found = root / kind.kind.value, rows(_NUM_ROWS + _NUM_HELD_OUT)
        folder.mkdir()
        for name, part in ((TRAIN, found[:_NUM_ROWS]), (HELD_OUT, found[_NUM_ROWS:])):
            pq.write_table(pa.Table.from_pylist(part, schema=kind.schema), folder / name)
    lines = ({"messages": row["messages"]} for row in conversation_rows(_NUM_ROWS))
    (root / _RAW).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return root


def move_last_bits(root: Path, pattern: int) -> Path:
    """Moves every weight of the models to the next number above or below it, as the bits of a hash say."""
    import torch
    from safetensors.torch import load_file, save_file

    for file in sorted(root.rglob("*.safetensors")):
        weights = load_file(file)
        for name, tensor in weights.items():
            signs = torch.tensor(list(_signs(tensor.numel(), _NUM_SUMS + pattern))).view_as(tensor)
            weights[name] = torch.nextafter(tensor, signs * inf)
        save_file(weights, file, metadata={"format": "pt"})
    return root


_NUM_SUMS = 4  # of all weights, under different signs


def _signs(count: int, which: int) -> Iterator[float]:
    """A sequence of 1 and -1 in no order."""
    for place in range(1, count + 1):
        yield 1.0 - (place * 2654435761 >> 9 + which & 1) * 2


# --- recipes


def spread(completions: list[str]) -> list[float]:
    """A reward between 0 and 6 that nearly every other completion changes."""
    return [float(sum(map(ord, each)) % 7) for each in completions]


METHODS: dict[str, type[Training]] = {
    "cpt": ContinuedPretraining, "sft": SFT, "reward": RewardModel, "dpo": DPO, "distill": Distillation, "taid": TAID,
    "on_policy_distill": OnPolicyDistillation,
    "kto": KTO, "orpo": ORPO, "simpo": SimPO, "cpo": CPO,
    "grpo": GRPO, "rloo": RLOO, "online_dpo": OnlineDPO, "ppo": PPO,
}  # fmt: skip
# Small enough to step in milliseconds; max_length cuts nothing.
FIELDS: dict[str, object] = {"learning_rate": 3e-3, "num_steps": 3, "global_batch_size": 8, "max_length": 128}
GENERATED: dict[str, object] = {
    "max_length": 96, "max_completion_length": 6, "num_generations": 4,
    "rewards": {"spread": RewardFunction(function="python:tasks.judgement.canary.spread")},
}  # fmt: skip
OWN: dict[str, dict[str, object]] = {  # fields of one method
    "cpt": {"max_length": 16},
    "taid": {"alpha": 1.0, "t_end": 0.8},  # in three steps, t leaves the line
    "on_policy_distill": {"max_completion_length": 6},
    "grpo": GENERATED,
    "rloo": GENERATED,
    "online_dpo": {**GENERATED, "num_generations": 2, "max_completion_length": 12},
    "ppo": {**GENERATED, "num_generations": 2},
}


def method(name: str, **fields: object) -> Training:
    """The named method with fields for tiny models."""
    return METHODS[name](**{**FIELDS, **OWN.get(name, {}), **fields})  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One computation whose results the canary compares.

    Args:
        slots: slot -> folder of the inputs; of the others, the folder of their kind.
        max_logits: of one product in the head, above which it works in chunks; None: as in a training.
        needs: a package, without which it is left out.
    """

    method: Method
    slots: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = Resources(micro_batch_size=4, cpus_per_worker=1)
    max_logits: int | None = None
    needs: str = ""

    def why_not(self) -> str:
        """Why this machine cannot run it; empty: it can."""
        if self.needs and find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return "no NVIDIA GPU here" if self.resources.gpus_per_worker and "gpu" not in hardware() else ""


def _kernels(**resources: object) -> Resources:
    return replace(Recipe(method=method("sft")).resources, **resources)  # type: ignore[arg-type]


_LORA = Adapter(rank=4, alpha=8)
_GPU = _kernels(gpus_per_worker=1, deterministic=True)
_GENERATED = {"teacher": "teacher", "prompts": "prompts"}
RECIPES: Mapping[str, Recipe] = {
    **{name: Recipe(method=method(name)) for name in METHODS},
    "sft-lora": Recipe(method=method("sft", adapter=_LORA)),
    "sft-qlora": Recipe(
        method=method("sft", adapter=_LORA, quantization=Quantization(format="nf4")), needs="bitsandbytes"
    ),
    "sft-bf16": Recipe(method=method("sft", precision="bf16")),
    "sft-padded": Recipe(method=method("sft"), slots={"policy": "gpt2"}),  # which has no padding-free forward
    "sft-packed": Recipe(method=method("sft", packing="best_fit", global_batch_size=4, max_length=64)),
    "sft-experts": Recipe(method=method("sft"), slots={"policy": "experts"}),
    **{
        f"{name}-images": Recipe(
            method=method(name, max_length=256, num_steps=2, images=Images()),
            slots={"policy": "sees", METHODS[name].reads.slot: f"pictures/{METHODS[name].reads.kind.value}"},
        )
        for name in ("sft", "dpo", "grpo")
    },
    "steps": Recipe(method=Steps(learning_rate=3e-3)),
    "sft-chunked-head": Recipe(method=method("sft"), max_logits=1),
    "sft-sdpa": Recipe(method=method("sft"), resources=_kernels(attention="sdpa")),
    "sft-eager": Recipe(method=method("sft"), resources=_kernels(attention="eager")),
    "sft-checkpointing": Recipe(method=method("sft"), resources=_kernels(gradient_checkpointing="on")),
    "sft-gpu": Recipe(method=method("sft", precision="bf16"), resources=_GPU),
    "sft-liger": Recipe(
        method=method("sft", precision="bf16"), resources=replace(_GPU, liger=True), needs="liger_kernel"
    ),
    "generate-greedy": Recipe(
        method=TeacherAnswers(max_new_tokens=8, max_length=96, unfinished="keep"), slots=_GENERATED
    ),
    "generate-sampled": Recipe(
        method=TeacherAnswers(max_new_tokens=8, max_length=96, unfinished="keep", sampling=Sampling(), num_answers=2),
        slots=_GENERATED,
    ),
    "merge": Recipe(
        method=Merge(combination="ties", density=0.5),
        slots={"base": "policy", "policy": "other", "third": "third"},
    ),
    "evaluate": Recipe(
        method=Evaluate(num_rows=12, num_prompts=4, max_new_tokens=5, max_length=128, max_cut=1),
        slots={
            "text": "text", "conversations": "conversations", "pairs": "preferences", "unpaired": "unpaired",
            "reward_model": "judge", "reference": "policy", "other": "other",
        },
    ),
    "base": Recipe(
        method=BaseModel(vocab_size=300, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4),
        slots={"rows": "text"},
    ),
    "prepare": Recipe(method=PrepareConversations(), slots={"rows": _RAW}),
    "unpair": Recipe(method=Unpair(), slots={"pairs": "preferences"}),
}  # fmt: skip


# --- one run


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a recipe computed.

    Args:
        figures: name -> values: of each step, each row, or one.
        digests: of weights, to the bit.
        seconds: of CPU time, which other processes of the machine change little.
        error: that ended it; empty: none.
    """

    figures: Mapping[str, Sequence[float]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def run(name: str, root: Path, *, num_threads: int = 1) -> Outcome:
    """Runs a recipe in this process, on the inputs of ``write_inputs``."""
    import torch

    start, before = time.process_time(), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with tempfile.TemporaryDirectory(prefix="posttrain-canary-") as place:
            figures, digests = _results(RECIPES[name], root, Path(place))
    except Exception as error:  # of whatever library: that it fails is the result
        return Outcome(error=f"{type(error).__name__}: {error}".splitlines()[0])
    finally:
        torch.set_num_threads(before)
    return Outcome(figures=figures, digests=digests, seconds=round(time.process_time() - start, 2))


def _results(recipe: Recipe, root: Path, place: Path) -> tuple[dict[str, list[float]], dict[str, str]]:
    reports: list[Metrics] = []
    ctx = TrainContext(
        output_dir=place / "output", work_dir=place / "work", resources=recipe.resources,
        report=lambda step, metrics: reports.append(dict(metrics)),
    )  # fmt: skip
    ctx.work_dir.mkdir()
    ctx.output_dir.mkdir()
    with _head(recipe.max_logits):
        method, inputs = recipe.method, _inputs(recipe, root)
        metrics = _call_steps(method, inputs, ctx) if isinstance(method, Steps) else method.run(inputs, ctx)
    figures: dict[str, list[float]] = {}
    if recipe.method.trains:
        for name in ("loss", "grad_norm", "reward"):
            if values := [float(each[name]) for each in reports if name in each]:
                figures[name] = values
    else:
        left_out = [
            name for name in metrics if is_of_machine(name) or name.startswith("weights/")
        ]  # digests as numbers
        figures = {name: [float(value)] for name, value in sorted(metrics.items()) if name not in left_out}
    digests = {}
    if recipe.method.produces in DATA:
        figures["row_checksums"] = list(_rows(ctx.output_dir))
    elif files := sorted(ctx.output_dir.rglob("*.safetensors")):
        digests["weights"], figures["weights"] = _weights(files)
    return figures, digests


def _call_steps(method: Steps, inputs: Inputs, ctx: TrainContext) -> Metrics:
    """The calls of a program: it samples, and trains on its completions by one loss after another."""
    from tasks.train.steps.session import Session

    session = Session(method, inputs["policy"], ctx)
    prompts = [session.tokenizer(sentence(index, 4))["input_ids"] for index in range(8)]
    made = cast("list[list[dict[str, list[float]]]]", session.generate(prompts, max_tokens=6)["completions"])
    rows = []
    for prompt, [completion] in zip(prompts, made, strict=True):
        tokens, asked = [*prompt, *completion["tokens"]], [0.0] * (len(prompt) - 1)
        ones = [*asked, *[1.0] * len(completion["tokens"])]
        rows.append(
            Row(tokens=tokens[:-1], target_tokens=tokens[1:], weights=ones, advantages=ones,
                logprobs=[*asked, *completion["logprobs"]])
        )  # fmt: skip
    for step, loss in enumerate(("cross_entropy", "importance_sampling", "grpo"), 1):
        found = session.backward(rows, loss)
        session.step()
        ctx.report(step, {name: cast("float", found[name]) for name in ("loss", "grad_norm")})
    return session.write_model()


def _inputs(recipe: Recipe, root: Path) -> Inputs:
    consumes, optional = recipe.method.consumes, recipe.method.optional
    names = {
        slot: "policy" if kind == Kind.CHECKPOINT else kind.value
        for slot, kind in consumes.items() if slot not in optional and slot != "*"
    }  # fmt: skip
    names |= {"teacher": "teacher"} if "teacher" in names else {}
    found = {}
    for slot, name in {**names, **recipe.slots}.items():
        path = root / name
        source = Source(path=str(path)) if path.is_file() else None
        kind = consumes.get(slot, Kind.CHECKPOINT)
        found[slot] = Input(name=name, kind=kind, fingerprint=f"{name:f<64}", path=path, source=source)
    return found


@contextmanager
def _head(max_logits: int | None) -> Iterator[None]:
    from tasks.train.kernels import padding_free

    with mock.patch.object(padding_free, "MAX_LOGITS", max_logits or padding_free.MAX_LOGITS):
        yield


def _rows(output: Path) -> Iterator[float]:
    """A checksum of each row of a data stage."""
    import pyarrow.parquet as pq

    for name in (TRAIN, HELD_OUT):
        for row in pq.read_table(output / name).to_pylist():
            yield zlib.crc32(json.dumps(row, sort_keys=True).encode()) & 0xFFFF


def _weights(files: Sequence[Path]) -> tuple[str, list[float]]:
    """A digest of all weights, to the bit; and their norm and sums under different signs: how far they moved.

    The sums are rounded once, so that no machine adds them up otherwise.
    """
    from safetensors.torch import load_file

    digest, squares = hashlib.sha256(), list[float]()
    sums: list[list[float]] = [[] for _ in range(_NUM_SUMS)]
    for file in files:
        for name, tensor in sorted(load_file(file).items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode() + _bytes(tensor))
            values = tensor.double().flatten().tolist()
            squares.append(fsum(value * value for value in values))
            for which, parts in enumerate(sums):
                parts.append(fsum(map(mul, values, _signs(len(values), which))))
    return digest.hexdigest(), [sqrt(fsum(squares)), *map(fsum, sums)]


def _bytes(tensor: "Tensor") -> bytes:
    import torch

    return cast("bytes", tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


Emit = Callable[[str, str, Outcome], None]
# Runs in which only rounding differs: threads, and the pattern of ``move_last_bits``.
VARIANTS: Mapping[str, tuple[int, int | None]] = {"threads": (2, None), "last bits": (1, 0), "other last bits": (1, 1)}


def run_all(names: Sequence[str], emit: Emit, *, noise: bool) -> None:
    """Runs recipes and hands over each outcome.

    Args:
        emit: ``emit(name, variant, outcome)``; the variant of the plain run is empty.
        noise: run the variants too.
    """
    with tempfile.TemporaryDirectory(prefix="posttrain-canary-") as place:
        variants = {"": (1, None), **(VARIANTS if noise else {})}
        roots: dict[int | None, Path] = {}
        for _, pattern in variants.values():
            if pattern not in roots:
                root = write_inputs(Path(place, str(pattern)))
                roots[pattern] = root if pattern is None else move_last_bits(root, pattern)
        for module in dict.fromkeys(module for name in names for module in RECIPES[name].method.preload):
            import_module(module)  # no recipe's seconds are those of imports
        for name in names:
            for variant, (num_threads, pattern) in variants.items():
                emit(name, variant, run(name, roots[pattern], num_threads=num_threads))


def main() -> int:
    """Runs the recipes that the command names."""
    from lineage.filesystem.files import append_jsonl

    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("names", nargs="+", choices=RECIPES)
    parser.add_argument("--noise", action="store_true")
    options = parser.parse_args()

    def emit(name: str, variant: str, outcome: Outcome) -> None:
        append_jsonl(options.file, {"name": name, "variant": variant, **asdict(outcome)}, flush=False)

    run_all(options.names, emit, noise=options.noise)
    return 0


if __name__ == "__main__":
    sys.exit(main())
