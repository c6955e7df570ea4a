"""The commit of the user's code and its uncommitted changes; nothing that a repository can configure is run.

Names are resolved by reading files of `.git`. Only the difference needs git. It runs with a folder of our own in place
of `.git`: no configuration, hooks or attributes, a copy of the index, and the repository's objects, which are data.
"""

from __future__ import annotations

import contextlib
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

from loopwright.run_folder.files import open_regular

_MOST_SECONDS = 10.0
_MOST_BYTES = 4_000_000  # of a difference
_MOST_INDEX_BYTES = 256_000_000
_HASH = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_CONFIG = "[core]\nrepositoryformatversion = 1\nbare = false\nbigFileThreshold = 8m\n"
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all", "HEAD", "--")


class CodeState(NamedTuple):
    """A commit, and the uncommitted changes as a diff."""

    commit: str
    difference: str | None  # None if git has no answer


def code_state(place: Path) -> CodeState | None:
    """Return the state of the repository that a folder is in; None if there is none, or no commit in it."""
    try:
        root = next(each for each in (place, *place.parents) if os.path.lexists(each / ".git"))
        git_dir = common = root / ".git"
        if not git_dir.is_dir():  # a linked worktree or a submodule
            git_dir = common = root / os.fsdecode(_read(git_dir).removeprefix(b"gitdir:").strip())
        if (git_dir / "commondir").exists():
            common = git_dir / os.fsdecode(_read(git_dir / "commondir").strip())
        commit = _commit(git_dir, common)
    except (StopIteration, OSError, ValueError):  # ValueError: a name with a null byte
        return None
    if commit is None:
        return None
    with tempfile.TemporaryDirectory(prefix="loopwright-git-") as own, contextlib.suppress(OSError, ValueError):
        difference = _difference(root, git_dir, common, commit, Path(own))
        return CodeState(commit, None if difference is None else difference.decode(errors="replace"))
    return CodeState(commit, None)


def _commit(git_dir: Path, common: Path) -> str | None:
    """Return the hash that HEAD stands for; None without a commit, or if the refs have another format."""
    content = _read(git_dir / "HEAD").strip()
    for _ in range(5):  # symbolic refs may follow one another
        if not content.startswith(b"ref: refs/"):
            return content.decode() if _HASH.fullmatch(content) else None
        name = content.removeprefix(b"ref: ")
        places = [folder / os.fsdecode(name) for folder in (git_dir, common) if b".." not in name]
        loose = next((file for file in places if file.is_file()), None)
        packed = _read(common / "packed-refs", _MOST_INDEX_BYTES) if (common / "packed-refs").exists() else b""
        found = dict(line.split(b" ", 1)[::-1] for line in packed.splitlines() if b" " in line)
        content = _read(loose).strip() if loose is not None else found.get(name, b"")
    return None


def _read(path: Path, most: int = 65_536) -> bytes:
    """Return a regular file of at most this many bytes; an OSError or ValueError for anything else."""
    with os.fdopen(open_regular(path, follows_links=True), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(f"{path} has more than {most} bytes")
    return content


def _difference(root: Path, git_dir: Path, common: Path, commit: str, own: Path) -> bytes | None:
    # A relative entry of PATH would let a repository bring its own git.
    path = os.pathsep.join(each for each in os.get_exec_path() if os.path.isabs(each))
    git = shutil.which("git", path=path)
    if git is None:
        return None
    is_long = len(commit) == 64
    (own / "config").write_text(_CONFIG + ("[extensions]\nobjectFormat = sha256\n" if is_long else ""))
    (own / "HEAD").write_text(f"{commit}\n")
    (own / "refs").mkdir()
    for file in [git_dir / "index", *git_dir.glob("sharedindex.*")]:
        (own / file.name).write_bytes(_read(file, _MOST_INDEX_BYTES))
    environment = {
        **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
        **dict.fromkeys(("GIT_CONFIG_NOSYSTEM", "GIT_ATTR_NOSYSTEM", "GIT_NO_LAZY_FETCH"), "1"),
        **dict.fromkeys(("GIT_OPTIONAL_LOCKS", "GIT_TERMINAL_PROMPT"), "0"),
        **{"PATH": path, "HOME": str(own), "LC_ALL": "C", "GIT_OBJECT_DIRECTORY": str((common / "objects").absolute())},
    }
    return _output([git, "--no-pager", f"--git-dir={own}", f"--work-tree={root.absolute()}", *_DIFF], root, environment)


def _output(command: list[str], place: Path, environment: dict[str, str]) -> bytes | None:
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
                if len(output) > _MOST_BYTES:
                    break
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    return None
