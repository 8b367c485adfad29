"""Whether a training survives is found out, and told to whoever asks for a model of its recipe, also if it does not."""

import json
from pathlib import Path

import pytest

from tests.command import TOY, Command, wait_until_warm
from tests.miniature import MODEL, write_own_rows

# One row per step has no other workers to go on with, which start a cluster of Ray's.
ALONE = ("method.global_batch_size=1", "resources.micro_batch_size=1")
SURVIVOR = "method._target_=tests.toy_survivor.Survivor"


def of(stage: str, *fields: str) -> list[str]:
    return [f"stages.{stage}.{field}" for field in fields]


def comparisons(text: str) -> dict[str, dict]:
    return {stage["stage"]: stage["comparisons"] for stage in json.loads(text)["stages"]}


@pytest.fixture
def untracked(tmp_path: Path) -> Command:
    wait_until_warm()
    (tmp_path / "rows.txt").write_text("rows")
    return Command(tmp_path, *TOY)


@pytest.mark.slow
def test_a_resume_that_forgets_is_found_out_with_its_first_step(untracked: Command) -> None:
    """Also where the steps are so small that losses and weights, as they stand, are alike within any tolerance."""
    small = ("method.learning_rate=1e-6", "method.precision=bf16")
    forgets = (
        *of("left", SURVIVOR, *ALONE, "method.forgets=generator"),
        *of("right", SURVIVOR, *small, "inputs.policy=left", "method.forgets=weights"),
    )
    result = untracked("certify", "--json", *forgets)
    assert result.returncode == 1, result.stderr
    found = comparisons(result.stdout)
    assert found["left"]["resharded"]["verdict"] == "not compared"
    assert "global_batch_size=1 is not a multiple of 2" in found["left"]["resharded"]["detail"]
    for lost in (found["left"]["killed"], *found["right"].values()):
        assert lost["verdict"] == "differs"
        assert lost["detail"].startswith(f"first at step {lost['resumed_at'][0] + 1} in loss (")
        assert "walk is the first of 1 tensors" in lost["detail"]
    resharded = found["right"]["resharded"]
    assert resharded["num_workers"] == [1, 2]
    assert resharded["loss_difference"] < 1e-4
    assert resharded["weight_difference"] > 0.5  # of what the training moved them
    assert len(list((untracked.folder / "artifacts/certificates").glob("*.json"))) == 2


@pytest.mark.slow
def test_a_loss_of_the_unbroken_training_is_no_reference(untracked: Command) -> None:
    mark = untracked.folder / "lost"
    lost = of("left", SURVIVOR, *ALONE, "method.forgets=generator", f"method.lost_mark={mark}")
    result = untracked("certify", *lost, "~stages.right")
    assert result.returncode == 1
    assert "stage left failed: the uninterrupted training was interrupted (attempt 2, from step 2: " in result.stderr, (
        result.stderr
    )
    assert not (untracked.folder / "artifacts/certificates").exists()


def test_weights_that_did_not_move_prove_nothing(untracked: Command) -> None:
    still = (SURVIVOR, *ALONE, "method.learning_rate=1e-30")
    result = untracked("certify", "--json", *of("left", *still), *of("right", *still, "inputs.policy=left"))
    assert result.returncode == 1, result.stderr  # although nothing differs
    found = comparisons(result.stdout)
    assert found["left"]["killed"]["verdict"] == "bit-identical"  # of a model without tensors nothing is known
    for comparison in found["right"].values():
        assert comparison["verdict"] == "not compared"
        assert comparison["detail"].startswith("the weights did not move in 6 steps")


@pytest.mark.slow
def test_what_is_certified_is_reported_of_the_models_of_that_recipe(toy: Command) -> None:
    survivor = [*of("left", SURVIVOR, "method.per_worker=1e-9"), "~stages.right"]
    result = toy("certify", *survivor)
    assert result.returncode == 0, result.stderr
    killed, resharded = (line.split() for line in result.stdout.splitlines() if line.startswith("left "))
    assert killed[:3] == ["left", "killed", "bit-identical"]
    assert " ".join(resharded[:8]) == "left resharded, workers 1 to 2 within tolerance"
    assert [path.name for path in (toy.folder / "artifacts/rehearsals").iterdir()] == ["guard"]

    toy.run(*survivor)  # 40 steps, not 6
    reported = toy("lineage", "toy/left").stdout
    assert "killed bit-identical, resharded within tolerance" in reported
    manifest = json.loads(toy("lineage", "toy/left", "--json").stdout)["nodes"][0]
    [path] = (toy.folder / "artifacts/certificates").glob("*.json")
    assert manifest["certificate"].startswith(path.stem)
    assert toy("verify").returncode == 0
    path.write_text(path.read_text().replace("within tolerance", "bit-identical"))
    verified = toy("verify")
    assert verified.returncode == 1
    assert "changed   left@" in verified.stdout
    assert f"{path.relative_to(toy.folder)} has SHA-256" in verified.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "num_workers"),
    [
        (("adapter=lora",), [1, 2]),
        (("resources.num_workers=2", "resources.sharding=fsdp", "resources.micro_batch_size=2"), [2, 1]),
        (("resources.num_workers=4", "resources.sharding=fsdp", "resources.micro_batch_size=1"), [4, 2]),
        (("resources.num_workers=2", "resources.sharding=fsdp", "resources.micro_batch_size=1", "--workers=4"), [2, 4]),
    ],
    ids=["lora", "divided to whole", "divided by four to two", "divided by two to four"],
)
def test_a_real_fine_tuning_survives_a_kill_to_the_bit_and_other_workers_within_the_tolerance(
    tmp_path: Path, more: tuple[str, ...], num_workers: list[int]
) -> None:
    own = [word for word in write_own_rows(tmp_path) if "preferences" not in word]
    leave = [f"~stages.{name}" for name in ("preferences", "cpt", "reward", "dpo", "evaluate")]
    overrides = ("stages.sft.inputs.policy=base", *more, "resources.cpus_per_worker=1")
    result = Command(tmp_path, *MODEL, *own, *leave, *overrides)("certify", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    killed, resharded = comparisons(result.stdout)["sft"].values()
    assert killed["verdict"] == "bit-identical", killed["detail"]
    assert resharded["verdict"] in ("bit-identical", "within tolerance"), resharded["detail"]
    assert (killed["num_workers"], resharded["num_workers"]) == ([num_workers[0]] * 2, num_workers)
    for each in (killed, resharded):
        assert each["resumed_at"][0] in (2, 4)
