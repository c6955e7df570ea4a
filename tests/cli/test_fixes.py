"""Every `fix:` that is printed works when it is followed literally: the same command then gets further."""

import gzip
import importlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cli.following import failure_in, follow
from cli.streams import run
from loopwright import failpoints
from loopwright.sources import CODES
from loopwright.sources import files as source_files
from loopwright.tasks import get_task
from sources.drawing import annotation, class_folders, coco, draw, draw_ids, mask_folders
from tasks.reviews import rows, write_csv, write_jsonl
from tasks.test_registry import install as install_package
from tasks.test_untrusted_models import put_code
from tasks.texts import lines, tiny_bert, tiny_gpt2, write_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = "text-classification"
GOOD = "text,label\n" + "".join(f"text {'ab'[n % 2]} {n},{'ab'[n % 2]}\n" for n in range(20))


def reading(path: str, task: str = TEXT, flag: str = "--data") -> list[str]:
    """Return the command that reads the data, and does no more."""
    return ["check", task, flag, path, "--files"]


FILES = reading("x.csv")
SHORT = ["--no_rehearsal", "--max_steps", "2", "--batch", "8", "--threads", "1", "--quiet"]
TRAIN = ["train", TEXT, "--data", "x.csv", *SHORT]
EXTRAS = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())["project"]
# A notice of a run that goes on, without a fix; and what only a damaged merge can cause (tests/tasks/test_adapters.py).
LEFT_TO_OTHERS = {"checkpoint.size", "model.merge"}


@dataclass
class Case:
    """A command that fails with a code: its files, what else makes it fail, and how an edit in words is done."""

    code: str
    words: list[str]
    files: dict[str, str | bytes] = field(default_factory=lambda: {"x.csv": GOOD})
    make: Callable[[Any], None] | None = None
    edit: Callable[[str], Any] | None = None
    more: tuple[str, ...] = ()  # flags that make a longer command of a fix shorter
    contains: str = ""  # of the fix


CASES: dict[str, Case] = {}


def case(name: str, *given: Any, **options: Any) -> None:
    CASES[name] = Case(*given, **options)


class Kit:
    """What a case needs to make its files."""

    def __init__(self, folder: Path, finished: Path) -> None:
        self.folder, self.finished = folder, finished
        self.patch, self.opened = pytest.MonkeyPatch(), ExitStack()

    def end(self) -> None:
        self.patch.undo()
        self.opened.close()

    def copy_run(self) -> Path:
        """Copy the run that all tests share to `run`, with its data beside it."""
        shutil.copytree(self.finished, "run")
        data = write_csv(Path("reviews.csv"), rows())
        plan = json.loads(Path("run/data.json").read_text())
        plan["files"][0]["path"] = str(data.absolute())
        plan.pop("sha256")
        Path("run/data.json").write_text(json.dumps(plan))
        return data

    def without(self, *modules: str) -> None:
        for module in modules:
            self.patch.setitem(sys.modules, module, None)


def rewrite(name: str, content: str | bytes) -> Callable[[str], None]:
    """Return an edit that writes a file again."""

    def edit(way: str) -> None:
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return edit


# Words of the command line.
case("a-flag", "args.unknown", [*FILES, "--epoch", "3"], contains="--epochs instead of --epoch")
case("a-flag-of-its-own", "args.unknown", [*FILES, "--frobnicate", "3"], contains="leave out --frobnicate")
case("a-flag-with-=", "args.unknown", [*FILES, "--text_colum=text"], contains="--text_column instead of")
case("a-verb", "args.unknown", ["chek", *FILES[1:]], contains="lw check")
case("no-verb", "args.unknown", ["frobnicate"])
case("a-flag-of-runs", "args.unknown", ["runs", "--sorted", "metric"], contains="--sort instead of --sorted")
case("a-word-of-runs", "args.unknown", ["runs", "metric"])
case(
    "a-name-in-a-file",
    "args.unknown",
    ["check", "cfg.yaml", "--files"],
    {"x.csv": GOOD, "cfg.yaml": f"task: {TEXT}\ndata: x.csv\nepoch: 3\n"},
    edit=rewrite("cfg.yaml", f"task: {TEXT}\ndata: x.csv\nepochs: 3\n"),
    contains="epochs instead of epoch",
)
case("a-task", "args.task", ["check", "text-clasification", *FILES[2:]], contains=f"{TEXT} instead of")
case("no-task-like-it", "args.task", ["check", "frobnication", *FILES[2:]], contains="lw tasks")
case("a-task-after-flags", "args.task", ["check", "--data", "x.csv", "--files", TEXT])
case(
    "a-file-without-task",
    "args.task",
    ["check", "cfg.yaml", "--files"],
    {"x.csv": GOOD, "cfg.yaml": "data: x.csv\n"},
    edit=rewrite("cfg.yaml", f"task: {TEXT}\ndata: x.csv\n"),
)
case("a-metric", "args.metric", [*TRAIN, "--metric_for_best_model", "acuracy"])
NUMBERS = {
    "--lr 0,001": "--lr 0.001",
    "--epochs three": "--epochs 3",
    "--batch 8x": "--batch 8",
    "--batch 8.5": "--batch 8",
    "--validation_ratio 20%": "--validation_ratio 0.2",
    "--max_steps 1,000": "--max_steps 1000",
    "--lr 1e-3x": "--lr 1e-3",
    "--max_steps 10k": "--max_steps 10000",
    "--weight_decay .01!": "--weight_decay .01",
    "--lr fast": "leave out --lr",
    "--step_mode grap": "--step_mode graph",
    "--step_mode fast": "--step_mode auto",
    "--eval_strategy stepz": "--eval_strategy steps",
    "--validation_ratio 20": "--validation_ratio 0.2",
    "--missing_values dropp": "--missing_values drop",
    "--label_kind clas": "--label_kind class",
    "--file_kind cvs": "--file_kind csv",
    "--delimiter komma": "--delimiter comma",
    "--bf16 maybe": "--bf16 False",
    "--quoting all": "--quoting minimal",
    "--time soon": "--time 2h",
    "--report_to wandbb": "--report_to wandb",
    "--logging_steps ten": "--logging_steps 10",
}
for given, meant in NUMBERS.items():
    case(given.replace(" ", "="), "args.value", [*FILES, *given.split()], contains=meant)
