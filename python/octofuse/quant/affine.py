"""Symmetric scales and the schemes that say where they sit. s = amax / 127 (float8: / 448), and 1 where amax is 0."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Literal

import torch
from torch import Tensor

from octofuse.quant.packing import row_parts
from octofuse.quant.weight_only import WeightOnly, weight_only_named
from octofuse.reference import block_scales, expanded, quantize, scales_of, token_scales


@dataclass(frozen=True)
class Scheme:
    """How a linear layer is quantised to 8 bits.

    weights: one scale per output "channel", or one per "tensor"; of float8 also one per "block" of 128 x 128.
    activations: "token" computes one scale per row while running (dynamic); "tensor" uses one calibrated scale (static);
        "block", beside weights by "block", one for every 128 columns of a row; "history", of float8, the largest value of
        the last `window` calls times 2^margin (delayed scaling).
    values: "int8" or "float8" (e4m3).
    outliers: LLM.int8(): columns of the input with a magnitude of at least this are not quantised to int8.
    smoothing: SmoothQuant before quantisation, with this alpha for every layer, or "search" for each layer's best.
    smooth_values: also smooth what reads attention's output, by scaling the values.
    clipping: a static scale covers the calibrated "max"; the part of it that loses least in the layer's output ("mse");
        99.99 % of the values ("percentile"); or what keeps most of their distribution in 128 levels ("entropy").
    """

    weights: Literal["channel", "tensor", "block"] = "channel"
    activations: Literal["token", "tensor", "block", "history"] = "token"
    smoothing: float | Literal["search"] | None = None
    clipping: Literal["max", "mse", "percentile", "entropy"] = "max"
    smooth_values: bool = False
    values: Literal["int8", "float8"] = "int8"
    outliers: float | None = None
    window: int = 16
    margin: int = 0

    def __post_init__(self) -> None:
        is_float8 = self.values == "float8"
        for name, allowed in (
            ("values", ("int8", "float8")),
            ("weights", ("channel", "tensor", "block") if is_float8 else ("channel", "tensor")),
            ("activations", ("block",) if self.weights == "block" else ACTIVATIONS[self.values]),
            ("clipping", ("max", "mse", "percentile", "entropy") if self.is_static and not is_float8 else ("max",)),
        ):
            if getattr(self, name) not in allowed:
                others = self.values if is_float8 else "dynamic activations"
                more = "" if len(allowed) > 1 else f" beside {'blocks' if name == 'activations' else others}"
                raise ValueError(f"{name}: expected one of {', '.join(allowed)}{more}, got {getattr(self, name)!r}")
        if self.smoothing not in (None, "search") and not (
            isinstance(self.smoothing, (int, float)) and 0 <= self.smoothing <= 1
        ):
            raise ValueError(f"smoothing: expected None, 'search' or a number in [0, 1], got {self.smoothing!r}")
        if self.outliers is not None:
            self._check_outliers()
        self._check_history()
        if self.smooth_values and self.smoothing is None:
            raise ValueError("smooth_values: expected False without smoothing, got True")

    def _check_history(self) -> None:
        of_history = self.activations == "history"
        for name, got, least, most, usual in (("window", self.window, 1, 1024, 16), ("margin", self.margin, 0, 16, 0)):
            if type(got) is not int or not least <= got <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {got!r}")
            if got != usual and not of_history:
                raise ValueError(f"{name}: expected {usual} beside activations by {self.activations}, got {got}")
        if of_history and self.smoothing is not None:
            raise ValueError(f"smoothing: expected None beside activations by history, got {self.smoothing!r}")

    def _check_outliers(self) -> None:
        is_number = isinstance(self.outliers, int | float) and not isinstance(self.outliers, bool)
        if not is_number or not 2.0**-126 <= self.outliers < float("inf"):  # type: ignore[operator]
            raise ValueError(f"outliers: expected None or a number above 0, got {self.outliers!r}")
        plain = replace(self, outliers=None)
        if plain != Scheme():
            raise ValueError(f"outliers: expected None beside {plain.name}, got {self.outliers!r}")

    @property
    def is_static(self) -> bool:
        return self.activations == "tensor"

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and quantised activations."""
        return torch.int8 if self.values == "int8" else torch.float8_e4m3fn

    @property
    def needs_calibration(self) -> bool:
        return self.is_static or self.smoothing is not None

    @property
    def name(self) -> str:
        if self.outliers is not None:
            return "llm-int8" if self.outliers == OUTLIERS else f"llm-int8-t{_short(self.outliers)}"
        if self.activations == "history":
            window = "" if self.window == Scheme.window else f"-h{self.window}"
            tensor = "-tensor" if self.weights == "tensor" else ""
            return f"fp8-delayed{window}{f'-m{self.margin}' if self.margin else ''}{tensor}"
        plain = replace(self, smoothing=None, smooth_values=False)
        base = next(name for name, scheme in SCHEMES.items() if scheme == plain)
        if self.smoothing is None:
            return base
        alpha = "-search" if self.smoothing == "search" else f"{self.smoothing:g}"
        return (
            f"{base}-smooth{'' if self.smoothing == DEFAULT_ALPHA else alpha}{'-values' if self.smooth_values else ''}"
        )


