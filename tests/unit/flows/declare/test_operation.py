"""What a pipeline may set of schedules and triggers."""

from pathlib import Path

import pytest

from flows.declare.config import load_pipeline
from flows.declare.operation import Schedule, Trigger, is_cron
from lineage.errors import ConfigError
from tests.unit.flows.declare.test_config import toy


@pytest.mark.parametrize("expression", ["0 3 * * *", "@daily", "*/5 8-18 * * mon-fri", "0 0 29 2 *"])
def test_cron_expressions_are_taken(expression):
    assert is_cron(expression)


@pytest.mark.parametrize(
    "expression", ["", "tomorrow", "* * *", "61 * * * *", "h 3 * * *", "0 0 30 2 *", "* * * * * 30", "* * * * * * 2030"]
)
def test_what_is_no_cron_expression_is_refused_with_its_key(expression):
    assert not is_cron(expression)
    with pytest.raises(ConfigError, match=r"schedule\.cron="):
        toy(f'schedule={{cron: "{expression}"}}')


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule={paused: true}", "set one of them"),
        ('schedule={cron: "@daily", interval: 60}', "set one of them"),
        ("schedule={interval: 0}", r"schedule\.interval=0"),
        ('schedule={cron: "@daily", timezone: Mars/Base}', r"schedule\.timezone=Mars/Base: no such time zone"),
        ("trigger={poll: 1}", "has neither sources nor events"),
        ("trigger={sources: [row]}", "did you mean rows"),
        ("trigger={sources: [rows], poll: 0}", r"trigger\.poll=0"),
        ("trigger={sources: [rows], settle: 0}", r"trigger\.settle=0"),
    ],
)
def test_what_cannot_work_is_refused(override, message):
    with pytest.raises(ConfigError, match=message):
        toy(override)


@pytest.mark.parametrize(
    "source", ["{path: 'quickstart:corpus'}", "{path: 'alias:champion'}", f"{{path: owner/data, revision: {'a' * 40}}}"]
)
def test_a_trigger_on_what_cannot_change_is_refused(source):
    with pytest.raises(ConfigError, match="which never changes"):
        toy("trigger={sources: [rows]}", f"sources.rows={source}")
    assert toy("trigger={sources: [rows]}", "sources.rows={path: owner/data, revision: main}").operation.trigger


def test_the_pipeline_of_the_page_composes(tmp_path):
    page = (Path(__file__).parents[4] / "docs" / "triggers.md").read_text()
    [block] = [block for block in page.split("```yaml\n") if "name: nightly" in block.partition("```")[0]]
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "nightly.yaml").write_text(block.partition("```")[0])
    operation = load_pipeline(["pipeline=nightly"], tmp_path).operation
    assert operation.trigger == Trigger(sources=("corpus",), events=("our-data.ready",))
    assert operation.schedule == Schedule(cron="0 3 * * mon-fri", timezone="Europe/Berlin")
