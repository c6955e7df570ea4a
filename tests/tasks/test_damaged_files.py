"""A damaged file of a run folder, or a pipe in its place, is refused by name, repaired or harmless; nothing waits."""

import contextlib
import json
import os
import random
import shutil
import signal
import time
import tracemalloc
from collections import Counter

import numpy as np
import pytest

from checkpoint.test_hostile_files import as_text, mutated, replace
from loopwright import api, cli
from loopwright.data.buckets import sample_lengths
from loopwright.errors import CheckpointError, LoopwrightError
from loopwright.metrics import paired
from loopwright.report import write_report
from loopwright.run_folder import DamagedFileError, find_run, note_in_index, runs_root
from loopwright.run_folder.files import read_json, sealed
from loopwright.run_folder.summaries import list_runs
from loopwright.runs.trained_model import load_run
from loopwright.runs.weights import best_checkpoint, load_weights
from loopwright.sources import DataPlan


@contextlib.contextmanager
def within(seconds):
    """Interrupt what waits longer."""

    def give_up(*args):
        raise AssertionError(f"it takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


TRAINS = {"metrics.jsonl", ".lock", "lease.json", "log.txt", "baselines.json", "baseline_rows.npz", "status.json"}


def attempts(run, name):
    """Return what people do with a run, by name; the files in TRAINS are only needed by one that trains on."""
    longer = {"epochs": 3} if name in TRAINS else {}
    return {
        "predict": lambda: list(run.predict(["great film"])),
        "report": lambda: write_report(run.path),
        "runs": lambda: list_runs(run.path.parent),
        "verify": lambda: cli.main(["verify", str(run.path)]),
        "stop": lambda: cli.main(["stop", str(run.path)]),
        "resume": lambda: api.resume(run.path, quiet=True, **longer),
    }


def copied(source, target):
    """Copy a file; a link is enough for those that are never changed."""
    (os.link if source.endswith(".safetensors") else shutil.copy)(source, target)


def test_a_pipe_in_place_of_any_file_of_a_run_is_refused_at_once_by_name_or_not_needed(finished, tmp_path, capsys):
    expected = list(finished.predict(["great film"]))
    names = sorted(path.relative_to(finished.path) for path in finished.path.rglob("*") if path.is_file())
    names += [names[0].with_name(name) for name in ("lease.json", "stop")]
    assert len(names) > 25
    for number, name in enumerate(names):
        copy = tmp_path / str(number) / "run"
        shutil.copytree(finished.path, copy, copy_function=copied)
        for act, do in attempts(api.Run(find_run(copy)), name.name).items():
            (copy / name).unlink(missing_ok=True)
            os.mkfifo(copy / name)
            with within(10):
                try:
                    found = do()
                    assert act != "predict" or found == expected, name
                except LoopwrightError as error:
                    assert name.name in str(error), (name, act, error)
        shutil.rmtree(copy.parent)
    assert "Traceback" not in capsys.readouterr().err


def flipped(path, draw):
    content = bytearray(path.read_bytes())
    place = draw.randrange(len(content))
    content[place] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def test_a_flipped_bit_in_what_a_prediction_reads_is_refused_by_name_told_or_harmless(finished, tmp_path, caplog):
    run = api.Run.find(shutil.copytree(finished.path, tmp_path / "run"))
    expected, draw = list(run.predict(["great film"])), random.Random(0)
    names = ["model/config.json", "model/model.safetensors", "model/tokenizer.json", "model/SHA256SUMS"]
    num_refused = 0
    for name in [*names, "run.json", "config.yaml", "data.json", "result.json"] * 3:
        path = run.path / name
        before = path.read_bytes()
        flipped(path, draw)
        caplog.clear()
        try:
            found = list(run.predict(["great film"]))
            assert found == expected or "was edited or damaged" in caplog.text, name
        except LoopwrightError as error:
            num_refused += error.code == "run.damaged"
            assert path.name in str(error) or name.startswith("model/"), (name, error)
        path.write_bytes(before)
    assert num_refused >= 12


def test_lengths_that_were_damaged_are_measured_again(tmp_path):
    path = tmp_path / "lengths.bin"
    samples = [{"input_ids": [0] * (1 + index % 7)} for index in range(200)]
    right = sample_lengths(samples, cache=path)
    for _ in range(20):
        flipped(path, random.Random(_))
        assert (sample_lengths(samples, cache=path) == right).all()
    assert len(path.read_bytes()) == 200 * 8 + 32


def test_damaged_lines_of_the_index_are_skipped_with_one_note_and_it_may_be_lost(finished, tmp_path, caplog):
    run = api.Run.find(shutil.copytree(finished.path, runs_root() / finished.folder.id))
    note_in_index(run.folder, state="done")
    index = runs_root() / "index.jsonl"
    whole = index.read_bytes()
    lines = [
        b"\xff\xfe\0",
        b"[]",
        b"7",
        b'{"id": [1], "path": "x"}',
        b'{"id": "a"}',
        b'{"id": "b", "path": 7}',
        b"{" * 9999,
    ]
    lines += [
        b'{"id": "c", "path": "a\\u0000b"}',
        b'{"id": "d", "path": "\\ud800"}',
        b'{"id": "e", "path": "e", "value": 1' + b"0" * 400 + b"}",
    ]
    index.write_bytes(b"\n".join([*lines, whole, b'{"id": "torn']))
    note_in_index(run.folder, state="done", value=0.5)  # on a line of its own
    for argv in (["runs"], ["report", run.id], ["stop", "last"]):
        assert cli.main(argv) == 0, argv
    assert find_run("last").id == find_run(run.id[:12]).id == run.id
    assert [each.value for each in list_runs() if each.id == run.id] == [
        pytest.approx(api.Run.find(run.id).metrics["accuracy"])
    ]
    assert len([text for text in caplog.messages if "damaged lines are skipped" in text]) == 1
    index.unlink()
    assert find_run("last").id == run.id and [each.id for each in api.Run.all()] == [run.id]


def test_a_record_of_any_type_does_not_stop_a_report(finished, tmp_path):
    run = api.Run.find(shutil.copytree(finished.path, tmp_path / "run"))
    for name in ("metrics.jsonl", "eval/predictions.jsonl", "eval/worst.jsonl"):
        path = run.path / name
        records = [json.loads(line) for line in path.read_text().splitlines()]
        odd = [{**records[-1], key: value} for key in records[-1] for value in (None, [], {}, "x", 10**400, True)]
        path.write_bytes(b"\0\n" + b"".join(json.dumps(record).encode() + b"\n" for record in [*odd, *records]))
    started = time.monotonic()
    assert "<html" in write_report(run.path).read_text() and time.monotonic() - started < 5


@pytest.mark.parametrize("name", ["result.json", "status.json", "data.json", "run.json", "checkpoints/best.json"])
def test_a_value_of_any_kind_under_a_right_seal_is_refused_by_the_file_s_name_or_harmless(finished, tmp_path, name):
    run = find_run(shutil.copytree(finished.path, tmp_path / "run"))
    content, draw, refused = read_json(run.path / name), random.Random(name), 0
    uses = [lambda: list_runs(tmp_path), lambda: DataPlan.read(run.data), lambda: best_checkpoint(run)]
    uses += [lambda: run.metadata, lambda: run.is_finished]
    for _ in range(60):
        with contextlib.suppress(RecursionError, TypeError):  # too deep for JSON, or no object
            (run.path / name).write_text(json.dumps(sealed(mutated(content, draw))))
        write_report(run.path)  # which leaves a file out that cannot be read
        for use in uses:
            try:
                use()
            except LoopwrightError as error:
                refused += name.rpartition("/")[2] in str(error)
    assert refused >= 5


def test_a_small_file_of_rows_that_unpacks_to_much_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(paired, "_MOST_BYTES", 1 << 20)
    np.savez_compressed(tmp_path / "rows.npz", a=np.zeros(3), b=np.zeros(5_000_000, np.int8))
    tracemalloc.start()
    with pytest.raises(DamagedFileError, match="unpacked, it takes 5,000,.* bytes, and 1,048,576 are the limit"):
        paired.read_rows(tmp_path / "rows.npz")
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_whatever_the_state_of_a_checkpoint_says_its_weights_are_loaded_or_refused(finished, tmp_path):
    run = find_run(shutil.copytree(finished.path, tmp_path / "run"))
    job, path, outcomes = load_run(run), best_checkpoint(run), Counter()
    original = (path / "state.json").read_bytes()
    for seed in range(60):
        content, draw = json.loads(original), random.Random(seed)
        name = draw.choice(["model_extra", "callbacks", "hidden", "tied"])
        odd = draw.choice([content["state"][name], [{"class": 1}], {"model.weight": [1]}, {"no.such": 2}])
        content["state"][name] = mutated(odd, draw)
        replace(path, "state.json", as_text(content))
        try:
            load_weights(job, run)
            outcomes["loaded"] += 1
        except CheckpointError as error:
            outcomes[error.code] += 1
    assert set(outcomes) == {"loaded", "checkpoint.none"} and outcomes["checkpoint.none"] > 20
