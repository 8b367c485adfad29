import ast
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from lineage import code
from lineage.artifact import Kind, Source
from lineage.code import _statements, code_digest, code_digest_now
from lineage.errors import ConfigError
from lineage.filesystem.digest import DigestCache, digest_file
from lineage.source.sources import pin as pin_with


def pin(name, source):
    return pin_with(name, source, DigestCache(Path("/nonexistent/digests.json")))


def test_files_are_known_by_their_bytes_not_their_place(tmp_path):
    (tmp_path / "a").mkdir()
    for path in (tmp_path / "rows.jsonl", tmp_path / "a" / "rows.jsonl"):
        path.write_bytes(b"abc")
    assert digest_file(path) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert len({pin("rows", Source(path=str(path))).fingerprint for path in tmp_path.rglob("*.jsonl")}) == 1
    before = [pin("rows", Source(path=place)).fingerprint for place in (str(path), f"{tmp_path}/a/*.jsonl")]
    path.write_text("abd")
    (tmp_path / "a" / "2.jsonl").write_text("2")
    after = [pin("rows", Source(path=place)).fingerprint for place in (str(path), f"{tmp_path}/a/*.jsonl")]
    assert len({*before, *after}) == 3 and before[0] == before[1]  # a glob of one file is that file
    with pytest.raises(ConfigError, match=r"sources.rows.path=nope.jsonl: no such file or directory"):
        pin("rows", Source(path="nope.jsonl"))


def test_the_interpreter_and_the_version_of_the_rows_are_the_revision_of_the_quickstart(monkeypatch):
    pinned = pin("corpus", Source(path="quickstart:corpus"))
    assert pinned.source.revision.startswith("cpython-3.") and pinned.source.revision.endswith("-rows3")
    monkeypatch.setattr("lineage.source.sources._QUICKSTART_VERSION", 4)
    assert pin("corpus", Source(path="quickstart:corpus")).fingerprint != pinned.fingerprint


def test_a_branch_of_a_hub_id_is_resolved_to_a_commit_and_a_commit_needs_no_network(monkeypatch):
    seen = {}

    def repo_info(self, path, **kwargs):
        seen.update(path=path, **kwargs)
        return SimpleNamespace(sha="c" * 40)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    given = pin("base", Source(path="owner/name", kind=Kind.CHECKPOINT))
    assert given.source.revision == "c" * 40
    assert (seen["path"], seen["repo_type"]) == ("owner/name", "model")
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: pytest.fail("it was asked"))
    commit = pin("base", Source(path="owner/name", kind=Kind.CHECKPOINT, revision="c" * 40))
    assert (commit.source.revision, commit.fingerprint) == ("c" * 40, given.fingerprint)


@pytest.mark.parametrize(
    ("response", "remedy"), [(None, "connect to the hub, set sources.base.path"), (object(), "check the id")]
)
def test_a_hub_id_without_an_answer_and_one_that_is_not_there_differ(monkeypatch, response, remedy):
    def repo_info(self, path, **kwargs):
        error = OSError("no")
        error.response = response
        raise error

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", repo_info)
    with pytest.raises(ConfigError, match=remedy):
        pin("base", Source(path="owner/name", kind=Kind.CHECKPOINT))


