"""Files in other encodings and of other programs are read as they were meant, or refused with a fix that works."""

import gzip
import json
import pickle
import shlex
import zipfile

import pytest
from tests.sources import dirty_files
from tests.sources.dirty_files import WIDE, WORDS, rows_of
from tests.sources.refusing import all_rows, assert_refused, plan_of, write

from loopwright.sources import SCHEMAS, InputError, files, open_table
from loopwright.sources.encodings import decode
from loopwright.sources.images.names import read_names

CLASSIFY = SCHEMAS["text-classification"]
TAG = SCHEMAS["token-classification"]


def flags_of(fix):
    words = shlex.split(fix)
    return {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}


def pairs(table):
    return [(row["text"], row["label"]) for row in table]


@pytest.mark.parametrize("encoding", [*WORDS, *WIDE])
def test_the_encoding_of_a_csv_file_is_detected(tmp_path, encoding):
    path = dirty_files.encoded_csv(tmp_path, encoding)
    table = open_table(path)
    assert pairs(table) == rows_of(encoding)
    assert table.settings()["encoding"] == encoding
    assert table.sha256 == files.sha256_of(path)  # of the bytes in the file
    again = pickle.loads(pickle.dumps(open_table(path, **table.settings())))
    assert again[5] == table[5] and again.place(5) == "line 7"


def test_plain_files_have_no_encoding(tmp_path):
    table = open_table(write(tmp_path / "a.csv", "text,label\ncaf\u00e9,1\n"))
    assert "encoding" not in table.settings() and not table.source.is_converted


@pytest.mark.parametrize("write_file", [dirty_files.encoded_jsonl, dirty_files.packed_csv])
@pytest.mark.parametrize("choice", [None, "gb18030", "GBK"])
def test_other_formats_have_encodings_too(tmp_path, write_file, choice):
    assert pairs(open_table(write_file(tmp_path), encoding=choice)) == rows_of("gb18030")


def test_words_and_tags_have_an_encoding(tmp_path):
    plan = plan_of(TAG, dirty_files.encoded_conll(tmp_path), validation_ratio=0.5)
    assert plan.labels.names == ("B-X", "O") and "电" in all_rows(plan)[0]["tokens"]


def test_a_mixed_file_is_said_to_be_mixed_and_its_fix_reads_it(tmp_path):
    path = dirty_files.mixed_csv(tmp_path)
    refusal = assert_refused("data.encoding", path, seen=("is mixed: UTF-8 in lines 4, 7,", "cp1252"))
    assert pairs(open_table(path, **flags_of(refusal.fix))) == rows_of("cp1252")


def test_a_damaged_line_is_named_and_its_fix_replaces_only_it(tmp_path):
    path = dirty_files.damaged_csv(tmp_path)
    refusal = assert_refused("data.encoding", path, seen="in line 5")
    found = pairs(open_table(path, **flags_of(refusal.fix)))
    assert "\ufffd" in found[3][0] and found[:3] + found[4:] == rows_of("gb18030", 60)[:3] + rows_of("gb18030", 60)[4:]
    wide = write(tmp_path / "wide.csv", "text,label\nab,1\n".encode("utf-16") + b"\x00")
    assert open_table(wide, **flags_of(assert_refused("data.encoding", wide).fix))[0] == {"text": "ab", "label": "1"}


def test_a_short_file_is_refused_with_how_it_looks(tmp_path):
    path = dirty_files.short_csv(tmp_path)
    refusal = assert_refused("data.encoding", path, seen=("gb18030", "'好,1'"), fix="--encoding ")
    assert len(open_table(path, **flags_of(refusal.fix))) == 4


@pytest.mark.parametrize(
    ("given", "fix"), [("utf-8", "gb18030"), ("cp949", "gb18030"), ("utf-16", "gb18030"), ("ascii", "gb18030")]
)
def test_a_wrong_encoding_is_answered_with_the_right_one(tmp_path, given, fix):
    refusal = assert_refused("data.encoding", dirty_files.encoded_csv(tmp_path), encoding=given)
    assert refusal.fix == f"--encoding {fix}" and refusal.error.flag == "--encoding"


