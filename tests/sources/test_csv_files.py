"""csv and tsv files against Python's csv module, and by row against in order."""

import csv
import io
import itertools
import pickle

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from tests.sources.refusing import assert_refused, plan_of, write

from loopwright.sources import SCHEMAS, files, open_table
from loopwright.sources.delimited import DelimitedSplitter, Dialect, cut_columns, split_fields

FIELD = st.text(st.sampled_from("ab ,;\t\"'\n\u00e9\u2028\U0001f600"), max_size=6)


def rows_by_index(text: str, dialect: Dialect, cut: int) -> list[list[str]]:
    """Return the rows that the splitter finds when it is fed in two pieces."""
    data, splitter = text.encode(), DelimitedSplitter(dialect)
    starts, num_done = splitter.split(data[:cut], False)
    found = starts.tolist()
    if num_done < len(data):
        more, num_more = splitter.split(data[num_done:], True)
        found += [num_done + start for start in more.tolist()]
        assert num_done + num_more == len(data)
    places = [*found, len(data)]
    rows = [data[a:b].decode() for a, b in zip(places, places[1:], strict=False)]
    return [split_fields(row.rstrip("\r\n"), dialect) for row in rows]


def is_closed(text: str) -> bool:
    return list(csv.reader(io.StringIO(text + "\nx", newline="")))[-1] == ["x"]


@given(
    rows=st.lists(st.lists(FIELD, min_size=2, max_size=4), min_size=1, max_size=6),
    delimiter=st.sampled_from(",;\t|"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    line_end=st.sampled_from(["\n", "\r\n"]),
    data=st.data(),
)
@settings(max_examples=200)
def test_what_the_csv_module_writes_is_read_back_wherever_the_file_is_cut(rows, delimiter, quoting, line_end, data):
    written = io.StringIO(newline="")
    csv.writer(written, delimiter=delimiter, quoting=quoting, lineterminator=line_end).writerows(rows)
    text = written.getvalue()
    cut = data.draw(st.integers(0, len(text.encode())))
    assert rows_by_index(text, Dialect(delimiter, True), cut) == rows


@given(text=st.text(st.sampled_from('ab,"\n\u00e9'), min_size=1, max_size=24), data=st.data())
@settings(max_examples=500)
def test_stray_quotes_are_read_as_the_csv_module_reads_them(text, data):
    cut = data.draw(st.integers(0, len(text.encode())))
    if not is_closed(text):
        return
    expected = [row for row in csv.reader(io.StringIO(text, newline="")) if row]
    assert rows_by_index(text, Dialect(",", True), cut) == expected


@given(rows=st.lists(st.lists(FIELD, min_size=3, max_size=3), min_size=1, max_size=8))
@settings(max_examples=60)
def test_a_file_read_by_row_in_order_and_by_the_csv_module_is_the_same(rows, tmp_path_factory):
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["a", "b", "c"], *rows])
    table = open_table(path)
    with open(path, encoding="utf-8", newline="") as file:
        expected = [dict(row) for row in csv.DictReader(file)]
    assert list(table) == expected
    assert [table[index] for index in range(len(table))] == expected
    assert [table[index] for index in reversed(range(len(table)))] == expected[::-1]


@given(
    lines=st.lists(st.text(st.sampled_from('ab,"\r\u00e9'), min_size=1, max_size=12), min_size=1, max_size=6),
    has_quotes=st.booleans(),
    num_columns=st.integers(1, 3),
)
@settings(max_examples=500)
def test_rows_that_are_cut_together_have_the_fields_they_have_one_by_one(lines, has_quotes, num_columns):
    dialect = Dialect(",", has_quotes)
    lines = [line for line in lines if line.strip("\r") and (not has_quotes or is_closed(line))]
    if not lines:
        return
    data = [(line + "\n").encode() for line in lines]
    places = [0, *itertools.accumulate(map(len, data))]
    rows = [split_fields(line.rstrip("\r\n"), dialect) for line in lines]
    cut = cut_columns(b"".join(data), places, ",", has_quotes, num_columns, range(num_columns))
    if any(len(row) != num_columns for row in rows):
        assert cut is None
    elif cut is not None or '"' not in "".join(lines) or not has_quotes:
        assert cut == [list(column) for column in zip(*rows, strict=True)]


