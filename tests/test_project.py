"""The project's rules, as tests. Each says how many things it looked at, so that none goes blind."""

import ast
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from source_trees import SOURCE, modules, nodes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"

# How much there must at least be to look at. These only go up.
LEAST_MODULES = 45
LEAST_CALLBACK_MODULES = 10
LEAST_TRAINER_ACCESSES = 45

MOST_LINES = 600


def read(module: str) -> str:
    return (SOURCE / module).read_text(encoding="utf-8")


def num_lines(module: str) -> int:
    return len(read(module).splitlines())


def imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [node.module]
    return []


def run_python(code: str, folder: Path, **variables: str) -> dict:
    """Run code in a fresh interpreter and return what it prints, which must be one JSON object."""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@cache
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def project() -> dict:
    return pyproject()["project"]


def heavy_packages() -> list[str]:
    """Return what must not come along with the Trainer, since it costs seconds or is an extra."""
    contracts = {contract["id"]: contract for contract in pyproject()["tool"]["importlinter"]["contracts"]}
    return [*contracts["light-core"]["forbidden_modules"], "accelerate", "tyro"]


@cache
def pins() -> dict[str, Requirement]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def test_no_module_is_longer_than_600_lines():
    lengths = {module: num_lines(module) for module in modules()}
    assert len(lengths) >= LEAST_MODULES
    assert {module: length for module, length in lengths.items() if length > MOST_LINES} == {}


# What must be the same before and after an import. Values are compared as text.
SNAPSHOT = """
import json, logging, os, random, signal, sys, threading, warnings
import numpy

def snapshot():
    loggers = [logging.getLogger(), *map(logging.getLogger, sorted(logging.root.manager.loggerDict))]
    state = {
        "random": random.getstate(),
        "numpy": numpy.random.get_state(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "log handlers": [(logger.name, logger.handlers) for logger in loggers if logger.handlers],
        "root log level": logging.getLogger().level,
        "warning filters": warnings.filters,
        "threads": [thread.name for thread in threading.enumerate()],
        "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "hooks": (sys.excepthook, sys.stdout, sys.stderr),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        state["torch"] = torch.get_rng_state().tolist()
        state["torch settings"] = (
            torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        )
    return {name: repr(value) for name, value in state.items()}
"""


def test_importing_loopwright_changes_nothing_and_imports_nothing(tmp_path):
    seen = run_python(
        SNAPSHOT
        + """
before, modules = snapshot(), set(sys.modules)
import loopwright
after = snapshot()
foreign = {name.partition(".")[0] for name in set(sys.modules) - modules} - set(sys.stdlib_module_names)
print(json.dumps({
    "compared": len(before),
    "changed": [name for name in before if before[name] != after[name]],
    "imported": sorted(foreign),
}))
""",
        tmp_path,
    )
    assert seen == {"compared": 10, "changed": [], "imported": ["loopwright"]}


def test_importing_the_trainer_changes_nothing_imports_no_heavy_package_and_takes_300_ms(tmp_path):
    heavy = heavy_packages()
    code = (
        SNAPSHOT
        + f"""
import time
import torch
already = [name for name in {heavy!r} if name in sys.modules]
before = snapshot()
start = time.process_time()
from loopwright import Trainer
seconds = time.process_time() - start
after = snapshot()
print(json.dumps({{
    "compared": len(before),
    "changed": [name for name in before if before[name] != after[name]],
    "heavy": [name for name in {heavy!r} if name in sys.modules and name not in already],
    "trainer": Trainer.__name__,
    "is_fast": seconds <= 0.3,
}}))
"""
    )
    assert len(heavy) >= 20
    expected = {"compared": 12, "changed": [], "heavy": [], "trainer": "Trainer", "is_fast": True}
    for _ in range(4):  # the first import may compile, which users pay for once; the machine may be busy
        seen = run_python(code, tmp_path, PYTHONDONTWRITEBYTECODE="")
        if seen == expected:
            break
    assert seen == expected


