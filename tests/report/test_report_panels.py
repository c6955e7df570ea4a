"""The panels of the tasks: what they count, against scikit-learn and against counts by hand."""

import math
import random
import re

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from loopwright.metrics import ExpectedCalibrationError
from loopwright.report.blocks import Examples, Facts, Histogram, Lines, Matrix, Table
from loopwright.report.charts import draw_histogram
from loopwright.report.panels import Findings, read_findings
from loopwright.report.panels.objects import matches, overlap
from loopwright.tasks.scoring import write_table
from report.folders import CLASSIFIED, LABELS, classified, write_json, write_lines


def found(folder, predictions, labels=()) -> Findings:
    write_lines(folder / "predictions.jsonl", predictions)
    write_lines(folder / "worst.jsonl", predictions)
    return read_findings(folder, list(labels))


def block(findings: Findings, title: str):
    assert findings.panel is not None
    return next(block for block in findings.panel.blocks if block.title == title)


def words(item) -> dict[str, str]:
    return {name: "".join(piece.text for piece in pieces) for name, pieces in item.fields}


def marked(item, mark: str) -> list[str]:
    return [piece.text for _, pieces in item.fields for piece in pieces if piece.mark == mark]


def test_the_confusion_matrix_and_the_table_by_class_match_scikit_learn(tmp_path):
    chance = random.Random(0)
    pairs = [(chance.choice(LABELS), chance.choice(LABELS)) for _ in range(200)]
    true, guess = zip(*pairs, strict=True)
    rows = [{"position": i, "reference": a, "prediction": b, "loss": 1.0} for i, (a, b) in enumerate(pairs)]
    findings = found(tmp_path, rows, LABELS)
    matrix, table = block(findings, "Confusion matrix"), block(findings, "By class")
    assert isinstance(matrix, Matrix) and isinstance(table, Table)
    assert matrix.counts == confusion_matrix(true, guess, labels=LABELS).tolist()
    columns = precision_recall_fscore_support(true, guess, labels=LABELS)
    for index, row in enumerate(table.rows):
        assert row[0] == LABELS[index]
        assert row[1:4] == [f"{column[index]:.4f}" for column in columns[:3]]
        assert row[4] == columns[3][index]


def test_confused_classes_and_the_most_confident_mistakes_are_listed(tmp_path):
    findings = found(tmp_path, classified(), LABELS)
    assert block(findings, "Most confused").rows == [["cat", "dog", 1, "33 %"], ["owl", "cat", 1, "100 %"]]
    by_class = next(table for table in findings.slices if table.title == "By class")
    assert by_class.rows[0] == ["owl", 1, "0.0000", "5.1000"]
    assert by_class.rows[-1] == ["dog", 2, "1.0000", "3.6000"]
    sure = block(findings, "Confidence")
    assert isinstance(sure, Histogram)
    assert [(name, sum(counts)) for name, counts in sure.groups] == [("right", 4), ("wrong", 2)]
    unsure = [{**classified()[1], "position": place, "confidence": float("nan")} for place in range(6, 30)]
    shown = block(found(tmp_path, [*unsure, *classified()], LABELS), "Most confident mistakes")
    heads = ["row 1 · loss 1.1000 · confidence 80 %", "row 5 · loss 5.1000 · confidence 55 %"]
    assert [item.head for item in shown.items] == heads
    many = [{**classified()[1], "position": i, "confidence": i / 100} for i in range(40)]
    shown = block(found(tmp_path, many, LABELS), "Most confident mistakes")
    assert len(shown.items) == 8 and shown.items[0].head.startswith("row 39") and shown.note == "8 of 40"


def test_of_many_classes_the_matrix_shows_those_with_the_most_mistakes(tmp_path):
    names = [f"class {index}" for index in range(50)]
    rows = [{"position": i, "reference": name, "prediction": name, "loss": 0.0} for i, name in enumerate(names)]
    rows += [{"position": 50, "reference": "class 7", "prediction": "class 9", "loss": 1.0}]
    matrix = block(found(tmp_path, rows, names), "Confusion matrix")
    assert matrix.labels == ["class 7", "class 9"] and matrix.counts == [[1, 1], [0, 1]]
    assert "2 of 50 classes" in matrix.note


