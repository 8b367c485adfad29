"""What the command line answers: help with examples, words and options of other tools."""

import re
import shlex

import pytest

from flows.__main__ import COMMANDS, main
from flows.__main__ import _parser as parser_of
from flows.commands.examples import EXAMPLES, GROUPS, HABITS
from flows.declare.config import CONF, load_pipeline
from tests.written_store import WrittenStore

PIPELINES = [path.stem for path in (CONF / "pipeline").glob("*.yaml")]


def test_help_lists_pipelines_with_their_purpose_and_groups_with_their_options(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.split()}
    assert all(lines[name] for name in PIPELINES) and lines["cpt-sft-dpo"][-2:] == ["(the", "default)"]
    assert sorted(" ".join(GROUPS.values()).split()) == sorted(COMMANDS) and all(lines[name] for name in COMMANDS)
    assert {"adapter=", "model=", "optimizer=", "preset=", "resources=", "schedule=", "tracking="} <= lines.keys()


def test_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.startswith("posttrain 0.")


@pytest.mark.parametrize("command", [None, "certify", "advise"])
def test_help_fits_a_screen(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([*([command] if command else []), "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_three_examples_of_each_command_are_in_its_help_and_compose(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    shown = capsys.readouterr().out
    examples = EXAMPLES[command].strip().splitlines()
    assert len(examples) == 3
    for line in examples:
        assert line in shown
        program, *cli_args = shlex.split(line)
        options = parser_of(cli_args).parse_args(cli_args)
        assert (program, cli_args[0]) == ("posttrain", command)
        overrides = [word for word in getattr(options, "overrides", []) if "=" in word]
        if command != "data" and not getattr(options, "multirun", False):
            load_pipeline(overrides)


@pytest.mark.parametrize(
    ("cli_args", "answer"),
    [
        ("train --config x", "train: no command of posttrain; here it is: posttrain run pipeline=sft model=owner/name"),
        ("grpo", "here it is: posttrain run pipeline=grpo model=owner/name data=FILE"),
        ("plna", "plna: no such command; did you mean plan? posttrain --help lists them"),
        ("help", "here it is: posttrain plan --help, and of all"),
        ("--config x.yaml", "here it is posttrain run x.yaml; the command comes first, such as posttrain plan"),
        ("run -c x.yaml", "here it is posttrain run x.yaml"),
        ("run --model tiny --data a.jsonl --wat", "here it is model=tiny data=a.jsonl; a setting is written as key=va"),
        ("pipeline=sft model=x/y", "the command is missing; write: posttrain plan pipeline=sft model=x/y"),
        ("my.yaml", "the command is missing; write: posttrain plan my.yaml"),
        ("inference z3.yml", "inference: no command of posttrain; here it is: posttrain chat REF"),
        ("merge-lora z3.yml", "here it is: posttrain export merged REF"),
        ("preprocess z3.yml", "here it is: posttrain data chats.jsonl model=owner/name, and of a pipeline: "),
        ("api x.yaml", "here it is: posttrain serve-model REF"),
        ("sweep", "here it is: posttrain run --multirun"),
        ("compare a b", "here it is: posttrain diff REF REF"),
        ("train my.yaml", "posttrain run my.yaml, of another trainer's file first: posttrain import llamafactory"),
        ("run --config my.yaml", "unknown option --config; here it is posttrain run my.yaml"),
        ("run --pipeline sft", "unknown option --pipeline; here it is pipeline=sft"),
        ("plan --adapter=lora", "unknown option --adapter=lora; here it is adapter=lora"),
        ("run sft", "did you mean pipeline=sft? write key=value"),
        ("chat --model us/ours", "here it is posttrain chat us/ours"),
        ("chat us/ours --prompt hello", "here it is --once hello"),
        ("run --learning-rate 1e-5", "here it is stages.STAGE.method.learning_rate=1e-5"),
        ("run --num_workers=4", "here it is stages.STAGE.resources.num_workers=4"),
        ("run --per_device_train_batch_size 4", "here it is stages.STAGE.method.global_batch_size"),
        ("run --wat", "a setting is written as key=value, without dashes; see posttrain run --help"),
    ],
)  # fmt: skip
def test_words_and_options_of_other_tools_get_what_is_meant(cli_args, answer, capsys):
    assert main(cli_args.split()) == 2
    assert answer in capsys.readouterr().err


def test_habits_name_commands_that_exist():
    for word, answer in HABITS.items():
        assert word not in COMMANDS
        program, command, *_ = answer.replace(",", " ").split()
        assert program != "posttrain" or command in COMMANDS, word


def test_a_shell_completes_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "bash"])
    (line,) = re.findall(r"_shtab_posttrain_subparsers=\((.*)\)", capsys.readouterr().out)
    assert line.split() == list(COMMANDS)


def test_a_missing_ref_lists_what_there_is(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["chat"])
    message = "REF; there is no store here (store=artifacts does not exist): posttrain run makes it"
    assert end.value.code == 2 and message in capsys.readouterr().err
    store = WrittenStore(tmp_path / "artifacts")
    store.stage("sft", {"rows": store.stage("pairs", {"rows": store.source("pairs")})})
    store.stage("reward", {})
    (tmp_path / "posttrain.yaml").write_text("store: ours\n")
    assert main(["lineage", "store=artifacts", "p/sft"]) == 0  # before the REF too it is stronger than the project's
    assert capsys.readouterr().out.startswith("sft ")
    assert main(["report", "store=artifacts"]) == 2
    assert "no REF is given; artifacts has p/reward, p/sft; give one" in capsys.readouterr().err
    for cli_args, names in (
        (["chat"], "p/sft"), (["lineage"], "p/pairs, p/reward, p/sft"), (["export", "gguf"], "p/sft"),
        (["promote", "--alias", "x"], "p/reward, p/sft"),
    ):  # fmt: skip
        assert main([*cli_args, "store=artifacts"]) == 2
        assert capsys.readouterr().err == f"posttrain: {cli_args[0]}: no REF is given; artifacts has {names}\n"
        with pytest.raises(SystemExit):
            main(cli_args)
        assert capsys.readouterr().err.endswith(
            "REF; there is no store here (store=ours does not exist): posttrain run makes it; or name another with "
            "store=DIR\n"
        )
