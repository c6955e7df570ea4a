"""Updates of `hf.Trainer` as graphs, with a stand-in for CUDA."""

import pytest
import torch
from torch import nn

import toys
from graphs.recorder import FakeCapturer
from hf import tiny
from loopwright import hf
from loopwright.engine.graphs import single_precision_rates
from loopwright.hf.core import Core


class Tagger(nn.Module):
    """A class for each of five positions; positions with the label -100 do not count."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs, labels=None):
        logits = self.layer(self.dropout(inputs))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def rows(count=42):
    generator = torch.Generator().manual_seed(1)
    samples = []
    for number in range(count):
        labels = torch.randint(4, (5,), generator=generator)
        labels[5 - number % 4 :] = -100
        samples.append({"inputs": torch.randn(5, 3, generator=generator), "labels": labels})
    return samples


@pytest.fixture
def graphs(monkeypatch):
    made = []

    def create(core):
        made.append(FakeCapturer(core.model, core.optimizer))
        return made[-1]

    monkeypatch.setattr(Core, "create_capturer", create, raising=False)
    return made


def trained(folder, *callbacks, **options):
    settings = {"per_device_train_batch_size": 8, "num_train_epochs": 3, "optim": "adamw_torch_fused", **options}
    model = toys.seeded(Tagger, seed=4)
    return tiny.fit(folder, *callbacks, model=model, data=rows(), report_to="none", use_cpu=True, **settings)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_graphed_steps_have_the_losses_and_weights_of_eager_ones(accumulation, tmp_path, graphs, monkeypatch):
    graphed = trained(tmp_path / "graphed", gradient_accumulation_steps=accumulation)
    assert graphs[0].num_replays > 0
    plain = Core.optimizer_step

    def step(core):
        with single_precision_rates(core.optimizer):
            plain(core)

    monkeypatch.setattr(Core, "optimizer_step", step)
    eager = trained(tmp_path / "eager", step_mode="eager", gradient_accumulation_steps=accumulation)
    assert tiny.losses(eager) == tiny.losses(graphed)
    toys.assert_same_weights(eager, graphed)


def test_an_own_loss_means_eager_unless_it_is_declared_safe(tmp_path, graphs, capsys):
    class OwnLoss(hf.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            return super().compute_loss(model, inputs, return_outputs, **kwargs)

    class SafeLoss(OwnLoss):
        graph_safe = True

    trained(tmp_path / "own", kind=OwnLoss)
    assert graphs == []
    assert "compute_loss must see every step" in capsys.readouterr().out
    trained(tmp_path / "safe", kind=SafeLoss)
    assert graphs[0].num_replays > 0


def test_a_callback_that_looks_at_gradients_means_eager_and_others_do_not(tmp_path, graphs):
    trained(tmp_path / "looks", tiny.on(pre_optimizer_step=lambda *args, **kwargs: None))
    assert graphs == []
    seen = []
    counts = {
        "step_begin": lambda *args, **kwargs: seen.append("begin"),
        "step_end": lambda *args, **kwargs: seen.append("end"),
    }
    trainer = trained(tmp_path / "counts", tiny.on(**counts))
    assert graphs[0].num_replays > 0
    assert seen == ["begin", "end"] * trainer.state.global_step


def add_callback(trainer):
    trainer.add_callback(tiny.on(pre_optimizer_step=lambda *args, **kwargs: None))


def replace_loss(trainer):
    compute_loss = trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: 0.5 * compute_loss(*args, **kwargs)


@pytest.mark.parametrize("change", [add_callback, replace_loss])
def test_what_must_see_every_step_from_some_update_on_means_eager_from_there(change, tmp_path, graphs):
    def act(args, state, control, **kwargs):
        if state.global_step == 4:
            change(made[0])

    made = []

    class Known(hf.Trainer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(self)

    trained(tmp_path, tiny.on(step_end=act), kind=Known)
    assert graphs[0].num_replays == 3


def test_batches_without_a_count_are_graphed(tmp_path, graphs):
    class Uncounted(hf.Trainer):
        def get_batch_samples(self, epoch_iterator, num_batches, device):
            return list(epoch_iterator), None

    trained(tmp_path, kind=Uncounted)
    assert graphs[0].num_replays > 0


def test_a_resumed_run_with_a_step_that_divides_is_graphed_with_the_same_gradients(tmp_path, graphs):
    class Dividing(hf.Trainer):
        graph_safe = True

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, inputs) / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    options = {"kind": Dividing, "gradient_accumulation_steps": 2, "save_strategy": "epoch"}
    whole = trained(tmp_path, **options)
    resumed = trained(tmp_path, resume=tmp_path / "checkpoint-3", **options)
    assert graphs[1].num_replays > 0 and tiny.same(whole, resumed)


def embedded():
    """Classes of texts of any length; the loss is the model's own, as transformers' models have it."""

    def forward(self, input_ids, attention_mask, labels=None):
        logits = self.head((self.words(input_ids) * attention_mask[..., None]).mean(1))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    return toys.net(forward, words=nn.Embedding(50, 8), head=nn.Linear(8, 3))


def test_transformers_own_padding_collator_gets_graphs_and_resumes_alike(tmp_path, graphs):
    from transformers import DataCollatorWithPadding

    tokenizer = tiny_tokenizer()
    lengths = [3, 7, 4, 4, 9, 2, 3, 5, 6, 6, 2, 2, 8]
    texts = [
        {"input_ids": list(range(1, length + 1)), "attention_mask": [1] * length, "labels": length % 3}
        for length in lengths
    ]
    options = {"per_device_train_batch_size": 2, "num_train_epochs": 3, "optim": "adamw_torch_fused"}
    options |= {"report_to": "none", "use_cpu": True, "length_buckets": "off", "save_strategy": "epoch"}
    options |= {"data_collator": DataCollatorWithPadding(tokenizer)}
    whole = tiny.fit(tmp_path, model=toys.seeded(embedded, seed=4), data=texts, **options)
    num_updates = whole.state.global_step
    assert graphs[0].num_replays == whole.core.num_graphed_updates == num_updates - 1 == 20
    checkpoint = tmp_path / "checkpoint-7"
    resumed = tiny.fit(tmp_path, model=toys.seeded(embedded, seed=4), data=texts, resume=checkpoint, **options)
    assert graphs[1].num_replays == num_updates - 7
    assert tiny.same(whole, resumed) and tiny.losses(whole)[-1:] == tiny.losses(resumed)[-1:]


def test_a_model_of_transformers_in_bf16_has_the_bits_of_autocast(tmp_path, graphs, monkeypatch):
    plain = Core.optimizer_step

    def step(core):
        with single_precision_rates(core.optimizer):
            plain(core)

    monkeypatch.setattr(Core, "optimizer_step", step)
    options = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "optim": "adamw_torch_fused", "bf16": True}
    options |= {"report_to": "none", "use_cpu": True, "max_grad_norm": 0.5}
    options["data"] = [{**row, "labels": index % 3} for index, row in enumerate(tiny.token_rows(ragged=False))]
    graphed = tiny.fit(tmp_path / "graphed", model=toys.seeded(tiny.bert, seed=1), **options)
    assert graphs[0].num_replays > 0
    eager = tiny.fit(tmp_path / "eager", model=toys.seeded(tiny.bert, seed=1), step_mode="eager", **options)
    assert tiny.losses(eager) == tiny.losses(graphed)
    toys.assert_same_weights(eager, graphed)


def tiny_tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"[PAD]": 0, "[UNK]": 1}, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")
