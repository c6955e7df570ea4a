"""The state of the code is read without running anything that a repository can configure."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from loopwright.runs import code_state as module
from loopwright.runs.code_state import code_state

_KEYS = (
    *("core.fsmonitor", "core.pager", "core.editor", "core.sshCommand", "core.askPass", "core.gitProxy", "pager.diff"),
    *("diff.external", "diff.x.command", "diff.x.textconv", "filter.x.clean", "filter.x.smudge", "filter.x.process"),
    *("filter.y.clean", "merge.x.driver", "gpg.program", "credential.helper", "alias.diff", "interactive.diffFilter"),
    *("uploadpack.packObjectsHook", "remote.origin.uploadpack", "core.alternateRefsCommand", "sequence.editor"),
)


def git(folder: Path, *argv: str) -> str:
    own = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    settings = ("user.name=a", "user.email=a@b", "protocol.file.allow=always", "commit.gpgsign=false")
    who = [word for setting in settings for word in ("-c", setting)]
    env = {**os.environ, **own}
    return subprocess.run(["git", *who, *argv], cwd=folder, env=env, check=True, capture_output=True, text=True).stdout


def repository(folder: Path, *options: str) -> str:
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main", *options)
    (folder / "code.txt").write_text("before\n")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return git(folder, "rev-parse", "HEAD").strip()


def test_a_hostile_repository_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, marker = tmp_path / "repo", tmp_path / "marker"
    repository(tmp_path / "inner")
    repository(root)
    script = tmp_path / "script.sh"
    script.write_text(f'#!/bin/sh\necho "$0 $@" >> {marker}\ncat\n')
    script.chmod(0o755)
    git(root, "submodule", "--quiet", "add", str(tmp_path / "inner"), "part")
    (root / ".gitattributes").write_text("*.txt filter=x diff=x merge=x\n*.md filter=y ident\n")
    (root / "notes.md").write_text("one\n")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "second")
    commit = git(root, "rev-parse", "HEAD").strip()
    included = tmp_path / "included"
    for key in _KEYS:
        git(root, "config", key, str(script))
        git(root / "part", "config", key, str(script))
        git(root, "config", "--file", str(included), key, str(script))
    for key, value in (("include.path", str(included)), ("core.worktree", "/"), ("core.attributesFile", str(included))):
        git(root, "config", key, value)
    for each in ((root / ".git" / "hooks"), root / ".git" / "modules" / "part" / "hooks"):
        each.mkdir(exist_ok=True)
        for name in ("post-index-change", "fsmonitor-watchman", "query-watchman", "post-checkout", "pre-auto-gc"):
            (each / name).write_bytes(script.read_bytes())
            (each / name).chmod(0o755)
    (root / "git").write_bytes(script.read_bytes())
    (root / "git").chmod(0o755)
    (root / "code.txt").write_bytes(b"after \xff\n")
    (root / "notes.md").write_text("two\n")
    (root / "part" / "code.txt").write_text("changed\n")
    monkeypatch.chdir(root)
    monkeypatch.setenv("PATH", f".{os.pathsep}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(script))
    state = code_state(Path.cwd())
    assert state is not None and state.commit == commit and state.difference is not None
    assert (
        "-before\n+after \ufffd\n" in state.difference and "+two" in state.difference and "part" not in state.difference
    )
    assert not marker.exists(), marker.read_text()


def test_every_layout_of_a_repository(tmp_path: Path) -> None:
    first = repository(tmp_path / "plain")
    root = tmp_path / "plain"
    (root / "folder").mkdir()
    assert code_state(root / "folder") == (first, "")
    git(root, "pack-refs", "--all", "--prune")
    git(root, "gc", "-q")
    git(root, "update-index", "--split-index")
    (root / "code.txt").write_text("after\n")
    state = code_state(root)
    assert state is not None and state.commit == first and "+after" in str(state.difference)
    git(root, "worktree", "add", "-q", "-b", "other", "../linked")
    assert code_state(tmp_path / "linked") == (first, "")
    git(tmp_path / "linked", "submodule", "--quiet", "add", str(root), "part")
    assert code_state(tmp_path / "linked" / "part") == (first, "")
    os.mkfifo(root / ".git" / "sharedindex.0")  # a stale one is not copied
    assert code_state(root) == state
    long = repository(tmp_path / "long", "--object-format=sha256")
    assert len(long) == 64 and code_state(tmp_path / "long") == (long, "")
    (tmp_path / "empty").mkdir()
    git(tmp_path / "empty", "init", "-q")
    git(tmp_path, "init", "-q", "--bare", "bare")
    for name in ("empty", "bare", "nowhere"):
        assert code_state(tmp_path / name) is None
    for content in (b"", b"\0\xff", b"ref: refs/heads/main\n" * 9, b"ref: refs/../../x", b"gitdir: /", b"x" * 99_999):
        (tmp_path / "plain" / ".git" / "HEAD").write_bytes(content)
        assert code_state(root) is None
        (tmp_path / "linked" / ".git").write_bytes(content)
        assert code_state(tmp_path / "linked") is None
    for name in ("plain/.git/HEAD", "linked/.git"):
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
        assert code_state(tmp_path / name.partition("/")[0]) is None


def test_a_repository_shows_nothing_that_is_outside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    private, root = tmp_path / "private", tmp_path / "sent"
    theirs, ours = private / ".git", root / ".git"
    repository(private)
    repository(root)
    git(private, "commit", "-q", "--allow-empty", "-m", "second")  # or both could be the same commit
    secret = git(private, "rev-parse", "HEAD").strip()
    for name in ("../private/code.txt", f"{private}/code.txt", "private/.GIT/config", "folder//x", "./code.txt"):
        (root / ("x" * len(name))).write_text("x")
        git(root, "add", "-N", ".")
        kept = (ours / "index").read_bytes()
        index = kept.replace(b"x" * len(name), name.encode())[:-20]
        (ours / "index").write_bytes(index + hashlib.sha1(index).digest())
        assert code_state(root) == (git(root, "rev-parse", "HEAD").strip(), None), name
        (ours / "index").write_bytes(kept)
        git(root, "reset", "-q", "--hard")
    borrowed = {"objects": "", "objects/pack": "", "index": "", "commondir": str(theirs)}
    for name, text in {**borrowed, "objects/info/alternates": f"{theirs}/objects"}.items():
        shutil.rmtree(root)
        repository(root)
        (ours / "HEAD").write_text(secret)
        shutil.rmtree(ours / name) if (ours / name).is_dir() else (ours / name).unlink(missing_ok=True)
        (ours / name).write_text(text) if text else (ours / name).symlink_to(theirs / name)
        assert getattr(code_state(root), "difference", None) is None, name
    worktree = root / "evil" / "worktrees" / "x"  # names this work tree, but the objects of another
    worktree.mkdir(parents=True)
    for name, content in (("gitdir", f"{ours}\n"), ("commondir", f"{theirs}\n"), ("HEAD", secret)):
        (worktree / name).write_text(content)
    shutil.copy(theirs / "index", worktree / "index")
    shutil.rmtree(ours)
    for content in (f"gitdir: {theirs}", "gitdir: ../private/.git", f"gitdir: {worktree}"):
        ours.write_text(content)
        assert getattr(code_state(root), "difference", None) is None, content
    ours.unlink()
    ours.symlink_to(theirs)
    assert code_state(root) is None
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert code_state(private) is None


@pytest.mark.parametrize("body", ["sleep 60", "sleep 60 & exit 0", "while :; do echo junk; done", "exit 3", "kill $$"])
def test_a_git_that_is_slow_or_prints_junk(body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = repository(tmp_path / "repo")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(module, "_MOST_SECONDS", 0.3)
    monkeypatch.setattr(module, "_MOST_BYTES", 10_000)
    began = time.monotonic()
    assert code_state(tmp_path / "repo") == (commit, None)
    assert time.monotonic() - began < 5
