"""Private parts of dependencies: which files use them, and that each is still as those files rely on.

A new one fails here until it has a comment that says why, and a check.
"""

import argparse
import ast
import inspect
from multiprocessing import get_context

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, ExponentialLR, SequentialLR
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from source_trees import SOURCE, modules

# Of named tuples, os and sys.
DOCUMENTED = {"_replace", "_fields", "_asdict", "_make", "_exit", "_getframe", "_current_frames"}

# By file: the private names of other projects that it uses.
USES = {
    "callbacks/ema.py": {"_foreach_add_", "_foreach_mul_", "_original_forward"},
    "checkpoint/hidden_state.py": {
        "_attn_implementation",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_parameters",
    },
    "cli/parser.py": {"_actions", "_option_string_actions"},
    "config/parser.py": {"_actions", "_argument_group_name", "_option_string_actions"},
    "data/images/device.py": {"_new_shared"},
    "data/loader.py": {"_utils"},
    "data/split_streams.py": {"_distributed"},
    "data/workers.py": {
        *("_C", "_MultiProcessingDataLoaderIter", "_SIGCHLD_handler_set", "_data_queue", "_get_data", "_get_iterator"),
        *(
            "_iterator",
            "_on_queue_feeder_error",
            "_pin_memory",
            "_pin_memory_thread",
            "_pin_memory_thread_done_event",
            "_popen",
            "_recv",
        ),
        *("_poll", "_reader", "_recv_bytes", "_remove_worker_pids", "_sem", "_shutdown", "_shutdown_workers"),
        *("_timeout", "_utils", "_worker_pids_set", "_worker_result_queue", "_workers", "_workers_done_event"),
        "_workers_status",
    },
    "engine/compilation.py": {"_compiled_call_impl", "_dynamo", "_orig_mod"},
    "engine/buffers.py": {"_foreach_copy_", "_version"},
    "engine/engine.py": {
        *("_BatchNorm", "_is_accelerate_prepared", "_orig_mod", "_original_forward", "_reset_state"),
        *("_optimizer_original_step_method", "_optimizer_patched_step_method", "_shared_state"),
    },
    "engine/segments.py": {
        "_attn_implementation",
        "_flash_attention_forward",
        "_supports_attention_backend",
        "_supports_flash_attn",
    },
    "engine/graphs.py": {"_C", "_cuda_endAllocateToPool", "_foreach_copy_", "_foreach_zero_"},
    "engine/host_state.py": {"_backward_hooks", "_post_accumulate_grad_hooks"},
    "engine/joint_failure.py": {"_get_default_store"},
    "engine/processes.py": {"_abort_process_group", "_foreach_add_"},
    "engine/seeding.py": {"_get_default_mps_generator"},
    "engine/sharding.py": {"_foreach_mul_", "_no_split_modules", "_orig_mod", "_utils"},
    "hf/loss.py": {"_orig_mod"},
    "hf/transformers_checkpoint.py": {"_keys_to_ignore_on_save"},
    "hf/model_setup.py": {"_apply_liger_kernel_to_instance"},
    "lr_finder.py": {"_buffers", "_parameters"},
    "metrics/texts.py": {"_compute_score_from_stats", "_extract_corpus_statistics"},
    "optimizers.py": {
        *("_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"),
        *("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks", "_profiler_enabled"),
    },
    "runs/auto/memory.py": {"_subclasses"},
    "runs/settings.py": {"_actions", "_option_string_actions"},
    "sources/arrow.py": {"_fingerprint"},
    "stepping/cast_weights.py": {"_foreach_add_", "_foreach_copy_"},
    "stepping/graphs.py": {
        *("_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"),
        "_original_forward",
    },
    "tasks/adapters.py": {"_DropoutNd", "_modules"},
    "tasks/pretrained.py": {"_attn_implementation", "_model_mapping"},
    "tasks/text/models.py": {"_model_mapping"},
    "tasks/text/seq2seq.py": {"_from_model_config"},
    "training/hyper_parameters.py": {"_get_closed_form_lr", "_milestones", "_schedulers"},
    "training/losses.py": {"_foreach_mul_", "_orig_mod"},
}
# Not checked here: a convention of other projects, not a part of one that is installed.
CONVENTIONS = {"_argument_group_name", "_no_split_modules", "_apply_liger_kernel_to_instance"}

CHECKS = {}


