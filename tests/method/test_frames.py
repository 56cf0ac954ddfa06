"""Frames are orthonormal, unique and Haar-random, and the same bytes whatever else the process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oelm.errors import MethodError
from oelm.method.audit import digest
from oelm.method.frames import (
    balancing,
    flattened,
    frame_generator,
    orthonormality_error,
    orthonormalize,
    polar,
    rotated,
    sample_frames,
    sample_gaussian,
    sample_global_frame,
    start_of,
)
from oelm.method.method import PRESETS
from tests.cases import case

quickly = settings(deadline=None, derandomize=True, max_examples=25)
seeds = st.integers(0, 2**31)

# Rounding to a unit roundoff u moves every entry by a factor within 1 +- u, so the product of two unit rows moves by
# at most 2u + u^2 (Cauchy-Schwarz). What float64 itself adds (about K * D * 2^-53) is below 2^-24 for every shape here.
FLOAT32_BOUND = 2 * 2.0**-24 + 2.0**-48 + 2.0**-24
BFLOAT16_BOUND = 2 * 2.0**-8 + 2.0**-16 + 2.0**-24
# Householder QR in float64: backward error about K * D * 2^-53 relative to the rows, below 1e-13 for K <= 12, D <= 40.
FLOAT64_BOUND = 1e-12


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Any number of heads, and head_dim up to model_dim, both ends included."""
    head_dim = draw(st.integers(1, 12))
    return draw(st.integers(1, 5)), head_dim, draw(st.integers(head_dim, 40))


def gaussian_rows(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@quickly
@given(shapes(), seeds)
def test_rows_of_every_head_are_orthonormal(shape: tuple[int, int, int], seed: int) -> None:
    frames = sample_frames(*shape, generator=frame_generator(seed, "0", "q"))
    assert frames.dtype == torch.float32
    assert frames.shape == shape
    gram = frames.double() @ frames.double().mT
    assert float((gram - torch.eye(shape[1], dtype=torch.float64)).abs().max()) <= FLOAT32_BOUND


@quickly
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 20), seeds)
def test_rows_of_a_global_frame_are_orthonormal_across_heads(num_heads: int, head_dim: int, spare: int, seed: int) -> None:
    model_dim = num_heads * head_dim + spare
    frames = sample_global_frame(num_heads, head_dim, model_dim, generator=frame_generator(seed, "0", "q"))
    assert frames.shape == (num_heads, head_dim, model_dim)
    rows = frames.double().flatten(0, 1)
    assert float((rows @ rows.T - torch.eye(len(rows), dtype=torch.float64)).abs().max()) <= FLOAT32_BOUND


def test_a_global_frame_with_more_rows_than_columns_is_refused() -> None:
    with pytest.raises(MethodError, match="12 rows cannot be orthonormal in 11 dimensions"):
        sample_global_frame(3, 4, 11, generator=frame_generator(0, "0", "q"))


@quickly
@given(shapes(), seeds)
def test_orthonormalize_keeps_the_row_space(shape: tuple[int, int, int], seed: int) -> None:
    rows = gaussian_rows(shape, seed)
    frames = orthonormalize(rows)
    projected = rows @ frames.mT @ frames
    assert float((rows - projected).abs().max()) <= FLOAT64_BOUND * float(rows.norm(dim=-1).max())


@quickly
@given(shapes(), seeds)
def test_orthonormalize_is_gram_schmidt_with_a_positive_diagonal(shape: tuple[int, int, int], seed: int) -> None:
    rows = gaussian_rows(shape, seed)
    coordinates = rows @ orthonormalize(rows).mT
    assert bool((coordinates.diagonal(dim1=-2, dim2=-1) > 0).all())
    assert float(coordinates.triu(1).abs().max()) <= FLOAT64_BOUND * float(rows.norm(dim=-1).max())


