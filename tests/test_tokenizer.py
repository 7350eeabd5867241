"""The tokenizer loses nothing, cuts digits apart, and refuses files that are not its own."""

from __future__ import annotations

import json
import random

import pytest

from anchormass import tokenizer
from anchormass.errors import AnchorMassError

WORDS = (
    *("記憶", "圧縮", "文脈", "注意", "局所", "大域", "値", "鍵", "外れ値", "平均", "質量", "窓"),
    *("端末", "設定", "保存", "手引き", "東京", "季節", "カメラ", "ファイル", "コマンド", "表示"),
    *("する", "した", "できる", "ない", "です", "ます", "から", "まで", "Linux", "bash", "--help"),
    *("12", "2024", "3.14"),
)
RARE = "龘驫鱻🍺é ½\t  ﷽~"


def lines(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        words = rng.choices(WORDS, k=rng.randint(3, 15))
        made.append(rng.choice(["", "は", "を", "、", " "]).join(words) + rng.choice("。！？"))
    return made


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "small.model"
    return tokenizer.train(["\n".join(lines(400, seed=1))], path, vocab_size=420, seed=3)


@pytest.fixture(scope="module")
def shipped():
    return tokenizer.load()


def test_held_out_lines_round_trip(trained, shipped):
    rng = random.Random(0)
    held_out = lines(200, seed=2)
    for tok in (trained, shipped):
        for line in held_out:
            at = rng.randrange(len(line))
            text = line[:at] + rng.choice(RARE) + line[at:] + "\n \n" + line
            assert tok.decode(tok.encode(text)) == text
    for text in ("", " ", "\n", "  前後  ", "a\tb\r\nc", RARE, "\n\n行\n"):
        assert shipped.decode(shipped.encode(text)) == text


def test_each_digit_is_one_token(trained, shipped):
    for tok in (trained, shipped):
        assert tok.pieces(tok.encode("2024")) == list("2024")
        lengths = {len(tok.encode(f"鍵は{n}です。")) for n in (1000, 1234, 7777, 9025)}
        assert len(lengths) == 1


def test_line_break_is_one_token(shipped):
    assert shipped.pieces(shipped.encode("表示\n設定")) == ["表示", "\n", "設定"]


def test_pieces_are_readable_and_join_to_the_text(shipped):
    text = "ファイルを 保存する。\nbash --help"
    assert "".join(shipped.pieces(shipped.encode(text))) == text
    assert shipped.pieces(shipped.encode("龘")) == ["<0xE9>", "<0xBE>", "<0x98>"]


def test_special_tokens_are_never_cut_from_text(shipped):
    assert shipped.decode([shipped.eot]) == ""
    assert shipped.eot not in shipped.encode(f"前{tokenizer.EOT}後")
    ids = {shipped.id(name) for name in (tokenizer.EOT, *tokenizer.CONTROLS)}
    assert len(ids) == 1 + len(tokenizer.CONTROLS) >= 9
    with pytest.raises(AnchorMassError, match=r"'<\|pad\|>' is not a special token: use one of"):
        shipped.id("<|pad|>")


def test_shipped_model_is_small_and_described(shipped):
    assert len(shipped) == tokenizer.VOCAB_SIZE == 4096
    assert shipped.path.stat().st_size <= 400_000
    record = json.loads(shipped.path.with_suffix(".json").read_text(encoding="utf-8"))
    assert record["sha256"] == shipped.sha256
    assert record["vocab_size"] == len(shipped)


def test_training_is_deterministic(trained, tmp_path):
    texts = lines(400, seed=1)
    again = tokenizer.train(["\n".join(texts)], tmp_path / "again.model", 420, seed=3)
    shuffled = tokenizer.train(reversed(texts), tmp_path / "shuffled.model", 420, seed=3)
    assert again.sha256 == shuffled.sha256 == trained.sha256


def test_training_refuses_what_cannot_be(tmp_path):
    with pytest.raises(AnchorMassError, match="no text to train"):
        tokenizer.train(["", "\n"], tmp_path / "t.model")
    with pytest.raises(AnchorMassError, match="vocab_size=9000 does not fit"):
        tokenizer.train(["短い文です。"], tmp_path / "t.model", vocab_size=9000)
    assert list(tmp_path.iterdir()) == []


def test_missing_file_names_the_command():
    with pytest.raises(AnchorMassError, match=r"'nowhere\.model' is missing.*data build"):
        tokenizer.load("nowhere.model")


@pytest.mark.parametrize("content", [b"", b"not a model", None])
def test_corrupt_file(trained, tmp_path, content):
    path = tmp_path / "broken.model"
    path.write_bytes(trained.path.read_bytes()[:-900] if content is None else content)
    with pytest.raises(AnchorMassError, match=r"broken\.model"):
        tokenizer.load(path)


def test_file_that_its_sidecar_does_not_describe(trained, shipped, tmp_path):
    path = tmp_path / "other.model"
    path.write_bytes(shipped.path.read_bytes())
    beside = path.with_suffix(".json")
    beside.write_text(json.dumps({"sha256": trained.sha256}))
    with pytest.raises(AnchorMassError, match=r"is not the file that other\.json describes"):
        tokenizer.load(path)
    beside.write_text("{")
    with pytest.raises(AnchorMassError, match=r"other\.json is damaged"):
        tokenizer.load(path)
    beside.unlink()
    assert tokenizer.load(path).sha256 == shipped.sha256
