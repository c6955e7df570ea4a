"""Keep your own training loop, and lose nothing when it is killed: it resumes exactly where it was.

Run it with `python examples/own_loop.py` and a folder: `--run FOLDER`. Kill it at any moment and start it again with
the same folder: it ends with the same weights and the same metrics.jsonl as a run that was never killed.
"""

import argparse
import hashlib
import random
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from loopwright.checkpoint import Checkpointing, ResumableState
from loopwright.data import Share, adopt
from loopwright.engine.seeding import seed_torch
from loopwright.keys import forward_key
from loopwright.progress import Progress
from loopwright.run_folder import Lease, MetricsLog, read_metrics

NUM_EPOCHS, SEED = 3, 0
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Waves(Dataset):
    """Waves of one of four frequencies, each time with a new phase and new noise."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        angle = torch.linspace(0, 6.28, 64) * (index % 4 + 1) + random.uniform(0, 6.28)
        return angle.sin() + torch.randn(64), index % 4


def main(run):
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 4)).to(DEVICE)
    loader = adopt(DataLoader(Waves(), 16, shuffle=True), seed=SEED, share=Share(accumulation=2), device=DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS * loader.num_updates)
    progress = Progress()  # epochs and updates done, and samples of the current epoch
    saving = Checkpointing(run / "checkpoints", every_updates=10)
    with (
        Lease(run) as lease,
        MetricsLog(run / "metrics.jsonl") as metrics,
        ResumableState(saving, model, lease=lease, optimizer=optimizer, schedule=schedule, progress=progress) as state,
    ):
        values = state.restore() or {"metrics_end": 0}
        metrics.cut_back(values["metrics_end"])
        while progress.epoch < NUM_EPOCHS:
            for window in loader.windows(progress.epoch, progress.samples):  # the micro-batches of one update
                loss = 0.0
                for piece in window.pieces:
                    inputs, targets = (tensor.to(DEVICE) for tensor in piece.batch)
                    seed_torch(forward_key(piece.key), DEVICE)  # dropout follows from the position
                    part = nn.functional.cross_entropy(model(inputs), targets) * (piece.rows / window.samples)
                    part.backward()
                    loss += part.item()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                progress.advance(len(window.pieces), window.samples)
                metrics.append({"epoch": progress.epoch, "update": progress.update, "loss": loss})
                if state.is_due(progress.update):
                    state.save(progress.update, {"metrics_end": metrics.sync()})
            progress.end_epoch()
        state.save(progress.update, {"metrics_end": metrics.sync()}, wait=True)
    last = list(read_metrics(run / "metrics.jsonl"))[-1]
    weights = b"".join(weight.numpy(force=True).tobytes() for weight in model.state_dict().values())
    print(f"loss {last['loss']:.6f} after {last['update']} updates, weights {hashlib.sha256(weights).hexdigest()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", type=Path, required=True, metavar="FOLDER", help="where the run is kept")
    main(parser.parse_args().run)
