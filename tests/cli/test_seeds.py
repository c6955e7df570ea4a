"""`--seeds 3`: the same run with several seeds, bit for bit as if each were alone, and their spread."""

import json
import os
import re
import signal
import statistics
import sys
from pathlib import Path

import pytest
import torch
import yaml

import loopwright
from cli.streams import SignalsOn, parsed
from loopwright import LoopwrightError
from loopwright.cli import main
from loopwright.run_folder import RunFolder
from loopwright.runs.settings import settle
from loopwright.tasks import get_task
from tasks.reviews import events
from tasks.squares import write_squares

FLAGS = ["--lr", "2e-3", "--batch", "16", "--threads", "1", "--no_rehearsal", "--epochs", "1"]


def train(reviews, *words):
    return main(["train", "text-classification", "--data", str(reviews), *FLAGS, *words])


def content(folder, *names):
    return [Path(folder, name).read_bytes() for name in names]


def test_a_run_of_several_has_the_very_bits_of_the_run_with_its_seed_alone(capsys, reviews):
    assert train(reviews, "--seed", "7", "--seeds", "2", "--dropout", "0.1", "--out", "both") == 0
    out = capsys.readouterr().out
    assert train(reviews, "--seed", "8", "--dropout", "0.1", "--out", "alone") == 0
    assert sorted(os.listdir("both")) == ["seed-7", "seed-8"]
    files = ("model/model.safetensors", "result.json", "data.json", "config.yaml", "eval/predictions.jsonl")
    second, alone = (dict(zip(files, content(place, *files), strict=True)) for place in ("both/seed-8", "alone"))
    for name in files:
        if name == "result.json":
            one, other = ({**json.loads(each[name]), "seconds": 0, "sha256": 0} for each in (second, alone))
            assert one == other
        else:
            assert second[name] == alone[name], name
    assert events(Path("both/seed-8")) == events(Path("alone"))
    assert content("both/seed-7", *files[:1]) != content("alone", *files[:1])
    assert content("both/seed-7", "data.json") == content("alone", "data.json")  # the split is that of every seed
    kept = [yaml.safe_load(Path("both", name, "config.yaml").read_text()) for name in ("seed-7", "seed-8")]
    assert [config["seed"] for config in kept] == [7, 8] and all("seeds" not in config for config in kept)

    results = [json.loads(Path("both", name, "result.json").read_text()) for name in ("seed-7", "seed-8")]
    values = [result["metrics"]["loss"] for result in results]
    row = next(line.split() for line in out.splitlines() if re.match(r" +loss ", line) and "±" not in line)
    numbers = (statistics.fmean(values), statistics.stdev(values), min(values), max(values))
    assert row[1:] == [f"{number:.4f}" for number in numbers]
    for seed, result in zip((7, 8), results, strict=True):
        shown = f"{result['metrics']['accuracy']:.4f}"
        assert re.search(rf"^seed {seed}  done   accuracy {shown} .*both/seed-{seed}$", out, re.MULTILINE)
        assert re.search(rf"^(seeds)? +{seed}  +{shown} ±\S+  done +both/seed-{seed}$", out, re.MULTILINE)
    assert "next    lw compare both/seed-7 both/seed-8 --open" in out


def test_scripts_are_told_of_each_run_and_of_all_and_names_say_the_seed(capsys, reviews):
    Path("cfg.yaml").write_text(f"task: text-classification\ndata: {reviews}\nseeds: 2\nseed: 7\n")
    assert main(["train", "cfg.yaml", *FLAGS, "--json"]) == 0
    told = parsed(capsys.readouterr().out)
    assert [event["seed"] for event in told if event["event"] == "start"] == [7, 8]
    ends, last = [event for event in told if event["event"] == "end"], told[-1]
    assert [re.sub(r".*-reviews-(\w+)-\w{4}$", r"\1", end["run"]) for end in ends] == ["seed7", "seed8"]
    assert (last["event"], last["seeds"], last["exit_code"]) == ("seeds", [7, 8], 0)
    assert [(run["run"], run["metrics"]) for run in last["runs"]] == [(e["run"], e["result"]["metrics"]) for e in ends]
    assert last["metrics"]["accuracy"]["runs"] == 2 and last["best"]["run"] in {end["run"] for end in ends}
    with pytest.raises(LoopwrightError, match="seeds=2, which returns a list of runs"):
        loopwright.train("text-classification", config="cfg.yaml", quiet=True)
    assert main(["runs", "--json"]) == 0 and len(parsed(capsys.readouterr().out)) == 2


def test_one_seed_is_a_plain_run(capsys, reviews):
    assert train(reviews, "--seeds", "1", "--out", "run", "--quiet") == 0
    assert capsys.readouterr() == ("run\n", "") and Path("run/result.json").is_file()


