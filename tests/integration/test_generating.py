"""Methods on the policy's own completions: GRPO and its variants, RLOO, online DPO, and what they share."""

import copy
import math
import shutil
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, LlamaModel
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.generation import vllm_generation

from flows.declare.config import load_pipeline
from flows.planning.plan import make_plan
from lineage.artifact import Kind
from lineage.errors import ConfigError, DataError, PipelineError
from lineage.filesystem.digest import digest_files, digest_of
from tasks.context import Metrics, Resources, TrainContext
from tasks.judgement import canary
from tasks.method import Adapter, Input
from tasks.reward_functions import RewardFunction
from tasks.train.best import Best
from tasks.train.generation.generating import Sampling
from tasks.train.generation.generating_trainer import OnlineDPOTrainer, pair_losses
from tasks.train.generation.rollouts import Rollouts, _warpers, sample
from tasks.train.losses.grpo_variants import VARIANTS
from tasks.train.models import load as models
from tasks.train.run import TrainingRun, row_order
from tests import completion_scores, tiny_models, training
from tests.integration.test_resume import SAVING, stop_and_go_on
from tests.tiny_models import write_model
from tests.trained_store import LORA, Made
from tests.training import same, weights

pytestmark = pytest.mark.usefixtures("one_thread")

LIKE_GRPO = [pytest.param(name, marks=[] if name == "grpo" else pytest.mark.slow) for name in training.REINFORCED]
CLIPPED = {
    "num_iterations": 3, "learning_rate": 3e-2, "num_steps": 6, "lr_schedule": "constant", "max_completion_length": 24,
}  # fmt: skip


def reward(name: str, **fields: object) -> dict[str, RewardFunction]:
    function = f"python:tests.completion_scores.{name}"
    return {name: RewardFunction(function=function, **fields)}  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[list[int]], list[list[int]]]]:
    """The prompts and completions of each generation, as tokens."""
    found = []
    generate = Rollouts.generate

    def kept(self: Rollouts, model: object, examples: list[dict], step: int) -> list[list[int]]:
        completions = generate(self, model, examples, step)  # type: ignore[arg-type]
        found.append(([[*each["prompt_ids"]] for each in examples], completions))
        return completions

    monkeypatch.setattr(Rollouts, "generate", kept)
    return found


# --- Equality with plain TRL -------------------------------------------------------------------------------------


def plain(root: Path, output: Path, trainer_class: type, config_class: type, replayed: list, **own: object) -> list:
    """A script of plain TRL on the same prompts, with the completions of a run of ours; (loss, norm) of each step."""
    from tests.completion_scores import spread

    policy = str(root / "policy")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(policy), AutoTokenizer.from_pretrained(policy)
    rows = pq.read_table(root / "prompts" / "train.parquet").to_pylist()
    order = row_order(len(rows), 6, 0)  # two prompts a step
    prompts = [[{"role": each["role"], "content": each["content"]} for each in rows[i]["prompt"]] for i in order]

    def scored(completions: list, **_: object) -> list[float]:
        return spread([each[0]["content"] for each in completions])

    class Replayed(trainer_class):
        def _generate_single_turn(self, prompt_ids: list, *args: object, **kwargs: object) -> object:
            asked, completions = replayed.pop(0)
            assert asked == prompt_ids
            return completions if trainer_class is RLOOTrainer else (completions, None)

    args = config_class(
        output_dir=str(output), max_steps=3, per_device_train_batch_size=8, learning_rate=3e-3, weight_decay=0.0,
        lr_scheduler_type="cosine", warmup_steps=0.05, logging_steps=1, report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, shuffle_dataset=False, num_generations=4, max_completion_length=6, **own,
    )  # fmt: skip
    trainer = Replayed(
        model, scored, args=args, train_dataset=Dataset.from_dict({"prompt": prompts}), processing_class=tokenizer
    )
    trainer.train()
    return [(each["loss"], each["grad_norm"]) for each in trainer.state.log_history if "loss" in each]


