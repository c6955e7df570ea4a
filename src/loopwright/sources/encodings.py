"""The encoding of a text: as given, by its mark, or detected; and its conversion to UTF-8.

A name may be a list: with `utf-8,cp1252` each line is decoded by the first of them that can. `replace` as the last one
reads what the others cannot as U+FFFD. For lines that are not UTF-8 the likeliest encoding is taken, by the characters
of its languages, unless another one is nearly as likely.
"""

from __future__ import annotations

import codecs
import encodings.aliases
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from itertools import chain
from typing import NamedTuple

from loopwright.errors import InputError
from loopwright.sources.languages import ENCODINGS, MULTIBYTE, fit

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
            known = [*ENCODINGS, *encodings.aliases.aliases, *encodings.aliases.aliases.values()]
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
    escaped = "iso2022_kr" if b"\x1b$)C" in head else "iso2022_jp"
    if b"\x1b$" in head and _decodes(head.rpartition(b"\n")[0] or head, escaped):
        return escaped
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
            fix = "--encoding utf-8"
            raise InputError("data.encoding", f"{what}: {error}", fix=fix, flag="--encoding") from error
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
    is_mixed = num_likely > (0.01 if best in MULTIBYTE else 0) * len(bad) or (good and not found)
    if short and found and best not in MULTIBYTE:  # lines that may be UTF-8 by chance
        as_it_is, other = (fit(short.decode(name, "replace"), best)[0] for name in ("utf-8", best))
        is_mixed = is_mixed or as_it_is > other + 2
    shown = [f"{one.encoding:<10} {_shown(one.text)}" for one in found[:_MOST_NAMED]]
    if is_mixed:
        best = best if found and found[0].mean > _LEAST_MEAN[best in MULTIBYTE] else REPLACE
        message = f"{what} is mixed: UTF-8 in {_places(good)}, not in {_places(bad)}"
        raise InputError("data.encoding", message, saw=shown, fix=f"--encoding utf-8,{best}", flag="--encoding")
    if not is_certain(found):
        message = (
            f"{what} is not UTF-8 ({_places(bad)}), and has too few different characters to be certain of its encoding"
        )
        fix = f"--encoding {found[0].encoding if found else 'utf-8,replace'}"
        raise InputError("data.encoding", message, saw=shown, fix=fix, flag="--encoding")
    return best


def is_certain(found: list[Candidate]) -> bool:
    """Whether the first candidate is plausible, and far more likely than the second."""
    if not found or found[0].mean < _LEAST_MEAN[found[0].encoding in MULTIBYTE]:
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
    for name in ENCODINGS:
        kept = [line for line in lines if _decodes(line, name)]
        if len(kept) * 20 < len(lines) * 19 or not kept:
            continue
        text = b"\n".join(kept).decode(name)
        score, mean = fit(text, name)
        one = Candidate(score - _COST_OF_A_LINE * (len(lines) - len(kept)), mean, name, text)
        found[text] = max(found.get(text, one), one)
    return sorted(found.values(), reverse=True)


def _decodes(line: bytes, name: str) -> bool:
    try:
        return bool(line.decode(name))
    except UnicodeDecodeError:
        return False
