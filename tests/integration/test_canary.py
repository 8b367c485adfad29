"""The canary: what a new library version changes is named, to the bit, within noise or beyond; and by which package."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from trl import SFTTrainer

from flows.__main__ import main
from flows.operate import canary
from lineage.filesystem.files import append_jsonl
from tasks.judgement import canary as recipes
from tests.command import REPOSITORY

OWN = REPOSITORY / "canary.json"
ONLY = ("sft", "merge")
QUICK = ("sft", "sft-packed", "dpo", "grpo", "steps", "merge", "evaluate", "generate-greedy", "prepare")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The inputs of all recipes, which no recipe changes."""
    return recipes.write_inputs(tmp_path_factory.mktemp("canary") / "inputs")


@pytest.fixture(autouse=True)
def _in_this_process(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipes run in the test's process, which has imported everything, on one set of inputs."""

    def process(
        file: Path, names: Sequence[str], *, noise: bool, environment: Mapping[str, str]
    ) -> tuple[int, str]:  # fmt: skip
        def emit(name: str, variant: str, outcome: recipes.Outcome) -> None:
            append_jsonl(file, {"name": name, "variant": variant, **recipes.asdict(outcome)}, flush=False)

        recipes.run_all(names, emit, noise=noise)
        return 0, ""

    def copied(root: Path) -> Path:
        shutil.copytree(written, root)
        return root

    monkeypatch.setattr(canary, "_process", process)
    monkeypatch.setattr(recipes, "write_inputs", copied)


@pytest.fixture(scope="module")
def kept() -> dict[str, str]:
    return {}


@pytest.fixture
def recorded(kept: dict[str, str], capsys: pytest.CaptureFixture[str]) -> Path:
    """A record of two recipes, written once."""
    if not kept:
        assert main(["canary", "record", "--only", *ONLY]) == 0
        assert "2 recipes in canary.json" in capsys.readouterr().out
        kept["text"] = Path("canary.json").read_text()
    Path("canary.json").write_text(kept["text"])
    return Path("canary.json")


def edit(path: Path, change: Callable[[dict], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def check(capsys: pytest.CaptureFixture[str], *overrides: str) -> tuple[int, dict[str, dict], dict]:
    """The exit code, the recipes by name, and the whole object."""
    code = main(["canary", "check", "--json", *overrides])
    document = json.loads(capsys.readouterr().out)
    return code, {each["name"]: each for each in document["recipes"]}, document


def test_recipes_run_again_are_equal_to_the_bit(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(recorded.read_text())
    assert document["packages"]["transformers"] == metadata.version("transformers")
    assert {"cpu", "instructions"} <= document["machine"].keys()
    for recipe in document["recipes"].values():
        assert recipe["figures"].keys() == recipe["noise"].keys()
        assert recipe["digests"]["weights"]
        assert recipe["seconds"] > 0
    assert main(["canary", "check"]) == 0
    out = capsys.readouterr().out
    assert out.count("equal to the bit") == len(ONLY)
    assert out.rstrip().endswith("nothing beyond noise")


def test_without_a_record_in_the_folder_the_shipped_one_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["canary", "check", "--only", "merge"]) in (0, 3)
    assert capsys.readouterr().out.startswith(f"compared with {OWN}\n")


def test_a_loss_of_a_thousandth_more_is_beyond_noise(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SFTTrainer.compute_loss

    def scaled(*args: object, **kwargs: object) -> object:
        found = original(*args, **kwargs)
        return (found[0] * 1.001, *found[1:]) if isinstance(found, tuple) else found * 1.001

    monkeypatch.setattr(SFTTrainer, "compute_loss", scaled)
    code, found, document = check(capsys)
    assert code == 3
    assert document["beyond"] == ["sft"]
    assert found["merge"]["verdict"] == "equal to the bit"
    (loss,) = (each for each in found["sft"]["moved"] if each["figure"] == "loss")
    assert loss["found"] == pytest.approx(1.001 * loss["recorded"], rel=1e-3)
    assert loss["difference"] > 100 * loss["noise"] > 0
    assert main(["canary", "check", "--only", "sft"]) == 3
    out = capsys.readouterr().out
    assert f"was {loss['recorded']:.9g}" in out or "grad_norm" in out
    assert "1 recipe beyond noise: sft" in out


def test_another_digest_beside_equal_figures_is_beyond_noise(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(recorded, lambda each: each["recipes"]["merge"]["digests"].update(weights="0" * 64))
    code, found, _ = check(capsys, "--only", "merge")
    assert code == 3
    (moved,) = found["merge"]["moved"]
    assert (moved["figure"], moved["recorded"]) == ("digest of weights", "0" * 64)
    assert len(moved["found"]) == 64


def within_noise(document: dict) -> None:
    merge = document["recipes"]["merge"]
    merge["figures"]["weights"][1] += merge["noise"]["weights"] / 2
    merge["digests"]["weights"] = "0" * 64


def test_what_moves_by_less_than_the_noise_passes(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(recorded, within_noise)
    code, found, _ = check(capsys, "--only", "merge")
    assert (code, found["merge"]["verdict"]) == (0, "within noise")
    assert [each["figure"] for each in found["merge"]["moved"]] == ["weights", "digest of weights"]
    edit(recorded, lambda each: each["recipes"]["merge"]["noise"].update(weights=1e-12))
    assert check(capsys, "--only", "merge")[0] == 3


def test_a_figure_that_is_new_is_no_change_and_one_that_is_gone_is(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(recorded, lambda each: each["recipes"]["merge"]["figures"].pop("parameters"))
    assert check(capsys, "--only", "merge")[0] == 0
    edit(recorded, lambda each: each["recipes"]["merge"]["figures"].update(gone=[1.0]))
    code, found, _ = check(capsys, "--only", "merge")
    (moved,) = found["merge"]["moved"]
    assert (code, moved["figure"], moved["recorded"], moved["found"]) == (3, "gone", 1.0, None)


def test_on_another_cpu_no_digest_alone_fails(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def moved(document: dict) -> None:
        within_noise(document)
        document["recipes"]["sft"]["digests"]["weights"] = "0" * 64
        document["machine"] = {"cpu": "Another 9000", "instructions": "avx2"}
        document["packages"]["trl"] = "0.1"
        document["recipes"]["sft"]["seconds"] /= 100

    edit(recorded, moved)
    assert main(["canary", "check"]) == 0
    out = capsys.readouterr().out
    assert "other CPU: compared within noise (recorded on Another 9000, this is " in out
    assert f"trl 0.1 -> {metadata.version('trl')}" in out
    assert "times the recorded" in out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda each: each.clear(), "not a record of posttrain canary"),
        (lambda each: each.update(form="posttrain canary 9"), "form"),
        (lambda each: each["recipes"].pop("sft"), "recipe sft is missing"),
        (lambda each: each["recipes"].update(psychic=each["recipes"]["sft"]), "recipe psychic is none of this version"),
        (lambda each: each["recipes"]["sft"].pop("noise"), "recipes.sft.noise: Field required"),
    ],
)
def test_a_file_that_is_no_record_is_refused(
    recorded: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict], None], message: str
) -> None:
    edit(recorded, change)
    assert main(["canary", "check"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "posttrain canary record --out canary.json" in err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["check", "nowhere.json"], "nowhere.json: cannot be read"),
        (
            ["check", "--only", "dpo", "--only", "merge"],
            "--only dpo: canary.json has no such recipe; it has: sft, merge",
        ),
        (["record", "--only", "psychic", "--only", "sft"], "--only psychic: no such recipe; there are: cpt, sft"),
        (["record", "--only", "sft-gpu"], "none of these recipes can run here (sft-gpu: no NVIDIA GPU here)"),
        (["check", "--isolated"], "unknown option --isolated"),
    ],
)
@pytest.mark.usefixtures("recorded")
def test_wrong_words_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    monkeypatch.setattr(recipes, "hardware", dict)
    assert main(["canary", *overrides]) == 2
    assert message in capsys.readouterr().err


def test_an_interrupted_or_failing_record_leaves_the_old_one(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, ends = recorded.read_text(), iter([KeyboardInterrupt(), None])

    def process(file: Path, names: Sequence[str], **kwargs: object) -> tuple[int, str]:
        append_jsonl(file, {"name": names[0], "variant": "", "figures": {}, "digests": {}, "seconds": 1, "error": ""})
        if end := next(ends):
            raise end
        return 1, "its process ended by exit code 1: ImportError: none"

    monkeypatch.setattr(canary, "_process", process)
    assert main(["canary", "record", "--only", *ONLY]) == 130
    assert main(["canary", "record", "--only", "sft"]) == 1
    assert "recipe sft failed: its process ended" in capsys.readouterr().err
    assert [each.name for each in Path().iterdir()] == ["canary.json"]
    assert recorded.read_text() == before


def test_a_recipe_that_ends_its_process_is_named_and_the_others_are_compared(
    recorded: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = canary._process, list[Sequence[str]]()

    def process(
        file: Path, names: Sequence[str], *, noise: bool, environment: Mapping[str, str]
    ) -> tuple[int, str]:  # fmt: skip
        calls.append(names)
        if names[0] == "sft":
            return -11, "its process ended by signal 11"
        return original(file, names, noise=noise, environment=environment)

    monkeypatch.setattr(canary, "_process", process)
    code, found, _ = check(capsys)
    assert code == 3
    assert found["sft"]["moved"][0]["found"] == "its process ended by signal 11"
    assert found["merge"]["verdict"] == "equal to the bit"
    assert list(map(list, calls)) == [["sft", "merge"], ["merge"]]


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("a warning\nTraceback:\n  File 'a'\ntrl.core.RowError: none\n[W] a pool\n", "trl.core.RowError: none"),
        ("Fatal Python error: Aborted\n\nThread 0x1:\n a\nExtension modules: a\n", "Fatal Python error: Aborted"),
        ("terminate called after\n  what():  no kernel\nAborted\n", "what():  no kernel"), ("Killed\n", "Killed"),
        ("", ""),
    ],
)  # fmt: skip
def test_a_crash_is_explained_by_the_line_of_its_error(log: str, expected: str) -> None:
    assert canary.error_line(log) == expected


# --- the project's own canary


def test_the_own_canary_has_every_recipe_and_a_recipe_every_method() -> None:
    own = canary.read(OWN)
    assert set(own.recipes) | set(own.left_out) == set(recipes.RECIPES)
    methods = {type(each.method) for each in recipes.RECIPES.values()}
    assert set(recipes.METHODS.values()) < methods


def test_the_own_canary_was_recorded_with_the_versions_of_the_lock() -> None:
    """So a changed lock fails until all recipes are recorded with it, whose figures the commit then shows."""
    lines = (REPOSITORY / "requirements.lock").read_text().splitlines()
    pins = [Requirement(line.partition(" #")[0]) for line in lines if line and not line.lstrip().startswith(("#", "-"))]
    locked = {(canonicalize_name(pin.name), str(pin.specifier).removeprefix("==")) for pin in pins}
    recorded = canary.read(OWN).packages
    assert "torch" in recorded and len(recorded) > 40
    others = {name: version for name, version in recorded.items() if (name, version.partition("+")[0]) not in locked}
    assert not others, (
        f"of other versions than requirements.lock: {others}: install the lock, `make canary` names what changes, and "
        "`posttrain canary record` records all recipes"
    )


@pytest.mark.parametrize("name", QUICK)
def test_the_own_canary_sings(name: str, written: Path) -> None:
    """All recipes: `make canary`."""
    own = canary.read(OWN)
    found = canary.compare(
        name, own.recipes[name], recipes.run(name, written), margin=own.margin,
        same_machine=own.machine == canary.machine(),
    )  # fmt: skip
    assert found.verdict != "beyond noise", (
        f"{found.moved}; packages that moved: {canary.moved_packages(own)}; posttrain canary check --isolate names the "
        "one; if the change is meant: posttrain canary record"
    )


# --- the package


def distribution(folder: Path, name: str, version: str, *requires: str) -> Path:
    place = folder / f"{name}-{version}.dist-info"
    place.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {x}" for x in requires),
    ]
    (place / "METADATA").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture
def present(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path / "present"))
    return tmp_path / "present"


