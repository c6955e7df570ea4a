"""Code and trackers that a folder names start only with the user's word; secrets are in no file of a run."""

import json
import re
import shutil
import subprocess
import sys
import time
from functools import partial

import pytest

from loopwright import api
from loopwright.cli import main
from loopwright.config.secrets import is_secret, without_secrets
from loopwright.errors import InputError
from loopwright.run_folder import RunFolder
from loopwright.runs.settings import settle
from loopwright.tasks import get_task
from loopwright.tasks.consent import allowed_file, remember
from loopwright.tasks.optional_imports import import_object

TASK = "image-classification"
SHORT = {"batch": 8, "threads": 1, "max_steps": 2, "rehearsal": False, "quiet": True}
CODE = """
import pathlib
pathlib.Path("imported").touch()
import torch

def same(image):
    return image

def net(num_labels):
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(12, num_labels))
"""


@pytest.fixture(autouse=True)
def own_state(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    yield
    forget_modules()


def forget_modules():
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_code"]:
        del sys.modules[name]


def refused(call, tmp_path):
    forget_modules()
    (tmp_path / "imported").unlink(missing_ok=True)
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.code == "code.allow" and str(tmp_path / "own_code") in caught.value.saw[0]
    assert ": own_code" in caught.value.what and "--allow_code" in caught.value.fix
    assert not (tmp_path / "imported").exists(), "it was imported"


def test_code_of_a_folder_needs_the_users_word_once(squares, tmp_path, monkeypatch):
    file, module = tmp_path / "own_code" / "inner.py", "own_code.inner"
    file.parent.mkdir()
    file.write_text(CODE)
    (tmp_path / "own_code" / "__init__.py").write_text("")
    names = {"model": f"{module}:net", "augment_with": f"{module}:same"}
    run = api.train(TASK, data=squares, output_dir=tmp_path / "run", **names, **SHORT)
    assert allowed_file().stat().st_mode & 0o777 == 0o600
    forget_modules()
    assert run.resume(max_steps=3, quiet=True).status == "done"  # what the user named is remembered
    settings = tmp_path / "cfg.yaml"
    settings.write_text(f"task: {TASK}\ndata: {squares}\naugment_with: {module}:same\n")
    image = str(next(squares.rglob("*.png")))
    calls = [
        lambda: run.resume(max_steps=4, quiet=True),
        lambda: run.predict([image]),
        lambda: run.evaluate(),
        lambda: run.export(tmp_path / "out"),
        lambda: api.train(TASK, data=squares, model=str(run.path / "model"), **SHORT),
        lambda: api.train(TASK, config=settings, **SHORT),
    ]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))  # of a user who was sent all of it
    for call in calls:
        refused(call, tmp_path)
    assert main(["predict", str(run.path), image]) == 2
    settings.write_text(settings.read_text() + "overlays: /outside\n")
    assert settle(get_task(TASK), [], settings).args.overlays is None  # nor does a file choose where predict writes
    settings.write_text(settings.read_text() + "allow_code: true\n")
    with pytest.raises(InputError, match="only a flag of the call itself"):
        api.train(TASK, config=settings, **SHORT)
    assert run.predict([image], allow_code=True) == run.predict([image])
    with pytest.raises(InputError, match="augment_with: own_code.inner:same"):
        run.resume(max_steps=4, quiet=True)  # only :net is allowed
    for odd in (5, None, [f"{module}:net"], module, "no_such_module:net", f"{module}.deep:net"):
        with pytest.raises(InputError):
            import_object(odd, "model", settle(get_task(TASK), ["--allow_code"]).args)
    (tmp_path / "own_code" / "__init__.py").write_text("# changed")
    refused(calls[1], tmp_path)
    assert main(["export", str(run.path), "--to", "out", "--allow_code"]) == 0
    shutil.copytree(tmp_path / "own_code", tmp_path / "elsewhere" / "own_code")
    monkeypatch.chdir(tmp_path / "elsewhere")
    refused(calls[1], tmp_path / "elsewhere")


