"""Baselines: closed forms, scikit-learn's naive Bayes, and the same predictions for every batch size."""

import gzip
import lzma

import numpy as np
import pytest
import torch
from rouge_score.rouge_scorer import RougeScorer
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import Ridge
from sklearn.multiclass import OneVsRestClassifier
from sklearn.naive_bayes import MultinomialNB

from loopwright import baselines, metrics
from loopwright.errors import ConfigError, DataError
from loopwright.tasks.text.embedding import WordVectors
from sample_data import sample_rows


def learnt(baseline, *batches):
    for inputs, targets in batches:
        baseline.learn(inputs, targets)
    return baseline


def test_the_most_frequent_label_or_row_of_labels_is_predicted():
    baseline = learnt(baselines.MostFrequent(), (["a", "b"], ["pos", "neg"]), (["c"], ["neg"]))
    batches = [(["x", "y"], ["neg", "pos"]), (["z"], ["neg"])]
    assert baselines.score(baseline, batches, metrics.load("accuracy")) == {"accuracy": 2 / 3}
    tied = learnt(baselines.MostFrequent(), ([0, 0, 0, 0], torch.tensor([3, 1, 1, 3])))
    assert tied.predict(["x"]) == [1]
    rows = np.asarray([[1, 0], [1, 0], [0, 1]])
    baseline = learnt(baselines.MostFrequent(), (["a", "b", "c"], rows))
    result = baselines.score(baseline, [(["a", "b", "c"], rows)], metrics.load("multilabel"))
    assert result["subset_accuracy"] == 2 / 3


def drawn_texts(draw, num_rows, shares, num_words, words, space=" "):
    """Return texts and labels: each label prefers words of its own, as topics do."""
    labels = draw.choice(len(shares), num_rows, p=shares)
    tastes = [draw.dirichlet(np.full(len(words), 0.05)) * 0.4 + 0.6 / len(words) for _ in shares]
    texts = [space.join(draw.choice(words, num_words, p=tastes[label])) for label in labels]
    return texts, labels.tolist()


HANZI = [chr(number) for number in range(0x4E00, 0x4E00 + 400)]
WORDS = [first + second for first in ("ka", "lo", "mi", "tu", "re") for second in map("n{}ta".format, range(100))]


@pytest.mark.parametrize(
    ("shares", "num_words", "words", "space"),
    [
        ([0.5, 0.5], 12, WORDS, " "),
        ([0.9, 0.08, 0.02], 12, WORDS, " "),
        ([1 / 40] * 40, 20, WORDS, " "),
        ([0.25] * 4, 2, WORDS, " "),
        ([0.3, 0.7], 15, HANZI, ""),
    ],
    ids=["balanced", "imbalanced", "many_classes", "short", "Chinese"],
)
def test_word_counts_are_the_naive_bayes_of_scikit_learn(shares, num_words, words, space):
    texts, labels = drawn_texts(np.random.default_rng(0), 900, shares, num_words, words, space)
    baseline, start = baselines.WordCounts(), 0
    for end in (7, 250, 600):
        baseline.learn(texts[start:end], labels[start:end])
        start = end
    options = {} if space else {"analyzer": "char", "ngram_range": (1, 2)}
    counter = CountVectorizer(**options)
    counts, rest = counter.fit_transform(texts[:600]), counter.transform(texts[600:])
    theirs = MultinomialNB(alpha=0.5).fit(counts, labels[:600]).predict(rest)
    assert np.mean(np.equal(baseline.predict(texts[600:]), theirs)) >= 0.99  # but for ties
    accuracy = baselines.score(baseline, [(texts[600:], labels[600:])], metrics.load("accuracy"))["accuracy"]
    assert accuracy > max(shares) and accuracy == pytest.approx(np.mean(np.equal(theirs, labels[600:])), abs=0.01)
    rows = np.eye(len(shares), dtype=int)[labels] | np.eye(len(shares), dtype=int)[np.roll(labels, 1) % 2]
    several = learnt(baselines.WordCounts(), (texts[:600], rows[:600]))
    theirs = OneVsRestClassifier(MultinomialNB(alpha=0.5)).fit(counts, rows[:600]).predict(rest)
    assert np.mean(np.equal(several.predict(texts[600:]), theirs)) >= 0.99


