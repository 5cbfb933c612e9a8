"""`TransformersCallback`: marks a Hugging Face Trainer's evaluation and epochs, and logs the ledger's figures.

    from headway.integrations import TransformersCallback
    trainer = Trainer(...)
    trainer.add_callback(TransformersCallback(trainer))

The figures go through `trainer.log`, and so to whatever `report_to` names:
TensorBoard, W&B, MLflow. Trainers derived from transformers' (TRL,
sentence-transformers) take the same callback.
"""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from headway.integrations.trainer_report import TrainerReport


class TransformersCallback(TrainerCallback):  # type: ignore[misc]  # transformers is the user's, not ours
    """Marks evaluation and epochs; logs step time, goodput and losses (`headway/...`) when the trainer logs."""

    def __init__(self, trainer: Any, *, every_s: float = 10.0) -> None:
        """Log through `trainer`; figures are at most `every_s` seconds old."""
        self._trainer = trainer
        self._report = TrainerReport(every_s=every_s)
        self._logging = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to take figures."""
        self._report.begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the epoch."""
        self._report.epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the evaluation that follows this step, if one does."""
        if control.should_evaluate:
            self._report.begin_evaluation()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark the evaluation that follows this epoch, if one does."""
        if control.should_evaluate:
            self._report.begin_evaluation()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mark an evaluation that the script asked for itself, from its first batch on."""
        self._report.begin_evaluation()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the mark."""
        self._report.end_evaluation()

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the mark."""
        self._report.end_evaluation()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the newest figures beside what the trainer just logged."""
        self._log(self._report.take())

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log the last figures."""
        self._log(self._report.end())

    def _log(self, values: dict[str, float]) -> None:
        """Log `values`; the trainer calls `on_log` again for these, which then has nothing to add."""
        if values and not self._logging:
            self._logging = True
            try:
                self._trainer.log(values)
            finally:
                self._logging = False
