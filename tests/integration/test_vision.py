"""Trainings on rows with images: tokens and losses are those of plain transformers with the model's own processor."""

import copy
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForImageTextToText
from trl.trainer.utils import add_fused_lm_head

from flows.serving.chat import _turn
from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError
from tasks.context import Resources, TrainContext
from tasks.data.images import MARK, Images, StoredImages, write_images
from tasks.data.kinds import IGNORED, TRAIN, messages_of
from tasks.data.preparing.prepare import token_lengths
from tasks.data.tokens.encoding import Rendered
from tasks.data.tokens.rendering import blocks_of
from tasks.data.tokens.tokenization import SEEING, Tokenization
from tasks.data.tokens.tokenize_rows import TokenizedRows, load_or_make
from tasks.evaluate.evaluate import Evaluate
from tasks.evaluate.row_scores import read_scores
from tasks.judgement.disk_need import model_shapes, percent_trained
from tasks.judgement.estimate import trained_weights
from tasks.method import Adapter, Input, Training
from tasks.model.tokenizers import tokenizer_of
from tasks.model.vision import Vision, processor_of
from tasks.train.kernels.padding_free import collator_for, install, is_padding_free
from tasks.train.models.freeze import part_of
from tasks.train.sharding import take_part
from tests import tiny, training
from tests.command import call
from tests.integration.test_resume import stop_and_go_on
from tests.tiny import sentence
from tests.tiny_vision import FAMILIES, picture, write_image_rows, write_vision_model
from tests.worker_group import Asked

pytestmark, slow = pytest.mark.usefixtures("one_thread"), pytest.mark.slow

FEW = [
    pytest.param(each, marks=[] if each in ("qwen2_vl", "gemma3", "mllama") else pytest.mark.slow) for each in FAMILIES
]


ONE = [pytest.param(each, marks=[] if each == "qwen2_vl" else pytest.mark.slow) for each in FAMILIES]


def sft(**fields: object) -> Training:
    return training.method("sft", **{"max_length": 512, "num_steps": 2, "images": Images(), **fields})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    for kind in ("conversations", "preferences", "unpaired", "prompts"):
        write_image_rows(root / kind, 16, held_out=4, kind=kind)
    return root


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")

    def written(family: str) -> Path:
        if family == "smolvlm":
            pytest.importorskip("num2words")
        path = folder / family
        return path if path.exists() else write_vision_model(path, family)

    return written


def tokens(root: Path, model: Path, **options: Any) -> TokenizedRows:
    tokenization = Tokenization(**{"kind": Kind.CONVERSATIONS, "images": Images(), "max_length": 512, **options})
    kind = tokenization.kind
    rows = Input(name="rows", kind=kind, fingerprint="f" * 64, path=root / kind.value)
    return load_or_make(tokenization, rows, model, None, 1)


