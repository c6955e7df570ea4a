"""loopwright.hf where neither transformers nor datasets nor tokenizers is installed: plain modules train."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
for name in ("transformers", "datasets", "tokenizers"):
    sys.modules[name] = None  # importing it fails, as if it were not there
import torch
from torch import nn
from loopwright.hf import EarlyStoppingCallback, HfArgumentParser, Seq2SeqTrainer, Trainer, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

data = [{"x": torch.randn(2), "labels": index % 2} for index in range(20)]
args = TrainingArguments(sys.argv[1], num_train_epochs=1, save_strategy="epoch", disable_tqdm=True, report_to="none")
trainer = Trainer(Model(), args, train_dataset=data, eval_dataset=data)
assert trainer.train().global_step == 3
assert "eval_loss" in trainer.evaluate()
trainer.save_model()
print("done")
"""


def test_a_plain_module_trains_where_transformers_is_not_installed(tmp_path):
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.stdout.endswith("done\n"), done.stderr
    assert (tmp_path / "checkpoint-3" / "MANIFEST.json").exists()
    assert (tmp_path / "model.safetensors").exists()
