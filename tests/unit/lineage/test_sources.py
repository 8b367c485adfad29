"""Sources: what they may state, what they are pinned to, and what is identity."""

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import ClassVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from lineage.artifact import Kind, Source
from lineage.checkpoints import Mirror
from lineage.errors import ConfigError
from lineage.filesystem.digest import DigestCache
from lineage.filesystem.remote_files import file_system, open_remote, remote_versions
from lineage.fingerprint import canonical_json
from lineage.secrets import first_line, secrets_of
from lineage.source.model_source import resized, tokens_beyond
from lineage.source.sources import pin as pin_with
from tests.web_server import site

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def pinned(source):
    return pin_with("rows", source, DigestCache(None))


def pin(path, **fields):
    return pinned(Source(path=str(path), **fields))


def hub(**fields) -> Source:
    return Source(path="owner/name", revision=COMMIT, **fields)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (hub(shuffle_buffer=10), r"sources.rows.shuffle_buffer=10: nothing is shuffled without shuffle_seed"),
        (hub(streaming=True), r"streaming=true: split=train does not say how many rows to take.*train\[:10000\]"),
        (hub(streaming=True, split="train[:90%]"), r"split=train\[:90%\] does not say how many rows"),
        (hub(kind=Kind.CHECKPOINT, format="messages"), r"sources.rows.format: it says how rows are read.*checkpoint"),
        (hub(kind=Kind.CHECKPOINT, split="test"), r"sources.rows.split: it says how rows are read.*; remove split, or"),
        (hub(credentials={"key": "KEY"}), r"sources.rows.credentials: owner/name is read without any"),
        (hub(allow_code=True), r"sources.rows.allow_code=true: owner/name runs no code; .*; remove allow_code"),
        (Source(path=__file__, allow_code=True), r"sources.rows.allow_code=true: .* runs no code"),
        (Source(path=__file__, revision="abc"), r"sources.rows.revision=abc: .* has no revisions; .*remove revision"),
        (
            Source(path="quickstart:corpus", revision="abc"),
            r"sources.rows.revision=abc: quickstart:corpus is .*-rows\d+ now, and gives no other revision; remove",
        ),
        (
            Source(path="python:tasks.quickstart.sorting.prompts", revision="abc"),
            r"sources.rows.revision=abc: .* gives no other revision",
        ),
        (Source(path="quickstart:corpus", streaming=True, sample_count=1), "quickstart:corpus is not a hub data set"),
        (
            Source(path=__file__, columns={"prompt": "q", "text": "q"}),
            r"columns: the rows' column 'q' has two names of ours; one is accepted",
        ),
        (
            Source(path="rows.csv", loader={"sep": "::"}),
            r"sources.rows.loader: '::' separates no cells; one character is accepted",
        ),
        (Source(path=__file__, loader={"sep": ";"}), r"sources.rows.loader: .* and of a CSV file loader.sep alone"),
        (Source(path="memory://bucket/model", kind=Kind.CHECKPOINT), "a model is not read from a URL"),
    ],
)
def test_what_nothing_would_read_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        pinned(source)


def test_a_bounded_stream_is_pinned_and_a_sample_of_it_is_another_than_that_of_all_rows(tmp_path, monkeypatch):
    for bound in ({"split": "train[:1000]"}, {"split": "train[5:1000]"}):
        assert pinned(hub(streaming=True, **bound)).source.streaming
    whole, stream = (pinned(hub(sample_count=5, streaming=streaming)) for streaming in (False, True))
    assert whole.fingerprint != stream.fingerprint
    assert stream.record.reading == {"sample_count": 5, "streaming": True}
    assert pinned(hub(sample_count=5, labels=("nc",))).fingerprint == whole.fingerprint
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").write_text("{}")  # a file whose path could be a hub id
    with pytest.raises(ConfigError, match=r"owner/name is not a hub data set; .* remove streaming"):
        pin("owner/name", streaming=True, sample_count=1)


def test_what_was_pinned_can_be_pinned_again(tmp_path):
    """As it is before a stage starts; the revision is then our own."""
    (tmp_path / "a.py").write_text("def rows(): ...")
    for source in (Source(path="quickstart:corpus"), Source(path=f"python:{tmp_path}/a.py:rows", allow_code=True),
                   Source(path=str(tmp_path))):  # fmt: skip
        first = pinned(source)
        assert pinned(first.source).fingerprint == first.fingerprint


