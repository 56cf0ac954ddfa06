"""Records of speed, which the benchmarks of `make bench` keep and tables.py shows: read and written without torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from oelm.bench.speed import TimedShape
from oelm.errors import DataError
from oelm.files import Strict, write_json
from oelm.stats import Ratio

PUBLISHED = ("laptop", "512", "medium")


def inverse(ratio: Ratio) -> Ratio:
    """Return the ratio the other way round: exact, because it is a mean of logarithms."""
    return Ratio(1 / ratio.value, 1 / ratio.high, 1 / ratio.low, ratio.count)


class Conditions(Strict):
    """The setting of a measurement, without naming a machine."""

    threads: int
    cpu_cores: int
    cpu_capability: str
    torch: str


class ArmFigures(Strict):
    """One contender. `ratio` is its speed relative to the record's first."""

    name: str
    median_s: float
    ratio: Ratio
    bound: float | None = None
    stored: int | None = None
    trainable: int | None = None
    peak_bytes: int | None = None
    tokens_per_s: float | None = None
    against_transformers: Ratio | None = None


class Product(Strict):
    """A matrix product of a step, (rows, inner) times (inner, columns): how often it occurs, and its best time alone."""

    name: str
    rows: int
    columns: int
    inner: int
    count: int
    best_s: float

    @property
    def operations(self) -> int:
        return 2 * self.rows * self.columns * self.inner * self.count


class TimeSplit(Strict):
    """Shares of a step's time, and the machine's own speed at the step's products."""

    step_s: float
    operations: int
    gemm_gflops: float
    shares: dict[str, float]
    products: tuple[Product, ...]

    @property
    def step_gflops(self) -> float:
        return self.operations / self.step_s / 1e9

    @property
    def limit_share(self) -> float:
        """The step's share of the GEMM limit: all its products, attention's too, at the machine's own speed."""
        return self.step_gflops / self.gemm_gflops


class SpeedRecord(Strict):
    """The figures of one part of `make bench` at one shape."""

    part: str
    shape: str
    model: TimedShape
    rounds: int
    arms: tuple[ArmFigures, ...] = Field(default=())
    split: TimeSplit | None = None
    conditions: Conditions

    def arm(self, name: str) -> ArmFigures | None:
        return next((arm for arm in self.arms if arm.name == name), None)


def write_speed(folder: Path, record: SpeedRecord) -> Path:
    """Write a record; it replaces the one of its part and shape."""
    path = folder / f"{record.part}-{record.shape}.json"
    write_json(path, record.model_dump(mode="json", exclude_none=True))
    return path


def read_speed(folder: Path, part: str, shape: str) -> SpeedRecord | None:
    """Return the record of a part at a shape, None where nothing was measured; raise DataError for a damaged one."""
    path = folder / f"{part}-{shape}.json"
    if not path.is_file():
        return None
    try:
        return SpeedRecord.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: no record of speed ({where}: {first['msg']}); measure it again with make bench") from None