def test_accuracy_by_length_is_shown_in_slices_of_similar_size(tmp_path):
    sample = {"reference": "cat", "loss": 1.0}
    guesses = ["cat"] * 50 + ["dog"] * 50
    rows = [{**sample, "position": i, "prediction": guess, "text": "x" * (i + 1)} for i, guess in enumerate(guesses)]
    table = next(table for table in found(tmp_path, rows, LABELS).slices if table.title.startswith("By length"))
    assert [row[1] for row in table.rows] == [20] * 5
    assert [row[0] for row in table.rows][:2] == ["1 to 20", "21 to 40"]
    assert [row[2] for row in table.rows] == ["1.0000", "1.0000", "0.5000", "0.0000", "0.0000"]


def test_the_worst_samples_come_with_text_prediction_and_truth_and_twenty_are_enough(tmp_path):
    worst = found(tmp_path, [*classified()[::-1], *classified() * 20], LABELS).worst
    assert isinstance(worst, Examples) and len(worst.items) == 20
    first = worst.items[0]
    assert words(first) == {"text": "a small cat xxxxx", "predicted": "cat", "true": "owl"}
    assert first.is_right is False and first.head == "row 5 · loss 5.1000 · confidence 55 %"
    assert marked(first, "wrong") == ["cat"] and marked(first, "right") == ["owl"]


def test_suspected_labels_are_shown_with_the_prediction(tmp_path):
    row = {"position": 1, "prediction": "dog", "reference": "cat", "loss": 3.0, "sure": 0.97, "text": "woof"}
    write_table(tmp_path / "suspects.csv", [row] * 25)
    table = read_findings(tmp_path, LABELS).suspects
    assert isinstance(table, Table) and len(table.rows) == 20
    assert table.rows[0] == ["1", "cat", "dog", "97 %", "woof"] and "all 25" in table.note


def test_labels_in_sets_are_counted_one_by_one(tmp_path):
    rows = [
        {"position": 0, "prediction": ["cat"], "reference": ["cat", "dog"], "loss": 0.1, "text": "a"},
        {"position": 1, "prediction": [], "reference": ["owl"], "loss": 0.1, "text": "bb"},
    ]
    findings = found(tmp_path, rows, LABELS)
    table = block(findings, "By label")
    assert table.rows[0] == ["cat", "1.0000", "1.0000", "1.0000", 1, 1]
    assert table.rows[1] == ["dog", "–", "0.0000", "0.0000", 1, 0]


def test_entities_are_scored_by_their_spans_and_other_tags_one_by_one(tmp_path):
    span = {"label": "PER", "start": 0, "end": 2}
    tags = ["B-PER", "I-PER", "O"]
    rows = [
        {"position": 0, "prediction": tags, "reference": tags, "loss": 0.1, "entities": [span], "expected": [span],
         "tokens": ["Ada", "Lovelace", "wrote"]},
        {"position": 1, "prediction": ["O", "O"], "reference": ["B-PER", "O"], "loss": 0.5, "entities": [],
         "expected": [{"label": "PER", "start": 0, "end": 1}], "tokens": ["Ada", "wrote"]},
    ]  # fmt: skip
    findings = found(tmp_path, rows)
    assert block(findings, "By entity").rows == [["PER", "1.0000", "0.5000", "0.6667", 2, 1]]
    assert block(findings, "Most confused").rows == [["B-PER", "O", 1, "50 %"]]
    mistaken = block(findings, "Sentences with mistakes").items[0]
    assert words(mistaken)["words"] == "Ada/O (true B-PER) wrote"
    assert [row[2] for row in findings.slices[0].rows] == ["0.5000", "1.0000"]
    rows = [{"position": 0, "prediction": ["N", "V"], "reference": ["N", "N"], "loss": 0.1, "tokens": ["a", "b"]}]
    table = [["N", "1.0000", "0.5000", "0.6667", 2, 1], ["V", "0.0000", "–", "0.0000", 0, 1]]
    assert block(found(tmp_path, rows), "By tag").rows == table


