"""`oelm data`, as a user types it: what is there, prepared, looked at, checked, and trained on by name."""

from __future__ import annotations

import re
import shutil
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from oelm.cli.app import app
from oelm.data.prepare import prepare_corpus
from oelm.data.public_sets import BUILT_IN, CORPORA, TASKS
from oelm.data.sources import file_corpus
from oelm.data.tokens import LeftOut
from oelm.runs.records import Counters
from tests.conftest import made_text
from tests.data.test_examples import glue_mnli, write_lines
from tests.data.test_shelf import set_called, write_stories
from tests.data.test_tasks import write_vocabulary

TINY = ["--budget", "smoke", "--tokenizer", "bpe:300", "--steps", "2"]
for setting in ("model.seq_len=16", "batch_size=4", "micro_batch_size=2", "eval_every=2", "save_every=2"):
    TINY += ["--set", setting]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Local copies of a corpus and of a task, and a model's vocabulary."""
    folder = tmp_path_factory.mktemp("files")
    write_stories(folder / "stories", count=30)
    glue_mnli(folder / "pairs")
    write_vocabulary(folder / "model")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that no other test sees, and a folder of its own to stand in."""
    monkeypatch.setenv("OELM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache"


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def oelm(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.output
    return result


def prepare_stories(files: Path, *more: str | Path) -> Result:
    return succeeded(oelm("data", "prepare", "tinystories", "--from", files / "stories", "--tokenizer", "bpe:300", *more))


def prepare_pairs(files: Path) -> Result:
    return succeeded(oelm("data", "prepare", "mnli", "--from", files / "pairs", "--tokenizer", files / "model"))


def table_row(shown: str, split: str) -> list[str]:
    """Return the fields of a split's row in the printed table."""
    (row,) = (line.split() for line in shown.splitlines() if line.split()[:1] == [split])
    return row


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_list_shows_every_name(cache: Path) -> None:
    shown = succeeded(oelm("data", "list")).stdout
    named = [*BUILT_IN, *CORPORA, *TASKS]
    assert [line.split()[0] for line in shown.splitlines() if line[:1].isalpha()][: len(named)] == named


def test_list_says_when_nothing_is_prepared(cache: Path) -> None:
    assert "nothing is prepared on this machine yet: oelm data prepare NAME" in succeeded(oelm("data", "list")).stdout


def test_list_shows_what_is_prepared_and_how_much_it_holds(files: Path, cache: Path) -> None:
    prepare_stories(files)
    prepare_pairs(files)
    prepared = succeeded(oelm("data", "list")).stdout.split("prepared on this machine:")[1]
    assert f"{set_called(cache, 'mnli')}  3 examples, 3 labels" in prepared
    assert f"{set_called(cache, 'tinystories')}  " in prepared and "tokens, bpe:300" in prepared


def test_prepare_prints_where_the_corpus_is_and_how_much_each_split_holds(files: Path, cache: Path) -> None:
    shown = prepare_stories(files).stdout
    path = set_called(cache, "tinystories")
    size = (path / "train.bin").stat().st_size // 2
    assert str(path) in shown and table_row(shown, "train")[1:3] == ["30", f"{size:,}"]


def test_prepare_prints_the_counts_of_a_task(files: Path, cache: Path) -> None:
    shown = prepare_pairs(files).stdout
    assert [table_row(shown, split)[1] for split in ("train", "val", "val_mismatched")] == ["1", "1", "1"]


def test_prepare_counts_what_was_cut_and_what_had_no_label(files: Path, cache: Path, tmp_path: Path) -> None:
    table = write_lines(tmp_path / "own.tsv", "text\tlabel", "the cat sat on a mat\tx", "rain\ty", "a\t-", "old trees\tx")
    options = ("--dev", table, "--tokenizer", files / "model", "--max-length", "5")
    shown = succeeded(oelm("data", "prepare", "--examples", table, *options)).stdout
    _, examples, _, longest, cut, unlabelled, *by_label = table_row(shown, "train")
    assert (examples, longest, cut, unlabelled, "".join(by_label)) == ("3", "5", "1", "1", "2/1")


def test_prepare_says_what_integer_labels_were_taken_to_mean(files: Path, cache: Path) -> None:
    shown = prepare_pairs(files).stdout
    assert "in train.tsv integer labels mean 0=entailment, 1=neutral, 2=contradiction" in shown


