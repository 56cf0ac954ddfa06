"""The one resolved config of a run: strict, typed, and enough by itself to repeat the run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import to_jsonable_python

from oelm.errors import ConfigError, suggest
from oelm.files import Strict, dump_json, refuse_constant
from oelm.method.method import Method, method_name, rank_within, resolve_method
from oelm.models.shape import Architecture, GPTConfig, WeightCounts, weight_counts

Device = Literal["auto", "cuda", "mps", "cpu"]
Precision = Literal["auto", "float32", "bf16", "fp16"]


Beta = Annotated[float, Field(ge=0, lt=1)]


class DataConfig(Strict):
    """What to train on: a named corpus, text (a file, folder, .jsonl or .parquet), or a prepared token set."""

    source: str = Field(min_length=1)
    tokenizer: str = "bpe:4096"
    # An extract: of each split, no document is begun after so many tokens. None takes all, or whatever extract a name has.
    max_tokens: int | None = Field(default=None, gt=0)


class OptimConfig(Strict):
    """AdamW, or Muon for the matrices of the layers and AdamW for the rest; matrices decay, norms and biases do not."""

    lr: float = Field(gt=0)
    name: Literal["adamw", "muon"] = "adamw"
    # Muon's own rate, as a multiple of `lr`: one number to tune scales both.
    matrix_rate: float = Field(default=5.0, gt=0, le=1000)
    # Which of the two trains thin matrices of Q and K: low-rank corrections, and Q and K of few rows.
    thin: Literal["muon", "adamw"] = "muon"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    weight_decay: float = Field(default=0.01, ge=0)
    clip_norm: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _muons_own(self) -> Self:
        if self.name != "muon" and (self.matrix_rate, self.thin) != (5.0, "muon"):
            raise ValueError("matrix_rate and thin are settings of Muon; give optim.name muon too, or leave them out")
        return self


class ScheduleConfig(Strict):
    """Linear warm-up, of half the run at most, then a cosine down to `final_fraction` of the peak."""

    warmup_steps: int = Field(ge=0)
    final_fraction: float = Field(default=0.0, ge=0, le=1)


class InitFrom(Strict):
    """Weights to start from instead of fresh ones: a checkpoint of another run, known by its digest."""

    checkpoint: str
    sha256: str
    tokenizer_sha256: str


class ExamplesConfig(Strict):
    """What a classifier learns: 'stdlib', a named task, or a table of the user's own; docs/classifiers.md tells the rest."""

    task: str = Field(min_length=1)
    # Where local copies of a named task lie; without it, what was prepared under the name is taken, else the hub is asked.
    folder: str | None = None
    dev: str | None = None
    columns: str | None = None
    labels: str | None = None
    language: str = "en"
    max_length: int = Field(default=128, ge=3)
    # Of the training split, chosen once and for all seeds; 0 takes all.
    max_train: int = Field(default=0, ge=0)


class ClassifierConfig(Strict):
    """A pretrained model (a folder, or an id of the hub), or, without a source, a fresh small one of this shape."""

    source: str | None = None
    # Of a fresh model; an encoder-decoder (t5, bart) has num_layers in each half.
    architecture: Architecture = "bert"
    # Of the pretrained weights; filled in when a run begins.
    sha256: str = ""
    # None keeps the model's own rates.
    dropout: float | None = Field(default=None, ge=0, lt=1)
    # 0 follows the task.
    num_labels: int = Field(default=0, ge=0)
    vocab_size: int = Field(default=4096, gt=261)
    model_dim: int = Field(default=128, gt=0)
    num_layers: int = Field(default=2, gt=0)
    num_heads: int = Field(default=2, gt=0)
    ff_dim: int = Field(default=512, gt=0)

    @model_validator(mode="after")
    def _one_thing_says_the_architecture(self) -> Self:
        shape = ("architecture", "vocab_size", "model_dim", "num_layers", "num_heads", "ff_dim")
        own = {name: type(self).model_fields[name].default for name in shape}
        if self.source is not None and (said := next((name for name in shape if getattr(self, name) != own[name]), None)):
            raise ValueError(
                f"{said} {getattr(self, said)!r} is for fresh models; the folder of source {self.source} says its own: "
                "leave one of the two out"
            )
        return self


