"""What ``--help`` shows, and the answers to commands and options that other tools have."""

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import fill

from flows.declare.store_root import CONFIG
from lineage.errors import ConfigError

EXAMPLES: Mapping[str, str] = {
    "plan": """
posttrain plan
posttrain plan pipeline=sft model=smollm2 data=chats.jsonl
posttrain plan stages.dpo.method.beta=0.2 --json""",
    "run": """
posttrain run
posttrain run pipeline=sft model=smollm2 data=chats.jsonl
posttrain run --multirun stages.dpo.method.beta=0.05,0.1,0.3""",
    "init": """
posttrain init mine
posttrain init mine --model smollm2 --data qa.csv
posttrain init mine --from qlora --model owner/name --data chats.jsonl""",
    "rehearse": """
posttrain rehearse
posttrain rehearse pipeline=sft model=owner/name data=chats.jsonl
posttrain rehearse resources=cluster --keep""",
    "certify": """
posttrain certify
posttrain certify pipeline=sft-grpo
posttrain certify resources=cluster --json""",
    "canary": """
posttrain canary record
posttrain canary check
posttrain canary check --only sft dpo --isolate""",
    "data": """
posttrain data chats.jsonl
posttrain data questions.csv kind=conversations columns.prompt=question columns.completion=answer
posttrain data chats.jsonl model=owner/name max_length=1024 --html report.html""",
    "gate-check": """
posttrain gate-check cpt-sft-dpo-gated
posttrain gate-check cpt-sft-dpo-retrain --json
posttrain gate-check ours --config-dir our_conf""",
    "export": """
posttrain export gguf cpt-sft-dpo/dpo --type q8_0
posttrain export hub alias:champion --repo owner/name --private
posttrain export verl grpo pipeline=sft-grpo --ability math""",
    "chat": """
posttrain chat cpt-sft-dpo/dpo
posttrain chat cpt-sft-dpo/sft cpt-sft-dpo/dpo
posttrain chat alias:champion --once 'Is pathlib.Path a class?'""",
    "import": """
posttrain import llamafactory llama3_lora_sft.yaml
posttrain import axolotl config.yml --num-workers 4 --out conf/pipeline/ours.yaml
posttrain import trl train.sh --training dpo --leave-out push_to_hub""",
    "ui": """
posttrain ui
posttrain ui store=/data/store
posttrain ui --port 0 --json""",
    "serve-model": """
posttrain serve-model cpt-sft-dpo/dpo
posttrain serve-model alias:champion --port 8001
posttrain serve-model models/ours --engine transformers""",
    "steps": """
posttrain steps serve --port 8766 --root /data/steps store=/data/store
posttrain steps key alice --max-tokens 1000000
posttrain steps commit 0123456789abcdef --stage rl""",
    "replay": """
posttrain replay rl
posttrain replay rl@0123 --json
posttrain replay mine/rl store=/data/store""",
    "stage": """
posttrain stage corpus
posttrain stage sft pipeline=sft data=chats.jsonl
posttrain stage dpo tracking=none""",
    "lineage": """
posttrain lineage cpt-sft-dpo/dpo
posttrain lineage alias:champion --html lineage.html
posttrain lineage 6f53 --json""",
    "report": """
posttrain report cpt-sft-dpo/dpo --html dpo.html
posttrain report --compare cpt-sft-dpo/sft cpt-sft-dpo/dpo
posttrain report alias:champion --card --repo owner/name""",
    "impact": """
posttrain impact source:corpus
posttrain impact label:cc-by-nc-4.0
posttrain impact chats.jsonl --json""",
    "diff": """
posttrain diff cpt-sft-dpo/dpo cpt-sft-dpo/sft
posttrain diff alias:champion 6f53
posttrain diff 6f53 9a01 --json""",
    "diagnose": """
posttrain diagnose dpo
posttrain diagnose cpt-sft-dpo/sft --html curves.html
posttrain diagnose dpo --out change.yaml""",
    "blame": """
posttrain blame cpt-sft-dpo/dpo --metric preference_accuracy
posttrain blame alias:champion --metric exact_match
posttrain blame 6f53 --against 9a01 --metric exact_match --json""",
    "tune": """
posttrain tune sft --dry-run
posttrain tune sft pipeline=sft model=owner/name data=chats.jsonl
posttrain tune dpo --rounds 2 --steps 100""",
    "verify": """
posttrain verify
posttrain verify cpt-sft-dpo/dpo
posttrain verify store=/data/artifacts --json""",
    "promote": """
posttrain promote cpt-sft-dpo-gated/dpo --alias champion
posttrain promote 6f53 --alias champion --why "better than sft"
posttrain promote sft/sft --alias try --force""",
    "rollback": """
posttrain rollback --alias champion
posttrain rollback --alias champion --why "worse on long questions"
posttrain rollback --alias champion store=/data/artifacts --json""",
    "rebuild": """
posttrain rebuild
posttrain rebuild store=/data/artifacts
posttrain rebuild --json""",
    "gc": """
posttrain gc --dry-run
posttrain gc --older-than 30d
posttrain gc --keep cpt-sft-dpo/dpo --yes""",
    "status": """
posttrain status
posttrain status --watch
posttrain status store=/data/artifacts --json""",
    "logs": """
posttrain logs dpo
posttrain logs cpt-sft-dpo/dpo --follow
posttrain logs 6f53 --lines 50""",
    "cancel": """
posttrain cancel latest
posttrain cancel 20261127
posttrain cancel latest store=/data/artifacts""",
    "serve": """
posttrain serve
posttrain serve pipeline=cpt-sft-dpo-retrain
posttrain serve --limit 1 --name nightly""",
    "compat": """
posttrain compat
posttrain compat adapter=qlora resources=cluster
posttrain compat pipeline=sft-grpo --json""",
    "advise": """
posttrain advise pipeline=sft model=owner/name data=chats.jsonl
posttrain advise sft resources=gpu adapter=lora
posttrain advise dpo --out recipe.yaml""",
    "doctor": """
posttrain doctor
posttrain doctor resources=gpu
posttrain doctor --json""",
}
# What is shown together in --help.
GROUPS: Mapping[str, str] = {
    "start": "init data plan run chat doctor",
    "look": "status logs ui report lineage impact",
    "compare": "diff diagnose blame tune advise compat gate-check",
    "take away": "export serve-model promote rollback",
    "operate": "serve cancel rehearse certify canary verify gc rebuild stage steps replay import",
}
_TRAINS = "train fit finetune fine-tune launch start"
# Commands of other tools, and what does it here.
_HABITS = (
    (_TRAINS, "posttrain run pipeline=sft model=owner/name data=chats.jsonl"),
    ("sft cpt dpo kto grpo reward", "posttrain run pipeline={0} model=owner/name data=FILE"),
    ("rm pretrain pt", "posttrain run pipeline=reward, or pipeline=cpt"),
    ("eval evaluate bench benchmark", "posttrain run, in whose pipeline the stage evaluate measures the models"),
    (
        "generate infer inference predict",
        'posttrain chat REF, in scripts with --once "...", or posttrain serve-model REF',
    ),
    ("webui board dashboard", "posttrain ui, which shows the store, or posttrain serve, which starts runs"),
    ("webchat", "posttrain chat REF, and behind a page of yours: posttrain serve-model REF"),
    ("api vllm-serve", "posttrain serve-model REF, which answers as OpenAI's API does"),
    ("sweep", "posttrain run --multirun with several values of a setting: stages.sft.method.learning_rate=1e-5,1e-4"),
    ("compare", "posttrain diff REF REF"),
    ("quantize", "posttrain export gguf REF --type q8_0"),
    ("merge merge-lora merge_lora", "posttrain export merged REF, or a stage of conf/stage/merge.yaml in the pipeline"),
    ("env info version", "posttrain doctor, or posttrain --version"),
    ("help", "posttrain plan --help, and of all commands posttrain --help"),
    ("dry-run check validate show", "posttrain plan"),
    ("list ls ps runs", "posttrain status"),
    ("stop kill", "posttrain cancel latest"),
    (
        "preprocess tokenize inspect stats",
        "posttrain data chats.jsonl model=owner/name, and of a pipeline: posttrain plan",
    ),
    ("repro resume", "posttrain run, the same as before: what is finished is reused, and the rest resumes"),
)
HABITS: Mapping[str, str] = {word: answer for words, answer in _HABITS for word in words.split()}
# Options of other tools -> an override.
_OPTIONS = {
    **dict.fromkeys(("config", "config-file", "config_file", "yaml", "recipe", "c", "f"), "posttrain {2} {1}"),
    "pipeline": "pipeline={1}", "model": "model={1}", "model-name": "model={1}", "data": "data={1}",
    "output": "store={1}", "store": "store={1}", "resume": "nothing: the same command resumes",
    "dry-run": "posttrain plan",
    **dict.fromkeys(("prompt", "message"), "--once {1}"),
}  # fmt: skip

