"""Every command line of the README and of docs/ is one that the real parsers take, and every block of data parses.

A command is a line of a shell block, or of one without a language, that begins with `lw` or `loopwright`, and likewise
a span of code in the text. Words in capitals, such as RUN, and `...` stand for something.
"""

import contextlib
import io
import json
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml

from loopwright.api import evaluation_flags, prediction_flags
from loopwright.cli import VERBS, main
from loopwright.cli.main import ALIASES
from loopwright.errors import InputError
from loopwright.runs.settings import settle
from loopwright.sources import CODES
from loopwright.tasks import TASKS, get_task, task_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LEAST_COMMANDS = 130
LEAST_DATA_BLOCKS = 3
LEAST_SHELL_BLOCKS = 20

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`((?:lw|loopwright)\s[^`]+)`")
INDENTED = re.compile(r"^    ((?:lw|loopwright) .*)$", re.MULTILINE)
COMMAND = re.compile(r"^(?:\$ )?(?:\w+=\S+ )*(?:lw|loopwright) (?!\d)(.+)$")
SHELLS = ("", "sh", "bash", "console")
PLACEHOLDER = re.compile(r"^(\.\.\.|[A-Z]{1,8}(\.\.\.)?)$")

# Verbs whose flags are those of a task, and words of their own that the parser of the task does not see.
TRAINING = {
    "train": {"check", "print_config", "json", "supervise", "no_standby"},
    "check": {"files", "print_config", "json"},
    "demo": {"variant", "json", "supervise", "no_standby"},
    "resume": {"json", "supervise", "no_standby"},
}
OF_A_RUN = {"evaluate": evaluation_flags, "predict": prediction_flags, "chat": prediction_flags}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> list[str]:
    """Return the words after `lw` of every command of a page, each as one line."""
    found = []
    for language, block in FENCE.findall(text):
        if language in SHELLS:
            lines = block.replace("\\\n", " ").splitlines()
            found += [match[1] for match in map(COMMAND.match, lines) if match]
    outside = FENCE.sub("", text)
    found += [line.partition(" ")[2] for line in INDENTED.findall(outside)]
    found += [" ".join(span.split()[1:]) for span in SPAN.findall(outside)]
    return [command for command in found if not re.match(r"\d", command)]


def problem_of(command: str) -> str | None:
    """Return what is wrong with the words after `lw`, or None."""
    try:
        words = shlex.split(command.replace("[", " ").replace("]", " ").partition("|")[0], comments=True)
    except ValueError as error:
        return str(error)
    verb, *rest = words or [""]
    if verb in ("--help", "--version", "VERB"):
        return None
    verb = ALIASES.get(verb, verb)
    if verb not in VERBS:
        return f"{verb!r} is not a verb"
    if "--help" in rest:
        return None
    if verb == "launch":
        return problem_of_launch(rest)
    if verb in TRAINING or is_about_a_task(verb):
        return problem_of_training(verb, rest)
    if verb == "explain":
        known = [*TASKS, *CODES, "errors", "TASK"]
        return None if set(rest) <= set(known) else f"{rest} is nothing to explain"
    known = flags_in_help(verb)
    if verb in OF_A_RUN:
        known = known | {f"--{flag}" for name in task_names() for flag in OF_A_RUN[verb](get_task(name))}
    given = [word.partition("=")[0].replace("-", "_").replace("__", "--", 1) for word in rest if word.startswith("--")]
    unknown = [flag for flag in given if flag not in known]
    return f"{verb} has no {unknown[0]}" if unknown else None


def problem_of_launch(words: list[str]) -> str | None:
    from torch.distributed import run as torchrun

    if "--" not in words and any(not word.startswith("-") and not word.isdigit() for word in words):
        return "nothing says where the options of launch end"
    place = words.index("--") if "--" in words else len(words)
    target = words[place + 1 :]
    parser = torchrun.get_args_parser()
    known = {option for action in parser._actions for option in action.option_strings} | {"-n"}
    unknown = [word for word in words[:place] if word.startswith("-") and word.partition("=")[0] not in known]
    if unknown:
        return f"launch has no {unknown[0]}"
    return None if not target or target[0].endswith(".py") else problem_of(shlex.join(target))


def problem_of_training(verb: str, words: list[str]) -> str | None:
    """Return what the parser of the task, or of every task where it is not named, says about the flags."""
    own = TRAINING.get(verb, set())
    if "--config" in words:
        place = words.index("--config")
        words = words[:place] + words[place + 2 :]
    names: list[str] = list(TASKS)
    while words and not words[0].startswith("-"):
        first, *words = words
        if first in TASKS:
            names = [first]
        elif not is_stand_in(first) and verb in ("train", "check", "demo") and "/" not in first:
            return f"{first!r} is neither a task nor a run nor a file of settings"
    flags: list[str] = []
    for word in words:
        if word.removeprefix("--").replace("-", "_") in own:
            continue
        if not PLACEHOLDER.match(word) or (flags and flags[-1].startswith("--")):
            flags.append(word)
    if "variant" in own and flags and not flags[0].startswith("--"):
        del flags[0]
    problems = []
    for name in names:
        try:
            settle(get_task(name), flags)
        except InputError as error:
            problems.append(f"{name}: {error}")
        else:
            return None
    return problems[0]


def is_stand_in(word: str) -> bool:
    """Whether a word stands for a run, a task or a file of settings."""
    return word == "last" or word.endswith((".yaml", ".yml", ".json")) or PLACEHOLDER.match(word) is not None


def is_about_a_task(verb: str) -> bool:
    return "TASK --" in VERBS[verb][1]


@cache
def flags_in_help(verb: str) -> set[str]:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([verb, "--help"])
    return set(re.findall(r"--\w+", printed.getvalue()))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_a_page_is_taken_by_the_parsers(page):
    found = commands(page.read_text(encoding="utf-8"))
    assert [(command, problem) for command in found if (problem := problem_of(command)) is not None] == []


def test_there_are_commands_and_blocks_to_look_at():
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert sum(len(commands(text)) for text in texts) >= LEAST_COMMANDS
    languages = [language for text in texts for language, _ in FENCE.findall(text)]
    assert sum(language in ("json", "yaml", "toml") for language in languages) >= LEAST_DATA_BLOCKS
    assert sum(language in ("sh", "bash") for language in languages) >= LEAST_SHELL_BLOCKS
    known = {"", "bash", "console", "json", "python", "sh", "text", "toml", "yaml"}
    assert set(languages) <= known, "a language that no test looks at"


def test_every_verb_is_shown_somewhere():
    shown = {command.split()[0] for page in PAGES for command in commands(page.read_text(encoding="utf-8"))}
    assert sorted(set(VERBS) - shown) == []


@pytest.mark.parametrize(
    "command",
    [
        "trian text-classification --data reviews.csv",
        "train text-clasification --data reviews.csv",
        "train text-classification --data reviews.csv --epoch_count 3",
        "train text-classification --data reviews.csv --label_kind words",
        "train RUN --no_such_flag 1",
        "demo translation --variants fashion",
        "resume last --epoch 5",
        "predict last reviews.csv --outs found.csv",
        "evaluate last --datas other.csv",
        "runs --sorted metric",
        "launch -n 2 train causal-lm --data books/",
        "launch -n 2 -- train causal-lm --data books/ --lrr 1",
        "launch --max_restart 2 -- train.py",
        'predict last "never closed',
    ],
)
def test_a_wrong_command_is_found(command):
    assert problem_of(command) is not None


@pytest.mark.parametrize(
    "command",
    [
        "train TASK --data D ...",
        "train cfg.yaml --lr 1e-4 --print_config",
        "check TASK ...",
        "demo [TASK]",
        "train RUN",
        "resume RUN --epochs 5",
        "eval last --data other.csv",
        "predict last 'two words' --num-beams 4",
        "launch -n 8 --max-restarts 3 -- train.py --anything 1",
        "explain errors",
    ],
)
def test_a_right_command_is_taken(command):
    assert problem_of(command) is None


def test_blocks_of_data_parse():
    problems = []
    for page in PAGES:
        for language, block in FENCE.findall(page.read_text(encoding="utf-8")):
            try:
                if language == "json":
                    json.loads(block)
                elif language == "yaml":
                    yaml.safe_load(block)
            except (ValueError, yaml.YAMLError) as error:
                problems.append((name_of(page), str(error)))
    assert problems == []


def test_blocks_of_shell_are_shell(tmp_path):
    scripts = []
    for page in PAGES:
        for number, (language, block) in enumerate(FENCE.findall(page.read_text(encoding="utf-8"))):
            if language in ("sh", "bash"):
                scripts.append(tmp_path / f"{page.stem}-{number}.sh")
                scripts[-1].write_text(block, encoding="utf-8")
    assert len(scripts) >= LEAST_SHELL_BLOCKS
    done = subprocess.run(
        ["sh", "-c", 'for script; do bash -n "$script" || echo "$script"; done', "sh", *map(str, scripts)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr) == ("", "")


SCRIPT = re.compile(r"python ((?:benchmarks|examples)/\w+\.py)([^`\n]*)")
MAKE = re.compile(r"`make ([a-z-]+)`")
LEAST_SCRIPTS = 25


def test_scripts_and_targets_that_are_named_exist_and_have_the_flags():
    texts = [page.read_text(encoding="utf-8") for page in [*PAGES, *(ROOT / "benchmarks").rglob("*.md")]]
    found = [match for text in texts for match in SCRIPT.findall(text)]
    assert len(found) >= LEAST_SCRIPTS
    problems = []
    for name, words in found:
        source = (ROOT / name).read_text(encoding="utf-8") if (ROOT / name).is_file() else None
        for shared in re.findall(r"^from (\w+) import", source or "", re.MULTILINE):  # modules beside the script
            beside = (ROOT / name).with_name(f"{shared}.py")
            source = f"{source}{beside.read_text(encoding='utf-8')}" if beside.is_file() else source
        flags = re.findall(r"--[a-z-]+", words.partition("#")[0])
        if source is None or any(f'"{flag}"' not in source for flag in flags if flag != "--help"):
            problems.append(name + words)
    assert problems == []
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for text in texts for name in MAKE.findall(text)} <= set(targets)


def test_the_help_of_the_command_is_what_the_pages_describe(capsys):
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: lw VERB ...   (loopwright is the same)")
