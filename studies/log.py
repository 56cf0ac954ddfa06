"""The tables of docs/log.md, from the records of the probes.

python studies/log.py ideas      # a table by its name; `--help` lists them
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from oelm.stats import mean_ratio

RESULTS = Path(__file__).resolve().parent.parent / "results"
PROBES = RESULTS / "probes"
FIRST = RESULTS / "tinystories-laptop" / "runs.json"
SWEPT_BEST, PLAIN = "lr-0.004-steps-1000-1fa197cd", "default"
RATES = {
    0.001: "lr-0.001-steps-1000-70c301f1",
    0.002: "lr-0.002-steps-1000-968511de",
    0.004: SWEPT_BEST,
    0.008: "lr-0.008-steps-1000-da27c709",
}
# The idea of each run, by its folder.
IDEAS = {
    ("GPT-01", SWEPT_BEST): "baseline",
    ("GPT-02", SWEPT_BEST): "frames, frozen (`oelm_freeze`)",
    ("GPT-02-matched", SWEPT_BEST): "Gaussian of the same scale, frozen (`gaussian_matched`)",
    ("GPT-02-scaled", SWEPT_BEST): "frames, logits twice as large (`oelm_scaled`)",
    ("GPT-02", "scale-2.0-lr-0.004-steps-1000-a5f7741a"): "frames, logits four times as large",
    ("GPT-02", "scale-2.83-lr-0.004-steps-1000-0ee07cb1"): "frames, logits eight times as large",
    ("GPT-02-matrix", SWEPT_BEST): "frames, a learnt matrix per head (`oelm_matrix`), 1/8 of Q/K's parameters",
    ("GPT-02-lowrank", SWEPT_BEST): "frames, a learnt low-rank correction (`oelm_lowrank`), 1/8",
    ("GPT-01-thin", SWEPT_BEST): "nothing frozen, Q and K an eighth as wide (thin control), 1/8",
    ("GPT-02-last-half", SWEPT_BEST): "frames frozen in the last half of the layers (`oelm_last_half`)",
}
SWEPT = {
    "baseline": "GPT-01",
    "`oelm_freeze`": "GPT-02",
    "`gaussian_matched`": "GPT-02-matched",
    "`oelm_lowrank`": "GPT-02-lowrank",
    "thin control": "GPT-01-thin",
}
# The same at the study's shape of now, half length: where the sweeps of the study and the probes lie.
HALF = "lr-0.004-steps-500-ba66fbef"
STUDY = RESULTS / "variants"
NOW = {
    "baseline": STUDY / "GPT-01" / "laptop" / HALF,
    "frames (`oelm_freeze`)": STUDY / "GPT-02" / "laptop" / HALF,
    "a correction in all layers (`oelm_lowrank`), 1/8": STUDY / "GPT-02-lowrank" / "laptop" / HALF,
    "nothing frozen, Q and K an eighth as wide (thin control), 1/8": STUDY / "GPT-01-thin" / "laptop" / HALF,
}
# Arms behind a short convolution where some began badly, and where their runs of full length lie.
STARTED = (STUDY, RESULTS / "short-conv")
STARTS = {
    "GPT-06-conv": ("WikiText-103", "baseline"),
    "GPT-07-conv": ("WikiText-103", "`oelm_freeze`"),
    "GPT-04-conv": ("OpenWebText", "baseline"),
    "GPT-05-conv": ("OpenWebText", "`oelm_freeze`"),
}
# Slices next to what they are compared with, by baseline.
SLICES, FIXED = RESULTS / "slices", "fixed"
SLICED = {
    "GPT-08": {
        "baseline": "GPT-08",
        "frames (`oelm_freeze`)": "GPT-09",
        "slices (`oelm_axes`)": "GPT-09-axes",
        "slices, attention norms fixed": FIXED,
        "correction on frames (`oelm_lowrank`)": "GPT-09-lowrank",
        "correction on slices (`oelm_axes_lowrank`)": "GPT-09-axes-lowrank",
        "Q and K an eighth as wide (thin)": "GPT-08-thin",
        "queries are slices, keys learn (`oelm_axes_q`)": "GPT-09-axes-q",
    },
    "GPT-08-conv": {
        "behind a convolution: baseline": "GPT-08-conv",
        "frames (`oelm_freeze`)": "GPT-09-conv",
        "slices (`oelm_axes`)": "GPT-09-conv-axes",
        "correction on frames (`oelm_lowrank`)": "GPT-09-conv-lowrank",
        "correction on slices (`oelm_axes_lowrank`)": "GPT-09-conv-axes-lowrank",
        "Q and K an eighth as wide (thin)": "GPT-08-conv/qk-dim-4-lr-0.008-c85ae0ba",
        "queries are slices, keys learn (`oelm_axes_q`)": "GPT-09-conv-axes-q",
    },
}
CORPORA = {"TinyStories": "GPT-01", "OpenWebText": "GPT-04", "WikiText-103": "GPT-06", "standard library": "GPT-08"}
WINDOWS = {("16 x 128", "2,048"): (PLAIN, 2), ("32 x 64", "512"): ("batch-size-32-tokenizer-bpe-512-eval-eve-768ea824", 100)}


def run(experiment: str, variant: str, seed: int = 100) -> Path:
    """Return the folder of a run's record."""
    return PROBES / experiment / "laptop" / variant / f"seed-{seed}"