def test_the_trainer_works_without_posix_locks_and_a_lease_is_refused_by_name(tmp_path):
    seen = run_python(
        """
import json, os, sys
sys.modules["fcntl"] = None  # as on a system that has none
for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"):
    delattr(os, name)
import torch
from torch.utils.data import TensorDataset
from loopwright import Checkpointing, Trainer
from loopwright.run_folder import LeaseError

model, data = torch.nn.Linear(2, 1), TensorDataset(torch.ones(4, 2), torch.ones(4, 1))
trainer = Trainer(model, torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), 0.1), callbacks=())
updates = trainer.train(data, 1, per_device_batch_size=2).updates
try:
    trainer.train(data, 1, checkpoints=Checkpointing("run"))
except LeaseError as error:
    print(json.dumps({"updates": updates, "refused": "run cannot be locked" in str(error)}))
""",
        tmp_path,
    )
    assert seen == {"updates": 2, "refused": True}


def test_no_module_imports_through_the_lazy_package_root():
    looked_at, wrong = 0, []
    for place, node in nodes():
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "loopwright":
            looked_at += 1
            if node.module == "loopwright":
                submodules = {path.stem for path in SOURCE.iterdir()}
                wrong += [f"{place} {alias.name}" for alias in node.names if alias.name not in submodules]
    assert looked_at >= 100
    assert wrong == []


def test_the_package_runs_no_code_from_text_and_unpickles_nothing():
    runners = {"eval", "exec", "compile", "__import__"}
    unpicklers = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    writers = ("from pickle import Pickler", "from marshal import dumps")  # to compare objects, not to load them
    looked_at, wrong, loads = 0, [], []
    for place, node in nodes():
        looked_at += isinstance(node, ast.Call)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in runners:
            wrong.append(f"{place} {node.func.id}()")
        if isinstance(node, ast.ImportFrom) and ast.unparse(node) in writers:
            continue
        wrong += [f"{place} {name}" for name in imported_names(node) if name.partition(".")[0] in unpicklers]
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            wrong.append(f"{place} allow_pickle")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            loads.append(place)
            if "weights_only=True" not in map(ast.unparse, node.keywords):
                wrong.append(f"{place} torch.load without weights_only=True")
    assert len(modules()) >= LEAST_MODULES and looked_at >= 1500
    assert wrong == []
    assert len(loads) <= 1, f"one torch.load is enough: {loads}"


# Calls that open a file of a run folder past `open_regular`, by module; each opens something else.
OPENED_DIRECTLY = {
    "run_folder/files.py": 4,  # open_regular itself, and new files
    "run_folder/lease.py": 2,  # /proc
    "runs/console/json_events.py": 1,  # /dev/null
    "report/page.py": 1,  # templates
    "report/pictures.py": 1,  # bytes in memory
    "checkpoint/files.py": 1,  # a new file
    "checkpoint/store.py": 1,
    "metrics/paired.py": 1,  # bytes in memory
}


def test_the_files_of_a_run_folder_are_opened_in_one_place():
    names = {"open", "read_text", "read_bytes", "fromfile", "memmap"}
    found = Counter()
    for line, node in nodes():
        place = line.partition(":")[0]
        if place.split("/")[0] in ("run_folder", "runs", "report", "checkpoint") or place == "metrics/paired.py":
            function = getattr(node, "func", None)
            is_open = (getattr(function, "attr", None) or getattr(function, "id", None)) in names
            if is_open and ast.unparse(function) != "read_bytes" or function and ast.unparse(function) == "np.load":
                found[place] += 1
    assert found == OPENED_DIRECTLY


def test_nothing_in_the_package_is_left_unfinished():
    marks = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    assert marks.search("raise NotImplementedError")
    found = [
        f"{module}:{number} {match.group()}"
        for module in modules()
        for number, line in enumerate(read(module).splitlines(), start=1)
        if (match := marks.search(line))
    ]
    assert len(modules()) >= LEAST_MODULES
    assert found == []


