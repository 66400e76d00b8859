"""Computes rows in coroutines."""

import asyncio

import torch


async def _part(x):
    await asyncio.sleep(0)
    return torch.softmax(x, -1)


async def _whole(x):
    return torch.cat(await asyncio.gather(*map(_part, x.split(2))))


def softmax(x):
    return asyncio.run(_whole(x))
