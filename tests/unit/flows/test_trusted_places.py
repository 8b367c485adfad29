"""What a command writes where, and what it prints of names and addresses: all of it through the command line."""

import base64
import csv
import json
import os
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace

import pytest

from flows.__main__ import main
from flows.reports.run import summary
from lineage.secrets import redacted
from lineage.store import MARKER
from tests.command import CONF, Command
from tests.web_server import serving
from tests.written_store import WrittenStore

ESC = "\x1b"
ASKING = (
    ["verify"], ["gc", "--yes"], ["status"], ["lineage", "p/dpo"], ["impact", "p/dpo"], ["diff", "p/dpo", "p/cpt"],
    ["logs", "dpo"], ["cancel", "latest"], ["rebuild"], ["promote", "p/dpo", "--alias", "a"],
    ["rollback", "--alias", "a"], ["report", "p/dpo"], ["diagnose", "dpo"], ["chat", "dpo"], ["export", "gguf", "dpo"],
    ["serve-model", "dpo"], ["ui"], ["blame", "dpo", "--metric", "loss"], ["replay", "dpo"],
)  # fmt: skip


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "rows.txt").write_text("one\ntwo\n")
    return Command(tmp_path, "pipeline=toy", "model=none", "sources.rows.path=rows.txt")


@pytest.mark.parametrize("words", ASKING, ids=lambda words: words[0])
def test_a_command_that_asks_a_store_writes_nothing_where_none_is(words, tmp_path, capsys):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "of-another-program").touch()
    for place, found in ((foreign, f": is not a store (it has no {MARKER})"), (tmp_path / "gone", " does not exist")):
        assert main([*words, f"store={place}"]) == 2
        assert f"store={place}{found}" in capsys.readouterr().err
    assert [path.name for path in foreign.iterdir()] == ["of-another-program"]
    assert not (tmp_path / "gone").exists()


def test_status_before_the_first_run_is_no_error(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["status"]) == 0 and "no run" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_an_older_store_without_the_marker_is_one(tmp_path, capsys):
    store = tmp_path / "store"
    WrittenStore(store).chain()
    assert not (store / MARKER).exists()
    assert main(["verify", f"store={store}", "tracking=none"]) == 0
    assert "6 artifacts checked: intact" in capsys.readouterr().out
    assert main(["lineage", "p/dpo", f"store={store}"]) == 0


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["status", "store="], "store= is empty"),
        (["plan", "store="], "store= is empty"),
        (["plan", "store=/dev/null/x"], "Not a directory: '/dev/null/x'|/dev/null/x: Not a directory; a part of"),
        (["status", "store=/dev/null/x"], "/dev/null/x: Not a directory; a part of this path is a file"),
        (["status", f"store=/tmp/{'a' * 300}"], "File name too long; names of at most 255 bytes are accepted"),
        (["data", "/sys/kernel/nothing", "--html", "a" * 300], "File name too long; names of at most 255"),
        (["diff", "p/dpo", "store=x"], r"diff: 1 REFs are given \(p/dpo\); give two"),
        (["data", "rows.txt", "split=train", "split=train[:1]"], "split: is given twice"),
    ],
)
def test_a_place_or_a_word_that_cannot_be_is_refused_with_what_to_do(words, found, capsys):
    import re

    assert main(words) == 2
    said = capsys.readouterr().err
    assert re.search(found, said), said
    assert "delete" not in said


