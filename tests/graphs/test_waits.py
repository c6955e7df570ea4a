"""Models of transformers in graphs: nothing in an update may wait for the device, as CUDA's recording demands."""

import contextlib

import pytest
import torch
from accelerate.utils import operations
from torch.utils._python_dispatch import TorchDispatchMode

import toys
from graphs.recorder import EagerTrainer, FakeCapturer, GraphedTrainer
from loopwright.engine.compilation import CompiledModel

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
ROWS, WIDTH, VOCABULARY = 10, 8, 30
# Their results have a size or a value that the host has to know.
WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "bincount")


class WaitsForDevice(TorchDispatchMode):
    """Refuses what waits for the device; `attentions` lists what attention was called with."""

    def __init__(self, attentions):
        super().__init__()
        self.attentions = attentions

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if func.overloadpacket is aten._scaled_dot_product_flash_attention_for_cpu:
            has_mask = (kwargs or {}).get("attn_mask") is not None
            self.attentions.append("mask" if has_mask else "causal" if args[4:5] == (True,) else "all")
        is_index = func.overloadpacket in (aten.index, aten.index_put, aten.index_put_)
        has_mask = is_index and any(each is not None and each.dtype == torch.bool for each in args[1])
        if has_mask or func.overloadpacket in [getattr(aten, name) for name in WAITING]:
            raise RuntimeError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


class StrictCapturer(FakeCapturer):
    """Refuses to record what waits for the device; what asks whether its stream is captured hears that it is."""

    def __init__(self, *args):
        super().__init__(*args)
        self.attentions = []  # of everything recorded, and of replays

    def warm_up(self, function):
        with self._capturing():
            super().warm_up(function)

    def capture(self, function):
        def checked():
            with self._capturing(), WaitsForDevice(self.attentions):
                return function()

        return super().capture(checked)

    @staticmethod
    @contextlib.contextmanager
    def _capturing():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            yield


class StrictTrainer(GraphedTrainer):
    def create_capturer(self):
        self.capturer = StrictCapturer(self.model, self.optimizer)
        return self.capturer

    def create_compiled_model(self, model):
        return CompiledModel(model, backend="aot_eager")


def texts(is_padded=True, labels=None):
    generator = torch.Generator().manual_seed(0)
    for row in range(ROWS):
        ids = torch.randint(3, VOCABULARY, (WIDTH,), generator=generator)
        mask = torch.arange(WIDTH) < (WIDTH - row % 3 if is_padded else WIDTH)
        target = ids.masked_fill(~mask, -100) if labels is None else torch.tensor(row % labels)
        yield {"input_ids": ids, "attention_mask": mask.long(), "labels": target}


def pictures():
    generator = torch.Generator().manual_seed(0)
    for row in range(ROWS):
        yield {"pixel_values": torch.randn(3, 16, 16, generator=generator), "labels": torch.tensor(row % 2)}


# Classes by the name that they begin with, what they are created with beside SIZES, and their rows.
MODELS = {
    "BertForSequenceClassification": ({"vocab_size": VOCABULARY}, lambda: texts(labels=2)),
    "ModernBertForMaskedLM": ({"vocab_size": VOCABULARY, "pad_token_id": 0, "cls_token_id": 1}, texts),
    "GPT2LMHeadModel": ({"vocab_size": VOCABULARY, "attn_pdrop": 0.0}, lambda: texts(is_padded=False)),
    "Qwen3ForCausalLM": ({"vocab_size": VOCABULARY, "head_dim": 8, "num_key_value_heads": 1}, texts),
    "MistralForCausalLM": ({"vocab_size": VOCABULARY, "num_key_value_heads": 1, "sliding_window": 4}, texts),
    "T5ForConditionalGeneration": ({"vocab_size": VOCABULARY, "d_model": 16, "decoder_start_token_id": 0}, texts),
    "ViTForImageClassification": ({"image_size": 16, "patch_size": 8}, pictures),
}
WITHOUT_MASK = {"GPT2LMHeadModel": "causal", "ViTForImageClassification": "all"}


