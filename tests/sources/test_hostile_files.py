"""Files that are made to hang, to fill the memory or to start programs are refused at once, with the limit in words."""

import io
import json
import os
import time
import zlib
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from PIL import Image

from loopwright import models
from loopwright.config.durations import seconds_of
from loopwright.config.files import MOST_CHARACTERS, MOST_DEPTH, MOST_VALUES, read_mapping
from loopwright.config.training_arguments import TrainingArguments
from loopwright.data.images.decoding import decode_image, decode_mask
from loopwright.errors import DataError, InputError, LoopwrightError
from loopwright.report.pictures import _fitted
from loopwright.sources import values
from loopwright.sources.files import sha256_of
from loopwright.sources.formats import open_table
from loopwright.sources.images.image_file import FORMATS, BadImageError, inspect_image, upright_size
from loopwright.sources.images.names import read_names, read_yaml
from loopwright.sources.tables import MOST_COLUMNS

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
MERGES = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 12))
YAMLS = {
    "laughs": (LAUGHS, f"{MOST_VALUES:,}"),
    "merges": (MERGES, f"{MOST_VALUES:,}"),
    "itself": ("a: &a [*a]\n", f"{MOST_VALUES:,}"),
    "deep": ("a: " + "[" * 900 + "]" * 900, f"{MOST_DEPTH}"),
    "deeper": ("a: " + "[" * 100_000, ""),
    "long": ("a: b\n" * 300_000, f"{MOST_CHARACTERS:,}"),
    "number": ("a: " + "9" * 5000, ""),
    "date": ("a: 2024-99-99", ""),
    "tag": ("a: !!int ''", ""),
    "bool": ("a: !!bool x", ""),
    "hexadecimal": ("seed: 0x" + "f" * 900_000, "1,000"),
    "json, deep": ('{"a":' * 500 + "1" + "}" * 500, ""),
    "json, deeper": ('{"a":' * 99_999, ""),
    "json, number": ('{"a": ' + "9" * 5000 + "}", ""),
    "json, long": ('{"a": "' + "b" * MOST_CHARACTERS + '"}', f"{MOST_CHARACTERS:,}"),
}


@pytest.mark.parametrize("name", YAMLS)
@pytest.mark.parametrize("read", [read_mapping, read_yaml])
def test_a_yaml_bomb_is_refused_before_it_is_built(tmp_path, read, name):
    text, limit = YAMLS[name]
    file = tmp_path / ("x.json" if name.startswith("json") and read is read_mapping else "x.yaml")
    file.write_text(text)
    begun = time.monotonic()
    with pytest.raises(LoopwrightError) as refusal:
        read(file)
    assert file.name in str(refusal.value) and limit in str(refusal.value) and time.monotonic() - begun < 2
    (tmp_path / "x.yaml").write_text("a: &a {b: 1}\nc: {<<: *a, d: *a}\n")
    assert read(tmp_path / "x.yaml")["c"] == {"b": 1, "d": {"b": 1}}


