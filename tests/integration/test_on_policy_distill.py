"""On-policy distillation by TRL's trainer: on our tokens and noise, with its faults corrected."""

from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DistillationConfig, DistillationTrainer

from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.train.generation.generating import Sampling
from tasks.train.run import row_order
from tests import tiny, training
from tests.tiny_models import write_model

GREEDY = Sampling(top_k=1)
ONE, FOUR = Resources(micro_batch_size=1), Resources(micro_batch_size=4)


def losses(
    root: Path, output: Path, *, policy: Path | None = None, resources: Resources = FOUR, **fields: object
) -> list[float]:
    stage = training.method("on_policy_distill", **{"sampling": GREEDY, "num_steps": 2, **fields})
    return training.train(stage, root, output, policy=policy, resources=resources).losses


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_trajectory_is_that_of_a_plain_trl_script(root: Path, tmp_path: Path, beta: float) -> None:
    """Where all completions are the most probable ones: TRL draws its noise otherwise."""
    prompts = [tiny.prompt_rows(40)[index]["prompt"] for index in row_order(40, 24, 0)]
    args = DistillationConfig(
        output_dir=str(tmp_path / "plain"), max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        learning_rate=3e-3, lr_scheduler_type="cosine", warmup_steps=0.05, seed=0, beta=beta, top_k=1,
        max_completion_length=6, shuffle_dataset=False, logging_steps=1, report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no",
    )  # fmt: skip
    trainer = DistillationTrainer(
        str(root / "policy"), str(root / "teacher"), args, Dataset.from_list([{"prompt": each} for each in prompts]),
        processing_class=AutoTokenizer.from_pretrained(root / "policy"),
    )  # fmt: skip
    trainer.train()
    theirs = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    ours = losses(root, tmp_path / "ours", beta=beta, num_steps=3)
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert ours[0] > 0.1


def test_the_loss_of_gpt2_is_that_of_prompts_without_padding(root: Path, tmp_path: Path) -> None:
    """The first step's loss, from plain forwards of one row each."""
    policy = write_model(tmp_path / "gpt2", "gpt2")
    found = losses(root, tmp_path / "output", policy=policy, num_steps=1, beta=0.0)
    student, teacher = (AutoModelForCausalLM.from_pretrained(each).eval() for each in (policy, root / "teacher"))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    total, count = 0.0, 0
    for index in row_order(40, 8, 0):
        prompt = tokenizer.apply_chat_template(
            tiny.prompt_rows(40)[index]["prompt"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            whole = student.generate(**prompt, max_new_tokens=6, do_sample=False, eos_token_id=tokenizer.eos_token_id)
            start = prompt["input_ids"].shape[1] - 1
            p, q = (each(whole).logits[0, start:-1].log_softmax(-1) for each in (teacher, student))
        total += float((p.exp() * (p - q)).sum())
        count += len(p)
    assert found == pytest.approx([total / count], abs=1e-5)


def test_a_teachers_logits_for_tokens_that_no_tokenizer_has_are_left_out(root: Path, tmp_path: Path) -> None:
    teacher, tokenizer = (each.from_pretrained(root / "teacher") for each in (AutoModelForCausalLM, AutoTokenizer))
    found = [losses(root, tmp_path / "equal", num_steps=1)]
    for size in (320, 296):
        teacher.resize_token_embeddings(size)
        other = tmp_path / str(size)
        other.mkdir()
        for each in (root / "policy", root / "prompts"):
            (other / each.name).symlink_to(each)
        teacher.save_pretrained(other / "teacher")
        tokenizer.save_pretrained(other / "teacher")
        if size == 296:
            with pytest.raises(ConfigError, match=r"the teacher, teacher, has logits for 296 tokens .* 300: as many"):
                losses(other, tmp_path / "refused")
        else:
            found.append(losses(other, tmp_path / "larger", num_steps=1))
    assert found[0] == pytest.approx(found[1], abs=1e-6)
