"""A dataset that tells who reads it; here, because workers import the module that has it."""

import os

import torch


class ProcessIds(torch.utils.data.Dataset[int]):
    """As many examples as asked for; each is the id of the process that reads it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return os.getpid()
