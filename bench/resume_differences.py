"""How far apart two trainings end, by what makes them differ: what the tolerances of `posttrain certify` tell apart.

    python bench/resume_differences.py [--steps 6]

A Llama of two layers, sft and dpo, each at three learning rates. `moved` is the norm of what the training added to the
weights that it was given, by their norm; the rest are norms of the difference of the final weights, by that of what the
training added.
"""

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # the table is for a reader
warnings.simplefilter("ignore", FutureWarning)

import torch  # noqa: E402

from lineage.errors import StoppedError  # noqa: E402
from tasks.context import Resources, TrainContext  # noqa: E402
from tasks.method import Training  # noqa: E402
from tasks.model.weight_differences import length, movement, weight_difference  # noqa: E402
from tests import training  # noqa: E402

RATES = (1e-6, 1e-4, 1e-3)
SAVING = Resources(micro_batch_size=4, cpus_per_worker=1, save_minutes=None)


def trained(stage: Training, root: Path, folder: Path, resources: Resources = SAVING, **more: object) -> Path:
    """The output of a training."""
    ctx = TrainContext(
        output_dir=folder / "output", work_dir=folder / "work", checkpoint_dir=folder / "checkpoints",
        resources=resources, report=lambda step, metrics: None, **more,
    )  # fmt: skip
    stage.run(training.inputs(root, stage), ctx)
    return ctx.output_dir


def other_sums(stage: Training, root: Path, folder: Path) -> Path:
    """The same micro batches in two parts each."""
    return trained(stage, root, folder, replace(SAVING, micro_batch_size=2))


def lost_steps(stage: Training, root: Path, folder: Path) -> Path:
    """Without its last two steps."""
    return trained(replace(stage, num_steps=stage.num_steps - 2), root, folder)


def other_rows(stage: Training, root: Path, folder: Path) -> Path:
    """On rows in another order."""
    return trained(replace(stage, seed=stage.seed + 1), root, folder)


def lost_moments(stage: Training, root: Path, folder: Path) -> Path:
    """Gone on with after half of its steps, with an optimizer that knows nothing of them."""
    asked = iter([False] * (stage.num_steps // 2 - 1) + [True] * 99)
    try:
        trained(stage, root, folder, should_stop=lambda: next(asked))
    except StoppedError:
        [checkpoint] = (folder / "checkpoints").iterdir()
    state = torch.load(checkpoint / "state.pt", weights_only=True)
    torch.save({**state, "optimizer": {**state["optimizer"], "state": {}}}, checkpoint / "state.pt")
    return trained(stage, root, folder, resume_from=checkpoint)


CAUSES: dict[str, Callable[[Training, Path, Path], Path]] = {
    "another order of sums": other_sums, "two steps lost": lost_steps, "other rows": other_rows,
    "Adam's moments lost": lost_moments,
}  # fmt: skip


def main() -> None:
    """Trains every pair and prints how far apart it ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="posttrain-bench-") as place:
        folder = Path(place)
        root = training.write_inputs(folder / "inputs")
        print(
            f"{'method':<8}{'precision':<11}{'rate':<8}{'moved':<9}"
            + "".join(f"{name:<23}" for name in CAUSES).rstrip()
        )
        for name in ("sft", "dpo"):
            for precision in ("fp32", "bf16"):
                for rate in RATES:
                    fields = {"learning_rate": rate, "lr_schedule": "constant", "precision": precision}
                    stage = training.method(name, num_steps=steps, **fields)
                    line = _line(stage, root, folder / f"{name}-{precision}-{rate}")
                    print(f"{name:<8}{precision:<11}{rate:<8.0e}{line}".rstrip(), flush=True)


def _line(stage: Training, root: Path, folder: Path) -> str:
    """How far it moved its weights, by their norm; then how far apart each cause sets it, by how far it moved them."""
    unbroken = trained(stage, root, folder / "unbroken")
    moved = movement(root / "policy", unbroken)
    assert moved
    apart = [
        weight_difference(unbroken, cause(stage, root, folder / str(number))).distance / moved
        for number, cause in enumerate(CAUSES.values())
    ]
    return f"{moved / length(root / 'policy'):<9.0e}" + "".join(f"{each:<23.2g}" for each in apart)


if __name__ == "__main__":
    main()
