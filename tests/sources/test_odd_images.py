"""Odd images and annotations: read without doubt, noted, or refused before training."""

import json
import os

import numpy as np
import pytest
from tests.sources.drawing import class_folders, draw
from tests.sources.refusing import assert_refused, plan_of, refused, write

from loopwright.sources import SCHEMAS
from loopwright.sources.images.objects import read_objects, unpacked_run_lengths
from loopwright.sources.values import UnusableValueError

Image = pytest.importorskip("PIL.Image")
CLASSIFY = SCHEMAS["image-classification"]
SEGMENT = SCHEMAS["semantic-segmentation"]
DETECT = SCHEMAS["object-detection"]
OUTLINE = SCHEMAS["instance-segmentation"]
WIDTH, HEIGHT = 32, 24


def picture(path, number=0):
    return draw(path, number, (WIDTH, HEIGHT))


def coco(folder, number=12, **changed):
    """Write images and COCO's json about them; `changed` goes into its fourth annotation."""
    content = {
        "images": [{"id": k, "file_name": f"{k}.png", "width": WIDTH, "height": HEIGHT} for k in range(number)],
        "categories": [{"id": 3, "name": "a"}, {"id": 90, "name": "b"}],
        "annotations": [
            {"id": k, "image_id": k, "category_id": (3, 90)[k % 2], "bbox": [4, 5, 10, 8]} for k in range(number)
        ],
    }
    for place, annotation in enumerate(content["annotations"]):
        annotation["segmentation"] = [[4, 5, 14, 5, 14, 13, 4, 13]]
        picture(folder / f"{place}.png", place)
    content["annotations"][3].update(changed)
    return content


def saved(folder, content):
    return write(folder / "objects.json", json.dumps(content))


def test_a_pipe_among_the_images_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(class_folders(tmp_path / "pets") / "cat" / "pipe.png")
    assert "pipe.png is not a regular file" in refused("data.image", CLASSIFY, tmp_path / "pets")


def test_images_that_are_not_read_are_counted_and_names_that_are_no_utf8_refused(tmp_path):
    folder = class_folders(tmp_path / "pets")
    for name in ("a.heic", "b.HEIC", "c.avif", "Thumbs.db"):
        write(folder / "cat" / name, b"x")
    plan = plan_of(CLASSIFY, folder)
    assert any("3 files of pets have unsupported formats: .avif, .heic" in note for note in plan.warnings)
    folder = class_folders(tmp_path / "pets")
    for number in range(2):
        os.rename(folder / "cat" / f"{number:03}.png", os.fsencode(folder / "cat") + b"/b\xe9%d.png" % number)
    assert_refused("data.encoding", CLASSIFY, folder, seen=["2 file names", r"cat/b\udce90.png"])


def test_an_address_is_no_path(tmp_path):
    class_folders(tmp_path)
    rows = "".join(f"cat/{k:03}.png,cat\nhttps://example.org/{k}.png,dog\n" for k in range(9))
    path = write(tmp_path / "rows.csv", "image,label\n" + rows + "dog/000.png,dog\n")
    assert_refused("data.image", CLASSIFY, path, seen=["line 3", "download"], fix="--bad_images drop")
    assert plan_of(CLASSIFY, path, bad_images="drop", keep_duplicates=True).dropped == {"bad_images": 9}


def test_paths_that_were_written_on_windows_are_found(tmp_path):
    class_folders(tmp_path / "images")
    rows = "".join(f"cat\\{k:03}.png,cat\ndog\\{k:03}.png,dog\n" for k in range(9))
    plan = plan_of(CLASSIFY, write(tmp_path / "rows.csv", "image,label\n" + rows))
    row = plan.rows("train")[0]
    assert os.path.isfile(row["image"])
    content = coco(tmp_path / "images" / "sub")
    for image in content["images"]:
        image["file_name"] = "sub\\" + image["file_name"]
    plan = plan_of(DETECT, saved(tmp_path, content))
    assert os.path.isfile(plan.rows("train")[0]["image"])