def test_prepare_says_that_an_extract_is_one(files: Path, cache: Path) -> None:
    shown = prepare_stories(files, "--max-documents", "5").stdout
    assert "at most 5 documents of each split" in shown and table_row(shown, "train")[1] == "5"


def test_prepare_again_finds_it_prepared(files: Path, cache: Path) -> None:
    prepare_stories(files)
    before = {path: path.stat().st_mtime_ns for path in set_called(cache, "tinystories").iterdir()}
    prepare_stories(files)
    assert {path: path.stat().st_mtime_ns for path in set_called(cache, "tinystories").iterdir()} == before


@pytest.mark.parametrize(
    ("line", "exit_code", "words"),
    [
        ("prepare", 2, ["give one thing to prepare", "--text, --examples"]),
        ("prepare sst2 --text {}/a.txt", 2, ["given: --text, sst2"]),
        ("prepare tinystories --labels a,b", 2, ["--labels has no meaning for tinystories"]),
        ("prepare sst3", 3, ["no data set called 'sst3'", "did you mean 'sst2'?"]),
        ("prepare mnli --from {}/pairs", 2, ["--tokenizer FOLDER"]),
        ("prepare tinystories --from {}/gone --tokenizer bpe:300", 3, ["gone", "no such folder"]),
        ("prepare sst2 --from {}/stories --tokenizer {}/model", 3, ["train.txt", ".jsonl, .tsv, .csv or .parquet"]),
        ("prepare mnli --from {}/pairs --tokenizer bpe:300", 2, ["bpe:300", "model's files"]),
        ("prepare --examples {}/pairs/train.tsv --tokenizer {}/model --columns text=a", 2, ["--columns 'text=a'"]),
        ("info nothing", 3, ["'nothing'", "oelm data list"]),
        ("verify nothing", 3, ["'nothing'", "oelm data list"]),
    ],
)
def test_bad_input_is_told_in_one_paragraph_with_its_exit_code(
    line: str, exit_code: int, words: list[str], files: Path, cache: Path
) -> None:
    result = oelm("data", *line.replace("{}", str(files)).split())
    assert (result.exit_code, type(result.exception)) == (exit_code, SystemExit)
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert [word for word in words if word not in result.stderr] == []


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize("name", ["tinystories", "wikitext2", "sst2", "xnli"])
def test_without_network_and_files_both_ways_out_are_named(name: str, files: Path, cache: Path) -> None:
    tokenizer = files / "model" if name in TASKS else "bpe:300"
    result = oelm("data", "prepare", name, "--tokenizer", tokenizer)
    assert result.exit_code == 3
    assert "no network" in result.stderr and "with a network, repeat the command" in result.stderr
    assert f"`oelm data prepare {name} --from FOLDER`" in result.stderr


@pytest.mark.usefixtures("_no_network")
def test_a_preparation_without_network_leaves_no_set_behind(files: Path, cache: Path) -> None:
    oelm("data", "prepare", "tinystories", "--tokenizer", "bpe:300")
    oelm("data", "prepare", "sst2", "--tokenizer", files / "model")
    assert succeeded(oelm("data", "list")).stdout.rstrip().endswith("yet: oelm data prepare NAME")


def test_info_by_name_and_by_path_is_the_same(files: Path, cache: Path) -> None:
    prepare_stories(files)
    by_name = succeeded(oelm("data", "info", "tinystories")).stdout
    assert by_name == succeeded(oelm("data", "info", set_called(cache, "tinystories"))).stdout


def test_info_shows_n_grams_once_they_are_counted(files: Path, cache: Path) -> None:
    prepare_stories(files)
    assert "not counted yet: add --ngram" in succeeded(oelm("data", "info", "tinystories")).stdout
    counted = succeeded(oelm("data", "info", "tinystories", "--ngram")).stdout
    assert re.search(r"n-gram PPL  val \d+\.\d\d for order 5 \(from order 1: (\d+\.\d\d(, )?){5}\)", counted)
    # Kept with the set: from now on without asking.
    assert succeeded(oelm("data", "info", "tinystories")).stdout == counted


