"""What the README and the pages beside it name exists: commands, overrides, files, make targets."""

import re
import shlex
from pathlib import Path

import pytest

from flows.__main__ import _parser
from flows.declare.config import load_pipeline
from flows.declare.pipeline import Pipeline
from flows.sweep.space import fixed_and_swept

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OVERRIDE = re.compile(r"`((?:sources|stages|resources|model|adapter|store|code_drift)[\w.]*=[^`\s]+)`")
FILE = re.compile(r"(?<![\w/.])(?:flows|tasks|lineage|conf|tests|bench)/[\w./-]*\w")
LINK = re.compile(r"\]\(([^)#:]+)\)")
MAKE = re.compile(r"(?:^ {4}|^|`)make ([a-z][\w-]*)", re.MULTILINE)


def commands() -> list[str]:
    lines = [line for block in SHELL.findall(README.read_text()) for line in block.splitlines()]
    return [line[line.index("posttrain ") :] for line in lines if "posttrain " in line]


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
    """A folder with the example files of the README."""
    for name, text in EXAMPLE.findall(README.read_text()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_readme_composes(reader: Path, command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    options = _parser(words).parse_args(words)
    if "config_dir" in options:
        assert loaded(options.overrides, options.config_dir)


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
    named = {name for name in FILE.findall(text) if Path(name).stem != "alphapo"}
    assert not [name for name in named if not (ROOT / name).exists()]
    assert not [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(MAKE.findall(text)) <= targets


def test_the_pages_stay_short() -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in PAGES}
    assert lines["README.md"] <= 150
    assert lines["CONTRIBUTING.md"] <= 80
