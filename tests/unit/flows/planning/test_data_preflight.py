"""What a pipeline says of its data by name is there, or the plan is refused."""

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from lineage.errors import ConfigError


def test_a_drop_is_accepted_of_a_stage_that_trains(tmp_path):
    with pytest.raises(ConfigError, match=r"accept_label_drop: no stage that trains is named stf; .*mean sft\?"):
        make_plan(load_pipeline([f"store={tmp_path}", "accept_label_drop=[stf]"]))


def test_a_mixture_is_checked_with_the_plan(tmp_path):
    words = [f"store={tmp_path}", "stages.corpus.inputs.more=source:instructions"]
    with pytest.raises(
        ConfigError, match=r"stages.corpus.method: proportions name rows; the slots of rows are rows, more"
    ):
        make_plan(load_pipeline([*words, "stages.corpus.method.proportions={rows: 1.0}"]))
    with pytest.raises(ConfigError, match=r"stages.corpus.method: temperature=2: there is one slot of rows"):
        make_plan(load_pipeline([words[0], "stages.corpus.method.temperature=2.0"]))
