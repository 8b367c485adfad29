"""A written store whose models have all that a page shows: reports, scores, answers, a verdict, estimates, logs."""

import json
import math
from dataclasses import asdict
from pathlib import Path

from flows.planning.estimates import FILE, Features, Run
from lineage.fingerprint import short
from lineage.record.verdict import VERDICT_FILE, Judged, RuleResult, Verdict
from lineage.store import Entry, Manifest
from tasks.data.images import IMAGES, ImageFiles, marked, write_images
from tasks.evaluate.report import write_report
from tasks.evaluate.row_scores import RowScores, write_scores
from tests.written_store import WrittenStore

STEPS = 40
BESIDE = {"evaluation/f1": 0.5, "evaluation/f1/stderr": 0.1, "evaluation/base/f1": 0.25}
SAMPLE = "2026-11-27 15:00:00,000 INFO tasks.data sample (trained tokens in ⟦ ⟧): {}\n2026-11-27 15:00:01,000 INFO x\n"
ROWS = "2026-11-27 15:00:00,000 INFO tasks.data rows_of={} max_length=64 rows=90\n"
# As Ray repeats a worker's lines in the log of the stage.
RAYS = "\x1b[36m(W pid=1)\x1b[0m sample (trained tokens in ⟦ ⟧): {}\n\x1b[36m(W pid=1)\x1b[0m x\n"


def entry_of(store: WrittenStore, manifest: Manifest) -> Entry:
    return Entry(store.root / manifest.stage / short(manifest.fingerprint))


