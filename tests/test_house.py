"""The shape of the package, as tests: the loop, stack depth, classes, private names, imports and sizes.

Each test says how many things it looked at. Limits hold today's values and only ever go down; an exception that is no
longer needed must be deleted.
"""

import ast
import importlib
import pkgutil
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import loopwright
from hf.tiny import HF_CONTRACT, Classifier
from hf.tiny import rows as labelled_rows
from loopwright import collisions, hf
from loopwright.cli import main
from source_trees import SOURCE, modules
from tasks.reviews import rows, write_csv

# ----------------------------------------------------------------------------- limits that depend on line counts

MOST_LOOP_LINES = 59
MOST_BODY_LINES = 60

# Lines per package; "core" holds the modules at the top level. These only go down.
MOST_LINES = {
    "baselines": 413,
    "callbacks": 2318,
    "checkpoint": 3071,
    "cli": 2166,
    "config": 2682,
    "core": 3497,
    "data": 6825,
    "demos": 1525,
    "engine": 3455,
    "hf": 4843,
    "metrics": 4298,
    "models": 777,
    "report": 3374,
    "run_folder": 1649,
    "runs": 6169,
    "schedulers": 1266,
    "sources": 8671,
    "stepping": 1525,
    "tasks": 11478,
    "tracking": 546,
    "training": 3041,
}

# Lines of the packages that any training run needs, and of the tests.
# docs/decisions/0017-lines-of-state-that-nobody-registered.md, 0018-libraries-over-transformers.md,
# 0019-the-first-hour.md, 0020-graphs-for-any-batch.md, 0021-language-models.md, 0022-rows-without-padding.md,
# 0023-augmentation-on-the-device.md, 0024-compiled-parts.md, 0025-lines-of-what-trials-found.md,
# 0026-reading-ahead.md
MOST_CORE_LINES = 22_141
MOST_TEST_LINES = 68_563
CORE_FOLDERS = {"core", "training", "stepping", "checkpoint", "engine"}
CORE_FOLDERS |= {"callbacks", "run_folder", "schedulers", "tracking"}
CORE_OF_DATA = ("order", "loader", "samples", "workers", "prefetch", "streams", "defaults", "collate")

# Functions whose body is longer than MOST_BODY_LINES, with its length.
LONG_BODIES: dict[str, int] = {}

# ------------------------------------------------------------------------------------------------- other limits

MOST_FRAMES_OF_CORE = 8
MOST_FRAMES_OF_HF = 12
MOST_FRAMES_OF_LW_TRAIN = 14

MOST_PRIVATE_METHODS = 13
MOST_METHODS = 38
CLASSES_WITH_MORE_METHODS = {"trainer.py:Trainer", "hooks.py:TrainerHooks", "hf/trainer.py:Trainer"}

MOST_FILES = 26
FULL_FOLDERS: dict[str, int] = {}  # "." is the top level

MOST_GERUNDS = 3

# First-level packages and modules that `cli` imports, at import time or later.
CLI_IMPORTS = {"api", "checkpoint", "config", "errors", "report", "run_folder"}

# How much there must at least be to look at. These only go up.
LEAST_MODULES = 300
LEAST_CLASSES = 500
LEAST_CLASSES_WITH_FOREIGN_BASES = 30
LEAST_FUNCTIONS = 4000
LEAST_PRIVATE_NAMES = 1500
LEAST_PRIVATE_ACCESSES = 120
LEAST_IMPORTS = 1400
LEAST_CLI_IMPORTS = 100
LEAST_LINES = 50_000


class Family(NamedTuple):
    """Classes with more than two of ours in their MRO: at most how many, how many of ours at most, and why."""

    size: int
    depth: int
    reason: str