class TrainConfig(Strict):
    """What every run has, whatever it learns. Fields are described in docs/training.md."""

    method: Method = Method()
    optim: OptimConfig
    schedule: ScheduleConfig
    steps: int = Field(gt=0)
    # Where a finished run was extended: up to there it followed the schedule of that many steps.
    extended_at: tuple[int, ...] = ()
    batch_size: int = Field(gt=0)
    micro_batch_size: int = Field(gt=0)
    eval_every: int = Field(gt=0)
    save_every: int = Field(gt=0)
    keep_checkpoints: int = Field(default=2, ge=2)
    timing_warmup_steps: int = Field(default=100, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**31)
    device: Device = "auto"
    precision: Precision = "auto"
    compile: bool = False
    deterministic: bool = False

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size {self.batch_size} is not a multiple of micro_batch_size {self.micro_batch_size}")
        stages = (*self.extended_at, self.steps)
        if any(earlier >= later for earlier, later in zip(stages, stages[1:], strict=False)):
            raise ValueError(f"extended_at {list(self.extended_at)} must rise and stay below steps {self.steps}")
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the config as plain JSON data."""
        data: dict[str, Any] = self.model_dump(mode="json")
        return data

    @property
    def planned_steps(self) -> int:
        """The steps that a method's fractions refer to; an extended run keeps those of its first length."""
        return (*self.extended_at, self.steps)[0]

    @property
    def variant(self) -> str:
        """A slug and eight hex digits that name this config whatever its seed: the folder of its runs."""
        # Without what is at its default: a setting that is new in a later version renames no folder.
        plain = self.model_dump(mode="json", exclude={"seed"}, exclude_defaults=True)
        slug = method_name(self.method).split(",")[0].replace("_", "-").replace(" ", "-")
        return f"{slug}-{hashlib.sha256(dump_json(plain).encode()).hexdigest()[:8]}"


class RunConfig(TrainConfig):
    """Everything that decides what a run of a language model computes."""

    model: GPTConfig
    data: DataConfig
    init_from: InitFrom | None = None

    def weight_counts(self) -> WeightCounts:
        """Count the parameters of the model as it starts; `model.vocab_size` must be known."""
        depth, method = self.model.num_layers, self.method
        layers = [layer for layer in range(depth) if method.selects(layer, depth)]
        return weight_counts(
            self.model, method, layers=layers, learn_layers=[layer for layer in layers if method.learns_in(layer, depth)]
        )

    @model_validator(mode="after")
    def _layers_exist(self) -> Self:
        self.method.check_layers(self.model.num_layers)
        return self

    @model_validator(mode="after")
    def _correction_has_a_rank(self) -> Self:
        # `freeze` would refuse it, too, but only when the data has been prepared.
        share, rows, model_dim = self.method.correction, self.model.qk_rows, self.model.model_dim
        if share and rank_within(share, rows, model_dim) == 0:
            # Rounded up: what is advised must not be refused again.
            least = math.ceil(1e4 * (rows + model_dim) / (rows * model_dim)) / 1e4
            raise ValueError(
                f"method.correction {share:g} of Q's {rows} x {model_dim} numbers is less than a correction of rank 1 needs; "
                f"raise it to {least:g} at least, or leave it out"
            )
        return self


class FinetuneConfig(TrainConfig):
    """Everything that decides what a run of a classifier computes. With `epochs`, the steps follow from the data."""

    model: ClassifierConfig
    examples: ExamplesConfig
    epochs: float | None = Field(default=None, gt=0)
    steps: int = Field(default=0, ge=0)
    # 0: once an epoch.
    eval_every: int = Field(default=0, ge=0)
    save_every: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _has_a_length(self) -> Self:
        if (self.steps > 0) == (self.epochs is not None):
            raise ValueError("give either steps or epochs")
        return self


Config = TypeVar("Config", bound=TrainConfig)


def parse_config(data: dict[str, Any], *, where: str) -> RunConfig:
    """Return the language model's config that plain data describes, or raise as `parse_as` does."""
    return parse_as(RunConfig, data, where=where)


def parse_as(kind: type[Config], data: dict[str, Any], *, where: str) -> Config:
    """Return the config that plain data describes; ConfigError names `where`, the key, and the nearest known one."""
    if isinstance(data.get("method"), str):
        data = {**data, "method": resolve_method(data["method"]).model_dump(mode="json")}
    for key, value in flatten(data).items():
        for number in value if isinstance(value, list | tuple) else [value]:
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{where}: {key}: must be a finite number (given: {number})")
    try:
        # Through JSON: there, strict types accept a list where a tuple is meant and nothing else is coerced.
        return kind.model_validate_json(dump_json(data))
    except ValidationError as problem:
        # No file can name a function, so that a method's init may be one is of no use to the reader.
        errors = [error for error in problem.errors() if error["type"] != "callable_type"]
        raise ConfigError(f"{where}: {'; '.join(_explain(kind, error) for error in errors[:5])}") from None
    except (TypeError, ValueError) as problem:
        raise ConfigError(f"{where}: {problem}") from None


