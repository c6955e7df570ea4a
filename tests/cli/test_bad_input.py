"""Bad data, models and machines by command line: each ends with a code, what was seen, the fix, and leaves nothing."""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

from cli.streams import run
from loopwright.cli import main
from loopwright.run_folder import read_json
from loopwright.sources import CODES
from loopwright.tasks import pretrained
from tasks.reviews import rows, write_csv, write_jsonl
from tasks.texts import tiny_bert, tiny_gpt2

CONTEXT = "Ada Lovelace wrote the first programme."
MISSING = ["error[data.missing]", "line 22", "--missing_values drop"]
LONG_LINE = b"text,label\n" + b"a" * 10_100_000 + b",b\n"
GOOD = "".join(f"text {number},{'ab'[number % 2]}\n" for number in range(20))


def table(header: str, *lines: str) -> bytes:
    return "\n".join([header, *lines, ""]).encode()


def questions(start: int, answer: str) -> bytes:
    made = [
        {"question": f"Who? {n}", "context": CONTEXT, "answers": {"text": [answer], "answer_start": [start]}}
        for n in range(10)
    ]
    return "".join(json.dumps(row) + "\n" for row in made).encode()


ONE_CLASS = table("text,label", *(f"text {n},a" for n in range(20)))

# Each: the file's name and bytes, the task and its flags, and what the error says.
FILES = {
    "an-empty-file": ("x.csv", b"", [], ["error[data.empty]", "x.csv", "fix: "]),
    "blanks-alone": ("x.csv", b" \n\n", [], ["error[data.empty]", "fix: "]),
    "a-header-alone": ("x.csv", b"text,label\n", [], ["error[data.no_rows]", "fix: "]),
    "one-class": ("x.csv", ONE_CLASS, [], ["error[data.one_class]", "'a'", "fix: "]),
    "labels-of-two-kinds": (
        "x.jsonl",
        b"".join(json.dumps({"text": f"t {n}", "label": ["a", 1][n % 2]}).encode() + b"\n" for n in range(12)),
        [],
        ["error[data.label_type]", "fix: "],
    ),
    "not-utf-8": ("x.csv", "text,label\nnaïve,a\n".encode("latin-1"), [], ["error[data.encoding]", "line 2", "fix: "]),
    "a-column-twice": ("x.csv", b"text,label,text\n" + b"a,b,c\n" * 9, [], ["error[data.duplicate_column]", "'text'"]),
    "a-line-of-10-MB": ("x.csv", LONG_LINE, [], ["error[data.long_row]", "line 2", "10 MB"]),
    "a-nul-byte": ("x.csv", b"text,label\na\0b,c\n", [], ["error[data.nul]", "fix: "]),
    "an-open-quote": ("x.csv", b'text,label\n"a,b\nc,d\n', [], ["error[data.quote]", "fix: "]),
    "ragged-rows": ("x.csv", b"text,label\na,b\na,b,c,d\n", [], ["error[data.ragged]", "line 3", "fix: "]),
    "an-unknown-ending": ("x.dat", b"text", [], ["error[data.ending]", "'.dat'", "--file_kind"]),
    "half-a-json-file": ("x.json", b'[{"text": "a"', [], ["error[data.json]", "fix: "]),
    "no-such-column": (
        "x.csv",
        f"review,stars\n{GOOD}".encode(),
        ["--text_column", "reviev"],
        ["error[data.column]", "columns in x.csv:", "e.g. 'text 0'", "fix: --text_column review"],
    ),
    "a-value-missing": ("x.csv", f"text,label\n{GOOD},a\n".encode(), [], MISSING),
    "too-few-rows": ("x.csv", b"text,label\na,b\n", [], ["error[data."]),
}


def check_refused(capsys, told, *words, code=2):
    """Check that a command line ends with a code, says all of this in an error that has a fix, and leaves nothing."""
    before = {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()}
    capsys.readouterr()
    found, _, err = run(capsys, *words)
    assert found == code, err
    assert [text for text in told if text not in err] == [], err
    assert re.match(r"error\[[a-z_.]+\]: .+", err) and "\n  fix: " in err and "Traceback" not in err
    assert {path: path.stat().st_mtime_ns for path in Path().rglob("*") if path.is_file()} == before
    assert not Path("runs").exists()
    return err


