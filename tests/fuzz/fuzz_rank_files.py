"""An atheris target: bytes as a rank file. See README.md for how to run it; pytest leaves it out.

The first byte chooses what the others are: the pickle in a sound container, so that checksums do
not stand in the way, or a whole file.
"""

from __future__ import annotations

import hashlib
import struct
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PICKLE, WHOLE_FILE = b"p", b"f"


def try_one(data: bytes, folder: Path) -> None:
    """Read bytes as a rank file; raises what is no `StreamMergeError`."""
    import streammerge

    path = folder / "model_world_size_1_rank_0.pt"
    if data[:1] == PICKLE:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/data.pkl", data[1:])
            archive.writestr("model/data/0", struct.pack("<4f", 1, 2, 3, 4))
    else:
        path.write_bytes(data[1:])
    try:
        streammerge.describe(folder)
    except streammerge.StreamMergeError as error:
        if "\n" in str(error):
            raise AssertionError("an error of several lines") from error


def write_seeds(corpus: Path) -> None:
    """The smaller stored rank files, and their pickles."""
    for path in (ROOT / "tests" / "data").glob("*/*_rank_0.pt"):
        seeds = [WHOLE_FILE + path.read_bytes()]
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
                seeds.append(PICKLE + archive.read(name))
        for seed in seeds:
            if len(seed) < 20_000:
                (corpus / hashlib.sha256(seed).hexdigest()[:16]).write_bytes(seed)


def main() -> None:
    import atheris

    sys.path.insert(0, str(ROOT))
    with atheris.instrument_imports(include=["streammerge"]):
        import streammerge  # noqa: F401
    corpora = [Path(argument) for argument in sys.argv[1:] if Path(argument).is_dir()]
    if corpora and not any(corpora[0].iterdir()):
        write_seeds(corpora[0])
    with tempfile.TemporaryDirectory() as folder:
        atheris.Setup(sys.argv, lambda data: try_one(data, Path(folder)))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
