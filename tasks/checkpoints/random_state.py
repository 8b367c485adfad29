"""The randomness of workers that go on with a training which others began."""

import random
from typing import TYPE_CHECKING

from transformers import TrainerCallback, set_seed

from lineage.checkpoints import Checkpoints
from tasks.context import TrainContext

if TYPE_CHECKING:
    from transformers import TrainerControl, TrainerState, TrainingArguments


class NewRandomState(TrainerCallback):
    """Seeds every worker at the first step after a checkpoint that another number of workers wrote.

    A saved state belongs to one rank of so many. Transformers would give it to the rank of that number, whatever
    rows it has now, and let a rank without one draw again what was drawn from step 0 on. The new state follows
    from the recipe's seed, the step and the rank alone.
    """

    def __init__(self, ctx: TrainContext) -> None:
        found = Checkpoints.at(ctx.resume_from) if ctx.resume_from else None
        self.step = found.step if found and found.num_workers != ctx.world_size else None
        self.rank = ctx.rank

    def on_step_begin(
        self, args: "TrainingArguments", state: "TrainerState", control: "TrainerControl", **kwargs: object
    ) -> None:
        if state.global_step == self.step:
            set_seed(random.Random(f"{args.seed} {self.step} {self.rank}").getrandbits(32))