def test_a_foreign_run_reaches_nothing_outside_its_folder(squares, tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    path, outside, kept = tmp_path / "run", tmp_path / "disk", tmp_path / "kept"
    run = api.train(TASK, data=squares, output_dir=path, report_to="tensorboard", **SHORT)
    outside.mkdir()
    (path / "trackers").rename(outside / "trackers")
    (path / "trackers").symlink_to(outside / "trackers")
    assert run.resume(max_steps=3, quiet=True).status == "done"  # one's own may lie on another disk
    (path / "trackers").unlink()
    sent, task = api.Run(RunFolder(tmp_path / "sent")), get_task(TASK)
    shutil.copytree(path, sent.path)  # the same id, in another place
    assert sent.resume(max_steps=4, quiet=True).status == "done" and not (sent.path / "trackers").exists()
    assert "--report_to tensorboard starts them" in (sent.path / "log.txt").read_text()
    calls = [lambda: sent.resume(max_steps=5, quiet=True), sent.evaluate, lambda: sent.export(tmp_path / "out")]

    def refused(what, calls=calls[:1]):
        for call in calls:
            with pytest.raises(InputError, match=what) as caught:
                call()
            assert caught.value.code == "run.trust" and "--trust_run" in caught.value.fix

    for name in ("checkpoints", "eval", "trackers", "model/README.md", "model/new"):
        link = sent.path / name
        link.rename(kept) if link.exists() else None
        link.symlink_to(outside)
        refused(f"{name} is a link to {outside}", calls)
        link.unlink()
        kept.rename(link) if kept.exists() else None
    config, plan = sent.folder.config, json.loads(sent.folder.data.read_text())
    config.write_text(f"output_dir: {outside}/planted\n{config.read_text()}")
    assert api.train(TASK, config=config, data=squares, **SHORT).path.parent.name == "runs"
    assert [each.name for each in outside.iterdir()] == ["trackers"]
    hub = tmp_path / "nobody" / "beacon"  # load_dataset would follow the addresses in its README.md
    hub.mkdir(parents=True)
    for kind in ({"kind": "hub"}, {"settings": {"kind": "hub", "split": "train"}}):
        files = [{**file, "path": "nobody/beacon", **kind} for file in plan["files"]]
        sent.folder.data.write_text(json.dumps({**plan, "files": files, "sha256": None}))
        refused("nobody/beacon would be looked up", [*calls[:2], lambda: sent.evaluate(allow_changed_data=True)])
    hub.rmdir()
    sent.folder.data.write_text(json.dumps({**plan, "sha256": None}))
    shutil.rmtree(sent.folder.checkpoints)
    for name, again in (("data", {}), ("model", {"data": squares})):
        config.write_text(re.sub(f"(?m)^{name}: .*$", f"{name}: nobody/beacon", config.read_text()))
        changed = partial(sent.resume, allow_changed_data=True, quiet=True, **again)
        refused("nobody/beacon would be", [changed, partial(api.train, TASK, config=config, **again, **SHORT)])
    settle(task, ["--trust_run"], config)
    assert settle(task, config=config).foreign is None  # remembered


def test_nothing_breaks_without_a_state_folder(tmp_path, monkeypatch):
    (tmp_path / "state").write_text("")
    remember("code", "a:b")
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "state"))
    remember("code", "a:b")
    assert (tmp_path / "state").read_text() == ""


