"""`KerasCallback`: marks evaluation and epochs of `model.fit` (Keras 3 on torch), and logs the ledger's figures.

    from headway.integrations import KerasCallback
    callbacks = [KerasCallback(), keras.callbacks.TensorBoard("logs")]
    model.fit(x, y, callbacks=callbacks)

The figures are added to the epoch's `logs`, where the callbacks after this
one find them: History, TensorBoard, CSVLogger, W&B's and MLflow's.
"""

from __future__ import annotations

from typing import Any

import keras

from headway.integrations.trainer_report import TrainerReport


class KerasCallback(keras.callbacks.Callback):  # type: ignore[misc]  # Keras is the user's, not ours
    """Marks evaluation and epochs; adds step time, goodput and losses (`headway/...`) to the logs of each epoch."""

    def __init__(self, *, every_s: float = 10.0) -> None:
        """Take figures every `every_s` seconds."""
        super().__init__()
        self._report = TrainerReport(every_s=every_s)
        self._known: dict[str, float] = {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin to take figures."""
        self._report.begin()
        self._known = {}

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Mark the epoch."""
        self._report.epoch(epoch)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Begin a mark."""
        self._report.begin_evaluation()

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """End the mark."""
        self._report.end_evaluation()

    on_predict_begin, on_predict_end = on_test_begin, on_test_end

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the newest figures to the epoch's logs."""
        self._report.ask()
        self._known |= self._report.take()
        if logs is not None:
            logs.update(self._known)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Stop taking figures."""
        self._report.end()