def test_answers_are_hits_and_misses_with_the_answer_marked_in_its_context(tmp_path):
    base = {"loss": 0.1, "question": "Who?", "context": "It was Ada who wrote it.", "id": "q"}
    best = {"text": "Ada", "score": 0.9, "start": 7, "end": 10}
    hit = {"prediction": "ada", "reference": ["Ada", "Ada Lovelace"], "n_best": [best]}
    miss = {"prediction": "Ada who", "reference": ["Ada"], "n_best": [{**best, "text": "Ada who", "end": 14}]}
    findings = found(tmp_path, [{**base, **row, "position": index} for index, row in enumerate((hit, miss))])
    facts = block(findings, "Questions")
    assert isinstance(facts, Facts)
    assert facts.items[:2] == [("hits", "1 of 2 (50 %)"), ("missed, but the answer overlaps", "1")]
    item = block(findings, "Misses").items[0]
    assert words(item)["context"] == base["context"] and marked(item, "wrong") == ["Ada who", "Ada who"]
    assert block(findings, "Hits").items[0].is_right is True


def test_written_texts_show_the_words_that_differ(tmp_path):
    rows = [
        {"position": 0, "prediction": "on 2018-06-16", "reference": "on 2018-01-16", "loss": 0.5, "source": "June"},
        {"position": 1, "prediction": "The house.", "reference": "house", "loss": 0.1, "source": "Haus"},
    ]
    findings = found(tmp_path, rows)
    assert block(findings, "Texts").items[0] == ("exact matches", "1 of 2 (50 %)")
    item = block(findings, "Samples that differ").items[0]
    assert marked(item, "wrong") == ["2018-06-16"] and marked(item, "right") == ["2018-01-16"]
    assert words(item)["generated"] == "on 2018-06-16"


def test_language_models_show_how_hard_the_parts_are_and_masked_tokens_which_were_guessed(tmp_path):
    part = {"position": 0, "loss": 4.0, "bits_per_byte": 2.1, "num_tokens": 9, "num_bytes": 20, "text": "a text"}
    causal = found(tmp_path / "causal", [part, {**part, "position": 1, "bits_per_byte": 2.5}])
    assert sum(block(causal, "Difficulty of the parts").groups[0][1]) == 2
    assert words(block(causal, "Samples").items[0])["text"] == "a text"
    tokens = {"prediction": ["a", "b", "a"], "reference": ["a", "a", "c"]}
    masked = found(tmp_path / "masked", [{"position": 0, "loss": 1.0, "num_tokens": 3, "text": "aac", **tokens}])
    assert block(masked, "Most frequent tokens").rows == [["'a'", 2, "0.5000"], ["'c'", 1, "0.0000"]]
    assert marked(block(masked, "Samples").items[0], "wrong") == ["'b' for 'a'", "'a' for 'c'"]


def test_pairs_of_sentences_show_similarities_and_ranks(tmp_path):
    base = {"loss": 0.1, "text": "stop()", "text_pair": "Stop it.", "nearest_other": 0.5}
    rows = [{**base, "position": i, "rank": rank, "similarity": 0.9 / rank} for i, rank in enumerate((1, 1, 4, 60))]
    rows[0]["nearest_other"] = None
    findings = found(tmp_path, rows)
    shown = block(findings, "Rank of the matching text")
    assert [row[1] for row in shown.rows] == [2, 2, 3, 3, 3] and shown.rows[0][2] == "0.5000"
    groups = block(findings, "Similarity of the pairs").groups
    assert [(name, sum(counts)) for name, counts in groups] == [("its partner", 4), ("the nearest other text", 3)]
    assert len(block(findings, "Not ranked first").items) == 2


def test_numbers_are_shown_by_low_and_high_truths(tmp_path):
    rows = [{"position": i, "prediction": i / 10, "reference": float(i), "loss": 0.1, "text": "t"} for i in range(4)]
    groups = block(found(tmp_path, rows), "Predicted values").groups
    assert [sum(counts) for _, counts in groups] == [2, 2]


def test_choices_show_which_place_was_chosen(tmp_path):
    base = {"loss": 1.0, "context": "It is", "start": "called", "choices": ["one", "two"], "confidence": 0.8}
    rows = [{**base, "position": index, "prediction": 1, "reference": index} for index in (0, 1)]
    findings = found(tmp_path, rows)
    assert block(findings, "Chosen positions").counts == [[0, 1], [0, 1]]
    assert words(block(findings, "Misses").items[0])["choices"] == "one (true) two (chosen)"


def test_pixels_are_counted_into_the_intersection_over_union_of_each_class(tmp_path):
    pixels = {"sky": {"sky": 6, "sea": 2}, "sea": {"sea": 2}}
    rows = [{"position": 0, "pixels": pixels, "iou": 0.6, "loss": 0.4, "image": "a.png"}]
    findings = found(tmp_path, rows, ["sky", "sea"])
    assert block(findings, "By class").rows == [["sky", "0.7500", "0.7500", 8], ["sea", "0.5000", "1.0000", 2]]
    assert block(findings, "Most confused").rows == [["sky", "sea", 2, "25 %"]]


