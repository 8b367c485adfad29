"""What a pipeline says of its data by name is there, or the plan is refused."""

import pytest

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from lineage.errors import ConfigError


def test_a_drop_is_accepted_of_a_stage_that_trains(tmp_path):
    with pytest.raises(ConfigError, match=r"accept_label_drop: no stage that trains is named stf; .*mean sft\?"):
        make_plan(load_pipeline([f"store={tmp_path}", "accept_label_drop=[stf]"]))


def test_columns_the_other_way_round_are_refused_with_the_line_to_type(tmp_path):
    words = [f"store={tmp_path}", "sources.instructions.columns.The_Question=prompt"]
    with pytest.raises(
        ConfigError, match=r"columns maps our name to the rows' column; state sources.instructions.columns.prompt=The_Q"
    ):
        make_plan(load_pipeline(words))
    make_plan(load_pipeline([words[0], "sources.instructions.columns.prompt=The_Question"]))
    make_plan(load_pipeline([*words, "sources.instructions.format=prompts"]))  # a reward function calls it so


def test_a_mixture_is_checked_with_the_plan(tmp_path):
    words = [f"store={tmp_path}", "stages.corpus.inputs.more=source:instructions"]
    with pytest.raises(
        ConfigError, match=r"stages.corpus.method: proportions name rows; the slots of rows are rows, more"
    ):
        make_plan(load_pipeline([*words, "stages.corpus.method.proportions={rows: 1.0}"]))
    with pytest.raises(ConfigError, match=r"stages.corpus.method: temperature=2: there is one slot of rows"):
        make_plan(load_pipeline([words[0], "stages.corpus.method.temperature=2.0"]))


def test_nothing_trains_before_all_data_is_prepared_also_that_which_needs_a_tokenizer(tmp_path):
    words = [
        f"store={tmp_path}",
        "stages.preferences.inputs.tokenizer=base",
        "stages.instructions.inputs.tokenizer=cpt",
    ]
    plan = make_plan(load_pipeline(words))
    assert plan.waits(plan.stage("cpt")) == {"base", "corpus", "preferences"}  # instructions are made with cpt itself
    assert plan.waits(plan.stage("sft")) >= {"cpt", "instructions", "preferences"}
    assert plan.waits(plan.stage("base")) == {"corpus"}
    names = [planned.name for planned in plan.stages]
    assert all(names.index(other) < names.index(name) for name in names for other in plan.waits(plan.stage(name)))
