"""Imports between our own modules, counting ``TYPE_CHECKING`` and deferred ones: no cycle, no file for one importer.

And the size of files and functions."""

import re
from collections import Counter
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("lineage", "tasks", "flows")
    for path in (ROOT / package).rglob("*.py")
}
_FUNCTION = re.compile(r"\s*(?:async )?def (\w+)")
_IMPORT = re.compile(r"^ *from ([\w.]+) import (?:\(([^)]*)\)|(.*))", re.MULTILINE)


def imports_of(module: str) -> set[str]:
    """The modules of ours that a module imports anywhere; a package only where the name is its own."""
    found = set[str]()
    for package, block, line in _IMPORT.findall(FILES[module].read_text(encoding="utf-8")):
        names = {f"{package}.{name}" for name in re.findall(r"\w+", block or line)} & FILES.keys()
        found |= names or {package} & FILES.keys()
    return found - {module}


GRAPH = {module: imports_of(module) for module in FILES}


def test_no_module_imports_itself_through_others():
    assert {*TopologicalSorter(GRAPH).static_order()} == FILES.keys()  # a CycleError names the modules


# Files that no other imports, or one: by name or pattern, with what starts them, or why they are files of their own.
ALONE = {
    "flows.__main__": "the command line",
    "flows.commands.*": "imported by name, when its command is called",
    "flows.commands.examples": "the texts of --help; its importer has 400 lines without them",
    "flows.peers.importing": "imported by name, when its command is called",
    "flows.declare.defaults": "one story: which stage takes what is set for all; its importer has 850 lines without it",
    "flows.peers.datasets": "one story: what a data set of a peer is here; its importer has 900 lines without it",
    "flows.serving.(chat|ui)": "imported by name, when its command is called",
    "flows.serving.ollama": "the files of one program; its importer has 400 lines without them",
    "flows.steps.client": "posttrain.steps: the SDK",
    "tasks.train.steps.renderers": "posttrain.steps: the SDK",
    "flows.steps.command": "imported by name, when its command is called",
    "flows.steps.tinker": "the protocol of one client",
    "flows.steps.commit": "the index and sources: its command's file parses alone, also for --help",
    "flows.dvc_yaml": "python -m: `make dvc-yaml`",
    "flows.prefect.(deployed|triggers)": "Prefect: `posttrain serve --help` does not import it",
    "flows.prefect.page": "a listener of a run, as each of the others is a file",
    "flows.reports.pages": "python -m: `make settings-page`",
    "flows.stages.imports_begin": "the first module that the fork server imports",
    "tasks.*": "a method: conf/stage names its class, or a stage of a user's own does",
    "tasks.quickstart.*": "rows of a source, whose identity is the code of its file and of what that imports",
    "tasks.reward_functions.sandbox": "python -P: runs the program of an answer in a process of its own",
    "flows.stages.exit_reasons": "why a process ended, as messages; launch.py starts and ends it",
    # Keeps a heavy import away from what starts fast.
    "flows.operate.blame": "the index and the plan: its command's file parses alone, also for --help",
    "flows.operate.canary": "pydantic and processes: its command's file parses alone, also for --help",
    "flows.operate.cancel": "psutil and locks: its command's file parses alone, also for --help",
    "flows.operate.certify": "the plan and torch: its command's file parses alone, also for --help",
    "flows.operate.gc_roots": "the index and the plan: its command's file parses alone, also for --help",
    "flows.progress.trackers": "trackers beside MLflow: a run without them does not import it",
    "flows.planning.plan_file": "libraries and code of a plan: its command's file parses alone, also for --help",
    "flows.reports.(impact|lineage|status)": "the index and drawings: the command's file parses alone, also for --help",
    "flows.sweep.plots": "Optuna and plotly",
    "flows.sweep.tune": "the plan and the doctor: its command's file parses alone, also for --help",
    "flows.verl.export": "the methods of reinforcement: its command's file parses alone, also for --help",
    "flows.verl.recipe": "settings of a library, as a table; its importer writes files",
    "lineage.mlflow.tracker": "MLflow",
    "tasks.train.losses.*_trainer": "torch and TRL: a method's file imports neither",
    "tasks.train.losses.actor_critic": "torch: PPO's file does not import it",
    "tasks.data.reading.delimited": "one family of files; the reader chooses among them",
    "tasks.evaluate.beside": "a process of its own, which the training starts by this name",
    "tasks.data.examine": "prepares and compares rows; the command reads its words and prints what was found",
    "tasks.reward_functions.code": "runs programs; the table of built-in functions has 400 lines",
    "tasks.train.kernels.fast_lora": "an option's own business: what an adapter's layers compute on a GPU",
    "tasks.train.loop.token_batches": "one story: how a step is divided by tokens, and repeated when memory runs out",
    "tasks.train.model_rules": "a part of the table of what works with what",
    "tasks.train.steps.workers": "one story: how the workers of a session divide a call; its importer has 600 lines",
    "tasks.train.light_imports": "imported by name, by the fork server",
    "tasks.judgement.canary": "python -m: recipes that run in a process of their own; tests build models with it",
    "tasks.model.gguf_file": "one format of files, which is written and read back",
    "tasks.model.weight_differences": "torch: certify.py starts without it",
}


def test_a_file_that_one_other_imports_belongs_into_it_or_says_why_not():
    importers = Counter(imported for found in GRAPH.values() for imported in found)
    alone = {module for module in FILES if importers[module] < 2 and FILES[module].name != "__init__.py"}
    reasons = {name: re.compile(name.replace(".", r"\.").replace("*", r"\w+")) for name in ALONE}
    assert not [module for module in sorted(alone) if not any(each.fullmatch(module) for each in reasons.values())]
    assert not [name for name, each in reasons.items() if not any(map(each.fullmatch, alone))], "no file needs these"


MOST_MODULES, MOST_LINES = 12, 900


def test_a_folder_has_few_modules_and_a_file_one_story():
    """``tasks`` holds the methods, whose paths are identity."""
    folders = Counter(path.parent.relative_to(ROOT).as_posix() for path in FILES.values() if path.stem != "__init__")
    assert {name: count for name, count in folders.items() if count > MOST_MODULES} == {"tasks": folders["tasks"]}
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in FILES.items()}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


MOST_IN_FUNCTION, MOST_IN_STORY = 60, 150
# What runs a stage, from its first line to its last.
STORIES = {"tasks.train.run.trl", "tasks.train.run.fit", "tasks.evaluate.evaluate.run"}


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    """Each function of a file, with the number of its lines."""
    open_ones: list[tuple[int, str, int]] = []  # indentation, name, first line
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate([*lines, "END"]):
        indent = len(line) - len(line.lstrip())
        if not line or line[indent] == ")":
            continue
        while open_ones and open_ones[-1][0] >= indent:
            _, name, first = open_ones.pop()
            yield name, len("\n".join(lines[first:number]).rstrip().splitlines())
        if found := _FUNCTION.match(line):
            open_ones.append((indent, found[1], number))


def test_a_function_has_60_lines_unless_it_runs_a_stage():
    found = [(f"{module}.{name}", size) for module, path in FILES.items() for name, size in functions_of(path)]
    assert {name for name, size in found if size > MOST_IN_FUNCTION} == STORIES
    assert all(size <= MOST_IN_STORY for _, size in found)