@pytest.mark.parametrize(("name", "near"), [("gb-18030x", "gb18030"), ("cp12522", "cp1252"), ("base64", "big5")])
def test_unknown_encodings_get_the_nearest_name(tmp_path, name, near):
    path = write(tmp_path / "a.csv", "text,label\na,1\n")
    refusal = assert_refused("args.value", path, encoding=name, seen=name)
    assert refusal.fix.startswith("--encoding ") and (name == "base64" or near in refusal.fix)
    assert len(open_table(path, **flags_of(refusal.fix))) == 1


def test_names_of_classes_and_annotations_have_an_encoding(tmp_path):
    names = {0: "très bien, à côté de l’été", 1: "déçu, hélas, où ça"}
    text = json.dumps(names, ensure_ascii=False)
    assert read_names(write(tmp_path / "id2label.json", text.encode("utf-16"))) == names
    assert read_names(write(tmp_path / "classes.txt", "\n".join(names.values()).encode("cp1252"))) == names
    short = write(tmp_path / "labels.txt", "鼠\n狗".encode("gbk"))
    assert_refused("data.encoding", read_names, short, seen="gb18030", fix="save it as UTF-8")
    coco = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [], "categories": [{"id": 1, "name": "狗"}]}
    path = write(tmp_path / "coco.json", json.dumps(coco, ensure_ascii=False).encode("gbk"))
    assert open_table(path, kind="coco", encoding="gbk").names == {1: "狗"}
    assert_refused("data.encoding", path, kind="coco", fix="--encoding ")


def test_short_texts_are_decoded_or_refused():
    text = "l’été, j’étais très bien à côté de la mer, où l’eau est « fraîche »"
    assert decode(text.encode("cp1252"), None, "x") == (text, "cp1252")
    assert decode("好".encode("gbk"), "gbk", "x")[0] == "好" and decode("é".encode(), None, "x") == ("é", None)
    assert_refused("data.encoding", decode, "好".encode("gbk"), None, "stdin", fix="--encoding ")


def test_rare_encodings_are_found_in_sentences_or_offered_as_charset_normalizer_guesses_them():
    russian = "Это хороший фильм, который стоит посмотреть. Плохая погода сегодня, и мы остались дома."
    greek = "Καλημέρα κόσμε, αυτό είναι ένα καλό βιβλίο"
    for name, text in (("mac_cyrillic", russian), ("cp855", russian), ("cp737", greek)):
        assert decode(text.encode(name), None, "x") == (text, name)
    turkish = "güzel bir gün, çok iyi öğrenci şimdi ışık".encode("mac_turkish")
    assert_refused("data.encoding", decode, turkish, None, "x", fix="--encoding mac_turkish")


@pytest.mark.parametrize("packing", [".gz", ".bz2", ".xz", ".zip"])
def test_packed_files_are_unpacked_up_to_a_limit(tmp_path, monkeypatch, packing):
    path = dirty_files.packed_csv(tmp_path, packing)
    assert pairs(open_table(path)) == rows_of("gb18030")
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 100)
    assert_refused("data.gzip", path, fix=" instead of ")
    damaged = write(tmp_path / f"bad.csv{packing}", path.read_bytes()[:-30])
    assert_refused("data.gzip", damaged)


def test_no_room_for_a_temporary_file_is_an_error(tmp_path, monkeypatch):
    class Full:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def write(self, data):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.tempfile, "TemporaryFile", Full)
    assert_refused("disk.write", dirty_files.packed_csv(tmp_path), fix="TMPDIR")


def test_a_sheet_is_read(tmp_path, monkeypatch):
    path = dirty_files.excel_sheet(tmp_path)
    table = open_table(path)
    assert pairs(table) == rows_of("gb18030") and table.columns == ("text", "label", "day", "stars")
    assert (table[0]["day"], table[0]["stars"], table.place(1)) == ("2024-01-05", 3.5, "row 4")
    assert open_table(path, **table.settings())[3] == table[3]
    assert_refused("args.value", path, sheet="Shet", fix="--sheet Sheet")
    assert_refused("data.column", dirty_files.excel_with_title(tmp_path), seen=("cell B2", "row 1"))
    assert_refused("data.value", write(tmp_path / "old.xlsx", b"\xd0\xcf\x11\xe0"))
    assert_refused("data.ending", write(tmp_path / "web.xls", "text\tlabel\n"), fix="--file_kind csv")
    assert "--file_kind" not in assert_refused("data.ending", write(tmp_path / "web.xls", "<html><table>")).fix
    named = write(tmp_path / "named.xlsx", "text,label\na,1\n")
    assert len(open_table(named, kind=flags_of(assert_refused("data.value", named).fix)["file_kind"])) == 1
    with zipfile.ZipFile(tmp_path / "mac.zip", "w") as archive:
        for name in ("__MACOSX/._rows.csv", "rows.csv"):
            archive.writestr(name, "text,label\n")
    assert assert_refused("data.ending", tmp_path / "mac.zip").fix.split(" instead")[0].endswith("   then   rows.csv")
    monkeypatch.setitem(__import__("sys").modules, "openpyxl", None)
    assert_refused("install.extra", path, fix="pip install 'loopwright[excel]'")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.feather", "rows.arrow"])
