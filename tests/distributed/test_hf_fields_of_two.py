"""Counters, objects as labels and split batches of hf, on two processes."""

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
    trainer = tiny.fit(Path.cwd(), kind=Named, model=tiny.gpt2(), eval_dataset=texts[:5], **options)
    trainer.evaluate()
    results["state"] = [trainer.state.num_input_tokens_seen, trainer.state.total_flos, trainer.state.global_step]
    results["labels"] = [seen[0], [str(row["labels"].tolist()) for row in texts[:5]]]


def test_two_processes_count_together_gather_objects_and_share_a_batch(tmp_path):
    ranks = []
    for count in (1, 2):
        folder = tmp_path / str(count)
        folder.mkdir()
        ranks += run(train_and_evaluate, folder, count)
    alone, first, second = ranks
    assert first["state"] == second["state"] == alone["state"] and min(alone["state"]) > 0
    for rank in ranks:
        assert rank["labels"][0] == rank["labels"][1]


def train_scaled(results) -> None:
    from torch import nn

    from hf import tiny
    from loopwright.hf import Trainer

    class OfUpdate(Trainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            total = nn.functional.cross_entropy(model(x=inputs["x"])["logits"], inputs["labels"], reduction="sum")
            return (
                total
                / num_items_in_batch
                * (self.accelerator.num_processes if self.args.average_tokens_across_devices else 1)
            )

    class Divided(Trainer):
        loss_is_scaled_for_ga = True

        def compute_loss(self, *given, **options):
            return super().compute_loss(*given, **options) / self.current_gradient_accumulation_steps

    options = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "optim": "sgd", "max_grad_norm": 0}
    for kind in (Trainer, OfUpdate, Divided):
        trainer = tiny.fit(Path.cwd() / kind.__name__, kind=kind, **options)
        weights = [value.tolist() for value in tiny.weights(trainer).values()]
        results[kind.__name__] = [tiny.losses(trainer), *weights]


def test_losses_scaled_for_an_update_are_added_up_where_one_process_has_no_batch_left(tmp_path):
    for rank in run(train_scaled, tmp_path):
        assert rank["OfUpdate"] == rank["Divided"] == rank["Trainer"]