def test_one_folder_of_images_is_told_that_another_is_needed(tmp_path):
    for number in range(9):
        picture(tmp_path / "pets" / "cat" / f"{number}.png", number)
    refusal = assert_refused("data.one_class", CLASSIFY, tmp_path / "pets")
    assert "--label_column" not in refusal and "a folder for each class" in refusal.fix


def masks(folder, ids):
    for number in range(10):
        picture(folder / "images" / f"{number}.png", number)
        pixels = np.resize(np.array(ids), (HEIGHT, WIDTH)).astype(np.uint16 if max(ids) > 255 else np.uint8)
        (folder / "masks").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / "masks" / f"{number}.png")
    return folder


def test_ids_of_masks_that_are_no_classes_are_noted_or_refused(tmp_path):
    plan = plan_of(SEGMENT, masks(tmp_path, (0, 1, 200)))
    assert any("3 different ids, the largest is 200 (first: images/0.png)" in note for note in plan.warnings)
    assert not any("different ids" in note for note in plan_of(SEGMENT, masks(tmp_path, (0, 1, 2))).warnings)
    refusal = assert_refused("data.classes", SEGMENT, masks(tmp_path, (0, 300, 60_000)))
    assert "0, 300, 60000" in refusal and "id2label.json" in refusal.fix
    for ids in ((0, 0), (255, 255)):
        assert "two classes" in refused("data.one_class", SEGMENT, masks(tmp_path, ids)).fix
    folder = masks(tmp_path, (0, 1))
    write(folder / "id2label.json", json.dumps({"0": "sky", "1": "sea", "99999999": "land"}))
    assert_refused("data.classes", SEGMENT, folder, seen=["99,999,999", "20,000"])


@pytest.mark.parametrize(
    ("changed", "code", "seen"),
    [
        ({"category_id": [3]}, "data.classes", "category_id [3]"),
        ({"image_id": [3]}, "data.annotations", "image_id [3]"),
        ({"image_id": {"a": 1}}, "data.annotations", "image_id {'a': 1}"),
        ({"category_id": None}, "data.classes", 'give each annotation its "category_id"'),
        ({"category_id": "3"}, "data.classes", "without quotes"),
        ({"image_id": "3"}, "data.annotations", "without quotes"),
    ],
)
def test_ids_of_another_kind_are_refused_with_a_way_out_that_is_one(tmp_path, changed, code, seen):
    refusal = assert_refused(code, DETECT, saved(tmp_path, coco(tmp_path, **changed)))
    assert seen in refusal and '"id": None' not in refusal


def test_names_may_hold_anything_that_json_can_and_the_id_of_a_category_is_a_number(tmp_path):
    content = coco(tmp_path)
    content["categories"][0]["id"] = "3"
    assert "whole number" in refused("data.annotations", DETECT, saved(tmp_path, content))
    content = coco(tmp_path)
    content["categories"][0]["name"] = "half \ud83d"
    plan = plan_of(DETECT, saved(tmp_path, content))
    assert plan.labels.names == ("half \ufffd", "b") and plan.to_json().encode("utf-8")
    content["images"][0]["file_name"] = "a\0b.png"
    assert "NUL byte" in refused("data.image", DETECT, saved(tmp_path, content))


@pytest.mark.parametrize(
    ("name", "value"),
    [("images", 5), ("categories", "a"), ("annotations", 1.5), ("images", [{"id": {}, "file_name": "0.png"}])],
)
def test_lists_of_cocos_json_that_are_none_are_refused(tmp_path, name, value):
    refusal = assert_refused("data.annotations", DETECT, saved(tmp_path, coco(tmp_path) | {name: value}))
    assert f'"{name}" is not' in refusal or f"{name}[0]" in refusal


