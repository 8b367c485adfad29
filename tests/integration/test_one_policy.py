"""The model that acts or is measured is the one that was trained: public bugs, planted, stop within two updates."""

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import PeftModel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.two_tensor import TwoTensor

from lineage.artifact import Kind
from lineage.errors import PipelineError
from tasks.base_model import BaseModel
from tasks.context import Resources, TrainContext
from tasks.merge import Merge
from tasks.method import Adapter, Input
from tasks.train.generation import generating_trainer, rollouts
from tasks.train.generation.generating import Sampling
from tasks.train.generation.one_policy import MAX, MEAN, FixedReference, OnePolicy, Sampled, shares_weights, weights_of
from tasks.train.run import TrainingRun
from tests import tiny_models, training
from tests.integration.test_generating import Engine, engine
from tests.training import TRAINED_LIKE

__all__ = ["engine"]
pytestmark = pytest.mark.usefixtures("one_thread")

LORA = Adapter(type="lora", rank=4, alpha=8)
SMALL = 1e-6  # a learning rate whose updates move no log-probability by much
GENERATING = [
    pytest.param(name, marks=[pytest.mark.slow] if name in TRAINED_LIKE else []) for name in training.GENERATING
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_inputs(tmp_path_factory.mktemp("inputs"))


def plant_sampler(monkeypatch: pytest.MonkeyPatch, wrong: Callable) -> None:
    """Replaces the sampler of all methods: ``wrong(sample, model, *args, **kwargs)``."""
    sample = rollouts.sample
    for module in (rollouts, generating_trainer):
        monkeypatch.setattr(module, "sample", lambda *args, **kwargs: wrong(sample, *args, **kwargs))


# --- The comparison ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": Sampling(temperature=0.7, top_p=0.9, top_k=9, min_p=0.01, repetition_penalty=1.2)},
        pytest.param({"adapter": Adapter(type="lora", rank=4, alpha=8, dropout=0.5)}, marks=pytest.mark.slow),
    ],
    ids=["masked", "dropout"],
)
def test_the_sampler_has_the_log_probabilities_of_the_trainer(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, fields: dict
) -> None:
    """Over all tokens, whatever masks the samples, and without the noise of the loss."""
    run = training.train(training.method(name, **fields), root, tmp_path / "output")
    for step, metrics in run.reports:
        assert 0 <= metrics[MEAN] <= metrics[MAX] < 1e-4
        assert metrics["sampler/weights_step"] == step - 1
    assert run.metrics[MEAN] < 1e-4
    assert "unproven" not in caplog.text


