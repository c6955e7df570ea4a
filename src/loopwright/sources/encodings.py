"""The encoding of a text: as given, by its mark, or detected; and its conversion to UTF-8.

A name may be a list: with `utf-8,cp1252` each line is decoded by the first of them that can. `replace` as the last one
reads what the others cannot as U+FFFD. For lines that are not UTF-8 the likeliest encoding is taken, by the characters
of its languages, unless another one is nearly as likely. The probabilities are rough: the common characters of a
language share most of the mass. Words count once, so that few labels stay uncertain however often they occur. If none
of these encodings is plausible, the guess of charset-normalizer is offered.
"""

from __future__ import annotations

import codecs
import encodings.aliases
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from math import inf, log
from pathlib import Path
from typing import NamedTuple

from loopwright.errors import InputError

REPLACE = "replace"
SAMPLE_BYTES = 16 << 10
_MARKS = {  # UTF-32's first: one of them starts with a mark of UTF-16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
    codecs.BOM_UTF8: "utf-8-sig",
}
_MOST_NAMED = 5
_LEAST_GAP = 6.0  # between the log-probabilities of the two best candidates
_COST_OF_A_LINE = 20.0  # that an encoding cannot decode
_LEAST_MEAN = -5.0, -9.5  # of the characters of the best one, in encodings of one byte and of several

# The letters of alphabets, from frequent to rare, and the languages of an encoding.
_CYRILLIC = "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфёъіїєґјљњћђџ"
_GREEK = "αοιετσνρυπκηλμςδίόωέάγθήχφύβώξζψϊΐϋ"
_HEBREW = "יוהלאתרבשמםנדעחקפגכסטצןזךץף"
_ARABIC = "اليمنترهودبسعفكحجقةأشصطزضخغذإثءئظىآؤ،؟؛پچژگکی"
_THAI = "านรอก่เ้งมยลวัดีทสติะปบคหแจพชขใ์ไื็ุูผโำซถศณึธภฟญษฉฐฝๆฎฮ"
_WESTERN = ("éèàêçôîûùâëïœ", "üäöß", "óíáñéúü", "ãçáéíõóêâúàô", "àèéìòùó", "äöåøæé", "éäüöàèçóíáñãôêâîûëïåøæßúõìòùœ")
_CENTRAL = ("łóżęąśćńź", "íáéěýžřšůčúťďňó", "áíéýčšžúľťôňäďó", "éáóöőüíúű", "ăîâșțşţ", "čšžćđ", *_WESTERN[:3])
_LANGUAGES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("cp1252", "mac_roman", "cp850"), _WESTERN),
    **dict.fromkeys(("cp1250", "iso8859_2"), _CENTRAL),
    "cp1254": ("ıüşçöğâî", *_WESTERN[:2]),
    "cp1257": ("āēīšūņļģčķž", "ėšąžįųčūę", "äõüöšž"),
    **dict.fromkeys(("cp1251", "koi8_r", "cp866", "iso8859_5", "mac_cyrillic", "cp855"), (_CYRILLIC,)),
    **dict.fromkeys(("cp1253", "mac_greek", "cp737"), (_GREEK,)),
    **dict.fromkeys(("cp1255", "cp862"), (_HEBREW,)),
    **dict.fromkeys(("cp1256", "iso8859_6"), (_ARABIC,)),
    "cp874": (_THAI,),
}
# Of Chinese, the other ones of traditional Chinese and of Japanese, and of Korean.
_HANZI, _TRADITIONAL, _KANJI, _HANGUL = Path(__file__).with_name("common_characters.txt").read_text("utf-8").split()
_KANA = "".join(map(chr, range(0x3041, 0x30FD)))
_PUNCTUATION = frozenset("\xa0‘’“”„–—…€£°«»¿¡™®©·•§№、。，．！？：；（）「」『』・ー～《》【】")
# By encoding: groups of characters with the share of each, and the share of the others by their bytes.
_CHINESE, _JAPANESE = ((_HANZI, 0.65),), ((_KANA, 0.6), (_KANJI + _HANZI + _TRADITIONAL, 0.25))
_ASIAN = {
    "gb18030": (_CHINESE, b"\xb0\xa1\xd7\xf9", 3755),
    "big5": (((_TRADITIONAL + _HANZI, 0.65),), b"\xa4\x40\xc6\x7e", 5401),
    "cp932": (_JAPANESE, b"\x88\x9f\x98\x72", 2965),
    "euc_jp": (_JAPANESE, b"\xb0\xa1\xcf\xd3", 2965),
    "cp949": (((_HANGUL, 0.85),), b"\xb0\xa1\xc8\xfe", 2350),
    "johab": (((_HANGUL, 0.85),), b"\x88\x61\xd3\xbd", 11172),
}
_RARE, _STRANGE = log(0.03 / 5000), log(1e-6)
_PRIORS = {"gb18030": 0.0, "cp1252": 0.0, "cp1251": -0.5, "big5": -1.0, "cp932": -1.0, "cp1250": -1.0, "cp949": -1.5}
_PRIORS |= dict.fromkeys(("cp1253", "cp1254", "cp1255", "cp1256", "cp874", "euc_jp"), -2.0)
_PRIORS |= dict.fromkeys(("cp1257", "koi8_r", "iso8859_2"), -3.0)
_PRIORS |= dict.fromkeys(("cp866", "cp850", "iso8859_5", "iso8859_6", "johab"), -6.0)
_PRIORS |= dict.fromkeys(("mac_roman", "mac_cyrillic", "mac_greek", "cp855", "cp737", "cp862"), -7.0)
_WORD = re.compile(r"[a-zA-Z\x80-\U0010ffff]+")
_ODD = re.compile(r"[^\x00-\x7f]")
_NEXT_TO_ASCII = re.compile(r"(?<=[a-zA-Z])[^\x00-\x7f]|[^\x00-\x7f](?=[a-zA-Z])")


