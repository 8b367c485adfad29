"""The command line ``posttrain``, also ``python -m flows``: the commands, and errors as exit codes.

``plan``, ``run`` and ``stage`` are defined here, the other commands in ``flows.commands`` and ``flows.serving``.
"""

import argparse
import contextlib
import errno
import gc
import importlib
import json
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from flows.commands.arguments import add_json, add_overrides, add_sweep, known_refs, read_overrides, recorded_cli_args
from flows.commands.examples import EXAMPLES, no_command, no_option, overview
from flows.declare.project import read_project
from flows.reports.wording import ScreenFormatter, coloured, on_screen
from lineage.errors import ArtifactError, ConfigError, PipelineError
from lineage.filesystem.files import local_path
from posttrain import first

_OVERRIDE = re.compile(r"[+~]{0,2}[\w.]+=.*", re.DOTALL)
UNFINISHED = 4  # exit code of plan --exit-code if a run would do something
STOPPED = 130
_EXIT_SECONDS = 1.5
_GARBAGE = 100_000  # threshold of the garbage collector; Python's default is 700
# Errors of the operating system that the user's input causes -> what to do; all others are failures of the machine.
_OWN = "a path that this account may read and write is accepted; change its mode, or name another, such as store=DIR"
_OF_INPUT = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _OWN) | {
    errno.ENAMETOOLONG: "names of at most 255 bytes are accepted; shorten the path",
    errno.EINVAL: "a file that can be read to its end is accepted, and this one cannot; name another",
    errno.ENOENT: "a file that stays there until the command ends is accepted; restore it, or name another",
    errno.ENOTDIR: "a part of this path is a file; name a directory",
    errno.EISDIR: "a file is accepted; name one in this directory",
}
COMMANDS = {
    "plan": "show what would run, what is reused, and why; run nothing",
    "run": "plan, then run what is not finished",
    "init": "make a project of your own: settings, data looked at, a recipe",
    "rehearse": "run every stage for two steps, in minutes; keep nothing",
    "certify": "kill, resume and reshard a short run of every training; report whether it gives the same model",
    "canary": "run small recipes of every method and kernel; later name what a new version of a library changed",
    "data": "read rows as a data stage would, and report on them; run nothing",
    "chat": "talk with a model, or with two side by side",
    "import": "make a pipeline of a configuration of LLaMA-Factory, axolotl, TRL or Oumi",
    "serve-model": "serve a model by the OpenAI protocol",
    "steps": "serve sessions whose training steps your program calls; make a key; commit a session as a stage",
    "replay": "execute the command log of a committed session again; compare its files to the bit",
    "export": "write a model as whole weights, GGUF or for Ollama, or push it; or a stage for verl",
    "stage": "run one stage without Prefect: what dvc.yaml calls",
    "lineage": "show all that an artifact was made from",
    "report": "write the page of a model: use, scores, curves, data, recipe, cost; or its card for the hub",
    "impact": "show all that a source, a file, a row, a label or a model went into",
    "diff": "show what differs in the ancestries of two artifacts, the most likely cause first",
    "diagnose": "read the curves of a stage; explain them, and say what to change",
    "blame": "evaluate the ancestors of two models; name the first stage whose model is worse",
    "tune": "train a stage in short rounds with the changes that diagnose proposes; keep the best settings",
    "verify": "read every byte again and check every link of the record",
    "gate-check": "put known-right and known-wrong answers through the gates of a pipeline; run nothing",
    "promote": "point an alias to a model that passed its gate",
    "rollback": "point an alias back to its previous model",
    "rebuild": "refill MLflow from the manifests",
    "gc": "delete old outputs that nothing refers to; show them first, and ask",
    "status": "show running stages and the last runs",
    "logs": "print the log of a stage",
    "cancel": "stop a run and all its processes",
    "serve": "register every pipeline as a Prefect deployment, and execute its runs",
    "ui": "show runs, models, data and sweeps of a store as a read-only site on this machine",
    "compat": "show which settings work together, and why others do not; with overrides, check the declared stages",
    "advise": "print a recipe for this data, model and machine, with the reason and source of every value",
    "doctor": "check that this machine is fit to run",
}
_COMPLETION = "--print-completion"
# Commands that add all their arguments themselves.
_OWN_ARGUMENTS = ("init", "data", "diagnose", "report", "tune", "gate-check")
_WITHOUT_JSON = ("stage", "serve", "serve-model", "status", "logs", "cancel")  # a command's --json prints one object
_WITHOUT_REF = ("report", "verify")  # which take none too
_WITH_ACTIONS = ("steps", "canary")  # each of their actions has a function and arguments of its own
_MISSING = {  # argument -> what it may be
    "RUN": "posttrain status shows the runs; latest is accepted",
    "STAGE": "a stage of the pipeline is accepted, such as sft",
    "--alias": "an alias is accepted, such as champion",
    "SOURCE|OVERRIDE": "a file, a folder, a URL or a hub id is accepted, such as chats.jsonl",
    "SESSION": "the id of a session is accepted, which posttrain steps serve gives",
}
_HERE = ("plan", "run", "stage")
# The module that defines run_NAME(options) and add_NAME(parser), unless it is flows.commands.NAME.
_MODULES = {
    "certify": "rehearse", "canary": "rehearse", "tune": "rehearse",
    "report": "lineage", "impact": "lineage", "diff": "lineage", "blame": "lineage", "diagnose": "lineage",
    "verify": "store", "gc": "store", "rebuild": "store", "rollback": "promote", "gate-check": "promote",
    "logs": "status", "cancel": "status",
    "compat": "doctor",
    "chat": "flows.serving.chat", "export": "flows.serving.export",
    "serve-model": "flows.serving.serve_model", "import": "flows.peers.importing", "ui": "flows.serving.ui",
    "steps": "flows.steps.command", "replay": "flows.steps.command",
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    0 done, 2 the input was wrong, 1 a stage failed, 3 a gate refused, 130 stopped; `plan --exit-code`: 4, stages are
    unfinished.
    """
    if arguments is None:  # a process of its own, whose imports would spend a fifth of their time collecting garbage
        gc.set_threshold(_GARBAGE)
        if sys.argv[1:2] == ["plan"]:  # short-lived, and creates little garbage
            gc.disable()
    try:
        with _interruptible():
            return _run(sys.argv[1:] if arguments is None else arguments)
    except PipelineError as error:
        print(coloured(on_screen(f"posttrain: {error}"), sys.stderr), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        how = f" {stop}" if stop.args else ""
        command = (sys.argv[1:] if arguments is None else arguments)[:1]
        more = "" if command == ["data"] else "; run the same command again to resume"
        print(f"posttrain: stopped{how}{more}", file=sys.stderr)
        if arguments is None:  # called from a shell
            _end_soon()
        return STOPPED
    except BrokenPipeError:  # `posttrain plan | head`: only output is lost
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        remedy = _OF_INPUT.get(error.errno or 0)
        where = f"{error.filename}: " if error.filename else ""
        text = f"{where}{error.strerror}; {remedy}" if remedy else f"{type(error).__name__}: {error}"
        print(on_screen(f"posttrain: {text}"), file=sys.stderr)
        return ConfigError.exit_code if remedy else 1
    finally:
        # Python ends by collecting the garbage of thousands of modules, which takes a second. DuckDB's binding prints
        # what is not collected as leaks.
        if arguments is None and "_duckdb" not in sys.modules:
            gc.freeze()


def _run(arguments: Sequence[str]) -> int:
    first()
    if logging.lastResort:  # it prints the warnings
        logging.lastResort.setFormatter(ScreenFormatter())
    if arguments and arguments[0] not in (*COMMANDS, "-h", "--help", "--version", _COMPLETION):
        raise no_command(arguments[0], arguments, list(COMMANDS))
    options, rest = _parser(arguments).parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-") or "overrides" not in options]
    if unknown:
        raise no_option(unknown, arguments)
    if rest:
        options.overrides += rest  # argparse stops collecting overrides at the first option
    cli_args = [getattr(options, "ref", None) or "", *getattr(options, "overrides", ())]
    if (
        arguments[0] not in _WITHOUT_REF and cli_args[0] and all(map(_OVERRIDE.fullmatch, cli_args))
    ):  # argparse takes the first override for the REF
        raise ConfigError(f"{arguments[0]}: no REF is given; {known_refs(arguments)}")
    if "data" not in arguments[:1]:  # which accepts files called year=2024/rows.jsonl, and checks its keys itself
        if "overrides" in options:
            _name_first(options, is_optional=arguments[0] in (*_WITHOUT_REF, "gate-check"))
            read_project(options)
        if arguments[0] != "init":  # whose --data may name one source for several files
            _warn_of_repeated([word for word in arguments if "=" in word and not word.startswith("-")])
    return int(options.command(options))


def _name_first(options: argparse.Namespace, *, is_optional: bool) -> None:
    """Takes an override that stands before the name (REF, STAGE ...), or instead of one that is optional, as such."""
    for slot in ("ref", "name", "session", "run"):
        word = getattr(options, slot, None) or ""
        if _OVERRIDE.fullmatch(word):
            others = [each for each in options.overrides if not _OVERRIDE.fullmatch(each)]
            name = next((each for each in others if each[0] != "~" and not each.endswith((".yaml", ".yml"))), "")
            if name or is_optional:
                setattr(options, slot, name)
                options.overrides = [word, *(each for each in options.overrides if each != name)]


def _warn_of_repeated(overrides: Sequence[str]) -> None:
    """Warns of repeated overrides of a field: the last one counts, as in Hydra."""
    last = {word.lstrip("+").partition("=")[0]: word for word in overrides}
    for word in overrides:
        if (counts := last[word.lstrip("+").partition("=")[0]]) != word:
            print(on_screen(f"posttrain: {word} is ignored, since {counts} follows it"), file=sys.stderr)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into ``KeyboardInterrupt``, as Ctrl-C does."""
    numbers = [signal.SIGTERM, signal.SIGHUP]
    handled = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]  # `nohup` ignores SIGHUP
    for number in handled:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _end_soon() -> None:
    """Exits without waiting for libraries that report to a server: after 30 s the process would be killed."""
    end = threading.Timer(_EXIT_SECONDS, os._exit, (STOPPED,))
    end.daemon = True
    end.start()


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions and examples, folded on a screen."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return on_screen(super()._fill_text(text, width, indent))


