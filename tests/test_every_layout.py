"""What holds for rank files holds for every layout: CRCs, verification, going on."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest

import streammerge
from streammerge import CorruptFileError
from streammerge.sources import Sources

DATA = Path(__file__).parent / "data"
NAMES = [
    "dcp_accelerate_fsdp2__t213",
    "dcp_app_optim__t213",
    "dcp_model__t24",
    "ds_zero1_w4_groups__t213",
    "ds_zero2__t213",
    "ds_zero3_shared__t213",
]

every_layout = pytest.mark.parametrize("name", NAMES)


@every_layout
def test_crcs_and_verification(name: str, tmp_path: Path) -> None:
    report = streammerge.merge(DATA / name, tmp_path / "merged", check_crc=True, verify=True)
    assert report.verified
    assert report.crcs is not None
    assert report.crcs.members > 0
    assert report.crcs.without == ()
    assert streammerge.verify(DATA / name, tmp_path / "merged").equal


@every_layout
def test_a_flipped_bit_is_found(name: str, tmp_path: Path) -> None:
    source = shutil.copytree(DATA / name, tmp_path / "source")
    checkpoint = streammerge.describe(source)
    tensor = max(checkpoint.tensors, key=lambda tensor: tensor.nbytes)
    number = tensor.extents.files[0]
    with closing(Sources(checkpoint.files)) as sources:
        at = sources.member_offset(number, tensor.extents.members[0])
    path = Path(checkpoint.files[number].path)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptFileError, match=r"their CRC-32 is .*, torch\.save stored"):
        streammerge.merge(source, tmp_path / "merged", raw=True, check_crc=True)
    assert not (tmp_path / "merged").exists()


@every_layout
def test_a_merge_goes_on(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target, staging = tmp_path / "merged", tmp_path / ".merged.streammerge"

    def merge(to: Path) -> None:
        streammerge.merge(DATA / name, to, max_shard_size="500B", workers=1)

    merge(tmp_path / "at_once")
    with monkeypatch.context() as patch:
        patch.setattr("os.rename", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            merge(target)
    assert not target.exists()
    finished = {p.name: p.stat().st_ino for p in (staging / "merged").glob("*.safetensors")}
    assert len(finished) > 1
    merge(target)
    assert contents(target) == contents(tmp_path / "at_once")
    assert {p.name: p.stat().st_ino for p in target.glob("*.safetensors")} == finished


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
