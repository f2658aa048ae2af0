"""TensorFlow's checkpoints: every tensor as TensorFlow reads it; damage ends in a sentence and takes no memory."""

from __future__ import annotations

import shutil
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertrain.base.errors import UserError
from bertrain.weights.tensor_bundle import Bundle, open_bundle
from tests import bundles

GOLDEN = Path(__file__).parents[1] / "golden"
GOOGLE = GOLDEN / "tf1-google" / "bert_model.ckpt"
MLPERF = GOLDEN / "tf1-mlperf" / "model.ckpt-28252"


def assert_holds(bundle: Bundle, values: dict[str, np.ndarray]) -> None:
    assert set(bundle.entries) == set(values)
    for name, value in values.items():
        tensor = bundle.read(name).numpy()
        assert tensor.dtype == value.dtype
        assert tensor.shape == value.shape, name
        assert tensor.tobytes() == value.tobytes(), name


@pytest.mark.parametrize(("prefix", "files"), [(GOOGLE, 1), (MLPERF, 2)])
def test_every_tensor_is_what_tensorflow_reads(prefix: Path, files: int) -> None:
    """Optimizer slots too. The values were read by TensorFlow itself (tests/golden/make_tf1.py)."""
    bundle = open_bundle(prefix)
    assert bundle.num_shards == files
    assert_holds(bundle, dict(np.load(prefix.parent / "values.npz")))


