"""Trainings on rows with images: tokens and losses are those of plain transformers with the model's own processor."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.context import Resources, TrainContext
from tasks.data.images import MARK, Images, StoredImages
from tasks.data.kinds import IGNORED, TRAIN, messages_of
from tasks.data.tokens.rendering import blocks_of
from tasks.data.tokens.tokenization import Tokenization
from tasks.data.tokens.tokenize_rows import TokenizedRows, load_or_make
from tasks.evaluate.evaluate import Evaluate
from tasks.method import Adapter, Input, Training
from tasks.model.tokenizers import tokenizer_of
from tasks.model.vision import processor_of
from tasks.train.models.freeze import part_of
from tests import tiny, training
from tests.integration.test_resume import stop_and_go_on
from tests.tiny_vision import FAMILIES, write_image_rows, write_vision_model

pytestmark = pytest.mark.usefixtures("one_thread")

FEW = [pytest.param(each, marks=[] if each in ("qwen2_vl", "gemma3") else pytest.mark.slow) for each in FAMILIES]


def sft(**fields: object) -> Training:
    return training.method("sft", **{"max_length": 512, "num_steps": 2, "images": Images(), **fields})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    write_image_rows(root / "conversations", 16, held_out=4)
    return root


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")

    def written(family: str) -> Path:
        path = folder / family
        return path if path.exists() else write_vision_model(path, family)

    return written


def tokens(root: Path, model: Path, **options: Any) -> TokenizedRows:
    tokenization = Tokenization(**{"kind": Kind.CONVERSATIONS, "images": Images(), "max_length": 512, **options})
    rows = Input(name="rows", kind=Kind.CONVERSATIONS, fingerprint="f" * 64, path=root / "conversations")
    return load_or_make(tokenization, rows, model, None, 1)


def plain(root: Path, model: Path) -> dict[str, torch.Tensor]:
    """All rows in one batch, as plain transformers makes it."""
    tokenizer, stored = tokenizer_of(model), StoredImages.beside(root / "conversations")
    assert stored
    texts, images = [], []
    for row in pq.read_table(root / "conversations" / TRAIN).to_pylist():
        messages = messages_of(row["messages"])
        found = [digest for each in messages for digest in MARK.findall(str(each["content"]))]
        images.append([stored.image(stored.places[digest]) for digest in found])
        parts = [{**each, "content": blocks_of(str(each["content"]))} for each in messages]
        texts.append(str(tokenizer.apply_chat_template(parts, tokenize=False)).removesuffix("\n"))
    tokenizer.padding_side = "right"
    processor = processor_of(model, tokenizer, {})
    return dict(processor(text=texts, images=images, padding=True, return_tensors="pt"))


@pytest.mark.parametrize("family", FEW)
def test_tokens_and_loss_are_those_of_plain_transformers(root: Path, models: Any, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForImageTextToText

    model = models(family)
    rows = tokens(root, model)
    expected = plain(root, model)
    lengths = expected["attention_mask"].sum(1).tolist()
    ids = [row[:length] for row, length in zip(expected["input_ids"].tolist(), lengths, strict=True)]
    assert rows.columns["input_ids"] == ids
    labels = torch.full_like(expected["input_ids"], IGNORED)
    for row, found in zip(labels, rows.columns["labels"], strict=True):
        row[: len(found)] = torch.tensor(found)
    with torch.no_grad():
        whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
        loss = whole(**expected, labels=labels).loss
        turned = {**expected, "pixel_values": -expected["pixel_values"]}
        assert abs(whole(**turned, labels=labels).loss - loss) > 1e-4  # images count
    stage = sft(num_steps=1, global_batch_size=16)
    runs = [
        training.train(stage, root, tmp_path / str(size), policy=model, resources=Resources(micro_batch_size=size))
        for size in (16, 2)
    ]
    assert [run.losses[0] for run in runs] == pytest.approx([float(loss)] * 2, rel=1e-5)


def changed(before: Path, after: Path) -> set[str]:
    """The parts of a model whose weights differ."""
    left, right = (load_file(each / "model.safetensors") for each in (before, after))
    assert left.keys() == right.keys()
    names = {name for name in left if not torch.equal(left[name].float(), right[name].float())}
    towers = ("visual", "vision", "projector")
    return {part_of(name) if any(word in name for word in towers) else "text" for name in names}


@pytest.mark.parametrize(
    ("trains", "parts"),
    [
        (None, {"text"}),
        (("projector",), {"text", "projector"}),
        (("vision", "projector"), {"text", "projector", "vision"}),
    ],
)
def test_the_language_model_alone_is_trained_unless_other_parts_are_named(
    root: Path, models: Any, tmp_path: Path, trains: Any, parts: set[str]
) -> None:
    model = models("gemma3")
    run = training.train(sft(images=Images(trains=trains), learning_rate=1e-2), root, tmp_path / "out", policy=model)
    assert changed(model, run.output) == parts
    assert run.losses[1] < run.losses[0]
    again = training.train(sft(num_steps=1), root, tmp_path / "again", policy=run.output)  # the output reads images
    assert again.losses


def test_an_adapter_trains_the_language_model(root: Path, models: Any, tmp_path: Path) -> None:
    model = models("qwen2_vl")
    run = training.train(sft(adapter=Adapter(rank=2), learning_rate=1e-2), root, tmp_path / "out", policy=model)
    assert changed(model, run.output) == {"text"} and run.losses[1] < run.losses[0]


def test_a_resumed_training_has_the_bits_of_an_unbroken_one(root: Path, models: Any, tmp_path: Path) -> None:
    stop_and_go_on(sft(images=Images(trains=("projector",)), num_steps=5), root, tmp_path, policy=models("qwen2_vl"))


def test_pixels_are_limited_and_the_output_has_the_limit(root: Path, models: Any, tmp_path: Path) -> None:
    model = models("qwen2_vl")
    stage = sft(images=Images(max_pixels=256, min_pixels=64), num_steps=1)
    run = training.train(stage, root, tmp_path / "out", policy=model)
    few, many = tokens(root, run.output), tokens(root, model)
    assert few.stats.length < many.stats.length
    limited = tokens(root, model, images=Images(max_pixels=256, min_pixels=64))
    assert few.columns == limited.columns
    with pytest.raises(ConfigError, match=r"images.max_pixels: Gemma3ImageProcessorPil of .* does not count pixels"):
        tokens(root, models("gemma3"), images=Images(max_pixels=256))


def test_a_row_that_would_lose_a_part_of_an_image_is_dropped_and_counted(root: Path, models: Any) -> None:
    model = models("qwen2_vl")
    whole = tokens(root, model)
    image = tokenizer_of(model).convert_tokens_to_ids("<|image_pad|>")
    for too_long in (None, "cut_prompt"):
        cut = tokens(root, model, max_length=80, too_long=too_long)
        assert cut.stats.dropped["image_cut"].count > 0
        ids = [(row.count(image), len(places)) for row, places in
               zip(cut.columns["input_ids"], cut.columns["image_places"], strict=True)]  # fmt: skip
        of_image = {(row.count(image), len(places)) for row, places in
                    zip(whole.columns["input_ids"], whole.columns["image_places"], strict=True)}  # fmt: skip
        assert set(ids) <= of_image  # whole images alone


def test_rows_with_images_are_refused_where_nothing_reads_them(root: Path, models: Any, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"this training, where images is null,: the rows of .conversations. have images"
    ):
        training.train(sft(images=None), root, tmp_path / "none", policy=models("qwen2_vl"))
    text = tiny.write_policy(tmp_path / "text")
    with pytest.raises(ConfigError, match="reads no images; a model with a vision_config"):
        training.train(sft(), root, tmp_path / "text-out", policy=text)


def test_answers_to_images_are_measured(root: Path, models: Any, tmp_path: Path) -> None:
    """Perplexity is that of the plain forward; answers are those of plain generation."""
    model = models("qwen2_vl")
    rows = Input(name="rows", kind=Kind.CONVERSATIONS, fingerprint="f" * 64, path=root / "conversations")
    policy = Input(name="policy", kind=Kind.CHECKPOINT, fingerprint="e" * 64, path=model)
    given = {"conversations": rows, "reference": policy, "sft": policy}
    reports: list[tuple[int, Any]] = []
    found: dict[str, dict[str, float]] = {}
    for size in (1, 4):
        ctx = TrainContext(
            output_dir=tmp_path / str(size), work_dir=tmp_path, resources=Resources(micro_batch_size=size),
            report=lambda step, metrics: reports.append((step, metrics)),
        )  # fmt: skip
        ctx.output_dir.mkdir()
        found[str(size)] = dict(Evaluate(max_length=512, max_new_tokens=8).run(given, ctx))
    assert found["1"]["sft/answer_perplexity"] == pytest.approx(found["4"]["sft/answer_perplexity"], rel=1e-5)
    assert found["1"]["sft/exact_match"] == found["4"]["sft/exact_match"]
    one, four = ((tmp_path / size / "answers.jsonl").read_text() for size in ("1", "4"))
    assert one == four