def _explain(kind: type[BaseModel], error: Any) -> str:
    path: list[Any] = []
    for part in error["loc"]:
        # Where a field may be of several types, the library adds the type's name to the path; that is no key of ours.
        if isinstance(part, int) or part in _known_keys(kind, path):
            path.append(part)
    if error["type"] == "extra_forbidden":
        path.append(error["loc"][-1])
    dotted = ".".join(map(str, path)) or "config"
    if error["type"] == "extra_forbidden":
        prefix = ".".join(map(str, path[:-1]))
        return f"{prefix + ': ' if prefix else ''}unknown key '{path[-1]}'{nearest_key(kind, path)}"
    if error["type"] == "missing":
        return f"{dotted}: missing, and it has no default"
    message = str(error["msg"]).removeprefix("Value error, ")
    given = error.get("input")
    if error["type"] in ("float_type", "int_type") and str(given).lower().lstrip("+-") in ("nan", "inf", "infinity"):
        return f"{dotted}: must be a finite number (given: {given})"
    told = f" (given: {given!r})" if isinstance(given, str | int | float | bool) else ""
    return f"{dotted}: {message}{told}{_as_json(kind, path, error) if isinstance(given, str) else ''}"


def _as_json(kind: type[BaseModel], path: list[Any], error: Any) -> str:
    """Return how --set takes what has parts; '' for what has none."""
    known = [f'"{key}": ...' for key in _known_keys(kind, path)]
    if error["type"] != "tuple_type" and not known:
        return ""
    example = f"{{{', '.join(known)}}}" if known else '["q", "k"] or [0.9, 0.99]'
    return f"; --set takes it as JSON, every name and word in double quotes and the whole in single ones, such as {example}"


def nearest_key(kind: type[BaseModel], path: list[Any]) -> str:
    """Return what to say behind an unknown key: a question with the nearest known one, or which are known there."""
    known = _known_keys(kind, path[:-1])
    # A right name in the wrong place ('lr' for 'optim.lr') is nearer than a similar one.
    nested = [f"{outer}.{path[-1]}" for outer in kind.model_fields if path[-1] in _known_keys(kind, [outer])]
    if nested:
        return f" (did you mean '{nested[0]}'?)"
    return suggest(str(path[-1]), known) or f"; known keys: {', '.join(known)}"


def _known_keys(model: type[BaseModel], path: list[Any]) -> list[str]:
    for part in path:
        field = model.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            return []
        model = inner[0]
    return list(model.model_fields)


def parse_any(data: Any, *, where: str) -> RunConfig | FinetuneConfig:
    """Return the config of either kind that plain data describes, or raise as `parse_as` does."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: must be an object of settings, found {type(data).__name__}")
    return parse_as(FinetuneConfig, data, where=where) if "examples" in data else parse_config(data, where=where)


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one mapping from dotted paths to values."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def with_overrides(data: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of nested settings with values replaced by dotted path; new keys are left for the type to judge."""
    changed: dict[str, Any] = json.loads(dump_json(data))
    for dotted, value in overrides.items():
        *parents, last = dotted.split(".")
        inner = changed
        for part in parents:
            # What is null holds nothing yet: the type then says what else belongs there.
            inner[part] = {} if inner.get(part) is None else inner[part]
            if not isinstance(inner[part], dict):
                raise ConfigError(f"{dotted}: '{part}' is a single value, it has no settings inside")
            inner = inner[part]
        inner[last] = value
    return changed


def parse_override(text: str) -> tuple[str, Any]:
    """Read 'a.b=c': the value is JSON where it parses as such (numbers, true, null, lists), else plain text."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"--set {text!r}: write it as key=value, for example --set optim.lr=0.001")
    try:
        return key, json.loads(value, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return key, value


def parse_overrides(texts: Sequence[str], *, flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read several of them beside what flags say (None: nothing), by dotted path; one setting said twice is refused."""
    changes = {key: value for key, value in (flags or {}).items() if value is not None}
    for key, value in map(parse_override, texts):
        if key in changes:
            raise ConfigError(f"--set {key}: given twice; remove one")
        changes[key] = value
    return changes


def differences(old: TrainConfig, new: TrainConfig) -> list[str]:
    """Return one line per setting in which two configs differ, by dotted path."""
    flat_old, flat_new = flatten(old.as_dict()), flatten(new.as_dict())
    keys = [key for key in {**flat_old, **flat_new} if flat_old.get(key) != flat_new.get(key)]
    return [f"{key}: {flat_old.get(key)!r} there, {flat_new.get(key)!r} asked for" for key in keys]


def with_defaults(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings by dotted path, and beside them the defaults of those that the record's version had not yet.

    Nothing is checked: whatever a damaged or foreign record holds stays as it is.
    """
    defaults = flatten(_defaults(FinetuneConfig if "examples" in data else RunConfig))
    recorded = flatten(data)
    return recorded | {key: value for key, value in defaults.items() if key not in recorded}


@cache
def _defaults(kind: type[BaseModel]) -> dict[str, Any]:
    """Return the defaults of a config and of the configs that it must hold, as the plain data a record has."""
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if not field.is_required():
            found[name] = to_jsonable_python(field.get_default(call_default_factory=True))
        elif isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found[name] = _defaults(field.annotation)
    return found
