"""A model's directory holds its own files: no link and no index brings another file into an output."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save_file

from lineage.artifact import Kind, Source
from lineage.errors import ConfigError
from lineage.filesystem.digest import DigestCache
from lineage.source.model_files import (
    INDEX,
    read_json,
    require_own_files,
    require_sound,
    weight_places,
    why_no_reward_model,
)
from lineage.source.sources import pin
from tasks.judgement.disk_need import model_shapes
from tasks.model.fetch_model import fetch_model
from tasks.model.merging import places_of


@pytest.fixture
def model(tmp_path):
    """A directory with a secret beside it."""
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file({"w": np.zeros(1)}, directory / "model.safetensors")
    (tmp_path / "secret").write_text("s")
    return directory


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("vocab.txt", "../secret"),
        ("additional_chat_templates", ".."),
        ("templates/tool_use.jinja", "../../secret"),
        ("additional_chat_templates", "."),  # endless
        ("merges.txt", "/etc/passwd"),
        ("README.md", "../gone"),
        ("README.md", "README.md"),
    ],
)
def test_a_link_that_leaves_the_directory_is_refused_by_plan_and_run(model, tmp_path, name, target):
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).symlink_to(target)
    source = Source(path=str(model), kind=Kind.CHECKPOINT)
    with pytest.raises(ConfigError, match=rf"{name} is (a link to|no file).*; replace it by a copy"):
        pin("base", source, DigestCache(None))
    with pytest.raises(ConfigError, match=f"{name} is (a link to|no file)"):
        fetch_model(source, tmp_path / "cache")


def test_links_within_the_directory_and_to_it_are_accepted(model, tmp_path):
    (model / "vocab.txt").symlink_to("config.json")
    (tmp_path / "link").symlink_to(model)
    source = Source(path=str(tmp_path / "link"), kind=Kind.CHECKPOINT)
    assert pin("base", source, DigestCache(None)).digest
    assert fetch_model(source, tmp_path / "cache") == tmp_path / "link"


def test_a_snapshot_of_a_hub_cache_links_to_its_own_blobs_alone(tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    for folder in (blobs, snapshot, tmp_path / "models--c--d" / "blobs"):
        folder.mkdir(parents=True)
    (blobs / "f00").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/f00")
    require_own_files(snapshot)
    (snapshot / "vocab.txt").symlink_to("../../../models--c--d/blobs/f00")
    with pytest.raises(ConfigError, match=r"vocab\.txt is a link"):
        require_own_files(snapshot)
    (snapshot / "vocab.txt").unlink()
    (blobs / "f01").symlink_to("/etc/passwd")
    (snapshot / "vocab.txt").symlink_to("../../blobs/f01")
    with pytest.raises(ConfigError, match=r"vocab\.txt is a link to /etc/passwd"):
        require_own_files(snapshot)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b.safetensors"])
def test_an_index_that_names_a_file_elsewhere_is_refused(model, name):
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "a.safetensors", "v": name}}))
    with pytest.raises(ConfigError, match=rf"model.safetensors.index.json names {name}, which is not in "):
        require_sound(model)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"w": 1}}'])
def test_a_broken_index_is_named(model, text):
    (model / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConfigError, match=r"model.safetensors.index.json: cannot be read .*; .* write or download it"):
        require_sound(model)


@pytest.mark.parametrize("name", ["vocab.txt", "config.json"])
def test_a_pipe_is_refused_and_not_waited_for(model, name):
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    with pytest.raises(ConfigError, match=rf"{name} is no file; .*accepted"):
        require_own_files(model)


def test_a_plan_reads_the_files_of_a_model(model):
    (model / "config.json").write_text("[" * 100_000)
    assert read_json(model, "config.json") is None  # for who can do without it
    with pytest.raises(ConfigError, match=r"config.json: cannot be read as a part of a model \(RecursionError"):
        require_sound(model)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"cut"),
        ("model.safetensors", b"\xff" * 64),
        ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
        ("model.safetensors", (2).to_bytes(8, "little") + b"{}" + b"more"),
        ("config.json", b'{"model_type": '),
        ("config.json", b"[1]"),
        ("tokenizer.json", b"\xff\xfe"),
    ],
)
def test_a_damaged_file_of_a_model_is_named(model, name, content):
    (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{model / name}: cannot be read as a part of a model"):
        pin("base", Source(path=str(model), kind=Kind.CHECKPOINT), DigestCache(None))


@pytest.mark.parametrize(
    ("config", "weights", "why"),
    [
        ({"id2label": {"0": "LABEL_0"}}, {"score.weight": (1, 4)}, None),
        ({"num_labels": 1}, {"score.weight": (1, 4)}, None),
        ({"id2label": {"0": "LABEL_0"}}, {"base_model.model.score.weight": (1, 4)}, None),  # of an adapter
        ({}, {"base_model.model.score.weight": (1, 4)}, None),  # whose base names no labels
        ({}, {"lm_head.weight": (9, 4)}, "no file of it has a head"),  # a language model
        ({"id2label": {"0": "LABEL_0"}}, {"model.embed_tokens.weight": (9, 4)}, "no file of it has a head"),
        ({"id2label": {"0": "LABEL_0"}}, {"my_score.weight": (1, 4)}, "no file of it has a head"),
        ({}, {"score.weight": (2, 4)}, "its head has 2 labels"),
        ({"id2label": {"0": "no", "1": "yes", "2": "both"}}, {"score.weight": (3, 4)}, "its head has 3 labels"),
        ({"id2label": {"0": "LABEL_0"}}, {"score.weight": (2, 4)}, "its head has 2 labels"),
    ],
)
def test_a_reward_model_has_a_head_with_one_label(tmp_path, config, weights, why):
    save_file({name: np.zeros(shape) for name, shape in weights.items()}, tmp_path / "model.safetensors")
    found = why_no_reward_model(config, [tmp_path])
    assert found is None if why is None else why in found


def write_index(model, **files):
    (model / INDEX).write_text(json.dumps({"weight_map": files}))


def test_weights_in_two_forms_are_refused_with_their_dates_by_every_reader(model, tmp_path):
    assert weight_places(model) == {"w": model / "model.safetensors"}
    save_file({"w": np.ones(1)}, model / "model-00001-of-00001.safetensors")
    write_index(model, w="model-00001-of-00001.safetensors")
    os.utime(model / INDEX, (0, 86400 * 365))
    source = Source(path=str(model), kind=Kind.CHECKPOINT)
    twice = r"holds its weights twice, as model.safetensors \(20\d\d-.*\) and by model.safetensors.index.json \(1971-"
    readers = (
        weight_places, require_sound, model_shapes, places_of,
        lambda _: pin("base", source, DigestCache(None)), lambda _: fetch_model(source, tmp_path / "cache"),
    )  # fmt: skip
    for read in readers:
        with pytest.raises(ConfigError, match=twice):
            read(model)
    (model / "model.safetensors").unlink()
    assert weight_places(model) == {"w": model / "model-00001-of-00001.safetensors"}
    assert model_shapes(model) == {"w": (1,)}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"w": "part.safetensors", "gone": "part.safetensors"}, "gone is not where it says"),
        ({"w": "part.safetensors", "v": "other.safetensors"}, "other.safetensors is missing"),
    ],
)
def test_a_stale_index_is_refused(model, files, message):
    (model / "model.safetensors").rename(model / "part.safetensors")
    write_index(model, **files)
    with pytest.raises(ConfigError, match=message):
        require_sound(model)


def test_an_index_that_leaves_a_tensor_of_its_files_out_is_refused(model):
    save_file({"w": np.zeros(1), "v": np.zeros(1)}, model / "part.safetensors")
    (model / "model.safetensors").unlink()
    write_index(model, w="part.safetensors")
    with pytest.raises(ConfigError, match="v is not where it says"):
        weight_places(model)
