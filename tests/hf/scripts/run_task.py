"""Fine-tune a tiny model on generated data, with the flags and the flow of transformers' example scripts."""

import json
import math
import os
import time
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from datasets import Dataset
from transformers import HfArgumentParser, default_data_collator, set_seed
from transformers.trainer_utils import EvalPrediction, PredictionOutput, get_last_checkpoint, speed_metrics

# isort: split
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

WORDS = [f"w{number}" for number in range(27)]
IDS = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])}
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SIZES |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "dropout_rate": 0.0}


@dataclass
class ScriptArguments:
    task: str = field(metadata={"help": "Which task to run."})
    model_type: str = field(metadata={"help": "Architecture of the model."})
    config_overrides: str | None = field(default=None, metadata={"help": "Other sizes, as JSON."})
    val_max_target_length: int | None = None
    num_beams: int | None = None


class Answering:
    """Evaluates and predicts with a function between the outputs of the model and compute_metrics."""

    def __init__(self, *args, eval_examples=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples

    def answer(self, loader, examples, description, ignore_keys, prefix):
        compute_metrics, self.compute_metrics, start = self.compute_metrics, None, time.time()
        options = {"prediction_loss_only": None, "ignore_keys": ignore_keys, "metric_key_prefix": prefix}
        try:
            output = self.evaluation_loop(loader, description=description, **options)
        finally:
            self.compute_metrics = compute_metrics
        steps = math.ceil(output.num_samples / (self.args.eval_batch_size * self.args.world_size))
        output.metrics.update(speed_metrics(prefix, start, num_samples=output.num_samples, num_steps=steps))
        if isinstance(self, Seq2SeqTrainer):
            ids = [tokens.clip(0) for tokens in (output.predictions, output.label_ids)]
            texts = [self.processing_class.batch_decode(each, skip_special_tokens=True) for each in ids]
        else:
            starts = output.predictions[0].argmax(-1), output.label_ids[0]
            texts = [[each["words"][i % 4] for each, i in zip(examples, ids, strict=True)] for ids in starts]
        metrics = self.compute_metrics(EvalPrediction(*texts))
        return texts, {f"{prefix}_{name}": value for name, value in metrics.items()} | output.metrics

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval", **gen_kwargs):
        self._gen_kwargs = gen_kwargs
        loader = self.get_eval_dataloader(self.eval_dataset if eval_dataset is None else eval_dataset)
        examples = self.eval_examples if eval_examples is None else eval_examples
        _, metrics = self.answer(loader, examples, "Evaluation", ignore_keys, metric_key_prefix)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def predict(self, predict_dataset, predict_examples, ignore_keys=None, metric_key_prefix="test", **gen_kwargs):
        self._gen_kwargs, loader = gen_kwargs, self.get_test_dataloader(predict_dataset)
        texts, metrics = self.answer(loader, predict_examples, "Prediction", ignore_keys, metric_key_prefix)
        return PredictionOutput(*texts, metrics)


TRAINERS = {"QuestionAnswering": type("Answerer", (Answering, Trainer), {}), "Seq2SeqLM": Seq2SeqTrainer}
TRAINERS["Seq2SeqAnswering"] = type("Seq2SeqAnswerer", (Answering, Seq2SeqTrainer), {})


def generate_examples(seed):
    generator = np.random.default_rng(seed)
    lines = [generator.choice(WORDS, generator.integers(4, 10)).tolist() for _ in range(24)]
    return Dataset.from_dict({"words": lines, "text": [" ".join(line) for line in lines]})


def prepare(example, task, tokenizer):
    words, text, label = example["words"], example["text"], IDS[example["words"][0]] % 3
    if task == "TokenClassification":
        tokens = tokenizer(words, is_split_into_words=True)
        return {**tokens, "labels": [-100 if i is None else IDS[words[i]] % 3 for i in tokens.word_ids()]}
    if task == "CausalLM":
        ids = tokenizer((text + " " + text + " " + text), max_length=12, truncation=True)["input_ids"]
        return {"input_ids": ids, "labels": ids}
    if task == "QuestionAnswering":
        tokens = tokenizer(words[label], text, padding="max_length")
        return {**tokens, "start_positions": 3 + label, "end_positions": 3 + label}
    if task.startswith("Seq2Seq"):
        return {**tokenizer(text), "labels": [IDS[word] for word in words[:3]]}
    if task == "MultipleChoice":
        return {**tokenizer([text] * 2, ["w0", words[0]][:: 1 - 2 * (label % 2)]), "label": label % 2}
    return {**tokenizer(text, return_special_tokens_mask=task == "MaskedLM"), "label": label}


def to_pixels(batch):
    rows = [[IDS[word] / 16 for word in (words * 2)[:8]] for words in batch["words"]]
    return {"labels": batch["label"], "pixel_values": [torch.tensor(row).repeat(3, 8, 1) for row in rows]}


def create_collator(task, tokenizer, model):
    if task.startswith("Seq2Seq"):
        return transformers.DataCollatorForSeq2Seq(tokenizer, model=model)
    if task == "MaskedLM":
        return transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.4, seed=1)
    if task in ("TokenClassification", "MultipleChoice"):
        return getattr(transformers, f"DataCollatorFor{task}")(tokenizer)
    return None if task == "SequenceClassification" else default_data_collator


