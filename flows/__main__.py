"""The command line ``posttrain``, also ``python -m flows``: finds the command and turns errors into exit codes."""

import argparse
import contextlib
import errno
import gc
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from flows.commands.arguments import add_json, add_overrides
from flows.reports.wording import PrintableFormatter, printable, printable_text
from lineage.errors import ConfigError, PipelineError

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
    "rehearse": "run every stage for two steps, in minutes; keep nothing",
    "certify": "kill, resume and reshard a short run of every training; report whether it gives the same model",
    "data": "read rows as a data stage would, and report on them; run nothing",
    "export": "write a stage of GRPO, RLOO or PPO for verl: rows, settings, rewards",
    "stage": "run one stage without Prefect: what dvc.yaml calls",
    "lineage": "show all that an artifact was made from",
    "impact": "show all that a source, a file, a row, a label or a model went into",
    "diff": "show what differs in the ancestries of two artifacts, the most likely cause first",
    "diagnose": "read the curves of a stage; explain them, and say what to change",
    "blame": "evaluate the ancestors of two models; name the first stage whose model is worse",
    "tune": "train a stage in short rounds with the changes that diagnose proposes; keep the best settings",
    "verify": "read every byte again and check every link of the record",
    "promote": "point an alias to a model that passed its gate",
    "rollback": "point an alias back to its previous model",
    "rebuild": "refill MLflow from the manifests",
    "gc": "delete old outputs that nothing refers to; show them first, and ask",
    "status": "show running stages and the last runs",
    "logs": "print the log of a stage",
    "cancel": "stop a run and all its processes",
    "serve": "register every pipeline as a Prefect deployment, and execute its runs",
    "compat": "show which settings work together, and why others do not; with overrides, check the declared stages",
    "advise": "print a recipe for this data, model and machine, with the reason and source of every value",
    "doctor": "check that this machine is fit to run",
}
_OWN_ARGUMENTS = ("data", "diagnose", "tune")  # add all their arguments themselves
_WITHOUT_JSON = ("stage", "serve", "status", "logs", "cancel")  # a command's --json prints one object
# The module of flows.commands that defines run_NAME(options) and add_NAME(parser), unless it is called NAME.
_MODULES = {
    "plan": "run", "stage": "run", "export": "run", "certify": "rehearse", "impact": "lineage", "diff": "lineage",
    "blame": "lineage", "diagnose": "lineage",
    "verify": "store", "gc": "store", "rebuild": "store", "rollback": "promote", "logs": "status", "cancel": "status",
    "compat": "doctor",
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
        print(printable_text(f"posttrain: {error}"), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt as stop:
        how = f" {stop}" if stop.args else ""
        print(f"posttrain: stopped{how}; run the same command again to resume", file=sys.stderr)
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
        print(printable_text(f"posttrain: {text}"), file=sys.stderr)
        return ConfigError.exit_code if remedy else 1


def _run(arguments: Sequence[str]) -> int:
    sys.path.append(os.getcwd())  # for the user's own methods
    if logging.lastResort:  # it prints the warnings
        logging.lastResort.setFormatter(PrintableFormatter())
    parser = _parser(arguments)
    options, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-") or "overrides" not in options]
    if unknown:
        raise ConfigError(f"unknown option {unknown[0]}; see posttrain COMMAND --help")
    if rest:
        options.overrides += rest  # argparse stops collecting overrides at the first option
    if "data" not in arguments[:1]:  # which accepts files called year=2024/rows.jsonl, and checks its keys itself
        _warn_of_repeated([word for word in arguments if "=" in word and not word.startswith("-")])
    return int(options.command(options))


def _warn_of_repeated(overrides: Sequence[str]) -> None:
    """Warns of repeated overrides of a field: the last one counts, as in Hydra."""
    last = {word.lstrip("+").partition("=")[0]: word for word in overrides}
    for word in overrides:
        if (counts := last[word.lstrip("+").partition("=")[0]]) != word:
            print(printable(f"posttrain: {word} is ignored, since {counts} follows it"), file=sys.stderr)


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


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with the arguments of the called command, and only the names of the others, which are not imported."""
    parser = argparse.ArgumentParser(
        prog="posttrain", description="Trains language models after pretraining, as one graph."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, help_text in COMMANDS.items():
        sub = commands.add_parser(name, help=help_text, description=help_text)
        if name in arguments[:1]:
            module = importlib.import_module(f"flows.commands.{_MODULES.get(name, name)}")
            add = getattr(module, f"add_{name}", None)
            if add:
                add(sub)
            if name not in _OWN_ARGUMENTS:
                add_overrides(sub)
            if name not in (*_OWN_ARGUMENTS, *_WITHOUT_JSON):
                add_json(sub)
            sub.set_defaults(command=getattr(module, f"run_{name}"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
