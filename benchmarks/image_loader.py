"""What loopwright's loader adds to reading images: images per second through it and through torch's DataLoader.

2,000 JPEGs of 256 to 400 pixels are written, then decoded, cut, flipped, jittered and normalized to 224 x 224 by one
`ImageDataset`, once through `loopwright.data.adopt` and once through a plain DataLoader, with 0, 1 and 2 workers. The
two sides take turns in one process; a ratio is taken within each round, and the table shows the median over the rounds.
With `--clock cpu` processor time is measured in place of wall time, that of the workers included: for a machine that is
not idle. Beside a plain DataLoader ours computes the order of the epoch and seeds the generators for each batch.

With `--cached` a second table has images that are decoded already: augmented by the workers, only drawn and cut by them
for a device that augments in batches (without its work), and 8 x 8 pixels without augmentation, which are gathered.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import torch
from PIL import Image
from torch.utils.data import DataLoader

SOURCE = Path(__file__).resolve().parents[1] / "src"
sys.path.insert(0, str(SOURCE))  # the package of this checkout, whichever is installed

from loopwright.data import Share, adopt  # noqa: E402
from loopwright.data.images import (  # noqa: E402
    CacheChoice,
    ImageDataset,
    PixelCache,
    SceneFeatures,
    classification_eval,
    classification_train,
    collate_images,
    fixed_part,
    load_scene,
)

SIZE, LEAST_SIDE, LARGEST_SIDE = 224, 256, 400
RATIO_LIMIT = 1.05
SIDES = ("torch DataLoader", "loopwright")

Samples = dict[tuple[str, int], list[float]]


def write_images(folder: Path, num_images: int) -> list[dict[str, Any]]:
    """Write JPEGs that are about as hard to decode as photos, and return their rows."""
    rng = np.random.default_rng(0)
    rows = []
    for index in range(num_images):
        height, width = (int(side) for side in rng.integers(LEAST_SIDE, LARGEST_SIDE + 1, 2))
        coarse = rng.integers(0, 256, (height // 16, width // 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)).astype(np.int16)
        noisy = smooth + rng.integers(-12, 13, (height, width, 1), dtype=np.int16)
        path = folder / f"{index:05}.jpg"
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=85)
        rows.append({"image": str(path), "label": index % 10})
    return rows


def now(clock: str) -> float:
    """Seconds on a clock; that of the processor counts workers that have ended."""
    if clock == "wall":
        return time.perf_counter()
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def seconds_for(side: str, dataset: ImageDataset, arguments: argparse.Namespace, num_workers: int, epoch: int) -> float:
    """Read an epoch, and return what it took, the start and the end of the workers included."""
    options = {"batch_size": arguments.batch_size, "num_workers": num_workers, "collate_fn": collate_images}
    loader: Any = DataLoader(dataset, shuffle=True, **options)
    if side == "loopwright":
        loader = adopt(loader, seed=0, share=Share(), device=torch.device("cpu"))
        loader.set_epoch(epoch)
    else:
        torch.manual_seed(epoch)
    start = now(arguments.clock)
    num_images = sum(len(batch["position"]) for batch in loader)
    seconds = now(arguments.clock) - start
    assert num_images == len(dataset)
    return seconds


def measure(dataset: ImageDataset, arguments: argparse.Namespace) -> Samples:
    """Seconds of each epoch, by side and workers."""
    samples: Samples = defaultdict(list)
    for number in range(arguments.rounds + 1):
        for num_workers in arguments.workers:
            for side in SIDES if number % 2 else reversed(SIDES):
                seconds = seconds_for(side, dataset, arguments, num_workers, number)
                if number:  # the first round is for the page cache
                    samples[side, num_workers].append(seconds)
        if number:
            print(f"round {number}/{arguments.rounds}", file=sys.stderr)
    return samples


def make_report(samples: Samples, workers: list[int], num_images: int, clock: str) -> tuple[list[str], list[str]]:
    """The lines of the table, and which rows missed the target."""
    lines = [
        "| workers | torch, images/s per worker | loopwright, images/s per worker | ratio | min .. max | target |",
        "|--:|--:|--:|--:|--:|---|",
    ]
    missed = []
    for num_workers in workers:
        theirs, ours = (samples[side, num_workers] for side in SIDES)
        ratios = [own / other for own, other in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ratios)
        sharers = max(1, num_workers) if clock == "wall" else 1  # processor time is a sum over the workers already
        cells = [f"{num_images / statistics.median(seconds) / sharers:,.0f}" for seconds in (theirs, ours)]
        if ratio > RATIO_LIMIT:
            missed.append(f"{num_workers} workers")
        target = f"<= {RATIO_LIMIT}: {'MISSED' if ratio > RATIO_LIMIT else 'met'}"
        spread = f"{min(ratios):.3f} .. {max(ratios):.3f}"
        lines.append(f"| {num_workers} | {' | '.join(cells)} | {ratio:.3f} | {spread} | {target} |")
    return lines, missed


def measure_cached(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[str]:
    """The lines of a table with images per second of epochs of cached images, by kind and workers."""
    kinds = {
        f"{SIZE} x {SIZE}, augmented by the workers": (classification_train(SIZE), False),
        f"{SIZE} x {SIZE}, for a device that augments": (classification_train(SIZE), True),
        "8 x 8, without augmentation": (classification_eval(8), False),
    }
    lines = ["| cached images | workers | images/s, median | min .. max |", "|---|--:|--:|--:|"]
    for title, (transform, is_on_device) in kinds.items():
        dataset = ImageDataset(rows, load_scene, transform, SceneFeatures())
        dataset.keep(
            PixelCache(len(rows), CacheChoice("ram", "", len(rows) * LARGEST_SIDE**2 * 3)), fixed_part(transform)
        )
        dataset.sends_bytes = True  # as on a GPU
        if is_on_device:
            dataset.augment_on_device()
        dataset.warm()
        for num_workers in arguments.workers:
            options = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
            source: Any = DataLoader(dataset, arguments.batch_size, shuffle=True, collate_fn=collate_images, **options)
            loader = adopt(source, seed=0, share=Share(), device=torch.device("cpu"))
            rates = []
            for epoch in range(arguments.rounds + 1):
                start = time.perf_counter()
                num_images = sum(window.samples for window in loader.windows(epoch))
                rates.append(num_images / (time.perf_counter() - start))
            loader.close()
            rates = rates[1:]  # the first epoch starts the workers
            spread = f"{min(rates):,.0f} .. {max(rates):,.0f}"
            lines.append(f"| {title} | {num_workers} | {statistics.median(rates):,.0f} | {spread} |")
    return lines


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Images per second through loopwright's loader and torch's")
    parser.add_argument("--images", type=int, default=2000, help="how many are written (default 2,000)")
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each side and number of workers (default 5)")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2], help="numbers of workers (default 0 1 2)")
    parser.add_argument("--batch-size", type=int, default=32, help="of both sides (default 32)")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="what is measured (default wall)")
    parser.add_argument("--folder", type=Path, help="where the images are written (default: a temporary folder)")
    parser.add_argument("--output", type=Path, help="also write the report to this file")
    parser.add_argument("--cached", action="store_true", help="also measure images that are decoded already")
    parser.add_argument("--check", action="store_true", help="exit 1 when the target is missed")
    return parser.parse_args()


def main() -> int:
    """Measure, print the table, and judge it with --check."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]  # before the measurements add to it
    with tempfile.TemporaryDirectory(prefix="loopwright-images-", dir=arguments.folder) as folder:
        rows = write_images(Path(folder), arguments.images)
        dataset = ImageDataset(rows, load_scene, classification_train(SIZE), SceneFeatures())
        samples = measure(dataset, arguments)
        cached = ["", *measure_cached(rows, arguments)] if arguments.cached else []
    table, missed = make_report(samples, arguments.workers, arguments.images, arguments.clock)
    settings = f"{arguments.images:,} JPEGs of {LEAST_SIDE} to {LARGEST_SIDE} pixels to {SIZE} x {SIZE}, "
    settings += f"batches of {arguments.batch_size}, {arguments.rounds} rounds, {arguments.clock} time"
    machine = f"Python {platform.python_version()}, torch {torch.__version__}, Pillow {PIL.__version__}, "
    machine += f"{platform.platform()}, {os.cpu_count()} cores, load at start {load:.1f}"
    lines = [f"`python {' '.join(sys.argv)}`: {settings}. {machine}.", "", *table, *cached]
    print("\n".join(lines))
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")
    print("".join(f"target missed: {title}\n" for title in missed), end="", file=sys.stderr)
    return 1 if arguments.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
