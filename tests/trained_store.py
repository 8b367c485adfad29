"""A store whose artifacts are trained in the test's process."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from lineage.artifact import Kind
from lineage.store import InputRecord, Store
from tasks.context import Resources, TrainContext
from tasks.method import Adapter, Input, Training
from tests import training
from tests.written_store import WrittenStore

LORA = Adapter(rank=4, alpha=8)


class Made:
    """Artifacts of a store that are trained in this process."""

    def __init__(self, folder: Path, rows: Path) -> None:
        self.folder, self.rows = folder, rows
        self.store = WrittenStore(folder / "store")

    def put(self, name: str, given: dict[str, InputRecord], fill: Callable[[Path], object], **recipe: object) -> Input:
        """An artifact that ``fill`` writes into its place."""
        place = Store(self.store.root).entry(name, self.store.stage(name, given, recipe=recipe).fingerprint).output
        fill(place)
        manifest = self.store.stage(name, given, recipe=recipe)  # of what lies there now
        kind = Kind.REWARD_MODEL if name == "reward" else Kind.CHECKPOINT
        digest = manifest.output_digest
        return Input(name=name, kind=kind, fingerprint=manifest.fingerprint, path=place, digest=digest)

    def base(self) -> Input:
        return self.put("base", {}, lambda place: shutil.copytree(self.rows / "policy", place, dirs_exist_ok=True))

    def trained(self, name: str, policy: Input, record: InputRecord | None = None, **fields: object) -> Input:
        stage = training.method(name, **{"adapter": LORA, **fields})
        given = record or InputRecord(artifact=policy.name, fingerprint=policy.fingerprint, digest=policy.digest)
        return self.put(name, {"policy": given}, lambda place: self.train(stage, policy, place), **stage.recipe())

    def train(self, stage: Training, policy: Input, output: Path, **fields: object) -> None:
        ctx = TrainContext(
            output_dir=output, work_dir=self.folder / "work", resources=Resources(micro_batch_size=8, save_minutes=None)
        )
        stage.run({**training.inputs(self.rows, stage), "policy": policy}, replace(ctx, **fields))