@quickly
@given(shapes(), seeds)
def test_rows_that_span_the_same_flag_have_one_frame(shape: tuple[int, int, int], seed: int) -> None:
    """Mixing each row with the ones before it, by a positive share of itself, leaves the frame where it was."""
    frames = orthonormalize(gaussian_rows(shape, seed))
    mixing = gaussian_rows((shape[0], shape[1], shape[1]), seed + 1).clamp(-0.25, 0.25).tril(-1)
    mixing += torch.diag_embed(1 + gaussian_rows(shape[:2], seed + 2).abs().clamp(max=1))
    # The mixing's inverse is at most 1.25^11 < 12 in norm (diagonal >= 1, entries <= 1/4, K <= 12), its norm at most
    # 2 + 12/4: so the frame moves by at most 60 times the factorisation's own error.
    assert float((orthonormalize(mixing @ frames) - frames).abs().max()) <= 60 * FLOAT64_BOUND


def test_orthonormalize_keeps_the_dtype() -> None:
    cases: list[torch.dtype] = [torch.float32, torch.float64, torch.bfloat16]
    for dtype in cases:
        with case(dtype):
            assert orthonormalize(gaussian_rows((2, 3, 8), 0).to(dtype)).dtype == dtype


def test_orthonormalize_leaves_its_argument_alone() -> None:
    rows = gaussian_rows((2, 3, 8), 0)
    before = digest(rows)
    orthonormalize(rows)
    assert digest(rows) == before


FIRST, SECOND = [1.0, 2.0, 0.0, 1.0], [0.0, 1.0, 1.0, 3.0]
UNFIT = {
    "repeated row": [FIRST, FIRST],
    "scaled row": [FIRST, [-2.0, -4.0, 0.0, -2.0]],
    "sum of the others": [FIRST, SECOND, [1.0, 3.0, 1.0, 4.0]],
    "zero row": [FIRST, [0.0] * 4],
    "first row zero": [[0.0] * 4, FIRST],
    "all zero": [[0.0] * 4, [0.0] * 4],
    "nan": [FIRST, [float("nan"), 1.0, 1.0, 3.0]],
    "infinity": [FIRST, [float("inf"), 1.0, 1.0, 3.0]],
    "infinity alone": [[1.0, float("inf"), 0.0, 0.0]],
}


def test_rows_that_span_no_frame_are_refused() -> None:
    dtype_cases: list[torch.dtype] = [torch.float32, torch.float64]
    for rows in UNFIT.values():
        for dtype in dtype_cases:
            with case(rows, dtype):
                with pytest.raises(MethodError, match="depend on each other"):
                    orthonormalize(torch.tensor([rows], dtype=dtype))


def test_one_unfit_head_among_good_ones_is_refused() -> None:
    weight = gaussian_rows((4, 3, 8), 0)
    weight[2, 1] = weight[2, 0]
    with pytest.raises(MethodError, match="depend on each other"):
        orthonormalize(weight)


def test_rows_that_depend_up_to_float32_rounding_are_refused() -> None:
    """A sum rounded to float32 leaves a residue of pure rounding noise; a frame row made of it would mean nothing."""
    rows = gaussian_rows((1, 2, 16), 0).float()
    with pytest.raises(MethodError, match="depend on each other"):
        orthonormalize(torch.cat([rows, rows.sum(1, keepdim=True)], dim=1))


@quickly
@given(shapes(), seeds)
def test_polar_is_the_nearest_frame(shape: tuple[int, int, int], seed: int) -> None:
    """U is nearest to W exactly where W U^T is symmetric and has no negative eigenvalue (Higham 1986)."""
    rows = gaussian_rows(shape, seed)
    frames = polar(rows)
    stretch, size = rows @ frames.mT, float(rows.norm(dim=-1).max())
    assert orthonormality_error(frames) <= FLOAT64_BOUND
    assert float((stretch - stretch.mT).abs().max()) <= FLOAT64_BOUND * size
    assert float(torch.linalg.eigvalsh(stretch).min()) >= -FLOAT64_BOUND * size
    assert float((rows - rows @ frames.mT @ frames).abs().max()) <= FLOAT64_BOUND * size
    others = (orthonormalize(rows), rotated(rows, generator=torch.Generator().manual_seed(seed)))
    assert all((rows - frames).norm() <= (rows - other).norm() * (1 + FLOAT64_BOUND) for other in others)


