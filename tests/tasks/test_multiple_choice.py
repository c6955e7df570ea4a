"""multiple-choice end to end: SWAG's columns, lists of choices that differ in number, resuming, bad rows."""

import random

import pytest
import torch
from safetensors.torch import load_file

from loopwright import api, cli
from loopwright.errors import InputError
from loopwright.runs.finish import evaluate
from loopwright.tasks.text.models import GroupCollator
from sample_data import SAMPLES
from tasks.conftest import FLAGS
from tasks.dirty_inputs import assert_aligned
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines, write_csv, write_jsonl
from tasks.runs import check_resume, train_in

COLOURS = ("red", "blue", "green", "pink")


def rows(count=112, seed=0):
    """Return rows in SWAG's columns: the right ending is the colour of the first sentence."""
    chosen = random.Random(seed)
    made = []
    for number in range(count):
        colour, endings = chosen.choice(COLOURS), chosen.sample(COLOURS, 4)
        row = {"sent1": f"it is {colour} number {number}", "sent2": "so"}
        row |= {f"ending{place}": ending for place, ending in enumerate(endings)}
        made.append({**row, "label": endings.index(colour)})
    return made


def as_lists(made):
    """Return the rows with one list of choices, of which some rows have fewer."""
    changed = []
    for number, row in enumerate(made):
        choices = [f"so {row[f'ending{place}']}" for place in range(4)]
        right = choices[row["label"]]
        choices = [each for each in choices if each == right or number % 2 or each != choices[-1]]
        changed.append({"question": row["sent1"], "choices": choices, "answer": choices.index(right)})
    return changed


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    folder = tmp_path_factory.mktemp("choices")
    data = write_csv(folder / "swag.csv", rows())
    return train_in(folder, "multiple-choice", data=data, **{**FLAGS, "epochs": 5})


def test_the_right_ending_is_learnt_and_predicted_and_the_worst_rows_are_written(learnt):
    assert learnt.metrics["accuracy"] >= 0.9
    assert learnt.result["baselines"]["chance"] == {"accuracy": 0.25}
    assert set(learnt.result["baselines"]) == {"chance", "majority"}
    low, high = learnt.result["intervals"]["accuracy"]
    assert low <= learnt.metrics["accuracy"] <= high
    (found,) = learnt.predict(["it is blue", "so red", "so blue"])
    assert (found["choice"], found["text"]) == (1, "so blue")
    assert found["score"] == max(found["scores"]) and sum(found["scores"]) == pytest.approx(1, abs=1e-5)
    predictions = read_lines(learnt.path / "eval" / "predictions.jsonl")
    assert_recomputed(learnt)
    assert len(predictions[0]["choices"]) == 4 and predictions[0]["start"] == "so"
    worst = [each["loss"] for each in read_lines(learnt.path / "eval" / "worst.jsonl")]
    assert worst == sorted(worst, reverse=True)


def test_transformers_opens_the_model_and_chooses_the_same(learnt):
    from transformers import AutoModelForMultipleChoice, AutoTokenizer

    folder = learnt.path / "model"
    model, tokenizer = AutoModelForMultipleChoice.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(["it is pink"] * 3, ["so red", "so pink", "so green"], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**{name: value[None] for name, value in inputs.items()}).logits
    (found,) = learnt.predict(["it is pink\tso red\tso pink\tso green"])
    assert found["scores"] == pytest.approx(logits.softmax(-1)[0].tolist(), abs=1e-5)


def test_predictions_do_not_depend_on_the_rest_of_the_batch(learnt):
    several = [
        {"context": "it is red", "choices": ["so red", "so blue"]},
        {"context": "it is green", "start": "so", "choices": ["red", "blue", "green", "pink"]},
    ]
    together = learnt.predict(several)
    assert [each["text"] for each in together] == ["so red", "green"]
    for row, found in zip(several, together, strict=True):
        (alone,) = learnt.predict([row])
        assert alone["choice"] == found["choice"]
        assert alone["scores"] == pytest.approx(found["scores"], abs=1e-5)


def test_lists_that_differ_in_length_are_trained_resumed_and_evaluated(tmp_path):
    data = write_jsonl(tmp_path / "lists.jsonl", as_lists(rows(64)))
    flags = {**FLAGS, "data": data}
    result, resumed, _ = check_resume("multiple-choice", tmp_path, {"epochs": 1}, {"epochs": 2}, **flags)
    assert 0.25 < result["baselines"]["chance"]["accuracy"] < 1 / 3
    assert resumed.metrics == resumed.evaluate()
    other = resumed.evaluate(write_jsonl(tmp_path / "other.jsonl", as_lists(rows(12, seed=4))))
    assert set(other) == {"accuracy", "ece", "loss"}


