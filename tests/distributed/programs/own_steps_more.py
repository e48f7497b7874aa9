"""More models with steps of their own than own_steps has: own_steps_more.py OUT."""

from __future__ import annotations

from typing import Any

from facts import leave
from own_steps import RANK, like_fit, resumed, train

drawn = "model={name: user_steps:vae, options: {draws: true}}"
facts: dict[str, Any] = {
    "contrastive": like_fit("contrastive"),
    "pairs": like_fit("pairs", "optimizer=adam", "lr_schedule.base_lr=0.01"),
    "apart": train("contrastive", "apart", "model={name: user_steps:contrastive, options: {gathers: false}}"),
    "drawing": train("vae", "drawing", drawn, "train.ema_decay=0.9"),
    "drawing resumed": resumed("vae", drawn, "train.ema_decay=0.9"),
    "weighted": train("wgan", "weighted", "data.weight=importance", "horovod.compression=bf16"),
    "diverging": train("wgan", "diverging", "model={name: user_steps:wgan, options: {spoils: true}}"),
}
leave(RANK, facts)
