"""Settings of adapters and of parts of a model: what is refused before any model is loaded, and the recipe."""

from dataclasses import replace
from pathlib import Path

import pytest

from lineage.errors import ArtifactError, ConfigError
from lineage.store import Entry, InputRecord, Manifest, SourceRecord, Store
from tasks.dpo import DPO
from tasks.method import Adapter, Quantization
from tasks.model.adapter_files import Base, base_and_adapters
from tasks.reward_model import RewardModel
from tasks.sft import SFT
from tasks.train.models.adapters import ADAPTERS, targets
from tasks.train.models.freeze import Freeze
from tests.written_store import WrittenStore

LINEAR = [f"model.layers.{block}.{part}" for block in (0, 1) for part in ("self_attn.q_proj", "mlp.up_proj")]
PARAMETERS = ["model.embed_tokens.weight", *(f"{name}.weight" for name in LINEAR), "model.norm.weight"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"type": "vera", "alpha": 8}, "adapter.alpha=8: vera has no such field; it has: dropout, rank"),
        ({"type": "oft", "dropout": 0.1}, "adapter.dropout=0.1: oft has no such field"),
        ({"type": "ia3", "rank": 8}, "ia3 has no such field; it has: none"),
        ({"block_size": 8}, "lora has no such field.*oft, boft"),
        ({"init": "loftq"}, "accepted are gaussian"),
        ({"init": "pissa_niter_0"}, "accepted are gaussian, xavier, xavier_uniform, pissa"),
        ({"dropout_position": "post"}, "dropout_position=post with adapter.dropout=0: nothing is dropped"),
        ({"type": "dora", "dropout": 0.1, "dropout_position": "post"}, "dora has no such field"),
        ({"type": "dora", "init": "pissa"}, "DoRA splits"),
        ({"type": "adalora", "rank": 4, "target_rank": 4}, "set a smaller target_rank, such as 2"),
        ({"modules_to_save": "norm,,"}, "adapter.modules_to_save='norm,,': a name is empty"),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Adapter(**fields)


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (SFT, {"adapter_in": "stack"}, "adapter_in=stack: this stage has no adapter"),
        (SFT, {"adapter": Adapter(target_modules="lm_head")}, "never be trained; remove it, or train it in full: adap"),
        (DPO, {"adapter": Adapter(target_modules="mlp,head")}, "of head directly.*modules_to_save=lm_head"),
        (SFT, {"adapter": Adapter(), "freeze": Freeze(modules="mlp")}, "every weight of the base is frozen"),
        (RewardModel, {"adapter": Adapter(), "adapter_in": "continue"}, "its adapter is merged"),
        (RewardModel, {"adapter": Adapter(init="lora_ga")}, "adapter.init=lora_ga"),
        (DPO, {"adapter": Adapter(init="pissa"), "adapter_in": "continue"}, "adapter_in=continue with adapter.init"),
        (DPO, {"adapter": Adapter(type="osf"), "adapter_in": "continue"}, "adapter_in=continue with adapter.type=osf"),
        (DPO, {"adapter": Adapter(type="vera"), "adapter_in": "stack"}, "adapter_in=stack with adapter.type=vera"),
        (DPO, {"adapter": Adapter(type="dora"), "adapter_in": "stack"}, "adapter_in=stack with adapter.type=dora"),
        (
            DPO,
            {
                "adapter": Adapter(), "adapter_in": "stack",
                "quantization": Quantization(format="nf4", merge="dequantized"),
            },
            "adapter_in=stack with quantization.merge=dequantized",
        ),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together_are_refused(cls, fields, message):
    with pytest.raises(ConfigError, match=message):
        cls(**fields)


def test_recipes_leave_out_what_is_off_and_what_a_type_does_not_read():
    assert Adapter().identity() == {
        "adapter": {"rank": 16, "alpha": 32, "dropout": 0.0, "target_modules": "all-linear"}
    }
    assert Adapter(type="ia3").identity() == {"adapter": {"type": "ia3", "target_modules": "all-linear"}}
    assert not {"adapter_in", "freeze", "neftune_alpha"} & SFT(adapter_in="merge", adapter=Adapter()).recipe().keys()


def test_every_type_names_its_paper():
    assert all("arXiv:" in row.paper for row in ADAPTERS.values())


def test_targets_are_groups_names_globs_and_layers():
    assert targets(Adapter(target_modules="attention"), LINEAR) == LINEAR[::2]
    assert targets(Adapter(target_modules="up_proj,*.0.*"), LINEAR) == [LINEAR[0], LINEAR[1], LINEAR[3]]
    assert targets(Adapter(layers=(1,), exclude_modules="mlp"), LINEAR) == [LINEAR[2]]


