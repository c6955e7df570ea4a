"""Python objects named by a flag: "package.module:function"."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from loopwright.errors import InputError, nearest
from loopwright.tasks.consent import check_code


def is_object_name(name: str) -> bool:
    """Whether a value has the form "package.module:function"."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def import_object(name: str, flag: str, args: Any) -> Any:
    """Import "package.module:function" if the user allows it; modules in the current folder are found too."""
    if not is_object_name(name := str(name)):  # a file may have anything here
        saw = ["a function is named as package.module:function"]
        raise InputError("args.value", f"--{flag} {name} names no function", saw=saw, fix=f"leave out --{flag}")
    module_name, _, attribute = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        check_code(name, flag, args)
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise InputError(
            "args.value",
            f"--{flag} {name}: the module {module_name} cannot be imported",
            saw=[str(error), f"looked in {here} and in the installed packages"],
            fix=f"put {module_name} into this folder   or   leave out --{flag}",
        ) from error
    finally:
        sys.path.remove(here)
    if not hasattr(module, attribute):
        near = nearest(attribute, dir(module))
        what = f"--{flag} {name}: {module_name} has no {attribute}"
        fix = f"--{flag} {module_name}:{near}" if near else f"define {attribute} in {module.__file__}"
        raise InputError("args.value", what, saw=[f"it is {module.__file__}"], fix=fix)
    return getattr(module, attribute)
