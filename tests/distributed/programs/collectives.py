"""What the group's collectives and the exchange of gradients give on this rank."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
from facts import leave, rel_error

from horovod_train.config.settings import DeviceConfig, HorovodConfig
from horovod_train.distributed import consistency, horovod_info, objects
from horovod_train.distributed.optimizer import GradientExchange
from horovod_train.distributed.start import start
from horovod_train.distributed.sync_batch_norm import synchronise_batch_norm
from horovod_train.errors import FailedElsewhere, RanksDisagree, RunError, UserError

group = start(HorovodConfig(), DeviceConfig(), environment={"HOROVOD_DYNAMIC_PROCESS_SETS": "1"})
rank, size = group.rank, group.size
everyone = range(size)
facts: dict[str, Any] = {"rank": rank, "size": size, "exchange": group.exchange, "launcher": group.launcher}

facts["sum"] = [part.tolist() for part in group.sum([rank + 1, [[1.0, rank], [2.0, 3.0]]])]
facts["sum_counts_exactly"] = group.sum([2**53 - 1 if rank == 0 else 0])[0] == 2**53 - 1
facts["are_sums_of_group"] = horovod_info.are_sums_of_group(horovod_info.sums_of_group(rank), size)
facts["group_problem"] = horovod_info.group_problem(group)
facts["average"] = group.average([float(rank)])[0]
facts["gather"] = group.gather({"rank": rank})
facts["broadcast_object"] = group.broadcast_object(f"from {rank}")
of_each = group.gather((np.arange(float(rank)), b"x" * rank))  # of other lengths on each rank, empty on root
facts["gathered_bytes"] = [(array.tolist(), data.decode()) for array, data in of_each]
try:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objects, "MAX_BYTES", 10)
        group.gather("more than 10 bytes")
except RunError as error:
    facts["too_large"] = str(error)
numbers = np.arange(12.0).reshape(4, 3) + 100 * rank
facts["to_root"] = group.to_root(numbers).tolist()
with pytest.MonkeyPatch.context() as patch:
    patch.setattr(objects, "MAX_BYTES", 20 * size)  # pieces that end within a number
    facts["to_root_in_pieces"] = group.to_root(numbers).tolist()
variable = tf.Variable([float(rank), 7.0])
group.broadcast([variable])
facts["broadcast"] = variable.numpy().tolist()

rng = [np.random.default_rng(r) for r in everyone]
gradients = [generator.normal(size=(5, 3)).astype(np.float32) for generator in rng]
mine, mean = tf.constant(gradients[rank]), np.mean(gradients, axis=0)
facts["exchange_errors"] = {
    name: rel_error(GradientExchange(op, compression)(mine, f"{op}.{compression}").numpy(), expected)
    for name, op, compression, expected in [
        ("average", "average", "none", mean),
        ("sum", "sum", "none", np.sum(gradients, axis=0)),
        ("fp16", "average", "fp16", mean),
        ("bf16", "average", "bf16", mean),
    ]
}
facts["exchange_errors"]["predivided"] = rel_error(
    GradientExchange("average", "none", predivide=4.0)(mine, "predivided").numpy(), mean
)
parts = [list(range(size // 2)), list(range(size // 2, size))] if size > 1 else []
for part, ranks in zip(parts, [hvd.add_process_set(part) for part in parts], strict=True):
    if rank in part:
        averaged = GradientExchange("average", "none", ranks=ranks)(mine, "half").numpy()
        facts["of_half"] = rel_error(averaged, np.mean([gradients[other] for other in part], axis=0))
# Two rows that each rank has twice and all ranks have, and one that only this one has.
rows = tf.IndexedSlices(mine, tf.constant([0, rank + 2, 0, 1, 1]), tf.constant([size + 2, 3]))
gathered = GradientExchange("average", "none")(rows, "sparse")
dense = GradientExchange("average", "none", sparse_as_dense=True)(rows, "sparse_as_dense")
facts["sparse_stays_sparse"] = isinstance(gathered, tf.IndexedSlices)
facts["sparse_equals_dense"] = rel_error(tf.convert_to_tensor(gathered), dense)
facts["sparse_rows"] = gathered.indices.numpy().tolist()


def sha(values: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


# The same bits whatever exchanges; an odd length, so that the slices of the ranks are filled up.
values = np.random.default_rng(100 + rank).normal(size=1001).astype(np.float32)
in_order = dataclasses.replace(group, deterministic=True)
exchanges: dict[str, dict[str, Any]] = {
    "average": {"op": "average", "compression": "none"},
    "sum": {"op": "sum", "compression": "none"},
    "fp16": {"op": "average", "compression": "fp16"},
    "predivided": {"op": "average", "compression": "none", "predivide": 4.0},
}
everywhere = {
    name: GradientExchange(deterministic=True, **options)(tf.constant(values), f"in_order.{name}")
    for name, options in exchanges.items()
}
repeated = tf.IndexedSlices(tf.reshape(values, [143, 7]), tf.range(143) % 5, tf.constant([5, 7]))
everywhere["sparse"] = tf.convert_to_tensor(GradientExchange("sum", "none", deterministic=True)(repeated, "rows"))
everywhere["in a step"] = in_order.average_in_step(tf.constant(values), "in_order.step")
everywhere["of the group"] = in_order.sum([values / 3.0])[0]
layer = keras.layers.BatchNormalization(momentum=0.0)
synchronise_batch_norm(keras.Sequential([keras.Input((7,)), layer]), deterministic=True)
layer(values.reshape(143, 7), training=True)
everywhere["batch norm"] = tf.stack([layer.moving_mean.value, layer.moving_variance.value])
facts["bits"] = {name: sha(np.asarray(found)) for name, found in everywhere.items()}
facts["bits_of_allreduce"] = sha(GradientExchange("sum", "none")(tf.constant(values), "allreduce").numpy())
facts["in_order_error"] = rel_error(everywhere["sum"], group.sum([values])[0])

consistency.check(group, {"weight": "same"}, "now")
try:
    consistency.check(group, {"first": "same", "weight": "odd" if rank == size - 1 else "same"}, "at step 7")
    facts["disagreement"] = None
except RanksDisagree as error:
    facts["disagreement"] = str(error)

try:
    with group.raise_together():
        if rank == size - 1:
            raise UserError("file missing")
    facts["together"] = "went on"
except UserError as error:
    facts["together"] = f"own: {error}"
except FailedElsewhere as error:
    facts["together"] = f"elsewhere: {error.exit_code}"

leave(rank, facts)
group.close()