def test_the_difference_is_that_of_the_tokens_that_count() -> None:
    policy = OnePolicy(TrainContext(output_dir=Path(), work_dir=Path()))
    trainer = torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -3.0, -1.0]])
    sampler = torch.tensor([[-1.01, -2.0, 0.0], [-1.0, float("nan"), -1.02]])
    policy.compare(sampler, trainer, torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert policy.require(0) == {MEAN: pytest.approx(0.03 / 4), MAX: pytest.approx(0.02)}
    policy.compare(sampler, trainer, torch.ones(2, 3))
    with pytest.raises(PipelineError, match=r"step 4, .* differ by 1\.806 nats on average \(at most 9\), and max_logp"):
        policy.require(3)
    policy.compare(sampler, trainer, torch.zeros(2, 3))
    assert policy.require(4) == {MEAN: 0.0, MAX: 0.0}, "all masked"


def test_a_version_names_the_weights_and_the_adapters_that_act(root: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(root / "policy")
    twin = copy.deepcopy(plain)
    assert weights_of(plain) == weights_of(twin) and not shares_weights(plain, twin)
    with torch.no_grad():
        next(twin.parameters())[0, 0] += 1e-6
    assert weights_of(plain) != weights_of(twin)
    model = get_peft_model(plain, LoraConfig(r=2, target_modules="all-linear"))
    acting = weights_of(model)
    with model.disable_adapter():
        assert weights_of(model) != acting
    assert weights_of(model) == acting == weights_of(model.to(torch.float32))


def test_the_setting_changes_what_stops_and_not_what_is_trained(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = training.method("grpo", num_steps=2)
    expected = training.train(stage, root, tmp_path / "expected")

    def off(sample: Callable, *args: object, sampled: Sampled, **kwargs: object) -> object:
        found = sample(*args, sampled=sampled, **kwargs)
        sampled.logps = [[each - 0.03 for each in row] for row in sampled.logps]
        return found

    plant_sampler(monkeypatch, off)
    with pytest.raises(PipelineError, match=r"max_logp_difference=0\.02"):
        training.train(stage, root, tmp_path / "stopped")
    for number, most in enumerate((0.04, None)):
        resources = Resources(micro_batch_size=8, max_logp_difference=most)
        run = training.train(stage, root, tmp_path / f"run{number}", resources=resources)
        assert run.losses == expected.losses
        assert run.metrics[MEAN] == pytest.approx(0.03, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny_models.ARCHITECTURES)
def test_every_architecture_samples_what_it_trains(root: Path, tmp_path: Path, architecture: str) -> None:
    policy = tiny_models.write_model(tmp_path / "policy", architecture)
    run = training.train(training.method("grpo", num_steps=2), root, tmp_path / "output", policy=policy)
    assert run.metrics[MAX] < 1e-3


# --- Planted: the sampler ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATING)
def test_a_sampler_without_the_adapter_stops_before_an_update(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whose first update nothing shows: the adapter starts at zero (huggingface/trl issue 2698)."""

    def without(sample: Callable, model: object, *args: object, **kwargs: object) -> object:
        with model.disable_adapter():  # type: ignore[attr-defined]
            return sample(model, *args, **kwargs)

    plant_sampler(monkeypatch, without)
    with pytest.raises(
        PipelineError,
        match=r"step 1, which is not taken: .* adapters that act in the sampler are off, and in the trainer default",
    ):
        training.train(training.method(name, adapter=LORA, learning_rate=SMALL), root, tmp_path / "output")


@pytest.mark.parametrize("name", GENERATING)
@pytest.mark.parametrize("rate", [SMALL, 3e-2])
def test_weights_that_stay_behind_stop_at_their_first_use(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, rate: float
) -> None:
    """Not synced after the second step (huggingface/trl issue 5312), at any learning rate."""
    copies: list = []

    def stale(sample: Callable, model: object, *args: object, **kwargs: object) -> object:
        copies.append(copy.deepcopy(model))
        return sample(copies[min(len(copies) - 1, 2)], *args, **kwargs)

    plant_sampler(monkeypatch, stale)
    with pytest.raises(
        PipelineError,
        match=r"step 4, which is not taken: .* lag by 1 updates, and 0 are accepted; the sampler has the weights of "
        r"step 2 \(\w{16}\), the trainer those of step 3 \(\w{16}\)",
    ):
        training.train(training.method(name, learning_rate=rate, num_steps=6), root, tmp_path / "output")


@pytest.mark.parametrize("name", GENERATING)
def test_weights_of_an_earlier_step_that_are_there_only_to_sample_stop_at_their_first_use(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """In the memory of the policy itself, at a learning rate whose updates move no log-probability by much."""
    known: list[dict] = []

    def swapped(sample: Callable, model: torch.nn.Module, *args: object, **kwargs: object) -> object:
        known.append({name: each.clone() for name, each in model.state_dict().items()})
        model.load_state_dict(known[min(len(known), 2) - 1])
        try:
            return sample(model, *args, **kwargs)
        finally:
            model.load_state_dict(known[-1])

    plant_sampler(monkeypatch, swapped)
    with pytest.raises(PipelineError, match=r"step 3, which is not taken: .* lag by 1 updates, and 0 are accepted"):
        training.train(training.method(name, learning_rate=SMALL, num_steps=4), root, tmp_path / "output")


@pytest.mark.parametrize("wrong", ["unsynced", "unsynced, in process", "not asked"])
def test_an_engine_with_old_weights_stops_at_their_first_use(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: type[Engine], wrong: str
) -> None:
    from trl import GRPOTrainer

    engine.last_sync, engine.in_process = 2, "in process" in wrong
    message = {
        "unsynced": r"step 3, .*differ by .* nats on average",
        "unsynced, in process": r"step 3, .*the engine was sent new weights, and has those of the sync before",
        "not asked": r"step 3, .*lag by 1 updates, and 0 are accepted; the sampler has the weights of step 1, the",
    }[wrong]
    if wrong == "not asked":
        engine.last_sync = 99
        turn = GRPOTrainer._generate_single_turn

        def forgets(self: GRPOTrainer, *args: object, **kwargs: object) -> object:
            known, step = self._last_loaded_step, self.state.global_step
            self._last_loaded_step = step if step >= 2 else known
            found = turn(self, *args, **kwargs)
            self._last_loaded_step = known if step >= 2 else step
            return found

        monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", forgets)
    rate = 1e-1 if wrong == "unsynced" else SMALL  # else only its log-probabilities show it
    stage = training.method("grpo", vllm="colocate", learning_rate=rate, num_steps=6, lr_schedule="constant")
    with pytest.raises(PipelineError, match=message):
        training.train(stage, root, tmp_path / "output")


def test_vllm_is_not_compared_where_its_numbers_are_of_another_distribution(
    root: Path, tmp_path: Path, engine: type[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    stage = training.method("online_dpo", vllm="colocate", sampling=Sampling(temperature=0.7), num_steps=1)
    run = training.train(stage, root, tmp_path / "output")
    assert run.metrics[MEAN] == 0
    assert "sampler=unproven: vLLM's log-probabilities are those after temperature=0.7" in caplog.text


def test_a_reward_model_that_moves_stops_before_the_next_update(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = shutil.copytree(root, tmp_path / "inputs")
    training.train(training.method("reward", num_steps=1), root, given / "reward_model")
    scores, scored = rollouts.sequence_scores, []

    def moving(model: torch.nn.Module, *args: torch.Tensor) -> torch.Tensor:
        scored.append(scores(model, *args))
        model.model.layers[0].mlp.up_proj.weight.data.mul_(1.001)
        return scored[-1]

    monkeypatch.setattr(rollouts, "sequence_scores", moving)
    whole = Resources(micro_batch_size=8)
    with pytest.raises(
        PipelineError, match=r"step 2, .*the reward model reward_model were \w{16} when it was loaded, and"
    ):
        training.train(training.method("ppo", rewards=None), given, tmp_path / "output", resources=whole)
    assert len(scored) == 1


# --- Planted: the reference ---------------------------------------------------------------------------------------

COMPARED = {"dpo": {}, "kto": {}, "grpo": {"beta": 0.1}, "rloo": {}, "online_dpo": {}, "ppo": {}}
COMPARING = [
    pytest.param(name, marks=[pytest.mark.slow] if name in TRAINED_LIKE else []) for name in COMPARED
]  # fmt: skip


@pytest.fixture
def after_updates() -> Iterator[Callable[[Callable[[], None]], None]]:
    """Registers what a planted bug does after each update of an optimizer."""
    handles: list = []

    def register(wrong: Callable[[], None]) -> None:
        handles.append(register_optimizer_step_post_hook(lambda *_args: wrong()))

    yield register
    for each in handles:
        each.remove()


def plant_reference(monkeypatch: pytest.MonkeyPatch, wrong: Callable) -> None:
    """Replaces the reference of all methods: ``wrong(policy, reference)``."""
    load = TrainingRun._frozen_policy
    monkeypatch.setattr(TrainingRun, "_frozen_policy", lambda self: wrong(self._start.model, load(self)))


@pytest.mark.parametrize("name", COMPARING)
def test_a_reference_of_the_policys_tensors_stops_before_an_update(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """At step 0 it agrees with the policy, as the right one does (huggingface/trl issue 1500)."""

    def shared(policy: torch.nn.Module, reference: torch.nn.Module) -> torch.nn.Module:
        reference.model.layers[1].mlp.up_proj.weight.data = policy.model.layers[1].mlp.up_proj.weight.data
        return reference

    plant_reference(monkeypatch, shared)
    with pytest.raises(
        PipelineError,
        match=r"step 1, which is not taken: the reference follows the policy: 1 of its \d+ weights are the policy's, "
        r"in one place of memory, such as model\.layers\.1\.mlp\.up_proj\.weight",
    ):
        training.train(training.method(name, **COMPARED[name]), root, tmp_path / "output")


@pytest.mark.parametrize("name", ["grpo", "ppo"])  # TRL's trainer of DPO refuses the object itself
def test_a_reference_that_is_the_policy_stops_before_an_update(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    plant_reference(monkeypatch, lambda policy, _reference: policy)
    with pytest.raises(PipelineError, match=r"step 1, .* follows the policy: (\d+) of its \1 weights are the policy's"):
        training.train(training.method(name, **COMPARED[name]), root, tmp_path / "output")


@pytest.mark.parametrize("name", COMPARING)
def test_a_reference_that_is_copied_from_the_policy_stops_before_the_second_update(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_updates: Callable, name: str
) -> None:
    def followed(policy: torch.nn.Module, reference: torch.nn.Module) -> torch.nn.Module:
        after_updates(lambda: reference.load_state_dict(policy.state_dict()))
        return reference

    plant_reference(monkeypatch, followed)
    stage = training.method(name, **COMPARED[name], learning_rate=SMALL, warmup_ratio=0.0)
    with pytest.raises(
        PipelineError, match=r"step 2, which is not taken: .* its weights were \w{16} at step 0, and are \w{16} now"
    ):
        training.train(stage, root, tmp_path / "output")


@pytest.mark.parametrize("name", COMPARING)
@pytest.mark.parametrize("init", [None, pytest.param("pissa", marks=pytest.mark.slow)])
def test_a_reference_with_the_adapter_in_training_stops_before_an_update(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, init: str | None
) -> None:
    """What switches an adapter off, or to its copy, does nothing: no weight of the reference moves."""
    monkeypatch.setattr(PeftModel, "disable_adapter", lambda self: nullcontext())
    monkeypatch.setattr(PeftModel, "set_adapter", lambda self, *args, **kwargs: None)
    if (name, init) == ("ppo", "pissa"):
        pytest.skip("its reference is a model of its own")
    adapter = Adapter(type="lora", rank=4, alpha=8, init=init)
    with pytest.raises(PipelineError, match=r"step 1, .* follows the policy: the adapter in training acts in it"):
        training.train(training.method(name, **COMPARED[name], adapter=adapter), root, tmp_path / "output")


@pytest.mark.parametrize("moved", ["a base weight", "the frozen copy"])
def test_a_reference_inside_the_policy_that_moves_stops_before_the_second_update(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after_updates: Callable, moved: str
) -> None:
    """The policy without its adapter, or with a frozen copy of it."""
    require = FixedReference.require
    adapter = Adapter(type="lora", rank=4, alpha=8, init="pissa") if moved == "the frozen copy" else LORA
    part = ".ref." if moved == "the frozen copy" else "mlp.up_proj.base_layer"

    def watched(self: FixedReference, step: int) -> None:
        if self._last is None:
            name, weight = next(each for each in self._policy.named_parameters() if part in each[0])
            assert not weight.requires_grad, name
            after_updates(lambda: weight.data.mul_(1.001))
        require(self, step)

    monkeypatch.setattr(FixedReference, "require", watched)
    with pytest.raises(PipelineError, match=r"step 2, which is not taken: .* its weights were \w{16} at step 0"):
        training.train(training.method("dpo", adapter=adapter), root, tmp_path / "output")


def test_a_reference_in_few_bits_is_read_by_the_tensors_that_hold_it() -> None:
    """Such as values and scales: its own class has no view as whole numbers."""
    policy, reference = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    packed = (torch.ones(2, 2, dtype=torch.int8) for _ in range(2))
    reference.weight = torch.nn.Parameter(TwoTensor(*packed), requires_grad=False)
    check = FixedReference(policy, reference)
    check.require(0)
    check.require(0)
    reference.weight.b[0, 0] = 2
    with pytest.raises(PipelineError, match=r"step 2, .* its weights were"):
        check.require(1)
    reference.weight.b = policy.weight.detach()
    with pytest.raises(PipelineError, match=r"1 of its 2 weights are the policy's"):
        FixedReference(policy, reference).require(0)


def test_a_reference_moves_when_its_sync_is_due_and_only_then() -> None:
    """It is read until an update has moved the policy, such as the one after a warmup that starts at zero."""
    policy, reference = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def moved(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.weight.mul_(1.1)

    def checked(every_steps: int | None, first: int, still: int = 0) -> None:
        check = FixedReference(policy, reference, every_steps)
        check.require(first)
        for step in range(first, first + still + 1):
            check.require(step)
        moved(policy)
        moved(reference)
        check.require(first + still + 1)
        moved(reference)
        check.require(first + still + 2)

    checked(1, 0)
    checked(4, 3)  # resumed
    checked(4, 0, still=3)
    for every_steps, first, still in ((None, 0, 0), (None, 0, 5), (2, 0, 0), (4, 4, 0), (4, 0, 4)):
        with pytest.raises(PipelineError, match=rf"step {first + still + 2}, .* its weights were"):
            checked(every_steps, first, still)


# --- Planted: the output -----------------------------------------------------------------------------------------


def test_merged_experts_that_equal_the_base_stop_the_stage(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attention is merged, and the experts are not (unslothai/unsloth issue 5403)."""
    from peft.tuners.lora.layer import ParamWrapper

    policy = tiny_models.write_model(tmp_path / "policy", "mixtral")
    stage = training.method("sft", adapter=LORA, num_steps=2, learning_rate=1e-1)
    merged: list = []

    def kept(self: ParamWrapper, *args: object, **kwargs: object) -> None:
        merged.append(self.parameter_name)

    monkeypatch.setattr(ParamWrapper, "merge", kept)
    with pytest.raises(PipelineError, match=r"merging the adapter .* moved a golden prompt by"):
        training.train(stage, root, tmp_path / "output", policy=policy)
    assert {"gate_up_proj", "down_proj"} <= set(merged)


@pytest.mark.parametrize("wrong", ["weights", "a missing weight", "config"])
def test_an_output_that_loads_as_another_model_stops_the_stage(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    from safetensors.torch import load_file, save_file
    from transformers import PreTrainedModel

    save = PreTrainedModel.save_pretrained

    def saved(self: PreTrainedModel, directory: Path, **options: object) -> None:
        save(self, directory, **options)
        path = Path(directory) / "model.safetensors"
        tensors = load_file(path)
        if wrong == "weights":
            tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
        elif wrong == "a missing weight":
            del tensors["model.layers.1.mlp.up_proj.weight"]
        else:
            config = json.loads((Path(directory) / "config.json").read_text())
            (Path(directory) / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1.0}))
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", saved)
    message = {
        "weights": r"loads with other weights than it was written with: 1 differ, such as model.*up_proj",
        "a missing weight": r"loads with other weights than it was written with: 1 differ",  # it has the base's
        "config": r"saving and loading .* moved a golden prompt",
    }[wrong]
    with pytest.raises(PipelineError, match=message):
        training.train(training.method("sft", num_steps=2), root, tmp_path / "output")


@pytest.mark.parametrize("kind", ["base_model", "converted", "weights"])
def test_a_model_of_another_stage_that_loads_as_another_stops_it_too(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A new base, a model that is converted, and two models in one."""
    import safetensors.torch
    from transformers import PreTrainedModel

    save, save_file = PreTrainedModel.save_pretrained, safetensors.torch.save_file
    stage = Merge(combination="linear") if kind == "weights" else Merge(dtype="fp32")
    policy = Input(name="policy", kind=Kind.CHECKPOINT, fingerprint="f" * 64, path=root / "policy")
    inputs = {"policy": policy, "other": policy} if kind == "weights" else {"policy": policy}

    def saved(self: PreTrainedModel, directory: Path, **options: object) -> None:
        save(self, directory, **options)
        path = Path(directory) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1.0}))

    def with_less(tensors: dict, path: Path, **options: object) -> None:
        save_file({name: each for name, each in tensors.items() if "layers.1.mlp.up_proj" not in name}, path, **options)

    given = {"rows": Input(name="text", kind=Kind.TEXT, fingerprint="t" * 64, path=root / "text")}
    small = BaseModel(vocab_size=300, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2)

    def run(folder: str) -> None:
        ctx = TrainContext(output_dir=tmp_path / folder, work_dir=tmp_path / f"{folder}-work")
        small.run(given, ctx) if kind == "base_model" else stage.run(inputs, ctx)

    run("right")
    if kind == "weights":
        monkeypatch.setattr(safetensors.torch, "save_file", with_less)
        message = r"1 of 21 weights of the model are not in its files, such as model.*up_proj"
    else:
        monkeypatch.setattr(PreTrainedModel, "save_pretrained", saved)
        message = r"saving and loading .* moved a golden prompt"
    with pytest.raises(PipelineError, match=message):
        run("wrong")


@pytest.mark.parametrize("save", [None, "adapter"])
def test_an_adapter_that_loads_as_another_model_stops_the_stage(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: str | None
) -> None:
    """PEFT loads it on its base: here without its scale."""
    write = PeftModel.save_pretrained

    def saved(self: PeftModel, directory: Path, **options: object) -> None:
        write(self, directory, **options)
        path = Path(directory) / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_alpha": 1}))

    monkeypatch.setattr(PeftModel, "save_pretrained", saved)
    stage = training.method("sft", adapter=LORA, save=save, num_steps=2, learning_rate=1e-1)
    with pytest.raises(PipelineError, match=r"saving and loading .* moved a golden prompt"):
        training.train(stage, root, tmp_path / "output")


def test_a_model_that_memory_cannot_hold_twice_is_not_loaded_and_the_log_says_so(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    training.train(training.method("sft", num_steps=1), root, tmp_path / "output")
    assert "output=unproven:" in caplog.text and "it is not loaded and compared" in caplog.text
