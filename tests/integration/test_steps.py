"""A session's primitives: against plain torch, against a training of ``tasks.train``, and resumed to the bit."""

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from lineage.artifact import Kind
from lineage.errors import ArtifactError, ConfigError
from tasks.context import Resources, TrainContext
from tasks.method import Adapter, Optimizer, Schedule
from tasks.recipe import Input
from tasks.steps import Row, Steps
from tasks.train.kernels.machine import plain
from tasks.train.run import TrainingRun
from tasks.train.steps.session import Bases, Session, custom_weights
from tests import training

pytestmark = pytest.mark.usefixtures("one_thread")
LORA = Adapter(rank=2, alpha=4)


def session(
    root: Path, folder: Path, bases: Bases | None = None, model: str = "policy", **fields: object
) -> Session:  # fmt: skip
    policy = Input(name="policy", kind=Kind.CHECKPOINT, fingerprint="0" * 64, path=root / model)
    ctx = TrainContext(output_dir=folder / "output", work_dir=folder / "work", resources=Resources())
    settings = {"learning_rate": 1e-2, "max_length": 64, **fields}
    return Session(Steps(**settings), policy, ctx, bases)  # type: ignore[arg-type]


def rows(number: int = 4, seed: int = 0) -> list[Row]:
    """Rows of several lengths, with every column."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for at in range(number):
        length = 5 + at % 3
        tokens = torch.randint(3, 280, (length + 1,), generator=generator).tolist()
        values = torch.rand(3, length, generator=generator)
        found.append(
            Row(
                tokens=tokens[:-1], target_tokens=tokens[1:], weights=values[0].tolist(),
                logprobs=(-5 - values[1]).tolist(), advantages=(values[2] - 0.5).tolist(),
            )
        )  # fmt: skip
    return found


def padded(found: list[Row], name: str, dtype: torch.dtype) -> torch.Tensor:
    width = max(len(each.tokens) for each in found)
    return torch.tensor(
        [[*getattr(each, name), *[0] * (width - len(each.tokens))] for each in found], dtype=dtype
    )  # fmt: skip


def plain_loss(model: torch.nn.Module, found: list[Row], name: str) -> torch.Tensor:
    """The loss in plain torch, from the formulas of the papers."""
    logits = model(input_ids=padded(found, "tokens", torch.long), use_cache=False).logits.float()
    targets = padded(found, "target_tokens", torch.long)
    logps = logits.gather(2, targets[..., None]).squeeze(2) - logits.logsumexp(2)
    weights, old, advantages = (padded(found, each, torch.float32) for each in ("weights", "logprobs", "advantages"))
    ratio = torch.exp(logps - old)
    if name == "aot":
        sums, reference = ((each * weights).sum(1) for each in (logps, old))
        margins, theirs = ((each[0::2] - each[1::2]).sort().values for each in (sums, reference))
        return -F.logsigmoid(0.1 * (margins - theirs)).sum()
    if name == "dpo":
        margins = ((logps - old) * weights).sum(1)
        return -F.logsigmoid(0.1 * (margins[0::2] - margins[1::2])).sum()
    mask = (weights != 0).float()
    means = ((logps - old) * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    of_row = torch.exp(means.detach() + logps - logps.detach()) * mask  # eq. 14 of its paper
    return {
        "cross_entropy": -(weights * logps),
        "importance_sampling": -(ratio * advantages),
        "ppo": -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages),
        "cispo": -(ratio.clamp(0.0, 4.0).detach() * logps * advantages),
        "dro": -(logps * advantages - 0.025 * ((logps - old) * (advantages != 0)) ** 2),
        "gspo": -torch.minimum(of_row * advantages, of_row.clamp(1 - 3e-4, 1 + 4e-4) * advantages),
    }[name].sum()


@pytest.mark.parametrize("name", ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "dpo", "aot"])
def test_a_loss_and_its_gradients_are_those_of_plain_torch(root: Path, tmp_path: Path, name: str) -> None:
    found = session(root, tmp_path, micro_batch_size=2)  # of pairs, one in each forward pass
    reported = found.backward(rows(), name, {"beta": 0.05} if name == "dro" else None)
    gradients = {key: each.grad.clone() for key, each in found.trained.items() if each.grad is not None}
    found.zero_grad()
    loss = plain_loss(found.model, rows(), name)
    loss.backward()
    assert reported["loss"] == pytest.approx(float(loss.detach()), rel=1e-6)
    assert gradients and any(bool(each.any()) for each in gradients.values())
    for key, each in gradients.items():
        torch.testing.assert_close(each, found.trained[key].grad, rtol=1e-5, atol=1e-7)
    norm = torch.nn.utils.get_total_norm(gradients.values())
    assert reported["grad_norm"] == pytest.approx(float(norm), rel=1e-6)


def test_steps_are_those_of_plain_adamw(root: Path, tmp_path: Path) -> None:
    found, other = session(root, tmp_path), session(root, tmp_path)
    optimizer = torch.optim.AdamW(other.model.parameters(), lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for seed in range(3):
        plain_loss(other.model, rows(seed=seed), "cross_entropy").backward()
        torch.nn.utils.clip_grad_norm_(other.model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.backward(rows(seed=seed))
        reported = found.step(betas=[0.8, 0.9], eps=1e-6, weight_decay=0.1, max_grad_norm=0.5)
        assert reported["learning_rate"] == 1e-2 and not reported["overflow"]
    assert found.digest() != session(root, tmp_path).digest()
    for key, each in found.trained.items():
        torch.testing.assert_close(each, dict(other.model.named_parameters())[key], rtol=1e-5, atol=1e-6)
    assert found.optimization.learning_rate == 1e-2


def test_sft_by_primitives_has_the_trajectory_of_the_method(root: Path, tmp_path: Path) -> None:
    """The optimizer, schedule and clipping of a recipe, on the same rows in the same order."""
    settings = {"schedule": Schedule(name="linear", warmup=0.0), "optimizer": Optimizer(weight_decay=0.1)}
    method = training.method("sft", **settings)
    trained = training.train(method, root, tmp_path / "sft" / "output")
    ctx = TrainContext(output_dir=tmp_path / "o", work_dir=tmp_path / "w", resources=Resources(micro_batch_size=4))
    ordered = TrainingRun(method, training.inputs(root, method), ctx).ordered_rows
    found = session(
        root, tmp_path, learning_rate=method.learning_rate, num_steps=3, max_length=128, micro_batch_size=4, **settings
    )
    losses = []
    for step in range(3):
        batch = [
            Row(tokens=ordered[at]["input_ids"], labels=ordered[at]["labels"]).shifted
            for at in range(step * 8, step * 8 + 8)
        ]
        num_trained = sum(sum(each.weights or ()) for each in batch)
        losses.append(float(str(found.backward(batch)["loss"])) / num_trained)
        for each in found.trained.values():
            each.grad /= num_trained  # type: ignore[operator]
        found.step()
    assert losses == pytest.approx(trained.losses, rel=1e-5)
    found.write_model()
    ours, theirs = training.weights(tmp_path / "output"), training.weights(trained.output)
    assert ours.keys() == theirs.keys()
    for name, each in ours.items():
        torch.testing.assert_close(each, theirs[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", [{}, {"adapter": Adapter(rank=2, alpha=4, dropout=0.5)}])
def test_a_saved_session_resumes_to_the_bit(root: Path, tmp_path: Path, fields: dict[str, object]) -> None:
    """Between two backward calls, with dropout: gradients, random state and counts are part of it."""
    one = session(root, tmp_path / "one", **fields)
    one.backward(rows())
    one.step()
    one.generate([[5, 6]], max_tokens=2)
    one.backward(rows(seed=1))
    one.save(tmp_path / "saved")

    def rest(each: Session) -> list[object]:
        results: list[object] = [each.backward(rows(seed=2)), each.step(), each.generate([[5, 6]], max_tokens=3)]
        return [*results, each.backward(rows(seed=3)), each.step(), each.digest()]

    expected = rest(one)
    two = session(root, tmp_path / "two", **{**fields, "seed": 5})
    torch.manual_seed(9)
    two.load(tmp_path / "saved")
    assert two.num_accumulated == 1 and two.step_number == 1
    # The noise of generation is of the session's own seed.
    object.__setattr__(two.method, "seed", 0)
    assert rest(two) == expected


def test_lora_sessions_share_the_weights_of_one_base_and_nothing_else(root: Path, tmp_path: Path) -> None:
    bases: Bases = {}
    one, two = (session(root, tmp_path / str(seed), bases, adapter=LORA, seed=seed) for seed in (0, 1))
    alone = session(root, tmp_path / "alone", adapter=LORA, seed=1)
    places = [
        {each.data_ptr() for each in found.model.parameters() if not each.requires_grad} for found in (one, two, alone)
    ]
    assert places[0] == places[1] and not places[0] & places[2]
    assert not {each.data_ptr() for each in one.trained.values()} & {each.data_ptr() for each in two.trained.values()}
    for _ in range(2):
        one.backward(rows())
        one.step()
    results = []
    for found in (two, alone):
        results.append([found.backward(rows(seed=1)), found.step(), found.logprobs([[4, 5, 6]]), found.digest()])
    assert results[0] == results[1]
    assert len(bases) == 1


def test_completions_have_the_log_probabilities_that_the_session_gives_their_tokens(root: Path, tmp_path: Path) -> None:
    found = session(root, tmp_path)
    made = found.generate([[5, 6, 7], [8]], max_tokens=6, num_samples=2, seed=3, temperature=0.7)
    again = found.generate([[5, 6, 7], [8]], max_tokens=6, num_samples=2, seed=3, temperature=0.7)
    assert made == again and made != found.generate([[5, 6, 7], [8]], max_tokens=6, num_samples=2, seed=4)
    assert made["weights"] == found.digest()
    for prompt, group in zip(([5, 6, 7], [8]), made["completions"], strict=True):  # type: ignore[call-overload]
        for each in group:
            [logps] = found.logprobs([[*prompt, *each["tokens"]]])["logprobs"]  # type: ignore[misc]
            assert logps[len(prompt) :] == pytest.approx(each["logprobs"], abs=1e-5)
            assert each["text"] == found.tokenizer.decode(each["tokens"])
    [[greedy]] = found.generate([[5, 6]], max_tokens=4, temperature=0, stop=[])["completions"]  # type: ignore[misc]
    assert greedy["stop_reason"] == "length" and len(greedy["tokens"]) == 4
    [[stopped]] = found.generate([[5, 6]], max_tokens=4, temperature=0, stop=[greedy["tokens"][1]])["completions"]  # type: ignore[misc]
    assert stopped["stop_reason"] == "stop" and stopped["tokens"] == greedy["tokens"][: len(stopped["tokens"])]
    text = found.tokenizer.decode(greedy["tokens"][:2])
    [[stopped]] = found.generate([[5, 6]], max_tokens=4, temperature=0, stop=text)["completions"]  # type: ignore[misc]
    assert stopped["stop_reason"] == "stop" and stopped["text"].endswith(text)


def test_a_forward_changes_nothing_and_gives_what_a_backward_gives(root: Path, tmp_path: Path) -> None:
    found = session(root, tmp_path)
    before = found.digest()
    read = found.forward(rows(), "ppo", logits=True, hidden_states=True)
    assert all(each.grad is None for each in found.trained.values()) and found.digest() == before
    trained = found.backward(rows(), "ppo")
    assert (read["loss"], read["logprobs"]) == (trained["loss"], trained["logprobs"])
    logits, logps = torch.tensor(read["logits"][0]), read["logprobs"][0]  # type: ignore[index]
    assert logits.log_softmax(-1)[0, rows()[0].target_tokens[0]] == pytest.approx(logps[0], abs=1e-5)  # type: ignore[index]
    assert torch.tensor(read["hidden_states"][0]).shape == (len(rows()[0].tokens), 32)  # type: ignore[index]


def test_gradients_add_up_until_a_step_or_zero_grad(root: Path, tmp_path: Path) -> None:
    whole, parts = session(root, tmp_path), session(root, tmp_path)
    parts.backward(rows(seed=7))
    parts.zero_grad()
    with pytest.raises(ConfigError, match="there are no gradients"):
        parts.step()
    one = whole.backward(rows(8))
    parts.backward(rows(8)[:4])
    two = parts.backward(rows(8)[4:])
    assert two["num_accumulated"] == 2 and two["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
    with pytest.raises(ConfigError, match="data has no rows"):
        parts.backward([], accumulate=False)
    assert parts.num_accumulated == 2
    again = parts.backward(rows(8), accumulate=False)
    assert again == one and again["num_accumulated"] == 1


def test_a_custom_loss_has_the_gradients_of_autograd(root: Path, tmp_path: Path) -> None:
    found = session(root, tmp_path)

    def loss(data: list[Row], logps: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
        value = sum((each.mean() ** 2 for each in logps), torch.tensor(0.0)) + logps[0].max()
        return value, {"rows": float(len(data))}

    read = found.forward(rows())
    weighted, value, metrics = custom_weights(loss, rows(), read["logprobs"])  # type: ignore[arg-type]
    found.backward(weighted)
    gradients = {key: each.grad.clone() for key, each in found.trained.items()}
    found.zero_grad()
    logits = found.model(input_ids=padded(rows(), "tokens", torch.long)).logits.float()
    targets = padded(rows(), "target_tokens", torch.long)
    logps = logits.log_softmax(-1).gather(2, targets[..., None]).squeeze(2)
    direct, _ = loss(rows(), [each[: len(row.tokens)] for row, each in zip(rows(), logps, strict=True)])
    direct.backward()
    assert value == pytest.approx(float(direct), rel=1e-5) and metrics == {"rows": 4.0}
    for key, each in gradients.items():
        torch.testing.assert_close(each, found.trained[key].grad, rtol=1e-4, atol=1e-5)


def test_gradients_that_overflow_update_nothing(root: Path, tmp_path: Path) -> None:
    found = session(root, tmp_path)
    before = found.digest()
    [row] = rows(1)
    huge = Row(tokens=row.tokens, target_tokens=row.target_tokens, weights=[3e38] * len(row.tokens))
    reported = found.backward([huge])
    assert reported["overflow"] and reported["grad_norm"] is None
    assert found.step() == {"step": 0, "learning_rate": 1e-2, "grad_norm": None, "overflow": True}
    assert found.digest() == before
    found.backward(rows())
    assert found.step()["step"] == 1 and found.digest() != before


def test_fp16_scales_the_loss_and_its_scale_is_saved(root: Path, tmp_path: Path) -> None:
    """Gradients are those of fp32 up to rounding; one that overflows halves the scale and changes no weight."""
    half, whole = session(root, tmp_path, precision="fp16"), session(root, tmp_path)
    norms = [each.backward(rows())["grad_norm"] for each in (half, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-2) and norms[0] != norms[1]
    assert half.step()["loss_scale"] == half.loss_scale == 1024
    before, [row] = half.digest(), rows(1)
    huge = Row(tokens=row.tokens, target_tokens=row.target_tokens, weights=[1e37] * len(row.tokens))
    assert half.backward([huge])["overflow"]
    assert half.step() == {"step": 1, "learning_rate": 1e-2, "grad_norm": None, "overflow": True, "loss_scale": 512}
    assert half.digest() == before
    half._num_finite = 1999
    half.save(tmp_path / "saved")
    other = session(root, tmp_path, precision="fp16")
    other.load(tmp_path / "saved")
    results = [[each.backward(rows()), each.step(), each.generate([[5, 6]], max_tokens=2)] for each in (half, other)]
    assert results[0] == results[1] and other.loss_scale == 1024


ROW = {"tokens": [5, 6], "target_tokens": [6, 7], "weights": [1.0, 1.0]}


@pytest.mark.parametrize(
    ("data", "loss", "options", "message"),
    [
        ([], "cross_entropy", {}, "data has no rows"),
        ([ROW], "crossentropy", {}, "loss=crossentropy: cross_entropy, importance_sampling"),
        ([ROW], "cross_entropy", {"beta": 1.0}, "cross_entropy has no option beta"),
        ([ROW], "ppo", {"clip_low_threshold": math.nan}, "a finite number is accepted"),
        ([ROW], "ppo", {}, r"data\[0\].logprobs is missing"),
        ([ROW], "dpo", {}, "data has 1 rows; pairs are accepted"),
        ([{**ROW, "tokens": [5, 300_000]}], "cross_entropy", {}, "300000 is no token of this model"),
        ([{**ROW, "target_tokens": [6, -1]}], "cross_entropy", {}, "-1 is no token of this model"),
        ([{**ROW, "tokens": []}], "cross_entropy", {}, r"data\[0\].tokens is empty"),
        ([{**ROW, "tokens": [5] * 65}], "cross_entropy", {}, "max_length=64"),
        ([{**ROW, "weights": [1.0]}], "cross_entropy", {}, "weights has 1 values, and tokens has 2"),
        ([{**ROW, "weights": [1.0, math.inf]}], "cross_entropy", {}, "non-finite"),
        ([{**ROW, "weights": [1.0, math.nan]}], "cross_entropy", {}, "non-finite"),
        ([{"tokens": [5, 6]}], "cross_entropy", {}, "no target_tokens and no labels"),
    ],
)
def test_bad_rows_are_refused_with_a_sentence_and_the_session_stays_as_it_is(
    bad: Session, data: list[dict[str, object]], loss: str, options: dict[str, float], message: str
) -> None:
    before = bad.digest()
    with pytest.raises(ConfigError, match=message):
        bad.backward([Row(**each) for each in data], loss, options)  # type: ignore[arg-type]
    assert bad.num_accumulated == 0 and bad.digest() == before
    bad.forward([Row(**ROW)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"max_tokens": 64}, "max_length=64 are accepted in all"),
        ({"stop": [""]}, "stop="),
    ],
)
def test_bad_sampling_is_refused(bad: Session, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bad.generate([[5]], **settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def bad(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Session:
    return session(root, tmp_path_factory.mktemp("bad"))


def test_a_state_of_another_session_is_refused(root: Path, tmp_path: Path) -> None:
    session(root, tmp_path, adapter=LORA).save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="a session with the same model and adapter"):
        session(root, tmp_path).load(tmp_path / "saved")
    with pytest.raises(ArtifactError, match="no state of a session"):
        session(root, tmp_path).load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_steps": None}, "num_steps=null"),
        ({"adapter": Adapter(init="eva")}, "adapter.init"),
        ({"adapter": Adapter(type="adalora")}, "adalora"),
    ],
)
def test_settings_that_a_session_cannot_apply_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Steps(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("targets", ["all-linear,head", "head"])
def test_an_adapter_on_the_head_is_trained_sampled_and_merged(root: Path, tmp_path: Path, targets: str) -> None:
    """Embedding and head of the policy are one matrix: the merged model has two."""
    found = session(root, tmp_path, adapter=Adapter(rank=2, alpha=4, target_modules=targets))
    assert plain(found.model).config.tie_word_embeddings
    [name] = [each for each in found.trained if "lm_head.lora_B" in each]
    before = found.logprobs([[5, 6, 7]])
    found.backward(rows())
    found.step()
    assert bool(found.trained[name].any()) and len(found.trained) == (30 if "linear" in targets else 2)
    trained = found.logprobs([[5, 6, 7]])
    assert trained != before
    [[made]] = found.generate([[5, 6]], max_tokens=4, seed=1, stop=[])["completions"]  # type: ignore[misc]
    [again] = found.logprobs([[5, 6, *made["tokens"]]])["logprobs"]  # type: ignore[misc]
    assert again[2:] == pytest.approx(made["logprobs"], abs=1e-5)
    found.write_model()
    merged = training.weights(tmp_path / "output")
    assert not torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])
    other = session(tmp_path, tmp_path / "other", model="output")
    assert other.logprobs([[5, 6, 7]])["logprobs"][0][1:] == pytest.approx(trained["logprobs"][0][1:], abs=1e-5)  # type: ignore[index]
    saved = load_file(tmp_path / "output" / "adapter" / "adapter_model.safetensors")
    assert all(".lora_" in each for each in saved)


def test_the_output_of_a_lora_session_is_merged_as_of_every_training(root: Path, tmp_path: Path) -> None:
    found = session(root, tmp_path, adapter=LORA)
    found.backward(rows())
    found.step()
    metrics = found.write_model()
    assert metrics and (tmp_path / "output" / "adapter" / "adapter_model.safetensors").exists()
    merged = training.weights(tmp_path / "output")
    assert not training.same(merged, training.weights(root / "policy"))