case("a-file-as-a-word", "args.value", ["check", TEXT, "x.csv", "--files"], contains="--data x.csv instead of x.csv")
case("two-lengths", "args.value", [*FILES, "--time", "1h", "--epochs", "2"])
case("two-places-of-data", "args.value", [*FILES, "--train_file", "x.csv"])
case("one-run-to-compare", "args.value", ["compare", "run"], make=Kit.copy_run)
case("no-run-to-evaluate", "args.value", ["evaluate"])
case("launch-without--", "args.value", ["launch", "-n", "1", "train", "--help"])
case("launch-of-a-verb-alone", "args.value", ["launch", "-n", "2", "--", "runs"])
case("launch-of-nothing", "args.value", ["launch", "-n", "1", "--"], more=("--help",))
case("a-port-in-words", "args.value", ["find-lr", TEXT, "--data", "x.csv", *SHORT[:1], "--num_updates", "5x"])
case("resume-elsewhere", "args.value", ["resume", "run", "--output_dir", "y"], make=Kit.copy_run)
case(
    "resume-with-seeds",
    "args.value",
    ["resume", "run", "--seeds", "2"],
    make=Kit.copy_run,
    more=("--max_steps", "1", "--no_rehearsal"),
)
case("an-export-into-files", "args.value", ["export", "run", "--to", "."], make=Kit.copy_run)
case(
    "predictions-into-txt",
    "args.value",
    ["predict", "run", "a film", "--out", "a b/p.txt"],
    make=lambda kit: (kit.copy_run(), Path("a b").mkdir()),
)
case("a-report-into-a-folder", "args.value", ["report", "run", "--out", "run"], make=Kit.copy_run)
case("a-label-map", "args.value", [*FILES, "--label_map", "pos"])

# Runs and their folders.
case("no-run-like-it", "run.unknown", ["evaluate", "frobnicate"], contains="lw runs")
case("no-run-yet", "run.unknown", ["report", "last"], more=("--help",))
case("a-folder-with-a-run", "run.exists", [*TRAIN, "--output_dir", "run"], make=Kit.copy_run)
case("a-folder-with-files", "run.exists", [*TRAIN, "--out", "a b"], {"x.csv": GOOD, "a b/run/notes.txt": "x"})
case("a-folder-in-a-file", "disk.write", [*TRAIN, "--out", "x.csv/run"])


def truncate_config(kit: Kit) -> None:
    kit.copy_run()
    content = Path("run/config.yaml").read_text()
    Path("run/config.yaml").write_text("\n".join(content.splitlines()[:9]))
    shutil.rmtree("run/checkpoints")


def end_config(way: str) -> None:
    line = re.search(r"add the line (.*?)(?:;|$)", way)[1]
    Path("run/config.yaml").write_text(Path("run/config.yaml").read_text() + f"\n{line}\n")


case("a-config-cut-short", "run.config", ["evaluate", "run"], make=truncate_config, edit=end_config)
case(
    "a-damaged-result",
    "run.damaged",
    ["evaluate", "run"],
    make=lambda kit: (kit.copy_run(), Path("run/run.json").write_text("{")),
    edit=lambda way: shutil.move("run/run.json", "away"),
)


def remove_states(kit: Kit) -> None:
    kit.copy_run()
    shutil.rmtree("run/checkpoints")
    for name in ("model.safetensors", "SHA256SUMS"):
        Path("run/model", name).unlink()


case("no-state", "checkpoint.none", ["evaluate", "run"], make=remove_states)


def damage_states(kit: Kit) -> None:
    kit.copy_run()
    for name in ("model.safetensors", "SHA256SUMS"):
        Path("run/model", name).unlink()
    for path in Path("run/checkpoints").rglob("*.safetensors"):
        path.write_bytes(b"x")


case(
    "damaged-states",
    "checkpoint.none",
    ["evaluate", "run"],
    make=damage_states,
    more=("--max_steps", "1", "--no_rehearsal"),
)


def change_data(kit: Kit) -> None:
    data = kit.copy_run()
    data.write_text(data.read_text().replace("film", "movie"))


def put_back(way: str) -> None:
    write_csv(Path("reviews.csv"), rows())


case("changed-data", "resume.data", ["evaluate", "run", "--quiet"], make=change_data, edit=put_back)
case(
    "changed-data-to-resume",
    "resume.data",
    ["resume", "run", "--epochs", "3", *SHORT[:1], "--quiet"],
    make=change_data,
    edit=put_back,
)
case(
    "data-that-is-gone",
    "resume.data",
    ["evaluate", "run", "--quiet"],
    make=lambda kit: kit.copy_run().unlink(),
    edit=put_back,
)


