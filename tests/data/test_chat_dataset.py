"""Conversations as a dataset: in both trainers, and refused where the loss would be on nothing or on everything."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import loopwright
from loopwright import hf
from loopwright.data.chats import ChatDataset
from loopwright.data.collators import DataCollatorForSeq2Seq
from loopwright.errors import ConfigError, InputError

transformers = pytest.importorskip("transformers")

ROWS = [
    {"messages": [{"role": "user", "content": f"{n} plus 1?"}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(8)
]
ROWS += [{"prompt": "Say hi", "completion": "hi"}, {"instruction": "Say", "input": "ho", "output": "ho"}]


@pytest.fixture(scope="module")
def tokenizer():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    made.train_from_iterator(["plus plus"], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>")


@pytest.fixture
def model(tokenizer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=len(tokenizer), **sizes))


@pytest.fixture
def dataset(tokenizer):
    return ChatDataset(ROWS, tokenizer, chat_template="chatml")


def trained_text(dataset, index):
    return dataset.encoder.tokenizer.decode([label for label in dataset[index]["labels"] if label != -100])


def test_samples_have_labels_on_the_answers(dataset, tokenizer):
    assert len(dataset) == 10
    assert [trained_text(dataset, index) for index in (0, 7, 8, 9)] == [
        f"{answer}<|im_end|>" for answer in ("1", "8", "hi", "ho")
    ]
    assert "ho<|im_end|>\n<|im_start|>assistant" in tokenizer.decode(dataset[9]["input_ids"])
    assert dataset.encoder.end_of_turn == tokenizer.convert_tokens_to_ids("<|im_end|>") != tokenizer.pad_token_id


def test_the_trainer_trains_on_it(dataset, model, tokenizer):
    class ChatTrainer(loopwright.Trainer):
        def calculate_train_batch_loss(self, batch):
            return {"loss": self.model(**batch).loss, "model_outputs": None, "batch_size": len(batch["input_ids"])}

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer = ChatTrainer(model, None, optimizer, callbacks=())
    collator = DataCollatorForSeq2Seq(tokenizer)
    trainer.train(dataset, num_epochs=12, per_device_batch_size=10, collate_fn=collator)
    losses = trainer.run_history.get_metric_values("train_loss_epoch")
    assert losses[-1] < 0.5 * losses[0]


def test_the_trainer_of_transformers_terms_trains_on_it(dataset, model, tokenizer, tmp_path):
    kwargs = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "learning_rate": 0.05, "logging_steps": 1}
    args = hf.TrainingArguments(tmp_path, max_steps=12, per_device_train_batch_size=10, **kwargs)
    collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    trainer = hf.Trainer(model, args, train_dataset=dataset, data_collator=collator)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert losses[-1] < 0.5 * losses[0]


def test_rows_of_datasets_have_no_arguments_of_other_rows(tokenizer):
    datasets = pytest.importorskip("datasets")
    calls = [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {name: 1}}]} for name in "ab"]
    rows = [{"messages": [{"role": "user", "content": "Hi"}, call]} for call in calls]
    made = ChatDataset(datasets.Dataset.from_list(rows), tokenizer, chat_template="chatml")
    plain = ChatDataset(rows, tokenizer, chat_template="chatml")
    assert [made[index] for index in (0, 1)] == [plain[index] for index in (0, 1)]


def test_counts_of_what_is_left_out(tokenizer):
    thought = [("user", "Hi"), ("assistant", "<think>hm</think>Hi"), ("user", "Ho"), ("assistant", "Ho" * 50)]
    rows = [{"messages": [{"role": role, "content": content} for role, content in thought]}, ROWS[0]]
    dataset = ChatDataset(rows, tokenizer, chat_template="qwen", max_length=110, overlong="drop")
    assert (len(dataset), dataset.num_dropped_rows, dataset.num_dropped_texts) == (1, 1, 0)
    dataset = ChatDataset(rows, tokenizer, chat_template="qwen")
    assert (len(dataset), dataset.num_dropped_rows, dataset.num_dropped_texts) == (2, 0, 1)


def test_the_fixes_for_a_dataset_of_which_nothing_is_left_leave_something(tokenizer):
    for most, overlong, fixes in ((3, "truncate", 1), (3, "drop", 1), (26, "drop", 2)):
        with pytest.raises(InputError, match=f"nothing is left of 10 conversations in {most} tokens") as raised:
            ChatDataset(ROWS, tokenizer, chat_template="chatml", max_length=most, overlong=overlong)
        found = dict(each.strip("- ").split() for each in raised.value.fix.split("   or   "))
        assert raised.value.code == "model.length" and len(found) == fixes
        for name, value in found.items():
            options = {"max_length": most, "overlong": overlong, name: int(value) if name == "max_length" else value}
            assert len(ChatDataset(ROWS, tokenizer, chat_template="chatml", **options)) > 0
    with pytest.raises(InputError, match="there are no conversations") as raised:
        ChatDataset([], tokenizer, chat_template="chatml")
    assert raised.value.code == "data.no_rows"


def test_a_dataset_without_untrained_tokens_is_refused(tokenizer):
    bare = "{% for message in messages if message.role == 'assistant' %}{{ message.content }}{% endfor %}"
    with pytest.raises(InputError, match="every token would be trained") as raised:
        ChatDataset(ROWS, tokenizer, chat_template=bare)
    assert "first conversation: 1" in str(raised.value) and raised.value.fix == "--train_on all"
    assert len(ChatDataset(ROWS, tokenizer, chat_template=bare, train_on="all")) == 10


def test_bad_rows_and_arguments_are_refused_before_training(tokenizer):
    with pytest.raises(InputError, match="row 2: the conversation has no turn of the assistant"):
        ChatDataset([ROWS[0], {"messages": [{"role": "user", "content": "Hi"}]}], tokenizer, chat_template="chatml")
    with pytest.raises(InputError, match="row 1 has 27 tokens, more than 8") as raised:
        ChatDataset(ROWS, tokenizer, chat_template="chatml", max_length=8)
    assert raised.value.code == "model.length"
    with pytest.raises(InputError, match=r"message 1: U\+100001 in .*to \\U00100001") as raised:
        ChatDataset([{"prompt": "Hi to \U00100001", "completion": "Hi"}], tokenizer, chat_template="chatml")
    assert raised.value.code == "data.chat"
    with pytest.raises(InputError, match="the tokenizer has no chat template") as raised:
        ChatDataset(ROWS, tokenizer)
    assert raised.value.code == "model.chat_template" and "built in: alpaca, chatml" in str(raised.value)
    with pytest.raises(ConfigError, match="train_on is 'asistant'.*did you mean assistant"):
        ChatDataset(ROWS, tokenizer, chat_template="chatml", train_on="asistant")
    for most in (0, -1):
        with pytest.raises(ConfigError, match="at least 1 token"):
            ChatDataset(ROWS, tokenizer, chat_template="chatml", max_length=most, overlong="truncate")
    with pytest.raises(InputError) as raised:
        ChatDataset(ROWS, tokenizer, chat_template=Path("chatlm"))
    assert raised.value.fix == "--chat_template chatml"
