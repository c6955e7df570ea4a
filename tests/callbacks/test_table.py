"""The default console: a row per epoch with the best marked, a bar on a terminal and in a notebook, short errors."""

import re
import sys
import time
import warnings

import pytest
import torch
import tqdm
from IPython.core.interactiveshell import InteractiveShell
from torch import nn

import toys
from loopwright import Trainer, terminal
from loopwright.callbacks import CONSOLE_CALLBACKS, EarlyStoppingCallback, SaveBestModelCallback, TrainerCallback
from loopwright.callbacks import table as table_module
from loopwright.callbacks.table import EpochTableCallback, rounded


def trained(callbacks=CONSOLE_CALLBACKS, lr=0.5, metrics="accuracy", **options):
    model = toys.seeded(nn.Linear, 4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    trainer = Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks, metrics=metrics)
    data = toys.labelled(40)
    trainer.train(data, **{"num_epochs": 4, "eval_dataset": data, "seed": 0, **options})
    return trainer


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


def test_a_pipe_gets_a_header_a_row_per_epoch_and_the_best_in_words(capsys):
    trainer = trained()
    out, err = capsys.readouterr()
    header, *rows, last = out.splitlines()
    titles = ["epoch", "train loss", "eval loss", "train accuracy", "eval accuracy", "seconds"]
    assert re.split(r" {2,}", header) == titles and err == "" and "\x1b" not in out
    losses = trainer.run_history.get_metric_values("eval_loss_epoch")
    best = [index for index, loss in enumerate(losses) if loss == min(losses[: index + 1])]
    assert [index for index, row in enumerate(rows) if row.endswith("* best")] == best and len(rows) == 4
    assert rows[1].split()[:3] == [
        "2",
        *(f"{trainer.run_history.get_metric_values(name)[1]:.4f}" for name in ("train_loss_epoch", "eval_loss_epoch")),
    ]
    assert last == f"Best eval loss: {min(losses):.4f} in epoch {losses.index(min(losses)) + 1}"
    trainer.evaluate()
    assert re.match(r"evaluation accuracy 0\.\d+  evaluation loss \d\.\d{4}  \(\d+\.\d s\)\n", capsys.readouterr().out)


def test_the_best_row_follows_the_metric_that_is_watched_and_skipped_evaluations_have_no_cell(capsys):
    watching = EarlyStoppingCallback(9, watch_metric="accuracy")
    trainer = trained([EpochTableCallback, watching], lr=0.05, evaluate_every="2 epochs")
    rows = [line for line in capsys.readouterr().out.splitlines() if re.match(r" +\d+ ", line)]
    assert len(rows) == 4 and "-" in rows[2].split() and "best" not in rows[0] + rows[2]
    values = trainer.run_history.get_metric_values("eval_accuracy")
    assert rows[1].endswith("* best") and rows[3].endswith("* best") == (values[1] > values[0])


class Slow(TrainerCallback):
    def on_update_end(self, trainer, **kwargs):
        time.sleep(0.12)  # tqdm draws ten times a second


def test_a_terminal_gets_colours_and_a_bar_with_loss_metric_and_time_left(monkeypatch):
    out, err = toys.Terminal(), toys.Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(table_module, "_SECONDS_BETWEEN", 0.0)
    trained([*CONSOLE_CALLBACKS, Slow], num_epochs=1)
    assert re.search(r"epoch 1/1: +\d+%, loss \d\.\d+  accuracy 0\.\d+ +\d/5 +00:0\d<00:0\d", err.getvalue())
    assert "\x1b[32m" in out.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    out.truncate(0)
    trained(num_epochs=1)
    assert "\x1b[32m" not in out.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_a_narrow_terminal_keeps_loss_and_metrics_in_the_bar_and_metrics_of_evaluation_in_the_table(
    columns, monkeypatch
):
    out, err = toys.Terminal(), toys.Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(table_module, "_SECONDS_BETWEEN", 0.0)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(tqdm.std, "_screen_shape_wrapper", lambda: lambda file: (columns - 1, 23))
    trained([EpochTableCallback, Slow], num_epochs=1, metrics=["accuracy", "matthews_correlation"])
    assert re.search(r"epoch 1/1: +\d+%, loss \d\.\d+  accuracy 0\.\d+", err.getvalue())
    assert all(len(line) <= columns for line in re.split(r"[\r\n]", err.getvalue()))
    text = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())
    hidden = re.search("too narrow: (.*)", text)
    header = next(line for line in text.splitlines() if line.lstrip().startswith("epoch"))
    assert "eval accuracy" in header and re.search(r"eval m.*ation", header)
    assert ("train accuracy" in header) is (columns == 200) and (hidden is None) is (columns == 200)
    assert max(map(len, text.splitlines()[1:3])) <= columns


def test_the_best_is_named_once_with_its_epoch_also_after_an_early_stop(capsys, tmp_path):
    trained([EpochTableCallback, EarlyStoppingCallback(1, 9.0)])
    assert re.search(r"^Best eval loss: \d\.\d{4} in epoch \d$", capsys.readouterr().out, re.M)
    trained([EpochTableCallback, SaveBestModelCallback(tmp_path / "best.pt")], num_epochs=2)
    out = capsys.readouterr().out
    assert "Best eval loss" not in out
    assert re.search(r"Loading checkpoint with eval_loss_epoch: \d\.\d{1,4} from epoch 2", out)


def test_numbers_are_rounded_for_people():
    cases = {
        2.67e28: "2.67e+28",
        0.123456: "0.1235",
        12.0: "12",
        1234.5: "1234",
        1e-5: "1e-05",
        float("nan"): "nan",
        0: "0.0000",
    }
    assert {value: rounded(value) for value in cases} == cases


# ------------------------------------------------------------------------------------------------- notebooks


@pytest.fixture
def shell():
    """A real IPython shell that is the kernel of a notebook."""
    InteractiveShell.clear_instance()
    shell = InteractiveShell.instance()
    shell.config.IPKernelApp.parent_appname = "notebook"
    yield shell
    InteractiveShell.clear_instance()


CELL = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from loopwright import Trainer
model = nn.Linear(4, 3)
def make(loss=nn.CrossEntropyLoss(), model=model):
    return Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
data = TensorDataset(torch.randn(40, 4), torch.randint(3, (40,)))
"""


def test_a_notebook_without_widgets_has_one_updating_line_and_no_warning(shell, capsys, monkeypatch):
    monkeypatch.setattr(terminal.importlib.util, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shell.run_cell(CELL + "make().train(data, 2, data, seed=0)\n").success
    out, err = capsys.readouterr()
    assert "\repoch 2/2:" in out and err == "" and "* best" in out


def test_an_error_in_a_notebook_shows_its_message_first_and_only_the_users_frames(shell, capsys):
    shell.run_cell(CELL)
    capsys.readouterr()
    shell.run_cell("make().train(data, epochs=3)\n")
    out = capsys.readouterr().out
    assert out.splitlines()[0].endswith("ConfigTypeError: train() has no argument 'epochs': did you mean num_epochs?")
    assert "make().train(data, epochs=3)" in out and "joint_failure" not in out and "interactiveshell" not in out
    own = "class Own(nn.Linear):\n    def forward(self, x):\n        return x @ self.weight\n"
    shell.run_cell(own + "make(model=Own(4, 3)).train(data, 1, seed=0)\n")
    out = capsys.readouterr().out
    first, rest = next(line for line in out.splitlines() if "Error" in line), out
    assert "RuntimeError: mat1 and mat2" in first and "return x @ self.weight" in rest
    assert "stepping" not in rest and "torch/nn" not in rest
