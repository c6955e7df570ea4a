"""Images per second of training on a GPU, and the share of the time in which it waits for images.

    python benchmarks/vision.py                                   vit, ready and digits, written to results/vision.md
    python benchmarks/vision.py --settings vit --cache off        images are decoded in each epoch
    python benchmarks/vision.py --settings vit128 detr --timeout 200
    python benchmarks/vision.py --tiny --output /tmp/tiny.md      tiny models, on the CPU too: whether every side runs

vit, vit128: a ViT of the base size on JPEG files (generated scenes), decoded once and augmented each time, in loader
workers or in batches on the GPU. detr: a DETR on a small ResNet on the same scenes. ready: the ViT on float images in
memory, two workers, to see what the loader costs. digits: `lw demo image-classification`, whole.

All but digits are in bf16. Each side runs in a process of its own: updates to warm up, among them more than an epoch,
so that images are cached and graphs recorded; then as many timed ones between two waits for the device. The
hand-written loop has the same dataset, collate function, workers, optimizer and precision. Waiting is the time in which
the loop waits for the next batch.
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sides import preload, run_side

THIS_FILE = Path(__file__).resolve()
RESULTS = THIS_FILE.parent / "results" / "vision.md"
IMAGES, SIDE, READY, READY_SIDE = 1024, 320, 2560, 224
WARM_UP, TIMED, WORKERS = 45, 100, 12


class Setting(NamedTuple):
    """What is trained, and its sides in turn."""

    title: str
    model: str
    task: str
    batch: int
    side: int
    sides: tuple[str, ...]


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

ALL = ("auto", "hand", "eager")
ON_DEVICE = ("auto-device", "compile-device", "eager-device")
ON_READY = ("eager", "hand", "loader", "auto", "compile")
SETTINGS = {
    "vit": Setting("ViT-base, 224 pixels, batch 32", "vit", "image-classification", 32, 224, ON_DEVICE + ALL),
    "vit128": Setting("ViT-base, 224 pixels, batch 128", "vit", "image-classification", 128, 224, ON_DEVICE + ALL),
    "ready": Setting("ViT-base on ready tensors, batch 64", "vit", "", 64, READY_SIDE, ON_READY),
    "digits": Setting("the demo of digits, batch 64", "", "image-classification", 64, 8, ("demo", "demo-uncached")),
    "detr": Setting("DETR on a small ResNet, 320 pixels, batch 8", "detr", "object-detection", 8, 320, ALL),
}
SIDES = {
    "hand": "hand-written loop",
    "loader": "hand-written loop over loopwright's loader",
    "eager": "loopwright, eager",
    "auto": "loopwright, auto",
    "compile": "loopwright, compile",
    "eager-device": "loopwright, eager, augmented on the GPU",
    "auto-device": "loopwright, auto, augmented on the GPU",
    "compile-device": "loopwright, compile, augmented on the GPU",
    "demo": "lw demo",
    "demo-uncached": "lw demo --cache off",
}
COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 70, 220), "white": (240, 240, 240)}


def make_tiny() -> None:
    """Measure next to nothing; called in every process."""
    globals().update(IMAGES=96, SIDE=160, READY=512, WARM_UP=3, TIMED=3, WORKERS=2)


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


def make_model(name: str, folder: Path, is_tiny: bool) -> None:
    """Write a model with random weights, unless it is there."""
    import transformers

    if folder.exists():
        return
    if name == "vit":
        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
        config = transformers.ViTConfig(num_labels=4, **(small if is_tiny else {}))
        transformers.ViTForImageClassification(config).save_pretrained(folder)
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
    """Takes the time of the updates after the warm-up, and the time in which they waited for data."""

    def __init__(self, waited: Callable[[], float]) -> None:
        self._waited = waited
        self.count = 0
        self.seconds = self.wait = 0.0

    @property
    def is_done(self) -> bool:
        return self.count >= WARM_UP + TIMED

    def tick(self) -> None:
        """Count an update."""
        self.count += 1
        if self.count in (WARM_UP, WARM_UP + TIMED):
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            now, sign = (time.perf_counter(), self._waited()), -1 if self.count == WARM_UP else 1
            self.seconds += sign * now[0]
            self.wait += sign * now[1]

    def figure(self, batch: int, graphed: float = 0.0) -> dict[str, float]:
        """Return what is written for a side."""
        return {
            "rate": batch * TIMED / self.seconds,
            "milliseconds": 1e3 * self.seconds / TIMED,
            "wait": self.wait / self.seconds,
            "graphed": graphed,
        }


class Waiting:
    """Counts the seconds in which the batches of a loader are waited for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def over(self, batches: Any) -> Iterator[Any]:
        """Yield the batches."""
        batches = iter(batches)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.seconds += time.perf_counter() - start
            if batch is None:
                return
            yield batch


