"""Fresh classifiers of every architecture: theirs is the shape that was asked for, and padding changes no answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from oelm.errors import ConfigError
from oelm.method.sites import attention_sites
from oelm.models.hub import fresh_classifier
from oelm.models.shape import Architecture
from tests.cases import case
from tests.models.test_hub import SHAPE, weights

ARCHITECTURES: tuple[Architecture, ...] = ("bert", "t5", "bart")


def test_a_fresh_classifier_follows_the_seed_alone() -> None:
    for architecture in ARCHITECTURES:
        with case(architecture):
            made = [weights(fresh_classifier(architecture, SHAPE, seed=seed)) for seed in (0, 0, 1)]
            assert made[0] == made[1] != made[2]


def test_a_fresh_classifier_with_heads_that_do_not_fit_is_refused() -> None:
    for architecture in ARCHITECTURES:
        with case(architecture):
            with pytest.raises(ConfigError, match="model_dim 32 does not split into 5 heads"):
                fresh_classifier(architecture, replace(SHAPE, num_heads=5), seed=0)


def test_a_fresh_classifier_has_its_layers_in_each_half() -> None:
    cases: list[tuple[Architecture, int]] = [("bert", 2), ("t5", 6), ("bart", 6)]
    for architecture, sites in cases:
        with case(architecture, sites):
            # Encoder-decoders have an attention in each encoder layer and two in each decoder layer.
            assert len(attention_sites(fresh_classifier(architecture, SHAPE, seed=0))) == sites


def test_a_fresh_classifier_drops_out_at_the_rate_given() -> None:
    dropout_cases: list[float] = [0.0, 0.3]
    for dropout in dropout_cases:
        for architecture in ARCHITECTURES:
            with case(dropout, architecture):
                rates = fresh_classifier(architecture, SHAPE, seed=0, dropout=dropout).config.to_dict()  # type: ignore[union-attr,operator]
                assert {rate for name, rate in rates.items() if "dropout" in name and rate is not None} == {dropout}


# Closed once or twice, as one text or a pair: [CLS] 5 6 [SEP] 7 [SEP].
TEXTS = {"texts": [[2, 5, 6, 7, 3], [2, 8, 3]], "pairs": [[2, 5, 6, 3, 7, 3], [2, 8, 3, 3]]}


def test_padding_changes_no_answer_of_a_fresh_classifier() -> None:
    for kind in TEXTS:
        for architecture in ARCHITECTURES:
            with case(kind, architecture):
                model = fresh_classifier(architecture, SHAPE, seed=0).eval()
                width = max(map(len, TEXTS[kind]))
                ids = torch.tensor([row + [0] * (width - len(row)) for row in TEXTS[kind]])
                with torch.no_grad():
                    padded = model(input_ids=ids, attention_mask=(ids != 0).long()).logits
                    alone = torch.cat([model(input_ids=torch.tensor([row])).logits for row in TEXTS[kind]])
                # Sums of at most 48 float32 products in another order, through 2 layers of each half, on logits below 10.
                assert torch.allclose(padded, alone, rtol=0, atol=48 * 2**-24 * 4 * 10)


def test_a_fresh_encoder_decoder_answers_by_what_stands_before_the_last_end_mark() -> None:
    cases: list[Architecture] = ["t5", "bart"]
    for architecture in cases:
        with case(architecture):
            model = fresh_classifier(architecture, SHAPE, seed=0).eval()
            with torch.no_grad():
                one, other = (model(input_ids=torch.tensor([ids])).logits for ids in ([2, 5, 3, 7, 3], [2, 5, 3, 8, 3]))
            assert not torch.equal(one, other)
