"""Settings of a training: groups, overrides, short forms, defaults and recipes."""

import pytest

from flows.declare.config import load_pipeline
from lineage.errors import ConfigError
from lineage.fingerprint import fingerprint
from lineage.source.model_source import template_families, text_digest
from tasks.dpo import DPO
from tasks.method import Adapter, Optimizer, Quantization, Schedule
from tasks.orpo import ORPO
from tasks.recipe import TrainingRecipe
from tasks.sft import SFT


def method(*overrides: str, stage: str = "sft") -> SFT | DPO:
    found = load_pipeline(overrides).stages[stage].method
    assert isinstance(found, SFT | DPO)
    return found


def test_a_group_sets_every_training_stage_and_a_stage_overrides_a_field_of_it() -> None:
    cli_args = ("optimizer=adamw_torch", "schedule=linear", "adapter=qlora", "stages.dpo.method.adapter.rank=4")
    assert method(*cli_args).optimizer.name == method(*cli_args, stage="dpo").optimizer.name == "adamw_torch"
    assert method(*cli_args).schedule.name == "linear"
    dpo = method(*cli_args, stage="dpo")
    assert dpo.adapter == Adapter(rank=4) and dpo.quantization == Quantization(format="nf4")


def test_a_stage_that_names_another_optimizer_takes_none_of_the_shared_fields() -> None:
    cli_args = ("optimizer=adamw_torch", "optimizer.betas=[0.5,0.6]")
    assert method(*cli_args).optimizer == Optimizer(name="adamw_torch", betas=(0.5, 0.6))
    own = "stages.sft.method.optimizer={name: adamw_torch_fused}"
    assert method(*cli_args, own).optimizer == Optimizer(name="adamw_torch_fused")


def test_a_stage_without_an_adapter_has_no_quantized_base() -> None:
    stage = method("adapter=lora", "quantization=nf4", "stages.sft.method.adapter=null")
    assert stage.adapter is None and stage.quantization is None


def test_the_schedule_of_the_pipeline_is_still_set_by_its_key() -> None:
    assert load_pipeline(['schedule={cron: "0 3 * * *"}']).operation.schedule is not None
    assert load_pipeline(["schedule.interval=60"]).operation.schedule is not None
    assert load_pipeline(["schedule=null"]).operation.schedule is None


def test_short_forms_are_their_settings() -> None:
    prefix = "stages.sft.method"
    short = method(f"{prefix}.lr_schedule=linear", f"{prefix}.warmup_ratio=0.2", f"{prefix}.weight_decay=0.1")
    cli_args = (
        f"{prefix}.schedule.name=linear",
        f"{prefix}.schedule.warmup=0.2",
        f"{prefix}.optimizer.weight_decay=0.1",
    )
    assert short == method(*cli_args)
    assert short.recipe() == method(*cli_args).recipe()


def test_a_short_form_that_contradicts_its_setting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lr_schedule=linear and schedule.name=constant.*set one of them"):
        SFT(lr_schedule="linear", schedule=Schedule(name="constant"))


def test_recipes_keep_the_form_of_stores_made_before_settings_were_nested() -> None:
    recipe = SFT(num_steps=1000, learning_rate=2e-5, adapter=Adapter(quantization="nf4")).recipe()
    assert recipe == {
        "method": "SFT", "version": 2, "learning_rate": 2e-5, "num_steps": 1000, "global_batch_size": 64,
        "max_length": 2048, "seed": 0, "warmup_ratio": 0.05, "lr_schedule": "cosine", "weight_decay": 0.0,
        "max_grad_norm": 1.0, "precision": "fp32", "quantization_version": 2,
        "adapter": {
            "rank": 16, "alpha": 32, "dropout": 0.0, "target_modules": "all-linear", "quantization": "nf4",
        },
    }  # fmt: skip


def test_every_field_of_a_setting_is_in_the_recipe() -> None:
    plain = SFT().recipe()
    for changed in (
        SFT(optimizer=Optimizer(name="adamw_torch")), SFT(optimizer=Optimizer(betas=(0.9, 0.95))),
        SFT(optimizer=Optimizer(eps=1e-6)), SFT(schedule=Schedule(warmup=10)), SFT(schedule=Schedule(warmup=0.1)),
        SFT(num_epochs=2.0), SFT(num_steps=10),
    ):  # fmt: skip
        assert changed.recipe() != plain


def test_the_default_learning_rate_is_ten_times_higher_under_an_adapter() -> None:
    assert (SFT().learning_rate, SFT(adapter=Adapter()).learning_rate) == (2e-5, 2e-4)
    assert (DPO().learning_rate, DPO(adapter=Adapter()).learning_rate) == (1e-6, 1e-5)
    assert SFT(adapter=Adapter(), learning_rate=2e-5).learning_rate == 2e-5


def test_one_epoch_is_the_default_length_and_steps_fill_the_last_batch() -> None:
    assert SFT().num_epochs == 1 and SFT().num_steps is None
    assert SFT(global_batch_size=8).steps(lambda: 41) == 6
    assert SFT(num_epochs=0.5, global_batch_size=8).steps(lambda: 41) == 3
    assert SFT(num_steps=7).steps(lambda: 41) == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"num_steps": 3, "num_epochs": 1.0},
            r"num_steps=3 and num_epochs=1: .*set the other to null: stages\.\w+\.method\.num_epochs=null",
        ),
        ({"quantization": Quantization(format="nf4")}, r"quantization.format=nf4: .*set adapter=lora"),
    ],
)
def test_settings_that_cannot_be_together_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SFT(**fields).recipe()  # type: ignore[arg-type]


@pytest.mark.parametrize("cls", [SFT, ORPO])
def test_a_chat_template_is_identity_and_one_that_does_not_exist_is_refused(cls: type[TrainingRecipe]) -> None:
    recipes = [cls(chat_template=name).recipe() for name in (None, "chatml", "qwen3")]  # type: ignore[call-arg]
    assert len({fingerprint(each, {}) for each in recipes}) == 3
    assert recipes[2]["chat_template_text"] == text_digest(template_families()["qwen3"].read_text(encoding="utf-8"))
    assert "chat_template_text" not in recipes[1]
    with pytest.raises(ConfigError, match="chat_template=chatm: no such template"):
        cls(chat_template="chatm")  # type: ignore[call-arg]
