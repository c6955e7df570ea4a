"""Files as newcomers bring them, by kind: a task, a function that writes the data, and the rows that it holds.

`benchmarks/first_hour.py` leads each of them to a trained model and its predictions by the printed fixes alone.
"""

import csv
import gzip
import io
import json
import random
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NUM_ROWS = 48
WORDS = {
    "en": (("great", "lovely", "superb"), ("awful", "dull", "poor"), "the film number"),
    "fr": (("très beau", "génial", "réussi"), ("mauvais", "ennuyé", "raté"), "c’est l’été à la télé – n°"),
    "de": (("schön", "großartig", "köstlich"), ("übel", "öde", "häßlich"), "der Film für Käufer Nr."),
    "zh": (("很好看", "非常喜欢", "质量不错"), ("太差了", "不喜欢", "浪费时间"), "这部电影我们昨天晚上看的"),
    "tw": (("很好看", "非常喜歡", "品質不錯"), ("太差了", "不喜歡", "浪費時間"), "這部電影我們昨天晚上看的"),
    "ja": (("とても良い", "素晴らしい", "大好き"), ("ひどい", "つまらない", "嫌い"), "この映画は昨日の夜に見ました"),
    "ko": (
        ("정말 좋아요", "훌륭합니다", "재미있다"),
        ("별로예요", "지루하다", "나쁩니다"),
        "이 영화는 어제 밤에 봤습니다",
    ),
    "ru": (("отличный", "прекрасный", "хороший"), ("ужасный", "скучный", "плохой"), "вчера мы смотрели этот фильм"),
}


class Kind(NamedTuple):
    """A kind of dirty data."""

    task: str
    write: Callable[[Path], Path]  # writes into a folder, and returns the data for --data
    num_rows: int | None = NUM_ROWS  # of the predictions for that file; None for a folder of images with its own count


def rows(language: str = "en", labels: Sequence[Any] = ("pos", "neg")) -> list[dict[str, Any]]:
    """Return texts and labels; no two texts are alike."""
    chosen, (good, bad, middle) = random.Random(0), WORDS[language]
    made = []
    for number in range(NUM_ROWS):
        words = good if number % 2 == 0 else bad
        made.append({"text": f"{chosen.choice(words)} {middle} {number}", "label": labels[number % 2]})
    return made


def table(made: Sequence[dict[str, Any]], delimiter: str = ",") -> str:
    file = io.StringIO()
    writer = csv.DictWriter(file, list(made[0]), delimiter=delimiter, lineterminator="\n")
    writer.writeheader()
    writer.writerows(made)
    return file.getvalue()


def csv_in(encoding: str, language: str, delimiter: str = ",", name: str = "reviews.csv") -> Callable[[Path], Path]:
    return writes(name, table(rows(language), delimiter).encode(encoding))


def writes(name: str, content: bytes | str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write


def changed(change: Callable[[int, dict[str, Any]], Any], name: str = "reviews.csv") -> Callable[[Path], Path]:
    made = rows()
    for number, row in enumerate(made):
        change(number, row)
    return writes(name, table(made))


def lines_of(change: Callable[[list[str]], Any], name: str = "reviews.csv") -> Callable[[Path], Path]:
    lines = table(rows()).splitlines()
    change(lines)
    return writes(name, "\n".join(lines) + "\n")


def mixed(folder: Path) -> Path:
    lines = table(rows("fr")).splitlines()
    parts = [line.encode("cp1252" if place % 3 == 1 else "utf-8") for place, line in enumerate(lines)]
    return writes("reviews.csv", b"\n".join(parts) + b"\n")(folder)


def excel(folder: Path) -> Path:
    import datetime

    import openpyxl

    book = openpyxl.Workbook()
    book.active.append(["date", "text", "label", None])
    for number, row in enumerate(rows("zh")):
        day = datetime.date(2024, 1, 1) + datetime.timedelta(number)
        book.active.append([day, row["text"], row["label"], None])
    book.create_sheet("notes").append(["not for training"])
    book.save(folder / "reviews.xlsx")
    return folder / "reviews.xlsx"


def parquet(folder: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows()), folder / "reviews.parquet")
    return folder / "reviews.parquet"


def packed(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "reviews.zip", "w") as archive:
        archive.writestr("reviews.csv", table(rows()))
    return folder / "reviews.zip"


def nested(folder: Path) -> Path:
    made = [{"id": n, "data": {"review": {"text": row["text"]}}, "meta": [{"label": row["label"]}]} for n, row in
            enumerate(rows())]  # fmt: skip
    return writes("reviews.jsonl", "\n".join(map(json.dumps, made)))(folder)


def wrapped(folder: Path) -> Path:
    return writes("reviews.json", json.dumps({"version": 1, "data": rows()}))(folder)


def switches(folder: Path) -> Path:
    made = [{"text": row["text"], "toxic": n % 2, "insult": int(n % 3 == 0)} for n, row in enumerate(rows())]
    return writes("comments.csv", table(made))(folder)


def commas(folder: Path) -> Path:
    made = [{"text": row["text"], "price": f"{n % 2 * 3 + n / 10:.1f}".replace(".", ",")} for n, row in
            enumerate(rows())]  # fmt: skip
    return writes("prices.csv", table(made, ";"))(folder)


