"""A task of your own in one file: tabular regression, a number for a row of numbers, such as the rent of a flat.

Run it with `python examples/own_task.py`. With this entry point of your package every verb of `lw` knows the task too:

    [project.entry-points."loopwright.tasks"]
    tabular-regression = "own_task:TabularRegression"
"""

import os
import tempfile
from dataclasses import dataclass

import numpy as np

import loopwright
from loopwright.baselines import MeanValue
from loopwright.demos import DemoData, write_demo
from loopwright.metrics import load
from loopwright.sources import Role
from loopwright.tasks import Job, MetricScorer, RowDataset, Task, TaskArguments, flag, samples_of, score_baselines


@dataclass
class TabularArguments(TaskArguments):
    features_column: str | None = flag(None, "Columns of the numbers to predict from, with commas between them.")
    target_column: str | None = flag(None, "Column of the number to predict.")


class TabularRegression(Task):
    name, summary = "tabular-regression", "a number for a row of numbers"
    roles = (Role("features", "texts", names=("x*",)), Role("target", "float", names=("y", "rent"), is_input=False))
    example = "lw train tabular-regression --data flats.csv --features_column area,age --target_column rent"
    arguments, needs = TabularArguments, {}  # it needs no package beside torch
    demo = {"features_column": "area,age", "epochs": 10, "lr": 0.05, "batch": 16}
    demo_note = "the rent of a flat by its area and age: mean absolute error 0.3 (mean rent 3), 5 s"

    def demo_data(self):
        flats = np.random.default_rng(0).uniform((20, 0, -0.5), (120, 80, 0.5), (500, 3)).round(2).tolist()
        rows = [{"area": a, "age": b, "rent": round(0.12 * a - 0.03 * b + 5 + noise, 2)} for a, b, noise in flats]
        return DemoData(self.name, rows[:400], rows[400:], "generated rents", "none needed: generated", "csv")

    def baselines(self, job):
        return score_baselines(job.data, {"mean": MeanValue()}, "features", "target", lambda: load("mae"))

    def build(self, data, args, training, origin):
        from torch import nn, utils  # here, so that `lw tasks` need not import torch

        size = len(data.plan.columns["features"])
        model = nn.Sequential(nn.BatchNorm1d(size), nn.Linear(size, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
        return Job(self, data, args, training, origin.load_weights(model), None, utils.data.default_collate)

    def create_dataset(self, job, rows, *, is_labelled, is_training=False):
        return RowDataset(rows, self.encode)

    def encode(self, row):
        return {name: np.array(row[name], np.float32) for name in ("features", "target") if name in row}

    def compute_loss(self, job, model, batch):
        values = model(batch["features"])
        return (values - batch["target"]).abs().mean(), values

    def create_scorer(self, job):
        return MetricScorer(lambda: load("mae"), {"mae": False})

    def score_batch(self, job, batch, outputs):
        losses = (outputs - batch["target"]).abs()
        return samples_of(position=batch["position"], prediction=outputs, reference=batch["target"], loss=losses)

    def predict_batch(self, job, model, batch):
        return [{"value": round(value, 2)} for value in model(batch["features"]).tolist()]


if __name__ == "__main__":
    loopwright.tasks.register(TabularRegression)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["LOOPWRIGHT_RUNS"] = folder
        write_demo("tabular-regression", f"{folder}/flats")
        run = loopwright.train("tabular-regression", data=f"{folder}/flats", **TabularRegression.demo)
        print(f"mean absolute error {run.metrics['mae']:.2f}; 80 m2, 10 years: {run.predict(['80 10'])[0]['value']}")
