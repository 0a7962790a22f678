"""Headers, sharding and the index, compared with safetensors, huggingface_hub and transformers."""

from __future__ import annotations

import json
import string
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from huggingface_hub import load_torch_model, split_torch_state_dict_into_shards
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load, save, save_file

from streammerge import UnsupportedError, header
from streammerge.dtypes import FROM_TORCH, ITEMSIZE

DTYPES = {name: getattr(torch, name) for name in FROM_TORCH}
DIRECT = [name for name in DTYPES if name != "float4_e2m1fn_x2"]  # F4 doubles the last dim

fixed = settings(derandomize=True, deadline=None, database=None, max_examples=200)

# What JSON escapes, what it need not, and both sides of each UTF-8 length. No lone surrogates.
names = st.text(
    st.one_of(
        st.sampled_from(
            string.printable + '"\\/\b\f\n\r\t\x00\x1f\x7f\x80\u2028\u2029\ud7ff\ue000'
        ),
        st.sampled_from("\u07ff\u0800\ufffd\uffff\U00010000\U0010ffff"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=12,
).filter(lambda name: name != "__metadata__")


def tensor(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of that dtype with recognisable bytes."""
    numel = torch.Size(shape).numel()
    raw = torch.arange(numel * DTYPES[dtype].itemsize, dtype=torch.uint8)
    if dtype == "bool":
        raw %= 2
    return raw.view(DTYPES[dtype]).reshape(shape)


def our_file(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """What streammerge's header and order make of the tensors."""
    described = {n: (FROM_TORCH[str(t.dtype)[6:]], tuple(t.shape)) for n, t in tensors.items()}
    order = header.storage_order((name, dtype) for name, (dtype, _) in described.items())
    data = b"".join(tensors[n].reshape(-1).view(torch.uint8).numpy().tobytes() for n in order)
    return header.encode_header({name: described[name] for name in order}) + data


def reference_file(tensors: Mapping[str, torch.Tensor]) -> bytes:
    return save(dict(tensors), metadata={"format": "pt"})


# --- headers ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4,), (0,), (2, 3), (3, 0, 2), (1, 1, 2)], ids=str)
def test_each_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    tensors = {"w": tensor(dtype, shape)}
    assert our_file(tensors) == reference_file(tensors)


@pytest.mark.parametrize("dtype", DIRECT)
def test_scalars_of_each_dtype(dtype: str) -> None:
    tensors = {"scalar": tensor(dtype, ())}
    assert our_file(tensors) == reference_file(tensors)


def test_a_packed_scalar_has_no_shape() -> None:
    """A 0-d float4 tensor holds two values, which no safetensors shape of no dims can say."""
    with pytest.raises(UnsupportedError, match="0-d"):
        header.encode_header({"w": ("F4", ())})


def test_no_tensors() -> None:
    assert our_file({}) == reference_file({})


def test_all_dtypes_in_one_file_are_in_the_reference_order() -> None:
    tensors = {f"{i:02}": tensor(name, (2, 2)) for i, name in enumerate(sorted(DTYPES))}
    assert our_file(tensors) == reference_file(tensors)
    backwards = dict(reversed(tensors.items()))
    assert our_file(backwards) == our_file(tensors)


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        'quo"te',
        "back\\slash",
        "sla/sh",
        "".join(map(chr, range(32))),
        "\x7f\x80\x9f",
        "\u2028\u2029",
        "Gewicht.größe",
        "重み.層",
        "\U0001f525.weight",
        "e\u0301 and \u00e9",
        "\ud7ff\ue000\ufffe\uffff",
        "__metadata__x",
        "a" * 5000,
    ],
    ids=ascii,
)
def test_names(name: str) -> None:
    tensors = {name: tensor("float32", (2,)), "b": tensor("float32", (1,))}
    ours = our_file(tensors)
    assert ours == reference_file(tensors)
    assert set(load(ours)) == set(tensors)


def test_names_are_sorted_by_code_point_within_a_dtype() -> None:
    """UTF-16 order would put U+10000 before U+FFFF."""
    tensors = {
        name: tensor("float32", (1,))
        for name in ("\U00010000", "\uffff", "z", "a", "A", "\u00e9", "layer.10", "layer.9", "")
    }
    assert our_file(tensors) == reference_file(tensors)


@given(
    st.dictionaries(
        names,
        st.tuples(
            st.sampled_from(sorted(DIRECT)),
            st.lists(st.integers(0, 4), max_size=4).map(tuple),
        ),
        max_size=12,
    )
)
@fixed
def test_random_files(described: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    tensors = {name: tensor(dtype, shape) for name, (dtype, shape) in described.items()}
    assert our_file(tensors) == reference_file(tensors)


@given(st.integers(0, 40))
@fixed
def test_the_data_start_at_a_multiple_of_8(length: int) -> None:
    encoded = header.encode_header({"n" * length: ("U8", (3,))})
    (stated,) = struct.unpack_from("<Q", encoded)
    assert stated == len(encoded) - 8
    assert len(encoded) % 8 == 0
    assert json.loads(encoded[8:])["n" * length]["shape"] == [3]


@pytest.mark.parametrize("name", ["\ud800", "w.\udfff", "\udc80 from undecodable bytes"], ids=ascii)
def test_a_name_that_is_no_unicode_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="Unicode"):
        header.encode_header({"fine": ("F32", (1,)), name: ("F32", (1,))})


def test_the_reserved_name_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="__metadata__"):
        header.encode_header({"__metadata__": ("F32", (1,))})