def test_arrow_files_are_read_without_datasets(tmp_path, monkeypatch, name):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    path = dirty_files.arrow_file(tmp_path, name)
    table = pickle.loads(pickle.dumps(open_table(path)))
    assert pairs(table) == rows_of("gb18030")
    assert (table[0]["day"], table[1]["day"], table[7]["meta"]) == (
        "2024-01-05",
        None,
        {"tags": [{"name": "a"}], "k": 7},
    )
    assert plan_of(
        CLASSIFY, path, columns={"label": "meta.tags.0.name", "text": "text"}, label_kind="multi"
    ).labels.names == ("a",)


def test_nested_columns_are_guessed_and_named(tmp_path):
    path = dirty_files.nested_jsonl(tmp_path)
    assert_refused("data.missing", CLASSIFY, path, seen="line 1")
    plan = plan_of(CLASSIFY, path, missing_values="drop")
    assert plan.columns == {"text": "data.review.text", "label": "annotations.0.label"}
    assert {row["text"] for row in all_rows(plan)} == {text for text, _ in rows_of("gb18030")[1:]}
    near = assert_refused("data.column", CLASSIFY, path, columns={"text": "data.review.txt"}, seen="annotations.0.by")
    assert near.fix.startswith("--text_column data.review.text")
    lines = [json.dumps({"a.b": {"c.d": f"text {k}"}, "y": k % 2}) for k in range(30)]
    dotted = plan_of(
        CLASSIFY, write(tmp_path / "dots.jsonl", "\n".join(lines)), columns={"text": "a.b.c.d", "label": "y"}
    )
    assert dotted.rows("train")[0]["text"].startswith("text ")


def test_decimal_commas_are_read_where_semicolons_separate(tmp_path):
    plan = plan_of(CLASSIFY, dirty_files.decimal_commas(tmp_path), columns={"label": "price"})
    assert plan.label_range == (0.5, 1223.35) and "decimal='comma'" in " ".join(plan.guesses)
    values = {row["text"]: row["label"] for row in all_rows(plan)}
    assert values["house number 2"] == 2.5 and values["house number 3"] == 1203.35
    again = open_table(plan.files[0].path, **plan.files[0].settings)
    assert again[3]["price"] == "1203.35" == list(again)[3]["price"]
    path = dirty_files.ambiguous_commas(tmp_path)
    refusal = assert_refused("data.label_type", CLASSIFY, path, columns={"label": "price"}, seen="1,200")
    for sign, least in (("comma", 1.2), ("point", 1200)):
        assert plan_of(CLASSIFY, path, columns={"label": "price"}, decimal=sign).label_range[0] == least
    assert flags_of(refusal.fix.split("   or   ")[0]) == {"decimal": "comma"}


def test_a_bomb_inside_another_encoding_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_UNPACKED_BYTES", 1 << 16)
    assert_refused("data.gzip", write(tmp_path / "bomb.csv.gz", gzip.compress(b"text,label\n" + b"a,1\n" * 99_999)))


