"""Columns of a terminal: wide characters take two, marks and joined emoji none."""

import pytest

from loopwright.config.display_width import display_width, pad, truncate, wrap

WIDTHS = {"": 0, "abc": 3, "汉字": 4, "カﾅ": 3, "한글": 4, "\u1112\u1161\u11ab": 2, "ไม่ดี": 3, "नमस्ते": 4,
          "cafe\u0301": 4, "مُحَمَّد": 4, "Привет": 6, "👍": 2, "👍🏽": 2, "👩‍👩‍👧!": 3, "❤️": 2, "🇨🇳": 2,
          "①…": 2}  # fmt: skip


@pytest.mark.parametrize("text", WIDTHS, ids=ascii)
def test_columns_are_those_of_wcwidth(text):
    assert display_width(text) == WIDTHS[text]
    wcwidth = pytest.importorskip("wcwidth")
    if "स्ते" not in text:  # its spacing marks differ from version to version
        assert wcwidth.wcswidth(text) == WIDTHS[text]


def test_texts_are_padded_truncated_and_wrapped_by_columns():
    assert [pad("汉字", 6), pad("汉字", 6, is_right=True), pad("汉字", 1)] == ["汉字  ", "  汉字", "汉字"]
    assert [truncate("汉字汉字", width) for width in (8, 7, 6, 2, 1)] == ["汉字汉字", "汉字汉…", "汉字…", "…", "…"]
    assert truncate("ab👩‍👩‍👧cd", 5) == "ab👩‍👩‍👧…"
    assert truncate("abcdef", 5, "...") == "ab..." and truncate("汉字", 3, "") == "汉"
    assert wrap("这是一个很长的句子 and words", 11) == ["这是一个很", "长的句子", "and words"]
    assert wrap("a/long/path/of/words and two", 9) == ["a/long/path/of/words", "and two"]
    for text in ("汉字" * 40, "one 汉字 and two 👍🏽 " * 9):
        lines = wrap(text, 17)
        assert "".join("".join(lines).split()) == "".join(text.split()) and max(map(display_width, lines)) <= 17


@pytest.mark.parametrize("path", ["'/data/my runs/数据 集/1118-reviews'", "runs/" + "评论" * 30])
def test_a_command_is_never_broken(path):
    lines = wrap(f"saved checkpoints/step-0000000012 (0.1 s)   continue with: lw resume {path}", 60)
    assert f"lw resume {path}" in lines[-1] and all(display_width(line) <= 60 for line in lines[:-1])