@pytest.mark.parametrize(
    ("name", "imports"),
    [("mine", "def run():\n    from mine.loss import f\n    import mine.data\n"),
     ("bare", "from . import loss\nfrom .data import rows\n")],
    ids=["absolute", "relative, without init"],
)  # fmt: skip
def test_the_code_of_a_method_covers_what_it_imports(tmp_path, monkeypatch, name, imports):
    package = tmp_path / name
    package.mkdir()
    for module, text in {"method": imports, "loss": "f = 1\n", "data": "rows = 1\n", "other": ""}.items():
        (package / f"{module}.py").write_text(text)
    if name == "mine":
        (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    digests = [code_digest(f"{name}.method")]
    (package / "other.py").write_text("unrelated = 1\n")
    assert code_digest(f"{name}.method") == digests[0]
    for module in ("loss", "data"):
        (package / f"{module}.py").write_text("changed = 1\n")
        digests.append(code_digest(f"{name}.method"))
    assert len(set(digests)) == 3


def test_a_glob_over_equal_names_covers_each(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text("1")
    source = Source(path=f"{tmp_path}/*/rows.jsonl")
    before = pin("rows", source).fingerprint
    (tmp_path / "a" / "rows.jsonl").write_text("2")
    assert pin("rows", source).fingerprint != before


@pytest.fixture
def large(tmp_path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.touch()
    os.truncate(path, 17 * 2**20)  # sparse: it takes no room
    return path


@pytest.fixture
def hashed(monkeypatch) -> list[Path]:
    """The files that are read in full; what was just written is remembered like anything else."""
    read: list[Path] = []
    monkeypatch.setattr(
        "lineage.filesystem.digest.digest_file", lambda path, *how: read.append(path) or digest_file(path, *how)
    )
    monkeypatch.setattr("lineage.filesystem.digest._TICK_NANOSECONDS", 0)
    return read


def change_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(2**20)
        file.write(b"x")


def test_a_large_file_is_hashed_once_until_a_byte_changes(tmp_path, large, hashed):
    cache = tmp_path / "store" / "digests.json"
    first, second = (pin_with("rows", Source(path=str(large)), DigestCache(cache)).fingerprint for _ in range(2))
    assert first == second
    assert len(hashed) == 1
    change_a_byte(large)
    assert pin_with("rows", Source(path=str(large)), DigestCache(cache)).fingerprint != first


def test_a_cache_that_rereads_spares_the_next_one_the_reading(tmp_path, large, hashed):
    for number in (1, 2):
        DigestCache(tmp_path / "digests.json", rereads=True).digest(large)
        assert len(hashed) == number
    assert DigestCache(tmp_path / "digests.json").digest(large) == digest_file(large)
    assert len(hashed) == 2


def test_a_change_is_seen_whose_time_was_set_back(tmp_path, large, hashed):
    cache = DigestCache(tmp_path / "digests.json")
    status, before = large.stat(), cache.digest(large)
    change_a_byte(large)
    os.utime(large, ns=(status.st_atime_ns, status.st_mtime_ns))
    now = large.stat()
    assert (now.st_size, now.st_mtime_ns, now.st_ino) == (status.st_size, status.st_mtime_ns, status.st_ino)
    assert cache.digest(large) != before


def test_two_processes_may_begin_a_cache_at_once(tmp_path, large):
    code = (
        "import sys, lineage.filesystem.digest as d; from pathlib import Path; d._TICK_NANOSECONDS = 0;"
        "print(d.DigestCache(Path(sys.argv[1])).digest(Path(sys.argv[2])))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store" / "digests.json"), str(large)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=120)[0].strip() for process in both] == [digest_file(large)] * 2
    assert len(json.loads((tmp_path / "store" / "digests.json").read_text())) == 1


def test_a_damaged_cache_is_begun_anew(tmp_path, large, hashed):
    (tmp_path / "digests.json").write_text("[1, 2]")
    cache = DigestCache(tmp_path / "digests.json")
    assert cache.digest(large) == cache.digest(large)
    assert len(hashed) == 1


def test_what_was_just_written_is_read_again(tmp_path, large, hashed, monkeypatch):
    monkeypatch.setattr("lineage.filesystem.digest._TICK_NANOSECONDS", 60 * 10**9)
    cache = DigestCache(tmp_path / "digests.json")
    assert cache.digest(large) == cache.digest(large)
    assert len(hashed) == 2 and not (tmp_path / "digests.json").exists()


@pytest.mark.parametrize("name", ["none_such", "none.such", "tasks.none_such", "mine_gone"])
def test_a_module_without_a_source_file_has_no_digest(tmp_path, monkeypatch, name):
    """Also one that was imported before its file went."""
    (tmp_path / "mine_gone.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "mine_gone", importlib.import_module("mine_gone"))
    (tmp_path / "mine_gone.py").unlink()
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=f"there is no Python source of the module {name}"):
        code_digest_now(name)


def test_each_stage_digests_the_code_anew_and_parses_only_what_changed(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import other_of_mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = code_digest_now("mine")
    parsed, parse = [], code.ast.parse
    monkeypatch.setattr(code.ast, "parse", lambda source: parsed.append(source) or parse(source))
    assert code_digest_now("mine") == before and parsed == []
    (tmp_path / "mine.py").write_text("import another_of_mine\n")
    assert code_digest_now("mine") != before and parsed == [b"import another_of_mine\n"]


def test_imports_are_kept_between_commands_and_a_broken_cache_is_no_obstacle(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("import other_of_mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parsed, parse = [], code.ast.parse
    monkeypatch.setattr(code.ast, "parse", lambda source: parsed.append(source) or parse(source))

    def digest_of_a_new_command() -> str:
        monkeypatch.setattr(code, "_PARSED", code._Parsed())
        code._digest_and_imports.cache_clear()
        return code_digest_now("mine")

    digests = [digest_of_a_new_command() for _ in range(2)]
    assert len(parsed) == 1
    for content in ("{", "[]"):
        (tmp_path / "posttrain" / "imports.json").write_text(content)
        digests.append(digest_of_a_new_command())
    assert len(parsed) == 3 and len(set(digests)) == 1
    code._digest_and_imports.cache_clear()


def test_imports_are_found_in_every_statement_that_holds_others():
    for path in [*Path("tasks").rglob("*.py"), *Path("lineage").rglob("*.py"), *Path("flows").rglob("*.py")]:
        tree = ast.parse(path.read_text())
        kinds = ast.Import | ast.ImportFrom
        found = [node for node in _statements(tree) if isinstance(node, kinds)]
        assert {id(node) for node in found} == {id(node) for node in ast.walk(tree) if isinstance(node, kinds)}, path
    held = (
        "try:\n import a\nexcept E:\n import b\nelse:\n import c\nfinally:\n import d\nmatch x:\n case 1:\n  import e\n"
    )
    nested = "class C:\n def f(self):\n  with x:\n   for y in z:\n    import f\n   else:\n    import g\n"
    names = [node.names[0].name for node in _statements(ast.parse(held + nested)) if isinstance(node, ast.Import)]
    assert sorted(names) == list("abcdefg")
