"""GPT-2's vocabulary is known by its content, found where others keep it, and kept; WordPiece is BERT's."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import BertWordPieceTokenizer, Tokenizer, normalizers, pre_tokenizers

from oelm.data.tokenizer import find_gpt2, folder_tokenizer, is_gpt2, tokenizer_recipe, train_bpe
from oelm.errors import DataError
from tests.conftest import made_text

GPT2 = Path(__file__).resolve().parents[3] / "shared" / "data" / "gpt2_bpe"
# tiktoken names a cached file by the SHA-1 of the address it came from.
ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
HUB_COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"


@pytest.fixture
def gpt2_files() -> Path:
    if not GPT2.is_dir():
        pytest.skip(f"no GPT-2 vocabulary at {GPT2}")
    return GPT2


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine that nothing was ever downloaded to, and that has no network."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "tiktoken"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://hub.invalid")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return tmp_path


def copied(source: Path, target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(source, target))


def kept(machine: Path) -> Path:
    return machine / "cache" / "gpt2" / "tokenizer.json"


@pytest.mark.parametrize("names", [("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt")], ids="-".join)
def test_gpt2_is_known_by_content_under_either_pair_of_names(gpt2_files: Path, tmp_path: Path, names: tuple[str, str]) -> None:
    for name, mine in zip(("encoder.json", "vocab.bpe"), names, strict=True):
        copied(gpt2_files / name, tmp_path / "mine" / mine)
    assert is_gpt2(folder_tokenizer(tmp_path / "mine"))
    assert tokenizer_recipe(str(tmp_path / "mine")).label == "gpt2"


@pytest.mark.parametrize("spec", ["mine", "mine/tokenizer.json"])
def test_gpt2_is_known_from_a_tokenizer_json(
    gpt2_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokenizer.json").write_text(folder_tokenizer(gpt2_files).to_str(), encoding="utf-8")
    assert tokenizer_recipe(spec).label == "gpt2"


def test_gpt2_saved_by_transformers_is_known(gpt2_files: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocab = json.loads((gpt2_files / "encoder.json").read_text(encoding="utf-8"))
    merges = [tuple(line.split()) for line in (gpt2_files / "vocab.bpe").read_text(encoding="utf-8").split("\n")[1:-1]]
    transformers.GPT2TokenizerFast(vocab=vocab, merges=merges).save_pretrained(tmp_path / "saved")
    assert is_gpt2(folder_tokenizer(tmp_path / "saved"))


def test_one_changed_merge_is_not_gpt2(gpt2_files: Path, tmp_path: Path) -> None:
    copied(gpt2_files / "encoder.json", tmp_path / "mine" / "encoder.json")
    lines = (gpt2_files / "vocab.bpe").read_text(encoding="utf-8").split("\n")
    lines[1000], lines[1001] = lines[1001], lines[1000]
    (tmp_path / "mine" / "vocab.bpe").write_text("\n".join(lines), encoding="utf-8")
    assert not is_gpt2(folder_tokenizer(tmp_path / "mine"))


def test_one_changed_word_is_not_gpt2(gpt2_files: Path, tmp_path: Path) -> None:
    copied(gpt2_files / "vocab.bpe", tmp_path / "mine" / "vocab.bpe")
    vocab = json.loads((gpt2_files / "encoder.json").read_text(encoding="utf-8"))
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (tmp_path / "mine" / "encoder.json").write_text(json.dumps(vocab))
    assert not is_gpt2(folder_tokenizer(tmp_path / "mine"))


def test_gpt2s_vocabulary_that_splits_words_otherwise_is_not_gpt2(gpt2_files: Path) -> None:
    other = folder_tokenizer(gpt2_files)
    other.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)  # as RoBERTa may
    assert not is_gpt2(other)


def test_gpt2s_vocabulary_that_changes_text_first_is_not_gpt2(gpt2_files: Path) -> None:
    other = folder_tokenizer(gpt2_files)
    other.normalizer = normalizers.Lowercase()
    assert not is_gpt2(other)


def test_gpt2s_vocabulary_with_a_token_more_is_not_gpt2(gpt2_files: Path) -> None:
    other = folder_tokenizer(gpt2_files)
    other.add_tokens(["<pad>"])
    assert not is_gpt2(other)


def test_a_tokenizer_trained_here_is_not_gpt2() -> None:
    assert not is_gpt2(train_bpe([made_text(50)], vocab_size=300))


def put_in_tiktokens_cache(files: Path, machine: Path) -> None:
    for name in ("encoder.json", "vocab.bpe"):
        copied(files / name, machine / "tiktoken" / hashlib.sha1(f"{ADDRESS}/{name}".encode()).hexdigest())


def test_gpt2_is_found_in_tiktokens_cache(gpt2_files: Path, bare_machine: Path) -> None:
    put_in_tiktokens_cache(gpt2_files, bare_machine)
    assert find_gpt2().to_str() == folder_tokenizer(gpt2_files).to_str()


def test_gpt2_is_found_in_the_hubs_cache_without_a_network(gpt2_files: Path, bare_machine: Path) -> None:
    snapshot = bare_machine / "hub" / "models--openai-community--gpt2" / "snapshots" / HUB_COMMIT
    copied(gpt2_files / "encoder.json", snapshot / "vocab.json")
    copied(gpt2_files / "vocab.bpe", snapshot / "merges.txt")
    assert is_gpt2(find_gpt2())


def test_gpt2_once_found_is_kept(gpt2_files: Path, bare_machine: Path) -> None:
    put_in_tiktokens_cache(gpt2_files, bare_machine)
    find_gpt2()
    shutil.rmtree(bare_machine / "tiktoken")
    assert is_gpt2(find_gpt2())


def test_gpt2_once_given_as_files_is_kept(gpt2_files: Path, bare_machine: Path) -> None:
    tokenizer_recipe(str(gpt2_files))
    assert tokenizer_recipe("gpt2").label == "gpt2" and kept(bare_machine).is_file()


@pytest.mark.parametrize("content", ["", "{", "{}", '{"version": "1.0"}'])
def test_a_damaged_copy_that_was_kept_is_replaced_by_a_good_one(gpt2_files: Path, bare_machine: Path, content: str) -> None:
    put_in_tiktokens_cache(gpt2_files, bare_machine)
    kept(bare_machine).parent.mkdir(parents=True)
    kept(bare_machine).write_text(content)
    find_gpt2()
    assert is_gpt2(Tokenizer.from_file(str(kept(bare_machine))))


def test_files_in_tiktokens_cache_that_are_not_gpt2s_are_not_taken(gpt2_files: Path, bare_machine: Path) -> None:
    put_in_tiktokens_cache(gpt2_files, bare_machine)
    path = bare_machine / "tiktoken" / hashlib.sha1(f"{ADDRESS}/vocab.bpe".encode()).hexdigest()
    path.write_text("\n".join(path.read_text(encoding="utf-8").split("\n")[:-100]), encoding="utf-8")
    with pytest.raises(DataError, match="not on this machine"):
        find_gpt2()


def test_gpt2_that_is_nowhere_is_refused_with_the_ways_out() -> None:
    with pytest.raises(DataError) as refusal:
        find_gpt2()
    for way in ("encoder.json and vocab.bpe", "vocab.json and merges.txt", "--tokenizer FOLDER", "--tokenizer bpe:4096"):
        assert way in str(refusal.value)


def test_a_folder_without_a_tokenizer_is_refused_with_what_was_sought(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer in it; expected tokenizer.json, encoder.json and vocab.bpe"):
        folder_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("vocab", "merges"),
    [("{", "a b\n"), ('{"a": 0}', "a b\n"), ('{"a": 0, "b": 1, "ab": 2}', "a b c\n"), ("[]", "a b\n")],
    ids=["no-json", "unknown-word", "no-pair", "no-object"],
)
def test_files_that_are_no_byte_pairs_are_refused_by_name(tmp_path: Path, vocab: str, merges: str) -> None:
    (tmp_path / "vocab.json").write_text(vocab)
    (tmp_path / "merges.txt").write_text(merges)
    with pytest.raises(DataError, match=r"vocab\.json and merges\.txt: not a byte-pair vocabulary"):
        folder_tokenizer(tmp_path)


def test_a_tokenizer_json_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read as a tokenizer"):
        folder_tokenizer(tmp_path)


# A word that holds a line separator of Unicode's stands in the middle: whoever ends a line there shifts every id behind it.
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2028", "\u4e2d", "\u00fc", "caf\u00e9"]
WORDS += "the cat sat Cat ##s ##at c s a t ##a ##t u cafe ! , . ' [ ]".split()


def bert(folder: Path, **config: bool) -> Tokenizer:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS), encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder_tokenizer(folder)


SENTENCES = st.lists(
    st.sampled_from(
        [
            "the",
            "Cats",
            "SAT",
            "caf\u00e9",
            "\u4e2d\u4e2d",
            "\u00dc",
            "[MASK]",
            "[SEP]",
            "!?",
            "\t",
            "x\u0301",
            "it's",
            "\u00a0",
        ]
    )
).map(" ".join)


@pytest.mark.parametrize("lowercase", [True, False])
def test_wordpiece_is_what_berts_own_tokenizer_gives(tmp_path: Path, lowercase: bool) -> None:
    ours = bert(tmp_path, do_lower_case=lowercase)
    reference = BertWordPieceTokenizer(vocab={word: number for number, word in enumerate(WORDS)}, lowercase=lowercase)

    @given(SENTENCES, st.none() | SENTENCES)
    @settings(deadline=None)
    def check(text: str, pair: str | None) -> None:
        mine, theirs = ours.encode(text, pair), reference.encode(text, pair)
        assert (mine.ids, mine.type_ids) == (theirs.ids, theirs.type_ids)

    check()


def test_wordpiece_is_what_transformers_gives(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = bert(tmp_path, do_lower_case=True)
    theirs = transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate(WORDS)}, do_lower_case=True)
    for text in ("The cats SAT, caf\u00e9!", "\u4e2d\u4e2d [MASK] \u00dc", ""):
        assert ours.encode(text, "the cat").ids == theirs(text, "the cat")["input_ids"]


def test_wordpiece_is_lower_case_where_nothing_says_otherwise(tmp_path: Path) -> None:
    assert bert(tmp_path).encode("CAT", add_special_tokens=False).tokens == ["cat"]


def test_a_vocabulary_without_berts_marks_is_refused_by_the_missing_one(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\nword\n")
    with pytest.raises(DataError, match=r"vocab\.txt: no \[SEP\] in it, so it is not BERT's"):
        folder_tokenizer(tmp_path)


def test_a_vocabulary_that_is_not_utf8_is_refused_at_its_byte(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes(b"[PAD]\n\xff\n")
    with pytest.raises(DataError, match=r"vocab\.txt: not UTF-8 at byte 6"):
        folder_tokenizer(tmp_path)


def test_a_damaged_tokenizer_config_is_refused_by_name(tmp_path: Path) -> None:
    bert(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        folder_tokenizer(tmp_path)
