"""Models compiled in parts: which parts, how often, for which sizes, and that a resumed run compiles the same."""

import json

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import toys
from graphs.recorder import FakeCapturer, GraphedTrainer
from loopwright import Trainer
from loopwright.callbacks import ProfileCallback
from loopwright.engine.compilation import CompiledModel, compiled_parts
from loopwright.engine.nested import UnfinishedBatch
from loopwright.errors import MemoryLimitError, Preempted
from loopwright.training.run import run_of


@pytest.fixture(autouse=True)
def compile_counts():
    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    torch._dynamo.reset()


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, hidden):
        return hidden + torch.relu(self.inner(self.norm(hidden)))


class Summary(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 6)

    def forward(self, hidden):
        return torch.tanh(self.dense(hidden.mean(1)))


class Embeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)

    def forward(self, ids):
        return self.norm(self.words(ids))


class Reader(nn.Module):
    """Reads tokens and tells two classes apart; it notes whether its layers are compiled."""

    def __init__(self):
        super().__init__()
        self.embeddings, self.summary, self.head = Embeddings(), Summary(), nn.Linear(6, 2)
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, ids):
        hidden = self.embeddings(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.summary(hidden))


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(9, 6), nn.Linear(6, 2)

    def forward(self, ids):
        return self.head(self.words(ids).mean(1))


class Backend:
    """Compiles to the graph itself, times a number that depends on the sizes it is compiled with, as kernels do."""

    def __init__(self, fails_with=""):
        self.fails_with = fails_with
        self.sizes = []

    def __call__(self, graph, inputs):
        if self.fails_with:
            raise RuntimeError(self.fails_with)
        sizes = [int(size) for each in inputs if isinstance(each, torch.Tensor) for size in each.shape]
        self.sizes.append(sizes)
        factor = 1.0 + sum(sizes) * 2.0**-16
        return lambda *args: tuple(output * factor for output in graph.forward(*args))


class Compiles:
    backend = Backend()

    def create_compiled_model(self, model):
        return CompiledModel(model, backend=self.backend)


class CompiledTrainer(Compiles, Trainer):
    pass


class GraphedAndCompiled(Compiles, GraphedTrainer):
    pass


def sequences(lengths):
    generator = torch.Generator().manual_seed(3)
    return [(torch.randint(9, (length,), generator=generator), index % 2) for index, length in enumerate(lengths)]


def pad(samples):
    ids, labels = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(list(ids), batch_first=True), torch.tensor(labels)


class Announced:
    """A collate function that says that its batches come in several lengths."""

    bucket_lengths = None

    def __init__(self, row_width=None):
        self.row_width = row_width

    def __call__(self, samples):
        return pad(samples)


LENGTHS = [2, 3, 9, 5, 5, 2, 7, 7, 2, 3, 4, 9, 1]  # by 2: lengths 3 9 5 7 3 9, and one row
SAME = [4] * 13


def trained(lengths, kind=CompiledTrainer, model=Reader, backend=None, callbacks=(), **options):
    kind.backend = Backend() if backend is None else backend
    torch._dynamo.reset()
    model = toys.seeded(model, seed=1)
    trainer = kind(model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=0.01), callbacks=callbacks)
    settings = {"num_epochs": 2, "per_device_batch_size": 2, "collate_fn": pad, "seed": 5, "step_mode": "compile"}
    loader = {"shuffle": False, "num_workers": 0}
    trainer.train(sequences(lengths), train_dataloader_kwargs=loader, **{**settings, **options})
    return trainer


def test_the_parts_are_the_layers_and_what_stands_beside_them_without_embeddings():
    model = Reader()
    assert compiled_parts(model) == [model.summary, *model.layers]
    model.summary.pooler = Summary()
    model.pooler = Summary()
    assert compiled_parts(model) == [model.summary, *model.layers]  # a pooler alone is not worth it
    whole = Whole()
    assert compiled_parts(whole) == [whole]


