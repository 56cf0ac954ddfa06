"""Row-orthonormal frames for query and key heads, their controls, how orthonormal a weight is, and weights in shards.

H heads  K head_dim  D model_dim  R rank
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from oelm.errors import MethodError
from oelm.method.method import Method
from oelm.seeds import stream_seed


@contextmanager
def on_cpu() -> Iterator[None]:
    """Make new tensors on the CPU, where frames are drawn, whatever torch.device() surrounds the call."""
    with torch.device("cpu"):
        yield


def frame_generator(seed: int, site: str, part: str) -> torch.Generator:
    """Return the generator of one projection's draw; it depends on these three values alone."""
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
    # In float64 throughout this file: the low bits of float32 draws and factors change with threads and CPU features.
    return torch.randn(num_heads, head_dim, model_dim, generator=generator, dtype=torch.float64)


def orthonormalize(weight_HKD: Tensor) -> Tensor:
    """Return, per head, the Gram-Schmidt frame of the given rows: same row space, orthonormal rows, same dtype.

    Raises MethodError when a head has more rows than columns, or linearly dependent rows.
    """
    num_heads, head_dim, model_dim = weight_HKD.shape
    if head_dim > model_dim:
        raise MethodError(
            f"{head_dim} rows cannot be orthonormal in {model_dim} dimensions; lower head_dim or heads, "
            "or use init 'orthogonal' (frames per head) or 'gaussian_matched'"
        )
    q_HDK, r_HKK = torch.linalg.qr(weight_HKD.double().mT)
    diagonal_HK = r_HKK.diagonal(dim1=-2, dim2=-1)
    # What is left of a dependent row is rounding: a few units of the row's own length.
    noise_HK = weight_HKD.double().norm(dim=-1) * 8 * torch.finfo(weight_HKD.dtype).eps
    if not bool((diagonal_HK.abs() > noise_HK).all()):
        raise MethodError("a head's rows depend on each other (or are zero or not finite): they span no frame to keep")
    # LAPACK's choice of sign is not uniform; a positive diagonal makes the factor unique and the draw Haar.
    return (q_HDK * diagonal_HK.sign().unsqueeze(-2)).mT.to(weight_HKD.dtype).contiguous()


def polar(weight_HKD: Tensor) -> Tensor:
    """Return, per head, the frame nearest to the rows by the sum of squares, up to scale: U of W = P U.

    Raises MethodError where `orthonormalize` does.
    """
    frame_HKD = orthonormalize(weight_HKD).double()
    left_HKK, _, right_HKK = torch.linalg.svd(weight_HKD.double() @ frame_HKD.mT)
    return (left_HKK @ right_HKK @ frame_HKD).to(weight_HKD.dtype)