def test_frozen_are_all_but_the_last_layers_or_what_is_named():
    assert Freeze(except_last_layers=1).frozen(PARAMETERS) == set(PARAMETERS[:3])
    images = [f"model.vision_tower.layers.{block}.q_proj.weight" for block in range(5)]  # more blocks than the text has
    assert Freeze(except_last_layers=1).frozen([*images, *PARAMETERS]) == {*images, *PARAMETERS[:3]}
    assert Freeze(modules="mlp,*norm*").frozen(PARAMETERS) == {PARAMETERS[2], PARAMETERS[4], PARAMETERS[5]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"except_last_layers": 2}, "the model has 2 layers"),
        ({"modules": "w2"}, "no module w2; it has embed_tokens"),
        ({"modules": "*"}, "every weight is frozen"),
    ],
)
def test_a_freeze_of_nothing_or_of_all_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Freeze(**fields).frozen(PARAMETERS)
    with pytest.raises(ConfigError, match="one of them"):
        Freeze()


CHAMPION = "source:champion"


@pytest.fixture
def champion(tmp_path: Path) -> tuple[Entry, Manifest]:
    """A model of the real store, which an alias names there."""
    written = WrittenStore(tmp_path / "store")
    manifest = written.stage("sft", {"rows": written.source("rows")})
    return Store(written.root).entry("sft", manifest.fingerprint), manifest


@pytest.fixture
def adapter(tmp_path: Path, champion: tuple[Entry, Manifest]) -> Path:
    """An adapter on it, in the store of a rehearsal."""
    entry, manifest = champion
    place = tmp_path / "store" / "rehearsals" / "1" / "dpo" / ("a" * 16)
    output = place / "output"
    output.mkdir(parents=True)
    Base(name=CHAMPION, fingerprint=manifest.fingerprint, digest=manifest.output_digest).write(output)
    named = SourceRecord(
        path=str(entry.output), kind="checkpoint", revision="alias:champion", split="train", labels=[], files={},
        dvc=None,
    )  # fmt: skip
    given = InputRecord(
        artifact=CHAMPION, fingerprint=manifest.fingerprint, digest=manifest.output_digest, source=named
    )
    (place / "manifest.json").write_text(replace(manifest, inputs={"policy": given}).to_json())
    return output


def test_what_an_alias_named_is_found_in_its_store(adapter: Path, champion: tuple[Entry, Manifest]) -> None:
    assert base_and_adapters(adapter) == (champion[0].output, [adapter])


def test_and_is_refused_where_it_is_gone_or_another(adapter: Path, champion: tuple[Entry, Manifest]) -> None:
    entry, manifest = champion
    (entry.path / "manifest.json").write_text(replace(manifest, fingerprint="f" * 64).to_json())
    with pytest.raises(ArtifactError, match=r"is an adapter on source:champion .* has no such artifact"):
        base_and_adapters(adapter)
    (entry.path / "manifest.json").unlink()
    with pytest.raises(ArtifactError, match="has no such artifact"):
        base_and_adapters(adapter)


@pytest.mark.parametrize(
    ("fields", "raised"),
    [
        ({"adapter": Adapter(dropout=0.1), "adapter_in": "continue"}, True),
        ({"adapter": Adapter(dropout=0.1, init="pissa")}, True),
        ({"adapter": Adapter(), "adapter_in": "continue"}, False),
        ({"adapter": Adapter(dropout=0.1)}, False),
        ({"adapter": Adapter(dropout=0.1, init="gaussian")}, False),
    ],
)
def test_trainings_whose_reference_had_dropout_are_other_ones_now(fields, raised):
    dpo = DPO(learning_rate=1e-3, num_steps=1, global_batch_size=8, max_length=64, **fields)
    assert ("reference_version" in dpo.recipe()) is raised
    sft = SFT(learning_rate=1e-3, num_steps=1, global_batch_size=8, max_length=64, **fields)
    assert "reference_version" not in sft.recipe()


@pytest.mark.parametrize(
    ("adapter_in", "precision", "raised"),
    [("stack", "bf16", True), ("stack", "auto", True), ("stack", "fp32", False), ("continue", "bf16", False)],
)
def test_a_stack_on_a_base_in_bf16_has_a_version(adapter_in, precision, raised):
    """At first it rounded what the adapter below has in full."""
    assert ("stack_version" in SFT(adapter=Adapter(), adapter_in=adapter_in, precision=precision).recipe()) is raised
