"""Kills runs of the miniature pipeline at random moments until they are done, and says what came of it.

    make chaos    # or: python -m tests.chaos [--kills 20] [--seed 7] [--pipeline NAME | --each | --toy | --cluster]

Every kill and its moment come from the seed. Each pipeline has a store of its own, and is killed and started again
until it is finished: its outputs must be those of a run that nobody touched, to the bit.
"""

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.rounds import Rounds, Score
from tests.miniature import SHIPPED

KILLS_OF_A_PIPELINE = 5
DEFAULT = "cpt-sft-dpo"


def main() -> int:
    """0: all survived, all is identical, nothing leaked or was made twice, none lost more than one save interval."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--pipeline", default=DEFAULT, choices=SHIPPED, help="one of conf/pipeline, in miniature")
    parser.add_argument("--each", action="store_true", help="the other pipelines, one after the other")
    parser.add_argument("--steps", type=int, default=120, help="of each training: enough to meet one with a checkpoint")
    parser.add_argument("--toy", action="store_true", help="stages without a model: faster, and only of what is around")
    parser.add_argument("--cluster", action="store_true", help="sft on two Ray workers, which are killed too, and Ray")
    options = parser.parse_args()
    pipelines = [name for name in SHIPPED if not name.startswith(DEFAULT)] if options.each else [options.pipeline]
    scores = [interrupt(pipeline, options) for pipeline in pipelines]
    return 0 if all(score.is_good for score in scores) else 1


def interrupt(pipeline: str, options: argparse.Namespace) -> Score:
    """Interrupts a pipeline ``options.kills`` times, and prints what came of it."""
    folder, begin = Path(tempfile.mkdtemp(prefix="posttrain-chaos-")), time.monotonic()
    name = "toy" if options.toy else pipeline
    print(f"{name}: seed {options.seed}, {options.kills} kills, in {folder}", flush=True)
    rounds = Rounds(folder, options.seed, pipeline, toy=options.toy, cluster=options.cluster, num_steps=options.steps)
    expected, seconds = rounds.unbroken()
    while rounds.score.kills < options.kills:
        rounds.round(expected, seconds, min(KILLS_OF_A_PIPELINE, options.kills - rounds.score.kills))
    print(f"{name}: seed {options.seed}: {rounds.score}\n{time.monotonic() - begin:.0f} s", flush=True)
    return rounds.score


if __name__ == "__main__":
    sys.exit(main())
