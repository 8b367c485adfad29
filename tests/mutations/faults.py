"""The planted faults. Each is found by its text, which occurs once in the packages: files may move."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One wrong edit.

    Args:
        what: the fault, in a few words.
        text, wrong: what stands in the code, and what replaces it.
        tests: names of test files, such as ``lineage/test_gc``, or ``FILE::TEST``, that should fail.
    """

    what: str
    text: str
    wrong: str
    tests: tuple[str, ...]


FAULTS = (
    # --- lineage
    Fault(
        what="a lock that another process owns counts as acquired",
        text="if _acquire(descriptor, self._path) and os.fstat(descriptor).st_nlink:",
        wrong="if os.fstat(descriptor).st_nlink:",
        tests=("test_lock",),
    ),
    Fault(
        what="a process that lost its lock commits its output",
        text="if found is None or found.token != token:",
        wrong="if found is None:",
        tests=("test_lock", "lineage/test_store"),
    ),
    Fault(
        what="the digest of a changed file comes from the cache",
        text="{file.absolute()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}:{status.st_ino}",
        wrong="{file.absolute()}:{status.st_size}",
        tests=("test_digest",),
    ),
    Fault(
        what="the oldest intact checkpoint is resumed from",
        text="for step in reversed(self.steps()):\n            damage = self.damage(step)",
        wrong="for step in self.steps():\n            damage = self.damage(step)",
        tests=("test_checkpoints",),
    ),
    Fault(
        what="a damaged checkpoint counts as intact: the digest of its files is not compared",
        text='return damage_of(recorded, found, f"{self.path(step)}/")',
        wrong='return damage_of(dict.fromkeys(recorded, ""), dict.fromkeys(found, ""), f"{self.path(step)}/")',
        tests=("test_checkpoints",),
    ),
    Fault(
        what="inputs in other slots have one fingerprint",
        text='"inputs": dict(inputs)})',
        wrong='"inputs": sorted(inputs.values())})',
        tests=("test_fingerprint",),
    ),
    Fault(
        what="the checkpoint that a stage resumes from is deleted",
        text="self.checkpoints.keep(each for each in self.checkpoints.steps() if each <= step)",
        wrong="self.checkpoints.keep(each for each in self.checkpoints.steps() if each < step)",
        tests=("lineage/test_store",),
    ),
    Fault(
        what="a line after a torn one is joined with it",
        text='file.truncate(file.read().rfind(b"\\n") + 1)',
        wrong="file.seek(0, os.SEEK_END)",
        tests=("test_files",),
    ),
    Fault(
        what="gc deletes what was used lately",
        text="latest = time.time() - older_than",
        wrong="latest = time.time() + older_than",
        tests=("lineage/test_gc",),
    ),
    Fault(
        what="gc deletes what came into use since it was listed",
        text="if is_other or _last_used(garbage.path) > garbage.last_used or garbage.key in roots():",
        wrong="if is_other or _last_used(garbage.path) > garbage.last_used:",
        tests=("lineage/test_gc",),
    ),
    Fault(
        what="a model's link out of its directory is followed",
        text="if is_wrong or not any(target.is_relative_to(each) for each in own):",
        wrong="if is_wrong:",
        tests=("test_model_files",),
    ),
    Fault(
        what="an index may name weights outside the model",
        text='if os.path.normpath(name).startswith(("/", "..")):',
        wrong='if name.startswith("/"):',
        tests=("test_model_files",),
    ),
    Fault(
        what="a rollback keeps the alias where it is",
        text="        elif stack:\n            stack.pop()",
        wrong='        elif stack and event.action == "reject":\n            stack.pop()',
        tests=("test_promotions",),
    ),
    Fault(
        what="a refused gate ends like a failed stage",
        text='"""A gate or a person refused a model; every output is kept."""\n\n    exit_code = 3',
        wrong='"""A gate or a person refused a model; every output is kept."""\n\n    exit_code = 1',
        tests=("test_promote::test_a_refused_gate_ends_the_run_with_3_fresh_or_reused",),
    ),
    # --- tasks: rows and tokens
    Fault(
        what="the prompt is trained",
        text="labels = [IGNORED] * len(whole.ids)",
        wrong="labels = list(whole.ids)",
        tests=("test_tokenize_rows",),
    ),
    Fault(
        what="labels are shifted by one",
        text="labels[start:end] = whole.ids[start:end]",
        wrong="labels[start + 1 : end + 1] = whole.ids[start:end]",
        tests=("test_tokenize_rows",),
    ),
    Fault(
        what="the first token of an answer belongs to its prompt",
        text="prompt, good, bad = left[:start], left[start:], right[start:]",
        wrong="prompt, good, bad = left[: start + 1], left[start + 1 :], right[start + 1 :]",
        tests=("test_tokenize_rows",),
    ),
    Fault(
        what="a row one token too long is not cut",
        text="over = outcome.length - removed - tokenization.max_length",
        wrong="over = outcome.length - removed - tokenization.max_length - 1",
        tests=("test_tokenize_rows", "test_length_policy"),
    ),
    Fault(
        what="copies of a held-out row are trained on",
        text="row_number() OVER same - 1 AS copy",
        wrong="row_number() OVER same AS copy",
        tests=("test_prepare_data",),
    ),
    # --- tasks: losses and rewards
    Fault(
        what="the margin of SimPO has the wrong sign",
        text='-logsigmoid(metrics["rewards/margins"] - self.gamma)',
        wrong='-logsigmoid(metrics["rewards/margins"] + self.gamma)',
        tests=("test_reference_free::test_simpo_is_that_of_the_paper",),
    ),
    Fault(
        what="the sign of KTO's labels is lost",
        text="sign_R = torch.where(rows.desirable_R.bool(), 1.0, -1.0)",
        wrong="sign_R = torch.where(rows.desirable_R.bool(), -1.0, 1.0)",
        tests=("test_kto::test_the_loss_is_that_of_the_paper",),
    ),
    Fault(
        what="the margin of RPO has the wrong sign",
        text="    margins_B = beta * (chosen_B - rejected_B)",
        wrong="    margins_B = beta * (rejected_B - chosen_B)",
        tests=("libraries/tasks/test_dpo_losses",),
    ),
    Fault(
        what="the KL to the reference is a reward",
        text="rewards_BC = -kl_coef * log_ratios_BC * mask_BC",
        wrong="rewards_BC = kl_coef * log_ratios_BC * mask_BC",
        tests=("test_actor_critic",),
    ),
    Fault(
        what="advantages are not discounted by lambda",
        text="found = delta_B + gamma * lam * found",
        wrong="found = delta_B + gamma * found",
        tests=("test_actor_critic",),
    ),
    Fault(
        what="PPO's ratio has no upper bound",
        text="ratios_BC.clamp(1 - clip_range, 1 + clip_range)",
        wrong="ratios_BC.clamp(min=1 - clip_range)",
        tests=("test_actor_critic",),
    ),
    Fault(
        what="the divergence of distillation is reversed",
        text="    return F.kl_div(log_q, log_p, reduction=",
        wrong="    return F.kl_div(log_p, log_q, reduction=",
        tests=("test_distill::test_divergences_are_those_worked_out_by_hand",),
    ),
    # --- tasks: the loop
    Fault(
        what="one micro batch too few is accumulated",
        text="return global_batch_size // rows",
        wrong="return max(1, global_batch_size // rows - 1)",
        tests=("test_training::test_micro_batches_and_workers_keep_the_trajectory",),
    ),
    Fault(
        what="a warm-up in steps is one step longer",
        text="warmup = counted.warmup if counted.warmup < 1 else int(counted.warmup)",
        wrong="warmup = counted.warmup if counted.warmup < 1 else int(counted.warmup) + 1",
        tests=("libraries/tasks/test_optimizers",),
    ),
    Fault(
        what="a resumed loop of its own loses the random state",
        text='            set_random_state(cast(RandomState, read_own(folder, self.ctx.rank)["random"]))',
        wrong="            seed_worker(self.run.method.seed, self.step, self.ctx.rank)",
        tests=("test_own_loop::test_stopped_and_resumed_it_ends_with_the_same_model_to_the_bit",),
    ),
    Fault(
        what="a resumed training forgets its best model",
        text='for step in (entry["step"] for entry in state.log_history if "loss" in entry):',
        wrong='for step in (entry["step"] for entry in state.log_history if "best" in entry):',
        tests=("test_best::test_the_best_model_wins_also_after_an_interruption",),
    ),
    Fault(
        what="the largest loss is the best model",
        text="return than is None or (value < than if self.small_is_good else value > than)",
        wrong="return than is None or (value > than if self.small_is_good else value < than)",
        tests=("test_best::test_the_best_model_wins_also_after_an_interruption",),
    ),
    Fault(
        what="patience is one measurement longer",
        text="self.patience.waited >= self.method.validation.patience",
        wrong="self.patience.waited > self.method.validation.patience",
        tests=(
            "integration/test_validation::test_patience_ends_a_training_that_no_longer_improves_whatever_interrupts_it",
        ),
    ),
    Fault(
        what="a token sees the one after it",
        text="seen = distance >= 0",
        wrong="seen = distance >= -1",
        tests=("test_padding_free", "train/test_kernels"),
    ),
    # --- tasks: evaluation and gates
    Fault(
        what="a gate passes what may be better",
        text='better = low > 0 or (low == 0 and kind != "min_gain")',
        wrong='better = high > 0 or (high == 0 and kind != "min_gain")',
        tests=("gate/test_gate",),
    ),
    Fault(
        what="a gate demands the regression that it allows",
        text='bound = -bound if kind == "max_regression" else bound',
        wrong="bound = +bound",
        tests=("gate/test_gate",),
    ),
    Fault(
        what="an interval leaves out twice what it should",
        text="tail = (1 - self.confidence) / 2",
        wrong="tail = 1 - self.confidence",
        tests=("test_bootstrap",),
    ),
    # --- flows
    Fault(
        what="a stage with changed inputs is reused",
        text="fingerprint(recipe, stage.method.identity_of({slot: each.fingerprint for slot, each in inputs.items()}))",
        wrong="fingerprint(recipe, {})",
        tests=("planning/test_plan",),
    ),
    Fault(
        what="a stage that was stopped is not resumed",
        text='return [planned for planned in self.stages if planned.state != "reuse"]',
        wrong='return [planned for planned in self.stages if planned.state == "run"]',
        tests=("planning/test_staleness",),
    ),
    Fault(
        what="a lost worker is retried once less",
        text="if failures > job.resources.max_failures:",
        wrong="if failures >= job.resources.max_failures:",
        tests=("stages/test_attempts",),
    ),
    Fault(
        what="a resumed stage begins at step 0",
        text="    entry.begin(step)\n    signature",
        wrong="    entry.begin(0)\n    signature",
        tests=("stages/test_attempts", "stages/test_execute"),
    ),
    Fault(
        what="a stopped run ends with code 1",
        text="            _end_soon()\n        return STOPPED",
        wrong="            _end_soon()\n        return 1",
        tests=("test_stops",),
    ),
    Fault(
        what="a model that a person rejected is promoted",
        text='if of_model and of_model[-1].action == "reject":',
        wrong='if of_model and of_model[0].action == "reject":',
        tests=("test_promote::test_a_verdict_that_demands_approval_needs_one",),
    ),
    Fault(
        what="a model is promoted against the refusal of its gate",
        text='    if verdict.result == "refuse":\n        rules',
        wrong='    if verdict.result != "refuse":\n        rules',
        tests=("test_promote::test_a_model_needs_a_passing_verdict_or_force",),
    ),
    Fault(
        what="a sweep maximizes what it should minimize",
        text="return 1 if sweep.pruning.direction == objective.direction else -1",
        wrong="return -1 if sweep.pruning.direction == objective.direction else 1",
        tests=("test_sweep_trials::test_a_pruner_prunes_by_metric_and_direction",),
    ),
)
