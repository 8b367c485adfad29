"""Marks tests by folder, and gives each test its own directory and environment, with nothing of the user's."""

import atexit
import faulthandler
import gc
import hashlib
import importlib.metadata
import itertools
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import settings

gc.disable()  # during imports: it takes a quarter of their time
HERE = Path(__file__).parent
# Temporary directory of this process and of those that tests start. It also holds the machine's slots: a test that
# hangs must not block other test runs. The name is short, because paths of sockets are limited.
OWN = Path(tempfile.mkdtemp(prefix="pt-"))
# The user's variables that the product or its libraries read.
USERS = (
    "AWS_", "COLUMNS", "DVC_", "GIT_", "HF_", "HUGGINGFACE_", "HYDRA_", "MLFLOW_", "POSTTRAIN_", "PREFECT_", "RAY_",
    "TRANSFORMERS_", "WANDB_", "XDG_",
)  # fmt: skip
for name in [name for name in os.environ if name.startswith(USERS)]:
    del os.environ[name]
os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path stays in the usual place
os.environ.update(TMPDIR=str(OWN), HOME=str(OWN / "home"), PREFECT_HOME=str(OWN / "home/.prefect"))
os.environ["PYTHONPATH"] = str(HERE.parent)  # processes that tests start in their own directories
(OWN / "home").mkdir()
# Processes of tests must not inherit what nohup and a shell's `&` ignore.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
# Must precede the import of torch: tests share the machine, and spinning threads would stall each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
tempfile.tempdir = None  # read TMPDIR again
atexit.register(shutil.rmtree, OWN, ignore_errors=True)
# No deadline, because other work may slow the machine; fixed examples, so that commits are comparable.
settings.register_profile("posttrain", deadline=None, derandomize=True, max_examples=25)
settings.register_profile("nightly", deadline=None, max_examples=300)
settings.load_profile("posttrain")
# Tests of `make test` that may take more than so many seconds on a quiet machine; the end of a run names others.
LONG_SECONDS = 8.0
LONG = (
    "test_a_stop_while_it_waits_decides_nothing_and_resuming_the_flow_run_approves_for_good",
    "test_a_run_that_is_asked_to_end_saves_once_and_ends_with_130",
    "test_a_run_that_is_killed_leaves_nothing_and_resumes_from_its_checkpoint",
    "test_the_first_stage_whose_model_is_worse_is_named_and_nothing_is_trained",
    "test_a_server_that_goes_away_costs_one_line_and_learns_the_end_from_the_next_command",
    "test_two_runs_at_once_train_a_shared_stage_once",
    "test_a_promotion_that_a_kill_prevented_is_made_by_the_next_run",
    "test_a_run_is_seen_followed_and_cancelled_from_outside",
    "test_repro_runs_what_changed_and_run_then_has_nothing_to_do",
    "test_each_round_changes_what_the_doctor_finds_the_best_is_kept_and_a_killed_command_resumes",
)
# Matrices of which `make test` tries these cases; the others are slow. FILE::TEST -> the ids of its quick cases.
QUICK_CASES = {
    "test_adapter_in::test_a_lost_adapter_stops_the_stage_however_little_it_changes": ("adapter0-merge",),
    "test_adapter_in::test_dpo_starts_at_its_reference_trains_one_adapter_and_saves_what_it_trained": (
        "continue-trl-None", "stack-pair_loss-None",
    ),
    "test_adapter_types::test_an_adapter_trains_its_own_weights_and_is_saved_as_it_was_trained": (
        "lora", "dora", "adalora", "vera", "oft", "ia3", "pissa", "modules_to_save", "tokens",
    ),
    "test_adapter_types::test_biases_are_trained_and_the_reference_of_dpo_keeps_its_own": ("all",),
    "test_adapter_types::test_dense_and_shared_layers_of_a_mixture_get_the_adapter_and_experts_only_where_all_do": (
        "fields0-changed0-unchanged0", "fields3-changed3-unchanged3",
    ),
    "test_adapter_types::test_rows_of_a_head_that_is_the_embedding_are_trained": ("gpt2-whole", "llama-in_chunks"),
    "test_adapter_types::test_the_noise_on_embeddings_is_in_the_policy_and_not_in_its_reference": (
        "adapter_off-dpo", "frozen_copy-kto",
    ),
    "test_adapter_types::test_the_plan_counts_what_is_trained_of_every_architecture": (
        "llama-sft-fields0", "llama-reward-fields1", "gpt2-sft-fields5", "mixtral-sft-fields7",
        "qwen3_moe-sft-fields11",
    ),
    "test_adapter_types::test_what_cannot_be_put_on_experts_is_refused_and_on_attention_it_trains": ("fields0",),
    "test_adapter_types::test_what_peft_copies_from_a_base_in_bf16_is_saved_and_continued_as_it_was_trained": (
        "modules_to_save", "tokens",
    ),
    "test_adapter_types::test_what_reads_every_layer_trains_the_language_model_of_one_that_reads_images": ("eva",),
    "test_adaptive::test_stopped_anywhere_it_ends_with_the_same_weights": ("5",),
    "test_adaptive::test_weights_that_became_non_finite_are_those_of_the_best_checkpoint_again": ("full",),
    "test_beginnings_and_ends::test_generation_of_the_output_stops_where_the_answers_end": (
        "sft-fields0", "dpo-fields1", "grpo-fields5", "ppo-fields4",
    ),
    "test_boundaries::test_each_answer_is_trained_after_the_tokens_that_generation_starts_from": (
        "byte level-chatml", "byte level-llama3", "byte level-cohere", "gpt-2-qwen3", "metaspace-gemma",
        "metaspace-gptoss", "metaspace first-chatml", "metaspace first-glm4moe", "prepend-phi3", "prepend-deepseekv3",
        "swallowing-qwen2_5", "swallowing-gemma", "blank first-qwen3", "blank first-deepseekv3",
    ),
    "test_composite_models::test_text_trains_the_text_part_and_the_output_has_all_the_rest": (
        "mistral3-full", "qwen3_5-lora",
    ),
    "test_compositions::test_a_shipped_pipeline_is_what_hydra_composes": (
        "cpt-sft-dpo-retrain", "distill", "grpo", "qlora-sft-dpo", "reward", "rlhf-ppo", "sft-kto", "vlm-sft-dpo",
    ),
    "test_distill::test_the_loss_is_that_of_whole_logits": (
        "policy-teacher", "policy-gemma2", "gemma3-teacher", "gpt2-teacher", "qwen3_moe-teacher",
    ),
    "test_distill::test_the_trajectory_is_that_of_trls_gkd_off_policy": ("0.3",),
    "test_dpo_losses::test_losses_and_options_are_those_of_a_plain_trl_script": (
        "all at once", "of differences, with every option", "reference_sync",
    ),
    "test_dpo_losses::test_optimal_transport_is_trls_where_a_step_is_one_micro_batch": ("aot_unpaired",),
    "test_dpo_losses::test_the_micro_batch_changes_no_loss_of_ours": ("full",),
    "test_dpo_start::test_dpo_as_a_pair_loss_is_trls": ("policy-None", "policy-adapter1"),
    "test_evaluate::test_another_checkpoint_than_the_input_is_not_measured": ("dpo-files", "reward_model-path"),
    "test_export::test_transformers_reads_a_gguf_file_back_as_the_same_model": (
        "llama-q8_0", "gemma2-f16", "gemma3_text-f16", "qwen3-q8_0",
    ),
    "test_gate::test_a_model_that_is_too_bad_passes_in_at_most_five_percent_of_evaluations": (
        "accuracy-0.90-20", "accuracy-0.90-40", "regression-0.03-40", "regression-0.03-100",
    ),
    "test_generating::test_a_prompt_is_read_once_for_its_completions_with_the_numbers_of_whole_rows": ("{}",),
    "test_generating::test_a_step_is_that_of_plain_trl_on_the_same_completions": (
        "grpo", "reused", "dapo", "gspo", "cispo", "rloo",
    ),
    "test_generating::test_a_step_with_equal_rewards_changes_no_weight": (
        "grpo-fields0", "rloo-fields4", "online_dpo-fields6",
    ),
    "test_generating::test_a_training_that_stops_between_the_steps_of_a_generation_resumes_to_the_bit": (
        "{'num_iterations': 2, 'loss': 'gspo'}",
    ),
    "test_generating::test_every_architecture_trains_and_agrees_with_its_reference": ("gpt2",),
    "test_generating::test_padded_rows_have_the_log_probabilities_of_each_row_alone": ("llama", "gemma2"),
    "test_generating::test_rows_above_and_below_the_original_length_are_sampled_as_they_are_trained": (
        "grpo-longrope",
    ),
    "test_generating::test_the_micro_batch_changes_no_metric": ("grpo-fields0",),
    "test_generating::test_the_reference_of_an_adapter_is_the_input_policy": ("grpo-stack",),
    "test_generating::test_the_share_of_groups_with_equal_rewards_is_that_of_the_rewards": (
        "grpo-fields0", "rloo-fields3", "ppo-fields4",
    ),
    "test_generating::test_whole_rows_are_trained_where_each_has_noise_of_its_own_or_recomputes_its_activations": (
        "dropout",
    ),
    "test_import::test_an_example_of_a_peer_becomes_a_pipeline_that_plans": (
        "axolotl_qlora", "axolotl_completion", "trl_kto", "trl_grpo", "factory_orpo", "factory_reward", "oumi_lora",
    ),
    "test_init::test_a_named_recipe_plans": ("grpo-summaries",),
    "test_init::test_what_the_machine_decides_is_left_to_the_machine_and_the_defaults_to_the_adapter": ("gpus1",),
    "test_init::test_with_an_adapter_the_values_are_those_of_the_adapter": ("words1",),
    "test_kernels::test_the_base_under_an_adapter_is_held_in_bf16": ("dpo",),
    "test_kernels::test_what_is_held_in_bf16_is_never_in_memory_in_fp32": ("full",),
    "test_kinds::test_what_another_stage_holds_out_is_found_among_single_answers_and_prompts": (
        "text-unpaired", "conversations-prompts", "preferences-unpaired", "unpaired-prompts", "prompts-prompts",
    ),
    "test_kto::test_on_a_whole_batch_it_is_trls": ("kto-full", "apo_zero_unpaired-lora"),
    "test_merge::test_a_model_that_changes_after_it_was_loaded_changes_nothing": ("adapters", "None"),
    "test_merge::test_adapters_of_unequal_ranks_add_up": ("False-svd",),
    "test_merge::test_an_adapter_is_merged_into_weights_that_load_alone": ("gpt2-kind0", "mixtral-kind1"),
    "test_merge::test_shares_of_one_and_zero_give_the_input_to_the_bit": ("gpt2", "mixtral"),
    "test_mlflow_tracker::test_a_call_that_fails_is_made_good_by_the_next_sync": ("create_run", "set_terminated"),
    "test_model_intake::test_new_tokens_are_trained_and_travel_with_the_output": ("sft", "reward"),
    "test_model_intake::test_the_side_that_a_tokenizer_pads_changes_no_loss": ("dpo", "grpo"),
    "test_model_parts::test_settings_change_what_the_model_computes_and_travel_in_its_config": (
        "llama-kwargs0", "llama-kwargs2", "qwen2-kwargs3", "llama-kwargs5", "mistral-kwargs6", "gemma2-kwargs7",
    ),
    "test_on_policy_distill::test_the_trajectory_is_that_of_a_plain_trl_script": ("0.3",),
    "test_one_policy::test_weights_that_stay_behind_stop_at_their_first_use": ("0.03-ppo", "1e-06-grpo"),
    "test_optimizers::test_weights_in_bf16_train_as_in_fp32_and_resume_to_the_bit": ("dpo",),
    "test_own_loop::test_stopped_and_resumed_it_ends_with_the_same_model_to_the_bit": (
        "PlainLoop-fields0", "OptimizedLoop-fields3", "OptimizedLoop-fields4",
    ),
    "test_own_loop::test_with_the_optimizer_of_the_core_it_is_transformers_training": ("fields0", "fields2"),
    "test_own_names::test_a_command_runs_ours_in_a_folder_with_modules_of_our_names": ("True",),
    "test_packs::test_a_row_in_a_pack_has_the_loss_and_the_gradients_that_it_has_alone": (
        "cohere2", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "granitemoe", "llama", "ministral", "mixtral",
        "olmo3", "phi", "qwen3_moe", "smollm3",
    ),
    "test_peft_directory::test_a_merge_that_loses_an_adapter_too_small_for_golden_prompts_is_stopped": (
        "lora-lost", "lora-added_twice", "dora-lost", "embedding-added_twice", "rows-lost", "norm-added_twice",
        "experts-lost",
    ),
    "test_peft_directory::test_a_stage_starts_from_the_merged_base": ("llama", "gpt2", "qwen3_moe", "gemma3"),
    "test_peft_directory::test_an_adapter_on_one_end_of_a_tied_model_changes_that_end_alone": (
        "head-gpt2", "embedding-llama", "both-gemma2", "both_as_one-gpt2", "head_in_full-llama",
        "embedding_in_full-gemma2", "rows-gpt2",
    ),
    "test_peft_directory::test_every_accepted_type_merges": (
        "LORA", "ADALORA", "OFT", "VERA", "IA3", "LOKR", "HRA", "FOURIERFT",
    ),
    "test_ppo::test_the_reference_of_an_adapter_is_the_policy_that_was_passed": ("stack",),
    "test_prepare_data::test_a_slice_takes_the_rows_that_it_names": (
        "train[:100]-indices0", "train[-30:]-indices3", "train[10%:20%]-indices2",
    ),
    "test_proposals::test_the_overrides_of_the_message_read_the_rows": (
        "Question Answer-prompt_completion", "input output-prompt_completion",
        "context question answer-prompt_completion", "question response_j response_k-preference",
        "user preferred dispreferred-preference",
    ),
    "test_quantization::test_a_format_of_bitsandbytes_trains_resumes_to_the_bit_and_merges_as_set": ("nf4-llama",),
    "test_quantization::test_a_model_that_was_quantized_before_is_trained_upon_and_merged_dequantized": (
        "bitsandbytes nf4-llama",
    ),
    "test_quantization::test_every_type_of_adapter_that_a_base_in_few_bits_takes_does_so": ("oft",),
    "test_quantization::test_the_dtype_of_storage_reaches_the_base_and_changes_no_number": ("bf16", "uint8"),
    "test_reference_free::test_it_trains_as_trls_trainer": ("lora-orpo", "lora-cpo-ipo"),
    "test_reference_logps::test_held_out_rows_are_measured_against_the_same_reference": ("full",),
    "test_reference_logps::test_so_it_is_on_every_architecture": ("gpt2",),
    "test_reference_logps::test_the_trajectory_is_that_of_the_live_reference": ("full", "lora", "losses of ours"),
    "test_rendering::test_a_token_is_trained_if_it_ends_within_a_turn": ("chatml", "stripping", "own system"),
    "test_resume::test_a_base_that_changes_during_its_training_loses_nothing": ("sft-True",),
    "test_resume::test_so_it_is_with_every_option_that_has_a_state": (
        "sft-fields0-resources0", "dpo-fields2-resources2", "dpo-fields3-resources3",
    ),
    "test_resume::test_stopped_and_resumed_is_unbroken_to_the_bit": (
        "sft-full", "dpo-lora", "reward-full", "distill-full", "grpo-full", "ppo-lora",
    ),
    "test_steps_commit::test_a_committed_session_is_replayed_to_the_bit": ("lora",),
    "test_teacher_answers::test_every_option_changes_the_answers": (
        "given0-changed0", "given2-changed2", "given6-changed6", "given7-changed7", "given9-changed9",
    ),
    "test_token_batches::test_a_step_without_memory_is_repeated_with_fewer_tokens": ("sft",),
    "test_tokens::test_packed_rows_have_the_loss_that_they_have_alone": ("llama",),
    "test_training::test_every_architecture_trains": ("sft-gpt2-fp32", "sft-qwen3_moe-bf16", "dpo-gpt2-bf16"),
    "test_training_run::test_a_trainer_that_logs_its_loss_alone_is_counted_by_us": ("full",),
    "test_training_run::test_an_adapters_dropout_stays_where_the_bases_is_switched_off": ("dpo",),
    "test_validation::test_every_method_logs_and_reports_the_loss_and_trains_as_without": ("sft",),
    "test_vision::test_an_adapter_trains_the_language_model_and_the_parts_that_are_named": ("images0", "images5"),
    "test_vision::test_the_language_model_alone_is_trained_unless_other_parts_are_named": (
        "images0-parts0", "images3-parts3",
    ),
    "test_vision::test_tokens_and_loss_are_those_of_plain_transformers": ("qwen2_vl", "mllama"),
}  # fmt: skip
_HANG_SECONDS = 2000
_watched = [0.0]  # since when
_numbers = itertools.count()
_WEEK_SECONDS = 7 * 86_400
_unused: list[Path] = []  # places that a test left empty: most do, and thousands of directories take long to remove


