"""Shared fixtures. Tests that need a CUDA device and the CUDA build carry the marker `gpu`."""

from __future__ import annotations

import pytest
import torch

from octofuse import _C

HAS_GPU = torch.cuda.is_available() and bool(_C.build_info()["cuda"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_GPU:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device and a CUDA build of octofuse")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(20261121)
