"""Shows the run: the progress bar, and what TensorBoard shows besides scalars."""

from __future__ import annotations

from horovod_train.data.pipeline.batch import Batch
from horovod_train.training.run_record import Run
from horovod_train.training.steps.histograms import Summaries


def show_progress(run: Run, step: int) -> None:
    run.output.show_progress(step)


class ShowHistograms:
    def __init__(self, run: Run) -> None:
        train, step = run.parts.train, run.parts.train_step

        def first_batch() -> Batch:
            return train.scaled(next(train.batches(epoch=0, epochs=1)))

        self._summaries = Summaries(run.group, step, first_batch, train.size_of(0), run.config.log.activations)

    def __call__(self, run: Run, step: int) -> None:
        with run.outside_training("histograms"):
            run.output.tensorboard.add_histograms(step, self._summaries.compute())


def start_profile(run: Run, step: int) -> None:
    with run.outside_training("profile"):
        run.output.tensorboard.start_profile(step + 1)


def stop_profile(run: Run, step: int) -> None:
    with run.outside_training("profile"):
        run.output.tensorboard.stop_profile(step)