def trained(
    trainer: Any, dataset: Any, clock: Clock, batch_size: int, step_mode: str, workers: int, **options: Any
) -> Any:
    """Train until the clock is done; return the figure."""
    trainer.train(
        dataset, num_epochs=1000, max_num_train_steps=WARM_UP + TIMED, per_device_batch_size=batch_size,
        train_dataloader_kwargs={"num_workers": workers, "drop_last": True},
        mixed_precision="bf16", step_mode=step_mode, **options,
    )  # fmt: skip
    return clock.figure(batch_size, trainer.num_graphed_updates / trainer.progress.update)


def ticking(holder: list[Clock]) -> Any:
    """Return a callback that counts updates with the clock in a list, which is put there later."""
    from loopwright.callbacks import TrainerCallback

    class Ticks(TrainerCallback):
        def on_update_end(self, trainer: Any, **kwargs: Any) -> None:
            holder[0].tick()

    return Ticks()


def by_hand(loaders: Iterator[Any], compute: Callable[[Any], Any], optimizer: Any, batch_size: int) -> Any:
    """The loop of every tutorial, over the loaders of the epochs; return the figure."""
    waiting = Waiting()
    clock = Clock(lambda: waiting.seconds)
    for batches in loaders:
        for batch in waiting.over(batches):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = compute(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            clock.tick()
            if clock.is_done:
                return clock.figure(batch_size)
    raise AssertionError("there are epochs without end")


def measure_task(setting: Setting, side: str, data: str, model: str, cache: str) -> Any:
    """Train a task on files."""
    from itertools import repeat

    from torch.utils.data import DataLoader

    from loopwright.engine.nested import to_device
    from loopwright.runs.job import build_job, given_origin, load_data, make_optimizer, prepare_torch
    from loopwright.runs.settings import settle
    from loopwright.runs.trainer import TaskTrainer
    from loopwright.tasks import get_task
    from loopwright.tasks.data import RunData

    task = get_task(setting.task)
    mode, _, where = side.partition("-")
    words = ["--data", data, "--model", model, "--batch", str(setting.batch), "--image_size", str(setting.side)]
    words += ["--bf16", "--cache", cache, "--augment_on", (where and DEVICE.type == "cuda" and "device") or "cpu"]
    settings = settle(task, [*words, "--workers", str(min(WORKERS, os.cpu_count() or 1))], None)
    plan = RunData(task.preflight(settings.args))
    prepare_torch(settings)
    job = build_job(task, plan, settings, given_origin(task, settings))
    load_data(job)
    optimizer = make_optimizer(job)
    if side != "hand":
        clocks: list[Clock] = []
        trainer = TaskTrainer(job, optimizer, [ticking(clocks)])
        clocks.append(Clock(lambda: trainer.data_wait_seconds))
        workers = job.args.workers
        return trained(trainer, job.train_dataset, clocks[0], setting.batch, mode, workers, collate_fn=job.collate_fn)
    net = job.model.to(DEVICE).train()
    loader = DataLoader(
        job.train_dataset, setting.batch, shuffle=True, num_workers=job.args.workers, collate_fn=job.collate_fn,
        pin_memory=True, persistent_workers=True, drop_last=True,
    )  # fmt: skip
    return by_hand(
        repeat(loader), lambda batch: task.compute_loss(job, net, to_device(batch, DEVICE))[0], optimizer, setting.batch
    )


class Logits(torch.nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Any) -> Any:
        return self.model(pixels).logits


def measure_ready(setting: Setting, side: str, model: str) -> Any:
    """Train on float images in memory, with two loader workers."""
    from itertools import count, repeat

    import transformers
    from torch.utils.data import DataLoader, TensorDataset

    from loopwright import Trainer
    from loopwright.data import Share, adopt

    device, criterion = DEVICE, torch.nn.CrossEntropyLoss()
    images = torch.randn(256, 3, setting.side, setting.side).repeat(READY // 256, 1, 1, 1)
    dataset = TensorDataset(images, torch.randint(0, 4, (READY,)))
    net = Logits(transformers.ViTForImageClassification.from_pretrained(model)).to(device).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5)
    if side in ("eager", "auto", "compile"):
        clocks: list[Clock] = []
        trainer = Trainer(net, criterion, optimizer, callbacks=[ticking(clocks)])
        clocks.append(Clock(lambda: trainer.data_wait_seconds))
        return trained(trainer, dataset, clocks[0], setting.batch, side, 2)
    options: Any = {"shuffle": True, "num_workers": 2, "pin_memory": True, "persistent_workers": True}
    loader: Any = DataLoader(dataset, setting.batch, drop_last=True, **options)
    loaders: Iterator[Any] = repeat(loader)
    if side == "loader":
        loader = adopt(loader, seed=0, share=Share(), device=torch.device("cpu"))
        loaders = (window_batches(loader, epoch) for epoch in count())

    def compute(batch: Any) -> Any:
        pixels, labels = (each.to(device, non_blocking=True) for each in batch)
        return criterion(net(pixels), labels)

    return by_hand(loaders, compute, optimizer, setting.batch)


def window_batches(loader: Any, epoch: int) -> Iterator[Any]:
    """Yield the batches of an epoch of one of loopwright's loaders, as they were read."""
    for window in loader.windows(epoch):
        for piece in window.pieces:
            yield piece.batch


def measure_demo(side: str, folder: Path) -> Any:
    """Run the demo as a user does; its records have the seconds of training and of waiting."""
    environment = os.environ | {"LOOPWRIGHT_RUNS": str(folder / side)}
    flags = ["--cache", "off"] if side == "demo-uncached" else []
    flags += ["--max_steps", "5"] if WARM_UP < 10 else []
    command = [sys.executable, "-m", "loopwright", "demo", "image-classification", *flags]
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
    (file,) = (folder / side).rglob("metrics.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    updates = max(record.get("update", 0) for record in records)
    graphed = sum(record.get("graphed_updates", 0) for record in records)
    last = [record for record in records if record["event"] == "speed"][-1]
    seconds = last["train_seconds"] + last["wait_seconds"]
    return {
        "rate": updates * SETTINGS["digits"].batch / seconds,
        "milliseconds": 1e3 * seconds / updates,
        "wait": last["wait_seconds"] / seconds,
        "graphed": graphed / updates,
    }


def child(name: str, side: str, folder: str, cache: str, is_tiny: bool) -> Any:
    """Measure one side; called in a process of its own."""
    if is_tiny:
        make_tiny()
    setting, place = SETTINGS[name], Path(folder)
    if name == "digits":
        return measure_demo(side, place)
    if name == "ready":
        return measure_ready(setting, side, str(place / setting.model))
    data = place if name == "detr" else place / "classes"
    return measure_task(setting, side, str(data), str(place / setting.model), cache)


def row(title: str, side: str, figure: dict[str, Any] | str, base: Any) -> str:
    """Return a line of the table; `base` is the figure of the hand-written loop, if there is one."""
    if isinstance(figure, str):
        return f"| {title} | {SIDES[side]} | {figure} | | | | |"
    ratio = f"{figure['rate'] / base['rate']:.2f}" if isinstance(base, dict) else ""
    return (
        f"| {title} | {SIDES[side]} | {figure['rate']:,.0f} | {figure['milliseconds']:.2f} | {ratio} | "
        f"{figure['wait']:.0%} | {figure['graphed']:.0%} |"
    )


def main() -> None:
    """Measure, print and write the table; it is written again after each side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["vit", "ready", "digits"], choices=SETTINGS)
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="only these")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--cache", default="auto", choices=("auto", "ram", "disk", "off"))
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each side (default 120)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on the CPU too: whether every side runs")
    options = parser.parse_args()
    preload("transformers.models.vit.modeling_vit", "loopwright.runs.trainer")
    if options.tiny:
        make_tiny()
    elif not torch.cuda.is_available():
        sys.exit("vision.py measures a GPU, and there is none here; --tiny shows whether every side runs")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    lines = [
        f"`python benchmarks/vision.py --settings {' '.join(options.settings)}`: {name}, torch "
        f"{torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores, --cache {options.cache}; "
        f"all but digits in bf16.",
        "",
        "| model | side | images/s | ms per update | over the hand-written loop | waits for data | graphed |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        if set(options.settings) & {"vit", "vit128", "detr"}:
            make_scenes(folder)
        for name in options.settings:
            setting, figures = SETTINGS[name], {}
            if setting.model:
                make_model(setting.model, folder / setting.model, options.tiny)
            for side in [each for each in options.sides or setting.sides if each in setting.sides]:
                arguments = (name, side, str(folder), options.cache, options.tiny)
                figures[side] = run_side(child, *arguments, timeout=options.timeout)
                rows = [row(setting.title, each, found, figures.get("hand")) for each, found in figures.items()]
                print(rows[-1], flush=True)
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text("\n".join([*lines, *rows]) + "\n")
            lines += rows


if __name__ == "__main__":
    main()