@pytest.mark.parametrize("snappy", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_compressed_and_in_several_files(tmp_path: Path, snappy: bool, num_shards: int) -> None:
    """TensorFlow 2.21 reads what `tests/bundles.py` writes, compressed too; it writes no compressed ones itself."""
    values = dict(np.load(GOOGLE.parent / "values.npz"))
    values |= {
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "double": np.array([[1.5]]),
        "none": np.zeros((0, 4)),
    }
    bundles.write_bundle(tmp_path / "model", values, snappy=snappy, num_shards=num_shards)
    assert_holds(open_bundle(tmp_path / "model"), values)


def outcome(prefix: Path) -> dict[str, bytes] | str:
    """What a bundle holds, or the sentence it is refused with; nothing else may come of one."""
    try:
        bundle = open_bundle(prefix)
        return {name: bundle.read(name).numpy().tobytes() for name in bundle.entries}
    except UserError as error:
        return f"{error} [{error.code}]"


def copy_of(prefix: Path, folder: Path) -> Path:
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        shutil.copy(path, folder)
    return folder / prefix.name


def test_a_flipped_byte_or_a_cut_is_never_taken_for_weights(tmp_path: Path) -> None:
    prefix = copy_of(GOOGLE, tmp_path)
    whole = outcome(prefix)
    assert isinstance(whole, dict)
    for path in (prefix.with_name("bert_model.ckpt.index"), prefix.with_name("bert_model.ckpt.data-00000-of-00001")):
        content = path.read_bytes()
        for place in range(0, len(content), 311):
            path.write_bytes(content[:place])
            assert isinstance(outcome(prefix), str), f"{path.name} cut off at {place}"
            path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            found = outcome(prefix)
            assert isinstance(found, str) or found == whole, f"{path.name} flipped at {place}"
        path.write_bytes(content[:-100] + bytes([content[-100] ^ 4]) + content[-99:])
        assert isinstance(outcome(prefix), str)
        path.write_bytes(content)
    assert outcome(prefix) == whole
    path.unlink()
    assert "[unreadable-file]" in str(outcome(prefix))


def test_what_is_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "model"
    prefix.with_name("model.data-00000-of-00001").write_bytes(b"\0" * 16)
    index = prefix.with_name("model.index")
    good = bundles.entry("float32", (2, 2), 0, 0, b"\0" * 16)
    bundles.write_index(prefix, {b"a": good})
    assert outcome(prefix) == {"a": b"\0" * 16}

    def check(entries: dict[bytes, bytes], *named: str, code: str = "damaged-weights") -> None:
        bundles.write_index(prefix, entries)
        found = str(outcome(prefix))
        assert all(value in found for value in (f"[{code}]", str(prefix), *named)), found

    check({b"a": good + bundles.field(7, b"")}, "'a'", "slices")
    check({b"\0\x01a": good}, "slices")
    check({b"a": bundles.entry("float32", (2, 3), 0, 0, b"\0" * 16)}, "'a'", "(2, 3)", "16 bytes")
    check({b"a": bundles.entry("float32", (2, 2), 1, 0, b"\0" * 16)}, "'a'")
    check({b"a": bundles.entry("float32", (4,), 0, 8, b"\0" * 16)}, "a ends at byte 24")
    check({b"a": bundles.entry("float32", (4,), 0, 0, b"\1" * 16)}, "checksum of a ")
    check({b"a": bundles.field(1, 99)}, "'a'", "99")
    check({b"a": bundles.field(1, 7)}, "a of ", "string", code="unsupported-tensor")
    huge = bundles.field(1, 1) + bundles.field(2, bundles.shape_message((1 << 40, 1 << 40))) + bundles.field(5, 16)
    check({b"a": huge}, "'a'", "16 bytes")

    rows = [bundles.block([(b"", bundles.header()), (b"b", good)]), bundles.block([(b"a", good)])]
    for content, named in (
        (b"short", "48"),
        (b"x" * 100, "sorted table"),
        (bundles.table(rows, [b"b", b"b"]), "sorted"),
        (bundles.table([bundles.block([(b"a", good)])], [b"a"]), "header"),
        (bundles.table([bundles.block([(b"", bundles.header(endianness=1))])], [b""]), "big-endian"),
        (bundles.table([bundles.block([(b"", bundles.header(0))])], [b""]), "0 data files"),
        (b"\xff" * 40 + struct.pack("<Q", bundles.MAGIC), str(index)),
    ):
        index.write_bytes(content)
        found = str(outcome(prefix))
        assert "[damaged-weights]" in found
        assert named in found


def test_a_small_file_cannot_ask_for_much_memory(tmp_path: Path) -> None:
    """Names that share their beginnings, and compressed blocks, are two ways to say much in few bytes."""
    prefix = tmp_path / "model"
    index = prefix.with_name("model.index")
    lie = bundles.varint(1 << 40) + b"\0" * 50  # a compressed block that says it is a terabyte
    block = lie + b"\1" + struct.pack("<I", bundles.masked(lie + b"\1"))
    handle = bundles.varint(0) + bundles.varint(len(lie))
    index.write_bytes(block + (handle * 2).ljust(40, b"\0") + struct.pack("<Q", bundles.MAGIC))
    assert "impossible size" in str(outcome(prefix))
    names = [(b"n" * 2000 + b"%05d" % number, b"") for number in range(1000)]
    rows = bundles.block([(b"", bundles.header()), *names], restart_every=10_000)
    index.write_bytes(bundles.table([rows], [names[-1][0]]))
    size = index.stat().st_size
    assert size < 12_000
    tracemalloc.start()
    assert "too long" in str(outcome(prefix))
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert used < 100 * size


@settings(max_examples=150)
@given(data=st.data())
def test_damage_with_right_checksums_ends_in_a_sentence(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The checksums of blocks are made right again, so that whatever reads their content meets the damage."""
    folder = tmp_path_factory.mktemp("fuzz")
    prefix = folder / "model"
    prefix.with_name("model.data-00000-of-00001").write_bytes(bytes(range(64)))
    good = bundles.entry("float32", (2, 2), 0, 0, bytes(range(16)))
    content = bundles.block([(b"", bundles.header()), (b"bert/a", good), (b"bert/b", good)])
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content)))
        kept = data.draw(st.integers(0, 3))
        content = content[:place] + data.draw(st.binary(max_size=4)) + content[place + kept :]
    prefix.with_name("model.index").write_bytes(bundles.table([content], [b"bert/b"], snappy=data.draw(st.booleans())))
    outcome(prefix)


@settings(max_examples=100)
@given(content=st.binary(max_size=300))
def test_any_bytes_with_the_mark_of_a_table_end_in_a_sentence(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    prefix = tmp_path_factory.mktemp("fuzz") / "model"
    prefix.with_name("model.index").write_bytes(content + struct.pack("<Q", bundles.MAGIC))
    assert isinstance(outcome(prefix), str)
