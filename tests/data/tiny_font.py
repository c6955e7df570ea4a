"""A TrueType font of a few characters, for tests of what no font of the machine may decide."""

import struct

_UNITS = 1000


def _glyph(*points: tuple[int, int]) -> bytes:
    """Return a simple glyph of one contour of straight lines."""
    xs, ys = zip(*points, strict=True)
    header = struct.pack(">hhhhh", 1, min(xs), min(ys), max(xs), max(ys))
    steps = [
        struct.pack(f">{len(each)}h", *(now - before for now, before in zip(each, (0, *each), strict=False)))
        for each in (xs, ys)
    ]
    body = struct.pack(">HH", len(points) - 1, 0) + b"\x01" * len(points) + b"".join(steps)
    return (header + body).ljust(-(-len(header + body) // 4) * 4, b"\0")


def tiny_font(characters: str) -> bytes:
    """Return a font in which each character is a triangle, and every other one a box."""
    glyphs = [_glyph((0, 0), (0, 700), (700, 700), (700, 0)), _glyph((0, 0), (350, 800), (700, 0))]
    ends = [0, len(glyphs[0]), len(glyphs[0]) + len(glyphs[1])]
    groups = b"".join(struct.pack(">III", ord(each), ord(each), 1) for each in sorted(set(characters)))
    subtable = struct.pack(">HHIII", 12, 0, 16 + len(groups), 0, len(groups) // 12) + groups
    tables = {
        b"cmap": struct.pack(">HHHHI", 0, 1, 3, 10, 12) + subtable,
        b"glyf": b"".join(glyphs),
        b"head": struct.pack(
            ">IIIIHHqqhhhhHHhhh", 0x10000, 0, 0, 0x5F0F3CF5, 0, _UNITS, 0, 0, 0, 0, 700, 800, 0, 8, 2, 1, 0
        ),
        b"hhea": struct.pack(">IhhhHhhhhhhhhhhhH", 0x10000, 800, -200, 0, 800, *[0] * 11, 2),
        b"hmtx": struct.pack(">HhHh", 800, 0, 800, 0),
        b"loca": struct.pack(">III", *ends),
        b"maxp": struct.pack(">IHHHHHHHHHHHHHH", 0x10000, 2, 4, 1, *[0] * 2, 1, *[0] * 8),
    }
    directory, content = struct.pack(">IHHHH", 0x10000, len(tables), 64, 2, 48), b""
    for name, table in tables.items():
        offset = 12 + 16 * len(tables) + len(content)
        directory += name + struct.pack(">III", 0, offset, len(table))
        content += table.ljust(-(-len(table) // 4) * 4, b"\0")
    return directory + content