def test_adapters_are_trained_on_an_earlier_run_and_merged(learnt, tmp_path):
    data = write_csv(tmp_path / "more.csv", rows(40, seed=6))
    run = api.train("multiple-choice", data=data, model=learnt.path, lora=True, **{**FLAGS, "epochs": 1})
    before, after = (load_file(folder / "model" / "model.safetensors") for folder in (learnt.path, run.path))
    assert set(before) == set(after)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert any("attn" in name for name in changed) and "classifier.weight" in changed
    assert not [name for name in changed if "embeddings" in name]


def test_the_loss_does_not_depend_on_the_batch(learnt):
    made = [{**row, "context": row["sent1"], "start": "so"} for row in rows(20, seed=2)]
    made = [{**row, "choices": [row[f"ending{place}"] for place in range(4)]} for row in made]
    losses = []
    for size in (3, 32):
        job = api.load_run(learnt.folder)
        job.training.per_device_eval_batch_size = size
        dataset = job.task.create_dataset(job, made, is_labelled=True)
        losses.append(evaluate(job, dataset, None, print)[0])
    assert losses[0]["accuracy"] == losses[1]["accuracy"]
    assert losses[0]["loss"] == pytest.approx(losses[1]["loss"], rel=1e-5)


def test_a_batch_is_padded_with_marked_copies():
    class Padder:
        pad_token_id = 0
        padding_side = "right"
        model_input_names = ("input_ids",)

    two, three = {"input_ids": [[5], [6, 7]], "labels": 1}, {"input_ids": [[1], [2], [3]], "labels": 2}
    batch = GroupCollator(Padder())([{**two, "position": 4}, {**three, "position": 2}])
    assert batch["input_ids"].tolist() == [[[5, 0], [6, 7], [5, 0]], [[1, 0], [2, 0], [3, 0]]]
    assert batch["is_text"].tolist() == [[True, True, False], [True, True, True]]
    assert (batch["labels"].tolist(), batch["position"].tolist()) == ([1, 2], [4, 2])


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"choices": ["so red"], "answer": 0}, "1 choice: at least two are needed"),
        ({"choices": ["so red", "so blue"], "answer": 3}, "has 2 choices, and its label is 3"),
    ],
)
def test_rows_without_a_right_choice_are_refused_with_their_place(tmp_path, bad, words):
    made = as_lists(rows(20))
    made.insert(6, {"question": "it is red", **bad})
    with pytest.raises(InputError) as caught:
        api.train("multiple-choice", data=write_jsonl(tmp_path / "bad.jsonl", made), **FLAGS)
    assert caught.value.code == "data.value"
    assert words in str(caught.value) and "line 7" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]


def test_labels_that_are_not_positions_and_too_few_texts_are_refused(learnt, tmp_path):
    made = [{**row, "label": row["label"] + 1} for row in rows(20)]
    with pytest.raises(InputError, match="unknown '4'"):
        api.train("multiple-choice", data=write_csv(tmp_path / "bad.csv", made), **FLAGS)
    for texts in (["it is red"], ["it is red", "so red"], ["it is red\tso red"]):
        with pytest.raises(InputError, match="chooses among texts"):
            learnt.predict(texts)
    short = {"it is red\tso red": "data.value", "": "data.missing", "it is red\t\tso red": "data.missing"}
    assert_aligned(learnt, ["it is red\tso red\tso blue"], short)


def test_the_sample_of_swag_is_trained_resumed_and_predicted_by_command(tmp_path, capsys):
    swag = SAMPLES / "swag" / "sample.json"
    words = ["multiple-choice", "--train_file", swag, "--validation_file", swag, "--keep_duplicates", "--epochs", "1"]
    code = cli.main(["train", *map(str, words), "--batch", "4", "--threads", "1", "--out", str(tmp_path / "run")])
    moved = str((tmp_path / "run").rename(tmp_path / "moved"))
    assert code == cli.main(["resume", moved, "--epochs", "2"]) == cli.main(["evaluate", moved]) == 0
    capsys.readouterr()
    assert cli.main(["predict", moved, str(swag)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(read_lines(swag))