class _Parser(argparse.ArgumentParser):
    """A parser that says what there is where a REF is missing."""

    cli_args: Sequence[str] = ()

    def error(self, message: str) -> NoReturn:
        """Exits with 2."""
        wanted = message.partition("required: ")[2].split(", ")[0]
        if wanted in ("REF", "A", "B"):
            message = f"{message}; {known_refs(self.cli_args)}"
        elif hint := _MISSING.get(wanted):
            message = f"{message}; {hint}"
        self.print_usage(sys.stderr)
        self.exit(ConfigError.exit_code, on_screen(f"{self.prog}: error: {message}") + "\n")


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with the arguments of the called command, and only the names of the others, which are not imported."""
    is_whole, is_help = arguments[:1] == [_COMPLETION], arguments[:1] in (["--help"], ["-h"], [])
    parser = _Parser(
        prog="posttrain", description="Trains language models after pretraining, as one graph.", formatter_class=_Help,
        epilog=overview(COMMANDS) if is_help else None, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"posttrain {version('posttrain')}")
    if is_whole:
        import shtab

        shtab.add_argument_to(parser, [_COMPLETION])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        examples = f"examples:{EXAMPLES.get(name, '').replace(chr(10), chr(10) + '  ')}"
        # The epilog has the help of all commands, in groups.
        add_command = commands.add_parser if is_help else partial(commands.add_parser, help=help_text)
        sub = add_command(name, description=help_text, epilog=examples, formatter_class=_Help, allow_abbrev=False)
        sub.cli_args = arguments
        if is_whole or name in arguments[:1]:
            own = _MODULES.get(name, name)
            own = own if "." in own else f"flows.commands.{own}"
            module = sys.modules[__name__] if name in _HERE else importlib.import_module(own)
            add = getattr(module, f"add_{name.replace('-', '_')}", None)
            if add:
                add(sub)
            if name not in (*_OWN_ARGUMENTS, *_WITH_ACTIONS):
                add_overrides(sub)
            if name not in (*_OWN_ARGUMENTS, *_WITH_ACTIONS, *_WITHOUT_JSON):
                add_json(sub)
            if name not in _WITH_ACTIONS:
                sub.set_defaults(command=getattr(module, f"run_{name.replace('-', '_')}"))
    return parser


def add_plan(parser: argparse.ArgumentParser) -> None:
    add_sweep(parser)
    parser.add_argument("--out", type=local_path, metavar="FILE", help="write the plan to a file, for run --plan FILE")
    parser.add_argument(
        "--suggest", type=local_path, metavar="FILE", help="write the overrides that make every stage fit into memory"
    )
    parser.add_argument("--exit-code", action="store_true", help=f"exit with {UNFINISHED} if a run would do something")


def run_plan(options: argparse.Namespace) -> int:
    read_overrides(options)
    if options.multirun:
        from flows.reports.sweep import union_dict, union_text
        from flows.sweep.plan import read_sweep

        _refuse_with_sweep(options, "out", "suggest", "exit_code")
        sweep = read_sweep(options.overrides, options.config_dir)
        _require_place(sweep.plan.pipeline.store, sweep.stale)
        print(json.dumps(union_dict(sweep), indent=2) if options.json else union_text(sweep))
        return 0
    from flows.declare.config import load_pipeline
    from flows.planning.estimates import Estimator, History, estimate_notes, with_notes
    from flows.planning.fit import require_fits
    from flows.planning.plan import make_plan
    from flows.progress.declared import adopt_view
    from flows.promotion.retrain import has_work, pending
    from flows.reports.run import plan_dict, plan_table

    pipeline = load_pipeline(options.overrides, options.config_dir)
    adopt_view(pipeline)
    plan = make_plan(pipeline)
    _require_place(pipeline.store, plan.stale)
    plan = with_notes(plan)
    plan = replace(plan, notes=[*plan.notes, *pending(plan)])
    if block := pipeline.operation.notify:
        plan = replace(plan, notes=[*plan.notes, f"notify={block}: a run asks Prefect whether it has this block"])
    estimator = Estimator(plan, History.of(plan.home))
    found = estimator.estimates(plan.stale)
    plan = replace(plan, notes=[*plan.notes, *estimate_notes(plan, found)])
    require_fits(plan, found, estimator, options.suggest)
    shown = plan, found, estimator.scorings(plan.stale)
    print(json.dumps(plan_dict(*shown), indent=2) if options.json else coloured(plan_table(*shown), sys.stdout))
    if options.out:
        from flows.planning.plan_file import write_plan

        write_plan(plan, options.out, options.overrides, options.config_dir)
    return UNFINISHED if options.exit_code and has_work(plan) else 0


def _require_place(store: Path, stale: Sequence[object]) -> None:
    """Refuses a store into which the stages to run could not write."""
    from lineage.store import require_writable

    if stale:
        require_writable(store)


def _refuse_with_sweep(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} with --multirun: it is for the plan of one run; leave one of them out"
            )


def add_run(parser: argparse.ArgumentParser) -> None:
    add_sweep(parser)
    parser.add_argument(
        "--plan", type=local_path, metavar="FILE", help="run the plan that plan --out wrote; refuse if it has changed"
    )


def run_run(options: argparse.Namespace) -> int:
    read_overrides(options)
    if options.multirun:
        from flows.sweep.run import run_sweep

        _refuse_with_sweep(options, "plan")
        return run_sweep(
            options.overrides, options.config_dir, ["--multirun", *recorded_cli_args(options)], as_json=options.json
        )
    from flows.declare.config import load_pipeline
    from flows.planning.checks import guess_notes
    from flows.planning.estimates import Estimator, History, read_rows
    from flows.planning.fit import require_fits
    from flows.planning.plan import make_plan
    from flows.planning.plan_file import read_plan, require_approved
    from flows.progress.declared import adopt_view
    from flows.run import run_plan as execute
    from lineage.store import create_store

    approved = read_plan(options.plan) if options.plan else None
    if approved and not options.overrides:
        options.overrides = approved.overrides
        options.config_dir = options.config_dir or approved.config_dir
    pipeline = load_pipeline(options.overrides, options.config_dir)
    if not approved:
        create_store(pipeline.store)
    adopt_view(pipeline)
    plan = make_plan(pipeline)
    plan, _ = read_rows(plan)
    plan = replace(plan, notes=[*plan.notes, *guess_notes(plan.pipeline, [each.name for each in plan.stale])])
    estimator = Estimator(plan, History.of(plan.home))
    found = estimator.estimates(plan.stale)
    require_fits(plan, found, estimator)
    if approved:
        require_approved(plan, approved)
        create_store(pipeline.store)
    expected = {name: each.seconds for name, each in found.items()}
    expected |= {name: each.seconds for name, each in estimator.scorings(plan.stale).items()}
    return execute(plan, recorded_cli_args(options), as_json=options.json, expected=expected)


def add_stage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="STAGE", help="a stage of the pipeline, whose inputs are finished")


def run_stage(options: argparse.Namespace) -> int:
    from flows.declare.config import load_pipeline
    from flows.declare.pipeline import require_stage
    from flows.planning.plan import make_plan
    from flows.planning.verdicts import require_passed
    from flows.progress.declared import adopt_view, show_declared
    from flows.progress.tracking import complete_record
    from flows.run import run_one
    from lineage.store import create_store

    pipeline, name = load_pipeline(options.overrides, options.config_dir), options.name
    require_stage(pipeline, name)
    create_store(pipeline.store)
    adopt_view(pipeline)
    plan = make_plan(pipeline)
    planned = plan.stage(name)
    for upstream in dict.fromkeys(planned.upstream):
        if plan.stage(upstream).state != "reuse":
            reason = plan.stage(upstream).reason
            raise ArtifactError(
                f"stage {name} reads {upstream}, which is not finished ({reason}); run that first, "
                "or everything: posttrain run, dvc repro"
            )
    complete_record(pipeline)
    if planned.state == "reuse":
        plan.entry(planned).require_intact()  # DVC would commit a damaged output as a new one
        print(f"nothing to do: {name} is finished: {plan.entry(planned).output}")
    else:
        run_one(plan, name, recorded_cli_args(options))
        print(plan.entry(planned).output)
    show_declared(plan, recorded_cli_args(options), [name])
    require_passed(replace(plan, stages=[planned]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
