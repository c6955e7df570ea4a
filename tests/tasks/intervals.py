"""Checks of the interval around the loss of a run, against the losses of its samples."""

import pytest
import torch

from loopwright import api


def assert_loss_has_interval(run: api.Run, loss: str = "loss", weight: str = "num_target_tokens") -> None:
    """Assert that samples have losses whose weighted mean is the loss of the run, and its interval, in any batches.

    Below 50 samples it has none, and says so.

    Args:
        run: that has ended; nothing is written into its folder.
        loss: what the loss of a sample is called.
        weight: what the number of its items is called.
    """
    job = api.load_run(run.folder)
    dataset = job.task.create_dataset(job, job.data.rows("validation"), is_labelled=True)
    job.model.eval()
    bounds = run.result["intervals"].get("loss")
    if bounds is None:
        assert run.result["no_intervals"]["loss"].startswith("at least 50 ")
    assert (bounds is None) == (len(job.data.rows("validation")) < 50)
    assert bounds is None or bounds[0] < run.metrics["loss"] < bounds[1]
    for size in (3, 16):
        scorer, total, count = job.task.create_scorer(job), 0.0, 0.0
        for start in range(0, len(dataset), size):
            batch = job.collate_fn([dataset[index] for index in range(start, min(start + size, len(dataset)))])
            with torch.no_grad():
                mean, outputs = job.task.compute_loss(job, job.model, batch)
            samples = job.task.score_batch(job, batch, outputs)
            weights = [sample.get(weight, 1) for sample in samples]
            sums = [sample[loss] * each for sample, each in zip(samples, weights, strict=True) if each]
            assert sum(sums) / sum(weights) == pytest.approx(float(mean), rel=1e-6)
            total, count = total + sum(sums), count + sum(weights)
            assert scorer.exact_loss(samples, float(mean)) == pytest.approx(float(mean), rel=1e-6)
            scorer.add(samples)
        scorer.finish()
        assert total / count == pytest.approx(run.metrics["loss"], rel=1e-6)
        assert scorer.intervals().get("loss") == (bounds and pytest.approx(bounds, rel=1e-6))
