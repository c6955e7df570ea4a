"""Make a hand-written loop resumable: its objects are saved together, and restored together or not at all.

    with ResumableState(Checkpointing("checkpoints", every_updates=100), model, optimizer=optimizer) as state:
        values = state.restore() or {"update": 0}
        for update in range(values["update"] + 1, 1001):
            ...  # forward, backward, optimizer step
            if state.is_due(update):
                state.save(update, {"update": update})
        state.save(1000, {"update": 1000}, wait=True)

For single-process loops, which own the folder while they run. `Trainer.train(checkpoints=Checkpointing(...))` writes
the same kind of folder with more in it.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from loopwright.checkpoint.fingerprint import differences, fingerprint, tier
from loopwright.checkpoint.hidden_state import HiddenState, changed_modules, describe_modules
from loopwright.checkpoint.saver import Captured, Checkpointing, Saver
from loopwright.checkpoint.state_by_name import fitted_state, optimizer_state, parameter_names
from loopwright.checkpoint.store import Checkpoint, find_newest, read, refusing_damage
from loopwright.engine.seeding import generator_states, restore_generator_states
from loopwright.engine.sharding import buffer_shapes, load_weights, whole_state
from loopwright.errors import CheckpointError, ConfigError, ConfigTypeError
from loopwright.run_folder import Lease

# Settings that only a Trainer implements; a hand-written loop has to handle them itself.
_OF_THE_TRAINER = ("every_epochs", "run_folder", "allow_changed_data", "allow_changed_model", "require_exact")

_logger = logging.getLogger("loopwright")


class _Stateful(Protocol):
    """An optimizer, scheduler, scaler, module, or your own class with a state of tensors and plain values."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


