#!/usr/bin/env bash
# transformers 5.24.0: from_pretrained changes torch for the whole process while it builds a model, and two loads at once can leave
# torch's default dtype at bfloat16 for good.
#
# local_torch_dtype calls torch.set_default_dtype, which all threads share, and puts back what it found. A thread that makes a layer in
# the meantime gets one in bfloat16. Where a second load begins before the first ends and ends after it, the second puts back the
# first's bfloat16: every layer, optimizer state and tensor that the process makes from then on is bfloat16, and nothing says so.
# A server that loads two models at once, or a trainer that scores a checkpoint in a thread, meets it at random; the events below fix
# the order, from the constructor of a model class of one's own.
#
# Fails if the other thread's layer is float32, or if the default dtype is float32 again after both loads.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/env"
"$work/env/bin/pip" install -q torch==2.13.0 transformers==5.24.0
cd "$work"
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$work/env/bin/python" - <<'P'
import threading

import torch
from transformers import LlamaConfig, LlamaForCausalLM

entered = {name: threading.Event() for name in ("first", "second")}
leave = {name: threading.Event() for name in ("first", "second")}


class Slow(LlamaForCausalLM):
    """A model whose constructor takes as long as the events say."""

    def __init__(self, config):
        name = threading.current_thread().name
        if name in entered:
            entered[name].set()
            assert leave[name].wait(60)
        super().__init__(config)


config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
Slow(config).to(torch.bfloat16).save_pretrained("model")
threads = {name: threading.Thread(target=Slow.from_pretrained, args=("model",), name=name) for name in entered}
assert torch.get_default_dtype() == torch.float32
for name in ("first", "second"):
    threads[name].start()
    assert entered[name].wait(60)
beside = torch.nn.Linear(2, 2).weight.dtype
for name in ("first", "second"):
    leave[name].set()
    threads[name].join()
after = torch.nn.Linear(2, 2).weight.dtype
print("a layer that another thread makes meanwhile:", beside)
print("a layer that is made after both loads have ended:", after)
assert beside == torch.bfloat16, "the default dtype is the thread's own now"
assert after == torch.bfloat16, "the default dtype is put back now"
P
# Seen: torch.bfloat16, torch.bfloat16.
echo "seen as described"