def test_info_counts_in_windows_and_under_other_vocabularies_where_asked(files: Path, cache: Path) -> None:
    prepare_stories(files)
    shown = succeeded(oelm("data", "info", "tinystories", "--ngram", "--context", "4", "--counters")).stdout
    assert re.search(r"in windows  val .*; windows of 4 tokens", shown)
    assert re.search(r"best        val \d\.\d{4} bits per byte: order \d, vocabulary [\d,]+", shown)
    refused = oelm("data", "info", "tinystories", "--context", "4")
    assert refused.exit_code == 2 and "--ngram" in refused.output


def test_info_records_the_best_counter_in_a_folder_of_runs(files: Path, cache: Path, tmp_path: Path) -> None:
    prepare_stories(files)
    runs = tmp_path / "runs"
    refused = oelm("data", "info", "tinystories", "--counters", "--record", str(runs))
    assert refused.exit_code == 2 and "no such folder" in refused.output
    runs.mkdir()
    refused = oelm("data", "info", "tinystories", "--record", str(runs))
    assert refused.exit_code == 2 and "--counters" in refused.output
    runs.joinpath("counters.json").write_text(Counters().with_text("another", {}).model_dump_json())
    shown = succeeded(oelm("data", "info", "tinystories", "--counters", "--record", str(runs))).stdout
    (fingerprint,) = re.findall(r"fingerprint (\w+)", shown)
    recorded = Counters.read(runs).best
    assert recorded.keys() == {"another", fingerprint}
    best = recorded[fingerprint]["val"]
    assert (
        f"best        val {best.bits_per_byte:.4f} bits per byte: order {best.order}, vocabulary {best.vocabulary:,}" in shown
    )


def test_info_shows_source_tokenizer_and_fingerprint(files: Path, cache: Path) -> None:
    prepare_pairs(files)
    shown = succeeded(oelm("data", "info", "mnli")).stdout
    assert "mnli: local copies (train.tsv, dev_matched.tsv, dev_mismatched.tsv)" in shown
    assert "0=entailment, 1=neutral, 2=contradiction" in shown and "fingerprint" in shown


def test_verify_of_whole_sets_is_exit_0(files: Path, cache: Path) -> None:
    prepare_stories(files)
    prepare_pairs(files)
    shown = succeeded(oelm("data", "verify")).stdout
    assert [line.split()[0] for line in shown.splitlines()] == ["whole", "whole"]


def test_verify_says_when_there_is_nothing_to_verify(cache: Path) -> None:
    assert "nothing is prepared" in succeeded(oelm("data", "verify")).stdout


@pytest.mark.parametrize("name", ["train.ids.bin", "val.rows.bin", "tokenizer.json"])
def test_verify_of_a_damaged_task_is_exit_3_and_names_the_file(name: str, files: Path, cache: Path) -> None:
    prepare_pairs(files)
    damaged = set_called(cache, "mnli") / name
    flip_a_bit(damaged)
    result = oelm("data", "verify")
    assert result.exit_code == 3 and f"DAMAGED  {damaged}: sha256 " in result.stdout


@pytest.mark.parametrize("name", ["train.bin", "val.bin", "tokenizer.json"])
def test_verify_of_a_damaged_corpus_is_exit_3_and_names_the_file(name: str, files: Path, cache: Path) -> None:
    prepare_stories(files)
    damaged = set_called(cache, "tinystories") / name
    flip_a_bit(damaged)
    result = oelm("data", "verify", "tinystories")
    assert result.exit_code == 3 and f"DAMAGED  {damaged}: sha256 " in result.stdout


def test_verify_goes_on_behind_a_damaged_set(files: Path, cache: Path) -> None:
    prepare_stories(files)
    prepare_pairs(files)
    flip_a_bit(set_called(cache, "mnli") / "train.ids.bin")
    shown = oelm("data", "verify").stdout
    assert sorted(line.split()[0] for line in shown.splitlines()) == ["DAMAGED", "whole"]


def test_verify_of_a_damaged_record_is_exit_3_and_names_it(files: Path, cache: Path) -> None:
    prepare_pairs(files)
    record = set_called(cache, "mnli") / "meta.json"
    record.write_text("{")
    result = oelm("data", "verify", "mnli")
    assert result.exit_code == 3 and f"DAMAGED  {record}: " in result.stdout