# Few and short words, as labels are: the right encoding is found or offered first, and never another one found.
SHORT = {
    "gb18030": [
        "图片 类别 猫 狗 鸟",
        "好 坏 中",
        "正面 负面 中性",
        "评论 情感 好评 差评",
        "苹果 香蕉 梨",
        "名称 标签 男 女",
        "体育 财经 娱乐 科技",
        "是 否",
    ],
    "big5": [
        "圖片 類別 貓 狗 鳥",
        "好評 差評 普通",
        "正面 負面 中性",
        "體育 財經 娛樂 科技",
        "蘋果 香蕉 梨子",
        "評論 標籤 是 否",
    ],
    "cp932": [
        "画像 ラベル 猫 犬 鳥",
        "良い 悪い 普通",
        "はい いいえ",
        "ポジティブ ネガティブ",
        "りんご みかん ぶどう",
        "感想 評価 高い 低い",
    ],
    "euc_jp": [
        "画像 ラベル 猫 犬 鳥",
        "良い 悪い 普通",
        "ポジティブ ネガティブ",
        "りんご みかん ぶどう",
        "感想 評価 面白い つまらない",
    ],
    "cp949": [
        "파일 라벨 고양이 개 새",
        "긍정 부정 중립",
        "좋음 나쁨 보통",
        "사과 바나나 배",
        "제목 분류 정치 경제 사회",
        "예 아니오 모름",
    ],
    "cp1251": [
        "файл метка кот собака птица",
        "да нет",
        "хорошо плохо нормально",
        "текст класс спорт политика наука",
        "Отзыв Оценка",
        "позитив негатив нейтрально",
    ],
    "koi8_r": [
        "файл метка кот собака птица",
        "хорошо плохо нормально",
        "текст класс спорт политика наука",
        "отзыв оценка позитив негатив",
    ],
    "cp1252": [
        "café thé crème",
        "schön häßlich übel",
        "niño año señor",
        "prix 5 € 7 €",
        "déçu ravi énervé",
        "não sim talvez ótimo",
        "l’été d’hiver",
        "smörgås blå röd",
    ],
    "cp1250": [
        "dobry zły średni żółty",
        "pozitivní negativní žádný příští",
        "jó rossz közepes gyönyörű őszi",
        "świetny słaby niezły",
        "dobrý špatný výborný",
    ],
    "cp1253": ["αρχείο ετικέτα γάτα σκύλος πουλί", "καλό κακό μέτριο", "ναι όχι", "θετικό αρνητικό ουδέτερο"],
    "cp1255": ["קובץ תווית חתול כלב ציפור", "טוב רע בינוני", "חיובי שלילי ניטרלי", "כן לא"],
    "cp1256": ["ملف تصنيف قطة كلب طائر", "جيد سيئ متوسط", "إيجابي سلبي محايد", "نعم لا"],
    "cp874": ["ไฟล์ ป้าย แมว หมา นก", "ดี แย่ ปานกลาง", "บวก ลบ กลาง", "ใช่ ไม่ใช่"],
    "cp1254": ["iyi kötü çok güzel", "olumlu olumsuz tarafsız değil", "kırmızı yeşil sarı"],
    "johab": ["이 영화는 정말 재미있었어요 이야기가 길어서 졸렸습니다"],
    **dict.fromkeys(("iso8859_5", "cp855"), ["Это хороший фильм который стоит посмотреть сегодня"]),
    "mac_greek": ["Καλημέρα κόσμε αυτό είναι ένα καλό βιβλίο"],
    "cp862": ["שלום עולם זה ספר טוב מאוד"],
}
DOUBTFUL = {"כן לא"}


@pytest.mark.parametrize(("encoding", "words"), [(name, each) for name, texts in SHORT.items() for each in texts])
def test_the_encoding_of_short_words_is_found_or_offered_first(tmp_path, encoding, words):
    text = "file,label\n" + "".join(f"{k}.png,{word}\n" for k, word in enumerate(words.split() * 3))
    path = write(tmp_path / "rows.csv", text.encode(encoding))
    expected = [line.split(",")[1] for line in text.splitlines()[1:]]
    try:
        found = open_table(path)
    except InputError as error:
        assert error.code == "data.encoding" and error.flag == "--encoding"
        if words in DOUBTFUL:
            return
        found = open_table(path, **flags_of(error.fix))
    assert [row["label"] for row in found] == expected


@pytest.mark.parametrize(("encoding", "text"), [("iso2022_jp", "映画はよい"), ("iso2022_kr", "영화는 좋아요")])
def test_escape_sequences_name_the_encoding(tmp_path, encoding, text):
    table = open_table(write(tmp_path / "rows.csv", f"text,label\n{text},1\n{text},2\n".encode(encoding)))
    assert table.settings()["encoding"] == encoding and table[1]["text"] == text