def test_layers_are_compiled_once_and_the_model_is_as_it_was_outside(compile_counts):
    model, plain = toys.seeded(Reader), toys.seeded(Reader)
    compiled = CompiledModel(model, backend="eager")
    compiled.compile(is_dynamic=True)
    for rows, length in ((4, 7), (2, 5), (3, 9)):
        ids = torch.arange(rows * length).reshape(rows, length) % 9
        with compiled.active():
            assert torch.equal(model(ids), plain(ids))
        assert not any("forward" in vars(each) for each in model.modules())
    assert compile_counts["unique_graphs"] == 2  # the layers, and the summary


@pytest.mark.parametrize(("vocabulary", "number"), [(64, 2), (20, 3)])
def test_the_loss_of_a_language_model_is_a_part_and_a_head_whose_kernels_are_slow(vocabulary, number):
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16, "vocab_size": vocabulary}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    ids, seen = torch.arange(12).reshape(2, 6), []

    def backend(graph, inputs):
        seen.append({tuple(each.shape) for each in inputs if isinstance(each, torch.Tensor)})
        return graph.forward

    def gradients():
        outputs = model(input_ids=ids, labels=ids)
        assert outputs.logits.shape == (2, 6, vocabulary)
        return [outputs.loss, *torch.autograd.grad(outputs.loss, list(model.parameters()))]

    compiled = CompiledModel(model, backend=backend)
    compiled.compile(is_dynamic=False)
    expected = gradients()
    with compiled.active():
        found = gradients()
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    assert len(seen) == number and any((2, 6, vocabulary) in shapes for shapes in seen)  # a layer, and the logits' loss
    assert "_loss_function" not in vars(model) and "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("model", [Reader, Whole])
def test_batches_of_one_size_are_compiled_for_it_and_short_ones_run_as_written(model):
    trainer = trained(SAME, model=model)
    backend, recordings = trainer.backend, run_of(trainer).recordings
    assert not recordings.is_dynamic and recordings.compiled_for == [[2, 4], [2]]
    packed = trained(SAME, model=model, collate_fn=Announced(row_width=4))
    assert not run_of(packed).recordings.is_dynamic
    assert len(backend.sizes) == (2 if model is Reader else 1)


class Cut(UnfinishedBatch):
    """Arrives in any length; finished, all have one."""

    def finish(self):
        return {**self, "ids": self["ids"][:, :2]}


def test_sizes_are_those_of_finished_batches():
    def collate(rows):
        return Cut(zip(("ids", "labels"), pad(rows), strict=True))

    trainer = trained([5, 2, 3, 3, 9, 2], collate_fn=collate)
    recordings = run_of(trainer).recordings
    assert not recordings.is_dynamic and recordings.compiled_for == [[2, 2], [2]]


def test_batches_whose_collate_function_pads_are_compiled_once_for_all_sizes():
    trainer = trained(LENGTHS, collate_fn=Announced())
    recordings = run_of(trainer).recordings
    assert recordings.is_dynamic and recordings.compiled_for == [[2, 3], [2]]
    assert len(trainer.backend.sizes) == 2


@pytest.mark.parametrize("lengths", [SAME, LENGTHS], ids=["same", "lengths"])
def test_batches_of_one_row_are_compiled_if_all_have_one(lengths):
    trainer = trained(lengths, GraphedAndCompiled, per_device_batch_size=1, gradient_accumulation_steps=2)
    recordings = run_of(trainer).recordings
    assert recordings.compiled_for == [[1, 4 if lengths is SAME else 3], [1]]
    assert recordings.is_dynamic == (lengths is LENGTHS)
    assert len(trainer.backend.sizes) == (2 if lengths is SAME else 4)
    plain = trained(
        lengths, GraphedAndCompiled, per_device_batch_size=1, gradient_accumulation_steps=2, step_mode="graph"
    )
    assert not torch.equal(trainer.model.head.weight, plain.model.head.weight)