def plain(rows: Path, model: Path, columns: tuple[tuple[str, ...], ...] = (("messages",),)) -> dict[str, torch.Tensor]:
    """All rows in one batch, as plain transformers makes it; of pairs the chosen answers, and then the others."""
    tokenizer, stored = tokenizer_of(model), StoredImages.beside(rows)
    assert stored
    texts, images = [], []
    for row, names in [(row, names) for names in columns for row in pq.read_table(rows / TRAIN).to_pylist()]:
        messages = [message for name in names for message in messages_of(row[name])]
        found = [digest for each in messages for digest in MARK.findall(str(each["content"]))]
        images.append([stored.image(stored.places[digest]) for digest in found])
        parts = [{**each, "content": blocks_of(str(each["content"]))} for each in messages]
        texts.append(str(tokenizer.apply_chat_template(parts, tokenize=False)).removesuffix("\n"))
    tokenizer.padding_side = "right"
    processor = processor_of(model, tokenizer, {})
    return dict(processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"))


def plain_logits(
    model: Path, batch: dict[str, torch.Tensor], auto: Any = AutoModelForImageTextToText, *, negative: bool = False
) -> torch.Tensor:
    """Those of transformers' own class. What a row of Llama 3.2 Vision reads there depends on its batch: it is alone.

    Args:
        auto: AutoModel: the last hidden states.
        negative: of the negatives of the images.
    """
    whole, info = auto.from_pretrained(model, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"]
    whole, batches = whole.eval(), [batch]
    if "cross_attention_mask" in batch:
        batches = list[dict[str, torch.Tensor]]()
        for at, of_images in enumerate(batch["aspect_ratio_ids"]):
            row, count = {name: each[at : at + 1] for name, each in batch.items()}, int((of_images > 0).sum())
            own = {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"]}
            seen = {name: row[name][:, :count] for name in ("pixel_values", "aspect_ratio_ids", "aspect_ratio_mask")}
            seen["cross_attention_mask"] = row["cross_attention_mask"][:, :, :count]
            batches.append({**own, **(seen if count else {})})
    for each in batches if negative else ():
        each |= {"pixel_values": -each["pixel_values"]} if "pixel_values" in each else {}
    with torch.no_grad():
        found = [whole(**each) for each in batches]
    return torch.cat([each.last_hidden_state if auto is AutoModel else each.logits for each in found])


@pytest.mark.parametrize("family", FEW)
def test_tokens_and_loss_are_those_of_plain_transformers(root: Path, models: Any, tmp_path: Path, family: str) -> None:
    model = models(family)
    rows = tokens(root, model)
    expected = plain(root / "conversations", model)
    lengths = expected["attention_mask"].sum(1).tolist()
    ids = [row[:length] for row, length in zip(expected["input_ids"].tolist(), lengths, strict=True)]
    assert rows.columns["input_ids"] == ids
    labels = torch.full_like(expected["input_ids"], IGNORED)
    for row, found in zip(labels, rows.columns["labels"], strict=True):
        row[: len(found)] = torch.tensor(found)
    loss, turned = (
        torch.nn.functional.cross_entropy(
            plain_logits(model, {**expected}, negative=negative)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        ) for negative in (False, True)
    )  # fmt: skip
    assert abs(turned - loss) > 1e-4  # images count
    stage = sft(num_steps=1, global_batch_size=16)
    runs = [
        training.train(stage, root, tmp_path / str(size), policy=model, resources=Resources(micro_batch_size=size))
        for size in (16, 2)
    ]
    assert [run.losses[0] for run in runs] == pytest.approx([float(loss)] * 2, rel=1e-5)


SIDES = (("prompt", "chosen"), ("prompt", "rejected"))


def answered(found: TokenizedRows, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Which tokens of a batch of pairs are those of their answers."""
    columns = found.columns
    mask = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    rows = [(at, name) for name in ("chosen", "rejected") for at in range(len(found))]
    for place, (at, name) in enumerate(rows):
        prompt, answer = columns["prompt_ids"][at], columns[f"{name}_ids"][at]
        ids = batch["input_ids"][place, : int(batch["attention_mask"][place].sum())]
        assert ids.tolist() == prompt + answer
        mask[place, len(prompt) : len(prompt) + len(answer)] = True
    return mask


@pytest.mark.parametrize("family", ONE)
def test_pairs_have_the_log_probabilities_of_plain_transformers(
    root: Path, models: Any, tmp_path: Path, family: str
) -> None:
    model = models(family)
    batch = plain(root / "preferences", model, SIDES)
    mask = answered(tokens(root, model, kind=Kind.PREFERENCES), batch)
    ids = batch["input_ids"].where(mask, 0)
    logps = plain_logits(model, batch)[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    chosen, rejected = (logps * mask[:, 1:]).sum(1).chunk(2)
    fields = {"num_steps": 1, "global_batch_size": 16, "max_length": 512, "images": Images()}
    for name, size in (("dpo", 16), ("dpo", 2), ("simpo", 4)):
        stage, out = training.method(name, **fields), tmp_path / f"{name}-{size}"
        run = training.train(stage, root, out, policy=model, resources=Resources(micro_batch_size=size))
        found = run.reports[0][1]
        assert found["logps/chosen"] == pytest.approx(float(chosen.mean()), rel=1e-5)
        assert found["logps/rejected"] == pytest.approx(float(rejected.mean()), rel=1e-5)
        if name == "dpo":
            assert found["loss"] == pytest.approx(math.log(2), rel=1e-6)


@pytest.mark.parametrize("family", ONE)
def test_a_reward_model_has_the_loss_of_plain_transformers(
    root: Path, models: Any, tmp_path: Path, family: str
) -> None:
    """Where transformers has no class with a head, its backbone is read by the one without."""
    from transformers import AutoModelForSequenceClassification

    model = models(family)
    stage = training.method(
        "reward", num_steps=1, global_batch_size=16, max_length=512, images=Images(), learning_rate=1e-12
    )
    runs = [
        training.train(stage, root, tmp_path / str(size), policy=model, resources=Resources(micro_batch_size=size))
        for size in (16, 2)
    ]
    batch = plain(root / "preferences", model, SIDES)
    last, score = batch["attention_mask"].sum(1) - 1, load_file(runs[0].output / "model.safetensors")["score.weight"]
    hidden = plain_logits(runs[0].output, {**batch}, AutoModel)[torch.arange(len(last)), last]
    chosen, rejected = (hidden @ score.float().T).squeeze(1).chunk(2)
    margins = chosen - rejected
    loss = -torch.nn.functional.logsigmoid(margins).mean()
    assert margins.abs().max() > 1e-3
    assert [run.reports[0][1]["margin"] for run in runs] == pytest.approx([float(margins.mean())] * 2, abs=1e-5)
    if family == "gemma3":
        whole = AutoModelForSequenceClassification.from_pretrained(runs[0].output, dtype=torch.float32).eval()
        torch.testing.assert_close(whole.score.weight, score.float())
    assert [run.losses[0] for run in runs] == pytest.approx([float(loss)] * 2, rel=1e-5)


@pytest.mark.parametrize("name", ["dpo", pytest.param("kto", marks=pytest.mark.slow)])
def test_preferences_on_images_are_learnt(root: Path, models: Any, tmp_path: Path, name: str) -> None:
    stage = training.method(name, max_length=512, images=Images(trains=("projector",)), num_steps=3)
    run = training.train(stage, root, tmp_path / "out", policy=models("qwen2_vl"))
    assert changed(models("qwen2_vl"), run.output) == {"text", "projector"}
    assert run.losses[2] < run.losses[0]


@pytest.mark.parametrize(
    ("name", "family"),
    [*(pytest.param("grpo", *each.values, marks=each.marks) for each in ONE),
     *(pytest.param(name, "qwen2_vl", marks=slow) for name in ("rloo", "online_dpo"))],
)  # fmt: skip
def test_completions_of_prompts_with_images_are_sampled_and_trained_with_them(
    root: Path, models: Any, tmp_path: Path, name: str, family: str
) -> None:
    """The trainer compares its log-probabilities with those of the sampler; the images change them."""
    fields = {
        "max_length": 512, "max_completion_length": 6, "num_generations": 4, "global_batch_size": 8, "num_steps": 2,
        "beta": 0.1, "images": Images(), "learning_rate": 1e-2,
    }  # fmt: skip
    model = models(family)
    run = training.train(training.method(name, **fields), root, tmp_path / "out", policy=model)
    assert changed(model, run.output) == {"text"}
    assert run.reports[0][1]["sampler/logp_difference_max"] < 1e-4


def test_a_precomputed_reference_is_that_of_the_step(root: Path, models: Any, tmp_path: Path) -> None:
    stage = training.method("dpo", max_length=512, images=Images(), num_steps=2)
    runs = [
        training.train(
            stage, root, tmp_path / str(ahead), policy=models("qwen2_vl"),
            resources=Resources(micro_batch_size=8, precompute_reference=ahead),
        )
        for ahead in (False, True)
    ]  # fmt: skip
    assert runs[0].losses == pytest.approx(runs[1].losses, rel=1e-5)


LINES = [
    pytest.param(*each, marks=[] if each in (("qwen2_vl", True), ("qwen3_vl", False), ("gemma3", True)) else slow)
    for each in itertools.product(sorted(SEEING), (True, False)) if each != ("gemma3", False)  # it keeps its padding
]  # fmt: skip


@pytest.mark.parametrize(("family", "packs"), LINES)
def test_a_line_of_rows_with_images_has_the_losses_and_gradients_of_padded_rows(
    root: Path, models: Any, family: str, packs: bool
) -> None:
    found, batch = tokens(root, models(family)), plain(root / "conversations", models(family))
    labels = torch.full_like(batch["input_ids"], IGNORED)
    for row, own in zip(labels, found.columns["labels"], strict=True):
        row[: len(own)] = torch.tensor(own)
    padded = AutoModelForImageTextToText.from_pretrained(models(family), dtype=torch.float32)
    line = copy.deepcopy(padded)
    logits = padded(**batch).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
    add_fused_lm_head(line, outputs=("log_probs", "entropy", "is_top1"))
    assert is_padding_free(line) == (family != "gemma3")
    install(line, packs=packs)
    vision = Vision.of(models(family), root / "conversations")
    assert vision
    if packs:
        found = tokens(root, models(family), packing="best_fit", max_length=300)
        assert 1 < len(found) < 12
    collate = collator_for(line, type(sft()).reads.collator(0), packs=packs)
    inputs: Any = vision.collator(collate, packs=packs)(list(found.dataset(range(len(found)))))
    outputs = line(**inputs, fused_lm_head=True, use_cache=False)
    own = -outputs.log_probs[outputs.label_mask]
    expected = expected[labels[:, 1:] != IGNORED]
    torch.testing.assert_close(own.sort().values, expected.sort().values, atol=1e-5, rtol=1e-5)
    for losses in (own, expected):
        losses.mean().backward()
    for (name, left), right in zip(padded.named_parameters(), line.parameters(), strict=True):
        if left.grad is None:
            assert right.grad is None or not right.grad.any(), name
        else:
            torch.testing.assert_close(right.grad, left.grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("family", ["qwen2_vl", *(pytest.param(each, marks=slow) for each in ("gemma3", "llava"))])
def test_packs_of_rows_with_images_train_as_the_rows(root: Path, models: Any, tmp_path: Path, family: str) -> None:
    model = models(family)
    found = tokens(root, model, packing="best_fit", max_length=300)
    losses = {}
    for name, stage in {
        "packs": sft(packing="best_fit", max_length=300, global_batch_size=len(found), num_steps=3),
        "rows": sft(max_length=300, global_batch_size=16, num_steps=3),
    }.items():
        resources = Resources(micro_batch_size=len(found) if name == "packs" else 4)
        losses[name] = training.train(stage, root, tmp_path / name, policy=model, resources=resources).losses
    assert losses["packs"] == pytest.approx(losses["rows"], rel=1e-5)
    assert losses["rows"][2] < losses["rows"][0]


def changed(before: Path, after: Path) -> set[str]:
    """The parts of a model whose weights differ."""
    left, right = (load_file(each / "model.safetensors") for each in (before, after))
    assert left.keys() == right.keys()
    names = {name for name in left if not torch.equal(left[name].float(), right[name].float())}
    towers = ("visual", "vision", "projector")
    return {part_of(name) if any(word in name for word in towers) else "text" for name in names}


@pytest.mark.parametrize(
    ("images", "parts"),
    [
        (Images(), {"text"}),
        (Images(trains=("projector",)), {"text", "projector"}),
        (Images(trains=("vision", "projector")), {"text", "projector", "vision"}),
        (Images(trains=("projector",), language="frozen"), {"projector"}),
    ],
)
def test_the_language_model_alone_is_trained_unless_other_parts_are_named(
    root: Path, models: Any, tmp_path: Path, images: Images, parts: set[str]
) -> None:
    """Also where a micro batch has no images, and the language model is frozen."""
    model, resources = models("gemma3"), Resources(micro_batch_size=1 if images.language else 8)
    stage = sft(images=images, learning_rate=1e-2)
    run = training.train(stage, root, tmp_path / "out", policy=model, resources=resources)
    assert changed(model, run.output) == parts
    assert run.losses[1] < run.losses[0]
    again = training.train(sft(num_steps=1), root, tmp_path / "again", policy=run.output)  # the output reads images
    assert again.losses


@pytest.mark.parametrize(
    "images",
    [
        Images(),
        pytest.param(Images(trains=("projector",)), marks=pytest.mark.slow),
        pytest.param(Images(trains=("vision",)), marks=pytest.mark.slow),
        Images(trains=("vision", "projector")),
        pytest.param(Images(trains=("projector",), language="frozen"), marks=pytest.mark.slow),
        Images(trains=("vision",), language="frozen"),
    ],
)
def test_an_adapter_trains_the_language_model_and_the_parts_that_are_named(
    root: Path, models: Any, tmp_path: Path, images: Images
) -> None:
    model = models("qwen2_vl")
    stage = sft(adapter=Adapter(rank=2), learning_rate=1e-2, images=images)
    run = training.train(stage, root, tmp_path / "out", policy=model)
    parts = {*(images.trains or ()), *(() if images.language else ("text",))}
    assert changed(model, run.output) == parts and run.losses[1] < run.losses[0]
    adapter = load_file(run.output / "adapter" / "adapter_model.safetensors")
    moved = {name for name, each in adapter.items() if "lora_B" in name and each.any()}  # B starts as zeros
    assert {part_of(name) if "visual" in name else "text" for name in moved} == parts


def test_a_part_without_a_linear_layer_gets_no_adapter(root: Path, models: Any, tmp_path: Path) -> None:
    stage = sft(adapter=Adapter(rank=2), images=Images(trains=("projector",)))
    with pytest.raises(ConfigError, match="no linear layer there for an adapter; remove it"):
        training.train(stage, root, tmp_path / "out", policy=models("gemma3"))


RESUMED = [("sft", family) for family in FAMILIES] + [("dpo", "gemma3"), ("reward", "qwen2_vl"), ("grpo", "llava")]


@pytest.mark.parametrize(
    ("name", "family"),
    [pytest.param(*each, marks=[] if each == ("sft", "qwen2_vl") else pytest.mark.slow) for each in RESUMED],
)
def test_a_resumed_training_has_the_bits_of_an_unbroken_one(
    root: Path, models: Any, tmp_path: Path, name: str, family: str
) -> None:
    stage = training.method(name, max_length=512, images=Images(trains=("projector",)), num_steps=5)
    stop_and_go_on(stage, root, tmp_path, policy=models(family))


@pytest.mark.parametrize("family", [pytest.param("llava", marks=pytest.mark.slow), "qwen2_vl"])
def test_a_teacher_reads_the_images_that_its_student_reads(
    root: Path, models: Any, tmp_path: Path, family: str
) -> None:
    (tmp_path / "inputs").mkdir()
    for name, path in {"policy": models(family), "conversations": root / "conversations"}.items():
        (tmp_path / "inputs" / name).symlink_to(path)
    write_vision_model(tmp_path / "inputs" / "teacher", family, seed=1)
    fields = {"max_length": 512, "num_steps": 1, "global_batch_size": 16, "images": Images()}
    losses = [
        training.train(
            training.method("distill", **fields), tmp_path / "inputs", tmp_path / str(size) / "out",
            resources=Resources(micro_batch_size=size),
        ).losses[0]
        for size in (16, 2)
    ]  # fmt: skip
    batch = plain(root / "conversations", models(family))
    labels = tokens(root, models(family)).columns["labels"]
    student, teacher = (
        plain_logits(each, batch).log_softmax(-1) for each in (models(family), tmp_path / "inputs" / "teacher")
    )
    kl = torch.nn.functional.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    found = [
        value
        for row, own in zip(kl.tolist(), labels, strict=True)
        for value, label in zip(row, own[1:], strict=False)
        if label != IGNORED
    ]
    assert losses == pytest.approx([sum(found) / len(found)] * 2, rel=1e-5)


BOTH = ("vision", "projector")
DIVIDED: list[tuple[str, str, Any, Any, str]] = [
    *(("sft", each, trains, None, "qwen2_vl")
      for each in ("none", "zero1", "zero2", "fsdp") for trains in (None, BOTH)),
    ("sft", "none", None, None, "mllama"),
    *(("sft", "fsdp", BOTH, None, family) for family in FAMILIES if family not in ("qwen2_vl", "mllama")),
    ("sft", "fsdp_grad", BOTH, None, "qwen3_vl"), ("sft", "zero2", BOTH, None, "qwen3_vl"),
    ("sft", "fsdp_hybrid", BOTH, None, "qwen2_vl"), ("dpo", "fsdp_hybrid", None, Adapter(rank=2), "gemma3"),
    *(("sft", sharding, BOTH, Adapter(rank=2), "qwen2_vl") for sharding in ("fsdp", "zero2")),
    ("dpo", "fsdp", BOTH, None, "gemma3"), ("dpo", "fsdp", None, Adapter(rank=2), "qwen2_vl"),
    *(("reward", "fsdp", BOTH, None, family) for family in ("gemma3", "qwen2_vl")),
    ("grpo", "fsdp", BOTH, None, "llava"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sharding", "trains", "adapter", "family"), DIVIDED)
def test_workers_train_as_one(
    root: Path, models: Any, tmp_path: Path, request: pytest.FixtureRequest, name: str, sharding: Any, trains: Any,
    adapter: Any, family: str,
) -> None:  # fmt: skip
    """Two, or two machines of two; also where the rows of one have no images, which then give the tower no gradient."""
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "policy").symlink_to(models(family))
    for kind in ("conversations", "preferences", "prompts"):
        (tmp_path / "inputs" / kind).symlink_to(root / kind)
    # Adam's first steps are about sign(gradient): those of pairs, which rounding changes more, are smaller.
    rate = 1e-3 if name == "sft" else 1e-4
    fields = {"images": Images(trains=trains), "num_steps": 3, "learning_rate": rate, "max_length": 512}
    stage = training.method(name, **fields, adapter=adapter, max_grad_norm=0.1)
    one = training.train(stage, tmp_path / "inputs", tmp_path / "one" / "output")
    resources = Resources(micro_batch_size=1, sharding=sharding)
    workers = "zero_workers" if sharding.startswith("zero") else "two_workers"
    if sharding == "fsdp_hybrid":
        workers, resources = "four_workers", replace(resources, num_workers=4, num_nodes=2)
    asked = Asked(stage=stage, root=tmp_path / "inputs", folder=tmp_path / "two", resources=resources)
    group = request.getfixturevalue(workers)
    done, *_ = group.train(asked)
    found_losses = [training.trajectory(metrics) for _, metrics in done.reports]
    assert found_losses == pytest.approx(one.losses, rel=1e-5 if name == "sft" else 1e-4, abs=1e-6)
    found = load_file(tmp_path / "two" / "output" / "model.safetensors")
    for key, value in load_file(one.output / "model.safetensors").items():
        torch.testing.assert_close(found[key], value, atol=1e-4, rtol=1e-3, msg=key)


@pytest.mark.parametrize(
    "family", [pytest.param(each, marks=[] if each == "qwen3_vl" else slow) for each in FAMILIES if each != "mllama"]
)
def test_a_batch_without_images_reaches_what_one_with_images_does(root: Path, models: Any, family: str) -> None:
    """So that no worker waits for another; the tower's gradients are 0, and the numbers those of the text alone."""
    model = AutoModelForImageTextToText.from_pretrained(models(family), dtype=torch.float32)
    batch = plain(root / "conversations", models(family))
    text = torch.arange(3, 23).view(2, 10)

    def reached(**inputs: Any) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(**inputs).logits.logsumexp(-1).sum().backward()
        return {name: each.grad for name, each in model.named_parameters() if each.grad is not None}

    with_images, alone = reached(**batch), reached(input_ids=text)
    take_part(model, Vision.of(models(family), root / "conversations"), trains=True)
    assert reached(**batch).keys() == with_images.keys()
    blank = reached(input_ids=text)
    assert blank.keys() == with_images.keys() > alone.keys()
    for name, gradient in blank.items():
        assert torch.equal(gradient, alone[name]) if name in alone else not gradient.any(), name


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


def test_rows_with_images_are_looked_at_with_a_model(models: Any, tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "b"}
    asked = [[{"role": "user", "content": f"<image>{sentence(index, 3)}"}, answer] for index in range(4)]
    (tmp_path / "a.png").write_bytes(picture(3))
    lines = [json.dumps({"messages": messages, "images": ["a.png"]}) for messages in asked]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    done = call(["data", str(tmp_path), f"model={models('qwen2_vl')}", "max_length=512", "held_out=1"], tmp_path, {})
    assert done.returncode == 0, done.stderr
    assert "<|vision_start|><|image_pad|>" in done.stdout and "⟦b<|im_end|>⟧" in done.stdout


def test_lengths_and_estimates_count_images(root: Path, models: Any) -> None:
    model = models("qwen2_vl")
    vision = Vision.of(model, root / "preferences")
    found = token_lengths([root / "preferences" / TRAIN], tokenizer_of(model), vision)
    stats = tokens(root, model, kind=Kind.PREFERENCES).stats
    trained = sorted(length for length, count in stats.lengths.items() for _ in range(count))
    assert sorted(found) == [length + 1 for length in trained]  # the template's last newline, which is not trained
    shapes = model_shapes(model)
    parts = {part: sum(math.prod(shapes[name]) for name in shapes if "visual" in name and part_of(name) == part)
             for part in ("vision", "projector")}  # fmt: skip
    whole = sum(map(math.prod, shapes.values()))
    for trains in ((), ("projector",), ("vision", "projector")):
        frozen = sum(size for part, size in parts.items() if part not in trains)
        stage = sft(images=Images(trains=trains or None))
        assert trained_weights(stage, shapes).trained == whole - frozen
        assert percent_trained(stage, shapes) == pytest.approx(100 * (1 - frozen / whole))


def test_an_image_that_the_processor_refuses_is_named_with_its_row(models: Any, tmp_path: Path) -> None:
    from PIL import Image

    digest, file = "a" * 64, tmp_path / "images.arrow"
    Image.new("RGB", (900, 4)).save(tmp_path / digest, "PNG")
    write_images([digest], [tmp_path], [], file)
    vision = Vision(directory=models("qwen2_vl"), stored=StoredImages(file), size={})
    with pytest.raises(DataError, match=r"row r7: its image of 900 x 4 pixels is refused .*must be smaller than 200"):
        vision.expanded(Rendered(text="<|image_pad|>"), [{"role": "user", "content": f"<image:{digest}>"}], "r7")


def test_a_processor_without_its_package_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_vision_model(tmp_path / "model", "smolvlm")
    monkeypatch.setattr("transformers.models.smolvlm.processing_smolvlm.num2words", None)
    with pytest.raises(ConfigError, match=r"SmolVLMProcessor cannot be loaded .*pip install 'posttrain\[vlm\]'"):
        processor_of(model, tokenizer_of(model), {})


def test_rows_with_images_are_refused_where_nothing_reads_them(root: Path, models: Any, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"this training, where images is null,: the rows of .conversations. have images"
    ):
        training.train(sft(images=None), root, tmp_path / "none", policy=models("qwen2_vl"))
    text = tiny.write_policy(tmp_path / "text")
    with pytest.raises(ConfigError, match="reads no images; a model with a vision_config"):
        training.train(sft(), root, tmp_path / "text-out", policy=text)


def test_a_model_that_reads_images_is_exported_and_asked(models: Any, tmp_path: Path) -> None:
    """The export loads as a user loads it, and its answer is that of plain generation."""
    from transformers import AutoProcessor

    model, picture_file = models("gemma3"), tmp_path / "a picture.png"
    picture_file.write_bytes(picture(3))
    done = call(["export", "merged", str(model), "--out", str(tmp_path / "merged")], tmp_path, {})
    assert done.returncode == 0, done.stderr
    assert {each.dtype for each in load_file(tmp_path / "merged" / "model.safetensors").values()} == {torch.bfloat16}
    processor = AutoProcessor.from_pretrained(tmp_path / "merged")
    parts = [{"type": "image", "path": str(picture_file)}, {"type": "text", "text": sentence(1, 4)}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}], add_generation_prompt=True, tokenize=True, return_dict=True,
        return_tensors="pt",
    )  # fmt: skip
    before, after = (
        AutoModelForImageTextToText.from_pretrained(each, dtype=torch.float32).eval()
        for each in (model, tmp_path / "merged")
    )
    with torch.no_grad():
        logps = [each(**inputs).logits.log_softmax(-1) for each in (before, after)]
        torch.testing.assert_close(*logps, atol=0.05, rtol=0.05)  # bf16
        ids = before.generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    output = ["chat", str(model), "--once", sentence(1, 4), "--image", str(picture_file), "--json"]
    reported = call([*output, "--max-new-tokens", "6", "--temperature", "0"], tmp_path, {})
    assert json.loads(reported.stdout)["turns"][0]["answers"][0]["text"] == processor.decode(
        ids, skip_special_tokens=True
    )
    text = tiny.write_policy(tmp_path / "text")
    refused = call(["chat", str(text), "--once", "a", "--image", str(picture_file)], tmp_path, {})
    assert refused.returncode == 2 and "reads no images" in refused.stderr
    with pytest.raises(ConfigError, match=r"the text spells <image:a+>, which is an image here"):
        _turn([], f"<image:{'a' * 64}>", "", quiet=True)


@pytest.mark.parametrize("family", ["qwen2_vl", pytest.param("mllama", marks=pytest.mark.slow)])
def test_answers_to_images_are_measured(
    root: Path, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Perplexity is that of the plain forward; answers are those of plain generation."""
    model = models(family)
    rows = Input(name="rows", kind=Kind.CONVERSATIONS, fingerprint="f" * 64, path=root / "conversations")
    policy = Input(name="policy", kind=Kind.CHECKPOINT, fingerprint="e" * 64, path=model)
    pairs = Input(name="pairs", kind=Kind.PREFERENCES, fingerprint="d" * 64, path=root / "preferences")
    given = {"conversations": rows, "pairs": pairs, "reference": policy, "sft": policy}
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
    for name in ("logp_accuracy", "preference_accuracy"):
        assert found["1"][f"sft/{name}"] == found["4"][f"sft/{name}"]
    scored = {size: read_scores(tmp_path / size)["mean_logp_accuracy"].scores["sft"] for size in ("1", "4")}
    assert scored["1"] == scored["4"]
    one, four = ((tmp_path / size / "answers.jsonl").read_text() for size in ("1", "4"))
    assert one == four
    kept = replace(ctx, cache_dir=tmp_path / "cache")
    again = [dict(Evaluate(max_length=512, max_new_tokens=8).run(given, kept)) for _ in range(2)]
    assert again == [found["4"]] * 2 and len(list((tmp_path / "cache" / "scores").rglob("*.json"))) == 5
    with monkeypatch.context() as patch:  # nothing is measured again
        patch.setattr("tasks.train.models.load.load_on_device", lambda *given: pytest.fail("a model is loaded"))
        Evaluate(max_length=512, max_new_tokens=8).run(given, kept)
