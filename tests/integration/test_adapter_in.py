"""The adapter of a stage's input is merged, trained further, or stays under a new one."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lineage.artifact import Kind
from lineage.checkpoints import Checkpoints
from lineage.digest import digest_files
from lineage.errors import ConfigError, StoppedError
from tasks.context import Resources, TrainContext
from tasks.method import Adapter, Input, Training
from tasks.train.models import load_model, whole_model
from tasks.train.run import TrainingRun
from tests import tiny, training
from tests.trained_store import LORA, Made

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.arange(3, 60)[None]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = training.write_inputs(tmp_path_factory.mktemp("inputs"))
    shutil.rmtree(folder / "policy")
    tiny.write_policy(folder / "policy", chat_template=None)
    return folder


@pytest.fixture
def made(tmp_path: Path, root: Path) -> Made:
    return Made(tmp_path, root)


def sft(made: Made, save: str | None, **fields: object) -> Input:
    return made.trained("sft", made.base(), save=save, chat_template="chatml", learning_rate=1e-2, **fields)


def answers(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().base_model(input_ids=IDS).last_hidden_state


def trained(made: Made, stage: Training, policy: Input, output: Path):
    """Trains; returns the run, its losses, and what the model in training answers at the end."""
    ctx = TrainContext(
        output_dir=output, work_dir=made.folder / "work", resources=Resources(micro_batch_size=4),
        report=lambda _step, _metrics: None,
    )  # fmt: skip
    run = TrainingRun(stage, {**training.inputs(made.rows, stage), "policy": policy}, ctx)
    trainer = stage.trainer(run)
    run.fit(trainer)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = answers(trainer.model.get_base_model())
    reference = None
    if "ref" in trainer.model.peft_config:
        trainer.model.set_adapter("ref")
        reference = answers(trainer.model.get_base_model())
        trainer.model.set_adapter("default")
    elif getattr(trainer, "ref_model", None) is not None:
        reference = answers(trainer.ref_model)
    frozen = {name: each for name, each in trainer.model.named_parameters() if ".stacked0." in name}
    run.save()  # merges
    return losses, found, reference, frozen


@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize("sft_weight", [None, 0.5], ids=["trl", "pair_loss"])
@pytest.mark.parametrize("adapter_in", ["continue", "stack"])
def test_dpo_starts_at_its_reference_trains_one_adapter_and_saves_what_it_trained(
    made: Made, adapter_in: str, sft_weight: float | None, quantization: str | None
) -> None:
    """The stage fails where policy and reference differ at step 0; the reference must also stay."""
    policy = sft(made, "adapter")
    before = load_file(policy.path / "adapter_model.safetensors")
    adapter = replace(LORA, quantization=quantization)  # type: ignore[arg-type]
    stage = training.method("dpo", adapter=adapter, adapter_in=adapter_in, learning_rate=1e-2, sft_weight=sft_weight)
    losses, found, reference, frozen = trained(made, stage, policy, made.folder / "whole")
    assert losses[0] != losses[-1]
    after = load_file(made.folder / "whole" / "adapter" / "adapter_model.safetensors")
    assert before.keys() == after.keys()  # one adapter
    assert not any(torch.equal(before[name], after[name]) for name in before)
    if quantization is None:
        torch.testing.assert_close(answers(whole_model(Kind.CHECKPOINT, made.folder / "whole")), found)
        torch.testing.assert_close(reference, answers(load_model(policy)), atol=2e-5, rtol=1e-5)
        if adapter_in == "stack":
            assert len(frozen) == len(before) and not any(each.requires_grad for each in frozen.values())
            for name, value in before.items():
                other = frozen[name.replace(".weight", ".stacked0.weight")]
                assert torch.equal(other, value)


@pytest.mark.parametrize("adapter_in", ["merge", "continue", "stack"])
def test_an_output_that_is_an_adapter_is_the_whole_output_and_goes_through_a_third_stage(
    made: Made, adapter_in: str
) -> None:
    fields = {"adapter_in": adapter_in, "learning_rate": 1e-2}
    outputs: list[dict[str, torch.Tensor]] = []
    for save in (None, "adapter"):
        policy = sft(made, save)
        second = made.trained("dpo", policy, save=save, **fields)
        third = made.trained("sft", second, save=save, seed=1, **fields)
        outputs += [load_model(each).state_dict() for each in (second, third)]
        if save and adapter_in == "continue":  # both lie upon the base
            bases = [json.loads((each.path / "base.json").read_text())["name"] for each in (policy, second, third)]
            assert bases == ["base", "base", "base"]
    for whole, alone in zip(outputs[:2], outputs[2:], strict=True):
        for name, value in whole.items():
            torch.testing.assert_close(alone[name], value, atol=1e-5, rtol=1e-5)


def test_each_way_is_another_training_and_continue_starts_where_the_adapter_ended(made: Made) -> None:
    policy = sft(made, None)
    runs = {}
    for adapter_in in ("merge", "continue", "stack"):
        stage = training.method("sft", adapter=LORA, adapter_in=adapter_in, learning_rate=1e-2)
        runs[adapter_in] = trained(made, stage, policy, made.folder / adapter_in)[:2]
    first = [losses[0] for losses, _ in runs.values()]
    assert first == pytest.approx([first[0]] * 3, rel=1e-5)  # the input
    assert not torch.allclose(runs["merge"][1], runs["continue"][1], atol=1e-3)
    # In full precision a stack and a merge are the same sum, added up in another order.
    torch.testing.assert_close(runs["merge"][1], runs["stack"][1], atol=1e-3, rtol=1e-3)
    none = training.method("sft", adapter=LORA, learning_rate=1e-2)
    assert none.recipe() == training.method("sft", adapter=LORA, adapter_in="merge", learning_rate=1e-2).recipe()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "adapter", "fields"),
    [
        ("dpo", LORA, {"adapter_in": "continue"}),
        ("dpo", LORA, {"adapter_in": "stack"}),
        ("sft", Adapter(type="adalora", rank=4, target_rank=1), {}),
        ("sft", Adapter(rank=4, init="pissa_niter_4"), {}),
        ("dpo", Adapter(rank=4, init="lora_ga"), {}),
        ("dpo", Adapter(type="vera", rank=4), {}),
        ("sft", Adapter(type="osf", rank=4), {}),
    ],
)
def test_a_resumed_training_is_the_uninterrupted_one_to_the_bit(
    made: Made, name: str, adapter: Adapter, fields: dict[str, object]
) -> None:
    policy = sft(made, None)
    stage = training.method(name, adapter=adapter, num_steps=8, learning_rate=1e-2, **fields)
    made.train(stage, policy, made.folder / "whole")
    saving = Resources(micro_batch_size=4, save_steps=5, save_minutes=None)
    checkpoints, reports = made.folder / "checkpoints", list[int]()
    more = {"resources": saving, "checkpoint_dir": checkpoints, "report": lambda step, _: reports.append(step)}
    with pytest.raises(StoppedError):
        made.train(stage, policy, made.folder / "broken", should_stop=lambda: len(reports) == 4, **more)
    assert not (Checkpoints(checkpoints).path(5) / "ref").exists()
    made.train(stage, policy, made.folder / "broken", resume_from=Checkpoints(checkpoints).path(5), **more)
    assert reports == [1, 2, 3, 4, 5, 6, 7, 8]
    assert digest_files(made.folder / "broken") == digest_files(made.folder / "whole")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"adapter": replace(LORA, rank=8)}, "adapter.rank is 8 here, and 4"),
        ({"adapter": replace(LORA, target_modules="attention")}, "adapter.target_modules is"),
        ({"adapter": Adapter(type="dora", rank=4, alpha=8)}, "adapter.type is dora here, and lora"),
        ({"adapter": Adapter(type="miss", rank=4)}, "adapter.type is miss here, and lora"),
    ],
)
def test_continue_with_another_adapter_is_refused(made: Made, fields: dict[str, object], message: str) -> None:
    stage = training.method("sft", adapter_in="continue", **fields)
    with pytest.raises(ConfigError, match=message):
        made.train(stage, sft(made, "adapter"), made.folder / "output")


@pytest.mark.parametrize("adapter_in", ["continue", "stack"])
def test_an_input_without_an_adapter_is_refused(made: Made, adapter_in: str) -> None:
    stage = training.method("sft", adapter=LORA, adapter_in=adapter_in, chat_template="chatml")
    with pytest.raises(ConfigError, match="base has no adapter that could be kept"):
        made.train(stage, made.base(), made.folder / "output")


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"trainable_token_indices": (5, 6)}, "rows of the embedding"), ({"modules_to_save": "norm"}, "in full too")],
)
def test_what_peft_keeps_for_one_adapter_is_not_stacked(made: Made, fields: dict, message: str) -> None:
    adapter = replace(LORA, **fields)
    policy = sft(made, "adapter", adapter=adapter)
    with pytest.raises(ConfigError, match=message):
        trained(made, training.method("sft", adapter=adapter, adapter_in="stack"), policy, made.folder / "whole")


def test_dropout_of_a_continued_adapter_is_that_of_its_stage(made: Made) -> None:
    policy = sft(made, None)
    found = []
    for dropout in (0.0, 0.5):
        stage = training.method("sft", adapter=replace(LORA, dropout=dropout), adapter_in="continue")
        found.append(trained(made, stage, policy, made.folder / str(dropout))[0])
    assert found[0] != found[1]
