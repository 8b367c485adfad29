"""The table of what works with what: every rule refuses its example, and what it says to set passes every rule."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar, get_args

import pytest

from flows.declare.config import load_pipeline, typed
from lineage.errors import ConfigError
from tasks.context import Resources, Sharding
from tasks.cpt import ContinuedPretraining
from tasks.data.kinds import TEXT
from tasks.dpo import DPO
from tasks.grpo import GRPO
from tasks.method import LOOP_FIELDS, Training
from tasks.online_dpo import OnlineDPO
from tasks.ppo import PPO
from tasks.reward_model import RewardModel
from tasks.sft import SFT
from tasks.taid import TAID
from tasks.train.compatibility import RULES, refusals
from tasks.train.rule import Case, Fields, Rule, assigned
from tasks.train.sharding import holds_parts


@dataclass(frozen=True, kw_only=True)
class OwnLoop(Training):
    """A method with a loop of its own, as a user may add one."""

    reads: ClassVar = TEXT
    applies: ClassVar = LOOP_FIELDS

    def loop(self, run):
        raise NotImplementedError


STAGES = {
    "cpt": ContinuedPretraining,
    "sft": SFT,
    "reward": RewardModel,
    "dpo": DPO,
    "own_loop": OwnLoop,
    "grpo": GRPO,
    "online_dpo": OnlineDPO,
    "ppo": PPO,
    "taid": TAID,
}
IN_THE_DEFAULT = ("cpt", "sft", "reward", "dpo")  # pipeline
BASE = {
    "method.learning_rate": 1e-3, "method.num_steps": 3, "method.global_batch_size": 16, "method.max_length": 512,
    "resources.micro_batch_size": 4,
}  # fmt: skip
BY_ID = {rule.id: rule for rule in RULES}


def case(rule: Rule, *changes: Fields) -> Case:
    """The example of a rule with changes, built as YAML is."""
    tree: dict[str, dict] = {"method": {}, "resources": {}}
    for path, value in {key: value for fields in (BASE, *changes) for key, value in fields.items()}.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            if not isinstance(node.get(parent), dict):
                node[parent] = {}
            node = node[parent]
        node[name] = value
    return Case(
        method=typed(STAGES[rule.stage], tree["method"], "stages.x.method"),
        resources=typed(Resources, tree["resources"], "stages.x.resources"),
        config=rule.config,
    )


@pytest.mark.parametrize("name", BY_ID)
def test_a_rule_refuses_its_example_and_what_it_says_to_set_passes_every_rule(name):
    rule = BY_ID[name]
    refused = {refusal.rule: refusal for refusal in refusals(case(rule, rule.example))}
    assert name in refused
    assert len(refused) == 1, "an example of one rule alone: its setting to change is then the nearest"
    assert list(refusals(case(rule, rule.example, refused[name].nearest))) == []
    if not rule.config:  # a model may be refused whatever is set
        assert list(refusals(case(rule))) == [], "the base works, so that the example is what is refused"


@pytest.mark.parametrize("sharding", [each for each in get_args(Sharding) if holds_parts(Resources(sharding=each))])
@pytest.mark.parametrize("place", ["method.quantization.format", "method.adapter.quantization"])
def test_biases_of_a_base_in_few_bits_are_not_divided(sharding, place):
    biases = {"method.adapter.type": "lora", "method.adapter.bias": "lora_only", place: "nf4"}
    workers = {"resources.sharding": sharding, "resources.num_workers": 4, "resources.num_nodes": 2}
    found = [each.rule for each in refusals(case(BY_ID["sharding-bias"], biases, workers))]
    assert "sharding-bias" in found


def test_names_are_unique_and_a_rule_joins_settings():
    assert len(BY_ID) == len(RULES)
    assert all(len(rule.fields) > 1 for rule in RULES)


@pytest.mark.parametrize("name", [rule.id for rule in RULES if rule.stage in IN_THE_DEFAULT and not rule.config])
def test_the_plan_refuses_an_example_and_accepts_what_its_message_says_to_paste(name):
    rule = BY_ID[name]
    where = f"stages.{rule.stage}"
    configured = [*assigned(BASE, where), *assigned(rule.example, where), "tracking=none"]
    with pytest.raises(ConfigError) as refused:
        load_pipeline(configured)
    found, pasted = str(refused.value).rsplit("; set ", 1)
    assert found.startswith(f"{where}: ")
    load_pipeline([*configured, *pasted.split()])


def test_vllm_goes_through_where_it_is_installed_and_is_refused_with_the_command_where_not(tmp_path, monkeypatch):
    on_gpu = {"method.vllm": "colocate", "resources.gpus_per_worker": 1}
    missing = [each for each in refusals(case(BY_ID["vllm"], on_gpu)) if each.rule == "vllm"]
    if find_spec("vllm") is None:
        assert "vLLM is not installed here (pip install vllm)" in missing[0].text("stages.grpo")
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for mode in ("colocate", "server"):
        assert list(refusals(case(BY_ID["vllm"], {**on_gpu, "method.vllm": mode}))) == []
    [refusal] = refusals(case(BY_ID["vllm"], {"method.vllm": "server"}))
    assert "vLLM generates on a GPU, and there is none" in refusal.text("stages.grpo")


@pytest.mark.parametrize(("chosen", "cpus", "loaders"), [(3, 2, 3), ("auto", 1, 0), ("auto", 3, 2), ("auto", 64, 4)])
def test_loaders_are_as_many_as_are_set_or_by_the_cpus(chosen, cpus, loaders):
    assert Resources(dataloader_workers=chosen, cpus_per_worker=cpus).num_loaders == loaders