class ResumableState:
    """The model of a hand-written loop, and all other state that it needs to resume.

    It saves the weights, the state of every part (an optimizer's by parameter name), changed attributes of
    modules, the global random generators, and the values given to `save`. As a context manager it closes itself.

    Args:
        policy: where and how often to save, and how much to keep. Settings that only a Trainer implements are refused.
        model: its weights become model.safetensors.
        lease: of the run folder. `is_due` renews it, and every commit checks it, so that a process presumed dead cannot
            overwrite anything. Without it the caller ensures that no other process writes there.
        parts: everything else with a state, by names that stay the same when the run is resumed.

    Raises:
        ConfigError: the policy needs a Trainer, or a part has no state.
    """

    def __init__(
        self, policy: Checkpointing, model: nn.Module, *, lease: Lease | None = None, **parts: _Stateful
    ) -> None:
        if refused := [name for name in _OF_THE_TRAINER if getattr(policy, name)]:
            raise ConfigError(
                f"Checkpointing({refused[0]}={getattr(policy, refused[0])!r}) is for Trainer.train. Leave it out; to "
                "save at the end of an epoch, call save() there."
            )
        for name, part in parts.items():
            if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise ConfigTypeError(
                    f"ResumableState cannot save {name}: a {type(part).__name__} has no state_dict() and "
                    "load_state_dict(). Pass plain values to save() instead."
                )
        self._policy = policy
        self._model = model
        self._lease = lease
        self._parts = parts
        self._tree, self._buffers = describe_modules(model=model, **parts), buffer_shapes(model)
        self._hidden = HiddenState(model=model, **parts)
        self._run_id = uuid.uuid4().hex[:12]
        self._fingerprint: dict[str, Any] = {}
        self._saver: Saver | None = None

    def restore(self) -> dict[str, Any] | None:
        """Load the newest good checkpoint; called once, by the owner of the folder, before the first update.

        Damaged checkpoints are moved aside with a warning, partial ones are removed.

        Returns:
            The values passed to `save` with it. None if there is no checkpoint; then nothing changes.

        Raises:
            CheckpointError: no checkpoint is intact, or the newest is of another model or loop. The run must then end,
                since its state may be partly loaded.
        """
        if self._saver is not None:
            raise ConfigError("restore() was called twice; call it once, before the first update")
        path, problems = find_newest(self._policy.directory, quarantine=True)
        for problem in problems:
            _logger.warning("skipping a damaged checkpoint: %s", problem)
        self._fingerprint = fingerprint(self._device())
        values = None
        if path is not None:
            checkpoint = read(path)
            with refusing_damage(path):
                values = self._load(path, checkpoint)
        is_ours = (lambda: True) if self._lease is None else self._lease.still_ours
        self._saver = Saver(self._policy, self._run_id, path, is_ours=is_ours)
        self._saver.expect(self._weights())
        return values

    def is_due(self, update: int) -> bool:
        """Return whether a save is due after this update; called after every one.

        Raises:
            CheckpointError: two saves in a row have failed. A single failure is only logged.
            LeaseError: another process took the run folder over; the loop must end without writing anything.
        """
        if self._lease is not None:
            self._lease.heartbeat()
        self._poll()
        return self._started().is_due_after_update(update)

    def save(self, update: int, values: Mapping[str, Any], *, wait: bool = False) -> None:
        """Save everything as it is now; called between two updates, where no gradients are held.

        Training waits for a copy to host memory, and continues while it is written.

        Args:
            update: updates finished; it names the checkpoint and decides which one is the newest.
            values: returned by `restore`; also searched for the metric of the policy's `keep_best`.
            wait: return when the checkpoint is committed; for the last save of a run.

        Raises:
            CheckpointError: a weight is not finite, a value cannot be saved, or writing failed twice in a row (once
                with `wait`).
        """
        saver = self._started()
        self._poll()
        self._check_weights(update)
        metadata = {"fingerprint": self._fingerprint}
        saver.save(lambda: self._capture(values), update, values, metadata=metadata, must_happen=wait)
        if wait:
            saver.finish()
            if saver.refusals:
                raise CheckpointError(saver.refusals.pop(0))

    def close(self) -> None:
        """Wait for a save in flight, and raise a CheckpointError if it failed; called however the loop ends."""
        if self._saver is not None:
            self._saver.finish()

    def __enter__(self) -> ResumableState:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self.close()
        except CheckpointError as problem:
            if kind is None:
                raise
            _logger.warning("the last save failed: %s", problem)  # the error that ended the loop matters more

    def _started(self) -> Saver:
        if self._saver is None:
            raise ConfigError("call restore() before is_due() and save(), also for a new run")
        return self._saver

    def _poll(self) -> None:
        saver = self._started()
        earlier = saver.last_error
        saver.poll()
        while saver.refusals:
            _logger.warning(saver.refusals.pop(0))
        if saver.last_error is not None and saver.last_error is not earlier:
            _logger.warning("saving failed and is retried at the next save: %s", saver.last_error)

    def _capture(self, values: Mapping[str, Any]) -> Captured:
        weights, names = self._weights(), self._names()
        hidden, lost, _ = self._hidden.changed()
        state = {
            "run_id": self._run_id,
            "model_extra": {name: value for name, value in whole_state(self._model).items() if name not in weights},
            "classes": self._classes(),
            "parts": {
                name: optimizer_state(part, names) if isinstance(part, torch.optim.Optimizer) else part.state_dict()
                for name, part in self._parts.items()
            },
            "generators": generator_states(self._device()),
            "modules": self._tree,
            "buffers": self._buffers,
            "hidden": hidden,
            "lost": lost,
            "values": dict(values),
        }
        return weights, state, {}

    def _weights(self) -> dict[str, torch.Tensor]:
        entries = self._model.state_dict()
        return {name: value for name, value in entries.items() if isinstance(value, torch.Tensor)}

    def _load(self, path: Path, checkpoint: Checkpoint) -> dict[str, Any]:
        state = checkpoint.state
        if "parts" not in state:
            raise CheckpointError(
                f"{path} was not saved by a ResumableState. Choose another folder; to resume a run of a Trainer, call "
                "train(resume_from=...)."
            )
        if state["classes"] != self._classes():
            raise CheckpointError(
                f"{path} is from another loop: it holds {_listed(state['classes'])}, and this loop has "
                f"{_listed(self._classes())}. Pass the same parts to resume it."
            )
        built, hidden = state["buffers"], state["hidden"]
        fixed = [name for name, shape in buffer_shapes(self._model).items() if built.get(name, shape) != shape]
        try:
            load_weights(self._model, {**checkpoint.model, **state["model_extra"]}, fixed=fixed)
        except RuntimeError as error:
            raise CheckpointError(f"{path} is from another model. {' '.join(str(error).split())}") from None
        refused, changed = changed_modules(state["modules"], self._tree, hidden)
        if refused:
            raise CheckpointError(f"the model is not built like the one in {path}: {refused[0]}. Build it as before.")
        for name, part in self._parts.items():
            if isinstance(part, torch.optim.Optimizer):
                part.load_state_dict(fitted_state(part, state["parts"][name], self._names()))
            else:
                # Some schedulers take `load_state_dict` as the start of a new run.
                getattr(part, "resume_state_dict", part.load_state_dict)(state["parts"][name])
        restore_generator_states(state["generators"], self._device())
        for name in (*map(str, changed), *self._hidden.restore(hidden, self._device()), *state["lost"]):
            _logger.warning("not as in the saved loop, so that the results may differ: %s", name)
        self._run_id = state["run_id"]
        saved, current = checkpoint.about["fingerprint"], self._fingerprint
        if tier(saved, current, is_counted=False) != "T0":
            changes = "; ".join(map(str, differences(saved, current)))
            _logger.warning("sums may round differently from here on: %s", changes)
        values: dict[str, Any] = state["values"]
        return values

    def _classes(self) -> dict[str, str]:
        return {name: type(part).__name__ for name, part in self._parts.items()}

    def _names(self) -> dict[int, str]:
        return parameter_names(model=self._model, **self._parts)

    def _device(self) -> torch.device:
        parameter = next(self._model.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    def _check_weights(self, update: int) -> None:
        weights = {name: weight.detach() for name, weight in self._model.named_parameters()}
        flags = [weight.isfinite().all().to(self._device()) for weight in weights.values()]
        is_finite = torch.stack(flags).tolist() if flags else []  # one device sync, however many weights there are
        if not all(is_finite):
            name = list(weights)[is_finite.index(False)]
            raise CheckpointError(
                f"not saving update {update}: {name} is not finite. The checkpoints in {self._policy.directory} are "
                "from earlier updates."
            )


def _listed(classes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} ({kind})" for name, kind in sorted(classes.items())) or "no parts"