def rebuilt(kit: Kit) -> None:
    kit.copy_run()
    config = json.loads(Path("run/model/config.json").read_text())
    dropouts = {name: 0.3 for name, value in config.items() if "dropout" in name and isinstance(value, float)}
    change_json("run/model/config.json", **dropouts)(kit)
    Path("run/model/SHA256SUMS").unlink()


case(
    "another-model",
    "resume.model",
    ["resume", "run", "--epochs", "3", *SHORT[:1], "--quiet"],
    make=rebuilt,
    edit=lambda way: ["evaluate", "run"],
)


GO_ON = ["resume", "run", "--epochs", "3", *SHORT[:1], "--quiet"]
for name, code, words in (
    ("another-optimizer-to-resume", "checkpoint.state", ["--optim", "sgd"]),
    ("frozen-to-resume", "checkpoint.state", ["--freeze", "1"]),
    ("fewer-rows-to-resume", "resume.data", ["--max_train_samples", "20"]),
    ("other-splits-to-resume", "args.value", ["--validation_ratio", "0.4"]),
    ("other-labels-to-resume", "args.value", ["--drop_labels", "pos"]),
):
    case(name, code, [*GO_ON, *words], make=Kit.copy_run)


def busy_port(kit: Kit) -> None:
    kit.copy_run()
    listening = kit.opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = str(listening.getsockname()[1])
    kit.patch.setattr(CASES["a-port-in-use"], "words", ["watch", "run", "--port", port])
    kit.patch.setattr("loopwright.report.ReportServer.serve_forever", lambda self: None)


case("a-port-in-use", "watch.port", [], make=busy_port)


# Data files.
def zipped(kit: Kit, path: str = "x.zip", files: dict[str, str] | None = None) -> None:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in (files or {"a b/x.csv": GOOD}).items():
            file.writestr(name, content)


case("no-file", "data.file", reading("y.csv"), edit=rewrite("y.csv", GOOD))
case(
    "a-file-like-it",
    "data.file",
    reading("rewiews.csv"),
    {"reviews.csv": GOOD, "reviews": ""},
    contains="--data reviews.csv",
)
case("a-name-with-blanks", "data.file", reading("my reviws.csv"), {"my reviews.csv": GOOD})
case("no-data", "data.file", ["check", TEXT, "--files"], more=("--help",), contains="--data x.csv")
case(
    "a-settings-file",
    "data.file",
    ["check", "cgf.yaml", "--files"],
    {"x.csv": GOOD, "cfg.yaml": f"task: {TEXT}\ndata: x.csv\n"},
    contains="cfg.yaml instead of",
)
case(
    "a-script",
    "data.file",
    ["launch", "-n", "1", "--", "trian.py"],
    {"train.py": ""},
    contains="train.py instead of trian.py",
)
case(
    "a-pipe",
    "data.file",
    FILES,
    {},
    make=lambda kit: os.mkfifo("x.csv"),
    edit=lambda way: (Path("x.csv").unlink(), rewrite("x.csv", GOOD)(way))[1],
)
case("an-empty-file", "data.empty", FILES, {"x.csv": ""}, edit=rewrite("x.csv", GOOD))
case("a-header-alone", "data.no_rows", FILES, {"x.csv": "text,label\n"}, edit=rewrite("x.csv", GOOD))
NO_HEADER = GOOD.partition("\n")[2]
case("no-header", "data.header", FILES, {"x.csv": NO_HEADER}, contains="--column_names text,label   or   ")
case(
    "pairs-without-a-header",
    "data.header",
    reading("x.tsv", "translation"),
    {"x.tsv": "".join(f"It is {n}.\tC'est {n} !\n" for n in range(30))},
    contains="--column_names source,target   or   ",
)
case("a-name-too-many", "args.value", [*FILES, "--column_names", "a,b,c"], {"x.csv": NO_HEADER})
case(
    "names-of-json", "args.value", [*FILES, "--file_kind", "jsonl", "--column_names", "a,b"], {"x.csv": '{"text": "a"}'}
)
case(
    "out-is-an-input",
    "args.value",
    ["predict", "run", "reviews.csv", "--out", "reviews.csv"],
    make=Kit.copy_run,
    contains="--out predicted_reviews.csv",
)
case("a-nul-byte", "data.nul", FILES, {"x.csv": GOOD.replace("text b 3", "te\0xt b 3")})
case("a-quote", "data.quote", FILES, {"x.csv": GOOD + '"open,a\nlast,b\n'}, edit=rewrite("x.csv", GOOD))
case("ragged", "data.ragged", FILES, {"x.csv": GOOD + "a,b,c,d\n"}, edit=rewrite("x.csv", GOOD))
case("a-header-again", "data.header", FILES, {"x.csv": GOOD * 2}, edit=rewrite("x.csv", GOOD))
for sign in ("~", "::"):
    hidden = re.sub(",", sign, GOOD)
    case(f"columns-with-{sign}", "data.column", FILES, {"x.csv": hidden}, contains=sign)
