"""Do the ranks train one model? Each fits a small net on its share of handwritten digits; then all are compared.

    horovodrun --gloo -np 2 python examples/averaging.py stock    import horovod.tensorflow.keras as hvd
    horovodrun --gloo -np 2 python examples/averaging.py          import horovod_train.keras as hvd

All ranks begin with the same weights, from a seed, because stock Horovod's broadcast callback raises under Keras 3. A
step's records are the same at any number of ranks. `--json FILE` also writes what each rank found, for picture.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

if "stock" in sys.argv[1:]:
    import horovod.tensorflow.keras as hvd
else:
    import horovod_train.keras as hvd

GLOBAL_BATCH, TRAIN_ROWS, EPOCHS = 64, 22 * 64, 20

hvd.init()
rank, size = hvd.rank(), hvd.size()

x, y = load_digits(return_X_y=True)
x = (x / 16.0).astype(np.float32)
train, held_out = (x[:TRAIN_ROWS], y[:TRAIN_ROWS]), (x[TRAIN_ROWS:], y[TRAIN_ROWS:])

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.2)), loss, metrics=["accuracy"], jit_compile=False)
share = [values[rank::size] for values in train]
history = model.fit(
    *share, batch_size=GLOBAL_BATCH // size, epochs=EPOCHS, shuffle=False, verbose=0, validation_data=held_out
).history

weights = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()[:12]
digests = hvd.allgather(tf.constant([int(weights, 16)])).numpy()
line = f"rank {rank}: weights {weights}, held-out loss {history['val_loss'][-1]:.4f}"
print(f"{line}, accuracy {history['val_accuracy'][-1]:.4f}", flush=True)
losses = hvd.allgather(tf.constant([history["val_loss"]])).numpy()
if rank == 0:
    name = "stock Horovod" if "stock" in sys.argv[1:] else "horovod_train"
    verdict = "one model" if len(set(digests)) == 1 else f"{len(set(digests))} models"
    print(f"{name}, Keras {keras.__version__}: {size} ranks trained {verdict}", flush=True)
    if "--json" in sys.argv:
        Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps(losses.tolist()))
