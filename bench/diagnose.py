"""How often `posttrain diagnose` names a known fault, and how often its patch mends it.

    python bench/diagnose.py [--seed 0] [--only NAME ...] [--keep FOLDER] [--out result.json]

Each method has a sane recipe, which is trained with three seeds, and then with one fault each: on made-up rows
(bench/fault_rows.py), by a model of two layers. Of each training the first finding counts, as the command prints it:

- right: it is one of the rules that bench/faults.py names for the fault, written down before anything was trained;
- wrong: it is another rule; a finding on a sane training, too, is wrong;
- missed: there is none.

Then the patch that `posttrain diagnose --out` writes is applied, and the result is diagnosed and patched again, at most
ROUNDS times. A patch restores a training whose metric on held-out rows, which are sane for all, is within noise of the
sane trainings: no worse than their mean by three of their standard deviations. Of a reward model that is the loss on
the held-out rows of its own stage.

With --keep, what has not changed is reused: after an edit of a rule only what its patch changes is trained. Develop
rules on seed 0, and report another seed.
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.fault_rows import write_rows
from bench.faults import FAULTS, METHODS, RIGHT, Fault, Method, Settings

Stage = dict[str, dict[str, object]]
CONTROLS = 3  # seeds of each sane recipe
ROUNDS = 4


def training(method: Method, seed: int, change: Settings, data: str) -> Stage:
    """A stage of the pipeline."""
    settings = {**method.settings, **change, "_target_": f"tasks.{method.target}", "seed": seed}
    batch = int(str(settings["global_batch_size"]))
    return {
        "inputs": {"policy": method.policy, method.slot: data},
        "method": {name: value for name, value in settings.items() if value is not None},
        "resources": {"micro_batch_size": min(batch, 64)},
    }


DATA = {"text": "Text", "chat": "Conversations", "pair": "Preferences", "single": "Unpaired", "prompt": "Prompts"}


def pipeline(folder: Path, name: str, stage: Stage, method: Method, seed: int) -> dict[str, object]:
    """One training as a pipeline, from the rows to the evaluation on rows that are held out and sane."""
    small = {"vocab_size": 700, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 2}
    parents: dict[str, Stage] = {
        "base": {"inputs": {"rows": "text"}, "method": {"_target_": "tasks.base_model.BaseModel", **small}},
        "language": training(METHODS["cpt"], 100 + seed, {"validation": None}, "text"),
        "chatty": training(METHODS["sft"], 100 + seed, {"validation": None, "num_steps": 160}, "chat"),
        "half": training(METHODS["sft"], 100 + seed, {"validation": None, "num_steps": 50}, "chat"),
    }
    used = ["base"] if method.policy == "base" else ["base", "language", method.policy]
    stages = {**{each: parents[each] for each in used}, name: stage}
    read = [*method.measured.values(), *(str(value) for each in stages.values() for value in each["inputs"].values())]
    data = {each: DATA[each.partition("-")[0]] for each in read if each.partition("-")[0] in DATA}
    stages |= {
        each: {
            "inputs": {"rows": f"source:{each}"},
            "method": {"_target_": f"tasks.prepare_data.Prepare{kind}", "held_out": 0.1},
        }
        for each, kind in data.items()
    }
    if method.measured:
        rewards = {"rewards": {"right": RIGHT}} if "prompts" in method.measured else {}
        stages["evaluate"] = {
            "inputs": {**method.measured, "reference": method.policy, name: name},
            "method": {
                "_target_": "tasks.evaluate.Evaluate", "num_rows": 150, "num_prompts": 100, "num_questions": 1,
                "max_new_tokens": 12, "max_length": 128, **rewards,
            },
            "resources": {"micro_batch_size": 64},
        }  # fmt: skip
    sources = {each: {"path": str(folder / f"{each}.jsonl")} for each in data}
    return {"name": name, "sources": sources, "stages": stages}


@dataclass(frozen=True)
class Bench:
    """A folder of rows, pipelines and a store; runs what `posttrain run` does, in this process and without Prefect."""

    folder: Path
    seed: int
    patches: bool

    def declare(self, name: str, method: Method, number: int, change: Settings, rows: str) -> list[str]:
        """Writes the pipeline of a training; the overrides that name it."""
        for group in ("model", "pipeline"):
            (self.folder / "conf" / group).mkdir(parents=True, exist_ok=True)
        (self.folder / "conf" / "model" / "none.yaml").write_text("# @package _global_\n{}\n")
        if not self.patches:
            method = replace(method, metrics=())
        stage = training(method, number, change, f"{method.kind}-{rows}" if rows else method.kind)
        text = yaml.safe_dump(pipeline(self.folder, name, stage, method, self.seed), sort_keys=False)
        (self.folder / "conf" / "pipeline" / f"{name}.yaml").write_text(f"# @package _global_\n{text}")
        return [
            f"pipeline={name}", "model=none", "tracking=none", "advice=off", f"store={self.folder / 'store'}",
            "resources=foreground", "resources.cpus_per_worker=1",
        ]  # fmt: skip

    def run(self, name: str, words: Sequence[str]) -> tuple[str, dict[str, float] | None]:
        """The training's node in the store, and its metrics; None where it failed."""
        from flows.declare.config import load_pipeline
        from flows.planning.plan import make_plan
        from flows.run import open_run
        from flows.stages.execute import execute
        from lineage.errors import PipelineError

        conf = self.folder / "conf"
        plan = make_plan(load_pipeline(words, conf))
        node = f"{name}@{plan.stage(name).fingerprint[:16]}"
        cli_args = ["--config-dir", str(conf), *words]
        try:
            for planned in plan.stale:
                with open_run(plan, cli_args, lambda event: None, [planned], in_flow=False) as run:
                    execute(run, planned)
        except PipelineError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return node, None
        made = [plan.entry(stage).require_intact() for stage in plan.stages]
        found = {key.removeprefix(f"{name}/"): value for each in made for key, value in each.metrics.items()}
        metrics = METHODS[name.partition("-")[0]].metrics if self.patches else ()
        return node, {each: found[each] for each in metrics}

    def diagnose(self, node: str) -> tuple[list[str], list[str]]:
        """The rules that fire, the first first; and the overrides of the patch."""
        from flows.reports.diagnosis import patch_of, read_diagnosis

        found = read_diagnosis(node, self.folder / "store")
        words = yaml.safe_load(patch_of(found, None))["overrides"] if any(e.change for e in found.findings) else []
        return [each.rule for each in found.findings], words