case(
    "apostrophes",
    "data.quote",
    FILES,
    {"x.csv": "text,label\n" + "'a, b',a\n'c, d',b\n" * 9 + "'it's',a\n"},
    edit=rewrite("x.csv", GOOD),
)
case(
    "two-columns-of-a-name",
    "data.duplicate_column",
    FILES,
    {"x.csv": "text,label,text\n" + "a,b,c\n" * 9},
    edit=rewrite("x.csv", GOOD),
)
case(
    "a-long-row",
    "data.long_row",
    FILES,
    {"x.csv": GOOD + "a" * 2000 + ",b\n"},
    edit=rewrite("x.csv", GOOD),
    make=lambda kit: kit.patch.setattr(source_files, "MAX_ROW_BYTES", 1000),
)
case(
    "a-gz-cut-short",
    "data.gzip",
    reading("x.csv.gz"),
    {"x.csv.gz": gzip.compress(GOOD.encode())[:-9]},
    edit=rewrite("x.csv.gz", gzip.compress(GOOD.encode())),
)
case(
    "a-large-gz",
    "data.gzip",
    reading("x.csv.gz", flag="--train_file"),
    {"x.csv.gz": gzip.compress(GOOD.encode())},
    make=lambda kit: kit.patch.setattr(source_files, "MAX_UNPACKED_BYTES", 100),
)
case(
    "several-files-in-a-zip",
    "data.gzip",
    reading("my x.csv.zip", flag="--train_file"),
    {},
    make=lambda kit: zipped(kit, "my x.csv.zip", {"a.csv": GOOD, "notes/read me.txt": "by hand"}),
)
case("gz-without-gz", "data.ending", FILES, {"x.csv": gzip.compress(GOOD.encode())})
case("a-zip", "data.ending", reading("x.zip", flag="--train_file"), {}, make=zipped)
case("an-ending", "data.ending", reading("x.dat"), {"x.dat": GOOD}, contains="--file_kind csv")
case(
    "json-lines-as-dat",
    "data.ending",
    reading("x.dat"),
    {"x.dat": "".join(json.dumps({"text": f"t {n}", "label": n % 2}) + "\n" for n in range(20))},
    contains="--file_kind jsonl",
)
case(
    "json-as-csv",
    "data.ending",
    FILES,
    {"x.csv": "".join(json.dumps({"text": f"t {n}", "label": n % 2}) + "\n" for n in range(20))},
)
case("csv-as-jsonl", "data.json", reading("x.jsonl"), {"x.jsonl": GOOD}, contains="--file_kind csv")
case(
    "half-a-json",
    "data.json",
    reading("x.json"),
    {"x.json": '[{"text": "a"'},
    edit=rewrite("x.json", json.dumps([{"text": f"t {n}", "label": n % 2} for n in range(20)])),
)
case("two-training-files", "data.folder", reading("d d"), {"d d/train.csv": GOOD, "d d/train.tsv": GOOD})
case("a-folder-of-others", "data.folder", reading("d"), {"d/one.csv": GOOD, "d/two.csv": GOOD})
case("a-folder-as-a-file", "data.folder", reading("d", flag="--train_file"), {"d/train.csv": GOOD})
case("an-empty-folder", "data.folder", reading("d"), {"d/notes.md": ""}, edit=rewrite("d/train.csv", GOOD))
ODD = "id,review,stars\n" + "".join(f"{n},text {'ab'[n % 2]} {n},{'ab'[n % 2]}\n" for n in range(20))
case("a-column", "data.column", [*FILES, "--text_column", "reviev"], {"x.csv": ODD}, contains="--text_column review")
case(
    "a-column-unlike-any",
    "data.column",
    [*FILES, "--text_column", "frob"],
    {"x.csv": ODD},
    contains="--text_column review",
)
case(
    "a-near-column-of-numbers",
    "data.column",
    [*FILES, "--text_column", "ids"],
    {"x.csv": ODD},
    contains="--text_column review",
)
case(
    "two-texts",
    "data.column",
    FILES,
    {"x.csv": "one thing,another,label\n" + "".join(f"text a {n},text b c {n},{'ab'[n % 2]}\n" for n in range(20))},
)
case(
    "numbers-alone",
    "data.column",
    FILES,
    {"x.csv": "id,label\n" + "".join(f"{n},{'ab'[n % 2]}\n" for n in range(20))},
    edit=rewrite("x.csv", GOOD),
)
case(
    "languages",
    "data.column",
    reading("x.jsonl", "translation"),
    make=lambda kit: write_jsonl(
        Path("x.jsonl"), [{"translation": {"en": f"a {n}", "de": f"b {n}", "ro": f"c {n}"}} for n in range(20)]
    ),
)
case("missing-values", "data.missing", FILES, {"x.csv": GOOD + ",a\n"}, edit=rewrite("x.csv", GOOD))
case(
    "missing-values-to-evaluate",
    "data.missing",
    ["evaluate", "run", "--data", "x.csv", "--quiet"],
    make=lambda kit: (kit.copy_run(), write_csv(Path("x.csv"), [*rows(12), {"review": "", "stars": "pos"}])),
    edit=lambda way: write_csv(Path("x.csv"), rows(12)),
)
case(
    "unknown-labels-to-evaluate",
    "data.labels",
    ["evaluate", "run", "--data", "x.csv", "--quiet"],
    make=lambda kit: (kit.copy_run(), write_csv(Path("x.csv"), [*rows(12), {"review": "fine", "stars": "poss"}])),
)
case(
    "unknown-labels",
    "data.labels",
    ["check", TEXT, "--train_file", "x.csv", "--validation_file", "v.csv", "--files"],
    {"x.csv": GOOD.replace(",a", ",good one").replace(",b", ",bad"), "v.csv": "text,label\nt,good won\nu,bad\n"},
)
case(
    "labels-of-two-kinds",
    "data.label_type",
    reading("x.jsonl"),
    make=lambda kit: write_jsonl(Path("x.jsonl"), [{"text": f"t {n}", "label": ["a", 1][n % 2]} for n in range(20)]),
    edit=lambda way: write_jsonl(Path("x.jsonl"), [{"text": f"t {n}", "label": "ab"[n % 2]} for n in range(20)]),
)
case("one-class", "data.one_class", FILES, {"x.csv": GOOD.replace(",b", ",a")}, edit=rewrite("x.csv", GOOD))
case("too-few-rows", "data.split", FILES, {"x.csv": "text,label\na,b\n"}, edit=rewrite("x.csv", GOOD))
case(
    "validation-is-training",
    "data.split",
    ["check", TEXT, "--train_file", "x.csv", "--validation_file", "v.csv", "--files"],
    {"x.csv": GOOD, "v.csv": GOOD},
    edit=rewrite("v.csv", GOOD.replace("text", "another text").replace("another text,", "text,")),
)
case("fewer-rows-than-a-batch", "data.split", [*TRAIN, "--batch", "64", "--dataloader_drop_last"])
case(
    "one-group",
    "data.groups",
    [*FILES, "--group_column", "who"],
    {"x.csv": "text,label,who\n" + "".join(f"text {n},{'ab'[n % 2]},me\n" for n in range(20))},
)
SWAG = [{"text": f"t {n}", "choices": ["one", "two", "three"], "label": 1 + n % 3} for n in range(20)]
case(
    "one-choice",
    "data.value",
    ["check", "multiple-choice", "--data", "x.jsonl", "--no_rehearsal"],
    make=lambda kit: write_jsonl(
        Path("x.jsonl"),
        [{**row, "choices": row["choices"][: 1 if n % 3 == 0 else 3], "label": n % 3} for n, row in enumerate(SWAG)],
    ),
    edit=lambda way: write_jsonl(Path("x.jsonl"), [{**row, "label": n % 3} for n, row in enumerate(SWAG)]),
)
case(
    "tags",
    "data.tags",
    reading("x.jsonl", "token-classification"),
    make=lambda kit: write_jsonl(Path("x.jsonl"), [{"tokens": ["a", "b"], "tags": ["O"]}] * 9),
    edit=lambda way: write_jsonl(Path("x.jsonl"), [{"tokens": ["a", str(n)], "tags": ["O", "B-X"]} for n in range(20)]),
)
QUESTION = {
    "question": "Who?",
    "context": "Ada Lovelace wrote it.",
    "answers": {"text": ["Byron"], "answer_start": [0]},
}
case(
    "answers",
    "data.answers",
    reading("x.jsonl", "question-answering"),
    make=lambda kit: write_jsonl(Path("x.jsonl"), [QUESTION] * 9),
    edit=lambda way: write_jsonl(
        Path("x.jsonl"),
        [{**QUESTION, "question": f"Who {n}?", "answers": {"text": ["Ada"], "answer_start": [0]}} for n in range(20)],
    ),
)
case(
    "latin-1-read-as-utf-8",
    "data.encoding",
    [*FILES, "--encoding", "utf-8"],
    {"x.csv": GOOD.replace("text", "na\u00efve").replace("na\u00efve", "text", 1).encode("latin-1")},
)
case(
    "a-name-not-in-utf-8",
    "data.encoding",
    reading(os.fsdecode(b"x\xff.csv")),
    {os.fsdecode(b"x\xff.csv"): GOOD},
    edit=lambda way: Path(os.fsdecode(b"x\xff.csv")).rename("x.csv") and FILES,
)