REUSED = {"num_iterations": 2, "epsilon": 1e-4}  # a bound so low that it binds
PLAIN: dict[str, tuple[str, dict, dict]] = {
    "grpo": ("grpo", {"beta": 0.1}, {"loss_type": "grpo", "beta": 0.1}),
    "reused": (
        "grpo",
        {**REUSED, "beta": 0.1, "kl_ratio": True},
        {**REUSED, "beta": 0.1, "loss_type": "grpo", "use_bias_correction_kl": True},
    ),
    "dapo": ("grpo", {"loss": "dapo", "mask_truncated": True}, {"mask_truncated_completions": True, "loss_type": "dapo"}),  # noqa: E501
    "dr_grpo": ("grpo", {"loss": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "bnpo": (  # TRL's micro batch is the whole batch here
        "grpo",
        {"loss": "bnpo", "num_iterations": 2},
        {"loss_type": "bnpo", "num_iterations": 2},
    ),
    "gspo": (
        "grpo",
        {"loss": "gspo", "num_iterations": 2},
        {
            "num_iterations": 2, "importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "cispo": (
        "grpo",
        {"loss": "cispo", "num_iterations": 2},
        {"num_iterations": 2, "loss_type": "cispo", "epsilon_high": 5.0},
    ),
    "sapo": ("grpo", {"loss": "sapo", "num_iterations": 2}, {"num_iterations": 2, "loss_type": "sapo"}),
    "luspo": (
        "grpo",
        {"loss": "luspo", "num_iterations": 2},
        {
            "num_iterations": 2, "importance_sampling_level": "sequence", "loss_type": "luspo", "epsilon": 2e-3,
            "epsilon_high": 2.5e-3,
        },
    ),
    "vespo": ("grpo", {"loss": "vespo", "num_iterations": 2}, {"num_iterations": 2, "loss_type": "vespo"}),
    "rloo": ("rloo", {"normalize_advantages": True}, {"beta": 0.05, "normalize_advantages": True}),
}  # fmt: skip


@pytest.mark.parametrize("case", PLAIN)
def test_a_step_is_that_of_plain_trl_on_the_same_completions(
    root: Path, tmp_path: Path, generated: list, case: str
) -> None:
    name, fields, own = PLAIN[case]
    kl = {"use_bias_correction_kl": False} if name == "grpo" and "use_bias_correction_kl" not in own else {}
    stage = training.method(name, lr_schedule="cosine", warmup_ratio=0.05, **fields)
    run = training.train(stage, root, tmp_path / "output")
    classes = (RLOOTrainer, RLOOConfig) if name == "rloo" else (GRPOTrainer, GRPOConfig)
    expected = plain(root, tmp_path / "plain", *classes, replayed=[*generated], **{**own, **kl})
    found = [(metrics["loss"], metrics["grad_norm"]) for _, metrics in run.reports]
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in expected], abs=1e-5)
    assert [norm for _, norm in found] == pytest.approx([norm for _, norm in expected], rel=1e-4)


# --- The loss of online DPO --------------------------------------------------------------------------------------


def test_the_losses_of_pairs_are_those_of_the_papers() -> None:
    log_ratios = torch.tensor([2.0, -1.0])
    sigmoid = [-math.log(1 / (1 + math.exp(-0.2))), -math.log(1 / (1 + math.exp(0.1)))]
    assert pair_losses(log_ratios, 0.1, "sigmoid").tolist() == pytest.approx(sigmoid)
    assert pair_losses(log_ratios, 0.1, "ipo").tolist() == pytest.approx([9.0, 36.0])  # (2 - 5)^2, (-1 - 5)^2


def test_online_dpo_takes_the_best_and_the_worst_completion_and_no_tie() -> None:
    # Log-ratios to the reference, of two tokens each, where the mask has them: 1.0, 0.5, -2.0 | 9, 9, 9.
    policy = torch.tensor([[0.25, 0.75], [0.5, 7.0], [-1.0, -1.0], [9.0, 0.0], [9.0, 0.0], [9.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1], [1, 1]])
    metrics: dict[str, list[float]] = {}
    fake = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (policy, torch.ones(6, 2), None),
        aux_loss_enabled=False, num_generations=3, beta=0.1, pair_loss="sigmoid", current_gradient_accumulation_steps=2,
        _add_metrics=lambda values, weights: metrics.update(
            {name: float((each * weights).sum() / weights.sum()) for name, each in values.items()}
        ),
    )  # fmt: skip
    inputs = {
        "prompt_ids": torch.ones(6, 1), "prompt_mask": torch.ones(6, 1), "completion_ids": torch.ones(6, 2),
        "completion_mask": mask, "ref_per_token_logps": torch.zeros(6, 2),
        "advantages": torch.tensor([-1.0, 3.0, -2.0, 0.0, 0.0, 0.0]),
    }  # fmt: skip
    loss = OnlineDPOTrainer._compute_loss(fake, None, inputs)
    # The second completion beats the third: 0.5 - (-2.0) = 2.5. Two prompts, two micro batches.
    assert float(loss) == pytest.approx(-math.log(1 / (1 + math.exp(-0.25))) / 2 / 2)
    assert metrics["rewards/margins"] == pytest.approx(0.25) and metrics["rewards/accuracies"] == 1.0


# --- Sampling ----------------------------------------------------------------------------------------------------


def sampled(root: Path, seeds: list[int], sampling: Sampling | None = None, prompts: list | None = None) -> list:
    model = AutoModelForCausalLM.from_pretrained(root / "policy").train()
    model.generation_config.update(top_k=1, repetition_penalty=9.0, max_new_tokens=1)  # must not count
    state = torch.get_rng_state()
    found = sample(
        model, prompts or [[5, 6, 7]] * len(seeds), sampling or Sampling(), seeds, max_new_tokens=4, pad_token_id=0,
        stop_tokens=[2],
    )  # fmt: skip
    assert model.training and torch.equal(torch.get_rng_state(), state), "nothing else is drawn"
    return found


def test_a_completion_depends_on_its_seed_and_not_on_other_rows(root: Path) -> None:
    prompts = [[5, 6, 7], [8], [9, 10]]
    together = sampled(root, [1, 2, 3], prompts=prompts)
    assert [sampled(root, [seed], prompts=[each])[0] for seed, each in zip([1, 2, 3], prompts, strict=True)] == together
    assert sampled(root, [1]) != sampled(root, [4])


def test_padding_gets_no_repetition_penalty_where_its_token_ends_completions() -> None:
    end, mask = 2, torch.tensor([[0, 0, 1], [1, 1, 1]])
    [penalty] = _warpers(Sampling(repetition_penalty=2.0), mask)
    read = torch.tensor([[end, end, 5, 7], [3, 4, 5, end]])  # the last column is sampled
    found = penalty(read, torch.ones(2, 8))
    assert found.tolist() == [[1, 1, 1, 1, 1, 0.5, 1, 0.5], [1, 1, 0.5, 0.5, 0.5, 0.5, 1, 1]]


