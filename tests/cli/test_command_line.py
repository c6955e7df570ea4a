"""The command line in this process: verbs, flags, files, errors and exit codes."""

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from cli.streams import run
from loopwright import failpoints
from loopwright.cli import VERBS, main
from loopwright.cli.exit_codes import failure_of
from loopwright.errors import CheckpointError, Preempted
from tasks.reviews import rows, write_csv

FLAGS = ["--lr", "2e-3", "--epochs", "1", "--threads", "1"]


def read_text(path):
    return Path(path).read_text(encoding="utf-8")


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished.path, tmp_path / "copied")


def test_help_names_every_verb(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0 and len(VERBS) == 19
    assert all(f"  {verb} " in out for verb in VERBS)
    assert run(capsys)[:2] == (0, out)
    assert run(capsys, "help", "train")[:2] == run(capsys, "train", "--help")[:2] and "lw version" in " ".join(
        out.split()
    )
    assert run(capsys, "--version")[1] == run(capsys, "version")[1] and "loopwright " in run(capsys, "version")[1]


@pytest.mark.parametrize(
    "verb", ["train", "check", "resume", "demo", "evaluate", "predict", "export", "stop", "verify"]
)
def test_each_verb_says_how_it_is_used(capsys, verb):
    code, out, _ = run(capsys, verb, "--help")
    assert code == 0 and "usage: lw" in out


def test_training_by_flags_and_using_the_model(capsys, reviews):
    code, out, _ = run(capsys, "train", "text-classification", "--data", reviews, "--out", "first", *FLAGS)
    assert code == 0
    for word in ("data ", "model ", "batch ", "naive ", "check ", "best ", "files "):
        assert word in out
    code, out, _ = run(capsys, "predict", "last", "great lovely film", "dull awful plot")
    assert code == 0 and [set(json.loads(line)) for line in out.splitlines()] == [{"label", "score"}] * 2
    assert "--model" in run(capsys, "export", "last", "--help")[1]
    code, out, _ = run(capsys, "eval", "last", "--json")
    metrics = json.loads(out)["metrics"]
    assert code == 0 and metrics["accuracy"] == json.loads(read_text("first/result.json"))["metrics"]["accuracy"]
    assert run(capsys, "evaluate", "first", "--data", reviews)[0] == 0
    code, out, _ = run(capsys, "runs")
    assert code == 0 and "text-classification" in out and "done" in out
    assert run(capsys, "runs", "--sort", "metric")[0] == 0
    code, out, _ = run(capsys, "verify", "first")
    assert code == 0 and "valid" in out
    assert run(capsys, "export", "first", "--to", "exported")[0] == 0
    code, out, _ = run(capsys, "stop", "first")
    assert code == 0 and "not running" in out


def test_predictions_are_written_as_csv_and_jsonl_and_read_from_stdin(capsys, finished, tmp_path, monkeypatch):
    data = write_csv(tmp_path / "new.csv", rows(10, seed=2))
    bare = ("predict", finished.path, data, "--only_predictions", "--out")
    assert run(capsys, *bare, "found.csv")[0] == run(capsys, *bare, "found.jsonl")[0] == 0
    lines = read_text("found.csv").splitlines()
    found = [json.loads(line) for line in read_text("found.jsonl").splitlines()]
    assert lines[0] == "label,score,error"
    assert lines[1:] == [f"{each['label']},{each['score']}," for each in found]
    monkeypatch.setattr("sys.stdin", io.StringIO("great lovely film\n\ndull plot\n"))
    assert len(run(capsys, "predict", finished.path, "-")[1].splitlines()) == 3
    assert run(capsys, "predict", finished.path, data, "--out", "found.txt")[0] == 2
    assert run(capsys, "predict", finished.path, "absent.csv")[0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.csv", "found.jsonl", "new.csv"]


def test_a_value_comes_from_the_flag_else_the_file_else_the_task_else_the_default(capsys, reviews):
    Path("settings.yaml").write_text("task: text-classification\nlr: 3e-4\nepochs: 7\nseed: 5\nbatch: 8\n")
    words = ["train", "settings.yaml", "--data", reviews, "--seed", "42", "--epochs", "2", "--print_config"]
    code, out, _ = run(capsys, *words)
    said = dict(line.split(":", 1) for line in out.splitlines())
    assert code == 0
    assert said["learning_rate"] == " 0.0003  # file"
    assert said["num_train_epochs"] == " 2.0  # flag"
    assert said["seed"] == " 42  # flag"  # also where it is the default
    assert said["per_device_train_batch_size"] == " 8  # file"
    assert said["eval_strategy"] == ' "epoch"  # task'
    assert said["adam_beta2"] == " 0.999  # default"
    assert yaml.safe_load(out)["task"] == "text-classification"
    assert run(capsys, *words[:1], "--config", *words[1:])[1] == out
    assert run(capsys, "train", "text-classification", *words[1:])[1] == out


def test_the_spellings_of_the_no_trainer_scripts_are_taken(capsys, reviews):
    flags = ["--max_train_steps=9", "--num_warmup_steps=3", "--checkpointing_steps=4", "--max-seq-length=12"]
    flags += ["--model_name_or_path", "some/model", "--train_file", reviews]
    out = run(capsys, "train", "text-classification", *flags, "--print_config")[1]
    found = yaml.safe_load(out)
    wanted = {"max_steps": 9, "warmup_steps": 3, "save_strategy": "steps", "save_steps": 4, "max_length": 12}
    assert {name: found[name] for name in wanted} == wanted
    assert found["model"] == "some/model" and found["train_file"] == str(reviews)
    by_epoch = run(capsys, "train", "text-classification", "--checkpointing_steps", "epoch", "--print_config")[1]
    assert yaml.safe_load(by_epoch)["save_strategy"] == "epoch"
    code, _, err = run(capsys, "train", "text-classification", "--lr", "1", "--learning_rate", "2", "--print_config")
    assert code == 2 and "contradict each other" in err


def test_a_run_is_trained_again_from_its_folder(capsys, finished):
    code, _, _ = run(capsys, "train", finished.path, "--out", "again")
    assert code == 0
    weights = [folder / "model" / "model.safetensors" for folder in (finished.path, Path("again"))]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_check_does_everything_but_train_and_leaves_nothing(capsys, reviews, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, out, _ = run(capsys, "check", "text-classification", "--data", reviews)
    assert code == 0 and "bit for bit the same" in out and "disk" in out
    code, out, _ = run(capsys, "train", "text-classification", "--data", reviews, "--check")
    assert code == 0 and "bit for bit the same" in out
    code, out, _ = run(capsys, "check", "text-classification", "--data", reviews, "--files")
    assert code == 0 and "labels neg" in out and "model" not in out
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], ["'trian' is not a verb", "fix: lw train"]),
        (["--quiet", "train"], ["error[args.unknown]", "'--quiet' is not a verb"]),
        (["train", "text-clasification"], ["error[args.task]", "text-classification instead of text-clasification"]),
        (["train", "--lr", "1"], ["error[args.task]", "lw train text-classification --lr 1"]),
        (["train", "absent.yaml"], ["error[data.file]", "absent.yaml"]),
        (
            ["train", "text-classification", "--learnig_rate", "1"],
            ["error[args.unknown]", "--learning_rate: Peak learning rate"],
        ),
        (["train", "text-classification", "--lr", "fast"], ["error[args.value]", "fast"]),
        (["train", "text-classification", "--data", "rewievs.csv"], ["error[data.file]", "fix: --data reviews.csv"]),
        (["train", "text-classification", "--data", "reviews.csv", "--text_column", "txt"], ["error[data.column]"]),
        (["train", "text-classification", "--data", "reviews.csv", "--label_map", "x"], ["has no equals sign"]),
        (["resume", "nowhere"], ["error[run.unknown]", "'nowhere'"]),
        (["predict", "last", "text"], ["error[run.unknown]", "there is no run yet"]),
        (["explain", "sumarization"], ["error[args.task]"]),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) and "[" not in value[0] else "told",
)
def test_what_cannot_work_ends_with_2_and_the_nearest_fix(capsys, reviews, tmp_path, words, told):
    code, _, err = run(capsys, *words)
    assert code == 2
    assert [text for text in told if text not in err] == []
    assert sorted(tmp_path.iterdir()) == [reviews]


