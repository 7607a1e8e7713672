"""From a checkpoint of another library to a transformers model with this library's layers.

transformers reads the file: our quantizer puts a `Waiting` module, which has the file's own tensors, where each quantised
linear is, and when all are loaded makes its layer of it, one at a time. So names, shards, ties, dtypes and devices are
transformers' business, and what lies in memory is the file's size and one layer.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from octofuse.files import cache_scales, tensor_parallel
from octofuse.files.awq import Awq
from octofuse.files.bitsandbytes import BitsAndBytes
from octofuse.files.compressed_tensors import CompressedTensors
from octofuse.files.formats import FLOATS, Format, Stored, Want
from octofuse.files.fp8 import Fp8, ModelOpt
from octofuse.files.gptq import Gptq
from octofuse.files.headers import Header, local_folder, method_of, read_headers, weight_files
from octofuse.files.hooks import exchange_hooked
from octofuse.files.own import METHOD, Own
from octofuse.nn import PARALLEL, linear_layers, output_heads, replace_module, rows_of
from octofuse.nn.linear import is_conv1d
from octofuse.quant import Scheme
from octofuse.quant.affine import BLOCK

FORMATS: dict[str, type[Format]] = {
    "compressed-tensors": CompressedTensors, "gptq": Gptq, "awq": Awq, "fp8": Fp8, "modelopt": ModelOpt,
    "bitsandbytes": BitsAndBytes, METHOD: Own,
}  # fmt: skip
# Of caches that this library has not (`cache_scales` takes those that it has), and of queries; the last: computed.
_LEFT_OUT = re.compile(r"\.(?:[kqv]_scale|[kv]_zero_point|rotary_emb\.inv_freq)$")
# Tensors that no other layer has.
_OF_QUANTISED = {"qweight", "qzeros", "weight_packed", "weight_zero_point", "weight_scale_inv", "weight_absmax", "SCB"}


class Later(nn.Module):
    """Stands where a linear will, until its layer is made, or a rank's part of it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features  # some models ask for them meanwhile

    @abstractmethod
    def layer(self) -> nn.Module: ...

    def part(self, rows: Sequence[range], *, shares: bool = False) -> nn.Module:
        """`rows_of` the layer."""
        return rows_of(self.layer(), rows, shares=shares)

    @property
    @abstractmethod
    def unit(self) -> int | None:
        """Outputs that share a scale."""


class Waiting(Later):
    """The tensors of one quantised linear, as the file has them."""

    def __init__(self, name: str, linear: Linear, stored: Stored, headers: Mapping[str, Header], to: Reader) -> None:
        super().__init__(linear.k, linear.n)
        self.name, self.is_conv1d, self.stored = name, is_conv1d(linear.module), stored
        self.dtype, self.device = to.dtype, to.device
        self.file = next(iter(headers.values())).file
        for name, header in headers.items():
            empty = torch.empty(header.shape, dtype=header.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(empty, requires_grad=False))
        if "weight" not in headers:  # some models initialise it by the module's name (GPT-2's c_proj): it is done
            self.weight = torch.empty(0)
            self.weight._is_hf_initialized = True  # type: ignore[attr-defined]

    def layer(self) -> nn.Module:
        """ValueError that names the file and the tensor of which something is wrong."""
        tensors = {name: tensor.detach().to(self.device or tensor.device) for name, tensor in self.named_parameters()}
        bias = tensors.pop("bias", None)
        try:
            made: Any = self.stored.layer(tensors, self.out_features, self.in_features, self.dtype)
        except ValueError as error:
            raise ValueError(f"{self.file}: {self.name}.{error}") from None
        made.bias = None if bias is None else bias.to(self.dtype)
        made.is_conv1d = self.is_conv1d
        return made.eval().requires_grad_(False)  # type: ignore[no-any-return]

    @property
    def unit(self) -> int | None:
        scheme = getattr(self.stored, "scheme", None)
        return BLOCK if isinstance(scheme, Scheme) and scheme.weights == "block" else None


class Reader:
    """Replaces a model's linears before and after transformers loads the tensors."""

    def __init__(self, config: Mapping[str, Any], device: torch.device | None = None) -> None:
        method = str(config.get("quant_method"))
        try:
            self.format = FORMATS[method](config)
        except ValueError as error:
            raise ValueError(f"quantization_config ({method}): {error}") from None
        self.renames = {**cache_scales.RENAMES, **self.format.renames}
        self.device = device
        self.dtype = torch.float32

    renames: Mapping[str, str]  # the format's, and of a cache's scales

    def before(self, model: Any, files: list[Path], dtype: torch.dtype) -> None:
        """ValueError that names the file and the tensor of which something is wrong; the model is then of no use."""
        self.dtype = dtype
        headers = read_headers(files)
        linears = {
            name: Linear(layer, *_sizes(layer)) for name, layer in (linear_layers(model) | output_heads(model)).items()
        }
        headers, in_file = renamed(model, headers, self.renames)
        cache_scales.make_room(model, headers, f"{model.base_model_prefix}.")
        found = planned(self.format, linears, headers, f"{model.base_model_prefix}.", in_file)
        if not found:
            raise ValueError(f"{files[0]}: expected quantised linears, as quantization_config says, got none")
        for name, (stored, own) in found.items():
            replace_module(model, name, Waiting(name, linears[name], stored, own, self))
        for name, tensor in model.state_dict().items():
            if (header := headers.get(name)) is not None:
                check_tensor(header, name, tensor)

    def after(self, model: nn.Module) -> None:
        waiting = {name: module for name, module in model.named_modules() if isinstance(module, Waiting)}
        for name in list(waiting):
            exchange_hooked(model, name, waiting.pop(name).layer)
        model.requires_grad_(False)


