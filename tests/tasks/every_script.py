"""Small made-up data for every text task, in Chinese and in Arabic: columns, labels and texts."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple


class Language(NamedTuple):
    """Words of a language; `joint` is between them."""

    name: str
    joint: str
    people: tuple[str, ...]
    places: tuple[str, ...]
    good: tuple[str, ...]
    bad: tuple[str, ...]
    verb: str
    columns: tuple[str, ...]
    labels: tuple[str, str]


CHINESE = Language(
    "中文", "", ("小明", "老师", "妈妈", "医生"), ("北京", "学校", "公园", "上海"), ("精彩", "很好", "喜欢"),
    ("无聊", "糟糕", "讨厌"), "去了", ("评论", "回答", "情感", "编号"), ("差评", "好评"),
)  # fmt: skip
ARABIC = Language(
    "عربي", " ", ("أحمد", "المعلم", "الطبيب", "أُمِّي"), ("القاهرة", "المدرسة", "الحديقة", "بيروت"),
    ("رائع", "ممتاز", "جميل"), ("سيئ", "ممل", "قبيح"), "ذهب إلى", ("النص", "الجواب", "التقييم", "الرقم"),
    ("سلبي", "إيجابي"),
)  # fmt: skip
LANGUAGES = {"Chinese": CHINESE, "Arabic": ARABIC}
Rows = list[dict[str, Any]]


def classified(words: Language, number: int = 96) -> Rows:
    """Return texts whose last word decides their label."""
    draw, (text, _, label, _) = random.Random(0), words.columns
    return [
        {
            text: words.joint.join([*_clause(words, draw), draw.choice((words.bad, words.good)[index % 2])]),
            label: words.labels[index % 2],
        }
        for index in range(number)
    ]


def tagged(words: Language) -> Rows:
    draw, (text, answer, *_) = random.Random(1), words.columns
    return [{text: _clause(words, draw), answer: [words.labels[0], "O", words.labels[1]]} for _ in range(40)]


def paired(words: Language) -> Rows:
    text, answer, *_ = words.columns
    return [{text: row[text], answer: row[text][: len(row[text]) // 2]} for row in classified(words, 40)]


def chosen(words: Language) -> Rows:
    draw, (text, answer, label, _) = random.Random(2), words.columns
    return [
        {text: words.joint.join(_clause(words, draw)), answer: draw.sample(words.places, 3), label: index % 3}
        for index in range(40)
    ]


def answered(words: Language) -> Rows:
    draw, (text, answer, label, number) = random.Random(3), words.columns
    rows = []
    for index in range(40):
        person, verb, place = _clause(words, draw)
        context = words.joint.join([person, verb, place])
        start = context.index(place)
        rows.append(
            {text: context, label: f"{person}؟", answer: {"text": [place], "answer_start": [start]}, number: f"{index}"}
        )
    return rows


def _clause(words: Language, draw: random.Random) -> list[str]:
    return [draw.choice(words.people), words.verb, draw.choice(words.places)]


class TextTask(NamedTuple):
    """The data of a task, and its columns by role."""

    rows: Callable[[Language], Rows]
    roles: dict[str, int]


TASKS = {
    "text-classification": TextTask(classified, {"text": 0, "label": 2}),
    "token-classification": TextTask(tagged, {"tokens": 0, "tags": 1}),
    "multiple-choice": TextTask(chosen, {"context": 0, "choices": 1, "label": 2}),
    "sentence-embedding": TextTask(paired, {"text": 0, "text_pair": 1}),
    "question-answering": TextTask(answered, {"context": 0, "question": 2, "answers": 1, "id": 3}),
    "causal-lm": TextTask(classified, {"text": 0}),
    "masked-lm": TextTask(classified, {"text": 0}),
    "summarization": TextTask(paired, {"source": 0, "target": 1}),
    "translation": TextTask(paired, {"source": 0, "target": 1}),
}
