"""``docs/settings.md`` and ``docs/methods.md`` are rendered from the code, and name all that can be set."""

from dataclasses import fields

import pytest

from flows.reports import methods_page, settings_page
from flows.reports.compat import choices, shipped, trainings
from flows.reports.settings_page import render
from tasks.context import Resources
from tasks.recipe import TrainingRecipe
from tasks.train.compatibility import RULES

PAGES = (settings_page, methods_page)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_that_of_the_code(page):
    assert page.FILE.read_text(encoding="utf-8") == page.render(), "write it again: make settings-page"


def test_every_method_is_there_with_its_own_options_and_what_it_works_with():
    text = methods_page.render()
    parts = dict(part.split("`\n", 1) for part in text.split("\n### `")[1:])
    assert parts.keys() == shipped().keys()
    for name, (cls, _) in shipped().items():
        shared = {each.name for each in fields(TrainingRecipe)} if name in trainings() else set()
        own = {each.name for each in fields(cls)} - shared
        assert not [field for field in own if f"| `{field}` |" not in parts[name]]
    assert "| [`dpo`](#dpo) | `policy` (checkpoint), `pairs` (preferences) | checkpoint | all |" in text


def test_it_names_every_field_every_value_and_every_rule():
    page = render()
    named = [each.name for cls in (TrainingRecipe, Resources) for each in fields(cls)]
    values = [each.value for setting in ("optimizer", "schedule") for each in choices()[setting]]
    assert not [name for name in [*named, *values] if f"`{name}`" not in page]
    assert not [rule.id for rule in RULES if f"| {rule.id} |" not in page]


def test_a_field_has_the_values_that_its_type_takes_its_default_and_its_comment():
    page = render()
    assert "| `global_batch_size` | integer > 0 | required | rows per optimizer step, over all workers |" in page
    assert "| `launcher` | `auto`, `process`, `cluster`, `foreground` | `auto` |" in page
    assert "| `optimizer` | fields of its own | its defaults | How gradients change the weights. |" in page
    assert "| `eps` | number > 0 | `null` | added to the denominator; `null`: the optimizer's own" in page
    assert "Its learning rate is 1e-06, or 10 times that under an adapter." in methods_page.render()


@pytest.mark.parametrize("page", PAGES)
def test_the_command_writes_it(page, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "FILE", tmp_path / "page.md")
    assert page.main() == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page.render()
