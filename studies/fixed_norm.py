"""The control of slices: the same run with the gains and biases of the norms before attention held at one and zero.

    python studies/fixed_norm.py --seeds 17-19 --out FOLDER [--record]

With slices (`oelm_axes`) that norm acts directly as a gain and a bias per coordinate of queries and keys: it could learn what
the projections no longer do. `--record` keeps the perplexities as results/probes/fixed-norm.json, for docs/log.md.
"""

from __future__ import annotations

import argparse
import contextlib
import math
from pathlib import Path

from oelm.config import RunConfig
from oelm.data.prepare import prepare
from oelm.experiments.catalog import load_catalog
from oelm.experiments.plan import make_config, parse_seeds
from oelm.files import write_json
from oelm.method.apply import hold
from oelm.method.audit import record_of
from oelm.process import StopFlag
from oelm.runs.rundir import RunDir
from oelm.train.device import choose_compute
from oelm.train.loop import run_loop
from oelm.train.optim import build_optimizer
from oelm.train.session import build_session
from oelm.train.task import LanguageModelTask, resolve
from oelm.train.watch import Silence

RECORD = Path(__file__).resolve().parent.parent / "results" / "probes" / "fixed-norm.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="17-19")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--experiment", default="GPT-09-axes")
    parser.add_argument("--budget", default="laptop")
    parser.add_argument("--record", action="store_true", help=f"keep the figures as {RECORD.name}")
    asked = parser.parse_args()
    ppl = {}
    for seed in parse_seeds(asked.seeds):
        config = make_config(load_catalog().get(asked.experiment), asked.budget, seed=seed)
        assert isinstance(config, RunConfig)
        ppl[str(seed)] = train_with_fixed_norms(config, asked.out / asked.experiment / f"seed-{seed}")
        print(f"{asked.experiment}, seed {seed}, attention norms fixed: PPL {ppl[str(seed)]:.2f}", flush=True)
    if asked.record:
        write_json(RECORD, {"experiment": asked.experiment, "budget": asked.budget, "ppl": ppl})


def train_with_fixed_norms(config: RunConfig, out: Path) -> float:
    """Train from start to end in a new folder, and return the best validation perplexity."""
    tokens = prepare(config.data.source, tokenizer=config.data.tokenizer, max_tokens=config.data.max_tokens)
    compute = choose_compute(config.device, config.precision)
    with RunDir(out) as folder:
        config = folder.claim(resolve(config, tokens))
        task = LanguageModelTask(tokens, config, compute)
        session = build_session(config, folder, task, compute, stop=StopFlag(), watch=Silence())
        norms = [name for name, _ in session.model.named_parameters() if ".attention_norm." in name]
        hold(session.model, [*record_of(session.model), *norms])
        session.optimizer = build_optimizer(session.model, config.optim, device=compute.device)
        with contextlib.closing(session.folder.metrics):
            run_loop(session)
    assert session.state.best_value is not None
    return math.exp(session.state.best_value)


if __name__ == "__main__":
    main()
