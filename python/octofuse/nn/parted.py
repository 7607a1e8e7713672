"""A tensor that lies in parts on the ranks of a parallel model until somebody reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from octofuse.ops import gated_activation
from octofuse.ops._calls import RowsCall, Scale
from octofuse.ops.activations import Activation
from octofuse.ops.rows import by_call as rows

if TYPE_CHECKING:
    from octofuse.nn.norm import Norm


MANY = 1 << 16  # elements of the widest part from which it pays to quantise parts before they travel


class Joint(Protocol):
    """How parts become a whole, the same on all ranks; all of them make the same calls in the same order.

    adds: whether a part has all columns, and parts are summands; else it has some columns, in the ranks' order.
    """

    @property
    def adds(self) -> bool: ...

    @property
    def widest(self) -> int:
        """Columns of the widest part: ranks decide by what is the same on all."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def beside(self, x: Tensor) -> Tensor:
        """x of every rank, all of one shape, `[ranks, ...]`."""

    def rows(self, call: RowsCall) -> list[Tensor] | None:
        """`ops.rows` of the whole, of which call.x is this rank's part, in one kernel; None where there is none for it, on
        all ranks. The norm of a sum gives the sum as well, as its last result."""


class Parted:
    """part: this rank's. gate: part holds gates and values `[..., 2K]`, of which the products count. Reading joins the
    parts; so every rank has to read, in the same way.
    """

    def __init__(self, part: Tensor, joint: Joint, *, gate: Activation | None = None) -> None:
        self.part, self.joint, self.gate = part, joint, gate
        self._whole: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    @property
    def tokens(self) -> int:
        return self.part.numel() // max(1, self.part.shape[-1])

    def whole(self) -> Tensor:
        """Joined once, for all who ask."""
        if self._whole is None:
            self._whole = self._joined()
        return self._whole

    def floating(self, norm: Norm | None) -> tuple[Tensor, Norm | None]:
        """norm(whole), and None; or the whole and its norm, where no single kernel joins and normalises."""
        if norm is not None and self._whole is None:
            found = self.joint.rows(self._call(norm, quantize=False))
            if found is not None:
                return self._without_sum(found, norm)[0], None
        return self.whole(), norm

    def quantised(self, norm: Norm | None, scale: Scale | None, dtype: torch.dtype) -> tuple[Tensor, Scale] | None:
        """norm(whole) in 8 bits, and its scale: the given one, or fp32 `[M, 1]`; None where that saves nothing."""
        if self._whole is not None or self.dtype == dtype:
            return None
        found = self.joint.rows(self._call(norm, quantize=True, scale=scale, dtype=dtype))
        if found is None:
            if self.joint.adds or norm is not None:
                return None
            return self._quantised_before(scale, dtype) if self.tokens * self.joint.widest >= MANY else None
        q, *scales = self._without_sum(found, norm)
        return q, scale if scale is not None else scales[0]

    def _quantised_before(self, scale: Scale | None, dtype: torch.dtype) -> tuple[Tensor, Scale]:
        """By every rank its part, so that 8 bits travel. A row's scale is the largest of its parts'."""
        call = self._call(None, quantize=True, scale=scale, dtype=dtype)
        if scale is None:
            of_part = rows(call._replace(of_part=True))[1]
            scale = self.joint.beside(of_part).amax(0)  # 0 of zeros, whose products are 0 as well
        return self.joint(rows(call._replace(scale=scale, of_part=True, constants=False))[0]), scale

    def at(self, numbers: Tensor) -> Parted:
        """Some of its rows, by their numbers."""
        some = Parted(self.part[numbers], self.joint, gate=self.gate)
        some._whole = None if self._whole is None else self._whole[numbers]
        return some

    def _joined(self) -> Tensor:
        if self.gate is None:
            return self.joint(self.part)
        found = self.joint.rows(self._call(None, quantize=False))
        return self.joint(gated_activation(self.part, self.gate, constants=True)) if found is None else found[0]

    def _call(
        self, norm: Norm | None, *, quantize: bool, scale: Scale | None = None, dtype: torch.dtype = torch.int8
    ) -> RowsCall:
        op, weight, bias, eps = ("copy", None, None, 0.0) if norm is None else norm
        if self.gate is not None:
            op = "gated_activation"
        return RowsCall(self.part, op, None, weight, bias, eps, self.gate, quantize, scale, True, q_dtype=dtype)

    def _without_sum(self, found: list[Tensor], norm: Norm | None) -> list[Tensor]:
        if norm is None or not self.joint.adds:
            return found
        self._whole = found[-1]
        return found[:-1]


def whole(x: Tensor | Parted) -> Tensor:
    return x.whole() if isinstance(x, Parted) else x