@given(
    rows=st.lists(st.lists(FIELD, min_size=3, max_size=3), min_size=1, max_size=8),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]),
    line_end=st.sampled_from(["\n", "\r\n"]),
)
@settings(max_examples=200)
def test_what_the_csv_module_writes_is_cut_without_reading_it_field_by_field(rows, quoting, line_end):
    data, places = b"", [0]
    for row in rows:
        written = io.StringIO(newline="")
        csv.writer(written, quoting=quoting, lineterminator=line_end).writerow(row)
        data += written.getvalue().encode()
        places.append(len(data))
    assert cut_columns(data, places, ",", True, 3, [2, 0]) == [[row[2] for row in rows], [row[0] for row in rows]]


def test_chunks_and_blocks_of_a_few_bytes_give_the_same_rows(tmp_path, monkeypatch):
    rows = [[str(k), f'text "{k}",\nwith all\u00e9 ' + "x" * (k % 40), '5" disk' if k % 3 else ""] for k in range(200)]
    path = tmp_path / "rows.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["id", "text", "note"], *rows])
    whole = open_table(path)
    monkeypatch.setattr(files, "CHUNK_BYTES", 57)
    monkeypatch.setattr("loopwright.sources.tables.BLOCK_BYTES", 101)
    pieces = open_table(path)
    expected = [dict(zip(["id", "text", "note"], row, strict=True)) for row in rows]
    assert list(pieces) == list(whole) == expected
    assert (pieces.index == whole.index).all() and pieces.sha256 == whole.sha256


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [
        ("text,label\na b,1\nc d,0\n", ","),
        ("text;label\na, b;1\nc, d;0\n", ";"),
        ("text\tlabel\na, b\t1\nc; d\t0\n", "\t"),
        ("text|label\na|1\nb|0\n", "|"),
        ('text;label\n"a;b;c";1\n"d;e";0\n', ";"),
        ("text\nonly one column here\nand here\n", ","),
    ],
)
def test_the_delimiter_is_found_out(tmp_path, content, delimiter):
    table = open_table(write(tmp_path / "rows.csv", content))
    assert table.settings()["delimiter"] == delimiter
    assert len(table) == 2 and table.columns[0] == "text"


def test_marks_line_ends_blank_lines_and_missing_names_do_not_matter(tmp_path):
    content = '\ufefftext , label\r\n\r\n"a\r\nb",1\r\nc,0\r\n\r\n'
    table = open_table(write(tmp_path / "rows.csv", content))
    assert table.columns == ("text", "label")
    assert list(table) == [{"text": "a\r\nb", "label": "1"}, {"text": "c", "label": "0"}]
    assert [table.place(0), table.place(1)] == ["line 3", "line 5"]
    table = open_table(write(tmp_path / "rows.csv", "text,label\ra,1\rb,0\r"))
    assert list(table) == [{"text": "a", "label": "1"}, {"text": "b", "label": "0"}]
    table = open_table(write(tmp_path / "rows.csv", 'text,label\na\rb,"1"\n'))
    assert list(table) == [table[0]] == [{"text": "a\rb", "label": "1"}]
    table = open_table(write(tmp_path / "rows.csv", ",text\n0,a\n1,b\n"))
    assert table.columns == ("unnamed_0", "text")


