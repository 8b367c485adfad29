"""What a source may not state, refused when it is pinned."""

import hashlib

import pytest

from lineage.artifact import Kind, Source
from lineage.digest import DigestCache
from lineage.errors import ConfigError
from lineage.fingerprint import canonical_json
from lineage.secrets import secrets_of, without_secrets
from lineage.sources import pin as pin_with

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def pin(source: Source, tmp_path):
    return pin_with("rows", source, DigestCache(tmp_path / "digests.json"))


def hub(**fields) -> Source:
    return Source(path="owner/name", revision=COMMIT, **fields)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (hub(shuffle_buffer=10), r"sources.rows.shuffle_buffer=10: nothing is shuffled without shuffle_seed"),
        (hub(streaming=True), r"streaming=true: split=train does not say how many rows to take.*train\[:10000\]"),
        (hub(streaming=True, split="train[90%:]"), r"split=train\[90%:\] does not say how many rows"),
        (hub(streaming=True, split="train[:90%]"), r"split=train\[:90%\] does not say how many rows"),
        (hub(kind=Kind.CHECKPOINT, format="messages"), r"sources.rows.format: it says how rows are read.*checkpoint"),
        (hub(kind=Kind.CHECKPOINT, columns={"a": "text"}), r"sources.rows.columns: it says how rows are read"),
        (hub(kind=Kind.CHECKPOINT, streaming=True), r"sources.rows.streaming: it says how rows are read"),
        (hub(credentials={"key": "KEY"}), r"sources.rows.credentials: owner/name is read without any"),
        (hub(allow_code=True), r"sources.rows.allow_code=true: owner/name runs no code; .*; remove allow_code"),
        (Source(path=__file__, allow_code=True), r"sources.rows.allow_code=true: .* runs no code"),
        (Source(path=__file__, revision="abc"), r"sources.rows.revision=abc: .* has no revisions; .*remove revision"),
        (Source(path="quickstart:corpus", streaming=True, sample_count=1), "quickstart:corpus is no hub data set"),
        (Source(path="memory://a.jsonl", streaming=True, sample_count=1), "memory://a.jsonl is no hub data set"),
    ],
)
def test_what_nothing_would_read_is_refused(source, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        pin(source, tmp_path)


def test_a_file_is_not_streamed_even_where_its_path_could_be_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").write_text("{}")
    with pytest.raises(ConfigError, match=r"owner/name is no hub data set; .* remove streaming"):
        pin(Source(path="owner/name", streaming=True, sample_count=1), tmp_path)


@pytest.mark.parametrize("bound", [{"split": "train[:1000]"}, {"split": "train[5:1000]"}, {"sample_count": 7}])
def test_a_bounded_stream_is_pinned(bound, tmp_path):
    assert pin(hub(streaming=True, **bound), tmp_path).source.streaming


def test_what_was_pinned_can_be_pinned_again(tmp_path):
    """As it is before a stage starts; the revision is then our own."""
    (tmp_path / "a.py").write_text("def rows(): ...")
    for source in (Source(path="quickstart:corpus"), Source(path=f"python:{tmp_path}/a.py:rows", allow_code=True),
                   Source(path=str(tmp_path))):  # fmt: skip
        pinned = pin(source, tmp_path)
        assert pin(pinned.source, tmp_path).fingerprint == pinned.fingerprint


@pytest.mark.parametrize(
    "stated",
    [
        {"format": "messages"}, {"columns": {"prompt": "q"}}, {"sample_count": 5}, {"shuffle_seed": 0},
        {"shuffle_seed": 0, "shuffle_buffer": 3}, {"split": "train[:5]"},
    ],
)  # fmt: skip
def test_how_rows_are_read_is_identity_and_recorded(stated, tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    path = str(tmp_path / "rows.jsonl")
    plain, other = pin(Source(path=path), tmp_path), pin(Source(path=path, **stated), tmp_path)
    assert plain.fingerprint != other.fingerprint
    assert {**plain.record.stated(), **stated} == other.record.stated()


def test_sources_whose_columns_were_stated_the_other_way_round_keep_their_fingerprint(tmp_path):
    """Stores that were made while ``columns`` was the rows' column -> our name stay current."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"q": "a"}\n')
    pinned = pin(Source(path=str(rows), columns={"prompt": "q", "completion": "a"}), tmp_path)
    digest = pin(Source(path=str(rows)), tmp_path).digest
    identity = {
        "kind": "rows", "content": digest, "revision": None, "split": "train",
        "columns": {"q": "prompt", "a": "completion"},
    }  # fmt: skip
    assert pinned.fingerprint == hashlib.sha256(canonical_json(identity).encode()).hexdigest()
    assert pinned.record.reading == {"columns": {"prompt": "q", "completion": "a"}}


def test_one_column_has_one_name(tmp_path):
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"columns: the rows' column 'q' has two names of ours; one is accepted"):
        pin(Source(path=str(tmp_path / "rows.jsonl"), columns={"prompt": "q", "text": "q"}), tmp_path)


def test_execution_is_not_identity(tmp_path):
    plain = pin(hub(sample_count=5), tmp_path)
    assert pin(hub(sample_count=5, labels=("nc",)), tmp_path).fingerprint == plain.fingerprint


def test_a_sample_of_a_stream_is_another_one_than_that_of_all_rows(tmp_path):
    whole, stream = (pin(hub(sample_count=5, streaming=streaming), tmp_path) for streaming in (False, True))
    assert whole.fingerprint != stream.fingerprint
    assert stream.record.reading == {"sample_count": 5, "streaming": True}


@pytest.mark.parametrize("value", ["wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "AKIAIOSFODNN7EXAMPLE", "hf_abc", ""])
def test_a_value_in_place_of_a_name_is_refused_and_not_repeated(value, tmp_path):
    source = Source(path="memory://a.jsonl", credentials={"key": value})
    with pytest.raises(ConfigError, match=r"credentials.key is no name of an environment variable") as refused:
        secrets_of(source.credentials)
    assert not value or value not in str(refused.value)


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("MY_SECRET", raising=False)
    with pytest.raises(ConfigError, match=r"credentials.secret=MY_SECRET: no environment variable of that name is set"):
        secrets_of({"secret": "MY_SECRET"})


def test_what_a_library_says_is_told_without_secrets(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "hunter2hunter2")
    said = without_secrets(ValueError("signed with hunter2hunter2\nand more"), {"secret": "MY_SECRET"})
    assert said == "ValueError: signed with $MY_SECRET"