_OF_A_MODEL = ("chat", "serve-model")

_INNER = (
    "pipeline",
    "part",
    "recipe",
    "source",
    "stage",
)  # folders of conf/ that pipelines use, or that are listed apart


def no_command(word: str, arguments: Sequence[str], commands: Sequence[str]) -> ConfigError:
    """The answer to a command that does not exist."""
    file = next((each for each in arguments[1:] if each.endswith((".yaml", ".yml"))), None)
    if word in _TRAINS.split() and file:
        return ConfigError(
            f"{word}: no command of posttrain; here it is: posttrain run {file}, of another trainer's file first: "
            f"posttrain import llamafactory {file} (or axolotl, trl, oumi)"
        )
    if word in HABITS:
        return ConfigError(f"{word}: no command of posttrain; here it is: {HABITS[word].format(word)}")
    if "=" in word or word.endswith((".yaml", ".yml")):
        return ConfigError(f"{word}: the command is missing; write: posttrain plan {' '.join(arguments)}")
    close = get_close_matches(word, commands, n=1, cutoff=0.6)
    hint = f"did you mean {close[0]}? " if close else ""
    if word.startswith("-"):
        there = str(no_option([word], ["run", *arguments]))
        return ConfigError(f"{there}; the command comes first, such as posttrain plan or posttrain run")
    return ConfigError(f"{word}: no such command; {hint}posttrain --help lists them")


