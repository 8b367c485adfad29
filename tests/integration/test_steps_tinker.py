"""The public tinker client, in an environment of its own, against the server; and the protocol without it."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
import torch

from flows.steps.tinker import MESSAGES, SCHEMA, settings_of
from tasks.method import Adapter
from tasks.train.steps.session import custom_weights
from tests import training
from tests.integration.test_steps import session
from tests.steps_server import Served

CLIENT, COOKBOOK = "tinker==0.38.0", "tinker-cookbook==0.6.1"
BASE = "meta-llama/Llama-3.2-1B"  # a folder of that name: the cookbook knows which renderer it has
ROWS = [[5, 6, 7, 8], [9, 10, 11], [12, 13], [14, 15, 16, 17]]
pytestmark = pytest.mark.usefixtures("one_thread")

_FIELDS = """
import json
from tinker.proto import tinker_public_pb2 as found
known = found.DESCRIPTOR.message_types_by_name
print(json.dumps({name: {str(each.number): each.name for each in known[name].fields} for name in known}))
"""


def environment(config: pytest.Config, name: str, *installs: tuple[str, ...]) -> Path:
    """An interpreter with packages, kept for later runs of the tests."""
    folder = config.cache.mkdir("tinker") / name  # type: ignore[union-attr]
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        uv = [sys.executable, "-m", "uv"]
        subprocess.run([*uv, "venv", "--quiet", "--clear", str(folder), "--python", sys.executable], check=True)
        for packages in installs:
            install = [*uv, "pip", "install", "--quiet", "--python", str(python), *packages]
            if subprocess.run(install, check=False, timeout=1200).returncode:
                pytest.skip(f"{name} cannot be installed here")
        (folder / "ready").touch()
    return python


@pytest.fixture(scope="session")
def cookbook_python(pytestconfig: pytest.Config) -> Path:
    """With the cookbook, and the requirements of an earlier version: one of its own may not be there."""
    needs = ("tinker-cookbook==0.5.8", CLIENT, "sympy", "pylatexenc", "math-verify")
    return environment(pytestconfig, COOKBOOK, needs, ("--no-deps", COOKBOOK))


def run(python: Path, *arguments: str) -> dict[str, object]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(
        [str(python), *arguments], env={**environment, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_our_messages_have_the_fields_of_the_client(cookbook_python: Path) -> None:
    theirs = run(cookbook_python, "-c", _FIELDS)
    shared = [name for name in SCHEMA if name in theirs]
    assert len(shared) >= 9 and "SampleResponse" in shared
    for name in shared:
        for part in filter(None, SCHEMA[name].split("; ")):
            number, own, _ = part.split()
            assert theirs[name][number] == own, (name, part)  # type: ignore[index]


@pytest.mark.slow
def test_the_public_client_trains_samples_saves_and_resumes(cookbook_python: Path, tmp_path: Path) -> None:
    """Against a session in this process, whose losses and gradients are those of plain torch (``test_steps.py``)."""
    training.write_models(tmp_path)
    script = Path(__file__).parents[1] / "steps_sdk.py"
    with Served(tmp_path / "steps").running() as served:
        found = run(cookbook_python, str(script), served.url, served.key, str(tmp_path / "policy"))
        audited = {each["client"] for each in served.engine.records.audited()}
    assert audited == {"tinker"}
    adapter = Adapter(rank=2, target_modules="all-linear,head")
    own = session(tmp_path, tmp_path / "own", adapter=adapter, seed=1, max_length=128)
    losses, norms = [], []
    settings = {"learning_rate": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0}
    for name, options in (
        ("cross_entropy", {}), ("importance_sampling", {}),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}), ("dro", {"beta": 0.05}), ("gspo", {}),
        ("cispo", {}),
    ):  # fmt: skip
        losses.append(own.backward(rows(), name, options)["loss"])
        norms.append(own.step(**settings)["grad_norm"])  # type: ignore[arg-type]
    read = own.forward(rows())
    weighted, _, _ = custom_weights(lambda _, logps: (torch.cat(logps).square().sum(), {}), rows(), read["logprobs"])
    own.backward(weighted)
    norms.append(own.step(**settings)["grad_norm"])  # type: ignore[arg-type]
    assert found["custom"]["rows"] == 4  # type: ignore[index]
    assert found["losses"] == pytest.approx(losses, rel=1e-6) and found["norms"] == pytest.approx(norms, rel=1e-6)
    assert len(set(found["norms"])) == 7 and all(found["norms"])  # type: ignore[arg-type,call-overload]
    for theirs, ours in zip(found["logprobs"], read["logprobs"], strict=True):  # type: ignore[call-overload]
        assert np.allclose(theirs, ours, rtol=1e-6)
    made = own.generate([[5, 6, 7]], max_tokens=4, num_samples=2, seed=3, stop=[])
    for theirs, ours in zip(found["sampled"], made["completions"][0], strict=True):  # type: ignore[call-overload,index]
        assert theirs[0] == ours["tokens"] and "length" in theirs[2]
        assert np.allclose(theirs[1], ours["logprobs"], rtol=1e-5)
    [prompt] = own.logprobs([[5, 6, 7]])["logprobs"]  # type: ignore[misc]
    assert found["prompt"][0] is None and found["prompt"][1:] == pytest.approx(prompt[1:], rel=1e-5)  # type: ignore[index]
    assert found["path"].startswith("tinker://") and found["path"].endswith(":train:0/weights/one")  # type: ignore[attr-defined]
    trained, before, again = found["again"]  # type: ignore[misc]
    assert trained == again and trained != before
    assert found["base"] != found["prompt"] and found["info"] == str(tmp_path / "policy")
    assert "weights is missing" in str(found["refused"])


def write_datasets(folder: Path) -> None:
    """Tiny rows in folders with the names of the sets that the loops load."""

    def write(name: str, rows: list[dict[str, object]]) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(each) + "\n" for each in rows))

    def reported(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"sum {number}"}, {"role": "assistant", "content": f"{number}"}]

    for split, count in (("train", 270), ("test", 20)):
        write(f"HuggingFaceH4/no_robots/{split}.jsonl", [{"messages": reported(each)} for each in range(count)])
        pairs: list[dict[str, object]] = [
            {name: f"\n\nHuman: sum {each}\n\nAssistant: {name}" for name in ("chosen", "rejected")}
            for each in range(40)
        ]
        write(f"Anthropic/hh-rlhf/{split}.jsonl", pairs)
        write(f"openai/gsm8k/main/{split}.jsonl", [{"question": "2 + 2", "answer": "#### 4"} for _ in range(20)])
    head = "---\nconfigs:\n- config_name: main\n  data_files:\n"
    files = "".join(f"  - split: {each}\n    path: main/{each}.jsonl\n" for each in ("train", "test"))
    (folder / "openai/gsm8k/README.md").write_text(f"{head}{files}---\n")


RECIPES = {
    "sl_loop": "batch_size=4 max_steps=3 save_every=2 max_length=256 learning_rate=1e-2",
    "sl_basic": "max_steps=2 eval_every=0",
    "rl_loop": "batch_size=2 group_size=2 max_tokens=4 max_steps=2 loss_fn=importance_sampling",
    "math_rl.train": "env=arithmetic group_size=4 groups_per_batch=2 max_tokens=3 max_steps=2 eval_every=0 "
    "save_every=0 loss_fn=importance_sampling behavior_if_log_dir_exists=delete",
    "preference.dpo.train": "dataset=hhh batch_size=4 max_steps=2 max_length=256 behavior_if_log_dir_exists=delete",
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loop_of_the_cookbook_runs_unmodified_and_offline(
    cookbook_python: Path, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    training.write_models(tmp_path)
    (tmp_path / BASE).parent.mkdir()
    (tmp_path / "policy").rename(tmp_path / BASE)
    write_datasets(tmp_path)
    with Served(tmp_path / "steps").running() as served:
        ran = subprocess.run(
            [cookbook_python, "-m", f"tinker_cookbook.recipes.{recipe}", f"base_url={served.url}", f"model_name={BASE}",
             *RECIPES[recipe].split(), f"log_path={tmp_path / 'log'}"],
            env={**os.environ, "TINKER_API_KEY": served.key, "TINKER_TELEMETRY": "0", "HF_HUB_OFFLINE": "1"},
            cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-5000:]
        calls = Counter(each["name"] for each in served.engine.records.calls() if each["state"] == "done")
        failed = [each["name"] for each in served.engine.records.calls() if each["state"] != "done"]
    logged = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert not failed and len(logged) >= 2
    if "rl" in recipe:  # all answers of a random model are wrong: none of its loops takes a step then
        assert calls["generate"] >= 4
    else:
        assert calls["backward"] >= 2 and calls["step"] >= 2
    if recipe == "preference.dpo.train":
        assert logged[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert logged[1]["dpo_loss"] < logged[0]["dpo_loss"]


def rows() -> list[object]:
    from tasks.steps import Row

    return [
        Row(
            tokens=each[:-1], target_tokens=each[1:], weights=[0.25] * (len(each) - 1),
            logprobs=[-5.5] * (len(each) - 1), advantages=[0.5 * (-1) ** at for at in range(len(each) - 1)],
        )
        for each in ROWS
    ]  # fmt: skip


def request(model: str, seq: int, loss: str = "cross_entropy", *, forward_only: bool = False) -> bytes:
    message = MESSAGES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn=loss, forward_only=forward_only)
    for each in ROWS:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(each[:-1], dtype=np.int32).tobytes()
        columns = {
            "target_tokens": np.array(each[1:], dtype=np.int64),
            "weights": np.ones(len(each) - 1, dtype=np.float32),
        }
        for name, values in columns.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), 1 if values.dtype == np.float32 else 2
            tensor.shape.append(len(values))
    return bytes(message.SerializeToString())


@pytest.mark.parametrize(
    ("flags", "targets"),
    [
        ({}, "all-linear,head"), ({"train_unembed": False}, "all-linear"), ({"train_mlp": False}, "attention,head"),
        ({"train_attn": False, "train_unembed": False}, "mlp"), ({"train_attn": False, "train_mlp": False}, "head"),
    ],
)  # fmt: skip
def test_the_layers_of_a_lora_are_those_of_the_client(tmp_path: Path, flags: dict[str, bool], targets: str) -> None:
    found = settings_of({"lora_config": {"rank": 4, **flags}}, tmp_path)
    assert found["adapter"] == {"rank": 4, "target_modules": targets}


def test_the_protocol_without_the_client(tmp_path: Path) -> None:
    """The wire: promises, order with the first chunk last, protobuf in and out, refusals that are not retried."""
    training.write_models(tmp_path)
    with Served(tmp_path / "steps").running() as served:
        http = httpx.Client(base_url=f"{served.url}/api/v1", headers={"X-API-Key": served.key}, timeout=60)

        def future(answer: httpx.Response) -> httpx.Response:
            assert answer.status_code == 200, answer.text
            return http.post("/retrieve_future", json={"request_id": answer.json()["request_id"]})

        made = http.post("/create_session", json={"sdk_version": "0.38.0"}).json()
        name = made["session_id"]
        body = {
            "session_id": name, "model_seq_id": 0, "base_model": str(tmp_path / "policy"),
            "lora_config": {"rank": 2, "train_mlp": True, "train_attn": True},
        }  # fmt: skip
        model = future(http.post("/create_model", json=body)).json()["model_id"]
        assert model == f"{name}:train:0"
        [adapter] = served.engine._live[model].session.apply(lambda own: [own.model.peft_config["default"]])
        assert "lm_head" in adapter.target_modules
        for more, message in (
            (
                {"lora_config": {"rank": 2, **{f"train_{each}": False for each in ("mlp", "attn", "unembed")}}},
                "train_attn, train_mlp and train_unembed are false",
            ),
            ({"user_metadata": {"posttrain.num_workers": "2", "posttrain.sharding": "zero3"}}, "set sharding=zero2"),
            ({"optimizer_config": {"type": "dimuon"}}, "adamw is accepted"),
        ):
            refused = http.post("/create_model", json={**body, "model_seq_id": 1, **more})
            assert refused.status_code == 422 and message in refused.json()["error"], refused.text
        heads = {"Content-Type": "application/x-protobuf"}
        later = http.post("/forward_backward", content=request(model, 2), headers=heads)
        first = http.post("/forward_backward", content=request(model, 1), headers=heads)
        again = http.post("/forward_backward", content=request(model, 1), headers=heads)
        assert first.json() == again.json()
        answers = [future(each) for each in (first, later)]
        for each in answers:
            assert each.headers["content-type"] == "application/x-protobuf"
            output = MESSAGES["ForwardBackwardOutput"]()
            output.ParseFromString(each.content)
            assert output.metrics["loss:sum"] > 0 and output.loss_fn_outputs[0].num_datums == 4
        step = future(
            http.post("/optim_step", json={"model_id": model, "seq_id": 3, "adam_params": {"learning_rate": 1e-3}})
        )
        assert step.json()["metrics"]["grad_norm"] > 0
        refused = http.post("/forward_backward", content=request(model, 4, "stable_reinforce"), headers=heads)
        assert refused.status_code == 422 and "cross_entropy, importance_sampling" in refused.json()["error"]
        empty = future(http.post("/optim_step", json={"model_id": model, "seq_id": 4, "adam_params": {}}))
        assert empty.json()["category"] == "user" and "there are no gradients" in empty.json()["error"]
        for path, wrong in (
            ("asample", {"sampling_session_id": "NQ"}),
            ("optim_step", {"adam_params": {}, "seq_id": "1"}),
            ("create_sampling_session", {}),
            ("create_model", {**body, "user_metadata": 5}),
        ):
            refused = http.post(f"/{path}", json=wrong)
            assert refused.status_code == 422 and refused.json()["error"], (path, refused.text)
        assert http.post("/nothing", json={}).status_code == 404
        assert httpx.post(f"{served.url}/api/v1/create_session", json={}).status_code == 401