def test_a_second_size_compiles_for_all_sizes_once():
    trainer = trained([4] * 6 + [5] * 4 + [7] * 2)
    assert run_of(trainer).recordings.compiled_for == [[2, 5], [2]] and run_of(trainer).recordings.is_dynamic
    assert len(trainer.backend.sizes) == 4  # two parts for the first size, and again for all


@pytest.mark.parametrize("kind", [CompiledTrainer, GraphedAndCompiled])
@pytest.mark.parametrize("lengths", [LENGTHS, SAME, [4] * 6 + LENGTHS], ids=["lengths", "same", "late"])
def test_a_resumed_run_compiles_with_the_same_sizes_and_has_the_same_bits(kind, lengths, tmp_path):
    whole = trained(lengths, kind, checkpoints=toys.saving(tmp_path))
    plain = trained(lengths, kind, step_mode="eager")
    assert not torch.equal(whole.model.head.weight, plain.model.head.weight)  # the stand-in's bits are its own
    last = whole.progress.update
    for update in range(1, last, 3):
        resumed = trained(lengths, kind, resume_from=toys.step(tmp_path, update))
        toys.assert_same_weights(resumed, whole)
        assert run_of(resumed).recordings.state_dict() == run_of(whole).recordings.state_dict()


def test_compiled_updates_are_graphs_where_there_are_some():
    trainer = trained(SAME, GraphedAndCompiled, mixed_precision="bf16")
    assert trainer.num_graphed_updates == trainer.progress.update - 1
    assert {each.dtype for each in toys.state_of(trainer).values()} == {torch.float32}


def test_compiled_layers_read_the_copies_of_their_weights():
    """Graphs cast no weight: the compiled layers find its copy, and its gradient reaches the weight."""
    seen = []

    class Looking(Backend):
        def __call__(self, graph, inputs):
            seen.append({each.dtype for each in inputs if isinstance(each, torch.Tensor) and each.shape == (6, 6)})
            return graph.forward

    graphed = trained(SAME, GraphedAndCompiled, mixed_precision="bf16", backend=Looking())
    assert seen == [{torch.bfloat16}, {torch.bfloat16}] and not FakeCapturer.is_active
    eager = trained(SAME, CompiledTrainer, mixed_precision="bf16", step_mode="eager")
    for found, expected in zip(graphed.model.parameters(), eager.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", [CompiledTrainer, GraphedAndCompiled])
def test_a_model_that_cannot_be_compiled_runs_as_written_and_says_why_once(kind, capsys):
    trainer = trained(LENGTHS, kind, backend=Backend(fails_with="no C++ compiler was found"))
    printed = capsys.readouterr().out
    assert printed.count("as it is written, not compiled") == 1 and "no C++ compiler was found" in printed
    toys.assert_same_weights(trainer, trained(LENGTHS, kind, step_mode="auto"))


@pytest.mark.parametrize("kind", [CompiledTrainer, GraphedAndCompiled])
def test_a_signal_during_compilation_is_no_reason_not_to_compile(kind, tmp_path):
    class Ended(Backend):
        def __call__(self, graph, inputs):
            raise Preempted("SIGTERM")

    with pytest.raises(Preempted):
        trained(SAME, kind, backend=Ended(), checkpoints=toys.saving(tmp_path))
    whole = trained(SAME, kind)
    toys.assert_same_weights(trained(SAME, kind, checkpoints=toys.saving(tmp_path), resume_from="auto"), whole)


def test_the_first_update_is_compiled_too_also_where_the_next_ones_are_graphs():
    seen = []

    class Noting(Reader):
        def forward(self, ids):
            seen.append(("forward" in vars(self.layers[0]), len(ids)))
            return super().forward(ids)

    for kind in (CompiledTrainer, GraphedAndCompiled):
        trained(SAME, kind, model=Noting)
        assert all(is_compiled or rows == 1 for is_compiled, rows in seen) and len(seen) >= 14, kind
        seen.clear()


def test_a_first_update_that_does_not_fit_into_memory_is_run_again_without_graphs(capsys):
    class Full(FakeCapturer):
        def warm_up(self, function):
            super().warm_up(function)
            if self.num_warm_ups == 3:  # after the two rehearsals
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    class Tight(GraphedAndCompiled):
        def create_capturer(self):
            self.capturer = Full(self.model, self.optimizer)
            return self.capturer

    trainer = trained(SAME, Tight)
    assert trainer.progress.update == 14 and trainer.num_graphed_updates == 0
    assert "not as CUDA graphs: CUDA out of memory" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [CompiledTrainer, GraphedAndCompiled])