def test_a_header_over_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        f"layer.{i}": ("F32", (2,)) for i in range(9)
    }
    length = len(header.encode_header(tensors)) - 8
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", length)
    header.encode_header(tensors)
    monkeypatch.setattr(header, "MAX_HEADER_BYTES", length - 1)
    with pytest.raises(UnsupportedError, match=f"{length:,}"):
        header.encode_header(tensors)


def test_the_limit_is_that_of_safetensors(tmp_path: Path) -> None:
    """One tensor whose name fills the header: the longest that opens, and one more."""
    start = len(header.encode_header({"": ("U8", (0,))})) - 8
    padding = header.MAX_HEADER_BYTES - start
    path = tmp_path / "model.safetensors"
    path.write_bytes(header.encode_header({"n" * padding: ("U8", (0,))}))
    with safe_open(path, "pt") as file:
        assert len(next(iter(file.keys()))) == padding
    with pytest.raises(UnsupportedError, match="100,000,008"):
        header.encode_header({"n" * (padding + 8): ("U8", (0,))})
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", len(content)) + content[8:] + b" " * 8)
    with pytest.raises(Exception, match=r"(?i)header too large"), safe_open(path, "pt"):
        pass


def test_itemsizes() -> None:
    for name, dtype in FROM_TORCH.items():
        assert ITEMSIZE[dtype] == DTYPES[name].itemsize
        assert header.tensor_nbytes(dtype, (3, 5)) == 15 * DTYPES[name].itemsize
    assert set(ITEMSIZE) == set(FROM_TORCH.values())


# --- distribution over files ---


def hub_split(sizes: Mapping[str, int], limit: int) -> dict[str, list[str]]:
    tensors = {name: torch.zeros(size, dtype=torch.int8) for name, size in sizes.items()}
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=limit)
    return split.filename_to_tensors


