"""Images and annotations that cannot be trained on: each is refused with its code, or left out and counted."""

import json
import sys

import numpy as np
import pytest
from PIL import Image
from tests.sources.drawing import annotation, class_folders, coco, draw, draw_ids, mask_folders
from tests.sources.refusing import assert_refused, plan_of, refused, write

from loopwright.sources import SCHEMAS, DataOptions, DataPlan, check_unchanged, json_files

CLASSIFY = SCHEMAS["image-classification"]
SEGMENT = SCHEMAS["semantic-segmentation"]
DETECT = SCHEMAS["object-detection"]
INSTANCES = SCHEMAS["instance-segmentation"]
REBUILD = SCHEMAS["masked-image-modeling"]


@pytest.mark.parametrize("ending", ["png", "jpg", "gif", "bmp", "webp"])
@pytest.mark.parametrize("flaw", ["cut off", "no image", "empty"])
def test_an_image_that_is_cut_off_or_none_is_named_or_left_out(tmp_path, ending, flaw):
    class_folders(tmp_path / "pets")
    bad = draw(tmp_path / "pets" / "cat" / f"bad.{ending}", 5, (64, 64))
    content = bad.read_bytes()
    bad.write_bytes({"cut off": content[: len(content) * 2 // 3], "no image": b"<html>no</html>", "empty": b""}[flaw])
    refusal = assert_refused("data.image", CLASSIFY, tmp_path / "pets")
    assert refusal.error.what == "1 of 21 images of pets is missing, truncated or not readable"
    assert refusal.error.saw[0].startswith(str(bad)) and refusal.fix == "--bad_images drop   or   put them back"
    plan = plan_of(CLASSIFY, tmp_path / "pets", bad_images="drop")
    assert plan.dropped == {"bad_images": 1} and sum(map(len, plan.splits.values())) == 20
    assert plan.images["bad"]["number"] == 1 and str(bad) in plan.images["bad"]["first"][0]
    check_unchanged(DataPlan.from_json(plan.to_json()))


def test_bytes_behind_the_end_of_an_image_do_no_harm(tmp_path):
    class_folders(tmp_path)
    for ending in ("png", "jpg", "gif"):
        path = draw(tmp_path / "cat" / f"more.{ending}", 5, (64, 64))
        path.write_bytes(path.read_bytes() + b"\xff\xda" + bytes(200))
    plan = plan_of(CLASSIFY, tmp_path)
    assert sum(map(len, plan.splits.values())) == 23 and plan.dropped == {}


def test_images_that_are_missing_are_named_and_can_be_left_out(tmp_path):
    lines = ["image,label"]
    for number in range(8):
        lines.append(f"{number}.png,{number % 2}")
        if number not in (2, 5):
            draw(tmp_path / f"{number}.png", number)
    path = write(tmp_path / "a.csv", "\n".join(lines))
    refusal = assert_refused("data.image", CLASSIFY, path)
    assert refusal.error.saw == (
        f"line 4: {tmp_path / '2.png'} does not exist",
        f"line 7: {tmp_path / '5.png'} does not exist",
    )
    plan = plan_of(CLASSIFY, path, bad_images="drop")
    assert plan.dropped == {"bad_images": 2}
    check_unchanged(plan)
    draw(tmp_path / "2.png", 2)
    assert_refused("resume.data", check_unchanged, plan)
    path = coco(tmp_path / "coco" / "train.json", [annotation(100)])
    missing = tmp_path / "coco" / "images" / "4.png"
    missing.unlink()
    assert refused("data.image", DETECT, train_file=path).error.saw == (f"{missing} does not exist",)
    plan = plan_of(DETECT, train_file=path, bad_images="drop", validation_ratio=0)
    assert len(plan.rows("train")) == 5


def test_values_that_are_no_images_and_unknown_choices_are_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"image": 5, "label": "a"}\n{"image": 6, "label": "b"}\n')
    assert "the path or the bytes of an image are needed, not 5" in refused("data.value", CLASSIFY, path)
    assert_refused("args.value", DataOptions, bad_images="ignore")
    assert_refused("args.value", CLASSIFY)
    assert_refused("args.value", CLASSIFY, class_folders(tmp_path), train_file=tmp_path)
    assert_refused("args.value", SEGMENT, mask_folders(tmp_path / "m"), label_map={"0": "1"})


def test_without_pillow_the_package_is_named(tmp_path, monkeypatch):
    class_folders(tmp_path)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    assert refused("install.extra", CLASSIFY, tmp_path).fix == "pip install 'loopwright[vision]'"


@pytest.mark.parametrize("schema", [CLASSIFY, SEGMENT, DETECT, INSTANCES, REBUILD], ids=lambda schema: schema.task)
def test_a_folder_without_images_is_refused(tmp_path, schema):
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    assert "holds no images" in refused("data.folder", schema, data=tmp_path / "empty")
    assert_refused("data.file", schema, data=tmp_path / "emptty" / "deeper.json")


def test_images_outside_class_folders_are_refused_and_empty_classes_are_told(tmp_path):
    class_folders(tmp_path)
    (tmp_path / "cow").mkdir()
    assert plan_of(CLASSIFY, tmp_path).warnings[0].endswith("1 folder holds no image and makes no class: cow")
    draw(tmp_path / "loose.png", 3)
    assert "1 of 21 images is not in a class folder" in refused("data.folder", CLASSIFY, tmp_path)


def test_images_without_masks_or_objects_are_no_data_for_those_tasks(tmp_path):
    class_folders(tmp_path)
    assert "holds images and no masks" in refused("data.folder", SEGMENT, tmp_path)
    assert "COCO's json" in refused("data.folder", DETECT, tmp_path).fix
    draw(tmp_path / "scenes" / "images" / "train" / "a.png")
    assert "masks/train" in refused("data.folder", SEGMENT, tmp_path / "scenes").fix


def test_two_files_for_one_split_are_refused(tmp_path):
    for name in ("a_train.json", "b_train.json"):
        coco(tmp_path / name, [annotation(100)])
    assert_refused("data.folder", DETECT, tmp_path)
    (tmp_path / "t").mkdir()
    for name in ("train.csv", "training.csv"):
        write(tmp_path / "t" / name, "image,label\n")
    assert_refused("data.folder", CLASSIFY, tmp_path / "t")


def test_one_class_is_not_enough(tmp_path):
    for number in range(5):
        draw(tmp_path / "cat" / f"{number}.png", number)
    assert_refused("data.one_class", CLASSIFY, tmp_path)
    for number in range(5):
        draw(tmp_path / "m" / "images" / f"{number}.png", number, (4, 1))
        draw_ids(tmp_path / "m" / "masks" / f"{number}.png", [[0, 0, 255, 255]])
    refusal = assert_refused("data.one_class", SEGMENT, tmp_path / "m")
    assert refusal.fix.startswith("--mask_values 0,255") and "10 that are 255, which is ignored" in refusal


def test_a_class_id_that_there_cannot_be_is_named_with_its_first_mask(tmp_path):
    mask_folders(tmp_path)
    write(tmp_path / "id2label.json", '["sky", "road", "car"]')
    ids = np.zeros((6, 8))
    ids[0, :5] = 20
    draw_ids(tmp_path / "masks" / "004.png", ids)
    refusal = assert_refused("data.classes", SEGMENT, tmp_path)
    assert refusal.error.what == "masks contain class 20 but there are 3 (first: images/004.jpg, 5 pixels)"
    assert refusal.fix.startswith("--ignore_index 20")
    plan = plan_of(SEGMENT, tmp_path, ignore_index=20)
    assert plan.labels.names == ("sky", "road", "car")
    write(tmp_path / "id2label.json", '{"0": "sky", "2": "car", "20": "sign"}')
    refusal = assert_refused("data.classes", SEGMENT, tmp_path)
    assert refusal.error.what.startswith("masks contain class 1 but id2label.json has no name for it")


def test_a_mask_of_another_size_is_refused_and_an_image_without_a_mask_too_or_left_out(tmp_path):
    mask_folders(tmp_path)
    draw_ids(tmp_path / "masks" / "002.png", np.zeros((8, 6)))
    assert refused("data.size", SEGMENT, tmp_path).error.saw == ("002.png is 6 x 8, its image is 8 x 6",)
    (tmp_path / "masks" / "002.png").rename(tmp_path / "masks" / "other.png")
    assert "mask: 1 row, first in images/002.jpg" in refused("data.missing", SEGMENT, tmp_path)
    plan = plan_of(SEGMENT, tmp_path, missing_values="drop")
    assert plan.dropped == {"missing_values": 1}
    assert "1 mask belongs to no image: masks/other.png" in plan.warnings


def test_masks_that_hold_no_ids_or_belong_to_nothing_are_refused(tmp_path):
    mask_folders(tmp_path)
    draw(tmp_path / "masks" / "002.png", 1)
    assert refused("data.masks", SEGMENT, tmp_path).error.saw == ("002.png: it is a colour picture (mode RGB)",)
    (tmp_path / "masks" / "002.png").unlink()
    Image.fromarray(np.zeros((6, 8), np.uint8)).save(tmp_path / "masks" / "002.jpg")
    assert "which blurs the ids" in refused("data.masks", SEGMENT, tmp_path)
    draw_ids(tmp_path / "masks" / "002.png", np.zeros((6, 8)))
    assert "two masks have the same name" in refused("data.masks", SEGMENT, tmp_path)
    for path in list((tmp_path / "masks").iterdir()):
        path.rename(path.with_name("x" + path.name))
    (tmp_path / "masks" / "x002.jpg").unlink()
    assert "no mask has the name of an image" in refused("data.masks", SEGMENT, tmp_path)


def test_a_mask_that_is_cut_off_is_a_bad_image(tmp_path):
    mask_folders(tmp_path)
    path = tmp_path / "masks" / "002.png"
    path.write_bytes(path.read_bytes()[:50])
    assert refused("data.image", SEGMENT, tmp_path).error.saw[0].startswith(str(path))
    plan = plan_of(SEGMENT, tmp_path, bad_images="drop")
    assert plan.dropped == {"bad_images": 1}
    check_unchanged(plan)


def test_masks_of_validation_must_be_numbered_in_the_same_way(tmp_path):
    mask_folders(tmp_path / "train")
    mask_folders(tmp_path / "val", start=50)
    write(tmp_path / "train" / "id2label.json", '["sky", "road", "car"]')
    write(tmp_path / "val" / "id2label.json", '["road", "sky", "car"]')
    assert "class 0 is 'road' there and 'sky' here" in refused("data.labels", SEGMENT, tmp_path)


CLASSES = "data.classes"


@pytest.mark.parametrize(
    ("text", "code"), [('{"0": "a"', "data.json"), ('{"a": "b"}', CLASSES), ("[]", CLASSES), ('["a", "a"]', CLASSES)]
)
def test_names_that_cannot_be_read_are_refused(tmp_path, text, code):
    mask_folders(tmp_path)
    write(tmp_path / "id2label.json", text)
    assert_refused(code, SEGMENT, tmp_path)


BOXES = [[1, 2, 3], [1, 2, "a", 4], [1, 2, None, 4], [1, 2, float("nan"), 4], "box"]
OUTLINES = [[[1, 2, 3]], [["a", 1, 2, 3, 4, 5]], {"size": [10]}, {"size": [10, 20], "counts": [3, 4]}, "outline"]


@pytest.mark.parametrize(
    "changed", [*({"bbox": box} for box in BOXES), *({"segmentation": outline} for outline in OUTLINES)], ids=str
)
def test_a_box_or_an_outline_that_is_none_is_refused_with_its_image(tmp_path, changed):
    path = coco(tmp_path / "train.json", [annotation(102) | changed])
    refusal = assert_refused("data.boxes", INSTANCES, train_file=path, fix="--bad_annotations drop")
    assert refusal.error.what.endswith("1 of 6 images cannot be used") and refusal.error.saw[0].startswith("2.png: ")


def test_objects_that_are_none_are_refused(tmp_path):
    draw(tmp_path / "a.png")
    for objects, what in (
        ({"bbox": [[1, 2, 3, 4]]}, "the objects have no category"),
        ({"bbox": [[1, 2, 3, 4]], "category": ["a", "b"]}, "2 objects have bbox"),
        ([1, 2], "is needed, not [1, 2]"),
    ):
        path = write(tmp_path / "a.jsonl", json.dumps({"image": "a.png", "objects": objects}))
        assert what in refused("data.boxes", DETECT, path)


def test_lines_of_a_yolo_file_that_are_no_objects_are_refused(tmp_path):
    draw(tmp_path / "images" / "a.png")
    (tmp_path / "labels").mkdir()
    for line in ("0 0.5 0.5 0.1", "cat 0.5 0.5 0.1 0.1", "0.5 0.5 0.5 0.1 0.1", "0 nan 0.5 0.1 0.1"):
        write(tmp_path / "labels" / "a.txt", f"0 0.5 0.5 0.5 0.5\n{line}\n")
        assert "labels/a.txt: line 2 is not an object" in refused("data.boxes", DETECT, tmp_path)


def test_annotations_of_unknown_images_or_categories_are_refused(tmp_path):
    path = coco(tmp_path / "train.json", [annotation(100), annotation(102, 9)])
    refusal = assert_refused("data.classes", DETECT, train_file=path)
    assert "1 annotation has a category without a name: 9" in refusal and "in 2.png" in refusal
    draw(tmp_path / "y" / "images" / "a.png")
    (tmp_path / "y" / "labels").mkdir()
    write(tmp_path / "y" / "labels" / "a.txt", "4 0.5 0.5 0.5 0.5\n")
    write(tmp_path / "y" / "classes.txt", "cat\ndog\n")
    refusal = assert_refused("data.classes", DETECT, tmp_path / "y")
    assert "has the category 4, which has no name" in refusal and "2 names are given, for 0 to 1" in refusal
    path = coco(tmp_path / "train.json", [], categories=[{"id": 1, "name": "a"}, {"id": 2, "name": "a"}])
    assert_refused("data.classes", DETECT, train_file=path)
    path = coco(tmp_path / "train.json", [annotation(100), annotation(999), annotation(998)])
    refusal = assert_refused("data.annotations", DETECT, train_file=path)
    assert "2 of 3 annotations are of an image that is not listed" in refusal and "image_id 999" in refusal
    path = coco(tmp_path / "train.json", [])
    content = json.loads(path.read_text())
    del content["annotations"]
    path.write_text(json.dumps(content))
    refusal = assert_refused("data.annotations", DETECT, train_file=path)
    assert refusal.error.saw == ("it was read as coco, which has: image, image_id",)
    assert len(plan_of(REBUILD, train_file=path, validation_ratio=0).rows("train")) == 6


@pytest.mark.parametrize(
    "changed",
    [
        {"images": []},
        {"images": [{"id": 1}]},
        {"images": [{"file_name": "a.png"}]},
        {"images": [{"id": 1, "file_name": "a.png"}, {"id": 1, "file_name": "b.png"}]},
        {"categories": [{"id": 1}]},
        {},
    ],
)
def test_a_coco_file_with_gaps_is_refused(tmp_path, changed):
    path = coco(tmp_path / "train.json", [], **changed)
    assert_refused("data.annotations", DETECT, train_file=path)


def test_a_coco_file_that_is_damaged_or_too_large_is_refused(tmp_path, monkeypatch):
    text = coco(tmp_path / "train.json", [annotation(100), annotation(101)]).read_text()
    for broken in (text[:-30], text.replace('"image_id": 101', '"image_id" 101'), text.replace("}, {", "} {", 1)):
        path = write(tmp_path / "train.json", broken)
        assert_refused("data.json", DETECT, train_file=path)
    assert_refused("data.json", write(tmp_path / "list.json", "[1]"), kind="coco")
    monkeypatch.setattr(json_files, "MAX_JSON_BYTES", 10)
    assert "line per image" in refused("data.json", DETECT, train_file=write(tmp_path / "train.json", text)).fix


def test_sizes_that_differ_from_the_image_and_objects_without_an_outline_are_refused(tmp_path):
    path = coco(tmp_path / "train.json", [annotation(100)])
    draw(tmp_path / "images" / "3.png", 3, (40, 20))
    refusal = assert_refused("data.size", DETECT, train_file=path)
    assert refusal.error.saw == ("3.png: stated as 20 x 10, but the image is 40 x 20",)
    rle = {"size": [5, 5], "counts": [0, 25]}
    path = coco(tmp_path / "b" / "train.json", [annotation(100, segmentation=rle)])
    assert "a mask of 5 x 5" in refused("data.size", INSTANCES, train_file=path)
    path = coco(tmp_path / "train.json", [annotation(100), annotation(101, segmentation=[[1, 1, 5, 1, 5, 5]])])
    assert "1 object has a box and no outline" in refused("data.outlines", INSTANCES, train_file=path)
    assert len(plan_of(DETECT, train_file=path).labels.names) == 2


def test_classes_that_only_validation_has_are_refused_or_left_out(tmp_path):
    coco(tmp_path / "train.json", [annotation(100)])
    coco(
        tmp_path / "val.json",
        [annotation(110, 1), annotation(110, 2)],
        categories=[{"id": 1, "name": "Dog"}, {"id": 2, "name": "dog"}],
        start=10,
    )
    assert "unknown 'Dog': first in 10.png -- did you mean 'dog'?" in refused("data.labels", DETECT, tmp_path)
    plan = plan_of(DETECT, tmp_path, unknown_labels="drop")
    assert plan.dropped == {"unknown_labels": 1}
    assert plan.rows("validation")[0]["objects"]["classes"] == [1]
    assert "1 class has no objects in training: cat" in plan.warnings


def test_images_without_text_files_are_empty_scenes_unless_all_are(tmp_path):
    for number in range(3):
        draw(tmp_path / "images" / f"{number}.png", number)
    (tmp_path / "labels").mkdir()
    assert_refused("data.annotations", DETECT, tmp_path)
    write(tmp_path / "labels" / "other.txt", "0 0.5 0.5 0.5 0.5\n")
    assert_refused("data.annotations", DETECT, tmp_path)
    write(tmp_path / "labels" / "1.txt", "0 0.5 0.5 0.5 0.5\n")
    plan = plan_of(DETECT, tmp_path, validation_ratio=0)
    assert plan.images["empty"] == {"train": 2}
    assert "1 text file belongs to no image: labels/other.txt" in plan.warnings


def test_a_data_yaml_that_names_no_folder_is_refused(tmp_path):
    draw(tmp_path / "images" / "a.png")
    write(tmp_path / "data.yaml", "train: images/nowhere\nnames: [cat]\n")
    assert_refused("data.folder", DETECT, tmp_path / "data.yaml")
    write(tmp_path / "data.yaml", "train: [unclosed\n")
    assert_refused("data.file", DETECT, tmp_path / "data.yaml")
