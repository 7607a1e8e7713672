"""When a call may go straight to `_C`, and when it must go through torch's dispatcher."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# Types whose value `_C` may see as it is; every other tensor type has to meet the dispatcher first.
_PLAIN = frozenset((Tensor, Parameter, type(None), float, int, bool, str, torch.dtype))


def goes_direct(*arguments: Any) -> bool:
    """True for eager calls in which every tensor is a plain one.

    Under torch.compile or export, inside a dispatch or function mode, and for fake tensors and other subclasses the
    dispatcher has to see the call: DLPack would hand out their memory, or garbage, without a word.
    """
    if torch.compiler.is_compiling():
        return False
    if not _PLAIN.issuperset(map(type, arguments)):
        for argument in arguments:
            if type(argument) not in _PLAIN and isinstance(argument, Tensor):
                return False
    return not (torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def refuse_gradients(op: str, /, **tensors: Any) -> None:
    """There is no backward: a tensor that wants a gradient would lose it silently."""
    if not torch.is_grad_enabled():
        return
    for name, tensor in tensors.items():
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor that needs no gradient, got requires_grad=True; {op} has no backward "
                f"(detach it or call under torch.no_grad())"
            )


def dtype_name(dtype: Any, argument: str = "out_dtype") -> str:
    """The name by which selection and tuning know a torch dtype: as torch prints it, without the prefix."""
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{argument}: expected torch.dtype, got {type(dtype).__name__}")
    return str(dtype).removeprefix("torch.")


def as_tensor(name: str, scale: Any, like: Tensor) -> Any:
    """Dispatched ops take scales as tensors; a Python number becomes one, checked as `_C` checks it."""
    if not isinstance(scale, (int, float)) or isinstance(scale, bool):
        return scale
    if not 0 < scale <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name}: expected a finite number above 0, got {scale}")
    return torch.full((), float(scale), dtype=torch.float32, device=like.device)


def as_int_tensor(name: str, value: Any, like: Tensor) -> Any:
    """The same for an int8 zero point."""
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if not -128 <= value <= 127:
        raise ValueError(f"{name}: expected an int in [-128, 127], got {value}")
    return torch.full((), value, dtype=torch.int32, device=like.device)
