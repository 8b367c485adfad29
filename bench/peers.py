"""The four trainings as one chain beside LLaMA-Factory and plain TRL: seconds, losses and memory.

    python bench/peers.py [--data DIR] [--llamafactory PYTHON] [--steps 60] [--precision fp32 bf16] [--only SIDE ...]

Each side trains on the same rows in the same order, in as many steps of 4 rows of at most 512 tokens, from the same
models: posttrain runs the chain as one command, which also checks the data and records every output; each peer runs one
command per training, from posttrain's prepared rows and the model that posttrain gave that training. Seconds, CPU
seconds and memory are those of whole processes. The losses of all sides must agree, or the benchmark fails.

DIR holds the demonstration sets of LLaMA-Factory: c4_demo.jsonl, alpaca_en_demo.json and dpo_en_demo.json. Without it
the rows are drawn from the quickstart's. PYTHON is that of an environment with llamafactory 0.9.5; the variable
POSTTRAIN_LLAMAFACTORY may name it too. Without one its side is skipped.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.measure import MB, Measured, measure

HERE = Path(__file__).parent
SIDES = ("posttrain", "llamafactory", "trl")
NAMES = {"posttrain": "posttrain", "llamafactory": "LLaMA-Factory", "trl": "plain TRL"}
DATA = {"cpt": "corpus", "sft": "instructions", "reward": "preferences", "dpo": "preferences"}
POLICY = {"cpt": "base", "sft": "cpt", "reward": "sft", "dpo": "sft"}
LEARNING_RATE = {"cpt": 5e-4, "sft": 5e-4, "reward": 1e-4, "dpo": 5e-5}
BATCH, MAX_LENGTH, BETA = 4, 512, 0.1
MIN_ANSWER = 8  # tokens: a row whose prompt leaves fewer is left out
NUM_ROWS = {"corpus": 400, "instructions": 1000, "preferences": 400}  # drawn
# Largest difference of the mean loss of all steps to that of posttrain, as a share of it. LLaMA-Factory divides the
# loss of the 511 targets of a chunk by its 512 tokens, and its reward model has a head of its own, with dropout.
TOLERANCE = {"cpt": 0.01, "sft": 0.01, "dpo": 0.02, "reward": 0.03}
TOLERANCE_OF_ANOTHER_HEAD = 0.15
# Says where messages begin and end, and nothing between them: LLaMA-Factory reads such a template from the tokenizer.
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
Row = Mapping[str, object]


def arguments() -> argparse.Namespace:
    """The command-line arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with the demonstration sets; else the rows are drawn")
    parser.add_argument("--llamafactory", default=os.environ.get("POSTTRAIN_LLAMAFACTORY"), help="its Python")
    parser.add_argument("--steps", type=int, default=60, help="of each training")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=("fp32", "bf16"))
    parser.add_argument("--only", nargs="+", choices=SIDES, default=SIDES, help="posttrain always runs")
    parser.add_argument("--keep", type=Path, help="leave models and outputs here")
    return parser.parse_args()


# Rows


def demonstration(folder: Path) -> dict[str, list[Row]]:
    """The rows of LLaMA-Factory's demonstration sets."""
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    corpus = [json.loads(line) for line in (folder / "c4_demo.jsonl").read_text().splitlines()]
    chats = json.loads((folder / "alpaca_en_demo.json").read_text())
    pairs = json.loads((folder / "dpo_en_demo.json").read_text())
    return {
        "corpus": [{"text": row["text"]} for row in corpus],
        "instructions": [
            {"messages": chat("\n".join(filter(None, (row["instruction"], row["input"]))), row["output"])}
            for row in chats
        ],
        "preferences": [
            {
                "prompt": [{"role": roles[each["from"]], "content": each["value"]} for each in row["conversations"]],
                "chosen": chat("", row["chosen"]["value"])[1:],
                "rejected": chat("", row["rejected"]["value"])[1:],
            }
            for row in pairs
        ],
    }


def drawn() -> dict[str, list[Row]]:
    """Rows as long as those of the demonstration sets, joined from the quickstart's."""
    from tasks.quickstart import quickstart_rows

    draw = random.Random(0)
    texts = [row["text"] for row in quickstart_rows("corpus")]
    chats = [row["messages"] for row in quickstart_rows("instructions")]
    pairs = list(quickstart_rows("preferences"))

    def join(rows: Sequence[object], most: int, of: Callable[[object], str]) -> str:
        return "\n".join(of(row) for row in draw.choices(rows, k=draw.randint(1, most)))

    found: dict[str, list[Row]] = {name: [] for name in NUM_ROWS}
    for _ in range(NUM_ROWS["corpus"]):
        found["corpus"].append({"text": join(texts, 20, str)})
    for _ in range(NUM_ROWS["instructions"]):
        question = f"{draw.choice(chats)[0]['content']} ({len(found['instructions'])})"
        found["instructions"].append({"messages": chat(question, join(chats, 40, lambda row: row[1]["content"]))})
    for _ in range(NUM_ROWS["preferences"]):
        chosen, rejected = (
            join(pairs, 60, lambda row, side=side: row[side]) for side in ("chosen", "rejected")
        )  # fmt: skip
        question = f"{draw.choice(pairs)['prompt']} ({len(found['preferences'])})"
        found["preferences"].append(
            {"prompt": chat(question, "")[:1], "chosen": chat("", chosen)[1:], "rejected": chat("", rejected)[1:]}
        )
    return found


