"""Models that compute their own loss train without a subclass: the batch is a dict and `loss_func` is None.

A stand-in with the shape of a transformers model is always tested; the real ones where transformers is installed.
"""

import inspect
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import toys
from loopwright import Trainer
from loopwright.data.order import Shuffled
from loopwright.training import losses
from toys import NO_WORKERS, seeded

SEED = 3
NUM_CLASSES = 3
VOCABULARY = 20
LENGTH = 6


class Sentences(Dataset):
    """Token ids of different lengths, padded, with a mask; the label follows from the tokens."""

    def __init__(self, num_samples: int):
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(1, VOCABULARY, (num_samples, LENGTH), generator=generator)
        lengths = torch.randint(2, LENGTH + 1, (num_samples,), generator=generator)
        self.mask = (torch.arange(LENGTH)[None] < lengths[:, None]).long()
        self.ids = self.ids * self.mask
        self.labels = self.ids[:, 0] % NUM_CLASSES

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "attention_mask": self.mask[index], "labels": self.labels[index]}


@dataclass
class Output:
    loss: torch.Tensor | None
    logits: torch.Tensor


class MappingOutput(OrderedDict):
    """The same as a mapping whose entries are attributes too, which is what theirs really is."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class StandIn(nn.Module):
    """A sentence classifier that takes keywords and returns its loss if it is given labels."""

    def __init__(self, output=Output):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.classifier = nn.Linear(8, NUM_CLASSES)
        self.output = output

    def forward(self, input_ids, attention_mask=None, labels=None):
        mask = attention_mask.unsqueeze(-1)
        states = (self.embedding(input_ids) * mask).sum(dim=1) / mask.sum(dim=1)
        logits = self.classifier(states)
        loss = None if labels is None else nn.functional.cross_entropy(logits, labels)
        return self.output(loss=loss, logits=logits)


def trainer_of(model: nn.Module, loss_func=None, callbacks=(), lr: float = 0.05) -> Trainer:
    return Trainer(model, loss_func, torch.optim.AdamW(model.parameters(), lr=lr), callbacks=callbacks)


def fit(trainer: Trainer, num_epochs: int = 10, **kwargs):
    options = {"eval_dataset": Sentences(40), "per_device_batch_size": 8, "seed": SEED, **kwargs}
    return toys.fit(trainer, Sentences(40), num_epochs, **options)


STAND_INS = [Output, dict, MappingOutput]


@pytest.mark.parametrize("output", STAND_INS)
def test_a_model_with_a_loss_of_its_own_trains_without_a_subclass(output):
    trainer = trainer_of(seeded(StandIn, output))
    result = fit(trainer)
    losses = trainer.run_history.get_metric_values("eval_loss_epoch")
    assert losses[-1] < 0.5 * losses[0]
    assert result.updates == 50
    evaluated = trainer.evaluate(Sentences(40), dataloader_kwargs=NO_WORKERS)
    assert evaluated.metrics["evaluation_loss"] == pytest.approx(losses[-1])


def written_by_hand(model: nn.Module, num_epochs: int, lr: float = 0.05) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    sentences = Sentences(40)
    model.train()
    for epoch in range(num_epochs):
        ids = torch.from_numpy(Shuffled(40, SEED).ids(epoch, 0, 40))
        for batch in ids.split(8):
            outputs = model(
                input_ids=sentences.ids[batch], attention_mask=sentences.mask[batch], labels=sentences.labels[batch]
            )
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs.loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("output", STAND_INS)
def test_its_weights_are_those_of_a_hand_written_loop(output):
    ours, theirs = seeded(StandIn, output), seeded(StandIn, output)
    fit(trainer_of(ours), num_epochs=2)
    written_by_hand(theirs, num_epochs=2)
    toys.assert_same_weights(ours, theirs)


@pytest.mark.parametrize("output", [Output, MappingOutput])
def test_callbacks_get_the_logits_and_the_number_of_samples(output):
    watch = toys.watch(
        on_train_step_end=lambda trainer, batch, batch_output, **kwargs: (
            batch_output["model_outputs"].shape,
            batch_output["batch_size"],
            set(batch),
        )
    )
    fit(trainer_of(seeded(StandIn, output), callbacks=[watch]), num_epochs=1)
    assert watch.seen == [(torch.Size([8, NUM_CLASSES]), 8, {"input_ids", "attention_mask", "labels"})] * 5


@pytest.mark.parametrize("output", [Output, MappingOutput])
def test_a_custom_loss_function_gets_the_logits_and_the_labels(output):
    calls = []

    def loss_func(logits, labels):
        calls.append((logits.shape, labels.shape))
        return nn.functional.cross_entropy(logits, labels)

    own, built_in = seeded(StandIn, output), seeded(StandIn, output)
    fit(trainer_of(own, loss_func), num_epochs=1)
    fit(trainer_of(built_in), num_epochs=1)
    assert calls == [(torch.Size([8, NUM_CLASSES]), torch.Size([8]))] * 10
    assert torch.equal(own.classifier.weight, built_in.classifier.weight)


def test_predictions_are_the_logits_of_every_sample_in_order():
    model = seeded(StandIn)
    outputs = trainer_of(model).predict(Sentences(21), per_device_batch_size=8, dataloader_kwargs=NO_WORKERS).outputs
    sentences = Sentences(21)
    with torch.no_grad():
        expected = model.eval()(sentences.ids, sentences.mask).logits
    torch.testing.assert_close(outputs, expected)


def test_accumulation_and_bf16_work_on_them():
    plain, accumulated = trainer_of(seeded(StandIn)), trainer_of(seeded(StandIn))
    fit(plain, 2)
    fit(accumulated, 2, per_device_batch_size=2, gradient_accumulation_steps=4)
    torch.testing.assert_close(accumulated.model.classifier.weight, plain.model.classifier.weight)
    half = trainer_of(seeded(StandIn))
    fit(half, num_epochs=5, mixed_precision="bf16")
    losses = half.run_history.get_metric_values("eval_loss_epoch")
    assert losses[-1] < losses[0]


# The real ones


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="needs transformers")


def bert(transformers, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    limits = {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH, "num_labels": NUM_CLASSES}
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **limits, **rates))


def test_a_bert_classifier_trains_without_a_subclass(transformers):
    trainer = trainer_of(bert(transformers), lr=0.005)
    result = fit(trainer, num_epochs=15)
    losses = trainer.run_history.get_metric_values("eval_loss_epoch")
    assert losses[-1] < 0.5 * losses[0]
    assert result.updates == 75
    logits = trainer.predict(Sentences(40), dataloader_kwargs=NO_WORKERS).outputs
    assert logits.shape == (40, NUM_CLASSES)
    assert (logits.argmax(dim=1) == Sentences(40).labels).float().mean() > 0.8


def test_a_bert_classifier_gets_the_weights_of_a_hand_written_loop(transformers):
    ours, theirs = bert(transformers, dropout=0.0), bert(transformers, dropout=0.0)
    fit(trainer_of(ours, lr=0.005), num_epochs=2)
    written_by_hand(theirs, num_epochs=2, lr=0.005)
    toys.assert_same_weights(ours, theirs)


def test_a_bert_classifier_trains_the_same_with_dropout_and_with_accumulation_without_it(transformers):
    weights = []
    for _ in range(2):
        model = bert(transformers)
        fit(trainer_of(model, lr=0.005), num_epochs=1)
        weights.append(model.classifier.weight.detach())
    assert torch.equal(*weights), "the same seed, the same dropout"
    for batch_size, accumulation in ((8, 1), (2, 4)):
        model = bert(transformers, dropout=0.0).double()
        options = {"per_device_batch_size": batch_size, "gradient_accumulation_steps": accumulation}
        fit(trainer_of(model, lr=0.005), 1, **options)
        weights.append(model.classifier.weight.detach())
    torch.testing.assert_close(weights[2], weights[3], rtol=1e-6, atol=1e-8)


def test_a_causal_language_model_with_tied_weights_can_be_saved_and_loaded(transformers, tmp_path):
    def gpt():
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
        )
        return transformers.GPT2LMHeadModel(config)

    class Text(Sentences):
        def __getitem__(self, index):
            return {"input_ids": self.ids[index], "labels": self.ids[index]}

    trainer = trainer_of(gpt(), lr=0.005)
    trainer.train(Text(16), 2, train_dataloader_kwargs=NO_WORKERS)
    for name in ("model.pt", "model.safetensors"):
        trainer.save_checkpoint(tmp_path / name)
        other = trainer_of(gpt(), lr=0.005)
        other.load_checkpoint(tmp_path / name)
        assert torch.equal(other.model.transformer.wte.weight, trainer.model.transformer.wte.weight)
        assert other.model.lm_head.weight is other.model.transformer.wte.weight


def test_a_forward_is_inspected_once_and_again_when_it_is_replaced(monkeypatch):
    seen, model = [], nn.Linear(2, 1)
    monkeypatch.setattr(losses, "_signature", lambda model: seen.append(model) or inspect.signature(model.forward))
    batch = {"input": 1, "weight": 2}
    assert [losses._accepted(model, batch), losses._accepted(model, dict(batch))] == [{"input": 1}] * 2
    assert len(seen) == 1
    assert losses._accepted(model, {"input": 1}) == {"input": 1} and len(seen) == 2
    model.forward = lambda weight: weight
    assert losses._accepted(model, batch) == {"weight": 2} and len(seen) == 3
    assert losses._accepted(nn.Linear(2, 1), {"other": 1}) == {"other": 1}, "the error is to name what there is"
    gone = weakref.ref(model)
    seen.clear()
    del model
    assert gone() is None
