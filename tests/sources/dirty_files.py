"""Generators of dirty data files, one function per kind: each takes a folder and returns the path of its file.

All but the last three hold ROWS, a text and a label, so that a test can compare. `KINDS` has them by name.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import zipfile
from datetime import date
from pathlib import Path

FRENCH = [("un film très drôle", "bon"), ("l’histoire m’a déçu, hélas", "mauvais"), ("joué à merveille", "bon")]
CHINESE = [("这部电影非常好看，演员的表演很出色", "好评"), ("剧情拖沓，看得我快睡着了", "差评")]
WORDS = {
    "gb18030": CHINESE,
    "big5": [("這部電影非常好看，演員的表演很出色", "好評"), ("劇情拖沓，看得我快睡著了", "差評")],
    "cp932": [("この映画はとても面白かったです", "良い"), ("話が長くて眠くなりました", "悪い")],
    "euc_jp": [("部屋はきれいでスタッフも親切でした", "良い"), ("電池がすぐ切れるし画面に傷があった", "悪い")],
    "cp949": [("이 영화는 정말 재미있었어요", "좋음"), ("이야기가 길어서 졸렸습니다", "나쁨")],
    "cp1251": [("Отличный фильм, актёры играют прекрасно", "хорошо"), ("Сюжет затянут, чуть не уснул", "плохо")],
    "koi8_r": [("Отличный фильм, актёры играют прекрасно", "хорошо"), ("Сюжет затянут, чуть не уснул", "плохо")],
    "cp1252": FRENCH,
    "cp1250": [("Świetny film, aktorzy grają znakomicie", "dobry"), ("Fabuła się ciągnie, prawie zasnąłem", "zły")],
    "cp1253": [("Υπέροχη ταινία, οι ηθοποιοί παίζουν εξαιρετικά", "καλό"), ("Η ιστορία είναι αργή", "κακό")],
    "cp1254": [
        ("Çok güzel bir film, oyuncular harika değil mi", "iyi"),
        ("Hikaye çok uzun, sıkıcı, uyuyordum", "kötü"),
    ],
    "cp1255": [
        ("סרט נהדר, השחקנים מצוינים", "טוב"),
        ("הסיפור ארוך מדי, כמעט נרדמתי", "רע"),
        ("החדר היה נקי והצוות אדיב", "טוב"),
    ],
    "cp1256": [("فيلم رائع والممثلون ممتازون", "جيد"), ("القصة طويلة وكدت أنام", "سيئ")],
    "cp874": [("หนังสนุกมาก นักแสดงเก่ง", "ดี"), ("เนื้อเรื่องยาวเกินไป เกือบหลับ", "แย่")],
    "mac_roman": FRENCH,
}
WIDE = ("utf-8-sig", "utf-16", "utf-32", "utf-16-le")
NUM_ROWS = 24


def rows_of(encoding: str, num_rows: int = NUM_ROWS) -> list[tuple[str, str]]:
    words = WORDS.get(encoding, CHINESE)
    return [(f"{words[k % len(words)][0]} {k}", words[k % len(words)][1]) for k in range(num_rows)]


def csv_text(rows, delimiter=",", header=("text", "label"), end="\n") -> str:
    file = io.StringIO()
    csv.writer(file, delimiter=delimiter, lineterminator=end).writerows([header, *rows])
    return file.getvalue()


def _write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def encoded_csv(folder: Path, encoding: str = "gb18030") -> Path:
    return _write(folder / f"{encoding}.csv", csv_text(rows_of(encoding)).encode(encoding))


def encoded_jsonl(folder: Path, encoding: str = "gb18030") -> Path:
    lines = [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows_of(encoding)]
    return _write(folder / f"{encoding}.jsonl", "\n".join(lines).encode(encoding))


def encoded_conll(folder: Path, encoding: str = "gb18030") -> Path:
    sentences = [
        "\n".join(f"{one}\t{'B-X' if one in '电影' else 'O'}" for one in text if one != " ")
        for text, _ in rows_of(encoding)
    ]
    return _write(folder / "rows.conll", "\n\n".join(sentences).encode(encoding))


def mixed_csv(folder: Path) -> Path:
    lines = csv_text(rows_of("cp1252")).splitlines(keepends=True)
    return _write(folder / "mixed.csv", b"".join(s.encode("cp1252" if k % 3 else "utf-8") for k, s in enumerate(lines)))


def damaged_csv(folder: Path) -> Path:
    """Chinese, with one byte lost in line 5."""
    lines = [line.encode("gb18030") for line in csv_text(rows_of("gb18030", 60)).splitlines(keepends=True)]
    return _write(folder / "damaged.csv", b"".join([*lines[:4], lines[4][1:].replace(b",", b"\xff,"), *lines[5:]]))


def short_csv(folder: Path) -> Path:
    return _write(folder / "short.csv", "text,label\n好,1\nab,0\n好,1\nab,0\n".encode("gb18030"))


def packed_csv(folder: Path, packing: str = ".gz") -> Path:
    data = csv_text(rows_of("gb18030")).encode("gb18030")
    if packing == ".zip":
        with zipfile.ZipFile(folder / "rows.csv.zip", "w") as archive:
            archive.writestr("reviews/rows.csv", data)
        return folder / "rows.csv.zip"
    pack = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[packing]
    return _write(folder / f"rows.csv{packing}", pack(data))


def _sheet(folder: Path, rows, name: str = "rows.xlsx") -> Path:
    import openpyxl

    book = openpyxl.Workbook()
    for row in rows:
        book.active.append(row)
    book.save(folder / name)
    return folder / name


def excel_sheet(folder: Path) -> Path:
    """A title-free sheet with a blank row, a date, an error value, and blank cells at its end."""
    rows = [["text", "label", "day", "stars"], *([*row, date(2024, 1, 5), 3.5] for row in rows_of("gb18030"))]
    return _sheet(folder, [*rows[:2], [None] * 4, *rows[2:], [None] * 9, [None] * 9])


def excel_with_title(folder: Path) -> Path:
    return _sheet(folder, [["Reviews of 2024"], ["text", "label"], *rows_of("gb18030")], "title.xlsx")


def arrow_file(folder: Path, name: str = "rows.parquet") -> Path:
    import pyarrow as pa
    from pyarrow import feather, parquet

    rows = rows_of("gb18030")
    columns = {
        "text": [text for text, _ in rows],
        "label": pa.array([label for _, label in rows]).dictionary_encode(),
        "day": pa.array([date(2024, 1, 5), None] * 12),
        "meta": [{"tags": [{"name": "a"}], "k": k} for k in range(len(rows))],
    }
    table = pa.table(columns)
    if name.endswith("parquet"):
        parquet.write_table(table, folder / name, row_group_size=5)
    elif name.endswith("feather"):
        feather.write_feather(table, str(folder / name))
    else:
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:  # as `datasets` does
            writer.write_table(table)
    return folder / name


def nested_jsonl(folder: Path) -> Path:
    rows = [
        {"id": k, "data": {"review": {"text": text} if k else None}, "annotations": [{"label": label, "by": "me"}]}
        for k, (text, label) in enumerate(rows_of("gb18030"))
    ]
    return _write(folder / "nested.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())


def decimal_commas(folder: Path) -> Path:
    rows = [(f"house number {k}", f"1.{200 + k},{k % 10}5" if k % 2 else f"{k},5") for k in range(NUM_ROWS)]
    return _write(folder / "prices.csv", csv_text(rows, ";", ("text", "price")).encode())


def ambiguous_commas(folder: Path) -> Path:
    rows = [(f"house number {k}", f"{k + 1},{200 + k}") for k in range(NUM_ROWS)]
    return _write(folder / "thousands.csv", csv_text(rows, ";", ("text", "price")).encode())


KINDS = {
    **{f"csv in {name}": lambda folder, name=name: encoded_csv(folder, name) for name in (*WORDS, *WIDE)},
    "jsonl in cp949": lambda folder: encoded_jsonl(folder, "cp949"),
    "conll in gb18030": encoded_conll,
    "mixed": mixed_csv,
    "damaged": damaged_csv,
    "short": short_csv,
    **{f"packed {name}": lambda folder, name=name: packed_csv(folder, name) for name in (".gz", ".bz2", ".xz", ".zip")},
    "xlsx": excel_sheet,
    "xlsx with a title": excel_with_title,
    **{
        name: lambda folder, name=name: arrow_file(folder, name)
        for name in ("rows.parquet", "rows.feather", "rows.arrow")
    },
    "nested": nested_jsonl,
    "decimal commas": decimal_commas,
    "ambiguous commas": ambiguous_commas,
}
