"""Published shapes keep their meaning, and an arm is a method or thin."""

from __future__ import annotations

import pytest

from oelm.bench.interleave import bound, classifier_config, model_size, shape_config, shape_settings, with_arm
from oelm.errors import ConfigError, MethodError


@pytest.mark.parametrize(
    ("shape", "batch_size", "layers", "width", "heads", "inner", "tokens", "vocabulary"),
    [
        ("laptop", 32, 4, 128, 4, 512, 64, 512),
        ("512", 8, 6, 512, 8, 2048, 256, 2048),
        ("medium", 8, 6, 512, 8, 2048, 512, 50257),
    ],
)
def test_published_shapes_are_those_of_the_bars(
    shape: str, batch_size: int, layers: int, width: int, heads: int, inner: int, tokens: int, vocabulary: int
) -> None:
    config = shape_config(shape, "baseline")
    model = config.model
    assert (model.num_layers, model.model_dim, model.num_heads, model.ff_dim) == (layers, width, heads, inner)
    assert (model.seq_len, model.vocab_size, model.dropout, config.batch_size) == (tokens, vocabulary, 0.0, batch_size)
    assert config.micro_batch_size == batch_size


def test_the_classifier_has_the_shape_of_bert_base_and_the_study_s_batch() -> None:
    config = classifier_config("oelm_freeze")
    stored, trainable, _ = model_size(config)
    # The count of the earlier study's model with three labels, of which Q and K of twelve layers have 12 x 2 x (768 + 1) x 768;
    # the positions that are not read here are those beyond 128.
    assert stored == 109_484_547 - (512 - 128) * 768 and stored - trainable == 12 * 2 * 769 * 768
    assert (config.batch_size, config.examples.max_length) == (16, 128)
    assert 1.03 < bound(classifier_config("baseline"), config) < 1.06
    with pytest.raises(ConfigError, match="'thin' needs our GPT, and shape 'bert' is a BERT"):
        classifier_config("thin")


def test_thin_is_the_baseline_with_an_eighth_of_the_rows() -> None:
    thin = shape_config("512", "thin")
    assert thin.model.qk_dim == 8 and thin.method == shape_config("512", "baseline").method
    assert bound(shape_config("512", "baseline"), thin) > 1.15
    assert shape_config("tiny", "thin").model.qk_dim == 2


def test_an_arm_changes_no_settings_but_its_own() -> None:
    settings = shape_settings("laptop")
    with_arm(settings, "thin")
    assert settings == shape_settings("laptop")


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"unknown arm 'haf' \(did you mean 'half'\?\); give a run's config.json or one of"):
        with_arm(shape_settings("laptop"), "haf")
    with pytest.raises(ConfigError, match=r"unknown shape 'labtop' \(did you mean 'laptop'\?\); shapes: laptop, 512"):
        shape_settings("labtop")
    with pytest.raises((ConfigError, MethodError), match="did you mean 'oelm_freeze'"):
        shape_config("tiny", "oelm_frezee")
