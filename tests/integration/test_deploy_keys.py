import re

import pytest

from flows.deploy.keys import override_pattern
from flows.deploy.preset import Preset
from tests.command import CONF


@pytest.fixture(scope="module")
def shipped():
    return override_pattern(Preset())


@pytest.mark.parametrize(
    "word",
    [
        "stages.dpo.method.beta=0.2",
        "+stages.dpo.method.beta=0.2",
        "stages.dpo.method.adapter.rank=8",
        "stages.dpo.inputs.policy=sft",
        "stages.dpo.resources.num_workers=2",
        "stages.dpo.resources={num_workers: 2}",
        "stages.base.method.seed=1",  # a stage that only model=tiny brings
        "stages.gate.method.rules.beats_sft.min_gain=0.1",  # one that only one pipeline has
        "stages.evaluate.inputs.another=dpo",
        "sources.base.path=/models/x",  # a source that other models bring
        "sources.corpus.path='a=b, c'",
        "resources.gpu_pool=a100",
        "model=qwen2.5-0.5b",
        "resources@stages.dpo.resources=gpu",
        "~stages.reward",
        "aliases.production.commercial=true",
        "schedule.cron='0 3 * * *'",
        "store=/elsewhere",
    ],
)
def test_a_key_that_some_pipeline_has_passes(shipped, word):
    assert re.search(shipped, word)


@pytest.mark.parametrize(
    "word",
    [
        "stages.dpo.method.betta=0.2",
        "stages.corpus.method.beta=0.2",  # of another stage
        "stages.dpo.method.beta.more=0.2",
        "stages.dpo_.method.beta=0.2",
        "sources.corpora.path=x",
        "model.name=x",
        "modell=tiny",
        "stages.dpo.method._target_=tasks.sft.SFT",
        "sources.corpus.allow_code=true",
        "stages.grpo.method.rewards.mine.allow_code=true",
        "pipeline=cpt-sft-dpo",  # that is what the deployment is
        "resources@stages.dpo.resourced=gpu",
        "hydra.run.dir=x",
        "xstore=x",
        "",
    ],
)
def test_a_key_that_no_pipeline_has_does_not(shipped, word):
    assert not re.search(shipped, word)


def test_options_of_a_reward_function_may_be_overridden(shipped):
    assert re.search(shipped, "stages.grpo.method.rewards.exact.weight=2")
    assert not re.search(shipped, "stages.grpo.method.rewards.exact.wheight=2")


def test_the_users_own_stages_and_sources_count_and_code_where_it_is_allowed(shipped):
    own = override_pattern(Preset(config_dir=CONF, overrides=("model=none",), pipeline="toy", allow_code=True))
    code = ("stages.left.method._target_=tests.toy_methods.ToyTraining", "sources.rows.allow_code=true")
    for word in ("stages.left.method.num_steps=3", "sources.rows.path=x", *code):
        assert re.search(own, word) and not re.search(shipped, word)
