"""Trainings of a random Llama of 1.1 billion weights on one GPU: tokens per second, MFU, memory beside the estimate.

    python bench/gpu.py [--steps 12] [--cases sft,sft-padded] [--layers 22]

One process per training, which saves nothing; the last half of the steps counts. Rows have log-normal lengths, of 600
tokens in the middle and at most 2,048, and ``cpt`` cuts them into chunks of 2,048. ``sft-padded`` is ``sft`` with TRL's
own forward, on padded rows.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).parent.parent))

MAX_LENGTH, MEDIAN, SPREAD = 2048, 600, 0.7
LORA = {"adapter": {"rank": 16}}
CASES: dict[str, tuple[str, dict[str, object], dict[str, object]]] = {  # method, its fields, resources
    "cpt": ("cpt", {}, {}),
    "cpt-checkpointed": ("cpt", {}, {"gradient_checkpointing": "on"}),
    "cpt-deterministic": ("cpt", {}, {"deterministic": True}),
    "cpt-liger": ("cpt", {}, {"liger": True}),
    "cpt-compiled": ("cpt", {}, {"compile": True}),
    "cpt-8bit": ("cpt", {"optimizer": {"name": "adamw_8bit"}}, {}),
    "cpt-fp8": ("cpt", {"precision": "fp8"}, {}),
    "sft": ("sft", {}, {}),
    "sft-padded": ("sft", {}, {}),
    "sft-packed": ("sft", {"packing": "best_fit"}, {"micro_batch_size": 2}),
    "sft-lora": ("sft", LORA, {}),
    "sft-qlora": ("sft", {"adapter": {"rank": 16, "quantization": "nf4"}}, {}),
    "dpo": ("dpo", {}, {"micro_batch_size": 4}),
    "grpo": ("grpo", {"max_completion_length": 64}, {}),
}


def arguments() -> argparse.Namespace:
    """The command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)  # of the process that measures, and the folder
    return parser.parse_args()


def write_inputs(folder: Path, layers: int) -> None:
    """A Llama with the sizes of TinyLlama (arXiv:2401.02385), and rows."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from tests import tiny

    tiny.write_tokenizer(folder / "policy")
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    config = LlamaConfig(
        vocab_size=32000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=4, max_position_embeddings=MAX_LENGTH, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    with torch.device("cuda"):
        LlamaForCausalLM(config).bfloat16().save_pretrained(folder / "policy")
    draw = random.Random(0)
    lengths = [min(int(MEDIAN * draw.lognormvariate(0, SPREAD)), MAX_LENGTH // 2 - 64) for _ in range(256)]
    said = [[{"role": "user", "content": tiny.sentence(i, 20)}] for i in range(256)]
    answers = [[{"role": "assistant", "content": tiny.sentence(i + 1, length)}] for i, length in enumerate(lengths)]
    others = [[{"role": "assistant", "content": tiny.sentence(i + 2, length)}] for i, length in enumerate(lengths)]
    rows = {
        "text": [{"row_id": f"t{i}", "text": tiny.sentence(i, 4096)} for i in range(256)],
        "conversations": [{"row_id": f"c{i}", "messages": said[i] + answers[i]} for i in range(256)],
        "preferences": [
            {"row_id": f"p{i}", "prompt": said[i], "chosen": answers[i], "rejected": others[i], "kind": "other"}
            for i in range(256)
        ],
        "prompts": [{"row_id": f"q{i}", "prompt": said[i], "columns": None} for i in range(256)],
    }
    for name, found in rows.items():
        tiny.write_rows(folder / name, found)


def measure(case: str, folder: Path, steps: int) -> dict[str, float]:
    """One training in this process."""
    from dataclasses import fields

    import torch
    from transformers import AutoConfig

    from tasks.context import Metrics, Resources, TrainContext
    from tasks.estimate import architecture, memory
    from tasks.method import Adapter, Optimizer
    from tasks.train import padding_free
    from tasks.train.run import TrainingRun
    from tests import training

    name, changed, on = CASES[case]
    if case == "sft-padded":
        padding_free.PADDING_FREE = frozenset()
    types = {"adapter": Adapter, "optimizer": Optimizer}
    changed = {field: types[field](**value) if field in types else value for field, value in changed.items()}
    known = {each.name for each in fields(training.METHODS[name])}
    size = {"global_batch_size": 16, "max_length": MAX_LENGTH, "num_steps": steps, "learning_rate": 1e-5}
    method = training.METHODS[name](**{
        **training.OWN.get(name, {}), **size, "precision": "bf16",
        **{field: value for field, value in changed.items() if field in known},
    })  # fmt: skip
    resources = Resources(**{"micro_batch_size": 8, "cpus_per_worker": 8, "gpus_per_worker": 1, **on})
    reports: list[Metrics] = []
    context = TrainContext(
        output_dir=folder / case / "output", work_dir=folder / case / "work", resources=resources,
        report=lambda step, metrics: reports.append(metrics),
    )  # fmt: skip
    run = TrainingRun(method, training.inputs(folder, method), context)
    run.fit(method.trainer(run))
    found = architecture(AutoConfig.from_pretrained(folder / "policy").to_dict())
    assert found is not None
    last = reports[len(reports) // 2 :]
    return {
        "tokens_per_second": mean(each["tokens_per_second"] for each in last),
        "mfu": mean(each.get("mfu", 0.0) for each in last),
        "memory_gib": reports[-1]["memory_gib"],
        "estimate_gib": memory(method, resources, found, found.shapes(), MAX_LENGTH).total / 2**30,
        "reserved_gib": torch.cuda.max_memory_reserved() / 2**30,
        "peak_tflops": run.speed.peak / 1e12,
        "loss": reports[-1]["loss"],
    }


def main() -> None:
    """Prints a line per training."""
    options = arguments()
    if options.case:
        case, folder = options.case
        print(json.dumps(measure(case, Path(folder), options.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), options.layers)
        names = ("tokens_per_second", "mfu", "memory_gib", "estimate_gib", "reserved_gib", "peak_tflops", "loss")
        print(f"| case | {' | '.join(names)} |\n{'|---' * (len(names) + 1)}|", flush=True)
        for case in options.cases.split(","):
            command = [sys.executable, __file__, "--steps", str(options.steps), "--case", case, folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"| {case} | failed: {done.stderr.strip().splitlines()[-1][:300]} |", flush=True)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            print(f"| {case} | {' | '.join(f'{found[name]:,.3g}' for name in names)} |", flush=True)


if __name__ == "__main__":
    main()
