"""Words in any script: the tokens of metrics and baselines, and the unit of word counts.

In scripts with spaces a word is a run of letters, marks and digits. Scripts without spaces show no words, so each
character with its marks is a token, as in the Chinese and multilingual benchmarks; other scripts within such a text
keep their words.

The script of a text is the one of most of its words; numbers have none, and a tie goes to the Latin script. So an
English text with a Chinese name in it is English.
"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from itertools import islice, pairwise

WITHOUT_SPACES: Mapping[str, str] = {
    "Chinese": "⺀-⿟々〇〡-〩〸-〻\u3100-\u312fㆠ-ㆿ㐀-䶿一-鿿\uf900-\ufaff\U00020000-\U0003fffd",
    "Japanese": "〱-〵\u3040-ヿㇰ-ㇿｦ-ﾟ\U0001aff0-\U0001b16f",
    "Thai": "\u0e00-\u0e7f",
    "Lao": "\u0e80-\u0eff",
    "Khmer": "\u1780-\u17ff",
    "Burmese": "\u1000-\u109f\ua9e0-\ua9ff\uaa60-\uaa7f",
    "Tibetan": "\u0f00-\u0fff",
}
"""The characters of the scripts without spaces between words, as ranges of a regular expression."""
LATIN, KOREAN, OTHER = "Latin", "Korean", "other"
_PICTURE = "[\u231a-\u23ff\u2600-\u27bf\u2b1b-\u2b55\U0001f000-\U0001faff]"
EMOJI = f"(?:[🇦-🇿]{{2}}|{_PICTURE}(?:[\ufe0e\ufe0f\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]|\u200d{_PICTURE})*)"
"""The pattern of an emoji with all that is joined to it: skin tones, flags, families."""

_SPACELESS = "".join(WITHOUT_SPACES.values())
_HAS_SPACELESS = re.compile(f"[{_SPACELESS}]")
_SCRIPTS = re.compile("|".join(f"(?P<{name}>[{ranges}])" for name, ranges in WITHOUT_SPACES.items()))
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_STOPS, _CLOSING = "。！？｡។៕။", "”’」』）】》"
_SENTENCE_END = re.compile(
    rf"(?<=[.!?؟۔।॥։።།])\s+|\n+|(?<=[{_STOPS}])(?![{_STOPS}{_CLOSING}])\s*|(?<=[{_STOPS}][{_CLOSING}])\s*"
    r"|(?<=[\u0e00-\u0eff])\s+(?=[\u0e00-\u0eff])"  # Thai and Lao have no full stop: a space ends a clause
)


def tokenize(text: str) -> list[str]:
    """Return the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower()) if text.isascii() else _pattern().findall(text.lower())


def terms(text: str) -> list[str]:
    """Return what tells a text's class: words, emoji, and the neighbouring characters of scripts without spaces."""
    if text.isascii():
        return tokenize(text)
    found = list(_pattern(EMOJI + "|").finditer(text.lower()))
    spaceless = [each if _HAS_SPACELESS.match(each[0]) else None for each in found]
    pairs = (a[0] + b[0] for a, b in pairwise(spaceless) if a and b and a.end() == b.start())
    return [*(each[0] for each in found), *pairs]


def subword_patterns() -> tuple[str, str]:
    """Return the patterns of the pieces of a subword tokenizer, and of a superfluous first space, for Oniguruma.

    These are GPT-2's pieces, except that marks stay with their letters, that a character of a script without spaces or
    an emoji is by itself, and that no space belongs to it.
    """
    marks, other = "[\\p{M}\u200c\u200d]*", f"(?![{_SPACELESS}])"
    pieces = (
        rf"'s|'t|'re|'ve|'m|'ll|'d|{EMOJI}|(?![\p{{P}}\p{{S}}\p{{M}}])[{_SPACELESS}]{marks}"
        rf"| ?(?:{other}\p{{L}}{marks})+| ?(?:{other}\p{{N}})+| ?(?:(?!{EMOJI})[^\s\p{{L}}\p{{N}}])+|\s+(?!\S)|\s+"
    )
    return pieces, rf"\A (?= |[{_SPACELESS}]|{EMOJI})"


