"""Images per second of fine-tuning on a GPU: the vision tasks against a hand-written loop over the same data and model.

    python benchmarks/vision.py                     both settings and all sides, written to results/vision.md
    python benchmarks/vision.py --cache off         images are decoded in each epoch

A ViT of the base size and a DETR on a small ResNet, from their configs with random weights, on generated scenes (JPEG
files, decoded and augmented in loader workers), in bf16. Each side runs in a process of its own: some updates to warm
up, then as many timed ones between two waits for the device. The hand-written loop has the same dataset, collate
function, workers, optimizer and precision.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

THIS_FILE = Path(__file__).resolve()
SOURCE = THIS_FILE.parents[1] / "src"
RESULTS = THIS_FILE.parent / "results" / "vision.md"
IMAGES, SIDE, WARM_UP, TIMED = 512, 320, 20, 60
SETTINGS = {
    "vit": ("image-classification", "ViT-base, 224 pixels, batch 32", 32, 224),
    "detr": ("object-detection", "DETR on a small ResNet, 320 pixels, batch 8", 8, 320),
}
SIDES = {"hand": "hand-written loop", "eager": "loopwright, eager", "auto": "loopwright, auto"}
COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "white": (240, 240, 240)}


def make_scenes(folder: Path) -> None:
    """Write scenes with coloured rectangles: as an image folder by the largest one's colour, and as a COCO file."""
    from PIL import Image

    rng = np.random.default_rng(0)
    names = list(COLORS)
    images, annotations = [], []
    (folder / "images").mkdir(parents=True)
    for number in range(IMAGES):
        pixels = rng.integers(0, 120, (SIDE, SIDE, 3), dtype=np.uint8)
        boxes = []
        for _ in range(int(rng.integers(1, 5))):
            width, height = (int(each) for each in rng.integers(40, 140, 2))
            left, top = int(rng.integers(0, SIDE - width)), int(rng.integers(0, SIDE - height))
            color = int(rng.integers(len(names)))
            pixels[top : top + height, left : left + width] = COLORS[names[color]]
            boxes.append((width * height, color, [left, top, width, height]))
        picture = Image.fromarray(pixels)
        largest = names[max(boxes)[1]]
        for split in ("train",) if number % 8 else ("validation",):
            place = folder / "classes" / split / largest
            place.mkdir(parents=True, exist_ok=True)
            picture.save(place / f"{number:04}.jpg", quality=90)
        picture.save(folder / "images" / f"{number:04}.jpg", quality=90)
        images.append({"id": number, "file_name": f"{number:04}.jpg", "width": SIDE, "height": SIDE})
        for area, color, box in boxes:
            annotations.append(
                {
                    "id": len(annotations),
                    "image_id": number,
                    "category_id": color,
                    "bbox": box,
                    "area": area,
                    "iscrowd": 0,
                }
            )
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    for split, is_train in (("train", True), ("validation", False)):
        kept = {image["id"] for image in images if bool(image["id"] % 8) == is_train}
        content = {
            "images": [image for image in images if image["id"] in kept],
            "annotations": [each for each in annotations if each["image_id"] in kept],
            "categories": categories,
        }
        (folder / f"{split}.json").write_text(json.dumps(content))


def make_model(name: str, folder: Path) -> None:
    """Write a model with random weights."""
    import transformers

    if name == "vit":
        transformers.ViTForImageClassification(transformers.ViTConfig(num_labels=4)).save_pretrained(folder)
        return
    backbone = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    config = transformers.DetrConfig(
        use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, backbone_config=backbone, num_labels=4,
        d_model=256, num_queries=50,
    )  # fmt: skip
    transformers.DetrForObjectDetection(config).save_pretrained(folder)


class Clock:
    """Takes the time of the updates after the warm-up."""

    def __init__(self) -> None:
        self.count, self.seconds, self.graphed = 0, 0.0, 0.0

    def tick(self) -> None:
        """Count an update."""
        self.count += 1
        if self.count in (WARM_UP, WARM_UP + TIMED):
            torch.cuda.synchronize()
            now = time.perf_counter()
            self.seconds = now if self.count == WARM_UP else now - self.seconds