# By "module:Class" of a class that is in the MRO of each of them. Entries are deleted and numbers go down, never up.
EXPECTED_DEEPER = {
    "loopwright.errors:LoopwrightError": Family(7, 3, "exceptions: people catch one kind, or all of ours"),
    "loopwright.trainer:Trainer": Family(3, 3, "a subclass of Trainer, as people write them"),
    "loopwright.hf.seq2seq:Seq2SeqTrainer": Family(1, 3, "transformers has it as a subclass of its Trainer"),
    "loopwright.hf.callbacks:EarlyStoppingCallback": Family(1, 3, "transformers' bases: a callback with a state"),
    "loopwright.config.training_arguments:TrainingArguments": Family(3, 4, "the fields and their old names are bases"),
    "loopwright.callbacks.ema:ModelEmaCallback": Family(1, 3, "saves the best average as SaveBestModelCallback does"),
    "loopwright.data.columns:Collator": Family(7, 4, "collators that pad, some of them to a few lengths"),
    "loopwright.data.split_streams:SplitLoader": Family(1, 3, "a loader that replays, over the parts of a stream"),
    "loopwright.metrics.base:Metric": Family(32, 6, "metrics that are sums, and sums per label"),
    "loopwright.schedulers.scheduler_base:StatefulSchedulerBase": Family(
        2, 3, "schedulers that count the updates themselves"
    ),
    "loopwright.sources.tables:Table": Family(11, 4, "tables of rows, of indexed files, and of images"),
    "loopwright.tasks.arguments:TaskArguments": Family(8, 3, "the arguments of a task, by family of tasks"),
    "loopwright.tasks.base:Task": Family(10, 4, "the tasks, by family: language, sequence to sequence, vision"),
    "loopwright.tasks.scoring:Scorer": Family(3, 3, "scorers by metrics, with what a task scores beside them"),
}

# Names of other libraries that a package of ours happens to define as well, by "file name".
NAMES_OF_OTHER_LIBRARIES = {
    "checkpoint/hidden_state.py _parameters": "of a torch module",
    "data/workers.py _poll": "multiprocessing's queue",
    "engine/buffers.py _version": "torch's counter of changes to a tensor",
    "engine/nested.py _fields": "of a named tuple",
    "lr_finder.py _buffers": "of a torch module",
    "lr_finder.py _parameters": "of a torch module",
    "schedulers/placeholders.py _fields": "of a named tuple",
    "sources/arrow.py _fingerprint": "of a dataset of datasets",
    "sources/plan.py _fields": "of a named tuple",
    "training/evaluation.py _fields": "of a named tuple",
}

# Private names of other packages that are still used, by "file name" or "file:Class name", with what for.
# Entries are only ever deleted.
FOREIGN_NAMES_READ: dict[str, str] = {}
FOREIGN_NAMES_OVERRIDDEN: dict[str, str] = {}
FOREIGN_NAMES_OF_BASES: dict[str, str] = {}

# Underscore names that are documented, so that every package may use and override them.
CONTRACT = {*collisions.CORE_CONTRACT, *HF_CONTRACT, "_increment_epoch", "_set_epoch", "_num_updates"}

# Gerunds that the field uses as the name of a thing.
FIELD_WORDS = {
    "batching",
    "decoding",
    "encoding",
    "finetuning",
    "logging",
    "masked_image_modeling",
    "masking",
    "packing",
    "pooling",
    "profiling",
    "question_answering",
    "sampling",
    "scheduling",
    "scoring",
    "seeding",
    "sentence_embedding",
    "sharding",
    "smoothing",
    "stepping",
    "stopping",
    "testing",
    "tracking",
    "training",
    "tuning",
}

LOOP = [
    "_run_training",
    "_run_train_epoch",
    "_run_update",
    "_perform_forward_and_backward_passes",
    "_clip_gradients",
]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


# ------------------------------------------------------------------------------------------------------ helpers


def folder_of(path: str) -> str:
    """Return the first-level folder of a module, or "core" for a module at the top level."""
    first, _, rest = path.partition("/")
    return first if rest else "core"


def package_of(path: str) -> str:
    """Return the package of a module: its first-level folder, where the Trainer and its parts are one package."""
    folder = folder_of(path)
    return "core" if folder in {"training", "stepping"} else folder


def dotted(path: str) -> str:
    parts = ["loopwright", *path.removesuffix(".py").split("/")]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def paths() -> dict[str, str]:
    """Return the path of each module inside the package, by the name that it is imported by."""
    return {dotted(path): path for path in modules()}


@cache
def classes() -> list[type]:
    """Return the classes of every module, nested ones too; a module whose extra is not installed is left out."""
    found = []
    for info in pkgutil.walk_packages([str(SOURCE)], "loopwright."):
        if info.name == "loopwright.__main__":
            continue
        try:
            module = importlib.import_module(info.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] in {"", "loopwright"}:
                raise
            continue
        found += nested_classes(vars(module), info.name)
    return list(dict.fromkeys(found))  # a class may have two names


