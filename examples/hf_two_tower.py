"""Train a two-tower BERT by overriding compute_loss with a cosine similarity: one encoder, two texts, one number.

Run it with `python examples/hf_two_tower.py`. The batch's keys are not those of the model's forward, and nothing has
to be said about that; compute_loss ignores return_outputs, so evaluations report the loss alone.
"""

import tempfile

import torch
from torch import nn
from transformers import BertConfig, BertModel

from loopwright.hf import Trainer, TrainingArguments

KEYS = ("text1_input_ids", "text1_attn_masks", "text2_input_ids", "text2_attn_masks")


class TwoTower(nn.Module):
    """Embeds a text: the mean over its tokens."""

    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        self.bert = BertModel(BertConfig(vocab_size=64, max_position_embeddings=16, **sizes), add_pooling_layer=False)

    def forward(self, input_ids, attention_mask):
        states = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        return (states * mask).sum(dim=1) / mask.sum(dim=1)


class TwoTowerTrainer(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        first = model(inputs["text1_input_ids"], inputs["text1_attn_masks"])
        second = model(inputs["text2_input_ids"], inputs["text2_attn_masks"])
        similarity = nn.functional.cosine_similarity(first, second)
        return nn.functional.mse_loss(similarity, inputs["labels"])


class Pairs(torch.utils.data.Dataset):
    """Pairs of texts with a similarity of 1 (the same words in another order) or 0 (other words)."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, 64, (count, 2, 8), generator=generator)
        ids[::2, 1] = ids[::2, 0].flip(-1)
        mask = torch.ones(count, 8, dtype=torch.long)
        self.columns = {"text1_input_ids": ids[:, 0], "text1_attn_masks": mask}
        self.columns |= {"text2_input_ids": ids[:, 1], "text2_attn_masks": mask}
        self.columns["labels"] = (torch.arange(count) % 2 == 0).float()

    def __len__(self):
        return len(self.columns["labels"])

    def __getitem__(self, index):
        return {name: column[index] for name, column in self.columns.items()}


def main():
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            num_train_epochs=5,
            per_device_train_batch_size=32,
            learning_rate=5e-3,
            eval_strategy="epoch",
            logging_strategy="epoch",
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = TwoTowerTrainer(TwoTower(), args, train_dataset=Pairs(512, seed=1), eval_dataset=Pairs(128, seed=2))
        trainer.train()
        trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