@pytest.mark.parametrize(
    "configured",
    [
        {"format": "messages"}, {"columns": {"prompt": "q"}}, {"sample_count": 5}, {"shuffle_seed": 0},
        {"shuffle_seed": 0, "shuffle_buffer": 3}, {"split": "train[:5]"},
    ],
)  # fmt: skip
def test_how_rows_are_read_is_identity_and_recorded(configured, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    path = str(tmp_path / "rows.jsonl")
    plain, other = pinned(Source(path=path)), pinned(Source(path=path, **configured))
    assert plain.fingerprint != other.fingerprint
    assert {**plain.record.configured(), **configured} == other.record.configured()


def test_sources_whose_columns_were_set_the_other_way_round_keep_their_fingerprint(tmp_path):
    """Stores that were made while ``columns`` was the rows' column -> our name stay current."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"q": "a"}\n')
    found = pin(rows, columns={"prompt": "q", "completion": "a"})
    digest = pin(rows).digest
    identity = {
        "kind": "rows", "content": digest, "revision": None, "split": "train",
        "columns": {"q": "prompt", "a": "completion"},
    }  # fmt: skip
    assert found.fingerprint == hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    assert found.record.reading == {"columns": {"prompt": "q", "completion": "a"}}


@pytest.mark.parametrize("value", ["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "AKIAIOSFODNN7EXAMPLE", "hf_abc", ""])
def test_a_value_in_place_of_a_name_is_refused_and_not_repeated(value):
    source = Source(path="memory://a.jsonl", credentials={"key": value})
    with pytest.raises(ConfigError, match=r"credentials.key is not the name of an environment variable") as refused:
        secrets_of(source.credentials)
    assert not value or value not in str(refused.value)


def test_the_region_of_a_bucket_is_given_as_its_other_options_are(monkeypatch):
    from s3fs import S3FileSystem

    monkeypatch.setenv("MY_REGION", "eu-west-3")
    with file_system("s3://rows/a.jsonl", {"region": "MY_REGION"}) as (files, path):
        assert isinstance(files, S3FileSystem) and path == "rows/a.jsonl"
        assert files.client_kwargs == {"region_name": "eu-west-3"}
    with pytest.raises(ConfigError, match=r"credentials.regoin: S3FileSystem has no such option; accepted: .*region"):
        file_system("s3://rows/a.jsonl", {"regoin": "MY_REGION"}).__enter__()
    with pytest.raises(ConfigError, match=r"credentials.region: MemoryFileSystem has no such option"):
        file_system("memory://a.jsonl", {"region": "MY_REGION"}).__enter__()


def test_what_a_library_says_is_reported_first_line(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2hunter2")
    output = first_line(ValueError("signed with hunter2hunter2\nand more"), {"secret": "MY_SECRET"})
    assert output == "ValueError: signed with $MY_SECRET"


LINES, PARAGRAPHS = "a\nb\n\n", "a\nb\n\nc\n"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "lines.txt").write_text(LINES)
    (tmp_path / "paragraphs.txt").write_text(PARAGRAPHS)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    return tmp_path


def test_the_fingerprint_of_texts_without_paragraphs_is_what_it_was(rows: Path) -> None:
    """As a version without ``split_by`` gave it."""
    assert pin(rows / "lines.txt").fingerprint == "227d64305e1757009548e4496c8ba57e54b6d9f202379213fd0d6cacc4aef389"
    assert pin(rows / "rows.jsonl").fingerprint == "adca97c231e2f67ba7c6d6cbcd05551e7404d823cd21ef977dfe0d404397fdbf"


def test_paragraphs_are_recorded_and_identity(rows: Path) -> None:
    found = pin(rows / "paragraphs.txt")
    assert found.record.reading == {"split_by": "paragraph"}
    assert found.fingerprint == pin(rows / "paragraphs.txt", split_by="paragraph").fingerprint
    configured = [pin(rows / "paragraphs.txt", split_by=each) for each in ("line", "document")]
    assert len({found.fingerprint, *(each.fingerprint for each in configured)}) == 3
    assert [each.record.reading for each in configured] == [{"split_by": "line"}, {"split_by": "document"}]


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
@pytest.mark.parametrize(
    ("values", "metadata", "found"),
    [
        (pa.array(["1"]), {}, []),
        (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["1"])), {}, ["json"]),
        (
            pa.array([[{"a": [("b", "1")]}]], pa.list_(pa.struct([("a", pa.map_(pa.string(), pa.string()))]))),
            {},
            ["maps"],
        ),
        (pa.array([0]), {"huggingface": '{"info": {"features": {"label": {"names": ["bad", "good"]}}}}'}, ["labels"]),
        (pa.array([0]), {"huggingface": '{"info": {"features": {"label": {"dtype": "int64"}}}}'}, []),
        (pa.array([0]), {"huggingface": "[]"}, []),
        (pa.array([0]), {"huggingface": "{"}, []),
    ],
    ids=["text", "json", "maps", "labels", "numbers", "a list", "damaged"],
)
def test_tables_whose_values_were_once_read_otherwise_have_another_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, values: pa.Array, metadata: dict, found: list[str]
) -> None:
    file, table = tmp_path / f"rows.{suffix}", pa.table({"label": values}).replace_schema_metadata(metadata)
    if suffix == "parquet":
        pq.write_table(table, file)
    else:  # a file, and a stream, as `datasets` writes it
        with (pa.ipc.new_file if suffix == "feather" else pa.ipc.new_stream)(file, table.schema) as writer:
            writer.write_table(table)
    now = pin(file)
    assert now.record.reading == ({"values": found} if found else {})
    monkeypatch.setattr("lineage.source.sources._values", lambda files: {})
    assert (pin(file).fingerprint == now.fingerprint) == (not found)


def test_columns_in_the_names_of_directories_are_identity(rows: Path) -> None:
    """The digest of a glob is of contents alone."""
    for name in ("label=1", "label=0", "good"):
        (rows / "parted" / name).mkdir(parents=True)
        (rows / "parted" / name / "a.jsonl").write_bytes((rows / "rows.jsonl").read_bytes())
    found = [pin(rows / f"parted/{name}*/a.jsonl") for name in ("label=1", "label=0", "good")]
    assert [list(each.record.reading) for each in found] == [["partitions"], ["partitions"], []]
    assert len({each.fingerprint for each in found}) == 3
    assert found[-1].fingerprint == pin(rows / "rows.jsonl").fingerprint


def test_a_directory_of_both_is_neither(rows: Path) -> None:
    (rows / "rows.jsonl").unlink()
    assert pin(rows).record.reading == {"split_by": "per file"}
    (rows / "paragraphs.txt").rename(rows / "README.txt")  # a note, which is not read
    assert pin(rows).record.reading == {}
    assert pin(rows / "README.txt").record.reading == {"split_by": "paragraph"}
    memory = fsspec.filesystem("memory")  # behind a URL they are split as they would be here
    for name in ("lines.txt", "README.txt"):
        memory.pipe(f"/{rows.name}/{name}", (rows / name).read_bytes())
    assert pin(f"memory://{rows.name}/lines.txt").record.reading == {}
    assert pin(f"memory://{rows.name}/README.txt").record.reading == {"split_by": "paragraph"}


@pytest.mark.parametrize("path", ["rows.jsonl", "quickstart:corpus", "python:os.listdir"])
def test_what_is_no_text_is_not_split(rows: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(rows)
    with pytest.raises(ConfigError, match=r"split_by=line: .* has no file of plain text; .txt, .text, .md are split"):
        pin(path, split_by="line")


CODE = "raise RuntimeError('it ran')\ndef rows():\n    yield {'text': 'one'}\ndef others(): ...\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``mine`` with a function ``mine.rows.rows`` that reads a constant of ``mine.words``."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "rows.py").write_text("from mine import words\n" + CODE)
    (folder / "words.py").write_text("WORDS = 1\n")
    (folder / "apart.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    return folder


def test_a_function_is_pinned_to_its_code_and_what_that_imports(package):
    before = pin("python:mine.rows.rows")
    assert pin("python:mine.rows.others").fingerprint != before.fingerprint
    (package / "apart.py").write_text("unrelated = 1\n")
    assert pin("python:mine.rows.rows").fingerprint == before.fingerprint
    (package / "words.py").write_text("WORDS = 2\n")
    imported = pin("python:mine.rows.rows")
    (package / "rows.py").write_text("from mine import words\n" + CODE.replace("one", "two"))
    assert len({before.fingerprint, imported.fingerprint, pin("python:mine.rows.rows").fingerprint}) == 3
    assert before.record.revision == before.source.revision
    assert "mine" not in sys.modules  # and CODE, once run, would have raised


def test_a_file_is_pinned_to_its_bytes_wherever_it_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(CODE)
    one, moved = (pin(f"python:{name}:rows", allow_code=True) for name in ("a.py", "b.py"))
    assert one.fingerprint == moved.fingerprint
    assert one.source.path == f"python:{tmp_path}/a.py:rows"
    (tmp_path / "a.py").write_text(CODE.replace("one", "two"))
    assert pin("python:a.py:rows", allow_code=True).fingerprint != one.fingerprint


def test_a_file_runs_only_where_it_is_allowed(tmp_path):
    (tmp_path / "a.py").write_text(CODE)
    with pytest.raises(ConfigError, match=r"come from running that file; set sources.rows.allow_code=true"):
        pin(f"python:{tmp_path}/a.py:rows")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("python:", "names no function; accepted: python:PACKAGE.MODULE.FUNCTION"),
        ("python:rows", "names no function"),
        ("python:mine.rows.", "names no function"),
        ("python:mine..rows", "names no function"),
        ("python:rows.txt:rows", "names no function"),
        ("python:none.rows", "no Python source of a module none"),
        ("python:mine.none.rows", "no Python source of a module mine.none"),
        ("python:sys.exit", "no Python source of a module sys"),
        ("python:math.sqrt", "no Python source of a module math"),
        ("python:none.py:rows", "none.py: no such file"),
        ("python:mine.rows.row", r"rows.py defines no row; functions in it: others, rows"),
        ("python:mine.cut.rows", r"cut.py:1: not Python: .*; correct the line"),
        ("python:mine.rows.rows", r"allow_code=true: python:mine.rows.rows is a function of a module; .*remove it"),
    ],
)
def test_what_is_no_function_is_named_when_the_plan_is_made(path, message, package):
    (package / "cut.py").write_text("def rows(:\n")
    with pytest.raises(ConfigError, match=f"sources.rows: .*{message}"):
        pin(path, allow_code=True)


def test_a_function_has_no_splits_but_slices(package):
    with pytest.raises(ConfigError, match=r"sources.rows.split=test: a function has no splits"):
        pin("python:mine.rows.rows", split="test")
    whole, part = (pin("python:mine.rows.rows", split=split) for split in ("train", "train[:5]"))
    assert whole.fingerprint != part.fingerprint


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


def fingerprint(url: str) -> str:
    return pin(url).fingerprint


def test_a_url_names_a_file_a_directory_or_a_glob(bucket):
    assert list(remote_versions("rows", "memory://bucket")) == [
        "memory:///bucket/a.jsonl", "memory:///bucket/deep/b.jsonl",
    ]  # fmt: skip
    assert list(remote_versions("rows", "memory://bucket/a.jsonl")) == ["memory:///bucket/a.jsonl"]
    assert list(remote_versions("rows", "memory://bucket/*.jsonl")) == ["memory:///bucket/a.jsonl"]
    with open_remote("memory:///bucket/a.jsonl") as file:
        assert file.read() == b"one"


def test_a_bucket_is_pinned_to_what_it_holds_now(bucket):
    before = fingerprint("memory://bucket")
    assert fingerprint("memory://bucket") == before
    bucket.pipe("/bucket/a.jsonl", b"six")
    changed = fingerprint("memory://bucket")
    bucket.pipe("/bucket/c.jsonl", b"three")
    assert len({before, changed, fingerprint("memory://bucket")}) == 3


def test_a_checksum_is_the_version_where_there_is_one(monkeypatch, bucket):
    listed = {"/bucket/a.jsonl": {"name": "/bucket/a.jsonl", "type": "file", "size": 3, "ETag": '"e"'}}
    monkeypatch.setattr(type(bucket), "find", lambda *_, **__: listed)
    versions = []
    for etag, modified in (('"e"', "monday"), ('"e"', "tuesday"), ('"f"', "tuesday")):
        listed["/bucket/a.jsonl"] |= {"ETag": etag, "LastModified": modified}
        versions += remote_versions("rows", "memory://bucket").values()
    assert versions[0] == versions[1] != versions[2]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://none", "no file there"), ("zzz://bucket/a.jsonl", "cannot be listed"),
        ("s3://bucket", "with its package installed .s3fs for s3://"),
        ("gs://bucket", "with its package installed .s3fs for s3://, gcsfs for gs://"),
    ],
)  # fmt: skip
def test_what_cannot_be_listed_is_reported(url, message, monkeypatch):
    for package in ("s3fs", "gcsfs"):
        monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    for protocol in ("s3", "gs"):
        monkeypatch.delitem(KNOWN, protocol, raising=False)
    with pytest.raises(ConfigError, match=message):
        fingerprint(url)
    if url.startswith("s3"):
        with pytest.raises(ConfigError, match=r"checkpoint_mirror=s3://bucket: cannot be listed .*AWS_ACCESS_KEY_ID"):
            Mirror(url, Path("sft/f00d")).steps()


def test_a_web_page_is_a_file_and_a_page_that_ends_with_a_slash_lists_them(tmp_path):
    folder = tmp_path / "site"
    folder.mkdir()
    with site(folder) as address:
        for name in ("a", "b"):
            (folder / f"{name}.jsonl").write_text(json.dumps({"text": f"see {address}/{name}.jsonl/more"}))
        assert list(remote_versions("rows", f"{address}/a.jsonl")) == [f"{address}/a.jsonl"]
        for url in (f"{address}/", f"{address}/*.jsonl"):
            assert list(remote_versions("rows", url)) == [f"{address}/a.jsonl", f"{address}/b.jsonl"]
        before = fingerprint(f"{address}/a.jsonl")
        os.utime(folder / "a.jsonl", (1, 1))
        assert fingerprint(f"{address}/a.jsonl") != before
        with pytest.raises(ConfigError, match="no file there, or its server does not answer"):
            remote_versions("rows", f"{address}/none.jsonl")


def test_a_file_system_that_tells_no_version_is_refused(monkeypatch, bucket):
    listed = {"/bucket/a.jsonl": {"name": "/bucket/a.jsonl", "type": "file", "size": 3}}
    monkeypatch.setattr(type(bucket), "find", lambda *_, **__: listed)
    asked = type(bucket).info
    monkeypatch.setattr(type(bucket), "info", lambda self, path: listed.get(path) or asked(self, path))
    with pytest.raises(ConfigError, match="neither a checksum nor a time of change"):
        remote_versions("rows", "memory://bucket")


def test_a_file_system_is_given_what_the_named_variables_hold_and_what_it_says_of_it_is_not_repeated(
    drive, monkeypatch
):
    credentials = {"token": "DRIVE_TOKEN"}
    (url,) = remote_versions("rows", "gs://drive/a.jsonl", credentials)
    with open_remote(url, credentials) as file:
        assert file.read() == b"one"
    monkeypatch.setenv("DRIVE_TOKEN", "another secret")
    with pytest.raises(ConfigError, match=r"the token \$DRIVE_TOKEN is not known") as error:
        remote_versions("rows", "gs://drive/a.jsonl", credentials)
    assert "another secret" not in str(error.value)


@pytest.mark.parametrize(
    ("credentials", "message"),
    [
        ({"secret": "DRIVE_TOKEN"}, r"sources.rows.credentials.secret: Drive has no such option; accepted: token"),
        ({"token": "NOT_SET"}, r"sources.rows.credentials.token=NOT_SET: no environment variable of that name is set"),
        ({"token": "ya29.A0value"}, r"sources.rows.credentials.token is not the name of an environment variable"),
    ],
)
def test_credentials_that_cannot_be_are_named(drive, credentials, message):
    with pytest.raises(ConfigError, match=message):
        remote_versions("rows", "gs://drive/a.jsonl", credentials)


def test_llama_vision_has_an_embedding_for_the_token_of_an_image() -> None:
    """Behind those of its vocab_size, which counts what it can write."""
    config = {"text_config": {"model_type": "mllama_text_model", "vocab_size": 10}}
    known = {"a": 9, "<|image|>": 10}
    assert tokens_beyond(known, config) == [] and resized(config, known) == config
    assert tokens_beyond({**known, "b": 18}, config) == ["b"]
