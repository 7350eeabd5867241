"""Mark-up to paragraphs: HTML, manual pages and message catalogues.

Notable: manual pages go through `mandoc` to HTML, so that one walker serves every page. It
drops navigation by tag, class and id, and lets a term open its description ("-a: …").
Japanese text wrapped in its source is joined without spaces.
"""

from __future__ import annotations

import gzip
import io
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator

import polib
from lxml import etree

CJK = r"\u3001-\u303f\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff01-\uff9f"
JAPANESE = re.compile(r"[\u3005\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\uff66-\uff9f]")
JAPANESE_SHARE = 0.3
GAP_IN_JAPANESE = re.compile(rf"(?<=[{CJK}])\s+(?=[{CJK}])")
INVISIBLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\u00ad\u200b-\u200f\u2060\ufeff\ufffc]")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


BLOCKS = words(
    "address article blockquote body br caption center dd div dl dt fieldset figcaption figure "
    "h1 h2 h3 h4 h5 h6 hr html li main ol p pre section summary table tbody tfoot thead title "
    "tr ul"
)
CLOSES_TERM = words("h1 h2 h3 h4 h5 h6 dl")
DROPPED_TAGS = words(
    "head script style nav header footer aside form button select noscript iframe svg math"
)
DROPPED_CLASSES = words(
    "toc navheader navfooter docnav head foot headerlink sphinxsidebar related footer contents "
    "toctree-wrapper header nav_table short-contents shortcontents navigation element-atoc "
    "bd-sidebar toctext copiable-link index-entry howtoget navbar breadcrumbs"
)
DROPPED_IDS = words("toc banner title footer tocframe table-of-contents Contents")

MO_COLOUR = re.compile(r"</?color[A-Za-z_]*>")
MO_PLACEHOLDER = re.compile(r"<\w+>|%[\d$.]*[a-z]")
MESSAGES_PER_DOCUMENT = 40


def tidy(text: str) -> str:
    """One paragraph on one line: a line wrapped inside Japanese is joined without a space."""
    text = re.sub(r"[ \t\u00a0\r\n]+", " ", INVISIBLE.sub("", text)).strip()
    return GAP_IN_JAPANESE.sub("", text)


def is_japanese(paragraph: str) -> bool:
    """At least 30 % of the characters other than spaces are kana or kanji."""
    length = len(paragraph) - paragraph.count(" ")
    return length > 0 and len(JAPANESE.findall(paragraph)) >= JAPANESE_SHARE * length


def decode(data: bytes) -> str:
    """UTF-8, else the encodings that older Japanese pages use."""
    for encoding in ("utf-8", "euc_jp", "iso2022_jp", "cp932"):
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            continue
    return data.decode("utf-8", errors="replace")


def grouped(items: Iterable[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    for item in items:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def is_navigation(element: etree._Element) -> bool:
    classes = (element.get("class") or "").split()
    return (
        element.tag in DROPPED_TAGS
        or not DROPPED_CLASSES.isdisjoint(classes)
        or element.get("id") in DROPPED_IDS
    )


def html_paragraphs(data: bytes) -> Iterator[str]:
    """Paragraphs of a page without its navigation; a line of preformatted text is one each."""
    text = decode(data)
    parser = etree.HTMLParser(encoding="utf-8", huge_tree=True)
    root = etree.fromstring(text.encode("utf-8"), parser) if text.strip() else None
    if root is None:
        return
    buffer: list[str] = []
    term = ""
    in_pre = 0
    walk = etree.iterwalk(root, events=("start", "end", "comment", "pi"))
    for event, element in walk:
        if event in ("comment", "pi"):
            buffer.append(element.tail or "")
            continue
        tag = element.tag
        if tag in BLOCKS:
            raw = "".join(buffer)
            buffer.clear()
            found = [line for line in map(tidy, raw.split("\n") if in_pre else [raw]) if line]
            if event == "end" and tag == "dt":
                term = ", ".join([term] * bool(term) + found)
                found = []
            elif found and term:
                found[0] = f"{term}: {found[0]}"
                term = ""
            elif term and tag in CLOSES_TERM:
                yield term
                term = ""
            yield from found
        if tag == "pre":
            in_pre += 1 if event == "start" else -1
        if event == "end":
            buffer.append(element.tail or "")
        elif is_navigation(element):
            walk.skip_subtree()  # its end event still comes, with the text after it
        else:
            buffer.append((" " if tag in ("td", "th") else "") + (element.text or ""))


def man_paragraphs(data: bytes, mandoc: str) -> Iterator[str]:
    """A manual page in roff, through the program `mandoc`."""
    command = [mandoc, "-Kutf-8", "-Thtml", "-Ofragment"]
    done = subprocess.run(command, input=data, capture_output=True, check=False)
    yield from html_paragraphs(b"<html><body>" + done.stdout + b"</body></html>")


def mo_paragraphs(data: bytes) -> Iterator[str]:
    """Translations in catalogue order; a message with placeholders is a fragment and goes."""
    with tempfile.NamedTemporaryFile(suffix=".mo") as handle:
        handle.write(data)
        handle.flush()
        catalogue = polib.mofile(handle.name)
    for entry in catalogue:
        message = MO_COLOUR.sub("", entry.msgstr)
        if not MO_PLACEHOLDER.search(message):
            yield from map(tidy, re.split(r"\n\s*\n", message))


def pages(name: str, data: bytes, mandoc: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each page in one file of a package; Japanese paragraphs only."""
    if name.endswith(".gz"):
        name, data = name[:-3], gzip.decompress(data)
    found: Iterable[tuple[str, Iterable[str]]]
    if name.endswith(".jar"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            inside = sorted(n for n in archive.namelist() if n.endswith(".html"))
            found = [(f"{name}/{n}", html_paragraphs(archive.read(n))) for n in inside]
    elif name.endswith(".mo"):
        messages = filter(is_japanese, mo_paragraphs(data))
        groups = grouped(messages, MESSAGES_PER_DOCUMENT)
        found = ((f"{name}/{number}", group) for number, group in enumerate(groups))
    elif "/man/" in name:
        found = [(name, man_paragraphs(data, mandoc))]
    else:
        found = [(name, html_paragraphs(data))]
    for page, paragraphs in found:
        if text := "\n".join(filter(is_japanese, paragraphs)):
            yield page, text
