"""ROUGE, BLEU and chrF: the numbers of rouge-score and sacrebleu over the whole corpus, and by hand."""

import json

import numpy as np
import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer
from tests.metrics.samples import columns_of

from loopwright import metrics
from loopwright.errors import InputError
from loopwright.metrics.texts import in_sentences


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three? Four", "One.\nTwo!\nThree?\nFour"),
        ("One. Two.\nThree.", "One. Two.\nThree."),
        ("  One. Two.\n", "One.\nTwo."),
        ("Version 1.5 is out", "Version 1.5 is out"),
        ("他来了。她说：“好！”真的吗？！是的", "他来了。\n她说：“好！”\n真的吗？！\n是的"),
        ("नमस्ते। कैसे हो? هل أنت هنا؟ نعم", "नमस्ते।\nकैसे हो?\nهل أنت هنا؟\nنعم"),
        ("ខ្ញុំ។អ្នក ข้อความแรก ข้อความสอง", "ខ្ញុំ។\nអ្នក ข้อความแรก\nข้อความสอง"),
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


LATIN = st.text("abcXYZ 019.,!?-'_\"äßñéÅøłşđọ“”–…€", max_size=40)
MIXED = st.sampled_from(["a quick brown fox", "two words in Москва", "is 北京 a city", "5 αβ km"])
ENGLISH = st.tuples(LATIN, MIXED).map(" ".join)


@given(st.lists(st.tuples(LATIN | ENGLISH, ENGLISH, ENGLISH), min_size=1, max_size=4), st.booleans())
def test_texts_in_the_latin_script_keep_every_digit_of_the_official_packages(rows, use_stemmer):
    predictions, first, second = map(list, zip(*rows, strict=True))
    columns = {"predictions": predictions, "references": list(zip(first, second, strict=True))}
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=use_stemmer)
    scores = [scorer.score_multi(list(map(in_sentences, texts)), in_sentences(mine)) for mine, *texts in rows]
    metric = metrics.load("rouge", use_stemmer=use_stemmer)
    metric.add_batch(**columns)
    assert metric.tokens == {}
    for name, value in metric.compute().items():
        assert value == pytest.approx(np.mean([score[name].fmeasure for score in scores]), rel=1e-14, abs=0)
    official = sacrebleu.corpus_bleu(predictions, [first, second]).score
    assert metrics.load("sacrebleu").compute(**columns) == {"bleu": official}


@pytest.mark.parametrize(
    ("text", "half", "kind", "tokenizer"),
    [
        ("我们的新模型在所有测试中都表现得非常好。", "我们的新模型在所有测试", "Chinese characters", "zh"),
        ("新しいモデルは試験で良い結果を出しました。", "新しいモデルは試験で", "Japanese characters", "char"),
        ("แบบจำลองใหม่ทำงานได้ดีมากในการทดสอบทั้งหมด", "แบบจำลองใหม่ทำงานได้ดีมาก", "Thai characters", "char"),
        ("ម៉ូដែលថ្មីដំណើរការល្អណាស់ក្នុងការសាកល្បង", "ម៉ូដែលថ្មីដំណើរការល្អ", "Khmer characters", "char"),
        ("새로운 모델은 모든 시험에서 아주 좋은 결과를 냈다", "새로운 모델은 모든 시험에서", "Unicode words", "char"),
        ("новая модель показала очень хорошие результаты", "новая модель показала очень", "Unicode words", "13a"),
        ("النموذج الجديد حقق نتائج جيدة جدا في الاختبار", "النموذج الجديد حقق نتائج", "Unicode words", "13a"),
        ("नए मॉडल ने सभी परीक्षणों में बहुत अच्छे परिणाम दिए", "नए मॉडल ने सभी परीक्षणों", "Unicode words", "13a"),
        ("我用Python 3和PyTorch训练transformers模型。", "我用Python 3和PyTorch", "Chinese characters", "zh"),
    ],
)
def test_texts_in_any_script_are_compared_by_tokens_of_the_script(text, half, kind, tokenizer):
    rouge, bleu = metrics.load("rouge", use_stemmer=True), metrics.load("sacrebleu")
    columns = {"predictions": [half, half], "references": [text, [text, half + "x"]]}
    for metric in (rouge, bleu):
        metric.add_batch(**columns)
    assert rouge.tokens == dict.fromkeys(rouge.names, kind)
    assert bleu.tokens == ({} if tokenizer == "13a" else {"bleu": f"tokenizer {tokenizer}"})
    assert 0.5 < rouge.compute()["rouge1"] < 1.0
    theirs = sacrebleu.BLEU(tokenize=tokenizer).corpus_score([half, half], [[text, text], [None, half + "x"]])
    assert bleu.compute()["bleu"] == theirs.score > 0
    perfect = {"predictions": [text], "references": [text]}
    assert set(metrics.load("rouge").compute(**perfect).values()) == {1.0}
    assert metrics.load("sacrebleu").compute(**perfect)["bleu"] == pytest.approx(100)


def test_the_corpus_has_one_tokenizer_of_bleu_however_its_rows_are_split():
    references = ["今天的天气非常好", "OK then", "その本を読みました", "新しい本を読みました"]
    references += ["a cat sat on the mat", "123456"]
    predictions = [text[1:] for text in references]
    whole = sacrebleu.BLEU(tokenize="char").corpus_score(predictions, [references]).score
    for order in ([0, 1, 2, 3, 4, 5], [4, 1, 0, 5, 3, 2]):
        parts = [metrics.load("sacrebleu") for _ in range(3)]
        for place, row in enumerate(order):
            parts[place % 3].add(prediction=predictions[row], reference=references[row])
        merged = metrics.load("sacrebleu")
        merged.load_state_dict(json.loads(json.dumps(parts[0].state_dict())))
        for part in parts[1:]:
            merged.merge(part)
        assert merged.tokens == {"bleu": "tokenizer char"} and merged.compute() == {"bleu": whole}
    english = metrics.load("sacrebleu").compute(predictions=predictions * 2, references=[*references, *["a b"] * 6])
    assert english["bleu"] == sacrebleu.corpus_bleu(predictions * 2, [[*references, *["a b"] * 6]]).score
    with pytest.raises(InputError, match="the tokenizer ja-mecab needs MeCab and ipadic"):
        metrics.load("sacrebleu", tokenize="ja-mecab")
