"""Detected objects: in pixels of the files, serialised, matched with the truth, and drawn.

`found_objects` returns the same dicts for the small detector, for transformers models, and for a user's module with
its own `decode`. Masks in pixels of files are run-length encoded: many masks of a large photo would not fit into
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopwright.metrics.base import extra_module
from loopwright.run_folder.files import read_json_lines

if TYPE_CHECKING:
    from loopwright.data.images import Scene

Found = dict[str, Any]
"""Objects of an image: boxes (n, 4), classes, scores or crowd, and masks: (n, height, width), or n run lengths."""

_SAME = 0.5  # minimum overlap of a hit, for precision and recall
_CORNER_TO_SIZE = np.array([[1, 0, -1, 0], [0, 1, 0, -1], [0, 0, 1, 0], [0, 0, 0, 1]], np.float64)


def decoder_of(model: Any) -> Callable[..., list[Found]] | None:
    found: Callable[..., list[Found]] | None = getattr(model, "decode", None)
    return found or getattr(getattr(model, "module", None), "decode", None)


def found_objects(
    model: Any, processor: Any, outputs: Any, size: tuple[int, int], threshold: float, most: int
) -> list[Found]:
    """Return the objects that a model found, in pixels of its input."""
    import torch

    decode = decoder_of(model)
    if decode is not None:
        raw = decode(outputs, threshold, most)
    elif hasattr(outputs, "masks_queries_logits"):
        raw = masks_of_queries(outputs, size, threshold, most)
    else:
        sizes = [size] * outputs.logits.shape[0]
        raw = processor.post_process_object_detection(outputs, threshold=threshold, target_sizes=sizes)
        raw = [{**each, "classes": each["labels"]} for each in raw]
    found = []
    for each in raw:
        names = [name for name in ("boxes", "scores", "classes", "masks") if name in each]
        tensors = {name: torch.as_tensor(each[name]).detach().cpu() for name in names}
        # numpy has no bfloat16.
        arrays: Found = {
            name: (one.float() if one.is_floating_point() else one).numpy() for name, one in tensors.items()
        }
        order = np.argsort(-arrays["scores"], kind="stable")
        is_finite = np.isfinite(arrays["scores"]) & np.isfinite(arrays["boxes"]).all(axis=1)
        found.append(taken(arrays, order[is_finite[order]][:most]))
    return found


def masks_of_queries(outputs: Any, size: tuple[int, int], threshold: float, most: int) -> list[dict[str, Any]]:
    """Return the objects of a model whose queries each have a class and a mask (MaskFormer and its kind).

    A score is the class score times the mean of the mask where it is on.
    """
    from torch.nn import functional

    from loopwright.data.images import boxes_of_masks

    results = []
    for scores, masks in zip(outputs.class_queries_logits, outputs.masks_queries_logits, strict=True):
        chances = scores.float().softmax(-1)[:, :-1]
        best, places = chances.flatten().topk(min(most, chances.numel()))
        queries, classes = places // chances.shape[1], places % chances.shape[1]
        chosen = masks[queries][None].float()
        logits = functional.interpolate(chosen, size=size, mode="bilinear", align_corners=False)[0]
        is_on = logits > 0
        area = is_on.flatten(1).sum(1)
        sureness = (logits.sigmoid() * is_on).flatten(1).sum(1) / area.clamp(min=1)
        total = best * sureness
        kept = (total >= threshold) & (area > 0)
        boxes = best.new_tensor(boxes_of_masks(is_on[kept].cpu().numpy()).reshape(-1, 4))
        results.append({"boxes": boxes, "scores": total[kept], "classes": classes[kept], "masks": is_on[kept]})
    return results


def reference_of(scene: Scene) -> dict[str, Found]:
    """Return the objects of a scene as its "reference", masks as run lengths; empty if none are known."""
    if scene.boxes is None:
        return {}
    objects: Found = {"boxes": scene.boxes, "classes": scene.classes}
    objects["crowd"] = np.zeros(len(scene.boxes), dtype=bool) if scene.crowd is None else scene.crowd
    if scene.masks is not None:
        objects["masks"] = [run_lengths(mask) for mask in scene.masks]
    return {"reference": objects}


def seen_objects(labels: Mapping[str, Any], size: tuple[int, int]) -> Found:
    """Return the targets of an image as objects, in pixels of the model's input, masks as run lengths."""
    height, width = size
    shares = labels["boxes"].cpu().numpy() * np.array([width, height, width, height], np.float32)
    boxes = np.concatenate([shares[:, :2] - shares[:, 2:] / 2, shares[:, :2] + shares[:, 2:] / 2], axis=1)
    objects: Found = {"boxes": boxes, "classes": labels["class_labels"].cpu().numpy()}
    objects["crowd"] = np.zeros(len(boxes), dtype=bool)
    if "masks" in labels:
        objects["masks"] = [run_lengths(mask) for mask in labels["masks"].cpu().numpy()]
    return objects


