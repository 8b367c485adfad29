"""Proximal policy optimization: it reaches known optima, from every architecture, with and without a reward model."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lineage.artifact import Kind
from lineage.errors import ConfigError, PipelineError
from lineage.filesystem.digest import digest_files, digest_of
from tasks.context import Metrics, Resources, TrainContext
from tasks.ppo import PPO
from tasks.reward_functions import RewardFunction
from tasks.train.losses.actor_critic import Tokens, token_logps
from tasks.train.losses.rewards import token_values
from tasks.train.run import TrainingRun
from tests import tiny, training
from tests.completion_scores import vowel
from tests.tiny_models import FEW, write_model
from tests.trained_store import LORA, Made

pytestmark = pytest.mark.usefixtures("one_thread")

SPREAD = {"spread": RewardFunction(function="python:tests.completion_scores.spread")}
VOWEL = {"vowel": RewardFunction(function="python:tests.completion_scores.vowel")}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"))


def ppo(**fields: object) -> PPO:
    small = {"learning_rate": 3e-3, "num_steps": 2, "global_batch_size": 8, "max_length": 96, "num_generations": 2}
    return PPO(**{**small, "max_completion_length": 6, "rewards": SPREAD, **fields})  # type: ignore[arg-type]


def with_reward_model(root: Path, folder: Path) -> Path:
    """Inputs with a reward model beside them."""
    folder.mkdir()
    for each in root.iterdir():
        (folder / each.name).symlink_to(each)
    trained = training.train(training.method("reward", num_steps=2), root, folder / "trained" / "output").output
    trained.rename(folder / Kind.REWARD_MODEL.value)
    return folder


def bandit(root: Path, folder: Path, **fields: object) -> list[float]:
    """Rewards by step, of completions of one token: 1 for a vowel."""
    once = {"max_length": 40, "max_completion_length": 1, "global_batch_size": 64, "num_generations": 4}
    steps = {"learning_rate": 2e-2, "num_ppo_epochs": 2, "rewards": VOWEL, "equal_rewards_patience": None}
    stage = ppo(**{**once, **steps, "num_steps": 20, "lr_schedule": "linear", **fields})
    trained = training.train(stage, root, folder, resources=Resources(micro_batch_size=64))
    return [metrics["reward"] for _, metrics in trained.reports]


@torch.no_grad()
def best_reward(root: Path, kl_coef: float) -> float:
    """Of the reference, weighted by exp(reward / kl_coef): Rafailov et al. 2023, arXiv:2305.18290, eq. 4."""
    model, tokenizer = (each.from_pretrained(root / "policy") for each in (AutoModelForCausalLM, AutoTokenizer))
    has_vowel = torch.tensor(vowel([tokenizer.decode([token], skip_special_tokens=True) for token in range(300)]))
    found = []
    for row in tiny.prompt_rows(40):
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_tensors="pt")
        reference = model(ids["input_ids"]).logits[0, -1].softmax(-1)
        best = reference * torch.exp(has_vowel / kl_coef)
        found.append(float((best * has_vowel).sum() / best.sum()))
    return sum(found) / len(found)


@pytest.mark.slow
def test_without_a_penalty_the_reward_rises_to_its_highest(root: Path, tmp_path: Path) -> None:
    rewards = bandit(root, tmp_path / "output", kl_coef=0.0, lr_schedule="constant")
    assert rewards[0] < 0.3
    assert sum(rewards[-3:]) / 3 > 0.95


@pytest.mark.parametrize(
    ("num_steps", "rate", "error"), [(10, 4e-2, 0.09), pytest.param(20, 2e-2, 0.06, marks=pytest.mark.slow)]
)
def test_with_a_penalty_the_reward_rises_to_the_known_optimum(
    root: Path, tmp_path: Path, num_steps: int, rate: float, error: float
) -> None:
    optimum = best_reward(root, kl_coef=0.5)
    assert 0.4 < optimum < 0.6
    rewards = bandit(root, tmp_path / "output", kl_coef=0.5, num_steps=num_steps, learning_rate=rate)
    last = rewards[num_steps // 2 :]  # the mean of 320 or 640 draws: 0.03 or 0.02
    assert sum(last) / len(last) == pytest.approx(optimum, abs=error)


OTHERS = [each for each in FEW if each.values[0] not in ("gemma3_text", "gemma3")]


@pytest.mark.parametrize("architecture", OTHERS)
def test_every_architecture_is_measured_as_each_row_alone(tmp_path: Path, architecture: str) -> None:
    write_model(tmp_path, architecture)
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    value = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1).eval()
    prompts, completions = [[5, 6, 7], [8, 9, 10, 11, 12]], [[20, 21, 22, 2], [30, 2]]
    tokens = Tokens.of([*zip(prompts, completions, strict=True)], 4, torch.device("cpu"))
    with torch.no_grad():
        found: list[torch.Tensor] = []
        logps = token_logps(policy, tokens, 0.7, found)
        [entropies] = found
        values = tokens.gather(token_values(value, tokens.input_ids_BT), first=0)
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            ids = torch.tensor([[*prompt, *completion]])
            places = slice(len(prompt) - 1, ids.shape[1] - 1)
            expected = (policy(ids).logits[0, places] / 0.7).log_softmax(-1)
            length = len(completion)
            own = expected[range(length), completion]
            assert logps[row, :length] == pytest.approx(own, abs=1e-4)
            assert entropies[row, :length] == pytest.approx(
                torch.distributions.Categorical(logits=expected).entropy(), abs=1e-4
            )
            hidden = value.base_model(ids).last_hidden_state[0, places]
            assert values[row, :length] == pytest.approx(value.score(hidden).squeeze(-1), abs=1e-4)
            assert not any(each[row, length:].any() for each in (logps, entropies, values)), "padding"


def test_a_reward_model_scores_and_starts_the_value_model(root: Path, tmp_path: Path) -> None:
    both = with_reward_model(root, tmp_path / "inputs")
    stage = ppo(rewards=None, num_steps=1, missing_eos_penalty=2.0)
    trained = training.train(stage, both, tmp_path / "output" / "output")
    samples = pq.read_table(trained.output / "samples.parquet").to_pylist()
    assert len(samples) == 8
    judge = digest_of(digest_files(both / Kind.REWARD_MODEL.value))
    assert {each["weights/reward_model"] for each in samples} == {judge}
    assert trained.reports[0][1]["weights/reward_model"] == int(judge[:10], 16)
    model = AutoModelForSequenceClassification.from_pretrained(both / Kind.REWARD_MODEL.value)
    tokenizer = AutoTokenizer.from_pretrained(root / "policy")
    for each in samples:
        prompt = tokenizer.apply_chat_template(json.loads(each["prompt"]), add_generation_prompt=True)["input_ids"]
        if not each["truncated"]:
            continue  # its end token is not in its text
        ids = torch.tensor([[*prompt, *tokenizer(each["completion"])["input_ids"]]])
        if ids.shape[1] == len(prompt) + each["num_tokens"]:  # the text has the same tokens again
            assert each["rewards/reward_model"] == pytest.approx(float(model(ids).logits), abs=1e-4)
        assert each["reward"] == pytest.approx(each["rewards/reward_model"] - 2.0, abs=1e-4)
    run = TrainingRun(stage, training.inputs(both, stage), TrainContext(output_dir=tmp_path, work_dir=tmp_path))
    assert torch.equal(run.model("value").score.weight, model.score.weight)


@pytest.mark.parametrize("adapter_in", ["merge", "continue", "stack"])
def test_the_reference_of_an_adapter_is_the_policy_that_was_passed(tmp_path: Path, root: Path, adapter_in: str) -> None:
    """The stage fails where policy and reference differ before the first step."""
    made = Made(tmp_path, root)
    policy = made.trained("sft", made.base(), save="adapter", learning_rate=1e-2)
    stage = ppo(adapter=LORA, adapter_in=adapter_in, learning_rate=1e-2)
    reports: dict[int, Metrics] = {}
    ctx = TrainContext(
        output_dir=tmp_path / "output", work_dir=tmp_path / "work", resources=Resources(micro_batch_size=8),
        report=lambda step, metrics: reports.update({step: metrics}),
    )  # fmt: skip
    stage.run({**training.inputs(root, stage), "policy": policy}, ctx)
    assert reports[1]["kl"] == pytest.approx(0.0, abs=1e-4)
    assert abs(reports[2]["kl"]) > 1e-3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kl_target": 6.0, "kl_coef": 0.0}, r"kl_target=6 with kl_coef=0.*set kl_coef.* or kl_target=null"),
        ({"kl_horizon": 100}, r"kl_horizon=100 without kl_target.*set kl_target.* or kl_horizon=null"),
        ({"kl_target": 6.0, "kl_horizon": 1}, r"kl_horizon=1 with global_batch_size=8.*set kl_horizon above 1.6"),
        ({"center_advantages": True, "num_generations": 1}, r"center_advantages=true with num_generations=1.*set num"),
        ({"num_minibatches": 3}, r"num_minibatches=3 does not divide global_batch_size=8; set one that does"),
        (
            {"clip_range": 0.5, "num_ppo_epochs": 1, "num_minibatches": 1},
            r"clip_range=0.5, value_clip_range=0.2 with one update per step.*set num_ppo_epochs",
        ),
        ({"vllm": "server"}, r"vllm=server: .*set vllm=null"),
    ],
)
def test_settings_that_do_nothing_together_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ppo(**fields)


def test_rewards_that_never_differ_end_it(root: Path, tmp_path: Path) -> None:
    constant = {"constant": RewardFunction(function="python:tests.completion_scores.constant")}
    stage = ppo(rewards=constant, num_generations=1, num_steps=4, equal_rewards_patience=2)
    with pytest.raises(PipelineError, match=r"for 2 steps up to step 2, .* equal rewards .*constant=1"):
        training.train(stage, root, tmp_path / "output")


@pytest.mark.parametrize("architecture", [each for each in OTHERS if each.values[0] not in ("llama", "mistral")])
def test_every_architecture_is_trained(root: Path, tmp_path: Path, architecture: str) -> None:
    policy = write_model(tmp_path / "policy", architecture)
    stage = ppo(num_steps=1, num_ppo_epochs=1, precision="bf16", warmup_ratio=0.0)
    trained = training.train(stage, root, tmp_path / "output", policy=policy)
    assert trained.reports[0][1]["kl"] == pytest.approx(0.0, abs=1e-2)
    assert not training.same(training.weights(trained.output), training.weights(policy))