def change_while_reading(kit: Kit) -> None:
    preflight = importlib.import_module("loopwright.sources.preflight")

    def changed(*given: Any) -> Any:
        if not Path("changed").exists():
            Path("changed").touch()
            os.truncate("x.csv", 12)
        return scan(*given)

    scan = preflight.scan_table
    kit.patch.setattr(preflight, "scan_table", changed)


case("a-file-that-changes", "data.changed", FILES, make=change_while_reading, edit=rewrite("x.csv", GOOD))


def no_hub(kit: Kit) -> None:
    import datasets

    kit.patch.setattr(
        datasets, "load_dataset", lambda *given, **options: (_ for _ in ()).throw(ConnectionError("no network"))
    )


def reach_hub(way: str) -> list[str]:
    return FILES  # a person finds the dataset elsewhere, and gives the file


case("no-hub", "data.hub", reading("somebody/reviews"), make=no_hub, edit=reach_hub)

# Images.
IMAGES = reading("d", "image-classification")
MASKS = reading("d", "semantic-segmentation")
BOXES = reading("d/train.json", "object-detection", flag="--train_file")
OUTLINES = ["check", "instance-segmentation", *BOXES[2:]]
ALL = [annotation(100 + number) for number in range(6)]


def good_boxes(way: str = "") -> None:
    square = [[2, 3, 6, 3, 6, 8, 2, 8]]
    shutil.rmtree("d", ignore_errors=True)
    coco(Path("d/train.json"), [annotation(100 + number, segmentation=square) for number in range(6)])


def good_masks(way: str = "") -> None:
    shutil.rmtree("d", ignore_errors=True)
    mask_folders(Path("d"))


