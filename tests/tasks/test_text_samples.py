"""Texts in the run folder: the first training batch, decoded, and what a model writes at its evaluations."""

import json

import pytest
import torch

from loopwright import api
from loopwright.errors import ConfigError
from loopwright.runs.job import build_job, load_data
from loopwright.runs.settings import settle
from loopwright.sources import DataPlan
from loopwright.tasks import get_task
from loopwright.tasks.base import Origin
from loopwright.tasks.data import RunData
from loopwright.tasks.text import causal_lm
from loopwright.tasks.text import samples as text_samples
from tasks.reviews import events, read_lines
from tasks.texts import FLAGS, lines, tiny_gpt2, write_text


def paragraphs(run):
    written = (run.path / "samples" / "train_batch0.txt").read_text(encoding="utf-8")
    return [part.splitlines() for part in written.strip().split("\n\n")]


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return tiny_gpt2(tmp_path_factory.mktemp("models") / "gpt2")


def train(folder, name, gpt2, **flags):
    data = write_text(folder / "lines.txt", lines())
    settings = {**FLAGS, "block_size": 32, "max_steps": 8, "eval_strategy": "steps", "eval_steps": 4, **flags}
    return api.train("causal-lm", data=data, model=gpt2, output_dir=folder / name, **settings)


def test_the_first_batch_is_written_with_its_rows_and_labels(finished):
    about, *samples = paragraphs(finished)
    assert about[0].startswith("16 samples of ") and about[0].endswith(" % of them padding")
    assert len(samples) == 8
    rows = DataPlan.from_json(finished.folder.data.read_text()).rows("train")
    names = json.loads(finished.folder.data.read_text())["labels"]["names"]
    for head, text, label in samples:
        row = rows[int(head.removeprefix("row "))]
        assert label == f"label: {names[row['label']]}"
        words = text.removeprefix("text: ").split(" (+ ")[0].removeprefix("[CLS]").removesuffix("[SEP]")
        assert words.strip() == row["text"].lower()


def test_the_same_starts_are_continued_at_each_evaluation_and_at_the_end(tmp_path, gpt2):
    run = train(tmp_path, "run", gpt2)
    written = read_lines(run.path / "eval" / "samples.jsonl")
    assert [line["update"] for line in written] == [4, 8, None]
    starts = [[sample["start"] for sample in line["samples"]] for line in written]
    assert starts[0] == starts[1] == starts[2] and 1 < len(starts[0]) == len(set(starts[0]))
    assert all(start.startswith("the ") and len(start.split()) == 5 for start in starts[0])
    assert written[1]["samples"] == written[2]["samples"]  # the last evaluation was the best
    assert paragraphs(run)[1][2] == "asked for: 32 next tokens"


def test_writing_samples_does_not_change_the_training(tmp_path, gpt2):
    runs = [train(tmp_path, f"run-{number}", gpt2, num_samples=number) for number in (0, 3)]
    assert not (runs[0].path / "eval" / "samples.jsonl").exists()
    weights = [(run.path / "model" / "model.safetensors").read_bytes() for run in runs]
    assert weights[0] == weights[1] and events(runs[0].path) == events(runs[1].path)


def test_a_resumed_run_drops_samples_newer_than_its_checkpoint(tmp_path, gpt2):
    run = train(tmp_path, "run", gpt2)
    path = run.path / "eval" / "samples.jsonl"
    first = read_lines(path)[:2]
    text_samples.add_samples(path, 99, [{"start": "a", "written": "b"}])
    with path.open("a") as file:
        file.write('{"update": 100, "sam')
    api.resume(run.path, max_steps=12, quiet=True)
    written = read_lines(path)
    assert [line["update"] for line in written] == [4, 8, 9, 12, None]  # with the end of the epoch
    assert written[:2] == first


@pytest.mark.parametrize("error", [RuntimeError("no generation here"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_a_model_that_cannot_generate_samples_is_still_trained(tmp_path, gpt2, monkeypatch, error):
    expected = train(tmp_path, "expected", gpt2, num_samples=0)

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(causal_lm, "continued", refuse)
    run = train(tmp_path, "run", gpt2)
    assert not (run.path / "eval" / "samples.jsonl").exists()
    weights = [(each.path / "model" / "model.safetensors").read_bytes() for each in (expected, run)]
    assert weights[0] == weights[1]
    log = (run.path / "log.txt").read_text()
    assert log.count(f"no samples of the model's output ({type(error).__name__}: {error}): the run continues") == 1
    assert log.count(f"no pictures and samples at the end ({type(error).__name__}: {error})") == 1


def test_writing_samples_leaves_every_module_in_its_mode(tmp_path, gpt2):
    task = get_task("causal-lm")
    flags = {name: value for name, value in FLAGS.items() if name != "quiet"}
    data = write_text(tmp_path / "lines.txt", lines())
    settings = settle(task, {**flags, "data": data, "model": gpt2, "block_size": 32})
    job = build_job(task, RunData(task.preflight(settings.args)), settings, Origin(gpt2))
    load_data(job)
    job.model.train()
    job.model.transformer.h[0].eval()
    modes = [module.training for module in job.model.modules()]
    assert len(task.written_samples(job, [])) > 1
    assert [module.training for module in job.model.modules()] == modes


def test_a_negative_number_of_samples_is_refused(tmp_path, gpt2):
    with pytest.raises(ConfigError, match="num_samples must be at least 0, got -1"):
        train(tmp_path, "run", gpt2, num_samples=-1)


def test_long_texts_are_cut_and_stay_on_one_line():
    assert text_samples.cut("a\nb") == "a ↵ b"
    assert text_samples.cut("x" * 3000) == "x" * 2000 + " … (3,000 characters)"