def no_option(unknown: Sequence[str], arguments: Sequence[str]) -> ConfigError:
    """The answer to options that do not exist, beside the command and all its arguments."""
    command = arguments[0]
    found = {word: _option(word, arguments) for word in unknown}
    here = {word: ours for word, ours in found.items() if ours}
    s = "s" if len(unknown) > 1 else ""
    there = f"here it is {' '.join(here.values())}" if here else ""
    rest = "a setting is written as key=value, without dashes" if len(here) < len(found) else ""
    more = f"see posttrain {command} --help" if rest else ""
    return ConfigError(f"unknown option{s} {', '.join(unknown)}; {'; '.join(filter(None, (there, rest, more)))}")


def _option(word: str, arguments: Sequence[str]) -> str:
    """What an option of other tools is here, with its value, which may be the argument after it; empty: unknown."""
    from flows.declare.config import groups
    from flows.declare.peer_names import FIELDS
    from lineage.fingerprint import field_names
    from tasks.context import Resources
    from tasks.method import Training

    following = [*arguments, "--"][list(arguments).index(word) + 1] if word in arguments else "--"
    following = "" if following.startswith("-") or "=" in following else following
    name, _, value = word.lstrip("-").partition("=")
    key, value = name.replace("-", "_"), value or following or "VALUE"
    ours = (
        "posttrain {2} {1}"
        if name in ("model", "m") and arguments[0] in _OF_A_MODEL
        else _OPTIONS.get(name) or (f"{key}={{1}}" if key in groups() else FIELDS.get(key))
    )
    for part, cls in {"method": Training, "resources": Resources}.items() if not ours else ():
        ours = f"stages.STAGE.{part}.{key}={{1}}" if key in field_names(cls) else ours
    return (ours or "").format(key, value, arguments[0])


def overview(commands: Mapping[str, str]) -> str:
    """The end of ``posttrain --help``: commands, pipelines, and the groups with their options."""
    conf, longest = CONFIG.parent, max(map(len, commands))
    called = [
        line
        for group, names in GROUPS.items()
        for line in (f"{group}:", *(f"  {name:<{longest}}  {commands[name]}" for name in names.split()), "")
    ]
    default = re.search(r"pipeline: (\S+)", CONFIG.read_text(encoding="utf-8"))
    found = [(path.stem, _purpose(path)) for path in sorted((conf / "pipeline").glob("*.yaml"))]
    width = max(len(name) for name, _ in found)
    marks = {default[1]: " (the default)"} if default else {}
    pipelines = [f"  {name:<{width}}  {purpose}{marks.get(name, '')}" for name, purpose in found]
    others = sorted(path for path in conf.iterdir() if path.is_dir() and path.name not in _INNER)
    options = {path.name: ", ".join(sorted(each.stem for each in path.glob("*.yaml"))) for path in others}
    groups = [
        fill(f"{name}= {each}", 100, initial_indent="  ", subsequent_indent="    ") for name, each in options.items()
    ]
    return "\n".join([
        *called, "pipelines (pipeline=NAME):", *pipelines, "", "groups (GROUP=NAME):",
        *groups, "", "examples:", *(f"  {line}" for line in EXAMPLES["run"].split("\n") if line),
        "", "posttrain COMMAND --help has more. Completion: posttrain --print-completion bash",
    ])  # fmt: skip


def _purpose(path: Path) -> str:
    """The first sentence of a pipeline's comment; of one that begins with a drawing, nothing."""
    lines = [
        line.removeprefix("#").strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")
    ]
    text = " ".join(line for line in lines if line != "@package _global_")
    return re.split(r"[.:] |[.:]$| #|  ", text, maxsplit=1)[0].strip() if text and text[0].isalpha() else ""
