"""Rebuild the two texts that the package ships: src/kvfold/texts/{calibration,evaluation}.txt.

    python tools/make_texts.py CORPORA [--out src/kvfold/texts]

CORPORA holds `train/*.txt` (one OpenStax textbook per file) and `valid/<novel>.txt`, both as plain text with one blank
line between paragraphs and two between sections. The result is a pure function of those files.
"""

import argparse
import re
from pathlib import Path

EXCERPTS_PER_BOOK = 10
EXCERPT_CHARACTERS = 3_600
EVALUATION_CHARACTERS = 120_000
NOVEL = "agatha-christie_the-mysterious-affair-at-styles.txt"

# The first and last chapters are prefaces, appendices and answer keys.
MIDDLE = (0.15, 0.85)
EXERCISE = re.compile(
    r"answer|quiz|question|true/false|fill in|matching|multiple choice|objectives|outcomes|review|summary|exercise"
    r"|problem|test prep|key (terms|equations|concepts)|glossary|activity|activities|reference|resources|further"
    r"|author|openstax|preface|errata|customization|working the net|hot links|figuring|bibliography|solution|check",
    re.IGNORECASE,
)


def is_prose(paragraph: str) -> bool:
    """True for a full paragraph of sentences: no list item, caption, formula or web address."""
    sentence = paragraph.endswith((".", "?", "!", ".”", "?”", "!”", ".)"))
    wordy = sum(c.isalpha() or c.isspace() for c in paragraph) > 0.92 * len(paragraph)
    return len(paragraph) >= 200 and sentence and wordy and "http" not in paragraph and paragraph[0].isupper()


def prose_sections(text: str) -> list[str]:
    """The sections of one textbook that explain something, each as its title and its prose paragraphs."""
    sections = []
    for section in re.split(r"\n{3,}", text):
        title, *paragraphs = section.strip().split("\n\n")
        prose = [p for p in paragraphs if is_prose(p)]
        if len(prose) >= 3 and len(title) < 80 and not EXERCISE.search(title):
            sections.append("\n\n".join([title, *prose]))
    return sections


def excerpts(text: str, count: int) -> list[str]:
    """`count` excerpts of about EXCERPT_CHARACTERS, evenly spread over the middle of one textbook."""
    sections = prose_sections(text)
    first, last = (int(share * len(sections)) for share in MIDDLE)
    assert last - first > 3 * count, "the textbook is too short for so many excerpts"
    starts = [first + (last - first) * k // count for k in range(count)]
    return [cut("\n\n".join(sections[start : start + 3]), EXCERPT_CHARACTERS) for start in starts]


def cut(text: str, characters: int) -> str:
    """The start of `text` up to the first paragraph boundary past `characters`."""
    end = text.find("\n\n", characters)
    return text if end < 0 else text[:end]


def calibration(folder: Path) -> str:
    """Excerpts of all books in turns, so that every prefix of the result is as broad as it can be."""
    books = sorted(folder.glob("*.txt"))
    rounds = zip(*(excerpts(book.read_text("utf-8"), EXCERPTS_PER_BOOK) for book in books), strict=True)
    return "\n\n\n".join(excerpt for excerpt_of_each_book in rounds for excerpt in excerpt_of_each_book) + "\n"


def evaluation(novel: Path) -> str:
    """The novel from its second chapter on."""
    text = novel.read_text("utf-8")
    return cut(text[text.index("\nII\n") + 1 :], EVALUATION_CHARACTERS) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("corpora", type=Path)
    parser.add_argument("--out", type=Path, default=Path("src/kvfold/texts"))
    options = parser.parse_args()
    texts = {
        "calibration.txt": calibration(options.corpora / "train"),
        "evaluation.txt": evaluation(options.corpora / "valid" / NOVEL),
    }
    for name, text in texts.items():
        (options.out / name).write_text(text, "utf-8")
        print(f"{options.out / name}: {len(text):,} characters")


if __name__ == "__main__":
    main()
