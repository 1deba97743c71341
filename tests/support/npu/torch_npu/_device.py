# SPDX-License-Identifier: Apache-2.0
"""Tensors on device "npu" that alias CPU memory, and the kernels that compute on it.

A tensor changes sides by DLPack, with the device type in the capsule overwritten. All kernels are
one fallback: alias the arguments to the CPU, run the CPU kernel, bring the results back. Views are
made by the CPU kernel on the npu tensor itself, so that they share its storage: collectives in
flight are found by storage.
"""

import ctypes
import functools
from typing import Any

import torch
from torch.utils import backend_registration

_DL_CPU, _DL_EXTENSION = 1, 12
_DEVICE_TYPE_OFFSET, _DEVICE_INDEX_OFFSET = 8, 12
_CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# float64 tensors exist on an NPU, but these have no float64 kernel.
_NO_FLOAT64 = {"mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "convolution"}
# These take tensors of both sides.
_BOTH_SIDES = {"index", "index_put_", "_index_put_impl_"}
# Run in low precision under autocast, as far as the tests need.
_AUTOCAST = ("linear", "mm", "addmm", "bmm", "matmul")

_libraries: list[torch.library.Library] = []
generator = torch.Generator()


def _flip(x: torch.Tensor, device_type: int, index: int) -> torch.Tensor:
    capsule = torch._C._to_dlpack(x)
    pointer = _pointer_of(capsule, b"dltensor")
    ctypes.c_int32.from_address(pointer + _DEVICE_TYPE_OFFSET).value = device_type
    ctypes.c_int32.from_address(pointer + _DEVICE_INDEX_OFFSET).value = index
    return torch._C._from_dlpack(capsule)


_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = [ctypes.py_object, ctypes.c_char_p]


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Alias an npu tensor on the CPU."""
    if x.is_conj():  # a lazy conjugation, which a capsule cannot say
        return torch._conj(to_host(torch._conj(x)))
    return _flip(x, _DL_CPU, 0)


def to_npu(x: torch.Tensor) -> torch.Tensor:
    """Alias a CPU tensor on the npu."""
    if x._is_zerotensor():  # zeros without memory
        x = torch.zeros(x.shape, dtype=x.dtype, device="cpu")
    return _flip(x, _DL_EXTENSION, 0)


class _Crossing:
    """One call on its way to the CPU and back."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._originals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._outside: torch.Tensor | None = None

    def down(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor_down(value)
        if isinstance(value, torch.device):
            return torch.device("cpu") if value.type == "npu" else value
        if isinstance(value, (list, tuple)):
            return type(value)(self.down(one) for one in value)
        return value

    def _tensor_down(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "npu":
            if x.dim() and self._name not in _BOTH_SIDES:
                self._outside = x
            self._originals[id(x)] = (x, x)
            return x
        if x.dtype == torch.float64 and self._name in _NO_FLOAT64:
            raise RuntimeError(f"{self._name}: DT_DOUBLE is not supported by this NPU operator")
        host = to_host(x)
        self._originals[id(host)] = (host, x)
        return host

    def check(self) -> None:
        if self._outside is not None:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices,"
                f" npu:0 and {self._outside.device}! ({self._name})"
            )

    def grow(self, host: torch.Tensor, out: torch.Tensor) -> None:
        """Let an empty `out` have the storage and shape that the CPU kernel gave its stand-in."""
        self._originals[id(host)] = (host, out)
        if host.shape != out.shape:
            out.set_(to_npu(host))

    def up(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            known = self._originals.get(id(value))
            return to_npu(value) if known is None else known[1]
        if isinstance(value, (list, tuple)):
            return type(value)(self.up(one) for one in value)
        return value


@functools.cache
def _traits(op: Any) -> tuple[str, bool, bool, tuple[str, ...], tuple[int, ...]]:
    """Give an op's name, whether it makes a view or draws random numbers, its out arguments, and
    the places of its tensors."""
    aliases = [value.alias_info for value in op._schema.returns]
    name = op._schema.name.partition("::")[2]
    is_view = (
        any(alias is not None and not alias.is_write for alias in aliases)
        or torch.Tag.inplace_view in op.tags  # changes the npu tensor's own shape
        or name == "set_"
    )
    outs = tuple(argument.name for argument in op._schema.arguments if argument.is_out)
    places = [i for i, a in enumerate(op._schema.arguments) if isinstance(a.type, torch.TensorType)]
    return name, is_view, torch.Tag.nondeterministic_seeded in op.tags, outs, tuple(places)


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any op of an npu tensor with its CPU kernel."""
    name, is_view, is_random, outs, places = _traits(op)
    with torch._C.DisableTorchFunctionSubclass():
        if is_view:
            return op.redispatch(_CPU_KEYS, *args, **kwargs)
        crossing = _Crossing(name)
        given = kwargs
        args = tuple(
            # A number given as a tensor comes as a number, which not every op takes.
            crossing.down(
                torch.tensor(value, device="cpu")
                if i in places and isinstance(value, (int, float, complex))
                else value
            )
            for i, value in enumerate(args)
        )
        kwargs = {key: crossing.down(value) for key, value in kwargs.items()}
        grown = [key for key in outs if given[key].numel() == 0]
        for key in grown:
            kwargs[key] = kwargs[key].clone()
        crossing.check()
        result = _drawing(op, args, kwargs) if is_random else op(*args, **kwargs)
        for key in grown:
            crossing.grow(kwargs[key], given[key])
        return crossing.up(result)


def _drawing(op: Any, args: Any, kwargs: Any) -> Any:
    """Run an op that draws random numbers on the device's own generator."""
    given = kwargs.get("generator")
    if given is not None and given is not generator:
        raise RuntimeError("Expected a 'npu' device type for generator but found 'cpu'")
    before = torch.default_generator.get_state()
    torch.default_generator.set_state(generator.get_state())
    try:
        return op(*args, **kwargs)
    finally:
        generator.set_state(torch.default_generator.get_state())
        torch.default_generator.set_state(before)


def _resize_(x: torch.Tensor, size: Any, memory_format: Any = None) -> torch.Tensor:
    """Move to a storage of its own: that of a CPU tensor that is aliased cannot grow."""
    x.set_(to_npu(to_host(x).clone().resize_(size)))
    return x


def _copy_(out: torch.Tensor, x: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy in any direction."""
    with torch._C.DisableTorchFunctionSubclass():
        to, source = (to_host(t) if t.device.type == "npu" else t for t in (out, x))
        to.copy_(source)
    return out


def _to_copy(
    x: torch.Tensor,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """Copy across; torch's own kernel asks for pinned memory."""
    target = x.device if device is None else torch.device(device)
    with torch._C.DisableTorchFunctionSubclass():
        host = to_host(x) if x.device.type == "npu" else x
        kept = torch.preserve_format if memory_format is None else memory_format
        copy = torch.ops.aten._to_copy(host, dtype=dtype, memory_format=kept)
        return to_npu(copy) if target.type == "npu" else copy


def _may_change_sides(x: torch.Tensor, other: torch.Tensor) -> bool:
    """Let `x.data` become a tensor of the other side: a module that moves keeps its parameters."""
    sides = {"cpu", "npu"}
    return x.device.type in sides and other.device.type in sides


def _convolution_backward(grad: torch.Tensor, *args: Any) -> Any:
    """Differentiate by torch's op for all devices, which wants the bias's shape, too."""
    x, w, *rest = args
    return _run(torch.ops.aten.convolution_backward.default, grad, x, w, [grad.shape[1]], *rest)


def _autocast(name: str) -> Any:
    """Make a kernel that casts floats first, then runs the op without autocast."""
    op = getattr(torch.ops.aten, name).default

    def run(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype("npu")
        with torch._C._ExcludeDispatchKeyGuard(
            torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
        ):
            return op(*(_cast(value, dtype) for value in args))

    return run


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.dtype in (torch.float32, torch.bfloat16)
    return value.to(dtype) if is_float else value


def _resize_storage(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
    """Leave an npu storage as it is: its memory belongs to a CPU tensor."""
    if storage.device.type == "npu":
        return storage
    return _resize(storage, size)


def _clone_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Clone by a tensor of its bytes: the device has no allocator."""
    if storage.device.type != "npu":
        return _clone(storage)
    return _bytes_of(storage).clone().untyped_storage()


def _move_storage(
    storage: torch.UntypedStorage, *, device: torch.device, non_blocking: bool = False
) -> torch.UntypedStorage:
    """Move, for torch.load, by a tensor of the bytes as well."""
    if torch.device(device).type != "npu":
        return _move(storage, device=device, non_blocking=non_blocking)
    return _bytes_of(storage).to("npu", copy=True).untyped_storage()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


_resize, _clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone
_move = torch.UntypedStorage.to


def _made_of_out() -> list[str]:
    """List the ops that torch would compose of an allocation and their `out` form."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(
        "CompositeExplicitAutogradNonFunctional"
    )
    return [name for name in names if name.startswith("aten::")]


def _overload(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def register(module: Any) -> None:
    """Name the device and register its kernels."""
    backend_registration._setup_privateuseone_for_python_backend("npu", module)
    fallbacks = torch.library.Library("_", "IMPL")
    fallbacks.fallback(_run, "PrivateUse1")
    fallbacks.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels = torch.library.Library("aten", "IMPL")
    for name in _made_of_out():
        kernels.impl(name, functools.partial(_run, _overload(name)), "PrivateUse1")
    kernels.impl("_to_copy", _to_copy, "PrivateUse1")
    kernels.impl("copy_", _copy_, "PrivateUse1")
    kernels.impl("resize_", _resize_, "PrivateUse1")
    convolution = functools.partial(_run, torch.ops.aten.convolution.default)
    kernels.impl("convolution_overrideable", convolution, "PrivateUse1")
    kernels.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    kernels.impl("_has_compatible_shallow_copy_type", _may_change_sides, "PrivateUse1")
    for name in _AUTOCAST:
        kernels.impl(name, _autocast(name), "AutocastPrivateUse1")
    _libraries.extend((fallbacks, kernels))
    torch.UntypedStorage.resize_ = _resize_storage
    torch.UntypedStorage.clone = _clone_storage
    torch.UntypedStorage.to = _move_storage