def test_a_file_of_settings_with_an_unknown_name_or_no_task_is_refused(capsys, tmp_path):
    for text, told in (("task: text-classification\nlearnig_rate: 1\n", "args.unknown"), ("lr: 1\n", "args.task")):
        (tmp_path / "settings.yaml").write_text(text)
        code, _, err = run(capsys, "train", "settings.yaml")
        assert code == 2 and told in err


def test_a_folder_that_is_in_use_is_refused(capsys, copied, reviews, tmp_path):
    code, _, err = run(capsys, "train", "text-classification", "--data", reviews, "--out", copied, *FLAGS)
    assert code == 2 and "error[run.exists]" in err and f"lw resume {copied}" in err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    code, _, err = run(capsys, "train", "text-classification", "--data", reviews, "--out", "full", *FLAGS)
    assert code == 2 and "letter.txt" in err


def test_a_run_whose_checkpoints_are_all_damaged_ends_with_65(capsys, copied):
    for file in copied.glob("checkpoints/*/model.safetensors"):
        file.write_bytes(b"damaged")
    code, _, err = run(capsys, "resume", copied, "--epochs", "3")
    assert code == 65 and "error[checkpoint.none]" in err
    assert run(capsys, "verify", copied)[0] == 65
    assert run(capsys, "predict", copied, "still there: the model folder is whole")[0] == 0