def test_a_damaged_set_is_made_again_as_the_message_says(files: Path, cache: Path) -> None:
    prepare_pairs(files)
    folder = set_called(cache, "mnli")
    flip_a_bit(folder / "train.ids.bin")
    refused = oelm("data", "prepare", "mnli", "--from", files / "pairs", "--tokenizer", files / "model")
    assert refused.exit_code == 3 and f"delete the folder {folder} and repeat the command" in refused.stderr
    shutil.rmtree(folder)
    prepare_pairs(files)
    succeeded(oelm("data", "verify"))


def test_train_finds_a_prepared_corpus_by_name(files: Path, cache: Path, tmp_path: Path) -> None:
    prepare_stories(files)
    shown = succeeded(oelm("train", *TINY, "--data", "tinystories", "--out", tmp_path / "run")).stdout
    assert "done: best PPL" in shown


def test_train_refuses_a_name_that_was_prepared_twice(files: Path, cache: Path, tmp_path: Path) -> None:
    prepare_stories(files)
    prepare_stories(files, "--max-documents", "20")
    result = oelm("train", *TINY, "--data", "tinystories", "--out", tmp_path / "run")
    assert result.exit_code == 3 and "was prepared 2 times" in result.stderr and "--data PATH" in result.stderr


def test_train_takes_the_path_of_either_of_two(files: Path, cache: Path, tmp_path: Path) -> None:
    prepare_stories(files)
    whole = set_called(cache, "tinystories")
    prepare_stories(files, "--max-documents", "20")
    succeeded(oelm("train", *TINY, "--data", whole, "--out", tmp_path / "run"))


@pytest.mark.usefixtures("_no_network")
def test_train_on_a_name_not_prepared_names_both_ways_out(cache: Path, tmp_path: Path) -> None:
    result = oelm("train", *TINY, "--data", "openwebtext", "--out", tmp_path / "run")
    assert result.exit_code == 3 and "`oelm data prepare openwebtext --from FOLDER`" in result.stderr


def test_train_refuses_a_damaged_corpus(files: Path, cache: Path, tmp_path: Path) -> None:
    prepare_stories(files)
    flip_a_bit(set_called(cache, "tinystories") / "train.bin")
    result = oelm("train", *TINY, "--data", "tinystories", "--out", tmp_path / "run")
    assert result.exit_code == 3 and "train.bin: sha256" in result.stderr


def test_control_characters_of_a_file_s_name_do_not_reach_the_terminal(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "odd\x1b[31m.txt").write_text(made_text(3000))
    shown = succeeded(oelm("data", "prepare", "--text", tmp_path / "odd\x1b[31m.txt", "--tokenizer", "bpe:300")).stdout
    assert "\x1b" not in shown


def test_info_shows_what_was_left_out_of_the_source_and_why(cache: Path, tmp_path: Path) -> None:
    left_out = {"tests": LeftOut(files=1200, text_bytes=3_456_000), "duplicate": LeftOut(files=1, text_bytes=10_000)}
    corpus = replace(file_corpus(write_lines(tmp_path / "own.txt", *made_text(200).split("."))), left_out=left_out)
    path = prepare_corpus(corpus, tokenizer="bpe:300").path
    shown = [line.strip() for line in succeeded(oelm("data", "info", path)).stdout.splitlines()]
    at = shown.index("left out    tests: 1,200 files, 3.46 MB")
    assert shown[at + 1] == "duplicate: 1 files, 0.01 MB"


def test_info_of_a_set_from_which_nothing_was_left_out_says_nothing_of_it(files: Path, cache: Path) -> None:
    prepare_stories(files)
    assert "left out" not in succeeded(oelm("data", "info", "tinystories")).stdout


def test_show_has_the_5_gram_of_an_experiments_text_once_it_is_counted(files: Path, cache: Path) -> None:
    settings = ("data.source=tinystories", "data.tokenizer=bpe:300", "data.max_tokens=100000")
    show = ["show", "GPT-01", *(part for setting in settings for part in ("--set", setting))]
    assert "5-gram         not counted yet (no set of its data is found here by name)" in succeeded(oelm(*show)).stdout
    prepare_stories(files, "--max-tokens", "100000")
    assert "--ngram); a real baseline has at most 0.95 times its perplexity" in succeeded(oelm(*show)).stdout
    counted = succeeded(oelm("data", "info", "tinystories", "--ngram")).stdout
    found = re.search(r"val (\d+\.\d\d) for order 5", counted)
    assert found is not None and f"val PPL {found[1]}; a real baseline has at most 0.95 times" in succeeded(oelm(*show)).stdout