def chat(prompt: str, answer: str) -> list[dict[str, str]]:
    """A conversation of one turn."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def write_base(folder: Path, corpus: Sequence[Row]) -> None:
    """A Llama of 7 million parameters with random weights, and its tokenizer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from lineage.artifact import Kind
    from tasks.base_model import BaseModel
    from tasks.context import TrainContext
    from tasks.recipe import Input

    rows = folder / "rows"
    rows.mkdir(parents=True)
    pq.write_table(pa.table({"text": [row["text"] for row in corpus]}), rows / "train.parquet")
    method = BaseModel(
        hidden_size=256, intermediate_size=768, num_layers=6, num_heads=4, tie_embeddings=False, max_positions=1024
    )
    method.run(
        {"rows": Input(name="rows", kind=Kind.TEXT, fingerprint="0" * 64, path=rows)},
        TrainContext(output_dir=folder, work_dir=folder),
    )
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    shutil.rmtree(rows)


def fitting(rows: Mapping[str, Sequence[Row]], base: Path) -> Iterator[tuple[str, list[Row]]]:
    """The rows with answers cut to ``MAX_LENGTH`` tokens, as each side would cut or drop them in its own way."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)

    def cut(prompt: list[dict[str, str]], answer: list[dict[str, str]]) -> list[dict[str, str]] | None:
        rendered = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        # One token ends the answer; its last ones may be encoded as two when read again.
        length = MAX_LENGTH - len(tokenizer(rendered)["input_ids"]) - 4
        ids = tokenizer(answer[0]["content"])["input_ids"][:length]
        # The edges of a message are whitespace that templates and readers strip.
        text = tokenizer.decode(ids).rstrip("\ufffd").strip()
        return [{"role": "assistant", "content": text}] if length >= MIN_ANSWER and text else None

    yield "corpus", list(rows["corpus"])
    chats = [(row["messages"][:1], cut(row["messages"][:1], row["messages"][1:])) for row in rows["instructions"]]
    yield "instructions", [{"messages": prompt + answer} for prompt, answer in chats if answer]
    pairs = [
        {"prompt": row["prompt"], **{side: cut(row["prompt"], row[side]) for side in ("chosen", "rejected")}}
        for row in rows["preferences"]
    ]
    yield "preferences", [row for row in pairs if row["chosen"] and row["rejected"]]


def write_lines(path: Path, rows: Sequence[Row]) -> None:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# Sides


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all sides share.

    Args:
        folder: of the models, rows and outputs.
        llamafactory: its Python; None: there is none.
    """

    folder: Path
    steps: int
    llamafactory: str | None

    def posttrain(self, precision: str) -> tuple[Measured, dict[str, dict]]:
        """Runs the chain; what it took, and its stages by name."""
        store = self.folder / f"posttrain-{precision}"
        store.mkdir()
        overrides = [f"model={self.folder}/base", "~stages.evaluate"]
        overrides += [f"sources.{name}.path={self.folder}/{name}.jsonl" for name in NUM_ROWS]
        for name, rate in LEARNING_RATE.items():
            fields = {
                "num_steps": self.steps, "global_batch_size": BATCH, "max_length": MAX_LENGTH, "learning_rate": rate,
                "warmup_ratio": 0.0, "precision": precision,
            }  # fmt: skip
            overrides += [f"stages.{name}.method.{field}={value}" for field, value in fields.items()]
            overrides.append(f"stages.{name}.resources.micro_batch_size={BATCH}")
        overrides.append(f"stages.dpo.method.beta={BETA}")
        command = [sys.executable, "-m", "flows", "run", "--json", *overrides]
        found = measure(command, store / "log", store, _environment(), every_seconds=0.5)
        return found, {row["stage"]: row for row in json.loads(found.output)["stages"]}

    def trl(self, name: str, stages: Mapping[str, dict], precision: str) -> tuple[Measured, list[float]]:
        """One training as a plain TRL script; what it took, and its loss at each step."""
        output = self.folder / f"trl-{precision}" / name
        output.mkdir(parents=True)
        command = [
            sys.executable, str(HERE / "plain_trl.py"), name, "--policy", self._policy(name, stages),
            "--rows", f"{stages[DATA[name]]['output']}/train.parquet", "--output", str(output),
            "--steps", str(self.steps), "--batch-size", str(BATCH), "--micro-batch-size", str(BATCH),
            "--max-length", str(MAX_LENGTH), "--learning-rate", str(LEARNING_RATE[name]), "--beta", str(BETA),
            "--warmup-ratio", "0", "--logging-steps", "1", *(["--bf16"] if precision == "bf16" else []),
        ]  # fmt: skip
        found = measure(command, output / "log", output, _environment(), every_seconds=0.5)
        return found, json.loads(found.output.splitlines()[-1])["losses"]

    def in_llamafactory(self, name: str, stages: Mapping[str, dict], precision: str) -> tuple[Measured, list[float]]:
        """One training by LLaMA-Factory; what it took, and its loss at each step."""
        folder = self.folder / f"llamafactory-{precision}" / name
        folder.mkdir(parents=True)
        rows = _read(Path(stages[DATA[name]]["output"]) / "train.parquet")
        policy = Path(self._policy(name, stages))
        if name == "cpt":  # it joins documents by the tokenizer's eos, which ends a turn; the others by <|endoftext|>
            policy = shutil.copytree(policy, folder / "policy")
            config = policy / "tokenizer_config.json"
            config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "<|endoftext|>"}))
        write_lines(folder / "rows.json", _for_llamafactory(name, rows))
        (folder / "dataset_info.json").write_text(json.dumps({"rows": _FORMATS[name]}))
        settings = {
            "model_name_or_path": str(policy), "stage": {"cpt": "pt", "sft": "sft", "reward": "rm", "dpo": "dpo"}[name],
            "do_train": True, "finetuning_type": "full", "dataset_dir": str(folder), "dataset": "rows",
            "cutoff_len": MAX_LENGTH, "output_dir": str(folder / "output"), "overwrite_cache": True,
            "per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1, "max_steps": self.steps,
            "learning_rate": LEARNING_RATE[name], "lr_scheduler_type": "cosine", "warmup_steps": 0, "seed": 0,
            "optim": "adamw_torch", "disable_gradient_checkpointing": True, "use_cpu": True,
            "bf16": precision == "bf16", "logging_steps": 1, "save_strategy": "no", "report_to": "none",
            "pref_beta": BETA, "preprocessing_num_workers": 1,
        }  # fmt: skip
        path = folder / "settings.yaml"
        path.write_text(json.dumps(settings))  # JSON is YAML
        assert self.llamafactory
        command = [str(Path(self.llamafactory).parent / "llamafactory-cli"), "train", str(path)]
        found = measure(command, folder / "log", folder, _environment(), every_seconds=0.5)
        log = json.loads((folder / "output" / "trainer_state.json").read_text())["log_history"]
        return found, [entry["loss"] for entry in log if "loss" in entry]

    def _policy(self, name: str, stages: Mapping[str, dict]) -> str:
        """The model that posttrain gave the training."""
        parent = POLICY[name]
        return str(self.folder / "base") if parent == "base" else stages[parent]["output"]


_TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
_FORMATS = {
    "cpt": {"file_name": "rows.json", "columns": {"prompt": "text"}},
    "sft": {
        "file_name": "rows.json", "formatting": "sharegpt", "columns": {"messages": "messages"},
        "tags": {**_TAGS, "system_tag": "system"},
    },
}  # fmt: skip
_FORMATS["reward"] = _FORMATS["dpo"] = {
    **_FORMATS["sft"], "ranking": True,
    "columns": {"messages": "prompt", "chosen": "chosen", "rejected": "rejected"},
}  # fmt: skip


def _for_llamafactory(name: str, rows: Sequence[dict]) -> list[Row]:
    """The rows in LLaMA-Factory's formats, without columns of posttrain's own."""

    def plain(messages: Sequence[dict]) -> list[dict[str, str]]:
        return [{"role": each["role"], "content": each["content"]} for each in messages]

    if name == "cpt":
        return [{"text": row["text"]} for row in rows]
    if name == "sft":
        return [{"messages": plain(row["messages"])} for row in rows]
    return [
        {"prompt": plain(row["prompt"]), "chosen": plain(row["chosen"])[0], "rejected": plain(row["rejected"])[0]}
        for row in rows
    ]


def _read(path: Path) -> list[dict]:
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()


def _environment() -> dict[str, str]:
    """As a user's shell has it, with no hub; each side takes all cores."""
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return {**own, "HF_HUB_OFFLINE": "1"}


# Comparison


