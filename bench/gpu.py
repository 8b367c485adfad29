"""Training on one GPU beside its limit and its peer: posttrain, a hand-written loop, plain TRL. Random weights.

    python bench/gpu.py [--cases a,b] [--deadline 330] [--out results.jsonl] [--save] [--compare]

The limit is a loop without any feature: full rows, compiled layers, fused AdamW, bf16 autocast. The peer is a plain script
of TRL. Each case is a process of its own that fails alone, or is ended at its limit. ``--save`` keeps the results in
``bench/baselines/`` by GPU, model and method; ``--compare`` names what is slower than there by more than 5 %, what failed
and what has no baseline. SIZE=tiny tries it on a CPU.

Where a GPU is at hand, in this order, for the first three were never run on one:

1. ``pytest -m gpu tests/gpu`` with transformers 5.24 and torch 2.13 (run with 5.23 and 2.11), then test_pipeline_on_gpu.py.
2. ``--cases ceilings,sft-lora/posttrain,sft-qlora/posttrain,dpo-lora/posttrain --compare``: layers of one input are one
   function (tasks/train/kernels/fast_lora.py). Losses must be those of the baselines, and steps should be faster.
3. ``--cases sft-8b/posttrain`` on a card of 80 GB, and ``estimate`` beside ``peak_gib`` of every case on another card.
4. All cases with ``--save``; the tables of docs/hardware.md.
"""

import argparse
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

SRC = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SRC))
BASELINES = SRC / "bench" / "baselines"
TINY = os.environ.get("SIZE", "full") == "tiny"
WORK = Path(os.environ.get("BENCH_GPU", Path(tempfile.gettempdir()) / "posttrain-bench-gpu")) / (
    "tiny" if TINY else "full"
)
OUT = WORK / "results.jsonl"
NAME, REPLY = "", Path(os.devnull)  # of the case that runs
PEAK = 989e12  # dense bf16 of an H100 SXM and H200 by datasheet
SLOWER = 1.05

