"""Batches without padding: the same numbers as with it, in graphs, and after a resume."""

import inspect

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

import toys
from graphs.flash import kernel
from graphs.recorder import GraphedTrainer
from loopwright import Trainer
from loopwright.data.buckets import loop_padding
from loopwright.engine import segments
from loopwright.engine.compilation import CompiledModel
from loopwright.engine.joined_rows import JoinedRows, token_budget, why_padded
from loopwright.errors import ConfigError
from loopwright.hf import TrainingArguments
from loopwright.training.run import run_of

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 30}
GROUPED = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
MODELS = {
    "BertForSequenceClassification": SIZES,
    "RobertaForTokenClassification": {**SIZES, "pad_token_id": 1},
    "DistilBertForQuestionAnswering": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "vocab_size": 30},
    "ModernBertForMaskedLM": {**SIZES, "local_attention": 4, "pad_token_id": 0},
    "LlamaForCausalLM": {**GROUPED},
    "Gemma3ForCausalLM": {**GROUPED, "sliding_window": 4},
    "GPT2LMHeadModel": {
        "n_embd": 16,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 30,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
}


def model_of(name, seed=0, **options):
    kind = getattr(transformers, name)
    return toys.seeded(lambda: kind(kind.config_class(**{**MODELS.get(name, SIZES), **options})), seed=seed)


def batch_of(lengths, width=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.randint(3, 30, mask.shape, generator=generator) * mask, "attention_mask": mask}


BATCH = batch_of([16, 5, 9, 2])


