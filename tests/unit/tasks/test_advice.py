"""Every row of the table of ranges: the documents' figures, no warning inside, one outside that names its source."""

from itertools import combinations

import pytest

from flows.declare.config import typed
from lineage.errors import ConfigError
from tasks.context import Resources
from tasks.cpt import ContinuedPretraining
from tasks.dpo import DPO
from tasks.grpo import GRPO
from tasks.judgement.advice import (
    BATCH_FACTOR,
    BY_SIZE,
    COMPUTE,
    JOB_FORM,
    LOGGING,
    MEASURED,
    RATIO,
    SIZES,
    TABLE,
    WARM_UP,
    WARMUP,
    Range,
    Row,
    band_of,
    case_of,
    findings,
)
from tasks.method import Adapter, Method, Optimizer
from tasks.prepare_data import PrepareConversations
from tasks.recipe import ADAPTER_FACTOR
from tasks.sft import SFT

# source | method | tuned | size | field | default | recommended | permissible | no warning | a warning
FIGURES = """
form | CPT  | full  | -      | method.num_epochs             | 1      | 2..5       | < 50    | 1 2 49 | 50 80
form | CPT  | full  | -      | resources.micro_batch_size    | 8      | 8          | < 16    | 1 8 15 | 16 32
form | CPT  | full  | -      | resources.micro_batch_size, of validation | 1      | 8          | < 16    | 1 8 15 | 16
form | CPT  | full  | -      | method.learning_rate          | 1e-4   | 1e-5..2e-5 | < 5e-5  | 1e-6 4.9e-5 | 5e-5 1e-4
form | SFT  | full  | -      | resources.dataloader_workers  | 1      | 4          | < 10    | 0 1 4 9 | 10
form | SFT  | full  | -      | resources.save_steps          | 100    | 100        | <= 100  | 1 100 | 101
form | SFT  | full  | -      | resources.keep_last           | 2      | 2..5       | < 10    | 2 5 | 1 6 10
form | SFT  | full  | -      | method.validation.every_steps | 100    | 100..200   | -       | 6 100 200 | 201
form | SFT  | full  | -      | steps between reports         | 5      | 5          | < 20    | - | -
form | CPT  | lora  | small  | method.adapter.rank           | 16     | 16         | <= 64   | 8 | 65
form | CPT  | lora  | -      | method.adapter.alpha          | 16     | 32         | <= 64   | 16 32 64 | 65
form | CPT  | qlora | -      | method.adapter.alpha          | 16     | -          | <= 64   | 32 | 65
form | CPT  | qlora | -      | method.adapter.dropout        | 0.1    | 0.1        | <= 1    | 0.1 | -
form | DPO  | full  | -      | method.beta                   | 0.3    | -          | -       | 0.1 0.3 | -
form | GRPO | full  | -      | method.beta                   | 0.0001 | -          | -       | 0.0001 | -
form | GRPO | full  | -      | method.sampling.temperature   | 0.9    | -          | -       | 0.9 | -
form | rows | other | -      | train share (1 - method.held_out) | -      | > 0.8      | -       | 0.81 0.95 0.7 | -
size | SFT  | full  | small  | method.learning_rate          | -      | 1e-6..5e-6 | -       | 1e-6 5e-6 | 9e-7 6e-6
size | SFT  | full  | medium | method.learning_rate          | -      | 5e-6..2e-5 | -       | 5e-6 2e-5 | 4e-6 3e-5
size | SFT  | full  | large  | method.learning_rate          | -      | 1e-5..3e-5 | -       | 1e-5 3e-5 | 9e-6 4e-5
size | SFT  | full  | small  | method.optimizer.weight_decay | -      | 0.01..0.1  | -       | 0.01 0.1 | 0.0 0.2
size | SFT  | lora  | medium | method.optimizer.weight_decay | -      | 0.01       | -       | 0.01 | 0.0 0.02
size | SFT  | full  | large  | method.optimizer.weight_decay | -      | 0..0.01    | -       | 0.0 0.01 | 0.02
size | SFT  | full  | small  | method.num_epochs             | -      | 1..3       | -       | 1 3 | 0.5 4
size | SFT  | full  | medium | method.num_epochs             | -      | 2..5       | -       | 2 5 | 1 6
size | SFT  | full  | large  | method.num_epochs             | -      | 1..3       | -       | 1 3 | 4
size | SFT  | full  | small  | method.schedule.min_learning_rate | -      | 1e-7       | -       | 1e-7 | 1e-6
size | SFT  | lora  | medium | method.schedule.min_learning_rate | -      | 1e-6       | -       | 1e-6 | 1e-7
size | SFT  | qlora | large  | method.schedule.min_learning_rate | -      | 1e-6       | -       | 1e-6 | 1e-7
size | SFT  | full  | small  | method.global_batch_size      | -      | 16..32     | -       | 16 32 | 8 64
size | SFT  | full  | medium | method.global_batch_size      | -      | 32..64     | -       | 32 64 | 16 128
size | SFT  | lora  | large  | method.global_batch_size      | -      | 64..128    | -       | 64 128 | 32 256
size | SFT  | full  | small  | resources.micro_batch_size    | -      | 2..4       | -       | 2 4 | 1 8
size | SFT  | full  | medium | resources.micro_batch_size    | -      | 4..8       | -       | 4 8 | 2 9
size | SFT  | full  | large  | resources.micro_batch_size    | -      | 8..16      | -       | 8 16 | 4
size | DPO  | lora  | -      | method.max_grad_norm          | -      | 1.0        | -       | 1.0 | 0.5 2.0
size | CPT  | full  | -      | method.schedule.name          | -      | cosine     | -       | cosine | linear
size | SFT  | lora  | small  | method.learning_rate          | -      | 1e-5..5e-5 | -       | 1e-5 5e-5 | 9e-6 6e-5
size | SFT  | lora  | medium | method.learning_rate          | -      | 1e-5..1e-4 | -       | 1e-5 1e-4 | 2e-4
size | SFT  | lora  | large  | method.learning_rate          | -      | 5e-5..2e-4 | -       | 5e-5 2e-4 | 4e-5 3e-4
size | SFT  | lora  | small  | method.adapter.rank           | -      | 4..8       | -       | 4 8 | 2 16
size | DPO  | lora  | medium | method.adapter.rank           | -      | 8..16      | -       | 8 16 | 4 32
size | SFT  | lora  | large  | method.adapter.rank           | -      | 16..64     | -       | 16 64 | 8
size | SFT  | lora  | small  | method.adapter.alpha / rank   | -      | 2..4       | -       | 1 2 4 | -
size | SFT  | lora  | medium | method.adapter.alpha / rank   | -      | 2..4       | -       | 1 2 4 | -
size | SFT  | lora  | large  | method.adapter.alpha / rank   | -      | 2          | -       | 1 2 4 | -
size | SFT  | lora  | -      | method.adapter.alpha / rank   | -      | 1..4       | -       | 1 2 4 | 0.5 5
size | SFT  | lora  | small  | method.adapter.dropout        | -      | 0.05..0.1  | -       | 0.05 0.1 | 0.0 0.2
size | SFT  | lora  | medium | method.adapter.dropout        | -      | 0.05       | -       | 0.05 | 0.0 0.1
size | SFT  | lora  | large  | method.adapter.dropout        | -      | 0..0.05    | -       | 0.0 0.05 | 0.1
size | SFT  | lora  | small  | method.num_epochs             | -      | 3..5       | -       | 3 5 | 2 6
size | SFT  | qlora | medium | method.num_epochs             | -      | 2..4       | -       | 2 4 | 1 5
size | SFT  | lora  | large  | method.num_epochs             | -      | 1..3       | -       | 1 3 | 4
size | SFT  | qlora | -      | method.learning_rate          | -      | 1e-5..2e-4 | -       | 1e-5 2e-4 | 9e-6 3e-4
size | SFT  | qlora | -      | method.optimizer.weight_decay | -      | 0.01       | -       | 0.01 | 0.0 0.1
size | SFT  | qlora | -      | method.adapter.rank           | -      | 16..64     | -       | 16 64 | 8
size | SFT  | qlora | -      | method.adapter.alpha          | -      | 32         | -       | 32 | 16 64
size | SFT  | qlora | -      | method.adapter.dropout        | -      | 0.05..0.1  | -       | 0.05 0.1 | 0.0 0.2
size | SFT  | qlora | -      | method.quantization.format    | -      | nf4        | -       | nf4 int8 | fp4
size | SFT  | qlora | -      | method.quantization.double    | -      | true       | -       | true | false
size | SFT  | qlora | -      | method.quantization.compute_dtype | -      | bf16 or fp16 | -       | bf16 fp16 | fp32
warm | DPO  | full  | short  | method.schedule.warmup        | -      | 5..10      | -       | 5 10 0.05 | 4 11 0.0 0.2
warm | SFT  | full  | middle | method.schedule.warmup        | -      | 50..200    | -       | 50 200 0.1 | 49 201 0.3
warm | SFT  | lora  | long   | method.schedule.warmup        | 0.1    | -          | <= 1000 | 0.1 1000 0.0 | 1001 0.2
here | SFT  | lora  | few    | method.num_epochs             | -      | 3..40      | -       | 3 6 40 | 2 41
here | SFT  | qlora | few    | method.global_batch_size      | -      | 8..16      | -       | 8 16 32 | 4 64
here | SFT  | lora  | few    | method.learning_rate          | -      | 3e-4..5e-4 | -       | 2e-5 5e-4 | 1e-4 6e-4
"""
LINES = [[part.strip() for part in line.split("|")] for line in FIGURES.strip().splitlines()]
SOURCES = {"form": JOB_FORM, "size": BY_SIZE, "warm": WARM_UP, "here": MEASURED}
CLASSES = {"CPT": ContinuedPretraining, "SFT": SFT, "DPO": DPO, "GRPO": GRPO, "rows": PrepareConversations}
NUM_ROWS = {"few": 999, "small": 4_999, "medium": 5_000, "large": 50_001}
NUM_STEPS = {"short": 160, "middle": 1_000, "long": 8_000}


