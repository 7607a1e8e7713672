# The compiled module. Tensors in and out; for CPU tensors the ops check their arguments and return None.

from typing import Any

from torch import Tensor

# bind_gemm.cpp
def linear(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | float,
    w_scale: Tensor | float,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: str,
    out_scale: Tensor | float | None,
    engine: str,
    out: Tensor | None,
    x_zero_point: Tensor | int | None,
    w_sum: Tensor | None,
    constant_weight: bool,
) -> Tensor | None: ...
def matmul(x: Tensor, w: Tensor, alpha: float | None, engine: str, out: Tensor | None) -> Tensor | None: ...
def select(
    m: int,
    n: int,
    k: int,
    out_dtype: str,
    raw: bool,
    double_activation: bool,
    engine: str,
    compute_capability: int,
    sm_count: int,
    cublaslt: bool,
    tuned: list[tuple[int, int, int, str, str]] = ...,
) -> dict[str, Any]: ...
def estimates(m: int, n: int, k: int, out_dtype: str, raw: bool, device: int) -> list[tuple[str, float]]: ...
def features(m: int, n: int, k: int, sm_count: int) -> dict[str, list[float]]: ...
def set_tuned(device: int, entries: list[tuple[int, int, int, str, str]]) -> None: ...
def prefer_cublaslt(m: int, n: int, k: int, int8_output: bool, algorithm: int, device: int) -> bool: ...
def candidates() -> list[str]: ...
def tune_cublaslt(x: Tensor, w: Tensor, int8_output: bool) -> list[tuple[int, float]]: ...

# bind_lowbit.cpp
def lowbit_linear(
    x: Tensor,
    x_scale: Tensor | float | None,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    kind: str,
    bits: int,
    group: int | None,
    activation: str | None,
    residual: Tensor | None,
    constant_weight: bool,
) -> Tensor | None: ...
def lowbit_dequantize(
    packed: Tensor, scale: Tensor, zero: Tensor | None, kind: str, bits: int, group: int | None, k: int
) -> Tensor | None: ...

# bind_decode.cpp
def quantized_linear(
    x: Tensor,
    w: Tensor,
    w_scale: Tensor | float,
    bias: Tensor | None,
    x_scale: Tensor | float | None,
    norm: str | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: str,
    out_scale: Tensor | float | None,
    constant_weight: bool,
) -> Tensor | None: ...
def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    parts: Tensor,
    arrivals: Tensor,
    scale: Tensor | float | None,
) -> Tensor: ...
def attend_parts(batch: int, heads: int, head_size: int, capacity: int) -> int: ...
def embed(ids: Tensor, places: Tensor, tokens: Tensor, positions: Tensor) -> Tensor: ...
def takes_logits(k: int, device: int) -> bool: ...
def logits(x: Tensor, w: Tensor) -> Tensor: ...
def choose(logits: Tensor, ids: Tensor, history: Tensor, counts: Tensor, places: Tensor, advance: bool) -> None: ...

# bind_layout.cpp
def to_layout(matrix: Tensor, layout: str, engine: str) -> Tensor: ...
def from_layout(data: Tensor, layout: str, rows: int, cols: int, engine: str) -> Tensor: ...
def quantize_col32(x: Tensor, scale: Tensor | float | None) -> tuple[Tensor, Tensor | None]: ...
def dequantize_col32(q: Tensor, rows: int, cols: int, scale: Tensor | float, out_dtype: str) -> Tensor: ...
def linear_col32(
    x: Tensor,
    w: Tensor,
    sizes: list[int],
    x_scale: Tensor | float | None,
    w_scale: Tensor | float | None,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: str,
    out_scale: Tensor | float | None,
    out_layout: str,
) -> Tensor: ...
def matmul_ordered(
    x: Tensor, w: Tensor, sizes: list[int], layouts: list[str], alpha: float | None, algorithm: int
) -> Tensor: ...
def cublaslt_algorithms(sizes: list[int], layouts: list[str], int8_output: bool, device: int) -> int: ...

# bind_quantize.cpp
def quantize_per_tensor(x: Tensor, scale: Tensor | float) -> Tensor | None: ...
def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor] | None: ...
def rows(
    x: Tensor,
    op: str,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str | None,
    quantize: bool,
    scale: Tensor | float | None,
) -> list[Tensor] | None: ...
def dequantize(q: Tensor, scale: Tensor | float, out_dtype: str) -> Tensor | None: ...

# bind_device.cpp
def build_info() -> dict[str, Any]: ...
def cublaslt_info() -> dict[str, Any]: ...
def allow_overlap(allowed: bool) -> bool: ...
def device_info(device: int) -> dict[str, Any]: ...
