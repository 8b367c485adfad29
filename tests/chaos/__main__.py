"""Kills runs of the miniature pipeline at random moments until they are done, and says what came of it.

    make chaos    # or: python -m tests.chaos [--kills 20] [--seed 7] [--pipeline NAME] [--toy | --cluster]

Every kill and its moment come from the seed. Each pipeline has a store of its own, and is killed and started again
until it is finished: its outputs must be those of a run that nobody touched, to the bit.
"""

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.rounds import Rounds
from tests.miniature import SHIPPED

KILLS_OF_A_PIPELINE = 5


def main() -> int:
    """0: all survived, all is identical, nothing leaked or was made twice, none lost more than one save interval."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--pipeline", default="cpt-sft-dpo", choices=SHIPPED, help="one of conf/pipeline, in miniature")
    parser.add_argument("--toy", action="store_true", help="stages without a model: faster, and only of what is around")
    parser.add_argument("--cluster", action="store_true", help="sft on two Ray workers, which are killed too, and Ray")
    options = parser.parse_args()
    folder, begin = Path(tempfile.mkdtemp(prefix="posttrain-chaos-")), time.monotonic()
    print(f"seed {options.seed}, {options.kills} kills, in {folder}", flush=True)
    rounds = Rounds(folder, options.seed, pipeline=options.pipeline, toy=options.toy, cluster=options.cluster)
    expected, seconds = rounds.unbroken()
    while rounds.score.kills < options.kills:
        rounds.round(expected, seconds, min(KILLS_OF_A_PIPELINE, options.kills - rounds.score.kills))
    print(f"seed {options.seed}: {rounds.score}\n{time.monotonic() - begin:.0f} s", flush=True)
    return 0 if rounds.score.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