def number(text: str) -> float | str:
    return text if text[0].isalpha() else int(text) if text.isdecimal() else float(text)


def row_of(source: str, method: str, tuned: str, size: str, field: str, recommended: str, permissible: str) -> Row:
    name = CLASSES[method].__qualname__
    (row,) = [
        row
        for row in TABLE
        if (row.source, row.field) == (SOURCES[source], field)
        and (not row.methods or name in row.methods)
        and (not row.tuned or tuned in row.tuned)
        and row.size in (None, size)
        and [each.text if each else "-" for each in (row.recommended, row.permissible)] == [recommended, permissible]
    ]
    return row


def build(method: str, tuned: str, field: str, value: float | str) -> tuple[Method, Resources]:
    """A stage that sets one field, and what that needs."""
    if method == "rows":
        return PrepareConversations(held_out=1 - float(value)), Resources()
    tree: dict[str, dict[str, object]] = {"method": {}, "resources": {}}
    if method == "GRPO":
        tree["method"]["rewards"] = {"exact": {"function": "exact"}}
    if tuned != "full":
        tree["method"]["adapter"] = {"rank": 16, "alpha": 32}
    if tuned == "qlora":
        tree["method"]["quantization"] = {"format": "nf4"}
        value = {"true": True, "false": False}.get(str(value), value)
    path, of_validation, _ = field.partition(", of validation")
    if of_validation:
        tree["method"]["validation"] = {"every_steps": 100}
    if field == RATIO:
        tree["method"]["adapter"] = {"rank": 2, "alpha": int(2 * float(value))}
    elif field != LOGGING:
        *parents, last = path.split(".")
        node: dict[str, object] = tree  # type: ignore[assignment]
        for name in parents:
            node = node.setdefault(name, {})  # type: ignore[assignment]
        node[last] = value
    return typed(CLASSES[method], tree["method"], "method"), typed(Resources, tree["resources"], "resources")


