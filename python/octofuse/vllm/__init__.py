"""This library's kernels inside vLLM, which finds `register` by its entry point group `vllm.general_plugins`.

vLLM asks the kernels of a list, in its order, for a layer, and registering appends to the list. OCTOFUSE_VLLM=first in the
environment puts these kernels in front of vLLM's own instead, and OCTOFUSE_VLLM=off leaves vLLM alone.
"""

from __future__ import annotations

import logging
import os

WORDS = ("last", "first", "off")

_log = logging.getLogger(__name__)


def register() -> None:
    """Register linears in int8, in FP8 and with weights of 2, 4 or 8 bits, in every process of vLLM.

    ValueError for a word in OCTOFUSE_VLLM that means nothing; a vLLM with another interface gets a warning and no kernels.
    """
    place = os.environ.get("OCTOFUSE_VLLM", "last")
    if place not in WORDS:
        raise ValueError(f"OCTOFUSE_VLLM: expected {', '.join(WORDS)}, got {place!r}")
    if place == "off":
        return
    try:
        from octofuse.vllm.kernels import register_in

        register_in(first=place == "first")
    except Exception as error:  # vLLM must start all the same
        _log.warning(
            "octofuse registers no kernels: this vLLM has another interface (%s: %s)", type(error).__name__, error
        )
