"""Compiled updates on two processes, which see batches of different sizes."""

from graphs.test_compiled_parts import LENGTHS, CompiledTrainer, trained
from loopwright.training.run import run_of

from .launcher import launch


def train() -> dict:
    trainer = trained(LENGTHS, CompiledTrainer, backend="eager")
    run = run_of(trainer)
    weights = [each.tolist() for each in trainer.model.parameters()]
    return {"weights": weights, "tier": run.checkpoints.metadata["tier"], "dynamic": run.recordings.is_dynamic}


def test_two_processes_compile_for_their_own_sizes_and_keep_the_same_weights(tmp_path):
    first, second = launch(train, tmp_path, timeout_seconds=120)
    assert first["weights"] == second["weights"]
    assert first["tier"] == second["tier"] == "T2"  # a resumed run may compile for other sizes on rank 1
    assert first["dynamic"]
