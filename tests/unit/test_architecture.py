"""The pages name files that exist."""

import re

import pytest

from tests.command import REPOSITORY

PAGES = sorted((*(REPOSITORY / "docs").glob("*.md"), REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md"))
NAMED = re.compile(r"`((?:flows|tasks|lineage|tests|bench|conf)/[\w/.]+)`")
WRITTEN_BY_THE_READER = {"tasks/alphapo.py", "conf/stage/alphapo.yaml"}  # of docs/add_a_method.md


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_names_files_that_exist(page):
    named = set(NAMED.findall(page.read_text())) - WRITTEN_BY_THE_READER
    assert [name for name in sorted(named) if not (REPOSITORY / name).exists()] == []
