"""The documentation of the running Python's own standard library, read from its sources.

The files are parsed, never imported, so that `python -OO`, missing system libraries and side effects of imports do not
matter. Only modules that every Python from 3.10 to 3.13 has are read; one that is missing here is skipped. The texts
are under the licence of Python (PSF), and already on the machine.

Parsing takes some seconds of one core. `load` caches the result in the user's cache folder, keyed by Python's version
and the contents of the sources; a damaged cache file is rebuilt. Set `LOOPWRIGHT_NO_CACHE` to any text to disable it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import logging
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from loopwright.demos.demo_data import DemoData, Row
from loopwright.errors import DataError
from loopwright.run_folder import write_atomically

LICENCE = "Python Software Foundation License Version 2 (documentation of the Python standard library)"
NO_CACHE_VARIABLE = "LOOPWRIGHT_NO_CACHE"

# In each of 3.10, 3.11, 3.12 and 3.13; without separately packaged modules (tkinter, idlelib), tests and tables.
_MODULES = """
_collections_abc _compression _markupbase _py_abc _pydatetime _pydecimal _pyio _strptime _threading_local _weakrefset
abc argparse ast asyncio base64 bdb bisect bz2 calendar cmd code codecs codeop collections colorsys compileall
concurrent configparser contextlib copy copyreg csv ctypes curses dataclasses datetime dbm decimal difflib dis doctest
email enum filecmp fileinput fnmatch fractions ftplib functools genericpath getopt getpass gettext glob graphlib gzip
hashlib heapq hmac html http imaplib importlib inspect io ipaddress json keyword linecache locale logging lzma mailbox
mimetypes modulefinder multiprocessing netrc ntpath numbers opcode operator optparse os pathlib pdb pickle pickletools
pkgutil platform plistlib poplib posixpath pprint profile pstats pty py_compile pyclbr pydoc queue quopri random re
reprlib rlcompleter runpy sched secrets selectors shelve shlex shutil signal site smtplib socket socketserver sqlite3
ssl stat statistics string stringprep struct subprocess symtable sysconfig tabnanny tarfile tempfile textwrap
threading timeit token tokenize trace traceback tracemalloc tty turtle types typing unittest urllib uuid venv warnings
wave weakref webbrowser wsgiref xml xmlrpc zipapp zipfile zipimport zoneinfo
"""
# The public name of modules whose Python source has another name (in some versions).
_PUBLIC_NAMES = {"_pydatetime": "datetime", "_pydecimal": "decimal", "_pyio": "io", "_strptime": "time"}
_SKIPPED_FOLDERS = {"__pycache__", "test", "tests"}
_TOPICS = Path("pydoc_data", "topics.py")

# Increased whenever the same sources would give other docs, to invalidate older caches.
_FORMAT = 1
_LEAST_TEXTS = 1000

# Characters that some readers treat as the end of a line, a field or a file.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_logger = logging.getLogger("loopwright")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function, and the source text of its default value, if any."""

    name: str
    default: str | None