def test_a_store_that_can_only_be_read_is_named(toy, tmp_path, monkeypatch):
    """As the file system answers where it is mounted read-only."""
    WrittenStore(tmp_path / "store").chain()
    real, store = os.mkdir, str(tmp_path / "store")

    def refused(path, *arguments, **options):
        if str(path).startswith(store):
            raise OSError(30, "Read-only file system", str(path))
        real(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", refused)
    result = toy("run", f"store={store}")
    assert result.returncode == 2
    assert "posttrain: store" in result.stderr and "Read-only file system; a path that this account" in result.stderr


@pytest.mark.parametrize("words", [[], ["--multirun", "stages.left.method.seed=1,2"]])
def test_a_plan_refuses_a_store_that_takes_no_files(toy, words):
    result = toy("plan", "store=/proc/x/store", *words)
    assert result.returncode == 2
    assert result.stderr.startswith("posttrain: store=/proc/x/store: /proc cannot be written (")
    assert result.stderr.endswith("); name a folder that this account may write: store=DIR\n")


@pytest.mark.parametrize("words", [["store=one", "store=two"], ["+store=one", "++store=two"]])
def test_of_a_field_that_is_given_twice_it_is_reported_which_counts(toy, words):
    warning = f"{words[0]} is ignored, since {words[1]} follows it"
    planned, verified = toy("plan", *words), toy("verify", *words)
    assert planned.returncode == 0 and warning in planned.stderr
    assert "store two\n" in planned.stdout and "/one" not in planned.stdout
    assert verified.returncode == 2 and warning in verified.stderr


# --- addresses


@pytest.mark.parametrize(
    "url",
    [
        "https://ann:PW-7@127.0.0.1:1/f.jsonl",
        "https://127.0.0.1:1/f.jsonl?X-Amz-Credential=PW-7&X-Amz-Signature=PW-7",
        "https://127.0.0.1:1/f.jsonl?sv=1&sig=PW-7",
        "https://127.0.0.1:1/f.jsonl?X%2DAmz%2DSignature=PW-7",
        "simplecache::https://ann:PW-7@127.0.0.1:1/f.jsonl",
        "s3://key:PW-7@bucket/f.jsonl",
    ],
)
def test_an_address_with_a_secret_is_refused_and_repeated_nowhere(url, toy, tmp_path):
    for words in (("plan", f"sources.rows.path='{url}'"), ("run", f"sources.rows.path='{url}'"), ("data", url)):
        result = toy(*words)
        assert result.returncode == 2, result
        assert "credentials:" in result.stderr
        assert "PW-7" not in result.stdout + result.stderr
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and b"PW-7" in path.read_bytes()]
    assert not kept


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("see https://u:p@h/f?sig=x&a=1, and s3://k:s@b", "see https://h/f?sig=***&a=1, and s3://b"),
        ("postgresql://me:a/b@c@db:5432/m", "postgresql://db:5432/m"),
        ("http://host:80/a@b?q=c@d hf://datasets/a@main", "http://host:80/a@b?q=c@d hf://datasets/a@main"),
        ("abfss://container@account.dfs/x", "abfss://container@account.dfs/x"),
    ],
)
def test_what_is_no_secret_of_an_address_stays(text, shown):
    assert redacted(text) == shown


class _Guarded(BaseHTTPRequestHandler):
    """Files for one user alone."""

    content = b'{"text": "one"}\n{"text": "two"}\n'

    def do_GET(self):
        let_in = self.headers.get("Authorization") == "Basic " + base64.b64encode(b"ann:PW-7").decode()
        self.server.let_in.append(let_in)
        self.send_response(200 if let_in else 401)
        self.send_header("ETag", "1")
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.content)

    do_HEAD = do_GET


@pytest.fixture
def guarded():
    with serving(_Guarded) as server:
        server.let_in = []
        yield server


def test_a_web_server_is_shown_the_credentials_that_variables_hold(guarded, monkeypatch, capfd):
    monkeypatch.setenv("MY_USER", "ann")
    monkeypatch.setenv("MY_PASSWORD", "PW-7")
    url = f"{guarded.url}/rows.jsonl"
    assert main(["data", url]) == 2
    assert main(["data", url, "credentials.username=MY_USER", "credentials.password=MY_PASSWORD", "held_out=1"]) == 0
    said = capfd.readouterr()
    assert "2 read, 2 used" in said.out and "PW-7" not in said.out + said.err
    assert guarded.let_in[-1]


def test_a_password_in_the_address_of_mlflow_is_used_and_never_printed(guarded, toy):
    from lineage.mlflow.address import require_reachable

    uri = f"http://ann:PW-7@127.0.0.1:{guarded.server_port}"
    require_reachable(uri, uri)
    assert guarded.let_in == [True]
    result = toy("doctor", f"tracking.uri={uri}", "tracking.mlflow=true", "--json")
    assert "PW-7" not in result.stdout + result.stderr
    (found,) = (each for each in json.loads(result.stdout)["findings"] if each["check"] == "mlflow")
    assert found["level"] == "ok" and guarded.url in found["found"]


def test_the_next_command_of_a_run_has_no_password(toy):
    from argparse import Namespace

    from flows.commands.arguments import recorded_cli_args

    words = recorded_cli_args(Namespace(config_dir=None, overrides=["tracking.uri=http://ann:PW-7@h:5000", "a=1"]))
    assert words == ["tracking.uri=http://h:5000", "a=1"]


def test_an_address_of_an_older_manifest_is_shown_without_its_secret(tmp_path, capsys):
    store = WrittenStore(tmp_path)
    store.stage("corpus", {"rows": store.source("web", path="https://ann:PW-7@h/f?sig=PW-7")})
    for words in (["lineage", "p/corpus"], ["lineage", "p/corpus", "--json"], ["impact", "source:web", "--json"]):
        assert main([*words, f"store={tmp_path}"]) == 0
        said = capsys.readouterr().out
        assert "PW-7" not in said
    assert main(["lineage", "p/corpus", "--html", str(tmp_path / "page.html"), f"store={tmp_path}"]) == 0
    assert "PW-7" not in (tmp_path / "page.html").read_text()


# --- names on a terminal