class Linear(NamedTuple):
    """A linear of the model, and its sizes."""

    module: nn.Module
    n: int
    k: int


def _sizes(layer: Any) -> tuple[int, int]:
    n, k = reversed(layer.weight.shape) if is_conv1d(layer) else layer.weight.shape
    return n, k


def renamed(
    model: nn.Module, headers: Mapping[str, Header], renames: Mapping[str, str] | None = None
) -> tuple[dict[str, Header], dict[str, str]]:
    """The headers by the names that transformers will give their tensors, and of each module the name in the file.

    Newer versions of transformers name parts of some models otherwise than their files do (Gemma 3, LLaVA, Qwen 2.5 VL).
    renames: those of a format.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    modules = {name for name, _ in model.named_modules()}
    found, in_file = {}, {}
    for stored, header in headers.items():
        name = stored
        for pattern, put in (renames or {}).items():
            name = re.sub(pattern, put, name)
        module, _, own = name.rpartition(".")
        new = rename_source_key(name, renamings, [])[0].rpartition(".")[0]
        if new not in modules and module in modules:  # as transformers has it
            new = module
        found[f"{new}.{own}" if new else own] = header
        in_file[new] = module
    return found, in_file


def planned(
    form: Format, linears: Mapping[str, Linear], headers: Mapping[str, Header], prefix: str, in_file: Mapping[str, str]
) -> dict[str, tuple[Stored, dict[str, Header]]]:
    """How each linear that is stored quantised is stored, and its tensors.

    prefix: of names, which a file may lack. in_file: what else the file calls a module.

    Raises ValueError that names the file and the tensor: one that is missing, surplus, or of another shape or dtype.
    """
    by_module: dict[str, dict[str, Header]] = {}
    for tensor, header in headers.items():
        module, _, own = tensor.rpartition(".")
        by_module.setdefault(module, {})[own] = header
    found = {}
    for name, linear in linears.items():
        spellings = (
            name,
            name.removeprefix(prefix),
            prefix + name,
        )  # of a base model, of its file, the other way round
        own_headers = next((by_module[one] for one in spellings if one in by_module), {})
        stored = form.stored((name, in_file.get(name, name)), linear.module, frozenset(own_headers))
        if stored is not None:
            _check(name, stored, own_headers, linear)
            found[name] = (stored, own_headers)
    taken = {id(own) for _, own in found.values()}
    for module, group in by_module.items():
        if id(group) not in taken and (strange := sorted(group.keys() & _OF_QUANTISED)):
            raise ValueError(
                f"{group[strange[0]].file}: {module}.{strange[0]}: expected to belong to a linear of the model, got none "
                "that is called so and quantised (experts are not served)"
            )
    return found


def check_tensor(header: Header, name: str, wanted: torch.Tensor) -> None:
    """Some versions of transformers take another shape, and cast integers, in silence."""
    if header.shape != tuple(wanted.shape):
        raise ValueError(f"{header.file}: {name}: expected shape {list(wanted.shape)}, got {list(header.shape)}")
    is_float = header.dtype is not None and header.dtype.is_floating_point
    if header.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) and wanted.dtype != header.dtype:
        raise ValueError(f"{header.file}: {name}: expected {wanted.dtype}, got {header.dtype} without a scale")
    if is_float != wanted.dtype.is_floating_point:
        raise ValueError(f"{header.file}: {name}: expected {wanted.dtype} or alike, got {header.dtype}")


def _check(name: str, stored: Stored, headers: Mapping[str, Header], linear: Linear) -> None:
    here = f"{next(iter(headers.values())).file}: " if headers else ""
    try:
        wants = stored.wants(linear.n, linear.k)
    except ValueError as error:
        raise ValueError(f"{here}{name}: {error}") from None
    without = getattr(linear.module, "bias", None) is None  # some writers add one of zeros
    for own, want in (wants | {"bias": Want(FLOATS, ((linear.n,),), optional=without)}).items():
        header = headers.get(own)
        if header is None:
            if not want.optional:
                raise ValueError(f"{here}{name}.{own}: missing")
        elif header.dtype not in want.dtypes:
            allowed = " or ".join(str(dtype) for dtype in want.dtypes)
            raise ValueError(f"{header.file}: {name}.{own}: expected {allowed}, got {header.dtype}")
        elif want.shapes is not None and header.shape not in want.shapes:
            allowed = " or ".join(str(list(shape)) for shape in want.shapes)
            raise ValueError(f"{header.file}: {name}.{own}: expected shape {allowed}, got {list(header.shape)}")
    if surplus := sorted(set(headers) - set(wants) - {"bias"}):
        raise ValueError(f"{headers[surplus[0]].file}: {name}.{surplus[0]}: not a tensor of this kind of layer")


# ---- transformers' door ----


def enable() -> None:
    """Let transformers' `from_pretrained` give this library's layers for checkpoints of compressed-tensors, GPTQ, AWQ,
    FP8 and bitsandbytes, and for its own.

    Files that are not served here stay transformers' own business, with a warning that says why. OCTOFUSE_ENABLE=1 in the
    environment does the same when octofuse is imported. Raises ImportError without transformers.
    """
    from octofuse.files import quantizer

    quantizer.enable(True)


def disable() -> None:
    """Leave all checkpoints to transformers again, but this library's own, which nobody else reads."""
    from octofuse.files import quantizer

    quantizer.enable(False)