ACTIVATIONS = {"int8": ("token", "tensor"), "float8": ("token", "tensor", "history")}
PERCENTILE = 0.9999  # of clipping="percentile"

# The names that most people want, the first four first: what an unknown name is compared with.
USUAL = (
    "w8a8-dynamic", "w8a16", "w4a16-g128", "bcq-q3-g128",
    "w8a8-static", "w8a8-static-mse-smooth", "w8a8-static-tensor", "w4a16-g128-zp-gptq", "w4a16-g128-gptq",
    "w4a16-g128-awq", "w4a16-g128-mse", "w3a16-g128-gptq", "w2a16-g128-half-gptq", "bcq-q4-g128", "bcq-q2-g128",
    "sparse12-w7-g128", "nf4", "llm-int8", "fp8-dynamic", "fp8-static", "fp8-block128", "w8a16-fp8",
    "w4a8-g128", "w4a8",
)  # fmt: skip

# All that there are, but for smoothing.
SCHEMES = {
    "w8a8-dynamic": Scheme("channel", "token"),
    "w8a8-static": Scheme("channel", "tensor"),
    "w8a8-static-mse": Scheme("channel", "tensor", clipping="mse"),
    "w8a8-static-percentile": Scheme("channel", "tensor", clipping="percentile"),
    "w8a8-static-entropy": Scheme("channel", "tensor", clipping="entropy"),
    # The recipe of the first published int8 GPT-2: one scale for the weight, one for its input.
    "w8a8-static-tensor": Scheme("tensor", "tensor"),
    "w8a8-static-mse-tensor": Scheme("tensor", "tensor", clipping="mse"),
    "w8a8-static-percentile-tensor": Scheme("tensor", "tensor", clipping="percentile"),
    "w8a8-static-entropy-tensor": Scheme("tensor", "tensor", clipping="entropy"),
    "w8a8-dynamic-tensor": Scheme("tensor", "token"),
    "fp8-dynamic": Scheme("channel", "token", values="float8"),
    "fp8-static": Scheme("channel", "tensor", values="float8"),
    "fp8-block128": Scheme("block", "block", values="float8"),
    "fp8-dynamic-tensor": Scheme("tensor", "token", values="float8"),
    "fp8-static-tensor": Scheme("tensor", "tensor", values="float8"),
}


DEFAULT_ALPHA = 0.5  # of SmoothQuant
OUTLIERS = 6.0  # from which magnitude on LLM.int8() has them
BLOCK = 128  # rows and columns of a weight that share a scale


AnyScheme = Scheme | WeightOnly


