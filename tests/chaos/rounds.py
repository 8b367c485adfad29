"""One pipeline in a store of its own, killed and started again until it is finished."""

import random
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from flows.declare.config import load_pipeline
from tests.chaos.kills import CLUSTER_WAYS, WAYS, start
from tests.chaos.record import Reached, digests, doubled, made_again, misrecorded, reached, starts, untidy
from tests.command import CONF
from tests.marked import left
from tests.miniature import overrides_of, trainings_of, write_own_rows

SAVE_STEPS = 3
TOY_TRAININGS = ("left", "right")
# Two workers that step together: a stage that takes half a minute to start.
CLUSTER = (
    "stages.sft.resources.num_workers=2", "stages.sft.resources.launcher=cluster",
    "stages.sft.resources.micro_batch_size=2",
)  # fmt: skip
TOY = (
    "pipeline=toy", "model=none", "sources.rows.path=rows.txt", f"resources.save_steps={SAVE_STEPS}",
    *(f"stages.{stage}.method.{each}" for stage in TOY_TRAININGS for each in ("num_steps=30", "step_seconds=0.1")),
)  # fmt: skip


@dataclass
class Score:
    """What the rounds came to.

    Args:
        survived: kills after which the pipeline came to its end.
        hit: trainings that were under way when their run was interrupted.
        resumed: those of them that went on from a checkpoint; others had none yet.
    """

    kills: int = 0
    survived: int = 0
    hit: int = 0
    resumed: int = 0
    rounds: int = 0
    identical: int = 0
    lost_steps: int = 0
    leaked: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        whole = self.survived == self.kills and self.identical == self.rounds
        return whole and not self.leaked and not self.wrong and self.lost_steps <= SAVE_STEPS

    def __str__(self) -> str:
        return "\n".join(
            [
                f"kills {self.kills}  survived {self.survived}  trainings hit {self.hit}  of them resumed from a "
                f"checkpoint {self.resumed}  pipelines {self.rounds}  bit-identical {self.identical}  "
                f"leaked processes {len(self.leaked)}  longest lost work {self.lost_steps} steps "
                f"(saved every {SAVE_STEPS})",
                *(f"leaked: {each}" for each in self.leaked),
                *(f"wrong: {each}" for each in self.wrong),
            ]
        )


class Rounds:
    """Rounds below one folder, whose every kill and moment come from one seed."""

    def __init__(self, folder: Path, seed: int, pipeline: str, *, toy: bool, cluster: bool, num_steps: int) -> None:
        self._folder = folder
        self._chance = random.Random(seed)
        self._mark = secrets.token_hex(8)
        self._toy = toy
        self._ways = {**WAYS, **(CLUSTER_WAYS if cluster else {})}
        self.score = Score()
        rows = folder / "rows"  # of all: a data stage's report names its files
        rows.mkdir()
        own = [word.replace("=", f"={rows}/") for word in write_own_rows(rows)]
        if toy:
            self._trainings, self._overrides = [*TOY_TRAININGS], [*TOY]
            return
        self._trainings = trainings_of(pipeline)
        known = load_pipeline([f"pipeline={pipeline}"]).sources
        self._overrides = [
            *overrides_of(pipeline, gated=False, num_steps=num_steps),
            *(word for word in own if word.split(".")[1] in known),
            *(CLUSTER if cluster else ()),
            f"resources.save_steps={SAVE_STEPS}",
        ]

    def unbroken(self) -> tuple[dict[str, str], float]:
        """Digests and seconds of a run that nobody touches: the second of two, which finds all databases made.

        Raises:
            SystemExit: it fails, or two of them differ, so that nothing can be said of interrupted ones.
        """
        found: list[dict[str, str]] = []
        seconds = 0.0
        for folder in (self._folder / "first", self._folder / "unbroken"):
            cli_args, begin = self._command(folder), time.monotonic()
            code, _ = self._run(cli_args, folder, None, [])
            if code:
                raise SystemExit(f"the run that nobody touched ended with {code}: see {folder / 'run.log'}")
            seconds = time.monotonic() - begin
            found.append(digests(folder / "artifacts"))
        if found[0] != found[1]:
            raise SystemExit(f"two runs that nobody touched differ, in {folder.parent}: {found}")
        return found[0], seconds

    def round(self, expected: dict[str, str], seconds: float, kills: int) -> None:
        """One pipeline, killed up to ``kills`` times before it is finished.

        Args:
            expected: stage -> digest of its output, where nobody interrupts.
            seconds: that a run takes then.
        """
        self.score.rounds += 1
        folder = self._folder / f"pipeline-{self.score.rounds}"
        cli_args = self._command(folder)
        hits: list[Reached] = []
        finished: dict[str, float] = {}
        count, code = self.score.kills, -signal.SIGKILL
        while code:
            moment = self._chance.uniform(0, seconds) if self.score.kills - count < kills else None
            code, is_expected = self._run(cli_args, folder, moment, hits)
            self.score.wrong += [f"{folder}: {each}" for each in made_again(finished, folder / "artifacts")]
            finished = starts(folder / "artifacts")
            if not is_expected:
                self.score.wrong.append(f"{folder}: a command ended with {code}: see run.log there")
                self.score.survived -= 1
                break
        self.score.survived += self.score.kills - count
        self.score.hit += len(hits)
        self.score.resumed += sum(each.went_on_from() > 0 for each in hits)
        self.score.lost_steps = max([self.score.lost_steps, *(each.lost() for each in hits)])
        self._judge(folder, expected)

    def _judge(self, folder: Path, expected: dict[str, str]) -> None:
        store = folder / "artifacts"
        found = digests(store)
        self.score.identical += found == expected
        others = [name for name in expected if found.get(name) != expected[name]]
        wrong = [f"{name}: not the output of an unbroken run" for name in others]
        wrong += doubled(store) + untidy(store) + misrecorded(folder)
        self.score.wrong += [f"{folder}: {each}" for each in wrong]

    def _run(self, cli_args: list[str], folder: Path, moment: float | None, hits: list[Reached]) -> tuple[int, bool]:
        """One command, interrupted after ``moment`` seconds if it still runs then; its exit code, and if it may."""
        with (folder / "run.log").open("ab") as log:
            run = start(cli_args, folder, self._mark, log.fileno())
        try:
            code = run.wait(moment)
            return code, code == 0
        except subprocess.TimeoutExpired:
            pass
        name = self._chance.choice(sorted(self._ways))
        hits += reached(folder / "artifacts", self._trainings)
        self._ways[name].kill(run, self._mark, self._chance)
        code = run.wait()
        self.score.kills += 1
        self.score.leaked += left(self._mark)
        print(f"{folder.name}: {name} after {moment:.1f} s, exit code {code}", flush=True)
        return code, code in self._ways[name].codes

    def _command(self, folder: Path) -> list[str]:
        """That runs the pipeline in a new folder, on the same rows each time."""
        folder.mkdir()
        if self._toy:
            (folder / "rows.txt").write_text("rows")
        return [sys.executable, "-m", "flows", "run", "--config-dir", str(CONF), *self._overrides]
