"""The peak memory of an update is that of the hand-written loop, counted in bytes of live tensors."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from loopwright import Trainer, hf

ROWS = [{"input_ids": torch.arange(32) % 7, "labels": torch.arange(32) % 7}] * 12
BATCH = {name: torch.stack([row[name] for row in ROWS[:4]]) for name in ROWS[0]}


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations make, until they are freed."""

    def __init__(self):
        super().__init__()
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.sizes:
                storage = tensor.untyped_storage()
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.end, storage._cdata)
        return result

    def end(self, key):
        self.now -= self.sizes.pop(key)


def hand(model, optimizer, precision, folder):
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = model(**BATCH).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def core(model, optimizer, precision, folder):
    options = {"per_device_batch_size": 4, "train_dataloader_kwargs": {"num_workers": 0}}
    Trainer(model, None, optimizer, callbacks=[]).train(ROWS, 1, mixed_precision=precision, **options)


def of_hf(model, optimizer, precision, folder):
    options = {"report_to": "none", "save_strategy": "no", "per_device_train_batch_size": 4, "use_cpu": True}
    arguments = hf.TrainingArguments(str(folder), num_train_epochs=1, bf16=precision == "bf16", **options)
    hf.Trainer(model, arguments, train_dataset=ROWS, optimizers=(optimizer, None)).train()


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_language_model_needs_no_more_memory_than_by_hand(precision, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    peaks = {}
    for run in (hand, core, of_hf):
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=10_000, n_positions=32, n_embd=16, n_layer=1, n_head=2)
        model = GPT2LMHeadModel(config).train()
        with LiveBytes() as live:
            run(model, torch.optim.SGD(model.parameters(), 0.1), precision, tmp_path)
        peaks[run.__name__] = live.peak
    logits = BATCH["input_ids"].numel() * config.vocab_size * 4
    assert peaks["hand"] > 3 * logits  # so that one more set of them would be seen
    assert max(peaks.values()) <= 1.02 * peaks["hand"], peaks