def test_word_counts_know_emoji_unseen_words_and_the_places_of_a_pair():
    baseline = learnt(baselines.WordCounts(), (["👍🏽 ok", "ok 👩‍🚀", "ok👎🏽", "no 👎🏽"], ["+", "+", "-", "-"]))
    assert baseline.predict(["👍🏽", "👎🏽", "👩‍🚀!", "unseen words 👎🏽"]) == ["+", "-", "+", "-"]
    baseline = learnt(baselines.WordCounts(), ([("cat", "dog"), ("dog", "cat"), ("dog", "ant")], [0, 1, 1]))
    assert baseline.predict([("cat", "dog"), ("Dog!", "CAT"), ("", "")]) == [0, 1, 1]


def test_word_regression_is_ridge_regression_and_sees_what_a_pair_has_in_common():
    draw = np.random.default_rng(0)
    texts, _ = drawn_texts(draw, 300, [1.0], 9, WORDS[:60])
    values = [text.count(WORDS[0]) - 2.0 * text.count(WORDS[1]) + 70 for text in texts]
    baseline = learnt(
        baselines.WordRegression(2048), (texts[:90], values[:90]), (texts[90:200], torch.tensor(values[90:200]))
    )
    counter = CountVectorizer()
    counts = counter.fit_transform(texts[:200])
    theirs = Ridge(1.0).fit(counts / 3, values[:200]).predict(counter.transform(texts[200:]) / 3)
    assert np.corrcoef(baseline.predict(texts[200:]), theirs)[0, 1] > 0.97
    pairs = [
        (text, " ".join([*text.split()[:common], *["other"] * (9 - common)]))
        for text, common in zip(texts, draw.integers(0, 10, 300), strict=True)
    ]
    values = [len(set(first.split()) & set(second.split())) / 2 for first, second in pairs]
    baseline = learnt(baselines.WordRegression(), (pairs[:200], values[:200]))
    found = baselines.score(baseline, [(pairs[200:], values[200:])], metrics.load("pearsonr"))
    assert found["pearsonr"] > 0.9 and len(baseline.predict(["", ("", "")])) == 2


def test_the_mean_is_predicted_and_chance_is_one_over_the_choices():
    baseline = learnt(baselines.MeanValue(), (["a", "b"], np.asarray([1.0, 2.0])), (["c"], [6.0]))
    assert baselines.score(baseline, [(["x", "y"], [3.0, 5.0])], metrics.load("mse")) == {"mse": 2.0}
    assert baselines.chance_accuracy([4, 4, 4]) == {"accuracy": 0.25}
    assert baselines.chance_accuracy([2, 4]) == {"accuracy": 0.375}


def test_each_word_gets_its_most_frequent_tag_and_a_mask_the_most_frequent_token():
    words = [["Ann", "saw", "Bern"], ["Bern", "is", "far"], ["Ann", "Bern"]]
    tags = [["B-PER", "O", "B-LOC"], ["B-LOC", "O", "O"], ["B-PER", "B-PER"]]
    baseline = learnt(baselines.MostFrequentTags(), (words[:1], tags[:1]), (words[1:], tags[1:]))
    assert baseline.predict([["Bern", "saw", "Zoe", "Ann"]]) == [["B-LOC", "O", "B-PER", "B-PER"]]
    result = baselines.score(baseline, [(words, tags)], metrics.load("entities"))
    assert result == {"precision": 4 / 5, "recall": 4 / 5, "f1": 4 / 5, "accuracy": 7 / 8}
    masked, labels = torch.tensor([[9, 4, 9], [9, 5, 4]]), torch.tensor([[5, -100, 7], [5, -100, -100]])
    baseline = learnt(baselines.MostFrequentTags(), (masked, labels))
    result = baselines.score(baseline, [(masked, labels)], metrics.load("token_accuracy"))
    assert result == {"token_accuracy": 2 / 3}


def test_the_most_frequent_answer_in_the_context_is_predicted():
    targets = ["Rollo", {"text": ["10th century", "10th century"]}, ["in 911"]]
    baseline = learnt(baselines.MostFrequentAnswer(), (["", "", ""], targets))
    contexts = ["Rollo in the 10th century", "Rollo in 911", "Nothing of the kind"]
    assert baseline.predict(contexts) == ["10th century", "Rollo", "Nothing of"]
    result = baselines.score(baseline, [(contexts, ["Rollo", "Rollo", "x"])], metrics.load("squad"))
    assert result == {"exact_match": 100 / 3, "f1": 100 / 3}
    unanswered = learnt(baselines.MostFrequentAnswer(), (["", "", ""], [{"text": []}, [], "Rollo"]))
    assert unanswered.predict(["Rollo"]) == [""]