case(
    "a-damaged-image",
    "data.image",
    IMAGES,
    {},
    make=lambda kit: (class_folders(Path("d")), Path("d/cat/001.png").write_bytes(b"x")),
    edit=lambda way: draw(Path("d/cat/001.png"), 5),
)
case(
    "images-beside-folders",
    "data.folder",
    IMAGES,
    {},
    make=lambda kit: (class_folders(Path("d")), draw(Path("d/x.png"), 7)),
    edit=lambda way: shutil.move("d/x.png", "d/cat/x.png"),
)
case(
    "one-folder-of-images",
    "data.one_class",
    IMAGES,
    {},
    make=lambda kit: [draw(Path(f"d/cat/{n}.png"), n) for n in range(9)],
    edit=lambda way: class_folders(Path("d")),
)
case(
    "colour-masks",
    "data.masks",
    MASKS,
    {},
    make=lambda kit: (good_masks(), [draw(path) for path in Path("d/masks").iterdir()]),
    edit=good_masks,
)
case(
    "masks-of-another-size",
    "data.size",
    MASKS,
    {},
    make=lambda kit: (good_masks(), draw_ids(Path("d/masks/002.png"), np.zeros((3, 3)))),
    edit=good_masks,
)
case(
    "an-unknown-image-id",
    "data.annotations",
    BOXES,
    {},
    make=lambda kit: coco(Path("d/train.json"), [*ALL, annotation(7)]),
    edit=good_boxes,
)
case(
    "a-nameless-category",
    "data.classes",
    BOXES,
    {},
    make=lambda kit: coco(Path("d/train.json"), [*ALL, annotation(100, 77)]),
    edit=good_boxes,
)
case(
    "a-box-of-letters",
    "data.boxes",
    BOXES,
    {},
    make=lambda kit: coco(Path("d/train.json"), [*ALL, annotation(100, bbox=["a", 1, 2, 3])]),
    edit=good_boxes,
)
case(
    "boxes-without-outlines",
    "data.outlines",
    OUTLINES,
    {},
    make=lambda kit: coco(Path("d/train.json"), ALL),
    edit=good_boxes,
)

# Models. The same folder for all: they only read it.
MODEL = [*TRAIN, "--model", "./m"]
CHECKED = ["check", TEXT, "--data", "x.csv", "--no_rehearsal", "--threads", "1", "--quiet", "--model", "./m"]
CAUSAL = ["check", "causal-lm", "--data", "x.txt", "--no_rehearsal", "--threads", "1", "--quiet", "--model", "./m"]


def change_json(name: str, **changes: Any) -> Callable[[Any], None]:
    def change(kit: Any) -> None:
        path = Path(name)
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def bert(kit: Kit) -> None:
    write_text(Path("x.txt"), lines(60))
    tiny_bert(Path("m"))


case("no-model-folder", "model.folder", CHECKED)
case(
    "a-model-folder-like-it",
    "model.folder",
    [*CHECKED[:-1], "./brt"],
    make=lambda kit: tiny_bert(Path("bert")),
    contains="--model ",
)
case(
    "a-damaged-model",
    "model.folder",
    CHECKED,
    make=lambda kit: (bert(kit), Path("m/config.json").write_text("{")),
    edit=lambda way: (shutil.rmtree("m"), tiny_bert(Path("m"))),
)
case("a-model-too-short", "model.length", [*CHECKED, "--max_length", "128"], make=bert, contains="--max_length 64")
case("a-model-of-another-kind", "model.task", CAUSAL, make=bert)
case(
    "no-mask-token",
    "model.mask_token",
    ["check", "masked-lm", *CAUSAL[2:]],
    make=lambda kit: (bert(kit), change_json("m/tokenizer_config.json", mask_token=None)(kit)),
    edit=lambda way: (shutil.rmtree("m"), tiny_bert(Path("m"))),
)
case(
    "no-pad-token",
    "model.pad_token",
    CHECKED,
    make=lambda kit: tiny_gpt2(Path("m"), pad_token=None, eos_token=None, bos_token=None),
    edit=lambda way: change_json("m/tokenizer_config.json", pad_token="the")(None),
)
case(
    "offline",
    "model.offline",
    [*CHECKED[:-1], "somebody/model"],
    make=lambda kit: kit.patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "nowhere"),
)
case(
    "no-tokenizer",
    "model.tokenizer",
    CHECKED,
    make=lambda kit: (bert(kit), Path("m/tokenizer_config.json").unlink(), Path("m/tokenizer.json").write_text("{")),
    edit=lambda way: (shutil.rmtree("m"), tiny_bert(Path("m"))),
)
case("code-of-a-model", "model.code", CHECKED, make=lambda kit: (bert(kit), put_code(Path("m"), model_type="odd")))


def pickled(kit: Kit) -> None:
    import torch
    from safetensors.torch import load_file

    bert(kit)
    torch.save(load_file("m/model.safetensors"), "m/pytorch_model.bin")
    Path("m/model.safetensors").unlink()


case("a-pickle", "model.pickle", CHECKED, make=pickled)


def missing(module: str, words: list[str], **options: Any) -> None:
    table = [
        {
            "text": f"t {n}",
            "label": "ab"[n % 2],
            "tokens": ["a", str(n)],
            "tags": ["O", "B-X"],
            "source": f"s {n}",
            "target": f"t {n}",
        }
        for n in range(20)
    ]
    case(
        f"without-{module}",
        "install.extra",
        words,
        make=lambda kit: (write_jsonl(Path("x.jsonl"), table), kit.without(module)),
        **options,
    )