def test_objects_are_counted_by_class_and_by_how_many_there_are(tmp_path):
    base = {"loss": 0.5, "f1": 0.5, "image": "/x/a.png", "image_id": "1"}
    first = {"position": 0, "found": [{"label": "cat", "score": 0.9}], "counts": {"cat": [1, 1, 0], "dog": [0, 0, 1]}}
    rows = [{**base, **first}, {**base, "position": 1, "found": [], "counts": {"cat": [1, 0, 1]}}]
    findings = found(tmp_path, rows, ["cat", "dog"])
    table = [["cat", "0.6667", "0.6667", "0.6667", 3, 3], ["dog", "–", "0.0000", "0.0000", 1, 0]]
    assert block(findings, "By class").rows == table
    assert findings.slices[0].rows == [["2", 2, "0.5000"]]
    assert findings.worst is not None and findings.worst.items[0].head.startswith("row 0 · a.png")


def test_lines_that_are_no_predictions_are_left_out_and_counted(tmp_path):
    write_lines(tmp_path / "predictions.jsonl", [{}, *classified()])
    findings = read_findings(tmp_path, LABELS)
    assert findings.num_samples == len(CLASSIFIED)
    assert findings.notes == ["1 line of eval/predictions.jsonl could not be read: left out"]


def thing(label: str, left: float, score: float | None = None, **more) -> dict:
    return {"label": label, "box": [left, 0.0, left + 10, 10.0], **({} if score is None else {"score": score}), **more}


def test_objects_match_by_the_overlap_of_their_boxes_the_most_confident_first():
    assert overlap([0, 0, 10, 10], [5, 0, 15, 10]) == 50 / 150
    assert overlap([0, 0, 10, 10], [10, 0, 20, 10]) == 0 == overlap([0, 0, 0, 0], [0, 0, 0, 0])
    truth = [thing("cat", 0), thing("dog", 50), thing("cat", 100, crowd=True)]
    found = [thing("cat", 1, 0.6), thing("cat", 2, 0.9), thing("cat", 50, 0.8), thing("cat", 101, 0.7)]
    assert matches(found, truth) == [(0.9, True), (0.8, False), (0.6, False)]


def test_precision_is_drawn_against_recall_beside_the_average_precision_of_coco(tmp_path):
    counts = {"cat": [1, 1, 0], "dog": [0, 0, 1]}
    objects = [thing("cat", 0, 0.9), thing("cat", 50, 0.8)]
    rows = [{"position": 0, "counts": counts, "f1": 0.5, "loss": 0.5, "image": "a.png", "objects": objects,
             "truth": [thing("cat", 0), thing("dog", 50)]}]  # fmt: skip
    write_json(tmp_path / "classes.json", [{"label": "cat", "map": 0.5, "map_50": 1.0, "there": 1},
                                           {"label": "dog", "map": None, "map_50": None, "there": 1}])  # fmt: skip
    findings = found(tmp_path, rows, ["cat", "dog"])
    curve = block(findings, "Precision and recall")
    assert isinstance(curve, Lines) and curve.groups == [("all classes", [(0.5, 1.0), (0.5, 0.5)])]
    scores = block(findings, "Scores of the objects found")
    assert [(name, sum(bars)) for name, bars in scores.groups] == [("right", 1), ("wrong", 1)]
    assert block(findings, "Average precision").rows == [["dog", "–", "–", 1], ["cat", "0.5000", "1.0000", 1]]


def test_texts_written_at_evaluations_are_shown_from_all_over_the_run(tmp_path):
    lines = [{"update": 10 * i, "samples": [{"start": "Once", "written": f"\n\n upon {i}"}]} for i in range(1, 21)]
    write_lines(tmp_path / "samples.jsonl", [*lines, {"update": None, "samples": [{"start": "Once", "written": ""}]}])
    findings = read_findings(tmp_path, [])
    shown = block(findings, "Generated texts at each evaluation")
    assert shown.note == "6 of 21 evaluations"
    assert [item.head for item in shown.items][::5] == ["update 10", "the best model, at the end"]
    assert words(shown.items[0]) == {"text": "Once upon 1"} and marked(shown.items[0], "new") == [" upon 1"]
    assert marked(shown.items[-1], "new") == ["(nothing)"]


