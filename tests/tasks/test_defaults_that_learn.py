"""Defaults that learn: epochs by task and data, a note before runs that cannot, rates that win short trials."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import toys
from loopwright import api
from loopwright.cli import main
from loopwright.runs.auto.learning_rate import best_of
from loopwright.tasks import load_tasks
from tasks.reviews import rows, write_csv
from tasks.squares import write_squares
from tasks.texts import tiny_bert

SHORT = ["--threads", "1", "--no_rehearsal", "--quiet"]


def config_of(path):
    lines = (path / "config.yaml").read_text().splitlines()
    return {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}


def test_the_default_epochs_are_enough_updates_for_a_model_from_scratch(reviews, tmp_path, capsys):
    words = ["train", "text-classification", "--data", str(reviews), "--out", "run", *SHORT, "--batch", "8"]
    assert main([*words, "--check", "--json"]) == 0
    checked = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    found = next(event for event in checked if event["event"] == "check")
    assert found["updates"] >= 300 > found["updates"] - found["updates"] / found["epochs"]


@pytest.mark.parametrize(
    ("flags", "is_warned"),
    [({"max_steps": 20}, True), ({"epochs": 1}, True), ({"max_steps": 60}, False)],
    ids=str,
)
def test_a_run_that_cannot_learn_is_noted_before_it_starts(reviews, capsys, flags, is_warned):
    found = api.train("text-classification", data=reviews, batch=16, threads=1, rehearsal=False, **flags)
    assert ("note: " in capsys.readouterr().out) is is_warned
    if "epochs" in flags:
        assert found.result["epochs"] == flags["epochs"]
        assert config_of(found.path)["num_train_epochs"].startswith("1.0  # flag")


def test_few_images_get_many_epochs_and_a_resumed_run_keeps_them(tmp_path, capsys):
    data = write_squares(tmp_path / "squares")
    words = ["train", "image-classification", "--data", str(data), "--out", "run", *SHORT, "--image_size", "8"]
    assert main(words) == 0
    kept = config_of(tmp_path / "run")["num_train_epochs"]
    assert kept.endswith("# data") and float(kept.split()[0]) > 3
    assert main(["resume", "run", "--quiet"]) == 0
    assert config_of(tmp_path / "run")["num_train_epochs"] == kept


def test_every_task_names_a_small_model_to_start_from_and_the_run_says_so(reviews, capsys):
    tasks, _ = load_tasks()
    assert len(tasks) == 16 and all(task.pretrained.count("/") == 1 for task in tasks)
    assert all(10 <= task.pretrained_megabytes <= 350 for task in tasks)
    main(["explain", "text-classification"])
    assert "--model distilbert/distilbert-base-uncased" in " ".join(capsys.readouterr().out.split())
    main(["train", "text-classification", "--data", str(reviews), "--max_steps", "1", "--no_rehearsal"])
    assert "--model distilbert/distilbert-base-uncased would start from a pretrained one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("trials", "chosen"),
    [
        ({1e-3: [2.0] * 9, 1e-4: [2.0] * 9}, 1e-3),  # a tie
        ({1e-3: [2.0, 1.0, 0.5] * 3, 1e-4: [2.0, 1.9, 1.8] * 3}, 1e-3),
        ({1e-3: [2.0, 1.9, 1.81, 1.82, 1.83, 1.8], 1e-2: [2.0, 1.5, 1.0, 0.9, 0.81, 0.8]}, 1e-2),
        ({1e-3: [2.0, 1.0, 3.0, 0.9, 3.1, 1.0], 1e-2: [2.0, 3.0, 1.0, 3.1, 0.8, 1.1]}, 1e-3),  # noise
        ({1e-3: [2.0, 9.0], 1e-4: [2.0, 1.9, 1.8, 1.7, 1.6, 1.5]}, 1e-4),  # the default diverged
        ({1e-3: [2.0, 1.9, 1.8, 1.7, 1.6, 1.5], 1e-1: [2.0, 0.1]}, 1e-3),  # the other one ended early
        ({1e-3: [2.0, 1.9, 1.8], 1e-1: [2.0, float("nan"), 1.0]}, 1e-3),
    ],
    ids=["tie", "default wins", "clearly lower", "noise", "default diverged", "other diverged", "nan"],
)
def test_a_rate_replaces_the_default_only_if_it_is_clearly_better(trials, chosen):
    assert best_of(trials, 1e-3) == chosen


def test_lr_auto_tries_the_default_and_learns_as_well_as_it_does(tmp_path):
    data = write_csv(tmp_path / "reviews.csv", rows(160))
    flags = {"data": data, "batch": 16, "epochs": 5, "threads": 1, "rehearsal": False, "quiet": True}
    usual = api.train("text-classification", **flags, output_dir="usual")
    found = api.train("text-classification", **flags, output_dir="auto", lr="auto")
    chosen = json.loads((found.path / "lr_find.json").read_text())
    assert chosen["default"] == 1e-3 and "0.001" in chosen["trials"] and len(chosen["trials"]) > 1
    assert found.metrics["accuracy"] >= usual.metrics["accuracy"] - 0.05


class Hub(BaseHTTPRequestHandler):
    """Serves the files of a folder as those of the model me/tiny."""

    folder, asked, num_refusals = None, [], 1  # of the weights, at first

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.wfile.write(self.answer())

    def answer(self):
        path = self.path.partition("?")[0]
        file = self.folder / path.rpartition("/")[2]
        content, code = b"", 404
        if path.startswith(("/api/models/me/tiny/revision", "/api/models/me/tiny/tree")):
            sizes = {each.name: each.stat().st_size for each in self.folder.iterdir()}
            tree = [{"type": "file", "path": name, "size": size, "oid": "b" * 40} for name, size in sizes.items()]
            described = {"id": "me/tiny", "sha": "a" * 40, "siblings": [{"rfilename": name} for name in sizes]}
            content, code = json.dumps(tree if "/tree" in path else described).encode(), 200
        elif path.startswith("/me/tiny/resolve/") and file.is_file():
            self.asked.append((self.command, file.name))
            is_refused = file.suffix == ".safetensors" and Hub.num_refusals > 0
            Hub.num_refusals -= is_refused
            content, code = (b"", 403) if is_refused else (file.read_bytes(), 200)
        self.send_response(code)
        for name, value in {
            "ETag": f'"{file.name}"',
            "X-Repo-Commit": "a" * 40,
            "Content-Length": len(content),
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        return content

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_a_model_by_name_is_downloaded_with_progress_then_found_in_the_cache(tmp_path, reviews):
    Hub.folder = tiny_bert(tmp_path / "tiny")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    there = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    words = ["train", "text-classification", "--data", str(reviews), "--model", "me/tiny", "--max_steps", "1", *SHORT]
    code = "import sys; from loopwright.cli import main; *words, names = sys.argv[1:]\n"
    code += "print(*(main([*words, '--out', name]) for name in names.split()))"

    def lw(names, **variables):
        Hub.asked.clear()
        environment = {"HF_HOME": str(tmp_path / "home"), **there, **variables}
        return toys.python("-c", code, *words, names, cwd=tmp_path, **environment)

    first = lw("broken first")
    assert first.stdout.splitlines()[-1] == "2 0", first.stderr
    assert "error[model.offline]" in first.stderr and not (tmp_path / "broken").exists()
    assert ("GET", "model.safetensors") in Hub.asked and "Fetching" in first.stderr
    again = lw("again", HF_HUB_OFFLINE="1")
    server.shutdown()
    server.server_close()
    assert again.stdout.splitlines()[-1] == "0" and Hub.asked == [] and again.stderr == ""
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("first", "again")]
    assert weights[0] == weights[1]