def test_the_input_and_its_first_sentences_are_predicted():
    text = "One cat. Two dogs!\nThree ants? Four."
    assert baselines.CopyInput().predict([text]) == [text]
    assert baselines.Lead().predict([text, "", "No end"]) == ["One cat.", "", "No end"]
    assert baselines.Lead(3).predict([text]) == ["One cat.\nTwo dogs!\nThree ants?"]
    result = baselines.score(baselines.Lead(), [([text], ["One cat."])], metrics.load("rouge"))
    assert set(result.values()) == {1.0}
    assert baselines.score(baselines.CopyInput(), [([text], [text])], metrics.load("chrf")) == {"chrf": 100.0}
    rows = sample_rows("xsum/sample.json")
    batches = [([row["document"]], [row["summary"]]) for row in rows]
    result = baselines.score(baselines.Lead(), batches, metrics.load("rouge"))
    scorer = RougeScorer(["rouge1"], use_stemmer=False)
    expected = [scorer.score(row["summary"], row["document"].split("\n")[0])["rouge1"].fmeasure for row in rows]
    assert result["rouge1"] == pytest.approx(np.mean(expected), rel=1e-12)


def test_baselines_know_the_words_and_sentences_of_languages_without_spaces():
    words = learnt(
        baselines.WordCounts(), (["这部电影很好看", "演员演得很好", "太无聊了", "情节无聊"], ["+", "+", "-", "-"])
    )
    assert words.predict(["真的很好", "我觉得无聊。"]) == ["+", "-"]
    vectors = WordVectors()(["我喜欢猫", "他喜欢狗。", "天气"])
    assert vectors[0] @ vectors[1] == pytest.approx(0.5) and vectors[0] @ vectors[2] == 0
    answers = learnt(baselines.MostFrequentAnswer(), (["", ""], ["北京", "上海市"]))
    assert answers.predict(["它在 广州，不在北方", "上海市很大"]) == ["它在", "上海市"]
    assert baselines.Lead().predict(["今天下雨。明天晴！", "วันนี้ฝนตก พรุ่งนี้แดดออก"]) == ["今天下雨。", "วันนี้ฝนตก"]


def test_compressors_give_bits_per_byte():
    texts = [f"line {index} of a text, naïve\n" for index in range(500)]
    whole = "".join(texts).encode()
    header = len(gzip.compress(b"", 9))
    assert baselines.compressed_bits_per_byte(texts)["bits_per_byte"] == pytest.approx(
        8 * len(gzip.compress(whole, 9)) / len(whole), abs=8 * header / len(whole)
    )
    assert baselines.compressed_bits_per_byte([whole[:999], whole[999:]], "lzma") == {
        "bits_per_byte": 8 * len(lzma.compress(whole)) / len(whole)
    }


@pytest.mark.parametrize(
    ("call", "kind", "expected"),
    [
        (lambda: baselines.MostFrequent().predict(["x"]), DataError, "MostFrequent has learnt nothing"),
        (lambda: baselines.WordCounts().predict(["x"]), DataError, "WordCounts has learnt nothing"),
        (lambda: baselines.WordRegression().predict(["x"]), DataError, "WordRegression has learnt nothing"),
        (lambda: baselines.MeanValue().predict(["x"]), DataError, "MeanValue has learnt nothing"),
        (lambda: baselines.MostFrequentTags().predict([["x"]]), DataError, "MostFrequentTags has learnt nothing"),
        (lambda: baselines.MostFrequentAnswer().predict(["x"]), DataError, "MostFrequentAnswer has learnt nothing"),
        (lambda: baselines.WordCounts(smoothing=0), ConfigError, "a smoothing above 0, got 1048576 and 0"),
        (lambda: baselines.Lead(0), ConfigError, "at least 1 sentence, got 0"),
        (lambda: baselines.chance_accuracy([]), DataError, "chance has no samples"),
        (lambda: baselines.compressed_bits_per_byte([]), DataError, "a text of at least 1 byte"),
        (lambda: baselines.compressed_bits_per_byte(["x"], "zip"), ConfigError, "no compressor 'zip': use 'gzip'"),
    ],
    ids=lambda value: value.replace(" ", "_") if isinstance(value, str) else "",
)
def test_impossible_baselines_are_refused(call, kind, expected):
    with pytest.raises(kind) as caught:
        call()
    assert expected in str(caught.value)
