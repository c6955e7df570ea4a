"""Images, masks and objects from folders, COCO, YOLO and tables: what the rows of a plan are."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.sources.drawing import annotation, class_folders, coco, draw, draw_ids, draw_turned, mask_folders
from tests.sources.refusing import all_rows, assert_refused, lengths, plan_of, write, write_csv, write_jsonl

from loopwright.sources import SCHEMAS, DataPlan, check_unchanged, open_table
from loopwright.sources.images import scene_scan
from loopwright.sources.images.image_file import upright_size
from loopwright.sources.images.masks import count_ids, decode_numbers, run_lengths

SAMPLES = Path(__file__).parents[1] / "samples" / "COCO"
CLASSIFY = SCHEMAS["image-classification"]
SEGMENT = SCHEMAS["semantic-segmentation"]
DETECT = SCHEMAS["object-detection"]
INSTANCES = SCHEMAS["instance-segmentation"]
REBUILD = SCHEMAS["masked-image-modeling"]


def again(plan):
    """Return the plan as a resumed run reads it, after the check that the files are what they were."""
    read = DataPlan.from_json(plan.to_json())
    assert read.to_json() == plan.to_json()
    check_unchanged(read)
    for split in plan.splits:
        assert all_rows(read, split) == all_rows(plan, split)
    return read


def test_a_folder_per_class_gives_paths_and_labels(tmp_path):
    plan = plan_of(CLASSIFY, class_folders(tmp_path / "pets"))
    assert plan.labels.names == ("cat", "dog")
    assert sum(lengths(plan).values()) == 20 and set(lengths(plan)) == {"train", "validation"}
    rows = all_rows(plan, "train") + all_rows(plan, "validation")
    assert sorted(row["image"] for row in rows) == sorted(map(str, (tmp_path / "pets").rglob("*.png")))
    assert all(row["label"] == int("dog" in row["image"]) for row in rows)
    assert plan.guesses == () and plan.warnings == ()
    assert plan.images["sizes"]["width"] == {"min": 8, "p50": 8, "max": 8}
    read = again(plan)
    assert pickle.loads(pickle.dumps(read.rows("train")))[0] == plan.rows("train")[0]


def test_a_split_follows_from_the_bytes_of_the_images_alone(tmp_path):
    plan = plan_of(CLASSIFY, class_folders(tmp_path / "pets", 20))
    held = {row["image"]: row["label"] for row in all_rows(plan, "validation")}
    for place, path in enumerate(sorted((tmp_path / "pets" / "cat").iterdir(), reverse=True)):
        path.rename(path.with_name(f"x{place:02}_{path.name}"))
    renamed = plan_of(CLASSIFY, tmp_path / "pets")
    names = {row["image"].rpartition("/")[2].rpartition("_")[2] for row in all_rows(renamed, "validation")}
    assert len(held) == len(renamed.rows("validation"))
    assert names == {name.rpartition("/")[2] for name in held}


@pytest.mark.parametrize(
    "names",
    [
        *[("train", "val", "test"), ("training", "valid", "testing"), ("train", "dev", "holdout")],
        *[("seg_train", "seg_val", "seg_test"), ("train_set", "valset", "test_set"), ("训练集", "验证", "测试")],
    ],
)
def test_folders_of_splits_are_found_by_their_names(tmp_path, names):
    for place, name in enumerate(names):
        class_folders(tmp_path / name, 3 + place, start=100 * place)
    plan = plan_of(CLASSIFY, tmp_path)
    assert lengths(plan) == {"train": 6, "validation": 8, "test": 10}
    assert [file.kind for file in plan.files] == ["image-folder"] * 3
    again(plan)


def test_splits_can_be_folders_that_are_named_one_by_one(tmp_path):
    train, other = class_folders(tmp_path / "a", 4), class_folders(tmp_path / "b", 3, start=50)
    assert lengths(plan_of(CLASSIFY, train_file=train, validation_file=other)) == {"train": 8, "validation": 6}
    assert lengths(plan_of(CLASSIFY, validation_file=other)) == {"validation": 6}


def test_a_class_may_be_called_train(tmp_path):
    for place, name in enumerate(("bus", "train", "tram")):
        for number in range(5):
            draw(tmp_path / name / f"{number}.png", 10 * place + number)
    assert plan_of(CLASSIFY, tmp_path).labels.names == ("bus", "train", "tram")


def test_a_folder_beside_train_that_is_no_split_is_noted(tmp_path):
    for name in ("train", "unlabeled", "empty"):
        class_folders(tmp_path / name, 0 if name == "empty" else 5, start=len(name))
    draw(tmp_path / "more" / "1.png", 99)
    plan = plan_of(CLASSIFY, tmp_path)
    (note,) = [note for note in plan.warnings if "not used" in note]
    assert "more, unlabeled," in note and len(plan.label_names) == 2


def test_classes_may_have_folders_of_the_same_names(tmp_path):
    for place, name in enumerate(("cat/2021", "cat/2022", "dog/2021", "dog/2022")):
        for number in range(4):
            draw(tmp_path / name / f"{number}.png", 10 * place + number)
    assert plan_of(CLASSIFY, tmp_path).label_names == ("cat", "dog")


def test_images_of_validation_that_are_also_in_training_move_there(tmp_path):
    class_folders(tmp_path / "train", 5)
    class_folders(tmp_path / "val", 4, start=3)
    plan = plan_of(CLASSIFY, tmp_path)
    assert plan.duplicates == {"validation": 4} and lengths(plan) == {"train": 14, "validation": 4}
    kept = plan_of(CLASSIFY, tmp_path, keep_duplicates=True)
    assert lengths(kept) == {"train": 10, "validation": 8}


@pytest.mark.parametrize("image_dir", ["", "images", "elsewhere"])
def test_paths_in_a_csv_file_go_from_its_folder_or_from_images_in_it(tmp_path, image_dir):
    images = [draw(tmp_path / image_dir / f"{number}.png", number) for number in range(20)]
    rows = [[image.name, ["cat", "dog"][number % 2]] for number, image in enumerate(images)]
    path = write_csv(tmp_path / "pets.csv", rows, ["file", "kind"])
    options = {"image_dir": str(tmp_path / "elsewhere")} if image_dir == "elsewhere" else {}
    plan = plan_of(CLASSIFY, path, **options)
    assert plan.columns == {"image": "file", "label": "kind"} and len(plan.guesses) == 2
    assert all((tmp_path / image_dir) == (tmp_path / row["image"]).parent for row in all_rows(plan, "train"))
    again(plan)
    before = [file.sha256 for file in plan.files]
    (tmp_path / image_dir / "3.png").unlink()
    draw(tmp_path / image_dir / "3.png", 99)
    assert_refused("resume.data", check_unchanged, plan)
    assert [file.sha256 for file in plan_of(CLASSIFY, path, **options).files] != before


def test_a_note_about_a_table_of_images_is_kept(tmp_path):
    rows = [[draw(tmp_path / f"{number}.png", number).name, ["cat", "dog"][number % 2]] for number in range(20)]
    path = write_csv(tmp_path / "pets.csv", rows, ["file", "kind"])
    path.write_text(f"Pets of 2024\n{path.read_text()}")
    assert any("the header of pets.csv is in line 2" in each for each in plan_of(CLASSIFY, path).warnings)


def test_moved_data_has_the_same_hash(tmp_path):
    plan = plan_of(CLASSIFY, class_folders(tmp_path / "here"))
    (tmp_path / "here").rename(tmp_path / "there")
    moved = plan_of(CLASSIFY, tmp_path / "there")
    assert [file.sha256 for file in moved.files] == [file.sha256 for file in plan.files]
    assert all_rows(moved, "train")[0]["image"] == all_rows(plan, "train")[0]["image"].replace("here", "there")


@pytest.mark.parametrize("change", ["content", "name", "one more", "one less"])
def test_a_changed_folder_is_refused_and_the_hash_is_told_with_progress(tmp_path, change):
    plan = DataPlan.from_json(plan_of(CLASSIFY, class_folders(tmp_path)).to_json())
    seen = []
    check_unchanged(plan, seen.append)
    assert seen[-1].num_bytes_done == seen[-1].num_bytes == 20
    path = tmp_path / "cat" / "004.png"
    if change == "content":
        draw(path, 77)
    elif change == "name":
        path.rename(path.with_name("renamed.png"))
    elif change == "one more":
        draw(tmp_path / "dog" / "more.png", 78)
    else:
        path.unlink()
    assert_refused("resume.data", check_unchanged, plan)


def test_metadata_beside_the_images_is_read_as_datasets_reads_it(tmp_path):
    images = [draw(tmp_path / "train" / f"{number}.png", number) for number in range(12)]
    rows = [{"file_name": image.name, "label": ["a", "b"][number % 2]} for number, image in enumerate(images)]
    write_jsonl(tmp_path / "train" / "metadata.jsonl", rows)
    plan = plan_of(CLASSIFY, tmp_path)
    assert plan.columns == {"image": "file_name", "label": "label"}
    assert all_rows(plan, "train")[0]["image"] == str(tmp_path / "train" / "0.png")


def test_images_of_a_parquet_file_are_bytes(tmp_path):
    datasets = pytest.importorskip("datasets")
    images = [draw(tmp_path / f"{number}.png", number) for number in range(10)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])})
    stored = [{"bytes": path.read_bytes(), "path": None} for path in images]
    rows = {"image": stored, "label": [number % 2 for number in range(10)]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "pets.parquet")
    plan = plan_of(CLASSIFY, tmp_path / "pets.parquet")
    assert plan.labels.names == ("dog", "cat")
    assert all_rows(plan, "train")[0]["image"] == images[0].read_bytes()
    again(plan)


def test_new_images_are_a_folder_or_one_file_without_anything_else(tmp_path):
    class_folders(tmp_path / "new", 3)
    schema = CLASSIFY.for_prediction()
    plan = plan_of(schema, test_file=tmp_path / "new", columns={"image": "path"})
    assert [sorted(row) for row in all_rows(plan, "test")] == [["image"]] * 6
    one = plan_of(schema, test_file=tmp_path / "new" / "cat" / "001.png")
    assert all_rows(one, "test") == [{"image": str(tmp_path / "new" / "cat" / "001.png")}]
    again(one)


def test_preflight_of_images_imports_no_torch(tmp_path):
    class_folders(tmp_path)
    code = (
        "import sys; from loopwright.sources import SCHEMAS, preflight\n"
        "assert 'PIL' not in sys.modules\n"
        f"preflight(SCHEMAS['image-classification'], data={str(tmp_path)!r})\n"
        "assert 'torch' not in sys.modules and 'datasets' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rows_of_images_are_a_dataset_for_loaders_with_workers(tmp_path):
    from torch.utils.data import DataLoader

    rows = plan_of(DETECT, coco(tmp_path / "a.json", [annotation(100), annotation(103, 3)])).rows("train")
    loader = DataLoader(rows, batch_size=2, num_workers=2, collate_fn=list)
    assert [row for batch in loader for row in batch] == [rows[index] for index in range(len(rows))]


def test_masks_are_found_beside_their_images_and_their_pixels_are_counted(tmp_path):
    mask_folders(tmp_path / "scenes")
    write(tmp_path / "scenes" / "id2label.json", '{"0": "sky", "1": "road", "2": "car"}')
    plan = plan_of(SEGMENT, tmp_path / "scenes")
    assert plan.labels.kind == "class" and plan.labels.names == ("sky", "road", "car")
    row = all_rows(plan, "train")[0]
    name = row["image"].rpartition("/")[2].removesuffix(".jpg")
    assert row["mask"] == str(tmp_path / "scenes" / "masks" / f"{name}.png")
    for split in ("train", "validation"):
        expected = np.zeros(3, int)
        for row in all_rows(plan, split):
            expected += np.bincount(np.asarray(Image.open(row["mask"])).ravel(), minlength=3)
        assert list(plan.counts[split].values()) == expected.tolist()
    assert plan.images["masks_scanned"] == 10 and plan.images["ignore_index"] == 255
    again(plan)
    draw_ids(tmp_path / "scenes" / "masks" / "003.png", np.ones((6, 8)))
    assert_refused("resume.data", check_unchanged, plan)


@pytest.mark.parametrize(
    "text",
    [
        '{"sky": 0, "road": 1, "car": 2}',
        '["sky", "road", "car"]',
        '[{"id": 1, "name": "road"}, {"id": 0, "name": "sky"}, {"id": 2, "name": "car"}]',
    ],
)
def test_names_of_classes_have_several_forms(tmp_path, text):
    mask_folders(tmp_path)
    write(tmp_path / "names.json", text)
    plan = plan_of(SEGMENT, tmp_path, id2label=str(tmp_path / "names.json"))
    assert plan.labels.names == ("sky", "road", "car")
    again(plan)


@pytest.mark.parametrize("layout", ["split outside", "split inside"])
def test_masks_lie_in_folders_of_splits_or_splits_in_folders_of_masks(tmp_path, layout):
    for place, split in enumerate(("train", "validation")):
        made = mask_folders(tmp_path / "made" / split, 4 - place, start=10 * place)
        if layout == "split inside":
            for kind, other in (("images", "images"), ("masks", "annotations")):
                (tmp_path / other).mkdir(exist_ok=True)
                (made / kind).rename(tmp_path / other / split)
    plan = plan_of(SEGMENT, tmp_path / "made" if layout == "split outside" else tmp_path)
    assert lengths(plan) == {"train": 4, "validation": 3}
    assert plan.labels.names == ("0", "1", "2")
    again(plan)


def test_masks_may_be_named_in_a_column(tmp_path):
    mask_folders(tmp_path)
    rows = [{"image": f"images/{number:03}.jpg", "annotation": f"masks/{number:03}.png"} for number in range(10)]
    plan = plan_of(SEGMENT, train_file=write_jsonl(tmp_path / "train.jsonl", rows))
    assert plan.columns == {"image": "image", "mask": "annotation"}
    assert all_rows(plan, "train")[0]["mask"].startswith(str(tmp_path / "masks"))
    again(plan)


def test_ignored_pixels_count_for_no_class_and_reduced_labels_are_one_lower(tmp_path):
    for number in range(6):
        draw(tmp_path / "images" / f"{number}.png", number, (4, 1))
        draw_ids(tmp_path / "masks" / f"{number}.png", [[0, 1, 2, 255]])
    plan = plan_of(SEGMENT, tmp_path, validation_ratio=0)
    assert plan.counts == {"train": {"0": 6, "1": 6, "2": 6}}
    reduced = plan_of(SEGMENT, tmp_path, validation_ratio=0, reduce_labels=True)
    assert reduced.counts == {"train": {"0": 6, "1": 6}} and reduced.images["reduce_labels"] is True


def test_of_many_masks_some_at_equal_distances_are_read_to_the_last_pixel(tmp_path, monkeypatch):
    monkeypatch.setattr(scene_scan, "MOST_MASKS_SCANNED", 4)
    plan = plan_of(SEGMENT, mask_folders(tmp_path, 12), validation_ratio=0)
    assert plan.images["masks_scanned"] == 4 and sum(plan.counts["train"].values()) == 4 * 48


def test_a_palette_gives_ids_by_place_and_other_depths_their_values(tmp_path):
    ids = np.array([[0, 3], [3, 2]], np.uint8)
    palette = Image.fromarray(ids, "P")
    palette.putpalette([7, 8, 9] * 256)
    palette.save(tmp_path / "palette.png")
    Image.fromarray(ids.astype(np.uint16) * 1000).save(tmp_path / "deep.png")
    assert decode_numbers(str(tmp_path / "palette.png"), None)[0].tolist() == ids.tolist()
    assert count_ids(decode_numbers(str(tmp_path / "deep.png"), None)[0]) == {0: 1, 2000: 1, 3000: 2}


def test_coco_gives_boxes_classes_outlines_and_crowds(tmp_path):
    rle = {"size": [10, 20], "counts": [0, 20, 180]}
    found = [
        annotation(101, 3, (1, 2, 3, 4), segmentation=[[1, 2, 4, 2, 4, 6]]),
        annotation(100, 7, (0, 0, 2, 10), segmentation=rle, iscrowd=1),
        annotation(101, 7, (5.5, 1, 2, 2), segmentation=[[5, 1, 8, 1, 8, 3, 5, 3]]),
    ]
    path = coco(tmp_path / "train.json", found)
    plan = plan_of(INSTANCES, train_file=path, validation_ratio=0)
    assert plan.labels.names == ("cat", "dog") and plan.images["class_ids"] == [3, 7]
    rows = all_rows(plan, "train")
    assert rows[0] == {
        "image": str(tmp_path / "images" / "0.png"),
        "objects": {"boxes": [[0.0, 0.0, 2.0, 10.0]], "classes": [1], "segments": [rle], "crowd": [True]},
        "image_id": "100",
    }
    assert rows[1]["objects"] == {
        "boxes": [[1.0, 2.0, 4.0, 6.0], [5.5, 1.0, 7.5, 3.0]],
        "classes": [0, 1],
        "segments": [[[1.0, 2.0, 4.0, 2.0, 4.0, 6.0]], [[5.0, 1.0, 8.0, 1.0, 8.0, 3.0, 5.0, 3.0]]],
        "crowd": [False, False],
    }
    assert rows[2]["objects"] == {"boxes": [], "classes": [], "segments": [], "crowd": []}
    assert plan.counts == {"train": {"cat": 1, "dog": 2}}
    assert plan.images["objects"] == {"train": 3} and plan.images["empty"] == {"train": 4}
    assert plan.images["most_objects"] == 2
    again(plan)


@pytest.mark.parametrize(
    ("file", "images"),
    [
        ("annotations/instances_{}2017.json", "{}2017"),
        ("annotations/instances_{}.json", "images/{}"),
        ("annotations/{}.json", "images"),
        ("{}.json", "images"),
        ("{}/_annotations.coco.json", "{}"),
    ],
)
def test_coco_is_found_where_it_usually_lies(tmp_path, file, images):
    for place, split in enumerate(("train", "val")):
        path = tmp_path / file.format(split)
        listed = []
        for number in range(3):
            name = f"{split}_{number}.png"
            draw(tmp_path / images.format(split) / name, 10 * place + number, (20, 10))
            listed.append({"id": number, "file_name": name, "width": 20, "height": 10})
        coco(path, [annotation(number) for number in range(3)], images=listed)
    plan = plan_of(DETECT, tmp_path)
    assert lengths(plan) == {"train": 3, "validation": 3}
    assert [file.kind for file in plan.files] == ["coco", "coco"]
    again(plan)


def test_images_of_coco_may_be_anywhere_if_it_is_said(tmp_path):
    path = coco(tmp_path / "a" / "x.json", [annotation(100)])
    (tmp_path / "a" / "images").rename(tmp_path / "pictures")
    assert_refused("data.image", DETECT, train_file=path)
    plan = plan_of(DETECT, train_file=path, image_dir=str(tmp_path / "pictures"))
    assert plan.files[0].settings["image_dir"] == "../pictures"
    again(plan)


def test_the_order_of_the_parts_of_a_coco_file_does_not_matter(tmp_path):
    path = coco(tmp_path / "train.json", [annotation(101, 3), annotation(100, 7)])
    first = all_rows(plan_of(DETECT, train_file=path, validation_ratio=0), "train")
    content = json.loads(path.read_text())
    turned = {"info": {"year": 2020}, "annotations": content["annotations"], "licenses": [], **content, "type": "x"}
    path.write_text(json.dumps(turned, indent=2))
    assert all_rows(plan_of(DETECT, train_file=path, validation_ratio=0), "train") == first


def test_boxes_are_cut_at_the_edge_left_out_without_size_and_found_by_the_outline(tmp_path):
    boxes = [(-5, 2, 10, 4), (15, 5, 50, 50), (3, 3, 0, 4), (3, 3, 4, -1), (25, 2, 4, 4), (2, 2, 3, 3)]
    path = coco(tmp_path / "train.json", [annotation(100, 7, box) for box in boxes])
    plan = plan_of(DETECT, train_file=path, validation_ratio=0)
    assert all_rows(plan, "train")[0]["objects"]["boxes"] == [
        [0.0, 2.0, 5.0, 6.0],
        [15.0, 5.0, 20.0, 10.0],
        [2.0, 2.0, 5.0, 5.0],
    ]
    assert plan.dropped == {"boxes_zero_size": 2, "boxes_outside": 1}
    assert plan.images["clipped_boxes"]["number"] == 2
    assert plan.images["dropped_boxes"]["outside"] == {
        "number": 1,
        "first": ["0.png: box [25, 2, 29, 6] lies outside the image of 20 x 10"],
    }
    assert any("left out: 2 boxes of train.json without a size: 0.png" in warning for warning in plan.warnings)
    assert "2 boxes of train.json are clipped at the image's edge" in plan.warnings
    assert json.loads(plan.to_json())["images"]["dropped_boxes"]["zero_size"]["number"] == 2
    found = [
        annotation(100, segmentation=[[1, 2, 4, 2, 4, 6]]),
        annotation(101, segmentation={"size": [10, 20], "counts": [14, 2, 184]}),
        annotation(102, segmentation={"size": [10, 20], "counts": ">2h5"}),
    ]
    for each in found:
        del each["bbox"]
    path = coco(tmp_path / "train.json", found)
    rows = all_rows(plan_of(INSTANCES, train_file=path, validation_ratio=0), "train")
    assert [row["objects"]["boxes"] for row in rows[:3]] == [
        [[1.0, 2.0, 4.0, 6.0]],
        [[1.0, 4.0, 2.0, 6.0]],
        [[1.0, 4.0, 2.0, 6.0]],
    ]


def test_sizes_and_boxes_are_those_of_the_upright_image(tmp_path):
    draw_turned(tmp_path / "images" / "a.jpg", 1, (20, 10))
    draw_turned(tmp_path / "images" / "b.png", 2, (20, 10))
    listed = [
        {"id": 1, "file_name": "a.jpg", "width": 10, "height": 20},
        {"id": 2, "file_name": "b.png", "width": 20, "height": 10},
    ]
    found = [annotation(1, bbox=(0, 0, 30, 30)), annotation(2, bbox=(5, 5, 30, 30))]
    path = coco(tmp_path / "a.json", found, 0, listed)
    plan = plan_of(DETECT, train_file=path, validation_ratio=0)
    assert [row["objects"]["boxes"] for row in all_rows(plan)] == [[[0.0, 0.0, 10.0, 20.0]], [[5.0, 5.0, 10.0, 20.0]]]
    assert plan.images["sizes"]["width"]["max"] == 10 and plan.images["turned"] == 2
    assert any("1 images of a.json are turned by their EXIF orientation" in warning for warning in plan.warnings)


def test_yolo_boxes_and_outlines_become_pixels(tmp_path):
    for number in range(4):
        draw(tmp_path / "images" / "train" / f"{number}.jpg", number, (20, 10))
    (tmp_path / "labels" / "train").mkdir(parents=True)
    write(tmp_path / "labels" / "train" / "0.txt", "1 0.5 0.5 0.2 0.4\n0 0.1 0.1 0.5 0.1 0.5 0.6\n")
    write(tmp_path / "labels" / "train" / "1.txt", "")
    write(tmp_path / "labels" / "train" / "3.txt", "0 0.5 0.5 1 1\n")
    write(tmp_path / "data.yaml", "path: .\ntrain: images/train\nnames: {0: person, 1: car}\n")
    plan = plan_of(DETECT, tmp_path, validation_ratio=0)
    assert plan.labels.names == ("person", "car") and plan.files[0].kind == "yolo"
    rows = all_rows(plan, "train")
    assert np.allclose(rows[0]["objects"]["boxes"], [[8, 3, 12, 7], [2, 1, 10, 6]])
    assert rows[0]["objects"]["classes"] == [1, 0] and rows[0]["image_id"] == "0"
    assert rows[0]["objects"]["segments"][0] is None
    assert np.allclose(rows[0]["objects"]["segments"][1], [[2, 1, 10, 1, 10, 6]])
    assert plan.images["empty"] == {"train": 2}
    again(plan)
    by_file = plan_of(DETECT, tmp_path / "data.yaml", validation_ratio=0)
    assert all_rows(by_file, "train") == rows
    write(tmp_path / "labels" / "train" / "3.txt", "0 0.5 0.5 1 0.9\n")
    assert_refused("resume.data", check_unchanged, plan)


def test_yolo_files_may_lie_beside_the_images_with_classes_in_a_text(tmp_path):
    for number in range(5):
        draw(tmp_path / f"{number}.png", number, (20, 10))
        write(tmp_path / f"{number}.txt", f"{number % 2} 0.5 0.5 0.5 0.5\n")
    write(tmp_path / "classes.txt", "cat\ndog\n")
    plan = plan_of(DETECT, tmp_path)
    assert plan.labels.names == ("cat", "dog")
    assert all_rows(plan, "train")[0]["objects"]["boxes"] == [[5.0, 2.5, 15.0, 7.5]]
    assert lengths(plan_of(REBUILD, tmp_path))["train"] >= 1


@pytest.mark.parametrize("form", ["lists", "dicts", "json in csv"])
def test_objects_in_a_column_have_the_form_of_datasets(tmp_path, form):
    rows = []
    for number in range(6):
        draw(tmp_path / f"{number}.png", number, (20, 10))
        objects = {"bbox": [[1, 2, 3, 4]], "category": ["cat" if number % 2 else "dog"], "area": [12]}
        if form == "dicts":
            objects = [{key: value[0] for key, value in objects.items()}]
        rows.append({"image": f"{number}.png", "image_id": number, "objects": objects})
    if form == "json in csv":
        cells = [[row["image"], row["image_id"], json.dumps(row["objects"])] for row in rows]
        path = write_csv(tmp_path / "train.csv", cells, list(rows[0]))
    else:
        path = write_jsonl(tmp_path / "train.jsonl", rows)
    plan = plan_of(DETECT, train_file=path, validation_ratio=0)
    assert plan.labels.names == ("cat", "dog")
    assert all_rows(plan, "train")[1] == {
        "image": str(tmp_path / "1.png"),
        "objects": {"boxes": [[1.0, 2.0, 4.0, 6.0]], "classes": [0], "segments": [None], "crowd": [False]},
        "image_id": "1",
    }
    again(plan)


def test_objects_of_a_parquet_file_know_the_names_of_their_classes(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "image": datasets.Image(),
            "objects": {
                "bbox": datasets.Sequence(datasets.Sequence(datasets.Value("float32"))),
                "category": datasets.Sequence(datasets.ClassLabel(names=["zebra", "ant"])),
            },
        }
    )
    images = [str(draw(tmp_path / f"{number}.png", number, (20, 10))) for number in range(4)]
    objects = [{"bbox": [[1, 2, 3, 4]], "category": [number % 2]} for number in range(4)]
    data = datasets.Dataset.from_dict({"image": images, "objects": objects}, features=features)
    data.to_parquet(tmp_path / "a.parquet")
    plan = plan_of(DETECT, tmp_path / "a.parquet", validation_ratio=0)
    assert plan.labels.names == ("zebra", "ant") and plan.images["class_ids"] == [0, 1]
    assert [row["objects"]["classes"] for row in all_rows(plan)] == [[0], [1], [0], [1]]
    again(plan)


def test_pictures_of_class_and_instance_ids_are_objects(tmp_path):
    pixels = np.zeros((6, 8, 3), np.uint8)
    pixels[1:3, 2:5, :2] = 1, 1
    pixels[4:6, 0:2, :2] = 2, 2
    pixels[4:6, 6:8, :2] = 2, 3
    for number in range(4):
        draw(tmp_path / "images" / f"{number}.jpg", number)
        (tmp_path / "annotations").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "annotations" / f"{number}.png")
    write(tmp_path / "id2label.json", '["background", "cat", "dog"]')
    plan = plan_of(INSTANCES, tmp_path, validation_ratio=0)
    objects = all_rows(plan, "train")[0]["objects"]
    assert objects["boxes"] == [[2.0, 1.0, 5.0, 3.0], [0.0, 4.0, 2.0, 6.0], [6.0, 4.0, 8.0, 6.0]]
    assert objects["classes"] == [1, 2, 2]
    assert objects["segments"][0] == run_lengths(pixels[..., 1] == 1)
    assert sum(objects["segments"][2]["counts"]) == 48
    again(plan)
    write(tmp_path / "id2label.json", '["cat", "dog"]')
    reduced = plan_of(INSTANCES, tmp_path, validation_ratio=0, reduce_labels=True)
    assert all_rows(again(reduced), "train")[0]["objects"]["classes"] == [0, 1, 1]


def test_run_lengths_are_those_of_coco():
    mask_module = pytest.importorskip("faster_coco_eval.core.mask")
    mask = np.random.default_rng(0).random((7, 9)) > 0.5
    packed = mask_module.frPyObjects(run_lengths(mask), 7, 9)
    assert np.array_equal(mask_module.decode(packed).astype(bool), mask)
    assert run_lengths(np.ones((2, 2), bool)) == {"size": [2, 2], "counts": [0, 4]}


def test_classes_can_be_renamed_joined_and_those_of_a_trained_model(tmp_path):
    path = coco(tmp_path / "train.json", [annotation(100, 3), annotation(101, 7)])
    plan = plan_of(DETECT, train_file=path, label_map={"cat": "pet", "dog": "pet"})
    assert (
        plan.labels.names == ("pet",)
        and sum(plan.counts["train"].values()) + sum(plan.counts["validation"].values()) == 2
    )
    assert all(set(row["objects"]["classes"]) <= {0} for row in all_rows(plan, "train"))
    seen = "no object is of the class 'cats', but 'cat', 'dog'"
    assert_refused("data.labels", DETECT, train_file=path, label_map={"cats": "pet"}, seen=seen, fix="cat=pet")
    plan = plan_of(DETECT, train_file=path, drop_labels=["dog"])
    assert plan.labels.names == ("cat",) and plan.dropped["drop_labels"] == 1
    path = coco(tmp_path / "b" / "other.json", [annotation(100, 1)], categories=[{"id": 1, "name": "dog"}])
    plan = plan_of(DETECT, validation_file=path, label_names=("cat", "dog"))
    assert all_rows(plan, "validation")[0]["objects"]["classes"] == [1]
    new = plan_of(DETECT.for_prediction(), test_file=tmp_path / "b" / "images")
    assert len(new.rows("test")) == 6 and new.labels is None


@pytest.mark.parametrize("layout", ["classes", "flat", "masks", "coco", "splits", "yolo splits"])
def test_images_alone_come_from_any_layout(tmp_path, layout):
    if layout == "classes":
        class_folders(tmp_path)
    elif layout == "masks":
        mask_folders(tmp_path, 20)
    elif layout == "coco":
        coco(tmp_path / "train.json", [annotation(100)], 20)
    elif layout == "splits":
        mask_folders(tmp_path / "train", 15)
        mask_folders(tmp_path / "val", 5, start=50)
    else:
        for number in range(20):
            split = "images/train" if number < 15 else "images/val"
            draw(tmp_path / ("a/b" if layout == "flat" else split) / f"{number}.png", number)
    plan = plan_of(REBUILD, tmp_path)
    assert sum(lengths(plan).values()) == 20 and set(all_rows(plan, "train")[0]) == {"image"}
    assert plan.labels is None and plan.counts == {}
    again(plan)


def test_the_coco_sample_is_read(tmp_path):
    annotations = json.loads((SAMPLES / "coco_annotations.txt").read_text())
    width, height = upright_size(str(SAMPLES / "000000039769.png"))
    listed = [{"id": 39769, "file_name": "000000039769.png", "width": width, "height": height}]
    categories = [{"id": number, "name": str(number)} for number in {each["category_id"] for each in annotations}]
    path = coco(tmp_path / "train.json", annotations, images=listed, categories=categories)
    plan = plan_of(INSTANCES, train_file=path, validation_ratio=0, image_dir=str(SAMPLES))
    objects = all_rows(plan, "train")[0]["objects"]
    assert len(objects["boxes"]) == len(annotations) == sum(plan.counts["train"].values())
    expected = [[x, y, x + width, y + height] for x, y, width, height in (each["bbox"] for each in annotations)]
    assert np.allclose(objects["boxes"], expected, atol=1)
    assert plan.labels.names == tuple(sorted(plan.labels.names, key=int))
    again(plan)


@pytest.mark.slow
def test_ten_thousand_small_images_are_checked_in_seconds(tmp_path):
    import time

    pixels = np.random.default_rng(0).integers(0, 256, (10_000, 8, 8), dtype=np.uint8)
    for place, image in enumerate(pixels):
        folder = tmp_path / str(place % 10)
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{place}.png")
    seen, before = [], time.process_time()
    plan = plan_of(CLASSIFY, tmp_path, say=seen.append)
    assert time.process_time() - before < 20
    assert sum(lengths(plan).values()) == 10_000
    assert {progress.stage for progress in seen} == {"checking images"} and len(seen) == 50


def test_tables_of_images_are_opened_by_kind(tmp_path):
    mask_folders(tmp_path)
    table = open_table(tmp_path, kind="mask-folder")
    assert table.columns == ("image", "mask") and table[0] == {"image": "images/000.jpg", "mask": "masks/000.png"}
    assert [row["mask"] for row in table][:2] == ["masks/000.png", "masks/001.png"]
    assert len(open_table(tmp_path, kind="images")) == 20
    with pytest.raises(IndexError):
        table[10]
