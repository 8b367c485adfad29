"""Files behind a URL, of a bucket in memory."""

import json
import os
import sys
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lineage.artifact import Kind, Source
from lineage.digest import DigestCache
from lineage.errors import ConfigError
from lineage.remote_files import open_remote, remote_versions
from lineage.sources import pin
from tests.site import site

KNOWN = sys.modules["fsspec.registry"]._registry  # protocol -> file system, of those that were asked for


class Drive(MemoryFileSystem):
    """A store in memory that asks for a token and tells what Google's does."""

    protocol = "gs"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    root_marker = ""

    def __init__(self, token: str | None = None, **options: object) -> None:
        super().__init__(**options)
        if token != "hunter2hunter2":
            raise PermissionError(f"the token {token} is not known")

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("gs://", "memory://"))


@pytest.fixture
def drive(monkeypatch):
    monkeypatch.setitem(KNOWN, "gs", Drive)
    monkeypatch.setenv("DRIVE_TOKEN", "hunter2hunter2")
    Drive(token="hunter2hunter2").pipe("/drive/a.jsonl", b"one")
    yield
    Drive.store.clear()


@pytest.fixture
def bucket():
    files = fsspec.filesystem("memory")
    files.pipe({"/bucket/a.jsonl": b"one", "/bucket/deep/b.jsonl": b"two"})
    yield files
    files.store.clear()


def fingerprint(url: str, tmp_path) -> str:
    return pin("rows", Source(path=url), DigestCache(tmp_path / "digests.json")).fingerprint


def test_a_url_names_a_file_a_directory_or_a_glob(bucket):
    assert list(remote_versions("rows", "memory://bucket")) == [
        "memory:///bucket/a.jsonl", "memory:///bucket/deep/b.jsonl",
    ]  # fmt: skip
    assert list(remote_versions("rows", "memory://bucket/a.jsonl")) == ["memory:///bucket/a.jsonl"]
    assert list(remote_versions("rows", "memory://bucket/*.jsonl")) == ["memory:///bucket/a.jsonl"]
    with open_remote("memory:///bucket/a.jsonl") as file:
        assert file.read() == b"one"


def test_a_bucket_is_pinned_to_what_it_holds_now(bucket, tmp_path):
    before = fingerprint("memory://bucket", tmp_path)
    assert fingerprint("memory://bucket", tmp_path) == before
    bucket.pipe("/bucket/a.jsonl", b"six")
    changed = fingerprint("memory://bucket", tmp_path)
    bucket.pipe("/bucket/c.jsonl", b"three")
    assert len({before, changed, fingerprint("memory://bucket", tmp_path)}) == 3


def test_a_checksum_is_the_version_where_there_is_one(monkeypatch, bucket):
    listed = {"/bucket/a.jsonl": {"name": "/bucket/a.jsonl", "type": "file", "size": 3, "ETag": '"e"'}}
    monkeypatch.setattr(type(bucket), "find", lambda *_, **__: listed)
    versions = []
    for etag, modified in (('"e"', "monday"), ('"e"', "tuesday"), ('"f"', "tuesday")):
        listed["/bucket/a.jsonl"] |= {"ETag": etag, "LastModified": modified}
        versions += remote_versions("rows", "memory://bucket").values()
    assert versions[0] == versions[1] != versions[2]


def test_a_file_system_that_tells_no_version_is_refused(monkeypatch, bucket):
    listed = {"/bucket/a.jsonl": {"name": "/bucket/a.jsonl", "type": "file", "size": 3}}
    monkeypatch.setattr(type(bucket), "find", lambda *_, **__: listed)
    asked = type(bucket).info
    monkeypatch.setattr(type(bucket), "info", lambda self, path: listed.get(path) or asked(self, path))
    with pytest.raises(ConfigError, match="neither a checksum nor a time of change"):
        remote_versions("rows", "memory://bucket")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://none", "no file there"), ("zzz://bucket/a.jsonl", "cannot be listed"),
        ("s3://bucket", "with its package installed .s3fs for s3://"),
        ("gs://bucket", "with its package installed .s3fs for s3://, gcsfs for gs://"),
    ],
)  # fmt: skip
def test_what_cannot_be_listed_is_told(url, message, tmp_path, monkeypatch):
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    for protocol in ("s3", "gs"):
        monkeypatch.delitem(KNOWN, protocol, raising=False)
    with pytest.raises(ConfigError, match=message):
        fingerprint(url, tmp_path)


def test_a_web_page_is_a_file_and_a_page_that_ends_with_a_slash_lists_them(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    with site(folder) as address:
        for name in ("a", "b"):
            (folder / f"{name}.jsonl").write_text(json.dumps({"text": f"see {address}/{name}.jsonl/more"}))
        assert list(remote_versions("rows", f"{address}/a.jsonl")) == [f"{address}/a.jsonl"]
        for url in (f"{address}/", f"{address}/*.jsonl"):
            assert list(remote_versions("rows", url)) == [f"{address}/a.jsonl", f"{address}/b.jsonl"]
        before = fingerprint(f"{address}/a.jsonl", tmp_path)
        os.utime(folder / "a.jsonl", (1, 1))
        assert fingerprint(f"{address}/a.jsonl", tmp_path) != before
        with pytest.raises(ConfigError, match="no file there, or its server does not answer"):
            remote_versions("rows", f"{address}/none.jsonl")


def test_a_model_is_not_read_from_a_url(tmp_path):
    source = Source(path="memory://bucket/model", kind=Kind.CHECKPOINT)
    with pytest.raises(ConfigError, match="a model is not read from a URL"):
        pin("base", source, DigestCache(tmp_path / "digests.json"))


def test_a_file_system_is_given_what_the_named_variables_hold(drive):
    credentials = {"token": "DRIVE_TOKEN"}
    (url,) = remote_versions("rows", "gs://drive/a.jsonl", credentials)
    with open_remote(url, credentials) as file:
        assert file.read() == b"one"


def test_what_a_file_system_says_of_a_secret_is_not_repeated(drive, monkeypatch):
    monkeypatch.setenv("DRIVE_TOKEN", "another secret")
    with pytest.raises(ConfigError, match=r"the token \$DRIVE_TOKEN is not known") as error:
        remote_versions("rows", "gs://drive/a.jsonl", {"token": "DRIVE_TOKEN"})
    assert "another secret" not in str(error.value)


@pytest.mark.parametrize(
    ("credentials", "message"),
    [
        ({"secret": "DRIVE_TOKEN"}, r"sources.rows.credentials.secret: Drive has no such option; accepted: token"),
        ({"token": "NOT_SET"}, r"sources.rows.credentials.token=NOT_SET: no environment variable of that name is set"),
        ({"token": "ya29.A0value"}, r"sources.rows.credentials.token is no name of an environment variable"),
    ],
)
def test_credentials_that_cannot_be_are_named(drive, credentials, message):
    with pytest.raises(ConfigError, match=message):
        remote_versions("rows", "gs://drive/a.jsonl", credentials)