def test_secrets_are_in_no_file_of_a_run(squares, tmp_path, monkeypatch):
    secrets = {name: f"s3cr3t-{name}-0123456789" for name in ("flag", "joined", "variable", "password", "diff")}
    secrets["form"] = "hf_" + "Ab1" * 8
    (tmp_path / "script.py").write_text("TOKEN = None\n")
    for words in (
        ["init", "-q"],
        ["add", "script.py"],
        ["-c", "user.name=a", "-c", "user.email=b", "commit", "-qm", "x"],
    ):
        subprocess.run(["git", *words], check=True, cwd=tmp_path)
    (tmp_path / "script.py").write_text(f"API_TOKEN = '{secrets['diff']}'\nprint('{secrets['form']}')\n")
    monkeypatch.setenv("WANDB_API_KEY", secrets["variable"])
    argv = ["script.py", "--hub_token", secrets["flag"], f"--api-key={secrets['joined']}", secrets["variable"]]
    monkeypatch.setattr(sys, "argv", [*argv, f"https://me:{secrets['password']}@host/data", "--epochs", "3"])
    run = api.train(TASK, data=squares, output_dir=tmp_path / "run", run_name=secrets["variable"], **SHORT)
    assert "--epochs 3" in run.folder.command.read_text() and "+API_TOKEN" in run.folder.command.read_text()
    for path in run.path.rglob("*"):
        found = path.read_bytes() if path.is_file() else b""
        assert not [name for name, value in secrets.items() if value.encode() in found], path
    assert all(map(is_secret, ("hub_token", "WANDB_API_KEY", "password", "aws_secret_access_key", "token")))
    assert not any(map(is_secret, ("pad_token", "max_new_tokens", "eos_token", "tokens", "num_keys", "key")))


SECRETS = """
+WANDB_API_KEY=S3CRET0123456789abcdef
-password: S3CRET
+aws_secret_access_key = S3CRETXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY; PGPASSWORD="S3CRET1" db.password=S3CRET22 # old
export DB_PASSWORD=correcthorses3cret; AZURE_STORAGE_ACCOUNT_KEY: S3CRET+/efgh==, "client_secret": "S3CRET00"
curl -H 'Authorization: Bearer S3CRET0123456789' https://S3CRET@github.com/x postgres://me:S3CRET@S3CRET@host/x
x.csv?a=1&token=S3CRET01&b=2 x?X-Amz-Signature=S3CRET%2F x?key=S3CRET01 eyJS3CRET0000.S3CRET0000.S3CRET0000
"-----BEGIN PRIVATE KEY-----\\nS3CRET\\n-----END PRIVATE KEY-----" -----BEGIN OPENSSH PRIVATE KEY-----
+S3CRETb3BlbnNzaC1rZXk
+-----END OPENSSH PRIVATE KEY-----
"""
CODE_LINES = """
tokenizer = AutoTokenizer.from_pretrained("bert-base"); sorted(rows, key=lambda row: row[1])
token = tokens[0]; token == "<|im_start|>"; token=args.hub_token, api_key=api_key, key: str = "abcdefghijkl"
eos_token = "<|endoftext|>"; max_tokens: 131072; max_token=100000; password: SecretStr; token: Optional[str] = None
password = getpass(); token = os.environ["HF_TOKEN"]; TOKEN=$(cat file); credentials=/etc/credentials.json
git+ssh://git@github.com/x https://github.com/a/b?tab=readme a@b.org
"""


def test_secrets_of_every_common_form_are_hidden_and_code_is_not():
    shown = without_secrets(SECRETS)
    assert "s3cret" not in shown.lower() and shown.count("<hidden>") == 17
    assert without_secrets(CODE_LINES) == CODE_LINES


PARTS = (
    "eyJ-",
    "eyJaaaaaaaaaa.",
    "token=",
    "token:a:",
    "a_token_",
    "secret_key",
    "secret.",
    "passw",
    "token =",
    "token='",
)
PARTS += ("://", "://a?", "://a@", "@", "?", "?a_", "&token=", "-----BEGIN ", "-----BEGIN PRIVATE KEY-----", "bearer a")
PARTS += ("-", ".", " ", "a", "AKIA", "xoxb-", "sk-", "github_pat_", "<", "\t", "\n", '"')


@pytest.mark.parametrize("part", PARTS)
def test_looking_for_secrets_takes_linear_time(part):
    began = time.process_time()
    for end in ("", "!"):
        without_secrets(part * (40_000 // len(part)) + end)
        is_secret(part * 10_000)
    assert time.process_time() - began < 1
