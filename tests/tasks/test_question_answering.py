"""question-answering end to end: spans over several features of a row, no answers, generated answers, bad input."""

import json
import pickle
import random
from functools import partial
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from loopwright import api
from loopwright.errors import ConfigError, InputError
from loopwright.tasks.text.answers import AnswerRules, best_answers, predicted_row, scored_row
from loopwright.tasks.text.models import train_tokenizer
from loopwright.tasks.text.question_answering import QuestionAnswering, best_spans
from loopwright.tasks.text.question_features import SpanCollator, WindowDataset, WindowEncoder, token_span
from sample_data import SAMPLES
from tasks.conftest import FLAGS
from tasks.dirty_inputs import assert_aligned
from tasks.intervals import assert_loss_has_interval
from tasks.recomputed import assert_recomputed
from tasks.reviews import read_lines, write_jsonl
from tasks.runs import refusal, train_in
from tasks.texts import save_bert

TASK = QuestionAnswering()
NAMES = ("red", "green", "blue", "black", "white", "cat", "dog", "horse", "mouse", "duck")
FILLERS = ("it", "was", "seen", "by", "the", "old", "river", "at", "noon")


def questions(count=64, seed=0, length=40, unanswered=0.0):
    """Return questions about contexts with several names, of which the one after "very" is meant."""
    chosen = random.Random(seed)
    made = []
    for number in range(count):
        words = chosen.choices(FILLERS, k=length)
        for place in chosen.sample(range(length), length // 4):
            words[place] = chosen.choice(NAMES)
        place = chosen.randrange(length - 1)
        words[place : place + 2] = "very", chosen.choice(NAMES)
        if chosen.random() < unanswered:
            words[place] = "not"
        context = f"Row {number} : {' '.join(words)} ."
        start = context.find("very ") + len("very ")
        answers = {"text": [words[place + 1]], "answer_start": [start]} if words[place] == "very" else None
        answers = answers or {"text": [], "answer_start": []}
        made.append({"id": f"q{number}", "question": "Which one is meant ?", "context": context, "answers": answers})
    return made


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Return a run that has ended, with contexts that need several features; its folder must be left as it is."""
    folder = tmp_path_factory.mktemp("answered")
    data = write_jsonl(folder / "questions.jsonl", questions(150, length=24))
    flags = {**FLAGS, "epochs": 3, "lr": 3e-3, "max_length": 32, "stride": 8, "n_best": 5}
    return train_in(folder, "question-answering", data=data, **flags)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([row["context"] for row in questions()] + ["which one is meant ?"], 400)


def test_a_small_model_finds_the_answer_over_all_features_of_a_row(answered):
    assert answered.status == "done"
    assert set(answered.metrics) == {"exact_match", "f1", "loss"}
    baseline = answered.result["baselines"]["frequent answer"]
    assert answered.metrics["f1"] >= max(80, baseline["f1"] + 25)
    low, high = answered.result["intervals"]["f1"]
    assert low <= answered.metrics["f1"] <= high
    assert_loss_has_interval(answered)
    made = questions(20, seed=4, length=30)
    predicted = answered.predict([{"question": row["question"], "context": row["context"]} for row in made])
    assert sum(each["answer"] == row["answers"]["text"][0] for each, row in zip(predicted, made, strict=True)) >= 15
    for each, row in zip(predicted, made, strict=True):
        assert row["context"][each["start"] : each["end"]] == each["answer"] == each["n_best"][0]["text"]
        shares = [answer["score"] for answer in each["n_best"]]
        assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(1, abs=1e-4)
        assert len(each["n_best"]) == 5


def test_a_row_with_several_features_is_scored_and_written_once_also_when_evaluated_again(answered, tmp_path):
    predictions = read_lines(answered.path / "eval" / "predictions.jsonl")
    plan = json.loads((answered.path / "data.json").read_text())
    assert [each["position"] for each in predictions] == list(range(plan["splits"]["validation"]["num_rows"]))
    assert_recomputed(answered)
    assert all(each["prediction"] in each["context"] and each["id"].startswith("q") for each in predictions)
    worst = [each["loss"] for each in read_lines(answered.path / "eval" / "worst.jsonl")]
    assert worst == sorted(worst, reverse=True)
    assert answered.evaluate() == answered.metrics
    other = answered.evaluate(write_jsonl(tmp_path / "other.jsonl", questions(6, seed=8)))
    assert set(other) == {"exact_match", "f1", "loss"}
    assert len(read_lines(answered.path / "eval" / "other" / "predictions.jsonl")) == 6


def test_the_loss_of_a_row_does_not_depend_on_the_padding_that_longer_rows_bring(answered, tmp_path):
    made = [*questions(1, length=3), *questions(1, seed=1, length=12)]  # one feature each
    losses = [
        answered.evaluate(write_jsonl(tmp_path / "rows.jsonl", rows))["loss"] for rows in (made, made[:1], made[1:])
    ]
    assert losses[0] == pytest.approx((losses[1] + losses[2]) / 2, rel=1e-5)


def test_a_file_pairs_and_a_tab_are_predicted_alike(answered, tmp_path):
    made = questions(4, seed=6)
    asked = [{"question": row["question"], "context": row["context"]} for row in made]
    file = write_jsonl(tmp_path / "new.jsonl", asked)
    pairs = [part for row in made for part in (row["question"], row["context"])]
    tabs = [f"{row['question']}\t{row['context']}" for row in made]
    assert answered.predict(file) == answered.predict(pairs) == answered.predict(tabs)
    with pytest.raises(InputError, match="a question and its context are needed, got 1 text"):
        answered.predict(["Which one ?"])
    with pytest.raises(InputError, match="no row to predict has context"):
        answered.predict([{"question": "Which one ?"}])
    assert_aligned(answered, tabs[:2], {"Which one ?": "data.missing", "": "data.missing", "\tred": "data.missing"})
    far = [{**row, "answers": {"text": ["not there"], "answer_start": [3]}} for row in asked]  # answers are not read
    assert answered.predict(write_jsonl(tmp_path / "far.jsonl", far)) == answered.predict(file)


def test_limits_count_rows_and_not_features(tmp_path):
    data = write_jsonl(tmp_path / "questions.jsonl", questions(24))
    flags = {**FLAGS, "epochs": 1, "max_length": 32, "stride": 8, "max_train_samples": 2, "max_eval_samples": 3}
    run = api.train("question-answering", data=data, **flags)
    predictions = read_lines(run.path / "eval" / "predictions.jsonl")
    assert [each["position"] for each in predictions] == [0, 1, 2]
    assert all(len(each["n_best"]) > 1 for each in predictions)


def test_unanswerable_questions_are_detected_and_scored_as_squad_2(tmp_path):
    data = write_jsonl(tmp_path / "questions.jsonl", questions(140, length=12, unanswered=0.4))
    run = api.train("question-answering", data=data, **{**FLAGS, "epochs": 4, "lr": 3e-3})
    assert "version_2_with_negative: true" in (run.path / "config.yaml").read_text()
    assert {"exact", "f1", "HasAns_f1", "NoAns_f1", "best_f1", "best_f1_thresh", "loss"} <= set(run.metrics)
    assert run.metrics["f1"] >= run.result["baselines"]["frequent answer"]["f1"] + 30
    predictions = read_lines(run.path / "eval" / "predictions.jsonl")
    for each in predictions:
        assert (each["prediction"] == "") == (each["no_answer_score"] > 0)
    assert_recomputed(run)
    answers = run.predict([part for row in questions(6, 3, 12, 0.5) for part in (row["question"], row["context"])])
    assert all((each["answer"] == "") == (each["start"] is None) == (each["no_answer_score"] > 0) for each in answers)


def test_an_encoder_decoder_generates_the_answer_with_the_same_scores(tmp_path, tokenizer):
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": len(tokenizer)}
    start = dict.fromkeys(("pad_token_id", "decoder_start_token_id"), tokenizer.pad_token_id)
    config = T5Config(eos_token_id=tokenizer.sep_token_id, **start, **sizes)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    tokenizer.save_pretrained(tmp_path / "t5")
    data = write_jsonl(tmp_path / "questions.jsonl", questions(24, length=6, unanswered=0.2))
    flags = {**FLAGS, "epochs": 1, "model": tmp_path / "t5", "max_answer_length": 4, "num_beams": 2}
    run = api.train("question-answering", data=data, **flags)
    assert 'answer_by: "generation"' in (run.path / "config.yaml").read_text()
    assert {"exact", "f1", "loss"} <= set(run.metrics)
    held = [bool(line["reference"]) for line in read_lines(run.path / "eval" / "predictions.jsonl")]
    assert run.result["baselines"]["no answer"]["exact"] == pytest.approx(100 * held.count(False) / len(held))
    assert_recomputed(run)
    assert_loss_has_interval(run)
    (predicted,) = run.predict(["Which one ?", "the red river"])
    assert set(predicted) == {"answer", "score", "n_best"} and len(predicted["n_best"]) == 2
    assert run.evaluate() == run.metrics
    resumed = api.resume(run.path.rename(tmp_path / "moved"), epochs=2, quiet=True)
    assert resumed.status == "done" and resumed.result["epochs"] == 2
    adapted = api.train("question-answering", data=data, lora=True, **flags)
    assert adapted.status == "done" and adapted.evaluate() == adapted.metrics
    weights = load_file(adapted.path / "model" / "model.safetensors")
    assert not [name for name in weights if "lora" in name]
    (one,) = adapted.predict(["Which one ?", "the red river"], num_beams=1, max_new_tokens=2)
    assert set(one) == {"answer"}


def test_adapters_of_a_model_that_marks_spans_are_trained_and_merged(tmp_path, tokenizer):
    from transformers import AutoModelForQuestionAnswering

    save_bert(tmp_path / "bert", "BertModel", tokenizer, max_position_embeddings=512)
    data = write_jsonl(tmp_path / "questions.jsonl", questions(16, length=8))
    run = api.train("question-answering", data=data, model=tmp_path / "bert", lora=True, **{**FLAGS, "epochs": 1})
    weights = AutoModelForQuestionAnswering.from_pretrained(run.path / "model").state_dict()
    assert not [name for name in weights if "lora" in name]
    assert len(run.predict(["Which one ?", "the very red river"])) == 1


def test_the_sample_of_squad_trains_evaluates_and_predicts(tmp_path):
    data = SAMPLES / "SQUAD" / "sample.json"
    flags = {**FLAGS, "epochs": 1, "train_file": data, "validation_file": data, "keep_duplicates": True}
    run = api.train("question-answering", output_dir=tmp_path / "run", max_length=96, **flags)
    metrics = run.metrics
    assert {"exact", "f1", "best_f1"} <= set(metrics)
    assert_recomputed(run)
    moved = api.Run.find(run.path.rename(tmp_path / "moved"))
    assert moved.evaluate() == metrics
    assert len(moved.predict(data)) == len(json.loads(data.read_text())["data"])


def targets_as_text(feature, start, end):
    """Return the characters that the targets of a feature mean."""
    return feature["context"][feature["offsets"][start][0] : feature["offsets"][end][1]].strip()


def test_the_features_of_a_row_overlap_and_mark_its_answer_wherever_it_is_whole(tokenizer):
    dataset = WindowDataset(questions(12), WindowEncoder(tokenizer, 32, 8, is_labelled=True))
    features = [dataset[index] for index in range(len(dataset))]
    assert len(features) > 24
    for position, row in enumerate(dataset.rows):
        own = [each for each in features if each["position"] == position]
        assert [each["window"] for each in own] == list(range(own[0]["num_windows"]))
        marked = [each for each in own if each["start_positions"] != each["null_index"]]
        assert marked
        for each in marked:
            assert targets_as_text(each, each["start_positions"], each["end_positions"]) == row["answers"]["text"][0]
        covered = {place for each in own for start, end in each["offsets"] for place in range(start, end)}
        assert covered >= set(range(1, len(row["context"])))
        shared = [each["offsets"] for each in own]
        assert all(set(map(tuple, one)) & set(map(tuple, two)) - {(-1, -1)} for one, two in pairwise(shared))
    assert pickle.loads(pickle.dumps(dataset))[len(dataset) - 1] == features[-1]  # as a worker process gets it
    with pytest.raises(IndexError):
        dataset[len(dataset)]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("template", ["[CLS] $A [SEP] $B [SEP]", "$A [SEP] $B [SEP] [CLS]"], ids=["first", "last"])
def test_targets_and_the_null_position_are_right_wherever_the_cls_token_and_the_padding_are(side, template):
    from tokenizers import processors

    tokenizer = train_tokenizer([row["context"] + row["question"] for row in questions()], 400)
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP] [CLS]", pair=template.replace("$B [SEP]", "$B:1 [SEP]:1"), special_tokens=ids
    )
    tokenizer.padding_side = side
    made = [questions(6, length=length)[2] for length in (6, 9, 30)]
    dataset = WindowDataset(made, WindowEncoder(tokenizer, 28, 6, is_labelled=True))
    batch = SpanCollator(tokenizer, None)([dataset[index] for index in range(len(dataset))])
    rows = torch.arange(len(dataset))
    assert (batch["input_ids"][rows, batch["null_index"]] == tokenizer.cls_token_id).all()
    assert (batch["offsets"][batch["attention_mask"] == 0] == -1).all() and (batch["attention_mask"] == 0).any()
    for row in rows:
        start, end = (int(batch[name][row]) for name in ("start_positions", "end_positions"))
        if start != batch["null_index"][row]:
            shown = {"context": batch["context"][row], "offsets": batch["offsets"][row].tolist()}
            assert targets_as_text(shown, start, end) == batch["reference"][row][0]
    assert (batch["start_positions"] != batch["null_index"]).sum() >= 3


def test_a_question_without_room_for_the_context_is_truncated(tokenizer):
    encode = WindowEncoder(tokenizer, 32, 8, is_labelled=False)
    row = {"question": "Which " * 60 + "?", "context": "the river was seen by the old cat at noon . " * 3}
    blank = WindowEncoder(tokenizer, 32, 8, is_labelled=True)({**row, "answers": {"text": [" "], "answer_start": [0]}})
    assert blank[0]["reference"] == [" "] and blank[0]["start_positions"] == blank[0]["null_index"]  # has an answer
    features = encode(row)
    assert all(len(each["input_ids"]) <= 32 for each in features)
    assert max(end for each in features for _, end in each["offsets"]) >= len(row["context"].rstrip()) - 1
    assert encode.counts([row, {**row, "context": "short"}]) == [len(features), 1]


def test_spans_are_found_as_tokens_if_all_there_and_the_best_among_all_valid_ones():
    offsets = [[-1, -1], [4, 8], [8, 12], [12, 15], [-1, -1]]
    assert token_span(offsets, 9, 11) == (2, 2)  # blanks before a word belong to its token
    assert token_span(offsets, 4, 15) == (1, 3)
    assert token_span(offsets, 3, 8) is None and token_span(offsets, 12, 16) is None
    assert token_span([[-1, -1]], 0, 1) is None
    generator = torch.Generator().manual_seed(0)
    start, end = (torch.randn(3, 9, generator=generator) for _ in range(2))
    is_allowed = torch.rand(3, 9, generator=generator) > 0.3
    scores, firsts, lasts = best_spans(start, end, is_allowed, 4, 6)
    for row in range(3):
        spans = [
            (float(start[row, first] + end[row, last]), first, last)
            for first in range(9)
            for last in range(first, min(first + 4, 9))
            if is_allowed[row, first] and is_allowed[row, last]
        ]
        expected = sorted(spans, reverse=True)[:6]
        found = list(zip(scores[row].tolist(), firsts[row].tolist(), lasts[row].tolist(), strict=True))
        assert [each for each in found if each[0] > float("-inf")] == expected
    assert best_spans(start, end, is_allowed & False, 99, 99)[0].max() == float("-inf")


def window(number=0, spans=(), null_score=0.0, *, context="the red cat", position=0, num_windows=2, **more):
    described = {"position": position, "window": number, "num_windows": num_windows, "context": context}
    return {**described, "spans": list(spans), "null_score": null_score, "loss": 1.0, "reference": ["red"], **more}


def test_answers_of_several_windows_are_ranked_together_and_count_once():
    windows = [window(0, [(2.0, 3, 7), (1.0, 0, 3)]), window(1, [(3.0, 4, 7), (2.5, 8, 11), (9.0, 3, 4)])]
    answers, difference = best_answers(windows, AnswerRules(2, False, 0.0))
    assert [(each["text"], each["start"], each["end"]) for each in answers] == [("red", 4, 7), ("cat", 8, 11)]
    assert sum(each["score"] for each in answers) == pytest.approx(1, abs=1e-5)
    assert difference == -3.0


def test_a_question_is_unanswered_if_no_window_has_an_answer_that_scores_enough():
    windows = [window(0, [(1.0, 4, 7)], 6.0), window(1, [(4.0, 8, 11)], 4.5)]
    assert predicted_row(windows, AnswerRules(3, True, 0.0))["answer"] == ""
    loose = predicted_row(windows, AnswerRules(3, True, 0.5))
    assert loose["answer"] == "cat" and loose["no_answer_score"] == 0.5 and loose["score"] < 0.5
    assert predicted_row(windows, AnswerRules(3, False, 0.0))["answer"] == "cat"
    assert predicted_row([window(0, [])], AnswerRules(3, False, 0.0))["answer"] == ""


def test_a_confident_answer_that_contradicts_the_data_is_a_suspect():
    sure = [window(0, [(9.0, 8, 11), (1.0, 4, 7)], num_windows=1)]
    assert scored_row(sure, AnswerRules(5, False, 0.0))["sure"] > 0.9
    assert "sure" not in scored_row(sure, AnswerRules(5, True, -20.0))
    right = [window(0, [(9.0, 4, 7), (1.0, 8, 11)], num_windows=1)]
    assert "sure" not in scored_row(right, AnswerRules(5, False, 0.0))


@pytest.mark.parametrize("is_v2", [False, True], ids=["squad", "squad-v2"])
def test_the_order_of_features_and_the_number_of_processes_change_no_score(is_v2):
    class Job:
        args = TASK.arguments(version_2_with_negative=is_v2, answer_by="span")

    chosen = random.Random(2)
    windows = [
        window(part, [(chosen.random(), 4, 7), (chosen.random(), 8, 11)], chosen.random(), position=row, num_windows=3)
        for row in range(7)
        for part in range(3)
    ]

    def score(parts):
        scorers = []
        for part in parts:
            scorer = TASK.create_scorer(Job)
            rows = scorer.add(part[:4]) + scorer.add(part[4:]) + scorer.finish()
            scorers.append((scorer, rows))
        whole = TASK.create_scorer(Job)
        for scorer, _ in scorers:
            whole.merge_state(scorer.state_dict())
        rows = sorted((row for _, own in scorers for row in own), key=lambda row: row["position"])
        return rows, whole.intervals(), whole.compute()

    expected = score([windows])
    assert len(expected[0]) == 7
    assert score([chosen.sample(windows, len(windows))]) == expected
    assert score([windows[:9], windows[9:]]) == expected
    only_two = [each for each in windows if each["window"] < 2]  # as in a rehearsal, which sees the first batches only
    assert len(score([only_two])[0]) == 7


refused = partial(refusal, "question-answering", FLAGS)


def test_lengths_beyond_the_model_are_refused(tmp_path):
    data = write_jsonl(tmp_path / "questions.jsonl", questions(10))
    assert "fix: --stride 9" in refused("args.value", data=data, max_length=32, doc_stride=20)
    assert "fix: --max_length 512" in refused("model.length", data=data, max_length=1000)
    for name, lowest in (("n_best", 1), ("stride", 0)):
        with pytest.raises(ConfigError, match=f"{name} must be at least {lowest}"):
            api.train("question-answering", data=data, **{name: lowest - 1}, **FLAGS)


def test_answers_that_are_needed_or_outside_the_context_are_refused(tmp_path):
    made = questions(10)
    made[7]["answers"] = {"text": [], "answer_start": []}
    data = write_jsonl(tmp_path / "questions.jsonl", made)
    told = refused("data.answers", data=data, version_2_with_negative=False)
    assert "has no answer" in told and "line 8 of questions.jsonl" in told
    made = [row | {"answers": {"text": [], "answer_start": []}} for row in questions(10)]
    told = refused("data.answers", data=write_jsonl(tmp_path / "questions.jsonl", made))
    assert "none of the" in told and "answers are read from" in told
    made = questions(10)
    made[3]["answers"] = {"text": ["purple"], "answer_start": [3]}
    assert "'purple'" in refused("data.answers", data=write_jsonl(tmp_path / "questions.jsonl", made))


def test_generated_answers_need_a_model_that_can_generate(tmp_path):
    data = write_jsonl(tmp_path / "questions.jsonl", questions(10))
    assert "encoder-decoder" in refused("args.value", data=data, answer_by="generation")
    save_bert(tmp_path / "bert", "BertForQuestionAnswering", train_tokenizer(["a b"], 300), vocab_size=400)
    assert "Seq2SeqLM" in refused("model.task", data=data, model=tmp_path / "bert", answer_by="generation")