@pytest.mark.parametrize(
    ("seeds", "told"),
    [
        ("0", "seeds must be at least 1, got 0"),
        ("-2", "seeds must be at least 1, got -2"),
        ("many", "expected a number, got 'many'"),
        ("1.5", "expected a whole number, got '1.5'"),
    ],
)
def test_a_number_of_seeds_that_cannot_be_is_refused_with_a_fix(reviews, seeds, told):
    with pytest.raises(LoopwrightError) as refused:
        settle(get_task("text-classification"), ["--seeds", seeds])
    error = refused.value
    assert (error.code, error.flag, error.fix) == (
        "args.value",
        "--seeds",
        "--seeds 2" if seeds == "1.5" else "--seeds 1",
    )
    assert error.what == f"--seeds {seeds}: {told}"
    assert train(reviews, "--seeds", seeds) == 2 and not Path("runs").exists()


def test_seeds_are_refused_where_there_is_one_run_or_no_room(capsys, monkeypatch, reviews, finished):
    assert main(["resume", str(finished.path), "--seeds", "3"]) == 2
    assert f"fix: leave out --seeds   or   lw train {finished.path} --seeds 3" in capsys.readouterr().err
    Path("out/seed-43").mkdir(parents=True)
    Path("out/seed-43/notes.txt").write_text("mine")
    assert train(reviews, "--seeds", "2", "--out", "out") == 2
    assert "out/seed-43 is not empty" in capsys.readouterr().err and os.listdir("out") == ["seed-43"]
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert train(reviews, "--seeds", "2") == 2
    assert "fix: leave out --max-restarts" in capsys.readouterr().err
    assert train("absent.csv", "--seeds", "2") == 2
    assert capsys.readouterr().out.count("seeds") == 0


@pytest.mark.parametrize(
    ("text", "number", "code", "state"),
    [("seed 8 (2 of 3)", signal.SIGTERM, 75, None), ("run     1", signal.SIGINT, 130, "preempted")],
    ids=["SIGTERM before the second run", "Ctrl-C in the second run"],
)
def test_a_signal_ends_all_and_says_what_is_done_and_how_to_go_on(
    monkeypatch, capsys, reviews, text, number, code, state
):
    out = SignalsOn(text, number, skip=0 if state is None else 1)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        assert train(reviews, "--seed", "7", "--seeds", "3", "--logging_steps", "1") == code
    said = out.getvalue().partition("\nseeds ")[2]
    names = {path.name.split("-")[3]: path.name for path in Path("runs").iterdir() if path.name.count("-") == 4}
    line = f"lw train text-classification --data {reviews} {' '.join(FLAGS)} --logging_steps 1"
    if state is None:
        assert list(names) == ["seed7"] and "before the first update" not in capsys.readouterr().err
        assert f"{line} --seed 8 --seeds 2\n" in said
    else:
        assert sorted(names) == ["seed7", "seed8"] and re.search(r" 8 .* preempted  runs/.*-seed8-", said)
        assert f"next    lw resume {names['seed8']}\n        {line} --seed 9 --seeds 1\n" in said
        assert main(["resume", names["seed8"], "--quiet"]) == 0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert re.search(r" 7 .* done  +runs/.*-seed7-", said)


def test_a_run_that_diverges_is_told_and_the_others_are_trained(capsys, reviews):
    words = ["--seeds", "2", "--out", "out", "--lr", "1e30", "--max_grad_norm", "0", "--logging_steps", "2"]
    assert train(reviews, *words) == 4
    out, err = capsys.readouterr()
    assert err.count("error[loss.nan]") == 2 and sorted(os.listdir("out")) == ["seed-42", "seed-43"]
    assert re.search(r"43 +diverged  out/seed-43", out) and "over " not in out and "lw compare" not in out


def test_in_python_seeds_return_a_list_and_leave_a_module_as_it_was(tmp_path):
    data = write_squares(tmp_path / "squares", 30)
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 12 * 12, 3))
    before = [weight.clone() for weight in module.parameters()]
    flags = {"data": data, "max_steps": 2, "batch": 8, "threads": 1, "rehearsal": False, "quiet": True}
    runs = loopwright.train("image-classification", model=module, seeds=2, seed=3, out=tmp_path / "runs", **flags)
    assert [run.path.name for run in runs] == ["seed-3", "seed-4"] and all(run.metrics for run in runs)
    assert all(map(torch.equal, before, module.parameters()))
    alone = loopwright.train("image-classification", seeds=1, out=tmp_path / "one", **flags)
    assert [run.path.name for run in alone] == ["one"]


class Stopping(torch.nn.Sequential):
    """A model that asks its run to stop, as `lw stop` does."""

    def forward(self, images):
        if self.training:
            RunFolder(self.run_path).ask_to_stop()
        return super().forward(images)


def test_in_python_a_run_that_is_stopped_ends_all_of_them(tmp_path):
    data = write_squares(tmp_path / "squares", 30)
    module = Stopping(torch.nn.Flatten(), torch.nn.Linear(3 * 12 * 12, 3))
    module.run_path = tmp_path / "runs" / "seed-3"
    flags = {"data": data, "max_steps": 4, "batch": 8, "threads": 1, "rehearsal": False, "quiet": True}
    runs = loopwright.train("image-classification", model=module, seeds=2, seed=3, out=tmp_path / "runs", **flags)
    assert [(run.path.name, run.folder.status["state"]) for run in runs] == [("seed-3", "stopped")]
