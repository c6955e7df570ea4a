"""`ProfileCallback`: what it says of an update, what it writes, and that it changes no number."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import toys
from loopwright import Trainer
from loopwright.callbacks import ProfileCallback, TrainerCallback
from loopwright.callbacks.profiling import GRAPH_PHASE, PHASES, add_phases, rounded_shares, top_operators
from loopwright.callbacks.roofline import limit_lines, limits_of
from loopwright.errors import ConfigError, StopTrainingError

SAMPLES = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2)


def train(*callbacks, samples=SAMPLES, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.2), nn.Linear(64, 2))
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=0.01), callbacks)
    options = {"num_epochs": 2, "per_device_batch_size": 4, "seed": 1, **options}
    return trainer, trainer.train(samples, **options)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_it_says_where_the_time_of_the_updates_goes_and_writes_it_down(tmp_path, capsys):
    train(ProfileCallback(4, tmp_path / "profile"), gradient_accumulation_steps=2, gradient_clip_norm=1.0)

    found = summary(tmp_path / "profile")
    assert (found["num_updates"], found["first_update"], found["last_update"]) == (4, 4, 7)
    assert list(found["seconds"]) == list(found["shares"]) == list(PHASES)
    assert all(found["seconds"][name] > 0 for name in PHASES)
    assert sum(found["shares"].values()) == pytest.approx(1)
    names = [each["name"] for each in found["operators"]]
    assert "aten::addmm" in names and not any(name.startswith("loopwright") for name in names)
    seconds = [each["seconds"] for each in found["operators"]]
    assert seconds == sorted(seconds, reverse=True)
    assert 0 < sum(each["share"] for each in found["operators"]) <= 1 + 1e-9
    calls = next(each["calls"] for each in found["operators"] if each["name"] == "aten::addmm")
    assert calls == 4 * 2 * 2  # updates, micro-batches, layers
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes()))
    marks = [event["name"] for event in trace["traceEvents"] if "loopwright: " in event.get("name", "")]
    assert marks.count("loopwright: forward") == marks.count("loopwright: backward") == 8
    assert marks.count("loopwright: optimizer") == 4
    out = capsys.readouterr().out
    assert "profile updates 4 to 7: " in out
    line = next(line for line in out.splitlines() if "forward" in line)
    shares = [float(part.split()[-2]) for part in line.split(" · ")]
    assert len(shares) == len(PHASES) and sum(shares) == pytest.approx(100)


def test_it_estimates_the_limit_of_the_machine_from_counted_work_and_measured_rates(tmp_path, capsys):
    train(ProfileCallback(4, tmp_path), gradient_accumulation_steps=2)

    found = summary(tmp_path)["limits"]
    forward, backward = 2 * 4 * (4 * 64 + 64 * 2), 2 * 4 * (4 * 64 + 2 * 64 * 2)  # no gradient of the inputs
    assert found["flops"] == 2 * (forward + backward)
    weights, steps = 4 * (4 * 64 + 64 + 64 * 2 + 2), 4 * 4
    assert found["traffic_bytes"] == 6 * weights + 2 * (2 * weights + steps)
    assert found["matrix_seconds"] == found["flops"] / found["flops_per_second"] > 0
    assert found["memory_seconds"] == found["traffic_bytes"] / found["bytes_per_second"] > 0
    assert 0 < found["share"] < 1 and "launch_seconds" not in found
    out = capsys.readouterr().out
    assert "limit   matrix work at least " in out and "% of the machine's limit, estimated from " in out


def test_a_graph_that_waits_for_launches_is_told_from_one_that_works():
    found = limits_of(0.010, 0.001, 0.004, flops=10**9, traffic=10**6, rates=(10**12, 10**9))
    assert found["launch_seconds"] == pytest.approx(0.005) and found["share"] == pytest.approx(0.1)
    assert "launch at most 5 ms" in limit_lines(found)[0]


def test_without_warm_up_or_memory_there_is_no_limit(tmp_path, monkeypatch):
    train(ProfileCallback(2, tmp_path, num_warm_ups=0))
    assert "limits" not in summary(tmp_path)

    def no_memory(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "mm", no_memory)
    train(ProfileCallback(2, tmp_path))
    assert "limits" not in summary(tmp_path)


def test_the_numbers_of_a_run_are_the_same_with_and_without_it():
    with_it, first = train(ProfileCallback(3), eval_dataset=SAMPLES)
    without, second = train(eval_dataset=SAMPLES)
    assert first == second
    toys.assert_same_weights(with_it, without)


def test_a_slow_loader_is_seen_as_waiting_for_data(tmp_path):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, index):
            sum(range(1_000_000))
            return SAMPLES[index]

    train(ProfileCallback(2, tmp_path), samples=Slow(), max_num_train_steps=5)

    shares = summary(tmp_path)["shares"]
    assert max(shares, key=shares.get) == "data"


def test_an_evaluation_ends_it_early_and_the_end_of_the_run_too(tmp_path, capsys):
    train(ProfileCallback(50, tmp_path / "a"), eval_dataset=SAMPLES, evaluate_every=5)
    train(ProfileCallback(50, tmp_path / "b"))

    assert (summary(tmp_path / "a")["first_update"], summary(tmp_path / "a")["last_update"]) == (4, 5)
    assert (summary(tmp_path / "b")["first_update"], summary(tmp_path / "b")["last_update"]) == (4, 20)
    assert "updates 4 to 5 (of 50 requested" in capsys.readouterr().out


def test_an_evaluation_right_before_the_first_profiled_update_is_not_part_of_it(tmp_path):
    train(ProfileCallback(2, tmp_path, num_warm_ups=5), eval_dataset=SAMPLES, evaluate_every=5)

    found = summary(tmp_path)
    assert (found["first_update"], found["last_update"]) == (6, 7)
    assert next(each["calls"] for each in found["operators"] if each["name"] == "aten::addmm") == 2 * 2


@pytest.mark.parametrize("updates", [2, 3])
def test_a_run_that_is_too_short_says_so_and_an_evaluation_after_it_starts_no_profiler(updates, capsys):
    trainer, _ = train(ProfileCallback(2), max_num_train_steps=updates)
    told = f"Nothing was profiled: the run had {updates} updates, all of them skipped as warm-up"
    assert told in capsys.readouterr().out
    trainer.callback_handler.call_event("on_eval_epoch_end", trainer)
    assert not torch.autograd._profiler_enabled()


class Ending(TrainerCallback):
    def __init__(self, update, error):
        self.update, self.error = update, error

    def on_before_optimizer_step(self, trainer, **kwargs):
        if trainer.progress.update == self.update:
            raise self.error


def test_a_run_that_is_stopped_says_what_was_found_until_then(tmp_path):
    train(ProfileCallback(9, tmp_path), Ending(5, StopTrainingError("enough")))
    assert (summary(tmp_path)["first_update"], summary(tmp_path)["last_update"]) == (4, 5)
    assert not torch.autograd._profiler_enabled()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("broken")], ids=["interrupted", "failed"])
def test_a_run_that_ends_with_an_error_leaves_no_profiler_running(error, tmp_path):
    with pytest.raises(type(error), match=str(error) or None):
        train(ProfileCallback(9, tmp_path), Ending(5, error))
    assert not torch.autograd._profiler_enabled()
    if isinstance(error, KeyboardInterrupt):
        assert summary(tmp_path)["last_update"] == 5
    else:
        assert not (tmp_path / "summary.json").exists()


def test_a_run_after_one_that_failed_is_profiled_by_whichever_callback(tmp_path, capsys):
    model = nn.Linear(4, 2)
    ending = Ending(5, RuntimeError("broken"))
    callbacks = [ProfileCallback(2, tmp_path / "again", num_warm_ups=5), ending]
    trainer = Trainer(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters()), callbacks)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train(SAMPLES, num_epochs=2, per_device_batch_size=4)
    train(ProfileCallback(2, tmp_path / "next"))
    assert summary(tmp_path / "next")["num_updates"] == 2
    ending.update = -1
    trainer.train(SAMPLES, num_epochs=2, per_device_batch_size=4)
    assert summary(tmp_path / "again")["num_updates"] == 2
    assert not torch.autograd._profiler_enabled()
    assert "Nothing is profiled" not in capsys.readouterr().out


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("cannot write")])
def test_a_profile_that_cannot_be_written_is_reported_all_the_same_and_the_run_continues(
    tmp_path, monkeypatch, capsys, error
):
    def refuse(self, path):
        raise error

    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", refuse)
    _, result = train(ProfileCallback(2, tmp_path / "profile"))
    assert result == train()[1]
    out = capsys.readouterr().out
    assert "profile updates 4 to 5: " in out and "aten::addmm" in out
    assert f"not written to {tmp_path / 'profile'}: {error}" in out and "trace: " not in out


def test_a_folder_that_is_a_file_ends_no_run(tmp_path, capsys):
    (tmp_path / "profile").write_text("a file")
    train(ProfileCallback(2, tmp_path / "profile"))
    assert f"not written to {tmp_path / 'profile'}: " in capsys.readouterr().out


def test_without_warm_ups_the_first_update_is_profiled_in_every_run_of_a_trainer(tmp_path):
    trainer, _ = train(ProfileCallback(1, tmp_path, num_warm_ups=0))
    assert summary(tmp_path)["first_update"] == 1
    (tmp_path / "summary.json").unlink()
    trainer.train(SAMPLES, num_epochs=1)
    assert summary(tmp_path)["first_update"] == 1


def test_an_update_that_is_a_graph_is_one_share_and_everything_adds_up():
    intervals = [("data", 5.0), ("forward", 3.0), ("backward", 2.0), ("optimizer", 1.0), ("other", 0.5)]
    seconds = dict.fromkeys((*PHASES, GRAPH_PHASE), 0.0)
    add_phases(seconds, intervals, waited=4.0, is_graph=True)
    assert seconds == {"data": 4.0, "forward": 0, "backward": 0, "optimizer": 0, "other": 1.5, GRAPH_PHASE: 6.0}
    add_phases(seconds, intervals, waited=9.0, is_graph=False)
    assert (seconds["data"], seconds["forward"], seconds["other"]) == (9.0, 3.0, 2.0)
    assert sum(seconds.values()) == 2 * 11.5


def test_operators_of_a_gpu_are_reported_by_its_time_and_kernels_where_graphs_hide_them():
    def event(key, kind, on_host, on_device):
        times = {"self_cpu_time_total": on_host, "self_device_time_total": on_device}
        return SimpleNamespace(key=key, count=2, device_type=SimpleNamespace(name=kind), **times)

    kernel = event("gemm_kernel", "CUDA", 0, 100)
    step = event("Optimizer.step#AdamW.step", "CUDA", 0, 500)
    operators = [step, event("aten::mm", "CPU", 5, 90), event("aten::add", "CPU", 50, 10), kernel]
    assert [each["name"] for each in top_operators(operators)] == ["aten::mm", "aten::add"]
    assert top_operators([event("cudaGraphLaunch", "CPU", 50, 0), kernel]) == [
        {"name": "gemm_kernel", "calls": 2, "seconds": 1e-4, "share": 1.0}
    ]


def test_shares_add_up_to_100_per_cent():
    assert rounded_shares({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}) == {"a": 33.4, "b": 33.3, "c": 33.3}
    assert sum(rounded_shares({str(index): 1 / 7 for index in range(7)}).values()) == pytest.approx(100)


@pytest.mark.parametrize(
    ("name", "least", "value"),
    [("num_updates", 1, 0), ("num_updates", 1, -3), ("num_updates", 1, 1.5), ("num_warm_ups", 0, -1)],
)
def test_numbers_that_cannot_be_are_refused(name, least, value):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of at least {least}, got {value}"):
        ProfileCallback(**{name: value})
