"""Row-orthonormal frames for query and key heads, their controls, and how orthonormal a weight is.

H heads  K head_dim  D model_dim
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from oelm.errors import MethodError
from oelm.seeds import stream_seed


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make new tensors on the CPU, where frames are drawn, whatever torch.device() is set around the call."""
    with torch.device("cpu"):
        yield


def frame_generator(seed: int, site: str, part: str) -> torch.Generator:
    """Return the generator of one projection's draw; it depends on nothing but its three names."""
    return torch.Generator().manual_seed(stream_seed(seed, "frames", site, part))


def sample_gaussian(num_heads: int, head_dim: int, model_dim: int, *, std: float, generator: torch.Generator) -> Tensor:
    """Sample independent Gaussian rows: (H, K, D)."""
    return (_gauss(num_heads, head_dim, model_dim, generator) * std).float()


def sample_frames(num_heads: int, head_dim: int, model_dim: int, *, generator: torch.Generator) -> Tensor:
    """Sample one Haar-random frame per head: (H, K, D) with orthonormal rows. Needs head_dim <= model_dim."""
    return orthonormalize(_gauss(num_heads, head_dim, model_dim, generator)).float()


def sample_global_frame(num_heads: int, head_dim: int, model_dim: int, *, generator: torch.Generator) -> Tensor:
    """Sample rows that are orthonormal across all heads at once: one QR of the whole matrix, cut into heads."""
    return orthonormalize(_gauss(1, num_heads * head_dim, model_dim, generator)).reshape(num_heads, head_dim, model_dim).float()


def _gauss(num_heads: int, head_dim: int, model_dim: int, generator: torch.Generator) -> Tensor:
    if min(num_heads, head_dim, model_dim) < 1:
        raise MethodError(f"{num_heads} heads of {head_dim} rows in {model_dim} dimensions: give at least one of each")
    # In float64 throughout this file: float32 draws and factors change their low bits with threads and CPU features.
    return torch.randn(num_heads, head_dim, model_dim, generator=generator, dtype=torch.float64)


def orthonormalize(weight_HKD: Tensor) -> Tensor:
    """Return, per head, the Gram-Schmidt frame of the given rows: same row space, orthonormal rows, same dtype.

    Raises MethodError when a head has more rows than columns or rows that depend on each other.
    """
    num_heads, head_dim, model_dim = weight_HKD.shape
    if head_dim > model_dim:
        raise MethodError(
            f"{head_dim} rows cannot be orthonormal in {model_dim} dimensions; lower head_dim or heads, "
            "or use init 'orthogonal' (frames per head) or 'gaussian_matched'"
        )
    q_HDK, r_HKK = torch.linalg.qr(weight_HKD.double().mT)
    diagonal_HK = r_HKK.diagonal(dim1=-2, dim2=-1)
    # What is left of a row that depends on the others is their rounding: a few units of the row's own length.
    noise_HK = weight_HKD.double().norm(dim=-1) * 8 * torch.finfo(weight_HKD.dtype).eps
    if not bool((diagonal_HK.abs() > noise_HK).all()):
        raise MethodError("a head's rows depend on each other (or are zero or not finite): they span no frame to keep")
    # LAPACK's choice of sign is not uniform; a positive diagonal makes the factor unique and the draw Haar.
    return (q_HDK * diagonal_HK.sign().unsqueeze(-2)).mT.to(weight_HKD.dtype).contiguous()


def orthonormality_error(weight_HKD: Tensor) -> float:
    """Return max |W W^T - I| over the heads: below 2e-7 for a frame in float32, about 1e-3 for one cast to bfloat16.

    Not a number on the meta device, where weights have no numbers.
    """
    if weight_HKD.is_meta:
        return math.nan
    weight_HKD = weight_HKD.detach().cpu().double()  # not every device has float64
    gram_HKK = weight_HKD @ weight_HKD.mT
    identity_KK = torch.eye(weight_HKD.shape[1], dtype=torch.float64)
    return float((gram_HKK - identity_KK).abs().max())