def rotated(weight_HKD: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return, per head, a Haar-random frame of the row space; raises MethodError where `orthonormalize` does."""
    num_heads, head_dim, _ = weight_HKD.shape
    mix_HKK = orthonormalize(_gauss(num_heads, head_dim, head_dim, generator))
    return (mix_HKK @ orthonormalize(weight_HKD).double()).to(weight_HKD.dtype)


def balancing(q_HKD: Tensor, k_HKD: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per head, A^-T for the queries and A for the keys, after which the rows of each are orthogonal.

    Any invertible A keeps the form Wq^T Wk, biases included. With this one the rows point along the form's singular vectors,
    and their norms are the square roots of its singular values, the same in Q and K. Where rows are linearly dependent,
    some become zero in one of the two. Q and K may have different numbers of columns. In float64.
    """
    found = [_balancing(_square(q_KD), _square(k_KD)) for q_KD, k_KD in zip(q_HKD.double(), k_HKD.double(), strict=True)]
    return torch.stack([to_q for to_q, _ in found]), torch.stack([to_k for _, to_k in found])


def _square(rows_KD: Tensor) -> Tensor:
    """Return the rows in K coordinates that keep the products between them."""
    r_CK = torch.linalg.qr(rows_KD.mT, mode="r").R
    return F.pad(r_CK.mT, (0, len(rows_KD) - len(r_CK)))


def _balancing(q_KK: Tensor, k_KK: Tensor) -> tuple[Tensor, Tensor]:
    # A contragredient transformation of the two Gram matrices (Zhou, Doyle and Glover 1996, theorem 3.22).
    # The keys become orthonormal rows and, beyond their rank, zeros.
    left_KK, sizes_K, _ = torch.linalg.svd(k_KK)
    rank = _rank(sizes_K)
    sizes_K[rank:] = 1
    to_q, to_k = left_KK.mT * sizes_K.unsqueeze(1), left_KK.mT / sizes_K.unsqueeze(1)
    facing_RK, beyond_K = (to_q @ q_KK).split((rank, len(q_KK) - rank))
    # A rotation keeps the keys orthonormal and makes the queries orthogonal.
    turn_RR, form_R, across_KK = torch.linalg.svd(facing_RK)
    used = _rank(form_R)
    # Queries that face keys of zero may lose what they share with the others.
    shared = F.pad(beyond_K @ across_KK[:used].mT / form_R[:used], (0, rank - used))
    beyond_turn = torch.linalg.svd(beyond_K - beyond_K @ across_KK[:used].mT @ across_KK[:used])[0]
    q_RK, k_K = turn_RR.mT @ to_q[:rank], to_k[rank:]
    to_q = torch.cat([q_RK, beyond_turn.mT @ (to_q[rank:] - shared @ q_RK)])
    to_k = torch.cat([turn_RR.mT @ to_k[:rank] + shared.mT @ k_K, beyond_turn.mT @ k_K])
    root_K = torch.ones_like(sizes_K)
    root_K[:used] = form_R[:used].sqrt()
    return to_q / root_K.unsqueeze(1), to_k * root_K.unsqueeze(1)


def _rank(sizes_R: Tensor) -> int:
    # A value below the rounding of float32 weights is no direction of theirs; dividing by it would blow up biases.
    return int((sizes_R > sizes_R[:1] * len(sizes_R) * torch.finfo(torch.float32).eps).sum())


def flattened(rows_HKD: Tensor) -> Tensor:
    """Return balanced rows with the root mean square of the head's spectrum in place of each singular value.

    Raises MethodError where a row is zero and so has no direction.
    """
    norms_HK = rows_HKD.norm(dim=-1)
    if any(_rank(spectrum_K.sort(descending=True).values) < len(spectrum_K) for spectrum_K in norms_HK.square()):
        raise MethodError("a head's rows depend on each other (or are zero): they have no spectrum to flatten")
    # A row's norm is the root of a singular value.
    level_H = norms_HK.pow(4).mean(-1).pow(0.25)
    return rows_HKD * (level_H.unsqueeze(-1) / norms_HK).unsqueeze(-1)


def sample_axes(
    num_heads: int, num_key_heads: int, head_dim: int, dims: tuple[int, int], *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return the coordinates of every query head and of every key head, (H, K) each; `dims` are the widths of the two inputs.

    A query head has its own slice. A key head has the slice of another head, by a drawn shift, and shares no coordinate
    with the query heads it serves. Where two heads have the same two slices, the coordinates are paired differently.
    """
    if head_dim > min(dims):
        raise MethodError(
            f"init 'axes': a head has {head_dim} rows, and only {min(dims)} coordinates to choose from; "
            "lower head_dim, or use init 'gaussian_matched'"
        )
    group, num_slices = num_heads // num_key_heads, dims[0] // head_dim
    queries, keys = list(range(num_heads)), list(range(num_key_heads))
    if dims[0] != dims[1]:
        # Two inputs share no coordinate, whatever is chosen.
        shift = _draw(0, dims[1] // head_dim, generator)
        queries, keys = [n % num_slices for n in queries], [(n + shift) % (dims[1] // head_dim) for n in keys]
    elif num_slices == 1:
        return _rolled(num_heads, num_key_heads, head_dim, dims[0], generator)
    elif group < num_slices:
        shift = _draw(group, num_slices, generator)
        queries, keys = [n % num_slices for n in queries], [(n * group + shift) % num_slices for n in keys]
    else:
        # A group's queries leave one slice to their key, and repeat the others.
        rest = num_slices - 1
        queries, keys = [(n // group + n % group % rest) % num_slices for n in queries], [(n + rest) % num_slices for n in keys]
    return _coordinates(queries, keys, head_dim)


def _coordinates(queries: list[int], keys: list[int], head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the coordinates of these slices; where two heads have the same two, the second's queries are rolled by one."""
    inside_K, group = torch.arange(head_dim), len(queries) // len(keys)
    earlier: Counter[tuple[int, int]] = Counter()
    rows: list[Tensor] = []
    for head, number in enumerate(queries):
        pair = (number, keys[head // group])
        rows.append(number * head_dim + (inside_K + earlier[pair]) % head_dim)
        earlier[pair] += 1
    return torch.stack(rows), torch.stack([number * head_dim + inside_K for number in keys])


def _rolled(num_heads: int, num_key_heads: int, head_dim: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the first coordinates for every query head, and for keys the same rolled: no coordinate is paired with itself."""
    if num_key_heads < num_heads or dim == 1:
        raise MethodError(
            f"init 'axes': {num_heads} query heads of {head_dim} rows share {num_key_heads} key heads in {dim} dimensions, "
            "which leaves no separate coordinates to the keys; use init 'orthogonal'"
        )
    shift = _draw(0, dim - 1, generator)
    inside_K = torch.arange(head_dim)
    keys = [(inside_K + 1 + (shift + head) % (dim - 1)) % dim for head in range(num_key_heads)]
    return inside_K.expand(num_heads, head_dim), torch.stack(keys)


def _draw(first: int, end: int, generator: torch.Generator) -> int:
    return int(torch.randint(first, end, (), generator=generator))


def axis_rows(index_HK: Tensor, dim: int, *, scale: float = 1.0) -> Tensor:
    """Return the frame that chooses these coordinates, as a dense weight: (H, K, D)."""
    return F.one_hot(index_HK, dim).float() * scale


def orthonormality_error(weight_HKD: Tensor) -> float:
    """Return max |W W^T - I| over the heads; NaN on the meta device.

    Below 2e-7 for a frame in float32, about 1e-3 for one cast to bfloat16.
    """
    if weight_HKD.is_meta:
        return math.nan
    weight_HKD = weight_HKD.detach().cpu().double()  # not every device has float64
    gram_HKK = weight_HKD @ weight_HKD.mT
    identity_KK = torch.eye(weight_HKD.shape[1], dtype=torch.float64)
    return float((gram_HKK - identity_KK).abs().max())


def start_of(method: Method, weight_HKD: Tensor, generator: torch.Generator) -> Tensor:
    """Return the weight that a projection starts from, given its present one."""
    start_HKD = _unscaled_start(method, weight_HKD, generator)
    if isinstance(method.scale, float):
        return start_HKD * method.scale
    if method.scale == "unit" or method.init == "native":
        return start_HKD
    return _at_scale_of(weight_HKD, start_HKD)


def _unscaled_start(method: Method, weight_HKD: Tensor, generator: torch.Generator) -> Tensor:
    if callable(method.init):
        # A copy: torch's own functions of that kind, nn.init, write in place.
        start_HKD = method.init(weight_HKD.clone(), generator)
        if not isinstance(start_HKD, Tensor):
            raise MethodError(f"the init function gave {start_HKD!r}; it must return a tensor, the weight to start from")
        return start_HKD
    num_heads, head_dim, model_dim = weight_HKD.shape
    match method.init:
        case "native":
            return weight_HKD
        case "orthonormalized":
            return orthonormalize(weight_HKD)
        case "orthogonal":
            return sample_frames(num_heads, head_dim, model_dim, generator=generator)
        case "orthogonal_global":
            return sample_global_frame(num_heads, head_dim, model_dim, generator=generator)
        case "gaussian":
            return sample_gaussian(num_heads, head_dim, model_dim, std=method.std, generator=generator)
        case "polar":
            return polar(weight_HKD)
        case "rotated":
            return rotated(weight_HKD, generator=generator)
        case "axes" | "spectral" | "spectral_flat":
            raise MethodError(
                f"init '{method.init}' is for a whole site, Q and K together; oelm.freeze(model, method) applies it"
            )
        case "gaussian_matched":
            # The scale of orthonormal rows: unit norm, so entries of variance 1 / model_dim.
            return sample_gaussian(num_heads, head_dim, model_dim, std=model_dim**-0.5, generator=generator)


def _at_scale_of(weight_HKD: Tensor, start_HKD: Tensor) -> Tensor:
    """Return the start times the number that gives it the weight's Frobenius norm; nothing but zeros stays so."""
    wanted, present = weight_HKD.double().norm(), start_HKD.double().norm()
    if not bool(wanted.isfinite()) or not bool(wanted > 0):
        raise MethodError(
            f"scale 'layer' takes over the size of the weights that are there, and theirs is {float(wanted)}; "
            "use scale 'unit', or load the weights first"
        )
    return (start_HKD.double() * (wanted / present)).float() if bool(present > 0) else start_HKD


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as it is, or gathered from all processes where each holds a part; then all of them must call this."""
    gather: Any = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` or FullyShardedDataParallel manages the module's weights."""
    # Never imported for this: it takes a moment, and whoever shards has it.
    library: Any = sys.modules.get("torch.distributed.fsdp")
    return library is not None and isinstance(module, library.FSDPModule | library.FullyShardedDataParallel)


def use_shards(model: nn.Module) -> None:
    """Drop the whole copies that a forward pass leaves: the optimizer writes to the shards, and they are what counts."""
    for module in model.modules():
        if is_fully_sharded(module) and (reshard := getattr(module, "reshard", None)) is not None:
            reshard()
