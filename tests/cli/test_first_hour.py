"""What a newcomer meets in the first hour: a reader that goes away, Ctrl-C, resumes, typing errors, first results."""

import os
import shutil
from pathlib import Path

import pytest

import toys
from loopwright import Checkpointing, Trainer, api, models
from loopwright.cli import main
from loopwright.cli.exit_codes import guarded
from loopwright.errors import InputError
from loopwright.run_folder import RunFolder, write_json
from loopwright.runs.console.screen import Screen
from loopwright.runs.console.start import print_saved
from tasks.forked import start
from tasks.squares import write_squares

FLAGS = ["--batch", "16", "--threads", "1", "--no_rehearsal"]


def train(capsys, reviews, *words):
    assert main(["train", "text-classification", "--data", str(reviews), *FLAGS, *words]) == 0
    return capsys.readouterr().out


def refused(capsys, *words):
    """Return what a command line that cannot work is told; nothing is left behind."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error[") and "\n  fix: " in told and not Path("runs").exists()
    return told


@pytest.mark.slow
def test_a_run_whose_reader_goes_away_trains_to_its_end_with_log_txt(reviews, tmp_path):
    os.mkfifo("out")
    Path("err").touch()
    words = ["train", "text-classification", "--data", reviews, "--epochs", "2", *FLAGS, "--logging_steps", "1"]
    process = start([*words, "--out", "run"], folder=tmp_path, out=tmp_path / "out", err=tmp_path / "err")
    with open("out") as output:
        first = output.readline()
    process.join(60)
    assert process.exitcode == 0 and Path("err").read_text() == ""
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.startswith(first) and "\ndone in " in log and log.count("\neval ") == 2


def interrupted_by(error):
    def train(words):
        raise error

    return train


def test_ctrl_c_is_told_once_by_the_run_or_for_it(capsys):
    assert guarded(interrupted_by(KeyboardInterrupt()), []) == 130
    assert capsys.readouterr() == ("", "interrupted before the first update; nothing was trained\n")
    error = KeyboardInterrupt()
    error.__notes__ = ["saved x   continue with: lw resume x"]
    assert guarded(interrupted_by(error), []) == 130
    assert capsys.readouterr() == ("", "")
    assert guarded(interrupted_by(error), ["--quiet"]) == 130
    assert capsys.readouterr() == ("", "interrupted; saved x   continue with: lw resume x\n")


def test_an_interrupted_trainer_says_what_was_saved_and_how_to_go_on(tmp_path, capsys):
    def interrupt(trainer, **kwargs):
        if trainer.progress.update == 2:
            raise KeyboardInterrupt

    for folder in (tmp_path / "run", None):
        policy = None if folder is None else Checkpointing(folder)
        trainer = toys.trainer_of([toys.callback(on_update_end=interrupt)], cls=Trainer)
        with pytest.raises(KeyboardInterrupt):
            toys.fit(trainer, toys.data(16), checkpoints=policy)
        saved = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Saved ")]
        told = f"Saved {tmp_path / 'run' / 'step-0000000002'}; resume the run from there"
        assert saved == ([told] if folder is not None else [])


def test_the_checkpoints_of_a_trainer_are_verified_by_the_folder_that_it_saves_to(tmp_path, capsys):
    toys.fit(toys.trainer_of(cls=Trainer), toys.data(16), checkpoints=Checkpointing(tmp_path / "mine"))
    capsys.readouterr()
    assert main(["verify", str(tmp_path / "mine")]) == 0
    assert capsys.readouterr().out.endswith(" valid\n")
    weights = next((tmp_path / "mine").glob("step-*")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert main(["verify", str(tmp_path / "mine")]) == 65


def test_a_run_that_is_ended_at_once_says_which_state_there_is_and_that_it_can_go_on(capsys, finished, tmp_path):
    run = RunFolder(shutil.copytree(finished.path, tmp_path / "run"))
    name, path = run.status["last_checkpoint"], os.path.normpath(run.path)
    assert print_saved(run, 0.5, Screen()) == f"saved checkpoints/{name} (0.5 s)   continue with: lw resume {path}"
    write_json(run.path / "status.json", {**run.status, "update": run.status["update"] + 1, "last_checkpoint": None})
    told = f"not saved again: the last state is checkpoints/{name}   continue with: lw resume {path}"
    assert print_saved(run, 0.5, Screen()) == told
    shutil.rmtree(run.checkpoints)
    assert print_saved(run, 0.5, Screen()) == f"nothing was saved yet   start again with: lw resume {path}"
    capsys.readouterr()
    assert main(["resume", path, "--max_steps", "1", "--quiet"]) == 0
    assert capsys.readouterr() == (f"{path}\n", "")


def test_more_epochs_are_a_change_and_the_schedule_is_said_to_end_later(capsys, reviews):
    assert "lw resume run --epochs 2\n" in train(capsys, reviews, "--epochs", "1", "--out", "run")
    assert main(["resume", "run", "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert "num_epochs: 1 -> 2" in out
    assert "the linear schedule of the learning rate now ends at the new end" in out
    assert "T0, " in out and ", but for the changes above" in out


def test_a_constant_rate_has_no_end_to_move(capsys, reviews):
    train(capsys, reviews, "--epochs", "1", "--out", "run", "--lr_scheduler_type", "constant")
    assert main(["resume", "run", "--epochs", "2"]) == 0
    out = capsys.readouterr().out
    assert "schedule of the learning rate" not in out and "but for the changes above" not in out


def test_a_run_by_updates_is_made_longer_by_updates_and_says_so_when_asked_for_epochs(capsys, reviews):
    assert "lw resume run --max_steps 4\n" in train(capsys, reviews, "--max_steps", "2", "--out", "run")
    assert main(["resume", "run", "--epochs", "3"]) == 0
    out = capsys.readouterr().out
    assert "--max_steps 2 sets the length of the run, not --epochs" in out
    assert "already done" in out and "--max_steps 4 trains on" in out


def test_a_finished_run_is_not_evaluated_again(capsys, finished, tmp_path):
    copied = shutil.copytree(finished.path, tmp_path / "copy")
    before = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file() and path.name != "log.txt"}
    assert main(["resume", str(copied)]) == 0
    out = capsys.readouterr().out
    assert "already done" in out and "--epochs 4 trains on" in out and len(out.splitlines()) == 2
    after = {path: path.stat().st_mtime_ns for path in copied.rglob("*") if path.is_file() and path.name != "log.txt"}
    assert after == before


def test_of_equal_evaluations_the_first_is_the_best_also_after_a_resume(capsys, reviews):
    words = ["--lr", "0", "--epochs", "3", "--out", "run", "--metric_for_best_model", "accuracy"]
    rows = [row for row in train(capsys, reviews, *words).splitlines() if row.startswith("eval ")]
    assert [row.rstrip().endswith("best") for row in rows] == [True, False, False]
    assert main(["resume", "run", "--epochs", "5"]) == 0
    rows = [row for row in capsys.readouterr().out.splitlines() if row.startswith("eval ")]
    assert [row.rstrip().endswith("best") for row in rows] == [False, False]


def test_words_alone_are_missing_and_help_is_asked_for(capsys):
    for verb in ("train", "check", "find-lr", "explain", "resume", "launch"):
        assert (main([verb]), main([verb, "--help"])) == (2, 0), verb
    assert "usage: lw train" in capsys.readouterr().out


def test_an_unknown_setting_and_a_value_that_cannot_be_are_named_as_typed(capsys, reviews):
    Path("cfg.yaml").write_text(f"task: text-classification\ndata: {reviews}\nepocs: 3\n")
    assert "epochs instead of epocs" in refused(capsys, "train", "cfg.yaml")
    start = ["train", "text-classification", "--data", reviews]
    told = refused(capsys, *start, "--lr", "-1")
    assert told.startswith("error[args.value]: --lr -1: learning_rate must be ") and "fix: leave out --lr" in told
    told = refused(capsys, *start, "--batch=0")
    assert told.startswith("error[args.value]: --batch 0: per_device_train_batch_size ") and "fix: --batch " in told


def test_a_tracker_that_is_not_there_is_refused_before_the_data_is_read(capsys):
    start = ["train", "text-classification", "--data", "absent.csv", "--report_to"]
    assert "fix: --report_to wandb" in refused(capsys, *start, "wanbd")
    told = refused(capsys, *start, "clearml")
    assert told.startswith("error[install.extra]") and "pip install clearml" in told


def test_wrong_columns_are_told_together_and_texts_are_not_taken_for_images(capsys, reviews):
    words = ["train", "text-classification", "--data", reviews, "--text_column", "txt", "--label_column", "lbel"]
    told = refused(capsys, *words)
    assert "'txt'" in told and "'lbel'" in told and "fix: --text_column review --label_column stars" in told
    told = refused(capsys, "train", "image-classification", "--data", reviews)
    assert "--image_column text" not in told and "fix: add a column named image to reviews.csv" in told


def test_a_file_without_its_flag_and_one_that_is_misspelt_are_recognised(capsys, reviews, finished):
    told = refused(capsys, "train", "text-classification", reviews.name)
    assert f"fix: --data {reviews.name}" in told
    assert "reviews.csv instead of reviws.csv" in refused(capsys, "predict", finished.path, "reviws.csv")
    assert "lw export needs a run" in refused(capsys, "export", "--to", "x")
    Path("script.py").write_text("")
    assert "script.py instead of scrpt.py" in refused(capsys, "launch", "-n", "2", "--", "scrpt.py")


def test_a_folder_that_is_taken_is_refused_before_the_data_is_read(capsys, finished):
    told = refused(capsys, "train", "text-classification", "--data", "absent.csv", "--out", finished.path)
    assert told.startswith("error[run.exists]") and f"lw resume {finished.path}   or   --out " in told
    with pytest.raises(InputError, match=r"output_dir='") as caught:
        api.train("text-classification", data="absent.csv", out=finished.path)
    assert caught.value.code == "run.exists" and "--" not in str(caught.value)


def test_a_run_shows_itself_by_its_id_task_state_and_best_metric(finished):
    accuracy = finished.metrics["accuracy"]
    assert repr(finished) == f"Run({finished.id}, text-classification, done, accuracy {accuracy:.4f})"


def test_an_evaluation_on_training_data_says_how_many_rows_were_trained_on(capsys, finished):
    data = Path(finished.path).parent / "reviews.csv"
    num_trained = len(api.DataPlan.from_json(finished.folder.data.read_text()).splits["train"])
    words = ["evaluate", str(finished.path), "--data"]
    assert main([*words, str(data)]) == 0
    assert f"warning: {num_trained} of these rows were trained on" in capsys.readouterr().out
    other = Path("other.csv")
    other.write_text("text,label\ngreat film,pos\nawful film,neg\n")
    assert main([*words, str(other)]) == 0
    assert "trained on" not in capsys.readouterr().out


def test_the_card_says_how_its_model_is_opened(capsys, finished, tmp_path):
    card = (finished.path / "model" / "README.md").read_text()
    assert "from transformers import AutoTokenizer, " in card and 'AutoTokenizer.from_pretrained("FOLDER")' in card
    words = ["--data", str(write_squares(tmp_path / "squares", 24)), "--max_steps", "1", *FLAGS, "--out", "small"]
    assert main(["train", "image-classification", *words]) == 0
    assert main(["export", "small", "--to", "exported"]) == 0
    card = Path("exported/README.md").read_text()
    assert 'models.load("FOLDER")' in card and "transformers" not in card
    assert "float32 of shape (images, 3, " in card and "minus (0.5, 0.5, 0.5), divided by (0.5, 0.5, 0.5)" in card
    assert isinstance(models.load("exported"), models.ConvNet)