def nested_classes(names: Mapping[str, object], module: str) -> list[type]:
    own = [each for each in names.values() if isinstance(each, type) and each.__module__ == module]
    return [*own, *(inner for each in own for inner in nested_classes(vars(each), module))]


def name_of(class_: type) -> str:
    return f"{class_.__module__}:{class_.__qualname__}"


def is_ours(class_: type) -> bool:
    return class_.__module__.partition(".")[0] == "loopwright"


def our_bases(class_: type) -> list[type]:
    return [each for each in class_.__mro__ if is_ours(each)]


def class_definitions() -> Iterator[tuple[str, str, ast.ClassDef]]:
    """Yield (path, qualified name, definition) for each class that is not inside a function."""

    def inside(path: str, body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, str, ast.ClassDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield path, f"{prefix}{node.name}", node
                yield from inside(path, node.body, f"{prefix}{node.name}.")

    for path, tree in modules().items():
        yield from inside(path, tree.body, "")


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    body = function.body if ast.get_docstring(function) is None else function.body[1:]
    return function.end_lineno - first_line(body[0]) + 1 if body else 0


def first_line(node: ast.stmt) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])


# ----------------------------------------------------------------------------------------------------- the loop


def test_the_loop_is_five_methods_of_the_trainer_that_fit_on_one_screen():
    lengths = {
        node.name: node.end_lineno - node.lineno + 1
        for class_ in modules()["trainer.py"].body
        if isinstance(class_, ast.ClassDef) and class_.name == "Trainer"
        for node in class_.body
        if isinstance(node, FUNCTIONS) and node.name in LOOP
    }
    assert sorted(lengths) == sorted(LOOP) and len(LOOP) == 5
    assert sum(lengths.values()) <= MOST_LOOP_LINES, lengths


@pytest.fixture
def stacks(monkeypatch) -> list[list[str]]:
    """Return a list that gets, at each call of `Tensor.backward`, the functions of ours on the stack."""
    found: list[list[str]] = []
    backward = torch.Tensor.backward

    def recorded(self, *args, **kwargs):
        frames = (frame.f_code for frame, _ in traceback.walk_stack(sys._getframe(1)))
        ours = [code for code in frames if Path(code.co_filename).is_relative_to(SOURCE)]
        found.append([f"{Path(code.co_filename).name}:{code.co_name}" for code in reversed(ours)])
        return backward(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "backward", recorded)
    return found


def deepest(stacks: list[list[str]]) -> list[str]:
    return max(stacks, key=len)


def test_few_frames_lie_between_train_and_backward(stacks):
    model = nn.Linear(2, 1)
    trainer = loopwright.Trainer(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), callbacks=())
    data = TensorDataset(torch.randn(8, 2), torch.randn(8, 1))
    trainer.train(data, num_epochs=1, per_device_batch_size=4, step_mode="eager")
    assert len(stacks) == 2 and "trainer.py:_run_training" in stacks[0]
    assert len(deepest(stacks)) <= MOST_FRAMES_OF_CORE, " -> ".join(deepest(stacks))


def test_few_frames_lie_between_train_and_backward_in_hf(stacks, tmp_path):
    args = hf.TrainingArguments(tmp_path, max_steps=2, use_cpu=True, report_to="none", disable_tqdm=True)
    hf.Trainer(Classifier(), args, train_dataset=labelled_rows(16)).train()
    assert len(stacks) == 2 and "trainer.py:_run_training" in stacks[0]
    assert len(deepest(stacks)) <= MOST_FRAMES_OF_HF, " -> ".join(deepest(stacks))