def from_pretrained(
    name: str | Path,
    device: torch.device | str | None = None,
    *,
    dtype: torch.dtype | str = "auto",
    mesh: Any = None,
    **options: Any,
) -> Any:
    """A transformers model of the class that its config names, its quantised linears as layers of this library, in eval
    mode.

    Args:
        name: a folder or a hub name: a checkpoint of compressed-tensors (int8 weights with int8 activations, or FP8 with
            FP8, dynamic, static, or FP8 in blocks; weights of 2 to 8 bits), of transformers' FP8 (blocks of 128 x 128) or
            ModelOpt's, GPTQ (2, 3, 4, 8 bits, activation order too), AWQ (gemm) or bitsandbytes (4 bits and LLM.int8);
            one that `octofuse quantize` has written; or a floating-point model, which stays one.
        device: where its tensors go; None: the CPU, or with a mesh this rank's device.
        dtype: of what is not quantised, and of the layers' scales; "auto": the checkpoint's.
        mesh: of ranks that share the model, as `octofuse.parallel.shard_` takes it: each keeps its part.
        options: for transformers' `from_pretrained`.

    Raises:
        FileNotFoundError, ValueError: naming the file and the tensor, or the setting that is not served, before anything
            runs.
    """
    if "device_map" in options:
        raise ValueError(f"device_map: expected device in its place, got {options['device_map']!r}")
    for name_of_option in ("distributed_config", "tp_plan", "tp_size", "device_mesh"):
        if name_of_option in options:
            raise ValueError(f"{name_of_option}: expected mesh in its place, got {options[name_of_option]!r}")
    if device is None and mesh is not None:
        assert tensor_parallel.device_of is not None
        device = tensor_parallel.device_of(mesh)
    device = torch.device(device or "cpu")
    if not str(name):
        raise ValueError("name: expected a folder or a hub name, got an empty one")
    folder = local_folder(str(name))
    if folder is not None:
        if options.get("variant") is not None:
            raise ValueError(f"variant: expected none of a folder, got {options['variant']!r}")
        inside = folder / str(options.get("subfolder") or "")
        method_of(inside)
        weight_files(inside)
    from octofuse.files.quantizer import reading_to

    where = str(folder or name)
    with reading_to(device if mesh is None else torch.device("cpu"), mesh):
        model, report = _class_of(where, options).from_pretrained(
            where, dtype=dtype, output_loading_info=True, **options
        )
    _refuse_gaps(name, report)
    if mesh is not None and not any(isinstance(module, PARALLEL) for module in model.modules()):
        assert tensor_parallel.shard is not None  # of a model in floating point
        model = tensor_parallel.shard(model.eval(), mesh)
    return model.to(device).eval().requires_grad_(False)


def _class_of(name: str, options: Mapping[str, Any]) -> Any:
    """The one that was saved, where transformers has it, else what it takes for a causal model of this config."""
    import transformers

    config = options.get("config") or transformers.AutoConfig.from_pretrained(name, **options)
    names = getattr(config, "architectures", None) or [""]
    saved: Any = getattr(transformers, str(names[0]), None)
    is_model = isinstance(saved, type) and issubclass(saved, transformers.PreTrainedModel)
    return saved if is_model and saved.config_class is not None else transformers.AutoModelForCausalLM


def _refuse_gaps(name: str | Path, report: Mapping[str, Any]) -> None:
    """transformers only warns of these, and fills what is missing with random numbers."""
    surplus = [tensor for tensor in report.get("unexpected_keys", ()) if not _LEFT_OUT.search(tensor)]
    for what, found in (("missing", report.get("missing_keys", ())), ("unexpected", surplus)):
        if found:
            more = f", and {len(found) - 1} more" if len(found) > 1 else ""
            raise ValueError(f"{name}: {sorted(found)[0]}: {what}{more}")
    if mismatched := report.get("mismatched_keys"):
        raise ValueError(f"{name}: {next(iter(mismatched))}: of another shape than the model's")