@given(st.lists(st.integers(0, 24), min_size=2, max_size=9))
def test_budgets_are_few_and_hold_all_tokens(lengths):
    budget = token_budget(batch_of(lengths, width=24))
    size, tokens = len(lengths) * 24, sum(lengths)
    assert budget is None or tokens <= budget < size
    assert budget in {None, *(-(-size * eighths // 64) * 8 for eighths in (5, 6, 7))}
    assert budget is not None or tokens > size * 6 // 8


def test_batches_without_a_mask_of_whole_numbers_or_with_one_row_keep_their_padding():
    assert token_budget(BATCH) == 40
    others = [[], {}, {"attention_mask": BATCH["attention_mask"].float()}, batch_of([3]), batch_of([16] * 4)]
    others.append({"attention_mask": BATCH["attention_mask"][None]})
    assert [token_budget(each) for each in others] == [None] * len(others)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_of_every_token_are_those_of_the_padded_batch(name):
    model = model_of(name).eval()
    assert why_padded(model) is None
    joined, mask = JoinedRows(model), BATCH["attention_mask"]
    widths = []
    layer = next(part for part in model.modules() if type(part).__name__.endswith(("Layer", "Block")))
    layer.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append((args or tuple(kwargs.values()))[0].shape[:2]), with_kwargs=True
    )
    results = []
    for budget in (None, 40):
        model.zero_grad()
        with joined.running(mask, budget):
            output = next(value for key, value in model(**BATCH).items() if key.endswith("logits"))
            output = output[mask.bool()] if output.shape[:2] == mask.shape else output
            output.square().sum().backward()
        results.append((output, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    assert widths == [(4, 16), (1, 40)]
    for padded, own in zip(*results, strict=True):
        assert (padded - own).abs().max() <= 1e-5 * padded.abs().max()
    joined.close()
    assert model.config._attn_implementation == "sdpa"


def test_all_layers_are_compiled_once():
    model, batch, compilations = model_of("BertForSequenceClassification"), batch_of([20, 5, 9, 2], width=20), []
    joined = JoinedRows(model)
    compiled = CompiledModel(model, backend=lambda graph, inputs: compilations.append(graph) or graph.forward)
    compiled.compile(is_dynamic=True)
    with compiled.active(), joined.running(batch["attention_mask"], 56):
        model(**batch)
    joined.close()
    assert len(compilations) == 1


def test_models_that_cannot_leave_padding_out_give_the_reason():
    found = [model_of(name) for name in ("DebertaV2ForSequenceClassification", "BartForSequenceClassification")]
    found += [model_of("BertForSequenceClassification", output_hidden_states=True), torch.nn.Linear(2, 2)]
    found.append(transformers.BertModel(transformers.BertConfig(**SIZES, attn_implementation="eager")))
    reasons = [why_padded(each) for each in found]
    assert all(reasons) and len(set(reasons)) == len(found)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM", "GPT2LMHeadModel"])
def test_packed_sequences_have_the_logits_of_each_alone(name):
    model = model_of(name).eval()
    ids = torch.randint(3, 30, (2, 12), generator=torch.Generator().manual_seed(1))
    places = torch.tensor([[*range(7), *range(5)], [*range(3), *range(9)]])
    bounds = segments.segment_bounds(torch.tensor([[0, 7, 12, 12], [0, 3, 12, 12]]), 12)
    with torch.no_grad():
        parts = [
            [model(each[None, :cut]).logits, model(each[None, cut:]).logits]
            for each, cut in zip(ids, (7, 3), strict=True)
        ]
        alone = torch.cat([torch.cat(each, 1) for each in parts])
        segments.use_segments(model)
        packed = model(ids, position_ids=places, attention_mask=bounds, use_cache=False).logits
    assert (packed - alone).abs().max() <= 1e-5


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("is_causal", "window"), [(True, None), (False, None), (True, 3), (False, 3)])
def test_the_flash_kernel_gets_rows_behind_each_other(monkeypatch, is_causal, window, rows):
    monkeypatch.setattr(segments, "_flash_kernel", lambda: kernel)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(rows, 4, 8, 6, generator=generator)
    key, value = (torch.randn(rows, 2, 8, 6, generator=generator) for _ in range(2))
    bounds = segments.segment_bounds(torch.tensor([[0, 5, 8, 8], [0, 1, 6, 8]][:rows]), 8)
    module, sdpa = torch.nn.Linear(1, 1), transformers.AttentionInterface()["sdpa"]
    module.num_key_value_groups, module.is_causal = 2, is_causal
    expected, _ = segments.attention(sdpa, module, query, key, value, bounds, scaling=0.3, sliding_window=window)
    own = segments._flash(query, key, value, bounds, 0.0, 0.3, is_causal, window)
    torch.testing.assert_close(own, expected)


# ------------------------------------------------------------------------------------------------------ whole runs


def rows(num=23):
    generator = torch.Generator().manual_seed(4)
    lengths = torch.randint(2, 17, (num,), generator=generator).tolist()
    return [(torch.randint(3, 30, (length,), generator=generator), length % 2) for length in lengths]


def collate(samples):
    batch = torch.nn.utils.rnn.pad_sequence([ids for ids, _ in samples], batch_first=True)
    return {
        "input_ids": batch,
        "attention_mask": (batch > 0).long(),
        "labels": torch.tensor([label for _, label in samples]),
    }


class Heedless(transformers.BertForSequenceClassification):
    """Averages over padding as well, which is not the same once padding is left out."""

    def forward(self, input_ids, attention_mask, labels):
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits = self.classifier(hidden.mean(1))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def trained(kind=transformers.BertForSequenceClassification, padding="free", trainer_kind=GraphedTrainer, **options):
    model = toys.seeded(lambda: kind(transformers.BertConfig(**SIZES)), seed=1)
    trainer = trainer_kind(model, None, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), callbacks=[])
    settings = {"num_epochs": 2, "per_device_batch_size": 4, "collate_fn": collate, "seed": 5, "padding": padding}
    trainer.train(rows(), train_dataloader_kwargs={"shuffle": False, "num_workers": 0}, **settings, **options)
    return trainer


def test_a_run_without_padding_resumes_with_the_same_bits(tmp_path):
    whole = trained(checkpoints=toys.saving(tmp_path))
    assert run_of(whole).recordings.unpads is True
    for update in (1, 2, 7):
        resumed = trained(resume_from=toys.step(tmp_path, update))
        assert run_of(resumed).recordings == run_of(whole).recordings
        toys.assert_same_weights(resumed, whole)
    assert whole.model.config._attn_implementation == "sdpa" and not whole.model._forward_pre_hooks
    assert inspect.ismethod(whole.model.forward)


def test_a_run_without_padding_learns_what_a_padded_one_does():
    free = trained(kind=without_dropout)
    padded = trained(kind=without_dropout, padding="auto")
    assert run_of(padded).recordings.unpads is False
    assert free.num_graphed_updates == padded.num_graphed_updates == 11
    for own, other in zip(free.model.parameters(), padded.model.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4)


def without_dropout(config):
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForSequenceClassification(config)


def test_a_model_whose_outputs_need_the_padding_keeps_it_and_the_reason_is_reported(capsys):
    trainer = trained(kind=Heedless)
    assert run_of(trainer).recordings.unpads is False and trainer.num_graphed_updates == 11
    assert "Keeping the padding of batches" in capsys.readouterr().out
    toys.assert_same_weights(trainer, trained(kind=Heedless, padding="auto"))


def test_if_recording_fails_rows_are_padded_before_graphs_are_given_up():
    class Failing(GraphedTrainer):
        fails_with = "operation not permitted when stream is capturing"

    trainer = trained(trainer_kind=Failing)
    recordings = run_of(trainer).recordings
    assert recordings.unpads is False and recordings.ended == Failing.fails_with
    assert trainer.num_graphed_updates == 0
    assert trainer.model.config._attn_implementation == "sdpa" and not trainer.model._forward_pre_hooks


def test_a_run_without_graphs_reports_that_it_keeps_the_padding(capsys):
    trained(trainer_kind=Trainer)
    assert "Keeping the padding of batches" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auto", ("auto", "auto")),
        ("free", ("free", "auto")),
        ("bucket", ("keep", "auto")),
        ("longest", ("keep", "off")),
    ],
)
def test_the_padding_of_a_run_and_its_lengths_follow_one_flag(given, expected):
    args = TrainingArguments(padding=given)
    assert (loop_padding(args.padding), args.length_buckets) == expected


@pytest.mark.parametrize(
    "options", [{"padding": "longest", "length_buckets": [32]}, {"padding": "bucket", "length_buckets": "off"}]
)
def test_paddings_that_exclude_each_other_are_refused(options):
    with pytest.raises(ConfigError, match="exclude each other"):
        TrainingArguments(**options)