def trained(name, rows, step_mode, kind=StrictTrainer, callbacks=(), wrap=lambda model: model, **options):
    created = getattr(transformers, name)
    torch._dynamo.reset()
    config = created.config_class(**SIZES, **MODELS[name][0], **options)
    model = wrap(toys.seeded(lambda: created(config), seed=1))
    trainer = kind(model, None, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True), callbacks=callbacks)
    loader = {"num_workers": 0, "shuffle": False}
    trainer.train(
        list(rows), 1, per_device_batch_size=2, train_dataloader_kwargs=loader, step_mode=step_mode,
        mixed_precision="bf16",
    )  # fmt: skip
    return trainer


@pytest.mark.parametrize("step_mode", ["graph", "compile"])
@pytest.mark.parametrize("name", MODELS)
def test_every_update_but_the_first_is_a_graph(name, step_mode):
    trainer = trained(name, MODELS[name][1](), step_mode)
    assert trainer.num_graphed_updates == trainer.progress.update - 1 == ROWS // 2 - 1
    if name in WITHOUT_MASK:
        assert set(trainer.capturer.attentions) == {WITHOUT_MASK[name]}


class Wrapped(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, pixel_values, labels):
        return {"loss": self.inner(pixel_values, labels=labels).loss}


def test_a_model_inside_of_another_takes_no_mask_for_images_and_has_the_bits_of_eager_updates():
    name, rows = "ViTForImageClassification", [*pictures()]
    graphed = trained(name, rows, "graph", wrap=Wrapped)
    assert set(graphed.capturer.attentions) == {"all"} and graphed.num_graphed_updates == ROWS // 2 - 1
    eager = trained(name, rows, "eager", EagerTrainer, wrap=Wrapped)
    for one, other in zip(graphed.model.parameters(), eager.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("step_mode", "has_mask"), [("graph", True), ("graph", False), ("compile", False)])
def test_rows_without_padding_take_no_mask_and_have_the_bits_of_eager_updates(step_mode, has_mask):
    rows = [
        row if has_mask else {"input_ids": row["input_ids"], "labels": row["labels"]} for row in texts(is_padded=False)
    ]
    # Without a cache transformers looks for packed rows.
    graphed = trained("Qwen3ForCausalLM", rows, step_mode, use_cache=has_mask)
    assert graphed.num_graphed_updates == ROWS // 2 - 1
    assert set(graphed.capturer.attentions) == {"causal"}
    if step_mode == "graph":
        eager = trained("Qwen3ForCausalLM", rows, "eager", EagerTrainer, use_cache=has_mask)
        for one, other in zip(graphed.model.parameters(), eager.model.parameters(), strict=True):
            assert torch.equal(one, other)


def test_batches_with_and_without_padding_are_graphs_of_their_own():
    rows = [
        row
        for padded, full in zip(texts(), texts(is_padded=False), strict=True)
        for row in (padded, padded, full, full)
    ]
    trainer = trained("Qwen3ForCausalLM", rows, "graph")
    assert trainer.num_graphed_updates == trainer.progress.update - 1
    assert set(trainer.capturer.attentions) == {"mask", "causal"} and trainer.capturer.num_captures == 2


@pytest.mark.parametrize("is_watched", [True, False])
def test_logits_that_nobody_reads_are_not_cast(is_watched, monkeypatch):
    casts = []
    convert = operations.convert_to_fp32
    monkeypatch.setattr(operations, "convert_to_fp32", lambda outputs: casts.append(1) or convert(outputs))
    watch = toys.watch(on_train_step_end=lambda trainer, batch_output, **_: batch_output["model_outputs"].dtype)
    type(watch).graph_safe = True
    callbacks = [watch] if is_watched else []
    trainer = trained("GPT2LMHeadModel", texts(is_padded=False), "graph", callbacks=callbacks)
    assert trainer.num_graphed_updates == ROWS // 2 - 1
    assert watch.seen == ([torch.float32] * (ROWS // 2) if is_watched else [])
    assert len(casts) > 1 if is_watched else len(casts) == 1  # of the first update, which is no graph


def test_a_forward_pass_that_waits_is_refused():
    class Waiting(torch.nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs[inputs[:, 0] < 9])

    model = Waiting(4, 2)
    trainer = StrictTrainer(model, lambda found, _: found.sum(), torch.optim.SGD(model.parameters()), callbacks=[])
    trainer.train(toys.labelled(8, 4, seed=2), 1, per_device_batch_size=2, step_mode="graph")
    assert trainer.num_graphed_updates == 0
