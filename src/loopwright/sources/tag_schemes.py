"""How the tags of entities are written: rows in different schemes (IOB1, IOB2, BIOES) are noted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from loopwright.sources.tables import Table

_BEGIN, _END = frozenset("BSU"), frozenset("ESLU")


class TagSchemes:
    """Counts the rows of a file by the way they begin and end entities, each with its first row."""

    def __init__(self, table: Table, label_map: Mapping[str, str]) -> None:
        self._table = table
        self._label_map = label_map
        self._found: dict[str, list[int]] = {}  # the number of rows, and the first one

    def add(self, row: int, tags: Sequence[str]) -> None:
        names = ("O", *(self._label_map.get(tag, tag) for tag in tags), "O")
        entities = [(name[:1], name[2:]) if name[1:2] == "-" else ("O", "") for name in names]
        seen = set()
        for (before, kind_before), (letter, kind), (after, kind_after) in zip(
            entities, entities[1:], entities[2:], strict=False
        ):
            if letter == "O":
                continue
            if before == "O" or kind_before != kind or before in _END:  # an entity begins here
                seen.add("B-" if letter in _BEGIN else "I-" if letter == "I" else "")
            if after in _BEGIN or after == "O" or kind_after != kind:  # and ends here
                seen.add("end" if letter in _END else "no end")
        for name in seen:
            self._found.setdefault(name, [0, row])[0] += 1

    def notes(self) -> Iterator[str]:
        """Yield a note for each pair of schemes in one file."""
        pairs = (
            ("B-", "I-", "begin an entity with B-", "with I-", "I- after O begins an entity too"),
            ("end", "no end", "end entities with E- or S- (BIOES)", "without (BIO)", "write all rows in one scheme"),
        )
        for one, other, what, rather, advice in pairs:
            if one in self._found and other in self._found:
                (number, row), (others, other_row) = self._found[one], self._found[other]
                first, place = self._table.place(row), self._table.place(other_row)
                counted = f"{number:,} row{'s' if number != 1 else ''} {what} (first: {first}), {others:,} {rather}"
                yield f"mixed tag schemes in {self._table.name}: {counted} (first: {place}); {advice}"