def scheme_named(name: str | AnyScheme) -> AnyScheme:
    """The scheme behind a name: one of SCHEMES, with "-smooth", "-smooth0.7" or "-smooth-search" for SmoothQuant, and
    "-values" behind that to smooth attention's output too; "llm-int8" ("llm-int8-t5" for another threshold);
    "fp8-delayed" ("-h32" for a window of 32 calls, then "-m1" for a margin of 2^1); or a weight-only one, as
    `weight_only_named` reads it.

    Raises ValueError that names the nearest, TypeError for what is neither.
    """
    if isinstance(name, Scheme | WeightOnly):
        return name
    if not isinstance(name, str):
        raise TypeError(f"scheme: expected a name, Scheme or WeightOnly, got {type(name).__name__}")
    try:
        low = weight_only_named(name)
    except ValueError as error:
        raise ValueError(f"scheme: {name!r}: {error}") from error
    if low is not None:
        return low
    if found := re.fullmatch(r"llm-int8(?:-t(\d+(?:\.\d+)?(?:e[+-]?\d+)?))?", name):
        return Scheme(outliers=float(found[1] or OUTLIERS))
    if found := re.fullmatch(r"fp8-delayed(?:-h(\d+))?(?:-m(\d+))?(-tensor)?", name):
        window, margin = int(found[1] or Scheme.window), int(found[2] or 0)
        return Scheme("tensor" if found[3] else "channel", "history", values="float8", window=window, margin=margin)
    base, smooth, rest = name.partition("-smooth")
    values = rest.endswith("-values")
    alpha = _alpha(rest.removesuffix("-values"))
    if base not in SCHEMES or alpha is None:
        alike = [usual for usual in USUAL if name and usual.startswith(name)] or get_close_matches(name, USUAL, 1, 0.3)
        hint = f"; did you mean {alike[0]!r}?" if alike else ""
        raise ValueError(
            f"scheme: expected a name such as {', '.join(USUAL[:4])} (`octofuse schemes` lists them), got {name!r}{hint}"
        )
    return replace(SCHEMES[base], smoothing=alpha, smooth_values=values) if smooth else SCHEMES[base]


def _short(number: float) -> str:
    """Of a number, so that float() gives it back."""
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def _alpha(text: str) -> float | Literal["search"] | None:
    if text == "-search":
        return "search"
    try:
        value = float(text or DEFAULT_ALPHA)
    except ValueError:
        return None
    return value if 0.0 <= value <= 1.0 else None


def tensor_scale(amax: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """amax, fp32 [] -> scale, fp32 []."""
    return scales_of(amax.float(), dtype).reshape(())


def channel_scales(w: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """w [N, K] -> fp32 [N], one scale per output channel."""
    return token_scales(w, dtype).reshape(-1)


def spread_blocks(scales: Tensor, n: int, k: int) -> Tensor:
    """A weight's scales of blocks -> fp32 [n, k], each at its elements."""
    return expanded(scales, n, k, BLOCK)


def quantize_weight(w: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """w [N, K] float -> the scheme's dtype [N, K] and its scales, fp32 [N] or [1].

    Scales of blocks are [ceil(N / 128), ceil(K / 128)]. ValueError if w holds NaN or Inf.
    """
    parts = row_parts(w)
    if not torch.stack([torch.isfinite(part).all() for part in parts]).all():
        raise ValueError("weight: expected finite values, got NaN or Inf")
    if scheme.weights == "block":
        parts = w.split(max(1, (1 << 22) // (BLOCK * w.shape[1])) * BLOCK)  # whole blocks, a few at a time
        own = [block_scales(part, BLOCK) for part in parts]
        spread = [spread_blocks(s, len(part), part.shape[1]) for s, part in zip(own, parts, strict=True)]
        codes = [quantize(part, s, scheme.dtype) for part, s in zip(parts, spread, strict=True)]
        return _joined(codes), torch.cat(own)
    if scheme.weights == "channel":
        scales = [channel_scales(part, scheme.dtype) for part in parts]
    else:
        amax = torch.stack([part.float().abs().amax() for part in parts]).amax()
        scales = [tensor_scale(amax, scheme.dtype).reshape(1)]
    of_parts = scales if scheme.weights == "channel" else scales * len(parts)
    codes = [quantize(part, own.reshape(-1, 1), scheme.dtype) for part, own in zip(parts, of_parts, strict=True)]
    return _joined(codes), torch.cat(scales)


def _joined(codes: list[Tensor]) -> Tensor:
    """torch.cat, also of float8, which some versions cannot join."""
    return torch.cat([part.view(torch.int8) for part in codes]).view(codes[0].dtype)
