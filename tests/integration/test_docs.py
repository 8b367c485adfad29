"""The pages are true: what they name exists, their commands compose, and docs/add_a_method.md works to the letter."""

import importlib.util
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from itertools import takewhile
from pathlib import Path

import pytest

from flows.__main__ import _parser
from flows.declare.config import load_pipeline
from flows.declare.pipeline import Pipeline
from flows.reports import pages
from flows.reports.compat import choices, shipped, trainings
from flows.sweep.plan import read_sweep
from flows.sweep.space import fixed_and_swept
from tasks.context import Resources
from tasks.recipe import TrainingRecipe
from tasks.train.compatibility import RULES
from tests import tiny, training

ROOT = Path(__file__).parents[2]
METHOD_PAGE = ROOT / "docs" / "add_a_method.md"
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\w+=\S+ )*posttrain ([a-z].*)", re.MULTILINE)
COMPOSED = set[tuple[str, ...]]()  # by an earlier page
BRACES = re.compile(r"([^{=]*)\{([\w,-]+)\}(.*)")  # which a shell expands
# What makes it small: the page's own numbers are those of a real training.
SMALL = (
    "stages.alphapo.method.num_steps=12 stages.alphapo.method.global_batch_size=8 "
    "stages.alphapo.method.learning_rate=3e-3"
)
README = ROOT / "README.md"
RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
PAGES = [
    README,
    *map(ROOT.joinpath, ("CONTRIBUTING.md", "AGENTS.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "notes").glob("*.md")),
    *RUNBOOKS,
]
RENDERED = ("methods.md", "settings.md")  # their tables are as long as the options are many
OVERRIDE = re.compile(r"`((?:sources|stages|resources|model|adapter|store|code_drift)[\w.]*=[^`\s]+)`")
NAMED = re.compile(r"(?<![\w/.])(?:flows|tasks|lineage|conf|tests|bench)/[\w./-]*\w")
LINK = re.compile(r"\]\(([^)#:]+)\)")
MAKE = re.compile(r"(?:^ {4}|^|`)make ([a-z][\w-]*)", re.MULTILINE)


def commands(page: Path) -> list[str]:
    """All that a page shows; docs/add_a_method.md, which tests run, has none here."""
    found = [command for block in SHELL.findall(page.read_text()) for command in COMMAND.findall(block)]
    return [] if page == METHOD_PAGE else list(dict.fromkeys(found))


def shell_words(command: str) -> list[str]:
    """As a shell passes them on, without what redirects them."""
    cli_args = list(takewhile(lambda word: word not in ("<", ">", "|", "&&"), shlex.split(command, comments=True)))
    braces = [BRACES.fullmatch(word) for word in cli_args]
    return [
        each
        for word, found in zip(cli_args, braces, strict=True)
        for each in ([f"{found[1]}{part}{found[3]}" for part in found[2].split(",")] if found else [word])
    ]


def loaded(overrides: list[str], config_dir: Path | None = None) -> list[Pipeline]:
    """The pipeline; of a sweep those of its first and last values, where they are listed."""
    fixed, swept = fixed_and_swept(overrides)
    listed = {field: values for field, values in swept.items() if "(" not in values}
    ends = (
        [f"{field}={values.split(',')[end]}" for field, values in listed.items()]
        for end in ((0, -1) if listed else (0,))
    )
    return [load_pipeline([*fixed, *end], config_dir) for end in ends]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the example files of the README and of the page on triggers."""
    for name, text in FILE.findall(README.read_text() + (ROOT / "docs" / "triggers.md").read_text()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_compose(reader: Path, page: Path) -> None:
    for command in commands(page):
        cli_args = shell_words(command)
        options, rest = _parser(cli_args).parse_known_args(cli_args)
        given = [*options.overrides, *rest] if "config_dir" in options and cli_args[0] != "data" else rest
        overrides = tuple(word for word in given if "=" in word or word.startswith("~"))
        assert not [word for word in rest if word.startswith("-")], command
        if overrides and overrides not in COMPOSED and cli_args[0] != "data":
            if any(word.startswith("sweep=") for word in overrides):
                assert read_sweep(list(overrides), options.config_dir), command
            else:
                assert loaded(list(overrides), options.config_dir), command
            COMPOSED.add(overrides)


# The table of settings.md shows what is refused: tests/unit/flows/declare/test_compatibility.py tries each of its rows.
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "settings.md"], ids=lambda page: page.name)
def test_every_override_of_a_page_composes(page: Path) -> None:
    for override in OVERRIDE.findall(page.read_text()):
        if "alphapo" not in override:  # docs/add_a_method.md adds that stage; test_docs.py runs it
            assert loaded([override]), override


def test_the_example_groups_of_the_readme_take_effect(reader: Path) -> None:
    pipeline = load_pipeline(["model=ours"], Path("our_conf"))
    assert pipeline.sources["base"].path == "/models/ours"
    assert pipeline.sources["instructions"].path == "/data/chats.jsonl"
    assert pipeline.stages["sft"].method.recipe()["num_steps"] == 300


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_target_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = {name for name in NAMED.findall(text) if Path(name).stem != "alphapo"}
    assert not [name for name in named if not (ROOT / name).exists()]
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(MAKE.findall(text)) <= targets


def test_the_set_up_is_valid_shell_and_brings_the_demo_no_tools_of_tests(tmp_path: Path) -> None:
    for target, whole in ((".venv/ready", False), (".venv/tests", True)):
        made = [
            "make",
            "--dry-run",
            "--always-make",
            f"VENV={tmp_path}/none",
            target.replace(".venv", f"{tmp_path}/none"),
        ]
        lines = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        checked = subprocess.run(["sh", "-n"], input=lines, capture_output=True, text=True)
        assert not checked.stderr, checked.stderr + lines
        assert ("--requirement requirements.lock" in lines, "verl" in lines) == (whole, whole)
        assert "--constraint requirements.lock" in lines
        shown = [line for line in lines.splitlines() if "install" in line and "setup.log" not in line]
        assert not [line for line in shown if line.startswith(f"{tmp_path}")], "the log has what pip prints"


def test_what_the_model_of_the_readme_needs_comes_with_the_demo() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "smollm2" in (ROOT / "README.md").read_text()
    assert any(each.startswith("gguf>") for each in project["dependencies"])


def test_the_pages_stay_short() -> None:
    lines = {page.relative_to(ROOT).as_posix(): len(page.read_text().splitlines()) for page in PAGES}
    assert lines["README.md"] <= 120
    assert lines["AGENTS.md"] <= 80
    assert not {name: count for name, count in lines.items() if count > 250 and Path(name).name not in RENDERED}


def test_the_pages_are_a_site_without_a_warning(tmp_path: Path) -> None:
    """A link or an anchor that leads nowhere, and a page outside the navigation, are warnings."""
    pytest.importorskip("mkdocs")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0 and not built.stderr, built.stdout + built.stderr
    page = (tmp_path / "site" / "concepts.html").read_text()
    assert page.count("<svg") + page.count(".svg") >= 4
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(https?:[^"]+)', page)
    assert not loaded  # it works without a network
    assert (tmp_path / "site" / "search" / "search_index.js").exists()


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent != ROOT], ids=lambda page: page.name)
def test_every_page_begins_with_what_it_is_for(page: Path) -> None:
    text = re.sub(r"<!--.*?-->\n", "", page.read_text())
    assert page.name == "README.md" or re.match(r"# .+\n\nUse this page to [^\n]+\n", text)


def test_every_page_is_listed() -> None:
    listed = (ROOT / "docs" / "README.md").read_text()
    assert not [
        page.name for page in PAGES if page.parent != ROOT and page.name != "README.md" and page.name not in listed
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a reader who did what the page says."""
    root = tmp_path_factory.mktemp("reader")
    for name, text in FILE.findall(METHOD_PAGE.read_text()):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    tiny.write_policy(root / "models" / "chat")
    pairs = [{key: row[key] for key in ("prompt", "chosen", "rejected")} for row in tiny.preference_rows(60)]
    (root / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return root


def shell(folder: Path, setup: str, command: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    here = f"export PYTHONPATH=$PYTHONPATH:{ROOT}"  # this checkout, whichever one is installed
    return subprocess.run(
        ["bash", "-ec", f"{setup}\n{here}\n{command}"],
        cwd=folder, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_the_page_needs_one_python_file_and_one_yaml() -> None:
    names = [name for name, _ in FILE.findall(METHOD_PAGE.read_text())]
    assert names == ["our_methods/alphapo.py", "our_conf/stage/alphapo.yaml", "our_conf/pipeline/alphapo.yaml"]
    assert len(dict(FILE.findall(METHOD_PAGE.read_text()))["our_methods/alphapo.py"].splitlines()) <= 30


def test_the_method_of_the_page_trains(root: Path, folder: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("alphapo", folder / "our_methods" / "alphapo.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    run = training.train(module.AlphaPO(**{**training.FIELDS, "num_steps": 12}), root, tmp_path / "output")
    margin = run.reports[0][1]["rewards/margins"]
    assert run.losses[0] == pytest.approx(math.log(1 + math.exp(1.0 - margin)), rel=0.05)
    assert run.losses[-1] < run.losses[0]


@pytest.mark.slow
def test_a_method_added_by_the_page_plans_trains_and_is_reused(
    folder: Path, prefect_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_URL", prefect_url)
    setup, add, *rest = [line for block in SHELL.findall(METHOD_PAGE.read_text()) for line in block.splitlines()]
    plan, run = rest
    added = shell(folder, setup, f"{add} --json")
    assert added.returncode == 0, added.stderr
    assert "alphapo" in [row["stage"] for row in json.loads(added.stdout)["stages"]]

    result = shell(folder, setup, f"{run} {SMALL} --json")
    assert result.returncode == 0, result.stderr
    stage = {row["stage"]: row for row in json.loads(result.stdout)["stages"]}["alphapo"]
    assert stage["metrics"]["steps"] == 12
    reports = [json.loads(line) for line in (Path(stage["output"]).parent / "metrics.jsonl").read_text().splitlines()]
    losses = [report["metrics"]["loss"] for report in reports]
    # Before the first step: the loss of the margin that the untrained model has.
    margin = reports[0]["metrics"]["rewards/margins"]
    assert losses[0] == pytest.approx(math.log(1 + math.exp(1.0 - margin)), rel=0.05)
    assert losses[-1] < losses[0]
    assert not training.same(training.weights(Path(stage["output"])), training.weights(folder / "models" / "chat"))

    again = shell(folder, setup, f"{plan} {SMALL} --json")
    assert [row["state"] for row in json.loads(again.stdout)["stages"]] == ["reuse", "reuse"]


def test_the_tables_of_pages_are_those_of_the_code_and_their_command_writes_them(tmp_path, monkeypatch):
    texts = {page: (pages.DOCS / page).read_text(encoding="utf-8") for page in pages.PAGES}
    for page, text in texts.items():
        old = re.sub(r"(?s)(<!-- \w+ -->\n?).*?(\n?<!-- end -->)", r"\1old\2", text)
        (tmp_path / page).write_text(old, encoding="utf-8")
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    assert pages.main() == 0
    written = {page: (tmp_path / page).read_text(encoding="utf-8") for page in texts}
    assert written == texts, "write them again: make settings-page"


def test_every_field_has_a_meaning():
    for page in ("methods.md", "settings.md"):
        text = (pages.DOCS / page).read_text(encoding="utf-8")
        tables = re.findall(r"\| accepted \| default \| meaning \|\n((?:\|.*\n)+)", text)
        rows = [row for table in tables for row in table.splitlines()]
        assert len(rows) > 50
        assert not [row for row in rows if row.endswith("|  |")]


def test_every_method_is_there_with_its_own_options_and_what_it_works_with():
    text = (pages.DOCS / "methods.md").read_text(encoding="utf-8")
    parts = dict(part.split("`\n", 1) for part in text.split("\n### `")[1:])
    assert parts.keys() == shipped().keys()
    for name, (cls, _) in shipped().items():
        shared = {each.name for each in fields(TrainingRecipe)} if name in trainings() else set()
        own = {each.name for each in fields(cls)} - shared
        assert not [field for field in own if f"| `{field}` |" not in parts[name]]
    slots = "`policy` (checkpoint), `pairs` (preferences), `reward_model` (reward_model), optional"
    assert f"| [`dpo`](#dpo) | {slots} | checkpoint | all |" in text


def test_it_names_every_field_every_value_and_every_rule():
    page = (pages.DOCS / "settings.md").read_text(encoding="utf-8")
    named = [each.name for cls in (TrainingRecipe, Resources) for each in fields(cls)]
    values = [each.value for setting in ("optimizer", "schedule") for each in choices()[setting]]
    assert not [name for name in [*named, *values] if f"`{name}`" not in page]
    assert not [rule.id for rule in RULES if f"| {rule.id} |" not in page]