def in_file(found: Found, matrix: NDArray[Any], size: tuple[int, int]) -> Found:
    """Map objects from the square back to the pixels of the file, by the matrix from the file to the square."""
    import torch
    from torch.nn import functional

    from loopwright.data.images import moved_boxes

    height, width = size
    boxes = moved_boxes(found["boxes"].astype(np.float32).reshape(-1, 4), np.linalg.inv(matrix))
    moved = {**found, "boxes": boxes.clip(0, np.array([width, height, width, height], dtype=np.float32))}
    if "masks" in found:
        rows, columns = max(1, round(height * float(matrix[1, 1]))), max(1, round(width * float(matrix[0, 0])))
        moved["masks"] = []
        for mask in found["masks"]:
            inner = mask[:rows, :columns]
            if inner.shape != size:
                shares = torch.from_numpy(np.ascontiguousarray(inner)).float()[None, None]
                inner = functional.interpolate(shares, size=size, mode="bilinear", align_corners=False)[0, 0].numpy()
            moved["masks"].append(run_lengths(inner > 0.5))
    return moved


def taken(found: Found, which: Any) -> Found:
    numbers = np.arange(len(found["boxes"]))[which]
    return {
        name: [values[number] for number in numbers] if isinstance(values, list) else values[numbers]
        for name, values in found.items()
    }


def plain(objects: Found) -> list[dict[str, Any]]:
    """Return objects as files have them: label number, score, box, mask as run lengths; floats are exact."""
    boxes = np.asarray(objects["boxes"], np.float32).reshape(-1, 4)
    listed: list[dict[str, Any]] = [{"label": int(number)} for number in objects["classes"]]
    for index, each in enumerate(listed):
        if "scores" in objects:
            each["score"] = float(str(np.float32(objects["scores"][index])))
        each["box"] = [float(str(edge)) for edge in boxes[index]]
        if "masks" in objects:
            each["mask"] = objects["masks"][index]
        if "crowd" in objects and objects["crowd"][index]:
            each["crowd"] = True
    return listed


def arrays_of(listed: Sequence[Mapping[str, Any]], numbers: Mapping[str, int]) -> Found:
    """Return the objects of a list that `plain` and `named` made."""
    objects: Found = {
        "boxes": np.array([each["box"] for each in listed], np.float32).reshape(-1, 4),
        "classes": np.array([numbers[each["label"]] for each in listed], np.int64),
        "scores": np.array([each.get("score", 0.0) for each in listed], np.float32),
        "crowd": np.array([each.get("crowd", False) for each in listed], bool),
    }
    return objects | {"masks": [each.get("mask") for each in listed]}


def rounded(listed: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**each, "score": round(each["score"], 4), "box": [round(edge, 2) for edge in each["box"]]} for each in listed
    ]


