"""Programs of libraries that subclass transformers' Trainer, each run on one of two sides.

    python clients.py LIBRARY[,LIBRARY ...] theirs|ours FOLDER [CASE ...]

"ours" calls `loopwright.hf.install()` first. Each program prints what can be compared, as one line of JSON: the logged
losses, the files of its last checkpoint, a digest of the trained weights, and whether a resumed run has the same.
"""

import hashlib
import json
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

WORDS = ("red", "green", "blue", "cat", "dog", "bird", "runs", "jumps", "sleeps", "big", "small", "good", "bad", "the")
CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|> {% generation %}{{ m['content'] }} <eos>{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|> {% endif %}"
)
QUIET = {"report_to": "none", "disable_tqdm": True, "use_cpu": True}
STEPS = {"max_steps": 6, "logging_steps": 1, "save_steps": 3, "learning_rate": 1e-3, "bf16": False}
STEPS["per_device_train_batch_size"] = 4 // int(os.environ.get("WORLD_SIZE", "1"))
COMPARED = ("loss", "eval_loss", "grad_norm", "learning_rate", "epoch")
SAME_ORDER = {"train_sampling_strategy": "sequential"}


def sentences(count: int, seed: int = 0, length: int = 8) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, length))) for _ in range(count)]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<eos>", "<|user|>", "<|assistant|>", "<|system|>"]
    words = {word: number for number, word in enumerate([*special, *WORDS])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", model_max_length=64
    )
    made.chat_template = CHAT
    return made


def sizes() -> dict[str, Any]:
    common = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    return {**common, "num_attention_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 2}


def decoder(kind: str = "LlamaForCausalLM", **more: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes(), num_key_value_heads=2, bos_token_id=2, **more)
    return getattr(transformers, kind)(config)


def encoder_folder(folder: Path) -> str:
    """Write a tiny BERT with its tokenizer, and return where."""
    import torch
    import transformers

    torch.manual_seed(0)
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    transformers.BertModel(transformers.BertConfig(**sizes(), **no_dropout)).save_pretrained(folder / "bert")
    tokenizer().save_pretrained(folder / "bert")
    return str(folder / "bert")


def pairs(count: int = 32) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"anchor": sentences(count), "positive": sentences(count, 1)})


def lora(task: str = "CAUSAL_LM") -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type=task)


def fine_tune(folder: Path, config: Any = None, **options: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            for a, b in zip(sentences(32), sentences(32, 1), strict=True)]  # fmt: skip
    args = SFTConfig(str(folder), max_length=48, **STEPS, **SAME_ORDER, **QUIET, **options)
    return SFTTrainer(
        decoder(), args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), peft_config=config
    )


def sft(folder: Path) -> Any:
    return fine_tune(folder, gradient_accumulation_steps=2)


def sft_lora(folder: Path) -> Any:
    return fine_tune(folder, lora())


def sft_packing(folder: Path) -> Any:
    return fine_tune(folder, packing=True, packing_strategy="wrapped")


def sft_assistant(folder: Path) -> Any:
    return fine_tune(folder, assistant_only_loss=True)


def preferences() -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"prompt": sentences(32), "chosen": sentences(32, 1), "rejected": sentences(32, 2)})


def reward(folder: Path) -> Any:
    from trl import RewardConfig, RewardTrainer

    args = RewardConfig(str(folder), **STEPS, **SAME_ORDER, **QUIET)
    model = decoder("LlamaForSequenceClassification", num_labels=1)
    return RewardTrainer(model, args, train_dataset=preferences(), processing_class=tokenizer())