MODEL = (  # model A: 1.10 billion weights
    {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    if TINY else
    {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
)  # fmt: skip
SMALL = (  # the geometry of Qwen2.5-0.5B as a Llama with 32,000 tokens
    MODEL if TINY else
    {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2}
)  # fmt: skip
LARGE = (  # 8.1 billion weights: Llama 3.1 8B with 32,000 tokens and four layers more
    MODEL if TINY else
    {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
)  # fmt: skip
SIZES = {"A": MODEL, "S": SMALL, "L": LARGE}
VOCAB = 600 if TINY else 32000
MAX_LENGTH = 128 if TINY else 2048
MEDIAN, SPREAD = (40 if TINY else 400), 0.7
NUM_CHATS, NUM_PAIRS, NUM_PROMPTS = (64, 24, 24) if TINY else (1024, 200, 64)
BATCH, MICRO = (8, 4) if TINY else (64, 8)  # rows per step, and per micro batch of TRL
STEPS, WARM = (4, 1) if TINY else (10, 4)
PACKS, PACKS_MICRO = (4, 2) if TINY else (16, 2)  # packs of MAX_LENGTH per step
DPO_BATCH, DPO_MICRO, DPO_STEPS, DPO_WARM = (4, 2, 3, 1) if TINY else (16, 8, 10, 4)
GROUPS, NUM_GEN, NEW, GRPO_STEPS, GRPO_WARM = (2, 2, 8, 3, 1) if TINY else (8, 8, 128, 5, 2)
GRPO_MICRO = 2 if TINY else 8
RATE = 2e-5


def corpus():
    """Text to learn tokens and to cut rows from: Python's documentation topics and the project's source."""
    texts = []
    try:
        from pydoc_data import topics

        texts += list(topics.topics.values())
    except ImportError:
        pass
    files = sorted(SRC.rglob("*.py"))[: 40 if TINY else None]
    texts += [path.read_text(errors="ignore") for path in files]
    if not TINY:  # for 32,000 different tokens
        stdlib = Path(os.__file__).parent
        texts += [path.read_text(errors="ignore") for path in sorted(stdlib.glob("*.py"))]
        texts += [path.read_text(errors="ignore") for path in sorted((stdlib / "email").glob("*.py"))]
    return texts


def prepare():
    """Tokenizer, models A and S, rows; in WORK."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from tasks.model.chat_template import CHATML
    from tests import tiny

    if (WORK / "ready").exists():
        return {"case": "prepare", "state": "reused"}
    start = time.perf_counter()
    texts = corpus()
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=tiny.SPECIAL_TOKENS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    bpe.train_from_iterator(texts, trainer)
    ids = []
    for each in bpe.encode_batch(texts):
        ids += each.ids
    draw = random.Random(0)

    def text(length):
        place = draw.randrange(max(1, len(ids) - length))
        return bpe.decode(ids[place : place + length]).strip().replace("\ufffd", "") or "nothing"

    def length(less=0):
        return max(4, min(int(MEDIAN * draw.lognormvariate(0, SPREAD)), MAX_LENGTH - 24) - less)

    def user(i, n):
        return [{"role": "user", "content": f"{i}: {text(n)}"}]

    def answer(n):
        return [{"role": "assistant", "content": text(n)}]

    short = 6 if TINY else 40
    half = lambda: max(4, min(int(0.75 * MEDIAN * draw.lognormvariate(0, SPREAD)), MAX_LENGTH // 2))  # noqa: E731
    rows = {
        "conversations": [
            {"row_id": f"c{i}", "messages": user(i, short) + answer(length(short + 12))} for i in range(NUM_CHATS)
        ],
        "preferences": [
            {"row_id": f"p{i}", "prompt": user(i, 2 * short), "chosen": answer(half()), "rejected": answer(half()),
             "kind": "other"}
            for i in range(NUM_PAIRS)
        ],
        "prompts": [{"row_id": f"q{i}", "prompt": user(i, short), "columns": None} for i in range(NUM_PROMPTS)],
    }  # fmt: skip
    found = {"case": "prepare", "vocabulary": bpe.get_vocab_size()}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    for name in ("A", "S"):
        found[f"weights_{name}"] = write_model(name, tokenizer)
    for name, each in rows.items():
        tiny.write_rows(WORK / name, each)
    (WORK / "ready").touch()
    return {**found, "seconds": time.perf_counter() - start}


def write_model(name, tokenizer):
    """A model with random weights in bf16, with its tokenizer; returns the number of its weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer.save_pretrained(WORK / name)
    config = LlamaConfig(
        vocab_size=VOCAB, **SIZES[name], max_position_embeddings=MAX_LENGTH, tie_word_embeddings=name == "S",
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if name == "L" else torch.float32)
    with torch.device("cuda" if cuda() else "cpu"):
        model = LlamaForCausalLM(config).bfloat16()
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(WORK / name)
    return sum(each.numel() for each in model.parameters())


def cuda():
    import torch

    return torch.cuda.is_available()


def sync():
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock_class():
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """The time at the end of every step, after the GPU is done: the same for both sides."""

        def __init__(self):
            self.times = []

        def on_train_begin(self, *args, **kwargs):
            sync()
            self.times.append(time.perf_counter())

        def on_step_end(self, *args, **kwargs):
            sync()
            self.times.append(time.perf_counter())
            partial({"step_s": [round(b - a, 3) for a, b in zip(self.times, self.times[1:])]})

    return Clock


def flops_per_token(size, mean_squares, mode="full"):
    """Of matrices and causal attention; ``mean_squares``: E[length^2] / E[length] of the rows."""
    h, f = size["hidden_size"], size["intermediate_size"]
    kv = h // size["num_attention_heads"] * size["num_key_value_heads"]
    matrices = size["num_hidden_layers"] * (2 * h * h + 2 * h * kv + 3 * h * f) + h * VOCAB
    attention = 4 * size["num_hidden_layers"] * h * mean_squares / 2  # forward, per token
    forward = 2 * matrices + attention
    # an adapter: no gradients of frozen matrices, so the backward pass has as many products as the forward one
    return {"full": 3 * forward, "adapter": 2 * forward, "dpo": 3 * forward}[mode]


def squares(lengths):
    return sum(n * n for n in lengths) / sum(lengths)


def row_lengths(slot="conversations"):
    """Tokens of the rows, with the template."""
    import pyarrow.parquet as pq
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(WORK / "A")
    rows = pq.read_table(WORK / slot / "train.parquet").to_pylist()
    texts = [" ".join(m["content"] for m in row["messages"]) for row in rows]
    return [min(len(each) + 12, MAX_LENGTH) for each in tokenizer(texts)["input_ids"]]


def result(times, tokens, losses, warm, size, mode="full", mean_squares=None, units=None, skip_mfu=False):
    """Medians over the steps after the warm-up. ``tokens``: real tokens of each step; ``units``: pairs, of each step."""
    import torch

    steps = [b - a for a, b in zip(times, times[1:])]
    kept, of = steps[warm:], tokens[warm:]
    found = {
        "step_s_median": statistics.median(kept), "step_s_min": min(kept), "step_s_max": max(kept), "steps": len(kept),
        "first_step_s": steps[0], "losses_first_last": [losses[0], losses[-1]] if losses else None,
        "losses": [round(each, 5) for each in losses],
    }  # fmt: skip
    if of and sum(of):
        rate = sum(of) / sum(kept)
        found |= {"tokens_per_s": round(rate, 1), "tokens_per_step": sum(of) / len(of)}
        if not skip_mfu:
            found["mfu"] = round(rate * flops_per_token(size, mean_squares, mode) / PEAK, 4)
    if units:
        found["s_per_pair"] = sum(kept) / (units * len(kept))
    if torch.cuda.is_available():
        found |= {
            "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
            "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        }
    return found


def posttrain(name, fields, resources, model="A", steps=STEPS, warm=WARM, mode="full", units=None, limit_rows=None):
    """A training of the product: the method and resources as a stage's process runs them, without the save."""
    import torch

    from tasks.context import Resources, TrainContext
    from tasks.method import Adapter, Input, Optimizer
    from tasks.reward_functions import RewardFunction
    from tasks.train.run import TrainingRun
    from tests.training import METHODS

    begin = time.perf_counter()
    types = {"adapter": lambda v: Adapter(**v), "optimizer": lambda v: Optimizer(**v),
             "rewards": lambda v: {k: RewardFunction(**each) for k, each in v.items()}}  # fmt: skip
    fields = {key: types[key](value) if key in types and value else value for key, value in fields.items()}
    method = METHODS[name](**{"precision": "bf16", "max_length": MAX_LENGTH, "num_steps": steps, **fields})
    on = {"cpus_per_worker": 2 if TINY else 4, "gpus_per_worker": int(cuda()), "micro_batch_size": "auto", **resources}
    resources = Resources(**on)
    torch.set_num_threads(resources.cpus_per_worker)  # as flows.stages.launch does
    inputs = {}
    for slot, kind in method.consumes.items():
        path = WORK / (model if kind.value == "checkpoint" else kind.value)
        if slot in method.optional and not path.exists():
            continue
        inputs[slot] = Input(name=path.name, kind=kind, fingerprint=f"{path.name:f<64}", path=path)
    reports = []
    folder = WORK / "runs" / f"{os.getpid()}"
    context = TrainContext(
        output_dir=folder / "output", work_dir=folder / "work", resources=resources,
        report=lambda step, metrics: reports.append(dict(metrics)),
    )  # fmt: skip
    run = TrainingRun(method, inputs, context)
    trainer = method.trainer(run)
    clock = clock_class()()
    trainer.add_callback(clock)
    loaded = time.perf_counter()
    run.fit(trainer)
    tokens = [each.get("num_tokens", 0.0) for each in reports]
    tokens = [b - a for a, b in zip([0.0, *tokens], tokens)]
    of = "grad_norm" if name == "grpo" else "loss"
    mean_squares = squares(row_lengths()) if name == "sft" else (MEDIAN if mode == "dpo" else NEW)
    found = result(clock.times, tokens, [each[of] for each in reports], warm, SIZES[model], mode,
                   mean_squares, units, skip_mfu=name == "grpo")  # fmt: skip
    unwrapped, dtypes = trainer.accelerator.unwrap_model(trainer.model), {}
    for each in unwrapped.parameters():
        key = f"{str(each.dtype)[6:]}{' trained' if each.requires_grad else ' frozen'}"
        dtypes[key] = dtypes.get(key, 0) + each.numel()
    last = reports[len(reports) // 2 :]
    found["really"] = {
        **really(trainer), "parameters": dtypes, "autocast": trainer.accelerator.mixed_precision, "micro_batch": trainer.args.per_device_train_batch_size,
        "tokens_at_once": getattr(getattr(trainer, "budget", None), "tokens", None),
        "packing": getattr(method, "packing", None),
        "deterministic": resources.is_deterministic, "matmul": torch.get_float32_matmul_precision(),
    }  # fmt: skip
    found["own_report"] = {
        key: statistics.mean(each.get(key, 0.0) for each in last) for key in ("tokens_per_second", "mfu")
    }
    found["own_report"] |= {"memory_gib": reports[-1].get("memory_gib"), "peak_tflops": run.speed.peak / 1e12}
    found["load_s"] = round(loaded - begin, 2)
    found["estimate"] = estimated(method, resources, model, tokens, method.num_steps)
    return found


def really(trainer):
    """What a trainer computes with, read off it."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return {
        "attention": base.config._attn_implementation,
        "optimizer": type(optimizer).__name__, "fused": optimizer.param_groups[0].get("fused"),
        "checkpointing": bool(getattr(base, "is_activation_checkpointing", False)),
    }  # fmt: skip


def large():
    """All of 8 billion weights, on one card."""
    import torch
    from transformers import AutoTokenizer

    write_model("L", AutoTokenizer.from_pretrained(WORK / "A"))
    gc.collect()
    if cuda():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return posttrain("sft", {**SFT, "optimizer": IN_BF16}, {"gradient_checkpointing": "on"}, model="L", steps=4, warm=1)


def dataset_of(slot):
    import pyarrow.parquet as pq
    from datasets import Dataset

    rows = pq.read_table(WORK / slot / "train.parquet").to_pylist()
    plain = lambda ms: [{"role": m["role"], "content": m["content"]} for m in ms]  # noqa: E731
    if slot == "conversations":
        return Dataset.from_list(
            [{"prompt": plain(r["messages"][:-1]), "completion": plain(r["messages"][-1:])} for r in rows]
        )
    if slot == "preferences":
        return Dataset.from_list([{k: plain(r[k]) for k in ("prompt", "chosen", "rejected")} for r in rows])
    return Dataset.from_list([{"prompt": plain(r["prompt"])} for r in rows])


def trl(kind, config, model="A", steps=STEPS, warm=WARM, mode="full", units=None, lora=False, dtype="float32",
        checkpointing=False, slot="conversations"):  # fmt: skip
    """A plain script of TRL, in bf16 autocast, AdamW fused (transformers' default), SDPA unless the config says other."""
    import torch
    import trl as library
    from peft import LoraConfig
    from transformers import AutoTokenizer

    begin = time.perf_counter()
    torch.set_num_threads(2 if TINY else 4)
    if cuda():
        torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in fp32, as posttrain has it
    trainer_class = getattr(library, f"{kind}Trainer")
    config_class = getattr(library, f"{kind}Config")
    names = {each for each in config_class.__dataclass_fields__}
    switch = "gradient_checkpointing" if "gradient_checkpointing" in names else "activation_checkpointing"
    folder = WORK / "runs" / f"{os.getpid()}"
    settings = {
        "output_dir": str(folder), "max_steps": steps, "logging_steps": 1, "save_strategy": "no", "report_to": "none",
        "bf16": True, "seed": 0, "lr_scheduler_type": "cosine", "warmup_steps": 0.05, "disable_tqdm": True, "use_cpu": not cuda(),
        switch: checkpointing, "dataloader_pin_memory": cuda(), "weight_decay": 0.0,
        "model_init_kwargs": {"dtype": dtype}, **config,
    }  # fmt: skip
    extra = {}
    if kind == "GRPO":
        from tests.completion_scores import spread

        extra["reward_funcs"] = lambda completions, **_: spread([each[0]["content"] for each in completions])
    if lora:
        extra["peft_config"] = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear",
                                          task_type="CAUSAL_LM")  # fmt: skip
    trainer = trainer_class(
        model=str(WORK / model), args=config_class(**settings), train_dataset=dataset_of(slot),
        processing_class=AutoTokenizer.from_pretrained(WORK / model), **extra,
    )  # fmt: skip
    clock = clock_class()()
    trainer.add_callback(clock)
    loaded = time.perf_counter()
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    counts = [entry.get("num_tokens", 0.0) for entry in log]
    tokens = [b - a for a, b in zip([0.0, *counts], counts)]
    of = "grad_norm" if kind == "GRPO" else "loss"
    mean_squares = squares(row_lengths()) if kind == "SFT" else (MEDIAN if kind == "DPO" else NEW)
    found = result(clock.times, tokens, [float(e[of]) for e in log], warm, SIZES[model], mode,
                   mean_squares, units, skip_mfu=kind == "GRPO")  # fmt: skip
    found["really"] = {
        **really(trainer), "dtype": str(next(trainer.model.parameters()).dtype),
        "micro_batch": trainer.args.per_device_train_batch_size,
        "accumulation": trainer.args.gradient_accumulation_steps, "rows": len(trainer.train_dataset),
        "liger": trainer.args.use_liger_kernel, "loss_type": getattr(trainer.args, "loss_type", None),
    }  # fmt: skip
    found["load_s"] = round(loaded - begin, 2)
    return found


def full_blocks():
    """The tokens of the conversations, end to end, in rows of MAX_LENGTH."""
    import pyarrow.parquet as pq
    import torch
    from transformers import AutoTokenizer

    tokenizer, line = AutoTokenizer.from_pretrained(WORK / "A"), []
    rows = pq.read_table(WORK / "conversations" / "train.parquet").to_pylist()
    for each in tokenizer([" ".join(m["content"] for m in row["messages"]) for row in rows])["input_ids"]:
        line += [*each, tokenizer.eos_token_id]
    return torch.tensor(line[: len(line) // MAX_LENGTH * MAX_LENGTH]).view(-1, MAX_LENGTH)


def hand(micros=(8,), pure_bf16=False, compiled=True):
    """The limit in practice: full blocks of MAX_LENGTH tokens, causal SDPA, compiled layers, fused AdamW."""
    import torch
    import torch.nn.functional as F
    from transformers import AutoModelForCausalLM

    begin, device = time.perf_counter(), "cuda" if cuda() else "cpu"
    if cuda():
        torch.set_float32_matmul_precision("high")
    blocks = full_blocks().to(device)
    model = AutoModelForCausalLM.from_pretrained(
        WORK / "A", dtype=torch.bfloat16 if pure_bf16 else torch.float32, attn_implementation="sdpa"
    ).to(device)
    model.train()
    if compiled:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0, fused=cuda())
    loaded, found = time.perf_counter(), {}

    def loss_of(ids):
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden[:, :-1].reshape(-1, hidden.shape[-1]))
        return F.cross_entropy(logits.float(), ids[:, 1:].reshape(-1))

    for micro in micros:
        try:
            times, losses, place = [time.perf_counter()], [], 0
            warm, steps = (1, 3) if TINY else (3, 8)
            for _ in range(steps):
                total = 0.0
                for _ in range(max(1, PACKS // micro)):
                    ids = blocks[[(place + k) % len(blocks) for k in range(micro)]]
                    place += micro
                    with torch.autocast(device, torch.bfloat16, enabled=not pure_bf16):
                        loss = loss_of(ids) / max(1, PACKS // micro)
                    loss.backward()
                    total += loss.detach()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                sync()
                times.append(time.perf_counter())
                losses.append(float(total))
            tokens = [PACKS * MAX_LENGTH] * len(losses)
            one = result(times, tokens, losses, warm, MODEL, mean_squares=MAX_LENGTH)
            found[f"micro_{micro}"] = {key: one.get(key) for key in (
                "tokens_per_s", "mfu", "step_s_median", "first_step_s", "peak_gib", "losses_first_last")}  # fmt: skip
            if one["tokens_per_s"] > found.get("tokens_per_s", 0):
                found |= {**one, "best_micro": micro}
        except Exception as error:
            found[f"micro_{micro}"] = f"{type(error).__name__}: {str(error)[:200]}"
            gc.collect()
            torch.cuda.empty_cache()  # nothing, without a GPU
        found.pop("losses", None)
        found |= {"load_s": round(loaded - begin, 2), "pure_bf16": pure_bf16, "compiled": compiled}
        partial(found)
        if time.perf_counter() - begin > 42:  # no time for another
            break
    return found


def partial(found):
    """What is there so far, should the case be killed."""
    REPLY.write_text(json.dumps({"case": NAME, **found, "partial": True}, default=str))


def ceilings():
    """A matrix product in bf16 and a copy, on this card."""
    import torch

    found = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name() if cuda() else "cpu"}
    if cuda():
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        x = torch.empty(2**30, device="cuda", dtype=torch.uint8)
        for name, call, amount in (
            ("bf16_tflops", lambda: a @ b, 2 * 8192**3 / 1e12), ("copy_tb_s", lambda: x.clone(), 2 * 2**30 / 1e12),
        ):  # fmt: skip
            for _ in range(5):
                call()
            seconds = []
            for _ in range(20):
                sync()
                start = time.perf_counter()
                call()
                sync()
                seconds.append(time.perf_counter() - start)
            found[name] = round(amount / statistics.median(seconds), 2)
    import transformers
    import trl as library

    return {**found, "transformers": transformers.__version__, "trl": library.__version__}


def estimated(method, resources, model, tokens, steps):
    """What a plan says before anything was measured, from the mean length of the rows."""
    from flows.planning.adapter_choice import capacity
    from flows.planning.estimates import formula_seconds
    from tasks.judgement.estimate import architecture, memory, work
    from tasks.train.loop.speed import known_peak

    found = architecture(json.loads((WORK / model / "config.json").read_text()))
    mean = sum(tokens) / (len(tokens) * method.global_batch_size)
    terms = memory(method, resources, found, found.shapes(), method.max_length, mean=mean, capacity=capacity(resources))
    total = work(
        method, resources, found, found.shapes(), num_steps=steps, tokens=mean, capacity=capacity(resources)
    )  # fmt: skip
    seconds = formula_seconds(method, resources, found, total, known_peak(resources, method.precision), steps)
    return {"memory_gib": {k: round(v, 2) for k, v in terms.to_dict().items()}, "step_s": seconds / steps}


# ---------------------------------------------------------------------------------------------------------------- cases

SFT = {"global_batch_size": BATCH, "learning_rate": RATE}
LORA = {"rank": 16}
TRL_SFT = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": BATCH // MICRO, "max_length": MAX_LENGTH,
           "learning_rate": RATE}  # fmt: skip
TRL_PACKED = {**TRL_SFT, "packing": True, "per_device_train_batch_size": PACKS_MICRO,
              "gradient_accumulation_steps": PACKS // PACKS_MICRO}  # fmt: skip
DPO = {"global_batch_size": DPO_BATCH, "learning_rate": RATE}
TRL_DPO = {"per_device_train_batch_size": DPO_MICRO, "gradient_accumulation_steps": DPO_BATCH // DPO_MICRO,
           "max_length": MAX_LENGTH, "learning_rate": RATE, "beta": 0.1}  # fmt: skip
OF_DPO = {"steps": DPO_STEPS, "warm": DPO_WARM, "mode": "dpo", "units": DPO_BATCH}
OF_GRPO = {"model": "S", "steps": GRPO_STEPS, "warm": GRPO_WARM}
GRPO = {"global_batch_size": GROUPS * NUM_GEN, "num_generations": NUM_GEN, "max_completion_length": NEW,
        "max_length": NEW + 128, "learning_rate": 1e-6,
        "rewards": {"spread": {"function": "python:tests.completion_scores.spread"}}}  # fmt: skip
TRL_GRPO = {"per_device_train_batch_size": GRPO_MICRO, "gradient_accumulation_steps": GROUPS * NUM_GEN // GRPO_MICRO,
            "num_generations": NUM_GEN, "max_completion_length": NEW, "learning_rate": 1e-6, "beta": 0.0,
            "loss_type": "grpo", "temperature": 1.0}  # fmt: skip
NF4 = {"rank": 16, "quantization": "nf4"}
IN_BF16 = {"name": "adamw_8bit", "weights": "bf16"}

CASES = {  # name: (function, seconds at most), in the order of value
    "ceilings": (lambda: ceilings(), 40),
    "sft-full/posttrain": (lambda: posttrain("sft", SFT, {}), 60),
    "sft-full/hand": (lambda: hand(), 60),
    "sft-lora/posttrain": (lambda: posttrain("sft", {**SFT, "adapter": LORA}, {}, mode="adapter"), 60),
    "dpo-lora/posttrain": (lambda: posttrain("dpo", {**DPO, "adapter": LORA}, {}, **OF_DPO), 50),
    "dpo-lora/trl": (lambda: trl("DPO", TRL_DPO, lora=True, dtype="bfloat16", slot="preferences", **OF_DPO), 60),
    "grpo/posttrain": (lambda: posttrain("grpo", GRPO, {}, **OF_GRPO), 60),
    "grpo/trl": (lambda: trl("GRPO", TRL_GRPO, slot="prompts", **OF_GRPO), 75),
    "sft-qlora/posttrain": (lambda: posttrain("sft", {**SFT, "adapter": NF4}, {}, mode="adapter"), 60),
    "dpo-full/posttrain": (lambda: posttrain("dpo", DPO, {}, **OF_DPO), 50),
    "sft-full-checkpointed/posttrain": (lambda: posttrain("sft", SFT, {"gradient_checkpointing": "on"}), 45),
    "sft-full/trl-packed": (lambda: trl("SFT", TRL_PACKED, steps=8), 50),
    "sft-lora/trl-packed": (lambda: trl("SFT", TRL_PACKED, steps=8, lora=True, dtype="bfloat16", mode="adapter"), 45),
    "sft-full-bf16/posttrain": (lambda: posttrain("sft", {**SFT, "optimizer": IN_BF16}, {}), 45),
    "sft-8b/posttrain": (large, 100),
}  # fmt: skip
CEILINGS = "ceilings"  # names the GPU


def environment():
    """That of posttrain's stages, for every side: allocator, cuBLAS, threads."""
    from flows.stages.process_settings import worker_environment

    for name, value in worker_environment().items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(WORK / "inductor"))


def run_case(name, reply):
    """In the case's own process: its result, or the end of its traceback."""
    global NAME, REPLY
    NAME, REPLY = name, reply
    start = time.perf_counter()
    try:
        found = prepare() if name == "prepare" else CASES[name][0]()
    except BaseException:
        found = {"error": traceback.format_exc().strip().splitlines()[-12:]}
    return {"case": name, **found, "case_s": round(time.perf_counter() - start, 1)}


def emit(found, out):
    """A line in the file, and on the screen."""
    line = json.dumps(found, default=str)
    with out.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def in_fork(name, limit, reply):
    """Runs a case in a copy of this process, which has imported everything."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        log = os.open(WORK / "bench.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        reply.write_text(json.dumps(run_case(name, reply), default=str))
        sys.stdout.flush()
        os._exit(0)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return None
        time.sleep(0.05)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return f"ended after {limit:.0f} s"


def in_process(name, limit, reply):
    """Runs a case in a new process: where an import has initialized CUDA, a copy could not use it."""
    with (WORK / "bench.log").open("a") as log:
        command = [sys.executable, __file__, "--case", name, str(reply)]
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"ended after {limit:.0f} s"
    return None


def arguments():
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--deadline", type=float, default=330)
    parser.add_argument("--spawn", action="store_true", help="a new process for each case")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--save", action="store_true", help="keep the results as baselines")
    parser.add_argument("--compare", action="store_true", help="name what is slower than its baseline")
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.cases = args.cases.split(",")
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"--cases: {', '.join(unknown)}: not a case; there are {', '.join(CASES)}")
    if (args.save or args.compare) and CEILINGS not in args.cases:
        args.cases.insert(0, CEILINGS)
    return args


def imported():
    """Imports everything that cases need; whether that initialized CUDA."""
    import torch
    import trl.trainer.dpo_trainer
    import trl.trainer.grpo_trainer
    import trl.trainer.sft_trainer  # noqa: F401

    import tasks.train.run  # noqa: F401
    import tests.training  # noqa: F401

    return torch.cuda.is_initialized()


def measured(args):
    """The results of all cases, by name."""
    begin, spawn, results = time.monotonic(), args.spawn, {}
    if not spawn:
        spawn = imported()
        print(f"imports: {time.monotonic() - begin:.1f} s, a new process for each case: {spawn}", flush=True)
    queue = [*(() if (WORK / "ready").exists() else ("prepare",)), *args.cases]
    while queue:
        name = queue.pop(0)
        left = args.deadline - (time.monotonic() - begin)
        limit = min(CASES[name][1] if name in CASES else 90, left)
        if limit < (1 if TINY else 12):
            results[name] = {"case": name, "error": "skipped: deadline"}
            emit(results[name], args.out)
            continue
        reply = WORK / "reply.json"
        reply.unlink(missing_ok=True)
        why = (in_process if spawn else in_fork)(name, limit, reply)
        found = json.loads(reply.read_text()) if reply.exists() else {"case": name, "error": why or "the process died"}
        results[name] = {**found, "at_s": round(time.monotonic() - begin, 1)}
        emit(results[name], args.out)
    return results


def baseline(results, name):
    """The file of a case: by GPU, model and method."""
    gpu = results[CEILINGS]["gpu"].lower().replace(" ", "-")
    model = {"grpo": "llama-0.4b", "sft-8b": "llama-8b"}.get(name.partition("/")[0], "llama-1.1b")
    model = "llama-tiny" if TINY else model
    return BASELINES / gpu / model / f"{name.replace('/', '.')}.json"


def rows_of(results):
    """What a baseline keeps of each case, with versions and commit."""
    top = results.get(CEILINGS, {})
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=SRC, capture_output=True, text=True, check=False
    )
    versions = {name: top.get(name) for name in ("gpu", "torch", "transformers", "trl", "bf16_tflops")}
    kept = ("tokens_per_s", "mfu", "step_s_median", "s_per_pair", "peak_gib", "losses_first_last", "estimate")
    for name, each in results.items():
        if "step_s_median" not in each:
            continue
        row = {key: each[key] for key in kept if key in each}
        if "mfu" in row and top.get("bf16_tflops"):
            row["mfu_measured_peak"] = round(row["mfu"] * PEAK / 1e12 / top["bf16_tflops"], 4)
        yield name, {**row, **versions, "commit": commit.stdout.strip()}


def _last_line(error):
    return error if isinstance(error, str) else error[-1]


def worse(results, rows):
    """What is slower than its baseline, and why a case is not compared; a line each."""
    found = [f"{name}: {_last_line(each['error'])}" for name, each in results.items() if "error" in each]
    if "gpu" not in results.get(CEILINGS, {}):
        return [*found, f"nothing is compared: {CEILINGS}, which names the GPU, has no result"]
    for name, each in results.items():
        if name not in rows:
            found += [f"{name}: ended at its limit, without a result"] if each.get("partial") else []
        elif not (path := baseline(results, name)).exists():
            found.append(f"{name}: no baseline, which --save writes: {path}")
        else:
            before, seconds = json.loads(path.read_text()), rows[name]["step_s_median"]
            if seconds > SLOWER * before["step_s_median"]:
                found.append(f"{name}: {seconds:.3f} s a step, {before['step_s_median']:.3f} at {before['commit']}")
    return found


def main():
    """Runs the cases; with ``--compare``, exits with 1 where one is slower than its baseline or cannot be compared."""
    args = arguments()
    WORK.mkdir(parents=True, exist_ok=True)
    environment()
    if args.case:
        Path(args.case[1]).write_text(json.dumps(run_case(args.case[0], Path(args.case[1])), default=str))
        return
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # initializes nothing: cases are forked from here
    if not TINY and not cuda():
        raise SystemExit("no GPU is seen: run it where torch sees one; SIZE=tiny tries the cases on a CPU")
    results = measured(args)
    rows = dict(rows_of(results))
    lines = worse(results, rows) if args.compare else []
    for name, row in rows.items() if args.save and "gpu" in results.get(CEILINGS, {}) else ():
        path = baseline(results, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row, indent=1) + "\n")
    if lines:
        raise SystemExit("slower than the baseline, or not compared:\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
