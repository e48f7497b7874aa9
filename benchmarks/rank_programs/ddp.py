"""PyTorch's DistributedDataParallel over gloo. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say which rank this is.

The records of a rank are one tensor, from which each batch is drawn: quicker than a DataLoader for records this small.
"""

from __future__ import annotations

from typing import Any

import torch
from rank_programs import timing
from torch import nn


def build_model(name: str) -> nn.Module:
    """Build the layers of models/convnet.py, 3.3 million weights, or of models/mlp.py."""
    if name == "mlp":
        return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 1))
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
    task = timing.read_task(["gloo"])
    torch.set_num_threads(task.threads)
    torch.distributed.init_process_group(task.way)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(1)
    model = nn.parallel.DistributedDataParallel(build_model(task.name), gradient_as_bucket_view=True)
    batch, _, rate, momentum = task.system
    loss_of = nn.BCEWithLogitsLoss() if task.name == "mlp" else nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=momentum, nesterov=bool(momentum))
    inputs = torch.from_numpy(task.inputs[rank::size])
    if inputs.ndim == 4:
        inputs = inputs.permute(0, 3, 1, 2)
    batches = _batches(inputs, torch.from_numpy(task.targets[rank::size]), batch)

    def train() -> None:
        for _ in range(task.system.steps_per_call):
            drawn, targets = next(batches)
            optimizer.zero_grad(set_to_none=True)
            if drawn.dtype == torch.uint8:
                drawn = drawn.float() * timing.SCALE + timing.OFFSET
            loss_of(model(drawn), targets).backward()
            optimizer.step()

    speed = timing.measure(train, task.system, task.steps, size)
    timing.write(task.out, rank, speed, [weight.detach().numpy() for weight in model.parameters()])
    torch.distributed.destroy_process_group()


def _batches(inputs: Any, targets: Any, batch: int) -> Any:
    while True:
        order = torch.randperm(len(inputs))
        for rows in order[: len(order) // batch * batch].split(batch):
            yield inputs[rows], targets[rows]


if __name__ == "__main__":
    main()
