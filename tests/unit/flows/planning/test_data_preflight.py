"""What a pipeline says of its data by name is there, or the plan is refused."""

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from lineage.errors import ConfigError


def test_a_drop_is_accepted_of_a_stage_that_trains(tmp_path):
    with pytest.raises(ConfigError, match=r"accept_label_drop: no stage that trains is named stf; .*mean sft\?"):
        make_plan(load_pipeline([f"store={tmp_path}", "accept_label_drop=[stf]"]))


def test_proportions_name_every_slot_of_rows(tmp_path):
    words = [f"store={tmp_path}", "stages.corpus.inputs.more=source:instructions"]
    with pytest.raises(ConfigError, match=r"stages.corpus.method.proportions: it names rows and .* rows, more; state"):
        make_plan(load_pipeline([*words, "stages.corpus.method.proportions={rows: 1.0}"]))