def reported(root: Path, text: str = "What is a list?", rate: float = 0.1, image: bytes | None = None) -> WrittenStore:
    """corpus -> base -> sft -> dpo, evaluated and judged.

    Args:
        text: of rows and answers.
        rate: learning rate of dpo.
        image: that the evaluated question shows before its text.
    """
    store = WrittenStore(root)
    rows = {"rows": 90.0, "train_rows": 80.0, "held_out_rows": 10.0}
    chats = store.stage(
        "chats", {"rows": store.source("chats", labels=["cc-by-4.0"])}, metrics=rows, produces="conversations"
    )
    corpus = store.stage("corpus", {"rows": store.source("corpus")}, metrics={"rows": 5000.0})
    base = store.stage("base", {"rows": corpus})  # its tokenizer was made of them
    final = {"loss": 0.5, "num_tokens": 1000.0 * STEPS, "tokens_per_second": 800.0, "train_seconds": 8.0}
    resources = {"num_workers": 1, "gpus_per_worker": 1, "price_per_gpu_hour": 3.6, "currency": "EUR"}
    sft = store.stage(
        "sft", {"policy": base, "rows": chats}, metrics={**final, **BESIDE, "train_seconds": 20.0},
        method="tasks.sft.SFT", recipe={"learning_rate": 0.001, "max_length": 64}, provenance={"resources": resources},
    )  # fmt: skip
    dpo = store.stage(
        "dpo", {"policy": sft, "pairs": chats}, metrics={**final, "reward": 1.0}, method="tasks.dpo.DPO",
        recipe={"learning_rate": rate, "beta": 0.1, "max_length": 64, "schedule": {"name": "cosine"}},
        provenance={"resources": resources, "git_dirty": True},
    )  # fmt: skip
    for manifest in (sft, dpo):
        entry = entry_of(store, manifest)
        entry.logs.mkdir(exist_ok=True)
        sample = f"user: {text}\n⟦A list.\nIt is mutable.⟧ end"
        own = [RAYS.format(sample), SAMPLE.format(sample), RAYS.format(sample)]
        own += [SAMPLE.format("⟦One.⟧⟦Two.⟧")] if manifest is dpo else []
        entry.log.write_text("".join([ROWS.format("chats"), *own, ROWS.format("others"), SAMPLE.format("⟦Theirs.⟧")]))
        lines = [
            {"step": step, "time": 100.0 + step, "metrics": curve(step, manifest is dpo)}
            for step in range(1, STEPS + 1)
        ]
        entry.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    scores = [{"step": step, "digest": "d", "scores": {"exact_match": step / STEPS}} for step in (0, 20, 40)]
    (entry.path / "evaluation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in scores))
    mark = ""
    if image is not None:
        stored = root / "stored"
        mark = ImageFiles(root=None, store=stored).mark(image, "image")
        write_images(marked([mark]), [stored], [], entry_of(store, chats).output / IMAGES)
    evaluate(store, {"base": base, "sft": sft, "dpo": dpo}, text, chats, mark)
    judge(store, dpo)
    features = Features(
        method="SFT", family="llama", hardware="h", rows="r", max_length=64, model_bytes=1, row_bytes=1, flops=1.0,
        passes=1, num_steps=STEPS,
    )  # fmt: skip
    run = Run(
        time=dpo.provenance.end, stage="dpo", features=features, memory=2**30, seconds=8.0, other_seconds=2.0,
        tokens=1000 * STEPS, predicted_memory=2**29, predicted_seconds=12.0,
    )  # fmt: skip
    (root / FILE).write_text(json.dumps(asdict(run)) + "\n")
    return store


def curve(step: int, has_rewards: bool) -> dict[str, float]:
    found = {"loss": 2 / step, "grad_norm": 1.0, "learning_rate": 0.1, "num_tokens": 1000.0 * step, "memory_gib": 1.0}
    found |= {"val/loss": 2.1 / step} if step % 5 == 0 else {}
    return found | ({"rewards/margins": math.log(step), "rewards/accuracies": 0.5} if has_rewards else {})


def evaluate(store: WrittenStore, policies: dict[str, Manifest], text: str, chats: Manifest, mark: str) -> Manifest:
    groups = [f"row-{index}" for index in range(20)]
    means = {"base": 0.1, "sft": 0.5, "dpo": 0.8}
    right = {name: [float(index < 20 * means[name]) for index in range(20)] for name in policies}
    logps = {name: [-3.0 + means[name] + 0.01 * index for index in range(20)] for name in policies}
    scores = [
        RowScores(metric="exact_match", row_ids=groups, groups=groups, weights=[1.0] * 20, scores=right),
        RowScores(metric="text_perplexity", row_ids=groups, groups=groups, weights=[2.0] * 20, scores=logps),
    ]
    metrics = {name: value for each in scores for name, value in each.metrics().items()}
    metrics |= {"dpo/lm_eval:arc": 0.4, "dpo/lm_eval:arc/stderr": 0.02}
    recipe = {"num_rows": 20, "max_new_tokens": 64}
    inputs = {**policies, "reference": policies["sft"], **({"conversations": chats} if mark else {})}
    made = store.stage("evaluate", inputs, metrics=metrics, recipe=recipe)
    asked = [[{"role": "user", "content": f"{mark}{text}"}]]
    answers = {name: [f"{name} says {text}"] for name in policies}
    output = entry_of(store, made).output
    write_report(output, metrics, asked, answers, questions=asked, references=["A type."], answered=answers)
    write_scores(output, scores, {name: each.fingerprint for name, each in policies.items()})
    return made


def judge(store: WrittenStore, candidate: Manifest) -> None:
    made = store.stage("gate", {"candidate": candidate}, produces="verdict")
    rule = RuleResult(
        rule="beats_sft", demand="exact_match over parent by 0", against="parent", outcome="better", candidate=0.8,
        baseline=0.5, estimate=0.3, low=0.1, high=0.5, num_rows=20,
    )  # fmt: skip
    judged = Judged(name="dpo", fingerprint=candidate.fingerprint, digest=candidate.output_digest)
    verdict = Verdict(
        result="pass", approval="none", confidence=0.95, candidate=judged, champion=None, rules=[rule]
    )  # fmt: skip
    (entry_of(store, made).output / VERDICT_FILE).write_text(verdict.to_json())