def named(listed: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    return [{**each, "label": names[each["label"]]} for each in listed]


def mask_tools() -> Any:
    return extra_module("faster_coco_eval", "faster-coco-eval", "coco_ap", extra="vision").mask


def run_lengths(mask: NDArray[Any]) -> dict[str, Any]:
    counts = mask_tools().encode(np.asfortranarray(mask.astype(np.uint8)))["counts"]
    text = counts.decode() if isinstance(counts, bytes) else counts
    return {"size": [int(side) for side in mask.shape], "counts": text}


def count_hits(found: Found, reference: Found) -> dict[str, list[int]]:
    """Return for each class the number of hits, false positives and misses.

    A hit overlaps a true object of its class, not taken by a surer one, by at least half: by mask if there are masks,
    else by box. Crowds are never missed, and an object that lies in one by half is not a false positive.
    """
    counts: dict[str, list[int]] = {}
    single = ~reference["crowd"]
    for number in sorted({*map(int, found["classes"]), *map(int, reference["classes"][single])}):
        is_class = reference["classes"] == number
        theirs, ours = taken(found, found["classes"] == number), taken(reference, is_class & single)
        in_crowd = overlap(theirs, taken(reference, is_class & ~single)).max(axis=1, initial=0.0) >= _SAME
        free = np.ones(len(ours["boxes"]), dtype=bool)
        hits = wrong = 0
        for row, is_harmless in zip(overlap(theirs, ours), in_crowd, strict=True):
            row = np.where(free, row, 0.0)
            if row.size and row.max() >= _SAME:
                free[int(row.argmax())] = False
                hits += 1
            else:
                wrong += not is_harmless
        counts[str(number)] = [hits, wrong, len(free) - hits]
    return counts


def overlap(found: Found, reference: Found) -> NDArray[np.float64]:
    """Return the IoU of each found object with each true one, by mask or else by box; for a crowd, the share inside."""
    shape = len(found["boxes"]), len(reference["boxes"])
    if not all(shape):
        return np.zeros(shape)
    if "masks" in reference:
        sides = [found["masks"], reference["masks"]]
    else:  # COCO has left, top, width, height
        sides = [np.asarray(side["boxes"], np.float64) @ _CORNER_TO_SIZE for side in (found, reference)]
    return np.asarray(mask_tools().iou(*sides, reference["crowd"].astype(int).tolist()))


def f1_of(counts: Mapping[str, Sequence[int]]) -> float:
    """Return 2 hits / (2 hits + wrong + missed) over all classes; 1 if there is nothing to find and nothing found."""
    hits, wrong, missed = (sum(column) for column in zip(*counts.values(), strict=True)) if counts else (0, 0, 0)
    return 2 * hits / (2 * hits + wrong + missed) if hits + wrong + missed else 1.0


def class_table(predictions: Path, names: Sequence[str], metric: Any) -> list[dict[str, Any]]:
    """Return average precision, and at the threshold precision, recall and counts, of each class; None if undefined."""
    numbers = {name: number for number, name in enumerate(names)}
    totals = np.zeros((len(names), 3), dtype=int)
    for sample in read_json_lines(predictions):
        for name, counts in sample["counts"].items():
            totals[numbers[name]] += counts
        sides = [[arrays_of(sample[side], numbers)] for side in ("objects", "truth")]
        metric.add_batch(predictions=sides[0], references=sides[1], positions=[sample["position"]])
    precisions = {row["label"]: row for row in metric.table()} if metric.num_samples else {}
    table = []
    for name, (hits, wrong, missed) in zip(names, totals.tolist(), strict=True):
        row = {"label": name, **{key: value for key, value in precisions.get(name, {}).items() if "map" in key}}
        row["precision"] = hits / (hits + wrong) if hits + wrong else None
        row["recall"] = hits / (hits + missed) if hits + missed else None
        table.append({**row, "found": hits + wrong, "there": hits + missed})
    return table


def draw_objects(
    image: Any, objects: Mapping[str, Any], names: Sequence[str], scores: Any = None, most: int | None = None
) -> Any:
    """Return an image with its objects, in the colours of their classes; `most` limits its longest side."""
    from loopwright.data.pictures import color_of, draw_boxes, draw_masks, drawable_names
    from loopwright.data.pictures.canvas import as_image

    picture, masks = as_image(image), objects.get("masks")
    share = min(1.0, (most or max(picture.size)) / max(picture.size))
    picture = picture.resize([max(1, round(side * share)) for side in picture.size]) if share < 1 else picture
    colors = [color_of(int(number)) for number in objects["classes"]]
    # The surest come first, and are drawn last.
    for index, mask in reversed(list(enumerate(() if masks is None else masks))):
        pixels = mask_tools().decode(mask) if isinstance(mask, Mapping) else np.asarray(mask)
        rows, columns = (np.arange(new) * old // new for new, old in zip(picture.size[::-1], pixels.shape, strict=True))
        picture = draw_masks(picture, pixels[rows][:, columns].astype(bool)[None], [colors[index]])
    shown = drawable_names(names)
    titles = [shown[int(number)] for number in objects["classes"]]
    return draw_boxes(picture, np.asarray(objects["boxes"]) * share, titles, scores, colors)
