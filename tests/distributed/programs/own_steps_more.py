"""More models with steps of their own than own_steps has: own_steps_more.py OUT."""

from __future__ import annotations

from typing import Any

from facts import leave
from own_steps import ARRAYS, BATCH, RANK, RECORDS, like_fit, resumed, train

drawn = "model={name: user_steps:vae, options: {draws: true}}"
facts: dict[str, Any] = {
    # A rank without records would add the row that it computes instead to what is gathered.
    "contrastive": like_fit("contrastive", "data.drop_remainder=true", records=RECORDS // BATCH * BATCH),
    "pairs": like_fit("pairs", "optimizer=adam", "lr_schedule.base_lr=0.01"),
    "apart": train(
        "contrastive",
        "apart",
        "model={name: user_steps:contrastive, options: {gathers: false}}",
        "data.drop_remainder=true",
    ),
    "drawing": train("vae", "drawing", drawn, "train.ema_decay=0.9"),
    "drawing resumed": resumed("vae", drawn, "train.ema_decay=0.9"),
    # With weights only, `fit` hands over none: a target has to be there.
    "weighted": like_fit(
        "wgan",
        *("data.weight=importance", "data.targets=[importance]"),
        into="weighted",
        fit={"y": ARRAYS["importance"], "sample_weight": ARRAYS["importance"]},
    ),
    "compressed": train("wgan", "compressed", "horovod.compression=bf16"),
    "diverging": train("wgan", "diverging", "model={name: user_steps:wgan, options: {spoils: true}}"),
}
leave(RANK, facts)
