"""Records of `make bench` on speed, by part and shape: read and written without torch."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError

from oelm.bench.record import TimedShape
from oelm.errors import DataError
from oelm.files import write_json
from oelm.intervals import Ratio
from oelm.strict import Strict


class RatioFields(Strict):
    """A ratio with its 95% interval, over so many rounds."""

    value: float
    low: float
    high: float
    count: int

    def inverse(self) -> RatioFields:
        """Return the ratio the other way round: exact, because it is a mean of logarithms."""
        return RatioFields(value=1 / self.value, low=1 / self.high, high=1 / self.low, count=self.count)


class Conditions(Strict):
    """What the figures were measured on, without naming a machine."""

    threads: int
    cpu_cores: int
    cpu_capability: str
    torch: str


class ArmFigures(Strict):
    """One contender. `ratio` says how many times as fast it is as the record's first."""

    name: str
    median_s: float
    ratio: RatioFields
    bound: float | None = None
    stored: int | None = None
    trainable: int | None = None
    peak_bytes: int | None = None
    tokens_per_s: float | None = None
    against_transformers: RatioFields | None = None


class ProductFigures(Strict):
    """One matrix product of a step, timed alone."""

    name: str
    rows: int
    columns: int
    inner: int
    count: int
    best_s: float


class TimeSplit(Strict):
    """Shares of a step's time, and the machine's own speed at the step's products."""

    step_s: float
    operations: int
    gemm_gflops: float
    shares: dict[str, float]
    products: tuple[ProductFigures, ...]

    @property
    def step_gflops(self) -> float:
        return self.operations / self.step_s / 1e9

    @property
    def limit_share(self) -> float:
        """Which share of the GEMM limit the step reaches: its products, attention's too, at the machine's own speed."""
        return self.step_gflops / self.gemm_gflops


class SpeedRecord(Strict):
    """What one part of `make bench` measured at one shape."""

    part: str
    shape: str
    model: TimedShape
    rounds: int
    arms: tuple[ArmFigures, ...] = Field(default=())
    split: TimeSplit | None = None
    conditions: Conditions

    def arm(self, name: str) -> ArmFigures | None:
        return next((arm for arm in self.arms if arm.name == name), None)


def ratio_fields(ratio: Ratio) -> RatioFields:
    return RatioFields(value=ratio.value, low=ratio.low, high=ratio.high, count=ratio.count)


def speed_path(folder: Path, part: str, shape: str) -> Path:
    return folder / f"{part}-{shape}.json"


def write_speed(folder: Path, record: SpeedRecord) -> Path:
    """Write a record in place of the one that its part and shape had."""
    path = speed_path(folder, record.part, record.shape)
    write_json(path, record.model_dump(mode="json", exclude_none=True))
    return path


def read_speed(folder: Path, part: str, shape: str) -> SpeedRecord | None:
    """Return the record of a part at a shape, None where nothing was measured; raise DataError for a damaged one."""
    path = speed_path(folder, part, shape)
    if not path.is_file():
        return None
    try:
        return SpeedRecord.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        first = problem.errors()[0]
        where = ".".join(str(place) for place in first["loc"])
        raise DataError(f"{path}: no record of speed ({where}: {first['msg']}); measure it again with make bench") from None