def test_boxes_in_shares_are_refused_corners_suspected_and_outlines_outside_left_out(tmp_path):
    content = coco(tmp_path)
    for annotation in content["annotations"]:
        annotation["bbox"] = [0.1, 0.2, 0.5, 0.5]
    assert_refused("data.boxes", DETECT, saved(tmp_path, content), seen=["12 boxes", "fractions"], fix="pixels")
    content["annotations"][3]["bbox"] = [3, 3, 9, 9]
    assert plan_of(DETECT, saved(tmp_path, content)).task == "object-detection"
    content = coco(tmp_path)
    for annotation in content["annotations"]:
        annotation["bbox"] = [20, 15, 30, 22]
    plan = plan_of(DETECT, saved(tmp_path, content))
    assert any("x, y, width, height" in note for note in plan.warnings)
    content = coco(tmp_path, segmentation=[[500, 500, 600, 500, 600, 600]])
    plan = plan_of(OUTLINE, saved(tmp_path, content))
    assert plan.dropped == {"boxes_outside": 1}


@pytest.mark.parametrize("counts", ["hello", "\u00ff", "", "0", [1, 2], ["100", "668"], [-5, 773], [0.5, 767.5], None])
def test_run_lengths_that_are_none_are_refused_before_training(tmp_path, counts):
    content = coco(tmp_path, segmentation={"size": [HEIGHT, WIDTH], "counts": counts})
    assert_refused("data.boxes", OUTLINE, saved(tmp_path, content), seen=["run lengths", "3.png"])


@pytest.mark.parametrize("size", [["24", "32"], [24.5, 32], [-24, -32], None])
def test_run_lengths_need_a_size(tmp_path, size):
    with pytest.raises(UnusableValueError, match="run lengths"):
        read_objects(
            {"category": [1], "segmentation": [{"size": size, "counts": [768]}], "bbox": [[1, 1, 5, 5]]},
            (WIDTH, HEIGHT),
        )


def test_packed_run_lengths_are_unpacked_as_the_tools_of_coco_pack_them():
    mask = pytest.importorskip("faster_coco_eval.core.mask")
    generator = np.random.default_rng(0)
    for _ in range(20):
        pixels = np.asfortranarray(generator.random((40, 300)) < generator.random(), dtype=np.uint8)
        packed = mask.encode(pixels)["counts"].decode("ascii")
        flat = pixels.ravel(order="F")
        edges = np.concatenate([[0], np.flatnonzero(np.diff(flat)) + 1, [flat.size]])
        expected = ([0] if flat[0] else []) + np.diff(edges).tolist()
        assert unpacked_run_lengths(packed).tolist() == expected
    content = {"category": [1], "segmentation": [{"size": [40, 300], "counts": packed}], "bbox": [[1, 1, 5, 5]]}
    assert read_objects(content, (300, 40)).segments == content["segmentation"]


def test_a_yaml_file_that_names_no_images_is_refused(tmp_path):
    assert_refused("data.split", DETECT, write(tmp_path / "data.yaml", "names: [a, b]\n"))


@pytest.mark.parametrize("size", [5, [1], ["32", "24"], "small"])
def test_a_size_that_is_none_is_no_size_of_the_image(size):
    objects = {"bbox": [[1, 1, 5, 5]], "category": ["a"], "size": size}
    assert read_objects(objects, (WIDTH, HEIGHT)).problem is None


@pytest.mark.parametrize("category", [5, "a", {"a": 1}])
def test_categories_that_are_no_list_are_refused(category):
    with pytest.raises(UnusableValueError, match="a list of categories"):
        read_objects({"bbox": [[1, 1, 5, 5]], "category": category}, (WIDTH, HEIGHT))


def test_objects_that_python_wrote_are_read():
    found = read_objects("{'bbox': [[1, 1, 5, 5]], 'category': ['a'], 'iscrowd': [False]}", (WIDTH, HEIGHT))
    assert (found.boxes, found.categories) == ([[1.0, 1.0, 6.0, 6.0]], ["a"])
    with pytest.raises(UnusableValueError, match="not JSON"):
        read_objects("{'bbox': [[", (WIDTH, HEIGHT))
