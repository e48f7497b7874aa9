"""PyTorch's DistributedDataParallel over gloo. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which rank this is.

The images of a rank are one tensor, from which each batch is drawn: quicker than a DataLoader for images this small.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from horovod_train.commands.bench.peer_programs import timing


def build_model() -> nn.Module:
    """Build the layers of models/convnet.py: 3.3 million weights."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
        nn.ReLU(),
        nn.Linear(10, 10),
    )


def main() -> None:
    task = timing.read_task()
    torch.set_num_threads(task.threads)
    torch.distributed.init_process_group("gloo")
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), timing.LEARNING_RATE, momentum=timing.MOMENTUM, nesterov=True)
    images = torch.from_numpy(task.images[rank::size]).permute(0, 3, 1, 2)
    batches = _batches(images, torch.from_numpy(task.labels[rank::size]))

    def train() -> None:
        for _ in range(timing.STEPS_PER_CALL):
            drawn, labels = next(batches)
            optimizer.zero_grad(set_to_none=True)
            loss_of(model(drawn.float() * timing.SCALE + timing.OFFSET), labels).backward()
            optimizer.step()

    speed = timing.measure(train, task.steps, size)
    timing.write(task.out, rank, speed, [weight.detach().numpy() for weight in model.parameters()])
    torch.distributed.destroy_process_group()


def _batches(images: Any, labels: Any) -> Any:
    while True:
        order = torch.randperm(len(images))
        for rows in order[: len(order) // timing.BATCH * timing.BATCH].split(timing.BATCH):
            yield images[rows], labels[rows]


if __name__ == "__main__":
    main()
