"""Run by an interpreter that has the public tinker client and none of ours: URL, KEY and MODEL; prints what it read."""

import json
import sys

import numpy as np
import tinker
import torch

ROWS = [[5, 6, 7, 8], [9, 10, 11], [12, 13], [14, 15, 16, 17]]
OLD, ADVANTAGES = -5.5, 0.5


def datum(row: list[int], *columns: str) -> tinker.Datum:
    """Column k of a row has the values that the test knows too."""
    length = len(row) - 1
    values = {
        "target_tokens": np.array(row[1:], dtype=np.int64),
        "weights": np.full(length, 0.25, dtype=np.float32),
        "logprobs": np.full(length, OLD, dtype=np.float32),
        "advantages": np.array([ADVANTAGES * (-1) ** at for at in range(length)], dtype=np.float32),
    }
    values["sequence_ratio_mask"] = values["weights"]
    inputs = {name: tinker.TensorData.from_numpy(values[name]) for name in ("target_tokens", *columns)}
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(row[:-1]), loss_fn_inputs=inputs)


def squares(
    data: list[tinker.Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:  # fmt: skip
    """A loss of the caller's own."""
    return torch.cat([each.flatten() for each in logprobs]).square().sum(), {"rows": float(len(data))}


def main() -> None:
    url, key, model = sys.argv[1:4]
    service = tinker.ServiceClient(base_url=url, api_key=key)
    training = service.create_lora_training_client(base_model=model, rank=2, seed=1)
    adam = tinker.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-8)
    found: dict[str, object] = {}
    # Pipelined, as its documentation asks: nothing is awaited before the last call is sent.
    sent = []
    for name, columns, config in (
        ("cross_entropy", ["weights"], None),
        ("importance_sampling", ["logprobs", "advantages"], None),
        ("ppo", ["logprobs", "advantages"], {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("dro", ["logprobs", "advantages"], {"beta": 0.05}),
        ("gspo", ["logprobs", "advantages", "sequence_ratio_mask"], None),
        ("cispo", ["logprobs", "advantages"], None),
    ):
        data = [datum(row, *columns) for row in ROWS]
        sent.append((training.forward_backward(data, name, loss_fn_config=config), training.optim_step(adam)))
    sent.append((training.forward_backward_custom([datum(row) for row in ROWS], squares), training.optim_step(adam)))
    read = [(forward.result(), step.result()) for forward, step in sent]
    found["losses"], found["custom"] = [each.metrics["loss:sum"] for each, _ in read[:-1]], dict(read[-1][0].metrics)
    found["norms"] = [step.metrics["grad_norm"] for _, step in read]
    found["logprobs"] = [each["logprobs"].to_numpy().tolist() for each in read[-1][0].loss_fn_outputs]
    sampler = training.save_weights_and_get_sampling_client()
    prompt = tinker.ModelInput.from_ints([5, 6, 7])
    params = tinker.SamplingParams(max_tokens=4, seed=3, temperature=1.0, stop=[])

    def sample() -> list[object]:
        sequences = sampler.sample(prompt, num_samples=2, sampling_params=params).result().sequences
        return [[list(each.tokens), list(each.logprobs or ()), str(each.stop_reason)] for each in sequences]

    found["sampled"] = sample()
    found["prompt"] = sampler.compute_logprobs(prompt).result()
    path = training.save_state("one").result().path
    found["path"] = path
    training.forward_backward([datum(ROWS[0], "weights")], "cross_entropy").result()
    training.optim_step(adam).result()
    assert sample() == found["sampled"], "a snapshot does not change"
    resumed = service.create_training_client_from_state_with_optimizer(path)
    found["again"] = [
        client.forward([datum(row, "weights") for row in ROWS], "cross_entropy").result().metrics["loss:sum"]
        for client in (training, resumed)
    ]
    resumed.forward_backward([datum(ROWS[0], "weights")], "cross_entropy").result()
    resumed.optim_step(adam).result()
    forward = resumed.forward([datum(row, "weights") for row in ROWS], "cross_entropy").result()
    found["again"].append(forward.metrics["loss:sum"])  # type: ignore[attr-defined]
    base = service.create_sampling_client(base_model=model)
    found["base"] = base.compute_logprobs(prompt).result()
    found["info"] = training.get_info().model_data.model_name
    try:
        training.forward_backward([datum(ROWS[0])], "cross_entropy").result()
    except Exception as error:  # of the client
        found["refused"] = str(error)
    print(json.dumps(found))


main()
