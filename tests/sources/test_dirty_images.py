"""Dirty image data: the flags that an error names are enough, for every split, row and later file."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from tests.sources import dirty_images as dirty
from tests.sources.drawing import annotation, class_folders, coco, draw, mask_folders
from tests.sources.refusing import assert_refused, plan_of, refused, write

from loopwright import api
from loopwright.data.images import load_scene
from loopwright.sources import SCHEMAS, DataPlan, check_unchanged

SEGMENT, CLASSIFY = SCHEMAS["semantic-segmentation"], SCHEMAS["image-classification"]


def flags_of(fix, name):
    return dict(re.findall(rf"--({name}) (\S+)", fix))


@pytest.mark.parametrize("kind", dirty.FIXABLE)
def test_the_flags_of_a_fix_are_enough(tmp_path, kind):
    task, make, code, flags = dirty.FIXABLE[kind]
    folder, schema = make(tmp_path / "data"), SCHEMAS[task]
    refusal = assert_refused(code, schema, folder, fix=flags)
    (name, value), *_ = flags_of(refusal.fix, flags.split()[0].strip("-")).items()
    plan = plan_of(schema, folder, **{name: [value] if name == "mask_values" else value})
    plan = DataPlan.from_json(plan.to_json())
    check_unchanged(plan)
    rows = [plan.rows(split)[index] for split in plan.splits for index in range(len(plan.splits[split]))]
    assert len(rows) >= 3
    if name.startswith("bad"):
        assert sum(plan.dropped.values()) >= 1 and any("left out" in note for note in plan.warnings)
    if name == "mask_values":
        assert len(plan.label_names) == len(plan.images["mask_values"]) == (2 if "255" in flags else 3)
        for row in rows:
            options = {"mask_values": plan.images["mask_values"], "ignore_index": 255}
            scene = load_scene(row, **options)
            assert set(np.unique(scene.semantic)) == {
                0,
                np.bincount(scene.semantic.ravel(), minlength=3)[1:].argmax() + 1,
            }
            assert (scene.semantic > 0).mean() == 0.25


def test_entries_of_a_coco_file_are_left_out_by_kind_with_their_places(tmp_path):
    plan = plan_of(SCHEMAS["object-detection"], dirty.coco_of_repeated_ids(tmp_path), bad_annotations="drop")
    assert plan.dropped == {"bad_annotations": 5}
    for place in ("images[7]", "images[6]", "categories[2]", "categories[3]", "annotations[7]"):
        assert sum(place in note for note in plan.warnings) == 1
    plan = plan_of(SCHEMAS["object-detection"], dirty.coco_of_impossible_boxes(tmp_path / "b"), bad_annotations="drop")
    assert plan.dropped == {"boxes_unusable": 3, "boxes_zero_size": 1, "boxes_outside": 1}
    assert plan.images["clipped_boxes"]["number"] == 1 and sum(plan.images["objects"].values()) == 7
    quoted = dirty._coco(tmp_path / "c", dirty.annotation("101"))
    assert "without quotes" in refused("data.annotations", SCHEMAS["object-detection"], quoted).fix


def test_values_of_masks_are_given_as_words_or_as_a_file_and_named(tmp_path):
    folder = dirty.masks_of_colors(tmp_path / "data")
    palette = tmp_path / "palette.json"
    for content, names in (
        ('{"sky": [0, 0, 0], "car": "#FF0000", "tree": [0, 0, 255]}', ("sky", "car", "tree")),
        ('{"#0000ff": "tree", "000000": "sky", "ff0000": "car"}', ("tree", "sky", "car")),
        ("[[0, 0, 0], [255, 0, 0], [0, 0, 255]]", ("000000", "ff0000", "0000ff")),
    ):
        palette.write_text(content)
        plan = plan_of(SEGMENT, folder, mask_values=[str(palette)])
        assert plan.label_names == names and not any(word.endswith("json") for word in plan.images["mask_values"])
    assert plan_of(SEGMENT, folder, mask_values=["000000=a, b,#ff0000=c", "0000FF"]).label_names == (
        *("a, b", "c"),
        "0000ff",
    )
    for words in (["0"], ["0,0"], ["0,ff0000"], ["red,blue"], ["0=a,1=a"], [str(tmp_path / "none.json")]):
        assert_refused("args.value", SEGMENT, folder, mask_values=words, fix="--mask_values auto")
    by_value = plan_of(SEGMENT, dirty.masks_of_0_and_255_with_names(tmp_path / "b"), mask_values=["auto"])
    assert by_value.label_names == ("ground", "square")
    ignored = plan_of(SEGMENT, dirty.masks_of_far_values(tmp_path / "c"), mask_values=["0,2000"], ignore_index=4000)
    assert sum(map(sum, (counts.values() for counts in ignored.counts.values()))) < 12 * 24 * 24


def test_masks_that_need_no_flag_and_those_with_blurred_edges(tmp_path):
    plan = plan_of(SEGMENT, dirty.masks_that_need_no_flag(tmp_path / "a"))
    assert plan.label_names == ("0", "1") and any("scaled to the size of the image" in note for note in plan.warnings)
    for row in plan.rows("train"):
        assert (load_scene(row).semantic == 1).mean() == 0.25
    folder = dirty.masks_with_blurred_edges(tmp_path / "b")
    (note,) = [note for note in plan_of(SEGMENT, folder).warnings if "blurred" in note]
    assert flags_of(note, "mask_values") == {"mask_values": "0,255"}
    assert refused("data.masks", SEGMENT, folder, mask_values=["auto"]).fix.startswith("--mask_values 0,255")
    plan = plan_of(SEGMENT, folder, mask_values=["0,255"])
    assert plan.label_names == ("0", "255") and any("take the nearest" in note for note in plan.warnings)


def test_images_with_masks_or_boxes_are_not_two_classes(tmp_path):
    for make, task in (
        (dirty.images_and_masks_as_classes, "semantic-segmentation"),
        (dirty.images_and_texts_as_classes, "object-detection"),
    ):
        folder = make(tmp_path / task)
        assert refused("data.folder", CLASSIFY, folder).fix.startswith(f"lw train {task} --data {folder} ")
    draw(tmp_path / "p" / "img" / "train" / "1.png")
    draw(tmp_path / "p" / "label" / "train" / "1.png")
    assert "semantic-segmentation" in refused("data.folder", CLASSIFY, tmp_path / "p").fix


def test_a_cluttered_folder_holds_images_of_every_kind(tmp_path):
    plan = plan_of(CLASSIFY, dirty.a_cluttered_folder(tmp_path), validation_ratio=0)
    assert plan.label_names == ("cat", "dog") and len(plan.rows("train")) == 26
    assert [note for note in plan.warnings if ".heic" in note]
    for row in plan.rows("train"):
        assert load_scene(row).image.shape == (6, 8, 3)


def test_the_command_of_a_huge_image_makes_it_smaller(tmp_path):
    path = class_folders(tmp_path) / "cat" / "huge photo.jpg"
    Image.new("L", (16_000, 12_000), 99).save(path)
    refusal = assert_refused("data.image", CLASSIFY, tmp_path)
    assert "192 megapixels, and at most 178" in refusal
    command = refusal.fix.partition("   or   python ")[2]
    subprocess.run(f"{sys.executable} {command}", shell=True, check=True)
    plan = plan_of(CLASSIFY, tmp_path)
    assert plan.images["sizes"]["width"]["max"] == 4096


def table_of(folder, path_of, name="rows.csv"):
    """Write a table of the images of class folders, with a path for each."""
    files = sorted(folder.rglob("*.png"))
    rows = [f"{path_of(file.relative_to(folder))},{file.parent.name}\n" for file in files]
    return write(folder / name, "image,label\n" + "".join(rows))


@pytest.mark.parametrize("form", ["C:\\me\\{}", "/home/me/pets/{}", "somewhere/{}", "file://{root}/{}"])
def test_paths_of_another_machine_are_found_by_their_end(tmp_path, form):
    path = table_of(class_folders(tmp_path), lambda file: form.format(file, root=tmp_path).replace("/", "\\"))
    plan = plan_of(CLASSIFY, path)
    assert sum(map(len, plan.splits.values())) == 20 and any("end of the path" in note for note in plan.warnings)
    check_unchanged(DataPlan.from_json(plan.to_json()))


def test_an_image_missing_in_a_folder_that_exists_is_not_taken_from_another(tmp_path):
    draw(class_folders(tmp_path) / "000.png", 999)
    path = table_of(tmp_path, lambda file: file)
    (tmp_path / "cat" / "000.png").unlink()
    assert_refused("data.image", CLASSIFY, path, seen="1 of 21 images", fix="--bad_images drop")


@pytest.mark.parametrize("name", ["train.csv", "x_train.csv"])
def test_a_table_lies_beside_the_folder_of_its_name(tmp_path, name):
    files = [draw(tmp_path / "train" / f"{number}.png", number) for number in range(12)]
    rows = "".join(f"{file.name},{'ab'[place % 2]}\n" for place, file in enumerate(files))
    plan = plan_of(CLASSIFY, write(tmp_path / name, "id,label\n" + rows))
    assert plan.files[0].settings["image_dir"] == "train"


def test_dropping_is_no_way_out_if_nothing_would_be_left(tmp_path):
    detect = SCHEMAS["object-detection"]
    path = table_of(class_folders(tmp_path / "a"), lambda file: file.name.replace("0", "9"))
    assert refused("data.image", CLASSIFY, path).fix == "put them back"
    path = table_of(class_folders(tmp_path / "b", 3), lambda file: f"{file.parent.name}_{file.name}")
    for file in [*path.parent.rglob("*.png")]:
        file.rename(file.with_name(f"{file.parent.name}_{file.name}"))
    assert refused("data.image", CLASSIFY, path).fix == "write their paths into rows.csv, such as cat/cat_000.png"
    for place, (changed, code) in enumerate(
        [
            ({"categories": []}, "data.classes"),
            ({"categories": [{"id": 7}, {"id": 3}]}, "data.annotations"),
            ({"images": [{"id": 1, "file_name": "0.png"}]}, "data.annotations"),
            ({"annotations": [annotation(100, bbox=[1, 2, 3])]}, None),
        ]
    ):
        path = coco(tmp_path / f"c{place}" / "train.json", [annotation(100)], num_images=1)
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))
        assert "drop" not in refused(code or "data.boxes", detect, train_file=path).fix
    path = coco(tmp_path / "s" / "train.json", [annotation(100)], num_images=1)
    path.write_text(path.read_text().replace('"width": 20', '"width": 200'))
    assert "correct the sizes" in refused("data.size", detect, train_file=path).fix


LINE = "1 0.5 0.5 0.5 0.25"


@pytest.mark.parametrize(
    ("line", "note"),
    [(LINE.replace(" ", ", "), "commas"), (f"{LINE} 0.9", "confidence"), (LINE.replace("1", "dog", 1), "")],
)
def test_lines_of_yolo_in_another_form_are_read(tmp_path, line, note):
    for number in range(4):
        draw(tmp_path / "images" / f"{number}.png", number, (20, 10))
        write(tmp_path / "labels" / f"{number}.txt", line)
    write(tmp_path / "data.yaml", "names: [cat, dog]\ntrain: images\nval: images\n")
    plan = plan_of(SCHEMAS["object-detection"], tmp_path)
    assert "validation" in plan.splits and any("for train and validation" in each for each in plan.warnings)
    assert any(note in each for each in plan.warnings)
    assert all(
        (row["objects"]["boxes"], row["objects"]["classes"]) == ([[5, 3.75, 15, 6.25]], [1])
        for row in plan.rows("train")
    )
    write(tmp_path / "data.yaml", "nc: 2\ntrain: images\n")
    if line.startswith("1"):
        assert plan_of(SCHEMAS["object-detection"], tmp_path).label_names == ("1",)


@pytest.mark.parametrize(
    ("line", "code", "fix"),
    [
        ("0 250 250 50 50", "data.annotations", "write boxes as fractions"),
        ("2 0.5 0.5 0.5 0.5", "data.classes", "subtract 1"),
    ],
)
def test_a_flaw_of_all_lines_of_yolo_is_named(tmp_path, line, code, fix):
    for number in range(4):
        draw(tmp_path / "images" / f"{number}.png", number, (20, 10))
        write(tmp_path / "labels" / f"{number}.txt", line)
    write(tmp_path / "classes.txt", "cat\ndog\n")
    assert refused(code, SCHEMAS["object-detection"], tmp_path).fix.startswith(fix)


def test_data_of_another_task_names_that_task(tmp_path):
    classes = class_folders(tmp_path / "pets", 2)
    for task in ("object-detection", "semantic-segmentation"):
        fix = refused("data.folder", SCHEMAS[task], classes).fix
        assert fix.startswith(f"lw train image-classification --data {classes}   or   ")
    objects = coco(tmp_path / "o" / "annotations" / "instances_train2017.json", [annotation(100)])
    (objects.parent / "images").rename(tmp_path / "o" / "train2017")
    refusal = refused("data.annotations", CLASSIFY, tmp_path / "o")
    assert refusal.fix == f"lw train object-detection --data {tmp_path / 'o'}"


@pytest.mark.parametrize("name", ["mask_{}", "{}_gtFine_labelIds"])
def test_masks_have_one_of_several_names(tmp_path, name):
    for mask in [*(mask_folders(tmp_path) / "masks").iterdir()]:
        mask.rename(mask.with_stem(name.format(mask.stem)))
    assert plan_of(SEGMENT, tmp_path).label_names == ("0", "1", "2")


@pytest.mark.parametrize(("mode", "reason"), [("RGBA", "alpha channel"), ("F", "decimal numbers")])
def test_masks_without_ids_are_called_what_they_are(tmp_path, mode, reason):
    for path in [*(mask_folders(tmp_path) / "masks").iterdir()]:
        mask = Image.open(path).copy()
        path.unlink()
        white = Image.new("L", mask.size, 255)
        other = (
            Image.merge("RGBA", [white] * 3 + [mask])
            if mode == "RGBA"
            else mask.convert("F").point(lambda value: value * 0.3 + 0)
        )
        other.save(path.with_suffix(".png" if mode == "RGBA" else ".tiff"))
    assert_refused("data.masks", SEGMENT, tmp_path, seen=reason, fix="as PNG")


def test_masks_of_floats_that_are_whole_hold_ids(tmp_path):
    for path in [*(mask_folders(tmp_path) / "masks").iterdir()]:
        Image.open(path).convert("F").save(path.with_suffix(".tiff"))
        path.unlink()
    assert plan_of(SEGMENT, tmp_path).label_names == ("0", "1", "2")


def test_colours_of_blurred_masks_are_proposed(tmp_path):
    for number in range(6):
        draw(tmp_path / "images" / f"{number}.png", number, (40, 40))
        colours = np.zeros((40, 40, 3), np.uint8)
        colours[5:18, 5:18, number % 2] = 128
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(colours).save(tmp_path / "masks" / f"{number}.jpg", quality=50)
    (value,) = flags_of(refused("data.masks", SEGMENT, tmp_path).fix, "mask_values").values()
    assert len(plan_of(SEGMENT, tmp_path, mask_values=[value]).label_names) == 3


def test_boxes_that_may_be_corners_and_a_column_of_splits_are_noted(tmp_path):
    found = [annotation(100 + number, bbox=[4, 2, 18, 9 - number % 2]) for number in range(6)]
    plan = plan_of(SCHEMAS["object-detection"], train_file=coco(tmp_path / "train.json", found))
    assert any("are these corners?" in note for note in plan.warnings)
    path = table_of(class_folders(tmp_path / "pets"), lambda file: file)
    head, *rows = path.read_text().split()
    path.write_text("\n".join([f"{head},split", *(f"{row},train" for row in rows)]))
    assert any("'split'" in note for note in plan_of(CLASSIFY, path).warnings)


def test_a_run_keeps_the_values_of_its_masks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = dirty.masks_of_colors(tmp_path / "data")
    (tmp_path / "palette.json").write_text('{"sky": [0, 0, 0], "car": "#FF0000", "tree": [0, 0, 255]}')
    flags = {"per_device_train_batch_size": 4, "max_steps": 2, "quiet": True, "rehearsal": False}
    run = api.train(SEGMENT.task, data=str(folder), mask_values="palette.json", output_dir="run", **flags)
    (tmp_path / "palette.json").unlink()
    other = dirty.masks_of_colors(tmp_path / "other")
    Image.new("RGB", (9, 24)).save(other / "masks" / "3.png")
    with assert_refused("data.size"):
        run.evaluate(data=str(other))
    scores = run.evaluate(data=str(other), bad_annotations="drop")
    assert 0 <= scores["mean_iou"] <= 1
    (found,) = run.predict(str(folder / "images" / "0.png"))
    assert set(found["classes"]) <= {"sky", "car", "tree"}
    assert api.resume("run", max_steps=3, quiet=True).path.name == "run"
    (drawn,) = run.predict(str(folder / "images" / "0.png"), overlays="drawn")
    assert set(map(tuple, np.asarray(Image.open(drawn["mask"])).reshape(-1, 3))) <= set(map(tuple, dirty.PALETTE))
