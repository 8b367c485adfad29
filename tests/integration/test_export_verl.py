"""``posttrain export verl``: the rows, settings and rewards of a stage, as verl reads them."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from flows.verl.export import require_plain_tokenizer
from lineage.errors import ConfigError
from lineage.filesystem.digest import digest_files, digest_of
from tests import tiny
from tests.command import Command

PIPELINE = """\
# @package _global_
defaults: [{/source@sources.problems: rows}, {/stage@stages.problems.method: prompts}, _self_]
name: verling
sources:
  problems: {path: problems.jsonl}
stages:
  problems: {inputs: {rows: "source:problems"}, method: {held_out: 0.2}}
  grpo:
    inputs: {policy: base, prompts: problems}
    method:
      _target_: tasks.grpo.GRPO
      num_steps: 5
      global_batch_size: 8
      num_generations: 4
      learning_rate: 1.0e-5
      max_length: 64
      max_completion_length: 32
      mask_truncated: true
      rewards:
        exact: {column: answer, weight: 2.0}
        own: {function: "python:own.py:has_digits", allow_code: true}
"""
OWN = """\
def has_digits(prompts, completions, hint, **columns):
    return [float(any(c.isdigit() for c in text)) + hint[row] for row, text in enumerate(completions)]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.write_policy(tmp_path / "chat")
    rows = [{"prompt": f"{i} + 1 = ?", "answer": str(i + 1), "hint": i / 10} for i in range(20)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "conf" / "pipeline").mkdir(parents=True)
    (tmp_path / "conf" / "pipeline" / "verling.yaml").write_text(PIPELINE)
    return tmp_path


def overrides(folder: Path) -> tuple[str, ...]:
    return (
        "--config-dir",
        str(folder / "conf"),
        "pipeline=verling",
        "model=chat",
        "resources=foreground",
        "tracking=none",
    )