def test_a_disk_that_refuses_ends_with_74(capsys, reviews):
    failpoints.arm("pre_manifest:*:raise:ENOSPC")
    try:
        code, _, err = run(capsys, "train", "text-classification", "--data", reviews, "--no_rehearsal", *FLAGS)
    finally:
        failpoints.disarm()
    assert code == 74 and "error[checkpoint.write]" in err


def test_a_loss_that_is_not_finite_ends_with_4(capsys, reviews):
    flags = ["--lr", "1e30", "--max_grad_norm", "0", "--no_rehearsal", "--logging_steps", "2"]
    code, _, err = run(capsys, "train", "text-classification", "--data", reviews, *flags)
    assert code == 4 and "error[loss.nan]" in err and "--lr 0.0001" in err
    assert "no state was saved before it" in err


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (MemoryError("too much"), 3, "error[memory.train]"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (Preempted("SIGTERM"), 75, "SIGTERM"),
        (OSError(28, "No space left on device"), 74, "error[disk.write]"),
        (PermissionError(13, "Permission denied"), 74, "error[disk.write]: [Errno 13] Permission denied"),
        (ZeroDivisionError("a bug"), 1, "Traceback"),
    ],
    ids=["memory", "interrupt", "preempted", "disk", "permission", "bug"],
)
def test_each_end_has_its_code(capsys, monkeypatch, error, code, told):
    import loopwright.cli.info as info

    def fail(words):
        raise error

    monkeypatch.setattr(info, "doctor", fail)
    assert main(["doctor"]) == code
    said = capsys.readouterr().err
    assert told in said and ("Traceback" in said) == (code == 1)


DISK_FIXES = {
    errno.ENOSPC: "make room, and resume",
    errno.EDQUOT: "make room within your quota",
    errno.EROFS: "make the file system writable",
    errno.EACCES: "get write permission",
    errno.EIO: "check the disk",
    errno.EMFILE: "raise the limit of open files",
    errno.ENOTDIR: "make sure that the folder exists",
}


@pytest.mark.parametrize("number", DISK_FIXES, ids=errno.errorcode.get)
def test_what_helps_fits_the_reason_why_a_file_was_not_written(number):
    error, save = OSError(number, os.strerror(number), "run/x"), CheckpointError("saving failed twice in a row")
    save.__cause__ = error
    for each, code in ((error, "disk.write"), (save, "checkpoint.write")):
        failure = failure_of(each)
        assert (failure.exit_code, failure.error.code) == (74, code)
        assert failure.error.fix.startswith(DISK_FIXES[number])


def test_tasks_explain_doctor_and_demo_say_what_there_is_and_refuse_other_words(capsys, monkeypatch):
    assert "text-classification" in run(capsys, "tasks")[1]
    code, out, _ = run(capsys, "explain", "text-classification")
    assert code == 0 and "--label_column" in out and "--learning_rate" in out and "example:" in out
    code, out, _ = run(capsys, "explain", "errors")
    assert code == 0 and len(out.splitlines()) >= 40 and "data.column" in out and "model.offline" in out
    code, out, _ = run(capsys, "doctor")
    assert code == 0 and [line.split()[0] for line in out.splitlines()][5:12] == [
        *("devices", "CPUs", "disk", "runs", "network", "Hub", "fonts")
    ]
    extras = [line.split()[0] for line in out.splitlines() if line.startswith("[")]
    assert {"[text]", "[vision]", "[data]", "[lora]", "[hf]", "[demo]"} <= set(extras) and "[dev]" not in extras
    monkeypatch.setattr("os.access", lambda *given: False)
    code, out, _ = run(capsys, "doctor")
    assert code == 74 and "not writable: set LOOPWRIGHT_RUNS" in out
    monkeypatch.undo()
    code, out, _ = run(capsys, "demo")
    assert code == 0 and "lw demo text-classification" in out
    for verb in ("doctor", "tasks"):
        code, out, err = run(capsys, verb, "--loud")
        assert (code, out) == (2, "") and f"error[args.unknown]: lw {verb} has no --loud" in err
        assert run(capsys, verb, "--help")[1].startswith(f"usage: lw {verb}")