class Candidate(NamedTuple):
    """A possible encoding of a sample of lines; a higher score is better."""

    score: float
    mean: float
    encoding: str
    text: str


def check_encoding(name: str) -> tuple[str, ...]:
    """Return the encodings of a name, a list with commas; refuse unknown ones (args.value) with the nearest name."""
    names = [part.strip() for part in name.split(",")]
    for place, part in enumerate(names):
        if part == REPLACE and 0 < place == len(names) - 1:
            continue
        is_text = _is_text(part)
        if not is_text or (len(names) > 1 and _is_wide(part) and names[1:] != [REPLACE]):
            known = [*_PRIORS, *encodings.aliases.aliases, *encodings.aliases.aliases.values()]
            near = filter(_is_text, get_close_matches(part.lower().replace("-", "_"), known, n=9, cutoff=0.6))
            what = f"--encoding {name}: {f'{part!r} cannot be one of several' if is_text else f'{part!r} is unknown'}"
            saw = ["for instance utf-8, gb18030, big5, cp932, euc_kr, cp1251, cp1252; or a list: utf-8,cp1252"]
            fix = f"--encoding {part if is_text else next(near, 'cp1252' if part.lower() == 'ansi' else 'utf-8')}"
            raise InputError("args.value", what, saw=saw, fix=fix, flag="--encoding")
    return tuple(names)


def _is_text(name: str) -> bool:
    try:
        return "a\n".encode(name).decode(name) == "a\n"
    except (LookupError, TypeError, ValueError):
        return False


def is_utf8(names: tuple[str, ...]) -> bool:
    return len(names) == 1 and codecs.lookup(names[0]).name in ("utf-8", "utf-8-sig")


def encoding_by_mark(head: bytes) -> str | None:
    """Return the encoding that the first bytes show: by a mark, by escapes, or UTF-16 by its NUL bytes."""
    for mark, name in _MARKS.items():
        if head.startswith(mark):
            return name
    if b"\x1b$" in head:
        return "iso2022_kr" if b"\x1b$)C" in head else "iso2022_jp"
    nuls = [head[start::2].count(0) for start in (0, 1)]
    name = "utf-16-be" if nuls[0] else "utf-16-le"
    is_wide = max(nuls) > 1 + len(head) // 40 and min(nuls) == 0 and _decodes(head[: len(head) // 2 * 2], name)
    return name if is_wide else None


def _is_wide(name: str) -> bool:
    return b"\n" not in "a\n".encode(name)[:2]


def decode_chunks(chunks: Iterable[bytes], names: tuple[str, ...], what: str) -> Iterator[str]:
    """Yield the text of a file; raise an InputError, data.encoding, with the place of a byte that is not of it."""
    num_lines = 0
    try:
        if _is_wide(names[0]):
            decoder = codecs.getincrementaldecoder(names[0])(REPLACE if names[1:] else "strict")
            for chunk in chain(chunks, [b""]):
                yield (text := decoder.decode(chunk, final=not chunk))
                num_lines += text.count("\n")
            return
        for block in _whole_lines(chunks):
            yield _decode_lines(block, names)
            num_lines += block.count(b"\n")
    except UnicodeError as error:
        if not isinstance(error, UnicodeDecodeError):  # UTF-16 without its mark
            raise InputError("data.encoding", f"{what}: {error}", fix="--encoding utf-8", flag="--encoding") from error
        line = num_lines + error.object[: error.start].decode(error.encoding, "ignore").count("\n") + 1
        seen = _shown(error.object[max(0, error.start - 40) : error.start + 20].decode(names[0], "replace"))
        raise InputError(
            "data.encoding",
            f"{what} is not {','.join(names)}: byte 0x{error.object[error.start]:02x} in line {line:,}",
            saw=[f"around it: {seen}"],
            fix=f"--encoding {','.join(names)},{REPLACE}",
            flag="--encoding",
        ) from error


