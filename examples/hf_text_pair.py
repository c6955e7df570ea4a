"""Classify pairs of texts with a tiny BERT, dataclass arguments and metrics: loopwright.hf in transformers' habits.

Run it with `python examples/hf_text_pair.py`; flags such as `--learning_rate 1e-3` change the arguments.
"""

import random
import tempfile
from dataclasses import dataclass, field

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from loopwright import metrics
from loopwright.hf import DataCollatorWithPadding, HfArgumentParser, Trainer, TrainingArguments

KINDS = (["red", "green", "blue", "grey"], ["round", "flat", "tall", "thin"], ["stone", "paper", "glass", "iron"])


@dataclass
class DataArguments:
    """What this script asks for beside the training arguments."""

    num_pairs: int = field(default=600, metadata={"help": "Pairs to train on."})
    max_length: int = field(default=16, metadata={"help": "Tokens of a pair."})


def create_tokenizer():
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *sum(KINDS, [])]
    tokenizer = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", special)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")


def create_pairs(count, tokenizer, max_length, seed):
    """Return pairs of texts of one kind (1) or two (0), tokenized; the texts stay beside their tokens."""
    source, pairs = random.Random(seed), []
    for index in range(count):
        first, second = source.sample(KINDS, 2)
        chosen = [first, first if index % 2 else second]
        texts = {f"sentence{n}": " ".join(source.sample(kind, n + 1)) for n, kind in enumerate(chosen, start=1)}
        tokens = tokenizer(*texts.values(), truncation=True, max_length=max_length)
        pairs.append({**texts, **tokens, "label": index % 2})
    return pairs


def compute_metrics(prediction):
    predictions, labels = prediction
    return metrics.load("glue", "mrpc").compute(predictions=predictions.argmax(axis=-1), references=labels)


def main():
    with tempfile.TemporaryDirectory() as folder:
        defaults = {"output_dir": folder, "learning_rate": 3e-3, "num_train_epochs": 8, "disable_tqdm": True}
        defaults |= {"per_device_train_batch_size": 32, "per_device_eval_batch_size": 64, "warmup_steps": 0.1}
        defaults |= {"eval_strategy": "epoch", "logging_strategy": "epoch", "load_best_model_at_end": True}
        parser = HfArgumentParser((DataArguments, TrainingArguments))
        parser.set_defaults(**defaults)
        data, args = parser.parse_args_into_dataclasses()
        tokenizer = create_tokenizer()
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=32, **sizes)
        trainer = Trainer(
            model=BertForSequenceClassification(config),
            args=args,
            train_dataset=create_pairs(data.num_pairs, tokenizer, data.max_length, seed=1),
            eval_dataset=create_pairs(200, tokenizer, data.max_length, seed=2),
            processing_class=tokenizer,
            data_collator=DataCollatorWithPadding(tokenizer),
            compute_metrics=compute_metrics,
        )
        trainer.train()
        trainer.log_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()
