"""A config.yaml that was cut off is noticed, and read from a checkpoint; one that was edited is taken as it is."""

import shutil

import pytest
import yaml

from loopwright import api, cli
from loopwright.errors import InputError
from loopwright.run_folder import RunFolder
from loopwright.runs.kept_config import config_of, kept_config


def cut(run, share):
    path = run.path / "config.yaml"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    return whole


@pytest.mark.parametrize("share", [0, 0.005, 0.3, 0.7, 0.998])
def test_a_config_that_was_cut_off_is_put_back_from_a_checkpoint_and_that_is_told(copied, share):
    whole = cut(copied, share)
    assert api.resume(copied, quiet=True).status == "done"
    assert (copied.path / "config.yaml").read_bytes() == whole
    log = (copied.path / "log.txt").read_text()
    assert "note: config.yaml was truncated; it is restored from checkpoints/step-0000000" in log
    assert "already done" in log


def test_a_config_that_is_missing_or_of_zeros_is_put_back_too(copied):
    path = copied.path / "config.yaml"
    whole = path.read_bytes()
    for damage in (path.unlink, lambda: path.write_bytes(bytes(2000))):
        damage()
        api.resume(copied, quiet=True)
        assert path.read_bytes() == whole


def test_what_reads_the_settings_of_a_run_reads_the_copy_and_the_report_says_so(copied, finished, capsys):
    assert "cut off" not in copied.report().read_text()
    cut(copied, 0.5)
    assert "config.yaml was cut off: what its end said is missing here" in copied.report().read_text()
    assert copied.evaluate() == finished.evaluate()
    assert copied.predict(["great film"]) == finished.predict(["great film"])
    assert cli.main(["train", str(copied.path), "--print_config"]) == 0
    told = capsys.readouterr().out
    assert cli.main(["train", str(finished.path), "--print_config"]) == 0
    assert told == capsys.readouterr().out and "per_device_train_batch_size: 16" in told


def test_without_a_whole_copy_a_config_that_was_cut_off_is_refused_with_what_to_do(copied, capsys):
    cut(copied, 0.5)
    for checkpoint in (copied.path / "checkpoints").glob("step-*"):
        (checkpoint / "config.yaml").write_text("seed: 7\n")  # not what the manifest says
    for act in (copied.resume, copied.evaluate, lambda: copied.predict(["x"])):
        with pytest.raises(InputError, match=r"config\.yaml is truncated"):
            act()
    assert cli.main(["resume", str(copied.path)]) == 2
    told = capsys.readouterr().err
    assert "error[run.config]" in told and "# end" in told
    assert cli.main(["train", str(copied.path / "config.yaml")]) == 2
    assert "error[run.config]" in capsys.readouterr().err


def test_a_config_that_was_edited_is_taken_and_the_change_is_told(copied):
    path = copied.path / "config.yaml"
    path.write_text(path.read_text().replace("learning_rate: 0.002", "learning_rate: 0.001"))
    copied.resume(epochs=2.5, quiet=True)
    assert "lr of " in (copied.path / "log.txt").read_text()
    assert yaml.safe_load(path.read_text())["learning_rate"] == 0.001


def test_a_config_that_a_program_has_written_anew_is_taken_as_it_is(copied):
    path = copied.path / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "num_train_epochs": 2.0}))
    written = path.read_bytes()
    assert api.resume(copied, quiet=True).status == "done"
    assert path.read_bytes() == written


def test_a_deleted_line_is_an_edit_and_not_a_cut(copied):
    path = copied.path / "config.yaml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if not line.startswith("weight_decay:")))
    copied.evaluate()
    assert "cut off" not in (copied.path / "log.txt").read_text()


def test_a_config_that_is_damaged_while_the_run_trains_is_not_copied_into_checkpoints(copied, caplog):
    run, whole = RunFolder(copied.path), (copied.path / "config.yaml").read_bytes()
    assert kept_config(run) == {"config.yaml": whole}
    run.config.write_bytes(bytes([whole[0] ^ 4]) + whole[1:])
    assert kept_config(run) == {}
    shutil.rmtree(run.checkpoints)
    config_of(run)
    assert "which settings differ is unknown" in caplog.text and "no setting differs" not in caplog.text
