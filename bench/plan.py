"""How long `posttrain plan` takes for a pipeline of many stages: python -m bench.plan [--stages 1000]."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_HEAD = ["# @package _global_", "defaults:", "  - cpt-sft-dpo", "  - _self_", "name: many", "stages:"]
_SHIPPED = 9  # stages of cpt-sft-dpo


def pipeline(num_stages: int, *, is_chain: bool) -> str:
    """YAML of the shipped pipeline with further groups of SFT, DPO and an evaluation behind it.

    Args:
        is_chain: each group starts from the group before it; else all start from the same model.
    """
    lines, before = list(_HEAD), "cpt"
    common = "global_batch_size: 8, max_length: 256"
    for index in range(num_stages - _SHIPPED):
        group, part = divmod(index, 3)
        sft, dpo = f"sft{group}", f"dpo{group}"
        lines.append(
            [
                f"  {sft}: {{method: {{_target_: tasks.sft.SFT, num_steps: {group + 10}, {common}}}, "
                f"inputs: {{policy: {before}, rows: instructions}}}}",
                f"  {dpo}: {{method: {{_target_: tasks.dpo.DPO, num_steps: 10, {common}}}, "
                f"inputs: {{policy: {sft}, pairs: preferences}}}}",
                f"  evaluate{group}: {{method: {{_target_: tasks.evaluate.Evaluate, max_length: 256}}, "
                f"inputs: {{conversations: instructions, reference: {sft}, dpo: {dpo}}}}}",
            ][part]
        )
        before = dpo if is_chain and part == 1 else before
    return "\n".join([*lines, ""])


def main() -> None:
    """Prints a line per shape of the graph."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    for shape in ("wide", "chain"):
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder, "conf", "pipeline")
            own.mkdir(parents=True)
            (own / "many.yaml").write_text(pipeline(options.stages, is_chain=shape == "chain"))
            command = [sys.executable, "-m", "flows", "plan", "--config-dir", "conf", "pipeline=many", "tracking=none"]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
            seconds, cpu = [], []
            for _ in range(options.repeat):
                start, before = time.perf_counter(), os.times()
                done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
                after = os.times()
                cpu.append(after.children_user + after.children_system - before.children_user - before.children_system)
                seconds.append(time.perf_counter() - start)
            assert f"{options.stages} of {options.stages} stages to run" in done.stdout, done.stdout[-200:]
        print(
            f"{shape}: {options.stages} stages planned in {min(seconds):.2f} s ({min(cpu):.2f} s of CPU), "
            f"the fastest of {options.repeat} calls"
        )


if __name__ == "__main__":
    main()
