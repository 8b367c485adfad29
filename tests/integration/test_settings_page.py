"""``docs/settings.md`` is rendered from the code, and names all that can be set."""

from dataclasses import fields

from flows.reports import settings_page
from flows.reports.compat import choices
from flows.reports.settings_page import FILE, main, render
from tasks.context import Resources
from tasks.recipe import TrainingRecipe
from tasks.train.compatibility import RULES


def test_the_page_is_that_of_the_code():
    assert FILE.read_text(encoding="utf-8") == render(), "write it again: make settings-page"


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
    assert "Its learning rate is 1e-06, or 10 times that under an adapter." in page


def test_the_command_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(settings_page, "FILE", tmp_path / "settings.md")
    assert main() == 0
    assert (tmp_path / "settings.md").read_text(encoding="utf-8") == render()
