"""Rows in a bucket: pinned, read and refused, on an S3 server of this machine."""

import contextlib
import gzip
import io
import json
import logging
import multiprocessing
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import boto3
import pytest
from moto.server import ThreadedMotoServer

from flows.stages.execute import adopted, clear_mirror
from lineage.artifact import Kind, Source
from lineage.checkpoints import Mirror
from lineage.errors import ConfigError, DataError, StoppedError
from lineage.filesystem.digest import DigestCache, digest_files
from lineage.filesystem.remote_files import open_remote
from lineage.source.sources import pin
from lineage.store import Entry, Manifest
from tasks.context import TrainContext
from tasks.data.images import StoredImages
from tasks.data.reading.chunk import Row
from tasks.data.reading.read import read_chunks
from tasks.method import Input
from tasks.prepare_data import PrepareConversations
from tests import training
from tests.command import CONF, Command
from tests.stage_folder import StageFolder
from tests.tiny_vision import picture

ENVIRONMENT = {"ROWS_KEY": "of-the-rows", "ROWS_SECRET": "hunter2hunter2", "AWS_EC2_METADATA_DISABLED": "true"}
CREDENTIALS = {"key": "ROWS_KEY", "secret": "ROWS_SECRET", "endpoint_url": "ROWS_URL"}


@dataclass(frozen=True)
class Bucket:
    """A bucket named ``rows``.

    Args:
        environment: what ``CREDENTIALS`` name, and what keeps botocore from asking elsewhere.
    """

    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        return self.environment["ROWS_URL"]

    def client(self):
        keys = {"aws_access_key_id": "any", "aws_secret_access_key": "any"}
        return boto3.client("s3", endpoint_url=self.address, region_name="us-east-1", **keys)

    def put(self, name: str, content: bytes) -> None:
        self.client().put_object(Bucket="rows", Key=name, Body=content)

    def delete(self, name: str) -> None:
        self.client().delete_object(Bucket="rows", Key=name)


@contextlib.contextmanager
def bucket() -> Iterator[Bucket]:
    """A server of its own, with an empty bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it tells each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    made = Bucket({**ENVIRONMENT, "ROWS_URL": f"http://{host}:{port}"})
    try:
        made.client().create_bucket(Bucket="rows")
        yield made
    finally:
        server.stop()


pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server():
    with bucket() as made:
        yield made


@pytest.fixture
def rows(server, monkeypatch):
    """The bucket, with two files of rows and one of other things."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.put("set/a.jsonl.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}\n'))
    server.put("set/b.jsonl", b'{"text": "three"}\n')
    server.put("set/README.md", b"what this is")
    return server


def source(path: str, **fields) -> Source:
    return Source(path=path, credentials=CREDENTIALS, **fields)


def fingerprint(path: str, tmp_path) -> str:
    return pin("rows", source(path), DigestCache(tmp_path / "digests.json")).fingerprint


def read(path: str, **fields) -> list[Row]:
    return [row for chunk in read_chunks(source(path, **fields)) for row in chunk.rows()]


def test_a_plan_sees_each_change_of_an_object(rows, tmp_path):
    before = fingerprint("s3://rows/set/*.jsonl*", tmp_path)
    assert fingerprint("s3://rows/set/*.jsonl*", tmp_path) == before
    rows.put("set/b.jsonl", b'{"text": "THREE"}\n')
    changed = fingerprint("s3://rows/set/*.jsonl*", tmp_path)
    rows.delete("set/a.jsonl.gz")
    assert len({before, changed, fingerprint("s3://rows/set/*.jsonl*", tmp_path)}) == 3
    rows.delete("set/b.jsonl")
    with pytest.raises(ConfigError, match=r"s3://rows/set/b.jsonl: no file there"):
        fingerprint("s3://rows/set/b.jsonl", tmp_path)


def test_what_changed_since_the_plan_is_not_read(rows, tmp_path):
    pinned = pin("rows", source("s3://rows/set"), DigestCache(tmp_path / "digests.json")).source
    rows.put("set/b.jsonl", b'{"text": "other"}\n')
    with pytest.raises(DataError, match="s3://rows/set: its files have changed since the plan was made"):
        list(read_chunks(pinned))


def test_an_object_that_goes_away_while_it_is_read_is_named(rows):
    chunks = read_chunks(source("s3://rows/set/*.jsonl*"))
    next(chunks)
    rows.delete("set/b.jsonl")
    with pytest.raises(DataError, match=r"s3://rows/set/b.jsonl: cannot be copied here \(FileNotFoundError: "):
        list(chunks)


def test_wrong_credentials_are_one_line_without_them(rows, monkeypatch, tmp_path):
    monkeypatch.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)  # from now on it looks at keys
    monkeypatch.setattr("moto.core.responses.ActionAuthenticatorMixin.request_count", 0)
    with pytest.raises(ConfigError, match=r"cannot be listed \(PermissionError: ") as error:
        fingerprint("s3://rows/set/b.jsonl", tmp_path)
    assert "\n" not in str(error.value) and "hunter2" not in str(error.value)