def test_a_field_longer_than_the_csv_module_takes_is_read(tmp_path):
    text = 'x, "y"' * 50_000
    with open(tmp_path / "rows.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["text", "label"], [text, "1"]])
    table = open_table(tmp_path / "rows.csv")
    assert table[0] == next(iter(table)) == {"text": text, "label": "1"}


def test_quotes_in_a_tsv_file_are_characters_where_they_do_not_close(tmp_path):
    content = 'text\tlabel\n"Open quote\t1\nplain\t0\n'
    table = open_table(write(tmp_path / "rows.tsv", content))
    assert [row["text"] for row in table] == ['"Open quote', "plain"]
    closed = open_table(write(tmp_path / "closed.tsv", 'text\tlabel\n"with\ttab"\t1\n'))
    assert closed[0] == {"text": "with\ttab", "label": "1"}


def test_splitting_fields_is_what_the_csv_module_does():
    for text in ["a,b", '"a""b",c', '"a"b,c', '"",""', 'a"b,c"', '"a,b\n",', ",", '"a" ,b']:
        assert split_fields(text, Dialect(",", True)) == next(csv.reader([text]))


DIALECTS = {
    "single": ("text,label\n'good, {n} hotel',a\n", "good, {n} hotel", "single"),
    "single-everywhere": ("'text','label'\n'it''s \"{n}\"','a'\n", 'it\'s "{n}"', "single"),
    "backslash": ('text,label\n"he said \\"good\\", room {n}",a\n', 'he said "good", room {n}', "backslash"),
    "backslash-alone": ('text,label\n"a {n}\\" disk \\n C:\\\\x",a\n', 'a {n}" disk \\n C:\\x', "backslash"),
    "doubled": ('text,label\n"C:\\dir\\",a\n"a ""{n}""",a\n', 'a "{n}"', "minimal"),
    "apostrophes": ("text,label\n'tis {n} o'clock,a\n", "'tis {n} o'clock", "minimal"),
    "not-quoted": ('text,label\nsay \\"{n}\\" loud,a\n', 'say \\"{n}\\" loud', "minimal"),
}


@pytest.mark.parametrize(("content", "expected", "quoting"), DIALECTS.values(), ids=DIALECTS)
def test_single_and_escaped_quotes_are_recognised(tmp_path, content, expected, quoting):
    header, rows = content.split("\n", 1)
    path = write(tmp_path / "rows.csv", header + "\n" + "".join(rows.replace("{n}", str(n)) for n in range(20)))
    table = pickle.loads(pickle.dumps(open_table(path)))
    assert table.columns == ("text", "label") and table.settings()["quoting"] == quoting
    assert bool(table.notes) == (quoting in ("single", "backslash"))
    assert list(table)[-1] == table[len(table) - 1] == {"text": expected.replace("{n}", "19"), "label": "a"}
    assert table.place(len(table) - 1) == f"line {len(table) + 1}"
    assert list(open_table(path, **table.settings())) == list(table)


def test_an_apostrophe_inside_single_quotes_is_refused(tmp_path):
    rows = "".join(f"'good, {n}',a\n" for n in range(20)) + "'it's, bad',a\n"
    assert_refused("data.quote", write(tmp_path / "rows.csv", "text,label\n" + rows), fix="--quoting minimal")


@pytest.mark.parametrize(
    ("above", "place"),
    [("# exported, 2024\n# by me\n", 4), ("My report 2024\n\n", 4), ("My report,\n", 3), ("# only\n", 3)],
)
@pytest.mark.parametrize("end", ["", ","])
def test_lines_above_the_header_and_delimiters_at_the_end_are_left_out(tmp_path, above, place, end):
    rows = "".join(f"good {n},a{end}\n" for n in range(20))
    table = open_table(write(tmp_path / "rows.csv", f"{above}text,label\n{rows}"))
    assert (len(table), table.columns[:2], len(table.notes)) == (20, ("text", "label"), 1 + bool(end))
    assert (table[0]["text"], table[0]["label"], table.place(0)) == ("good 0", "a", f"line {place}")
    assert next(iter(table)) == table[0]


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_header_in_the_middle_is_a_bad_row(tmp_path, mark):
    rows = "".join(f"good {n},{'ab'[n % 2]}\n" for n in range(20))
    path = write(tmp_path / "rows.csv", f"text,label\n{rows}{mark}text,label\r\n{rows}")
    assert_refused("data.header", SCHEMAS["text-classification"], path, seen="line 22", fix="--bad_rows drop")
    assert_refused("data.header", lambda: open_table(path)[20])
    plan = plan_of(SCHEMAS["text-classification"], path, bad_rows="drop")
    assert plan.labels.names == ("a", "b") and plan.dropped == {"bad_rows": 1}


@pytest.mark.parametrize(
    ("name", "sign", "fix"),
    [
        ("rows.csv", "~", "--file_kind csv --delimiter '~'"),
        ("rows.tsv", "|", "--file_kind csv --delimiter '|'"),
        ("rows.txt", "\t", "--file_kind tsv --delimiter tab"),
        ("rows.csv", "::", "then"),
    ],
)
def test_another_delimiter_in_the_only_column_is_offered(tmp_path, name, sign, fix):
    rows = "".join(f"good film {n}{sign}{'ab'[n % 2]}\n" for n in range(20))
    path = write(tmp_path / name, f"text{sign}label\n{rows}")
    assert_refused("data.column", SCHEMAS["text-classification"], path, seen=repr(sign), fix=fix)