GOLDEN: dict[str, tuple[dict[str, int], int, list[list[str]]]] = {
    "G1": ({"a": 10, "b": 20}, 100, [["a", "b"]]),
    "G2": ({"a": 60, "b": 40, "c": 1}, 100, [["a", "b"], ["c"]]),
    "G3": ({"big": 150, "a": 10, "b": 10}, 100, [["big"], ["a", "b"]]),
    "G4": ({"a": 10, "big": 150, "b": 10, "c": 95}, 100, [["big"], ["a", "b"], ["c"]]),
    "G5": (
        {"a": 60, "b": 60, "c": 30, "d": 10, "e": 10},
        100,
        [["a"], ["b", "c", "d"], ["e"]],
    ),
    "G6": ({"a": 100, "b": 100, "c": 100}, 100, [["a"], ["b"], ["c"]]),
    "G7": ({"a": 0, "b": 99, "c": 0, "d": 2}, 100, [["a", "b", "c"], ["d"]]),
    "G9": ({"z": 60, "a": 60, "m": 30}, 100, [["z"], ["a", "m"]]),
    "G10": ({"a": 600, "b": 500}, 1000, [["a"], ["b"]]),
    "docstring": (
        {"a": 6, "b": 6, "c": 2, "d": 6, "e": 2, "f": 2},
        10,
        [["a"], ["b", "c"], ["d", "e", "f"]],
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_golden_splits(case: str) -> None:
    sizes, limit, expected = GOLDEN[case]
    assert list(hub_split(sizes, limit).values()) == expected
    assert header.split_into_shards(sizes, limit) == expected


def test_empty_tensors_stay_together() -> None:
    """To huggingface_hub they share a storage, and go where the first of them is."""
    sizes = {"a": 0, "b": 40, "c": 40, "d": 0, "e": 60, "f": 0}
    expected = [["a", "b", "d", "f"], ["e"], ["c"]]
    assert list(hub_split(sizes, 50).values()) == expected
    assert header.split_into_shards(sizes, 50) == expected


def test_nothing_to_split() -> None:
    assert header.split_into_shards({}, 100) == []


@given(st.lists(st.integers(0, 150), min_size=1, max_size=30), st.integers(1, 200))
@fixed
def test_random_splits(amounts: list[int], limit: int) -> None:
    sizes = {f"t{i * 7 % len(amounts)}.{i}": size for i, size in enumerate(amounts)}
    shards = header.split_into_shards(sizes, limit)
    ours = {header.shard_filename(i, len(shards)): shard for i, shard in enumerate(shards)}
    expected = hub_split(sizes, limit)
    assert ours == expected
    assert list(ours) == list(expected)


# --- the index ---


def test_the_index_is_what_the_hub_and_transformers_read(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 5))
    state = model.state_dict()
    sizes = {name: value.nbytes for name, value in state.items()}
    shards = header.split_into_shards(sizes, 70)
    weight_map = {}
    for i, shard in enumerate(shards):
        name = header.shard_filename(i, len(shards))
        save_file({key: state[key] for key in shard}, tmp_path / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    assert len(shards) > 2
    numel = sum(value.numel() for value in state.values())
    encoded = header.encode_index(weight_map, sum(sizes.values()), numel)
    (tmp_path / header.INDEX_FILE).write_bytes(encoded)

    copy = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2), torch.nn.Linear(2, 5))
    load_torch_model(copy, tmp_path, strict=True)
    for name, value in copy.state_dict().items():
        assert torch.equal(value, state[name])

    from transformers.utils.hub import get_checkpoint_shard_files

    files, metadata = get_checkpoint_shard_files(str(tmp_path), str(tmp_path / header.INDEX_FILE))
    assert sorted(Path(file).name for file in files) == sorted(set(weight_map.values()))
    assert metadata["weight_map"] == weight_map
    assert metadata["total_size"] == sum(sizes.values())


def test_the_index_is_laid_out_as_transformers_writes_it(tmp_path: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    written = (tmp_path / header.INDEX_FILE).read_bytes()
    sizes = {name: value.nbytes for name, value in model.state_dict().items()}
    ours = header.encode_index(
        json.loads(written)["weight_map"],
        sum(sizes.values()),
        sum(value.numel() for value in model.state_dict().values()),
    )
    assert ours == written


@given(st.dictionaries(names, st.sampled_from(["a", "b"]), min_size=1, max_size=5))
@fixed
def test_any_name_survives_the_index(weight_map: dict[str, str]) -> None:
    assert json.loads(header.encode_index(weight_map, 0, 0))["weight_map"] == weight_map