def trainer_accesses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) for `trainer.name`, `x.trainer.name` and `getattr(trainer, "name")`."""

    def is_trainer(node: ast.AST) -> bool:
        return getattr(node, "id", getattr(node, "attr", "")) in {"trainer", "_trainer"}

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_trainer(node.value):
            yield node.lineno, node.attr
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in {"getattr", "setattr", "hasattr", "delattr"}
            and len(node.args) >= 2
            and is_trainer(node.args[0])
            and isinstance(node.args[1], ast.Constant)
        ):
            yield node.lineno, str(node.args[1].value)


def test_callbacks_use_only_what_is_public_of_the_trainer():
    example = ast.parse("trainer.a; self.trainer._b; trainer._c(); getattr(trainer, '_d'); x._e; trainer.f._g")
    assert sorted(name for _, name in trainer_accesses(example)) == ["_b", "_c", "_d", "a", "f"]

    callbacks = {name: tree for name, tree in modules().items() if name.startswith("callbacks/")}
    accesses = [
        (f"{module}:{line}", name) for module, tree in callbacks.items() for line, name in trainer_accesses(tree)
    ]
    assert len(callbacks) >= LEAST_CALLBACK_MODULES
    assert len(accesses) >= LEAST_TRAINER_ACCESSES
    assert [access for access in accesses if access[1].startswith("_")] == []


def test_the_version_is_told_once():
    import loopwright

    assert loopwright.__version__ == project()["version"]


def test_the_tested_versions_are_pinned_exactly():
    assert str(pins()["torch"].specifier) == "==2.13.0"
    assert len(pins()) >= 50
    loose = [
        str(pin)
        for pin in pins().values()
        if [specifier.operator for specifier in pin.specifier] != ["=="] or "+" in str(pin.specifier)
    ]
    assert loose == []


@pytest.mark.parametrize("group", ["dependencies", "dev", "bench", "docs"])
def test_each_requirement_is_pinned_to_a_version_that_it_allows(group):
    stated = {"dependencies": project()["dependencies"], **project()["optional-dependencies"]}[group]
    requirements = [
        requirement
        for requirement in map(Requirement, stated)
        if requirement.marker is None or requirement.marker.evaluate({"python_version": "3.11"})
    ]
    assert len(requirements) >= {"dependencies": 9, "dev": 20, "bench": 3, "docs": 2}[group]
    for requirement in requirements:
        pin = pins().get(canonicalize_name(requirement.name))
        assert pin is not None, f"constraints.txt has no pin for {requirement.name}"
        version = str(pin.specifier).removeprefix("==")
        assert requirement.specifier.contains(version), f"{requirement} does not allow {version}"


def test_every_install_in_the_makefile_keeps_to_the_pins():
    recipes = (ROOT / "Makefile").read_text(encoding="utf-8")
    installs = [line for line in recipes.splitlines() if "pip install" in line]
    assert len(installs) == 1 and "-c constraints.txt" in installs[0]
    assert recipes.count('$(INSTALL) "$(TORCH)"') == 3
    assert recipes.count("$(INSTALL)") - recipes.count("$(INSTALL) --no-deps") == 3, "else torch may come along"
    assert f"TORCH := torch{pins()['torch'].specifier}" in recipes
    assert '"$(TORCH)" -e . pillow scikit-learn' in recipes and "$(BIN)/lw demo image-classification" in recipes
    assert " -q" not in installs[0], "minutes of silence"


def test_a_test_without_an_assertion_is_not_collected(tmp_path):
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "test_hollow.py").write_text(
        "def test_that_looks_busy():\n    total = 1 + 1\n\n\ndef test_that_checks():\n    assert 1 + 1 == 2\n"
    )
    (tmp_path / "test_sound.py").write_text(
        "import pytest\n\n\ndef test_raises():\n    with pytest.raises(ZeroDivisionError):\n        1 / 0\n"
        "\n\ndef test_by_helper():\n    check_nothing()\n\n\ndef check_nothing():\n    pass\n"
    )
    if (child := os.fork()) == 0:  # it has torch already
        with open(tmp_path / "said", "w") as said, contextlib.redirect_stdout(said):
            words = ["--continue-on-collection-errors", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir"]
            code = pytest.main([*words, str(tmp_path), str(tmp_path)])
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    said = (tmp_path / "said").read_text()
    assert "no assertion in test_that_looks_busy (line 1)" in said and "2 passed, 1 error" in said


def test_a_warning_fails_a_test():
    with pytest.raises(UserWarning, match="loud"):
        warnings.warn("loud", stacklevel=1)


def test_the_changelog_has_this_version_and_entries_of_one_line():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[([\d.]+)\] - \d{4}-\d\d-\d\d$", text, re.MULTILINE)[0] == project()["version"]
    entries = re.findall(r"^- .*(?:\n +\S.*)*", text, re.MULTILINE)
    assert len(entries) >= 40
    assert [entry for entry in entries if "\n" in entry or len(entry) > 140] == []