def test_a_stage_is_exported_with_rows_rewards_and_overrides_that_win(folder: Path) -> None:
    command = Command(folder)
    early = command("export", "verl", "grpo", *overrides(folder))
    assert early.returncode == 1
    assert "grpo reads problems, which is not finished" in early.stderr and "posttrain stage problems" in early.stderr
    assert command("stage", "problems", *overrides(folder)).returncode == 0
    done = command(
        "export", "verl", "grpo", *overrides(folder), "--ability", "math", "--json",
        "--set", "trainer.n_gpus_per_node=2", "--set", "+trainer.own=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    out = folder / "verl" / "grpo"
    assert found["rows"] == {"train": 16, "held_out": 4} and found["folder"] == str(out)

    rows = pq.read_table(out / "train.parquet").to_pylist()
    assert {*rows[0]} == {"data_source", "prompt", "ability", "reward_model", "extra_info"}
    assert {*rows[0]["reward_model"]} == {"style", "ground_truth"}
    for index, row in enumerate(rows):
        (asked,) = row["prompt"]
        number = int(asked["content"].split()[0])
        assert asked == {"role": "user", "content": f"{number} + 1 = ?"}
        assert row["reward_model"] == {"style": "rule", "ground_truth": str(number + 1)}
        assert (row["data_source"], row["ability"]) == ("verling/grpo", "math")
        assert (row["extra_info"]["split"], row["extra_info"]["index"]) == ("train", index)
    prepared = pq.read_table(next((folder / "artifacts" / "problems").glob("*/output/train.parquet")))
    assert [row["extra_info"]["row_id"] for row in rows] == prepared["row_id"].to_pylist()

    configured = shlex.split((out / "run.sh").read_text().split("exec ")[1].replace("\\\n", " "))
    assert configured[:3] == ["python3", "-m", "verl.trainer.main_ppo"]
    assert "actor_rollout_ref.rollout.n=4" in configured and "data.train_batch_size=2" in configured
    assert f"actor_rollout_ref.model.path='{folder / 'chat'}'" in configured
    gpus = [word for word in configured if "n_gpus_per_node" in word and word.startswith("trainer")]
    assert gpus == ["trainer.n_gpus_per_node=2"] and "+trainer.own=1" in configured  # ours is gone
    files = digest_files(folder / "chat")  # as a source names them: by their places
    places = {f"0/{name}": digest for name, digest in files.items()}
    assert json.loads((out / "weights.json").read_text()) == {"policy": digest_of(places)}
    notes = (out / "not_exported.txt").read_text()
    assert "mask_truncated=True: verl trains completions without an end too" in notes
    assert found["not_exported"] == notes.splitlines()


@pytest.mark.slow
def test_the_exported_rewards_are_those_of_the_stage(folder: Path) -> None:
    command = Command(folder)
    assert command("stage", "problems", *overrides(folder)).returncode == 0
    assert command("export", "verl", "grpo", *overrides(folder), "--out", str(folder / "out")).returncode == 0
    row = pq.read_table(folder / "out" / "train.parquet").to_pylist()[0]
    hint, right = json.loads(row["extra_info"]["posttrain"])["columns"]["hint"], row["reward_model"]["ground_truth"]
    script = (
        "import importlib.util, json, sys; spec = importlib.util.spec_from_file_location('rewards', sys.argv[1]); "
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module); "
        "row = json.loads(sys.argv[2]); print(json.dumps("
        "[module.compute_score('x', text, 'unused', row, extra=1) for text in sys.argv[3:]]))"
    )
    message = subprocess.run(
        [sys.executable, "-c", script, str(folder / "out" / "rewards.py"), json.dumps(row["extra_info"]), right, "no"],
        cwd=folder / "conf", env=command.environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert message.returncode == 0, message.stderr
    good, bad = json.loads(message.stdout.splitlines()[-1])
    assert good == {"score": pytest.approx(2 + 1 + hint), "rewards/exact": 1.0, "rewards/own": pytest.approx(1 + hint)}
    assert bad == {"score": pytest.approx(hint), "rewards/exact": 0.0, "rewards/own": pytest.approx(hint)}


def test_what_verl_cannot_read_is_refused(folder: Path) -> None:
    command = Command(folder)
    assert command("stage", "problems", *overrides(folder)).returncode == 0
    other = command("export", "verl", "problems", *overrides(folder))
    assert other.returncode == 2
    assert "problems: PreparePrompts is not exported to verl; a stage of GRPO, RLOO or PPO is accepted" in other.stderr
    near = command("export", "verl", "grop", *overrides(folder))
    assert near.returncode == 2 and "did you mean grpo?" in near.stderr
    empty = command("export", "verl", "grpo", *overrides(folder), "--set", "trainer.nnodes")
    assert empty.returncode == 2 and "--set trainer.nnodes: KEY=VALUE is accepted" in empty.stderr
    out = folder / "verl" / "grpo"
    template = command("export", "verl", "grpo", *overrides(folder), "sources.base.chat_template=hermes")
    assert template.returncode == 2 and "whose source sets chat_template: verl reads the files in" in template.stderr
    assert not out.exists()  # a refused export writes nothing
    tokens = command("export", "verl", "grpo", *overrides(folder), "sources.base.added_tokens=['<think>']")
    assert tokens.returncode == 0, tokens.stderr
    policy = re.search(r"actor_rollout_ref.model.path=['\"]*([^'\"\s]+)", (out / "run.sh").read_text())
    assert policy and json.loads((Path(policy[1]) / "config.json").read_text())["vocab_size"] == 301
    (folder / "chat" / "model.safetensors").rename(folder / "chat" / "adapter_model.safetensors")
    alone = command("export", "verl", "grpo", *overrides(folder))
    assert alone.returncode == 2 and "an adapter without its base, which verl cannot load" in alone.stderr


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: pip install verl==0.9.1 vllm")
def test_verl_trains_the_exported_stage(folder: Path) -> None:
    command = Command(folder)
    assert command("stage", "problems", *overrides(folder)).returncode == 0
    assert command("export", "verl", "grpo", *overrides(folder), "--out", str(folder / "out")).returncode == 0
    run = [str(folder / "out" / "run.sh"), "trainer.total_training_steps=1", "trainer.n_gpus_per_node=1"]
    done = subprocess.run(run, cwd=folder, env=command.environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_model_whose_tokens_verl_reads_otherwise_is_refused(tmp_path: Path) -> None:
    tiny.write_tokenizer(tmp_path)
    require_plain_tokenizer("grpo", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    configured = json.loads((tmp_path / "tokenizer.json").read_text())
    configured["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": True,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(configured))
    with pytest.raises(ConfigError, match=r"by AutoTokenizer, which takes Qwen2Tokenizer .* other tokens"):
        require_plain_tokenizer("grpo", tmp_path)