def tags(folder: Path) -> Path:
    text = "".join(
        f"{name}\tB-PER\n住在\tO\n{place}\tB-LOC\n\n" for name in "王李张刘" for place in ("北京", "上海", "广州")
    )
    return writes("names.conll", text.encode("gb18030"))(folder)


def photos(folder: Path) -> Path:
    import numpy as np
    from PIL import Image

    for number in range(24):
        place = folder / "photos" / ("cat", "dog")[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 90, (12, 12, 3), np.uint8) + 150 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(place)
    for number, content in enumerate((b"", b"not an image", place.read_bytes()[:60])):
        (folder / "photos" / "cat" / f"bad{number}.png").write_bytes(content)
    (folder / "photos" / ".DS_Store").write_bytes(b"\0")
    return folder / "photos"


def image_kinds() -> dict[str, Kind]:
    from sources import dirty_images

    names = ("masks_of_0_and_255", "masks_of_colors", "masks_as_jpeg", "coco_of_unknown_images")
    names += ("coco_without_outlines", "yolo_of_unnamed_classes", "images_and_masks_as_classes")
    made = {}
    for name in names:
        task, write, _, _ = dirty_images.FIXABLE[name]
        made[name.replace("_", " ")] = Kind(task, write, None)
    return made


def _set(name: str, value: Any, every: int) -> Callable[[int, dict[str, Any]], None]:
    return lambda number, row: row.update({name: value}) if number % every == 1 else None


TEXT = "text-classification"
KINDS: dict[str, Kind] = {
    "Chinese csv of Excel (GBK)": Kind(TEXT, csv_in("gbk", "zh")),
    "traditional Chinese (Big5)": Kind(TEXT, csv_in("big5", "tw")),
    "Japanese (Shift-JIS)": Kind(TEXT, csv_in("cp932", "ja")),
    "Korean (EUC-KR)": Kind(TEXT, csv_in("euc-kr", "ko")),
    "Russian (cp1251)": Kind(TEXT, csv_in("cp1251", "ru")),
    "French with curly quotes (cp1252)": Kind(TEXT, csv_in("cp1252", "fr")),
    "German with semicolons and a mark": Kind(TEXT, csv_in("utf-8-sig", "de", ";")),
    "tsv in UTF-16": Kind(TEXT, csv_in("utf-16", "fr", "\t", "reviews.tsv")),
    "half UTF-8, half cp1252": Kind(TEXT, mixed),
    "xlsx with dates and a second sheet": Kind(TEXT, excel),
    "parquet": Kind(TEXT, parquet),
    "csv.gz": Kind(TEXT, writes("reviews.csv.gz", gzip.compress(table(rows()).encode()))),
    "zip with a csv": Kind(TEXT, packed),
    "columns in German": Kind(TEXT, writes("kunden.csv", table(rows()).replace("text,label", "Meinung,Urteil"))),
    "columns that say nothing": Kind(TEXT, writes("x.csv", table(rows()).replace("text,label", "a,b"))),
    "no header": Kind(TEXT, writes("x.csv", table(rows()).partition("\n")[2])),
    "JSON by column": Kind(
        TEXT, writes("x.json", json.dumps({name: [row[name] for row in rows()] for name in rows()[0]}))
    ),
    "a total at the end": Kind(TEXT, lines_of(lambda lines: lines.append("Total,48")), NUM_ROWS + 1),
    "blank texts": Kind(TEXT, changed(_set("text", "  ", 9))),
    "blank labels": Kind(TEXT, changed(_set("label", "", 9))),
    "a misspelt label": Kind(TEXT, changed(lambda n, row: row.update(label="ngeative") if n == 3 else None)),
    "numbers and words as labels": Kind(TEXT, changed(_set("label", 0, 5))),
    "ragged rows": Kind(TEXT, lines_of(lambda lines: lines.__setitem__(5, lines[5] + ",more"))),
    "a quote that never ends": Kind(TEXT, lines_of(lambda lines: lines.__setitem__(7, '"' + lines[7]))),
    "two columns of one name": Kind(TEXT, lines_of(lambda lines: lines.__setitem__(0, "text,text"))),
    "a NUL byte": Kind(TEXT, lines_of(lambda lines: lines.__setitem__(4, lines[4] + "\0"))),
    "old Mac line ends": Kind(TEXT, writes("reviews.csv", table(rows()).replace("\n", "\r"))),
    "an unknown ending": Kind(TEXT, writes("reviews.export", table(rows()))),
    "nested JSON": Kind(TEXT, nested),
    "rows inside an object": Kind(TEXT, wrapped),
    "labels with a separator": Kind(TEXT, changed(_set("label", "neg; pos", 4))),
    "columns of 0 and 1": Kind(TEXT, switches),
    "decimal commas": Kind(TEXT, commas),
    "tags in GB18030": Kind("token-classification", tags, 12),
    "a typing error in a flag's value": Kind(TEXT, csv_in("utf-8", "en")),
    "damaged photos": Kind("image-classification", photos, 27),
}
MISTYPED = {"a typing error in a flag's value": ["--text_column", "txet", "--lr", "0,001", "--batchsize", "8"]}