def test_written_samples_with_a_truth_show_the_words_that_differ_and_damaged_lines_are_passed_over(tmp_path):
    line = {"update": 5, "samples": [{"source": "May 1", "written": "on 05-02", "true": "on 05-01"}]}
    write_lines(tmp_path / "samples.jsonl", [line, {"update": 6}, {"update": 7, "samples": "none"}])
    with (tmp_path / "samples.jsonl").open("a") as file:
        file.write('{"update": 8, "sam')
    (item,) = block(read_findings(tmp_path, []), "Generated texts at each evaluation").items
    assert marked(item, "wrong") == ["05-02"] and marked(item, "right") == ["05-01"]


def test_without_a_mistake_the_samples_with_the_largest_losses_are_not_listed_as_mistakes(tmp_path):
    worst = found(tmp_path, [{**row, "prediction": row["reference"]} for row in classified()], LABELS).worst
    assert (worst.title, worst.items) == ("No mistakes on 6 rows", [])


def test_a_mistake_is_named_by_its_file_and_line(tmp_path):
    rows = [{**row, "place": f"line {row['position'] + 2} of a.csv"} for row in classified()]
    assert found(tmp_path, rows, LABELS).worst.items[0].head.startswith("line 3 of a.csv · loss ")
    suspect = {"position": 1, "place": "line 3 of a.csv", "prediction": "dog", "reference": "cat", "sure": 0.97}
    write_table(tmp_path / "suspects.csv", [{**suspect, "text": "woof"}])
    assert read_findings(tmp_path, LABELS).suspects.rows == [["line 3 of a.csv", "cat", "dog", "97 %", "woof"]]


def test_calibration_is_the_metric_by_bin_for_labels_words_and_sets_and_a_sentence_if_undefined(tmp_path):
    chance = random.Random(1)
    shares, hits = [chance.uniform(0.3, 1) for _ in range(200)], [chance.random() < 0.7 for _ in range(200)]
    rows = [{"position": i, "prediction": "a", "reference": "ab"[not hit]} for i, hit in enumerate(hits)]
    labels = [{**row, "confidence": share} for row, share in zip(rows, shares, strict=True)]
    words = {key: [row[key] for row in rows] for key in ("prediction", "reference")}
    sets = [
        {"position": row["position"], "prediction": ["a"], "reference": [row["reference"]], "confidences": {"a": share}}
        for row, share in zip(rows, shares, strict=True)
    ]
    metric = ExpectedCalibrationError()
    metric.update({"confidences": np.array(shares), "hits": np.array(hits)})
    note = f"ECE {metric.compute()['ece']:.4f}: the mean distance from it, over 200 predictions"
    for lines in (labels, [{"position": 0, "tokens": ["x"] * 200, "confidences": shares, **words}], sets):
        drawn = block(found(tmp_path, lines, ["a", "b"]), "Calibration")
        assert drawn.note.endswith(note) and sum(drawn.sizes) == 200 and drawn.sizes[:4] == [0] * 4
        ((name, accuracies),) = drawn.groups
        assert sum(map(math.prod, zip(accuracies, drawn.sizes, strict=True))) == pytest.approx(sum(hits))
    svg = draw_histogram(drawn.edges, drawn.groups, drawn.sizes)
    assert f"accuracy 0.933 to 1: {accuracies[-1]:.3f} of {drawn.sizes[-1]}" in svg and svg.count("<path") == 1
    broken = [*labels, {**labels[0], "confidence": math.nan}]
    (fact,) = block(found(tmp_path, broken, ["a", "b"]), "Calibration").items
    assert fact == ("undefined", "some confidences are not numbers")


def test_equal_values_are_one_bar_and_close_ticks_are_distinguishable(tmp_path):
    rows = [{**row, "confidence": 1 - 1e-9 * row["position"]} for row in classified()]
    sure = block(found(tmp_path, rows, LABELS), "Confidence")
    assert (sure.edges[0], sure.edges[-1]) == (0.5, 1.0)
    labels = re.findall(r'class="tick x"[^>]*>([^<]+)<', draw_histogram([0.99998, 0.999985, 0.99999], [("a", [1, 2])]))
    assert len(labels) == len(set(labels)) > 2