@dataclass(frozen=True)
class Doc:
    """One docstring, its location and its subject. Functions with a default value need no docstring."""

    module: str  # its public name: "email.message"
    name: str  # inside the module: "Message.get_payload"; empty for the module itself
    kind: Literal["module", "class", "function"]
    parameters: tuple[Parameter, ...]  # without `self`, `cls`, `*args` and `**kwargs`
    text: str  # without indentation, outer blank lines and control characters; may be empty

    @property
    def short_name(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def signature(self) -> str:
        """Return name and parameters in the form of a call: "get_payload(i=None, decode=False)"."""
        parts = [part.name if part.default is None else f"{part.name}={part.default}" for part in self.parameters]
        return f"{self.short_name}({', '.join(parts)})"


@dataclass(frozen=True)
class StdlibDocs:
    """All docs in the order of modules and lines, and the pages of `help()` by their names."""

    docs: tuple[Doc, ...]
    topics: dict[str, str]  # the pages of the language reference that `help("topics")` lists
    python: str
    sources: str  # a fingerprint of the source files


def demo(task: str, make: Callable[[StdlibDocs], tuple[list[Row], list[Row]]], kind: str) -> DemoData:
    found = load()
    source = f"docstrings and help() pages of the standard library of Python {found.python}"
    return DemoData(task, *make(found), source, LICENCE, kind)


def load() -> StdlibDocs:
    """Return the docs of the running Python; raise a DataError if it has no sources of its standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    home = cache_folder()
    if home is None:
        return read_sources(folder)
    sources = fingerprint_sources(folder)
    version = platform.python_version()
    path = home / f"stdlib-docs-{version}-{sources[:16]}.jsonl"
    found = _read_cache(path, version, sources)
    if found is None:
        found = read_sources(folder)
        _write_cache(path, found)
    return found


def cache_folder() -> Path | None:
    """Return `loopwright` under `$XDG_CACHE_HOME` or `~/.cache`; None if caching is disabled or there is no home."""
    if os.environ.get(NO_CACHE_VARIABLE):
        return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore a relative path.
    if os.path.isabs(base):
        return Path(base) / "loopwright"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "loopwright" if os.path.isabs(home) else None


def read_sources(folder: str | Path) -> StdlibDocs:
    """Parse the sources of a standard library folder, without a cache; raise a DataError if it has hardly any."""
    root = Path(folder)
    docs: list[Doc] = []
    with warnings.catch_warnings():
        # About escapes in foreign files.
        warnings.simplefilter("ignore")
        for path, module in _sources(root):
            tree = ast.parse(path.read_bytes())
            if text := _docstring(tree):
                docs.append(Doc(module, "", "module", (), text))
            docs += _docs_of_body(module, "", tree)
        topics = _read_topics(root)
    num_texts = sum(bool(doc.text) for doc in docs)
    if num_texts < _LEAST_TEXTS:
        raise _no_sources(root, num_texts)
    return StdlibDocs(tuple(docs), topics, platform.python_version(), fingerprint_sources(root))


def fingerprint_sources(folder: str | Path) -> str:
    """Return a digest of all files that `read_sources` reads, and of its version; raise a DataError without sources."""
    root = Path(folder)
    digest = hashlib.sha256(f"format {_FORMAT}\n".encode())
    paths = [path for path, _ in _sources(root)]
    if not paths:
        raise _no_sources(root, 0)
    for path in [*paths, root / _TOPICS]:
        if path.exists():
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            digest.update(f"{path.relative_to(root).as_posix()} {content}\n".encode())
    return digest.hexdigest()


def _no_sources(root: Path, num_texts: int) -> DataError:
    return DataError(
        f"this Python has no sources of its standard library to take demo data from: {num_texts} docstrings found "
        f"under {root}. It may keep its library in a zip file, or as bytecode only. Use a Python from python.org, from "
        "your system's packages or from conda, or train on data of your own."
    )


def _sources(root: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files to read and their modules' public names, in the same order on every machine."""
    for top in _MODULES.split():
        package = root / top
        if package.is_dir():
            files = sorted(package.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix())
        else:
            files = [path for path in [root / f"{top}.py"] if path.is_file()]
        for path in files:
            parts = path.relative_to(root).with_suffix("").parts
            if not _SKIPPED_FOLDERS.intersection(parts):
                names = parts[:-1] if parts[-1] == "__init__" else parts
                yield path, ".".join([_PUBLIC_NAMES.get(names[0], names[0]), *names[1:]])


def _docs_of_body(module: str, prefix: str, owner: ast.AST) -> Iterator[Doc]:
    """Yield the docs of the classes and functions of a body, including those under `if` and `try`."""
    for node in ast.iter_child_nodes(owner):
        if isinstance(node, ast.ClassDef):
            name = f"{prefix}{node.name}"
            if text := _docstring(node):
                yield Doc(module, name, "class", (), text)
            yield from _docs_of_body(module, f"{name}.", node)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            text, parameters = _docstring(node), _parameters(node, is_method=bool(prefix))
            if text or any(part.default is not None for part in parameters):
                yield Doc(module, f"{prefix}{node.name}", "function", parameters, text)
        elif isinstance(node, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _docs_of_body(module, prefix, node)


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    return _CONTROLS.sub(" ", ast.get_docstring(node) or "").strip()


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef, is_method: bool) -> tuple[Parameter, ...]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults = [*missing, *arguments.defaults, *arguments.kw_defaults]
    found = [
        Parameter(argument.arg, None if default is None else ast.unparse(default))
        for argument, default in zip([*positional, *arguments.kwonlyargs], defaults, strict=True)
    ]
    is_static = any(isinstance(mark, ast.Name) and mark.id == "staticmethod" for mark in function.decorator_list)
    return tuple(found[1:] if is_method and positional and not is_static else found)


def _read_topics(root: Path) -> dict[str, str]:
    path = root / _TOPICS
    if not path.is_file():
        return {}
    for node in ast.parse(path.read_bytes()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            pages = ast.literal_eval(node.value)
            return {str(name): _CONTROLS.sub(" ", str(pages[name])).strip() for name in sorted(pages)}
    return {}


# The first line of a cache file is an object with the digest of the rest: the topics, then one doc per line.
def _write_cache(path: Path, found: StdlibDocs) -> None:
    lines = [found.topics, *(asdict(doc) for doc in found.docs)]
    body = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    digest = hashlib.sha256(body).hexdigest()
    head = {"python": found.python, "sources": found.sources, "licence": LICENCE, "sha256": digest}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(head).encode() + b"\n" + body)
    except OSError as error:
        text = "The docs of the standard library are parsed again each time: %s cannot be written (%s)."
        _logger.warning(text, path, error)


def _read_cache(path: Path, version: str, sources: str) -> StdlibDocs | None:
    try:
        first, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    try:
        head = json.loads(first)
        expected = {"python": version, "sources": sources, "sha256": hashlib.sha256(body).hexdigest()}
        if not isinstance(head, dict) or any(head.get(name) != value for name, value in expected.items()):
            raise ValueError("its first line does not belong to the rest")
        topics, *docs = [json.loads(line) for line in body.decode().splitlines()]
        for doc in docs:
            doc["parameters"] = tuple(Parameter(**part) for part in doc["parameters"])
        return StdlibDocs(tuple(Doc(**doc) for doc in docs), topics, version, sources)
    except (ValueError, KeyError, TypeError) as error:
        _logger.warning("The cache file %s is damaged (%s) and is made again.", path, error)
        return None
