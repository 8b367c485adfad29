"""What a toy training makes that nothing interrupts."""

from pathlib import Path
from tempfile import TemporaryDirectory

from lineage.artifact import Kind
from lineage.digest import digest_files, digest_of
from tasks.context import TrainContext
from tasks.method import Input, Training


def unbroken(method: Training) -> str:
    """The digest of its output, of a run in this process on the model of the toy pipeline."""
    with TemporaryDirectory() as folder:
        model, output = Path(folder) / "model", Path(folder) / "output"
        model.mkdir()
        output.mkdir()
        (model / "model.txt").write_text("0")
        policy = Input(name="model", kind=Kind.CHECKPOINT, fingerprint="f" * 64, path=model)
        method.run({"policy": policy}, TrainContext(output_dir=output, work_dir=Path(folder) / "work"))
        return digest_of(digest_files(output))