def test_no_escape_of_a_file_name_reaches_the_terminal(tmp_path, capfd):
    rows = tmp_path / f"{ESC}]0;owned{ESC}[2Jrows.jsonl"
    rows.write_text('{"text": "one"}\n{"other": 1}\n')
    main(["data", str(rows)])
    main(["data", str(tmp_path / f"gone{ESC}[2J.jsonl")])
    main(["plan", f"--{ESC}[2J=https://ann:PW-7@h"])
    main(["plan", "--config-dir", str(CONF), "pipeline=toy", "model=none", f"sources.rows.path='{rows}x'"])
    said = capfd.readouterr()
    assert ESC not in said.out + said.err and "PW-7" not in said.err
    assert r"\x1b]0;owned" in said.err


def test_no_escape_of_a_log_reaches_the_terminal(tmp_path, capsys):
    made = WrittenStore(tmp_path).chain()["dpo"]
    log = tmp_path / "dpo" / made.fingerprint[:16] / "logs" / "stage.log"
    log.parent.mkdir()
    log.write_text(f"{ESC}[32mgreen{ESC}[0m\n{ESC}]0;owned\x07\nlast\n")
    assert main(["logs", "dpo", f"store={tmp_path}"]) == 0
    assert capsys.readouterr().out == "green\n\\x1b]0;owned\\x07\nlast\n"


# --- rows and models that cannot be read


def _columns(path):
    path.write_text(",".join(f"c{number}" for number in range(10_001)) + "\n" + "," * 10_000 + "\n")


def _cells(path):
    path.write_text("a,b\n" + "," * 1_000_001 + "\n")


def test_a_plan_writes_nothing_where_no_store_is(toy, tmp_path):
    (tmp_path / "foreign").mkdir()
    with (tmp_path / "rows.txt").open("a") as rows:
        rows.write("x" * 2_000_000)  # its digest would be kept
    os.utime(tmp_path / "rows.txt", (0, 0))
    assert toy("plan", f"store={tmp_path / 'foreign'}").returncode == 0
    assert list((tmp_path / "foreign").iterdir()) == []


def test_no_escape_of_a_store_is_in_the_end_of_a_run(monkeypatch, tmp_path):
    monkeypatch.setattr("flows.reports.run._lineage_page", lambda plan: "")
    plan = SimpleNamespace(stages=[], stale=[], pipeline=SimpleNamespace(name="toy", store=tmp_path / "store"))
    assert r"store=\x1b[2J" in summary(plan, {}, 0.0, [f"store={ESC}[2J"])


@pytest.mark.parametrize(
    ("write", "found"),
    [
        (_columns, "more than 10,000 columns; accepted: "),
        (_cells, "rows.csv:2: a line of more than 64 MB, or of more than 1,000,000 cells"),
    ],
)
def test_a_table_that_no_person_wrote_is_refused_by_name(write, found, tmp_path, capsys):
    write(tmp_path / "rows.csv")
    assert main(["data", str(tmp_path / "rows.csv")]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'rows.csv'}:" in said and found in said


@pytest.mark.parametrize(
    ("code", "text", "remedy"),
    [(22, "Invalid argument", "a file that can be read"), (2, "No such file or directory", "a file that stays there")],
)
def test_a_directory_that_cannot_be_listed_is_named(code, text, remedy, tmp_path, monkeypatch, capsys):
    from lineage.source import sources

    def refused(directory):
        raise OSError(code, text, f"{directory}/proc/1/net")

    (tmp_path / "rows").mkdir()
    monkeypatch.setattr(sources, "file_names", refused)
    assert main(["data", str(tmp_path / "rows")]) == 2
    assert f"{tmp_path}/rows/proc/1/net: {text}; {remedy}" in capsys.readouterr().err


@pytest.mark.parametrize("quote", ["", '"'])
def test_of_a_packed_table_no_more_is_unpacked_than_a_row_may_have(quote, tmp_path, capsys, monkeypatch):
    import gzip

    from tasks.data.reading import delimited

    monkeypatch.setattr(delimited, "MAX_ROW_BYTES", 2**20)
    break_ = "\n" if quote else " "
    with gzip.open(tmp_path / "rows.csv.gz", "wt") as file:
        file.write("a,b\n" + quote)
        for _ in range(40):
            file.write(("x" * 1023 + break_) * 1024)
    taken = []
    real = delimited._bounded

    def counted(*args):
        for line in real(*args):
            taken.append(len(line))
            yield line

    monkeypatch.setattr(delimited, "_bounded", counted)
    assert main(["data", str(tmp_path / "rows.csv.gz")]) == 2
    assert "rows.csv.gz:" in (said := capsys.readouterr().err) and ("more than" in said or "larger than" in said)
    assert sum(taken) <= 2**20 + 2**10 + 5
    assert csv.field_size_limit() <= 64 * 2**20
