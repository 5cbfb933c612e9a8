"""A stand-in for requests: answers the download of the Cora citation graph with a made-up one of the same format."""

import io
import random
import tarfile

PAPERS, WORDS, CLASSES = 1800, 64, 7


class Answer:
    """A response with its raw stream."""

    def __init__(self, raw):
        self.raw = raw

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        self.raw.close()


def bag_of_words(rng):
    """Return which words a paper has, as "0" and "1"; at least one."""
    return [*(str(int(rng.random() < 0.1)) for _ in range(WORDS - 1)), "1"]


def get(url, stream=False):
    """Return a tar.gz with cora/cora.content and cora/cora.cites."""
    rng = random.Random(0)
    content = "\n".join(
        "\t".join([str(paper), *bag_of_words(rng), f"c{rng.randrange(CLASSES)}"]) for paper in range(PAPERS)
    )
    cites = "\n".join(f"{rng.randrange(PAPERS)}\t{rng.randrange(PAPERS)}" for _ in range(3 * PAPERS))
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in (("content", content), ("cites", cites)):
            entry = tarfile.TarInfo(f"cora/cora.{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    packed.seek(0)
    return Answer(packed)