def test_few_frames_lie_between_the_command_line_and_backward(stacks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    data = write_csv(tmp_path / "reviews.csv", rows(32))
    flags = "--max_steps 2 --batch 8 --lr 1e-3 --threads 1 --no_rehearsal --quiet --out run"
    assert main(["train", "text-classification", "--data", str(data), *flags.split()]) == 0
    assert len(stacks) == 2 and "trainer.py:_run_training" in stacks[0]
    assert len(deepest(stacks)) <= MOST_FRAMES_OF_LW_TRAIN, " -> ".join(deepest(stacks))


# ----------------------------------------------------------------------------------------- classes and functions


def test_nothing_lies_between_the_trainer_and_its_hooks():
    assert list(map(name_of, our_bases(loopwright.Trainer))) == [
        "loopwright.trainer:Trainer",
        "loopwright.hooks:TrainerHooks",
    ]


def test_a_class_has_one_base_of_ours_unless_its_family_is_listed():
    deeper: dict[str, list[type]] = defaultdict(list)
    unlisted = []
    for class_ in classes():
        if len(our_bases(class_)) > 2 and not getattr(class_, "_is_protocol", False):
            families = [name for name in map(name_of, class_.__mro__) if name in EXPECTED_DEEPER]
            for family in families:
                deeper[family].append(class_)
            if not families:
                unlisted.append((name_of(class_), list(map(name_of, our_bases(class_)[1:]))))
    assert len(classes()) >= LEAST_CLASSES
    assert unlisted == []
    assert set(deeper) == set(EXPECTED_DEEPER), "delete the entries that are no longer needed"
    for name, family in EXPECTED_DEEPER.items():
        assert len(deeper[name]) <= family.size, list(map(name_of, deeper[name]))
        assert max(len(our_bases(class_)) for class_ in deeper[name]) <= family.depth, name


def test_the_trainer_has_few_private_methods():
    kinds = (FunctionType, property, cached_property, staticmethod, classmethod)
    private = [
        name for name, value in vars(loopwright.Trainer).items() if is_private(name) and isinstance(value, kinds)
    ]
    assert len(vars(loopwright.Trainer)) >= 40 and set(LOOP) <= set(private)
    assert len(private) <= MOST_PRIVATE_METHODS, " ".join(private)


def test_no_class_has_many_methods():
    methods = {
        f"{path}:{name}": sum(isinstance(node, FUNCTIONS) for node in class_.body)
        for path, name, class_ in class_definitions()
    }
    large = {name: count for name, count in methods.items() if count > MOST_METHODS}
    assert len(methods) >= LEAST_CLASSES and set(methods) >= CLASSES_WITH_MORE_METHODS
    assert {name: count for name, count in large.items() if name not in CLASSES_WITH_MORE_METHODS} == {}


def test_no_function_is_long():
    lengths: dict[str, list[int]] = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS):
                lengths[f"{path}:{node.name}"].append(body_lines(node))
    long = {name: max(each) for name, each in lengths.items() if max(each) > MOST_BODY_LINES}
    assert sum(map(len, lengths.values())) >= LEAST_FUNCTIONS
    assert {name: length for name, length in long.items() if length > LONG_BODIES.get(name, 0)} == {}
    assert set(long) == set(LONG_BODIES), "delete the entries that are no longer needed"


# ------------------------------------------------------------------------------------------------ private names


def is_private(name: str) -> bool:
    """Whether a name has one leading underscore; those that end in one are dunders, or enum's own."""
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def names_bound(node: ast.stmt) -> list[str]:
    """Return the names that a definition or an assignment binds."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)]
    return []


def is_own(node: ast.expr) -> bool:
    """Whether an expression is self, cls or super()."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def private_names_of_class(class_: ast.ClassDef) -> set[str]:
    """Return the private names that a class defines or assigns to itself; a Protocol defines none.

    A bare annotation only declares a name, unless it is a field of a dataclass.
    """
    if any("Protocol" in ast.unparse(base) for base in class_.bases):
        return set()
    has_fields = any("dataclass" in ast.unparse(decorator) for decorator in class_.decorator_list)
    found = []
    for node in class_.body:
        if not isinstance(node, ast.AnnAssign) or node.value is not None or has_fields:
            found += names_bound(node)
    for node in ast.walk(class_):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.append(node.attr)
    return set(filter(is_private, found))


def private_names_of_self(class_: ast.ClassDef) -> dict[str, int]:
    """Return the private names that a class reads or assigns on self, cls or super(), each with its first line."""
    lines: dict[str, int] = {}
    for node in ast.walk(class_):
        if isinstance(node, ast.Attribute) and is_own(node.value) and is_private(node.attr):
            lines.setdefault(node.attr, node.lineno)
    return lines


