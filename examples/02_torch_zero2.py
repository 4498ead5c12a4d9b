"""Trains a PyTorch module with ZeRO-2: optimizer state, fp32 weights and gradients divided over the ranks.

    polyreme run -n 2 examples/02_torch_zero2.py

With equal --lanes, any number of ranks gives the same bits: every rank prints the same lines, as one alone does.
"""

import argparse

import polyreme as pr
import torch

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--lanes", type=int, default=4)
args = parser.parse_args()

world = pr.init()
dp = pr.Mesh(world)["dp"]
torch.manual_seed(world.rank)  # the optimizer makes all ranks start from rank 0's weights
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8)).bfloat16()

samples, lane = 64, 64 // args.lanes  # of a global batch, of one of its lanes
optimizer = pr.ShardedOptimizer(
    model.named_parameters(),
    dp,
    stage=2,
    rule=pr.AdamW(lr=pr.lr.warmup_cosine(peak=1e-2, warmup=5, total=args.steps), weight_decay=0.1),
    lanes=args.lanes,
    micro_batches=args.lanes // dp.size,
    clip_norm=1.0,
)
optimizer.attach()  # gradients are reduced while the backward pass goes on
teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
for step in range(1, args.steps + 1):
    inputs = torch.randn(samples, 32, generator=torch.Generator().manual_seed(step))
    targets = (inputs @ teacher).tanh()
    for i in range(dp.rank * args.lanes // dp.size, (dp.rank + 1) * args.lanes // dp.size):
        part = slice(i * lane, (i + 1) * lane)
        loss = (model(inputs[part].bfloat16()).float() - targets[part]).square().sum()
        loss.backward()
        is_last = i + 1 == (dp.rank + 1) * args.lanes // dp.size
        stats = optimizer.step(count=lane) if is_last else optimizer.accumulate(count=lane)
    if world.rank == 0 and step % 10 == 0:
        print(f"step {stats.step}: gradient norm {stats.grad_norm!r}", flush=True)
