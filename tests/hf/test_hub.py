"""Uploads to the Hub, against a client that records them and a server that refuses them."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from distributed.launcher import run
from loopwright.config import OldNameWarning
from loopwright.hf import Trainer, TrainingArguments, hub

from .tiny import assert_refused, bert, fit, folders, made, on, same

huggingface_hub = pytest.importorskip("huggingface_hub")
filter_repo_objects = pytest.importorskip("huggingface_hub.utils").filter_repo_objects

TOKEN = "hf_abcdefghijklmnopqrst"
SAVES = {"push_to_hub": True, "save_strategy": "steps", "save_steps": 2}


class Recorder:
    """Stands in for HfApi: records each call, with the files that the folder holds when it is uploaded."""

    def __init__(self):
        self.repos, self.uploads, self.branches, self.failing = [], [], [], set()
        self.may_upload = threading.Event()
        self.may_upload.set()
        self.run_as_future = ThreadPoolExecutor(1).submit

    def _check(self, call):
        if call in self.failing:
            raise ConnectionError(f"no network for\n{TOKEN}")

    def create_repo(self, name, **options):
        self._check("create_repo")
        self.repos.append((name, options))
        return SimpleNamespace(repo_id=f"me/{name.rpartition('/')[2]}")

    def create_branch(self, name, **options):
        self.branches.append(options["branch"])

    def upload_folder(self, *, folder_path, path_in_repo, ignore_patterns, **options):
        assert self.may_upload.wait(30)
        self._check("upload_folder")
        found = {path.relative_to(folder_path).as_posix(): path for path in Path(folder_path).rglob("*")}
        names = filter_repo_objects(found, ignore_patterns=ignore_patterns)
        files = {name: found[name].read_bytes() for name in names if found[name].is_file()}
        self.uploads.append(SimpleNamespace(place=path_in_repo, files=files, **options))
        return f"commit {len(self.uploads)}"


@pytest.fixture
def client(monkeypatch):
    recorder = Recorder()
    monkeypatch.setattr(hub, "client", lambda: recorder)
    return recorder


def trained(folder, *callbacks, **options):
    return fit(folder, *callbacks, **{**SAVES, "hub_always_push": True, **options})


def test_each_strategy_uploads_complete_checkpoints_even_if_they_are_rotated_away_meanwhile(tmp_path, client):
    uploaded, events = {}, []
    count = on(push_begin=lambda args, state, *rest, **kwargs: events.append(state.global_step))
    for strategy in ("end", "every_save", "checkpoint", "all_checkpoints"):
        client.may_upload.clear()  # no upload begins before the run has ended
        go_on = on(train_end=lambda *args, **kwargs: client.may_upload.set())
        trained(tmp_path / strategy, go_on, count, save_total_limit=1, hub_strategy=strategy)
        assert folders(tmp_path / strategy) == ["checkpoint-5"] and not list((tmp_path / strategy).glob(".hub-*"))
        uploaded[strategy], client.uploads = client.uploads, []
    assert events == [2, 4, 5] * 3
    places = {strategy: [each.place for each in found] for strategy, found in uploaded.items()}
    assert places["end"] == [] and places["every_save"] == [""] * 3
    assert places["checkpoint"] == ["", "last-checkpoint"] * 3
    assert places["all_checkpoints"] == ["", "checkpoint-2", "", "checkpoint-4", "", "checkpoint-5"]
    for model in uploaded["every_save"]:
        assert set(model.files) == {"model.safetensors", "training_args.json"}
    assert [each.commit_message[-6:] for each in uploaded["every_save"]] == ["step 2", "step 4", "step 5"]
    model, whole = uploaded["all_checkpoints"][:2]
    saved = {path.name: path.read_bytes() for path in (tmp_path / "checkpoint" / "checkpoint-5").iterdir()}
    last = uploaded["checkpoint"][-1].files
    assert last.keys() == saved.keys() and last["model.safetensors"] == saved["model.safetensors"]
    copy = tmp_path / "downloaded" / "checkpoint-2"
    copy.mkdir(parents=True)
    for name, content in whole.files.items():
        (copy / name).write_bytes(content)
    assert model.files["model.safetensors"] == whole.files["model.safetensors"]
    resumed = fit(tmp_path / "resumed", resume=str(copy), save_strategy="steps", save_steps=2)
    assert same(resumed, fit(tmp_path / "other", save_strategy="steps", save_steps=2))


def test_a_save_during_an_upload_is_skipped_and_an_upload_that_hangs_does_not_keep_the_run(
    tmp_path, client, monkeypatch, caplog
):
    monkeypatch.setattr(hub, "_LONGEST_WAIT_SECONDS", 0.1)
    client.may_upload.clear()
    trainer = trained(tmp_path, hub_always_push=False)
    assert trainer.output.global_step == 5 and not trainer.push_in_progress.is_done()
    assert "still runs after" in caplog.text
    client.may_upload.set()
    trainer._finish_current_push()
    assert [each.commit_message[-6:] for each in client.uploads] == ["step 2"]


@pytest.mark.parametrize("call", ["create_repo", "upload_folder"])
def test_a_failure_at_any_moment_is_reported_and_changes_nothing_else(tmp_path, client, caplog, call):
    plain = fit(tmp_path / "plain", save_strategy="steps", save_steps=2)
    client.failing.add(call)
    trainer = trained(tmp_path / "failing", hub_token=TOKEN)
    assert same(trainer, plain) and folders(tmp_path / "failing") == folders(tmp_path / "plain")
    trainer.save_model()
    expected = 5 if call == "create_repo" else 4  # three saves and save_model; the constructor creates the repository
    failures = [
        record.getMessage() for record in caplog.records if "uploading to the Hub failed" in record.getMessage()
    ]
    assert len(failures) == expected and all("ConnectionError: no network for <" in text for text in failures)
    assert "run trainer.push_to_hub() again" in failures[0] and TOKEN not in caplog.text
    with pytest.raises(ConnectionError):
        trainer.push_to_hub()
    assert isinstance(trainer.push_to_hub(blocking=False).exception(30), ConnectionError)
    client.failing.clear()  # the network is back
    assert trainer.push_to_hub() == "commit 1" and trainer.hub_model_id == "me/failing"
    assert not list((tmp_path / "failing").glob(".hub-*"))


def test_push_to_hub_uploads_the_folder_without_the_files_of_the_run(tmp_path, client):
    options = {"hub_token": TOKEN, "hub_private_repo": True, "hub_revision": "trial", "hub_model_id": "me/tiny"}
    data = [{"input_ids": [3, 4, 5], "labels": index % 3} for index in range(8)]
    trainer = trained(tmp_path, hub_strategy="end", model=bert(), data=data, eval_dataset=data[:4], **options)
    assert client.repos == [("me/tiny", {"token": TOKEN, "private": True, "exist_ok": True})] and not client.uploads
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "training_args.bin").write_text(TOKEN)  # as some libraries save the arguments
    (tmp_path / "checkpoint-2" / "training_args.bin").write_text(TOKEN)
    trainer.evaluate()
    trainer.model.add_model_tags("own")
    details = {"tags": "given", "license": "mit", "language": "en", "dataset_tags": ["rows"], "dataset": "<b>: x\n---"}
    assert trainer.push_to_hub("now", tasks="text-classification", finetuned_from="some/base", **details) == "commit 1"
    assert trainer.push_to_hub(blocking=False, revision="refs/pr/1", token="other").result(30) == "commit 2"
    trainer.save_model()
    first, second, third = client.uploads
    assert set(first.files) == {"model.safetensors", "config.json", "training_args.json", "README.md", "notes.txt"}
    assert first.files.keys() == second.files.keys() == third.files.keys()
    assert [(each.commit_message, each.revision, each.token) for each in client.uploads] == [
        ("now", "trial", TOKEN),
        ("End of training", "refs/pr/1", "other"),
        ("Model save", "trial", TOKEN),
    ]
    assert client.branches == ["trial", "trial"] and first.repo_id == "me/tiny"
    assert not any(TOKEN.encode() in content for each in client.uploads for content in each.files.values())
    card = huggingface_hub.ModelCard(first.files["README.md"].decode())
    assert (card.data.license, card.data.language, card.data.datasets) == ("mit", "en", ["rows"])
    assert card.data.tags == ["given", "own", "generated_from_trainer"] and card.data.library_name == "transformers"
    assert (card.data.base_model, card.data.pipeline_tag) == ("some/base", "text-classification")
    assert "# tiny" in card.text and "- eval_loss: " in card.text and "&#60;b&#62;: x ---" in card.text


def push_in_two_processes(results):
    client = Recorder()
    hub.client = lambda: client
    trainer = trained("out")
    client.failing.add("upload_folder")
    trainer.save_model()  # does not raise on any rank
    results["uploads"], results["repository"] = len(client.uploads), trainer.hub_model_id


def test_only_rank_0_uploads(tmp_path):
    first, second = run(push_in_two_processes, tmp_path)
    assert (first["uploads"], first["repository"]) == (2, "me/out")
    assert (second["uploads"], second["repository"]) == (0, None)


def test_overrides_are_called_and_leftovers_of_a_killed_run_removed(tmp_path, client):
    class Own(Trainer):
        calls = ()

        def _push_from_checkpoint(self, checkpoint_folder):
            self.calls += (Path(checkpoint_folder).name,)
            super()._push_from_checkpoint(checkpoint_folder)

        def create_model_card(self, model_name=None):
            (Path(self.args.output_dir) / "README.md").write_text(f"card of {model_name}")

        def push_to_hub(self, *args, **kwargs):
            self.calls += ("push_to_hub",)
            return super().push_to_hub(*args, **kwargs)

    trainer = trained(tmp_path, kind=Own)
    trainer.save_model(str(tmp_path / "elsewhere"))
    assert trainer.calls == ("checkpoint-2", "checkpoint-4", "checkpoint-5", "push_to_hub")
    assert client.uploads[-1].files["README.md"] == f"card of {tmp_path.name}".encode()
    client.uploads.clear()
    (tmp_path / ".hub-killed").mkdir()
    trainer = trained(tmp_path, kind=Own)
    assert [each.files["README.md"][:4] for each in client.uploads] == [b"card"] * 3
    assert not (tmp_path / ".hub-killed").exists()


def test_a_resumed_run_uploads_too_and_its_hub_settings_may_change(tmp_path, client, capsys):
    plain = trained(tmp_path, hub_token=TOKEN)
    assert TOKEN not in "".join(path.read_text("latin-1") for path in tmp_path.rglob("*") if path.is_file())
    client.uploads.clear()
    capsys.readouterr()
    last = str(tmp_path / "checkpoint-2")
    resumed = trained(tmp_path, resume=last, hub_strategy="checkpoint", hub_model_id="me/other")
    assert [each.place for each in client.uploads] == ["", "last-checkpoint"] * 2
    assert "hub" not in capsys.readouterr().out
    assert same(resumed, plain)


def test_arguments_for_the_hub_are_checked_translated_and_never_show_the_token(tmp_path, client, monkeypatch):
    args = TrainingArguments("out").set_push_to_hub("me/model", strategy="checkpoint", token=TOKEN, private_repo=True)
    assert args.push_to_hub and args.hub_private_repo and args.hub_strategy == "checkpoint"
    assert TOKEN not in repr(args) + args.to_json_string()
    assert TrainingArguments.from_dict(args.to_dict()).hub_token is None
    text = "hub_strategy must be one of .*did you mean every_save"
    assert_refused(text, TrainingArguments, "out", hub_strategy="every_safe")
    old = {"push_to_hub_model_id": "model", "push_to_hub_organization": "team", "push_to_hub_token": TOKEN}
    with pytest.warns(OldNameWarning) as notices:
        args = TrainingArguments("out", **old)
        assert TrainingArguments("some/out", push_to_hub_organization="team").hub_model_id == "team/out"
        assert TrainingArguments("out", hub_token="new", push_to_hub_token=TOKEN).hub_token == "new"
    assert (args.hub_model_id, args.hub_token) == ("team/model", TOKEN)
    assert not any(TOKEN in str(notice.message) for notice in notices)
    monkeypatch.setattr(hub, "client", huggingface_hub.HfApi)
    assert_refused("hub_model_id='a b' cannot name a repository", made, tmp_path, push_to_hub=True, hub_model_id="a b")
    monkeypatch.undo()
    hub.client.cache_clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert_refused("pip install huggingface_hub", made, tmp_path, push_to_hub=True)


class Server(BaseHTTPRequestHandler):
    """Takes the first commit, and refuses all others."""

    commits = []

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        answer = {"url": "http://127.0.0.1/me/tiny", "commitUrl": "http://127.0.0.1/me/tiny/commit/1", "commitOid": "1"}
        if "/preupload/" in self.path:
            names = [each["path"] for each in json.loads(body)["files"]]
            answer["files"] = [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]
        is_commit = "/commit/" in self.path
        self.commits += [body] if is_commit else []
        self.send_response(403 if is_commit and len(self.commits) > 1 else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *args):
        pass


def test_the_client_of_huggingface_hub_uploads_and_a_server_that_refuses_does_not_stop_the_run(
    tmp_path, monkeypatch, caplog
):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    api = huggingface_hub.HfApi(endpoint=f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(hub, "client", lambda: api)
    trainer = trained(tmp_path, hub_token=TOKEN)
    server.shutdown()
    server.server_close()
    assert trainer.output.global_step == 5 and trainer.hub_model_id == "me/tiny"
    assert b"step 2" in Server.commits[0] and b"model.safetensors" in Server.commits[0] and len(Server.commits) == 3
    assert caplog.text.count("403 Forbidden") == 2 and TOKEN not in caplog.text
