"""Golden loss trajectories of the methods; ``python -m tests.golden_losses`` writes them anew.

A trajectory that moved without an intention is a defect. With one, say why in the commit, and raise the
method's ``version``.
"""

import importlib.metadata
import json
import tempfile
from pathlib import Path

from tasks.context import Resources
from tasks.judgement import canary
from tasks.method import Adapter
from tasks.train.losses.dpo_losses import ReferenceSync
from tests import training

GOLDEN = Path(__file__).parent / "golden"
LIBRARIES = ("torch", "transformers", "trl", "peft", "tokenizers")
NUM_STEPS = 6
CASES = {f"{name}{kind}": name for name in training.METHODS for kind in ("", "-lora")}
# Losses of ours beside those of TRL, and a reference that moves.
DPO_CASES: dict[str, dict[str, object]] = {
    "dpo-losses": {"losses": {"sigmoid": 0.8, "kto_pair": 0.5, "aot": 0.5, "aot_unpaired": 0.5, "sft": 0.1}},
    "dpo-reference_sync": {"reference_sync": ReferenceSync(every_steps=2)},
}
CASES |= dict.fromkeys(DPO_CASES, "dpo")


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name).split("+")[0] for name in LIBRARIES}


def losses(case: str, root: Path, output: Path) -> list[float]:
    """The losses of a case, trained now."""
    adapter = Adapter(rank=4, alpha=8) if case.endswith("-lora") else None
    stage = canary.method(CASES[case], num_steps=NUM_STEPS, adapter=adapter, **DPO_CASES.get(case, {}))
    return training.train(stage, root, output, resources=Resources(micro_batch_size=4)).losses


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        root = training.write_inputs(Path(directory))
        for case in CASES:
            golden = {"versions": versions(), "losses": losses(case, root, root / "outputs" / case)}
            (GOLDEN / f"{case}.json").write_text(json.dumps(golden, indent=2) + "\n")


if __name__ == "__main__":
    main()