@quickly
@given(shapes(), seeds)
def test_polar_of_a_scaled_frame_is_the_frame(shape: tuple[int, int, int], seed: int) -> None:
    frames = orthonormalize(gaussian_rows(shape, seed))
    assert float((polar(3 * frames) - frames).abs().max()) <= FLOAT64_BOUND


@quickly
@given(shapes(), seeds)
def test_rotated_keeps_the_space_alone(shape: tuple[int, int, int], seed: int) -> None:
    rows = gaussian_rows(shape, seed)
    frames, other = (rotated(rows, generator=frame_generator(seed + n, "0", "q")) for n in range(2))
    assert orthonormality_error(frames) <= FLOAT64_BOUND
    assert float((rows - rows @ frames.mT @ frames).abs().max()) <= FLOAT64_BOUND * float(rows.norm(dim=-1).max())
    # Of a single row two draws may give the same sign.
    assert shape[1] == 1 or not torch.allclose(frames, other)
    assert torch.equal(frames, rotated(rows, generator=frame_generator(seed, "0", "q")))


def test_rotated_frames_do_not_prefer_the_rows_they_come_from() -> None:
    count, head_dim, model_dim = 4000, 3, 6
    rows = gaussian_rows((1, head_dim, model_dim), 0).expand(count, -1, -1)
    along = rotated(rows, generator=frame_generator(0, "0", "q")) @ orthonormalize(rows).mT
    # Entries of a Haar rotation of K rows: mean 0, variance 1/K; six standard errors, as below.
    assert float(along.mean(0).abs().max()) <= 6 * (1 / head_dim / count) ** 0.5