@pytest.fixture(scope="session", autouse=True)
def _empty_directory() -> Iterator[None]:
    """Working directory of shared fixtures; the checkout may contain the store of a demo."""
    (OWN / "shared").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(OWN / "shared")
        yield


@pytest.fixture(scope="session", autouse=True)
def _kept_compositions(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hydra composes in 0.2 s: what it makes of shipped groups is kept for later runs, by all that it is made from."""
    compose = sys.modules.get("flows.declare.config")
    if compose is None or not hasattr(pytestconfig, "cache"):
        yield
        return
    folder = pytestconfig.cache.mkdir("compositions")
    for path in folder.iterdir():
        if time.time() - path.stat().st_mtime > _WEEK_SECONDS:
            path.unlink(missing_ok=True)
    own = str(tmp_path_factory.getbasetemp())
    composer, code = compose._composer, (Path(compose.__file__).read_bytes(), importlib.metadata.version("hydra-core"))

    @cache
    def kept(overrides, config_dir, files):
        if config_dir not in (None, HERE / "conf") or own in str(overrides):
            return composer(overrides, config_dir, files)
        file = folder / hashlib.sha256(repr((overrides, files, code)).encode()).hexdigest()
        if not file.exists():
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_bytes(pickle.dumps(composer(overrides, config_dir, files)))
            draft.replace(file)
        return pickle.loads(file.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_composer", kept)
        yield


@pytest.fixture(autouse=True)
def _own_place(_empty_directory: None) -> Iterator[None]:
    """An empty working directory and a home for each test."""
    folder = _unused.pop() if _unused else OWN / f"test-{next(_numbers)}"
    for place in (folder / "home", folder / "work"):
        if not place.exists():
            place.mkdir(parents=True)
    before = os.environ.copy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(folder / "home"))
        patch.setenv("PREFECT_HOME", str(folder / "home/.prefect"))
        patch.chdir(folder / "work")
        yield
    now = "PYTEST_CURRENT_TEST"  # which names the phase too
    if {**os.environ.copy(), now: ""} != {**before, now: ""}:
        os.environ.clear()
        os.environ.update(before)
    if any(folder.glob("*/*")):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _unused.append(folder)


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tried: dict[str, set[str]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            name = f"{item.path.stem}::{item.originalname}"
            if name in QUICK_CASES:
                tried.setdefault(name, set()).add(item.callspec.id)
                if item.callspec.id not in QUICK_CASES[name]:
                    item.add_marker(pytest.mark.slow)
        folder = item.path.relative_to(HERE).parts[0]
        if folder in ("integration", "gpu"):
            item.add_marker(folder)
        if item.get_closest_marker("gpu") and not Path("/dev/nvidiactl").exists():
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
    gone = {name: each for name, found in tried.items() if (each := {*QUICK_CASES[name]} - found)}
    if gone and not config.getoption("lf", False) and not any("[" in each for each in config.args):
        raise pytest.UsageError(f"QUICK_CASES of tests/conftest.py names cases that are not there: {gone}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Ends a process whose main thread hangs in C code, where no signal reaches it, and prints its stacks.

    ``faulthandler_timeout`` does so anew for each test, and waits for a thread each time: on a busy machine 10 ms.
    """
    if time.monotonic() - _watched[0] > 60:
        faulthandler.dump_traceback_later(_HANG_SECONDS, file=item.config.stash[fault_handler_stderr_fd_key], exit=True)
        _watched[0] = time.monotonic()
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            faulthandler.cancel_dump_traceback_later()
            _watched[0] = 0.0


def pytest_collection_finish() -> None:
    gc.freeze()  # no later collection looks at what was imported
    # accelerate asks for one after each training, which takes as long as a tiny model's training.
    gc.collect = lambda generation=2: 0  # type: ignore[assignment]
    importlib.metadata.metadata = cache(importlib.metadata.metadata)  # accelerate parses them 18 times in each training
    gc.set_threshold(100_000)  # what tests import later would be looked at again and again
    gc.enable()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Names tests of `make test` that take too long; fixtures that a worker makes once do not count."""
    if "not slow" not in config.getoption("markexpr"):
        return
    calls = [each for each in terminalreporter.getreports("passed") if each.when == "call"]
    for report in calls:
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.duration > LONG_SECONDS and name not in LONG:
            terminalreporter.write_line(
                f"{report.nodeid} took {report.duration:.1f} s: above {LONG_SECONDS:g} s, mark it slow"
            )


def pytest_unconfigure() -> None:
    gc.unfreeze()  # so that the interpreter ends without complaints of extensions about what is left