def statements_at_import(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements that run when a module is imported: none of a function, none for type checkers alone."""
    for node in body:
        if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
            yield from statements_at_import(node.orelse)
        elif isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield node
            if not isinstance(node, FUNCTIONS):
                yield from statements_at_import(ast.iter_child_nodes(node))


@cache
def homes() -> dict[str, set[str]]:
    """Return the packages that define each private name, in a class or in a module."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                for name in private_names_of_class(node):
                    found[name].add(package_of(path))
        for node in tree.body:
            for name in filter(is_private, names_bound(node)):
                found[name].add(package_of(path))
    return found


def private_accesses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) for `x._name`, `getattr(x, "_name")` and `from m import _name`; not for self, cls, super()."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            found = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            found = [alias.name for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and getattr(node.func, "id", "") in {"getattr", "setattr", "hasattr", "delattr"}
            and len(node.args) >= 2
            and isinstance(node.args[1], ast.Constant)
            and not is_own(node.args[0])
        ):
            found = [str(node.args[1].value)]
        yield from ((node.lineno, name) for name in found if is_private(name))


def test_private_accesses_are_found():
    code = "x._a; self._b; super()._c; x.y()._d = 1; from m import _e; getattr(x, '_f'); self.x._g; x.__h; x._i_; x.j"
    assert sorted(name for _, name in private_accesses(ast.parse(code))) == ["_a", "_d", "_e", "_f", "_g"]
    (class_,) = ast.parse(
        "class A:\n _a = 1\n _b: int\n @property\n def _c(self): self._d, x._e = self._f, 2\n def g(self): pass"
    ).body
    assert private_names_of_class(class_) == {"_a", "_c", "_d"}
    assert set(private_names_of_self(class_)) == {"_d", "_f"}


def test_no_package_reads_a_private_name_of_another():
    looked_at, foreign = 0, {}
    for path, tree in modules().items():
        for line, name in private_accesses(tree):
            looked_at += 1
            owners = homes().get(name, set())
            if owners and package_of(path) not in owners and name not in CONTRACT:
                foreign[f"{path} {name}"] = f"{path}:{line} {name} of {', '.join(sorted(owners))}"
    listed = FOREIGN_NAMES_READ | NAMES_OF_OTHER_LIBRARIES
    assert looked_at >= LEAST_PRIVATE_ACCESSES and len(homes()) >= LEAST_PRIVATE_NAMES
    assert [place for name, place in foreign.items() if name not in listed] == []
    assert set(foreign) == set(listed), "delete the entries that are no longer needed"


@cache
def private_names_of_bases() -> tuple[int, dict[str, str], dict[str, str]]:
    """Return how many classes have a base in another package, and which private names of it they override or use."""
    found = {(dotted(path), name): class_ for path, name, class_ in class_definitions()}
    looked_at, overridden, used = 0, {}, {}
    for class_ in classes():
        path = paths()[class_.__module__]
        definition = found.get((class_.__module__, class_.__qualname__))
        bases = [base for base in our_bases(class_) if package_of(paths()[base.__module__]) != package_of(path)]
        looked_at += bool(bases)
        for base in bases if definition is not None else []:
            own, lines = private_names_of_class(definition), private_names_of_self(definition)
            theirs = private_names_of_class(found[base.__module__, base.__qualname__]) - CONTRACT
            for name in sorted(theirs & own):
                overridden[f"{path}:{class_.__qualname__} {name}"] = (
                    f"{path}:{definition.lineno} {name} of {name_of(base)}"
                )
            for name in sorted(theirs & (set(lines) - own)):
                used[f"{path}:{class_.__qualname__} {name}"] = f"{path}:{lines[name]} {name} of {name_of(base)}"
    return looked_at, overridden, used


def test_no_class_overrides_a_private_name_of_a_base_in_another_package():
    looked_at, overridden, _ = private_names_of_bases()
    assert looked_at >= LEAST_CLASSES_WITH_FOREIGN_BASES
    assert [place for name, place in overridden.items() if name not in FOREIGN_NAMES_OVERRIDDEN] == []
    assert set(overridden) == set(FOREIGN_NAMES_OVERRIDDEN), "delete the entries that are no longer needed"