def test_a_micro_batch_that_does_not_fit_is_split_if_asked(kind):
    class Wide(Reader):
        def forward(self, ids):
            if len(ids) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return super().forward(ids)

    trainer = trained(SAME, kind, model=Wide, per_device_batch_size=4, oom="split", num_epochs=1)
    assert trainer.progress.update == 4 and trainer.num_parts == 2
    with pytest.raises(MemoryLimitError):
        trained(SAME, kind, model=Wide, per_device_batch_size=4)


def test_only_an_empty_cache_of_past_keys_is_left_out():
    class Layer(nn.Module):
        def forward(self, hidden, past_key_values=None):
            return hidden, past_key_values

    class Cache:
        def __init__(self, length):
            self.get_seq_length = lambda: length

    model = nn.Module()
    model.layers = nn.ModuleList([Layer(), Layer()])
    for each in model.layers:
        each.inner = nn.Linear(1, 1)
    compiled = CompiledModel(model, backend="eager")
    compiled.compile(is_dynamic=False)
    empty, filled, hidden = Cache(0), Cache(3), torch.ones(2)
    with compiled.active():
        assert model.layers[0](hidden, empty)[1] is None and model.layers[0](hidden, past_key_values=empty)[1] is None
        assert model.layers[1](hidden, filled)[1] is filled and model.layers[1](hidden)[1] is None


def test_a_mode_of_torch_that_records_graphs_itself_is_left_to_it(capsys):
    class Own(GraphedTrainer):
        def create_compiled_model(self, model):
            compiled = CompiledModel(model, mode="reduce-overhead")
            compiled.compile = lambda *, is_dynamic: None
            return compiled

    assert trained(SAME, Own).num_graphed_updates == 0
    assert "records its own" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [CompiledTrainer, GraphedAndCompiled])
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.inner.register_forward_hook(lambda part, given, output: output * 0.5),
        lambda layer: setattr(layer, "forward", lambda hidden: hidden * 0.5),
    ],
    ids=["hook", "method"],
)
def test_what_replaces_a_compiled_part_is_followed(kind, change, capsys):
    def train(step_mode):
        layer = toys.at_update(4, lambda trainer: change(trainer.model.layers[1]))
        return trained(SAME, kind, callbacks=[layer], backend="eager", step_mode=step_mode, num_epochs=1)

    compiled = train("compile")
    assert capsys.readouterr().out.count("as it is written, not compiled: hooks or methods") == 1
    toys.assert_same_weights(compiled, train("auto"))


@pytest.mark.parametrize("kind", [CompiledTrainer, GraphedAndCompiled])
def test_a_profile_counts_the_work_of_compiled_parts_and_changes_no_number(kind, tmp_path):
    """Operations inside compiled code are not seen, and it is not called where they are counted."""
    profile = ProfileCallback(2, tmp_path, num_warm_ups=2)
    options = {"num_epochs": 1, "gradient_accumulation_steps": 2}
    profiled = trained(SAME, kind, callbacks=[profile], **options)
    toys.assert_same_weights(profiled, trained(SAME, kind, **options))
    found = json.loads((tmp_path / "summary.json").read_text())["limits"]
    forward = 2 * (3 * 8 * 6 * 6 + 2 * 6 * 6 + 2 * 6 * 2)  # layers, pooler and head of a micro-batch
    assert found["flops"] == 2 * 3 * forward