def part(*names):
    """Register a function as the check of these names."""

    def register(function):
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return register


def is_private(name):
    return isinstance(name, str) and name.startswith("_") and not name.startswith(("__", "_loopwright")) and name != "_"


def is_self(node):
    return isinstance(node, ast.Name) and node.id in {"self", "cls"}


def names_of(node):
    """Return the names that a node reads: of an attribute, an import, or a text that names an attribute."""
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [*(node.module or "").split("."), *(alias.name for alias in node.names)]
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in alias.name.split(".")]
    if isinstance(node, ast.Call):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        looks_up = name in {"getattr", "hasattr", "setattr", "delattr", "get", "pop"}
        return [arg.value for arg in node.args if isinstance(arg, ast.Constant)] if looks_up else []
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and isinstance(node.left, ast.Constant):
        return [node.left.value]
    return []


def private_uses(tree):
    """Yield (name, line, whether it is inherited) for each private name that a module uses."""
    for node in ast.walk(tree):
        for name in names_of(node):
            if is_private(name) and name not in DOCUMENTED:
                yield name, node.lineno, isinstance(node, ast.Attribute) and is_self(node.value)


def defined_names(tree):
    """Return the names that a module defines, or assigns to its own objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
            found.add(node.attr)
    return found


def test_private_uses_are_found():
    tree = ast.parse("from a._b import c, _d\nx._e; self._f; getattr(x, '_g'); '_h' in vars(x); '_no'; y._replace()")
    assert sorted(private_uses(tree)) == [
        *(("_b", 1, False), ("_d", 1, False), ("_e", 2, False), ("_f", 2, True), ("_g", 2, False), ("_h", 2, False)),
    ]


def test_every_private_part_that_is_used_is_listed_and_checked():
    trees = modules()
    ours = set().union(*map(defined_names, trees.values()))
    found = {path: {name for name, *_ in private_uses(tree)} - ours for path, tree in trees.items()}
    listed = {path: USES.get(path, set()) - ours for path in {**trees, **USES}}
    assert found == listed
    assert set().union(*USES.values()) == set(CHECKS) | CONVENTIONS
    assert len(trees) >= 300 and len(CHECKS) >= 40


def test_every_private_part_has_a_comment_that_says_why():
    missing = []
    for path in USES:
        lines = (SOURCE / path).read_text("utf-8").splitlines()
        uses = list(private_uses(modules()[path]))
        commented = {name for name, line, is_inherited in uses if is_inherited or has_comment(lines, line)}
        missing += [f"{path} {name}" for name in USES[path] - commented - defined_names(modules()[path])]
    assert sorted(missing) == []


def has_comment(lines, line):
    return any("#" in each for each in lines[max(line - 4, 0) : line])


@part("_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_foreach_zero_")
def _():
    tensors, others = [torch.ones(2), torch.ones(3)], [torch.full((2,), 4.0), torch.full((3,), 4.0)]
    torch._foreach_mul_(tensors, 3.0)
    torch._foreach_add_(tensors, others, alpha=0.5)
    assert [tensor.tolist() for tensor in tensors] == [[5.0] * 2, [5.0] * 3]
    torch._foreach_copy_(tensors, others)
    assert torch.equal(tensors[1], others[1])
    torch._foreach_zero_(tensors)
    assert not tensors[0].any()


@part("_version")
def _():
    tensor = torch.zeros(2)
    before = tensor._version
    tensor.add_(1)
    assert tensor._version == before + 1


@part("_flash_attention_forward")
def _():
    names = [each.name for each in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    assert names[3:10] == ["cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal", "return_debug_mask"]
    assert {"scale", "window_size_left", "window_size_right"} <= set(names)


@part("_supports_attention_backend", "_supports_flash_attn")
def _():
    from transformers import BertModel, DebertaV2Model

    assert BertModel._supports_flash_attn and BertModel._supports_attention_backend
    assert not DebertaV2Model._supports_flash_attn


@part("_attn_implementation")
def _():
    from transformers import BertConfig

    assert BertConfig(attn_implementation="eager")._attn_implementation == "eager"


@part("_buffers", "_modules", "_non_persistent_buffers_set", "_parameters")
def _():
    module = nn.BatchNorm1d(2)
    module.register_buffer("mask", None, persistent=False)
    assert module._non_persistent_buffers_set == {"mask"} and list(nn.Sequential(module)._modules.values()) == [module]
    module.register_buffer("absent", None)
    assert module._parameters["weight"] is module.weight and list(module._parameters) == ["weight", "bias"]
    assert module._buffers["running_mean"] is module.running_mean and module._buffers["absent"] is None


@part("_BatchNorm", "_DropoutNd")
def _():
    assert isinstance(nn.BatchNorm1d(2), nn.modules.batchnorm._BatchNorm)
    assert isinstance(nn.SyncBatchNorm(2), nn.modules.batchnorm._BatchNorm)
    assert isinstance(nn.Dropout2d(0.5), nn.modules.dropout._DropoutNd) and nn.Dropout(0.5).p == 0.5


@part("_dynamo")
def _():
    assert torch._dynamo.config.specialize_float in (True, False)


@part("_compiled_call_impl", "_orig_mod")
def _():
    model = nn.Linear(2, 1)
    assert model._compiled_call_impl is None
    model.compile(backend="eager")
    assert callable(model._compiled_call_impl)
    plain = nn.Linear(2, 1)
    assert torch.compile(plain, backend="eager")._orig_mod is plain


@part("_backward_hooks", "_post_accumulate_grad_hooks")
def _():
    weight = nn.Parameter(torch.zeros(2))
    assert not weight._backward_hooks and not weight._post_accumulate_grad_hooks
    weight.register_hook(lambda gradient: None)
    weight.register_post_accumulate_grad_hook(lambda weight: None)
    assert weight._backward_hooks and weight._post_accumulate_grad_hooks


@part("_new_shared")
def _():
    assert torch.UntypedStorage._new_shared(4).is_shared()


@part("_subclasses")
def _():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert (torch.empty(2, 3) @ torch.empty(3, 4)).shape == (2, 4)


@part("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
def _():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    optimizer.register_step_pre_hook(lambda *args: None)
    optimizer.register_step_post_hook(lambda *args: None)
    assert optimizer._optimizer_step_pre_hooks and optimizer._optimizer_step_post_hooks


@part("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
def _():
    for register, hooks in (
        (register_optimizer_step_pre_hook, _global_optimizer_pre_hooks),
        (register_optimizer_step_post_hook, _global_optimizer_post_hooks),
    ):
        handle = register(lambda *args: None)
        assert len(hooks) == 1
        handle.remove()
        assert not hooks


@part("_profiler_enabled")
def _():
    assert not torch.autograd._profiler_enabled()
    with torch.autograd.profiler.profile():
        assert torch.autograd._profiler_enabled()


@part("_schedulers", "_milestones", "_get_closed_form_lr")
def _():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    parts = [ConstantLR(optimizer, factor=0.5, total_iters=9), ExponentialLR(optimizer, gamma=0.5)]
    scheduler = SequentialLR(optimizer, parts, milestones=[2])
    assert scheduler._schedulers == parts and scheduler._milestones == [2]
    assert parts[0]._get_closed_form_lr() == [0.05]


@part("_C", "_cuda_endAllocateToPool", "_remove_worker_pids")
def _():
    from torch._C import _remove_worker_pids

    with pytest.raises(ValueError, match="Cannot find worker information"):  # it is found by its id
        _remove_worker_pids(id(object()))
    if torch.cuda.is_available():
        assert callable(torch._C._cuda_endAllocateToPool)


@part("_get_default_mps_generator")
def _():
    assert callable(torch.mps._get_default_mps_generator)


@part("_get_default_store", "_abort_process_group")
def _():
    # Both are also run by the tests with several processes.
    assert not inspect.signature(torch.distributed.distributed_c10d._get_default_store).parameters
    parameters = inspect.signature(torch.distributed.distributed_c10d._abort_process_group).parameters.values()
    assert all(parameter.default is not parameter.empty for parameter in parameters)


@part("_utils")
def _():
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.utils.data import _utils
    from torch.utils.data._utils.pin_memory import pin_memory

    parameters = list(inspect.signature(compute_local_shape_and_global_offset).parameters)
    assert parameters[:3] == ["global_shape", "mesh", "placements"]
    assert _utils.python_exit_status is False
    assert pin_memory({"text": "a", "number": 1}) == {"text": "a", "number": 1}


@part(
    *("_MultiProcessingDataLoaderIter", "_data_queue", "_get_data", "_get_iterator", "_iterator", "_pin_memory"),
    *("_pin_memory_thread", "_pin_memory_thread_done_event", "_popen", "_shutdown", "_shutdown_workers", "_timeout"),
    *("_worker_pids_set", "_worker_result_queue", "_workers", "_workers_status", "_SIGCHLD_handler_set"),
    "_workers_done_event",
)
def _():
    from torch.utils.data import _utils
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    loader = DataLoader([1, 2], num_workers=1, timeout=7, persistent_workers=True)
    assert loader._iterator is None
    iterator = iter(loader)
    try:
        assert isinstance(iterator, _MultiProcessingDataLoaderIter) and loader._iterator is iterator
        assert type(loader._get_iterator()) is _MultiProcessingDataLoaderIter
        assert iterator._timeout == 7 and iterator._pin_memory is False and iterator._shutdown is False
        assert iterator._data_queue is iterator._worker_result_queue and iterator._workers_status == [True]
        assert hasattr(iterator._workers[0]._popen, "terminate") and hasattr(iterator._workers[0]._popen, "kill")
        assert not iterator._workers_done_event.is_set()
        assert iterator._worker_pids_set is True and _utils.signal_handling._SIGCHLD_handler_set is True
    finally:
        iterator._shutdown_workers()
    assert iterator._shutdown is True
    code = inspect.getsource(_MultiProcessingDataLoaderIter)  # the thread itself needs a GPU
    assert "self._pin_memory_thread_done_event.set()" in code and "self._pin_memory_thread.is_alive()" in code
    assert "self._get_data()" in code


@part("_reader", "_poll", "_recv_bytes", "_sem", "_recv", "_on_queue_feeder_error")
def _():
    results = get_context("spawn").Queue()
    results.put("a")
    assert results._poll(5)
    assert isinstance(results._recv_bytes(), bytes)
    results._sem.release()
    results.close()
    results.join_thread()
    pipe = getattr(results._reader, "conn", results._reader)
    assert list(inspect.signature(type(pipe)._recv).parameters) == ["self", "size", "read"]
    assert list(inspect.signature(type(results)._on_queue_feeder_error).parameters) == ["e", "obj"]


@part("_reset_state", "_shared_state", "_is_accelerate_prepared", "_original_forward")
def _():
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    prepared = Accelerator(cpu=True, mixed_precision="bf16").prepare_model(nn.Linear(2, 1))
    assert prepared._is_accelerate_prepared and "_original_forward" in vars(prepared)
    AcceleratorState._reset_state()
    GradientState._reset_state()
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == "no"
    assert PartialState._shared_state["num_processes"] == 1


@part("_optimizer_original_step_method", "_optimizer_patched_step_method")
def _():
    from accelerate import optimizer

    code = inspect.getsource(optimizer.AcceleratedOptimizer)
    assert "self._optimizer_original_step_method = self.optimizer.step" in code
    assert "self._optimizer_patched_step_method = patch_optimizer_step(self, self.optimizer.step)" in code


@part("_actions", "_option_string_actions")
def _():
    parser = argparse.ArgumentParser()
    action = parser.add_argument("--flag")
    assert parser._actions[-1] is action and parser._option_string_actions["--flag"] is action


@part("_distributed", "_fingerprint")
def _():
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    rows = datasets.Dataset.from_dict({"a": [1, 2]})
    assert rows._fingerprint == datasets.Dataset.from_dict({"a": [1, 2]})._fingerprint
    assert split_dataset_by_node(rows.to_iterable_dataset(), rank=0, world_size=2)._distributed.world_size == 2


@part("_compute_score_from_stats", "_extract_corpus_statistics")
def _():
    BLEU = pytest.importorskip("sacrebleu").BLEU
    scorer, texts, references = BLEU(), ["a b c d e"], [["a b c d f"]]
    (row,) = scorer._extract_corpus_statistics(texts, references)
    assert scorer._compute_score_from_stats(row).score == scorer.corpus_score(texts, references).score


@part("_model_mapping", "_from_model_config", "_keys_to_ignore_on_save")
def _():
    transformers = pytest.importorskip("transformers")
    assert "model.encoder.embed_positions.weight" in transformers.MarianMTModel._keys_to_ignore_on_save
    assert transformers.BertConfig in transformers.AutoModelForMaskedLM._model_mapping
    assert transformers.GenerationConfig.from_model_config(transformers.T5Config())._from_model_config is True


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_a_private_part_is_as_it_was(name):
    check_part = CHECKS[name]
    check_part()