class OwnLoop(SFT):
    """A training that transformers' loop does not run."""

    def loop(self, run: object) -> dict[str, float]:
        return {}


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line[:5]))
def test_a_value_inside_gives_no_warning_and_one_outside_names_field_value_range_and_source(line: list[str]) -> None:
    source, method, tuned, size, field, default, recommended, permissible, inside, outside = line
    row = row_of(source, method, tuned, size, field, recommended, permissible)
    assert row.default == (None if default == "-" else number(default))

    def found(value: float | str) -> list[object]:
        stage = build(method, tuned, field, value)
        epochs = float(value) if field == "method.num_epochs" else None
        case = case_of(*stage, NUM_ROWS.get(size), NUM_STEPS.get(size), epochs)
        return [each for each in findings(case) if each.field == field]

    for value in map(number, inside.split() if inside != "-" else []):
        assert not found(value)
    for value in map(number, outside.split() if outside != "-" else []):
        (finding,) = found(value)
        bound = {"recommended": row.recommended, "permissible": row.permissible}[finding.bound]
        assert bound is not None and bound.text in (finding.accepted, *finding.accepted.split(" or "))
        of_size = f"{row.source}: {SIZES[row.size]}" if row.size else row.source
        assert finding.source == (f"{BY_SIZE}; {MEASURED}" if size == "few" else of_size)
        shown = value if isinstance(value, str) else f"{value:g}"
        assert str(finding).startswith(f"{field}={shown} is outside the {finding.bound} {finding.accepted}")


def test_the_figures_above_are_of_every_row() -> None:
    assert {row_of(*line[:5], *line[6:8]) for line in LINES} == set(TABLE) and len(LINES) == len(TABLE)


def test_at_most_one_row_decides_what_is_recommended() -> None:
    deciding = [row for row in TABLE if row.recommended and not row.silent]
    for one, other in combinations(deciding, 2):
        same_size = one.size == other.size or None in (one.size, other.size)
        scopes = (one.methods, other.methods), (one.tuned, other.tuned)
        shared = [not a or not b or bool({*a} & {*b}) for a, b in scopes]
        assert not (one.field == other.field and same_size and all(shared)), (one, other)