def compute_metrics(prediction):
    found, wanted = map(np.asarray, prediction)
    if found.dtype == np.float32:
        return {"accuracy": (found.argmax(-1) == wanted)[wanted != -100].mean()}
    if found.dtype == np.int64:  # generated tokens and labels, without special tokens
        found, wanted = ([str(row[row > 4]) for row in ids] for ids in (found, wanted))
    return {"accuracy": np.equal(found, wanted).mean()}


def report(trainer, split, metrics):
    trainer.log_metrics(split, metrics)
    trainer.save_metrics(split, metrics)


def main(argv):
    is_seq2seq = "--predict_with_generate" in argv
    parser = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments if is_seq2seq else TrainingArguments))
    if len(argv) == 1 and argv[0].endswith(".json"):
        script_args, training_args = parser.parse_json_file(json_file=os.path.abspath(argv[0]))
    else:
        script_args, training_args = parser.parse_args_into_dataclasses(argv)
    last_checkpoint = get_last_checkpoint(training_args.output_dir) if os.path.isdir(training_args.output_dir) else None
    set_seed(training_args.seed)

    options = {"model_max_length": 32, "model_input_names": ["input_ids", "attention_mask"], "eos_token": "[SEP]"}
    task, tokenizer = script_args.task, transformers.BertTokenizer(vocab=IDS, **options)
    sizes = {**SIZES, "vocab_size": len(IDS), "num_labels": 2 if task == "QuestionAnswering" else 3, "pad_token_id": 0}
    sizes |= json.loads(script_args.config_overrides or "{}")
    config = transformers.AutoConfig.for_model(script_args.model_type, **sizes)
    model_class = getattr(transformers, "AutoModelFor" + task.replace("Seq2SeqAnswering", "Seq2SeqLM"))
    model = model_class.from_config(config)
    examples = [generate_examples(seed) for seed in range(3)]
    with training_args.main_process_first(desc="dataset map pre-processing"):
        datasets = [each.map(prepare, fn_kwargs={"task": task, "tokenizer": tokenizer}) for each in examples]
    for dataset in datasets if task == "ImageClassification" else []:
        dataset.set_transform(to_pixels)

    options = {"processing_class": tokenizer, "data_collator": create_collator(task, tokenizer, model)}
    options |= {"train_dataset": datasets[0], "eval_dataset": datasets[1], "compute_metrics": compute_metrics}
    options |= {"eval_examples": examples[1]} if task.endswith("Answering") else {}
    trainer = TRAINERS.get(task, Trainer)(model=model, args=training_args, **options)
    if training_args.do_train:
        checkpoint = training_args.resume_from_checkpoint or last_checkpoint
        train_result = trainer.train(resume_from_checkpoint=checkpoint)
        trainer.save_model()
        report(trainer, "train", {**train_result.metrics, "train_samples": len(datasets[0])})
        trainer.save_state()
    lengths = {"max_length": script_args.val_max_target_length, "num_beams": script_args.num_beams}
    gen_kwargs = lengths if is_seq2seq else {}
    if training_args.do_eval:
        metrics = trainer.evaluate(metric_key_prefix="eval", **gen_kwargs)
        report(trainer, "eval", {**metrics, "perplexity": math.exp(metrics["eval_loss"])})
    results = None
    if training_args.do_predict:
        given = (datasets[2], examples[2]) if isinstance(trainer, Answering) else (datasets[2],)
        results = trainer.predict(*given, metric_key_prefix="predict", **gen_kwargs)
        report(trainer, "predict", results.metrics)
    trainer.create_model_card(tasks=task, finetuned_from=script_args.model_type, language="en")
    return trainer, results
