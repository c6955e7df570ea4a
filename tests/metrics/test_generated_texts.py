"""ROUGE, BLEU and chrF: the numbers of rouge-score and sacrebleu over the whole corpus, and by hand."""

import numpy as np
import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer
from tests.metrics.samples import columns_of

from loopwright import metrics
from loopwright.metrics.texts import in_sentences
from sample_data import sample_rows


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", "One.\nTwo!\nThree?\nFour"),
        ("One. Two.\nThree.", "One. Two.\nThree."),
        ("  One. Two.\n", "One.\nTwo."),
        ("Version 1.5 is out", "Version 1.5 is out"),
        ("", ""),
    ],
)
def test_a_text_is_split_at_newlines_or_after_the_end_of_a_sentence(text, expected):
    assert in_sentences(text) == expected


def test_rouge_by_hand_and_scores_of_the_same_and_of_different_texts():
    result = metrics.load("rouge").compute(predictions=["the cat sat"], references=["the cat ran fast"])
    # 2 shared words of 3 and 4; 1 shared pair of 2 and 3.
    assert result == pytest.approx({"rouge1": 4 / 7, "rouge2": 2 / 5, "rougeL": 4 / 7, "rougeLsum": 4 / 7})
    swapped = metrics.load("rouge").compute(predictions=["B b. A a."], references=["A a. B b."])
    assert swapped["rougeL"] == 0.5 and swapped["rougeLsum"] == 1.0
    text = "A quick brown fox jumps over the lazy dog."
    for name, key, most in [("sacrebleu", "bleu", 100.0), ("chrf", "chrf", 100.0), ("rouge", "rougeLsum", 1.0)]:
        assert metrics.load(name).compute(predictions=[text], references=[text])[key] == pytest.approx(most)
        assert metrics.load(name).compute(predictions=["777"], references=[text])[key] == 0.0
        assert metrics.load(name).compute(predictions=[""], references=[text])[key] == 0.0


@pytest.mark.parametrize("use_stemmer", [False, True])
def test_rouge_is_the_mean_of_rouge_score(use_stemmer):
    columns = columns_of("rouge", 50)
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=use_stemmer)
    scores = [
        scorer.score_multi([in_sentences(text) for text in texts], in_sentences(prediction))
        for prediction, texts in zip(columns["predictions"], columns["references"], strict=True)
    ]
    result = metrics.load("rouge", use_stemmer=use_stemmer).compute(**columns)
    for name, value in result.items():
        assert value == pytest.approx(np.mean([score[name].fmeasure for score in scores]), rel=1e-14)
    assert 0.1 < result["rouge2"] < result["rouge1"] < 0.9


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sacrebleu", {}),
        ("sacrebleu", {"lowercase": True, "tokenize": "char"}),
        ("sacrebleu", {"smooth_method": "add-k"}),
        ("sacrebleu", {"tokenize": "intl", "smooth_method": "floor"}),
        ("chrf", {}),
        ("chrf", {"word_order": 2, "lowercase": True}),
    ],
)
def test_corpus_scores_match_sacrebleu(name, options):
    columns = columns_of("chrf", 50)
    theirs = {"sacrebleu": sacrebleu.BLEU, "chrf": sacrebleu.CHRF}[name](**options)
    streams = [[texts[0] for texts in columns["references"]]]
    streams.append([texts[1] if len(texts) > 1 else None for texts in columns["references"]])
    metric = metrics.load(name, **options)
    for start in range(0, 50, 8):
        metric.add_batch(**{side: values[start : start + 8] for side, values in columns.items()})
    (value,) = metric.compute().values()
    assert value == theirs.corpus_score(columns["predictions"], streams).score
    assert 5 < value < 95


def test_translations_agree_with_sacrebleu():
    rows = [row["translation"] for row in sample_rows("wmt16/sample.json")]
    romanian = [row["ro"] for row in rows]
    english = [row["en"] for row in rows]
    metric = metrics.combine(["sacrebleu", "chrf"])
    result = metric.compute(predictions=english, references=romanian)
    assert result["bleu"] == sacrebleu.corpus_bleu(english, [romanian]).score
    assert result["chrf"] == sacrebleu.corpus_chrf(english, [romanian]).score