def test_a_training_whose_machine_is_lost_resumes_from_the_bucket_to_the_bit(rows, root, tmp_path, monkeypatch, caplog):
    keys = {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_ENDPOINT_URL": rows.address}
    for name, value in {**keys, "AWS_DEFAULT_REGION": "us-east-1"}.items():
        monkeypatch.setenv(name, value)
    stage, whole = training.method("sft", num_steps=4), StageFolder(tmp_path / "whole", root)
    whole(stage)
    lost = StageFolder(tmp_path / "sft" / "f00d", root, save_steps=1, checkpoint_mirror="s3://rows/kept")
    with pytest.raises(StoppedError):
        lost(stage, should_stop=lambda: len(lost.reports) == 2)
    mirror, entry = Mirror("s3://rows/kept", lost.folder), Entry(lost.folder)
    mirror.require_writable()
    assert lost.store.steps() == [1, 2, 3] and mirror.steps()[-1] == 3
    mirror.push(lost.store.path(2), lost.store.read(2))
    shutil.rmtree(lost.folder)
    rows.put("kept/sft/f00d/step-3/model.safetensors", b"other bytes")
    assert adopted(mirror, entry, 0).step == 2
    assert "step-3/model.safetensors has SHA-256" in caplog.text
    lost(stage, resume=2)
    assert digest_files(lost.output) == digest_files(whole.output)
    rows.put("kept/sft/f00d/step-4/model.safetensors", b"the begin")  # and then the process was killed
    mirror.keep(())
    assert "Contents" not in rows.client().list_objects_v2(Bucket="rows", Prefix="kept/")
    nowhere, announced = Mirror("s3://nowhere/x", lost.folder), list[str]()
    with pytest.raises(ConfigError, match=r"checkpoint_mirror=s3://nowhere/x: cannot be written \(FileNotFoundError: "):
        nowhere.require_writable()
    clear_mirror(nowhere, (), announced.append)
    [line] = announced
    assert (
        line.startswith("resources.checkpoint_mirror=s3://nowhere/x: cannot be written (")
        and "the output is whole" in line
    )


def _read_into(results: "multiprocessing.Queue[bytes]") -> None:
    with open_remote("s3://rows/set/b.jsonl", CREDENTIALS) as file:
        results.put(file.read())


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_process_that_was_forked_or_spawned_after_reading_reads(start, rows):
    read("s3://rows/set/b.jsonl")  # the file system's own thread runs here, and is not there after a fork
    context = multiprocessing.get_context(start)
    results = context.Queue()
    process = context.Process(target=_read_into, args=(results,))
    process.start()
    try:
        assert results.get(timeout=60) == b'{"text": "three"}\n'
    finally:
        process.kill()
        process.join(120)


def test_the_command_prepares_rows_of_a_bucket_and_writes_no_secret(rows, tmp_path):
    rows.put("many/a.jsonl.gz", gzip.compress(b"".join(b'{"text": "row %d"}\n' % number for number in range(40))))
    command = Command(tmp_path, environment=dict(rows.environment))
    result = command(
        "stage", "data", "--config-dir", str(CONF), "pipeline=toy", "model=none", "tracking=none",
        "stages.data.method={_target_: tasks.prepare_data.PrepareText, held_out: 0.2}",
        "sources.rows.path='s3://rows/many/*.jsonl.gz'",
        "sources.rows.credentials={key: ROWS_KEY, secret: ROWS_SECRET, endpoint_url: ROWS_URL}",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    (file,) = (tmp_path / "artifacts" / "data").glob("*/manifest.json")
    manifest = Manifest.from_json(file.read_text())
    assert manifest.metrics["rows"] == 40
    for file in tmp_path.rglob("*"):
        assert not file.is_file() or b"hunter2" not in file.read_bytes(), file


def zipped(files: dict[str, bytes]) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, each in files.items():
            archive.writestr(name, each)
    return content.getvalue()


def test_an_archive_or_a_folder_of_rows_and_images_in_a_bucket_is_read(rows, tmp_path):
    def prepared(files: dict[str, bytes], place: str = "set.zip") -> dict[str, float]:
        for name, content in {place: zipped(files)}.items() if place.endswith(".zip") else files.items():
            rows.put(place if place.endswith(".zip") else f"{place}/{name}", content)
        given = pin("rows", source(f"s3://rows/{place}"), DigestCache(tmp_path / "digests.json")).source
        made = Input(name="rows", kind=Kind.ROWS, fingerprint="", path=tmp_path, source=given)
        context = TrainContext(output_dir=tmp_path / "out", work_dir=tmp_path)
        return PrepareConversations(held_out=0.5).run({"rows": made}, context)

    def row(image: str, number: int) -> bytes:
        asked = {"role": "user", "content": f"<image>{number}?"}
        turns = [asked, {"role": "assistant", "content": "a"}]
        return json.dumps({"messages": turns, "images": [image]}).encode() + b"\n"

    good = b"".join(row("pictures/red.png", number) for number in range(8))
    assert prepared({"train.jsonl": good, "pictures/red.png": picture(1)})["images"] == 1
    stored = StoredImages.beside(tmp_path / "out")
    assert stored and stored.read(0) == picture(1)
    assert prepared({"train.jsonl": good, "pictures/red.png": picture(2)}, "folder")["images"] == 1
    found = StoredImages.beside(tmp_path / "out")
    assert found and found.read(0) == picture(2)
    with pytest.raises(DataError, match=r"folder/train.jsonl:1: images\[0\]: 's3://rows/folder/no.png' cannot be read"):
        prepared({"train.jsonl": row("no.png", 0)}, "folder")
    with pytest.raises(DataError, match=r"s3://rows/set.zip/train.jsonl:1: images\[0\].* which is outside"):
        prepared({"train.jsonl": row("../red.png", 0), "pictures/red.png": picture(1)})
    with pytest.raises(DataError, match=r"s3://rows/set.zip: it has '../red.png', which is outside of it"):
        prepared({"train.jsonl": good, "../red.png": picture(1)})
    with pytest.raises(DataError, match=r"s3://rows/set.zip: a.png unpacks from \d+ bytes to 33554432"):
        prepared({"train.jsonl": good, "a.png": b"0" * 2**25})