def test_no_class_uses_a_private_name_of_a_base_in_another_package():
    looked_at, _, used = private_names_of_bases()
    assert looked_at >= LEAST_CLASSES_WITH_FOREIGN_BASES
    assert [place for name, place in used.items() if name not in FOREIGN_NAMES_OF_BASES] == []
    assert set(used) == set(FOREIGN_NAMES_OF_BASES), "delete the entries that are no longer needed"


# ------------------------------------------------------------------------------------------------------ imports


def imports(node: ast.AST, module: str) -> list[str]:
    """Return the modules of ours that an import statement of a module reads."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        start = node.module or ""
        if node.level:
            parts = module.split(".") + ([""] if paths()[module].endswith("__init__.py") else [])
            start = ".".join([*parts[: -node.level], *([start] if start else [])])
        names = [f"{start}.{alias.name}" if f"{start}.{alias.name}" in paths() else start for alias in node.names]
    else:
        names = []
    return [name for name in names if name in paths()]


@cache
def import_graph() -> dict[str, set[str]]:
    """Return which modules each module imports while it is itself imported.

    A module's packages are imported before it. They count if they import anything of ours, and are not the
    importing module's own packages, which are being imported already.
    """
    direct = {
        module: {name for node in statements_at_import(modules()[path].body) for name in imports(node, module)}
        for module, path in paths().items()
    }
    graph: dict[str, set[str]] = {}
    for module, names in direct.items():
        packages = {package for name in names for package in parents(name) if direct[package]}
        graph[module] = names | (packages - set(parents(module)) - {module})
    return graph


def parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def reachable(module: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    reached = {module: reachable(module, graph) for module in graph}
    groups = {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in graph
        if module in reached[module]
    }
    return sorted(map(sorted, groups))


def test_no_module_imports_itself_through_others():
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set(), "e": {"e"}}) == [["b", "c"], ["e"]]
    graph = import_graph()
    assert len(graph) >= LEAST_MODULES
    assert sum(map(len, graph.values())) >= LEAST_IMPORTS
    assert cycles(graph) == []


def test_the_command_line_imports_few_packages():
    found = Counter(
        name.split(".")[1]
        for path, tree in modules().items()
        if path.startswith("cli/")
        for node in ast.walk(tree)
        for name in imports(node, dotted(path))
        if "." in name
    )
    assert found.total() >= LEAST_CLI_IMPORTS
    assert {name: count for name, count in found.items() if name not in CLI_IMPORTS | {"cli"}} == {}
    assert set(found) >= CLI_IMPORTS, "delete the packages that are no longer imported"


# -------------------------------------------------------------------------------------------------------- sizes


def test_no_folder_is_full():
    files = Counter(
        path.parent.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    )
    full = {folder: count for folder, count in files.items() if count > MOST_FILES}
    assert files.total() >= LEAST_MODULES and len(files) >= 20
    assert {folder: count for folder, count in full.items() if count > FULL_FOLDERS.get(folder, 0)} == {}
    assert set(full) == set(FULL_FOLDERS), "delete the entries that are no longer needed"


def test_modules_are_named_by_nouns():
    names = {path: dotted(path).rpartition(".")[2] for path in modules()}
    gerunds = [path for path, name in names.items() if name.endswith("ing") and name not in FIELD_WORDS]
    assert len(names) >= LEAST_MODULES
    assert len(gerunds) <= MOST_GERUNDS, " ".join(gerunds)


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_core_and_the_tests_stay_small():
    core = [path for path in modules() if folder_of(path) in CORE_FOLDERS]
    core += [f"data/{name}.py" for name in CORE_OF_DATA]
    tests = list(Path(__file__).parent.rglob("*.py"))
    assert len(core) >= 100 and len(tests) >= 150
    assert sum(lines_of(SOURCE / path) for path in core) <= MOST_CORE_LINES
    assert sum(map(lines_of, tests)) <= MOST_TEST_LINES


def test_no_package_grows():
    lines: Counter[str] = Counter()
    for path in modules():
        lines[folder_of(path)] += lines_of(SOURCE / path)
    assert lines.total() >= LEAST_LINES
    assert set(lines) == set(MOST_LINES)
    assert {package: count for package, count in lines.items() if count > MOST_LINES[package]} == {}