def dpo(folder: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(str(folder), **STEPS, **SAME_ORDER, **QUIET, eval_strategy="steps", eval_steps=3)
    data = preferences()
    rest = {"eval_dataset": data.select(range(8)), "processing_class": tokenizer()}
    return DPOTrainer(decoder(), decoder(), args, train_dataset=data, **rest)


def dpo_lora(folder: Path) -> Any:
    from trl import DPOConfig, DPOTrainer

    args = DPOConfig(str(folder), precompute_ref_log_probs=True, **STEPS, **SAME_ORDER, **QUIET)
    options = {"train_dataset": preferences(), "processing_class": tokenizer(), "peft_config": lora()}
    return DPOTrainer(decoder(), args=args, **options)


def kto(folder: Path) -> Any:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    rows = {"prompt": sentences(32), "completion": sentences(32, 1), "label": [index % 2 == 0 for index in range(32)]}
    args = KTOConfig(str(folder), **STEPS, **SAME_ORDER, **QUIET)
    return KTOTrainer(decoder(), decoder(), args, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer())


def draw_without_chance() -> None:
    """Make generation the same on both sides: the first row takes the likeliest token, the next the second."""
    import torch

    def multinomial(scores: Any, *_: Any, **__: Any) -> Any:
        return scores.topk(3).indices.gather(1, (torch.arange(len(scores)) % 3)[:, None])

    torch.multinomial = multinomial
    torch.randperm = lambda size, **_: torch.arange(size)


def generating(kind: Any, config: Any, folder: Path, **options: Any) -> Any:
    """Return a trainer that trains on what its model generates."""
    from datasets import Dataset

    def reward_length(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(text)) / 10 for text in completions]

    draw_without_chance()
    more = {"teacher_model": options.pop("teacher_model")} if "teacher_model" in options else {}
    more = more or {"reward_funcs": reward_length}
    steps = {**STEPS, "max_steps": 4, "save_steps": 2, "gradient_accumulation_steps": 2}
    args = config(str(folder), max_completion_length=8, **steps, **QUIET, **options)
    rows = Dataset.from_dict({"prompt": sentences(32)})
    return kind(decoder(), args=args, train_dataset=rows, processing_class=tokenizer(), **more)


def grpo(folder: Path) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    # Every generation is trained on twice: what is buffered must survive a save in between.
    return generating(GRPOTrainer, GRPOConfig, folder, num_generations=2, steps_per_generation=4)


def rloo(folder: Path) -> Any:
    from trl import RLOOConfig, RLOOTrainer

    return generating(RLOOTrainer, RLOOConfig, folder, beta=0.0, num_generations=2)


def distillation(folder: Path) -> Any:
    from trl import DistillationConfig, DistillationTrainer

    return generating(DistillationTrainer, DistillationConfig, folder, teacher_model=decoder())


def embedding(folder: Path, data: Any = None, loss: Any = None, **options: Any) -> Any:
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, losses
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments

    evaluator = options.pop("evaluator", None)
    model = SentenceTransformer(encoder_folder(folder), device="cpu")
    args = Arguments(str(folder / "run"), **{**STEPS, **SAME_ORDER, **QUIET, **options})
    data = pairs() if data is None else data
    loss = losses.MultipleNegativesRankingLoss(model) if loss is None else loss(model)
    return SentenceTransformerTrainer(model, args, train_dataset=data, loss=loss, evaluator=evaluator)


def st_basic(folder: Path) -> Any:
    return embedding(folder)


def st_evaluator(folder: Path) -> Any:
    from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator

    scores = [index / 16 for index in range(16)]
    evaluator = EmbeddingSimilarityEvaluator(sentences(16, 3), sentences(16, 4), scores, name="dev")
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_dev_spearman_cosine"}
    return embedding(folder, evaluator=evaluator, eval_strategy="steps", eval_steps=3, **best)


def st_no_duplicates(folder: Path) -> Any:
    return embedding(folder, batch_sampler="no_duplicates", train_sampling_strategy="random")


def st_multi_dataset(folder: Path) -> Any:
    from datasets import DatasetDict
    from sentence_transformers import losses

    def by_name(model: Any) -> dict[str, Any]:
        ranking, contrast = losses.MultipleNegativesRankingLoss(model), losses.CosineSimilarityLoss(model)
        return {"first": ranking, "second": contrast}

    scored = pairs(16).add_column("score", [index % 2 for index in range(16)]).cast_column("score", float_type())
    data = DatasetDict({"first": pairs(), "second": scored})
    return embedding(folder, data, by_name, multi_dataset_batch_sampler="round_robin")


def float_type() -> Any:
    from datasets import Value

    return Value("float32")


def st_cross_encoder(folder: Path) -> Any:
    from sentence_transformers.cross_encoder import CrossEncoder, CrossEncoderTrainer, losses
    from sentence_transformers.cross_encoder import CrossEncoderTrainingArguments as Arguments

    model = CrossEncoder(encoder_folder(folder), num_labels=1, device="cpu")
    data = pairs().add_column("label", [index % 2 for index in range(32)]).cast_column("label", float_type())
    args = Arguments(str(folder / "run"), **{**STEPS, **SAME_ORDER, **QUIET})
    return CrossEncoderTrainer(model, args, train_dataset=data, loss=losses.BinaryCrossEntropyLoss(model))


