"""`LightningCallback`: marks a Lightning Trainer's evaluation and epochs, and logs the ledger's figures.

    from headway.integrations import LightningCallback
    trainer = Trainer(callbacks=[LightningCallback()])
    trainer.fit(model, loader)

The figures go to all of the trainer's loggers: TensorBoard, W&B, MLflow, CSV.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch.callbacks import Callback

from headway.integrations.trainer_report import TrainerReport


class LightningCallback(Callback):  # type: ignore[misc]  # Lightning is the user's, not ours
    """Marks evaluation and epochs; logs step time, goodput and losses (`headway/...`) to the trainer's loggers."""

    def __init__(self, *, every_s: float = 10.0) -> None:
        """Log figures every `every_s` seconds."""
        self._report = TrainerReport(every_s=every_s)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Begin to take figures."""
        self._report.begin()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Mark the epoch."""
        self._report.epoch(trainer.current_epoch)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_index: int) -> None:
        """Log figures when new ones are there."""
        self._log(trainer, self._report.take())

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        """Begin a mark; the sanity check before training is one, too."""
        self._report.begin_evaluation()

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """End the mark."""
        self._report.end_evaluation()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    def on_train_end(self, trainer: Any, module: Any) -> None:
        """Log the last figures."""
        self._log(trainer, self._report.end())

    def _log(self, trainer: Any, values: dict[str, float]) -> None:
        """Hand `values` to each logger; Lightning lets only rank 0's write."""
        if values:
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)