def test_packages_that_require_each_other_are_tried_together(tmp_path: Path, present: Path) -> None:
    old = {
        "ptone": distribution(tmp_path / "one", "ptone", "1", "pttwo<2"),
        "pttwo": distribution(tmp_path / "two", "pttwo", "1"),
        "ptthree": distribution(tmp_path / "three", "ptthree", "1", "numpy"),
    }
    distribution(present, "ptone", "2", "pttwo>=2")
    distribution(present, "pttwo", "2")
    distribution(present, "ptthree", "2", "ptone")
    assert canary.resolvable("ptone", old) == ({"ptone", "pttwo"}, "ptone 2 requires pttwo>=2")
    assert canary.resolvable("pttwo", old) == ({"ptone", "pttwo"}, "ptone 1 requires pttwo<2")
    assert canary.resolvable("ptthree", old) == ({"ptthree"}, "")


def test_each_package_is_tried_alone_and_what_none_explains_is_reported(
    tmp_path: Path, present: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One package changes sft, two that require each other change dpo, two only together cpt; kto is other.

    Of one the record has no version, as it is new, and one is not found: neither is ever as it was.
    """
    requires = {"pta": (), "ptb": ("ptc>=2",), "ptc": (), "ptd": (), "pte": (), "ptf": ()}
    for name, needs in requires.items():
        distribution(present, name, "2", *needs)
    changed_by = {"sft": {"pta"}, "dpo": {"ptb", "ptc"}, "cpt": {"pta", "ptd"}, "kto": set[str]()}

    def install(name: str, version: str, folder: Path) -> str:
        if name != "pte":
            distribution(folder, name, version)
        return "uv: none" if name == "pte" else ""

    def run(names: Sequence[str], *, environment: Mapping[str, str] | None = None) -> dict:
        folders = {Path(each).name for each in (environment or {}).get("PYTHONPATH", "").split(os.pathsep)}
        new = requires.keys() - folders
        return {name: {"": recipes.Outcome(figures={"loss": [float(changed_by[name] <= new)]})} for name in names}

    monkeypatch.setattr(canary, "install", install)
    monkeypatch.setattr(canary, "run_recipes", run)
    monkeypatch.setattr(canary, "package_versions", lambda: dict.fromkeys([*requires, "ptg"], "2"))
    zero = {"figures": {"loss": [0.0]}, "noise": {"loss": 1e-7}, "digests": {}, "seconds": 1.0}
    edit(recorded, lambda each: each.update(
        names=list(changed_by), recipes=dict.fromkeys(changed_by, zero), packages=dict.fromkeys(requires, "1")
    ))  # fmt: skip
    assert main(["canary", "check", "--isolate"]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert "changed by pta 1 -> 2: sft" in lines
    assert "changed by ptb 1 -> 2 and ptc 1 -> 2 (tried together: ptb 2 requires ptc>=2): dpo" in lines
    assert "changed by no package alone: cpt" in lines
    why = "changed with all packages but pte, ptg as recorded too, so by pte, ptg, the code, Python or the machine: kto"
    assert why in lines
    assert "could not be installed as recorded: pte (uv: none)" in lines
    assert lines[-1] == "4 recipes beyond noise: sft, dpo, cpt, kto"


def wheel(folder: Path, name: str) -> None:
    """The wheel of an installed package of Python files."""
    found = metadata.distribution(name)
    with zipfile.ZipFile(folder / f"{name}-{found.version}-py3-none-any.whl", "w") as file:
        for each in found.files or ():
            if ".." not in each.parts and each.suffix != ".pyc":
                file.write(str(each.locate()), str(each))


def upgraded(folder: Path, name: str, version: str, change: str = "") -> None:
    """An installed package under another version, with Python code at its end."""
    found = metadata.distribution(name)
    place = Path(str(found.locate_file(name)))
    shutil.copytree(place, folder / name)
    with (folder / name / "__init__.py").open("a") as file:
        file.write(change)
    distribution(folder, name, version, *(found.requires or ()))


@pytest.mark.slow
def test_the_package_that_changes_results_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two packages move: jinja2, which now renders templates otherwise, and tqdm, which changes no result."""
    index, overlay = tmp_path / "index", tmp_path / "overlay"
    index.mkdir()
    for name in ("jinja2", "tqdm"):
        wheel(index, name)
    render = "\n_render = Template.render\nTemplate.render = lambda *a, **k: _render(*a, **k).replace('list', 'tsil')\n"
    upgraded(overlay, "jinja2", "3.99", render)
    upgraded(overlay, "tqdm", "4.99")
    environment = {**os.environ, "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(index), "UV_CACHE_DIR": str(tmp_path / "uv")}

    def posttrain(*overrides: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows", "canary", *overrides]
        settings = {**environment, **variables}
        return subprocess.run(command, env=settings, capture_output=True, text=True, timeout=500)

    done = posttrain("record", "--only", "sft", "merge")
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(REPOSITORY), str(overlay)])
    done = posttrain("check", "--isolate", "--json", PYTHONPATH=path)
    assert done.returncode == 3, done.stderr
    found = json.loads(done.stdout)
    assert found["packages"].keys() == {"jinja2", "tqdm"}
    assert found["isolated"] == {
        "causes": [{"packages": ["jinja2"], "recipes": ["sft"], "reason": ""}],
        "not_by_packages": [], "only_together": [], "unavailable": {},
    }  # fmt: skip