for module, words in {
    "transformers": FILES,
    "sacrebleu": ["check", "translation", "--data", "x.jsonl", "--no_rehearsal"],
    "peft": [*TRAIN, "--lora"],
    "nervaluate": reading("x.jsonl", "token-classification"),
}.items():
    missing(module, words)


def broken_task(kit: Kit) -> None:
    sys.modules.pop("broken_module", None)
    folder = install_package(Path("site"), "broken", "broken-task = broken_module:Task", broken_module="1 / 0")
    kit.patch.syspath_prepend(str(folder.absolute()))


WORKING = """
from loopwright.tasks.text.classification import TextClassification
class Task(TextClassification):
    name = "broken-task"
"""
case("a-broken-task", "install.task", reading("x.csv", "broken-task"), make=broken_task)

OWN = "def same(image):\n    return image\n"


def own_code(kit: Kit) -> None:
    class_folders(Path("d"))
    kit.patch.setenv("XDG_STATE_HOME", str(kit.folder / "state"))


case(
    "code-in-a-file",
    "code.allow",
    ["check", "cfg.yaml", "--no_rehearsal"],
    {"own_fix_code.py": OWN, "cfg.yaml": "task: image-classification\ndata: d\naugment_with: own_fix_code:same\n"},
    make=own_code,
)


def foreign(kit: Kit) -> None:
    kit.copy_run()
    kit.patch.setenv("XDG_STATE_HOME", str(kit.folder / "state"))
    (kit.folder / "elsewhere.txt").write_text("x")
    Path("run/model/link.txt").symlink_to(kit.folder / "elsewhere.txt")


case("a-run-of-others", "run.trust", ["predict", "run", "a film"], make=foreign)

# While it trains.
case("a-loss-that-is-not-finite", "loss.nan", [*TRAIN, "--lr", "1e30", "--max_steps", "6", "--out", "nan"])


def out_of_memory(is_training: bool) -> Callable[[Kit], None]:
    def make(kit: Kit) -> None:
        import torch

        kind = type(get_task(TEXT))
        whole = kind.compute_loss

        def limited(self: Any, job: Any, model: Any, batch: Any) -> Any:
            if torch.is_grad_enabled() == is_training and len(batch["position"]) > (4 if is_training else 1):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return whole(self, job, model, batch)

        kit.patch.setattr(kind, "compute_loss", limited)
        if not is_training:  # such a batch is cut in two where that can be done
            kit.patch.setattr(kind, "why_not_cut", lambda self, job: "its rows are compared with each other")

    return make


case("out-of-memory", "memory.train", [*TRAIN, "--oom", "stop"], make=out_of_memory(True))
case(
    "out-of-memory-to-evaluate",
    "memory.eval",
    [*TRAIN, "--oom", "stop", "--per_device_eval_batch_size", "2"],
    make=out_of_memory(False),
)
case(
    "a-disk-that-is-full",
    "checkpoint.write",
    [*TRAIN, "--save_strategy", "steps", "--save_steps", "1", "--out", "full"],
    make=lambda kit: failpoints.arm("mid_write:*:raise:ENOSPC"),
    edit=lambda way: failpoints.disarm() or ["resume", "full", "--quiet"],
)


def folds(kit: Kit) -> None:
    for place, name in enumerate(("fold1", "fold2", "fold3")):
        class_folders(Path("d", name), 4, start=10 * place)


case("folds-as-classes", "data.folder", IMAGES, {}, make=folds, contains="--validation_file")
case("a-folder-above-classes", "data.folder", IMAGES, {}, make=lambda kit: class_folders(Path("d/sub")))


def far_images(kit: Kit) -> None:
    class_folders(Path("d/photos/of"), 9)
    for image in Path("d/photos/of/dog").iterdir():
        image.rename(f"d/photos/of/cat/1{image.name}")
    names = sorted(path.name for path in Path("d/photos/of/cat").iterdir())
    rewrite("x.csv", "image,label\n" + "".join(f"gone/{name},{name[0]}\n" for name in names))("")
    Path("x.csv").rename("d/x.csv")


ROWS = reading("d/x.csv", "image-classification")
case("images-elsewhere", "data.image", ROWS, {}, make=far_images, contains="--image_dir")
case("a-folder-above-masks", "data.folder", MASKS, {}, make=lambda kit: mask_folders(Path("d/sub")))

for place, (words, fix) in enumerate(
    [
        (["--lr", "inf"], "leave out --lr"),
        (["--lr", "high"], "leave out --lr"),
        (["--lr", "1,000"], "--lr 1000"),
        (["--epochs"], "leave out --epochs"),
        (["--batch"], "--batch 16"),
        (["--profile", "strat"], "--profile start"),
        (["--class_weights", "ballanced"], "--class_weights balanced"),
    ]
):
    case(f"mistyped-{place}", "args.value", [*FILES, *words], contains=fix)
case("mistyped-optimizer", "args.value", [*TRAIN, "--optim", "adamm"], contains="--optim adam")
URL = reading("https://example.com/x.csv")
case("a-url", "data.file", URL, edit=lambda way: FILES, contains="download")


# ------------------------------------------------------------------------------------------------------- conversations