def count_words(text: str) -> int:
    """Return the number of words: what spaces separate, and each character of a script without spaces."""
    pieces = text.split()
    if text.isascii() or not _HAS_SPACELESS.search(text):
        return len(pieces)
    return sum(len(tokenize(piece)) if _HAS_SPACELESS.search(piece) else 1 for piece in pieces)


def first_words(text: str, number: int) -> str:
    """Return the beginning of a text up to a number of words, with single spaces."""
    pieces = text.split()
    if text.isascii() or not _HAS_SPACELESS.search(text):
        return " ".join(pieces[:number])
    line = " ".join(pieces)
    following = next(islice(_pattern().finditer(line), number, None), None)
    return line if following is None else line[: following.start()].rstrip()


def sentences(text: str) -> list[str]:
    """Return the sentences of a text: lines, and what a full stop, exclamation or question mark of any script ends."""
    return [each for each in _SENTENCE_END.split(text.strip()) if each]


def script_of(texts: Iterable[str]) -> str:
    """Return the script of most words: a name of `WITHOUT_SPACES`, "Latin", "Korean", "other", or "" for no letters."""
    text = " ".join(texts)
    if text.isascii():
        return LATIN if text.upper() != text.lower() else ""
    counts = Counter(map(_script_of_word, tokenize(text)))
    num_latin, _ = counts.pop(LATIN, 0), counts.pop("", 0)
    if counts["Japanese"]:
        counts["Japanese"] += counts.pop("Chinese", 0)
    if counts.total() > num_latin:
        return max(sorted(counts), key=counts.__getitem__)
    return LATIN if num_latin else ""


def describe_tokens(scripts: Mapping[str, int], others: str) -> str:
    """Return the tokens of rows by script, `others` for spaces but not Latin; "" if all have the official words."""
    counts, kinds = Counter(scripts), Counter[str]()
    del counts[""]
    if 5 * counts["Japanese"] > counts["Chinese"]:  # Japanese texts without kana look Chinese
        counts["Japanese"] += counts.pop("Chinese", 0)
    for script, number in counts.items():
        kinds[f"{script} characters" if script in WITHOUT_SPACES else "words" if script == LATIN else others] += number
    (first, _), *rest = sorted((+kinds).items(), key=lambda item: (-item[1], item[0])) or [("words", 0)]
    minor = (f"{kind} in {number:,} of {kinds.total():,} rows" for kind, number in rest)
    return "" if first == "words" and not rest else ", ".join([first, *minor])


def normalized_answer(text: str) -> str:
    """Return an answer without case, punctuation, English articles and superfluous spaces, as SQuAD does."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def answer_words(text: str, script: str) -> list[str]:
    """Return the tokens of an answer for a reference in this script: SQuAD's, or characters without spaces."""
    return tokenize(text.replace("_", " ")) if script in WITHOUT_SPACES else normalized_answer(text).split()


def same_answer(predicted: str, true: str) -> bool:
    """Return whether two answers match up to case, punctuation, articles and whitespace."""
    script = script_of([true]) or script_of([predicted])
    return answer_words(predicted, script) == answer_words(true, script)


@cache
def _pattern(others: str = "") -> re.Pattern[str]:
    """Return the pattern of `others` or a word; created late, as the marks of all scripts take 10 ms to find."""
    marks = "".join(each for each in map(chr, range(0x300, 0xFFFF)) if unicodedata.category(each)[0] == "M")
    # Joiners within a word; marks of Chakma and of Adlam; variants of Chinese characters.
    marks += "\u200c\u200d\U00011100-\U00011102\U00011127-\U00011134\U0001e944-\U0001e94a\U000e0100-\U000e01ef"
    return re.compile(rf"{others}(?!\W)[{_SPACELESS}][{marks}]*|(?:[^\W{_SPACELESS}][{marks}]*)+")


@lru_cache(1 << 16)
def _script_of_word(word: str) -> str:
    """Return the script of a word; a number in ASCII has none."""
    if found := _SCRIPTS.match(word):
        return str(found.lastgroup)
    letter = next(filter(str.isalpha, word), "")
    if not letter:
        return "" if word.isascii() else OTHER
    name = unicodedata.name(letter, "")
    return LATIN if name.startswith("LATIN ") else KOREAN if name.startswith("HANGUL ") else OTHER
