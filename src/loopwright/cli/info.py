"""The verbs that explain: `tasks`, `explain`, `doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

from loopwright.api import CODES, counted, create_parser, get_task, load_tasks
from loopwright.cli.exit_codes import CANNOT_WRITE, DONE, INPUT
from loopwright.cli.help_text import hanging
from loopwright.cli.json_output import print_line, print_objects
from loopwright.cli.parser import VerbParser, add_json
from loopwright.run_folder import runs_root

_FOR_DEVELOPERS = ("all", "docs", "clients", "bench", "dev")  # extras
_FONTS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.fonts", "/Library/Fonts", "/System/Library/Fonts")
_LEAST_FREE = 1e9  # bytes: a small run with its checkpoints


def tasks(argv: list[str]) -> int:
    parser = VerbParser("tasks", "List the tasks.", "")
    add_json(parser)
    is_json = parser.parse_args(argv).json
    found, errors = load_tasks()
    if is_json:
        print_objects(*({"task": task.name, "summary": task.summary} for task in found))
    else:
        for task in found:
            print_line(hanging(f"  {task.name:<22} ", task.summary))
    for error in errors:
        sys.stderr.write(f"warning: {error.what}\n")
    return DONE


def explain(argv: list[str]) -> int:
    if argv and argv[0] == "errors":
        for code, text in sorted(CODES.items()):
            print_line(hanging(f"  {code:<24} ", text))
        return DONE
    if not argv or argv[0] in ("-h", "--help"):
        print_line("usage: lw explain TASK   |   lw explain errors")
        tasks([])
        return DONE if argv else INPUT
    task = get_task(argv[0])
    print_line(f"{task.name}: {task.summary}\n")
    for topic, text in task.explanation.items():
        print_line(hanging(f"  {topic:<9} ", text))
    if task.pretrained:
        text = f"--model {task.pretrained} starts from a small pretrained one ({task.pretrained_megabytes} MB)."
        print_line(hanging(f"  {'start':<9} ", text))
    print_line(f"\n  example: {task.example}\n")
    print_line(create_parser(task).format_help())
    return DONE


def doctor(argv: list[str]) -> int:
    parser = VerbParser("doctor", "Show what is installed, and the hardware of this machine.", "")
    add_json(parser)
    asked = parser.parse_args(argv)
    found = _machine()
    if asked.json:
        print_objects(found)
        return DONE
    print_line(f"python      {found['python']} on {found['platform']}")
    for name, version in found["versions"].items():
        print_line(f"{name:<11} {version or 'not installed'}")
    print_line(f"devices     {', '.join(found['gpus']) or ('MPS' if found['mps'] else 'no GPU: fine for every demo')}")
    if found["gpus"]:
        print_line(f"CUDA        {found['cuda'] or 'none'} in torch, driver {found['driver']}")
    cores, threads = found["cores"], found["threads"]
    print_line(f"CPUs        {counted(cores, 'core')} for this process, {counted(threads, 'thread')} in torch")
    is_full = found["free_bytes"] < _LEAST_FREE
    free = f"{found['free_bytes'] / 1e9:.1f} GB free here"
    print_line(f"disk        {free}{': too little for most runs' if is_full else ''}")
    where = "writable" if found["is_writable"] else "not writable: set LOOPWRIGHT_RUNS to another folder"
    print_line(f"runs        {found['runs']} ({where})")
    print_line(f"network     {'off (HF_HUB_OFFLINE)' if found['is_offline'] else 'used only where a Hub id is given'}")
    print_line(f"Hub cache   {found['cache']} ({counted(found['cached'], 'model')})")
    print_line(f"fonts       {counted(found['fonts'], 'file')} for labels in pictures")
    for extra, missing in found["missing"].items():
        state = f"missing: {', '.join(missing)}   pip install 'loopwright[{extra}]'" if missing else "ok"
        print_line(f"[{extra}]{' ' * (10 - len(extra))}{state}")
    return CANNOT_WRITE if is_full or not found["is_writable"] else DONE


def _machine() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME", "~/.cache/huggingface"), "hub"))
    cache, root = cache.expanduser(), runs_root().absolute()
    above = next(place for place in (root, *root.parents) if place.exists())
    fonts = (path for folder in _FONTS for path in Path(folder).expanduser().rglob("*.[to]t[fc]"))
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in ("loopwright", "torch", "accelerate", "numpy")},
        "gpus": gpus,
        "mps": torch.backends.mps.is_available(),
        "runs": str(root),
        "is_writable": above.is_dir() and os.access(above, os.W_OK),
        "cache": str(cache),
        "cached": len(list(cache.glob("models--*"))),
        "fonts": sum(1 for _ in fonts),
        "cuda": torch.version.cuda if gpus else None,
        "driver": _driver() if gpus else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "free_bytes": shutil.disk_usage(Path.cwd()).free,
        "is_offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
        "missing": {
            extra: [name for name in packages if _version(name) is None] for extra, packages in _extras().items()
        },
    }


def _extras() -> dict[str, list[str]]:
    """Return the packages of each extra for users, as the installed metadata lists them."""
    found: dict[str, list[str]] = {}
    for line in (importlib.metadata.requires("loopwright") or ()) if _version("loopwright") else ():
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)", line)
        if name is not None and extra is not None and extra[1] not in _FOR_DEVELOPERS:
            found.setdefault(extra[1], []).append(name[0])
    return found


def _driver() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").split()
    except OSError:
        return "unknown"
    return next((word for word in words if word.replace(".", "").isdigit() and "." in word), "unknown")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
