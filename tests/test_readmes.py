"""README.zh-CN.md says what README.md says: the same headings, code, links, tables and figures, section by section."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.cases import case

ROOT = Path(__file__).parents[1]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")

# An interval counts as one figure, so that its ends stay in order; the lookahead leaves the text of links alone.
FIGURE = re.compile(r"\[[^\[\]]*\d[^\[\]]*\](?!\()|[-+]?\d+(?:[.,]\d+)*(?: ?(?:%|x|M|MB|MiB|ms)(?![A-Za-z]))?")
INLINE_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TRAILING_COMMENT = re.compile(r" +# .*$", re.MULTILINE)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def sections(text: str) -> list[str]:
    """Split a page at its headings, and not at the comments of its code; the first part is what precedes any heading."""
    parts, is_fenced = [""], False
    for line in text.splitlines(keepends=True):
        is_fenced ^= line.startswith("```")
        if line.startswith("#") and not is_fenced:
            parts.append("")
        parts[-1] += line
    return parts


def heading_level(section: str) -> int:
    return len(section) - len(section.lstrip("#"))


def code_blocks(section: str) -> list[str]:
    """Return each block after its language; in a block of commands, what the comment after one says may be translated."""
    return [
        f"{language}: {body if language else re.sub(TRAILING_COMMENT, ' #', body)}"
        for language, body in FENCED.findall(section)
    ]


def link_targets(section: str) -> list[str]:
    return sorted(re.findall(r"\]\(([^)\s]+)", section))


def figures(text: str) -> list[str]:
    one_line = re.sub(r"\s+", " ", text)
    return sorted(FIGURE.findall(re.sub(r"(?<=\d) 倍", "x", one_line)))


def inline_code(text: str) -> list[str]:
    return sorted(INLINE_CODE.findall(text))


def table_rows(section: str) -> list[str]:
    """Return what any language shares of each row: its cells, and in each of them the figures and the code."""
    rows: list[str] = []
    for table in TABLE.findall(section):
        for row in table.splitlines():
            rows.append("|".join(" ".join(figures(cell) + inline_code(cell)) for cell in row.split("|")))
        rows.append("end of table")
    return rows


def paragraphs(section: str) -> list[str]:
    count = len(re.split(r"\n{2,}", section.strip()))
    return [f"{count} paragraphs"]


FACETS: dict[str, Callable[[str], list[str]]] = {
    "code": code_blocks,
    "links": link_targets,
    "figures": figures,
    "names": inline_code,
    "tables": table_rows,
    "paragraphs": paragraphs,
}


def differences(english: str, chinese: str) -> list[str]:
    """Name each facet, section by section, in which the two pages are out of step; each links to the other one."""
    ours = sections(english.replace("](README.zh-CN.md)", "](OTHER)"))
    theirs = sections(chinese.replace("](README.md)", "](OTHER)"))
    levels = [heading_level(section) for section in ours], [heading_level(section) for section in theirs]
    if levels[0] != levels[1]:
        return [f"headings: of levels {levels[0]} in English, {levels[1]} in Chinese"]
    found: list[str] = []
    for our, their in zip(ours, theirs, strict=True):
        for facet, of in FACETS.items():
            if of(our) != of(their):
                left, right = Counter(of(our)), Counter(of(their))
                only = f"English {list((left - right).elements())}, Chinese {list((right - left).elements())}"
                found.append(f"{facet}: under {our.splitlines()[0]!r} only {only}, or in another order")
    return found


def test_the_chinese_readme_is_in_step_with_the_english_one() -> None:
    assert differences(ENGLISH, CHINESE) == []


def test_each_readme_links_to_the_other_under_its_title() -> None:
    assert "](README.zh-CN.md)" in sections(ENGLISH)[1]
    assert "](README.md)" in sections(CHINESE)[1]


MUTATIONS = {
    "a heading of another level": ("headings", r"^## ", "### "),
    "a heading lost": ("headings", r"^## [^\n]*\n", ""),
    "two sections exchanged": ("code", r"(^## (?:(?!^## ).)*)(^## (?:(?!^## ).)*)", r"\2\1"),
    "another command": ("code", r"^make ", "cmake "),
    "another option": ("code", r" --budget ", " --budgets "),
    "a command's comment lost": ("code", r"^(oelm \w+) +# [^\n]*", r"\1"),
    "another line of Python": ("code", r"^import oelm$", "import oelm as o"),
    "a comment in Python translated": ("code", r"  # after training[^\n]*", "  # 训练之后"),
    "a character of the output": ("code", r"frozen: 0 ", "frozen: 1 "),
    "a block lost": ("code", r"^```\n.*?^```\n", ""),
    "a block's language lost": ("code", r"^```python$", "```"),
    "another target": ("links", r"\]\(docs/", "](doc/"),
    "a link lost": ("links", r"\[[^\]]*\]\((docs/method.md)\)", r"\1"),
    "a page that links to itself": ("links", r"\]\(README\.md\)", "](README.zh-CN.md)"),
    "another percentage": ("figures", r"(\d\.\d)%", r"\g<1>1%"),
    "a percentage without its sign": ("figures", r" \+(\d+\.\d%) \[", r" \1 ["),
    "a percentage without its unit": ("figures", r"(\d\.\d)% \[", r"\1 ["),
    "an interval's ends exchanged": ("figures", r"\[([-+]?\d\S*), (\S+)\]", r"[\2, \1]"),
    "another number of parameters": ("figures", r"\| (\d\d\d),(\d\d\d) \|", r"| \2,\1 |"),
    "another ratio": ("figures", r"(\d)x \[", r"\g<1>1x ["),
    "a ratio that is none": ("figures", r"(\d)x \[", r"\1 ["),
    "another count": ("figures", r"(\d)M ", r"\g<1>1M "),
    "another unit": ("figures", r"(\d)M ", r"\g<1>MB "),
    "full-width digits": ("figures", r"95%", "\uff19\uff15%"),
    "another name": ("names", r"`torch\.nn\.", "`torch.mm."),
    "a row lost": ("tables", r"^\| 查询是[^\n]*\n", ""),
    "a column lost": ("tables", r"^(\| 查询是[^|\n]*\|)[^|\n]*\|", r"\1"),
    "two rows exchanged": ("tables", r"^(\| 两者都学习[^\n]*\n)(\| [^\n]*\n)", r"\2\1"),
    "a paragraph lost": ("paragraphs", r"^(?=[\u4e00-\u9fff])[^\n]*\n\n", ""),
}


def test_a_chinese_readme_out_of_step_is_noticed() -> None:
    for mutation in MUTATIONS:
        with case(mutation):
            facet, pattern, replacement = MUTATIONS[mutation]
            mutated = re.sub(pattern, replacement, CHINESE, count=1, flags=re.MULTILINE | re.DOTALL)
            assert mutated != CHINESE, "nothing to mutate: the pattern finds nothing in README.zh-CN.md"
            assert facet in {difference.split(":")[0] for difference in differences(ENGLISH, mutated)}