CHATS = (Path(__file__).resolve().parents[1] / "samples" / "chat" / "sample.jsonl").read_text()
PAIRS = (Path(__file__).resolve().parents[1] / "samples" / "preference" / "sample.jsonl").read_text()
LOUD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | upper }}<|end|>{% endfor %}"

case(
    "a-conversation-without-an-answer",
    "data.chat",
    reading("x.jsonl", "chat"),
    {"x.jsonl": '{"messages": [{"role": "user", "content": "Hi"}]}\n' + CHATS},
    edit=rewrite("x.jsonl", CHATS),
)
case(
    "a-pair-of-equal-answers",
    "data.pair",
    reading("x.jsonl", "preference"),
    {"x.jsonl": '{"prompt": "Hi", "chosen": "Hello", "rejected": "Hello"}\n' + PAIRS},
    edit=rewrite("x.jsonl", PAIRS),
)
case(
    "no-such-template",
    "model.chat_template",
    ["train", "chat", "--data", "x.jsonl", "--chat_template", "chatlm", *SHORT],
    {"x.jsonl": CHATS},
)
case(
    "a-template-that-changes-texts",
    "data.chat_mask",
    ["train", "chat", "--data", "x.jsonl", "--chat_template", "loud.jinja", *SHORT],
    {"x.jsonl": CHATS, "loud.jinja": LOUD},
    edit=rewrite("x.jsonl", re.sub('"content": "[^"]*"', '"content": "8"', CHATS)),
)
STRICT = (
    "{% for m in messages %}{% if not loop.first and m.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
)
case(
    "a-conversation-that-the-template-refuses",
    "model.chat_template",
    ["train", "chat", "--data", "x.jsonl", "--chat_template", "strict.jinja", *SHORT],
    {
        "x.jsonl": CHATS.replace('"messages": [', '"messages": [{"role": "user", "content": "Hi"}, ', 1),
        "strict.jinja": STRICT,
    },
    edit=rewrite("x.jsonl", CHATS),
)
case(
    "long-conversations",
    "model.length",
    ["train", "chat", "--data", "x.jsonl", "--max_length", "24", *SHORT],
    {"x.jsonl": CHATS},
)


@pytest.fixture(autouse=True)
def own_signals():
    """Put back the handlers of signals, which a launcher in this process leaves."""
    kept = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    }
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.fixture
def kit_of(tmp_path, finished, monkeypatch):
    """Return a function that makes the files of a case in a new folder."""
    kits = []

    def end() -> None:
        for kit in kits:
            kit.end()
        failpoints.disarm()

    def make(each: Case) -> Kit:
        end()
        folder = tmp_path / str(len(kits))
        folder.mkdir()
        monkeypatch.chdir(folder)
        for name, content in each.files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            rewrite(name, content)("")
        kits.append(Kit(folder, finished.path))
        if each.make is not None:
            each.make(kits[-1])
        return kits[-1]

    yield make
    end()


def install(kit: Kit) -> Callable[[str], None]:
    """Return what `pip` does: check that the extra exists, and make the packages found again."""

    def pip(command: str) -> None:
        assert re.match(r"pip (install|uninstall) ", command)
        for extra in re.findall(r"loopwright\[(\w+)\]", command):
            packages = [
                re.split(r"[<>=\[;]", each)[0].replace("-", "_") for each in EXTRAS["optional-dependencies"][extra]
            ]
            assert {each for each, module in sys.modules.items() if module is None} & {*packages, "PIL"}, command
        if Path("site").exists():
            Path("site/broken_module.py").write_text(WORKING)
            sys.modules.pop("broken_module", None)
        else:
            kit.patch.undo()
        if " uninstall " in command:
            shutil.rmtree("site")

    return pip


@pytest.mark.parametrize("name", CASES)
def test_a_fix_that_is_followed_gets_the_command_further(capsys, kit_of, name):
    each = CASES[name]
    kit = kit_of(each)
    code, _, err = run(capsys, *each.words)
    first = failure_in(err)
    assert code != 0 and first.code == each.code and each.contains in first.fix, err
    for place in range(len(first.ways)):
        if place > 0:
            kit = kit_of(each)
            _, _, err = run(capsys, *each.words)  # it may have left something behind, and names the place
        ways = failure_in(err).ways
        assert len(ways) == len(first.ways), err
        way = ways[place]
        words = follow(each.words, way, each.edit, install(kit))
        words += each.more if way.startswith("lw ") else ()
        code, out, err = run(capsys, *words)
        refused = {each.code, "args.unknown", "bug", *(() if "uninstall" in way else ("args.task",))}
        if each.code.startswith("memory.") and place > 0:
            refused.remove(each.code)  # a flag that needs less memory, but here only the first way is enough
        is_further = code == 0 or failure_in(err).code not in refused
        assert is_further, f"{first.text}\n-- {way}: {words}\n{out}{err}"


def test_every_code_has_a_case():
    assert {each.code for each in CASES.values()} | LEFT_TO_OTHERS == set(CODES)


def test_a_row_without_its_last_fields_is_predicted_if_the_run_does_not_need_them(finished, tmp_path):
    (tmp_path / "short.csv").write_text("review,id,note\ngreat film,1,\ngreat film,2\ndull\na,b,c,d\n")
    errors = [(each.get("error") or "").partition(":")[0] for each in finished.predict(tmp_path / "short.csv")]
    assert errors == ["", "", "data.ragged", "data.ragged"]