def verdict(right: Sequence[str], found: Sequence[str]) -> str:
    """What a diagnosis is worth; of a sane training no rule is right."""
    if not found:
        return "missed" if right else "sane"
    return "right" if found[0] in right else "wrong"


def cost(metric: str, value: float) -> float:
    """Less is better: accuracies and rewards turned round, the logarithm of a perplexity."""
    return math.log(value) if metric.endswith("perplexity") else value if metric.endswith("loss") else -value


def within_noise(sane: Sequence[Mapping[str, float]], found: Mapping[str, float]) -> bool:
    """Whether every metric is no worse than the mean of the sane trainings by three of their standard deviations."""
    for metric, value in found.items():
        costs = [cost(metric, each[metric]) for each in sane]
        if not cost(metric, value) <= statistics.mean(costs) + 3 * statistics.stdev(costs):
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one fault.

    Args:
        before: metrics on held-out rows with the fault; None: it failed.
        after: the same with each patch in turn, until one restores it or there is no further one.
        hurts, restored: whether the metrics are out of noise with the fault, and within it with the last patch.
        better: whether all metrics are better with the first patch than before.
    """

    name: str
    verdict: str
    rules: Sequence[str]
    before: Mapping[str, float] | None
    hurts: bool = False
    is_patched: bool = False
    after: Sequence[Mapping[str, float] | None] = ()
    better: bool = False
    restored: bool = False


def judge(bench: Bench, faults: Sequence[Fault]) -> Iterator[Outcome]:
    """Trains, diagnoses, patches and trains again; of each method first what is sane."""
    for name, method in METHODS.items():
        mine = [fault for fault in faults if fault.method == name]
        sane: list[Mapping[str, float]] = []
        for number in range(CONTROLS if mine else 0):
            title = f"{name}-sane-{number}"
            node, found = bench.run(title, bench.declare(title, method, 10 * bench.seed + number, {}, ""))
            assert found is not None, f"{title} is sane, and failed"
            sane.append(found)
            rules, _ = bench.diagnose(node)
            yield Outcome(name=title, verdict=verdict((), rules), rules=rules, before=found)
        yield from (of_fault(bench, fault, sane) for fault in mine)


def of_fault(bench: Bench, fault: Fault, sane: Sequence[Mapping[str, float]]) -> Outcome:
    """Trains with a fault, and again with the patch of its diagnosis, at most ``ROUNDS`` times."""
    words = bench.declare(fault.name, METHODS[fault.method], 10 * bench.seed, fault.change, fault.rows)
    node, before = bench.run(fault.name, words)
    rules, patch = bench.diagnose(node)
    hurts = before is None or not within_noise(sane, before)
    is_patched, restored = bool(patch), False
    after: list[Mapping[str, float] | None] = []
    while bench.patches and patch and not restored and len(after) < (ROUNDS if hurts else 1):
        node, found = bench.run(fault.name, patch)
        after.append(found)
        restored = found is not None and within_noise(sane, found)
        _, patch = bench.diagnose(node)
    return Outcome(
        name=fault.name, verdict=verdict(fault.right, rules), rules=rules, before=before, hurts=hurts,
        is_patched=is_patched, after=after, better=bool(after) and is_better(before, after[0]), restored=restored,
    )  # fmt: skip


def is_better(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> bool:
    """Whether all metrics are better; to have some is better than to have failed."""
    if before is None or after is None:
        return before is None and after is not None
    return all(cost(metric, after[metric]) < cost(metric, value) for metric, value in before.items())


def totals(found: Sequence[Outcome]) -> dict[str, int]:
    """Counts of verdicts and of patches."""
    faults = [each for each in found if "-sane-" not in each.name]
    sane = [each for each in found if "-sane-" in each.name]
    hurt = [each for each in faults if each.is_patched and each.hurts]
    return {
        "faults": len(faults),
        **{name: sum(each.verdict == name for each in faults) for name in ("right", "wrong", "missed")},
        "sane": len(sane), "wrong on sane": sum(each.verdict == "wrong" for each in sane),
        "harmful and patched": len(hurt), "better with the first patch": sum(each.better for each in hurt),
        "restored by it": sum(each.restored and len(each.after) == 1 for each in hurt),
        f"restored by at most {ROUNDS}": sum(each.restored for each in hurt),
    }  # fmt: skip


def shown(metrics: Mapping[str, float] | None) -> str:
    """Metrics in a column of the table."""
    return "-" if metrics is None else " ".join(f"{value:.3g}" for value in metrics.values())


def main() -> None:
    """Prints a line per training, and the totals."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="faults")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="leave rows and store here, and reuse what is there"
    )
    parser.add_argument("--no-patches", action="store_true", help="diagnose alone: no evaluation, no second training")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the same as JSON")
    args = parser.parse_args()
    faults = [each for each in FAULTS if not args.only or each.name in args.only]
    folder = (args.keep or Path(tempfile.mkdtemp(prefix="posttrain-bench-"))).resolve() / f"seed-{args.seed}"
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder, args.seed, [(METHODS[each.method].kind, each.rows) for each in faults if each.rows])
    found = []
    for each in judge(Bench(folder, args.seed, not args.no_patches), faults):
        found.append(each)
        mended = "" if not each.is_patched else "restored" if each.restored else "not restored"
        metrics = " -> ".join(map(shown, (each.before, *each.after)))
        print(
            f"{each.name:18} {each.verdict:7} {', '.join(each.rules) or '-':40} {metrics} "
            f"{'harmful' if each.hurts else ''} {mended}",
            flush=True,
        )
    print(", ".join(f"{name} {count}" for name, count in totals(found).items()))
    if args.out:
        args.out.write_text(
            json.dumps({"totals": totals(found), "outcomes": [asdict(each) for each in found]}, indent=1)
        )


if __name__ == "__main__":
    main()