def test_what_is_advised_is_inside_and_a_lora_learns_ten_times_as_fast() -> None:
    for row in TABLE:
        bounds = [bound for bound in (row.recommended, row.permissible) if bound and row.advised is not None]
        assert row.field == WARMUP or all(row.advised in bound for bound in bounds)
    rates = [row for row in TABLE if row.field == "method.learning_rate" and row.advised and row.source == BY_SIZE]
    by_size = [[row.advised for row in rates if row.tuned == tuned and row.size] for tuned in (("full",), ("lora",))]
    assert by_size[1] == pytest.approx([ADAPTER_FACTOR * rate for rate in by_size[0]])


def test_the_forms_default_learning_rate_breaks_its_own_range() -> None:
    (row,) = [row for row in TABLE if row.field == "method.learning_rate" and row.source == JOB_FORM]
    assert row.default == 1e-4 and row.breaks_itself
    assert not next(row for row in TABLE if row.field == "resources.keep_last").breaks_itself


def test_without_the_number_of_rows_a_value_of_any_size_gives_no_warning() -> None:
    def of_rate(rate: float) -> list[str]:
        found = findings(case_of(SFT(learning_rate=rate), Resources()))
        return [str(each) for each in found if each.field == "method.learning_rate"]

    assert of_rate(1e-6) == of_rate(3e-5) == []
    assert of_rate(4e-5) == [
        "method.learning_rate=4e-05 is outside the recommended 1e-6..5e-6 or 5e-6..2e-5 or 1e-5..3e-5 "
        "(reference documents, by data size)"
    ]


def test_rates_of_other_optimizers_and_what_a_loop_does_not_apply_are_not_compared() -> None:
    method = SFT(learning_rate=0.1, optimizer=Optimizer(name="muon"))
    assert "method.learning_rate" not in case_of(method, Resources()).values
    assert "method.max_grad_norm" in case_of(method, Resources()).values
    assert "method.schedule.warmup" not in case_of(OwnLoop(), Resources()).values
    rs = Adapter(rank=16, alpha=320, rslora=True)
    assert not [each for each in case_of(SFT(adapter=rs), Resources()).values if "rank" in each]


def test_the_bands_of_data() -> None:
    assert [band_of(rows) for rows in (1, 4_999, 5_000, 50_000, 50_001)] == ["small"] * 2 + ["medium"] * 2 + ["large"]


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("1..2", [1, 1.5, 2], [0.9, 2.1]), ("< 3", [2], [3]), ("<= 3", [3], [4]), ("> 3", [4], [3]),
        ("3", [3], [2, 4]), ("cosine", ["cosine"], ["linear"]),
    ],
)  # fmt: skip
def test_a_range_has_its_bounds(text: str, inside: list[float | str], outside: list[float | str]) -> None:
    assert all(value in Range(text=text) for value in inside)
    assert not any(value in Range(text=text) for value in outside)


def test_an_adapter_whose_inputs_are_all_dropped_cannot_work_and_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.dropout=1"):
        build("SFT", "lora", "method.adapter.dropout", 1)


def test_a_lora_learns_ten_times_as_fast_and_a_doubled_batch_a_factor_of_1_4() -> None:
    assert (ADAPTER_FACTOR, BATCH_FACTOR) == (10, 1.4)


@pytest.mark.parametrize(
    ("num_steps", "inside", "outside"),
    [(27, [1, 6], [7, 99, 201]), (399, [99, 100, 200], [201]), (400, [100, 200], [99, 201]), (3, [1], [2])],
)
def test_a_short_training_is_validated_four_times(num_steps: int, inside: list[int], outside: list[int]) -> None:
    def found(steps: int) -> list[str]:
        case = case_of(*build("DPO", "full", "method.validation.every_steps", steps), num_steps=num_steps)
        return [str(each) for each in findings(case) if each.field == "method.validation.every_steps"]

    assert not [each for steps in inside for each in found(steps)]
    assert [len(found(steps)) for steps in outside] == [1] * len(outside)


def test_a_base_in_four_bits_computes_as_the_training_does_and_on_a_cpu_in_fp32() -> None:
    def values(precision: str, gpus: int) -> object:
        method = typed(SFT, {"adapter": {}, "quantization": {"format": "nf4"}, "precision": precision}, "method")
        return case_of(method, Resources(gpus_per_worker=gpus)).values.get(COMPUTE)

    assert [values("fp32", 1), values("bf16", 1), values("auto", 1), values("fp8", 1)] == ["fp32", *["bf16"] * 3]
    assert values("fp32", 0) is None
