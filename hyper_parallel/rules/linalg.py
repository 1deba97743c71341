# SPDX-License-Identifier: Apache-2.0
"""Rules of dense linear algebra and Fourier transforms: batches may be cut, matrices are whole."""

from __future__ import annotations

from functools import partial

from hyper_parallel.core.rule import OpRule, parse_rule
from hyper_parallel.rules.call import Call, Rule, alike, along_dim, refuse, spec

__all__ = ["RULES"]

_MATRIX = "... _ _"
_SCALAR = "..."
_VECTOR = "... _"


def solve(call: Call) -> OpRule:
    """Solve for matrices of right sides; vectors are told from matrices by their dims."""
    left, right = (len(shape or ()) for shape in call.shapes)
    is_vector = right == 1 or left - right == 1
    if is_vector and left - right != 1:
        raise refuse("solve", "vectors must be as many as matrices", shapes=call.shapes)
    side = _VECTOR if is_vector else _MATRIX
    return parse_rule(f"{_MATRIX}, {side} -> {side}", empty=False)


def qr(call: Call) -> OpRule:
    """Decompose whole matrices; without the first factor for mode "r"."""
    if call.get("mode") == "r":
        raise refuse("qr", "both factors must be asked for", mode="r")
    return parse_rule(f"{_MATRIX} -> {_MATRIX}, {_MATRIX}")


def cross(default: int | None, call: Call) -> OpRule:
    """Multiply vectors along one whole dim (`dim`)."""
    if call.shapes[0] != call.shapes[1]:
        raise refuse("cross", "the shapes must be equal", shapes=call.shapes)
    return along_dim(call, default=default, operands=2)


def fourier(default: tuple[int, ...] | None, call: Call) -> OpRule:
    """Transform whole dims (`dim`); the others may be cut."""
    given = call.numbers("dim", default)
    if given is None and call.numbers("s") is not None:
        raise refuse("fft", "dim must be given with s")
    return alike(spec(len(call.shape), call.dims("dim", default)), linear=True, empty=False)


def stft(call: Call) -> OpRule:
    """Transform short times of whole signals; frequencies and frames are new dims."""
    window = ", _" * (len(call.shapes) - 1)
    pair = "" if call.flag("return_complex") else " _"
    return parse_rule(f"... _{window} -> ... _ _{pair}", empty=False)


def istft(call: Call) -> OpRule:
    """Put whole signals together from their short times."""
    window = ", _" * (len(call.shapes) - 1)
    size = call.number("n_fft")
    hop = call.get("hop_length") or size // 4
    length = call.get("length")
    if not isinstance(length, int):
        outside = 0 if call.flag("center", True) else size
        length = outside + (hop if isinstance(hop, int) else 1) * (call.shape[-1] - 1)
    return parse_rule(f"... _ _{window} -> ... _={length}", empty=False)


_LINES = {
    "linalg_inv linalg_pinv linalg_cholesky linalg_matrix_exp matrix_power cholesky_inverse"
    " linalg_matrix_power": f"{_MATRIX} -> {_MATRIX}",
    "linalg_det logdet linalg_cond linalg_matrix_rank": f"{_MATRIX} -> {_SCALAR}",
    "linalg_slogdet": f"{_MATRIX} -> {_SCALAR}, {_SCALAR}",
    "linalg_eigvalsh linalg_eigvals linalg_svdvals": f"{_MATRIX} -> {_VECTOR}",
    "linalg_eigh linalg_eig": f"{_MATRIX} -> {_VECTOR}, {_MATRIX}",
    "linalg_svd svd": f"{_MATRIX} -> {_MATRIX}, {_VECTOR}, {_MATRIX}",
    "linalg_inv_ex linalg_cholesky_ex": f"{_MATRIX} -> {_MATRIX}, {_SCALAR}",
    "linalg_lu_factor": f"{_MATRIX} -> {_MATRIX}, {_VECTOR}",
    "linalg_lu": f"{_MATRIX} -> {_MATRIX}, {_MATRIX}, {_MATRIX}",
    "linalg_solve_triangular cholesky_solve": f"{_MATRIX}, {_MATRIX} -> {_MATRIX}",
    "triangular_solve": f"{_MATRIX}, {_MATRIX} -> {_MATRIX}, {_MATRIX}",
}
_ONE_DIM = "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"
_TWO_DIMS = "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2"
_ALL_DIMS = (
    "fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_hfftn fft_ihfftn fft_fftshift fft_ifftshift"
)

RULES: dict[str, Rule] = {
    **{
        name: parse_rule(text, empty=False)
        for names, text in _LINES.items()
        for name in names.split()
    },
    "stft": stft,
    "istft": istft,
    "linalg_solve": solve,
    "linalg_qr": qr,
    "qr": parse_rule(f"{_MATRIX} -> {_MATRIX}, {_MATRIX}"),
    "cross": partial(cross, None),
    "linalg_cross": partial(cross, -1),
    **dict.fromkeys(_ONE_DIM.split(), partial(fourier, (-1,))),
    **dict.fromkeys(_TWO_DIMS.split(), partial(fourier, (-2, -1))),
    **dict.fromkeys(_ALL_DIMS.split(), partial(fourier, None)),
}
