"""Tokens per second of our generate and of transformers' on the same model, exported: greedy, batch 1, the same text."""

from __future__ import annotations

import argparse
import tempfile
from itertools import islice
from pathlib import Path

import torch
from record import keep, parse_options

from oelm.bench.ab import interleave
from oelm.data.tokenizer import train_bpe
from oelm.intervals import Ratio, mean_ratio
from oelm.method.apply import freeze
from oelm.models.export import export_gpt2
from oelm.models.generate import Sampling, generate, lay_out_by_columns
from oelm.models.gpt import GPTConfig, build_gpt

SHAPES = {
    "laptop (4 x 128)": GPTConfig(
        vocab_size=2048, seq_len=256, model_dim=128, num_layers=4, num_heads=4, ff_dim=512, dropout=0.0
    ),
    "Medium-512": GPTConfig(vocab_size=50257, seq_len=512, model_dim=512, num_layers=6, num_heads=8, ff_dim=2048, dropout=0.0),
}
PROMPT = [5, 6, 7, 8]


def compare(name: str, config: GPTConfig, *, rounds: int, num_tokens: int) -> Ratio:
    from transformers import GPT2LMHeadModel

    model = build_gpt(config, seed=0)
    freeze(model, "oelm_freeze")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_bpe(["any text serves"], vocab_size=300)
        export_gpt2(model, tokenizer, Path(folder) / "hf", end_of_text=0, card="")
        theirs = GPT2LMHeadModel.from_pretrained(Path(folder) / "hf").eval()
    lay_out_by_columns(model)
    # Without an end mark, so that both write exactly as many tokens.
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    prompt = torch.tensor([PROMPT])
    mask = torch.ones_like(prompt)

    def ours() -> list[int]:
        return list(islice(generate(model, PROMPT, sampling=Sampling(temperature=0.0)), num_tokens))

    def transformers() -> list[int]:
        with torch.no_grad():
            output = theirs.generate(prompt, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False, use_cache=True)
        return [int(token) for token in output[0, len(PROMPT) :]]

    assert ours() == transformers(), "the two must write the same text for their speeds to be compared"
    seconds = interleave({"ours": ours, "transformers": transformers}, rounds=rounds)
    for who, values in seconds.items():
        print(f"  {who:13} {num_tokens / sorted(values)[len(values) // 2]:8.0f} tokens/s (median)")
    ratio = mean_ratio(seconds["transformers"], seconds["ours"])
    print(f"  {name}: ours writes {ratio} as fast as transformers, the same {num_tokens} tokens")
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    measured = [parser.add_argument("--tokens", type=int, default=200)]
    arguments = parse_options(parser, measured=measured)
    print(f"\ngeneration, greedy, batch 1, {torch.get_num_threads()} threads, {arguments.rounds} interleaved rounds")
    sizes = {"rounds": arguments.rounds, "num_tokens": arguments.tokens}
    figures = {name: compare(name, config, **sizes) for name, config in SHAPES.items()}
    if arguments.record:
        keep("generation", figures, rounds=arguments.rounds, threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
