"""The commit of the user's code and its uncommitted changes; nothing that a repository can configure is run.

Names are resolved by reading files of `.git`. Only the difference needs git. It runs with a folder of our own in place
of `.git`: no configuration, hooks or attributes, a copy of the index, and the repository's objects, which are data.
A repository must not show what is outside it: its folders are those of this user and no links, it borrows no objects,
and the names in its index stay inside the work tree.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from loopwright.run_folder.files import read_bytes

_MOST_SECONDS = 10.0
_MOST_BYTES = 4_000_000  # of a difference
_MOST_REFS_BYTES = 16_000_000
_MOST_INDEX_BYTES = 64_000_000
_HASH = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_OUTSIDE = re.compile(rb"(?i)(?:\A|[\0/])(?:\.{0,2}|\.git)(?=[\0/])")  # in names that end in a null byte
_CONFIG = "[core]\nrepositoryformatversion = 1\nbare = false\nbigFileThreshold = 8m\n"
_read = functools.partial(read_bytes, most_bytes=65_536)
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all", "HEAD", "--")


class CodeState(NamedTuple):
    """A commit, and the uncommitted changes as a diff."""

    commit: str
    difference: str | None  # None if git has no answer


def code_state(place: Path) -> CodeState | None:
    """Return the state of the repository that a folder is in; None if there is none of this user, or no commit."""
    try:
        root = next(each for each in (place, *place.parents) if os.path.lexists(each / ".git"))
        git_dir, common = _git_folders(root)
        commit = _commit(git_dir, common)
    except (StopIteration, OSError, ValueError):  # ValueError: a name with a null byte, or a damaged file
        return None
    if commit is None:
        return None
    with tempfile.TemporaryDirectory(prefix="loopwright-git-") as own, contextlib.suppress(OSError, ValueError):
        difference = _difference(root, git_dir, common, commit, Path(own))
        return CodeState(commit, None if difference is None else difference.decode(errors="replace"))
    return CodeState(commit, None)


def _git_folders(root: Path) -> tuple[Path, Path]:
    """Return the git folder of a work tree, and the one with its objects; an OSError if they are not those of it."""
    named = git_dir = common = root / ".git"
    if named.is_file():  # a linked worktree or a submodule: its git folder names the work tree
        git_dir = common = (root / os.fsdecode(_read(named).removeprefix(b"gitdir:").strip())).resolve()
        if git_dir.parent.name == "worktrees":
            common, back = git_dir.parent.parent, os.fsdecode(_read(git_dir / "gitdir").strip())
        else:
            trees = re.findall(rb"(?m)^\s{0,9}worktree = (.+)$", _read(git_dir / "config"))
            back = os.path.join(os.fsdecode(trees[-1]), ".git") if trees else ""
        git_dir = git_dir if (git_dir / back).resolve() == named.resolve() else Path(os.devnull)
    for folder in (root, named, git_dir, common):
        if os.lstat(folder).st_uid != os.geteuid() or (folder != root and folder.is_symlink()):
            raise OSError(f"{folder} belongs to somebody else, or is a link")
    return git_dir, common


def _commit(git_dir: Path, common: Path) -> str | None:
    """Return the hash that HEAD stands for; None without a commit, or if the refs have another format."""
    content = _read(git_dir / "HEAD").strip()
    for _ in range(5):  # symbolic refs may follow one another
        if not content.startswith(b"ref: refs/"):
            return content.decode() if _HASH.fullmatch(content) else None
        name = content.removeprefix(b"ref: ")
        places = [folder / os.fsdecode(name) for folder in (git_dir, common) if b".." not in name]
        loose = next((file for file in places if file.is_file()), None)
        if loose is None:
            packed = _read(common / "packed-refs", most_bytes=_MOST_REFS_BYTES)
            found = re.search(rb"(?m)^([0-9a-f]{40,64}) %b$" % re.escape(name), packed)
        content = _read(loose).strip() if loose is not None else found[1] if found else b""
    return None


def _difference(root: Path, git_dir: Path, common: Path, commit: str, own: Path) -> bytes | None:
    # A relative entry of PATH would let a repository bring its own git.
    path = os.pathsep.join(each for each in os.get_exec_path() if os.path.isabs(each))
    git, objects = shutil.which("git", path=path), common.absolute() / "objects"
    entries = (entry for pattern in ("*", "pack/*", "info/*") for entry in objects.glob(pattern))
    borrows = objects.is_symlink() or any(entry.is_symlink() or entry.name == "alternates" for entry in entries)
    if git is None or borrows:
        return None
    (own / "config").write_text(_CONFIG + ("[extensions]\nobjectFormat = sha256\n" if len(commit) == 64 else ""))
    (own / "HEAD").write_text(f"{commit}\n")
    (own / "refs").mkdir()
    _copy_index(git_dir, own, len(commit) // 2)
    environment = {
        **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
        **dict.fromkeys(("GIT_CONFIG_NOSYSTEM", "GIT_ATTR_NOSYSTEM", "GIT_NO_LAZY_FETCH"), "1"),
        **dict.fromkeys(("GIT_OPTIONAL_LOCKS", "GIT_TERMINAL_PROMPT"), "0"),
        **{"PATH": path, "HOME": str(own), "LC_ALL": "C", "GIT_OBJECT_DIRECTORY": str(objects)},
    }
    start = [git, "--no-pager", f"--git-dir={own}", f"--work-tree={root.absolute()}"]
    names = _output([*start, "ls-files", "-z"], own, environment, _MOST_INDEX_BYTES)
    if names is None or _OUTSIDE.search(names):
        return None
    return _output([*start, *_DIFF], root, environment, _MOST_BYTES)


def _copy_index(git_dir: Path, own: Path, num_bytes: int) -> None:
    """Copy the index and, if it is split, the shared one whose hash it has in its extension "link"."""
    index = _read(git_dir / "index", most_bytes=_MOST_INDEX_BYTES)
    (own / "index").write_bytes(index)
    places = itertools.islice(re.finditer(rb"(?s)link\0.{3}(.{%d})" % num_bytes, index), 100)
    files = (git_dir / f"sharedindex.{place[1].hex()}" for place in places)
    for file in itertools.islice(filter(Path.exists, files), 1):
        (own / file.name).write_bytes(_read(file, most_bytes=_MOST_INDEX_BYTES))


def _output(command: list[str], place: Path, environment: dict[str, str], most: int) -> bytes | None:
    """Return the output of a command; None if it fails, is slow or prints too much. It and its children are ended."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    output, deadline = bytearray(), time.monotonic() + _MOST_SECONDS
    with subprocess.Popen(command, cwd=place, env=environment, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        try:
            while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                part = os.read(process.stdout.fileno(), 65_536)
                output += part
                if not part:
                    return bytes(output) if process.wait(max(0.1, deadline - time.monotonic())) == 0 else None
                if len(output) > most:
                    break
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    return None