def figures(path: Path) -> dict[str, Any]:
    """Return the figures that a run ended with."""
    return dict(json.loads((path / "timing_stats.json").read_text(encoding="utf-8")))


def ppl(experiment: str, variant: str, seed: int = 100) -> float:
    """Return the best perplexity of a run."""
    return float(figures(run(experiment, variant, seed))["best_ppl"])


def ppl_at(step: int, rows: Iterable[dict[str, Any]]) -> float:
    """Return the perplexity of the evaluation at a step."""
    return next(float(row["val_ppl"]) for row in rows if row.get("step") == step and "val_ppl" in row)


def metrics(experiment: str, variant: str) -> list[dict[str, Any]]:
    """Return all rows of a run's metrics."""
    lines = (run(experiment, variant) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def percent(ratio: float) -> str:
    """Return a ratio as a change."""
    return f"{100 * (ratio - 1):+.1f}%"


def first() -> list[list[str]]:
    """The runs of 2,000 steps at one rate."""
    names = {"GPT-01": "baseline", "GPT-02": "`oelm_freeze`", "GPT-02-matched": "`gaussian_matched`", "GPT-03": "`oelm_random`"}
    runs = json.loads(FIRST.read_text(encoding="utf-8"))
    by_seed = {name: {row["seed"]: row["best_ppl"] for row in runs if row["experiment"] == name} for name in names}
    found = {name: [by_seed[name][seed] for seed in sorted(by_seed["GPT-01"])] for name in names}
    rows = [["arm", "seeds", "PPL, geometric mean", "against the baseline [95%]"]]
    for name, text in names.items():
        ratio = mean_ratio(found[name], found["GPT-01"])
        mean = mean_ratio(found[name], [1.0] * len(found[name])).value
        gap = f"{percent(ratio.value)} [{100 * ratio.low - 100:+.1f}, {100 * ratio.high - 100:+.1f}]"
        rows.append([text, str(len(found[name])), f"{mean:.2f}", "" if name == "GPT-01" else gap])
    return rows


def ideas() -> list[list[str]]:
    """The ideas that were trained to their end."""
    baseline = ppl("GPT-01", SWEPT_BEST)
    found = [(text, ppl(*place)) for place, text in IDEAS.items()]
    found += [(f"frames, of which {each['idea']}, 1/8", ppl_at(1000, each["evaluations"])) for each in others(is_whole=True)]
    gaps = [[text, f"{value:.2f}", percent(value / baseline) if text != "baseline" else ""] for text, value in found]
    return [["", "PPL", "against the baseline"], *gaps]


def others(*, is_whole: bool) -> list[dict[str, Any]]:
    """Return the ideas without their own setting that were trained to the end, or those that were not."""
    kept = json.loads((PROBES / "ideas.json").read_text(encoding="utf-8"))
    return [each for each in kept if (each["evaluations"][-1]["step"] == each["config"]["steps"]) == is_whole]


def given_up() -> list[list[str]]:
    """The ideas that were stopped at half length, next to what they are compared with."""
    known = {"baseline": "GPT-01", "`oelm_freeze`": "GPT-02", "`oelm_scaled`": "GPT-02-scaled"}
    rows = [[name, f"{ppl_at(500, metrics(place, SWEPT_BEST)):.2f}"] for name, place in known.items()]
    return [
        ["", "PPL at step 500"],
        *rows,
        *([each["idea"], f"{ppl_at(500, each['evaluations']):.2f}"] for each in others(is_whole=False)),
    ]


def rates() -> list[list[str]]:
    """The sweep of learning rates."""
    found = {arm: [ppl(experiment, variant) for variant in RATES.values()] for arm, experiment in SWEPT.items()}
    rows = [["arm", *map(str, RATES)]]
    for arm, values in found.items():
        rows.append([arm, *(f"**{value:.2f}**" if value == min(values) else f"{value:.2f}" for value in values)])
    gaps = [percent(ours / theirs) for ours, theirs in zip(found["`oelm_freeze`"], found["baseline"], strict=True)]
    return [*rows, ["`oelm_freeze` against baseline", *gaps]]


def real() -> list[list[str]]:
    """Baselines over a bigram model of the same tokens."""
    rows = [["windows", "vocabulary", *CORPORA]]
    for named, (variant, seed) in WINDOWS.items():
        cells = []
        for experiment in CORPORA.values():
            path = run(experiment, variant, seed)
            ended = figures(path) if path.is_dir() else None
            cells.append("" if ended is None else f"{ended['best_ppl'] / ended['bigram_ppl']:.2f}")
        rows.append([*named, *cells])
    return rows


def early() -> list[list[str]]:
    """The confirming runs at the first shape, before it was given up."""
    seeds = (2, 3)
    rows = [["arm", *(f"seed {seed}" for seed in seeds)]]
    for arm, experiment in SWEPT.items():
        there = [run(experiment, PLAIN, seed).is_dir() for seed in seeds]
        if any(there):
            cells = (
                f"{ppl(experiment, PLAIN, seed):.2f}" if is_there else "" for seed, is_there in zip(seeds, there, strict=True)
            )
            rows.append([arm, *cells])
    return rows


def spikes() -> list[list[str]]:
    """Baselines on WikiText-103 by their protection from spikes of the gradient: loss after 200 steps, seed by seed."""
    kept = json.loads((PROBES / "spikes.json").read_text(encoding="utf-8"))
    recipes = {json.dumps(each["recipe"]): each["recipe"] for each in kept}
    rows = [["clip_norm", "betas", "warm-up", "lr", "loss at step 200, by seed", "largest norm"]]
    for key, recipe in recipes.items():
        for lr in sorted({each["lr"] for each in kept if json.dumps(each["recipe"]) == key}):
            found = [each for each in kept if json.dumps(each["recipe"]) == key and each["lr"] == lr]
            found.sort(key=lambda each: int(each["seed"]))
            losses = ", ".join(f"{each['loss_at_200']:.2f} ({each['seed']})" for each in found)
            largest = max(each["largest_grad_norm"] for each in found)
            named = [str(recipe["clip_norm"]), str(recipe.get("betas", [0.9, 0.999])), str(recipe.get("warmup_steps", 100))]
            rows.append([*named, str(lr), losses, f"{largest:.0f}"])
    return rows


def elsewhere() -> list[list[str]]:
    """One seed on WikiText-103 at the rates that were best on TinyStories."""
    arms = {"baseline": "GPT-06", "`oelm_freeze`": "GPT-07", "`oelm_lowrank`": "GPT-07-lowrank", "thin control": "GPT-06-thin"}
    variant, seed = "tuned-eed22aa9", 12
    baseline = ppl("GPT-06", variant, seed)
    rows = [["arm", "lr", "PPL", "against the baseline"]]
    for arm, experiment in arms.items():
        config = json.loads((run(experiment, variant, seed) / "config.json").read_text(encoding="utf-8"))
        value = ppl(experiment, variant, seed)
        gap = "" if experiment == "GPT-06" else percent(value / baseline)
        rows.append([arm, str(config["optim"]["lr"]), f"{value:.2f}", gap])
    return rows


def first_layer() -> list[list[str]]:
    """What the first layer needs: ideas, some of them stopped early."""
    baseline = float(figures(NOW["baseline"] / "seed-100")["best_ppl"])
    found: list[tuple[str, float | None, float | None, int]] = []
    for name, path in NOW.items():
        found.append((name, None, float(figures(path / "seed-100")["best_ppl"]), 500))
    for each in json.loads((PROBES / "first-layer.json").read_text(encoding="utf-8")):
        end = ppl_at(500, each["evaluations"]) if each["evaluations"] else None
        found.append((each["idea"], float(each["loss_176_to_200"]), end, int(each["last_step"])))
    rows = [["", "training loss, steps 176 to 200", "PPL at step 500", "against the baseline"]]
    for name, early, end, stopped in found:
        gap = f"given up at step {stopped}" if end is None else "" if name == "baseline" else percent(end / baseline)
        rows.append([name, "" if early is None else f"{early:.3f}", "" if end is None else f"{end:.2f}", gap])
    return rows


def short_conv() -> list[list[str]]:
    """What a short convolution before the first layer changes, in both arms."""
    behind = {
        "baseline behind a short convolution": STUDY / "GPT-01-conv" / "laptop" / HALF,
        "frames behind one (`oelm_freeze`)": STUDY / "GPT-02-conv" / "laptop" / HALF,
    }
    plain, conv = (float(figures(path / "seed-100")["best_ppl"]) for path in (NOW["baseline"], next(iter(behind.values()))))
    found = [(name, float(figures(NOW[name] / "seed-100")["best_ppl"]), plain) for name in list(NOW)[:2]]
    found += [(name, float(figures(path / "seed-100")["best_ppl"]), conv) for name, path in behind.items()]
    kept = json.loads((PROBES / "short-conv.json").read_text(encoding="utf-8"))
    found += [(each["idea"], ppl_at(500, each["evaluations"]), conv) for each in kept]
    rows = [["", "PPL at step 500", "against the baseline of its own kind", "against the plain baseline"]]
    for name, value, own in found:
        gaps = ["" if value == other else percent(value / other) for other in (own, plain)]
        rows.append([name, f"{value:.2f}", *gaps])
    return rows


def starts() -> list[list[str]]:
    """How runs behind a short convolution started, by rate: the effect of a spike of the gradient is visible at step 200."""
    given_up = json.loads((PROBES / "conv-given-up.json").read_text(encoding="utf-8"))
    rows = [["corpus", "arm", "lr", "training loss, steps 160 to 200, by seed"]]
    for name, (corpus, arm) in STARTS.items():
        found = [(each["lr"], each["seed"], early_loss(each["losses"])) for each in given_up if each["experiment"] == name]
        for path in (path for place in STARTED for path in place.glob(f"{name}/laptop/*/seed-*/config.json")):
            config = json.loads(path.read_text(encoding="utf-8"))
            if config["steps"] == 1000:
                kept = map(json.loads, path.with_name("metrics.jsonl").read_text(encoding="utf-8").splitlines())
                losses = {str(row["step"]): row["loss"] for row in kept if "loss" in row}
                found.append((config["optim"]["lr"], config["seed"], early_loss(losses)))
        for lr in sorted({lr for lr, _, _ in found}):
            told = ", ".join(f"{loss:.2f} ({seed})" for at, seed, loss in sorted(found) if at == lr)
            rows.append([corpus, arm, str(lr), told])
    return rows


def slices() -> list[list[str]]:
    """Queries and keys as slices next to frames, on the standard library: paired by seed with the baseline of the same kind."""
    rows = [["arm", "lr", "seeds", "PPL, geometric mean", "against the baseline [95%]"]]
    fixed = json.loads((PROBES / "fixed-norm.json").read_text(encoding="utf-8"))["ppl"]
    for baseline, arms in SLICED.items():
        theirs = by_seed(baseline)
        for name, experiment in arms.items():
            found = {int(seed): value for seed, value in fixed.items()} if experiment == FIXED else by_seed(experiment)
            seeds = sorted(seed for seed in found if seed in theirs and seed <= 19)
            if not seeds:
                continue
            lr = rate("GPT-09-axes" if experiment == FIXED else experiment)
            ours = [found[seed] for seed in seeds]
            ratio, mean = mean_ratio(ours, [theirs[seed] for seed in seeds]), mean_ratio(ours, [1.0] * len(ours)).value
            interval = f" [{100 * ratio.low - 100:+.1f}, {100 * ratio.high - 100:+.1f}]" if len(seeds) > 1 else ", one seed"
            gap = percent(ratio.value) + interval
            rows.append([name, lr, str(len(seeds)), f"{mean:.2f}", "" if experiment == baseline else gap])
    return rows


def speed_ideas() -> list[list[str]]:
    """What was tried to make a training step faster: medians of interleaved steps, as multiples of the baseline's speed."""
    rows = [["idea", "laptop shape", "6 x 512", "kept"]]
    for each in json.loads((PROBES / "speed-ideas.json").read_text(encoding="utf-8")):
        before = each.get("before", {})
        cells = [(f"{before[shape]:.3f}x, now " if before else "") + f"{each[shape]:.3f}x" for shape in ("laptop", "512")]
        rows.append([each["idea"], *cells, each["kept"]])
    return rows


def engine_ideas() -> list[list[str]]:
    """torch.compile against the plain step, and attention with dropout by blocks against PyTorch's."""
    found = json.loads((PROBES / "engine-ideas.json").read_text(encoding="utf-8"))
    rows = [["idea", "shape", "as fast [95%]", "seconds of the first step: without, with a cache"]]
    for idea, by_shape in found.items():
        for shape, figures_of in by_shape.items():
            ratio, first = figures_of["ratio"], figures_of.get("first_call_s")
            cells = [
                f"{ratio['value']:.3f}x [{ratio['low']:.3f}, {ratio['high']:.3f}]",
                f"{first[0]:.0f}, {first[1]:.1f}" if first else "",
            ]
            rows.append(
                [
                    {
                        "compile": "`torch.compile`, a whole step",
                        "dropout": "attention with dropout by blocks, attention alone",
                    }[idea],
                    {"512": "6 x 512", "medium": "Medium-512"}.get(shape, shape),
                    *cells,
                ]
            )
    return rows


def recipes() -> list[list[str]]:
    """The recipes that were tried for the baseline of `workstation`, best first."""
    rows = []
    for path in sorted((RESULTS / "recipes").glob("*/*/*/seed-*")):
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        found, lr = figures(path), config["optim"]["lr"]
        five_gram = found["ngram"]["val"][4]
        size, matrix_lr = f"{config['batch_size']} x {config['model']['seq_len']}", lr * config["optim"]["matrix_rate"]
        told = [size, f"{config['steps']:,}", f"{found['tokens'] / 1e6:.2f}M", f"{lr:g}", f"{matrix_lr:g}"]
        rows.append((found["best_ppl"], [*told, f"{found['best_ppl']:.2f}", f"{found['best_ppl'] / five_gram:.2f}"]))
    head = ["tokens a step", "steps", "tokens", "rate", "Muon's rate", "PPL", "over the 5-gram's"]
    return [head, *(row for _, row in sorted(rows))]


def search() -> list[list[str]]:
    """The arms of the search at `workstation`."""
    return selection("search")


def qualify() -> list[list[str]]:
    """The runs at `workstation` that decide whether a corpus and its rate qualify."""
    return selection("qualify")


def selection(folder: str) -> list[list[str]]:
    """Return the runs of a folder at `workstation`, each next to the baseline of its family at the same rate."""
    found = {}
    for path in sorted((RESULTS / folder).glob("*/workstation/*/seed-*")):
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        arm, _, data = path.parts[-4].partition(".")
        family = "conv-learn" if arm.startswith("conv-") else "learn"
        found[(data, family, config["optim"]["lr"], config["seed"], arm)] = path
    rows = [["data", "arm", "rate", "seed", "stored", "PPL at 800", "1,600", "2,400", "against its baseline"]]
    for (data, family, lr, seed, arm), path in sorted(found.items(), key=lambda each: (each[0][:4], each[0][4] != each[0][1])):
        lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        last, baseline = figures(path)["final_ppl"], found.get((data, family, lr, seed, family))
        gap = "" if baseline is None or arm == family else percent(last / figures(baseline)["final_ppl"])
        stored = json.loads((path / "audit.json").read_text(encoding="utf-8"))["total"]
        steps = [f"{ppl_at(step, lines):.2f}" for step in (800, 1600, 2400)]
        rows.append([data, arm, f"{lr:g}", str(seed), f"{stored:,}", *steps, gap])
    return rows


def by_seed(experiment: str) -> dict[int, float]:
    """Return the best perplexities of an experiment's runs of full length, by seed."""
    return {int(path.name.removeprefix("seed-")): float(figures(path)["best_ppl"]) for path, _ in whole_runs(experiment)}


def rate(experiment: str) -> str:
    """Return the learning rate of an experiment's runs of full length."""
    (found,) = {config["optim"]["lr"] for _, config in whole_runs(experiment)}
    return str(found)


def whole_runs(experiment: str) -> list[tuple[Path, dict[str, Any]]]:
    """Return the runs of full length with their configs: of the variant that is named, or of all but thin variants."""
    name, _, variant = experiment.partition("/")
    found = [path for place in (STUDY, SLICES) for path in place.glob(f"{name}/laptop/{variant or '*'}/seed-*")]
    configs = [(path, json.loads((path / "config.json").read_text(encoding="utf-8"))) for path in found]
    whole = [(path, config) for path, config in configs if config["steps"] == 1000]
    return whole if variant else [run for run in whole if not run[0].parent.name.startswith("qk-dim")]


def early_loss(losses: dict[str, float]) -> float:
    """Return the mean training loss of every tenth step from 160 to 200."""
    return sum(losses[str(step)] for step in range(160, 201, 10)) / 5


TABLES: dict[str, Callable[[], list[list[str]]]] = {
    "first": first,
    "ideas": ideas,
    "given-up": given_up,
    "rates": rates,
    "real": real,
    "early": early,
    "spikes": spikes,
    "elsewhere": elsewhere,
    "first-layer": first_layer,
    "short-conv": short_conv,
    "starts": starts,
    "slices": slices,
    "recipes": recipes,
    "search": search,
    "qualify": qualify,
    "speed-ideas": speed_ideas,
    "engine-ideas": engine_ideas,
}


def main() -> None:
    """Print one table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", choices=TABLES)
    head, *rows = TABLES[parser.parse_args().table]()
    print("\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)))


if __name__ == "__main__":
    main()