@pytest.mark.parametrize("case", sorted(FILES))
def test_a_file_that_cannot_be_used_is_refused(capsys, case):
    name, content, flags, told = FILES[case]
    Path(name).write_bytes(content)
    check_refused(capsys, told, "train", "text-classification", "--data", name, *flags)


def test_a_byte_order_mark_and_blanks_around_column_names_are_no_matter(capsys):
    Path("x.csv").write_bytes(f"text , label\n{GOOD}".encode("utf-8-sig"))
    assert main(["check", "text-classification", "--data", "x.csv", "--files"]) == 0
    assert "text='text' (guessed)  label='label' (guessed)" in capsys.readouterr().out


def test_answers_that_are_not_in_their_context_and_other_numbers_of_tags_than_words_are_refused(capsys):
    for name, content in (("a", questions(0, "Byron")), ("b", questions(4, "Ada"))):
        Path(f"{name}.jsonl").write_bytes(content)
        told = ["error[data.answers]", "line 1", "fix: "]
        check_refused(capsys, told, "train", "question-answering", "--data", f"{name}.jsonl")
    write_jsonl(Path("x.jsonl"), [{"tokens": ["a", "b"], "tags": ["O"]}] * 9)
    check_refused(capsys, ["error[data.tags]", "line 1"], "train", "token-classification", "--data", "x.jsonl")


def test_a_label_or_a_file_that_is_not_there_is_told_with_the_nearest(capsys, reviews):
    other = [{**row, "stars": "positive"} if place == 0 else row for place, row in enumerate(rows(10, seed=3))]
    write_csv(Path("val.csv"), other)
    told = ["error[data.labels]", "val.csv", "'positive'", "did you mean 'pos'?", "--label_map positive=pos"]
    files = ["--train_file", reviews, "--validation_file", "val.csv"]
    check_refused(capsys, [*told, "--unknown_labels drop"], "train", "text-classification", *files)
    told = ["error[data.file]", "rewiews.csv does not exist", "fix: --data reviews.csv"]
    check_refused(capsys, told, "train", "text-classification", "--data", "rewiews.csv")


def test_data_that_has_changed_since_the_run_began_is_refused_by_every_verb_that_reads_it(
    capsys, finished, tmp_path, monkeypatch
):
    import shutil

    folder = shutil.copytree(finished.path, tmp_path / "copied")
    data = write_csv(tmp_path / "reviews.csv", rows())
    plan = read_json(folder / "data.json")
    plan["files"][0]["path"] = str(data)
    (folder / "data.json").write_text(json.dumps(plan))
    data.write_text(data.read_text().replace("film", "movie"))
    told = ["error[resume.data]", "reviews.csv changed since the run started", "--allow_changed_data"]
    check_refused(capsys, told, "evaluate", folder)
    assert main(["evaluate", str(folder), "--allow_changed_data"]) == 0
    code, _, err = run(capsys, "resume", folder, "--epochs", 3)
    assert code == 2 and "error[resume.data]" in err


def test_models_that_cannot_be_used_are_refused_before_anything_is_written(capsys, reviews, monkeypatch, tmp_path):
    words = ["train", "text-classification", "--data", reviews]
    bert = tiny_bert(tmp_path / "bert")
    cache = tmp_path / "cache"
    (cache / "models--bert-base-uncased").mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    told = ["error[model.offline]", "'bert-base-uncaesd'", "similar names in the cache: bert-base-uncased"]
    check_refused(capsys, [*told, "fix: --model bert-base-uncased"], *words, "--model", "bert-base-uncaesd")
    told = ["error[model.folder]", f"fix: --model {bert}"]
    check_refused(capsys, told, *words, "--model", "./brt")
    told = ["error[model.length]", "--max_length 128 is longer", "fix: --max_length 64"]
    check_refused(capsys, told, *words, "--model", bert, "--max_length", 128)
    told = ["error[model.task]", "the task needs an encoder and a decoder", "fix: leave out --model"]
    write_csv(Path("pairs.csv"), [{"source": f"a {n}", "target": f"b {n}"} for n in range(20)])
    check_refused(capsys, told, "train", "translation", "--data", "pairs.csv", "--model", bert)
    bare = tiny_gpt2(tmp_path / "bare", pad_token=None, eos_token=None, bos_token=None)
    told = ["error[model.pad_token]", 'fix: set "pad_token"']
    check_refused(capsys, told, *words, "--model", bare)


