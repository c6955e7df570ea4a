"""Counters, objects as labels and split batches of hf, on two processes."""

import os
from pathlib import Path

import pytest

from distributed.launcher import run

pytest.importorskip("transformers")
pytestmark = pytest.mark.distributed


def train_and_evaluate(results) -> None:
    from hf import tiny
    from loopwright.hf import Trainer

    class Named(Trainer):
        def prediction_step(self, *given, **options):
            loss, logits, labels = super().prediction_step(*given, **options)
            return loss, logits, [str(row.tolist()) for row in labels]

    seen = []
    options = {"include_num_input_tokens_seen": "non_padding", "eval_use_gather_object": True}
    options |= {"accelerator_config": {"split_batches": True}, "per_device_eval_batch_size": 2}
    texts = tiny.token_rows(20)
    options |= {"compute_metrics": lambda prediction: seen.append(prediction.label_ids) or {}, "data": texts}
    trainer = tiny.fit(Path(os.environ["FOLDER"]), kind=Named, model=tiny.gpt2(), eval_dataset=texts[:5], **options)
    trainer.evaluate()
    results["state"] = [trainer.state.num_input_tokens_seen, trainer.state.total_flos, trainer.state.global_step]
    results["labels"] = [seen[0], [str(row["labels"].tolist()) for row in texts[:5]]]


def test_two_processes_count_together_gather_objects_and_share_a_batch(tmp_path):
    ranks = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        ranks += run(train_and_evaluate, folder, count, FOLDER=str(folder))
    alone, first, second = ranks
    assert first["state"] == second["state"] == alone["state"] and min(alone["state"]) > 0
    for rank in ranks:
        assert rank["labels"][0] == rank["labels"][1]
