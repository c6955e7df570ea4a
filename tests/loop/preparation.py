"""A trainer whose preparation is the user's own."""

from loopwright import Trainer


class OwnPreparation(Trainer):
    """Lets accelerate prepare everything, as trainers on it do: the loaders too, which then share out samples."""

    def _prepare_model_optimizer_and_dataloaders(self):
        self._accelerator.free_memory()
        self._accelerator = self._create_accelerator()
        self.model, self.optimizer = self._accelerator.prepare(self.model, self.optimizer)
        for name in ("_train_dataloader", "_eval_dataloader"):
            if getattr(self, name) is not None:
                setattr(self, name, self._accelerator.prepare(getattr(self, name)))