def _whole_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest = b""
    for chunk in chunks:
        lines, end, after = (rest + chunk).rpartition(b"\n")
        rest = after
        if end:
            yield lines + end
    if rest:
        yield rest


def _decode_lines(block: bytes, names: tuple[str, ...]) -> str:
    try:
        return block.decode(names[0])
    except UnicodeDecodeError:
        if len(names) == 1:
            raise
    return "".join(_decode_line(line, names) for line in block.splitlines(keepends=True))


def _decode_line(line: bytes, names: tuple[str, ...]) -> str:
    for name in names[:-1]:
        try:
            return line.decode(name)
        except UnicodeDecodeError:
            continue
    return line.decode(names[0], "replace") if names[-1] == REPLACE else line.decode(names[-1])


def decode(data: bytes, encoding: str | None, what: str) -> tuple[str, str | None]:
    """Return a short text and its encoding if that is not plain UTF-8: as given, by its mark, or detected."""
    name = encoding or encoding_by_mark(data[:4096])
    if name is None:
        try:
            return data.decode("utf-8"), None
        except UnicodeDecodeError:
            name = detect([data], what)
    return "".join(decode_chunks([data], check_encoding(name), what)).removeprefix("\ufeff"), name


def detect(chunks: Iterable[bytes], what: str) -> str:
    """Return the encoding of a file that is not UTF-8; InputError (data.encoding) if it is mixed or uncertain."""
    sample, num_bytes, bad, good, short, num_likely = [], 0, [], [], b"", 0
    lines = (line for block in _whole_lines(chunks) for line in block.splitlines())
    for number, line in enumerate(lines, 1):
        if line.isascii():
            continue
        try:
            odd = [character for character in line.decode("utf-8") if character > "\x7f"]
        except UnicodeDecodeError:
            bad.append(number)
            if num_bytes < SAMPLE_BYTES:
                sample.append(line)
                num_bytes += len(line)
        else:
            good.append(number)
            # One or two Chinese characters can be bytes that are valid in UTF-8; a whole clause hardly ever is.
            is_likely = len(odd) > 3 or max(odd) > "\u07ff"
            num_likely += is_likely
            short += line + b"\n" if not is_likely and len(short) < SAMPLE_BYTES else b""
    found = candidates(sample)
    best = found[0].encoding if found else REPLACE
    is_mixed = num_likely > (0.01 if best in _ASIAN else 0) * len(bad) or (good and not found)
    if short and found and best not in _ASIAN:  # lines that may be UTF-8 by chance
        as_it_is, other = (_fit(short.decode(name, "replace"), best)[0] for name in ("utf-8", best))
        is_mixed = is_mixed or as_it_is > other + 2
    shown = [f"{one.encoding:<10} {_shown(one.text)}" for one in found[:_MOST_NAMED]]
    if is_mixed:
        best = best if found and _is_plausible(found[0]) else REPLACE
        message = f"{what} is mixed: UTF-8 in {_places(good)}, not in {_places(bad)}"
        raise InputError("data.encoding", message, saw=shown, fix=f"--encoding utf-8,{best}", flag="--encoding")
    if not is_certain(found):
        why = "and has too few different characters to be certain of its encoding"
        message = f"{what} is not UTF-8 ({_places(bad)}), {why}"
        fix = f"--encoding {found[0].encoding if found else 'utf-8,replace'}"
        raise InputError("data.encoding", message, saw=shown, fix=fix, flag="--encoding")
    return best


def is_certain(found: list[Candidate]) -> bool:
    """Whether the first candidate is plausible, and far more likely than the second."""
    if not found or not _is_plausible(found[0]):
        return False
    return len(found) == 1 or found[0].score - found[1].score >= _LEAST_GAP


def _places(lines: list[int]) -> str:
    more = f" and {len(lines) - _MOST_NAMED:,} more" if len(lines) > _MOST_NAMED else ""
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:_MOST_NAMED]))}{more}"


