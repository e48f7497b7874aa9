"""Feeds arrays from a Python thread into a TensorFlow queue. Does not know what the arrays are.

tf.data could call Python itself (from_generator, numpy_function), but its threads would then wait for an interpreter
that is shutting down, and the process would never end. Here TensorFlow never enters Python.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

HOST = "CPU:0"
"""The device on which data are read and decoded."""
_BATCHES_ON_DEVICE = 1
"""Batches that wait on the device of the steps, if it is not the host: device memory is scarce."""


def prefetch_to(data: tf.data.Dataset, device: str) -> tf.data.Dataset:
    """Return the batches on a device: the next batch is copied there while a step runs."""
    is_text = any(spec.dtype == tf.string for spec in tf.nest.flatten(data.element_spec))
    if device == HOST or is_text:  # other devices cannot hold strings
        return data
    return data.apply(tf.data.experimental.prefetch_to_device(device, _BATCHES_ON_DEVICE))


class Feed:
    """Enqueues the iterator's items, one item ahead. When the iterator ends or raises, the queue is closed."""

    def __init__(
        self,
        items: Iterator[Sequence[np.ndarray | tf.Tensor]],
        specs: Sequence[tf.TensorSpec],
        on_failure: Callable[[Exception], None],
    ) -> None:
        """Call `on_failure` with the error if the items end early; the reader of the queue only sees that it is closed.

        specs: of what each item holds.
        """
        self._items, self._specs, self._on_failure = items, specs, on_failure
        with tf.device("cpu:0"):
            self.queue = tf.queue.FIFOQueue(1, [spec.dtype for spec in specs])
        self._thread = threading.Thread(target=self._run, name="feed", daemon=True)

    def dataset(self, items: int) -> tf.data.Dataset:
        """Return this many items as elements; -1 for all. The thread ends with the dataset. Starts nothing."""
        data = tf.data.Dataset.range(2**62 if items < 0 else items)
        data = data.map(tf.autograph.experimental.do_not_convert(self._dequeue))
        # The thread must not outlive the dataset, nor wait on a full queue when the interpreter ends.
        weakref.finalize(data, self.stop)
        return data

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, even in the middle of an item. Safe to call at any time."""
        self.queue.close(cancel_pending_enqueues=True)

    def _run(self) -> None:
        with contextlib.suppress(tf.errors.CancelledError):  # stopped
            try:
                with tf.device("cpu:0"):
                    for item in self._items:
                        self.queue.enqueue(item)
            except tf.errors.CancelledError:
                raise
            except Exception as error:
                self._on_failure(error)
            finally:
                self.queue.close()

    def _dequeue(self, _: tf.Tensor) -> tuple[tf.Tensor, ...]:
        values = self.queue.dequeue()
        for value, spec in zip(values, self._specs, strict=True):
            value.set_shape(spec.shape)
        return tuple(values)