def own_losses(stages: Mapping[str, dict], name: str) -> list[float]:
    """The loss of posttrain at each step."""
    lines = (Path(stages[name]["output"]).parent / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["metrics"]["loss"] for line in lines if "loss" in json.loads(line)["metrics"]]


def compare(bench: Bench, precision: str, only: Sequence[str]) -> bool:
    """Runs all sides in one precision and prints the figures; whether the losses agree."""
    found, stages = bench.posttrain(precision)
    trained = {name: own_losses(stages, name) for name in DATA}
    taken = {"posttrain": [found]}
    losses = {"posttrain": trained}
    for side in [each for each in SIDES[1:] if each in only]:
        if side == "llamafactory" and not bench.llamafactory:
            continue
        train = bench.in_llamafactory if side == "llamafactory" else bench.trl
        results = {name: train(name, stages, precision) for name in DATA}
        taken[side] = [each for each, _ in results.values()]
        losses[side] = {name: each for name, (_, each) in results.items()}
        print(f"{side} {precision}: {sum(each.seconds for each in taken[side]):.1f} s", file=sys.stderr)
    print(report(precision, stages, taken, losses))
    wrong = list(disagreements(losses))
    print("\n".join(wrong) or "The losses agree.")
    return not wrong


def report(
    precision: str, stages: Mapping[str, dict], taken: Mapping[str, list[Measured]], losses: Mapping[str, dict]
) -> str:
    """The figures as a Markdown table, a column for each side."""
    sides = [side for side in SIDES if side in taken]
    load = os.getloadavg()[0]
    lines = [
        "", f"{precision}, {len(losses['posttrain']['cpt'])} steps, {os.cpu_count()} CPUs, load at the end {load:.1f}",
        "", f"| | {' | '.join(NAMES[side] for side in sides)} |", f"|---|{'---|' * len(sides)}",
    ]  # fmt: skip
    for index, name in enumerate(DATA):
        seconds = [stages[name]["seconds"] if side == "posttrain" else taken[side][index].seconds for side in sides]
        means = [statistics.fmean(losses[side][name]) for side in sides]
        cells = (f"{each:.1f} s, loss {mean:.4f}" for each, mean in zip(seconds, means, strict=True))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    total = {side: sum(each.seconds for each in taken[side]) for side in sides}
    rows = {
        "chain, seconds": [f"{total[side]:.1f}" for side in sides],
        "posttrain's share": [f"{total['posttrain'] / total[side]:.2f}" for side in sides],
        "CPU seconds": [f"{sum(each.cpu for each in taken[side]):.1f}" for side in sides],
        "peak RSS of the tree": [f"{max(each.resident for each in taken[side]) / MB:,.0f} MB" for side in sides],
        "peak PSS of the tree": [f"{max(each.proportional for each in taken[side]) / MB:,.0f} MB" for side in sides],
    }
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines) + "\n"


def disagreements(losses: Mapping[str, Mapping[str, list[float]]]) -> Iterator[str]:
    """The trainings whose mean loss is not that of posttrain, within the tolerance."""
    for side, by_training in losses.items():
        for name, each in by_training.items():
            own = losses["posttrain"][name]
            is_other_head = name == "reward" and side == "llamafactory"
            tolerance = TOLERANCE_OF_ANOTHER_HEAD if is_other_head else TOLERANCE[name]
            expected, mean = statistics.fmean(own), statistics.fmean(each)
            if len(own) != len(each) or not abs(mean - expected) <= tolerance * expected:
                yield (
                    f"{side} {name}: mean loss {mean:.5f} of {len(each)} steps, posttrain {expected:.5f} of "
                    f"{len(own)}; accepted: {tolerance:.0%}; first losses {_first(each)} and {_first(own)}"
                )


def _first(losses: Sequence[float]) -> str:
    return ", ".join(f"{loss:.4f}" for loss in islice(losses, 3))


def main() -> None:
    """Writes base model and rows, runs all sides, and prints the comparison of each precision."""
    args = arguments()
    if "llamafactory" in args.only and not args.llamafactory:
        print("LLaMA-Factory is skipped: give its environment by --llamafactory PYTHON", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as scratch:
        folder = (args.keep or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        rows = demonstration(args.data) if args.data else drawn()
        write_base(folder / "base", rows["corpus"])
        for name, each in fitting(rows, folder / "base"):
            write_lines(folder / f"{name}.jsonl", each)
            print(f"{name}: {len(each)} of {len(rows[name])} rows", file=sys.stderr)
        bench = Bench(folder=folder, steps=args.steps, llamafactory=args.llamafactory)
        agree = [compare(bench, precision, args.only) for precision in args.precision]
    if not all(agree):
        sys.exit(1)


if __name__ == "__main__":
    main()
