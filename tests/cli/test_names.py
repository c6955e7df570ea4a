"""Names: those that were probably meant, numbers in other spellings, and the names of runs."""

import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from cli.streams import run
from loopwright.config.conversion import convert_text
from loopwright.errors import ConfigError, near_names, nearest
from loopwright.report import write_comparison, write_report
from loopwright.run_folder.layout import free_path, new_run_id
from loopwright.sources.files import near_files
from loopwright.tasks import task_names
from tasks.reviews import rows, write_csv


@pytest.mark.parametrize(
    ("word", "known", "near"),
    [
        ("text-clasification", task_names(), "text-classification"),
        ("text_classification", task_names(), "text-classification"),
        ("translate", task_names(), None),
        ("nothing", task_names(), None),
        ("reviev", ["id", "review", "stars"], "review"),
        ("ids", ["id", "review"], "id"),
        ("n", ["a", "b", "no"], None),
        ("neg", ["pos", "negative"], "negative"),
        ("postive", ["negative", "positive"], "positive"),
        ("lr_rate", ["weight_decay", "seed"], None),
        ("tpye", ["types", "type"], "type"),
        ("评论文", ["评论", "标签"], "评论"),
    ],
)
def test_a_name_is_near_if_few_letters_differ(word, known, near):
    assert nearest(word, known) == near


def test_near_names_come_nearest_first_and_each_once():
    assert near_names("sorted", ["sorting", "sort", "sorted_by", "sort"]) == ["sort", "sorted_by"]


def test_a_file_is_near_to_a_file_and_not_to_a_folder(tmp_path):
    (tmp_path / "reviews.cvs").mkdir()
    (tmp_path / "reviews.csv").touch()
    assert near_files(tmp_path / "review.csv") == [str(tmp_path / "reviews.csv")]
    assert near_files(tmp_path / "reviews.tsv", (".yaml",)) == []


@pytest.mark.parametrize(
    ("text", "kind", "meant"),
    [
        ("0,001", float, "0.001"),
        ("1.000,5", float, "1000.5"),
        ("1,000", int, "1000"),
        ("1,000", float, "1000"),
        ("2,000.5", float, "2000.5"),
        ("three", int, "3"),
        ("Ten", float, "10"),
        ("8x", int, "8"),
        ("x8", int, "8"),
        ("20%", float, "0.2"),
        ("20 %", int, "20"),
        ("1e-3,", float, "1e-3"),
        ("10k", int, "10000"),
        ("8.6", int, "9"),
        ("many", int, None),
        ("nan", int, None),
        ("1e999k", int, None),
    ],
)
def test_a_number_in_another_spelling_is_understood(text, kind, meant):
    with pytest.raises(ConfigError) as caught:
        convert_text(text, kind)
    assert caught.value.nearest == meant


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("reviews.csv", "reviews"),
        ("reviews/train.csv", "reviews"),
        ("my Data/data.csv", "my-data"),
        ("评论/train.csv", "评论"),
        ("отзывы.csv", "отзывы"),
    ],
)
def test_the_id_of_a_run_has_the_name_of_its_data(capsys, path, label):
    Path(path).parent.mkdir(exist_ok=True)
    write_csv(Path(path), rows(24))
    words = [
        "train",
        "text-classification",
        "--data",
        path,
        "--max_steps",
        1,
        "--no_rehearsal",
        "--quiet",
        "--threads",
        1,
    ]
    code, out, err = run(capsys, *words)
    assert code == 0, err
    assert re.fullmatch(rf"runs/\d{{4}}-\d{{4}}-{label}-[0-9a-f]{{4}}", out.strip())


def test_an_id_is_a_file_name_in_any_script():
    now = datetime(2026, 11, 18, 5, 15)
    assert re.fullmatch(r"1118-0515-a-b-[0-9a-f]{4}", new_run_id("../A\x00/b\n", now))
    assert new_run_id("!!", now).startswith("1118-0515-run-")
    assert len(new_run_id("很" * 300, now).encode()) < 100


def test_a_free_path_is_beside_those_that_are_taken(tmp_path):
    for name in ("run", "run-2"):
        (tmp_path / name).touch()
    assert free_path(tmp_path / "run") == tmp_path / "run-3" and free_path(tmp_path / "x") == tmp_path / "x"


def test_reports_call_a_run_by_its_folder(finished, tmp_path):
    folders = [shutil.copytree(finished.path, tmp_path / name) for name in ("small rate", "large rate")]
    page = write_report(folders[0], tmp_path / "one.html").read_text()
    assert "<title>small rate ·" in page and "<h1>small rate</h1>" in page
    both = write_comparison(folders, tmp_path / "two.html").read_text()
    assert (
        "</i>small rate</span>" in both
        and "</i>large rate</span>" in both
        and "<title>small rate · large rate<" in both
    )