def child(name: str, side: str, data: str, model: str, cache: str, output: str) -> None:
    """Measure one side; called in a process of its own."""
    from loopwright.callbacks import TrainerCallback
    from loopwright.runs.job import build_job, given_origin, load_data, make_optimizer, prepare_torch
    from loopwright.runs.settings import settle
    from loopwright.runs.trainer import TaskTrainer
    from loopwright.tasks import get_task
    from loopwright.tasks.data import RunData

    task_name, _, batch_size, image_size = SETTINGS[name]
    task = get_task(task_name)
    words = ["--data", data, "--model", model, "--batch", str(batch_size), "--image_size", str(image_size), "--bf16"]
    words += ["--cache", cache]
    settings = settle(task, [*words, "--workers", str(min(12, os.cpu_count() or 1))], None)
    plan = RunData(task.preflight(settings.args))
    prepare_torch(settings)
    job = build_job(task, plan, settings, given_origin(task, settings))
    load_data(job)
    clock = Clock()
    if side == "hand":
        hand_written(job, make_optimizer(job), batch_size, clock)
    else:

        class Ticks(TrainerCallback):
            def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
                clock.tick()

        trainer = TaskTrainer(job, make_optimizer(job), [Ticks()])
        trainer.train(
            job.train_dataset, num_epochs=1000, max_num_train_steps=WARM_UP + TIMED, per_device_batch_size=batch_size,
            train_dataloader_kwargs={"num_workers": job.args.workers, "drop_last": True}, collate_fn=job.collate_fn,
            mixed_precision="bf16", step_mode=side,
        )  # fmt: skip
        clock.graphed = trainer.num_graphed_updates / trainer.progress.update
    Path(output).write_text(json.dumps({"rate": batch_size * TIMED / clock.seconds, "graphed": clock.graphed}))


def hand_written(job: Any, optimizer: Any, batch_size: int, clock: Clock) -> None:
    """The loop of every tutorial, over the task's own dataset and model."""
    from torch.utils.data import DataLoader

    from loopwright.engine.nested import to_device

    device = torch.device("cuda")
    model = job.model.to(device).train()
    loader = DataLoader(
        job.train_dataset, batch_size, shuffle=True, num_workers=job.args.workers, collate_fn=job.collate_fn,
        pin_memory=True, persistent_workers=True, drop_last=True,
    )  # fmt: skip
    while True:
        for batch in loader:
            with torch.autocast("cuda", torch.bfloat16):
                loss, _ = job.task.compute_loss(job, model, to_device(batch, device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
            if clock.count == WARM_UP + TIMED:
                return


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--cache", default="auto", choices=("auto", "ram", "disk", "off"))
    parser.add_argument("--child", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    if not torch.cuda.is_available():
        sys.exit("vision.py measures a GPU, and there is none here")
    lines = [
        f"`python benchmarks/vision.py`: {torch.cuda.get_device_name()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, bf16, --cache {options.cache}.",
        "",
        "| model | side | images/s | over the hand-written loop | graphed |",
        "|---|---|--:|--:|--:|",
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_scenes(folder)
        for name in options.settings:
            make_model(name, folder / name)
            hand = None
            for side in options.sides:
                output = folder / "figure.json"
                output.unlink(missing_ok=True)
                data = folder / "classes" if name == "vit" else folder
                command = [sys.executable, str(THIS_FILE), "--child", name, side, str(data), str(folder / name)]
                command.append(options.cache)
                environment = os.environ | {
                    "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
                }
                done = subprocess.run(
                    [*command, str(output)], cwd=folder, env=environment, capture_output=True, text=True, check=False
                )
                title = SETTINGS[name][1]
                if not output.exists():
                    lines.append(
                        f"| {title} | {SIDES[side]} | {(done.stderr.strip().splitlines() or ['?'])[-1][:200]} | | |"
                    )
                    sys.stderr.write(done.stderr[-3000:])
                    continue
                figure = json.loads(output.read_text())
                hand = figure["rate"] if side == "hand" else hand
                ratio = "" if hand is None else f"{figure['rate'] / hand:.2f}"
                lines.append(
                    f"| {title} | {SIDES[side]} | {figure['rate']:.0f} | {ratio} | {100 * figure['graphed']:.0f} % |"
                )
    text = "\n".join(lines) + "\n"
    sys.stdout.write(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)


if __name__ == "__main__":
    main()
