"""Demo data of images: exact boxes and masks, always the same bytes, and files that an ordinary run can read."""

import gzip
import json
import shutil
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import toys
from loopwright import demos as embedded
from loopwright.data.pictures import color_of
from loopwright.demos import load_demo, write_demo
from loopwright.demos.demo_folder import digest_on_disk, place_files
from loopwright.demos.images.digits import drawn_digits, load_digits
from loopwright.demos.images.fashion import load_fashion, read_idx
from loopwright.demos.images.image_files import mask_folders
from loopwright.demos.images.scenes import NAMES, DigitScene, SceneParts, digit_scenes, load_parts
from loopwright.errors import ConfigError, DataError, InputError
from loopwright.sources import SCHEMAS, preflight
from loopwright.sources.images.masks import run_lengths
from toys import contents

PACKAGE = Path(embedded.__file__).parent
SIZES = {
    "image-classification": (1437, 360),
    "masked-image-modeling": (1437, 360),
    "semantic-segmentation": (800, 120),
    "object-detection": (1000, 120),
    "instance-segmentation": (1000, 120),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Return a function that writes a demo once for all tests, which must leave it as it is."""
    return cache(lambda task: write_demo(task, tmp_path_factory.mktemp("demo") / task))


@cache
def parts() -> SceneParts:
    return load_parts()


@cache
def scenes(split: str, num_scenes: int) -> list[DigitScene]:
    return list(digit_scenes(parts(), split, num_scenes))


def read_png(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def test_the_digits_are_those_of_scikit_learn_in_folders_by_class(written):
    datasets = pytest.importorskip("sklearn.datasets")
    paths = written("image-classification")
    expected = datasets.load_digits()
    looked_at = 0
    for split, positions in [("train", range(1437)), ("validation", range(1437, 1797))]:
        assert paths[split].name == split
        assert sorted(path.name for path in paths[split].iterdir()) == list("0123456789")
        assert len(list(paths[split].rglob("*"))) == 10 + len(positions)
        for position in positions:
            found = read_png(paths[split] / str(expected.target[position]) / f"{position:04}.png")
            assert found.shape == (8, 8) and np.array_equal(np.rint(found / 255 * 16), expected.images[position])
            looked_at += 1
    assert looked_at == 1797


def test_masked_image_modeling_has_the_same_images(written):
    folders = [written(task)["notes"].parent for task in ("image-classification", "masked-image-modeling")]
    for split in ("train", "validation"):
        assert digest_on_disk(folders[0] / split) == digest_on_disk(folders[1] / split)


def test_no_two_digits_are_alike_written_or_drawn_and_drawn_ones_can_be_told_apart():
    for digits in (load_digits(), drawn_digits()):
        assert digits.images.shape == (1797, 8, 8) and digits.num_train == 1437
        assert len({image.tobytes() for image in digits.images}) == 1797
        assert min(np.bincount(digits.labels[:1437])) >= 130 and min(np.bincount(digits.labels[1437:])) >= 30
        assert (digits.images.max(axis=(1, 2)) >= 200).all()
    flat = digits.images.reshape(1797, -1).astype(float)
    train, validation = flat[:1437], flat[1437:]
    # Squared distances, less what is the same for all images of training.
    distances = (train**2).sum(axis=1) - 2 * validation @ train.T
    assert (digits.labels[:1437][distances.argmin(axis=1)] == digits.labels[1437:]).mean() >= 0.95


def test_masks_are_apart_boxes_fit_them_and_digits_can_be_seen():
    seen = {split: scenes(split, num) for split, num in [("train", 300), ("validation", 120)]}
    for scene in seen["train"] + seen["validation"]:
        assert scene.image.shape == (64, 64, 3) and scene.image.dtype == np.uint8
        assert 1 <= len(scene.classes) == len(scene.masks) == len(scene.boxes) <= 4
        assert (scene.masks.sum(axis=0) <= 1).all()
        for mask, digit, (x0, y0, x1, y1) in zip(scene.masks, scene.classes, scene.boxes, strict=True):
            ys, xs = np.nonzero(mask)
            assert (x0, y0, x1, y1) == (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
            assert mask.sum() >= 30 and (scene.semantic[mask] == digit + 1).all()
        assert ((scene.semantic == 0) == ~scene.masks.any(axis=0)).all()
    counts = np.bincount([len(scene.classes) for scene in seen["train"]], minlength=5)
    assert counts[0] == 0 and counts[1:].min() >= 30
    classes = [digit for scene in seen["train"] for digit in scene.classes]
    assert np.bincount(classes, minlength=10).min() >= 40


def test_a_digit_differs_from_its_surroundings():
    contrasts = []
    for scene in scenes("validation", 120):
        grey = scene.image @ np.array([0.299, 0.587, 0.114])
        for mask, (x0, y0, x1, y1) in zip(scene.masks, scene.boxes, strict=True):
            around = ~mask[y0:y1, x0:x1]
            contrasts.append(abs(grey[mask].mean() - grey[y0:y1, x0:x1][around].mean()))
    assert np.median(contrasts) >= 60 and np.quantile(contrasts, 0.05) >= 15


def test_training_has_the_left_halves_of_the_photos_and_other_digits():
    datasets = pytest.importorskip("sklearn.datasets")
    photos = datasets.load_sample_images().images
    for photo, left, right in zip(photos, *parts().backgrounds.values(), strict=True):
        assert left.shape == right.shape == (427, 320, 3)
        assert np.array_equal(np.concatenate([left, right], axis=1), photo)
    sides = [parts().digits.images[parts().digits.positions(split)] for split in ("train", "validation")]
    train, validation = ({image.tobytes() for image in side} for side in sides)
    assert [*map(len, sides)] == [1437, 360] and not train & validation


@pytest.mark.slow
def test_a_scene_follows_from_its_number_alone(written):
    images = written("object-detection")["train"].parent / "images"
    few = written("semantic-segmentation")["train"] / "images"
    for index in (0, 1, 399, 799):
        expected = (images / f"train_{index:04}.png").read_bytes()
        assert (few / f"{index:04}.png").read_bytes() == expected
    assert np.array_equal(read_png(few / "0007.png"), scenes("train", 300)[7].image)


def test_run_lengths_start_with_zeros_and_go_down_the_columns():
    assert run_lengths(np.array([[False, True], [False, True]]))["counts"] == [2, 2]
    assert run_lengths(np.array([[True, False], [False, False]]))["counts"] == [0, 1, 3]
    assert run_lengths(np.array([[False, True], [True, False]]))["counts"] == [1, 2, 1]
    mask = scenes("validation", 120)[0].masks[0]
    counts = run_lengths(mask)["counts"]
    assert np.array_equal(np.repeat(np.arange(len(counts)) % 2, counts).reshape(64, 64).T, mask)


@pytest.mark.parametrize("task", ["object-detection", "instance-segmentation"])
def test_coco_files_hold_exactly_what_is_in_the_images(written, task):
    paths = written(task)
    folder = paths["notes"].parent
    found = json.loads(paths["validation"].read_text())
    assert [category["name"] for category in found["categories"]] == list(NAMES)
    assert [category["id"] for category in found["categories"]] == list(range(10))
    assert [annotation["id"] for annotation in found["annotations"]] == list(range(1, len(found["annotations"]) + 1))
    for image, scene in zip(found["images"], scenes("validation", 120), strict=True):
        assert (image["width"], image["height"]) == (64, 64)
        assert np.array_equal(read_png(folder / "images" / image["file_name"]), scene.image)
        objects = [annotation for annotation in found["annotations"] if annotation["image_id"] == image["id"]]
        assert [annotation["category_id"] for annotation in objects] == list(scene.classes)
        for annotation, mask, (x0, y0, x1, y1) in zip(objects, scene.masks, scene.boxes, strict=True):
            assert annotation["bbox"] == [x0, y0, x1 - x0, y1 - y0]
            assert (annotation["area"], annotation["iscrowd"]) == (mask.sum(), 0)
            assert ("segmentation" in annotation) == (task == "instance-segmentation")
            if task == "instance-segmentation":
                assert annotation["segmentation"] == {"size": [64, 64], "counts": run_lengths(mask)["counts"]}
    assert len(list((folder / "images").iterdir())) == 1120


def test_coco_masks_are_read_by_an_independent_reader(written):
    coco = pytest.importorskip("faster_coco_eval")
    found = json.loads(written("instance-segmentation")["validation"].read_text())
    for annotation in found["annotations"][:40]:
        mask = coco.mask.decode(coco.mask.frPyObjects(annotation["segmentation"], 64, 64))
        ys, xs = np.nonzero(mask)
        x0, y0, width, height = annotation["bbox"]
        assert (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1) == (x0, y0, x0 + width, y0 + height)
        assert mask.sum() == annotation["area"]


def test_mask_files_hold_class_ids_and_show_them_in_color(written):
    paths = written("semantic-segmentation")
    names = json.loads((paths["notes"].parent / "id2label.json").read_text())
    assert names == {str(index): name for index, name in enumerate(("background", *NAMES))}
    for index, scene in enumerate(scenes("validation", 120)):
        with Image.open(paths["validation"] / "masks" / f"{index:04}.png") as image:
            assert image.mode == "P"
            assert np.array_equal(np.asarray(image), scene.semantic)
            colors = np.asarray(image.convert("RGB"))
        assert (colors[scene.semantic == 0] == 0).all()
        assert (colors[scene.masks[0]] == color_of(scene.classes[0])).all()


@pytest.mark.parametrize("task", sorted(SIZES))
def test_notes_say_what_images_there_are_and_preflight_finds_nothing_wrong(written, task):
    paths = written(task)
    folder = paths["notes"].parent
    notes = json.loads(paths["notes"].read_text())
    assert notes["task"] == task and notes["rows"] == dict(zip(("train", "validation"), SIZES[task], strict=True))
    assert "Creative Commons" in notes["licence"] and "scikit-learn" in notes["source"]
    assert set(notes["packages"]) == {"numpy", "pillow", "scikit-learn"}
    assert notes["sha256"] == {name: digest_on_disk(folder / name) for name in notes["sha256"]}
    assert {path.name for path in folder.iterdir()} == {"demo.json", *notes["sha256"]}
    for plan in (
        preflight(SCHEMAS[task], data=folder),
        preflight(SCHEMAS[task], train_file=paths["train"], validation_file=paths["validation"]),
    ):
        assert {split: len(plan.rows(split)) for split in notes["rows"]} == notes["rows"]
        assert plan.warnings == ()
        if task != "masked-image-modeling":
            assert list(plan.labels.names) == notes["classes"]


def test_writing_again_writes_the_same_bytes_and_only_what_is_missing(tmp_path):
    paths = write_demo("image-classification", tmp_path)
    first = contents(tmp_path)
    kept = (paths["validation"] / "7").stat().st_ino
    shutil.rmtree(paths["train"])
    assert write_demo("image-classification", tmp_path) == paths
    assert contents(tmp_path) == first
    assert (paths["validation"] / "7").stat().st_ino == kept
    assert toys.names_in(tmp_path) == {"demo.json", "train", "validation"}


@pytest.mark.parametrize("change", ["an image more", "an image less", "an edited image"])
def test_a_folder_of_images_that_was_changed_is_not_written_to(tmp_path, change):
    paths = write_demo("masked-image-modeling", tmp_path)
    image = next(iter(sorted(paths["train"].rglob("*.png"))))
    if change == "an image less":
        image.unlink()
    else:
        (image if change == "an edited image" else image.with_name("mine.png")).write_bytes(b"mine")
    before = contents(tmp_path)
    with pytest.raises(DataError, match="already has train, which the demo of masked-image-modeling did not write"):
        write_demo("masked-image-modeling", tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["images/mine.png", "train.json", "validation/0001.png", "train.csv"])
def test_images_of_somebody_else_are_not_overwritten(tmp_path, name):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(DataError, match=f"already has {Path(name).parts[0]}, which.*new or empty"):
        write_demo("object-detection", tmp_path)
    assert contents(tmp_path) == {name: b"mine"}


def test_a_folder_that_cannot_be_written_leaves_nothing_half_done(tmp_path):
    files = {"train/a/1.png": b"1", f"train/a/{'x' * 300}.png": b"2"}
    with pytest.raises(OSError, match="too long"):
        place_files(tmp_path / "new", files, {"task": "a task"})
    assert toys.names_in(tmp_path / "new") == {"demo.json"}
    place_files(tmp_path / "new", {"train/a/1.png": b"1", "names.json": b"{}"}, {"task": "a task"})
    assert sorted(contents(tmp_path / "new")) == ["demo.json", "names.json", "train/a/1.png"]


def test_what_an_earlier_call_wrote_is_replaced_by_what_is_written_now(tmp_path):
    for files in ({"train/a.png": b"1", "train/b.png": b"2"}, {"train/a.png": b"3"}):
        place_files(tmp_path, files, {"task": "a task"})
        assert {name: content for name, content in contents(tmp_path).items() if name != "demo.json"} == files
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.json", "train"]


def test_another_process_makes_the_same_images_without_torch():
    # `loopwright.data` imports torch; an empty package stands in for it, so that what is imported here can be seen.
    code = f"""
import json, sys, types
parent = sys.modules["loopwright.data"] = types.ModuleType("loopwright.data")
parent.__path__ = [{str(PACKAGE.parent / "data")!r}]
from loopwright import demos
light = sorted({{"numpy", "PIL", "sklearn"}} & set(sys.modules))
from loopwright.demos.images.image_files import mask_folders
made = mask_folders(20)
print(json.dumps([light, "torch" in sys.modules, made.notes["fingerprint"], "id2label.json" in made.files]))
"""
    done = toys.python("-c", code, PYTHONHASHSEED="7")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], False, mask_folders(20).notes["fingerprint"], True]


def test_the_modules_of_images_import_numpy_and_nothing_heavier():
    files = sorted((PACKAGE / "images").glob("*.py"))
    assert len(files) >= 5 and toys.imported_by(files) == {"loopwright", "numpy"}
    assert set(SIZES) == {name for name, schema in SCHEMAS.items() if schema.has_images}


def test_without_scikit_learn_digits_are_drawn_on_gradients(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    found = load_parts()
    for split in ("train", "validation"):
        for scene in digit_scenes(found, split, 40):
            assert min(mask.sum() for mask in scene.masks) >= 20
    assert not any(
        np.array_equal(one, other) for one in found.backgrounds["train"] for other in found.backgrounds["validation"]
    )
    assert "Pillow's built-in font on color gradients" in found.source and "generated" in found.licence
    notes = json.loads(write_demo("image-classification", tmp_path)["notes"].read_text())
    assert notes["rows"] == {"train": 1437, "validation": 360}
    assert notes["source"] == "digits drawn with Pillow's built-in font"


def test_without_pillow_the_line_that_installs_it_is_reported_and_no_folder_made(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(InputError, match=r"demo data of images needs the package pillow\n.*pip install"):
        write_demo("object-detection", tmp_path / "new")
    assert list(tmp_path.iterdir()) == []


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes())


def write_fashion(folder: Path) -> dict[str, np.ndarray]:
    """Write four files as Debian's package has them, with a few images; return what is in them."""
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    arrays = {}
    for part, num in [("train", 30), ("t10k", 20)]:
        arrays[f"{part}-images-idx3-ubyte"] = rng.integers(0, 256, (num, 28, 28))
        arrays[f"{part}-labels-idx1-ubyte"] = np.arange(num) % 10
    for name, array in arrays.items():
        (folder / f"{name}.gz").write_bytes(idx(array))
    return arrays


def test_fashion_mnist_is_written_as_class_folders_in_the_place_of_the_usual_demo(tmp_path):
    arrays = write_fashion(tmp_path / "idx")
    usual = contents(write_demo("image-classification", tmp_path / "demo")["train"])
    paths = write_demo("image-classification", tmp_path / "demo", variant="fashion", source=tmp_path / "idx")
    assert len(contents(paths["train"])) == 30
    assert np.array_equal(read_png(paths["train"] / "sandal" / "0005.png"), arrays["train-images-idx3-ubyte"][5])
    assert np.array_equal(read_png(paths["validation"] / "bag" / "0048.png"), arrays["t10k-images-idx3-ubyte"][18])
    notes = json.loads(paths["notes"].read_text())
    assert notes["rows"] == {"train": 30, "validation": 20} and notes["variant"] == "fashion"
    assert notes["licence"] == "MIT" and len(notes["classes"]) == 10
    plan = preflight(SCHEMAS["image-classification"], data=tmp_path / "demo")
    assert sorted(plan.labels.names) == sorted(notes["classes"])
    assert contents(write_demo("image-classification", tmp_path / "demo")["train"]) == usual


def test_missing_and_damaged_files_of_fashion_mnist_are_named(tmp_path):
    with pytest.raises(DataError, match=r"has no train-images-idx3-ubyte\.gz.*dataset-fashion-mnist"):
        load_fashion(tmp_path)
    write_fashion(tmp_path)
    path = tmp_path / "t10k-labels-idx1-ubyte.gz"
    sound = path.read_bytes()
    for content, message in [
        (b"no gzip", "t10k-labels.*cannot be read.*Get the file again"),
        (sound[:-12], "cannot be read"),
        (gzip.compress(b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0"), "begins with 00 00 0d 01, expected 00 00 08"),
        (gzip.compress(b"\0"), "is not an IDX file"),
        (gzip.compress(gzip.decompress(sound) + b"\0"), r"holds 21 values; its header says \(20,\)"),
        (idx(np.zeros(19)), r"t10k images of the shape \(20, 28, 28\) and labels of the shape \(19,\)"),
        (idx(np.full(20, 10)), "a t10k label 10; expected 0 to 9"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=message):
            load_fashion(tmp_path)
    path.write_bytes(sound)
    assert read_idx(path).tolist() == [*range(10)] * 2


def test_wrong_variants_sources_and_tasks_are_reported_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match="image-classification has no variant 'fashon': expected 'fashion' or None"):
        write_demo("image-classification", tmp_path / "new", variant="fashon")
    with pytest.raises(ConfigError, match="object-detection has no variant 'fashion': expected None"):
        write_demo("object-detection", tmp_path / "new", variant="fashion")
    with pytest.raises(ConfigError, match="give variant too"):
        write_demo("image-classification", tmp_path / "new", source=tmp_path)
    with pytest.raises(DataError, match="object-detection instead of object-detectoin"):
        write_demo("object-detectoin", tmp_path / "new")
    with pytest.raises(DataError, match="made of images, not of rows: write_demo"):
        load_demo("object-detection")
    assert list(tmp_path.iterdir()) == []