def _shown(text: str) -> str:
    """Return the part of a text around its first characters that are not ASCII."""
    start = next((place for place, character in enumerate(text) if character > "\x7f"), 0)
    return repr(text[max(0, start - 20, text.rfind("\n", 0, start) + 1) : start + 40].partition("\n")[0])


def candidates(lines: list[bytes]) -> list[Candidate]:
    """Return the encodings that decode lines, or nearly all of them, best first; of equal texts the best one."""
    found: dict[str, Candidate] = {}
    for name in _PRIORS:
        kept = [line for line in lines if _decodes(line, name)]
        if len(kept) * 20 < len(lines) * 19 or not kept:
            continue
        text = b"\n".join(kept).decode(name)
        score, mean = _fit(text, name)
        one = Candidate(score - _COST_OF_A_LINE * (len(lines) - len(kept)), mean, name, text)
        found[text] = max(found.get(text, one), one)
    ranked = sorted(found.values(), reverse=True)
    return ranked if ranked and _is_plausible(ranked[0]) else [*_by_library(lines), *ranked]


def _is_plausible(one: Candidate) -> bool:
    return one.mean >= _LEAST_MEAN[one.encoding in _ASIAN]


def _by_library(lines: list[bytes]) -> list[Candidate]:
    from charset_normalizer import from_bytes

    match = from_bytes(b"\n".join(lines)).best() if lines else None
    is_new = match is not None and match.encoding not in _PRIORS and _is_text(match.encoding)
    return [Candidate(-inf, -inf, match.encoding, str(match))] if match is not None and is_new else []


def _decodes(line: bytes, name: str) -> bool:
    try:
        return bool(line.decode(name))
    except UnicodeDecodeError:
        return False


def _fit(text: str, encoding: str) -> tuple[float, float]:
    """Return the log-probability of the words of a text that are not ASCII, and the mean of their characters.

    The characters of a script are rarely beside ASCII letters; accented letters nearly always are. Capitals start a
    word or make up all of it.
    """
    words = {word for word in _WORD.findall(text) if not word.isascii()}
    marks = sum(word.count(mark) for word in words for mark in _PUNCTUATION.intersection(word))
    joined = " ".join(words).translate(dict.fromkeys(map(ord, _PUNCTUATION), " "))
    beside, runs = len(_NEXT_TO_ASCII.findall(joined)), len(re.findall(r"(?<=[^\x00-\x7f])[^\x00-\x7f]", joined))
    alphabets = _LANGUAGES.get(encoding, ())
    counts = Counter(_ODD.findall(joined.replace("İ", "ı").lower() if alphabets else joined))
    if not alphabets:
        found, penalty = sum(_log_of(encoding, each) * number for each, number in counts.items()), 2.0 * beside
    else:
        found = max(sum(_log_in(alphabet, each) * number for each, number in counts.items()) for alphabet in alphabets)
        alone = len(re.findall(r"(?<![^\W\d_])[^\x00-\x7f](?![^\W\d_])", joined))
        penalty = 2.5 * runs + 2.0 * alone if alphabets[0][0] < "\u0250" else 3.0 * beside  # of Latin letters or others
        mixed = (word[1:] for word in joined.split() if not word.isupper())
        penalty += 4 * sum(letter.isupper() for rest in mixed for letter in rest)
        penalty += 0.7 * sum(len(word) for word in joined.split() if word.isupper() and len(word) > 1)
    total = found - penalty
    return _PRIORS[encoding] + total + marks * log(0.02), total / max(1, sum(counts.values()))


@lru_cache(maxsize=10_000)
def _log_of(encoding: str, character: str) -> float:
    """Return the log-probability of a character of a multibyte encoding."""
    groups, (lead, trail, last, end), number = _ASIAN[encoding]
    code = character.encode(encoding)
    in_place_of_ascii = 3.0 if min(code) < 0x80 else 0.0  # a letter that other encodings would have to explain
    for group, share in groups:
        if character in group:
            return log(share / len(set(group))) + in_place_of_ascii
    is_usual = bytes((lead, trail)) <= code <= bytes((last, end)) and (trail < 0xA1 or code[1] >= 0xA1)
    rest = 0.97 - sum(share for _, share in groups)
    return (log(rest / number) if is_usual else _RARE) + in_place_of_ascii


@lru_cache(maxsize=10_000)
def _log_in(alphabet: str, letter: str) -> float:
    rank, size = alphabet.find(letter), len(alphabet)
    if rank < 0:
        return log(0.002) if letter.isalpha() else _STRANGE
    return log((size - rank) ** 1.5 / sum(each**1.5 for each in range(1, size + 1)))