@pytest.mark.slow
def test_a_demo_is_an_ordinary_run_that_flags_may_shorten(capsys, tmp_path):
    words = ["--max_train_samples", "32", "--max_eval_samples", "32", "--epochs", "1", "--out", "run"]
    code, out, _ = run(capsys, "demo", "image-classification", *words)
    assert code == 0 and "best " in out
    demo = tmp_path / "runs" / "demo-data" / "image-classification"
    assert yaml.safe_load(read_text("run/config.yaml"))["data"] == str(demo)
    assert len(json.loads(read_text("run/data.json"))["labels"]["names"]) == 10


def test_a_flag_of_a_demo_gives_way_to_the_one_that_is_typed_by_any_of_its_names():
    from loopwright.runs.settings import settle
    from loopwright.tasks import get_task

    def settled(*argv):
        training = settle(get_task("translation"), argv, base={"data": "dates", "lr": 1e-3, "epochs": 4}).training
        return training.learning_rate, training.num_train_epochs

    assert settled("--learning_rate", "0.1") == (0.1, 4)
    assert settled("--lr=0.1", "--num_train_epochs", "2") == (0.1, 2)
    assert settled() == (1e-3, 4)


@pytest.mark.parametrize("verb", ["train", "check"])
def test_a_folder_that_is_called_like_a_flag_of_the_verb_is_data(capsys, verb):
    for name in ("check", "files", "quiet"):
        Path(name).mkdir()
        write_csv(Path(name) / "train.csv", rows())
        code, out, err = run(capsys, verb, "text-classification", "--data", name, "--check", "--files")
        assert (code, err) == (0, "") and "train 77 / validation 19" in out and "model " not in out


def test_a_flag_that_a_task_does_not_follow_is_refused_and_is_not_in_its_help(capsys, reviews):
    words = ["check", "text-classification", "--data", reviews]
    code, _, err = run(capsys, *words, "--resume_from_checkpoint", "checkpoint-5")
    told = "resume_from_checkpoint='checkpoint-5' is not supported by the tasks: `lw resume RUN` resumes a run"
    assert code == 2 and told in err
    for flag, value in (("neftune_noise_alpha", "5"), ("optim", "schedule_free_adamw")):
        code, _, err = run(capsys, *words, f"--{flag}", value)
        assert code == 2 and "it is for loopwright.hf" in err
    _, out, _ = run(capsys, "train", "text-classification", "--help")
    for name in ("resume_from_checkpoint", "do_train", "eval_delay", "trackio_space_id", "no_remove_unused_columns"):
        assert f"--{name}" not in out
    assert "a new one in runs if unset.\n" in out and "trainer_output" not in out
    assert run(capsys, *words, "--files", "--do_train", "--no_remove_unused_columns")[0] == 0


def test_every_command_that_a_person_reads_is_written_with_the_short_name():
    root = Path(__file__).resolve().parents[2]
    files = [root / "README.md", *sorted((root / "docs").rglob("*.md")), *sorted((root / "src").rglob("*.py"))]
    long_name = re.compile(rf"\bloopwright ({'|'.join(VERBS)})\b(?! import)")
    found = [f"{file.name}: {match[0]}" for file in files for match in long_name.finditer(read_text(file))]
    assert len(files) > 300 and found == []


def test_a_run_whose_process_is_gone_is_not_asked_to_stop(capsys, copied):
    status = json.loads(read_text(copied / "status.json"))
    (copied / "status.json").write_text(json.dumps({**status, "state": "running"}))
    code, out, _ = run(capsys, "stop", copied)
    assert code == 0 and "is not running (its process is gone): nothing to stop" in out
    assert not (copied / "stop").exists()


@pytest.mark.parametrize("folder", ["reviews.csv", "reviews.csv/run"])
def test_a_run_that_cannot_have_its_folder_says_so_before_anything_is_read(capsys, reviews, folder):
    code, out, err = run(capsys, "train", "text-classification", "--data", reviews, "--out", folder)
    assert (code, out) == (2, "")
    assert f"error[disk.write]: cannot create the folder of the run: {folder}\n" in err and "is a file\n" in err


@pytest.mark.parametrize("has_lw", [True, False], ids=["on the path", "elsewhere"])
def test_printed_commands_begin_with_what_a_shell_finds(has_lw, tmp_path):
    path = str(Path(sys.executable).parent) if has_lw else str(tmp_path)
    command = [sys.executable, "-m", "loopwright", "resume", "--json"]
    environment = {**os.environ, "PATH": path}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    plain = subprocess.run(command[:-1] + ["--quiet"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    fix = json.loads(done.stdout)["fix"]
    beside = Path(sys.executable).with_name("lw")
    name = "lw" if has_lw else str(beside) if beside.is_file() else f"{sys.executable} -m loopwright"
    assert fix == f"{name} resume last" and f"  fix: {fix}\n" in plain.stderr