@st.composite
def pairs_of_any_rank(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Queries and keys of two widths, with rows that depend on each other or are more than the columns."""
    heads, head_dim, seed = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(seeds)
    made = []
    for part in range(2):
        rank, width = draw(st.integers(0, head_dim)), draw(st.integers(1, 20))
        into = gaussian_rows((heads, head_dim, rank), seed + part)
        made.append(into @ gaussian_rows((heads, rank, width), seed + 2 + part))
    return made[0], made[1]


def off_diagonal(rows: Tensor) -> float:
    gram = rows @ rows.mT
    return float((gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))).abs().max())


@quickly
@given(pairs_of_any_rank())
def test_balancing_is_a_change_of_basis_that_makes_rows_orthogonal(pair: tuple[Tensor, Tensor]) -> None:
    q, k = pair
    to_q, to_k = balancing(q, k)
    identity = torch.eye(q.shape[1], dtype=torch.float64)
    # Relative to the change of basis: of random rows it is rarely, but at times, ill-conditioned.
    size = float(to_q.abs().max() * to_k.abs().max()) + 1
    assert float((to_q.mT @ to_k - identity).abs().max()) <= FLOAT64_BOUND * size * 10
    rows, columns = to_q @ q, to_k @ k
    form, scale = q.mT @ k, float(q.norm() * k.norm()) + 1
    assert float((rows.mT @ columns - form).abs().max()) <= FLOAT64_BOUND * size * scale
    # What counts as no direction is below K * 2^-23 of the largest, and is left as it was.
    bound = q.shape[1] * 2.0**-23
    assert off_diagonal(rows) <= bound * float(rows.square().sum() + 1)
    assert off_diagonal(columns) <= bound * float(columns.square().sum() + 1)


@quickly
@given(shapes(), seeds)
def test_balanced_rows_have_the_roots_of_the_spectrum_for_norms(shape: tuple[int, int, int], seed: int) -> None:
    q, k = gaussian_rows(shape, seed), gaussian_rows((*shape[:2], shape[2] + 3), seed + 1)
    to_q, to_k = balancing(q, k)
    spectrum = torch.linalg.svdvals(q.mT @ k)[:, : shape[1]]
    bound = 1e-6 * float(spectrum.max())
    for rows in (to_q @ q, to_k @ k):
        assert float((rows.square().sum(-1) - spectrum).abs().max()) <= bound


@quickly
@given(shapes(), seeds)
def test_a_flattened_form_keeps_its_singular_vectors_and_its_size(shape: tuple[int, int, int], seed: int) -> None:
    q, k = gaussian_rows(shape, seed), gaussian_rows(shape, seed + 1)
    to_q, to_k = balancing(q, k)
    form, flat = q.mT @ k, flattened(to_q @ q).mT @ flattened(to_k @ k)
    spectrum = torch.linalg.svdvals(flat)[:, : shape[1]]
    # The root mean square, so that the Frobenius norm, and with it the variance of logits of isotropic inputs, is kept.
    assert torch.allclose(spectrum, spectrum.mean(-1, keepdim=True).expand_as(spectrum), rtol=1e-6)
    assert torch.allclose(flat.square().sum((-2, -1)), form.square().sum((-2, -1)), rtol=1e-6)
    # One set of singular vectors: then the product of one with the other's transpose is symmetric, on both sides.
    for product in (form @ flat.mT, form.mT @ flat):
        assert torch.allclose(product, product.mT, rtol=0, atol=1e-6 * float(form.square().sum()))


def test_a_form_of_too_low_a_rank_has_no_flat_spectrum() -> None:
    q, k = gaussian_rows((2, 3, 8), 0), gaussian_rows((2, 3, 8), 1)
    k[1, 2] = k[1, 0]
    to_q, to_k = balancing(q, k)
    with pytest.raises(MethodError, match="no spectrum to flatten"):
        flattened(to_k @ k)


def test_more_rows_than_columns_are_refused() -> None:
    cases: list[Callable[[Tensor], Tensor]] = [
        orthonormalize,
        polar,
        lambda w: sample_frames(*w.shape, generator=torch.Generator()),
    ]
    for function in cases:
        with case(function):
            with pytest.raises(MethodError, match="5 rows cannot be orthonormal in 4 dimensions"):
                function(gaussian_rows((2, 5, 4), 0))


def test_a_frames_first_row_is_the_direction_of_a_float64_draw() -> None:
    drawn = torch.randn(4, 3, 8, generator=frame_generator(0, "0", "q"), dtype=torch.float64)[:, 0]
    first = sample_frames(4, 3, 8, generator=frame_generator(0, "0", "q"))[:, 0].double()
    # Rounded once to float32, from entries below 1.
    assert float((first - drawn / drawn.norm(dim=-1, keepdim=True)).abs().max()) <= 2.0**-24


@pytest.fixture
def _threads_restored() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


SAMPLERS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "frames": lambda generator: sample_frames(4, 32, 256, generator=generator),
    "global": lambda generator: sample_global_frame(4, 32, 256, generator=generator),
    "gaussian": lambda generator: sample_gaussian(4, 32, 256, std=0.02, generator=generator),
}


@pytest.mark.usefixtures("_threads_restored")
@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())
def test_draws_are_the_same_bytes_on_one_thread_and_two(sampler: Callable[[torch.Generator], Tensor]) -> None:
    drawn = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        drawn.append(digest(sampler(frame_generator(0, "0", "q"))))
    assert drawn[0] == drawn[1]


def test_a_draw_does_not_depend_on_what_was_drawn_before() -> None:
    places = [(site, part) for site in ("0", "1", "2") for part in ("q", "k")]

    def draw(order: list[tuple[str, str]]) -> dict[tuple[str, str], str]:
        return {place: digest(sample_frames(2, 3, 8, generator=frame_generator(0, *place))) for place in order}

    forwards = draw(places)
    torch.randn(7)
    assert draw(places[::-1]) == forwards


def test_every_seed_site_and_part_has_a_draw_of_its_own() -> None:
    names = [(seed, site, part) for seed in (0, 1) for site in ("0", "1", "10") for part in ("q", "k")]
    assert len({digest(sample_frames(1, 2, 4, generator=frame_generator(*name))) for name in names}) == len(names)


def test_drawing_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    sample_frames(2, 3, 8, generator=frame_generator(0, "0", "q"))
    assert torch.equal(torch.get_rng_state(), before)


def test_gaussian_rows_have_the_standard_deviation_asked_for() -> None:
    cases: list[float] = [0.02, 1.0, 3.5]
    for std in cases:
        with case(std):
            values = sample_gaussian(4, 32, 256, std=std, generator=frame_generator(0, "0", "q")).double().flatten()
            # A sample's standard deviation has a relative error of 1 / sqrt(2n), its mean one of std / sqrt(n); six of each.
            assert abs(float(values.std()) / std - 1) <= 6 / (2 * len(values)) ** 0.5
            assert abs(float(values.mean())) <= 6 * std / len(values) ** 0.5


def test_gaussian_of_std_zero_is_exactly_zero() -> None:
    drawn = sample_gaussian(2, 3, 8, std=0.0, generator=frame_generator(0, "0", "q"))
    assert torch.equal(drawn, torch.zeros(2, 3, 8))


def test_gaussian_matched_rows_are_of_unit_length_on_average() -> None:
    weight = torch.zeros(8, 32, 128)
    drawn = start_of(PRESETS["gaussian_matched"], weight, frame_generator(0, "0", "q")).double()
    squared_lengths = drawn.square().sum(-1)
    # A sum of D squares of variance-1/D Gaussians has mean 1 and variance 2/D; six standard errors over all rows.
    assert abs(float(squared_lengths.mean()) - 1) <= 6 * (2 / 128 / squared_lengths.numel()) ** 0.5


@pytest.mark.parametrize("sample", [sample_frames, sample_global_frame])
def test_frames_are_haar(sample: Callable[..., Tensor]) -> None:
    """No direction and no sign is preferred; with LAPACK's own signs the first entry is never positive."""
    count, head_dim, model_dim = 4000, 3, 6
    if sample is sample_frames:
        frames = sample(count, head_dim, model_dim, generator=frame_generator(0, "0", "q"))
    else:
        frames = torch.cat([sample(1, head_dim, model_dim, generator=frame_generator(n, "0", "q")) for n in range(count)])
    entries = frames.double()
    # Each entry of a Haar frame has mean 0, variance 1/D and fourth moment 3 / (D (D + 2)). Six standard errors: 18
    # entries of a fixed draw, so a correct sampler on another machine's generator would fail less than once in 10^7.
    variance, fourth = 1 / model_dim, 3 / (model_dim * (model_dim + 2))
    assert float(entries.mean(0).abs().max()) <= 6 * (variance / count) ** 0.5
    assert float((entries.square().mean(0) - variance).abs().max()) <= 6 * ((fourth - variance**2) / count) ** 0.5


@quickly
@given(shapes(), seeds)
def test_a_frame_cast_to_bfloat16_is_orthonormal_up_to_its_rounding(shape: tuple[int, int, int], seed: int) -> None:
    frames = sample_frames(*shape, generator=frame_generator(seed, "0", "q")).bfloat16()
    assert orthonormality_error(frames) <= BFLOAT16_BOUND


def test_orthonormality_error_is_the_largest_entry_of_gram_minus_identity() -> None:
    cases: list[tuple[list[list[float]], float]] = [
        ([[1.0, 0.0], [0.0, 1.0]], 0.0),
        ([[2.0, 0.0], [0.0, 1.0]], 3.0),
        ([[1.0, 0.0], [0.5, 1.0]], 0.5),
    ]
    for rows, expected in cases:
        with case(rows, expected):
            good = [[0.0, 1.0], [1.0, 0.0]]
            assert orthonormality_error(torch.tensor([good, rows])) == expected