@pytest.mark.parametrize(
    ("module", "words", "told"),
    [
        ("transformers", ["text-classification"], ["text-classification needs the package transformers", "[text]"]),
        ("rouge_score", ["summarization"], ["'rouge'", "rouge-score", "[text]"]),
        ("sacrebleu", ["translation"], ["sacrebleu", "[text]"]),
        ("nervaluate", ["token-classification"], ["nervaluate", "[text]"]),
        ("pyarrow", ["text-classification", "--data", "x.parquet"], ["pyarrow", "[arrow]"]),
        ("peft", ["text-classification", "--lora"], ["--lora needs peft", "[lora]"]),
    ],
    ids=["transformers", "rouge", "sacrebleu", "nervaluate", "pyarrow", "peft"],
)
def test_a_package_that_is_missing_is_told_with_the_line_that_installs_it(capsys, monkeypatch, module, words, told):
    write_jsonl(
        Path("x.jsonl"),
        [
            {"text": f"t {n}", "label": "ab"[n % 2], "tokens": ["a", str(n)], "tags": ["O", "B-X"], "source": f"s {n}"}
            | {"target": f"t {n}", "document": f"d {n}", "summary": f"s {n}"}
            for n in range(20)
        ],
    )
    Path("x.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, module, None)
    columns = {"summarization": ["--source_column", "document"]}.get(words[0], [])
    data = [] if "--data" in words else ["--data", "x.jsonl"]
    told = ["error[install.extra]", "fix: pip install 'loopwright", *told]
    check_refused(capsys, told, "train", *words, *data, *columns)


def test_a_model_that_does_not_fit_into_memory_ends_with_3(capsys, reviews, tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "check_size", lambda *given: None)  # which would blame the folder
    folder = tiny_bert(tmp_path / "bert")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": 10**13}))
    told = ["error[memory.train]", "out of memory", "fix: --batch 1"]
    check_refused(capsys, told, "train", "text-classification", "--data", reviews, "--model", folder, code=3)


def codes_in_tests(folder: Path) -> set[str]:
    """Return the codes that tests really assert: given to a helper that refuses, compared, matched or printed."""
    found: set[str] = set()
    for path in sorted(folder.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            texts: list[ast.expr | None] = []
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                texts += node.args if name in ("refused", "assert_refused", "refusal") else []
                texts += [keyword.value for keyword in node.keywords if name == "raises" and keyword.arg == "match"]
            elif isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "code":
                texts += node.comparators
            found |= {str(each.value).replace("\\", "") for each in texts if isinstance(each, ast.Constant)}
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"error\[([a-z_.]+)\]", node.value))
    return found


def test_each_code_that_explain_errors_lists_is_asserted_by_a_test(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    assert main(["explain", "errors"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed == set(CODES) and len(listed) >= 40
    assert sorted(listed - codes_in_tests(Path(__file__).resolve().parents[1])) == []


def test_graphs_without_a_gpu_are_refused_before_a_run_is_made(capsys):
    Path("x.csv").write_text(f"text,label\n{GOOD}")
    flags = ["--step_mode", "graph", "--use_cpu"]
    code, _, err = run(capsys, "train", "text-classification", "--data", "x.csv", *flags)
    assert code == 2 and "needs a CUDA device" in err and not Path("runs").exists()


@pytest.mark.parametrize(("given", "near"), [("grap", "graph"), ("compiled", "compile"), ("fast", "auto")])
def test_a_value_that_a_flag_cannot_have_is_told_with_the_nearest_that_it_can(capsys, given, near):
    told = [f"--step_mode {given}: expected one of auto, eager, compile, graph", f"fix: --step_mode {near}"]
    err = check_refused(capsys, told, "train", "text-classification", "--data", "x.csv", "--step_mode", given)
    assert "argparse" not in err and "argument" not in err


def test_the_fix_of_a_value_is_what_was_meant_rather_than_the_default(capsys):
    told = ["--eval_strategy stepz: eval_strategy must be one of no, steps, epoch", "fix: --eval_strategy steps"]
    err = check_refused(capsys, told, "train", "text-classification", "--data", "x.csv", "--eval_strategy", "stepz")
    assert "did you mean" not in err