def test_samples_follow_the_softmax_and_the_settings(root: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(root / "policy")
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # a distribution with likely and unlikely tokens
        logits_V = model(torch.tensor([[5, 6, 7]])).logits[0, -1]

    def first(sampling: Sampling, count: int = 3000) -> torch.Tensor:
        found = sample(
            model, [[5, 6, 7]] * count, sampling, range(count), max_new_tokens=1, pad_token_id=0, stop_tokens=[]
        )
        return torch.tensor([ids[0] for ids in found])

    for temperature in (1.0, 0.5):
        counts = torch.bincount(first(Sampling(temperature=temperature)), minlength=len(logits_V))
        expected = (logits_V / temperature).softmax(-1)
        deviation = (expected * (1 - expected) / 3000).sqrt()
        assert float(((counts / 3000 - expected).abs() / deviation.clamp(min=1e-3)).max()) < 5
    ranked = logits_V.argsort(descending=True)
    assert set(first(Sampling(top_k=3, temperature=9.0), 500).tolist()) == set(ranked[:3].tolist())
    assert set(first(Sampling(top_p=1e-4), 50).tolist()) == {int(ranked[0])}
    likely = logits_V.softmax(-1)
    assert set(first(Sampling(min_p=0.9), 50).tolist()) <= set(
        (likely >= 0.9 * likely.max()).nonzero().flatten().tolist()
    )


@pytest.mark.parametrize(
    "changed",
    [{"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.9}, {"repetition_penalty": 1e-3}],
    ids=lambda each: next(iter(each)),
)  # fmt: skip
def test_every_setting_of_the_samples_changes_them(root: Path, changed: dict[str, float]) -> None:
    seeds = list(range(8))
    assert sampled(root, seeds, Sampling(**changed)) != sampled(root, seeds)  # type: ignore[arg-type]


def test_prompts_are_read_in_the_order_of_all_trainings_each_as_often_as_it_has_completions(
    root: Path, tmp_path: Path, generated: list
) -> None:
    training.train(training.method("grpo"), root, tmp_path / "output")
    prompts = [tuple(ids) for asked, _ in generated for ids in asked]
    groups = [prompts[start : start + 4] for start in range(0, 24, 4)]
    assert all(len(set(group)) == 1 for group in groups)
    rows = pq.read_table(root / "prompts" / "train.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(root / "policy")
    expected = [
        tokenizer.apply_chat_template(
            [{"role": each["role"], "content": each["content"]} for each in rows[index]["prompt"]],
            add_generation_prompt=True, return_dict=False,
        )
        for index in row_order(40, 6, 0)
    ]  # fmt: skip
    assert [list(group[0]) for group in groups] == expected


def test_columns_reach_the_reward_and_all_tokens_are_counted(root: Path, tmp_path: Path, generated: list) -> None:
    completion_scores.ASKED.clear()
    run = training.train(training.method("grpo", num_steps=2, rewards=reward("asked")), root, tmp_path / "output")
    assert run.metrics["prompt_tokens"] > 0 and "trained_tokens_percent" not in run.metrics
    assert {answer for _, answer in completion_scores.ASKED} & {*range(0, 40, 2)}
    assert all(prompt[0]["role"] == "user" for prompt, _ in completion_scores.ASKED)  # type: ignore[index]
    steps = [sum(map(len, prompts)) + sum(map(len, completions)) for prompts, completions in generated]
    assert [metrics["num_tokens"] for _, metrics in run.reports] == [*accumulate(steps)]


@pytest.mark.parametrize("name", LIKE_GRPO)
def test_a_prompt_that_is_too_long_is_cut(root: Path, tmp_path: Path, generated: list, name: str) -> None:
    fields = {"num_steps": 1, "max_length": 13, "max_completion_length": 4, "num_generations": 2}
    run = training.train(training.method(name, **fields), root, tmp_path / "output")
    assert run.metrics["prompts_cut"] > 0
    assert {len(prompt) for prompts, _ in generated for prompt in prompts} == {9}


# --- Options -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_loss_and_bound_changes_the_run_where_completions_are_trained_again(root: Path, tmp_path: Path) -> None:
    runs = {
        **{name: {"loss": name} for name in VARIANTS},
        "epsilon": {"epsilon": 0.01},
        "epsilon_high": {"epsilon_high": 0.01},
        "beta": {"beta": 1.0},
        "kl_ratio": {"beta": 1.0, "kl_ratio": True},
    }
    found = {
        name: weights(training.train(training.method("grpo", **CLIPPED, **fields), root, tmp_path / name).output)
        for name, fields in runs.items()
    }
    names = list(found)
    equal = [(one, two) for i, one in enumerate(names) for two in names[:i] if same(found[one], found[two])]
    assert equal == [], equal


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("grpo", {"mask_truncated": True, "max_completion_length": 24, "beta": 0.1}),
        ("rloo", {"mask_truncated": True, "max_completion_length": 24}),
        ("online_dpo", {}),
    ],
)
def test_the_micro_batch_changes_no_metric(root: Path, tmp_path: Path, name: str, fields: dict) -> None:
    """Also where some micro batches have no token, or no pair, that counts."""
    one, other = (
        training.train(
            training.method(name, **fields), root, tmp_path / f"{size}", resources=Resources(micro_batch_size=size)
        )
        for size in (2, 8)
    )
    for (_, found), (_, expected) in zip(other.reports, one.reports, strict=True):
        for metric in ("kl", "entropy", "rewards/margins", "rewards/accuracies", "frac_reward_zero_std"):
            assert found.get(metric) == pytest.approx(expected.get(metric), abs=1e-5), metric


def test_the_micro_batch_changes_no_loss_by_more_than_last_bits(root: Path, tmp_path: Path) -> None:
    for name, fields in (
        ("grpo", {"loss": "bnpo", "num_iterations": 2}),
        ("grpo", {"num_iterations": 2, "beta": 0.1}),
        ("rloo", {}),
    ):
        runs = [
            training.train(
                training.method(name, **fields), root, tmp_path / f"{name}{size}",
                resources=Resources(micro_batch_size=size),
            ).losses
            for size in (2, 8)
        ]  # fmt: skip
        assert runs[0] == pytest.approx(runs[1], abs=1e-4)


@pytest.mark.parametrize("fields", [{"num_iterations": 2, "loss": "gspo"}, {"num_iterations": 4, "beta": 0.1}], ids=str)
def test_a_training_that_stops_between_the_steps_of_a_generation_resumes_to_the_bit(
    root: Path, tmp_path: Path, fields: dict
) -> None:
    stop_and_go_on(training.method("grpo", num_steps=6, **fields), root, tmp_path, SAVING)
    samples = [pq.read_table(tmp_path / run / "output" / "samples.parquet") for run in ("whole", "broken")]
    assert samples[0].equals(samples[1])


REFUSED: dict[str, tuple[str, dict, str]] = {
    "groups": ("grpo", {"global_batch_size": 6}, r"6 completions are not groups of num_generations=4"),
    "room": ("grpo", {"max_length": 6}, r"leaves 0 tokens for a prompt.*set max_length=7"),
    "prompt": ("grpo", {"max_prompt_length": 95}, r"max_prompt_length=95; set max_length=101"),
    "bound": ("grpo", {"epsilon": 0.1}, r"epsilon=0.1 with num_iterations=1.*set num_iterations=2"),
    "no bound": ("grpo", {"loss": "sapo", "num_iterations": 2, "epsilon": 0.1}, r"loss=sapo has no such bound"),
    "cap": ("grpo", {"loss": "cispo", "num_iterations": 2, "epsilon_high": 0.28}, r"epsilon_high=0.28: .*set 1 or"),
    "like": ("grpo", {"loss": "gspo"}, r"loss=gspo with num_iterations=1.*or loss=grpo"),
    "as dapo": ("grpo", {"loss": "bnpo"}, r"loss=bnpo with num_iterations=1.*or loss=dapo"),
    "kl_ratio": ("grpo", {"kl_ratio": True, "beta": 0.1}, r"kl_ratio=true.*num_iterations=2"),
    "name": ("grpo", {"rewards": {"reward_model": RewardFunction(function="exact")}}, r"this name is taken"),
    "best": ("grpo", {"best": Best(every_steps=1)}, r"reads prompts, which have no loss .* set best.metric to one"),
    "greedy": ("rloo", {"sampling": Sampling(top_k=1)}, r"top_k=1 .*would be equal.*; set sampling.top_k=2"),
    "answer": ("grpo", {"too_long": "cut_answer"}, r"too_long=cut_answer: prompts have no answer yet"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_what_to_set(case: str) -> None:
    name, fields, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        training.method(name, **fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rewards": None}, "rewards and the slot reward_model are empty"),
        ({"rewards": {"json": RewardFunction(weight=0.0)}}, r"rewards json have weight=0 .*set the weight of one"),
        ({"reward_model_weight": 2.0}, "reward_model_weight=2: the slot reward_model is empty"),
    ],
)
def test_a_stage_without_a_reward_is_refused(root: Path, tmp_path: Path, fields: dict, message: str) -> None:
    stage = training.method("rloo", **fields)
    with pytest.raises(ConfigError, match=message):
        training.train(stage, root, tmp_path / "output")


# --- Rewards -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", training.REINFORCED)
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("failing", r"^step 1, which is not taken: .*ValueError: no judge today for row 0"),
        ("non_finite", r"^step [12], which is not taken: .*non_finite returned nan for row \d"),
    ],
)
def test_a_reward_that_fails_stops_before_its_step(
    root: Path, tmp_path: Path, name: str, function: str, message: str
) -> None:
    stage = training.method(name, rewards=reward(function))
    with pytest.raises(PipelineError, match=message):
        training.train(stage, root, tmp_path / "output")
    assert not (tmp_path / "output" / "model.safetensors").exists()


def test_a_reward_that_fails_names_its_worker() -> None:
    def fails(*_: object) -> None:
        raise PipelineError("row 3")

    rollouts = SimpleNamespace(ctx=SimpleNamespace(rank=1, world_size=2), _scores=fails)
    with pytest.raises(PipelineError, match=r"^step 5 on worker 1, which is not taken: row 3"):
        Rollouts.score(rollouts, 4, [], [])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_reward_that_fails_later_names_its_step(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    calls, spread = list[None](), completion_scores.spread

    def worn(completions: list[str]) -> list[float]:
        calls.append(None)
        return spread(completions) if len(calls) < 3 else [float("inf")] * len(completions)

    monkeypatch.setattr(completion_scores, "spread", worn)
    with pytest.raises(
        PipelineError, match=r"^step 3, which is not taken: rewards.spread returned inf for row 0 \(prompt"
    ):
        training.train(training.method(name, rewards=reward("spread"), num_steps=4), root, tmp_path / "output")


def test_a_column_that_the_prompts_lack_is_refused_before_the_first_step(root: Path, tmp_path: Path) -> None:
    stage = training.method("grpo", rewards={"exact": RewardFunction(column="solution")})
    with pytest.raises(DataError, match=r"rewards.exact: the prompts have no column solution; they have: answer"):
        training.train(stage, root, tmp_path / "output")


def test_equal_rewards_stop_a_training_after_so_many_steps(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"rewards": reward("constant"), "num_steps": 5}
    with pytest.raises(
        PipelineError, match=r"for 2 steps up to step 2, all completions.*constant=1.*equal_rewards_patience"
    ):
        training.train(training.method("grpo", **fields, equal_rewards_patience=2), root, tmp_path / "two")
    caplog.clear()
    with caplog.at_level("WARNING"):
        run = training.train(training.method("grpo", **fields, equal_rewards_patience=None), root, tmp_path / "none")
    assert caplog.text.count("rewards=equal") == 1
    assert run.metrics["frac_reward_zero_std"] == 1.0 and len(run.reports) == 5


@pytest.mark.parametrize(
    ("name", "fields"),
    [("grpo", {}), ("grpo", {"scale_rewards": "batch"}), ("grpo", {"loss": "dr_grpo"}), ("rloo", {}), ("ppo", {})],
)
def test_the_share_of_groups_with_equal_rewards_is_that_of_the_rewards(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fields: dict
) -> None:
    def half(completions: list[str]) -> list[float]:  # two groups of four: equal rewards, others
        return [1.0 if row < 4 else float(row) for row in range(len(completions))]

    monkeypatch.setattr(canary, "spread", half)
    stage = training.method(name, num_generations=4, learning_rate=3e-2, **fields)
    run = training.train(stage, root, tmp_path / "output", resources=Resources(micro_batch_size=8))
    assert [metrics["frac_reward_zero_std"] for _, metrics in run.reports] == [0.5] * 3


def equal_after(steps: int, value: float = 0.3) -> object:
    """A reward function that gives different rewards in the first steps, then one to all."""
    calls: list[None] = []

    def spread(completions: list[str]) -> list[float]:
        calls.append(None)
        return [float(row) if len(calls) <= steps else value for row in range(len(completions))]

    return spread


QUIET = [
    ("grpo", {}), ("grpo", {"scale_rewards": "batch"}), ("grpo", {"loss": "dr_grpo"}),
    ("grpo", {"num_iterations": 2, "num_steps": 4}), ("rloo", {"beta": 0.0, "normalize_advantages": True}),
    ("rloo", {"beta": 0.0, "reward_clip": 0.3}), ("online_dpo", {"num_generations": 4}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields"), QUIET)
def test_a_step_with_equal_rewards_changes_no_weight(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fields: dict
) -> None:
    shared = {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_schedule": "constant", "warmup_ratio": 0.0, **fields}
    iterations = fields.get("num_iterations", 1)
    resources = Resources(micro_batch_size=8)
    outputs = []
    for steps in (iterations, 3 * iterations):  # the first generation teaches: Adam has momentum after it
        monkeypatch.setattr(canary, "spread", equal_after(1, value=7.3))
        stage = training.method(name, **{**shared, "num_steps": steps})
        outputs.append(training.train(stage, root, tmp_path / str(steps), resources=resources))
    learned, quiet = outputs
    assert not same(weights(learned.output), weights(root / "policy"))
    assert same(weights(quiet.output), weights(learned.output))
    first, *_, last = (metrics for _, metrics in quiet.reports)
    assert first["advantages/max"] > 0 > first["advantages/min"] and first["grad_norm"] > 0
    assert last["advantages/max"] == last["advantages/min"] == last["grad_norm"] == 0


def test_a_policy_that_is_still_its_reference_gets_no_step_without_rewards(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "spread", equal_after(0))
    stage = training.method("grpo", beta=0.1, weight_decay=0.1, learning_rate=1e-2)
    run = training.train(stage, root, tmp_path / "output", resources=Resources(micro_batch_size=8))
    assert same(weights(run.output), weights(root / "policy"))


def test_a_scaled_loss_takes_a_step_that_changes_no_weight(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"learning_rate": 1e-2, "weight_decay": 0.1, "lr_schedule": "constant", "warmup_ratio": 0.0}
    found = []
    for steps in (1, 3):
        monkeypatch.setattr(canary, "spread", equal_after(1))
        stage = training.method("grpo", **shared, num_steps=steps)
        ctx = TrainContext(
            output_dir=tmp_path / str(steps), work_dir=tmp_path / "work", resources=Resources(micro_batch_size=8),
            report=lambda _step, _metrics: None,
        )  # fmt: skip
        run = TrainingRun(stage, training.inputs(root, stage), ctx)
        trainer = stage.trainer(run)
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
        run.fit(trainer)
        found.append({name: each.detach().clone() for name, each in trainer.model.named_parameters()})
    assert same(*found) and not same(found[0], {name: weights(root / "policy")[name] for name in found[0]})


def test_equal_rewards_of_any_value_have_advantages_of_exactly_0(root: Path, tmp_path: Path) -> None:
    """Of the 101 values from 0.00 to 1.00, 46 have a mean in fp32 that is another number."""
    rewards_GN = (torch.arange(101) / 100).repeat_interleave(8).view(101, 8)
    method = training.method("grpo", num_generations=8)
    rollouts = SimpleNamespace(method=method, weights=[1.0])
    found = Rollouts.is_rounding(rollouts, rewards_GN - rewards_GN.mean(1, keepdim=True), rewards_GN.view(-1, 1))
    assert bool(found.all())
    near = rewards_GN.clone()
    near[:, 0] += 0.01  # and nothing that differs is taken for equal
    found = Rollouts.is_rounding(rollouts, near - near.mean(1, keepdim=True), near.view(-1, 1))
    assert not bool(found.any())


def test_steps_whose_completions_are_all_masked_stop_a_training(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"mask_truncated": True, "max_completion_length": 1}
    with pytest.raises(PipelineError, match=r"for 2 steps up to step 2, no completion ended within .*set mask_trunc"):
        training.train(training.method("grpo", **fields, equal_rewards_patience=2), root, tmp_path / "output")
    assert caplog.text.count("rewards=masked") == 1


@pytest.fixture(scope="module")
def with_model(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same inputs, with a reward model."""
    folder = tmp_path_factory.mktemp("with_model")
    for each in root.iterdir():
        (folder / each.name).symlink_to(each)
    training.train(training.method("reward", learning_rate=3e-2), root, folder / "reward_model")
    return folder


def test_a_reward_model_reads_the_tokens_that_the_policy_read_and_wrote(
    with_model: Path, tmp_path: Path, generated: list
) -> None:
    run = training.train(training.method("grpo", rewards=None), with_model, tmp_path / "output")
    judge = digest_of(digest_files(with_model / "reward_model"))
    assert {metrics["weights/reward_model"] for _, metrics in run.reports} == {int(judge[:10], 16)}
    assert run.metrics["weights/reward_model"] == int(judge[:10], 16)
    model = AutoModelForSequenceClassification.from_pretrained(with_model / "reward_model")
    prompts, completions = generated[-1]
    expected = []
    for prompt, completion in zip(prompts, completions, strict=True):
        hidden = model.base_model(torch.tensor([[*prompt, *completion]])).last_hidden_state
        expected.append(model.score(hidden[:, -1]).item())
    samples = pq.read_table(run.output / "samples.parquet").to_pylist()
    assert {each["weights/reward_model"] for each in samples} == {judge}
    policies = [each["weights"] for each in samples]
    assert [len({*policies[start : start + 8]}) for start in (0, 8, 16)] == [1] * 3
    assert policies[0] == policies[8] != policies[16], "the first step of a warmup moves nothing"
    samples = samples[-8:]
    assert [each["rewards/reward_model"] for each in samples] == pytest.approx(expected, abs=1e-5)
    assert run.reports[-1][1]["rewards/reward_model/mean"] == pytest.approx(sum(expected) / 8, abs=1e-5)


@pytest.fixture(scope="module")
def without_head(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain language model, and a classifier with two labels."""
    folder = tmp_path_factory.mktemp("without_head")
    shutil.copytree(root / "policy", folder / "plain")
    shutil.copytree(root / "policy", folder / "two")
    AutoModelForSequenceClassification.from_pretrained(root / "policy", num_labels=2).save_pretrained(folder / "two")
    return {name: folder / name for name in ("plain", "two")}


@pytest.mark.parametrize(("name", "why"), [("plain", "no file of it has a head"), ("two", "its head has 2 labels")])
@pytest.mark.parametrize("reader", ["grpo", "ppo", "evaluate"])
def test_only_a_model_with_a_trained_head_of_one_label_gives_rewards(
    root: Path, tmp_path: Path, without_head: dict[str, Path], reader: str, name: str, why: str
) -> None:
    judge = Input(name="judge", kind=Kind.REWARD_MODEL, fingerprint="j" * 64, path=without_head[name])
    ctx = TrainContext(
        output_dir=tmp_path / "output", work_dir=tmp_path / "work", resources=Resources(micro_batch_size=8),
        report=lambda _step, _metrics: None,
    )  # fmt: skip

    def read() -> object:
        if reader == "evaluate":
            return models.load_on_device(judge, ctx)
        stage = training.method(reader, rewards=None)
        return stage.run({**training.inputs(root, stage), "reward_model": judge}, ctx)

    with pytest.raises(ConfigError, match=rf"no reward model: {why}.*conf/stage/reward.yaml"):
        read()


@pytest.mark.parametrize("name", ["plain", "two"])
def test_the_plan_refuses_a_reward_model_without_a_head(without_head: dict[str, Path], name: str) -> None:
    overrides = [
        "pipeline=rlhf-ppo", "~stages.reward", "+source@sources.judge=rows", "sources.judge.kind=reward_model",
        f"sources.judge.path={without_head[name]}", "stages.ppo.inputs.reward_model=source:judge",
        "stages.evaluate.inputs.reward_model=source:judge", "tracking=none",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"sources\.judge\.path=.*: no reward model: "):
        make_plan(load_pipeline(overrides))


def test_rewards_are_summed_with_their_weights(with_model: Path, tmp_path: Path) -> None:
    fields = {"rewards": reward("spread", weight=2.0), "reward_model_weight": 3.0, "missing_eos_penalty": 0.5}
    run = training.train(training.method("rloo", **fields), with_model, tmp_path / "output")
    samples = pq.read_table(run.output / "samples.parquet").to_pylist()
    assert len(samples) == 24 and {each["step"] for each in samples} == {1, 2, 3}
    for each in samples:
        assert each["rewards/missing_eos"] == (-0.5 if each["truncated"] else 0.0)
        expected = 2 * each["rewards/spread"] + 3 * each["rewards/reward_model"] + each["rewards/missing_eos"]
        assert each["reward"] == pytest.approx(expected, abs=1e-4)
    means = [metrics["reward"] for _, metrics in run.reports]
    assert means == pytest.approx(
        [sum(each["reward"] for each in samples[i : i + 8]) / 8 for i in (0, 8, 16)], abs=1e-4
    )
    other = training.train(
        training.method("rloo", **{**fields, "reward_model_weight": 30.0}), with_model, tmp_path / "other"
    )
    assert not same(weights(other.output), weights(run.output))


def test_what_a_step_reports(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        run = training.train(training.method("grpo", beta=0.1), root, tmp_path / "output")
    metrics = run.reports[0][1]
    assert {"reward", "reward_std", "rewards/spread/mean", "frac_reward_zero_std", "kl", "entropy"} <= metrics.keys()
    assert {"completions/mean_length", "completions/clipped_ratio"} <= metrics.keys()
    assert metrics["entropy"] == pytest.approx(math.log(300), abs=0.1)  # a random model
    assert metrics["kl"] == pytest.approx(0, abs=1e-6) and run.reports[2][1]["kl"] > 1e-5
    assert caplog.text.count("completion=") == 10


# --- The reference -----------------------------------------------------------------------------------------------


def test_a_reference_that_is_not_the_input_policy_stops_the_stage(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = models.frozen

    def moved(model: torch.nn.Module) -> torch.nn.Module:
        with torch.no_grad():
            model.lm_head.weight[7] += 1.0
        return frozen(model)

    monkeypatch.setattr(models, "frozen", moved)
    for name in training.REINFORCED:
        with pytest.raises(PipelineError, match="policy and reference differ at step 0"):
            training.train(training.method(name, beta=0.1), root, tmp_path / name)


@pytest.mark.parametrize("adapter_in", ["merge", "continue", "stack"])
@pytest.mark.parametrize("name", LIKE_GRPO)
def test_the_reference_of_an_adapter_is_the_input_policy(
    root: Path, tmp_path: Path, name: str, adapter_in: str
) -> None:
    made = Made(tmp_path, root)
    policy = made.trained("sft", made.base(), save="adapter", learning_rate=1e-2)
    stage = training.method(name, adapter=LORA, adapter_in=adapter_in, beta=0.1)
    reports: list[Metrics] = []
    ctx = TrainContext(
        output_dir=tmp_path / "output", work_dir=tmp_path / "work", resources=Resources(micro_batch_size=8),
        report=lambda _step, metrics: reports.append(metrics),
    )  # fmt: skip
    stage.run({**training.inputs(root, stage), "policy": policy}, ctx)
    assert abs(reports[0]["kl"]) < 1e-6 < abs(reports[2]["kl"])


def test_no_reference_is_loaded_without_a_kl(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    frozen = models.frozen
    monkeypatch.setattr(models, "frozen", lambda model: loaded.append(model) or frozen(model))
    training.train(training.method("grpo"), root, tmp_path / "output")
    assert loaded == []
    training.train(training.method("grpo", beta=0.1), root, tmp_path / "kl")
    assert len(loaded) == 1


# --- vLLM --------------------------------------------------------------------------------------------------------


class Engine:
    """A stand-in for vLLM, which needs a GPU: a copy of the policy, which ``sync_weights`` updates."""

    vllm_client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}})
    built: ClassVar[list[dict]] = []
    last_sync = math.inf  # number of the last sync that has an effect
    in_process = False  # whether its weights can be read

    def __init__(self, **settings: object) -> None:
        self.built.append({**settings, "engine": vllm_generation.LLM() if hasattr(vllm_generation, "LLM") else None})
        self.policy = settings["model"]
        self.engine = copy.deepcopy(self.policy).requires_grad_(False)
        self.temperature = settings["temperature"]
        self.syncs = 0
        if self.in_process:
            runner = SimpleNamespace(model=self.engine)
            driver = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
            self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=driver))

    def sync_weights(self) -> None:
        self.syncs += 1
        if self.syncs <= self.last_sync:
            self.engine.load_state_dict(self.policy.state_dict())

    def generate(self, *, prompts: list, **_: object) -> tuple:
        completions = [[20 + index, 21, 2] for index in range(len(prompts))]
        logps = []
        for prompt, ids in zip(prompts, completions, strict=True):
            with torch.no_grad():
                whole = torch.tensor([[*prompt, *ids]])
                logits = type(self.engine).forward(self.engine, input_ids=whole).logits[0, len(prompt) - 1 : -1]
            all_logps = (logits / self.temperature).log_softmax(-1)
            logps.append([[float(row[token])] for row, token in zip(all_logps, ids, strict=True)])
        return prompts, completions, logps, None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    found = type("Engine", (Engine,), {"built": []})
    for module in ("grpo_trainer", "rloo_trainer"):
        monkeypatch.setattr(f"trl.trainer.{module}.VLLMGeneration", found)
    return found


@pytest.mark.parametrize("mode", ["colocate", "server"])
@pytest.mark.parametrize("name", LIKE_GRPO)
def test_vllm_generates_what_is_scored_and_trained(
    root: Path, tmp_path: Path, engine: type[Engine], monkeypatch: pytest.MonkeyPatch, name: str, mode: str
) -> None:
    temperature = 1.0 if name == "online_dpo" else 0.7  # its loss is at 1
    stage = training.method(name, vllm=mode, sampling=Sampling(temperature=temperature), num_steps=2)
    monkeypatch.setattr(vllm_generation, "LLM", lambda **given: given, raising=False)
    shared = {"vllm_gpu_memory_utilization": 0.5, "vllm_enforce_eager": True} if mode == "colocate" else {}
    resources = Resources(micro_batch_size=8, **shared)  # type: ignore[arg-type]
    run = training.train(stage, root, tmp_path / "output", resources=resources)
    [settings] = engine.built
    expected_engine = (0.5, {"enforce_eager": True}) if mode == "colocate" else (0.3, {})
    assert (settings["gpu_memory_utilization"], settings["engine"]) == expected_engine
    assert vllm_generation.LLM() == {}, "only the engine of this training is eager"
    assert settings["mode"] == mode
    assert settings["max_completion_length"] == stage.max_completion_length  # type: ignore[attr-defined]
    assert settings["generation_kwargs"] == {"stop_token_ids": [2], "temperature": temperature}
    assert run.metrics["sampler/logp_difference_max"] < 1e-4, "each step generates with the weights of the step before"
    tokenizer = AutoTokenizer.from_pretrained(root / "policy")
    samples = pq.read_table(run.output / "samples.parquet").to_pylist()
    expected = [tokenizer.decode([20 + index, 21]) for index in range(8)]
    assert [each["completion"] for each in samples] == [*expected, *expected]
    assert [each["weights_step"] for each in samples] == [0] * 8 + [1] * 8
    assert not same(weights(run.output), weights(root / "policy"))


# --- Models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", tiny_models.FEW)
def test_every_architecture_trains_and_agrees_with_its_reference(root: Path, tmp_path: Path, architecture: str) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", architecture)
    for name in ("grpo", "online_dpo"):
        run = training.train(
            training.method(name, beta=0.1, num_steps=2), root, tmp_path / name, policy=policy
        )  # fmt: skip
        assert all(math.isfinite(norm) and norm > 0 for norm in run.losses)
        assert not same(weights(run.output), weights(policy))


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "mixtral"])
def test_padded_rows_have_the_log_probabilities_of_each_row_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """TRL pads prompts on the left; GPT-2, with its table of positions, must not count the padding."""
    found, measure = [], GRPOTrainer._get_per_token_logps_and_entropies

    def kept(self: GRPOTrainer, model: object, ids: torch.Tensor, mask: torch.Tensor, num: int, **own: object) -> tuple:
        logps, *rest = measure(self, model, ids, mask, num, **own)
        found.append((ids, mask, logps.detach()))
        return logps, *rest

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", kept)
    policy = tiny_models.write_model(tmp_path / "policy", architecture)
    stage = training.method("grpo", beta=0.1, num_steps=1, num_generations=2)
    training.train(stage, root, tmp_path / "output", policy=policy)
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    assert len(found) > 3 and not all(mask[:, 0].all() for _, mask, _ in found), "policy and reference, with padding"
    for ids, mask, logps in found:
        for row, real, row_logps in zip(ids, mask.bool(), logps, strict=True):
            alone, ends = row[real].unsqueeze(0), int(real[-len(row_logps) :].sum())
            with torch.no_grad():
                expected = model(alone).logits[0, :-1].log_softmax(-1).gather(1, alone[0, 1:, None])[-ends:, 0]
            assert row_logps[:ends].tolist() == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.fixture
def tokens_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each forward of a backbone of Llama."""
    found: list[int] = []
    forward = LlamaModel.forward

    def counted(self: LlamaModel, input_ids: torch.Tensor, *args: object, **inputs: object) -> object:
        found.append(input_ids.numel())
        return forward(self, input_ids, *args, **inputs)

    monkeypatch.setattr(LlamaModel, "forward", counted)
    return found


@pytest.mark.parametrize("fields", [{}, {"beta": 0.1, "num_iterations": 2}, {"adapter": LORA}], ids=str)
def test_a_prompt_is_read_once_for_its_completions_with_the_numbers_of_whole_rows(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens_read: list[int], fields: dict
) -> None:
    for check in ("require_output_loads", "require_adapter_loads"):  # they read rows of their own
        monkeypatch.setattr(f"tasks.train.models.load.{check}", lambda *_, **__: None)
    runs = {}
    for name in ("once", "whole"):
        if name == "whole":
            monkeypatch.setattr("tasks.train.generation.rollouts.prompt_cache", lambda *_: None)
        run = training.train(training.method("grpo", **fields), root, tmp_path / name)
        samples = pq.read_table(run.output / "samples.parquet").drop_columns("weights")  # digests; compared below
        runs[name] = run.losses, samples.to_pylist(), sum(tokens_read)
        tokens_read.clear()
    (losses, samples, tokens), (expected, whole_samples, all_tokens) = runs.values()
    assert losses == pytest.approx(expected, rel=1e-4) and samples == whole_samples
    torch.testing.assert_close(
        training.weights(tmp_path / "once"), training.weights(tmp_path / "whole"), rtol=0, atol=2e-5
    )
    assert tokens < 0.5 * all_tokens


@pytest.mark.parametrize(
    ("fields", "resources"),
    [
        ({"neftune_alpha": 5.0}, {}),
        ({"adapter": Adapter(rank=4, alpha=8, dropout=0.5)}, {}),
        ({}, {"gradient_checkpointing": "on"}),
    ],
    ids=["neftune", "dropout", "checkpointing"],
)
def test_whole_rows_are_trained_where_each_has_noise_of_its_own_or_recomputes_its_activations(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict, resources: dict
) -> None:
    runs = []
    for name in ("once", "whole"):
        if name == "whole":
            monkeypatch.setattr("tasks.train.generation.rollouts.prompt_cache", lambda *_: None)
        where = Resources(micro_batch_size=8, **resources)
        runs.append(training.train(training.method("grpo", **fields), root, tmp_path / name, resources=where))
    assert runs[0].losses == runs[1].losses


def pad_as_eos(policy: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(policy)


def test_with_the_end_token_as_padding_a_training_is_the_same(root: Path, tmp_path: Path) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", "llama")
    runs = []
    for change in (None, pad_as_eos):
        if change:
            change(policy)
        stage = training.method("grpo", max_completion_length=12, beta=0.1)
        runs.append(training.train(stage, root, tmp_path / f"pad{len(runs)}", policy=policy))
    assert runs[0].losses == pytest.approx(runs[1].losses, abs=1e-5)
    assert runs[0].metrics["completions/clipped_ratio"] < 1, "some completions have an end"


def test_bf16_follows_fp32(root: Path, tmp_path: Path) -> None:
    found = [
        training.train(training.method("grpo", precision=each), root, tmp_path / each).losses[0]
        for each in ("fp32", "bf16")
    ]
    assert found[0] == pytest.approx(found[1], rel=0.1) and found[0] != found[1]


@pytest.mark.parametrize("scaling", ["longrope", pytest.param("dynamic", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each in ("grpo", "ppo") else pytest.mark.slow) for each in training.GENERATING],
)
def test_rows_above_and_below_the_original_length_are_sampled_as_they_are_trained(
    tmp_path: Path, name: str, scaling: str
) -> None:
    """Positions are scaled by one length, whatever the micro batch; prompts have 22 to 34 tokens."""
    root, original = training.write_inputs(tmp_path / "inputs", num_rows=16), 32
    rope = {"rope_type": scaling, "rope_theta": 1e4, "factor": 4.0}
    if scaling == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "original_max_position_embeddings": original}
    write_model(
        root / "policy", "phi3" if scaling == "longrope" else "llama", head_dim=8, hidden_size=32, rope_parameters=rope,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3,
        max_position_embeddings=original if scaling == "dynamic" else 4 * original,
        original_max_position_embeddings=original,
    )  # fmt: skip
    stage = training.method(name, num_steps=2, max_completion_length=8)
    runs = [
        training.train(stage, root, tmp_path / f"micro{size}", resources=Resources(micro_batch_size=size))
        for size in ((2, 8) if name == "online_dpo" else (1, 4))  # a pair is in one micro batch
    ]
    assert runs[1].losses == pytest.approx(runs[0].losses, rel=1e-4)
    differences = [metrics["sampler/logp_difference_max"] for run in runs for _, metrics in run.reports]
    assert len(differences) == 4 and max(differences) < 1e-3
