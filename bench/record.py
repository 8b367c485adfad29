"""The record at scale: 100,000 manifests; the index built from scratch, then lineage, impact and diff as commands.

    make bench    # or: python bench/record.py [--manifests 100000] [--keep DIRECTORY]

Each command is timed as a whole process, the interpreter's start included: the median of five, after one that is not
counted.
"""

import argparse
import hashlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent.parent
sys.path.insert(0, str(HERE))

from lineage.graph.index import Index  # noqa: E402
from lineage.store import InputRecord, Manifest, Provenance, SourceRecord  # noqa: E402

PIPELINES = 5
# Stage -> kind of the output, what fills its slots, and how many are made of it per one of the first.
STAGES = {
    "corpus": ("text", {"rows": "source:corpus"}, 1),
    "instructions": ("conversations", {"rows": "source:instructions"}, 1),
    "preferences": ("preferences", {"rows": "source:preferences"}, 1),
    "base": ("checkpoint", {"rows": "corpus"}, 1),
    "cpt": ("checkpoint", {"policy": "base", "rows": "corpus"}, 3),
    "sft": ("checkpoint", {"policy": "cpt", "rows": "instructions"}, 10),
    "reward": ("reward_model", {"policy": "sft", "pairs": "preferences"}, 24),
    "dpo": ("checkpoint", {"policy": "sft", "pairs": "preferences"}, 30),
    "evaluate": (
        "report",
        {
            "text": "corpus",
            "pairs": "preferences",
            "reward_model": "reward",
            "base": "base",
            "sft": "sft",
            "dpo": "dpo",
        },
        30,
    ),
}
REPEATS = 5


def main() -> None:
    """Makes the store, times everything, prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--manifests", type=int, default=100_000)
    parser.add_argument("--keep", type=Path, help="make the store here, or use the one that is here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as scratch:
        store = options.keep or Path(scratch)
        if not any(store.glob("*/*/manifest.json")):
            print(f"writing {options.manifests:,} manifests to {store}", file=sys.stderr)
            write_store(store, options.manifests)
        report(store)


def write_store(root: Path, count: int) -> None:
    """Pipelines that share sources; parents are drawn among the latest, and some models are trained on from."""
    draw = random.Random(0)
    made: dict[tuple[str, str], list[tuple[str, str]]] = {}
    names = [name for name, (_, _, weight) in STAGES.items() for _ in range(weight)]
    written = 0
    while written < count:
        pipeline = f"pipeline-{draw.randrange(PIPELINES)}"
        name = draw.choice(names)
        kind, slots, _ = STAGES[name]
        inputs = {slot: parent(draw, made, pipeline, given) for slot, given in slots.items()}
        if None in inputs.values():
            continue
        if name == "sft" and draw.random() < 0.5 and made.get((pipeline, "dpo")):
            inputs["policy"] = parent(draw, made, pipeline, "dpo")  # the next round starts from the last one's model
        manifest = record(draw, written, pipeline, name, kind, inputs)
        directory = root / name / manifest.fingerprint[:16]
        directory.mkdir(parents=True)
        (directory / "manifest.json").write_text(manifest.to_json())
        made.setdefault((pipeline, name), []).append((manifest.fingerprint, manifest.output_digest))
        written += 1


def parent(draw, made, pipeline, name):
    """A source of the few there are, or one of the latest artifacts of a stage; None: there is none yet."""
    if name.startswith("source:"):
        version = hashlib.sha256(f"{name}{draw.randrange(4)}".encode()).hexdigest()
        path = f"/data/{name.removeprefix('source:')}.jsonl"
        labels = ["cc-by-nc-4.0"] if name == "source:preferences" else []
        source = SourceRecord(
            path=path, kind="rows", revision=None, split="train", labels=labels, files={path: version}, dvc=None
        )
        return InputRecord(artifact=name, fingerprint=version, digest=version, source=source)
    candidates = made.get((pipeline, name), [])[-20:]
    if not candidates:
        return None
    fingerprint, digest = draw.choice(candidates)
    return InputRecord(artifact=name, fingerprint=fingerprint, digest=digest)


def record(draw, number, pipeline, name, kind, inputs) -> Manifest:
    """A manifest as large as those of the shipped pipeline."""
    fingerprint = hashlib.sha256(f"{number}".encode()).hexdigest()
    digest = hashlib.sha256(f"output {number}".encode()).hexdigest()
    end = 1_700_000_000.0 + number * 60
    files = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    return Manifest(
        pipeline=pipeline,
        stage=name,
        method=f"tasks.{name}.{name.capitalize()}",
        recipe={
            "method": name.capitalize(), "version": 1, "learning_rate": draw.choice([1e-5, 2e-5, 5e-5]),
            "num_steps": 400, "global_batch_size": 32, "max_length": 512, "seed": draw.randrange(5), "beta": 0.1,
            "warmup_ratio": 0.05, "lr_schedule": "cosine", "weight_decay": 0.0, "precision": "fp32",
        },
        fingerprint=fingerprint,
        inputs=inputs,
        files={file: digest for file in files},
        output_digest=digest,
        metrics={f"metric_{place}": draw.random() for place in range(12)} | {"rows": 5000.0, "train_seconds": 30.0},
        provenance=Provenance(
            start=end - draw.uniform(5, 600), end=end, hosts=["node-1"], python="3.11.7",
            libraries={each: "1.2.3" for each in ("torch", "trl", "peft", "datasets", "ray", "prefect")},
            git_commit="c" * 40, git_dirty=False, code_digest="d" * 64, seed=0,
            resources={"num_workers": 1, "num_nodes": 1, "micro_batch_size": 8, "launcher": "auto"},
        ),
        produces=kind,
    )  # fmt: skip


def report(store: Path) -> None:
    """Times the index and the commands, and prints a table."""
    for file in store.glob("index.sqlite*"):
        file.unlink()
    start = time.perf_counter()
    with Index(store) as index:
        build = time.perf_counter() - start
        model = index.newest("pipeline-0", "evaluate")
        other = index.newest("pipeline-1", "evaluate")
        source = max(index.sources("corpus"), key=lambda node: len(index.descendants([node])))
        count = sum(1 for _ in store.glob("*/*/manifest.json"))
        fan = {node: len(index.descendants([node])) for node in (source, model.id)}
    size = (store / "index.sqlite").stat().st_size / 2**20
    print(f"{count:,} manifests; the index takes {size:.0f} MiB\n")
    print(f"{'index from scratch':<44}{build:8.2f} s")
    base = model.id
    for title, words in {
        "lineage of an evaluation": ["lineage", base],
        "lineage --json": ["lineage", base, "--json"],
        f"impact of a source ({fan[source]:,} artifacts)": ["impact", source],
        "impact --json of the same": ["impact", source, "--json"],
        "impact label:cc-by-nc-4.0": ["impact", "label:cc-by-nc-4.0"],
        "diff of two evaluations": ["diff", base, other.id],
    }.items():
        print(f"{title:<44}{timed(store, words):8.2f} s")


def timed(store: Path, words: list[str]) -> float:
    """Median seconds of a command as a process of its own."""
    command = [sys.executable, "-m", "flows", *words, f"store={store}"]
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    seconds = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