def wide(kind, number):
    names = [f"column_{n}" for n in range(number)]
    if kind == "csv":
        return (",".join(names) + "\n" + ("1," * number)[:-1] + "\n").encode()
    if kind == "csv of quotes":
        return (",".join(f'"{name}"' for name in names) + "\n" + ("1," * number)[:-1] + "\n").encode()
    if kind == "jsonl":
        return json.dumps(dict.fromkeys(names, 1)).encode() + b"\n"
    if kind == "jsonl of rows":
        return b"".join(json.dumps({f"{n}_{k}": 1 for k in range(number // 100)}).encode() + b"\n" for n in range(100))
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    pq.write_table(pa.table({name: [1] for name in names}), file)
    return file.getvalue()


def read_all(path):
    table = open_table(path)
    return [list(block.values) for block in table.blocks(table.columns)]


HOSTILE = {
    "number of base 60": ("data.yaml", "names: 1" + ":1" * 400_000, read_yaml),
    "float of base 60": ("x.yaml", "seed: 1" + ":1" * 400 + ".5", read_mapping),
    "class of 5,000 digits": ("id2label.json", json.dumps({"1" * 5000: "a"}), read_names),
    "stray quote": ("x.csv", 'text,label\nx"y' + "," * 2_000_000, read_all),
    "stray quote in the header": ("x.csv", 'x"y' + "," * 2_000_000 + "\n1", read_all),
    "open quotes": ("x.csv", 'text,label\nx"y,1\n' + '"a\n' * 500_000, read_all),
    "nested cell": (None, '["a",' + "[" * 100_000 + "]" * 100_000 + "]", values.as_tokens),
    "cell in Python": (None, "['a'" + ",1" * 4_000_000 + "]", values.as_tokens),
    "number in a cell": (None, "['a', 0x" + "f" * 100_000 + "]", values.as_tokens),
    "time": (None, "1" * 60_000 + "!", seconds_of),
    "plugin": (None, '{"a":' * 99_999, lambda text: TrainingArguments(fsdp_config=text)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_is_read_or_refused_at_once(tmp_path, name):
    file, text, read = HOSTILE[name]
    if file is not None:
        (tmp_path / file).write_text(text)
    begun = time.process_time()
    with suppress(LoopwrightError, values.UnusableValueError):
        read(text if file is None else tmp_path / file)
    assert time.process_time() - begun < 2


READERS = {"x.csv": open_table, "x.csv.gz": open_table, "x.parquet": open_table, "x": sha256_of, "data.yaml": read_yaml}
READERS |= {"id2label.json": read_names, "a.png": inspect_image, "b.png": upright_size, "c.png": decode_image}


@pytest.mark.parametrize("name", [*READERS, "config.json", "model.safetensors"])
@pytest.mark.parametrize("place", [os.mkfifo, partial(os.symlink, "/dev/zero")], ids=["pipe", "device"])
def test_pipes_and_devices_are_refused_without_waiting(tmp_path, name, place):
    models.create("conv_net", num_labels=2).save_pretrained(tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    place(tmp_path / name)
    path = str(tmp_path / name) if name.endswith("png") else tmp_path / name
    with pytest.raises((LoopwrightError, BadImageError), match="pipe|not a regular file|not an image"):
        READERS.get(name, lambda path: models.load(tmp_path))(path)


@pytest.mark.parametrize("number", [20_000, 200_000])
@pytest.mark.parametrize("kind", ["csv", "csv of quotes", "jsonl", "jsonl of rows", "parquet"])
def test_too_many_columns_are_refused_at_once(tmp_path, kind, number):
    path = tmp_path / f"x.{kind.split()[0]}"
    path.write_bytes(wide(kind, min(number, 20_000) if kind == "parquet" else number))
    pytest.importorskip("datasets")  # its import takes seconds
    begun = time.monotonic()
    with pytest.raises(InputError, match=f"limit is {MOST_COLUMNS:,}"):
        open_table(path)
    assert time.monotonic() - begun < 2


@pytest.mark.parametrize("name", ["x.jsonl", "x.json"])
def test_rows_that_are_nested_too_deeply_are_refused(tmp_path, name):
    row = '{"a": ' + "[" * 500 + "]" * 500 + "}"
    (tmp_path / name).write_text(row + "\n" if name == "x.jsonl" else f"[{row}]")
    with pytest.raises(InputError, match=f"{MOST_DEPTH} levels deep"):
        open_table(tmp_path / name)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n(%pipe%touch x) (w) file\nshowpage\n%%EOF\n"


@pytest.mark.parametrize("name", ["x.png", "x.eps", "x.jpg"])
def test_postscript_is_never_interpreted_whatever_its_name(tmp_path, monkeypatch, name):
    for program in ("gs", "gswin64c"):
        (tmp_path / program).write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / name).write_bytes(EPS)
    for read in (decode_image, decode_mask, inspect_image, upright_size):
        for source in (str(tmp_path / name), EPS):
            with pytest.raises((DataError, BadImageError), match="image"):
                read(source)
    assert name != "x.png" or _fitted(tmp_path / name, 1)[2] == "cannot be opened as an image"
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("form", [*FORMATS, "MPO"])
def test_the_formats_that_are_read_are_those_that_are_named(tmp_path, form):
    image, file = Image.fromarray(np.full((9, 9, 3), 7, np.uint8)), io.BytesIO()
    image.save(file, form, **({"save_all": True, "append_images": [image]} if form == "MPO" else {}))
    assert decode_image(file.getvalue()).size == (9, 9) == inspect_image(file.getvalue())[:2]
    others = io.BytesIO()
    image.save(others, {"PNG": "TGA", "JPEG": "JPEG2000", "GIF": "ICO"}.get(form, "PCX"))
    with pytest.raises(BadImageError, match="not an image"):
        inspect_image(others.getvalue())


def test_decompression_bombs_are_refused(tmp_path):
    def chunk(kind, data):
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = chunk(b"IHDR", b"".join(side.to_bytes(4, "big") for side in (60_000, 60_000)) + b"\x08\x00\x00\x00\x00")
    bomb = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    for read in (decode_image, decode_mask, inspect_image, upright_size):
        with pytest.raises((DataError, BadImageError)):
            read(bomb)