def st_sparse_encoder(folder: Path) -> Any:
    import transformers
    from sentence_transformers import SparseEncoder, SparseEncoderTrainer
    from sentence_transformers import SparseEncoderTrainingArguments as Arguments
    from sentence_transformers.sparse_encoder.losses import SparseMultipleNegativesRankingLoss, SpladeLoss

    config = transformers.BertConfig.from_pretrained(encoder_folder(folder))
    transformers.BertForMaskedLM(config).save_pretrained(folder / "bert")
    model = SparseEncoder(str(folder / "bert"), device="cpu")
    loss = SpladeLoss(model, SparseMultipleNegativesRankingLoss(model), document_regularizer_weight=1e-3)
    args = Arguments(str(folder / "run"), **{**STEPS, **QUIET})
    return SparseEncoderTrainer(model, args, train_dataset=pairs(), loss=loss)


def setfit(folder: Path) -> Any:
    from datasets import Dataset
    from setfit import SetFitModel, Trainer, TrainingArguments

    rows = Dataset.from_dict({"text": sentences(16), "label": [index % 2 for index in range(16)]})
    model = SetFitModel.from_pretrained(encoder_folder(folder), device="cpu")
    args = TrainingArguments(str(folder / "run"), max_steps=6, batch_size=4, logging_steps=1, report_to="none")
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows)


def peft(folder: Path) -> Any:
    import torch
    from peft import get_peft_model
    from transformers import Trainer, TrainingArguments

    args = TrainingArguments(str(folder), **STEPS, **SAME_ORDER, **QUIET)
    torch.manual_seed(0)
    rows = [{"input_ids": torch.arange(3, 11) + index % 9, "labels": torch.arange(3, 11)} for index in range(32)]
    return Trainer(get_peft_model(decoder(), lora()), args, train_dataset=rows)


CASES: dict[str, tuple[Callable[[Path], Any], ...]] = {
    "trl": (sft, sft_lora, sft_packing, sft_assistant, reward, dpo, dpo_lora, kto, grpo, rloo, distillation),
    "sentence-transformers": (
        *(st_basic, st_evaluator, st_no_duplicates, st_multi_dataset, st_cross_encoder, st_sparse_encoder),
    ),
    "setfit": (setfit,),
    "peft": (peft,),
}
# Those whose runs are also resumed, from their first checkpoint.
RESUMED = ("sft", "sft_lora", "dpo", "kto", "grpo", "st_basic", "st_no_duplicates", "st_multi_dataset")


def digest(model: Any) -> str:
    weights = hashlib.sha256()
    for value in model.state_dict().values():
        weights.update(value.detach().contiguous().numpy().tobytes())
    return weights.hexdigest()


def report(trainer: Any, folder: Path) -> dict[str, Any]:
    import transformers

    trainer = getattr(trainer, "st_trainer", trainer)  # of setfit's own trainer
    assert isinstance(trainer, transformers.Trainer)
    logs = [entry for entry in trainer.state.log_history if "train_runtime" not in entry]
    saved = sorted(folder.rglob("checkpoint-*"), key=lambda path: (len(path.name), path.name))
    files = sorted(path.relative_to(saved[-1]).as_posix() for path in saved[-1].rglob("*") if path.is_file())
    return {
        "by": transformers.Trainer.__module__.partition(".")[0],
        "logs": [{name: entry[name] for name in COMPARED if name in entry} for entry in logs],
        "keys": sorted({name for entry in logs for name in entry}),
        "checkpoints": [path.name for path in saved],
        "files": files,
        "weights": digest(trainer.model),
    }


def outcome(case: Callable[[Path], Any], folder: Path, resumes: bool) -> dict[str, Any]:
    try:
        trainer = case(folder)
        trainer.train()
        found = report(trainer, folder)
        if resumes:
            again = case(folder)
            again.train(resume_from_checkpoint=min(map(str, folder.rglob("checkpoint-*"))))
            found["resumed"] = digest(again.model) == found["weights"]
    except Exception:  # noqa: BLE001 - the table of the clients shows it
        return {"error": traceback.format_exc()}
    return found


def main() -> None:
    libraries, side, folder = sys.argv[1].split(","), sys.argv[2], Path(sys.argv[3])
    os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CI="1")
    warnings.simplefilter("ignore")
    if side == "ours":
        from loopwright import hf

        hf.install()
    wanted = sys.argv[4:]
    for case in (case for library in libraries for case in CASES[library]):
        name = case.__name__
        if not wanted or name in wanted:
            found = outcome(case, folder / name, side == "ours" and name in RESUMED)
            print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main()
